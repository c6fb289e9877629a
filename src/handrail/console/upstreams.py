"""The upstream servers of a gateway: how each one is, and what its tools are taken for.

Each worker has connections of its own to an upstream; a row of the page is the sum of all workers. A person accepts
definitions, not names: a tool that has changed since the person looked is not accepted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct, ValidationError, convert, field, structs
from msgspec.json import decode

from handrail.client.tools import MAX_DESCRIPTION, estimated_tokens, signature
from handrail.console.access import ApiError, ApiRequest
from handrail.console.context import ConsoleContext
from handrail.console.tools import MAX_CHANGES, change_row
from handrail.errors import AuthorizationError
from handrail.gateway.sign_in import is_anonymous
from handrail.gateway.trust import ToolClass
from handrail.guards.tool_definitions import LockError, fingerprint
from handrail.jsonrpc import encode
from handrail.model import Json, Object
from handrail.text.controls import mask, one_line

if TYPE_CHECKING:
    from handrail.gateway.upstream import Upstream, UpstreamTool

_STATES = ("stopped", "down", "starting", "up", "new")  # of several workers, the first of these counts
_SUMS = ("calls", "errors", "restarts", "sessions")
MAX_CALLERS = 1_000  # that are shown as signed in
_TOOL_COUNTS = ("tools", "tokens", "unseen", "new", "changed")


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
    totals = {name: one[name] + other[name] for name in _SUMS}
    totals |= {name: max(one[name], other[name]) for name in ("latency_ms", *_TOOL_COUNTS)}
    lossy: dict[str, int] = dict(Counter(one["lossy"]) + Counter(other["lossy"]))
    left_out = {  # each worker has the same lists, and perhaps callers of other revisions
        revision: {**one["left_out"].get(revision, {}), **other["left_out"].get(revision, {})}
        for revision in sorted({*one["left_out"], *other["left_out"]})
    }
    worst = {"state": worse["state"], "problem": worse["problem"]}
    return {**newest, **totals, **worst, "lossy": lossy, "left_out": left_out}


def _row(context: ConsoleContext, upstream: Upstream) -> Object:
    members = {
        "name": upstream.name,
        "prefix": upstream.terms.prefix,
        "target": one_line(upstream.target.label, 300),
        "state": upstream.state,
        "problem": upstream.problem,
        "revision": upstream.revision,
        "era": upstream.era,
        "since": upstream.era_since,
        "latency_ms": round(upstream.latency_ms, 3),
        "lossy": dict(upstream.lossy),
        "left_out": {revision: dict(losses) for revision, losses in sorted(upstream.catalog.losses.items())},
        "trusted": upstream.terms.trusted,
    }
    sessions = sum(each.connection.is_open for each in upstream.pool.sessions.values())
    numbers = {name: {**upstream.counts, "sessions": sessions}.get(name, 0) for name in _SUMS}
    redacted: Object = context.redactor.definition({**members, **numbers, **_tool_counts(context, upstream)})
    return redacted


def _tool_counts(context: ConsoleContext, upstream: Upstream) -> Mapping[str, int]:
    """Return how many tools it offers, what they cost a model, and how many a person has to look at."""
    cached = context.upstream_counts.get(upstream.name)
    if cached is not None and cached[0] is upstream.tools:  # each listing is a list of its own
        return cached[1]
    totals = dict.fromkeys(_TOOL_COUNTS, 0)
    for tool in upstream.tools:
        entry = context.engine.find("tool", tool.name)[0]
        is_offered = tool.state in ("listed", "new") and entry is not None and not entry.withheld
        totals["unseen"] += tool.state == "listed" and not tool.accepted and not upstream.terms.trusted
        totals["new"] += tool.state == "new"
        totals["changed"] += tool.state == "quarantined"
        totals["tools"] += is_offered
        totals["tokens"] += _tokens(context, tool) if is_offered else 0
    context.upstream_counts[upstream.name] = upstream.tools, totals
    return totals


def _tokens(context: ConsoleContext, tool: UpstreamTool) -> int:
    """Return what the definition costs a model, as callers get it."""
    entry = context.engine.find("tool", tool.name)[0]
    listed = {**tool.raw, "name": tool.name} if entry is None else entry.definition(context.engine.offer.newest)
    return estimated_tokens(listed) if tool.raw else 0


# One of them


async def view(context: ConsoleContext, request: ApiRequest) -> Object:
    """Return the tools of an upstream, and the last lines of its standard error in all workers."""
    upstream = find(context, request.path["name"])
    replies = [decode(each) for each in await context.ask_workers("stderr", {"upstream": upstream.name})]
    return {
        "tools": [_tool_row(context, each) for each in upstream.tools],
        "sign_ins": await _sign_ins(upstream, request.session.who),
        "stderr": sorted((each for each in replies if each["lines"]), key=lambda each: str(each["worker"])),
    }


async def _sign_ins(upstream: Upstream, who: str) -> Json:
    """Return who has signed in, where each caller does; None where callers do not."""
    if upstream.sign_in is None:
        return None
    callers = await upstream.sign_in.grants.callers()
    return {"is_signed_in": who in callers, "callers": sorted(callers)[:MAX_CALLERS], "count": len(callers)}


async def publish_stderr(context: ConsoleContext, data: Object) -> None:
    lines = [context.redactor.text(each) for each in context.server.upstreams[data["upstream"]].stderr]
    await context.topics.publish(data["topic"], encode({"worker": context.worker, "lines": lines}))


def _tool_row(context: ConsoleContext, tool: UpstreamTool) -> Object:
    members = structs.asdict(tool)
    raw: Object = members.pop("raw")
    title, description, claims = raw.get("title"), raw.get("description"), raw.get("annotations")
    members |= {
        "title": title if type(title) is str else "",
        "description": description[:MAX_DESCRIPTION] if type(description) is str else "",
        "signature": signature(raw) if raw else "",
        "hints": {name: claims[name] for name in claims if name.endswith("Hint")} if type(claims) is dict else {},
        "changes": [change_row(each) for each in tool.changes[:MAX_CHANGES]],
        "fingerprint": fingerprint(raw),
        "tokens": _tokens(context, tool),
    }
    redacted: Object = context.redactor.definition(members)
    return redacted


def find(context: ConsoleContext, name: str) -> Upstream:
    upstream = context.server.upstreams.get(name)
    if upstream is None:
        raise ApiError(404, f"There is no upstream {name[:200]!r}")
    return upstream


# What a person does


async def sign_in(context: ConsoleContext, request: ApiRequest) -> Object:
    """Begin the sign-in of the person at the console, or finish it with the code of the page."""
    upstream, who = find(context, request.path["name"]), request.session.who
    code = request.body_text("code", "")
    if upstream.sign_in is None:
        raise ApiError(409, f"Callers do not sign in to {upstream.name}; its credentials are those of the gateway")
    if is_anonymous(who):
        raise ApiError(403, upstream.sign_in.reason(who))
    try:
        if not code:
            begun = await upstream.sign_in.begin(who, context.endpoint)
            return {"url": begun.pending.url, "host": begun.host, "needs_code": begun.needs_code}
        is_confirmed = await upstream.sign_in.grants.confirm(who, code)
    except AuthorizationError as problem:
        raise ApiError(503, f"No sign-in is possible: {one_line(mask(problem.text), 300)}") from None
    if not is_confirmed:
        raise ApiError(409, "That is not the code on the page, or the sign-in has expired; begin again")
    await context.publish("tools", {})
    return {}


async def sign_out(context: ConsoleContext, request: ApiRequest) -> Object:
    """Revoke the grant of a caller, in all workers."""
    upstream, caller = find(context, request.path["name"]), request.body_text("caller")
    if upstream.sign_in is None or caller not in await upstream.sign_in.grants.callers():
        raise ApiError(404, f"{caller[:200]!r} has not signed in to {upstream.name}")
    step = f"revoked sign-in of {one_line(caller, 200)} to upstream {one_line(upstream.name, 100)}"
    await context.write_audit_record(request.session, step)
    await upstream.sign_in.grants.revoke(caller)
    await context.publish("tools", {})
    return {}


async def refresh(context: ConsoleContext, request: ApiRequest) -> Object:
    """Fetch the lists of an upstream anew, in all workers; one that does not run is started."""
    upstream = find(context, request.path["name"])
    if upstream.is_stopped:
        raise ApiError(409, f"{upstream.name} is stopped; start it first")
    await context.send_command("refresh-upstream", {"upstream": upstream.name})
    return {}


async def apply_refresh(context: ConsoleContext, data: Object) -> None:
    context.spawn(context.server.upstreams[data["upstream"]].refresh())


async def accept(context: ConsoleContext, request: ApiRequest) -> Object:
    """Accept definitions of tools with their classes, as the person has seen them."""
    upstream, choices = find(context, request.path["name"]), _choices(request.body.get("tools"))
    tools = {each.own_name: each for each in upstream.tools if each.state in ("listed", "new", "quarantined")}
    records = []
    for own_name, choice in choices.items():
        if own_name not in tools or fingerprint(tools[own_name].raw) != choice.fingerprint:
            raise ApiError(409, f"{one_line(own_name)} has changed since you looked; look at it again, then accept it")
        records.append((f"accepted: {choice.tool_class}", tools[own_name].name, choice.fingerprint))
    session = request.session
    await asyncio.gather(*(context.write_audit_record(session, s, tool=t, fingerprint=f) for s, t, f in records))
    try:
        _accept(upstream, choices)
    except (LockError, OSError) as problem:
        raise ApiError(503, f"They were not accepted: {problem}") from None
    await context.send_command("accept-upstream", {"upstream": upstream.name, "tools": choices})
    await context.publish("tools", {})
    return {}


async def apply_accept(context: ConsoleContext, data: Object) -> None:
    """Accept in this worker what it lists with the same definitions."""
    _accept(find(context, data["upstream"]), _choices(data["tools"]))


def _accept(upstream: Upstream, choices: Mapping[str, Choice]) -> None:
    classes = {
        tool.own_name: choice.tool_class
        for tool in upstream.tools
        if (choice := choices.get(tool.own_name)) is not None and fingerprint(tool.raw) == choice.fingerprint
        if (tool.state, tool.accepted) != ("listed", choice.tool_class)  # this worker has done it already
    }
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
