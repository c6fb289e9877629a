"""What a fleet costs its engines, measured with 1, 2 and 3 replicas, and what that makes for 10, 100 and 1,000.

    python benchmarks/fleet_model.py            about five minutes
    CALLS=2000 python benchmarks/fleet_model.py

The engines are asked what they did (Redis: INFO; PostgreSQL: its statistics), and the system for their CPU time. So the
figures do not depend on how busy the machine is, but for the number of commits, which fewer calls share on a quiet one.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import asyncpg
from msgspec import Struct
from redis import Redis

from handrail import Client

FLEET: dict[str, Any] = runpy.run_path(
    str(Path(__file__).resolve().parents[1] / "examples" / "fleet" / "run.py"), run_name="fleet"
)
CALLS = int(os.environ.get("CALLS", "1000"))
CALLERS = 16  # at once, spread over the replicas
IDLE_SECONDS = 20.0
SETTLE_SECONDS = 11.0  # PostgreSQL counts what an idle connection did after 10
MODEL_REPLICAS = (10, 100, 1000)
MODEL_CALLS = 200  # a second, of each replica
MODEL_SESSIONS = 0.5  # the share of calls in sessions of handshake revisions
REDIS_CORES, POSTGRES_CORES = 1, 32  # Redis runs commands on one core
FULL = 0.6  # of the cores of an engine, and no more, in daily use


class Usage(Struct):
    """What the engines did since they started."""

    commands: float = 0.0
    redis_bytes: float = 0.0
    redis_cpu: float = 0.0
    commits: float = 0.0
    rows: float = 0.0
    wal_bytes: float = 0.0
    postgres_cpu: float = 0.0

    def since(self, before: Usage, divisor: float) -> Usage:
        return Usage(*((getattr(self, name) - getattr(before, name)) / divisor for name in self.__struct_fields__))


class Engines:
    """Redis and PostgreSQL of one fleet."""

    def __init__(self, store: str, audit: str) -> None:
        self.store, self.audit = store, audit
        self._redis = Redis(port=urlsplit(store).port or 0)
        self._redis_pid = int(self._redis.info("server")["process_id"])

    async def usage(self) -> Usage:
        await asyncio.sleep(SETTLE_SECONDS)
        stats = self._redis.info("stats")
        connection = await asyncpg.connect(self.audit)
        try:
            await connection.execute("SELECT pg_stat_clear_snapshot()")
            row = await connection.fetchrow(
                "SELECT xact_commit, tup_inserted, pg_current_wal_insert_lsn() - '0/0' AS wal"
                " FROM pg_stat_database WHERE datname = current_database()"
            )
            pids = [each["pid"] for each in await connection.fetch("SELECT pid FROM pg_stat_activity")]
        finally:
            await connection.close()
        assert row is not None
        return Usage(
            float(stats["total_commands_processed"]),
            float(stats["total_net_input_bytes"] + stats["total_net_output_bytes"]),
            cpu_of(self._redis_pid),
            float(row["xact_commit"]),
            float(row["tup_inserted"]),
            float(row["wal"]),
            sum(map(cpu_of, pids)),
        )


def cpu_of(pid: int) -> float:
    """Return the seconds of CPU that a process has used; 0 for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def fleet(count: int) -> Iterator[tuple[Engines, list[str]]]:
    """The engines, and the addresses of `count` replicas."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="handrail-model-")))
        folder.chmod(0o755)
        store, audit = stack.enter_context(FLEET["redis"](folder)), stack.enter_context(FLEET["postgres"](folder))
        env = {**os.environ, "HANDRAIL_KEY": secrets.token_hex(32), "HANDRAIL_STORE": store, "HANDRAIL_AUDIT": audit}
        env["XDG_STATE_HOME"] = str(folder)
        urls = []
        for _ in range(count):
            words = ("serve", str(FLEET["HERE"] / "shop.py"), "--http", "127.0.0.1:0", "--json")
            replica: subprocess.Popen[str] = stack.enter_context(
                FLEET["running"](sys.executable, "-m", "handrail", *words, env=env)
            )
            assert replica.stdout is not None
            urls.append(json.loads(replica.stdout.readline())["url"])
        yield Engines(store, audit), urls


async def drive(urls: list[str], revision: str) -> None:
    """Make the calls, from some callers at once."""

    async def call(number: int) -> None:
        async with Client(urls[number % len(urls)], revision=revision) as client:
            for _ in range(CALLS // CALLERS):
                await client.call("find_order", {"order": 7})

    await asyncio.gather(*map(call, range(CALLERS)))


async def measure(count: int) -> dict[str, Usage]:
    """Return the cost of a call of each kind, and of one replica a second without any."""
    with fleet(count) as (engines, urls):
        costs = {}
        for kind, revision in (("stateless call", "2026-07-28"), ("call in a session", "2025-11-25")):
            await drive(urls, revision)  # the first calls open connections
            before = await engines.usage()
            await drive(urls, revision)
            costs[kind] = (await engines.usage()).since(before, CALLS // CALLERS * CALLERS)
        before, begun = await engines.usage(), time.monotonic()
        await asyncio.sleep(IDLE_SECONDS)
        after, elapsed = await engines.usage(), time.monotonic() - begun
        costs["replica, a second"] = after.since(before, elapsed * count)
    return costs


COLUMNS: dict[str, Callable[[Usage], str]] = {
    "Redis commands": lambda each: f"{each.commands:.2f}",
    "bytes": lambda each: f"{each.redis_bytes:,.0f}",
    "CPU µs": lambda each: f"{each.redis_cpu * 1e6:,.0f}",
    "PostgreSQL commits": lambda each: f"{each.commits:.2f}",
    "rows": lambda each: f"{each.rows:.2f}",
    "WAL bytes": lambda each: f"{each.wal_bytes:,.0f}",
    "CPU µs ": lambda each: f"{each.postgres_cpu * 1e6:,.0f}",
}


def scaled(costs: dict[str, Usage], replicas: int) -> Usage:
    """Return what a second of a fleet costs: linear in calls, and in replicas by themselves."""
    calls = replicas * MODEL_CALLS
    parts = [
        (costs["stateless call"], calls * (1 - MODEL_SESSIONS)),
        (costs["call in a session"], calls * MODEL_SESSIONS),
        (costs["replica, a second"], float(replicas)),
    ]
    return Usage(*(sum(getattr(each, name) * count for each, count in parts) for name in Usage.__struct_fields__))


def main() -> None:
    print(f"| with | a | {' | '.join(COLUMNS)} |\n|---|---|{'--:|' * len(COLUMNS)}")
    costs: dict[str, Usage] = {}
    for count in (1, 2, 3):
        costs = asyncio.run(measure(count))
        for kind, usage in costs.items():
            cells = " | ".join(show(usage) for show in COLUMNS.values())
            print(f"| {count} replica{'s' * (count > 1)} | {kind} | {cells} |", flush=True)
    print(
        f"\n{MODEL_CALLS} calls a second of each replica, {MODEL_SESSIONS:.0%} in sessions, by the costs with 3:\n\n"
        "| replicas | calls/s | Redis commands/s | MB/s | cores | PostgreSQL commits/s | rows/s | WAL MB/s | cores |"
        " first at its end |\n|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|"
    )
    for replicas in MODEL_REPLICAS:
        total = scaled(costs, replicas)
        loads = {"Redis": total.redis_cpu / REDIS_CORES, "PostgreSQL": total.postgres_cpu / POSTGRES_CORES}
        fullest = max(loads, key=lambda name: loads[name])
        end = fullest if loads[fullest] > FULL else "none"
        print(
            f"| {replicas:,} | {replicas * MODEL_CALLS:,} | {total.commands:,.0f} | {total.redis_bytes / 1e6:,.1f} |"
            f" {total.redis_cpu:.2f} | {total.commits:,.0f} | {total.rows:,.0f} | {total.wal_bytes / 1e6:,.1f} |"
            f" {total.postgres_cpu:.2f} | {end} |"
        )


if __name__ == "__main__":
    main()
