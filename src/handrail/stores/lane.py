"""A thread with a SQLite connection of its own. What waits while it is busy shares its next transaction."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from sqlite3 import Connection
from threading import Thread
from typing import Any, TypeVar

from msgspec import Struct

from handrail.stores import StoreError
from handrail.stores.database import DatabaseOpener

MAX_GROUP_JOBS = 1000
"""Calls that may share a transaction: reaching the disk is paid once for all of them."""
SWEEP_SECONDS = 1.0

T = TypeVar("T")
Work = Callable[[Connection, float], T]
"""Something to do in a transaction, at a time of day."""
Outcome = tuple[Any, Exception | None]
DoneCallback = Callable[[Any, BaseException | None], None]
"""Who hears what it gave, or what went wrong."""


class _Job(Struct, eq=False):
    work: Work[Any]
    on_done: DoneCallback
    loop: asyncio.AbstractEventLoop


class SqliteThread:
    """Only reads, unless it is given a `sweep`, which joins a transaction now and then, and says if there is more."""

    def __init__(self, connect: DatabaseOpener, clock: Callable[[], float], sweep: Work[bool] | None = None) -> None:
        self._clock = clock
        self._sweep = sweep
        self._swept_at = float("-inf")
        self._process = os.getpid()
        self._closed = False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # as long as there are callers waiting, no longer
        opened: Future[None] = Future()
        # A daemon: a store nobody closed must not keep the process alive.
        self._thread = Thread(target=self._run, args=(connect, opened), name="handrail-sqlite", daemon=True)
        self._thread.start()
        opened.result()

    async def run(self, work: Work[T]) -> T:
        """What `work` gives. It is carried out even if nobody waits for it any more."""
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
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
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
