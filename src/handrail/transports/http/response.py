"""One HTTP response: JSON when the answer is all there is to say, else events, kept for a client that comes back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from handrail.engine.core import Limits
from handrail.engine.http_sessions import END, EventLog
from handrail.engine.reply_channel import NO_REPLY, Reply
from handrail.protocol import sse
from handrail.protocol.http_rules import ORIGIN, Headers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Fields = list[tuple[bytes, bytes]]
WholeResponse = tuple[int, Fields, bytes]  # an answer: status, headers, body

KEEP_ALIVE_SECONDS = 15.0
RETRY_MS = 1_000
_YIELD_BYTES = 64 * 1024  # bytes to be said

JSON: Fields = [(b"content-type", b"application/json")]
_TEXT: Fields = [(b"content-type", b"text/plain; charset=utf-8")]
_EVENTS: Fields = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class ResponseStream:
    """What one HTTP response will say: the outlet of a conversation. What most never need is made when it is."""

    reply = NO_REPLY  # the last message, when the stream has ended
    ended = False  # no more will come
    disconnected = False  # the client reads nothing any more
    resumable = False  # somebody may come back for it
    two_way = True  # it may carry more than the answer
    paused = False  # the reader is to come back for the rest
    _unsent_bytes = 0
    _has_update = False
    _wakeup: asyncio.Future[None] | None = None
    _room: asyncio.Event | None = None
    _disconnected: asyncio.Future[None] | None = None

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.unsent: list[bytes] = []

    @property
    def stopping(self) -> bool:
        return False

    def send(self, message: bytes) -> None:
        if self.ended or not self.two_way or (self.disconnected and not self.resumable):
            return
        self.unsent.append(message)
        self._unsent_bytes += len(message)
        self.notify()

    async def drain(self) -> None:
        if self.disconnected or self._unsent_bytes > _YIELD_BYTES:
            await asyncio.sleep(0)  # whoever talks without end is not to keep the others from being heard
        while (
            self._unsent_bytes > self.limits.max_unsent_bytes
            and (self.resumable or not self.disconnected)
            and not self.ended
        ):
            self._room = self._room or asyncio.Event()
            await self._room.wait()

    def take_unsent(self) -> list[bytes]:
        """What has come since the last time."""
        messages, self.unsent = self.unsent, []
        self._unsent_bytes = 0
        self._make_room()
        return messages

    def finish(self, reply: Reply = NO_REPLY) -> None:
        """End with the reply to the request; a second reply is dropped."""
        if self.ended:
            return
        self.reply = reply
        self.ended = True
        self._make_room()
        self.notify()

    def pause(self) -> None:
        self.paused = True
        self.notify()

    def disconnect(self) -> None:
        self.disconnected = True
        _wake(self._disconnected)
        self._make_room()
        self.notify()

    async def wait(self, seconds: float) -> bool:
        """Wait for news; whether there was any. For one at a time."""
        if not self._has_update:
            loop = asyncio.get_running_loop()
            self._wakeup = wakeup = loop.create_future()
            timer = loop.call_later(seconds, _wake, wakeup)
            try:
                await wakeup
            finally:
                timer.cancel()
                self._wakeup = None
        had_update, self._has_update = self._has_update, False
        return had_update

    def notify(self) -> None:
        """There is news for whoever waits."""
        self._has_update = True
        _wake(self._wakeup)

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class HttpResponse(ResponseStream):
    """The way back to whoever sent a request. After it has gone, writing does nothing."""

    response: WholeResponse | None = None

    def __init__(self, scope: Scope, receive: Receive, send: Send, headers: Headers, limits: Limits) -> None:
        self.limits = limits
        self.unsent = []
        self.scope = scope
        self.headers = headers  # of the request
        self._send = send
        self._receive = receive

    def respond(self, status: int, fields: Fields, body: bytes) -> WholeResponse:
        """Say all there is to say; it is written when the request is left."""
        self.response = (status, self._shared(fields) if ORIGIN in self.headers else fields, body)
        return self.response

    def respond_text(self, status: int, text: str, fields: Fields | None = None) -> None:
        self.respond(status, _TEXT + (fields or []), text.encode())

    def _shared(self, fields: Fields) -> Fields:
        """With what every answer to a web page that may read it says."""
        exposed = (b"access-control-expose-headers", b"mcp-session-id, www-authenticate")
        return [(b"access-control-allow-origin", self.headers[ORIGIN]), (b"vary", b"origin"), exposed, *fields]

    @property
    def is_rate_limited(self) -> bool:
        return self.response is not None and self.response[0] == 429

    async def write_response(self) -> None:
        """Write what was said, if it was not said in events."""
        if self.response is not None:
            status, fields, body = self.response
            if status != 204:
                fields = [*fields, (b"content-length", b"%d" % len(body))]
            start = {"type": "http.response.start", "status": status, "headers": fields}
            await self._send_messages(start, {"type": "http.response.body", "body": body})

    async def begin_events(self, first: bytes = b"", fields: Fields | None = None) -> None:
        fields = _EVENTS + (fields or [])
        await self.begin(self._shared(fields) if ORIGIN in self.headers else fields)
        if first:
            await self.write(first)

    async def begin(self, fields: Fields) -> None:
        await self._send_messages({"type": "http.response.start", "status": 200, "headers": fields})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._send_messages({"type": "http.response.body", "body": data, "more_body": more})

    async def _send_messages(self, *messages: MutableMapping[str, Any]) -> None:
        if self.disconnected:
            return
        try:
            async with asyncio.timeout(self.limits.write_seconds):
                for message in messages:
                    await self._send(message)
        except (TimeoutError, OSError):
            self.disconnect()

    async def wait_disconnected(self) -> None:
        """Until the other side goes away."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnect()

    async def events(self, log: EventLog | None, *, name: str = "", outlives: float = 0.0) -> None:
        """Write what comes as events, to the end. With a log they are kept; for how long after nobody reads them?"""
        loop, self.resumable = asyncio.get_running_loop(), log is not None
        end: float | None = None
        while True:
            ended = self.ended  # what comes while this is written is for the next turn
            last = [self.reply.body] if ended and self.reply.body else []
            for message in self.take_unsent() + last:
                event_id = "" if log is None else await log.add(message)
                await self.write(sse.encode_event(message, event_id=event_id, name=name))
            if ended:
                break
            if self.paused and log is not None and not self.disconnected:
                await self.write(b"", more=False)
                self.disconnect()
            if self.disconnected and end is None:
                end = loop.time() + outlives
            seconds = KEEP_ALIVE_SECONDS if end is None else min(KEEP_ALIVE_SECONDS, end - loop.time())
            if seconds <= 0:
                break
            if not await self.wait(seconds):
                await self.write(sse.KEEP_ALIVE)
        if log is not None and outlives == math.inf:
            await log.add(END)
        await self.write(b"", more=False)
