"""Calls on the page: a row of each, and the details of one."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from msgspec import MsgspecError
from msgspec.json import decode

from handrail.console import audit
from handrail.console.access import ApiError, ApiRequest, RawResponse
from handrail.console.context import ConsoleContext
from handrail.engine.call_state import STAGES
from handrail.engine.catalog import title_of
from handrail.jsonrpc import encode
from handrail.model import Json, Object
from handrail.observe.activity import CallSnapshot, WireMessage
from handrail.text.controls import one_line

LARGE_BYTES = 256 * 1024  # a larger call is prepared in a thread, not on the loop
MAX_REQUEST_BYTES = 64 * 1024  # a larger request is not decoded for its row
MAX_PREVIEWS = 1_000  # cached
MAX_PREVIEW_CHARS = 160
MAX_VALUE_BYTES = 400  # of an argument in a preview


def call_row(context: ConsoleContext, snapshot: CallSnapshot) -> Object:
    entry = context.find_entry(snapshot.tool)
    cells: Object = {
        "id": snapshot.id,
        "tool": snapshot.tool,
        "title": title_of(entry) or snapshot.tool.removeprefix("prompt:"),
        "who": snapshot.who,
        "client": snapshot.client[:100],
        "revision": snapshot.revision,
        "from": snapshot.address,
        "state": snapshot.state,
        "stage": snapshot.stage,
        "began": snapshot.started_at,
        "seconds": round(snapshot.seconds if snapshot.ended_ns else context.clock() - snapshot.started_at, 6),
        "worker": context.worker,
        "first": argument_preview(context, snapshot),
    }
    if snapshot.outcome:
        cells["outcome"] = snapshot.outcome
    if snapshot.progress and snapshot.state != "asking":
        cells["progress"] = _progress_row(context, snapshot.progress[-1])
    if snapshot.agreed.startswith("approval "):
        cells["approval"] = snapshot.agreed.removeprefix("approval ")
    return cells


def argument_preview(context: ConsoleContext, snapshot: CallSnapshot) -> str:
    """Return the first arguments of a call in one line, secrets masked: `order_id 7, reason "late"`."""
    preview = context.argument_previews.get(snapshot.id)
    if preview is None:
        if len(context.argument_previews) >= MAX_PREVIEWS:
            context.argument_previews.clear()
        preview = context.argument_previews[snapshot.id] = _make_preview(context, snapshot)
    return preview


def _make_preview(context: ConsoleContext, snapshot: CallSnapshot) -> str:
    if len(snapshot.raw_request) > MAX_REQUEST_BYTES:
        return f"{len(snapshot.raw_request):,} bytes of arguments"
    try:
        arguments = _request_arguments(snapshot)
    except (MsgspecError, RecursionError):
        return ""
    parts: list[str] = []
    for name, value in (arguments if type(arguments) is dict else {}).items():
        if name == "uri" and value == snapshot.tool:  # a resource, whose name it is
            continue
        size = len(encode(value))
        if size > MAX_VALUE_BYTES:
            parts.append(f"{context.redactor.text(name[:MAX_VALUE_BYTES])} … {size:,} bytes")
        else:
            (redacted_name, redacted_value), *_ = context.redactor.value({name[:MAX_VALUE_BYTES]: value}).items()
            parts.append(f"{redacted_name} {encode(redacted_value).decode()}")
        if sum(map(len, parts)) > MAX_PREVIEW_CHARS:
            break
    return one_line(", ".join(parts), MAX_PREVIEW_CHARS)


async def call_details(context: ConsoleContext, request: ApiRequest) -> Object:
    """Return the `Story` of a call: from memory if it is there, else from the audit log."""
    call_id = request.path["id"]
    snapshot, records = context.feed.find(call_id), await audit.records_of(context, call_id)
    if snapshot is not None:
        size = len(snapshot.raw_request) + len(snapshot.answer or b"")
        details = (
            _snapshot_details(context, snapshot)
            if size < LARGE_BYTES
            else await asyncio.to_thread(_snapshot_details, context, snapshot)
        )
        return {**details, "records": records}
    if not records:
        raise ApiError(404, f"There is no call {call_id[:40]!r}: it is too long ago, or was a call of another server")
    return {**_audit_details(records), "records": records}


async def block(context: ConsoleContext, request: ApiRequest) -> RawResponse:
    snapshot, index = _snapshot_and_index(context, request)
    if snapshot.result is None:
        raise ApiError(404, "This call has no result")
    try:
        body = await asyncio.to_thread(context.redactor.block, snapshot.result, index)
    except LookupError as problem:
        raise ApiError(404, str(problem)) from None
    return RawResponse(body, "application/octet-stream", f"{snapshot.tool}-{snapshot.id}-{index}")


async def wire(context: ConsoleContext, request: ApiRequest) -> RawResponse:
    snapshot, index = _snapshot_and_index(context, request)
    lines = _wire_lines(snapshot)
    if not 0 <= index < len(lines):
        raise ApiError(404, f"wire {index}: there are {len(lines)} messages")
    body = await asyncio.to_thread(context.redactor.full_wire_message, lines[index][2])
    return RawResponse(body.encode(), "application/octet-stream", f"{snapshot.tool}-{snapshot.id}-wire-{index}.json")


async def cancel(context: ConsoleContext, request: ApiRequest) -> Object:
    """Cancel a call, in whichever worker it runs. Its caller gets an error."""
    session, call_id = request.session, request.path["id"]
    snapshot = context.feed.find(call_id)
    if "manage" not in session.roles and (
        snapshot is None or snapshot.who != session.who or "call" not in session.roles
    ):
        raise ApiError(403, "This needs the role 'manage', or 'call' for a call of your own")
    if snapshot is not None and snapshot.ended_ns:
        raise ApiError(409, "This call is over")
    if snapshot is None and context.workers == 1:
        raise ApiError(404, f"There is no call {call_id[:40]!r} that runs")
    await context.write_audit_record(session, "cancelled", call=call_id, tool="" if snapshot is None else snapshot.tool)
    await context.send_command("cancel", {"call": call_id})
    return {}


async def cancel_running(context: ConsoleContext, data: Object) -> None:
    snapshot = context.feed.running.get(data["call"])
    if snapshot is not None and snapshot.call is not None:
        snapshot.call.cancel()
        context.feed.notify()


def _snapshot_and_index(context: ConsoleContext, request: ApiRequest) -> tuple[CallSnapshot, int]:
    snapshot, index = context.feed.find(request.path["id"]), request.path["index"]
    if snapshot is None:
        raise ApiError(404, "This call is not in memory any more")
    if not index.isascii() or not index.isdigit() or len(index) > 6:
        raise ApiError(404, f"{index[:20]!r} is not a number")
    return snapshot, int(index)


def _progress_row(context: ConsoleContext, progress: tuple[float, float, float | None, str | None]) -> Object:
    at, done, total, message = progress
    members: Object = {"done": done, "at": at}
    if total is not None:
        members["total"] = total
    if message is not None:
        members["message"] = context.redactor.bounded_value(str(message))
    return members


def _snapshot_details(context: ConsoleContext, snapshot: CallSnapshot) -> Object:
    decision, sent_arguments, run_arguments = snapshot.decision, _request_arguments(snapshot), snapshot.arguments
    details: Object = {
        "row": call_row(context, snapshot),
        "source": "memory",
        "stages": [
            {"name": name, "ms": round((end - start) / 1e6, 3)}
            for name, (start, end) in zip(STAGES, pairwise(snapshot.marks), strict=False)
        ],
        "verdict": "" if decision is None else decision.verdict,
        "rule": "" if decision is None else decision.rule,
        "why": "" if decision is None else decision.why,
        "agreed": snapshot.agreed,
        "would_decide": list(snapshot.would_decide),
        "arguments": context.redactor.bounded_value(sent_arguments if run_arguments is None else run_arguments),
        "repairs": [
            {"path": each.path, "sent": _value_line(context, each.sent), "became": _value_line(context, each.became)}
            for each in snapshot.repairs
        ],
        "findings": sorted({f"{each.kind}: {each.rule}" for each in snapshot.findings}),
        "progress": [_progress_row(context, each) for each in snapshot.progress],
        "logs": [
            {"at": at, "level": level, "text": _value_line(context, decode(data))} for at, level, data in snapshot.logs
        ],
        "wire": [
            {"at": at, "way": way, **context.redactor.wire_message(text)} for at, way, text in _wire_lines(snapshot)
        ],
        "trace": "" if snapshot.trace is None else snapshot.trace.trace_id,
    }
    if snapshot.upstream:
        lossy = sorted({*snapshot.lossy})
        details["upstream"] = {"name": snapshot.upstream, "revision": snapshot.upstream_revision, "lossy": lossy}
    if run_arguments is not None and run_arguments != sent_arguments:
        details["sent"] = context.redactor.bounded_value(sent_arguments)
    if snapshot.result is not None:
        details["result"] = context.redactor.result(snapshot.result)
    if snapshot.refusal is not None:
        kind, text = snapshot.refusal
        details["refusal"] = {"kind": kind, "text": context.redactor.truncate(text)[0]}
    return details


def _request_arguments(snapshot: CallSnapshot) -> Json:
    """Return the arguments as they were sent: from the message, or from this call's message in a batch."""
    message = decode(snapshot.raw_request) if snapshot.raw_request else {}
    for each in message if type(message) is list else [message]:
        params = each.get("params") if type(each) is dict and each.get("id") == snapshot.request_id else None
        if type(params) is dict:
            return {"uri": params["uri"]} if "uri" in params else params.get("arguments", {})
    return {}


def _value_line(context: ConsoleContext, value: Json) -> str:
    redacted = context.redactor.bounded_value(value)
    return redacted if type(redacted) is str else one_line(encode(redacted).decode(), 10_000)


def _wire_lines(snapshot: CallSnapshot) -> list[WireMessage]:
    """Return every message of the call, as it was on the wire."""
    first = [(snapshot.started_at, "in", bytes(snapshot.raw_request))]
    last = [] if snapshot.answer is None else [(snapshot.ended_at, "out", snapshot.answer)]
    return [*first, *snapshot.lines, *last]


def _audit_details(records: list[Object]) -> Object:
    """Return the details that the audit log has of a call: no arguments, results or wire."""
    first, last = records[0], records[-1]
    raw = {**first["raw"], **last["raw"]}
    cells: Object = {
        "id": first["call"],
        "tool": first["tool"],
        "title": first["tool"],
        "who": first["who"],
        "client": str(raw.get("client", "")),
        "revision": str(raw.get("revision", "")),
        "from": str(raw.get("from", "")),
        "state": "done" if last["outcome"] else "running",
        "stage": "",
        "began": first["time"],
        "seconds": float(raw.get("seconds", last["time"] - first["time"])),
        "worker": "",
        "first": "",
    }
    if last["outcome"]:
        cells["outcome"] = last["outcome"]
    agreed = str(raw.get("agreed", ""))
    if agreed.startswith("approval "):
        cells["approval"] = agreed.removeprefix("approval ")
    stages = raw.get("stages_ns", {})
    leg = {"name": raw.get("upstream"), "revision": raw.get("upstream_revision", ""), "lossy": raw.get("lossy", [])}
    return {
        "row": cells,
        "source": "audit",
        "stages": [{"name": name, "ms": round(nanoseconds / 1e6, 3)} for name, nanoseconds in stages.items()],
        "verdict": "",
        "rule": first["rule"],
        "why": "",
        "agreed": agreed,
        "would_decide": list(raw.get("would_decide", [])),
        "repairs": [],
        "findings": list(raw.get("findings", [])),
        "progress": [],
        "logs": [],
        "wire": [],
        "trace": str(raw.get("trace", "")),
        **({"upstream": leg} if leg["name"] else {}),
    }
