"""Requests that were turned away at the door are on record too, though never so many that they fill a disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from secrets import token_hex

from handrail.audit.records import RejectionRecord
from handrail.engine.guard_set import GuardSet
from handrail.guards.limits import ANONYMOUS, MemoryLimiter, Rates

ADDRESS_RATE, TOTAL_RATE = "10/minute", "100/minute"


class RejectionLog:
    """At most ten a minute of each address, and a hundred of all. The next says how many were left out before it."""

    def __init__(self, guards: GuardSet, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._guards = guards
        self._each = MemoryLimiter(Rates(lists=ADDRESS_RATE), max_buckets=1_000, clock=clock)
        self._all = MemoryLimiter(Rates(lists=TOTAL_RATE), clock=clock)
        self._omitted = 0

    def add(self, address: str, outcome: str, why: str) -> None:
        """Nobody waits for it; without an audit it does nothing."""
        trail = self._guards.trail
        if trail is None:
            return
        if self._each.take(ANONYMOUS, "", address) is not None or self._all.take(ANONYMOUS, "") is not None:
            self._omitted += 1
            return
        left_out, self._omitted = self._omitted, 0
        trail.submit(
            RejectionRecord(
                "refusal",
                call=token_hex(8),
                principal=ANONYMOUS,
                address=address,
                server=self._guards.name,
                tool="",
                outcome=outcome,
                why=why,
                left_out=left_out,
            )
        )
