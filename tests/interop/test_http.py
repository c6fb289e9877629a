"""Other people's clients over real sockets, and the endpoint as a part of other people's applications.

The walks and most of what is asked of them are those of tests/interop/test_stdio.py. Here one process serves all
clients one after the other, so no step may leave anything behind that the next client would see.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse

import subject
import tests.interop.test_stdio as stdio
from handrail import Call, Server
from handrail.transports.http.endpoint import Endpoint
from paths import ROOT
from patience import PATIENCE
from requirements import requirement
from tests.interop.test_stdio import (
    NEWEST,
    SAYS,
    STEPS,
    TOOLS,
    Conversation,
    Ended,
    InstalledPeer,
    Json,
    Object,
    Ran,
    client_command,
    eras,
    run,
    run_inspector,
    since,
    tool_options,
)
from wires_http import HttpServer, HttpWire, http

STARTING = PATIENCE

pytestmark = pytest.mark.peers

# An order can be cancelled once, and there are many clients: here the person does not agree.
REFUSED = {"action": "decline"}
HERE = {**STEPS, "confirm": {**STEPS["confirm"], "answer": REFUSED}}


# The servers: one process each for all clients of this module.


@dataclass
class Running:
    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def started(script: list[str], folder: Path) -> Iterator[Running]:
    """A server that says its URL in its first line, and nothing else until it has been told to end and has ended."""
    said = folder / "said"
    with said.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-B", *script], stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT
        )
    try:
        deadline = time.monotonic() + STARTING
        while not (first := said.read_text("utf-8")).endswith("\n"):
            assert process.poll() is None and time.monotonic() < deadline, first
            time.sleep(0.02)
        yield Running(first.split()[-1], process)
        process.terminate()
        process.wait(10)
    finally:
        process.kill()
        process.communicate()
    assert said.read_text("utf-8") == first


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with started([*stdio.EXAMPLE, "--http", "127.0.0.1:0"], tmp_path_factory.mktemp("example")) as running:
        yield running.url


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of the tests."""
    with started([*stdio.SUBJECT, "http"], tmp_path_factory.mktemp("everything")) as running:
        yield running.url


# The clients.


class Client(NamedTuple):
    peer: str
    mode: str
    transport: str  # "http": Streamable HTTP; "sse": the HTTP+SSE of 2024
    revision: str

    def __str__(self) -> str:
        return f"{self.peer} {self.mode} {self.transport}"


Walk = Callable[[Client, str, dict[str, Object], Object], Ended]


@pytest.fixture
def walk(installed_peer: InstalledPeer, bytecode: str) -> Walk:
    """Have a client walk through steps at a URL: `walk(client, url, steps, more of the plan)`."""

    def walked(client: Client, url: str, steps: dict[str, Object], more: Object) -> Ended:
        plan = {"mode": client.mode, "url": url, "transport": client.transport, "steps": list(steps.values()), **more}
        command = client_command(client.peer, installed_peer(client.peer))
        env = {"FASTMCP_CHECK_FOR_UPDATES": "off", "PYTHONPYCACHEPREFIX": bytecode}
        return run([*command, json.dumps(plan)], None, **env)

    return walked


EVERYBODY = [
    Client("mcp1", "2024-11-05", "http", "2024-11-05"),
    Client("mcp1", "2025-03-26", "http", "2025-03-26"),
    Client("mcp1", "2025-06-18", "http", "2025-06-18"),
    Client("mcp1", "2025-11-25", "http", "2025-11-25"),
    Client("mcp1", "2024-11-05", "sse", "2024-11-05"),
    Client("mcp2", "legacy", "http", "2025-11-25"),
    Client("mcp2", "auto", "http", "2026-07-28"),
    Client("mcp2", "2026-07-28", "http", "2026-07-28"),
    Client("mcp2", "legacy", "sse", "2025-11-25"),
    Client("fastmcp", "legacy", "http", "2025-11-25"),
    Client("fastmcp", "auto", "http", "2026-07-28"),
    Client("fastmcp", "auto", "sse", "2025-11-25"),
    Client("typescript", "2025-03-26", "http", "2025-03-26"),
    Client("typescript", "2025-06-18", "http", "2025-06-18"),
    Client("typescript", "legacy", "http", "2025-11-25"),
    Client("typescript", "auto", "http", "2026-07-28"),
    Client("typescript", "2026-07-28", "http", "2026-07-28"),
    Client("typescript", "legacy", "sse", "2025-11-25"),
]


def record(ran: Ran, client: Client) -> None:
    """Rules of revisions over HTTP speak of Streamable HTTP, or of the HTTP+SSE of 2024: the mixture proves none."""
    if (client.transport == "sse") is (client.revision < "2025"):
        ran(client.revision, "http")


@pytest.fixture(scope="module")
def walks() -> dict[Client, Ended]:
    """One walk through the example serves all tests."""
    return {}


@pytest.fixture(params=EVERYBODY, ids=str)
def talk(
    request: pytest.FixtureRequest, example: str, walk: Walk, walks: dict[Client, Ended], ran: Ran
) -> Conversation:
    """A walk through the example by each client in each of its ways to connect."""
    client: Client = request.param
    if client not in walks:
        url = example.replace("/mcp", "/sse") if str(client) == "mcp1 2024-11-05 sse" else example
        walks[client] = walk(client, url, HERE, {})
    conversation = Conversation(walks[client], list(HERE))
    assert conversation.revision == client.revision
    record(ran, client)
    return conversation


test_a_client_lists_the_example = stdio.test_a_client_lists_the_example
test_a_client_gets_structured_data_and_its_text = stdio.test_a_client_gets_structured_data_and_its_text
test_a_client_is_told_what_went_wrong = stdio.test_a_client_is_told_what_went_wrong
test_a_client_hears_of_progress = stdio.test_a_client_hears_of_progress
test_a_client_gets_pictures_sounds_and_documents = stdio.test_a_client_gets_pictures_sounds_and_documents


@requirement("SRV-507", "SRV-508")
def test_a_client_is_asked_and_answers(talk: Conversation) -> None:
    questions = ("accept", "decline", "cancel", "confirm")
    if not since(talk.revision, "2025-06-18"):
        for step in questions:
            assert talk.steps[step]["asked"] == []
            assert talk.result(step)["isError"] is True
        return
    for step in questions:
        [asked] = talk.steps[step]["asked"]
        assert asked["requestedSchema"]["type"] == "object"
        assert talk.result(step)["isError"] is (step in ("cancel", "confirm"))  # of calls that were not approved
    assert talk.text("accept") == "Bonjour, Ada."
    assert talk.text("decline") == "Hello, whoever you are."
    assert talk.text("cancel") == "cancel_order was not approved: the question was dismissed. Nothing was done."
    assert talk.text("confirm") == "cancel_order was not approved by its user. Nothing was done."


ATTENTIVE = [
    Client("mcp1", "2025-03-26", "http", "2025-03-26"),
    Client("mcp1", "2024-11-05", "sse", "2024-11-05"),
    Client("mcp2", "legacy", "http", "2025-11-25"),
    Client("mcp2", "auto", "http", "2026-07-28"),
    Client("fastmcp", "legacy", "http", "2025-11-25"),
    Client("typescript", "legacy", "http", "2025-11-25"),
    Client("typescript", "auto", "http", "2026-07-28"),
    Client("typescript", "legacy", "sse", "2025-11-25"),
]


@pytest.mark.parametrize("client", ATTENTIVE, ids=str)
def test_a_client_takes_everything_we_can_say_and_hears_of_changes(
    client: Client, everything: str, walk: Walk, ran: Ran
) -> None:
    check_everything(walk, client, everything)
    record(ran, client)


def check_everything(walk: Walk, client: Client, url: str) -> None:
    newcomer = str(client).replace(" ", "_")
    more = {"change": {"call": "add_tool", "arguments": {"name": newcomer}}}
    talk = Conversation(walk(client, url, SAYS, more), list(SAYS))
    assert talk.revision == client.revision
    assert talk.seen["unexpected"] == []
    failing = {"fails"} if since(talk.revision, "2025-06-18") else {"fails", "order", "choices"}  # it cannot be asked
    assert {name for name in SAYS if talk.result(name)["isError"]} == failing
    assert talk.text("echo") == "a\nb \u2028 \N{GRINNING FACE}"
    if since(talk.revision, "2025-06-18"):
        assert talk.text("order").startswith("accept")
        assert "'many': ['x', 'z']" in talk.text("choices")
    assert talk.seen["relisted"][-1] == newcomer


async def test_a_session_hears_of_changes_at_the_other_address_too(everything: str) -> None:
    async with wire_to(everything.replace("/mcp", "/sse"), "2025-11-25") as wire:
        await wire.call("add_tool", {"name": "other_address"})
        await wire.notice("notifications/tools/list_changed")


@pytest.mark.parametrize("revision", ["2024-11-05", "2025-11-25", "2026-07-28"])
async def test_a_server_that_is_told_to_end_waits_for_a_call_and_for_nothing_else(
    revision: str, tmp_path: Path
) -> None:
    with started(["examples/everyday.py", "--http", "127.0.0.1:0"], tmp_path) as running:
        async with wire_to(running.url, revision, running.process) as wire:
            call = {"name": "slow_count", "arguments": {"steps": 10}}
            ident = await wire.ask("tools/call", call, progressToken="mine")
            await wire.notice("notifications/progress")
            running.process.terminate()
            assert (await wire.answer(ident))["result"]["content"][0]["text"] == "Counted to 10."
            # It complains when something did not end in time; `started` finds that nothing was said.
            assert await asyncio.to_thread(running.process.wait, 10) == 0


# The MCP Inspector on the command line.

Inspect = Callable[..., Ended]


@pytest.fixture
def inspect(installed_peer: InstalledPeer, example: str, tmp_path: Path) -> Inspect:
    """Run the inspector against the example: `inspect(era, method, *options)`."""

    def inspected(era: str, method: str, *options: str) -> Ended:
        options = ("--protocol-era", era, "--method", method, *options)
        return run_inspector(installed_peer("inspector"), tmp_path, [example], None, *options)

    return inspected


def shown(ended: Ended) -> Object:
    assert ended.code == 0, ended.err
    result: Object = json.loads(ended.out)["result"]
    return result


@eras
def test_the_inspector_lists_and_finds_nothing_to_say_about_the_schemas(inspect: Inspect, era: str, ran: Ran) -> None:
    result = shown(inspect(era, "tools/list", "--strict"))
    assert [tool["name"] for tool in result["tools"]] == TOOLS
    ran(NEWEST[era], "http")


@eras
def test_the_inspector_calls(inspect: Inspect, era: str, ran: Ran) -> None:
    result = shown(inspect(era, "tools/call", *tool_options("get_weather", {"location": "Paris"})))
    assert result["structuredContent"]["location"] == "Paris"
    assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
    # Only the era without a handshake says in every result who answered.
    assert ("_meta" in result) is (era != "legacy")
    ran(NEWEST[era], "http")


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_the_inspector_waits_for_a_call_with_progress(inspect: Inspect, era: str, ran: Ran) -> None:
    result = shown(inspect(era, "tools/call", *tool_options("slow_count", {"steps": 3})))
    assert result["content"] == [{"type": "text", "text": "Counted to 3."}]
    ran(NEWEST[era], "http")


@eras
def test_the_inspector_sees_an_error(inspect: Inspect, era: str, ran: Ran) -> None:
    ended = inspect(era, "tools/call", *tool_options("get_weather", {"location": "Atlantis"}))
    assert ended.code == 5, ended.err
    assert json.loads(ended.err)["error"]["code"] == "tool_is_error"
    assert json.loads(ended.out)["result"]["isError"] is True
    ran(NEWEST[era], "http")


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_the_inspector_saves_a_picture(inspect: Inspect, era: str, tmp_path: Path, ran: Ran) -> None:
    path = tmp_path / "chart.png"
    options = [*tool_options("draw_chart", {"values": [1, 2, 3]}), "--output", str(path), "--output-format", "raw"]
    ended = inspect(era, "tools/call", *options)
    assert ended.code == 0, ended.err
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    ran(NEWEST[era], "http")


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_the_inspector_cannot_be_asked_and_is_told_so(inspect: Inspect, era: str, ran: Ran) -> None:
    ended = inspect(era, "tools/call", *tool_options("greet", {}))
    assert ended.code != 0
    assert "elicitation" in ended.out + ended.err
    ran(NEWEST[era], "http")


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_the_inspector_calls_two_hundred_times(inspect: Inspect, era: str) -> None:
    load = ["--load", "--load-requests", "200", "--load-concurrency", "5"]
    summary = shown(inspect(era, "tools/call", *tool_options("calculate_sum", {"a": 2, "b": 40}), *load))
    assert (summary["ok"], summary["toolErrors"], summary["errors"]) == (200, 0, 0)


def test_the_inspector_over_the_transport_of_2024(inspect: Inspect) -> None:
    options = ["--transport", "sse", *tool_options("get_weather", {"location": "Paris"})]
    assert shown(inspect("legacy", "tools/call", *options))["structuredContent"]["location"] == "Paris"


# Inside another application, under a prefix.

FRAMEWORKS: dict[str, Callable[..., Starlette]] = {"starlette": Starlette, "fastapi": FastAPI}
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)


@contextlib.contextmanager
def hosted(framework: str, mounts: dict[str, Endpoint], life: Lifespan | None, **options: Any) -> Iterator[str]:
    """The base URL of an application with a page of its own at /hello, served by uvicorn in a thread."""
    app = FRAMEWORKS[framework](lifespan=life)
    app.add_route("/hello", hello)
    for prefix, endpoint in mounts.items():
        app.mount(prefix, endpoint)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=5, **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + STARTING
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
    assert not thread.is_alive()


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


@pytest.fixture(scope="module")
def mounted(request: pytest.FixtureRequest) -> Iterator[str]:
    """The server of the tests as a part of an application that has a lifespan of its own."""

    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        yield

    with hosted(request.param, {"/tools": subject.make().asgi()}, life) as base:
        yield base + "/tools/mcp"


@pytest.mark.parametrize(
    ("mounted", "client"),
    [
        ("starlette", Client("mcp1", "2024-11-05", "sse", "2024-11-05")),
        ("starlette", Client("typescript", "auto", "http", "2026-07-28")),
        ("fastapi", Client("mcp2", "legacy", "http", "2025-11-25")),
        ("fastapi", Client("mcp2", "auto", "http", "2026-07-28")),
    ],
    indirect=["mounted"],
    ids=str,
)
def test_a_client_walks_through_a_mounted_server(client: Client, mounted: str, walk: Walk, ran: Ran) -> None:
    check_everything(walk, client, mounted)
    record(ran, client)


@dataclass
class Little:
    """A server that keeps a diary of its lifespan, and tells its state."""

    state: str = "its state"
    diary: list[str] = field(default_factory=list)

    def make(self) -> Server:
        server = Server("little", lifespan=self._life)
        server.add(self._tell, name="tell")
        return server

    @contextlib.asynccontextmanager
    async def _life(self, server: Server) -> AsyncIterator[str]:
        self.diary.append("begun")
        await asyncio.sleep(0.05)  # time enough for others to come to the door
        yield self.state
        self.diary.append("ended")

    async def _tell(self, call: Call) -> str:
        """What the lifespan gave."""
        return str(call.state)


ALIVE = SimpleNamespace(poll=lambda: None)  # what a wire wants to know of its server


@contextlib.asynccontextmanager
async def wire_to(url: str, revision: str, process: Any = ALIVE) -> AsyncIterator[HttpWire]:
    wire = HttpWire(revision, cast(HttpServer, SimpleNamespace(url=url, process=process)))
    try:
        await wire.open()
        yield wire
    finally:
        await wire.close()
        await asyncio.sleep(0)  # its sockets close now, not after the application has waited for them


async def told(url: str, revision: str) -> Json:
    """What the tool of the little server says to a client of a revision."""
    async with wire_to(url, revision) as wire:
        return (await wire.call("tell", {}))["result"]["content"][0]["text"]


WIRES = ["2024-11-05", "2025-03-26", "2025-11-25", "2026-07-28"]


@frameworks
@pytest.mark.parametrize("lifespans", ["off", "on"])
async def test_the_lifespan_begins_with_the_first_request_if_nobody_else_begins_it(
    framework: str, lifespans: str
) -> None:
    little = Little()
    with hosted(framework, {"/tools": little.make().asgi()}, None, lifespan=lifespans) as base:
        assert await (await http(base + "/hello", "GET", {})).body() == b"hello"
        assert little.diary == []
        # All at once, and all before it has begun.
        answers = await asyncio.gather(*(told(base + "/tools/mcp", revision) for revision in WIRES * 2))
        assert set(answers) == {"its state"}
        assert little.diary == ["begun"]


@frameworks
async def test_the_lifespan_can_be_a_part_of_the_applications(framework: str) -> None:
    little = Little()
    endpoint = little.make().asgi()

    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        await endpoint.startup()
        yield
        await endpoint.stop()
        little.diary.append("left")

    with hosted(framework, {"/tools": endpoint}, life) as base:
        assert little.diary == ["begun"]
        assert [await told(base + "/tools/mcp", revision) for revision in WIRES] == ["its state"] * len(WIRES)
        assert little.diary == ["begun"]
    assert little.diary == ["begun", "ended", "left"]


@frameworks
async def test_a_lifespan_of_the_server_inside_the_applications_ends_with_it(framework: str) -> None:
    little = Little()
    server = little.make()

    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        async with server.serving():
            yield
        little.diary.append("left")

    with hosted(framework, {"/tools": server.asgi()}, life) as base:
        assert little.diary == ["begun"]
        assert await told(base + "/tools/mcp", "2026-07-28") == "its state"
    assert little.diary == ["begun", "ended", "left"]


@frameworks
async def test_the_place_it_is_mounted_at_is_the_endpoint_too(framework: str) -> None:
    with hosted(framework, {"/mcp": Little().make().asgi()}, None) as base:
        for path in ("/mcp/", "/mcp/mcp", "/mcp/mcp/"):
            assert [await told(base + path, revision) for revision in WIRES] == ["its state"] * len(WIRES)
        reply = await http(base + "/mcp/elsewhere", "POST", {}, b"{}")
        assert reply.status == 404
        reply.close()


@frameworks
async def test_two_servers_in_one_application_know_nothing_of_each_other(framework: str) -> None:
    one, two = Little("one"), Little("two")
    with hosted(framework, {"/one": one.make().asgi(), "/two": two.make().asgi()}, None) as base:
        async with wire_to(base + "/one/mcp", "2025-11-25") as first, wire_to(base + "/two/mcp", "2025-11-25") as other:
            assert (await first.call("tell", {}))["result"]["content"][0]["text"] == "one"
            assert (await other.call("tell", {}))["result"]["content"][0]["text"] == "two"
            other.session = first.session
            assert "error" in await other.call("tell", {})
            assert other.statuses[-1] == 404


@frameworks
async def test_a_client_of_2024_is_told_an_address_that_leads_back_through_the_proxy(framework: str) -> None:
    """A proxy takes `/api` away; the server knows of it by its root path."""
    with hosted(framework, {"/tools": Little().make().asgi()}, None, root_path="/api") as base:
        reply = await http(base + "/tools/mcp", "GET", {"Accept": "text/event-stream"})
        first = await anext(reply.events())
        reply.close()
        assert first["data"].startswith("/api/tools/mcp?sessionId=")
        assert await told(base + "/tools/mcp", "2026-07-28") == "its state"
