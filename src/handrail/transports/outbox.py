"""Messages of a client over HTTP that expect no answer: replies to the server's requests, and notifications.

Each is a POST. A few are on their way at a time, the rest waits in order, so that a server that asks much does not get
as many connections. When much waits, reading pauses on the stream that brings the requests: the server is slowed down,
and no reply is dropped. Streams that bring no requests are read on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from msgspec import Struct

MAX_POSTS = 8  # at a time
MAX_WAITING = 256  # then no more requests of the server are read


class OutgoingMessage(Struct, eq=False):
    """A message on its way: the headers that were agreed when it was made, and `done` when its POST is over."""

    message: bytes
    headers: dict[str, str]
    done: asyncio.Future[None]


class Outbox:
    """Posts messages in order, `MAX_POSTS` at a time; `start` runs a coroutine as a task of the link."""

    def __init__(
        self,
        post: Callable[[bytes, dict[str, str]], Awaitable[None]],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._post = post
        self._start = start
        self._queue: deque[OutgoingMessage] = deque()
        self._open: set[asyncio.Future[None]] = set()  # of those that wait, and those on their way
        self._posting = 0
        self._room: asyncio.Future[None] | None = None
        self.added = 0  # in all

    def add(self, message: bytes, headers: dict[str, str]) -> asyncio.Future[None]:
        """Post a message as soon as it is its turn; the future is done when that is over, whatever came of it."""
        outgoing = OutgoingMessage(message, headers, asyncio.get_running_loop().create_future())
        self._queue.append(outgoing)
        self._open.add(outgoing.done)
        outgoing.done.add_done_callback(self._open.discard)
        self.added += 1
        if self._posting < MAX_POSTS:
            self._posting += 1
            self._start(self._work())
        return outgoing.done

    async def wait_for_room(self) -> None:
        """Wait until so little waits that more may be asked for."""
        while len(self._queue) > MAX_WAITING:
            self._room = self._room or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._room)

    async def wait_empty(self) -> None:
        """Wait until nothing waits, and nothing is on its way."""
        while self._open:
            await asyncio.wait(self._open)

    def clear(self) -> int:
        """Forget what waits; how much that was."""
        count = len(self._queue)
        self._queue.clear()
        self._release_waiter()
        return count

    async def _work(self) -> None:
        try:
            while self._queue:
                outgoing = self._queue.popleft()
                self._release_waiter()
                try:
                    await self._post(outgoing.message, outgoing.headers)
                finally:
                    if not outgoing.done.done():
                        outgoing.done.set_result(None)
        finally:
            self._posting -= 1

    def _release_waiter(self) -> None:
        if self._room is not None and len(self._queue) <= MAX_WAITING:
            self._room.set_result(None)
            self._room = None
