// A server of the TypeScript SDK: `node typescript_server.mjs <folder of the peer> stdio`, or `http`.
//
// For tests/interop/test_client_resources.py. Over HTTP the first line it prints is its address.

import { randomUUID } from "node:crypto";
import { createServer } from "node:http";
import { createRequire } from "node:module";

const [, , folder, transport] = process.argv;
const require = createRequire(`${folder}/`);
const { McpServer, ResourceTemplate, completable, createMcpHandler } = require("@modelcontextprotocol/server");
const { serveStdio } = require("@modelcontextprotocol/server/stdio");
const { NodeStreamableHTTPServerTransport, toNodeHandler } = require("@modelcontextprotocol/node");
const z = require("zod");

const message = (role, text) => ({ role, content: { type: "text", text } });

/** A server; `announce` tells whoever listens, where there are no sessions, that a resource has changed. */
function build(announce) {
  const server = new McpServer(
    { name: "typescript", version: "1" },
    { capabilities: { resources: { subscribe: true, listChanged: true } } },
  );
  const subscribed = new Set();
  server.server.setRequestHandler("resources/subscribe", ({ params }) => (subscribed.add(params.uri), {}));
  server.server.setRequestHandler("resources/unsubscribe", ({ params }) => (subscribed.delete(params.uri), {}));
  const plain = { mimeType: "text/plain", description: "A text." };
  server.registerResource("text", "doc://text", plain, (uri) => ({
    contents: [{ uri: uri.href, mimeType: "text/plain", text: "hello" }],
  }));
  const bytes = { mimeType: "application/octet-stream" };
  server.registerResource("binary", "doc://binary", bytes, (uri) => ({
    contents: [{ uri: uri.href, ...bytes, blob: Buffer.from([0, 255]).toString("base64") }],
  }));
  server.registerResource("third", "doc://third", {}, (uri) => ({ contents: [{ uri: uri.href, text: "3" }] }));
  const completing = (name) => (value, context) => [`${name} ${value} ${context?.arguments?.code ?? "-"}`];
  server.registerResource(
    "note",
    new ResourceTemplate("note://{name}/{page}", { list: undefined, complete: { page: completing("page") } }),
    { mimeType: "text/plain" },
    (uri, { name, page }) => ({ contents: [{ uri: uri.href, text: `page ${page} of ${name}` }] }),
  );
  const style = completable(z.string(), completing("style")).optional();
  server.registerPrompt(
    "review",
    { description: "Ask for a review.", argsSchema: z.object({ code: z.string(), style }) },
    ({ code, style }) => ({ messages: [message("user", `Review in ${style ?? "short"}: ${code}`)] }),
  );
  server.registerPrompt("talk", {}, () => ({ messages: [message("user", "Hello?"), message("assistant", "Hi.")] }));
  server.registerTool("touch", { inputSchema: z.object({ uri: z.string() }) }, async ({ uri }) => {
    if (announce) announce(server, uri);
    else if (subscribed.has(uri)) await server.server.sendResourceUpdated({ uri });
    return { content: [{ type: "text", text: "touched" }] };
  });
  const added = [];
  server.registerTool("change", {}, () => {
    if (added.length) added.splice(0).forEach((each) => each.remove());
    else {
      const read = (uri) => ({ contents: [{ uri: uri.href, text: "new" }] });
      added.push(server.registerResource("new", "doc://new", {}, read));
      added.push(server.registerPrompt("new", {}, () => ({ messages: [message("user", "New?")] })));
    }
    return { content: [{ type: "text", text: "changed" }] };
  });
  return server;
}

const sessions = new Map();

async function inSession(request, response) {
  let session = sessions.get(request.headers["mcp-session-id"]);
  if (!session) {
    session = new NodeStreamableHTTPServerTransport({
      sessionIdGenerator: randomUUID,
      onsessioninitialized: (id) => void sessions.set(id, session),
    });
    await build().connect(session);
  }
  await session.handleRequest(request, response);
}

if (transport === "stdio") {
  const announce = (server, uri) => server.server.sendResourceUpdated({ uri });
  serveStdio(({ era }) => build(era === "modern" && announce));
} else {
  const announce = (_, uri) => handler.notify.resourceUpdated(uri);
  const handler = createMcpHandler(() => build(announce), { legacy: "reject" });
  const modern = toNodeHandler(handler);
  const listener = createServer((request, response) => {
    (request.headers["mcp-protocol-version"] >= "2026" ? modern : inSession)(request, response);
  });
  listener.listen(0, "127.0.0.1", () => console.log(`http://127.0.0.1:${listener.address().port}`));
}
