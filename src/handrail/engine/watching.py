"""What a server's calls look like to somebody who watches: those that run, the last that ended, and exact numbers.

Nothing here knows who watches, and nothing is masked or sent while a call goes on. Values are kept as they are; whoever
shows them masks them. What is kept has an end: so many calls, and so many bytes of what went over the wire.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, Struct

from handrail.engine.call import STAGES, Call
from handrail.engine.counting import ending
from handrail.engine.minutes import Minutes
from handrail.engine.peers import Peer, Peers
from handrail.engine.pipeline import Handler
from handrail.errors import Refused
from handrail.guards.rules import Decision
from handrail.guards.sanitize import Finding
from handrail.jsonrpc import Request, encode
from handrail.model import Audio, Block, EmbeddedResource, Image, Json, Object, Principal, Text, ToolResult
from handrail.protocol.connection import Connection
from handrail.protocol.http import Headers
from handrail.protocol.trace import Trace, read, read_headers
from handrail.revisions import Revision
from handrail.schema.repair import Repair

if TYPE_CHECKING:
    from handrail.engine.dispatch import Conversation

__all__ = ["Feed", "Seen", "Tally"]

RING_CALLS, RING_BYTES = 500, 16 * 1024 * 1024
MAX_LINES = 100  # of one call: notices, progress, log
LARGE = 64 * 1024  # bytes that are not left lying about
TOGETHER = 32
MAX_PRINCIPALS = 1_000

ERRORS = frozenset({"tool_error", "timeout", "internal"})
NEITHER = frozenset({"ok", "cancelled", "input_required"})  # failed nor refused

Line = tuple[float, str, bytes]  # when, "in" or "out", what
Progress = tuple[float, float, float | None, str | None]  # when, done, total, message


class Tally(Struct):
    """How often a tool was called."""

    calls: int = 0
    errors: int = 0
    last: float = 0.0


class Seen(Struct, eq=False, gc=False):  # what would be a cycle is undone when it is settled
    """One call, from its request to its answer."""

    feed: Feed
    id: str
    conversation: Conversation | None  # this and `call`: while it runs, and until it is settled
    request: Request | None
    asked: bytes | bytearray  # as it came
    reply: Callable[[bytes | None], None]
    began: float
    started: int  # the same, by the clock that times are measured with, in nanoseconds
    call: Call | None = None
    ended: int = 0
    who: str = ""
    address: str = ""
    tool: str = ""
    client: str = ""
    revision: str = ""
    peer: Peer | None = None
    traced: Headers | None = None  # over HTTP, what the headers say of the trace
    meta: Any = UNSET
    how: str = ""  # it ended, as soon as it has
    outcome: str = ""  # the same, when it is settled
    seconds: float = 0.0
    answered: float = 0.0
    marks: Sequence[int] = ()
    arguments: Object | None = None  # it ran with, if others came
    repairs: tuple[Repair, ...] = ()
    findings: tuple[Finding, ...] = ()
    decision: Decision | None = None
    agreed: str = ""
    result: ToolResult | None = None
    refusal: tuple[str, str] | None = None  # its kind, and its text
    answer: bytes | None = None
    progress: tuple[Progress, ...] = ()
    logs: tuple[tuple[float, str, bytes], ...] = ()  # the last is JSON
    lines: tuple[Line, ...] = ()  # that went over the wire between request and answer
    weight: int = 0  # in bytes
    replied: bool = False

    def answer_with(self, answer: bytes | None) -> None:
        """Stands where the answer goes: notes it, and lets it go there."""
        reply = self.reply
        self.take(answer)
        reply(answer)

    def take(self, answer: bytes | None) -> None:
        self.answer, self.replied = answer, True
        if self.outcome:
            self.feed.keep(self)
        elif answer is not None and len(answer) > LARGE:
            self.feed.settle()

    def said(self, way: str, message: bytes) -> None:
        if len(self.lines) < MAX_LINES and len(message) <= LARGE:
            self.lines += ((self.feed.clock(), way, message),)
        self.feed.tell()

    def progressed(self, done: float, total: float | None, message: str | None) -> None:
        """Also what could not be sent, as far as it can be shown: nobody may have asked to be told."""
        said = None if message is None else str(message)[:LARGE].encode(errors="replace").decode()
        kept = (self.feed.clock(), float(done), None if total is None else float(total), said)
        self.progress = (*self.progress[-MAX_LINES + 1 :], kept)
        self.feed.tell()

    def logged(self, level: str, data: Json) -> None:
        try:
            said = encode(data)
        except Exception as problem:  # of whatever was to be said
            said = encode(f"not JSON: {type(problem).__name__}")
        if len(said) > LARGE:
            said = encode(f"{len(said):,} bytes, too much to be kept")
        self.logs = (*self.logs[-MAX_LINES + 1 :], (self.feed.clock(), level, said))

    def begin(self, call: Call) -> None:
        """It has become a call."""
        self.call = call
        call.seen = self
        call.serial = self.id
        call.marks = [self.started]

    def settle(self) -> None:
        """Take what is to be shown from where it is, and let go of the rest."""
        conversation, call, request = self.conversation, self.call, self.request
        if conversation is not None and request is not None:
            who = conversation.principal
            self.who, self.address, self.traced = who.id, conversation.address, conversation.traced
            self.peer = self.peer or self.feed.meet(conversation, request, self.began)
        if call is None:
            self.client = "" if self.peer is None else self.peer.client
        else:
            self.tool, self.client, self.revision = call.entry.tool.name, call.client.name, call.revision.name
            self.meta, self.decision, self.agreed = call.meta, call.decision, call.agreed
            self.repairs, self.findings = call.repairs, call.findings
            self.arguments = None if call.sent is None else call.arguments
            self.marks = call.marks or ()
            if self.ended and len(self.marks) <= len(STAGES):  # it did not get further
                self.marks = [*self.marks, self.ended]
        if self.ended:
            self.call = self.conversation = self.request = None

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


class Feed:
    """The calls of one process, as they come and go.

    A call leaves no more than itself behind. What follows from it is worked out for many at once, or when somebody
    looks: that is a third of the work.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.fresh: list[Seen] = []  # that have ended since somebody last took them
        self.news: Callable[[], None] | None = None  # is told of each change, if somebody watches
        self._running: dict[str, Seen] = {}
        self._ended: list[Seen] = []  # and not settled
        self._totals = [0, 0, 0]
        self._tools: dict[str, Tally] = {}
        self._principals: dict[str, Principal] = {}
        self._peers = Peers()
        self._minutes = Minutes(clock())
        self._ring: deque[Seen] = deque()
        self._known: dict[str, Seen] = {}
        self._bytes = 0
        self._last: Request | None = None  # that came, and what became of it
        self._newest: Seen
        self._prefix = secrets.token_hex(4)
        self._count = 0

    # A call, from its request to its end

    def follow(self, conversation: Conversation, request: Request, reply: Callable[[bytes | None], None]) -> Any:
        """Let a conversation respond, and look on."""
        if request.method != "tools/call":
            answer = conversation.respond(request, reply)
            self.meet(conversation, request, self.clock())
            return answer
        self._last, self._newest = request, self._begin(conversation, request, reply)
        seen = self._newest
        answer = conversation.respond(request, seen.answer_with)
        if answer:
            seen.take(answer)
        return answer

    def _begin(self, conversation: Conversation, request: Request, reply: Callable[[bytes | None], None]) -> Seen:
        self._count = count = self._count + 1
        ident = f"{self._prefix}{count:08x}"
        return Seen(self, ident, conversation, request, conversation.raw, reply, self.clock(), perf_counter_ns())

    def observed(self, inner: Handler) -> Handler:
        """Around a whole call, outermost of all."""
        running = self._running

        async def handle(call: Call) -> ToolResult:
            seen: Seen = call.reply.__self__  # type: ignore[attr-defined]  # `answer_with`: it came by `follow`
            seen.begin(call)
            running[seen.id] = seen
            if self.news is not None:
                self.news()
            try:
                seen.result = result = await inner(call)
                seen.how = ending(call, result)
                return result
            except BaseException as problem:
                seen.how = ending(call, problem)
                if isinstance(problem, Refused):  # whose traceback would hold on to all that was going on
                    seen.refusal = (problem.kind.value, problem.prefix + problem.text)
                raise
            finally:
                seen.ended = perf_counter_ns()
                del running[seen.id]
                self._end(seen)

        return handle

    def turned_away(self, conversation: Conversation, request: Request, revision: Revision, refused: Refused) -> str:
        """A call that never became one; its id."""
        if self._last is request:
            seen = self._newest
        else:  # it did not even come as far as `follow`
            seen = self._begin(conversation, request, _nowhere)
            seen.replied = True
        name = request.params.get("name")
        seen.tool, seen.revision = name[:200] if type(name) is str else "", revision.name
        seen.how = refused.kind.value
        seen.refusal = (refused.kind.value, refused.prefix + refused.text)
        seen.ended = perf_counter_ns()
        self._end(seen)
        return seen.id

    def _end(self, seen: Seen) -> None:
        self._ended.append(seen)
        if self.news is not None:
            self.fresh.append(seen)
            self.news()
        if len(self._ended) >= TOGETHER or len(seen.asked) > LARGE:
            self.settle()

    def tell(self) -> None:
        if self.news is not None:
            self.news()

    # What follows from it

    def settle(self) -> None:
        """Everybody who looks at anything here has this done first."""
        for seen in self._running.values():
            seen.settle()
        ended, self._ended = self._ended, []
        for seen in ended:
            is_call = seen.call is not None
            seen.settle()
            self._count_in(seen, is_call=is_call)
            if seen.replied:
                self.keep(seen)

    def _count_in(self, seen: Seen, *, is_call: bool) -> None:
        seen.outcome = how = seen.how
        seen.seconds = seconds = (seen.ended - seen.started) / 1e9
        seen.answered = now = seen.began + seconds
        is_error = how in ERRORS
        self._minutes.count(now, seconds, how, is_error)
        totals = self._totals
        totals[0] += 1
        totals[1] += is_error
        totals[2] += not is_error and how not in NEITHER
        if is_call:
            tally = self._tools.get(seen.tool)
            if tally is None:
                tally = self._tools[seen.tool] = Tally()
            tally.calls += 1
            tally.errors += is_error
            tally.last = now

    def keep(self, seen: Seen) -> None:
        """One that is over and answered, in place of the oldest."""
        seen.reply = _nowhere  # not to hold on to a connection
        if type(seen.asked) is bytearray:
            seen.asked = bytes(seen.asked)
        weight = len(seen.asked) + sum(len(line) for _, _, line in seen.lines)
        weight += sum(len(said) for _, _, said in seen.logs) + sum(len(each[3] or "") for each in seen.progress)
        if seen.answer is not None:
            weight += len(seen.answer)
        if seen.result is not None:  # is kept as it was given, and as it was sent, if it was
            weight += max(len(seen.answer or b""), sum(map(_size, seen.result.content)))
        seen.weight = weight
        self._bytes += weight
        self._ring.append(seen)
        self._known[seen.id] = seen
        while len(self._ring) > RING_CALLS or (self._bytes > RING_BYTES and len(self._ring) > 1):
            oldest = self._ring.popleft()
            self._bytes -= oldest.weight
            del self._known[oldest.id]

    def meet(self, conversation: Conversation, request: Request, now: float) -> Peer | None:
        who = conversation.principal
        if who.id not in self._principals and len(self._principals) < MAX_PRINCIPALS:
            self._principals[who.id] = who
        return self._peers.meet(conversation, request, now)

    # For whoever looks

    @property
    def totals(self) -> tuple[int, int, int]:
        """Calls that have ended since the beginning; of those, which failed, and which were refused."""
        self.settle()
        calls, errors, refused = self._totals
        return calls, errors, refused

    @property
    def running(self) -> dict[str, Seen]:
        self.settle()
        return self._running

    @property
    def kept(self) -> list[Seen]:
        """Oldest first."""
        self.settle()
        return list(self._ring)

    def find(self, ident: str) -> Seen | None:
        return self.running.get(ident) or self._known.get(ident)

    @property
    def minutes(self) -> Minutes:
        self.settle()
        self._minutes.roll(self.clock())
        return self._minutes

    @property
    def tools(self) -> dict[str, Tally]:
        self.settle()
        return self._tools

    @property
    def principals(self) -> dict[str, Principal]:
        self.settle()
        return self._principals

    def connected(self, streams: set[Connection]) -> list[tuple[Peer, bool]]:
        """Who is there now, and whether a request of theirs is open, or one of the `streams`."""
        busy = {id(seen.peer) for seen in self.running.values()}
        return self._peers.connected(streams, busy, self.clock())


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


def _nowhere(answer: bytes | None) -> None: ...
