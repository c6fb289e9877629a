"""One record of our log, one line: foreign text begins none, whatever is in an exception or a message (P-33).

Of a traceback each line is marked. The filter of the logger sees a record before any handler does, so this holds
whatever handlers and formats an application has chosen; it is there as soon as a guard is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from handrail.text.controls import CONTINUES, continued, inert, mask

__all__ = ["LINES"]

_formatter = logging.Formatter()


class _Lines(logging.Filter):
    """Makes a record's text and traceback inert, without what looks like a secret."""

    masked: Callable[[str], str] = staticmethod(mask)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and not record.exc_text:
            record.exc_text = _formatter.formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = CONTINUES + continued(self.masked(record.exc_text))
        if record.stack_info:
            record.stack_info = CONTINUES + continued(self.masked(record.stack_info))
        message = record.getMessage()
        shown = inert(self.masked(message), lines=False)
        if shown != message:
            record.msg, record.args = shown, ()
        return True


LINES = _Lines()
logging.getLogger("handrail").addFilter(LINES)
