"""Two callers of one gateway: nothing of one reaches the other, and no caller's token leaves (GW-08, P-24, P-29)."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from base64 import urlsafe_b64decode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import upstreams_hostile as hostile
from handrail import Server
from handrail.guards import Policy, Rule
from handrail.guards.identity import ApiKeys
from requirements import requirement
from rigs_gateway import Rig, running, strings
from scripted_upstream import state_of
from servers_http import served
from wires_gateway import LegWire

Json = Any
Object = dict[str, Any]
Ran = Callable[[str, str], None]

R4, R5 = "2025-11-25", "2026-07-28"
SEED = 19
FORMS: Object = {"elicitation": {"form": {}}}
ABLE: Object = {"elicitation": {"form": {}, "url": {}}, "sampling": {}, "roots": {}}
ENDED = "has expired"  # of an interaction that cannot go on
KEYS = {name: ApiKeys.new() for name in ("alice", "bob")}
CARRIED = {
    "Cookie": "canary-cookie=1",
    "X-Canary": "canary-header",
    "Traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01",
}
COMMAND = [sys.executable, "-S", "-E", hostile.__file__]
BOXES = ("box", "web")
PAGE = 7

by_caller = pytest.mark.parametrize("revision", [R4, R5])
by_rig = pytest.mark.parametrize("rig", ["r4", "r4http", "r5", "r5http"])


class House:
    """A gateway over HTTP for two callers, and everything that its upstreams have received."""

    def __init__(self, folder: Path) -> None:
        self.diaries = [folder / "box", folder / "web"]
        self.rigs: dict[str, Rig] = {}
        self.url = ""
        self.server = Server("house", policy=Policy([Rule(verdict="allow")]), rates=None, page_size=PAGE)
        self._stack = AsyncExitStack()
        self._numbers = 0

    async def open(self) -> None:
        enter = self._stack.enter_async_context
        for name, revision, transport in (
            ("r4", R4, "stdio"),
            ("r4http", R4, "http"),
            ("r5", R5, "stdio"),
            ("r5http", R5, "http"),
        ):
            self.rigs[name] = await enter(running(revision, transport))
            self.server.include(self.rigs[name].target, name=name, prefix=f"{name}_", trusted=True)
        box, web = map(str, self.diaries)
        for name in ("box", "brittle"):
            self.server.include([*COMMAND, "ordinary", box], name=name, prefix=f"{name}_", trusted=True, new="allow")
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--http", web, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdin is not None
        self._stack.push_async_callback(process.wait)
        self._stack.callback(process.stdin.close)
        url = f"http://127.0.0.1:{int(await process.stdout.readline())}/ordinary/mcp"
        self.server.include(url, name="web", prefix="web_", trusted=True, headers={"X-Own": "own-credential"})
        await enter(self.server.serving())
        endpoint = self.server.asgi(auth=ApiKeys({name: stored for name, (_, stored) in KEYS.items()}))
        self.url = await enter(served(endpoint))

    async def close(self) -> None:
        await self._stack.aclose()

    def mark(self, name: str) -> str:
        self._numbers += 1
        return f"canary-{name}-{self._numbers}"

    @asynccontextmanager
    async def caller(self, name: str, revision: str, capabilities: Object | None = None) -> AsyncIterator[LegWire]:
        wire = LegWire(revision, self.url, "http")
        wire.extra = {"Authorization": f"Bearer {KEYS[name][0]}", **CARRIED}
        try:
            await wire.open(ABLE if capabilities is None else capabilities)
            yield wire
        finally:
            await wire.close()

    def received(self) -> str:
        """Everything that any of the upstreams was sent or started with."""
        diaries = [path.read_text() for path in self.diaries if path.exists()]
        return "\n".join([*diaries, *(json.dumps(rig.events) for rig in self.rigs.values())])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    house = House(tmp_path_factory.mktemp("house"))
    await house.open()
    yield house
    await house.close()


pytestmark = [pytest.mark.asyncio(loop_scope="module")]


def text_of(answer: Object) -> str:
    assert "result" in answer, answer
    return "\n".join(block["text"] for block in answer["result"]["content"])


def said_to(wire: LegWire) -> list[Object]:
    """What came and was not asked for."""
    return wire.others


async def ask(wire: LegWire, rig: str, mark: str, kind: str = "form") -> int:
    return await wire.ask("tools/call", {"name": f"{rig}_ask", "arguments": {"kind": kind, "mark": mark}})


async def question(wire: LegWire, ident: int) -> tuple[Json, Object, str]:
    """The question that a call is asked: how to answer it, what it is, and the state of it, if that is sent along."""
    if wire.stateless:
        result = (await wire.answer(ident))["result"]
        assert result["resultType"] == "input_required", result
        ((key, asked),) = result["inputRequests"].items()
        return key, asked, result["requestState"]
    asked = await wire.notice("elicitation/create")
    return asked["id"], asked, ""


async def reply(
    wire: LegWire, ident: int, asked: tuple[Json, Object, str], rig: str, mark: str, name: str, kind: str = "form"
) -> Object:
    """Answer a question with a name; the answer to the call."""
    key, _, state = asked
    given = {"action": "accept", "content": {"name": name}}
    if not wire.stateless:
        await wire.send({"jsonrpc": "2.0", "id": key, "result": given})
        return await wire.answer(ident)
    return await retry(wire, rig, mark, state, {key: given}, kind)


async def retry(
    wire: LegWire, rig: str, mark: str, state: Json, answers: Object, kind: str = "form", tool: str = "ask"
) -> Object:
    params: Object = {"name": f"{rig}_{tool}", "arguments": {"kind": kind, "mark": mark}}
    return await wire.request("tools/call", {**params, "requestState": state, "inputResponses": answers})


def check_has_not(wire: LegWire, *answers: Object, foreign: str) -> None:
    for text in strings([*answers, *said_to(wire)]):
        assert foreign not in text, text


# State


@requirement("GW-07", "P-29")
@by_caller
@pytest.mark.parametrize("box", BOXES)
async def test_what_one_has_left_in_an_upstream_is_not_the_others(
    house: House, revision: str, box: str, ran: Ran
) -> None:
    ran(revision, "http")
    canary = house.mark("state")
    async with house.caller("alice", revision) as alice, house.caller("bob", revision) as bob:
        assert text_of(await alice.call(f"{box}_remember", {"text": canary})) == "remembered"
        answer = await bob.call(f"{box}_recall")
        assert canary not in json.dumps(answer)
        assert text_of(await alice.call(f"{box}_recall")) == f"memory: {canary}"
        await bob.call(f"{box}_remember", {"text": "of bob"})
        assert text_of(await alice.call(f"{box}_recall")) == f"memory: {canary}"


@requirement("GW-07", "P-29")
@by_caller
@pytest.mark.parametrize(("upstream", "first"), [("box", "alice"), ("brittle", "bob")])
async def test_a_tool_of_one_session_is_not_shown_to_the_other(
    house: House, revision: str, upstream: str, first: str, ran: Ran
) -> None:
    """Whoever was there first."""
    ran(revision, "http")
    name = house.mark("tool")
    async with house.caller("alice", revision) as alice, house.caller("bob", revision) as bob:
        for wire in (alice, bob) if first == "alice" else (bob, alice):
            await wire.call(f"{upstream}_recall")
        assert text_of(await alice.call(f"{upstream}_grow", {"name": name})) == "grown"
        await house.server.upstreams[upstream].refresh()
        assert f"{upstream}_{name}" not in await listed(bob)
        answer = await bob.call(f"{upstream}_{name}")
        assert answer.get("error", {}).get("code") == -32602 or answer["result"]["isError"], answer


async def listed(wire: LegWire) -> list[str]:
    names: list[str] = []
    params: Object = {}
    while True:
        page = (await wire.request("tools/list", params))["result"]
        names += [each["name"] for each in page["tools"]]
        if "nextCursor" not in page:
            return names
        params = {"cursor": page["nextCursor"]}


@requirement("GW-09", "P-25", "P-29")
@by_caller
async def test_the_cursor_of_one_is_useless_to_the_other(house: House, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    async with house.caller("alice", revision) as alice, house.caller("bob", revision) as bob:
        cursor = (await alice.request("tools/list"))["result"]["nextCursor"]
        assert (await bob.request("tools/list", {"cursor": cursor}))["error"]["code"] == -32602
        assert "result" in await alice.request("tools/list", {"cursor": cursor})
        for raw in (hostile.R4, "page-2", ""):  # the upstream's own are none of ours
            assert (await alice.request("tools/list", {"cursor": raw}))["error"]["code"] == -32602


# Questions


@requirement("GW-10", "P-25", "P-29")
@by_caller
@by_rig
async def test_each_is_asked_its_own_questions(house: House, revision: str, rig: str, ran: Ran) -> None:
    ran(revision, "http")
    marks = house.mark("asked-alice"), house.mark("asked-bob")
    async with house.caller("alice", revision) as alice, house.caller("bob", revision) as bob:
        wires = alice, bob
        idents = [await ask(wire, rig, mark) for wire, mark in zip(wires, marks, strict=True)]
        asked = [await question(wire, ident) for wire, ident in zip(wires, idents, strict=True)]
        given = house.mark("name-alice"), house.mark("name-bob")
        second = await reply(bob, idents[1], asked[1], rig, marks[1], given[1])
        first = await reply(alice, idents[0], asked[0], rig, marks[0], given[0])
        assert given[0] in text_of(first)
        assert given[1] in text_of(second)
        check_has_not(alice, first, foreign=given[1])
        check_has_not(bob, second, foreign=given[0])
        check_has_not(bob, foreign=marks[0])


@requirement("GW-10", "P-25", "P-29")
async def test_the_answer_of_one_to_the_question_of_the_other_is_none(house: House, ran: Ran) -> None:
    ran(R4, "http")
    mark = house.mark("stolen")
    async with house.caller("alice", R4) as alice, house.caller("bob", R4) as bob:
        ident = await ask(alice, "r4", mark)
        asked = await question(alice, ident)
        for stolen in (asked[0], 1, "1", 0):
            stolen_answer = {"action": "accept", "content": {"name": "of bob"}}
            await bob.send({"jsonrpc": "2.0", "id": stolen, "result": stolen_answer})
        session, bob.session = bob.session, alice.session  # nor with the session of the other
        await bob.send(
            {"jsonrpc": "2.0", "id": asked[0], "result": {"action": "accept", "content": {"name": "of bob"}}}
        )
        bob.session = session
        answer = await reply(alice, ident, asked, "r4", mark, "of alice")
        assert "of alice" in text_of(answer)


@requirement("GW-14", "P-29")
@by_caller
@by_rig
async def test_who_cannot_be_asked_never_is_whoever_else_can(house: House, revision: str, rig: str, ran: Ran) -> None:
    """Also if it is the same principal."""
    ran(revision, "http")
    async with (
        house.caller("alice", revision) as able,
        house.caller("alice", revision, {}) as unable,
        house.caller("bob", revision, {}) as bob,
    ):
        mark = house.mark("able")
        ident = await ask(able, rig, mark)
        asked = await question(able, ident)
        for wire in (unable, bob):
            own = house.mark("unable")
            assert text_of(await wire.call(f"{rig}_who", {"mark": own})) == "{}"
            answer = await wire.answer(await ask(wire, rig, own))
            assert "error" in answer or answer["result"]["isError"], answer
            assert house.rigs[rig].has("undeclared", own)
            assert not [each for each in said_to(wire) if "id" in each]
        assert "of alice" in text_of(await reply(able, ident, asked, rig, mark, "of alice"))


# The state of a question: sealed, bound, used by nobody else


@requirement("GW-10", "GW-22", "P-25", "P-29")
@by_rig
async def test_the_state_of_one_is_useless_to_the_other(house: House, rig: str, ran: Ran) -> None:
    ran(R5, "http")
    mark = house.mark("foreign")
    async with house.caller("alice", R5) as alice, house.caller("bob", R5) as bob:
        key, _, state = await question(alice, await ask(alice, rig, mark))
        given = {key: {"action": "accept", "content": {"name": "of bob"}}}
        answer = await retry(bob, rig, mark, state, given)
        assert answer["error"]["code"] == -32602, answer
        check_has_not(bob, answer, foreign="of alice")
        given = {key: {"action": "accept", "content": {"name": "of alice"}}}
        assert "of alice" in text_of(await retry(alice, rig, mark, state, given))
        assert not heard_of(house.rigs[rig], "of bob")


def heard_of(rig: Rig, text: str) -> bool:
    return any(text in each for each in strings([event.get("message", {}) for event in rig.events]))


@requirement("GW-10", "GW-22", "P-25")
@by_rig
async def test_a_state_is_for_one_call_with_its_arguments(house: House, rig: str, ran: Ran) -> None:
    ran(R5, "http")
    mark, other = house.mark("bound"), house.mark("other")
    async with house.caller("alice", R5) as alice:
        key, _, state = await question(alice, await ask(alice, rig, mark))
        forged = {key: {"action": "accept", "content": {"name": "forged"}}}
        for answer in (
            await retry(alice, rig, other, state, forged),
            await retry(alice, rig, mark, state, forged, kind="twice"),
            await retry(alice, rig, mark, state, forged, tool="echo"),
            await retry(alice, "r4http" if rig != "r4http" else "r4", mark, state, forged),
            await retry(alice, rig, mark, "", forged),
            await retry(alice, rig, mark, 7, forged),
            await retry(alice, rig, mark, state + "x", forged),
            await retry(alice, rig, mark, state[:-1], forged),
        ):
            assert "error" in answer or answer["result"].get("isError") or "inputRequests" in answer["result"], answer
            assert "forged" not in json.dumps(answer.get("result", {})), answer
        given = {key: {"action": "accept", "content": {"name": "of alice"}}}
        assert "of alice" in text_of(await retry(alice, rig, mark, state, given))
        assert not heard_of(house.rigs[rig], "forged")


@requirement("GW-22", "P-25")
@pytest.mark.parametrize("rig", ["r4", "r5http"])
async def test_a_state_with_one_bit_changed_is_refused(house: House, rig: str, ran: Ran) -> None:
    ran(R5, "http")
    chance, mark = random.Random(SEED), house.mark("tampered")
    async with house.caller("alice", R5) as alice:
        key, _, state = await question(alice, await ask(alice, rig, mark))
        given = {key: {"action": "accept", "content": {"name": "of alice"}}}
        for at in [0, 1, len(state) // 2, *chance.sample(range(len(state) - 1), 17)]:
            letter = "A" if state[at] != "A" else "Q"
            answer = await retry(alice, rig, mark, state[:at] + letter + state[at + 1 :], given)
            assert answer.get("error", {}).get("code") == -32602, (at, answer)
        assert "of alice" in text_of(await retry(alice, rig, mark, state, given))


@requirement("GW-22")
@pytest.mark.parametrize("rig", ["r5", "r5http"])
async def test_the_state_of_the_upstream_is_sealed_and_comes_back_as_it_was(house: House, rig: str, ran: Ran) -> None:
    ran(R5, "http")
    mark = house.mark("sealed")
    async with house.caller("alice", R5) as alice:
        key, _, state = await question(alice, await ask(alice, rig, mark))
        inside = urlsafe_b64decode(state.rpartition(".")[2] + "=" * 3)
        assert mark not in state
        assert mark.encode() not in inside
        await retry(alice, rig, mark, state, {key: {"action": "accept", "content": {"name": "x"}}})
    calls = [event["message"]["params"] for event in house.rigs[rig].calls("ask", mark=mark)]
    assert [each.get("requestState") for each in calls] == [None, state_of(mark, 1)]


@requirement("GW-10", "P-25")
@pytest.mark.parametrize("rig", ["r4", "r4http"])
async def test_a_parked_call_is_resumed_once(house: House, rig: str, ran: Ran) -> None:
    ran(R5, "http")
    mark = house.mark("parked")
    async with house.caller("alice", R5) as alice:
        key, _, state = await question(alice, await ask(alice, rig, mark))
        given = {key: {"action": "accept", "content": {"name": "of alice"}}}
        params: Object = {"name": f"{rig}_ask", "arguments": {"kind": "form", "mark": mark}}
        params |= {"requestState": state, "inputResponses": given}
        idents = [await alice.ask("tools/call", params) for _ in range(3)]
        answers = [await alice.answer(ident) for ident in idents]
        done = [each for each in answers if not each.get("result", {"isError": True})["isError"]]
        assert len(done) == 1, answers
        assert ENDED in text_of(await retry(alice, rig, mark, state, given))
    assert len(house.rigs[rig].calls("ask", mark=mark)) == 1


@requirement("GW-10", "P-29", "P-30")
async def test_the_parked_calls_of_one_leave_room_for_the_other(house: House, ran: Ran) -> None:
    ran(R5, "http")
    async with house.caller("alice", R5) as alice, house.caller("bob", R5) as bob:
        marks = [house.mark("many") for _ in range(40)]
        answers = [await alice.answer(await ask(alice, "r4http", mark)) for mark in marks]
        parked = [each for each in answers if each["result"]["resultType"] == "input_required"]
        assert 0 < len(parked) <= 32, len(parked)
        mark = house.mark("bob")
        ident = await ask(bob, "r4http", mark)
        asked = await question(bob, ident)
        assert "of bob" in text_of(await reply(bob, ident, asked, "r4http", mark, "of bob"))


# What is said about a call


@requirement("GW-13", "P-29")
@by_caller
@by_rig
async def test_progress_goes_to_its_own_caller_whatever_its_token(
    house: House, revision: str, rig: str, ran: Ran
) -> None:
    ran(revision, "http")
    marks = house.mark("progress-alice"), house.mark("progress-bob")
    upstream = house.rigs[rig]
    async with house.caller("alice", revision) as alice, house.caller("bob", revision) as bob:
        wires = alice, bob
        idents = []
        for wire, mark, at in zip(wires, marks, (1, 2), strict=True):
            params = {"name": f"{rig}_slow", "arguments": {"mark": mark, "at": at}}
            idents.append(await wire.ask("tools/call", params, progressToken="same"))
            await upstream.became("started", mark)
        for wire, mark, ident, at in zip(wires, marks, idents, (1, 2), strict=True):
            upstream.command(do="release", mark=mark)
            assert text_of(await wire.answer(ident)) == "released"
            notes = [each["params"] for each in said_to(wire) if each.get("method") == "notifications/progress"]
            assert [(each["progressToken"], each["progress"]) for each in notes] == [("same", at)]


@requirement("P-29")
@by_caller
@by_rig
async def test_log_messages_go_to_the_caller_of_their_call(house: House, revision: str, rig: str, ran: Ran) -> None:
    ran(revision, "http")
    marks = house.mark("log-alice"), house.mark("log-bob")
    async with house.caller("alice", revision) as alice, house.caller("bob", revision) as bob:
        wires = alice, bob
        if not alice.stateless:
            for wire in wires:
                await wire.request("logging/setLevel", {"level": "info"})
        level: Object = {"logLevel": "info"} if alice.stateless else {}
        both = [wire.call(f"{rig}_log", {"mark": mark}, **level) for wire, mark in zip(wires, marks, strict=True)]
        answers = await asyncio.gather(*both)
        assert [text_of(each) for each in answers] == ["logged", "logged"]
        for wire, own, foreign in ((alice, marks[0], marks[1]), (bob, marks[1], marks[0])):
            check_has_not(wire, foreign=foreign)
            if rig != "r5":  # a pipe of all callers does not tell whose call a message is about
                assert own in json.dumps(said_to(wire))


@requirement("GW-12", "P-25", "P-29")
@by_rig
async def test_a_call_of_one_is_not_cancelled_by_the_other(house: House, rig: str, ran: Ran) -> None:
    ran(R4, "http")
    mark, upstream = house.mark("cancel"), house.rigs[rig]
    async with house.caller("alice", R4) as alice, house.caller("bob", R4) as bob:
        ident = await alice.ask("tools/call", {"name": f"{rig}_slow", "arguments": {"mark": mark}})
        await upstream.became("started", mark)
        for number in range(ident + 3):
            await bob.notify("notifications/cancelled", {"requestId": number})
        session, bob.session = bob.session, alice.session
        await bob.notify("notifications/cancelled", {"requestId": ident})
        bob.session = session
        await bob.call(f"{rig}_echo", {"text": "x"})
        assert not upstream.has("cancelled", mark)
        upstream.command(do="release", mark=mark)
        assert text_of(await alice.answer(ident)) == "released"


@requirement("GW-15", "P-14", "P-29", "P-34")
@by_caller
async def test_what_an_upstream_said_when_it_died_is_told_to_nobody_else(house: House, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    canary, own = house.mark("dying-alice"), house.mark("dying-bob")
    async with house.caller("alice", revision) as alice, house.caller("bob", revision) as bob:
        await bob.call("box_remember", {"text": own})
        first = await alice.call("box_crash", {"text": canary})
        assert first["result"]["isError"], first
        assert text_of(await bob.call("box_recall")) == f"memory: {own}"  # its own connection is not touched
        second = await bob.call("box_crash", {"text": own})
        third = await bob.call("box_recall")
        check_has_not(bob, second, third, foreign=canary)
        check_has_not(alice, first, await alice.call("box_recall"), foreign=own)


@requirement("P-14", "P-29", "P-30")
async def test_the_crashes_of_one_do_not_close_the_upstream_for_the_other(house: House, ran: Ran) -> None:
    ran(R4, "http")
    async with house.caller("alice", R4) as alice, house.caller("bob", R4) as bob:
        await bob.call("brittle_remember", {"text": "of bob"})
        for _ in range(3):
            assert (await alice.call("brittle_crash", {"text": "x"}))["result"]["isError"]
        assert text_of(await bob.call("brittle_recall")) == "memory: of bob"


@requirement("GW-15", "P-29")
@by_rig
async def test_the_error_of_one_is_told_to_no_other(house: House, rig: str, ran: Ran) -> None:
    ran(R4, "http")
    canary = house.mark("error")
    async with house.caller("alice", R4) as alice, house.caller("bob", R4) as bob:
        first = alice.call(f"{rig}_error", {"code": 4711, "mark": canary})
        second = bob.call(f"{rig}_error", {"code": 4712, "mark": house.mark("error-bob")})
        answers = await asyncio.gather(first, second)
        assert [each["error"]["code"] for each in answers] == [4711, 4712]
        check_has_not(bob, answers[1], foreign=canary)


# Credentials: the last test, which looks at all that was sent


def secrets() -> Iterator[str]:
    for key, stored in KEYS.values():
        yield from (key, key[3:], stored.partition(":")[2], key[8:30])
    yield from ("canary-cookie", "canary-header")


@requirement("GW-08", "P-24", "P-29")
async def test_no_upstream_has_ever_received_what_belongs_to_a_caller(house: House, ran: Ran) -> None:
    """Headers, environments, arguments and messages of all upstreams; the twin finds what was meant for them."""
    ran(R4, "http")
    planted, sessions = house.mark("planted"), []
    for revision in (R4, R5):
        for name in KEYS:
            async with house.caller(name, revision) as wire:
                sessions.append(wire.session)
                for upstream in (*house.rigs, *BOXES):
                    assert text_of(await wire.call(f"{upstream}_echo", {"text": planted})) == planted
    received = house.received()
    assert received.count(planted) >= 24
    assert "own-credential" in received
    assert '"kind": "environment"' in received
    for secret in (*secrets(), *filter(None, sessions)):
        assert secret not in received
    for word in ("authorization", "cookie", "x-canary", "last-event-id", "origin"):
        headers = [event["headers"] for rig in house.rigs.values() for event in rig.events if event["kind"] == "http"]
        assert headers
        assert not [each for each in headers if word in each]
