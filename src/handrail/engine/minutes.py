"""How many calls ended in each of the last sixty minutes, how many failed, and how long they took."""

from __future__ import annotations

from collections import deque
from math import frexp

MINUTES = 60
BUCKETS = 200  # four to each doubling, from a millionth of a second on: enough for months


class Minute:
    """The calls that ended in one minute."""

    __slots__ = ("at", "calls", "errors", "times", "unrecorded")

    def __init__(self, at: float) -> None:
        self.at = at
        self.calls = self.errors = self.unrecorded = 0
        self.times = [0] * BUCKETS


class Minutes:
    """The minute that is going on, and those before, oldest first."""

    def __init__(self, now: float) -> None:
        self.now = Minute(now // 60 * 60)
        self.past: deque[Minute] = deque(maxlen=MINUTES)

    def count(self, now: float, seconds: float, outcome: str, is_error: bool) -> None:
        """A call that has ended."""
        minute = self.now if self.now.at <= now < self.now.at + 60 else self.roll(now)
        part, octave = frexp(seconds)
        minute.times[max(octave * 4 + int(part * 8) + 76, 0)] += 1
        minute.calls += 1
        minute.errors += is_error
        minute.unrecorded += outcome == "unrecorded"

    def roll(self, now: float) -> Minute:
        """The minute that is going on. Those that have passed since the last one had no calls."""
        last, at = self.now, now // 60 * 60
        if last.at != at:
            for back in range(MINUTES if last.at < at else 0, 0, -1):
                passed = at - 60 * back
                if passed >= last.at:
                    self.past.append(last if passed == last.at else Minute(passed))
            self.now = Minute(at)
        return self.now


def p95(times: list[int]) -> float:
    """The time below which 95 of 100 calls stayed, in seconds, to about a tenth."""
    left = sum(times) * 0.95
    for number, count in enumerate(times):
        left -= count
        if count and left <= 0:
            octave, part = divmod(number, 4)
            return float((4.5 + part) / 8 * 2.0 ** (octave - 20))
    return 0.0
