"""Reading the audit log for people: records as rows, outcomes with their intents, times, and cells of a CSV file."""

from __future__ import annotations

import re
from datetime import datetime

from msgspec import DecodeError, Struct
from msgspec.json import decode

from handrail.model import Object

__all__ = ["RecordRow", "csv_cell", "parse_record", "record_row", "record_time"]

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
