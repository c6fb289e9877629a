"""Who is connected: clients with a stream or a request open, and those that were heard of within the last minute.

A client that shook hands is its connection; one of a stateless revision is what it says of itself, and where it is.
"""

from __future__ import annotations

import secrets
from collections import Counter
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from msgspec import Struct, field

from handrail.jsonrpc import Request
from handrail.model import Json, Principal
from handrail.protocol.connection import Connection
from handrail.revisions.base import CLIENT_INFO, VERSION

if TYPE_CHECKING:
    from handrail.engine.call import Call
    from handrail.engine.dispatcher import Conversation
    from handrail.engine.inflight import Flight

MAX_PEERS = MAX_PRINCIPALS = 1_000
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
        self.principals: dict[str, Principal] = {}  # that were heard of
        self._named: dict[tuple[str, ...], Peer] = {}
        self.last: Connection | None = None  # that a call came from, and whose it is: most come from the same again
        self.caller: Peer

    def meet(self, conversation: Conversation, request: Request, now: float) -> Peer | None:
        """Whose request it is, that came at this time; None while that is not known."""
        self._know(conversation.principal)
        connection = conversation.connection
        meta: Json = request.params.get("_meta")
        named = meta.get(VERSION) if type(meta) is dict else None
        if type(named) is str and named in conversation.engine.offer.stateless:
            said = meta.get(CLIENT_INFO)
            said = said if type(said) is dict else {}
            found = self._stateless(conversation, str(said.get("name", "")), str(said.get("version", "")), named, now)
            if request.method == "subscriptions/listen":
                found.connections.add(connection)
        else:
            is_opening = conversation.traced is not None and request.method == "initialize"
            if connection.revision is None or is_opening:  # over HTTP the session will have another connection
                return None
            client, revision = connection.client, connection.revision.name
            found = self._connected(conversation, client.name, client.version, revision, now)
            if request.method == "initialize":  # once more, perhaps
                found.client, found.version, found.revision = client.name[:100], client.version[:100], revision
        found.seen = max(found.seen, now)
        return found

    def turned_away(self, conversation: Conversation, request: Request, revision: str, now: float) -> Peer:
        """Whose call it would have been; if that is not known, somebody who is not listed."""
        return self.meet(conversation, request, now) or _peer(conversation, "", "", revision, now)

    def find(self, call: Call, now: float) -> Peer:
        """Whose call it is, that came at this time, if it is not `caller`'s."""
        flight, client, revision = call._flight, call.client, call.revision
        self._know(call.principal)
        if revision.stateless:
            return self._stateless(flight, client.name, client.version, revision.name, now)
        self.last = flight.connection
        self.caller = self._connected(flight, client.name, client.version, revision.name, now)
        return self.caller

    def _know(self, who: Principal) -> None:
        if who.id in self.principals or len(self.principals) < MAX_PRINCIPALS:
            self.principals[who.id] = who  # with the scopes it has by now

    def connected(self, streams: set[Connection], busy: Counter[Peer], now: float) -> list[tuple[Peer, int, bool]]:
        """Who is there now, how many calls they made, and whether a stream is open, or one of those calls: `busy`."""
        found = [
            (peer, peer.calls + busy[peer], peer in busy or not streams.isdisjoint(peer.connections))
            for peer in self._peers.values()
        ]
        for peer, _, is_open in found:
            if not is_open and peer.seen < now - SEEN_SECONDS:
                del self._peers[peer.id]
                self.last = None
        return [each for each in found if each[0].id in self._peers]

    def _connected(self, conversation: Flight, name: str, version: str, revision: str, now: float) -> Peer:
        connection = conversation.connection
        found = self._met.get(connection)
        if found is None or found.id not in self._peers:
            found = self._met[connection] = self._add(conversation, name, version, revision, now)
            found.connections.add(connection)
        return found

    def _stateless(self, conversation: Flight, name: str, version: str, revision: str, now: float) -> Peer:
        key = (revision, name[:100], version[:100], conversation.principal.id, conversation.address)
        found = self._named.get(key)
        if found is None or found.id not in self._peers:
            if len(self._named) >= MAX_PEERS:
                self._named = {}
            found = self._named[key] = self._add(conversation, name, version, revision, now)
            if conversation.traced is None:
                found.connections.add(conversation.connection)
        return found

    def _add(self, conversation: Flight, name: str, version: str, revision: str, now: float) -> Peer:
        if len(self._peers) >= MAX_PEERS:
            self.last = None
            del self._peers[min(self._peers.values(), key=lambda each: each.seen).id]
        made = _peer(conversation, name, version, revision, now)
        self._peers[made.id] = made
        return made


def _peer(conversation: Flight, name: str, version: str, revision: str, now: float) -> Peer:
    place = conversation.address
    return Peer(
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
