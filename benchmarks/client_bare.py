"""The floor for clients: what anyone would write with msgspec, on asyncio's pipes and on aiohttp, without checks."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import aiohttp
import msgspec

from benchmarks.client_loop import Call, Target, take_orders
from benchmarks.scenarios import CLIENT, ENVELOPE, REVISIONS

Object = dict[str, Any]
Send = Callable[[str, Object], Awaitable[Object]]

encode, decode = msgspec.json.encode, msgspec.json.decode


@asynccontextmanager
async def connect(target: Target, revision: str) -> AsyncIterator[Call]:
    stateless = revision == REVISIONS["stateless"]
    meta = {"_meta": ENVELOPE} if stateless else {}
    hello = {"protocolVersion": revision, "capabilities": {}, "clientInfo": CLIENT}
    async with over_http(target, stateless) if isinstance(target, str) else over_pipes(target) as request:
        if not stateless:
            await request("initialize", hello)

        async def call(tool: str, arguments: Object) -> tuple[str, Any]:
            result = await request("tools/call", {"name": tool, "arguments": arguments, **meta})
            return result["content"][0]["text"], result.get("structuredContent")

        yield call


@asynccontextmanager
async def over_pipes(command: list[str]) -> AsyncIterator[Send]:
    server = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert server.stdin and server.stdout
    write, lines = server.stdin.write, server.stdout
    new_future = asyncio.get_running_loop().create_future
    waiting: dict[int, asyncio.Future[Object]] = {}
    ids = count(1)

    async def listen() -> None:
        async for line in lines:
            message = decode(line)
            waiting.pop(message["id"]).set_result(message["result"])

    async def request(method: str, params: Object) -> Object:
        id = next(ids)
        future = waiting[id] = new_future()
        write(encode({"jsonrpc": "2.0", "id": id, "method": method, "params": params}) + b"\n")
        result: Object = await future
        return result

    listener = asyncio.create_task(listen())
    yield request
    server.stdin.close()
    await listener
    await server.wait()


@asynccontextmanager
async def over_http(url: str, stateless: bool) -> AsyncIterator[Send]:
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    ids = count(1)
    async with aiohttp.ClientSession() as session:

        async def request(method: str, params: Object) -> Object:
            body = encode({"jsonrpc": "2.0", "id": next(ids), "method": method, "params": params})
            own = {**headers, "Mcp-Method": method, "Mcp-Name": params["name"]} if stateless else headers
            async with session.post(url, data=body, headers=own) as response:
                if method == "initialize":
                    headers["Mcp-Session-Id"] = response.headers["Mcp-Session-Id"]
                result: Object = decode(await response.read())["result"]
                return result

        headers["MCP-Protocol-Version"] = REVISIONS["stateless" if stateless else "session"]
        yield request


if __name__ == "__main__":
    take_orders(connect)
