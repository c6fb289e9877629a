// Who is connected, in which revision, over what; and in a fleet, to which replicas.
import type { Connection, Replica, Stopped } from "../api";
import { at, get, me } from "../api-client";
import { use } from "../cell";
import { connections, replicas, toolsChanged } from "../live";
import { link } from "../route";
import { Start, Stop } from "../stop";
import { Ago, Code, count, Empty, Head, many, Panel, Pill, plain, Shown, useData } from "../ui";

export function Connections() {
  const all = use(connections);
  const sorted = [...all].sort((a, b) => Number(b.open) - Number(a.open) || b.seen - a.seen);
  return (
    <>
      <div class="title">
        <h1>Connections</h1>
        <p class="muted num">{many(all.length, "client")} with a stream open, or heard from within a minute</p>
      </div>
      <Panel class="flush">
        {sorted.length ? (
          <table class="cards">
            <Head of={["Client", "State", "Revision", "Transport", "Who", "From", "Since", "Last seen", "Calls>", ""]} />
            <tbody>
              {sorted.map((one) => (
                <One key={one.id} of={one} />
              ))}
            </tbody>
          </table>
        ) : (
          <Nobody />
        )}
      </Panel>
      <Replicas />
      <Stops />
    </>
  );
}

function One({ of }: { of: Connection }) {
  return (
    <tr data-testid={`connection-${of.id}`}>
      <td>
        <Shown in="strong" text={of.client || "no name given"} max={80} line />{" "}
        <Shown in="span.muted" text={of.version} max={40} line />
      </td>
      <td>
        <Pill tone={of.open ? "good" : "quiet"} icon={of.open ? "connections" : "clock"}>
          {of.open ? "open" : "idle"}
        </Pill>
      </td>
      <td data-label="Revision" class="num">
        {plain(of.revision) || "–"}
      </td>
      <td data-label="Transport">{of.transport}</td>
      <td data-label="Who">
        <a href={link("tools", "", { as: of.who })} title="See the tools as this caller does">
          <Shown text={of.who} max={80} line />
        </a>
      </td>
      <td data-label="From">
        <Shown text={of.from} max={80} line />
      </td>
      <td data-label="Since">
        <Ago at={of.since} />
      </td>
      <td data-label="Last seen">
        <Ago at={of.seen} />
      </td>
      <td data-label="Calls" class="num right">
        {count(of.calls)}
      </td>
      <td class="right">
        <Stop caller={of.who} small />
      </td>
    </tr>
  );
}

const LATE = 10; // s: two signs of life are missing

const versionOf = (of: Replica): string => `${of.server_version} ${of.version}`;

/** In a fleet: its replicas, the one that started last at the end. */
function Replicas() {
  const { at: sent, rows } = use(replicas);
  if (!rows.length) return null;
  const sorted = [...rows].sort((a, b) => a.started - b.started || (a.id < b.id ? -1 : 1));
  const versions = new Set(sorted.map(versionOf));
  const newest = versionOf(sorted.at(-1)!);
  const mixed = versions.size > 1 && (
    <Pill tone="info" icon="refresh" testid="replicas-mixed">
      {versions.size} versions: a rolling update
    </Pill>
  );
  return (
    <Panel class="flush below" title="Replicas" extra={mixed} testid="replicas">
      <table class="cards">
        <Head of={["Host", "Process", "Version", "Calls in flight>", "Up since", "Last seen"]} />
        <tbody>
          {sorted.map((one) => (
            <ReplicaRow key={one.id} of={one} sent={sent} differs={versionOf(one) !== newest} />
          ))}
        </tbody>
      </table>
    </Panel>
  );
}

function ReplicaRow({ of, sent, differs }: { of: Replica; sent: number; differs: boolean }) {
  const seen = <Ago at={sent - of.seen} />;
  return (
    <tr data-testid={`replica-${of.id}`}>
      <td>
        <Shown in="strong" text={of.host} max={80} line />
      </td>
      <td data-label="Process" class="num">
        {of.process}
      </td>
      <td data-label="Version">
        <Shown text={of.server_version} max={40} line /> <Shown in="span.muted" text={`Handrail ${of.version}`} max={60} line />{" "}
        {differs && (
          <Pill tone="info" icon="refresh" title="The replica that started last has another version">
            differs
          </Pill>
        )}
      </td>
      <td data-label="Calls in flight" class="num right">
        {count(of.calls)}
      </td>
      <td data-label="Up since">
        <Ago at={of.started} />
      </td>
      <td data-label="Last seen">
        {of.seen < LATE ? (
          seen
        ) : (
          <Pill tone="warn" icon="warn" title="A replica tells of itself every 5 s; one that tells nothing leaves this list after 20 s" testid="replica-late">
            late: {seen}
          </Pill>
        )}
      </td>
    </tr>
  );
}

/** What a person has stopped, here or on a command line. */
function Stops() {
  const { data } = useData<{ stops: Stopped[] }>((signal) => get(at("stops"), {}, signal), [use(toolsChanged)]);
  if (!data?.stops.length) return null;
  return (
    <Panel class="flush below" title="Stopped" testid="stops">
      <table class="cards">
        <Head of={["What", "Name", "Reason", ""]} />
        <tbody>
          {data.stops.map((one) => (
            <tr key={`${one.kind} ${one.name}`} data-testid={`stopped-${one.name}`}>
              <td>{one.kind}</td>
              <td>
                <Shown in="strong" text={one.name} max={120} line />
              </td>
              <td>
                <Shown text={one.reason} max={200} />
              </td>
              <td class="right">
                <Start kind={one.kind} name={one.name} small />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Panel>
  );
}

function Nobody() {
  const { server } = use(me)!;
  if (!server.endpoint) {
    return (
      <Empty icon="connections" title="No client is connected">
        This server talks over {server.transport}: the program that started it is its client, and shows here after its first message.
      </Empty>
    );
  }
  const entry = JSON.stringify({ mcpServers: { [server.name]: { type: "http", url: server.endpoint } } }, null, 2);
  return (
    <Empty icon="connections" title="No client is connected">
      <p>Put this into the configuration of your client, or call the server from a terminal:</p>
      <div class="left">
        <Code text={entry} label="Entry for mcpServers" />
        <Code text={`handrail call ${server.target}`} label="Command" />
      </div>
    </Empty>
  );
}
