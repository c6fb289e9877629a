"""What a server's calls look like to somebody who watches: those that run, the last that ended, and exact numbers.

Nothing here knows who watches, and nothing is masked or sent while a call goes on. What is kept has an end: so many
calls, and so many bytes of what went over the wire.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from handrail.engine.call import STAGES, Call
from handrail.engine.outcome import outcome_of
from handrail.errors import Refused
from handrail.jsonrpc import Request, encode
from handrail.model import Json, Principal, ToolResult
from handrail.observe.clients import ClientRegistry, ConnectedClient
from handrail.observe.per_minute import MinuteStats, Tally, bucket_of
from handrail.observe.snapshot import CallSnapshot, LogEntry, ProgressEntry, WireMessage, memory_size
from handrail.protocol.connection import Connection
from handrail.revisions import Revision

if TYPE_CHECKING:
    from handrail.engine.dispatcher import Dispatcher

__all__ = ["ActivityFeed"]

log = logging.getLogger("handrail")

RING_CALLS, RING_BYTES = 500, 16 * 1024 * 1024
MAX_LINES = 100  # of one call: notices, progress, log
FLUSH_BYTES = 64 * 1024  # bytes that are not left lying about
BATCH = 64  # calls are counted

ERRORS = frozenset({"tool_error", "timeout", "internal"})
NOT_FAILURES = frozenset({"ok", "cancelled", "input_required"})  # failed nor refused
RAN = ERRORS | NOT_FAILURES  # the others were refused


class RunningCall(Struct, eq=False):
    """What is known of a call that takes longer, beside itself."""

    feed: ActivityFeed
    reply: Callable[[bytes | None], None]
    number: int = 0
    raw_request: bytes | bytearray = b""
    started_at: float = 0.0
    snapshot: CallSnapshot | None = None  # once it has ended
    answer: bytes | None = None
    progress: tuple[ProgressEntry, ...] = ()
    logs: tuple[LogEntry, ...] = ()
    lines: tuple[WireMessage, ...] = ()

    def answer_with(self, answer: bytes | None) -> None:
        """Stands where the answer goes: lets it go there, and notes it."""
        self.answer = answer
        self.reply(answer)
        if self.snapshot is not None:
            self.feed.record_answer(self.snapshot, answer)


class ActivityFeed:
    """The calls of one process, as they come and go.

    Most calls have ended when their request has been handled. Of such a call nothing is noted before its end, and then
    all at once; what follows from it is worked out for many together, or when somebody looks. Of one that takes longer
    there is a `RunningCall`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.unread: list[CallSnapshot] = []  # that have ended since somebody last took them
        self.on_change: Callable[[], None] | None = None  # is told of each change, if somebody watches
        self.open()
        self._running: dict[Call, RunningCall] = {}
        self._ended: list[CallSnapshot] = []  # and not counted
        self._totals = [0, 0, 0]
        self._tools: dict[str, Tally] = {}
        self._peers = ClientRegistry()
        self._minutes = MinuteStats(clock())
        self._ring: list[CallSnapshot] = []
        self._bytes = 0
        # The request that is being handled, when it came, and what has become of it
        self.started_ns = self._count = self._number = 0
        self._request: Request | None = None
        self._refused: tuple[str, Refused] | None = None
        self.call: Call | None = None
        self._result_or_error: ToolResult | BaseException | None = None
        self._ended_ns = 0  # when it ended

    # A call, from its request to its end

    def track(self, dispatcher: Dispatcher, request: Request, reply: Callable[[bytes | None], None]) -> Any:
        """Let a conversation respond, and look on."""
        if request.method != "tools/call":
            answer = dispatcher.respond(request, reply)
            try:
                self._peers.client_of_request(dispatcher, request, self.clock())
            except Exception:
                log.exception("what came of %s could not be shown", request.method)
            return answer
        if self._request is not None:
            return self._track_nested(dispatcher, request, reply)
        raw_request, started_at, self._request = dispatcher.raw_message, dispatcher.engine.clock(), request
        self._count = self._number = number = self._count + 1
        self.started_ns = perf_counter_ns()
        try:
            answer = dispatcher.respond(request, reply)
        finally:
            call, result_or_error, refused = self.call, self._result_or_error, self._refused
            self.call = self._result_or_error = self._request = self._refused = None
        try:
            if result_or_error is not None and call is not None:
                snapshot = self._snapshot(
                    call, number, raw_request, started_at, self._ended_ns, result_or_error, answer or None
                )
                if not answer or call in self._running:
                    self._finish_running(self._running_call(call), call, snapshot)
                self._add_ended(snapshot, len(answer or b""))
            elif refused is not None:
                self._add_ended(
                    self._refusal_snapshot(dispatcher, request, started_at, *refused, answer), len(answer or b"")
                )
            elif call is not None:
                running_call = self._running_call(call)
                running_call.number, running_call.raw_request, running_call.started_at = number, raw_request, started_at
                self.notify()
        except Exception:
            log.exception("what came of %s could not be shown", request.method)
        return answer

    def _track_nested(self, dispatcher: Dispatcher, request: Request, reply: Callable[[bytes | None], None]) -> Any:
        """A call that is made while another is being handled: by its tool, of an application in the same process."""
        outer = (
            self._request,
            self._refused,
            self._number,
            self.started_ns,
            self.call,
            self._result_or_error,
            self._ended_ns,
        )
        self._request = self._refused = self.call = self._result_or_error = None
        try:
            return self.track(dispatcher, request, reply)
        finally:
            (
                self._request,
                self._refused,
                self._number,
                self.started_ns,
                self.call,
                self._result_or_error,
                self._ended_ns,
            ) = outer

    def record_end(self, call: Call, result_or_error: ToolResult | BaseException) -> None:
        """A call has ended. It need not have been answered, or has been before."""
        if call is self.call:
            self._ended_ns, self._result_or_error = perf_counter_ns(), result_or_error
        elif (running_call := self._running.get(call)) is not None:
            snapshot = self._snapshot(
                call,
                running_call.number,
                running_call.raw_request,
                running_call.started_at,
                perf_counter_ns(),
                result_or_error,
                running_call.answer,
            )
            self._finish_running(running_call, call, snapshot)
            self._add_ended(snapshot, len(running_call.answer or b""))

    def record_refusal(self, dispatcher: Dispatcher, request: Request, revision: Revision, refused: Refused) -> str:
        """A call that never became one; its id."""
        if self._request is request:
            self._refused = (revision.name, refused)
        else:  # it did not even come as far as `track`
            self._count = self._number = self._count + 1
            self.started_ns = perf_counter_ns()
            self._add_ended(self._refusal_snapshot(dispatcher, request, self.clock(), revision.name, refused, None), 0)
        return self.serial

    def _refusal_snapshot(
        self,
        dispatcher: Dispatcher,
        request: Request,
        started_at: float,
        revision: str,
        refused: Refused,
        answer: bytes | None,
    ) -> CallSnapshot:
        name = request.params.get("name")
        return CallSnapshot(
            self._prefix,
            self._number,
            self._peers.client_of_refusal(dispatcher, request, revision, started_at),
            name[:200] if type(name) is str else "",
            dispatcher.address,
            dispatcher.trace_headers,
            dispatcher.raw_message,
            answer,
            started_at,
            self.started_ns,
            perf_counter_ns(),
            refused.kind.value,
            None,
            (refused.kind.value, refused.prefix + refused.text),
            request_id=request.id,
            is_tool=type(name) is str and dispatcher.engine.catalog.get(name) is not None,
        )

    def _running_call(self, call: Call) -> RunningCall:
        """What is known of the call that is being handled: it will be answered later, or says something before."""
        running_call = self._running.get(call)
        if running_call is None:
            running_call = self._running[call] = RunningCall(self, call.reply)
            call.reply = running_call.answer_with
        return running_call

    def _finish_running(self, running_call: RunningCall, call: Call, snapshot: CallSnapshot) -> None:
        running_call.snapshot, snapshot.progress, snapshot.logs, snapshot.lines = (
            snapshot,
            running_call.progress,
            running_call.logs,
            running_call.lines,
        )
        del self._running[call]

    def _add_ended(self, snapshot: CallSnapshot, answer_bytes: int) -> None:
        self._ended.append(snapshot)
        if self.on_change is not None:
            self.unread.append(snapshot)
            self.notify()
        if len(self._ended) >= BATCH or len(snapshot.raw_request) + answer_bytes > FLUSH_BYTES:
            self.flush()

    def open(self) -> None:
        """In the process whose calls it sees: their names are no other's."""
        self._prefix = secrets.token_hex(6)

    def record_answer(self, snapshot: CallSnapshot, answer: bytes | None) -> None:
        """One that had ended before."""
        snapshot.answer, size = answer, len(answer or b"")
        if snapshot.memory_bytes:
            snapshot.memory_bytes += size
            self._bytes += size
        if size > FLUSH_BYTES:
            self.flush()

    # What it says on the way

    def _find_running(self, call: Call) -> RunningCall | None:
        return (
            self._running_call(call) if call is self.call and self._result_or_error is None else self._running.get(call)
        )

    def record_message(self, call: Call, way: str, message: bytes) -> None:
        running_call = self._find_running(call)
        if running_call is not None and len(running_call.lines) < MAX_LINES and len(message) <= FLUSH_BYTES:
            running_call.lines += ((self.clock(), way, message),)
        self.notify()

    def record_progress(self, call: Call, done: float, total: float | None, message: str | None) -> None:
        """Also what could not be sent, as far as it can be shown: nobody may have asked to be told."""
        text = None if message is None else str(message)[:FLUSH_BYTES].encode(errors="replace").decode()
        entry = (self.clock(), float(done), None if total is None else float(total), text)
        if (running_call := self._find_running(call)) is not None:
            running_call.progress = (*running_call.progress[-MAX_LINES + 1 :], entry)
        self.notify()

    def record_log(self, call: Call, level: str, data: Json) -> None:
        try:
            encoded = encode(data)
        except Exception as problem:  # of whatever was to be said
            encoded = encode(f"not JSON: {type(problem).__name__}")
        if len(encoded) > FLUSH_BYTES:
            encoded = encode(f"{len(encoded):,} bytes, too much to be kept")
        if (running_call := self._find_running(call)) is not None:
            running_call.logs = (*running_call.logs[-MAX_LINES + 1 :], (self.clock(), level, encoded))

    def notify(self) -> None:
        if self.on_change is not None:
            try:
                self.on_change()
            except Exception:
                log.exception("nobody could be told what is new")

    def _snapshot(
        self,
        call: Call,
        number: int,
        raw_request: bytes | bytearray,
        started_at: float,
        ended_ns: int = 0,
        result_or_error: ToolResult | BaseException | None = None,
        answer: bytes | None = None,
    ) -> CallSnapshot:
        """A call as it is now."""
        flight, marks, peers = call._flight, call.marks, self._peers
        assert marks is not None
        is_last = (
            flight.connection is peers.last_connection and not call.revision.stateless
        )  # where each call says whose it is
        outcome, result, refusal = "", None, None
        if result_or_error is not None:
            if len(marks) <= len(STAGES):  # it did not get further
                marks = [*marks, ended_ns]
            if isinstance(result_or_error, ToolResult):
                result = result_or_error
            elif isinstance(result_or_error, Refused):  # whose traceback would hold on to all that was going on
                refusal = (result_or_error.kind.value, result_or_error.prefix + result_or_error.text)
            outcome = outcome_of(call, result_or_error) if result is None or call.cancelled or result.is_error else "ok"
        return CallSnapshot(
            self._prefix,
            number,
            peers.last_client if is_last else peers.client_of_call(call, started_at),
            call.entry.tool.name,
            flight.address,
            flight.trace_headers,
            raw_request,
            answer,
            started_at,
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
            request_id=call.id,
        )

    # What follows from it

    def flush(self) -> None:
        """Count those that have ended, and keep the last. Who looks at anything here has this done first."""
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
            snapshot.memory_bytes = 0  # its answer, if that is still to come, weighs nothing here
        del ring[:gone]

    def _count_ended(self, ended: list[CallSnapshot]) -> None:
        """Some that have ended in the same second."""
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
            if is_tool:  # else anybody could make up any number of names
                for tools in (self._tools, minute.tools):
                    tools.setdefault(tool, Tally()).add(tally)
        times: Counter[int] = Counter()
        for (tool, bucket), count in ran.items():
            times[bucket] += count
            for tools in (self._tools, minute.tools):
                if tool in tools:
                    tools[tool].times[bucket] = tools[tool].times.get(bucket, 0) + count
        for place, count in enumerate((len(ended), errors, refused)):
            self._totals[place] += count
        self._minutes.add(ended[-1].ended_at, times, errors, unrecorded, refused)

    # For whoever looks

    @property
    def serial(self) -> str:
        """The name of the call that is being handled."""
        return f"{self._prefix}{self._number:08x}"

    @property
    def totals(self) -> tuple[int, int, int]:
        """Calls that have ended since the beginning; of those, which failed, and which were refused."""
        self.flush()
        calls, errors, refused = self._totals
        return calls, errors, refused

    @property
    def running(self) -> dict[str, CallSnapshot]:
        """By their ids, oldest first."""
        snapshots: dict[str, CallSnapshot] = {}
        for call, running_call in self._running.items():
            snapshot = self._snapshot(
                call, running_call.number, running_call.raw_request, running_call.started_at, answer=running_call.answer
            )
            snapshot.progress, snapshot.logs, snapshot.lines = (
                running_call.progress,
                running_call.logs,
                running_call.lines,
            )
            snapshots[snapshot.id] = snapshot
        return snapshots

    @property
    def recent(self) -> list[CallSnapshot]:
        """Oldest first."""
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
    def tools(self) -> dict[str, Tally]:
        self.flush()
        return self._tools

    @property
    def principals(self) -> dict[str, Principal]:
        return self._peers.principals

    def connected(self, streams: set[Connection]) -> list[tuple[ConnectedClient, int, bool]]:
        """Who is there now, how many calls they made, and whether one of those runs, or one of `streams` is theirs."""
        self.flush()
        return self._peers.connected(
            streams, Counter([snapshot.peer for snapshot in self.running.values()]), self.clock()
        )
