"""Who may call what: the verdict on one call, and the rule that gave it (SRV-602).

`hide` wins over everything, then `deny`; otherwise the first rule that allows or asks decides, in the order written.
If none matches, a destructive tool asks, a tool of a server that is not trusted asks, and the rest gets the default;
where two of these apply, the stricter. What is hidden does not exist for the caller: lists and calls use the same
rules, and no such rule looks at arguments. With the default "deny", a tool is hidden as well that no rule could ever
allow the caller, or ask about, whatever the time and the arguments.

All that is the same for each call of one caller to one tool is decided once; arguments and time of day remain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct, to_builtins
from msgspec.json import encode

from handrail.guards.config_lint import LintedTool, lint_rules
from handrail.guards.predicates import TriState, all_of, check_choice
from handrail.guards.rules import CompiledRule, Decision, Facts, Rule, Verdict, any_glob, compile_rule, hints
from handrail.model import Object, Principal
from handrail.options import collection, describe_value, expect, mapping

__all__ = ["Decision", "Facts", "Fallback", "Policy", "Rule", "Verdict", "policy_of"]

Fallback = Literal["allow", "deny", "ask"]
MAX_PLANS = 4_096
MAX_HINT_CHARACTERS = 500  # characters of what would be allowed

_RANK = {"hide": 0, "deny": 1, "ask": 2, "allow": 2}  # those of one rank are taken in the order written
_STRICTNESS = {"deny": 1, "ask": 2, "allow": 3}


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
        self._rules = [compile_rule(rule, number, members) for number, rule in enumerate(rules, 1)]
        principal_lists = [*groups.values(), *(each.rule.principals for each in self._rules)]
        self.principals = sorted(
            {principal for ids in principal_lists for principal in ids if "*" not in principal}
        )  # that are named
        names = ["default"]
        for number, compiled in enumerate(self._rules, 1):
            if (name := compiled.decision.rule) in names or name.startswith("built in"):
                raise ValueError(f"rule {number}: name: {name!r} is taken; the audit tells rules apart by their names")
            names.append(name)
        self._ranked = sorted(self._rules, key=lambda rule: _RANK[rule.decision.verdict])
        self._default = Decision(default, "default", "no rule matches")
        why = "it counts as destructive, and no rule says otherwise"
        self.destructive = destructive
        self._destructive = Decision(destructive, f"built in: destructive tools {destructive}", why)
        self._untrusted = Decision(
            "ask", "built in: untrusted tools ask", "no rule matches, and nobody trusts its server"
        )
        self._plans: dict[tuple[Principal, Facts, str], _Plan] = {}
        # Else no list is filtered.
        self.hides_anything = default == "deny" or any(rule.decision.verdict == "hide" for rule in self._rules)

    @property
    def decisions(self) -> list[Decision]:
        """What each rule says, in the order written."""
        return [rule.decision for rule in self._rules]

    @property
    def is_open(self) -> bool:
        """Whether every tool that is not destructive may be called by anybody."""
        return not self._rules and self._default.verdict == "allow"

    @cached_property
    def version(self) -> str:
        """The same for the same rules and members of the groups they name: a yes under others is none."""
        rules = [to_builtins(rule.rule) for rule in self._rules]
        group_names = {group for rule in self._rules for group in rule.rule.groups}
        groups = {name: sorted(ids) for name, ids in self._groups.items() if name in group_names}
        content = [rules, self._default.verdict, self._destructive.verdict, groups]
        return sha256(encode(content, order="sorted")).hexdigest()[:16]

    def decide(self, principal: Principal, facts: Facts, arguments: Object, revision: str) -> Decision:
        """The verdict on a call whose arguments are valid."""
        plan = self._plans.get((principal, facts, revision)) or self._plan(principal, facts, revision)
        if not plan.steps:
            return plan.fallback
        return _decide(plan, arguments, self._clock() if plan.timed else 0.0)

    def hides(self, principal: Principal, facts: Facts, revision: str) -> Decision | None:
        """The decision that hides a tool, if there is one: it is not listed, and a call finds nothing.

        With `default="deny"`, that is also so for a tool that no rule could ever allow this caller.
        """
        plan = self._plans.get((principal, facts, revision)) or self._plan(principal, facts, revision)
        if plan.always_denies:
            return plan.fallback
        if not plan.hides:
            return None
        decision = _decide(plan, {}, self._clock() if plan.timed else 0.0)  # hiding comes first, whatever the arguments
        return decision if decision.verdict == "hide" else None

    def denial_hint(self, principal: Principal, facts: Facts, denial: Decision, revision: str) -> str:
        """What a caller is told of a denial, after "is not allowed": what would be, as far as that is up to the call.

        Only conditions on arguments and time are told, of rules that are about this caller and this tool.
        """
        plan = self._plans.get((principal, facts, revision)) or self._plan(principal, facts, revision)
        against = [step.words for step in plan.steps if step.decision is denial]
        others = {"allow": "", "ask": " (after approval)"}
        offers = [step.words + others[step.decision.verdict] for step in plan.steps if step.decision.verdict in others]
        text = "like this for this caller" if against or offers else "for this caller"
        if against:
            text += f": {against[0]}"
        return (
            f"{text}; allowed is: {' or '.join(offers)}"[:MAX_HINT_CHARACTERS] if offers else text[:MAX_HINT_CHARACTERS]
        )

    def possible_decisions(self, principal: Principal, facts: Facts, revision: str) -> list[Decision]:
        """Every decision a call could meet now, in the order of the rules. If it is one, no argument changes it."""
        plan = self._plans.get((principal, facts, revision)) or self._plan(principal, facts, revision)
        decisions, now = [], self._clock()
        for decision, time_test, argument_test, _ in plan.steps:
            if time_test is None or time_test(now):
                decisions.append(decision)
                if argument_test is None:
                    return decisions
        return [*decisions, plan.fallback]

    def explain(
        self, principal: Principal, facts: Facts, arguments: Object, revision: str
    ) -> list[tuple[str, bool, str]]:
        """Each rule as written, whether it matches and the condition that says so."""
        now = self._clock()
        return [_explain(rule, principal, facts, arguments, revision, now) for rule in self._rules]

    @property
    def warnings(self) -> list[str]:
        """Rules that match every call, and rules that are never reached because of one."""
        warnings = []
        catch_all = None
        for rule in self._ranked:
            name, verdict = rule.decision.rule, rule.decision.verdict
            if catch_all:
                warnings.append(f"{name}: never decides: {catch_all!r} comes first and matches every call")
            elif not (rule.caller_tests or rule.time_tests or rule.argument_tests):
                warnings.append(f"{name}: has no condition: {verdict} for every caller and tool, destructive or not")
                catch_all = name
        return warnings

    def warnings_for(self, tools: Sequence[LintedTool]) -> list[str]:
        """What rules name and these tools do not have."""
        return list(lint_rules(self._rules, tools))

    def _plan(self, principal: Principal, facts: Facts, revision: str) -> _Plan:
        steps: list[_Step] = []
        fallback = self._fallback(facts)
        for rule in self._ranked:
            if all(test(principal, facts, revision) for _, test in rule.caller_tests):
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
        self._plans[principal, facts, revision] = plan
        return plan

    def _fallback(self, facts: Facts) -> Decision:
        candidates = [self._default]
        if not facts.trusted:
            candidates.append(self._untrusted)
        if hints(facts).get("destructiveHint") is True:
            candidates.append(self._destructive)
        return min(candidates, key=lambda each: _STRICTNESS[each.verdict])


def policy_of(policy: Any, where: str) -> Policy | None:
    """Return a policy, of one that is given or of its rules; TypeError where it is neither."""
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
    rule: CompiledRule, principal: Principal, facts: Facts, arguments: Object, revision: str, now: float
) -> tuple[str, bool, str]:
    decision = rule.decision
    answers: list[tuple[str, TriState]] = [
        (words, test(principal, facts, revision)) for words, test in rule.caller_tests
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
    return decision.rule, True, f"{decision.verdict}: {decision.why}"
