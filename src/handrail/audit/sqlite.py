"""An audit trail in a SQLite file. What changes with a record is changed in the same transaction (P-19).

A row has lines that were written together, and the number of the last: with a row for each they would take longer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from handrail.audit.format import (
    DAY_SECONDS,
    ORIGIN,
    ChainPosition,
    NotedHead,
    Retention,
    frame,
    position_of,
    replaced,
    trimmed,
)
from handrail.stores import Delete, DoneCallback, Put, Store
from handrail.stores.sqlite import MAX_BATCH_ROWS, commit

__all__ = ["SqliteTable"]

log = logging.getLogger("handrail")

MAX_ROW_BYTES = 8000  # what fits into one page of the file: a record that spans two is lost with either
TRIM_INTERVAL_SECONDS = 1.0

SELECT_AT_OR_AFTER = "SELECT number, time FROM audit WHERE number >= ? ORDER BY number LIMIT 1"
SELECT_OLDEST = "SELECT number, time FROM audit WHERE time <= ? ORDER BY number LIMIT ?"

Changes = tuple[Put | Delete, ...]


class SqliteTable:
    """The table `audit` of a store's file, written in the store's own transactions."""

    def __init__(self, store: Store, limits: Retention, path: Path | None = None) -> None:
        self.name = str(path or "audit trail")
        self.path = store.path
        self._store = store
        self._owns_store = path is not None
        self._limits = limits
        self._trimmed_at = float("-inf")
        self._last = ORIGIN  # of what we have written, and is on the disk
        self._db: Connection | None = None  # in which it is

    def append(
        self,
        bodies: list[bytes],
        changes: Mapping[int, Changes],
        writer: bytes,
        callback: DoneCallback,
    ) -> None:
        self._store.transaction(partial(self._append, bodies, changes, writer), partial(self._on_appended, callback))

    async def close(self) -> None:
        if self._owns_store:
            await self._store.close()

    async def heads(self) -> dict[str, NotedHead]:
        future: asyncio.Future[dict[str, NotedHead]] = asyncio.get_running_loop().create_future()
        self._store.transaction(self._heads, partial(_resolve, future))
        return await future

    def _heads(self, db: Connection, now: float) -> dict[str, NotedHead]:
        oldest = db.execute("SELECT line FROM audit ORDER BY number LIMIT 1").fetchone()
        newest = db.execute("SELECT number, line FROM audit ORDER BY number DESC LIMIT 1").fetchone()
        first, last = position_of(oldest[0]) if oldest else None, _last_position(*newest) if newest else ORIGIN
        return {} if first is None else {"": NotedHead(last.hash.decode(), first.number, last.number, self._limits)}

    def _on_appended(
        self,
        callback: DoneCallback,
        result: tuple[Collection[int], ChainPosition, Connection] | None,
        problem: BaseException | None,
    ) -> None:
        unmet = None
        if result is not None:
            unmet, self._last, self._db = result
        callback(unmet, problem)

    def _append(
        self, bodies: list[bytes], changes: Mapping[int, Changes], writer: bytes, db: Connection, now: float
    ) -> tuple[Collection[int], ChainPosition, Connection]:
        newest = db.execute("SELECT number, line FROM audit ORDER BY number DESC LIMIT 1").fetchone()
        last = _last_position(*newest) if newest else self._last
        unmet = [at for at, each in changes.items() if not commit(each, db, now)]
        if unmet:
            bodies = [body for at, body in enumerate(bodies) if at not in unmet]
        if db is not self._db and self._last != ORIGIN and not _has_position(self._last, db):
            log.error("audit: %s was deleted or replaced: records up to %d are not in it", self.path, self._last.number)
            bodies = [replaced(self._last), *bodies]
        if self._limits != Retention() and not 0 <= now - self._trimmed_at < TRIM_INTERVAL_SECONDS:
            bodies = [*bodies, *_trim(self._limits, db, now)]
            self._trimmed_at = now
        lines, end = frame(bodies, writer, now, last)
        number = last.number
        rows: list[tuple[int, float, bytes]] = []
        row: list[bytes] = []
        size = 0
        for line in lines:
            if row and size + len(line) > MAX_ROW_BYTES:
                rows.append((number, now, b"\n".join(row)))
                row, size = [], 0
            row.append(line)
            number += 1
            size += len(line) + 1
        if row:
            rows.append((number, now, b"\n".join(row)))
        db.executemany("INSERT INTO audit VALUES (?, ?, ?)", rows)
        return unmet, end, db


def _resolve(future: asyncio.Future[Any], result: Any, problem: BaseException | None) -> None:
    if not future.done():
        future.set_result(result) if problem is None else future.set_exception(problem)


def _last_position(number: int, lines: bytes) -> ChainPosition:
    """Return the position of the last record of a row."""
    position = position_of(lines[lines.rfind(b"\n") + 1 :])
    return ChainPosition(number, position.hash if position else ORIGIN.hash)


def _has_position(position: ChainPosition, db: Connection) -> bool:
    row = db.execute("SELECT line FROM audit WHERE number >= ? ORDER BY number LIMIT 1", (position.number,)).fetchone()
    return row is not None and position in map(position_of, row[0].split(b"\n"))


def _trim(limits: Retention, db: Connection, now: float) -> list[bytes]:
    """Delete what is too old or too much, and tell where the trail begins by now."""
    to = max(_too_old(limits.keep_days * DAY_SECONDS, db, now), _too_much(limits.max_megabytes * 1_000_000, db))
    if not to:
        return []
    (lines,) = db.execute("SELECT line FROM audit WHERE number = ?", (to,)).fetchone()
    db.execute("DELETE FROM audit WHERE number <= ?", (to,))
    return [trimmed(_last_position(to, lines), limits)]


def _too_old(keep_seconds: float, db: Connection, now: float) -> int:
    """Return the number up to which records are too old, by the time that the records themselves have reached.

    The last of them is left: it shows that those before it were too old. Nothing is done until there is a day too much,
    or a tenth: else there would always be something to tell. Records from a future, written while the clock was wrong,
    are as old as those around them.
    """
    if not keep_seconds:
        return 0
    slack = min(DAY_SECONDS, keep_seconds / 10)
    first = db.execute(SELECT_OLDEST, (now + slack, 2)).fetchall()
    if len(first) < 2 or first[1][1] >= now - keep_seconds - slack:
        return 0
    limit = _settled_time(now, slack, db) - keep_seconds
    old = [*takewhile(lambda row: row[1] < limit, db.execute(SELECT_OLDEST, (now + slack, MAX_BATCH_ROWS)).fetchall())]
    if len(old) < 2 or old[1][1] >= limit - slack:
        return 0
    (to,) = db.execute("SELECT max(number) FROM audit WHERE number < ?", (old[-1][0],)).fetchone()
    return int(to)


def _settled_time(now: float, slack: float, db: Connection) -> float:
    """Return the time now, as far as records that are at least `slack` old speak for it.

    A clock that is far ahead for less than that makes no record older than it is.
    """
    low, high = db.execute("SELECT min(number), max(number) FROM audit").fetchone()
    settled = float("-inf")
    while low <= high:  # they are in the order of their times, or some records stay for longer
        middle = (low + high) // 2
        number, row_time = db.execute(SELECT_AT_OR_AFTER, (middle,)).fetchone()
        if row_time <= now - slack:
            settled, low = row_time, number + 1
        else:
            high = middle - 1
    return settled + slack


def _too_much(max_bytes: int, db: Connection) -> int:
    """Return the number up to which records have to go for the file to be a tenth below its limit."""
    if not max_bytes:
        return 0
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    excess = (pages - free) * size - max_bytes
    if excess <= 0:
        return 0
    to, excess = 0, excess + max_bytes // 10
    rows = db.execute(
        "SELECT number, length(line) FROM audit ORDER BY number LIMIT ?", (MAX_BATCH_ROWS + 1,)
    ).fetchall()
    for number, length in rows[:-1]:
        if excess <= 0:
            break
        to, excess = number, excess - length
    return to
