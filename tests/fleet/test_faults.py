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
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from cli_runs import handrail
from faults import until
from fleets import Fleet, fleet
from handrail import Client, HandrailError
from handrail.audit.format import measure_arguments
from patience import PATIENCE, SOAK
from postgres_servers import PostgresServer, Schema
from redis_servers import ON_DISK, RedisServer
from requirements import requirement

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
