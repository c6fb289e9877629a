"""Our client and what other people's servers offer beside tools: resources, templates, prompts, completion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from handrail import Client
from handrail.errors import RemoteProtocolError
from handrail.model import EmbeddedResource, Text
from patience import PATIENCE
from requirements import requirement
from tests.interop.test_client import R0, R1, R2, R3, R4, R5, Peers, Place, connected, record

pytestmark = pytest.mark.peers

PYTHON = {
    "mcp1": """
from mcp.server.fastmcp import Context, FastMCP
from mcp.server.fastmcp.prompts.base import AssistantMessage
from mcp.types import Completion
server = FastMCP("beside", log_level="ERROR")
ANNOUNCE = "await ctx.session.send_resource_updated(uri)"
""",
    "mcp2": """
from mcp.server import MCPServer
from mcp.server.mcpserver import AssistantMessage, Context
from mcp_types import Completion
server = MCPServer("beside", version="1", log_level="ERROR")
ANNOUNCE = "await ctx.notify_resource_updated(uri)"
""",
    "fastmcp": """
from fastmcp import Context, FastMCP
from fastmcp.prompts import Message
from mcp_types import Completion
server = FastMCP("beside", version="1", list_page_size=2)
AssistantMessage = lambda text: Message(text, role="assistant")
ANNOUNCE = "pass"
""",
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

server.run("stdio")
"""


@pytest.fixture(scope="module")
def peers(
    installed_peer: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, bytecode: str
) -> Iterator[Peers]:
    peers = Peers(installed_peer, tmp_path_factory.mktemp("peers"), bytecode)
    try:
        yield peers
    finally:
        peers.stop()


@asynccontextmanager
async def python(server: str, revision: str, peers: Peers, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    command = [str(peers.installed(server) / "bin" / "python"), "-c", PYTHON[server] + SERVER]
    options = {"FASTMCP_SHOW_SERVER_BANNER": "false", "FASTMCP_LOG_LEVEL": "ERROR"} if server == "fastmcp" else {}
    async with connected(command, revision=revision, env={**peers.env, **options}) as client:
        record(request, Place(server, "stdio", revision, revision))
        yield client


python_servers = pytest.mark.parametrize(
    ("server", "revision"),
    [
        ("mcp1", R1),
        ("mcp1", R2),
        ("mcp1", R4),
        *(("mcp2", each) for each in (R1, R3, R4, R5)),
        ("fastmcp", R4),
        ("fastmcp", R5),
    ],
)


@python_servers
@requirement("CLI-50", "CLI-51", "CLI-52", "CLI-53", "CLI-54")
async def test_servers_in_python_are_understood(
    server: str, revision: str, peers: Peers, request: pytest.FixtureRequest
) -> None:
    async with python(server, revision, peers, request) as client:
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
        completion = await client.complete("review", "style", "sh", context={"code": "x"})
        if "completions" in client.welcome["capabilities"] or revision == R1:
            assert completion.values == [f"style sh {'x' if revision >= R3 else '-'}"]
            assert (completion.total, completion.has_more) == (7, True)
        else:
            assert completion.values == []
        if client.welcome["capabilities"]["resources"].get("subscribe"):
            async with asyncio.timeout(PATIENCE), client.subscribe("doc://text") as updates:
                await client.call("touch", {"uri": "doc://text"})
                assert await anext(updates) == "doc://text"
        else:
            with pytest.raises(RemoteProtocolError, match="announces no updates"):
                async with client.subscribe("doc://text"):
                    pass


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
