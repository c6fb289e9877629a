"""The audit trail on the page: newest first, filtered, checked, and to take away.

Files can be long: each request reads so much and no more, in a thread, and says where the next one goes on.
"""

from __future__ import annotations

import asyncio
import csv
import io
import re
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import islice
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import DecodeError, Struct, to_builtins
from msgspec.json import decode

from handrail.audit.format import TrailError, link_of, verify as verify_chain
from handrail.audit.jsonl import rotated_files
from handrail.audit.reader import TrailFile
from handrail.console.access import Download, Problem, Request
from handrail.model import Object

if TYPE_CHECKING:
    from handrail.console import Console

__all__ = ["export", "records_of", "verify", "view"]

PAGE, MAX_PAGE = 100, 500
MAX_READ = 20_000  # records a request
AHEAD = 500  # records between the end of a call and its beginning, which says whose it was
DAY = 86_400.0
CHUNK = 64 * 1024
MOST = 2.0**53  # numbers of records, and times
MAX_UNFINISHED = 100
COLUMNS = ("number", "time", "event", "call", "who", "tool", "outcome", "rule")
MORE_COLUMNS = ("server", "from", "client", "revision", "agreed", "step", "approval", "by", "seconds", "hash")
_FILTERS = ("event", "outcome", "tool", "who")
_BEGINNINGS = frozenset({"intent", "refusal", "answered", "asked"})
_CALL = re.compile(r"[0-9a-f]{1,64}")
_FORMULA = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")  # also as wide characters


class _Record(Struct):
    number: int
    time: float
    event: str
    call: str
    who: str
    tool: str
    outcome: str
    rule: str
    raw: Object


async def view(console: Console, request: Request) -> Object:
    path, query = _file(console), request.query
    if path is None:
        return {"on": False, "file": "", "records": [], "next": "", "total": 0}
    wanted = _Wanted(query)
    before = int(_number(query, "before", 0))
    limit = min(MAX_PAGE, max(1, int(_number(query, "limit", PAGE))))
    found, more, total = await _aside(_page, path, wanted, before, limit)
    return {"on": True, "file": str(path), "records": found, "next": more, "total": total}


async def records_of(console: Console, call: str) -> list[Object]:
    """What is on record of one call, in its order."""
    path = _file(console)
    if path is None or not _CALL.fullmatch(call):
        return []
    return [to_builtins(each) for each in await _aside(_records_of, path, call)]


async def verify(console: Console, request: Request) -> Object:
    """The whole file is read, by one at a time, and not again while it is as it was."""
    path = _file(console)
    if path is None:
        raise Problem(404, "Nothing is on record here: give the server an audit")
    lock = console.state.setdefault("audit-lock", asyncio.Lock())
    async with lock:
        stamp = await _aside(_stamp, path)
        known = console.state.get("audit-verdict")
        if known is None or known[0] != stamp:
            known = console.state["audit-verdict"] = stamp, await _aside(_verify, path), console.clock()
    return {**known[1], "at": known[2]}


async def export(console: Console, request: Request) -> Download:
    path, kind = _file(console), request.query.get("format", "jsonl")
    if path is None:
        raise Problem(404, "Nothing is on record here: give the server an audit")
    if kind not in ("jsonl", "csv"):
        raise Problem(400, f"format: {kind[:40]!r} is neither jsonl nor csv")
    wanted = _Wanted(request.query)
    await console.note(request.session, "exported the audit", format=kind)
    lines = _lines(await _aside(TrailFile, path), wanted)
    media = "application/x-ndjson" if kind == "jsonl" else "text/csv; charset=utf-8"
    return Download(_chunks(_rows(lines) if kind == "csv" else (line for line, _ in lines)), media, f"audit.{kind}")


async def _aside(work: Any, *args: Any) -> Any:
    try:
        return await asyncio.to_thread(work, *args)
    except (TrailError, OSError, sqlite3.Error) as problem:
        raise Problem(500, f"The audit cannot be read: {problem}") from None


def _file(console: Console) -> Path | None:
    audit = console.engine.guards.get("audit")
    return Path(audit) if isinstance(audit, str | Path) else None


# Filters


class _Wanted:
    def __init__(self, query: dict[str, str]) -> None:
        self._text = query.get("text", "").casefold()
        self._exact = {name: query[name] for name in _FILTERS if query.get(name)}
        self.since, self._until = _number(query, "since", 0), _number(query, "until", float("inf"))

    def has(self, record: _Record, line: bytes) -> bool:
        return (
            all(getattr(record, name) == wanted for name, wanted in self._exact.items())
            and self.since <= record.time <= self._until
            and (not self._text or self._text in line.decode("utf-8", "replace").casefold())
        )


def _number(query: dict[str, str], name: str, default: float) -> float:
    try:
        found = float(query.get(name) or default)
    except ValueError:
        found = nan
    if query.get(name) and not -MOST <= found <= MOST:
        raise Problem(400, f"{name}: {query[name][:40]!r} is not a number")
    return found


def _record(number: int, line: bytes) -> _Record:
    """A record as one row; the trail is a file, and may say anything."""
    try:
        raw = decode(line, type=Object)
    except DecodeError:
        return _Record(number, 0.0, "damaged", "", "", "", "", "", {"line": line[:1000].decode("utf-8", "replace")})

    def said(*names: str) -> str:
        return str(next((raw[name] for name in names if name in raw), ""))

    try:
        time = datetime.fromisoformat(said("time")).timestamp()
    except ValueError:
        time = 0.0
    who = said("principal") or said("by")
    return _Record(
        number, time, said("event"), said("call"), who, said("tool"), said("outcome", "step"), said("rule"), raw
    )


def _fill(record: _Record, intent: _Record | None) -> None:
    """An outcome does not repeat whose call it was."""
    if intent is not None and record.event == "outcome":
        record.who, record.tool, record.rule = intent.who, intent.tool, intent.rule


# Reading


def _page(path: Path, wanted: _Wanted, before: int, limit: int) -> tuple[list[_Record], str, int]:
    trail = TrailFile(path)
    first, last = trail.span
    rows = islice(trail.newest_first(before), MAX_READ)
    found: list[_Record] = []
    waiting: deque[tuple[_Record, bytes]] = deque()
    intents: dict[str, _Record] = {}
    at, is_over = before, False
    while len(found) < limit:
        for number, line in islice(rows, AHEAD + 1 - len(waiting)):
            record = _record(number, line)
            waiting.append((record, line))
            if record.event == "intent":
                intents[record.call] = record
        if not waiting:
            break
        record, line = waiting.popleft()
        at = record.number
        _fill(record, intents.pop(record.call, None) if record.event == "outcome" else None)
        if wanted.has(record, line):
            found.append(record)
        elif 0 < record.time < wanted.since - DAY:  # clocks are set back, but not so far
            is_over = True
            break
    total = last - first + 1 if last else 0
    return found, "" if is_over or at <= first else str(at), total


def _records_of(path: Path, call: str) -> list[_Record]:
    needle = f'"call":"{call}"'.encode()
    found: list[_Record] = []
    for number, line in islice(TrailFile(path).newest_first(), MAX_READ):
        if needle in line:
            record = _record(number, line)
            found.insert(0, record)
            if record.event in _BEGINNINGS:
                break
    for record in found:
        _fill(record, found[0])
    return found


def _stamp(path: Path) -> list[tuple[str, int, int]]:
    files = [path, *(rotated_files(path) if path.suffix == ".jsonl" else [])]
    found = [(each.name, each.stat().st_ctime_ns, each.stat().st_size) for each in files]  # a time that nobody can set
    log = Path(f"{path}-wal")  # of which SQLite sets that time whenever it is read
    return [*found, (log.name, log.stat().st_mtime_ns, log.stat().st_size)] if log.exists() else found


def _verify(path: Path) -> Object:
    trail = TrailFile(path)
    found = verify_chain(trail.lines())
    made: Object = {
        "ok": found.flaw is None and not trail.damage,
        "records": found.records,
        "first": found.first,
        "last": found.last,
        "damage": trail.damage,
        "unfinished": list(found.unfinished[-MAX_UNFINISHED:]),
        "head": found.head,
    }
    return made if found.flaw is None else {**made, "flaw": to_builtins(found.flaw)}


# Taking away


def _lines(trail: TrailFile, wanted: _Wanted) -> Iterator[tuple[bytes, _Record]]:
    """Oldest first, each as it is in the file."""
    intents: dict[str, _Record] = {}
    for _, line in trail.lines():
        link = link_of(line)
        record = _record(link.number if link else 0, line)
        if record.event == "intent" and len(intents) < MAX_READ:
            intents[record.call] = record
        _fill(record, intents.pop(record.call, None) if record.event == "outcome" else None)
        if wanted.has(record, line):
            yield line, record


def _rows(lines: Iterable[tuple[bytes, _Record]]) -> Generator[bytes]:
    def row(cells: Iterable[object]) -> bytes:
        text = io.StringIO()
        csv.writer(text).writerow([_cell(str(each)) for each in cells])
        return text.getvalue().encode("utf-8", "replace")

    yield row([*COLUMNS, *MORE_COLUMNS])
    for _, record in lines:
        own = [str(record.raw.get("time", "")) if name == "time" else getattr(record, name) for name in COLUMNS]
        yield row([*own, *(record.raw.get(name, "") for name in MORE_COLUMNS)])


def _cell(text: str) -> str:
    """A text, whatever a table program would make of it."""
    return f"'{text}" if _FORMULA.match(text) else text


async def _chunks(pieces: Generator[bytes]) -> AsyncIterator[bytes]:
    """Read in one thread, which is what a database wants, as fast as it is taken."""

    def more() -> bytes:
        chunk = bytearray()
        for piece in pieces:
            chunk += piece
            if len(chunk) >= CHUNK:
                break
        return bytes(chunk)

    thread, loop = ThreadPoolExecutor(1, "handrail-export"), asyncio.get_running_loop()
    try:
        while chunk := await loop.run_in_executor(thread, more):
            yield chunk
    finally:
        thread.submit(pieces.close)
        thread.shutdown(wait=False)
