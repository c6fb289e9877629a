// A run from this page, and its outcome. It continues while other screens are open: an approval may be needed there.

import type { CallError, JsonObject, Progress, Question, Result, TryEvent } from "./api";
import { at, me, post } from "./api-client";
import { Cell, use } from "./cell";
import { now, onTry, running, stream } from "./live";
import { Ask } from "./question";
import { Lines, LogLevel, Refusal, ResultView, wasCancelled } from "./result";
import { link } from "./route";
import { short } from "./schema";
import { Bar, Button, duration, Elapsed, Empty, Fold, Notice, Panel, Shown, State, useAction } from "./ui";

/** What is run: a tool, a resource (a URI, or a template with its variables in `arguments`), or a prompt. */
export interface RunRequest {
  tool?: string;
  resource?: string;
  prompt?: string;
  arguments: JsonObject;
  revision: string;
}

interface Attempt {
  id: string;
  name: string; // of the tool, resource or prompt
  place: string; // the address of its page
  began: number;
  progress?: Progress;
  logs: { level: string; text: string }[];
  question?: { key: string; question: Question };
  aside: boolean; // the question was put aside
  cancelling: boolean;
  lost: boolean; // the stream broke while it ran: its outcome is unknown
  done?: { seconds: number; call: string; result?: Result; error?: CallError };
}

const MAX_LOGS = 500;
const MAX_EARLY = 200;

export const attempt = new Cell<Attempt | null>(null);

/** Whether no other one can begin. */
export const isRunning = (run: Attempt | null): boolean => !!run && !run.done && !run.lost;
let early: TryEvent[] = []; // events that came before the id of the run

onTry((event) => {
  if (attempt.value?.id === event.id) take(event);
  else early = [...early.slice(1 - MAX_EARLY), event];
});
stream.watch(() => {
  const run = attempt.value;
  if (stream.value === "lost" && run && !run.done) attempt.set({ ...run, lost: true });
});

function take(event: TryEvent): void {
  const run = attempt.value!;
  if (event.kind === "progress") attempt.set({ ...run, progress: event.progress });
  else if (event.kind === "log") attempt.set({ ...run, logs: [...run.logs.slice(1 - MAX_LOGS), { level: event.level, text: event.text }] });
  else if (event.kind === "question") attempt.set({ ...run, question: { key: event.key, question: event.question }, aside: false });
  else attempt.set({ ...run, question: undefined, done: event });
}

export async function begin(request: RunRequest, place: string): Promise<void> {
  early = [];
  const { id } = await post<{ id: string }>(at("try"), request);
  const name = request.tool ?? request.resource ?? request.prompt ?? "";
  attempt.set({ id, name, place, began: now(), logs: [], aside: false, cancelling: false, lost: false });
  for (const event of early) if (event.id === id) take(event);
  early = [];
  if (matchMedia("(max-width: 900px)").matches) requestAnimationFrame(() => document.querySelector(".outcome")?.scrollIntoView({ block: "nearest" }));
}

/** The outcome of the run at this place, or what to do. */
export function Outcome({ place, title, todo }: { place: string; title: string; todo: string }) {
  const { who } = use(me)!;
  const last = use(attempt);
  const run = last?.place === place ? last : null;
  if (!run)
    return (
      <Panel title="Result" class="outcome">
        {isRunning(last) ? (
          <Empty icon="run" title="Another call is under way">
            <a href={last!.place}>
              Look at <Shown text={short(last!.name, 80)} />
            </a>
          </Empty>
        ) : (
          <Empty icon="try" title={title}>
            {todo} It runs as{" "}
            <Shown in="strong" text={who} max={80} />
            , through the same rules, limits and records as any call.
          </Empty>
        )}
      </Panel>
    );
  const done = run.done;
  const answer = async (decision: { action: string; content?: JsonObject }) => {
    await post(at("try", run.id, "answer"), { key: run.question!.key, ...decision });
    if (attempt.value?.id === run.id) attempt.set({ ...attempt.value, question: undefined });
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
            !run.lost && (
              <>
                <State of={run.cancelling ? "cancelling" : "running"} testid="outcome" /> <Elapsed since={run.began} />
              </>
            )
          )}
        </span>
      }
    >
      <div class="stack">
        {!done && <Running run={run} />}
        {run.question && run.aside && (
          <Notice
            tone="info"
            title={
              <>
                <Shown text={run.question.question.server} max={80} /> waits for your answer.
              </>
            }
          >
            <Button small testid="question-again" onClick={() => attempt.set({ ...run, aside: false })}>
              Answer it
            </Button>
          </Notice>
        )}
        {run.question && !run.aside && (
          <Ask key={run.question.key} question={run.question.question} answer={answer} aside={() => attempt.set({ ...run, aside: true })} />
        )}
        {done?.result && <ResultView result={done.result} call={done.call} />}
        {done?.error && <Refusal error={done.error} />}
        {run.logs.length > 0 && (
          <Fold title={`Log (${run.logs.length})`} open={!done || run.logs.length < 20}>
            <Lines label="Log" testid="logs" of={run.logs.map(({ level, text }) => ["", <LogLevel of={level} />, text])} />
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

function Running({ run }: { run: Attempt }) {
  const row = use(running).find((each) => each.from === `console ${run.id}`);
  const [cancel, busy] = useAction(async () => {
    await post(at("try", run.id, "cancel"));
    if (attempt.value?.id === run.id) attempt.set({ ...attempt.value, cancelling: true });
  });
  if (run.lost)
    return (
      <Notice tone="warn" title="Its outcome is unknown">
        <p>
          The connection to the server broke while the call ran. It may have continued: look under <a href="#/now">Now</a>.
        </p>
        <Button small onClick={() => attempt.set(null)}>
          Put it aside
        </Button>
      </Notice>
    );
  return (
    <div class="trial" data-testid="going">
      <Bar done={run.progress?.done ?? 0} total={run.progress?.total} label="Progress" />
      <p class="trial-text" data-testid="progress">
        {run.progress ? (
          <>
            <span class="num">
              {run.progress.done}
              {run.progress.total === undefined ? "" : ` of ${run.progress.total}`}
            </span>{" "}
            {run.progress.message && <Shown text={run.progress.message} max={300} />}
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
      <Button icon="stop" kind="danger" small busy={busy} disabled={run.cancelling} onClick={cancel} testid="cancel-try">
        {run.cancelling ? "Cancel requested" : "Cancel"}
      </Button>
    </div>
  );
}
