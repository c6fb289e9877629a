"""What a gateway costs a call, beside a bare relay and the proxies of other packages, and with many upstreams."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from benchmarks.driver import Session
from benchmarks.gateway_upstream import SLOW_S
from benchmarks.http_driver import HttpServer
from benchmarks.process import HANG_S, Process, beside, enough, run
from benchmarks.report import CPU, LATENCY, TWINS, Bar, Results, Row, judged
from benchmarks.scenarios import FLEET, FLEET_LIST, FLEET_TOOLS, RELAYED, Answer, Scenario, Upstream, Wire

__all__ = ["GATEWAY_NAMES", "gateway_bars", "gateway_table", "measure_gateway"]


class Gateway(msgspec.Struct, frozen=True):
    """A program, its arguments beside the target, and the wires and upstreams it is measured with."""

    program: str
    arguments: Sequence[str] = ()
    sides: Collection[tuple[Wire, Upstream]] = RELAYED.keys()


AUDIT = "FOLDER"  # stands for the folder of the audit
GATEWAYS = {
    "bare": Gateway("bare"),
    "bare, sockets": Gateway("bare", ["sockets"], [("pipe", "HTTP"), ("session", "HTTP")]),
    "handrail": Gateway("handrail"),
    "handrail, audit": Gateway("handrail", [AUDIT]),
    "fastmcp": Gateway("fastmcp"),
    "fastmcp, one session": Gateway("fastmcp", ["one"]),
    "mcp-proxy": Gateway("mcp-proxy", (), [("pipe", "HTTP"), ("session", "stdio")]),
}
SELDOM = 6  # Rounds of ours for one of a peer: its calls take long, and it has no twin to agree with.
CALLS_PER_START = 6  # Rounds of calls for one start: the slow upstream takes seconds.

MAX_CPU_RATIO: Mapping[Upstream, float] = {"stdio": 5, "HTTP": 6}  # of a bare relay's, 32 calls in flight
MAX_P50_RATIO: Mapping[Upstream, float] = {"stdio": 2.2, "HTTP": 3}  # of a bare relay's, one call
MIN_PEER_RATIO = 20  # fastmcp's CPU by handrail's, 32 calls in flight
MAX_LIST_RATIO = 1.3  # of the CPU of one server that sends the same bytes
MAX_START_RATIO = 1.2  # of a bare relay in front of the slow upstream alone

HERE = Path(__file__).resolve().parent
KEPT = HERE.parent / ".benchmarks"
UPSTREAM = [sys.executable, str(HERE / "gateway_upstream.py")]
# Gateways start a command in an environment of their own, so the path of our modules is in the command.
COMMAND = shlex.join(["env", f"PYTHONPATH={HERE.parent}", *UPSTREAM, "2"])
FLEET_START = Row(
    f"gateway start, {FLEET} upstreams, one slow by {SLOW_S:g} s: whole list", "ms", LATENCY, FLEET * FLEET_TOOLS
)
GATEWAY_NAMES = [scenario.name for scenarios in RELAYED.values() for scenario in scenarios]
GATEWAY_NAMES += [FLEET_LIST.name, FLEET_START.what]


def measure_gateway(results: Results, runtimes: Mapping[str, str], only: str, rounds: int, slice_s: float) -> None:
    """Measure what has `only` in its name. `runtimes` are the interpreters, by the name of the program."""
    KEPT.mkdir(exist_ok=True)  # as for the guards: a folder for temporary files may be memory
    with ExitStack() as stack, TemporaryDirectory(dir=KEPT) as folder:
        with beside():
            http = stack.enter_context(HttpServer([*UPSTREAM, "2"]))
            fleet = stack.enter_context(HttpServer([*UPSTREAM, str(FLEET_TOOLS)]))
        for (wire, upstream), scenarios in RELAYED.items():
            if wanted := [scenario for scenario in scenarios if only in scenario.name]:
                target = COMMAND if upstream == "stdio" else http.url
                argvs = {
                    twin: _argv(runtimes, name, target, folder)
                    for name, gateway in GATEWAYS.items()
                    if gateway.program in runtimes and (wire, upstream) in gateway.sides
                    for twin in TWINS.get(name, [name])
                }
                _measure_calls(results, argvs, wanted, rounds, slice_s)
        if only in FLEET_LIST.name:
            _measure_lists(results, runtimes, fleet, rounds, slice_s)
        if only in FLEET_START.what:
            _measure_starts(results, runtimes, fleet, max(rounds // CALLS_PER_START, 1))


def _argv(runtimes: Mapping[str, str], name: str, target: str, folder: str = "") -> list[str]:
    gateway = GATEWAYS[name]
    script = HERE / f"gateway_{gateway.program.replace('-', '_')}.py"
    arguments = [folder if argument == AUDIT else argument for argument in gateway.arguments]
    return [runtimes[gateway.program], str(script), target, *arguments]


def _measure_calls(
    results: Results, argvs: Mapping[str, Sequence[str]], scenarios: Sequence[Scenario], rounds: int, slice_s: float
) -> None:
    """The gateways in turn, and again."""
    with ExitStack() as stack:
        gateways: dict[str, Process] = {}
        for name, argv in argvs.items():
            with beside():  # and an upstream that the list or a call starts
                if scenarios[0].wire == "pipe":
                    gateways[name] = session = stack.enter_context(Noticed(argv))
                    session.request("tools/list", {})
                else:
                    gateways[name] = stack.enter_context(HttpServer(argv))
                for scenario in scenarios:
                    run(gateways[name], msgspec.structs.replace(scenario, cores="any"), scenario.least_calls)
        for scenario in scenarios:
            _say(scenario.name)
            calls = {name: enough(gateway, scenario, slice_s) for name, gateway in gateways.items()}
            for turn in range(rounds):
                for name, gateway in gateways.items():
                    if turn % SELDOM == 0 or "bare" in name or "handrail" in name:
                        _add(results, scenario, name, gateway, calls[name])


def _measure_lists(
    results: Results, runtimes: Mapping[str, str], fleet: HttpServer, rounds: int, slice_s: float
) -> None:
    """Measure the gateway in front of all upstreams, and one server that sends the same bytes."""
    _say(FLEET_LIST.name)
    with ExitStack() as stack:
        servers: dict[str, Noticed] = {}
        scenarios: dict[str, Scenario] = {}
        for handrail, floor in zip(TWINS["handrail"], TWINS["bare"], strict=True):
            with beside():
                gateway = stack.enter_context(Noticed(_argv(runtimes, "handrail", _fleet(fleet, "quick"))))
                server = stack.enter_context(Noticed([*UPSTREAM, "1"]))
            pages = _pages(gateway, FLEET * FLEET_TOOLS)
            server.request("benchmark/listing", pages)
            servers |= {handrail: gateway, floor: server}
            scenarios |= dict.fromkeys([handrail, floor], _listing(pages))
        calls = {name: enough(server, scenarios[name], slice_s) for name, server in servers.items()}
        for _ in range(rounds):
            for name, server in servers.items():
                _add(results, scenarios[name], name, server, calls[name])


def _measure_starts(results: Results, runtimes: Mapping[str, str], fleet: HttpServer, rounds: int) -> None:
    """Measure from before the process is made until all tools are listed; bare has the slow upstream alone."""
    _say(FLEET_START.what)
    for _ in range(rounds):
        for name, tools in (("bare", FLEET_TOOLS), ("handrail", FLEET * FLEET_TOOLS)):
            for twin in TWINS[name]:
                target = _url(fleet, "slow", 0) if name == "bare" else _fleet(fleet, "slow")
                begun = time.perf_counter_ns()
                with Noticed(_argv(runtimes, name, target)) as gateway:
                    _pages(gateway, tools)
                    results.add(FLEET_START, twin, (time.perf_counter_ns() - begun) / 1e6)


def _add(results: Results, scenario: Scenario, name: str, gateway: Process, calls: int) -> None:
    taken = run(gateway, scenario, calls)
    results.add(_row(scenario, "CPU"), name, taken.cpu_us_per_call)
    if taken.latencies_ns:
        results.add(_row(scenario, "p50"), name, taken.latency_us(0.5))


def _row(scenario: Scenario, what: str) -> Row:
    return Row(f"{scenario.name}: {what}", "µs", CPU if what == "CPU" else LATENCY, scenario.tools[0])


class Noticed(Session):
    """A server that may send notices between its answers."""

    def _read_answer(self) -> list[bytes]:
        while True:
            lines = b"".join(super()._read_answer()).splitlines()
            if answers := [line for line in lines if b'"method":"notifications/' not in line[:100]]:
                return answers


def _pages(gateway: Session, tools: int) -> dict[str, Answer]:
    """Ask until so many tools are listed; return the pages by cursor, which is empty for the first."""
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        pages: dict[str, Answer] = {}
        cursor: str | None = ""
        while cursor is not None:
            page = pages[cursor] = gateway.request("tools/list", {"cursor": cursor} if cursor else {})["result"]
            cursor = page.get("nextCursor")
        if sum(len(page["tools"]) for page in pages.values()) == tools:
            return pages
        time.sleep(0.01)
    raise TimeoutError(f"{tools} tools were not listed within {HANG_S} s")


def _listing(pages: Mapping[str, Answer]) -> Scenario:
    """Return the scenario that asks for one page after the other."""
    cursors, sizes = list(pages), [len(page["tools"]) for page in pages.values()]

    def params(id: int) -> Answer:
        cursor = cursors[id % len(cursors)]
        return {"cursor": cursor} if cursor else {}

    def is_right(id: int, answer: Answer) -> bool:
        return len(answer["tools"]) == sizes[id % len(sizes)]

    return msgspec.structs.replace(FLEET_LIST, params=params, is_right=is_right)


_starts = count()


def _fleet(fleet: HttpServer, first: str) -> str:
    """Return an `mcpServers` configuration of all upstreams; the first of them is `slow`, or `quick` as the others."""
    kinds = [first, *["quick"] * (FLEET - 1)]
    servers = {f"upstream_{number}": {"url": _url(fleet, kind, number)} for number, kind in enumerate(kinds)}
    return msgspec.json.encode({"mcpServers": servers}).decode()


def _url(fleet: HttpServer, kind: str, number: int) -> str:
    """Return the address of an upstream that was never asked before, so that a slow one is slow."""
    return f"{fleet.url.removesuffix('/mcp')}/{kind}/{number}/{next(_starts)}"


def _say(what: str) -> None:
    print(f"measuring: {what}", file=sys.stderr, flush=True)


def gateway_table(results: Results) -> Iterator[str]:
    """Medians, and in brackets the ratio to bare."""
    yield f"| | {' | '.join(GATEWAYS)} | twins |"
    yield "|---|" + "--:|" * len(GATEWAYS) + "---|"
    for row in results.rounds:
        cells = [_cell(results, row, name) for name in GATEWAYS]
        verdict = f"{'counts' if results.counts(row) else 'void'} (differ by {results.gap(row):.0%})"
        yield f"| {row.what}, {row.unit} | {' | '.join(cells)} | {verdict} |"


def _cell(results: Results, row: Row, name: str) -> str:
    value, ratio = results.value(row, name), results.ratio(row, name, "bare")
    if value is None:
        return "–"
    digits = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return digits if ratio is None or name == "bare" else f"{digits} (× {ratio:.3g})"


def gateway_bars(results: Results) -> Iterator[Bar]:
    """The performance bars of the gateway. Those of a call are for a client over stdio."""
    for (wire, upstream), scenarios in RELAYED.items():
        for scenario in scenarios if wire == "pipe" else ():
            cpu, p50 = _row(scenario, "CPU"), _row(scenario, "p50")
            for floor in ("bare", "bare, sockets") if upstream == "HTTP" else ("bare",):
                if scenario.window == 1:
                    yield _at_most(results, p50, MAX_P50_RATIO[upstream], floor)
                else:
                    yield _at_most(results, cpu, MAX_CPU_RATIO[upstream], floor)
            if scenario.window > 1:
                ratio = results.ratio(cpu, "fastmcp", "handrail")
                text = f"{cpu.what}, handrail at least {MIN_PEER_RATIO} × below fastmcp"
                yield judged(results, cpu, text, ratio, ratio is not None and ratio >= MIN_PEER_RATIO)
    yield _at_most(results, _row(FLEET_LIST, "CPU"), MAX_LIST_RATIO, "bare")
    yield _at_most(results, FLEET_START, MAX_START_RATIO, "bare")


def _at_most(results: Results, row: Row, limit: float, floor: str) -> Bar:
    ratio = results.ratio(row, "handrail", floor)
    text = f"{row.what}, handrail at most {limit:g} × {floor}"
    return judged(results, row, text, ratio, ratio is not None and ratio <= limit)
