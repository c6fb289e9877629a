"""The floor: the loop anyone would write with msgspec, without validation, errors or limits.

`bare.py COUNT [stateless]`; the second adds to results what clients of 2026-07-28 insist on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

SUM = {"type": "object", "properties": {"sum": {"type": "number"}}, "required": ["sum"]}
VERSION = "io.modelcontextprotocol/protocolVersion"
KEPT = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}  # stateless clients insist; others ignore it

Tool = Callable[..., dict[str, Any]]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    tools: dict[str, Tool] = {"echo": echo, "add": add, "length": length, "letters": letters}
    tools |= {f"filler_{number}": echo for number in range(len(tools), count)}
    listed = listing(tools)
    if "stateless" in sys.argv:
        tools = {name: complete(tool) for name, tool in tools.items()}
    write, flush = sys.stdout.buffer.write, sys.stdout.buffer.flush
    for line in sys.stdin.buffer:
        message = msgspec.json.decode(line)
        method = message["method"]
        if method == "tools/call":
            params = message["params"]
            result = tools[params["name"]](**params["arguments"])
        elif method == "tools/list":
            result = listed
        elif "id" in message:
            result = other(method, message.get("params", {}))
        else:
            continue
        write(msgspec.json.encode({"jsonrpc": "2.0", "id": message["id"], "result": result}) + b"\n")
        flush()


def listing(names: Iterable[str]) -> dict[str, Any]:
    listed: list[dict[str, Any]] = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
    for tool in listed:
        if tool["name"] == "add":
            tool["outputSchema"] = SUM
    return {"tools": listed, **KEPT}


def complete(tool: Tool) -> Tool:
    return lambda **arguments: {**tool(**arguments), "resultType": "complete"}


def other(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """What clients ask beside tools, in either kind of revision."""
    server = {"capabilities": {"tools": {}}, "serverInfo": {"name": "bare", "version": "1"}}
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], **server}
    if method == "server/discover":
        return {"supportedVersions": [params["_meta"][VERSION]], **server, **KEPT}
    return {}  # a ping


def echo(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}]}


def add(a: float, b: float) -> dict[str, Any]:
    structured = {"sum": a + b}
    text = msgspec.json.encode(structured).decode()
    return {"content": [{"type": "text", "text": text}], "structuredContent": structured}


def length(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(len(text))}]}


def letters(count: int) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": "x" * count}]}


if __name__ == "__main__":
    main()
