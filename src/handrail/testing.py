"""For tests of your tools: a client in the same process.

>>> async with Peer(server, revision="2025-11-25") as peer:
...     result = await peer.call("add", {"a": 1, "b": 2})
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Protocol

from msgspec import UNSET, convert
from msgspec.json import decode

from handrail import jsonrpc
from handrail.errors import LocalProtocolError, RemoteProtocolError
from handrail.model import Json, Object, Principal, Tool, ToolResult
from handrail.revisions import REVISIONS
from handrail.revisions.base import CAPABILITIES, CLIENT_INFO, VERSION
from handrail.server import LOCAL_PRINCIPAL, Server
from handrail.suggest import describe_value, mapping, seconds, suggest_names

__all__ = ["Peer", "PeerChannel"]

MAX_ROUNDS = 10

_CLIENT_INFO = {"name": "handrail-testing", "version": "0"}


class PeerChannel(Protocol):
    """The channel of a `Peer`: of a server, or one of yours."""

    async def deliver(self, message: bytes) -> None: ...
    async def receive(self) -> bytes: ...
    async def close(self) -> None: ...


class _NotConnected:
    """The channel of a peer outside of its `async with`."""

    async def deliver(self, message: bytes) -> None:
        raise LocalProtocolError("Peer: not connected; use it inside `async with Peer(server) as peer:`")

    async def receive(self) -> bytes:
        raise LocalProtocolError("Peer: not connected")

    async def close(self) -> None:
        """Nothing to close."""


@suggest_names({"call_tool": "peer.call(name, {…})", "list_tools": "peer.tools()"})
class Peer:
    """A client in the same process, speaking the revision you name.

    `answers(method, params)` replies to the server's questions (elicitation, sampling, roots); `notices` holds the
    notifications that came, `wire` every message as it came over the wire.
    """

    def __init__(
        self,
        target: Server | PeerChannel,
        *,
        revision: str = "2025-11-25",
        capabilities: Object | None = None,
        answers: Callable[[str, Object], Any] | None = None,
        principal: Principal = LOCAL_PRINCIPAL,
        timeout: float = 10.0,
    ) -> None:
        if revision not in REVISIONS:
            raise ValueError(f"unknown revision {revision!r}; known are {', '.join(REVISIONS)}")
        if not isinstance(target, Server) and not callable(getattr(target, "deliver", None)):
            raise TypeError(f"Peer: expected a Server, or a channel of your own, got {describe_value(target)}")
        self.revision = REVISIONS[revision]
        self.capabilities = dict(mapping("Peer: capabilities", capabilities or {}, "capabilities"))
        self._channel: PeerChannel = _NotConnected()
        self.welcome: Object = {}
        self.notices: list[Object] = []
        self.wire: list[bytes] = []
        self._target = target
        self._answers = answers
        self._principal = principal
        self._timeout = seconds("Peer: timeout", timeout)
        self._pending: dict[Json, asyncio.Future[Object]] = {}
        self._notified = asyncio.Event()
        self._ids = itertools.count(1)

    async def __aenter__(self) -> Peer:
        async with AsyncExitStack() as stack:
            target = self._target
            if isinstance(target, Server):
                await stack.enter_async_context(target.serving())
                target = target.connect(self._principal)
            self._channel = target
            self._tasks = {asyncio.create_task(self._listen(target))}
            stack.push_async_callback(self._close)
            if not self.revision.stateless:
                await self._initialize()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def _close(self) -> None:
        channel, self._channel = self._channel, _NotConnected()
        await channel.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _initialize(self) -> None:
        revision_name = self.revision.name
        params = {"protocolVersion": revision_name, "capabilities": self.capabilities, "clientInfo": _CLIENT_INFO}
        self.welcome = await self._result("initialize", params)
        if self.welcome.get("protocolVersion") != revision_name:
            raise RemoteProtocolError(
                f"asked for {revision_name}, the server speaks {self.welcome.get('protocolVersion')}"
            )
        await self.notify("notifications/initialized")

    async def tools(self) -> list[Tool]:
        """Every tool, over all pages."""
        tools: list[Tool] = []
        page = await self._result("tools/list", {})
        while True:
            tools += convert(page["tools"], list[Tool])
            cursor = page.get("nextCursor")
            if cursor is None or (self.revision.no_optional_members and not cursor):
                return tools
            page = await self._result("tools/list", {"cursor": cursor})

    async def call(self, name: str, arguments: Object | None = None, **meta: Json) -> ToolResult:
        """Call a tool; answers questions on the way. `progressToken=…` and the like go into `_meta`."""
        params: Object = {"name": name} if arguments is None else {"name": name, "arguments": arguments}
        answers: Object = {}
        for _ in range(MAX_ROUNDS):
            result = await self._result("tools/call", {**params, **answers}, meta)
            if result.get("resultType") != "input_required":
                return self.revision.read(result)
            input_requests: Object = result.get("inputRequests", {})
            replies = {key: await self._reply(each["method"], each["params"]) for key, each in input_requests.items()}
            answers = {"inputResponses": replies}
            if "requestState" in result:
                answers["requestState"] = result["requestState"]
        raise RemoteProtocolError(f"tools/call: still asking after {MAX_ROUNDS} rounds")

    async def request(self, method: str, params: Object | None = None, meta: Object | None = None) -> Object:
        """Send a request; return the whole response: a mapping with `result` or `error`."""
        request_id = next(self._ids)
        waiter: asyncio.Future[Object] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = waiter
        try:
            await self.send(jsonrpc.request(request_id, method, self._add_envelope(params or {}, meta or {})))
            async with asyncio.timeout(self._timeout):
                return await waiter
        finally:
            del self._pending[request_id]

    async def notify(self, method: str, params: Object | None = None) -> None:
        await self.send(jsonrpc.notification(method, UNSET if params is None else params))

    async def send(self, message: bytes) -> None:
        """Send bytes as they are."""
        await self._channel.deliver(message)

    async def notice(self, method: str) -> Object:
        """Return the first notification of a method; wait for it if none has come."""
        async with asyncio.timeout(self._timeout):
            while True:
                for each in self.notices:
                    if each["method"] == method:
                        return each
                self._notified.clear()
                await self._notified.wait()

    def _add_envelope(self, params: Object, meta: Object) -> Json:
        if self.revision.stateless:
            meta = {VERSION: self.revision.name, CAPABILITIES: self.capabilities, CLIENT_INFO: _CLIENT_INFO, **meta}
        if meta:
            params = {**params, "_meta": {**params.get("_meta", {}), **meta}}
        return params or UNSET

    async def _result(self, method: str, params: Object, meta: Object | None = None) -> Object:
        answer = await self.request(method, params, meta)
        if "error" in answer:
            error = answer["error"]
            raise RemoteProtocolError(error["message"], code=error["code"], data=error.get("data"))
        result: Object = answer["result"]
        return result

    async def _listen(self, channel: PeerChannel) -> None:
        while True:
            data = await channel.receive()
            self.wire.append(data)
            message = decode(data)
            for each in message if isinstance(message, list) else [message]:
                self._dispatch(each)

    def _dispatch(self, message: Object) -> None:
        if "method" not in message:
            waiter = self._pending.get(message.get("id"))
            if waiter is not None and not waiter.done():
                waiter.set_result(message)
        elif "id" not in message:
            self.notices.append(message)
            self._notified.set()
        else:  # beside the reader, so that answering may involve the server
            self._tasks.add(asyncio.create_task(self._handle_request(message)))

    async def _handle_request(self, message: Object) -> None:
        try:
            answer = jsonrpc.response(message["id"], await self._reply(message["method"], message.get("params", {})))
        except RemoteProtocolError as problem:
            answer = jsonrpc.error(message["id"], problem.code, str(problem))
        except Exception as problem:  # of the test's own `answers`: the waiting request raises it
            for waiter in self._pending.values():
                if not waiter.done():
                    waiter.set_exception(problem)
            return
        await self.send(answer)

    async def _reply(self, method: str, params: Object) -> Json:
        if method == "ping":
            return {}
        if self._answers is None:
            raise RemoteProtocolError(f"no answer to {method} was prepared", code=-32601)
        reply = self._answers(method, params)
        return await reply if inspect.isawaitable(reply) else reply
