"""GET and DELETE: streams that a client opens by itself, and the end of a session."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from handrail.engine.http_sessions import END, EVENT_SECONDS, EventLog, HttpSession, parse_event_id
from handrail.errors import Refused
from handrail.protocol import sse
from handrail.protocol.http_rules import PROTOCOL, SESSION
from handrail.transports.http.exchange import KEEP_ALIVE_SECONDS, Exchange

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
        await exchange.run_detached(_resume(exchange, session, last) if last else _listen(exchange, session))


async def _listen(
    exchange: Exchange, session: HttpSession, log: EventLog | None = None, first_bytes: bytes = b""
) -> None:
    """Open a stream for notifications and requests of the server. One stream of a session gets them."""
    conversation, connection = exchange.start_conversation(session.connection), session.connection
    for other in list(connection.listeners):
        if other.stream.disconnected:  # it only kept messages for a client that reads here now
            other.stream.finish()
    connection.listeners.append(exchange)
    connection.listeners[0].conversation.watch_tools()
    if log is None:
        log, first_bytes = exchange.open_event_log(session, EventLog.LISTENER)
    try:
        await exchange.response.begin_events(first_bytes or sse.KEEP_ALIVE)
        await _hold_open(exchange, exchange.response.events(log, outlives=EVENT_SECONDS))
    finally:
        connection.listeners.remove(exchange)
        conversation.unwatch_tools()
        if connection.listeners:
            connection.listeners[0].conversation.watch_tools()


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
    conversation.watch_tools()
    exchange.endpoint.sse_streams[stream_id] = conversation
    address = f"{exchange.scope.get('root_path', '')}{exchange.endpoint.path}?sessionId={stream_id}"
    try:
        await exchange.response.begin_events(sse.encode_event(address.encode(), name="endpoint"))
        await _hold_open(exchange, exchange.response.events(None, name="message"))
    finally:
        del exchange.endpoint.sse_streams[stream_id]
        conversation.cancel_all()


async def _resume(exchange: Exchange, session: HttpSession, last: str) -> None:
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
        await exchange.endpoint.sessions.close(session)
        exchange.endpoint.end_session(session.connection)
        exchange.response.respond(204, [], b"")
