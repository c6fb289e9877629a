"""Response bodies of an HTTP client, with limits: answers, errors, and event streams that can be resumed."""

from __future__ import annotations

import contextlib
import re
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from handrail.errors import HttpRefused, Sent, TransportError
from handrail.jsonrpc import Response, decode_response, error_problem
from handrail.protocol.sse import EventReader, ServerSentEvent
from handrail.text.controls import one_line
from handrail.transports.base import MessageHandler, PendingRequest
from handrail.transports.http_request import EVENTS, JSON, Outbox, connection_errors

if TYPE_CHECKING:
    from aiohttp import ClientResponse

RETRY_SECONDS = 1.0  # before resuming a stream, unless the server sets another time
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 300.0
MAX_BACK_OFF_SECONDS = 30.0
_SENDABLE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]{1,2048}")  # as the value of a header


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


WRONG_URL_HINT = "Is this the address of an MCP server? The path is often /mcp"


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


class EventStream:
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
        while True:
            if events is None:
                if not (piece := await response.content.readany()):
                    return
                events = reader.feed(piece)
            self.pieces += 1
            is_silent = True
            for event in events:
                self.update_position(event)
                if event.too_long:
                    reason = f"an event of over {self._limit:,} bytes"
                    if request is not None:
                        raise TransportError(reason, sent=Sent.UNKNOWN)
                    handler.on_discarded(reason, too_long=True)
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
