"""Tools that follow their file while clients stay connected.

What runs is a server of our own that includes the file's. When a file changes, it is imported anew, the lifespan of
the new server is entered, the tools are exchanged in one turn of the loop, and the old lifespan is left when the last
of its calls has ended. The wire belongs to our server and does not notice, except that the list has changed.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from handrail.cli.exit_codes import Usage
from handrail.cli.load_server import Source
from handrail.engine.call import Call
from handrail.engine.pipeline import Handler
from handrail.model import Tool, ToolResult
from handrail.server import Server

__all__ = ["follow"]

LOOK_SECONDS = 0.5

# What can change with the file. Not among them: the keys, which open what clients still hold, and `workers`, `tracing`.
_FOLLOWS = "said identity instructions limits page_size list_changed identify ttl_ms forms".split()
_STAYS = "offer has_tools hidden seal".split()


def follow(source: Source, server: Server, note: Callable[[str], None]) -> Server:
    """A server with the tools that the file has at the time, beginning with those of `server`."""
    following = _Following(source, server, note)
    shell = Server(server.name, lifespan=following.lifespan, workers=server.engine.workers.size)
    for name in _FOLLOWS + _STAYS:
        setattr(shell.engine, name, getattr(server.engine, name))
    shell.engine.gate.served = server.engine.gate.served
    shell.guard(**server.engine.guards)  # of the first reading: they cannot be changed while it serves
    shell.middleware(following.counted)
    return shell


class _Version:
    """One reading of the file, from when its lifespan is entered until nobody uses it any more."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.calls = 0
        self.replaced = False
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
        self.life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        try:
            async with self.server.serving():
                self.begun.set_result(None)
                await self.over.wait()
        except Exception as problem:
            if self.begun.done():
                traceback.print_exc()  # at its end: nobody depends on it now
            else:
                self.begun.set_exception(problem)
        finally:
            if not self.begun.done():  # a lifespan can raise CancelledError too, and somebody waits for it to begin
                self.begun.set_exception(RuntimeError("the lifespan was cancelled"))

    def rest(self) -> None:
        if self.replaced and not self.calls:
            self.over.set()


class _Following:
    def __init__(self, source: Source, first: Server, note: Callable[[str], None]) -> None:
        self._source = source
        self._first = first
        self._note = note
        self._versions: dict[Server, _Version] = {}  # that have not ended

    @asynccontextmanager
    async def lifespan(self, shell: Server) -> AsyncIterator[None]:
        first = await self._begin(self._first)
        shell.include(first.server)
        stop = asyncio.Event()
        task = asyncio.create_task(self._follow(shell, first, stop))
        try:
            yield
        finally:
            stop.set()
            await task

    async def counted(self, call: Call, next: Handler) -> ToolResult:
        if not call.entry.via:  # a tool of ours: it does not change with the file
            return await next(call)
        version = self._versions[call.entry.via[0]]
        version.calls += 1
        try:
            return await next(call)
        finally:
            version.calls -= 1
            version.rest()

    async def _follow(self, shell: Server, current: _Version, stop: asyncio.Event) -> None:
        try:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), LOOK_SECONDS)
                    return
                if self._source.changed() and (version := await self._read()):
                    current = self._exchange(shell, current, version)
        finally:
            for version in self._versions.values():
                version.over.set()
            await asyncio.wait([version.life for version in self._versions.values()])

    async def _read(self) -> _Version | None:
        """The file as it is now, begun; None if that fails."""
        try:
            return await self._begin(await asyncio.to_thread(self._source.load))
        except Usage as problem:
            why, details = str(problem), problem.details
        except Exception:
            why, details = "its lifespan failed", traceback.format_exc()
        self._note(f"{why}; the tools stay as they were\n{details}".rstrip())
        return None

    async def _begin(self, server: Server) -> _Version:
        version = _Version(server)
        await version.begun
        self._versions = {each.server: each for each in self._versions.values() if not each.life.done()}
        self._versions[server] = version
        return version

    def _exchange(self, shell: Server, old: _Version, new: _Version) -> _Version:
        """In one go, without awaiting: no message is handled in between. The version that is there now."""
        before, entries = shell.tools, shell.engine.catalog.entries
        taken = {each.tool.name for each in entries if not each.via} & {each.name for each in new.server.tools}
        if taken:
            self._note(f"the server has a tool {min(taken)!r} of its own; the tools stay as they were")
            new.replaced = True
            new.rest()
            return old
        for entry in entries:
            if entry.via:
                with suppress(KeyError):  # the old version has taken it away itself
                    shell.remove(entry.tool.name)
        shell.include(new.server)
        for name in _FOLLOWS:
            setattr(shell.engine, name, getattr(new.server.engine, name))
        self._note(f"{self._source.shown} was read again: {_difference(before, shell.tools)}")
        if _guards(old.server) != _guards(new.server):
            self._note("its guards are others now; those it was started with hold until it is started again")
        old.replaced = True
        old.rest()
        return new


def _guards(server: Server) -> dict[str, Any]:
    """What can be compared: rules by what they say."""
    return {**server.engine.guards, "policy": server.engine.gate.policy.version}


def _difference(before: list[Tool], after: list[Tool]) -> str:
    old, new = ({tool.name: tool for tool in tools} for tools in (before, after))
    parts = {
        "new": new.keys() - old.keys(),
        "gone": old.keys() - new.keys(),
        "changed": {name for name in new.keys() & old.keys() if new[name] != old[name]},
    }
    told = [f"{word}: {', '.join(sorted(names))}" for word, names in parts.items() if names]
    return "; ".join([f"{len(after)} tool{'s' if len(after) != 1 else ''}", *told])
