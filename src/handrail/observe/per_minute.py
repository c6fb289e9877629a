"""How many calls ended in each of the last sixty minutes and seconds: failed, refused, and how long they took.

Times are those of calls that ran: a refusal takes no time, and would make everything look quick.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from msgspec import Struct, field

MINUTES = SECONDS = 60
RECENT_MINUTES = 5  # minutes of which is known who was refused, and which tools were called
BUCKETS = 250  # four to each doubling of a nanosecond: enough for a century


class Tally(Struct):
    """The calls of one tool, or of one second."""

    calls: int = 0
    errors: int = 0
    refused: int = 0
    last: float = 0.0  # when it was, or the latest of them
    times: dict[int, int] = field(default_factory=dict)  # how many of those that ran fell into each bucket

    def add(self, other: Tally) -> None:
        self.calls += other.calls
        self.errors += other.errors
        self.refused += other.refused
        self.last = max(self.last, other.last)
        for bucket, count in other.times.items():
            self.times[bucket] = self.times.get(bucket, 0) + count

    @property
    def p95(self) -> float:
        return p95([self.times.get(bucket, 0) for bucket in range(max(self.times, default=0) + 1)])


class Minute:
    """The calls that ended in one minute."""

    __slots__ = ("calls", "errors", "refusals_by_caller", "refused", "start", "times", "tools", "unrecorded")

    def __init__(self, at: float) -> None:
        self.start = at
        self.calls = self.errors = self.refused = self.unrecorded = 0
        self.times = [0] * BUCKETS
        self.refusals_by_caller: Counter[tuple[str, str]] = Counter()  # refusals, by caller and outcome
        self.tools: dict[str, Tally] = {}


class MinuteStats:
    """The minute that is going on, and those before, oldest first."""

    def __init__(self, now: float) -> None:
        self.current = Minute(now // 60 * 60)
        self.past: deque[Minute] = deque(maxlen=MINUTES)
        self._seconds: deque[Tally] = deque(maxlen=SECONDS)

    def count(self, now: float, times: Iterable[int], errors: int = 0, unrecorded: int = 0, refused: int = 0) -> None:
        """Calls that have ended in the same second, and how many nanoseconds those that ran took."""
        self.add(now, Counter([bucket_of(duration_ns) for duration_ns in times]), errors, unrecorded, refused)

    def add(self, now: float, times: Counter[int], errors: int, unrecorded: int, refused: int) -> None:
        """The same, with how many of them fell into each bucket."""
        minute, second = self.roll(now), self._second(now // 1)
        for bucket, count in times.items():
            minute.times[bucket] += count
            second.times[bucket] = second.times.get(bucket, 0) + count
            minute.calls += count
            second.calls += count
        for each in (minute, second):
            each.calls += refused
            each.errors += errors
            each.refused += refused
        minute.unrecorded += unrecorded

    def _second(self, at: float) -> Tally:
        seconds = self._seconds
        while seconds and seconds[-1].last > at + 1:  # a clock was set back; what comes a little late has not
            seconds.pop()
        if not seconds or seconds[-1].last < at:
            seconds.append(Tally(last=at))
        return seconds[-1]

    def last(self, now: float) -> Tally:
        """The last sixty seconds."""
        total = Tally()
        for each in self._seconds:
            if now - SECONDS < each.last <= now:
                total.add(each)
        return total

    def roll(self, now: float) -> Minute:
        """The minute that is going on. Those that have passed since the last one had no calls.

        What comes a little late, after its minute, counts in this one. Where a clock was set back, minutes that are
        still to come have not been.
        """
        last, at = self.current, now // 60 * 60
        if last.start - 60 <= at <= last.start:
            return last
        if at < last.start:
            self.past = deque((each for each in self.past if each.start < at), maxlen=MINUTES)
        for minutes_ago in range(MINUTES if last.start < at else 0, 0, -1):
            passed = at - 60 * minutes_ago
            if passed >= last.start:
                self.past.append(last if passed == last.start else Minute(passed))
        for each in self.past:
            if each.start <= at - 60 * RECENT_MINUTES:
                each.refusals_by_caller, each.tools = Counter(), {}
        self.current = Minute(at)
        return self.current


def bucket_of(duration_ns: int) -> int:
    """Of a time in nanoseconds."""
    return (duration_ns**4).bit_length()


def p95(times: list[int]) -> float:
    """The time below which 95 of 100 calls stayed, in seconds, to about a tenth."""
    left = sum(times) * 0.95
    for number, count in enumerate(times):
        left -= count
        if count and left <= 0:
            return float(2.0 ** ((number - 0.5) / 4) / 1e9)
    return 0.0
