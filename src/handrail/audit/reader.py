"""Reading an audit trail from outside, while it is written or long after: for `handrail audit verify` and `export`.

Reading the audit log for people: records as rows, outcomes with their intents, times, and cells of a CSV file.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import quote

from msgspec import DecodeError, Struct
from msgspec.json import decode

from handrail.audit.format import TrailError, authentic_records, position_of, records_in
from handrail.audit.jsonl import rotated_files
from handrail.model import Object
from handrail.stores import is_database

if TYPE_CHECKING:
    from handrail.audit.postgres_reader import PostgresLog

__all__ = ["RecordRow", "TrailFile", "csv_cell", "open_log", "parse_record", "record_row", "record_time"]

_FORMULA = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")  # also as wide characters
_MAX_DAMAGED_BYTES = 1_000


class RecordRow(Struct):
    """A record as a row of a table. The log is a file: its members can be of any type, and missing."""

    number: int
    time: float  # seconds since 1970; 0 where the record has no time
    event: str
    call: str
    who: str
    tool: str
    outcome: str
    rule: str
    raw: Object

    def add_intent(self, intent: RecordRow | None) -> None:
        """Copy the caller, tool and rule from the call's intent: an outcome does not repeat them."""
        if intent is not None and self.event == "outcome":
            self.who, self.tool, self.rule = intent.who, intent.tool, intent.rule


def parse_record(line: bytes) -> Object:
    """Return a line of the log as an object; ValueError if it is damaged, or was never finished."""
    try:
        return decode(line, type=Object)
    except (DecodeError, RecursionError) as problem:
        raise ValueError(str(problem)) from None


def record_row(number: int, line: bytes) -> RecordRow:
    """Return a line of the log as a row; a damaged line is a row of the event `damaged`."""
    try:
        raw = parse_record(line)
    except ValueError:
        text = line[:_MAX_DAMAGED_BYTES].decode("utf-8", "replace")
        return RecordRow(number, 0.0, "damaged", "", "", "", "", "", {"line": text})

    def member(*names: str) -> str:
        return str(next((raw[name] for name in names if name in raw), ""))

    try:
        time = record_time(raw)
    except ValueError:
        time = 0.0
    return RecordRow(
        number,
        time,
        member("event"),
        member("call"),
        member("principal") or member("by"),
        member("tool"),
        member("outcome", "step"),
        member("rule"),
        raw,
    )


def record_time(record: Object) -> float:
    """Return the time of a record in seconds since 1970; ValueError if it has none. Without a zone it is local."""
    try:
        return datetime.fromisoformat(str(record.get("time", ""))).timestamp()
    except (OverflowError, OSError) as problem:  # at the edges of the calendar
        raise ValueError(str(problem)) from None


def csv_cell(text: str) -> str:
    """Return the text so that no spreadsheet program runs it as a formula."""
    return f"'{text}" if _FORMULA.match(text) else text


MAGIC = b"SQLite format 3\0"
# A row has several lines; its number is that of the last.
SELECT_ROWS = "SELECT number, line FROM audit WHERE number > ? ORDER BY number"
SELECT_BACKWARDS = (
    "SELECT number, line FROM audit WHERE number <= ifnull((SELECT min(number) FROM audit WHERE number >= ?), 1 << 62)"
    " ORDER BY number DESC"
)
STEP = 64 * 1024
# What SQLite writes before the lines of a row: the sizes of its header, of the time (4 or 6 bytes where it is whole)
# and of the lines, then the time. Of lines that fit into a page the size has two bytes, of which the first is over 127
# and the second is not: no text in UTF-8 has those after the one before them, whatever it says.
ROW_PATTERN = re.compile(rb"\x05\x00[\x04\x05\x07][\x80-\xff][\x00-\x7f](?:.{4}|.{6}|.{8})\Z", re.DOTALL)
ROW_HEADER_BYTES = 13


def open_log(place: Path | str) -> TrailFile | PostgresLog:
    """Return the audit log in a file, or at a URL of PostgreSQL."""
    if isinstance(place, str) and is_database(place):
        from handrail.audit.postgres_reader import PostgresLog  # deferred: it needs the extra `postgres`

        return PostgresLog(place)
    return TrailFile(Path(place))


class TrailFile:
    """A SQLite file with a trail in it, or a file of lines and those it has followed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.damage = ""  # why `lines` ended before the audit log did
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
                        yield from _numbered_lines(path.name, file)
            yield from _numbered_lines(self._path.name, newest)

    @property
    def span(self) -> tuple[int, int]:
        """The numbers of the first record and the last; 0 where there is none."""
        if self._is_database:
            with closing(self._connect()) as db:
                oldest = db.execute(SELECT_ROWS + " LIMIT 1", (0,)).fetchone()
                (last,) = db.execute("SELECT max(number) FROM audit").fetchone()
                return (_records(*oldest)[0][0], last) if oldest else (0, 0)
        firsts = (position_of(line) for path in self._files for line in _first_line(path))
        first = next((position.number for position in firsts if position), 0)
        return first, next((number for number, _ in self.newest_first()), 0)

    def newest_first(self, before: int = 0) -> Iterator[tuple[int, bytes]]:
        """Each record with its number, or the one it should have, down from the last before `before`; not checked."""
        if self._is_database:
            before = before or 1 << 62
            with closing(self._connect()) as db:
                for row in db.execute(SELECT_BACKWARDS, (before,)):
                    yield from (each for each in reversed(_records(*row)) if each[0] < before)
            return
        number = before
        for path in reversed(self._files):
            with path.open("rb") as file:
                end = _offset_of(file, before) if before else file.seek(0, os.SEEK_END)
                for line in _backwards(file, end):
                    position = position_of(line)
                    number = position.number if position else number - 1
                    yield number, line

    def salvage(self) -> Iterator[bytes]:
        """Yield all whole records that are left in the file, in order, however damaged it is.

        Not what only looks like a record: a store keeps what callers sent and were sent in the same file.
        """
        for line in authentic_records(self._candidates()):
            yield line + b"\n"

    def _candidates(self) -> Iterator[tuple[bytes, bool]]:
        """Records, and whether each stands where one is written: of rows that SQLite can read, then of files.

        A record of less than a page is in one piece.
        """
        if not self._is_database:
            for path in self._files:
                with suppress(FileNotFoundError):
                    yield from _line_records(path.read_bytes())
            return
        with suppress(sqlite3.Error), closing(self._connect()) as db:
            (last,) = db.execute("SELECT max(number) FROM audit").fetchone()
            for number in range(1, (last or 0) + 1):
                with suppress(sqlite3.Error):  # what is on other pages can be read
                    for row in db.execute("SELECT line FROM audit WHERE number = ?", (number,)):
                        yield from _line_records(row[0])
        for path in (Path(f"{self._path}-wal"), self._path):
            with suppress(FileNotFoundError):
                yield from _row_records(path.read_bytes())

    @property
    def _files(self) -> list[Path]:
        return [*rotated_files(self._path), self._path]

    def _rows(self, after: int) -> Iterator[tuple[str, bytes]]:
        with closing(self._connect()) as db:
            for row in db.execute(SELECT_ROWS, (after,)):
                for number, line in _records(*row):
                    if number > after:
                        yield f"{self._path.name}, record {number}", line + b"\n"
            if after:
                return
            (check_result,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if check_result != "ok":
                raise sqlite3.DatabaseError(check_result)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{quote(str(self._path.absolute()))}?mode=ro", uri=True)


def _line_records(data: bytes) -> Iterator[tuple[bytes, bool]]:
    for at, line in records_in(data):
        yield line, at == 0 or data[at - 1 : at] == b"\n"


def _row_records(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Records in the pages of a database: placed if they begin a row of the table `audit`, or follow one that is."""
    end = -1  # of the last that is
    for at, line in records_in(data):
        follows = end == at - 1 and data[end:at] == b"\n"
        is_placed = follows or ROW_PATTERN.search(data, max(0, at - ROW_HEADER_BYTES), at) is not None
        if is_placed:
            end = at + len(line)
        yield line, is_placed


def _records(number: int, lines: bytes) -> list[tuple[int, bytes]]:
    """Those of a row, with their numbers, or the ones they should have."""
    row_lines = lines.split(b"\n")
    return list(enumerate(row_lines, number - len(row_lines) + 1))


def _first_line(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield file.readline()


def _offset_of(file: BinaryIO, number: int) -> int:
    """Where the line of record `number`, or the first after it, begins."""
    last, low, high = 0, 0, file.seek(0, os.SEEK_END)
    while low < high:
        middle = (low + high) // 2
        file.seek(max(0, middle - 1))
        if middle:
            file.readline()
        position = None
        while position is None and file.tell() < high:  # what is no record says nothing
            position = position_of(file.readline())
        if position is not None and position.number < number:
            last, low = position.number, file.tell()
        else:
            high = middle
    file.seek(low)
    while (last := last + 1) < number and (line := file.readline()) and position_of(line) is None:
        low = file.tell()  # no record, where one should be
    return low


def _backwards(file: BinaryIO, end: int) -> Iterator[bytes]:
    """The whole lines before `end`, last first, without their newlines."""
    rest, step = b"", STEP
    is_torn = True  # what follows the last newline was never finished
    while end > 0:
        start = max(0, end - step)
        file.seek(start)
        first, *lines = (file.read(end - start) + rest).split(b"\n")
        if start == 0:
            lines.insert(0, first)
        rest, end = first, start
        step = STEP if lines else 2 * step
        for line in reversed(lines):
            if not is_torn:
                yield line
            is_torn = False


def _numbered_lines(name: str, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    for i, line in enumerate(file, 1):
        yield f"{name}:{i}", line
