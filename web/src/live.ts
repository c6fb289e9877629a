// What happens at the server, as it happens: one event stream, and what it has told so far. Nothing here polls.
import type { Approval, Connection, Figures, Health, Hello, Minute, Replica, Row, Tick, Totals, TryEvent, Upstream } from "./api";
import { at, get, me, respond } from "./api-client";
import { Cell } from "./cell";

const KEPT = 100; // finished calls
export const MINUTES = 61; // an hour, and the one that is going on: in its place the charts have the last sixty seconds

export const stream = new Cell<"opening" | "open" | "lost">("opening");
export const heard = new Cell(0); // when the stream last told something, by the server's clock
export const running = new Cell<Row[]>([]);
export const runningTotal = new Cell(0);
export const finished = new Cell<Row[]>([]); // newest first
export const totals = new Cell<Totals>({ calls: 0, errors: 0, refused: 0 });
export const minutes = new Cell<Minute[]>([]); // oldest first, the last is going on
export const waiting = new Cell<Approval[]>([]); // oldest first
export const connections = new Cell<Connection[]>([]);
export const replicas = new Cell<{ at: number; rows: Replica[] }>({ at: 0, rows: [] }); // and when they were sent; empty outside of a fleet
export const health = new Cell<Health | null>(null);
export const figures = new Cell<Figures>({ last: { calls: 0, errors: 0, refused: 0, p95_ms: 0 }, refused: [], tools: [], trials: [] });
export const upstreams = new Cell<Upstream[]>([]);
export const toolsChanged = new Cell(0); // counts; watch it to fetch the list again
export const grantsChanged = new Cell(0);
export const runsEnded = new Cell(0); // counts the runs of this session; watch it to fetch numbers of calls again
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

let source: AbortController | null = null;
let retry = 0;
let tries = 0;

/** Open the stream, or open it anew. */
export function open(): void {
  close();
  const opened = new AbortController();
  source = opened;
  void read(opened.signal)
    .catch(() => {}) // which is the same as its end
    .then(() => lost(opened));
}

const TAKES: { [event: string]: (data: any) => void } = {
  hello: greet,
  tick: (tick: Tick) => {
    pending.push(tick);
    if (pending.length > 50) pending.shift(); // a page nobody looks at
    later();
  },
  approval: (approval: Approval) => {
    for (const listener of [...onApprovals]) listener(approval); // who may want to know whether it waited until now
    took(approval);
  },
  connections: (all: Connection[]) => connections.set(all),
  upstreams: (all: Upstream[]) => upstreams.set(all),
  replicas: (rows: Replica[]) => replicas.set({ at: now(), rows }),
  health: (said: Health) => health.set(said),
  figures: (said: Figures) => figures.set(said),
  tools: () => toolsChanged.set(toolsChanged.value + 1),
  grants: () => grantsChanged.set(grantsChanged.value + 1),
  try: (event: TryEvent) => {
    for (const listener of [...onTries]) listener(event);
    if (event.kind === "done") runsEnded.set(runsEnded.value + 1);
  },
};

/** Read the stream to its end. An EventSource could not send the token of the session. */
async function read(signal: AbortSignal): Promise<void> {
  const { body } = await respond(at("events"), { signal });
  const reader = body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
    const events = (rest + piece.value).split("\n\n");
    rest = events.pop()!;
    for (const event of events) {
      if (signal.aborted) return;
      const name = /^event: (.*)$/m.exec(event)?.[1] ?? "";
      const data = /^data: (.*)$/m.exec(event)?.[1];
      if (data === undefined) continue;
      try {
        TAKES[name]?.(JSON.parse(data));
      } catch (problem) {
        reportError(problem); // a fault of this page, not of the stream
      }
    }
  }
}

export function close(): void {
  clearTimeout(retry);
  source?.abort();
  source = null;
}

async function lost(broken: AbortController): Promise<void> {
  if (broken !== source) return;
  stream.set("lost");
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
  replicas.set({ at: now(), rows: hello.replicas });
  connections.set(hello.connections);
  upstreams.set(hello.upstreams);
  health.set(hello.health);
  figures.set(hello.figures);
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
