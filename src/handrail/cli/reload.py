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

from handrail.cli.exit_codes import UsageError
from handrail.cli.load_server import ServerFile
from handrail.engine.call import Call
from handrail.engine.pipeline import Handler
from handrail.model import Tool, ToolResult
from handrail.server import Server

__all__ = ["reloading_server"]

POLL_SECONDS = 0.5

# What can change with the file. Not among them: the keys, which open what clients still hold, and `workers`, `tracing`.
_RELOADED_ATTRIBUTES = (
    "author_metadata identity instructions limits page_size list_changed identify ttl_ms forms".split()
)
_COPIED_ATTRIBUTES = "offer has_tools hidden seal".split()


def reloading_server(source: ServerFile, server: Server, note: Callable[[str], None]) -> Server:
    """A server with the tools that the file has at the time, beginning with those of `server`."""
    following = _Reloader(source, server, note)
    shell = Server(server.name, lifespan=following.lifespan, workers=server.engine.thread_pool.size)
    for name in _RELOADED_ATTRIBUTES + _COPIED_ATTRIBUTES:
        setattr(shell.engine, name, getattr(server.engine, name))
    shell.engine.guard_set.served_file = server.engine.guard_set.served_file
    shell.guard(**server.engine.guard_options)  # of the first reading: they cannot be changed while it serves
    shell.middleware(following.count_calls)
    return shell


class _Version:
    """One reading of the file, from when its lifespan is entered until nobody uses it any more."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.calls = 0
        self.replaced = False
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        try:
            async with self.server.serving():
                self.started.set_result(None)
                await self.stop.wait()
        except Exception as problem:
            if self.started.done():
                traceback.print_exc()  # at its end: nobody depends on it now
            else:
                self.started.set_exception(problem)
        finally:
            if not self.started.done():  # a lifespan can raise CancelledError too, and somebody waits for it to begin
                self.started.set_exception(RuntimeError("the lifespan was cancelled"))

    def stop_if_unused(self) -> None:
        if self.replaced and not self.calls:
            self.stop.set()


class _Reloader:
    def __init__(self, source: ServerFile, first: Server, note: Callable[[str], None]) -> None:
        self._source = source
        self._first = first
        self._note = note
        self._versions: dict[Server, _Version] = {}  # that have not ended

    @asynccontextmanager
    async def lifespan(self, shell: Server) -> AsyncIterator[None]:
        first = await self._start(self._first)
        shell.include(first.server)
        stop = asyncio.Event()
        task = asyncio.create_task(self._follow(shell, first, stop))
        try:
            yield
        finally:
            stop.set()
            await task

    async def count_calls(self, call: Call, next: Handler) -> ToolResult:
        if not call.entry.via:  # a tool of ours: it does not change with the file
            return await next(call)
        version = self._versions[call.entry.via[0]]
        version.calls += 1
        try:
            return await next(call)
        finally:
            version.calls -= 1
            version.stop_if_unused()

    async def _follow(self, shell: Server, current: _Version, stop: asyncio.Event) -> None:
        try:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), POLL_SECONDS)
                    return
                if self._source.has_changed() and (version := await self._read()):
                    current = self._swap_tools(shell, current, version)
        finally:
            for version in self._versions.values():
                version.stop.set()
            await asyncio.wait([version.task for version in self._versions.values()])

    async def _read(self) -> _Version | None:
        """The file as it is now, begun; None if that fails."""
        try:
            return await self._start(await asyncio.to_thread(self._source.load))
        except UsageError as problem:
            why, details = str(problem), problem.details
        except Exception:
            why, details = "its lifespan failed", traceback.format_exc()
        self._note(f"{why}; the tools stay as they were\n{details}".rstrip())
        return None

    async def _start(self, server: Server) -> _Version:
        version = _Version(server)
        await version.started
        self._versions = {each.server: each for each in self._versions.values() if not each.task.done()}
        self._versions[server] = version
        return version

    def _swap_tools(self, shell: Server, old: _Version, new: _Version) -> _Version:
        """In one go, without awaiting: no message is handled in between. The version that is there now."""
        before, entries = shell.tools, shell.engine.catalog.entries
        conflicts = {each.tool.name for each in entries if not each.via} & {each.name for each in new.server.tools}
        if conflicts:
            self._note(f"the server has a tool {min(conflicts)!r} of its own; the tools stay as they were")
            new.replaced = True
            new.stop_if_unused()
            return old
        for entry in entries:
            if entry.via:
                with suppress(KeyError):  # the old version has taken it away itself
                    shell.remove(entry.tool.name)
        shell.include(new.server)
        for name in _RELOADED_ATTRIBUTES:
            setattr(shell.engine, name, getattr(new.server.engine, name))
        self._note(f"{self._source.label} was read again: {_difference(before, shell.tools)}")
        if _guards(old.server) != _guards(new.server):
            self._note("its guards are others now; those it was started with hold until it is started again")
        old.replaced = True
        old.stop_if_unused()
        return new


def _guards(server: Server) -> dict[str, Any]:
    """What can be compared: rules by what they say."""
    return {**server.engine.guard_options, "policy": server.engine.guard_set.policy.version}


def _difference(before: list[Tool], after: list[Tool]) -> str:
    old, new = ({tool.name: tool for tool in tools} for tools in (before, after))
    parts = {
        "new": new.keys() - old.keys(),
        "gone": old.keys() - new.keys(),
        "changed": {name for name in new.keys() & old.keys() if new[name] != old[name]},
    }
    changes = [f"{word}: {', '.join(sorted(names))}" for word, names in parts.items() if names]
    return "; ".join([f"{len(after)} tool{'s' if len(after) != 1 else ''}", *changes])
