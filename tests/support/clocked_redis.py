"""A Redis store whose scripts run by the clock of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from handrail.guards.redis_limits import Leasing
from handrail.stores import StoreError
from handrail.stores.redis import RedisStore, Script
from patience import PATIENCE

ALWAYS_LEASED = Leasing(token=10**18, share=5 * 10**9, small_share=10**9, pause=0)
"""Shares of any rate, as large as a test with small numbers needs them."""


async def connected(store: RedisStore) -> RedisStore:
    """Wait for a connection, which on a busy machine may take longer than the store has patience."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(StoreError):
                await store.get("ready:")
                return store


class ClockedRedisStore(RedisStore):
    """Tells scripts the time of `clock`, in nanoseconds; what they keep does not end by the clock of the server."""

    def __init__(self, url: str, clock: Callable[[], int], *, name: str = "") -> None:
        super().__init__(url, name=name)
        self._clock = clock
        self.scripts = 0  # that were run
        self._is_connected = False

    async def run_script(self, script: Script, keys: Sequence[str], args: Sequence[bytes | int]) -> Any:
        if not self._is_connected:
            await connected(self)
            self._is_connected = True
        self.scripts += 1
        source = script.source.replace("redis.call('TIME')", "{ARGV[#ARGV - 1], ARGV[#ARGV]}")
        source = source.replace("+ 1000)", "+ 3600000)")
        assert "'TIME'" not in source and source.count("3600000") in (1, 2)
        seconds, rest = divmod(self._clock(), 10**9)
        return await super().run_script(Script(source), keys, [*args, seconds, rest // 1000])
