"""What the guards of a server cost a call: servers side by side, each with one guard more than the one before."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec

from benchmarks.driver import Session
from benchmarks.hostile import CORPUS, longest_wait_ms
from benchmarks.http_driver import HttpServer
from benchmarks.process import Process, enough, run
from benchmarks.report import CPU, LATENCY, TWINS, Bar, Results, Row, judged
from benchmarks.scenarios import GUARDED, LONG, LONG_TEXT, STEPS, Part

__all__ = ["guard_bars", "guard_table", "measure_guards"]

SERVER = Path(__file__).with_name("server_guards.py")
KEPT = SERVER.parents[1] / ".benchmarks"
MAX_GUARDS_RATIO = {"stdio": 2.5, "http": 1.4}  # of the CPU of a call without guards
MAX_AUDIT_RATIO = 1.2  # what the audit adds, of the CPU of the same call over HTTP without it
MAX_SANITIZE_SHARE = 0.12  # of the server's CPU for a call that returns 1 MB of plain text
MAX_WAIT_MS = 50  # of other callers, while the slowest result is sanitized
HOSTILE = Row(
    f"guards, {len(CORPUS)} results made to be slow to clean: the longest that the loop is held up", "ms", LATENCY
)
LONG_CPU = Row(f"{LONG_TEXT.name}: server CPU", "µs", CPU)


def measure_guards(results: Results, part: Part, rounds: int, slice_s: float) -> None:
    """The servers in turn, and again; those the bars are about run twice, as twins."""
    # Beside the sources: a folder for temporary files may be memory, and a sync there costs nothing.
    KEPT.mkdir(exist_ok=True)
    with ExitStack() as stack, TemporaryDirectory(dir=KEPT) as folder:
        servers: dict[str, Process] = {}
        for step in STEPS:
            for name in TWINS.get(step, [step]):
                own = Path(folder, name)
                own.mkdir()
                argv = [sys.executable, str(SERVER), step, str(own)]
                servers[name] = stack.enter_context(Session(argv) if part == "stdio" else HttpServer(argv))
        for scenario in GUARDED:
            if scenario.part == part:
                calls = {name: enough(server, scenario, slice_s) for name, server in servers.items()}
                for _ in range(rounds):
                    for name, server in servers.items():
                        taken = run(server, scenario, calls[name])
                        results.add(Row(scenario.name, "µs", CPU), name, taken.cpu_us_per_call)
        if part == "stdio":
            twins = {name: servers[name] for name in TWINS["outcome"]}
            calls = {name: enough(server, LONG_TEXT, slice_s) for name, server in twins.items()}
            for _ in range(rounds):
                for name, server in twins.items():
                    results.add(LONG_CPU, name, run(server, LONG_TEXT, calls[name]).cpu_us_per_call)
            results.add(LONG_CPU, "sanitize stage", _sanitize_us(Path(folder, "outcome", "audit.db")))
    if part == "stdio":
        for _ in range(rounds):
            for name in TWINS["outcome"]:
                worst, wait_ms = longest_wait_ms()
                print(f"slowest to clean: {worst}, {wait_ms:.0f} ms", file=sys.stderr)
                results.add(HOSTILE, name, wait_ms)


def _sanitize_us(audit: Path) -> float:
    """The time of the sanitizer by the audit log: a difference of two servers would be mostly noise."""
    with closing(sqlite3.connect(audit)) as db:
        lines = b"\n".join(row for (row,) in db.execute("SELECT line FROM audit ORDER BY number")).splitlines()
    records = [msgspec.json.decode(line) for line in lines]
    taken: list[int] = [each["stages_ns"]["sanitize"] for each in records if each.get("characters") == len(LONG)]
    return median(taken) / 1000


def guard_table(results: Results) -> Iterator[str]:
    """CPU a call, and in brackets what this guard adds to those before it."""
    yield "| CPU a call, µs | " + " | ".join(STEPS) + " | guards ÷ off | audit | twins |"
    yield "|---|" + "--:|" * (len(STEPS) + 2) + "---|"
    for row in results.rounds:
        if row in (HOSTILE, LONG_CPU):  # measured with all guards only
            continue
        values = [results.value(row, step) or 0.0 for step in STEPS]
        cells = [f"{values[0]:.3g}", *(f"{now:.3g} ({now - before:+.1f})" for before, now in pairwise(values))]
        verdict = f"{'counts' if results.counts(row) else 'void'} (differ by {results.gap(row):.0%})"
        guards, audit = results.ratio(row, "sanitize", "off"), values[-1] - values[STEPS.index("sanitize")]
        yield f"| {' | '.join([row.what, *cells, f'{guards:.3g}', f'{audit:+.1f}', verdict])} |"


def guard_bars(results: Results) -> Iterator[Bar]:
    """The performance bars of the guards."""
    for scenario in GUARDED:
        row = Row(scenario.name, "µs", CPU)
        allowed = MAX_GUARDS_RATIO[scenario.part]
        text = f"{row.what}: CPU with all guards but the audit at most {allowed:g} × that without any"
        ratio = results.ratio(row, "sanitize", "off")
        yield judged(results, row, text, ratio, ratio is not None and ratio <= allowed)
        http_row = Row(scenario.name.replace("over stdio", "over HTTP, stateless"), "µs", CPU)
        before, after = results.value(row, "sanitize"), results.value(row, "outcome")
        http = results.value(http_row, "sanitize")
        added = None if before is None or after is None or not http else (after - before) / http
        text = (
            f"{row.what}: CPU that the durable audit adds at most {MAX_AUDIT_RATIO:g} × the call over HTTP without it"
        )
        yield judged(results, row, text, added, added is not None and added <= MAX_AUDIT_RATIO)
    share = results.ratio(LONG_CPU, "sanitize stage", "outcome")
    text = f"{LONG_CPU.what}: sanitizing at most {MAX_SANITIZE_SHARE:.0%} of it, all guards on"
    met = share is not None and share <= MAX_SANITIZE_SHARE
    yield judged(results, LONG_CPU, text, None if share is None else 100 * share, met, "%")
    wait = results.value(HOSTILE, "outcome")
    text = f"{HOSTILE.what}: at most {MAX_WAIT_MS} ms"
    yield judged(results, HOSTILE, text, wait, wait is not None and wait <= MAX_WAIT_MS, "ms")
