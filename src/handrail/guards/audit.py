"""A record of each call a client made, one line a call. What servers keep is in `trail.py`."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct, field

from handrail.jsonrpc import encode_sorted
from handrail.model import Object
from handrail.stores import Store

logger = logging.getLogger("handrail.audit")

KEPT = 100_000
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class CallRecord(Struct):
    """One call, written when it is over: who was asked, what for, how it ended. Arguments only as a digest."""

    server: str
    tool: str
    arguments: Object
    confirmed: str = ""  # by a handler, by a rule; "unconfirmed": by the code that called
    outcome: str = ""
    sent: str = ""
    revision: str = ""
    began: float = field(default_factory=time.monotonic)

    def line(self) -> bytes:
        """The record as one line of JSON."""
        return encode_sorted(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "server": self.server,
                "tool": self.tool,
                "arguments_digest": "sha256:" + hashlib.sha256(encode_sorted(self.arguments)).hexdigest(),
                "confirmed": self.confirmed,
                "outcome": self.outcome,
                "sent": self.sent,
                "seconds": round(time.monotonic() - self.began, 6),
                "revision": self.revision,
            }
        )


Recorder = Callable[[CallRecord], Awaitable[None] | None]


def to_logger(record: CallRecord) -> None:
    """To the logger `handrail.audit`."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", record.line().decode())


def recorder(audit: str | Path | Store | Recorder | None) -> Recorder:
    """Where records go: to the logger alone, also to a file or a store, or to whatever takes one."""
    if audit is None:
        return to_logger
    if callable(audit):
        return audit
    return to_file(audit) if isinstance(audit, str | Path) else to_store(audit)


def to_store(store: Store) -> Recorder:
    """To the log `audit:calls` of a store; the last hundred thousand are kept."""

    async def record(it: CallRecord) -> None:
        to_logger(it)
        await store.append("audit:calls", it.line(), keep=KEPT)

    return record


def to_file(path: str | Path) -> Recorder:
    """To a file of lines, private to the user and not behind a link; a line is written by one call, or not at all."""

    def record(it: CallRecord) -> None:
        to_logger(it)
        try:
            descriptor = os.open(path, _FLAGS, 0o600)
            try:
                os.write(descriptor, it.line() + b"\n")
            finally:
                os.close(descriptor)
        except OSError as problem:  # the call has been made, whatever becomes of its record
            logger.error("a call could not be recorded in %s: %s", path, problem)

    return record
