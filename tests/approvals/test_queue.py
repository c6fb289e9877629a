"""Calls that wait for a person: whoever may say yes, on every revision, says it for one call, once (P-19)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from clients import ALL, R0, R1, R2, R4, R5
from handrail import Call, Limits, Principal, Server, Text, ToolError, ToolResult
from handrail.approvals.queue import ApprovalError, ApprovalQueue, Approvals
from handrail.audit.reader import TrailFile
from handrail.errors import RemoteProtocolError
from handrail.guards.policy import Policy, Rule
from handrail.stores import StoreError
from handrail.stores.memory import MemoryStore
from handrail.testing import Peer
from patience import PATIENCE
from requirements import requirement
from servers_http import Client, closed, served, until

__all__ = ["closed"]

Object = dict[str, Any]
Ran = Callable[[str, str], None]

DESTROYS = {"destructiveHint": True}
QUICK = Approvals(wait=0.2, round=0.02)
CANNOT_ASK = (R0, R1, R2)  # revisions without questions to the user
ASKS = [revision for revision in ALL if revision not in CANNOT_ASK]


class Shop:
    """A server with one tool that asks first, and what has become of it."""

    def __init__(self, **options: Any) -> None:
        self.now = 1_000_000.0
        self.cancelled: list[int] = []
        self.store = MemoryStore()
        options = {"approvals": QUICK, "store": self.store, **options}
        self.server = Server("shop", **options)
        self.server.engine.clock = lambda: self.now
        self.add("Cancels an order.")

    def add(self, description: str) -> None:
        @self.server.tool(annotations=DESTROYS, description=description)
        async def cancel(order: int, fast: bool = False) -> str:
            self.cancelled.append(order)
            return f"order {order} is cancelled"

    @property
    def desk(self) -> ApprovalQueue:
        return self.server.approvals

    async def only(self) -> str:
        (waiting,) = await self.desk.open()
        return waiting.id

    def peer(self, revision: str = R5, *answers: Object, asked: list[str] | None = None) -> Peer:
        said = list(answers)

        def answer(method: str, params: Object) -> Object:
            if asked is not None:
                asked.append(params["message"])
            return said.pop(0)

        able: Object = {"elicitation": {}} if answers else {}
        return Peer(self.server, revision=revision, capabilities=able, answers=answer)


def accept(**content: Any) -> Object:
    return {"action": "accept", "content": content}


YES, NO = accept(), {"action": "decline"}


@requirement("P-19", "SRV-602")
@pytest.mark.parametrize("revision", ASKS)
async def test_p19_the_person_at_the_client_is_asked_where_the_revision_can(revision: str, ran: Ran) -> None:
    shop = Shop()
    asked: list[str] = []
    async with shop.peer(revision, YES, NO, {"action": "cancel"}, asked=asked) as peer:
        ran(revision, "memory")
        assert (await peer.call("cancel", {"order": 7})).text == "order 7 is cancelled"
        for _ in range(2):  # a no, a dismissal
            answer = await peer.call("cancel", {"order": 7})
            assert answer.is_error and "was not approved" in answer.text
    assert shop.cancelled == [7]
    assert len(asked) == 3 and all('{"order":7}' in each and "cancel" in each and "shop" in each for each in asked)


ANSWERS: list[tuple[Object, str, str]] = [  # what a client says, what becomes of the call, and of the question
    ({"action": "accept", "content": {}}, "order 7 is cancelled", "consumed"),
    ({"action": "accept"}, "order 7 is cancelled", "consumed"),
    ({"action": "accept", "content": None}, "order 7 is cancelled", "consumed"),
    ({"action": "accept", "content": {"remember": "no"}}, "order 7 is cancelled", "consumed"),
    ({"action": "accept", "content": {"remember": "for a year", "more": 1}}, "order 7 is cancelled", "consumed"),
    ({"action": "decline"}, "was not approved by its user", "denied"),
    ({"action": "decline", "content": {"remember": "for an hour"}}, "was not approved by its user", "denied"),
    ({"action": "cancel"}, "the question was dismissed", "cancelled"),
    ({"action": "maybe"}, "the question was dismissed", "cancelled"),
    ({}, "the question was dismissed", "cancelled"),
]


@requirement("P-19", "APP-03")
@pytest.mark.parametrize("revision", ASKS)
@pytest.mark.parametrize(("said", "text", "state"), ANSWERS)
async def test_p19_the_action_is_the_answer_and_nothing_is_asked_twice(
    revision: str, said: Object, text: str, state: str, ran: Ran
) -> None:
    shop = Shop()
    asked: list[str] = []
    async with shop.peer(revision, *[said] * 20, asked=asked) as peer:
        ran(revision, "memory")
        assert text in (await peer.call("cancel", {"order": 7})).text
        assert len(asked) == 1 and len(await shop.desk.grants()) == 0
        (question,) = await shop.desk.recent()
    assert question.state == state and shop.cancelled == [7] * (state == "consumed")


@requirement("P-19", "SRV-602")
@pytest.mark.parametrize("revision", ASKS)
@pytest.mark.parametrize("remember", [0.0, 3600.0, 30 * 86400.0])
async def test_p19_the_form_asks_only_whether_to_remember_where_that_is_allowed(
    revision: str, remember: float, ran: Ran
) -> None:
    forms: list[Object] = []

    def answer(method: str, params: Object) -> Object:
        forms.append(params["requestedSchema"])
        return NO

    shop = Shop(approvals=Approvals(remember=remember))
    async with Peer(shop.server, revision=revision, capabilities={"elicitation": {}}, answers=answer) as peer:
        ran(revision, "memory")
        await peer.call("cancel", {"order": 7})
    (form,) = forms
    assert form["type"] == "object" and not form.get("required")
    words = ["no", "for an hour", "for a day", "for 30 days"][: {0.0: 0, 3600.0: 2}.get(remember, 4)]
    assert form["properties"].get("remember", {}).get("enum", []) == words
    assert form["properties"].keys() <= {"remember"}


@requirement("P-19")
@pytest.mark.parametrize("revision", ALL)
async def test_p19_somebody_at_the_server_decides_while_the_call_waits(revision: str, ran: Ran) -> None:
    shop = Shop(approvals=Approvals(wait=30, round=30, by="operator"))
    async with shop.peer(revision) as peer:
        ran(revision, "memory")
        for yes, order in ((True, 1), (False, 2)):
            async with shop.store.subscribe("approvals") as news:
                call = asyncio.create_task(peer.call("cancel", {"order": order}))
                await anext(news)
            await shop.desk.decide(await shop.only(), yes, by="operator", note="" if yes else "too late")
            answer = await call
            assert answer.is_error is not yes
            assert yes or "too late" in answer.text
    assert shop.cancelled == [1]


@requirement("P-19")
@pytest.mark.parametrize("revision", ALL)
async def test_p19_a_call_nobody_decided_on_is_pending_and_its_repeat_runs_once(revision: str, ran: Ran) -> None:
    shop = Shop(approvals=Approvals(wait=0.05, round=0.005, by="operator"))
    async with shop.peer(revision) as peer:
        ran(revision, "memory")
        first = await peer.call("cancel", {"order": 7})
        ident = await shop.only()
        assert first.is_error and ident in first.text and "again with the same arguments" in first.text
        again = await peer.call("cancel", {"order": 7})
        assert ident in again.text and await shop.only() == ident  # matched, not asked anew
        await shop.desk.decide(ident, True, by="operator")
        assert not (await peer.call("cancel", {"order": 7})).is_error
        third = await peer.call("cancel", {"order": 7})
        assert third.is_error and ident not in third.text
    assert shop.cancelled == [7]


async def approved(shop: Shop, peer: Peer, arguments: Object) -> str:
    """A call that was refused for now, and approved since."""
    assert (await peer.call("cancel", arguments)).is_error
    ident = await shop.only()
    await shop.desk.decide(ident, True, by="operator")
    return ident


@requirement("P-19")
@pytest.mark.parametrize("change", ["argument", "tool", "principal", "policy", "expiry", "nothing"])
async def test_p19_an_approval_is_good_for_nothing_else(change: str) -> None:
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator"))
    async with shop.peer() as peer:
        await approved(shop, peer, {"order": 7})
    arguments, who = {"order": 7}, Principal("local")
    match change:
        case "argument":
            arguments = {"order": 7, "fast": True}
        case "tool":
            shop.server.remove("cancel")
            shop.add("Cancels an order, and every other.")
        case "principal":
            who = Principal("mallory")
        case "policy":
            shop.server.guard(policy=Policy([Rule(verdict="ask", tools=["cancel"])]))
        case "expiry":
            shop.now += 900
    async with shop.server.serving(), Peer(shop.server, principal=who) as peer:
        await peer.call("cancel", arguments)
    assert shop.cancelled == ([7] if change == "nothing" else [])


@requirement("P-19", "P-21")
@pytest.mark.parametrize("jump", [-86400.0, 3600.0, 86400.0])
async def test_p21_a_clock_that_jumps_extends_no_right(jump: float) -> None:
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator", expires=600))
    async with shop.peer() as peer:
        await approved(shop, peer, {"order": 7})
        shop.now += jump
        await peer.call("cancel", {"order": 7})
        shop.now -= jump
        shop.now += 601
        await peer.call("cancel", {"order": 7})
    assert shop.cancelled == []  # neither later than it was good for, nor a day before it was given


async def test_p19_nobody_decides_twice_or_too_late() -> None:
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator"))
    async with shop.peer() as peer:
        ident = await approved(shop, peer, {"order": 1})
        with pytest.raises(ApprovalError, match="approved by operator already"):
            await shop.desk.decide(ident, False, by="another")
        await peer.call("cancel", {"order": 2})
        late = await shop.only()
        shop.now += 900
        with pytest.raises(ApprovalError, match="expired"):
            await shop.desk.decide(late, True, by="operator")
        with pytest.raises(ApprovalError, match="no such approval"):
            await shop.desk.decide("made-up", True, by="operator")
        assert await shop.desk.open() == []


async def test_p19_of_many_calls_that_bring_one_approval_one_runs() -> None:
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator"))
    async with shop.peer() as peer:
        await approved(shop, peer, {"order": 7})
        answers = await asyncio.gather(*(peer.call("cancel", {"order": 7}) for _ in range(20)))
    assert shop.cancelled == [7] and [each.is_error for each in answers].count(False) == 1


async def test_p19_arguments_edited_into_what_the_tool_does_not_take_decide_nothing() -> None:
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator"))
    async with shop.peer(R5) as peer:
        assert (await peer.call("cancel", {"order": 7})).is_error
        with pytest.raises(ApprovalError, match="nothing is decided: order: expected integer"):
            await shop.desk.decide(await shop.only(), True, by="operator", edited={"order": "eight"})
        await shop.desk.decide(await shop.only(), True, by="operator", edited={"order": 8})
        assert not (await peer.call("cancel", {"order": 7})).is_error
    assert shop.cancelled == [8]


@pytest.mark.parametrize(
    "said", [{"edited": {"order": "eight"}}, {"edited": {"order": math.nan}}, {"matching": {"order": {"over": 100}}}]
)
async def test_p19_a_no_is_a_no_whatever_else_is_said_with_it(said: Object) -> None:
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator"))
    async with shop.peer(R5) as peer:
        assert (await peer.call("cancel", {"order": 7})).is_error
        denied = await shop.desk.decide(await shop.only(), False, by="operator", **said)
        assert (denied.state, denied.edited) == ("denied", None)
        assert "was not approved by an operator" in (await peer.call("cancel", {"order": 7})).text
    assert shop.cancelled == []


class Mute(MemoryStore):
    """Keeps what it is given, and tells nobody."""

    async def publish(self, topic: str, message: bytes) -> None:
        raise StoreError("SQLite: database or disk is full")


async def test_p19_a_decision_that_cannot_be_told_is_one_all_the_same() -> None:
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator"), store=Mute())
    async with shop.peer(R5) as peer:
        assert (await peer.call("cancel", {"order": 7})).is_error
        decided = await shop.desk.decide(await shop.only(), True, by="operator", remember=3600)
        [grant] = await shop.desk.grants()
        assert (decided.state, grant.approval) == ("approved", decided.id)
        assert not (await peer.call("cancel", {"order": 7})).is_error
        assert not (await peer.call("cancel", {"order": 7})).is_error, "as remembered"
        assert await shop.desk.revoke(grant.id, by="operator")
    assert shop.cancelled == [7, 7]


async def test_p19_edited_arguments_that_nobody_could_check_are_checked_before_they_run() -> None:
    """As of a question filed by a version that did not keep the schema."""
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator"))
    async with shop.peer(R5) as peer:
        assert (await peer.call("cancel", {"order": 7})).is_error
        [waiting] = await shop.desk.open()
        await shop.desk.cancel(waiting)
        old = await shop.desk.find_or_create(replace(waiting.asked, schema={}))
        await shop.desk.decide(old.id, True, by="operator", edited={"order": "eight"})
        answer = await peer.call("cancel", {"order": 7})
    assert answer.is_error and "which are not valid" in answer.text
    assert shop.cancelled == []


@pytest.mark.parametrize(("edited", "ran_with"), [({"order": 8}, [8]), ({"order": 13}, [])])
async def test_p19_edited_arguments_are_decided_again(edited: Object, ran_with: list[int]) -> None:
    never = Rule(name="unlucky", verdict="deny", tools=["cancel"], arguments={"order": {"is": 13}})
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator"), policy=Policy([never]))
    async with shop.peer(R5) as peer:
        assert (await peer.call("cancel", {"order": 7})).is_error
        await shop.desk.decide(await shop.only(), True, by="operator", edited=edited)
        with contextlib.suppress(RemoteProtocolError):  # how a rule's no is told
            assert (await peer.call("cancel", {"order": 7})).is_error is not bool(ran_with)
    assert shop.cancelled == ran_with


async def test_what_was_last_allowed_is_what_ran_not_what_was_asked() -> None:
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator"))
    async with shop.peer(R5) as peer:
        assert (await peer.call("cancel", {"order": 7})).is_error
        await shop.desk.decide(await shop.only(), True, by="operator", edited={"order": 8})
        assert not (await peer.call("cancel", {"order": 7})).is_error and shop.cancelled == [8]
        assert (await peer.call("cancel", {"order": 7})).is_error
        [waiting] = await shop.desk.open()
    assert any("8" in each for each in waiting.before)


class Thinking(MemoryStore):
    """Takes its time to file a question."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def commit(self, changes: Any) -> bool:
        self.begun.set()
        await self.go.wait()
        return await super().commit(changes)


@requirement("P-19", everywhere=True)
async def test_p19_who_gives_up_while_a_question_is_filed_takes_it_along() -> None:
    store = Thinking()
    shop = Shop(approvals=Approvals(by="operator"), store=store)
    async with shop.peer(R4) as peer, store.subscribe("approvals") as news, asyncio.timeout(PATIENCE):
        await peer.send(
            b'{"jsonrpc":"2.0","id":"c","method":"tools/call","params":{"name":"cancel","arguments":{"order":7}}}'
        )
        await store.begun.wait()
        await peer.notify("notifications/cancelled", {"requestId": "c"})
        assert (await peer.request("ping"))["result"] == {}  # so it has been heard
        store.go.set()
        await anext(news)  # that it was asked
        await anext(news)  # that it need not be answered
        assert await shop.desk.open() == []
    assert shop.cancelled == []


@requirement("P-02", everywhere=True)
@pytest.mark.parametrize("edited", [{"order": math.inf}, {"order": math.nan}, {"order": b"7"}])
async def test_arguments_are_not_edited_into_what_json_cannot_say(edited: Object) -> None:
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator"))
    async with shop.peer(R5) as peer:
        assert (await peer.call("cancel", {"order": 7})).is_error
        with pytest.raises(ApprovalError, match="/order: "):
            await shop.desk.decide(await shop.only(), True, by="operator", edited=edited)
        assert [each.state for each in await shop.desk.open()] == ["pending"] and not shop.cancelled


@pytest.mark.parametrize("revision", ASKS)
async def test_what_is_remembered_is_narrow_ends_and_can_be_revoked(revision: str) -> None:
    shop = Shop()
    asked: list[str] = []
    remember = accept(remember="for an hour")
    async with shop.peer(revision, remember, NO, NO, NO, asked=asked) as peer:
        for _ in range(3):
            assert not (await peer.call("cancel", {"order": 7})).is_error
        assert len(asked) == 1
        assert (await peer.call("cancel", {"order": 8})).is_error and len(asked) == 2  # other arguments
        (grant,) = await shop.desk.grants()
        assert (grant.tool, grant.arguments, grant.principal) == ("cancel", {"order": 7}, "local")
        shop.now += 3601
        assert (await peer.call("cancel", {"order": 7})).is_error and len(asked) == 3
        shop.now -= 3601
        assert await shop.desk.revoke(grant.id, by="operator") and not await shop.desk.revoke(grant.id, by="operator")
        assert (await peer.call("cancel", {"order": 7})).is_error and len(asked) == 4
    assert shop.cancelled == [7, 7, 7]


async def test_what_is_remembered_may_be_a_condition() -> None:
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator"))
    async with shop.peer(R1) as peer:
        assert (await peer.call("cancel", {"order": 7})).is_error
        ident = await shop.only()
        for wrong, says in (({"under": 5}, "does not meet"), ({"undr": 9}, "did you mean 'under'")):
            with pytest.raises(ApprovalError, match=says):
                await shop.desk.decide(ident, True, by="operator", remember=60, matching={"order": wrong})
        await shop.desk.decide(ident, True, by="operator", remember=60, matching={"order": {"under": 10}})
        assert not (await peer.call("cancel", {"order": 7})).is_error  # the yes itself
        assert [(await peer.call("cancel", {"order": order})).is_error for order in (9, 10, 1)] == [False, True, False]
        assert (await peer.call("cancel", {"order": 2, "fast": True})).is_error
    assert shop.cancelled == [7, 9, 1]


async def test_a_yes_that_was_remembered_and_revoked_is_no_yes_any_more() -> None:
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator"))
    async with shop.peer(R1) as peer:
        for revoked_first in (True, False):
            assert (await peer.call("cancel", {"order": 7})).is_error
            await shop.desk.decide(await shop.only(), True, by="operator", remember=3600)
            (grant,) = await shop.desk.grants()
            if not revoked_first:  # the yes itself is used before what is remembered
                assert not (await peer.call("cancel", {"order": 7})).is_error
                assert not (await peer.call("cancel", {"order": 7})).is_error
            assert await shop.desk.revoke(grant.id, by="operator")
            assert (await peer.call("cancel", {"order": 7})).is_error
            waiting = await shop.desk.open()
            assert len(waiting) == 1
            await shop.desk.decide(waiting[0].id, False, by="local")
    assert shop.cancelled == [7, 7]


async def test_a_trail_of_lines_has_approvals_of_this_process_only(tmp_path: Path) -> None:
    shop = Shop(audit=tmp_path / "audit.jsonl", store=None)
    async with shop.peer(R1) as peer:
        assert "no person can be asked" in (await peer.call("cancel", {"order": 7})).text
    async with shop.peer(R5, YES) as peer:
        assert not (await peer.call("cancel", {"order": 7})).is_error


@requirement("P-34")
async def test_p34_what_middleware_makes_of_a_result_is_cleaned_too() -> None:
    server = Server("s", secrets=["canary-8d1f2c"])

    @server.tool
    async def tool(how: str) -> str:
        return how

    @server.middleware
    async def spoils(call: Call, following: Any) -> ToolResult:
        result: ToolResult = await following(call)
        if result.text == "raise":
            raise ToolError("it was canary-8d1f2c\x1b[31m")
        return ToolResult([*result.content, Text("canary-8d1f2c\x1b[31m")])

    async with Peer(server) as peer:
        assert (await peer.call("tool", {"how": "add"})).text == "add\n****"
        assert (await peer.call("tool", {"how": "raise"})).text == "it was ****"


async def test_a_question_says_what_has_changed_since_the_last_yes() -> None:
    shop = Shop()
    asked: list[str] = []
    async with shop.peer(R5, YES, YES, NO, asked=asked) as peer:
        await peer.call("cancel", {"order": 7})
        await peer.call("cancel", {"order": 7})
        shop.server.remove("cancel")
        shop.add("Cancels an order, and more.")
        await peer.call("cancel", {"order": 8, "fast": True})
    first, same, other = ([line for line in each.splitlines() if line.startswith("Since")] for each in asked)
    assert first == [] and same == ["Since it was last allowed: nothing: it is the same call again."]
    assert [line.partition(": ")[2] for line in other] == [
        "the tool itself has changed.",
        "fast: true, was not given.",
        "order: 8, was 7.",
    ]


@pytest.mark.parametrize("audit", [None, "trail.jsonl"])
async def test_a_client_that_cannot_be_asked_is_told_so_where_nobody_else_can_be(
    audit: str | None, tmp_path: Path
) -> None:
    shop = Shop(store=None, **({"audit": tmp_path / audit} if audit else {}))
    async with shop.peer(R1) as peer:
        answer = await peer.call("cancel", {"order": 7})
    assert answer.is_error and "no person can be asked" in answer.text and shop.cancelled == []


# The stateless revision: the retry is a message of its own, and can be sent again


async def retried(peer: Peer, **more: Any) -> Object:
    params = {"name": "cancel", "arguments": {"order": 7}, **more}
    answer: Object = (await peer.request("tools/call", params))["result"]
    return answer


@requirement("P-19", "P-25")
async def test_p19_a_retry_that_is_sent_twice_runs_once(ran: Ran) -> None:
    shop = Shop()
    async with Peer(shop.server, revision=R5, capabilities={"elicitation": {}}) as peer:
        ran(R5, "memory")
        asked = await retried(peer)
        (key,) = asked["inputRequests"]
        answer = {"requestState": asked["requestState"], "inputResponses": {key: YES}}
        assert (await retried(peer, **answer))["resultType"] == "complete"
        for _ in range(3):
            again = await retried(peer, **answer)
            assert again["resultType"] == "input_required" and key not in again["inputRequests"]
        made_up = {"approval-made-up": {**YES, "ticket": ""}}
        assert (await retried(peer, inputResponses=made_up))["resultType"] == "input_required"
    assert shop.cancelled == [7]


@requirement("P-19")
async def test_p19_a_tool_that_asks_something_itself_is_approved_once_and_continues_once(ran: Ran) -> None:
    server, done = Server("shop", approvals=QUICK, store=MemoryStore()), []

    @server.tool(annotations=DESTROYS)
    async def cancel(call: Call, order: int) -> str:
        why = await call.ask("Why?", {"type": "object", "properties": {"why": {"type": "string"}}}, key="why")
        done.append((order, why.content["why"]))
        return "done"

    async with Peer(server, revision=R5, capabilities={"elicitation": {}}) as peer:
        ran(R5, "memory")
        first = await retried(peer)
        (key,) = first["inputRequests"]
        second = await retried(peer, requestState=first["requestState"], inputResponses={key: YES})
        assert list(second["inputRequests"]) == ["why"]
        why = {"why": accept(why="late")}
        last = {"requestState": second["requestState"], "inputResponses": why}
        assert (await retried(peer, **last))["resultType"] == "complete"
        assert (await retried(peer, **last))["resultType"] == "input_required"  # the yes was used
        assert list((await retried(peer, inputResponses=why))["inputRequests"]) != ["why"]
    assert done == [(7, "late")]


# The record of it


async def test_p15_no_effect_without_an_intent_and_no_approval_without_a_record(tmp_path: Path) -> None:
    file = tmp_path / "audit.db"
    shop = Shop(audit=file, store=None, approvals=Approvals(wait=0.01, round=0.001, by="operator"))
    async with shop.peer(R1) as peer:
        ident = await approved(shop, peer, {"order": 7})
        await peer.call("cancel", {"order": 7})
    trail = TrailFile(file)
    records = [json.loads(line) for _, line in trail.lines()]
    told = [(each["event"], each.get("step") or each.get("outcome") or each.get("agreed")) for each in records]
    assert told[1:] == [
        ("approval", "asked"),
        ("refusal", "pending"),
        ("approval", "approved"),
        ("intent", f"approval {ident}"),
        ("outcome", "ok"),
    ]
    assert records[3]["approval"] == ident and records[3]["by"] == "operator"
    assert records[4]["call"] == records[5]["call"] and records[4]["principal"] == "local"


async def called_and_cancelled(shop: Shop, peer: Peer, order: int) -> str:
    """The question of a call that its caller took back."""
    params = {"name": "cancel", "arguments": {"order": order}}
    async with shop.store.subscribe("approvals") as news, asyncio.timeout(PATIENCE):
        await peer.send(
            json.dumps({"jsonrpc": "2.0", "id": f"c{order}", "method": "tools/call", "params": params}).encode()
        )
        ident = (await anext(news)).decode()
        await peer.notify("notifications/cancelled", {"requestId": f"c{order}"})
        await anext(news)
    return ident


async def test_whoever_calls_and_cancels_asks_no_more_often_than_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handrail.approvals.queue.MAX_OPEN_EACH", 3)
    store = MemoryStore(clock=lambda: shop.now)
    shop = Shop(approvals=Approvals(wait=0.05, by="operator"), store=store)
    shop.store = store
    alice, bob = (Peer(shop.server, principal=Principal(name)) for name in ("alice", "bob"))
    async with alice, bob:
        asked = [await called_and_cancelled(shop, alice, order) for order in range(3)]
        assert await shop.desk.open() == []
        refused = await alice.call("cancel", {"order": 3})
        assert refused.is_error and "were cancelled while they did; wait until" in refused.text
        assert await shop.desk.open() == []
        assert "waits for a person's approval" in (await bob.call("cancel", {"order": 3})).text
        assert [each.state for each in await shop.desk.recent()] == ["cancelled"] * 3
        shop.now += 900  # as long as they would have been open
        assert [await shop.desk.get(each) for each in asked] == [None] * 3
        assert await shop.store.scan("approval-for:") == []
        assert "waits for a person's approval" in (await alice.call("cancel", {"order": 3})).text


@requirement("P-19")
async def test_p19_a_yes_that_comes_while_its_call_is_given_up_is_still_a_yes(ran: Ran) -> None:
    shop = Shop(approvals=Approvals(wait=0.01, by="operator"))
    async with shop.peer(R4) as peer:
        ran(R4, "memory")
        await peer.call("cancel", {"order": 7})
        (seen,) = await shop.desk.open()
        await shop.desk.decide(seen.id, True, by="operator")
        await shop.desk.cancel(seen)
        assert not (await peer.call("cancel", {"order": 7})).is_error
    assert shop.cancelled == [7]


@requirement("P-19")
@pytest.mark.parametrize("revision", [R1, R4, R5])
async def test_p19_a_question_outlives_a_server_that_is_stopped_while_its_call_waits(revision: str, ran: Ran) -> None:
    shop = Shop(approvals=Approvals(wait=30, round=30, by="operator"), limits=Limits(grace_seconds=0.05))
    async with served(shop.server.asgi()) as url:
        ran(revision, "http")
        client = await Client(url, revision).open()
        async with shop.store.subscribe("approvals") as news:
            waiting = asyncio.create_task(client.post(client.call(1, "cancel", {"order": 7})))
            await anext(news)
    await asyncio.gather(waiting, return_exceptions=True)
    async with served(shop.server.asgi()) as url:
        await shop.desk.decide(await shop.only(), True, by="operator")
        client = await Client(url, revision).open()
        _, answer = await client.ask(client.call(1, "cancel", {"order": 7}))
        assert answer["result"]["content"][0]["text"] == "order 7 is cancelled"


@requirement("P-19")
@pytest.mark.parametrize(("revision", "ends"), [(R4, "connection"), (R4, "session"), (R5, "connection")])
async def test_a_question_goes_with_its_client_but_a_session_outlives_a_connection(
    revision: str, ends: str, ran: Ran
) -> None:
    shop = Shop(approvals=Approvals(wait=30, round=30, by="operator"))
    async with served(shop.server.asgi()) as url, asyncio.timeout(PATIENCE):
        ran(revision, "http")
        client = await Client(url, revision).open()
        async with shop.store.subscribe("approvals") as news:
            reply = await client.post(client.call(1, "cancel", {"order": 7}))
            ident = (await anext(news)).decode()
            await (client.delete() if ends == "session" else reply.gone())
            if stays := (revision, ends) == (R4, "connection"):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(news), 0.5)
                await shop.desk.decide(ident, True, by="operator")
                await until(lambda: shop.cancelled == [7])
            else:
                await anext(news)
        found = await shop.desk.get(ident)
        assert found is not None and found.state == ("consumed" if stays else "cancelled")
