"""The exit codes of the command line, and the error for wrong usage."""

from __future__ import annotations

from enum import IntEnum
from typing import Self

from handrail import errors

__all__ = ["ExitCode", "UsageError", "exit_code_for"]


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
