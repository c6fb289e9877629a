"""Who may call what: the verdict on one call, and the rule that gave it (SRV-602).

`hide` wins over everything, then `deny`; otherwise the first rule that allows or asks decides, in the order written.
If none matches, a destructive tool asks, a tool of a server that is not trusted asks, and the rest gets the default;
where two of these apply, the stricter. What is hidden does not exist for the caller: lists and calls use the same
rules, and no such rule looks at arguments. With the default "deny", a tool is hidden as well that no rule could ever
allow the caller, or ask about, whatever the time and the arguments.

Hints of one's own tools count as written, and as false where they are not. Those of another server that is trusted
are read as the protocol does, with its pessimistic values for what is absent. Those of a server that is not trusted
are not read at all: its tools have the pessimistic values.

All that is the same for each call of one caller to one tool is decided once; arguments and time of day remain.

Settings that meet nothing: a rule, a limit or a cleaning that names what the server does not have is not in force.

A warning, no error: tools may be added later. Arguments below the first level, and those of a schema that does not
list them in one place, are not checked.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from difflib import get_close_matches
from fnmatch import fnmatchcase, translate
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Annotated, Any, Literal, NamedTuple, get_args
from zoneinfo import ZoneInfo, available_timezones

from msgspec import Meta, Struct, ValidationError, convert, to_builtins
from msgspec.json import encode
from msgspec.structs import force_setattr

from handrail.guards.limits import Rates
from handrail.guards.predicates import TriState, all_of, check_choice, compile_condition, first_step
from handrail.guards.sanitize import Sanitize
from handrail.model import Object, Principal
from handrail.protocol.uri_template import normalize_uri, uri_problem
from handrail.revisions import REVISIONS
from handrail.suggest import closest, collection, describe_value, expect, mapping, texts

__all__ = [
    "CompiledRule",
    "Decision",
    "Fallback",
    "LintedSubject",
    "Policy",
    "Rule",
    "Subject",
    "Verdict",
    "any_glob",
    "compile_rule",
    "hints",
    "lint_rules",
    "lint_settings",
    "policy_of",
]

Verdict = Literal["allow", "deny", "ask", "hide"]
Fallback = Literal["allow", "deny", "ask"]
SubjectKind = Literal["tool", "resource", "prompt"]
MAX_PLANS = 4_096
MAX_HINT_CHARACTERS = 500  # characters of what would be allowed
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_PESSIMISTIC = {"readOnlyHint": False, "destructiveHint": True, "idempotentHint": False, "openWorldHint": True}
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]|24(?=:00)):([0-5]\d)", re.ASCII)
_RANK = {"hide": 0, "deny": 1, "ask": 2, "allow": 2}  # rules of one rank apply in the order written
_STRICTNESS = {"deny": 1, "ask": 2, "allow": 3}
_UNSUPPORTED_WILDCARDS = "?[]{}"
_VARIABLE = re.compile(r"\*|\{[^{}]*\}")  # in a pattern of URIs, or in a template
_spelling = lru_cache(16)(normalize_uri)  # many rules are asked about one URI
_LIST_FIELDS = "principals groups scopes without_scopes tools uri prompts tags days revisions servers".split()
_KIND_FIELDS: dict[str, SubjectKind] = {
    "tools": "tool",
    "annotations": "tool",
    "uri": "resource",
    "prompts": "prompt",
}
"""Conditions that only subjects of one kind can meet."""


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule. It matches when all its conditions do, and without any it matches every call.

    >>> unless_allowed = Rule(verdict="deny", tools=["cancel_*"], without_scopes=["orders:write"])
    >>> large_sums = Rule(verdict="ask", tools=["refund"], arguments={"amount": {"over": 100}})
    """

    verdict: Annotated[Verdict, Meta(description="What happens: allow, deny, ask (a person) or hide.")]
    name: Annotated[str, Meta(description="Shown by explain and in the audit; without it, `rule 3`.")] = ""
    mode: Annotated[
        Literal["enforce", "audit"],
        Meta(description="audit: the rule decides nothing; the record says which calls it would have decided."),
    ] = "enforce"
    principals: Annotated[list[str], Meta(description="Ids of callers, `*` for any characters; one matches.")] = []
    groups: Annotated[list[str], Meta(description="Groups of callers; the caller is in one of them.")] = []
    scopes: Annotated[list[str], Meta(description="Scopes the caller has, all of them.")] = []
    without_scopes: Annotated[list[str], Meta(description="Scopes of which the caller lacks at least one.")] = []
    tools: Annotated[list[str], Meta(description="Names of tools, `*` for any characters; one matches.")] = []
    kind: Annotated[
        Literal["", "tool", "resource", "prompt"],
        Meta(description="What the request is about; empty: what the other conditions say, else any."),
    ] = ""
    uri: Annotated[list[str] | str, Meta(description="URIs of resources, `*` for any characters; one matches.")] = []
    prompts: Annotated[list[str], Meta(description="Names of prompts, `*` for any characters; one matches.")] = []
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
        if type(self.uri) is str:
            force_setattr(self, "uri", [self.uri])
        check_choice("Rule: kind", self.kind, ("", *get_args(SubjectKind)))
        for name in _LIST_FIELDS:
            if type(value := getattr(self, name)) is not list:
                members = texts(f"Rule: {name}", value)
                force_setattr(self, name, sorted(members) if isinstance(value, Set) else members)
        for name in ("annotations", "arguments"):
            mapping(f"Rule: {name}", getattr(self, name), "conditions")


class Subject(Struct, frozen=True, eq=False):
    """What a request is about, as far as rules are concerned. The name of a resource is its URI.

    Made once for each tool and not changed: a policy caches its plans by the identity of the subject.
    """

    kind: SubjectKind
    name: str
    tags: frozenset[str] = frozenset()
    annotations: Mapping[str, Any] = {}
    trusted: bool = True
    server: str = ""  # the upstream server; empty: a tool of this server
    transient: bool = False  # of one request: no plan is cached for it


class Decision(Struct, frozen=True):
    """A verdict, the rule that gave it, and the conditions of that rule in words."""

    verdict: Verdict
    rule: str
    why: str


CallerTest = Callable[[Principal, Subject, str], bool]


class CompiledRule(Struct, frozen=True):
    """A rule, its decision, and its conditions, each with its words."""

    rule: Rule
    decision: Decision
    caller_tests: list[tuple[str, CallerTest]]  # the same for each call of one caller to one tool
    time_tests: list[tuple[str, Callable[[float], bool]]]
    argument_tests: list[tuple[str, Callable[[Object], TriState]]]  # of the arguments
    kind: str = ""  # of the subjects it is about; empty: of any kind


def hints(subject: Subject) -> Mapping[str, Any]:
    """What the hints of a tool say to rules."""
    if not subject.trusted:
        return _PESSIMISTIC
    if not subject.server:
        return subject.annotations
    declared = {name: value for name, value in subject.annotations.items() if type(value) is bool}
    is_writing = not declared.get("readOnlyHint")  # or its destructiveHint means nothing
    return {**_PESSIMISTIC, "destructiveHint": is_writing, **declared}


def compile_rule(rule: Rule, number: int, groups: Mapping[str, Callable[[str], bool]]) -> CompiledRule:
    """The conditions of a rule, tools first: they tell most rules apart."""
    rule, name = _validate(rule, f"rule {number}"), rule.name or f"rule {number}"
    where = f"rule {number} ({name})" if rule.name else name
    kind = _kind_of(rule, where)
    tools = any_glob(rule.tools, f"{where}: tools", _UNSUPPORTED_WILDCARDS)
    for pattern in rule.uri:
        if problem := uri_problem(_VARIABLE.sub("x:x", pattern)):
            raise ValueError(f"{where}: uri: {pattern!r}: {problem}")
    uris = any_glob([*map(normalize_uri, rule.uri)], f"{where}: uri")
    prompts = any_glob(rule.prompts, f"{where}: prompts", _UNSUPPORTED_WILDCARDS)
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
        condition("tools", lambda _, subject, __: tools(subject.name))
    if "*" not in rule.uri:
        condition("uri", lambda _, subject, __: uris(_spelling(subject.name)))
    if "*" not in rule.prompts:
        condition("prompts", lambda _, subject, __: prompts(subject.name))
    condition("tags", lambda _, subject, __: not subject.tags.isdisjoint(rule.tags))
    caller_tests += [
        (f"{hint} {str(expected).lower()}", _hint_test(hint, expected)) for hint, expected in rule.annotations.items()
    ]
    condition("servers", lambda _, subject, __: bool(subject.server) and servers(subject.server))
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
    return CompiledRule(rule, Decision(rule.verdict, name, why), caller_tests, time_tests, argument_tests, kind)


def _kind_of(rule: Rule, where: str) -> str:
    """Return the kind of subject that a rule is about; empty for any."""
    kinds = {kind: field for field, kind in _KIND_FIELDS.items() if getattr(rule, field)}
    if rule.kind:
        kinds.setdefault(rule.kind, "kind")
    if len(kinds) > 1:
        raise ValueError(f"{where}: {' and '.join(kinds.values())}: no request meets both; write two rules")
    return next(iter(kinds), "")


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
    """Return the rule, read as from a file: code in Python gets the same errors."""
    check_choice(f"{where}: verdict", rule.verdict, get_args(Verdict))
    try:
        return convert(to_builtins(rule), Rule)
    except ValidationError as error:
        text, _, place = str(error).partition(" - at `$.")
        raise ValueError(f"{where}: {place.rstrip('`')}: {text}") from None


def _hint_test(hint: str, expected: bool) -> CallerTest:
    return lambda _, subject, __: (hints(subject).get(hint) is True) is expected


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


class _Step(NamedTuple):
    """A rule of which only the time or the arguments are left to look at."""

    decision: Decision
    time_test: Callable[[float], bool] | None
    argument_test: Callable[[Object], TriState] | None
    words: str  # of these two


class _Plan(Struct, frozen=True):
    """What is left to decide for one caller, tool and revision."""

    steps: list[_Step]
    fallback: Decision
    timed: bool
    hides: bool
    always_denies: (
        bool  # whatever the time and the arguments, no call is allowed or asked about, and that is the default
    )


class Policy:
    """The rules of a server, compiled. ValueError names the rule and the key that is wrong.

    `groups` are callers by group, with `*` as in rules. `default` is the verdict where no rule matches, and
    `destructive` that for tools whose hint says so, if it is the stricter one.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        groups: Mapping[str, Sequence[str]] | None = None,
        default: Fallback = "allow",
        destructive: Fallback = "ask",
        clock: Callable[[], float] = time.time,
    ) -> None:
        rules = collection("Policy: rules", rules, "Rule(…)")
        for number, rule in enumerate(rules, 1):
            expect(f"rule {number}", rule, "Rule(…)", Rule)
        groups = mapping("Policy: groups", groups or {}, "callers by group")
        check_choice("default", default, get_args(Fallback))
        check_choice("destructive", destructive, get_args(Fallback))
        members = {name: any_glob(ids, f"group {name!r}") for name, ids in groups.items()}
        self._clock = clock
        self._groups = {name: list(ids) for name, ids in (groups or {}).items()}
        self.compiled_rules = [compile_rule(rule, number, members) for number, rule in enumerate(rules, 1)]
        principal_lists = [*groups.values(), *(each.rule.principals for each in self.compiled_rules)]
        self.principals = sorted(
            {principal for ids in principal_lists for principal in ids if "*" not in principal}
        )  # that are named
        names = ["default"]
        for number, compiled in enumerate(self.compiled_rules, 1):
            if (name := compiled.decision.rule) in names or name.startswith("built in"):
                raise ValueError(f"rule {number}: name: {name!r} is taken; the audit tells rules apart by their names")
            names.append(name)
        enforced = [each for each in self.compiled_rules if each.rule.mode == "enforce"]
        self._ranked = sorted(enforced, key=lambda rule: _RANK[rule.decision.verdict])
        self.audited = [each for each in self.compiled_rules if each.rule.mode == "audit"]
        self._default = Decision(default, "default", "no rule matches")
        why = "it counts as destructive, and no rule says otherwise"
        self.destructive = destructive
        self._destructive = Decision(destructive, f"built in: destructive tools {destructive}", why)
        self._untrusted = Decision(
            "ask", "built in: untrusted tools ask", "no rule matches, and nobody trusts its server"
        )
        self._plans: dict[tuple[Principal, Subject, str], _Plan] = {}
        # Else no list is filtered.
        self.hides_anything = default == "deny" or any(rule.decision.verdict == "hide" for rule in self._ranked)

    @property
    def decisions(self) -> list[Decision]:
        """What each rule says, in the order written."""
        return [rule.decision for rule in self.compiled_rules]

    @property
    def is_open(self) -> bool:
        """Whether every caller may call every tool that is not destructive."""
        return not self.compiled_rules and self._default.verdict == "allow"

    def concerns(self, kind: SubjectKind, verdict: Verdict | None = None) -> bool:
        """Return whether the default is not to allow, or a rule (of this verdict) is about subjects of a kind."""
        return self._default.verdict != "allow" or any(
            rule.kind in ("", kind) and verdict in (None, rule.decision.verdict) for rule in self._ranked
        )

    @cached_property
    def version(self) -> str:
        """The same for the same rules and members of the groups they name: a yes under others is none."""
        rules = [to_builtins(rule.rule) for rule in self.compiled_rules]
        # Unchanged where the later members are not used: an approval lasts.
        rules = [{k: v for k, v in each.items() if v or k not in ("kind", "uri", "prompts")} for each in rules]
        rules = [{k: v for k, v in each.items() if k != "mode"} for each in rules if each["mode"] == "enforce"]
        group_names = {group for rule in self.compiled_rules for group in rule.rule.groups}
        groups = {name: sorted(ids) for name, ids in self._groups.items() if name in group_names}
        content = [rules, self._default.verdict, self._destructive.verdict, groups]
        return sha256(encode(content, order="sorted")).hexdigest()[:16]

    def decide(self, principal: Principal, subject: Subject, arguments: Object, revision: str) -> Decision:
        """The verdict on a call whose arguments are valid."""
        plan = self._plans.get((principal, subject, revision)) or self._plan(principal, subject, revision)
        if not plan.steps:
            return plan.fallback
        return _decide(plan, arguments, self._clock() if plan.timed else 0.0)

    def would_decide(self, principal: Principal, subject: Subject, arguments: Object, revision: str) -> list[str]:
        """Return the rules on trial (`mode = "audit"`) that match a call, each with its verdict."""
        now = self._clock() if self.audited else 0.0
        explained = [_explain(each, principal, subject, arguments, revision, now) for each in self.audited]
        pairs = zip(self.audited, explained, strict=True)
        return [f"{each.decision.rule}: {each.decision.verdict}" for each, (_, matches, _) in pairs if matches]

    def hides(self, principal: Principal, subject: Subject, revision: str) -> Decision | None:
        """The decision that hides a tool, if there is one: it is not listed, and a call finds nothing.

        With `default="deny"`, that is also so for a tool that no rule could ever allow this caller.
        """
        plan = self._plans.get((principal, subject, revision)) or self._plan(principal, subject, revision)
        if plan.always_denies:
            return plan.fallback
        if not plan.hides:
            return None
        decision = _decide(plan, {}, self._clock() if plan.timed else 0.0)  # hiding comes first, whatever the arguments
        return decision if decision.verdict == "hide" else None

    def denial_hint(self, principal: Principal, subject: Subject, denial: Decision, revision: str) -> str:
        """Return the text after "is not allowed" in a denial: which calls would be allowed.

        It has only conditions on arguments and time, of rules that match this caller and this tool.
        """
        plan = self._plans.get((principal, subject, revision)) or self._plan(principal, subject, revision)
        against = [step.words for step in plan.steps if step.decision is denial]
        others = {"allow": "", "ask": " (after approval)"}
        offers = [step.words + others[step.decision.verdict] for step in plan.steps if step.decision.verdict in others]
        text = "like this for this caller" if against or offers else "for this caller"
        if against:
            text += f": {against[0]}"
        return (
            f"{text}; allowed is: {' or '.join(offers)}"[:MAX_HINT_CHARACTERS] if offers else text[:MAX_HINT_CHARACTERS]
        )

    def possible_decisions(self, principal: Principal, subject: Subject, revision: str) -> list[Decision]:
        """Every decision a call could meet now, in the order of the rules. If it is one, no argument changes it."""
        plan = self._plans.get((principal, subject, revision)) or self._plan(principal, subject, revision)
        decisions, now = [], self._clock()
        for decision, time_test, argument_test, _ in plan.steps:
            if time_test is None or time_test(now):
                decisions.append(decision)
                if argument_test is None:
                    return decisions
        return [*decisions, plan.fallback]

    def explain(
        self, principal: Principal, subject: Subject, arguments: Object, revision: str
    ) -> list[tuple[str, bool, str]]:
        """Each rule as written, whether it matches and the condition that says so."""
        now = self._clock()
        return [_explain(rule, principal, subject, arguments, revision, now) for rule in self.compiled_rules]

    @property
    def warnings(self) -> list[str]:
        """Rules that match every call, and rules that are never reached because of one."""
        warnings = []
        catch_all, catch_kind = "", ""
        for rule in self._ranked:
            name, verdict = rule.decision.rule, rule.decision.verdict
            if catch_all and catch_kind in ("", rule.kind):
                warnings.append(f"{name}: never decides: {catch_all!r} comes first and matches every call")
            elif not (rule.caller_tests or rule.time_tests or rule.argument_tests):
                subject = rule.kind if rule.kind in ("resource", "prompt") else "tool, destructive or not"
                warnings.append(f"{name}: has no condition: {verdict} for every caller and {subject}")
                catch_all, catch_kind = name, rule.kind
        return warnings

    def _plan(self, principal: Principal, subject: Subject, revision: str) -> _Plan:
        steps: list[_Step] = []
        fallback = self._fallback(subject)
        for rule in self._ranked:
            if rule.kind in ("", subject.kind) and all(
                test(principal, subject, revision) for _, test in rule.caller_tests
            ):
                if not rule.time_tests and not rule.argument_tests:
                    fallback = rule.decision
                    break
                time_test = rule.time_tests[0][1] if rule.time_tests else None
                argument_test = all_of([test for _, test in rule.argument_tests]) if rule.argument_tests else None
                words = ", ".join(words for words, _ in (*rule.time_tests, *rule.argument_tests))
                steps.append(_Step(rule.decision, time_test, argument_test, words))
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        verdicts = {fallback.verdict, *(step.decision.verdict for step in steps)}
        always_denies = self._default.verdict == "deny" and verdicts == {"deny"}
        plan = _Plan(steps, fallback, any(step.time_test for step in steps), "hide" in verdicts, always_denies)
        if not subject.transient:
            self._plans[principal, subject, revision] = plan
        return plan

    def _fallback(self, subject: Subject) -> Decision:
        candidates = [self._default]
        if not subject.trusted:
            candidates.append(self._untrusted)
        if hints(subject).get("destructiveHint") is True:
            candidates.append(self._destructive)
        return min(candidates, key=lambda each: _STRICTNESS[each.verdict])


def policy_of(policy: Any, where: str) -> Policy | None:
    """Return the policy, made of its rules if it is a list of them; TypeError where it is neither."""
    if policy is None or isinstance(policy, Policy):
        return policy
    if isinstance(policy, Rule):
        raise TypeError(f"{where}: expected Policy([Rule(…)]) or a list of rules, got one rule; write policy=[Rule(…)]")
    if isinstance(policy, str | bytes) or not isinstance(policy, Iterable):
        raise TypeError(f"{where}: expected Policy([Rule(…)]) or a list of rules, got {describe_value(policy)}")
    return Policy(list(policy))


def _decide(plan: _Plan, arguments: Object, now: float) -> Decision:
    uncertain = None
    for decision, time_test, argument_test, _ in plan.steps:
        if time_test and not time_test(now):
            continue
        answer = argument_test is None or argument_test(arguments)
        if answer is None:
            if decision.verdict == "ask":
                uncertain = uncertain or decision
            answer = decision.verdict == "deny"
        if answer:
            break
    else:
        decision = plan.fallback
    # A rule that perhaps asks takes an allowance away, and never softens a refusal.
    return uncertain if uncertain and decision.verdict == "allow" else decision


def _explain(
    rule: CompiledRule, principal: Principal, subject: Subject, arguments: Object, revision: str, now: float
) -> tuple[str, bool, str]:
    decision = rule.decision
    if rule.kind not in ("", subject.kind):
        return decision.rule, False, f"not so: kind {rule.kind}"
    answers: list[tuple[str, TriState]] = [
        (words, test(principal, subject, revision)) for words, test in rule.caller_tests
    ]
    answers += [(words, holds(now)) for words, holds in rule.time_tests]
    answers += [(words, test(arguments)) for words, test in rule.argument_tests]
    for words, answer in answers:
        if answer is False:
            return decision.rule, False, f"not so: {words}"
    for words, answer in answers:
        if answer is None:
            counts = decision.verdict != "allow"
            return decision.rule, counts, f"cannot be told, so it {'counts' if counts else 'does not count'}: {words}"
    trial = ' (mode = "audit": it decides nothing)' if rule.rule.mode == "audit" else ""
    return decision.rule, True, f"{decision.verdict}: {decision.why}{trial}"


_OPEN_KEYWORDS = frozenset({"patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"})


class LintedSubject(NamedTuple):
    """What rules and limits can match of a tool, a prompt, a resource (its URI) or a template."""

    name: str
    tags: frozenset[str]
    schema: Object
    kind: SubjectKind = "tool"
    label: str = ""  # what limits call it; empty: as its name

    @property
    def arguments(self) -> set[str] | None:
        """Their names, as far as the schema lists them in one place."""
        listed = self.schema.get("properties")
        # Who says that there may be others, or names none at all, takes any.
        is_open = self.schema.get("additionalProperties", listed is None) is not False
        return None if is_open or self.schema.keys() & _OPEN_KEYWORDS else set(listed or ())


def lint_rules(policy: Policy, subjects: Sequence[LintedSubject]) -> Iterator[str]:
    for compiled in policy.compiled_rules:
        rule, where = compiled.rule, compiled.decision.rule
        candidates = [each for each in subjects if compiled.kind in ("", each.kind)]
        names = [each.name for each in candidates]
        yield from _unmatched(f"{where}: tools", rule.tools, names, "tool")
        yield from _unmatched(f"{where}: prompts", rule.prompts, names, "prompt")
        uris = [normalize_uri(name) for name in names]
        rest = [each for each in map(normalize_uri, rule.uri) if not any(_may_meet(each, uri) for uri in uris)]
        yield from _unmatched(f"{where}: uri", rest, uris, "resource")
        tags = sorted({tag for each in candidates for tag in each.tags})
        for tag in rule.tags:
            if tag not in tags:
                yield f"{where}: tags: {tag!r} is on no {compiled.kind or 'tool'}{_hint(tag, tags)}"
        matches = any_glob(rule.tools or rule.prompts or ["*"], where)
        matching = [each for each in candidates if matches(each.name) and (not rule.tags or each.tags & {*rule.tags})]
        listed = [each.arguments for each in matching]
        for path in rule.arguments if matching else ():
            word = first_step(path)
            if word is not None and all(each is not None and word not in each for each in listed):
                arguments = sorted(set().union(*(each for each in listed if each)))
                subject = compiled.kind or "tool"
                yield f"{where}: arguments: {word!r} is an argument of no {subject} it is about{_hint(word, arguments)}"


def lint_settings(rates: Rates | None, sanitize: Sanitize | None, subjects: Sequence[LintedSubject]) -> Iterator[str]:
    labels = [each.label or each.name for each in subjects]
    for section, settings in (("limits", rates), ("sanitize", sanitize)):
        if settings is not None:
            yield from _unmatched(f"{section}.tools", settings.tools, labels, "tool")


def _unmatched(where: str, patterns: Iterable[str], names: Sequence[str], kind: SubjectKind) -> Iterator[str]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield f"{where}: {pattern!r} matches no {kind}{_hint(pattern, names)}"


def _may_meet(pattern: str, template: str) -> bool:
    """Return whether a pattern may match a URI of a template; a static URI is none."""
    start, is_open, _ = pattern.partition("*")
    literal, is_template, _ = template.partition("{")
    return bool(is_template) and (start.startswith(literal) or (bool(is_open) and literal.startswith(start)))


def _hint(word: str, words: Iterable[str]) -> str:
    near = closest(word, words)
    return f"; did you mean {near!r}?" if near else ""
