"""Waiting awake, for a moment, where the next line is about to come.

A process that sleeps in its loop is woken late and finds its memory cold; where two processes answer each other, that
is most of what a call takes. So after an answer the pipe is looked at for a moment longer, but only while the client
does ask at once: a line that comes after a pause, or a moment that was waited in vain, ends it. A client that asks now
and then costs nothing by it, one that is never quick enough a moment in a thousand lines; and so does one that shares
its only processor with us, and cannot write before we sleep.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

_LINGER_NS = 80_000  # how long one waits awake: as long as being woken takes both sides, and a bit
_PROMPT_NS = 250_000  # what came sooner might have come while one waited: part of that was the way to sleep and back
_MOST_SKIPPED = 1023


class Lingering:
    """What one client's pace was like, and whether it is worth to wait for its next line awake."""

    def __init__(self, source: int, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._poll = select.poll()
        self._poll.register(source, select.POLLIN)
        self._answered = 0  # when that was; 0: nothing was since the last line
        self._skipped = 1  # prompt lines to come before it is tried
        self._vain = 0  # how many it was the last time, if that was in vain

    def line_came(self) -> None:
        """Note how soon after our answer."""
        if not self._answered:
            return
        if self._clock() - self._answered > _PROMPT_NS:
            self._skipped = max(1, self._skipped)
        elif self._skipped:
            self._skipped -= 1
        self._answered = 0

    def wait(self) -> None:
        """After an answer: until there is more to read, or it is better to sleep."""
        self._answered = now = self._clock()
        if self._skipped:
            return
        until, poll, clock = now + _LINGER_NS, self._poll.poll, self._clock
        while not poll(0):
            if clock() > until:
                self._skipped = self._vain = min(2 * self._vain + 1, _MOST_SKIPPED)
                return
        self._vain = 0
