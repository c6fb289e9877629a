// What a tool gave back, to look at. Nothing in it acts: texts are texts, links wait for a person, pictures are of known kinds.

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { Block, CallError, Json, Noted, Result } from "./api";
import { at } from "./api-client";
import { link } from "./route";
import { isObject, short } from "./schema";
import { bytes, Button, Copy, Dialog, Fold, Go, Icon, JsonTree, Notice, Pill, plain, Save, Shown } from "./ui";

const FOLDED_LINES = 14;
const FOLDED_TEXT = 1500;

export function ResultView({ result, call }: { result: Result; call: string }) {
  const meta = result.meta && Object.keys(result.meta).length > 0;
  const same = result.blocks.flatMap((block, index) => (isSame(block, result.structured) ? [index] : []));
  const empty = !result.blocks.length && result.structured === undefined;
  return (
    <div class={`result ${result.is_error ? "tool-error" : ""}`} data-testid="result" data-kind={result.is_error ? "tool-error" : "ok"}>
      {result.risk && (
        <Notice tone="warn" title="Handle with care" testid="risk">
          <Shown in="p" text={result.risk} />
        </Notice>
      )}
      {result.is_error && (
        <p class="verdict-line">
          <Icon name="cross" /> <strong>Error of the tool.</strong> The call went through, and this is the answer: it could not be done. A model sees it, and
          may try again.
        </p>
      )}
      {empty && <p class="muted">An empty result: no content at all.</p>}
      {result.blocks.map((block, index) => !same.includes(index) && <Part block={block} download={at("calls", call, "blocks", index)} key={index} />)}
      {result.structured !== undefined && (
        <section class="result-part">
          <BlockHead kind="structured" extra={<Copy text={() => JSON.stringify(result.structured, null, 2)} label="Copy as JSON" />} />
          <JsonTree value={result.structured} open={4} label="Structured content" />
        </section>
      )}
      {same.map((index) => (
        <Fold title="The same as text" key={index} testid="same-as-text">
          <Part block={result.blocks[index]!} download={at("calls", call, "blocks", index)} />
        </Fold>
      ))}
      {meta && (
        <Fold title="About the result (_meta)">
          <JsonTree value={result.meta as Json} open={2} label="_meta" />
        </Fold>
      )}
    </div>
  );
}

/** Whether a text says what the structured content says: as JSON, or as the one value that was wrapped. */
function isSame(block: Block, structured: Json | undefined): boolean {
  if (structured === undefined || block.type !== "text" || block.cut) return false;
  const wrapped = isObject(structured) && Object.keys(structured).join() === "result" ? structured.result : undefined;
  if (wrapped === block.text) return true;
  try {
    const said = canonical(JSON.parse(block.text) as Json);
    return said === canonical(structured) || (wrapped !== undefined && said === canonical(wrapped));
  } catch {
    return false; // it is no JSON
  }
}

/** JSON with its members in order. */
function canonical(value: Json): string {
  return JSON.stringify(value, (_, inner: Json) => (isObject(inner) ? Object.fromEntries(Object.entries(inner).sort(([a], [b]) => (a < b ? -1 : 1))) : inner));
}

/** A call that was not carried out, or of which nothing is known: no answer of the tool. */
export function Refusal({ error }: { error: CallError }) {
  const [title, why] = {
    protocol: ["The call was not understood", "A protocol error: the server answered without running anything."],
    failed: ["It could not be done", "The server tried, and answered with an error."],
    refused: ["The call was refused", "A guard of the server turned it away. Nothing was run."],
    transport: ["The connection broke", "It is unknown whether anything was run."],
    timeout: ["No answer in time", "Something may still have been done."],
    internal: ["The console failed", ""],
  }[error.kind] ?? [error.kind, ""];
  const stopped = wasCancelled(error);
  const icon = stopped ? "stop" : error.kind === "refused" ? "block" : error.kind === "timeout" ? "clock" : "warn";
  return (
    <div class={stopped ? "refusal stopped" : "refusal"} data-testid="result" data-kind={stopped ? "cancelled" : error.kind} role="alert">
      <p class="refusal-title">
        <Icon name={icon} />
        <strong>{stopped ? "The call was cancelled" : title}</strong>
        {error.code !== undefined && <Pill icon="wire">JSON-RPC {error.code}</Pill>}
      </p>
      <Shown in="p.refusal-text" text={error.message} block />
      {!stopped && <p class="muted">{why}</p>}
      {error.data !== undefined && error.data !== null && <JsonTree value={error.data} open={2} label="More about the error" />}
    </div>
  );
}

/** How grave a line of a log is. */
export function LogLevel({ of }: { of: string }) {
  const tone = /^(error|critical|alert|emergency)$/.test(of) ? "bad" : of === "warning" ? "warn" : "quiet";
  return <Pill tone={tone}>{plain(of)}</Pill>;
}

/** A few words each, under one another. */
export function Lines({ of, label, testid }: { label: string; of: [when: string, what: ComponentChildren, text: string][]; testid?: string }) {
  return (
    <ol class="lines" tabIndex={0} aria-label={label} data-testid={testid}>
      {of.map(([when, what, text], index) => (
        <li key={index}>
          <span class="muted num">{when}</span>
          <span class="num">{what}</span>
          <Shown text={text} max={600} />
        </li>
      ))}
    </ol>
  );
}

/** A cancelled call ends as a refusal that says so. */
export const wasCancelled = (error: CallError): boolean => error.kind === "refused" && /^Cancelled\b/.test(error.message);

function Part({ block, download }: { block: Block; download: string }) {
  if (!block.role) return <Content block={block} download={download} />;
  return (
    <div class="said" data-role={plain(block.role)} data-testid="said">
      <p class="said-by">{plain(block.role)}</p>
      <Content block={block} download={download} />
    </div>
  );
}

function Content({ block, download }: { block: Block; download: string }) {
  switch (block.type) {
    case "text":
      return (
        <section class="result-part">
          <BlockHead kind="text" notes={block.notes} extra={<Copy text={block.text} label="Copy the text" />} />
          <Long text={block.text} />
          <Rest block={block} download={download} />
        </section>
      );
    case "image":
    case "audio":
      return (
        <section class="result-part">
          <BlockHead kind={block.type} notes={block.notes} detail={`${block.mime}, ${bytes(block.bytes)}`} />
          <Media block={block} />
          {(block.cut || !block.playable) && <Download to={download} size={block.bytes} />}
        </section>
      );
    case "link":
      return (
        <section class="result-part">
          <BlockHead kind="link" notes={block.notes} detail={[block.mime, block.size === undefined ? "" : bytes(block.size)].filter(Boolean).join(", ")} />
          <p class="link-name">
            <Shown in="strong" text={block.title || block.name || "a resource"} />
            {block.title && block.name && block.title !== block.name && (
              <Shown in="code" text={block.name} />
            )}
          </p>
          {block.description && (
            <Shown in="p" text={block.description} />
          )}
          <Target uri={block.uri} readable={block.readable} />
        </section>
      );
    case "resource":
      return (
        <section class="result-part">
          <BlockHead kind="resource" notes={block.notes} detail={[block.mime, bytes(block.bytes)].filter(Boolean).join(", ")} />
          <Target uri={block.uri} readable={block.readable} />
          {block.text !== undefined ? (
            <Long text={block.text} />
          ) : block.playable ? (
            <Media block={block} />
          ) : (
            <p class="muted">Binary: not shown.</p>
          )}
          {block.text === undefined ? (block.cut || !block.playable) && <Download to={download} size={block.bytes} /> : <Rest block={block} download={download} />}
        </section>
      );
    default:
      return (
        <section class="result-part">
          <BlockHead kind="other" notes={block.notes} detail="a kind of content this page does not know" />
          <JsonTree value={block.json} open={2} label="Content" />
        </section>
      );
  }
}

function BlockHead({ kind, notes, detail, extra }: { kind: string; notes?: Noted; detail?: string; extra?: ComponentChildren }) {
  const told = [
    notes?.audience?.length ? `for ${notes.audience.join(" and ")}` : "",
    notes?.priority === undefined ? "" : `priority ${notes.priority}`,
    notes?.lastModified ? `last modified ${notes.lastModified}` : "",
  ].filter(Boolean);
  return (
    <div class="result-head">
      <span class="result-kind">{kind}</span>
      {detail && (
        <Shown in="span.muted" text={detail} max={200} />
      )}
      {told.map((each) => (
        <Pill key={each}>
          <Shown text={each} max={80} />
        </Pill>
      ))}
      {extra && <span class="push">{extra}</span>}
    </div>
  );
}

/** A text as it is; the beginning of a long one, until somebody wants all of it. */
export function Long({ text, lines = FOLDED_LINES, label = "Text" }: { text: string; lines?: number; label?: string }) {
  const [all, setAll] = useState(false);
  const rows = text.split("\n", lines + 1);
  const long = rows.length > lines || text.length > FOLDED_TEXT;
  const start = rows.slice(0, lines).join("\n").slice(0, FOLDED_TEXT);
  return (
    <>
      <pre class="long-text" tabIndex={long ? 0 : undefined} role={long ? "group" : undefined} aria-label={long ? label : undefined}>
        <Shown text={all || !long ? text : `${start}…`} max={70_000} />
      </pre>
      {long && (
        <Button kind="quiet" small onClick={() => setAll(!all)} testid="fold">
          {all ? "Show less" : `Show all ${text.length.toLocaleString("en")} characters`}
        </Button>
      )}
    </>
  );
}

function Rest({ block, download }: { block: { bytes: number; cut: boolean }; download: string }) {
  return block.cut ? (
    <p class="cut-off">
      <span class="muted">Only the beginning is here; the whole is {bytes(block.bytes)}.</span> <Download to={download} size={block.bytes} />
    </p>
  ) : null;
}

function Download({ to, size }: { to: string; size: number }) {
  return (
    <Save to={to} small testid="download">
      Download {bytes(size)}
    </Save>
  );
}

function Media({ block }: { block: { mime: string; data?: string; cut: boolean; playable?: boolean } }) {
  const [broken, setBroken] = useState(false);
  if (broken) return <p class="muted">The browser cannot show it: it is not what it says it is.</p>;
  if (!block.playable)
    return (
      <p class="muted">
        Not shown: <Shown text={block.mime || "no type"} max={80} /> is not a kind this page plays, or it is not what it says it is.
      </p>
    );
  if (block.cut) return <p class="muted">Too large to be shown here.</p>;
  const source = `data:${block.mime};base64,${block.data}`;
  return block.mime.toLowerCase().startsWith("audio/") ? (
    <audio controls src={source} onError={() => setBroken(true)} aria-label="A sound that was returned" />
  ) : (
    <img class="picture" src={source} alt="A picture that was returned" onError={() => setBroken(true)} />
  );
}

// Addresses

export interface Address {
  before: string;
  host: string;
  after: string;
  warnings: string[];
  href: string; // "": it is not opened
}

/** An address as a browser would open it, with the part that says who gets the visit; nothing but web pages opens. */
export function address(uri: string): Address {
  const warnings: string[] = [];
  const url = URL.canParse(uri) ? new URL(uri) : null;
  if (!url || !/^https?:$/.test(url.protocol))
    return {
      before: uri,
      host: "",
      after: "",
      warnings: [url ? `Only http and https addresses can be opened from here, and this is ${url.protocol.slice(0, -1)}.` : "This is not an address."],
      href: "",
    };
  if (url.protocol === "http:" && !/^(localhost|127\.|\[::1\])/.test(url.hostname))
    warnings.push("It is not encrypted: others on the way can read and change it.");
  if (/(^|\.)xn--/.test(url.hostname))
    warnings.push("The name is written in letters that can look like others; this is its real form. Compare it with what you expect.");
  if (url.username || url.password) warnings.push("What stands before the @ is no site, only a user name.");
  const head = `${url.protocol}//${url.username || url.password ? `${url.username}${url.password && `:${url.password}`}@` : ""}`;
  return { before: head, host: url.host, after: url.pathname + url.search + url.hash, warnings, href: url.href };
}

/** The whole of an address, the domain marked. */
export function Url({ of }: { of: Address }) {
  return (
    <p class="url" data-testid="url">
      <Shown text={of.before} max={4000} />
      {of.host && (
        <strong class="url-host" data-testid="url-host">
          <Shown text={of.host} />
        </strong>
      )}
      <Shown text={of.after} max={4000} />
    </p>
  );
}

/** A link that does nothing until a person has seen where it leads, and agreed; one to a resource leads to its page. */
function Target({ uri, readable }: { uri: string; readable: boolean }) {
  const [asked, ask] = useState(false);
  const where = address(uri);
  if (readable)
    return (
      <a class="target" data-testid="link" href={link("resources", uri)}>
        <Icon name="resources" />
        <Shown text={short(uri, 300)} />
      </a>
    );
  return (
    <>
      <button type="button" class="target" data-testid="link" onClick={() => ask(true)}>
        <Icon name="link" />
        <Shown text={short(uri, 300)} />
      </button>
      {asked && (
        <Dialog
          title={where.href ? "Open this page?" : "This cannot be opened here"}
          onClose={() => ask(false)}
          actions={
            <>
              <Button onClick={() => ask(false)}>{where.href ? "Stay here" : "Close"}</Button>
              {where.href && (
                <Go to={where.href} kind="primary" icon="link" away testid="open-url" onClick={() => ask(false)}>
                  Open in a new tab
                </Go>
              )}
            </>
          }
        >
          <p>The server returned this address. Where it leads was not checked.</p>
          <Url of={where} />
          {where.warnings.map((each) => (
            <Notice tone="warn" key={each}>
              <p>{each}</p>
            </Notice>
          ))}
          {where.href && where.href !== uri && (
            <p class="muted">
              It was written as{" "}
              <Shown in="code" text={uri} max={4000} />
            </p>
          )}
        </Dialog>
      )}
    </>
  );
}
