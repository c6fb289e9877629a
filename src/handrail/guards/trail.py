"""The audit trail of a server: what is recorded is on the disk before the one who recorded it goes on (P-15, P-17).

Records that arrive while others are on their way to the disk share the next way there. In a SQLite file that is one
transaction, and what a record changes in the store, such as an approval that it uses up, is part of it (P-19).
`chain.py` has the form of a record.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, repeat, takewhile
from pathlib import Path
from shutil import disk_usage
from sqlite3 import Connection
from typing import Annotated, Literal, Protocol, get_args

from msgspec import Meta, Struct
from msgspec.json import encode

from handrail import __version__
from handrail.guards.chain import MAX_BYTES, ORIGIN, RESERVED, Event, Link, TrailError, frame, link_of, notice
from handrail.guards.trail_jsonl import JsonlFile
from handrail.model import Object
from handrail.stores import Delete, Put, Store
from handrail.stores.sqlite import STEP, SqliteStore, commit

__all__ = ["DATABASES", "Record", "Then", "Trail", "TrailError", "TrailSettings", "open_trail"]

log = logging.getLogger("handrail")

DATABASES = (".db", ".sqlite", ".sqlite3")
TOGETHER = 16
INSERT = "INSERT INTO audit VALUES (?, ?, ?)"
INSERT_TOGETHER = "INSERT INTO audit VALUES " + ", ".join(f"(?1 + {i}, ?2, ?{i + 3})" for i in range(TOGETHER))
MAX_NOTES = 1000
NOTE_SECONDS = 0.05  # a record that nobody waits for may wait for others to share the way with
GATHER_SECONDS, GATHER_RECORDS = 0.002, 256
DAY = 86_400.0
RESERVED_MEGABYTES = 4  # of a disk that is nearly full: for what becomes of the calls that have begun

UNMET = TrailError("a condition does not hold")  # of a change; never raised

Sync = Literal["every-call", "power-cut-loses-last-calls"]
Record = Object | Event
"""Of a call or of an approval; it has an `event`, and `call` is the same for all of one call."""
Changes = tuple[Put | Delete, ...]
Then = Callable[[TrailError | None], None]
Item = tuple[bytes, Changes, Then | None]
"""A record as JSON, what changes with it, and who is told."""


class TrailSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a trail is kept."""

    sync: Annotated[
        Sync, Meta(description="When records reach the disk: before a call goes on, or when the system gets to it.")
    ] = "every-call"
    fail_open: Annotated[
        bool, Meta(description="Let calls go on while the trail cannot be written, and record how many did.")
    ] = False
    keep_days: Annotated[int, Meta(ge=0, description="Days for which a record is kept; 0 keeps all.")] = 365
    rotate_megabytes: Annotated[
        int, Meta(ge=1, description="Megabytes at which a file of lines is followed by a new one.")
    ] = 64
    rotate_days: Annotated[int, Meta(ge=0, description="Days after which it is; 0: only by its size.")] = 30

    def __post_init__(self) -> None:
        if self.sync not in get_args(Sync):
            raise ValueError(f"sync: {self.sync!r} is neither {' nor '.join(map(repr, get_args(Sync)))}")
        for name, least in (("keep_days", 0), ("rotate_megabytes", 1), ("rotate_days", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is less than {least}")


class Trail(Protocol):
    """Where the records of calls go."""

    store: Store | None  # in which it makes changes

    async def write(self, record: Record, changes: Sequence[Put | Delete] = ()) -> bool:
        """Whether it was written, and the changes made: it is on the disk then.

        False: a condition of theirs did not hold, and nothing was written. A TrailError: it could not be written. A
        call that is cancelled may still be carried out.
        """

    def hand(self, record: Record, then: Then | None = None) -> None:
        """Have it written, and go on; `then` is called when it is on the disk, or with the reason why it is not.

        Without a `then` it is a note, of a refusal: it may take a while, and if too many wait, they are only counted.
        """

    async def close(self) -> None:
        """Finish what was asked for, then let go of the file."""


class Sink(Protocol):
    """Where lines are kept. Nobody appends while another append is on its way."""

    name: str
    path: str

    def append(self, items: Sequence[Item], writer: bytes) -> asyncio.Future[list[bool]]:
        """Write the records, in order; which ones were written, because their changes could be made."""

    async def close(self) -> None: ...


def open_trail(
    where: str | Path | SqliteStore,
    settings: TrailSettings | None = None,
    *,
    store: Store | None = None,
    clock: Callable[[], float] = time.time,
    free: Callable[[str], int] = lambda folder: disk_usage(folder).free,
) -> Trail:
    """The trail in a store's file, in a SQLite file (`audit.db`), or in a file of lines (`audit.jsonl`).

    A file of lines has no part in a transaction of `store`: there a change is made first, and then the record written.
    Who dies in between has used up an approval for nothing; it is never used twice.
    """
    settings = settings or TrailSettings()
    keep = settings.keep_days * DAY
    durable = settings.sync == "every-call"
    if isinstance(where, SqliteStore):
        if where.durable != durable:
            raise ValueError(f"sync: {settings.sync!r} is not how the store was opened (durable={where.durable})")
        return _Trail(SqliteSink(where, keep), settings, free, where)
    path = Path(where).absolute()
    if path.suffix in DATABASES:
        kept = SqliteStore(path, durable=durable, clock=clock)
        return _Trail(SqliteSink(kept, keep, path), settings, free, kept)
    if path.suffix != ".jsonl":
        raise ValueError(f"{path.name}: a trail's name ends in .jsonl, or in {', '.join(DATABASES)} for SQLite")
    rotate = (settings.rotate_megabytes * 1_000_000, settings.rotate_days * DAY)
    file = JsonlFile(path, durable, rotate, keep, clock)
    return _Trail(file, settings, free, store, store.commit if store else _unable)


async def _unable(changes: Changes) -> bool:
    raise ValueError("change: a trail of lines can only make one in the store it was given")


class _Trail:
    def __init__(
        self,
        sink: Sink,
        settings: TrailSettings,
        free: Callable[[str], int],
        store: Store | None,
        change_first: Callable[[Changes], Awaitable[bool]] | None = None,
    ) -> None:
        self._sink = sink
        self.store = store
        self._change_first = change_first  # where a sink cannot change anything with a record
        self._fail_open = settings.fail_open
        self._free = free
        self._has_room = False  # as far as is known since something was written
        self._writer = secrets.token_hex(8).encode()
        self._is_begun = self._is_closed = False
        self._waiting: list[Item] = []
        self._notes = 0
        self._missed: Counter[str] = Counter()
        self._flushing: asyncio.Task[None] | None = None
        self._later: asyncio.TimerHandle | None = None  # when notes are flushed that nobody else takes along
        self._loop: asyncio.AbstractEventLoop  # while flushing

    async def write(self, record: Record, changes: Sequence[Put | Delete] = ()) -> bool:
        body = _encoded(record)
        self._look_for_room(record)
        for each in changes:
            each.key.encode()  # what cannot be written must not stop those who share the way
        if changes and self._change_first is not None:
            if not await self._change_first(tuple(changes)):
                return False
            changes = ()
        self._begin()
        done: asyncio.Future[bool] = self._loop.create_future()
        self._waiting.append((body, tuple(changes), partial(_settle, done)))
        return await done

    def hand(self, record: Record, then: Then | None = None) -> None:
        if then is None:
            self._note(record)
            return
        body = _encoded(record)
        try:
            self._look_for_room(record)
            if self._flushing is None or self._is_closed:
                self._begin()
        except TrailError as problem:
            asyncio.get_running_loop().call_soon(then, problem)
            return
        self._waiting.append((body, (), then))

    def _look_for_room(self, record: Record) -> None:
        """The last of a disk is for what becomes of calls that have begun, not for new ones (P-17)."""
        if self._has_room or self._fail_open:
            return
        if (record.event if isinstance(record, Event) else record["event"]) != "intent":
            return
        with suppress(OSError):  # whoever writes will hear of it
            free = self._free(os.path.dirname(self._sink.path))
            if free < RESERVED_MEGABYTES * 1_000_000:
                least = f"less than the {RESERVED_MEGABYTES} MB kept for calls that have begun"
                raise TrailError(f"{self._sink.name}: the disk has {free:,} bytes left, {least}; nothing was recorded")
        self._has_room = True

    def _note(self, record: Record) -> None:
        if self._is_closed or self._notes >= MAX_NOTES:
            self._missed["refusals"] += 1
            return
        self._waiting.append((_encoded(record), (), None))
        self._notes += 1
        if self._notes > GATHER_RECORDS:
            self._begin()
        else:
            self._begin_later()

    def _begin_later(self) -> None:
        if self._later is None and self._flushing is None and not self._is_closed:
            self._later = asyncio.get_running_loop().call_later(NOTE_SECONDS, self._begin)

    async def close(self) -> None:
        self._is_closed = True
        while self._waiting or self._flushing is not None:
            await asyncio.wait([self._flush_now()])
        if self._missed:
            await self._append([])
        await self._sink.close()

    def _begin(self) -> None:
        if self._is_closed:
            raise TrailError(f"{self._sink.name}: the trail was closed")
        self._flush_now()

    def _flush_now(self) -> asyncio.Task[None]:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._flushing is None:
            self._loop = asyncio.get_running_loop()
            self._flushing = self._loop.create_task(self._flush())
        return self._flushing

    async def _flush(self) -> None:
        enough = GATHER_RECORDS
        try:
            while True:
                await self._gathered(enough)
                batch, self._waiting, self._notes = self._waiting, [], 0
                await self._append(batch)
                if len(self._waiting) == self._notes:  # nobody waits
                    return
                enough = len(batch)  # all those who have just gone on are back
        finally:
            self._flushing = None
            if self._notes:
                self._begin_later()

    async def _gathered(self, enough: int) -> None:
        """As long as every turn of the loop brings more records, they share the way, which costs most of all."""
        end, known = self._loop.time() + GATHER_SECONDS, -1
        while known < len(self._waiting) < enough and self._loop.time() < end:
            known = len(self._waiting)
            await asyncio.sleep(0)

    async def _append(self, batch: list[Item]) -> None:
        missed, self._missed, self._has_room = self._missed, Counter(), False
        own: list[Item] = []
        if not self._is_begun:
            own.append((notice("opened", version=__version__, process=os.getpid()), (), None))
        if missed:
            own.append((notice("gap", **missed), (), None))
        try:
            written = await self._sink.append([*own, *batch], self._writer)
        except Exception as problem:  # whatever it is, those who wait have to hear of it
            self._missed += missed
            found = [self._missing(item, problem) for item in batch]
        else:
            self._is_begun = True
            found = [None if is_written else UNMET for is_written in written[len(own) :]]
        for (_, _, then), trouble in zip(batch, found, strict=True):
            if then is not None:
                try:
                    then(trouble)
                except Exception:  # the others have to hear of it too
                    log.exception("whoever waited for a record could not go on")

    def _missing(self, item: Item, problem: Exception) -> TrailError | None:
        """What is said of a record that could not be written."""
        _, changes, then = item
        if then is None:
            self._missed["refusals"] += 1
            return None
        if self._fail_open and not changes:  # an approval that could not be used up is none
            self._missed["records"] += 1
            return None
        failure = TrailError(f"{self._sink.name}: {problem}; nothing was recorded")
        failure.__cause__ = problem
        return failure


def _settle(done: asyncio.Future[bool], problem: TrailError | None) -> None:
    if done.done():
        return
    if problem is None or problem is UNMET:
        done.set_result(problem is None)
    else:
        done.set_exception(problem)


def _encoded(record: Record) -> bytes:
    if type(record) is dict and ("event" not in record or not RESERVED.isdisjoint(record)):
        raise ValueError(f"a record has an event, and no {', '.join(sorted(RESERVED))} of its own: {sorted(record)}")
    body = encode(record)
    if len(body) > MAX_BYTES:
        raise ValueError(f"a record of {len(body)} bytes: {MAX_BYTES} are the most")
    return body


class SqliteSink:
    """In the table `audit` of a store's file, in the store's own transactions."""

    def __init__(self, store: SqliteStore, keep_seconds: float, path: Path | None = None) -> None:
        self.name = str(path or "audit trail")
        self.path = store.path
        self._store = store
        self._is_ours = path is not None
        self._keep = keep_seconds

    def append(self, items: Sequence[Item], writer: bytes) -> asyncio.Future[list[bool]]:
        return self._store.writer.start(partial(_append, items, writer, self._keep))

    async def close(self) -> None:
        if self._is_ours:
            await self._store.close()


def _append(items: Sequence[Item], writer: bytes, keep: float, db: Connection, now: float) -> list[bool]:
    row = db.execute("SELECT number, line FROM audit ORDER BY number DESC LIMIT 1").fetchone()
    last = Link(row[0], (link_of(row[1]) or ORIGIN).hash) if row else ORIGIN
    written = [not changes or commit(changes, db, now) for _, changes, _ in items]
    bodies = [item[0] for item, is_written in zip(items, written, strict=True) if is_written]
    if keep and (trimmed := _trim(keep, db, now)):
        bodies.append(trimmed)
    lines, _ = frame(bodies, writer, now, last)
    first, single = last.number + 1, len(lines) % TOGETHER
    db.executemany(INSERT, zip(count(first), repeat(now), lines[:single]))
    for at in range(single, len(lines), TOGETHER):  # a row by itself takes a third more
        db.execute(INSERT_TOGETHER, (first + at, now, *lines[at : at + TOGETHER]))
    return written


def _trim(keep: float, db: Connection, now: float) -> bytes | None:
    """Delete what is too old, and tell where the trail begins by now.

    It waits until there is a day too much, or a tenth: else every transaction would have something to tell.
    """
    oldest = db.execute("SELECT time FROM audit ORDER BY number LIMIT 1").fetchone()
    if not oldest or oldest[0] >= now - keep - min(DAY, keep / 10):
        return None
    rows = db.execute("SELECT number, time FROM audit ORDER BY number LIMIT ?", (STEP,)).fetchall()
    to = [number for number, _ in takewhile(lambda row: row[1] < now - keep, rows)][-1]
    (line,) = db.execute("SELECT line FROM audit WHERE number = ?", (to,)).fetchone()
    db.execute("DELETE FROM audit WHERE number <= ?", (to,))
    return notice("trimmed", to=to, digest=(link_of(line) or ORIGIN).hash.decode())
