"""POST: a message of any revision, answered as JSON or as events.

Most messages are answered where they are taken, or by the call itself when it ends: a deferred request takes no task.
For what takes longer, or has more to send than its reply, a coroutine is returned, the rest of the work.

GET and DELETE: streams that a client opens by itself, and the end of a session.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeGuard
from urllib.parse import parse_qs

from msgspec import UNSET, UnsetType

from handrail import jsonrpc
from handrail.engine.dispatcher import Dispatcher
from handrail.engine.http_sessions import END, EVENT_SECONDS, EventLog, HttpSession, parse_event_id
from handrail.engine.reply_channel import Reply
from handrail.errors import Kind, Refused
from handrail.jsonrpc import Id, InvalidMessage, Message, Notification, Request
from handrail.model import Json
from handrail.protocol import framing as sse, http_rules as http
from handrail.protocol.connection import Connection, names_version
from handrail.protocol.http_rules import NAME_PARAMS, PROTOCOL, SESSION
from handrail.revisions.base import CAPABILITIES, VERSION
from handrail.stores import StoreError
from handrail.transports.http.exchange import JSON, KEEP_ALIVE_SECONDS, WATCH_DELAY_SECONDS, Exchange, Fields
from handrail.transports.http.forwarding import digest_of

log = logging.getLogger("handrail")

QUIET_SECONDS = 2.0
"""Then a response becomes an event stream, so that no proxy takes it for dead."""

_LONG_METHODS = (*NAME_PARAMS, "completion/complete", "subscriptions/listen")
_SUBSCRIBING_METHODS = ("resources/subscribe", "resources/unsubscribe")

Continuation = Coroutine[Any, Any, None] | None
"""The rest of the work for a request; None: there is none, or the reply comes by itself."""


async def run(exchange: Exchange) -> None:
    """Receive the message of a request, and answer it."""
    body = await _body(exchange)
    continuation = None if body is None else accept(exchange, body)
    if continuation is not None:
        await continuation


async def _body(exchange: Exchange) -> bytes | None:
    """Return the whole body; None if it is refused, or the client disconnects."""
    if _rejects_headers(exchange):
        return None
    max_bytes = exchange.endpoint.engine.limits.max_message_bytes
    declared = exchange.headers.get(b"content-length", b"")
    received_bytes = int(declared[:20]) if declared.isdigit() else 0
    pieces: list[bytes] = []
    while received_bytes <= max_bytes:
        event = await exchange.response.receive()
        if event["type"] == "http.disconnect":
            return None
        pieces.append(event.get("body", b""))
        if not event.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        received_bytes = max(received_bytes, sum(map(len, pieces)))
    exchange.response.respond_text(413, f"A message has at most {max_bytes:,} bytes")
    return None


def _rejects_headers(exchange: Exchange) -> bool:
    """Return whether the head of a request is refused; its response is set then."""
    get = exchange.headers.get
    content = http.negotiate_content(get(b"content-type", b""), get(b"content-encoding"), get(b"accept", b""))
    exchange.wants_json, exchange.stream.two_way, defect = content
    if defect:
        exchange.response.respond_text(415, defect)
    elif not exchange.wants_json and not exchange.stream.two_way and not _sse_stream_id(exchange):
        exchange.response.respond_text(406, "Accept must name application/json or text/event-stream")
    return exchange.response.whole is not None


def _sse_stream_id(exchange: Exchange) -> str:
    """Return the id of the 2024 stream that the message is for; empty if there is none."""
    query = exchange.scope["query_string"]
    return parse_qs(query.decode("latin-1")).get("sessionId", [""])[0] if query else ""


def take_whole(exchange: Exchange, body: bytes) -> Continuation:
    """Accept a request whose body has come."""
    if _rejects_headers(exchange):
        return None
    max_bytes = exchange.endpoint.engine.limits.max_message_bytes
    if len(body) > max_bytes:
        exchange.response.respond_text(413, f"A message has at most {max_bytes:,} bytes")
        return None
    return accept(exchange, body)


def accept(exchange: Exchange, body: bytes) -> Continuation:
    """Decode a message, find its revision and its session, and answer it.

    A message that names a stateless revision is read by that; any other belongs to a session or begins one.
    """
    if exchange.endpoint.stopping:  # since the head arrived
        exchange.respond_stopping()
        return None
    if exchange.forwarded_for is not None and exchange.forwarded_digest != digest_of(body):
        exchange.response.respond_text(400, "handrail-forwarded is for another message")
        return None
    exchange.raw, exchange.message = body, (message := jsonrpc.decode(body))
    stream_id = exchange.scope["query_string"] and _sse_stream_id(exchange)
    if stream_id and not (type(message) is Request and names_version(message)):
        return _receive_on_sse(exchange, stream_id, message, body)
    if isinstance(message, InvalidMessage):
        is_modern = exchange.header(PROTOCOL) in exchange.endpoint.engine.offer.stateless
        kind = Kind.ENVELOPE if is_modern and message.kind is Kind.BAD_PARAMS else message.kind
        return _refuse(exchange, message.id, Refused(kind, message.text))
    try:
        if type(message) is Request and names_version(message) and exchange.endpoint.engine.offer.stateless:
            conversation = exchange.start_conversation()
            _check_stateless(exchange, message, conversation.connection)
            return _answer(exchange, conversation, message)
        if type(message) is Request and message.method == "initialize":
            return _initialize(exchange, message)
        if type(message) is Notification and exchange.header(PROTOCOL) in exchange.endpoint.engine.offer.stateless:
            exchange.response.respond(202, [], b"")  # that revision has no notifications of clients over HTTP
            return None
        session = _session(exchange, message)
    except Refused as refused:
        return _refuse(exchange, message.id if type(message) is Request else UNSET, refused)
    if session is None:
        return _find_session_and_receive(exchange, message, body)
    return _receive_in_session(exchange, session, message, body)


async def _find_session_and_receive(exchange: Exchange, message: Message | list[Json], body: bytes) -> None:
    """Look a session up in a store that needs waiting, and answer a message in it."""
    try:
        session = exchange.check_session(
            await exchange.endpoint.sessions.find(exchange.headers[SESSION], exchange.principal)
        )
    except Refused as refused:
        _refuse(exchange, message.id if type(message) is Request else UNSET, refused)
        return
    if exchange.endpoint.stopping:
        exchange.respond_stopping()
        return
    continuation = _receive_in_session(exchange, session, message, body)
    if continuation is not None:
        await continuation


def _receive_in_session(
    exchange: Exchange, session: HttpSession, message: Message | list[Json], body: bytes
) -> Continuation:
    conversation, exchange.session = exchange.start_conversation(session.connection), session
    if type(message) is Request or not session.name or session.connection.expects(message):
        return _answer(exchange, conversation, message)
    return _forward(exchange, session.name, body)


async def _forward(exchange: Exchange, name: str, body: bytes, *, to: str = "") -> None:
    """Pass a message on to the process that waits for it; without `to`, each looks whether it does."""
    await exchange.endpoint.sessions.publish(name, body, to=to)
    exchange.response.respond(202, [], b"")


async def _receive_on_sse(exchange: Exchange, stream_id: str, message: Message | list[Json], body: bytes) -> None:
    conversation = exchange.endpoint.sse_streams.get(stream_id)
    process_id = exchange.endpoint.sessions.process_of_pipe(stream_id, exchange.principal)
    if process_id is None:
        exchange.response.respond_text(404, "No such stream: open one with GET")
    # The request that a notification is about may still be on its way from another process: it takes the same way.
    elif conversation is None or not conversation.connection.expects(message):
        await _forward(exchange, stream_id, body, to=process_id)
    else:
        conversation.receive_and_reply(body)
        exchange.response.respond(202, [], b"")


def _check_stateless(exchange: Exchange, request: Request, connection: Connection) -> None:
    http.check_version(request, exchange.headers)
    revision = connection.revision_of(request)
    try:
        http.check_mirrored_headers(request, exchange.headers)
    except Refused:
        connection.check_envelope(request, revision)  # else it is checked with the parameters
        raise
    if request.method == "subscriptions/listen" and not exchange.stream.two_way:
        connection.check_envelope(request, revision)
        raise Refused(Kind.INVALID_REQUEST, "subscriptions/listen is answered with events: accept them")


def _initialize(exchange: Exchange, request: Request) -> Continuation:
    conversation = exchange.start_conversation()
    reply = conversation.handle(request, exchange.stream.finish)
    assert reply is not None  # a handshake waits for nothing
    fields: Fields = []
    if conversation.connection.revision is not None:
        fields = [(SESSION, exchange.endpoint.sessions.issue_id(conversation.connection, exchange.principal).encode())]
    if exchange.wants_json or reply.status != 200:
        return _respond(exchange, reply, fields)
    exchange.stream.finish(reply)
    return _as_events(exchange, fields)


async def _as_events(exchange: Exchange, fields: Fields) -> None:
    await exchange.response.begin_events(fields=fields)
    await exchange.response.events(None)


def _session(exchange: Exchange, message: Message | list[Json]) -> HttpSession | None:
    """Return the session of a message; None if the store needs waiting."""
    offer, session_id = exchange.endpoint.engine.offer, exchange.headers.get(SESSION)
    version = exchange.header(PROTOCOL)
    if version in offer.stateless and type(message) is jsonrpc.Response:
        text = f"{version}: a server sends no requests, so there is nothing to answer"
        raise Refused(Kind.INVALID_REQUEST, f"{text}; answers go into params.inputResponses of the repeated call")
    if version in offer.stateless and not isinstance(message, list):
        raise Refused(Kind.ENVELOPE, f"{version}: params._meta lacks {VERSION!r} and {CAPABILITIES!r}")
    if session_id:
        sessions = exchange.endpoint.sessions
        return (
            None
            if sessions.peek is None
            else exchange.check_session(sessions.find_at_once(session_id, exchange.principal))
        )
    if isinstance(message, list) and (version or not exchange.endpoint.legacy_stateless):
        raise Refused(Kind.INVALID_REQUEST, "Batches are for sessions of 2025-03-26: send one message at a time")
    if version and version not in offer.handshake:
        data = {"supported": offer.supported, "requested": version[:100]}
        raise Refused(Kind.ENVELOPE, "Unsupported protocol version", data)
    if not exchange.endpoint.legacy_stateless:
        raise Refused(Kind.INVALID_REQUEST, "Mcp-Session-Id is missing: begin with initialize")
    connection = Connection(offer, exchange.endpoint.engine.hidden)
    connection.revision = offer.handshake.get(version) or offer.http_default
    return HttpSession("", connection)


def _refuse(exchange: Exchange, request_id: Id | UnsetType, refused: Refused) -> Continuation:
    """Refuse a message in the revision of its sender, or in the newest if that is unknown."""
    conversation = exchange.conversation or exchange.start_conversation()
    connection = conversation.connection
    if type(exchange.message) is Request:
        conversation.record_refusal(exchange.message, connection.fallback_revision_for(exchange.message), refused)
    return _respond(exchange, conversation.engine.encode_refusal(connection.fallback_revision, request_id, refused))


def _answer(exchange: Exchange, conversation: Dispatcher, message: Message | list[Json]) -> Continuation:
    """Handle a message and respond: as JSON, or as events if there is more than the reply."""
    endpoint = exchange.endpoint
    waits = message.method in _LONG_METHODS if type(message) is Request else type(message) is list
    if waits and endpoint.calls.get(exchange.principal.id, 0) >= endpoint.engine.limits.max_calls:
        request_id = message.id if type(message) is Request else UNSET
        text = "Too many requests are in flight; wait for some to end"
        if exchange.session is None and type(message) is Request:
            conversation.connection.check_envelope(message, conversation.connection.revision_of(message))
        return _refuse(exchange, request_id, Refused(Kind.OVERLOADED, text))
    session = exchange.session
    if session and session.name and _is_subscribing(message):
        return _change_subscription(exchange, conversation, session, message)
    if waits and endpoint.engine.has_leases and not exchange.is_placed and type(message) is Request:
        return _answer_where_held(exchange, conversation, message)
    reply = conversation.handle(message, exchange.stream.finish)
    if reply is not None and waits and exchange.wants_json and not exchange.stream.unsent:
        return _respond(exchange, reply)  # the usual call
    if session and session.name and type(message) is Request and message.method == "logging/setLevel":
        return _store_log_level(exchange, conversation, session, reply)
    return _deliver(exchange, conversation, reply)


async def _answer_where_held(exchange: Exchange, conversation: Dispatcher, message: Request) -> None:
    """Pass a request on to the replica that has the upstream process of its caller, or answer it here."""
    forwarder = exchange.endpoint.forwarder
    try:
        while (holder := await forwarder.holder(exchange, conversation, message)) is not None:
            if exchange.forwarded_for is not None:
                break  # the other replica knows no better: a request is passed on once
            if await forwarder.forward(exchange, holder):
                return
    except Refused as refused:
        _refuse(exchange, message.id, refused)
        return
    exchange.is_placed = True
    continuation = _answer(exchange, conversation, message)
    if continuation is not None:
        await continuation


def _deliver(exchange: Exchange, conversation: Dispatcher, reply: Reply | None) -> Continuation:
    endpoint, stream = exchange.endpoint, exchange.stream
    if reply is None and stream.ended:  # the last reply of a batch came at once
        reply = stream.reply
    if reply is not None:
        as_json = exchange.wants_json or not reply.body or reply.status != 200
        if as_json and not stream.unsent:
            return _respond(exchange, reply)
        stream.finish(reply)
    endpoint.open.add(exchange)
    endpoint.calls[exchange.principal.id] += 1
    if exchange.cycle is None or stream.ended or stream.unsent or stream.paused:
        return _continuation(exchange, WATCH_DELAY_SECONDS)
    exchange.cycle.is_deferred = True
    endpoint.deferred.add(exchange, _resume, conversation.calls.loop)
    return None


def _resume(exchange: Exchange) -> None:
    """Write the reply of a deferred request; if there is more than that, or no reply yet, in a task."""
    cycle, reply = exchange.cycle, exchange.stream.reply
    assert cycle is not None
    if reply.body and exchange.wants_json and reply.status == 200 and not cycle.complete:
        _release(exchange)
        cycle.respond(*exchange.response.respond(200, JSON, reply.body))
    else:
        cycle.start(exchange.complete(_continuation(exchange, 0.0)))


def _continuation(exchange: Exchange, seconds: float) -> Coroutine[Any, Any, None]:
    later = _answer_later(exchange, seconds)
    return exchange.run_detached(later) if exchange.session and exchange.session.name else later


async def _store_log_level(
    exchange: Exchange, conversation: Dispatcher, session: HttpSession, reply: Reply | None
) -> None:
    await exchange.endpoint.sessions.save_level(session)
    continuation = _deliver(exchange, conversation, reply)
    if continuation is not None:
        await continuation


def _is_subscribing(message: Message | list[Json]) -> TypeGuard[Request | list[Json]]:
    if isinstance(message, list):
        methods = [each.get("method") for each in message if type(each) is dict]
    else:
        methods = [message.method] if type(message) is Request else []
    return any(each in _SUBSCRIBING_METHODS for each in methods if type(each) is str)


async def _change_subscription(
    exchange: Exchange, conversation: Dispatcher, session: HttpSession, message: Request | list[Json]
) -> None:
    """Subscribe to a resource, or unsubscribe. Every process that has a stream of the session reads it in the store."""

    conversation.find_subscription = partial(exchange.endpoint.sessions.find_subscription, session)

    def change(max_chars: int) -> Reply | None:
        conversation.max_subscribed_chars = max_chars
        return conversation.handle(message, exchange.stream.finish)

    try:
        reply = await exchange.endpoint.sessions.change_subscriptions(session, exchange.caller, change)
    except StoreError as problem:
        log.error("http: subscriptions of a session not stored: %s", problem)
        refused = Refused(Kind.UNRECORDED, "Subscriptions cannot be stored now; the server's log says why")
        request_id = message.id if type(message) is Request else UNSET
        reply = conversation.engine.encode_refusal(conversation.connection.fallback_revision, request_id, refused)
    continuation = _deliver(exchange, conversation, reply)
    if continuation is not None:
        await continuation


async def _answer_later(exchange: Exchange, seconds: float) -> None:
    """Respond when the reply comes. A disconnect in the first `seconds` is noticed after them: most calls are over."""
    stream, is_stateless = exchange.stream, exchange.session is None
    exchange.task = exchange.task or asyncio.current_task()
    try:
        if seconds and not stream.unsent and not stream.paused:
            await stream.wait(seconds)
        if not stream.ended:
            exchange.watch_disconnect()
        if not stream.unsent and not stream.paused and not stream.ended:
            await stream.wait(QUIET_SECONDS - WATCH_DELAY_SECONDS)
        if stream.disconnected and is_stateless:
            return
        has_more = stream.unsent or stream.paused or not stream.ended
        if stream.two_way and (has_more or not exchange.wants_json):
            log, first = exchange.open_event_log(exchange.session)
            await exchange.response.begin_events(first)
            await exchange.response.events(log, outlives=0.0 if log is None else math.inf)
            return
        while not stream.ended and not (stream.disconnected and is_stateless):
            await stream.wait(QUIET_SECONDS)
        if stream.ended:
            _respond(exchange, stream.reply)
    finally:
        if is_stateless and not stream.ended and exchange.conversation is not None:
            exchange.conversation.cancel_all()  # a client that disconnects does not want the reply
        _release(exchange)


def _release(exchange: Exchange) -> None:
    exchange.release()
    calls, caller = exchange.endpoint.calls, exchange.principal.id
    calls[caller] -= 1
    if not calls[caller]:
        del calls[caller]


def _respond(exchange: Exchange, reply: Reply, fields: Fields | None = None) -> Continuation:
    """Respond with the reply as JSON, or with 202 where there is none: nothing is left to do."""
    if reply.status == 429:
        fields = [(b"retry-after", b"%d" % math.ceil(reply.retry_after))]
    elif reply.status == 403 and reply.needed_scopes:  # else more scopes would not help
        needed = {"error": "insufficient_scope", "scope": " ".join(sorted(reply.needed_scopes))}
        fields = [http.challenge({**exchange.endpoint.challenge(exchange), **needed})]
    if reply.body:
        exchange.response.respond(reply.status, JSON + fields if fields else JSON, reply.body)
    else:
        exchange.response.respond(202, fields or [], b"")
    return None


POLL_SECONDS = 0.25  # for further events of a stream that another process may be writing
MAX_STREAMS = 10_000


def _is_stateless(exchange: Exchange) -> bool:
    """Return whether the client names a revision without sessions and streams; it gets a 405 then."""
    version = exchange.header(PROTOCOL)
    if version not in exchange.endpoint.engine.offer.stateless:
        return False
    exchange.response.respond_text(
        405, f"{version} has no sessions and no streams to {exchange.scope['method']}", [(b"allow", b"POST")]
    )
    return True


async def _named_session(exchange: Exchange) -> HttpSession | None:
    """Return the session that the headers name; if there is none, the response says so."""
    session_id = exchange.headers.get(SESSION)
    if not session_id:
        exchange.response.respond_text(400, "Mcp-Session-Id is missing")
        return None
    try:
        return exchange.check_session(await exchange.endpoint.sessions.find(session_id, exchange.principal))
    except Refused as refused:
        exchange.response.respond_text(
            exchange.endpoint.engine.offer.newest.error_mappings[refused.kind].status, refused.text
        )
        return None


async def get(exchange: Exchange) -> None:
    """GET: an event stream of a session, of a call whose stream broke, or of a 2024 client."""
    say, session_id, path = exchange.response.respond_text, exchange.headers.get(SESSION), exchange.scope["path"]
    if _is_stateless(exchange):
        return
    if b"text/event-stream" not in exchange.headers.get(b"accept", b""):
        say(405, "Only event streams are here to GET", [(b"allow", b"POST")])
    elif len(exchange.endpoint.open) >= MAX_STREAMS:
        say(503, "Too many streams are open", [(b"retry-after", b"10")])
    elif not session_id and (path.endswith("/sse") or PROTOCOL not in exchange.headers):
        await _open_sse(exchange)
    elif session := await _named_session(exchange):
        last = exchange.header(b"last-event-id")
        await exchange.run_detached(_resume_stream(exchange, session, last) if last else _listen(exchange, session))


async def _listen(
    exchange: Exchange, session: HttpSession, log: EventLog | None = None, first_bytes: bytes = b""
) -> None:
    """Open a stream for notifications and requests of the server. One stream of a session gets them."""
    conversation, connection = exchange.start_conversation(session.connection), session.connection
    for other in list(connection.listeners):
        if other.stream.disconnected:  # it only kept messages for a client that reads here now
            other.stream.finish()
    conversation.find_subscription = partial(exchange.endpoint.sessions.find_subscription, session)
    connection.listeners.append(exchange)
    connection.listeners[0].conversation.watch()
    if log is None:
        log, first_bytes = exchange.open_event_log(session, EventLog.LISTENER)
    try:
        await exchange.response.begin_events(first_bytes or sse.KEEP_ALIVE)
        await _hold_open(exchange, exchange.response.events(log, outlives=EVENT_SECONDS))
    finally:
        connection.listeners.remove(exchange)
        conversation.unwatch()
        if connection.listeners:
            connection.listeners[0].conversation.watch()


def _end_if_replaced(exchange: Exchange) -> None:
    """End the stream of a client that has disconnected, if another stream of its session is read."""
    if exchange.connection is not None and any(not each.stream.disconnected for each in exchange.connection.listeners):
        exchange.stream.finish()


async def _hold_open(exchange: Exchange, writing: Coroutine[Any, Any, None]) -> None:
    """Hold a stream open while the client reads and the server runs."""
    if exchange.endpoint.stopping:
        exchange.stream.finish()
    exchange.task = exchange.task or asyncio.current_task()
    exchange.endpoint.open.add(exchange)
    exchange.watch_disconnect(partial(_end_if_replaced, exchange))
    try:
        await writing
    finally:
        exchange.release()


async def _open_sse(exchange: Exchange) -> None:
    """Open the one stream of the 2024 transport, and send the address for messages of the client."""
    conversation, stream_id = (
        exchange.start_conversation(),
        exchange.endpoint.sessions.issue_pipe_id(exchange.principal),
    )
    conversation.headers = conversation.trace_headers = {}  # not those of a message
    conversation.watch()
    exchange.endpoint.sse_streams[stream_id] = conversation
    address = f"{exchange.scope.get('root_path', '')}{exchange.endpoint.path}?sessionId={stream_id}"
    try:
        await exchange.response.begin_events(sse.encode_event(address.encode(), name="endpoint"))
        await _hold_open(exchange, exchange.response.events(None, name="message"))
    finally:
        del exchange.endpoint.sse_streams[stream_id]
        conversation.cancel_all()


async def _resume_stream(exchange: Exchange, session: HttpSession, last: str) -> None:
    """Send what a stream sent after an event, and what follows."""
    position = parse_event_id(last)
    if position is None:
        exchange.response.respond_text(400, "Last-Event-ID is not one of ours")
        return
    log, number = EventLog(exchange.endpoint.sessions.store, session, position[0]), position[1]
    if position[0].startswith(EventLog.LISTENER):
        missed_events = [
            sse.encode_event(message, event_id=log.event_id(at)) for at, message in await log.after(number)
        ]
        await _listen(exchange, session, log, b"".join(missed_events))
    else:
        exchange.start_conversation(session.connection)
        await _hold_open(exchange, _replay(exchange, log, number))


async def _replay(exchange: Exchange, log: EventLog, number: int) -> None:
    quiet = 0.0
    await exchange.response.begin_events(sse.KEEP_ALIVE)
    while not exchange.stream.disconnected and not exchange.stream.ended and quiet < EVENT_SECONDS:
        for at, message in await log.after(number):
            if message == END:
                await exchange.response.write(b"", more=False)
                return
            await exchange.response.write(sse.encode_event(message, event_id=log.event_id(at)))
            number, quiet = at, 0.0
        await exchange.stream.wait(POLL_SECONDS)
        quiet += POLL_SECONDS
        if quiet % KEEP_ALIVE_SECONDS == 0:
            await exchange.response.write(sse.KEEP_ALIVE)
    await exchange.response.write(b"", more=False)


async def delete(exchange: Exchange) -> None:
    """DELETE: end a session."""
    if not _is_stateless(exchange) and (session := await _named_session(exchange)):
        await exchange.endpoint.sessions.close(session, exchange.caller)
        exchange.endpoint.end_session(session.connection)
        exchange.response.respond(204, [], b"")
