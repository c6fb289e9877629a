"""An audit trail in a SQLite file. What changes with a record is changed in the same transaction (P-19).

A row has lines that were written together, and the number of the last: with a row for each they would take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from handrail.guards.chain import ORIGIN, Link, frame, link_of, notice
from handrail.stores import Delete, Put
from handrail.stores.sqlite import STEP, SqliteStore, commit

__all__ = ["SqliteTable"]

ROW_BYTES = 8000  # what fits into one page of the file: a record that spans two is lost with either
TRIM_SECONDS = 1.0
DAY = 86_400.0

Changes = tuple[Put | Delete, ...]


class SqliteTable:
    """The table `audit` of a store's file, written in the store's own transactions."""

    def __init__(self, store: SqliteStore, keep_seconds: float, path: Path | None = None) -> None:
        self.name = str(path or "audit trail")
        self.path = store.path
        self._store = store
        self._is_ours = path is not None
        self._keep = keep_seconds
        self._trimmed = float("-inf")

    def append(
        self,
        bodies: list[bytes],
        changes: Mapping[int, Changes],
        writer: bytes,
        then: Callable[[Any, BaseException | None], None],
    ) -> None:
        self._store.writer.start(partial(self._append, bodies, changes, writer), then)

    async def close(self) -> None:
        if self._is_ours:
            await self._store.close()

    def _append(
        self, bodies: list[bytes], changes: Mapping[int, Changes], writer: bytes, db: Connection, now: float
    ) -> Collection[int]:
        newest = db.execute("SELECT number, line FROM audit ORDER BY number DESC LIMIT 1").fetchone()
        unmet = [at for at, each in changes.items() if not commit(each, db, now)]
        if unmet:
            bodies = [body for at, body in enumerate(bodies) if at not in unmet]
        if self._keep and not 0 <= now - self._trimmed < TRIM_SECONDS:
            bodies = [*bodies, *_trim(self._keep, db, now)]
            self._trimmed = now
        lines, _ = frame(bodies, writer, now, _end(*newest) if newest else ORIGIN)
        number = newest[0] if newest else 0
        rows: list[tuple[int, float, bytes]] = []
        row: list[bytes] = []
        size = 0
        for line in lines:
            if row and size + len(line) > ROW_BYTES:
                rows.append((number, now, b"\n".join(row)))
                row, size = [], 0
            row.append(line)
            number += 1
            size += len(line) + 1
        if row:
            rows.append((number, now, b"\n".join(row)))
        db.executemany("INSERT INTO audit VALUES (?, ?, ?)", rows)
        return unmet


def _end(number: int, lines: bytes) -> Link:
    """The last record of a row."""
    link = link_of(lines[lines.rfind(b"\n") + 1 :])
    return Link(number, link.hash if link else ORIGIN.hash)


def _trim(keep: float, db: Connection, now: float) -> list[bytes]:
    """Delete what is too old, and tell where the trail begins by now.

    It waits until there is a day too much, or a tenth: else there would always be something to tell.
    """
    oldest = db.execute("SELECT time FROM audit ORDER BY number LIMIT 1").fetchone()
    if not oldest or oldest[0] >= now - keep - min(DAY, keep / 10):
        return []
    rows = db.execute("SELECT number, time FROM audit ORDER BY number LIMIT ?", (STEP,)).fetchall()
    to = [number for number, _ in takewhile(lambda row: row[1] < now - keep, rows)][-1]
    (lines,) = db.execute("SELECT line FROM audit WHERE number = ?", (to,)).fetchone()
    db.execute("DELETE FROM audit WHERE number <= ?", (to,))
    return [notice("trimmed", to=to, digest=_end(to, lines).hash.decode())]
