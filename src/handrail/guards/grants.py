"""A yes that is remembered: what it covers, and which narrow ones can be offered to whoever decides."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec import Struct

from handrail.guards.predicates import reader
from handrail.jsonrpc import encode, encode_sorted
from handrail.model import Json, Object

if TYPE_CHECKING:
    from handrail.guards.approval import Asked

__all__ = ["LEEWAY", "Grant", "meets", "narrow"]

LEEWAY = 60.0  # seconds two clocks may differ by
MAX_OFFERED = 4
# Up to the last slash, or a word and a mark: what several names of one place or kind begin with.
_PREFIX = re.compile(r"((?:https://)?[A-Za-z0-9_./@-]*[A-Za-z0-9_-]/|[A-Za-z]{2,20}[-_:])[A-Za-z0-9_./-]+")
_PLAIN = "[A-Za-z0-9_-]+(?:[./][A-Za-z0-9_-]+)*$"  # nothing that leads elsewhere: no `..`, no `%2e`, no `//`
_NAMES_ONE = re.compile(r"(?:^|_|-)(?:id|no|number|nr|key|code|index|pid|port)$|(?:Id|Number|Key|Code)$")


class Grant(Struct, frozen=True, kw_only=True):
    """A yes that was to be remembered."""

    id: str
    principal: str
    tool: str
    server: str
    fingerprint: str
    policy: str = ""  # its version
    arguments: Object  # these, with exactly these values, and no others
    matching: dict[str, Object] = {}  # but for those: they have to meet a condition, as in a rule
    approval: str  # that it came from
    until: float
    by: str
    made: float

    def covers(self, asked: Asked, now: float) -> bool:
        known = (self.server, self.principal, self.tool, self.fingerprint, self.policy)
        if known != (asked.server, asked.principal, asked.tool, asked.fingerprint, asked.policy):
            return False
        if not self.made - LEEWAY <= now < self.until:
            return False
        ours, theirs = (
            {name: value for name, value in each.items() if name not in self.matching}
            for each in (self.arguments, asked.arguments)
        )
        if encode_sorted(ours) != encode_sorted(theirs):
            return False
        return all(meets(name, condition, asked.arguments) for name, condition in self.matching.items())


def meets(name: str, condition: Object, given: Object) -> bool:
    """Whether an argument meets a condition; ValueError if that is none."""
    pointer = "/" + name.replace("~", "~0").replace("/", "~1")  # a name, whatever is in it
    return reader(pointer, condition, "remember", every=True)[1](given) is True


def narrow(arguments: Object) -> list[tuple[str, dict[str, Object]]]:
    """Conditions that these arguments meet and few others do, each in words: for one argument, the rest as it is."""
    found: list[tuple[str, dict[str, Object]]] = []
    for name, value in arguments.items():
        made = _narrow(name, value)
        if made is not None and meets(name, made[1], arguments):
            found.append((f"{name} {made[0]}", {name: made[1]}))
    return found[:MAX_OFFERED]


def _narrow(name: str, value: Json) -> tuple[str, Object] | None:
    if type(value) is str and len(value) <= 500 and (prefix := _PREFIX.fullmatch(value)) and ".." not in value:
        pattern = "^" + prefix[1].replace(".", "\\.") + _PLAIN
        return f"starts with {prefix[1]} and goes on plainly", {"matches": pattern}
    if type(value) in (int, float) and value >= 0 and not _NAMES_ONE.search(name):
        return f"is at most {encode(value).decode()}", {"at_least": 0, "at_most": value}
    return None
