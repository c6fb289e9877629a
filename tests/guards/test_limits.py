"""How often callers may come: one behaviour, asked of each backend; then what only one of them has to show."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import example, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from msgspec import ValidationError, convert
from msgspec.json import decode, encode

from clocked_redis import ALWAYS_LEASED, ClockedRedisStore, connected
from handrail import Server
from handrail.errors import Kind
from handrail.guards.limits import (
    Admission,
    Limiter,
    MemoryLimiter,
    Rate,
    Rates,
    SharedLimiter,
    StoreLimiter,
    Throttled,
    ToolRate,
    network,
)
from handrail.guards.redis_limits import LEASING, RedisLimiter
from handrail.stores import Append, Delete, Put, Store, StoreError
from handrail.stores.memory import MemoryStore
from handrail.stores.sqlite import SqliteStore
from handrail.testing import Peer
from patience import PATIENCE, SOAK
from redis_servers import fresh_name, shared_cluster, shared_server
from requirements import requirement
from servers_calling import failure, said
from servers_http import Client, closed as closed, served
from servers_limits import HOUR, limited
from wires import HERE, Open, Wire
from wires_shared import everywhere, open_wire as open_wire, processes as processes, wire as wire

BACKENDS = ("memory", "store", "sqlite", "redis", "redis leased", *["redis cluster"] * SOAK)
SECOND = 1_000_000_000
UNLIMITED = {"principal": "", "address": "", "lists": ""}


class Clock:
    """Of nanoseconds; `seconds` is the same for stores."""

    def __init__(self) -> None:
        self.now = 1_800_000_000 * SECOND

    def __call__(self) -> int:
        return self.now

    def seconds(self) -> float:
        return self.now / SECOND

    def advance(self, seconds: float) -> None:
        self.now += math.ceil(seconds * SECOND)


async def ask(limiter: Limiter, principal: str, tool: str = "tool", address: str = "") -> Admission:
    answer = limiter.take(principal, tool, address)
    return await answer if isinstance(answer, Awaitable) else answer


async def answers(limiter: Limiter, count: int, principal: str, tool: str = "tool", address: str = "") -> list[bool]:
    """Whether each of so many calls was let through."""
    return [not isinstance(await ask(limiter, principal, tool, address), Throttled) for _ in range(count)]


async def refused(limiter: Limiter, principal: str, tool: str = "tool", address: str = "") -> Throttled:
    answer = await ask(limiter, principal, tool, address)
    assert isinstance(answer, Throttled), "let through"
    return answer


async def slot(limiter: Limiter, principal: str, tool: str = "tool") -> Callable[[], None]:
    answer = await ask(limiter, principal, tool)
    assert answer is not None and not isinstance(answer, Throttled), f"no slot: {answer}"
    return answer


def rates(**given: Any) -> Rates:
    return convert(UNLIMITED | given, Rates)


async def opened(backend: str, rates: Rates, clock: Clock, folder: str | Path) -> tuple[Limiter, Store | None]:
    if backend == "memory":
        return MemoryLimiter(rates, clock=clock), None
    if backend.startswith("redis"):
        url = shared_cluster().url if backend == "redis cluster" else shared_server().url()
        redis_store = ClockedRedisStore(url, clock, name=fresh_name())
        await connected(redis_store)
        await redis_store.put("rate:salt", b"always the same")
        leasing = ALWAYS_LEASED if backend == "redis leased" else LEASING
        return RedisLimiter(redis_store, rates, name="shop", leasing=leasing, clock=clock), redis_store
    store: Store = MemoryStore(clock=clock.seconds)
    if backend == "sqlite":
        store = SqliteStore(Path(folder, "state.db"), durable=False, clock=clock.seconds)
    await store.put("rate:salt", b"always the same")  # or two addresses meet in one bucket, now and then
    return StoreLimiter(store, rates, name="shop", clock=clock), store


@pytest.fixture
def clock() -> Clock:
    return Clock()


Make = Callable[..., Awaitable[Limiter]]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tick_of(backend: str) -> int:
    """Nanoseconds between two moments that the clock of a backend tells apart."""
    return 1000 if backend.startswith("redis") else 1


@pytest.fixture
async def make(backend: str, clock: Clock, tmp_path: Path) -> AsyncIterator[Make]:
    """`await make(principal="60/minute", …)`: a limiter with these limits and no others."""
    open_: list[tuple[Limiter, Store]] = []

    async def made(**given: Any) -> Limiter:
        limiter, store = await opened(backend, rates(**given), clock, tmp_path)
        if store is not None:
            open_.append((limiter, store))
        return limiter

    yield made
    for limiter, store in open_:
        assert isinstance(limiter, SharedLimiter)
        await limiter.close()
        await store.close()


# What can be written


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100/second", Rate(100, "second", 100)),
        ("60/minute", Rate(60, "minute", 60)),
        ("5000/hour", Rate(5000, "hour", 5000)),
        ("1/day", Rate(1, "day", 1)),
        ("10/minute burst 20", Rate(10, "minute", 20)),
        (" 10 / minute burst 5 ", Rate(10, "minute", 5)),
    ],
)
def test_a_rate_is_read(text: str, rate: Rate) -> None:
    assert Rate.parse(text) == rate


@given(st.builds(Rate, *[st.integers(1, 999_999_999)], st.sampled_from(["second", "hour"]), st.integers(1, 10**8)))
def test_a_rate_is_written_as_it_is_read(rate: Rate) -> None:
    assert Rate.parse(str(rate)) == rate


NO_RATES = ["", "60", "/minute", "60/fortnight", "0/minute", "-1/minute", "1.5/minute", "60/minute burst", "1e9/second"]


@pytest.mark.parametrize("text", [*NO_RATES, "60/minute burst 0", "60 per minute", "٣/minute", "1/minute\n2"])
def test_what_is_not_a_rate_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate, as '60/minute'"):
        Rate.parse(text)
    if text:
        with pytest.raises(ValueError, match=r"^lists: .* is not a rate"):
            Rates(lists=text)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"principals": "1/second"}, "unknown field `principals`"),
        ({"tool": {"rates": "1/second"}}, "unknown field `rates`"),
        ({"principal": "many"}, "principal: 'many' is not a rate"),
        ({"tools": {"mail": {"rate": "often"}}}, r"rate: 'often' is not a rate.*tools"),
        ({"tool": {"concurrent": 0}}, r"concurrent: 0 is less than 1.*\.tool"),
        ({"tool": {"cost": -1}}, "cost: -1.0 is not a number of calls"),
        ({"tools": {"big": {"cost": 6}}, "principal": "5/second"}, "tools.big.cost: 6 is more than `principal` ever"),
        ({"tool": {"cost": 2}, "address": "9/hour burst 1"}, "tool.cost: 2 is more than `address` ever has, 1"),
    ],
)
def test_a_wrong_section_is_refused_with_the_place(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        convert(section, Rates)


# What every backend does


async def test_as_many_as_the_rate_and_then_one_each_time_a_token_has_grown(make: Make, clock: Clock) -> None:
    limiter = await make(tool={"rate": "60/minute"})
    assert await answers(limiter, 61, "alice") == [True] * 60 + [False]
    clock.advance(1)
    assert await answers(limiter, 2, "alice") == [True, False]
    clock.advance(3600)
    assert await answers(limiter, 61, "alice") == [True] * 60 + [False]


@pytest.mark.parametrize("rate", ["7/second", "3/minute burst 11", "999/hour burst 2", "13/day"])
async def test_retry_after_is_exact(make: Make, backend: str, clock: Clock, rate: str) -> None:
    tick = tick_of(backend) / SECOND
    limiter = await make(principal=rate)
    assert all(await answers(limiter, Rate.parse(rate).burst, "alice"))
    for _ in range(5):
        wait = (await refused(limiter, "alice")).retry_after
        clock.advance(wait - 2 * tick)
        assert (await refused(limiter, "alice")).retry_after == pytest.approx(2 * tick, abs=1.5 * tick)
        clock.advance(2 * tick)
        assert await answers(limiter, 2, "alice") == [True, False]


async def test_callers_and_tools_do_not_share(make: Make) -> None:
    limiter = await make(tool={"rate": "2/hour"})
    assert await answers(limiter, 3, "alice", "a") == [True, True, False]
    assert await answers(limiter, 3, "bob", "a") == [True, True, False]
    assert await answers(limiter, 3, "alice", "b") == [True, True, False]


async def test_names_that_look_like_others_do_not_share(make: Make) -> None:
    limiter = await make(principal="1/hour", tool={"rate": "5/hour"}, tools={"slow*": {"concurrent": 1}})
    assert await answers(limiter, 1, "a", "x:principal") == [True]
    assert await answers(limiter, 1, "a:tool x", "y") == [True]
    for tool in ("slow", "slow:counts", "slow:ends", "slow{a}", "slow%3A"):
        await slot(limiter, f"{tool} caller", tool)


async def test_the_tools_of_a_caller_share_what_the_caller_has(make: Make) -> None:
    limiter = await make(principal="3/hour")
    assert await answers(limiter, 2, "alice", "a") == [True, True]
    assert await answers(limiter, 2, "alice", "b") == [True, False]
    assert await answers(limiter, 1, "bob", "b") == [True]


async def test_a_call_that_one_limit_refuses_takes_nothing_from_the_others(make: Make) -> None:
    limiter = await make(principal="4/hour", tool={"rate": "2/hour"}, tools={"full": {"concurrent": 1}})
    assert await answers(limiter, 50, "alice", "a") == [True] * 2 + [False] * 48
    give_back = await slot(limiter, "alice", "full")
    assert (await refused(limiter, "alice", "full")).scope == "concurrency"
    assert await answers(limiter, 50, "alice", "b") == [True] + [False] * 49
    assert await answers(limiter, 2, "bob", "b") == [True] * 2
    give_back()
    assert (await refused(limiter, "alice", "full")).scope == "principal"
    (await slot(limiter, "bob", "full"))()


async def test_who_is_refused_by_two_limits_is_told_the_later_time(make: Make, clock: Clock) -> None:
    limiter = await make(principal="1/minute", tool={"rate": "1/hour"}, tools={"quick": {"rate": "1/second"}})
    assert await answers(limiter, 1, "alice") == [True]
    assert await refused(limiter, "alice") == Throttled(3600.0, "1/hour for this tool", "tool")
    assert await answers(limiter, 1, "bob", "quick") == [True]
    assert await refused(limiter, "bob", "quick") == Throttled(60.0, "1/minute for this caller", "principal")


async def test_the_first_pattern_that_fits_a_tool_holds(make: Make) -> None:
    tools = {"mail_send": {"rate": "1/hour"}, "mail_*": {"rate": "2/hour"}, "mail_read": {"rate": "9/hour"}}
    limiter = await make(tool={"rate": "3/hour"}, tools=tools)
    for tool, most in (("mail_send", 1), ("mail_read", 2), ("mail_list", 2), ("MAIL_read", 3), ("mail", 3)):
        assert (await answers(limiter, 10, "alice", tool)).count(True) == most, tool


async def test_a_call_costs_what_its_tool_costs(make: Make, clock: Clock) -> None:
    limiter = await make(principal="10/minute", tools={"big": {"cost": 4}, "free": {"cost": 0}, "half": {"cost": 0.5}})
    assert await answers(limiter, 3, "alice", "big") == [True, True, False]
    assert await answers(limiter, 5, "alice", "half") == [True, True, True, True, False]
    assert all(await answers(limiter, 100, "alice", "free"))
    assert (await refused(limiter, "alice", "big")).retry_after == 24
    assert (await refused(limiter, "alice", "half")).retry_after == 3
    clock.advance(24)
    assert await answers(limiter, 1, "alice", "big") == [True]


async def test_a_slot_by_itself_costs_nothing_but_itself(make: Make) -> None:
    limiter = await make(principal="1/hour", tools={"slow": {"concurrent": 1}})

    async def place(tool: str) -> Admission:
        answer = limiter.take_slot(tool)
        return await answer if isinstance(answer, Awaitable) else answer

    for _ in range(3):
        give_back = await place("slow")
        assert give_back is not None and not isinstance(give_back, Throttled)
        assert await place("slow") == Throttled(1.0, "1 of this tool at once", "concurrency")
        assert (await refused(limiter, "bob", "slow")).scope == "concurrency"  # it is one of those calls take
        give_back()
    assert await place("quick") is None
    assert await answers(limiter, 2, "alice") == [True, False]


async def test_slots_are_for_all_callers_and_come_back(make: Make) -> None:
    limiter = await make(tools={"slow": {"concurrent": 2}})
    first, second = await slot(limiter, "alice", "slow"), await slot(limiter, "bob", "slow")
    assert await refused(limiter, "carol", "slow") == Throttled(1.0, "2 of this tool at once", "concurrency")
    assert await ask(limiter, "carol", "quick") is None
    first()
    third = await slot(limiter, "carol", "slow")
    assert (await refused(limiter, "alice", "slow")).scope == "concurrency"
    second()
    third()
    for give_back in [await slot(limiter, "alice", "slow") for _ in range(2)]:
        give_back()


async def test_calls_at_the_same_moment_are_counted_one_by_one(make: Make) -> None:
    limiter = await make(principal="100/hour", tools={"slow": {"concurrent": 7}})
    said = await asyncio.gather(*(ask(limiter, "alice") for _ in range(90)))
    assert said == [None] * 90
    mixed = await asyncio.gather(*(ask(limiter, "alice", "slow") for _ in range(400)))
    assert Counter(each.scope if isinstance(each, Throttled) else "" for each in mixed) == {"": 7, "concurrency": 393}
    assert (await answers(limiter, 9, "alice")).count(True) == 3


STRANGERS = [
    ("10.0.0.1", "10.0.0.1", True),
    ("10.0.0.1", "10.0.0.2", False),
    ("2001:db8::1", "2001:db8::8000:0:ffff:2", True),
    ("2001:db8::1", "2001:0DB8:0:0:5::%eth0", True),
    ("2001:db8::1", "2001:db8:0:1::1", False),
    ("::ffff:10.0.0.1", "10.0.0.1", True),
    ("unix:3", "unix:4", False),
]


@requirement("P-30", everywhere=True)
@pytest.mark.parametrize(("one", "other", "is_same"), STRANGERS)
async def test_p30_a_caller_without_a_name_is_known_by_its_address(
    make: Make, one: str, other: str, is_same: bool
) -> None:
    limiter = await make(address="1/hour")
    assert await answers(limiter, 1, "anonymous", address=one) == [True]
    assert await answers(limiter, 1, "anonymous", address=other) == [not is_same]
    assert (network(one) == network(other)) is is_same


async def test_an_address_says_nothing_of_a_caller_with_a_name(make: Make) -> None:
    limiter = await make(address="1/hour", principal="3/hour", tool={"rate": "2/hour"})
    assert await answers(limiter, 2, "anonymous", "a", "alice") == [True, False]
    assert await answers(limiter, 3, "alice", "a", "10.0.0.1") == [True, True, False]
    assert await answers(limiter, 2, "alice", "b", "10.0.0.1") == [True, False]
    assert (await refused(limiter, "anonymous", "a", "alice")).scope == "address"


@requirement("P-30", everywhere=True)
async def test_p30_requests_that_are_not_calls_have_a_limit_of_their_own(make: Make) -> None:
    limiter = await make(lists="2/minute", principal="1/minute", address="1/minute")
    assert await answers(limiter, 3, "alice", "") == [True, True, False]
    assert await refused(limiter, "alice", "") == Throttled(30.0, "2/minute for requests that are not calls", "lists")
    assert await answers(limiter, 3, "anonymous", "", "10.0.0.1") == [True, True, False]
    assert await answers(limiter, 2, "alice") == [True, False]


@pytest.mark.parametrize("local", [False, True])
async def test_the_local_user_meets_the_limits_of_tools_and_others_only_on_request(make: Make, local: bool) -> None:
    limiter = await make(principal="1/hour", lists="1/hour", tools={"mail": {"rate": "1/hour"}}, local=local)
    assert all(await answers(limiter, 9, "local", "")) is not local
    assert await answers(limiter, 2, "local", "mail") == [True, False]
    assert all(await answers(limiter, 9, "local", "other")) is not local


@requirement("P-30", everywhere=True)
def test_p30_the_defaults_stop_a_flood_and_nobody_else(clock: Clock) -> None:
    limiter = MemoryLimiter(Rates(), clock=clock)

    def let_through(*who: str) -> int:
        return sum(limiter.take(*who) is None for _ in range(10_000))

    assert let_through("alice", "tool") == 5000
    assert let_through("anonymous", "tool", "10.0.0.1") == 2000
    assert let_through("alice", "") == 2000
    clock.advance(1)
    assert let_through("alice", "tool") == 1000
    assert let_through("anonymous", "tool", "10.0.0.1") == 200
    assert let_through("alice", "") == 200


# Against a model, in exact arithmetic


class Model:
    """What the limits mean, in the shortest words: tokens, and when they were last counted."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.tokens: dict[tuple[str, ...], tuple[Fraction, int]] = {}
        self.running: Counter[str] = Counter()

    def wait(self, principal: str, tool: str, address: str, now: int) -> tuple[Fraction, dict[Any, Any]]:
        rates = self.rates
        who = network(address) if principal == "anonymous" and address else ""
        its = next((rates.tools[name] for name in rates.tools if name == tool), rates.tool)
        wanted: list[tuple[tuple[str, ...], str, Fraction]] = [(("tool", tool, principal, who), its.rate, Fraction(1))]
        whole = ("address", who) if who else ("principal", principal)
        wanted.append((whole, rates.address if who else rates.principal, Fraction(its.cost)))
        if not tool:
            wanted = [(("lists", principal, who), rates.lists, Fraction(1))]
        if principal == "local":
            wanted = [each for each in wanted if each[0][0] == "tool"]
        worst, after = Fraction(0), {}
        for key, text, cost in wanted:
            if text:
                rate = Rate.parse(text)
                speed = Fraction(rate.count, {"second": 1, "minute": 60, "hour": 3600}[rate.unit] * SECOND)
                tokens, then = self.tokens.get(key, (Fraction(rate.burst), now))
                tokens = min(Fraction(rate.burst), tokens + (now - then) * speed)
                worst = max(worst, (cost - tokens) / speed)
                after[key] = (tokens - cost, now)
        return worst, after

    def take(self, principal: str, tool: str, address: str, now: int) -> float | str | None:
        """None, the seconds to wait, or `"busy"`."""
        worst, after = self.wait(principal, tool, address, now)
        if worst:
            return float(worst / SECOND)
        its = self.rates.tools.get(tool)
        if its is not None and its.concurrent is not None:
            if self.running[tool] >= its.concurrent:
                return "busy"
            self.running[tool] += 1
        self.tokens |= after
        return None


EVEN = st.sampled_from(["4/second", "10/second burst 3", "60/minute", "30/minute burst 7", "5/second burst 20", ""])
"""Whose tokens take a whole number of nanoseconds."""
CALLS = st.tuples(
    st.sampled_from(["alice", "bob", "local", "anonymous"]),
    st.sampled_from(["", "plain", "big", "slow"]),
    st.sampled_from(["", "10.0.0.1", "2001:db8::1", "2001:db8::2"]),
)


class Machine(RuleBasedStateMachine):
    backend = ""

    @initialize(principal=EVEN, address=EVEN, lists=EVEN, tool=EVEN, big=EVEN, slots=st.integers(1, 3))
    def begin(self, slots: int, tool: str, big: str, principal: str, address: str, lists: str) -> None:
        tools = {"big": ToolRate(rate=big, cost=2.5), "slow": ToolRate(concurrent=slots, cost=0.25)}
        rates = Rates(principal=principal, address=address, lists=lists, tool=ToolRate(rate=tool), tools=tools)
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.limiter, self.store = self.runner.run(opened(self.backend, rates, self.clock, self.folder.name))
        self.model = Model(rates)
        self.held: list[Callable[[], None]] = []
        self.refused: tuple[tuple[str, str, str], float] | None = None

    async def _take(self, call: tuple[str, str, str]) -> float | str | None:
        answer = await ask(self.limiter, *call)
        self.refused = None
        if isinstance(answer, Throttled) and self.backend.startswith("redis"):
            # A slot is asked for before the rate; and of a bucket that is leased not all can be had at any time.
            if answer.scope == "concurrency":
                assert self.model.running[call[1]] >= (self.model.rates.tools[call[1]].concurrent or 0)
                return "busy"
            if self.backend == "redis leased":
                return answer.retry_after
        expected = self.model.take(*call, self.clock.now // tick_of(self.backend) * tick_of(self.backend))
        if isinstance(answer, Throttled):
            wait = pytest.approx(answer.retry_after, abs=tick_of(self.backend) / SECOND)
            assert expected == ("busy" if answer.scope == "concurrency" else wait), (call, answer)
            if answer.scope != "concurrency":
                self.refused = (call, answer.retry_after)
        else:
            assert expected is None, (call, expected)
            if answer is not None:
                self.held.append(answer)
        return expected

    @rule(call=CALLS, count=st.integers(1, 20))
    def take(self, call: tuple[str, str, str], count: int) -> None:
        async def take() -> None:
            for _ in range(count):
                await self._take(call)

        self.runner.run(take())

    @rule(nanoseconds=st.one_of(st.integers(0, 5 * SECOND), st.sampled_from([1, SECOND // 10, SECOND, 40 * SECOND])))
    def wait(self, nanoseconds: int) -> None:
        self.clock.now += nanoseconds
        self.refused = None

    @precondition(lambda self: self.refused)
    @rule()
    def come_back_in_time(self) -> None:
        assert self.refused is not None
        call, wait = self.refused
        self.clock.advance(wait)
        assert self.runner.run(self._take(call)) in (None, "busy")

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        async def release() -> None:
            self.held.pop()()

        self.runner.run(release())
        self.model.running["slow"] -= 1

    def teardown(self) -> None:
        if isinstance(self.limiter, SharedLimiter) and self.store is not None:
            self.runner.run(self.limiter.close())
            self.runner.run(self.store.close())
        self.runner.close()
        self.folder.cleanup()


@pytest.mark.parametrize(
    ("backend", "examples"), [("memory", 50), ("store", 25), ("sqlite", 8), ("redis", 12), ("redis leased", 12)]
)
def test_every_backend_does_what_the_model_does(backend: str, examples: int) -> None:
    machine = type("BackedMachine", (Machine,), {"backend": backend})
    chosen = settings(max_examples=examples, stateful_step_count=30)
    run_state_machine_as_test(machine, settings=chosen)


@settings(max_examples=50)
@given(
    rate=st.builds(
        Rate, st.integers(1, 2000), st.sampled_from(["second", "minute", "hour", "day"]), st.integers(1, 50)
    ),
    pauses=st.lists(st.integers(0, 3 * SECOND), max_size=60),
)
@example(rate=Rate(3, "second", 1), pauses=[0, 0, 0])  # whose tokens take no whole number of nanoseconds
def test_no_rate_is_ever_exceeded_and_every_wait_is_worth_it(rate: Rate, pauses: list[int]) -> None:
    clock = Clock()
    limiter = MemoryLimiter(rates(principal=str(rate)), clock=clock)
    begun, taken = clock.now, 0
    speed = Fraction(rate.count, {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}[rate.unit] * SECOND)
    for pause in pauses:
        clock.now += pause
        answer = limiter.take("alice", "tool")
        taken += answer is None
        if isinstance(answer, Throttled):
            clock.advance(answer.retry_after)
            assert limiter.take("alice", "tool") is None
            taken += 1
        assert taken <= rate.burst + (clock.now - begun) * speed


# Memory: a bounded number of buckets, and nobody loses a debt


def crowd(limiter: MemoryLimiter, numbers: Sequence[int]) -> list[bool]:
    return [limiter.take("anonymous", "tool", f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}") is None for n in numbers]


@requirement("P-30", everywhere=True)
def test_p30_made_up_addresses_do_not_wash_away_a_debt(clock: Clock) -> None:
    limiter = MemoryLimiter(rates(address="5/hour"), max_buckets=1000, clock=clock)
    assert [limiter.take("anonymous", "tool", "192.0.2.1") is None for _ in range(6)] == [True] * 5 + [False]
    let_in = crowd(limiter, range(100_000))
    assert sum(let_in) == 999 + 5, "as many as there is room for, and then what the latecomers share"
    assert limiter.take("anonymous", "tool", "192.0.2.1") is not None
    assert limiter.take("alice", "tool") is None, "a name has a place of its own"
    clock.advance(3600)
    assert sum(crowd(limiter, range(100_000, 101_000))) > 900, "the old ones are forgotten as new ones come"


def test_principals_are_not_crowded_out_by_addresses(clock: Clock) -> None:
    limiter = MemoryLimiter(rates(address="5/hour", principal="1/hour"), max_buckets=10, clock=clock)
    crowd(limiter, range(100))
    assert [limiter.take(name, "tool") is None for name in ("alice", "bob", "alice", "bob")] == [True, True] + [
        False
    ] * 2


def test_no_more_is_kept_than_is_needed(clock: Clock) -> None:
    """Full buckets go as others come, a few at a time; those that are not full stay."""
    callers = [f"caller {n:<20}" for n in range(20_000)]
    before = sum(map(sys.getrefcount, callers))
    limiter = MemoryLimiter(rates(principal="1/second", tool={"rate": "10/second"}), clock=clock)
    for at, caller in enumerate(callers):
        assert limiter.take(caller, "tool") is None
        assert at < 10 or limiter.take(callers[at - 9], "tool") is not None, "forgotten too early"
        clock.advance(0.1)
        assert at % 1000 or sum(map(sys.getrefcount, callers)) - before < 400
    assert limiter.take(callers[-1], "tool") is not None


def test_refusals_leave_nothing_behind(clock: Clock) -> None:
    limiter = MemoryLimiter(rates(principal="1/hour", tool={"rate": "5/hour"}), clock=clock)
    name = "alice of wonderland"
    assert limiter.take(name, "tool") is None
    before = sys.getrefcount(name)
    for at in range(1000):
        assert limiter.take(name, f"tool {at}") is not None
    assert sys.getrefcount(name) == before


# A store: leases, clocks that go back, and other processes


class Shared:
    """Limiters on one store, each as in a process of its own."""

    def __init__(self, clock: Clock, store: Store) -> None:
        self.clock = clock
        self.store = store
        self.limiters: list[StoreLimiter] = []

    def limiter(self, *, lease_seconds: float = 30, **given: Any) -> StoreLimiter:
        self.limiters.append(
            StoreLimiter(self.store, rates(**given), lease_seconds=lease_seconds, clock=lambda: self.clock.now)
        )
        return self.limiters[-1]


@pytest.fixture(params=["store", "sqlite"])
async def shared(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> AsyncIterator[Shared]:
    _, store = await opened(request.param, Rates(), clock, tmp_path)
    assert store is not None
    shared = Shared(clock, store)
    yield shared
    for limiter in shared.limiters:
        await limiter.close()
    await store.close()


async def test_limiters_on_one_store_share(shared: Shared) -> None:
    one, other = (shared.limiter(principal="4/hour", tools={"slow": {"concurrent": 2}}) for _ in range(2))
    assert await answers(one, 2, "alice") == [True, True]
    assert await answers(other, 3, "alice") == [True, True, False]
    assert await answers(one, 1, "alice") == [False]
    first, second = await slot(one, "bob", "slow"), await slot(other, "bob", "slow")
    assert (await refused(one, "bob", "slow")).scope == "concurrency"
    first()
    await one.close()
    (await slot(other, "bob", "slow"))()
    second()


@requirement("P-21", everywhere=True)
@pytest.mark.parametrize("jump", [-1e-9, -0.5, -59, -3600, -86_400 * 365, -1_799_000_000])
async def test_p21_a_clock_that_goes_back_gives_nothing_away_and_locks_out_for_no_longer_than_a_bucket_takes(
    shared: Shared, clock: Clock, jump: float
) -> None:
    limits: dict[str, Any] = {"principal": "60/minute", "tools": {"slow": {"concurrent": 1}}}
    before = shared.limiter(**limits)
    assert await answers(before, 61, "alice") == [True] * 60 + [False]
    assert all(await answers(before, 30, "bob"))
    clock.now += round(jump * SECOND)
    for limiter in (before, shared.limiter(**limits)):
        assert not any(await answers(limiter, 5, "alice"))
        assert (await refused(limiter, "alice")).retry_after <= 60
    assert sum(await answers(before, 61, "bob")) <= 30
    clock.advance(60)
    assert await answers(before, 61, "alice") == [True] * 60 + [False]
    assert await answers(before, 61, "bob") == [True] * 60 + [False]


@requirement("P-21", everywhere=True)
async def test_p21_a_clock_that_goes_back_does_not_keep_the_slots_of_the_dead(shared: Shared, clock: Clock) -> None:
    dead, other = (shared.limiter(tools={"slow": {"concurrent": 1}}) for _ in range(2))
    await slot(dead, "alice", "slow")
    clock.advance(-86_400)
    assert (await refused(other, "alice", "slow")).scope == "concurrency"
    clock.advance(30)
    (await slot(other, "alice", "slow"))()


async def test_a_slot_is_held_as_long_as_its_lease_is_renewed(shared: Shared, clock: Clock) -> None:
    holder, other = (shared.limiter(tools={"slow": {"concurrent": 1}}) for _ in range(2))
    await slot(holder, "alice", "slow")
    for _ in range(10):
        clock.advance(20)
        holder.renew()
        await ask(holder, "bob", "slow")  # it is done before this
        assert (await refused(other, "alice", "slow")).scope == "concurrency"
    clock.advance(30)
    (await slot(other, "alice", "slow"))()


async def test_leases_are_renewed_by_themselves(shared: Shared, clock: Clock) -> None:
    holder = shared.limiter(lease_seconds=0.03, tools={"slow": {"concurrent": 1}})
    give_back = await slot(holder, "alice", "slow")
    (key, first), *_ = await shared.store.scan("slots:")
    clock.advance(0.015)
    async with asyncio.timeout(PATIENCE):
        while await shared.store.get(key) == first:  # noqa: ASYNC110 - a store has no event for it
            await asyncio.sleep(0.001)
    give_back()
    async with asyncio.timeout(PATIENCE):
        while await shared.store.get(key) is not None:  # noqa: ASYNC110 - a store has no event for it
            await asyncio.sleep(0.001)


async def test_a_slot_that_was_lost_and_is_given_back_is_nobody_elses(shared: Shared, clock: Clock) -> None:
    """As in a process that was stopped for longer than its lease."""
    sleeper, other = (shared.limiter(tools={"slow": {"concurrent": 1}}) for _ in range(2))
    lost = await slot(sleeper, "alice", "slow")
    clock.advance(31)
    theirs = await slot(other, "alice", "slow")
    lost()
    assert (await refused(sleeper, "alice", "slow")).scope == "concurrency"
    theirs()


async def test_a_limiter_that_is_closed_holds_nothing(shared: Shared) -> None:
    limits = {"slow": {"concurrent": 3}}
    ended, other = shared.limiter(tools=limits), shared.limiter(tools=limits)
    tickets = [await slot(ended, "alice", "slow") for _ in range(3)]
    await ended.close()
    assert await shared.store.scan("slots:") == []
    for give_back in [await slot(other, "alice", "slow") for _ in range(3)]:
        give_back()
    tickets[0]()
    await ended.close()


async def test_addresses_take_a_bounded_number_of_keys_and_nobody_can_tell_which(clock: Clock) -> None:
    taken = []
    for _ in range(2):
        store = MemoryStore(clock=clock.seconds)
        limiter = StoreLimiter(store, rates(address="5/hour"), clock=clock)
        await asyncio.gather(*(ask(limiter, "anonymous", address=f"2001:db8:{n:x}::1") for n in range(2000)))
        taken.append({key for key, _ in await store.scan("rate:address:", limit=3000)})
        await limiter.close()
    assert all(re.fullmatch(r"rate:address:4:[0-9a-f]{4}:address", key) for key in taken[0])
    assert 1900 < len(taken[0]) <= 2000
    assert len(taken[0] & taken[1]) < 200, "the same addresses in the same buckets of another store"


async def test_what_is_kept_ends_by_itself(shared: Shared, clock: Clock) -> None:
    limiter = shared.limiter(principal="1/second", tools={"slow": {"concurrent": 1}})
    await slot(limiter, "alice", "slow")
    assert len(await shared.store.scan("")) == 3
    clock.advance(31)
    assert [key for key, _ in await shared.store.scan("")] == ["rate:salt"]


async def test_a_flood_of_refused_calls_does_not_reach_the_store(clock: Clock) -> None:
    store = Interfering(clock)
    limiter = StoreLimiter(store, rates(principal="2/hour"), clock=clock)
    assert await answers(limiter, 3, "alice") == [True, True, False]
    asked = store.asked
    assert not any([await ask(limiter, "alice") is None for _ in range(1000)])
    assert store.asked == asked
    clock.advance(900)
    assert (await refused(limiter, "alice")).retry_after == 900
    clock.advance(900)
    assert await answers(limiter, 2, "alice") == [True, False]


class Interfering(MemoryStore):
    """Counts what it is asked, and does something at each commit."""

    def __init__(self, clock: Clock, interfere: Callable[[], bool] = lambda: True) -> None:
        super().__init__(clock=clock.seconds)
        self.interfere = interfere
        self.asked = 0

    async def get(self, key: str) -> bytes | None:
        self.asked += 1
        return await super().get(key)

    async def commit(self, changes: Sequence[Put | Delete | Append]) -> bool:
        self.asked += 1
        return self.interfere() and await super().commit(changes)


async def test_who_loses_every_race_is_refused(clock: Clock) -> None:
    limiter = StoreLimiter(Interfering(clock, lambda: False), rates(principal="2/hour"), clock=clock)
    assert (await refused(limiter, "alice")).limit == "what the store can count"
    await limiter.close()


async def test_who_loses_some_races_is_counted_once(clock: Clock) -> None:
    outcomes = iter([False] * 50 + [True] + [False] * 9 + [True])
    limiter = StoreLimiter(Interfering(clock, lambda: next(outcomes)), rates(principal="2/hour"), clock=clock)
    assert await answers(limiter, 3, "alice") == [True, True, False]


async def test_without_the_store_nobody_is_let_through(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db", durable=False)
    limiter = StoreLimiter(store, rates(principal="2/hour"))
    await store.close()
    for told in await asyncio.gather(ask(limiter, "alice"), ask(limiter, "bob"), return_exceptions=True):
        assert isinstance(told, StoreError) and str(told) == "limits: the store was closed"
    await limiter.close()


@pytest.mark.parametrize("moment", ["while it is decided", "when it was given", "before it is asked"])
async def test_a_slot_that_nobody_waits_for_any_more_comes_back(clock: Clock, moment: str) -> None:
    store = Interfering(clock)
    limiter = StoreLimiter(store, rates(tools={"slow": {"concurrent": 1}}), clock=clock)
    task = asyncio.ensure_future(ask(limiter, "alice", "slow"))

    def cancel() -> bool:
        if moment == "when it was given":
            asyncio.get_running_loop().call_soon(task.cancel)
        else:
            task.cancel()
        return True

    store.interfere = cancel
    if moment == "before it is asked":
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store.interfere = lambda: True
    (await slot(limiter, "alice", "slow"))()
    await limiter.close()


# Other processes


async def run(*arguments: str | Path | int) -> Process:
    words = [str(each) for each in arguments]
    return await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "servers_limits.py"), *words, stdin=PIPE, stdout=PIPE
    )


async def take_all(count: int, path: Path, limits: Rates, tries: int) -> list[list[float]]:
    """What so many processes tell, who begin together."""
    workers = [await run("take", path, encode(limits).decode(), tries) for _ in range(count)]
    for worker in workers:
        assert worker.stdout is not None
        assert await worker.stdout.readline() == b"ready\n"
    told = await asyncio.gather(*(worker.communicate(b"go\n") for worker in workers))
    assert [worker.returncode for worker in workers] == [0] * count
    return [[float(word) for word in out.split()] for out, _ in told]


@requirement("P-30", everywhere=True)
@pytest.mark.parametrize("count", [2, 4])
async def test_srv603_processes_that_share_a_file_share_a_limit_to_the_call(tmp_path: Path, count: int) -> None:
    """No clock runs, so that there is one right number. None of them asks for as much."""
    told = await take_all(count, tmp_path / "state.db", rates(principal="300/hour"), 200)
    assert sum(taken for taken, *_ in told) == 300


@requirement("P-30", everywhere=True)
async def test_srv603_processes_that_share_a_file_do_not_exceed_the_rate(tmp_path: Path) -> None:
    limits = rates(principal="200/second burst 50", tool={"rate": "1000/second burst 60"})
    told = await take_all(2, tmp_path / "state.db", limits, 0)
    seconds = max(end for _, _, end in told) - min(begin for _, begin, _ in told)
    taken = sum(taken for taken, *_ in told)
    assert 50 < taken <= 50 + 200 * seconds + 1


@requirement("P-30", everywhere=True)
async def test_p30_the_slots_of_a_process_that_was_killed_come_back_with_its_lease(tmp_path: Path) -> None:
    path, limits = tmp_path / "state.db", rates(tools={"tool": {"concurrent": 3}})
    holder = await run("hold", path, encode(limits).decode(), 2)
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    holder.kill()
    await holder.communicate()
    store, clock = SqliteStore(path, durable=False), Clock()
    leases = decode(await store.get("slots:tool") or b"", type=dict[str, tuple[int, int]])
    clock.now = max(end for _, end in leases.values()) - 1
    limiter = StoreLimiter(store, limits, lease_seconds=HOUR, clock=clock)
    await slot(limiter, "alice")
    assert (await refused(limiter, "alice")).scope == "concurrency"
    clock.now += 1
    for give_back in [await slot(limiter, "alice") for _ in range(2)]:
        give_back()
    await limiter.close()
    await store.close()


# What the caller is told


@requirement("SRV-603", "P-30")
@everywhere()
async def test_srv603_a_limit_is_told_with_the_time_to_come_back(open_wire: Open) -> None:
    """A tool's limit as a failure of the tool, which a model can read; a caller's as an error with the code 429."""
    wire: Wire = await open_wire("servers_limits:limited")
    who = {"who": f"{wire.revision} over {wire.transport}"}
    assert [said(await wire.call("narrow", who)) for _ in range(2)] == ["done"] * 2
    text = "Too many requests: the limit is 2/hour for this tool; retry after 1800 s"
    assert failure(await wire.call("narrow", who)) == text
    error = (await wire.call("costly", who))["error"]
    assert error["code"] == 429
    assert error["message"] == "Too many requests: the limit is 3/hour for this caller; retry after 2400 s"
    assert error["data"] == {"retryAfter": 2400}
    assert said(await wire.call("costly", {"who": f"another {who}"})) == "done"


@requirement("SRV-603", "P-30")
@pytest.mark.parametrize("revision", ["2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28", "pocket"])
async def test_p30_over_http_the_header_says_when_to_come_back(revision: str, ran: Callable[[str, str], None]) -> None:
    async with served(limited().asgi()) as url:
        client = await Client(url, revision).open()
        ran(revision, "http")
        reply = await client.post(client.call(1, "costly", {"who": "alice"}))
        assert (reply.status, reply.headers.get("retry-after")) == (200, None)
        reply = await client.post(client.call(2, "costly", {"who": "alice"}))
        assert (reply.status, reply.headers["retry-after"]) == (429, "3600")
        for number in range(2):
            reply = await client.post(client.call(3 + number, "narrow", {"who": "bob"}))
        reply = await client.post(client.call(5, "narrow", {"who": "bob"}))
        assert (reply.status, reply.headers.get("retry-after")) == (200, None)


@pytest.mark.parametrize(
    ("scope", "kind"),
    [
        ("principal", Kind.OVERLOADED),
        ("address", Kind.OVERLOADED),
        ("lists", Kind.OVERLOADED),
        ("tool", Kind.THROTTLED),
        ("concurrency", Kind.THROTTLED),
    ],
)
def test_the_kind_of_a_refusal_follows_from_its_scope(scope: Any, kind: Kind) -> None:
    refusal = Throttled(0.25, "4/second for somebody", scope).refusal()
    assert (refusal.kind, refusal.retry_after) == (kind, 0.25)
    assert str(refusal) == "Too many requests: the limit is 4/second for somebody; retry after 1 s"


# What is shared without a word


def shop(name: str, **options: Any) -> Server:
    server = Server(name, **options)

    @server.tool
    async def mail() -> str:
        return "sent"

    @server.tool
    async def look() -> str:
        return "seen"

    return server


MAIL = {"mail": ToolRate(rate="5/hour")}


@requirement("SRV-603", "P-30", everywhere=True)
@pytest.mark.parametrize(
    ("names", "given", "tool", "most"),
    [
        (("shop", "shop"), {"tools": MAIL}, "mail", 5),
        (("shop", "other"), {"tools": MAIL}, "mail", 10),  # each has its own
        (("shop", "shop"), {"tools": MAIL, "shared": False}, "mail", 10),
        (("shop", "shop"), {"tool": ToolRate(rate="5/hour")}, "look", 5),
        (("shop", "shop"), {"principal": "5/hour", "local": True}, "look", 5),
        (("shop", "shop"), {"principal": "5/hour", "local": True, "shared": False}, "look", 10),
    ],
)
async def test_srv603_a_limit_that_was_set_holds_for_all_processes_of_a_server(
    names: tuple[str, str], given: dict[str, Any], tool: str, most: int, tmp_path: Path
) -> None:
    servers = [shop(name, rates=Rates(**given), audit=tmp_path / "state.db") for name in names]
    async with Peer(servers[0]) as one, Peer(servers[1]) as other:
        said = [
            (await peer.request("tools/call", {"name": tool, "arguments": {}}))
            for _ in range(8)
            for peer in (one, other)
        ]
    assert sum("error" not in each and not each["result"].get("isError") for each in said) == most


@requirement("SRV-603", "P-30", everywhere=True)
@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"lists": "5/hour", "local": True}, 5),
        ({"lists": "5/hour", "local": True, "shared": False}, 8),  # and the handshake of each
        ({"lists": "5/hour"}, 16),  # the local user is limited only on request
    ],
)
async def test_srv603_lists_are_counted_over_all_processes_of_a_server(
    given: dict[str, Any], most: int, tmp_path: Path
) -> None:
    servers = [shop("shop", rates=Rates(**given), audit=tmp_path / "state.db") for _ in range(2)]
    async with Peer(servers[0]) as one, Peer(servers[1]) as other:
        # All at once: none is let through because the others were not counted yet.
        said = await asyncio.gather(*(peer.request("tools/list", {}) for _ in range(8) for peer in (one, other)))
    assert sum("error" not in each for each in said) == most
    assert all(each["error"]["data"]["retryAfter"] > 0 for each in said if "error" in each)


@requirement("SRV-603", "P-30", everywhere=True)
@pytest.mark.parametrize("revision", ["2025-06-18", "2026-07-28"])
async def test_srv603_lists_over_http_are_counted_over_all_processes(revision: str, tmp_path: Path) -> None:
    rates = Rates(lists="5/hour")
    endpoints = [shop("shop", rates=rates, audit=tmp_path / "state.db").asgi() for _ in range(2)]
    async with served(endpoints[0]) as one, served(endpoints[1]) as other:
        clients = [await Client(url, revision).open() for url in (one, other)]
        methods = ["tools/list", "server/discover"] * 2 if revision == "2026-07-28" else ["tools/list"] * 4
        asked = [client.post(client.message(at, method)) for client in clients for at, method in enumerate(methods)]
        replies = await asyncio.gather(*asked)
    assert sorted(each.status for each in replies) == [200] * 5 + [429] * 3
    assert all(int(each.headers["retry-after"]) > 0 for each in replies if each.status == 429)


@requirement("SRV-603", "P-30", everywhere=True)
async def test_srv603_a_list_that_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    class Away(MemoryStore):
        async def get(self, key: str) -> bytes | None:
            raise StoreError("gone")

    server = shop("shop", rates=Rates(lists="5/hour", local=True, shared=True), store=Away())
    async with Peer(server) as peer:
        refused = await peer.request("tools/list", {})
    assert "cannot be counted now" in refused["error"]["message"] and "gone" not in str(refused)


class Verbs:
    """A store that does not inherit from `Store`: it has the verbs, and no features."""

    def __init__(self) -> None:
        inner = MemoryStore()
        self.get, self.put, self.delete, self.scan, self.add = inner.get, inner.put, inner.delete, inner.scan, inner.add
        self.append, self.read, self.publish, self.subscribe = inner.append, inner.read, inner.publish, inner.subscribe
        self.commit, self.close = inner.commit, inner.close


async def test_limits_are_shared_in_a_store_that_has_the_verbs_alone() -> None:
    server = shop("shop", rates=Rates(lists="5/hour", local=True), store=cast(Any, Verbs()))
    async with Peer(server) as peer:
        said = [await peer.request("tools/list", {}) for _ in range(6)]
    assert ["error" in each for each in said] == [False] * 4 + [True] * 2  # the handshake counts too
    endpoint = shop("shop").asgi(store=cast(Any, Verbs()))
    async with served(endpoint) as url:
        client = await Client(url, "2025-06-18").open()
        assert (await client.post(client.message(1, "tools/list"))).status == 200


async def test_limits_are_shared_in_memory_where_the_store_is_a_url() -> None:
    server = shop("shop", rates=Rates(lists="5/hour", local=True, shared=True), store="memory:")
    async with Peer(server) as peer:
        said = [await peer.request("tools/list", {}) for _ in range(6)]
    assert ["error" in each for each in said] == [False] * 4 + [True] * 2  # the handshake counts too


@requirement("SRV-603", "P-30", everywhere=True)
async def test_srv603_workers_share_the_limits_that_were_set_without_an_audit(tmp_path: Path) -> None:
    stores = [SqliteStore(tmp_path / "sessions.db", durable=False) for _ in range(2)]
    endpoints = [shop("shop", rates=Rates(tools=MAIL)).asgi(store=store) for store in stores]
    async with served(endpoints[0]) as one, served(endpoints[1]) as other:
        clients = [Client(url, "2026-07-28") for url in (one, other)]
        said = [(await client.ask(client.call(at, "mail")))[1] for at in range(6) for client in clients]
    assert sum(not each["result"]["isError"] for each in said) == 5
    for store in stores:
        await store.close()


@requirement("SRV-603", everywhere=True)
@pytest.mark.parametrize(
    ("given", "together"),
    [
        ({}, None),
        ({"lists": "1/hour"}, ("", "", "1/hour", [])),
        ({"lists": ""}, None),
        ({"tools": {"dear": {"cost": 5}}}, None),
        ({"principal": ""}, None),
        ({"tools": {"mail": {"rate": "5/hour"}, "dear": {"cost": 5}}}, ("", "", "", ["5/hour", ""])),
        ({"tools": {"mail": {"concurrent": 2}}}, ("", "", "", [""])),
        ({"address": "9/hour"}, ("", "9/hour", "", [])),
        ({"shared": True}, ("1000/second burst 5000", "200/second burst 2000", "200/second burst 2000", [])),
        ({"shared": False, "principal": "5/hour"}, None),
    ],
)
def test_srv603_what_is_built_in_is_counted_by_each_process(given: dict[str, Any], together: Any) -> None:
    """A call that nobody has set a limit for asks no file."""
    made = convert(given, Rates)
    alone, shared = made.split()
    rates = shared and [each.rate for each in shared.tools.values()]
    assert (shared and (shared.principal, shared.address, shared.lists, rates)) == together
    if shared is None:
        assert alone == made
        return
    assert [alone.principal or shared.principal, alone.address or shared.address] == [made.principal, made.address]
    assert not (alone.principal and shared.principal) and not (alone.address and shared.address)
    assert (alone.lists or shared.lists) == made.lists and not (alone.lists and shared.lists)
    assert {each.cost for each in alone.tools.values()} == {each.cost for each in made.tools.values()}
    assert not any(each.rate or each.concurrent for each in (alone.tool, *alone.tools.values()))


async def test_srv603_a_call_without_a_limit_asks_no_store(clock: Clock) -> None:
    store = Interfering(clock)
    alone, together = convert({"tools": {"mail": {"rate": "2/hour"}}}, Rates).split()
    assert together is not None
    limiter = StoreLimiter(store, together, local_limiter=MemoryLimiter(alone, clock=clock), clock=clock)
    assert [limiter.take("alice", "look") for _ in range(5_000)] == [None] * 5_000 and store.asked == 0
    assert isinstance(limiter.take("alice", "look"), Throttled)  # a flood is still told as such
    clock.advance(1)
    assert await answers(limiter, 3, "alice", "mail") == [True, True, False]
    await limiter.close()
