"""A client's HTTP transport: Streamable HTTP, and the older HTTP+SSE transport of 2024.

A request is a POST of its own, and its response carries messages about this request only. In handshake revisions a GET
opens one more stream for notifications and requests of the server; a stream that breaks is resumed by the id of its
last event. Timeouts of requests belong to the connection: this module limits only connecting, and messages without a
response.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Coroutine, Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal

from handrail.errors import HttpRefused, PeerError, Sent, TransportError
from handrail.jsonrpc import Response, decode_response, error_problem
from handrail.protocol.framing import EventReader, ServerSentEvent
from handrail.revisions import Revision
from handrail.text.controls import one_line
from handrail.transports.base import MessageHandler, PendingRequest
from handrail.transports.http_request import (
    EVENTS,
    JSON,
    Authorizer,
    HttpRequester,
    Outbox,
    close_response,
    connection_errors,
    drain_response,
    same_origin_url,
)

if TYPE_CHECKING:
    from aiohttp import ClientResponse

__all__ = ["Authorizer", "HttpClientTransport"]

log = logging.getLogger("handrail")

SESSION = "Mcp-Session-Id"
PROTOCOL = "MCP-Protocol-Version"

MAX_REQUESTS = 100  # in parallel; more wait. Responses and notifications are not counted: a request may wait for one
MAX_WARNINGS = 10  # about messages that the server does not accept; beyond, they are logged at DEBUG
# Of one read of a stream, between two of which the event loop serves others: so many events, and so many bytes where
# they are more than so many lines.
EVENTS_PER_TURN, BYTES_PER_TURN, LINES_AT_ONCE = 8, 4096, 256
MAX_EMPTY_RESUMES = 10  # attempts to resume a stream without any data
MAX_REFUSAL_BYTES = 64 * 1024
NOTIFICATION_SECONDS = 30.0
ORDER_SECONDS = 10.0  # that a request waits until `notifications/initialized` is accepted
CLOSE_SECONDS = 2.0
RETRY_SECONDS = 1.0  # before resuming a stream, unless the server sets another time
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 300.0
MAX_BACK_OFF_SECONDS = 30.0

_TRANSPORTS = ("auto", "streamable", "sse")
_SESSION_ID = re.compile(r"[\x21-\x7e]{1,4096}")
_SENDABLE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]{1,2048}")  # as the value of a header

WRONG_URL_HINT = "Is this the address of an MCP server? The path is often /mcp"


class HttpClientTransport:
    """A transport to the server at `url`.

    `transport="auto"` is Streamable HTTP with a fallback to the transport of 2024; the other values select one of the
    two. `headers` are sent with every request, and to no other origin.
    """

    disconnect_cancels = True

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        auth: Authorizer | None = None,
        connect_seconds: float = 10.0,
        max_message_bytes: int = 4 * 1024 * 1024,
        transport: Literal["auto", "streamable", "sse"] = "auto",
    ) -> None:
        if transport not in _TRANSPORTS:
            raise ValueError(f"transport: {transport!r} is none of {', '.join(_TRANSPORTS)}")
        self._requester = HttpRequester(url, headers or {}, auth, connect_seconds)
        self._origin = self._requester.origin
        self._address = self._post_address = self._requester.address
        self._connect_seconds = connect_seconds
        self._limit = max_message_bytes
        self._transport = transport
        self._is_closed = True
        self._session = ""
        self._session_lost = False  # the server has answered 404 for the session
        self._revision: Revision | None = None
        self._session_headers: dict[str, str] = {}  # headers of every request after the handshake
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox = Outbox(self._post_message, self._start)
        self._initialized: asyncio.Future[None] | None = None  # done when `notifications/initialized` is posted
        self._initialized_pending = False
        self._rejected_messages = 0
        self._listener: asyncio.Task[None] | None = None
        self.notification_stream = self._streams = 0
        self._stream_tried = asyncio.Event()  # whether the server has a notification stream is known
        self._is_sse = False  # the transport of 2024: all messages arrive on one stream
        self._stream_error: TransportError | None = None  # why that stream has ended

    @property
    def session(self) -> str:
        """Id of the session; empty if the server has not begun one, or has ended it."""
        return "" if self._session_lost else self._session

    # ClientTransport

    async def open(self, handler: MessageHandler) -> None:
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(MAX_REQUESTS)
        self._requester.open()
        self._is_closed = False
        if self._transport == "sse":
            try:
                if not await self.fall_back():
                    raise TransportError(f"{self._origin} has no event stream that says where to post to")
            except BaseException:
                await self.close()
                raise

    def send(self, message: bytes, request: PendingRequest | None) -> None:
        if self._is_closed:
            if request is not None:
                self._loop.call_soon(self._handler.on_failure, TransportError("the connection was closed"), request)
        elif request is not None:
            request.task = self._start(self._request(message, request, self._initialized))
        else:
            posted = self._outbox.add(message, self._session_headers)
            if self._initialized_pending:
                self._initialized_pending, self._initialized = False, posted

    def set_revision(self, revision: Revision) -> None:
        self._revision = revision
        self._session_headers = {}
        if revision.stateless:
            self._session = ""
            return
        self._initialized_pending = True
        if self._session:
            self._session_headers[SESSION] = self._session
        if revision.version_header:
            self._session_headers[PROTOCOL] = revision.name

    def clear_session(self) -> None:
        """Forget the session: the next request is an `initialize`."""
        self._session = ""
        self._session_lost = False
        self._revision = None
        self._session_headers = {}
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None

    def cancel(self, request: PendingRequest) -> None:
        if request.task is not None:
            request.task.cancel()  # closes its HTTP connection

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_SECONDS / 2):
                        await self._outbox.wait_empty()
                if unsent_count := self._outbox.clear():
                    log.warning("%s: %d messages were not accepted before the end", self._origin, unsent_count)
                await self._cancel_tasks()
                if self._session and not self._session_lost:
                    await drain_response(await self._requester.request("DELETE", self._address, self._session_headers))
        except Exception as problem:
            log.debug("%s: the session was not ended: %s", self._origin, type(problem).__name__)
        finally:
            await self._cancel_tasks()
            await self._requester.close()

    async def _cancel_tasks(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name="handrail web")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # One request

    async def _request(self, message: bytes, request: PendingRequest, initialized: asyncio.Future[None] | None) -> None:
        try:
            if initialized is not None and not initialized.done():
                await asyncio.wait({initialized}, timeout=ORDER_SECONDS)
            async with self._room:
                await self._exchange(message, request)
        except PeerError as problem:
            self._handler.on_failure(problem, request)
        except connection_errors() as problem:
            self._handler.on_failure(self._requester.transport_error(problem, request.sent), request)
        except Exception as problem:
            log.exception("%s: a request failed unexpectedly", self._origin)
            self._handler.on_failure(
                TransportError(f"{type(problem).__name__} while asking", sent=request.sent), request
            )

    async def _exchange(self, message: bytes, request: PendingRequest) -> None:
        if self._stream_error is not None:
            raise TransportError(self._stream_error.text)
        is_first = request.method == "initialize"
        headers = {} if is_first else self._session_headers
        session = headers.get(SESSION, "")
        if request.headers:
            headers = {**headers, **request.headers}
        response = await self._requester.request("POST", self._post_address, headers, message, request)
        request.status = status = response.status
        try:
            if status >= 300:
                await self._on_error_status(response, request, session)
            elif self._is_sse:
                await drain_response(response)  # the answer arrives on the stream
            else:
                if is_first:
                    self._start_session(response.headers.get(SESSION, ""))
                kind = media_type(response)
                if kind == JSON or not kind:
                    body = await read_whole(response, self._limit, self._handler, request)
                    if body:
                        self._handler.on_message(body, request)
                    if not request.future.done():
                        raise missing_answer_error(status, "the answer to something else" if body else "nothing")
                elif kind == EVENTS:
                    await self._read_event_stream(response, request)
                else:
                    body = await read_some(response, MAX_REFUSAL_BYTES)
                    raise missing_answer_error(status, f"{kind[:100]}, not a message", body)
        finally:
            close_response(response)

    def _start_session(self, session: str) -> None:
        self.clear_session()
        if _SESSION_ID.fullmatch(session):
            self._session = session
            self._session_headers = {SESSION: session}
        elif session:
            log.warning("%s: session id ignored: it cannot be sent in a header", self._origin)

    async def _read_event_stream(self, response: ClientResponse, request: PendingRequest) -> None:
        """Read a response that is an event stream; resume it if it breaks before the answer."""
        stream = ResumableStream(self._limit)
        try:
            await stream.dispatch(response, self._handler, request, self._outbox)
            is_broken = False
        except connection_errors() as problem:
            is_broken = True
            log.debug("%s: a stream broke: %s", self._origin, type(problem).__name__)
        if request.future.done():
            await drain_response(response)
            return
        close_response(response)
        # Stateless revisions cannot resume a stream.
        if stream.last_event_id and (self._session or (self._revision is not None and not self._revision.stateless)):
            if request.on_paused is not None and not is_broken:
                request.on_paused()
            await self._resume(request, stream)
        if not request.future.done():
            raise TransportError("the event stream ended before the answer", sent=Sent.UNKNOWN)

    async def _resume(self, request: PendingRequest, stream: ResumableStream) -> None:
        """Request the rest of a stream, until the answer or `MAX_EMPTY_RESUMES` attempts without any data."""
        empty_attempts = 0
        while empty_attempts < MAX_EMPTY_RESUMES and not request.future.done():
            await asyncio.sleep(stream.pause(empty_attempts))
            before = stream.pieces
            try:
                await self._get_stream(request, stream)
            except PeerError as problem:
                problem.sent = Sent.UNKNOWN  # the request itself was sent
                raise
            empty_attempts = empty_attempts + 1 if stream.pieces == before else 0

    async def _get_stream(self, request: PendingRequest | None, stream: ResumableStream) -> None:
        """GET a stream, after its last event, and deliver its messages until it ends."""
        session, resumed = self._session, {"Last-Event-ID": stream.last_event_id} if stream.last_event_id else {}
        try:
            response = await self._requester.request(
                "GET", self._address, {**self._session_headers, "Accept": EVENTS, **resumed}
            )
            try:
                if response.status < 300 and media_type(response) == EVENTS:
                    if request is None:
                        self._streams += not resumed  # a new number: notifications may have been missed
                        self.notification_stream = self._streams
                        self._stream_tried.set()
                        self._handler.on_stream()
                    await stream.dispatch(response, self._handler, request, self._outbox)
                    await drain_response(response)
                elif response.status < 500:
                    body = await read_some(response, MAX_REFUSAL_BYTES)
                    self._mark_session_lost(response, session)
                    raise status_error(response, body)
            finally:
                close_response(response)
        except connection_errors() as problem:
            log.debug("%s: a stream broke: %s", self._origin, type(problem).__name__)

    async def _post_message(self, message: bytes, headers: dict[str, str]) -> None:
        """Post a notification or a response; only the status of the HTTP response matters."""
        try:
            async with asyncio.timeout(NOTIFICATION_SECONDS):
                response = await self._requester.request("POST", self._post_address, headers, message)
                await drain_response(response)
            status = response.status
            if status < 300:
                self._start_listener()
                return
            if status == 404 and self._session:
                self._session_lost = True  # the next request fails with it
            log.debug("%s: a message was answered with HTTP %d", self._origin, status)
        except Exception as problem:
            # Requests fail for the same reason and report it.
            is_disconnected = isinstance(problem, OSError) and not isinstance(problem, TimeoutError)
            self._rejected_messages += not is_disconnected
            level = logging.DEBUG if is_disconnected or self._rejected_messages > MAX_WARNINGS else logging.WARNING
            log.log(level, "%s: a reply or notification was not accepted: %s", self._origin, type(problem).__name__)

    # The notification stream

    def _start_listener(self) -> None:
        is_due = self._revision is not None and not self._revision.stateless and not self._is_closed
        # A GET without a session header would request the older transport.
        if is_due and self._session_headers and self._listener is None and not self._is_sse:
            self._stream_tried.clear()
            self._listener = self._start(self._run_listener())

    async def _run_listener(self) -> None:
        stream = ResumableStream(self._limit)
        failures = 0
        while True:
            before = stream.pieces
            try:
                await self._get_stream(None, stream)
            except PeerError as problem:
                log.debug("%s: no stream: %s", self._origin, problem)
                break  # the server has no notification stream, or has ended the session
            except Exception:
                log.exception("%s: a stream failed unexpectedly", self._origin)
                break
            finally:
                self.notification_stream = 0
                self._stream_tried.set()
            failures = 0 if stream.pieces != before else failures
            await asyncio.sleep(stream.pause(failures))
            failures += 1
        self._handler.on_stream()

    async def has_stream(self) -> bool:
        if self._initialized is not None:
            await asyncio.wait({self._initialized})
        if self._listener is not None:
            with contextlib.suppress(TimeoutError):  # a proxy may hold the headers of a stream back
                await asyncio.wait_for(self._stream_tried.wait(), ORDER_SECONDS)
        is_listening = self._listener is not None and not self._listener.done()
        return is_listening or self._is_sse or self._session_lost  # which the next request finds out

    # The older transport

    async def fall_back(self) -> bool:
        """Switch to the transport of 2024 if the server supports it; return whether it does."""
        if self._transport == "streamable" or self._is_sse:
            return False
        self.clear_session()
        try:
            async with asyncio.timeout(self._connect_seconds):
                await self._open_sse()
        except connection_errors() as problem:
            failed = self._requester.transport_error(problem, Sent.NO)
        else:
            return self._is_sse
        raise failed  # not in the `except`: the context of the exception would hold the headers, with secrets

    async def _open_sse(self) -> None:
        """Switch to the older transport if the stream begins with the event `endpoint`, which has the POST address."""
        response = await self._requester.request("GET", self._address, {"Accept": EVENTS})
        try:
            stream = ResumableStream(self._limit)
            is_stream = response.status < 300 and media_type(response) == EVENTS
            event = await stream.first_event(response) if is_stream else None
            if event is None or event.name != "endpoint":
                return
            address = same_origin_url(response.url, event.data.decode("utf-8", "replace"))
            if address is None:
                # That place would receive every message and every token (P-27).
                raise TransportError(f"{self._origin} wants its messages to be sent to another place; refused")
            self._is_sse, self._post_address, self.notification_stream = True, address, 1
            self._start(self._read_sse_stream(response, stream))
        finally:
            if not self._is_sse:
                close_response(response)

    async def _read_sse_stream(self, response: ClientResponse, stream: ResumableStream) -> None:
        outcome = "ended"
        try:
            await stream.dispatch(response, self._handler, None, self._outbox, is_only=True)
        except connection_errors() as problem:
            outcome = f"broke ({type(problem).__name__})"
        finally:
            close_response(response)
        self._stream_error = TransportError(f"the event stream of {self._origin} {outcome}", sent=Sent.UNKNOWN)
        self._handler.on_failure(self._stream_error)

    # Errors

    async def _on_error_status(self, response: ClientResponse, request: PendingRequest, session: str) -> None:
        """Deliver the JSON-RPC error in an error response; without one, raise HttpRefused."""
        body = await read_some(response, MAX_REFUSAL_BYTES)
        if not (response.status == 404 and session) and is_error(body, request):
            self._handler.on_message(body, request)
        if not request.future.done():
            self._mark_session_lost(response, session)
            raise status_error(response, body)

    def _mark_session_lost(self, response: ClientResponse, session: str) -> None:
        if response.status == 404 and session and session == self._session:
            self._session_lost = True  # the id stays until the next handshake


class ResumableStream:
    """An event stream and the position in it, from which it can be resumed after it has broken."""

    def __init__(self, limit: int) -> None:
        self.last_event_id = ""  # of the last event with an id
        self.pieces = 0  # received
        self._retry_seconds = RETRY_SECONDS
        self._limit = limit
        self._reader: EventReader | None = None
        self._unread: list[ServerSentEvent] | None = None

    def pause(self, empty_attempts: int) -> float:
        """Return the seconds to wait before resuming, after `empty_attempts` without any data."""
        return min(self._retry_seconds * 2.0 ** min(empty_attempts, 10), max(self._retry_seconds, MAX_BACK_OFF_SECONDS))

    async def first_event(self, response: ClientResponse) -> ServerSentEvent | None:
        """Return the first event with data; `dispatch` delivers the events received with it."""
        self._reader = EventReader(self._limit)
        while piece := await response.content.readany():
            events = [event for event in self._reader.feed(piece) if event.data]
            if events:
                self._unread = events[1:]
                return events[0]
        return None

    async def dispatch(
        self,
        response: ClientResponse,
        handler: MessageHandler,
        request: PendingRequest | None,
        outbox: Outbox,
        *,
        is_only: bool = False,
    ) -> None:
        """Deliver messages to `handler` until the answer to `request`, or the end of the stream.

        With `is_only`, activity on the stream counts for all requests. A stream whose messages cause responses is read
        no faster than these can be posted.
        """
        reader, events = self._reader or EventReader(self._limit), self._unread
        self._reader = self._unread = None
        rest = b""
        while True:
            if events is None:
                if rest:
                    await asyncio.sleep(0)
                elif not (rest := await response.content.readany()):
                    return
                is_long = len(rest) > BYTES_PER_TURN and rest.count(b"\n") + rest.count(b"\r") > LINES_AT_ONCE
                piece, rest = (rest[:BYTES_PER_TURN], rest[BYTES_PER_TURN:]) if is_long else (rest, b"")
                events = reader.feed(piece)
            self.pieces += 1
            is_silent = True
            for number, event in enumerate(events, 1):
                if number % EVENTS_PER_TURN == 0:
                    await asyncio.sleep(0)
                self.update_position(event)
                if event.too_long:
                    reason = f"an event of over {self._limit:,} bytes"
                    if request is not None:
                        raise TransportError(reason, sent=Sent.UNKNOWN)
                    handler.on_discarded(reason, too_long=True)
                elif request is None and not is_only and is_response(event.data):
                    # The response to a request is on the stream of that request; this may be one to a request to come.
                    handler.on_discarded("a response on the stream of notifications")
                elif event.data and event.name in ("", "message"):
                    is_silent, before = False, outbox.added
                    handler.on_message(event.data, request)
                    if request is not None and request.future.done():
                        return
                    if outbox.added != before:
                        await outbox.wait_for_room()
            if is_silent and (is_only or request is not None):
                handler.on_activity(request)
            events = None

    def update_position(self, event: ServerSentEvent) -> None:
        if event.event_id is not None:
            self.last_event_id = event.event_id if _SENDABLE.fullmatch(event.event_id) else ""
        if event.retry_ms is not None:
            self._retry_seconds = min(max(event.retry_ms / 1000, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


def media_type(response: ClientResponse) -> str:
    kind = response.headers.get("Content-Type", "")
    return kind if kind in (JSON, EVENTS) else kind.partition(";")[0].strip().lower()


async def read_some(response: ClientResponse, limit: int) -> bytes:
    """Return the body, or the part of it that arrives, cut at `limit` bytes."""
    pieces, size = [], 0
    with contextlib.suppress(*connection_errors()):
        while size <= limit and (piece := await response.content.readany()):
            pieces.append(piece)
            size += len(piece)
    return b"".join(pieces)[:limit]


async def read_whole(response: ClientResponse, limit: int, handler: MessageHandler, request: PendingRequest) -> bytes:
    """Return the body; raise TransportError if it is longer than `limit` bytes."""
    content = response.content
    size = response.content_length or 0
    body = b""
    if size <= limit:
        body = await content.readany()
        if not content.at_eof():
            pieces, size = [body], len(body)
            while size <= limit and pieces[-1]:
                handler.on_activity(request)
                pieces.append(await content.readany())
                size += len(pieces[-1])
            body = b"".join(pieces)
    if size > limit or len(body) > limit:
        raise TransportError(f"an answer of over {limit:,} bytes", sent=Sent.UNKNOWN)
    return body


def is_response(message: bytes | bytearray) -> bool:
    return isinstance(decode_response(message), Response)


def is_error(body: bytes, request: PendingRequest) -> bool:
    """Return whether `body` is a valid JSON-RPC error, about this request or about none.

    Proxies and rate limiters answer `{"error": "rate limited"}` too; that is no message.
    """
    message = decode_response(body)
    return (
        isinstance(message, Response)
        and message.id in ("", request.id)  # "": the error has no id
        and error_problem(message.error) == ""
    )


def status_error(response: ClientResponse, body: bytes) -> HttpRefused:
    """Return the error for an unsuccessful status; `retry_after` is set if the server sends it."""
    status, detail, hint = response.status, "", ""
    if status < 400:
        detail, hint = response.headers.get("Location", ""), "Redirects to other places are not followed"
    elif media_type(response) in (JSON, "text/plain"):
        detail = body.decode("utf-8", "replace")
    if status in (404, 405, 501):  # 501 is how plain file servers answer a POST
        hint = WRONG_URL_HINT
    wait = _seconds(response.headers.get("Retry-After", "")) if status in (429, 503) else None
    if wait is not None:
        hint = f"Try again in {wait:g} s"
    text = f"HTTP {status}: {one_line(detail, 200)}" if detail else f"HTTP {status}"
    sent = Sent.FAILED if status < 500 else Sent.UNKNOWN
    return HttpRefused(text, status=status, body=body, retry_after=wait, sent=sent, hint=hint)


def missing_answer_error(status: int, problem: str, body: bytes = b"") -> HttpRefused:
    """Return the error for a successful status without an answer."""
    return HttpRefused(
        f"HTTP {status} with {problem}", status=status, body=body, sent=Sent.UNKNOWN, hint=WRONG_URL_HINT
    )


def _seconds(text: str) -> float | None:
    """Parse Retry-After: seconds or a date."""
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    try:
        return max(0.0, round(parsedate_to_datetime(text).timestamp() - time.time()))
    except (TypeError, ValueError, OverflowError):
        return None
