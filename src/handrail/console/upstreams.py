"""The upstream servers of a gateway: how each one is, what its tools are taken for, and what a person does about it.

Each worker has connections of its own to an upstream; a row of the page is the sum of all workers. A person accepts
definitions, not names: a tool that has changed since the person looked is not accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct, ValidationError, convert, field
from msgspec.json import decode

from handrail.client.tools import MAX_DESCRIPTION, estimated_tokens, signature
from handrail.console.access import ApiError, ApiRequest
from handrail.console.context import ConsoleContext
from handrail.console.tools import MAX_CHANGES, change_row
from handrail.gateway.trust import ToolClass
from handrail.guards.tool_definitions import LockError, fingerprint
from handrail.jsonrpc import encode
from handrail.model import Json, Object
from handrail.suggest import closest
from handrail.text.controls import one_line

if TYPE_CHECKING:
    from handrail.gateway.upstream import Upstream, UpstreamTool

__all__ = ["accept", "apply_accept", "apply_refresh", "apply_switch", "merge_rows", "refresh", "rows", "switch", "view"]

log = logging.getLogger("handrail")

SWITCH_PREFIX = "console-upstream:"  # of the topics' keys, one for each stopped upstream, while the server runs
MAX_LINE_CHARS = 300  # of standard error
_STATES = ("stopped", "down", "starting", "up", "new")  # of several workers, the first of these counts
_OPEN_STATES = frozenset({"listed", "new", "quarantined"})  # of tools that a person can accept


class Choice(Struct):
    """What a person takes one tool for, and the definition the person has seen."""

    tool_class: ToolClass = field(name="class")
    fingerprint: str


# How they are


def rows(context: ConsoleContext) -> list[Object]:
    """Return the `Upstream`s of this process, in the order of the configuration."""
    return [_row(context, each) for each in context.server.upstreams.values()]


def merge_rows(lists: Iterable[list[Object]]) -> list[Object]:
    """Return the rows of all workers: sums of numbers, the worst state, the newest of what is known."""
    merged: dict[str, Object] = {}
    for row in (each for one in lists for each in one):
        merged[row["name"]] = _merge(merged[row["name"]], row) if row["name"] in merged else row
    return list(merged.values())


def _merge(one: Object, other: Object) -> Object:
    worse = min(one, other, key=lambda each: _STATES.index(each["state"]))
    newest = max(one, other, key=lambda each: each["since"])
    return {
        **newest,
        **{name: worse[name] for name in ("state", "problem")},
        **{name: one[name] + other[name] for name in ("calls", "errors", "restarts", "sessions")},
        **{name: max(one[name], other[name]) for name in ("latency_ms", *_NOT_LISTED)},
        "lossy": dict(Counter(one["lossy"]) + Counter(other["lossy"])),
    }


def _row(context: ConsoleContext, upstream: Upstream) -> Object:
    counts = upstream.counts
    redacted: Object = context.redactor.definition(
        {
            "name": upstream.name,
            "prefix": upstream.terms.prefix,
            "target": one_line(upstream.target.label, 300),
            "state": upstream.state,
            "problem": upstream.problem,
            "revision": upstream.revision,
            "era": upstream.era,
            "since": upstream.era_since,
            "latency_ms": round(upstream.latency_ms, 3),
            "calls": counts["calls"],
            "errors": counts["errors"],
            "restarts": counts["restarts"],
            "lossy": dict(upstream.lossy),
            "sessions": sum(each.connection.is_open for each in upstream.pool.sessions.values()),
            "trusted": upstream.terms.trusted,
            **_tool_counts(context, upstream),
        }
    )
    return redacted


_NOT_LISTED: Mapping[str, int] = {"tools": 0, "tokens": 0, "unseen": 0, "new": 0, "changed": 0}


def _tool_counts(context: ConsoleContext, upstream: Upstream) -> Mapping[str, int]:
    """Return how many tools it offers, what they cost a model, and how many a person has to look at."""
    cached = context.upstream_counts.get(upstream.name)
    if cached is not None and cached[0] is upstream.tools:  # each listing is a list of its own
        return cached[1]
    totals = Counter(_NOT_LISTED)
    for tool in upstream.tools:
        totals["unseen"] += tool.state == "listed" and not tool.accepted and not upstream.terms.trusted
        totals["new"] += tool.state == "new"
        totals["changed"] += tool.state == "quarantined"
        if _is_offered(context, tool):
            totals["tools"] += 1
            totals["tokens"] += _tokens(context, tool)
    context.upstream_counts[upstream.name] = upstream.tools, totals
    return totals


def _is_offered(context: ConsoleContext, tool: UpstreamTool) -> bool:
    entry = context.engine.find("tool", tool.name)[0]
    return tool.state in ("listed", "new") and entry is not None and not entry.withheld


def _tokens(context: ConsoleContext, tool: UpstreamTool) -> int:
    """Return what the definition costs a model, as callers get it."""
    entry = context.engine.find("tool", tool.name)[0]
    listed = {**tool.raw, "name": tool.name} if entry is None else entry.definition(context.engine.offer.newest)
    return estimated_tokens(listed)


# One of them


async def view(context: ConsoleContext, request: ApiRequest) -> Object:
    """Return the tools of an upstream, and the last lines of its standard error in all workers."""
    upstream = _requested(context, request)
    lines = [decode(each) for each in await context.ask_workers("stderr", {"upstream": upstream.name})]
    return {
        "tools": [_tool_row(context, upstream, each) for each in upstream.tools],
        "stderr": sorted((each for each in lines if each["lines"]), key=lambda each: str(each["worker"])),
    }


async def publish_stderr(context: ConsoleContext, data: Object) -> None:
    upstream = context.server.upstreams.get(data["upstream"])
    lines = (
        [] if upstream is None else [one_line(context.redactor.text(each), MAX_LINE_CHARS) for each in upstream.stderr]
    )
    await context.topics.publish(data["topic"], encode({"worker": context.worker, "lines": lines}))


def _tool_row(context: ConsoleContext, upstream: Upstream, tool: UpstreamTool) -> Object:
    raw = tool.raw
    title, description, claims = raw.get("title"), raw.get("description"), raw.get("annotations")
    redacted: Object = context.redactor.definition(
        {
            "own_name": tool.own_name,
            "name": tool.name,
            "title": title if type(title) is str else "",
            "description": description[:MAX_DESCRIPTION] if type(description) is str else "",
            "signature": signature(raw) if raw else "",
            "hints": {name: value for name, value in claims.items() if name.endswith("Hint")}
            if type(claims) is dict
            else {},
            "proposal": tool.proposal,
            "accepted": tool.accepted,
            "state": tool.state,
            "reason": tool.reason,
            "changes": [change_row(each) for each in tool.changes[:MAX_CHANGES]],
            "fingerprint": fingerprint(raw),
            "tokens": _tokens(context, tool) if raw else 0,
        }
    )
    return redacted


# What a person does


async def refresh(context: ConsoleContext, request: ApiRequest) -> Object:
    """Fetch the lists of an upstream anew, in all workers; one that does not run is started."""
    upstream = _requested(context, request)
    if upstream.is_stopped:
        raise ApiError(409, f"{upstream.name} is stopped; start it first")
    await context.send_command("refresh-upstream", {"upstream": upstream.name})
    return {}


async def apply_refresh(context: ConsoleContext, data: Object) -> None:
    upstream = context.server.upstreams.get(data["upstream"])
    if upstream is not None and not upstream.is_stopped:
        context.spawn(upstream.refresh())


async def switch(context: ConsoleContext, request: ApiRequest) -> Object:
    """Stop an upstream, or start it again, in all workers. A stop cancels its calls."""
    upstream, on = _requested(context, request), request.body.get("on")
    if type(on) is not bool:
        raise ApiError(400, "on: expected true or false")
    by = request.session.who
    await context.write_audit_record(request.session, "started" if on else "stopped", tool=upstream.name)
    await context.topics.put(SWITCH_PREFIX + upstream.name, encode({"on": on, "by": by}))
    await context.send_command("switch-upstream", {"upstream": upstream.name, "on": on, "by": by})
    return {}


async def apply_switch(context: ConsoleContext, data: Object) -> None:
    upstream = context.server.upstreams.get(data["upstream"])
    if upstream is None or upstream.is_stopped is not data["on"]:
        return
    if data["on"]:
        upstream.start()
        context.spawn(upstream.refresh())
    else:
        context.spawn(upstream.stop(f"stopped by {data['by']}"))


async def restore_stops(context: ConsoleContext) -> None:
    """Apply earlier stops in a worker that starts later."""
    for name in context.server.upstreams:
        if (stored := await context.topics.get(SWITCH_PREFIX + name)) is not None:
            await apply_switch(context, {"upstream": name, **decode(stored)})


async def accept(context: ConsoleContext, request: ApiRequest) -> Object:
    """Accept definitions of tools with their classes, as the person has seen them."""
    upstream, choices = _requested(context, request), _choices(request.body.get("tools"))
    tools = {each.own_name: each for each in upstream.tools if each.state in _OPEN_STATES}
    for own_name, choice in choices.items():
        if own_name not in tools or fingerprint(tools[own_name].raw) != choice.fingerprint:
            raise ApiError(409, f"{one_line(own_name)} has changed since you looked; look at it again, then accept it")
    await asyncio.gather(
        *(
            context.write_audit_record(
                request.session,
                f"accepted: {choice.tool_class}",
                tool=tools[own_name].name,
                fingerprint=choice.fingerprint,
            )
            for own_name, choice in choices.items()
        )
    )
    try:
        _accept(upstream, choices)
    except (LockError, OSError) as problem:
        log.error("console: tools of %s not accepted: %s", upstream.name, problem)
        raise ApiError(503, f"They were not accepted: {problem}") from None
    await context.send_command("accept-upstream", {"upstream": upstream.name, "tools": choices})
    await context.publish("tools", {})
    return {}


async def apply_accept(context: ConsoleContext, data: Object) -> None:
    """Accept in this worker what it lists with the same definitions."""
    upstream = context.server.upstreams.get(data["upstream"])
    if upstream is not None:
        _accept(upstream, _choices(data["tools"]))


def _accept(upstream: Upstream, choices: Mapping[str, Choice]) -> None:
    classes = {}
    for tool in upstream.tools:
        choice = choices.get(tool.own_name)
        is_done = choice is None or (tool.state == "listed" and tool.accepted == choice.tool_class)
        if choice is not None and not is_done and fingerprint(tool.raw) == choice.fingerprint:
            classes[tool.own_name] = choice.tool_class
    if classes:
        upstream.accept(classes)


def _choices(value: Json) -> dict[str, Choice]:
    try:
        choices = convert(value, dict[str, Choice])
    except ValidationError as problem:
        raise ApiError(400, f"tools: {problem}") from None
    if not choices:
        raise ApiError(400, "tools: there is none to accept")
    return choices


def _requested(context: ConsoleContext, request: ApiRequest) -> Upstream:
    name, upstreams = request.path["name"], context.server.upstreams
    if name not in upstreams:
        suggestion = closest(name, upstreams)
        hint = f"; did you mean {suggestion!r}?" if suggestion else ""
        raise ApiError(404, f"There is no upstream {name[:200]!r}{hint}")
    return upstreams[name]
