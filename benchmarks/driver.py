"""One server process on two pipes: requests out, answers counted, time and CPU taken."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

__all__ = ["Answer", "Cores", "Round", "Session", "environment"]

REVISION = "2025-11-25"
READ_BYTES = 1 << 16  # What a pipe holds. Much more, and the allocator maps and unmaps memory for every read.
KEPT_BYTES = 1 << 24  # Answers beyond this are counted but not looked into.
HANG_S = 60

Answer = dict[str, Any]
Cores = Literal["any", "one", "two"]


def environment(**more: str) -> dict[str, str]:
    """What the measured processes see: ours without Python's switches, so that bytecode is kept as for a user."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | more


class Round(msgspec.Struct, frozen=True):
    """What some calls cost: the server's CPU (user and system, all threads) and, one at a time, each latency."""

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


class Session:
    """A spawned server that has been greeted; a context manager that ends it.

    The pipes are read and written with plain blocking system calls: a driver that polls would take the
    processor from the server it measures.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._stderr = os.memfd_create("stderr")
        started = time.perf_counter_ns()
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            env=environment(PYTHONPATH=str(Path(__file__).resolve().parents[1])),
        )
        assert self._process.stdin and self._process.stdout
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        # The kernel's clock of another process, in nanoseconds, ended threads included; this is what
        # clock_getcpuclockid(3) computes. /proc/PID/stat counts in ticks of 10 ms.
        self._cpu_clock = ~self._process.pid << 3 | 2
        self._last_id = 0
        hello = {
            "protocolVersion": REVISION,
            "capabilities": {},
            "clientInfo": {"name": "benchmark", "version": "1"},
        }
        try:
            answer = self.request("initialize", hello)
            self.first_answer_ns = time.perf_counter_ns() - started
            assert answer["result"]["protocolVersion"] == REVISION, answer
        except BaseException:
            self.close()
            raise
        self._write(_line({"jsonrpc": "2.0", "method": "notifications/initialized"}))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        os.close(self._stderr)

    @property
    def resident_mb(self) -> float:
        with open(f"/proc/{self._process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) / 1024

    @contextmanager
    def placed(self, cores: Cores) -> Iterator[None]:
        """Driver and server on cores of their own, on one, or wherever the system puts them."""
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

    def request(self, method: str, params: dict[str, Any]) -> Answer:
        """One request of any method, answered."""
        self._last_id += 1
        with _deadline():
            self._write(_line({"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params}))
            answer: Answer = msgspec.json.decode(b"".join(self._read_answer()))
        return answer

    def sequential(self, tool: str, arguments: Callable[[int], Answer], calls: int) -> tuple[Round, list[Answer]]:
        """One call after the other, each timed from before its write to after its last byte."""
        requests = self._requests(tool, arguments, calls)
        latencies: list[int] = []
        answers: list[bytes] = []
        kept = 0
        clock = time.perf_counter_ns
        with _deadline():
            cpu, begun = time.clock_gettime_ns(self._cpu_clock), clock()
            for request in requests:
                sent = clock()
                self._write(request)
                chunks = self._read_answer()
                latencies.append(clock() - sent)
                if kept < KEPT_BYTES:
                    answers.append(b"".join(chunks))
                    kept += len(answers[-1])
            wall, cpu = clock() - begun, time.clock_gettime_ns(self._cpu_clock) - cpu
        return Round(calls, cpu, wall, latencies), [msgspec.json.decode(answer) for answer in answers]

    def in_flight(
        self, tool: str, arguments: Callable[[int], Answer], calls: int, window: int
    ) -> tuple[Round, list[Answer]]:
        """Keep `window` calls unanswered: for as many answers as a read brings, as many requests go out."""
        requests = self._requests(tool, arguments, calls)
        ends = [0]
        for request in requests:
            ends.append(ends[-1] + len(request))
        stream = memoryview(b"".join(requests))
        chunks: list[bytes] = []
        sent, answered = min(window, calls), 0
        with _deadline():
            cpu, begun = time.clock_gettime_ns(self._cpu_clock), time.perf_counter_ns()
            self._write(stream[: ends[sent]])
            while answered < calls:
                chunk = self._read()
                chunks.append(chunk)
                answered += chunk.count(b"\n")
                following = min(answered + window, calls)
                if following > sent:
                    self._write(stream[ends[sent] : ends[following]])
                    sent = following
            wall, cpu = time.perf_counter_ns() - begun, time.clock_gettime_ns(self._cpu_clock) - cpu
        return Round(calls, cpu, wall, []), [msgspec.json.decode(line) for line in b"".join(chunks).splitlines()]

    def _requests(self, tool: str, arguments: Callable[[int], Answer], calls: int) -> list[bytes]:
        first = self._last_id + 1
        self._last_id += calls
        return [
            _line(
                {
                    "jsonrpc": "2.0",
                    "id": number,
                    "method": "tools/call",
                    "params": {"name": tool, "arguments": arguments(number)},
                }
            )
            for number in range(first, first + calls)
        ]

    def _write(self, data: bytes | memoryview) -> None:
        written = os.write(self._to, data)
        while written < len(data):
            written += os.write(self._to, data[written:])

    def _read_answer(self) -> list[bytes]:
        chunks = [self._read()]
        while chunks[-1][-1] != 10:
            chunks.append(self._read())
        return chunks

    def _read(self) -> bytes:
        chunk = os.read(self._from, READ_BYTES)
        if not chunk:
            said = os.pread(self._stderr, 1 << 16, 0).decode(errors="replace")
            raise ConnectionError(f"{self._argv} ended:\n{said}")
        return chunk


@contextmanager
def _deadline() -> Iterator[None]:
    """Break a blocking read when a server hangs."""

    def hung(*signal: object) -> None:
        raise TimeoutError(f"no answer within {HANG_S} s")

    signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)


def _line(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(message) + b"\n"
