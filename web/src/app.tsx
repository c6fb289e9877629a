// The frame around the screens: header, tabs, theme, keys, and what to do when nobody is signed in.
import { useEffect, useReducer, useState } from "preact/hooks";
import { at as path, get, me, signedOutBecause, signOut } from "./api-client";
import { use } from "./cell";
import { close, health, heard, now, open, replicas, runningTotal, stream, upstreams, waiting } from "./live";
import { notify } from "./notify";
import { go, link, route, type Route } from "./route";
import { isScreen, load, viewOf } from "./screens";
import { pick, theme, THEMES, type Theme } from "./theme";
import { Ago, Button, clock, Copy, Dialog, Empty, Facts, Icon, type IconName, many, Message, Notice, plain, Shown, SIGNS, useAction, useData, useKeys } from "./ui";

const SCREENS: { name: string; word: string; icon: IconName; key: string }[] = [
  { name: "now", word: "Now", icon: "now", key: "n" },
  { name: "tools", word: "Tools", icon: "tools", key: "t" },
  { name: "try", word: "Try", icon: "try", key: "y" },
  { name: "approve", word: "Approve", icon: "approve", key: "a" },
  { name: "audit", word: "Audit", icon: "audit", key: "u" },
  { name: "upstreams", word: "Upstreams", icon: "upstreams", key: "s" },
  { name: "connections", word: "Connections", icon: "connections", key: "c" },
];

/** The tabs of this server: a server without upstreams has none for them. */
const tabs = () => SCREENS.filter((screen) => screen.name !== "upstreams" || me.value?.server.upstreams);

/** Screens below a tab: the tab, and the word for the title of the page. */
const BELOW: { [screen: string]: [tab: string, word: string] } = {
  calls: ["now", "Call"],
  resources: ["tools", "Resources"],
  prompts: ["tools", "Prompts"],
};

export function App() {
  const who = use(me);
  useEffect(() => {
    if (who) open();
    else close();
    return undefined;
  }, [who]);
  if (who === undefined) return <main class="alone" aria-busy="true" />;
  return who ? <Signed /> : <SignedOut />;
}

function SignedOut() {
  const why = use(signedOutBecause);
  useEffect(() => {
    document.title = "Handrail: not signed in";
  }, []);
  return (
    <main class="alone" data-testid="signed-out">
      <Mark size={40} />
      <h1>You are not signed in</h1>
      {why && (
        <Shown in="p" text={why} />
      )}
      <p>The console opens with a link that works once, for five minutes. Ask for a new one where the server runs:</p>
      <div class="command">
        <code>handrail console</code>
        <Copy text="handrail console" label="Copy the command" />
      </div>
      <p class="muted">
        It prints a link; open it in this browser. For a person who may only look: <code>handrail console --roles view</code>
      </p>
    </main>
  );
}

function Signed() {
  const at = use(route);
  const [help, setHelp] = useState(false);
  const [self, setSelf] = useState(false);
  const greeted = use(stream) !== "opening"; // drawn once there is something to draw: nothing jumps
  useTitle(at);
  useEffect(() => window.scrollTo(0, 0), [at.screen, at.screen === "calls" && at.name]);
  useKeys({
    ...Object.fromEntries(tabs().map((screen) => [`g ${screen.key}`, () => go(link(screen.name))])),
    "g r": () => go(link("resources")),
    "g p": () => go(link("prompts")),
    "?": () => setHelp(true),
    "/": () => document.querySelector<HTMLInputElement>("input[type=search]")?.focus(),
  });
  return (
    <>
      <a
        class="skip"
        href="#main"
        onClick={(event) => {
          event.preventDefault();
          document.getElementById("main")?.focus();
        }}
      >
        Skip to the content
      </a>
      <Header at={at} onHelp={() => setHelp(true)} onSelf={() => setSelf(true)} />
      <Lost />
      <main id="main" tabIndex={-1} aria-busy={!greeted}>
        {greeted && <Screen at={at} />}
      </main>
      <Message />
      <Heard />
      {help && <Help onClose={() => setHelp(false)} />}
      {self && <Self onClose={() => setSelf(false)} />}
    </>
  );
}

function Screen({ at }: { at: Route }) {
  const [, come] = useReducer((n: number, _: void) => n + 1, 0);
  const View = viewOf(at.screen);
  if (View) return <View route={at} />;
  if (isScreen(at.screen)) return <Coming key={at.screen} screen={at.screen} onCome={come} />;
  return (
    <Empty title="There is no such page">
      <a href="#/now">Go to what happens now</a>
    </Empty>
  );
}

/** A screen on its way here. If it cannot be had: why, and what to do. */
function Coming({ screen, onCome }: { screen: string; onCome: () => void }) {
  const here = use(stream);
  const { failure } = useData(() => load(screen).then(onCome), [here]);
  const [reload, reloading] = useAction(async () => {
    await get(path("me")); // who does not answer cannot give us the page again either
    location.reload();
  });
  if (!failure) {
    return (
      <p class="coming muted" role="status">
        Loading…
      </p>
    );
  }
  return (
    <Notice tone="bad" title="This screen could not be loaded" testid="screen-failed">
      <p>{here === "lost" ? "The server is out of reach. The screen loads when the server is back." : "The server may have been updated since this page was opened. Reload the page."}</p>
      <Button icon="refresh" busy={reloading} onClick={reload} testid="reload">
        Reload
      </Button>
    </Notice>
  );
}

function Header({ at, onHelp, onSelf }: { at: Route; onHelp: () => void; onSelf: () => void }) {
  const who = use(me)!;
  const name = who.server.title || who.server.name;
  return (
    <header class="top">
      <a class="brand" href="#/now" title={plain(who.server.name)}>
        <Mark size={22} />
        <Shown in="strong" text={name} max={40} line />
      </a>
      <FleetSize />
      {at.screen === "now" ? <span class="well" /> : <Well />}
      <nav class="screens" aria-label="Screens">
        {tabs().map((screen) => (
          <a
            key={screen.name}
            href={link(screen.name)}
            class="screen"
            data-testid={`tab-${screen.name}`}
            aria-current={at.screen === screen.name || BELOW[at.screen]?.[0] === screen.name ? "page" : undefined}
            onPointerEnter={() => load(screen.name).catch(() => {})} // if it fails, the screen says so
          >
            <Icon name={screen.icon} />
            <span>{screen.word}</span>
            {screen.name === "now" && <RunningBadge />}
            {screen.name === "approve" && <WaitingBadge />}
            {screen.name === "upstreams" && <UpstreamsBadge />}
          </a>
        ))}
      </nav>
      <div class="corner">
        <ThemeButton />
        <Button kind="quiet" icon="ask" label="Keys and help" testid="help" onClick={onHelp} />
        <button type="button" class="button quiet who" data-testid="who" onClick={onSelf} aria-label={`Signed in as ${plain(who.who)}`}>
          <Icon name="user" />
          <Shown in="span" text={who.who} max={24} line />
        </button>
      </div>
    </header>
  );
}

/** In a fleet: how many replicas there are. */
function FleetSize() {
  const { rows } = use(replicas);
  if (!rows.length) return null;
  return (
    <a class="fleet num" href={link("connections")} data-testid="fleet-size">
      {many(rows.length, "replica")}
    </a>
  );
}

/** The health of the server, in words. */
function Well() {
  const said = use(health);
  const level = said?.level ?? "good";
  return (
    <p class={`well ${said ? level : "unknown"}`} data-testid="health" title={said ? plain([said.sentence, ...said.notes].join("\n")) : undefined}>
      <Icon name={said ? SIGNS[level] : "run"} />
      <span>{said ? <Shown text={said.sentence} max={200} line /> : "Listening…"}</span>
    </p>
  );
}

function RunningBadge() {
  const total = use(runningTotal);
  return (
    <span class="badge-place">
      {total > 0 && (
        <span class="badge info" title={`${many(total, "call")} running`}>
          {total > 999 ? "1k+" : total}
        </span>
      )}
    </span>
  );
}

function WaitingBadge() {
  const total = use(waiting).length;
  return (
    <span class="badge-place">
      {total > 0 && (
        <span class="badge warn" data-testid="approve-count" title={`${many(total, "call")} waiting`}>
          {total > 99 ? "99+" : total}
        </span>
      )}
    </span>
  );
}

/** How many upstreams are down; if none is, how many have tools that wait for a look. */
function UpstreamsBadge() {
  const all = use(upstreams);
  const down = all.filter((one) => one.state === "down").length;
  const waits = all.filter((one) => one.unseen + one.new + one.changed).length;
  const total = down || waits;
  return (
    <span class="badge-place">
      {total > 0 && (
        <span class={`badge ${down ? "bad" : "warn"}`} data-testid="upstreams-count" title={down ? `${down} down` : `${waits} with tools that wait for a look`}>
          {total}
        </span>
      )}
    </span>
  );
}

/** Says so when the stream is lost: what is on the page may be old. */
function Lost() {
  const state = use(stream);
  const at = use(heard);
  if (state !== "lost") return null;
  return (
    <div class="lost" role="alert" data-testid="stream-lost">
      <Icon name="warn" />
      <p>
        <strong>The server is out of reach.</strong> {at ? <>What you see is as of {clock(at)}.</> : null} Trying again by itself…
      </p>
      <Button small icon="refresh" onClick={open}>
        Try now
      </Button>
    </div>
  );
}

/** Tells of new approvals, without their arguments: to a screen reader, and to whoever looks elsewhere. */
function Heard() {
  const all = use(waiting);
  const server = use(me)!.server.name;
  const [text, setText] = useState("");
  const [known] = useState(() => new Set(all.map((one) => one.id)));
  useEffect(() => {
    const fresh = all.filter((one) => !known.has(one.id));
    for (const one of fresh) known.add(one.id);
    for (const one of fresh) notify(one, server, plain);
    if (fresh.length) setText(`${many(all.length, "call")} waiting for approval. New: ${fresh.map((one) => plain(one.tool)).join(", ")}.`);
  }, [all]);
  return (
    <div class="unseen" aria-live="polite">
      {text}
    </div>
  );
}

function useTitle(at: Route): void {
  const total = use(waiting).length;
  const who = use(me);
  useEffect(() => {
    const word = BELOW[at.screen]?.[1] ?? (SCREENS.find((screen) => screen.name === at.screen)?.word ?? "");
    document.title = `${total ? `(${total}) ` : ""}${word} · ${plain(who?.server.name ?? "")} · Handrail`;
  }, [at, total, who]);
}

function Self({ onClose }: { onClose: () => void }) {
  const who = use(me)!;
  const { server } = who;
  const fleet = use(replicas).rows.length;
  const [leave, leaving] = useAction(signOut);
  return (
    <Dialog
      title="You and the server"
      onClose={onClose}
      actions={
        <Button kind="danger" busy={leaving} onClick={leave} testid="sign-out">
          Sign out
        </Button>
      }
    >
      <Facts
        of={[
          ["Signed in as", <Shown text={who.who} />],
          ["You may", who.roles.map((role) => ({ view: "look", call: "try tools", approve: "decide approvals", manage: "switch tools and upstreams, cancel, accept" })[role]).join(", ")],
          ["Server", <Shown text={`${server.title && server.title !== server.name ? `${server.title} (${server.name})` : server.name} ${server.version}`} />],
          ["Running since", <>{clock(server.started)} (<Ago at={server.started} />)</>],
          [
            "Endpoint",
            server.endpoint ? (
              <span class="with-copy">
                <code>{server.endpoint}</code>
                <Copy text={server.endpoint} />
              </span>
            ) : (
              server.transport
            ),
          ],
          ["Revisions", server.revisions.join(", ")],
          fleet ? ["Replicas", fleet] : ["Workers", server.workers],
          ["On record", server.audit ? "every call is in the audit" : "no: this server keeps no audit"],
          ["Clock", `${clock(now())} at the server`],
        ]}
      />
    </Dialog>
  );
}

function Help({ onClose }: { onClose: () => void }) {
  const keys: [string, [string, string][]][] = [
    ["Anywhere", [...tabs().map((screen): [string, string] => [`g ${screen.key}`, `go to ${screen.word}`]), ["g r", "go to Resources"], ["g p", "go to Prompts"], ["/", "search"], ["?", "this help"], ["Esc", "close"]]],
    [
      "In Approve",
      [
        ["j k", "next, previous card"],
        ["a Enter", "yes"],
        ["d Enter", "no"],
        ["e", "edit the arguments"],
      ],
    ],
    ["In Try", [["Ctrl Enter", "run"]]],
  ];
  return (
    <Dialog title="Keys" onClose={onClose} testid="keys">
      {keys.map(([where, list]) => (
        <div key={where} class="keys">
          <h3>{where}</h3>
          <dl>
            {list.map(([key, what]) => (
              <div key={key}>
                <dt>
                  {key.split(" ").map((part) => (
                    <kbd key={part}>{part}</kbd>
                  ))}
                </dt>
                <dd>{what}</dd>
              </div>
            ))}
          </dl>
        </div>
      ))}
    </Dialog>
  );
}

export function Mark({ size }: { size: number }) {
  return (
    <svg class="mark" width={size} height={size} viewBox="0 0 32 32" aria-hidden="true">
      <rect width="32" height="32" rx="7" />
      <path d="M6 21.5h5.5l9-11H26M11 21.5V26M20.5 10.5V26" />
    </svg>
  );
}

const SUNS: { [one in Theme]: IconName } = { system: "system", light: "sun", dark: "moon" };

function ThemeButton() {
  const at = use(theme);
  const next = THEMES[(THEMES.indexOf(at) + 1) % THEMES.length]!;
  return <Button kind="quiet" icon={SUNS[at]} label={`Theme: ${at}. Switch to ${next}`} testid="theme" onClick={() => pick(next)} />;
}
