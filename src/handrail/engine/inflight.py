"""In-flight calls: idle and total timeouts, exactly one reply, cancellation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextvars import copy_context
from functools import partial
from hashlib import blake2b
from time import perf_counter_ns
from typing import Any

from msgspec import MsgspecError

from handrail import jsonrpc
from handrail.audit.format import TrailError
from handrail.engine.call import Call
from handrail.engine.call_state import STAGES, CallState, ResultOrError
from handrail.engine.core import Engine
from handrail.engine.eager import Start, starter
from handrail.engine.input_requests import questions_in
from handrail.engine.outcome import CallEnd, end_of, outcome_record
from handrail.engine.reply_channel import NO_REPLY, Reply
from handrail.engine.resources import unknown_resource
from handrail.engine.results import error_result, failure_result
from handrail.errors import Kind, Refused, ResourceNotFound, ToolError
from handrail.guards.sanitize import Finding
from handrail.jsonrpc import Id, encode_sorted
from handrail.model import InputRequest, Json, Object, ToolResult
from handrail.protocol.connection import CANCELLED

log = logging.getLogger("handrail")

STATE_SECONDS = 3600
TIMER_DELAY_SECONDS = 0.02  # before a call gets a timer; most have ended by then
SLOW_SECONDS = 0.5  # in one step of a tool, while the event loop does nothing else
WARN_AGAIN_SECONDS = 60.0
RECORD_SECONDS = 5.0  # for the audit record of a call that timed out
UNRECORDED = "%s was carried out, but what came of it could not be recorded and is withheld. Do not simply repeat it."

_MARKS_WHEN_RUNNING = STAGES.index("run") + 1  # marks of a call whose tool runs


class InFlightCalls:
    """The calls of all peers of a server: timeouts, exactly one reply each, cancellation."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.loop = loop
        self.tasks: dict[asyncio.Task[Any], CallState] = {}  # calls that wait, and cancelled ones that clean up
        self.start_task: Start = starter(loop)
        self._untimed_calls: set[CallState | None] = set()  # without a timer yet; None: they get theirs soon
        self._blocking_warnings: dict[str, float] = {}  # time of the last warning, by tool

    @classmethod
    def of(cls, engine: Engine) -> InFlightCalls:
        """Return the calls of a server on the running event loop."""
        calls, loop = engine.in_flight, asyncio.get_running_loop()
        if calls is None or calls.loop is not loop:
            calls = engine.in_flight = cls(engine, loop)
        return calls

    def begin(self, call: CallState) -> Reply | Coroutine[Any, Any, ToolResult] | None:
        """Admit a call. Return its reply, the coroutine that runs it, or None: `call.reply` gets the reply later."""
        engine, pipeline = self.engine, self.engine.pipeline
        if engine.guard_set.audits:
            engine.guard_set.start_record(call)
        call.context = context = copy_context()
        if engine.sinks:
            call.sinks, call.marks = engine.sinks, call.marks or [perf_counter_ns()]
            for sink in call.sinks:
                try:
                    context.run(sink.on_start, call)
                except Exception:  # an observer must not keep a call from running
                    log.exception("calls: the start of tool %r was not observed", call.name)
        if engine.middleware or call.entry.via:
            return engine.handler_of(call.entry)(Call(call))
        try:
            admission = context.run(pipeline.admit, call, call)
            if admission is not None:
                return pipeline.complete(call, call, admission)
            if call.trail is not None:
                engine.guard_set.submit_intent(call, partial(self._on_intent_written, call))
        except BaseException as problem:
            return self.finish_call(call, problem)
        if call.trail is None:
            return self._execute_inline(call) if call.entry.mode == "inline" else pipeline.execute(call, call)
        if not call.is_answered:
            self.register(call)
        return None

    def _execute_inline(self, call: CallState) -> Reply | Coroutine[Any, Any, ToolResult] | None:
        """Run an `inline` tool. Return its reply, or a coroutine if the result has to wait."""
        assert call.context is not None
        try:
            result = call.context.run(self.engine.pipeline.execute_inline, call)
        except BaseException as problem:
            return self.finish_call(call, problem)
        return self.finish_call(call, result) if isinstance(result, ToolResult) else result

    def _on_intent_written(self, call: CallState, problem: TrailError | None) -> None:
        """Execute a call whose intent is on disk."""
        if not call.intent_pending:  # cancelled meanwhile
            return
        call.intent_pending = False
        if problem is not None:
            self.reply(call, self.finish_call(call, self.engine.guard_set.intent_failed(call, problem)))
            return
        is_inline = call.entry.mode == "inline"
        begun = self._execute_inline(call) if is_inline else self.engine.pipeline.execute(call, call)
        self.reply(call, begun if begun is None or isinstance(begun, Reply) else self.run(call, begun))

    def run(self, call: CallState, coroutine: Coroutine[Any, Any, ToolResult]) -> Reply | None:
        """Run a call in a task of its own. Return its reply, or None if `call.reply` gets that later."""
        loop = self.loop
        began = loop.time()
        task = self.start_task(coroutine, call.context)
        if loop.time() - began > SLOW_SECONDS:
            self._warn_of_blocking(call, loop.time() - began)
        if task.done():
            return self.finish_call(call, _result_of(task))
        call.task = task
        self.tasks[task] = call
        task.add_done_callback(partial(self._on_task_done, call))
        self.register(call)
        return None

    def _warn_of_blocking(self, call: CallState, seconds: float) -> None:
        """Log the name of a tool that held the event loop; once a minute for each tool."""
        now = self.loop.time()
        if (
            call.entry.mode == "async"
            and now - self._blocking_warnings.get(call.entry.limit_name, -WARN_AGAIN_SECONDS) >= WARN_AGAIN_SECONDS
        ):
            self._blocking_warnings[call.entry.limit_name] = now
            log.warning(
                "%s %r held the event loop for %.1f s, and no other call went on: await what takes long"
                " (asyncio.sleep in place of time.sleep), or make it `def`, which runs in a thread",
                call.entry.kind,
                call.entry.limit_name,
                seconds,
            )

    # Messages to the peer

    async def notify(self, call: CallState, message: bytes) -> None:
        if not call.closed:
            if call.activity is not None:
                call.activity.record_message("out", message)
            call.reply_channel.send(message)
            await call.reply_channel.drain()

    async def request_input(self, call: CallState, request: InputRequest) -> Object:
        if call.closed:
            raise asyncio.CancelledError
        if not call.reply_channel.two_way:
            raise Refused(Kind.NEEDS_CAPABILITY, "The client cannot be asked: it does not accept text/event-stream")
        waiter: asyncio.Future[Object] = self.loop.create_future()
        request_id, message = call.peer.connection.create_request(request.method, request.params, waiter)
        call.reply_channel.send(message)
        call.questions |= {request_id}
        if call.activity is not None:
            call.activity.record_message("out", message)
        try:
            return await waiter
        finally:
            self.cancel_input_request(call, request_id)

    def cancel_input_request(self, call: CallState, request_id: Id) -> None:
        """Cancel a request to the client that has no response yet."""
        pending = call.peer.connection.pending
        if pending.pop(request_id, None) is not None and CANCELLED in call.revision.notifications:
            call.reply_channel.send(jsonrpc.notification(CANCELLED, {"requestId": request_id}))

    def close_stream(self, call: CallState) -> None:
        """Close the response stream of a call, if it has one; the client resumes it for the rest."""
        if call.revision.priming_event:  # without an event id the client could not resume
            call.reply_channel.pause()

    # Timeouts

    def register(self, call: CallState) -> None:
        """Add a call to those in flight. Its timeouts begin now; it gets a timer if it runs longer than a moment."""
        in_flight, entry = call.peer.connection.in_flight, call.entry
        if in_flight.get(call.id) is call:
            return
        in_flight[call.id] = call
        call.last_activity = now = self.loop.time()
        if call.deadline_at is None:
            call.deadline_at = now + entry.total
        if entry.idle <= TIMER_DELAY_SECONDS or entry.total <= TIMER_DELAY_SECONDS:
            self._set_timer(call)
            return
        untimed_calls = self._untimed_calls
        if not untimed_calls:
            self.loop.call_later(TIMER_DELAY_SECONDS, self._set_timers)
            untimed_calls.add(None)
        untimed_calls.add(call)

    def _set_timers(self) -> None:
        for call in self._untimed_calls:
            if call is not None:
                self._set_timer(call)
        self._untimed_calls.clear()

    def _set_timer(self, call: CallState) -> None:
        since = self.loop.time() if call.waiting else call.last_activity
        call.timer = self.loop.call_at(min(since + call.entry.idle, call.deadline), self._on_timer, call)

    def _on_timer(self, call: CallState) -> None:
        now = self.loop.time()
        if now >= call.deadline:
            self._time_out(call, f"took longer than {call.entry.total:g} s")
        elif not call.waiting and now - call.last_activity >= call.entry.idle:
            self._time_out(call, f"gave no sign of life for {call.entry.idle:g} s")
        else:
            self._set_timer(call)

    def _time_out(self, call: CallState, reason: str) -> None:
        log.warning("%s %r %s; given up", call.entry.kind, call.name, reason)
        if call.recorded:  # or the record is being written: the disk is late
            self._on_recorded(call, None, TrailError("it takes too long"))
            return
        call.timed_out = call.cancelled = True
        verdict = " (the outcome is unknown)" if call.entry.upstream else ""
        refused = Refused(Kind.TIMEOUT, f"The {call.entry.kind} {call.name} {reason}{verdict}.")
        reply = self.engine.encode_refusal(call.revision, call.id, refused, method=call.entry.method)
        self._reply_early(call, TimeoutError(), reply)
        if not call.is_answered:  # it waits for the audit record; the disk may be late
            timeout_error = TrailError("it takes too long")
            call.timer = self.loop.call_later(RECORD_SECONDS, self._on_recorded, call, None, timeout_error)

    def cancel(self, call: CallState) -> None:
        """Cancel a call on behalf of an operator, and tell its caller."""
        if not call.closed and not call.recorded:
            call.cancelled = True
            reply = self._encode_failure(call, f"The {call.entry.kind} {call.name} was cancelled by an operator.")
            self._reply_early(call, asyncio.CancelledError(), reply, at_once=False)

    def _cancel_work(self, call: CallState, *, at_once: bool = True) -> None:
        """End the work of a call that was cancelled.

        Not `at_once`: a thread that runs the tool is waited for, so that its outcome is recorded.
        """
        call.cancelled = call.closed = True
        for request_id in call.questions:
            self.cancel_input_request(call, request_id)
        for future in call.blocking_futures:
            future.cancel()
        in_thread = call.entry.mode == "thread" and call.marks is not None and len(call.marks) == _MARKS_WHEN_RUNNING
        if call.task is not None and (at_once or not in_thread):
            call.task.cancel()
        elif call.intent_pending:
            call.intent_pending = False
            self.reply(call, self.finish_call(call, asyncio.CancelledError()))

    def _reply_early(self, call: CallState, error: BaseException, early: Reply, *, at_once: bool = True) -> None:
        """Reply to a call that was cancelled, whose tool may still run."""
        reply = early if call.trail is None else self._record_outcome(call, end_of(call, error), early)
        self._cancel_work(call, at_once=at_once)
        self.reply(call, reply)

    # The end of a call

    def _on_task_done(self, call: CallState, task: asyncio.Task[ToolResult]) -> None:
        del self.tasks[task]
        self.reply(call, self.finish_call(call, _result_of(task)))

    def finish_call(self, call: CallState, result: ResultOrError) -> Reply | None:
        """Return the reply to a call that has ended. None: it comes with the audit record, or was sent already."""
        if call.release is not None:
            call.release_slot()
        if isinstance(result, ResourceNotFound) and call.entry.kind == "resource":
            result = unknown_resource(call.entry.requested_uri or call.name)
        end = end_of(call, result) if call.marks is not None else None
        reply = None if call.cancelled else self._encode_outcome(call, result)
        if end is not None:
            if call.is_unsendable:
                end.outcome = "tool_error"
            if call.trail is not None and not call.recorded:
                reply = self._record_outcome(call, end, reply)
            for sink in call.sinks:
                try:
                    sink.on_end(call, end, None if reply is None else reply.body)
                except Exception:  # an observer must not come between a call and its answer
                    log.exception("calls: the end of tool %r was not observed", call.name)
        return reply

    def _record_outcome(self, call: CallState, end: CallEnd, reply: Reply | None) -> Reply | None:
        """Record the outcome of a call. The reply waits until it is on disk (P-15), unless the tool did not run."""
        assert call.trail is not None
        record = outcome_record(call, end)
        call.recorded = True
        if not call.intended:
            call.trail.submit(record)
            return reply
        if reply is not None:
            self.register(call)
        call.trail.submit(record, partial(self._on_recorded, call, reply))
        return None

    def _on_recorded(self, call: CallState, reply: Reply | None, problem: TrailError | None) -> None:
        if problem is not None:
            log.error("the outcome of %s (%s) could not be recorded: %s", call.name, call.serial, problem)
            reply = self._encode_failure(call, UNRECORDED % call.name)
        self.reply(call, reply)

    def reply(self, call: CallState, reply: Reply | None) -> None:
        if call.is_answered or reply is None:
            return
        call.is_answered = True
        call.peer.connection.in_flight.pop(call.id, None)
        if call.timer is not None:
            call.timer.cancel()
        elif self._untimed_calls:
            self._untimed_calls.discard(call)
        if call.reply_future is not None:
            call.reply_future.set_result(None)
        if call.activity is not None:
            call.activity.record_answer(reply.body or None)
        call.reply(reply)

    def _encode_outcome(self, call: CallState, result: ResultOrError) -> Reply:
        """Return the reply to a call that has ended in a result or an exception."""
        revision = call.revision
        call.closed = True
        if isinstance(result, BaseException):
            if isinstance(result, Refused):
                result.__traceback__ = None  # it refers to this frame: a cycle for the garbage collector
                return self.engine.encode_refusal(revision, call.id, result, method=call.entry.method)
            if (questions := questions_in(result)) is not None:
                return self._input_required(call, questions)
            if isinstance(result, ToolError):  # raised by middleware; one of the tool is a result by now
                result = failure_result(call.name, result)
            elif isinstance(result, asyncio.CancelledError):
                result = error_result(f"The {call.entry.kind} {call.name} was cancelled.")
            else:
                log.error("%s %r failed outside the %s", call.entry.method, call.name, call.entry.kind, exc_info=result)
                return self.engine.encode_refusal(revision, call.id, Refused(Kind.INTERNAL, "Internal error"))
        entry = call.entry
        if result.is_error and entry.kind != "tool":
            return self._encode_failure(call, result.text, result.data)
        try:
            encoder = revision.encoders[entry.method]
            if entry.kind == "tool":
                encoded = encoder(result, entry.wraps)
            else:
                encoded = encoder(*entry.encoder_arguments(self.engine, result))
            reply = self.engine.encode_response(revision, call.id, encoded)
        except (MsgspecError, ValueError, TypeError, RecursionError) as problem:
            log.error("%s %r returned what cannot be sent: %s", entry.kind, call.name, problem)
            call.is_unsendable = True
            reply = self._encode_failure(
                call, f"The {entry.kind} {call.name} returned a value that is not strict JSON."
            )
        if len(reply.body) > self.engine.limits.max_message_bytes:
            size, most = len(reply.body), self.engine.limits.max_message_bytes
            text = f"The result of {call.name} has {size:,} bytes; at most {most:,} can be sent. Ask for less of it."
            hint = "return pages, cut texts with Sanitize(max_text=…), link to a resource, or raise max_message_bytes"
            log.error("%s %r: its result has %s bytes, at most %s: %s", entry.kind, call.name, size, most, hint)
            call.is_unsendable = True
            reply = self._encode_failure(call, f"{text} (Its author can {hint}.)")
        return reply

    def _encode_failure(self, call: CallState, text: str, data: Object | None = None) -> Reply:
        if call.entry.kind != "tool":
            refused = Refused(Kind.FAILED, text, data or None)
            return self.engine.encode_refusal(call.revision, call.id, refused, method=call.entry.method)
        return self.engine.encode_response(
            call.revision, call.id, call.revision.encoders["tools/call"](error_result(text), False)
        )

    def abandon(self, call: CallState) -> None:
        """Cancel a call of this peer without a reply."""
        self._cancel_work(call)
        self.reply(call, NO_REPLY)

    async def sanitize_message(self, params: Object) -> tuple[Json, Sequence[Finding]]:
        return await self.engine.guard_set.sanitize_message(params)

    # Input by reply and retry

    def _input_required(self, call: CallState, questions: dict[str, InputRequest]) -> Reply:
        expires = int(self.engine.clock()) + STATE_SECONDS
        sent = call.arguments if call.sent is None else call.sent  # the retry brings these again
        state = self.engine.seal.seal(
            state_purpose(call.entry.method, call.name, sent), call.principal.id, call.answered, expires
        )
        asked: Object = {"inputRequests": questions} if questions else {}
        result = {"resultType": "input_required", **asked, "requestState": state}
        return self.engine.encode_response(call.revision, call.id, result)


def _result_of(task: asyncio.Task[ToolResult]) -> ResultOrError:
    try:
        return task.result()
    except BaseException as problem:
        return problem


def state_purpose(method: str, name: str, arguments: Object) -> str:
    """Return what a request state is bound to: this tool, resource or prompt with these arguments."""
    return f"{method} {blake2b(encode_sorted([name, arguments]), digest_size=16).hexdigest()}"
