"""The error tree, and the kinds of failure a peer can be told about.

HandrailError
├── LocalProtocolError       the calling code tried to send what the peer's revision does not allow
├── RemoteProtocolError      the peer broke the rules, or answered with an error
├── ToolError                the tool failed, and the model should be told why
├── Refused                  a guard said no; `.kind` says which
├── SchemaError              a schema cannot be used; says where and why
└── TransportError           the peer could not be reached or went away
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What went wrong. Each revision decides how the kind is told (`Revision.faults`)."""

    PARSE = "parse"
    INVALID_REQUEST = "invalid_request"
    UNKNOWN_METHOD = "unknown_method"
    BAD_PARAMS = "bad_params"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    NEEDS_CAPABILITY = "needs_capability"
    NEEDS_URL = "needs_url"
    OVERLOADED = "overloaded"
    FORBIDDEN = "forbidden"
    TIMEOUT = "timeout"
    VERSION = "version"
    INTERNAL = "internal"
    ENVELOPE = "envelope"  # over HTTP: what every request must say is missing or wrong
    MISMATCH = "mismatch"  # a header and the body differ
    NO_SESSION = "no_session"


class HandrailError(Exception):
    """Everything this package raises on purpose."""


class LocalProtocolError(HandrailError):
    """The calling code tried to send something the peer's revision does not allow."""


class RemoteProtocolError(HandrailError):
    """The peer broke the rules, or answered a request with an error."""

    def __init__(self, message: str, *, code: int = 0, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


class ToolError(HandrailError):
    """Raise in a tool to tell the model what went wrong.

    >>> raise ToolError("No such city: Atlantis", status="not_found")
    Traceback (most recent call last):
    handrail.errors.ToolError: No such city: Atlantis

    The keyword arguments travel with the text where the revision has a place for them.
    """

    def __init__(self, text: str, **data: Any) -> None:
        super().__init__(text)
        self.text = str(text)
        self.data = data


class Refused(HandrailError):
    """The call was not carried out; `kind` says why, `data` what would help.

    `prefix` is put before the text where a revision has no other place to say what the text is about.
    """

    def __init__(self, kind: Kind, text: str, data: dict[str, Any] | None = None, *, prefix: str = "") -> None:
        super().__init__(prefix + text)
        self.kind = kind
        self.text = text
        self.data = data
        self.prefix = prefix


class SchemaError(HandrailError, ValueError):
    """A JSON Schema, or a signature to make one from, cannot be used."""


class TransportError(HandrailError):
    """The peer could not be reached, or went away."""
