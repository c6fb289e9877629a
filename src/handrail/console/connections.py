"""Who is connected now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from handrail.engine.dispatcher import Dispatcher
from handrail.model import Object
from handrail.protocol.connection import Connection

if TYPE_CHECKING:
    from handrail.console import Console


def connections(console: Console) -> list[Object]:
    """The `Connection`s of this process, oldest first."""
    streams: set[Connection] = set()
    for watcher in list(console.engine.catalog.watchers):
        owner = getattr(watcher, "__self__", None)
        if isinstance(owner, Dispatcher) and not getattr(owner.reply_channel, "gone", False):
            streams.add(owner.connection)
    now = console.clock()
    return [
        {
            "id": peer.id,
            "client": peer.client,
            "version": peer.version,
            "revision": peer.revision,
            "transport": peer.transport,
            "who": peer.who,
            "from": peer.address,
            "since": peer.since,
            "seen": now if is_open else peer.last_active,
            "open": is_open,
            "calls": calls,
            "worker": console.worker,
        }
        for peer, calls, is_open in console.feed.connected(streams)
    ]


def merge_connections(lists: Iterable[list[Object]]) -> list[Object]:
    return sorted((each for one in lists for each in one), key=lambda each: each["since"])
