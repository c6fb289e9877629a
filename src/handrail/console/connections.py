"""Who is connected now, and how the server is, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from handrail.engine.dispatch import Conversation
from handrail.model import Object
from handrail.protocol.connection import Connection

if TYPE_CHECKING:
    from handrail.console import Console

FEW = 5  # calls of which nothing follows


def connections(console: Console) -> list[Object]:
    """The `Connection`s of this process, oldest first."""
    streams: set[Connection] = set()
    for watcher in list(console.engine.catalog.watchers):
        owner = getattr(watcher, "__self__", None)
        if isinstance(owner, Conversation) and not getattr(owner.outlet, "gone", False):
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
            "seen": now if is_open else peer.seen,
            "open": is_open,
            "calls": calls,
            "worker": console.worker,
        }
        for peer, calls, is_open in console.feed.connected(streams)
    ]


def merged(lists: Iterable[list[Object]]) -> list[Object]:
    return sorted((each for one in lists for each in one), key=lambda each: each["since"])


def health(console: Console, calls: int, errors: int, unrecorded: int, waiting: int) -> Object:
    """A `Health`: what the last five minutes say."""
    tools = len(list(console.engine.catalog))
    notes = []
    if unrecorded:
        notes.append("Calls were refused because they could not be recorded; the server's log says why.")
    if waiting:
        notes.append(f"{_many(waiting, 'call')} wait{'s' if waiting == 1 else ''} for somebody's approval.")
    if not tools:
        notes.append("It has no tools, or all are switched off.")
    if console.gate.trail is None:
        notes.append("Calls are not recorded: there is no audit.")
    level = "good"
    if unrecorded or (calls >= FEW and errors * 2 > calls):
        level = "bad"
    elif not tools or errors * 10 > calls:
        level = "warn"
    if unrecorded:
        sentence = "Calls cannot be recorded, and are refused."
    elif errors:
        begin = "Most is well: " if level == "good" else ""
        sentence = f"{begin}{errors} of {_many(calls, 'call')} failed in the last five minutes."
    elif calls:
        sentence = "All is well: no call has failed in the last five minutes."
    else:
        sentence = f"All is quiet: {_many(tools, 'tool')}, and no calls in the last five minutes."
    return {"level": level, "sentence": sentence, "notes": notes}


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
