"""The exit codes of the command line, and the error for wrong usage.

Messages of this command on a terminal, and marks on foreign text that could be mistaken for one (P-33).
"""

from __future__ import annotations

import os
import re
import sys
from enum import IntEnum
from typing import Self

from handrail import errors
from handrail.text.controls import CONTINUATION, escape_with_continuations

__all__ = ["ExitCode", "UsageError", "exit_code_for", "mark_foreign_lines", "message"]


class ExitCode(IntEnum):
    """The exit codes of all verbs. `description` is the text in the help."""

    description: str

    OK = 0, "success"
    TOOL = 1, "the tool reported an error"
    USAGE = 2, "the command line, a file or a setting is wrong"
    PROTOCOL = 3, "the server broke the protocol, or answered with an error"
    TRANSPORT = 4, "the server could not be reached, or disconnected"
    DENIED = 5, "a person or a rule refused; nothing was done"
    TIMEOUT = 6, "a timeout expired"
    AUTHORIZATION = 7, "the server requires authorization"
    UNRECORDED = 8, "a call was sent and its outcome could not be recorded; do not simply repeat it"
    BUG = 70, "a bug in the served file or in handrail; the traceback says where"
    INTERRUPTED = 130, "Ctrl-C"

    def __new__(cls, value: int, says: str) -> Self:
        member = int.__new__(cls, value)
        member._value_, member.description = value, says
        return member


class UsageError(errors.HandrailError):
    """The command line, or a file it names, is wrong. `details` (a usage text, a traceback) are printed before it."""

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


FORBIDDEN = 403  # the HTTP status for a caller whom a rule refuses
_CODES: dict[type[BaseException], ExitCode] = {
    errors.CallFailed: ExitCode.TOOL,
    errors.TransportError: ExitCode.TRANSPORT,
    errors.CallTimeout: ExitCode.TIMEOUT,
    errors.RemoteProtocolError: ExitCode.PROTOCOL,
    errors.LocalProtocolError: ExitCode.PROTOCOL,
    errors.Denied: ExitCode.DENIED,
    errors.AuthorizationError: ExitCode.AUTHORIZATION,
    errors.HandrailError: ExitCode.USAGE,  # the rest is wrong on this side: a file, a schema, a word
    KeyboardInterrupt: ExitCode.INTERRUPTED,
}


def exit_code_for(problem: BaseException) -> ExitCode:
    if isinstance(problem, errors.Unrecorded) and problem.sent is not errors.Sent.NO:
        return ExitCode.UNRECORDED  # if it was not sent, only a file is wrong
    if isinstance(problem, errors.RemoteProtocolError) and problem.code == FORBIDDEN:
        return ExitCode.DENIED
    if isinstance(problem, errors.CallFailed) and problem.result.refused:
        return ExitCode.DENIED
    return next((code for kind, code in _CODES.items() if isinstance(problem, kind)), ExitCode.BUG)


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
