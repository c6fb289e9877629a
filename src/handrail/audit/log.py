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
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Annotated, Literal, Protocol, get_args

from msgspec import Meta, Struct
from msgspec.json import encode
from msgspec.structs import asdict, replace

from handrail import __version__, stores
from handrail.audit.checkpoints import Checkpoints, CheckpointWriter
from handrail.audit.format import (
    DAY_SECONDS,
    MAX_RECORD_BYTES,
    RESERVED_MEMBERS,
    AuditRecord,
    NotedHead,
    Retention,
    TrailError,
    UnsettledError,
    notice,
)
from handrail.audit.jsonl import JsonlFile
from handrail.audit.sqlite import SqliteTable
from handrail.model import Object
from handrail.protocol.http_rules import HttpPost
from handrail.stores import Delete, DoneCallback, Put, Store

__all__ = ["DATABASES", "Callback", "RecordBody", "Trail", "TrailError", "TrailSettings", "open_trail"]

log = logging.getLogger("handrail")

DATABASES = (".db", ".sqlite", ".sqlite3")
MAX_NOTES = 1000
NOTE_DELAY_SECONDS = 0.05  # a note waits for other records, to share their write
GATHER_SECONDS, GATHER_RECORDS = 0.002, 256
RESERVED_MEGABYTES = 4  # of a disk that is nearly full: for what becomes of the calls that have begun

LINE_BREAK_ESCAPES = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}
"""What some readers take for the end of a line; JSON writes all others as escapes anyway."""

CONDITION_FAILED = TrailError("a condition does not hold")  # of a change; never raised

Sync = Literal["every-call", "power-cut-loses-last-calls"]
RecordBody = AuditRecord | Object
"""What a trail writes: a record of this package, or an object of its own with an `event`."""
Changes = tuple[Put | Delete, ...]
Callback = Callable[[TrailError | None], None]


class TrailSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a trail."""

    sync: Annotated[
        Sync, Meta(description="When records reach the disk: before a call goes on, or when the system gets to it.")
    ] = "every-call"
    fail_open: Annotated[
        bool, Meta(description="Let calls go on while the trail cannot be written, and record how many did.")
    ] = False
    keep_days: Annotated[int, Meta(ge=0, description="Days for which a record is kept; 0 keeps all.")] = 365
    max_megabytes: Annotated[
        int, Meta(ge=0, description="Megabytes of records above which the oldest are deleted; 0: no limit.")
    ] = 0
    rotate_megabytes: Annotated[
        int, Meta(ge=1, description="Megabytes at which a file of lines is followed by a new one.")
    ] = 64
    rotate_days: Annotated[int, Meta(ge=0, description="Days after which it is; 0: only by its size.")] = 30
    checkpoints: Checkpoints = Checkpoints()

    def __post_init__(self) -> None:
        if self.sync not in get_args(Sync):
            raise ValueError(f"sync: {self.sync!r} is neither {' nor '.join(map(repr, get_args(Sync)))}")
        for name, least in (("keep_days", 0), ("max_megabytes", 0), ("rotate_megabytes", 1), ("rotate_days", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is less than {least}")
        if self.fail_open and self.checkpoints.required:
            raise ValueError("checkpoints.required: fail_open lets calls go on without a record; choose one of them")

    @property
    def limits(self) -> Retention:
        return Retention(self.keep_days, self.max_megabytes)

    @property
    def unsigned(self) -> TrailSettings:
        """These settings for a command beside the server: the server's next checkpoint covers what it records."""
        return replace(self, checkpoints=Checkpoints())


class Trail(Protocol):
    """Where the records of calls go."""

    store: Store | None  # in which it makes changes

    async def write(self, record: RecordBody, changes: Sequence[Put | Delete] = ()) -> bool:
        """Return whether the record is on the disk and the changes are made.

        False: a condition of theirs did not hold, and nothing was written. A TrailError: it could not be written. A
        call that is cancelled may still be carried out.
        """

    def submit(self, record: RecordBody, callback: Callback | None = None) -> None:
        """Have it written, and go on; `then` is called when it is on the disk, or with the reason why it is not.

        Without a `then` it is a note, of a refusal: it may take a while, and if too many wait, they are only counted.
        """

    async def close(self) -> None:
        """Finish what was asked for, then let go of the file."""


class Sink(Protocol):
    """Where lines are stored. There is one append at a time."""

    name: str
    path: str

    def append(
        self, bodies: list[bytes], changes: Mapping[int, Changes], writer: bytes, callback: DoneCallback
    ) -> None:
        """Write the records in order, and with some of them, counted from 0, make changes.

        `then` hears which were not written, because a condition of their changes did not hold.
        """

    async def heads(self) -> Mapping[str, NotedHead]:
        """Return the end of each chain as it is on the disk, by the chain's name; a file has one, without a name."""

    async def close(self) -> None: ...


def open_trail(
    where: str | Path | Store,
    settings: TrailSettings | None = None,
    *,
    store: Store | None = None,
    clock: Callable[[], float] = time.time,
    free_bytes: Callable[[str], int] = lambda folder: disk_usage(folder).free,
    name: str = "",
    post: HttpPost | None = None,
) -> Trail:
    """The trail in PostgreSQL, in the database of a store, in a SQLite file (`.db`), or in a file of lines (`.jsonl`).

    With a `store` beside a file there is no transaction over both: a change is made first, and then the record written.
    A process that dies in between has used up an approval for nothing; it is never used twice. `name` is that of the
    server, which a database of several servers tells apart. `post` sends checkpoints to a webhook.
    """
    settings = settings or TrailSettings()
    new_trail = partial(_Trail, settings, free_bytes, clock, post)
    durable = settings.sync == "every-call"
    if isinstance(where, str) and stores.is_database(where):
        database = stores.open(where, durable=durable, name=name)
        table: Sink = _postgres_table(database, settings.limits, clock, owns_store=True)
        return _Trail(settings, _unlimited, clock, post, table, database)
    if not isinstance(where, str | Path):
        if stores.supports(where, "postgres"):
            table = _postgres_table(where, settings.limits, clock, owns_store=False)
            return _Trail(settings, _unlimited, clock, post, table, where)
        if not stores.supports(where, "transaction"):
            raise ValueError("audit: this store has no transactions for records; write them to a file of lines")
        if where.durable != durable:
            raise ValueError(f"sync: {settings.sync!r} is not how the store was opened (durable={where.durable})")
        return new_trail(SqliteTable(where, settings.limits), where)
    path = Path(where).absolute()
    if path.suffix in DATABASES:
        database = stores.open(path, durable=durable, clock=clock)
        table = SqliteTable(database, settings.limits, path)
        if store is not None:
            return new_trail(table, store, store.commit)
        return new_trail(table, database)
    if path.suffix != ".jsonl":
        raise ValueError(f"{path.name}: a trail's name ends in .jsonl, or in {', '.join(DATABASES)} for SQLite")
    rotate = (settings.rotate_megabytes * 1_000_000, settings.rotate_days * DAY_SECONDS)
    file = JsonlFile(path, durable, rotate, settings.limits, clock)
    return new_trail(file, store, store.commit if store else _reject_changes)


def _postgres_table(store: Store, limits: Retention, clock: Callable[[], float], *, owns_store: bool) -> Sink:
    from handrail.audit.postgres import PostgresTable  # deferred: it needs the extra `postgres`
    from handrail.stores.postgres import PostgresStore

    assert isinstance(store, PostgresStore)
    return PostgresTable(store, limits, clock, owns_store=owns_store)


def _unlimited(folder: str) -> int:
    """Return the space left on the disk of a database, which is not ours to know."""
    return sys.maxsize


async def _reject_changes(changes: Changes) -> bool:
    raise ValueError("change: a trail of lines can only make one in the store it was given")


class _Trail:
    def __init__(
        self,
        settings: TrailSettings,
        free_bytes: Callable[[str], int],
        clock: Callable[[], float],
        post: HttpPost | None,
        sink: Sink,
        store: Store | None,
        change_first: Callable[[Changes], Awaitable[bool]] | None = None,
    ) -> None:
        self._sink = sink
        self.store = store
        self._change_first = change_first  # where a sink cannot change anything with a record
        self._fail_open = settings.fail_open
        self._limits = settings.limits
        self._free_bytes = free_bytes
        self._has_disk_space = False  # checked since the last write
        self._writer = secrets.token_hex(8).encode()
        self._signing: CheckpointWriter | None = None
        if settings.checkpoints.key:
            writer, write = self._writer.decode(), self._write_checkpoint
            place = sink.path or sink.name
            self._signing = CheckpointWriter(settings.checkpoints, place, writer, sink.heads, write, clock, post)
            with suppress(RuntimeError):  # without a loop the key is read with the first record
                self._signing.wake()
        self._is_opened = self._is_closed = False
        self._bodies: list[bytes] = []  # of the records that wait
        self._callbacks: list[Callback | None] = []  # of each record
        self._changes: dict[int, Changes] = {}
        self._notes = 0
        self._lost: Counter[str] = Counter()
        self._is_busy = False  # records are gathered, or on their way
        self._idle: asyncio.Future[None] | None = None  # who waits until it is not
        self._gathered_count, self._batch_size, self._gather_deadline = (
            -1,
            GATHER_RECORDS,
            0.0,
        )  # how many are gathered, and until when
        self._flush_timer: asyncio.TimerHandle | None = None  # flushes the notes that no other record took along
        self._loop: asyncio.AbstractEventLoop  # while it is busy

    @property
    def trouble(self) -> str:
        """Why the log is not signed now, where it should be."""
        return "" if self._signing is None else self._signing.problem

    async def write(self, record: RecordBody, changes: Sequence[Put | Delete] = ()) -> bool:
        body = _encode_record(record)
        self._check_disk_space(record)
        for change in changes:
            change.key.encode()  # what cannot be written must not stop those who share the way
        if changes and self._change_first is not None:
            if not await self._change_first(tuple(changes)):
                return False
            changes = ()
        self._start_gathering()
        done: asyncio.Future[bool] = self._loop.create_future()
        if changes:
            self._changes[len(self._bodies)] = tuple(changes)
        self._bodies.append(body)
        self._callbacks.append(partial(_resolve, done))
        return await done

    async def _write_checkpoint(self, record: Object) -> bool:
        """Write it even when the trail is being closed, and never leave it out: it would count as signed."""
        self._gather_now()
        done: asyncio.Future[bool] = self._loop.create_future()
        self._changes[len(self._bodies)] = ()  # no change, and yet no record that may fail open
        self._bodies.append(_encode_record(record))
        self._callbacks.append(partial(_resolve, done))
        return await done

    def submit(self, record: RecordBody, callback: Callback | None = None) -> None:
        if callback is None:
            self._submit_note(record)
            return
        body = _encode_record(record)
        try:
            self._check_disk_space(record)
            if not self._is_busy or self._is_closed or self._loop.is_closed():
                self._start_gathering()
        except TrailError as problem:
            asyncio.get_running_loop().call_soon(callback, problem)
            return
        self._bodies.append(body)
        self._callbacks.append(callback)

    def _check_disk_space(self, record: RecordBody) -> None:
        """The last of a disk is for what becomes of calls that have begun, not for new ones (P-17)."""
        if self._has_disk_space or self._fail_open:
            return
        if (record.event if isinstance(record, AuditRecord) else record["event"]) != "intent":
            return
        if (signing := self._signing) is not None and signing.required and signing.problem:
            raise TrailError(f"{self._sink.name}: not signed: {signing.problem}; nothing was recorded")
        with suppress(OSError):  # the write itself will report it
            free = self._free_bytes(os.path.dirname(self._sink.path))
            if free < RESERVED_MEGABYTES * 1_000_000:
                least = f"less than the {RESERVED_MEGABYTES} MB kept for calls that have begun"
                raise TrailError(f"{self._sink.name}: the disk has {free:,} bytes left, {least}; nothing was recorded")
        self._has_disk_space = True

    def _submit_note(self, record: RecordBody) -> None:
        if self._is_closed or self._notes >= MAX_NOTES:
            self._lost["refusals"] += 1
            return
        self._bodies.append(_encode_record(record))
        self._callbacks.append(None)
        self._notes += 1
        if self._notes > GATHER_RECORDS:
            self._start_gathering()
        else:
            self._schedule_flush()

    def _schedule_flush(self) -> None:
        if self._flush_timer is None and not self._is_busy and not self._is_closed:
            self._flush_timer = asyncio.get_running_loop().call_later(NOTE_DELAY_SECONDS, self._start_gathering)

    async def close(self) -> None:
        self._is_closed = True
        while self._bodies or self._is_busy:
            await self._flush()
        if self._lost:
            await self._flush()
        if self._signing is not None:
            await self._signing.close()
        await self._sink.close()

    async def _flush(self) -> None:
        self._gather_now()
        self._idle = self._idle or self._loop.create_future()
        await asyncio.wait([self._idle])

    def _start_gathering(self) -> None:
        if self._is_closed:
            raise TrailError(f"{self._sink.name}: the trail was closed")
        self._gather_now()

    def _gather_now(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if not self._is_busy or self._loop.is_closed():  # with all who waited in it
            self._is_busy, self._loop = True, asyncio.get_running_loop()
            self._gather_again()

    def _gather_again(self) -> None:
        self._gathered_count, self._gather_deadline = -1, self._loop.time() + GATHER_SECONDS
        self._loop.call_soon(self._gather)

    def _gather(self) -> None:
        """As long as every turn of the loop brings more records, they share the way, which costs most of all."""
        previous_count, self._gathered_count = self._gathered_count, len(self._bodies)
        if previous_count < self._gathered_count < self._batch_size and self._loop.time() < self._gather_deadline:
            self._loop.call_soon(self._gather)
        else:
            self._send()

    def _send(self) -> None:
        bodies, callbacks, changes, lost = self._bodies, self._callbacks, self._changes, self._lost
        self._bodies, self._callbacks, self._changes, self._lost = [], [], {}, Counter()
        self._notes, self._has_disk_space = 0, False
        notices = []
        if not self._is_opened:
            notices.append(notice("opened", version=__version__, process=os.getpid(), **asdict(self._limits)))
        if lost:
            notices.append(notice("gap", **lost))
        if notices:
            bodies, changes = notices + bodies, {len(notices) + at: each for at, each in changes.items()}
        on_written = partial(self._on_written, callbacks, len(notices), frozenset(changes), lost)
        try:
            self._sink.append(bodies, changes, self._writer, on_written)
        except Exception as problem:  # it was closed
            self._loop.call_soon(on_written, None, problem)

    def _on_written(
        self,
        callbacks: list[Callback | None],
        first: int,
        changing: frozenset[int],
        lost: Counter[str],
        failed_conditions: Collection[int] | None,
        problem: BaseException | None,
    ) -> None:
        """Those who wait go on, and what they record now goes the same way."""
        if failed_conditions is None:
            self._lost += lost
        else:
            self._is_opened = True
            if (signing := self._signing) is not None:
                signing.pending += len(callbacks)
                if signing.pending >= signing.wake_at:
                    signing.wake()
        for at, callback in enumerate(callbacks, first):
            if failed_conditions is None:
                failure = self._write_failure(callback, at in changing, problem)
            else:
                failure = CONDITION_FAILED if at in failed_conditions else None
            if callback is not None:
                try:
                    callback(failure)
                except BaseException:  # the others have to hear of it too
                    log.exception("audit: the callback of a record failed")
        self._batch_size = len(callbacks)
        if len(self._bodies) == self._notes:  # only notes are left
            self._on_idle()
        elif len(self._bodies) >= self._batch_size:  # all those who have just gone on are back
            self._send()
        else:
            self._gather_again()

    def _on_idle(self) -> None:
        self._is_busy = False
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None
        if self._notes:
            self._schedule_flush()

    def _write_failure(
        self, callback: Callback | None, changes: bool, problem: BaseException | None
    ) -> TrailError | None:
        """Return the error of a record that could not be written; None if the call may go on."""
        if callback is None:
            self._lost["refusals"] += 1
            return None
        if self._fail_open and not changes:  # an approval that could not be used up is none
            self._lost["records"] += 1
            return None
        ending = "" if isinstance(problem, UnsettledError) else "; nothing was recorded"
        failure = TrailError(f"{self._sink.name}: {problem}{ending}")
        failure.__cause__ = problem
        return failure


def _resolve(future: asyncio.Future[bool], problem: TrailError | None) -> None:
    if future.done():
        return
    if problem is None or problem is CONDITION_FAILED:
        future.set_result(problem is None)
    else:
        future.set_exception(problem)


def _encode_record(record: RecordBody) -> bytes:
    if type(record) is dict and ("event" not in record or not RESERVED_MEMBERS.isdisjoint(record)):
        raise ValueError(
            f"a record has an event, and no {', '.join(sorted(RESERVED_MEMBERS))} of its own: {sorted(record)}"
        )
    body = encode(record)
    if not body.isascii():
        for character, escape in LINE_BREAK_ESCAPES.items():
            body = body.replace(character, escape)
    if len(body) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(body)} bytes: {MAX_RECORD_BYTES} are the most")
    return body
