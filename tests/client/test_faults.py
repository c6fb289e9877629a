"""Servers that misbehave: whatever they do ends in bounded time, with the right error, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import rigs_faults
from clients import R1, R4, R5, Heard
from faults import gone, until
from handrail import CallResult, Client, Clocks, Elicitation, Progress
from handrail.errors import (
    CallTimeout,
    HttpRefused,
    InvalidResult,
    PeerError,
    RemoteProtocolError,
    Sent,
    TransportError,
)
from handrail.transports.subprocess import SubprocessTransport
from patience import PATIENCE, in_time
from requirements import record_ran, requirement
from rigs import VERSION, HttpRig, Object, Rig, command, ordinary
from rigs_faults import ODD, SseRig
from standing import Standing, forget_memory, memory

Place = tuple[str, str]

MEMORY: list[Place] = [(R4, "memory"), (R5, "memory")]
STDIO: list[Place] = [(R4, "stdio"), (R5, "stdio")]
HTTP: list[Place] = [(R4, "http"), (R5, "http")]
SSE: list[Place] = [(R1, "sse"), (R4, "sse")]
PIPES = [*MEMORY, *STDIO, *SSE]  # where nothing but its id says whose an answer is
EVERYWHERE = [*PIPES, *HTTP]
OLD_ONES = [place for place in EVERYWHERE if place[0] != R5]
NEW_ONES = [place for place in EVERYWHERE if place[0] == R5]

NAMES = {"memory": "rig", "stdio": Path(sys.executable).name, "http": "127.0.0.1", "sse": "127.0.0.1"}
SHORT = Clocks(first=1.2, idle=1.2, total=2.0)
PROMPTLY = 5.0  # what takes no clock is over long before
MEBIBYTE = 1024 * 1024

OpenFault = Callable[..., AbstractAsyncContextManager[tuple[Client, Heard]]]


@pytest.fixture(autouse=True)
async def _nothing_is_left() -> AsyncIterator[None]:
    """After each test there is nothing that was not there before."""
    before = Standing.now()
    yield
    await before.back()


@pytest.fixture
def open_fault(request: pytest.FixtureRequest, tmp_path: Path) -> OpenFault:
    """`async with open_fault(script, (revision, transport), **options of Client) as (client, heard)`."""

    @asynccontextmanager
    async def opened(
        script: str, place: Place, /, *, knows: dict[str, str] | None = None, **options: Any
    ) -> AsyncIterator[tuple[Client, Heard]]:
        spoken, transport = place
        options = {"revision": spoken, "timeout": PATIENCE, **options}
        record_ran(request, spoken, "http" if transport == "sse" else transport)
        if transport == "stdio":
            log = tmp_path / f"{script}-{spoken}.log"
            async with Client(command(script, log, spoken), env=knows, **options) as client:
                yield client, Heard(Rig(script, spoken), log)
            return
        kinds = {"memory": Rig, "http": HttpRig, "sse": SseRig}
        rig = kinds[transport](script, spoken)
        rig.state |= knows or {}
        try:
            if isinstance(rig, HttpRig):
                options["transport"] = "sse" if transport == "sse" else "auto"
                async with rig.listening() as url, Client(url, **options) as client:
                    yield client, Heard(rig, None)
            else:
                async with Client(rig, **options) as client:
                    yield client, Heard(rig, None)
        finally:
            for task in rig.state.get("tasks", []):
                task.cancel()

    return opened


async def at_all(places: Iterable[Place], one: Callable[[Place], Coroutine[Any, Any, None]]) -> None:
    """The same at several places at once; a failure says where."""

    async def run(place: Place) -> None:
        try:
            await one(place)
        except BaseException as problem:
            problem.add_note(f"at {place}")
            raise

    async with asyncio.TaskGroup() as group:
        for place in places:
            group.create_task(run(place))


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """It takes no longer on a machine that does nothing else; and if it never ends, the test does."""
    began = time.monotonic()
    async with asyncio.timeout(PATIENCE):
        yield
    in_time(time.monotonic() - began, seconds)


async def refused(
    work: Awaitable[Any], place: Place, kind: type[PeerError], sent: Sent, phase: str, text: str = ""
) -> Any:
    """What a call ends with, which has to be just this."""
    with pytest.raises(kind) as caught:
        await work
    error = caught.value
    assert type(error) is kind, repr(error)
    assert error.sent is sent, f"{error.sent!r}: {error}"
    assert error.server == NAMES[place[1]]
    assert error.phase == phase
    assert text in str(error)
    assert len(str(error)) < 2_000
    return error


async def is_fine(client: Client) -> None:
    """The next call is answered."""
    assert (await client.call("fine", {"a": 1})).text == '{"a": 1}'


# Answers


class Case(NamedTuple):
    """How a bad call ends: with an error, or with a result that says `ok`."""

    script: str
    places: list[Place]
    error: type[PeerError] | None
    sent: Sent = Sent.FAILED
    text: str = ""
    clock: str = ""


NOT_A_MESSAGE = "the answer is not a message"
UNREADABLE = [
    "result_and_error",
    "neither_result_nor_error",
    "nan",
    "duplicate_keys",
    "invalid_utf8",
    "long_number",
    "lone_surrogate",
    "nested_200_deep",
]
ANSWERS = [
    Case("answers_twice", EVERYWHERE, None),
    Case("answers_unasked", PIPES, None),
    Case("answers_unasked", HTTP, RemoteProtocolError, text="answered with the id 999999"),
    Case("wrong_id", PIPES, CallTimeout, Sent.UNKNOWN, clock="first"),
    Case("wrong_id", HTTP, RemoteProtocolError, text="answered with the id 999999"),
    Case("id_as_text", PIPES, CallTimeout, Sent.UNKNOWN, clock="first"),
    Case("id_as_text", HTTP, RemoteProtocolError, text="answered with the id '"),
    Case("silent", EVERYWHERE, CallTimeout, Sent.UNKNOWN, clock="first"),
    Case("error_without_id", EVERYWHERE, RemoteProtocolError, text="cannot read that"),
    Case("error_not_object", EVERYWHERE, RemoteProtocolError, text="an error that is not an object"),
    Case("result_not_object", EVERYWHERE, RemoteProtocolError, text="the result is not an object"),
    *[Case(script, EVERYWHERE, RemoteProtocolError, text=NOT_A_MESSAGE) for script in UNREADABLE],
    # Where the id cannot be read, a message can only be guessed to be the answer.
    Case("nested_100000_deep", EVERYWHERE, RemoteProtocolError, Sent.UNKNOWN, NOT_A_MESSAGE),
    Case("too_many_parts", EVERYWHERE, RemoteProtocolError, Sent.UNKNOWN, NOT_A_MESSAGE),
    Case("answer_after_5000", [*MEMORY, *STDIO], CallTimeout, Sent.UNKNOWN, clock="first"),
    Case("answer_after_5000", SSE, CallTimeout, Sent.UNKNOWN, clock="idle"),  # it comes in parts
    Case("answer_after_5000", HTTP, HttpRefused, Sent.UNKNOWN, "the answer to something else"),
    Case("progress_of_900_digits", EVERYWHERE, CallTimeout, Sent.UNKNOWN, clock="first"),
    Case("dies", MEMORY, TransportError, Sent.UNKNOWN, "the rig has ended"),
    Case("dies", STDIO, TransportError, Sent.UNKNOWN, "exited with code 3"),
    Case("dies", HTTP, TransportError, Sent.UNKNOWN, "broke"),
    Case("dies", SSE, TransportError, Sent.UNKNOWN, "the event stream"),
    # A process
    Case("half_a_line", STDIO, TransportError, Sent.UNKNOWN, "exited with code 3"),
    Case("half_a_line_that_looks_whole", STDIO, TransportError, Sent.UNKNOWN, "exited with code 3"),
    Case("bar_before_answer", STDIO, RemoteProtocolError, Sent.UNKNOWN, NOT_A_MESSAGE),
    Case("closes_output", STDIO, TransportError, Sent.UNKNOWN, "closed its output"),
    Case("closes_input", STDIO, CallTimeout, Sent.UNKNOWN, clock="first"),
    Case("fills_stderr", STDIO, None),
    # HTTP
    Case("half_a_body", HTTP, TransportError, Sent.UNKNOWN, "broke"),
    Case("half_a_chunk", HTTP, TransportError, Sent.UNKNOWN, "broke"),
    Case("no_last_chunk", HTTP, TransportError, Sent.UNKNOWN, "broke"),
    Case("half_a_head", HTTP, TransportError, Sent.UNKNOWN, "broke"),
    Case("head_for_ever", HTTP, TransportError, Sent.UNKNOWN, "did not answer in HTTP"),
    Case("not_http", HTTP, TransportError, Sent.UNKNOWN, "did not answer in HTTP"),
    Case("junk_after_events", HTTP, TransportError, Sent.UNKNOWN, "did not answer in HTTP"),
    Case("half_an_event", HTTP, TransportError, Sent.UNKNOWN, "the event stream ended"),
    Case("half_an_event", SSE, TransportError, Sent.UNKNOWN, "the event stream of"),
    Case("event_without_end", HTTP, TransportError, Sent.UNKNOWN, "the event stream ended"),
    Case("event_without_end", SSE, TransportError, Sent.UNKNOWN, "the event stream of"),
    Case("half_a_chunk_of_events", HTTP, TransportError, Sent.UNKNOWN, "the event stream ended"),
    Case("no_answer_in_events", HTTP, TransportError, Sent.UNKNOWN, "the event stream ended"),
    Case("html_page", HTTP, HttpRefused, Sent.UNKNOWN, "text/html, not a message"),
    Case("answer_as_text", HTTP, HttpRefused, Sent.UNKNOWN, "text/plain, not a message"),
    Case("redirects_to_itself", HTTP, HttpRefused, text="HTTP 308"),
    Case("status_202", HTTP, HttpRefused, Sent.UNKNOWN, "HTTP 202"),
    Case("status_500", HTTP, HttpRefused, Sent.UNKNOWN, "HTTP 500: oops"),
    Case("status_429", HTTP, HttpRefused, text="Try again in 7 s"),
    Case("trickle_of_head", HTTP, CallTimeout, Sent.UNKNOWN, clock="first"),
]


def _called(case: Case) -> str:
    return f"{case.script}-{case.places[0][1]}"


@requirement("P-35", "CLI-25")
@pytest.mark.parametrize("case", ANSWERS, ids=_called)
async def test_a_bad_answer_ends_one_call_and_no_other(open_fault: OpenFault, case: Case) -> None:
    async def one(place: Place) -> None:
        async with open_fault(case.script, place) as (client, _):
            await client.tools()
            clocks = SHORT if case.clock else None
            async with within(SHORT.total + 1 if case.clock else PROMPTLY):
                call = client.call("echo", {"bad": True}, timeout=clocks)
                if case.error is None:
                    assert (await call).text == "ok"
                else:
                    error = await refused(call, place, case.error, case.sent, "tools/call echo", case.text)
                    # Over HTTP a rig that says nothing has begun to answer.
                    begun = case.script == "silent" and place[1] == "http"
                    assert getattr(error, "clock", "") == ("idle" if begun else case.clock)
            async with within(PROMPTLY):
                await is_fine(client)

    await at_all(case.places, one)


async def test_the_twin_of_them_all_does_nothing_wrong(open_fault: OpenFault) -> None:
    async def one(place: Place) -> None:
        async with open_fault("ordinary", place) as (client, heard):
            assert [tool.name for tool in await client.tools()] == ["echo"]
            assert (await client.call("echo", {"bad": True})).text == '{"bad": true}'
            await is_fine(client)
            assert len(heard.asked("tools/call")) == 2

    await at_all(EVERYWHERE, one)


@requirement("P-35", "CLI-25")
@pytest.mark.parametrize(
    ("script", "places"),
    [
        ("progress_for_ever", PIPES),
        ("progress_events_for_ever", HTTP),
        ("logs_for_ever", PIPES),
        ("comments_for_ever", [*HTTP, *SSE]),
        ("event_for_ever", [*HTTP, *SSE]),
        ("trickle", [*HTTP, *SSE]),
    ],
)
async def test_signs_of_life_feed_the_idle_clock_and_never_the_total_one(
    open_fault: OpenFault, script: str, places: list[Place]
) -> None:
    async def one(place: Place) -> None:
        async with open_fault(script, place) as (client, _):
            await client.tools()
            async with within(SHORT.total + 1):
                call = client.call("echo", {"bad": True}, timeout=SHORT)
                error = await refused(call, place, CallTimeout, Sent.UNKNOWN, "tools/call echo")
            assert error.clock == "total"
            assert error.progress == (Progress(1) if "progress" in script else None)
            if place[1] == "sse" and script in ("event_for_ever", "trickle"):
                # The next answer falls into the middle of it.
                await refused(
                    client.call("fine", {}), place, RemoteProtocolError, Sent.UNKNOWN, "tools/call fine", NOT_A_MESSAGE
                )
            else:
                await is_fine(client)

    await at_all(places, one)


@requirement("P-35")
@pytest.mark.parametrize("script", ODD)
async def test_an_odd_result_is_a_result_and_can_be_looked_at(open_fault: OpenFault, script: str) -> None:
    async def one(place: Place) -> None:
        async with open_fault(script, place) as (client, _):
            result = await client.call("echo", {"bad": True})
            assert {name: result.raw[name] for name in ODD[script]} == ODD[script]
            seen = (result.text, result.data, result.content, result.problems, result.risk, repr(result))
            assert seen and isinstance(result.is_error, bool)
            assert isinstance(result.for_model(), str)
            assert isinstance(result.for_model("anthropic"), list) and isinstance(result.for_model("openai"), list)
            await is_fine(client)

    await at_all([*MEMORY, *HTTP], one)


@requirement("CLI-38")
async def test_content_of_an_unknown_type_survives(open_fault: OpenFault) -> None:
    async def one(place: Place) -> None:
        async with open_fault("unknown_content", place) as (client, _):
            result = await client.call("echo", {"bad": True})
            assert result.content == [{"type": "hologram", "beams": 3}]
            assert result.text == "" and result.for_model() == "[hologram]"
            await is_fine(client)

    await at_all(EVERYWHERE, one)


# Lists


def reads(depth: int) -> bool:
    """Whether the parser goes so deep, as from Python 3.12 on: then it is known whose answer it is."""
    try:
        msgspec.json.decode(b"[" * depth + b"]" * depth)
        return True
    except RecursionError:
        return False


@requirement("P-35", "CLI-19")
@pytest.mark.parametrize(
    ("script", "kind", "text"),
    [
        ("tools_not_list", InvalidResult, "there is no list of tools"),
        ("tools_missing", InvalidResult, "there is no list of tools"),
        ("cursor_not_text", InvalidResult, "the cursor 7 is not a text"),
        ("pages_for_ever", InvalidResult, "over 100 pages"),
        ("cursor_again", InvalidResult, "the cursor 'again' came before"),
        ("cursors_in_turn", InvalidResult, "the cursor 'a' came before"),
        ("tools_1001", InvalidResult, "over 1,000 tools"),
        ("list_nested_1000_deep", RemoteProtocolError, NOT_A_MESSAGE),
    ],
)
async def test_a_bad_list_is_an_error_and_the_next_one_is_read(
    open_fault: OpenFault, script: str, kind: type[PeerError], text: str
) -> None:
    async def one(place: Place) -> None:
        async with open_fault(script, place) as (client, heard), within(PROMPTLY):
            unsure = script == "list_nested_1000_deep" and not reads(1000)
            await refused(client.tools(), place, kind, Sent.UNKNOWN if unsure else Sent.FAILED, "tools/list", text)
            assert len(heard.asked("tools/list")) <= 101
            assert [tool.name for tool in await client.tools()] == ["echo"]
            await is_fine(client)

    await at_all(EVERYWHERE, one)


@requirement("P-35")
async def test_a_call_whose_list_is_bad_was_not_sent(open_fault: OpenFault) -> None:
    """Nobody could be asked to agree to it."""

    async def one(place: Place) -> None:
        async with open_fault("tools_not_list", place) as (client, heard):
            await refused(client.call("echo", {}), place, InvalidResult, Sent.NO, "tools/list")
            assert not heard.asked("tools/call")
            await is_fine(client)

    await at_all(EVERYWHERE, one)


@requirement("P-35")
async def test_p35_a_list_of_10_mb_is_not_read(open_fault: OpenFault) -> None:
    async def one(place: Place) -> None:
        async with open_fault("list_of_10_mb", place) as (client, _), within(PROMPTLY):
            if place[1] == "http":  # asked for once more, as after any broken connection
                assert [tool.name for tool in await client.tools()] == ["echo"]
            else:
                await refused(client.tools(), place, RemoteProtocolError, Sent.UNKNOWN, "tools/list", "too long")
            await is_fine(client)

    await at_all([*STDIO, *HTTP, *SSE], one)


@requirement("P-35")
async def test_a_description_of_1_mb_leaves_its_tool_out(open_fault: OpenFault) -> None:
    async def one(place: Place) -> None:
        async with open_fault("description_of_1_mb", place) as (client, _):
            tools = await client.tools()
            assert [tool.name for tool in tools] == ["fine"]
            assert "description" in tools.refused["novel"]
            await is_fine(client)

    await at_all(EVERYWHERE, one)


@requirement("P-35")
@pytest.mark.parametrize("script", ["ttl_of_400_digits", "capability_is_true"])
async def test_odd_values_around_a_list_do_no_harm(open_fault: OpenFault, script: str) -> None:
    async def one(place: Place) -> None:
        async with open_fault(script, place) as (client, _):
            assert len(await client.tools()) == 1
            await is_fine(client)

    await at_all(EVERYWHERE, one)


# Promises about results


class Canary:
    """A place nobody may ask for anything; counts who does."""

    def __init__(self) -> None:
        self.hits = 0
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.hits += 1
        writer.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}/schema.json"
        try:
            yield self.url
        finally:
            server.close()


@requirement("P-06", "P-35", "CLI-22")
@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("promise_broken", "sum: expected number"),
        ("promise_backtracks", "does not match"),
        ("promise_backtracks_more", "does not match"),
        ("promise_is_recursive_and_broken", "/x/x/x: expected object"),
    ],
)
async def test_a_broken_promise_is_told_at_once_whatever_it_was(open_fault: OpenFault, script: str, text: str) -> None:
    async def one(place: Place) -> None:
        async with open_fault(script, place) as (client, _):
            await client.tools()
            async with within(PROMPTLY):
                error = await refused(client.call("sum", {}), place, InvalidResult, Sent.FAILED, "tools/call sum", text)
            assert isinstance(error.result, CallResult) and "structuredContent" in error.result.raw
            await is_fine(client)

    await at_all(EVERYWHERE, one)


@requirement("P-06", "P-35", "CLI-22")
@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("promise_looks_around", "no look-around"),
        ("promise_refers_back", "no back-references"),
        ("promise_nested_90_deep", "nested deeper than 64"),
        ("promise_in_a_loop", "in a loop"),
        ("promise_unfolds", "unfold"),
        ("promise_is_recursive", ""),
        ("promise_is_a_number", ""),
    ],
)
async def test_a_promise_that_cannot_be_checked_is_said_to_be_one(
    open_fault: OpenFault, script: str, text: str
) -> None:
    async def one(place: Place) -> None:
        async with open_fault(script, place) as (client, _):
            await client.tools()
            async with within(PROMPTLY):
                result = await client.call("sum", {})
            assert "structuredContent" in result.raw
            assert text in "".join(result.problems) and bool(text) == bool(result.problems)
            await is_fine(client)

    await at_all(EVERYWHERE, one)


@requirement("CLI-23", "P-35")
@pytest.mark.parametrize("script", ["promise_elsewhere", "promise_of_dialect_elsewhere"])
async def test_nothing_is_fetched_to_check_a_promise(open_fault: OpenFault, script: str) -> None:
    canary = Canary()

    async def one(place: Place) -> None:
        async with open_fault(script, place, knows={"CANARY": canary.url}) as (client, _):
            (tool,) = [tool for tool in await client.tools() if tool.name == "sum"]
            assert canary.url in json.dumps(tool.output_schema)
            result = await client.call("sum", {})
            assert len(result.problems) == 1
            await is_fine(client)

    async with canary.listening():
        await at_all(EVERYWHERE, one)
        assert canary.hits == 0


@requirement("P-35")
async def test_nothing_is_sent_to_another_place(open_fault: OpenFault) -> None:
    canary = Canary()

    async def one(place: Place) -> None:
        async with open_fault("redirects", place, knows={"CANARY": canary.url}) as (client, _):
            await client.tools()
            call = client.call("echo", {"bad": True})
            error = await refused(call, place, HttpRefused, Sent.FAILED, "tools/call echo", "not followed")
            assert error.status == 307
            await is_fine(client)

    async with canary.listening():
        await at_all(HTTP, one)
        assert canary.hits == 0


# Too much


@requirement("P-35")
@pytest.mark.parametrize(
    ("script", "places"),
    [
        ("line_of_100_mb", STDIO),
        ("answer_of_100_mb", STDIO),
        ("body_of_100_mb", HTTP),
        ("chunks_of_100_mb", HTTP),
        ("event_of_100_mb", [*HTTP, *SSE]),
        ("gzip_bomb", HTTP),
        ("gzip_events", HTTP),
        ("refusal_of_100_mb", HTTP),
        ("page_of_100_mb", HTTP),
    ],
)
async def test_100_mb_are_not_kept(open_fault: OpenFault, script: str, places: list[Place]) -> None:
    if script.startswith("gzip") and not rigs_faults.BOMBS:
        rigs_faults.BOMBS[0] = rigs_faults.bomb({"id": 3})
    for place in places:
        async with open_fault(script, place) as (client, _):
            await client.tools()
            gc.collect()
            before = memory("VmRSS")
            forget_memory()
            async with within(PROMPTLY):
                with pytest.raises(PeerError) as caught:
                    await client.call("echo", {"bad": True})
                if (script, place[1]) == ("event_of_100_mb", "sse"):
                    with pytest.raises(PeerError):  # falls into the rest of it, or into the end of the stream
                        await client.call("fine", {})
                await is_fine(client)
            grown = memory("VmHWM") - before
            assert grown < 3 * 4 * MEBIBYTE, f"{grown / MEBIBYTE:.1f} MiB more at {place}"
            error = caught.value
            assert error.server == NAMES[place[1]] and error.phase == "tools/call echo"
            if script == "refusal_of_100_mb":
                assert type(error) is HttpRefused and error.sent is Sent.FAILED
            else:
                assert isinstance(error, TransportError | RemoteProtocolError) and error.sent is Sent.UNKNOWN
                assert "over 4,194,304 bytes" in str(error) or "not a message" in str(error)


@requirement("P-35")
@pytest.mark.parametrize(
    "script",
    [
        "flood_of_notifications",
        "flood_of_changes",
        "flood_of_logs",
        "flood_of_progress",
        "flood_of_acknowledgements",
        "flood_of_answers",
        "flood_of_pings",
    ],
)
async def test_a_flood_does_not_drown_the_answer(
    open_fault: OpenFault, script: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard = [0]

    def count(*_: object) -> None:
        heard[0] += 1

    places = [(R5, "stdio"), (R4, "http")]
    if script not in ("flood_of_logs", "flood_of_notifications"):  # of 100,000
        places += [(R4, "memory"), (R1, "sse")]
    for place in places:
        async with open_fault(script, place, log=count) as (client, _):
            await client.tools()
            heard[0] = 0
            gc.collect()
            before = memory("VmRSS")
            forget_memory()
            async with within(10):
                call = client.call("echo", {"bad": True}, progress=count)
                if (script, place[1]) == ("flood_of_answers", "http"):
                    await refused(call, place, RemoteProtocolError, Sent.FAILED, "tools/call echo", "the id -1, not")
                else:
                    assert (await call).text == "ok"
                await is_fine(client)
            assert heard[0] == {"flood_of_logs": 100_000, "flood_of_progress": 20_000}.get(script, 0)
            grown = memory("VmHWM") - before
            # All that a scripted server in this process says is in its memory first.
            assert grown < (24 if place[1] == "stdio" else 64) * MEBIBYTE, f"{grown / MEBIBYTE:.1f} MiB more at {place}"
    assert len(caplog.records) <= 20


@requirement("P-35")
async def test_questions_without_end_are_answered_a_few_at_a_time(open_fault: OpenFault) -> None:
    """Nobody ever answers them; the call ends by its clock, and the next one goes through."""

    async def one(place: Place) -> None:
        asked = most = 0

        async def sample(_: object) -> None:
            nonlocal asked, most
            asked += 1
            most = max(most, asked)
            try:
                await asyncio.Event().wait()
            finally:
                asked -= 1

        async with open_fault("flood_of_questions", place, sample=sample) as (client, _):
            await client.tools()
            async with within(SHORT.total + 1):
                call = client.call("echo", {"bad": True}, timeout=SHORT)
                await refused(call, place, CallTimeout, Sent.UNKNOWN, "tools/call echo")
            await is_fine(client)
            if place[0] != R5:
                flood = asyncio.create_task(client.call("echo", {"bad": True}))
                await until(lambda: asked == 32, "as many as may be are asked")
                await is_fine(client)  # with all that was asked before it
                flood.cancel()
            assert most == (0 if place[0] == R5 else 32)
        assert asked == 0

    await at_all(EVERYWHERE, one)


@requirement("P-35", "CLI-30")
async def test_p35_5000_questions_at_once_are_none(open_fault: OpenFault) -> None:
    asked: list[object] = []

    async def one(place: Place) -> None:
        async with open_fault("questions_in_one", place, sample=asked.append) as (client, _):
            call = client.call("echo", {"bad": True})
            await refused(call, place, InvalidResult, Sent.FAILED, "tools/call echo", "5,000 things at once")
            await is_fine(client)

    await at_all(NEW_ONES, one)
    assert not asked


@requirement("P-35", "CLI-32")
async def test_a_form_that_is_a_bomb_is_not_shown(open_fault: OpenFault) -> None:
    asked: list[Elicitation] = []

    async def one(place: Place) -> None:
        async with open_fault("form_is_a_bomb", place, elicit=asked.append) as (client, _), within(PROMPTLY):
            call = client.call("echo", {"bad": True})
            if place[0] == R5:
                text = "nested deeper than 64"
                await refused(call, place, RemoteProtocolError, Sent.UNKNOWN, "tools/call echo", text)
            else:
                said = json.loads((await call).text)["error"]
                assert said["code"] == -32602 and "nested deeper than 64" in said["message"]
            await is_fine(client)

    await at_all([place for place in EVERYWHERE if place[0] != R1], one)
    assert not asked


@requirement("P-35")
@pytest.mark.parametrize("what", ["log", "progress"])
async def test_a_listener_that_fails_is_not_called_again_and_deafens_nobody(
    open_fault: OpenFault, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def one(place: Place) -> None:
        times = 0

        def fails(*_: object) -> None:
            nonlocal times
            times += 1
            raise RuntimeError("no")

        options: dict[str, Any] = {"log": fails} if what == "log" else {}
        async with open_fault(f"{what}_for_ever".replace("log_", "logs_"), place, **options) as (client, _):
            await client.tools()
            more: dict[str, Any] = {"progress": fails} if what == "progress" else {}
            call = client.call("echo", {"bad": True}, timeout=SHORT, **more)
            error = await refused(call, place, CallTimeout, Sent.UNKNOWN, "tools/call echo")
            assert error.clock == "total" and times == 1
            await is_fine(client)

    await at_all(PIPES, one)
    assert caplog.text.count("RuntimeError: no") == len(PIPES)


# How a conversation begins


@requirement("CLI-04", "P-14")
@pytest.mark.parametrize("script", ["dies_on_probe", "silent_on_probe"])
async def test_an_old_server_that_bears_no_probe_is_found(
    open_fault: OpenFault, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.client.negotiation.PROBE_SECONDS", 0.2)

    async def one(place: Place) -> None:
        async with within(PROMPTLY), open_fault(script, place, revision="auto") as (client, heard):
            assert client.revision == place[0]
            await is_fine(client)
            assert len(heard.asked("initialize")) == 1

    await at_all([(R1, "stdio"), (R4, "stdio"), (R1, "memory"), (R4, "memory")], one)


@requirement("CLI-04", "P-14")
@pytest.mark.parametrize("script", ["dies_on_probe", "silent_on_probe"])
async def test_a_server_that_knows_neither_way_to_begin_is_given_up(
    open_fault: OpenFault, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.client.negotiation.PROBE_SECONDS", 0.2)
    clocks = Clocks(first=10, idle=10)

    async def one(place: Place) -> None:
        async def opening() -> None:
            async with open_fault(script, place, revision="auto", timeout=clocks):
                pass

        async with within(clocks.first + 1):
            await refused(opening(), place, RemoteProtocolError, Sent.FAILED, "initialize")

    await at_all([(R5, "stdio"), (R5, "memory")], one)


@requirement("CLI-04", "P-14")
@pytest.mark.parametrize(("script", "kind"), [("dies_on_probe", TransportError), ("silent_on_probe", CallTimeout)])
async def test_over_http_a_probe_that_fails_says_nothing_about_the_era(
    open_fault: OpenFault, script: str, kind: type[PeerError]
) -> None:
    async def one(place: Place) -> None:
        async def opening() -> None:
            async with open_fault(script, place, revision="auto", timeout=SHORT):
                pass

        async with within(SHORT.first + 1):
            await refused(opening(), place, kind, Sent.UNKNOWN, "server/discover")

    await at_all(HTTP, one)


@requirement("CLI-04")
async def test_a_new_server_that_refuses_the_handshake_before_it_answers_is_found(
    open_fault: OpenFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.client.negotiation.PROBE_SECONDS", 0.2)

    async def one(place: Place) -> None:
        async with open_fault("refuses_handshake_first", place, revision="auto") as (client, heard):
            assert client.revision == R5
            await is_fine(client)
            assert len(heard.asked("initialize")) == 1

    await at_all([(R5, "stdio"), (R5, "memory")], one)


@requirement("P-14")
@pytest.mark.parametrize("revision", ["auto", R4, R5])
async def test_a_server_that_exits_at_once_is_told_of_with_what_it_said(
    revision: str, request: pytest.FixtureRequest
) -> None:
    record_ran(request, R4 if revision == "auto" else revision, "stdio")
    code = "import sys; sys.exit('no licence found')"
    async with within(PROMPTLY):
        with pytest.raises(TransportError, match="exited with code 1") as caught:
            async with Client([sys.executable, "-ISc", code], revision=revision):
                pass
    error = caught.value
    assert "no licence found" in error.hint and error.server == NAMES["stdio"] and error.phase


@requirement("P-14")
async def test_nobody_there_is_told_at_once(unused_tcp_port: int, ran: Callable[[str, str], None]) -> None:
    for revision in (R4, R5):
        ran(revision, "http")
        async with within(PROMPTLY):
            with pytest.raises(TransportError) as caught:
                async with Client(f"http://127.0.0.1:{unused_tcp_port}/mcp", revision=revision):
                    pass
        assert caught.value.sent is Sent.NO and caught.value.server == "127.0.0.1"


# Processes


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not end when asked to is not given the usual time."""
    monkeypatch.setitem(SubprocessTransport.__init__.__kwdefaults__, "grace", 0.2)  # type: ignore[arg-type]  # it has some
    monkeypatch.setattr("handrail.transports.subprocess.TERM_SECONDS", 0.2)


@requirement("P-14")
async def test_noise_on_standard_output_is_left_out(open_fault: OpenFault) -> None:
    async def one(place: Place) -> None:
        async with open_fault("noise", place) as (client, _):
            assert [tool.name for tool in await client.tools()] == ["echo"]
            for _ in range(3):
                await is_fine(client)
            (server,) = client.servers.values()
            assert "a line of a log" in " ".join(server.connection.discard_reasons) or "not a message" in " ".join(
                server.connection.discard_reasons
            )

    await at_all(STDIO, one)


@requirement("P-14")
async def test_an_answer_without_a_newline_costs_the_next_one_and_no_more(open_fault: OpenFault) -> None:
    async def one(place: Place) -> None:
        async with open_fault("line_without_end", place) as (client, _):
            await client.tools()
            call = client.call("echo", {"bad": True}, timeout=SHORT)
            await refused(call, place, CallTimeout, Sent.UNKNOWN, "tools/call echo")
            call = client.call("fine", {})
            await refused(call, place, RemoteProtocolError, Sent.UNKNOWN, "tools/call fine", NOT_A_MESSAGE)
            await is_fine(client)

    await at_all(STDIO, one)


@requirement("P-14")
async def test_the_last_answer_of_a_server_needs_no_newline(open_fault: OpenFault) -> None:
    async def one(place: Place) -> None:
        async with open_fault("whole_line_without_newline", place) as (client, _):
            await client.tools()
            assert (await client.call("echo", {"bad": True})).text == "ok"
            (server,) = client.servers.values()
            await until(lambda: server.connection.failure is not None, "the server has died")
            await is_fine(client)

    await at_all(STDIO, one)


@requirement("P-14", "CLI-41")
@pytest.mark.usefixtures("impatient")
async def test_a_server_that_never_ends_is_ended(open_fault: OpenFault) -> None:
    async def one(place: Place) -> None:
        async with open_fault("never_ends", place) as (client, _):
            pid = int((await client.call("echo", {})).text)
            assert not gone(pid)
        assert gone(pid)

    await at_all(STDIO, one)


@requirement("P-14", "CLI-41")
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("script", ["freezes", "reads_nothing"])
async def test_a_server_that_does_nothing_any_more_is_ended_too(open_fault: OpenFault, script: str) -> None:
    async def one(place: Place) -> None:
        async with open_fault(script, place) as (client, _):
            await client.tools()
            for _ in range(2):
                async with within(SHORT.first + 1):
                    call = client.call("echo", {"bad": True}, timeout=SHORT)
                    await refused(call, place, CallTimeout, Sent.UNKNOWN, "tools/call echo")

    await at_all(STDIO, one)


@requirement("P-14")
async def test_a_server_that_has_broken_off_is_not_waited_for(
    open_fault: OpenFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has closed its input, so the end of that will not make it leave; the next one is started at once."""
    monkeypatch.setitem(SubprocessTransport.__init__.__kwdefaults__, "grace", 10 * PATIENCE)  # type: ignore[arg-type]  # it has some

    async def one(place: Place) -> None:
        async with open_fault("closes_input", place) as (client, _):
            await client.tools()
            call = client.call("echo", {"bad": True}, timeout=SHORT)
            await refused(call, place, CallTimeout, Sent.UNKNOWN, "tools/call echo")
            async with within(PROMPTLY):
                await is_fine(client)

    await at_all(STDIO, one)


@requirement("P-14")
@pytest.mark.usefixtures("impatient")
async def test_what_a_server_has_forked_ends_with_it(open_fault: OpenFault) -> None:
    async def one(place: Place) -> None:
        async with open_fault("forks", place) as (client, _):
            forked = json.loads((await client.call("echo", {})).text)
            assert len(forked) == 2 and not any(map(gone, forked))
        await until(lambda: all(map(gone, forked)), "what was forked has ended")

    await at_all(STDIO, one)


# Restarts


@requirement("P-14")
async def test_a_server_that_keeps_dying_is_not_started_without_end(open_fault: OpenFault) -> None:
    async def one(place: Place) -> None:
        async with open_fault("dies", place) as (client, heard):
            await client.tools()
            for _ in range(3):
                async with within(PROMPTLY):
                    await refused(
                        client.call("echo", {"bad": True}), place, TransportError, Sent.UNKNOWN, "tools/call echo"
                    )
            (server,) = client.servers.values()
            server.connection.clocks = Clocks(connect=0.5)  # less than the pause before the next start
            call = client.call("echo", {"bad": True})
            error = await refused(call, place, TransportError, Sent.NO, "connect", "ended 3 times within a minute")
            assert error.hint == ""
            assert len(heard.asked("tools/call")) == 3

    await at_all(PIPES, one)


@requirement("P-14", "CLI-02", "CLI-41")
async def test_calls_after_a_death_wait_for_one_restart(open_fault: OpenFault) -> None:
    """None is sent before the handshake, and no second server is started."""

    async def one(place: Place) -> None:
        async with open_fault("dies", place) as (client, heard):
            await client.tools()
            call = client.call("echo", {"bad": True})
            await refused(call, place, TransportError, Sent.UNKNOWN, "tools/call echo")
            before = len(heard.messages)
            results = await asyncio.gather(*(client.call("fine", {"n": n}) for n in range(10)))
            assert [json.loads(each.text)["n"] for each in results] == list(range(10))
            first, *rest = [each["method"] for each in heard.messages[before:]]
            assert first == ("server/discover" if place[0] == R5 else "initialize")
            assert first not in rest

    await at_all(PIPES, one)


@requirement("P-14", "CLI-02", "CLI-07")
async def test_a_call_in_the_middle_of_a_restart_waits_for_its_end(open_fault: OpenFault) -> None:
    async def one(place: Place) -> None:
        async with open_fault("slow_to_open", place) as (client, heard):
            await client.tools()
            await refused(client.call("echo", {"bad": True}), place, TransportError, Sent.UNKNOWN, "tools/call echo")
            before = len(heard.messages)
            first = asyncio.create_task(is_fine(client))
            await until(lambda: len(heard.messages) > before, "the server was started again")
            await is_fine(client)
            await first
            said = heard.messages[before:]
            if place[0] == R5:
                assert all(each["params"]["_meta"][VERSION] == R5 for each in said)
            else:
                assert [each["method"] for each in said[:2]] == ["initialize", "notifications/initialized"]
            assert len(said) == (3 if place[0] == R5 else 4)

    await at_all(PIPES, one)


@requirement("P-14")
async def test_a_restart_that_fails_is_told_to_all_who_wait_and_sends_nothing(
    open_fault: OpenFault, tmp_path: Path
) -> None:
    async def one(place: Place) -> None:
        flag = tmp_path / f"broken-{place[0]}"
        async with open_fault("dies_for_good", place, knows={"FLAG": str(flag)}) as (client, heard):
            await client.tools()
            call = client.call("echo", {"bad": True})
            await refused(call, place, TransportError, Sent.UNKNOWN, "tools/call echo")
            async with within(PROMPTLY):
                calls = [client.call("fine", {"n": n}) for n in range(10)]
                problems = await asyncio.gather(*calls, return_exceptions=True)
            for problem in problems:
                assert isinstance(problem, TransportError) and problem.sent is Sent.NO
                assert "broken for good" in problem.hint and problem.server == NAMES["stdio"]
            assert len({id(problem) for problem in problems}) == 10
            assert len(heard.asked("tools/call")) == 1
            flag.unlink()
            await is_fine(client)

    await at_all(STDIO, one)


@requirement("P-14")
async def test_what_was_sent_once_was_sent_whatever_became_of_the_second_time(
    open_fault: OpenFault, tmp_path: Path
) -> None:
    async def one(place: Place) -> None:
        flag = tmp_path / f"broken-{place[0]}"
        async with open_fault("dies_for_good", place, knows={"FLAG": str(flag)}) as (client, heard):
            await client.tools()
            with pytest.raises(TransportError) as caught:
                await client.call("echo", {"bad": True}, repeat=True)
            assert caught.value.sent is Sent.UNKNOWN and "broken for good" in caught.value.hint
            assert len(heard.asked("tools/call")) == 1

    await at_all(STDIO, one)


@requirement("P-14", "CLI-30")
async def test_a_call_that_was_asked_back_was_sent_whatever_became_of_its_answer(
    open_fault: OpenFault, tmp_path: Path
) -> None:
    place = (R5, "stdio")
    clients: list[Client] = []

    async def elicit(_: object) -> Object:
        (server,) = clients[0].servers.values()
        await until(lambda: server.connection.failure is not None, "the server has died")
        return {}

    knows = {"FLAG": str(tmp_path / "broken")}
    async with open_fault("asks_and_dies_for_good", place, knows=knows, elicit=elicit) as (client, heard):
        clients.append(client)
        await client.tools()
        with pytest.raises(TransportError) as caught:
            await client.call("echo", {})
        assert caught.value.sent is Sent.UNKNOWN and "broken for good" in caught.value.hint
        assert len(heard.asked("tools/call")) == 1


@requirement("P-14")
@pytest.mark.parametrize("when", ["at once", "later"])
async def test_closing_in_the_middle_of_a_restart_leaves_nothing(open_fault: OpenFault, when: str) -> None:
    async def one(place: Place) -> None:
        async with open_fault("dies", place) as (client, _):
            await client.tools()
            for _ in range(3 if when == "later" else 1):  # then there is a pause before the next
                call = client.call("echo", {"bad": True})
                await refused(call, place, TransportError, Sent.UNKNOWN, "tools/call echo")
            calls = [asyncio.create_task(client.call("fine", {})) for _ in range(3)]
            await asyncio.sleep(0)
            async with within(PROMPTLY):
                await client.close()
                for problem in await asyncio.gather(*calls, return_exceptions=True):
                    assert isinstance(problem, TransportError) and problem.sent is Sent.NO, repr(problem)
                    assert "closed" in str(problem)
                with pytest.raises(TransportError, match="closed"):
                    await client.call("fine", {})

    await at_all(PIPES, one)


@requirement("CLI-13", "P-35")
@pytest.mark.parametrize("how", ["refused", "broken", "silent"])
async def test_a_session_that_cannot_be_begun_anew_is_tried_again_by_the_next_call(
    open_fault: OpenFault, how: str
) -> None:
    async def one(place: Place) -> None:
        clocks = Clocks(first=1.5, idle=1.5)
        async with open_fault("forgets_session", place, knows={"HOW": how}, timeout=clocks) as (client, heard):
            await client.tools()
            kinds: dict[str, type[PeerError]]
            kinds = {"refused": RemoteProtocolError, "broken": HttpRefused, "silent": CallTimeout}
            async with within(clocks.first + 1):
                calls = [client.call("echo", {"bad": True}) for _ in range(2)]
                problems = await asyncio.gather(*calls, return_exceptions=True)
            for problem in problems:
                assert isinstance(problem, kinds[how]) and problem.sent is Sent.NO, repr(problem)
            await is_fine(client)
            assert len(heard.asked("initialize")) <= 5

    await at_all([(R4, "http")], one)


# Deadlines


@requirement("CLI-25", "P-11")
@pytest.mark.parametrize(
    ("script", "sent"), [("silent_list", Sent.NO), ("slow_pages", Sent.NO), ("silent_restart", Sent.NO)]
)
async def test_the_total_clock_of_a_call_is_for_all_that_it_takes(
    open_fault: OpenFault, script: str, sent: Sent, tmp_path: Path
) -> None:
    """Also for the list of tools it needs first, and for the server that has to be started again."""

    async def one(place: Place) -> None:
        flag = str(tmp_path / f"{place}")
        async with open_fault(script, place, knows={"FLAG": flag}) as (client, heard):
            if script == "silent_restart":
                await client.tools()
                with pytest.raises(TransportError):
                    await client.call("echo", {"die": True})
            async with within(SHORT.total + 1):
                call = client.call("echo", {}, timeout=SHORT)
                error = await refused(call, place, CallTimeout, sent, "tools/call echo")
            assert error.clock == "total"
            assert len(heard.asked("tools/call")) == (script == "silent_restart")

    await at_all(PIPES if script == "silent_restart" else EVERYWHERE, one)


@requirement("CLI-19", "P-35")
async def test_pages_that_trickle_in_end_by_the_total_clock(open_fault: OpenFault) -> None:
    async def one(place: Place) -> None:
        clocks = Clocks(connect=PATIENCE, first=PATIENCE, idle=PATIENCE, total=0.8)
        async with open_fault("slow_pages", place) as (client, _):
            (server,) = client.servers.values()
            server.connection.clocks = clocks
            async with within(clocks.total + 1):
                error = await refused(client.tools(), place, CallTimeout, Sent.UNKNOWN, "tools/list")
            assert error.clock == "total"

    await at_all(EVERYWHERE, one)


@requirement("CLI-25", "CLI-30")
@pytest.mark.parametrize("script", ["asks_by_retry", "says_later_for_ever"])
async def test_questions_and_waits_do_not_stop_the_total_clock(open_fault: OpenFault, script: str) -> None:
    async def never(_: object) -> None:
        await asyncio.Event().wait()

    async def one(place: Place) -> None:
        async with open_fault(script, place, elicit=never) as (client, _):
            await client.tools()
            async with within(SHORT.total + 1):
                call = client.call("echo", {"who": "ann"}, timeout=Clocks(total=0.8))
                error = await refused(call, place, CallTimeout, Sent.UNKNOWN, "tools/call echo")
            assert error.clock == "total"

    await at_all(NEW_ONES, one)


@requirement("CLI-25", "P-14")
async def test_what_was_not_sent_in_time_is_not_sent_later(ran: Callable[[str, str], None]) -> None:
    """A server in the same process that takes nothing for a while."""
    for revision in (R4, R5):
        ran(revision, "memory")
        rig = Rig("ordinary", revision)
        takes, deliver = asyncio.Event(), rig.deliver

        async def waiting(message: bytes, takes: asyncio.Event = takes, deliver: Any = deliver) -> None:
            await takes.wait()
            await deliver(message)

        async with Client(rig, revision=revision) as client:
            await client.tools()
            rig.deliver = waiting  # type: ignore[method-assign]  # of this one
            calls = [client.call("echo", {"n": n}, timeout=Clocks(first=0.2)) for n in range(3)]
            problems = await asyncio.gather(*calls, return_exceptions=True)
            assert [each.sent for each in problems if isinstance(each, CallTimeout)] == [
                Sent.UNKNOWN,  # the one that was being handed over
                Sent.NO,
                Sent.NO,
            ]
            takes.set()
            assert (await client.call("echo", {"n": 3})).text == '{"n": 3}'
            assert [each["params"]["arguments"]["n"] for each in rig.asked("tools/call")] == [0, 3]


@requirement("P-14")
async def test_a_server_in_the_same_process_that_fails_is_lost_at_once(
    ran: Callable[[str, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    for revision in (R4, R5):
        ran(revision, "memory")

        def fails(rig: Rig, message: Object) -> None:
            if message.get("method") == "tools/call" and message["params"]["arguments"].get("bad"):
                raise RuntimeError("a bug")
            ordinary(rig, message)

        async with Client(Rig(fails, revision), revision=revision) as client:
            await client.tools()
            async with within(PROMPTLY):
                call = client.call("echo", {"bad": True})
                text = "failed with RuntimeError"
                await refused(call, (revision, "memory"), TransportError, Sent.UNKNOWN, "tools/call echo", text)
                await is_fine(client)
    assert caplog.text.count("RuntimeError: a bug") == 2
