"""Remembered approvals: which requests a grant covers, and which narrow conditions a decider is offered."""

from __future__ import annotations

import re
from hashlib import sha256

from msgspec import Struct

from handrail.approvals.request import ApprovalRequest
from handrail.guards.predicates import compile_condition
from handrail.jsonrpc import encode, encode_sorted
from handrail.model import Json, Object

__all__ = ["CLOCK_SKEW_SECONDS", "ApprovalGrant", "argument_digest", "meets_condition", "suggest_conditions"]

CLOCK_SKEW_SECONDS = 60.0  # seconds two clocks may differ by
MAX_SUGGESTIONS = 4
# Up to the last slash, or a word and a mark: what several names of one place or kind begin with.
_PREFIX = re.compile(r"((?:https://)?[A-Za-z0-9_./@-]*[A-Za-z0-9_-]/|[A-Za-z]{2,20}[-_:])[A-Za-z0-9_./-]+")
_SAFE_SUFFIX = "[A-Za-z0-9_-]+(?:[./][A-Za-z0-9_-]+)*$"  # nothing that leads elsewhere: no `..`, no `%2e`, no `//`
_IDENTIFIER_NAME = re.compile(r"(?:^|_|-)(?:id|no|number|nr|key|code|index|pid|port)$|(?:Id|Number|Key|Code)$")


class ApprovalGrant(Struct, frozen=True, kw_only=True):
    """A remembered approval."""

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
    hidden: dict[str, str] = {}  # digests of the arguments that are stored masked
    source: str = ""  # the file it was served from
    role: str = ""  # as what it was decided: by the caller, or by an operator
    allowed_by: str = ""  # the setting that let them; empty: of a version that did not say, and never good

    def covers(self, request: ApprovalRequest, now: float) -> bool:
        """Whether the call need not be asked about, by the settings of now: they have to allow what was allowed."""
        grant_binding = (
            self.server,
            self.principal,
            self.tool,
            self.fingerprint,
            self.policy,
            self.source,
            self.allowed_by,
        )
        request_binding = (
            request.server,
            request.principal,
            request.tool,
            request.fingerprint,
            request.policy,
            request.source,
            request.by,
        )
        if not self.allowed_by or grant_binding != request_binding:
            return False
        if not self.made - CLOCK_SKEW_SECONDS <= now < min(self.until, self.made + request.remember):
            return False
        names = self.arguments.keys() - self.matching.keys()
        if names != request.arguments.keys() - self.matching.keys():
            return False
        if not all(self._matches_argument(name, request) for name in names):
            return False
        return all(meets_condition(name, condition, request.arguments) for name, condition in self.matching.items())

    def _matches_argument(self, name: str, request: ApprovalRequest) -> bool:
        value = request.arguments[name]
        if name in self.hidden:
            return self.hidden[name] == argument_digest(request, name, value)
        return encode_sorted(self.arguments[name]) == encode_sorted(value)


def argument_digest(request: ApprovalRequest, name: str, value: Json) -> str:
    """Return the digest by which a masked argument is compared."""
    return sha256(encode_sorted([request.server, request.principal, request.tool, name, value])).hexdigest()


def meets_condition(name: str, condition: Object, arguments: Object) -> bool:
    """Whether an argument meets a condition; ValueError if that is none."""
    pointer = "/" + name.replace("~", "~0").replace("/", "~1")  # a name, whatever is in it
    return compile_condition(pointer, condition, "remember", every=True)[1](arguments) is True


def suggest_conditions(arguments: Object) -> list[tuple[str, dict[str, Object]]]:
    """Conditions that these arguments meet and few others do, each in words: for one argument, the rest as it is."""
    suggestions: list[tuple[str, dict[str, Object]]] = []
    for name, value in arguments.items():
        suggestion = _suggest_condition(name, value)
        if suggestion is not None and meets_condition(name, suggestion[1], arguments):
            suggestions.append((f"{name} {suggestion[0]}", {name: suggestion[1]}))
    return suggestions[:MAX_SUGGESTIONS]


def _suggest_condition(name: str, value: Json) -> tuple[str, Object] | None:
    if type(value) is str and len(value) <= 500 and (prefix := _PREFIX.fullmatch(value)) and ".." not in value:
        pattern = "^" + prefix[1].replace(".", "\\.") + _SAFE_SUFFIX
        return f"starts with {prefix[1]} and goes on plainly", {"matches": pattern}
    if type(value) in (int, float) and value >= 0 and not _IDENTIFIER_NAME.search(name):
        return f"is at most {encode(value).decode()}", {"at_least": 0, "at_most": value}
    return None
