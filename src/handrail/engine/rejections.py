"""The audit log of rejected HTTP requests. Its rate is limited, so that a flood of them fills no disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from secrets import token_hex

from handrail.audit.format import RejectionRecord
from handrail.engine.guard_set import GuardSet
from handrail.guards.limits import ANONYMOUS, MemoryLimiter, Rates

ADDRESS_RATE, TOTAL_RATE = "10/minute", "100/minute"


class RejectionLog:
    """Records at most ten rejections a minute of each address, and a hundred of all, and how many it left out."""

    def __init__(self, guards: GuardSet, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._guards = guards
        self._each = MemoryLimiter(Rates(lists=ADDRESS_RATE), max_buckets=1_000, clock=clock)
        self._all = MemoryLimiter(Rates(lists=TOTAL_RATE), clock=clock)
        self._omitted = 0

    def add(self, address: str, outcome: str, why: str) -> None:
        """Record a rejection, without waiting for the disk. Without an audit log, do nothing."""
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
