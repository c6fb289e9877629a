"""What a yes is bound to: who may decide, the settings that let them, the rules with their groups, and the file."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from clients import ALL, R4, R5
from handrail import Client, Principal, Server
from handrail.approvals.queue import ApprovalError, Approvals
from handrail.guards.identity import ApiKeys
from handrail.guards.policy import Policy, Rule
from handrail.jsonrpc import encode_sorted
from handrail.stores.memory import MemoryStore
from handrail.stores.sqlite import SqliteStore
from handrail.testing import Peer
from handrail.text.controls import MASK
from requirements import requirement
from servers_http import closed, served

__all__ = ["closed"]

Object = dict[str, Any]
Ran = Callable[[str, str], None]

DESTROYS = {"destructiveHint": True}
ASKS = [each for each in ALL if each >= "2025-06-18"]
HELD: Object = {"wait": 0.01, "round": 0.001}
KEY = "hk_7fQ2mZx9LrT4vWb8KpN3sYd6"


def yes(method: str, params: Object) -> Object:
    return {"action": "accept", "content": {"remember": "for an hour"}}


def shop(store: Any = None, **options: Any) -> tuple[Server, list[Object]]:
    """A server with one tool that asks first, and what it was called with."""
    server, ran = Server("shop", **{"store": store or MemoryStore(), **options}), list[Object]()

    @server.tool(annotations=DESTROYS)
    async def cancel(order: int, password: str = "", note: str = "") -> str:
        ran.append({"order": order, "password": password, "note": note})
        return f"order {order} is cancelled"

    return server, ran


async def pending(server: Server, arguments: Object | None = None, who: str = "local") -> str:
    """The question about a call that was not decided while it waited."""
    async with Peer(server, revision=R4, principal=Principal(who)) as peer:
        answer = await peer.call("cancel", arguments or {"order": 7})
        assert answer.is_error and "waits for a person's approval" in answer.text
        return (await server.approvals.open())[-1].id


async def runs(server: Server, arguments: Object | None = None, who: str = "local") -> bool:
    """Whether the call is carried out unasked."""
    async with Peer(server, revision=R4, principal=Principal(who)) as peer:
        return not (await peer.call("cancel", arguments or {"order": 7})).is_error


# Who may decide


@requirement("P-19", "SRV-602")
@pytest.mark.parametrize("revision", ASKS)
@pytest.mark.parametrize(("by", "may"), [("auto", False), ("another", False), ("anyone", True), ("caller", True)])
async def test_over_http_with_identities_a_caller_does_not_approve_its_own_call_unless_that_was_said(
    revision: str, by: Any, may: bool, ran: Ran
) -> None:
    server, cancelled = shop(approvals=Approvals(by=by, **HELD))
    headers = {"Authorization": f"Bearer {KEY}"}
    async with served(server.asgi(auth=ApiKeys({"ada": ApiKeys.hashed(KEY)}))) as url:
        ran(revision, "http")
        asked: list[str] = []

        def agree(question: Any) -> Object:
            asked.append(question.message)
            return {}

        options: Object = {"headers": headers, "trusted": True, "confirm": lambda call: True, "elicit": agree}
        async with Client(url, revision=revision, **options) as client:
            result = await client.call("cancel", {"order": 7})
        assert bool(asked) is bool(cancelled) is may and result.is_error is not may
        if not may:
            (waiting,) = await server.approvals.open()
            assert (waiting.asked.by, waiting.asked.principal) == ("another", "ada")
            with pytest.raises(ApprovalError, match="somebody else than its caller has to decide"):
                await server.approvals.decide(waiting.id, True, by="operator ada", who="ada")
            await server.approvals.decide(waiting.id, True, by="operator bob", who="bob")


@requirement("P-19")
@pytest.mark.parametrize("revision", ASKS)
async def test_without_identities_the_person_at_the_client_is_still_asked(revision: str, ran: Ran) -> None:
    server, cancelled = shop()
    async with Peer(server, revision=revision, capabilities={"elicitation": {}}, answers=yes) as peer:
        ran(revision, "memory")
        assert not (await peer.call("cancel", {"order": 7})).is_error
    async with served(server.asgi()) as url:
        ran(revision, "http")
        options: Object = {"trusted": True, "confirm": lambda call: True, "elicit": lambda question: {}}
        async with Client(url, revision=revision, **options) as client:
            assert not (await client.call("cancel", {"order": 8})).is_error
    assert [each["order"] for each in cancelled] == [7, 8]


@requirement("P-19", everywhere=True)
@pytest.mark.parametrize(
    ("by", "role", "who", "may"),
    [
        ("caller", "operator", "bob", False),
        ("operator", "caller", "local", False),
        ("operator", "operator", "local", True),
        ("another", "caller", "local", False),
        ("another", "operator", "local", False),
        ("another", "operator", "bob", True),
        ("anyone", "operator", "local", True),
    ],
)
async def test_p19_who_may_decide_is_kept_with_the_question_whatever_the_settings_where_it_is_decided(
    by: Any, role: Any, who: str, may: bool
) -> None:
    store = MemoryStore()
    server, cancelled = shop(store, approvals=Approvals(by=by, **HELD))
    if by == "caller":  # who is asked, and does not answer before somebody else does
        other, _ = shop(store, approvals=Approvals(by="anyone", **HELD))
        said: list[str] = []

        async def answers(method: str, params: Object) -> Object:
            (question,) = await server.approvals.open()
            with pytest.raises(ApprovalError, match="only the person at the calling client"):
                await other.approvals.decide(question.id, True, by=who, role=role)
            said.append(question.id)
            return {"action": "decline"}

        async with Peer(server, revision=R4, capabilities={"elicitation": {}}, answers=answers) as peer:
            assert (await peer.call("cancel", {"order": 7})).is_error
        assert said and not cancelled
        return
    ident = await pending(server)
    others, _ = shop(store, approvals=Approvals(by="anyone"))  # as a command in a folder without the settings
    if may:
        assert (await others.approvals.decide(ident, True, by=who, role=role)).state == "approved"
    else:
        with pytest.raises(ApprovalError, match=r"approvals\.by"):
            await others.approvals.decide(ident, True, by=who, role=role)
    assert await runs(server) is may


# What is remembered


@requirement("P-19")
@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"by": "anyone"}, True),
        ({"by": "caller"}, False),
        ({"by": "operator"}, False),
        ({"by": "another"}, False),
        ({"remember": 0.0}, False),
        ({"remember": 1800.0}, True),
        ({"remember": 60.0}, False),  # the yes is older than that
    ],
)
async def test_p19_a_remembered_yes_counts_only_while_the_settings_that_allowed_it_hold(
    settings: Object, counts: bool, ran: Ran
) -> None:
    now, store = 1_000_000.0, MemoryStore()
    server, cancelled = shop(store)
    server.engine.clock = lambda: now
    async with Peer(server, revision=R5, capabilities={"elicitation": {}}, answers=yes) as peer:
        ran(R5, "memory")
        for _ in range(2):
            assert not (await peer.call("cancel", {"order": 7})).is_error
    assert len(cancelled) == 2 and len(await server.approvals.grants()) == 1
    now += 120
    server.guard(approvals=Approvals(**HELD, **settings))
    assert await runs(server) is counts


@requirement("P-19", everywhere=True)
async def test_p19_how_long_a_yes_is_remembered_is_the_servers_word_too() -> None:
    store = MemoryStore()
    server, _ = shop(store, approvals=Approvals(by="operator", remember=0, **HELD))
    others, _ = shop(store)
    ident = await pending(server)
    with pytest.raises(ApprovalError, match=r"remembers no yes \(approvals.remember = 0\)"):
        await others.approvals.decide(ident, True, by="operator", remember=3600)
    assert [each.state for each in await others.approvals.open()] == ["pending"]
    server.guard(approvals=Approvals(by="operator", remember=60, **HELD))
    await others.approvals.decide(await pending(server, {"order": 8}), True, by="operator", remember=3600)
    (grant,) = await others.approvals.grants()
    assert grant.until - grant.made == 60


# The rules, and the file


@requirement("P-19", everywhere=True)
@pytest.mark.parametrize("remembered", [False, True])
@pytest.mark.parametrize(
    ("groups", "counts"),
    [
        ({"staff": ["local", "bob"], "other": ["x"]}, True),
        ({"staff": ["bob", "local"], "other": ["y"]}, True),  # a group no rule names
        ({"staff": ["local", "bob", "mallory"], "other": ["x"]}, False),
    ],
)
async def test_p19_a_yes_is_bound_to_the_members_of_the_groups_that_rules_name(
    groups: dict[str, list[str]], counts: bool, remembered: bool
) -> None:
    def rules(groups: dict[str, list[str]]) -> Policy:
        return Policy([Rule(verdict="ask", tools=["cancel"], groups=["staff"])], groups=groups)

    server, _ = shop(approvals=Approvals(by="operator", **HELD), policy=rules({"staff": ["local", "bob"]}))
    ident = await pending(server)
    await server.approvals.decide(ident, True, by="operator", remember=3600 * remembered)
    if remembered:
        assert await runs(server)  # the yes itself
    server.guard(policy=rules(groups))
    assert await runs(server) is counts


FILE = """
from handrail import Server
from handrail.approvals.queue import Approvals
from handrail.stores.memory import MemoryStore

def serve(store):
    server = Server("shop", store=store, approvals=Approvals(by="operator", wait=0.01))

    @server.tool(annotations={"destructiveHint": True})
    def cancel(order: int) -> str:
        return WORDS

    return server
"""


def served_from(path: Path, words: str, store: MemoryStore) -> Server:
    """The server that a file makes, read anew."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(FILE.replace("WORDS", repr(words)))
    spec = importlib.util.spec_from_file_location("served_shop", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))  # not what was compiled of it a moment ago
    made: Server = module.serve(store)
    return made


@requirement("P-19", everywhere=True)
@pytest.mark.parametrize("remembered", [False, True])
@pytest.mark.parametrize(
    ("file", "words", "counts"),
    [("a/shop.py", "done", True), ("a/shop.py", "worse", False), ("b/shop.py", "done", False)],
)
async def test_p19_a_yes_is_bound_to_the_file_that_is_served_not_only_to_the_servers_name(
    file: str, words: str, counts: bool, remembered: bool, tmp_path: Path
) -> None:
    store = MemoryStore()
    first = served_from(tmp_path / "a/shop.py", "done", store)
    await first.approvals.decide(await pending(first), True, by="operator", remember=3600 * remembered)
    if remembered:
        assert await runs(first)
    assert await runs(served_from(tmp_path / file, words, store)) is counts


# Room


@requirement("P-19", everywhere=True)
async def test_p19_callers_of_one_server_do_not_take_the_room_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handrail.approvals.queue.MAX_OPEN", 20)
    monkeypatch.setattr("handrail.approvals.queue.MAX_OPEN_EACH", 10)
    store = MemoryStore()
    busy, _ = shop(store, approvals=Approvals(by="operator", **HELD), rates=None)
    for who in ("ann", "bob"):
        for order in range(10):
            await pending(busy, {"order": order}, who)
    async with Peer(busy, revision=R4, principal=Principal("ann")) as peer:
        assert "too many calls wait" in (await peer.call("cancel", {"order": 99})).text
    for order in range(5):  # a caller with few questions has room of its own
        await pending(busy, {"order": order}, "carol")
    async with Peer(busy, revision=R4, principal=Principal("carol")) as peer:
        assert "too many calls wait" in (await peer.call("cancel", {"order": 5})).text
    other = Server("other", store=store, approvals=Approvals(by="operator", **HELD))

    @other.tool(annotations=DESTROYS)
    async def cancel(order: int) -> str:
        return ""

    for order in range(10):  # and so has another server, for the same caller
        await pending(other, {"order": order}, "ann")
    assert len(await other.approvals.open("other")) == 10 and len(await other.approvals.open("shop")) == 25
    assert len(await other.approvals.open()) == 35


# Secrets


@requirement("P-34", everywhere=True)
async def test_p34_arguments_are_kept_masked_and_the_call_runs_with_its_own(tmp_path: Path) -> None:
    file, secret = tmp_path / "state.db", "correct-horse-battery"
    store = SqliteStore(file)
    server, ran = shop(store, approvals=Approvals(by="operator", **HELD), secrets=["canary-8d1f2c"])
    arguments = {"order": 7, "password": secret, "note": "with canary-8d1f2c and sk_live_abcdefghijklmnop1234"}
    ident = await pending(server, arguments)
    (question,) = await server.approvals.open()
    assert question.asked.arguments == {"order": 7, "password": MASK, "note": f"with {MASK} and sk_live_{MASK}"}
    await server.approvals.decide(ident, True, by="operator", remember=3600)
    for _ in range(2):  # the yes itself, and what is remembered of it
        assert await runs(server, arguments)
    assert ran == [arguments] * 2
    assert not await runs(server, {**arguments, "password": "another"})
    [changed] = await server.approvals.open()
    assert changed.before == [f'password: "{MASK}", was "{MASK}"']
    await store.close()
    kept = file.read_bytes()
    assert b"approval" in kept
    for each in (secret, "canary-8d1f2c", "abcdefghijklmnop1234"):
        assert each.encode() not in kept


@requirement("P-34", "P-19", everywhere=True)
async def test_p34_arguments_edited_under_masks_run_with_the_secrets_they_had() -> None:
    server, ran = shop(approvals=Approvals(by="operator", **HELD))
    arguments = {"order": 7, "password": "correct-horse-battery"}
    ident = await pending(server, arguments)
    with pytest.raises(ApprovalError, match="stands for a secret you were not shown"):
        await server.approvals.decide(ident, True, by="operator", edited={"order": 8, "note": MASK})
    with pytest.raises(ApprovalError, match="its value is masked"):
        await server.approvals.decide(ident, True, by="operator", remember=60, matching={"password": {"matches": "^a"}})
    await server.approvals.decide(ident, True, by="operator", edited={"order": 8, "password": MASK})
    assert await runs(server, arguments)
    assert ran == [{"order": 8, "password": "correct-horse-battery", "note": ""}]


@requirement("P-34", everywhere=True)
async def test_p34_a_secret_that_an_edit_repeats_or_brings_is_not_kept_for_later(tmp_path: Path) -> None:
    file, secret = tmp_path / "state.db", "correct-horse-battery"
    store = SqliteStore(file)
    server, ran = shop(store, approvals=Approvals(by="operator", **HELD))
    arguments = {"order": 7, "password": secret}
    ident = await pending(server, arguments)
    made = await server.approvals.decide(ident, True, by="webhook", edited={"password": secret, "order": 8})
    assert made.edited == {"password": MASK, "order": 8}
    assert await runs(server, arguments)
    assert ran == [{"order": 8, "password": secret, "note": ""}]
    ident = await pending(server, {"order": 9})
    await server.approvals.decide(ident, True, by="operator", edited={"order": 9, "password": "another-horse"})
    [last, _] = await server.approvals.recently_allowed(made.asked)
    assert last.arguments == {"order": 9, "password": MASK}
    await store.close()
    assert secret.encode() not in file.read_bytes()


@requirement("P-19", everywhere=True)
async def test_p19_arguments_edited_run_under_their_own_names_in_whatever_order_they_came() -> None:
    server, ran = Server("shop", store=MemoryStore(), approvals=Approvals(by="operator", **HELD)), list[Object]()

    @server.tool(annotations=DESTROYS)
    async def cancel(to: dict[str, str], sender: str, memo: str) -> str:
        ran.append({"to": to, "sender": sender, "memo": memo})
        return "sent"

    arguments = {"to": {"name": "bob", "bank": "b1", "password": "correct-horse"}, "sender": "ann", "memo": "rent"}
    ident = await pending(server, arguments)
    edited = {"memo": "cut", "sender": "ann", "to": {"bank": "b2", "name": "bob", "password": MASK}}
    await server.approvals.decide(ident, True, by="operator", edited=edited)
    assert await runs(server, arguments)
    to = {"name": "bob", "bank": "b2", "password": "correct-horse"}
    assert ran == [{"to": to, "sender": "ann", "memo": "cut"}]


# What differs


async def test_only_unusual_differences_are_marked() -> None:
    server, _ = shop(approvals=Approvals(by="operator", **HELD))
    before: list[list[str]] = []
    for order, note in ((1, "a"), (2, "a"), (3, "a"), (4, "a"), (5, "b")):
        ident = await pending(server, {"order": order, "note": note})
        question = await server.approvals.get(ident)
        assert question is not None
        before.append(question.before)
        await server.approvals.decide(ident, True, by="operator")
    # Of one earlier call alone nothing can be told to be usual.
    assert before == [[], ["order: 2, was 1"], [], [], ['note: "b", was "a"']]


# State of before

OLD_ASKED: Object = {
    "server": "shop",
    "principal": "local",
    "tool": "cancel",
    "arguments": {"order": 7},
    "rule": "built in: destructive tools ask",
    "why": "it counts as destructive, and no rule says otherwise",
    "client": "test",
    "schema": {},
}


@requirement("P-19", everywhere=True)
@pytest.mark.parametrize("state", ["pending", "approved"])
async def test_p19_questions_and_grants_of_a_version_before_are_read_and_never_trusted(state: str) -> None:
    store = MemoryStore()
    server, cancelled = shop(store, approvals=Approvals(by="operator", **HELD))
    entry = server.engine.catalog.get("cancel")
    assert entry is not None
    policy = server.engine.guard_set.policy.version
    now = server.approvals.now()
    asked = {**OLD_ASKED, "fingerprint": entry.fingerprint, "policy": policy}
    approval = {"asked": asked, "created": now, "expires": now + 900, "state": state, "by": "", "at": 0.0, "note": ""}
    approval |= {"id": "0123456789", "digest": "d" * 64, "edited": None, "ticket": "", "before": []}
    grant = {"id": "abcdef0123", "approval": "0123456789", "until": now + 900, "by": "local", "made": now}
    grant |= {key: asked[key] for key in ("principal", "tool", "server", "fingerprint", "policy", "arguments")}
    await store.put("approval:0123456789", encode_sorted(approval))
    await store.put("approval-open:0123456789", b"local")
    await store.put("grant:abcdef0123", encode_sorted({**grant, "matching": {}}))
    desk = server.approvals
    assert [each.id for each in await desk.open()] == ["0123456789"] * (state == "pending")
    assert [each.id for each in await desk.grants()] == ["abcdef0123"]
    with pytest.raises(ApprovalError, match="asked again" if state == "pending" else "approved already"):
        await desk.decide("0123456789", True, by="operator")
    assert not await runs(server) and cancelled == []
    fresh = [each for each in await desk.open() if each.id != "0123456789"]
    assert len(fresh) == 1 and to_builtins(fresh[0].asked)["arguments"] == {"order": 7}
    assert await desk.revoke("abcdef0123", by="operator") and json.loads(encode_sorted(approval))
