"""Rules: which verdict, by which rule, for which call; and that none of it can be dodged."""

from __future__ import annotations

import re
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, strategies as st
from msgspec import convert

from handrail.guards.limits import Rates, ToolRate
from handrail.guards.policy import (
    MAX_PLANS,
    Decision,
    LintedSubject,
    Policy,
    Rule,
    Subject,
    Verdict,
    lint_rules,
    lint_settings,
)
from handrail.guards.predicates import Predicate
from handrail.guards.sanitize import Sanitize, ToolSanitize
from handrail.model import Object, Principal
from requirements import requirement

NOW = "2025-06-18"
ALICE = Principal("alice", frozenset({"orders:read", "orders:write"}))
BOB = Principal("bob", frozenset({"orders:read"}))
EVE = Principal("https://other.example#alice")
ANYBODY = Principal("anonymous")
LIST = Subject("tool", "list_orders", frozenset({"orders", "safe"}), {"readOnlyHint": True})
CANCEL = Subject("tool", "cancel_order", frozenset({"orders"}), {"destructiveHint": True})
REFUND = Subject("tool", "refund", frozenset({"money"}))
FAR = Subject(
    "tool", "far_read", annotations={"readOnlyHint": True, "destructiveHint": False}, trusted=False, server="far"
)
GROUPS = {"staff": ["alice", "bob"], "robots": ["bot-*"], "nobody": []}


def no_clock() -> float:
    raise AssertionError("the clock was read, though no rule is about time")


def decide(
    rules: Sequence[Rule], who: Principal = ALICE, tool: Subject = REFUND, revision: str = NOW, /, **arguments: Any
) -> tuple[str, str]:
    found = Policy(rules, groups=GROUPS, clock=no_clock).decide(who, tool, arguments, revision)
    return found.verdict, found.rule


def rule(verdict: Any, name: str = "", **rest: Any) -> Rule:
    return Rule(verdict=verdict, name=name, **rest)


# Who and what


@requirement("SRV-602", "P-29")
@pytest.mark.parametrize(
    ("conditions", "who", "tool", "matches"),
    [
        ({}, ANYBODY, REFUND, True),
        ({"principals": ["alice"]}, ALICE, REFUND, True),
        ({"principals": ["alice"]}, BOB, REFUND, False),
        ({"principals": ["alice"]}, EVE, REFUND, False),
        ({"principals": ["Alice"]}, ALICE, REFUND, False),
        ({"principals": ["bob", "al*"]}, ALICE, REFUND, True),
        ({"principals": ["https://other.example#*"]}, EVE, REFUND, True),
        ({"principals": ["https://other.example#*"]}, ALICE, REFUND, False),
        ({"principals": ["*#alice"]}, EVE, REFUND, True),
        ({"principals": ["*"]}, ANYBODY, REFUND, True),
        ({"principals": ["http://[::1]#x?"]}, Principal("http://[::1]#x?"), REFUND, True),
        ({"groups": ["staff"]}, ALICE, REFUND, True),
        ({"groups": ["staff"]}, EVE, REFUND, False),
        ({"groups": ["staff", "robots"]}, Principal("bot-7"), REFUND, True),
        ({"groups": ["nobody"]}, ALICE, REFUND, False),
        ({"groups": ["staff"], "principals": ["bob"]}, ALICE, REFUND, False),
        ({"scopes": ["orders:write"]}, ALICE, REFUND, True),
        ({"scopes": ["orders:write"]}, BOB, REFUND, False),
        ({"scopes": ["orders:read", "orders:write"]}, BOB, REFUND, False),
        ({"without_scopes": ["orders:write"]}, BOB, REFUND, True),
        ({"without_scopes": ["orders:write"]}, ALICE, REFUND, False),
        ({"without_scopes": ["orders:write"]}, ANYBODY, REFUND, True),
        ({"without_scopes": ["orders:read", "orders:write"]}, BOB, REFUND, True),
        ({"tools": ["refund"]}, ALICE, REFUND, True),
        ({"tools": ["refund"]}, ALICE, CANCEL, False),
        ({"tools": ["re"]}, ALICE, REFUND, False),
        ({"tools": ["re*"]}, ALICE, REFUND, True),
        ({"tools": ["*_order*"]}, ALICE, CANCEL, True),
        ({"tools": ["*_order*"]}, ALICE, LIST, True),
        ({"tools": ["cancel_*order"]}, ALICE, CANCEL, True),
        ({"tools": ["cancel_o*order"]}, ALICE, CANCEL, False),
        ({"tools": ["*e*d*"]}, ALICE, REFUND, True),
        ({"tools": ["*d*e*"]}, ALICE, REFUND, False),
        ({"tools": ["list_*", "cancel_*"]}, ALICE, CANCEL, True),
        ({"tags": ["money", "safe"]}, ALICE, REFUND, True),
        ({"tags": ["money", "safe"]}, ALICE, CANCEL, False),
        ({"tags": ["ord*"]}, ALICE, CANCEL, False),
        ({"annotations": {"destructiveHint": True}}, ALICE, CANCEL, True),
        ({"annotations": {"destructiveHint": True}}, ALICE, REFUND, False),
        ({"annotations": {"destructiveHint": False}}, ALICE, REFUND, True),
        ({"annotations": {"readOnlyHint": False}}, ALICE, REFUND, True),
        ({"annotations": {"readOnlyHint": True, "destructiveHint": True}}, ALICE, LIST, False),
        ({"annotations": {"readOnlyHint": True}}, ALICE, FAR, False),
        ({"annotations": {"destructiveHint": True}}, ALICE, FAR, True),
        ({"annotations": {"destructiveHint": False}}, ALICE, FAR, False),
        ({"servers": ["far"]}, ALICE, FAR, True),
        ({"servers": ["f*"]}, ALICE, FAR, True),
        ({"servers": ["near"]}, ALICE, FAR, False),
        ({"servers": ["*"]}, ALICE, FAR, True),
        ({"servers": ["*"]}, ALICE, REFUND, False),
        ({"revisions": [NOW]}, ALICE, REFUND, True),
        ({"revisions": ["2026-07-28", "pocket"]}, ALICE, REFUND, False),
        ({"tools": ["refund"], "scopes": ["orders:write"], "groups": ["staff"]}, ALICE, REFUND, True),
        ({"tools": ["refund"], "scopes": ["orders:write"], "groups": ["robots"]}, ALICE, REFUND, False),
    ],
)
@pytest.mark.parametrize("verdict", ["allow", "deny", "ask", "hide"])
def test_a_rule_matches_when_all_its_conditions_do(
    verdict: str, conditions: dict[str, Any], who: Principal, tool: Subject, matches: bool
) -> None:
    found = decide([rule(verdict, "it", **conditions)], who, tool)
    assert (found == (verdict, "it")) is matches


# Order


@requirement("SRV-602")
@pytest.mark.parametrize(
    ("verdicts", "tool", "expected"),
    [
        ("", REFUND, ("allow", "default")),
        ("", LIST, ("allow", "default")),
        ("", CANCEL, ("ask", "built in: destructive tools ask")),
        ("", FAR, ("ask", "built in: untrusted tools ask")),
        ("allow", CANCEL, ("allow", "rule 1")),
        ("allow", FAR, ("allow", "rule 1")),
        ("ask", LIST, ("ask", "rule 1")),
        ("allow ask", LIST, ("allow", "rule 1")),
        ("ask allow", LIST, ("ask", "rule 1")),
        ("allow deny", LIST, ("deny", "rule 2")),
        ("deny allow", LIST, ("deny", "rule 1")),
        ("ask deny allow", LIST, ("deny", "rule 2")),
        ("allow ask deny deny", LIST, ("deny", "rule 3")),
        ("allow deny hide", LIST, ("hide", "rule 3")),
        ("hide deny allow", LIST, ("hide", "rule 1")),
        ("deny hide", FAR, ("hide", "rule 2")),
    ],
)
def test_hide_wins_then_deny_then_the_first(verdicts: str, tool: Subject, expected: tuple[str, str]) -> None:
    assert decide([rule(each) for each in verdicts.split()], ALICE, tool) == expected


@pytest.mark.parametrize(
    ("settings", "tool", "expected"),
    [
        ({"default": "deny"}, REFUND, ("deny", "default")),
        ({"default": "ask"}, LIST, ("ask", "default")),
        ({"default": "deny"}, CANCEL, ("deny", "default")),  # and not "ask": never better than a harmless tool
        ({"default": "deny"}, FAR, ("deny", "default")),
        ({"destructive": "allow"}, CANCEL, ("allow", "default")),
        ({"destructive": "deny"}, CANCEL, ("deny", "built in: destructive tools deny")),
        ({"destructive": "deny"}, REFUND, ("allow", "default")),
        ({"destructive": "deny"}, FAR, ("deny", "built in: destructive tools deny")),
        ({"destructive": "allow"}, FAR, ("ask", "built in: untrusted tools ask")),
        ({"default": "ask", "destructive": "allow"}, CANCEL, ("ask", "default")),
    ],
)
def test_without_a_rule_the_strictest_that_applies(
    settings: dict[str, Any], tool: Subject, expected: tuple[str, str]
) -> None:
    found = Policy(**settings).decide(ALICE, tool, {}, NOW)
    assert (found.verdict, found.rule) == expected


@requirement("P-33")
@pytest.mark.parametrize(
    ("annotations", "own", "trusted", "foreign"),
    [
        ({}, "allow", "ask", "ask"),
        ({"destructiveHint": True}, "ask", "ask", "ask"),
        ({"destructiveHint": False}, "allow", "allow", "ask"),
        ({"readOnlyHint": True}, "allow", "allow", "ask"),
        ({"readOnlyHint": False}, "allow", "ask", "ask"),
        ({"readOnlyHint": True, "destructiveHint": True}, "ask", "ask", "ask"),
        ({"destructiveHint": "false"}, "allow", "ask", "ask"),
        ({"destructiveHint": None, "readOnlyHint": 1}, "allow", "ask", "ask"),
    ],
)
def test_hints_count_only_from_those_who_are_trusted(
    annotations: dict[str, Any], own: str, trusted: str, foreign: str
) -> None:
    policy = Policy()
    tools = [
        Subject("tool", "x", annotations=annotations),
        Subject("tool", "x", annotations=annotations, server="far"),
        Subject("tool", "x", annotations=annotations, server="far", trusted=False),
    ]
    assert [policy.decide(ALICE, tool, {}, NOW).verdict for tool in tools] == [own, trusted, foreign]


# Arguments

BIG = 2**53
YES, NO, DOUBT = ("allow", "deny", "ask"), (), ("deny", "ask")
"""For which verdicts a rule matches: all, none, or those that are no favour."""

PREDICATES: list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ("amount", {"over": 100}, {"amount": 101}, YES),
    ("amount", {"over": 100}, {"amount": 100}, NO),
    ("amount", {"over": 100}, {"amount": 100.5}, YES),
    ("amount", {"over": 100}, {"amount": "500"}, DOUBT),
    ("amount", {"over": 100}, {"amount": True}, DOUBT),
    ("amount", {"over": 100}, {"amount": None}, DOUBT),
    ("amount", {"over": 100}, {"amount": [500]}, DOUBT),
    ("amount", {"over": 100}, {"amount": {"value": 500}}, DOUBT),
    ("amount", {"over": 100}, {"amount": float("nan")}, DOUBT),
    ("amount", {"over": 100}, {"amount": float("inf")}, YES),
    ("amount", {"over": 100}, {}, NO),
    ("amount", {"over": 100}, {"Amount": 500}, NO),
    ("amount", {"over": BIG}, {"amount": BIG + 1}, YES),
    ("amount", {"over": float(BIG)}, {"amount": BIG + 1}, YES),
    ("amount", {"over": BIG + 1}, {"amount": float(BIG)}, NO),
    ("amount", {"over": 10**400}, {"amount": 10**400 + 1}, YES),
    ("amount", {"over": 10**400}, {"amount": 1e308}, NO),
    ("amount", {"at_least": 5}, {"amount": 5.0}, YES),
    ("amount", {"at_least": 5}, {"amount": 4.999}, NO),
    ("amount", {"under": 5}, {"amount": 5}, NO),
    ("amount", {"under": 5}, {"amount": -1}, YES),
    ("amount", {"under": 5}, {}, NO),
    ("amount", {"at_most": 5}, {"amount": 5}, YES),
    ("amount", {"at_most": 1000}, {"amount": "500"}, DOUBT),
    ("amount", {"over": 1, "under": 5}, {"amount": 3}, YES),
    ("amount", {"over": 1, "under": 5}, {"amount": 7}, NO),
    ("status", {"is": "open"}, {"status": "open"}, YES),
    ("status", {"is": "open"}, {"status": "Open"}, NO),
    ("status", {"is": "open"}, {}, NO),
    ("status", {"is": "open"}, {"status": ["open"]}, DOUBT),
    ("n", {"is": 7}, {"n": 7.0}, YES),
    ("n", {"is": 7}, {"n": "7"}, DOUBT),
    ("n", {"is": 1}, {"n": True}, DOUBT),
    ("n", {"is": BIG}, {"n": BIG + 1}, NO),
    ("n", {"is": float(BIG)}, {"n": BIG + 1}, NO),
    ("force", {"is": True}, {"force": True}, YES),
    ("force", {"is": True}, {"force": False}, NO),
    ("force", {"is": True}, {"force": 1}, DOUBT),
    ("force", {"is": True}, {"force": None}, DOUBT),
    ("force", {"is": True, "is_not": None}, {"force": None}, NO),
    ("x", {"is": None}, {"x": None}, YES),
    ("x", {"is": None}, {}, NO),
    ("x", {"is": {"a": [1, {"b": True}]}}, {"x": {"a": [1.0, {"b": True}]}}, YES),
    ("x", {"is": {"a": [1, {"b": True}]}}, {"x": {"a": [1, {"b": 1}]}}, NO),
    ("x", {"is": {"a": 1}}, {"x": {"a": 1, "b": 2}}, NO),
    ("x", {"is": [1, 2]}, {"x": [1]}, NO),
    ("status", {"is_not": "open"}, {"status": "done"}, YES),
    ("status", {"is_not": "open"}, {"status": "open"}, NO),
    ("status", {"is_not": "open"}, {"status": 5}, DOUBT),
    ("status", {"is_not": "open"}, {}, DOUBT),
    ("status", {"in": ["open", "done"]}, {"status": "done"}, YES),
    ("status", {"in": ["open", "done"]}, {"status": "gone"}, NO),
    ("status", {"in": ["open", None]}, {"status": None}, YES),
    ("status", {"in": ["open", None]}, {"status": "x"}, NO),
    ("status", {"in": ["open", 5]}, {"status": True}, DOUBT),
    ("status", {"in": [1, False]}, {"status": True}, NO),
    ("status", {"in": [["a"], "b"]}, {"status": ["a"]}, YES),
    ("status", {"not_in": ["open"]}, {"status": "gone"}, YES),
    ("status", {"not_in": ["open"]}, {"status": "open"}, NO),
    ("status", {"not_in": ["open"]}, {}, DOUBT),
    ("path", {"matches": "^/tmp/"}, {"path": "/tmp/x"}, YES),
    ("path", {"matches": "^/tmp/"}, {"path": "/var/tmp/x"}, NO),
    ("path", {"matches": "tmp"}, {"path": "/var/tmp/x"}, YES),
    ("path", {"matches": "x$"}, {"path": "x\n"}, NO),
    ("path", {"matches": "^/tmp/"}, {"path": ["/tmp/x"]}, DOUBT),
    ("path", {"matches": "^/tmp/"}, {"path": "/etc/\udc80"}, DOUBT),
    ("path", {"matches": "^/tmp/"}, {}, NO),
    ("path", {"not_matches": "^/tmp/"}, {"path": "/etc/passwd"}, YES),
    ("path", {"not_matches": "^/tmp/"}, {"path": "/tmp/x"}, NO),
    ("path", {"not_matches": "^/tmp/"}, {"path": 5}, DOUBT),
    ("path", {"not_matches": "^/tmp/"}, {}, DOUBT),
    ("path", {"not_matches": "^/tmp/", "present": True}, {}, NO),
    ("path", {"not_matches": "^/tmp/", "present": True}, {"path": "/etc"}, YES),
    ("x", {"present": True}, {"x": None}, YES),
    ("x", {"present": True}, {}, NO),
    ("x", {"present": False}, {}, YES),
    ("x", {"present": False}, {"x": None}, NO),
    ("text", {"longer_than": 3}, {"text": "four"}, YES),
    ("text", {"longer_than": 3}, {"text": "äöü"}, NO),
    ("text", {"longer_than": 1}, {"text": [1, 2]}, YES),
    ("text", {"longer_than": 1}, {"text": 12345}, DOUBT),
    ("text", {"longer_than": 0}, {}, NO),
    ("text", {"shorter_than": 3}, {"text": "ab"}, YES),
    ("text", {"shorter_than": 3}, {"text": "abc"}, NO),
    ("text", {"shorter_than": 3}, {"text": {"a": 1}}, DOUBT),
    ("order.id", {"is": 7}, {"order": {"id": 7}}, YES),
    ("order.id", {"is": 7}, {"order": {}}, NO),
    ("order.id", {"is": 7}, {}, NO),
    ("order.id", {"is": 7}, {"order": 7}, DOUBT),
    ("order.id", {"is": 7}, {"order": '{"id": 7}'}, DOUBT),
    ("order.id", {"is": 7}, {"order": [{"id": 7}]}, DOUBT),
    ("order.id", {"is": 7}, {"order.id": 7}, NO),
    ("order.id", {"present": False}, {"order": None}, DOUBT),
    ("order.id.part", {"is": 7}, {"order": {}}, NO),
    (r"order\.id", {"is": 7}, {"order.id": 7}, YES),
    (r"a\*\\b", {"is": 7}, {"a*\\b": 7}, YES),
    (r"\*", {"is": 7}, {"x": 7}, NO),
    ("/order/id", {"is": 7}, {"order": {"id": 7}}, YES),
    ("/a~1b/c~0d", {"is": 7}, {"a/b": {"c~d": 7}}, YES),
    ("/a.b", {"is": 7}, {"a.b": 7}, YES),
    ("/", {"is": 7}, {"": 7}, YES),
    ("items.0.price", {"over": 5}, {"items": [{"price": 9}, {"price": 1}]}, YES),
    ("items.2.price", {"over": 5}, {"items": [{"price": 9}, {"price": 1}]}, NO),
    ("items.*.price", {"over": 5}, {"items": [{"price": 9}, {"price": 8}]}, YES),
    ("items.*.price", {"over": 5}, {"items": [{"price": 9}, {"price": 1}]}, DOUBT),
    ("items.*.price", {"over": 5}, {"items": [{"price": 1}, {"price": 1}]}, NO),
    ("items.*.price", {"over": 5}, {"items": [{"price": 1}, {"price": "9"}]}, DOUBT),
    ("items.*.price", {"over": 5}, {"items": [{"price": 9}, {}]}, DOUBT),
    ("items.*.price", {"over": 5}, {"items": []}, NO),
    ("items.*.price", {"over": 5}, {}, NO),
    ("items.*.price", {"over": 5}, {"items": "9"}, DOUBT),
    ("items.*.price", {"over": 5}, {"items": {"a": {"price": 9}}}, YES),
    ("to.*", {"not_matches": "@ours$"}, {"to": ["a@ours", "b@ours"]}, NO),
    ("to.*", {"not_matches": "@ours$"}, {"to": ["a@ours", "b@theirs"]}, DOUBT),
    ("to.*", {"not_matches": "@ours$"}, {"to": []}, NO),
    ("to.*", {"not_matches": "@ours$"}, {}, DOUBT),
    ("/grid/*/*", {"over": 5}, {"grid": [[6, 7], [8]]}, YES),
    ("/grid/*/*", {"over": 5}, {"grid": [[6, 7], [3]]}, DOUBT),
    ("*", {"longer_than": 5}, {"a": "longer", "b": "longest"}, YES),
]


@requirement("SRV-602")
@pytest.mark.parametrize(("path", "predicate", "arguments", "matching"), PREDICATES)
def test_arguments_are_judged_and_doubt_favours_nobody(
    path: str, predicate: dict[str, Any], arguments: dict[str, Any], matching: tuple[str, ...]
) -> None:
    found = []
    for verdict in ("allow", "deny", "ask"):
        rules = [rule(verdict, "it", arguments={path: predicate}), rule("ask" if verdict == "allow" else "allow")]
        if decide(rules, ALICE, REFUND, NOW, **arguments) == (verdict, "it"):
            found.append(verdict)
    assert tuple(found) == matching


def test_several_arguments_must_all_match() -> None:
    rules = [rule("deny", arguments={"amount": {"over": 100}, "currency": {"is": "EUR"}})]
    assert decide(rules, amount=500, currency="EUR")[0] == "deny"
    assert decide(rules, amount=500, currency="USD")[0] == "allow"
    assert decide(rules, amount="500", currency="USD")[0] == "allow"  # surely not, whatever the amount is
    assert decide(rules, amount="500", currency="EUR")[0] == "deny"


def test_a_rule_that_perhaps_asks_softens_no_refusal() -> None:
    asks = rule("ask", "small sums", arguments={"amount": {"under": 100}})
    policy = Policy([asks], default="deny")
    assert policy.decide(ALICE, REFUND, {"amount": 50}, NOW).verdict == "ask"
    assert policy.decide(ALICE, REFUND, {"amount": "50"}, NOW).verdict == "deny"
    assert Policy([asks]).decide(ALICE, REFUND, {"amount": "50"}, NOW).rule == "small sums"
    assert Policy([asks, rule("ask", "later")]).decide(ALICE, REFUND, {"amount": "50"}, NOW).rule == "later"


@requirement("P-07")
def test_patterns_take_linear_time() -> None:
    # Engines that go back would not finish within the age of the universe.
    rules = [rule("deny", arguments={"text": {"matches": "^(a+)+$"}}), rule("deny", tools=["*".join("a" * 40)])]
    tool = Subject("tool", "a" * 100_000 + "b")
    assert decide(rules, ALICE, tool, text="a" * 100_000 + "!")[0] == "allow"
    assert decide(rules, ALICE, Subject("tool", "a" * 100_000), text="")[0] == "deny"


# Time of day

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str, zone: ZoneInfo = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


@pytest.mark.parametrize(
    ("when", "text", "inside"),
    [
        ({"hours": "09:00-17:30"}, "2026-01-07 08:59:59.999", False),
        ({"hours": "09:00-17:30"}, "2026-01-07 09:00", True),
        ({"hours": "09:00-17:30"}, "2026-01-07 17:29:59.999", True),
        ({"hours": "09:00-17:30"}, "2026-01-07 17:30", False),
        ({"hours": "00:00-24:00"}, "2026-01-07 23:59:59", True),
        ({"hours": "22:00-24:00"}, "2026-01-07 00:00", False),
        ({"hours": "22:00-24:00"}, "2026-01-07 23:59", True),
        ({"hours": "22:00-00:00"}, "2026-01-07 23:59", True),
        ({"hours": "22:00-00:00"}, "2026-01-07 00:00", False),
        ({"hours": "22:00-06:00"}, "2026-01-07 21:59", False),
        ({"hours": "22:00-06:00"}, "2026-01-07 22:00", True),
        ({"hours": "22:00-06:00"}, "2026-01-07 05:59", True),
        ({"hours": "22:00-06:00"}, "2026-01-07 06:00", False),
        ({"days": ["wed"]}, "2026-01-07 00:00", True),  # a Wednesday
        ({"days": ["wed"]}, "2026-01-08 00:00", False),
        ({"days": ["mon", "sun"]}, "2026-01-11 12:00", True),
        ({"days": ["fri"], "hours": "22:00-06:00"}, "2026-01-09 23:00", True),
        ({"days": ["fri"], "hours": "22:00-06:00"}, "2026-01-10 05:00", True),  # the night of Friday
        ({"days": ["fri"], "hours": "22:00-06:00"}, "2026-01-09 05:00", False),  # that of Thursday
        ({"days": ["sun"], "hours": "22:00-06:00"}, "2026-01-12 05:00", True),
        ({"hours": "02:00-03:00"}, "2026-03-29 01:59:59", False),
        ({"hours": "02:00-03:00"}, "2026-03-29 03:00", False),  # two o'clock did not come that night
        ({"hours": "02:00-03:00"}, "2026-10-25 02:30", True),
        ({"hours": "02:00-03:00"}, "2026-10-25 03:00", False),
        ({"hours": "09:00-17:30", "timezone": "Asia/Tokyo"}, "2026-01-07 01:00", True),
        ({"hours": "09:00-17:30", "timezone": "Asia/Tokyo"}, "2026-01-07 09:30", False),
        ({"days": ["thu"], "timezone": "Asia/Tokyo"}, "2026-01-07 16:00", True),
    ],
)
def test_time_of_day(when: dict[str, Any], text: str, inside: bool) -> None:
    one = rule("deny", **{"timezone": "Europe/Berlin", **when})
    found = Policy([one], clock=lambda: at(text)).decide(ALICE, REFUND, {}, NOW)
    assert (found.verdict == "deny") is inside


def test_an_hour_that_comes_twice_counts_twice() -> None:
    policy_at = at("2026-10-25 02:30")
    for moment in (policy_at, policy_at + 3600):
        policy = Policy([rule("deny", hours="02:00-03:00", timezone="Europe/Berlin")], clock=partial(float, moment))
        assert policy.decide(ALICE, REFUND, {}, NOW).verdict == "deny"
    assert datetime.fromtimestamp(policy_at + 3600, BERLIN).hour == 2


def test_without_a_zone_time_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        policy = Policy(
            [rule("deny", hours="09:00-10:00")], clock=lambda: at("2026-01-07 09:30", ZoneInfo("Asia/Tokyo"))
        )
        assert policy.decide(ALICE, REFUND, {}, NOW).verdict == "deny"
    finally:
        monkeypatch.undo()
        time.tzset()


TIMED = [
    rule("hide", "night", tools=["refund"], hours="22:00-06:00", timezone="Europe/Berlin"),
    rule("deny", "sunday", days=["sun"], timezone="UTC"),
    rule("ask", "lunch", hours="12:00-13:00", timezone="America/New_York", arguments={"amount": {"over": 5}}),
]


@requirement("P-21")
@given(st.lists(st.integers(-400_000, 400_000), min_size=2, max_size=8))
def test_p21_a_jump_of_the_clock_changes_only_what_the_time_decides(jumps: list[int]) -> None:
    clock = [at("2026-03-28 12:00")]
    rules = [*TIMED, rule("deny", tools=["cancel_*"])]
    policy = Policy(rules, clock=lambda: clock[-1])
    for jump in jumps:
        clock.append(clock[-1] + jump)
        fresh = Policy(rules, clock=lambda: clock[-1])
        found = policy.decide(ALICE, REFUND, {"amount": 9}, NOW)
        assert found == fresh.decide(ALICE, REFUND, {"amount": 9}, NOW)
        assert (policy.hides(ALICE, REFUND, NOW) is not None) == (found.verdict == "hide")
        assert policy.decide(ALICE, CANCEL, {}, NOW).verdict == "deny"


@requirement("P-21")
def test_p21_one_decision_is_of_one_moment() -> None:
    noon = at("2026-01-07 12:00")
    moments = iter([noon - 0.001, noon])
    # By day one rule or the other applies; with two readings of the clock, none would.
    rules = [
        rule("deny", hours="12:00-24:00", timezone="Europe/Berlin"),
        rule("ask", hours="00:00-12:00", timezone="Europe/Berlin"),
    ]
    assert Policy(rules, clock=lambda: next(moments)).decide(ALICE, REFUND, {}, NOW).verdict == "ask"


# What must hold for every set of rules

WHO = [ALICE, BOB, EVE, ANYBODY, Principal("bot-1", frozenset({"orders:write"}))]
TOOLS = [
    LIST,
    CANCEL,
    REFUND,
    FAR,
    Subject("tool", "near_write", frozenset({"money"}), {"readOnlyHint": False}, server="near"),
    Subject("tool", "near_read", annotations={"readOnlyHint": True}, server="near"),
]
SPOKEN = [NOW, "2026-07-28"]
texts = st.text("ao/*.~\\\n\0é\ud800\U0001f600", max_size=5)
json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-10, 200)
    | st.integers()
    | st.floats()
    | st.sampled_from(["open", "/tmp/x"])
    | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "price", "*"]), inner, max_size=3)
    ),
    max_leaves=4,
)
calls = st.dictionaries(st.sampled_from(["amount", "order", "items", "x"]), json, max_size=3)
finite = st.integers(-10, 200) | st.floats(-10, 200)
asked = st.one_of(
    st.fixed_dictionaries({"present": st.just(False)}),
    st.fixed_dictionaries(
        {},
        optional={
            "present": st.just(True),
            "is": st.sampled_from([7, True, None, "open", [], {"id": 1}]),
            "is_not": st.sampled_from([7, False, "open"]),
            "in": st.just(["open", 1, None]),
            "not_in": st.just(["open", 1, [1]]),
            "over": finite,
            "at_least": finite,
            "under": finite,
            "at_most": finite,
            "matches": st.sampled_from(["^/tmp", "o", "^$"]),
            "not_matches": st.sampled_from(["^/tmp", "o"]),
            "longer_than": st.integers(0, 3),
            "shorter_than": st.integers(0, 3),
        },
    ).filter(bool),
)
paths = st.sampled_from(["amount", "order.id", "items.*", "items.*.price", "items.0", "x", "/x/*/id"])
fields = {
    "principals": st.lists(st.sampled_from(["alice", "*alice", "b*", "*"]), min_size=1, max_size=2),
    "groups": st.lists(st.sampled_from(list(GROUPS)), min_size=1, max_size=2),
    "scopes": st.just(["orders:write"]),
    "without_scopes": st.sampled_from([["orders:write"], ["orders:read", "orders:write"]]),
    "tools": st.lists(st.sampled_from(["*_order*", "refund", "*e*r*", "*"]), min_size=1, max_size=2),
    "tags": st.sampled_from([["money"], ["safe", "money"]]),
    "annotations": st.dictionaries(st.sampled_from(["readOnlyHint", "destructiveHint"]), st.booleans(), min_size=1),
    "hours": st.sampled_from(["09:00-17:00", "22:00-06:00", "00:00-24:00"]),
    "days": st.lists(st.sampled_from(["fri", "sat", "sun"]), min_size=1),
    "revisions": st.just([NOW]),
    "servers": st.sampled_from([["far"], ["*"]]),
}


@st.composite
def one_rule(draw: st.DrawFn, verdicts: Sequence[Verdict] = ("allow", "deny", "ask", "hide")) -> Rule:
    verdict = draw(st.sampled_from(verdicts))
    chosen = draw(st.lists(st.sampled_from(list(fields)), max_size=2, unique=True))
    given: dict[str, Any] = {name: draw(fields[name]) for name in chosen}
    if verdict != "hide" and draw(st.booleans()):
        given["arguments"] = draw(st.dictionaries(paths, asked, min_size=1, max_size=2))
    if "hours" in given or "days" in given:
        given["timezone"] = "Europe/Berlin"
    return Rule(verdict=verdict, **given)


Call = tuple[Principal, Subject, dict[str, Any], str]
rule_lists = st.lists(one_rule(), max_size=5)
every_call: st.SearchStrategy[Call] = st.tuples(
    st.sampled_from(WHO), st.sampled_from(TOOLS), calls, st.sampled_from(SPOKEN)
)
moments = st.integers(0, 14 * 24 * 60).map(lambda minutes: at("2026-03-27 00:00") + 60 * minutes)


def named(rules: Sequence[Rule]) -> Policy:
    return Policy(rules, groups=GROUPS, clock=lambda: at("2026-03-28 12:00"))


class Naive:
    """The same decisions, written as the documentation says them, without plans, kinds or closures."""

    def __init__(self, rules: Sequence[Rule], now: float) -> None:
        self.rules, self.now = rules, now

    def decide(self, call: Call) -> tuple[str, str]:
        sure = [self.matches(each, call, doubt=False) for each in self.rules]
        perhaps = [self.matches(each, call, doubt=True) for each in self.rules]
        for verdict in ("hide", "deny"):
            for number, each in enumerate(self.rules):
                if each.verdict == verdict and perhaps[number]:
                    return verdict, f"rule {number + 1}"
        doubted = ""
        for number, each in enumerate(self.rules):
            if each.verdict in ("ask", "allow") and sure[number]:
                if each.verdict == "allow" and doubted:
                    return "ask", doubted
                return each.verdict, f"rule {number + 1}"
            if each.verdict == "ask" and perhaps[number]:
                doubted = doubted or f"rule {number + 1}"
        hint = self.hint(call[1], "destructiveHint")
        if doubted and not hint and call[1].trusted:
            return "ask", doubted
        if not hint:
            return "allow", "default"
        return "ask", f"built in: {'destructive' if call[1].trusted else 'untrusted'} tools ask"

    def hint(self, tool: Subject, name: str) -> bool:
        absent = {"destructiveHint": True, "readOnlyHint": False}[name]
        if not tool.trusted:
            return absent
        if name in tool.annotations or not tool.server:
            return tool.annotations.get(name) is True
        return absent and tool.annotations.get("readOnlyHint") is not True

    def matches(self, one: Rule, call: Call, doubt: bool) -> bool:
        who, tool, arguments, revision = call
        ids = [glob for group in one.groups for glob in GROUPS[group]]
        return all(
            [
                not one.principals or any(fnmatchcase(who.id, glob) for glob in one.principals),
                not one.groups or any(fnmatchcase(who.id, glob) for glob in ids),
                set(one.scopes) <= who.scopes,
                not one.without_scopes or not set(one.without_scopes) <= who.scopes,
                not one.tools or any(fnmatchcase(tool.name, glob) for glob in one.tools),
                not one.tags or set(one.tags) & tool.tags,
                all(self.hint(tool, name) is wanted for name, wanted in one.annotations.items()),
                not one.revisions or revision in one.revisions,
                not one.servers or (tool.server and any(fnmatchcase(tool.server, glob) for glob in one.servers)),
                not (one.hours or one.days) or self.now_is(one),
                all(self.holds(one, path, tests, arguments, doubt) for path, tests in one.arguments.items()),
            ]
        )

    def now_is(self, one: Rule) -> bool:
        wall = datetime.fromtimestamp(self.now, BERLIN).replace(tzinfo=None)
        begin, end = (
            timedelta(hours=int(part[:2]), minutes=int(part[3:])) for part in (one.hours or "00:00-24:00").split("-")
        )
        length = end - begin if end > begin else end - begin + timedelta(days=1)
        for back in (0, 1):
            day = datetime(wall.year, wall.month, wall.day) - timedelta(days=back)
            names = one.days or [f"{day:%a}".lower()]
            if f"{day:%a}".lower() in names and day + begin <= wall < day + begin + length:
                return True
        return False

    def holds(self, one: Rule, path: str, tests: Mapping[str, Any], arguments: Any, doubt: bool) -> bool:
        found = list(self.values(arguments, path.strip("/").replace("/", ".").split(".")))
        answers = [
            all(self.says(name, wanted, kind, value, doubt) for name, wanted in tests.items()) for kind, value in found
        ]
        return bool(answers) and all(answers) if one.verdict == "allow" else any(answers)

    def values(self, value: Any, steps: list[str]) -> list[tuple[str, Any]]:
        if not steps:
            return [("there", value)]
        step, *rest = steps
        if isinstance(value, dict):
            inside = list(value.values()) if step == "*" else [value[step]] if step in value else None
        elif isinstance(value, list) and step == "*":
            inside = value
        elif isinstance(value, list) and step == "0":
            inside = value[:1] or None
        else:
            return [("astray", None)]
        if inside is None:
            return [("missing", None)]
        return [found for each in inside for found in self.values(each, rest)]

    def says(self, name: str, wanted: Any, kind: str, value: Any, doubt: bool) -> bool:
        if kind == "astray":
            return doubt
        if name == "present":
            return (kind == "there") is wanted
        if name.startswith("not_") or name == "is_not":
            if kind == "missing":
                return doubt
            positive = {"is_not": "is"}.get(name, name.removeprefix("not_"))
            return not self.says(positive, wanted, kind, value, not doubt)
        if kind == "missing":
            return False
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
        if name in ("is", "in"):
            options = wanted if name == "in" else [wanted]
            if not any(self.kind(value) == self.kind(each) for each in options):
                return doubt
            return any(self.same(value, each) for each in options)
        if name in ("over", "at_least", "under", "at_most"):
            if not is_number:
                return doubt
            above, equal = value > wanted, value == wanted
            return bool(
                {"over": above, "at_least": above or equal, "under": not above and not equal}.get(name, not above)
            )
        if name == "matches":
            if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
                return doubt
            return re.search(wanted.replace("$", r"\Z"), value) is not None
        if not isinstance(value, str | list):
            return doubt
        return bool(len(value) > wanted if name == "longer_than" else len(value) < wanted)

    def kind(self, value: Any) -> str:
        return "number" if type(value) in (int, float) else type(value).__name__

    def same(self, one: Any, two: Any) -> bool:
        if self.kind(one) != self.kind(two):
            return False
        if isinstance(one, list):
            return len(one) == len(two) and all(self.same(a, b) for a, b in zip(one, two, strict=True))
        if isinstance(one, dict):
            return one.keys() == two.keys() and all(self.same(one[key], two[key]) for key in one)
        return bool(one == two)


@requirement("SRV-602")
@given(rule_lists, st.lists(every_call, min_size=1, max_size=4), moments)
def test_decisions_are_those_of_the_plain_reading_remembered_or_not(
    rules: list[Rule], several: list[Call], now: float
) -> None:
    policy = Policy(rules, groups=GROUPS, clock=lambda: now)
    naive = Naive(rules, now)
    for call in [*several, *several]:
        found = policy.decide(*call)
        assert (found.verdict, found.rule) == naive.decide(call)


@requirement("SRV-602")
@given(rule_lists, one_rule(["deny"]), every_call, st.randoms())
def test_deny_wins_wherever_it_stands_and_allows_nothing(
    rules: list[Rule], deny: Rule, call: Call, random: Any
) -> None:
    before = named(rules).decide(*call).verdict
    rules = [*rules, deny]
    after = named(rules).decide(*call).verdict
    assert after == before or (after == "deny" and before in ("allow", "ask"))
    unordered = ("deny", "hide")
    random.shuffle(rules)
    shuffled = named(rules).decide(*call).verdict
    assert shuffled == after or (shuffled not in unordered and after not in unordered)


@given(rule_lists, one_rule(), every_call, st.integers(0, 6))
def test_a_rule_that_does_not_match_changes_nothing(rules: list[Rule], other: Rule, call: Call, place: int) -> None:
    [(_, matched, _)] = named([other]).explain(*call)
    before, after = named(rules).decide(*call), named([*rules[:place], other, *rules[place:]]).decide(*call)
    assert matched or (before.verdict, before.why) == (after.verdict, after.why)


@requirement("SRV-602", "P-29")
@given(rule_lists, every_call, calls)
def test_hidden_in_lists_is_hidden_in_calls_whatever_the_arguments(
    rules: list[Rule], call: Call, arguments: dict[str, Any]
) -> None:
    policy = named(rules)
    who, tool, given, revision = call
    hidden = policy.hides(who, tool, revision)
    for each in (given, arguments):
        found = policy.decide(who, tool, each, revision)
        assert (found if found.verdict == "hide" else None) == hidden
    assert policy.hides_anything or hidden is None


@given(rule_lists, every_call)
def test_a_rule_that_decides_is_one_that_matches(rules: list[Rule], call: Call) -> None:
    policy = named(rules)
    matches = {name: matched for name, matched, _ in policy.explain(*call)}
    assert list(matches) == [f"rule {number}" for number in range(1, len(rules) + 1)]
    assert matches.get(policy.decide(*call).rule, True)


@given(st.dictionaries(paths, asked, min_size=1), st.dictionaries(texts, json) | calls)
def test_no_value_breaks_a_predicate(arguments: dict[str, Any], sent: dict[str, Any]) -> None:
    for verdict in ("allow", "deny", "ask"):
        named([rule(verdict, arguments=arguments)]).decide(ALICE, REFUND, sent, NOW)


pieces = st.text("ab*", min_size=1, max_size=8)


@given(pieces, st.text("ab", max_size=12))
@example("a*b*b", "ab")
@example("*a*a*", "a")
@example("aa*aa", "aaa")
def test_a_star_is_any_characters(glob: str, name: str) -> None:
    assert (decide([rule("deny", tools=[glob])], ALICE, Subject("tool", name))[0] == "deny") is fnmatchcase(name, glob)


# What is remembered


@requirement("P-29")
def test_callers_of_one_name_do_not_share_decisions() -> None:
    policy = Policy([rule("deny", without_scopes=["orders:write"]), rule("deny", principals=["https://*"])])
    reader = Principal("alice", frozenset({"orders:read"}))
    for _ in range(2):
        assert policy.decide(ALICE, REFUND, {}, NOW).verdict == "allow"
        assert policy.decide(reader, REFUND, {}, NOW).verdict == "deny"
        assert policy.decide(EVE, REFUND, {}, NOW).verdict == "deny"


def test_a_tool_that_takes_the_place_of_another_is_judged_anew() -> None:
    policy = Policy()
    for _ in range(3):
        assert policy.decide(ALICE, Subject("tool", "x"), {}, NOW).verdict == "allow"
        assert (
            policy.decide(ALICE, Subject("tool", "x", annotations={"destructiveHint": True}), {}, NOW).verdict == "ask"
        )
        assert policy.decide(ALICE, Subject("tool", "x", trusted=False), {}, NOW).verdict == "ask"


def test_memory_is_bounded() -> None:
    policy, tool = Policy(), Subject("tool", "x")
    before = sys.getrefcount(tool)
    for number in range(2 * MAX_PLANS + 10):
        policy.decide(Principal(f"user-{number}"), tool, {}, NOW)
    assert sys.getrefcount(tool) - before <= MAX_PLANS


def test_decisions_are_shared() -> None:
    policy = Policy([rule("deny", "big", arguments={"amount": {"over": 5}})])
    first, second = (policy.decide(who, REFUND, {"amount": 9}, NOW) for who in (ALICE, BOB))
    assert first is second
    assert first == Decision("deny", "big", "amount over 5")


# Words


def test_an_explanation_names_the_condition() -> None:
    policy = Policy(
        [
            rule("deny", "no bots", groups=["robots"]),
            rule("allow", "small", tools=["refund"], arguments={"amount": {"at_most": 5}}),
            rule("ask", "odd", arguments={"amount": {"in": [1, "x"]}}),
            rule("ask", arguments={"amount": {"over": 10, "under": 100}}),
            rule("deny", "night", hours="22:00-06:00", days=["fri"], timezone="Europe/Berlin"),
        ],
        groups=GROUPS,
        clock=lambda: at("2026-01-07 12:00"),
    )
    assert policy.explain(ALICE, REFUND, {"amount": 50}, NOW) == [
        ("no bots", False, "not so: groups robots"),
        ("small", False, "not so: amount at most 5"),
        ("odd", False, 'not so: amount in [1,"x"]'),
        ("rule 4", True, "ask: amount over 10, amount under 100"),
        ("night", False, "not so: 22:00-06:00 fri Europe/Berlin"),
    ]
    assert policy.explain(ALICE, CANCEL, {"amount": True}, NOW)[1:] == [
        ("small", False, "not so: tools refund"),
        ("odd", True, 'cannot be told, so it counts: amount in [1,"x"]'),
        ("rule 4", True, "cannot be told, so it counts: amount over 10, amount under 100"),
        ("night", False, "not so: 22:00-06:00 fri Europe/Berlin"),
    ]
    assert policy.explain(ALICE, REFUND, {"amount": "5"}, NOW)[1] == (
        "small",
        False,
        "cannot be told, so it does not count: amount at most 5",
    )


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], []),
        ([rule("deny", tools=["x"]), rule("allow", tools=["y"])], []),
        ([rule("allow", "all")], ["all: has no condition: allow"]),
        ([rule("allow", "all", tools=["*"], principals=["*"])], ["all: has no condition: allow"]),
        ([rule("allow", "all", servers=["*"])], []),
        ([rule("allow", "a"), rule("ask", "b", tools=["x"])], ["a: has no condition", "b: never decides: 'a'"]),
        ([rule("ask", "b", tools=["x"]), rule("allow", "a")], ["a: has no condition"]),
        ([rule("allow", "a", tools=["x"]), rule("deny", "d")], ["d: has no condition: deny", "a: never decides: 'd'"]),
        ([rule("allow", "a"), rule("deny", "d", tools=["x"])], ["a: has no condition"]),
        ([rule("deny", "d"), rule("hide", "h", tools=["x"])], ["d: has no condition"]),
        ([rule("deny", "d", tools=["x"]), rule("hide", "h")], ["h: has no condition", "d: never decides: 'h'"]),
    ],
)
def test_rules_that_match_every_call_are_pointed_out(rules: list[Rule], expected: list[str]) -> None:
    found = Policy(rules).warnings
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))


ORDERS = {"type": "object", "properties": {"order": {"type": "integer"}, "amount": {"type": "number"}}}
KNOWN = [
    LintedSubject("cancel_order", frozenset({"orders"}), ORDERS),
    LintedSubject("refund", frozenset({"money"}), ORDERS),
    LintedSubject("free", frozenset(), {"type": "object", "allOf": []}),
    LintedSubject("open", frozenset({"open"}), {**ORDERS, "additionalProperties": {"type": "string"}}),
    LintedSubject("any", frozenset({"open"}), {"type": "object"}),
    LintedSubject("none", frozenset(), {"type": "object", "additionalProperties": False}),
]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tools": ["cancel_*", "refnd"]}, ["r: tools: 'refnd' matches no tool; did you mean 'refund'?"]),
        ({"tools": ["zzzzzzzzzzzz"]}, ["r: tools: 'zzzzzzzzzzzz' matches no tool"]),
        ({"tags": ["order", "money"]}, ["r: tags: 'order' is on no tool; did you mean 'orders'?"]),
        (
            {"tools": ["refund"], "arguments": {"amout.value": {"over": 5}, "order": {"is": 1}}},
            ["r: arguments: 'amout' is an argument of no tool it is about; did you mean 'amount'?"],
        ),
        (
            {"tags": ["money"], "arguments": {"zz": {"is": 1}}},
            ["r: arguments: 'zz' is an argument of no tool it is about"],
        ),
        ({"tools": ["cancel_*", "free"], "arguments": {"anything": {"is": 1}}}, []),  # who knows what is in there
        ({"tools": ["open"], "arguments": {"label": {"is": "x"}}}, []),
        ({"tools": ["any"], "arguments": {"label": {"is": "x"}}}, []),
        ({"tags": ["open"], "arguments": {"label": {"is": "x"}}}, []),
        (
            {"tools": ["none"], "arguments": {"label": {"is": "x"}}},
            ["r: arguments: 'label' is an argument of no tool it is about"],
        ),
        ({"arguments": {"/*": {"is": 1}, "*.x": {"is": 1}}}, []),
    ],
)
def test_what_a_rule_names_and_no_tool_has_is_pointed_out(given: Object, expected: list[str]) -> None:
    assert [*lint_rules(Policy([rule("deny", "r", **given)]), KNOWN)] == expected


@requirement("SRV-602", everywhere=True)
@pytest.mark.parametrize(
    ("pattern", "uri"),
    [
        ("file:///Übersicht/*", "file:///%C3%9Cbersicht/a"),
        ("HTTPS://Example.com/*", "https://example.com/a"),
        ("https://example.com/*", "https://Example.com/a"),
        ("*://Example.COM/a", "https://example.com/a"),
        ("note://ADA", "note://ADA"),
        ("x://a%2db", "x://a-b"),
        ("notes://plan,(v2)*", "notes://plan%2C%28v2%29.txt"),
        ("notes://plan%2C%28v2%29", "notes://plan,(v2)"),
        ("notes://R&D=1", "notes://R%26D%3D1"),
        ("*/Übersicht/a", "file:///docs/%C3%9Cbersicht/a"),
        ("search://x?q=a,b&n=1", "search://x?q=a%2Cb&n=1"),
        ("file:///docs/{+path}", "file:///docs/{+path}"),
    ],
)
def test_a_rule_means_a_uri_however_it_is_written(pattern: str, uri: str) -> None:
    policy = Policy([rule("deny", uri=pattern)])
    assert policy.decide(ALICE, Subject("resource", uri), {}, NOW).verdict == "deny"
    assert policy.decide(ALICE, Subject("resource", f"other{uri[:-1]}"), {}, NOW).verdict == "allow"


def test_characters_that_part_a_query_are_not_the_same_as_their_escapes() -> None:
    policy = Policy([rule("allow", uri="x://f?a=1&b=2")], default="deny")
    for uri, verdict in (("x://f?a=1&b=2", "allow"), ("x://f?a=1%26b%3D2", "deny"), ("x://f%3Fa=1&b=2", "deny")):
        assert policy.decide(ALICE, Subject("resource", uri), {}, NOW).verdict == verdict


@pytest.mark.parametrize(
    ("pattern", "is_met"),
    [
        ("file:///docs/a/*", True),
        ("file:///docs/a", True),
        ("file:///d*", True),
        ("*.md", True),
        ("FILE:///docs/{+path}", True),
        ("file:///doc/*", False),
        ("file:///docs", False),
        ("config://APP", True),
        ("config://ap", False),
        ("https://example.com/*", False),
    ],
)
def test_a_uri_that_no_resource_and_no_template_has_is_pointed_out(pattern: str, is_met: bool) -> None:
    subjects = [LintedSubject(each, frozenset(), {}, "resource") for each in ("file:///docs/{+path}", "config://app")]
    warnings = [*lint_rules(Policy([rule("deny", "r", uri=pattern)]), subjects)]
    assert [each.partition("'")[0] for each in warnings] == ([] if is_met else ["r: uri: "])


def test_limits_and_cleaning_for_no_tool_are_pointed_out() -> None:
    rates = Rates(tools={"refun": ToolRate(concurrent=1), "cancel_*": ToolRate()})
    sanitize = Sanitize(tools={"free": ToolSanitize(), "mail_*": ToolSanitize()})
    assert [*lint_settings(rates, sanitize, KNOWN), *lint_settings(None, None, KNOWN)] == [
        "limits.tools: 'refun' matches no tool; did you mean 'refund'?",
        "sanitize.tools: 'mail_*' matches no tool",
    ]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: rule("alow"), "rule 1: verdict: unknown: 'alow'; did you mean 'allow'?"),
        (lambda: rule("deny", tools=[1]), "rule 1: tools[0]: Expected `str`, got `int`"),
        (lambda: rule("deny", tools=["a?"]), "rule 1: tools: 'a?' is not a name, or one with `*`"),
        (lambda: rule("deny", "n", tools=[""]), "rule 1 (n): tools: '' is not a name"),
        (lambda: rule("deny", uri="x://a b"), "rule 1: uri: 'x://a b': a space, a control or invisible character"),
        (lambda: rule("deny", uri="docs/*"), "rule 1: uri: 'docs/*': not an absolute URI such as"),
        (
            lambda: rule("deny", uri=["x://*", "x://%zz*"]),
            "rule 1: uri: 'x://%zz*': a % without two hexadecimal digits",
        ),
        (lambda: rule("deny", uri="x://{a"), "rule 1: uri: 'x://{a'"),
        (lambda: rule("deny", uri=""), "rule 1: uri: ''"),
        (lambda: rule("deny", servers=["[ab]"]), "rule 1: servers: '[ab]' is not a name"),
        (lambda: rule("deny", principals=[5]), "rule 1: principals[0]: Expected `str`, got `int`"),
        (lambda: rule("deny", groups=["stuff"]), "rule 1: groups: unknown: 'stuff'; did you mean 'staff'?"),
        (lambda: rule("deny", groups=["xyzxyz"]), "rule 1: groups: unknown: 'xyzxyz'; known are staff, robots, nobody"),
        (lambda: rule("deny", annotations={"destructivHint": True}), "did you mean 'destructiveHint'?"),
        (lambda: rule("deny", annotations={"readOnlyHint": "yes"}), "rule 1: annotations[...]: Expected `bool`"),
        (lambda: rule("deny", revisions=["2025-06-17"]), "rule 1: revisions: unknown: '2025-06-17'; did you mean"),
        (lambda: rule("deny", hours="9-17"), "rule 1: hours: '9-17' is not a time of day such as 09:00-17:30"),
        (lambda: rule("deny", hours="09:00-09:00"), "rule 1: hours: '09:00-09:00'"),
        (lambda: rule("deny", hours="09:00-24:30"), "rule 1: hours: '09:00-24:30'"),
        (lambda: rule("deny", hours="24:00-06:00"), "rule 1: hours: '24:00-06:00'"),
        (lambda: rule("deny", hours="09:60-17:00"), "rule 1: hours: '09:60-17:00'"),
        (lambda: rule("deny", hours="0٩:00-17:00"), "rule 1: hours:"),
        (lambda: rule("deny", days=["Mon"]), "rule 1: days: unknown: 'Mon'; did you mean 'mon'?"),
        (lambda: rule("deny", hours="09:00-17:00", timezone="Europe/Berln"), "did you mean 'Europe/Berlin'?"),
        (lambda: rule("deny", hours="09:00-17:00", timezone="../x"), "rule 1: timezone: unknown: '../x'"),
        (lambda: rule("deny", hours="09:00-17:00", timezone="Europe"), "rule 1: timezone: unknown: 'Europe'"),
        (lambda: rule("deny", timezone="UTC"), "rule 1: timezone: says nothing without hours or days"),
        (lambda: rule("hide", "h", arguments={"x": {"is": 1}}), "rule 1 (h): arguments: a tool is hidden before"),
        (
            lambda: rule("deny", arguments={"x": {"ovr": 1}}),
            "rule 1: arguments.x: unknown: 'ovr'; did you mean 'over'?",
        ),
        (
            lambda: rule("deny", arguments={"x": {}}),
            "rule 1: arguments.x: nothing is asked of it; known are present, is,",
        ),
        (lambda: rule("deny", arguments={"x": 5}), "rule 1: arguments[...]: Expected `object`, got `int`"),
        (lambda: rule("deny", arguments={"x": {"over": "5"}}), "rule 1: arguments.x.over: Expected `int | float"),
        (lambda: rule("deny", arguments={"x": {"over": True}}), "rule 1: arguments.x.over: Expected `int | float"),
        (lambda: rule("deny", arguments={"x": {"over": float("nan")}}), "rule 1: arguments.x.over: nan is not"),
        (lambda: rule("deny", arguments={"x": {"is": float("inf")}}), "rule 1: arguments.x.is: the value: inf is not"),
        (lambda: rule("deny", arguments={"x": {"in": []}}), "rule 1: arguments.x.in: Expected `array` of length >= 1"),
        (lambda: rule("deny", arguments={"x": {"in": "ab"}}), "rule 1: arguments.x.in: Expected `array"),
        (
            lambda: rule("deny", arguments={"x": {"longer_than": -1}}),
            "rule 1: arguments.x.longer_than: Expected `int` >= 0",
        ),
        (lambda: rule("deny", arguments={"x": {"matches": "("}}), "rule 1: arguments.x.matches: "),
        (lambda: rule("deny", arguments={"x": {"matches": "(?=a)"}}), "no look-around"),
        (lambda: rule("deny", arguments={"x": {"present": False, "is": 1}}), "present = false leaves nothing else"),
        (lambda: rule("deny", arguments={"": {"is": 1}}), "rule 1: arguments.: not a path such as order.id"),
        (lambda: rule("deny", arguments={"a..b": {"is": 1}}), "rule 1: arguments.a..b: not a path"),
        (lambda: rule("deny", arguments={"a*": {"is": 1}}), "rule 1: arguments.a*: not a path"),
        (lambda: rule("deny", arguments={"a\\n": {"is": 1}}), "not a path"),
        (lambda: rule("deny", "default"), "rule 1: name: 'default' is taken"),
        (lambda: rule("deny", "built in: x"), "rule 1: name: 'built in: x' is taken"),
    ],
)
def test_what_is_wrong_with_a_rule_is_said(make: Callable[[], Rule], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Policy([make()], groups=GROUPS)


def test_what_is_wrong_around_the_rules_is_said() -> None:
    with pytest.raises(ValueError, match="default: unknown: 'hide'"):
        Policy(default="hide")  # type: ignore[arg-type]  # as it could come from a file
    with pytest.raises(ValueError, match="destructive: unknown: 'dney'; did you mean 'deny'"):
        Policy(destructive="dney")  # type: ignore[arg-type]  # as it could come from a file
    with pytest.raises(TypeError, match="Rule: tools: expected a list or set of texts, got one text"):
        rule("deny", tools="refund")
    with pytest.raises(TypeError, match="group 'staff': expected a list or set of texts, got one text"):
        Policy(groups={"staff": "alice"})
    with pytest.raises(ValueError, match="group 'staff': '' is not a name"):
        Policy(groups={"staff": [""]})
    with pytest.raises(ValueError, match="rule 2: name: 'a' is taken"):
        Policy([rule("deny", "a"), rule("allow", "a")])


def test_rules_are_read_from_a_file() -> None:
    text = """
    [[rules]]
    verdict = "ask"
    tools = ["refund"]
    arguments.amount = { over = 100 }
    arguments."order.day" = { in = [2026-01-07] }
    hours = "09:00-17:30"
    days = ["mon", "tue"]
    """
    [read] = convert(tomllib.loads(text)["rules"], list[Rule])
    policy = Policy([read], clock=lambda: at("2026-01-06 12:00"))
    assert read.arguments["amount"] == {"over": 100}
    for day, verdict in (("2026-01-07", "ask"), ("2026-01-08", "allow")):
        assert policy.decide(ALICE, REFUND, {"amount": 500, "order": {"day": day}}, NOW).verdict == verdict
    assert convert({"is": 1, "in": [1]}, Predicate) == Predicate(is_=1, in_=[1])


def test_a_rule_on_trial_decides_nothing_and_is_named() -> None:
    rules = [
        Rule(verdict="deny", name="no refunds", tools=["refund"], mode="audit"),
        Rule(verdict="hide", name="away", tools=["refund"], mode="audit"),
        Rule(verdict="ask", name="large", arguments={"amount": {"over": 100}}, mode="audit"),
    ]
    policy = Policy(rules, groups=GROUPS, clock=lambda: 0.0)
    assert policy.decide(ALICE, REFUND, {"amount": 5}, NOW).verdict == "allow"
    assert policy.hides(ALICE, REFUND, NOW) is None
    assert not policy.hides_anything
    assert policy.would_decide(ALICE, REFUND, {"amount": 5}, NOW) == ["no refunds: deny", "away: hide"]
    assert policy.would_decide(ALICE, LIST, {"amount": 500}, NOW) == ["large: ask"]
    assert policy.would_decide(ALICE, LIST, {"amount": 1}, NOW) == []


def test_a_rule_on_trial_changes_no_approval_and_a_real_one_still_decides() -> None:
    trial = Rule(verdict="deny", name="trial", tools=["refund"], mode="audit")
    real = Rule(verdict="ask", name="real", tools=["refund"])
    assert Policy([real]).version == Policy([real, trial]).version
    assert decide([trial, real]) == ("ask", "real")
