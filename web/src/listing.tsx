// What the lists of tools, resources and prompts have in common.

import type { ComponentChildren } from "preact";
import type { Listed, Viewed } from "./api";
import { may, post } from "./api-client";
import { link } from "./route";
import { Ago, count, duration, Facts, Icon, Notice, Pill, plain, Shown, State, useAction } from "./ui";

const PARTS: { [screen: string]: string } = { tools: "Tools", resources: "Resources", prompts: "Prompts" };

/** The name of a list, and the way to the others, seen as the same caller. */
export function Parts({ at, asked }: { at: string; asked: { [name: string]: string } }) {
  return (
    <>
      <h1>{PARTS[at]}</h1>
      <nav class="parts" aria-label="What the server offers">
        {Object.entries(PARTS).map(([screen, word]) => (
          <a class="chip" href={link(screen, "", asked)} aria-current={screen === at ? "page" : undefined} data-testid={`part-${screen}`} key={screen}>
            {word}
          </a>
        ))}
      </nav>
    </>
  );
}

/** Whose view it is: a caller, its scopes and a revision. */
export function Pickers({ view, set }: { view: Viewed; set: (query: { [name: string]: string }) => void }) {
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
export function Counts({ of }: { of: Listed }) {
  const ran = of.calls - of.refused;
  if (!of.calls) return <>never called</>;
  return (
    <>
      {count(ran)} run
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
export function Switch({ of: entry, to }: { of: Listed; to: string }) {
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

/** Why the caller does not see it, in its row. */
export function Hidden({ of }: { of: Listed }) {
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
export function Verdict({ of }: { of: Listed }) {
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

export function Warnings({ of }: { of: Listed }) {
  if (!of.warnings.length) return null;
  return (
    <Pill tone="warn" icon="warn" title={plain(of.warnings.join("\n"))}>
      {of.warnings.length === 1 ? "a warning" : `${of.warnings.length} warnings`}
    </Pill>
  );
}

/** Why the caller does not see it, and what is odd about it, beside the rest of it. */
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

/** What is known of it, beside facts of its own kind. `label` is its name in the audit. */
export function About({ of, label, before = [], after = [] }: { of: Listed; label: string; before?: [string, ComponentChildren][]; after?: [string, ComponentChildren][] }) {
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
          "Calls",
          of.calls ? (
            <>
              <Counts of={of} /> · last seen <Ago at={of.last} /> · <a href={link("audit", "", { tool: label })}>records</a>
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

export function Face({ of, size = 24 }: { of: Listed; size?: number }) {
  const src = of.icons.find((each) => SAFE.test(each.src))?.src;
  return src ? (
    <img class="face" src={src} alt="" width={size} height={size} />
  ) : (
    <span class="face letter" aria-hidden="true">
      {[...(of.title || of.name)].find((each) => /[\p{L}\p{N}]/u.test(each))?.toUpperCase() ?? "?"}
    </span>
  );
}
