"""Servers to put a gateway in front of: `gateway_upstream.py TOOLS [PORT]`, on stdio, or over HTTP.

Over HTTP every path is a server of its own. One whose path begins with `/slow/` answers nothing in the first `SLOW_S`
seconds after it was first asked. All of them speak the revisions that shake hands. On stdio a request
`benchmark/listing` sets the results of `tools/list`, by cursor.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvicorn

from benchmarks.bare import echo, other

__all__ = ["SLOW_S"]

SLOW_S = 5.0
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
QUERY = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "limit": {"type": "integer", "default": 10},
        "exact": {"type": "boolean", "default": False},
    },
    "required": ["query"],
}

Event = dict[str, Any]
listings: dict[str, bytes] = {}  # by cursor
first_asked: dict[str, float] = {}  # the time by path


def tools(count: int) -> list[dict[str, Any]]:
    echoing = {"name": "echo", "description": "Give the text back.", "inputSchema": TEXT}
    searching = "Search collection {} for what matches the query."
    fillers = [
        {"name": f"filler_{number}", "description": searching.format(number), "inputSchema": QUERY}
        for number in range(1, count)
    ]
    return [echoing, *fillers]


def answer(line: bytes) -> bytes:
    """Return the answer to a message, empty if it gets none."""
    message = msgspec.json.decode(line)
    if "id" not in message:
        return b""
    id, method, params = message["id"], message["method"], message.get("params", {})
    if method == "tools/list":
        return b'{"jsonrpc":"2.0","id":%d,"result":%b}' % (id, listings[params.get("cursor", "")])
    if method == "benchmark/listing":
        listings.update((cursor, msgspec.json.encode(page)) for cursor, page in params.items())
    if method == "server/discover":
        error = {"code": -32601, "message": "Method not found"}
        return msgspec.json.encode({"jsonrpc": "2.0", "id": id, "error": error})
    result = echo(**params["arguments"]) if method == "tools/call" else other(method, params)
    return msgspec.json.encode({"jsonrpc": "2.0", "id": id, "result": result})


async def app(scope: Event, receive: Callable[[], Awaitable[Event]], send: Callable[[Event], Awaitable[None]]) -> None:
    event = await receive()
    body: bytes = event["body"]
    while event["more_body"]:
        event = await receive()
        body += event["body"]
    path: str = scope["path"]
    if path.startswith("/slow/"):
        await asyncio.sleep(first_asked.setdefault(path, time.monotonic()) + SLOW_S - time.monotonic())
    answered = answer(body) if body else b""
    status = 200 if answered else 202 if body else 405  # 405: there is no stream, and no end of a session
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answered))]
    headers.append((b"mcp-session-id", b"0"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": answered})


def main() -> None:
    count, *port = map(int, sys.argv[1:])
    listings[""] = msgspec.json.encode({"tools": tools(count)})
    if port:
        options: dict[str, Any] = {"http": "httptools", "loop": "asyncio", "lifespan": "off", "log_level": "warning"}
        # Kept long: a connection has nothing to do while other gateways are measured.
        uvicorn.run(app, port=port[0], access_log=False, timeout_keep_alive=600, **options)
    else:
        write, flush = sys.stdout.buffer.write, sys.stdout.buffer.flush
        for line in sys.stdin.buffer:
            if answered := answer(line):
                write(answered + b"\n")
                flush()


if __name__ == "__main__":
    main()
