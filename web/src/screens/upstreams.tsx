// The servers behind this one: how each is, and the look at what its tools claim and are taken for.

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { Json, JsonObject, SignInPage, ToolClass, Upstream, UpstreamDetail, UpstreamTool } from "../api";
import { at, get, may, post } from "../api-client";
import { use } from "../cell";
import { Difference } from "../diff";
import { toolsChanged, upstreams } from "../live";
import { lossWords } from "../losses";
import { Long } from "../result";
import { go, link, type Route } from "../route";
import { Start, Stop } from "../stop";
import { Button, Clock, Code, Copy, Cost, count, duration, Empty, Facts, Fold, Go, Icon, many, Notice, Panel, Pill, plain, Problem, say, Shown, State, useAction, useData, useSlow } from "../ui";

const SHOWN = 100; // tools of a group at a time

export function Upstreams({ route }: { route: Route }) {
  const all = use(upstreams);
  const one = all.find((each) => each.name === route.name);
  useEffect(() => {
    if (matchMedia("(max-width: 900px)").matches) window.scrollTo(0, 0); // the list gives way to the one
    else if (!route.name && all.length) go(link("upstreams", (all.find(worrying) ?? all[0]!).name), true);
  }, [route.name]);
  const offered = all.reduce((sum, each) => sum + each.tools, 0);
  const most = Math.max(1, ...all.map((each) => each.tokens));
  return (
    <div class={route.name ? "catalog chosen" : "catalog"}>
      <div class="title">
        <h1>Upstreams</h1>
        {all.length > 0 && (
          <p class="muted num" data-testid="summary">
            {many(all.filter((each) => each.state === "up").length, "server")} up of {all.length} · {many(offered, "tool")}, about {count(all.reduce((sum, each) => sum + each.tokens, 0))} tokens
            in each conversation
          </p>
        )}
      </div>
      {!all.length ? (
        <Panel>
          <Empty icon="upstreams" title="This server has no upstreams">
            Servers that it is put in front of are shown here: <code>handrail gateway mcp.json --console</code>
          </Empty>
        </Panel>
      ) : (
        <div class="tools">
          <ul class="tool-list" aria-label="Upstreams, in the order of the configuration">
            {all.map((each) => (
              <Line key={each.name} of={each} current={each === one} most={most} />
            ))}
          </ul>
          <div class="tool-detail">
            {route.name && (
              <Go to={link("upstreams")} kind="back" icon="back" testid="back">
                Back to the list
              </Go>
            )}
            {one ? (
              <One key={one.name} of={one} />
            ) : (
              route.name && (
                <Empty icon="upstreams" title="There is no such upstream">
                  <Shown text={route.name} max={200} /> is not included in this server.
                </Empty>
              )
            )}
          </div>
        </div>
      )}
    </div>
  );
}

const waits = (of: Upstream): number => of.unseen + of.new + of.changed;
const worrying = (of: Upstream): boolean => of.state === "down" || of.changed > 0;
const stateOf = (of: Upstream): string => (of.state === "new" ? "idle" : of.state);

/** What waits for a look, in pills. */
function Waiting({ of }: { of: Upstream }) {
  return (
    <>
      {of.changed > 0 && (
        <Pill tone="bad" icon="warn">
          {of.changed} changed
        </Pill>
      )}
      {of.new > 0 && (
        <Pill tone="warn" icon="plus">
          {of.new} new
        </Pill>
      )}
      {of.unseen > 0 && (
        <Pill tone="warn" icon="ask">
          {of.unseen} not looked at
        </Pill>
      )}
    </>
  );
}

function Line({ of, current, most }: { of: Upstream; current: boolean; most: number }) {
  const facts = [
    of.revision,
    of.latency_ms > 0 && duration(of.latency_ms / 1000),
    of.calls ? many(of.calls, "call") : "never called",
    of.errors > 0 && `${count(of.errors)} failed`,
    of.restarts > 0 && many(of.restarts, "restart"),
  ];
  return (
    <li class="tool" data-testid={`upstream-${of.name}`} data-state={of.state}>
      <div class="tool-text">
        <a class="tool-link" href={link("upstreams", of.name)} aria-current={current ? "true" : undefined}>
          <Shown in="strong" text={of.name} max={60} line />
        </a>
        <div class="row tight">
          <State of={stateOf(of)} />
          <Waiting of={of} />
        </div>
        {of.problem && of.state !== "up" && (
          <p class="fine line is-bad">
            <Shown text={of.problem} max={120} line />
          </p>
        )}
        <p class="muted fine num">
          <Shown text={facts.filter(Boolean).join(" · ")} max={200} line />
        </p>
      </div>
      {of.tools > 0 && <Cost tokens={of.tokens} most={most} />}
    </li>
  );
}

function One({ of }: { of: Upstream }) {
  const turn = useSlow([of.state, of.revision, of.calls, of.errors, of.restarts, of.tools, waits(of)].join(), 1000);
  const { data, failure, again } = useData<UpstreamDetail>((signal) => get(at("upstreams", of.name), {}, signal), [turn, use(toolsChanged)]);
  return (
    <div class="stack" data-testid="upstream-detail">
      <About of={of} again={again} />
      {failure !== undefined && <Problem of={failure} again={again} />}
      {data?.sign_ins && <SignIns of={of} who={data.sign_ins} again={again} />}
      {data && <Look of={of} tools={data.tools} />}
      {data && <Stderr of={of} lines={data.stderr} />}
    </div>
  );
}

const ERAS = { "": "", handshake: "with sessions", stateless: "stateless" };

function About({ of, again }: { of: Upstream; again: () => void }) {
  const [refresh, refreshing] = useAction(async () => {
    await post(at("upstreams", of.name, "refresh"));
    say(`${plain(of.name)} is asked for its lists.`);
    again();
  });
  const manage = may("manage");
  const needs = manage ? undefined : "Needs the role manage";
  const lost = Object.entries(of.lossy);
  const leftOut = Object.entries(of.left_out);
  return (
    <Panel>
      <div class="stack">
        <div class="detail-head">
          <div class="grow">
            <span class="row">
              <Shown in="h2.detail-title" text={of.name} max={100} line />
              <State of={stateOf(of)} testid="upstream-state" />
            </span>
            <span class="with-copy">
              <Shown in="code.muted" text={of.target} max={300} />
              <Copy text={of.target} label="Copy the target" />
            </span>
          </div>
          <span class="row">
            {of.state === "stopped" ? (
              <Start kind="upstream" name={of.name} />
            ) : (
              <>
                <Button icon="refresh" busy={refreshing || of.state === "starting"} disabled={!manage} title={needs} onClick={refresh} testid="refresh">
                  {of.state === "new" ? "Ask it now" : "Refresh"}
                </Button>
                <Stop upstream={of.name} kind="danger" />
              </>
            )}
          </span>
        </div>
        {of.problem && (
          <Notice tone={of.state === "up" ? "quiet" : of.state === "stopped" ? "warn" : "bad"} title={of.state === "up" ? "Its last problem" : of.state === "stopped" ? "Stopped by an operator" : undefined} testid="problem">
            <Shown in="p" text={of.problem} max={400} />
          </Notice>
        )}
        <Facts
          of={[
            [
              "Speaks",
              of.revision && (
                <span data-testid="speaks">
                  {plain(of.revision)}, {ERAS[of.era]}, since <Clock at={of.since} />
                </span>
              ),
            ],
            ["Last call took", of.latency_ms > 0 && duration(of.latency_ms / 1000)],
            [
              "Calls",
              of.calls > 0 ? (
                <>
                  {count(of.calls)} · <span class={of.errors ? "is-bad" : ""}>{count(of.errors)} failed</span>
                </>
              ) : (
                "never called"
              ),
            ],
            ["Restarts", of.restarts > 0 && count(of.restarts)],
            ["Connections", of.sessions > 0 && count(of.sessions)],
            ["Prefix", of.prefix && <Shown in="code" text={of.prefix} max={80} />],
            [
              "Costs",
              of.tools > 0 && (
                <>
                  about {count(of.tokens)} tokens in each conversation, for <a href={link("tools", "", { from: of.name })}>{many(of.tools, "tool")}</a>
                </>
              ),
            ],
            [
              "Left out of definitions",
              leftOut.length > 0 && (
                <ul data-testid="left-out">
                  {leftOut.map(([revision, cases]) => (
                    <li key={revision}>
                      For clients of <span class="num">{plain(revision)}</span>
                      <ul>
                        {Object.entries(cases).map(([id, definitions]) => (
                          <li key={id} title={id}>
                            <Shown text={lossWords(id)} max={200} /> <span class="muted num">in {count(definitions)}</span>
                          </li>
                        ))}
                      </ul>
                    </li>
                  ))}
                </ul>
              ),
            ],
            [
              "Lost in calls and lists",
              lost.length > 0 && (
                <ul data-testid="losses">
                  {lost.map(([id, times]) => (
                    <li key={id} title={id}>
                      <Shown text={lossWords(id)} max={200} /> <span class="muted num">× {count(times)}</span>
                    </li>
                  ))}
                </ul>
              ),
            ],
          ]}
        />
      </div>
    </Panel>
  );
}

/** Who has signed in, where each caller is used with its own account; the person here can sign in too. */
function SignIns({ of, who, again }: { of: Upstream; who: NonNullable<UpstreamDetail["sign_ins"]>; again: () => void }) {
  const [page, setPage] = useState<SignInPage | undefined>();
  const [code, setCode] = useState("");
  const [begin, beginning] = useAction(async () => setPage(await post<SignInPage>(at("upstreams", of.name, "sign-in"))));
  const [finish, finishing] = useAction(async () => {
    if (page?.needs_code) await post(at("upstreams", of.name, "sign-in"), { code });
    setPage(undefined);
    setCode("");
    again();
  });
  const able = may("call");
  return (
    <Panel title="Sign-ins" testid="sign-ins">
      <div class="stack">
        <p class="muted">Each caller is used with its own account there. {many(who.count, "caller has", "callers have")} signed in.</p>
        {!page && (
          <div class="row">
            <span data-testid="own-sign-in">{who.is_signed_in ? "You are signed in." : "You are not signed in."}</span>
            <Button small icon="check" busy={beginning} disabled={!able} title={able ? undefined : "Needs the role call"} onClick={begin} testid="sign-in">
              {who.is_signed_in ? "Sign in again" : "Sign in"}
            </Button>
          </div>
        )}
        {page && (
          <div class="stack">
            <p>
              <a href={page.url} target="_blank" rel="noopener noreferrer" data-testid="sign-in-page">
                Open the page of <Shown text={page.host} max={200} line />
              </a>
              , and sign in there{page.needs_code ? ". Then enter the code that the page shows:" : "."}
            </p>
            <div class="row">
              {page.needs_code && <input type="text" aria-label="Code on the page" value={code} maxLength={20} autocomplete="off" onInput={(event) => setCode(event.currentTarget.value)} data-testid="sign-in-code" />}
              <Button small kind="primary" icon="check" busy={finishing} disabled={page.needs_code && !code.trim()} onClick={finish} testid="sign-in-done">
                {page.needs_code ? "Use this sign-in" : "I have signed in"}
              </Button>
              <Button small onClick={() => setPage(undefined)}>
                Cancel
              </Button>
            </div>
          </div>
        )}
        {who.callers.length > 0 && (
          <ul class="stack" aria-label="Callers that have signed in">
            {who.callers.slice(0, SHOWN).map((caller) => (
              <SignedIn key={caller} of={of} caller={caller} again={again} />
            ))}
          </ul>
        )}
      </div>
    </Panel>
  );
}

function SignedIn({ of, caller, again }: { of: Upstream; caller: string; again: () => void }) {
  const [revoke, revoking] = useAction(async () => {
    await post(at("upstreams", of.name, "sign-out"), { caller });
    say(`${plain(caller)} has to sign in again.`);
    again();
  });
  const manage = may("manage");
  return (
    <li class="row" data-testid={`signed-in-${caller}`}>
      <Shown text={caller} max={200} line />
      <Button small icon="stop" busy={revoking} disabled={!manage} title={manage ? undefined : "Needs the role manage"} onClick={revoke} testid={`revoke-${caller}`}>
        Revoke
      </Button>
    </li>
  );
}

// The look

type Picks = { [own_name: string]: ToolClass };
const PLURALS: { [name in ToolClass]: string } = { reads: "read", writes: "write", destroys: "destroy" };
const CLASSES = Object.keys(PLURALS) as ToolClass[];

const pickOf = (tool: UpstreamTool, picks: Picks): ToolClass => picks[tool.own_name] ?? (tool.accepted || tool.proposal);

/** The tools of an upstream, what it claims of them, and what a person takes them for. */
function Look({ of, tools }: { of: Upstream; tools: UpstreamTool[] }) {
  const [picks, setPicks] = useState<Picks>({});
  const pick = (tool: UpstreamTool, to: ToolClass) => setPicks((old) => ({ ...old, [tool.own_name]: to }));
  const accept = async (chosen: UpstreamTool[]) => {
    const body = Object.fromEntries(chosen.map((tool) => [tool.own_name, { class: pickOf(tool, picks), fingerprint: tool.fingerprint }]));
    await post(at("upstreams", of.name, "accept"), { tools: body });
    setPicks((old) => Object.fromEntries(Object.entries(old).filter(([name]) => !(name in body))));
    say(`Accepted: ${many(chosen.length, "tool")} of ${plain(of.name)}.`);
  };
  const listed = tools.filter((tool) => tool.state === "listed");
  const groups: [name: string, title: string, about: string, tools: UpstreamTool[], word: string][] = [
    ["changed", "Changed, and held back", "Compare both sides. Nobody can call them until the change is accepted.", tools.filter((tool) => tool.state === "quarantined"), "Accept the change"],
    ["new", "New", "They were not there at the first sight.", tools.filter((tool) => tool.state === "new"), "Accept"],
    [
      of.trusted ? "trusted" : "unseen",
      of.trusted ? "Trusted by the configuration" : "Not looked at yet",
      of.trusted
        ? "The configuration says that the claims are to be believed."
        : "Each call of these asks a person. What the upstream says of them are claims, the classes are proposals: nothing counts until you accept it.",
      listed.filter((tool) => !tool.accepted),
      "",
    ],
    ["accepted", "Accepted", "Rules act on these classes, not on the claims.", listed.filter((tool) => tool.accepted), ""],
  ];
  const left = tools.filter((tool) => tool.state === "denied" || tool.state === "refused");
  if (!tools.length && of.state === "down") return null;
  if (!tools.length)
    return (
      <Panel title="Tools">
        <Empty icon="tools" title={of.state === "new" ? "It was not asked yet" : "It lists no tools"}>
          {of.state === "new" && "An upstream is asked when the first client wants a list, or calls."}
        </Empty>
      </Panel>
    );
  return (
    <Panel class="flush looks" title="Tools, claims and classes" testid="look">
      {groups.map(([name, title, about, members, word]) => {
        if (!members.length) return null;
        const open = name === "accepted" ? members.filter((tool) => pickOf(tool, picks) !== tool.accepted) : members;
        return (
          <Group key={name} name={name} title={title} about={about} members={members}>
            {(shown) => (
              <>
                {shown.map((tool) => (
                  <Entry key={tool.own_name} tool={tool} picked={pickOf(tool, picks)} onPick={(to) => pick(tool, to)} one={word} onAccept={() => accept([tool])} />
                ))}
                {open.length > 0 && (
                  <Decide name={name} open={open} picks={picks} word={name === "accepted" ? `Accept ${many(open.length, "other class", "other classes")}` : `Accept all ${count(open.length)}${name === "changed" ? " changes" : name === "new" ? " new tools" : ""}`} onAccept={() => accept(open)} />
                )}
              </>
            )}
          </Group>
        );
      })}
      {left.length > 0 && (
        <div class="look-group">
          <Fold title={`Not offered (${count(left.length)})`} testid="not-offered">
            <ul class="stack">
              {left.slice(0, SHOWN).map((tool) => (
                <li key={tool.own_name}>
                  <Shown in="code" text={tool.own_name} max={120} line />{" "}
                  <Shown in="span.muted" text={tool.reason} max={300} />
                </li>
              ))}
            </ul>
          </Fold>
        </div>
      )}
    </Panel>
  );
}

function Group({ name, title, about, members, children }: { name: string; title: string; about: string; members: UpstreamTool[]; children: (shown: UpstreamTool[]) => ComponentChildren }) {
  const [limit, setLimit] = useState(SHOWN);
  return (
    <section class="look-group" data-group={name} data-testid={`group-${name}`} aria-label={title}>
      <h3>
        {title} <span class="num">({count(members.length)})</span>
      </h3>
      <p class="muted fine">{about}</p>
      {children(members.slice(0, limit))}
      {members.length > limit && (
        <Button small onClick={() => setLimit(limit + 5 * SHOWN)}>
          {count(members.length - limit)} more
        </Button>
      )}
    </section>
  );
}

interface EntryProps {
  tool: UpstreamTool;
  picked: ToolClass;
  onPick: (to: ToolClass) => void;
  one: string; // the word on its own button; "" for none
  onAccept: () => Promise<void>;
}

function Entry({ tool, picked, onPick, one, onAccept }: EntryProps) {
  const [more, setMore] = useState(false);
  const [accept, busy] = useAction(onAccept);
  const doubtful = tool.hints.readOnlyHint === true && tool.proposal !== "reads";
  return (
    <div class="look-tool" data-testid={`look-${tool.own_name}`} data-class={picked}>
      <div class="look-what">
        <button type="button" class="entry-toggle with-copy" aria-expanded={more} onClick={() => setMore(!more)}>
          <Icon name="chevron" />
          <Shown in="strong" text={tool.own_name} max={120} line />
        </button>
        {!more && tool.description && (
          <Shown in="p.muted fine" text={tool.description} max={140} line />
        )}
        <p class="row tight claims-line">
          <Claims of={tool.hints} />
          {doubtful && (
            <Pill tone="warn" icon="warn" title="Its name says something else">
              doubtful
            </Pill>
          )}
        </p>
      </div>
      <div class="look-class">
        <div class={`segments classes ${picked === tool.accepted ? "" : "proposed"}`} role="radiogroup" aria-label={`What ${plain(tool.own_name)} does`}>
          {CLASSES.map((name) => (
            <label key={name} class={name}>
              <input
                type="radio"
                name={`class-${tool.own_name}`}
                checked={picked === name}
                disabled={!may("manage")}
                data-testid={`class-${tool.own_name}-${name}`}
                onChange={() => onPick(name)}
              />
              <span>{name}</span>
            </label>
          ))}
        </div>
        <span class="muted fine" data-testid={`origin-${tool.own_name}`}>
          {picked === tool.accepted ? "accepted" : picked === tool.proposal ? "proposed" : `your choice; proposed: ${tool.proposal}`}
        </span>
      </div>
      <p class="look-cost num">
        {count(tool.tokens)} <span class="muted fine">tokens</span>
      </p>
      {tool.changes.length > 0 && (
        <div class="look-wide stack" data-testid={`diff-${tool.own_name}`}>
          {tool.changes.map((each, index) => (
            <Difference change={each} key={index} />
          ))}
        </div>
      )}
      {one && (
        <div class="look-wide">
          <Button small kind={tool.changes.length ? "primary" : "plain"} icon="check" busy={busy} disabled={!may("manage")} onClick={accept} testid={`accept-${tool.own_name}`}>
            {one}
          </Button>
        </div>
      )}
      {more && (
        <div class="look-wide stack" data-testid={`about-${tool.own_name}`}>
          {tool.description ? <Long text={tool.description} label="Description" /> : <p class="muted">It has no description.</p>}
          {tool.signature && <Code text={tool.signature} label="Signature" />}
          <p class="muted fine">
            Called <Shown in="code" text={tool.name} max={120} line /> here
          </p>
        </div>
      )}
    </div>
  );
}

/** Accepts all of a group: stays in view. */
function Decide({ name, open, picks, word, onAccept }: { name: string; open: UpstreamTool[]; picks: Picks; word: string; onAccept: () => Promise<void> }) {
  const [accept, busy] = useAction(onAccept);
  const sums = CLASSES.map((each) => [each, open.filter((tool) => pickOf(tool, picks) === each).length] as const).filter(([, sum]) => sum);
  if (open.length === 1 && (name === "changed" || name === "new")) return null; // it has a button of its own
  return (
    <div class="look-decide">
      <Button
        kind={name === "trusted" ? "plain" : "primary"}
        icon="check"
        busy={busy}
        disabled={!may("manage")}
        title={may("manage") ? undefined : "Needs the role manage"}
        onClick={accept}
        testid={`accept-all-${name}`}
      >
        {word}
      </Button>
      <span class="muted num">{sums.map(([each, sum]) => `${count(sum)} ${sum === 1 ? each : PLURALS[each]}`).join(", ")}</span>
    </div>
  );
}

const CLAIMS: { [hint: string]: [yes: string, no: string] } = {
  readOnlyHint: ["only reads", "changes things"],
  destructiveHint: ["may destroy", "destroys nothing"],
  idempotentHint: ["harmless to repeat", "counts each time"],
  openWorldHint: ["reaches outside", "stays inside"],
};

/** What an upstream says of a tool, in quotation marks: it is a claim. */
function Claims({ of }: { of: JsonObject }) {
  const names = Object.keys(of).slice(0, 8);
  if (!names.length) return <span class="muted fine">claims nothing</span>;
  return (
    <>
      <span class="muted fine">claims</span>
      {names.map((name) => (
        <span class="claim" key={name}>
          “<Shown text={typeof of[name] === "boolean" && CLAIMS[name] ? CLAIMS[name][of[name] ? 0 : 1] : `${name}: ${JSON.stringify(of[name] as Json)}`} max={60} line />”
        </span>
      ))}
    </>
  );
}

function Stderr({ of, lines }: { of: Upstream; lines: UpstreamDetail["stderr"] }) {
  if (!lines.length && /^https?:/.test(of.target)) return null;
  return (
    <Panel title="Standard error" extra={<span class="muted fine">its last lines, secrets masked</span>} testid="stderr">
      {lines.length ? (
        <div class="stack">
          {lines.map((each) => (
            <div key={each.worker}>
              {each.worker && <h3>Worker {plain(each.worker)}</h3>}
              <Code text={each.lines.join("\n")} label={each.worker ? `Standard error, worker ${plain(each.worker)}` : "Standard error"} testid="stderr-lines" />
            </div>
          ))}
        </div>
      ) : (
        <p class="muted">It has written nothing.</p>
      )}
    </Panel>
  );
}
