// Try a tool: a form and its JSON as one document, checked while one types; run like any other call, and what came of it.

import { useState } from "preact/hooks";
import type { CallError, Checked, JsonObject, Progress, Question, Result, ToolInfo, ToolsView, TryEvent } from "../api";
import { at, get, may, me, post } from "../api-client";
import { Cell, use } from "../cell";
import { forCurl, forPython, forShell, noCurl } from "../commands";
import { type Draft, drafted, Editor, Judged, read, useChecked } from "../form";
import { now, onTry, running, stream, toolsChanged } from "../live";
import { Ask } from "../question";
import { Lines, LogLevel, Refusal, ResultView, wasCancelled } from "../result";
import { go, link, route } from "../route";
import { initial, placed, short } from "../schema";
import { Bar, Button, Copy, duration, Elapsed, Empty, Fold, Go, Notice, Panel, plain, Problem, say, Shown, State, useAction, useData } from "../ui";

// What is tried goes on while other screens are looked at: an approval may be needed there.

interface Attempt {
  id: string;
  tool: string;
  began: number;
  progress?: Progress;
  logs: { level: string; text: string }[];
  question?: { key: string; question: Question };
  aside: boolean; // the question was put aside
  cancelling: boolean;
  lost: boolean; // the stream broke while it ran: how it ended was not heard
  done?: { seconds: number; call: string; result?: Result; error?: CallError };
}

const MAX_LOGS = 500;
const MAX_EARLY = 200;

const attempt = new Cell<Attempt | null>(null);
const drafts = new Map<string, JsonObject>();
let early: TryEvent[] = []; // what was heard before the server had said which one it is about

onTry((event) => {
  if (attempt.value?.id === event.id) take(event);
  else early = [...early.slice(1 - MAX_EARLY), event];
});
stream.watch(() => {
  const it = attempt.value;
  if (stream.value === "lost" && it && !it.done) attempt.set({ ...it, lost: true });
});

function take(event: TryEvent): void {
  const it = attempt.value!;
  if (event.kind === "progress") attempt.set({ ...it, progress: event.progress });
  else if (event.kind === "log") attempt.set({ ...it, logs: [...it.logs.slice(1 - MAX_LOGS), { level: event.level, text: event.text }] });
  else if (event.kind === "question") attempt.set({ ...it, question: { key: event.key, question: event.question }, aside: false });
  else attempt.set({ ...it, question: undefined, done: event });
}

async function begin(tool: string, given: JsonObject, revision: string): Promise<void> {
  early = [];
  const { id } = await post<{ id: string }>(at("try"), { tool, arguments: given, revision });
  attempt.set({ id, tool, began: now(), logs: [], aside: false, cancelling: false, lost: false });
  for (const event of early) if (event.id === id) take(event);
  early = [];
  if (matchMedia("(max-width: 900px)").matches) requestAnimationFrame(() => document.querySelector(".outcome")?.scrollIntoView({ block: "nearest" }));
}

export function Try() {
  const place = use(route);
  const changed = use(toolsChanged);
  const { data, failure, again } = useData((signal) => get<ToolsView>(at("tools"), {}, signal), [changed]);
  if (!data) return failure ? <Problem of={failure} again={again} /> : <Empty icon="try" title="Looking which tools there are…" />;
  const named = (name?: string) => data.tools.find((each) => each.name === name);
  const tool = place.name ? named(place.name) : (named(attempt.value?.tool) ?? data.tools[0]);
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
  const last = use(attempt);
  const mine = last?.tool === tool.name ? last : null;
  const going = !!last && !last.done && !last.lost;
  const [run, starting] = useAction(async () => {
    if (draft.broken || going || !allowed) return;
    await begin(tool.name, draft.value, revision || who.server.revisions[0] || "");
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
        <Outcome it={mine} other={last && !mine && !last.done ? last.tool : ""} who={who.who} />
      </div>
    </div>
  );
}

function Outcome({ it, other, who }: { it: Attempt | null; other: string; who: string }) {
  if (!it)
    return (
      <Panel title="Result" class="outcome">
        {other ? (
          <Empty icon="run" title="Another call is under way">
            <a href={link("try", other)}>
              Look at <Shown text={short(other, 80)} />
            </a>
          </Empty>
        ) : (
          <Empty icon="try" title="Nothing run yet">
            Fill in the arguments and run it. It runs as{" "}
            <Shown in="strong" text={who} max={80} />
            , through the same rules, limits and records as any call.
          </Empty>
        )}
      </Panel>
    );
  const done = it.done;
  const answer = async (said: { action: string; content?: JsonObject }) => {
    await post(at("try", it.id, "answer"), { key: it.question!.key, ...said });
    if (attempt.value?.id === it.id) attempt.set({ ...attempt.value, question: undefined });
  };
  return (
    <Panel
      title="Result"
      class="outcome"
      extra={
        <span class="row" aria-live="polite">
          {done ? (
            <>
              <State of={outcomeOf(done)} testid="outcome" />
              <span class="num muted">{duration(done.seconds)}</span>
              {done.call && (
                <a href={link("calls", done.call)} data-testid="story">
                  Its story
                </a>
              )}
            </>
          ) : (
            !it.lost && (
              <>
                <State of={it.cancelling ? "cancelling" : "running"} testid="outcome" /> <Elapsed since={it.began} />
              </>
            )
          )}
        </span>
      }
    >
      <div class="stack">
        {!done && <Going it={it} />}
        {it.question && it.aside && (
          <Notice
            tone="info"
            title={
              <>
                <Shown text={it.question.question.server} max={80} /> waits for your answer.
              </>
            }
          >
            <Button small testid="question-again" onClick={() => attempt.set({ ...it, aside: false })}>
              Answer it
            </Button>
          </Notice>
        )}
        {it.question && !it.aside && (
          <Ask key={it.question.key} question={it.question.question} answer={answer} aside={() => attempt.set({ ...it, aside: true })} />
        )}
        {done?.result && <ResultView result={done.result} call={done.call} />}
        {done?.error && <Refusal error={done.error} />}
        {it.logs.length > 0 && (
          <Fold title={`Log (${it.logs.length})`} open={!done || it.logs.length < 20}>
            <Lines label="Log" testid="logs" of={it.logs.map(({ level, text }) => ["", <LogLevel of={level} />, text])} />
          </Fold>
        )}
      </div>
    </Panel>
  );
}

function outcomeOf(done: NonNullable<Attempt["done"]>): string {
  if (done.error && wasCancelled(done.error)) return "cancelled";
  if (done.error)
    return { protocol: "protocol error", transport: "connection broke" }[done.error.kind as string] ?? done.error.kind;
  return done.result?.is_error ? "tool_error" : "ok";
}

function Going({ it }: { it: Attempt }) {
  const row = use(running).find((each) => each.from === `console ${it.id}`);
  const [cancel, busy] = useAction(async () => {
    await post(at("try", it.id, "cancel"));
    if (attempt.value?.id === it.id) attempt.set({ ...attempt.value, cancelling: true });
  });
  if (it.lost)
    return (
      <Notice tone="warn" title="How it ended was not heard">
        <p>
          The connection to the server broke while the call ran. It may have gone on: look under <a href="#/now">Now</a>.
        </p>
        <Button small onClick={() => attempt.set(null)}>
          Put it aside
        </Button>
      </Notice>
    );
  return (
    <div class="trial" data-testid="going">
      <Bar done={it.progress?.done ?? 0} total={it.progress?.total} label="Progress" />
      <p class="trial-text" data-testid="progress">
        {it.progress ? (
          <>
            <span class="num">
              {it.progress.done}
              {it.progress.total === undefined ? "" : ` of ${it.progress.total}`}
            </span>{" "}
            {it.progress.message && <Shown text={it.progress.message} max={300} />}
          </>
        ) : (
          "It runs."
        )}
      </p>
      {row?.state === "asking" && (
        <Notice tone="warn" title="A person has to agree first">
          <a href={link("approve", row.approval ?? "")}>Look at it under Approve</a>
        </Notice>
      )}
      <Button icon="stop" kind="danger" small busy={busy} disabled={it.cancelling} onClick={cancel} testid="cancel-try">
        {it.cancelling ? "Cancel requested" : "Cancel"}
      </Button>
    </div>
  );
}
