"""Secrets stay out of our logs, whatever a tool put into its exception (P-34)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from handrail.guards.inert import inert, mask
from handrail.guards.secrets import Secrets

__all__ = ["keep_out_of_logs"]

_formatter = logging.Formatter()


class _Masking(logging.Filter):
    """Masks the text of a record, and its traceback, before any handler sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[str] = set()
        self.patterns: dict[str, str] = {}
        self.secrets: Secrets | None = None  # made of both, when there is something to say

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and not record.exc_text:
            record.exc_text = _formatter.formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = self._masked(record.exc_text)
        said = record.getMessage()
        told = self._masked(said)
        if told != said:
            record.msg, record.args = told, ()
        return True

    def _masked(self, text: str) -> str:
        self.secrets = self.secrets or Secrets(self.known, self.patterns)
        return inert(mask(self.secrets.masked([text])[0][0]))


_masking = _Masking()


def keep_out_of_logs(secrets: Iterable[str], patterns: Mapping[str, str] | None = None) -> None:
    """From now on, and for all servers of this process."""
    _masking.known.update(secrets)
    _masking.patterns |= {pattern: pattern for pattern in (patterns or {}).values()}
    _masking.secrets = None
    logger = logging.getLogger("handrail")
    if _masking not in logger.filters:
        logger.addFilter(_masking)
