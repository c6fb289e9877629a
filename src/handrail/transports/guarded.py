"""A connection of uvicorn's behind limits: what a peer may send, in what time, and how long it may leave us unread.

By itself uvicorn takes headers without end, waits for ever, and passes on requests that two servers may read
differently. A request here has a phase, and each phase has its time:

    IDLE ──first byte──► HEAD ──empty line──► BODY ──its end──► IDLE        OVER: refused, only waits to be closed

While an earlier request is being answered, the peer waits for us, so no clock runs and nothing more is parsed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

    from handrail.transports.listen import HttpLimits

log = logging.getLogger("handrail")

_PIECE = 16 * 1024  # parsed at a time: bounds how many pipelined requests one read can put into the queue
_HOLD_BYTES = 64 * 1024  # of requests behind the one being answered
_LINGER_SECONDS = 1.0  # to read on after a refusal: closed with bytes unread, TCP takes the answer back
_LINGERERS = 256  # connections over the limit that are told so; beyond, they are just closed

_IDLE, _HEAD, _BODY, _OVER = range(4)

_USED = {  # of uvicorn, beside what it documents
    HttpToolsProtocol: (
        "connections cycle flow headers logger loop access_log parser pipeline scope server_state tasks transport url "
        "connection_made connection_lost data_received pause_writing resume_writing shutdown on_url on_header on_body "
        "on_message_begin on_headers_complete on_message_complete on_response_complete _start_asgi_task "
        "_unset_keepalive_if_required"
    ),
    RequestResponseCycle: "disconnected keep_alive message_event response_complete response_started "
    "waiting_for_100_continue",
    FlowControl: "read_paused pause_reading resume_reading",
    ServerState: "connections tasks default_headers",
}


def _missing(used: dict[type, str]) -> list[str]:
    """What is used of classes, and neither an attribute of theirs nor named in their code."""
    missing = []
    for owner, names in used.items():
        codes = (each.__code__ for each in vars(owner).values() if inspect.isfunction(each))
        known = {*dir(owner), *(name for code in codes for name in code.co_names)}
        missing += [f"{owner.__name__}.{name}" for name in names.split() if name not in known]
    return missing


if _missing(_USED):
    raise ImportError(
        f"uvicorn {uvicorn.__version__} is not one handrail knows (no {', '.join(_missing(_USED))}): "
        "install one it was tested with, pip install 'uvicorn==0.54.*'"
    )


class _Refused(Exception):
    """Raised among the parser's callbacks: a status and a text for the peer."""


class State(ServerState):
    """What the connections of one listener share."""

    def __init__(self, limits: HttpLimits) -> None:
        super().__init__()
        self.limits = limits
        self.ending = False
        self._fewer = asyncio.Event()

    def guarded(self) -> list[Guarded]:
        return [each for each in self.connections if isinstance(each, Guarded)]

    def one_less(self) -> None:
        if self.ending:
            self._fewer.set()

    async def left(self) -> None:
        """Wait until there is no connection."""
        while self.connections:
            self._fewer.clear()
            await self._fewer.wait()


class Guarded(HttpToolsProtocol):
    """One connection."""

    def __init__(self, config: uvicorn.Config, state: State, app_state: dict[str, Any]) -> None:
        super().__init__(config, state, app_state, asyncio.get_running_loop())
        self.logger = log
        self.access_log = False
        self._state = state
        self._limits = limits = state.limits
        self._seconds = (limits.idle_seconds, limits.header_seconds, limits.body_seconds, _LINGER_SECONDS)
        self._phase = _IDLE
        self._fields = 0  # of the request being read, trailers included
        self._field_bytes = 0
        self._overhead = 0  # bytes since something was made of them: fields and chunk lines that do not end
        self._held = bytearray()  # came while an earlier request is being answered
        self._running: RequestResponseCycle | None = None  # `cycle` is the last one read, perhaps still in the queue
        self._refusal: tuple[int, str] | None = None
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._write_timer: asyncio.TimerHandle | None = None

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        before = len(self.connections)
        super().connection_made(cast(asyncio.Transport, transport))
        if before >= self._limits.max_connections + _LINGERERS:
            self.transport.abort()
        elif before >= self._limits.max_connections:
            self._refuse(503, "There are too many connections")
        elif self._state.ending:
            self._refuse(503, "The server is about to end")
        else:
            self._deadline = self.loop.time() + self._limits.header_seconds
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._disconnect(self._running)
        super().connection_lost(exc)
        self._state.one_less()

    def _disconnect(self, cycle: RequestResponseCycle | None) -> None:
        """From now on the application is told that the peer is gone, and what it sends goes nowhere."""
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    # What comes in

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._held:
            self._hold(data)
        else:
            self._feed(data)

    def _feed(self, data: bytes | memoryview) -> None:
        if len(data) > _PIECE:
            data = memoryview(data)
        while data:
            if self._held_up():
                return self._hold(data)
            piece, data = data[:_PIECE], data[_PIECE:]
            self._overhead += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + bytes(piece[upgrade.args[0] :]) + bytes(data)
            except httptools.HttpParserError as problem:
                cause = problem.__context__
                refusal = cause.args if isinstance(cause, _Refused) else (400, "This is not a valid HTTP request")
                return self._refuse(*refusal)
            if self._overhead > self._limits.max_header_bytes and self._phase != _IDLE:
                return self._refuse(431, "The headers are too long")
        return self._arm()

    def _held_up(self) -> bool:
        """Whether an earlier request than the one being read is still unanswered."""
        if self.pipeline:
            return True
        running = self._running
        if running is None or running.response_complete:
            return False
        return self._phase != _BODY or running is not self.cycle

    def _hold(self, data: bytes | memoryview) -> None:
        self._held += data
        if len(self._held) > _HOLD_BYTES:
            self.flow.pause_reading()  # and no earlier: a connection that is not read from does not show that it ended

    def _feed_held(self) -> None:
        held, self._held = bytes(self._held), bytearray()
        if self._refusal is None and not self.transport.is_closing():
            self._feed(held)

    def _head_without_upgrade(self) -> bytes:
        """The head just read, as from a client that does not offer to speak something else.

        The parser leaves HTTP after such a request and with it the body. Java's client offers HTTP/2 by default.
        """
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        fields = [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"\r\n".join((line, *fields, b"", b""))

    # What the parser finds

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = _HEAD
        self._fields = self._field_bytes = self._overhead = 0
        self._start_clock()

    def on_url(self, url: bytes) -> None:
        self._field_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._field_bytes += len(name) + len(value) + 4
        if self._fields > self._limits.max_headers:
            raise _Refused(431, "There are too many headers")
        if self._field_bytes > self._limits.max_header_bytes:
            raise _Refused(431, "The headers are too long")
        # Trailers are dropped: uvicorn would add them to headers that have been checked already.
        if self._phase == _HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_head()
        if self.parser.should_upgrade():
            return  # it is read again, see `_head_without_upgrade`
        super().on_headers_complete()
        self._phase = _BODY
        self._start_clock()
        if self._state.ending:
            self.cycle.keep_alive = False

    def _check_head(self) -> None:
        """What another server on the way may have read in another way is refused, RFC 9112 sections 3.2 and 6."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise _Refused(505, "HTTP/1.1 is spoken here")
        if self.parser.get_method() == b"CONNECT":
            raise _Refused(501, "This is not a proxy")
        names = [name for name, _ in self.headers]
        if names.count(b"host") != 1:
            raise _Refused(400, "Exactly one Host header is needed")
        if names.count(b"content-length") + names.count(b"transfer-encoding") > 1:
            raise _Refused(400, "The length of the body is given twice")
        if version == "1.0" and b"transfer-encoding" in names:
            raise _Refused(400, "HTTP/1.0 has no Transfer-Encoding")

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._phase == _BODY:
            super().on_message_complete()
            self._phase = _IDLE
            self._start_clock()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # one clock is enough
        if self.transport.is_closing():
            self._watch_writing()
        elif self._refusal is not None:
            self._refuse_in_turn()
        else:
            self._start_clock()
            self._arm()
            if self._held:
                self.loop.call_soon(self._feed_held)

    # Time

    def _start_clock(self) -> None:
        self._deadline = math.inf if self._held_up() else self.loop.time() + self._seconds[self._phase]

    def _arm(self) -> None:
        # Most requests are over long before their deadlines, so a timer that is early enough already is left alone.
        if self._timer_at <= self._deadline:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._deadline
        self._timer = self.loop.call_at(self._deadline, self._on_time)

    def _on_time(self) -> None:
        self._timer_at = math.inf
        if self.transport.is_closing():
            return  # what it still has to take is watched
        if self.loop.time() < self._deadline:
            self._arm()
        elif self._phase == _OVER:
            self.transport.abort()
        elif self._phase == _IDLE:
            self._close()
        elif self._phase == _BODY and (self.flow.read_paused or self.cycle.waiting_for_100_continue):
            self._start_clock()  # it is the application that is behind, not the peer
            self._arm()
        else:
            self._refuse(408, "The request took too long to arrive")

    # What goes out

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_writing()

    def _watch_writing(self) -> None:
        """Look after a while whether the peer took anything, if an answer waits for that."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self.flow.write_paused or self.transport.is_closing()):
            self._write_timer = self.loop.call_later(self._limits.write_seconds, self._look_at_writing, unsent)

    def _look_at_writing(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch_writing()
        else:
            log.info("http: a client read nothing for %g s and was cut off", self._limits.write_seconds)
            self.transport.abort()

    def _close(self) -> None:
        self.transport.close()
        self._watch_writing()  # closing waits for what is unsent, and by itself for ever

    def _refuse(self, status: int, text: str) -> None:
        """Answer with an error, after all that came before, and close."""
        self._refusal = (status, text)
        self._held.clear()
        if self._phase == _BODY and self.pipeline:
            self.pipeline.popleft()  # the culprit itself, not begun
        self._refuse_in_turn()

    def _refuse_in_turn(self) -> None:
        if self._held_up():
            self._deadline = math.inf
            return
        culprit = self._running if self._phase == _BODY else None
        self._phase = _OVER
        self._disconnect(culprit)
        # In the middle of its own answer, or after it, an error would be read as part of that.
        if self._refusal is not None and (culprit is None or not culprit.response_started):
            self.transport.write(_response(*self._refusal, self.server_state.default_headers))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
            self._deadline = self.loop.time() + _LINGER_SECONDS
            self._arm()
        else:
            self._close()


def _response(status: int, text: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    body = f"{text}.\n".encode()
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode(),
        *(b"%b: %b" % field for field in headers),
        b"content-type: text/plain; charset=utf-8",
        b"content-length: %d" % len(body),
        b"connection: close",
    ]
    return b"\r\n".join((*lines, b"", body))
