"""Calls that wait for a person: whoever may say yes, on every revision, says it for one call, once (P-19)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clients import ALL, R0, R1, R2, R5
from handrail import Call, Principal, Server, Text, ToolError, ToolResult
from handrail.errors import RemoteProtocolError
from handrail.guards.approval import ApprovalError, Approvals, Desk
from handrail.guards.policy import Policy, Rule
from handrail.guards.trail_reading import TrailFile
from handrail.stores.memory import MemoryStore
from handrail.testing import Peer
from requirements import requirement

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
    def desk(self) -> Desk:
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


YES, NO = accept(allow=True), accept(allow=False)


@requirement("P-19", "SRV-602")
@pytest.mark.parametrize("revision", ASKS)
async def test_p19_the_person_at_the_client_is_asked_where_the_revision_can(revision: str, ran: Ran) -> None:
    shop = Shop()
    asked: list[str] = []
    async with shop.peer(revision, YES, NO, {"action": "decline"}, {"action": "cancel"}, asked=asked) as peer:
        ran(revision, "memory")
        assert (await peer.call("cancel", {"order": 7})).text == "order 7 is cancelled"
        for _ in range(3):  # a no, a refusal to answer, a dismissal
            answer = await peer.call("cancel", {"order": 7})
            assert answer.is_error and "was not approved" in answer.text
    assert shop.cancelled == [7]
    assert len(asked) == 4 and all('{"order":7}' in each and "cancel" in each and "shop" in each for each in asked)


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


@pytest.mark.parametrize(("edited", "ran_with"), [({"order": 8}, [8]), ({"order": "eight"}, []), ({"order": 13}, [])])
async def test_p19_edited_arguments_are_validated_and_decided_again(edited: Object, ran_with: list[int]) -> None:
    never = Rule(name="unlucky", verdict="deny", tools=["cancel"], arguments={"order": {"is": 13}})
    shop = Shop(approvals=Approvals(wait=0.01, round=0.001, by="operator"), policy=Policy([never]))
    async with shop.peer(R5) as peer:
        assert (await peer.call("cancel", {"order": 7})).is_error
        await shop.desk.decide(await shop.only(), True, by="operator", edited=edited)
        with contextlib.suppress(RemoteProtocolError):  # how a rule's no is told
            assert (await peer.call("cancel", {"order": 7})).is_error is not bool(ran_with)
    assert shop.cancelled == ran_with


@pytest.mark.parametrize("revision", ASKS)
async def test_what_is_remembered_is_narrow_ends_and_can_be_revoked(revision: str) -> None:
    shop = Shop()
    asked: list[str] = []
    remember = accept(allow=True, remember="for an hour")
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
        assert "nobody can be asked" in (await peer.call("cancel", {"order": 7})).text
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
    assert answer.is_error and "nobody can be asked" in answer.text and shop.cancelled == []


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
