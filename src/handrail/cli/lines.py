"""Lines of this command on a terminal, where results and messages are on one screen: foreign text makes none (P-33)."""

from __future__ import annotations

import os
import re
import sys

from handrail.text.controls import CONTINUES, continued

__all__ = ["message", "set_off"]

NAME = "handrail:"
COLUMNS = 80  # where a terminal does not say

_OURS = re.compile(rf"^(?=(?:\x1b\[[0-9;]*m)*{NAME})", re.MULTILINE)
_INSIDE = re.compile(rf"(?<!^)(?<!^\| )(?={NAME})")


def message(text: str) -> str:
    """What this command says on standard error, whatever is in it: further lines are marked."""
    text = continued(text)
    return f"{NAME} " + (_broken(text, len(NAME) + 1) if sys.stderr.isatty() else text)


def set_off(text: str) -> str:
    """Mark the lines that begin as ours do, those with a colour too, or that would where a terminal breaks them."""
    if NAME not in text:
        return text
    text = _OURS.sub(CONTINUES.lstrip(), text)
    return _broken(text, 0) if sys.stdout.isatty() or sys.stderr.isatty() else text


def _broken(text: str, indent: int) -> str:
    """Break lines that a terminal would break, and that have our name in them, before it does."""
    if NAME not in text:
        return text
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        columns = COLUMNS
    most = columns // 2 - indent  # a character may be two columns wide
    return "\n".join(_INSIDE.sub(f"\n{CONTINUES}", line) if len(line) > most else line for line in text.split("\n"))
