"""One request of a connection and its response, as an ASGI application sees them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, MutableMapping
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handrail.transports.http1.connection import Http1Connection

log = logging.getLogger("handrail")

Message = MutableMapping[str, Any]
Fields = Iterable[tuple[bytes, bytes]]

_MERGE_BYTES = 64 * 1024  # longest piece of a body that is written together with the head
_TEXT = ((b"content-type", b"text/plain; charset=utf-8"),)


class RequestResponseCycle:
    """One run of the application; `receive` and `send` are its ASGI callables."""

    fields: dict[bytes, bytes] | None = None  # the headers, if no name occurs twice
    is_deferred = False  # no task works on the response: `respond` is called later
    is_started = False  # a part of the response was written
    complete = False  # the whole response was written, or the peer is gone
    body: bytes | bytearray = b""  # received, and not fetched by the application yet
    more = True  # the rest of the body is still to be received
    _is_fetched = False  # the application has the whole body
    _is_disconnected = False
    _state_changed: asyncio.Event | None = None
    _head = b""  # held back, to be written with the first piece of the body
    _remaining_bytes: int | None = None  # of the response body, by its Content-Length
    _omits_body = _is_chunked = False

    def __init__(self, connection: Http1Connection, scope: Message, keep_alive: bool, expects: bool) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.expects = expects  # the peer waits for "100 Continue" before it sends the body
        self._connection = connection

    # Called by the connection

    def awaits_short_body(self, limit: int) -> bool:
        """Return whether the rest of a body of at most `limit` bytes is still to arrive."""
        if not self.more or self.expects or self.fields is None:
            return False
        length = self.fields.get(b"content-length", b"")
        return length.isdigit() and len(length) <= 5 and int(length) <= limit

    def feed_body(self, body: bytes) -> int:
        """Add a piece of the body; return how many bytes are not fetched yet."""
        if not self.body:
            self.body = body
        else:
            self.body = self.body if isinstance(self.body, bytearray) else bytearray(self.body)
            self.body += body
        if self._state_changed is not None:
            self._state_changed.set()
        return len(self.body)

    def end_body(self) -> None:
        self.more = False
        if self._state_changed is not None:
            self._state_changed.set()

    def disconnect(self) -> None:
        """Report the peer as gone to the application, and discard what it sends from now on."""
        if not self.complete:
            self._is_disconnected = self.complete = True
        if self._state_changed is not None:
            self._state_changed.set()

    def respond(self, status: int, headers: Fields, body: bytes) -> None:
        """Write a whole response."""
        length = b"" if status in (204, 304) else b"content-length: %d\r\n" % len(body)
        if not self.keep_alive:
            length += b"connection: close\r\n"
        if self.scope["method"] == "HEAD":
            body = b""
        line, date = _lines(status, tuple(headers)), self._connection.state.date
        self._send_bytes(b"%b%b\r\n%b\r\n" % (line, date, length), body)
        self._finish()

    def fail(self) -> None:
        """Log the exception that is being handled, and answer with an error."""
        log.exception("http: the application failed")
        self._respond_with_error()

    def _respond_with_error(self) -> None:
        if not self.complete and not self.is_started:
            self.keep_alive = False
            self.respond(500, _TEXT, b"Internal Server Error")

    def start(self, application: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine that answers the request, in a task."""
        state, self.is_deferred = self._connection.state, False
        task = state.start(self._run(application))
        if not task.done():
            state.tasks.add(task)
            task.add_done_callback(state.tasks.discard)

    async def _run(self, application: Coroutine[Any, Any, None]) -> None:
        try:
            await application
        except asyncio.CancelledError:
            pass  # the last step of a shutdown
        except BaseException:
            self.fail()
        if self.complete or self.is_deferred:
            return
        log.error("http: the application ended without a whole response")
        self._respond_with_error()
        if not self.complete:
            self._connection.close()

    # Called by the application

    async def receive(self) -> Message:
        connection = self._connection
        if self.expects and not self.complete:
            self.expects = False
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not self.complete:
            if self.body or not (self.more or self._is_fetched):
                body, self.body, self._is_fetched = bytes(self.body), b"", not self.more
                return {"type": "http.request", "body": body, "more_body": self.more}
            if self.more:
                connection.flow.resume_reading()
            self._state_changed = self._state_changed or asyncio.Event()
            self._state_changed.clear()
            await self._state_changed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._connection.flow.write_paused:
            await self._connection.flow.drain()
        if self._is_disconnected:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self._head and not self.is_started:
            self._head = self._head_of(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and (self._head or self.is_started) and not self.complete:
            self._write(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            raise RuntimeError(f"http: {kind} out of turn")

    def _head_of(self, status: int, headers: Fields) -> bytes:
        if self.expects and self.more:
            self.keep_alive = False  # without "100 Continue" it is unknown whether the peer sends the body
        self.expects = False
        self._remaining_bytes = None
        lines = [status_line(status), self._connection.state.date]
        for name, value in headers:
            name = name.lower()
            if name == b"connection":
                self.keep_alive = self.keep_alive and b"close" not in value.lower()
            elif name != b"transfer-encoding":
                lines.append(b"%b: %b" % (name, value))
                if name == b"content-length":
                    self._remaining_bytes = int(value)
        self._omits_body = self.scope["method"] == "HEAD" or status in (204, 304)
        self._is_chunked = (
            self._remaining_bytes is None and not self._omits_body and self.scope["http_version"] == "1.1"
        )
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked")
        if not self.keep_alive:
            lines.append(b"connection: close")
        return _checked(b"\r\n".join((*lines, b"", b"")), len(lines) + 1)

    def _write(self, body: bytes, *, is_last: bool) -> None:
        if self._omits_body:
            body = b""
        elif self._is_chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if is_last else b"")
        elif self._remaining_bytes is not None:
            self._remaining_bytes -= len(body)
            if self._remaining_bytes < 0 or (is_last and self._remaining_bytes):
                raise RuntimeError("http: the body is not as long as its Content-Length says")
        head, self._head = self._head, b""
        self._send_bytes(head, body)
        if is_last:
            self._finish()

    def _send_bytes(self, head: bytes, body: bytes) -> None:
        self.is_started = True
        transport = self._connection.transport
        if len(body) > _MERGE_BYTES:
            transport.write(head)
            transport.write(body)
        elif head or body:
            transport.write(head + body)

    def _finish(self) -> None:
        self.complete = True
        self.body = b""
        if self._state_changed is not None:
            self._state_changed.set()
        self._connection.on_response_complete(not self.keep_alive)


@lru_cache(100)
def _lines(status: int, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    lines = [status_line(status), *(b"%b: %b" % field for field in headers), b""]
    return _checked(b"\r\n".join(lines), len(lines) - 1)


def _checked(head: bytes, lines: int) -> bytes:
    if not head.count(b"\n") == head.count(b"\r") == lines or b"\0" in head:
        raise ValueError("http: a header of the response contains a line break or NUL")
    return head


@lru_cache(100)
def status_line(status: int) -> bytes:
    try:
        return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()
    except ValueError:
        return f"HTTP/1.1 {status} ".encode()


def error_response(status: int, text: str, date: bytes) -> bytes:
    """Return a response of the listener itself, the last one of a connection."""
    body = f"{text}.\n".encode()
    more = b"content-length: %d\r\nconnection: close\r\n" % len(body)
    return b"%b%b\r\n%b\r\n%b" % (_lines(status, _TEXT), date, more, body)
