"""One HTTP/1.1 connection behind limits: what a peer may send, in what time, and how long it may leave us unread.

In place of uvicorn's own protocol, which takes headers without end, waits for ever, and passes on requests that two
servers may read differently. The parser is the same. A request is in one phase, and each phase has its time:

    IDLE ──first byte──► HEAD ──empty line──► BODY ──its end──► IDLE        OVER: refused, only waits to be closed

While a request is being answered, the peer waits for us, so no clock runs and nothing behind it is parsed. An
application that answers at once does so before the next turn of the loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import TYPE_CHECKING, Any

import httptools

from handrail.transports.http1.flow_control import FlowControl
from handrail.transports.http1.head_cache import MAX_CACHED_HEADS, CachedHead, RefusedHead, check_head, scope_of, target
from handrail.transports.http1.request import RequestResponseCycle, error_response

if TYPE_CHECKING:
    from handrail.transports.http1.server import ServerState

_CHUNK_BYTES = 16 * 1024  # parsed at a time: bounds how many pipelined requests one read can put into the queue
_MAX_BUFFERED_BYTES = (
    64 * 1024
)  # of a body, or of requests behind the one being answered; then the peer is not read from
_LINGER_SECONDS = 1.0  # to read on after a refusal: closed with bytes unread, TCP takes the answer back
_MAX_REFUSED_CONNECTIONS = 256  # connections over the limit that are told so; beyond, they are just closed

_MAX_LEARNED_HEADS = 16  # heads a connection looks at more closely

_IDLE, _HEAD, _BODY, _REFUSED = range(4)
_NO_MORE = (0, "")  # in place of a refusal: the last answer has been given


class Http1Connection(FlowControl):
    """One connection."""

    def __init__(self, app: Any, state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(state.limits.write_seconds)
        self.state = state
        self.cycle: RequestResponseCycle | None = None  # being answered, or the last one that was
        self._app = app
        # As `Endpoint` has it; a subclass may have changed `__call__`, and wants to be heard.
        self._at_once = app.at_once if "at_once" in vars(type(app)) else None
        self._app_state = app_state
        self._limits = limits = state.limits
        self._seconds = (limits.idle_seconds, limits.header_seconds, limits.body_seconds, _LINGER_SECONDS)
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[RequestResponseCycle] = deque()  # read, and behind the one being answered
        self._reading: RequestResponseCycle | None = None  # whose body comes in
        self._phase = _IDLE
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._fields = 0
        self._piece = self._unspent = 0  # bytes being parsed; and at least those nothing was made of yet
        self._buffered = bytearray()  # came while an earlier request is being answered
        self._heads: list[CachedHead] = []
        self._learnable_heads = _MAX_LEARNED_HEADS
        self._starting = self._read_paused = False
        self._refusal: tuple[int, str] | None = None  # nothing more is taken
        self._is_new_phase = False
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._scope = scope_of(self.transport)
        before = len(self.state.connections)
        self.state.connections.add(self)
        if before >= self._limits.max_connections + _MAX_REFUSED_CONNECTIONS:
            self.transport.abort()
        elif before >= self._limits.max_connections:
            self._refuse(503, "There are too many connections")
        elif self.state.stopping:
            self._refuse(503, "The server is about to end")
        else:
            self._deadline = self.loop.time() + self._limits.header_seconds
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.connections.discard(self)
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        if self.cycle is not None:
            self.cycle.disconnect()
        self._queue.clear()
        self.state.connection_closed()

    def eof_received(self) -> None:
        if self.transport.can_write_eof():  # TLS has a time of its own for it
            self.close()

    def shutdown(self) -> None:
        """The server is about to end: so does this, after what is being answered."""
        if self.cycle is not None and not self.cycle.complete:
            self.cycle.keep_alive = False
        elif self._queue:
            self._refuse(503, "The server is about to end")
        else:
            self.close()

    # What comes in

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._buffered:
            self._buffer(data)
        elif self._phase == _IDLE and not self._is_busy():
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
        """Serve a request whose head was read before."""
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
        # Not the scope of the request, which is the application's by now.
        head = CachedHead.from_request(
            data, self._begin_scope("1.1", b"POST"), cycle.fields, self._limits.max_header_bytes
        )
        if head is not None:
            self._learnable_heads -= 1
            self._heads = [head, *self._heads[: MAX_CACHED_HEADS - 1]]

    def _feed(self, data: bytes | memoryview) -> None:
        if len(data) > _CHUNK_BYTES:
            data = memoryview(data)
        while data and self._refusal is None:
            if self._is_busy():
                self._buffer(data)
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
            if self._queue and not self._is_soon_whole():
                self._start_next()
        return self._update_deadline()

    def _is_soon_whole(self) -> bool:
        """Whether the next request lacks a little of its body, and the application would rather have all of it."""
        cycle = self._queue[0]
        if self._at_once is None or not cycle.more or cycle.expects or cycle.fields is None:
            return False
        length = cycle.fields.get(b"content-length", b"")
        return length.isdigit() and len(length) <= 5 and int(length) <= _CHUNK_BYTES

    def _is_busy(self) -> bool:
        """Whether an earlier request than the one being read is still unanswered."""
        cycle = self.cycle
        if cycle is None or cycle.complete:
            return bool(self._queue) and not (self._phase == _BODY and self._queue[0] is self._reading)
        return self._phase != _BODY or cycle is not self._reading

    def _buffer(self, data: bytes | memoryview) -> None:
        self._buffered += data
        if (
            len(self._buffered) > _MAX_BUFFERED_BYTES
        ):  # and no earlier: a connection not read from does not show that it ended
            self._pause_reading()

    def _pause_reading(self) -> None:
        if not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._read_paused:
            self._read_paused = False
            self.transport.resume_reading()

    def _head_without_upgrade(self) -> bytes:
        """The head just read, as from a client that does not offer to speak something else.

        The parser leaves HTTP after such a request and with it the body. Java's client offers HTTP/2 by default.
        """
        line = b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, self._parser.get_http_version().encode())
        fields = [b"%b: %b" % field for field in self._headers if field[0] != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        return b"\r\n".join((line, *fields, b"", b""))

    # What the parser finds

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._fields = 0
        self._unspent = self._piece  # it may have begun anywhere in there
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
            return  # it is read again, see `_head_without_upgrade`
        self._headers = []  # for trailers, which are dropped: nobody has checked them
        self._fields = len(headers)
        self._unspent = 0
        scope = self._begin_scope(version, method)
        scope["headers"] = headers
        # HTTP/1.0 would have to be told where the answer ends, and that another may follow; and knows no Expect.
        keep_alive = version == "1.1" and parser.should_keep_alive() and not self.state.stopping
        expects = version == "1.1" and b"expect" in fields and fields[b"expect"].lower() == b"100-continue"
        self._reading = cycle = RequestResponseCycle(self, scope, keep_alive, expects)
        cycle.fields = fields if is_plain else None
        self._queue.append(cycle)
        self._phase = _BODY
        self._is_new_phase = True

    def _begin_scope(self, version: str, method: bytes) -> dict[str, Any]:
        path, raw_path, query = target(self._url)
        request_line = {"http_version": version, "path": path, "raw_path": raw_path, "query_string": query}
        return {**self._scope, **request_line, "method": method.decode()}

    def on_body(self, body: bytes) -> None:
        self._unspent = 0
        cycle = self._reading
        if cycle is not None and not cycle.complete and cycle.feed_body(body) > _MAX_BUFFERED_BYTES:
            self._pause_reading()

    def on_message_complete(self) -> None:
        if self._phase == _BODY and self._reading is not None:
            self._reading.end_body()
            self._phase = _IDLE
            self._is_new_phase = True
        self._unspent = 0

    # Requests in their turn

    def _start_next(self) -> None:
        """Let the application have the next request; and if it answers at once, the one behind that."""
        self._starting = True
        while self._queue and (self.cycle is None or self.cycle.complete):
            self.cycle = cycle = self._queue.popleft()
            try:
                self._run_application(cycle)
            except BaseException:
                cycle.fail()
        self._starting = False

    def _run_application(self, cycle: RequestResponseCycle) -> None:
        """To an application that can do without a task, if it can; else in one."""
        scope, fields = cycle.scope, cycle.fields
        at_once = None if fields is None or cycle.more or self.write_paused else self._at_once
        if at_once is not None and at_once(cycle, fields):
            return
        scope["asgi"] = {"version": "3.0", "spec_version": "2.3"}
        scope["state"] = self._app_state.copy()
        if "headers" not in scope and fields is not None:
            scope["headers"] = list(fields.items())
        cycle.start(self._app(scope, cycle.receive, cycle.send))

    def on_response_complete(self, is_last: bool) -> None:
        """The answer to a request is written."""
        if is_last:
            self._queue.clear()  # whoever sent more may send it again, elsewhere
            self._buffered.clear()
            if self._phase == _IDLE:
                self.close()
            else:
                self._linger()
        elif self._starting:
            pass  # whoever started it goes on
        elif self._queue or self._buffered or self._read_paused or self._refusal is not None or self._phase != _IDLE:
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
        self.resume_reading()
        self._start_next()
        buffered, self._buffered = bytes(self._buffered), bytearray()
        self._is_new_phase = True
        return self._feed(buffered)

    # Time

    def _update_deadline(self) -> None:
        if self._is_busy():
            self._deadline = math.inf
            self._is_new_phase = True  # when it is this one's turn
        elif self._is_new_phase:
            self._is_new_phase = False
            self._deadline = self.loop.time() + self._seconds[self._phase]
            # Most requests are over long before their deadlines: a timer that is early enough already is left alone.
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
            return  # what it still has to take is watched
        if self.loop.time() < self._deadline:
            if self._deadline < math.inf:
                self._start_timer()
        elif self._phase == _REFUSED:
            if self.transport.get_write_buffer_size():
                self.close()  # it still reads what came before, and is watched
            else:
                self.transport.abort()
        elif self._phase == _IDLE:
            self.close()
        elif self._phase == _BODY and cycle is not None and (self._read_paused or cycle.expects):
            self._is_new_phase = True  # it is the application that is behind, not the peer
            self._update_deadline()
        else:
            self._refuse(408, "The request took too long to arrive")

    # What goes out

    def close(self) -> None:
        self._refusal = self._refusal or _NO_MORE  # TLS hands over what it has read also while it closes
        super().close()

    def _refuse(self, status: int, text: str) -> None:
        """Answer with an error, after all that came before, and close."""
        self._refusal = (status, text)
        self._buffered.clear()
        if self._phase == _BODY and self._queue:
            self._queue.pop()  # the culprit itself, not begun
        self._start_next()
        self._refuse_in_turn()

    def _refuse_in_turn(self) -> None:
        if self._phase == _REFUSED or self._refusal is None or self.transport.is_closing():
            return
        if self._is_busy():
            self._deadline = math.inf
            return
        culprit = self.cycle if self._phase == _BODY and self.cycle is self._reading else None
        # In the middle of its own answer, or after it, an error would be read as part of that.
        if culprit is None or not culprit.is_started:
            self.transport.write(error_response(*self._refusal, self.state.date))
        if culprit is not None:
            culprit.disconnect()
        self._linger()

    def _linger(self) -> None:
        """Say no more, and forget what still comes for a moment."""
        self._phase = _REFUSED
        self._refusal = self._refusal or _NO_MORE
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.resume_reading()
            self._deadline = self.loop.time() + _LINGER_SECONDS
            self._start_timer()
        else:
            self.close()
