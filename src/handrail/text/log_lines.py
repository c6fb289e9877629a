"""One record of our log, one line: foreign text begins none, whatever is in an exception or a message (P-33).

Of a traceback each line is marked. The filter of the logger sees a record before any handler does, so this holds
whatever handlers and formats an application has chosen; it is there as soon as a guard is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from handrail.text.controls import CONTINUATION, escape, escape_with_continuations, mask

__all__ = ["ESCAPE_FILTER"]

_formatter = logging.Formatter()


class _EscapeFilter(logging.Filter):
    """Makes a record's text and traceback inert, without what looks like a secret."""

    mask_text: Callable[[str], str] = staticmethod(mask)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and not record.exc_text:
            record.exc_text = _formatter.formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = CONTINUATION + escape_with_continuations(self.mask_text(record.exc_text))
        if record.stack_info:
            record.stack_info = CONTINUATION + escape_with_continuations(self.mask_text(record.stack_info))
        message = record.getMessage()
        escaped = escape(self.mask_text(message), lines=False)
        if escaped != message:
            record.msg, record.args = escaped, ()
        return True


ESCAPE_FILTER = _EscapeFilter()
logging.getLogger("handrail").addFilter(ESCAPE_FILTER)
