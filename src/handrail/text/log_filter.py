"""Secrets stay out of our logs, whatever a tool put into its exception (P-34)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from handrail.text.controls import mask
from handrail.text.log_lines import LINES
from handrail.text.secrets import Secrets

__all__ = ["keep_out_of_logs"]


class _Known:
    """The secrets of all servers of this process."""

    def __init__(self) -> None:
        self.values: set[str] = set()
        self.patterns: dict[str, str] = {}
        self.secrets: Secrets | None = None  # made of both, when there is something to say

    def masked(self, text: str) -> str:
        self.secrets = self.secrets or Secrets(self.values, self.patterns)
        return mask(self.secrets.masked([text])[0][0])


_known = _Known()


def keep_out_of_logs(secrets: Iterable[str], patterns: Mapping[str, str] | None = None) -> None:
    """From now on, and for all servers of this process."""
    _known.values.update(secrets)
    _known.patterns |= {pattern: pattern for pattern in (patterns or {}).values()}
    _known.secrets = None
    LINES.masked = _known.masked
