"""A client's way to a server object of its own process."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from typing import Any

from handrail.errors import Sent, TransportError
from handrail.transports.base import ClientTransport, MessageHandler, PendingRequest

log = logging.getLogger("handrail")

MESSAGES_PER_TURN = 100  # messages, until others have theirs


class MemoryTransport(ClientTransport):
    """Talks to whatever has `serving` and `connect`, as a `Server` has."""

    disconnect_cancels = False
    notification_stream = 1

    def __init__(self, server: Any) -> None:
        self._server = server
        self._stack = AsyncExitStack()
        self._unsent: deque[tuple[bytes, PendingRequest | None]] = deque()
        self._has_unsent = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, handler: MessageHandler) -> None:
        await self._stack.enter_async_context(self._server.serving())
        self._channel = self._server.connect()
        both = (partial(self._receive, handler), self._deliver)
        self._tasks = [asyncio.create_task(_report_failure(handler, work)) for work in both]

    def send(self, message: bytes, request: PendingRequest | None) -> None:
        self._unsent.append((message, request))
        self._has_unsent.set()

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        if tasks:
            try:
                await self._channel.close()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                await self._stack.aclose()

    async def _receive(self, handler: MessageHandler) -> None:
        for number in count():
            if not number % MESSAGES_PER_TURN:  # a message that is there already is taken without a pause
                await asyncio.sleep(0)
            handler.on_message(await self._channel.receive())

    async def _deliver(self) -> None:
        while True:
            while self._unsent:
                message, request = self._unsent.popleft()
                if request is not None:
                    if request.future.done():  # its caller was told that it was not sent: so it must not leave later
                        continue
                    request.sent = Sent.UNKNOWN
                await self._channel.deliver(message)
            self._has_unsent.clear()
            await self._has_unsent.wait()


async def _report_failure(handler: MessageHandler, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except TransportError as problem:
        handler.on_failure(problem)
    except TimeoutError:
        handler.on_failure(TransportError("the server took nothing"))
    except Exception as problem:
        log.exception("a server in this process failed")
        handler.on_failure(TransportError(f"the server failed with {type(problem).__name__}"))
