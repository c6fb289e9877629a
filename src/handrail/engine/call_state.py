"""The engine's state of one `tools/call`. A tool sees only `Call`, which reads and asks through this state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import Context
from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec import UNSET, Struct, UnsetType

from handrail.approvals.queue import Approval
from handrail.engine.catalog import ToolEntry
from handrail.engine.eager import Start
from handrail.engine.reply_channel import ReplyCallback, ReplyChannel
from handrail.guards.policy import Decision
from handrail.guards.sanitize import Finding
from handrail.jsonrpc import Id
from handrail.model import ClientInfo, InputRequest, Json, Object, Principal, ToolResult
from handrail.protocol.connection import Connection
from handrail.protocol.http_rules import Headers
from handrail.protocol.trace import Trace, read, read_headers
from handrail.revisions import Revision
from handrail.schema.repair import RepairedArgument

if TYPE_CHECKING:
    from handrail.audit.log import Trail
    from handrail.engine.outcome import CallSink

__all__ = ["STAGES", "CallActivity", "CallPeer", "CallState", "ResultOrError", "SlotHolder"]

STAGES = ("middleware", "limit", "validate", "approve", "intent", "run", "sanitize")
"""Stages of the pipeline, in its order."""

ResultOrError = ToolResult | BaseException


class CallPeer(Protocol):
    """The peer that sent a call."""

    connection: Connection
    reply_channel: ReplyChannel
    raw_message: bytes | bytearray  # the message that is handled now, as it came
    principal: Principal
    address: str  # an IP address, `unix`, `stdio` or `memory`
    is_identified: bool  # the transport has verified who the peer is
    trace_headers: Headers | None  # over HTTP, the headers that name a trace
    headers: Headers | None  # over HTTP
    reached_at: tuple[str, str] | None  # over HTTP, the scheme and the root path of the request
    path: str  # over HTTP, of the endpoint


class CallOwner(Protocol):
    """What a call needs of the engine, which owns it."""

    loop: asyncio.AbstractEventLoop
    start_task: Start
    engine: Any

    async def sanitize_message(self, params: Object) -> tuple[Json, Sequence[Finding]]:
        """Return the params of a message as they may leave, and what was changed in them."""

    async def notify(self, call: CallState, message: bytes) -> None:
        """Send a notification of a call, and wait while too much is unsent."""

    async def request_input(self, call: CallState, request: InputRequest) -> Object:
        """Send a request of a call, and wait for its result."""

    def close_stream(self, call: CallState) -> None:
        """Close the response stream of a call; the client fetches the rest later."""

    def abandon(self, call: CallState) -> None:
        """Cancel a call without a reply."""

    def cancel(self, call: CallState) -> None:
        """Cancel a call on behalf of an operator, and tell its caller."""


class CallActivity(Protocol):
    """What one call does, as an observer records it."""

    def record_message(self, direction: Literal["in", "out"], message: bytes) -> None: ...
    def record_progress(self, done: float, total: float | None, message: str | None) -> None: ...
    def record_log(self, level: str, data: Json) -> None: ...
    def record_answer(self, answer: bytes | None) -> None: ...


class SlotHolder(Struct, eq=False, kw_only=True):
    """The concurrency slot of one run of a tool."""

    release: Callable[[], None] | None = None  # gives the slot back

    def release_slot(self) -> None:
        """Give the slot back, if there is one."""
        release, self.release = self.release, None
        if release is not None:
            release()


class CallState(SlotHolder, eq=False):
    """One `tools/call` in flight, from its request to its reply."""

    peer: CallPeer
    calls: CallOwner
    reply_channel: ReplyChannel  # may be replaced: a call can outlive the request that made it
    id: Id
    entry: ToolEntry
    arguments: Object
    revision: Revision
    client: ClientInfo
    principal: Principal
    meta: Any  # `_meta` of the request, decoded by its revision; UNSET: the request had none
    reply: ReplyCallback  # takes the reply if it comes later

    # How far the call is
    cancelled: bool = False  # readable from any thread
    timed_out: bool = False  # implies `cancelled`
    closed: bool = False  # ended or cancelled: only the reply may still be sent
    is_answered: bool = False  # the reply was sent, or there will be none
    intent_pending: bool = False  # the audit log is writing the intent; the tool starts when it is on disk
    intended: bool = False  # the intent is on disk, or may be: from here on the tool may have had an effect
    recorded: bool = False  # the outcome was handed to the audit log
    is_unsendable: bool = False  # the result could not be sent; an error was
    context: Context | None = None  # in which the call runs
    task: asyncio.Task[Any] | None = None
    reply_future: asyncio.Future[None] | None = None  # set when the reply was sent, for shutdown
    sinks: tuple[CallSink, ...] = ()  # observers that were there when the call began
    marks: list[int] | None = None  # begin and end of each stage in nanoseconds; None: not measured
    activity: CallActivity | None = None  # of a sink that follows what the call does
    trail: Trail | None = None
    serial: str = ""  # names the call in the audit log and the console

    # Timeouts
    timer: asyncio.TimerHandle | None = None
    last_activity: float = 0.0  # the idle timeout counts from here
    waiting: int = 0  # open questions to the client; the idle timeout stands still meanwhile
    deadline_at: float | None = None

    # What the client asked for and answered
    level: int | None = None  # lowest log level, if the request named one
    answers: Mapping[str, Json] = {}  # answers that a retry brought
    answered: Mapping[str, Json] = {}  # answers that this try used; a retry is not asked for them again
    questions: frozenset[Id] = frozenset()  # requests that this call sent to the client
    ask_count: int = 0
    progress: float = -math.inf  # the last one sent
    unsent: frozenset[asyncio.Task[Any]] = frozenset()  # notifications that were not awaited
    blocking_futures: frozenset[Future[Any]] = frozenset()  # what worker threads of this call wait for
    is_preview: bool = False  # belongs to a preview, which may not ask or send

    # What the guards decided and changed
    sent: Object | None = None  # the arguments as the client sent them, if a guard changed them
    repairs: tuple[RepairedArgument, ...] = ()
    findings: tuple[Finding, ...] = ()  # in the result
    upstream_revision: str = ""  # that the upstream of its tool speaks
    lossy: tuple[str, ...] = ()  # what could not be carried between the two revisions
    message_findings: tuple[Finding, ...] = ()  # in progress, log messages and questions
    decision: Decision | None = None
    would_decide: tuple[str, ...] = ()  # rules on trial that match, each with its verdict
    approval: Approval | None = None
    reviewed_arguments: Object | None = None  # the arguments a person was asked about, if the person edited them
    agreed: str = ""  # the approval or the grant that allowed the call

    _trace: Trace | UnsetType | None = UNSET

    @property
    def name(self) -> str:
        return self.entry.tool.name

    @property
    def deadline(self) -> float:
        """The time of the total timeout, by the clock of the event loop."""
        if self.deadline_at is None:
            self.deadline_at = self.now() + self.entry.total
        return self.deadline_at

    @deadline.setter
    def deadline(self, at: float) -> None:
        self.deadline_at = at

    @property
    def trace(self) -> Trace | None:
        """The trace of the client: `_meta` names it, else the headers of the HTTP request."""
        if self._trace is UNSET:
            self._trace = self.named_trace or read_headers(self.peer.trace_headers)
        return self._trace

    @property
    def named_trace(self) -> Trace | None:
        """The trace that `_meta` names."""
        meta = self.meta
        return None if meta is UNSET else read(meta.traceparent, meta.tracestate, meta.baggage)

    @property
    def stages(self) -> dict[str, float]:
        """Seconds in each stage of the pipeline."""
        marks = self.marks or []
        steps = zip(STAGES, marks, marks[1:], strict=False)  # a refused call did not reach all of them
        return {name: (ended - begun) / 1e9 for name, begun, ended in steps}

    @property
    def server(self) -> str:
        name: str = self.calls.engine.guard_set.name
        return name

    @property
    def address(self) -> str:
        return self.peer.address

    @property
    def over_http(self) -> bool:
        return self.peer.trace_headers is not None

    @property
    def is_identified(self) -> bool:
        return self.peer.is_identified

    def now(self) -> float:
        """Return the time of the event loop."""
        return self.calls.loop.time()

    def accepts(self, method: str, capability: str) -> bool:
        """Whether the client declared that it answers requests of this method and kind."""
        return method in self.revision.input_methods and self.client.declares(capability)

    def can_ask(self, capability: str) -> bool:
        """Whether the user can be asked, by `"elicitation.form"` or `"elicitation.url"`."""
        reachable = self.revision.input_mode == "retry" or self.reply_channel.two_way
        return reachable and self.accepts("elicitation/create", capability)

    def cancel(self) -> None:
        """Cancel the call on behalf of an operator, and tell its caller."""
        self.calls.cancel(self)

    @property
    def log_floor(self) -> int:
        """The lowest log level that the client wants, as an index of LEVELS."""
        return self.peer.connection.level if self.level is None else self.level
