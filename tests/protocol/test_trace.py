"""Which trace a call belongs to: read as W3C says, shown to the tool, told to the log, a span of OpenTelemetry's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from handrail import Call, Limits, Server, Text, ToolError, ToolResult
from handrail.protocol.trace import Trace, read
from handrail.stores.memory import MemoryStore
from handrail.testing import Peer
from handrail.transports.http.endpoint import Endpoint
from handrail.transports.http.exchange import Receive, Scope, Send
from patience import PATIENCE
from servers_http import Client, closed as closed, fetch, served, until

R4, R5 = "2025-11-25", "2026-07-28"
REVISIONS = ("2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", R4, "pocket", R5)
ID, PARENT, OTHER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "b7ad6b7169203331"
GOOD = f"00-{ID}-{PARENT}-01"
SECRET = "hunter2-canary"


# Reading


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (GOOD, 1),
        (f"00-{ID}-{PARENT}-00", 0),
        (f"00-{ID}-{PARENT}-03", 3),
        (f"cc-{ID}-{PARENT}-01", 1),
        (f"cc-{ID}-{PARENT}-ff-what-the-future-will-be-like", 1),  # of its flags one is known
        (f"cc-{ID}-{PARENT}-fe", 0),
    ],
)
def test_a_traceparent_is_read(text: str, flags: int) -> None:
    assert read(text) == Trace(ID, PARENT, flags)


@pytest.mark.parametrize(
    "text",
    [
        "",
        GOOD.upper(),
        GOOD + " ",
        " " + GOOD,
        GOOD + "\n",
        GOOD + "-",
        GOOD + "-more",
        GOOD[:-1],
        GOOD.replace("-", ""),
        f"ff-{ID}-{PARENT}-01",
        f"0-{ID}-{PARENT}-01",
        f"000-{ID}-{PARENT}-01",
        f"0x-{ID}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{ID}-{'0' * 16}-01",
        f"00-{ID[1:]}-{PARENT}-01",
        f"00-{ID}0-{PARENT}-01",
        f"00-{ID}-{PARENT[1:]}-01",
        f"00-{ID}-{PARENT}-1",
        f"00-{ID}-{PARENT}-0g",
        f"00-{ID[:-1]}٣-{PARENT}-01",
        f"cc-{ID}-{PARENT}-01.what",
        f"cc-{ID}-{PARENT}-01x",
        f"cc-{ID}-{PARENT}-01-" + "x" * 10_000,
        None,
        17,
        True,
        [GOOD],
        {"traceparent": GOOD},
    ],
)
def test_what_is_no_traceparent_is_none(text: Any) -> None:
    assert read(text) is None


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        (" a=1 ,\tb=2 , ,", "a=1,b=2"),
        ("fw529a3039@dt=x y z", "fw529a3039@dt=x y z"),
        ("0a/b*c_d-e=1", "0a/b*c_d-e=1"),
        (",".join(f"k{number}=1" for number in range(32)), ",".join(f"k{number}=1" for number in range(32))),
        (",".join(f"k{number}=1" for number in range(33)), ""),
        ("a=1,a=2", ""),
        ("a=1,B=2", ""),
        ("a", ""),
        ("a=", ""),
        ("=1", ""),
        ("a=1=2", ""),
        ("a=1,b=\x1b[31m", ""),
        ("a=ü", ""),
        ("a" * 257 + "=1", ""),
        ("a=" + "1" * 257, ""),
        ("," * 10_000, ""),
        (["a=1"], ""),
        (None, ""),
    ],
)
def test_a_tracestate_is_kept_whole_or_not_at_all(text: Any, kept: str) -> None:
    assert read(GOOD, text) == Trace(ID, PARENT, 1, kept)


@pytest.mark.parametrize(
    ("text", "kept"),
    [("user=alice,x=%20", "user=alice,x=%20"), ("a=\x07", ""), ("a=\n", ""), ("a" * 8193, ""), (1, ""), (None, "")],
)
def test_baggage_is_text_or_nothing(text: Any, kept: str) -> None:
    assert read(GOOD, None, text) == Trace(ID, PARENT, 1, "", kept)


HEX = "0123456789abcdef"


def _by_the_book(text: str) -> Trace | None:
    """The steps of https://www.w3.org/TR/trace-context/#versioning-of-traceparent, one by one."""
    if len(text) < 55 or any(text[at] != "-" for at in (2, 35, 52)):
        return None
    version, trace, parent, flags = text[:2], text[3:35], text[36:52], text[53:55]
    if any(each not in HEX for each in version + trace + parent + flags):
        return None
    if version == "ff" or set(trace) == {"0"} or set(parent) == {"0"}:
        return None
    if len(text) > 55 and (version == "00" or text[55] != "-"):
        return None
    bits = int(flags, 16)
    return Trace(trace, parent, bits if version == "00" else bits & 1)


hexes = st.text(HEX, min_size=0, max_size=40)
well_formed = st.builds(
    "{}-{}-{}-{}{}".format,
    st.sampled_from(["00", "01", "cc", "fe", "ff"]) | st.text(HEX, min_size=2, max_size=2),
    st.just("0" * 32) | st.text(HEX, min_size=32, max_size=32),
    st.just("0" * 16) | st.text(HEX, min_size=16, max_size=16),
    st.text(HEX, min_size=2, max_size=2),
    st.sampled_from(["", "-", "-more", ".", "x"]),
)


@st.composite
def nearly(draw: st.DrawFn) -> str:
    """A good one with a few characters changed, taken out or put in."""
    text = list(draw(well_formed))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, max(0, len(text) - 1)))
        text[at : at + draw(st.integers(0, 1))] = draw(st.text("0afgA-\x00 é", max_size=1))
    return "".join(text)


@given(nearly() | st.builds("{}-{}-{}-{}".format, hexes, hexes, hexes, hexes) | st.text(max_size=80))
@example(GOOD)
def test_traceparent_is_read_as_the_specification_says(text: str) -> None:
    assert read(text) == _by_the_book(text)


@given(st.text("0123456789abcdef", min_size=32, max_size=32), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_what_is_sent_on_is_read_as_the_same(trace: str, parent: int, flags: int) -> None:
    known = Trace(trace, f"{parent:016x}", flags)
    assert read(known.traceparent) == (known if int(trace, 16) else None)


# A call


def teller() -> Server:
    server = Server("teller")

    @server.tool
    async def tell(call: Call) -> dict[str, Any]:
        """The trace of the call."""
        found = call.trace
        return {"found": None if found is None else [found.trace_id, found.parent_id, found.state, found.baggage]}

    @server.tool
    def tell_in_thread(call: Call) -> str:
        """The same from a thread."""
        return "none" if call.trace is None else call.trace.traceparent

    @server.tool
    async def breaks() -> str:
        """Fails."""
        raise RuntimeError(SECRET)

    return server


def _text(result: ToolResult) -> str:
    (block,) = result.content
    assert isinstance(block, Text)
    return block.text


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_tool_sees_the_trace_its_client_names(revision: str) -> None:
    async with Peer(teller(), revision=revision) as peer:
        assert _text(await peer.call("tell_in_thread", traceparent=GOOD)) == GOOD
        assert _text(await peer.call("tell_in_thread")) == "none"


@pytest.mark.parametrize("wrong", ["nonsense", 17, None, [GOOD], {"a": 1}, f"00-{'0' * 32}-{PARENT}-01"])
@pytest.mark.parametrize("revision", [R4, R5])
async def test_a_wrong_trace_is_no_error(revision: str, wrong: Any) -> None:
    async with Peer(teller(), revision=revision) as peer:
        result = await peer.call("tell", traceparent=wrong, tracestate=wrong, baggage=wrong)
        assert result.structured == {"found": None}


HEADER = GOOD.replace(PARENT, OTHER)


@pytest.mark.parametrize(
    ("meta", "headers", "found"),
    [
        ({"traceparent": GOOD, "tracestate": "a=1", "baggage": "b=2"}, [], [ID, PARENT, "a=1", "b=2"]),
        ({}, [("Traceparent", HEADER), ("Tracestate", "a=1"), ("Baggage", "b=2")], [ID, OTHER, "a=1", "b=2"]),
        ({"traceparent": GOOD}, [("traceparent", HEADER), ("tracestate", "a=1")], [ID, PARENT, "", ""]),
        ({"traceparent": "wrong"}, [("traceparent", HEADER)], [ID, OTHER, "", ""]),
        ({}, [("traceparent", "wrong"), ("tracestate", "a=1")], None),
        ({}, [("traceparent", HEADER), ("traceparent", GOOD)], None),
        (
            {},
            [("traceparent", HEADER), ("tracestate", "a=1"), ("tracestate", "b=2")],
            [ID, OTHER, "a=1,b=2", ""],
        ),
        ({}, [("tracestate", "a=1")], None),
        ({}, [], None),
    ],
    ids=["meta", "headers", "meta wins", "bad meta", "bad header", "two headers", "two states", "only state", "none"],
)
@pytest.mark.parametrize("revision", [R4, R5])
async def test_over_http_headers_count_where_meta_says_nothing(
    revision: str, meta: dict[str, Any], headers: list[tuple[str, str]], found: list[str] | None
) -> None:
    async with served(teller().asgi()) as url:
        client = await Client(url, revision).open()
        message = client.call(1, "tell", **meta)
        pairs = [*client.headers(message).items(), *headers]
        answer = await client.read(await fetch(url, "POST", pairs, _bytes(message)))
    assert answer["result"]["structuredContent"] == {"found": found}


async def test_the_stream_of_2024_lends_its_trace_to_no_message() -> None:
    async with served(teller().asgi()) as url:
        stream = await fetch(url, "GET", {"Accept": "text/event-stream", "traceparent": GOOD})
        events = stream.events()
        address = url.removesuffix("/mcp") + (await anext(events))["data"]
        client = Client(address, "2024-11-05")
        params = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "rig", "version": "1"}}
        for message in (client.message(1, "initialize", params), client.call(2, "tell_in_thread")):
            await fetch(address, "POST", {"Content-Type": "application/json"}, _bytes(message))
        async with asyncio.timeout(PATIENCE):
            said = [each["data"] async for each in _two(events)]
    assert '"text":"none"' in said[1]


async def _two(events: Any) -> Any:
    for _ in range(2):
        yield await anext(events)


def _bytes(message: Any) -> bytes:
    return json.dumps(message).encode()


async def test_the_log_of_a_call_names_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    async with Peer(teller()) as peer:
        await peer.call("breaks", traceparent=GOOD)
        await peer.call("breaks")
    assert [each.getMessage() for each in caplog.records] == [
        f"tool 'breaks' failed in trace {ID}",
        "tool 'breaks' failed",
    ]


# Spans


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    found = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    otel.set_tracer_provider(provider)
    return found


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Callable[[], list[ReadableSpan]]:
    exporter.clear()
    return lambda: list(exporter.get_finished_spans())


class Traced:
    """A server with spans, and what a test waits for."""

    def __init__(self, **options: Any) -> None:
        self.server = server = Server("traced", tracing=True, **options)
        self.begun = asyncio.Event()

        @server.tool
        async def echo(text: str) -> str:
            """Give the text back."""
            _work()
            return text

        @server.tool
        def in_thread() -> str:
            """Work in a thread."""
            _work()
            return "done"

        @server.tool(inline=True)
        def in_place() -> str:
            """Work on the loop."""
            _work()
            return "done"

        @server.tool
        async def fails() -> str:
            """Tell why."""
            raise ToolError(SECRET)

        @server.tool
        async def crashes() -> str:
            """Break."""
            raise RuntimeError(SECRET)

        @server.tool
        async def waits() -> str:
            """Never come back."""
            self.begun.set()
            await asyncio.Event().wait()
            return "never"

        @server.tool(timeout=0.01)
        async def slow() -> str:
            """Take too long."""
            await asyncio.Event().wait()
            return "never"

        @server.tool
        async def asks(call: Call) -> str:
            """Ask."""
            return (await call.ask("Your name?", {"type": "object", "properties": {"a": {"type": "string"}}})).action


def _work() -> None:
    with otel.get_tracer("work").start_as_current_span("work"):
        pass


Spans = Callable[[], list[ReadableSpan]]


def _only(spans: Spans) -> ReadableSpan:
    (found,) = [each for each in spans() if each.name.startswith("tools/call")]
    return found


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_call_is_a_span_as_the_conventions_have_it(revision: str, spans: Spans) -> None:
    async with Peer(Traced().server, revision=revision) as peer:
        await peer.call("echo", {"text": SECRET}, traceparent=GOOD, tracestate="a=1")
    span = _only(spans)
    assert (span.name, span.kind, span.status.status_code) == (
        "tools/call echo",
        otel.SpanKind.SERVER,
        otel.StatusCode.UNSET,
    )
    assert span.attributes is not None
    assert dict(span.attributes) == {
        "mcp.method.name": "tools/call",
        "mcp.protocol.version": revision,
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "echo",
        "jsonrpc.request.id": span.attributes["jsonrpc.request.id"],
        "network.transport": "pipe",
    }
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == ID
    assert (f"{span.parent.span_id:016x}", span.parent.is_remote) == (PARENT, True)
    assert span.context.trace_state.to_header() == "a=1"
    assert SECRET not in span.to_json()


@pytest.mark.parametrize("tool", ["echo", "in_thread", "in_place"])
async def test_what_a_tool_does_is_part_of_its_span(tool: str, spans: Spans) -> None:
    async with Peer(Traced().server) as peer:
        await peer.call(tool, {"text": "x"} if tool == "echo" else {})
    (work,) = [each for each in spans() if each.name == "work"]
    assert work.parent == _only(spans).context


@pytest.mark.parametrize(
    ("tool", "arguments", "revision", "error", "status"),
    [
        ("fails", {}, R4, "tool_error", "tool_error"),
        ("crashes", {}, R5, "tool_error", "tool_error"),
        ("echo", {"text": 17}, R4, "tool_error", "bad_arguments"),  # a result there, an error before
        ("echo", {"text": 17}, "2025-06-18", "-32602", "bad_arguments"),
        ("slow", {}, R5, None, "timeout"),
    ],
)
async def test_a_failure_is_an_error_of_the_span(
    tool: str, arguments: dict[str, Any], revision: str, error: str | None, status: str, spans: Spans
) -> None:
    async with Peer(Traced().server, revision=revision) as peer:
        await peer.request("tools/call", {"name": tool, "arguments": arguments})
        await until(lambda: bool(spans()))
    span = _only(spans)
    assert (span.status.status_code, span.status.description) == (otel.StatusCode.ERROR, status)
    assert span.attributes is not None
    if error is not None:
        assert span.attributes["error.type"] == error
        assert span.attributes.get("rpc.response.status_code") == (error if error.startswith("-") else None)
    assert not span.events and SECRET not in span.to_json()


async def test_a_form_chosen_for_wrong_arguments_is_the_spans_too(spans: Spans) -> None:
    async with Peer(Traced(invalid_arguments="error").server, revision=R5) as peer:
        await peer.request("tools/call", {"name": "echo", "arguments": {}})
    found = _only(spans).attributes
    assert found is not None and found["error.type"] == "-32602"


async def test_a_call_nobody_wants_any_more_is_a_cancelled_span(spans: Spans) -> None:
    traced = Traced(limits=Limits(grace_seconds=0.1))
    async with Peer(traced.server) as peer:
        waiting = asyncio.create_task(peer.request("tools/call", {"name": "waits"}))
        async with asyncio.timeout(PATIENCE):
            await traced.begun.wait()
        waiting.cancel()
    await until(lambda: bool(spans()))
    span = _only(spans)
    assert span.attributes is not None
    assert (span.attributes["error.type"], span.status.description) == ("cancelled", "cancelled")


async def test_a_question_is_no_failure(spans: Spans) -> None:
    async with Peer(
        Traced().server, revision=R5, capabilities={"elicitation": {}}, answers=lambda *asked: {"action": "decline"}
    ) as peer:
        await peer.call("asks")
    assert [each.status.status_code for each in spans()] == [otel.StatusCode.UNSET] * 2


@pytest.mark.parametrize("revision", [R4, R5])
async def test_over_http_a_header_is_the_parent(revision: str, spans: Spans) -> None:
    async with served(Traced().server.asgi()) as url:
        client = await Client(url, revision).open()
        await client.ask(client.call(1, "echo", {"text": "x"}), traceparent=GOOD)
    span = _only(spans)
    assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT
    assert span.attributes is not None
    assert (span.attributes["network.transport"], span.attributes["network.protocol.name"]) == ("tcp", "http")


@pytest.mark.parametrize("named", [True, False])
async def test_what_surrounds_the_server_is_linked_or_the_parent(named: bool, spans: Spans) -> None:
    """With `_meta` the client's span is the parent, whatever carried the message; else whoever carried it is."""

    class Instrumented(Endpoint):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            with otel.get_tracer("carrier").start_as_current_span("carrier"):
                await super().__call__(scope, receive, send)

    async with served(Instrumented(Traced().server.engine, MemoryStore)) as url:
        client = Client(url, R5)
        meta = {"traceparent": GOOD} if named else {}
        await client.ask(client.call(1, "echo", {"text": "x"}, **meta), traceparent=HEADER)
    span, carriers = _only(spans), [each.context for each in spans() if each.name == "carrier"]
    assert span.parent is not None
    if named:
        assert f"{span.parent.span_id:016x}" == PARENT
        assert [link.context for link in span.links] == carriers[:1]
    else:
        assert span.parent in carriers and not span.links


async def test_without_tracing_there_is_no_span(spans: Spans) -> None:
    async with Peer(teller()) as peer:
        await peer.call("tell", traceparent=GOOD)
    assert spans() == []


OFF = "import sys; from handrail import Server; Server('x'); sys.exit('opentelemetry' in sys.modules)"
MISSING = """
import sys
sys.modules["opentelemetry"] = None
from handrail import Server
Server("x")
try:
    Server("x", tracing=True)
except ModuleNotFoundError as problem:
    assert "python -m pip install 'opentelemetry-api" in str(problem), problem
else:
    sys.exit("it did not say what is missing")
"""


@pytest.mark.parametrize("code", [OFF, MISSING], ids=["off", "missing"])
def test_opentelemetry_is_needed_only_by_whoever_asks_for_it(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")
