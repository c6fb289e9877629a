"""Secrets stay out of our logs, whatever a tool put into its exception (P-34)."""

from __future__ import annotations

import logging
from collections.abc import Collection

from handrail.guards.inert import inert, mask

__all__ = ["keep_out_of_logs"]

_formatter = logging.Formatter()


class _Masking(logging.Filter):
    """Masks the text of a record, and its traceback, before any handler sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.known: frozenset[str] = frozenset()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and not record.exc_text:
            record.exc_text = _formatter.formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = inert(mask(record.exc_text, self.known))
        said = record.getMessage()
        told = inert(mask(said, self.known))
        if told != said:
            record.msg, record.args = told, ()
        return True


_masking = _Masking()


def keep_out_of_logs(secrets: Collection[str]) -> None:
    """From now on, and for all servers of this process."""
    _masking.known |= frozenset(secrets)
    logger = logging.getLogger("handrail")
    if _masking not in logger.filters:
        logger.addFilter(_masking)
