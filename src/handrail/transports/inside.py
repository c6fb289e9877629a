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
from handrail.transports.base import Ear, Link, Waiting

log = logging.getLogger("handrail")

TURN = 100  # messages, until others have theirs


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
        both = (partial(self._receive, ear), self._deliver)
        self._tasks = [asyncio.create_task(_tell_end(ear, work)) for work in both]

    def send(self, message: bytes, about: Waiting | None) -> None:
        self._unsent.append((message, about))
        self._more.set()

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

    async def _receive(self, ear: Ear) -> None:
        for number in count():
            if not number % TURN:  # a message that is there already is taken without a pause
                await asyncio.sleep(0)
            ear.hear(await self._channel.receive())

    async def _deliver(self) -> None:
        while True:
            while self._unsent:
                message, about = self._unsent.popleft()
                if about is not None:
                    if about.future.done():  # its caller was told that it was not sent: so it must not leave later
                        continue
                    about.sent = Sent.UNKNOWN
                await self._channel.deliver(message)
            self._more.clear()
            await self._more.wait()


async def _tell_end(ear: Ear, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except TransportError as problem:
        ear.lost(problem)
    except TimeoutError:
        ear.lost(TransportError("the server took nothing"))
    except Exception as problem:
        log.exception("a server in this process failed")
        ear.lost(TransportError(f"the server failed with {type(problem).__name__}"))
