// How the page asks the server: JSON, the token of the session on every request, and failures that say what would be right.
import type { Failure, Me, Problem, SignedIn } from "./api";
import { Cell } from "./cell";

/** Who is signed in; null: nobody; undefined: not known yet. */
export const me = new Cell<Me | null | undefined>(undefined);

/** Why nobody is signed in, where there is more to say than that. */
export const signedOutBecause = new Cell("");

// Browsers send the cookie to every port of the host. What is stored is for this origin alone, its port included; all its windows share it.
const HELD = "handrail-csrf";
let held = "";

function token(): string {
  try {
    return localStorage.getItem(HELD) ?? held;
  } catch {
    return held; // a browser that stores nothing: for this window, until it is loaded again
  }
}

function hold(csrf: string): void {
  held = csrf;
  try {
    if (csrf) localStorage.setItem(HELD, csrf);
    else localStorage.removeItem(HELD);
  } catch {
    // see above
  }
}

/** Another window has signed in or out: so has this one. */
window.addEventListener("storage", (event) => {
  if (event.key !== HELD) return;
  if (event.newValue) void signIn("");
  else me.set(null);
});

export class Failed extends Error implements Failure {
  error: string;
  problems: Problem[];
  status: number; // 0: the server could not be reached

  constructor(status: number, failure: Failure) {
    super(failure.error);
    this.status = status;
    this.error = failure.error;
    this.problems = failure.problems ?? [];
  }
}

type Query = { [name: string]: string | number | boolean | undefined };

/** A path of the API, each part encoded: at("tools", name, "switch"). */
export function at(...parts: (string | number)[]): string {
  return ["api", ...parts].map((part) => encodeURIComponent(part)).join("/");
}

/** The same with a query; empty values are left out. */
export function asking(path: string, query: Query): string {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return text ? `${path}?${text}` : path;
}

export function get<T>(path: string, query: Query = {}, signal?: AbortSignal): Promise<T> {
  return send(asking(path, query), { signal }) as Promise<T>;
}

export async function getText(path: string, query: Query = {}, signal?: AbortSignal): Promise<string> {
  return (await respond(asking(path, query), { signal })).text();
}

export function post<T = unknown>(path: string, body: unknown = {}): Promise<T> {
  return send(path, {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "content-type": "application/json" },
  }) as Promise<T>;
}

async function send(path: string, options: RequestInit): Promise<unknown> {
  return (await respond(path, options)).json();
}

/** Save a file of the API. A link could not carry the token. */
export async function save(path: string): Promise<void> {
  const response = await respond(path);
  const file = document.createElement("a");
  file.href = URL.createObjectURL(await response.blob());
  file.download = /filename="([^"]*)"/.exec(response.headers.get("content-disposition") ?? "")?.[1] ?? "";
  file.click();
  setTimeout(() => URL.revokeObjectURL(file.href), 60_000); // when the browser has it for sure
}

export async function respond(path: string, options: RequestInit = {}): Promise<Response> {
  let response: Response;
  try {
    const headers = { ...options.headers, "x-handrail-csrf": token() };
    response = await fetch(path, { credentials: "same-origin", cache: "no-store", redirect: "error", ...options, headers });
  } catch (problem) {
    if (options.signal?.aborted) throw problem;
    throw new Failed(0, { error: "The server does not answer. Is it still running?" });
  }
  if (response.ok) return response;
  const failure = await response.json().catch(() => null);
  const error = typeof failure?.error === "string" ? failure.error : `The server answered with ${response.status}.`;
  if (response.status === 401 && path !== at("sign-in")) me.set(null);
  throw new Failed(response.status, { error, problems: failure?.problems });
}

/** What went wrong, in words. */
export function said(problem: unknown): string {
  return problem instanceof Error ? problem.message : String(problem);
}

/** Sign in with the code of a start link, or with the session there is. */
export async function signIn(code: string): Promise<void> {
  let why = "";
  if (code) {
    try {
      const signed = await post<SignedIn>(at("sign-in"), { code });
      hold(signed.csrf);
      me.set(signed);
      return;
    } catch (problem) {
      why = said(problem); // an old link beside a good session is no reason to be turned away
    }
  }
  try {
    me.set(await get<Me>(at("me")));
  } catch (problem) {
    const none = problem instanceof Failed && problem.status === 401;
    signedOutBecause.set(why || (none ? "" : said(problem)));
    me.set(null);
  }
}

export async function signOut(): Promise<void> {
  await post(at("sign-out"));
  hold("");
  signedOutBecause.set("You have signed out.");
  me.set(null);
}

/** Whether this session may do that: call, approve, manage. */
export function may(role: Me["roles"][number]): boolean {
  return me.value?.roles.includes(role) ?? false;
}
