// Resources and prompts as a caller sees them; read and filled in from here, as any client gets them.

import { useEffect, useRef, useState } from "preact/hooks";
import type { CatalogEntry, CatalogView, Checked, JsonObject } from "../api";
import { at, Failed, may, post } from "../api-client";
import { attempt, begin, isRunning, Outcome, type RunRequest } from "../attempt";
import { use } from "../cell";
import { drafted, idOf, Judged, useChecked } from "../form";
import { About, CatalogScreen, Caution, Headline, Row } from "../listing";
import { Long } from "../result";
import { link } from "../route";
import { constraints, members, placed, shape, short, step, text, typeName, written, type Member } from "../schema";
import { Button, bytes, Copy, Empty, Notice, Panel, Pill, plain, Shown, useAction } from "../ui";

type Catalog = "resources" | "prompts";

const SUGGEST_MS = 150; // after the last key

export const Resources = () => <Screen key="resources" catalog="resources" />;
export const Prompts = () => <Screen key="prompts" catalog="prompts" />;

function Screen({ catalog }: { catalog: Catalog }) {
  return (
    <CatalogScreen<CatalogEntry, CatalogView>
      catalog={catalog}
      row={(entry, to, current) => (
        <Row
          key={entry.name}
          entry={entry}
          catalog={catalog}
          title={heading(entry)}
          to={to}
          current={current}
          marks={entry.kind === "template" && <Pill icon="edit">template</Pill>}
          facts={[entry.mimeType ?? "", entry.size === undefined ? "" : bytes(entry.size)].filter(Boolean)}
          switchAt={at("catalog", catalog, entry.name, "switch")}
          testid={`entry-${entry.name}`}
        />
      )}
      detail={(entry, view) => <Detail key={entry.name} entry={entry} catalog={catalog} revision={view.revision} />}
      unlisted={(name, view) =>
        catalog === "resources" ? (
          <Typed key={name} uri={name} revision={view.revision} />
        ) : name ? (
          <Empty icon="prompts" title="There is no such prompt">
            <Shown text={name} max={200} /> is not in the list.
          </Empty>
        ) : (
          <Empty icon="prompts" title="Choose a prompt">
            Its arguments, and the messages it makes of them, are shown here.
          </Empty>
        )
      }
    />
  );
}

/** Its title, or else its name for programs: that of a resource is shorter than its URI. */
const heading = (entry: CatalogEntry): string => (entry.title === entry.name ? entry.own_name : entry.title);

function Detail({ entry, catalog, revision }: { entry: CatalogEntry; catalog: Catalog; revision: string }) {
  const notes = entry.annotations;
  const isPrompt = entry.kind === "prompt";
  const title = heading(entry);
  return (
    <div class="stack" data-testid="detail">
      <Panel>
        <div class="stack">
          <Headline entry={entry} title={title} noun={isPrompt ? "name" : "URI"} />
          <Caution of={entry} />
          {entry.description ? <Long text={entry.description} label="Description" /> : <p class="muted">It has no description.</p>}
          <About
            of={entry}
            catalog={catalog}
            records={entry.kind === "template" ? { text: entry.name.split("{")[0]! } : { tool: isPrompt ? `prompt:${entry.name}` : entry.name }}
            before={[
              ["Name", entry.own_name !== entry.name && entry.own_name !== title && <Shown text={entry.own_name} max={200} />],
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
        catalog={catalog}
        schema={entry.input_schema}
        completes={entry.completes}
        place={link(catalog, entry.name)}
        request={(values) => ({ [isPrompt ? "prompt" : "resource"]: entry.name, arguments: values, revision })}
      />
    </div>
  );
}

const URI = { type: "object", properties: { uri: { title: "URI", type: "string", description: "A resource of the list, or one that a template of it matches." } }, required: ["uri"] };

/** A resource by a URI that a person types, or that the address of the page has. */
function Typed({ uri, revision }: { uri: string; revision: string }) {
  return (
    <div class="stack">
      <Fill
        name={uri}
        catalog="resources"
        schema={URI}
        completes={[]}
        place={link("resources", uri)}
        initial={{ uri }}
        request={(values) => ({ resource: text(values.uri), arguments: {}, revision })}
      />
    </div>
  );
}

type Values = { [name: string]: string };
const filled = new Map<string, Values>(); // by place

interface FillProps {
  name: string;
  catalog: Catalog;
  schema: JsonObject;
  completes: string[];
  place: string;
  initial?: Values;
  request: (values: JsonObject) => RunRequest;
}

/** The fields of a request, the server's opinion of them, and the outcome. An empty field is not sent. */
function Fill({ name, catalog, schema, completes, place, initial = {}, request }: FillProps) {
  const [values, setValues] = useState<Values>(() => filled.get(place) ?? initial);
  const fields = members(schema).known;
  const sent: Values = Object.fromEntries(Object.entries(values).filter(([, value]) => value !== ""));
  const missing = fields.filter((each) => each.required && !Object.hasOwn(sent, each.name));
  const allowed = may("call");
  const isPrompt = catalog === "prompts";
  const isChecked = allowed && Object.keys(sent).length > 0 && (isPrompt || !missing.length); // no URI has a variable missing
  const [answer, checking] = useChecked(drafted(sent), () => check(request(sent)), isChecked ? place : "");
  const checked = isChecked ? answer : null;
  const others = use(attempt);
  const [run, starting] = useAction(async () => {
    if (!missing.length && !isRunning(others) && allowed) await begin(request(sent), place);
  });
  const put = (field: string, value: string) => {
    const next = { ...values, [field]: value };
    filled.set(place, next);
    setValues(next);
  };
  const isAt = (path: string) => (field: Member) => path === step("", field.name);
  const problems = (checked ? placed(checked.problems) : []).filter((each) => !missing.some(isAt(each.path)));
  const elsewhere = problems.filter((each) => !fields.some(isAt(each.path))); // at no field
  const isUnlisted = schema === URI && name !== "" && sent.uri === name && (checked !== null || !isChecked); // which is said once, above
  const [verb, title] = isPrompt ? ["Get the prompt", fields.length ? "Fill it in" : "Get it"] : ["Read", fields.length ? "Read one" : "Read it"];
  return (
    <>
      {isUnlisted && <Unlisted uri={name} checked={checked} />}
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
              problems={isUnlisted ? [] : problems.filter((each) => isAt(each.path)(field)).map((each) => each.text)}
              onChange={(value) => put(field.name, value)}
              long={isPrompt}
              suggest={
                allowed && completes.includes(field.name)
                  ? async (value) => (await post<{ values: string[] }>(at("catalog", catalog, name, "complete"), { argument: field.name, value, context: sent })).values
                  : undefined
              }
            />
          ))}
          {!fields.length && isPrompt && <p class="muted">It takes no arguments.</p>}
          {checked?.uri && checked.uri !== sent.uri && (
            <p class="with-copy" data-testid="uri">
              <Shown in="code" text={checked.uri} max={400} />
              <Copy text={checked.uri} label="Copy the URI" />
            </p>
          )}
          {isChecked && !missing.length && (!checked || checked.valid || elsewhere.length > 0) && <Judged checked={checked} checking={checking} problems={elsewhere} broken="" />}
          <div class="row">
            <Button
              type="submit"
              kind="primary"
              icon="try"
              testid="run"
              busy={starting}
              disabled={missing.length > 0 || isRunning(others) || !allowed}
              title="Ctrl+Enter"
            >
              {problems.length > 0 && !missing.length ? `${verb} anyway` : verb}
            </Button>
            {!allowed ? (
              <p class="muted">
                You may look, not read: ask for a link with the role <code>call</code>.
              </p>
            ) : (
              missing.length > 0 && (
                <p class="muted" data-testid="missing">
                  Needs <Shown text={missing.map((each) => text(shape(each.schema, schema).schema.title) || each.name).join(", ")} max={200} />.
                </p>
              )
            )}
          </div>
        </form>
      </Panel>
      <Outcome place={place} title={isPrompt ? "Not filled in yet" : "Not read yet"} todo={isPrompt ? "Its messages are shown here." : "Its contents are shown here."} />
    </>
  );
}

/** What is known of a URI of the address that is not in the list. */
function Unlisted({ uri, checked }: { uri: string; checked: Checked | null }) {
  const template = checked?.entry;
  return template ? (
    <Notice tone="info" testid="unlisted">
      <p>
        <Shown in="code" text={uri} max={200} /> is read by the template{" "}
        <a href={link("resources", template)}>
          <Shown in="code" text={template} max={200} />
        </a>
      </p>
    </Notice>
  ) : (
    <Notice tone="warn" title={checked ? "There is no such resource" : "It is not in the list"} testid="unlisted">
      <p>
        <Shown in="code" text={uri} max={200} /> {checked ? "is not in the list, and no template matches it." : "may be one that a template matches."}
      </p>
    </Notice>
  );
}

/** What the server says of a request before it is sent. A URI that it does not know is a problem of the field. */
async function check(request: RunRequest): Promise<Checked> {
  try {
    return await post<Checked>(at("try", "check"), request);
  } catch (problem) {
    if (!(problem instanceof Failed) || problem.status !== 404) throw problem;
    return { valid: false, problems: [{ path: "/uri", text: problem.error }], verdict: "", rule: "" };
  }
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

/** One argument. It is a text on the wire, whatever its type is. */
function Blank({ field, schema, value, problems, onChange, long, suggest }: BlankProps) {
  const form = shape(field.schema, schema);
  const id = idOf(step("", field.name));
  const choices = form.kind === "boolean" ? ["true", "false"] : form.kind === "choice" ? form.choices.map((each) => (typeof each.value === "string" ? each.value : written(each.value))) : [];
  const title = text(form.schema.title);
  const about = text(form.schema.description);
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
      ) : long && !suggest && form.kind === "string" ? (
        <textarea {...common} rows={Math.min(Math.max(value.split("\n").length, 1), 16)} spellcheck={false} onInput={(event) => onChange(event.currentTarget.value)} />
      ) : (
        <Suggested common={common} onChange={onChange} suggest={suggest} />
      )}
      <div id={`${id}-hint`} aria-live="polite">
        {problems.map((each) => (
          <p class="arg-problem" data-testid={`problem-${field.name}`} key={each}>
            <span aria-hidden="true">✕</span> <Shown text={each} />
          </p>
        ))}
      </div>
    </div>
  );
}

/** A line with the values that the server suggests. A failure to suggest is not shown. */
function Suggested({ common, onChange, suggest }: { common: { id: string; value: string }; onChange: (value: string) => void; suggest?: (value: string) => Promise<string[]> }) {
  const [options, setOptions] = useState<string[]>([]);
  const latest = useRef(0);
  useEffect(() => () => clearTimeout(latest.current), []);
  const fetchOptions = (value: string) => {
    if (!suggest) return;
    clearTimeout(latest.current);
    const turn = (latest.current = window.setTimeout(async () => {
      const suggested = await suggest(value).catch(() => []);
      if (turn === latest.current) setOptions(suggested);
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
        onFocus={(event) => fetchOptions(event.currentTarget.value)}
        onInput={(event) => {
          onChange(event.currentTarget.value);
          fetchOptions(event.currentTarget.value);
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
