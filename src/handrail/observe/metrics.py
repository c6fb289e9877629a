"""Counters and histograms of one process, and their text for Prometheus.

Only the event loop of the server changes them, never a worker thread, so an increment needs no lock. They are copied
before they are read, in any thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from handrail.engine.call_state import CallState
from handrail.engine.core import Engine
from handrail.engine.outcome import CallEnd, RefusedCall
from handrail.errors import Kind

BUCKETS = tuple(map(float, "1e-5 1e-4 .001 .0025 .005 .01 .025 .05 .1 .25 .5 1 2.5 5 10 30 60 300".split()))  # seconds
MAX_LABEL_SETS = 1_000  # sets of label values, of each family

Labels = tuple[str, ...]
Snapshot = dict[str, list[str]]  # by the head of each family: its lines


_UNKNOWN = (Kind.UNKNOWN_TOOL, Kind.UNKNOWN_RESOURCE, Kind.UNKNOWN_PROMPT)


class Counter:
    """A number for each set of label values. Sets beyond the first thousand are counted as one, with an empty name."""

    kind = "counter"

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.values: dict[Labels, float] = {}

    def add(self, *labels: str, by: float = 1) -> None:
        if labels not in self.values and len(self.values) >= MAX_LABEL_SETS:
            labels = ("", *labels[1:])
        self.values[labels] = self.values.get(labels, 0) + by

    def samples(self) -> Iterator[tuple[str, Labels, Labels, float]]:
        for values, number in list(self.values.items()):
            yield self.name, self.labels, values, number


class Gauge(Counter):
    """A number that goes up and down."""

    kind = "gauge"

    def set(self, number: float, *labels: str) -> None:
        self.values[labels] = number


class Histogram(Counter):
    """Counts of observed numbers, by bucket."""

    kind = "histogram"

    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__(name, text, *labels)
        self.rows: dict[Labels, list[float]] = {}  # a number for each bucket, one for what is beyond, the sum

    def observe(self, number: float, *labels: str) -> None:
        row = self.rows.get(labels)
        if row is None:
            labels = labels if len(self.rows) < MAX_LABEL_SETS else ("", *labels[1:])
            row = self.rows.setdefault(labels, [0] * (len(BUCKETS) + 2))
        row[bisect_left(BUCKETS, number)] += 1
        row[-1] += number

    def samples(self) -> Iterator[tuple[str, Labels, Labels, float]]:
        for values, row in [(values, list(row)) for values, row in list(self.rows.items())]:
            total = 0.0
            for bound, count in zip((*map(str, BUCKETS), "+Inf"), row, strict=False):
                total += count
                yield f"{self.name}_bucket", (*self.labels, "le"), (*values, bound), total
            yield f"{self.name}_sum", self.labels, values, row[-1]
            yield f"{self.name}_count", self.labels, values, total


class Metrics:
    """What a server counts. As a sink of its engine it counts calls; its transport counts the rest."""

    def __init__(self) -> None:
        self.calls = Counter("handrail_calls_total", "Calls that ended, and how.", "tool", "outcome")
        self.call_seconds = Histogram("handrail_call_seconds", "How long calls took.", "tool")
        self.caller_calls = Counter(
            "handrail_caller_calls_total", "Calls by who made them, and how.", "caller", "outcome"
        )
        self.caller_seconds = Histogram("handrail_caller_seconds", "How long calls took, by who made them.", "caller")
        self.stages = Histogram("handrail_stage_seconds", "How long each stage of a call took.", "tool", "stage")
        self.upstream_calls = Counter("handrail_upstream_calls_total", "Calls of upstreams.", "upstream", "outcome")
        self.upstream_seconds = Histogram("handrail_upstream_seconds", "How long upstreams took.", "upstream")
        self.lossy = Counter("handrail_lossy_total", "What revisions could not carry, by case.", "upstream", "case")
        self.trials = Counter("handrail_rule_trials_total", "Calls that a rule on trial would have decided.", "rule")
        self.in_flight = Gauge("handrail_calls_in_flight", "Calls that run.")
        self.requests = Counter("handrail_http_requests_total", "HTTP requests answered.", "method", "status")
        self.streams = Gauge("handrail_http_open_streams", "Event streams that are open.")
        self.tools = Gauge("handrail_tools", "Tools that are listed.")
        self.engines_down = Gauge("handrail_engines_down", "1 if what the server needs cannot be reached.", "engine")
        self.started = Gauge("process_start_time_seconds", "When the process began, since 1970.")
        self.cpu = Counter("process_cpu_seconds_total", "Time on the processor.")
        self.memory = Gauge("process_resident_memory_bytes", "Memory in use.")
        self.in_flight.set(0)
        self.streams.set(0)

    @classmethod
    def of(cls, engine: Engine) -> Metrics:
        """Return the metrics of a server, which counts its calls from now on."""
        metrics = next((each for each in engine.sinks if isinstance(each, Metrics)), None)
        if metrics is None:
            engine.add_sink(metrics := cls())
            engine.on_loss.append(metrics.add_loss)
        return metrics

    def add_loss(self, upstream: str, case: str, count: int) -> None:
        """Count what was lost outside of calls: in definitions, lists and notices."""
        self.lossy.add(upstream, case, by=count)

    def on_start(self, call: CallState) -> None:
        self.in_flight.add()

    def on_end(self, call: CallState, end: CallEnd, answer: bytes | None) -> None:
        tool, caller, marks = call.entry.limit_name, call.principal.id, call.marks
        assert marks is not None
        self.in_flight.add(by=-1)
        seconds = (end.ended_ns - marks[0]) / 1e9
        self.call_seconds.observe(seconds, tool)
        self.caller_seconds.observe(seconds, caller)
        self.stages.observe((end.ended_ns - marks[-1]) / 1e9, tool, "end")
        self.calls.add(tool, end.outcome)
        self.caller_calls.add(caller, end.outcome)
        stages = call.stages
        for stage, seconds in stages.items():
            self.stages.observe(seconds, tool, stage)
        for rule in call.would_decide:
            self.trials.add(rule.rpartition(": ")[0])
        if upstream := call.entry.upstream:
            self.upstream_calls.add(upstream, end.outcome)
            self.upstream_seconds.observe(stages.get("run", 0.0), upstream)
            for case in call.lossy:
                self.lossy.add(upstream, case)

    def on_refusal(self, refusal: RefusedCall) -> None:
        kind = refusal.refused.kind
        # A name that is no tool's is not a label: a peer could invent any number of names.
        tool = "" if refusal.entry is None or kind in _UNKNOWN else refusal.entry.limit_name
        self.calls.add(tool, kind.value)
        self.caller_calls.add(refusal.origin.principal.id, kind.value)

    def snapshot(self, worker: str = "") -> Snapshot:
        """Everything as it is now; with `worker`, as that worker's."""
        extra = (("worker",), (worker,)) if worker else ((), ())
        return {
            f"# HELP {each.name} {each.text}\n# TYPE {each.name} {each.kind}": [
                _line(name, labels + extra[0], values + extra[1], number)
                for name, labels, values, number in each.samples()
            ]
            for each in vars(self).values()
        }


def render(snapshots: Iterable[Snapshot]) -> bytes:
    """Snapshots of several workers as one page: all lines of a family have to stand together."""
    pages: Snapshot = {}
    for snapshot in snapshots:
        for head, lines in snapshot.items():
            pages.setdefault(head, []).extend(lines)
    return "".join(f"{head}\n" + "".join(lines) for head, lines in pages.items() if lines).encode("utf-8", "replace")


def _line(name: str, labels: Labels, values: Labels, number: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True))
    return f"{name}{{{pairs}}} {number!r}\n" if pairs else f"{name} {number!r}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
