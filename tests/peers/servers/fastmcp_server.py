"""A server of `fastmcp` for tests/interop/test_client.py: `fastmcp_server.py stdio`, or `http` for both kinds of HTTP.

Run by that peer's own interpreter. Over HTTP the first line it prints is its address.
"""

import asyncio
import contextlib
import os
import socket
import sys

import mcp_types as types
import uvicorn
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.utilities.types import Image
from pydantic import BaseModel
from starlette.applications import Starlette

PICTURE = b"\x89PNG\r\n\x1a\nnot much of a picture"
MODERN = "2026-07-28"

server = FastMCP("fastmcp", version="1", list_page_size=4)
running, stopped = set(), set()


class Sum(BaseModel):
    sum: float


class Person(BaseModel):
    name: str


@server.tool
async def echo(text: str) -> str:
    """Says it again."""
    return text


@server.tool
async def add(a: float, b: float) -> Sum:
    """Adds two numbers."""
    return Sum(sum=a + b)


@server.tool
async def picture() -> Image:
    """A picture."""
    return Image(data=PICTURE, format="png")


@server.tool
async def fails(text: str) -> str:
    """Fails, and says why."""
    raise ToolError(text)


@server.tool
async def counts(steps: int, ctx: Context) -> str:
    """Counts, and tells how far it is."""
    for step in range(1, steps + 1):
        await ctx.report_progress(step, steps, f"step {step}")
    return f"counted to {steps}"


@server.tool
async def waits(mark: str, ctx: Context) -> str:
    """Waits until it is stopped."""
    await ctx.report_progress(1, 2)
    running.add(mark)
    try:
        await asyncio.Event().wait()
    finally:
        running.discard(mark)
        stopped.add(mark)


@server.tool
async def state_of(mark: str) -> str:
    """What became of a call that waits."""
    return "stopped" if mark in stopped else "running" if mark in running else "unknown"


@server.tool
async def change(name: str, ctx: Context) -> str:
    """Adds a tool, or removes it if it is there."""
    if any(tool.name == name for tool in await server.list_tools()):
        server.local_provider.remove_tool(name)
    else:
        server.tool(echo, name=name)
    await ctx.send_notification(types.ToolListChangedNotification())
    return "changed"


@server.tool
async def asks(ctx: Context) -> str | types.InputRequiredResult:
    """Asks for a name, in the way of either era."""
    if ctx.request_context.protocol_version != MODERN:
        answer = await ctx.elicit("Who are you?", Person)
        return f"Hello {answer.data.name}" if answer.action == "accept" else answer.action
    if ctx.input_responses is None:
        form = types.ElicitRequestFormParams(message="Who are you?", requested_schema=Person.model_json_schema())
        return types.InputRequiredResult(input_requests={"who": types.ElicitRequest(params=form)})
    answer = ctx.input_responses["who"]
    return f"Hello {answer.content['name']}" if answer.action == "accept" else answer.action


@server.tool
async def samples(ctx: Context) -> str | types.InputRequiredResult:
    """Asks the client's model."""
    said = types.SamplingMessage(role="user", content=types.TextContent(type="text", text="Say hello"))
    if ctx.request_context.protocol_version != MODERN:
        answer = await ctx.session.create_message([said], max_tokens=10, related_request_id=ctx.request_id)
    elif ctx.input_responses is None:
        question = types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=[said], max_tokens=10))
        return types.InputRequiredResult(input_requests={"hello": question})
    else:
        answer = ctx.input_responses["hello"]
    return answer.content.text


@server.tool
async def looks(ctx: Context) -> str | types.InputRequiredResult:
    """Asks where it may look."""
    if ctx.request_context.protocol_version != MODERN:
        answer = await ctx.session.list_roots()
    elif ctx.input_responses is None:
        return types.InputRequiredResult(input_requests={"where": types.ListRootsRequest()})
    else:
        answer = ctx.input_responses["where"]
    return " ".join(str(root.uri) for root in answer.roots)


def application() -> Starlette:
    """Streamable HTTP at /mcp, and without sessions at /stateless; HTTP+SSE at /sse."""
    apps = [server.http_app(), server.http_app("/stateless", stateless_http=True), server.http_app(transport="sse")]

    @contextlib.asynccontextmanager
    async def life(app):
        async with contextlib.AsyncExitStack() as stack:
            for each in apps:
                await stack.enter_async_context(each.router.lifespan_context(app))
            yield

    return Starlette(routes=[route for each in apps for route in each.routes], lifespan=life)


if __name__ == "__main__":
    os.environ["FASTMCP_CHECK_FOR_UPDATES"] = "off"
    if sys.argv[1] == "stdio":
        server.run("stdio", show_banner=False, log_level="CRITICAL")
    else:
        # Named as TCP: only then does asyncio send small answers without delay.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        config = uvicorn.Config(application(), log_level="error", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listening])
