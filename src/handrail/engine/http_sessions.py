"""Sessions of handshake revisions over HTTP, without memory of them.

A session id is sealed and holds what was agreed: any process that has the key can serve any request of the session.
Only what must live lives here: calls in flight, open questions, and in the store the sessions that were ended, log
levels, and the events of streams a client may come back for.
"""

from __future__ import annotations

import secrets
from typing import ClassVar
from weakref import WeakValueDictionary

from msgspec import UNSET, Struct

from handrail.engine.core import Engine
from handrail.jsonrpc import encode
from handrail.model import ClientInfo, Json, Object, Principal
from handrail.protocol.connection import Connection
from handrail.revisions import REVISIONS
from handrail.revisions.base import LEVELS
from handrail.stores import Store

SESSION_SECONDS = 24 * 3600
EVENT_SECONDS = 300
MAX_EVENTS = 1_000
TOPIC = "sessions"
MAX_RECENT = 1_000
END = b""  # the last record of a stream that is complete

_PURPOSE, _PIPE = "session", "pipe"
_ENDED = b"ended"
# Of what a client declares, what a server may ever look at; the rest would only make the id longer.
_CAPABILITIES = ("elicitation", "sampling", "roots")


class HttpSession(Struct, frozen=True):
    """One session for as long as something of it is going on here."""

    name: str  # random, and the same in every process
    connection: Connection
    expires: int = 0
    version: bytes = b""
    key: str = ""  # in the store


class HttpSessions:
    """The sessions of one server."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self.engine = engine
        self.store = store
        self.peek = store.peek if "peek" in store.supports else None
        # Reading an id again for every request would cost a third of a call.
        self._recent: dict[tuple[bytes, str], HttpSession] = {}
        self._live: WeakValueDictionary[str, Connection] = WeakValueDictionary()

    def issue_id(self, connection: Connection, principal: Principal) -> str:
        """The id of a session that has just shaken hands."""
        assert connection.revision is not None
        client = connection.client
        declared = {name: _names(client.capabilities[name]) for name in _CAPABILITIES if name in client.capabilities}
        payload = [
            secrets.token_urlsafe(12),
            connection.revision.name,
            client.name[:100],
            client.version[:100],
            declared,
        ]
        expires = int(self.engine.clock()) + SESSION_SECONDS
        return self.engine.seal.seal(_PURPOSE, principal.id, payload, expires)

    async def find(self, session_id: bytes, principal: Principal) -> HttpSession | None:
        """The session of an id; None if it is not ours, not this caller's, too old, or was ended."""
        session = self._recall(session_id, principal)
        return session and self._unless_ended(session, await self.store.get(session.key))

    def find_at_once(self, session_id: bytes, principal: Principal) -> HttpSession | None:
        """The same, with a store that needs no waiting."""
        session = self._recall(session_id, principal)
        if session is not None and self.peek is not None:
            stored = self.peek(session.key)
            return session if stored is None else self._unless_ended(session, stored)
        return None

    def _recall(self, session_id: bytes, principal: Principal) -> HttpSession | None:
        key = (session_id, principal.id)
        session = self._recent.get(key)
        if session is None:
            session = self._unseal(session_id.decode("latin-1"), principal)
            if session is None:
                return None
            self._recent[key] = session
            if len(self._recent) > MAX_RECENT:
                del self._recent[next(iter(self._recent))]
        return session if self.engine.clock() < session.expires else None

    def _unless_ended(self, session: HttpSession, stored: bytes | None) -> HttpSession | None:
        """A session, unless it was ended."""
        if stored == _ENDED:
            return None
        if stored is not None:
            session.connection.level = LEVELS.index(stored.decode())
        return session

    def _unseal(self, text: str, principal: Principal) -> HttpSession | None:
        unsealed = self.engine.seal.read(_PURPOSE, principal.id, text)
        if unsealed is None:
            return None
        expires, (name, revision, client, version, declared) = unsealed
        connection = self._live.get(name)
        if connection is None:
            if revision not in self.engine.offer.handshake:
                return None
            connection = Connection(self.engine.offer, self.engine.hidden)
            connection.revision = REVISIONS[revision]
            connection.client = ClientInfo(client, version, UNSET, declared)
            connection.ready = True
            # Another process may ask in the same session: its questions must not be taken for ours.
            connection.last_request_id = secrets.randbelow(2**32) << 16
            self._live[name] = connection
        return HttpSession(name, connection, expires, revision.encode(), f"session:{name}")

    def live(self, name: str) -> Connection | None:
        return self._live.get(name)

    async def publish(self, name: str, body: bytes | None) -> None:
        """Let the process in which a session or pipe has something going on hear a message, or (None) of its end."""
        await self.store.publish(TOPIC, encode([name, body]))

    def issue_pipe_id(self, principal: Principal) -> str:
        """The id of a pipe of the transport of 2024, which lives in one process and is known to all."""
        expires = int(self.engine.clock()) + SESSION_SECONDS
        return self.engine.seal.seal(_PIPE, principal.id, secrets.token_urlsafe(12), expires)

    def owns_pipe(self, text: str, principal: Principal) -> bool:
        return self.engine.seal.open(_PIPE, principal.id, text, self.engine.clock()) is not None

    async def close(self, session: HttpSession) -> None:
        await self.store.put(session.key, _ENDED, ttl=SESSION_SECONDS)
        await self.publish(session.name, None)

    async def save_level(self, session: HttpSession) -> None:
        level: str = LEVELS[session.connection.level]
        await self.store.put(session.key, level.encode(), ttl=SESSION_SECONDS)


class EventLog:
    """The events of one stream, kept for a client that lost its connection."""

    LISTENER: ClassVar = "l-"  # begins the name of a stream for what the server says unasked

    def __init__(self, store: Store, session: HttpSession, stream: str) -> None:
        self.stream = stream
        self._store = store
        self._key = f"events:{session.name}:{self.stream}"

    async def add(self, message: bytes) -> str:
        """Keep a message; the id of its event."""
        number = await self._store.append(self._key, message, keep=MAX_EVENTS, ttl=EVENT_SECONDS)
        return self.event_id(number)

    def event_id(self, number: int) -> str:
        return f"{self.stream}.{number}"

    async def after(self, number: int) -> list[tuple[int, bytes]]:
        return await self._store.read(self._key, after=number)


def parse_event_id(text: str) -> tuple[str, int] | None:
    """The stream and the number an event id stands for."""
    stream, _, number = text.rpartition(".")
    return (stream, int(number)) if stream and number.isascii() and number.isdigit() and len(number) < 10 else None


def _names(value: Json) -> Object:
    """The names an object has, two levels deep, without what they hold."""
    return {str(name)[:40]: {} for name in list(value)[:10]} if type(value) is dict else {}
