// The whole story of one call. Its address is a permalink: a call that memory has lost is told from the audit.
import { useMemo, useState } from "preact/hooks";
import type { AuditRecord, Row, Story, Wire } from "../api";
import { at, get, may, me, post } from "../api-client";
import { use } from "../cell";
import { finished, running, runningTotal, totals } from "../live";
import { lossWords } from "../losses";
import { Lines, LogLevel, Refusal, ResultView } from "../result";
import { home, kindOfCall, link, type Route } from "../route";
import { Stop } from "../stop";
import { Bar, Button, bytes, clock, Clock, Code, Copy, count, duration, Elapsed, Empty, Facts, Go, JsonTree, Notice, Panel, Pill, plain, Problem, Save, Shown, State, Tabs, useAction, useData, useSlow } from "../ui";

/** The row of this call as the stream last told it. */
function useRow(id: string): Row | undefined {
  const now = use(running);
  const ended = use(finished);
  return useMemo(() => now.find((row) => row.id === id) ?? ended.find((row) => row.id === id), [now, ended, id]);
}

export function Call({ route }: { route: Route }) {
  return <CallStory key={route.name} id={route.name} />;
}

function CallStory({ id }: { id: string }) {
  const live = useRow(id);
  const [done, setDone] = useState(false);
  const calls = use(totals).calls;
  const hidden = use(runningTotal) > use(running).length; // it may run without being in the sample
  const unseen = useSlow(!done && !live && hidden ? calls : 0, 1000);
  const told = useSlow(live?.progress?.done, 1000);
  const { data, failure, again } = useData<Story>(
    async (signal) => {
      const story = await get<Story>(at("calls", id), {}, signal);
      setDone(story.row.state === "done");
      return story;
    },
    [id, live?.state, live?.stage, live?.approval, !live && !done, unseen, told],
  );
  if (!data) {
    if (!failure) return <div class="story" aria-busy="true" />;
    return (
      <div class="story">
        <Problem of={failure} again={again} />
        <p>
          <a href={link("audit", "", { text: id })}>Look for it in the audit</a>
        </p>
      </div>
    );
  }
  return <Told story={data} row={live && data.row.state !== "done" ? live : data.row} />;
}

function Told({ story, row }: { story: Story; row: Row }) {
  return (
    <div class="story" data-testid="story">
      <Top row={row} upstream={story.upstream?.name ?? ""} />
      {story.source === "audit" && (
        <Notice tone="quiet" title="Told from the audit">
          Arguments, results and the wire are kept in memory for the last 500 calls of the worker that ran them. What is on record is below.
        </Notice>
      )}
      <div class="story-parts">
        <div class="stack">
          <Arguments story={story} />
          <Outcome story={story} row={row} />
          {story.source === "memory" && <WireView id={row.id} wire={story.wire} />}
          <Records id={row.id} records={story.records} />
        </div>
        <div class="stack">
          <Panel title="Call">
            <Facts
              of={[
                ["Who", <Shown text={row.who} />],
                ["Client", row.client && <Shown text={row.client} />],
                ["From", row.from && <Shown text={row.from} />],
                ["Revision", row.revision],
                ["Began", row.began > 0 && <Clock at={row.began} exact />],
                ["Worker", row.worker && <Shown text={row.worker} />],
                [
                  "Trace",
                  story.trace && (
                    <span class="with-copy" data-testid="trace">
                      <Shown in="code" text={story.trace} />
                      <Copy text={story.trace} label="Copy the trace" />
                    </span>
                  ),
                ],
                ["Id", <code data-testid="call-id">{plain(row.id)}</code>],
              ]}
            />
          </Panel>
          <Legs story={story} row={row} />
          <Decision story={story} row={row} />
          <Stages story={story} row={row} />
          <Along story={story} row={row} />
        </div>
      </div>
    </div>
  );
}

const WORDS = { tool: "Tool", resource: "Resource", prompt: "Prompt" };

function Top({ row, upstream }: { row: Row; upstream: string }) {
  const kind = kindOfCall(row.tool);
  const [asked, setAsked] = useState(false);
  const [cancel, busy] = useAction(async () => {
    await post(at("calls", row.id, "cancel"));
    setAsked(true);
  });
  const going = row.state !== "done";
  const state = going ? (asked ? "cancelling" : row.state) : (row.outcome ?? "ended");
  return (
    <div class="title">
      <Shown in="h1" text={row.title || row.tool} max={120} line />
      {row.title && row.title !== row.tool && (
        <Shown in="code.muted" text={row.tool} max={120} line />
      )}
      <State of={state} label={row.tool} testid="state" />
      <span class="num grow">{going ? <Elapsed since={row.began} /> : duration(row.seconds)}</span>
      {going && (
        <Button kind="danger" icon="stop" busy={busy} disabled={state === "cancelling" || !may("manage")} testid={`cancel-${row.id}`} onClick={cancel}>
          {state === "cancelling" ? "Cancel requested" : "Cancel"}
        </Button>
      )}
      <Go to={home(row.tool)} icon={`${kind}s`}>
        {WORDS[kind]}
      </Go>
      {kind === "tool" && (
        <Go to={link("try", row.tool)} icon="try">
          Try
        </Go>
      )}
      {(going || upstream) && <Stop tool={kind === "tool" ? row.tool : ""} upstream={upstream} caller={row.who} />}
      <Copy text={() => location.href} word="Link" label="Copy the link to this call" testid="permalink" />
    </div>
  );
}

const WITHOUT: { [outcome: string]: string } = {
  input_required: "The server has asked for something. The client comes back with it, in a call of its own.",
  cancelled: "The call was cancelled before there was one.",
};

function Outcome({ story, row }: { story: Story; row: Row }) {
  const { result, refusal } = story;
  const none = row.state !== "done" ? "Not yet: the call is running." : story.source === "audit" ? "" : (WITHOUT[row.outcome ?? ""] ?? "The call ended without one.");
  if (!result && !refusal && !none) return null;
  return (
    <Panel title={refusal ? "Why not" : "Result"} extra={result && <span class="muted num">{bytes(result.bytes)}</span>}>
      {refusal && <NotDone kind={refusal.kind} text={refusal.text || refusal.kind} />}
      {result && <ResultView result={result} call={row.id} />}
      {!result && !refusal && <p class="muted">{none}</p>}
      {story.findings.length > 0 && (
        <Notice tone="warn" title="Cleaned before it was sent on">
          <ul>
            {story.findings.map((finding) => (
              <li key={finding}>
                <Shown text={finding} max={400} />
              </li>
            ))}
          </ul>
        </Notice>
      )}
    </Panel>
  );
}

const MISUNDERSTOOD = /^(parse|invalid_request|unknown_method|bad_params|unknown_tool|unknown_resource|unknown_prompt|needs_capability|version|envelope|mismatch|no_session)$/;

function NotDone({ kind, text }: { kind: string; text: string }) {
  const title = { internal: "The server failed", bad_arguments: "The arguments do not fit; it was not run" }[kind];
  if (title) {
    return (
      <div data-testid="result" data-kind={kind === "internal" ? kind : "protocol"}>
        <Notice tone={kind === "internal" ? "bad" : "warn"} title={title}>
          <Shown text={text} />
        </Notice>
      </div>
    );
  }
  return <Refusal error={{ kind: kind === "timeout" ? "timeout" : MISUNDERSTOOD.test(kind) ? "protocol" : "refused", message: text }} />;
}

function Arguments({ story }: { story: Story }) {
  const changed = story.sent !== undefined;
  const [which, setWhich] = useState<"used" | "sent">("used");
  if (story.arguments === undefined && !changed) return null;
  const value = (which === "sent" ? story.sent : story.arguments) ?? null;
  return (
    <Panel
      title="Arguments"
      extra={
        <span class="row">
          {changed && <Tabs names={{ used: "As used", sent: "As sent" }} at={which} onPick={setWhich} label="Which arguments" />}
          <Copy text={() => JSON.stringify(value, null, 2)} label="Copy the arguments" />
        </span>
      }
    >
      <JsonTree value={value} open={3} label="Arguments" key={which} />
      {story.repairs.length > 0 && (
        <div class="repairs">
          <h3>Repaired</h3>
          <ul>
            {story.repairs.map((one) => (
              <li key={one.path}>
                <Shown in="code" text={one.path || "/"} max={120} line />{" "}
                was{" "}
                <Shown in="code" text={one.sent} max={200} />
                , became{" "}
                <Shown in="code" text={one.became} max={200} />
              </li>
            ))}
          </ul>
        </div>
      )}
    </Panel>
  );
}

/** Which upstream served it, what each leg spoke, and what was lost between the two. */
function Legs({ story, row }: { story: Story; row: Row }) {
  const { server } = use(me)!;
  const leg = story.upstream;
  if (!leg) return null;
  const translated = leg.revision !== "" && leg.revision !== row.revision;
  return (
    <Panel title="Way" extra={<Pill tone={leg.lossy.length ? "warn" : "quiet"} icon={leg.lossy.length ? "warn" : "wire"}>{leg.lossy.length ? `${leg.lossy.length} lost` : translated ? "translated" : "as it is"}</Pill>} testid="legs">
      <ol class="legs">
        <li>
          <Shown in="strong" text={row.client || row.who} max={60} line /> <span class="muted fine">client</span>
        </li>
        <li class="leg num">{row.revision}</li>
        <li>
          <Shown in="strong" text={server.name} max={60} line /> <span class="muted fine">this gateway</span>
        </li>
        <li class="leg num">{leg.revision || "not reached"}</li>
        <li>
          <a href={link("upstreams", leg.name)} data-testid="served-by">
            <Shown text={leg.name} max={60} line />
          </a>{" "}
          <span class="muted fine">upstream</span>
        </li>
      </ol>
      {leg.lossy.length > 0 ? (
        <ul class="lost-on-the-way">
          {leg.lossy.map((id) => (
            <li key={id}>
              <Shown text={lossWords(id)} max={200} /> <Shown in="code.muted" text={id} max={20} line />
            </li>
          ))}
        </ul>
      ) : (
        <p class="muted">{!leg.revision ? "The call did not reach the upstream." : translated ? "Translated between the two revisions; nothing was lost." : "Both sides speak the same: nothing had to be translated."}</p>
      )}
    </Panel>
  );
}

function Decision({ story, row }: { story: Story; row: Row }) {
  if (!story.verdict && !story.rule && !story.agreed && !row.approval && !story.would_decide.length) return null;
  return (
    <Panel title="Decision">
      <Facts
        of={[
          ["Verdict", story.verdict && <State of={story.verdict} testid="verdict" />],
          ["Rule", story.rule && <Shown text={story.rule} max={400} />],
          ["Why", story.why && <Shown text={story.why} max={800} />],
          ["Agreed", story.agreed && <Shown text={story.agreed} max={400} />],
          ["Approval", row.approval && <a href={link("approve", row.approval)}>{plain(row.approval)}</a>],
          [
            "On trial",
            story.would_decide.length > 0 && (
              <ul data-testid="would-decide">
                {story.would_decide.map((each) => {
                  const at = each.lastIndexOf(": ");
                  return (
                    <li key={each}>
                      <Shown text={each.slice(0, at)} max={200} /> would say <State of={each.slice(at + 2)} />
                      {story.verdict === each.slice(at + 2) && <span class="muted"> as was decided</span>}
                    </li>
                  );
                })}
              </ul>
            ),
          ],
        ]}
      />
    </Panel>
  );
}

/** Where the time went: one bar per stage, each beginning where the one before ended. */
function Stages({ story, row }: { story: Story; row: Row }) {
  const past = story.stages.reduce((all, one) => all + one.ms, 0);
  const going = row.state !== "done" && !story.stages.some((one) => one.name === row.stage);
  const stages = going ? [...story.stages, { name: row.stage, ms: Math.max(0, row.seconds * 1000 - past) }] : story.stages;
  if (!stages.length) return null;
  const sum = stages.reduce((all, one) => all + one.ms, 0) || 1;
  let from = 0;
  return (
    <Panel title="Time" extra={<span class="muted num">{row.state === "done" ? duration(row.seconds) : "so far"}</span>}>
      <ol class="stages">
        {stages.map((stage, index) => {
          const start = from / sum;
          from += stage.ms;
          return (
            <li key={`${stage.name}-${index}`} data-testid={`stage-${stage.name}`}>
              <Shown in="span.stage-name" text={stage.name} max={40} line />
              <span class="stage-track">
                <span class="stage-bar" style={{ left: `${start * 100}%`, width: `${(stage.ms / sum) * 100}%` }} />
              </span>
              <span class="stage-time num">{duration(stage.ms / 1000)}</span>
            </li>
          );
        })}
      </ol>
    </Panel>
  );
}

/** What the tool told while it ran. */
function Along({ story, row }: { story: Story; row: Row }) {
  const since = (when?: number) => (when ? `+${duration(when - row.began)}` : "");
  const last = row.progress ?? story.progress.at(-1);
  return (
    <>
      {last && (
        <Panel title="Progress" testid="progress">
          <Bar done={last.done} total={last.total} label="Progress" />
          <Lines label="Progress" of={story.progress.slice(-200).map((one) => [since(one.at), `${count(one.done)}${one.total ? ` of ${count(one.total)}` : ""}`, one.message ?? ""])} />
        </Panel>
      )}
      {story.logs.length > 0 && (
        <Panel title="Log" testid="logs">
          <Lines label="Log" of={story.logs.slice(-500).map((one) => [since(one.at), <LogLevel of={one.level} />, one.text])} />
        </Panel>
      )}
    </>
  );
}

const ENDS = 6;

function WireView({ id, wire }: { id: string; wire: Wire[] }) {
  const [how, setHow] = useState<"pretty" | "raw">("pretty");
  const [all, setAll] = useState(false);
  const left = all ? 0 : Math.max(0, wire.length - 2 * ENDS); // between the first and the last ones
  return (
    <Panel class="late" title="Wire" extra={<Tabs names={{ pretty: "Pretty", raw: "Raw" }} at={how} onPick={setHow} label="How to show the wire" />}>
      {wire.length ? (
        <ol class="wire">
          {wire.map((message, index) => {
            if (left && index === ENDS) {
              return (
                <li key={index}>
                  <Button small onClick={() => setAll(true)}>
                    {count(left)} messages between
                  </Button>
                </li>
              );
            }
            if (left && index > ENDS && index < ENDS + left) return null;
            return (
              <li key={index} data-testid={`wire-${index}`}>
                <p class="wire-head muted">
                  <Pill tone={message.way === "in" ? "info" : "quiet"} icon="wire">
                    {message.way === "in" ? "from the client" : "to the client"}
                  </Pill>
                  <span class="num">{clock(message.at, true)}</span>
                  <span class="num">{bytes(message.bytes)}</span>
                  {message.cut && (
                    <Save to={at("calls", id, "wire", index)} small>
                      all of it
                    </Save>
                  )}
                </p>
                <Code text={how === "pretty" && !message.cut ? pretty(message.text) : message.text} label={`Message ${index + 1}`} />
              </li>
            );
          })}
        </ol>
      ) : (
        <Empty icon="wire" title="No message is kept">
          The call came from inside the process, or the server keeps no wire.
        </Empty>
      )}
    </Panel>
  );
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function Records({ id, records }: { id: string; records: AuditRecord[] }) {
  return (
    <Panel class="late" title="On record" extra={<a href={link("audit", "", { text: id })}>In the audit</a>} testid="records">
      {records.length ? (
        <ol class="on-record">
          {records.map((record) => (
            <li key={record.number}>
              <span class="muted num">{count(record.number)}</span>
              <Clock at={record.time} exact />
              <Shown text={record.event} max={60} line />
              {record.outcome && <State of={record.outcome} label={record.tool} />}
            </li>
          ))}
        </ol>
      ) : (
        <p class="muted">Nothing: this server keeps no audit, or the call is not written down yet.</p>
      )}
    </Panel>
  );
}
