"""A gateway made from a description, which a process of its own can have as well: in memory, over HTTP, over stdio."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from handrail import Server
from handrail.guards import Policy, Rule
from patience import PATIENCE
from rigs_gateway import Rig, running
from scripted_upstream import Json, Object, P, Upstream, definition
from servers_listen import listening
from wires import ALL, MemoryWire, StdioWire, Wire, spawn
from wires_gateway import LegWire

DESCRIBED = "HANDRAIL_TEST_GATEWAY"


def operated(upstreams: Sequence[Object], rules: Sequence[Object] | None = None, **options: Any) -> Server:
    """A gateway with these upstreams: each has a `target`, and options of `include`.

    Without `rules` every call is allowed; if there are none in the list, the default holds.
    """
    if rules != []:
        options["policy"] = Policy([Rule(**each) for each in rules or [{"verdict": "allow"}]])
    options.setdefault("rates", None)  # tests call faster than callers may
    server = Server("gateway", **options)
    for each in upstreams:
        server.include(each["target"], **{name: value for name, value in each.items() if name != "target"})
    return server


def operated_of_environment() -> Server:
    """The same in a process of its own."""
    return operated(**json.loads(os.environ[DESCRIBED]))


class Place:
    """A running gateway. `server` is there where it runs in the loop of the tests."""

    def __init__(self, leg: str, server: Server | None, stack: AsyncExitStack) -> None:
        self.leg = leg
        self.url = ""
        self.pipe: StdioWire | None = None
        self._server = server
        self._stack = stack

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    async def client(self, revision: str, capabilities: Object | None = None) -> Wire:
        """An opened client. Over stdio there is one for all, which speaks this revision from now on."""
        wire: Wire
        if self.pipe is not None:
            await self.pipe.reopen(revision, capabilities or {})
            return self.pipe
        wire = LegWire(revision, self.url, "http") if self.leg == "http" else MemoryWire(revision, self.server)
        self._stack.push_async_callback(wire.close)
        await wire.open(capabilities or {})
        return wire

    async def clients(self, ran: Callable[[str, str], None]) -> AsyncIterator[Wire]:
        """A client of each dialect, one after the other, each recorded."""
        for revision in ALL:
            wire = await self.client(revision)
            ran(revision, self.leg)
            yield wire


@asynccontextmanager
async def place(leg: str, upstreams: Sequence[Object], **options: Any) -> AsyncIterator[Place]:
    """A gateway that is reached over `stdio`, `memory` or `http`."""
    async with AsyncExitStack() as stack:
        if leg == "stdio":
            os.environ[DESCRIBED] = json.dumps({"upstreams": list(upstreams), **options})
            try:
                process = await stack.enter_async_context(spawn("gateways_operated:operated_of_environment"))
            finally:
                del os.environ[DESCRIBED]
            found = Place(leg, None, stack)
            found.pipe = StdioWire(ALL[0], process)
            yield found
            return
        server = operated(upstreams, **options)
        await stack.enter_async_context(server.serving())
        found = Place(leg, server, stack)
        if leg == "http":
            endpoint = server.asgi()
            found.url = await stack.enter_async_context(listening(endpoint)) + endpoint.path
        yield found


# Upstreams whose tools are in the hands of the test


def upstream_of(rig: Rig) -> Upstream:
    """The upstream of a rig that runs in this process."""
    found = vars(rig)["upstream"]
    assert isinstance(found, Upstream)
    return found


def simple(name: str, description: str = "A tool", **more: Json) -> Object:
    """The definition of a tool that takes nothing, and answers with `I am` and its name."""
    return {"name": name, "description": description, "inputSchema": {"type": "object", "properties": {}}, **more}


def offer(rig: Rig, *tools: Object) -> None:
    """Have an upstream list these tools from now on, and say so."""
    upstream = upstream_of(rig)
    upstream.tools = [definition(rig.dialect, each) for each in tools]
    for session in list(upstream.sessions):
        session.announce()


@asynccontextmanager
async def offering(dialect: str, *tools: Object) -> AsyncIterator[Rig]:
    """An upstream over HTTP that lists these tools."""
    async with running(dialect, "http") as rig:
        offer(rig, *tools)
        yield rig


def behind(rig: Rig, **options: Any) -> Object:
    """How a rig is included: trusted, unless that is said otherwise."""
    more = {"revision": P} if rig.dialect == P else {}
    return {"target": rig.target, "prefix": "", "trusted": True, **more, **options}


# What clients see


async def listed(wire: Wire) -> dict[str, Object]:
    """All tools of all pages, by name."""
    found: dict[str, Object] = {}
    params: Object = {}
    while True:
        page = (await wire.request("tools/list", params))["result"]
        found |= {tool["name"]: tool for tool in page["tools"]}
        if not page.get("nextCursor"):
            return found
        params = {"cursor": page["nextCursor"]}


async def until(wire: Wire, fits: Callable[[dict[str, Object]], bool]) -> dict[str, Object]:
    """What is listed, once it fits."""
    async with asyncio.timeout(PATIENCE):
        while not fits(tools := await listed(wire)):
            pass
    return tools
