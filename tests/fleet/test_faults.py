"""Faults of a fleet under load: replicas and engines that are killed or frozen, in an order that a seed decides.

What has to hold, whatever happens: every call settles; what was answered is in the audit log; nothing ran without an
intent there; one approval is used once; and everything works again without a restart.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from cli_runs import handrail
from consoles import Served
from faults import until
from fleets import Fleet, fleet
from handrail import Client, HandrailError, stores
from handrail.audit.format import measure_arguments
from handrail.engine.fleet import replicas_in
from handrail.stores import Store, StoreError
from patience import PATIENCE, SOAK
from postgres_servers import PostgresServer, Schema
from redis_servers import ON_DISK, RedisServer, Sentinels, slow_way
from requirements import requirement
from servers_http import Client as SessionClient, closed as closed

SETTINGS = """
[limits]
principal = ""
address = ""
lists = ""
"""
ROUNDS = 50 if SOAK else 1
FROZEN_SECONDS = 10.0 if SOAK else 2.5  # longer than any deadline of a command
CALLERS = 6
LEAST_ANSWERED = 10  # between two faults: then everything works again

pytestmark = pytest.mark.slow


class Load:
    """Callers that go on until they are stopped, and what became of each call."""

    def __init__(self, urls: list[str]) -> None:
        self.answered: set[int] = set()
        self.failed: Counter[str] = Counter()
        self._urls = urls
        self._numbers = itertools.count(1)
        self._is_over = False

    async def call(self, at: int) -> None:
        while not self._is_over:
            try:
                async with asyncio.timeout(PATIENCE), Client(self._urls[at % len(self._urls)], timeout=20.0) as client:
                    while not self._is_over:
                        number = next(self._numbers)
                        result = await client.call("note", {"number": number})
                        if result.result.is_error:
                            self.failed["refused"] += 1
                            await asyncio.sleep(0)
                        else:
                            self.answered.add(number)
            except HandrailError as problem:
                self.failed[type(problem).__name__] += 1
                at += 1  # the next replica
                await asyncio.sleep(0.02)

    async def goes_on(self) -> None:
        """Wait until calls are answered again."""
        target = len(self.answered) + LEAST_ANSWERED
        await until(lambda: len(self.answered) >= target, "calls are answered again")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.call(at)) for at in range(CALLERS)]
        try:
            yield
        finally:
            self._is_over = True
            async with asyncio.timeout(PATIENCE):  # a call that hangs fails the test
                await asyncio.gather(*tasks)


class Victims:
    """What is hurt: each fault by its name."""

    def __init__(self, fleet_of_two: Fleet, redis: RedisServer, postgres: PostgresServer) -> None:
        self._fleet, self._redis, self._postgres = fleet_of_two, redis, postgres
        self.faults: dict[str, Callable[[random.Random], None]] = {
            "a replica is killed": self._kill_replica,
            "redis is killed": self._kill_redis,
            "postgres is killed": self._kill_postgres,
        }
        self.freezes: dict[str, RedisServer | PostgresServer] = {
            "redis is frozen": redis,
            "postgres is frozen": postgres,
        }

    def _kill_replica(self, chance: random.Random) -> None:
        replica = chance.choice(self._fleet.replicas)
        replica.kill()
        replica.start_again()

    def _kill_redis(self, chance: random.Random) -> None:
        self._redis.kill()
        self._redis.start()

    def _kill_postgres(self, chance: random.Random) -> None:
        self._postgres.kill()
        self._postgres.start()

    async def hurt(self, name: str, chance: random.Random) -> None:
        if (engine := self.freezes.get(name)) is None:
            await asyncio.to_thread(self.faults[name], chance)
            return
        engine.freeze()
        try:
            await asyncio.sleep(FROZEN_SECONDS)  # what is tested is that time passes
        finally:
            engine.thaw()


@contextmanager
def durable_redis() -> Iterator[RedisServer]:
    server = RedisServer(*ON_DISK)
    try:
        yield server
    finally:
        server.stop()


def records_of(two: Fleet, audit: str) -> list[dict[str, object]]:
    done = handrail("audit", "export", audit, home=two.folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@requirement("P-15", "P-17", "P-19")
async def test_whatever_dies_nothing_that_was_answered_is_lost(tmp_path: Path, schema: Schema) -> None:
    chance = random.Random(20)
    with durable_redis() as redis:
        url = schema.url
        with fleet(tmp_path, redis.url(), count=0, settings=SETTINGS) as two:
            for _ in range(2):
                await asyncio.to_thread(lambda: two.add("--audit", url))
            load, victims = Load([each.endpoint for each in two.replicas]), Victims(two, redis, schema.server)
            async with load.running():
                await load.goes_on()
                for _ in range(ROUNDS):
                    names = [*victims.faults, *victims.freezes]
                    chance.shuffle(names)
                    for name in names:
                        await victims.hurt(name, chance)
                        await load.goes_on()
        records = await asyncio.to_thread(records_of, two, url)
    intents = {each["arguments_digest"] for each in records if each["event"] == "intent"}
    outcomes = {each["call"] for each in records if each["event"] == "outcome" and each.get("outcome") == "ok"}
    calls = {each["arguments_digest"]: each["call"] for each in records if each["event"] == "intent"}
    digests = {number: measure_arguments({"number": number})[0] for number in load.answered}
    effects = [int(line) for line in (tmp_path / "notes").read_text().split()]
    assert len(effects) == len(set(effects)), "a call ran twice"
    assert {measure_arguments({"number": number})[0] for number in effects} <= intents, "an effect without an intent"
    assert load.answered <= set(effects)
    lost = [number for number, digest in digests.items() if calls.get(digest) not in outcomes]
    assert lost == [], "answered, and not on record"
    print(f"{len(load.answered)} answered, {dict(load.failed)}, {len(effects)} effects, {len(records)} records")


@requirement("P-18", "P-21")
async def test_a_replica_whose_clock_is_an_hour_ahead_does_no_harm(tmp_path: Path) -> None:
    with durable_redis() as redis, fleet(tmp_path, redis.url(), count=1, settings=SETTINGS) as two:
        await asyncio.to_thread(lambda: two.add(FLEET_CLOCK="3600"))
        for first, second in (two.replicas, two.replicas[::-1]):
            session = SessionClient(first.endpoint, "2025-11-25")
            await session.open()
            for session.url in (second.endpoint, first.endpoint):
                assert (await session.ask(session.message(2, "ping")))[0] == 200
            async with Client(first.endpoint, confirm=lambda *_: True) as client:
                call = asyncio.create_task(client.call("pay", {"to": f"at-{first.endpoint[-8:-4]}"}))
                approval = await waiting_approval(two)
                await asyncio.to_thread(operator, two, "approve", approval, "yes")
                async with asyncio.timeout(PATIENCE):
                    assert not (await call).result.is_error
        payees = [line.split()[0] for line in two.runs]
        assert len(payees) == len(set(payees)) == 2


async def test_on_a_slow_network_everything_works(tmp_path: Path) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(durable_redis())
        store = f"redis://127.0.0.1:{stack.enter_context(slow_way(redis.port, 0.05))}"
        two = stack.enter_context(fleet(tmp_path, store, count=2, settings=SETTINGS))
        load = Load([each.endpoint for each in two.replicas])
        async with load.running():
            await load.goes_on()
            session = SessionClient(two.replicas[0].endpoint, "2025-11-25")
            await session.open()
            for session.url in (two.replicas[1].endpoint, two.replicas[0].endpoint):
                assert (await session.ask(session.message(2, "ping")))[0] == 200
            async with Client(two.replicas[0].endpoint, confirm=lambda *_: True) as client:
                call = asyncio.create_task(client.call("pay", {"to": "Ada"}))
                await asyncio.to_thread(operator, two, "approve", await waiting_approval(two), "yes")
                async with asyncio.timeout(PATIENCE):
                    assert not (await call).result.is_error
            await load.goes_on()
        assert load.failed == Counter()
        assert [line.split()[0] for line in two.runs] == ["Ada"]


@requirement("P-20")
async def test_after_a_failover_sessions_limits_and_calls_go_on(tmp_path: Path) -> None:
    sentinels = Sentinels()
    try:
        settings = SETTINGS + "[store]\naccept_loss = true\n"
        with fleet(tmp_path, sentinels.url, count=2, settings=settings) as two:
            load = Load([each.endpoint for each in two.replicas])
            session = SessionClient(two.replicas[0].endpoint, "2025-11-25")
            await session.open()
            async with load.running():
                await load.goes_on()
                await asyncio.to_thread(sentinels.master.kill)
                await load.goes_on()
                store = stores.open(sentinels.url, name="fleet")
                try:
                    async with asyncio.timeout(PATIENCE):
                        while not await is_listed(store, len(two.replicas)):
                            pass  # until the replica of Redis is the master, and has what it needs
                finally:
                    await store.close()
                await load.goes_on()
            for session.url in (each.endpoint for each in two.replicas):
                assert (await session.ask(session.message(2, "ping")))[0] == 200
        effects = [int(line) for line in (tmp_path / "notes").read_text().split()]
        assert len(effects) == len(set(effects))
        assert load.answered <= set(effects)
    finally:
        sentinels.stop()


async def is_listed(store: Store, count: int) -> bool:
    """Return whether all replicas have listed themselves in a store that can be used."""
    try:
        return len(await replicas_in(store)) == count
    except StoreError:
        await asyncio.sleep(0.05)
        return False


def operator(two: Fleet, *words: str) -> str:
    home = two.folder / "operator"
    home.mkdir(exist_ok=True)
    done = handrail(*words, home=home, env={"HANDRAIL_STORE": two.store})
    assert done.returncode == 0, done.stderr
    return done.stdout


async def waiting_approval(two: Fleet) -> str:
    async with asyncio.timeout(PATIENCE):
        while not (waiting := json.loads(await asyncio.to_thread(operator, two, "approve", "--json"))):
            pass
    [approval] = waiting
    return str(approval["id"])


@requirement("GW-10", "GW-17")
@pytest.mark.parametrize("victim", [0, 1], ids=["that runs the command", "that passes the call on"])
@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
async def test_a_gateway_killed_during_a_question_leaves_no_call_open(
    tmp_path: Path, victim: int, revision: str
) -> None:
    target = Path(__file__).parents[1] / "support" / "servers_fleet_gateway.py"
    with durable_redis() as redis, fleet(tmp_path, redis.url(), settings=SETTINGS, target=target) as three:
        holder, other, third = three.replicas

        async def answer(question: object) -> dict[str, str]:
            if not victims:
                victims.append((holder, other)[victim])
                await asyncio.to_thread(victims[0].kill)
            return {"name": "Ada"}

        victims: list[Served] = []
        async with Client(holder.endpoint, elicit=lambda _: {"name": "Ada"}, revision=revision) as client:
            await client.call("name")  # the first replica has the command of this caller now
        async with asyncio.timeout(PATIENCE):
            try:
                async with Client(other.endpoint, elicit=answer, revision=revision, timeout=20.0) as client:
                    result = await client.call("name")
                    assert result.result.is_error or "Ada" in result.text
            except HandrailError:  # told so, which is all that can be known of it
                assert victims
            async with Client(third.endpoint, elicit=answer, revision=revision) as client:
                assert "Ada" in (await client.call("name")).text
