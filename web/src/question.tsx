// A question of a server to the person at the page: who asks, all of it, and three ways to answer.

import { useEffect, useRef, useState } from "preact/hooks";
import type { JsonObject, Question } from "./api";
import { Failed, said } from "./api-client";
import { Form } from "./form";
import { address, Url } from "./result";
import { initial, isObject, placed, short } from "./schema";
import { Button, Dialog, Icon, Notice, Shown } from "./ui";

export type Answer = { action: "accept" | "decline" | "cancel"; content?: JsonObject };

interface Props {
  question: Question;
  answer: (answer: Answer) => Promise<void>;
  aside: () => void; // look at something else first
}

export function Ask({ question, answer, aside }: Props) {
  const [content, setContent] = useState<JsonObject>(() => first(question));
  const [visited, setVisited] = useState(false);
  const [failed, setFailed] = useState<unknown>(null);
  const [busy, setBusy] = useState("");
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => box.current?.querySelector<HTMLElement>("input, select, textarea")?.focus(), []);
  const send = async (action: Answer["action"]) => {
    setBusy(action);
    setFailed(null);
    try {
      await answer(action === "accept" && question.schema ? { action, content } : { action });
    } catch (problem) {
      setFailed(problem);
      setBusy("");
    }
  };
  const where = question.url === undefined ? null : address(question.url);
  return (
    <Dialog
      title={
        <>
          <Shown text={question.server} max={80} /> asks you
        </>
      }
      onClose={aside}
      testid="question"
      actions={
        <>
          <Button testid="question-cancel" busy={busy === "cancel"} disabled={!!busy} onClick={() => send("cancel")} title="Stop here, without an answer">
            Cancel
          </Button>
          <Button
            testid="question-decline"
            busy={busy === "decline"}
            disabled={!!busy}
            onClick={() => send("decline")}
            title="Tell the server that you will not answer"
          >
            Decline
          </Button>
          {!where && (
            <Button kind="primary" icon="check" testid="question-accept" busy={busy === "accept"} disabled={!!busy} onClick={() => send("accept")}>
              Send the answer
            </Button>
          )}
          {where?.href && !visited && (
            <a class="button primary" href={where.href} target="_blank" rel="noopener noreferrer" data-testid="open-url" onClick={() => setVisited(true)}>
              <Icon name="link" />
              <span>
                Open <Shown text={short(where.host, 60)} /> in a new tab
              </span>
            </a>
          )}
          {visited && (
            <Button kind="primary" icon="check" testid="question-accept" busy={busy === "accept"} disabled={!!busy} onClick={() => send("accept")}>
              I have done it: go on
            </Button>
          )}
        </>
      }
    >
      <div class="stack" ref={box}>
        <blockquote class="asked">
          <Shown text={question.message} block />
        </blockquote>
        {where ? (
          <>
            <p>It wants you to visit this page. It opens only if you say so:</p>
            <Url of={where} />
            {question.host_shown && (
              <p>
                The real name of the site is{" "}
                <strong class="url-host">
                  <Shown text={question.host_shown} />
                </strong>
              </p>
            )}
            {warnings(question, where.warnings).map((each) => (
              <Notice tone="warn" key={each}>
                <p>
                  <Shown text={each} />
                </p>
              </Notice>
            ))}
            {visited && (
              <Notice tone="info">
                <p>
                  The page is open in another tab. When you have finished there, come back and go on: the call is then tried again.{" "}
                  <a href={where.href} target="_blank" rel="noopener noreferrer">
                    Open it once more
                  </a>
                </p>
              </Notice>
            )}
          </>
        ) : (
          <Form
            schema={question.schema ?? { type: "object" }}
            value={content}
            onChange={setContent}
            problems={failed instanceof Failed ? placed(failed.problems) : []}
          />
        )}
        <Notice tone="warn">
          <p>
            Only give this to a server you trust.{" "}
            <strong>
              <Shown text={question.server} max={80} />
            </strong>{" "}
            gets what you answer.{!where && " Never type passwords or keys here."}
          </p>
        </Notice>
        {failed !== null && (
          <Notice tone="bad" title="The answer was not taken">
            <p>
              <Shown text={said(failed)} />
            </p>
          </Notice>
        )}
      </div>
    </Dialog>
  );
}

function first(question: Question): JsonObject {
  const made = question.schema ? initial(question.schema, question.schema) : {};
  return { ...(isObject(made) ? made : {}), ...question.defaults };
}

/** The server's own warnings say it best; ours stand in where it has none. */
function warnings(question: Question, ours: string[]): string[] {
  return question.warnings?.length ? question.warnings : ours;
}
