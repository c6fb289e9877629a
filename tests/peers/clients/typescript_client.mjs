// The TypeScript client against a server: plays the plan in argv[3], prints what came as one JSON object.
//
// Run as `node typescript_client.mjs <folder of the peer> <plan>`; for plans see mcp1_client.py. `mode` is `legacy` (shake
// hands), `auto` (find out), a revision without a handshake, or one with a handshake to ask for.

import { createRequire } from "node:module";
import { setTimeout as pass } from "node:timers/promises";

const [, , folder, text] = process.argv;
const require = createRequire(`${folder}/`);
const { Client, ProtocolError, SSEClientTransport, StreamableHTTPClientTransport } = require(
  "@modelcontextprotocol/client",
);
const { StdioClientTransport } = require("@modelcontextprotocol/client/stdio");

function negotiation(mode) {
  if (mode === "legacy" || mode === "auto") return { versionNegotiation: { mode } };
  if (mode < "2026") return { supportedProtocolVersions: [mode] };
  return { versionNegotiation: { mode: { pin: mode } } };
}

function connection(plan) {
  if (!plan.url) return new StdioClientTransport({ command: plan.command, args: plan.args });
  return new (plan.transport === "sse" ? SSEClientTransport : StreamableHTTPClientTransport)(new URL(plan.url));
}

/** What is heard unasked: the URIs of updates, and the names of lists that have changed. */
class News {
  #words = [];
  #wake;

  tell(word) {
    this.#words.push(word);
    this.#wake?.();
  }

  /** What is heard until a word comes. */
  async until(word) {
    const late = pass(60_000, undefined, { ref: false });
    const expired = late.then(() => Promise.reject(new Error(`${word} was not heard of`)));
    while (!this.#words.includes(word)) await Promise.race([new Promise((wake) => (this.#wake = wake)), expired]);
    return this.#words.splice(0, this.#words.indexOf(word) + 1);
  }
}

const lists = {
  resources: async (client) => (await client.listResources()).resources,
  templates: async (client) => (await client.listResourceTemplates()).resourceTemplates,
  prompts: async (client) => (await client.listPrompts()).prompts,
};

/** Do a step that calls no tool; its result. */
async function otherStep(client, step, news) {
  if (step.list) return lists[step.list](client);
  if (step.read) return client.readResource({ uri: step.read });
  if (step.get) return client.getPrompt({ name: step.get, arguments: step.arguments });
  if (step.complete) {
    const context = step.context && { context: { arguments: step.context } };
    return (await client.complete({ ref: step.complete, argument: step.argument, ...context })).completion;
  }
  const uri = step.subscribe;
  const modern = client.getNegotiatedProtocolVersion() >= "2026";
  const stream = uri && modern ? await client.listen({ resourceSubscriptions: [uri] }) : undefined;
  if (uri && !modern) await client.subscribeResource({ uri });
  for (const [name, args] of step.calls) await client.callTool({ name, arguments: args });
  const heard = await news.until(uri ?? step.change);
  await stream?.close();
  if (uri && !modern) await client.unsubscribeResource({ uri });
  return uri ? heard : lists[step.change](client);
}

async function play(plan) {
  const steps = [];
  const unexpected = [];
  let step = {};
  let changed;
  const change = new Promise((resolve) => (changed = resolve));
  const news = new News();
  const listed = (kind) => ({
    autoRefresh: false,
    debounceMs: 0,
    onChanged: (error) => (error ? unexpected.push(String(error)) : news.tell(kind)),
  });
  const client = new Client(
    { name: "typescript", version: "1" },
    {
      ...negotiation(plan.mode),
      capabilities: { elicitation: { form: {} } },
      listChanged: {
        tools: { autoRefresh: false, debounceMs: 0, onChanged: (error) => changed(error) },
        resources: listed("resources"),
        prompts: listed("prompts"),
      },
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
  client.setNotificationHandler("notifications/resources/updated", ({ params }) => news.tell(params.uri));
  const transport = connection(plan);
  await client.connect(transport);
  const { tools } = await client.listTools();
  for (const each of plan.steps) {
    step = { asked: [], progress: [], answer: each.answer };
    steps.push(step);
    try {
      step.result = each.call
        ? await client.callTool({ name: each.call, arguments: each.arguments }, { onprogress })
        : await otherStep(client, each, news);
    } catch (problem) {
      if (!(problem instanceof ProtocolError)) throw problem;
      step.error = { code: problem.code, message: problem.message, data: problem.data };
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

const plans = JSON.parse(text);
const played = [];
for (const plan of [plans].flat()) played.push(await play(plan));
console.log(JSON.stringify(Array.isArray(plans) ? played : played[0]));
