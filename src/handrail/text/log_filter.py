"""Secrets stay out of our logs, whatever a tool put into its exception (P-34)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from handrail.text.controls import mask
from handrail.text.log_lines import ESCAPE_FILTER
from handrail.text.secrets import Secrets

__all__ = ["keep_out_of_logs"]


class _ProcessSecrets:
    """The secrets of all servers of this process."""

    def __init__(self) -> None:
        self.values: set[str] = set()
        self.patterns: dict[str, str] = {}
        self.secrets: Secrets | None = None  # made of both, when there is something to say

    def mask_text(self, text: str) -> str:
        self.secrets = self.secrets or Secrets(self.values, self.patterns)
        return mask(self.secrets.mask_texts([text])[0][0])


_process_secrets = _ProcessSecrets()


def keep_out_of_logs(secrets: Iterable[str], patterns: Mapping[str, str] | None = None) -> None:
    """From now on, and for all servers of this process."""
    _process_secrets.values.update(secrets)
    _process_secrets.patterns |= {pattern: pattern for pattern in (patterns or {}).values()}
    _process_secrets.secrets = None
    ESCAPE_FILTER.mask_text = _process_secrets.mask_text
