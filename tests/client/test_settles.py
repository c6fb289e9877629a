"""Every call settles, and truthfully, wherever the wire is cut and whoever is killed.

A fixed script of calls is run again and again, and each time the wire is cut somewhere else: after any message, inside
any message, either way. Nobody's word is taken for it: what a relay has passed on decides whether a verdict is true.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from clients import R1, R2, R4, R5
from faults import HERE, gone, put_away, until
from handrail import CallResult, Client, Clocks, Tools
from handrail.errors import CallTimeout, PeerError, Sent
from handrail.jsonrpc import encode
from patience import PATIENCE, SOAK
from relays import WAYS, Between, How, Plan, Relay, Way, forked_client, made, messages, requests
from requirements import record_ran, requirement
from rigs import command
from standing import Standing, children_of
from wires_http import HttpServer

Place = tuple[str, str]

# What goes in is judged on the same cuts each time; at home every run looks somewhere else.
ANY = "1" if os.environ.get("CI") == "true" else str(random.SystemRandom().randrange(10**9))
SEED = os.environ.get("HANDRAIL_SEED", ANY)
CUTS = 1_200 if SOAK else 115  # of each transport and revision; in memory there are fewer messages than that
PATIENT = Clocks(connect=PATIENCE, first=PATIENCE, idle=PATIENCE, total=PATIENCE)
# Where only a clock will do: long enough for an answer that does come, on a machine with much else to do.
BY_CLOCK = Clocks(connect=6, first=6, idle=6, total=9)
SILENT = Clocks(connect=4, first=2.5, idle=2.5, total=4)  # then any step may end by its clock
CLOSING = 4.0  # what is not connected is closed before it is told, and a process may have to be ended

PIPES = [(R1, "stdio"), (R4, "stdio"), (R5, "stdio")]
SOCKETS = [(R2, "http"), (R4, "http"), (R5, "http"), (R1, "sse"), (R4, "sse")]
MEMORY = [(R1, "memory"), (R4, "memory"), (R5, "memory")]
HOWS: dict[str, list[How]] = {
    "stdio": ["exit", "exit", "close", "half", "silent", "kill"],
    "http": ["close", "reset", "half", "silent"],
    "sse": ["close", "reset", "half", "silent"],
    "memory": ["close", "silent"],
}
AT_ONCE = {"stdio": 16, "http": 24, "sse": 24, "memory": 50}


class Outcome(NamedTuple):
    """How one call of the script has ended."""

    step: int
    mark: bytes  # what its request has in it, and no other
    ended: Any  # a result, an error, or None if it has not
    took: float
    sent: list[Passed] | None = None  # what the relay had seen by then, where others like it may have come later


class Passed(NamedTuple):
    """What the relay has seen of one request of the client's: whether any of it was passed on."""

    text: bytes
    is_seen: bool
    is_whole: bool


class Story:
    """One conversation: what the client says has become of its calls, and what has passed."""

    def __init__(self, place: Place, wire: Relay | Between) -> None:
        self.place = place
        self.plan = wire.plan
        self.wire = wire
        self.clocks = self._clocks()
        self.outcomes: list[Outcome] = []
        self.recovers = self.plan is None or self.plan.how != "silent"

    def _clocks(self) -> Clocks:
        if self.plan is None:
            return PATIENT
        if self.plan.how == "silent":
            return SILENT
        return BY_CLOCK if self.plan.how == "half" or self.place[1] in ("http", "sse") else PATIENT

    @property
    def sent(self) -> list[Passed]:
        """Every message of the client's that has come to the relay, so far."""
        if isinstance(self.wire, Between):
            return [Passed(each, is_seen=True, is_whole=True) for each in self.wire.passed["up"]]
        is_http = self.place[1] != "stdio"
        found = []
        for each in self.wire.connections:
            for at, text in requests(each.up.got, http=is_http):
                body = text.partition(b"\r\n\r\n")[2] if is_http else text
                found.append(Passed(body or text, at < each.up.passed, body.endswith((b"\n", b"}"))))
        return found

    @property
    def came(self) -> list[bytes]:
        """All that has passed to the client."""
        if isinstance(self.wire, Between):
            return self.wire.passed["down"]
        return [bytes(each.down.got[: each.down.passed]) for each in self.wire.connections]

    def __repr__(self) -> str:
        ended = ", ".join(f"{each.mark.decode()}: {each.ended!r}"[:200] for each in self.outcomes)
        return f"{self.place} {self.plan}: {ended}"

    def lies(self) -> Iterator[str]:
        """Everything that is wrong with it."""
        came = self.came
        is_open = self.plan is not None and self.plan.how == "silent"
        answers = [each for part in came for each in messages(part, is_open=is_open)]
        for outcome in self.outcomes:
            if outcome.ended is None:
                yield f"{outcome.mark!r} did not settle"
            elif SOAK and outcome.took > self.clocks.total + 1 + (CLOSING if outcome.step == 0 else 0):
                yield f"{outcome.mark!r} took {outcome.took:.2f} s"
            elif isinstance(outcome.ended, PeerError):
                yield from self._untrue(outcome, outcome.ended, answers)
            elif not all(any(each in part for part in came) for each in _whole(outcome.ended)):
                yield f"{outcome.mark!r} has a result that did not come"
        failed = {outcome.step for outcome in self.outcomes if isinstance(outcome.ended, PeerError)}
        if len(failed) > 1 and self.recovers:
            yield f"more than one step failed: {sorted(failed)}"
        if failed and self.plan is None:
            yield "failed without a cut"

    def _untrue(self, outcome: Outcome, error: PeerError, answers: list[Any]) -> Iterator[str]:
        mark = outcome.mark
        mine = [each for each in (self.sent if outcome.sent is None else outcome.sent) if mark in each.text]
        if error.sent is Sent.NO and any(each.is_seen for each in mine):
            yield f"{mark!r} says that it was not sent, and it was: {error}"
        ids = {json.loads(each.text)["id"] for each in mine if each.is_whole}
        answered = [each for each in answers if each.get("id") in ids and "method" not in each]
        refused = any(b"HTTP/1.1 4" in part for part in self.came)
        if error.sent is Sent.FAILED and not answered and not refused:
            yield f"{mark!r} says that it was answered, and it was not: {error}"
        final = [each for each in answered if each.get("result", {}).get("resultType", "complete") == "complete"]
        # A reset takes along what was not read yet; and the older HTTP has two connections, of which one may be cut.
        is_whole = self.plan is None or self.plan.everything or self.place[1] != "sse"
        is_late = isinstance(error, CallTimeout) or error.sent is Sent.FAILED
        if final and is_whole and self.plan and self.plan.how != "reset" and not is_late:
            yield f"{mark!r} was answered, and says: {error}"
        if isinstance(error, CallTimeout) and not self._may_wait(mark) and outcome.sent != []:  # it has been started
            yield f"{mark!r} waited for a clock: {error}"
        if not error.server or not error.phase:
            yield f"{mark!r} has no server or phase: {error!r}"

    def _may_wait(self, mark: bytes) -> bool:
        """Whether nothing shows that nothing more will come."""
        if self.plan is None or self.plan.how in ("silent", "half"):
            return True
        # Over HTTP a handshake's streams can be come back to; and our answer to a question may be what was lost.
        is_resumed = self.place[1] == "http" and self.place[0] != R5 and self.plan.how == "kill"
        return is_resumed or (self.place[1] in ("http", "sse") and b"asks" in mark)


def _whole(result: Any) -> list[bytes]:
    """What must have come, all of it, for there to be this result."""
    if isinstance(result, Tools):
        return [encode(tool.raw) for tool in result]
    return [encode(result.raw) + b"}"] if isinstance(result, CallResult) else []


async def tell(story: Story, target: Any, **options: Any) -> None:
    """The script: connect, list, echo, progress, a question, two at once."""
    revision, transport = story.place
    if transport == "sse":
        options["transport"] = "sse"
    client = Client(target, revision=revision, timeout=story.clocks, elicit=lambda _: {"name": "Ada"}, **options)
    steps = itertools.count()

    async def settle(step: int, mark: str, work: Awaitable[Any]) -> bool:
        began, ended = time.monotonic(), None
        try:
            async with asyncio.timeout(2 * PATIENCE):
                ended = await work
        except PeerError as error:
            ended = error
        except TimeoutError:
            pass
        took = time.monotonic() - began
        sent = None if mark.startswith('"mark-') else story.sent
        story.outcomes.append(Outcome(step, mark.encode(), ended, took, sent))
        return not isinstance(ended, PeerError | None)

    def call(name: str, mark: str, **arguments: Any) -> Awaitable[Any]:
        return client.call(name, arguments, meta={"example.org/mark": mark})

    opening = '"server/discover"' if revision == R5 else '"initialize"'
    try:
        if not await settle(next(steps), opening, client.__aenter__()):
            return
        is_over = not await settle(next(steps), '"tools/list"', client.tools(fresh=True))
        for name, arguments in (("echo", {"text": "hello"}), ("progresses", {}), ("asks", {})):
            if is_over and story.plan is not None and story.plan.how == "silent" and transport != "http":
                return  # and silent it stays
            is_over |= not await settle(next(steps), f'"mark-{name}"', call(name, f"mark-{name}", **arguments))
        step = next(steps)
        pair = [settle(step, f'"mark-{n}"', call("echo", f"mark-{n}", text=f"one of two: {n}")) for n in (1, 2)]
        await asyncio.gather(*pair)
    finally:
        began = time.monotonic()
        await client.close()
        story.outcomes.append(Outcome(next(steps), b"close", "closed", max(0.0, time.monotonic() - began - 5)))


class World:
    """The servers all stories are told with."""

    def __init__(self) -> None:
        self.http = HttpServer("relays:made")

    def close(self) -> None:
        self.http.stop()

    async def story(self, place: Place, plan: Plan | None = None) -> Story:
        if place[1] == "memory":
            between = Between(made(), plan)
            story = Story(place, between)
            await tell(story, between)
            return story
        relay = Relay(plan)
        story = Story(place, relay)
        if place[1] == "stdio":
            with relay.to_process():
                await tell(story, relay.command)
        else:
            with relay.to_url(self.http.url):
                await tell(story, relay.url)
        return story


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_pause_between_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has died several times is started again at once: the pause would use up the clocks."""
    monkeypatch.setattr("handrail.client.connection.MAX_PAUSE_SECONDS", 0.01)


@pytest.fixture(autouse=True)
async def _nothing_is_left() -> AsyncIterator[None]:
    before = Standing.now()
    yield
    await before.back()


def plans(place: Place, whole: Relay | Between, chance: random.Random) -> list[Plan]:
    """Where to cut: after every message, a byte before and after that, and in the middle of some."""
    hows = itertools.cycle(HOWS[place[1]])
    points: list[tuple[Way, int]] = []
    if isinstance(whole, Between):
        points = [(way, at) for way in WAYS for at in range(len(whole.passed[way]) + 1)]
        return [Plan(way, at, how) for way, at in points for how in HOWS["memory"]]
    ends = {way: {0, *whole.steps[way]} for way in WAYS}
    for each in whole.connections if place[1] == "stdio" else []:
        for way in WAYS:
            tape = getattr(each, way).got
            ends[way] |= {at + 1 for at, byte in enumerate(tape) if byte == 10}
    points = [(way, at) for way in WAYS for at in sorted(ends[way])]
    points += [(way, at + by) for way in WAYS for at in sorted(ends[way]) for by in (-1, 1)]
    inside = [(way, at) for way in WAYS for at in range(1, whole.counts[way])]
    chance.shuffle(inside)
    points = [each for each in dict.fromkeys([*points, *inside]) if 0 <= each[1] <= whole.counts[each[0]]]
    return [Plan(way, at, next(hows), chance.random() < 0.7) for way, at in points[: max(CUTS, len(ends["up"]))]]


def all_true(stories: list[Story]) -> None:
    wrong = [f"{lie}\n    in {story}" for story in stories for lie in story.lies()]
    assert not wrong, f"HANDRAIL_SEED={SEED}: {len(wrong)} in {len(stories)} conversations\n" + "\n".join(wrong[:10])


async def all_of(place: Place, world: World, todo: Iterable[Plan]) -> list[Story]:
    turn = asyncio.Semaphore(AT_ONCE[place[1]])

    async def one(plan: Plan) -> Story:
        async with turn:
            return await world.story(place, plan)

    return await asyncio.gather(*map(one, todo))


@requirement("CLI-25", "P-14", "P-11")
@pytest.mark.parametrize("place", [*MEMORY, *PIPES, *SOCKETS], ids="-".join)
async def test_wherever_the_wire_is_cut_every_call_settles_and_tells_the_truth(
    place: Place, world: World, request: pytest.FixtureRequest
) -> None:
    record_ran(request, place[0], "http" if place[1] == "sse" else place[1])
    print(f"HANDRAIL_SEED={SEED}")
    whole = await world.story(place)
    assert not list(whole.lies()), f"without a cut: {whole}"
    todo = plans(place, whole.wire, random.Random(f"{SEED} {place}"))
    began = time.monotonic()
    stories = await all_of(place, world, todo)
    took = time.monotonic() - began
    ended = Counter(
        str(each.ended.sent) if isinstance(each.ended, PeerError) else "answered"
        for s in stories
        for each in s.outcomes
    )
    print(f"{len(stories)} cuts in {took:.1f} s: {dict(ended)}")
    all_true(stories)
    assert len(stories) >= (25 if place[1] == "memory" else 100)
    assert ended[str(Sent.UNKNOWN)] >= 10  # the cuts were felt


# Killing


KILLS = 60 if SOAK else 6


@requirement("CLI-25", "P-14")
@pytest.mark.parametrize("place", SOCKETS, ids="-".join)
async def test_a_server_that_is_killed_costs_every_call_an_error_that_is_true(
    place: Place, world: World, request: pytest.FixtureRequest
) -> None:
    """Over HTTP there is nobody afterwards; over pipes, where there is, the test above kills as well."""
    record_ran(request, place[0], "http")
    print(f"HANDRAIL_SEED={SEED}")
    whole = await world.story(place)
    assert isinstance(whole.wire, Relay)
    chance = random.Random(f"{SEED} {place}")
    points = [(way, at) for way in WAYS for at in whole.wire.steps[way]]
    servers = [HttpServer("relays:made") for _ in range(KILLS)]
    try:

        async def one(server: HttpServer, way: Way, at: int) -> Story:
            relay = Relay(Plan(way, at, "kill"))
            relay.on_cut = relay.refuse
            story = Story(place, relay)
            story.recovers = False
            with relay.to_url(server.url, server.process.pid):
                await tell(story, relay.url)
            return story

        stories = await asyncio.gather(*(one(each, *chance.choice(points)) for each in servers))
    finally:
        for each in servers:
            each.stop()
    all_true(stories)


def sockets_of(pid: int) -> int:
    links = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(each.readlink()))
    return sum(link.startswith("socket:") for link in links)


@requirement("P-14")
@pytest.mark.parametrize("place", [*PIPES, *SOCKETS], ids="-".join)
async def test_when_a_client_is_killed_its_server_notices(
    place: Place, world: World, request: pytest.FixtureRequest
) -> None:
    """At any byte: a server of its own ends, one for all lets go of everything and serves the next."""
    revision, transport = place
    record_ran(request, revision, "stdio" if transport == "stdio" else "http")
    print(f"HANDRAIL_SEED={SEED}")
    chance = random.Random(f"{SEED} {place}")
    plan: list[Plan] = [Plan(chance.choice(WAYS), chance.randrange(10_000), "kill") for _ in range(KILLS)]
    server = world.http.process.pid
    before = sockets_of(server)

    async def one(plan: Plan) -> None:
        relay = Relay(plan)
        killed = asyncio.Event()
        relay.on_cut = killed.set
        reached = relay.to_process() if transport == "stdio" else relay.to_url(world.http.url)
        with reached:
            options = {"transport": "sse"} if transport == "sse" else {}
            target = relay.command if transport == "stdio" else relay.url
            relay.victim, out = forked_client(target, revision=revision, **options)
            try:
                async with asyncio.timeout(PATIENCE):
                    await killed.wait()
                await until(lambda: gone(relay.victim), "the client has ended")
                if transport == "stdio":
                    pids = [each.pid for each in relay.connections]
                    await until(lambda: all(map(gone, pids)), "its server has ended")
            finally:
                os.close(out)

    await asyncio.gather(*map(one, plan))
    if transport != "stdio":
        await until(lambda: sockets_of(server) <= before, "the server has let go of its connections")
        async with Client(world.http.url, revision=revision if transport == "http" else R4) as client:
            assert (await client.call("echo", {"text": "still there"})).text == "still there"


HOLDER = """
import asyncio, json, sys
from handrail import Client

async def main():
    clients = [Client(each, revision="2025-11-25") for each in json.loads(sys.argv[1])]
    await asyncio.gather(*(each.__aenter__() for each in clients))
    await asyncio.gather(*(each.tools() for each in clients))
    pids = [remote.connection.transport.pid for each in clients for remote in each.servers.values()]
    print(json.dumps(pids), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@requirement("P-14", "CLI-41")
async def test_kill_9_of_a_process_that_holds_five_servers_leaves_none(
    tmp_path: Path, ran: Callable[[str, str], None]
) -> None:
    ran(R4, "stdio")
    commands = [[sys.executable, str(HERE / "subject.py"), "relays:made"]] * 4
    commands.append(command("never_ends", tmp_path / "log", R4))
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, json.dumps(commands), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        async with asyncio.timeout(PATIENCE):
            servers = json.loads(await holder.stdout.readline())
        assert len(servers) == 5 and not any(map(gone, servers))
        everything = {*servers, *children_of(holder.pid)}  # with the guards
    finally:
        await put_away(holder)
    await until(lambda: all(map(gone, everything)), "nothing of it is left")
