// A call, written down for elsewhere: a shell, Python, curl. What is pasted there does exactly what the form says.

import type { Json, JsonObject } from "./api";
import { FIRST } from "./hidden";
import { isObject, text } from "./schema";

const STATELESS = "2026-07-28"; // the first revision in which one request is enough
const HIDDEN = new RegExp(FIRST.source, "gu");

/** A word for a POSIX shell. */
export const quoted = (word: string): string => (/^[\w./:@%+,=-]+$/.test(word) ? word : `'${word.replace(/'/g, `'\\''`)}'`);

/** JSON in one line, in which everything that hides is written out. */
const json = (value: Json): string =>
  JSON.stringify(value).replace(HIDDEN, (it) => [...Array(it.length).keys()].map((i) => `\\u${hex(it.charCodeAt(i), 4)}`).join(""));

const hex = (code: number, digits: number): string => code.toString(16).padStart(digits, "0");

export function forShell(target: string, tool: string, given: JsonObject, revision = ""): string {
  const words = ["handrail", "call", ...(revision ? ["--revision", revision] : []), "--arguments", quoted(json(given))];
  const safe = !target.startsWith("-") && !tool.startsWith("-");
  return [...words, ...(safe ? [] : ["--"]), quoted(target), quoted(tool)].join(" ");
}

export function forPython(target: string, tool: string, given: JsonObject, asks: boolean, revision = ""): string {
  const options = `${revision ? `, revision=${literal(revision)}` : ""}${asks ? ", confirm=confirm" : ""}`;
  const agree = ["def confirm(call):", '    return input(f"{call.tool} {call.arguments}: really? ") == "yes"', "", ""];
  return [
    "from handrail import Client",
    "",
    ...(asks ? ["", ...agree] : []),
    `with Client(${literal(target)}${options}) as client:`,
    `    result = client.call(${literal(tool)}, ${literal(given)})`,
    "    print(result.data if result.data is not None else result.text)",
    "",
  ].join("\n");
}

function literal(value: Json): string {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (isObject(value))
    return `{${Object.entries(value)
      .map(([key, each]) => `${literal(key)}: ${literal(each)}`)
      .join(", ")}}`;
  const escaped = (it: string) => (it.length > 1 ? `\\U${hex(it.codePointAt(0)!, 8)}` : `\\u${hex(it.charCodeAt(0), 4)}`);
  return JSON.stringify(value).replace(HIDDEN, escaped);
}

/** Why there is no command for curl; "" if there is one. */
export function noCurl(endpoint: string, revisions: string[]): string {
  if (!endpoint) return "The server speaks over standard input and output: there is no address for curl.";
  if ((revisions[0] ?? "") < STATELESS) return `Needs a server that speaks ${STATELESS}; before that a call takes several requests.`;
  return "";
}

export function forCurl(endpoint: string, revision: string, tool: string, given: JsonObject, schema: JsonObject): string {
  const about = "io.modelcontextprotocol/";
  const meta = { [`${about}protocolVersion`]: revision, [`${about}clientInfo`]: { name: "curl", version: "1" }, [`${about}clientCapabilities`]: {} };
  const body = { jsonrpc: "2.0", id: 1, method: "tools/call", params: { name: tool, arguments: given, _meta: meta } };
  const headers = ["Content-Type: application/json", "Accept: application/json, text/event-stream", `MCP-Protocol-Version: ${revision}`];
  headers.push("Mcp-Method: tools/call", `Mcp-Name: ${mirror(tool)}`, ...mirrored(schema, given));
  return [`curl -sSN ${quoted(endpoint)}`, ...headers.map((each) => `-H ${quoted(each)}`), `--data-raw ${quoted(json(body))}`].join(" \\\n  ");
}

/** Arguments that a header repeats. */
function mirrored(schema: Json | undefined, value: Json | undefined): string[] {
  if (!isObject(schema)) return [];
  const name = text(schema["x-mcp-header"]);
  if (name && (typeof value === "string" || typeof value === "boolean" || Number.isInteger(value))) return [`Mcp-Param-${name}: ${mirror(String(value))}`];
  const properties = isObject(schema.properties) ? Object.entries(schema.properties) : [];
  return properties.flatMap(([key, each]) => mirrored(each, isObject(value) ? value[key] : undefined));
}

function mirror(value: string): string {
  if (/^(?:[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)?$/.test(value) && !value.toLowerCase().startsWith("=?base64?")) return value;
  return `=?base64?${btoa(String.fromCharCode(...new TextEncoder().encode(value)))}?=`;
}
