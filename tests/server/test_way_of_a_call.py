"""How far a tool is from its endpoint: frames on the stack, and modules of the package that take part in a call."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import pytest

from handrail.server import Server
from patience import PATIENCE
from servers_http import served

MOST_FRAMES = 10
MOST_MODULES = {"own listener": 22, "asgi": 20, "stdio": 18}
REVISION = "2026-07-28"
ENDPOINTS = {
    "own listener": "handrail.transports.http.",
    "asgi": "handrail.transports.http.",
    "stdio": "handrail.transports.stdio",
}
"""Where the endpoint of each transport is: the outermost frame of these modules."""

Ask = Callable[[str], Awaitable[Any]]


def make() -> Server:
    server = Server("way", version="1")
    modules: set[str] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (name := frame.f_globals.get("__name__", "")).startswith("handrail."):
            modules.add(name)

    @server.tool
    async def stack() -> list[str]:
        frames: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frames.insert(0, f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        return frames

    @server.tool
    async def record() -> None:
        modules.clear()
        sys.setprofile(profile)

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def stop() -> list[str]:
        sys.setprofile(None)
        return sorted(modules)

    return server


def request(number: int, tool: str) -> bytes:
    own = {"protocolVersion": REVISION, "clientCapabilities": {}, "clientInfo": {"name": "rig", "version": "1"}}
    meta = {f"io.modelcontextprotocol/{name}": value for name, value in own.items()}
    params = {"name": tool, "arguments": {"text": "x"} if tool == "echo" else {}, "_meta": meta}
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}).encode()


@asynccontextmanager
async def over_http(listener: str) -> AsyncIterator[Ask]:
    async with served(make().asgi(), listener) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)

        def post(tool: str) -> Any:
            fields = {
                "content-type": "application/json",
                "accept": "application/json, text/event-stream",
                "mcp-protocol-version": REVISION,
                "mcp-method": "tools/call",
                "mcp-name": tool,
            }
            connection.request("POST", "/mcp", request(1, tool), fields)
            return json.loads(connection.getresponse().read())

        async def ask(tool: str) -> Any:
            return await asyncio.to_thread(post, tool)

        try:
            yield ask
        finally:
            connection.close()


@asynccontextmanager
async def over_stdio() -> AsyncIterator[Ask]:
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, stdin=pipe, stdout=pipe, env=environment)
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None

    async def ask(tool: str) -> Any:
        stdin.write(request(1, tool) + b"\n")
        return json.loads(await stdout.readline())

    try:
        yield ask
    finally:
        stdin.close()
        await process.wait()


def over(transport: str) -> Any:
    return over_stdio() if transport == "stdio" else over_http("uvicorn" if transport == "asgi" else "handrail")


async def result(ask: Ask, tool: str) -> Any:
    async with asyncio.timeout(PATIENCE):
        answer = await ask(tool)
    return answer["result"].get("structuredContent")


@pytest.mark.parametrize("transport", ENDPOINTS)
async def test_an_async_tool_is_few_frames_below_its_endpoint(transport: str) -> None:
    async with over(transport) as ask:
        frames = await result(ask, "stack")
    first = next(at for at, frame in enumerate(frames) if frame.startswith(ENDPOINTS[transport]))
    way = [frame for frame in frames[first:] if frame.startswith("handrail.")]
    print(f"\n{transport}: {len(way)} frames", *way, sep="\n  ")
    assert len(way) <= MOST_FRAMES


@pytest.mark.parametrize("transport", ENDPOINTS)
async def test_few_modules_take_part_in_a_warm_call(transport: str) -> None:
    async with over(transport) as ask:
        for tool in ("echo", "stop", "record", "echo"):
            await result(ask, tool)
        modules = await result(ask, "stop")
    print(f"\n{transport}: {len(modules)} modules", *modules, sep="\n  ")
    assert len(modules) <= MOST_MODULES[transport]


if __name__ == "__main__":
    make().run()
