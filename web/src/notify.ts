// Notifications of the browser for calls that wait: never with argument values, and only after a person has asked for them.
import { useState } from "preact/hooks";
import type { Approval } from "./api";
import { go, link } from "./route";

type State = NotificationPermission | "none"; // none: this browser has no notifications here

const now = (): State => (typeof Notification === "undefined" ? "none" : Notification.permission);

/** Whether they may be shown, and what asks for it. */
export function useNotifications(): [state: State, ask: () => Promise<void>] {
  const [state, setState] = useState(now);
  return [state, async () => setState(await Notification.requestPermission())];
}

/** Show that a call waits, to whoever does not look at this window. */
export function notify(of: Approval, server: string, plain: (text: string) => string): void {
  if (now() !== "granted" || document.hasFocus()) return;
  try {
    const shown = new Notification(`${plain(server)}: a call is waiting for approval`, { body: `${plain(of.title || of.tool)} for ${plain(of.who)}`, tag: of.id });
    shown.onclick = () => {
      window.focus();
      go(link("approve", of.id));
      shown.close();
    };
  } catch {
    // some phones have the name, and refuse to make one
  }
}
