"""Our client and our server: seven dialects over every transport there is."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import pytest

from clients import ALL, LEGACY, R0, R1, R2, R3, R4, R5, P
from handrail import Client, Clocks, Confirmation, Elicitation, Progress, allow
from handrail.errors import CallTimeout, RemoteProtocolError, Sent
from paths import SUPPORT
from patience import PATIENCE
from requirements import record_ran, requirement
from subject import make
from wires_http import servers_of

HERE = SUPPORT
KEEPS_DATA = (R0, R3, R4, R5, P)  # revisions in which structured content arrives as such
Open = Callable[..., AbstractAsyncContextManager[Client]]

PLACES = [(revision, transport) for revision in ALL for transport in ("memory", "stdio", "http")]
PLACES += [(revision, "sse") for revision in LEGACY]
T = TypeVar("T")
_marks = itertools.count()
ORIGIN: ContextVar[str] = ContextVar("origin", default="unknown")


@pytest.fixture(params=PLACES, ids=lambda place: "-".join(place))
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def connect(request: pytest.FixtureRequest, place: tuple[str, str]) -> Open:
    """`async with connect(**options of Client) as client`, in the revision and over the transport of the test."""
    revision, transport = place
    record_ran(request, revision, "http" if transport == "sse" else transport)

    @asynccontextmanager
    async def connected(variant: str = "default", **options: Any) -> AsyncIterator[Client]:
        options = {"revision": revision, "timeout": 20.0, **options}
        target: Any = make(variant)
        if transport == "stdio":
            target = [sys.executable, str(HERE / "subject.py"), variant]
        elif transport in ("http", "sse"):
            target = servers_of(request).get(variant).url
            options["transport"] = "sse" if transport == "sse" else "auto"
        async with Client(target, **options) as client:
            yield client

    return connected


async def until(ask: Callable[[], Awaitable[T]], fits: Callable[[T], bool]) -> None:
    """Ask again until the answer fits."""
    async with asyncio.timeout(PATIENCE):
        while True:
            if fits(await ask()):
                return
            await asyncio.sleep(0)


@requirement("CLI-01")
async def test_tools_are_listed_and_called(connect: Open, place: tuple[str, str]) -> None:
    async with connect() as client:
        assert client.revision == place[0]
        tools = await client.tools()
        assert {"echo", "add", "fails"} <= {tool.name for tool in tools}
        assert (await client.call("echo", {"text": "héllo"})).text == "héllo"
        sums = await client.call("add", {"a": 1, "b": 2})
        assert sums.text == '{"sum":3.0}'
        assert sums.data == ({"sum": 3.0} if place[0] in KEEPS_DATA else None)


@requirement("CLI-01")
async def test_one_client_finds_out_what_is_spoken(connect: Open, place: tuple[str, str]) -> None:
    for revision, found in (("auto", R5), ("legacy", R4)):
        if place[1] == "sse" and revision == "auto":
            continue  # a transport one has to ask for
        async with connect(revision=revision) as client:
            assert client.revision == found
            assert (await client.call("echo", {"text": "x"})).text == "x"


@requirement("CLI-01")
async def test_failures_of_tools_and_of_the_protocol_are_told_apart(connect: Open, place: tuple[str, str]) -> None:
    async with connect() as client:
        failed = await client.call("fails", {"text": "no luck"})
        assert failed.is_error and failed.text == "no luck"
        with pytest.raises(RemoteProtocolError, match="Unknown tool: ech") as caught:
            await client.call("ech", {})
        assert caught.value.code == -32602 and "echo" in caught.value.hint
        if place[0] in (R4, R5):
            wrong = await client.call("add", {"a": "one"})
            assert wrong.is_error and "expected number" in wrong.text
        else:
            with pytest.raises(RemoteProtocolError, match=r"expected number|Missing required") as caught:
                await client.call("add", {"a": "one"})
            assert caught.value.code == -32602


@requirement("CLI-25")
async def test_progress_is_heard(connect: Open, place: tuple[str, str]) -> None:
    async with connect() as client:
        seen: list[Progress] = []
        result = await client.call("progresses", {}, progress=seen.append)
        assert not result.is_error
        assert seen and [each.done for each in seen] == sorted(each.done for each in seen)
        events = [event async for event in client.events("progresses", {})]
        assert events[-1].text == result.text  # type: ignore[union-attr]  # the last one is the result
        assert [event for event in events if isinstance(event, Progress)] == seen


@requirement("CLI-25")
async def test_a_call_nobody_waits_for_is_stopped(connect: Open, place: tuple[str, str]) -> None:
    async with connect() as client:
        # On a busy machine it may not even have begun, and then it cannot be stopped: then with more time.
        for seconds in (0.3, 3.0, PATIENCE / 4):
            mark = f"m{next(_marks)}"
            with pytest.raises(CallTimeout) as caught:
                await client.call("waits", {"mark": mark}, timeout=Clocks(first=seconds, idle=seconds))
            assert caught.value.sent is Sent.UNKNOWN
            if place[0] == R0:  # where nobody can be told
                assert (await client.call("was_stopped", {"mark": mark})).text == "false"
                return
            ask = partial(client.call, "was_stopped", {"mark": mark})
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE / 4):
                    await until(ask, lambda told: told.text == "true")
                return
        pytest.fail("the tool went on")


@requirement("CLI-29", "CLI-35")
async def test_changed_tools_are_listed_anew(connect: Open, place: tuple[str, str]) -> None:
    async with connect() as client:
        name = f"added-{next(_marks)}"
        assert name not in await client.tools()
        await client.call("add_tool", {"name": name})
        await until(client.tools, lambda tools: name in tools)
        assert not (await client.call(name, {})).is_error
        await client.call("remove_tool", {"name": name})
        await until(client.tools, lambda tools: name not in tools)


@requirement("CLI-32")
async def test_questions_are_answered(connect: Open, place: tuple[str, str]) -> None:
    asked: list[Elicitation] = []

    def elicit(question: Elicitation) -> dict[str, Any]:
        asked.append(question)
        return {"name": "Ada"}

    async with connect(elicit=elicit) as client:
        result = await client.call("asks", {})
        if place[0] in (R0, R1, R2):
            assert result.is_error and "elicitation" in result.text
        else:
            assert "Ada" in result.text and asked


async def test_an_input_handler_has_the_context_variables_of_its_call(connect: Open, place: tuple[str, str]) -> None:
    origins: list[str] = []

    def elicit(question: Elicitation) -> dict[str, Any]:
        origins.append(ORIGIN.get())
        return {"name": "Ada"}

    async with connect(elicit=elicit) as client:

        async def call(origin: str) -> None:
            ORIGIN.set(origin)
            await client.call("asks", {})

        await asyncio.create_task(call("first"))
        if place[0] in (R0, R1, R2):
            assert not origins
            return
        assert origins == ["first"]
        if place[1] == "http" or place[0] == R5:  # elsewhere a request does not tell to which call it belongs
            await asyncio.gather(call("second"), call("third"))
            assert sorted(origins[1:]) == ["second", "third"]


@requirement("CLI-01", "CLI-27")
async def test_a_model_walks_the_flow_of_the_seeds(connect: Open, place: tuple[str, str]) -> None:
    """List, select, confirm, call, the result to the model, a change, list again."""
    confirmed: list[Confirmation] = []

    def confirm(call: Confirmation) -> bool:
        confirmed.append(call)
        return True

    async with connect(confirm=confirm) as client:
        tools = await client.tools()
        offered = tools.for_model("openai")
        chosen = next(each["function"]["name"] for each in offered if "Add two" in each["function"]["description"])
        result = await client.call(tools.named(chosen).name, {"a": 20, "b": 22})
        assert [each.tool for each in confirmed] == ["add"] and confirmed[0].arguments == {"a": 20, "b": 22}
        assert "42" in result.for_model()
        assert result.for_model("anthropic")[0]["type"] == "text"
        name = f"later-{next(_marks)}"
        await client.call("add_tool", {"name": name}, confirm=allow)
        await until(client.tools, lambda tools: name in tools)
        await client.call("remove_tool", {"name": name}, confirm=allow)


async def test_many_calls_at_once_get_their_own_answers(connect: Open, place: tuple[str, str]) -> None:
    async with connect() as client:
        await client.tools()
        texts = [f"text {number}" for number in range(50)]
        results = await asyncio.gather(*(client.call("echo", {"text": text}) for text in texts))
        assert [each.text for each in results] == texts


def test_without_async_it_is_the_same(place: tuple[str, str], request: pytest.FixtureRequest) -> None:
    revision, transport = place
    target: Any = make("default")
    more: dict[str, Any] = {}
    if transport == "stdio":
        target = [sys.executable, str(HERE / "subject.py"), "default"]
    elif transport in ("http", "sse"):
        target = servers_of(request).get("default").url
        more["transport"] = "sse" if transport == "sse" else "auto"
    with Client(target, revision=revision, timeout=PATIENCE, **more) as client:
        assert client.revision == revision
        assert "echo" in client.tools()
        assert client.call("echo", {"text": "x"}).text == "x"
        *progress, last = client.events("progresses", {})
        assert progress and not last.is_error
        client.close()
        with pytest.raises(Exception, match="closed"):
            client.tools()
