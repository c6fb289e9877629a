// Resources and prompts as a caller sees them; read and filled in from here, as any client gets them.

import { useEffect, useRef, useState } from "preact/hooks";
import type { CatalogEntry, CatalogView, Checked, JsonObject } from "../api";
import { at, get, may, post } from "../api-client";
import { type Asked, attempt, begin, isGoing, Outcome } from "../attempt";
import { use } from "../cell";
import { drafted, idOf, Judged, useChecked } from "../form";
import { About, Caution, Counts, Face, Hidden, Parts, Pickers, Switch, Verdict, Warnings } from "../listing";
import { toolsChanged } from "../live";
import { Long } from "../result";
import { go, link, route } from "../route";
import { constraints, members, placed, shape, short, step, text, typeName, written, type Member } from "../schema";
import { Button, bytes, Copy, Empty, Go, Panel, Pill, plain, Problem, Shown, useAction, useData } from "../ui";

type Kind = "resources" | "prompts";
type Query = { [name: string]: string };

const SUGGEST_MS = 150; // after the last key

export const Resources = () => <Beside key="resources" kind="resources" />;
export const Prompts = () => <Beside key="prompts" kind="prompts" />;

function Beside({ kind }: { kind: Kind }) {
  const place = use(route);
  const changed = use(toolsChanged);
  const asked: Query = Object.fromEntries(["as", "scopes", "revision"].map((name) => [name, place.query.get(name) ?? ""]));
  const words = place.query.get("q") ?? "";
  const { data, failure, again } = useData((signal) => get<CatalogView>(at("catalog", kind), asked, signal), [changed, ...Object.values(asked)]);
  const detail = useRef<HTMLDivElement>(null);
  const to = (name: string, query: Query = {}) => link(kind, name, { ...asked, q: words, ...query });
  useEffect(() => {
    if (place.name && matchMedia("(max-width: 900px)").matches) detail.current?.scrollIntoView({ block: "start" });
  }, [place.name, !data]);
  if (!data) return failure ? <Problem of={failure} again={again} /> : <Empty icon="tools" title={`Looking which ${kind} there are…`} />;
  const wanted = words.trim().toLowerCase();
  const found = data.entries.filter((each) => `${each.name} ${each.title} ${each.description} ${each.tags.join(" ")}`.toLowerCase().includes(wanted));
  const entry = data.entries.find((each) => each.name === place.name);
  return (
    <>
      <div class="title">
        <Parts at={kind} asked={asked} />
        <span class="grow">
          <input
            type="search"
            placeholder={`Search ${kind}`}
            aria-label={`Search ${kind}`}
            value={words}
            onInput={(event) => go(to(place.name, { q: event.currentTarget.value }), true)}
          />
        </span>
        <Pickers view={data} set={(query) => go(to(place.name, query), true)} />
      </div>
      {failure !== undefined && <Problem of={failure} again={again} />}
      <p class="summary" data-testid="summary">
        <span>
          <Shown in="strong" text={data.as} max={60} /> sees <strong>{data.entries.filter((each) => each.exposed).length}</strong> of {data.entries.length} {kind}
        </span>
      </p>
      {!data.entries.length ? (
        <Empty icon="tools" title={`The server has no ${kind}`}>
          Add one with <code>{kind === "resources" ? '@server.resource("notes://{name}")' : "@server.prompt"}</code>, and it appears here at once.
        </Empty>
      ) : (
        <div class="tools">
          <ul class="tool-list" aria-label={`${kind === "resources" ? "Resources and templates" : "Prompts"}, in the order of the wire`}>
            {found.map((each) => (
              <Item key={each.name} entry={each} kind={kind} to={to(each.name)} current={each === entry} />
            ))}
            {!found.length && (
              <li>
                <Empty icon="search" title="None says that">
                  <Button onClick={() => go(to(place.name, { q: "" }), true)}>Show all</Button>
                </Empty>
              </li>
            )}
          </ul>
          <div class="tool-detail" ref={detail}>
            {entry ? (
              <Detail key={entry.name} entry={entry} kind={kind} revision={asked.revision!} back={to("")} />
            ) : kind === "resources" ? (
              <Typed key={place.name} uri={place.name} revision={asked.revision!} />
            ) : place.name ? (
              <Empty icon="tools" title="There is no such prompt">
                <Shown text={place.name} max={200} /> is not here now.
              </Empty>
            ) : (
              <Empty icon="tools" title="Choose a prompt">
                Its arguments, and what becomes of them, are shown here.
              </Empty>
            )}
          </div>
        </div>
      )}
    </>
  );
}

/** Its title, or else its name for programs: that of a resource is shorter than its URI. */
const heading = (of: CatalogEntry): string => (of.title === of.name ? of.own_name : of.title);

function Item({ entry, kind, to, current }: { entry: CatalogEntry; kind: Kind; to: string; current: boolean }) {
  return (
    <li class={`tool ${entry.exposed ? "" : "not-exposed"}`} data-testid={`entry-${entry.name}`} data-exposed={entry.exposed}>
      <Face of={{ ...entry, title: heading(entry) }} />
      <div class="tool-text">
        <a class="tool-link" href={to} aria-current={current ? "true" : undefined}>
          <Shown in="strong" text={short(heading(entry), 80)} /> <Shown in="code" text={short(entry.name, 120)} />
        </a>
        <div class="row tight">
          <Verdict of={entry} />
          {entry.kind === "template" && <Pill icon="edit">template</Pill>}
          <Warnings of={entry} />
        </div>
        <Hidden of={entry} />
        <p class="muted fine num">
          {[entry.mimeType, entry.size === undefined ? "" : bytes(entry.size)].filter(Boolean).map((each) => (
            <span key={each}>
              <Shown text={each!} max={60} line /> ·{" "}
            </span>
          ))}
          <Counts of={entry} />
        </p>
      </div>
      <Switch of={entry} to={at("catalog", kind, entry.name, "switch")} />
    </li>
  );
}

function Detail({ entry, kind, revision, back }: { entry: CatalogEntry; kind: Kind; revision: string; back: string }) {
  const notes = entry.annotations;
  const ask = (given: JsonObject): Asked => ({ [entry.kind === "prompt" ? "prompt" : "resource"]: entry.name, arguments: given, revision });
  return (
    <div class="stack" data-testid="detail">
      <Panel>
        <div class="stack">
          <div class="detail-head">
            <Face of={{ ...entry, title: heading(entry) }} size={32} />
            <div class="grow">
              <Shown in="h2.detail-title" text={heading(entry)} max={200} />
              <span class="with-copy">
                <code data-testid="real-name">
                  <Shown text={entry.name} max={400} />
                </code>
                <Copy text={entry.name} label={entry.kind === "prompt" ? "Copy the name" : "Copy the URI"} />
              </span>
            </div>
            <Go to={back} kind="back">
              Back to the list
            </Go>
          </div>
          <Caution of={entry} />
          {entry.description ? <Long text={entry.description} label="Description" /> : <p class="muted">It has no description.</p>}
          <About
            of={entry}
            label={entry.kind === "prompt" ? `prompt:${entry.name}` : entry.name}
            before={[
              ["Name", entry.own_name !== entry.name && <Shown text={entry.own_name} max={200} />],
              ["Media type", entry.mimeType && <Shown text={entry.mimeType} max={200} />],
              ["Size", entry.size !== undefined && bytes(entry.size)],
              ["Meant for", notes?.audience?.length ? <Shown text={notes.audience.join(" and ")} max={100} /> : ""],
              ["Priority", notes?.priority],
              ["Last modified", notes?.lastModified && <Shown text={notes.lastModified} max={60} />],
            ]}
          />
        </div>
      </Panel>
      <Fill
        name={entry.name}
        kind={kind}
        fields={members(entry.input_schema).known}
        schema={entry.input_schema}
        completes={entry.completes}
        place={link(kind, entry.name)}
        ask={ask}
      />
    </div>
  );
}

const URI = { type: "object", properties: { uri: { title: "URI", type: "string", description: "A resource of the list, or one that a template of it makes." } }, required: ["uri"] };

/** A resource that a person names, or that something else of the page leads to. */
function Typed({ uri, revision }: { uri: string; revision: string }) {
  return (
    <div class="stack">
      <Fill
        name={uri}
        kind="resources"
        fields={members(URI).known}
        schema={URI}
        completes={[]}
        place={link("resources", uri)}
        first={{ uri }}
        ask={({ uri: typed }) => ({ resource: text(typed), arguments: {}, revision })}
      />
    </div>
  );
}

type Values = { [name: string]: string };
const filled = new Map<string, Values>(); // by place

interface FillProps {
  name: string;
  kind: Kind;
  fields: Member[];
  schema: JsonObject;
  completes: string[];
  place: string;
  first?: Values;
  ask: (given: JsonObject) => Asked;
}

/** What is to be filled in, what the server says of it, and what came of it. An empty field is not sent. */
function Fill({ name, kind, fields, schema, completes, place, first = {}, ask }: FillProps) {
  const [values, setValues] = useState<Values>(() => filled.get(place) ?? first);
  const given: JsonObject = Object.fromEntries(Object.entries(values).filter(([, value]) => value !== ""));
  const allowed = may("call");
  const worth = allowed && schema !== URI && Object.keys(given).length > 0 && (kind === "prompts" || fields.every((each) => !each.required || Object.hasOwn(given, each.name)));
  const [said, checking] = useChecked(drafted(given), () => post<Checked>(at("try", "check"), ask(given)), worth ? place : "");
  const checked = worth ? said : null;
  const going = isGoing(use(attempt));
  const [run, starting] = useAction(async () => {
    if (!going && allowed) await begin(ask(given), place);
  });
  const put = (field: string, value: string) => {
    const next = { ...values, [field]: value };
    filled.set(place, next);
    setValues(next);
  };
  const problems = checked ? placed(checked.problems) : [];
  const [verb, title] = kind === "prompts" ? ["Get the prompt", "Fill it in"] : ["Read", fields.length ? "Read one" : "Read it"];
  return (
    <>
      <Panel title={title}>
        <form
          class="stack"
          noValidate
          autocomplete="off"
          data-testid="fill"
          onSubmit={(event) => {
            event.preventDefault();
            void run();
          }}
          onKeyDown={(event) => {
            if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
            event.preventDefault();
            void run();
          }}
        >
          {fields.map((field) => (
            <Blank
              key={field.name}
              field={field}
              schema={schema}
              value={Object.hasOwn(values, field.name) ? values[field.name]! : ""}
              problems={problems.filter((each) => each.path === step("", field.name)).map((each) => each.text)}
              onChange={(value) => put(field.name, value)}
              long={kind === "prompts"}
              suggest={
                allowed && completes.includes(field.name)
                  ? async (value) => (await post<{ values: string[] }>(at("catalog", kind, name, "complete"), { argument: field.name, value, context: given })).values
                  : undefined
              }
            />
          ))}
          {!fields.length && kind === "prompts" && <p class="muted">It takes no arguments.</p>}
          {checked?.uri && (
            <p class="with-copy" data-testid="uri">
              <Shown in="code" text={checked.uri} max={400} />
              <Copy text={checked.uri} label="Copy the URI" />
            </p>
          )}
          {worth && <Judged checked={checked} checking={checking} problems={problems} broken="" />}
          <div class="row">
            <Button type="submit" kind="primary" icon="try" testid="run" busy={starting} disabled={going || !allowed} title="Ctrl+Enter">
              {checked && !checked.valid ? `${verb} anyway` : verb}
            </Button>
            {!allowed && (
              <p class="muted">
                You may look, not read: ask for a link with the role <code>call</code>.
              </p>
            )}
          </div>
        </form>
      </Panel>
      <Outcome place={place} title={kind === "prompts" ? "Not filled in yet" : "Not read yet"} todo={kind === "prompts" ? "Fill it in and get it." : "Read it, and its contents are shown here."} />
    </>
  );
}

interface BlankProps {
  field: Member;
  schema: JsonObject;
  value: string;
  problems: string[];
  onChange: (value: string) => void;
  long: boolean; // it may have several lines
  suggest?: (value: string) => Promise<string[]>;
}

/** One argument, which is a text on the wire whatever its type is. */
function Blank({ field, schema, value, problems, onChange, long, suggest }: BlankProps) {
  const it = shape(field.schema, schema);
  const id = idOf(step("", field.name));
  const choices = it.kind === "boolean" ? ["true", "false"] : it.kind === "choice" ? it.choices.map((each) => (typeof each.value === "string" ? each.value : written(each.value))) : [];
  const title = text(it.schema.title);
  const about = text(it.schema.description);
  const common = { id, value, "data-testid": `field-${field.name}`, "aria-describedby": `${id}-hint`, "aria-invalid": problems.length > 0, "aria-required": field.required };
  return (
    <div class={`arg ${problems.length ? "wrong" : ""}`}>
      <label class="arg-head" for={id}>
        <span class="arg-name">
          <Shown text={short(title || field.name, 120)} />
          {title && title.toLowerCase() !== field.name.toLowerCase() && (
            <>
              {" "}
              <Shown in="code" text={short(field.name, 120)} />
            </>
          )}
          {field.required && (
            <span class="arg-star" title="required">
              *<span class="unseen"> required</span>
            </span>
          )}
        </span>
        <Shown in="span.arg-type" text={short([typeName(field.schema, schema), ...(choices.length ? [] : constraints(field.schema, schema))].join(" · "), 300)} />
      </label>
      {about && <Shown in="p.arg-about" text={about} />}
      {choices.length ? (
        <select {...common} onChange={(event) => onChange(event.currentTarget.value)}>
          <option value="">{field.required ? "— choose —" : "— not sent —"}</option>
          {choices.map((each) => (
            <option value={each} key={each}>
              {plain(short(each, 120))}
            </option>
          ))}
        </select>
      ) : long && !suggest && it.kind === "string" ? (
        <textarea {...common} rows={Math.min(Math.max(value.split("\n").length, 1), 16)} spellcheck={false} onInput={(event) => onChange(event.currentTarget.value)} />
      ) : (
        <Suggested common={common} onChange={onChange} suggest={suggest} />
      )}
      <div id={`${id}-hint`}>
        {problems.map((each) => (
          <p class="arg-problem" data-testid={`problem-${field.name}`} key={each}>
            <span aria-hidden="true">✕</span> <Shown text={each} />
          </p>
        ))}
      </div>
    </div>
  );
}

/** A line with what the server suggests for it. Suggestions are a courtesy: without them nothing is said. */
function Suggested({ common, onChange, suggest }: { common: { id: string; value: string }; onChange: (value: string) => void; suggest?: (value: string) => Promise<string[]> }) {
  const [options, setOptions] = useState<string[]>([]);
  const latest = useRef(0);
  useEffect(() => () => clearTimeout(latest.current), []);
  const ask = (value: string) => {
    if (!suggest) return;
    clearTimeout(latest.current);
    const turn = (latest.current = window.setTimeout(async () => {
      const found = await suggest(value).catch(() => []);
      if (turn === latest.current) setOptions(found);
    }, SUGGEST_MS));
  };
  const list = `${common.id}-list`;
  return (
    <>
      <input
        {...common}
        type="text"
        list={suggest && list}
        autocomplete="off"
        spellcheck={false}
        onFocus={(event) => ask(event.currentTarget.value)}
        onInput={(event) => {
          onChange(event.currentTarget.value);
          ask(event.currentTarget.value);
        }}
      />
      {suggest && (
        <datalist id={list}>
          {options.map((each) => (
            <option value={each} key={each}>
              {plain(each) === each ? undefined : plain(each)}
            </option>
          ))}
        </datalist>
      )}
    </>
  );
}
