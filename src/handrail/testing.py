"""For tests of your tools: a client in the same process, and a scripted server to play against.

>>> async with Peer(server, revision="2025-11-25") as peer:
...     result = await peer.call("add", {"a": 1, "b": 2})
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping
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

__all__ = ["Peer", "Script"]

Answers = Callable[[str, Object], Any]

MAX_ROUNDS = 10
MAX_PAGES = 1_000


class Channel(Protocol):
    async def deliver(self, message: bytes) -> None: ...
    async def receive(self) -> bytes: ...
    async def close(self) -> None: ...


class Script:
    """A server that says what it was told to say: for each method, the answers in their order.

    An answer is a message with `result` or `error`; the id of the request is put in.
    """

    def __init__(self, answers: Mapping[str, Iterable[Object]], *, notices: Iterable[Object] = ()) -> None:
        self._answers = {method: deque(each) for method, each in answers.items()}
        self._out: asyncio.Queue[bytes] = asyncio.Queue()
        self._notices = list(notices)
        self.received: list[Object] = []

    async def deliver(self, message: bytes) -> None:
        request = decode(message)
        self.received.append(request)
        if "id" not in request:
            return
        canned = self._answers.get(request["method"])
        if canned:
            await self._out.put(jsonrpc.encode({**canned.popleft(), "id": request["id"]}))
        elif request["method"] == "initialize":
            version = request["params"]["protocolVersion"]
            result = {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "script", "version": "0"},
            }
            await self._out.put(jsonrpc.answer(request["id"], result))
        else:
            await self._out.put(jsonrpc.error(request["id"], -32601, f"Unknown method: {request['method']}"))
        while self._notices:
            await self._out.put(jsonrpc.encode(self._notices.pop(0)))

    async def receive(self) -> bytes:
        return await self._out.get()

    async def close(self) -> None:
        pass


class Peer:
    """A client in the same process, speaking the revision you name.

    `answers(method, params)` replies to the server's questions (elicitation, sampling, roots); `notices` holds the
    notifications that came, `wire` every message as it went over the wire.
    """

    def __init__(
        self,
        target: Server | Channel,
        *,
        revision: str = "2025-11-25",
        capabilities: Object | None = None,
        answers: Answers | None = None,
        principal: Principal = LOCAL,
        timeout: float = 10.0,
    ) -> None:
        self.revision = REVISIONS[revision]
        self.capabilities = {} if capabilities is None else capabilities
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
        if isinstance(self._target, Server):
            await self._stack.enter_async_context(self._target.serving())
            self._channel: Channel = self._target.connect(self._principal)
        else:
            self._channel = self._target
        self._reader = asyncio.create_task(self._read())
        if self.revision.stateless:
            return self
        params = {
            "protocolVersion": self.revision.name,
            "capabilities": self.capabilities,
            "clientInfo": {"name": "handrail-testing", "version": "0"},
        }
        self.welcome = await self._result("initialize", params)
        await self.notify("notifications/initialized")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._stack.aclose()

    async def tools(self) -> list[Tool]:
        """Every tool, over all pages."""
        tools: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page, cursor = self.revision.read_page(
                await self._result("tools/list", {} if cursor is None else {"cursor": cursor})
            )
            tools += [_tool(each) for each in page]
            if cursor is None:
                return tools
        raise RemoteProtocolError(f"tools/list: over {MAX_PAGES} pages")

    async def call(self, name: str, arguments: Object | None = None, **meta: Json) -> ToolResult:
        """Call a tool; answers questions on the way. `progressToken=…` and the like go into `_meta`."""
        params: Object = {"name": name}
        if arguments is not None:
            params["arguments"] = arguments
        for _ in range(MAX_ROUNDS):
            result = await self._result("tools/call", params, meta)
            if result.get("resultType") != "input_required":
                return self.revision.read_result(result, False)
            params = {k: v for k, v in params.items() if k not in ("inputResponses", "requestState")}
            asked: Object = result.get("inputRequests", {})
            params["inputResponses"] = {
                key: await self._reply(each["method"], each["params"]) for key, each in asked.items()
            }
            if "requestState" in result:
                params["requestState"] = result["requestState"]
        raise RemoteProtocolError(f"tools/call: still asking after {MAX_ROUNDS} rounds")

    async def request(
        self, method: str, params: Object | None = None, meta: Mapping[str, Json] | None = None
    ) -> Object:
        """Send a request and give back the whole answer as it came: a mapping with `result` or `error`."""
        self._ids += 1
        ident = self._ids
        waiter: asyncio.Future[Object] = asyncio.get_running_loop().create_future()
        self._waiting[ident] = waiter
        await self.send(jsonrpc.request(ident, method, self._enveloped(params, meta or {})))
        async with asyncio.timeout(self._timeout):
            return await waiter

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

    def _enveloped(self, params: Object | None, meta: Mapping[str, Json]) -> Json:
        envelope: Object = dict(meta)
        if self.revision.stateless:
            envelope = {
                VERSION: self.revision.name,
                CAPABILITIES: self.capabilities,
                CLIENT_INFO: {"name": "handrail-testing", "version": "0"},
                **({LOG_LEVEL: meta["logLevel"]} if "logLevel" in meta else {}),
                **{k: v for k, v in meta.items() if k != "logLevel"},
            }
        if envelope:
            return {**(params or {}), "_meta": {**(params or {}).get("_meta", {}), **envelope}}
        return UNSET if params is None else params

    async def _result(self, method: str, params: Object, meta: Mapping[str, Json] | None = None) -> Object:
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
            waiter = self._waiting.pop(message.get("id"), None)
            if waiter is not None and not waiter.done():
                waiter.set_result(message)
        elif "id" in message:
            try:
                result = await self._reply(message["method"], message.get("params", {}))
            except RemoteProtocolError as problem:
                await self.send(jsonrpc.error(message["id"], problem.code, str(problem)))
            else:
                await self.send(jsonrpc.answer(message["id"], result))
        else:
            async with self._news:
                self.notices.append(message)
                self._news.notify_all()

    async def _reply(self, method: str, params: Object) -> Json:
        if method == "ping":
            return {}
        if self._answers is None:
            raise RemoteProtocolError(f"no answer to {method} was prepared", code=-32601)
        reply = self._answers(method, params)
        return await reply if inspect.isawaitable(reply) else reply


def _tool(raw: Object) -> Tool:
    fields = dict(zip(Tool.__struct_encode_fields__, Tool.__struct_fields__, strict=True))
    return Tool(**{fields[name]: value for name, value in raw.items() if name in fields})
