"""One HTTP/1.1 connection with limits on sizes and times.

It replaces uvicorn's own protocol, which accepts headers of any length, has no timeouts, and passes on requests that
two servers may read differently. The parser is the same. A request is in one phase, and each phase has a time limit:

    IDLE ──first byte──► HEAD ──empty line──► BODY ──its end──► IDLE        REFUSED: only waits to be closed

While a request is being answered, no time limit applies and no later request is parsed. An application that has its
response without waiting writes it in the same turn of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools
from msgspec import Struct

from handrail.engine.eager import Start, starter
from handrail.transports.http1.request import RequestResponseCycle, error_response

if TYPE_CHECKING:
    from handrail.transports.http1.listen import HttpLimits

log = logging.getLogger("handrail")

_CHUNK_BYTES = 16 * 1024  # parsed at a time: bounds how many pipelined requests one read can put into the queue
_MAX_BUFFERED_BYTES = 64 * 1024  # of a body, or of requests behind the one being answered; then reading pauses
_LINGER_SECONDS = 1.0  # reading goes on after a refusal: closed with bytes unread, TCP discards the response
_MAX_REFUSED_CONNECTIONS = 256  # connections over the limit that are answered with 503; beyond, they are aborted

_MAX_CACHED_HEADS = 2  # per connection
_MAX_LEARNED_HEADS = 16  # request heads put into the cache of one connection; later ones are only parsed
_MAX_CACHED_BYTES = 2048  # longest head that is cached
_DIGITS = 9  # longest Content-Length that a cached head matches
_LENGTH = re.compile(rb"\r\ncontent-length: ([0-9]{1,9})\r\n", re.IGNORECASE)

_IDLE, _HEAD, _BODY, _REFUSED = range(4)
_LAST_RESPONSE = (0, "")  # a refusal without an error: the last response has been written


class ServerState:
    """State that the connections of one listener share."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.connections: set[Http1Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.start: Start = starter(asyncio.get_running_loop())
        self.date = b"date: "  # header line of every response
        self.stopping = False
        self._closed_event = asyncio.Event()

    def connection_closed(self) -> None:
        if self.stopping:
            self._closed_event.set()

    async def wait_closed(self) -> None:
        """Wait until there is no connection."""
        while self.connections:
            self._closed_event.clear()
            await self._closed_event.wait()


class FlowControl:
    """Backpressure of one connection, in both directions.

    A peer that reads slowly pauses the application. A peer that reads nothing for `stall_seconds` is disconnected.
    """

    write_paused = False
    read_paused = False
    _drained: asyncio.Event | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, stall_seconds: float) -> None:
        self._transport = transport
        self._loop = loop
        self._stall_seconds = stall_seconds

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        self.watch_writes()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._wake()
        self.watch_writes()

    async def drain(self) -> None:
        """Wait until the peer has read most of what was written."""
        while self.write_paused:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()

    def watch_writes(self) -> None:
        """Start the stall timer if a paused application, or closing, waits for the peer to read."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        unsent = self._transport.get_write_buffer_size()
        if unsent and (self.write_paused or self._transport.is_closing()):
            self._stall_timer = self._loop.call_later(self._stall_seconds, self._check_progress, unsent)

    def disconnect(self) -> None:
        """Wake the application and stop the timer: the connection is lost."""
        self.write_paused = False
        self._wake()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _wake(self) -> None:
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    def _check_progress(self, unsent_before: int) -> None:
        if self._transport.get_write_buffer_size() < unsent_before:
            self.watch_writes()
        else:
            log.info("http: connection aborted: the client read nothing for %g s", self._stall_seconds)
            self._transport.abort()


class Http1Connection(asyncio.Protocol):
    """One connection: parses requests, enforces the limits and hands requests to the application in order."""

    transport: asyncio.Transport
    flow: FlowControl

    def __init__(self, app: Any, state: ServerState, app_state: dict[str, Any]) -> None:
        self.loop = asyncio.get_running_loop()
        self.state = state
        self.cycle: RequestResponseCycle | None = None  # being answered, or the last one that was
        self._app = app
        # Only where the class itself defines it, as `Endpoint` does: a subclass may have overridden `__call__`.
        self._at_once = app.at_once if "at_once" in vars(type(app)) else None
        self._app_state = app_state
        self._limits = limits = state.limits
        self._seconds = (limits.idle_seconds, limits.header_seconds, limits.body_seconds, _LINGER_SECONDS)
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[RequestResponseCycle] = deque()  # parsed, waiting behind the request being answered
        self._reading: RequestResponseCycle | None = None  # whose body arrives
        self._phase = _IDLE
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._fields = 0
        self._piece = 0  # bytes that are being parsed
        self._unspent = 0  # at least so many parsed bytes have not become a request or a body yet
        self._buffered = bytearray()  # arrived while an earlier request is being answered
        self._heads: list[CachedHead] = []
        self._learnable_heads = _MAX_LEARNED_HEADS
        self._starting = False
        self._refusal: tuple[int, str] | None = None  # once set, no further request is accepted
        self._is_new_phase = False
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.flow = FlowControl(transport, self.loop, self._limits.write_seconds)
        self._scope = connection_scope(transport)
        count = len(self.state.connections)
        self.state.connections.add(self)
        if count >= self._limits.max_connections + _MAX_REFUSED_CONNECTIONS:
            self.transport.abort()
        elif count >= self._limits.max_connections:
            self._refuse(503, "There are too many connections")
        elif self.state.stopping:
            self._refuse(503, "The server is about to end")
        else:
            self._deadline = self.loop.time() + self._limits.header_seconds
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.connections.discard(self)
        self.flow.disconnect()
        if self._timer is not None:
            self._timer.cancel()
        if self.cycle is not None:
            self.cycle.disconnect()
        self._queue.clear()
        self.state.connection_closed()

    def eof_received(self) -> None:
        if self.transport.can_write_eof():  # a TLS transport closes by itself
            self.close()

    def pause_writing(self) -> None:
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        self.flow.resume_writing()

    def shutdown(self) -> None:
        """Close as soon as the current request is answered: the server stops."""
        if self.cycle is not None and not self.cycle.complete:
            self.cycle.keep_alive = False
        elif self._queue:
            self._refuse(503, "The server is about to end")
        else:
            self.close()

    def close(self) -> None:
        """Close when all that was written has been sent; accept no more requests."""
        self._refusal = self._refusal or _LAST_RESPONSE  # a TLS transport delivers data even while it closes
        if not self.transport.is_closing():  # a TLS transport drops its protocol when it is closed twice
            self.transport.close()
            self.flow.watch_writes()  # the transport itself waits for unsent bytes without a time limit

    # Incoming data

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._phase == _IDLE and not self._buffered and not self._is_busy():
            for head in self._heads:
                parts = head.match(data)
                if parts is not None:
                    self._serve_cached(head, *parts)
                    return
            before = self._reading
            self._feed(data)
            if self._reading is not before and self._phase == _IDLE and self._learnable_heads:
                self._cache_head(data)
        else:
            self._feed(data)

    def _serve_cached(self, head: CachedHead, digits: bytes, body: bytes) -> None:
        """Serve a whole request whose head is in the cache."""
        fields = head.fields.copy()
        fields[b"content-length"] = digits
        self._reading = cycle = RequestResponseCycle(self, head.scope.copy(), not self.state.stopping, expects=False)
        cycle.fields, cycle.body, cycle.more = fields, body, False
        self._queue.append(cycle)
        self._start_next()
        self._is_new_phase = True
        self._update_deadline()

    def _cache_head(self, data: bytes) -> None:
        cycle = self._reading
        if cycle is None or cycle.fields is None or not cycle.keep_alive or b"expect" in cycle.fields:
            return
        scope = request_scope(self._scope, self._url, "1.1", b"POST")  # the request's own belongs to the application
        head = CachedHead.from_request(data, scope, cycle.fields, self._limits.max_header_bytes)
        if head is not None:
            self._learnable_heads -= 1
            self._heads = [head, *self._heads[: _MAX_CACHED_HEADS - 1]]

    def _feed(self, data: bytes | memoryview) -> None:
        if len(data) > _CHUNK_BYTES:
            data = memoryview(data)
        while data and self._refusal is None:
            if self._buffered or self._is_busy():
                self._buffered += data
                if len(self._buffered) > _MAX_BUFFERED_BYTES:
                    self.flow.pause_reading()  # not earlier: a paused connection does not notice that the peer left
                break
            piece, data = data[:_CHUNK_BYTES], data[_CHUNK_BYTES:]
            self._piece = len(piece)
            self._unspent += self._piece
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + bytes(piece[upgrade.args[0] :]) + bytes(data)
            except httptools.HttpParserError as problem:
                cause = problem.__context__
                refusal = cause.args if isinstance(cause, RefusedHead) else (400, "This is not a valid HTTP request")
                return self._refuse(*refusal)
            if self._unspent > self._limits.max_header_bytes + _CHUNK_BYTES and self._phase != _IDLE:
                return self._refuse(431, "The headers are too long")
            if self._fields + len(self._headers) > self._limits.max_headers:
                return self._refuse(431, "There are too many headers")
            if self._queue and (self._at_once is None or not self._queue[0].awaits_short_body(_CHUNK_BYTES)):
                self._start_next()
        return self._update_deadline()

    def _is_busy(self) -> bool:
        """Return whether a request before the one that is read is still unanswered."""
        cycle = self.cycle
        if cycle is None or cycle.complete:
            return bool(self._queue) and not (self._phase == _BODY and self._queue[0] is self._reading)
        return self._phase != _BODY or cycle is not self._reading

    def _head_without_upgrade(self) -> bytes:
        """Return the head just read without its offer of another protocol, to be parsed again.

        The parser stops to read HTTP after such a request, body included. Java's client offers HTTP/2 by default.
        """
        line = b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, self._parser.get_http_version().encode())
        fields = [b"%b: %b" % field for field in self._headers if field[0] != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        return b"\r\n".join((line, *fields, b"", b""))

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._fields = 0
        self._unspent = self._piece  # the request may begin anywhere in this piece
        self._phase = _HEAD
        self._is_new_phase = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        fields, version, method = dict(headers), parser.get_http_version(), parser.get_method()
        is_plain = len(fields) == len(headers) <= self._limits.max_headers and version == "1.1" and b"host" in fields
        if not is_plain or b"transfer-encoding" in fields or self._unspent > self._limits.max_header_bytes:
            check_head(headers, len(self._url), version, self._limits)
        if method == b"CONNECT":
            raise RefusedHead(501, "This is not a proxy")
        if parser.should_upgrade():
            return  # the head is parsed again, see `_head_without_upgrade`
        self._headers = []  # collects trailers, which are dropped: they are not checked
        self._fields = len(headers)
        self._unspent = 0
        scope = request_scope(self._scope, self._url, version, method)
        scope["headers"] = headers
        # An HTTP/1.0 client would need a Connection header and a Content-Length to keep the connection, and does not
        # support Expect.
        keep_alive = version == "1.1" and parser.should_keep_alive() and not self.state.stopping
        expects = version == "1.1" and b"expect" in fields and fields[b"expect"].lower() == b"100-continue"
        self._reading = cycle = RequestResponseCycle(self, scope, keep_alive, expects)
        cycle.fields = fields if is_plain else None
        self._queue.append(cycle)
        self._phase = _BODY
        self._is_new_phase = True

    def on_body(self, body: bytes) -> None:
        self._unspent = 0
        cycle = self._reading
        if cycle is not None and not cycle.complete and cycle.feed_body(body) > _MAX_BUFFERED_BYTES:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self._phase == _BODY and self._reading is not None:
            self._reading.end_body()
            self._phase = _IDLE
            self._is_new_phase = True
        self._unspent = 0

    # The queue of requests

    def _start_next(self) -> None:
        """Start the next request, and the ones behind it for as long as they are answered at once."""
        self._starting = True
        while self._queue and (self.cycle is None or self.cycle.complete):
            self.cycle = cycle = self._queue.popleft()
            try:
                self._run_application(cycle)
            except BaseException:
                cycle.fail()
        self._starting = False

    def _run_application(self, cycle: RequestResponseCycle) -> None:
        """Call the application, without a task if it has an `at_once` that accepts the request."""
        scope, fields = cycle.scope, cycle.fields
        at_once = None if fields is None or cycle.more or self.flow.write_paused else self._at_once
        if at_once is not None and at_once(cycle, fields):
            return
        scope["asgi"] = {"version": "3.0", "spec_version": "2.3"}
        scope["state"] = self._app_state.copy()
        if "headers" not in scope and fields is not None:
            scope["headers"] = list(fields.items())
        cycle.start(self._app(scope, cycle.receive, cycle.send))

    def on_response_complete(self, is_last: bool) -> None:
        """Go on after the response to a request has been written; `is_last`: close instead."""
        if is_last:
            self._queue.clear()  # the client has to send these requests again, on another connection
            self._buffered.clear()
            if self._phase == _IDLE:
                self.close()
            else:
                self._linger()
        elif self._starting:
            pass  # `_start_next` goes on
        elif self._queue or self._buffered or self.flow.read_paused or self._refusal or self._phase != _IDLE:
            self.loop.call_soon(self._resume)
        else:
            self._is_new_phase = True
            self._update_deadline()

    def _resume(self) -> None:
        if self.transport.is_closing():
            return None
        if self._refusal is not None:
            self._start_next()
            return self._refuse_in_turn()
        self.flow.resume_reading()
        self._start_next()
        buffered, self._buffered = bytes(self._buffered), bytearray()
        self._is_new_phase = True
        return self._feed(buffered)

    # Time limits

    def _update_deadline(self) -> None:
        if self._is_busy():
            self._deadline = math.inf
            self._is_new_phase = True  # its time limit begins when the earlier requests are answered
        elif self._is_new_phase:
            self._is_new_phase = False
            self._deadline = self.loop.time() + self._seconds[self._phase]
            # Most requests end long before their deadlines: a timer that ends before the deadline is not replaced.
            if self._timer_at > self._deadline:
                self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._deadline
        self._timer = self.loop.call_at(self._deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at = math.inf
        cycle = self._reading
        if self.transport.is_closing():
            return  # the stall timer runs
        if self.loop.time() < self._deadline:
            if self._deadline < math.inf:
                self._start_timer()
        elif self._phase == _REFUSED:
            if self.transport.get_write_buffer_size():
                self.close()  # the peer still reads earlier responses; the stall timer runs
            else:
                self.transport.abort()
        elif self._phase == _IDLE:
            self.close()
        elif self._phase == _BODY and cycle is not None and (self.flow.read_paused or cycle.expects):
            self._is_new_phase = True  # the application is slow, not the peer
            self._update_deadline()
        else:
            self._refuse(408, "The request took too long to arrive")

    # Refusals

    def _refuse(self, status: int, text: str) -> None:
        """Answer with an error after all earlier responses, and close."""
        self._refusal = (status, text)
        self._buffered.clear()
        if self._phase == _BODY and self._queue:
            self._queue.pop()  # the refused request, not started yet
        self._start_next()
        self._refuse_in_turn()

    def _refuse_in_turn(self) -> None:
        if self._phase == _REFUSED or self._refusal is None or self.transport.is_closing():
            return
        if self._is_busy():
            self._deadline = math.inf
            return
        cycle = self.cycle if self._phase == _BODY and self.cycle is self._reading else None
        # In the middle of the request's own response, or after it, an error would be read as a part of that response.
        if cycle is None or not cycle.is_started:
            self.transport.write(error_response(*self._refusal, self.state.date))
        if cycle is not None:
            cycle.disconnect()
        self._linger()

    def _linger(self) -> None:
        """Send no more, and discard for a moment what still arrives."""
        self._phase = _REFUSED
        self._refusal = self._refusal or _LAST_RESPONSE
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
            self._deadline = self.loop.time() + _LINGER_SECONDS
            self._start_timer()
        else:
            self.close()


class CachedHead(Struct, frozen=True):
    """A request head without the value of its Content-Length, and what it was parsed to.

    A client sends the same head with every request of a connection, except for the length of the body. The parser keeps
    nothing from one request to the next, so a whole request whose head is cached, byte for byte, is not parsed.
    Measured with 32 connections (`benchmarks/run.py`): without the cache a call takes 20 % more CPU or above.
    """

    before: bytes  # bytes before the digits of Content-Length
    after: bytes  # bytes after these digits
    scope: dict[str, Any]
    fields: dict[bytes, bytes]

    @classmethod
    def from_request(
        cls, data: bytes, scope: dict[str, Any], fields: dict[bytes, bytes], limit: int
    ) -> CachedHead | None:
        """Return the head of the request that `data` is, whole and alone; None if it cannot be cached."""
        head = data[: data.find(b"\r\n\r\n") + 4]
        length = _LENGTH.search(head)
        if length is None or not data.startswith(b"POST ") or len(data) - len(head) != int(length[1]):
            return None
        if len(head) + _DIGITS > min(limit, _MAX_CACHED_BYTES):
            return None
        return cls(head[: length.start(1)], head[length.end(1) :], scope, fields.copy())

    def match(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Return digits of the length and body, if `data` is one whole request with this head."""
        if not data.startswith(self.before):
            return None
        at = len(self.before)
        end = data.find(b"\r", at, at + _DIGITS + 1)
        digits, rest = data[at:end], end + len(self.after)
        if end < 0 or not digits.isdigit() or not data.startswith(self.after, end) or len(data) - rest != int(digits):
            return None
        return digits, data[rest:]


class RefusedHead(Exception):
    """Status and text for the peer; raised in callbacks of the parser."""


def check_head(headers: list[tuple[bytes, bytes]], url_size: int, version: str, limits: HttpLimits) -> None:
    """Raise RefusedHead for a head that another server on the way may read differently (RFC 9112 sections 3.2, 6)."""
    names = [name for name, _ in headers]
    if version not in ("1.0", "1.1"):
        raise RefusedHead(505, "HTTP/1.1 is spoken here")
    if len(headers) > limits.max_headers:
        raise RefusedHead(431, "There are too many headers")
    if url_size + sum(len(name) + len(value) + 4 for name, value in headers) > limits.max_header_bytes:
        raise RefusedHead(431, "The headers are too long")
    if names.count(b"host") != 1:
        raise RefusedHead(400, "Exactly one Host header is needed")
    if names.count(b"content-length") + names.count(b"transfer-encoding") > 1:
        raise RefusedHead(400, "The length of the body is given twice")
    if version == "1.0" and b"transfer-encoding" in names:
        raise RefusedHead(400, "HTTP/1.0 has no Transfer-Encoding")


def connection_scope(transport: asyncio.Transport) -> dict[str, Any]:
    """Return the part of an ASGI scope that is the same for all requests of a connection."""

    def address(name: str) -> tuple[str, int | None] | None:
        sockaddr = transport.get_extra_info(name)
        return (str(sockaddr[0]), int(sockaddr[1])) if isinstance(sockaddr, tuple) else None

    scheme = "https" if transport.get_extra_info("sslcontext") else "http"
    return {
        "type": "http",
        "server": address("sockname"),
        "client": address("peername"),
        "scheme": scheme,
        "root_path": "",
    }


def request_scope(base: dict[str, Any], url: bytes, version: str, method: bytes) -> dict[str, Any]:
    """Return the ASGI scope of one request, without its headers."""
    path, raw_path, query = _target(url)
    request_line = {"http_version": version, "path": path, "raw_path": raw_path, "query_string": query}
    return {**base, **request_line, "method": method.decode()}


@lru_cache(64)
def _target(url: bytes) -> tuple[str, bytes, bytes]:
    """Return the path decoded, the path as received, and the query."""
    parsed = httptools.parse_url(url)
    path = parsed.path or b"/"
    return unquote(path.decode("ascii")), path, parsed.query or b""
