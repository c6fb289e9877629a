"""Streams a client opens by itself, and the end of a session: GET and DELETE."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from handrail.engine.http_sessions import END, EVENT_SECONDS, EventLog, Session, read_ident
from handrail.errors import Refused
from handrail.protocol import sse
from handrail.protocol.http_rules import PROTOCOL, SESSION
from handrail.transports.http.post import Exchange
from handrail.transports.http.response import KEEP_ALIVE_SECONDS

LOOK_SECONDS = 0.25  # for further events of a stream that another process may be writing
MAX_STREAMS = 10_000


class OfSession(Exchange):
    """A request that is no message, about a session."""

    def _is_stateless(self) -> bool:
        """Whether the caller speaks a revision without sessions, in which everything is a POST; if so, that is said."""
        said = self.header(PROTOCOL)
        if said not in self.engine.offer.stateless:
            return False
        self.text(405, f"{said} has no sessions and no streams to {self.scope['method']}", [(b"allow", b"POST")])
        return True

    async def _named_session(self) -> Session | None:
        """The session that the headers name; if there is none, that is said."""
        ident = self.headers.get(SESSION)
        if not ident:
            self.text(400, "Mcp-Session-Id is missing")
            return None
        try:
            return self._fitting(await self.endpoint.sessions.find(ident, self.principal))
        except Refused as refused:
            self.text(self.engine.offer.newest.faults[refused.kind].status, refused.text)
            return None


class Get(OfSession):
    """An event stream: of a session, of a call whose stream broke, or all there is of a client of 2024."""

    async def run(self) -> None:
        say, ident, path = self.text, self.headers.get(SESSION), self.scope["path"]
        if self._is_stateless():
            return
        if b"text/event-stream" not in self.headers.get(b"accept", b""):
            say(405, "Only event streams are here to GET", [(b"allow", b"POST")])
        elif len(self.endpoint.open) >= MAX_STREAMS:
            say(503, "Too many streams are open", [(b"retry-after", b"10")])
        elif not ident and (path.endswith("/sse") or PROTOCOL not in self.headers):
            await self._pipe()
        elif session := await self._named_session():
            last = self.header(b"last-event-id")
            await self._outlive(self._resume(session, last) if last else self._listen(session))

    async def _listen(self, session: Session, log: EventLog | None = None, first: bytes = b"") -> None:
        """A stream for what the server says unasked. Of several that a session has open, one hears it."""
        conversation, connection = self._converse(session.connection), session.connection
        for other in list(connection.listeners):
            if other.gone:  # it only keeps what comes for a reader that is here now
                other.finish(None)
        connection.listeners.append(self)
        connection.listeners[0].conversation.watch()
        if log is None:
            log, first = self._log(session, EventLog.LISTENER)
        try:
            await self.begin_events(first or sse.KEEP_ALIVE)
            await self._stay(self.events(log, outlives=EVENT_SECONDS))
        finally:
            connection.listeners.remove(self)
            conversation.unwatch()
            if connection.listeners:
                connection.listeners[0].conversation.watch()

    async def watch(self) -> None:
        await super().watch()
        if self.connection is not None and any(not each.gone for each in self.connection.listeners):
            self.finish(None)  # another one reads what comes from now on

    async def _stay(self, saying: Coroutine[Any, Any, None]) -> None:
        """Hold a stream open for as long as the peer reads and the server runs."""
        if self.endpoint.stopping:
            self.finish(None)
        self.task = self.task or asyncio.current_task()
        self.endpoint.open.add(self)
        self._watcher = asyncio.create_task(self.watch())
        try:
            await saying
        finally:
            self._leave()

    async def _pipe(self) -> None:
        """The transport of 2024: one stream for all the server says, and an address for what the client says."""
        conversation, ident = self._converse(), self.endpoint.sessions.begin_pipe(self.principal)
        conversation.headers = conversation.traced = {}  # not those of a message
        conversation.watch()
        self.endpoint.pipes[ident] = conversation
        address = f"{self.scope.get('root_path', '')}{self.endpoint.path}?sessionId={ident}"
        try:
            await self.begin_events(sse.event(address.encode(), name="endpoint"))
            await self._stay(self.events(None, name="message"))
        finally:
            del self.endpoint.pipes[ident]
            conversation.drop()

    async def _resume(self, session: Session, last: str) -> None:
        """What a stream said after an event, and what it goes on to say."""
        found = read_ident(last)
        if found is None:
            self.text(400, "Last-Event-ID is not one of ours")
            return
        log, number = EventLog(self.endpoint.sessions.store, session, found[0]), found[1]
        if found[0].startswith(EventLog.LISTENER):
            kept = [sse.event(message, ident=log.ident(at)) for at, message in await log.after(number)]
            await self._listen(session, log, b"".join(kept))
        else:
            self._converse(session.connection)
            await self._stay(self._replay(log, number))

    async def _replay(self, log: EventLog, number: int) -> None:
        quiet = 0.0
        await self.begin_events(sse.KEEP_ALIVE)
        while not self.gone and not self.ended and quiet < EVENT_SECONDS:
            for at, message in await log.after(number):
                if message == END:
                    await self.write(b"", more=False)
                    return
                await self.write(sse.event(message, ident=log.ident(at)))
                number, quiet = at, 0.0
            await self.wait(LOOK_SECONDS)
            quiet += LOOK_SECONDS
            if quiet % KEEP_ALIVE_SECONDS == 0:
                await self.write(sse.KEEP_ALIVE)
        await self.write(b"", more=False)


class Delete(OfSession):
    """The end of a session."""

    async def run(self) -> None:
        if not self._is_stateless() and (session := await self._named_session()):
            await self.endpoint.sessions.end(session)
            self.endpoint.end_session(session.connection)
            self.whole(204, [], b"")
