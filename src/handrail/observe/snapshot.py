"""One call as it is shown: what came, what became of it, how long it took.

Values are kept as they are; whoever shows them masks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct

from handrail.engine.call import STAGES, Call
from handrail.guards.rules import Decision
from handrail.guards.sanitize import Finding
from handrail.jsonrpc import Id
from handrail.model import Audio, Block, EmbeddedResource, Image, Object, Text, ToolResult
from handrail.observe.clients import ConnectedClient
from handrail.protocol.http_rules import Headers
from handrail.protocol.trace import Trace, read, read_headers
from handrail.schema.repair import RepairedArgument

WireMessage = tuple[float, str, bytes]  # when, "in" or "out", what
ProgressEntry = tuple[float, float, float | None, str | None]  # when, done, total, message
LogEntry = tuple[float, str, bytes]  # when, level, what, as JSON


class CallSnapshot(Struct, eq=False, gc=False):  # holds nothing that leads back here, once it has ended
    """One call as it is when somebody looks, or as it was when it ended."""

    prefix: str
    number: int
    peer: ConnectedClient
    tool: str
    address: str
    trace_headers: Headers | None  # over HTTP, what the headers say of the trace
    raw_request: bytes | bytearray  # as it came
    answer: bytes | None
    started_at: float
    started_ns: int  # the same, by the clock that times are measured with, in nanoseconds
    ended_ns: int
    outcome: str
    result: ToolResult | None
    refusal: tuple[str, str] | None  # its kind, and its text
    meta: Any = UNSET
    marks: Sequence[int] = ()  # none: it never began
    arguments: Object | None = None  # it ran with, if others came
    repairs: tuple[RepairedArgument, ...] = ()
    findings: tuple[Finding, ...] = ()
    decision: Decision | None = None
    agreed: str = ""
    call: Call | None = None  # while it runs
    progress: tuple[ProgressEntry, ...] = ()
    logs: tuple[LogEntry, ...] = ()
    lines: tuple[WireMessage, ...] = ()  # that went over the wire between request and answer
    memory_bytes: int = 0  # in bytes, once it is counted
    request_id: Id = ""  # of its request, which may have come in a batch
    is_tool: bool = True  # or a name that is no tool's

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
        """It took; 0 while it runs."""
        return (self.ended_ns - self.started_ns) / 1e9 if self.ended_ns else 0.0

    @property
    def ended_at(self) -> float:
        return self.started_at + self.seconds

    @property
    def stage(self) -> str:
        """The one it is in; the last, if it is over."""
        if not self.marks:
            return ""
        over = len(self.marks) - 1  # so many are
        return STAGES[max(0, min(over - 1 if self.ended_ns else over, len(STAGES) - 1))]

    @property
    def state(self) -> str:
        call = self.call
        return "done" if call is None else "cancelling" if call.cancelled else "asking" if call.waiting else "running"

    @property
    def trace(self) -> Trace | None:
        """Which trace the client made the call in."""
        meta = self.meta
        named = None if meta is UNSET else read(meta.traceparent, meta.tracestate, meta.baggage)
        return named or read_headers(self.trace_headers)


def memory_size(snapshot: CallSnapshot) -> int:
    """How much memory it takes, about: in bytes of what went over the wire, or could have."""
    if type(snapshot.raw_request) is bytearray:
        snapshot.raw_request = bytes(snapshot.raw_request)
    answer, result = snapshot.answer or b"", snapshot.result
    size = len(snapshot.raw_request) + len(answer) + 1
    if snapshot.lines or snapshot.logs or snapshot.progress:
        size += sum(len(line) for _, _, line in snapshot.lines) + sum(len(data) for _, _, data in snapshot.logs)
        size += sum(len(each[3] or "") for each in snapshot.progress)
    if result is not None:  # is kept as it was given, and as it was sent, if it was
        content = result.content
        if len(content) == 1 and type(content[0]) is Text:
            size += max(len(answer), len(content[0].text))
        else:
            size += max(len(answer), sum(map(_size, content)))
    return size


def _size(block: Block) -> int:
    """About, and quickly: of a result that was not sent, too large perhaps."""
    match block:
        case Text():
            return len(block.text)
        case Image() | Audio():
            return len(block.data)
        case EmbeddedResource(resource=inner):
            return len(inner.get("text") or inner.get("blob") or "")
    return 0
