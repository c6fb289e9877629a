"""Both ends of a conversation in one process: the server's channel, and the client's transport over it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from typing import Any

from handrail.engine.core import Engine
from handrail.engine.dispatcher import Dispatcher
from handrail.errors import Kind, Sent, TransportError
from handrail.model import Principal
from handrail.transports.base import ClientTransport, MessageHandler, PendingRequest

log = logging.getLogger("handrail")

MESSAGES_PER_TURN = 100  # received before other tasks run


class MemoryChannel:
    """The server's end. The client calls `deliver` and `receive`; messages it does not receive slow the server down."""

    two_way = True
    stopping = disconnected = False

    def __init__(self, engine: Engine, principal: Principal, address: str = "memory") -> None:
        self._limits = engine.limits
        self._loop = asyncio.get_running_loop()
        self._conversation = Dispatcher(engine, self, principal)
        self._conversation.address = address
        self._conversation.watch()
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False

    async def deliver(self, message: bytes) -> None:
        """Hand one message to the server, without a newline."""
        if self._closed:
            raise TransportError("the channel is closed")
        async with asyncio.timeout(self._limits.write_seconds):
            await self._room.wait()
        # A call starts its own task, which is only possible outside of this one.
        self._loop.call_soon(self._receive, message)
        await asyncio.sleep(0)

    async def receive(self) -> bytes:
        """Wait for the next message of the server, and return it."""
        while not self._unread:
            if self._closed:
                raise TransportError("the channel is closed")
            self._arrived.clear()
            await self._arrived.wait()
        message = self._unread.popleft()
        self._unread_bytes -= len(message)
        if self._unread_bytes <= self._limits.max_unsent_bytes:
            self._room.set()
        return message

    async def close(self) -> None:
        """End the conversation. Calls that were accepted get their replies first."""
        if not self._closed:
            await self._conversation.close(self._limits.grace_seconds)
            self._closed = True
            self._arrived.set()

    def send(self, message: bytes) -> None:
        """Queue a message of the server for the client."""
        self._unread.append(message)
        self._unread_bytes += len(message)
        if self._unread_bytes > self._limits.max_unsent_bytes:
            self._room.clear()
        self._arrived.set()

    async def drain(self) -> None:
        await self._room.wait()

    def pause(self) -> None:
        """There is one stream for all calls; it stays open."""

    def _receive(self, message: bytes) -> None:
        if len(message) > self._limits.max_message_bytes:
            text = f"A message of {len(message):,} bytes; at most {self._limits.max_message_bytes:,} are allowed"
            body = self._conversation.refuse(Kind.INVALID_REQUEST, text).body
        else:
            body = self._conversation.receive(message)
        if body:
            self.send(body)


class MemoryTransport(ClientTransport):
    """The client's end: talks to a `Server`, or any object with its `serving` and `connect`."""

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
            if not number % MESSAGES_PER_TURN:  # `receive` does not pause while messages are queued
                await asyncio.sleep(0)
            handler.on_message(await self._channel.receive())

    async def _deliver(self) -> None:
        while True:
            while self._unsent:
                message, request = self._unsent.popleft()
                if request is not None:
                    if request.future.done():  # its caller has the error that it was not sent
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
