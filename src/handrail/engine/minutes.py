"""How many calls ended in each of the last sixty minutes, how many failed, and how long they took."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

MINUTES = 60
BUCKETS = 250  # four to each doubling of a nanosecond: enough for a century


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

    def count(self, now: float, times: Iterable[int], errors: int = 0, unrecorded: int = 0) -> None:
        """Calls that have ended in the same minute, and how many nanoseconds each took."""
        minute = self.roll(now)
        for bucket, count in Counter([(taken**4).bit_length() for taken in times]).items():
            minute.times[bucket] += count
            minute.calls += count
        minute.errors += errors
        minute.unrecorded += unrecorded

    def roll(self, now: float) -> Minute:
        """The minute that is going on. Those that have passed since the last one had no calls.

        What comes a little late, after its minute, counts in this one. Where a clock was set back, minutes that are
        still to come have not been.
        """
        last, at = self.now, now // 60 * 60
        if last.at - 60 <= at <= last.at:
            return last
        if at < last.at:
            self.past = deque((each for each in self.past if each.at < at), maxlen=MINUTES)
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
            return float(2.0 ** ((number - 0.5) / 4) / 1e9)
    return 0.0
