"""The connected clients: those with a stream or a request open, and those that sent a request in the last minute.

A client that initialized is its connection. A client of a stateless revision is its name, version, principal and
address.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Container
from weakref import WeakKeyDictionary, WeakSet

from msgspec import Struct, field

from handrail.engine.call_state import CallState
from handrail.engine.outcome import RequestOrigin
from handrail.jsonrpc import Request
from handrail.model import Json, Principal
from handrail.protocol.connection import Connection
from handrail.revisions.base import CLIENT_INFO, VERSION

MAX_CLIENTS = MAX_PRINCIPALS = 1_000
ACTIVE_SECONDS = 60.0


class ConnectedClient(Struct, eq=False, kw_only=True):
    """One connected client."""

    id: str
    client: str
    version: str
    revision: str
    transport: str
    who: str
    address: str
    since: float
    last_active: float
    calls: int = 0
    connections: WeakSet[Connection] = field(default_factory=WeakSet)  # each may have a stream open


class ClientRegistry:
    """The clients of one process."""

    def __init__(self, stateless: Container[str]) -> None:
        self._stateless_revisions = stateless
        self._clients: dict[str, ConnectedClient] = {}
        self._by_connection: WeakKeyDictionary[Connection, ConnectedClient] = WeakKeyDictionary()
        self.principals: dict[str, Principal] = {}  # of the last requests
        self._by_name: dict[tuple[str, ...], ConnectedClient] = {}
        self.last_connection: Connection | None = None  # of the last call: the next one usually has the same
        self.last_client: ConnectedClient

    def client_of_request(self, origin: RequestOrigin, request: Request, now: float) -> ConnectedClient | None:
        """Return the client of a request that came at `now`; None before it has initialized."""
        self._remember_principal(origin.principal)
        connection = origin.connection
        meta: Json = request.params.get("_meta")
        revision_name = meta.get(VERSION) if type(meta) is dict else None
        if type(revision_name) is str and revision_name in self._stateless_revisions:
            client_info = meta.get(CLIENT_INFO)
            client_info = client_info if type(client_info) is dict else {}
            peer = self._stateless_client(
                origin, str(client_info.get("name", "")), str(client_info.get("version", "")), revision_name, now
            )
            if request.method == "subscriptions/listen":
                peer.connections.add(connection)
        else:
            is_opening = origin.trace_headers is not None and request.method == "initialize"
            if connection.revision is None or is_opening:  # over HTTP the session will have another connection
                return None
            client, revision = connection.client, connection.revision.name
            peer = self._stateful_client(origin, client.name, client.version, revision, now)
            if request.method == "initialize":  # once more, perhaps
                peer.client, peer.version, peer.revision = client.name[:100], client.version[:100], revision
        peer.last_active = max(peer.last_active, now)
        return peer

    def client_of_refusal(self, origin: RequestOrigin, request: Request, revision: str, now: float) -> ConnectedClient:
        """Return the client of a refused call. Before it has initialized, this is a new one that is not listed."""
        return self.client_of_request(origin, request, now) or _new_client(origin, "", "", revision, now)

    def client_of_call(self, call: CallState, now: float) -> ConnectedClient:
        """Whose call it is, that came at this time, if it is not `last_client`'s."""
        flight, client, revision = call.peer, call.client, call.revision
        self._remember_principal(call.principal)
        if revision.stateless:
            return self._stateless_client(flight, client.name, client.version, revision.name, now)
        self.last_connection = flight.connection
        self.last_client = self._stateful_client(flight, client.name, client.version, revision.name, now)
        return self.last_client

    def _remember_principal(self, principal: Principal) -> None:
        if principal.id in self.principals or len(self.principals) < MAX_PRINCIPALS:
            self.principals[principal.id] = principal  # with the scopes it has by now

    def connected(
        self, streams: set[Connection], busy: Counter[ConnectedClient], now: float
    ) -> list[tuple[ConnectedClient, int, bool]]:
        """Return each client, the number of its calls, and whether it has a stream or one of the `busy` calls open."""
        rows = [
            (peer, peer.calls + busy[peer], peer in busy or not streams.isdisjoint(peer.connections))
            for peer in self._clients.values()
        ]
        for peer, _, is_open in rows:
            if not is_open and peer.last_active < now - ACTIVE_SECONDS:
                del self._clients[peer.id]
                self.last_connection = None
        return [each for each in rows if each[0].id in self._clients]

    def _stateful_client(
        self, origin: RequestOrigin, name: str, version: str, revision: str, now: float
    ) -> ConnectedClient:
        connection = origin.connection
        peer = self._by_connection.get(connection)
        if peer is None or peer.id not in self._clients:
            peer = self._by_connection[connection] = self._add(origin, name, version, revision, now)
            peer.connections.add(connection)
        return peer

    def _stateless_client(
        self, origin: RequestOrigin, name: str, version: str, revision: str, now: float
    ) -> ConnectedClient:
        key = (revision, name[:100], version[:100], origin.principal.id, origin.address)
        peer = self._by_name.get(key)
        if peer is None or peer.id not in self._clients:
            if len(self._by_name) >= MAX_CLIENTS:
                self._by_name = {}
            peer = self._by_name[key] = self._add(origin, name, version, revision, now)
            if origin.trace_headers is None:
                peer.connections.add(origin.connection)
        return peer

    def _add(self, origin: RequestOrigin, name: str, version: str, revision: str, now: float) -> ConnectedClient:
        if len(self._clients) >= MAX_CLIENTS:
            self.last_connection = None
            del self._clients[min(self._clients.values(), key=lambda each: each.last_active).id]
        peer = _new_client(origin, name, version, revision, now)
        self._clients[peer.id] = peer
        return peer


def _new_client(origin: RequestOrigin, name: str, version: str, revision: str, now: float) -> ConnectedClient:
    place = origin.address
    return ConnectedClient(
        id=secrets.token_hex(8),
        client=name[:100],
        version=version[:100],
        revision=revision,
        transport="http" if origin.trace_headers is not None else "stdio" if place == "stdio" else "memory",
        who=origin.principal.id,
        address=place,
        since=now,
        last_active=now,
    )
