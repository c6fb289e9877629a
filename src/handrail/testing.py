"""For tests of your tools: a client in the same process.

>>> async with Peer(server, revision="2025-11-25") as peer:
...     result = await peer.call("add", {"a": 1, "b": 2})
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Protocol

from msgspec import UNSET
from msgspec.json import decode

from handrail import jsonrpc
from handrail.errors import RemoteProtocolError
from handrail.model import Json, Object, Principal, Tool, ToolResult
from handrail.revisions import REVISIONS
from handrail.revisions.base import CAPABILITIES, CLIENT_INFO, LOG_LEVEL, VERSION
from handrail.server import LOCAL, Server

__all__ = ["Peer"]

MAX_ROUNDS = 10
MAX_PAGES = 1_000

_ME = {"name": "handrail-testing", "version": "0"}


class Channel(Protocol):
    """What a `Peer` talks through: a server's own, or one of yours."""

    async def deliver(self, message: bytes) -> None: ...
    async def receive(self) -> bytes: ...
    async def close(self) -> None: ...


class Peer:
    """A client in the same process, speaking the revision you name.

    `answers(method, params)` replies to the server's questions (elicitation, sampling, roots); `notices` holds the
    notifications that came, `wire` every message as it came over the wire.
    """

    def __init__(
        self,
        target: Server | Channel,
        *,
        revision: str = "2025-11-25",
        capabilities: Object | None = None,
        answers: Callable[[str, Object], Any] | None = None,
        principal: Principal = LOCAL,
        timeout: float = 10.0,
    ) -> None:
        if revision not in REVISIONS:
            raise ValueError(f"unknown revision {revision!r}; known are {', '.join(REVISIONS)}")
        self.revision = REVISIONS[revision]
        self.capabilities = capabilities or {}
        self.welcome: Object = {}
        self.notices: list[Object] = []
        self.wire: list[bytes] = []
        self._target = target
        self._answers = answers
        self._principal = principal
        self._timeout = timeout
        self._waiting: dict[Json, asyncio.Future[Object]] = {}
        self._news = asyncio.Condition()
        self._ids = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Peer:
        target = self._target
        if isinstance(target, Server):
            await self._stack.enter_async_context(target.serving())
            target = target.connect(self._principal)
        self._channel = target
        self._tasks = {asyncio.create_task(self._read())}
        if not self.revision.stateless:
            try:
                await self._shake_hands()
            except BaseException:
                await self.__aexit__()
                raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def _shake_hands(self) -> None:
        wanted = self.revision.name
        params = {"protocolVersion": wanted, "capabilities": self.capabilities, "clientInfo": _ME}
        self.welcome = await self._result("initialize", params)
        if self.welcome.get("protocolVersion") != wanted:
            raise RemoteProtocolError(f"asked for {wanted}, the server speaks {self.welcome.get('protocolVersion')}")
        await self.notify("notifications/initialized")

    async def tools(self) -> list[Tool]:
        """Every tool, over all pages."""
        fields = dict(zip(Tool.__struct_encode_fields__, Tool.__struct_fields__, strict=True))
        tools: list[Tool] = []
        params: Object = {}
        for _ in range(MAX_PAGES):
            page = await self._result("tools/list", params)
            for raw in page["tools"]:
                tools.append(Tool(**{fields[name]: value for name, value in raw.items() if name in fields}))
            params = {"cursor": page.get("nextCursor")}
            if params["cursor"] in (None, self.revision.last_cursor):
                return tools
        raise RemoteProtocolError(f"tools/list: over {MAX_PAGES} pages")

    async def call(self, name: str, arguments: Object | None = None, **meta: Json) -> ToolResult:
        """Call a tool; answers questions on the way. `progressToken=…` and the like go into `_meta`."""
        params: Object = {"name": name} if arguments is None else {"name": name, "arguments": arguments}
        answers: Object = {}
        for _ in range(MAX_ROUNDS):
            result = await self._result("tools/call", {**params, **answers}, meta)
            if result.get("resultType") != "input_required":
                return self.revision.read_result(result, False)
            asked: Object = result.get("inputRequests", {})
            replies = {key: await self._reply(each["method"], each["params"]) for key, each in asked.items()}
            answers = {"inputResponses": replies}
            if "requestState" in result:
                answers["requestState"] = result["requestState"]
        raise RemoteProtocolError(f"tools/call: still asking after {MAX_ROUNDS} rounds")

    async def request(self, method: str, params: Object | None = None, meta: Object | None = None) -> Object:
        """Send a request and give back the whole answer as it came: a mapping with `result` or `error`."""
        self._ids += 1
        ident = self._ids
        waiter: asyncio.Future[Object] = asyncio.get_running_loop().create_future()
        self._waiting[ident] = waiter
        try:
            await self.send(jsonrpc.request(ident, method, self._enveloped(params, dict(meta or {}))))
            async with asyncio.timeout(self._timeout):
                return await waiter
        finally:
            self._waiting.pop(ident, None)

    async def notify(self, method: str, params: Object | None = None) -> None:
        await self.send(jsonrpc.notification(method, UNSET if params is None else params))

    async def send(self, message: bytes) -> None:
        """Send bytes as they are."""
        await self._channel.deliver(message)

    async def notice(self, method: str) -> Object:
        """The first notification of a method, waiting for it if need be."""
        async with asyncio.timeout(self._timeout), self._news:
            while True:
                for each in self.notices:
                    if each["method"] == method:
                        return each
                await self._news.wait()

    def _enveloped(self, params: Object | None, meta: Object) -> Json:
        if self.revision.stateless:
            if "logLevel" in meta:
                meta[LOG_LEVEL] = meta.pop("logLevel")
            meta = {VERSION: self.revision.name, CAPABILITIES: self.capabilities, CLIENT_INFO: _ME, **meta}
        if not meta:
            return UNSET if params is None else params
        params = params or {}
        return {**params, "_meta": {**params.get("_meta", {}), **meta}}

    async def _result(self, method: str, params: Object, meta: Object | None = None) -> Object:
        answer = await self.request(method, params, meta)
        if "error" in answer:
            error = answer["error"]
            raise RemoteProtocolError(error["message"], code=error["code"], data=error.get("data"))
        result: Object = answer["result"]
        return result

    async def _read(self) -> None:
        while True:
            data = await self._channel.receive()
            self.wire.append(data)
            message = decode(data)
            for each in message if isinstance(message, list) else [message]:
                await self._take(each)

    async def _take(self, message: Object) -> None:
        if "method" not in message:
            waiter = self._waiting.get(message.get("id"))
            if waiter is not None and not waiter.done():
                waiter.set_result(message)
        elif "id" not in message:
            async with self._news:
                self.notices.append(message)
                self._news.notify_all()
        else:  # beside the reader, so that answering may involve the server
            self._tasks.add(asyncio.create_task(self._answer(message)))

    async def _answer(self, message: Object) -> None:
        try:
            answer = jsonrpc.answer(message["id"], await self._reply(message["method"], message.get("params", {})))
        except RemoteProtocolError as problem:
            answer = jsonrpc.error(message["id"], problem.code, str(problem))
        except Exception as problem:  # of the test's own `answers`: whoever waits is to hear of it
            for waiter in self._waiting.values():
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
