// Try a tool: a form and its JSON as one document, checked while one types; run like any other call, and what came of it.

import { useState } from "preact/hooks";
import type { Checked, JsonObject, ToolInfo, ToolsView } from "../api";
import { at, get, may, me, post } from "../api-client";
import { attempt, begin, isRunning, Outcome } from "../attempt";
import { use } from "../cell";
import { forCurl, forPython, forShell, noCurl } from "../commands";
import { type Draft, drafted, Editor, Judged, read, useChecked } from "../form";
import { toolsChanged } from "../live";
import { go, link, route } from "../route";
import { initial, placed, short } from "../schema";
import { Button, Copy, Empty, Go, Notice, Panel, plain, Problem, say, Shown, useAction, useData } from "../ui";

const drafts = new Map<string, JsonObject>();

export function Try() {
  const place = use(route);
  const changed = use(toolsChanged);
  const { data, failure, again } = useData((signal) => get<ToolsView>(at("tools"), {}, signal), [changed]);
  if (!data) return failure ? <Problem of={failure} again={again} /> : <Empty icon="try" title="Looking which tools there are…" />;
  const named = (name?: string) => data.tools.find((each) => each.name === name);
  const tool = place.name ? named(place.name) : (named(attempt.value?.name) ?? data.tools[0]);
  if (!tool && !place.name)
    return (
      <Empty icon="tools" title="The server has no tools">
        Add one with <code>@server.tool</code>, and it appears here.
      </Empty>
    );
  if (!tool)
    return (
      <Empty icon="tools" title="There is no such tool">
        <Shown text={place.name} max={200} /> is not here now. It may have been removed, or has another name. <a href={link("try")}>Choose another one</a>
      </Empty>
    );
  return <Bench key={tool.name} tool={tool} tools={data.tools} given={place.query.get("arguments")} />;
}

function start(tool: ToolInfo, given: string | null): Draft {
  const asked = given ? read(given, {}) : null;
  if (asked && !asked.broken) return drafted(asked.value);
  return drafted(drafts.get(tool.name) ?? initial(tool.input_schema, tool.input_schema));
}

function Bench({ tool, tools, given }: { tool: ToolInfo; tools: ToolInfo[]; given: string | null }) {
  const who = use(me)!;
  const [draft, setDraft] = useState(() => start(tool, given));
  const [revision, setRevision] = useState("");
  const allowed = may("call");
  const [checked, checking] = useChecked(
    draft,
    (value) => post<Checked>(at("try", "check"), { tool: tool.name, arguments: value }),
    allowed ? tool.fingerprint || tool.name : "",
  );
  const going = isRunning(use(attempt));
  const place = link("try", tool.name);
  const [run, starting] = useAction(async () => {
    if (draft.broken || going || !allowed) return;
    await begin({ tool: tool.name, arguments: draft.value, revision: revision || who.server.revisions[0] || "" }, place);
  });
  const change = (next: Draft) => {
    setDraft(next);
    if (!next.broken) drafts.set(tool.name, next.value);
  };
  const problems = checked ? placed(checked.problems) : [];
  const { server } = who;
  const asks = tool.annotations.destructiveHint === true;
  const stuck = noCurl(server.endpoint, server.revisions);
  return (
    <div
      onKeyDown={(event) => {
        if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
        event.preventDefault();
        void run();
      }}
    >
      <div class="title">
        <h1>Try</h1>
        <select
          class="pick-tool grow"
          aria-label="Tool"
          data-testid="pick-tool"
          value={tool.name}
          onChange={(event) => go(link("try", event.currentTarget.value))}
        >
          {tools.map((each) => (
            <option value={each.name} key={each.name}>
              {plain(each.title && each.title !== each.name ? `${short(each.title, 80)} (${short(each.name, 80)})` : short(each.name, 80))}
            </option>
          ))}
        </select>
        <label class="row">
          <span class="muted">Revision</span>
          <select data-testid="revision" value={revision} onChange={(event) => setRevision(event.currentTarget.value)}>
            {server.revisions.map((each, index) => (
              <option value={index ? each : ""} key={each}>
                {each}
              </option>
            ))}
          </select>
        </label>
        <Go to={link("tools", tool.name)} icon="tools">
          Definition
        </Go>
      </div>
      <div class="bench">
        <Panel
          title="Arguments"
          extra={
            <Button kind="quiet" small icon="refresh" testid="reset" onClick={() => change(drafted(initial(tool.input_schema, tool.input_schema)))}>
              Start over
            </Button>
          }
        >
          <div class="stack">
            {tool.description && (
              <Shown in="p.about" text={tool.description} max={600} />
            )}
            {!tool.exposed && (
              <Notice tone="warn">
                <p>
                  It is not offered to you now: <Shown text={tool.hidden_because} />
                </p>
              </Notice>
            )}
            <Editor schema={tool.input_schema} draft={draft} onChange={change} problems={problems} testid="try-form" />
          </div>
          <div class="runner">
            <Judged checked={checked} checking={checking} problems={problems} broken={draft.broken} />
            <div class="row">
              <Button kind="primary" icon="try" testid="run" busy={starting} disabled={!!draft.broken || going || !allowed} onClick={run} title="Ctrl+Enter">
                {checked && !checked.valid ? "Run anyway" : "Run"}
              </Button>
              <kbd>Ctrl</kbd>
              <kbd>Enter</kbd>
              <span class="push row copies">
                <span class="muted">Copy as</span>
                <Copy
                  word="CLI"
                  label="Copy as CLI: a command for a shell"
                  testid="copy-cli"
                  text={() => forShell(server.target, tool.name, draft.value, revision)}
                />
                <Copy word="Python" label="Copy as Python" testid="copy-python" text={() => forPython(server.target, tool.name, draft.value, asks, revision)} />
                {stuck ? (
                  <Button kind="quiet" small icon="copy" title={stuck} testid="copy-curl" onClick={() => say(stuck)}>
                    curl
                  </Button>
                ) : (
                  <Copy
                    word="curl"
                    label="Copy as a curl command"
                    testid="copy-curl"
                    text={() => forCurl(server.endpoint, server.revisions[0]!, tool.name, draft.value, tool.input_schema)}
                  />
                )}
              </span>
            </div>
            {!allowed && (
              <p class="muted">
                You may look, not call: ask for a link with the role <code>call</code>.
              </p>
            )}
          </div>
        </Panel>
        <Outcome place={place} title="Nothing run yet" todo="Fill in the arguments and run it." />
      </div>
    </div>
  );
}
