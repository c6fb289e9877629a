// A question of a server to the person at the page: who asks, all of it, and three ways to answer.

import { useEffect, useRef, useState } from "preact/hooks";
import type { JsonObject, Question } from "./api";
import { Failed, said } from "./api-client";
import { Form } from "./form";
import { address, Url } from "./result";
import { initial, isObject, placed, short } from "./schema";
import { Button, Dialog, Go, Notice, Shown } from "./ui";

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
            <Go to={where.href} kind="primary" icon="link" away testid="open-url" onClick={() => setVisited(true)}>
              Open <Shown text={short(where.host, 60)} /> in a new tab
            </Go>
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
        <Shown in="blockquote.asked" text={question.message} block />
        {where ? (
          <>
            <p>It wants you to visit this page. It opens only if you say so:</p>
            <Url of={where} />
            {question.host_shown && (
              <p>
                The real name of the site is{" "}
                <Shown in="strong.url-host" text={question.host_shown} />
              </p>
            )}
            {warnings(question, where.warnings).map((each) => (
              <Notice tone="warn" key={each}>
                <Shown in="p" text={each} />
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
            <Shown in="strong" text={question.server} max={80} />{" "}
            gets what you answer.{!where && " Never type passwords or keys here."}
          </p>
        </Notice>
        {failed !== null && (
          <Notice tone="bad" title="The answer was not taken">
            <Shown in="p" text={said(failed)} />
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
