// What happens now: health, what waits for a person, what runs, what has just ended.
import { Component } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Approval, Row } from "../api";
import { at, may, me, post, said } from "../api-client";
import { use } from "../cell";
import { Chart } from "../chart";
import { figures, finished, health, minutes, running, runningTotal, sampled, totals, waiting } from "../live";
import { home, kindOfCall, link, route } from "../route";
import { Ago, Bar, Button, clock, Copy, count, Countdown, duration, Elapsed, Empty, Icon, many, Panel, plain, say, Shown, SIGNS, State, useSlow } from "../ui";

const HOLD = 3000; // ms that a list keeps still after the pointer last moved over it
const MAX_LANES = 30;
const SHOWN = 24; // calls in a list, until somebody asks for more

export function Now() {
  return (
    <div class="now">
      <Sentence />
      <Waiting />
      <Figures />
      <Callers />
      <div class="lists">
        <div class="now-left">
          <Running />
          <ByTool />
          <Trials />
        </div>
        <Finished />
      </div>
    </div>
  );
}

function Sentence() {
  const said = use(health);
  return (
    <div class={`sentence ${said?.level ?? ""}`}>
      <span class="sentence-sign">
        <Icon name={said ? SIGNS[said.level] : "run"} size={18} />
      </span>
      <div>
        <h1 data-testid="health">{said ? <Shown text={said.sentence} max={300} /> : "Listening to the server…"}</h1>
        <ul class="muted">
          {said?.notes.map((note) => (
            <li key={note}>
              <Shown text={note} max={300} />
            </li>
          ))}
        </ul>
      </div>
    </div>
  );
}

// What waits for a yes

function Waiting() {
  const all = use(waiting);
  const soonest = useMemo(() => [...all].sort((a, b) => a.expires - b.expires), [all]);
  if (!all.length) {
    return (
      <section class="asks none" aria-label="Approvals" data-testid="waiting">
        <Icon name="approve" />
        <p class="muted">No call is waiting for approval.</p>
      </section>
    );
  }
  return (
    <section class="asks" aria-label="Approvals" data-testid="waiting">
      {soonest.slice(0, 3).map((one) => (
        <Ask key={one.id} of={one} />
      ))}
      {all.length > 1 && (
        <a class={all.length > 3 ? "asks-more" : "asks-more narrow"} href="#/approve">
          All {count(all.length)}
        </a>
      )}
    </section>
  );
}

function Ask({ of }: { of: Approval }) {
  return (
    <a class="ask" href={link("approve", of.id)} data-testid={`waiting-${of.id}`}>
      <Icon name="ask" size={20} />
      <div class="grow">
        <p class="line">
          <Shown in="strong" text={of.sentence || of.title || of.tool} max={160} line />
        </p>
        <p class="line muted">
          <Shown text={of.tool} max={80} line /> for <Shown text={of.who} max={60} line />
        </p>
      </div>
      <div class="ask-side">
        <span class="ask-go">Review</span>
        <Countdown until={of.expires} />
      </div>
    </a>
  );
}

// Figures

function Figures() {
  const sum = use(totals);
  const total = use(runningTotal);
  const started = use(me)!.server.started;
  return (
    <section class="figures" aria-label="Figures" data-testid="sparkline">
      <div class="figure">
        <p class="figure-word">Running</p>
        <p class="figure-value num">
          {count(total)}
          {total > 0 && <span class="pulse" aria-hidden="true" />}
        </p>
        <p class="muted figure-text" data-testid="totals">
          <b class="num" data-testid="total-calls">
            {count(sum.calls)}
          </b>{" "}
          {sum.calls === 1 ? "call" : "calls"}, <b class="num">{count(sum.errors)}</b> failed, <b class="num">{count(sum.refused)}</b> refused since {clock(started).slice(0, -3)}
        </p>
      </div>
      <Charts />
    </section>
  );
}

/** The last hour, minute by minute, and the last sixty seconds. A pointer or the arrow keys choose whose numbers are shown. */
function Charts() {
  const past = useSlow(use(minutes), 500);
  const { last } = use(figures);
  const all = useMemo(() => [...past.slice(0, -1), { ...last, at: 0 }], [past, last]);
  const [point, setPoint] = useState<number | null>(null);
  const { calls, errors, p95 } = useMemo(
    () => ({
      calls: all.map((one) => one.calls),
      errors: all.map((one) => one.errors),
      p95: all.map((one) => (one.calls ? one.p95_ms : null)),
    }),
    [all],
  );
  const back = point !== null && point < all.length ? point : 0;
  const picked = all.at(-1 - back)!;
  const when = back ? `at ${clock(picked.at).slice(-8, -3)}` : "in the last 60 s";
  const time = (ms: number | null | undefined) => (ms === null || ms === undefined ? "–" : duration(ms / 1000));
  const shared = { when, back, point, onPoint: setPoint };
  return (
    <>
      <Charted {...shared} word="Calls" says="Calls a minute in the last hour" tone="info" values={calls} write={(value) => count(value ?? 0)} bars />
      <Charted {...shared} word="Failed" says="Failed calls a minute in the last hour" tone="bad" values={errors} write={(value) => count(value ?? 0)} bars />
      <Refusals />
      <Charted {...shared} word="p95" says="Time in which 95 % of the calls ended, by minute of the last hour" tone="quiet" values={p95} write={time} />
      <input
        class="unseen"
        type="range"
        aria-label="Minute of the last hour"
        aria-valuetext={`${when}: ${many(picked.calls, "call")}, ${count(picked.errors)} failed${picked.calls ? `, 95 % took at most ${time(picked.p95_ms)}` : ""}`}
        min={1 - all.length}
        max={0}
        value={-back}
        data-testid="minute"
        onFocus={() => setPoint(0)}
        onBlur={() => setPoint(null)}
        onInput={(event) => setPoint(-event.currentTarget.valueAsNumber)}
      />
    </>
  );
}

interface ChartedProps {
  word: string;
  says: string; // for a screen reader
  tone: "info" | "bad" | "quiet";
  values: (number | null)[];
  write: (value: number | null | undefined) => string;
  bars?: boolean;
  when: string;
  back: number;
  point: number | null;
  onPoint: (point: number | null) => void;
}

function Charted({ word, says, tone, values, write, bars, when, back, point, onPoint }: ChartedProps) {
  const shown = write(values.at(-1 - back));
  const highest = Math.max(0, ...values.map(Number));
  const most = highest ? `peak ${write(highest)}` : "";
  return (
    <div class="figure" data-testid={`figure-${word.toLowerCase()}`}>
      <p class="figure-word">
        {word} {when}
      </p>
      <p class={`figure-value num ${tone === "bad" && shown !== "0" ? "bad" : ""}`}>
        {shown}
        <span class="figure-most muted">{most}</span>
      </p>
      <Chart values={values} bars={bars} tone={tone} label={`${says}: ${shown} ${when}${most && `, ${most}`}`} point={point} onPoint={onPoint} />
    </div>
  );
}

/** How many calls were refused, why, and whose they were. */
function Refusals() {
  const { refused } = use(figures);
  const reasons = new Map<string, { calls: number; callers: string[] }>();
  for (const { who, reason, calls } of refused) {
    const known = reasons.get(reason) ?? { calls: 0, callers: [] };
    reasons.set(reason, { calls: known.calls + calls, callers: [...known.callers, `${who} ${count(calls)}`] });
  }
  const total = refused.reduce((sum, one) => sum + one.calls, 0);
  return (
    <div class="figure refusals" data-testid="figure-refused">
      <p class="figure-word">Refused in the last 5 min</p>
      <p class={`figure-value num ${total ? "warn" : ""}`}>{count(total)}</p>
      <ul class="muted figure-text">
        {[...reasons].map(([reason, { calls, callers }]) => (
          <li class="line" key={reason} title={plain(callers.join(", "))}>
            <b class="num">{count(calls)}</b> {reason}: <Shown text={callers.join(", ")} max={100} line />
          </li>
        ))}
      </ul>
    </div>
  );
}

// Which tools

function ByTool() {
  const { tools } = use(figures);
  return (
    <Panel class="live by-tool" title="Most used" testid="by-tool" extra={<Note of="Last 5 min" />}>
      {tools.length ? (
        <div class="live-list" tabIndex={0} role="group" aria-label="Most used in the last five minutes">
          <table class="num">
            <thead>
              <tr>
                <th scope="col">Name</th>
                <th scope="col">Calls</th>
                <th scope="col">Failed</th>
                <th scope="col">Refused</th>
                <th scope="col">p95</th>
              </tr>
            </thead>
            <tbody>
              {tools.map((one) => (
                <tr key={one.tool} data-testid={`by-tool-${one.tool}`}>
                  <th scope="row">
                    <a class="line" href={home(one.tool)} title={plain(one.tool)}>
                      <Shown text={one.title} max={60} line />
                    </a>
                    {kindOfCall(one.tool) !== "tool" && <span class="muted"> {kindOfCall(one.tool)}</span>}
                  </th>
                  <td>{count(one.calls)}</td>
                  <td class={one.errors ? "bad" : ""}>{count(one.errors)}</td>
                  <td class={one.refused ? "warn" : ""}>{count(one.refused)}</td>
                  <td>{one.calls > one.refused ? duration(one.p95_ms / 1000) : "–"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : (
        <Empty icon="tools" title="No calls in the last five minutes" />
      )}
    </Panel>
  );
}

/** Rules with mode = "audit": what they would have decided. */
function Trials() {
  const { trials } = use(figures);
  if (!trials.length) return null;
  return (
    <Panel class="live by-tool" title="Rules on trial" testid="trials" extra={<Note of="Since the start" />}>
      <div class="live-list" tabIndex={0} role="group" aria-label="Rules on trial: they decide nothing">
        <table class="num">
          <thead>
            <tr>
              <th scope="col">Rule</th>
              <th scope="col">Would</th>
              <th scope="col">Calls</th>
              <th scope="col" title="Calls that were decided in another way">
                Would change
              </th>
              <th scope="col">Last</th>
            </tr>
          </thead>
          <tbody>
            {trials.map((one) => (
              <tr key={one.rule} data-testid={`trial-${one.rule}`}>
                <th scope="row">
                  <a class="line" href={link("audit", "", { text: one.rule })} title={plain(one.rule)}>
                    <Shown text={one.rule} max={80} line />
                  </a>
                </th>
                <td>{one.verdict}</td>
                <td>{count(one.calls)}</td>
                <td class={one.differs ? "warn" : ""}>{count(one.differs)}</td>
                <td>{one.last ? <Ago at={one.last} /> : "–"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

// Whose calls, and how they ended

const OUTCOMES = { "": "All", ok: "OK", failed: "Failed", refused: "Refused" };
type Ending = keyof typeof OUTCOMES;
const FAILED = ["tool_error", "timeout", "internal"];
const NEITHER = ["cancelled", "input_required"];

function endingOf(row: Row): Ending {
  const outcome = row.outcome ?? "";
  return outcome === "ok" ? "ok" : FAILED.includes(outcome) ? "failed" : NEITHER.includes(outcome) || !outcome ? "" : "refused";
}

/** The ending an address names; all of them, if it names none that there is. */
function endingIn(query: URLSearchParams): Ending {
  const named = query.get("outcome") ?? "";
  return Object.hasOwn(OUTCOMES, named) ? (named as Ending) : "";
}

/** This screen with another choice; what else was chosen stays. */
function choosing(query: URLSearchParams, name: string, value: string): string {
  return link("now", "", { ...Object.fromEntries(query), [name]: value });
}

const NOBODY = "";
const whose = (row: Row): string => JSON.stringify([row.who, row.client]);

/** The caller an address names; nobody if it names none, or is not ours. */
function chosen(text: string | null): string {
  try {
    const said: unknown = JSON.parse(text ?? "null");
    return Array.isArray(said) && said.length === 2 && said.every((one) => typeof one === "string") ? JSON.stringify(said) : NOBODY;
  } catch {
    return NOBODY; // somebody typed it
  }
}

/** The calls of those who are looked at: of one caller, if the address names one. */
function useOf(rows: Row[]): [rows: Row[], caller: string] {
  const caller = chosen(use(route).query.get("of"));
  return [useMemo(() => (caller ? rows.filter((row) => whose(row) === caller) : rows), [rows, caller]), caller];
}

/** One lane for each who has called lately: how many calls of theirs run, and a way to see no others. */
function Callers() {
  const going = use(running);
  const ended = use(finished);
  const { query } = use(route);
  const [, at] = useOf(going);
  const slow = useSlow(useMemo(() => [...going, ...ended], [going, ended]), 500);
  const lanes = new Map<string, Row[]>(at ? [[at, []]] : []);
  for (const row of slow) lanes.set(whose(row), [...(lanes.get(whose(row)) ?? []), row]);
  return (
    <div class="callers" role="group" aria-label="Callers" data-testid="callers">
      {[...lanes].sort(([a], [b]) => (a < b ? -1 : 1)).filter(([key], index) => index < MAX_LANES || key === at).map(([key, rows]) => {
        const [who, client] = JSON.parse(key) as string[];
        const now = rows.filter((row) => row.state !== "done").length;
        return (
          <a class="chip" key={key} href={choosing(query, "of", key === at ? NOBODY : key)} aria-current={key === at ? "true" : undefined} data-testid={`caller-${who}`}>
            <Shown text={client ? `${who} · ${client}` : who!} max={60} line /> <b class="num">{now ? `${count(now)} running` : many(rows.length, "call")}</b>
          </a>
        );
      })}
    </div>
  );
}

// Lists

/** Keeps still under a pointer or the keyboard's focus: nobody should hit a button that has just moved there. */
function useHold() {
  const [held, setHeld] = useState(false);
  const timer = useRef(0);
  const hold = () => {
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => setHeld(false), HOLD);
    setHeld(true);
  };
  const release = () => {
    clearTimeout(timer.current);
    setHeld(false);
  };
  useEffect(() => () => clearTimeout(timer.current), []);
  return { held, on: { onPointerMove: hold, onPointerDown: hold, onPointerLeave: release, onKeyDown: hold } };
}

function Running() {
  const sent = use(running);
  const [rows, caller] = useOf(sent);
  const all = use(runningTotal);
  const total = caller ? rows.length : all;
  const ended = use(finished);
  const { held, on } = useHold();
  const before = useRef<Row[]>([]);
  const shown = useMemo(() => {
    if (!held) return rows;
    const fresh = new Map(rows.map((row) => [row.id, row]));
    const done = new Map(ended.map((row) => [row.id, row]));
    const kept = before.current.map((row): Row => fresh.get(row.id) ?? done.get(row.id) ?? { ...row, state: "done", outcome: row.outcome ?? "ended" });
    const known = new Set(kept.map((row) => row.id));
    return [...kept, ...rows.filter((row) => !known.has(row.id))].slice(0, 120);
  }, [rows, ended, held]);
  before.current = shown;
  const cut = all > sent.length && (caller ? `${count(rows.length)} among the ${count(sent.length)} of ${count(all)} that run longest` : `${count(sent.length)} of ${count(all)}: the longest running`);
  return (
    <Panel class="live" title="Running" testid="running" extra={<Note of={cut || (held && total ? "Held while you point" : total ? many(total, "call") : "")} />}>
      {shown.length ? <Rows of={shown} calm={total > SHOWN} on={on} /> : <Idle />}
    </Panel>
  );
}

function Idle() {
  const { server } = use(me)!;
  const any = use(totals).calls > 0;
  const command = `handrail call ${server.target} TOOL`;
  return (
    <Empty icon="now" title="Nothing is running">
      {any ? (
        <p>A call shows here the moment it begins.</p>
      ) : (
        <>
          <p>
            A call shows here the moment it begins. <a href="#/try">Try a tool</a>, or call one from a terminal:
          </p>
          <div class="command">
            <code>{plain(command)}</code>
            <Copy text={command} label="Copy the command" />
          </div>
        </>
      )}
    </Empty>
  );
}

function Finished() {
  const { query } = use(route);
  const ending = endingIn(query);
  const [theirs] = useOf(use(finished));
  const all = useMemo(() => (ending ? theirs.filter((row) => endingOf(row) === ending) : theirs), [theirs, ending]);
  const some = use(sampled);
  const slow = useSlow(all, 1000);
  const rows = some ? slow : all; // a sample need not change faster than it can be read
  const { held, on } = useHold();
  const kept = useRef(rows);
  const chosen = useRef(ending);
  if (!held || chosen.current !== ending) kept.current = rows;
  chosen.current = ending;
  const shown = kept.current;
  const newer = held ? rows.findIndex((row) => row.id === shown[0]?.id) : 0;
  const note = newer > 0 ? `${count(newer)} newer, held while you point` : newer < 0 ? "Many newer, held while you point" : some ? "A sample, failures first" : "Newest first";
  return (
    <Panel
      class="live"
      title="Finished"
      testid="finished"
      extra={
        <>
          <span class="endings" role="group" aria-label="How they ended">
            {Object.entries(OUTCOMES).map(([key, word]) => (
              <a class="chip" key={key} href={choosing(query, "outcome", key)} aria-current={key === ending ? "true" : undefined} data-testid={`ended-${key || "all"}`}>
                {word}
              </a>
            ))}
          </span>
          <Note of={note} />
        </>
      }
    >
      {shown.length ? (
        <Rows of={shown} calm={some} on={on} />
      ) : (
        <Empty icon="check" title={ending ? `No call among the last ones: ${OUTCOMES[ending].toLowerCase()}` : "No call has ended yet"}>
          <p>
            The last calls stay here. Older ones are in the <a href="#/audit">audit</a>.
          </p>
        </Empty>
      )}
    </Panel>
  );
}

/** Rows of one height, each put in its place by a transform: what comes and goes moves nothing else on the page. */
function Rows({ of, calm, on }: { of: Row[]; calm: boolean; on: object }) {
  const [all, setAll] = useState(false);
  const shown = all ? of : of.slice(0, SHOWN);
  return (
    <div class="live-list" {...on}>
      <ul style={{ "--n": shown.length }}>
        {shown.map((row, index) => (
          <Live key={row.id} row={row} place={index} flash={!calm} />
        ))}
      </ul>
      {of.length > SHOWN && (
        <p class="live-more">
          <button type="button" class="more" onClick={() => setAll(!all)}>
            {all ? `Only the first ${SHOWN}` : `${count(of.length - SHOWN)} more`}
          </button>
        </p>
      )}
    </div>
  );
}

function Note({ of }: { of: string }) {
  return <span class="muted note num">{of}</span>;
}

/** One call. The whole row leads to its story. It is drawn again only when what it shows has changed. */
class Live extends Component<{ row: Row; place: number; flash: boolean }, { asked: boolean }> {
  override state = { asked: false };
  fresh = this.props.flash;

  override shouldComponentUpdate({ row, place }: { row: Row; place: number }, { asked }: { asked: boolean }): boolean {
    const { row: old, place: before } = this.props;
    return (
      place !== before ||
      asked !== this.state.asked ||
      row.state !== old.state ||
      row.stage !== old.stage ||
      row.outcome !== old.outcome ||
      row.progress?.done !== old.progress?.done ||
      row.progress?.message !== old.progress?.message
    );
  }

  cancel = async () => {
    this.setState({ asked: true });
    try {
      await post(at("calls", this.props.row.id, "cancel"));
    } catch (problem) {
      this.setState({ asked: false });
      say(said(problem));
    }
  };

  override render() {
    const { row, place } = this.props;
    const { progress } = row;
    const done = row.state === "done";
    const state = done ? (row.outcome ?? "ended") : this.state.asked ? "cancelling" : row.state;
    return (
      <li class={`call ${done ? "done" : "going"} ${this.fresh ? "fresh" : ""}`} style={{ "--i": place }} data-testid={`row-${row.id}`} data-state={state}>
        <div class="call-state">
          <State of={state} label={row.tool} />
        </div>
        <div class="call-main">
          <p class="line">
            <a class="call-link" href={link("calls", row.id)}>
              <Shown text={row.title || row.tool} max={80} line />
            </a>
            <Shown in="span.call-first" text={row.first} max={160} line />
          </p>
          <p class="line muted">
            {!done && progress?.message && (
              <>
                <Shown in="b" text={progress.message} max={120} line />
                {" · "}
              </>
            )}
            {row.title && row.title !== row.tool && (
              <>
                <Shown in="code" text={row.tool} max={80} line />
                {" · "}
              </>
            )}
            <Shown text={row.who} max={60} line />
            {row.client && (
              <>
                {" · "}
                <Shown text={row.client} max={60} line />
              </>
            )}
            {!done && row.stage && ` · ${row.stage}`}
          </p>
        </div>
        <div class="call-time num">
          <p>{done ? duration(row.seconds) : <Elapsed since={row.began} />}</p>
          <p class="muted">
            {done ? (
              <Ago at={row.began + row.seconds} />
            ) : row.approval && row.state === "asking" ? (
              <a class="call-review" href={link("approve", row.approval)}>
                Review
              </a>
            ) : (
              progress && part(progress.done, progress.total)
            )}
          </p>
        </div>
        {!done && (
          <div class="call-act">
            <Button small icon="stop" disabled={state === "cancelling" || !may("manage")} label={`Cancel ${plain(row.tool)}`} title={may("manage") ? "Cancel" : "You may not cancel calls"} testid={`cancel-${row.id}`} onClick={this.cancel} />
          </div>
        )}
        {!done && progress && row.state !== "asking" && <Bar done={progress.done} total={progress.total} label={`Progress of ${plain(row.tool)}`} />}
      </li>
    );
  }
}

function part(done: number, total?: number): string {
  return total ? `${Math.min(100, Math.floor((done / total) * 100))} %` : count(done);
}
