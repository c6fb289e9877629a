// A form for a JSON Schema. Its value is the document itself: what is not in there is not sent, and the form says so.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Checked, Json, JsonObject, Problem } from "./api";
import { said } from "./api-client";
import { carried, constraints, fresh, isObject, item, KINDS, kindOf, members, number, same, shape, short, step, text, typeName, variantOf, written } from "./schema";
import type { Shape, Value } from "./schema";
import { Button, Copy, Fold, Icon, Notice, plain, say, Shown, State } from "./ui";

const MANY = 50; // items shown at once

/** A document that is edited as a form and as JSON. */
export interface Draft {
  value: JsonObject; // what was last readable
  text: string;
  broken: string; // why the text is no document
}

export const drafted = (value: Value): Draft => ({
  value: isObject(value) ? value : {},
  text: JSON.stringify(isObject(value) ? value : {}, null, 2),
  broken: "",
});

export function read(text: string, before: JsonObject): Draft {
  if (!text.trim()) return { value: {}, text, broken: "" };
  try {
    const value: unknown = JSON.parse(text);
    if (isObject(value)) return { value, text, broken: "" };
    return { value: before, text, broken: "This has to be an object: { … }" };
  } catch (problem) {
    return { value: before, text, broken: `This is not JSON: ${said(problem)}` };
  }
}

interface EditorProps {
  schema: JsonObject;
  draft: Draft;
  onChange: (draft: Draft) => void;
  problems: Problem[];
  testid?: string;
}

/** The form, and the same as JSON below it. */
export function Editor({ schema, draft, onChange, problems, testid }: EditorProps) {
  return (
    <div class="stack">
      {draft.broken && (
        <Notice tone="warn">
          <p>The JSON below cannot be read; the form shows what it last said.</p>
        </Notice>
      )}
      <form data-testid={testid} noValidate autocomplete="off" onSubmit={(event) => event.preventDefault()}>
        <Form schema={schema} value={draft.value} onChange={(value) => onChange(drafted(value))} problems={problems} />
      </form>
      <Fold title="The same as JSON" open extra={<Copy text={draft.text} label="Copy the JSON" />}>
        <textarea
          class="raw"
          data-testid="raw"
          aria-label="Arguments as JSON"
          aria-invalid={!!draft.broken}
          aria-describedby="raw-problem"
          spellcheck={false}
          rows={Math.min(Math.max(draft.text.split("\n").length, 3), 18)}
          value={draft.text}
          onInput={(event) => onChange(read(event.currentTarget.value, draft.value))}
        />
        <p id="raw-problem" class="error" data-testid="raw-problem">
          {draft.broken && (
            <>
              <Icon name="warn" size={12} />
              <Shown text={draft.broken} />
            </>
          )}
        </p>
      </Fold>
    </div>
  );
}

/** What the server says about a document, a moment after it was changed. `key` is what else the answer depends on. */
export function useChecked(draft: Draft, check: (value: JsonObject) => Promise<Checked>, key: string): [checked: Checked | null, busy: boolean] {
  const [checked, setChecked] = useState<Checked | null>(null);
  const [busy, setBusy] = useState(false);
  const text = draft.broken ? "" : JSON.stringify(draft.value);
  useEffect(() => {
    if (!text || !key) return undefined;
    let late = false;
    setBusy(true);
    const timer = setTimeout(async () => {
      try {
        const answer = await check(draft.value);
        if (!late) setChecked(answer);
      } catch (problem) {
        if (!late) say(said(problem));
      }
      if (!late) setBusy(false);
    }, 200);
    return () => {
      late = true;
      clearTimeout(timer);
    };
  }, [text, key]);
  return [draft.broken ? null : checked, busy];
}

/** What the server says of the arguments, before anything is done with them. */
export function Judged({ checked, checking, problems, broken, testid = "checked" }: { checked: Checked | null; checking: boolean; problems: Problem[]; broken: string; testid?: string }) {
  if (broken)
    return (
      <p class="judged is-bad">
        <Icon name="cross" /> The JSON has to be readable first.
      </p>
    );
  if (!checked) return <p class="judged muted">{checking ? "Checking…" : ""}</p>;
  return (
    <div class="judged" data-testid={testid} data-valid={checked.valid} aria-live="polite">
      {checked.valid ? (
        <p class="row">
          <span class="is-good">
            <Icon name="check" /> Fits the schema.
          </span>
          {checked.verdict && (
            <>
              <span class="muted">The rules say</span> <State of={checked.verdict} />
            </>
          )}{" "}
          {checked.rule && (
            <span class="muted">
              (<Shown text={checked.rule} max={80} />)
            </span>
          )}
        </p>
      ) : (
        <Problems of={problems} />
      )}
    </div>
  );
}

/** What is not right yet, each with a way to its field. */
function Problems({ of }: { of: Problem[] }) {
  return (
    <>
      <p class="is-bad">
        <Icon name="cross" /> {of.length === 1 ? "One thing is" : `${of.length} things are`} not right yet:
      </p>
      <ul class="problems" data-testid="problems">
        {of.slice(0, 20).map((each, index) => (
          <li key={index}>
            <button type="button" class="more" onClick={() => focusOn(each.path)}>
              <Shown in="code" text={short(each.path || "the arguments", 100)} />
            </button>{" "}
            <Shown text={each.text} max={400} />
          </li>
        ))}
      </ul>
    </>
  );
}

interface FormProps {
  schema: JsonObject;
  value: JsonObject;
  onChange: (value: JsonObject) => void;
  problems: Problem[];
}

/** All members of an object that a schema describes. */
export function Form({ schema, value, onChange, problems }: FormProps) {
  const it = shape(schema, schema);
  const place: Place = { root: schema, path: "", problems };
  const known = it.kind === "object" || it.kind === "any" ? it : { ...it, schema: { type: "object" } };
  if (it.kind === "variants")
    return <Variants it={it} place={place} value={value} onChange={(next) => onChange(isObject(next) ? next : {})} label="arguments" />;
  return <Members it={known} place={place} value={value} onChange={onChange} />;
}

interface Place {
  root: JsonObject;
  path: string;
  problems: Problem[];
}

interface Control {
  it: Shape;
  place: Place;
  value: Value;
  onChange: (value: Value) => void;
  label: string;
  optional?: boolean;
}

export const idOf = (path: string): string => `at${path.replace(/[^\w/-]/g, (each) => `.${each.codePointAt(0)!.toString(16)}.`)}`;
export const focusOn = (path: string): void => {
  const found = document.getElementById(idOf(path));
  (found?.matches("input, select, textarea, button") ? found : found?.querySelector<HTMLElement>("input, select, textarea, button"))?.focus();
  found?.scrollIntoView({ block: "nearest" });
};
const soon = (path: string): void => void requestAnimationFrame(() => focusOn(path));

interface FieldProps {
  name: string;
  schema: Json;
  place: Place; // its own
  value: Value;
  required: boolean;
  onChange: (value: Value) => void;
  tools?: ComponentChildren; // buttons of the list it is in
  own?: boolean; // it stands in a list, or was added: leaving it out is up to those
}

function Field({ name, schema, place, value, required, onChange, tools, own }: FieldProps) {
  const it = shape(schema, place.root);
  const title = text(it.schema.title);
  const wrong = place.problems.filter((each) => each.path === place.path);
  const [id, hint] = [idOf(place.path), `${idOf(place.path)}-hint`];
  const sent = value !== undefined;
  const group = isGroup(it, value);
  const outer = group && it.kind !== "variants"; // those have what was chosen under this name
  const about = text(it.schema.description);
  const kind = [typeName(schema, place.root), ...(it.kind === "choice" ? constraints(schema, place.root).slice(1) : constraints(schema, place.root))];
  const head = (
    <>
      <span class="arg-name">
        {title && title.toLowerCase() !== name.toLowerCase() && !own ? (
          <>
            <Shown text={short(title, 120)} />{" "}
            <Shown in="code" text={short(name, 120)} />
          </>
        ) : (
          <Shown text={short(title && !own ? title : name, 120)} />
        )}
        {required && !own && (
          <span class="arg-star" title="required">
            *<span class="unseen"> required</span>
          </span>
        )}
      </span>
      <Shown in="span.arg-type" text={short(kind.join(" · "), 300)} />
    </>
  );
  const Box = group ? "fieldset" : "div";
  return (
    <Box
      class={`arg ${sent ? "" : "absent"} ${wrong.length ? "wrong" : ""} ${group ? "group" : ""} ${sent && group && it.kind !== "boolean" ? "nested" : ""}`}
      id={outer ? id : undefined}
      data-testid={outer ? `field-${place.path}` : undefined}
      aria-describedby={group ? hint : undefined}
    >
      {group ? (
        <legend class="arg-head">{head}</legend>
      ) : (
        <label class="arg-head" for={id}>
          {head}
        </label>
      )}
      <span class="arg-tools">
        {it.nullable && value !== null && (
          <Button small kind="quiet" onClick={() => onChange(null)} label={`${name}: send null`}>
            null
          </Button>
        )}
        {!sent && !own && <span class="arg-state">{required ? "missing" : "not sent"}</span>}
        {sent && !own && !required && it.kind !== "boolean" && (
          <Button small kind="quiet"
            testid={`leave-${place.path}`}
            onClick={() => {
              onChange(undefined);
              soon(place.path);
            }}
            label={`${name}: leave out`}
          >
            leave out
          </Button>
        )}
        {tools}
      </span>
      {about && (
        <Shown in="p.arg-about" text={about} />
      )}
      <Input it={it} place={place} value={value} onChange={onChange} label={name} optional={!required && !own} />
      <div id={hint}>
        {wrong.map((each) => (
          <p class="arg-problem" data-testid={`problem-${each.path}`} key={each.text}>
            <span aria-hidden="true">✕</span> <Shown text={each.text} />
          </p>
        ))}
      </div>
    </Box>
  );
}

const isGroup = (it: Shape, value: Value): boolean =>
  value === null ? false : it.kind === "boolean" || it.kind === "array" || it.kind === "object" || it.kind === "variants";

function Input(all: Control) {
  const { it, place, value, onChange, label, optional } = all;
  const wrong = place.problems.some((each) => each.path === place.path);
  const common = { id: idOf(place.path), "data-testid": `field-${place.path}`, "aria-describedby": `${idOf(place.path)}-hint`, "aria-invalid": wrong };
  if (value === null && it.kind !== "any" && it.kind !== "const")
    return (
      <div class="arg-null" {...common}>
        <code>null</code>
        {it.kind !== "null" && (
          <Button small kind="quiet"
            onClick={() => {
              onChange(something(it, place.root));
              soon(place.path);
            }}
            label={`${label}: give a value`}
          >
            give a value
          </Button>
        )}
      </div>
    );
  const typed = it.kind === "number" && typeof value === "string"; // and no number yet
  if (value !== undefined && !typed && KINDS[it.kind]?.(value) === false) return <Anything {...all} note={`Its type is ${kindOf(value)}, not ${it.kind}.`} />;
  switch (it.kind) {
    case "const":
      return value === undefined || !same(value, it.schema.const) ? (
        <button type="button" class="button plain small" {...common} onClick={() => onChange(it.schema.const)}>
          Send <Shown text={written(it.schema.const!)} />
        </button>
      ) : (
        <output class="arg-null" {...common}>
          <Shown in="code" text={written(value)} />
        </output>
      );
    case "null":
      return (
        <button type="button" class="button plain small" {...common} onClick={() => onChange(null)}>
          Send null
        </button>
      );
    case "never":
      return (
        <p class="arg-about" {...common}>
          Nothing can be given here.
        </p>
      );
    case "boolean":
      return <Buttons {...all} />;
    case "choice": {
      const index = it.choices.findIndex((each) => same(each.value, value));
      return (
        <select
          {...common}
          value={value === undefined ? "" : String(index)}
          onChange={(event) => onChange(event.currentTarget.value === "" ? undefined : it.choices[Number(event.currentTarget.value)]!.value)}
        >
          <option value="">{optional ? "— not sent —" : "— choose —"}</option>
          {value !== undefined && index < 0 && <option value="-1">{plain(short(written(value), 120))} (not one of them)</option>}
          {it.choices.map((each, place) => (
            <option value={String(place)} key={place}>
              {plain(short(each.label, 120))}
            </option>
          ))}
        </select>
      );
    }
    case "number":
      return <Figure {...all} common={common} />;
    case "array":
      return <Items {...all} />;
    case "object":
      return value === undefined ? (
        <Button small
          onClick={() => {
            onChange(fresh(it.schema, place.root));
            soon(place.path);
          }}
        >
          Add {plain(short(label, 60))}
        </Button>
      ) : (
        <Members it={it} place={place} value={value as JsonObject} onChange={onChange} />
      );
    case "variants":
      return <Variants {...all} />;
    case "string":
      return <Words {...all} common={common} />;
    default:
      return <Anything {...all} />;
  }
}

/** A value that is not null. */
function something(it: Shape, root: JsonObject): Json {
  const { default: _, ...rest } = it.schema;
  return it.kind === "variants" ? fresh(it.variants[0]!.schema, root) : fresh(rest, root);
}

type Common = { id: string; "data-testid": string; "aria-describedby": string; "aria-invalid": boolean };

const EXAMPLES: { [format: string]: string } = {
  "date-time": "2026-07-28T09:30:00Z",
  time: "09:30:00Z",
  duration: "PT1H30M",
  email: "name@example.org",
  uri: "https://example.org/",
  uuid: "00000000-0000-0000-0000-000000000000",
  ipv4: "192.0.2.1",
};
const INPUTS: { [format: string]: "date" | "email" | "url" | "password" } = { date: "date", email: "email", uri: "url", password: "password" };

function Words({ it, value, onChange, common, optional }: Control & { common: Common }) {
  const format = text(it.schema.format) || (it.schema.writeOnly === true ? "password" : "");
  const most = number(it.schema.maxLength);
  const hint = EXAMPLES[format] ?? (optional && value === undefined ? "not sent" : "");
  const now = typeof value === "string" ? value : "";
  const rest = { ...common, value: now, placeholder: hint, spellcheck: false, autocomplete: "off" as const };
  if (!format && !it.schema.pattern && (most === undefined || most > 120)) {
    const rows = Math.min(Math.max(now.split("\n").length, Math.ceil(now.length / 90), most && most > 1000 ? 3 : 1), 16);
    return <textarea {...rest} rows={rows} onInput={(event) => onChange(event.currentTarget.value)} />;
  }
  // A date the browser cannot show must not look like none.
  const kind = format === "date" && now && !/^\d{4}-\d\d-\d\d$/.test(now) ? "text" : (INPUTS[format] ?? "text");
  return (
    <span class="arg-line">
      <input {...rest} type={kind as "text"} onInput={(event) => onChange(event.currentTarget.value || (kind === "date" ? undefined : ""))} />
      {(format === "date-time" || format === "time") && (
        <Button small
          onClick={() =>
            onChange(
              new Date()
                .toISOString()
                .replace(/\.\d+/, "")
                .slice(format === "time" ? 11 : 0),
            )
          }
        >
          Now
        </Button>
      )}
    </span>
  );
}

const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/;

function Figure({ it, value, onChange, common, optional }: Control & { common: Common }) {
  const [typed, type] = useState("");
  const read = (said: string): Value => (said === "" ? undefined : NUMBER.test(said) ? Number(said) : said);
  const shown = same(read(typed.trim()), value) ? typed : value === undefined ? "" : String(value);
  const take = (said: string) => {
    type(said);
    onChange(read(said.trim()));
  };
  const far = typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value);
  return (
    <>
      <input
        {...common}
        type="text"
        inputMode={it.schema.type === "integer" ? "numeric" : "decimal"}
        value={shown}
        placeholder={optional ? "not sent" : ""}
        autocomplete="off"
        class="arg-figure"
        onInput={(event) => take(event.currentTarget.value)}
      />
      {far && <p class="arg-about">⚠ So large a number is not exact in a browser: it is sent as {String(value)}.</p>}
    </>
  );
}

function Buttons({ place, value, onChange, optional }: Control) {
  const options: [string, Value][] = [
    ["true", true],
    ["false", false],
  ];
  if (optional) options.unshift(["not sent", undefined]);
  return (
    <span class="segments">
      {options.map(([label, each]) => (
        <label key={label}>
          <input
            type="radio"
            name={idOf(place.path)}
            checked={value === each}
            data-testid={`field-${place.path}-${label.replace(" ", "-")}`}
            onChange={() => onChange(each)}
          />
          <span>{label}</span>
        </label>
      ))}
    </span>
  );
}

/** Anything at all: JSON, or a text if it is none. */
function Anything({ place, value, onChange, note, optional }: Control & { note?: string }) {
  const [typed, type] = useState("");
  const read = (said: string): Value => {
    if (!said.trim()) return undefined;
    try {
      return JSON.parse(said) as Json;
    } catch {
      return said;
    }
  };
  const write = (it: Value): string => (it === undefined ? "" : typeof it === "string" && read(it) === it ? it : JSON.stringify(it, null, 2));
  const shown = same(read(typed), value) ? typed : write(value);
  return (
    <>
      {note && <p class="arg-about">⚠ {note}</p>}
      <textarea
        id={idOf(place.path)}
        data-testid={`field-${place.path}`}
        class="mono"
        rows={Math.min(Math.max(shown.split("\n").length, 1), 12)}
        value={shown}
        placeholder={optional ? "not sent" : "JSON, or text"}
        spellcheck={false}
        aria-describedby={`${idOf(place.path)}-hint`}
        onInput={(event) => {
          type(event.currentTarget.value);
          onChange(read(event.currentTarget.value));
        }}
      />
      {typeof value === "string" && value !== "" && !note && <p class="arg-about">is sent as text</p>}
    </>
  );
}

function Variants({ it, place, value, onChange, label, optional }: Control) {
  const [chosen, choose] = useState<number | null>(null);
  const guess = variantOf(value, it.variants, place.root);
  const index = value === undefined ? -1 : (chosen ?? guess);
  const schema = it.variants[index]?.schema;
  const take = (said: string) => {
    choose(said === "" ? null : Number(said));
    onChange(said === "" ? undefined : carried(value, it.variants[Number(said)]!.schema, place.root));
  };
  const inner = schema === undefined ? null : shape(schema, place.root);
  return (
    <div class="variants">
      <select
        data-testid={`variant-${place.path}`}
        aria-label={`${label}: which kind`}
        value={String(index < 0 ? "" : index)}
        onChange={(event) => take(event.currentTarget.value)}
      >
        {(optional || index < 0) && <option value="">{optional ? "— not sent —" : "— choose —"}</option>}
        {it.variants.map((each, place) => (
          <option value={String(place)} key={place}>
            {plain(short(each.label, 120))}
          </option>
        ))}
      </select>
      {inner &&
        (inner.kind === "object" || inner.kind === "array" || inner.kind === "variants" || inner.kind === "boolean" ? (
          <div id={idOf(place.path)} data-testid={`field-${place.path}`}>
            <Input it={inner} place={place} value={value} onChange={onChange} label={label} key={index} />
          </div>
        ) : (
          <label class="variant-value">
            <span class="unseen">{plain(label)}</span>
            <Input it={inner} place={{ ...place }} value={value} onChange={onChange} label={label} key={index} />
          </label>
        ))}
    </div>
  );
}

function Items({ it, place, value, onChange, label }: Control) {
  const [all, showAll] = useState(false);
  const keys = useRef<number[]>([]);
  const next = useRef(0);
  const items = Array.isArray(value) ? value : [];
  while (keys.current.length < items.length) keys.current.push(next.current++);
  keys.current.length = items.length;
  const set = (made: Json[], order: number[]) => {
    keys.current = order;
    onChange(made);
  };
  const one = shape(item(it.schema, 0), place.root);
  const inPlaces = Array.isArray(it.schema.prefixItems) || Array.isArray(it.schema.items);
  if (
    !inPlaces &&
    one.kind === "choice" &&
    (it.schema.uniqueItems === true || one.choices.length <= 12) &&
    items.every((each, at) => items.findIndex((it) => same(it, each)) === at && one.choices.some((it) => same(it.value, each)))
  )
    return (
      <span class="checks">
        {one.choices.map((each, index) => (
          <label key={index}>
            <input
              type="checkbox"
              data-testid={`field-${step(place.path, index)}`}
              checked={items.some((it) => same(it, each.value))}
              onChange={(event) =>
                onChange(
                  event.currentTarget.checked
                    ? one.choices.map((it) => it.value).filter((it) => same(it, each.value) || items.some((had) => same(had, it)))
                    : items.filter((it) => !same(it, each.value)),
                )
              }
            />
            <Shown text={short(each.label, 120)} />
          </label>
        ))}
      </span>
    );
  const moved = (from: number, to: number) => {
    const order = keys.current.slice();
    const made = items.slice();
    [made[from], made[to]] = [made[to]!, made[from]!];
    [order[from], order[to]] = [order[to]!, order[from]!];
    set(made, order);
  };
  const shown = all ? items : items.slice(0, MANY);
  const most = number(it.schema.maxItems) ?? Infinity;
  const rest = item(it.schema, items.length);
  const add = () => {
    set([...items, fresh(rest, place.root)], [...keys.current, next.current++]);
    soon(step(place.path, items.length));
  };
  return (
    <div class="items">
      {value !== undefined && !items.length && <p class="arg-about">an empty list is sent</p>}
      {shown.map((each, index) => (
        <Field
          key={keys.current[index]}
          name={`${index + 1}.`}
          schema={item(it.schema, index)}
          place={{ ...place, path: step(place.path, index) }}
          value={each}
          required
          own
          onChange={(changed) =>
            set(
              items.map((old, at) => (at === index ? (changed ?? empty(old)) : old)),
              keys.current,
            )
          }
          tools={
            <>
              <Button small kind="quiet"
                disabled={!index}
                onClick={() => moved(index, index - 1)}
                label={`${label} ${index + 1}: move up`}
              >
                ↑
              </Button>
              <Button small kind="quiet"
                disabled={index === items.length - 1}
                onClick={() => moved(index, index + 1)}
                label={`${label} ${index + 1}: move down`}
              >
                ↓
              </Button>
              <Button small kind="quiet"
                testid={`remove-${step(place.path, index)}`}
                onClick={() =>
                  set(
                    items.filter((_, at) => at !== index),
                    keys.current.filter((_, at) => at !== index),
                  )
                }
                label={`${label} ${index + 1}: remove`}
              >
                ✕
              </Button>
            </>
          }
        />
      ))}
      {shown.length < items.length && (
        <Button small onClick={() => showAll(true)}>
          Show all {items.length}
        </Button>
      )}
      {rest !== false && (
        <Button small testid={`add-${place.path}`} disabled={items.length >= most} onClick={add}>
          + Add {items.length ? "another" : "one"} <span class="unseen">to {plain(short(label, 60))}</span>
        </Button>
      )}
    </div>
  );
}

const empty = (old: Json): Json => (typeof old === "string" || typeof old === "number" ? "" : null); // an item has to be something

function Members({ it, place, value, onChange }: { it: Shape; place: Place; value: JsonObject; onChange: (value: JsonObject) => void }) {
  const [name, setName] = useState("");
  const { known, more } = members(it.schema);
  const put = (key: string, changed: Value) => {
    const { [key]: _, ...rest } = value;
    if (changed === undefined) return onChange(rest);
    // In the order of the schema, and what it does not know in the order it came.
    const order = [...known.map((each) => each.name), ...Object.keys(value), key];
    const made: JsonObject = {};
    for (const each of order)
      if (each === key) made[each] = changed;
      else if (Object.hasOwn(value, each)) made[each] = value[each]!;
    onChange(made);
  };
  const extra = Object.keys(value).filter((key) => !known.some((each) => each.name === key));
  const taken = Object.hasOwn(value, name) || known.some((each) => each.name === name);
  const add = () => {
    if (!name || taken) return;
    put(name, fresh(more, place.root) ?? "");
    setName("");
    soon(step(place.path, name));
  };
  return (
    <div class="members">
      {known.map((each) => (
        <Field
          key={each.name}
          {...each}
          place={{ ...place, path: step(place.path, each.name) }}
          value={Object.hasOwn(value, each.name) ? value[each.name] : undefined}
          onChange={(changed) => put(each.name, changed)}
        />
      ))}
      {extra.map((key) => (
        <Field
          key={`+${key}`}
          name={key}
          schema={more === false ? true : more}
          place={{ ...place, path: step(place.path, key) }}
          value={value[key]}
          required
          own
          onChange={(changed) => put(key, changed ?? "")}
          tools={
            <>
              {more === false && <span class="arg-state">not in the schema</span>}
              <Button small kind="quiet"
                testid={`remove-${step(place.path, key)}`}
                onClick={() => put(key, undefined)}
                label={`${key}: remove`}
              >
                ✕
              </Button>
            </>
          }
        />
      ))}
      {!known.length && !extra.length && more === false && <p class="arg-about">It takes no arguments.</p>}
      {more !== false &&
        (isObject(it.schema.additionalProperties) || isObject(it.schema.patternProperties) || it.schema.additionalProperties === true || !known.length) && (
          <span class="arg-line add-key">
            <input
              type="text"
              value={name}
              placeholder="another key"
              aria-label="Name of another key"
              data-testid={`key-${place.path}`}
              autocomplete="off"
              onInput={(event) => setName(event.currentTarget.value)}
              onKeyDown={(event) => {
                if (event.key === "Enter") {
                  event.preventDefault();
                  add();
                }
              }}
            />
            <Button small testid={`add-key-${place.path}`} disabled={!name || taken} onClick={add}>
              Add key
            </Button>
            {taken && name && <span class="arg-state">is there already</span>}
          </span>
        )}
    </div>
  );
}
