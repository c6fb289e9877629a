"""How a call that waits differs from the last one that was allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.guards.inert import mask_secrets, one_line
from handrail.jsonrpc import encode_sorted
from handrail.model import Object

if TYPE_CHECKING:
    from handrail.guards.approval import Asked


def differences(was: Asked, now: Asked) -> list[str]:
    """What is not as it was, in words. It may be shown to whoever asks now: what was a secret then is masked (P-34)."""
    found = [] if was.fingerprint == now.fingerprint else ["the tool itself has changed"]
    for name in sorted(was.arguments.keys() | now.arguments.keys()):
        if len({encode_sorted([each.arguments[name]] if name in each.arguments else []) for each in (was, now)}) > 1:
            old, new = (_said(each.arguments, name) for each in (was, now))
            found.append(f"{name}: {new}, was {old}")
    return found or ["nothing: it is the same call again"]


def _said(arguments: Object, name: str) -> str:
    if name not in arguments:
        return "not given"
    [shown] = mask_secrets({name: arguments[name]}).values()
    return one_line(encode_sorted(shown).decode(), 200)
