"""Messages of this command on a terminal, and marks on foreign text that could be mistaken for one (P-33)."""

from __future__ import annotations

import os
import re
import sys

from handrail.text.controls import CONTINUATION, escape_with_continuations

__all__ = ["mark_foreign_lines", "message"]

NAME = "handrail:"
COLUMNS = 80  # of a terminal whose size is unknown

_OURS = re.compile(rf"^(?=(?:\x1b\[[0-9;]*m)*{NAME})", re.MULTILINE)
_INSIDE = re.compile(rf"(?<!^)(?<!^\| )(?={NAME})")


def message(text: str) -> str:
    """Return a message for standard error. Its lines after the first are marked as continued."""
    text = escape_with_continuations(text)
    return f"{NAME} " + (_break_lines(text, len(NAME) + 1) if sys.stderr.isatty() else text)


def mark_foreign_lines(text: str) -> str:
    """Mark lines that begin like messages of this command, also in colour, or after the terminal wraps them."""
    if NAME not in text:
        return text
    text = _OURS.sub(CONTINUATION.lstrip(), text)
    return _break_lines(text, 0) if sys.stdout.isatty() or sys.stderr.isatty() else text


def _break_lines(text: str, indent: int) -> str:
    """Break long lines with our name in them before the terminal wraps them."""
    if NAME not in text:
        return text
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        columns = COLUMNS
    most = columns // 2 - indent  # a character may be two columns wide
    return "\n".join(_INSIDE.sub(f"\n{CONTINUATION}", line) if len(line) > most else line for line in text.split("\n"))
