"""Who has to agree to a call before anything is sent."""

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
"""Who calls, to rules: whoever runs the client."""


class Confirmation(Struct, frozen=True):
    """A call that somebody is to agree to: all of it, and the rule that made us ask.

    `claims` are what the server says of the tool; it may say anything.
    """

    server: str
    tool: str
    arguments: Object
    claims: Object
    why: str
    definition: ListedTool

    @property
    def difference(self) -> str:
        """What has changed in the tool, line by line, safe to print; empty if nothing has, or nobody knows."""
        return format_changes(self.definition.changes)


Confirm = Callable[[Confirmation], bool | Awaitable[bool]]


def allow(call: Confirmation) -> bool:
    """`confirm=allow`: every call is agreed to, unseen."""
    return True


def needs_confirmation(tool: ListedTool, decision: Decision | None = None) -> tuple[str, bool]:
    """Why a call has to be agreed to, and whether code that calls it does not count as agreement. Empty: it need not.

    By what was decided, if there are rules. Without them, claims of a server nobody trusts never make a call harmless;
    they can only make it suspicious.
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
