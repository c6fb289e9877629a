"""How long a test waits for an event, and what it does with a time that a promise names."""

from __future__ import annotations

import os
import time

# Seconds, the end of every wait. It decides nothing but that the event never came: a busy machine is slow, not wrong.
PATIENCE = 60.0

# `make soak` runs alone on its machine: only there do the times that promises name decide.
SOAK = os.environ.get("HANDRAIL_SOAK") == "1"


def cpu_of(pid: int) -> float:
    """Seconds of a processor that a process has used, however busy the machine was meanwhile."""
    return time.clock_gettime(~pid << 3 | 2)


def in_time(took: float, seconds: float, what: str = "it") -> None:
    """Judge a promised time, where the machine does nothing else."""
    assert not SOAK or took <= seconds, f"{what} took {took:.2f} s, and {seconds:g} s are promised"
