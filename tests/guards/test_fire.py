"""Guarded servers under fire: killed at every step, raced by others on the same file, out of space, flooded."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import sha256
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from clients import ALL, R1, R2, R3, R4, R5, P
from faults import call, opening, until
from handrail.approvals.queue import ApprovalError, ApprovalQueue, Approvals
from handrail.audit.format import verify
from handrail.audit.log import open_trail
from handrail.audit.reader import TrailFile
from handrail.guards.identity import ApiKeys
from handrail.stores.sqlite import SqliteStore
from patience import PATIENCE, SOAK, in_time
from requirements import requirement
from servers_guarded import STEPS, Gate, Guarded, Nursery, Pipe, command
from servers_http import Client, closed as closed
from tests.transports.test_load import connect, head
from wires import Wire
from wires_http import HttpWire

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")

Object = dict[str, Any]
Ran = Callable[[str, str], None]

LATE = 0.03  # seconds within which a call that was approved is over, as a rule


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path)
    yield made
    made.close()


@pytest.fixture
def chance() -> random.Random:
    seed = int(os.environ.get("HANDRAIL_SEED") or random.randrange(10**6))
    print(f"HANDRAIL_SEED={seed}")
    return random.Random(seed)


class Effect(NamedTuple):
    what: str
    call: str
    approval: str


class Place:
    """A state file with an audit in it, and a file of effects."""

    def __init__(self, folder: Path, audit: str = "state.db") -> None:
        self.folder = folder
        self.state = folder / "handrail" / audit
        self.state.parent.mkdir(mode=0o700, parents=True)
        self._effects = folder / "effects"

    def options(self, **more: Any) -> Object:
        return {"audit": str(self.state), "effects": str(self._effects), **more}

    def records(self) -> list[Object]:
        """All of them; the trail has to be good."""
        lines = [*TrailFile(self.state).lines()] if self.state.exists() else []
        verdict = verify(lines)
        assert verdict.flaw is None, verdict
        assert not verdict.torn or self.state.suffix == ".jsonl"
        return [json.loads(line) for _, line in lines if line.endswith(b"\n")]

    def refusals(self) -> int:
        return [each["event"] for each in self.records()].count("refusal")

    def raw_effects(self) -> list[Effect]:
        text = self._effects.read_text() if self._effects.exists() else ""
        return [Effect(*line.split()) for line in text.splitlines()]

    def effects(self) -> list[Effect]:
        """What was done: none of it without an intent, nor, if it had to be approved, without a yes of its own."""
        found, records = self.raw_effects(), self.records()
        intents = {each["call"]: each for each in records if each["event"] == "intent"}
        decided = {each["approval"]: each for each in records if each.get("step") == "approved"}
        assert len({each.call for each in found}) == len(found), "a call was carried out twice"
        used = [each["agreed"] for each in intents.values() if "agreed" in each]
        assert len(set(used)) == len(used), "an approval was used twice"
        for each in found:
            assert each.call in intents, f"no intent: {each}"
            if each.approval != "-":
                intent = intents[each.call]
                assert intent["agreed"] == f"approval {each.approval}"
                assert intent["arguments_digest"] == digest({"order": int(each.what)})
                assert decided[each.approval]["number"] < intent["number"]
        return found

    def done(self, what: object) -> list[Effect]:
        return [each for each in self.effects() if each.what == str(what)]


def digest(arguments: Object) -> str:
    return "sha256:" + sha256(json.dumps(arguments, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# Approvals: who says yes, and how


class Way(NamedTuple):
    revision: str
    transport: str
    by: str  # the caller, the desk of another process, or the command

    @property
    def approvals(self) -> Object:
        return {} if self.by == "caller" else {"by": "operator", "wait": 30, "round": 0.3}


WAYS = [
    *(Way(revision, "stdio", "caller") for revision in (R3, R4, P, R5)),
    *(Way(revision, "http", "caller") for revision in (R4, R5)),
    *(Way(revision, "stdio", "desk") for revision in ALL),
    *(Way(revision, "http", "desk") for revision in (R2, R4, R5)),
    *(Way(revision, "stdio", "command") for revision in (R1, R4, R5)),
]


class Person:
    """Says yes once, and no ever after."""

    def __init__(self) -> None:
        self.asked = 0
        self.after_yes: Callable[[], object] = lambda: None

    def says_yes(self) -> bool:
        self.asked += 1
        if self.asked == 1:
            self.after_yes()
        return self.asked == 1

    def answer(self) -> Object:
        return {"action": "accept" if self.says_yes() else "decline"}


@asynccontextmanager
async def desk_of(place: Place) -> AsyncIterator[ApprovalQueue]:
    """A desk of this process on the same file."""
    store = SqliteStore(place.state)
    trail = open_trail(store)
    try:
        yield ApprovalQueue(store, Approvals(), trail=trail)
    finally:
        await trail.close()
        await store.close()


@asynccontextmanager
async def attended(place: Place, way: Way, person: Person) -> AsyncIterator[None]:
    """Somebody at the server decides whatever is asked, if it is the server's business."""
    if way.by == "caller":
        yield
        return
    async with desk_of(place) as desk:

        async def decide() -> None:
            async with desk._store.subscribe("approvals") as news:
                while True:
                    for each in await desk.open():
                        if way.by == "desk":
                            await desk.decide(each.id, person.says_yes(), by="operator")
                            continue
                        code, said = await command(
                            place.folder, "approve", each.id, "yes" if person.says_yes() else "no"
                        )
                        assert code == 0, said
                    with suppress(TimeoutError):  # who was killed could not tell
                        async with asyncio.timeout(0.5):
                            await anext(news)

        deciding = asyncio.create_task(decide())
        try:
            yield
        finally:
            deciding.cancel()
            with suppress(asyncio.CancelledError):
                await deciding


async def called(server: Guarded, way: Way, order: int, person: Person) -> Object | None:
    """The answer to a call, whatever was asked meanwhile; None if the server has gone."""
    wire: Wire = Pipe(way.revision, server) if way.transport == "stdio" else HttpWire(way.revision, server.url)
    calling = asyncio.create_task(_answer(wire, way, order, person))
    watching = asyncio.create_task(server.gone() if way.transport == "http" else asyncio.Event().wait())
    try:
        await asyncio.wait((calling, watching), return_when=asyncio.FIRST_COMPLETED)
        return calling.result() if calling.done() else None
    except (EOFError, ConnectionError):
        return None
    finally:
        calling.cancel()
        watching.cancel()
        await asyncio.gather(calling, watching, return_exceptions=True)
        with suppress(OSError, EOFError):
            await wire.close()


async def _answer(wire: Wire, way: Way, order: int, person: Person) -> Object:
    await wire.open({"elicitation": {}} if way.by == "caller" else {})
    params: Object = {"name": "cancel", "arguments": {"order": order}}
    ident = await wire.ask("tools/call", params)
    while True:
        message = wire.others.pop(0) if wire.others else await wire.receive()
        if message.get("method") == "elicitation/create":
            await wire.send({"jsonrpc": "2.0", "id": message["id"], "result": person.answer()})
        elif message.get("id") == ident and "method" not in message:
            result = message.get("result", {})
            if result.get("resultType") != "input_required":
                return dict(message)
            answers = {key: person.answer() for key in result.get("inputRequests", {})}
            more = {"inputResponses": answers} if answers else {}
            ident = await wire.ask("tools/call", {**params, "requestState": result["requestState"], **more})


def is_done(answer: Object | None) -> bool:
    assert answer is not None
    text = json.dumps(answer)
    done = "is cancelled" in text
    assert done or "was not approved" in text or "just been used by another call. Nothing was done" in text, answer
    return done


async def survived(nursery: Nursery, place: Place, way: Way, order: int, **fault: Any) -> tuple[int, bool]:
    """How often a call was carried out that was approved once, and then repeated; and whether its server was killed."""
    person = Person()
    options = place.options(approvals=way.approvals, http=way.transport == "http")
    after = fault.pop("after", None)
    async with attended(place, way, person):
        async with nursery.server(**options, **fault) as server:
            if after is not None:
                person.after_yes = partial(asyncio.get_running_loop().call_later, after, server.kill)
            first = await called(server, way, order, person)
            assert first is None or after is not None or not fault, f"it lives: {first}"
        before = place.done(order)
        async with nursery.server(**options) as server:
            is_repeated = is_done(await called(server, way, order, person))
    found = place.done(order)
    assert len(found) == len(before) + is_repeated
    assert first is None or (len(before) == 1) is is_done(first)
    return len(found), first is None


RUNS = dict(zip(STEPS, (1, 1, 1, 1, 1, 0, 0, 1, 1), strict=True))
"""How often it is carried out in the end: a yes outlives its server until the intent is written, and not longer."""


@requirement("P-19", "P-15")
@pytest.mark.parametrize("way", WAYS, ids="-".join)
async def test_p19_a_server_killed_between_yes_and_effect_runs_once_at_most(
    way: Way, nursery: Nursery, tmp_path: Path, ran: Ran
) -> None:
    place, at = Place(tmp_path), WAYS.index(way)
    for order, step in enumerate(STEPS if SOAK else {STEPS[at % 9], STEPS[(at + 4) % 9]}):
        assert await survived(nursery, place, way, order, dies=step) == (RUNS[step], True), step
    print(f"{'-'.join(way)}: killed {order + 1} times")
    ran(way.revision, way.transport)


@requirement("P-19", "P-15")
async def test_p19_a_server_killed_some_time_after_yes_runs_once_at_most(
    nursery: Nursery, tmp_path: Path, chance: random.Random
) -> None:
    ways = [way for way in WAYS if way.by != "command"]
    wanted, killed, tries = 200 if SOAK else 20, 0, 0
    ran: Counter[int] = Counter()
    while killed < wanted:  # those that were quicker than the kill do not count
        place, way = Place(tmp_path / str(tries)), chance.choice(ways)
        runs, was_killed = await survived(nursery, place, way, 7, after=chance.uniform(0.0, LATE))
        tries, killed = tries + 1, killed + was_killed
        ran[runs] += was_killed
    print(f"{killed} kills: {ran[0]} calls not carried out, {ran[1]} once")
    assert ran.total() == ran[0] + ran[1]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
async def test_without_a_fault_a_call_runs_once_and_its_repeat_asks_again(
    way: Way, nursery: Nursery, tmp_path: Path
) -> None:
    assert await survived(nursery, Place(tmp_path), way, 7) == (1, False)


# Two processes on one file


async def test_p15_whoever_reads_a_trail_takes_no_lock_of_its_process_away(tmp_path: Path) -> None:
    """Without its lock another process that leaves takes itself for the last one, and the log of the file with it."""
    place = Place(tmp_path)
    async with desk_of(place) as desk:
        await desk.revoke("nothing", by="operator")
        assert place.records() == []
        code, said = await command(place.folder, "approve")
        assert code == 0, said
        assert os.access(f"{place.state}-wal", os.R_OK)


async def many(server: Guarded, revision: str, count: int, tool: str = "cancel", **arguments: Any) -> list[Object]:
    """The answers to calls that are all under way at once."""
    wire = Pipe(revision, server)
    await wire.open()
    return await at_once(wire, {"name": tool, "arguments": arguments}, count)


async def at_once(wire: Wire, params: Object, count: int) -> list[Object]:
    idents = [await wire.ask("tools/call", params) for _ in range(count)]
    return [await wire.answer(each) for each in idents]


HELD: Object = {"by": "operator", "wait": 30, "round": 30}


@asynccontextmanager
async def two(nursery: Nursery, place: Place, **options: Any) -> AsyncIterator[tuple[Guarded, Guarded]]:
    async with nursery.server(**place.options(**options)) as one, nursery.server(**place.options(**options)) as other:
        yield one, other


@requirement("P-19")
@pytest.mark.parametrize("revision", [R1, R4, R5])
async def test_p19_calls_that_two_processes_hold_for_one_yes_run_once(
    revision: str, nursery: Nursery, tmp_path: Path, ran: Ran
) -> None:
    place = Place(tmp_path)
    async with two(nursery, place, approvals=HELD) as servers, desk_of(place) as desk:
        for order in range(50 if SOAK else 5):
            held = asyncio.gather(*(many(each, revision, 8, order=order) for each in servers))
            await desk.decide(await asked_of(desk, order), True, by="operator")
            # Those that were too late for this yes wait for another: they are told no.
            while not held.done():
                for late in await desk.open():
                    await desk.decide(late.id, False, by="operator")
                await asyncio.wait([held], timeout=0.05)
            answers = [is_done(answer) for each in await held for answer in each]
            assert (answers.count(True), len(place.done(order))) == (1, 1)
    ran(revision, "stdio")


async def asked_of(desk: ApprovalQueue, order: int) -> str:
    async with asyncio.timeout(PATIENCE), desk._store.subscribe("approvals") as news:
        while True:
            for each in await desk.open():
                if each.asked.arguments["order"] == order:
                    return each.id
            await anext(news)


async def test_an_approval_that_is_not_used_up_would_be_found(nursery: Nursery, tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with two(nursery, place, approvals=HELD, wrong="used twice") as servers, desk_of(place) as desk:
        held = asyncio.gather(*(many(each, R4, 1, order=7) for each in servers))
        await desk.decide(await asked_of(desk, 7), True, by="operator")
        await held
    with pytest.raises(AssertionError, match="used twice"):
        place.effects()


@requirement("P-19")
async def test_p19_of_two_people_who_decide_at_once_one_has_decided(nursery: Nursery, tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with nursery.server(**place.options(approvals=HELD)) as server, desk_of(place) as desk:
        for order in range(10 if SOAK else 2):
            held = asyncio.create_task(many(server, R4, 1, order=order))
            ident = await asked_of(desk, order)
            said = await asyncio.gather(*(command(place.folder, "approve", ident, word) for word in ("yes", "no")))
            (answer,) = await held
            assert sorted(code == 0 for code, _ in said) == [False, True], said
            assert is_done(answer) is (said[0][0] == 0) is bool(place.done(order))


KEYS = {name: ApiKeys.new() for name in ("alice", "bob")}
KEYED = {"http": True, "keys": {name: hashed for name, (_, hashed) in KEYS.items()}}


async def keyed(server: Guarded, name: str, tool: str, **arguments: Any) -> tuple[int, Object, dict[str, str]]:
    """A call over HTTP by somebody with a key: the status, the answer and the headers it came with."""
    client = Client(server.url, R5)
    message = client.call(1, tool, arguments)
    reply = await client.post(message, Authorization=f"Bearer {KEYS[name][0]}")
    return reply.status, await client.read(reply), reply.headers


@requirement("P-19")
@pytest.mark.parametrize(
    ("change", "ran_with"),
    [
        ("nothing", ["7"]),
        ("other principal", []),
        ("other argument", []),
        ("other tool", []),
        ("expired", []),
        ("edited", ["8"]),
        ("edited badly", []),
        ("used before", ["7"]),
    ],
)
async def test_p19_a_yes_is_good_for_that_call_in_another_process_and_for_no_other(
    change: str, ran_with: list[str], nursery: Nursery, tmp_path: Path, ran: Ran
) -> None:
    place = Place(tmp_path)
    quick = {"by": "operator", "wait": 0.01, "round": 0.01}
    options = place.options(approvals=quick, **KEYED)
    async with nursery.server(**options) as first, desk_of(place) as desk:
        assert (await keyed(first, "alice", "cancel", order=7))[1]["result"]["resultType"] == "input_required"
        ident = await asked_of(desk, 7)
        if change == "edited badly":
            with pytest.raises(ApprovalError, match="nothing is decided: order: expected integer"):
                await desk.decide(ident, True, by="operator", edited={"order": "eight"})
        else:
            await desk.decide(ident, True, by="operator", edited={"order": 8} if change == "edited" else None)
        if change == "used before":
            assert is_done((await keyed(first, "alice", "cancel", order=7))[1])
    changed: Object = {"description": "Cancels all."} if change == "other tool" else {}
    changed |= {"skipped": 901} if change == "expired" else {}
    async with nursery.server(**options, **changed) as second:
        who = "bob" if change == "other principal" else "alice"
        more = {"fast": True} if change == "other argument" else {}
        await keyed(second, who, "cancel", order=7, **more)
    assert [each.what for each in place.effects()] == ran_with
    ran(R5, "http")


@requirement("P-19")
async def test_p19_an_answer_replayed_to_another_process_runs_nothing_more(
    nursery: Nursery, tmp_path: Path, ran: Ran
) -> None:
    place = Place(tmp_path)
    async with two(nursery, place) as servers:
        wires = [Pipe(R5, each) for each in servers]
        for each in wires:
            await each.open({"elicitation": {}})
        params: Object = {"name": "cancel", "arguments": {"order": 7}}
        asked = (await wires[0].request("tools/call", params))["result"]
        answers = {key: {"action": "accept", "content": {}} for key in asked["inputRequests"]}
        params |= {"requestState": asked["requestState"], "inputResponses": answers}
        for _ in range(3):  # at once, and again
            await asyncio.gather(*(at_once(each, params, 4) for each in wires))
        assert len(place.done(7)) == 1
    ran(R5, "stdio")


# The audit


IN_FLIGHT = 64


async def loaded(server: Guarded, name: str, seconds: float | None, count: int = 10**9) -> set[str]:
    """Keep so many calls in flight until the server is killed, or all are answered; those that were."""
    answered: set[str] = set()
    marks = (f"{name}-{i}" for i in range(count))

    def send(mark: str) -> None:
        with suppress(ConnectionError):
            server.writer.write(call(R4, mark, "act", mark=mark) + b"\n")

    server.writer.write(b"\n".join(opening(R4)) + b"\n")
    await server.line()
    if seconds is not None:
        asyncio.get_running_loop().call_later(seconds, server.kill)
    for mark in islice(marks, IN_FLIGHT):
        send(mark)
    while len(answered) < count and (line := await server.line()).endswith(b"\n"):
        answer = json.loads(line)
        assert answer["result"]["content"][0]["text"] == answer["id"]
        answered.add(answer["id"])
        for mark in islice(marks, 1):
            send(mark)
    return answered


def missing(place: Place, answered: set[str]) -> tuple[set[str], set[str]]:
    """Calls that were answered and have no whole record; effects that have no intent."""
    records = place.records()
    ended = {each["call"] for each in records if each["event"] == "outcome"}
    begun = {each["arguments_digest"]: each["call"] for each in records if each["event"] == "intent"}
    known = set(begun.values())
    return (
        {mark for mark in answered if begun.get(digest({"mark": mark})) not in ended},
        {each.what for each in place.raw_effects() if each.call not in known},
    )


AUDITS = ["state.db", "trail.jsonl"]


@requirement("P-15", "SRV-614")
@pytest.mark.parametrize("audit", AUDITS)
async def test_p15_a_server_killed_under_load_has_recorded_what_it_did_and_answered(
    audit: str, nursery: Nursery, tmp_path: Path, chance: random.Random, ran: Ran
) -> None:
    total, count, answered, place = 0, 250 if SOAK else 25, set[str](), Place(tmp_path / "0", audit)
    for at in range(count):
        if at % 5 == 0:  # rounds that go on with one file
            place, answered = Place(tmp_path / f"{at}.", audit), set()
        async with nursery.server(**place.options()) as server:
            some = await loaded(server, str(at), chance.uniform(0.0, 0.1))
        answered |= some
        total += len(some)
        assert missing(place, answered) == (set(), set())
    print(f"{audit}: {count} kills, {total} calls answered")
    assert total
    ran(R4, "stdio")


@pytest.mark.parametrize("audit", AUDITS)
async def test_without_a_kill_every_call_is_answered_and_recorded(audit: str, nursery: Nursery, tmp_path: Path) -> None:
    place = Place(tmp_path, audit)
    async with nursery.server(**place.options()) as server:
        answered = await loaded(server, "all", None, 500)
    assert len(answered) == len(place.effects()) == 500 and missing(place, answered) == (set(), set())


@pytest.mark.parametrize(("wrong", "audit"), [*product(["effect first", "answer first"], AUDITS)])
async def test_a_server_with_a_wrong_order_would_be_found(
    wrong: str, audit: str, nursery: Nursery, tmp_path: Path
) -> None:
    for at in range(50):
        place = Place(tmp_path / str(at), audit)
        async with nursery.server(**place.options(wrong=wrong)) as server:
            unanswered, unrecorded = missing(place, await loaded(server, str(at), 0.05))
        if unrecorded if wrong == "effect first" else unanswered:
            return
    raise AssertionError("never found")


# A full disk


class Disk:
    """Room for what a server writes; without, it may not write to where its trail ends by now."""

    def __init__(self, server: Guarded) -> None:
        self._pid = server.pid
        self._room = resource.prlimit(self._pid, resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (4096, self._room[1]))

    def clear(self) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, self._room)


@requirement("P-17")
@pytest.mark.parametrize("audit", AUDITS)
@pytest.mark.parametrize("transport", ["stdio", "http"])
@pytest.mark.parametrize("revision", [R4, R5])
async def test_p17_on_a_full_disk_calls_are_refused_and_with_room_they_are_served_again(
    revision: str, transport: str, audit: str, nursery: Nursery, tmp_path: Path, gate: Gate, ran: Ran
) -> None:
    place = Place(tmp_path, audit)
    async with nursery.server(**place.options(http=transport == "http")) as server:
        wire: Wire = Pipe(revision, server) if transport == "stdio" else HttpWire(revision, server.url)
        await wire.open({"elicitation": {}})
        disk = Disk(server)
        for i in range(20):  # a file of lines is long enough then
            assert "result" in await wire.call("act", {"mark": f"before-{i}"})
        running = await wire.ask("tools/call", {"name": "held", "arguments": {"mark": "running", "gate": gate.path}})
        await until(lambda: bool(place.done("running")), "it runs")
        disk.fill()
        for i in range(3):
            answer = await wire.call("act", {"mark": f"full-{i}"})
            assert answer["error"]["code"] == -32603, answer
            assert "act was not called: it cannot be recorded now" in answer["error"]["message"]
            assert str(tmp_path) not in answer["error"]["message"]
            assert not isinstance(wire, HttpWire) or wire.status == 503
        refused = await wire.call("cancel", {"order": 7})
        assert "cannot be recorded now" in refused["error"]["message"], refused
        gate.let_go()
        told = await wire.answer(running)
        assert told["result"]["isError"] and "was carried out, but" in told["result"]["content"][0]["text"]
        disk.clear()
        for i in range(3):
            assert "result" in await wire.call("act", {"mark": f"after-{i}"})
        running = await wire.ask("tools/call", {"name": "held", "arguments": {"mark": "again", "gate": gate.path}})
        gate.let_go()
        assert (await wire.answer(running))["result"]["content"][0]["text"] == "x"
        await wire.close()
    done = [each.what for each in place.effects()]
    assert done == [*(f"before-{i}" for i in range(20)), "running", *(f"after-{i}" for i in range(3)), "again"]
    ran(revision, transport)


@requirement("P-17")
@pytest.mark.parametrize("then", ["answer", "ask", "fail"])
@pytest.mark.parametrize("is_full", [True, False])
async def test_p17_a_call_that_is_under_way_when_the_disk_is_full_is_answered_as_unrecorded(
    then: str, is_full: bool, nursery: Nursery, tmp_path: Path, gate: Gate, ran: Ran
) -> None:
    place = Place(tmp_path)
    async with nursery.server(**place.options()) as server:
        wire, disk = Pipe(R5, server), Disk(server)
        await wire.open({"elicitation": {}})
        wanted = {"mark": then, "gate": gate.path, "then": then}
        ident = await wire.ask("tools/call", {"name": "held", "arguments": wanted})
        await until(lambda: bool(place.raw_effects()), "it runs")
        if is_full:
            disk.fill()
        gate.let_go()
        result = (await wire.answer(ident))["result"]
    assert result["resultType"] == ("input_required" if then == "ask" and not is_full else "complete")
    assert is_full is ("could not be recorded and is withheld" in json.dumps(result))
    assert ("outcome" in {each["event"] for each in place.records()}) is not is_full
    ran(R5, "stdio")


# Limits


SHARED = {"shared": True, "principal": "20/hour", "tools": {"act": {"rate": "20/hour"}, "held": {"concurrent": 3}}}


@requirement("SRV-603", "P-30")
@pytest.mark.parametrize(("shared", "most"), [(None, 20), (True, 20), (False, 40)])
async def test_p30_two_processes_let_through_what_one_would_if_they_share_their_file(
    shared: bool | None, most: int, nursery: Nursery, tmp_path: Path, ran: Ran
) -> None:
    place, rates = Place(tmp_path), {**SHARED, "shared": shared}
    async with two(nursery, place, rates=rates) as servers:
        answers = await asyncio.gather(*(many(each, R4, 30, "act", mark="local") for each in servers))
    for answer in (each["result"] for some in answers for each in some):
        assert not answer["isError"] or "retry after" in answer["content"][0]["text"]
    assert len(place.effects()) == most
    ran(R4, "stdio")


@requirement("SRV-603", "P-30")
async def test_p30_a_principal_has_one_limit_in_two_processes_and_is_told_when_to_come_back(
    nursery: Nursery, tmp_path: Path, ran: Ran
) -> None:
    place = Place(tmp_path)
    rates = {"shared": True, "principal": "20/hour"}
    async with two(nursery, place, rates=rates, **KEYED) as servers:
        for who in KEYS:
            calls = (keyed(servers[at % 2], who, "act", mark=who) for at in range(40))
            answers = await asyncio.gather(*calls)
            assert sorted(status for status, _, _ in answers) == [200] * 20 + [429] * 20
            for status, answer, headers in answers:
                if status == 429:
                    assert 0 < answer["error"]["data"]["retryAfter"] <= int(headers["retry-after"]) <= 180
            assert len(place.done(who)) == 20
    ran(R5, "http")


@requirement("SRV-603", "P-30")
async def test_p30_slots_of_a_tool_are_shared_and_given_back(
    nursery: Nursery, tmp_path: Path, gate: Gate, ran: Ran
) -> None:
    place = Place(tmp_path)
    async with two(nursery, place, rates=SHARED) as servers:
        wanted = {"mark": "held", "gate": gate.path}
        held = asyncio.gather(*(many(each, R4, 5, "held", **wanted) for each in servers))
        await until(lambda: (len(place.raw_effects()), place.refusals()) == (3, 7), "three run, the others do not")
        gate.let_go(3)
        answers = [each["result"]["isError"] for some in await held for each in some]
        assert answers.count(False) == len(place.done("held")) == 3
        gate.let_go()
        async with asyncio.timeout(PATIENCE):
            while (await many(servers[0], R4, 1, "held", **wanted))[0]["result"]["isError"]:
                pass
    ran(R4, "stdio")


DEAR: Object = {"principal": "10/second", "tools": {"echo": {"cost": 0.001}, "look": {"cost": 0.001}}}
"""Ten calls a second; but these may be called a thousand times as often."""


class Caller:
    """Somebody with a key who calls a tool again and again over one connection, and looks at the clocks."""

    def __init__(self, url: str, name: str, tool: str, **arguments: Any) -> None:
        client = Client(url, R5)
        message = client.call(1, tool, arguments)
        body = json.dumps(message).encode()
        fields = {"Authorization": f"Bearer {KEYS[name][0]}", "Content-Length": str(len(body))}
        self.request = head(url, {**client.headers(message), **fields}) + body
        self._url = url

    def __enter__(self) -> Caller:
        self._socket = connect(self._url)
        return self

    def __exit__(self, *problem: object) -> None:
        self._socket.close()

    def times(self, calls: int = 300) -> list[float]:
        """What calls take, the quickest first."""
        took = []
        for _ in range(calls):
            began = time.perf_counter()
            self._socket.sendall(self.request)
            answer = self._socket.recv(65536)
            took.append(time.perf_counter() - began)
            assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"}")
        return sorted(took)


@asynccontextmanager
async def flooded(nursery: Nursery, url: str, name: str, connections: int) -> AsyncIterator[Guarded]:
    """A server that somebody with a key calls over so many connections as fast as it answers."""
    request = Caller(url, name, "act", mark=name).request.decode()
    wanted = {"url": url, "request": request, "connections": connections, "count": 10**9}
    async with nursery.server(flood=wanted) as flooding:
        answers = json.loads(await flooding.line())
        assert answers["429"] >= connections - 20, answers
        yield flooding


class Slowed(NamedTuple):
    """How many times as much the calls of one cost a server while another floods it."""

    cost: float  # of the server's processor, per call: how busy the machine is does not show in it
    tail: float  # of time, for 99 of 100 calls
    text: str


async def slowed(nursery: Nursery, folder: Path, rounds: int = 9, **options: Any) -> Slowed:
    settings = Place(folder).options(rates=DEAR, **KEYED, **options) | {"audit": None}
    async with (
        nursery.server(**settings) as idle,
        nursery.server(**settings) as busy,
        flooded(nursery, busy.url, "alice", IN_FLIGHT),
    ):
        costs: dict[Guarded, list[float]] = {idle: [], busy: []}
        tails: dict[Guarded, list[float]] = {idle: [], busy: []}
        with Caller(idle.url, "bob", "echo", text="hi") as one, Caller(busy.url, "bob", "echo", text="hi") as other:
            for server, caller in ((idle, one), (busy, other)) * rounds:
                before = server.cpu()
                took = caller.times()
                costs[server].append((server.cpu() - before) / len(took))
                tails[server].append(took[math.ceil(len(took) * 0.99) - 1])
    # What disturbs a measurement makes it larger: the least of each is the truest.
    (a, b), (c, d) = (min(each[idle]) for each in (costs, tails)), (min(each[busy]) for each in (costs, tails))
    figures = " ".join(f"{each * 1e6:.0f}" for each in (a, c, b, d))
    return Slowed(c / a, d / b, f"cost and p99, each idle and flooded, in µs: {figures}")


@requirement("P-30")
async def test_p30_a_flood_by_one_principal_does_not_slow_another(nursery: Nursery, tmp_path: Path, ran: Ran) -> None:
    found = await slowed(nursery, tmp_path)
    print(found.text)
    ran(R5, "http")
    assert found.cost <= 2, found.text
    in_time(found.tail, 2, f"99 of 100 calls, as a multiple ({found.text}),")


async def test_a_flood_that_is_refused_at_once_would_be_noticed(nursery: Nursery, tmp_path: Path) -> None:
    found = await slowed(nursery, tmp_path, 2, wrong="refused at once")
    assert found.cost > 2, found.text


@requirement("P-30")
@pytest.mark.parametrize("audit", [None, "state.db"])
async def test_p30_a_refusal_costs_less_than_service(
    audit: str | None, nursery: Nursery, tmp_path: Path, ran: Ran
) -> None:
    """Without the wait before it is told, for which calls would not come as fast as those that are served."""
    settings = Place(tmp_path).options(rates=DEAR, wrong="refused at once", **KEYED) | (
        {} if audit else {"audit": None}
    )
    async with nursery.server(**settings) as server:

        async def spent(who: str, tool: str, status: str) -> float:
            request = Caller(server.url, who, tool, text="hi").request.decode()
            wanted = {"url": server.url, "request": request, "connections": 16, "count": 1000}
            before = server.cpu()
            async with nursery.server(flood=wanted) as flooding:
                await flooding.line()
                last = json.loads(await flooding.line())
                cost = server.cpu() - before
            assert last[status] > 900, last
            return cost / Counter(last).total()

        # Two callers: one who has used up what there is would be refused what is cheap as well.
        found = [(await spent("alice", "look", "200"), await spent("bob", "stare", "429")) for _ in range(5)]
    # What disturbs a measurement makes it larger: the least of each is the truest.
    served, refused = map(min, zip(*found, strict=True))
    print(f"audit {audit}: served for {served * 1e6:.0f} µs, refused for {refused * 1e6:.0f} µs")
    assert refused < served
    ran(R5, "http")
