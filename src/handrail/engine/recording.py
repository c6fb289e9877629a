"""What is written down of how a call ended."""

from __future__ import annotations

from operator import sub
from time import perf_counter_ns

from handrail.engine.call import Call
from handrail.engine.outcome import outcome_of
from handrail.engine.records import CallRecord, Stages, call_record
from handrail.guards.sanitize import changes
from handrail.model import Text, ToolResult


def outcome_record(call: Call, result: ToolResult | BaseException) -> CallRecord:
    """An outcome, or a refusal if nothing was begun."""
    outcome = outcome_of(call, result)
    if call.intended:
        record = CallRecord("outcome", call.serial, outcome)
    else:
        event = "asked" if outcome == "input_required" else "answered" if isinstance(result, ToolResult) else "refusal"
        record = call_record(call, event, outcome)
    if marks := call.marks:
        record.seconds = (perf_counter_ns() - marks[0]) // 1000 / 1e6
        record.stages_ns = Stages(*map(sub, marks[1:], marks))
    if isinstance(result, ToolResult):
        record.characters = sum([len(each.text) for each in result.content if isinstance(each, Text)])
    if call.findings:
        record.findings = sorted({f"{each.kind}: {each.rule}" for each in call.findings})
    if findings := call.findings + call.message_findings:
        record.sanitized = changes(findings)
    return record
