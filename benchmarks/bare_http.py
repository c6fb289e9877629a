"""The floor over HTTP: the ASGI function anyone would write with msgspec, on uvicorn, without checks of any kind.

`bare_http.py COUNT PORT`. As a list of tools it sends ready-made bytes: of its own two, or those it was given in a
request `benchmark/listing` of the same revision.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvicorn

from benchmarks.bare import VERSION, Tool, add, complete, echo, listing, other

TOOLS: dict[str, Tool] = {"echo": echo, "add": add}
STATELESS = {name: complete(tool) for name, tool in TOOLS.items()}
SESSION = b"0" * 107  # as long as handrail's, so that both are sent the same number of bytes

listings = dict.fromkeys([False, True], msgspec.json.encode(listing(TOOLS)))

Event = dict[str, Any]


async def app(scope: Event, receive: Callable[[], Awaitable[Event]], send: Callable[[Event], Awaitable[None]]) -> None:
    event = await receive()
    body: bytes = event["body"]
    while event["more_body"]:
        event = await receive()
        body += event["body"]
    message = msgspec.json.decode(body or b'{"method":null}')
    method, params = message["method"], message.get("params", {})
    status = 200
    headers = [(b"content-type", b"application/json")]
    if method == "tools/call":
        tools = STATELESS if VERSION in params.get("_meta", ()) else TOOLS
        result = tools[params["name"]](**params["arguments"])
        answer = msgspec.json.encode({"jsonrpc": "2.0", "id": message["id"], "result": result})
    elif method == "tools/list":
        answer = b'{"jsonrpc":"2.0","id":%d,"result":%b}' % (message["id"], listings["_meta" in params])
    elif method == "benchmark/listing":
        listings["_meta" in params] = msgspec.json.encode(params["result"])
        answer = b"{}"
    elif "id" in message:
        if method == "initialize":
            headers.append((b"mcp-session-id", SESSION))
        answer = msgspec.json.encode({"jsonrpc": "2.0", "id": message["id"], "result": other(method, params)})
    else:
        status, answer = 202 if method else 405, b""  # without a body: there is no stream, and no end of a session
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
        timeout_keep_alive=60,  # 5 s by default, as for httpx: between rounds a client could lose the race
    )
