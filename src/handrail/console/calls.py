"""Calls as the page shows them: a row of each, and one call's whole story."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import MsgspecError
from msgspec.json import decode

from handrail.console import audit as auditing
from handrail.console.access import Download, Problem, Request
from handrail.engine.call import STAGES
from handrail.engine.catalog import title_of
from handrail.jsonrpc import encode
from handrail.model import Json, Object
from handrail.observe.snapshot import Line, Seen
from handrail.text.controls import one_line

if TYPE_CHECKING:
    from handrail.console import Console

LARGE = 256 * 1024  # bytes that take too long on the loop
MAX_ASKED = 64 * 1024  # bytes of a request that is read for its row
MAX_FIRSTS = 1_000  # calls whose arguments need not be read again
MAX_FIRST, MAX_VALUE = 160, 400  # characters of the first arguments, in a row; bytes of one that is shown there


def row(console: Console, seen: Seen) -> Object:
    entry = console.engine.catalog.get(seen.tool)
    made: Object = {
        "id": seen.id,
        "tool": seen.tool,
        "title": title_of(entry) or seen.tool,
        "who": seen.who,
        "client": seen.client[:100],
        "revision": seen.revision,
        "from": seen.address,
        "state": seen.state,
        "stage": seen.stage,
        "began": seen.began,
        "seconds": round(seen.seconds or console.clock() - seen.began, 6),
        "worker": console.worker,
        "first": first_arguments(console, seen),
    }
    if seen.outcome:
        made["outcome"] = seen.outcome
    if seen.progress and seen.state != "asking":
        made["progress"] = _progress(console, seen.progress[-1])
    if seen.agreed.startswith("approval "):
        made["approval"] = seen.agreed.removeprefix("approval ")
    return made


def first_arguments(console: Console, seen: Seen) -> str:
    """The arguments of a call in one line, secrets masked, as far as there is room: `order_id 7, reason "late"`."""
    known = console.firsts.get(seen.id)
    if known is None:
        if len(console.firsts) >= MAX_FIRSTS:
            console.firsts.clear()
        known = console.firsts[seen.id] = _first(console, seen)
    return known


def _first(console: Console, seen: Seen) -> str:
    if len(seen.asked) > MAX_ASKED:
        return f"{len(seen.asked):,} bytes of arguments"
    try:
        arguments = _arguments(seen)
    except (MsgspecError, RecursionError):
        return ""
    said: list[str] = []
    for name, value in (arguments if type(arguments) is dict else {}).items():
        size = len(encode(value))
        if size > MAX_VALUE:
            said.append(f"{console.hide.text(name[:MAX_VALUE])} … {size:,} bytes")
        else:
            (shown, inner), *_ = console.hide.value({name[:MAX_VALUE]: value}).items()
            said.append(f"{shown} {encode(inner).decode()}")
        if sum(map(len, said)) > MAX_FIRST:
            break
    return one_line(", ".join(said), MAX_FIRST)


async def story(console: Console, request: Request) -> Object:
    """A `Story`: from memory while it is there, else what the audit has."""
    ident = request.path["id"]
    seen, records = console.feed.find(ident), await auditing.records_of(console, ident)
    if seen is not None:
        size = len(seen.asked) + len(seen.answer or b"")
        told = _story(console, seen) if size < LARGE else await asyncio.to_thread(_story, console, seen)
        return {**told, "records": records}
    if not records:
        raise Problem(404, f"There is no call {ident[:40]!r}: it is too long ago, or was another server's")
    return {**_recorded(records), "records": records}


async def block(console: Console, request: Request) -> Download:
    seen, index = _kept(console, request)
    if seen.result is None:
        raise Problem(404, "This call gave no result")
    try:
        body = await asyncio.to_thread(console.hide.block, seen.result, index)
    except LookupError as problem:
        raise Problem(404, str(problem)) from None
    return Download(body, "application/octet-stream", f"{seen.tool}-{seen.id}-{index}")


async def wire(console: Console, request: Request) -> Download:
    seen, index = _kept(console, request)
    lines = _lines(seen)
    if not 0 <= index < len(lines):
        raise Problem(404, f"wire {index}: there are {len(lines)} messages")
    body = await asyncio.to_thread(console.hide.whole_wire, lines[index][2])
    return Download(body.encode(), "application/octet-stream", f"{seen.tool}-{seen.id}-wire-{index}.json")


async def cancel(console: Console, request: Request) -> Object:
    """Stop a call, in whichever worker it runs. Its caller is told."""
    session, ident = request.session, request.path["id"]
    seen = console.feed.find(ident)
    if "manage" not in session.roles and (seen is None or seen.who != session.who or "call" not in session.roles):
        raise Problem(403, "This needs the role 'manage', or 'call' for a call of one's own")
    if seen is not None and seen.ended:
        raise Problem(409, "This call is over")
    if seen is None and console.workers == 1:
        raise Problem(404, f"There is no call {ident[:40]!r} that runs")
    await console.note(session, "cancelled", call=ident, tool="" if seen is None else seen.tool)
    await console.command("cancel", {"call": ident})
    return {}


async def stop(console: Console, data: Object) -> None:
    seen = console.feed.running.get(data["call"])
    if seen is not None and seen.call is not None:
        seen.call.cancel()
        console.feed.tell()


def _kept(console: Console, request: Request) -> tuple[Seen, int]:
    seen, index = console.feed.find(request.path["id"]), request.path["index"]
    if seen is None:
        raise Problem(404, "This call is not kept in memory any more")
    if not index.isascii() or not index.isdigit() or len(index) > 6:
        raise Problem(404, f"{index[:20]!r} is not a number")
    return seen, int(index)


def _progress(console: Console, given: tuple[float, float, float | None, str | None]) -> Object:
    at, done, total, message = given
    made: Object = {"done": done, "at": at}
    if total is not None:
        made["total"] = total
    if message is not None:
        made["message"] = console.hide.small(str(message))
    return made


def _story(console: Console, seen: Seen) -> Object:
    decision, came, ran = seen.decision, _arguments(seen), seen.arguments
    made: Object = {
        "row": row(console, seen),
        "source": "memory",
        "stages": [
            {"name": name, "ms": round((end - start) / 1e6, 3)}
            for name, (start, end) in zip(STAGES, pairwise(seen.marks), strict=False)
        ],
        "verdict": "" if decision is None else decision.verdict,
        "rule": "" if decision is None else decision.rule,
        "why": "" if decision is None else decision.why,
        "agreed": seen.agreed,
        "arguments": console.hide.small(came if ran is None else ran),
        "repairs": [
            {"path": each.path, "sent": _said(console, each.sent), "became": _said(console, each.became)}
            for each in seen.repairs
        ],
        "findings": sorted({f"{each.kind}: {each.rule}" for each in seen.findings}),
        "progress": [_progress(console, each) for each in seen.progress],
        "logs": [{"at": at, "level": level, "text": _said(console, decode(data))} for at, level, data in seen.logs],
        "wire": [{"at": at, "way": way, **console.hide.wire(text)} for at, way, text in _lines(seen)],
        "trace": "" if seen.trace is None else seen.trace.trace_id,
    }
    if ran is not None and ran != came:
        made["sent"] = console.hide.small(came)
    if seen.result is not None:
        made["result"] = console.hide.result(seen.result)
    if seen.refusal is not None:
        kind, text = seen.refusal
        made["refusal"] = {"kind": kind, "text": console.hide.cut(text)[0]}
    return made


def _arguments(seen: Seen) -> Json:
    """As they came: out of the message, or out of the one in the batch that is this call."""
    said = decode(seen.asked) if seen.asked else {}
    for each in said if type(said) is list else [said]:
        params = each.get("params") if type(each) is dict and each.get("id") == seen.ident else None
        if type(params) is dict:
            return params.get("arguments", {})
    return {}


def _said(console: Console, value: Json) -> str:
    masked = console.hide.small(value)
    return masked if type(masked) is str else one_line(encode(masked).decode(), 10_000)


def _lines(seen: Seen) -> list[Line]:
    """Every message of the call, as it went over the wire."""
    first = [(seen.began, "in", bytes(seen.asked))]
    last = [] if seen.answer is None else [(seen.answered, "out", seen.answer)]
    return [*first, *seen.lines, *last]


def _recorded(records: list[Object]) -> Object:
    """What the audit has of a call: no arguments, results or wire."""
    first, last = records[0], records[-1]
    raw = {**first["raw"], **last["raw"]}
    made: Object = {
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
        made["outcome"] = last["outcome"]
    agreed = str(raw.get("agreed", ""))
    if agreed.startswith("approval "):
        made["approval"] = agreed.removeprefix("approval ")
    stages = raw.get("stages_ns", {})
    return {
        "row": made,
        "source": "audit",
        "stages": [{"name": name, "ms": round(taken / 1e6, 3)} for name, taken in stages.items()],
        "verdict": "",
        "rule": first["rule"],
        "why": "",
        "agreed": agreed,
        "repairs": [],
        "findings": list(raw.get("findings", [])),
        "progress": [],
        "logs": [],
        "wire": [],
        "trace": str(raw.get("trace", "")),
    }
