"""Who is connected: clients with a stream or a request open, and those that were heard of within the last minute.

A client that shook hands is its connection; one of a stateless revision is what it says of itself, and where it is.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from msgspec import Struct, field

from handrail.jsonrpc import Request
from handrail.model import Json, Object
from handrail.protocol.connection import Connection
from handrail.revisions.base import CLIENT_INFO, VERSION

if TYPE_CHECKING:
    from handrail.engine.dispatch import Conversation

MAX_PEERS = 1_000
SEEN_SECONDS = 60.0


class Peer(Struct, eq=False, kw_only=True):
    """One client."""

    id: str
    client: str
    version: str
    revision: str
    transport: str
    who: str
    address: str
    since: float
    seen: float
    calls: int = 0
    connections: WeakSet[Connection] = field(default_factory=WeakSet)  # that may have a stream open


class Peers:
    """The clients of one process."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}
        self._met: WeakKeyDictionary[Connection, Peer] = WeakKeyDictionary()
        self._named: dict[tuple[str, ...], Peer] = {}

    def meet(self, conversation: Conversation, request: Request, now: float) -> Peer | None:
        """Whose request it is, that came at this time; None while that is not known."""
        connection, is_call = conversation.connection, request.method == "tools/call"
        meta: Json = request.params.get("_meta")
        named = meta.get(VERSION) if type(meta) is dict else None
        if type(named) is str and named in conversation.engine.offer.stateless:
            peer = self._stateless(conversation, named, meta, now)
            if request.method == "subscriptions/listen":
                peer.connections.add(connection)
            peer.seen = max(peer.seen, now)
            peer.calls += is_call
            return peer
        revision, found = connection.revision, self._met.get(connection)
        is_opening = conversation.traced is not None and request.method == "initialize"
        if revision is None or is_opening:  # over HTTP the session will have another connection
            return None
        client = connection.client
        if found is None or found.id not in self._peers:
            found = self._met[connection] = self._add(conversation, client.name, client.version, revision.name, now)
            found.connections.add(connection)
        elif request.method == "initialize":  # once more
            found.client, found.version, found.revision = client.name[:100], client.version[:100], revision.name
        found.seen = max(found.seen, now)
        found.calls += is_call
        return found

    def connected(self, streams: set[Connection], busy: set[int], now: float) -> list[tuple[Peer, bool]]:
        """Who is there now, and whether a stream is open, or a request: `busy` has the `id()` of those with one."""
        found = [(peer, id(peer) in busy or not streams.isdisjoint(peer.connections)) for peer in self._peers.values()]
        for peer, is_open in found:
            if not is_open and peer.seen < now - SEEN_SECONDS:
                del self._peers[peer.id]
        return [(peer, is_open) for peer, is_open in found if peer.id in self._peers]

    def _stateless(self, conversation: Conversation, revision: str, meta: Object, now: float) -> Peer:
        said = meta.get(CLIENT_INFO)
        said = said if type(said) is dict else {}
        name, version = str(said.get("name", ""))[:100], str(said.get("version", ""))[:100]
        key = (revision, name, version, conversation.principal.id, conversation.address)
        found = self._named.get(key)
        if found is None or found.id not in self._peers:
            if len(self._named) >= MAX_PEERS:
                self._named = {}
            found = self._named[key] = self._add(conversation, name, version, revision, now)
            if conversation.traced is None:
                found.connections.add(conversation.connection)
        return found

    def _add(self, conversation: Conversation, name: str, version: str, revision: str, now: float) -> Peer:
        if len(self._peers) >= MAX_PEERS:
            del self._peers[min(self._peers.values(), key=lambda each: each.seen).id]
        place = conversation.address
        made = Peer(
            id=secrets.token_hex(8),
            client=name[:100],
            version=version[:100],
            revision=revision,
            transport="http" if conversation.traced is not None else "stdio" if place == "stdio" else "memory",
            who=conversation.principal.id,
            address=place,
            since=now,
            seen=now,
        )
        self._peers[made.id] = made
        return made
