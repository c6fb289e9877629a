"""What a call waits for at the disk, and what becomes of it if the disk is slow, full, or never answers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from handrail import Call, Server
from handrail.approvals.queue import Approval, Approvals
from handrail.audit.log import Callback, RecordBody, Trail, TrailError, open_trail
from handrail.audit.reader import TrailFile
from handrail.engine import inflight as flight
from handrail.engine.pipeline import Handler, Middleware
from handrail.guards.limits import Rates, ToolRate
from handrail.guards.policy import Policy, Rule
from handrail.model import Object, Principal, ToolResult
from handrail.stores import Delete, Put, Store
from handrail.stores.memory import MemoryStore
from handrail.testing import Peer
from handrail.transports.stdio import StdioConnection
from patience import PATIENCE
from requirements import requirement

LATEST = "2025-11-25"
FULL = TrailError("the disk is full")
MODES = ("inline", "waits", "blocks")

seen: ContextVar[str] = ContextVar("seen", default="")


class Disk:
    """A trail that writes when it is told to."""

    def __init__(self) -> None:
        self.store: Store | None = MemoryStore()
        self.records: list[Object] = []
        self.waiting: asyncio.Queue[tuple[Object, Callback]] = asyncio.Queue()

    async def write(self, record: RecordBody, changes: Sequence[Put | Delete] = ()) -> bool:
        assert self.store is not None
        if changes and not await self.store.commit(changes):
            return False
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.submit(record, lambda problem: done.set_exception(problem) if problem else done.set_result(None))
        await done
        return True

    def submit(self, record: RecordBody, callback: Callback | None = None) -> None:
        self.records.append(to_builtins(record))
        if callback is not None:
            self.waiting.put_nowait((self.records[-1], callback))

    async def close(self) -> None: ...

    async def next(self, event: str) -> Callback:
        async with asyncio.timeout(PATIENCE):
            record, then = await self.waiting.get()
        assert record["event"] == event
        return then

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(each["event"], each.get("outcome", "")) for each in self.records]


class Bench:
    """A server whose disk is in the test's hands."""

    def __init__(self, **options: Any) -> None:
        seen.set("outside")
        self.disk = Disk()
        self.ran: list[str] = []
        self.server = Server("bench", audit=self.disk, **options)

        @self.server.tool(inline=True)
        def inline() -> str:
            assert seen.get() == "outside"
            seen.set("inside")
            self.ran.append("inline")
            return "done"

        @self.server.tool
        async def waits() -> str:
            assert seen.get() == "outside"
            self.ran.append("waits")
            async with asyncio.timeout(PATIENCE):
                await asyncio.sleep(0)
            assert asyncio.current_task() is not None
            return "done"

        @self.server.tool
        def blocks() -> str:
            self.ran.append("blocks")
            return "done"

    def peer(self) -> Peer:
        return Peer(self.server, revision=LATEST)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@requirement("P-15")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("middleware", [False, True], ids=["plain", "middleware"])
async def test_p15_a_tool_waits_for_its_intent_and_an_answer_for_its_outcome(mode: str, middleware: bool) -> None:
    bench = Bench()
    if middleware:
        bench.server.middleware(lambda call, inner: asyncio.wait_for(inner(call), PATIENCE))
    async with bench.peer() as peer:
        call = asyncio.create_task(peer.call(mode))
        begin = await bench.disk.next("intent")
        await turns()
        assert not bench.ran
        begin(None)
        answer = await bench.disk.next("outcome")
        await turns()
        assert bench.ran == [mode] and not call.done()
        answer(None)
        assert (await call).text == "done"
    assert bench.disk.told == [("intent", ""), ("outcome", "ok")]
    assert seen.get() == "outside"  # what a tool sets is its own


async def again(call: Call, inner: Handler) -> ToolResult:
    await inner(call)
    return await inner(call)


async def twice_at_once(call: Call, inner: Handler) -> ToolResult:
    results = await asyncio.gather(inner(call), inner(call))
    return results[0]


@requirement("P-15")
@pytest.mark.parametrize("middleware", [again, twice_at_once])
async def test_p15_a_call_that_middleware_runs_twice_has_an_outcome_and_an_answer(
    tmp_path: Path, middleware: Middleware
) -> None:
    path = tmp_path / "calls.jsonl"
    server = Server("twice", audit=path)
    server.middleware(middleware)

    @server.tool
    async def works() -> str:
        await asyncio.sleep(0)
        return "done"

    async with Peer(server, revision=LATEST) as peer:
        assert (await peer.call("works")).text == "done"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["event"] for each in records[1:]] == ["intent", "intent", "outcome"]
    assert records[-1]["outcome"] == "ok"


@requirement("P-17")
@pytest.mark.parametrize("mode", MODES)
async def test_p17_what_cannot_be_recorded_is_not_done_and_what_was_done_is_not_told(mode: str) -> None:
    bench = Bench()
    async with bench.peer() as peer:
        call = asyncio.create_task(peer.request("tools/call", {"name": mode, "arguments": {}}))
        (await bench.disk.next("intent"))(FULL)
        assert "was not called: it cannot be recorded now" in json.dumps(await call)
        assert bench.disk.told == [("intent", ""), ("refusal", "unrecorded")] and not bench.ran
        call = asyncio.create_task(peer.request("tools/call", {"name": mode, "arguments": {}}))
        (await bench.disk.next("intent"))(None)
        (await bench.disk.next("outcome"))(FULL)
        assert "could not be recorded and is withheld" in json.dumps(await call)
        assert bench.ran == [mode]


@requirement("P-15")
@pytest.mark.parametrize("mode", MODES)
async def test_p15_who_cancels_while_the_intent_is_on_its_way_stops_the_call(mode: str) -> None:
    bench = Bench()
    async with bench.peer() as peer:
        message = {"jsonrpc": "2.0", "id": "a", "method": "tools/call", "params": {"name": mode, "arguments": {}}}
        await peer.send(json.dumps(message).encode())
        begin = await bench.disk.next("intent")
        await peer.notify("notifications/cancelled", {"requestId": "a"})
        answer = await bench.disk.next("outcome")
        begin(None)
        answer(None)
        await peer.request("ping")
    assert bench.disk.told == [("intent", ""), ("outcome", "cancelled")] and not bench.ran


@requirement("P-15")
@pytest.mark.parametrize("problem", [None, FULL], ids=["written", "full"])
async def test_p15_a_call_that_took_too_long_is_answered_once_that_is_on_record(problem: TrailError | None) -> None:
    bench = Bench()

    @bench.server.tool(timeout=(0.01, PATIENCE))
    async def hangs() -> None:
        await asyncio.Event().wait()

    async with bench.peer() as peer:
        call = asyncio.create_task(peer.request("tools/call", {"name": "hangs", "arguments": {}}))
        (await bench.disk.next("intent"))(None)
        over = await bench.disk.next("outcome")
        await turns()
        assert not call.done()
        over(problem)
        said = json.dumps(await call)
    assert ("no sign of life" in said) is (problem is None) and ("is withheld" in said) is (problem is not None)
    assert bench.disk.told == [("intent", ""), ("outcome", "timeout")]


@requirement("P-15")
@pytest.mark.parametrize("held", ["intent", "outcome", "both"])
async def test_p15_a_disk_that_never_answers_is_not_waited_for_for_ever(
    held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is that it is not known, which is true, and never what would have been the result."""
    bench = Bench()
    monkeypatch.setattr(flight, "RECORD_SECONDS", 0.05)

    @bench.server.tool(inline=True, timeout=(0.03 if held != "outcome" else 1.0, PATIENCE))
    def quick() -> str:
        bench.ran.append("quick")
        return "the result"

    async with bench.peer() as peer:
        call = asyncio.create_task(peer.request("tools/call", {"name": "quick", "arguments": {}}))
        begin = await bench.disk.next("intent")
        if held == "outcome":
            begin(None)
            await bench.disk.next("outcome")
            said = json.dumps(await call)
            assert "is withheld" in said and "the result" not in said and bench.ran == ["quick"]
        else:
            over = await bench.disk.next("outcome")
            if held == "intent":
                over(None)
            async with asyncio.timeout(PATIENCE):
                assert ("no sign of life" if held == "intent" else "is withheld") in json.dumps(await call)
            begin(None)  # too late
            await turns()
            assert not bench.ran
    assert len(bench.disk.records) == 2


@requirement("P-15")
async def test_p15_whoever_ends_the_server_has_the_answers_that_are_on_their_way_to_the_disk(tmp_path: Path) -> None:
    bench = Bench()
    bench.server.guard(audit=tmp_path / "audit.db")
    source, requests = os.pipe()
    answers, sink = os.pipe()
    hello = {"protocolVersion": LATEST, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    messages: list[Object] = [{"id": 0, "method": "initialize", "params": hello}]
    messages += [{"id": id, "method": "tools/call", "params": {"name": MODES[id % 3]}} for id in range(1, 31)]
    os.write(requests, b"".join(json.dumps({"jsonrpc": "2.0", **each}).encode() + b"\n" for each in messages))
    os.close(requests)
    async with bench.server.serving():
        await StdioConnection(bench.server.engine, source, sink, Principal("local")).serve()
    os.close(sink)
    told = {json.loads(line)["id"]: json.loads(line) for line in os.read(answers, 1 << 20).splitlines()}
    os.close(answers)
    os.close(source)
    assert set(told) == set(range(31)) and not [each for each in told.values() if "error" in each]
    records = [json.loads(line) for _, line in TrailFile(tmp_path / "audit.db").lines()]
    assert [each["event"] for each in records].count("outcome") == 30
    assert len({each["call"] for each in records if "call" in each}) == 30


# Records that nobody waits for


class Counted:
    def __init__(self, trail: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[int] = []
        sink = trail._sink  # type: ignore[attr-defined]  # how often it is asked is the point
        inner = sink.append

        def append(bodies: list[bytes], *more: Any) -> None:
            self.batches.append(len(bodies))
            inner(bodies, *more)

        monkeypatch.setattr(sink, "append", append)


@pytest.mark.parametrize("name", ["audit.db", "audit.jsonl"])
async def test_refusals_that_are_spread_out_share_the_way_to_the_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trail = open_trail(tmp_path / name)
    await trail.write({"event": "intent", "call": "0"})
    counted = Counted(trail, monkeypatch)
    for number in range(10):
        trail.submit({"event": "refusal", "call": str(number)})
        await turns()
    assert counted.batches == []
    await trail.write({"event": "outcome", "call": "0"})  # takes them along, and they come first
    trail.submit({"event": "refusal", "call": "last"})
    await trail.close()
    assert counted.batches == [11, 1]
    told = [json.loads(line)["event"] for _, line in TrailFile(tmp_path / name).lines()]
    assert told == ["opened", "intent", *["refusal"] * 10, "outcome", "refusal"]


async def test_a_refusal_by_itself_is_written_soon(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    trail = open_trail(file)
    trail.submit({"event": "refusal", "call": "a"})
    async with asyncio.timeout(PATIENCE):
        while not file.read_bytes():  # noqa: ASYNC110  # nobody waits for it: that is the point
            await asyncio.sleep(0.01)
    await trail.close()


async def test_whoever_fails_when_told_keeps_nobody_else_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trail = open_trail(tmp_path / "audit.db")

    def fails(problem: TrailError | None) -> None:
        raise ValueError("of its own")

    trail.submit({"event": "intent", "call": "1"}, fails)
    async with asyncio.timeout(PATIENCE):
        assert await trail.write({"event": "intent", "call": "2"})
    await trail.close()
    assert [each.levelno for each in caplog.records] == [logging.ERROR]
    late: asyncio.Future[TrailError | None] = asyncio.get_running_loop().create_future()
    trail.submit({"event": "intent", "call": "3"}, late.set_result)
    assert "was closed" in str(await late)


# Approvals

ASKS = {"destructiveHint": True}


async def asked(server: Server, count: int) -> list[Approval]:
    async with asyncio.timeout(PATIENCE):
        while len(found := await server.approvals.open()) < count:  # noqa: ASYNC110  # no event says so
            await asyncio.sleep(0)
    return found


@requirement("SRV-602", "P-17")
async def test_p17_a_question_whose_approval_cannot_be_carried_on_is_refused_clearly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The tool asks something itself: the yes must be good once more, and that is recorded."""
    bench = Bench(approvals=Approvals(by="operator", wait=5, round=5))

    @bench.server.tool(annotations=ASKS)
    async def wipes(call: Call) -> str:
        await call.ask("Sure?", {"type": "object", "properties": {}})
        return "wiped"

    able: Object = {"elicitation": {"form": {}}}
    async with Peer(bench.server, revision="2026-07-28", capabilities=able) as peer:
        disk = bench.disk
        call = asyncio.create_task(peer.request("tools/call", {"name": "wipes", "arguments": {}}))
        (await disk.next("approval"))(None)  # asked
        waiting = await asked(bench.server, 1)
        deciding = asyncio.create_task(bench.server.approvals.decide(waiting[0].id, True, by="operator"))
        (await disk.next("approval"))(None)
        await deciding
        (await disk.next("intent"))(None)
        (await disk.next("approval"))(FULL)  # continued
        (await disk.next("outcome"))(None)
        said = json.dumps(await call)
    assert "has asked something, which cannot be recorded now" in said and "Internal" not in said
    assert disk.told[-1] == ("outcome", "unrecorded")


@requirement("SRV-602", "P-19")
async def test_p19_what_was_remembered_under_other_rules_is_asked_again() -> None:
    store = MemoryStore()

    def serving(*rules: Rule) -> Server:
        server = Server("shop", approvals=Approvals(by="operator", wait=0.01), store=store, policy=Policy(rules))

        @server.tool(annotations=ASKS)
        async def wipes() -> str:
            return "wiped"

        return server

    server = serving()
    async with Peer(server, revision="2025-03-26") as peer:
        assert (await peer.call("wipes")).is_error
        await server.approvals.decide((await asked(server, 1))[0].id, True, by="operator", remember=3600)
        assert [(await peer.call("wipes")).text for _ in range(3)] == ["wiped"] * 3
    async with Peer(serving(), revision="2025-03-26") as peer:
        assert (await peer.call("wipes")).text == "wiped"
    async with Peer(serving(Rule(verdict="ask", tools=["wipes"])), revision="2025-03-26") as peer:
        assert "waits for a person's approval" in (await peer.call("wipes")).text


@requirement("SRV-603", "P-30")
@pytest.mark.parametrize("shared", [False, True], ids=["memory", "store"])
async def test_p30_a_call_that_waits_for_a_person_takes_nobodys_place(shared: bool) -> None:
    rates = Rates(shared=shared, tools={"wipes": ToolRate(concurrent=1, rate="3/hour")})
    server = Server("shop", approvals=Approvals(by="operator", wait=30), rates=rates, store=MemoryStore())
    go_on, running = asyncio.Event(), asyncio.Event()

    @server.tool(annotations=ASKS)
    async def wipes(number: int) -> str:
        running.set()
        await go_on.wait()
        return f"wiped {number}"

    async with Peer(server, revision="2025-03-26") as peer, asyncio.timeout(PATIENCE):
        calls = []
        for number in range(2):
            calls.append(asyncio.create_task(peer.call("wipes", {"number": number})))
            await asked(server, number + 1)
        waiting = await asked(server, 2)
        await server.approvals.decide(waiting[0].id, True, by="operator")
        await running.wait()
        await server.approvals.decide(waiting[1].id, True, by="operator")
        assert "1 of this tool at once" in (await calls[1]).text  # now there is no place
        go_on.set()
        assert (await calls[0]).text == f"wiped {waiting[0].asked.arguments['number']}"
        again = await peer.call("wipes", {"number": waiting[1].asked.arguments["number"]})
        assert not again.is_error  # the yes was not used up
        assert "3/hour" in (await peer.call("wipes", {"number": 9})).text  # and the rate has counted all of them


@requirement("P-15", everywhere=True)
@pytest.mark.parametrize("name", ["calls.db", "calls.jsonl"])
async def test_p15_calls_after_the_record_was_deleted_are_on_record(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    server = Server("shop", audit=path)

    @server.tool
    async def status(order: int) -> str:
        return f"order {order}"

    async with Peer(server) as peer:
        await peer.call("status", {"order": 1})
        os.unlink(path)
        for order in (2, 3):
            await peer.call("status", {"order": order})
    records = [json.loads(line) for _, line in TrailFile(path).lines()]
    assert [each["event"] for each in records] == ["replaced", *["intent", "outcome"] * 2]
    assert records[0]["to"] == 3
