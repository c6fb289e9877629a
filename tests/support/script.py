"""A server that says what it was told to say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.json import decode

from handrail import jsonrpc

Object = dict[str, Any]


class Script:
    """A server that says what it was told to say: for each method, the answers in their order.

    An answer is a message with `result` or `error`; the id of the request is put in.
    """

    def __init__(self, answers: Mapping[str, Iterable[Object]], *, notices: Iterable[Object] = ()) -> None:
        self.received: list[Object] = []
        self._answers = {method: list(each) for method, each in answers.items()}
        self._notices = list(notices)
        self._out: asyncio.Queue[bytes] = asyncio.Queue()

    async def deliver(self, message: bytes) -> None:
        request = decode(message)
        self.received.append(request)
        if "id" not in request:
            return
        ident, method = request["id"], request["method"]
        if self._answers.get(method):
            answer = jsonrpc.encode({**self._answers[method].pop(0), "id": ident})
        elif method == "initialize":
            agreed = {"protocolVersion": request["params"]["protocolVersion"], "capabilities": {"tools": {}}}
            answer = jsonrpc.response(ident, {**agreed, "serverInfo": {"name": "script", "version": "0"}})
        else:
            answer = jsonrpc.error(ident, -32601, f"Unknown method: {method}")
        for each in (answer, *map(jsonrpc.encode, self._notices)):
            self._out.put_nowait(each)
        self._notices.clear()

    async def receive(self) -> bytes:
        return await self._out.get()

    async def close(self) -> None:
        pass
