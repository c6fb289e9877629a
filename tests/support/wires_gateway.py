"""A gateway between raw clients (`wires.py`) and scripted upstreams (`rigs_gateway.py`), in any pair of places.

There is one gateway for each transport of upstreams; it has all seven dialects behind it, each under its prefix. In
memory and over HTTP it runs in the loop of the tests; over stdio it is a process that connects to the same upstreams.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from handrail import Server
from handrail.guards import Policy, Rule
from rigs_gateway import Rig, running
from scripted_upstream import DIALECTS, R0, R1, R2, R3, R4, R5, P
from servers_listen import listening
from wires import Json, MemoryWire, Object, StdioWire, Wire, spawn
from wires_http import Headers, HttpWire, Reply

UPSTREAMS = "HANDRAIL_TEST_UPSTREAMS"
PREFIX = {R0: "r0_", R1: "r1_", R2: "r2_", R3: "r3_", R4: "r4_", R5: "r5_", P: "p_"}
LEGS = ("stdio", "http", "sse")


class Pair(NamedTuple):
    """A client and an upstream: what each speaks, over what."""

    client: str
    leg: str
    upstream: str
    up_leg: str

    def __str__(self) -> str:
        return f"{self.client}-{self.leg}-to-{self.upstream}-{self.up_leg}"

    @property
    def exists(self) -> bool:
        """The transport of 2024 is not there for a revision without a handshake."""
        return not ((self.client == R5 and self.leg == "sse") or (self.upstream == R5 and self.up_leg == "sse"))


ALLOWED = (Rule(verdict="allow"),)


def gateway_of(upstreams: list[Object], rules: Sequence[Rule] = ALLOWED) -> Server:
    """A gateway that trusts these upstreams and allows every call: what is tested is how it translates."""
    server = Server("gateway", policy=Policy(rules), rates=None)  # the matrix calls faster than callers may
    for each in upstreams:
        server.include(each.pop("target"), trusted=True, new="allow", **each)
    return server


def gateway_of_environment() -> Server:
    """The same in a process of its own."""
    return gateway_of(json.loads(os.environ[UPSTREAMS]))


def included(rig: Rig) -> Object:
    """How an upstream is included."""
    prefix = PREFIX[rig.dialect]
    return {"target": rig.target, "name": prefix.removesuffix("_"), "prefix": prefix, **rig.options}


class LegWire(HttpWire):
    """An HTTP client on the transport it is told, with headers of its own."""

    def __init__(self, revision: str, url: str, leg: str) -> None:
        super().__init__(revision, url)
        self.extra: Headers = {}
        self.last_event = ""  # its id
        self._leg = leg

    @property
    def is_old(self) -> bool:
        return self._leg == "sse"

    def _own(self) -> Headers:
        return {**super()._own(), **self.extra}

    def _headers_for(self, message: Json) -> Headers:
        return {**super()._headers_for(message), **self.extra}

    async def _listen(self, reply: Reply, events: AsyncIterator[Headers]) -> None:
        async def followed() -> AsyncIterator[Headers]:
            async for event in events:
                self.last_event = event.get("id", self.last_event)
                yield event

        await super()._listen(reply, followed())

    async def resume(self, event: str) -> None:
        """Ask for what a stream had to say after an event."""
        self.extra = {"Last-Event-ID": event}
        try:
            await self._open_stream()
        finally:
            self.extra = {}

    async def hang_up(self, ident: int) -> None:
        """Close the connection on which a request waits for its answer."""
        for task, (asked, _) in list(self._waiting.items()):
            if asked == json.dumps(ident):
                await self._hang_up({task: self._waiting.pop(task)})
                return
        raise AssertionError(f"{ident} does not wait")


class Gateway:
    """A gateway and what is behind it; clients of it are kept open for the next test."""

    def __init__(self, rigs: dict[str, Rig], rules: Sequence[Rule] = ALLOWED, **options: Any) -> None:
        self.rigs = rigs
        self.server = gateway_of([included(rig) | options for rig in rigs.values()], rules)
        self.lists: dict[tuple[str, str], dict[str, Object]] = {}  # what was listed first, by client and leg
        self.url = ""
        self._stack = AsyncExitStack()
        self._idle: dict[tuple[str, ...], list[Wire]] = {}

    async def start(self) -> None:
        await self._stack.enter_async_context(self.server.serving())
        endpoint = self.server.asgi()
        self.url = await self._stack.enter_async_context(listening(endpoint)) + endpoint.path

    async def close(self) -> None:
        for wire in (each for idle in self._idle.values() for each in idle):
            await wire.close()
        await self._stack.aclose()

    @asynccontextmanager
    async def wire(self, revision: str, leg: str, capabilities: Object, *, fresh: bool = False) -> AsyncIterator[Wire]:
        """An opened wire. One that a test left in a bad state is not used again."""
        key = (leg, revision, json.dumps(capabilities)) if leg in ("http", "sse") else (leg,)
        idle = self._idle.setdefault(key, [])
        wire = idle.pop() if idle and not fresh else await self._new(revision, leg)
        try:
            if (wire.revision, wire.capabilities) != (revision, capabilities) or not wire.asked:
                await wire.reopen(revision, capabilities)
            wire.others.clear()
            yield wire
        except BaseException:
            await wire.close()
            raise
        idle.append(wire)

    async def _new(self, revision: str, leg: str) -> Wire:
        if leg == "memory":
            return MemoryWire(revision, self.server)
        if leg != "stdio":
            return LegWire(revision, self.url, leg)
        os.environ[UPSTREAMS] = json.dumps([included(rig) for rig in self.rigs.values()])
        try:
            process = await self._stack.enter_async_context(spawn("wires_gateway:gateway_of_environment"))
        finally:
            del os.environ[UPSTREAMS]
        return StdioWire(revision, process)


class Gateways:
    """The gateways of a module, by the transport of their upstreams; each starts when it is first needed."""

    def __init__(self) -> None:
        self._by_leg: dict[str, Gateway] = {}
        self._stack = AsyncExitStack()

    @property
    def rigs(self) -> list[Rig]:
        return [rig for gateway in self._by_leg.values() for rig in gateway.rigs.values()]

    async def get(self, up_leg: str) -> Gateway:
        if up_leg not in self._by_leg:
            rigs = {
                dialect: await self._stack.enter_async_context(running(dialect, up_leg))
                for dialect in DIALECTS
                if Pair(R0, "http", dialect, up_leg).exists
            }
            gateway = Gateway(rigs)
            self._stack.push_async_callback(gateway.close)
            await gateway.start()
            self._by_leg[up_leg] = gateway
        return self._by_leg[up_leg]

    async def close(self) -> None:
        await self._stack.aclose()


Answers = Callable[[str, Object], Object]


class Talk:
    """A client's end of one pair, and the upstream it talks to."""

    def __init__(self, pair: Pair, wire: Wire, gateway: Gateway) -> None:
        self.pair = pair
        self.wire = wire
        self.gateway = gateway
        self.rig = gateway.rigs[pair.upstream]
        self.prefix = PREFIX[pair.upstream]
        self.asked: list[tuple[str, Object]] = []  # questions of the upstream
        self.states: list[str] = []  # of those that were asked by answer

    async def start(self, tool: str, arguments: Object | None = None, **meta: Json) -> int:
        """Send a call; its id."""
        return await self.wire.ask("tools/call", self._params(tool, arguments), **meta)

    def _params(self, tool: str, arguments: Object | None) -> Object:
        return {"name": self.prefix + tool, "arguments": arguments or {}}

    async def call(self, tool: str, arguments: Object | None = None, **meta: Json) -> Object:
        """The whole answer to a call."""
        return await self.wire.answer(await self.start(tool, arguments, **meta))

    async def result(self, tool: str, arguments: Object | None = None, **meta: Json) -> Object:
        """The result of a call, without its `_meta`."""
        answer = await self.call(tool, arguments, **meta)
        assert "result" in answer, answer
        result: Object = {name: value for name, value in answer["result"].items() if name != "_meta"}
        return result

    async def text(self, tool: str, arguments: Object | None = None, **meta: Json) -> str:
        return text_of(await self.call(tool, arguments, **meta))

    async def converse(self, tool: str, arguments: Object, reply: Answers) -> Object:
        """The answer to a call whose questions are answered: `reply(method, params)` is the result, or an error."""
        ident = await self.start(tool, arguments)
        while True:
            if self.wire.stateless:
                answer = await self.wire.answer(ident)
                result = answer.get("result", {})
                if result.get("resultType") != "input_required":
                    return answer
                self.states.append(result["requestState"])
                params = {**self._params(tool, arguments), "requestState": result["requestState"]}
                params["inputResponses"] = {
                    key: self._reply(reply, question) for key, question in result["inputRequests"].items()
                }
                ident = await self.wire.ask("tools/call", params)
                continue
            message = await self._next(ident)
            if "method" not in message:
                return message
            given = self._reply(reply, message)
            member = "error" if "code" in given else "result"
            await self.wire.send({"jsonrpc": "2.0", "id": message["id"], member: given})

    def _reply(self, reply: Answers, question: Object) -> Object:
        params = question.get("params", {})
        self.asked.append((question["method"], params))
        return reply(question["method"], params)

    async def _next(self, ident: int) -> Object:
        """The next question of the gateway, or the answer to a request."""
        others = self.wire.others
        while True:
            for at, each in enumerate(others):
                if ("method" in each and "id" in each) or each.get("id") == ident:
                    return others.pop(at)
            others.append(await self.wire.receive())

    def notices(self, method: str) -> list[Object]:
        """The parameters of the notifications of a method that came so far."""
        return [each.get("params", {}) for each in self.wire.others if each.get("method") == method]


def text_of(answer: Object) -> str:
    """The text of a result, in whatever dialect it is; a failure is none."""
    result = answer["result"]
    if "toolResult" in result:
        assert isinstance(result["toolResult"], str), result
        return result["toolResult"]
    assert not result["isError"], result
    return "\n".join(block["text"] for block in result["content"])


def failure_of(answer: Object) -> str:
    """The text of a result that says that the tool failed; anything else is wrong."""
    assert "result" in answer, answer
    result = answer["result"]
    if "toolResult" in result:
        text = result["toolResult"]["error"]
        assert isinstance(text, str)
        assert text
        return text
    assert result["isError"] is True
    return "\n".join(block["text"] for block in result["content"])
