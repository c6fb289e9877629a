"""A server of `mcp` 2.x for tests/interop/test_client.py: `mcp2_server.py stdio`, or `http` for both kinds of HTTP.

Run by that peer's own interpreter. Over HTTP the first line it prints is its address.
"""

import asyncio
import contextlib
import socket
import sys
from typing import Annotated

import mcp_types as types
import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Elicit, ElicitationResult, Image, ListRoots, Resolve, Sample
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel
from starlette.applications import Starlette

PAGE = 4
PICTURE = b"\x89PNG\r\n\x1a\nnot much of a picture"

server = MCPServer("mcp2", version="1", log_level="ERROR")
running, stopped = set(), set()


class Sum(BaseModel):
    sum: float


class Person(BaseModel):
    name: str


async def pages(ctx, params: types.PaginatedRequestParams) -> types.ListToolsResult:
    start = int(params.cursor or 0)
    tools = await server.list_tools()
    more = str(start + PAGE) if start + PAGE < len(tools) else None
    return types.ListToolsResult(tools=tools[start : start + PAGE], next_cursor=more)


server._lowlevel_server.add_request_handler("tools/list", types.PaginatedRequestParams, pages)


@server.tool()
async def echo(text: str) -> str:
    """Says it again."""
    return text


@server.tool()
async def add(a: float, b: float) -> Sum:
    """Adds two numbers."""
    return Sum(sum=a + b)


@server.tool()
async def picture() -> Image:
    """A picture."""
    return Image(data=PICTURE, format="png")


@server.tool()
async def fails(text: str) -> str:
    """Fails, and says why."""
    raise ToolError(text)


@server.tool()
async def counts(steps: int, ctx: Context) -> str:
    """Counts, and tells how far it is."""
    for step in range(1, steps + 1):
        await ctx.report_progress(step, steps, f"step {step}")
    return f"counted to {steps}"


@server.tool()
async def waits(mark: str, ctx: Context) -> str:
    """Waits until it is stopped."""
    await ctx.report_progress(1, 2)
    running.add(mark)
    try:
        await asyncio.Event().wait()
    finally:
        running.discard(mark)
        stopped.add(mark)


@server.tool()
async def state_of(mark: str) -> str:
    """What became of a call that waits."""
    return "stopped" if mark in stopped else "running" if mark in running else "unknown"


@server.tool()
async def change(name: str, ctx: Context) -> str:
    """Adds a tool, or removes it if it is there."""
    if any(tool.name == name for tool in await server.list_tools()):
        server.remove_tool(name)
    else:
        server.add_tool(echo, name=name)
    await ctx.notify_tools_changed()  # to those of 2026-07-28
    await ctx.session.send_tool_list_changed()  # to those before
    return "changed"


async def who() -> Elicit[Person]:
    return Elicit("Who are you?", Person)


async def hello() -> Sample:
    said = types.SamplingMessage(role="user", content=types.TextContent(type="text", text="Say hello"))
    return Sample([said], max_tokens=10)


async def where() -> ListRoots:
    return ListRoots()


@server.tool()
async def asks(person: Annotated[ElicitationResult[Person], Resolve(who)]) -> str:
    """Asks for a name."""
    return f"Hello {person.data.name}" if person.action == "accept" else person.action


@server.tool()
async def samples(answer: Annotated[types.CreateMessageResult, Resolve(hello)]) -> str:
    """Asks the client's model."""
    return answer.content.text


@server.tool()
async def looks(found: Annotated[types.ListRootsResult, Resolve(where)]) -> str:
    """Asks where it may look."""
    return " ".join(str(root.uri) for root in found.roots)


def application() -> Starlette:
    """Streamable HTTP at /mcp, HTTP+SSE at /sse."""
    streamable, old = server.streamable_http_app(), server.sse_app()

    @contextlib.asynccontextmanager
    async def life(app):
        async with server.session_manager.run():
            yield

    return Starlette(routes=[*streamable.routes, *old.routes], lifespan=life)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        # Named as TCP: only then does asyncio send small answers without delay.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        config = uvicorn.Config(application(), log_level="error", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listening])
