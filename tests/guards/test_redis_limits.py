"""Limits that are decided at Redis: what leases, deaths, clocks and an engine that is away do to them."""

from __future__ import annotations

import asyncio
import os
import random
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from secrets import token_bytes
from typing import Any

import pytest
from msgspec import convert
from msgspec.json import encode
from msgspec.structs import replace

from clocked_redis import ClockedRedisStore, connected
from handrail import Server
from handrail.guards.limits import Admission, Rates, Throttled, ToolRate
from handrail.guards.redis_limits import LEASING, Leasing, RedisLimiter
from handrail.stores import StoreError
from handrail.stores.redis import RedisStore, Script
from handrail.testing import Peer
from patience import PATIENCE, SOAK, in_time
from redis_servers import MEMORY_ONLY, ON_DISK, RedisServer, fresh_name, require_redis, shared_cluster, shared_server
from requirements import requirement
from tests.guards.test_limits import SECOND, UNLIMITED, Clock, Model, answers, ask, rates, refused, run, slot

HOUR = 3600 * SECOND


@pytest.fixture
def clock() -> Clock:
    return Clock()


class DyingStore(ClockedRedisStore):
    """Loses the answers of scripts while `dies` is set."""

    dies = False

    async def run_script(self, script: Script, keys: Sequence[str], args: Sequence[bytes | int]) -> Any:
        reply = await super().run_script(script, keys, args)
        if self.dies:
            raise StoreError("the answer is lost")
        return reply


class Fleet:
    """Limiters on one Redis, each as in a process of its own, with a clock of its own that is hours off."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.clock = clock
        self.url = url
        self.name = fresh_name()
        self.redis_is_ahead = 0
        self.limiters: list[RedisLimiter] = []
        self.stores: list[DyingStore] = []

    def limiter(self, *, leasing: Leasing = LEASING, **given: Any) -> RedisLimiter:
        store = DyingStore(self.url, lambda: self.clock.now + self.redis_is_ahead, name=self.name)
        off = len(self.limiters) * HOUR
        limiter = RedisLimiter(store, rates(**given), leasing=leasing, clock=lambda: self.clock.now - off)
        self.stores.append(store)
        self.limiters.append(limiter)
        return limiter

    @property
    def scripts(self) -> int:
        return sum(store.scripts for store in self.stores)

    async def close(self) -> None:
        for limiter, store in zip(self.limiters, self.stores, strict=True):
            await limiter.close()
            await store.close()


@pytest.fixture
async def fleet(clock: Clock) -> AsyncIterator[Fleet]:
    fleet = Fleet(shared_server().url(), clock)
    yield fleet
    await fleet.close()


@pytest.fixture(params=["one server", "cluster"])
async def anywhere(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[Fleet]:
    fleet = Fleet(shared_cluster().url if request.param == "cluster" else shared_server().url(), clock)
    yield fleet
    await fleet.close()


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_so():  # noqa: ASYNC110 - a limiter has no event for it
            await asyncio.sleep(0.005)


@pytest.fixture
def chance() -> random.Random:
    seed = int(os.environ.get("HANDRAIL_SEED") or random.randrange(10**6))
    print(f"HANDRAIL_SEED={seed}")
    return random.Random(seed)


# The bound


LARGE = Leasing(token=10**18, share=4 * SECOND, small_share=SECOND, epoch=7 * SECOND, pause=0)
"""Shares of a rate of one call a second."""


class Processes:
    """Three processes with one limit, whose calls are compared with one bucket that nothing is leased from."""

    def __init__(self, leasing: Leasing, limits: Rates) -> None:
        self.clock = Clock()
        self.model = Model(limits)
        self.stores: list[DyingStore] = []
        self.limiters: list[RedisLimiter] = []
        self._leasing, self._limits, self._name = leasing, limits, fresh_name()
        for process in range(3):
            self.start(process)

    def start(self, process: int) -> None:
        """Start a process, in place of one that has died."""
        store, off = DyingStore(shared_server().url(), self.clock, name=self._name), len(self.stores) * HOUR
        limiter = RedisLimiter(store, self._limits, leasing=self._leasing, clock=lambda: self.clock.now + off)
        self.stores.append(store)
        self.limiters[process : process + 1] = [limiter]

    async def take(self, process: int, tool: str, count: int) -> int:
        limiter, taken = self.limiters[process], 0
        for answer in await asyncio.gather(
            *(ask(limiter, "alice", tool) for _ in range(count)), return_exceptions=True
        ):
            if answer is None:
                assert self.model.take("alice", tool, "", self.clock.now // 1000 * 1000) is None, "more than the limit"
                taken += 1
        return taken

    async def lose(self, process: int, tool: str) -> None:
        """Let the answer to some calls be lost."""
        store = self.limiters[process]._store
        assert isinstance(store, DyingStore)
        store.dies = True
        await self.take(process, tool, 3)
        store.dies = False
        await until(lambda: not self.limiters[process].trouble)

    async def close(self) -> None:
        for limiter in self.limiters:
            await limiter.close()
        for store in self.stores:
            await store.close()


@requirement("P-30", "P-21", everywhere=True)
@pytest.mark.parametrize(
    "leasing", [LARGE, replace(LARGE, share=8 * SECOND, small_share=0), replace(LARGE, epoch=SECOND)]
)
async def test_p30_no_pattern_of_calls_and_deaths_lets_more_through_than_the_limit(
    leasing: Leasing, chance: random.Random
) -> None:
    tools = {"big": ToolRate(cost=2.5), "own": ToolRate(rate="2/second burst 12")}
    processes = Processes(leasing, convert(UNLIMITED | {"principal": "1/second burst 10", "tools": tools}, Rates))
    taken = losses = 0
    for _ in range(30_000 if SOAK else 1500):
        process, tool = chance.randrange(3), chance.choice(["plain", "plain", "plain", "big", "own"])
        match chance.randrange(20):
            case 0:
                processes.start(process)
            case 1 if losses < 3:
                losses += 1
                await processes.lose(process, tool)
            case 2:
                processes.clock.advance(60)  # and one process alone gets all there is
                assert await processes.take(process, "plain", 10) == 10
            case 3 | 4 | 5 | 6 | 7:
                processes.clock.advance(chance.choice([1e-6, 0.5, 1, 2, 4, 6, 7, 8, 13]))
            case _:
                taken += await processes.take(process, tool, chance.choice([1, 1, 2, 3, 12]))
    assert taken > 500
    await processes.close()


async def test_a_bucket_does_not_fill_while_a_share_is_out(fleet: Fleet, clock: Clock) -> None:
    """Else the share and a full bucket could be used at the same moment."""
    one, other = (fleet.limiter(leasing=LARGE, principal="1/second burst 10") for _ in range(2))
    clock.now -= clock.now % (7 * SECOND)  # an epoch begins
    assert await answers(one, 1, "alice") == [True]  # and four more in hand
    clock.advance(13.9)
    assert await answers(one, 4, "alice") == [True] * 4
    clock.advance(0.2)  # the share has ended
    assert (await answers(other, 12, "alice")).count(True) == 6
    clock.advance(10)
    assert (await answers(other, 12, "alice")).count(True) == 10


async def test_a_share_whose_answer_is_lost_is_not_used(fleet: Fleet, clock: Clock) -> None:
    given: Any = {"principal": "1/second burst 10", "tools": {"big": {"cost": 5}}}
    one, other = (fleet.limiter(leasing=LARGE, **given) for _ in range(2))
    assert await answers(one, 2, "alice") == [True, True]  # and three more in hand, too few for the next
    fleet.stores[0].dies = True
    with pytest.raises(StoreError):
        await ask(one, "alice", "big")
    fleet.stores[0].dies = False
    await until(lambda: not one.trouble)
    taken = (await answers(other, 10, "alice")).count(True) + (await answers(one, 10, "alice")).count(True)
    assert taken <= 3


# What leases are good for


async def offer(fleet: Fleet, limiters: Sequence[RedisLimiter], calls: int, seconds: float) -> list[int]:
    """How many calls each limiter let through, of so many a second that are spread over all of them."""
    taken = [0] * len(limiters)
    for at in range(round(calls * seconds)):
        process = at % len(limiters)
        taken[process] += await ask(limiters[process], "alice") is None
        fleet.clock.advance(1 / calls)
    return taken


@requirement("P-30", everywhere=True)
async def test_p30_one_process_alone_gets_nearly_the_whole_rate(fleet: Fleet) -> None:
    [taken] = await offer(fleet, [fleet.limiter(principal="1000/second burst 200")], 2000, 3)
    print(f"{taken} of 3200 calls, {fleet.scripts} scripts")
    assert 0.95 * 3200 <= taken <= 3200 and fleet.scripts <= 0.2 * taken


async def test_processes_that_share_a_rate_get_nearly_all_of_it_and_none_gets_little(fleet: Fleet) -> None:
    taken = await offer(fleet, [fleet.limiter(principal="1000/second burst 200") for _ in range(3)], 3000, 3)
    print(f"{taken} of 3200 calls, {fleet.scripts} scripts")
    assert 0.9 * 3200 <= sum(taken) <= 3200 and min(taken) > 0.15 * 3200


@pytest.mark.parametrize(("exact", "most"), [(False, 0.05), (True, 1.0)])
async def test_a_leased_rate_takes_few_scripts_and_an_exact_one_each_call(
    fleet: Fleet, exact: bool, most: float
) -> None:
    [taken] = await offer(fleet, [fleet.limiter(principal="5000/second", exact=exact)], 2000, 2)
    print(f"{fleet.scripts / taken:.4f} scripts a call")
    assert taken == 4000 and fleet.scripts <= most * taken
    assert not exact or fleet.scripts == taken


@requirement("P-30", everywhere=True)
@pytest.mark.parametrize("rate", ["2/hour", "1000/second burst 200"])
async def test_p30_a_flood_of_refused_calls_is_a_few_scripts(fleet: Fleet, rate: str) -> None:
    limiter = fleet.limiter(principal=rate, tools={"slow": {"concurrent": 1}})
    await answers(limiter, 210, "alice")
    before = fleet.scripts
    said = await asyncio.gather(*(ask(limiter, "alice") for _ in range(5000)))
    assert not any(await answers(limiter, 5000, "alice")) and all(isinstance(each, Throttled) for each in said)
    assert fleet.scripts - before <= 2
    await slot(limiter, "bob", "slow")
    before = fleet.scripts
    assert not any(await answers(limiter, 5000, "carol", "slow"))
    assert fleet.scripts - before <= 2


# Slots, clocks, and where it is kept


@requirement("P-30", "P-21", everywhere=True)
async def test_p30_slots_are_of_all_processes_and_those_of_a_dead_one_come_back(anywhere: Fleet, clock: Clock) -> None:
    dead, one, other = (anywhere.limiter(tools={"slow": {"concurrent": 3}}) for _ in range(3))
    await slot(dead, "alice", "slow")
    release = await slot(one, "alice", "slow")
    await slot(one, "alice", "slow")
    assert (await refused(other, "bob", "slow")).scope == "concurrency"
    clock.advance(20)
    one.renew()
    release()
    (await slot(other, "bob", "slow"))()
    clock.advance(10)  # the lease of the dead one has ended
    for give_back in [await slot(other, "bob", "slow") for _ in range(2)]:
        give_back()
    await slot(dead, "alice", "slow")  # it was only stopped, and has two now
    assert (await refused(other, "carol", "slow")).scope == "concurrency"
    anywhere.redis_is_ahead = -86_400 * SECOND
    clock.advance(1)
    assert (await refused(other, "carol", "slow")).scope == "concurrency"
    clock.advance(30)
    for give_back in [await slot(other, "bob", "slow") for _ in range(3)]:
        give_back()


@requirement("P-21", everywhere=True)
@pytest.mark.parametrize("leasing", [LEASING, LARGE])
@pytest.mark.parametrize("seconds", [-0.5, -59, -86_400 * 365])
async def test_p21_a_clock_of_redis_that_goes_back_gives_nothing_away_and_locks_out_for_a_minute(
    fleet: Fleet, clock: Clock, seconds: float, leasing: Leasing
) -> None:
    one, other = (fleet.limiter(leasing=leasing, principal="60/minute") for _ in range(2))
    assert (await answers(one, 70, "alice")).count(True) == 60
    fleet.redis_is_ahead = round(seconds * SECOND)
    for limiter in (one, other):
        assert not any(await answers(limiter, 5, "alice"))
    clock.advance(61)
    assert 55 <= (await answers(other, 70, "alice")).count(True) <= 60


async def test_calls_of_many_callers_and_tools_are_counted_wherever_their_keys_lie(anywhere: Fleet) -> None:
    tools = {"slow *": {"concurrent": 2, "rate": "3/hour"}}
    one, other = (anywhere.limiter(principal="4/hour", tools=tools) for _ in range(2))
    names = ["alice", "bob:{x}", "carol %7B", "d\u00e9d\u00e9", "anonymous"]
    calls = [(limiter, name, f"slow {tool}") for name in names for tool in "ab" for limiter in (one, other)]
    said = await asyncio.gather(*(ask(limiter, name, tool, "10.0.0.1") for limiter, name, tool in calls))
    held = [each for each in said if callable(each)]
    assert len(held) == 4  # two of each tool
    for give_back in held:
        give_back()
    await asyncio.gather(one.close(), other.close())
    told = await asyncio.gather(*(ask(limiter, name, "quick") for name in names[:4] for limiter in [one, other] * 4))
    assert told.count(None) == 4 * 4 - sum(callable(each) for each in said[:16])


async def test_all_that_is_kept_ends_by_itself() -> None:
    server, name = shared_server(), fresh_name()
    store = await connected(RedisStore(server.url(), name=name))
    limiter = RedisLimiter(store, rates(principal="1000/second", tools={"slow": {"concurrent": 1, "rate": "9/hour"}}))
    await slot(limiter, "alice", "slow")
    assert await answers(limiter, 3, "alice", "quick") == [True] * 3
    keys = server.command("KEYS", f"handrail:1:{{{name}:*")
    assert len(keys) == 4
    assert all(0 < server.command("PTTL", key) <= 401_000 for key in keys)
    await limiter.close()
    await store.close()


# Real processes


async def started(what: str, name: str, url: str, limits: Rates, number: int) -> Process:
    process = await run(what, f"{name} {url}", encode(limits).decode(), number)
    assert process.stdout is not None
    assert await process.stdout.readline() == (b"ready\n" if what.startswith("flood") else b"held\n")
    return process


def now(server: RedisServer) -> float:
    seconds, micros = server.command("TIME")
    return int(seconds) + int(micros) / 1e6


@requirement("P-30", everywhere=True)
@pytest.mark.parametrize(("rate", "burst"), [(800, 100), *[(60, 30), (2000, 2000), (200, 20)] * SOAK])
async def test_p30_processes_that_are_killed_at_any_time_do_not_exceed_the_limit(
    rate: int, burst: int, chance: random.Random
) -> None:
    server, name, limits = shared_server(), fresh_name(), rates(principal=f"{rate}/second burst {burst}")
    pauses = [chance.randrange(4) for _ in range(8 if SOAK else 3)]
    starting = (started("flood redis", name, server.url(), limits, pause) for pause in pauses)
    flooding = await asyncio.gather(*starting)
    begun = now(server)
    for process in flooding:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
    taken = 0
    for process in chance.sample(flooding, len(flooding)):
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            taken += len(await process.stdout.readexactly(chance.randint(burst // 2, burst * 2)))
        process.kill()
    ended = now(server)
    taken += sum([len((await process.communicate())[0]) for process in flooding])
    print(f"{taken} calls in {ended - begun:.3f} s, {burst + rate * (ended - begun):.0f} are allowed")
    assert burst < taken <= burst + rate * (ended - begun) + 1


@requirement("P-30", everywhere=True)
async def test_p30_the_slots_of_a_process_that_was_killed_come_back() -> None:
    limits = rates(tools={"tool": {"concurrent": 2}})
    server, name = shared_server(), fresh_name()
    holder = await started("hold redis", name, server.url(), limits, 2)
    store = await connected(RedisStore(server.url(), name=name))
    limiter = RedisLimiter(store, limits)
    assert (await refused(limiter, "alice")).scope == "concurrency"
    holder.kill()
    await holder.communicate()
    async with asyncio.timeout(PATIENCE):
        while isinstance(answer := await ask(limiter, "alice"), Throttled):  # noqa: ASYNC110 - Redis has no event for it
            await asyncio.sleep(0.05)
    assert callable(answer)
    answer()
    await limiter.close()
    await store.close()


# While Redis is away


@pytest.fixture
def engine() -> Iterator[RedisServer]:
    require_redis()
    server = RedisServer(*MEMORY_ONLY)
    yield server
    server.stop()


async def outcome(limiter: RedisLimiter, tool: str = "tool") -> Admission | str:
    try:
        async with asyncio.timeout(PATIENCE):
            return await ask(limiter, "alice", tool)
    except StoreError as problem:
        return str(problem)


Away = Callable[[RedisServer], None]
WAYS: list[tuple[Away, Away]] = [(RedisServer.freeze, RedisServer.thaw), (RedisServer.kill, RedisServer.start)]


@requirement("P-20", everywhere=True)
@pytest.mark.parametrize(("leave", "come_back"), WAYS, ids=["frozen", "killed"])
@pytest.mark.parametrize("given", [{}, {"when_down": "refuse"}], ids=["unset", "refuse"])
async def test_p20_while_redis_is_away_calls_with_a_limit_are_refused_at_once(
    engine: RedisServer, leave: Away, come_back: Away, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    store = await connected(RedisStore(engine.url(), name="away"))
    limits = rates(tool={"rate": "1000/hour"}, tools={"held": {"concurrent": 1}}, **given)
    limiter, other = (RedisLimiter(store, limits, lease_seconds=3600) for _ in range(2))
    release = await slot(limiter, "alice", "held")
    assert await outcome(limiter) is None and limiter.trouble == ""
    leave(engine)
    loop = asyncio.get_running_loop()
    began = loop.time()
    told = await asyncio.gather(*(outcome(limiter) for _ in range(600)))
    in_time(loop.time() - began, 2.0, "a refusal")
    assert all(isinstance(each, str) and each.startswith("limits: redis") for each in told) and limiter.trouble
    for tool in ("tool", "held"):
        assert str(await outcome(limiter, tool)).startswith("limits: redis")
    release()
    come_back(engine)
    await until(lambda: not limiter.trouble)
    assert await outcome(limiter) is None
    async with asyncio.timeout(PATIENCE):  # until Redis was told that it is free
        while isinstance(answer := await ask(other, "bob", "held"), Throttled):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    assert callable(answer)
    answer()
    messages = [each.message for each in caplog.records if each.message.startswith("limits: ")]
    assert [each.split(",")[0] for each in messages] == ["limits: Redis does not answer", "limits: Redis answers"]
    await limiter.close()
    await other.close()
    await store.close()


@requirement("P-20", "P-30", everywhere=True)
@pytest.mark.parametrize("exact", [False, True])
async def test_p20_redis_that_is_killed_under_load_lets_no_more_through_than_the_limit(exact: bool) -> None:
    """With an append-only file that is synced at every write."""
    require_redis()
    server = RedisServer(*ON_DISK)
    stores = [await connected(RedisStore(server.url(), name="load")) for _ in range(3)]
    limits = rates(principal="400/second burst 50", exact=exact)
    limiters = [RedisLimiter(store, limits) for store in stores]
    taken, went_on = 0, asyncio.Event()

    async def flood(limiter: RedisLimiter) -> None:
        nonlocal taken
        while True:
            if await outcome(limiter, "tool") is None:
                taken += 1
                went_on.set()
            await asyncio.sleep(0.0005)

    begun = now(server)
    tasks = [asyncio.create_task(flood(limiter)) for limiter in limiters]
    for _ in range(50 if SOAK else 3):
        async with asyncio.timeout(PATIENCE):
            before = taken
            while taken < before + 60:
                went_on.clear()
                await went_on.wait()
        server.kill()
        server.start()
    async with asyncio.timeout(PATIENCE):
        went_on.clear()
        await went_on.wait()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    seconds = now(server) - begun
    print(f"{taken} calls in {seconds:.3f} s, {50 + 400 * seconds:.0f} are allowed")
    assert taken <= 50 + 400 * seconds + 1
    for limiter, store in zip(limiters, stores, strict=True):
        await limiter.close()
        await store.close()
    server.stop()


async def test_a_limiter_that_is_closed_while_redis_is_away_leaves_nothing_behind(engine: RedisServer) -> None:
    store = await connected(RedisStore(engine.url(), name="away"))
    limiter = RedisLimiter(store, rates(tools={"held": {"concurrent": 1}}))
    await slot(limiter, "alice", "held")
    engine.kill()
    await limiter.close()
    await store.close()
    assert [task for task in asyncio.all_tasks() if "_probe" in repr(task)] == []


@requirement("P-20", everywhere=True)
@pytest.mark.parametrize(("leave", "come_back"), WAYS, ids=["frozen", "killed"])
async def test_p20_while_redis_is_away_a_process_counts_by_itself_if_that_is_set(
    engine: RedisServer, leave: Away, come_back: Away
) -> None:
    store = await connected(RedisStore(engine.url(), name="away"))
    limits = rates(principal="5/hour", address="3/hour", tools={"held": {"concurrent": 1}}, when_down="local")
    limiter = RedisLimiter(store, limits, name="shop")
    assert await outcome(limiter) is None
    leave(engine)
    first = await asyncio.gather(*(outcome(limiter) for _ in range(4)))
    release = await slot(limiter, "alice", "held")
    assert (await refused(limiter, "bob", "held")).scope == "concurrency"
    release()
    assert first == [None] * 4 and not any(await answers(limiter, 3, "alice"))
    assert (await answers(limiter, 4, "anonymous", address="10.0.0.1")).count(True) == 3
    come_back(engine)
    await until(lambda: not limiter.trouble)
    assert (await answers(limiter, 6, "carol")).count(True) == 5
    await limiter.close()
    await store.close()


@requirement("P-20", everywhere=True)
async def test_p20_while_redis_is_away_built_in_limits_stop_nobody(engine: RedisServer) -> None:
    store = await connected(RedisStore(engine.url(), name="away"))
    limiter = RedisLimiter(store, Rates(shared=True, tools={"mail": ToolRate(rate="9/hour")}))
    engine.kill()
    for _ in range(2):
        assert await outcome(limiter) is None
        assert "redis" in str(await outcome(limiter, "mail"))
    await limiter.close()
    await store.close()


# A server


KEY = token_bytes(32)


def shop(name: str, url: str, **limits: Any) -> Server:
    server = Server(name, rates=Rates(local=True, **limits), store=url, keys=[KEY], accept_loss=True)

    @server.tool
    async def mail() -> str:
        return "sent"

    return server


@requirement("SRV-603", "P-30", everywhere=True)
@pytest.mark.parametrize(("others", "most"), [("same", 5), ("other", 10)])
async def test_srv603_servers_on_one_redis_share_the_limits_that_were_set(others: str, most: int) -> None:
    url, name = shared_server().url(), fresh_name()
    names = [name, name if others == "same" else fresh_name()]
    servers = [shop(each, url, tools={"mail": ToolRate(rate="5/hour", concurrent=9)}) for each in names]
    async with Peer(servers[0]) as one, Peer(servers[1]) as other:
        said = [
            await peer.request("tools/call", {"name": "mail", "arguments": {}})
            for _ in range(8)
            for peer in (one, other)
        ]
    assert sum("error" not in each and not each["result"].get("isError") for each in said) == most


@requirement("P-20", everywhere=True)
async def test_p20_a_server_says_that_its_limits_cannot_be_counted(engine: RedisServer) -> None:
    server = shop(fresh_name(), engine.url(), principal="5/hour", lists="99/hour")
    async with Peer(server) as peer:
        engine.kill()
        for method in ("tools/call", "tools/list"):
            answer = await peer.request(method, {"name": "mail", "arguments": {}} if method == "tools/call" else {})
            assert "cannot be counted now" in answer["error"]["message"] and "redis" not in str(answer)
        assert "limits" in server.engine.guard_set.troubles()
        engine.start()
        await until(lambda: "limits" not in server.engine.guard_set.troubles())
        assert "error" not in await peer.request("tools/call", {"name": "mail", "arguments": {}})
