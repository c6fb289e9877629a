"""Confirmation of calls before anything is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from handrail.client.tools import ListedTool
from handrail.guards.tool_diff import format_changes
from handrail.model import Object, Principal

if TYPE_CHECKING:
    from handrail.guards.policy import Decision

LOCAL_PRINCIPAL = Principal("local")
"""The principal that rules see: the user of this process."""


class Confirmation(Struct, frozen=True):
    """A call to confirm, complete, with the rule or reason that requires it in `why`.

    `claims` are the annotations of the tool; the server may claim anything.
    """

    server: str
    tool: str
    arguments: Object
    claims: Object
    why: str
    definition: ListedTool

    @property
    def difference(self) -> str:
        """The changes of the tool, line by line, safe to print; empty without changes, or if they are unknown."""
        return format_changes(self.definition.changes)


Confirm = Callable[[Confirmation], bool | Awaitable[bool]]


def allow(call: Confirmation) -> bool:
    """Agree to every call without a look: `confirm=allow`."""
    return True


def needs_confirmation(tool: ListedTool, decision: Decision | None = None) -> tuple[str, bool]:
    """Return why a call needs confirmation (empty: it does not), and whether `confirm` is required for it.

    Where it is not required, code that calls the tool counts as consent. With rules, their decision counts. Without
    rules, the claims of an untrusted server never make a call harmless; they can only make it suspicious.
    """
    if tool.changed:
        return tool.change, True
    if decision is not None:
        return (decision.why, True) if decision.verdict == "ask" else ("", False)
    claims = tool.annotations
    only_reads = claims.get("readOnlyHint") is True
    if claims.get("destructiveHint") is True:
        if only_reads:
            return "the server says that the tool destroys, and that it only reads", True
        return "the server says that the tool destroys or overwrites", True
    if tool.trusted and only_reads:
        return "", False
    if not tool.listed:
        return "the server does not list this tool", False
    if only_reads:
        return "the server says that the tool only reads, and the server is not trusted", False
    return "the tool may change something", False
