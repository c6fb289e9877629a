"""The order of things around running a tool. It is fixed because it is a security property.

Nobody is asked to approve arguments that are not valid; nothing runs before it was agreed to and that is on record;
nothing leaves that breaks its own schema or was not cleaned; whatever a tool does ends in a result. What users add goes
around the whole, as middleware; the outcome is recorded when all of that is over (`flight.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

from msgspec import UNSET, MsgspecError
from msgspec.json import decode as parse

from handrail.engine.call import Call
from handrail.engine.catalog import ToolEntry
from handrail.engine.driving import NEEDS_TASK
from handrail.engine.guard_set import GuardSet
from handrail.engine.input_requests import questions_in
from handrail.engine.thread_pool import ThreadPool
from handrail.engine.truncation import read_more
from handrail.errors import Refused, ToolError
from handrail.jsonrpc import encode
from handrail.model import RISK, Audio, Block, EmbeddedResource, Image, Json, ResourceLink, Text, ToolResult, Violation
from handrail.schema.jsonable import NotJson, to_jsonable
from handrail.suggest import collection

log = logging.getLogger("handrail")

Handler = Callable[[Call], Coroutine[Any, Any, ToolResult]]
Middleware = Callable[[Call, Handler], Awaitable[ToolResult]]

_BLOCKS = (Text, Image, Audio, ResourceLink, EmbeddedResource)


def pipeline(thread_pool: ThreadPool, guards: GuardSet) -> Handler:
    """The guards of a server, in their order."""

    async def run(call: Call) -> ToolResult:
        entry, release, marks = call.entry, None, call.marks
        if marks is not None:
            marks.append(perf_counter_ns())
        if guards.limiter is not None:
            take = guards.limiter.take
            if guards.shares is not None:
                charge_call = partial(take, call.principal.id, entry.tool.name, call.address)
                release = await guards.enter_with_share(call, charge_call)
            elif (charge := take(call.principal.id, entry.tool.name, call.address)) is not None:
                release = await guards.enter(call, charge)
        try:
            if marks is not None:
                marks.append(perf_counter_ns())
            if not entry.input.valid(call.arguments):
                guards.repair(call)
            if marks is not None:
                marks.append(perf_counter_ns())
            if guards.must_decide(entry) and guards.needs_approval(call):
                if release is not None:
                    release()
                    release = None
                await guards.obtain_approval(call)
                release = await guards.reenter(call)
            if marks is not None:
                marks.append(perf_counter_ns())
            if call.trail is not None or call.approval is not None:
                await guards.record_intent(call)
            if marks is not None:
                marks.append(perf_counter_ns())
            value: Any = None
            try:
                if entry.mode == "async":
                    value = await entry.invoke(call.arguments, call)
                elif entry.mode == "inline":
                    value = entry.invoke(call.arguments, call)
                else:
                    ended, release = release, None  # a thread that nobody waits for any more still has its place
                    value = await thread_pool.run(_invoke_in_thread, call, ended=ended)
                result = to_result(entry, value)
            except ToolError as failure:
                result = _mark_dangerous(entry, failure_result(entry.tool.name, failure))
            except (Refused, asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as problem:
                if questions_in(problem) is not None:
                    await guards.reissue_approval(call)
                    raise
                # The text of an exception may hold anything; only the log gets it.
                log.exception("tool %r failed%s", entry.tool.name, _trace_suffix(call))
                result = error_result(
                    f"The tool {entry.tool.name} failed unexpectedly; the server's log has the details."
                )
            if call.unsent:  # notifications come before the answer, also those the tool did not await
                if call.driver is not None:
                    await NEEDS_TASK
                await asyncio.wait(call.unsent)
            if marks is not None:
                marks.append(perf_counter_ns())
            mirrored = result.structured is not UNSET and not isinstance(value, ToolResult)
            if call.repairs or (
                guards.sanitizer is not None and not guards.sanitizer.is_clean(entry.tool.name, result, mirrored)
            ):
                # What can be read on was cleaned before it was cut.
                result = await guards.sanitize_result(
                    call, result, is_clean=entry.invoke is read_more, is_doubtful=not call.repairs
                )
                if guards.truncated_results is not None and guards.truncated_results.unsaved:
                    await guards.save_remainder(call, result)
            if marks is not None:
                marks.append(perf_counter_ns())
            return result
        finally:
            if release is not None:
                release()

    return run


def _invoke_in_thread(call: Call) -> Any:
    """In a thread. Whoever cancelled the call while it waited for one has been told that it was."""
    if call.cancelled:
        raise asyncio.CancelledError
    return call.entry.invoke(call.arguments, call)


def failure_result(name: str, failure: ToolError) -> ToolResult:
    """A failure in the words of whoever raised it."""
    try:
        return ToolResult([Text(failure.text)], is_error=True, data=to_jsonable(failure.data))
    except BaseException as problem:  # of its own methods; some would leave the loop, and end the server
        log.error("tool %r: the data of a ToolError cannot be sent: %r", name, problem)
        return error_result(failure.text)


def compose(middleware: list[Middleware], inner: Handler, guards: GuardSet) -> Handler:
    """Middleware around a handler, the first one outermost; what it makes of a result is cleaned as well."""
    for each in reversed(middleware):
        inner = _around(each, inner)

    async def handle(call: Call) -> ToolResult:
        try:
            result = to_result(call.entry, await inner(call))  # whatever was made of it: it keeps its promises
        except ToolError as failure:
            result = failure_result(call.name, failure)
        if guards.sanitizer is not None:  # also what comes back as it went: there may be more in it by now
            result = await guards.sanitize_result(call, result)
            if guards.truncated_results is not None and guards.truncated_results.unsaved:
                await guards.save_remainder(call, result)
        return result

    return handle if middleware else inner


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


def _trace_suffix(call: Call) -> str:
    return "" if call.trace is None else f" in trace {call.trace.trace_id}"


def error_result(text: str) -> ToolResult:
    return ToolResult([Text(text)], is_error=True)


def to_result(entry: ToolEntry, value: Any) -> ToolResult:
    """What a tool returned, as a result that keeps its promises."""
    schema = entry.output
    if type(value) is str and schema is None:
        result = ToolResult([Text(value)])
    else:
        try:
            result = (
                _normalize_result(value) if isinstance(value, ToolResult) else _wrap_value(value, schema is not None)
            )
            if schema is not None and not result.is_error:
                if result.structured is UNSET:
                    raise _OutputMismatch("no structured content")
                if not schema.valid(result.structured):
                    problems = schema.problems(result.structured)
                    raise _OutputMismatch("; ".join(each.text for each in problems), problems)
        except _OutputMismatch as problem:
            log.error("tool %r broke its output schema: %s", entry.tool.name, problem)
            return error_result(
                f"The tool {entry.tool.name} returned output that does not fit its own schema{problem.locations}."
            )
        except NotJson as problem:
            log.error("tool %r returned what cannot be sent: %s", entry.tool.name, problem)
            return error_result(f"The tool {entry.tool.name} returned a value that cannot be sent: {problem}")
        except BaseException:  # of the value's own methods; its text is not for the peer either
            log.exception("tool %r returned what cannot be sent", entry.tool.name)
            return error_result(f"The tool {entry.tool.name} returned a value that cannot be sent.")
    return result if entry.dangerous is UNSET and not result.risk else _mark_dangerous(entry, result)


def _mark_dangerous(entry: ToolEntry, result: ToolResult) -> ToolResult:
    reason = result.risk or entry.dangerous
    if reason is not UNSET:
        meta = {} if result.meta is UNSET else result.meta
        result.meta = {**meta, RISK: {"level": "dangerous", "reason": reason}}
    return result


class _OutputMismatch(Exception):
    """Output that is not what the tool's schema promises. `locations` names members and rules, never values."""

    def __init__(self, text: str, problems: Sequence[Violation] = ()) -> None:
        super().__init__(text)
        locations = [f"{each.path or 'the whole'} ({each.keyword})" for each in problems if each.keyword]
        self.locations = f" at {', '.join(dict.fromkeys(locations))}" if locations else ""


def _wrap_value(value: Any, structured: bool) -> ToolResult:
    if not structured:
        if value is None or value == []:
            return ToolResult([])
        if isinstance(value, str):
            return ToolResult([Text(str.__str__(value))])
        if isinstance(value, _BLOCKS):
            return _normalize_result(ToolResult([value]))
        if isinstance(value, list | tuple) and any(isinstance(item, _BLOCKS) for item in value):
            return _normalize_result(ToolResult([Text(item) if isinstance(item, str) else item for item in value]))
    data = to_jsonable(value)
    return ToolResult([Text(encode(data).decode())], data)


def _normalize_result(result: ToolResult) -> ToolResult:
    """A copy whose parts are strict JSON, with the structured data also as text, for clients that read only that."""
    try:
        content = collection("ToolResult.content", result.content, "blocks such as Text(…)")
    except TypeError as problem:
        raise NotJson(str(problem)) from None
    for block in content:
        if not isinstance(block, _BLOCKS):
            raise NotJson(f"ToolResult.content: {type(block).__name__} is not a content block")
        for name in ("annotations", "meta", "resource", "icons"):
            part = getattr(block, name, UNSET)
            if part is not UNSET:
                to_jsonable(part)
    structured: Json = UNSET
    if result.structured is not UNSET:
        structured = to_jsonable(result.structured)
        if not any(_has_value(block, structured) for block in content):
            content.append(Text(encode(structured).decode()))
    meta = UNSET if result.meta is UNSET else to_jsonable(result.meta)
    data = to_jsonable(result.data) if result.data else {}
    return ToolResult(content, structured, result.is_error, meta, data, str(result.risk))


def _has_value(block: Block, value: Json) -> bool:
    try:
        return type(block) is Text and bool(parse(block.text) == value)
    except MsgspecError:
        return False
