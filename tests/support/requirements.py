"""The tag that says which rules of docs/requirements.md a test proves."""

from __future__ import annotations

import pytest

__all__ = ["record_ran", "requirement"]

Places = set[tuple[str, str]]

RAN: pytest.StashKey[Places] = pytest.StashKey()


def requirement(*ids: str, everywhere: bool = False) -> pytest.MarkDecorator:
    """Say that a test proves the rules `ids`, for example `@requirement("SRV-413", "P-06")`.

    The tag counts only where the test ran, and that is recorded by the fixtures (`ran`, `record_ran`) while it
    runs. `everywhere=True` is for rules of registration: nothing goes over a wire, so no revision or transport
    can make a difference.
    """
    if not ids:
        raise TypeError("requirement() needs at least one id of docs/requirements.md")
    return pytest.mark.requirement(*ids, everywhere=everywhere)


def record_ran(request: pytest.FixtureRequest, revision: str, transport: str) -> None:
    """Record that the test of `request` spoke `revision` (as on the wire) over `transport`; for fixtures.

    The fixture has to have function scope: what a wider one opened was not necessarily used by this test.
    """
    if not isinstance(request.node, pytest.Item):
        raise TypeError(f"record_ran needs a fixture of function scope, not {request.scope}")
    request.node.stash.setdefault(RAN, set()).add((revision, transport))
