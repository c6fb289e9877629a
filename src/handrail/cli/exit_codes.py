"""How the command line ends: one number for each way."""

from __future__ import annotations

from enum import IntEnum
from typing import Self

from handrail import errors

__all__ = ["Code", "Usage", "code_of"]


class Code(IntEnum):
    """The exit code of every verb; `says` is what the help tells of it."""

    says: str

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
        made = int.__new__(cls, value)
        made._value_, made.says = value, says
        return made


class Usage(errors.HandrailError):
    """The command line, or something it names, is wrong. `details` are shown as they are: a usage, a traceback."""

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


FORBIDDEN = 403  # a server's answer to whom a rule does not allow it
_CODES: dict[type[BaseException], Code] = {
    errors.CallFailed: Code.TOOL,
    errors.TransportError: Code.TRANSPORT,
    errors.CallTimeout: Code.TIMEOUT,
    errors.RemoteProtocolError: Code.PROTOCOL,
    errors.LocalProtocolError: Code.PROTOCOL,
    errors.Denied: Code.DENIED,
    errors.AuthorizationError: Code.AUTHORIZATION,
    errors.HandrailError: Code.USAGE,  # what is left is wrong here: a file, a schema, a word
    KeyboardInterrupt: Code.INTERRUPTED,
}


def code_of(problem: BaseException) -> Code:
    if isinstance(problem, errors.Unrecorded) and problem.sent is not errors.Sent.NO:
        return Code.UNRECORDED  # not sent, it is only a file that is wrong
    if isinstance(problem, errors.RemoteProtocolError) and problem.code == FORBIDDEN:
        return Code.DENIED
    if isinstance(problem, errors.CallFailed) and problem.result.refused:
        return Code.DENIED
    return next((code for kind, code in _CODES.items() if isinstance(problem, kind)), Code.BUG)
