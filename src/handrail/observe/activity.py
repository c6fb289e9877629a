"""The calls of one process, as the console shows them: those that run, the last that ended, and exact numbers.

The feed does not know who reads it. It masks and sends nothing while a call runs; the console masks what it shows.
Memory is bounded: a number of calls, and a number of bytes of their messages.

The connected clients: those with a stream or a request open, and those that sent a request in the last minute.

A client that initialized is its connection. A client of a stateless revision is its name, version, principal and
address.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import groupby
from time import perf_counter_ns
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

from msgspec import UNSET, Struct, field

from handrail.engine.call_state import STAGES, CallState
from handrail.engine.core import Engine
from handrail.engine.outcome import CallEnd, RefusedCall, RequestOrigin
from handrail.errors import Refused
from handrail.guards.policy import Decision
from handrail.guards.sanitize import Finding
from handrail.jsonrpc import Id, Request, encode
from handrail.model import Audio, Block, EmbeddedResource, Image, Json, Object, Principal, Text, ToolResult
from handrail.protocol.connection import Connection
from handrail.protocol.http_rules import NAME_PARAMS, Headers
from handrail.protocol.trace import Trace, read, read_headers
from handrail.revisions.base import CLIENT_INFO, VERSION
from handrail.schema.repair import RepairedArgument

log = logging.getLogger("handrail")

MAX_CLIENTS = MAX_PRINCIPALS = 1_000
ACTIVE_SECONDS = 60.0


class ConnectedClient(Struct, eq=False, kw_only=True):
    """One connected client."""

    id: str
    client: str
    version: str
    revision: str
    transport: str
    who: str
    address: str
    since: float
    last_active: float
    calls: int = 0
    connections: WeakSet[Connection] = field(default_factory=WeakSet)  # each may have a stream open


class ClientRegistry:
    """The clients of one process."""

    def __init__(self, stateless: Container[str]) -> None:
        self._stateless_revisions = stateless
        self._clients: dict[str, ConnectedClient] = {}
        self._by_connection: WeakKeyDictionary[Connection, ConnectedClient] = WeakKeyDictionary()
        self.principals: dict[str, Principal] = {}  # of the last requests
        self._by_name: dict[tuple[str, ...], ConnectedClient] = {}
        self.last_connection: Connection | None = None  # of the last call: the next one usually has the same
        self.last_client: ConnectedClient

    def client_of_request(self, origin: RequestOrigin, request: Request, now: float) -> ConnectedClient | None:
        """Return the client of a request that came at `now`; None before it has initialized."""
        self._remember_principal(origin.principal)
        connection = origin.connection
        meta: Json = request.params.get("_meta")
        revision_name = meta.get(VERSION) if type(meta) is dict else None
        if type(revision_name) is str and revision_name in self._stateless_revisions:
            client_info = meta.get(CLIENT_INFO)
            client_info = client_info if type(client_info) is dict else {}
            peer = self._stateless_client(
                origin, str(client_info.get("name", "")), str(client_info.get("version", "")), revision_name, now
            )
            if request.method == "subscriptions/listen":
                peer.connections.add(connection)
        else:
            is_opening = origin.trace_headers is not None and request.method == "initialize"
            if connection.revision is None or is_opening:  # over HTTP the session will have another connection
                return None
            client, revision = connection.client, connection.revision.name
            peer = self._stateful_client(origin, client.name, client.version, revision, now)
            if request.method == "initialize":  # once more, perhaps
                peer.client, peer.version, peer.revision = client.name[:100], client.version[:100], revision
        peer.last_active = max(peer.last_active, now)
        return peer

    def client_of_refusal(self, origin: RequestOrigin, request: Request, revision: str, now: float) -> ConnectedClient:
        """Return the client of a refused call. Before it has initialized, this is a new one that is not listed."""
        return self.client_of_request(origin, request, now) or _new_client(origin, "", "", revision, now)

    def client_of_call(self, call: CallState, now: float) -> ConnectedClient:
        """Whose call it is, that came at this time, if it is not `last_client`'s."""
        flight, client, revision = call.peer, call.client, call.revision
        self._remember_principal(call.principal)
        if revision.stateless:
            return self._stateless_client(flight, client.name, client.version, revision.name, now)
        self.last_connection = flight.connection
        self.last_client = self._stateful_client(flight, client.name, client.version, revision.name, now)
        return self.last_client

    def _remember_principal(self, principal: Principal) -> None:
        if principal.id in self.principals or len(self.principals) < MAX_PRINCIPALS:
            self.principals[principal.id] = principal  # with the scopes it has by now

    def connected(
        self, streams: set[Connection], busy: Counter[ConnectedClient], now: float
    ) -> list[tuple[ConnectedClient, int, bool]]:
        """Return each client, the number of its calls, and whether it has a stream or one of the `busy` calls open."""
        rows = [
            (peer, peer.calls + busy[peer], peer in busy or not streams.isdisjoint(peer.connections))
            for peer in self._clients.values()
        ]
        for peer, _, is_open in rows:
            if not is_open and peer.last_active < now - ACTIVE_SECONDS:
                del self._clients[peer.id]
                self.last_connection = None
        return [each for each in rows if each[0].id in self._clients]

    def _stateful_client(
        self, origin: RequestOrigin, name: str, version: str, revision: str, now: float
    ) -> ConnectedClient:
        connection = origin.connection
        peer = self._by_connection.get(connection)
        if peer is None or peer.id not in self._clients:
            peer = self._by_connection[connection] = self._add(origin, name, version, revision, now)
            peer.connections.add(connection)
        return peer

    def _stateless_client(
        self, origin: RequestOrigin, name: str, version: str, revision: str, now: float
    ) -> ConnectedClient:
        key = (revision, name[:100], version[:100], origin.principal.id, origin.address)
        peer = self._by_name.get(key)
        if peer is None or peer.id not in self._clients:
            if len(self._by_name) >= MAX_CLIENTS:
                self._by_name = {}
            peer = self._by_name[key] = self._add(origin, name, version, revision, now)
            if origin.trace_headers is None:
                peer.connections.add(origin.connection)
        return peer

    def _add(self, origin: RequestOrigin, name: str, version: str, revision: str, now: float) -> ConnectedClient:
        if len(self._clients) >= MAX_CLIENTS:
            self.last_connection = None
            del self._clients[min(self._clients.values(), key=lambda each: each.last_active).id]
        peer = _new_client(origin, name, version, revision, now)
        self._clients[peer.id] = peer
        return peer


def _new_client(origin: RequestOrigin, name: str, version: str, revision: str, now: float) -> ConnectedClient:
    place = origin.address
    return ConnectedClient(
        id=secrets.token_hex(8),
        client=name[:100],
        version=version[:100],
        revision=revision,
        transport="http" if origin.trace_headers is not None else "stdio" if place == "stdio" else "memory",
        who=origin.principal.id,
        address=place,
        since=now,
        last_active=now,
    )


RING_CALLS, RING_BYTES = 500, 16 * 1024 * 1024
MAX_LINES = 100  # of one call: messages, progress, log
FLUSH_BYTES = 64 * 1024  # a call with more bytes than this is counted at once
BATCH = 64  # calls are counted together

MINUTES = SECONDS = 60
RECENT_MINUTES = 5  # minutes that keep their refusals by caller and their calls by tool
BUCKETS = 250  # four to each doubling, from a nanosecond to a century

ERRORS = frozenset({"tool_error", "timeout", "internal"})
NOT_FAILURES = frozenset({"ok", "cancelled", "input_required"})  # neither failed nor refused
RAN = ERRORS | NOT_FAILURES  # all other outcomes are refusals

WireMessage = tuple[float, str, bytes]  # when, "in" or "out", what
ProgressEntry = tuple[float, float, float | None, str | None]  # when, done, total, message
LogEntry = tuple[float, str, bytes]  # when, level, what, as JSON


class CallSnapshot(Struct, eq=False, gc=False):  # part of no reference cycle once the call has ended
    """One call as it is when the feed is read, or as it was when it ended."""

    prefix: str
    number: int
    peer: ConnectedClient
    tool: str
    address: str
    trace_headers: Headers | None  # HTTP only
    raw_request: bytes | bytearray  # as it came
    answer: bytes | None
    started_at: float
    started_ns: int  # the same by the performance counter, in nanoseconds
    ended_ns: int
    outcome: str
    result: ToolResult | None
    refusal: tuple[str, str] | None  # its kind, and its text
    meta: Any = UNSET
    marks: Sequence[int] = ()  # empty: the call never began
    arguments: Object | None = None  # the call ran with, if they are not those of the request
    repairs: tuple[RepairedArgument, ...] = ()
    findings: tuple[Finding, ...] = ()
    decision: Decision | None = None
    agreed: str = ""
    call: CallState | None = None  # while it runs
    progress: tuple[ProgressEntry, ...] = ()
    logs: tuple[LogEntry, ...] = ()
    lines: tuple[WireMessage, ...] = ()  # between request and answer
    memory_bytes: int = 0  # 0 until it is counted
    request_id: Id = ""  # the request may be one of a batch
    is_tool: bool = True  # False: there is no tool of this name
    upstream: str = ""  # the name of the upstream server that its entry comes from
    upstream_revision: str = ""
    lossy: tuple[str, ...] = ()  # what could not be carried between the two revisions
    would_decide: tuple[str, ...] = ()  # rules on trial that match, each with its verdict

    @property
    def id(self) -> str:
        return f"{self.prefix}{self.number:08x}"

    @property
    def who(self) -> str:
        return self.peer.who

    @property
    def client(self) -> str:
        return self.peer.client

    @property
    def revision(self) -> str:
        return self.peer.revision

    @property
    def seconds(self) -> float:
        """Return the duration; 0 while the call runs."""
        return (self.ended_ns - self.started_ns) / 1e9 if self.ended_ns else 0.0

    @property
    def ended_at(self) -> float:
        return self.started_at + self.seconds

    @property
    def stage(self) -> str:
        """Return the stage that the call is in, or ended in."""
        if not self.marks:
            return ""
        complete = len(self.marks) - 1
        return STAGES[max(0, min(complete - 1 if self.ended_ns else complete, len(STAGES) - 1))]

    @property
    def state(self) -> str:
        call = self.call
        return "done" if call is None else "cancelling" if call.cancelled else "asking" if call.waiting else "running"

    @property
    def trace(self) -> Trace | None:
        """Return the trace of the client: that of `_meta`, else that of the headers."""
        meta = self.meta
        named = None if meta is UNSET else read(meta.traceparent, meta.tracestate, meta.baggage)
        return named or read_headers(self.trace_headers)


def memory_size(snapshot: CallSnapshot) -> int:
    """Return the approximate memory of a call: the bytes of its messages, sent or not."""
    if type(snapshot.raw_request) is bytearray:
        snapshot.raw_request = bytes(snapshot.raw_request)
    answer, result = snapshot.answer or b"", snapshot.result
    size = len(snapshot.raw_request) + len(answer) + 1
    if snapshot.lines or snapshot.logs or snapshot.progress:
        size += sum(len(line) for _, _, line in snapshot.lines) + sum(len(data) for _, _, data in snapshot.logs)
        size += sum(len(each[3] or "") for each in snapshot.progress)
    if result is not None:  # both the result and the answer are in memory
        content = result.content
        if len(content) == 1 and type(content[0]) is Text:
            size += max(len(answer), len(content[0].text))
        else:
            size += max(len(answer), sum(map(_size, content)))
    return size


def _size(block: Block) -> int:
    """Return the approximate size of a block without encoding it."""
    match block:
        case Text():
            return len(block.text)
        case Image() | Audio():
            return len(block.data)
        case EmbeddedResource(resource=inner):
            return len(inner.get("text") or inner.get("blob") or "")
    return 0


# Counts per minute. Times are those of calls that ran: a refusal takes no time, and would make all calls look fast.


class Tally(Struct):
    """Counts of the calls of one tool, or of one second."""

    calls: int = 0
    errors: int = 0
    refused: int = 0
    last: float = 0.0  # time of the latest call, or the second
    times: dict[int, int] = field(default_factory=dict)  # calls that ran, by bucket of their time

    def add(self, other: Tally) -> None:
        self.calls += other.calls
        self.errors += other.errors
        self.refused += other.refused
        self.last = max(self.last, other.last)
        for bucket, count in other.times.items():
            self.times[bucket] = self.times.get(bucket, 0) + count

    @property
    def p95(self) -> float:
        return p95([self.times.get(bucket, 0) for bucket in range(max(self.times, default=0) + 1)])


class TrialTally(Struct):
    """Counts of the calls that one rule on trial (`mode = "audit"`) matches."""

    calls: int = 0
    differs: int = 0  # that were decided in another way
    last: float = 0.0

    def add(self, other: TrialTally) -> None:
        self.calls += other.calls
        self.differs += other.differs
        self.last = max(self.last, other.last)


class Minute:
    """Counts of the calls that ended in one minute."""

    __slots__ = ("calls", "errors", "refusals_by_caller", "refused", "start", "times", "tools", "unrecorded")

    def __init__(self, at: float) -> None:
        self.start = at
        self.calls = self.errors = self.refused = self.unrecorded = 0
        self.times = [0] * BUCKETS
        self.refusals_by_caller: Counter[tuple[str, str]] = Counter()  # refusals, by caller and outcome
        self.tools: dict[str, Tally] = {}


class MinuteStats:
    """Counts of the current minute, and of those before, oldest first."""

    def __init__(self, now: float) -> None:
        self.current = Minute(now // 60 * 60)
        self.past: deque[Minute] = deque(maxlen=MINUTES)
        self._seconds: deque[Tally] = deque(maxlen=SECONDS)

    def count(self, now: float, times: Iterable[int], errors: int = 0, unrecorded: int = 0, refused: int = 0) -> None:
        """Count calls that ended in the same second. `times`: nanoseconds of each call that ran."""
        self.add(now, Counter([bucket_of(duration_ns) for duration_ns in times]), errors, unrecorded, refused)

    def add(self, now: float, times: Counter[int], errors: int, unrecorded: int, refused: int) -> None:
        """Count calls that ended in the same second. `times`: calls that ran, by bucket of their time."""
        minute, second = self.roll(now), self._second(now // 1)
        for bucket, count in times.items():
            minute.times[bucket] += count
            second.times[bucket] = second.times.get(bucket, 0) + count
            minute.calls += count
            second.calls += count
        for each in (minute, second):
            each.calls += refused
            each.errors += errors
            each.refused += refused
        minute.unrecorded += unrecorded

    def _second(self, at: float) -> Tally:
        seconds = self._seconds
        while seconds and seconds[-1].last > at + 1:  # a clock was set back; a call that is only late stays
            seconds.pop()
        if not seconds or seconds[-1].last < at:
            seconds.append(Tally(last=at))
        return seconds[-1]

    def last(self, now: float) -> Tally:
        """Return the counts of the last sixty seconds."""
        total = Tally()
        for each in self._seconds:
            if now - SECONDS < each.last <= now:
                total.add(each)
        return total

    def roll(self, now: float) -> Minute:
        """Return the current minute, after closing those that have passed without a call.

        A call that comes a little late, after its minute, counts in the current one. If a clock was set back, the
        minutes that are now in the future are dropped.
        """
        last, at = self.current, now // 60 * 60
        if last.start - 60 <= at <= last.start:
            return last
        if at < last.start:
            self.past = deque((each for each in self.past if each.start < at), maxlen=MINUTES)
        for minutes_ago in range(MINUTES if last.start < at else 0, 0, -1):
            passed = at - 60 * minutes_ago
            if passed >= last.start:
                self.past.append(last if passed == last.start else Minute(passed))
        for each in self.past:
            if each.start <= at - 60 * RECENT_MINUTES:
                each.refusals_by_caller, each.tools = Counter(), {}
        self.current = Minute(at)
        return self.current


def bucket_of(duration_ns: int) -> int:
    """Return the bucket of a time in nanoseconds."""
    return (duration_ns**4).bit_length()


def p95(times: list[int]) -> float:
    """Return the time below which 95 of 100 calls stayed, in seconds, to about a tenth."""
    left = sum(times) * 0.95
    for number, count in enumerate(times):
        left -= count
        if count and left <= 0:
            return float(2.0 ** ((number - 0.5) / 4) / 1e9)
    return 0.0


class RunningCall:
    """A call from its start to its answer, as the call itself carries it."""

    __slots__ = ("answer", "feed", "lines", "logs", "number", "progress", "raw_request", "snapshot", "started_at")

    def __init__(self, feed: ActivityFeed, number: int, raw_request: bytes | bytearray, started_at: float) -> None:
        self.feed = feed
        self.number = number
        self.raw_request = raw_request
        self.started_at = started_at
        self.snapshot: CallSnapshot | None = None  # once the call has ended
        self.answer: bytes | None = None
        self.progress: tuple[ProgressEntry, ...] = ()
        self.logs: tuple[LogEntry, ...] = ()
        self.lines: tuple[WireMessage, ...] = ()

    def record_message(self, direction: Literal["in", "out"], message: bytes) -> None:
        if self.snapshot is None and len(self.lines) < MAX_LINES and len(message) <= FLUSH_BYTES:
            self.lines += ((self.feed.clock(), direction, message),)
        self.feed.notify()

    def record_progress(self, done: float, total: float | None, message: str | None) -> None:
        """Record progress as far as it can be shown, also for a client that did not ask for it."""
        text = None if message is None else str(message)[:FLUSH_BYTES].encode(errors="replace").decode()
        if self.snapshot is None:
            entry = (self.feed.clock(), float(done), None if total is None else float(total), text)
            self.progress = (*self.progress[-MAX_LINES + 1 :], entry)
        self.feed.notify()

    def record_log(self, level: str, data: Json) -> None:
        try:
            encoded = encode(data)
        except Exception as problem:  # of the tool's own value
            encoded = encode(f"not JSON: {type(problem).__name__}")
        if len(encoded) > FLUSH_BYTES:
            encoded = encode(f"{len(encoded):,} bytes, too much to be kept")
        if self.snapshot is None:
            self.logs = (*self.logs[-MAX_LINES + 1 :], (self.feed.clock(), level, encoded))

    def record_answer(self, answer: bytes | None) -> None:
        """Record an answer that comes later than the call returns, before its end or after."""
        if answer is self.answer:
            return
        self.answer = answer
        if self.snapshot is not None:
            self.feed.record_late_answer(self.snapshot, answer)


class ActivityFeed:
    """The calls of one process, as a sink of its engine.

    A call that ends is noted in a list. Everything that follows from it is computed for many calls together, or when
    the feed is read.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.unread: list[CallSnapshot] = []  # that have ended since the reader last took them
        self.on_change: Callable[[], None] | None = None  # is called at each change, if there is a reader
        self.open()
        self._count = 0
        self._running: dict[CallState, RunningCall] = {}
        self._ended: list[CallSnapshot] = []  # and not counted
        self._totals = [0, 0, 0]
        self._tools: dict[str, Tally] = {}
        self._trials: dict[str, TrialTally] = {}
        self._peers = ClientRegistry(engine.offer.stateless)
        self._minutes = MinuteStats(self.clock())
        self._ring: list[CallSnapshot] = []
        self._bytes = 0

    @classmethod
    def of(cls, engine: Engine) -> ActivityFeed:
        """Return the feed of a server, which follows its calls from now on."""
        feed = next((each for each in engine.sinks if isinstance(each, ActivityFeed)), None)
        if feed is None:
            feed = cls(engine)
            engine.add_sink(feed)
            engine.on_request = feed.on_request
        return feed

    def open(self) -> None:
        """Begin a series of ids that no other process has: each worker calls this."""
        self._prefix = secrets.token_hex(6)

    def clock(self) -> float:
        return self._engine.clock()

    # As a sink

    def on_start(self, call: CallState) -> None:
        self._count = number = self._count + 1
        running = RunningCall(self, number, call.peer.raw_message, self._engine.clock())
        self._running[call] = call.activity = running
        if call.trail is not None:
            call.serial = f"{self._prefix}{number:08x}"
        self.notify()

    def on_end(self, call: CallState, end: CallEnd, answer: bytes | None) -> None:
        running = self._running.pop(call)
        if answer is not None:
            running.answer = answer
        running.snapshot = snapshot = self._snapshot(call, running, end)
        self._add_ended(snapshot)

    def on_refusal(self, refusal: RefusedCall) -> None:
        self._count = number = self._count + 1
        origin, request, refused = refusal.origin, refusal.request, refusal.refused
        now, entry = self.clock(), refusal.entry
        name = request.params.get(NAME_PARAMS[request.method]) if entry is None else entry.limit_name
        snapshot = CallSnapshot(
            self._prefix,
            number,
            self._peers.client_of_refusal(origin, request, refusal.revision.name, now),
            name[:200] if type(name) is str else "",
            origin.address,
            origin.trace_headers,
            origin.raw_message,
            refusal.answer,
            now,
            refusal.started_ns,
            perf_counter_ns(),
            refused.kind.value,
            None,
            (refused.kind.value, refused.prefix + refused.text),
            request_id=request.id,
            is_tool=entry is not None,
        )
        refusal.call_id = snapshot.id
        self._add_ended(snapshot)

    def on_request(self, origin: RequestOrigin, request: Request) -> None:
        """Note the client of a request that is no call."""
        try:
            self._peers.client_of_request(origin, request, self.clock())
        except Exception:
            log.exception("activity: the client of %s was not noted", request.method)

    def record_late_answer(self, snapshot: CallSnapshot, answer: bytes | None) -> None:
        snapshot.answer, size = answer, len(answer or b"")
        if snapshot.memory_bytes:
            snapshot.memory_bytes += size
            self._bytes += size
        if size > FLUSH_BYTES:
            self.flush()

    def notify(self) -> None:
        if self.on_change is not None:
            try:
                self.on_change()
            except Exception:
                log.exception("activity: the reader of the feed failed")

    def _add_ended(self, snapshot: CallSnapshot) -> None:
        self._ended.append(snapshot)
        if self.on_change is not None:
            self.unread.append(snapshot)
            self.notify()
        if len(self._ended) >= BATCH or len(snapshot.raw_request) + len(snapshot.answer or b"") > FLUSH_BYTES:
            self.flush()

    def _snapshot(self, call: CallState, running: RunningCall, end: CallEnd | None = None) -> CallSnapshot:
        """Return a call as it is now, or as it ended."""
        flight, marks, peers = call.peer, call.marks, self._peers
        assert marks is not None
        outcome, result, refusal, ended_ns = "", None, None, 0
        if end is not None:
            outcome, ended_ns = end.outcome, end.ended_ns
            if len(marks) <= len(STAGES):  # it did not get further
                marks = [*marks, ended_ns]
            if isinstance(end.result, ToolResult):
                result = end.result
            elif isinstance(end.result, Refused):  # its traceback would keep the whole call in memory
                refusal = (end.result.kind.value, end.result.prefix + end.result.text)
        # A client that initialized has a connection of its own; most calls come from the same one as the last.
        is_last = flight.connection is peers.last_connection and not call.revision.stateless
        return CallSnapshot(
            self._prefix,
            running.number,
            peers.last_client if is_last else peers.client_of_call(call, running.started_at),
            call.entry.limit_name,
            flight.address,
            flight.trace_headers,
            running.raw_request,
            running.answer,
            running.started_at,
            marks[0],
            ended_ns,
            outcome,
            result,
            refusal,
            call.meta,
            marks,
            None if call.sent is None else call.arguments,
            call.repairs,
            call.findings,
            call.decision,
            call.agreed,
            None if ended_ns else call,
            running.progress,
            running.logs,
            running.lines,
            request_id=call.id,
            upstream=call.entry.upstream,
            upstream_revision=call.upstream_revision,
            lossy=call.lossy,
            would_decide=call.would_decide,
        )

    # What follows from it

    def flush(self) -> None:
        """Count the calls that have ended, and put them into the ring. Each reader of the feed calls this first."""
        ended, self._ended = self._ended, []
        if not ended:
            return
        if ended[0].ended_at // 1 == ended[-1].ended_at // 1:
            self._count_ended(ended)
        else:
            for _, same_second in groupby(ended, lambda snapshot: snapshot.ended_at // 1):
                self._count_ended(list(same_second))
        for snapshot in ended:
            snapshot.memory_bytes = memory_size(snapshot)
        ring = self._ring
        ring += ended
        gone = max(0, len(ring) - RING_CALLS)
        self._bytes += sum([snapshot.memory_bytes for snapshot in ended]) - sum(
            [snapshot.memory_bytes for snapshot in ring[:gone]]
        )
        while self._bytes > RING_BYTES and len(ring) - gone > 1:
            self._bytes -= ring[gone].memory_bytes
            gone += 1
        for snapshot in ring[:gone]:
            snapshot.memory_bytes = 0  # a later answer does not count
        del ring[:gone]

    def _count_ended(self, ended: list[CallSnapshot]) -> None:
        """Count calls that ended in the same second."""
        kinds = [(snapshot.peer, snapshot.tool, snapshot.outcome, snapshot.is_tool) for snapshot in ended]
        counts, last = Counter(kinds), dict(zip(kinds, ended, strict=True))
        ran = Counter(
            [
                (snapshot.tool, bucket_of(snapshot.ended_ns - snapshot.started_ns))
                for snapshot in ended
                if snapshot.outcome in RAN
            ]
        )
        minute = self._minutes.roll(ended[-1].ended_at)
        errors, refused, unrecorded = 0, 0, 0
        for kind, count in counts.items():
            peer, tool, outcome, is_tool = kind
            snapshot = last[kind]
            peer.calls += count
            peer.last_active = max(peer.last_active, snapshot.started_at)
            tally = Tally(count, last=snapshot.ended_at)
            if outcome in ERRORS:
                errors += count
                tally.errors = count
            elif outcome not in NOT_FAILURES:
                refused += count
                unrecorded += count if outcome == "unrecorded" else 0
                minute.refusals_by_caller[peer.who, outcome] += count
                tally.refused = count
            if is_tool:  # a peer could invent any number of other names
                for tools in (self._tools, minute.tools):
                    tools.setdefault(tool, Tally()).add(tally)
        for snapshot in [each for each in ended if each.would_decide]:
            verdict = "" if snapshot.decision is None else snapshot.decision.verdict
            for rule in snapshot.would_decide:
                differs = not rule.endswith(f": {verdict}")
                self._trials.setdefault(rule, TrialTally()).add(TrialTally(1, differs, snapshot.ended_at))
        times: Counter[int] = Counter()
        for (tool, bucket), count in ran.items():
            times[bucket] += count
            for tools in (self._tools, minute.tools):
                if tool in tools:
                    tools[tool].times[bucket] = tools[tool].times.get(bucket, 0) + count
        for place, count in enumerate((len(ended), errors, refused)):
            self._totals[place] += count
        self._minutes.add(ended[-1].ended_at, times, errors, unrecorded, refused)

    # For readers

    @property
    def totals(self) -> tuple[int, int, int]:
        """Return the number of calls that ended, of those that failed, and of those that were refused."""
        self.flush()
        calls, errors, refused = self._totals
        return calls, errors, refused

    @property
    def running(self) -> dict[str, CallSnapshot]:
        """Return the calls that run, by id, oldest first."""
        snapshots = [self._snapshot(call, running) for call, running in self._running.items()]
        return {each.id: each for each in snapshots}

    @property
    def recent(self) -> list[CallSnapshot]:
        """Return the last calls that ended, oldest first."""
        self.flush()
        return list(self._ring)

    def find(self, call_id: str) -> CallSnapshot | None:
        return self.running.get(call_id) or next((snapshot for snapshot in self.recent if snapshot.id == call_id), None)

    @property
    def minutes(self) -> MinuteStats:
        self.flush()
        self._minutes.roll(self.clock())
        return self._minutes

    @property
    def trials(self) -> dict[str, TrialTally]:
        """Return the counts of the rules on trial since the start, by rule and verdict."""
        self.flush()
        return self._trials

    @property
    def tools(self) -> dict[str, Tally]:
        self.flush()
        return self._tools

    @property
    def principals(self) -> dict[str, Principal]:
        return self._peers.principals

    def connected(self) -> list[tuple[ConnectedClient, int, bool]]:
        """Return each client, the number of its calls, and whether it has a call or a stream of notifications open."""
        self.flush()
        open_streams = list(self._engine.open_streams)
        streams = {each.connection for each in open_streams if not each.reply_channel.disconnected}
        return self._peers.connected(
            streams, Counter([snapshot.peer for snapshot in self.running.values()]), self.clock()
        )
