"""A client's way to a server object of its own process."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AsyncExitStack
from typing import Any

from handrail.errors import Sent, TransportError
from handrail.transports.link import Ear, Link, Waiting


class Inside(Link):
    """Talks to whatever has `serving` and `connect`, as a `Server` has."""

    disconnect_cancels = False
    news = 1

    def __init__(self, server: Any) -> None:
        self._server = server
        self._stack = AsyncExitStack()
        self._unsent: deque[tuple[bytes, Waiting | None]] = deque()
        self._more = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, ear: Ear) -> None:
        await self._stack.enter_async_context(self._server.serving())
        self._channel = self._server.connect()
        self._tasks = [asyncio.create_task(self._receive(ear)), asyncio.create_task(self._deliver(ear))]

    def send(self, message: bytes, about: Waiting | None) -> None:
        self._unsent.append((message, about))
        self._more.set()

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        if tasks:
            await self._channel.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._stack.aclose()

    async def _receive(self, ear: Ear) -> None:
        while True:
            try:
                message = await self._channel.receive()
            except TransportError as closed:
                ear.lost(closed)
                return
            ear.hear(message)

    async def _deliver(self, ear: Ear) -> None:
        while True:
            while self._unsent:
                message, about = self._unsent.popleft()
                if about is not None:
                    about.sent = Sent.UNKNOWN
                try:
                    await self._channel.deliver(message)
                except TransportError as closed:
                    ear.lost(closed)
                    return
                except TimeoutError:
                    ear.lost(TransportError("the server took nothing"))
                    return
            self._more.clear()
            await self._more.wait()
