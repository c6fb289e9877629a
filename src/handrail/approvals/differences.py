"""How a call that waits differs from the last ones that were allowed, where that is unusual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from handrail.jsonrpc import encode_sorted
from handrail.model import Object
from handrail.text.controls import mask_secrets, one_line

if TYPE_CHECKING:
    from handrail.approvals.queue import ApprovalRequest

__all__ = ["describe_differences", "unusual_arguments"]


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
    """What is unusual, in words. It may be shown to whoever asks now: what was a secret then is masked (P-34)."""
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
    """What tells two values apart, also those that are kept masked."""
    if name in request.hidden:
        return request.hidden[name].encode()
    return encode_sorted([request.arguments[name]]) if name in request.arguments else b""


def _render_argument(arguments: Object, name: str) -> str:
    if name not in arguments:
        return "not given"
    [masked] = mask_secrets({name: arguments[name]}).values()
    return one_line(encode_sorted(masked).decode(), 200)
