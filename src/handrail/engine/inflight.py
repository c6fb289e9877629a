"""Calls in flight: begun at once, watched by two clocks, answered exactly once, given up when nobody wants them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

from msgspec import UNSET, MsgspecError, Struct, UnsetType

from handrail import jsonrpc
from handrail.audit.format import TrailError
from handrail.engine import recording
from handrail.engine.call import Call
from handrail.engine.core import Engine
from handrail.engine.driving import Course
from handrail.engine.input_requests import questions_in
from handrail.engine.pipeline import failed, told
from handrail.errors import Kind, Refused, ToolError, TransportError
from handrail.jsonrpc import Id, encode_sorted
from handrail.model import REFUSED, InputRequest, Object, Principal, ToolResult
from handrail.protocol.connection import CANCELLED, Connection
from handrail.protocol.http_rules import Headers
from handrail.revisions import Revision
from handrail.revisions.base import SUBSCRIPTION, Fault

log = logging.getLogger("handrail")

STATE_SECONDS = 3600
CLEANUP_SECONDS = 0.3
SOON_SECONDS = 0.02  # most calls have ended by then
SLOW_SECONDS = 0.5  # without a turn of the event loop
WARN_AGAIN_SECONDS = 60.0
RECORD_SECONDS = 5.0  # for the record of a call that took too long already
LATER = b""  # in place of an answer that will come
UNRECORDED = "%s was carried out, but what came of it could not be recorded and is withheld. Do not simply repeat it."

RESULT = Fault(0)  # told as the result of the tool

How = ToolResult | BaseException
Reply = Callable[[bytes | None], None]


class Outlet(Protocol):
    """Where messages to the peer go. `send` never waits; `drain` waits while too much is unsent."""

    def send(self, message: bytes) -> None: ...
    async def drain(self) -> None: ...


class Subscription(Struct):
    """A `subscriptions/listen` request that is still open."""

    id: Id
    revision: Revision
    tools: bool
    reply: Reply


class Flight:
    """What is going on between one peer and us."""

    status = 200  # what the last refusal is over HTTP
    address = ""  # where the peer is
    is_identified = False  # the transport has verified who the peer is
    traced: Headers | None = None  # over HTTP, what the headers say of the trace
    _tasks: set[asyncio.Task[Any]] | None = None  # of calls that wait, also of those given up
    _late: set[Call | None] | None = None  # calls that have no timer yet
    _waiting: set[asyncio.Task[None]] | None = None  # other requests that are answered later

    def __init__(
        self, engine: Engine, outlet: Outlet, principal: Principal, connection: Connection | None = None
    ) -> None:
        self.engine = engine
        self.outlet = outlet
        self.principal = principal
        self.loop = asyncio.get_running_loop()
        self.connection = connection or Connection(engine.offer, engine.hidden)

    def begin(self, call: Call) -> bytes:
        """Run a call; the answer if it has one already, else it goes to its `reply`."""
        engine, entry = self.engine, call.entry
        if engine.gate.audits:
            engine.gate.put_on_record(call)
        if (feed := engine.feed) is not None:
            call.feed, call.marks, feed.call = feed, [feed.started], call
            if call.trail is not None:
                call.serial = feed.serial
        handle = engine.handler_through(entry.via) if entry.via else engine.handle
        if handle is engine.inner and (entry.mode == "inline" or call.trail is not None):
            call.course = Course(self, call, handle(call), copy_context())
            return call.course.go()
        return self.run(call, handle(call), None)

    def run(self, call: Call, coroutine: Coroutine[Any, Any, ToolResult], context: Context | None) -> bytes:
        """Go on with a call in a task of its own."""
        call.course = None
        loop = self.loop
        began = loop.time()
        task = self.engine.starter(loop)(coroutine, context)
        if loop.time() - began > SLOW_SECONDS:
            self._warn_of_blocking(call, loop.time() - began)
        if task.done():
            return self.ended(call, _how(task))
        call.task = task
        if self._tasks is None:
            self._tasks = set()
        self._tasks.add(task)
        task.add_done_callback(partial(self._settle, call))
        return self.hold(call)

    def _warn_of_blocking(self, call: Call, taken: float) -> None:
        """Name the tool that kept the event loop from everything else; each tool once a minute."""
        now = self.loop.time()
        if (
            call.entry.mode == "async"
            and now - self.engine.warned.get(call.name, -WARN_AGAIN_SECONDS) >= WARN_AGAIN_SECONDS
        ):
            self.engine.warned[call.name] = now
            log.warning(
                "tool %r held the event loop for %.1f s, and no other call went on: await what takes long"
                " (asyncio.sleep in place of time.sleep), or make it `def`, which runs in a thread",
                call.name,
                taken,
            )

    def wait(self, answering: Coroutine[Any, Any, None]) -> None:
        """Answer a request that is no call later, and before the end."""
        self._waiting = self._waiting or set()
        self._waiting.add(task := self.loop.create_task(answering))
        task.add_done_callback(self._waiting.discard)

    # The way back to the peer

    @property
    def two_way(self) -> bool:
        """Whether the peer can be sent more than the answer to what it asked."""
        return getattr(self.outlet, "two_way", True)

    def say(self, answer: bytes | None) -> None:
        if answer is not None:
            self.outlet.send(answer)

    async def tell(self, call: Call, message: bytes) -> None:
        if not call.closed:
            if call.feed is not None:
                call.feed.said(call, "out", message)
            self.outlet.send(message)
            await self.outlet.drain()

    async def ask(self, call: Call, request: InputRequest) -> Object:
        if call.closed:
            raise asyncio.CancelledError
        if not self.two_way:
            raise Refused(Kind.NEEDS_CAPABILITY, "The client cannot be asked: it does not accept text/event-stream")
        waiter: asyncio.Future[Object] = self.loop.create_future()
        ident, message = self.connection.question(request.method, request.params, waiter)
        self.outlet.send(message)
        call.questions |= {ident}
        if call.feed is not None:
            call.feed.said(call, "out", message)
        try:
            return await waiter
        finally:
            self.take_back(call, ident)

    def take_back(self, call: Call, ident: Id) -> None:
        """Tell the client that a question need not be answered any more, if it was not."""
        if self.connection.asked.pop(ident, None) is not None and CANCELLED in call.revision.notifications:
            self.outlet.send(jsonrpc.notification(CANCELLED, {"requestId": ident}))

    def log_floor(self, call: Call) -> int:
        return self.connection.level if call.level is None else call.level

    async def close_stream(self, call: Call) -> None:
        """Where a call has a stream of its own, the client is to come back for the rest of it."""
        pause = getattr(self.outlet, "pause", None)
        if pause is not None and call.revision.primes:  # without a first event there is nothing to come back by
            pause()

    # The clocks

    def hold(self, call: Call) -> bytes:
        """Count a call among those in flight. Its clocks begin now; a timer it gets if it is still there soon."""
        in_flight, entry = self.connection.in_flight, call.entry
        if in_flight.get(call.id) is call:
            return LATER
        in_flight[call.id] = call
        call.touched = now = self.loop.time()
        if call._deadline is None:
            call._deadline = now + entry.total
        if entry.idle <= SOON_SECONDS or entry.total <= SOON_SECONDS:
            self._arm(call)
            return LATER
        late = self._late = self._late or self.engine.late(self.loop)
        if not late:
            self.loop.call_later(SOON_SECONDS, _arm_all, late)
            late.add(None)
        late.add(call)
        return LATER

    def _arm(self, call: Call) -> None:
        since = self.loop.time() if call.waiting else call.touched
        call.timer = self.loop.call_at(min(since + call.entry.idle, call.deadline), self._tick, call)

    def _tick(self, call: Call) -> None:
        now = self.loop.time()
        if now >= call.deadline:
            self._time_out(call, f"took longer than {call.entry.total:g} s")
        elif not call.waiting and now - call.touched >= call.entry.idle:
            self._time_out(call, f"gave no sign of life for {call.entry.idle:g} s")
        else:
            self._arm(call)

    def _time_out(self, call: Call, what: str) -> None:
        log.warning("tool %r %s; given up", call.name, what)
        if call.recorded:  # or about to be: what is late is the disk
            self._land(call, LATER, TrailError("it takes too long"))
            return
        call.timed_out = call.cancelled = True
        answer = self.refusal(call.revision, call.id, Refused(Kind.TIMEOUT, f"The tool {call.name} {what}."))
        self._answer_early(call, TimeoutError(), answer)
        if not call.over:  # it waits for the disk, which may be what was late all along
            late = TrailError("it takes too long")
            call.timer = self.loop.call_later(RECORD_SECONDS, self._land, call, LATER, late)

    def cancel(self, call: Call) -> None:
        """Somebody at the server has had enough of a call. Its caller, who has not, is told so."""
        if not call.closed and not call.recorded:
            call.cancelled = True
            answer = self._failure(call, f"The tool {call.name} was cancelled by an operator.")
            self._answer_early(call, asyncio.CancelledError(), answer, at_once=False)

    def _answer_early(self, call: Call, how: BaseException, answer: bytes, *, at_once: bool = True) -> None:
        """Answer a call that goes on, perhaps, and that nobody waits for any more."""
        if call.trail is not None:
            answer = self._recorded(call, how, answer)
        call.stop(at_once=at_once)
        self.reply(call, answer)

    # The end of a call

    def _settle(self, call: Call, task: asyncio.Task[ToolResult]) -> None:
        if self._tasks is not None:
            self._tasks.discard(task)
        self.reply(call, self.ended(call, _how(task)))

    def ended(self, call: Call, how: How) -> bytes:
        """The answer to a call that has ended, as soon as that is on record; whoever gave it up has answered it."""
        if call.feed is not None:
            try:
                call.feed.ended(call, how)
            except Exception:  # who looks on does not come between
                log.exception("the end of %s could not be shown", call.name)
        answer = LATER if call.cancelled else self._finish(call, how)
        return answer if call.trail is None or call.recorded else self._recorded(call, how, answer)

    def _recorded(self, call: Call, how: How, answer: bytes) -> bytes:
        """What became of a call is on the disk before anybody hears of it (P-15); unless nothing has happened."""
        assert call.trail is not None
        record = recording.ended(call, how)
        call.recorded = True
        if not call.intended:
            call.trail.hand(record)
            return answer
        if answer is not LATER:
            self.hold(call)
        call.trail.hand(record, partial(self._land, call, answer))
        return LATER

    def _land(self, call: Call, answer: bytes, problem: TrailError | None) -> None:
        if problem is not None:
            log.error("the outcome of %s (%s) could not be recorded: %s", call.name, call.serial, problem)
            self.status = 200
            answer = self._failure(call, UNRECORDED % call.name)
        self.reply(call, answer)

    def reply(self, call: Call, answer: bytes | None) -> None:
        if call.over or answer is LATER:
            return
        call.over = True
        self.connection.in_flight.pop(call.id, None)
        if call.timer is not None:
            call.timer.cancel()
        elif self._late is not None:
            self._late.discard(call)
        if call.landing is not None:
            call.landing.set_result(None)
        call.reply(answer)

    def _finish(self, call: Call, how: How) -> bytes:
        """The answer to a call that has ended, however it ended."""
        revision = call.revision
        call.closed = True
        if isinstance(how, BaseException):
            if isinstance(how, Refused):
                how.__traceback__ = None  # which would lead back to here, and only the garbage collector out again
                return self.refusal(revision, call.id, how)
            if (questions := questions_in(how)) is not None:
                return self._input_required(call, questions)
            if isinstance(how, ToolError):  # from middleware; from the tool itself it has become a result already
                how = told(call.name, how)
            elif isinstance(how, asyncio.CancelledError):
                how = failed(f"The tool {call.name} was cancelled.")
            else:
                log.error("tools/call %r failed outside the tool", call.name, exc_info=how)
                return self.refusal(revision, call.id, Refused(Kind.INTERNAL, "Internal error"))
        try:
            answer = self.answer(revision, call.id, revision.result(how, call.entry.wraps))
        except (MsgspecError, ValueError, TypeError, RecursionError) as problem:
            log.error("tool %r returned what cannot be sent: %s", call.name, problem)
            answer = self._failure(call, f"The tool {call.name} returned a value that is not strict JSON.")
        if len(answer) > self.engine.limits.max_message_bytes:
            size, most = len(answer), self.engine.limits.max_message_bytes
            text = f"The result of {call.name} has {size:,} bytes; at most {most:,} can be sent. Ask for less of it."
            hint = "return pages, cut texts with Sanitize(max_text=…), link to a resource, or raise max_message_bytes"
            log.error("tool %r: its result has %s bytes, at most %s can be sent: %s", call.name, size, most, hint)
            answer = self._failure(call, f"{text} (Its author can {hint}.)")
        return answer

    def _failure(self, call: Call, text: str) -> bytes:
        return self.answer(call.revision, call.id, call.revision.result(failed(text), False))

    def give_up(self, known: Call | Subscription) -> None:
        """The peer does not want the answer any more: stop, and say nothing."""
        if isinstance(known, Call):
            known.stop()
            known._flight.reply(known, None)  # over HTTP it came in another one than the news that it is not wanted
        else:
            del self.connection.in_flight[known.id]
            known.reply(None)

    # Input asked for by answer and retry

    def _input_required(self, call: Call, questions: dict[str, InputRequest]) -> bytes:
        expires = int(self.engine.clock()) + STATE_SECONDS
        sent = call.arguments if call.sent is None else call.sent  # what the retry will bring again
        state = self.engine.seal.close(_purpose(call.name, sent), self.principal.id, call.answered, expires)
        asked: Object = {"inputRequests": questions} if questions else {}
        result = {"resultType": "input_required", **asked, "requestState": state}
        return self.answer(call.revision, call.id, result)

    def retried(self, params: Any) -> Object:
        """All answers given so far: those sealed in the state, and those of this round."""
        answers: Object = {} if params.input_responses is UNSET else params.input_responses
        if params.request_state is UNSET:
            return answers
        purpose = _purpose(params.name, params.arguments)
        before = self.engine.seal.open(purpose, self.principal.id, params.request_state, self.engine.clock())
        if type(before) is not dict:
            raise Refused(Kind.BAD_PARAMS, "requestState: not ours, not for this call, or too old; call again without")
        return {**answers, **before}

    # The end of everything

    async def finish(self, grace: float) -> None:
        """Let calls that were accepted end, for as long as `grace`; then give them up."""
        for waiter in self.connection.asked.values():
            if not waiter.done():
                waiter.set_exception(TransportError("the client has gone"))
        self.end_subscriptions()
        if landings := self.landings():
            await asyncio.wait(landings, timeout=grace)
        self.drop()
        if self._tasks:  # whose own clean-up may need what the lifespan is about to close
            await asyncio.wait(self._tasks, timeout=CLEANUP_SECONDS)

    def landings(self) -> list[asyncio.Future[None]]:
        """Of each request that is in flight: done when it is answered."""
        calls = [known for known in self.connection.in_flight.values() if isinstance(known, Call)]
        for call in calls:
            call.landing = call.landing or self.loop.create_future()
        return [*(call.landing for call in calls if call.landing is not None), *(self._waiting or ())]

    def end_subscriptions(self) -> None:
        """Tell every listener that no more will come: by result, and by notification for those who wait for that."""
        for known in list(self.connection.in_flight.values()):
            if isinstance(known, Subscription):
                del self.connection.in_flight[known.id]
                result = {"resultType": "complete", "_meta": {SUBSCRIPTION: known.id}}
                known.reply(self.answer(known.revision, known.id, result))
                self.outlet.send(jsonrpc.notification(CANCELLED, {"requestId": known.id}))

    def drop(self) -> None:
        """Give up whatever is still running; the peer hears nothing more."""
        for known in list(self.connection.in_flight.values()):
            self.give_up(known)
        for task in self._waiting or ():
            task.cancel()

    # Answers

    def answer(self, revision: Revision, ident: Id, result: Object) -> bytes:
        if revision.stamp is not None and self.engine.identify:
            result = revision.stamp(result, self.engine.identity)
        return jsonrpc.answer(ident, result)

    def refusal(self, revision: Revision, ident: Id | UnsetType, refused: Refused) -> bytes:
        sanitizer = self.engine.gate.sanitizer
        if sanitizer is not None:
            refused.text = sanitizer.text(refused.text)
            refused.data = None if refused.data is None else sanitizer.value(refused.data)
        form = RESULT if refused.readable else self.engine.forms.get(refused.kind) or revision.faults[refused.kind]
        self.status = form.status
        self.retry_after = refused.retry_after
        if form.code:
            return revision.error(ident, form.code, refused)
        told = failed(refused.prefix + refused.text)
        if refused.readable:
            told.meta = {REFUSED: refused.kind.value}
        return self.answer(revision, "" if ident is UNSET else ident, revision.result(told, False))


def _arm_all(late: set[Call | None]) -> None:
    for call in late:
        if call is not None:
            call._flight._arm(call)
    late.clear()


def _how(task: asyncio.Task[ToolResult]) -> How:
    try:
        return task.result()
    except BaseException as problem:
        return problem


def _purpose(name: str, arguments: Object) -> str:
    """What a request state is good for: this call, with these arguments."""
    return f"tools/call {blake2b(encode_sorted([name, arguments]), digest_size=16).hexdigest()}"
