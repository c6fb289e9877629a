// A server of the TypeScript SDK that speaks 2026-07-28 and nothing before: `node modern_server.mjs <folder of the peer>`.
//
// For tests/interop/test_gateway_upstreams.py. Over HTTP; the first line it prints is its address.

import { createServer } from "node:http";
import { createRequire } from "node:module";

const [, , folder] = process.argv;
const require = createRequire(`${folder}/`);
const { McpServer, acceptedContent, createMcpHandler, inputRequired } = require("@modelcontextprotocol/server");
const { toNodeHandler } = require("@modelcontextprotocol/node");
const z = require("zod");

const text = (words) => ({ content: [{ type: "text", text: words }] });
const annotations = { readOnlyHint: true };
const person = z.object({ name: z.string() });

function build() {
  const server = new McpServer({ name: "modern", version: "1" });
  const sum = { inputSchema: z.object({ a: z.number(), b: z.number() }), outputSchema: z.object({ sum: z.number() }) };
  server.registerTool("add", { ...sum, annotations }, ({ a, b }) => {
    const structuredContent = { sum: a + b };
    return { ...text(JSON.stringify(structuredContent)), structuredContent };
  });
  // What is asked for is repeated in a header, which has to be the same.
  const region = z.string().meta({ "x-mcp-header": "Region" });
  server.registerTool("place", { inputSchema: z.object({ region }), annotations }, ({ region }, { http }) =>
    text(`${region} ${http.req.headers.get("mcp-param-region")}`),
  );
  server.registerTool("ask", { inputSchema: z.object({}), annotations }, (_, { mcpReq }) => {
    const answer = acceptedContent(mcpReq.inputResponses, "who", person);
    if (answer) return text(`Hello ${answer.name}`);
    const who = inputRequired.elicit({ message: "Who are you?", requestedSchema: person });
    return mcpReq.inputResponses ? text("Hello nobody") : inputRequired({ inputRequests: { who } });
  });
  return server;
}

const listener = createServer(toNodeHandler(createMcpHandler(build, { legacy: "reject" })));
listener.listen(0, "127.0.0.1", () => console.log(`http://127.0.0.1:${listener.address().port}/mcp`));
