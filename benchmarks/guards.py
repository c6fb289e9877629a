"""What the guards of a server cost a call: servers side by side, each with one guard more than the one before."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
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
from benchmarks.scenarios import GUARDED, LONG, STEPS, Part
from handrail import Client

__all__ = ["guard_bars", "guard_table", "measure_guards"]

SERVER = Path(__file__).with_name("server_guards.py")
KEPT = SERVER.parents[1] / ".benchmarks"
ALLOWED = {"stdio": 2.5, "http": 1.3}  # times what a call costs without guards
AUDIT_US = 30
CLEANING = 0.05  # of a call that gives back 1 MB of plain text
WAIT_MS = 50  # of other callers, while the result that takes longest is cleaned
HOSTILE = Row(
    f"guards, {len(CORPUS)} results made to be slow to clean: the longest that the loop is held up", "ms", LATENCY
)
LONG_CALL, LONG_CALLS = Row("guards, a text of 1 MB over stdio, called by our client: p50", "µs", LATENCY), 60


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
        for _ in range(rounds):
            for name in (name for step in STEPS for name in TWINS.get(step, [step])):
                with TemporaryDirectory(dir=KEPT) as folder:
                    results.add(LONG_CALL, name, asyncio.run(_long_call_us(name.removesuffix(" twin"), folder)))
                    if name == "outcome":
                        results.add(LONG_CALL, "cleaning", _cleaning_us(Path(folder, "audit.db")))
            for name in TWINS["outcome"]:
                worst, wait_ms = longest_wait_ms()
                print(f"slowest to clean: {worst}, {wait_ms:.0f} ms", file=sys.stderr)
                results.add(HOSTILE, name, wait_ms)


async def _long_call_us(step: str, folder: str) -> float:
    """The time that a call takes which gives back a long text, as whoever calls with our client sees it."""
    times: list[float] = []
    env = {"PYTHONPATH": str(SERVER.parents[1])}
    async with Client([sys.executable, str(SERVER), step, folder], env=env) as client:
        for _ in range(LONG_CALLS):
            begun = time.perf_counter()
            assert (await client.call("text", {})).text == LONG
            times.append(1e6 * (time.perf_counter() - begun))
    return median(times)


def _cleaning_us(audit: Path) -> float:
    """What of it was cleaning, by the record: what two servers differ by is mostly chance."""
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
        if row == HOSTILE:  # in one process, with the defaults
            continue
        values = [results.value(row, step) or 0.0 for step in STEPS]
        cells = [f"{values[0]:.3g}", *(f"{now:.3g} ({now - before:+.1f})" for before, now in pairwise(values))]
        verdict = f"{'counts' if results.counts(row) else 'void'} (differ by {results.gap(row):.0%})"
        guards, audit = results.ratio(row, "sanitize", "off"), values[-1] - values[STEPS.index("sanitize")]
        yield f"| {' | '.join([row.what, *cells, f'{guards:.3g}', f'{audit:+.1f}', verdict])} |"


def guard_bars(results: Results) -> Iterator[Bar]:
    """The bars of issue 5, acceptance 9 and 5."""
    for scenario in GUARDED:
        row = Row(scenario.name, "µs", CPU)
        allowed = ALLOWED[scenario.part]
        text = f"{row.what}: CPU with all guards but the audit at most {allowed:g} × that without any"
        ratio = results.ratio(row, "sanitize", "off")
        yield judged(results, row, text, ratio, ratio is not None and ratio <= allowed)
        before, after = results.value(row, "sanitize"), results.value(row, "outcome")
        more = None if before is None or after is None else after - before
        text = f"{row.what}: CPU that the durable audit adds at most {AUDIT_US} µs"
        yield judged(results, row, text, more, more is not None and more <= AUDIT_US, "µs")
    share = results.ratio(LONG_CALL, "cleaning", "outcome")
    text = f"{LONG_CALL.what}: cleaning at most {CLEANING:.0%} of the time a call takes with all guards"
    met = share is not None and share <= CLEANING
    yield judged(results, LONG_CALL, text, None if share is None else 100 * share, met, "%")
    wait = results.value(HOSTILE, "outcome")
    text = f"{HOSTILE.what}: at most {WAIT_MS} ms"
    yield judged(results, HOSTILE, text, wait, wait is not None and wait <= WAIT_MS, "ms")
