"""The guards beside tools: rules, limits, scopes, approvals, sanitizing and the audit log for reads and prompts."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handrail import EmbeddedResource, Principal, Server, Text
from handrail.audit.reader import TrailFile
from handrail.guards import Approvals, Policy, Rates, Rule
from handrail.guards.identity import ApiKeys
from handrail.model import ResourceLink
from handrail.testing import Peer
from patience import PATIENCE
from requirements import requirement
from servers_calling import said
from servers_guards import ACTS
from servers_http import Client, closed as closed, served
from servers_resources import (
    ABSENT,
    CONCEALED,
    KINDS,
    LONG,
    SECRET,
    Kind,
    answering,
    converse,
    entries,
    fenced,
    text_of,
)
from tests.guards.test_guards import FROM, WHO, Ledger, no, unharmed, yes
from wires import ALL, LEGACY, Open, Wire
from wires_http import HttpWire
from wires_shared import everywhere, open_wire as open_wire, processes as processes

Json = Any
Object = dict[str, Any]
Ran = Callable[[str, str], None]

R5 = "2026-07-28"
WITH_FORMS = ("2025-06-18", "2025-11-25", R5, "pocket")
FORMS: Object = {"elicitation": {}}
FENCED = "servers_resources:fenced"
NOT_FOUND = dict.fromkeys(ALL, -32002) | {R5: -32602}
by_kind = pytest.mark.parametrize("kind", KINDS, ids=[each.kind for each in KINDS])
BOSS = Principal("boss", frozenset({"admin"}))


async def ask_for(wire: Wire, kind: Kind, name: str) -> Object:
    return await wire.request(kind.method, kind.params(name))


def code(answer: Object) -> int:
    """The code of the error; 0 if it is none."""
    return int(answer.get("error", {"code": 0})["code"])


# Every guard, by each kind


UNKNOWN = {"resource": "unknown_resource", "template": "unknown_resource", "prompt": "unknown_prompt"}
REFUSED: list[tuple[str, int, str, str]] = [  # what is asked for, the code, the outcome on record, and the rule
    (ABSENT, 0, "", ""),
    *((name, 0, "", "") for name in CONCEALED),
    ("closed", 403, "forbidden", "closed"),
    ("scoped", 403, "forbidden", ""),
    ("narrow", 429, "throttled", ""),
]


@requirement("SRV-741", "SRV-601", "SRV-602", "SRV-603", "SRV-614")
@everywhere()
async def test_every_refusal_is_an_error_leaves_one_record_and_no_effect(open_wire: Open) -> None:
    wire: Wire = await open_wire(FENCED, fresh=True)
    ledger = Ledger(wire)
    for kind in KINDS:
        assert text_of(await ask_for(wire, kind, "narrow")) == "narrow"  # all there is for a day
        async with unharmed(ledger) as records:
            for name, expected, _, _ in REFUSED:
                unknown = -32602 if kind.kind == "prompt" else NOT_FOUND[wire.revision]
                assert code(await ask_for(wire, kind, name)) == (expected or unknown), (kind, name)
        assert len(records) == len(REFUSED)
        for (name, _, outcome, rule), record in zip(REFUSED, records, strict=True):
            assert (record["event"], record["outcome"]) == ("refusal", outcome or UNKNOWN[kind.kind]), (kind, name)
            assert (record["principal"], record["from"]) == (WHO[wire.transport], FROM[wire.transport])
            assert (record["revision"], record["tool"]) == (wire.revision, kind.label(name))
            assert rule in record.get("rule", "")


ARGUED: list[tuple[str, Object, str, int]] = [  # the request, and what it says, or the code of the error
    ("resources/read", {"uri": "page://a/100"}, "a 100", 0),
    ("resources/read", {"uri": "page://a/101"}, "", 403),
    ("resources/read", {"uri": "page://a/%31%30%31"}, "", 403),
    ("resources/read", {"uri": "PAGE://a/101"}, "", 403),
    ("resources/read", {"uri": "page://private/1"}, "", -1),
    ("resources/read", {"uri": "page://privat%65/1"}, "", -1),
    ("resources/read", {"uri": "PAGE://private/1"}, "", -1),
    ("resources/read", {"uri": "page://Private/1"}, "", -1),  # a host has no case
    ("resources/read", {"uri": "page://Public/1"}, "Public 1", 0),
    ("prompts/get", {"name": "pay", "arguments": {"amount": "100"}}, "pay 100", 0),
    ("prompts/get", {"name": "pay", "arguments": {"amount": "101"}}, "", 403),
]


@requirement("SRV-741", "SRV-602")
@everywhere()
async def test_rules_look_at_the_uri_in_one_spelling_and_at_arguments_by_their_types(open_wire: Open) -> None:
    wire: Wire = await open_wire(FENCED)
    for method, params, text, expected in ARGUED:
        answer = await wire.request(method, params)
        if text:
            assert text_of(answer) == text
        else:
            assert code(answer) == (NOT_FOUND[wire.revision] if expected < 0 else expected), params


@requirement("SRV-741", "SRV-614", "P-15")
@everywhere()
async def test_what_runs_is_an_intent_and_an_outcome(open_wire: Open) -> None:
    wire: Wire = await open_wire(FENCED)
    ledger = Ledger(wire)
    await ledger.new()
    outcomes = {"open": "ok", "fails": "tool_error", "breaks": "tool_error", "quick": "timeout"}
    before = await ledger.ran()
    for kind in KINDS:
        for name in outcomes:
            assert ("error" in await ask_for(wire, kind, name)) is (name != "open")
    records, after = await ledger.new(), await ledger.ran()
    asked = [(kind, name) for kind in KINDS for name in outcomes]
    by_call: dict[str, list[Object]] = {}
    for each in records:
        by_call.setdefault(each["call"], []).append(each)
    assert len(by_call) == len(asked)
    for (kind, name), (begun, over) in zip(asked, by_call.values(), strict=True):
        assert (begun["event"], over["event"], over["outcome"]) == ("intent", "outcome", outcomes[name]), (kind, name)
        assert (begun["tool"], begun["revision"]) == (kind.label(name), wire.revision)
        assert begun["fingerprint"] and begun["arguments_digest"]
    assert {name: after[name] - before.get(name, 0) for name in outcomes} == dict.fromkeys(outcomes, len(KINDS))


@requirement("SRV-741", "SRV-614")
@everywhere(*WITH_FORMS)
@by_kind
async def test_what_a_person_at_the_client_says_holds(open_wire: Open, kind: Kind) -> None:
    wire: Wire = await open_wire(FENCED, capabilities=FORMS)
    ledger = Ledger(wire)
    async with unharmed(ledger) as records:
        answer, asked = await converse(wire, kind.method, kind.params("asked"), no)
        assert (code(answer), len(asked)) == (403, 1)
        assert kind.label("asked").removeprefix("prompt:") in asked[0]["params"]["message"]
    asking = [("asked", "input_required")] if wire.stateless else []
    assert [(each["event"], each["outcome"]) for each in records] == [*asking, ("refusal", "denied")]
    before = await ledger.ran("asked")
    answer, asked = await converse(wire, kind.method, kind.params("asked"), yes)
    assert (text_of(answer), len(asked)) == ("asked", 1)
    *first, intent, outcome = await ledger.new()
    assert [each["event"] for each in first] == [each for each, _ in asking]
    assert (intent["event"], outcome["event"], outcome["outcome"]) == ("intent", "outcome", "ok")
    assert intent["agreed"].startswith("approval ")
    assert await ledger.ran("asked") == before + 1


@requirement("SRV-741", "SRV-614", "P-19")
@everywhere()
async def test_what_nobody_decides_on_is_refused_for_now_and_does_nothing(open_wire: Open) -> None:
    wire: Wire = await open_wire(FENCED)
    for kind in KINDS:
        async with unharmed(Ledger(wire)) as records:
            answer, asked = await converse(wire, kind.method, kind.params("asked"), no)
            assert (code(answer), asked) == (403, []), kind
            assert "waits for a person's approval" in answer["error"]["message"]
        assert (records[-1]["event"], records[-1]["outcome"]) == ("refusal", "pending")
        assert records[-1]["tool"] == kind.label("asked")


async def request(peer: Peer, method: str, params: Object) -> Object:
    """Send a request, and again as long as it waits in rounds; as clients do that cannot be asked."""
    more: Object = {}
    while True:
        answer = await peer.request(method, {**params, **more})
        if answer.get("result", {}).get("resultType") != "input_required":
            return answer
        more = {"requestState": answer["result"]["requestState"]}


@requirement("SRV-741", "P-19")
@pytest.mark.parametrize("revision", ALL)
@by_kind
async def test_an_approval_of_an_operator_is_good_for_one_of_its_kind_once(revision: str, kind: Kind, ran: Ran) -> None:
    server = fenced(approvals=Approvals(wait=0.02, round=0.005, by="operator"))
    async with Peer(server, revision=revision) as peer:
        ran(revision, "memory")

        async def asks_for(each: Kind) -> Object:
            return await request(peer, each.method, each.params("asked"))

        assert code(await asks_for(kind)) == 403
        (waiting,) = await server.approvals.open()
        assert waiting.asked.tool == kind.label("asked")
        await server.approvals.decide(waiting.id, True, by="operator")
        for other in KINDS:
            if other != kind:
                assert code(await asks_for(other)) == 403, "an approval of another"
        assert text_of(await asks_for(kind)) == "asked"
        assert code(await asks_for(kind)) == 403, "it is used up"


@requirement("SRV-741", "P-19", "P-32")
@pytest.mark.parametrize("first", [0, 1, 2])
async def test_an_approval_is_not_that_of_another_kind_of_the_same_name(first: int, ran: Ran) -> None:
    server = Server("same", policy=Policy(default="ask"), approvals=Approvals(wait=0.02, round=0.005, by="operator"))
    done: list[str] = []

    async def acts() -> str:
        """Acts."""
        done.append("x:a")
        return "done"

    server.add(acts, name="x:a")
    server.resource("x:a")(acts)
    server.prompt("x:a")(acts)
    server.add(acts, name="prompt:x:a")
    asked: list[tuple[str, Object]] = [
        ("tools/call", {"name": "x:a"}),
        ("resources/read", {"uri": "x:a"}),
        ("prompts/get", {"name": "x:a"}),
        ("tools/call", {"name": "prompt:x:a"}),
    ]
    async with Peer(server, revision="2025-11-25") as peer:
        ran("2025-11-25", "memory")
        await request(peer, *asked[first])
        (waiting,) = await server.approvals.open()
        await server.approvals.decide(waiting.id, True, by="operator", remember=0)
        for at, (method, params) in enumerate(asked):
            if at != first:
                await request(peer, method, params)
                assert done == [], (asked[first], method, params)
        assert "result" in await request(peer, *asked[first])
    assert done == ["x:a"]


# Rules about kinds


def offers(rules: list[Rule], **more: Any) -> Server:
    """One tool, resource, template and prompt under these rules; all of them are named `x:…`."""
    server = Server("offers", policy=Policy(rules, **more))

    async def a(a: str = "") -> str:
        """Says its name."""
        return "a"

    server.add(a, name="x:tool", tags=["t"])
    server.resource("x:static", tags=["t"])(answering("a"))
    server.resource("x:t/{a}", tags=["t"])(a)
    server.prompt("x:prompt", tags=["t"])(a)
    return server


ASKED: dict[str, tuple[str, Object]] = {
    "tool": ("tools/call", {"name": "x:tool"}),
    "static": ("resources/read", {"uri": "x:static"}),
    "template": ("resources/read", {"uri": "x:t/1"}),
    "prompt": ("prompts/get", {"name": "x:prompt"}),
}
LISTED = {
    "tool": "tools/list",
    "static": "resources/list",
    "template": "resources/templates/list",
    "prompt": "prompts/list",
}
RULES: list[tuple[list[Object], Object, str]] = [  # conditions of rules that deny, the policy, and what is left
    ([{}], {}, ""),
    ([{"kind": "tool"}], {}, "static template prompt"),
    ([{"kind": "resource"}], {}, "tool prompt"),
    ([{"kind": "prompt"}], {}, "tool static template"),
    ([{"kind": "resource"}, {"kind": "prompt"}], {}, "tool"),
    ([{"uri": "x:*"}], {}, "tool prompt"),
    ([{"uri": ["x:t/*"]}], {}, "tool static prompt"),
    ([{"uri": "x:t/1"}], {}, "tool static prompt"),
    ([{"uri": "x:t/2"}], {}, "tool static template prompt"),
    ([{"uri": "*"}], {}, "tool prompt"),
    ([{"prompts": ["*"]}], {}, "tool static template"),
    ([{"prompts": ["x:*"]}], {}, "tool static template"),
    ([{"tools": ["x:*"]}], {}, "static template prompt"),
    ([{"tools": ["*"]}], {}, "static template prompt"),
    ([{"tags": ["t"]}], {}, ""),
    ([{"kind": "resource", "tags": ["t"]}], {}, "tool prompt"),
    ([{"kind": "prompt", "principals": ["nobody"]}], {}, "tool static template prompt"),
    ([{"kind": "prompt", "principals": ["alice"]}], {}, "tool static template"),
    ([], {"default": "deny"}, ""),
]


@requirement("SRV-741", "SRV-602", everywhere=True)
@pytest.mark.parametrize("verdict", ["deny", "hide"])
@pytest.mark.parametrize(("conditions", "policy", "left"), RULES)
async def test_a_rule_is_about_its_kind_only(verdict: Any, conditions: list[Object], policy: Object, left: str) -> None:
    server = offers([Rule(verdict=verdict, **each) for each in conditions], **policy)
    async with Peer(server, revision=R5, principal=Principal("alice")) as peer:
        for name, (method, params) in ASKED.items():
            answer = await peer.request(method, params)
            is_there = "result" in answer and not answer["result"].get("isError")
            assert is_there is (name in left.split()), name
            entry_count = len(next(each for each in _lists(await peer.request(LISTED[name]))))
            by_one_uri = name == "template" and conditions == [{"uri": "x:t/1"}]  # the others are still there
            is_listed = is_there or (verdict == "deny" and not policy) or by_one_uri
            assert entry_count == int(is_listed), name


def _lists(answer: Object) -> list[list[Object]]:
    return [value for value in answer["result"].values() if isinstance(value, list)]


@requirement("SRV-741", "SRV-602", everywhere=True)
@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ([Rule(verdict="allow", kind="resource")], "static template"),
        ([Rule(verdict="allow", uri="x:static")], "static"),
        ([Rule(verdict="allow", uri="x:t/*")], "template"),
        ([Rule(verdict="allow", prompts=["x:prompt"])], "prompt"),
        ([Rule(verdict="allow", tools=["x:tool"])], "tool"),
        ([Rule(verdict="allow", tags=["t"])], "tool static template prompt"),
    ],
)
async def test_where_all_is_denied_only_what_is_allowed_is_there(rules: list[Rule], left: str) -> None:
    async with Peer(offers(rules, default="deny"), revision=R5) as peer:
        for name, (method, params) in ASKED.items():
            answer = await peer.request(method, params)
            assert ("result" in answer and not answer["result"].get("isError")) is (name in left.split()), name
            (listed,) = _lists(await peer.request(LISTED[name]))
            assert len(listed) == int(name in left.split()), name


@requirement("SRV-741", everywhere=True)
@pytest.mark.parametrize(
    "conditions",
    [
        {"kind": "tool", "uri": "x:*"},
        {"kind": "resource", "prompts": ["x"]},
        {"kind": "prompt", "tools": ["x"]},
        {"kind": "prompt", "annotations": {"readOnlyHint": True}},
        {"uri": "x:*", "prompts": ["x"]},
        {"tools": ["x"], "uri": "x:*"},
        {"kind": "resources"},
        {"kind": "RESOURCE"},
        {"kind": 5},
        {"uri": [""]},
        {"uri": 5},
        {"prompts": "x"},
        {"prompts": ["x?"]},
    ],
    ids=str,
)
def test_a_rule_that_no_request_can_meet_is_refused(conditions: Object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"rule 1|Rule"):
        Policy([Rule(verdict="allow", **conditions)])


# Limits


@requirement("SRV-741", "SRV-603")
@everywhere(*ALL[1:])  # the first revision knows no cancelling
async def test_one_at_a_time_is_one_at_a_time(open_wire: Open) -> None:
    wire: Wire = await open_wire(FENCED)
    for kind in KINDS:
        await check_one_at_a_time(wire, kind)


async def check_one_at_a_time(wire: Wire, kind: Kind) -> None:
    ledger = Ledger(wire)
    marked = f"{kind.kind} waits"
    before, idents = await ledger.ran(marked), list[int]()
    async with asyncio.timeout(PATIENCE):
        for ran in (before + 1, before + 2):
            while await ledger.ran(marked) < ran:  # the slot is free once what ran before has stopped
                if len(idents) < 200:  # of 256 that may be in flight
                    idents.append(await wire.ask(kind.method, kind.params("held")))
            assert code(await ask_for(wire, kind, "held")) == 429
            assert await ledger.ran(marked) == ran
            assert text_of(await ask_for(wire, kind, "open")) == "open"
            while idents:
                await wire.notify("notifications/cancelled", {"requestId": idents.pop()})


@requirement("SRV-741", "SRV-603", "P-30")
@pytest.mark.parametrize("revision", ALL)
async def test_reads_and_prompts_count_as_calls_of_their_caller(revision: str, ran: Ran) -> None:
    server = fenced(rates=Rates(principal="4/hour"), audit=None)
    async with (
        Peer(server, revision=revision, principal=Principal("alice")) as alice,
        Peer(server, revision=revision, principal=Principal("bob")) as bob,
    ):
        ran(revision, "memory")
        for kind in KINDS:
            assert "result" in await alice.request(kind.method, kind.params("open"))
        assert "result" in await alice.request("tools/call", {"name": "echo", "arguments": {"text": "x"}})
        for kind in KINDS:
            error = (await alice.request(kind.method, kind.params("open")))["error"]
            assert error["code"] == 429
            assert "retry after" in error["message"]
            assert "result" in await bob.request(kind.method, kind.params("open"))


UNPAID: list[tuple[str, Object]] = [
    ("resources/list", {}),
    ("resources/templates/list", {}),
    ("prompts/list", {}),
    ("completion/complete", {"ref": {"type": "ref/prompt", "name": "open"}, "argument": {"name": "who", "value": ""}}),
    ("resources/read", {"uri": "no:such"}),
    ("resources/read", {"uri": "hidden://x"}),
    ("prompts/get", {"name": "absent"}),
    ("prompts/get", {"name": "hidden"}),
    ("resources/read", {"uri": "scoped://x"}),
    ("prompts/get", {"name": "scoped"}),
]


@requirement("SRV-741", "SRV-603", "P-30")
@pytest.mark.parametrize("revision", ALL)
async def test_everything_else_is_limited_as_a_request(revision: str, ran: Ran) -> None:
    asked = [*UNPAID, *([] if revision == R5 else [("resources/subscribe", {"uri": "open://x"})])]
    server = fenced(rates=Rates(lists="30/hour"), audit=None)
    for at, (method, params) in enumerate(asked):
        async with Peer(server, revision=revision, principal=Principal(f"caller {at}")) as peer:
            ran(revision, "memory")
            codes = [code(await peer.request(method, params)) for _ in range(35)]
            assert 429 not in codes[:25] and codes[-1] == 429, (method, params, codes)


# Scopes, over HTTP

ALICE, ALICE_STORED = ApiKeys.new()
BOB, BOB_STORED = ApiKeys.new()


class Caller(Client):
    """A client with a token."""

    def __init__(self, url: str, revision: str, token: str) -> None:
        super().__init__(url, revision)
        self.token = token

    def headers(self, message: object = None, **changes: str | None) -> dict[str, str]:
        return super().headers(message, **{"Authorization": f"Bearer {self.token}", **changes})


@requirement("SRV-741", "SRV-606", "SRV-608")
@pytest.mark.parametrize("revision", ["2025-03-26", "2025-06-18", "2025-11-25", "pocket", R5])
async def test_over_http_a_refusal_has_its_status_and_says_what_is_needed(revision: str, ran: Ran) -> None:
    auth = ApiKeys({"alice": ALICE_STORED, "bob": BOB_STORED}, scopes={"alice": {"admin"}})
    async with served(fenced(audit=None).asgi(auth=auth)) as url:
        ran(revision, "http")
        alice, bob = Caller(url, revision, ALICE), Caller(url, revision, BOB)
        await alice.open()
        await bob.open()
        for at, kind in enumerate(KINDS):
            reply = await bob.post(bob.message(at, kind.method, kind.params("scoped")))
            assert reply.status == 403
            challenge = reply.headers["www-authenticate"]
            assert 'error="insufficient_scope"' in challenge and 'scope="admin"' in challenge
            assert code(bob.checked(await reply.body())) == 403
            _, answer = await alice.ask(alice.message(at, kind.method, kind.params("scoped")))
            assert text_of(answer) == "scoped"
            _, answer = await alice.ask(alice.message(f"v{at}", kind.method, kind.params("veiled")))
            assert text_of(answer) == "veiled"
            _, answer = await bob.ask(bob.message(f"n{at}", kind.method, kind.params("narrow")))
            assert text_of(answer) == "narrow"
            reply = await bob.post(bob.message(f"m{at}", kind.method, kind.params("narrow")))
            assert code(await bob.read(reply)) == 429
            assert reply.status == 429 and int(reply.headers["retry-after"]) > 0
            reply = await bob.post(bob.message(f"c{at}", kind.method, kind.params("closed")))
            assert (code(await bob.read(reply)), reply.status) == (403, 403)
            assert "www-authenticate" not in reply.headers, "another token would not help"


@requirement("SRV-741", "SRV-602")
@pytest.mark.parametrize("revision", ALL)
async def test_who_has_the_scope_sees_what_is_hidden_without_it(revision: str, ran: Ran) -> None:
    server = fenced(audit=None)
    async with (
        Peer(server, revision=revision, principal=BOSS) as boss,
        Peer(server, revision=revision, principal=Principal("alice")) as alice,
    ):
        ran(revision, "memory")
        for kind in KINDS:
            assert text_of(await boss.request(kind.method, kind.params("veiled"))) == "veiled"
            assert text_of(await boss.request(kind.method, kind.params("scoped"))) == "scoped"
            assert code(await alice.request(kind.method, kind.params("scoped"))) == 403
        for method in ("resources/list", "resources/templates/list", "prompts/list"):
            (seen,), (less,) = [_lists(await each.request(method)) for each in (boss, alice)]
            assert {each["name"] for each in seen} - {each["name"] for each in less} == {"veiled"}
            assert "scoped" in {each["name"] for each in less}


# Sanitizing


def is_clean(said: object) -> bool:
    text = json.dumps(said, ensure_ascii=False)
    return SECRET not in text and not set(text) & (set(ACTS) - set("[31m2J")) and "\\u001b" not in text


@requirement("SRV-741", "SRV-604", "P-33", "P-34")
@everywhere()
async def test_nothing_leaves_that_acts_or_that_nobody_is_to_know(open_wire: Open) -> None:
    wire: Wire = await open_wire(FENCED)
    for kind in KINDS:
        answer = await ask_for(wire, kind, "dirty")
        assert text_of(answer).startswith("text ") and is_clean(answer), kind
        assert "****" in text_of(answer)
        answer = await ask_for(wire, kind, "fails")
        assert answer["error"]["message"].startswith(f"no {kind.kind}") and is_clean(answer), kind
        assert is_clean(await ask_for(wire, kind, "breaks"))
    for method in ("resources/list", "resources/templates/list", "prompts/list"):
        listed = await entries(wire, method)
        assert is_clean(listed)
        assert next(each for each in listed if each["name"] == "dirty")["description"].startswith("about ")


@requirement("SRV-741", "SRV-708", "SRV-604")
@everywhere()
async def test_a_text_over_the_limit_is_one_error_and_never_a_part(open_wire: Open) -> None:
    wire: Wire = await open_wire(FENCED)
    for kind in KINDS:
        answer = await ask_for(wire, kind, "large")
        assert code(answer) == -32603, kind
        assert LONG[:20] not in json.dumps(answer)
        assert "read_more" not in json.dumps(answer), "there is no rest to read"


@requirement("SRV-741", "SRV-604", "P-34")
@pytest.mark.parametrize("revision", ALL)
async def test_every_part_of_what_is_answered_is_cleaned(revision: str, ran: Ran) -> None:
    dirty = f"a{ACTS}b {SECRET}"
    server = Server("dirty", secrets=[SECRET])

    @server.resource("x:parts")
    async def parts() -> list[Any]:
        return [
            EmbeddedResource({"uri": "x:parts", "mimeType": "text/plain", "text": dirty, "_meta": {"k": dirty}}),
            b"\x00",
        ]

    @server.resource("x:json")
    async def as_json() -> Object:
        return {dirty: [dirty]}

    @server.prompt(description=dirty)
    async def talks() -> list[Any]:
        return [dirty, Text(dirty, meta={"k": dirty}), ResourceLink("x:parts", "name", description=dirty)]

    async with Peer(server, revision=revision) as peer:
        ran(revision, "memory")
        for method, params in (
            ("resources/read", {"uri": "x:parts"}),
            ("resources/read", {"uri": "x:json"}),
            ("prompts/get", {"name": "talks"}),
        ):
            answer = await peer.request(method, params)
            assert "result" in answer and is_clean(answer), (method, params)
            assert SECRET.encode() not in peer.wire[-1]


@requirement("SRV-741", "P-34")
@by_kind
async def test_secrets_are_masked_in_what_people_and_the_audit_log_see(tmp_path: Path, kind: Kind, ran: Ran) -> None:
    path = tmp_path / "audit.jsonl"
    asked: list[str] = []
    server = Server("s", policy=Policy(default="ask"), audit=path, audit_arguments=True, secrets=[SECRET])

    async def takes(a: str = "") -> str:
        return "done"

    server.resource("x:y")(answering("done"))
    server.resource("x:{a}/z")(takes)
    server.prompt("takes")(takes)

    def answers(method: str, params: Object) -> Object:
        asked.append(params["message"])
        return {"action": "accept", "content": {}}

    params: dict[str, Object] = {
        "resource": {"uri": "x:y"},
        "template": {"uri": f"x:{SECRET}/z"},
        "prompt": {"name": "takes", "arguments": {"a": SECRET}},
    }
    async with Peer(server, revision="2025-11-25", capabilities=FORMS, answers=answers) as peer:
        ran("2025-11-25", "memory")
        assert text_of(await peer.request(kind.method, params[kind.kind])) == "done"
    records = [json.loads(line) for _, line in TrailFile(path).lines()]
    assert [each["event"] for each in records if "call" in each] == ["intent", "outcome"]
    assert SECRET not in path.read_text()
    assert len(asked) == 1


# Hidden equals unknown


async def raw(wire: Wire, method: str, params: Object) -> tuple[int, bytes]:
    """The bytes of the answer without its id; over HTTP with the status."""
    await wire.ask(method, params)
    async with asyncio.timeout(PATIENCE):
        data = await wire.read()
    return getattr(wire, "status", 0), re.sub(rb'"id":\d+', b'"id":0', data)


def _requests(name: str, *, is_stateless: bool) -> list[tuple[str, Object]]:
    """Every request in which a name can be said."""
    uris = [f"{name}://x", f"{name}-note://ada", f"{name.upper()}://x", f"{name}-note://%61da"]
    requests: list[tuple[str, Object]] = [("resources/read", {"uri": uri}) for uri in uris]
    requests += [("prompts/get", {"name": name, "arguments": each}) for each in ({}, {"who": "x"}, {"bad": "x"})]
    references: list[tuple[Object, str]] = [
        ({"type": "ref/prompt", "name": name}, "who"),
        ({"type": "ref/prompt", "name": name}, "nope"),
        ({"type": "ref/resource", "uri": f"{name}-note://{{name}}"}, "name"),
        ({"type": "ref/resource", "uri": f"{name}-note://{{name}}"}, "nope"),
        ({"type": "ref/resource", "uri": f"{name}://x"}, "name"),
    ]
    for ref, argument in references:
        for value in ("", "a"):
            params: Object = {"ref": ref, "argument": {"name": argument, "value": value}}
            requests += [("completion/complete", params)]
            requests += [("completion/complete", {**params, "context": {"arguments": {"who": name}}})]
    if not is_stateless:
        for verb in ("subscribe", "unsubscribe"):
            requests += [(f"resources/{verb}", {"uri": uri}) for uri in uris]
    return requests


@requirement("SRV-742", "SRV-733", "SRV-602", "P-29")
@everywhere()
@pytest.mark.parametrize("name", CONCEALED)
async def test_what_is_hidden_is_as_unknown_byte_for_byte(open_wire: Open, name: str) -> None:
    wire: Wire = await open_wire(FENCED)
    before = json.loads(said(await wire.call("times_run")))
    absent = _requests(ABSENT, is_stateless=wire.stateless)
    for (method, params), (_, unknown) in zip(_requests(name, is_stateless=wire.stateless), absent, strict=True):
        status, told = await raw(wire, method, params)
        told = told.replace(name.encode(), ABSENT.encode()).replace(name.upper().encode(), ABSENT.upper().encode())
        assert (status, told) == await raw(wire, method, unknown), (method, params)
        assert b'"error"' in told or method == "resources/unsubscribe", (method, params)
    after = json.loads(said(await wire.call("times_run")))
    assert {each: after[each] for each in after if name in each} == {
        each: before[each] for each in before if name in each
    }, "a completion of it ran"


@requirement("SRV-742", "SRV-602", "P-29")
@everywhere()
async def test_a_list_with_hidden_entries_is_the_list_without_them(open_wire: Open) -> None:
    wire: Wire = await open_wire(FENCED)
    without: Wire = await open_wire("servers_resources:unconcealed")
    for method in ("resources/list", "resources/templates/list", "prompts/list"):
        status, told = await raw(wire, method, {})
        assert (status, told) == await raw(without, method, {})
        assert not [each for each in (*CONCEALED, ABSENT) if each.encode() in told]
        assert b"scoped" in told


@requirement("SRV-742", "SRV-711")
@everywhere(R5)
async def test_a_subscription_to_what_is_hidden_is_one_to_what_is_not_there(open_wire: Open) -> None:
    wire: Wire = await open_wire(FENCED, fresh=True)
    for name in CONCEALED:
        heard = []
        for each in (name, ABSENT):
            uris = ["open://x", f"{each}://x", f"{each}-note://ada"]
            _, told = await raw(
                wire, "subscriptions/listen", wire.params({"notifications": {"resourceSubscriptions": uris}})
            )
            heard.append(re.sub(rb'subscriptionId":\d+', b'subscriptionId":0', told))
        assert heard[0] == heard[1]
        assert name.encode() not in heard[0] and b"open://x" in heard[0]


@requirement("SRV-742", "SRV-710")
@everywhere(*LEGACY)
async def test_nobody_hears_of_what_is_hidden(open_wire: Open) -> None:
    wire: Wire = await open_wire(FENCED, fresh=True)
    for name in CONCEALED:
        assert code(await wire.request("resources/subscribe", {"uri": f"{name}://x"})) == NOT_FOUND[wire.revision]
    if not isinstance(wire, HttpWire):
        assert await wire.silent()


@requirement("SRV-742", "SRV-602", everywhere=True)
@pytest.mark.parametrize("near", ["hiddn", "hiddenn", "hidden2", "veild", "dozin", "Hidden", "veiled "])
async def test_no_hint_leads_to_a_hidden_name(near: str) -> None:
    async with Peer(fenced(audit=None), revision=R5, principal=Principal("alice")) as peer:
        for method, params in _requests(near, is_stateless=True):
            error = (await peer.request(method, params))["error"]
            told = json.dumps(error).replace(near, "").replace(near.upper(), "")
            assert not [each for each in CONCEALED if each in told], (method, params)


@requirement("SRV-742", "SRV-602", "P-29")
@pytest.mark.parametrize("revision", ALL)
async def test_a_rule_hides_from_one_caller_and_not_from_another(revision: str, ran: Ran) -> None:
    rules = [
        Rule(verdict="hide", uri=["mine:*"], principals=["bob"]),
        Rule(verdict="hide", prompts=["mine"], principals=["bob"]),
    ]
    server = Server("two", policy=Policy(rules))
    server.resource("mine:x", name="mine")(answering("mine"))
    server.resource("mine:t/{a}", name="mine-t")(_takes)
    server.prompt("mine", complete={"a": lambda value: ["mine"]})(_takes)
    server.resource("ours:x", name="ours")(answering("ours"))
    server.prompt("ours")(_takes)
    asked: list[tuple[str, Object]] = [
        ("resources/read", {"uri": "mine:x"}),
        ("resources/read", {"uri": "mine:t/1"}),
        ("prompts/get", {"name": "mine"}),
        (
            "completion/complete",
            {"ref": {"type": "ref/prompt", "name": "mine"}, "argument": {"name": "a", "value": ""}},
        ),
    ]
    async with (
        Peer(server, revision=revision, principal=Principal("alice")) as alice,
        Peer(server, revision=revision, principal=Principal("bob")) as bob,
    ):
        ran(revision, "memory")
        for method, params in asked * 2:  # the second time from whatever is kept
            assert "result" in await alice.request(method, params)
            assert code(await bob.request(method, params)) < 0
        for method in ("resources/list", "resources/templates/list", "prompts/list"):
            assert "mine" in json.dumps(await alice.request(method))
            answer = await bob.request(method)
            assert "mine" not in json.dumps(answer)
            if revision == R5:
                assert answer["result"]["cacheScope"] == "private"


async def _takes(a: str = "") -> str:
    return "taken"


# What a tool call pays


@requirement("SRV-743")
@everywhere()
async def test_a_tool_call_makes_no_more_python_calls_for_what_else_there_is(open_wire: Open) -> None:
    counts = []
    for variant in ("counting", "counting_resources"):
        wire: Wire = await open_wire(f"servers_resources:{variant}")
        rounds = []
        for _ in range(3):
            await wire.call("start")
            await wire.call("echo", {"text": "x"})
            rounds.append(json.loads(said(await wire.call("stop"))))
        counts.append(min(rounds, key=lambda each: sum(each.values())))
    alone, beside = counts
    more = {name: count - alone.get(name, 0) for name, count in beside.items() if count != alone.get(name, 0)}
    assert sum(beside.values()) == sum(alone.values()), more
