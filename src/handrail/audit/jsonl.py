"""An audit trail in a file of lines, which several processes may append to: each holds it by a lock while it does.

A full file is renamed (`audit.jsonl` to `audit.1.jsonl`, the next to `audit.2.jsonl`, and so on), and a new one goes on
with the chain. What a killed process has left of a line is cut off by the next who writes, and a record says so.
On Windows there is no such lock, and only one process may write.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import re
import stat
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from handrail.audit.format import (
    DAY_SECONDS,
    ORIGIN,
    RECORD_PREFIX,
    ChainPosition,
    NotedHead,
    Retention,
    TrailError,
    frame,
    notice,
    position_of,
    replaced,
    time_of,
    trimmed,
)
from handrail.stores import DoneCallback

if sys.platform != "win32":
    import fcntl

__all__ = ["JsonlFile", "rotated_files"]

log = logging.getLogger("handrail")

LOCK_TIMEOUT_SECONDS = 10.0  # how long another process may keep us from writing
READ_BYTES = 64 * 1024
_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def rotated_files(path: Path) -> list[Path]:
    """The files that `path` has followed, oldest first."""
    name = re.compile(rf"{re.escape(path.stem)}\.([0-9]+){re.escape(path.suffix)}")
    files_by_number = {int(match[1]): each for each in path.parent.iterdir() if (match := name.fullmatch(each.name))}
    return [files_by_number[number] for number in sorted(files_by_number)]


class JsonlFile:
    """Opens the file, or makes it, readable for its owner only, and never through a link."""

    def __init__(
        self,
        path: Path,
        durable: bool,
        rotate: tuple[float, float],
        limits: Retention,
        clock: Callable[[], float],
    ) -> None:
        self.name = self.path = str(path)
        self._path = path
        self._durable = durable
        self._max_bytes, self._max_seconds = rotate
        if limits.max_megabytes:  # whole files are deleted: several have to fit
            self._max_bytes = min(self._max_bytes, limits.max_megabytes * 1_000_000 // 4)
        self._limits = limits
        self._clock = clock
        self._process = os.getpid()
        self._file = -1
        self._end = -1  # what we know of ends here; the file itself may go on
        self._last = ORIGIN  # the one before the end
        self._last_written = ORIGIN  # the last that we wrote
        self._started_at = 0.0
        self._open()
        self._thread = ThreadPoolExecutor(1, "handrail-audit")

    def append(self, bodies: list[bytes], _: Any, writer: bytes, callback: DoneCallback) -> None:
        if os.getpid() != self._process:
            raise TrailError(f"the trail was opened by process {self._process}; after a fork, open it anew")
        future = asyncio.get_running_loop().run_in_executor(self._thread, self._append, bodies, writer)
        future.add_done_callback(partial(_on_appended, callback))

    async def heads(self) -> dict[str, NotedHead]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._heads)

    def _heads(self) -> dict[str, NotedHead]:
        files = [*rotated_files(self._path), self._path]
        first = next((position for each in files if (position := _inspect(each, _first_record))), None)
        last = self._last_written
        return {} if first is None else {"": NotedHead(last.hash.decode(), first.number, last.number, self._limits)}

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        self._close()

    def _append(self, bodies: list[bytes], writer: bytes) -> None:
        try:
            notices = self._catch_up(self._lock_current())
            surplus: list[tuple[Path, ChainPosition]] = []
            if self._end and self._is_full():
                self._rotate()
                notices = self._catch_up(self._lock_current())
                surplus = self._files_to_delete()
            # A record of each before it is deleted: wherever that is interrupted, one says where the rest begins.
            notices += [trimmed(end, self._limits) for _, end in surplus]
            self._write([*notices, *bodies], writer)
            for path, _ in surplus:
                path.unlink(missing_ok=True)
            if surplus:
                _sync_folder(self._path.parent)
            _unlock(self._file)
        except BaseException:
            # What a write or sync that failed has left is unknown: nothing is tried over it.
            self._close()
            raise

    def _lock_current(self) -> int:
        """Lock the file that has the name now, and tell its size."""
        deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while True:
            if self._file < 0:
                self._open()
            _lock(self._file, deadline)
            with suppress(FileNotFoundError):
                path_stat, file_stat = os.stat(self._path, follow_symlinks=False), os.fstat(self._file)
                if os.path.samestat(path_stat, file_stat):
                    return file_stat.st_size
            self._close()  # another process has rotated it

    def _open(self) -> None:
        self._file = os.open(self._path, _OPEN_FLAGS, 0o600)
        self._end = -1
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise TrailError(f"{self.name}: not a file")
            _sync_folder(self._path.parent)  # where it may be new
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _catch_up(self, size: int) -> list[bytes]:
        """Read what the file ends with, if it is not what we wrote; the records that have to be written about it."""
        if size == self._end:
            return []
        is_new_file = self._end < 0
        line, self._end = _last_line(self._file, size)
        if self._end < size:
            torn = _read_at(self._file, self._end, len(RECORD_PREFIX))
            if not RECORD_PREFIX.startswith(torn.rstrip(b"\0")):
                raise TrailError("it does not end as a trail does; move it away")
            os.ftruncate(self._file, self._end)
        notices = [notice("recovered", bytes=size - self._end)] if self._end < size else []
        first_time = _first_time(self._file, size)
        self._started_at = self._clock() if first_time is None else first_time
        if not self._end and (rotated := rotated_files(self._path)):
            notices.insert(0, notice("rotated", file=rotated[-1].name))
            with rotated[-1].open("rb") as file:
                line, _ = _last_line(file.fileno(), os.fstat(file.fileno()).st_size)
        last = ORIGIN if line is None else position_of(line)
        if last is None:
            raise TrailError("its last line is not a record of a trail; move it away")
        if self._last_written.number > last.number or (is_new_file and last != self._last_written and self._is_lost()):
            log.error(
                "audit: %s was deleted or replaced: records up to %d are gone", self.name, self._last_written.number
            )
            notices.insert(0, replaced(self._last_written))
            last = last if self._end else self._last_written
        self._last = last
        return notices

    def _is_lost(self) -> bool:
        """Whether what we wrote is in none of the files, and should be."""
        files = [*rotated_files(self._path), self._path]
        if any(_inspect(each, partial(_has_position, link=self._last_written)) for each in reversed(files)):
            return False
        first = next((position for each in files if (position := _inspect(each, _first_record))), None)
        return first is None or first.number <= self._last_written.number

    def _is_full(self) -> bool:
        age = abs(self._clock() - self._started_at)  # also of a file that was begun while the clock was far ahead
        return self._end >= self._max_bytes or 0 < self._max_seconds <= age

    def _rotate(self) -> None:
        rotated = rotated_files(self._path)
        number = int(rotated[-1].stem.rpartition(".")[2]) + 1 if rotated else 1
        if sys.platform == "win32":  # where nothing that is open can be renamed
            self._close()
        self._path.rename(self._path.with_name(f"{self._path.stem}.{number}{self._path.suffix}"))
        self._close()
        _sync_folder(self._path.parent)

    def _files_to_delete(self) -> list[tuple[Path, ChainPosition]]:
        """The files that are too old or too much, oldest first, and the last record of each."""
        files = rotated_files(self._path)
        n = 0
        if self._limits.keep_days:
            n = self._too_old(files, self._limits.keep_days * DAY_SECONDS)
        if self._limits.max_megabytes:
            sizes = [each.stat().st_size for each in files]
            while n < len(files) and sum(sizes[n:]) > self._limits.max_megabytes * 1_000_000 - self._max_bytes:
                n += 1
        ends = [_inspect(each, _last_record) for each in files[:n]]
        return [(path, end) for path, end in zip(files, ends, strict=False) if end is not None]

    def _too_old(self, files: list[Path], keep_seconds: float) -> int:
        """How many are, by the time that the records themselves have reached, of which a clock far ahead is no part.

        The next begins with a record that is too old: it shows that those before it were.
        """
        now, slack = self._clock(), min(DAY_SECONDS, keep_seconds / 10)
        settled_times = [_inspect(each, partial(_last_time_before, limit=now - slack)) for each in files]
        limit = max([each for each in settled_times if each is not None], default=float("-inf")) + slack - keep_seconds
        first_times = [_inspect(each, _first_time) for each in files]
        candidates = [*takewhile(lambda each: each is None or each < limit or each > now + slack, first_times)]
        return max([n for n, each in enumerate(candidates) if each is not None and each < limit], default=0)

    def _write(self, bodies: list[bytes], writer: bytes) -> None:
        lines, last = frame(bodies, writer, self._clock(), self._last)
        data = memoryview(b"\n".join([*lines, b""]))
        end = self._end + len(data)
        try:
            while data:
                data = data[os.write(self._file, data) :]
            if self._durable:
                os.fsync(self._file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self._end, self._last, self._last_written = end, last, last


def _on_appended(callback: DoneCallback, future: asyncio.Future[None]) -> None:
    problem = future.exception()
    callback(() if problem is None else None, problem)


def _lock(file: int, deadline: float) -> None:
    while sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TrailError(f"another process has held it for {LOCK_TIMEOUT_SECONDS:g} s") from None
            time.sleep(0.002)


def _unlock(file: int) -> None:
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_UN)


def _last_line(file: int, size: int) -> tuple[bytes | None, int]:
    """The last whole line, if there is one, and where it ends."""
    step = READ_BYTES
    while True:
        start = max(0, size - step)
        data = _read_at(file, start, size - start)
        end = data.rfind(b"\n") + 1
        begin = data.rfind(b"\n", 0, max(0, end - 1)) + 1
        if begin or not start:
            return data[begin : end - 1] if end else None, start + end
        step *= 4


T = TypeVar("T")


def _inspect(path: Path, read: Callable[[int, int], T]) -> T:
    """What is in a file of that size, by its descriptor."""
    with path.open("rb") as file:
        return read(file.fileno(), os.fstat(file.fileno()).st_size)


def _last_record(file: int, size: int) -> ChainPosition | None:
    line, _ = _last_line(file, size)
    return None if line is None else position_of(line)


def _first_record(file: int, size: int) -> ChainPosition | None:
    return position_of(_read_at(file, 0, READ_BYTES))


def _has_position(file: int, size: int, link: ChainPosition) -> bool:
    if not size:
        return False
    with mmap.mmap(file, size, access=mmap.ACCESS_READ) as data:
        return data.find(b'"hash":"%b","number":%d,' % (link.hash, link.number)) >= 0


def _first_time(file: int, size: int) -> float | None:
    """The time of the file's first record."""
    return time_of(_read_at(file, 0, READ_BYTES))


def _last_time_before(file: int, size: int, limit: float) -> float | None:
    """The time of the last record that is not after `limit`, if records are in the order of their times."""
    last_time, low, high = None, 0, size
    while low < high:
        middle = (low + high) // 2
        start = _line_start(file, middle)
        record_time = time_of(_read_at(file, start, READ_BYTES)) if start < size else None
        if record_time is not None and record_time <= limit:
            last_time, low = record_time, start + 1
        else:
            high = middle
    return last_time


def _line_start(file: int, at: int) -> int:
    """Where the first line begins that does not begin before `at`; the end of the file if there is none."""
    while at and (data := _read_at(file, at - 1, READ_BYTES)):
        if (end := data.find(b"\n")) >= 0:
            return at + end
        at += len(data)
    return at


def _read_at(file: int, start: int, size: int) -> bytes:
    os.lseek(file, start, os.SEEK_SET)
    return os.read(file, size)


def _sync_folder(folder: Path) -> None:
    if sys.platform == "win32":  # where a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
