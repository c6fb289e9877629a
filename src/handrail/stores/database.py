"""Opening a store's SQLite file: who may read it, how it reaches the disk, its tables, whether it is still there."""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from sqlite3 import Connection

from handrail.stores import StoreError

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
            # Of several who open a new file at once, some are told at once that it is locked, whatever the timeout.
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
