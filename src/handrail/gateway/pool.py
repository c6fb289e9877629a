"""The connections to one upstream server, and whose they are."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from typing import Any, Protocol

from handrail.engine.call_state import CallPeer
from handrail.engine.completion import RequestPeer
from handrail.engine.guard_set import owner_of
from handrail.errors import HttpRefused, Kind, PeerError, Refused, RemoteProtocolError, Sent, TransportError
from handrail.gateway.health import CircuitBreaker
from handrail.gateway.questions import CapabilityKey
from handrail.gateway.session import BridgedCall, SessionUpstream, UpstreamSession, principal_of
from handrail.model import Object
from handrail.revisions import Revision

__all__ = ["SessionPool"]

log = logging.getLogger("handrail")

MAX_ENDED = 10_000  # owners
MAX_BREAKERS = 1_000  # of one upstream; the oldest one gives way
_NO_SESSION_CODES = (-32600, -32000)  # what handshake servers answer to a request without a session
_NO_SESSION_STATUSES = (400, 404, 405, 406)
LEAST_SHARE = 4  # connections that one principal may always have, whatever its share of all


class PoolUpstream(SessionUpstream, Protocol):
    """What the pool tells its upstream."""

    era: Any
    is_shared: bool
    is_stopped: bool

    def on_opening(self) -> None: ...
    def on_open(self, revision: Revision, handshake_result: Object) -> None: ...
    def on_open_failed(self, problem: PeerError, owner: str) -> None: ...


class SessionPool:
    """The connections of one upstream. Calls of one owner with the same capabilities share one; stateless ones all."""

    def __init__(self, upstream: PoolUpstream) -> None:
        self.sessions: dict[tuple[str, CapabilityKey], UpstreamSession] = {}
        self.stateless: UpstreamSession | None = None
        self.breakers: dict[str, CircuitBreaker] = {}  # by owner, also where all share one connection
        self._ended: dict[str, None] = {}  # owners whose command has ended by itself, if it starts only once
        self._upstream = upstream
        self._opening = asyncio.Lock()
        self._leaving: list[UpstreamSession] = []  # that get no new calls, and close when theirs have ended
        self._closing: set[asyncio.Task[None]] = set()

    @staticmethod
    def owner(peer: CallPeer, key: CapabilityKey, revision: Revision) -> str:
        """Return whose connection a call uses. Upstreams keep the roots of a session, so clients with roots differ."""
        owner = owner_of(peer.principal, peer.address)
        if " #" in owner:  # a subject of a token may have anything in it
            owner = owner.replace(" #", " ##")
        return f"{owner} #{peer.connection.number}" if key[-1] and not revision.stateless else owner

    @staticmethod
    def owner_without_roots(peer: RequestPeer) -> str:
        """Return whose connection a request uses that is no call."""
        return owner_of(peer.principal, peer.address).replace(" #", " ##")

    async def session(self, owner: str, key: CapabilityKey, peer: CallPeer | None = None) -> UpstreamSession:
        """Return the open connection for an owner and its capabilities; open one if there is none."""
        if (shared := self.stateless) is not None:
            await self._open(shared)  # it may speak a handshake revision now, and belong to one owner
            if shared is self.stateless:
                return shared
        session = self.sessions.get((owner, key))
        if session is not None and session.connection.is_open:
            return session
        lock = self._opening
        async with lock if self._upstream.era == "" else _nothing():
            if lock is not self._opening or self._upstream.is_stopped:
                raise TransportError("it was closed meanwhile", sent=Sent.NO, server=self._upstream.name)
            session = self.stateless or self.sessions.get((owner, key))
            if session is None:
                self._make_room(owner)
                session = self.sessions[owner, key] = UpstreamSession(self._upstream, owner, key)
            session.peer = peer or session.peer
            await self._open(session)
        if not self.is_watched(owner, key):
            self._upstream.on_list_changed(session)  # a new connection hears of changes only after it has listed
        return self.stateless or session

    async def _open(self, session: UpstreamSession) -> None:
        if session.connection.is_open:
            return
        if self._upstream.is_stopped:
            raise TransportError("it was stopped by an operator", sent=Sent.NO, server=self._upstream.name)
        self._note_end(session)
        if self.has_ended(session.owner):
            text = "its command has ended, and is not started again; an operator has to start it"
            raise TransportError(text, sent=Sent.NO, server=self._upstream.name)
        self._upstream.on_opening()
        try:
            await session.open()
        except PeerError as problem:
            session.is_started = True
            self._note_end(session)
            self._upstream.on_open_failed(problem, session.owner)
            raise
        session.is_started = True
        revision = session.connection.revision
        assert revision is not None
        self._upstream.on_open(revision, session.connection.handshake_result)
        if revision.stateless and not self._upstream.terms.is_of_users:
            self.stateless = self.stateless or session
        elif self.stateless is session:
            self.stateless = None

    def _note_end(self, session: UpstreamSession) -> None:
        """Note that a command has ended by itself: where `restart` is "never", its owner gets no other."""
        if session.is_started and not session.connection.is_open and not self._upstream.terms.restarts:
            self._ended[session.owner] = None
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]

    def restart(self) -> None:
        """Let each connection be tried anew, at once."""
        self.breakers.clear()
        self._ended.clear()
        for session in self.sessions.values():
            session.is_started = session.connection.is_open

    def has_ended(self, owner: str) -> bool:
        """Return whether the command of an owner has ended by itself, and is not started again."""
        return owner in self._ended

    def _make_room(self, owner: str) -> None:
        """Close the connection that was not used for the longest time, if there are too many, or of one principal."""
        most = self._upstream.terms.max_sessions
        share = min(most, max(LEAST_SHARE, most // 4))
        principal = principal_of(owner)
        own = [each for (other, _), each in self.sessions.items() if principal_of(other) == principal]
        crowded = own if len(own) >= share else [*self.sessions.values()] if len(self.sessions) >= most else []
        if not crowded:
            return
        idle = [each for each in crowded if not each.is_busy]
        if not idle:
            text = f"{self._upstream.name}: {len(crowded)} connections are in use; wait for a call to end"
            raise Refused(Kind.OVERLOADED, text)
        self.end(min(idle, key=lambda each: each.last_used))

    async def is_put_back(self, session: UpstreamSession, problem: PeerError) -> bool:
        """Return whether a stateless upstream that refuses a request is a handshake server now; its connection ends.

        Such a server refuses whatever has no session, so nothing was done. It does not answer `server/discover` either.
        """
        connection = session.connection
        if isinstance(problem, HttpRefused):
            is_sign = problem.status in _NO_SESSION_STATUSES
        else:
            is_sign = isinstance(problem, RemoteProtocolError) and problem.code in _NO_SESSION_CODES
        if not is_sign or connection.revision is None or not connection.revision.stateless:
            return False
        try:
            deadline = connection.now() + connection.clocks.connect
            await connection.request("server/discover", {}, connection.clocks, deadline)
        except (RemoteProtocolError, HttpRefused) as refused:
            if isinstance(refused, HttpRefused) and refused.status not in _NO_SESSION_STATUSES:
                return False
        except PeerError:
            return False
        else:
            return False
        self.end(session)
        return True

    def end(self, session: UpstreamSession) -> None:
        """Close a connection; the next call of its owner opens another."""
        self._note_end(session)
        if self.sessions.get((session.owner, session.key)) is session:
            del self.sessions[session.owner, session.key]
        if self.stateless is session:
            self.stateless = None
        task = asyncio.get_running_loop().create_task(session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def end_of(self, principal: str) -> None:
        """Close the connections of a principal, whose grant is another now, each when its calls have ended."""
        for place, session in list(self.sessions.items()):
            if principal_of(session.owner) == principal:
                del self.sessions[place]
                self._leaving.append(session)
        self._end_leaving()

    def _end_leaving(self) -> None:
        for session in [each for each in self._leaving if not each.calls]:
            self._leaving.remove(session)
            self.end(session)

    @property
    def calls(self) -> list[BridgedCall]:
        """All calls on their way over any connection."""
        return [call for session in (*self.sessions.values(), *self._leaving) for call in session.calls]

    def end_idle(self, now: float, listening: Set[str]) -> None:
        """End the connections that were not used for long; `now` is a time of the event loop.

        A connection that brings change notices stays while a client of its owner listens; `listening` has such owners.
        """
        self._end_leaving()
        for session in list(self.sessions.values()):
            is_idle = not session.is_busy and session is not self.stateless
            is_old = now - session.last_used > self._upstream.terms.idle_seconds
            if is_idle and is_old and not (session.owner in listening and self.is_watched(session.owner, session.key)):
                self.end(session)

    def is_watched(self, owner: str, key: CapabilityKey) -> bool:
        """Return whether the upstream announces changes of its lists on an open stream."""
        for session in (self.stateless, self.sessions.get((owner, key))):
            if session is not None and session.connection.is_open:
                connection = session.connection
                if connection.revision is not None and connection.revision.stateless:
                    return connection.subscription.is_running
                offers, transport = connection.subscription.is_offered("tools"), connection.transport
                return offers and transport is not None and transport.notification_stream != 0
        return False

    def breaker(self, owner: str) -> CircuitBreaker:
        """Return the breaker of an owner: one caller's timeouts and crashes do not shut an upstream for another."""
        if owner not in self.breakers:
            if len(self.breakers) >= MAX_BREAKERS:
                del self.breakers[next(iter(self.breakers))]
            self.breakers[owner] = CircuitBreaker(time.monotonic, self._upstream.terms.pauses)
        return self.breakers[owner]

    async def close(self) -> None:
        """Close all connections. The next call opens new ones."""
        self._ended.clear()
        sessions = [*self.sessions.values(), *self._leaving]
        self.sessions, self._leaving, self.stateless = {}, [], None
        await asyncio.gather(*(each.close() for each in sessions), return_exceptions=True)
        if self._closing:
            await asyncio.wait(self._closing, timeout=1.0)
        self._opening = asyncio.Lock()


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield
