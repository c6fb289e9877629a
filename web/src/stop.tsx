// Stops a tool, an upstream or a caller at once, in all processes, wherever it is looked at; and starts it again.

import { useState } from "preact/hooks";
import type { Stopped } from "./api";
import { at, may, post } from "./api-client";
import { Button, Dialog, plain, say, Shown, useAction } from "./ui";

type Kind = Stopped["kind"];
const WORDS: { [kind in Kind]: [word: string, what: string] } = {
  tool: ["this tool", "Its calls that run are cancelled, and new ones are refused"],
  upstream: ["its upstream", "Its calls that run are cancelled, its connections are closed, and new calls are refused"],
  caller: ["this caller", "The calls of this caller that run are cancelled, and new ones are refused, whatever they are for"],
};

/** A button that stops one of these; it asks which, and whether. Those without a name cannot be stopped. */
export function Stop({ kind = "plain", small, ...names }: { [kind in Kind]?: string } & { kind?: "plain" | "danger"; small?: boolean }) {
  const kinds = (Object.keys(WORDS) as Kind[]).filter((each) => names[each]);
  const [asked, ask] = useState(false);
  const [which, setWhich] = useState(kinds[0]!);
  const [reason, setReason] = useState("");
  const name = names[which] ?? "";
  const [stop, busy] = useAction(async () => {
    await post(at("stops"), { kind: which, name, on: false, reason: reason.trim() });
    ask(false);
    say(`${plain(name)} is stopped.`);
  });
  return (
    <>
      <Button kind={kind} icon="stop" small={small} disabled={!may("manage")} title={may("manage") ? undefined : "Needs the role manage"} onClick={() => ask(true)} testid="stop">
        Stop…
      </Button>
      {asked && (
        <Dialog
          title={
            <>
              Stop <Shown text={name} max={80} line />?
            </>
          }
          onClose={() => ask(false)}
          testid="stop-dialog"
          actions={
            <>
              <Button onClick={() => ask(false)}>No</Button>
              <Button kind="danger" icon="stop" busy={busy} onClick={stop} testid="stop-yes">
                Stop it
              </Button>
            </>
          }
        >
          <div class="stack">
            {kinds.length > 1 && (
              <div class="segments" role="radiogroup" aria-label="What to stop">
                {kinds.map((each) => (
                  <label key={each}>
                    <input type="radio" name="what-to-stop" checked={which === each} onChange={() => setWhich(each)} data-testid={`stop-${each}`} />
                    <span>{WORDS[each][0]}</span>
                  </label>
                ))}
              </div>
            )}
            <p>{WORDS[which][1]}: within a second, in every process, until somebody starts it again.</p>
            <label class="stack">
              <span class="muted">Reason, which callers are told</span>
              <input type="text" value={reason} maxLength={200} placeholder="stopped by an operator" onInput={(event) => setReason(event.currentTarget.value)} data-testid="stop-reason" />
            </label>
          </div>
        </Dialog>
      )}
    </>
  );
}

/** A button that lets it work again. */
export function Start({ kind, name, small }: { kind: Kind; name: string; small?: boolean }) {
  const [start, busy] = useAction(() => post(at("stops"), { kind, name, on: true }));
  return (
    <Button kind={small ? "plain" : "primary"} icon="try" small={small} busy={busy} disabled={!may("manage")} title={may("manage") ? undefined : "Needs the role manage"} onClick={start} testid={`start-${kind}`}>
      Start again
    </Button>
  );
}
