"""Sessions of handshake revisions over HTTP.

A session id is sealed and holds the result of the handshake: any process with the key can serve any request of the
session. A process keeps only calls in flight and open questions. The store keeps sessions that were ended, log levels,
and the events of streams that a client may resume.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, islice
from typing import ClassVar, TypeVar
from weakref import WeakValueDictionary

from msgspec import UNSET, Struct
from msgspec.json import decode

from handrail.engine.core import Engine
from handrail.jsonrpc import encode
from handrail.model import ClientInfo, Json, Object, Principal
from handrail.protocol.connection import Connection
from handrail.revisions import REVISIONS
from handrail.revisions.base import LEVELS
from handrail.stores import Store, StoreError, supports

log = logging.getLogger("handrail")

R = TypeVar("R")

SESSION_SECONDS = 24 * 3600
EVENT_SECONDS = 300
MAX_EVENTS = 1_000
MAX_SUBSCRIPTIONS = 1_000  # to resources, of one peer
MAX_SUBSCRIBED_CHARS = 128 * 1024  # of the URIs of one peer, or in one subscriptions/listen
MAX_CALLER_CHARS = 8 * MAX_SUBSCRIBED_CHARS  # of the URIs of all sessions of a caller
TOPIC = "sessions"
MAX_RECENT = 1_000
END = b""  # the last record of a stream that is complete

_PURPOSE, _PIPE = "session", "pipe"
_ENDED = b"ended"
# The declared capabilities that a server reads; the rest would only make the id longer.
_CAPABILITIES = ("elicitation", "sampling", "roots")


class HttpSession(Struct, frozen=True):
    """One session while this process serves requests of it."""

    name: str  # random, and the same in every process
    connection: Connection
    expires: int = 0
    version: bytes = b""
    key: str = ""  # in the store


class HttpSessions:
    """The sessions of one server."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self.process_id = secrets.token_urlsafe(9)
        self.engine = engine
        self.store = store
        self.peek = store.peek if supports(store, "peek") else None
        # Reading an id again for every request would cost a third of a call.
        self._recent: dict[tuple[bytes, str], HttpSession] = {}
        self._live: WeakValueDictionary[str, Connection] = WeakValueDictionary()

    def issue_id(self, connection: Connection, principal: Principal) -> str:
        """Return the id of a new session."""
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
        """Return the session of an id; None if it is forged, of another caller, expired or ended."""
        session = self._recall(session_id, principal)
        if session is None:
            return None
        try:
            return self._unless_ended(session, await self.store.get(session.key))
        except StoreError as problem:  # the id says all that a call needs
            log.error("http: not known whether a session was ended, it goes on: %s", problem)
            return session

    def find_at_once(self, session_id: bytes, principal: Principal) -> HttpSession | None:
        """Do as `find`, with a store that needs no waiting."""
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
        """Return the session, unless it was ended."""
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
            # Another process may send requests in the same session: their ids must differ.
            connection.last_request_id = secrets.randbelow(2**32) << 16
            self._live[name] = connection
        return HttpSession(name, connection, expires, revision.encode(), f"session:{name}")

    def live(self, name: str) -> Connection | None:
        return self._live.get(name)

    async def publish(self, name: str, body: bytes | None, *, to: str = "") -> None:
        """Publish a message, or the end (None), to the process that serves a session, or to the one that is named."""
        await self.store.publish(topic_of(to), encode([name, body]))

    def issue_pipe_id(self, principal: Principal) -> str:
        """Return the id of a 2024 stream. The stream lives in this process; any process can read that from the id."""
        expires = int(self.engine.clock()) + SESSION_SECONDS
        return self.engine.seal.seal(_PIPE, principal.id, [self.process_id, secrets.token_urlsafe(12)], expires)

    def process_of_pipe(self, text: str, principal: Principal) -> str | None:
        """Return the process that has a 2024 stream; None if the id is not one of this caller's."""
        payload = self.engine.seal.open(_PIPE, principal.id, text, self.engine.clock())
        return None if payload is None else str(payload[0])

    async def close(self, session: HttpSession, caller: str) -> None:
        await self.store.put(session.key, _ENDED, ttl=SESSION_SECONDS)
        subscriptions = _subscriptions(await self.store.get(_subscriptions_key(session)))
        if await self.store.delete(_subscriptions_key(session)):
            await self._count_subscribed(caller, -count_chars(subscriptions))
        await self.publish(session.name, None)

    async def save_level(self, session: HttpSession) -> None:
        level: str = LEVELS[session.connection.level]
        await self.store.put(session.key, level.encode(), ttl=SESSION_SECONDS)

    async def change_subscriptions(self, session: HttpSession, caller: str, change: Callable[[int], R]) -> R:
        """Run what changes the subscriptions of a session, store them, and return the result.

        `change` gets the number of characters that the URIs of the session may have. A change that another request,
        perhaps in another process, has stored meanwhile is kept.
        """
        key, connection = _subscriptions_key(session), session.connection
        caller_chars, stored = await self._subscribed_chars(caller), await self.store.get(key)
        connection.subscriptions = before = _subscriptions(stored)
        connection.subscribed_chars = chars = count_chars(before)
        result = change(min(MAX_SUBSCRIBED_CHARS, MAX_CALLER_CHARS - caller_chars + chars))
        after = connection.subscriptions
        added, removed = {uri: after[uri] for uri in after if after[uri] != before.get(uri)}, before.keys() - after
        while added or removed:
            put = partial(self.store.put, key, encode(after), ttl=SESSION_SECONDS)
            if await (put(if_absent=True) if stored is None else put(if_equals=stored)):
                await self._count_subscribed(caller, count_chars(after) - count_chars(_subscriptions(stored)))
                break
            stored = await self.store.get(key)
            after = {uri: text for uri, text in _subscriptions(stored).items() if uri not in removed} | added
            after = _bounded(after)  # each request alone was within the bounds
        return result

    async def _subscribed_chars(self, caller: str) -> int:
        return int(await self.store.get(f"subscribed:{caller}") or 0)

    async def _count_subscribed(self, caller: str, chars: int) -> None:
        """Count characters of URIs for a caller. The count begins anew once a day: sessions that end leave no trace."""
        chars = max(chars, -await self._subscribed_chars(caller))  # those given up may be of the day before
        if chars:
            await self.store.add(f"subscribed:{caller}", chars, ttl=SESSION_SECONDS)

    async def find_subscription(self, session: HttpSession, uri: str) -> str:
        """Return a canonical URI as the session wrote it; empty if it has not subscribed to that."""
        return _subscriptions(await self.store.get(_subscriptions_key(session))).get(uri, "")


def topic_of(process_id: str) -> str:
    """Return the topic of the messages for one process, or for all. Every request of a 2024 stream is a message."""
    return f"{TOPIC}:{process_id}" if process_id else TOPIC


def _subscriptions_key(session: HttpSession) -> str:
    return f"subscriptions:{session.name}"


def _subscriptions(stored: bytes | None) -> dict[str, str]:
    """Return canonical URIs of resources, and how the client wrote them."""
    return {} if stored is None else decode(stored, type=dict[str, str])


def count_chars(subscriptions: Mapping[str, str]) -> int:
    return sum(map(len, subscriptions.values()))


def _bounded(subscriptions: Mapping[str, str]) -> dict[str, str]:
    """Return the first of the subscriptions, as many as a peer may have."""
    first = islice(subscriptions.items(), MAX_SUBSCRIPTIONS)
    sums = zip(first, accumulate(map(len, subscriptions.values())), strict=False)
    return {name: uri for (name, uri), chars in sums if chars <= MAX_SUBSCRIBED_CHARS}


class EventLog:
    """The events of one stream, for a client that lost its connection."""

    LISTENER: ClassVar = "l-"  # prefix of the name of a stream that no request opened

    def __init__(self, store: Store, session: HttpSession, stream: str) -> None:
        self.stream = stream
        self._store = store
        self._key = f"events:{session.name}:{self.stream}"

    async def add(self, message: bytes) -> str:
        """Store a message; return the id of its event. If the store is down, the client gets it without one."""
        try:
            number = await self._store.append(self._key, message, keep=MAX_EVENTS, ttl=EVENT_SECONDS)
        except StoreError as problem:
            log.warning("http: event not stored, it cannot be sent again: %s", problem)
            return ""
        return self.event_id(number)

    def event_id(self, number: int) -> str:
        return f"{self.stream}.{number}"

    async def after(self, number: int) -> list[tuple[int, bytes]]:
        return await self._store.read(self._key, after=number)


def parse_event_id(text: str) -> tuple[str, int] | None:
    """Return the stream and the number of an event id."""
    stream, _, number = text.rpartition(".")
    return (stream, int(number)) if stream and number.isascii() and number.isdigit() and len(number) < 10 else None


def _names(value: Json) -> Object:
    """Return the names of an object and, one level down, of its members, without other values."""
    return {str(name)[:40]: {} for name in list(value)[:10]} if type(value) is dict else {}
