"""Listeners inside one process: each has a line of messages of its own, and the line has an end."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from handrail.stores import StoreError

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
