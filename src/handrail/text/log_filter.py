"""One record of our log, one line: foreign text begins none, whatever is in an exception or a message (P-33).

Of a traceback each line is marked. The filter of the logger sees a record before any handler does, so this holds
whatever handlers and formats an application has chosen; it is there as soon as a guard is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from handrail.text.controls import CONTINUATION, escape, escape_with_continuations, mask

if TYPE_CHECKING:
    from handrail.text.secrets import Secrets

__all__ = ["ESCAPE_FILTER", "keep_out_of_logs"]

_formatter = logging.Formatter()


class _EscapeFilter(logging.Filter):
    """A filter that escapes a record's text and traceback, and masks what looks like a secret."""

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


class _ProcessSecrets:
    """The secrets of all servers of this process."""

    def __init__(self) -> None:
        self.values: set[str] = set()
        self.patterns: dict[str, str] = {}
        self.secrets: Secrets | None = None  # compiled at the first record

    def mask_text(self, text: str) -> str:
        if self.secrets is None:
            from handrail.text.secrets import Secrets  # its patterns take time to compile: not at every start

            self.secrets = Secrets(self.values, self.patterns)
        return mask(self.secrets.mask_texts([text])[0][0])


_process_secrets = _ProcessSecrets()


def keep_out_of_logs(secrets: Iterable[str], patterns: Mapping[str, str] | None = None) -> None:
    """From now on, and for all servers of this process."""
    _process_secrets.values.update(secrets)
    _process_secrets.patterns |= {pattern: pattern for pattern in (patterns or {}).values()}
    _process_secrets.secrets = None
    ESCAPE_FILTER.mask_text = _process_secrets.mask_text
