"""One HTTP response: JSON when the answer is all there is to say, else events, kept for a client that comes back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from handrail.engine.core import Limits
from handrail.engine.http_sessions import END, EventLog
from handrail.protocol import sse
from handrail.protocol.http_rules import ORIGIN, Headers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Fields = list[tuple[bytes, bytes]]
Whole = tuple[int, Fields, bytes]  # an answer: status, headers, body

KEEP_ALIVE_SECONDS = 15.0
RETRY_MS = 1_000
_MUCH = 64 * 1024  # bytes to be said

JSON: Fields = [(b"content-type", b"application/json")]
_TEXT: Fields = [(b"content-type", b"text/plain; charset=utf-8")]
_EVENTS: Fields = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Stream:
    """What one HTTP response will say: the outlet of a conversation. What most never need is made when it is."""

    answer: bytes | None = None
    ended = False  # no more will come
    gone = False  # nobody reads any more
    kept = False  # somebody may come back for it
    two_way = True  # it may carry more than the answer
    paused = False  # the reader is to come back for the rest
    _unsent_bytes = 0
    _has_news = False
    _news: asyncio.Future[None] | None = None
    _room: asyncio.Event | None = None
    _left: asyncio.Future[None] | None = None

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.unsent: list[bytes] = []

    def send(self, message: bytes) -> None:
        if self.ended or not self.two_way or (self.gone and not self.kept):
            return
        self.unsent.append(message)
        self._unsent_bytes += len(message)
        self.tell()

    async def drain(self) -> None:
        if self.gone or self._unsent_bytes > _MUCH:
            await asyncio.sleep(0)  # whoever talks without end is not to keep the others from being heard
        while self._unsent_bytes > self.limits.max_unsent_bytes and (self.kept or not self.gone) and not self.ended:
            self._room = self._room or asyncio.Event()
            await self._room.wait()

    def take(self) -> list[bytes]:
        """What has come since the last time."""
        taken, self.unsent = self.unsent, []
        self._unsent_bytes = 0
        self._make_room()
        return taken

    def finish(self, answer: bytes | None) -> None:
        """The answer, or the news that there will be none; the first of them counts."""
        if self.ended:
            return
        self.answer = answer
        self.ended = True
        self._make_room()
        self.tell()

    def pause(self) -> None:
        self.paused = True
        self.tell()

    def let_go(self) -> None:
        self.gone = True
        _wake(self._left)
        self._make_room()
        self.tell()

    async def wait(self, seconds: float) -> bool:
        """Wait for news; whether there was any. For one at a time."""
        if not self._has_news:
            loop = asyncio.get_running_loop()
            self._news = news = loop.create_future()
            timer = loop.call_later(seconds, _wake, news)
            try:
                await news
            finally:
                timer.cancel()
                self._news = None
        had, self._has_news = self._has_news, False
        return had

    def tell(self) -> None:
        """There is news for whoever waits."""
        self._has_news = True
        _wake(self._news)

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class Response(Stream):
    """The way back to whoever sent a request. After it has gone, writing does nothing."""

    said: Whole | None = None

    def __init__(self, scope: Scope, receive: Receive, send: Send, headers: Headers, limits: Limits) -> None:
        self.limits = limits
        self.unsent = []
        self.scope = scope
        self.headers = headers  # of the request
        self._send = send
        self._receive = receive

    def whole(self, status: int, fields: Fields, body: bytes) -> Whole:
        """Say all there is to say; it is written when the request is left."""
        self.said = (status, self._shared(fields) if ORIGIN in self.headers else fields, body)
        return self.said

    def text(self, status: int, text: str, fields: Fields | None = None) -> None:
        self.whole(status, _TEXT + (fields or []), text.encode())

    def _shared(self, fields: Fields) -> Fields:
        """With what every answer to a web page that may read it says."""
        exposed = (b"access-control-expose-headers", b"mcp-session-id, www-authenticate")
        return [(b"access-control-allow-origin", self.headers[ORIGIN]), (b"vary", b"origin"), exposed, *fields]

    @property
    def comes_too_often(self) -> bool:
        return self.said is not None and self.said[0] == 429

    async def close(self) -> None:
        """Write what was said, if it was not said in events."""
        if self.said is not None:
            status, fields, body = self.said
            if status != 204:
                fields = [*fields, (b"content-length", b"%d" % len(body))]
            start = {"type": "http.response.start", "status": status, "headers": fields}
            await self._put(start, {"type": "http.response.body", "body": body})

    async def begin_events(self, first: bytes = b"", fields: Fields | None = None) -> None:
        fields = _EVENTS + (fields or [])
        await self.begin(self._shared(fields) if ORIGIN in self.headers else fields)
        if first:
            await self.write(first)

    async def begin(self, fields: Fields) -> None:
        await self._put({"type": "http.response.start", "status": 200, "headers": fields})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": more})

    async def _put(self, *messages: MutableMapping[str, Any]) -> None:
        if self.gone:
            return
        try:
            async with asyncio.timeout(self.limits.write_seconds):
                for message in messages:
                    await self._send(message)
        except (TimeoutError, OSError):
            self.let_go()

    async def watch(self) -> None:
        """Until the other side goes away."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.let_go()

    async def events(self, log: EventLog | None, *, name: str = "", outlives: float = 0.0) -> None:
        """Write what comes as events, to the end. With a log they are kept; for how long after nobody reads them?"""
        loop, self.kept = asyncio.get_running_loop(), log is not None
        end: float | None = None
        while True:
            ended = self.ended  # what comes while this is written is for the next turn
            last = [self.answer] if ended and self.answer is not None else []
            for message in self.take() + last:
                ident = "" if log is None else await log.add(message)
                await self.write(sse.event(message, ident=ident, name=name))
            if ended:
                break
            if self.paused and log is not None and not self.gone:
                await self.write(b"", more=False)
                self.let_go()
            if self.gone and end is None:
                end = loop.time() + outlives
            seconds = KEEP_ALIVE_SECONDS if end is None else min(KEEP_ALIVE_SECONDS, end - loop.time())
            if seconds <= 0:
                break
            if not await self.wait(seconds):
                await self.write(sse.KEEP_ALIVE)
        if log is not None and outlives == math.inf:
            await log.add(END)
        await self.write(b"", more=False)
