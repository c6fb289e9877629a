"""The fixtures of `wires.py`, with stdio processes that live as long as a module.

Starting a process costs more than most of what is asked of it, and one process speaks all revisions anyway: a test
shakes hands anew on the pipe the last one left. What depends on a fresh connection asks for one: `fresh=True`.
Tests use `everywhere` from here, which puts them on the loop the processes belong to.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import pytest
import pytest_asyncio

import subject
import wires
from handrail.server import Server
from requirements import record_ran
from wires import TRANSPORTS, MemoryWire, Object, Open, Wire, shared_http, wire_to

__all__ = ["everywhere", "open_wire", "processes", "spread", "wire"]

F = TypeVar("F", bound=Callable[..., Any])


def everywhere(*revisions: str, transports: Sequence[str] = TRANSPORTS) -> Callable[[F], F]:
    """Run a test for each of these revisions (all, if none is named) over each transport."""

    def mark(function: F) -> F:
        marked: F = pytest.mark.asyncio(loop_scope="module")(
            wires.everywhere(*revisions, transports=transports)(function)
        )
        return marked

    return mark


def spread(*revisions: str) -> Callable[[F], F]:
    """Run a test for each of these revisions (all, if none is named) in memory, and for the last over the others too.

    For long tables of what no transport looks at; what one does look at belongs `everywhere`.
    """
    revisions = revisions or wires.ALL
    places = [*((each, "memory") for each in revisions), (revisions[-1], "stdio"), (revisions[-1], "http")]

    def mark(function: F) -> F:
        parametrized = pytest.mark.parametrize(("revision", "transport"), places)(function)
        marked: F = pytest.mark.asyncio(loop_scope="module")(parametrized)
        return marked

    return mark


class Processes:
    """Running servers by variant. One that a test left in a bad state is not used again."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._idle: dict[str, list[Wire]] = {}
        self._in_memory: dict[str, Server] = {}

    async def take(self, variant: str, revision: str) -> Wire:
        idle = self._idle.setdefault(variant, [])
        wire = idle.pop() if idle else await self._stack.enter_async_context(wire_to(revision, "stdio", variant))
        wire.revision = revision
        wire.others.clear()
        wire.asked.clear()
        return wire

    async def give_back(self, variant: str, wire: Wire) -> None:
        with contextlib.suppress(EOFError, ConnectionError, TimeoutError):  # the test itself tells of those
            await wire.request("server/discover" if wire.stateless else "ping")
            self._idle[variant].append(wire)

    async def in_memory(self, variant: str, revision: str) -> Wire:
        """A new wire to a server in this process: resources make many, and to make one takes longer than a test."""
        if variant not in self._in_memory:
            self._in_memory[variant] = server = subject.make(variant)
            await self._stack.enter_async_context(server.serving())
        return MemoryWire(revision, self._in_memory[variant])

    async def close(self) -> None:
        await self._stack.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes() -> AsyncIterator[Processes]:
    running = Processes()
    yield running
    await running.close()


@pytest_asyncio.fixture(loop_scope="module")
async def open_wire(
    request: pytest.FixtureRequest, revision: str, transport: str, processes: Processes
) -> AsyncIterator[Open]:
    """`await open_wire(variant, capabilities=…, fresh=True)`: an opened wire, recorded."""
    async with AsyncExitStack() as stack:
        taken: list[tuple[str, Wire]] = []

        async def opened(
            variant: str = "default", *, capabilities: Object | None = None, fresh: bool = False, **options: Any
        ) -> Wire:
            if transport == "memory" and variant.startswith("servers_resources:") and not (fresh or options):
                wire = await processes.in_memory(variant, revision)
                stack.push_async_callback(wire.close)
            elif transport == "memory" or fresh or options:
                wire = await stack.enter_async_context(wire_to(revision, transport, variant, **options))
            elif transport == "http":
                wire = await stack.enter_async_context(shared_http(request, revision, variant))
            else:
                wire = await processes.take(variant, revision)
                taken.append((variant, wire))
            await wire.open(capabilities)
            record_ran(request, revision, transport)
            return wire

        yield opened
        for variant, wire in taken:
            await processes.give_back(variant, wire)


@pytest_asyncio.fixture(loop_scope="module")
async def wire(open_wire: Open) -> Wire:
    """An opened wire to the default server."""
    opened: Wire = await open_wire()
    return opened
