"""How the command line ends: one number for each way."""

from __future__ import annotations

from enum import IntEnum

from handrail import errors

__all__ = ["Code", "Usage", "code_of"]


class Code(IntEnum):
    """The exit code of every verb; `says` is what the help tells of it."""

    OK = 0
    TOOL = 1
    USAGE = 2
    PROTOCOL = 3
    TRANSPORT = 4
    DENIED = 5
    TIMEOUT = 6
    AUTHORIZATION = 7
    BUG = 70
    INTERRUPTED = 130

    @property
    def says(self) -> str:
        return _SAYS[self]


_SAYS = {
    Code.OK: "it went well",
    Code.TOOL: "the tool said that it failed",
    Code.USAGE: "the command line, a file or a setting is wrong",
    Code.PROTOCOL: "the server broke the rules, or answered with an error",
    Code.TRANSPORT: "the server could not be reached, or went away",
    Code.DENIED: "somebody, or a rule, said no: nothing was done",
    Code.TIMEOUT: "a clock ran out",
    Code.AUTHORIZATION: "the server wants to know who is calling",
    Code.BUG: "a bug, of the file that is served or of ours; the traceback says where",
    Code.INTERRUPTED: "Ctrl-C",
}


class Usage(errors.HandrailError):
    """The command line, or something it names, is wrong. `details` are shown as they are: a usage, a traceback."""

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


_CODES: tuple[tuple[type[BaseException], Code], ...] = (
    (errors.CallFailed, Code.TOOL),
    (errors.TransportError, Code.TRANSPORT),
    (errors.CallTimeout, Code.TIMEOUT),
    (errors.RemoteProtocolError, Code.PROTOCOL),
    (errors.LocalProtocolError, Code.PROTOCOL),
    (errors.Denied, Code.DENIED),
    (errors.AuthorizationError, Code.AUTHORIZATION),
    (errors.HandrailError, Code.USAGE),  # what is left is wrong here: a file, a schema, a word
    (KeyboardInterrupt, Code.INTERRUPTED),
)


def code_of(problem: BaseException) -> Code:
    return next((code for kind, code in _CODES if isinstance(problem, kind)), Code.BUG)
