// Calls that wait for a person: one card each, everything there is to know, and a decision that is made once.

import type { ComponentChildren, TargetedMouseEvent } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Approval, ApprovalsView, Checked, Difference, Grant, Json, JsonObject } from "../api";
import { at, Failed, get, may, post, said } from "../api-client";
import { Cell, use } from "../cell";
import { compared, Side } from "../diff";
import { type Draft, drafted, Editor, Judged, useChecked } from "../form";
import { grantsChanged, onApproval, waiting } from "../live";
import { useNotifications } from "../notify";
import { Long } from "../result";
import { go, home, kindOfCall, link, route } from "../route";
import { isObject, kindOf, placed, short } from "../schema";
import {
  Ago,
  Button,
  Clock,
  Countdown,
  duration,
  Empty,
  Fold,
  Icon,
  JsonTree,
  many,
  Notice,
  Panel,
  plain,
  Problem,
  say,
  Shown,
  State,
  useAction,
  useData,
  useKeys,
} from "../ui";

const MAX_CARDS = 50;
const SUSPICIOUS = "suspicious arguments";
const REASONS = ["wrong target", SUSPICIOUS, "not now"];
const IN_VIEW_MS = 600; // a card has to be looked at before a key decides it
const HOURS = [1, 8, 24, 7 * 24, 30 * 24].map((hours) => hours * 3600); // that a yes may be remembered

// Cards that were decided while somebody looked stay where they are, as their verdict.
const decided = new Cell<Approval[]>([]);

function settle(approval: Approval): void {
  const known = decided.value.find((each) => each.id === approval.id);
  if (known?.state === "consumed") return; // the answer to a decision may come after what follows from it
  const others = decided.value.filter((each) => each !== known);
  // A yes that is used later than it was put away does not come back as a card: what was decided is listed anew.
  // One that was decided and used at once has no card as decided yet: it waits until now.
  if (approval.state === "consumed" && !known && !waiting.value.some((each) => each.id === approval.id)) grantsChanged.set(grantsChanged.value + 1);
  else decided.set(approval.state === "pending" ? others : [...others, approval].slice(-MAX_CARDS));
}

export function Approve() {
  const place = use(route);
  const open = use(waiting);
  const over = use(decided);
  const changed = use(grantsChanged);
  const { data, failure, again } = useData((signal) => get<ApprovalsView>(at("approvals"), {}, signal), [changed, over.length]);
  const [editing, edit] = useState("");
  useEffect(() => {
    const end = onApproval(settle);
    return () => {
      end();
      decided.set([]);
    };
  }, []);
  const cards = useMemo(() => {
    const known = new Map([...(data?.open ?? []), ...open].map((each) => [each.id, each]));
    for (const each of data?.recent ?? []) if (known.has(each.id)) known.set(each.id, each);
    for (const each of over) known.set(each.id, each);
    for (const each of open) if (known.get(each.id)?.state === "pending") known.set(each.id, each);
    return [...known.values()].sort((a, b) => a.created - b.created || a.id.localeCompare(b.id));
  }, [data, open, over]);
  const shown = cards.slice(0, MAX_CARDS);
  const pending = shown.filter((each) => each.state === "pending");
  const here = shown.some((each) => each.id === place.name) ? place.name : (pending[0]?.id ?? "");
  const move = (by: number) => {
    const index = shown.findIndex((each) => each.id === here);
    const next = shown[Math.min(Math.max(index + by, 0), shown.length - 1)];
    if (next) turn(next.id);
    if (next) focusCard(next.id);
  };
  const [ready, look] = useInView(here);
  const press = (which: string) => {
    if (!pending.some((each) => each.id === here)) return goOn(shown, here); // it has been decided: a key decides no other
    if (!ready || !inView(here)) return look();
    const button = document.querySelector<HTMLElement>(`[data-testid="${CSS.escape(`${which}-${here}`)}"]`);
    button?.focus();
    button?.scrollIntoView({ block: "nearest" });
  };
  useKeys({
    j: () => move(1),
    k: () => move(-1),
    a: () => press("yes"),
    d: () => press("no"),
    e: () => pending.find((each) => each.id === here && each.editable && each.may) && edit(here),
    Escape: () => {
      edit("");
      focusCard(here);
    },
  });
  const elsewhere = place.name && data && !shown.some((each) => each.id === place.name);
  const recent = (data?.recent ?? []).filter((each) => !shown.some((card) => card.id === each.id));
  return (
    <>
      <div class="title">
        <h1>Approve</h1>
        <span class="grow muted" aria-live="polite" data-testid="waiting">
          {pending.length ? `${many(cards.filter((each) => each.state === "pending").length, "call")} waiting for approval` : ""}
        </span>
        <Notify />
        {shown.length > pending.length && (
          <Button
            small
            kind="quiet"
            icon="check"
            testid="tidy"
            onClick={() => {
              decided.set([]);
              again();
            }}
          >
            Clear decided
          </Button>
        )}
        <span class="keys-hint muted" aria-hidden="true">
          J K to move, A Enter yes, D Enter no, E edit
        </span>
      </div>
      {failure !== undefined && <Problem of={failure} again={again} />}
      {elsewhere && !recent.some((each) => each.id === place.name) && (
        <Notice tone="info" title="That one is not here any more">
          <p>
            It was decided or has expired. The <a href={link("audit", "", { text: place.name })}>audit log</a> has it.
          </p>
        </Notice>
      )}
      <div class="desk">
        <div class="approvals">
          {shown.map((each) => (
            <Card
              key={each.id}
              it={each}
              current={each.id === here}
              opened={each.id === place.name}
              editing={editing === each.id}
              edit={(on) => edit(on ? each.id : "")}
              longest={data?.remember_seconds ?? 0}
              keep={pending.length > 0}
              ready={ready && each.id === here}
              look={look}
              after={() => goOn(shown, each.id)}
            />
          ))}
          {cards.length > shown.length && <p class="muted">{many(cards.length - shown.length, "more call is", "more calls are")} waiting behind these.</p>}
          {!pending.length && data && <Nothing some={shown.length > 0} />}
        </div>
        <div class="stack">
          {data && <Grants of={data.grants} />}
          {recent.length > 0 && (
            <Panel title="Decided lately">
              <ul class="recent">
                {recent.map((each) => (
                  <Past key={each.id} it={each} open={each.id === place.name} />
                ))}
              </ul>
            </Panel>
          )}
        </div>
      </div>
    </>
  );
}

/** Whether the title ends in the name: of a resource or a prompt without a title of its own. */
const isNamed = (it: Approval): boolean => kindOfCall(it.tool) !== "tool" && it.title.endsWith(` ${it.tool.replace(/^prompt:/, "")}`);

const stateOf = (it: Approval): string => (it.state === "approved" ? "unused" : it.state);

const focusCard = (id: string): void => document.getElementById(`card-${id}`)?.focus();

/** Be at this card; but whoever has left meanwhile is not brought back. */
function turn(id: string): void {
  if (location.hash.startsWith(link("approve"))) go(link("approve", id), true);
}

/** Whether the selected card has been selected, and on the screen, for a moment; and what makes it so if it has not. */
function useInView(here: string): [ready: boolean, look: () => void] {
  const [ready, setReady] = useState("");
  const timer = useRef(0);
  const look = () => {
    if (!inView(here)) document.getElementById(`card-${here}`)?.scrollIntoView({ block: "nearest" });
    clearTimeout(timer.current);
    setReady("");
    timer.current = window.setTimeout(() => setReady(here), IN_VIEW_MS);
  };
  useLayoutEffect(() => {
    const seen = () => document.hidden || look();
    if (here) seen();
    document.addEventListener("visibilitychange", seen);
    return () => {
      clearTimeout(timer.current);
      document.removeEventListener("visibilitychange", seen);
    };
  }, [here]);
  return [ready === here && here !== "", look];
}

/** Whether most of a card is on the screen, or most of the screen is that card. */
function inView(id: string): boolean {
  const box = document.getElementById(`card-${id}`)?.getBoundingClientRect();
  if (!box) return false;
  const seen = Math.min(box.bottom, innerHeight) - Math.max(box.top, 0);
  return seen >= Math.min(box.height, innerHeight) * 0.5;
}

/** From a card that is decided to the next one below that is not; where there is none, to the one above. */
function goOn(all: Approval[], id: string): void {
  const from = all.findIndex((each) => each.id === id);
  const isOpen = (each: Approval) => each.state === "pending" && each.id !== id;
  const next = all.slice(from + 1).find(isOpen) ?? all.slice(0, Math.max(from, 0)).findLast(isOpen);
  if (next) {
    turn(next.id);
    focusCard(next.id);
  } else focusCard(id);
}

function Nothing({ some }: { some: boolean }) {
  return (
    <Empty icon="approve" title={some ? "All calls are decided" : "No call is waiting for approval"}>
      <p>
        A call waits here when a rule says <code>verdict = "ask"</code>, or when its tool says that it destroys (<code>[access] destructive = "ask"</code>, the
        default). <code>handrail explain call TOOL</code> says what would happen to a call, and why.
      </p>
    </Empty>
  );
}

interface CardProps {
  it: Approval;
  current: boolean;
  opened: boolean; // by its address
  editing: boolean;
  edit: (on: boolean) => void;
  longest: number;
  keep: boolean; // its height: others wait below it
  ready: boolean; // it has been in view for a moment: a key may decide it
  look: () => void; // let it be
  after: () => void;
}

function Card({ it, current, opened, editing, edit, longest, keep, ready, look, after }: CardProps) {
  const box = useRef<HTMLElement>(null);
  const [note, setNote] = useState("");
  const [remembering, setRemembering] = useState(false);
  const [seconds, setSeconds] = useState(HOURS[0]!);
  const [busy, setBusy] = useState("");
  const [failed, setFailed] = useState<unknown>(null);
  const [draft, setDraft] = useState<Draft>(() => drafted(it.arguments));
  const open = it.state === "pending";
  const height = useRef(0); // a card that is decided stays as high as it was: nothing moves under a pointer
  useLayoutEffect(() => {
    if (opened) box.current?.scrollIntoView({ block: "nearest" });
  }, []);
  useLayoutEffect(() => {
    if (open) height.current = box.current?.offsetHeight ?? 0;
  });
  const seen = open || height.current > 0;
  const asked = useRef(it.differences); // after a yes, the last approved call is this one
  if (open) asked.current = it.differences;
  const differences = asked.current;
  const decide = async (what: string, body: { yes: boolean; edited?: JsonObject; remember?: number; matching?: { [name: string]: JsonObject } }) => {
    if (busy) return;
    setBusy(what);
    setFailed(null);
    try {
      settle(await post<Approval>(at("approvals", it.id), note ? { ...body, note } : body));
      say(body.yes ? "Approved." : "Denied.");
      edit(false);
      after();
    } catch (problem) {
      setFailed(problem);
      if (problem instanceof Failed && problem.status === 409) await refetch(it.id);
    }
    setBusy("");
  };
  /** A press of a button. One by a key counts only for the card that is looked at, and holding the key down is one press. */
  const button = (what: string, body: Parameters<typeof decide>[1]) => (event: TargetedMouseEvent<HTMLButtonElement>) => {
    if (event.detail > 0 || ready) void decide(what, body);
    else look();
  };
  const kind = kindOfCall(it.tool);
  const itself = differences.find((each) => each.name === "(the tool itself)");
  const names = [...new Set([...Object.keys(it.arguments), ...differences.map((each) => each.name)])].filter((name) => name !== itself?.name);
  const narrow = it.suggestions.filter((each) => Object.keys(each.matching).length); // the others are what stands below them
  const durations = HOURS.filter((each) => each <= longest);
  return (
    <article
      class={`card ${open ? "open" : "closed"} ${current && open ? "current" : ""}`}
      id={`card-${it.id}`}
      data-testid={`card-${it.id}`}
      data-state={it.state}
      data-ready={ready && open ? "" : undefined}
      tabIndex={-1}
      ref={box}
      style={open || !seen || !keep ? undefined : { minHeight: `${height.current}px` }}
      aria-labelledby={`title-${it.id}`}
      onKeyDown={(event) => {
        if (event.key === "Escape") focusCard(it.id);
        if (event.repeat && /^(Enter| )$/.test(event.key) && event.target instanceof HTMLButtonElement) event.preventDefault();
      }}
      onFocusCapture={() => current || turn(it.id)}
    >
      <header class="card-head">
        <h2 id={`title-${it.id}`}>
          <Shown text={it.title || it.tool} max={100} /> {!isNamed(it) && <Shown in="code" text={it.tool} max={100} />}
        </h2>
        <span class="muted">
          on <Shown text={it.server} max={60} />
        </span>
        <span class="push">{open ? <Countdown until={it.expires} /> : <State of={stateOf(it)} testid={`state-${it.id}`} />}</span>
      </header>
      {open && it.caller === "left" && (
        <p class="left-note" data-testid={`left-${it.id}`}>
          <Icon name="info" /> The caller has left; the call runs if the caller calls again.
        </p>
      )}
      <Body open={seen}>
        {it.description && (
          <Shown in="p.about" text={it.description} max={600} />
        )}
        <Preview of={it} />
        <dl class="card-facts">
          <div>
            <dt>Asks because</dt>
            <dd>
              {it.rule && (
                <Shown in="strong" text={it.rule} max={120} />
              )}
              {it.rule && it.why ? ": " : ""}
              <Shown text={it.why} max={400} />
              {it.unseen_upstream && (
                <>
                  {" "}
                  <a href={link("upstreams", it.unseen_upstream)} data-testid={`look-${it.id}`}>
                    Look at the tools of <Shown text={it.unseen_upstream} max={60} line /> once, and only what should ask does
                  </a>
                </>
              )}
            </dd>
          </div>
          <div>
            <dt>Who</dt>
            <dd>
              <Shown in="strong" text={it.who} max={120} />
              {it.client && (
                <>
                  {" "}
                  with <Shown text={it.client} max={120} />
                </>
              )}
              , <Ago at={it.created} />
            </dd>
          </div>
        </dl>
        {itself && (
          <Notice tone="warn" title={`The ${kind} itself has changed since its last approved call`}>
            <a href={home(it.tool)}>Look at what has changed</a>
          </Notice>
        )}
        {it.masked && (
          <Notice tone="info">
            <p>Secrets in the arguments are masked here. The {kind} gets them as they are.</p>
          </Notice>
        )}
        {editing && open ? (
          <Edit
            it={it}
            draft={draft}
            setDraft={setDraft}
            busy={busy === "edited"}
            disabled={!!busy}
            done={() => edit(false)}
            approve={() => decide("edited", { yes: true, edited: draft.value })}
            problems={failed instanceof Failed ? failed.problems : []}
          />
        ) : (
          <>
            {(names.length > 0 || kind !== "resource") && (
              <h3>
                {names.length ? "With these arguments" : "Without arguments"}
                {differences.some((each) => each !== itself) && <span class="muted"> · unusual differences to earlier approved calls are marked</span>}
              </h3>
            )}
            <dl class="given" data-testid={`arguments-${it.id}`}>
              {names.map((name) => (
                <Given key={name} name={name} value={it.arguments[name]} differs={differences.find((each) => each.name === name)} />
              ))}
            </dl>
            <Fold title={`${kind[0]!.toUpperCase()}${kind.slice(1)} version`}>
              <p>
                <code class="fingerprint" data-testid={`fingerprint-${it.id}`}>
                  <Shown text={it.fingerprint} />
                </code>{" "}
                <a href={home(it.tool)}>its definition</a>
              </p>
            </Fold>
            {it.edited && (
              <>
                <h3>Approved with these instead</h3>
                <JsonTree value={it.edited} open={3} label="Edited arguments" />
              </>
            )}
          </>
        )}
      </Body>
      {!open && <Verdict it={it} />}
      {failed !== null && (
        <Notice tone="bad" title="That was not taken" testid={`failed-${it.id}`}>
          <Shown in="p" text={said(failed)} />
        </Notice>
      )}
      {open && !it.may && (
        <Notice tone="info" title="You cannot decide this one">
          <Shown in="p" text={it.why_not || "It needs the role approve."} />
        </Notice>
      )}
      {open && it.may && !editing && (
        <footer class="decide">
          <div class="reason">
            <input
              type="text"
              value={note}
              maxLength={1000}
              placeholder="A reason, if you like: the caller is told"
              aria-label={`Reason, for ${plain(it.tool)}`}
              data-testid={`note-${it.id}`}
              autocomplete="off"
              onInput={(event) => setNote(event.currentTarget.value)}
            />
            {REASONS.filter((each) => names.length > 0 || each !== SUSPICIOUS).map((each) => (
              <button type="button" class="chip" key={each} aria-pressed={note === each} onClick={() => setNote(note === each ? "" : each)}>
                {each}
              </button>
            ))}
          </div>
          <div class="row">
            <Button kind="primary" icon="check" testid={`yes-${it.id}`} busy={busy === "yes"} disabled={!!busy} onClick={button("yes", { yes: true })}>
              Yes, once
            </Button>
            <Button kind="danger" icon="block" testid={`no-${it.id}`} busy={busy === "no"} disabled={!!busy} onClick={button("no", { yes: false })}>
              No
            </Button>
            <span class="push row">
              {kind !== "resource" && (
                <Button
                  icon="edit"
                  testid={`edit-${it.id}`}
                  disabled={!!busy || !it.editable}
                  title={it.editable ? "Change the arguments, then approve" : "It cannot be edited here"}
                  onClick={() => {
                    setDraft(drafted(it.arguments));
                    edit(true);
                  }}
                >
                  Edit
                </Button>
              )}
              {longest > 0 && (
                <button
                  type="button"
                  class="button plain"
                  data-testid={`remember-${it.id}`}
                  aria-expanded={remembering}
                  onClick={() => setRemembering(!remembering)}
                >
                  <Icon name="clock" />
                  <span>Remember…</span>
                </button>
              )}
            </span>
          </div>
          {remembering && longest > 0 && (
            <div class="remember">
              <p class="muted">Yes now, and to the same caller later, as long as the {kind} stays as it is:</p>
              {narrow.map((each, index) => (
                <Button
                  key={index}
                  icon="check"
                  testid={`suggestion-${it.id}-${index}`}
                  busy={busy === `suggestion${index}`}
                  disabled={!!busy}
                  onClick={button(`suggestion${index}`, { yes: true, remember: Math.min(each.seconds, longest), matching: each.matching })}
                >
                  Yes, and <Shown text={each.text} />
                </Button>
              ))}
              <span class="row">
                <Button
                  icon="check"
                  testid={`exactly-${it.id}`}
                  busy={busy === "exactly"}
                  disabled={!!busy}
                  onClick={button("exactly", { yes: true, remember: Math.min(seconds, longest) })}
                >
                  {names.length ? "Yes, and with exactly these arguments" : "Yes, and the same again"}
                </Button>
                <label class="row">
                  <span class="muted">for</span>
                  <select data-testid={`duration-${it.id}`} value={String(seconds)} onChange={(event) => setSeconds(Number(event.currentTarget.value))}>
                    {(durations.length ? durations : [longest]).map((each) => (
                      <option value={String(each)} key={each}>
                        {each % 3600 ? duration(each) : each % 86400 ? many(each / 3600, "hour") : many(each / 86400, "day")}
                      </option>
                    ))}
                  </select>
                </label>
              </span>
            </div>
          )}
        </footer>
      )}
    </article>
  );
}

const FAILED = "preview failed: ";

/** What the call would do, in the words of the tool's author. */
function Preview({ of }: { of: Approval }) {
  if (!of.preview) return null;
  const failed = of.preview.startsWith(FAILED);
  return failed ? (
    <Notice tone="warn" title="The preview failed: what the call would do is not known" testid={`preview-${of.id}`}>
      <Shown in="p" text={of.preview.slice(FAILED.length)} max={2000} />
    </Notice>
  ) : (
    <section class="preview" data-testid={`preview-${of.id}`}>
      <h3>What would happen, says the tool</h3>
      <Shown in="p.effect" text={of.preview} max={2000} block />
    </section>
  );
}

/** Asks for leave to show notifications; nothing else here does. */
function Notify() {
  const [state, ask] = useNotifications();
  if (state !== "default") return null;
  return (
    <Button small kind="quiet" icon="ask" testid="notify" onClick={ask}>
      Notify me
    </Button>
  );
}

/** What became of it is known to the server: ask, and show that. */
async function refetch(id: string): Promise<void> {
  const view = await get<ApprovalsView>(at("approvals"));
  const found = view.recent.find((each) => each.id === id);
  if (found) settle(found);
}

/** What a decided card was about is one click away. */
function Body({ open, children }: { open: boolean; children: ComponentChildren }) {
  return open ? (
    <div class="stack">{children}</div>
  ) : (
    <Fold title="What it was about">
      <div class="stack">{children}</div>
    </Fold>
  );
}

function Verdict({ it }: { it: Approval }) {
  const unused = it.state === "approved" && it.caller === "left";
  const edited = it.edited ? " with other arguments" : "";
  return (
    <p class="outcome-line" data-testid={`verdict-${it.id}`}>
      {it.by ? (
        <>
          {it.state === "denied" ? "Denied" : it.state === "cancelled" ? "Cancelled" : `Approved${edited}`} by{" "}
          <Shown in="strong" text={it.by} max={80} />
        </>
      ) : it.state === "cancelled" ? (
        "Its call was cancelled: there is nothing left to decide. It ended"
      ) : (
        "Expired: no decision in time. It ended"
      )}
      {it.at > 0 && (
        <>
          {" "}
          at <Clock at={it.at} />
        </>
      )}
      {it.note && (
        <>
          : “<Shown text={it.note} max={1000} />”
        </>
      )}
      {unused && <span class="muted"> Not used yet: the call runs if the caller calls again.</span>}
    </p>
  );
}

function Given({ name, value, differs }: { name: string; value: Json | undefined; differs?: Difference }) {
  return (
    <div class={differs ? "differs" : ""} data-testid={`given-${name}`}>
      <dt>
        <Shown in="code" text={name} max={200} />
        {differs ? (
          <span class="must">{differs.before === undefined ? "new" : differs.after === undefined ? "left out" : "differs"}</span>
        ) : (
          value !== undefined && <span class="kind">{kindOf(value)}</span>
        )}
      </dt>
      <dd>{differs ? <Differs it={differs} /> : <Whole value={value ?? null} />}</dd>
    </div>
  );
}

function Whole({ value }: { value: Json }) {
  if (typeof value === "string") return value ? <Long text={value} lines={8} label="Text" /> : <span class="muted">an empty text</span>;
  if (Array.isArray(value) || isObject(value)) return <JsonTree value={value} open={3} label="Value" />;
  return <code>{String(value)}</code>;
}

function Differs({ it }: { it: Difference }) {
  const [before, after] = compared(it.before ?? "", it.after ?? "");
  return (
    <div class="sides">
      <Side word={it.before === undefined ? "last time: not given" : "last time"} pieces={before} sign="−" />
      <Side word={it.after === undefined ? "now: not given" : "now"} pieces={after} sign="+" />
    </div>
  );
}

interface EditProps {
  it: Approval;
  draft: Draft;
  setDraft: (draft: Draft) => void;
  busy: boolean;
  disabled: boolean;
  problems: Failed["problems"];
  done: () => void;
  approve: () => void;
}

function Edit({ it, draft, setDraft, busy, disabled, done, approve, problems }: EditProps) {
  const box = useRef<HTMLDivElement>(null);
  const [checked, checking] = useChecked(draft, (value) => post<Checked>(at("approvals", it.id, "check"), { arguments: value }), it.id);
  useLayoutEffect(() => box.current?.querySelector<HTMLElement>("input, select, textarea")?.focus(), []);
  const wrong = placed(checked ? checked.problems : problems);
  return (
    <div class="stack" ref={box} onKeyDown={(event) => event.key === "Escape" && (done(), focusCard(it.id))}>
      <h3>Change the arguments, then approve. The caller is told that they were changed.</h3>
      <Editor schema={it.schema ?? { type: "object" }} draft={draft} onChange={setDraft} problems={wrong} testid={`edit-form-${it.id}`} />
      <Judged checked={checked} checking={checking} problems={wrong} broken={draft.broken} testid={`checked-${it.id}`} />
      <div class="row">
        <Button
          kind="primary"
          icon="check"
          busy={busy}
          disabled={disabled || !!draft.broken || checking || !checked?.valid}
          onClick={approve}
          testid={`approve-edited-${it.id}`}
        >
          Yes, with these
        </Button>
        <Button
          onClick={() => {
            done();
            focusCard(it.id);
          }}
          testid={`edit-cancel-${it.id}`}
        >
          Do not edit
        </Button>
      </div>
    </div>
  );
}

// What was decided, and what is remembered

function Past({ it, open }: { it: Approval; open: boolean }) {
  return (
    <li data-testid={`past-${it.id}`}>
      <Fold
        open={open}
        title={
          <span class="row tight">
            <State of={stateOf(it)} />
            <Shown in="strong" text={short(it.title || it.tool, 80)} />
            {!isNamed(it) && <Shown in="code" text={short(it.tool, 80)} />}
            <span class="muted">
              for <Shown text={short(it.who, 60)} />
              {it.at > 0 && (
                <>
                  , <Ago at={it.at} />
                </>
              )}
            </span>
          </span>
        }
      >
        <div class="stack">
          <Shown in="p" text={it.sentence} max={600} />
          <Verdict it={it} />
          <JsonTree value={it.arguments} open={2} label="Arguments" />
        </div>
      </Fold>
    </li>
  );
}

function Grants({ of }: { of: Grant[] }) {
  if (!of.length) return null;
  return (
    <Panel title={`Remembered (${of.length})`}>
      <ul>
        {of.map((each) => (
          <Granted key={each.id} it={each} />
        ))}
      </ul>
    </Panel>
  );
}

const WORDS: { [test: string]: string } = { is: "is", matches: "matches", in: "is one of", present: "is given" };

function Granted({ it }: { it: Grant }) {
  const [revoke, busy] = useAction(async () => {
    await post(at("grants", it.id, "revoke"));
    say("Revoked: the next call asks again.");
  });
  const loose = Object.entries(it.matching).map(
    ([name, tests]) =>
      `${name} ${Object.entries(tests)
        .map(([test, value]) => `${WORDS[test] ?? `is ${test.replace("_", " ")}`} ${JSON.stringify(value)}`)
        .join(" and ")}`,
  );
  const firm = Object.entries(it.arguments)
    .filter(([name]) => !(name in it.matching))
    .map(([name, value]) => `${name} = ${JSON.stringify(value)}`);
  const kind = kindOfCall(it.tool);
  return (
    <li class="grant" data-testid={`grant-${it.id}`}>
      <div class="grow">
        <p>
          <Shown in="strong" text={it.who} max={80} />{" "}
          may {{ tool: "call", resource: "read", prompt: "get" }[kind]}{" "}
          <Shown in="code" text={it.tool} max={80} />{" "}
          {loose.length + firm.length ? "when" : kind === "resource" ? "" : "without arguments"} <Shown text={[...loose, ...firm].join(", ")} max={160} />
        </p>
        <p class="muted fine">
          <Countdown until={it.until} />, approved by <Shown text={it.by} max={80} /> <Ago at={it.made} />
        </p>
      </div>
      <Button small kind="danger" icon="cross" busy={busy} disabled={!may("approve")} onClick={revoke} testid={`revoke-${it.id}`}>
        Revoke
      </Button>
    </li>
  );
}
