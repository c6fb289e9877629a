"""Kill -9 of an upstream and of the gateway: each call settles and tells the truth, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import gateways_attacked
from faults import ENVELOPE, gone, rounds, until
from gateways_attacked import COMMAND, OPTIONS
from patience import PATIENCE, SOAK
from requirements import requirement
from standing import children_of
from wires import StdioWire, spawn
from wires_http import Headers, http, mirrored

Json = Any
Object = dict[str, Any]
Ran = Callable[[str, str], None]

R4, R5 = "2025-11-25", "2026-07-28"
SEED = int(os.environ.get("HANDRAIL_SEED", "19"))
FORMS: Object = {"elicitation": {"form": {}}}
CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
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


# An upstream over HTTP is killed


@asynccontextmanager
async def revived(diary: Path) -> AsyncIterator[tuple[str, Callable[[], Awaitable[None]]]]:
    """Upstreams over HTTP: their address, and what waits until they are there again, on the same port."""
    place: list[str] = []
    process: asyncio.subprocess.Process | None = None

    async def start() -> None:
        nonlocal process
        if process is not None and process.returncode is None and not place:
            return
        if process is not None:
            await process.wait()
        command = [*COMMAND, "--boundary", str(diary), place[0] if place else "0"]
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            place[:] = [(await process.stdout.readline()).decode().strip()]

    await start()
    try:
        yield f"http://127.0.0.1:{place[0]}", start
    finally:
        assert process is not None
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@requirement("GW-10", "GW-15", "GW-17", "P-14")
@pytest.mark.parametrize("revision", [R4, R5])
async def test_an_http_upstream_that_is_killed_at_any_message_costs_one_call_a_true_error(
    revision: str, tmp_path: Path, ran: Ran
) -> None:
    """The connection breaks instead of a pipe, and whoever calls next may find the address without a server."""
    ran(revision, "stdio")
    print(f"HANDRAIL_SEED={SEED}")
    cases = [case for case in UPSTREAM_KILLS if case[0] == revision]
    verdicts: Counter[str] = Counter()
    for number, (_, upstream, tool, step) in enumerate(sampled(cases, 5)):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with revived(folder / "diary") as (address, start):
            upstreams = {name: f"{address}/{behaviour}/mcp" for name, behaviour in UPSTREAMS.items()}
            place = Place(folder, upstreams=upstreams, timeout=SHORT)
            async with place.gateway(revision) as caller:
                try:
                    first = await caller.call(f"{upstream}_work", {"mark": "first"})
                    assert check_truth(place, first, "first") == "done"
                    settled = await caller.call(f"{upstream}_{tool}", {"mark": "m", "at": step})
                    assert [each["at"] for each in place.notes("kills")] == [step]
                    verdict = check_truth(place, settled, "m")
                    if (step, upstream) != ("question", "new") and step != "result":
                        assert verdict != "done"
                    await start()
                    again = await caller.call(f"{upstream}_{tool}", {"mark": "again"})
                    assert check_truth(place, again, "again") == "done"
                    if settled.last:  # what was agreed to counts for what was asked, and only once
                        params = {"name": f"{upstream}_{tool}", "arguments": {"mark": "m"}, **settled.last}
                        await caller.request("tools/call", params)
                        assert place.done("m") <= 1
                except AssertionError as problem:
                    problem.add_note(f"{upstream} {tool} {step}")
                    raise
                verdicts[verdict] += 1
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


# One of two worker processes is killed


class HttpCaller:
    """A client of a gateway over HTTP, which says yes to what it is asked, and loses calls with their connection."""

    def __init__(self, url: str, revision: str) -> None:
        self.url = url
        self.revision = revision
        self.headers: Headers = {}
        self._last = 0

    async def open(self) -> None:
        if self.revision == R5:
            return
        about = {"protocolVersion": self.revision, "capabilities": FORMS, "clientInfo": {"name": "rig", "version": "1"}}
        answer = await self.request("initialize", about)
        assert "result" in answer
        self.headers["MCP-Protocol-Version"] = self.revision
        await self._post({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def _post(self, message: Object) -> Object:
        """The answer; empty if the connection has ended before."""
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **self.headers}
        if self.revision == R5:
            headers |= {"MCP-Protocol-Version": R5, **mirrored(message)}
        answer: Object = {}
        try:
            reply = await http(self.url, "POST", headers, json.dumps(message).encode())
        except (ConnectionError, asyncio.IncompleteReadError):
            return {}
        self.headers |= {"Mcp-Session-Id": reply.headers["mcp-session-id"]} if "mcp-session-id" in reply.headers else {}
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            if not reply.is_stream:
                body = await reply.body()
                return dict(json.loads(body)) if body else {}
            async with asyncio.timeout(PATIENCE):
                async for event in reply.events():
                    said = json.loads(event["data"]) if event.get("data") else {}
                    if "method" in said and "id" in said:
                        await self._post({"jsonrpc": "2.0", "id": said["id"], "result": ACCEPT})
                    elif said.get("id") == message.get("id"):
                        answer = said
                        break
        reply.close()
        return answer

    async def request(self, method: str, params: Object) -> Object:
        self._last += 1
        if self.revision == R5:
            params = {**params, "_meta": {**ENVELOPE, CAPABILITIES: FORMS}}
        return await self._post({"jsonrpc": "2.0", "id": self._last, "method": method, "params": params})

    async def call(self, name: str, arguments: Object, more: Object | None = None) -> Settled:
        last: Object = more or {}
        while True:
            answer = await self.request("tools/call", {"name": name, "arguments": arguments, **last})
            result = answer.get("result", {})
            if result.get("resultType") != "input_required":
                return Settled(answer, last)
            asked: Object = result.get("inputRequests", {})
            last = {"inputResponses": dict.fromkeys(asked, ACCEPT), "requestState": result["requestState"]}


async def started_again(caller: HttpCaller, name: str, arguments: Object) -> Settled:
    """How a call has ended that is started again whenever its answers went to another worker (LOSSY-25)."""
    async with asyncio.timeout(PATIENCE):
        while (settled := await caller.call(name, arguments)).answer and "expired" in settled.text:
            pass
    return settled


@asynccontextmanager
async def two_workers(place: Place) -> AsyncIterator[tuple[str, int]]:
    """A gateway of two processes on one port: its address, and the process that has both."""
    environment = {**os.environ, OPTIONS: json.dumps(place.options), "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, gateways_attacked.__file__, stdout=PIPE, stderr=DEVNULL, env=environment
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            url = (await process.stdout.readline()).decode().strip()
        yield url, process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(PATIENCE):
            await process.wait()


@requirement("GW-10", "GW-15", "P-13", "P-14", "P-19")
@pytest.mark.parametrize("revision", [R4, R5])
async def test_a_worker_that_is_killed_at_any_message_takes_its_own_calls_along_and_no_approval_is_used_twice(
    revision: str, tmp_path: Path, ran: Ran
) -> None:
    """Each call needs a person's yes. The workers that are left, or new, serve the caller that comes back."""
    ran(revision, "http")
    print(f"HANDRAIL_SEED={SEED}")
    cases = [
        (upstream, tool, step)
        for upstream in UPSTREAMS
        for tool, steps in (("work", WORK_STEPS), ("question", QUESTION_STEPS))
        for step in steps
    ]
    place = Place(tmp_path, asks=["*_work", "*_question"], timeout=SHORT)
    verdicts: Counter[str] = Counter()
    async with two_workers(place) as (url, parent):
        for number, (upstream, tool, step) in enumerate(sampled(cases, 4)):
            try:
                caller = HttpCaller(url, revision)
                await caller.open()
                mark, name = f"m{number}", f"{upstream}_{tool}"
                arguments: Object = {"mark": mark, "at": step, "kill": "parent"}
                settled = await started_again(caller, name, arguments)
                assert [each["at"] for each in place.notes("kills") if each["mark"] == mark] == [step]
                verdicts[check_truth(place, settled, mark)] += 1
                before = place.pids()
                if settled.last and (done := place.done(mark)):  # the yes was used: it is refused, or asked for anew
                    replayed = await caller.request(
                        "tools/call", {"name": name, "arguments": arguments, **settled.last}
                    )
                    result = replayed.get("result", {"isError": True})
                    assert result.get("isError") is True or result.get("resultType") == "input_required", replayed
                    assert place.done(mark) == done == 1
                fresh = Settled({}, {})
                async with asyncio.timeout(PATIENCE):
                    while not fresh.answer:  # it came to the worker that was just killed
                        caller = HttpCaller(url, revision)
                        await caller.open()
                        fresh = await started_again(caller, name, {"mark": f"fresh{number}"})
                assert check_truth(place, fresh, f"fresh{number}") == "done"
                assert parent not in before
            except AssertionError as problem:
                problem.add_note(f"{upstream} {tool} {step}")
                raise
        everything = place.pids() | children_of(parent)
    await check_is_empty(everything)
    print(verdicts)


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
