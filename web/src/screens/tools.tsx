// Which tools a caller sees, as the wire lists them, why others are hidden, and everything about one of them.

import { useState } from "preact/hooks";
import type { Icon as Picture, Json, JsonObject, ToolInfo, ToolsView } from "../api";
import { at, getText, may, post } from "../api-client";
import { Difference } from "../diff";
import { About, CatalogScreen, Caution, Headline, type Query, Row, SAFE } from "../listing";
import { address, Long, Url } from "../result";
import { link } from "../route";
import { Start, Stop } from "../stop";
import { lines, short } from "../schema";
import {
  Button,
  bytes,
  Clock,
  Code,
  Copy,
  Cost,
  count,
  Dialog,
  Empty,
  Fold,
  Go,
  Head,
  Notice,
  Panel,
  Pill,
  plain,
  Shown,
  State,
  useAction,
} from "../ui";

const MANY_TOOLS = 40; // from about here on models choose worse

export function Tools() {
  return (
    <CatalogScreen<ToolInfo, ToolsView>
      catalog="tools"
      summary={(view, caller) => <Summary view={view} asked={caller} />}
      notices={(view, caller) => <Notices view={view} asked={caller} />}
      row={(tool, to, current, view) => (
        <Row
          key={tool.name}
          entry={tool}
          catalog="tools"
          title={tool.title || tool.name}
          to={to}
          current={current}
          marks={
            <>
              {tool.stopped && <State of="stopped" />}
              <Hint of={tool} />
              <Mark pin={tool.pin} />
            </>
          }
          facts={tool.upstream ? [`from ${tool.upstream}`] : []}
          cost={<Cost tokens={tool.tokens} most={Math.max(...view.tools.map((each) => each.tokens))} />}
          switchAt={at("tools", tool.name, "switch")}
          testid={`tool-${tool.name}`}
        />
      )}
      weigh={(tool) => tool.tokens}
      detail={(tool, view) => <Detail key={tool.name} tool={tool} revision={view.revision} />}
      unlisted={(name) =>
        name ? (
          <Empty icon="tools" title="There is no such tool">
            <Shown text={name} max={200} /> is not here now.
          </Empty>
        ) : (
          <Empty icon="tools" title="Choose a tool">
            Its description, schemas, rules, limits and what has changed in it are shown here.
          </Empty>
        )
      }
    />
  );
}

function Summary({ view, asked }: { view: ToolsView; asked: Query }) {
  const [wire, setWire] = useState<string | null>(null);
  const [show, busy] = useAction(async () => setWire(await getText(at("tools", "wire"), asked)));
  return (
    <>
      <span class="num">about {count(view.tokens)} tokens</span>
      <span class="num">{bytes(view.bytes)} on the wire</span>
      <Button kind="quiet" small icon="wire" busy={busy} onClick={show} testid="wire">
        As the wire lists it
      </Button>
      {wire !== null && (
        <Dialog title={`tools/list, as ${plain(view.as)} gets it in ${view.revision}`} wide onClose={() => setWire(null)} testid="wire-dialog">
          <Code text={wire} label="The answer to tools/list" testid="wire-text" />
        </Dialog>
      )}
    </>
  );
}

function Notices({ view, asked }: { view: ToolsView; asked: Query }) {
  const exposed = view.tools.filter((each) => each.exposed).length;
  const changed = view.tools.filter((each) => each.pin.state === "changed" || each.pin.state === "new");
  return (
    <>
      {exposed > MANY_TOOLS && (
        <Notice tone="warn" title={`${exposed} tools at once`} testid="many-tools">
          <p>
            Models choose worse among so many, and each conversation pays about {count(view.tokens)} tokens for them. Switch off what is not needed, or hide it
            from this caller by a rule.
          </p>
        </Notice>
      )}
      {changed.length > 0 && (
        <Notice
          tone="warn"
          title={changed.length === 1 ? "One tool is not as it was pinned" : `${changed.length} tools are not as they were pinned`}
          testid="changed-tools"
        >
          <p>
            {changed.map((each, index) => (
              <span key={each.name}>
                {index > 0 && ", "}
                <a href={link("tools", each.name, asked)}>
                  <Shown text={short(each.name, 80)} />
                </a>
              </span>
            ))}
            : look at what has changed before {changed.length === 1 ? "it is" : "they are"} called again.
          </p>
        </Notice>
      )}
    </>
  );
}

/** What the server declares of a tool; whoever calls decides whether to believe it. */
function Hint({ of }: { of: ToolInfo }) {
  if (of.annotations.readOnlyHint === true) return <Pill icon="lock">read-only</Pill>;
  if (of.annotations.destructiveHint !== true) return null;
  return (
    <Pill tone="bad" icon="warn">
      destructive
    </Pill>
  );
}

function Mark({ pin }: { pin: ToolInfo["pin"] }) {
  return pin.state === "none" ? null : <State of={pin.state} />;
}

function Detail({ tool, revision }: { tool: ToolInfo; revision: string }) {
  return (
    <div class="stack" data-testid="tool-detail">
      <Panel>
        <div class="stack">
          <Headline entry={tool} title={tool.title || tool.name} noun="name">
            <span class="row">
              <Go to={link("try", tool.name)} kind="primary" icon="try" testid="try-it">
                Try it
              </Go>
              {tool.stopped ? <Start kind="tool" name={tool.name} /> : <Stop tool={tool.name} upstream={tool.upstream} />}
            </span>
          </Headline>
          {tool.stopped && (
            <Notice tone="bad" title="Stopped by an operator" testid="tool-stopped">
              <p>Its calls are refused until somebody starts it again.</p>
            </Notice>
          )}
          <Caution of={tool} />
          {tool.description ? (
            <Long text={tool.description} label="Description" />
          ) : (
            <p class="muted">It has no description: a model has to guess what it does.</p>
          )}
          <Code text={tool.signature} label="Signature" />
          <About
            of={tool}
            catalog="tools"
            records={{ tool: tool.name }}
            before={[
              [
                "From",
                tool.upstream && (
                  <a href={link("upstreams", tool.upstream)}>
                    <Shown text={tool.upstream} max={80} />
                  </a>
                ),
              ],
              ["Costs", `about ${count(tool.tokens)} tokens in each conversation`],
            ]}
            after={[
              [
                "Tool version",
                <span class="with-copy">
                  <Shown in="code.fingerprint" text={tool.fingerprint} />
                  <Copy text={tool.fingerprint} label="Copy the tool version" />
                </span>,
              ],
              [
                "Pinned",
                {
                  none: "no",
                  pinned: tool.pin.since === 0 ? "by the gateway" : (
                    <>
                      since <Clock at={tool.pin.since} />
                    </>
                  ),
                  changed: tool.pin.since === 0 ? "by the gateway, and changed after that" : (
                    <>
                      since <Clock at={tool.pin.since} />, and changed after that
                    </>
                  ),
                  new: "no: it was not there when the others were pinned",
                }[tool.pin.state],
              ],
              [
                "Icons",
                tool.icons.length > 0 && (
                  <ul class="icons">
                    {tool.icons.map((each, index) => (
                      <li key={index}>
                        <Shot tool={tool} icon={each} index={index} />
                      </li>
                    ))}
                  </ul>
                ),
              ],
            ]}
          />
        </div>
      </Panel>
      <Changes tool={tool} />
      <Panel title="Input" extra={<span class="muted fine">{revision}</span>}>
        <Schema schema={tool.input_schema} label="Input schema" none="It takes no arguments." />
      </Panel>
      {tool.output_schema && (
        <Panel title="Output">
          <Schema schema={tool.output_schema} label="Output schema" none="Any object." />
        </Panel>
      )}
      <Panel title="Declared by the server">
        <Declared claims={tool.annotations} />
      </Panel>
    </div>
  );
}

const CLAIMS: { [name: string]: [yes: string, no: string] } = {
  readOnlyHint: ["It only reads.", "It changes things."],
  destructiveHint: ["It may destroy or overwrite.", "It only adds."],
  idempotentHint: ["Calling it again does nothing more.", "Each call does something."],
  openWorldHint: ["It deals with the world outside.", "It deals with a closed set of things."],
};

function Declared({ claims }: { claims: JsonObject }) {
  const names = Object.keys(claims);
  return (
    <div class="stack" data-testid="annotations">
      <p class="muted">
        {names.length
          ? "Claims of the tool's author, declared by the server. They are not facts; only rules that trust them act on them."
          : "The server declares nothing about what the tool does. By the protocol that means: it may change and destroy things, outside too."}
      </p>
      {names.length > 0 && (
        <dl class="claims">
          {names.map((name) => {
            const said = typeof claims[name] === "boolean" ? CLAIMS[name]?.[claims[name] ? 0 : 1] : undefined;
            return (
              <div key={name}>
                <dt>
                  <Shown in="code" text={name} max={80} />
                </dt>
                <dd>
                  <Shown in="code" text={JSON.stringify(claims[name])} max={300} />{" "}
                  {said && <span class="muted">{said}</span>}
                </dd>
              </div>
            );
          })}
        </dl>
      )}
    </div>
  );
}

function Changes({ tool }: { tool: ToolInfo }) {
  const [accept, busy] = useAction(() => post(at("tools", tool.name, "accept")));
  const { state, changes } = tool.pin;
  if (state !== "changed" && state !== "new") return null;
  return (
    <Panel
      class="changes"
      title={state === "new" ? "New since the tools were pinned" : `Changed since it was pinned (${changes.length})`}
      testid={`diff-${tool.name}`}
    >
      <div class="stack">
        {state === "new" && <p>Not reviewed yet. Read its description and schema, then accept it.</p>}
        {changes.map((each, index) => (
          <Difference change={each} key={index} />
        ))}
        {tool.upstream ? (
          <Go to={link("upstreams", tool.upstream)} icon="upstreams" testid="to-upstream">
            Look at it, and accept it, with the tools of {plain(tool.upstream)}
          </Go>
        ) : (
        <div class="row">
          <Button kind="primary" icon="check" busy={busy} disabled={!may("manage")} onClick={accept} testid={`accept-${tool.name}`}>
            Accept it as it is now
          </Button>
          <span class="muted">{may("manage") ? "It is pinned anew, and no longer marked." : "Needs the role manage."}</span>
        </div>
        )}
      </div>
    </Panel>
  );
}

function Shot({ tool, icon, index }: { tool: ToolInfo; icon: Picture; index: number }) {
  const [asked, ask] = useState(false);
  const [src, setSrc] = useState(icon.src);
  const [fetch, busy] = useAction(async () => {
    setSrc((await post<{ src: string }>(at("tools", tool.name, "icon"), { index })).src);
    ask(false);
  });
  if (SAFE.test(src)) return <img class="shot" src={src} alt={`Icon ${index + 1}`} width={32} height={32} />;
  if (icon.why_not || !icon.from)
    return (
      <span class="muted">
        <Shown text={icon.why_not || "Not shown: it is no picture this page knows"} />{" "}
        {icon.from && (
          <Shown in="code" text={icon.from} max={200} />
        )}
      </span>
    );
  const where = address(icon.from);
  return (
    <>
      <Button
        small
        icon="download"
        disabled={!may("manage")}
        title={may("manage") ? undefined : "Needs the role manage"}
        onClick={() => ask(true)}
        testid={`icon-${index}`}
      >
        Show the icon from {plain(where.host || icon.from).slice(0, 60)}
      </Button>
      {asked && (
        <Dialog
          title="Fetch this icon?"
          onClose={() => ask(false)}
          actions={
            <>
              <Button onClick={() => ask(false)}>No</Button>
              <Button kind="primary" busy={busy} onClick={fetch} testid="icon-yes">
                Fetch it
              </Button>
            </>
          }
        >
          <p>The server fetches it, without cookies or keys. The site learns that it was looked at:</p>
          <Url of={where} />
        </Dialog>
      )}
    </>
  );
}

function Schema({ schema, label, none }: { schema: JsonObject; label: string; none: string }) {
  const rows = lines(schema, schema);
  return (
    <>
      {rows.length ? (
        <div class="scroll" tabIndex={0} role="group" aria-label={label}>
          <table class="schema">
            <Head of={["Name", "Type", "About"]} />
            <tbody>
              {rows.map((row, index) => (
                <tr key={index}>
                  <td style={{ paddingLeft: `${12 + 16 * row.depth}px` }}>
                    <Shown in="code" text={row.name} max={120} />
                    {row.required && <span class="must">required</span>}
                  </td>
                  <td>
                    <Shown in="code" text={row.type} max={120} />
                  </td>
                  <td>
                    {row.description && (
                      <Shown in="p" text={row.description} max={600} />
                    )}
                    {(row.constraints.length > 0 || row.default !== undefined) && (
                      <p class="muted fine">
                        <Shown
                          text={[...row.constraints, ...(row.default === undefined ? [] : [`default ${JSON.stringify(row.default as Json)}`])].join(" · ")}
                          max={600}
                        />
                      </p>
                    )}
                    {row.stopped && <p class="muted fine">goes on like the one above of its kind</p>}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : (
        <p class="muted">{none}</p>
      )}
      <Fold title="As JSON">
        <Code text={JSON.stringify(schema, null, 2)} label={`${label} as JSON`} />
      </Fold>
    </>
  );
}
