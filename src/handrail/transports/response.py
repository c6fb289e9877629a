"""One HTTP response: JSON when the answer is all there is to say, else events, kept for a client that comes back."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from handrail.engine.core import Limits
from handrail.engine.sessions import END, EventLog
from handrail.protocol import sse
from handrail.protocol.http import ORIGIN, Headers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Fields = list[tuple[bytes, bytes]]

KEEP_ALIVE_SECONDS = 15.0
RETRY_MS = 1_000

JSON: Fields = [(b"content-type", b"application/json")]
_TEXT: Fields = [(b"content-type", b"text/plain; charset=utf-8")]
_EVENTS: Fields = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Stream:
    """What one HTTP response will say: the outlet of a conversation."""

    def __init__(self, limits: Limits) -> None:
        self.unsent: deque[bytes] = deque()
        self.answer: bytes | None = None
        self.ended = False  # no more will come
        self.gone = False  # nobody reads any more
        self.left = asyncio.Event()
        self.two_way = True  # it may carry more than the answer
        self.paused = False  # the reader is to come back for the rest
        self._limits = limits
        self._unsent_bytes = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def send(self, message: bytes) -> None:
        if self.ended or not self.two_way:
            return
        self.unsent.append(message)
        self._unsent_bytes += len(message)
        if self._unsent_bytes > self._limits.max_unsent_bytes:
            self._room.clear()
        self._news.set()

    async def drain(self) -> None:
        if not self.gone:
            await self._room.wait()

    def take(self) -> list[bytes]:
        """What has come since the last time."""
        taken = list(self.unsent)
        self.unsent.clear()
        self._unsent_bytes = 0
        self._room.set()
        return taken

    def finish(self, answer: bytes | None) -> None:
        """The answer, or the news that there will be none; the first of them counts."""
        if self.ended:
            return
        self.answer = answer
        self.ended = True
        self._news.set()

    def pause(self) -> None:
        self.paused = True
        self._news.set()

    def let_go(self) -> None:
        self.gone = True
        self.left.set()
        self._room.set()
        self._news.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for news; whether there was any."""
        if self._news.is_set():
            self._news.clear()
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
            self._news.clear()
            return True
        return False


class Response:
    """The way back to whoever sent a request. After it has gone, writing does nothing."""

    def __init__(self, send: Send, receive: Receive, headers: Headers, limits: Limits) -> None:
        self.stream = Stream(limits)
        self.headers = headers  # of the request
        self._send = send
        self._receive = receive
        self._seconds = limits.write_seconds
        # What every answer to a web page that may read it says.
        self._shared: Fields = []
        if ORIGIN in headers:
            exposed = b"mcp-session-id, www-authenticate"
            self._shared = [(b"access-control-allow-origin", headers[ORIGIN]), (b"vary", b"origin")]
            self._shared.append((b"access-control-expose-headers", exposed))

    async def whole(self, status: int, fields: Fields, body: bytes) -> None:
        length = [(b"content-length", str(len(body)).encode())] if status not in (202, 204) else []
        fields = self._shared + fields + length
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        await self._send({"type": "http.response.body", "body": body})

    async def text(self, status: int, text: str, fields: Fields | None = None) -> None:
        await self.whole(status, _TEXT + (fields or []), text.encode())

    async def begin_events(self, first: bytes = b"", fields: Fields | None = None) -> None:
        fields = self._shared + _EVENTS + (fields or [])
        await self._send({"type": "http.response.start", "status": 200, "headers": fields})
        if first:
            await self.write(first)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        if self.stream.gone:
            return
        try:
            async with asyncio.timeout(self._seconds):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except (TimeoutError, OSError):
            self.stream.let_go()

    async def watch(self) -> None:
        """Until the other side goes away."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.stream.let_go()

    async def events(self, log: EventLog | None, *, name: str = "", outlives: float = 0.0) -> None:
        """Write what comes as events, to the end. With a log they are kept; for how long after nobody reads them?"""
        stream, loop = self.stream, asyncio.get_running_loop()
        end: float | None = None
        while True:
            ended = stream.ended  # what comes while this is written is for the next turn
            last = [stream.answer] if ended and stream.answer is not None else []
            for message in stream.take() + last:
                ident = "" if log is None else await log.add(message)
                await self.write(sse.event(message, ident=ident, name=name))
            if ended:
                break
            if stream.paused and log is not None and not stream.gone:
                await self.write(b"", more=False)
                stream.let_go()
            if stream.gone and end is None:
                end = loop.time() + outlives
            seconds = KEEP_ALIVE_SECONDS if end is None else min(KEEP_ALIVE_SECONDS, end - loop.time())
            if seconds <= 0:
                break
            if not await stream.wait(seconds):
                await self.write(sse.KEEP_ALIVE)
        if log is not None and outlives == math.inf:
            await log.add(END)
        await self.write(b"", more=False)
