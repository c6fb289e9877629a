"""One measured process, a server or a client: started and ended, its CPU and memory read, its cores chosen."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from msgspec import Struct

from benchmarks.scenarios import Answer, Cores, Scenario

__all__ = ["HANG_S", "KEEP_MEMORY", "KEPT_BYTES", "READ_BYTES"]
__all__ += ["Process", "Round", "beside", "deadline", "enough", "environment", "run"]

READ_BYTES = 1 << 16  # What a pipe holds. Much more, and the allocator maps and unmaps memory for every read.
KEPT_BYTES = 1 << 24  # Answers beyond this are counted but not looked into.
HANG_S = 60
# Whether the C library keeps the memory of a long answer for the next one is otherwise decided when the process starts,
# by chance: in one of ten servers, 300 KB cost 73 page faults and half as much time again, and twins were no longer
# twins. Of two clients on asyncio's pipes, which make room for 256 KB at every read, one took twice as long.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 25), "MALLOC_MMAP_THRESHOLD_": str(1 << 24)}


def environment(**more: str) -> dict[str, str]:
    """What the measured processes see: ours without Python's switches, so that bytecode is kept as for a user."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | more


class Round(Struct, frozen=True):
    """What some calls cost: CPU of the process (user and system, all threads) and, where it was timed, each latency."""

    calls: int
    cpu_ns: int
    wall_ns: int
    latencies_ns: list[int]

    @property
    def cpu_us_per_call(self) -> float:
        return self.cpu_ns / self.calls / 1e3

    def latency_us(self, quantile: float) -> float:
        ordered = sorted(self.latencies_ns)
        return ordered[min(int(len(ordered) * quantile), len(ordered) - 1)] / 1e3


class Process:
    """A spawned process; a context manager that ends it."""

    def __init__(self, argv: Sequence[str], pipes: int, **variables: str) -> None:
        """`pipes` is what its standard input and output are: `subprocess.PIPE` or `subprocess.DEVNULL`."""
        self._argv = argv
        self._stderr = os.memfd_create("stderr")
        self._last_id = 0
        here = Path(__file__).resolve().parents[1]
        self._process = subprocess.Popen(
            argv,
            stdin=pipes,
            stdout=pipes,
            stderr=self._stderr,
            bufsize=0,
            # This tree's packages, also where another one is installed.
            env=environment(PYTHONPATH=f"{here}{os.pathsep}{here / 'src'}", **variables),
        )
        # The kernel's clock of another process, in nanoseconds, ended threads included; this is what
        # clock_getcpuclockid(3) computes. /proc/PID/stat counts in ticks of 10 ms.
        self._cpu_clock = ~self._process.pid << 3 | 2

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        else:
            self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        os.close(self._stderr)

    def play(self, scenario: Scenario, calls: int) -> tuple[Round, list[Answer]]:
        """So many of the scenario's requests, and what came back."""
        raise NotImplementedError

    def cpu_ns(self) -> int:
        return time.clock_gettime_ns(self._cpu_clock)

    @property
    def resident_mb(self) -> float:
        with open(f"/proc/{self._process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) / 1024

    @contextmanager
    def placed(self, cores: Cores) -> Iterator[None]:
        """Driver and process on cores of their own, on one, or wherever the system puts them."""
        mine = os.sched_getaffinity(0)
        first, *others = sorted(mine)
        if cores == "any" or (cores == "two" and not others):
            yield
            return
        theirs = {others[0]} if cores == "two" else {first}
        try:
            os.sched_setaffinity(0, {first})
            self._pin(theirs)
            yield
        finally:
            os.sched_setaffinity(0, mine)
            self._pin(mine)

    def _pin(self, cores: set[int]) -> None:
        for thread in os.listdir(f"/proc/{self._process.pid}/task"):
            os.sched_setaffinity(int(thread), cores)

    def _next_ids(self, count: int) -> range:
        first = self._last_id + 1
        self._last_id += count
        return range(first, first + count)

    def _ended(self) -> ConnectionError:
        said = os.pread(self._stderr, 1 << 16, 0).decode(errors="replace")
        return ConnectionError(f"{self._argv} ended, or hung up:\n{said}")


@contextmanager
def beside() -> Iterator[None]:
    """What is started here stays on the driver's core, and so do its children."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


@contextmanager
def deadline() -> Iterator[None]:
    """Break a blocking read when a server hangs."""

    def hung(*signal: object) -> None:
        raise TimeoutError(f"no answer within {HANG_S} s")

    signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)


def run(server: Process, scenario: Scenario, calls: int) -> Round:
    with server.placed(scenario.cores):
        taken, answers = server.play(scenario, calls)
    assert answers and len({answer["id"] for answer in answers}) == len(answers), "an answer came twice"
    for answer in answers:
        result = answer.get("result", {"isError": True})
        if result.get("isError") or not scenario.is_right(answer["id"], result):
            raise AssertionError(f"{scenario.name}: wrong answer {str(answer)[:500]}")
    return taken


def enough(server: Process, scenario: Scenario, slice_s: float) -> int:
    """Warm the server up, and find how many calls fill its part of a round."""
    run(server, scenario, scenario.least_calls)
    warm = run(server, scenario, scenario.least_calls)
    return max(scenario.least_calls, int(scenario.share * slice_s * 1e9 * warm.calls / warm.wall_ns))
