// Where the page is: the fragment of its address. Every state of the console has one.
import { Cell } from "./cell";

export interface Route {
  screen: string; // now, tools, resources, prompts, try, approve, calls, audit, upstreams, connections
  name: string; // what follows: a tool, a call, an approval; or ""
  query: URLSearchParams;
}

export const route = new Cell<Route>(read());

/** The address of a place: link("tools", name), link("audit", "", {tool}). Empty values are left out. */
export function link(screen: string, name = "", query: { [name: string]: string } = {}): string {
  const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value)).toString();
  return `#/${screen}${name ? `/${encodeURIComponent(name)}` : ""}${text ? `?${text}` : ""}`;
}

export type Kind = "tool" | "resource" | "prompt";

/** What was called: the labels of tools, resources and prompts tell them apart. */
export function kindOfCall(label: string): Kind {
  if (label.startsWith("prompt:")) return "prompt";
  return /^[a-z][a-z0-9+.-]*:/i.test(label) ? "resource" : "tool";
}

/** The page of what was called. */
export function home(label: string): string {
  const kind = kindOfCall(label);
  return link(`${kind}s`, kind === "prompt" ? label.slice("prompt:".length) : label);
}

/** Go there. With `replace` the way back does not lead over where we are. */
export function go(address: string, replace = false): void {
  if (replace) {
    history.replaceState(null, "", address);
    route.set(read());
  } else {
    location.hash = address;
  }
}

function read(): Route {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [screen, ...rest] = path.split("/");
  return { screen: screen || "now", name: decoded(rest.join("/")), query: new URLSearchParams(query) };
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // somebody typed it
  }
}

window.addEventListener("hashchange", () => route.set(read()));
