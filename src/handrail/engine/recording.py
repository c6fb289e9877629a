"""When what became of a call is written down: before the answer leaves (P-15)."""

from __future__ import annotations

import asyncio
import logging
from secrets import token_hex
from time import perf_counter
from typing import TYPE_CHECKING

from handrail.engine.call import Call
from handrail.engine.counting import Observer, ending
from handrail.engine.gate import Gate
from handrail.engine.pipeline import Handler, failed
from handrail.engine.records import about
from handrail.errors import Kind, Refused
from handrail.guards.chain import TrailError
from handrail.model import Object, Text, ToolResult

if TYPE_CHECKING:
    from handrail.guards.trail import Trail

log = logging.getLogger("handrail")


def recorded(gate: Gate) -> Observer:
    """Around a whole call: whatever becomes of it is on record before anybody hears of it."""

    def around(inner: Handler) -> Handler:
        async def handle(call: Call) -> ToolResult:
            trail = gate.trail
            if trail is None:
                raise Refused(Kind.UNRECORDED, f"{call.name} was not called: nobody has opened the record of it")
            call.serial = token_hex(8)
            call.marks = call.marks or [("", perf_counter())]
            try:
                result = await inner(call)
            except BaseException as problem:
                if call.recorded or await end(trail, call, problem) or isinstance(problem, asyncio.CancelledError):
                    raise
                return failed(_UNRECORDED % call.name)
            if call.recorded:  # it has outlived its time, and nobody waits for it any more
                return result
            return result if await end(trail, call, result) else failed(_UNRECORDED % call.name)

        return handle

    return around


_UNRECORDED = "%s was carried out, but what came of it could not be recorded and is withheld. Do not simply repeat it."


async def end(trail: Trail, call: Call, how: ToolResult | BaseException) -> bool:
    call.recorded = True
    record = ended(call, how)
    if not call.intended:  # nothing has happened: nobody needs to wait for the disk
        trail.note(record)
        return True
    try:
        return await trail.write(record)
    except TrailError as problem:
        log.error("the outcome of %s (%s) could not be recorded: %s", call.name, call.serial, problem)
        return False


def ended(call: Call, how: ToolResult | BaseException) -> Object:
    """An outcome, or a refusal if nothing was begun."""
    if call.intended:
        record: Object = {"event": "outcome", "call": call.serial}
    else:
        record = about(call, "answered" if isinstance(how, ToolResult) else "refusal")
    record["outcome"] = outcome = ending(call, how)
    if outcome == "input_required" and not call.intended:
        record["event"] = "asked"
    if call.marks:
        record["seconds"] = round(perf_counter() - call.marks[0][1], 6)
        record["stages"] = {name: round(seconds, 6) for name, seconds in call.stages.items()}
    if isinstance(how, ToolResult):
        record["characters"] = sum(len(each.text) for each in how.content if isinstance(each, Text))
    if call.findings:
        record["findings"] = sorted({f"{each.kind}: {each.rule}" for each in call.findings})
    return record
