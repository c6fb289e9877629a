"""Streams a client opens by itself, and the end of a session: GET and DELETE."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from handrail.engine.http_sessions import END, EVENT_SECONDS, EventLog, HttpSession, parse_event_id
from handrail.errors import Refused
from handrail.protocol import sse
from handrail.protocol.http_rules import PROTOCOL, SESSION
from handrail.transports.http.post import Exchange
from handrail.transports.http.response import KEEP_ALIVE_SECONDS

POLL_SECONDS = 0.25  # for further events of a stream that another process may be writing
MAX_STREAMS = 10_000


class SessionHandler(Exchange):
    """A request that is no message, about a session."""

    def _is_stateless(self) -> bool:
        """Whether the caller speaks a revision without sessions, in which everything is a POST; if so, that is said."""
        version = self.header(PROTOCOL)
        if version not in self.engine.offer.stateless:
            return False
        self.respond_text(
            405, f"{version} has no sessions and no streams to {self.scope['method']}", [(b"allow", b"POST")]
        )
        return True

    async def _named_session(self) -> HttpSession | None:
        """The session that the headers name; if there is none, that is said."""
        session_id = self.headers.get(SESSION)
        if not session_id:
            self.respond_text(400, "Mcp-Session-Id is missing")
            return None
        try:
            return self._check_session(await self.endpoint.sessions.find(session_id, self.principal))
        except Refused as refused:
            self.respond_text(self.engine.offer.newest.error_mappings[refused.kind].status, refused.text)
            return None


class GetHandler(SessionHandler):
    """An event stream: of a session, of a call whose stream broke, or all there is of a client of 2024."""

    async def run(self) -> None:
        say, session_id, path = self.respond_text, self.headers.get(SESSION), self.scope["path"]
        if self._is_stateless():
            return
        if b"text/event-stream" not in self.headers.get(b"accept", b""):
            say(405, "Only event streams are here to GET", [(b"allow", b"POST")])
        elif len(self.endpoint.open) >= MAX_STREAMS:
            say(503, "Too many streams are open", [(b"retry-after", b"10")])
        elif not session_id and (path.endswith("/sse") or PROTOCOL not in self.headers):
            await self._open_sse()
        elif session := await self._named_session():
            last = self.header(b"last-event-id")
            await self._run_detached(self._resume(session, last) if last else self._listen(session))

    async def _listen(self, session: HttpSession, log: EventLog | None = None, first_bytes: bytes = b"") -> None:
        """A stream for what the server says unasked. Of several that a session has open, one hears it."""
        conversation, connection = self._start_conversation(session.connection), session.connection
        for other in list(connection.listeners):
            if other.disconnected:  # it only keeps what comes for a reader that is here now
                other.finish()
        connection.listeners.append(self)
        connection.listeners[0].conversation.watch_tools()
        if log is None:
            log, first_bytes = self._open_event_log(session, EventLog.LISTENER)
        try:
            await self.begin_events(first_bytes or sse.KEEP_ALIVE)
            await self._hold_open(self.events(log, outlives=EVENT_SECONDS))
        finally:
            connection.listeners.remove(self)
            conversation.unwatch_tools()
            if connection.listeners:
                connection.listeners[0].conversation.watch_tools()

    async def wait_disconnected(self) -> None:
        await super().wait_disconnected()
        if self.connection is not None and any(not each.disconnected for each in self.connection.listeners):
            self.finish()  # another one reads what comes from now on

    async def _hold_open(self, writing: Coroutine[Any, Any, None]) -> None:
        """Hold a stream open for as long as the peer reads and the server runs."""
        if self.endpoint.stopping:
            self.finish()
        self.task = self.task or asyncio.current_task()
        self.endpoint.open.add(self)
        self._disconnect_task = asyncio.create_task(self.wait_disconnected())
        try:
            await writing
        finally:
            self._release()

    async def _open_sse(self) -> None:
        """The transport of 2024: one stream for all the server says, and an address for what the client says."""
        conversation, stream_id = self._start_conversation(), self.endpoint.sessions.issue_pipe_id(self.principal)
        conversation.headers = conversation.trace_headers = {}  # not those of a message
        conversation.watch_tools()
        self.endpoint.sse_streams[stream_id] = conversation
        address = f"{self.scope.get('root_path', '')}{self.endpoint.path}?sessionId={stream_id}"
        try:
            await self.begin_events(sse.encode_event(address.encode(), name="endpoint"))
            await self._hold_open(self.events(None, name="message"))
        finally:
            del self.endpoint.sse_streams[stream_id]
            conversation.cancel_all()

    async def _resume(self, session: HttpSession, last: str) -> None:
        """What a stream said after an event, and what it goes on to say."""
        position = parse_event_id(last)
        if position is None:
            self.respond_text(400, "Last-Event-ID is not one of ours")
            return
        log, number = EventLog(self.endpoint.sessions.store, session, position[0]), position[1]
        if position[0].startswith(EventLog.LISTENER):
            missed_events = [
                sse.encode_event(message, event_id=log.event_id(at)) for at, message in await log.after(number)
            ]
            await self._listen(session, log, b"".join(missed_events))
        else:
            self._start_conversation(session.connection)
            await self._hold_open(self._replay(log, number))

    async def _replay(self, log: EventLog, number: int) -> None:
        quiet = 0.0
        await self.begin_events(sse.KEEP_ALIVE)
        while not self.disconnected and not self.ended and quiet < EVENT_SECONDS:
            for at, message in await log.after(number):
                if message == END:
                    await self.write(b"", more=False)
                    return
                await self.write(sse.encode_event(message, event_id=log.event_id(at)))
                number, quiet = at, 0.0
            await self.wait(POLL_SECONDS)
            quiet += POLL_SECONDS
            if quiet % KEEP_ALIVE_SECONDS == 0:
                await self.write(sse.KEEP_ALIVE)
        await self.write(b"", more=False)


class DeleteHandler(SessionHandler):
    """The end of a session."""

    async def run(self) -> None:
        if not self._is_stateless() and (session := await self._named_session()):
            await self.endpoint.sessions.close(session)
            self.endpoint.end_session(session.connection)
            self.respond(204, [], b"")
