"""How a call ended: in one word, as a record of the audit log, and as numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import sub
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeAlias

from msgspec import defstruct
from msgspec.structs import replace

from handrail.audit.format import digest
from handrail.audit.records import CallRecord, measure_arguments
from handrail.engine.call import STAGES, Call
from handrail.engine.catalog import Catalog
from handrail.engine.input_requests import questions_in
from handrail.errors import Kind, Refused, ToolError
from handrail.guards.sanitize import changes
from handrail.jsonrpc import Request, encode_sorted
from handrail.metrics import Metrics
from handrail.model import Principal, Text, ToolResult
from handrail.protocol.http_rules import Headers
from handrail.protocol.trace import read as read_trace, read_headers
from handrail.text.controls import mask_secrets
from handrail.text.secrets import Secrets

if TYPE_CHECKING:
    from handrail.engine.pipeline import Handler

Observer: TypeAlias = "Callable[[Handler], Handler]"
"""Goes around a whole call, middleware included. It looks on: results and exceptions pass unchanged."""

StageTimes = defstruct("StageTimes", [(name, int, 0) for name in STAGES], omit_defaults=True)
"""Nanoseconds that each stage of a call took."""


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


def intent_record(call: Call, secrets: Secrets | None) -> CallRecord:
    """Return the record of a call that is about to run; with its arguments, if there are `secrets` to mask in them."""
    record = _call_record(call, "intent")
    if secrets is not None:
        record.arguments = mask_secrets(secrets.redact(call.arguments))
    if call.reviewed_arguments is not None:
        record.asked_digest = digest(encode_sorted(call.reviewed_arguments))
    if call.repairs:
        record.repaired = [each.path for each in call.repairs]
    return record


def outcome_record(call: Call, result: ToolResult | BaseException) -> CallRecord:
    """Return the record of a call that has ended: its outcome, or a refusal if it never ran."""
    outcome = outcome_of(call, result)
    if call.intended:
        record = CallRecord("outcome", call.serial, outcome)
    else:
        event = "asked" if outcome == "input_required" else "answered" if isinstance(result, ToolResult) else "refusal"
        record = _call_record(call, event, outcome)
    if marks := call.marks:
        record.seconds = (perf_counter_ns() - marks[0]) // 1000 / 1e6
        record.stages_ns = StageTimes(*map(sub, marks[1:], marks))
    if isinstance(result, ToolResult):
        record.characters = sum([len(each.text) for each in result.content if isinstance(each, Text)])
    if call.findings:
        record.findings = sorted({f"{each.kind}: {each.rule}" for each in call.findings})
    if findings := call.findings + call.message_findings:
        record.sanitized = changes(findings)
    return record


def refusal_record(request: Request, template: CallRecord, headers: Headers | None, refused: Refused) -> CallRecord:
    """Return the record of a request that never became a call. Its name and arguments may be any JSON."""
    name, arguments, meta = (request.params.get(each) for each in ("name", "arguments", "_meta"))
    meta_trace = read_trace(meta.get("traceparent")) if type(meta) is dict else None
    trace = meta_trace or read_headers(headers)
    arguments_digest, arguments_bytes = measure_arguments({} if arguments is None else arguments)
    return replace(
        template,
        tool=name[:200] if type(name) is str else "",
        arguments_digest=arguments_digest,
        arguments_bytes=arguments_bytes,
        trace="" if trace is None else trace.trace_id,
        outcome=refused.kind.value,
    )


def _call_record(call: Call, event: str, outcome: str = "") -> CallRecord:
    entry, decision, trace = call.entry, call.decision, call.trace
    arguments_digest, arguments_bytes = measure_arguments(call.arguments)
    return CallRecord(
        event,
        call.serial,
        outcome,
        call.principal.id,
        call.address,
        call.server,
        call.client.name[:100],
        call.revision.name,
        entry.tool.name,
        entry.fingerprint,
        arguments_digest,
        arguments_bytes,
        "" if decision is None else decision.rule,
        call.agreed,
        "" if trace is None else trace.trace_id,
    )


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
