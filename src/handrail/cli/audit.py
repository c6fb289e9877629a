"""`handrail audit`: which tools were called from here, or (`served`) by others here, each call as one line (APP-13)."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

from handrail.cli.codes import Code, Usage
from handrail.cli.screen import Screen, json_text
from handrail.client.state import CALLS, state_folder
from handrail.guards.inert import inert, mask_secrets, one_line
from handrail.guards.trail_reading import TrailFile
from handrail.model import Json, Object

__all__ = ["run"]

LOOK_SECONDS = 0.2
COLUMNS = "time server tool outcome seconds confirmed revision arguments_digest arguments".split()
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_AGO = re.compile(r"([0-9]{1,6})([smhd])")


def run(args: Namespace, screen: Screen) -> int:
    paths = [state_folder(os.environ) / CALLS]
    if args.what:
        from handrail.cli import trails  # which reads configurations, and so needs all of the server

        if args.what != "served":
            return trails.run(args, screen)
        paths = trails.paths(args)
        if missing := [path for path in paths if not path.exists()]:
            raise Usage(f"{missing[0]}: there is no such file")
    if args.follow and args.what:
        raise Usage("--follow: for calls that were made from here; served ones are listed as they are now")
    if args.follow and args.export:
        raise Usage("--follow: goes on without end, and --export is one document; choose one of them")
    calls, wanted = _Calls(paths), _filter(args)
    records: Iterable[Object] = filter(wanted, chain(calls.read(), calls.unfinished()))
    if args.tail:
        records = deque(records, args.tail)
    if args.export:
        _export(args.export, records)
    else:
        for record in records:
            _show(record, screen)
    if calls.unread:
        screen.note(f"{calls.unread} lines are not records; `handrail audit verify` says which")
    while args.follow:
        sys.stdout.flush()
        time.sleep(LOOK_SECONDS)
        for record in filter(wanted, calls.read()):
            _show(record, screen)
    return Code.OK


class _Calls:
    """The calls that trails have on record, each as one: how it was agreed to, and what became of it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._last = dict.fromkeys(paths, 0)  # that was read
        self._begun: dict[str, Object] = {}
        self.unread = 0

    def read(self) -> Iterator[Object]:
        """Those that have ended since they were read last."""
        for path, last in self._last.items():
            for _, line in TrailFile(path).lines(last) if path.exists() else ():
                try:
                    record = {"event": "", "call": "", "number": 0, **json.loads(line)}
                except (ValueError, TypeError, RecursionError):  # never finished, or damaged
                    self.unread += 1
                    continue
                self._last[path] = record["number"]
                if record["event"] == "intent":
                    self._begun[record["call"]] = record
                elif record["event"] in ("outcome", "refusal", "answered"):
                    yield _as_one({**self._begun.pop(record["call"], {}), **record})

    def unfinished(self) -> Iterator[Object]:
        for record in self._begun.values():
            yield _as_one({**record, "outcome": "unknown: it was begun, and nothing more is on record"})


def _as_one(record: Object) -> Object:
    return mask_secrets({**record, "confirmed": record.get("agreed") or record.get("rule", "")})  # type: ignore[no-any-return]  # a dict stays one


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
