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
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Annotated, Literal, Protocol, get_args

from msgspec import Meta, Struct
from msgspec.json import encode
from msgspec.structs import asdict

from handrail import __version__
from handrail.audit.format import DAY, MAX_BYTES, RESERVED, Event, Limits, TrailError, notice
from handrail.audit.jsonl import JsonlFile
from handrail.audit.sqlite import SqliteTable
from handrail.model import Object
from handrail.stores import Delete, Put, Store
from handrail.stores.lane import Told
from handrail.stores.sqlite import SqliteStore

__all__ = ["DATABASES", "Record", "Then", "Trail", "TrailError", "TrailSettings", "open_trail"]

log = logging.getLogger("handrail")

DATABASES = (".db", ".sqlite", ".sqlite3")
MAX_NOTES = 1000
NOTE_SECONDS = 0.05  # a record that nobody waits for may wait for others to share the way with
GATHER_SECONDS, GATHER_RECORDS = 0.002, 256
RESERVED_MEGABYTES = 4  # of a disk that is nearly full: for what becomes of the calls that have begun

BREAKS = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}
"""What some readers take for the end of a line; JSON writes all others as escapes anyway."""

UNMET = TrailError("a condition does not hold")  # of a change; never raised

Sync = Literal["every-call", "power-cut-loses-last-calls"]
Record = Object | Event
"""Of a call or of an approval; it has an `event`, and `call` is the same for all of one call."""
Changes = tuple[Put | Delete, ...]
Then = Callable[[TrailError | None], None]


class TrailSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a trail is kept."""

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

    def __post_init__(self) -> None:
        if self.sync not in get_args(Sync):
            raise ValueError(f"sync: {self.sync!r} is neither {' nor '.join(map(repr, get_args(Sync)))}")
        for name, least in (("keep_days", 0), ("max_megabytes", 0), ("rotate_megabytes", 1), ("rotate_days", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is less than {least}")

    @property
    def limits(self) -> Limits:
        return Limits(self.keep_days, self.max_megabytes)


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

    def append(self, bodies: list[bytes], changes: Mapping[int, Changes], writer: bytes, then: Told) -> None:
        """Write the records in order, and with some of them, counted from 0, make changes.

        `then` hears which were not written, because a condition of their changes did not hold.
        """

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
    durable = settings.sync == "every-call"
    if isinstance(where, SqliteStore):
        if where.durable != durable:
            raise ValueError(f"sync: {settings.sync!r} is not how the store was opened (durable={where.durable})")
        return _Trail(SqliteTable(where, settings.limits), settings, free, where)
    path = Path(where).absolute()
    if path.suffix in DATABASES:
        kept = SqliteStore(path, durable=durable, clock=clock)
        return _Trail(SqliteTable(kept, settings.limits, path), settings, free, kept)
    if path.suffix != ".jsonl":
        raise ValueError(f"{path.name}: a trail's name ends in .jsonl, or in {', '.join(DATABASES)} for SQLite")
    rotate = (settings.rotate_megabytes * 1_000_000, settings.rotate_days * DAY)
    file = JsonlFile(path, durable, rotate, settings.limits, clock)
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
        self._limits = settings.limits
        self._free = free
        self._has_room = False  # as far as is known since something was written
        self._writer = secrets.token_hex(8).encode()
        self._is_begun = self._is_closed = False
        self._bodies: list[bytes] = []  # of the records that wait
        self._thens: list[Then | None] = []  # who is told of each
        self._changes: dict[int, Changes] = {}
        self._notes = 0
        self._missed: Counter[str] = Counter()
        self._is_busy = False  # records are gathered, or on their way
        self._idle: asyncio.Future[None] | None = None  # who waits until it is not
        self._known, self._enough, self._until = -1, GATHER_RECORDS, 0.0  # how many are gathered, and until when
        self._later: asyncio.TimerHandle | None = None  # when notes are flushed that nobody else takes along
        self._loop: asyncio.AbstractEventLoop  # while it is busy

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
        if changes:
            self._changes[len(self._bodies)] = tuple(changes)
        self._bodies.append(body)
        self._thens.append(partial(_settle, done))
        return await done

    def hand(self, record: Record, then: Then | None = None) -> None:
        if then is None:
            self._note(record)
            return
        body = _encoded(record)
        try:
            self._look_for_room(record)
            if not self._is_busy or self._is_closed or self._loop.is_closed():
                self._begin()
        except TrailError as problem:
            asyncio.get_running_loop().call_soon(then, problem)
            return
        self._bodies.append(body)
        self._thens.append(then)

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
        self._bodies.append(_encoded(record))
        self._thens.append(None)
        self._notes += 1
        if self._notes > GATHER_RECORDS:
            self._begin()
        else:
            self._begin_later()

    def _begin_later(self) -> None:
        if self._later is None and not self._is_busy and not self._is_closed:
            self._later = asyncio.get_running_loop().call_later(NOTE_SECONDS, self._begin)

    async def close(self) -> None:
        self._is_closed = True
        while self._bodies or self._is_busy:
            await self._all_sent()
        if self._missed:
            await self._all_sent()
        await self._sink.close()

    async def _all_sent(self) -> None:
        self._gather_now()
        self._idle = self._idle or self._loop.create_future()
        await asyncio.wait([self._idle])

    def _begin(self) -> None:
        if self._is_closed:
            raise TrailError(f"{self._sink.name}: the trail was closed")
        self._gather_now()

    def _gather_now(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if not self._is_busy or self._loop.is_closed():  # with all who waited in it
            self._is_busy, self._loop = True, asyncio.get_running_loop()
            self._gather_anew()

    def _gather_anew(self) -> None:
        self._known, self._until = -1, self._loop.time() + GATHER_SECONDS
        self._loop.call_soon(self._gather)

    def _gather(self) -> None:
        """As long as every turn of the loop brings more records, they share the way, which costs most of all."""
        known, self._known = self._known, len(self._bodies)
        if known < self._known < self._enough and self._loop.time() < self._until:
            self._loop.call_soon(self._gather)
        else:
            self._send()

    def _send(self) -> None:
        bodies, thens, changes, missed = self._bodies, self._thens, self._changes, self._missed
        self._bodies, self._thens, self._changes, self._missed = [], [], {}, Counter()
        self._notes, self._has_room = 0, False
        own = []
        if not self._is_begun:
            own.append(notice("opened", version=__version__, process=os.getpid(), **asdict(self._limits)))
        if missed:
            own.append(notice("gap", **missed))
        if own:
            bodies, changes = own + bodies, {len(own) + at: each for at, each in changes.items()}
        landed = partial(self._landed, thens, len(own), frozenset(changes), missed)
        try:
            self._sink.append(bodies, changes, self._writer, landed)
        except Exception as problem:  # it was closed
            self._loop.call_soon(landed, None, problem)

    def _landed(
        self,
        thens: list[Then | None],
        first: int,
        changing: frozenset[int],
        missed: Counter[str],
        unmet: Collection[int] | None,
        problem: BaseException | None,
    ) -> None:
        """Those who wait go on, and what they record now goes the same way."""
        if unmet is None:
            self._missed += missed
        else:
            self._is_begun = True
        for at, then in enumerate(thens, first):
            if unmet is None:
                trouble = self._missing(then, at in changing, problem)
            else:
                trouble = UNMET if at in unmet else None
            if then is not None:
                try:
                    then(trouble)
                except BaseException:  # the others have to hear of it too
                    log.exception("whoever waited for a record could not go on")
        self._enough = len(thens)
        if len(self._bodies) == self._notes:  # nobody waits
            self._rest()
        elif len(self._bodies) >= self._enough:  # all those who have just gone on are back
            self._send()
        else:
            self._gather_anew()

    def _rest(self) -> None:
        self._is_busy = False
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None
        if self._notes:
            self._begin_later()

    def _missing(self, then: Then | None, changes: bool, problem: BaseException | None) -> TrailError | None:
        """What is said of a record that could not be written."""
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
    if not body.isascii():
        for character, escape in BREAKS.items():
            body = body.replace(character, escape)
    if len(body) > MAX_BYTES:
        raise ValueError(f"a record of {len(body)} bytes: {MAX_BYTES} are the most")
    return body
