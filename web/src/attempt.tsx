// What is run from this page, and what came of it. It goes on while other screens are looked at: an approval may be needed there.

import type { CallError, JsonObject, Progress, Question, Result, TryEvent } from "./api";
import { at, me, post } from "./api-client";
import { Cell, use } from "./cell";
import { now, onTry, running, stream } from "./live";
import { Ask } from "./question";
import { Lines, LogLevel, Refusal, ResultView, wasCancelled } from "./result";
import { link } from "./route";
import { short } from "./schema";
import { Bar, Button, duration, Elapsed, Empty, Fold, Notice, Panel, Shown, State, useAction } from "./ui";

/** What a run asks for: a tool, a resource (a URI, or a template with its variables in `arguments`), or a prompt. */
export interface Asked {
  tool?: string;
  resource?: string;
  prompt?: string;
  arguments: JsonObject;
  revision: string;
}

interface Attempt {
  id: string;
  name: string; // of what was asked for
  place: string; // the address of its page
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

export const attempt = new Cell<Attempt | null>(null);

/** Whether another one can begin. */
export const isGoing = (it: Attempt | null): boolean => !!it && !it.done && !it.lost;
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

export async function begin(asked: Asked, place: string): Promise<void> {
  early = [];
  const { id } = await post<{ id: string }>(at("try"), asked);
  const name = asked.tool ?? asked.resource ?? asked.prompt ?? "";
  attempt.set({ id, name, place, began: now(), logs: [], aside: false, cancelling: false, lost: false });
  for (const event of early) if (event.id === id) take(event);
  early = [];
  if (matchMedia("(max-width: 900px)").matches) requestAnimationFrame(() => document.querySelector(".outcome")?.scrollIntoView({ block: "nearest" }));
}

/** What became of what was run at this place, or what to do. */
export function Outcome({ place, title, todo }: { place: string; title: string; todo: string }) {
  const { who } = use(me)!;
  const last = use(attempt);
  const it = last?.place === place ? last : null;
  if (!it)
    return (
      <Panel title="Result" class="outcome">
        {isGoing(last) ? (
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
