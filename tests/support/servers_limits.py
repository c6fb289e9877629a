"""A server whose callers are limited, whoever they say they are; and a process that takes what it can get."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable

from msgspec.json import decode

from clocked_redis import connected
from handrail import Call, Server, ToolResult
from handrail.engine.pipeline import Handler
from handrail.guards.limits import Admission, Limiter, MemoryLimiter, Rates, StoreLimiter, Throttled, ToolRate
from handrail.guards.redis_limits import RedisLimiter
from handrail.stores.redis import RedisStore
from handrail.stores.sqlite import SqliteStore

HOUR = 3600


def limited() -> Server:
    """`narrow` may be called twice an hour by each caller; a call of `costly` is all that a caller has in an hour."""
    server = Server("limited")
    tools = {"narrow": ToolRate(rate="2/hour"), "costly": ToolRate(cost=3)}
    limiter = MemoryLimiter(Rates(principal="3/hour", tools=tools), clock=lambda: 0)

    @server.tool
    async def narrow(who: str) -> str:
        """Ask for a little."""
        return "done"

    @server.tool
    async def costly(who: str) -> str:
        """Ask for a lot."""
        return "done"

    @server.middleware
    async def counts(call: Call, following: Handler) -> ToolResult:
        said = limiter.take(call.arguments["who"], call.name)
        if isinstance(said, Throttled):
            raise said.refusal()
        return await following(call)

    return server


async def _ask(limiter: Limiter) -> Admission:
    answer = limiter.take("alice", "tool")
    return await answer if isinstance(answer, Awaitable) else answer


async def _take_all(path: str, rates: Rates, tries: int) -> None:
    """Say how many calls were let through, from when to when: of so many, while no clock runs; or else in a while."""
    store = SqliteStore(path, durable=False)
    limiter = StoreLimiter(store, rates, clock=(lambda: HOUR * 10**9) if tries else time.time_ns)
    taken = asked = 0
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.time()
    while asked < tries if tries else (asked < 100 or time.time() < begun + 0.5):
        asked += 10
        for answer in await asyncio.gather(*(_ask(limiter) for _ in range(10))):
            taken += answer is None
    print(taken, begun, time.time(), flush=True)
    await limiter.close()
    await store.close()


async def _hold(path: str, rates: Rates, slots: int) -> None:
    """Hold slots, say so, and wait to be killed."""
    limiter = StoreLimiter(SqliteStore(path, durable=False), rates, lease_seconds=HOUR)
    for _ in range(slots):
        assert callable(await _ask(limiter))
    print("held", flush=True)
    await asyncio.sleep(HOUR)


async def _flood_redis(place: str, rates: Rates, pause_ms: int) -> None:
    """Call as fast as that allows until killed, and write a byte for each call that was let through."""
    name, url = place.split()
    limiter = RedisLimiter(await connected(RedisStore(url, name=name)), rates)
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        answers = await asyncio.gather(*(_ask(limiter) for _ in range(20)))
        os.write(1, b"." * sum(each is None or callable(each) for each in answers))
        await asyncio.sleep(pause_ms / 1000)


async def _hold_redis(place: str, rates: Rates, slots: int) -> None:
    name, url = place.split()
    limiter = RedisLimiter(await connected(RedisStore(url, name=name)), rates, lease_seconds=3)
    for _ in range(slots):
        assert callable(await _ask(limiter))
    print("held", flush=True)
    await asyncio.sleep(HOUR)


if __name__ == "__main__":
    what, path, limits, number = sys.argv[1:]
    known = decode(limits, type=Rates)
    works = {"take": _take_all, "hold": _hold, "flood redis": _flood_redis, "hold redis": _hold_redis}
    asyncio.run(works[what](path, known, int(number)))
