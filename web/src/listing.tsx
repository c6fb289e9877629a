// What the screens of tools, resources and prompts have in common: a list as one caller sees it, and one entry of it.

import type { ComponentChildren } from "preact";
import { useEffect } from "preact/hooks";
import type { Listed, Viewed } from "./api";
import { at, get, may, post } from "./api-client";
import { use } from "./cell";
import { runsEnded, toolsChanged, upstreams } from "./live";
import { go, link, route } from "./route";
import { short } from "./schema";
import { Ago, Button, Copy, count, duration, Empty, Facts, Go, Icon, many, Notice, Pill, plain, Problem, Shown, State, useAction, useData } from "./ui";

export type Catalog = "tools" | "resources" | "prompts";
export type Query = { [name: string]: string };

const TITLES: { [catalog in Catalog]: string } = { tools: "Tools", resources: "Resources", prompts: "Prompts" };
const ADD = { tools: "@server.tool", resources: '@server.resource("notes://{name}")', prompts: "@server.prompt" };
const CALLS = {
  tools: { title: "Calls", ran: (n: number) => `${count(n)} run`, never: "never called" },
  resources: { title: "Reads", ran: (n: number) => many(n, "read"), never: "never read" },
  prompts: { title: "Uses", ran: (n: number) => many(n, "use"), never: "never used" },
};

interface ScreenProps<View, Entry> {
  catalog: Catalog;
  summary?: (view: View, caller: Query) => ComponentChildren;
  notices?: (view: View, caller: Query) => ComponentChildren; // above the list
  row: (entry: Entry, to: string, current: boolean, view: View) => ComponentChildren;
  detail: (entry: Entry, view: View) => ComponentChildren;
  weigh?: (entry: Entry) => number; // tokens of an entry
  unlisted: (name: string, view: View) => ComponentChildren; // where no entry is chosen, or none of that name is there
}

/** One of the three lists, the ways to the others, and the entry that the address names. */
export function CatalogScreen<Entry extends Listed, View extends Viewed & { [catalog in Catalog]?: Entry[] }>({ catalog, summary, notices, row, detail, weigh, unlisted }: ScreenProps<View, Entry>) {
  const place = use(route);
  const caller: Query = Object.fromEntries(["as", "scopes", "revision"].map((name) => [name, place.query.get(name) ?? ""]));
  const words = place.query.get("q") ?? "";
  const path = catalog === "tools" ? at("tools") : at("catalog", catalog);
  const { data, failure, again } = useData((signal) => get<View>(path, caller, signal), [use(toolsChanged), use(runsEnded), ...Object.values(caller)]);
  const source = place.query.get("from") ?? "";
  const to = (name: string, query: Query = {}) => link(catalog, name, { ...caller, q: words, from: source, ...query });
  useEffect(() => {
    if (matchMedia("(max-width: 900px)").matches) window.scrollTo(0, 0); // the list gives way to the entry
  }, [place.name]);
  if (!data) return failure ? <Problem of={failure} again={again} /> : <Empty icon={catalog} title={`Looking which ${catalog} there are…`} />;
  const entries = data[catalog] ?? [];
  const wanted = words.trim().toLowerCase();
  const shown = entries.filter((each) => (!source || each.upstream === (source === OWN ? "" : source)) && `${each.name} ${each.title} ${each.description} ${each.tags.join(" ")} ${each.upstream}`.toLowerCase().includes(wanted));
  const entry = entries.find((each) => each.name === place.name);
  return (
    <>
      <h1 class="unseen">{TITLES[catalog]}</h1>
      <nav class="parts" aria-label="What the server offers">
        {(Object.keys(TITLES) as Catalog[]).map((each) => (
          <a class="part" href={link(each, "", caller)} aria-current={each === catalog ? "page" : undefined} data-testid={`part-${each}`} key={each}>
            <Icon name={each} size={18} /> {TITLES[each]}
          </a>
        ))}
      </nav>
      <div class={place.name ? "catalog chosen" : "catalog"}>
        <div class="title">
          <span class="grow">
            <input
              type="search"
              placeholder={`Search ${catalog}`}
              aria-label={`Search ${catalog}`}
              value={words}
              onInput={(event) => go(to(place.name, { q: event.currentTarget.value }), true)}
            />
          </span>
          <Pickers view={data} set={(query) => go(to(place.name, query), true)} />
        </div>
        {failure !== undefined && <Problem of={failure} again={again} />}
        <div class="summary" data-testid="summary">
          <span>
            <Shown in="strong" text={data.as} max={60} /> sees <strong>{entries.filter((each) => each.exposed).length}</strong> of {entries.length} {catalog}
          </span>
          {summary?.(data, caller)}
        </div>
        {notices?.(data, caller)}
        <Sources entries={entries} weigh={weigh} at={source} to={(from) => to(place.name, { from })} />
        {!entries.length ? (
          <Empty icon={catalog} title={`The server has no ${catalog}`}>
            Add one with <code>{ADD[catalog]}</code>, and it appears here at once.
          </Empty>
        ) : (
          <div class="tools">
            <ul class="tool-list" aria-label={`${catalog === "resources" ? "Resources and templates" : TITLES[catalog]}, in the order of the wire`}>
              {shown.map((each) => row(each, to(each.name), each === entry, data))}
              {!shown.length && (
                <li>
                  <Empty icon="search" title={`None of the ${catalog} matches`}>
                    <Button onClick={() => go(to(place.name, { q: "", from: "" }), true)}>Show all</Button>
                  </Empty>
                </li>
              )}
            </ul>
            <div class="tool-detail">
              {place.name && (
                <Go to={to("")} kind="back" icon="back" testid="back">
                  Back to the list
                </Go>
              )}
              {entry ? detail(entry, data) : unlisted(place.name, data)}
            </div>
          </div>
        )}
      </div>
    </>
  );
}

const OWN = "."; // no upstream is called so

/** Whose entries there are, what those cost, and a way to see the entries of one only. */
function Sources<Entry extends Listed>({ entries, weigh, at: source, to }: { entries: Entry[]; weigh?: (entry: Entry) => number; at: string; to: (from: string) => string }) {
  const states = new Map(use(upstreams).map((each) => [each.name, each.state]));
  const names = [...new Set(entries.map((each) => each.upstream))];
  if (!names.some(Boolean)) return null;
  const chips = [["", "All", entries], ...names.map((name) => [name || OWN, name || "its own", entries.filter((each) => each.upstream === name)])] as [string, string, Entry[]][];
  return (
    <nav class="sources" aria-label="Whose they are">
      {chips.map(([from, word, members]) => (
        <a class="button small" href={to(from)} aria-current={from === source ? "true" : undefined} data-testid={`from-${from || "all"}`} key={from}>
          {(states.get(from) === "down" || states.get(from) === "stopped") && <Icon name="warn" size={12} />}
          <Shown text={word} max={40} line />
          <span class="muted num">
            {members.length}
            {weigh && ` · ${count(members.reduce((sum, each) => sum + (each.exposed ? weigh(each) : 0), 0))} tokens`}
          </span>
        </a>
      ))}
    </nav>
  );
}

interface RowProps {
  entry: Listed;
  catalog: Catalog;
  title: string;
  to: string;
  current: boolean;
  marks: ComponentChildren;
  facts: string[];
  cost?: ComponentChildren;
  switchAt: string; // the address that switches it on and off
  testid: string;
}

/** One entry of a list. The whole row leads to it. */
export function Row({ entry, catalog, title, to, current, marks, facts, cost, switchAt, testid }: RowProps) {
  return (
    <li class={`tool ${entry.exposed ? "" : "not-exposed"}`} data-testid={testid} data-exposed={entry.exposed}>
      <Face of={entry} title={title} />
      <div class="tool-text">
        <a class="tool-link" href={to} aria-current={current ? "true" : undefined}>
          <Shown in="strong" text={short(title, 80)} /> {title !== entry.name && <Shown in="code" text={short(entry.name, 120)} />}
        </a>
        <div class="row tight">
          <Verdict of={entry} />
          {marks}
          <Warnings of={entry} />
        </div>
        <Hidden of={entry} />
        <p class="muted fine num">
          {facts.map((each) => (
            <span key={each}>
              <Shown text={each} max={60} line /> ·{" "}
            </span>
          ))}
          <Counts of={entry} catalog={catalog} />
        </p>
      </div>
      {cost}
      <Switch of={entry} to={switchAt} />
    </li>
  );
}

/** The title of an entry and its name, once where they are the same. */
export function Headline({ entry, title, noun, children }: { entry: Listed; title: string; noun: string; children?: ComponentChildren }) {
  const name = (
    <span data-testid="real-name">
      <Shown text={entry.name} max={400} />
    </span>
  );
  const copy = <Copy text={entry.name} label={`Copy the ${noun}`} />;
  return (
    <div class="detail-head">
      <Face of={entry} title={title} size={32} />
      <div class="grow">
        {title === entry.name ? (
          <span class="with-copy">
            <h2 class="detail-title">{name}</h2>
            {copy}
          </span>
        ) : (
          <>
            <Shown in="h2.detail-title" text={title} max={200} />
            <span class="with-copy">
              <code>{name}</code>
              {copy}
            </span>
          </>
        )}
      </div>
      {children}
    </div>
  );
}

/** Whose view it is: a caller, its scopes and a revision. */
function Pickers({ view, set }: { view: Viewed; set: (query: Query) => void }) {
  return (
    <div class="pickers">
      <label>
        <span>See as</span>
        <input
          type="text"
          list="principals"
          data-testid="as"
          defaultValue={view.as}
          key={view.as}
          autocomplete="off"
          spellcheck={false}
          onChange={(event) => set({ as: event.currentTarget.value.trim() })}
        />
        <datalist id="principals">
          {view.principals.map((each) => (
            <option value={each} key={each} />
          ))}
        </datalist>
      </label>
      <label>
        <span>Scopes</span>
        <input
          type="text"
          data-testid="scopes"
          placeholder="none"
          defaultValue={view.scopes.join(", ")}
          key={view.scopes.join()}
          autocomplete="off"
          spellcheck={false}
          onChange={(event) =>
            set({
              scopes: event.currentTarget.value
                .split(/[\s,]+/)
                .filter(Boolean)
                .join(","),
            })
          }
        />
      </label>
      <label>
        <span>Revision</span>
        <select data-testid="revision" value={view.revision} onChange={(event) => set({ revision: event.currentTarget.value })}>
          {view.revisions.map((each) => (
            <option key={each}>{each}</option>
          ))}
        </select>
      </label>
    </div>
  );
}

const percent = (part: number): string => `${part < 0.1 ? (100 * part).toFixed(1) : Math.round(100 * part)} %`;

/** Calls that ran, failed and were refused, apart. */
function Counts({ of, catalog }: { of: Listed; catalog: Catalog }) {
  const ran = of.calls - of.refused;
  if (!of.calls) return <>{CALLS[catalog].never}</>;
  return (
    <>
      {CALLS[catalog].ran(ran)}
      {ran > 0 && (
        <>
          {" · "}
          <span class={of.errors ? "is-bad" : ""}>
            {count(of.errors)} failed{of.errors > 0 && ` (${percent(of.errors / ran)})`}
          </span>
        </>
      )}
      {" · "}
      <span class={of.refused ? "is-bad" : ""}>{count(of.refused)} refused</span>
      {ran > 0 && ` · p95 ${duration(of.p95_ms / 1000)}`}
    </>
  );
}

/** Switches an entry on or off; `to` is the address of that. */
function Switch({ of: entry, to }: { of: Listed; to: string }) {
  const [flip, busy] = useAction(() => post(to, { on: !entry.on }));
  return (
    <button
      type="button"
      role="switch"
      class="switch"
      aria-checked={entry.on}
      aria-label={`${plain(entry.name)} is ${entry.on ? "on" : "off"}`}
      disabled={busy || !may("manage")}
      title={may("manage") ? (entry.on ? "Switch it off for all callers" : "Switch it on") : "Needs the role manage"}
      data-testid={`switch-${entry.name}`}
      onClick={flip}
    >
      <span class="switch-track" aria-hidden="true">
        <span />
      </span>
      <span class="switch-word" aria-hidden="true">
        {entry.on ? "on" : "off"}
      </span>
    </button>
  );
}

/** Why the caller does not see an entry, in its row. */
function Hidden({ of }: { of: Listed }) {
  if (of.exposed) return null;
  return (
    <p class="fine hidden-why" data-testid={`hidden-${of.name}`}>
      <Icon name="hidden" size={12} />{" "}
      <span>
        <span class="unseen">Not exposed: </span>
        <Shown text={of.hidden_because} max={160} />
      </span>
    </p>
  );
}

/** What the rules say, in its row. */
function Verdict({ of }: { of: Listed }) {
  return (
    <span data-testid={`verdict-${of.name}`} class="row tight">
      <State of={of.verdict} />
      {of.rule && (
        <span class="muted fine">
          <Shown text={of.rule} max={50} />
        </span>
      )}
    </span>
  );
}

function Warnings({ of }: { of: Listed }) {
  if (!of.warnings.length) return null;
  return (
    <Pill tone="warn" icon="warn" title={plain(of.warnings.join("\n"))}>
      {of.warnings.length === 1 ? "a warning" : `${of.warnings.length} warnings`}
    </Pill>
  );
}

/** Why the caller does not see an entry, and the warnings about it. */
export function Caution({ of }: { of: Listed }) {
  return (
    <>
      {!of.exposed && (
        <Notice tone="warn" title="Not exposed">
          <Shown in="p" text={of.hidden_because} />
        </Notice>
      )}
      {of.warnings.map((each) => (
        <Notice tone="warn" key={each} testid="warning">
          <Shown in="p" text={each} />
        </Notice>
      ))}
    </>
  );
}

/** The facts about an entry, and those of its own kind. `records` finds its calls in the audit log. */
export function About({ of, catalog, records, before = [], after = [] }: { of: Listed; catalog: Catalog; records: Query; before?: [string, ComponentChildren][]; after?: [string, ComponentChildren][] }) {
  return (
    <Facts
      of={[
        [
          "Rules say",
          <span class="row tight">
            <State of={of.verdict} />
            {of.rule && <Shown text={of.rule} max={100} />}
            {of.why && <Shown in="span.muted" text={of.why} max={300} />}
          </span>,
        ],
        [
          "Limits",
          of.limits.length ? (
            <ul>
              {of.limits.map((each) => (
                <li key={each}>
                  <Shown text={each} />
                </li>
              ))}
            </ul>
          ) : (
            "none of its own"
          ),
        ],
        ...before,
        [
          CALLS[catalog].title,
          of.calls ? (
            <>
              <Counts of={of} catalog={catalog} /> · last seen <Ago at={of.last} /> · <a href={link("audit", "", records)}>records</a>
            </>
          ) : (
            "never"
          ),
        ],
        [
          "Tags",
          of.tags.length > 0 && (
            <span class="row tight">
              {of.tags.map((each) => (
                <Pill key={each}>
                  <Shown text={each} max={40} />
                </Pill>
              ))}
            </span>
          ),
        ],
        ["Needs scopes", of.scopes.length ? <Shown text={of.scopes.join(", ")} /> : ""],
        ...after,
      ]}
    />
  );
}

export const SAFE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/;

function Face({ of, title, size = 24 }: { of: Listed; title: string; size?: number }) {
  const src = of.icons.find((each) => SAFE.test(each.src))?.src;
  return src ? (
    <img class="face" src={src} alt="" width={size} height={size} />
  ) : (
    <span class="face letter" aria-hidden="true">
      {[...title].find((each) => /[\p{L}\p{N}]/u.test(each))?.toUpperCase() ?? "?"}
    </span>
  );
}
