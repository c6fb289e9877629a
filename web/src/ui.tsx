// The parts every screen is made of.
import type { ComponentChildren, TargetedKeyboardEvent, TargetedMouseEvent } from "preact";
import { useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Json } from "./api";
import { Failed, said, save } from "./api-client";
import { Cell, use } from "./cell";
import { EACH, FIRST } from "./hidden";
import { now } from "./live";
import { kindOfCall } from "./route";

// Foreign text

const CHIPS = 400; // in one text; what follows is written out as text
const PILED = /\p{M}{7,}/u; // marks upon marks, as no script has them, would be painted over what is beside them
const EVERY = new RegExp(`${EACH.source}|(?<piled>${PILED.source})`, "gsu");
function nameOf(char: string): string {
  const code = char.codePointAt(0) ?? 0;
  return code < 0xa0 ? `\\x${code.toString(16).padStart(2, "0")}` : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

function kindOf(char: string): string {
  if (char < "\xa0") return "control character";
  return /[\u200e\u200f\u202a-\u202e\u2066-\u2069]/.test(char) ? "changes the direction of the text" : "invisible character";
}

/** Text without anything that acts or hides, for attributes and titles. */
export function plain(text: string): string {
  if (!FIRST.test(text) && !PILED.test(text)) return text;
  return text.replace(/\r\n/g, "\n").replace(EVERY, (run: string, ...rest) => {
    const { piled } = rest.at(-1) as { piled?: string };
    if (piled !== undefined) return `<${count(piled.length)} marks>`;
    return [...run].map((char) => (char < "\xa0" ? nameOf(char) : `<${nameOf(char)}>`)).join("");
  });
}

interface Chip {
  char: string; // or how many more there are
  kind: string;
}

/** Texts, and what is to be shown between them. No elements: Preact would keep old trees alive for remembered ones. */
function pieces(text: string): (string | Chip)[] {
  if (!FIRST.test(text) && !PILED.test(text)) return [text];
  const whole = text.replace(/\r\n/g, "\n");
  const parts: (string | Chip)[] = [];
  let from = 0;
  for (const found of whole.matchAll(EVERY)) {
    if (parts.length > 2 * CHIPS) break;
    const run = found.groups?.piled === undefined ? [...found[0]] : [];
    parts.push(whole.slice(from, found.index));
    if (!run.length) parts.push({ char: `${count(found[0].length)} marks`, kind: "combining characters, one upon the other" });
    for (const char of run.length > 6 ? run.slice(0, 4) : run) parts.push({ char: nameOf(char), kind: kindOf(char) });
    if (run.length > 6) parts.push({ char: `and ${count(run.length - 4)} more`, kind: "hidden characters" });
    from = found.index + found[0].length;
  }
  parts.push(plain(whole.slice(from)));
  return parts;
}

/**
 * Text that came from somewhere else: inert, what hides is visible, its direction is its own, long ones are cut.
 * With `line` it is one line without a button for the rest: for names, in links and in rows. With `in` it stands in an
 * element of its own: "code", or "p.muted".
 */
export function Shown({ text, max = 4000, block, line, in: into }: { text: string; max?: number; block?: boolean; line?: boolean; in?: string }) {
  const [all, setAll] = useState(false);
  const cut = !all && text.length > max;
  const begin = cut ? text.slice(0, max) : text;
  const part = line ? begin.replace(/\s+/g, " ") : begin;
  const content = useMemo(() => pieces(part), [part]);
  const [tag, name] = into?.split(".") ?? [];
  const shown = (
    <bdi class={block ? "shown block" : "shown"}>
      {content.map((piece) =>
        typeof piece === "string" ? (
          piece
        ) : (
          <span class="hidden-char" title={piece.kind}>
            {piece.char}
          </span>
        ),
      )}
      {cut && line && "…"}
      {cut && !line && (
        <>
          {"… "}
          <button type="button" class="more" onClick={() => setAll(true)}>
            {count(text.length - max)} more characters
          </button>
        </>
      )}
    </bdi>
  );
  const Tag = tag as "p"; // whatever it is
  return tag ? <Tag class={name}>{shown}</Tag> : shown;
}

// Values

const CHILDREN = 100; // shown at a time
const UNFOLDED = 30; // children of a branch that is open by itself

/** A JSON value to look into. Branches are made when they are opened, long lists come in parts, long texts are cut. */
export function JsonTree({ value, open = 2, label }: { value: Json; open?: number; label?: string }) {
  return (
    <div class="tree" role="group" aria-label={label ?? "Value"}>
      <Branch value={value} open={open} />
    </div>
  );
}

function Branch({ name, value, open }: { name?: string; value: Json; open: number }) {
  const list = Array.isArray(value);
  const size = value === null || typeof value !== "object" ? 0 : list ? value.length : Object.keys(value).length;
  const [shown, setShown] = useState(open > 0 && (name === undefined || size <= UNFOLDED));
  const [limit, setLimit] = useState(CHILDREN);
  const key = name !== undefined && (
    <span class="tree-name">
      <Shown text={name} max={200} line />
      {": "}
    </span>
  );
  if (value === null || typeof value !== "object") {
    return (
      <div class="tree-leaf">
        {key}
        <Leaf value={value} />
      </div>
    );
  }
  if (!size) {
    return (
      <div class="tree-leaf">
        {key}
        <span class="tree-empty">{list ? "[ ]" : "{ }"}</span>
      </div>
    );
  }
  const entries: [string, Json][] = !shown
    ? []
    : list
      ? value.slice(0, limit).map((inner, index) => [String(index), inner])
      : Object.entries(value).slice(0, limit);
  return (
    <div>
      <button type="button" class="tree-toggle" aria-expanded={shown} onClick={() => setShown(!shown)}>
        <Icon name="chevron" />
        {key}
        <span class="tree-size">{list ? `[ ${count(size)} ]` : `{ ${count(size)} }`}</span>
      </button>
      {shown && (
        <div class="tree-inner">
          {entries.map(([inner, child]) => (
            <Branch key={inner} name={inner} value={child} open={open - 1} />
          ))}
          {size > limit && (
            <button type="button" class="more" onClick={() => setLimit(limit + 10 * CHILDREN)}>
              {count(size - limit)} more
            </button>
          )}
        </div>
      )}
    </div>
  );
}

function Leaf({ value }: { value: null | boolean | number | string }) {
  if (typeof value !== "string") return <span class={`tree-${value === null ? "null" : typeof value}`}>{String(value)}</span>;
  return (
    <span class="tree-string">
      {'"'}
      <Shown text={value} max={600} />
      {'"'}
    </span>
  );
}

/** Text in a fixed width, in its own scroll; with a button that copies it. */
export function Code({ text, label, copy = true, max = 64_000, testid }: { text: string; label: string; copy?: boolean; max?: number; testid?: string }) {
  return (
    <div class="code">
      <pre tabIndex={0} aria-label={label} role="region" data-testid={testid}>
        <Shown text={text} max={max} />
      </pre>
      {copy && <Copy text={text} />}
    </div>
  );
}

// Words for numbers

const numbers = new Intl.NumberFormat("en-US");

export function count(value: number): string {
  return numbers.format(value);
}

/** count(2) + word: "1 call", "2 calls". */
export function many(value: number, one: string, more = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : more}`;
}

export function bytes(value: number): string {
  if (value < 1024) return many(value, "byte");
  const power = Math.min(3, Math.floor(Math.log2(value) / 10));
  return `${(value / 1024 ** power).toFixed(value / 1024 ** power < 10 ? 1 : 0)} ${["", "KB", "MB", "GB"][power]}`;
}

/** A length of time for reading: 0.4 ms, 82 ms, 4.2 s, 3 min 5 s, 2 h 10 min, 3 days. */
export function duration(seconds: number): string {
  const s = Math.max(0, seconds);
  if (s > 0 && s < 0.00001) return "<0.01 ms";
  if (s < 0.001) return `${(s * 1000).toFixed(2)} ms`;
  if (s < 0.01) return `${(s * 1000).toFixed(1)} ms`;
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 60) return `${s.toFixed(1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return many(Math.floor(s / 86400), "day");
}

/** The time of day here, with the date if that is not today. */
export function clock(at: number, exact = false): string {
  const date = new Date(at * 1000);
  const two = (n: number) => String(n).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  const fine = exact ? `.${String(date.getMilliseconds()).padStart(3, "0")}` : "";
  const today = new Date().toDateString() === date.toDateString();
  return today ? time + fine : `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}${fine}`;
}

function iso(at: number): string {
  const date = new Date(at * 1000);
  return Number.isNaN(date.getTime()) ? "" : date.toISOString();
}

// Time that goes on. The texts are written in place, by one timer for all: nothing is drawn again.

const ticking = new Map<HTMLElement, () => string>();
let timer = 0;

function tickAll(): void {
  for (const [element, text] of ticking) {
    const said = text();
    if (element.textContent !== said) element.textContent = said;
  }
}

function Ticking({ text, class: name, title, dateTime }: { text: () => string; class?: string; title?: string; dateTime?: string }) {
  const ref = useRef<HTMLTimeElement>(null);
  const latest = useRef(text);
  latest.current = text;
  useLayoutEffect(() => {
    const element = ref.current!;
    element.textContent = latest.current();
    ticking.set(element, () => latest.current());
    timer ||= window.setInterval(tickAll, 100);
    return () => {
      ticking.delete(element);
      if (!ticking.size) {
        clearInterval(timer);
        timer = 0;
      }
    };
  }, []);
  return <time ref={ref} class={`num ${name ?? ""}`} title={title} dateTime={dateTime} />;
}

/** How long ago: "now", "12 s ago", "3 min ago"; the exact time on hover. */
export function Ago({ at }: { at: number }) {
  return <Ticking text={() => ago(now() - at)} title={clock(at)} dateTime={iso(at)} />;
}

function ago(seconds: number): string {
  if (seconds < 2) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${many(Math.floor(seconds / 86400), "day")} ago`;
}

/** How long since then, going on. */
export function Elapsed({ since }: { since: number }) {
  return <Ticking text={() => going(now() - since)} />;
}

function going(seconds: number): string {
  return seconds < 60 ? `${Math.max(0, seconds).toFixed(1)} s` : duration(seconds);
}

/** How long until then: "4:32 left", or "over". */
export function Countdown({ until }: { until: number }) {
  return <Ticking text={() => left(until - now())} title={`until ${clock(until)}`} dateTime={iso(until)} />;
}

function left(seconds: number): string {
  if (seconds <= 0) return "over";
  const s = Math.ceil(seconds);
  if (s >= 3600) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min left`;
  return `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")} left`;
}

/** A point in time, by the clock here. */
export function Clock({ at, exact }: { at: number; exact?: boolean }) {
  return (
    <time class="num" dateTime={iso(at)} title={iso(at)}>
      {clock(at, exact)}
    </time>
  );
}

// Signs

const PATHS = {
  now: "M1.5 8h3l2-5 3 10 2-5h3",
  resources: "M2 4.5h4.5L8 6.5h6v7H2zM2 4.5v-2h4l1 2",
  prompts: "M2.5 3h11v8H8.5L5 13.8V11H2.5zM5.5 6h5M5.5 8.3h3",
  tools: "M10.5 2a3.5 3.5 0 0 0-3.3 4.7L2 11.9 4.1 14l5.2-5.2A3.5 3.5 0 0 0 13.9 5l-2.1 2.1-2-.9-.9-2L11 2.1",
  try: "M4.5 2.5v11l8.5-5.5z",
  approve: "M8 1.5 13.5 3.5v4c0 3.5-2.3 6-5.5 7-3.2-1-5.5-3.5-5.5-7v-4zM5.5 8l2 2 3.5-4",
  audit: "M3 2.5h10v11H3zM5.5 5.5h5M5.5 8h5M5.5 10.5h3",
  upstreams: "M2.5 2.5h11v4h-11zM2.5 9.5h11v4h-11zM5 4.5h.1M5 11.5h.1M8 4.5h3M8 11.5h3",
  connections: "M6 2v3M10 2v3M4 5h8v2.5a4 4 0 0 1-8 0zM8 11.5V14",
  sun: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6M8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1",
  moon: "M13.5 9.5A6 6 0 0 1 6.5 2.5a6 6 0 1 0 7 7",
  system: "M2 3h12v8H2zM6 14h4M8 11v3",
  copy: "M5.5 5.5h8v8h-8zM10.5 5.5v-3h-8v8h3",
  check: "M3 8.5l3.5 3.5L13 4.5",
  cross: "M4 4l8 8M12 4l-8 8",
  clock: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2M8 4.5V8l2.5 1.5",
  warn: "M8 2 14.5 13.5h-13zM8 6.5v3M8 11.5v.1",
  stop: "M4 4h8v8H4z",
  ask: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2M6.3 6.3A1.7 1.7 0 1 1 8 8.3v.9M8 11.3v.1",
  block: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2M3.8 3.8l8.4 8.4",
  chevron: "M6 4l4 4-4 4",
  back: "M10 4 6 8l4 4",
  search: "M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9M10.5 10.5 14 14",
  download: "M8 2v8M4.5 7 8 10.5 11.5 7M2.5 13.5h11",
  link: "M6.5 9.5l3-3M7 4.5l1.5-1.5a3 3 0 0 1 4.5 4.5L11.5 9M9 11.5 7.5 13A3 3 0 0 1 3 8.5L4.5 7",
  edit: "M2.5 13.5l.8-3L10.5 3.3l2.2 2.2-7.2 7.2zM9 5l2 2",
  hidden: "M2 2l12 12M6 4a7 7 0 0 1 2-.5c4 0 6.5 4.5 6.5 4.5a12 12 0 0 1-1.8 2.3M4 5.5A12 12 0 0 0 1.5 8S4 12.5 8 12.5a6 6 0 0 0 2.5-.6",
  lock: "M4 7.5h8v6H4zM5.5 7.5V5a2.5 2.5 0 0 1 5 0v2.5",
  info: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2M8 7.5v3.5M8 5v.1",
  user: "M8 2.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5M3 13.5c.5-2.5 2.5-4 5-4s4.5 1.5 5 4",
  refresh: "M13.5 8a5.5 5.5 0 1 1-1.8-4.1M13.5 2v3h-3",
  wire: "M2 5.5h11M10 2.5l3 3-3 3M14 11H3M6 8.5 3 11l3 2.5",
  run: "M8 2a6 6 0 1 0 6 6",
  plus: "M8 3v10M3 8h10",
} as const;

export type IconName = keyof typeof PATHS;

/** A sign beside a word; it says nothing to a screen reader, so the word must. */
export function Icon({ name, size = 16, class: more = "" }: { name: IconName; size?: number; class?: string }) {
  return (
    <svg class={`icon icon-${name} ${more}`} width={size} height={size} viewBox="0 0 16 16" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}

export type Tone = "good" | "warn" | "bad" | "info" | "quiet";
export const SIGNS: { [tone in Tone]: IconName } = { good: "check", warn: "warn", bad: "cross", info: "info", quiet: "info" };

/** A small word with a sign: never by colour alone. */
export function Pill({ tone = "quiet", icon, title, testid, children }: { tone?: Tone; icon?: IconName; title?: string; testid?: string; children: ComponentChildren }) {
  return (
    <span class={`pill ${tone}`} title={title} data-testid={testid}>
      {icon && <Icon name={icon} size={12} />}
      <span>{children}</span>
    </span>
  );
}

const STATES: { [state: string]: [Tone, IconName, string] } = {
  running: ["info", "run", "running"],
  asking: ["warn", "ask", "waiting for approval"],
  cancelling: ["warn", "stop", "cancel requested"],
  ok: ["good", "check", "ok"],
  tool_error: ["bad", "cross", "tool error"],
  internal: ["bad", "warn", "internal error"],
  timeout: ["bad", "clock", "timed out"],
  cancelled: ["quiet", "stop", "cancelled"],
  input_required: ["info", "ask", "asks for input"],
  pending: ["warn", "ask", "waiting for approval"],
  denied: ["bad", "block", "denied by a person"],
  forbidden: ["bad", "block", "denied by rule"],
  throttled: ["warn", "clock", "rate limit"],
  overloaded: ["warn", "clock", "rate limit"],
  bad_arguments: ["warn", "cross", "wrong arguments"],
  unknown_tool: ["warn", "cross", "unknown tool"],
  unknown_resource: ["warn", "cross", "unknown URI"],
  unknown_prompt: ["warn", "cross", "unknown prompt"],
  failed: ["bad", "cross", "failed"],
  unrecorded: ["bad", "warn", "not recorded"],
  asked: ["info", "ask", "asked"],
  approved: ["good", "check", "approved"],
  unused: ["good", "check", "approved, not used yet"],
  consumed: ["good", "check", "approved, used"],
  expired: ["quiet", "clock", "expired"],
  allow: ["good", "check", "allow"],
  ask: ["warn", "ask", "ask"],
  deny: ["bad", "block", "deny"],
  hide: ["quiet", "hidden", "hide"],
  depends: ["info", "info", "depends on the arguments"],
  changed: ["bad", "warn", "changed"],
  new: ["warn", "plus", "new"],
  pinned: ["quiet", "lock", "pinned"],
  up: ["good", "check", "up"],
  down: ["bad", "cross", "down"],
  starting: ["info", "run", "starting"],
  stopped: ["bad", "stop", "stopped"],
  idle: ["quiet", "clock", "not asked yet"],
};

/** The state or outcome of a call, an approval, a rule: sign and word. `label` is what was called: not all are tools. */
export function State({ of, label = "", testid }: { of: string; label?: string; testid?: string }) {
  const state = of === "tool_error" && kindOfCall(label) !== "tool" ? "failed" : of;
  const [tone, icon, word] = STATES[state] ?? ["quiet", "info", state.replace(/_/g, " ")];
  return (
    <Pill tone={tone} icon={icon} testid={testid}>
      <Shown text={word} max={60} line />
    </Pill>
  );
}

export function toneOf(state: string): Tone {
  return (STATES[state] ?? ["quiet"])[0];
}

/** How far a call has come. */
export function Bar({ done, total, label }: { done: number; total?: number; label: string }) {
  if (total === undefined || total <= 0) return <div class="bar unknown" role="progressbar" aria-label={label} />;
  const part = Math.max(0, Math.min(1, done / total));
  return (
    <div class="bar" role="progressbar" aria-label={label} aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(part * 100)}>
      <div style={{ transform: `scaleX(${part})` }} />
    </div>
  );
}

/** What definitions cost, and how much that is beside the dearest. */
export function Cost({ tokens, most }: { tokens: number; most: number }) {
  return (
    <p class="cost num">
      {count(tokens)} <span class="muted fine">tokens</span>
      <span class="cost-bar" style={{ width: `${(100 * tokens) / most}%` }} />
    </p>
  );
}

/** Nothing here, and what to do about it. */
export function Empty({ icon = "info", title, children }: { icon?: IconName; title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <Icon name={icon} size={24} />
      <p class="empty-title">{title}</p>
      {children && <div class="empty-text">{children}</div>}
    </div>
  );
}

/** Something to know before going on. */
export function Notice({ tone = "info", title, children, testid }: { tone?: Tone; title?: ComponentChildren; children?: ComponentChildren; testid?: string }) {
  return (
    <div class={`notice ${tone}`} role={tone === "bad" ? "alert" : undefined} data-testid={testid}>
      <Icon name={SIGNS[tone]} />
      <div>
        {title && <p class="notice-title">{title}</p>}
        {children}
      </div>
    </div>
  );
}

/** What went wrong with a request, and a way to try again. */
export function Problem({ of, again }: { of: unknown; again?: () => void }) {
  return (
    <Notice tone="bad" title={of instanceof Failed && of.status === 0 ? "No answer" : "That did not work"} testid="failure">
      <Shown in="p" text={said(of)} />
      {again && (
        <Button icon="refresh" onClick={again}>
          Try again
        </Button>
      )}
    </Notice>
  );
}

// Controls

interface ButtonProps {
  kind?: "primary" | "danger" | "plain" | "quiet" | "export";
  icon?: IconName;
  busy?: boolean;
  disabled?: boolean;
  small?: boolean;
  title?: string;
  label?: string; // for a screen reader, where the words on it are not enough
  testid?: string;
  pressed?: boolean;
  type?: "button" | "submit";
  onClick?: (event: TargetedMouseEvent<HTMLButtonElement>) => unknown;
  children?: ComponentChildren;
}

export function Button({ kind = "plain", icon, busy, disabled, small, title, label, testid, pressed, type = "button", onClick, children }: ButtonProps) {
  return (
    <button
      type={type}
      class={`button ${kind} ${small ? "small" : ""} ${children ? "" : "bare"}`}
      disabled={disabled || busy}
      aria-busy={busy || undefined}
      aria-pressed={pressed}
      aria-label={label}
      title={title ?? (children ? undefined : label)}
      data-testid={testid}
      onClick={onClick}
    >
      {busy ? <Icon name="run" class="spin" /> : icon && <Icon name={icon} />}
      {children && <span>{children}</span>}
    </button>
  );
}

/** A button that saves a file of the API. */
export function Save({ to, ...rest }: Omit<ButtonProps, "onClick" | "busy"> & { to: string }) {
  const [run, busy] = useAction(() => save(to));
  return <Button icon="download" {...rest} busy={busy} onClick={run} />;
}

/** A link that looks like a button. `to` leads elsewhere with `away`. */
export function Go({ to, icon, kind = "plain", small, away, testid, onClick, children }: { to: string; icon?: IconName; kind?: string; small?: boolean; away?: boolean; testid?: string; onClick?: () => void; children: ComponentChildren }) {
  return (
    <a
      class={`button ${kind} ${small ? "small" : ""}`}
      href={to}
      target={away ? "_blank" : undefined}
      rel={away ? "noopener noreferrer" : undefined}
      data-testid={testid}
      onClick={onClick}
    >
      {icon && <Icon name={icon} />}
      <span>{children}</span>
    </a>
  );
}

/** Copies a text; `text` may be a function, for texts that are made only then. */
export function Copy({ text, label = "Copy", word, testid }: { text: string | (() => string); label?: string; word?: string; testid?: string }) {
  const [done, setDone] = useState(false);
  useEffect(() => {
    if (!done) return undefined;
    const timeout = setTimeout(() => setDone(false), 1500);
    return () => clearTimeout(timeout);
  }, [done]);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(typeof text === "string" ? text : text());
      setDone(true);
      say("Copied.");
    } catch {
      say("The browser does not let this page copy. Select the text instead.");
    }
  };
  return (
    <Button kind="quiet" small icon={done ? "check" : "copy"} label={label} title={label} testid={testid} onClick={copy}>
      {word}
    </Button>
  );
}

/** A heading that opens and closes what is under it. What is inside is made when it is opened. */
export function Fold({ title, open = false, extra, testid, children }: { title: ComponentChildren; open?: boolean; extra?: ComponentChildren; testid?: string; children: ComponentChildren }) {
  const [shown, setShown] = useState(open);
  const id = useId();
  return (
    <section class="fold">
      <div class="fold-head">
        <button type="button" class="fold-toggle" aria-expanded={shown} aria-controls={id} data-testid={testid} onClick={() => setShown(!shown)}>
          <Icon name="chevron" />
          <span>{title}</span>
        </button>
        {extra}
      </div>
      <div id={id} class="fold-body" hidden={!shown}>
        {shown && children}
      </div>
    </section>
  );
}

/** A few views of the same thing. */
export function Tabs<T extends string>({ names, at, onPick, label }: { names: { [name in T]: string }; at: T; onPick: (name: T) => void; label: string }) {
  const all = Object.keys(names) as T[];
  const move = (event: TargetedKeyboardEvent<HTMLElement>) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = all[(all.indexOf(at) + step + all.length) % all.length]!;
    onPick(next);
    (event.currentTarget.children[all.indexOf(next)] as HTMLElement).focus();
  };
  return (
    <div class="tabs" role="tablist" aria-label={label} onKeyDown={move}>
      {all.map((name) => (
        <button key={name} type="button" role="tab" class="tab" aria-selected={name === at} tabIndex={name === at ? 0 : -1} data-testid={`pick-${name}`} onClick={() => onPick(name)}>
          {names[name]}
        </button>
      ))}
    </div>
  );
}

/** A question over the page. Escape and a click beside it close it; the focus returns to where it was. */
export function Dialog({ title, onClose, actions, wide, testid, children }: { title: ComponentChildren; onClose: () => void; actions?: ComponentChildren; wide?: boolean; testid?: string; children: ComponentChildren }) {
  const ref = useRef<HTMLDialogElement>(null);
  const id = useId();
  useLayoutEffect(() => {
    const dialog = ref.current!;
    const before = document.activeElement;
    dialog.showModal();
    return () => {
      dialog.close();
      if (before instanceof HTMLElement && before.isConnected) before.focus();
    };
  }, []);
  return (
    <dialog
      ref={ref}
      class={wide ? "dialog wide" : "dialog"}
      aria-labelledby={id}
      data-testid={testid}
      onCancel={(event) => {
        event.preventDefault();
        onClose();
      }}
      onMouseDown={(event) => event.target === ref.current && onClose()}
    >
      <div class="dialog-box">
        <div class="dialog-head">
          <h2 id={id}>{title}</h2>
          <Button kind="quiet" icon="cross" label="Close" onClick={onClose} />
        </div>
        <div>{children}</div>
        {actions && <div class="dialog-actions">{actions}</div>}
      </div>
    </dialog>
  );
}

/** A titled area of a screen. */
export function Panel({ title, extra, class: more = "", testid, children }: { title?: ComponentChildren; extra?: ComponentChildren; class?: string; testid?: string; children: ComponentChildren }) {
  const id = useId();
  return (
    <section class={`panel ${more}`} aria-labelledby={title ? id : undefined} data-testid={testid}>
      {title && (
        <div class="panel-head">
          <h2 id={id}>{title}</h2>
          {extra}
        </div>
      )}
      {children}
    </section>
  );
}

/** The names of columns; those to the right end in ">". */
export function Head({ of }: { of: string[] }) {
  return (
    <thead>
      <tr>
        {of.map((name) => (
          <th key={name} scope="col" class={name.endsWith(">") ? "right" : undefined}>
            {name.replace(">", "")}
          </th>
        ))}
      </tr>
    </thead>
  );
}

/** Names and values under each other. */
export function Facts({ of }: { of: [name: string, value: ComponentChildren][] }) {
  return (
    <dl class="facts">
      {of
        .filter(([, value]) => value !== "" && value !== undefined && value !== null && value !== false)
        .map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
    </dl>
  );
}

// Short messages

export const message = new Cell("");
let clearing = 0;

/** Say something that passes: shown for a moment, and read out. */
export function say(text: string): void {
  message.set(text);
  clearTimeout(clearing);
  clearing = window.setTimeout(() => message.set(""), 4000);
}

export function Message() {
  const text = use(message);
  return (
    <div class="message" role="status" aria-live="polite">
      {text && <span>{text}</span>}
    </div>
  );
}

// Data that is fetched

export interface Loaded<T> {
  data?: T;
  failure?: unknown;
  loading: boolean;
  again: () => void;
}

/** What `load` gives; loaded again when `on` changes. The old data stays until the new is there. */
export function useData<T>(load: (signal: AbortSignal) => Promise<T>, on: unknown[]): Loaded<T> {
  const [state, setState] = useState<{ data?: T; failure?: unknown; loading: boolean }>({ loading: true });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    setState((old) => ({ ...old, loading: true }));
    load(stop.signal).then(
      (data) => stop.signal.aborted || setState({ data, loading: false }),
      (failure) => stop.signal.aborted || setState((old) => ({ data: old.data, failure, loading: false })),
    );
    return () => stop.abort();
  }, [...on, turn]);
  return { ...state, again: () => setTurn((n) => n + 1) };
}

/** A function that says what went wrong if it does, and whether it is at work. */
export function useAction(act: () => Promise<unknown>): [run: () => Promise<void>, busy: boolean] {
  const [busy, setBusy] = useState(false);
  const run = async () => {
    setBusy(true);
    try {
      await act();
    } catch (problem) {
      say(said(problem));
    } finally {
      setBusy(false);
    }
  };
  return [run, busy];
}

/** A value that changes no faster than that: nobody reads a chart ten times a second. */
export function useSlow<T>(value: T, ms: number): T {
  const [shown, setShown] = useState(value);
  const latest = useRef(value);
  const timer = useRef(0);
  latest.current = value;
  useEffect(() => {
    if (shown === value || timer.current) return;
    timer.current = window.setTimeout(() => {
      timer.current = 0;
      setShown(latest.current);
    }, ms);
  }, [value, shown]);
  useEffect(() => () => clearTimeout(timer.current), []);
  return shown;
}

// Keys

type Keys = { [key: string]: (event: KeyboardEvent) => void };
const layers: { current: Keys }[] = [];
let prefix = "";
let prefixAt = 0;

/** Keys of a screen: {"j": …, "g n": …, "?": …}. Letters in lower case. Nothing happens while somebody types. */
export function useKeys(keys: Keys): void {
  const latest = useRef(keys);
  latest.current = keys;
  useEffect(() => {
    layers.unshift(latest);
    return () => void layers.splice(layers.indexOf(latest), 1);
  }, []);
}

function typing(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) && !/^(checkbox|radio|button|range)$/.test((target as HTMLInputElement).type));
}

window.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || typing(event.target) || document.querySelector("dialog[open]")) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const whole = prefix && event.timeStamp - prefixAt < 1500 ? `${prefix} ${key}` : key;
  prefix = "";
  for (const layer of layers) {
    const act = layer.current[whole];
    if (act) {
      event.preventDefault();
      act(event);
      return;
    }
  }
  if (layers.some((layer) => Object.keys(layer.current).some((name) => name.startsWith(`${key} `)))) {
    prefix = key;
    prefixAt = event.timeStamp;
  }
});
