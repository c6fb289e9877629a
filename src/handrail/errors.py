"""The error tree, and the kinds of failure that are reported to a peer.

HandrailError
├── PeerError                something between us and a peer failed; `.kind`, `.sent`, `.server`, `.phase`, `.hint`
│   ├── TransportError       the peer could not be reached, or went away
│   │   └── HttpRefused      it answered with a status and no message
│   ├── CallTimeout          a clock ran out; `.clock` says which, `.progress` how far the call had got
│   ├── RemoteProtocolError  the peer broke the rules, or answered with an error; `.code`, `.data`
│   │   └── InvalidResult    it answered what it has promised not to; `.result`
│   ├── CallFailed           the tool said that it failed, and an exception was asked for; `.result`
│   ├── Denied               a person, or a rule, said no: nothing was sent
│   │   └── ConfirmationRequired   no user could be asked
│   ├── Unrecorded           the call could not be written down: nothing was sent, or what came of it is withheld
│   └── AuthorizationError   the server wants to know who is calling
├── LocalProtocolError       the calling code tried to send what the peer's revision does not allow
├── ToolError                the tool failed, and the model should be told why
│   └── ResourceNotFound     there is no resource of this URI
├── Refused                  a guard said no; `.kind` says which
└── SchemaError              a schema cannot be used; says where and why
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

GIVE_KEY = (
    "Give its API key: --key KEY, in Python headers={'Authorization': 'Bearer KEY'}; "
    "where the server runs, `handrail keys new NAME` makes one"
)


EXTRAS = {
    "http": ["uvicorn>=0.54,<1", "httptools>=0.6", "aiohttp>=3.14"],
    "auth": ["joserfc>=1.8", "aiohttp>=3.14"],
    "otel": ["opentelemetry-api>=1.30"],
    "signing": ["cryptography>=45"],
}
"""What the optional parts need, as in pyproject.toml."""


def missing_extra(extra: str, text: str, name: str | None = None) -> ModuleNotFoundError:
    """Return the error for a package that is not installed, with a command that installs what the extra needs.

    It names the packages: `handrail[http]` can be installed only where handrail itself comes from an index.
    """
    packages = " ".join(f"'{each}'" for each in EXTRAS[extra])
    return ModuleNotFoundError(f"{text}: python -m pip install {packages} (the extra {extra!r})", name=name)


class Kind(StrEnum):
    """What went wrong. Each revision decides how the kind is reported (`Revision.faults`)."""

    PARSE = "parse"
    INVALID_REQUEST = "invalid_request"
    UNKNOWN_METHOD = "unknown_method"
    BAD_PARAMS = "bad_params"
    UNKNOWN_TOOL = "unknown_tool"
    UNKNOWN_RESOURCE = "unknown_resource"
    UNKNOWN_PROMPT = "unknown_prompt"
    BAD_ARGUMENTS = "bad_arguments"
    NEEDS_CAPABILITY = "needs_capability"
    NEEDS_URL = "needs_url"
    OVERLOADED = "overloaded"
    THROTTLED = "throttled"  # a tool's own limit was met
    FORBIDDEN = "forbidden"
    TIMEOUT = "timeout"
    VERSION = "version"
    INTERNAL = "internal"
    ENVELOPE = "envelope"  # over HTTP: what every request must say is missing or wrong
    MISMATCH = "mismatch"  # a header and the body differ
    NO_SESSION = "no_session"
    PENDING = "pending"  # waits for an approval
    DENIED = "denied"  # the approval was denied
    FAILED = "failed"  # a resource or a prompt that could not be given; a tool says so in its result
    UNRECORDED = "unrecorded"  # what cannot be written down is not done


class HandrailError(Exception):
    """Everything this package raises on purpose."""


class LocalProtocolError(HandrailError):
    """The calling code tried to send something the peer's revision, or JSON, does not allow. It was not sent."""


class Sent(StrEnum):
    """How far a request got before it failed."""

    NO = "not sent"
    UNKNOWN = "sent, outcome unknown"
    FAILED = "failed"  # the peer has answered


class PeerError(HandrailError):
    """Something between us and a peer failed.

    `sent` says whether it may have had an effect, `phase` what was being done (`"connect"`, `"tools/call add"`), `hint`
    what could be tried.
    """

    kind = "peer"

    def __init__(self, text: str, *, sent: Sent = Sent.NO, server: str = "", phase: str = "", hint: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.sent = sent
        self.server = server
        self.phase = phase
        self.hint = hint

    def __str__(self) -> str:
        where = ": ".join(filter(None, (self.server, self.phase)))
        message = f"{where}: {self.text}" if where else self.text
        if where and self.sent is not Sent.FAILED:
            message += f" ({self.sent})"
        return f"{message}. {self.hint}" if self.hint else message


class NotStarted(HandrailError):
    """A server could not begin to serve; what it wrote says why."""


class TransportError(PeerError):
    """The peer could not be reached, or went away."""

    kind = "transport"


class HttpRefused(TransportError):
    """The peer answered with a status instead of a message."""

    def __init__(
        self, text: str, *, status: int, body: bytes = b"", retry_after: float | None = None, **more: Any
    ) -> None:
        super().__init__(text, **more)
        self.status = status
        self.body = body
        self.retry_after = retry_after  # seconds, if the server sent it


class CallTimeout(PeerError):
    """A timeout: `connect`, `first` (no message came), `idle` (no further message came) or `total`."""

    kind = "timeout"

    def __init__(self, text: str, *, clock: str, progress: Any = None, **more: Any) -> None:
        super().__init__(text, **more)
        self.clock = clock
        self.progress = progress


class RemoteProtocolError(PeerError):
    """The peer broke the rules, or answered a request with an error."""

    kind = "protocol"

    def __init__(self, text: str, *, code: int = 0, data: Any = None, sent: Sent = Sent.FAILED, **more: Any) -> None:
        super().__init__(text, sent=sent, **more)
        self.code = code
        self.data = data


class InvalidResult(RemoteProtocolError):
    """A result that is not what its sender has promised; `result` is what came."""

    kind = "invalid_result"

    def __init__(self, text: str, *, result: Any, **more: Any) -> None:
        super().__init__(text, **more)
        self.result = result


class CallFailed(PeerError):
    """A tool reported a failure; `result` is its whole result."""

    kind = "tool"

    def __init__(self, text: str, *, result: Any, **more: Any) -> None:
        super().__init__(text, sent=Sent.FAILED, **more)
        self.result = result


class Denied(PeerError):
    """A person or a rule denied the call: nothing was sent."""

    kind = "denied"


class ConfirmationRequired(Denied):
    """The call needs a confirmation, and no user can be asked: nothing was sent."""

    kind = "confirmation"


class Unrecorded(PeerError):
    """The call could not be written down: nothing was sent, or what came of it is withheld; `sent` says which."""

    kind = "unrecorded"


class AuthorizationError(PeerError):
    """The server wants to know who is calling, and we could not show it."""

    kind = "authorization"


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


class ResourceNotFound(ToolError):
    """Raise in a function of a resource template where there is no resource of this URI.

    The client gets the same error as for a URI that no template matches.
    """

    def __init__(self, text: str = "Resource not found") -> None:
        super().__init__(text)


class Refused(HandrailError):
    """The call was not carried out; `kind` says why, `data` what would help.

    `prefix` is put before the text where a revision has no other place to say what the text is about. `retry_after` is
    in seconds; HTTP has a header for it. `needed_scopes` are the scopes that the caller lacks. `readable` makes it a
    result of the tool in every revision, whatever its kind: a model reads results, and not errors of the protocol.
    `code` is an application's own error code, which every revision reports as it is.
    """

    def __init__(
        self,
        kind: Kind,
        text: str,
        data: dict[str, Any] | None = None,
        *,
        prefix: str = "",
        retry_after: float = 1.0,
        needed_scopes: frozenset[str] = frozenset(),
        readable: bool = False,
        code: int = 0,
    ) -> None:
        super().__init__(prefix + text)
        self.kind = kind
        self.text = text
        self.data = data
        self.prefix = prefix
        self.retry_after = retry_after
        self.needed_scopes = needed_scopes
        self.readable = readable
        self.code = code


class SchemaError(HandrailError, ValueError):
    """A JSON Schema, or a signature to make one from, cannot be used."""
