"""Trace context as W3C writes it: which trace a call belongs to, from `_meta` or from HTTP headers.

Whoever calls may write anything there, so what does not fit is as if it were not there, and never an error.
"""

from __future__ import annotations

import re

from msgspec import Struct

from handrail.model import Json
from handrail.protocol.http_rules import Headers

MAX_CHARS = 8192
MAX_MEMBERS = 32

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER = re.compile(r"([a-z0-9][a-z0-9_*/@-]{0,255})=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
_BAGGAGE = re.compile(r"[ -~]*")
_SAMPLED = 1
NO_TRACE: Headers = {}


class Trace(Struct, frozen=True):
    """Where a call stands in a trace."""

    trace_id: str  # 32 hex digits
    parent_id: str  # 16, of the caller's span
    flags: int = 0  # 1: the caller records it
    state: str = ""  # `tracestate`, for the systems it names
    baggage: str = ""  # as it came; the caller wrote it

    @property
    def traceparent(self) -> str:
        """To be sent on by a tool that calls others."""
        return f"00-{self.trace_id}-{self.parent_id}-{self.flags:02x}"


def read(parent: Json, state: Json = "", baggage: Json = "") -> Trace | None:
    """The trace that `traceparent` names; None if it names none."""
    match = _PARENT.fullmatch(parent) if type(parent) is str and len(parent) <= MAX_CHARS else None
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5] is not None):
        return None
    if not int(match[2], 16) or not int(match[3], 16):
        return None
    # Of a version we do not know, only the flag that every version has is read.
    flags = int(match[4], 16) if match[1] == "00" else int(match[4], 16) & _SAMPLED
    baggage_text = baggage if type(baggage) is str and len(baggage) <= MAX_CHARS and _BAGGAGE.fullmatch(baggage) else ""
    return Trace(match[2], match[3], flags, _state(state), baggage_text)


def trace_headers(headers: Headers) -> Headers:
    """Of the headers of a request, those about its trace: all that a tool gets to see of them."""
    return {name: headers[name] for name in (b"traceparent", b"tracestate", b"baggage") if name in headers}


def read_headers(headers: Headers | None) -> Trace | None:
    if headers is None or b"traceparent" not in headers:
        return None
    parent, state, baggage = (
        headers.get(name, b"").decode("latin-1").strip(" \t") for name in (b"traceparent", b"tracestate", b"baggage")
    )
    return read(parent, state, baggage)


def _state(text: Json) -> str:
    """A list of members, whole or not at all: half of it would be somebody else's."""
    if type(text) is not str or len(text) > MAX_CHARS:
        return ""
    members = [each for each in (part.strip(" \t") for part in text.split(",")) if each]
    keys = {match[1] for match in map(_MEMBER.fullmatch, members) if match is not None}
    return ",".join(members) if len(keys) == len(members) <= MAX_MEMBERS else ""
