"""Kill -9 of an upstream and of the gateway: each call settles and tells the truth, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from faults import gone, rounds, until
from gateways_attacked import OPTIONS
from patience import PATIENCE, SOAK
from requirements import requirement
from standing import children_of
from wires import StdioWire, spawn

Json = Any
Object = dict[str, Any]
Ran = Callable[[str, str], None]

R4, R5 = "2025-11-25", "2026-07-28"
SEED = int(os.environ.get("HANDRAIL_SEED", "19"))
FORMS: Object = {"elicitation": {"form": {}}}
ACCEPT: Object = {"action": "accept", "content": {}}
UPSTREAMS = {"old": "boundary", "new": "new_boundary"}  # which asks by a request, and by an answer
WORK_STEPS = ("call", "done", "half", "result")  # where somebody is killed, in the order of the messages
QUESTION_STEPS = ("asked", "question", "answer", *WORK_STEPS)
ROUNDS = 130 if SOAK else 4
SHORT = 10.0  # seconds that a gateway waits for an upstream: what hangs is known before patience ends
AT_ONCE = 8  # calls in flight when somebody is killed


class Place:
    """Where a gateway keeps its records, and where its upstreams note what they do."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.diary = folder / "diary"
        self.trail = folder / "trail.db"
        self.options: Object = {"diary": str(self.diary), "audit": str(self.trail), "upstreams": UPSTREAMS, **options}

    def notes(self, kind: str) -> list[Object]:
        lines = self.diary.read_text().splitlines() if self.diary.exists() else []
        return [each for each in map(json.loads, lines) if each["kind"] == kind]

    def done(self, mark: str) -> int:
        """How often a call with this mark has had its effect."""
        return sum(each["mark"] == mark for each in self.notes("done"))

    def pids(self) -> set[int]:
        """Of all upstreams that were ever started."""
        return {each["pid"] for each in self.notes("begun")}

    @asynccontextmanager
    async def gateway(self, revision: str) -> AsyncIterator[Caller]:
        os.environ[OPTIONS] = json.dumps(self.options)
        async with spawn("gateways_attacked:made") as process:
            caller = Caller(StdioWire(revision, process))
            try:
                await caller.open()
                yield caller
            finally:
                await caller.close()


class Lost(Exception):
    """The gateway has gone before it answered."""


class Caller:
    """A client of a gateway in a process of its own, with calls in flight; it says yes to what it is asked."""

    def __init__(self, wire: StdioWire) -> None:
        self.wire = wire
        self.pid = wire.process.fork.pid
        self.asked: list[Object] = []
        self.on_question: Callable[[], None] = lambda: None
        self.on_reply: Callable[[], None] = lambda: None
        self._waiting: dict[Json, asyncio.Future[Object]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._is_lost = False

    async def open(self) -> None:
        await self.wire.open(FORMS)
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    async def _read(self) -> None:
        try:
            while True:
                message = json.loads(await self.wire.read())
                if "method" not in message:
                    self._waiter(message["id"]).set_result(message)
                elif "id" in message:
                    self.asked.append(message)
                    self.on_question()
                    await self.wire.send({"jsonrpc": "2.0", "id": message["id"], "result": ACCEPT})
                    self.on_reply()
        except (EOFError, ConnectionError, AssertionError):  # also in the middle of a line
            self._is_lost = True
            for each in self._waiting.values():
                if not each.done():
                    each.set_result({})

    def _waiter(self, ident: Json) -> asyncio.Future[Object]:
        """The answer to a request; it may come before the one who waits for it."""
        return self._waiting.setdefault(ident, asyncio.get_running_loop().create_future())

    async def request(self, method: str, params: Object) -> Object:
        """The answer; `Lost` if the gateway has gone before."""
        try:
            waiter = self._waiter(await self.wire.ask(method, params))
        except ConnectionError:
            raise Lost from None
        if not self._is_lost:
            async with asyncio.timeout(PATIENCE):
                await waiter
        if not waiter.done() or not waiter.result():
            raise Lost
        return waiter.result()

    async def call(self, name: str, arguments: Object, more: Object | None = None) -> Settled:
        """Call until there is an end to it; what it was asked last, if it was asked by an answer."""
        last: Object = more or {}
        try:
            while True:
                answer = await self.request("tools/call", {"name": name, "arguments": arguments, **last})
                result = answer.get("result", {})
                if result.get("resultType") != "input_required":
                    return Settled(answer, last)
                asked: Object = result.get("inputRequests", {})
                last = {"inputResponses": dict.fromkeys(asked, ACCEPT), "requestState": result["requestState"]}
                self.on_question()
        except Lost:
            return Settled({}, last)


class Settled(NamedTuple):
    """How a call has ended: the answer, empty if the gateway was lost; and the last answers that were sent for it."""

    answer: Object
    last: Object

    @property
    def text(self) -> str:
        if "error" in self.answer:
            return str(self.answer["error"]["message"])
        return "\n".join(block["text"] for block in self.answer["result"]["content"])

    @property
    def verdict(self) -> str:
        """`done`, `nothing`, `unknown`, `not done` or `lost`; anything else is no verdict."""
        if not self.answer:
            return "lost"
        if not self.answer.get("result", {"isError": True})["isError"]:
            return "done" if self.text == "done" else "not done"
        lower = self.text.lower()
        if "nothing was done" in lower:
            return "nothing"
        if "outcome is unknown" in lower:
            return "unknown"
        raise AssertionError(f"no verdict: {self.answer}")


def check_truth(place: Place, settled: Settled, mark: str) -> str:
    """What is told of a call is what its upstream has on record."""
    verdict, done = settled.verdict, place.done(mark)
    if verdict == "done":
        assert done == 1, (mark, done, settled)
    if verdict in ("nothing", "not done"):
        assert done == 0, (mark, done, settled)
    assert done <= 1, (mark, done, settled)
    return verdict


async def check_is_empty(pids: set[int]) -> None:
    await until(lambda: all(map(gone, pids)), "nothing of the gateway is left")


def sampled(cases: list[Any], count: int) -> list[Any]:
    """All of them in the long run, else a few that the seed chooses."""
    return cases if SOAK else random.Random(SEED).sample(cases, count)


# An upstream is killed


UPSTREAM_KILLS = [
    (revision, upstream, tool, step)
    for revision in (R4, R5)
    for upstream in UPSTREAMS
    for tool, steps in (("work", WORK_STEPS), ("question", QUESTION_STEPS))
    for step in steps
]


@requirement("GW-10", "GW-15", "GW-17", "P-14")
@pytest.mark.parametrize("revision", [R4, R5])
async def test_an_upstream_that_is_killed_at_any_message_costs_one_call_a_true_error(
    revision: str, tmp_path: Path, ran: Ran
) -> None:
    """Of all boundaries in turn: the other upstream answers all the while, and the next call finds it started anew."""
    ran(revision, "stdio")
    print(f"HANDRAIL_SEED={SEED}")
    cases = [case for case in UPSTREAM_KILLS if case[0] == revision]
    verdicts: Counter[str] = Counter()
    for number, (_, upstream, tool, step) in enumerate(sampled(cases, 6)):
        folder = tmp_path / str(number)
        folder.mkdir()
        place = Place(folder)
        async with place.gateway(revision) as caller:
            other = "old" if upstream == "new" else "new"
            both = (
                caller.call(f"{upstream}_{tool}", {"mark": "m", "at": step}),
                caller.call(f"{other}_work", {"mark": "o"}),
            )
            settled, good = await asyncio.gather(*both)
            assert check_truth(place, good, "o") == "done"
            try:
                verdict = check_truth(place, settled, "m")
                if step == "result" or (upstream, step) == ("new", "question"):  # what it had to say is on its way
                    assert verdict in ("done", "unknown")
                else:
                    assert verdict != "done"
                if step == "result":  # that it dies is noticed when it is called, or before
                    check_truth(place, await caller.call(f"{upstream}_{tool}", {"mark": "last"}), "last")
                again = await caller.call(f"{upstream}_{tool}", {"mark": "again"})
                assert check_truth(place, again, "again") == "done"
            except AssertionError as problem:
                problem.add_note(f"{upstream} {tool} {step}")
                raise
            verdicts[verdict] += 1
            alive = place.pids() | children_of(caller.pid)
        await check_is_empty(alive)
    print(verdicts)


# The gateway is killed


CLIENT_STEPS = ("got", "replied")  # of the caller: it was asked; it has answered
GATEWAY_KILLS = [
    (upstream, tool, step)
    for upstream in UPSTREAMS
    for tool, steps in (("work", WORK_STEPS), ("question", (*QUESTION_STEPS, *CLIENT_STEPS)))
    for step in steps
]


@requirement("GW-10", "GW-22", "P-13", "P-14")
@pytest.mark.parametrize("revision", [R4, R5])
async def test_a_gateway_that_is_killed_at_any_message_leaves_no_process_and_no_second_effect(
    revision: str, tmp_path: Path, ran: Ran
) -> None:
    """The next gateway serves the caller that comes back with its answers: it is told the truth, or asked anew."""
    ran(revision, "stdio")
    print(f"HANDRAIL_SEED={SEED}")
    for number, (upstream, tool, step) in enumerate(sampled(GATEWAY_KILLS, 5)):
        folder = tmp_path / str(number)
        folder.mkdir()
        place = Place(folder, upstreams={**UPSTREAMS, "deaf": "never_ends"})
        name, arguments = f"{upstream}_{tool}", {"mark": "m"}
        try:
            async with place.gateway(revision) as caller:
                await caller.call("deaf_echo", {"text": "x"})
                if step == "got" or (step == "replied" and revision == R5):
                    caller.on_question = caller.kill
                elif step == "replied":
                    caller.on_reply = caller.kill
                else:
                    arguments |= {"at": step, "kill": "parent"}
                everything = place.pids() | children_of(caller.pid) | {caller.pid}
                settled = await caller.call(name, arguments)
                await check_is_empty(everything | place.pids())
                before = place.done("m")
                assert check_truth(place, settled, "m") in ("lost", "done")
            place.options["upstreams"] = UPSTREAMS
            async with place.gateway(revision) as caller:
                if settled.last and upstream == "old":  # what waited has gone with its gateway: it is not run again
                    again = await caller.request("tools/call", {"name": name, "arguments": arguments, **settled.last})
                    assert "expired" in Settled(again, {}).text
                    assert place.done("m") == before
                fresh = await caller.call(name, {"mark": "fresh"})
                assert check_truth(place, fresh, "fresh") == "done"
        except AssertionError as problem:
            problem.add_note(f"{upstream} {tool} {step}")
            raise
        await check_is_empty(place.pids())


@requirement("P-13", "P-19")
@pytest.mark.parametrize("revision", [R4, R5])
async def test_an_approval_is_used_once_though_the_gateway_is_killed(revision: str, tmp_path: Path, ran: Ran) -> None:
    ran(revision, "stdio")
    cases = [(upstream, step) for upstream in UPSTREAMS for step in WORK_STEPS]
    for number, (upstream, step) in enumerate(sampled(cases, 4)):
        folder = tmp_path / str(number)
        folder.mkdir()
        place = Place(folder, asks=["*_work"])
        name = f"{upstream}_work"
        async with place.gateway(revision) as caller:
            arguments: Object = {"mark": "m", "at": step, "kill": "parent"}
            settled = await caller.call(name, arguments)
            everything = place.pids() | children_of(caller.pid)
            assert caller.asked or settled.last, "a person was asked"
            assert settled.verdict == "lost"
        await check_is_empty(everything)
        before = place.done("m")  # the upstream outlives its gateway for a moment
        assert before <= 1
        async with place.gateway(revision) as caller:
            if settled.last:  # an approval is for these very arguments
                params = {"name": name, "arguments": arguments, **settled.last}
                replayed = await caller.request("tools/call", params)
                assert replayed.get("result", {}).get("isError", True) is True, replayed
            assert check_truth(place, await caller.call(name, {"mark": "fresh"}), "fresh") == "done"
            assert place.done("m") == before
        await check_is_empty(place.pids())


# Many calls at once


@requirement("GW-10")
@pytest.mark.parametrize("revision", [R4, R5])
async def test_a_question_finds_its_caller_among_other_calls(revision: str, tmp_path: Path, ran: Ran) -> None:
    """A pipe does not tell which call asks; the one that ends first takes no question with it."""
    ran(revision, "stdio")
    place = Place(tmp_path, timeout=SHORT)
    async with place.gateway(revision) as caller:
        await caller.call("old_work", {"mark": "first"})
        for number in range(3):
            marks = [f"{number}-{each}" for each in range(4)]
            tools = ("question", "work", "question", "work")
            calls = [caller.call(f"old_{tool}", {"mark": mark}) for tool, mark in zip(tools, marks, strict=True)]
            settled = await asyncio.gather(*calls)
            assert [check_truth(place, each, mark) for each, mark in zip(settled, marks, strict=True)] == ["done"] * 4


@requirement("GW-15", "GW-17", "P-13", "P-14")
async def test_all_calls_in_flight_settle_whoever_is_killed(tmp_path: Path, ran: Ran) -> None:
    """0 of them hang; at least 1,000 in the long run."""
    print(f"HANDRAIL_SEED={SEED}")
    verdicts: Counter[str] = Counter()

    async def one(number: int) -> None:
        chance = random.Random(f"{SEED} {number}")
        revision, whose = chance.choice((R4, R5)), chance.choice(("upstream", "gateway", "moment"))
        ran(revision, "stdio")
        folder = tmp_path / str(number)
        folder.mkdir()
        place = Place(folder, timeout=SHORT)
        async with place.gateway(revision) as caller:
            fatal = chance.randrange(AT_ONCE)
            calls = []
            for mark in range(AT_ONCE):
                tool = chance.choice(("work", "question"))
                arguments: Object = {"mark": str(mark)}
                if mark == fatal and whose != "moment":
                    arguments["at"] = chance.choice(QUESTION_STEPS if tool == "question" else WORK_STEPS)
                    arguments["kill"] = "parent" if whose == "gateway" else "itself"
                calls.append(asyncio.create_task(caller.call(f"{chance.choice(('old', 'new'))}_{tool}", arguments)))
            if whose == "moment":
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                pids = sorted(place.pids())
                for pid in pids[:: chance.choice((1, 2))]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            settled = await asyncio.gather(*calls)
            try:
                for mark, each in enumerate(settled):
                    verdicts[check_truth(place, each, str(mark))] += 1
            except AssertionError as problem:
                problem.add_note(f"round {number}: {whose} is killed, {revision}")
                raise
            everything = place.pids() | children_of(caller.pid)
        await check_is_empty(everything)

    await rounds(ROUNDS, one, at_once=2)
    print(verdicts)
    assert verdicts.total() == ROUNDS * AT_ONCE
    if SOAK:
        assert verdicts.total() >= 1_000
        assert {"done", "unknown", "lost"} <= verdicts.keys()


async def test_the_twin_of_them_all_does_everything_once(tmp_path: Path) -> None:
    for revision in (R4, R5):
        folder = tmp_path / revision
        folder.mkdir()
        place = Place(folder, asks=["new_work"])
        async with place.gateway(revision) as caller:
            names = [f"{upstream}_{tool}" for upstream in UPSTREAMS for tool in ("work", "question")]
            settled = await asyncio.gather(*(caller.call(name, {"mark": name}) for name in names))
            assert [check_truth(place, each, name) for each, name in zip(settled, names, strict=True)] == ["done"] * 4
        await check_is_empty(place.pids())
