"""Listeners inside one process: each has a line of messages of its own, and the line has an end."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from handrail.stores import StoreError

MAX_WAITING = 1000
"""Messages a listener may leave unread. One more ends its subscription: a gap it knows of can be made good."""


class Listener:
    """Messages in the order they were published; then, if the subscription was ended, a StoreError."""

    def __init__(self, since: int) -> None:
        self.since = since
        self.ended = ""
        self._waiting: deque[bytes] = deque()
        self._woken = asyncio.Event()

    def __aiter__(self) -> Listener:
        return self

    async def __anext__(self) -> bytes:
        while not self._waiting:
            if self.ended:
                raise StoreError(self.ended)
            self._woken.clear()
            await self._woken.wait()
        return self._waiting.popleft()

    def hear(self, message: bytes) -> None:
        if len(self._waiting) == MAX_WAITING:
            self.end(f"too slow: {MAX_WAITING} messages were waiting when the next one came")
        elif not self.ended:
            self._waiting.append(message)
            self._woken.set()

    def end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self._woken.set()


class Topics:
    """Who listens to what. Not for several threads: everything happens on the listeners' loop."""

    def __init__(self) -> None:
        self._listeners: defaultdict[str, set[Listener]] = defaultdict(set)

    def __bool__(self) -> bool:
        return bool(self._listeners)

    @contextmanager
    def listen(self, topic: str, since: int = 0) -> Iterator[Listener]:
        """Hear the messages of `topic` whose number is above `since`."""
        listener = Listener(since)
        self._listeners[topic].add(listener)
        try:
            yield listener
        finally:
            listener.end("the subscription was left")
            self._listeners[topic].discard(listener)
            if not self._listeners[topic]:
                del self._listeners[topic]

    def deliver(self, topic: str, message: bytes, number: int = 1) -> None:
        for listener in self._listeners.get(topic, ()):
            if number > listener.since:
                listener.hear(message)

    def end(self, reason: str) -> None:
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.end(reason)
