// Stops a tool or an upstream at once, in all processes, wherever it is looked at.

import { useState } from "preact/hooks";
import { at, may, post } from "./api-client";
import { Button, Dialog, plain, say, Shown, useAction } from "./ui";

/** A button that stops a tool, or the upstream it is of; it asks which, and whether. */
export function Stop({ tool = "", upstream = "", kind = "plain" }: { tool?: string; upstream?: string; kind?: "plain" | "danger" }) {
  const [asked, ask] = useState(false);
  const [whole, setWhole] = useState(!tool);
  const [stop, busy] = useAction(async () => {
    if (whole) await post(at("upstreams", upstream, "switch"), { on: false });
    else await post(at("tools", tool, "switch"), { on: false, cancel: true });
    ask(false);
    say(`${plain(whole ? upstream : tool)} is stopped.`);
  });
  return (
    <>
      <Button kind={kind} icon="stop" disabled={!may("manage")} title={may("manage") ? undefined : "Needs the role manage"} onClick={() => ask(true)} testid="stop">
        Stop…
      </Button>
      {asked && (
        <Dialog
          title={
            <>
              Stop <Shown text={whole ? upstream : tool} max={80} line />?
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
            {tool && upstream && (
              <div class="segments" role="radiogroup" aria-label="What to stop">
                {[false, true].map((all) => (
                  <label key={String(all)}>
                    <input type="radio" name="what-to-stop" checked={whole === all} onChange={() => setWhole(all)} data-testid={all ? "stop-upstream" : "stop-tool"} />
                    <span>{all ? <>all of <Shown text={upstream} max={40} line /></> : "only this tool"}</span>
                  </label>
                ))}
              </div>
            )}
            <p>
              {whole ? "Its calls that run are cancelled, its connections are closed, and new calls are refused" : "Its calls that run are cancelled, and no caller sees it any more"}: at once, for all
              callers, until it is started again or the server is.
            </p>
          </div>
        </Dialog>
      )}
    </>
  );
}
