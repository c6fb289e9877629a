"""The floor over HTTP: the ASGI function anyone would write with msgspec, on uvicorn, without checks of any kind.

`bare_http.py COUNT PORT`. It lists no tools of its own but sends ready-made bytes, those it was given in a request
`benchmark/listing` of the same revision.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvicorn

from benchmarks.bare import add, echo

TOOLS: dict[str, Callable[..., dict[str, Any]]] = {"echo": echo, "add": add}
SESSION = b"0" * 107  # as long as handrail's, so that both are sent the same number of bytes

listings: dict[bool, bytes] = {}

Event = dict[str, Any]


async def app(scope: Event, receive: Callable[[], Awaitable[Event]], send: Callable[[Event], Awaitable[None]]) -> None:
    event = await receive()
    body: bytes = event["body"]
    while event["more_body"]:
        event = await receive()
        body += event["body"]
    message = msgspec.json.decode(body)
    method, params = message["method"], message["params"]
    status = 200
    headers = [(b"content-type", b"application/json")]
    if method == "tools/call":
        result = TOOLS[params["name"]](**params["arguments"])
        answer = msgspec.json.encode({"jsonrpc": "2.0", "id": message["id"], "result": result})
    elif method == "tools/list":
        answer = b'{"jsonrpc":"2.0","id":%d,"result":%b}' % (message["id"], listings["_meta" in params])
    elif method == "benchmark/listing":
        listings["_meta" in params] = msgspec.json.encode(params["result"])
        answer = b"{}"
    elif method == "initialize":
        headers.append((b"mcp-session-id", SESSION))
        result = {"protocolVersion": params["protocolVersion"]}
        answer = msgspec.json.encode({"jsonrpc": "2.0", "id": message["id"], "result": result})
    else:
        status, answer = 202, b""
    headers.append((b"content-length", b"%d" % len(answer)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[2]),
        http="httptools",
        loop="asyncio",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )
