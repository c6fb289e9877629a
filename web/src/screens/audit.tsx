// What is on record. The filter is the address: whoever gets the link sees the same.
import { useEffect, useRef, useState } from "preact/hooks";
import type { AuditRecord, AuditView, Verdict } from "../api";
import { asking, at, get, said } from "../api-client";
import { use } from "../cell";
import { totals } from "../live";
import { go, link, type Route } from "../route";
import { Button, clock, Clock, Copy, count, duration, Empty, Head, Icon, type IconName, JsonTree, many, Notice, Panel, Pill, plain, Problem, Save, Shown, State, type Tone, useData } from "../ui";

const NAMES = ["text", "event", "outcome", "tool", "who", "since", "until"] as const;
type Filter = { [name in (typeof NAMES)[number]]: string };
const EVENTS = ["intent", "outcome", "refusal", "approval", "console"];
const OUTCOMES = ["ok", "tool_error", "cancelled", "timeout", "denied", "forbidden", "bad_arguments", "throttled", "internal"];
const PAGE = 100;
const MOST = 2000; // records on the page

export function Audit({ route }: { route: Route }) {
  const filter = Object.fromEntries(NAMES.map((name) => [name, route.query.get(name) ?? ""])) as Filter;
  const key = JSON.stringify(filter);
  const { data, failure, loading, again } = useData<AuditView>((signal) => get(at("audit"), { ...filter, limit: PAGE }, signal), [key]);
  if (!data) return failure ? <Problem of={failure} again={again} /> : <div aria-busy="true" />;
  if (!data.on) {
    return (
      <Empty icon="audit" title="This server keeps no audit">
        <p>
          Put <code>[audit]</code> with <code>file = "audit.jsonl"</code> into handrail.toml and start it again: each call is then on record before it runs.
        </p>
      </Empty>
    );
  }
  const change = (to: Partial<Filter>) => go(link("audit", "", { ...filter, ...to }), true);
  return (
    <>
      <div class="title">
        <h1>Audit</h1>
        <p class="muted num grow" title={plain(data.file)}>
          {many(data.total, "record")}
          <span class="wide-only">
            {" in "}
            <Shown text={data.file.split("/").at(-1) ?? ""} max={60} line />
          </span>
        </p>
        {["jsonl", "csv"].map((format) => (
          <Save key={format} to={asking(at("audit", "export"), { format, ...filter })} kind="export" testid={`export-${format}`}>
            {format.toUpperCase()}
          </Save>
        ))}
      </div>
      <Badge />
      <Filters filter={filter} change={change} />
      {!!failure && <Problem of={failure} again={again} />}
      <Records key={key} first={data} filter={filter} loading={loading} again={again} filtered={NAMES.some((name) => filter[name])} change={change} />
    </>
  );
}

/** Whether the chain holds: nothing was changed, left out or put in. */
function Badge() {
  const { data, failure, loading, again } = useData<Verdict>((signal) => get(at("audit", "verify"), {}, signal), []);
  const [tone, icon, word]: [Tone, IconName, string] = loading
    ? ["quiet", "run", "Checking…"]
    : failure
      ? ["warn", "warn", "Not checked"]
      : data!.ok
        ? ["good", "check", "Chain verified"]
        : ["bad", "cross", "Chain broken"];
  return (
    <div class={`integrity ${tone}`}>
      <span data-testid="badge" data-ok={loading ? "" : String(!!data?.ok && !failure)} class="integrity-badge">
        <Pill tone={tone} icon={icon}>
          {word}
        </Pill>
      </span>
      <p class="grow">
        {loading ? (
          <span class="muted">Reading every record…</span>
        ) : failure ? (
          <Shown text={said(failure)} max={400} />
        ) : (
          <Judged of={data!} />
        )}
      </p>
      <Button small icon="refresh" disabled={loading} testid="verify" onClick={again}>
        Verify again
      </Button>
    </div>
  );
}

function Judged({ of }: { of: Verdict }) {
  if (of.flaw) {
    return (
      <>
        Record {count(of.flaw.number)} (<Shown text={of.flaw.place} max={120} line />): <Shown text={of.flaw.text} max={400} />. What is before it holds; trust nothing from there on.
      </>
    );
  }
  return (
    <>
      {many(of.records, "record")} follow one another, up to {clock(of.at)}.{of.damage && <> <Shown text={of.damage} max={400} /></>}
      {of.unfinished.length > 0 && (
        <>
          {" "}
          {many(of.unfinished.length, "call has", "calls have")} no end on record:{" "}
          {of.unfinished.slice(0, 3).map((id, index) => (
            <>
              {index > 0 && ", "}
              <a href={link("calls", id)}>{short(id)}</a>
            </>
          ))}
          {of.unfinished.length > 3 && ", …"}
        </>
      )}
    </>
  );
}

function Filters({ filter, change }: { filter: Filter; change: (to: Partial<Filter>) => void }) {
  const any = NAMES.some((name) => filter[name]);
  const [open, setOpen] = useState(NAMES.some((name) => name !== "text" && filter[name]));
  return (
    <form class={`filters ${open ? "open" : ""}`} role="search" aria-label="Filter the records" onSubmit={(event) => event.preventDefault()}>
      <Typed name="text" word="Search" type="search" wide value={filter.text} onChange={(text) => change({ text })} />
      <span class="filters-more">
        <Button pressed={open} testid="audit-more-filters" onClick={() => setOpen(!open)}>
          Filter
        </Button>
      </span>
      <Picked name="event" word="Event" from={EVENTS} value={filter.event} onChange={(event) => change({ event })} />
      <Picked name="outcome" word="Outcome" from={OUTCOMES} value={filter.outcome} onChange={(outcome) => change({ outcome })} />
      <Typed name="tool" word="Tool" value={filter.tool} onChange={(tool) => change({ tool })} />
      <Typed name="who" word="Who" value={filter.who} onChange={(who) => change({ who })} />
      <Typed name="since" word="Since" type="datetime-local" value={toLocal(filter.since)} onChange={(since) => change({ since: toEpoch(since) })} />
      <Typed name="until" word="Until" type="datetime-local" value={toLocal(filter.until)} onChange={(until) => change({ until: toEpoch(until) })} />
      <Button kind="quiet" icon="cross" disabled={!any} testid="audit-clear" onClick={() => go(link("audit"), true)}>
        Clear
      </Button>
    </form>
  );
}

/** A field that is taken over when somebody pauses. */
function Typed({ name, word, type = "text", wide, value, onChange }: { name: string; word: string; type?: "text" | "search" | "datetime-local"; wide?: boolean; value: string; onChange: (value: string) => void }) {
  const [typed, setTyped] = useState(value);
  const sent = useRef(value);
  const latest = useRef(onChange);
  latest.current = onChange;
  useEffect(() => {
    if (value === sent.current) return;
    sent.current = value; // it came from elsewhere: the address, or Clear
    setTyped(value);
  }, [value]);
  useEffect(() => {
    if (typed === sent.current) return undefined;
    const timer = setTimeout(() => {
      sent.current = typed;
      latest.current(typed);
    }, 250);
    return () => clearTimeout(timer);
  }, [typed]);
  return (
    <label class={wide ? "filter wide" : "filter"}>
      <span>{word}</span>
      <input {...({ type } as { type: "text" })} value={typed} step={type === "datetime-local" ? 1 : undefined} spellcheck={false} autocomplete="off" data-testid={`audit-filter-${name}`} onInput={(event) => setTyped(event.currentTarget.value)} />
    </label>
  );
}

function Picked({ name, word, from, value, onChange }: { name: string; word: string; from: string[]; value: string; onChange: (value: string) => void }) {
  const all = value && !from.includes(value) ? [...from, value] : from;
  return (
    <label class="filter">
      <span>{word}</span>
      <select value={value} data-testid={`audit-filter-${name}`} onChange={(event) => onChange(event.currentTarget.value)}>
        <option value="">any</option>
        {all.map((one) => (
          <option key={one} value={one}>
            {plain(one).replace(/_/g, " ")}
          </option>
        ))}
      </select>
    </label>
  );
}

function toLocal(epoch: string): string {
  const at = Number(epoch);
  if (!epoch || !Number.isFinite(at)) return "";
  const date = new Date(at * 1000);
  return Number.isNaN(date.getTime()) ? "" : new Date(date.getTime() - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
}

function toEpoch(local: string): string {
  const at = new Date(local).getTime();
  return Number.isNaN(at) ? "" : String(Math.floor(at / 1000));
}

function Records({ first, filter, loading, again, filtered, change }: { first: AuditView; filter: Filter; loading: boolean; again: () => void; filtered: boolean; change: (to: Partial<Filter>) => void }) {
  const [older, setOlder] = useState<AuditRecord[]>([]);
  const [next, setNext] = useState(first.next);
  const [failure, setFailure] = useState<unknown>();
  const [busy, setBusy] = useState(false);
  const calls = use(totals).calls;
  const [since, setSince] = useState(calls);
  useEffect(() => {
    setOlder([]);
    setNext(first.next);
    setSince(totals.value.calls);
  }, [first]);
  const more = async () => {
    setBusy(true);
    setFailure(undefined);
    try {
      const view = await get<AuditView>(at("audit"), { ...filter, before: next, limit: PAGE });
      setOlder((old) => [...old, ...view.records]);
      setNext(view.next);
    } catch (problem) {
      setFailure(problem);
    } finally {
      setBusy(false);
    }
  };
  const all = [...first.records, ...older];
  return (
    <Panel class="flush">
      <div class="newer" aria-live="polite">
        <span class="muted num">{calls > since ? `${many(calls - since, "call has", "calls have")} ended since` : "Newest first"}</span>
        <Button small kind="quiet" icon="refresh" busy={loading} testid="audit-newer" onClick={again}>
          Read again
        </Button>
      </div>
      {all.length ? (
        <table class="cards records">
          <Head of={["No.>", "Time", "Event", "Tool", "Who", "Outcome", "Took>", "Rule", "Call"]} />
          <tbody>
            {grouped(all).map((records) => (
              <Entry key={records.at(-1)!.number} of={records} change={change} />
            ))}
          </tbody>
        </table>
      ) : filtered ? (
        <Empty icon="search" title="No record fits">
          <Button onClick={() => go(link("audit"), true)}>Clear the filter</Button>
        </Empty>
      ) : (
        <Empty icon="audit" title="No call is on record yet">
          <p>
            Call a tool, for instance in <a href="#/try">Try</a>: it is written down before it runs, and when it has ended.
          </p>
        </Empty>
      )}
      {!!failure && <Problem of={failure} again={more} />}
      {next && all.length < MOST && (
        <div class="older">
          <Button busy={busy} onClick={more} testid="audit-older">
            Older records
          </Button>
        </div>
      )}
      {next && all.length >= MOST && <Notice tone="quiet">There are more. Narrow the filter, or export them.</Notice>}
    </Panel>
  );
}

/** The records of each call together, and those of its approval with them; newest first, as they came. */
function grouped(all: AuditRecord[]): AuditRecord[][] {
  const approvalOf = (record: AuditRecord) => (typeof record.raw.approval === "string" ? record.raw.approval : "");
  const agreed = new Map<string, string>(); // which call an approval was for
  for (const { call, raw } of all) if (call && typeof raw.agreed === "string") agreed.set(raw.agreed.replace(/^approval /, ""), call);
  const groups = new Map<string, AuditRecord[]>();
  for (const record of all) {
    const approval = approvalOf(record);
    const key = record.call || agreed.get(approval) || approval || `record ${record.number}`;
    groups.set(key, [...(groups.get(key) ?? []), record]);
  }
  return [...groups.values()];
}

/** One line for a call, or for what else is on record. It opens to all records of it. */
function Entry({ of, change }: { of: AuditRecord[]; change: (to: Partial<Filter>) => void }) {
  const [open, setOpen] = useState(false);
  const newest = of[0]!;
  const head = of.find((each) => each.event === "outcome") ?? newest;
  const first = (name: "tool" | "who" | "rule" | "call") => of.map((each) => each[name]).find(Boolean) ?? "";
  const whose = head.who || of.find((each) => each.event === "intent")?.who || first("who");
  const shown = { event: of.length > 1 && first("call") ? "call" : head.event, tool: first("tool"), who: whose };
  const took = head.raw.seconds;
  const numbers = of.length > 1 ? `Records ${count(of.at(-1)!.number)} to ${count(newest.number)}` : `Record ${count(newest.number)}`;
  return (
    <>
      <tr class="entry" data-testid={`audit-row-${newest.number}`}>
        <td class="right num">
          <button type="button" class="entry-toggle" aria-expanded={open} aria-label={numbers} onClick={() => setOpen(!open)}>
            <Icon name="chevron" />
            {count(newest.number)}
          </button>
        </td>
        <td>
          <Clock at={head.time} exact />
        </td>
        {(["event", "tool", "who"] as const).map((name) => (
          <td key={name} data-label={{ event: undefined, tool: "Tool", who: "Who" }[name]}>
            {name === "event" && shown.event === "call" ? (
              "call"
            ) : (
              shown[name] && (
                <button type="button" class="pick" onClick={() => change({ [name]: shown[name] })}>
                  <Shown text={shown[name]} max={80} line />
                </button>
              )
            )}
          </td>
        ))}
        <td data-label="Outcome">{head.outcome && <State of={head.outcome} label={shown.tool} />}</td>
        <td data-label="Took" class="right num">
          {typeof took === "number" && duration(took)}
        </td>
        <td data-label="Rule">{first("rule") && <Shown text={first("rule")} max={80} line />}</td>
        <td data-label="Call">
          {first("call") && (
            <a href={link("calls", first("call"))} title={plain(first("call"))} data-testid={`audit-call-${newest.number}`}>
              {short(first("call"))}
            </a>
          )}
        </td>
      </tr>
      {open && (
        <tr class="entry-more">
          <td colSpan={9}>
            {[...of].reverse().map((each) => (
              <div class="entry-raw" key={each.number} data-testid={`audit-record-${each.number}`}>
                <p class="entry-what">
                  <strong class="num">{count(each.number)}</strong> <Shown text={each.event} max={40} line />
                  <br />
                  <span class="muted">
                    <Clock at={each.time} exact />
                  </span>
                </p>
                <JsonTree value={each.raw} open={2} label={`Record ${each.number}`} />
                <Copy text={() => JSON.stringify(each.raw)} label="Copy the record" />
              </div>
            ))}
          </td>
        </tr>
      )}
    </>
  );
}

function short(id: string): string {
  return id.length > 14 ? `${plain(id.slice(0, 4))}…${plain(id.slice(-6))}` : plain(id);
}
