"""A store in one SQLite file, shared by the processes of one machine.

One thread writes and another reads, so that no reader waits for the disk, and the loop for neither (`lane.py`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import takewhile
from sqlite3 import Connection

from handrail.stores import Append, Delete, Put, Store, StoreError, condition_holds, parse_counter
from handrail.stores.database import DatabaseOpener
from handrail.stores.lane import SqliteThread
from handrail.stores.topics import Topics

POLL_SECONDS = 0.02
MESSAGE_SECONDS = 60.0  # a process that was stopped for less still hears what was published meanwhile
MAX_BATCH_ROWS = 1000  # rows swept in one transaction, messages read in one poll

LIVE = "(expires IS NULL OR expires > :now)"

SWEEPS = (
    "DELETE FROM entries WHERE rowid IN (SELECT rowid FROM entries WHERE expires <= ? LIMIT ?)",
    "DELETE FROM lines WHERE rowid IN"
    " (SELECT lines.rowid FROM logs CROSS JOIN lines USING (log) WHERE expires <= ? LIMIT ?)",
    "DELETE FROM logs WHERE log IN (SELECT log FROM logs WHERE expires <= ? ORDER BY expires LIMIT ?)"
    " AND NOT EXISTS (SELECT 1 FROM lines WHERE lines.log = logs.log)",
    "DELETE FROM messages WHERE number IN (SELECT number FROM messages WHERE expires <= ? LIMIT ?)",
)


class SqliteStore(Store):
    """Opens the file, or makes it, readable for its owner only. That takes some milliseconds: open it before you serve.

    With `durable` a write is on the disk when it returns; without, a power cut may take the last ones, the end of the
    process none. A call that is cancelled may still be carried out. For one event loop at a time, and not across a
    fork: the child has to open the file itself.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, durable: bool = True, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = os.path.abspath(path)
        self.durable = durable
        # The writer also serves the audit trail, which shares its transactions.
        self.writer = SqliteThread(DatabaseOpener(self.path, durable), clock, _sweep)
        self._reader = SqliteThread(DatabaseOpener(self.path, durable), clock)
        self._topics = Topics()
        self._poller: asyncio.Task[None] | None = None

    async def get(self, key: str) -> bytes | None:
        return await self._reader.run(partial(_get, key))

    async def delete(self, key: str) -> bool:
        return bool(await self.writer.run(partial(_apply, Delete(key))))

    async def scan(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[tuple[str, bytes]]:
        return await self._reader.run(partial(_scan, prefix, after, limit))

    async def add(self, key: str, amount: int = 1, *, ttl: float | None = None) -> int:
        return await self.writer.run(partial(_add, key, amount, ttl))

    async def append(self, log: str, value: bytes, *, keep: int, ttl: float | None = None) -> int:
        return await self.writer.run(partial(_apply, Append(log, value, keep, ttl)))

    async def read(self, log: str, *, after: int = 0, limit: int = 1000) -> list[tuple[int, bytes]]:
        return await self._reader.run(partial(_read, log, after, limit))

    async def publish(self, topic: str, message: bytes) -> None:
        await self.writer.run(partial(_publish, topic, message))

    @asynccontextmanager
    async def subscribe(self, topic: str) -> AsyncIterator[AsyncIterator[bytes]]:
        since = await self._reader.run(_newest_number)
        try:
            with self._topics.subscribe(topic, since) as messages:
                if self._poller is None or self._poller.done():
                    self._poller = asyncio.create_task(self._poll(since))
                yield messages
        finally:
            if self._poller is not None and not self._topics:
                poller, self._poller = self._poller, None
                poller.cancel()
                await asyncio.wait([poller])

    async def commit(self, changes: Sequence[Put | Delete | Append]) -> bool:
        return await self.writer.run(partial(commit, tuple(changes)))

    async def close(self) -> None:
        """Finish what was asked for, then let go of the file. Listeners get a StoreError."""
        self._topics.close("the store was closed")
        await self.writer.close()
        await self._reader.close()

    async def _poll(self, last_number: int) -> None:
        try:
            while True:
                rows = await self._reader.run(partial(_messages_after, last_number))
                if rows and rows[0][0] != last_number + 1:  # numbers have no gaps: what is missing was swept
                    raise StoreError(f"not listening for {MESSAGE_SECONDS:g} s: some messages are gone")
                for last_number, topic, message in rows:
                    self._topics.deliver(topic, message, last_number)
                if len(rows) < MAX_BATCH_ROWS:
                    await asyncio.sleep(POLL_SECONDS)
        except StoreError as problem:
            self._topics.close(str(problem))


def _sweep(db: Connection, now: float) -> bool:
    return MAX_BATCH_ROWS in [db.execute(sql, (now, MAX_BATCH_ROWS)).rowcount for sql in SWEEPS]


def _get(key: str, db: Connection, now: float) -> bytes | None:
    row = db.execute(f"SELECT value FROM entries WHERE key = :key AND {LIVE}", {"key": key, "now": now}).fetchone()
    return row[0] if row else None


def _scan(prefix: str, after: str, limit: int, db: Connection, now: float) -> list[tuple[str, bytes]]:
    # One lower bound: of two, SQLite would search by one and walk to the other.
    sql = f"SELECT key, value FROM entries WHERE key >= :start AND key <> :after AND {LIVE} ORDER BY key LIMIT :limit"
    rows = db.execute(sql, {"start": max(prefix, after), "after": after, "now": now, "limit": max(limit, 0)})
    return list(takewhile(lambda row: row[0].startswith(prefix), rows))


def _read(log: str, after: int, limit: int, db: Connection, now: float) -> list[tuple[int, bytes]]:
    sql = f"SELECT number, value FROM logs JOIN lines USING (log) WHERE log = :log AND number > :after AND {LIVE}"
    sql += " ORDER BY number LIMIT :limit"
    return db.execute(sql, {"log": log, "after": after, "now": now, "limit": max(limit, 0)}).fetchall()


def _add(key: str, amount: int, ttl: float | None, db: Connection, now: float) -> int:
    current = _get(key, db, now)
    total = parse_counter(key, current) + amount
    if current is None:
        _apply(Put(key, b"%d" % total, ttl), db, now)
    else:
        db.execute("UPDATE entries SET value = ? WHERE key = ?", (b"%d" % total, key))
    return total


def commit(changes: Sequence[Put | Delete | Append], db: Connection, now: float) -> bool:
    """As `Store.commit`, as part of a transaction of the file's."""
    for change in changes:
        if not isinstance(change, Append) and not condition_holds(change, _get(change.key, db, now)):
            return False
    for change in changes:
        _apply(change, db, now)
    return True


def _apply(change: Put | Delete | Append, db: Connection, now: float) -> int:
    """Make the change; the number of an appended value, else how many keys it touched."""
    match change:
        case Put(key, value, ttl):
            return db.execute("REPLACE INTO entries VALUES (?, ?, ?)", (key, value, ttl and now + ttl)).rowcount
        case Delete(key):
            return db.execute(f"DELETE FROM entries WHERE key = :key AND {LIVE}", {"key": key, "now": now}).rowcount
        case Append(log, value, keep, ttl):
            row = db.execute(f"SELECT last FROM logs WHERE log = :log AND {LIVE}", {"log": log, "now": now}).fetchone()
            number: int = row[0] + 1 if row else 1
            if not row:  # what is left of one that has ended, and was not swept yet
                db.execute("DELETE FROM lines WHERE log = ?", (log,))
            db.execute("DELETE FROM lines WHERE log = ? AND number <= ?", (log, number - keep))
            db.execute("INSERT INTO lines VALUES (?, ?, ?)", (log, number, value))
            db.execute("REPLACE INTO logs VALUES (?, ?, ?)", (log, number, ttl and now + ttl))
            return number


def _publish(topic: str, message: bytes, db: Connection, now: float) -> None:
    row = (topic, message, now + MESSAGE_SECONDS)
    db.execute("INSERT INTO messages (topic, message, expires) VALUES (?, ?, ?)", row)


def _newest_number(db: Connection, now: float) -> int:
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'messages'").fetchone()
    return row[0] if row else 0


def _messages_after(last_number: int, db: Connection, now: float) -> list[tuple[int, str, bytes]]:
    sql = "SELECT number, topic, message FROM messages WHERE number > ? ORDER BY number LIMIT ?"
    rows = db.execute(sql, (last_number, MAX_BATCH_ROWS)).fetchall()
    if not rows and _newest_number(db, now) < last_number:
        raise StoreError("the file was deleted or replaced: some messages are gone")
    return rows
