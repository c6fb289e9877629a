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
from handrail.engine.outcome import ending
from handrail.errors import Refused
from handrail.jsonrpc import Request, encode
from handrail.model import Json, Principal, ToolResult
from handrail.observe.clients import Peer, Peers
from handrail.observe.per_minute import Minutes, Tally, bucket_of
from handrail.observe.snapshot import Line, Log, Progress, Seen, weigh
from handrail.protocol.connection import Connection
from handrail.revisions import Revision

if TYPE_CHECKING:
    from handrail.engine.dispatcher import Conversation

__all__ = ["Feed"]

log = logging.getLogger("handrail")

RING_CALLS, RING_BYTES = 500, 16 * 1024 * 1024
MAX_LINES = 100  # of one call: notices, progress, log
LARGE = 64 * 1024  # bytes that are not left lying about
TOGETHER = 64  # calls are counted

ERRORS = frozenset({"tool_error", "timeout", "internal"})
NEITHER = frozenset({"ok", "cancelled", "input_required"})  # failed nor refused
RAN = ERRORS | NEITHER  # the others were refused


class Begun(Struct, eq=False):
    """What is known of a call that takes longer, beside itself."""

    feed: Feed
    reply: Callable[[bytes | None], None]
    number: int = 0
    asked: bytes | bytearray = b""
    began: float = 0.0
    seen: Seen | None = None  # once it has ended
    answer: bytes | None = None
    progress: tuple[Progress, ...] = ()
    logs: tuple[Log, ...] = ()
    lines: tuple[Line, ...] = ()

    def answer_with(self, answer: bytes | None) -> None:
        """Stands where the answer goes: lets it go there, and notes it."""
        self.answer = answer
        self.reply(answer)
        if self.seen is not None:
            self.feed.answered(self.seen, answer)


class Feed:
    """The calls of one process, as they come and go.

    Most calls have ended when their request has been handled. Of such a call nothing is noted before its end, and then
    all at once; what follows from it is worked out for many together, or when somebody looks. Of one that takes longer
    there is a `Begun`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.fresh: list[Seen] = []  # that have ended since somebody last took them
        self.news: Callable[[], None] | None = None  # is told of each change, if somebody watches
        self.open()
        self._running: dict[Call, Begun] = {}
        self._ended: list[Seen] = []  # and not counted
        self._totals = [0, 0, 0]
        self._tools: dict[str, Tally] = {}
        self._peers = Peers()
        self._minutes = Minutes(clock())
        self._kept: list[Seen] = []
        self._bytes = 0
        # The request that is being handled, when it came, and what has become of it
        self.started = self._count = self._number = 0
        self._request: Request | None = None
        self._refused: tuple[str, Refused] | None = None
        self.call: Call | None = None
        self._how: ToolResult | BaseException | None = None
        self._over = 0  # when it ended

    # A call, from its request to its end

    def follow(self, conversation: Conversation, request: Request, reply: Callable[[bytes | None], None]) -> Any:
        """Let a conversation respond, and look on."""
        if request.method != "tools/call":
            answer = conversation.respond(request, reply)
            try:
                self._peers.meet(conversation, request, self.clock())
            except Exception:
                log.exception("what came of %s could not be shown", request.method)
            return answer
        if self._request is not None:
            return self._inside(conversation, request, reply)
        asked, began, self._request = conversation.raw, conversation.engine.clock(), request
        self._count = self._number = number = self._count + 1
        self.started = perf_counter_ns()
        try:
            answer = conversation.respond(request, reply)
        finally:
            call, how, refused = self.call, self._how, self._refused
            self.call = self._how = self._request = self._refused = None
        try:
            if how is not None and call is not None:
                seen = self._look(call, number, asked, began, self._over, how, answer or None)
                if not answer or call in self._running:
                    self._tie(self._begun(call), call, seen)
                self._end(seen, len(answer or b""))
            elif refused is not None:
                self._end(self._turned_away(conversation, request, began, *refused, answer), len(answer or b""))
            elif call is not None:
                begun = self._begun(call)
                begun.number, begun.asked, begun.began = number, asked, began
                self.tell()
        except Exception:
            log.exception("what came of %s could not be shown", request.method)
        return answer

    def _inside(self, conversation: Conversation, request: Request, reply: Callable[[bytes | None], None]) -> Any:
        """A call that is made while another is being handled: by its tool, of an application in the same process."""
        outer = self._request, self._refused, self._number, self.started, self.call, self._how, self._over
        self._request = self._refused = self.call = self._how = None
        try:
            return self.follow(conversation, request, reply)
        finally:
            self._request, self._refused, self._number, self.started, self.call, self._how, self._over = outer

    def ended(self, call: Call, how: ToolResult | BaseException) -> None:
        """A call has ended. It need not have been answered, or has been before."""
        if call is self.call:
            self._over, self._how = perf_counter_ns(), how
        elif (begun := self._running.get(call)) is not None:
            seen = self._look(call, begun.number, begun.asked, begun.began, perf_counter_ns(), how, begun.answer)
            self._tie(begun, call, seen)
            self._end(seen, len(begun.answer or b""))

    def turned_away(self, conversation: Conversation, request: Request, revision: Revision, refused: Refused) -> str:
        """A call that never became one; its id."""
        if self._request is request:
            self._refused = (revision.name, refused)
        else:  # it did not even come as far as `follow`
            self._count = self._number = self._count + 1
            self.started = perf_counter_ns()
            self._end(self._turned_away(conversation, request, self.clock(), revision.name, refused, None), 0)
        return self.serial

    def _turned_away(
        self,
        conversation: Conversation,
        request: Request,
        began: float,
        revision: str,
        refused: Refused,
        answer: bytes | None,
    ) -> Seen:
        name = request.params.get("name")
        return Seen(
            self._prefix,
            self._number,
            self._peers.turned_away(conversation, request, revision, began),
            name[:200] if type(name) is str else "",
            conversation.address,
            conversation.traced,
            conversation.raw,
            answer,
            began,
            self.started,
            perf_counter_ns(),
            refused.kind.value,
            None,
            (refused.kind.value, refused.prefix + refused.text),
            ident=request.id,
            is_tool=type(name) is str and conversation.engine.catalog.get(name) is not None,
        )

    def _begun(self, call: Call) -> Begun:
        """What is known of the call that is being handled: it will be answered later, or says something before."""
        found = self._running.get(call)
        if found is None:
            found = self._running[call] = Begun(self, call.reply)
            call.reply = found.answer_with
        return found

    def _tie(self, begun: Begun, call: Call, seen: Seen) -> None:
        begun.seen, seen.progress, seen.logs, seen.lines = seen, begun.progress, begun.logs, begun.lines
        del self._running[call]

    def _end(self, seen: Seen, answered: int) -> None:
        self._ended.append(seen)
        if self.news is not None:
            self.fresh.append(seen)
            self.tell()
        if len(self._ended) >= TOGETHER or len(seen.asked) + answered > LARGE:
            self.settle()

    def open(self) -> None:
        """In the process whose calls it sees: their names are no other's."""
        self._prefix = secrets.token_hex(6)

    def answered(self, seen: Seen, answer: bytes | None) -> None:
        """One that had ended before."""
        seen.answer, size = answer, len(answer or b"")
        if seen.weight:
            seen.weight += size
            self._bytes += size
        if size > LARGE:
            self.settle()

    # What it says on the way

    def _going(self, call: Call) -> Begun | None:
        return self._begun(call) if call is self.call and self._how is None else self._running.get(call)

    def said(self, call: Call, way: str, message: bytes) -> None:
        begun = self._going(call)
        if begun is not None and len(begun.lines) < MAX_LINES and len(message) <= LARGE:
            begun.lines += ((self.clock(), way, message),)
        self.tell()

    def progressed(self, call: Call, done: float, total: float | None, message: str | None) -> None:
        """Also what could not be sent, as far as it can be shown: nobody may have asked to be told."""
        said = None if message is None else str(message)[:LARGE].encode(errors="replace").decode()
        kept = (self.clock(), float(done), None if total is None else float(total), said)
        if (begun := self._going(call)) is not None:
            begun.progress = (*begun.progress[-MAX_LINES + 1 :], kept)
        self.tell()

    def logged(self, call: Call, level: str, data: Json) -> None:
        try:
            said = encode(data)
        except Exception as problem:  # of whatever was to be said
            said = encode(f"not JSON: {type(problem).__name__}")
        if len(said) > LARGE:
            said = encode(f"{len(said):,} bytes, too much to be kept")
        if (begun := self._going(call)) is not None:
            begun.logs = (*begun.logs[-MAX_LINES + 1 :], (self.clock(), level, said))

    def tell(self) -> None:
        if self.news is not None:
            try:
                self.news()
            except Exception:
                log.exception("nobody could be told what is new")

    def _look(
        self,
        call: Call,
        number: int,
        asked: bytes | bytearray,
        began: float,
        ended: int = 0,
        how: ToolResult | BaseException | None = None,
        answer: bytes | None = None,
    ) -> Seen:
        """A call as it is now."""
        flight, marks, peers = call._flight, call.marks, self._peers
        assert marks is not None
        is_last = flight.connection is peers.last and not call.revision.stateless  # where each call says whose it is
        outcome, result, refusal = "", None, None
        if how is not None:
            if len(marks) <= len(STAGES):  # it did not get further
                marks = [*marks, ended]
            if isinstance(how, ToolResult):
                result = how
            elif isinstance(how, Refused):  # whose traceback would hold on to all that was going on
                refusal = (how.kind.value, how.prefix + how.text)
            outcome = ending(call, how) if result is None or call.cancelled or result.is_error else "ok"
        return Seen(
            self._prefix,
            number,
            peers.caller if is_last else peers.find(call, began),
            call.entry.tool.name,
            flight.address,
            flight.traced,
            asked,
            answer,
            began,
            marks[0],
            ended,
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
            None if ended else call,
            ident=call.id,
        )

    # What follows from it

    def settle(self) -> None:
        """Count those that have ended, and keep the last. Who looks at anything here has this done first."""
        ended, self._ended = self._ended, []
        if not ended:
            return
        if ended[0].answered // 1 == ended[-1].answered // 1:
            self._count_in(ended)
        else:
            for _, some in groupby(ended, lambda seen: seen.answered // 1):
                self._count_in(list(some))
        for seen in ended:
            seen.weight = weigh(seen)
        kept = self._kept
        kept += ended
        gone = max(0, len(kept) - RING_CALLS)
        self._bytes += sum([seen.weight for seen in ended]) - sum([seen.weight for seen in kept[:gone]])
        while self._bytes > RING_BYTES and len(kept) - gone > 1:
            self._bytes -= kept[gone].weight
            gone += 1
        for seen in kept[:gone]:
            seen.weight = 0  # its answer, if that is still to come, weighs nothing here
        del kept[:gone]

    def _count_in(self, ended: list[Seen]) -> None:
        """Some that have ended in the same second."""
        kinds = [(seen.peer, seen.tool, seen.outcome, seen.is_tool) for seen in ended]
        counts, last = Counter(kinds), dict(zip(kinds, ended, strict=True))
        ran = Counter([(seen.tool, bucket_of(seen.ended - seen.started)) for seen in ended if seen.outcome in RAN])
        minute = self._minutes.roll(ended[-1].answered)
        errors, refused, unrecorded = 0, 0, 0
        for kind, count in counts.items():
            peer, tool, how, is_tool = kind
            seen = last[kind]
            peer.calls += count
            peer.seen = max(peer.seen, seen.began)
            tally = Tally(count, last=seen.answered)
            if how in ERRORS:
                errors += count
                tally.errors = count
            elif how not in NEITHER:
                refused += count
                unrecorded += count if how == "unrecorded" else 0
                minute.whose[peer.who, how] += count
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
        self._minutes.add(ended[-1].answered, times, errors, unrecorded, refused)

    # For whoever looks

    @property
    def serial(self) -> str:
        """The name of the call that is being handled."""
        return f"{self._prefix}{self._number:08x}"

    @property
    def totals(self) -> tuple[int, int, int]:
        """Calls that have ended since the beginning; of those, which failed, and which were refused."""
        self.settle()
        calls, errors, refused = self._totals
        return calls, errors, refused

    @property
    def running(self) -> dict[str, Seen]:
        """By their ids, oldest first."""
        found: dict[str, Seen] = {}
        for call, begun in self._running.items():
            seen = self._look(call, begun.number, begun.asked, begun.began, answer=begun.answer)
            seen.progress, seen.logs, seen.lines = begun.progress, begun.logs, begun.lines
            found[seen.id] = seen
        return found

    @property
    def kept(self) -> list[Seen]:
        """Oldest first."""
        self.settle()
        return list(self._kept)

    def find(self, ident: str) -> Seen | None:
        return self.running.get(ident) or next((seen for seen in self.kept if seen.id == ident), None)

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
        return self._peers.principals

    def connected(self, streams: set[Connection]) -> list[tuple[Peer, int, bool]]:
        """Who is there now, how many calls they made, and whether one of those runs, or one of `streams` is theirs."""
        self.settle()
        return self._peers.connected(streams, Counter([seen.peer for seen in self.running.values()]), self.clock())
