"""Reading an audit trail from outside, while it is written or long after: for `handrail audit verify` and `export`."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from handrail.guards.chain import TrailError, link_of, records_in
from handrail.guards.trail_jsonl import rotated_files

__all__ = ["TrailFile"]

MAGIC = b"SQLite format 3\0"
ROWS = "SELECT number, line FROM audit WHERE number > ? ORDER BY number"


class TrailFile:
    """A SQLite file with a trail in it, or a file of lines and those it has followed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.damage = ""  # what made `lines` end before the trail did
        self._is_database = path.suffix != ".jsonl"
        try:
            path.stat()
            if not self._is_database:  # to open and close a database would drop the locks SQLite holds in this process
                with path.open("rb") as file:
                    self._is_database = file.read(len(MAGIC)) == MAGIC
        except OSError as problem:
            raise TrailError(f"{path}: {problem.strerror}") from problem

    def lines(self, after: int = 0) -> Iterator[tuple[str, bytes]]:
        """Each record, with where it stands; of a database those after a number."""
        if self._is_database:
            try:
                yield from self._rows(after)
            except sqlite3.Error as problem:
                self.damage = f"{self._path}: {problem}"
            return
        with self._path.open("rb") as newest:
            for path in rotated_files(self._path):
                if not os.path.samestat(path.stat(), os.fstat(newest.fileno())):  # it was rotated just now
                    with path.open("rb") as file:
                        yield from _numbered(path.name, file)
            yield from _numbered(self._path.name, newest)

    def salvaged(self) -> Iterator[bytes]:
        """All whole records that can still be found, in order, whatever has become of the file."""
        found: dict[int, bytes] = {}
        for data in self._remains():
            for line in records_in(data):
                if link := link_of(line):
                    found.setdefault(link.number, line)
        for number in sorted(found):
            yield found[number] + b"\n"

    def _remains(self) -> Iterator[bytes]:
        """Rows that SQLite can still read, then the files as they are: a record of less than a page is in one piece."""
        if self._is_database:
            with suppress(sqlite3.Error), closing(self._connect()) as db:
                (last,) = db.execute("SELECT max(number) FROM audit").fetchone()
                for number in range(1, (last or 0) + 1):
                    with suppress(sqlite3.Error):  # what is on other pages can be read
                        yield from db.execute("SELECT line FROM audit WHERE number = ?", (number,)).fetchone() or ()
        beside = [Path(f"{self._path}-wal")] if self._is_database else rotated_files(self._path)
        for path in (*beside, self._path):
            with suppress(FileNotFoundError):
                yield path.read_bytes()

    def _rows(self, after: int) -> Iterator[tuple[str, bytes]]:
        with closing(self._connect()) as db:
            for number, line in db.execute(ROWS, (after,)):
                yield f"{self._path.name}, record {number}", line + b"\n"
            if after:
                return
            (told,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if told != "ok":
                raise sqlite3.DatabaseError(told)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{quote(str(self._path.absolute()))}?mode=ro", uri=True)


def _numbered(name: str, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    for i, line in enumerate(file, 1):
        yield f"{name}:{i}", line
