"""A store in the memory of one process, gone when it ends.

Listeners inside one process: each has a line of messages of its own, and the line has an end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice
from typing import Generic, TypeVar

from msgspec import Struct, field

from handrail.stores import Append, Delete, Put, Store, StoreError, StoreFeature, condition_holds, parse_counter

MAX_QUEUED_MESSAGES = 1000
"""Messages a listener may leave unread. One more ends its subscription: a gap it knows of can be made good."""


class Listener:
    """Messages in the order they were published; then, if the subscription was ended, a StoreError."""

    def __init__(self, since: int) -> None:
        self.since = since
        self.close_reason = ""
        self._queue: deque[bytes] = deque()
        self._wakeup = asyncio.Event()

    def __aiter__(self) -> Listener:
        return self

    async def __anext__(self) -> bytes:
        while not self._queue:
            if self.close_reason:
                raise StoreError(self.close_reason)
            self._wakeup.clear()
            await self._wakeup.wait()
        return self._queue.popleft()

    def push(self, message: bytes) -> None:
        if len(self._queue) == MAX_QUEUED_MESSAGES:
            self.close(f"too slow: {MAX_QUEUED_MESSAGES} messages were waiting when the next one came")
        elif not self.close_reason:
            self._queue.append(message)
            self._wakeup.set()

    def close(self, reason: str) -> None:
        self.close_reason = self.close_reason or reason
        self._wakeup.set()


class Topics:
    """Who listens to what. Not for several threads: everything happens on the listeners' loop."""

    def __init__(self) -> None:
        self._listeners: defaultdict[str, set[Listener]] = defaultdict(set)

    def __bool__(self) -> bool:
        return bool(self._listeners)

    @contextmanager
    def subscribe(self, topic: str, since: int = 0) -> Iterator[Listener]:
        """Hear the messages of `topic` whose number is above `since`."""
        listener = Listener(since)
        self._listeners[topic].add(listener)
        try:
            yield listener
        finally:
            listener.close("the subscription was left")
            self._listeners[topic].discard(listener)
            if not self._listeners[topic]:
                del self._listeners[topic]

    def deliver(self, topic: str, message: bytes, number: int = 1) -> None:
        for listener in self._listeners.get(topic, ()):
            if number > listener.since:
                listener.push(message)

    def close(self, reason: str) -> None:
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.close(reason)


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
