// What happens at the server, as it happens: one event stream, and what it has told so far. Nothing here polls.
import type { Approval, Connection, Health, Hello, Minute, Row, Tick, Totals, TryEvent } from "./api";
import { at, get, me } from "./api-client";
import { Cell } from "./cell";

const KEPT = 100; // finished calls
export const MINUTES = 61; // an hour, and the one that is going on

export const stream = new Cell<"opening" | "open" | "lost">("opening");
export const heard = new Cell(0); // when the stream last told something, by the server's clock
export const running = new Cell<Row[]>([]);
export const runningTotal = new Cell(0);
export const finished = new Cell<Row[]>([]); // newest first
export const totals = new Cell<Totals>({ calls: 0, errors: 0, refused: 0 });
export const minutes = new Cell<Minute[]>([]); // oldest first, the last is going on
export const waiting = new Cell<Approval[]>([]); // oldest first
export const connections = new Cell<Connection[]>([]);
export const health = new Cell<Health | null>(null);
export const toolsChanged = new Cell(0); // counts; watch it to fetch the list again
export const grantsChanged = new Cell(0);
export const sampled = new Cell(false); // whether lately more calls ended than were shown
const LATELY = 3; // s: a word that comes and goes with each tick cannot be read
let lastSample = 0;

type Listener<T> = (event: T) => void;
const onApprovals = new Set<Listener<Approval>>();
const onTries = new Set<Listener<TryEvent>>();

/** Be told each approval that is new or has changed. Returns what ends it. */
export function onApproval(listener: Listener<Approval>): () => void {
  onApprovals.add(listener);
  return () => void onApprovals.delete(listener);
}

/** Be told what happens in the calls this session tries. */
export function onTry(listener: Listener<TryEvent>): () => void {
  onTries.add(listener);
  return () => void onTries.delete(listener);
}

let skew = 0;

/** Seconds since the epoch, by the server's clock; it stands still while the server is out of reach. */
export function now(): number {
  return stream.value === "lost" && heard.value ? heard.value : Date.now() / 1000 + skew;
}

let source: EventSource | null = null;
let retry = 0;
let tries = 0;

/** Open the stream, or open it anew. */
export function open(): void {
  close();
  const opened = new EventSource(at("events"));
  source = opened;
  const on = <T>(name: string, take: (data: T) => void) =>
    opened.addEventListener(name, (event) => take(JSON.parse((event as MessageEvent<string>).data) as T));
  on<Hello>("hello", greet);
  on<Tick>("tick", (tick) => {
    pending.push(tick);
    if (pending.length > 50) pending.shift(); // a page nobody looks at
    later();
  });
  on<Approval>("approval", (approval) => {
    for (const listener of [...onApprovals]) listener(approval); // who may want to know whether it waited until now
    took(approval);
  });
  on<Connection[]>("connections", (all) => connections.set(all));
  on<Health>("health", (said) => health.set(said));
  on("tools", () => toolsChanged.set(toolsChanged.value + 1));
  on("grants", () => grantsChanged.set(grantsChanged.value + 1));
  on<TryEvent>("try", (event) => {
    for (const listener of [...onTries]) listener(event);
  });
  opened.onerror = () => void lost(opened);
}

export function close(): void {
  clearTimeout(retry);
  source?.close();
  source = null;
}

async function lost(broken: EventSource): Promise<void> {
  if (broken !== source) return;
  stream.set("lost");
  broken.close(); // browsers differ in when they try again; we do not
  tries += 1;
  retry = window.setTimeout(async () => {
    try {
      await get(at("me")); // a session that has ended shows itself here
    } catch {
      if (me.value === null) return;
    }
    if (broken === source) open();
  }, Math.min(500 * 2 ** (tries - 1), 8000));
}

function greet(hello: Hello): void {
  tries = 0;
  pending.length = 0;
  skew = hello.at - Date.now() / 1000;
  stream.set("open"); // from here on the clock goes again; drawn after all of this
  minutes.set([...hello.minutes.slice(1 - MINUTES), hello.minute]);
  wait(hello.approvals);
  connections.set(hello.connections);
  health.set(hello.health);
  toolsChanged.set(toolsChanged.value + 1);
  grantsChanged.set(grantsChanged.value + 1);
  if (hello.totals.calls < totals.value.calls) finished.set([]); // another server, or the same one started anew
  take([hello]);
}

function took(approval: Approval): void {
  wait([...waiting.value.filter((one) => one.id !== approval.id), approval]);
}

let expiry = 0;

/** Those that wait; they leave when their time is over, which nobody tells. */
function wait(all: Approval[]): void {
  const asked = all.filter((one) => one.state === "pending");
  const left = asked.filter((one) => one.expires > now());
  const late = asked.filter((one) => !left.includes(one));
  for (const listener of [...onApprovals]) for (const one of late) listener({ ...one, state: "expired", at: one.expires });
  waiting.set(left.sort((a, b) => a.created - b.created));
  clearTimeout(expiry);
  const soonest = Math.min(...left.map((one) => one.expires));
  if (left.length) expiry = window.setTimeout(() => wait(waiting.value), Math.min(Math.max(50, (soonest - now()) * 1000 + 50), 3_600_000));
}

// Ticks are applied once a frame, or once a second while nobody sees the page.
const pending: Tick[] = [];
let scheduled = false;

function later(): void {
  if (scheduled) return;
  scheduled = true;
  const apply = () => {
    scheduled = false;
    take(pending.splice(0));
  };
  if (document.hidden) setTimeout(apply, 1000);
  else requestAnimationFrame(apply);
}

function take(ticks: Tick[]): void {
  const last = ticks.at(-1);
  if (!last) return;
  const ended = new Map<string, Row>();
  for (const tick of ticks) for (const row of tick.finished) ended.set(row.id, row);
  if (ended.size) {
    const older = finished.value.filter((row) => !ended.has(row.id));
    finished.set([...[...ended.values()].reverse(), ...older].slice(0, KEPT));
  }
  const shown = ticks.reduce((sum, tick) => sum + tick.finished.length, 0);
  if (last.totals.calls - totals.value.calls > shown && totals.value.calls > 0) lastSample = last.at;
  sampled.set(last.at - lastSample < LATELY);
  heard.set(last.at);
  running.set(last.running);
  runningTotal.set(last.running_total);
  totals.set(last.totals);
  for (const { minute } of ticks) {
    const before = minutes.value.filter((one) => one.at < minute.at);
    minutes.set([...before, minute].slice(-MINUTES));
  }
}
