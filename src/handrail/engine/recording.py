"""What is written down of how a call ended."""

from __future__ import annotations

from operator import sub
from time import perf_counter_ns

from handrail.engine.call import Call
from handrail.engine.outcome import ending
from handrail.engine.records import Record, Stages, about
from handrail.guards.sanitize import changes
from handrail.model import Text, ToolResult


def ended(call: Call, how: ToolResult | BaseException) -> Record:
    """An outcome, or a refusal if nothing was begun."""
    outcome = ending(call, how)
    if call.intended:
        record = Record("outcome", call.serial, outcome)
    else:
        event = "asked" if outcome == "input_required" else "answered" if isinstance(how, ToolResult) else "refusal"
        record = about(call, event, outcome)
    if marks := call.marks:
        record.seconds = (perf_counter_ns() - marks[0]) // 1000 / 1e6
        record.stages_ns = Stages(*map(sub, marks[1:], marks))
    if isinstance(how, ToolResult):
        record.characters = sum([len(each.text) for each in how.content if isinstance(each, Text)])
    if call.findings:
        record.findings = sorted({f"{each.kind}: {each.rule}" for each in call.findings})
    if found := call.findings + call.message_findings:
        record.sanitized = changes(found)
    return record
