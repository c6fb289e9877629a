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
from handrail.observe.clients import Peer
from handrail.protocol.http_rules import Headers
from handrail.protocol.trace import Trace, read, read_headers
from handrail.schema.repair import Repair

Line = tuple[float, str, bytes]  # when, "in" or "out", what
Progress = tuple[float, float, float | None, str | None]  # when, done, total, message
Log = tuple[float, str, bytes]  # when, level, what, as JSON


class Seen(Struct, eq=False, gc=False):  # holds nothing that leads back here, once it has ended
    """One call as it is when somebody looks, or as it was when it ended."""

    prefix: str
    number: int
    peer: Peer
    tool: str
    address: str
    traced: Headers | None  # over HTTP, what the headers say of the trace
    asked: bytes | bytearray  # as it came
    answer: bytes | None
    began: float
    started: int  # the same, by the clock that times are measured with, in nanoseconds
    ended: int
    outcome: str
    result: ToolResult | None
    refusal: tuple[str, str] | None  # its kind, and its text
    meta: Any = UNSET
    marks: Sequence[int] = ()  # none: it never began
    arguments: Object | None = None  # it ran with, if others came
    repairs: tuple[Repair, ...] = ()
    findings: tuple[Finding, ...] = ()
    decision: Decision | None = None
    agreed: str = ""
    call: Call | None = None  # while it runs
    progress: tuple[Progress, ...] = ()
    logs: tuple[Log, ...] = ()
    lines: tuple[Line, ...] = ()  # that went over the wire between request and answer
    weight: int = 0  # in bytes, once it is counted
    ident: Id = ""  # of its request, which may have come in a batch
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
        return (self.ended - self.started) / 1e9 if self.ended else 0.0

    @property
    def answered(self) -> float:
        return self.began + self.seconds

    @property
    def stage(self) -> str:
        """The one it is in; the last, if it is over."""
        if not self.marks:
            return ""
        over = len(self.marks) - 1  # so many are
        return STAGES[max(0, min(over - 1 if self.ended else over, len(STAGES) - 1))]

    @property
    def state(self) -> str:
        call = self.call
        return "done" if call is None else "cancelling" if call.cancelled else "asking" if call.waiting else "running"

    @property
    def trace(self) -> Trace | None:
        """Which trace the client made the call in."""
        meta = self.meta
        named = None if meta is UNSET else read(meta.traceparent, meta.tracestate, meta.baggage)
        return named or read_headers(self.traced)


def weigh(seen: Seen) -> int:
    """How much memory it takes, about: in bytes of what went over the wire, or could have."""
    if type(seen.asked) is bytearray:
        seen.asked = bytes(seen.asked)
    answer, result = seen.answer or b"", seen.result
    weight = len(seen.asked) + len(answer) + 1
    if seen.lines or seen.logs or seen.progress:
        weight += sum(len(line) for _, _, line in seen.lines) + sum(len(said) for _, _, said in seen.logs)
        weight += sum(len(each[3] or "") for each in seen.progress)
    if result is not None:  # is kept as it was given, and as it was sent, if it was
        content = result.content
        if len(content) == 1 and type(content[0]) is Text:
            weight += max(len(answer), len(content[0].text))
        else:
            weight += max(len(answer), sum(map(_size, content)))
    return weight


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
