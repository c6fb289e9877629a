"""What a test must not leave behind: tasks, threads, descriptors, processes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from patience import PATIENCE


class Standing(NamedTuple):
    """Everything of this process that could leak."""

    tasks: frozenset[str]
    threads: frozenset[str]
    descriptors: frozenset[str]
    processes: frozenset[str]

    @classmethod
    def now(cls) -> Standing:
        """In a running loop; the task that asks does not count."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        return cls(
            frozenset(map(repr, tasks)),
            frozenset(f"{thread.name} {thread.ident}" for thread in threading.enumerate()),
            frozenset(_descriptors()),
            frozenset(f"process {pid}" for pid in children_of(os.getpid())),
        )

    def more(self, later: Standing) -> str:
        """What is there later and was not before."""
        added = {name: getattr(later, name) - getattr(self, name) for name in self._fields}
        return "; ".join(f"{name}: {sorted(found)}" for name, found in added.items() if found)

    async def back(self) -> None:
        """Wait until nothing more is left than there was; what ends does so in its own time."""
        ends = time.monotonic() + PATIENCE
        while left := self.more(Standing.now()):
            assert time.monotonic() < ends, f"left behind: {left}"
            await asyncio.sleep(0.005)


def _descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:  # that of the folder itself
            continue
    return found


def children_of(parent: int) -> set[int]:
    """Processes of this parent, also such as have ended and were not waited for."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):  # not every kernel has lists of children
        try:
            stat = Path(f"/proc/{name}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(stat.rpartition(")")[2].split()[1]) == parent:
            found.add(int(name))
    return found


def memory(name: str) -> int:
    """Bytes of this process: `VmRSS` that it has, `VmHWM` the most it had since `forget_memory`."""
    for line in Path("/proc/self/status").read_text().split("\n"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name}")


def forget_memory() -> None:
    Path("/proc/self/clear_refs").write_text("5")
