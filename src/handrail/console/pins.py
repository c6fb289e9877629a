"""What tools looked like: as `tools.lock` beside the served file has them, or else as they were first seen here.

That is kept until somebody accepts how a tool is now.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.json import decode

from handrail.engine.catalog import Entry
from handrail.guards.fingerprint import comparable, definition, fingerprint
from handrail.guards.lockfile import Locked, LockError, read_lock
from handrail.guards.tool_diff import Change, changes
from handrail.jsonrpc import encode
from handrail.model import Json, Object
from handrail.revisions import Revision
from handrail.stores import Put

if TYPE_CHECKING:
    from handrail.console import Console

__all__ = ["Pins", "keeping", "pins"]

LOCK = "tools.lock"
MAX_SIDE = 4_000  # characters of one side of a difference
MAX_CHANGES = 50
KINDS = {
    "wording": "wording",
    "widened": "schema widened",
    "narrowed": "schema narrowed",
    "schema": "schema changed",
    "hint": "new hint",
    "invisible": "invisible characters",
    "new": "new",
    "gone": "gone",
}


class Pins:
    """`locked` counts before what was seen here, unless that was accepted and is how the tool is now."""

    def __init__(
        self, kept: dict[str, tuple[float, Object]], locked: Locked | None, since: float, now: Revision
    ) -> None:
        self._kept = kept
        self._locked = locked
        self._since = since
        self._now = now.name

    def state(self, entry: Entry) -> Object:
        name = entry.tool.name
        at, seen = self._kept.get(name, (0.0, None))
        if seen is not None and fingerprint(seen) == entry.fingerprint:
            return {"state": "pinned", "since": at, "changes": []}
        if self._locked is None:
            was, revision = seen, self._now
        else:
            was, at, revision = self._locked.tools.get(name), self._since, self._locked.revision
        if was is None:
            return {"state": "new", "since": 0.0, "changes": []}
        found = changes(*comparable(was, revision, definition(entry.tool), self._now))
        told = [_change(each) for each in found[:MAX_CHANGES]]
        return {"state": "changed" if found else "pinned", "since": at, "changes": told}


async def pins(console: Console) -> Pins:
    """What is kept of the tools; the first time, all of them are."""
    locked, since = _lock(console)
    prefix, after = _prefix(console), ""
    mark = prefix.replace("tool", "tools", 1)
    if locked is None and await console.store.get(mark) is None:
        seen = (keeping(console, entry) for entry in console.engine.catalog.entries)
        await console.store.commit([Put(mark, b"", if_absent=True), *seen])
    kept: dict[str, tuple[float, Object]] = {}
    while rows := await console.store.scan(prefix, after=after):
        kept |= {key[len(prefix) :]: tuple(decode(raw)) for key, raw in rows}
        after = rows[-1][0]
    return Pins(kept, locked, since, console.engine.offer.newest)


def keeping(console: Console, entry: Entry) -> Put:
    return Put(_prefix(console) + entry.tool.name, encode([console.clock(), definition(entry.tool)]))


def _prefix(console: Console) -> str:
    """Several servers may share a store, and a name."""
    return f"console-tool:{sha256(encode([console.server.name, str(console.source)])).hexdigest()[:16]}:"


def _lock(console: Console) -> tuple[Locked | None, float]:
    """What the lock beside the served file says of this server, if there is one, and since when."""
    path = None if console.source is None else console.source.parent / LOCK
    if path is None or not path.is_file():
        return None, 0.0
    stamp = path.stat().st_mtime
    known: tuple[Locked | None, float] | None = console.state.get("lock")
    if known is None or known[1] != stamp:
        console.state["lock-flaw"] = ""
        try:
            servers = read_lock(path)
            alone = next(iter(servers.values())) if len(servers) == 1 else None
            known = servers.get(console.server.name) or alone, stamp
        except LockError as problem:  # then nothing is as somebody agreed to
            console.state["lock-flaw"] = str(problem)
            known = Locked("", "", {}), stamp
        console.state["lock"] = known
    return known


def _change(change: Change) -> Object:
    sides = {side: _side(getattr(change, side)) for side in ("before", "after")}
    return {"kind": KINDS.get(change.kind, change.kind), "path": change.path, **sides}


def _side(value: Json) -> str:
    if value is UNSET:
        return ""
    text = value if type(value) is str else json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= MAX_SIDE else text[: MAX_SIDE - 1] + "…"
