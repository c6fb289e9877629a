// `@modelcontextprotocol/server` on Node: `server_typescript.mjs COUNT PORT` serves the tools of tools.py over HTTP.
//
// As its documentation has it: a server and a transport for each session, and `createMcpHandler`, which asks for a server for
// each request, where there are none. Which of the two a request is for is told by its header; `isLegacyRequest` reads
// the body a second time. Answers are plain JSON, which is cheaper than a stream for each.

import { randomUUID } from "node:crypto";
import { createServer } from "node:http";
import { createRequire } from "node:module";

// Its packages are those beside the Node that runs this.
const load = createRequire(process.execPath);
const { McpServer, createMcpHandler } = load("@modelcontextprotocol/server");
const { NodeStreamableHTTPServerTransport, localhostHostValidation, localhostOriginValidation, toNodeHandler } = load(
  "@modelcontextprotocol/node",
);
const z = load("zod");

const [count, port] = process.argv.slice(2).map(Number);

const text = (value) => ({ content: [{ type: "text", text: value }] });
const tools = [
  ["echo", { description: "Give the text back.", inputSchema: z.object({ text: z.string() }) }, async (given) => text(given.text)],
  [
    "add",
    {
      description: "Add two numbers.",
      inputSchema: z.object({ a: z.number(), b: z.number() }),
      outputSchema: z.object({ sum: z.number() }),
    },
    async ({ a, b }) => {
      const structuredContent = { sum: a + b };
      return { ...text(JSON.stringify(structuredContent)), structuredContent };
    },
  ],
];
for (let number = tools.length; number < count; number++) {
  const inputSchema = z.object({ query: z.string(), limit: z.int().default(10), exact: z.boolean().default(false) });
  const description = `Search collection ${number} for what matches the query.`;
  tools.push([`filler_${number}`, { description, inputSchema }, async ({ query }) => text(query)]);
}

function build() {
  const server = new McpServer({ name: "bench", version: "1" });
  for (const tool of tools) server.registerTool(...tool);
  return server;
}

const sessions = new Map();

async function withSession(request, response) {
  let transport = sessions.get(request.headers["mcp-session-id"]);
  if (!transport) {
    transport = new NodeStreamableHTTPServerTransport({
      sessionIdGenerator: randomUUID,
      enableJsonResponse: true,
      onsessioninitialized: (id) => void sessions.set(id, transport),
    });
    await build().connect(transport);
  }
  await transport.handleRequest(request, response);
}

const stateless = toNodeHandler(createMcpHandler(build, { legacy: "reject", responseMode: "json" }));
const isOurHost = localhostHostValidation();
const isOurOrigin = localhostOriginValidation();

createServer((request, response) => {
  if (!isOurHost(request, response) || !isOurOrigin(request, response)) return;
  const handle = request.headers["mcp-protocol-version"] === "2026-07-28" ? stateless : withSession;
  handle(request, response);
}).listen(port, "127.0.0.1");
