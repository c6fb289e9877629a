"""What tools looked like: as `tools.lock` beside the served file has them, or else as they were first seen here.

That is kept until somebody accepts how a tool is now.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.json import decode

from handrail.engine.catalog import ToolEntry
from handrail.guards.fingerprint import comparable, definition, fingerprint
from handrail.guards.lockfile import LockedServer, LockError, read_lock
from handrail.guards.tool_diff import Change, compare_definitions
from handrail.jsonrpc import encode
from handrail.model import Json, Object
from handrail.revisions import Revision
from handrail.stores import Put

if TYPE_CHECKING:
    from handrail.console import Console

__all__ = ["ConsolePins", "load_pins", "pin_op"]

LOCK_FILE = "tools.lock"
MAX_SIDE_CHARS = 4_000  # characters of one side of a difference
MAX_CHANGES = 50
CHANGE_LABELS = {
    "wording": "wording",
    "widened": "schema widened",
    "narrowed": "schema narrowed",
    "schema": "schema changed",
    "hint": "new hint",
    "invisible": "invisible characters",
    "new": "new",
    "gone": "gone",
}


class ConsolePins:
    """`locked` counts before what was seen here, unless that was accepted and is how the tool is now."""

    def __init__(
        self, baselines: dict[str, tuple[float, Object]], locked: LockedServer | None, since: float, newest: Revision
    ) -> None:
        self._baselines = baselines
        self._locked = locked
        self._since = since
        self._newest = newest.name

    def state(self, entry: ToolEntry) -> Object:
        name = entry.tool.name
        at, baseline = self._baselines.get(name, (0.0, None))
        if baseline is not None and fingerprint(baseline) == entry.fingerprint:
            return {"state": "pinned", "since": at, "changes": []}
        if self._locked is None:
            previous, revision = baseline, self._newest
        else:
            previous, at, revision = self._locked.tools.get(name), self._since, self._locked.revision
        if previous is None:
            return {"state": "new", "since": 0.0, "changes": []}
        differences = compare_definitions(*comparable(previous, revision, definition(entry.tool), self._newest))
        change_rows = [_change(each) for each in differences[:MAX_CHANGES]]
        return {"state": "changed" if differences else "pinned", "since": at, "changes": change_rows}


async def load_pins(console: Console) -> ConsolePins:
    """What is kept of the tools; the first time, all of them are."""
    locked, since = _read_lock_file(console)
    prefix, after = _prefix(console), ""
    mark = prefix.replace("tool", "tools", 1)
    if locked is None and await console.store.get(mark) is None:
        pin_ops = (pin_op(console, entry) for entry in console.engine.catalog.entries)
        await console.store.commit([Put(mark, b"", if_absent=True), *pin_ops])
    baselines: dict[str, tuple[float, Object]] = {}
    while rows := await console.store.scan(prefix, after=after):
        baselines |= {key[len(prefix) :]: tuple(decode(raw)) for key, raw in rows}
        after = rows[-1][0]
    return ConsolePins(baselines, locked, since, console.engine.offer.newest)


def pin_op(console: Console, entry: ToolEntry) -> Put:
    return Put(_prefix(console) + entry.tool.name, encode([console.clock(), definition(entry.tool)]))


def _prefix(console: Console) -> str:
    """Several servers may share a store, and a name."""
    return f"console-tool:{sha256(encode([console.server.name, str(console.source)])).hexdigest()[:16]}:"


def _read_lock_file(console: Console) -> tuple[LockedServer | None, float]:
    """What the lock beside the served file says of this server, if there is one, and since when."""
    path = None if console.source is None else console.source.parent / LOCK_FILE
    if path is None or not path.is_file():
        return None, 0.0
    stamp = path.stat().st_mtime
    lock_state: tuple[LockedServer | None, float] | None = console.state.get("lock")
    if lock_state is None or lock_state[1] != stamp:
        console.state["lock-flaw"] = ""
        try:
            servers = read_lock(path)
            only_server = next(iter(servers.values())) if len(servers) == 1 else None
            lock_state = servers.get(console.server.name) or only_server, stamp
        except LockError as problem:  # then nothing is as somebody agreed to
            console.state["lock-flaw"] = str(problem)
            lock_state = LockedServer("", "", {}), stamp
        console.state["lock"] = lock_state
    return lock_state


def _change(change: Change) -> Object:
    sides = {side: _side(getattr(change, side)) for side in ("before", "after")}
    return {"kind": CHANGE_LABELS.get(change.kind, change.kind), "path": change.path, **sides}


def _side(value: Json) -> str:
    if value is UNSET:
        return ""
    text = value if type(value) is str else json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= MAX_SIDE_CHARS else text[: MAX_SIDE_CHARS - 1] + "…"
