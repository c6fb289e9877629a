"""What it costs a call that its limits are shared by all replicas, in Redis: leased, and exact."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

from redis import Redis
from redis.exceptions import ConnectionError as NotConnected

from benchmarks.http_driver import HttpServer
from benchmarks.process import Process, beside, enough, run
from benchmarks.report import CPU, LATENCY, TWINS, Bar, Results, Row, judged
from benchmarks.scenarios import REPLICA, SHARED

__all__ = ["fleet_bars", "fleet_table", "measure_fleet"]

SERVER = Path(__file__).with_name("server_fleet.py")
MAX_RATIO = {"leased": 1.15, "exact": 1.6}  # of the CPU, and of the p50, of a call whose limits are not shared
MAX_COMMANDS = 0.05  # of Redis, for a call of a leased rate at CALLS_PER_SECOND
CALLS_PER_SECOND, BURST, START_S = 2000, 128, 10

ROWS = [Row(f"{REPLICA.name}: CPU", "µs", CPU), Row(f"{REPLICA.name}: p50", "µs", LATENCY)]
COMMANDS = Row(f"{REPLICA.name}: Redis commands a call, {CALLS_PER_SECOND:,} calls a second", "", LATENCY)


def measure_fleet(results: Results, rounds: int, slice_s: float) -> None:
    """The variants in turn, and again; each is two servers."""
    if shutil.which("redis-server") is None:
        print("fleet: redis-server is not installed", file=sys.stderr)
        return
    os.environ["HANDRAIL_KEY"] = token_hex(32)
    with ExitStack() as stack:
        with beside():
            redis, url = stack.enter_context(_redis())
        servers: dict[str, Process] = {}
        for variant in SHARED:
            for name in TWINS[variant]:
                argv = [sys.executable, str(SERVER), variant, url]
                servers[name] = stack.enter_context(HttpServer(argv))
        calls = {name: enough(server, REPLICA, slice_s) for name, server in servers.items()}
        for _ in range(rounds):
            for name, server in servers.items():
                taken = run(server, REPLICA, calls[name])
                for row, value in zip(ROWS, (taken.cpu_us_per_call, taken.latency_us(0.5)), strict=True):
                    results.add(row, name, value)
        for name, server in servers.items():
            if name not in TWINS["alone"]:  # whose scripts are only those of a replica that says it is there
                results.add(COMMANDS, name, _commands_per_call(redis, server))


@contextmanager
def _redis() -> Iterator[tuple[Redis, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder:
        argv = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        client = Redis(port=port)
        try:
            end = time.monotonic() + START_S
            while True:
                try:
                    client.ping()
                    break
                except NotConnected:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.01)
            yield client, f"redis://127.0.0.1:{port}/0"
        finally:
            client.close()
            process.terminate()
            process.wait()


def _commands_per_call(redis: Redis, server: Process) -> float:
    """Call at the given rate, in bursts, and count the scripts that Redis was sent meanwhile."""
    before, calls, begun = _scripts(redis), 0, time.monotonic()
    while calls < CALLS_PER_SECOND:
        run(server, REPLICA, BURST)
        calls += BURST
        time.sleep(max(0.0, begun + calls / CALLS_PER_SECOND - time.monotonic()))
    return (_scripts(redis) - before) / calls


def _scripts(redis: Redis) -> int:
    redis_stats = redis.info("commandstats")
    return sum(int(redis_stats.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("eval", "evalsha"))


def fleet_table(results: Results) -> Iterator[str]:
    yield "| limits | " + " | ".join(SHARED) + " | leased ÷ alone | exact ÷ alone | twins |"
    yield "|---|" + "--:|" * (len(SHARED) + 2) + "---|"
    for row in results.rounds:
        values = [results.value(row, variant) for variant in SHARED]
        ratios = [results.ratio(row, variant, "alone") for variant in MAX_RATIO]
        cells = ["–" if each is None else f"{each:.3g}" for each in (*values, *ratios)]
        verdict = "counts"  # a number of commands, which no noise changes
        if row != COMMANDS:
            verdict = f"{'counts' if results.counts(row) else 'void'} (differ by {results.gap(row):.0%})"
        yield f"| {' | '.join([', '.join(filter(None, [row.what, row.unit])), *cells, verdict])} |"


def fleet_bars(results: Results) -> Iterator[Bar]:
    """The performance bars of shared limits."""
    for row in ROWS:
        for variant, allowed in MAX_RATIO.items():
            ratio = results.ratio(row, variant, "alone")
            text = f"{row.what}, {variant} at most {allowed:g} × that with limits of its own"
            yield judged(results, row, text, ratio, ratio is not None and ratio <= allowed)
    commands = results.value(COMMANDS, "leased")
    text, met = f"{COMMANDS.what}, leased: at most {MAX_COMMANDS:g}", commands is not None and commands <= MAX_COMMANDS
    measured = "" if commands is None else f"{commands:.4f}"
    yield Bar(text, measured, "not measured" if commands is None else "met" if met else "not met")
