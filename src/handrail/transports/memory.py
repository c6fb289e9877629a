"""Both ends of a conversation in one process."""

from __future__ import annotations

import asyncio
from collections import deque

from handrail.engine.core import Engine
from handrail.engine.dispatcher import Dispatcher
from handrail.errors import Kind, TransportError
from handrail.model import Principal


class MemoryChannel:
    """The client's end: `deliver` a message, `receive` the next one. What is not received holds the server up."""

    two_way = True
    stopping = disconnected = False

    def __init__(self, engine: Engine, principal: Principal, address: str = "memory") -> None:
        self._limits = engine.limits
        self._loop = asyncio.get_running_loop()
        self._conversation = Dispatcher(engine, self, principal)
        self._conversation.address = address
        self._conversation.watch_tools()
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False

    async def deliver(self, message: bytes) -> None:
        """Give the server one message, without a newline."""
        if self._closed:
            raise TransportError("the channel is closed")
        async with asyncio.timeout(self._limits.write_seconds):
            await self._room.wait()
        # A call starts its own task, which is only possible outside of this one: before our next turn.
        self._loop.call_soon(self._receive, message)
        await asyncio.sleep(0)

    async def receive(self) -> bytes:
        """The next message from the server."""
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
        """End the conversation: calls already accepted are answered first, then nothing more comes."""
        if not self._closed:
            await self._conversation.close(self._limits.grace_seconds)
            self._closed = True
            self._arrived.set()

    def send(self, message: bytes) -> None:
        """From the server: what the client will receive."""
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
