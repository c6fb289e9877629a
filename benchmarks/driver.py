"""A server on two pipes: requests out, answers counted, time and CPU taken."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.process import KEPT_BYTES, READ_BYTES, Process, Round, deadline
from benchmarks.scenarios import CLIENT, REVISIONS, Answer, Scenario

__all__ = ["Piped", "Session", "line"]

REVISION = REVISIONS["pipe"]


class Piped(Process):
    """A spawned process that is told lines, and answers each with one.

    The pipes are read and written with plain blocking system calls: a driver that polls would take the
    processor from what it measures.
    """

    def __init__(self, argv: Sequence[str], **variables: str) -> None:
        super().__init__(argv, subprocess.PIPE, **variables)
        assert self._process.stdin and self._process.stdout
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()

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
            raise self._ended()
        return chunk


class Session(Piped):
    """A spawned server that has been greeted."""

    def __init__(self, argv: Sequence[str]) -> None:
        started = time.perf_counter_ns()
        super().__init__(argv)
        hello = {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": CLIENT}
        try:
            answer = self.request("initialize", hello)
            self.first_answer_ns = time.perf_counter_ns() - started
            assert answer["result"]["protocolVersion"] == REVISION, answer
        except BaseException:
            self.close()
            raise
        self._write(line({"jsonrpc": "2.0", "method": "notifications/initialized"}))

    def request(self, method: str, params: dict[str, Any]) -> Answer:
        """One request of any method, answered."""
        (id,) = self._next_ids(1)
        with deadline():
            self._write(line({"jsonrpc": "2.0", "id": id, "method": method, "params": params}))
            answer: Answer = msgspec.json.decode(b"".join(self._read_answer()))
        return answer

    def play(self, scenario: Scenario, calls: int) -> tuple[Round, list[Answer]]:
        requests = [
            line({"jsonrpc": "2.0", "id": id, "method": scenario.method, "params": scenario.params(id)})
            for id in self._next_ids(calls)
        ]
        return self._sequential(requests) if scenario.window == 1 else self._in_flight(requests, scenario.window)

    def _sequential(self, requests: Sequence[bytes]) -> tuple[Round, list[Answer]]:
        """One call after the other, each timed from before its write to after its last byte."""
        latencies: list[int] = []
        answers: list[bytes] = []
        kept = 0
        clock = time.perf_counter_ns
        with deadline():
            cpu, begun = self.cpu_ns(), clock()
            for request in requests:
                sent = clock()
                self._write(request)
                chunks = self._read_answer()
                latencies.append(clock() - sent)
                if kept < KEPT_BYTES:
                    answers.append(b"".join(chunks))
                    kept += len(answers[-1])
            wall, cpu = clock() - begun, self.cpu_ns() - cpu
        return Round(len(requests), cpu, wall, latencies), [msgspec.json.decode(answer) for answer in answers]

    def _in_flight(self, requests: Sequence[bytes], window: int) -> tuple[Round, list[Answer]]:
        """Keep `window` calls unanswered: for as many answers as a read brings, as many requests go out."""
        calls = len(requests)
        ends = [0]
        for request in requests:
            ends.append(ends[-1] + len(request))
        stream = memoryview(b"".join(requests))
        chunks: list[bytes] = []
        sent, answered = min(window, calls), 0
        with deadline():
            cpu, begun = self.cpu_ns(), time.perf_counter_ns()
            self._write(stream[: ends[sent]])
            while answered < calls:
                chunk = self._read()
                chunks.append(chunk)
                answered += chunk.count(b"\n")
                following = min(answered + window, calls)
                if following > sent:
                    self._write(stream[ends[sent] : ends[following]])
                    sent = following
            wall, cpu = time.perf_counter_ns() - begun, self.cpu_ns() - cpu
        return Round(calls, cpu, wall, []), [msgspec.json.decode(line) for line in b"".join(chunks).splitlines()]


def line(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(message) + b"\n"
