"""Measured numbers to one table, and to one line for each bar they are held to."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from statistics import median
from typing import Literal

from msgspec import Struct

__all__ = ["CPU", "LATENCY", "PEERS", "PROGRAMS", "TWINS", "Bar", "Results", "Row", "bars", "judged", "table"]

PEERS = ("mcp", "fastmcp", "typescript")
PROGRAMS = ("bare", "handrail", *PEERS)

# The same program under two names. Where the two differ by more than the tolerance, the machine was too noisy
# for that line to say anything, and the line is void.
_TWIN_NAMES = ("bare", "handrail", "off", "sanitize", "outcome", "alone", "leased", "exact")
TWINS = {name: (name, f"{name} twin") for name in _TWIN_NAMES}
LATENCY = 0.10
CPU = 0.15


class Row(Struct, frozen=True):
    """One thing measured of every program."""

    what: str
    unit: str
    tolerance: float
    tools: int = 2


class Bar(Struct, frozen=True):
    """A promise, what was measured, and what follows."""

    text: str
    measured: str
    verdict: Literal["met", "not met", "void", "not measured"]

    def __str__(self) -> str:
        return f"- {self.text}: {self.measured + ', ' if self.measured else ''}**{self.verdict}**"


class Results:
    """One number per row, program and round."""

    def __init__(self) -> None:
        self.rounds: dict[Row, dict[str, list[float]]] = {}

    def add(self, row: Row, name: str, value: float) -> None:
        self.rounds.setdefault(row, {}).setdefault(name, []).append(value)

    def value(self, row: Row, program: str) -> float | None:
        """The median over all rounds, those of its twin included."""
        names = TWINS.get(program, (program,))
        values = [value for name in names for value in self.rounds.get(row, {}).get(name, [])]
        return median(values) if values else None

    def gap(self, row: Row) -> float:
        """How far apart the twins are: of the pairs that were measured, the worse one."""
        worst = 0.0
        for first, second in TWINS.values():
            measured = self.rounds.get(row, {})
            if first in measured and second in measured:
                low, high = sorted((median(measured[first]), median(measured[second])))
                worst = max(worst, high / low - 1)
        return worst

    def counts(self, row: Row) -> bool:
        return self.gap(row) <= row.tolerance

    def ratio(self, row: Row, program: str, base: str) -> float | None:
        value, floor = self.value(row, program), self.value(row, base)
        return value / floor if value is not None and floor else None


def table(results: Results) -> Iterator[str]:
    """One Markdown table: medians, and in brackets the ratio to the bare loop."""
    yield "| | tools | " + " | ".join(PROGRAMS) + " | mcp ÷ handrail | twins |"
    yield "|---|--:|" + "--:|" * len(PROGRAMS) + "--:|---|"
    for row in results.rounds:
        cells = [_cell(results, row, program) for program in PROGRAMS]
        distance = results.ratio(row, "mcp", "handrail")
        verdict = f"differ by {results.gap(row):.0%}"
        verdict = f"counts ({verdict})" if results.counts(row) else f"void (twins {verdict})"
        yield " | ".join(
            [
                "| " + ", ".join(filter(None, [row.what, row.unit])),
                str(row.tools or ""),
                *cells,
                f"{distance:.3g}" if distance else "–",
                f"{verdict} |",
            ]
        )


def bars(results: Results) -> Iterator[Bar]:
    """The performance bars of servers and clients; those of the guards are in `guards.py`."""
    for tool in ("echo", "add"):
        cpu, p50 = Row(f"{tool}, 64 in flight: CPU", "µs", CPU), Row(f"{tool}, sequential: p50", "µs", LATENCY)
        yield _at_most(results, cpu, "handrail", "bare", 3.5)
        yield _at_least(results, cpu, "mcp", "handrail", 45)
        yield _at_most(results, p50, "handrail", "bare", 1.5)
        many = Row(cpu.what, cpu.unit, cpu.tolerance, 1000)
        text = f"{cpu.what}, handrail with 1,000 tools at most 1.1 × that with 2"
        yield _against_itself(results, many, cpu, 1.1, text)
    for way in ("in", "out", "in and out"):
        yield _at_most(results, Row(f"1 MiB {way}: CPU", "µs", CPU, 4), "handrail", "bare", 1.5)
        yield _at_most(results, Row(f"1 MiB {way}: p50", "µs", LATENCY, 4), "handrail", "bare", 1.5)
    yield _same_calls(results)
    # `import handrail` loads names when they are used; the second line is what a server pays.
    yield _at_most(results, Row("import", "ms", LATENCY, 0), "handrail", "mcp", 0.05)
    yield _at_most(results, Row("import of the server class", "ms", LATENCY, 0), "handrail", "mcp", 0.2)
    yield _at_most(results, Row("spawn to first answer", "ms", LATENCY), "handrail", "mcp", 0.22)
    yield _memory(results, 40)
    yield from _http_bars(results)
    yield from _client_bars(results)


def _http_bars(results: Results) -> Iterator[Bar]:
    for tool in ("echo", "add"):
        for window in (1, 32, 128):
            for wire in ("session", "stateless"):
                row = Row(f"http {tool}, {wire}, {window} at once: CPU", "µs", CPU)
                if window == 1:  # the floor itself is only five times below the peers here
                    yield _at_most(results, row, "handrail", "bare", 1.25)
                    continue
                yield _at_most(results, row, "handrail", "bare", 1.45)
                yield _at_least(results, row, "mcp", "handrail", 7)
                yield _at_least(results, row, "typescript", "handrail", 4)
                if window == 32:
                    p99 = Row(f"http {tool}, {wire}, {window} at once: p99", "µs", LATENCY)
                    yield _at_most(results, p99, "handrail", "bare", 2.5)
    for wire in ("session", "stateless"):
        yield _at_most(results, Row(f"http tools/list, {wire}: CPU", "µs", CPU, 1000), "handrail", "bare", 1.3)


def _client_bars(results: Results) -> Iterator[Bar]:
    for transport, tool, wire in product(("stdio", "http"), ("echo", "add"), ("session", "stateless")):
        busy = Row(f"client {transport} {tool}, {wire}, 32 in flight: CPU", "µs", CPU)
        yield _at_most(results, busy, "handrail", "bare", 3 if transport == "stdio" else 1.4)
        yield _at_least(results, busy, "mcp", "handrail", 9)
        sequential = Row(f"client {transport} {tool}, {wire}, sequential: CPU", "µs", CPU)
        yield _at_most(results, sequential, "handrail", "bare", 1.4)


def _cell(results: Results, row: Row, program: str) -> str:
    value = results.value(row, program)
    if value is None:
        return "–"
    digits = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    ratio = results.ratio(row, program, "bare")
    return digits if ratio is None or program == "bare" else f"{digits} (× {ratio:.3g})"


def judged(results: Results, row: Row, text: str, ratio: float | None, met: bool, sign: str = "×") -> Bar:
    if ratio is None:
        return Bar(text, "", "not measured")
    measured = f"{ratio:.4g} {sign}"
    if not results.counts(row):
        return Bar(text, f"{measured} (twins differ by {results.gap(row):.0%})", "void")
    return Bar(text, measured, "met" if met else "not met")


def _at_most(results: Results, row: Row, program: str, base: str, limit: float) -> Bar:
    ratio = results.ratio(row, program, base)
    text = f"{row.what}, {program} at most {limit:g} × {base}"
    return judged(results, row, text, ratio, ratio is not None and ratio <= limit)


def _at_least(results: Results, row: Row, program: str, base: str, limit: float) -> Bar:
    ratio = results.ratio(row, program, base)
    text = f"{row.what}, {base} at least {limit:g} × below {program}"
    return judged(results, row, text, ratio, ratio is not None and ratio >= limit)


def _against_itself(results: Results, row: Row, base: Row, limit: float, text: str) -> Bar:
    """Handrail in one row beside handrail in another; the noisier one of the two decides whether it counts."""
    value, floor = results.value(row, "handrail"), results.value(base, "handrail")
    ratio = value / floor if value and floor else None
    worse = max(row, base, key=results.gap)
    return judged(results, worse, text, ratio, ratio is not None and ratio <= limit)


def _same_calls(results: Results) -> Bar:
    few = results.value(Row("Python functions per call", "", CPU), "handrail")
    lots = results.value(Row("Python functions per call", "", CPU, 1000), "handrail")
    text = "Python functions entered per call, handrail with 1,000 tools as many as with 2"
    if few is None or lots is None:
        return Bar(text, "", "not measured")
    return Bar(text, f"{few:g} and {lots:g}", "met" if few == lots else "not met")


def _memory(results: Results, limit: float) -> Bar:
    row = Row("resident memory after start", "MB", CPU)
    value = results.value(row, "handrail")
    text = f"{row.what}, handrail at most {limit:g} MB"
    return judged(results, row, text, value, value is not None and value <= limit, "MB")
