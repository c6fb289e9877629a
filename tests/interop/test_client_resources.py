"""Our client and other people's servers: resources, templates, prompts and completion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from handrail import Client
from handrail.errors import RemoteProtocolError
from handrail.model import EmbeddedResource, Text
from patience import PATIENCE
from requirements import requirement
from tests.interop.test_client import R0, R1, R2, R3, R4, R5, Peers, Place, connected, places, record, until

pytestmark = pytest.mark.peers

SUBSCRIPTIONS = """
async def done(ctx, params):
    return mcp_types.EmptyResult()
inner.add_request_handler("resources/subscribe", mcp_types.SubscribeRequestParams, done)
inner.add_request_handler("resources/unsubscribe", mcp_types.UnsubscribeRequestParams, done)
"""
"""What `mcp` 2.x leaves to the author; 1.x always declares that it has no subscriptions."""

PYTHON = {
    "mcp1": """
from mcp.server.fastmcp import Context, FastMCP
from mcp.server.fastmcp.prompts.base import AssistantMessage
from mcp.types import Completion
server = FastMCP("resources", log_level="ERROR")
ANNOUNCE = "pass"
""",
    "mcp2": """
from mcp.server import MCPServer
from mcp.server.mcpserver import AssistantMessage, Context
import mcp_types
from mcp_types import Completion
server = MCPServer("resources", version="1", log_level="ERROR")
inner = server._lowlevel_server
ANNOUNCE = "await ctx.notify_resource_updated(uri); await ctx.session.send_resource_updated(uri)"
"""
    + SUBSCRIPTIONS,
    "fastmcp": """
from fastmcp import Context, FastMCP
from fastmcp.prompts import Message
import mcp_types
from mcp_types import Completion
server = FastMCP("resources", version="1", list_page_size=2)
inner = server._mcp_server
AssistantMessage = lambda text: Message(text, role="assistant")
ANNOUNCE = "await ctx.session.send_resource_updated(uri)"
"""
    + SUBSCRIPTIONS,
}
"""What differs between the three packages for Python."""

SERVER = """
@server.resource("doc://text", mime_type="text/plain", description="A text.")
def text() -> str:
    return "hello"

@server.resource("doc://binary", mime_type="application/octet-stream")
def binary() -> bytes:
    return bytes([0, 255])

@server.resource("doc://third")
def third() -> str:
    return "3"

@server.resource("note://{name}/{page}", mime_type="text/plain")
def note(name: str, page: str) -> str:
    return f"page {page} of {name}"

@server.prompt()
def review(code: str, style: str = "short") -> str:
    "Ask for a review."
    return f"Review in {style}: {code}"

@server.prompt()
def talk() -> list:
    return ["Hello?", AssistantMessage("Hi.")]

@server.completion()
async def complete(ref, argument, context):
    known = context.arguments if context and context.arguments else {}
    return Completion(values=[f"{argument.name} {argument.value} {known.get('code', '-')}"], total=7, hasMore=True)

exec(f'''
@server.tool()
async def touch(uri: str, ctx: Context) -> str:
    {ANNOUNCE}
    return "touched"
''')

import sys
if sys.argv[1] == "stdio":
    server.run("stdio")
else:
    import socket, uvicorn
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    app = server.http_app() if hasattr(server, "http_app") else server.streamable_http_app()
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])
"""


class ResourcePeers(Peers):
    """Servers with resources and prompts in place of those with tools."""

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, "FASTMCP_SHOW_SERVER_BANNER": "false", "FASTMCP_LOG_LEVEL": "ERROR"}

    def command(self, server: str, *arguments: str) -> list[str]:
        if server in PYTHON:
            code = PYTHON[server] + SERVER
            return [str(self.installed(server) / "bin" / "python"), "-c", code, *arguments]
        return super().command(server, *arguments)


@pytest.fixture(scope="module")
def peers(
    installed_peer: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, bytecode: str
) -> Iterator[Peers]:
    peers = ResourcePeers(installed_peer, tmp_path_factory.mktemp("peers"), bytecode)
    try:
        yield peers
    finally:
        peers.stop()


@asynccontextmanager
async def connection_to(place: Place, peers: Peers, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    is_process = place.transport == "stdio"
    target: Any = peers.command(place.server, "stdio") if is_process else peers.url(place.server, place.transport)
    async with connected(target, revision=place.revision, env=peers.env) as client:
        record(request, place)
        yield client


PLACES = [
    *places("mcp1", "stdio", [R1, R2, R3, R4], R4),
    *places("mcp1", "http", [R2, R3, R4], R4),
    *places("mcp2", "stdio", [R1, R3, R4, R5], R5),
    *places("mcp2", "http", [R3, R4, R5], R5),
    *places("fastmcp", "stdio", [R4, R5], R5),
    *places("fastmcp", "http", [R4, R5], R5),
    *places("typescript", "stdio", [R1, R3, R4, R5], R5),
    *places("typescript", "http", [R2, R3, R4, R5], R5),
]


@pytest.mark.parametrize("place", PLACES, ids=str)
@requirement("CLI-50", "CLI-51", "CLI-52", "CLI-53", "CLI-54")
async def test_servers_of_other_packages_are_understood(
    place: Place, peers: Peers, request: pytest.FixtureRequest
) -> None:
    server, revision = place.server, place.revision
    async with connection_to(place, peers, request) as client:
        resources, templates, prompts = await client.resources(), await client.templates(), await client.prompts()
        assert [each.uri for each in resources] == ["doc://text", "doc://binary", "doc://third"]
        assert (resources[0].mime_type, resources[0].description) == ("text/plain", "A text.")
        assert [each.uri_template for each in templates] == ["note://{name}/{page}"]
        assert [each.name for each in prompts] == ["review", "talk"]
        assert [(each["name"], each["required"]) for each in prompts["review"].arguments] == [
            ("code", True),
            ("style", False),
        ]
        text, binary = await client.read("doc://text"), await client.read("doc://binary")
        assert (text.text, text.contents[0].mime_type, text.problems) == ("hello", "text/plain", [])
        assert (binary.contents[0].data, binary.contents[0].text, binary.problems) == (b"\0\xff", None, [])
        assert (await client.read("note://a/1")).text == "page 1 of a"
        with pytest.raises(RemoteProtocolError) as caught:
            await client.read("doc://nowhere")
        assert caught.value.code in (0, -32602, -32002)  # 0 is what 1.x says to everything that fails
        review = await client.prompt("review", {"code": 1})
        assert review.text == "Review in short: 1" and review.messages[0].role == "user"
        talk = await client.prompt("talk")
        assert [(each.role, each.content) for each in talk.messages] == [
            ("user", Text("Hello?")),
            ("assistant", Text("Hi.")),
        ]
        with pytest.raises(RemoteProtocolError):
            await client.prompt("review")
        completions = [
            await client.complete(reference, name, "sh", context={"code": "x"})
            for reference, name in (("review", "style"), ("note://{name}/{page}", "page"))
        ]
        context = "x" if revision >= R3 else "-"
        assert [each.values for each in completions] == [[f"style sh {context}"], [f"page sh {context}"]]
        # A server in Python says what it likes, the TypeScript SDK counts.
        about = (1, False) if server == "typescript" else (7, True)
        assert [(each.total, each.has_more) for each in completions] == [about, about]
        updates_are_announced = server != "mcp1" and (server, revision) != ("fastmcp", R5)
        assert client.welcome["capabilities"]["resources"].get("subscribe", False) is updates_are_announced
        if updates_are_announced:
            async with asyncio.timeout(PATIENCE), client.subscribe("doc://text") as updates:
                await client.call("touch", {"uri": "doc://text"})
                assert await anext(updates) == "doc://text"
        else:
            with pytest.raises(RemoteProtocolError, match="announces no updates"):
                async with client.subscribe("doc://text"):
                    pass


CHANGING = [*places("typescript", "stdio", [R1, R4], R4), *places("typescript", "http", [R4], R4)]


@pytest.mark.parametrize("place", CHANGING, ids=str)
@requirement("CLI-50")
async def test_a_change_of_the_lists_of_another_server_is_heard(
    place: Place, peers: Peers, request: pytest.FixtureRequest
) -> None:
    async with connection_to(place, peers, request) as client:
        lists: list[Callable[[], Awaitable[Any]]] = [client.resources, client.prompts]
        before = [[entry.name for entry in await each()] for each in lists]
        for new in (["new"], []):
            for each in lists:
                assert await each() is await each(), "nothing has changed"
            await client.call("change")
            for each, names in zip(lists, before, strict=True):
                await until(each, partial(_has_names, names + new))


def _has_names(names: list[str], entries: Any) -> bool:
    return [each.name for each in entries] == names


EVERYTHING = [
    *(("stdio", each) for each in (R0, R1, R2, R3, R4)),
    *(("http", each) for each in (R2, R3, R4)),
    ("sse", R1),
]


@pytest.mark.parametrize(("transport", "revision"), EVERYTHING)
@requirement("CLI-50", "CLI-51", "CLI-52", "CLI-53", "CLI-54")
async def test_server_everything_is_understood(
    transport: str, revision: str, peers: Peers, request: pytest.FixtureRequest
) -> None:
    target: Any = peers.command("everything", "stdio") if transport == "stdio" else peers.url("everything", transport)
    options: dict[str, Any] = {"transport": "sse"} if transport == "sse" else {}
    async with connected(target, revision=revision, **options) as client:
        record(request, Place("everything", transport, revision, revision))
        resources, templates, prompts = await client.resources(), await client.templates(), await client.prompts()
        readme = next(each for each in resources if each.mime_type == "text/markdown")
        assert readme.uri.startswith("demo://resource/static/document/")
        assert (await client.read(readme.uri)).contents[0].mime_type == "text/markdown"
        text, blob = [each.uri_template for each in templates]
        one, two = await client.read(text.format(resourceId=1)), await client.read(blob.format(resourceId=2))
        assert one.text.startswith("Resource 1: This is a plaintext resource")
        assert two.contents[0].text is None and two.contents[0].data.startswith(b"Resource 2: This is a base64 blob")
        with pytest.raises(RemoteProtocolError) as caught:
            await client.read("demo://nowhere")
        assert caught.value.code == -32602
        assert {"simple-prompt", "args-prompt", "completable-prompt", "resource-prompt"} == {
            each.name for each in prompts
        }
        assert (await client.prompt("args-prompt", {"city": "Rome"})).text == "What's weather in Rome?"
        embedded = await client.prompt("resource-prompt", {"resourceType": "Text", "resourceId": 3})
        assert isinstance(embedded.messages[1].content, EmbeddedResource) and embedded.problems == []
        assert list(await client.complete("completable-prompt", "department", "S")) == ["Sales", "Support"]
        context = {"department": "Sales"}
        names = await client.complete("completable-prompt", "name", "D", context=context)
        assert names.values == (["David"] if revision >= R3 else [])
        assert (await client.complete(text, "resourceId", "17")).values == ["17"]
        async with asyncio.timeout(PATIENCE), client.subscribe(readme.uri) as updates:
            await client.call("toggle-subscriber-updates")
            assert await anext(updates) == readme.uri
            await client.call("toggle-subscriber-updates")
