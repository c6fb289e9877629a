"""`handrail audit`: which tools were called from here, by the records under the state folder (APP-13).

`verify` and `export` are about the trails of servers: `trails.py`.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path

from handrail.cli.codes import Code, Usage
from handrail.cli.screen import Screen, json_text
from handrail.client.state import state_folder
from handrail.guards.inert import inert, mask_secrets, one_line
from handrail.model import Json, Object

__all__ = ["FILE", "run"]

FILE = "audit.jsonl"
LOOK_SECONDS = 0.2
COLUMNS = "time server tool outcome seconds confirmed revision arguments_digest arguments".split()
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_AGO = re.compile(r"([0-9]{1,6})([smhd])")


def run(args: Namespace, screen: Screen) -> int:
    if args.what in ("verify", "export"):
        from handrail.cli import trails  # which needs SQLite, and `handrail call` needs this module

        return trails.run(args, screen)
    if args.follow and args.what:
        raise Usage("--follow: for calls that were made from here; served ones are listed as they are now")
    if args.follow and args.export:
        raise Usage("--follow: goes on without end, and --export is one document; choose one of them")
    path = state_folder(os.environ) / FILE
    wanted = _filter(args)
    log: _Log | _Served = _Served(args) if args.what else _Log(path)
    records: Iterable[Object] = (record for record in log.read() if wanted(record))
    if args.tail:
        records = deque(records, args.tail)
    if args.export:
        _export(args.export, records)
    else:
        for record in records:
            _show(record, screen)
    if log.unread:
        screen.note(f"{path}: {log.unread} lines are not records")
    while args.follow:
        sys.stdout.flush()
        time.sleep(LOOK_SECONDS)
        for record in log.read():
            if wanted(record):
                _show(record, screen)
    return Code.OK


class _Served:
    """The calls that servers here have on record, each as one: how it was agreed to, and what became of it."""

    unread = 0

    def __init__(self, args: Namespace) -> None:
        from handrail.cli import trails

        self._trails = trails.opened(args)

    def read(self) -> Iterator[Object]:
        begun: dict[str, Object] = {}
        for line in (line for trail in self._trails for _, line in trail.lines()):
            try:
                record = {"event": "", **json.loads(line)}
            except (ValueError, TypeError):  # never finished, or damaged: `verify` says which
                self.unread += 1
                continue
            if record["event"] == "intent":
                begun[record["call"]] = record
            elif record["event"] in ("outcome", "refusal", "answered"):
                yield _as_one({**begun.pop(record.get("call", ""), {}), **record})
        for record in begun.values():
            yield _as_one({**record, "outcome": "unknown: it was begun, and nothing more is on record"})


def _as_one(record: Object) -> Object:
    return mask_secrets({**record, "confirmed": record.get("agreed") or record.get("rule", "")})  # type: ignore[no-any-return]  # a dict stays one


class _Log:
    """A file of JSON lines that may grow, and of which the last may not be finished."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._file: tuple[int, int] | None = None
        self.unread = 0

    def read(self) -> Iterator[Object]:
        """What has come since it was read last."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            found = os.fstat(file.fileno())
            if self._file != (found.st_dev, found.st_ino) or found.st_size < self._place:  # another one by now
                self._place = 0
            self._file = (found.st_dev, found.st_ino)
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written, or whoever wrote it was killed
                self._place += len(line)
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                if isinstance(record, dict):
                    yield mask_secrets(record)
                else:
                    self.unread += 1


def _filter(args: Namespace) -> Callable[[Object], bool]:
    globs = {name: glob for name in ("server", "tool", "outcome") if (glob := getattr(args, name)) is not None}
    since = _time(args.since) if args.since is not None else None

    def wanted(record: Object) -> bool:
        if not all(fnmatchcase(str(record.get(name, "")), glob) for name, glob in globs.items()):
            return False
        try:
            return since is None or _moment(str(record.get("time"))) >= since
        except ValueError:
            return False

    return wanted


def _time(text: str) -> datetime:
    if ago := _AGO.fullmatch(text):
        return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    try:
        return _moment(text)
    except ValueError:
        raise Usage(f"--since: {text!r} is not a time such as 2026-07-28T09:30, or 30m, 2h, 7d ago") from None


def _moment(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.astimezone()  # without a zone it is ours


def _show(record: Object, screen: Screen) -> None:
    if screen.as_json:
        screen.data(record)
        return
    outcome = one_line(str(record.get("outcome", "?")), 20)
    style = "green" if outcome == "ok" else "yellow" if outcome == "denied" else "red"
    seconds = record.get("seconds")
    took = f"{seconds:.3f} s" if isinstance(seconds, int | float) else "-"
    when, server, tool = (one_line(str(record.get(name, "?")), 64) for name in ("time", "server", "tool"))
    how = f"  {one_line(str(record['confirmed']), 20)}" if record.get("confirmed") else ""
    screen.say(f"{when}  {server}  {screen.paint(tool, 'bold')}  {screen.paint(outcome, style)}  {took}{how}")
    if "arguments" in record:
        screen.say(f"    {inert(json.dumps(record['arguments'], ensure_ascii=False), lines=False)}")


def _export(form: str, records: Iterable[Object]) -> None:
    if form == "json":
        print(json_text(list(records)))
        return
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(COLUMNS)
    for record in records:
        table.writerow([_cell(record.get(name)) for name in COLUMNS])


def _cell(value: Json) -> str:
    if value is None:
        return ""
    text = inert(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), lines=False)
    return "'" + text if text.startswith(("=", "+", "-", "@")) else text  # a table program would run it
