"""An audit log in PostgreSQL: a hash chain for each writer, since one chain would make all replicas wait for one row.

A writer is an open trail of one process; its chain is named as its records name it. Records that arrive while others
are on their way are written by the next statement, with all that changes with them (P-19). The number of a record is
unique in its chain, so one whose answer was lost can be sent again: either it takes its place, or the place is taken
and says by whom. What was on its way then comes too late for it. So a lost answer is looked up and never guessed.

Any process deletes what is too old, and says so in the chain that it shortens. A writer that finds its place taken
goes on after what is there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from secrets import token_hex
from typing import TYPE_CHECKING
from zlib import crc32

import asyncpg
from msgspec import Struct

from handrail.audit.format import (
    DAY_SECONDS,
    ORIGIN,
    ChainPosition,
    NotedHead,
    Retention,
    UnsettledError,
    frame,
    notice,
    position_of,
    trimmed,
)
from handrail.stores import Delete, DoneCallback, Put, StoreError
from handrail.stores.postgres import (
    DATABASE_ERRORS,
    KEY_LOCKS,
    LOCKS,
    LOST,
    PostgresStore,
    apply,
    begin,
    close_connection,
    locks_of,
)

if TYPE_CHECKING:
    from asyncpg import Connection, Record

__all__ = ["PostgresTable"]

log = logging.getLogger("handrail")

APPEND_SECONDS = 6.0  # of a group of records, with the time to look up what became of them
ATTEMPT_SECONDS = 3.0
TRIM_SECONDS = 60.0  # between two looks of a process for what is too old
MAX_TRIM_ROWS = 10_000  # of one transaction
TRIM_LOCK = -2
MAX_NOTICE_TRIES = 100

INSERT = (
    "WITH added AS (INSERT INTO handrail_audit (chain, number, time, line)"
    " SELECT $1, $2 + n, clock_timestamp(), line FROM unnest($3::bytea[]) WITH ORDINALITY AS lines (line, n))"
    " SELECT extract(epoch FROM clock_timestamp())::float8"
)
SELECT_END = "SELECT line FROM handrail_audit WHERE chain = $1 ORDER BY number DESC LIMIT 1"
# From one chain to the next by the index: a log has many more records than chains.
SELECT_HEADS = """
WITH RECURSIVE chains AS (
    (SELECT chain FROM handrail_audit ORDER BY chain LIMIT 1)
    UNION ALL
    SELECT (SELECT chain FROM handrail_audit WHERE chain > chains.chain ORDER BY chain LIMIT 1)
    FROM chains WHERE chain IS NOT NULL
)
SELECT chain, oldest.number, newest.line FROM chains,
    LATERAL (SELECT number FROM handrail_audit AS a WHERE a.chain = chains.chain ORDER BY number LIMIT 1) AS oldest,
    LATERAL (SELECT line FROM handrail_audit AS a WHERE a.chain = chains.chain ORDER BY number DESC LIMIT 1) AS newest
"""
# What is too old by the time that the records themselves have reached: a clock that is far ahead for a while makes no
# record older than it is.
SELECT_OLD = """
WITH settled AS (
    SELECT max(time) + $2 * interval '1 second' - $1 * interval '1 second' AS too_old FROM handrail_audit
    WHERE time <= clock_timestamp() - $2 * interval '1 second'
), old AS (
    SELECT chain, number, time FROM handrail_audit, settled WHERE time < too_old ORDER BY time LIMIT $3
)
SELECT chain, max(number) AS last, (array_agg(number ORDER BY number DESC))[2] AS last_but_one,
    (SELECT max(number) FROM handrail_audit AS a WHERE a.chain = old.chain) AS newest
FROM old, settled GROUP BY chain, too_old
HAVING (array_agg(time ORDER BY number))[least(count(*), 2)::int] < too_old - $2 * interval '1 second'
"""

Changes = tuple[Put | Delete, ...]


class _Group(Struct, eq=False):
    """Records that are written together, with what changes with them."""

    bodies: list[bytes]
    changes: Mapping[int, Changes]
    doubtful: dict[bytes, tuple[ChainPosition, frozenset[int]]] = {}
    """Attempts whose answer was lost, by the hash of the last record: that, and which records were left out."""

    @property
    def all_changes(self) -> list[Put | Delete]:
        return [each for changes in self.changes.values() for each in changes]


class PostgresTable:
    """The table `handrail_audit` in the database of a store, written by a connection of its own."""

    def __init__(
        self, store: PostgresStore, limits: Retention, clock: Callable[[], float], *, owns_store: bool
    ) -> None:
        if limits.max_megabytes:
            raise ValueError("max_megabytes: PostgreSQL keeps records by their age alone; use keep_days")
        self.name = "audit log"  # errors of the database name its place
        self.path = ""
        self._database = store.database
        self._store = store
        self._owns_store = owns_store
        self._limits = limits
        self._clock = clock
        self._ahead = 0.0  # of our clock, the one of the server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._db: Connection[Record] | None = None
        self._chain = ""
        self._last = ORIGIN  # of what is in our chain
        self._used_at = 0.0
        self._trim_at = time.monotonic()
        self._may_trim = True
        self._trimming: asyncio.Task[None] | None = None
        self._appending: asyncio.Task[None] | None = None

    def append(
        self, bodies: list[bytes], changes: Mapping[int, Changes], writer: bytes, callback: DoneCallback
    ) -> None:
        self._database.check_usable()
        if (loop := asyncio.get_running_loop()) is not self._loop:  # what was open in another has ended with it
            self._loop, self._db = loop, None
        self._appending = loop.create_task(self._run(_Group(bodies, changes), writer.decode(), callback))
        if self._limits.keep_days and self._may_trim and time.monotonic() >= self._trim_at:
            self._start_trimming()

    async def heads(self) -> dict[str, NotedHead]:
        """Return the end of each chain, by the writer that it is of."""
        heads = {}
        async with self._database.connection() as db:
            for chain, first, line in await db.fetch(SELECT_HEADS):
                if position := position_of(line):
                    heads[chain] = NotedHead(position.hash.decode(), first, position.number, self._limits)
        return heads

    async def close(self) -> None:
        running = [each for each in (self._trimming, self._appending) if each is not None and not each.done()]
        for each in running:
            each.cancel()
        if running:
            await asyncio.wait(running)
        if self._db is not None:
            db, self._db = self._db, None
            await close_connection(db)
        if self._owns_store:
            await self._store.close()

    async def _run(self, group: _Group, writer: str, callback: DoneCallback) -> None:
        try:
            left_out = await self._append(group, writer)
        except asyncio.CancelledError:
            callback(None, StoreError("the audit log was closed"))
            raise
        except Exception as problem:  # whatever it is, the callers have to hear of it
            callback(None, problem)
        else:
            callback(left_out, None)

    async def _append(self, group: _Group, writer: str) -> Collection[int]:
        """Write the records; return which were left out, because a condition of their changes did not hold."""
        self._choose_chain(writer)
        problem: BaseException | None = None
        try:
            async with asyncio.timeout(APPEND_SECONDS):
                while True:
                    try:
                        return await self._attempt(group)
                    except LOST as lost:
                        problem = lost
                    except StoreError as lost:
                        problem = lost
                        if not group.doubtful:  # there was no connection, and so nothing was sent
                            raise
                    await asyncio.sleep(random.uniform(0.01, 0.2))
        except BaseException as failure:
            self._disconnect()
            if isinstance(failure, TimeoutError) and problem is not None:
                failure = problem
            if not isinstance(failure, (*DATABASE_ERRORS, StoreError)):
                raise
            error = self._database.error(failure)
            if group.doubtful:
                text = f"{error}; it is not known whether the records were written: their answer was lost"
                raise UnsettledError(text) from failure
            raise error from failure

    def _choose_chain(self, writer: str) -> None:
        """Begin a chain, also where the one of a writer that had nothing to record may have been deleted by its age."""
        keep_seconds, now = self._limits.keep_days * DAY_SECONDS, self._clock()
        if not self._chain or 0 < keep_seconds < 2 * abs(now - self._used_at):
            self._chain, self._last = (token_hex(8), ORIGIN) if self._chain else (writer, ORIGIN)
        self._used_at = now

    async def _attempt(self, group: _Group) -> Collection[int]:
        """Write the records once; what is not known afterwards is noted in the group."""
        is_new = self._db is None or self._db.is_closed()
        db = self._db = await self._database.connect() if self._db is None or is_new else self._db
        sent: tuple[ChainPosition, frozenset[int]] | None = None  # what may be on the disk if the answer is lost
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                if is_new:
                    self._ahead = await self._server_time(db) - self._clock()
                changes = group.all_changes
                if changes:
                    await db.execute(begin([KEY_LOCKS + crc32(self._chain.encode()) % KEY_LOCKS, *locks_of(changes)]))
                    if group.doubtful and (settled := await self._settle(db, group)) is not None:
                        await db.execute("COMMIT")
                        return settled
                left_out = {at for at, each in group.changes.items() if each and not await apply(db, each)}
                bodies = [body for at, body in enumerate(group.bodies) if at not in left_out]
                lines, end = frame(bodies, self._chain.encode(), self._clock() + self._ahead, self._last)
                sent = None if changes else (end, frozenset(left_out))
                now = await db.fetchval(INSERT, self._chain, self._last.number, lines) if lines else None
                if changes:
                    sent = end, frozenset(left_out)
                    await db.execute("COMMIT")
        except asyncpg.UniqueViolationError:
            if db.is_in_transaction():
                await db.execute("ROLLBACK")
            return await self._settle_or_go_on(db, group)
        except BaseException as problem:
            self._disconnect()
            if sent is not None and isinstance(problem, (*LOST, asyncio.CancelledError)):
                group.doubtful[sent[0].hash] = sent
            raise
        self._last, self._database.trouble = end, ""
        if now is not None:
            self._ahead = now - self._clock()
        return left_out

    async def _settle_or_go_on(self, db: Connection[Record], group: _Group) -> Collection[int]:
        """Our place in the chain is taken: by an attempt of ours, or by a process that has shortened the chain."""
        settled = await self._settle(db, group)
        if settled is not None:
            return settled
        line = await db.fetchval(SELECT_END, self._chain)
        self._last = position_of(line) or self._last
        return await self._attempt(group)

    async def _settle(self, db: Connection[Record], group: _Group) -> Collection[int] | None:
        """Return what was left out by the attempt that has reached the chain; None if none has."""
        numbers = [end.number for end, _ in group.doubtful.values()]
        rows = await db.fetch(
            "SELECT line FROM handrail_audit WHERE chain = $1 AND number = ANY($2)", self._chain, numbers
        )
        for (line,) in rows:
            position = position_of(line)
            if position is not None and position.hash in group.doubtful:
                self._last, left_out = group.doubtful[position.hash]
                return left_out
        return None

    async def _server_time(self, db: Connection[Record]) -> float:
        return float(await db.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8"))

    def _disconnect(self) -> None:
        if self._db is not None:
            self._database.abandon(self._db)
            self._db = None

    def _start_trimming(self) -> None:
        if self._trimming is None or self._trimming.done():
            self._trim_at = time.monotonic() + random.uniform(0.5, 1.0) * TRIM_SECONDS  # not all replicas at once
            self._trimming = asyncio.get_running_loop().create_task(self._trim())

    async def _trim(self) -> None:
        try:
            await self.trim()
        except StoreError as problem:
            log.warning("audit: old records not deleted: %s", problem)

    async def trim(self) -> None:
        """Delete the records that are too old, a limited number at a time; return when none is left."""
        self._chain = self._chain or token_hex(8)
        while self._limits.keep_days and await self._trim_some():
            pass

    async def _trim_some(self) -> bool:
        keep_seconds = self._limits.keep_days * DAY_SECONDS
        # Nothing is done until there is a day too much, or a tenth: else there would always be something to tell.
        slack = min(DAY_SECONDS, keep_seconds / 10)
        async with self._database.connection() as db:
            if not await db.fetchval("SELECT has_table_privilege('handrail_audit', 'DELETE')"):
                self._may_trim = False
                log.info("audit: old records stay: this role may not delete them, and a role that may has to")
                return False
            await db.execute(begin([]))
            if not await db.fetchval("SELECT pg_try_advisory_xact_lock($1, $2)", LOCKS, TRIM_LOCK):
                await db.execute("ROLLBACK")
                return False
            rows = await db.fetch(SELECT_OLD, keep_seconds, slack, MAX_TRIM_ROWS)
            notices: list[tuple[str, bytes]] = []
            for chain, last, last_but_one, newest in rows:
                # Of a chain that goes on the last record is left that is too old: it shows that those before it were.
                is_over = last == newest and chain != self._chain
                to = last if is_over else last_but_one
                if to is None:
                    continue
                line = await db.fetchval("SELECT line FROM handrail_audit WHERE chain = $1 AND number = $2", chain, to)
                if (position := position_of(line)) is None:
                    continue  # it was tampered with: `verify` has to see it
                await db.execute("DELETE FROM handrail_audit WHERE chain = $1 AND number <= $2", chain, to)
                if is_over:
                    members = {"chain": chain, "to": to, "digest": position.hash.decode()}
                    notices.append((self._chain, notice("removed", **members, keep_days=self._limits.keep_days)))
                else:
                    notices.append((chain, trimmed(position, self._limits)))
            await self._add_notices(db, notices)
            await db.execute("COMMIT")
        return bool(notices)

    async def _add_notices(self, db: Connection[Record], notices: Sequence[tuple[str, bytes]]) -> None:
        for chain in {chain for chain, _ in notices}:
            bodies = [body for each, body in notices if each == chain]
            await db.execute("SAVEPOINT notices")
            for _ in range(MAX_NOTICE_TRIES):  # a writer that is busy may be quicker
                line = await db.fetchval(SELECT_END, chain)
                last = (line and position_of(line)) or ORIGIN
                lines = frame(bodies, chain.encode(), await self._server_time(db), last)[0]
                try:
                    await db.fetchval(INSERT, chain, last.number, lines)
                    break
                except asyncpg.UniqueViolationError:
                    await db.execute("ROLLBACK TO notices")
            else:
                raise StoreError(f"{self._database.name}: writer {chain} is too busy for the record of a deletion")
