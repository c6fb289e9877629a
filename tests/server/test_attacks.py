"""Tools that misbehave, through the endpoint over HTTP: nothing hangs, nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any

import pytest

from faults import MODERN, call as message, text_of
from handrail import Server
from handrail.engine.eager import starter
from patience import PATIENCE
from wires_http1 import (
    MIB,
    Wire,
    connected,
    listener,
    post,
)

CALLED: ContextVar[int] = ContextVar("CALLED", default=0)


class Exotic(BaseException):
    pass


class Poison:
    """Cannot be looked at."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __iter__(self) -> Any:
        raise self.kind

    def __str__(self) -> str:
        raise self.kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self.kind


KINDS: dict[str, type[BaseException]] = {
    each.__name__: each
    for each in (
        SystemExit,
        KeyboardInterrupt,
        GeneratorExit,
        asyncio.CancelledError,
        StopIteration,
        StopAsyncIteration,
        RecursionError,
        MemoryError,
        TimeoutError,
        Exotic,
    )
}


def odd_server() -> Server:
    server = Server("odd", version="1")

    @server.tool
    async def raises(kind: str, waits: bool = False) -> str:
        """Raise something."""
        if waits:
            await asyncio.sleep(0)
        raise KINDS[kind]

    @server.tool(inline=True)
    def raises_inline(kind: str) -> str:
        """Raise something, in the loop."""
        raise KINDS[kind]

    @server.tool
    def raises_thread(kind: str) -> str:
        """Raise something, in a thread."""
        raise KINDS[kind]

    @server.tool
    async def poisons(kind: str, waits: bool = False) -> Any:
        """Return what raises when it is looked at."""
        if waits:
            await asyncio.sleep(0)
        return Poison(KINDS[kind])

    @server.tool
    async def begins(how: str) -> str:
        """Do what needs a task at the very start."""
        CALLED.set(CALLED.get() + 1)
        task = asyncio.current_task()
        assert task is not None
        if how == "timeout":
            try:
                async with asyncio.timeout(0):
                    await asyncio.sleep(10)
            except TimeoutError:
                return f"{CALLED.get()} timeout"
        elif how == "group":
            async with asyncio.TaskGroup() as group:
                made = group.create_task(asyncio.sleep(0, "made"))
            return f"{CALLED.get()} {made.result()}"
        elif how == "cancel":
            task.cancel()
        elif how == "cancel wait":
            task.cancel()
            await asyncio.sleep(10)
        elif how == "uncancel":
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(10)
            task.uncancel()
        elif how == "nested":
            assert await asyncio.create_task(asyncio.sleep(0, "x")) == "x"
        return f"{CALLED.get()} {task.get_name()}"

    @server.tool
    async def long(size: int) -> str:
        """A long answer."""
        return "x" * size

    @server.tool
    async def blocks() -> str:
        """Hold the loop for a moment."""
        time.sleep(0.2)  # noqa: ASYNC251 - the subject of the test
        return "blocked"

    return server


@asynccontextmanager
async def calling(server: Server, grace: float = 3.0, **limits: Any) -> AsyncIterator[str]:
    async with listener(server.asgi(), grace=grace, **limits) as url:
        yield url


def called(name: str, ident: int = 1, **arguments: Any) -> bytes:
    body = message(MODERN, ident, name, **arguments)
    fields = (
        "Content-Type: application/json",
        "Accept: application/json, text/event-stream",
        f"MCP-Protocol-Version: {MODERN}",
        "Mcp-Method: tools/call",
        f"Mcp-Name: {name}",
    )
    return post("mcp", body, *fields).replace(b"Host: a", b"Host: localhost")


async def result(wire: Wire) -> dict[str, Any]:
    found = await wire.answer()
    answer: dict[str, Any] = json.loads(found.body)
    return answer


@pytest.mark.parametrize("tool", ["raises", "raises_inline", "raises_thread", "poisons"])
@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_a_tool_raises_is_an_answer(tool: str, kind: str) -> None:
    async with calling(odd_server()) as url, connected(url) as wire:
        for more in ({}, {"waits": True}) if tool in ("raises", "poisons") else ({},):
            for _ in range(3):
                await wire.send(called(tool, kind=kind, **more))
                found = await result(wire)
                assert "error" in found or found["result"]["isError"]
        await wire.send(called("long", size=3))
        assert text_of(await result(wire)) == "xxx"


@pytest.mark.parametrize("how", ["plain", "timeout", "group", "cancel", "cancel wait", "uncancel", "nested"])
async def test_a_tool_may_use_its_task_at_the_very_start(how: str) -> None:
    async with calling(odd_server()) as url, connected(url) as wire:
        texts = []
        for _ in range(4):
            await wire.send(called("begins", how=how))
            texts.append(text_of(await result(wire)))
        assert len(set(texts)) == 1
        assert texts[0].startswith("1 ") or how.startswith("cancel")
        tasks = len(asyncio.all_tasks())
        await wire.send(called("begins", how=how) * 3)
        assert [text_of(await result(wire)) for _ in range(3)] == texts[:3]
        assert len(asyncio.all_tasks()) == tasks


async def test_long_answers_and_short_ones_in_one_packet() -> None:
    sizes = [1, 3 * MIB, 2, 100_000, 3, 70_000, 65_000, 4]
    async with calling(odd_server()) as url, connected(url) as wire:
        for _ in range(2):
            await wire.send(b"".join(called("long", ident, size=size) for ident, size in enumerate(sizes)))
            for ident, size in enumerate(sizes):
                found = await result(wire)
                assert (found["id"], len(text_of(found))) == (ident, size)


async def test_a_tool_that_blocks_delays_others_and_loses_nothing() -> None:
    async with calling(odd_server()) as url, connected(url) as wire, connected(url) as other:
        await wire.send(called("blocks") * 3)
        await other.send(called("long", size=1))
        assert text_of(await result(other)) == "x"
        assert [text_of(await result(wire)) for _ in range(3)] == ["blocked"] * 3


async def test_a_call_whose_body_comes_too_late_does_not_run_after_the_end() -> None:
    """When the server's lifespan is over, what its tools need is closed."""
    ran: list[bool] = []
    server = Server("late", version="1")

    @server.tool
    async def late() -> str:
        """Remember whether the server still served."""
        ran.append(server.is_serving)
        return "ran"

    endpoint = server.asgi()
    async with listener(endpoint) as url, connected(url) as wire:
        request = called("late")
        await wire.send(request[:-10])
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(endpoint.stop())
        await asyncio.wait((stopping,), timeout=PATIENCE)
        await wire.send(request[-10:])
        assert (await wire.answer()).status == 503
    assert ran == []


# Tasks that begin at once


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python does it itself")
async def test_garbage_that_is_collected_while_a_task_is_made_reaches_the_loop() -> None:
    """Destructors run wherever memory is asked for; a StreamWriter's closes its transport, and so calls the loop."""
    loop = asyncio.get_running_loop()
    start = starter(loop)
    told: list[int] = []

    class Dying:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            loop.call_soon(told.append, 1)

    async def work() -> int:
        return 5

    before = gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        for count in range(50):
            Dying()
            coroutine = work()
            gc.set_threshold(1 + count % 10)
            gc.enable()
            task = start(coroutine)
            gc.disable()
            assert await task == 5
    finally:
        gc.set_threshold(*before)
        gc.enable()
    gc.collect()
    await asyncio.sleep(0)
    assert len(told) == 50
