"""A call that needs an approval, the approval itself, and how the call differs from the last ones that were allowed."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

from msgspec import Struct

from handrail.jsonrpc import encode_sorted
from handrail.model import Object
from handrail.text.controls import mask_secrets, one_line

__all__ = ["Approval", "ApprovalRequest", "ApprovalState", "describe_differences", "unusual_arguments"]

ApprovalState = Literal["pending", "approved", "denied", "expired", "cancelled", "consumed"]


class ApprovalRequest(Struct, frozen=True):
    """A call, as far as its approval is concerned."""

    server: str
    principal: str
    tool: str
    fingerprint: str
    arguments: Object
    policy: str  # its version: other rules need another yes
    rule: str = ""
    why: str = ""
    client: str = ""
    schema: Object = {}  # what other arguments would have to meet; not bound, the fingerprint is
    title: str = ""  # of the tool, as its description
    description: str = ""
    by: str = ""  # who may decide, as in `Approvals`; empty: asked by a version that did not say
    remember: float = 0.0  # seconds the longest remembered yes may live
    source: str = ""  # the file it is served from, and the one of the tool
    hidden: dict[str, str] = {}  # digests of the arguments that are stored masked

    def digest(self, arguments: Object | None = None) -> str:
        members = [self.server, self.principal, self.tool, self.fingerprint, self.policy, self.by, self.source]
        return sha256(encode_sorted([*members, self.arguments if arguments is None else arguments])).hexdigest()


class Approval(Struct, frozen=True, kw_only=True):
    """One question to a person, and what became of it."""

    id: str
    asked: ApprovalRequest
    digest: str
    created: float
    expires: float
    state: ApprovalState = "pending"
    by: str = ""  # who decided
    at: float = 0.0
    note: str = ""
    edited: Object | None = None  # the arguments to run with instead
    ticket: str = ""  # names the one continuation it is good for, once the tool has asked something itself
    preview: str = ""  # what the call would do, in the words of the tool's author
    before: list[str] = []  # how it differs from what the same caller was last allowed to do with the tool


def unusual_arguments(history: Sequence[ApprovalRequest], request: ApprovalRequest) -> list[str]:
    """The arguments that are not as in the last call that was allowed. `lately` has the last few, newest first.

    An argument that was another one in each of them, such as an id, says nothing by being another one again.
    """
    names = sorted(history[0].arguments.keys() | request.arguments.keys())
    return [
        name
        for name in names
        if _argument_key(history[0], name) != _argument_key(request, name) and not _varies(history, name)
    ]


def describe_differences(history: Sequence[ApprovalRequest], request: ApprovalRequest) -> list[str]:
    """Return the unusual arguments, in words. The caller of now may read it: earlier secrets are masked (P-34)."""
    previous = history[0]
    lines = [] if previous.fingerprint == request.fingerprint else ["the tool itself has changed"]
    for name in unusual_arguments(history, request):
        old, new = (_render_argument(each.arguments, name) for each in (previous, request))
        lines.append(f"{name}: {new}, was {old}")
    if not lines and all(
        _argument_key(previous, name) == _argument_key(request, name)
        for name in previous.arguments.keys() | request.arguments.keys()
    ):
        return ["nothing: it is the same call again"]
    return lines


def _varies(history: Sequence[ApprovalRequest], name: str) -> bool:
    values = [_argument_key(each, name) for each in history]
    return len(values) > 1 and len({*values}) == len(values)


def _argument_key(request: ApprovalRequest, name: str) -> bytes:
    """Return the bytes by which two values of an argument are compared, also masked ones."""
    if name in request.hidden:
        return request.hidden[name].encode()
    return encode_sorted([request.arguments[name]]) if name in request.arguments else b""


def _render_argument(arguments: Object, name: str) -> str:
    if name not in arguments:
        return "not given"
    [masked] = mask_secrets({name: arguments[name]}).values()
    return one_line(encode_sorted(masked).decode(), 200)
