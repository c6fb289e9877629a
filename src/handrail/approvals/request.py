"""A call that needs an approval, the approval itself, and how the call differs from the last ones that were allowed.

Remembered approvals: which requests a grant covers, and which narrow conditions a decider is offered.

Edited arguments whose secrets were masked for the editor: a secret stays at its place, and moves to no other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

from msgspec import Struct

from handrail.guards.predicates import compile_condition
from handrail.jsonrpc import encode, encode_sorted
from handrail.model import Json, Object
from handrail.schema.compile import Checker
from handrail.schema.jsonable import keys_of, pointer
from handrail.text.controls import MASK, mask_secrets, one_line

__all__ = [
    "CLOCK_SKEW_SECONDS",
    "Approval",
    "ApprovalGrant",
    "ApprovalRequest",
    "ApprovalState",
    "argument_digest",
    "describe_differences",
    "edit_problems",
    "meets_condition",
    "suggest_conditions",
    "unmask",
    "unusual_arguments",
]

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


MaskProblem = tuple[str, str]
"""Where a mask stands that hides nothing, and what to do about it."""


def unmask(real: Json, masked: Json, edited: Json, path: str, problems: list[MaskProblem]) -> Json:
    """Return the edited value with the secrets back at their own places. A mask at any other place is a problem."""
    if type(edited) is dict:
        is_same_shape = type(real) is type(masked) is dict and len(real) == len(masked)
        names = dict(zip(masked, real, strict=True)) if is_same_shape else {}
        result: Object = {}
        for key, value in edited.items():
            key_path = pointer(path, key)
            if key in names:
                result[names[key]] = unmask(real[names[key]], masked[key], value, key_path, problems)
            else:
                result[unmask(None, None, key, key_path, problems)] = unmask(None, None, value, key_path, problems)
        return result
    if type(edited) is list:
        # An item that is not as it was may be another one, which has moved here: a secret does not go over to it.
        is_same_shape = type(real) is type(masked) is list and len(edited) == len(masked)
        pairs = [*zip(real, masked, strict=True)] if is_same_shape else [(None, None)] * len(edited)
        pairs = [pair if pair[1] == each else (None, None) for pair, each in zip(pairs, edited, strict=True)]
        places = enumerate(zip(pairs, edited, strict=True))
        return [unmask(*pair, each, pointer(path, at), problems) for at, (pair, each) in places]
    if type(edited) is type(masked) and edited == masked:
        return real
    if type(edited) is str and MASK in edited:
        text = f"{MASK} stands for a secret you were not shown: leave it where it is, or write a value of your own"
        problems.append((path, text))
    return edited


def edit_problems(masked: Object, hidden: set[str], edited: Object, checker: Checker | None) -> list[MaskProblem]:
    """Return the problems of edited arguments, as far as they show without the secrets in those named by `hidden`.

    Whether a secret that was left in place fits is asked again when the call runs: it is there then.
    """
    problems: list[MaskProblem] = []
    unmask(masked, masked, edited, "", problems)
    if not problems and checker is not None:
        schema_problems = [(each.path, each.text) for each in checker.problems(edited)]
        problems = [(path, text) for path, text in schema_problems if not _has_mask(edited, keys_of(path), hidden)]
    return problems


def _has_mask(value: Json, keys: list[str], hidden: set[str]) -> bool:
    """Whether a mask stands there."""
    if not keys or keys[0] not in hidden:
        return False
    for key in keys:
        value = value[int(key)] if type(value) is list else value.get(key) if type(value) is dict else None
    return type(value) is str and MASK in value


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
