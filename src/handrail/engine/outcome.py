"""How calls end, in a word; and counted, where somebody wants to know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter_ns

from handrail.engine.call import Call
from handrail.engine.catalog import Catalog
from handrail.engine.input_requests import questions_in
from handrail.engine.pipeline import Handler
from handrail.errors import Kind, Refused, ToolError
from handrail.jsonrpc import Request
from handrail.metrics import Metrics
from handrail.model import Principal, ToolResult

Observer = Callable[[Handler], Handler]
"""Goes around a whole call, middleware included. It looks on: results and exceptions pass unchanged."""


def outcome_of(call: Call, result: ToolResult | BaseException) -> str:
    """`ok`, `tool_error`, `cancelled`, `timeout`, `input_required`, or the kind of a refusal."""
    if call.cancelled:  # whatever the tool made of it, its caller was told this
        return "timeout" if call.timed_out else "cancelled"
    if isinstance(result, ToolResult):
        return "tool_error" if result.is_error else "ok"
    if isinstance(result, Refused):
        return result.kind.value
    if isinstance(result, ToolError):
        return "tool_error"
    if isinstance(result, asyncio.CancelledError):
        return "cancelled"
    return "input_required" if questions_in(result) is not None else Kind.INTERNAL.value


def count_calls(metrics: Metrics) -> Observer:
    """Count calls and their time."""

    def around(inner: Handler) -> Handler:
        async def handle(call: Call) -> ToolResult:
            outcome = ""
            metrics.in_flight.add()
            begun = perf_counter_ns()
            call.marks = [begun]
            try:
                result = await inner(call)
                outcome = outcome_of(call, result)
                return result
            except BaseException as problem:
                outcome = outcome_of(call, problem)
                raise
            finally:
                metrics.in_flight.add(by=-1)
                ended = perf_counter_ns()
                seconds = (ended - begun) / 1e9
                metrics.call_seconds.observe(seconds, call.name)
                metrics.caller_seconds.observe(seconds, call.principal.id)
                metrics.stages.observe((ended - call.marks[-1]) / 1e9, call.name, "end")
                metrics.calls.add(call.name, outcome)
                metrics.caller_calls.add(call.principal.id, outcome)
                for stage, seconds in call.stages.items():
                    metrics.stages.observe(seconds, call.name, stage)

        return handle

    return around


def count_refusal(metrics: Metrics, catalog: Catalog, request: Request, principal: Principal, refused: Refused) -> None:
    """Count a call that never began. A name that is no tool's is not repeated: anybody could make up any number."""
    name = request.params.get("name")
    is_tool = refused.kind is not Kind.UNKNOWN_TOOL and type(name) is str and catalog.get(name) is not None
    metrics.calls.add(str(name) if is_tool else "", refused.kind.value)
    metrics.caller_calls.add(principal.id, refused.kind.value)
