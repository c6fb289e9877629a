"""The audit log on the page: records newest first, filters, verification and export.

Files can be long: each request reads a limited number of records, in a thread, and returns where the next one goes on.
"""

from __future__ import annotations

import asyncio
import csv
import io
import re
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from handrail.audit.format import TrailError, merge_reports, position_of, verify as verify_chain, verify_chains
from handrail.audit.jsonl import rotated_files
from handrail.audit.reader import RecordRow, TrailFile, csv_cell, open_log, record_row
from handrail.console.access import ApiError, ApiRequest, RawResponse
from handrail.console.context import ConsoleContext
from handrail.model import Object
from handrail.stores import is_url, public_url

if TYPE_CHECKING:
    from handrail.audit.postgres_reader import PostgresLog

__all__ = ["export", "records_of", "verify", "view"]

PAGE_RECORDS, MAX_PAGE_RECORDS = 100, 500
MAX_READ_RECORDS = 20_000  # by one request
READ_AHEAD_RECORDS = 500  # between an outcome and its intent, which names the caller
DAY_SECONDS = 86_400.0
CHUNK_BYTES = 64 * 1024
MAX_NUMBER = 2.0**53  # of record numbers and of times
MAX_UNFINISHED = 100
COLUMNS = ("number", "time", "event", "call", "who", "tool", "outcome", "rule")
MORE_COLUMNS = ("server", "from", "client", "revision", "agreed", "step", "approval", "by", "seconds", "hash")
_FILTERS = ("event", "outcome", "tool", "who")
_FIRST_EVENTS = frozenset({"intent", "refusal", "answered", "asked"})
_CALL_ID = re.compile(r"[0-9a-f]{1,64}")


async def view(context: ConsoleContext, request: ApiRequest) -> Object:
    path, query = _audit_path(context), request.query
    if path is None:
        return {"on": False, "file": "", "records": [], "next": "", "total": 0}
    record_filter = _RecordFilter(query)
    before = int(_number(query, "before", 0))
    limit = min(MAX_PAGE_RECORDS, max(1, int(_number(query, "limit", PAGE_RECORDS))))
    records, next_before, total = await _read_in_thread(_read_page, path, record_filter, before, limit)
    return {"on": True, "file": public_url(str(path)), "records": records, "next": next_before, "total": total}


async def records_of(context: ConsoleContext, call: str) -> list[Object]:
    """Return the records of one call, oldest first."""
    path = _audit_path(context)
    if path is None or not _CALL_ID.fullmatch(call):
        return []
    return [to_builtins(each) for each in await _read_in_thread(_read_call_records, path, call)]


async def verify(context: ConsoleContext, request: ApiRequest) -> Object:
    """Verify the whole log, one request at a time. The report is reused while the files are unchanged."""
    path = _audit_path(context)
    if path is None:
        raise ApiError(404, "Nothing is recorded here: give the server an audit log")
    async with context.verify_lock:
        stamp = await _read_in_thread(_file_stamps, path)
        cached = context.verified
        if cached is None or cached[0] != stamp:
            cached = context.verified = stamp, await _read_in_thread(_verify_log, path), context.clock()
    return {**cached[1], "at": cached[2]}


async def export(context: ConsoleContext, request: ApiRequest) -> RawResponse:
    path, file_format = _audit_path(context), request.query.get("format", "jsonl")
    if path is None:
        raise ApiError(404, "Nothing is recorded here: give the server an audit log")
    if file_format not in ("jsonl", "csv"):
        raise ApiError(400, f"format: {file_format[:40]!r} is neither jsonl nor csv")
    record_filter = _RecordFilter(request.query)
    await context.write_audit_record(request.session, "exported the audit", format=file_format)
    lines = _matching_lines(await _read_in_thread(open_log, path), record_filter)
    media = "application/x-ndjson" if file_format == "jsonl" else "text/csv; charset=utf-8"
    return RawResponse(
        _chunks(_csv_rows(lines) if file_format == "csv" else (line for line, _ in lines)),
        media,
        f"audit.{file_format}",
    )


async def _read_in_thread(function: Any, *args: Any) -> Any:
    try:
        return await asyncio.to_thread(function, *args)
    except (TrailError, OSError, sqlite3.Error) as problem:
        raise ApiError(500, f"The audit log cannot be read: {problem}") from None


def _audit_path(context: ConsoleContext) -> Path | str | None:
    """Return the file of the audit log, or its URL."""
    audit = context.engine.guard_options.get("audit")
    if isinstance(audit, str) and is_url(audit):
        return audit
    return Path(audit) if isinstance(audit, str | Path) else None


# Filters


class _RecordFilter:
    def __init__(self, query: dict[str, str]) -> None:
        self._text = query.get("text", "").casefold()
        self._exact = {name: query[name] for name in _FILTERS if query.get(name)}
        self.since, self._until = _number(query, "since", 0), _number(query, "until", float("inf"))

    def matches(self, record: RecordRow, line: bytes) -> bool:
        return (
            all(getattr(record, name) == expected for name, expected in self._exact.items())
            and self.since <= record.time <= self._until
            and (not self._text or self._text in line.decode("utf-8", "replace").casefold())
        )


def _number(query: dict[str, str], name: str, default: float) -> float:
    try:
        number = float(query.get(name) or default)
    except ValueError:
        number = nan
    if query.get(name) and not -MAX_NUMBER <= number <= MAX_NUMBER:
        raise ApiError(400, f"{name}: {query[name][:40]!r} is not a number")
    return number


# Reading


def _read_page(
    path: Path | str, record_filter: _RecordFilter, before: int, limit: int
) -> tuple[list[RecordRow], str, int]:
    trail = open_log(path)
    first, last = trail.span
    rows = islice(trail.newest_first(before), MAX_READ_RECORDS)
    records: list[RecordRow] = []
    lookahead: deque[tuple[RecordRow, bytes]] = deque()
    intents: dict[str, RecordRow] = {}
    at, is_over = before, False
    while len(records) < limit:
        for number, line in islice(rows, READ_AHEAD_RECORDS + 1 - len(lookahead)):
            record = record_row(number, line)
            lookahead.append((record, line))
            if record.event == "intent":
                intents[record.call] = record
        if not lookahead:
            break
        record, line = lookahead.popleft()
        at = record.number
        record.add_intent(intents.pop(record.call, None) if record.event == "outcome" else None)
        if record_filter.matches(record, line):
            records.append(record)
        elif 0 < record.time < record_filter.since - DAY_SECONDS:  # clocks are set back, but by less than a day
            is_over = True
            break
    total = last - first + 1 if last else 0
    return records, "" if is_over or at <= first else str(at), total


def _read_call_records(path: Path | str, call: str) -> list[RecordRow]:
    needle = f'"call":"{call}"'.encode()
    records: list[RecordRow] = []
    for number, line in islice(open_log(path).newest_first(), MAX_READ_RECORDS):
        if needle in line:
            record = record_row(number, line)
            records.insert(0, record)
            if record.event in _FIRST_EVENTS:
                break
    for record in records:
        record.add_intent(records[0])
    return records


def _file_stamps(path: Path | str) -> list[tuple[str, int, int]]:
    if isinstance(path, str):
        return [(path, time.monotonic_ns(), 0)]  # nothing shows that no row of a database has changed
    files = [path, *(rotated_files(path) if path.suffix == ".jsonl" else [])]
    stamps = [(each.name, each.stat().st_ctime_ns, each.stat().st_size) for each in files]  # no program can set ctime
    log = Path(f"{path}-wal")  # SQLite changes its ctime with every read
    return [*stamps, (log.name, log.stat().st_mtime_ns, log.stat().st_size)] if log.exists() else stamps


def _verify_log(path: Path | str) -> Object:
    trail = open_log(path)
    if isinstance(trail, TrailFile):
        report = verify_chain(trail.lines())
    else:
        report = merge_reports(each for _, each in verify_chains(trail.chains(), {}))
    members: Object = {
        "ok": report.flaw is None and not trail.damage,
        "records": report.records,
        "first": report.first,
        "last": report.last,
        "damage": trail.damage,
        "unfinished": list(report.unfinished[-MAX_UNFINISHED:]),
        "head": report.head,
    }
    return members if report.flaw is None else {**members, "flaw": to_builtins(report.flaw)}


# Export


def _matching_lines(trail: TrailFile | PostgresLog, record_filter: _RecordFilter) -> Iterator[tuple[bytes, RecordRow]]:
    """Yield the matching lines of the log as they are, oldest first, each with its row."""
    intents: dict[str, RecordRow] = {}
    for _, line in trail.lines():
        link = position_of(line)
        record = record_row(link.number if link else 0, line)
        if record.event == "intent" and len(intents) < MAX_READ_RECORDS:
            intents[record.call] = record
        record.add_intent(intents.pop(record.call, None) if record.event == "outcome" else None)
        if record_filter.matches(record, line):
            yield line, record


def _csv_rows(lines: Iterable[tuple[bytes, RecordRow]]) -> Generator[bytes]:
    def row(cells: Iterable[object]) -> bytes:
        text = io.StringIO()
        csv.writer(text).writerow([csv_cell(str(each)) for each in cells])
        return text.getvalue().encode("utf-8", "replace")

    yield row([*COLUMNS, *MORE_COLUMNS])
    for _, record in lines:
        own = [str(record.raw.get("time", "")) if name == "time" else getattr(record, name) for name in COLUMNS]
        yield row([*own, *(record.raw.get(name, "") for name in MORE_COLUMNS)])


async def _chunks(pieces: Generator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces in chunks, read in one thread (as SQLite requires) no faster than they are sent."""

    def more() -> bytes:
        chunk = bytearray()
        for piece in pieces:
            chunk += piece
            if len(chunk) >= CHUNK_BYTES:
                break
        return bytes(chunk)

    thread, loop = ThreadPoolExecutor(1, "handrail-export"), asyncio.get_running_loop()
    try:
        while chunk := await loop.run_in_executor(thread, more):
            yield chunk
    finally:
        thread.submit(pieces.close)
        thread.shutdown(wait=False)
