"""What is logged while a verb runs, and how a verb is asked to end."""

from __future__ import annotations

import logging
import signal
import sys

from handrail.guards.inert import one_line

__all__ = ["hear_logs"]

MAX_LOGGED = 20


class _Told(logging.Handler):
    """What is logged while a verb runs: errors only, as one inert line each, and not without end."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._left = MAX_LOGGED

    def emit(self, record: logging.LogRecord) -> None:
        self._left -= 1
        if self._left >= 0:
            print(f"handrail: {one_line(record.getMessage(), 300)}", file=sys.stderr, flush=True)


def hear_logs() -> None:
    """Verbs say themselves what there is to say; a hang-up and a request to end count as Ctrl-C."""
    logger = logging.getLogger("handrail")
    logger.addHandler(_Told())
    logger.propagate = False
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
