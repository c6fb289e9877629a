"""How a call that waits differs from the last ones that were allowed, where that is unusual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from handrail.jsonrpc import encode_sorted
from handrail.model import Object
from handrail.text.controls import mask_secrets, one_line

if TYPE_CHECKING:
    from handrail.approvals.queue import Asked

__all__ = ["differences", "unusual"]


def unusual(lately: Sequence[Asked], now: Asked) -> list[str]:
    """The arguments that are not as in the last call that was allowed. `lately` has the last few, newest first.

    An argument that was another one in each of them, such as an id, says nothing by being another one again.
    """
    names = sorted(lately[0].arguments.keys() | now.arguments.keys())
    return [name for name in names if _value(lately[0], name) != _value(now, name) and not _varies(lately, name)]


def differences(lately: Sequence[Asked], now: Asked) -> list[str]:
    """What is unusual, in words. It may be shown to whoever asks now: what was a secret then is masked (P-34)."""
    was = lately[0]
    found = [] if was.fingerprint == now.fingerprint else ["the tool itself has changed"]
    for name in unusual(lately, now):
        old, new = (_said(each.arguments, name) for each in (was, now))
        found.append(f"{name}: {new}, was {old}")
    if not found and all(
        _value(was, name) == _value(now, name) for name in was.arguments.keys() | now.arguments.keys()
    ):
        return ["nothing: it is the same call again"]
    return found


def _varies(lately: Sequence[Asked], name: str) -> bool:
    values = [_value(each, name) for each in lately]
    return len(values) > 1 and len({*values}) == len(values)


def _value(asked: Asked, name: str) -> bytes:
    """What tells two values apart, also those that are kept masked."""
    if name in asked.hidden:
        return asked.hidden[name].encode()
    return encode_sorted([asked.arguments[name]]) if name in asked.arguments else b""


def _said(arguments: Object, name: str) -> str:
    if name not in arguments:
        return "not given"
    [shown] = mask_secrets({name: arguments[name]}).values()
    return one_line(encode_sorted(shown).decode(), 200)
