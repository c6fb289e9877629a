"""A store in the memory of one process, gone when it ends."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice
from typing import Generic, TypeVar

from msgspec import Struct, field

from handrail.stores import Append, Delete, Put, Store, StoreFeature, condition_holds, parse_counter
from handrail.stores.topics import Topics

SWEEP_ITEMS = 100
"""Expired items a write may remove. More than it adds, so they cannot pile up, and few, so that it stays quick."""

T = TypeVar("T")


class MemoryStore(Store):
    """Every verb is done before it first waits, so each is atomic. For one event loop.

    `scan` looks at every key there is; a store with many and frequent scans should be a SqliteStore.
    """

    supports: frozenset[StoreFeature] = frozenset()

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._values: _Expiring[bytes] = _Expiring(clock)
        if type(self).get is MemoryStore.get:  # a subclass may have to wait
            self.supports = frozenset({"peek"})
        self._logs: _Expiring[_Log] = _Expiring(clock)
        self._topics = Topics()

    async def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    @property
    def peek(self) -> Callable[[str], bytes | None]:
        return self._values.get

    async def delete(self, key: str) -> bool:
        return bool(self._apply(Delete(key)))

    async def scan(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[tuple[str, bytes]]:
        matching = (each for each in self._values.live() if each[0].startswith(prefix) and each[0] > after)
        return nsmallest(limit, matching)

    async def add(self, key: str, amount: int = 1, *, ttl: float | None = None) -> int:
        current = self._values.get(key)
        total = parse_counter(key, current) + amount
        if current is None:
            self._values.set(key, b"%d" % total, ttl)
        else:
            self._values.change(key, b"%d" % total)
        return total

    async def append(self, log: str, value: bytes, *, keep: int, ttl: float | None = None) -> int:
        return self._apply(Append(log, value, keep, ttl))

    async def read(self, log: str, *, after: int = 0, limit: int = 1000) -> list[tuple[int, bytes]]:
        stored_log = self._logs.get(log) or _Log()
        return list(islice((each for each in stored_log.entries if each[0] > after), limit))

    async def publish(self, topic: str, message: bytes) -> None:
        self._topics.deliver(topic, message)

    @asynccontextmanager
    async def subscribe(self, topic: str) -> AsyncIterator[AsyncIterator[bytes]]:
        with self._topics.subscribe(topic) as messages:
            yield messages

    async def commit(self, changes: Sequence[Put | Delete | Append]) -> bool:
        for change in changes:
            if not isinstance(change, Append) and not condition_holds(change, self._values.get(change.key)):
                return False
        for change in changes:
            self._apply(change)
        return True

    async def close(self) -> None:
        self._topics.close("the store was closed")

    def _apply(self, change: Put | Delete | Append) -> int:
        """Make the change; the number of an appended value, else how many keys it touched."""
        match change:
            case Put(key, value, ttl):
                self._values.set(key, value, ttl)
                return 1
            case Delete(key):
                return self._values.remove(key)
            case Append(name, value, keep, ttl):
                log = self._logs.get(name) or _Log()
                log.last += 1
                log.entries.append((log.last, value))
                while len(log.entries) > keep:
                    log.entries.popleft()
                self._logs.set(name, log, ttl)
                return log.last


class _Log(Struct, eq=False):
    last: int = 0
    entries: deque[tuple[int, bytes]] = field(default_factory=deque)


class _Expiring(Generic[T]):
    """A dict whose items expire. An expired item is never returned, and writes remove a few of them at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._items: dict[str, tuple[float, T]] = {}
        self._expirations: list[tuple[float, str]] = []  # a heap; what was replaced or removed stays in it for a while

    def get(self, key: str) -> T | None:
        end, item = self._items.get(key, (0.0, None))
        return item if item is not None and end > self._clock() else None

    def live(self) -> Iterator[tuple[str, T]]:
        now = self._clock()
        return ((key, item) for key, (end, item) in self._items.items() if end > now)

    def set(self, key: str, item: T, ttl: float | None) -> None:
        end = math.inf if ttl is None else self._clock() + ttl
        self._items[key] = (end, item)
        if ttl is not None:
            heappush(self._expirations, (end, key))
        self._sweep()

    def change(self, key: str, item: T) -> None:
        self._items[key] = (self._items[key][0], item)

    def remove(self, key: str) -> bool:
        return self._items.pop(key, (0.0,))[0] > self._clock()

    def _sweep(self) -> None:
        now = self._clock()
        for _ in range(SWEEP_ITEMS):
            if not self._expirations or self._expirations[0][0] > now:
                break
            end, key = heappop(self._expirations)
            if self._items.get(key, (None,))[0] == end:
                del self._items[key]
        if (
            len(self._expirations) > 2 * len(self._items) + SWEEP_ITEMS
        ):  # a value written again and again leaves an end each time
            self._expirations = [(end, key) for key, (end, _) in self._items.items() if end < math.inf]
            heapify(self._expirations)
