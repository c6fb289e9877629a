// The TypeScript client against a server over HTTP: plays the plan in argv[3], prints what came as one JSON object.
//
// Run as `node typescript_client.mjs <folder of the peer> <plan>`; for plans see mcp1_client.py. `mode` is `legacy` (shake
// hands), `auto` (find out), a revision without a handshake, or one with a handshake to ask for.

import { createRequire } from "node:module";
import { setTimeout as pass } from "node:timers/promises";

const [, , folder, text] = process.argv;
const { Client, ProtocolError, SSEClientTransport, StreamableHTTPClientTransport } = createRequire(`${folder}/`)(
  "@modelcontextprotocol/client",
);

function negotiation(mode) {
  if (mode === "legacy" || mode === "auto") return { versionNegotiation: { mode } };
  if (mode < "2026") return { supportedProtocolVersions: [mode] };
  return { versionNegotiation: { mode: { pin: mode } } };
}

async function play(plan) {
  const steps = [];
  const unexpected = [];
  let step = {};
  let changed;
  const change = new Promise((resolve) => (changed = resolve));
  const client = new Client(
    { name: "typescript", version: "1" },
    {
      ...negotiation(plan.mode),
      capabilities: { elicitation: { form: {} } },
      listChanged: { tools: { autoRefresh: false, debounceMs: 0, onChanged: (error) => changed(error) } },
    },
  );
  const onprogress = ({ progress, total, message }) => {
    // It also reports itself when it answers questions by calling again.
    if (!message?.startsWith("Fulfilling input")) step.progress.push([progress, total ?? null, message ?? null]);
  };
  client.onerror = (error) => {
    // Progress that came in one piece with the answer is taken for a stranger's: typescript-sdk issue 2580.
    const late = /progress notification for an unknown token: (.*)/.exec(error.message);
    if (late) onprogress(JSON.parse(late[1]).params);
    else unexpected.push(String(error));
  };
  client.setRequestHandler("elicitation/create", (request) => {
    step.asked.push(request.params);
    return step.answer;
  });
  const url = new URL(plan.url);
  const transport = new (plan.transport === "sse" ? SSEClientTransport : StreamableHTTPClientTransport)(url);
  await client.connect(transport);
  const { tools } = await client.listTools();
  for (const each of plan.steps) {
    step = { asked: [], progress: [], answer: each.answer };
    steps.push(step);
    try {
      step.result = await client.callTool({ name: each.call, arguments: each.arguments }, { onprogress });
    } catch (problem) {
      if (!(problem instanceof ProtocolError)) throw problem;
      step.error = { code: problem.code, message: problem.message };
    }
  }
  let relisted = null;
  if (plan.change) {
    await client.callTool({ name: plan.change.call, arguments: plan.change.arguments });
    const late = pass(10_000, new Error("no notice within 10 s"), { ref: false });
    const problem = await Promise.race([change, late]);
    if (problem) throw problem;
    relisted = (await client.listTools()).tools.map((tool) => tool.name);
  }
  const seen = { revision: client.getNegotiatedProtocolVersion(), server: client.getServerVersion() ?? null };
  if (transport.terminateSession) await transport.terminateSession();
  client.onerror = undefined; // what is cut short from here on is cut short by us
  await client.close();
  return { ...seen, tools, relisted, steps, unexpected };
}

console.log(JSON.stringify(await play(JSON.parse(text))));
