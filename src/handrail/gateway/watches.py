"""The updates of one upstream's resources: subscribed to there while a client of ours is subscribed here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from msgspec import Struct

from handrail.client.connection import ClientConnection
from handrail.client.resources import ResourceSubscription
from handrail.engine.call_state import CallPeer
from handrail.engine.catalog import ToolEntry
from handrail.engine.core import Engine
from handrail.engine.guard_set import owner_of
from handrail.errors import PeerError, Refused, RemoteProtocolError
from handrail.gateway.pool import SessionPool
from handrail.gateway.questions import CapabilityKey
from handrail.gateway.session import UpstreamSession
from handrail.model import Object
from handrail.protocol.connection import Connection

__all__ = ["ResourceWatches"]

log = logging.getLogger("handrail")

MAX_WATCHED = 1_000  # resources of one upstream, each of one owner

IsWanted = Callable[[], Awaitable[object]]
"""Whether a client is still subscribed."""


class WatchedUpstream(Protocol):
    """The upstream of the resources."""

    name: str
    engine: Engine
    pool: SessionPool
    is_shared: bool
    is_stopped: bool


class _Subscriber(Struct, eq=False):
    """A client's subscription. It may not be stored yet when it is new."""

    is_wanted: IsWanted
    is_new: bool = True


class _Watch(Struct, eq=False):
    """A resource that an owner wants updates of, and the task that gets them over one of the owner's sessions."""

    uri: str
    audience: str  # the owner whose clients are notified; empty: all
    owner: str
    key: CapabilityKey
    subscribers: dict[Connection, _Subscriber]
    task: asyncio.Task[None] | None = None
    is_refused: bool = False
    has_failed: bool = False


class ResourceWatches:
    """The subscriptions at one upstream. A session belongs to one owner, and so do the updates that come over it."""

    def __init__(self, upstream: WatchedUpstream) -> None:
        self._upstream = upstream
        self._watches: dict[tuple[str, str], _Watch] = {}  # by audience and URI

    def add(self, entry: ToolEntry, peer: CallPeer, owner: str, key: CapabilityKey, is_wanted: IsWanted) -> None:
        """Subscribe to a resource for a client, over the session that its calls use."""
        uri = entry.requested_uri or entry.name
        audience = "" if self._upstream.is_shared else owner_of(peer.principal, peer.address)
        watch = self._watches.get((audience, uri))
        if watch is None:
            if len(self._watches) >= MAX_WATCHED:
                log.warning("gateway: %s: updates of %.200s are not announced: too many", self._upstream.name, uri)
                return
            watch = self._watches[audience, uri] = _Watch(uri, audience, owner, key, {})
            self._start(watch)
        watch.subscribers[peer.connection] = _Subscriber(is_wanted)

    async def check(self) -> None:
        """Unsubscribe from what no client is subscribed to any more, and try again what has failed."""
        if self._upstream.is_stopped:
            return
        for place, watch in [*self._watches.items()]:
            for connection, subscriber in [*watch.subscribers.items()]:
                is_wanted = subscriber.is_new or await subscriber.is_wanted()
                subscriber.is_new = False
                if not is_wanted and watch.subscribers.get(connection) is subscriber:
                    del watch.subscribers[connection]
            if not watch.subscribers:
                del self._watches[place]
                if watch.task is not None:
                    watch.task.cancel()
            elif watch.task is None and not watch.is_refused:
                self._start(watch)

    def close(self) -> None:
        """End all subscriptions. Those that are still wanted begin again with the next look."""
        for watch in self._watches.values():
            if watch.task is not None:
                watch.task.cancel()

    def _start(self, watch: _Watch) -> None:
        watch.task = asyncio.get_running_loop().create_task(self._run(watch))

    async def _run(self, watch: _Watch) -> None:
        upstream = self._upstream
        try:
            session = await upstream.pool.session(watch.owner, watch.key)
            async with ResourceSubscription(watch.uri, partial(_server, session)) as updates:
                watch.has_failed = False
                async for uri in updates:
                    upstream.engine.resource_updated(uri, watch.audience)
        except (PeerError, Refused) as problem:
            watch.is_refused = isinstance(problem, RemoteProtocolError)
            level, watch.has_failed = logging.DEBUG if watch.has_failed else logging.WARNING, True
            log.log(level, "gateway: %s: updates of %.200s do not come: %s", upstream.name, watch.uri, problem)
        finally:
            watch.task = None


class _Server(Struct):
    """An upstream's session, as a subscription uses it."""

    connection: ClientConnection

    async def request(self, *_: Any, send: Callable[[object], Awaitable[Object]]) -> Object:
        return await send(None)


async def _server(session: UpstreamSession) -> Any:
    return _Server(session.connection)
