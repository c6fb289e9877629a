"""How the command line ends: one number for each way."""

from __future__ import annotations

from enum import IntEnum
from typing import Self

from handrail import errors

__all__ = ["ExitCode", "UsageError", "exit_code_for"]


class ExitCode(IntEnum):
    """The exit code of every verb; `description` is what the help tells of it."""

    description: str

    OK = 0, "it went well"
    TOOL = 1, "the tool said that it failed"
    USAGE = 2, "the command line, a file or a setting is wrong"
    PROTOCOL = 3, "the server broke the rules, or answered with an error"
    TRANSPORT = 4, "the server could not be reached, or went away"
    DENIED = 5, "somebody, or a rule, said no: nothing was done"
    TIMEOUT = 6, "a clock ran out"
    AUTHORIZATION = 7, "the server wants to know who is calling"
    UNRECORDED = 8, "a call was sent, and what came of it could not be recorded; do not simply repeat it"
    BUG = 70, "a bug, of the file that is served or of ours; the traceback says where"
    INTERRUPTED = 130, "Ctrl-C"

    def __new__(cls, value: int, says: str) -> Self:
        member = int.__new__(cls, value)
        member._value_, member.description = value, says
        return member


class UsageError(errors.HandrailError):
    """The command line, or something it names, is wrong. `details` are shown as they are: a usage, a traceback."""

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


FORBIDDEN = 403  # a server's answer to whom a rule does not allow it
_CODES: dict[type[BaseException], ExitCode] = {
    errors.CallFailed: ExitCode.TOOL,
    errors.TransportError: ExitCode.TRANSPORT,
    errors.CallTimeout: ExitCode.TIMEOUT,
    errors.RemoteProtocolError: ExitCode.PROTOCOL,
    errors.LocalProtocolError: ExitCode.PROTOCOL,
    errors.Denied: ExitCode.DENIED,
    errors.AuthorizationError: ExitCode.AUTHORIZATION,
    errors.HandrailError: ExitCode.USAGE,  # what is left is wrong here: a file, a schema, a word
    KeyboardInterrupt: ExitCode.INTERRUPTED,
}


def exit_code_for(problem: BaseException) -> ExitCode:
    if isinstance(problem, errors.Unrecorded) and problem.sent is not errors.Sent.NO:
        return ExitCode.UNRECORDED  # not sent, it is only a file that is wrong
    if isinstance(problem, errors.RemoteProtocolError) and problem.code == FORBIDDEN:
        return ExitCode.DENIED
    if isinstance(problem, errors.CallFailed) and problem.result.refused:
        return ExitCode.DENIED
    return next((code for kind, code in _CODES.items() if isinstance(problem, kind)), ExitCode.BUG)
