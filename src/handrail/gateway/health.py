"""Whether an upstream can be called: a circuit breaker with a back-off and a half-open probe."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["CircuitBreaker"]

FAILURES = 3  # in a row, until calls are refused at once
BURST_SECONDS = 0.25  # in which failures count as one


class CircuitBreaker:
    """Counts failures in a row. While it is open, calls fail at once; after a pause one call tries again."""

    def __init__(self, now: Callable[[], float], pauses: tuple[float, float] = (1.0, 60.0)) -> None:
        self._now = now
        self._least, self._most = pauses  # seconds
        self._failures = 0
        self._open_until = 0.0
        self._probing = False
        self._failed_at = float("-inf")

    @property
    def is_open(self) -> bool:
        return self._failures >= FAILURES

    def wait_seconds(self) -> float:
        """Return 0 if a call may be tried now, else the seconds until one may. The call that may try is the probe."""
        if not self.is_open:
            return 0.0
        left = self._open_until - self._now()
        if left > 0:
            return left
        if self._probing:
            return self._least
        self._probing = True
        return 0.0

    def add_success(self) -> None:
        self._failures, self._probing = 0, False

    def add_failure(self) -> None:
        now, was_probing = self._now(), self._probing
        self._probing = False
        if now - self._failed_at < BURST_SECONDS or (self.is_open and not was_probing and now < self._open_until):
            return  # one crash ends many calls
        self._failed_at = now
        self._failures += 1
        if self.is_open:
            exponent = min(self._failures - FAILURES, 10)
            self._open_until = self._now() + min(self._least * 2**exponent, self._most)

    def release(self) -> None:
        """The probe ended without a verdict: it was cancelled."""
        self._probing = False
