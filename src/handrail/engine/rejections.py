"""Requests that were turned away at the door are on record too, though never so many that they fill a disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from secrets import token_hex

from handrail.engine.guard_set import Gate
from handrail.guards.limits import ANONYMOUS, MemoryLimiter
from handrail.guards.rates import Rates
from handrail.model import Object

EACH, ALL = "10/minute", "100/minute"


class DoorBook:
    """At most ten a minute of each address, and a hundred of all. The next says how many were left out before it."""

    def __init__(self, gate: Gate, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._gate = gate
        self._each = MemoryLimiter(Rates(lists=EACH), max_buckets=1_000, clock=clock)
        self._all = MemoryLimiter(Rates(lists=ALL), clock=clock)
        self._left_out = 0

    def note(self, address: str, outcome: str, why: str) -> None:
        """Nobody waits for it; without an audit it does nothing."""
        trail = self._gate.trail
        if trail is None:
            return
        if self._each.take(ANONYMOUS, "", address) is not None or self._all.take(ANONYMOUS, "") is not None:
            self._left_out += 1
            return
        record: Object = {"event": "refusal", "call": token_hex(8), "principal": ANONYMOUS, "from": address}
        record |= {"server": self._gate.name, "tool": "", "outcome": outcome, "why": why}
        if self._left_out:
            record["left_out"], self._left_out = self._left_out, 0
        trail.hand(record)
