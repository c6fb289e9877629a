// The screens. Each is a file of its own, which a browser loads when somebody first looks at it.
import type { ComponentType } from "preact";
import { stream } from "./live";
import type { Route } from "./route";

type View = ComponentType<{ route: Route }>;

const FILES: { [screen: string]: () => Promise<View> } = {
  now: async () => (await import("./screens/now")).Now,
  tools: async () => (await import("./screens/tools")).Tools,
  resources: async () => (await import("./screens/resources")).Resources,
  prompts: async () => (await import("./screens/resources")).Prompts,
  try: async () => (await import("./screens/try")).Try,
  approve: async () => (await import("./screens/approve")).Approve,
  calls: async () => (await import("./screens/call")).Call,
  audit: async () => (await import("./screens/audit")).Audit,
  upstreams: async () => (await import("./screens/upstreams")).Upstreams,
  connections: async () => (await import("./screens/connections")).Connections,
};
const views = new Map<string, View>();

export const isScreen = (name: string): boolean => Object.hasOwn(FILES, name);

/** What draws a screen, once it is here. */
export const viewOf = (screen: string): View | undefined => views.get(screen);

/** Have it here. Browsers do not ask again for a script they once failed to get, so nobody is asked who is not there. */
export async function load(screen: string): Promise<void> {
  if (!isScreen(screen) || views.has(screen)) return;
  if (stream.value === "lost") throw new Error("The server is out of reach.");
  views.set(screen, await FILES[screen]!());
}
