"""Rules as they are written, and as the conditions they are compiled to.

Hints of one's own tools count as written, and as false where they are not. Those of another server that is trusted
are read as the protocol does, with its pessimistic values for what is absent. Those of a server that is not trusted
are not read at all: its tools have the pessimistic values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from difflib import get_close_matches
from fnmatch import translate
from typing import Annotated, Any, Literal, get_args
from zoneinfo import ZoneInfo, available_timezones

from msgspec import Meta, Struct, ValidationError, convert, to_builtins
from msgspec.structs import force_setattr

from handrail.guards.predicates import TriState, check_choice, compile_condition
from handrail.model import Object, Principal
from handrail.options import mapping, texts
from handrail.revisions import REVISIONS

__all__ = ["CompiledRule", "Decision", "Facts", "Rule", "Verdict", "any_glob", "compile_rule", "hints"]

Verdict = Literal["allow", "deny", "ask", "hide"]
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_PESSIMISTIC = {"readOnlyHint": False, "destructiveHint": True, "idempotentHint": False, "openWorldHint": True}
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]|24(?=:00)):([0-5]\d)", re.ASCII)
_UNSUPPORTED_WILDCARDS = "?[]{}"
_LIST_FIELDS = "principals groups scopes without_scopes tools tags days revisions servers".split()


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule. It matches when all its conditions do, and without any it matches every call.

    >>> unless_allowed = Rule(verdict="deny", tools=["cancel_*"], without_scopes=["orders:write"])
    >>> large_sums = Rule(verdict="ask", tools=["refund"], arguments={"amount": {"over": 100}})
    """

    verdict: Annotated[Verdict, Meta(description="What happens: allow, deny, ask (a person) or hide.")]
    name: Annotated[str, Meta(description="Shown by explain and in the audit; without it, `rule 3`.")] = ""
    principals: Annotated[list[str], Meta(description="Ids of callers, `*` for any characters; one matches.")] = []
    groups: Annotated[list[str], Meta(description="Groups of callers; the caller is in one of them.")] = []
    scopes: Annotated[list[str], Meta(description="Scopes the caller has, all of them.")] = []
    without_scopes: Annotated[list[str], Meta(description="Scopes of which the caller lacks at least one.")] = []
    tools: Annotated[list[str], Meta(description="Names of tools, `*` for any characters; one matches.")] = []
    tags: Annotated[list[str], Meta(description="Tags of tools; the tool has one of them.")] = []
    annotations: Annotated[dict[str, bool], Meta(description="Hints of the tool, such as `destructiveHint`.")] = {}
    arguments: Annotated[
        dict[str, dict[str, Any]],
        Meta(description="What is asked of arguments, by path: `order.id`, `items.*.price` or `/order/id`."),
    ] = {}
    hours: Annotated[str, Meta(description="Time of day, `09:00-17:30`; the end is not in it.")] = ""
    days: Annotated[list[str], Meta(description="Days: mon to sun. A night belongs to the day it began on.")] = []
    timezone: Annotated[str, Meta(description="Where hours and days are read, `Europe/Berlin`; else local time.")] = ""
    revisions: Annotated[list[str], Meta(description="Revisions of the protocol the caller speaks.")] = []
    servers: Annotated[list[str], Meta(description="Names of upstream servers, `*` for any characters.")] = []

    def __post_init__(self) -> None:
        for name in _LIST_FIELDS:
            if type(value := getattr(self, name)) is not list:
                members = texts(f"Rule: {name}", value)
                force_setattr(self, name, sorted(members) if isinstance(value, Set) else members)
        for name in ("annotations", "arguments"):
            mapping(f"Rule: {name}", getattr(self, name), "conditions")


class Facts(Struct, frozen=True, eq=False):
    """What the rules see of a tool. Made once per tool and not changed: decisions are remembered by its identity."""

    name: str
    tags: frozenset[str] = frozenset()
    annotations: Mapping[str, Any] = {}
    trusted: bool = True
    server: str = ""  # the upstream it came from; empty: one's own


class Decision(Struct, frozen=True):
    """A verdict, the rule that gave it, and the conditions of that rule in words."""

    verdict: Verdict
    rule: str
    why: str


CallerTest = Callable[[Principal, Facts, str], bool]


class CompiledRule(Struct, frozen=True):
    """A rule, its decision, and its conditions, each with its words."""

    rule: Rule
    decision: Decision
    caller_tests: list[tuple[str, CallerTest]]  # the same for each call of one caller to one tool
    time_tests: list[tuple[str, Callable[[float], bool]]]
    argument_tests: list[tuple[str, Callable[[Object], TriState]]]  # of the arguments


def hints(facts: Facts) -> Mapping[str, Any]:
    """What the hints of a tool say to rules."""
    if not facts.trusted:
        return _PESSIMISTIC
    if not facts.server:
        return facts.annotations
    declared = {name: value for name, value in facts.annotations.items() if type(value) is bool}
    is_writing = not declared.get("readOnlyHint")  # or its destructiveHint means nothing
    return {**_PESSIMISTIC, "destructiveHint": is_writing, **declared}


def compile_rule(rule: Rule, number: int, groups: Mapping[str, Callable[[str], bool]]) -> CompiledRule:
    """The conditions of a rule, tools first: they tell most rules apart."""
    rule, name = _validate(rule, f"rule {number}"), rule.name or f"rule {number}"
    where = f"rule {number} ({name})" if rule.name else name
    tools = any_glob(rule.tools, f"{where}: tools", _UNSUPPORTED_WILDCARDS)
    servers = any_glob(rule.servers, f"{where}: servers", _UNSUPPORTED_WILDCARDS)
    principals = any_glob(rule.principals, f"{where}: principals")
    for key, words in (("groups", groups), ("revisions", REVISIONS), ("annotations", _PESSIMISTIC)):
        for word in getattr(rule, key):
            if key == "groups" and not groups:
                text = f"{where}: groups: unknown: {word!r}; there are no groups"
                raise ValueError(f'{text}: a line `{word} = ["ada"]` in the section [groups] makes one')
            check_choice(f"{where}: {key}", word, words)
    caller_tests: list[tuple[str, CallerTest]] = []

    def condition(key: str, test: CallerTest) -> None:
        if values := getattr(rule, key):
            caller_tests.append((f"{key.replace('_', ' ')} {', '.join(values)}", test))

    if "*" not in rule.tools:
        condition("tools", lambda _, facts, __: tools(facts.name))
    condition("tags", lambda _, facts, __: not facts.tags.isdisjoint(rule.tags))
    caller_tests += [
        (f"{hint} {str(expected).lower()}", _hint_test(hint, expected)) for hint, expected in rule.annotations.items()
    ]
    condition("servers", lambda _, facts, __: bool(facts.server) and servers(facts.server))
    if "*" not in rule.principals:
        condition("principals", lambda principal, *_: principals(principal.id))
    condition("groups", lambda principal, *_: any(groups[group](principal.id) for group in rule.groups))
    condition("scopes", lambda principal, *_: principal.scopes.issuperset(rule.scopes))
    condition("without_scopes", lambda principal, *_: not principal.scopes.issuperset(rule.without_scopes))
    condition("revisions", lambda _, __, revision: revision in rule.revisions)
    time_tests = [_compile_time(rule, where)] if rule.hours or rule.days or rule.timezone else []
    if rule.arguments and rule.verdict == "hide":
        raise ValueError(f"{where}: arguments: a tool is hidden before it has any; use deny")
    argument_tests = [
        compile_condition(path, conditions, where, every=rule.verdict == "allow")
        for path, conditions in rule.arguments.items()
    ]
    why = "; ".join(each[0] for each in (*caller_tests, *time_tests, *argument_tests)) or "it has no condition"
    return CompiledRule(rule, Decision(rule.verdict, name, why), caller_tests, time_tests, argument_tests)


def any_glob(globs: Sequence[str], where: str, forbidden: str = "") -> Callable[[str], bool]:
    """Whether a text is matched by one of these."""
    globs = texts(where, globs)
    for glob in globs:
        if not glob or not set(forbidden).isdisjoint(glob):
            raise ValueError(f"{where}: {glob!r} is not a name, or one with `*` for any characters")
    # Only `*` is special. `translate` finds each piece between two of them once, with nothing to go back for.
    plain = [translate(re.sub(r"[?\[]", r"[\g<0>]", glob)) for glob in globs]
    match = re.compile("|".join(plain) or "(?!)").match
    return lambda text: match(text) is not None


def _validate(rule: Rule, where: str) -> Rule:
    """The rule, read as a file would be: whoever writes Python gets the same errors."""
    check_choice(f"{where}: verdict", rule.verdict, get_args(Verdict))
    try:
        return convert(to_builtins(rule), Rule)
    except ValidationError as error:
        text, _, place = str(error).partition(" - at `$.")
        raise ValueError(f"{where}: {place.rstrip('`')}: {text}") from None


def _hint_test(hint: str, expected: bool) -> CallerTest:
    return lambda _, facts, __: (hints(facts).get(hint) is True) is expected


def _compile_time(rule: Rule, where: str) -> tuple[str, Callable[[float], bool]]:
    """Wall time: an hour that a change of the clocks repeats counts twice, one that it skips never comes."""
    if not rule.hours and not rule.days:
        raise ValueError(f"{where}: timezone: says nothing without hours or days")
    for day in rule.days:
        check_choice(f"{where}: days", day, DAYS)
    match = _HOURS.fullmatch(rule.hours or "00:00-24:00")
    hour, minute, end_hour, end_minute = map(int, match.groups()) if match else (0, 0, 0, 0)
    start, end = hour * 60 + minute, end_hour * 60 + end_minute
    if start == end:
        raise ValueError(f"{where}: hours: {rule.hours!r} is not a time of day such as 09:00-17:30 or 22:00-06:00")
    days = {DAYS.index(day) for day in rule.days or DAYS}
    try:
        zone = ZoneInfo(rule.timezone) if rule.timezone else None
    except (KeyError, ValueError, OSError):
        near = [*get_close_matches(rule.timezone, available_timezones(), 1), "Europe/Berlin"]
        raise ValueError(f"{where}: timezone: unknown: {rule.timezone!r}; did you mean {near[0]!r}?") from None
    last = (-1.0, False)

    def holds(now: float) -> bool:
        nonlocal last
        if last[0] == now // 60:  # nothing changes within a minute
            return last[1]
        moment = datetime.fromtimestamp(now, zone)
        minute_of_day, day = moment.hour * 60 + moment.minute, moment.weekday()
        if start < end:
            inside = start <= minute_of_day < end
        else:
            inside = not end <= minute_of_day < start
            day = (day - 1) % 7 if minute_of_day < end else day
        last = (now // 60, inside and day in days)
        return last[1]

    return " ".join(filter(None, [rule.hours, ", ".join(rule.days), rule.timezone])), holds
