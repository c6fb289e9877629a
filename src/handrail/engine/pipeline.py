"""The guards around a call, in their order: `admit` before anything has happened, `execute` once it may.

`admit` charges the limits, validates the arguments and decides. It is a plain function: only a call that waits, for a
person or for limits in a store, goes on in a coroutine. Between the two halves the intent of an audited call is written
to disk. `execute` runs the tool, checks its output and sanitizes the result. Middleware goes around both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from time import perf_counter_ns
from typing import Any

from msgspec import UNSET

from handrail.engine.call import Call
from handrail.engine.call_state import CallState, SlotHolder
from handrail.engine.eager import ThreadPool
from handrail.engine.guard_set import GuardSet
from handrail.engine.input_requests import questions_in
from handrail.engine.results import error_result, failure_result, mark_dangerous, to_result
from handrail.errors import Refused, ResourceNotFound, ToolError
from handrail.model import ToolResult

log = logging.getLogger("handrail")

Handler = Callable[[Call], Coroutine[Any, Any, ToolResult]]
Middleware = Callable[[Call, Handler], Awaitable[ToolResult]]


class Pipeline:
    """The way of a call through the guards of one server."""

    def __init__(self, thread_pool: ThreadPool, guards: GuardSet) -> None:
        self._thread_pool = thread_pool
        self._guards = guards

    def admit(
        self, call: CallState, holder: SlotHolder, *, is_charged: bool = False
    ) -> Coroutine[Any, Any, None] | None:
        """Admit a call, or raise what refuses it; the rest of the admission as a coroutine, if it has to wait."""
        entry, guards, marks = call.entry, self._guards, call.marks
        if marks is not None and not is_charged:
            marks.append(perf_counter_ns())
        if guards.limiter is not None and not is_charged:
            take, address = guards.limiter.take, call.peer.address
            if guards.shares is not None:
                charge_call = partial(take, call.principal.id, entry.limit_name, address)
                slot = guards.take_share_and_slot(call, charge_call)
            else:
                charge = take(call.principal.id, entry.limit_name, address)
                slot = None if charge is None else guards.take_charged(call, charge)
            if slot is not None:
                if isinstance(slot, Awaitable):
                    return self._admit_when_charged(call, holder, slot)
                holder.release = slot
        if marks is not None:
            marks.append(perf_counter_ns())
        if not entry.input.valid(call.arguments):
            guards.repair(call)
        if marks is not None:
            marks.append(perf_counter_ns())
        if guards.must_decide(entry) and guards.needs_approval(call):
            return self._obtain_approval(call, holder)
        if marks is not None:
            marks.append(perf_counter_ns())
        return None

    async def _admit_when_charged(
        self, call: CallState, holder: SlotHolder, slot: Awaitable[Callable[[], None] | None]
    ) -> None:
        holder.release = await slot
        approval = self.admit(call, holder, is_charged=True)
        if approval is not None:
            await approval

    async def _obtain_approval(self, call: CallState, holder: SlotHolder) -> None:
        """Wait for a person, without a concurrency slot meanwhile."""
        holder.release_slot()
        await self._guards.obtain_approval(call)
        holder.release = await self._guards.reenter(call)
        if call.marks is not None:
            call.marks.append(perf_counter_ns())

    async def complete(
        self, call: CallState, holder: SlotHolder, admission: Coroutine[Any, Any, None] | None
    ) -> ToolResult:
        """Go on after `admit` in one coroutine: for a call whose admission waits, and inside middleware."""
        if admission is not None:
            await admission
        if call.trail is not None or call.approval is not None:
            await self._guards.record_intent(call)
        return await self.execute(call, holder)

    async def handle(self, call: Call) -> ToolResult:
        """Admit and execute: what the innermost middleware calls, once or several times, also side by side."""
        state, holder = call._state, SlotHolder()
        if state.marks is not None:
            del state.marks[1:]  # of an earlier run, which counts as middleware
        try:
            return await self.complete(state, holder, self.admit(state, holder))
        finally:
            holder.release_slot()

    async def execute(self, call: CallState, holder: SlotHolder) -> ToolResult:
        """Run the tool of an admitted call, and return its result as it may leave."""
        entry = call.entry
        if call.marks is not None:
            call.marks.append(perf_counter_ns())
        value: Any = None
        try:
            try:
                if entry.mode == "async":
                    value = await entry.invoke(call.arguments, Call(call))
                elif entry.mode == "inline":
                    value = entry.invoke(call.arguments, Call(call))
                else:
                    ended, holder.release = holder.release, None  # a thread keeps the slot until the tool returns
                    value = await self._thread_pool.run(_invoke_in_thread, call, ended=ended)
                result = to_result(entry, value)
            except BaseException as problem:
                if call.approval is not None and questions_in(problem) is not None:
                    await self._guards.reissue_approval(call)
                result = _failure(call, problem)
            settled = self._settle(call, value, result)
            return settled if isinstance(settled, ToolResult) else await settled
        finally:
            if holder.release is not None:
                holder.release_slot()

    def execute_inline(self, call: CallState) -> ToolResult | Coroutine[Any, Any, ToolResult]:
        """Run an `inline` tool without a task; a coroutine if its result has to wait."""
        if call.marks is not None:
            call.marks.append(perf_counter_ns())
        value: Any = None
        try:
            value = call.entry.invoke(call.arguments, Call(call))
            result = to_result(call.entry, value)
        except BaseException as problem:
            result = _failure(call, problem)
        return self._settle(call, value, result)

    def _settle(self, call: CallState, value: Any, result: ToolResult) -> ToolResult | Coroutine[Any, Any, ToolResult]:
        """Sanitize a result, after the notifications that the tool did not await."""
        if call.unsent:
            return self._settle_after_notifications(call, value, result)
        guards, name, marks = self._guards, call.entry.limit_name, call.marks
        if marks is not None:
            marks.append(perf_counter_ns())
        mirrored = result.structured is not UNSET and not isinstance(value, ToolResult)
        if call.repairs or (guards.sanitizer is not None and not guards.sanitizer.is_clean(name, result, mirrored)):
            # A trusted tool returns what was sanitized before it was cut.
            sanitized = guards.sanitize_result(
                call, result, is_clean=call.entry.trusted_output, is_doubtful=not call.repairs
            )
            if not isinstance(sanitized, ToolResult):
                return self._settle_when_sanitized(call, sanitized)
            result = sanitized
        if marks is not None:
            marks.append(perf_counter_ns())
        return result

    async def _settle_after_notifications(self, call: CallState, value: Any, result: ToolResult) -> ToolResult:
        await asyncio.wait(call.unsent)
        settled = self._settle(call, value, result)
        return settled if isinstance(settled, ToolResult) else await settled

    async def _settle_when_sanitized(self, call: CallState, sanitized: Awaitable[ToolResult]) -> ToolResult:
        result = await sanitized
        if call.marks is not None:
            call.marks.append(perf_counter_ns())
        return result


def _failure(call: CallState, problem: BaseException) -> ToolResult:
    """Return the result of a tool that failed; raise what ends the call in another way."""
    name = call.entry.tool.name
    if isinstance(problem, ResourceNotFound) and call.entry.kind == "resource":
        raise problem
    if isinstance(problem, ToolError):
        return mark_dangerous(call.entry, failure_result(name, problem))
    is_end = isinstance(problem, Refused | asyncio.CancelledError | GeneratorExit)
    if is_end or questions_in(problem) is not None:
        raise problem
    # The text of an exception may hold anything: it goes only into the log.
    suffix = "" if call.trace is None else f" in trace {call.trace.trace_id}"
    log.error("%s %r failed%s", call.entry.kind, name, suffix, exc_info=problem)
    return error_result(f"The {call.entry.kind} {name} failed unexpectedly; the server's log has the details.")


def _invoke_in_thread(call: CallState) -> Any:
    """Invoke a tool in a thread, unless its call was cancelled while it waited for one."""
    if call.cancelled:
        raise asyncio.CancelledError
    return call.entry.invoke(call.arguments, Call(call))


def compose(middleware: list[Middleware], pipeline: Pipeline, guards: GuardSet) -> Handler:
    """Put middleware around a pipeline, the first one outermost; the result it returns is sanitized as well."""
    inner: Handler = pipeline.handle
    for each in reversed(middleware):
        inner = _around(each, inner)

    async def handle(call: Call) -> ToolResult:
        state = call._state
        try:
            result = to_result(state.entry, await inner(call))  # middleware may have changed it
        except ToolError as failure:
            result = _failure(state, failure)
        if guards.sanitizer is None:
            return result
        sanitized = guards.sanitize_result(state, result)  # also an unchanged one: its parts may have changed
        return sanitized if isinstance(sanitized, ToolResult) else await sanitized

    return handle


def _around(middleware: Middleware, inner: Handler) -> Handler:
    async def handle(call: Call) -> ToolResult:
        try:
            result = await middleware(call, inner)
        except (SystemExit, KeyboardInterrupt) as problem:  # these would leave the loop, and end the server
            raise RuntimeError("middleware tried to end the process") from problem
        if not isinstance(result, ToolResult):
            raise TypeError(f"middleware {middleware!r} gave {type(result).__name__}, not a ToolResult")
        return result

    return handle
