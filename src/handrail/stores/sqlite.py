"""A store in one SQLite file, shared by the processes of one machine.

One thread writes and another reads, so that no reader waits for the disk, and the event loop for neither. A thread has
a connection of its own; calls that arrive while it is busy share its next transaction.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import takewhile
from queue import SimpleQueue
from sqlite3 import Connection
from threading import Thread
from typing import Any, TypeVar

from msgspec import Struct

from handrail.stores import (
    Append,
    Delete,
    DoneCallback,
    Put,
    Store,
    StoreError,
    StoreFeature,
    condition_holds,
    parse_counter,
)
from handrail.stores.memory import Topics

if sys.platform != "win32":
    import fcntl

BUSY_SECONDS = 10.0  # how long another process may keep us from writing

MIGRATIONS = (
    (
        "CREATE TABLE entries (key TEXT PRIMARY KEY NOT NULL, value BLOB NOT NULL, expires REAL) STRICT",
        "CREATE INDEX entries_expire ON entries (expires) WHERE expires IS NOT NULL",
        "CREATE TABLE logs (log TEXT PRIMARY KEY NOT NULL, last INTEGER NOT NULL, expires REAL) STRICT",
        "CREATE INDEX logs_expire ON logs (expires) WHERE expires IS NOT NULL",
        "CREATE TABLE lines (log TEXT, number INTEGER, value BLOB NOT NULL, PRIMARY KEY (log, number)) STRICT",
        "CREATE TABLE messages"
        " (number INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, message BLOB NOT NULL, expires REAL) STRICT",
        "CREATE INDEX messages_expire ON messages (expires)",
    ),
    ("CREATE TABLE audit (number INTEGER PRIMARY KEY, time REAL NOT NULL, line BLOB NOT NULL) STRICT",),
)
"""From each version of the file to the next. What was released is never edited: add a step."""


SIDE_FILE_SUFFIXES = ("-wal", "-shm")
"""The files that SQLite keeps beside one that is open."""


class DatabaseOpener:
    """Opens a file, and tells whether its name still leads to it: SQLite writes on to one that was deleted."""

    def __init__(self, path: str, durable: bool) -> None:
        self._path = path
        self._durable = durable
        self._files: dict[str, tuple[int, int] | None] = {}  # the file, and those beside it, as they were opened

    def __call__(self) -> Connection:
        if self._files and not self.is_current():
            with _folder_lock(self._path):
                for (
                    suffix
                ) in SIDE_FILE_SUFFIXES:  # those of the file that has gone would be taken for parts of the next
                    if _identity(self._path + suffix) == self._files[suffix]:
                        _remove(self._path + suffix)
        db = connect(self._path, durable=self._durable)
        self._files = {suffix: _identity(self._path + suffix) for suffix in ("", *SIDE_FILE_SUFFIXES)}
        return db

    def is_current(self) -> bool:
        return _identity(self._path) == self._files[""]


def connect(path: str, *, durable: bool) -> Connection:
    if not os.path.exists(path):
        with _folder_lock(path), suppress(FileExistsError):
            # Only a file that is not there yet: to close one that SQLite has open here would drop the locks it holds.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
            for suffix in SIDE_FILE_SUFFIXES:  # of one that was deleted while it was open, and may be open still
                _remove(path + suffix)
    db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        db.execute("PRAGMA page_size = 8192")  # of a new file: a tenth less work for a trail than with 4096
        _switch_to_wal(db)
        db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        _migrate(path, db)
    except BaseException:
        db.close()
        raise
    return db


def _switch_to_wal(db: Connection) -> None:
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as problem:
            # Of several processes that open a new file at once, some get "locked" at once, whatever the timeout.
            if problem.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _migrate(path: str, db: Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise StoreError(f"{path}: version {version} is of a newer Handrail; this one knows up to {len(MIGRATIONS)}")
    for number, step in enumerate(MIGRATIONS[version:], version + 1):
        for statement in (*step, f"PRAGMA user_version = {number}"):
            db.execute(statement)
    db.execute("COMMIT")


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


@contextmanager
def _folder_lock(path: str) -> Iterator[None]:
    """One process at a time makes a file of that folder; on Windows nothing that is open can be deleted."""
    if sys.platform == "win32":
        yield
        return
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


MAX_GROUP_JOBS = 1000
"""Calls that may share a transaction: reaching the disk is paid once for all of them."""
SWEEP_SECONDS = 1.0

T = TypeVar("T")
Work = Callable[[Connection, float], T]
"""Something to do in a transaction, at a time of day."""
Outcome = tuple[Any, Exception | None]


class _Job(Struct, eq=False):
    work: Work[Any]
    on_done: DoneCallback
    loop: asyncio.AbstractEventLoop


class SqliteThread:
    """A thread with a connection. It only reads unless it has a `sweep`, which returns whether more is left."""

    def __init__(self, connect: DatabaseOpener, clock: Callable[[], float], sweep: Work[bool] | None = None) -> None:
        self._clock = clock
        self._sweep = sweep
        self._swept_at = float("-inf")
        self._process = os.getpid()
        self._closed = False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # as long as there are callers waiting, no longer
        opened: Future[None] = Future()
        # A daemon: a store that was not closed must not keep the process alive.
        self._thread = Thread(target=self._run, args=(connect, opened), name="handrail-sqlite", daemon=True)
        self._thread.start()
        opened.result()

    async def run(self, work: Work[T]) -> T:
        """Return the result of `work`. It is carried out even if the caller is cancelled."""
        self._check_process()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.submit(work, partial(_set_future, done))
        return await done

    def submit(self, work: Work[Any], on_done: DoneCallback) -> None:
        """Have it done; `on_done` is called in this loop, and must not raise."""
        self._check_process()
        if self._closed:
            raise StoreError("the store was closed")
        self._jobs.put(_Job(work, on_done, asyncio.get_running_loop()))

    async def close(self) -> None:
        """Wait until all that was accepted is done, and the thread has ended."""
        self._check_process()
        self._closed = True
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StoreError(f"this store was opened by process {self._process}; after a fork, open the file anew")

    def _run(self, connect: DatabaseOpener, opened: Future[None]) -> None:
        try:
            db: Connection | None = connect()
        except Exception as problem:
            opened.set_exception(_caller_error(problem))
            return
        opened.set_result(None)
        more = False
        while True:
            group: list[_Job | None] = [] if more else [self._jobs.get()]
            while not self._jobs.empty() and len(group) < MAX_GROUP_JOBS:
                group.append(self._jobs.get())
            jobs = [job for job in group if job]
            try:
                if db is not None and not connect.is_current():
                    _checkpoint_and_close(db)
                    db = None
                db = db or connect()
                outcomes, more = self._transact(db, jobs, more)
            except Exception as problem:
                # What a write or sync that failed has left is unknown: nothing is tried over it (P-17).
                outcomes, more = [(None, problem)] * len(jobs), False
                _close(db)
                db = None
            _deliver_outcomes(jobs, outcomes)
            if None in group:
                _close(db)
                return
            # Answers are in them, which may be large, and the next may be long in coming. They are emptied: a failure
            # leads to frames that have them still.
            group.clear()
            jobs.clear()
            outcomes.clear()

    def _transact(self, db: Connection, group: list[_Job], more: bool) -> tuple[list[Outcome], bool]:
        outcomes: list[Outcome] = []
        db.execute("BEGIN IMMEDIATE" if self._sweep else "BEGIN")
        now = self._clock()
        for job in group:
            db.execute("SAVEPOINT job")  # so that one that fails half way undoes itself, and not the others
            try:
                outcomes.append((job.work(db, now), None))
            except Exception as problem:  # whatever it is, the caller has to hear of it
                if not db.in_transaction:
                    raise  # a full disk ends the transaction, and the others with it
                db.execute("ROLLBACK TO job")
                outcomes.append((None, problem))
            db.execute("RELEASE job")
        if self._sweep is not None and (more or not 0 <= now - self._swept_at < SWEEP_SECONDS):
            more, self._swept_at = self._sweep(db, now), now
        db.execute("COMMIT")
        return outcomes, more


def _checkpoint_and_close(db: Connection) -> None:
    """Close the connection to a file that was deleted, renamed or replaced; a renamed one gets all that is its."""
    with suppress(sqlite3.Error):
        db.execute("PRAGMA wal_checkpoint(FULL)")
    _close(db)


def _close(db: Connection | None) -> None:
    """What was not committed is undone by it."""
    with suppress(sqlite3.Error):
        if db is not None:
            db.close()


def _deliver_outcomes(group: list[_Job], outcomes: list[Outcome]) -> None:
    outcomes_by_loop = defaultdict(list)
    for job, (value, failed) in zip(group, outcomes, strict=True):
        outcomes_by_loop[job.loop].append((job.on_done, value, failed))
    for loop, settled in outcomes_by_loop.items():
        with suppress(RuntimeError):  # the loop has closed, with all that waited in it
            loop.call_soon_threadsafe(_run_callbacks, settled)


def _run_callbacks(settled: list[tuple[DoneCallback, Any, Exception | None]]) -> None:
    for on_done, value, failed in settled:
        on_done(value, failed and _caller_error(failed))


def _set_future(done: asyncio.Future[Any], value: Any, problem: BaseException | None) -> None:
    if done.done():
        return
    if problem is None:
        done.set_result(value)
    else:
        done.set_exception(problem)


def _caller_error(problem: Exception) -> Exception:
    """A failure of SQLite's as the caller should see it, and a new one for each caller."""
    if not isinstance(problem, sqlite3.Error):
        return problem
    failure = StoreError(f"SQLite: {problem}")
    failure.__cause__ = problem
    return failure


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

    supports: frozenset[StoreFeature] = frozenset({"processes", "transaction"})

    def __init__(
        self, path: str | os.PathLike[str], *, durable: bool = True, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = os.path.abspath(path)
        self.durable = durable
        # The audit log is written by the same thread, and shares its transactions.
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

    def transaction(self, work: Work[Any], on_done: DoneCallback) -> None:
        self.writer.submit(work, on_done)

    async def close(self) -> None:
        """Carry out the accepted calls, then close the file. Listeners get a StoreError."""
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
