"""`make bench`: what a tool call costs over stdio, beside a bare loop and beside other packages.

docs/benchmarks.md says how it is measured and what the verdicts mean.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.driver import Answer, Cores, Round, Session, environment
from benchmarks.report import CPU, LATENCY, TWINS, Results, Row, bars, table

HERE = Path(__file__).resolve().parent
MEBIBYTE = "x" * (1 << 20)


class Program(msgspec.Struct, frozen=True):
    """A server to measure, and how to start it."""

    name: str
    python: str
    script: str
    package: str
    imports: Sequence[str]

    def argv(self, tools: int) -> list[str]:
        return [self.python, str(HERE / self.script), str(tools)]


class Scenario(msgspec.Struct, frozen=True):
    """Calls of one tool, and the answer each must get."""

    name: str
    tool: str
    arguments: Callable[[int], Answer]
    is_right: Callable[[int, Answer], bool]
    tools: Sequence[int]
    window: int = 1
    cores: Cores = "any"
    least_calls: int = 100


class Effort(msgspec.Struct, frozen=True):
    rounds: int
    slice_s: float  # How long one program's part of one round takes, about.
    starts: int


FULL = Effort(rounds=18, slice_s=0.1, starts=9)
QUICK = Effort(rounds=6, slice_s=0.05, starts=3)

# No bar depends on these, and their calls take long: every third round is enough.
SELDOM = {"fastmcp": 3}


def text_of(answer: Answer) -> str:
    text: str = answer["content"][0]["text"]
    return text


SMALL, LARGE = (2, 1000), (4,)
MANNERS: Sequence[tuple[str, int, Cores]] = (
    ("64 in flight", 64, "any"),
    ("sequential", 1, "two"),
    ("sequential on one core", 1, "one"),
)
SCENARIOS = [
    Scenario(
        name=f"{tool}, {manner}",
        tool=tool,
        arguments=arguments,
        is_right=is_right,
        tools=SMALL,
        window=window,
        cores=cores,
        least_calls=3 * window if window > 1 else 100,
    )
    for manner, window, cores in MANNERS
    for tool, arguments, is_right in (
        ("echo", lambda id: {"text": f"hello {id}"}, lambda id, answer: text_of(answer) == f"hello {id}"),
        ("add", lambda id: {"a": id, "b": 0.5}, lambda id, answer: answer["structuredContent"] == {"sum": id + 0.5}),
    )
] + [
    Scenario(f"1 MiB {way}", tool, arguments, is_right, LARGE, least_calls=8)
    for way, tool, arguments, is_right in (
        ("in", "length", lambda id: {"text": MEBIBYTE}, lambda id, answer: text_of(answer) == str(len(MEBIBYTE))),
        ("out", "letters", lambda id: {"count": len(MEBIBYTE)}, lambda id, answer: text_of(answer) == MEBIBYTE),
        ("in and out", "echo", lambda id: {"text": MEBIBYTE}, lambda id, answer: text_of(answer) == MEBIBYTE),
    )
]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer and shorter rounds: a look, not a result")
    options.add_argument("--only", default="", metavar="TEXT", help="only the calls whose name contains it, no starts")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the number of every round there")
    options.add_argument(
        "--peers", type=Path, default=HERE.parent / ".peers", metavar="DIR", help="where mcp2/ and fastmcp/ are"
    )
    chosen = options.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("The CPU time of another process is read in the way of Linux; this is something else.")
    effort = QUICK if chosen.quick else FULL
    began = time.monotonic()

    versions: dict[str, str] = {}
    programs: list[Program] = []
    for program in candidates(chosen.peers):
        version = version_of(program)
        versions[program.name] = version or "not installed"
        if version:
            programs += [
                msgspec.structs.replace(program, name=name) for name in TWINS.get(program.name, [program.name])
            ]

    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["benchmarks/run.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }
    stolen_before = stolen()
    results = Results()
    for tools in (SMALL, LARGE):
        scenarios = [scenario for scenario in SCENARIOS if scenario.tools == tools and chosen.only in scenario.name]
        if scenarios:
            measure_calls(results, tools, scenarios, programs, effort)
    if not chosen.only:
        measure_functions(results, programs)
        measure_starts(results, programs, effort)
    machine["stolen"] = f"{stolen() - stolen_before:.0f} core-seconds"
    machine["seconds"] = f"{time.monotonic() - began:.0f}"

    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print()
    print("\n".join(table(results)))
    print()
    print("\n".join(str(bar) for bar in bars(results) if not chosen.only or bar.verdict != "not measured"))
    if chosen.json:
        rows = [{**msgspec.to_builtins(row), "rounds": rounds} for row, rounds in results.rounds.items()]
        document = {"machine": machine, "versions": versions, "rows": rows}
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)))


def candidates(peers: Path) -> list[Program]:
    mcp, fastmcp = str(peers / "mcp2/bin/python"), str(peers / "fastmcp/bin/python")
    return [
        Program("bare", sys.executable, "bare.py", "msgspec", ["import msgspec"] * 2),
        Program(
            "handrail",
            sys.executable,
            "server_handrail.py",
            "handrail",
            ["import handrail", "from handrail import Server"],
        ),
        Program("mcp", mcp, "server_mcp.py", "mcp", ["import mcp", "from mcp.server import MCPServer"]),
        Program("fastmcp", fastmcp, "server_fastmcp.py", "fastmcp", ["import fastmcp", "from fastmcp import FastMCP"]),
    ]


def version_of(program: Program) -> str | None:
    ask = f"{program.imports[-1]}; import importlib.metadata; print(importlib.metadata.version({program.package!r}))"
    try:
        return (
            subprocess.run([program.python, "-P", "-c", ask], capture_output=True, check=True).stdout.decode().strip()
        )
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
    results: Results, tools: Sequence[int], scenarios: Sequence[Scenario], programs: Sequence[Program], effort: Effort
) -> None:
    """Every program in turn, and again: what disturbs the machine for a while then disturbs all of them."""
    with ExitStack() as stack:
        say(f"starting the servers with {' and '.join(map(str, tools))} tools")
        sessions = {
            (program.name, count): stack.enter_context(Session(program.argv(count)))
            for program in programs
            for count in tools
        }
        for scenario in scenarios:
            say(scenario.name)
            calls = {slot: enough(session, scenario, effort) for slot, session in sessions.items()}
            for turn in range(effort.rounds):
                for (name, count), session in sessions.items():
                    if takes_part(name, turn):
                        taken = run(session, scenario, calls[name, count])
                        results.add(Row(f"{scenario.name}: CPU", "µs", CPU, count), name, taken.cpu_us_per_call)
                        if scenario.window == 1:
                            for quantile in (50, 99):
                                row = Row(f"{scenario.name}: p{quantile}", "µs", LATENCY, count)
                                results.add(row, name, taken.latency_us(quantile / 100))


def enough(session: Session, scenario: Scenario, effort: Effort) -> int:
    """Warm the server up, and find how many calls fill its part of a round."""
    run(session, scenario, scenario.least_calls)
    warm = run(session, scenario, scenario.least_calls)
    return max(scenario.least_calls, int(effort.slice_s * 1e9 * warm.calls / warm.wall_ns))


def takes_part(name: str, turn: int) -> bool:
    return turn % SELDOM.get(name, 1) == 0


def run(session: Session, scenario: Scenario, calls: int) -> Round:
    with session.placed(scenario.cores):
        if scenario.window == 1:
            taken, answers = session.sequential(scenario.tool, scenario.arguments, calls)
        else:
            taken, answers = session.in_flight(scenario.tool, scenario.arguments, calls, scenario.window)
    assert answers and len({answer["id"] for answer in answers}) == len(answers), "an answer came twice"
    for answer in answers:
        result = answer.get("result", {"isError": True})
        if result.get("isError") or not scenario.is_right(answer["id"], result):
            raise AssertionError(f"{scenario.name}: wrong answer {str(answer)[:500]}")
    return taken


def measure_functions(results: Results, programs: Sequence[Program]) -> None:
    """Handrail's Python functions per call: two series, so that whatever is not per call cancels out."""
    handrail = next((program for program in programs if program.name == "handrail"), None)
    if handrail is None:
        return
    say("Python functions per call")
    echo = next(scenario for scenario in SCENARIOS if scenario.name == "echo, sequential")
    counted = msgspec.structs.replace(handrail, script="callcount.py")
    for tools in SMALL:
        with Session(counted.argv(tools)) as session:

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
            if turn >= 0 and not takes_part(program.name, turn):
                continue
            times = [import_ms(program.python, statement) for statement in program.imports]
            with Session(program.argv(2)) as session:
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
