"""How a call ended: in one word, for the sinks that observe calls, and as a record of the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from operator import sub
from time import perf_counter_ns
from typing import Protocol

from msgspec import Struct, defstruct

from handrail.audit.format import CallRecord, digest, measure_arguments
from handrail.engine.call_state import STAGES, CallState
from handrail.engine.catalog import ToolEntry
from handrail.engine.input_requests import questions_in
from handrail.errors import Kind, Refused, ToolError
from handrail.guards.sanitize import changes
from handrail.jsonrpc import Request, encode_sorted
from handrail.model import Principal, Text, ToolResult
from handrail.protocol.connection import Connection
from handrail.protocol.http_rules import NAME_PARAMS, Headers
from handrail.protocol.trace import read as read_trace, read_headers
from handrail.revisions import Revision
from handrail.text.controls import mask, mask_secrets
from handrail.text.secrets import Secrets

StageTimes = defstruct("StageTimes", [(name, int, 0) for name in STAGES], omit_defaults=True)
"""Nanoseconds that each stage of a call took."""


class RequestOrigin(Protocol):
    """The peer that sent a request, and the message it came in."""

    principal: Principal
    address: str
    connection: Connection
    trace_headers: Headers | None
    raw_message: bytes | bytearray


class CallEnd(Struct, gc=False):
    """The end of a call, as all sinks get it."""

    outcome: str
    result: ToolResult | BaseException
    ended_ns: int


class RefusedCall(Struct, kw_only=True):
    """A request for a call that was refused before it became one."""

    origin: RequestOrigin
    request: Request
    revision: Revision
    refused: Refused
    entry: ToolEntry | None  # what it names, if there is that
    answer: bytes | None
    started_ns: int  # when handling of the request began, by the performance counter
    call_id: str = ""  # in the audit log; a sink that names calls sets it


class CallSink(Protocol):
    """An observer of calls, such as metrics. It changes nothing; results and exceptions pass it unchanged."""

    def on_start(self, call: CallState) -> None: ...
    def on_end(self, call: CallState, end: CallEnd, answer: bytes | None) -> None:
        """`answer` is None if there is none yet."""

    def on_refusal(self, refusal: RefusedCall) -> None: ...


def end_of(call: CallState, result: ToolResult | BaseException) -> CallEnd:
    return CallEnd(outcome_of(call, result), result, perf_counter_ns())


def outcome_of(call: CallState, result: ToolResult | BaseException) -> str:
    """`ok`, `tool_error`, `cancelled`, `timeout`, `input_required`, or the kind of a refusal."""
    if call.cancelled:  # the caller got this reply, whatever the tool returned
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


def intent_record(call: CallState, secrets: Secrets | None) -> CallRecord:
    """Return the record of a call that is about to run; with its arguments, if there are `secrets` to mask in them."""
    record = _call_record(call, "intent")
    if secrets is not None:
        record.arguments = mask_secrets(secrets.redact(call.arguments))
    if call.reviewed_arguments is not None:
        record.asked_digest = digest(encode_sorted(call.reviewed_arguments))
    if call.repairs:
        record.repaired = [each.path for each in call.repairs]
    return record


def outcome_record(call: CallState, end: CallEnd) -> CallRecord:
    """Return the record of a call that has ended: its outcome, or a refusal if it never ran."""
    outcome, result = end.outcome, end.result
    if call.intended:
        record = CallRecord("outcome", call.serial, outcome)
    else:
        event = "asked" if outcome == "input_required" else "answered" if isinstance(result, ToolResult) else "refusal"
        record = _call_record(call, event, outcome)
    if marks := call.marks:
        record.seconds = (end.ended_ns - marks[0]) // 1000 / 1e6
        record.stages_ns = StageTimes(*map(sub, marks[1 : len(STAGES) + 1], marks))  # more: runs side by side
    if isinstance(result, ToolResult):
        record.characters = sum([len(each.text) for each in result.content if isinstance(each, Text)])
    record.would_decide = call.would_decide
    record.upstream_revision, record.lossy = call.upstream_revision, call.lossy
    if call.findings:
        record.findings = sorted({f"{each.kind}: {each.rule}" for each in call.findings})
    if findings := call.findings + call.message_findings:
        record.sanitized = changes(findings)
    return record


def refusal_record(refusal: RefusedCall, server: str, secrets: Collection[str] = ()) -> CallRecord:
    """Return the record of a request that never became a call. Its name and arguments may be any JSON."""
    origin, params = refusal.origin, refusal.request.params
    name, arguments, meta = (params.get(each) for each in (NAME_PARAMS[refusal.request.method], "arguments", "_meta"))
    prefix = "prompt:" if refusal.request.method == "prompts/get" else ""
    label = mask(prefix + name[:200], secrets) if type(name) is str else ""
    meta_trace = read_trace(meta.get("traceparent")) if type(meta) is dict else None
    trace = meta_trace or read_headers(origin.trace_headers)
    arguments_digest, arguments_bytes = measure_arguments({} if arguments is None else arguments)
    return CallRecord(
        "refusal",
        refusal.call_id,
        refusal.refused.kind.value,
        origin.principal.id,
        origin.address,
        server,
        revision=refusal.revision.name,
        tool=label if refusal.entry is None else refusal.entry.label,
        arguments_digest=arguments_digest,
        arguments_bytes=arguments_bytes,
        trace="" if trace is None else trace.trace_id,
    )


def _call_record(call: CallState, event: str, outcome: str = "") -> CallRecord:
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
        entry.label,
        entry.fingerprint,
        arguments_digest,
        arguments_bytes,
        "" if decision is None else decision.rule,
        call.agreed,
        "" if trace is None else trace.trace_id,
        upstream=entry.upstream,
    )
