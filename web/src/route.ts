// Where the page is: the fragment of its address. Every state of the console has one.
import { Cell } from "./cell";

export interface Route {
  screen: string; // now, tools, resources, prompts, try, approve, calls, audit, connections
  name: string; // what follows: a tool, a call, an approval; or ""
  query: URLSearchParams;
}

export const route = new Cell<Route>(read());

/** The address of a place: link("tools", name), link("audit", "", {tool}). Empty values are left out. */
export function link(screen: string, name = "", query: { [name: string]: string } = {}): string {
  const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value)).toString();
  return `#/${screen}${name ? `/${encodeURIComponent(name)}` : ""}${text ? `?${text}` : ""}`;
}

/** The page of what was called: of a prompt, a resource or a tool, which their labels tell apart. */
export function home(label: string): string {
  if (label.startsWith("prompt:")) return link("prompts", label.slice(7));
  return link(/^[a-z][a-z0-9+.-]*:/i.test(label) ? "resources" : "tools", label);
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
