"""The library as its user sees it: registering tools, including servers, and what tools may do while they run."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

import handrail
from handrail import Call, Refused, SchemaError, Server, Text, ToolError, ToolResult
from handrail.engine.pipeline import Handler
from handrail.errors import LocalProtocolError, RemoteProtocolError
from handrail.guards.sanitize import Sanitize
from handrail.observe.activity import ActivityFeed
from handrail.testing import Peer
from patience import PATIENCE
from requirements import requirement

Json = Any
Object = dict[str, Any]

CHANGED = "notifications/tools/list_changed"


async def names(peer: Peer) -> list[str]:
    return [tool.name for tool in await peer.tools()]


async def settled(is_so: Callable[[], bool]) -> None:
    """Wait for another thread to get there; it has no way to tell us."""
    async with asyncio.timeout(PATIENCE):
        while not is_so():  # noqa: ASYNC110  # a thread's state has no event
            await asyncio.sleep(0)


# The cost of an import


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import handrail", ["asyncio", "ssl", "pydantic", "msgspec", "jsonschema_rs", "typing_extensions"]),
        ("from handrail import ToolError", ["asyncio", "ssl", "pydantic"]),
        ("from handrail import Server; Server('x')", ["pydantic", "http", "multiprocessing", "jsonschema"]),
    ],
)
def test_importing_loads_no_more_than_is_needed(code: str, absent: list[str]) -> None:
    probe = f"{code}\nimport sys\nprint(*(name for name in {absent!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# Registering


async def test_a_tool_is_made_with_and_without_parentheses() -> None:
    server = Server("plain")

    @server.tool
    async def bare(a: int) -> int:
        """Bare."""
        return a

    @server.tool()
    async def called(a: int) -> int:
        """Called."""
        return a

    @server.tool(title="Named", name="given", description="Said otherwise")
    def optioned(a: int) -> int:
        """Not this."""
        return a

    assert await bare(1) == 1, "the function stays what it was"
    assert optioned(2) == 2
    shown = [(tool.name, tool.description, tool.title) for tool in server.tools]
    assert [each[:2] for each in shown] == [("bare", "Bare."), ("called", "Called."), ("given", "Said otherwise")]
    assert shown[2][2] == "Named"
    async with Peer(server) as peer:
        assert [(await peer.call(name, {"a": 3})).structured for name in await names(peer)] == [{"result": 3}] * 3


async def test_every_option_arrives_where_it_belongs() -> None:
    server = Server("options")
    icons = [{"src": "https://example.org/i.png", "sizes": ["48x48"]}]

    @server.tool(
        name="other",
        title="Other",
        description="Words",
        input_schema={"type": "object", "properties": {"a": {"type": "integer"}}, "x-own": 1},
        output_schema={"type": "object", "properties": {"b": {"type": "integer"}}},
        annotations={"readOnlyHint": True, "title": "Shown"},
        icons=icons,
        meta={"example.org/m": 1},
        tags=["x", "y"],
        timeout=(1, 2),
        dangerous="hot",
        extra="allow",
    )
    async def optioned(**given: Json) -> Object:
        """Not this."""
        return {"b": given["a"]}

    async with Peer(server, revision="2026-07-28") as peer:
        (tool,) = await peer.tools()
        assert tool == handrail.Tool(
            name="other",
            title="Other",
            description="Words",
            input_schema={"type": "object", "properties": {"a": {"type": "integer"}}, "x-own": 1},
            output_schema={"type": "object", "properties": {"b": {"type": "integer"}}},
            annotations={"readOnlyHint": True, "title": "Shown"},
            icons=icons,
            meta={"example.org/m": 1},
        )
        result = await peer.call("other", {"a": 5, "more": True})
        assert result.structured == {"b": 5}
        assert isinstance(result.meta, dict)
        assert result.meta["io.handrail/risk"]["reason"] == "hot"


# The server as it is seen by code that is not checked.
AnyServer: Any = Server


def _nothing() -> None: ...
async def _nothing_async() -> None: ...


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "unknown option": (
        lambda server: server.add(_nothing, titel="x"),
        TypeError,
        r"tool '_nothing': unknown option 'titel'; did you mean 'title'\?",
    ),
    "unknown option of a server": (
        lambda server: AnyServer("x", plicy=None),
        TypeError,
        r"server 'x': unknown option 'plicy'; did you mean 'policy'\?",
    ),
    "an option of a tool, given to a server": (
        lambda server: AnyServer("x", timeout=1),
        TypeError,
        "server 'x': unknown option 'timeout'; known are .*approvals, .*policy, ",
    ),
    "misspelt guard of an application": (
        lambda server: server.asgi(authh=None),
        TypeError,
        r"asgi: unknown option 'authh'; did you mean 'auth'\?",
    ),
    "misspelt option of an address": (
        lambda server: server.run(http="127.0.0.1:0", worker=2),
        TypeError,
        r"run: unknown option 'worker'; did you mean 'workers'\?",
    ),
    "no port": (lambda server: server.run(http=True), TypeError, "True is not an address: write '127.0.0.1:8000', or"),
    "a port out of range": (
        lambda server: server.run(http=80000),
        ValueError,
        "':80000' is not an address",
    ),
    "misspelt hint": (
        lambda server: server.add(_nothing, annotations={"destructive_hint": True}),
        SchemaError,
        r"tool '_nothing': annotations.destructive_hint: unknown; did you mean 'destructiveHint'",
    ),
    "empty name": (
        lambda server: server.add(_nothing, name=""),
        SchemaError,
        "a name is a text of 1 to 128 characters",
    ),
    "same name": (
        lambda server: [server.add(_nothing), server.add(_nothing)],
        SchemaError,
        "tool '_nothing' exists already; remove it first, or choose another name",
    ),
    "inline async": (
        lambda server: server.add(_nothing_async, inline=True),
        SchemaError,
        "tool '_nothing_async': inline=True is for `def` functions; this one is async",
    ),
    "no time": (
        lambda server: server.add(_nothing, timeout=0),
        SchemaError,
        "timeout: 0 is not a number of seconds",
    ),
    "endless": (lambda server: server.add(_nothing, timeout=float("inf")), SchemaError, "timeout: inf is not"),
    "idle over total": (lambda server: server.add(_nothing, timeout=(2, 1)), SchemaError, r"timeout: \(2, 1\) is not"),
    "hint of a wrong type": (
        lambda server: server.add(_nothing, annotations={"readOnlyHint": "yes"}),
        SchemaError,
        "annotations.readOnlyHint: 'yes' is not a boolean",
    ),
    "icon that runs": (
        lambda server: server.add(_nothing, icons=[{"src": "javascript:alert(1)"}]),
        SchemaError,
        "src must be an https: or data: address, not 'javascript:alert",
    ),
    "array of arguments": (
        lambda server: server.add(_nothing, input_schema={"type": "array"}),
        SchemaError,
        'the root must have "type": "object", not \'array\'',
    ),
    "remove the unknown": (lambda server: server.remove("nothing"), KeyError, "no tool 'nothing'"),
    "remove a misspelt one": (
        lambda server: [server.add(_nothing, name="forecast"), server.remove("forcast")],
        KeyError,
        "no tool 'forcast'; did you mean 'forecast'",
    ),
    "page size": (lambda server: Server("x", page_size=0), ValueError, "page_size: 0 is less than 1"),
    "form of errors": (
        lambda server: AnyServer("x", invalid_arguments="maybe"),
        ValueError,
        "invalid_arguments: 'maybe' is not one of by_revision, error, result",
    ),
    "revision": (lambda server: Server("x", revisions=["2025-01-01"]), ValueError, "unknown revision '2025-01-01'"),
    "only pocket": (lambda server: Server("x", revisions=["pocket"]), ValueError, "name at least one dated revision"),
    "workers": (lambda server: Server("x", workers=0), ValueError, "workers: 0 is less than 1"),
    "server option": (lambda server: AnyServer("x", colour="red"), TypeError, "colour"),
    "tools on a server without": (
        lambda server: Server("bare", tools=False).add(_nothing),
        SchemaError,
        "server 'bare' has tools=False",
    ),
    "limit": (lambda server: handrail.Limits(max_calls=0), ValueError, "max_calls: 0 is not more than 0"),
    "include itself": (lambda server: server.include(server), ValueError, "it is, or includes, this one"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_mistake_is_told_with_what_would_be_right(name: str) -> None:
    attempt, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        attempt(Server("server"))


async def test_tools_come_and_go_while_the_server_runs() -> None:
    server = Server("living")

    @server.tool
    async def first() -> str:
        """First."""
        return "first"

    async def second() -> str:
        """Second."""
        return "second"

    async with Peer(server) as peer:
        assert await names(peer) == ["first"]
        server.add(second)
        assert await names(peer) == ["first", "second"]
        server.disable("first")
        assert await names(peer) == ["second"]
        assert [tool.name for tool in server.tools] == ["second"]
        with pytest.raises(RemoteProtocolError, match="Unknown tool: first"):
            await peer.call("first")
        server.enable("first")
        assert await names(peer) == ["first", "second"], "it has its old place"
        assert (await peer.call("first")).text == "first"
        server.remove("second")
        with pytest.raises(RemoteProtocolError, match="Unknown tool: second"):
            await peer.call("second")
        with pytest.raises(SchemaError, match="exists already"):
            server.add(first)
        server.remove("first")
        server.add(second, name="first")
        assert (await peer.call("first")).text == "second"


async def test_a_call_in_flight_survives_the_removal_of_its_tool() -> None:
    server = Server("living")
    begun, may_end = asyncio.Event(), asyncio.Event()

    @server.tool
    async def slow() -> str:
        """Slow."""
        begun.set()
        await may_end.wait()
        return "done"

    async with Peer(server) as peer:
        call = asyncio.create_task(peer.call("slow"))
        await begun.wait()
        server.remove("slow")
        may_end.set()
        assert (await call).text == "done"


# Including other servers


def _part(name: str, log: list[str]) -> Server:
    @contextlib.asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[str]:
        log.append(f"{name} up")
        yield f"state of {name}"
        log.append(f"{name} down")

    server = Server(name, lifespan=lifespan)

    @server.tool
    async def state(call: Call) -> str:
        """Whose state is seen."""
        return f"{call.name}: {call.state}"

    @server.middleware
    async def around(call: Call, following: Handler) -> ToolResult:
        log.append(f"{name} sees {call.name}")
        return await following(call)

    return server


async def test_an_included_server_brings_its_tools_middleware_and_state() -> None:
    log: list[str] = []
    outer, inner = _part("outer", log), _part("inner", log)
    outer.include(inner, prefix="in.")
    async with Peer(outer) as peer:
        assert await names(peer) == ["state", "in.state"]
        assert log == ["inner up", "outer up"]
        log.clear()
        assert (await peer.call("state")).text == "state: state of outer"
        assert log == ["outer sees state"]
        log.clear()
        assert (await peer.call("in.state")).text == "in.state: state of inner"
        assert log == ["outer sees in.state", "inner sees in.state"], "ours outside, theirs inside"
        log.clear()
    assert log == ["outer down", "inner down"]


async def test_changes_of_an_included_server_follow() -> None:
    outer, inner = Server("outer"), Server("inner")

    async def one() -> str:
        """One."""
        return "one"

    async def two() -> str:
        """Two."""
        return "two"

    inner.add(one)
    outer.include(inner, prefix="in_")
    async with Peer(outer) as peer, Peer(inner) as direct:
        inner.add(two)
        await peer.notice(CHANGED)
        assert await names(peer) == ["in_one", "in_two"]
        inner.disable("one")
        assert await names(peer) == ["in_two"]
        inner.enable("one")
        assert sorted(await names(peer)) == ["in_one", "in_two"]
        inner.remove("two")
        inner.add(one, name="two")
        assert (await peer.call("in_two")).text == "one", "a new tool under an old name"
        assert await names(direct) == ["one", "two"]

        @inner.middleware
        async def late(call: Call, following: Handler) -> ToolResult:
            return ToolResult([Text("from late middleware")])

        assert (await peer.call("in_two")).text == "from late middleware"


async def test_a_server_included_twice_removed_is_seen_through_both_middlewares() -> None:
    log: list[str] = []
    outer, middle, inner = _part("outer", log), _part("middle", log), _part("inner", log)
    middle.include(inner, prefix="i.")
    outer.include(middle, prefix="m.")
    async with Peer(outer) as peer:
        assert await names(peer) == ["state", "m.state", "m.i.state"]
        log.clear()
        assert (await peer.call("m.i.state")).text == "m.i.state: state of inner"
        assert log == ["outer sees m.i.state", "middle sees m.i.state", "inner sees m.i.state"]


def test_a_circle_of_servers_is_refused_however_long() -> None:
    one, two, three = Server("one"), Server("two"), Server("three")
    one.include(two)
    two.include(three)
    for again in (one, two):
        with pytest.raises(ValueError, match="includes, this one"):
            three.include(again)


def test_names_that_meet_are_refused() -> None:
    outer, inner = Server("outer"), Server("inner")
    outer.add(_nothing)
    inner.add(_nothing)
    with pytest.raises(SchemaError, match="exists already"):
        outer.include(inner)
    assert [tool.name for tool in outer.tools] == ["_nothing"]


# Middleware


async def test_middleware_runs_in_the_order_it_was_added_and_may_change_everything() -> None:
    server = Server("layers")
    order: list[str] = []

    @server.tool
    async def echo(text: str) -> str:
        """Give the text back."""
        order.append("tool")
        return text

    @server.middleware
    async def first(call: Call, following: Handler) -> ToolResult:
        order.append("first in")
        result = await following(call)
        order.append("first out")
        return result

    @server.middleware
    async def second(call: Call, following: Handler) -> ToolResult:
        order.append("second in")
        if call.arguments.get("text") == "stop":
            return ToolResult([Text("stopped")])
        if call.arguments.get("text") == "fail":
            raise ToolError("told by middleware")
        if call.arguments.get("text") == "refuse":
            raise Refused(handrail.errors.Kind.FORBIDDEN, "not for you")
        result = await following(call)
        order.append("second out")
        return ToolResult([Text(result.text.upper())])

    async with Peer(server) as peer:
        assert (await peer.call("echo", {"text": "a"})).text == "A"
        assert order == ["first in", "second in", "tool", "second out", "first out"]
        order.clear()
        assert (await peer.call("echo", {"text": "stop"})).text == "stopped"
        assert order == ["first in", "second in", "first out"]
        failed = await peer.call("echo", {"text": "fail"})
        assert failed.is_error
        assert failed.text == "told by middleware"
        with pytest.raises(RemoteProtocolError, match="not for you") as refused:
            await peer.call("echo", {"text": "refuse"})
        assert refused.value.code == 403
        # Bad arguments come to middleware too, and are refused behind it.
        order.clear()
        assert (await peer.call("echo", {"text": 5})).is_error
        assert "tool" not in order


@dataclass
class Sum:
    sum: float


@requirement("P-02", "P-06", everywhere=True)
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("sanitize", [Sanitize(), None])
@pytest.mark.parametrize(
    "spoilt",
    [
        {"content": None},
        {"content": ["text"]},
        {"structured": {"sum": float("nan")}},
        {"structured": {"sum": "three"}},
        {"structured": UNSET},
        {"meta": {"x": b"bytes"}},
    ],
)
async def test_what_middleware_makes_of_a_result_keeps_the_promises_of_the_tool(
    spoilt: dict[str, Any], sanitize: Sanitize | None, watched: bool, tmp_path: Path
) -> None:
    server = Server("spoilt", sanitize=sanitize, audit=tmp_path / "audit.db")
    if watched:
        ActivityFeed.of(server.engine)

    @server.tool
    async def add(a: int, b: int) -> Sum:
        return Sum(a + b)

    @server.middleware
    async def spoil(call: Call, following: Handler) -> ToolResult:
        return replace(await following(call), **(spoilt if call.arguments["a"] == 1 else {}))

    async with Peer(server, timeout=PATIENCE) as peer:
        result = await peer.call("add", {"a": 1, "b": 2})
        assert result.is_error and "add returned" in result.text
        assert (await peer.call("add", {"a": 2, "b": 2})).structured == {"sum": 4}


def test_a_key_that_is_too_short_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDRAIL_KEY", "s hort")
    with pytest.raises(ValueError, match="HANDRAIL_KEY: 6 bytes are too few for a key, 32 are needed"):
        Server("x")


async def test_middleware_that_returns_something_else_is_a_fault_of_the_server() -> None:
    server = Server("broken")
    server.add(_nothing)

    @server.middleware
    async def wrong(call: Call, following: Handler) -> Any:
        return "text"

    async with Peer(server) as peer:
        with pytest.raises(RemoteProtocolError, match="Internal error") as error:
            await peer.call("_nothing")
        assert error.value.code == -32603


# Lifespan


async def test_a_lifespan_is_entered_once_and_left_by_the_last() -> None:
    log: list[str] = []
    server = _part("server", log)
    async with Peer(server) as one:
        async with Peer(server) as two:
            assert (await one.call("state")).text == (await two.call("state")).text == "state: state of server"
        assert "server down" not in log
        assert (await one.call("state")).text == "state: state of server"
    assert [each for each in log if "sees" not in each] == ["server up", "server down"]
    async with Peer(server) as again:
        assert (await again.call("state")).text == "state: state of server"
    assert [each for each in log if "sees" not in each] == ["server up", "server down"] * 2


async def test_those_who_come_while_a_lifespan_begins_wait_for_it() -> None:
    may_begin = asyncio.Event()
    begun: list[str] = []

    @contextlib.asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[str]:
        begun.append("begun")
        await may_begin.wait()
        yield "ready"

    server = Server("slow", lifespan=lifespan)
    seen: list[Any] = []

    async def use() -> None:
        async with server.serving() as state:
            seen.append(state)

    async with asyncio.TaskGroup() as group:
        group.create_task(use())
        group.create_task(use())
        for _ in range(5):
            await asyncio.sleep(0)
        assert begun == ["begun"]
        assert seen == [], "somebody was served without a state"
        may_begin.set()
    assert seen == ["ready", "ready"]


async def test_one_who_comes_while_a_lifespan_ends_gets_a_new_one() -> None:
    may_end, ending = asyncio.Event(), asyncio.Event()
    count = 0

    @contextlib.asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[int]:
        nonlocal count
        count += 1
        yield count
        ending.set()
        await may_end.wait()

    server = Server("slow", lifespan=lifespan)

    async def use_briefly() -> None:
        async with server.serving():
            pass

    first = asyncio.create_task(use_briefly())
    await ending.wait()

    async def use() -> tuple[Any, Any]:
        async with server.serving() as state:
            await asyncio.gather(first)
            return state, server.state

    second = asyncio.create_task(use())
    for _ in range(5):
        await asyncio.sleep(0)
    may_end.set()
    async with asyncio.timeout(PATIENCE):
        assert await second == (2, 2)
    assert server.state is None


async def test_a_lifespan_that_fails_leaves_nothing_behind() -> None:
    log: list[str] = []
    inner = _part("inner", log)

    @contextlib.asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        if len(log) < 3:
            raise RuntimeError("no database")
        yield

    outer = Server("outer", lifespan=lifespan)
    outer.include(inner)
    with pytest.raises(RuntimeError, match="no database"):
        async with outer.serving():
            pass
    assert log == ["inner up", "inner down"]
    log.append("the database is there")
    async with outer.serving():
        assert log[-1] == "inner up"


# Running tools


async def test_the_pool_of_workers_is_bounded() -> None:
    server = Server("pool", workers=2)
    gate = threading.Event()
    running: set[str] = set()
    most = 0
    lock = threading.Lock()

    @server.tool
    def blocks(mark: str) -> str:
        """Blocks until the gate opens."""
        nonlocal most
        with lock:
            running.add(mark)
            most = max(most, len(running))
        gate.wait(PATIENCE)
        with lock:
            running.discard(mark)
        return f"{mark} {threading.current_thread().name}"

    @server.tool
    async def echo(text: str) -> str:
        """Give the text back."""
        return text

    async with Peer(server) as peer:
        calls = [asyncio.create_task(peer.call("blocks", {"mark": str(at)})) for at in range(6)]
        await settled(lambda: len(running) == 2)
        assert (await peer.call("echo", {"text": "free"})).text == "free", "the loop is not held up"
        gate.set()
        texts = [(await call).text.split() for call in calls]
        assert [mark for mark, _ in texts] == [str(at) for at in range(6)]
        assert len({thread for _, thread in texts}) <= 2
        assert most == 2
        await settled(lambda: server.engine.thread_pool.busy == 0)


async def test_a_blocking_tool_that_ignores_its_cancellation_keeps_its_place_and_is_counted() -> None:
    server = Server("stubborn", workers=1)
    gate, begun = threading.Event(), threading.Event()
    seen: list[bool] = []

    @server.tool(timeout=(1.0, 1.0))
    def stubborn(call: Call) -> str:
        """Does not look at the flag until it is through."""
        begun.set()
        gate.wait(PATIENCE)
        seen.append(call.cancelled)
        return "at last"

    @server.tool
    def quick() -> str:
        """Needs a worker."""
        return "quick"

    workers = server.engine.thread_pool
    async with Peer(server) as peer:
        given_up = await peer.call("stubborn")
        assert given_up.is_error
        assert "1 s" in given_up.text
        assert begun.is_set()
        assert (workers.abandoned, workers.busy) == (1, 1)
        waiting = asyncio.create_task(peer.call("quick"))
        await peer.request("ping")
        assert not waiting.done(), "its place was given away"
        gate.set()
        assert (await waiting).text == "quick"
        assert seen == [True]
        await settled(lambda: workers.abandoned == 0 and workers.busy == 0)
        # One that waits for a place and is given up never runs.
        gate.clear()
        begun.clear()
        blocked = asyncio.create_task(peer.call("stubborn"))
        await settled(begun.is_set)
        begun.clear()
        with contextlib.suppress(RemoteProtocolError):
            assert (await peer.call("stubborn")).is_error
        await blocked
        gate.set()
        await settled(lambda: workers.busy == 0)
        assert not begun.is_set()
        assert len(seen) == 2


async def test_a_blocking_tool_asks_and_tells_from_its_thread_only() -> None:
    server = Server("blocking")

    @server.tool
    def tells(call: Call) -> str:
        """From a worker thread."""
        call.blocking.progress(1, 2)
        call.blocking.log("error", "x")
        return str(call.blocking.ask("Sure?", {"type": "object", "properties": {}}).action)

    @server.tool
    async def wrong(call: Call) -> str:
        """From the loop, which would wait for itself."""
        try:
            call.blocking.log("error", "x")
        except LocalProtocolError as problem:
            return str(problem)
        return "went through"

    @server.tool(inline=True)
    def wrong_inline(call: Call) -> str:
        """The same, inline."""
        try:
            call.blocking.progress(1)
        except LocalProtocolError as problem:
            return str(problem)
        return "went through"

    capabilities: Object = {"elicitation": {}}
    async with Peer(server, capabilities=capabilities, answers=lambda method, params: {"action": "decline"}) as peer:
        assert (await peer.call("tells", progressToken=1)).text == "decline"
        assert [each["method"] for each in peer.notices] == ["notifications/progress", "notifications/message"]
        assert "worker thread" in (await peer.call("wrong")).text
        assert "worker thread" in (await peer.call("wrong_inline", progressToken=2)).text


async def test_an_inline_tool_runs_on_the_loop_in_its_own_context() -> None:
    server = Server("inline")
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    @server.tool(inline=True)
    def inline(text: str) -> str:
        """On the loop."""
        before = variable.get()
        variable.set(text)
        return f"{before} {threading.current_thread() is threading.main_thread()}"

    @server.tool(inline=True)
    def fails() -> str:
        """Fails."""
        raise ToolError("no")

    async with Peer(server) as peer:
        assert (await peer.call("inline", {"text": "a"})).text == "unset True"
        assert (await peer.call("inline", {"text": "b"})).text == "unset True"
        assert (await peer.call("fails")).text == "no"

        @server.middleware
        async def around(call: Call, following: Handler) -> ToolResult:
            await asyncio.sleep(0)
            return await following(call)

        assert (await peer.call("inline", {"text": "c"})).text == "unset True"


async def test_context_variables_do_not_leak_from_one_call_to_the_next() -> None:
    server = Server("contexts")
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    @server.tool
    async def quick(text: str) -> str:
        """Ends without waiting."""
        before = variable.get()
        variable.set(text)
        return f"{before} {variable.get()}"

    @server.tool
    async def slow(text: str) -> str:
        """Waits in between."""
        before = variable.get()
        variable.set(text)
        await asyncio.sleep(0.01)
        return f"{before} {variable.get()}"

    @server.tool
    def threaded(text: str) -> str:
        """In a worker thread."""
        before = variable.get()
        variable.set(text)
        return f"{before} {variable.get()}"

    @server.middleware
    async def around(call: Call, following: Handler) -> ToolResult:
        if call.arguments["text"].startswith("by middleware"):
            variable.set("middleware")
        return await following(call)

    async with Peer(server) as peer:
        for tool in ("quick", "slow", "threaded"):
            texts = [str(at) for at in range(10)]
            results = await asyncio.gather(*(peer.call(tool, {"text": text}) for text in texts))
            assert [result.text for result in results] == [f"unset {text}" for text in texts], tool
            inside = await peer.call(tool, {"text": "by middleware"})
            assert inside.text == "middleware by middleware", "what middleware sets, the tool sees"
            assert (await peer.call(tool, {"text": "after"})).text == "unset after"
    assert variable.get() == "unset"


async def test_tasks_timeouts_and_groups_behave_inside_tools_from_the_first_step_on() -> None:
    server = Server("asyncio")
    log: list[str] = []

    @server.tool
    async def current() -> str:
        """Before it ever waited."""
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop()
        task.set_name("mine")
        return task.get_name()

    @server.tool
    async def same() -> bool:
        """The same before and after waiting."""
        before = asyncio.current_task()
        await asyncio.sleep(0)
        return asyncio.current_task() is before

    @server.tool
    async def times_out_at_once() -> str:
        """A deadline that has passed."""
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            return "timeout"
        return "no timeout"

    @server.tool
    async def times_out_later() -> str:
        """A deadline that comes."""
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "timeout"
        return "no timeout"

    @server.tool
    async def groups() -> list[int]:
        """Children from the first step on."""

        async def child(number: int) -> int:
            await asyncio.sleep(0)
            return number

        async with asyncio.TaskGroup() as group:
            children = [group.create_task(child(number)) for number in range(3)]
        return [each.result() for each in children]

    @server.tool
    async def fails_in_a_group() -> str:
        """An exception in a child is an exception of the tool."""

        async def child() -> None:
            raise RuntimeError("secret words")

        async with asyncio.TaskGroup() as group:
            group.create_task(child())
        return "never"

    @server.tool
    async def cancels_itself() -> str:
        """Asks its own task to stop."""
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return "never"

    @server.tool
    async def shielded() -> str:
        """Runs something that outlives a timeout."""
        done = asyncio.Event()

        async def work() -> None:
            await asyncio.sleep(0.02)
            log.append("worked")
            done.set()

        job = asyncio.create_task(work())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(job), 0.001)
        await done.wait()
        return "done"

    async with Peer(server) as peer:
        assert (await peer.call("current")).text == "mine"
        assert (await peer.call("same")).structured == {"result": True}
        assert (await peer.call("times_out_at_once")).text == "timeout"
        assert (await peer.call("times_out_later")).text == "timeout"
        assert (await peer.call("groups")).structured == {"result": [0, 1, 2]}
        failed = await peer.call("fails_in_a_group")
        assert failed.is_error
        assert "secret words" not in failed.text
        cancelled = await peer.call("cancels_itself")
        assert cancelled.is_error
        assert "cancelled" in cancelled.text
        assert (await peer.call("shielded")).text == "done"
        assert log == ["worked"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, SystemExit, BaseException, StopIteration])
async def test_whatever_a_tool_raises_is_answered(kind: type[BaseException]) -> None:
    server = Server("raising")

    @server.tool
    async def at_once() -> str:
        """Raises before it waits."""
        raise kind("private")

    @server.tool
    async def later() -> str:
        """Raises after it waited."""
        await asyncio.sleep(0)
        raise kind("private")

    @server.tool
    def threaded() -> str:
        """Raises in a thread."""
        raise kind("private")

    @server.tool(inline=True)
    def inline() -> str:
        """Raises on the loop."""
        raise kind("private")

    async with Peer(server) as peer:
        for name in ("at_once", "later", "threaded", "inline"):
            answer = await peer.request("tools/call", {"name": name})
            # A GeneratorExit is Python's own way to end a coroutine, and nobody's failure.
            assert kind is GeneratorExit or answer["result"]["isError"], name
            assert "private" not in str(answer)
        assert len(await names(peer)) == 4


@pytest.mark.parametrize("text", ["plain", ValueError("of another error"), 5, None])
async def test_a_tool_error_of_any_text_is_told(text: Any) -> None:
    server = Server("errors")

    @server.tool
    async def fails() -> str:
        """Fails."""
        raise ToolError(text)

    async with Peer(server) as peer:
        result = await peer.call("fails")
        assert result.is_error
        assert result.text == str(text)


async def test_a_call_knows_who_asks_what_by_when_and_in_which_words() -> None:
    server = Server("knowing")

    @server.tool
    async def knows(a: int, call: Call, b: int = 2) -> str:
        """Everything of a call; `call` is not an argument."""
        now = asyncio.get_running_loop().time()
        return (
            f"{call.name} {call.arguments} {call.client.name} {call.revision.name} {call.principal.id} "
            f"{599 < call.deadline - now < 601} {call.cancelled} {call.state}"
        )

    assert set(server.tools[0].input_schema["properties"]) == {"a", "b"}
    async with Peer(server, revision="2026-07-28", principal=handrail.Principal("mine")) as peer:
        result = await peer.call("knows", {"a": 1})
        assert result.text == "knows {'a': 1} handrail-testing 2026-07-28 mine True False None"
