// Every shape that crosses between the page and the server. The other side is src/handrail/console/.
// Times are seconds since the epoch by the server's clock. Text from tools, clients and people is raw: show it with <Shown>.

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };
export type JsonObject = { [key: string]: Json };

export type Role = "view" | "call" | "approve" | "manage"; // look; try tools; decide approvals; switch tools, cancel, revoke

/** GET api/me. Without a session: 401. */
export interface Me {
  who: string;
  roles: Role[];
  now: number;
  server: {
    name: string;
    title: string;
    version: string;
    started: number;
    transport: "stdio" | "http" | "memory";
    endpoint: string; // the URL of the MCP endpoint; "" over stdio
    target: string; // what `handrail call` takes for this server: the URL, or the file it was served from
    revisions: string[]; // newest first
    audit: boolean; // whether calls are on record
    workers: number;
    upstreams: boolean; // whether it is a gateway: has upstream servers
  };
}

/** POST api/sign-in {code} */
export interface SignedIn extends Me {
  csrf: string; // goes into the header x-handrail-csrf of every request; without it the cookie is worth nothing
}

/** Every answer that is not 2xx. */
export interface Failure {
  error: string; // what was wrong, and what would be right
  problems?: Problem[];
}

/** A call, as one row. */
export interface Row {
  id: string; // under which it stands in the audit too
  tool: string;
  title: string;
  who: string;
  client: string;
  revision: string;
  first: string; // the first arguments, secrets masked, in one line; "" if there are none, or they are not known
  from: string; // an address, "stdio" or "memory"
  state: "running" | "asking" | "cancelling" | "done";
  stage: string; // the one it is in; done: the last
  began: number;
  seconds: number; // so far, or in all
  progress?: Progress;
  outcome?: string; // when done: ok, tool_error, cancelled, timeout, input_required, or the kind of a refusal
  approval?: string; // that it waits for, or had
  worker: string;
}

export interface Progress {
  done: number;
  total?: number;
  message?: string;
  at?: number;
}

/** The event "tick", at most every 100 ms while something happens. */
export interface Tick {
  at: number;
  running: Row[]; // all that run now; a sample of 100 if there are more, longest running first
  running_total: number;
  finished: Row[]; // since the last tick, newest last; a sample of 20 if there are more, failures before others
  totals: Totals;
  minute: Minute; // the one that is going on
}

export interface Totals {
  calls: number; // that have ended, since the server began: exact
  errors: number; // of those: tool_error, timeout, internal
  refused: number; // of those: what the guards or the protocol refused
}

export interface Minute {
  at: number; // when it began
  calls: number;
  errors: number;
  refused: number;
  p95_ms: number; // of those that ran
}

/** The event "figures", at most once a second, when they change. */
export interface Figures {
  last: Omit<Minute, "at">; // the last sixty seconds
  refused: { who: string; reason: string; calls: number }[]; // in the last five minutes, most often first, 20 at most
  tools: { tool: string; title: string; calls: number; errors: number; refused: number; p95_ms: number }[]; // likewise
  trials: { rule: string; verdict: string; calls: number; differs: number; last: number }[]; // rules on trial, all of them: calls since the start that each matches, and those that were decided otherwise
}

export interface Health {
  level: "good" | "warn" | "bad";
  sentence: string; // one, in words
  notes: string[];
}

/** The event "hello", the first on every stream: everything as it is now. */
export interface Hello extends Tick {
  minutes: Minute[]; // the last 60, oldest first, without the present one
  approvals: Approval[]; // that wait
  replicas: Replica[]; // [] outside of a fleet
  connections: Connection[];
  figures: Figures;
  upstreams: Upstream[]; // in the order of the configuration
  health: Health;
}

// Further events: "approval" (Approval: new, or changed), "tools" ({}: the list has changed, fetch it again),
// "connections" (Connection[]: all of them), "upstreams" (Upstream[]: all of them, at most once a second, when they change),
// "replicas" (Replica[]: all of them, every few seconds), "health" (Health), "grants" ({}: fetch api/approvals again), "try" (TryEvent, only to the session that tries).

/** A replica of a fleet, as it last described itself. */
export interface Replica {
  id: string;
  host: string;
  process: number;
  version: string; // of Handrail
  server_version: string;
  started: number;
  calls: number; // in flight
  beat: number; // grows while the replica lives
  seen: number; // seconds since it last described itself, when this was sent; it does so every 5
}

export interface Connection {
  id: string;
  client: string;
  version: string;
  revision: string;
  transport: "stdio" | "http" | "memory";
  who: string;
  from: string;
  since: number;
  seen: number;
  open: boolean; // has a stream or a request open now
  calls: number;
  worker: string;
}

/** An upstream server of a gateway, all workers together. */
export interface Upstream {
  name: string;
  prefix: string; // of its names here
  target: string; // its command, or its address; without secrets
  state: "new" | "starting" | "up" | "down" | "stopped"; // new: not asked yet; stopped: by a person
  problem: string; // its last failure
  revision: string; // that it speaks; "" before it was asked
  era: "" | "handshake" | "stateless";
  since: number; // when it was first heard to speak this revision
  latency_ms: number; // of its last call
  calls: number;
  errors: number;
  restarts: number;
  lossy: { [id: string]: number }; // what could not be carried between two revisions, and how often
  left_out: { [revision: string]: { [id: string]: number } }; // of definitions, by the revision of the clients that listed them: of how many
  sessions: number; // connections that are open
  trusted: boolean; // its hints are believed by configuration
  tools: number; // offered to callers
  tokens: number; // about how many these cost a model
  unseen: number; // tools nobody has looked at yet
  new: number; // that came later, and wait for a look
  changed: number; // that have changed since they were accepted
}

/** GET api/upstreams/NAME */
export interface UpstreamDetail {
  tools: UpstreamTool[];
  sign_ins: { is_signed_in: boolean; callers: string[]; count: number } | null; // where each caller signs in: the person here, and who has
  stderr: { worker: string; lines: string[] }[]; // the last lines, secrets masked; a worker without any is left out
}

/** POST api/upstreams/NAME/sign-in {} begins; with {code} it ends. */
export interface SignInPage {
  url: string; // to be opened by the person
  host: string;
  needs_code: boolean; // the page shows a code at the end, which is to be entered here
}

export type ToolClass = "reads" | "writes" | "destroys";

export interface UpstreamTool {
  own_name: string; // at the upstream
  name: string; // here
  title: string;
  description: string;
  signature: string; // "" where its definition cannot be used
  hints: JsonObject; // claims of the upstream
  proposal: ToolClass; // by its name and claims; decides nothing
  accepted: ToolClass | ""; // by a person
  state: "listed" | "new" | "quarantined" | "denied" | "refused";
  reason: string; // why it is not offered
  changes: Change[];
  fingerprint: string;
  tokens: number;
}
// POST api/upstreams/NAME/refresh {} → {}                       role manage; fetch its lists again, start it if it does not run
// POST api/upstreams/NAME/accept {tools: {OWN_NAME: {class, fingerprint}}} → {}   role manage; 409 if one has changed since

/** GET api/stops → {stops: Stopped[]}. What a person has stopped, here or by `handrail stop`. */
export interface Stopped {
  kind: "tool" | "upstream" | "caller";
  name: string;
  reason: string; // callers are told; "" for one of the server's own
}
// POST api/stops {kind, name, on: boolean, reason?} → {}   role manage; off: its calls are cancelled, and new ones refused

/** Whose view it is. */
export interface Viewed {
  as: string;
  scopes: string[];
  revision: string;
  principals: string[]; // to choose from: configured, or seen
  revisions: string[];
}

/** GET api/tools?as=WHO&scopes=a,b&revision=R: what this caller would see. */
export interface ToolsView extends Viewed {
  tools: ToolInfo[];
  tokens: number; // about how many the exposed ones cost a model
  bytes: number; // of the list on the wire
}

/** What is said of a tool, a resource and a prompt alike. */
export interface Listed {
  name: string; // of a resource: its URI, or its template
  title: string;
  description: string;
  input_schema: JsonObject;
  icons: Icon[];
  tags: string[];
  scopes: string[];
  on: boolean;
  exposed: boolean;
  hidden_because: string; // "" if exposed
  verdict: "allow" | "ask" | "deny" | "hide" | "depends"; // depends: on the arguments
  rule: string;
  why: string;
  limits: string[]; // in words
  calls: number; // of all workers
  errors: number;
  refused: number;
  p95_ms: number; // of those that ran
  last: number; // when it was last called; 0: never
  warnings: string[]; // look-alike names, invisible characters
  upstream: string; // whose it is; "": the server's own
  stopped: boolean; // by a person: its calls are refused
}

export interface ToolInfo extends Listed {
  signature: string;
  output_schema?: JsonObject;
  annotations: JsonObject; // declared by the server
  tokens: number;
  fingerprint: string;
  pin: { state: "none" | "pinned" | "changed" | "new"; since: number; changes: Change[] };
}

/** GET api/catalog/resources|prompts?as=WHO&scopes=a,b&revision=R: what this caller would see. */
export interface CatalogView extends Viewed {
  resources?: CatalogEntry[]; // one of the two
  prompts?: CatalogEntry[];
}

export interface CatalogEntry extends Listed {
  kind: "resource" | "template" | "prompt";
  own_name: string; // for programs; of a prompt: the same as `name`
  completes: string[]; // arguments that the server has suggestions for
  mimeType?: string;
  size?: number;
  annotations?: Noted;
}
// POST api/catalog/resources|prompts/NAME/switch {on: boolean} → {}                             role manage
// POST api/catalog/resources|prompts/NAME/complete {argument, value, context} → {values: string[]}   role call

export interface Icon {
  src: string; // a data: URL that may be shown at once; "" if it must be fetched first (https), or may not be shown
  from: string; // the address, for a person to agree to; "" for data:
  why_not: string; // why it is never shown
}

export interface Change {
  kind: string; // wording, schema widened, schema narrowed, new hint, invisible characters
  path: string;
  before: string;
  after: string;
}
// GET api/tools/wire?as&scopes&revision → text/plain: the answer to tools/list, as the wire would carry it
// POST api/tools/NAME/switch {on: boolean} → {}               role manage
// POST api/tools/NAME/accept {} → {}                          role manage; a changed tool is as it should be
// POST api/tools/NAME/icon {index: number} → {src: string}    role manage; fetch an https icon after consent

export interface Problem {
  path: string; // JSON pointer
  text: string;
}

/** POST api/try/check {tool | resource | prompt, arguments}. A resource is a URI, or a template with its variables. */
export interface Checked {
  valid: boolean;
  problems: Problem[];
  verdict: string;
  rule: string;
  uri?: string; // of the resource that would be read
  entry?: string; // the name of what reads it: that URI, or a template
}

/** POST api/try {tool | resource | prompt, arguments, revision} → {id}  role call. What happens comes as events "try". */
export type TryEvent =
  | { id: string; kind: "progress"; progress: Progress }
  | { id: string; kind: "log"; level: string; text: string }
  | { id: string; kind: "question"; key: string; question: Question }
  | { id: string; kind: "done"; seconds: number; call: string; result?: Result; error?: CallError };

export interface Question {
  server: string; // who asks
  message: string;
  schema?: JsonObject; // a form
  defaults?: JsonObject;
  url?: string; // or a page to visit
  host?: string; // of the page, as it is written
  host_shown?: string; // its punycode, if that differs
  warnings?: string[];
}
// POST api/try/ID/answer {key, action: "accept" | "decline" | "cancel", content?} → {}
// POST api/try/ID/cancel {} → {}

export interface CallError {
  kind: "protocol" | "failed" | "refused" | "transport" | "timeout" | "internal"; // the last: the console itself failed
  code?: number;
  message: string;
  data?: Json;
}

export interface Result {
  is_error: boolean;
  blocks: Block[];
  structured?: Json;
  meta?: JsonObject;
  risk: string; // why it must be handled with care; "" if nothing says so
  bytes: number;
}

export interface Noted {
  audience?: string[];
  priority?: number;
  lastModified?: string;
}

export type Block = (
  | { type: "text"; text: string; bytes: number; cut: boolean; notes: Noted }
  | { type: "image" | "audio"; mime: string; data: string; bytes: number; cut: boolean; playable: boolean; notes: Noted }
  | { type: "link"; uri: string; readable: boolean; name: string; title: string; description: string; mime: string; size?: number; notes: Noted }
  | { type: "resource"; uri: string; readable: boolean; mime: string; text?: string; data?: string; bytes: number; cut: boolean; playable?: boolean; notes: Noted }
  | { type: "other"; json: Json; notes: Noted }
) & { role?: string }; // of a prompt: whose message it is
// readable: the server has a resource at the URI: it has a page here
// cut: more than 64 KB of text (1 MB of a picture): GET api/calls/ID/blocks/INDEX gives all of it, as a download

export interface Approval {
  id: string;
  state: "pending" | "approved" | "denied" | "expired" | "cancelled" | "consumed";
  server: string;
  tool: string;
  title: string;
  description: string; // of the tool; at most 1,000 characters
  preview: string; // what would happen, in the words of the tool's author; several lines; "": there is none
  caller: "waiting" | "left"; // left: a yes is used when the caller calls again
  used: boolean; // an approved call has run
  sentence: string; // what would happen, in words
  who: string;
  client: string;
  rule: string;
  why: string;
  arguments: JsonObject; // secrets masked
  masked: boolean;
  differences: Difference[]; // to the last approved call of the same caller and tool; empty: there was none
  fingerprint: string;
  created: number;
  expires: number;
  by: string;
  at: number;
  note: string;
  edited?: JsonObject;
  editable: boolean;
  schema?: JsonObject; // of its arguments
  may: boolean; // this session may decide it
  why_not: string;
  suggestions: Suggestion[];
  unseen_upstream: string; // whose tool it is, if nobody has looked at that tool yet; else ""
}

export interface Difference {
  name: string;
  before?: string; // JSON; absent: was not given
  after?: string;
}

export interface Suggestion {
  text: string; // "allow when amount is at most 10, for 8 hours"
  seconds: number;
  matching: { [name: string]: JsonObject };
}

/** GET api/approvals */
export interface ApprovalsView {
  open: Approval[];
  recent: Approval[]; // decided lately, newest first
  grants: Grant[];
  remember_seconds: number; // the longest a yes may be remembered; 0: not at all
}

export interface Grant {
  id: string;
  who: string;
  tool: string;
  arguments: JsonObject;
  matching: { [name: string]: JsonObject };
  made: number;
  until: number;
  by: string;
}
// POST api/approvals/ID {yes, note?, edited?, remember?, matching?} → Approval; 409 if it was decided before   role approve
// POST api/approvals/ID/check {arguments} → Checked
// POST api/grants/ID/revoke {} → {}   role approve

/** GET api/calls/ID */
export interface Story {
  row: Row;
  source: "memory" | "audit"; // from the audit there are no arguments, results or wire
  stages: { name: string; ms: number }[];
  verdict: string; // allow, ask, or "" where there was nothing to decide
  rule: string;
  why: string;
  agreed: string; // which approval it was, or what made one unnecessary
  would_decide: string[]; // rules on trial that match, each as "RULE: VERDICT"
  arguments?: Json; // secrets masked
  sent?: Json; // as they came, if they were changed since
  repairs: { path: string; sent: string; became: string }[];
  result?: Result;
  refusal?: { kind: string; text: string };
  findings: string[]; // what cleaning found
  progress: Progress[];
  logs: { at: number; level: string; text: string }[];
  wire: Wire[];
  trace: string;
  upstream?: { name: string; revision: string; lossy: string[] }; // which one served it; what was lost on the way, as ids of TRANSLATION
  records: AuditRecord[];
}

export interface Wire {
  at: number;
  way: "in" | "out";
  text: string; // secrets masked
  bytes: number;
  cut: boolean; // GET api/calls/ID/wire/INDEX gives all of it
}
// POST api/calls/ID/cancel {} → {}   role manage; or one's own try

/** GET api/audit?text&event&outcome&tool&who&since&until&before&limit: newest first */
export interface AuditView {
  on: boolean;
  file: string;
  records: AuditRecord[];
  next: string; // for `before`, if there are more; else ""
  total: number; // of records in the file
}

export interface AuditRecord {
  number: number;
  time: number;
  event: string; // intent, outcome, refusal, approval, …
  call: string;
  who: string;
  tool: string;
  outcome: string;
  rule: string;
  raw: JsonObject;
}

/** GET api/audit/verify */
export interface Verdict {
  ok: boolean;
  records: number;
  first: number;
  last: number;
  flaw?: { number: number; place: string; text: string };
  damage: string;
  unfinished: string[]; // calls that began and did not end
  head: string;
  at: number;
}
// GET api/audit/export?format=jsonl|csv&…the same filters → a download
// POST api/sign-in {code} → SignedIn, and the cookie; POST api/sign-out {} → {}
