"""The tools, resources and prompts of a server as one caller sees them, with the reason for each that is hidden.

The lists are made by the function that answers `tools/list`. Pins are the earlier definitions of the tools: those of
`tools.lock` beside the served file, or else those at the first start with this store, until a person accepts a change.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256

from msgspec import UNSET, Struct, UnsetType, to_builtins
from msgspec.json import decode

from handrail.client.tools import MAX_DESCRIPTION, estimated_tokens, safe_icons, signature
from handrail.console.access import ApiError, ApiRequest, RawResponse
from handrail.console.context import ConsoleContext
from handrail.engine.catalog import ToolEntry, title_of
from handrail.engine.dispatcher import Dispatcher, list_page
from handrail.engine.prompts import PromptEntry
from handrail.engine.reply_channel import NullChannel
from handrail.engine.resources import ResourceEntry
from handrail.errors import PeerError
from handrail.guards.limits import ANONYMOUS, LOCAL, Plans, Rate, Rates
from handrail.guards.sanitize import check_media
from handrail.guards.tool_definitions import (
    Change,
    LockedServer,
    LockError,
    comparable,
    compare_definitions,
    definition,
    fingerprint,
    read_lock,
)
from handrail.jsonrpc import encode
from handrail.model import Json, Object, Principal, ResourceTemplate
from handrail.observe.activity import Tally
from handrail.revisions import Revision
from handrail.revisions.base import LISTS
from handrail.stores import Put
from handrail.suggest import closest
from handrail.text.controls import confusable_names, escape, texts_in

__all__ = ["accept", "apply_switch", "icon", "load_pins", "publish_tally", "restore_switches", "switch", "view", "wire"]

SWITCH_PREFIX = "console-switch:"  # of the topics' keys, one for each switched entry, while the server runs
TOOLS = "tools/list"
_METHODS = {"resources": ("resources/list", "resources/templates/list"), "prompts": ("prompts/list",)}
_ICON_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")

LOCK_FILE = "tools.lock"
MAX_SIDE_CHARS = 4_000  # of one side of a difference
MAX_CHANGES = 50
CHANGE_LABELS = {
    "wording": "wording",
    "widened": "schema widened",
    "narrowed": "schema narrowed",
    "schema": "schema changed",
    "hint": "new hint",
    "invisible": "invisible characters",
    "new": "new",
    "gone": "gone",
}


class Viewer(Struct):
    """The caller whose view of the tools, resources or prompts is on the page."""

    principal: Principal
    revision: Revision


async def view(context: ConsoleContext, request: ApiRequest) -> Object:
    """Return the tools, the resources and templates, or the prompts."""
    methods, totals = lists_of(request), await _collect_tallies(context)
    viewer, pins = _viewer_of(context, request, totals), await load_pins(context)
    rows: list[Object] = []
    size = 0
    for method in methods:
        entries = context.engine.catalogs[method].entries
        is_offered = bool(entries) and method in viewer.revision.requests
        responses = _list_responses(context, viewer, method) if is_offered else []
        raw_entries = [each for response in responses for each in decode(response)["result"][LISTS[method]]]
        listed = {each.get("uri", each.get("uriTemplate", each["name"])): each for each in raw_entries}
        look_alike_names = dict(confusable_names(entry.name for entry in entries))
        rows += [
            _row(context, viewer, method, each, listed.get(each.name), pins, look_alike_names, totals)
            for each in entries
        ]
        size += sum(map(len, responses))
    return {
        "as": viewer.principal.id,
        "scopes": sorted(viewer.principal.scopes),
        "revision": viewer.revision.name,
        "principals": [*dict.fromkeys([LOCAL, ANONYMOUS, *context.guards.policy.principals, *totals.principals])],
        "revisions": context.engine.offer.supported,
        LISTS[methods[0]]: rows,
        "tokens": sum(each["tokens"] for each in rows if each["exposed"]),
        "bytes": size,
    }


async def wire(context: ConsoleContext, request: ApiRequest) -> RawResponse:
    """Return the responses to `tools/list`, one page a line."""
    viewer = _viewer_of(context, request, await _collect_tallies(context))
    return RawResponse(b"\n".join(_list_responses(context, viewer, TOOLS)), "text/plain; charset=utf-8")


async def switch(context: ConsoleContext, request: ApiRequest) -> Object:
    """Switch a tool, a resource or a prompt on or off, in all workers."""
    (method, entry), on = _requested_entry(context, request), request.body.get("on")
    if type(on) is not bool:
        raise ApiError(400, "on: expected true or false")
    await context.write_audit_record(request.session, "switched on" if on else "switched off", tool=entry.label)
    await context.topics.put(f"{SWITCH_PREFIX}{method} {entry.name}", encode(on))
    await context.send_command("switch", {"list": method, "name": entry.name, "on": on})
    return {}


async def apply_switch(context: ConsoleContext, data: Object) -> None:
    """Switch an entry on or off in this worker."""
    context.engine.catalogs[data["list"]].switch(data["name"], data["on"])


async def restore_switches(context: ConsoleContext) -> None:
    """Apply earlier switches in a worker that starts later."""
    after = ""
    while rows := await context.topics.scan(SWITCH_PREFIX, after=after):
        for key, on in rows:
            method, _, name = key.removeprefix(SWITCH_PREFIX).partition(" ")
            await apply_switch(context, {"list": method, "name": name, "on": decode(on)})
        after = rows[-1][0]


async def accept(context: ConsoleContext, request: ApiRequest) -> Object:
    _, entry = _requested_entry(context, request)
    if entry.upstream:
        raise ApiError(409, f"{entry.name[:200]} is a tool of {entry.upstream}; accept it on the page of that upstream")
    await context.write_audit_record(request.session, "accepted", tool=entry.tool.name, fingerprint=entry.fingerprint)
    await context.store.commit([_pin_op(context, entry)])
    await context.publish("tools", {})
    return {}


async def icon(context: ConsoleContext, request: ApiRequest) -> Object:
    """Fetch an icon when a person asks for it, from a public address, without sending who asks."""
    tool, index = _requested_entry(context, request)[1].tool, request.body.get("index")
    icons = [] if tool.icons is UNSET else tool.icons
    if type(index) is not int or not 0 <= index < len(icons):
        raise ApiError(404, f"{tool.name[:100]} has {len(icons)} icons, counted from 0")
    icon_row = _icon_row(icons[index])
    if icon_row["why_not"] or icon_row["src"]:
        raise ApiError(409, icon_row["why_not"] or "It is part of the tool: there is nothing to fetch")
    try:
        from handrail.oauth.http import fetch_public

        data = await fetch_public(icon_row["from"])
    except ModuleNotFoundError as problem:
        raise ApiError(501, str(problem)) from None
    except (PeerError, ValueError) as problem:
        raise ApiError(502, f"The icon was not fetched: {problem}") from None
    media_type = next((each for each in _ICON_TYPES if check_media(each, data) is None), "")
    if not media_type:
        raise ApiError(502, "The file at that address is not a picture in PNG, JPEG, GIF or WebP")
    return {"src": f"data:{media_type};base64,{b64encode(data).decode()}"}


def lists_of(request: ApiRequest) -> tuple[str, ...]:
    """Return the methods that list what the path is about."""
    kind = request.path.get("kind")
    if kind is not None and kind not in _METHODS:
        raise ApiError(404, f"{kind[:40]!r} is not one of {', '.join(_METHODS)}")
    return (TOOLS,) if kind is None else _METHODS[kind]


def _requested_entry(context: ConsoleContext, request: ApiRequest) -> tuple[str, ToolEntry]:
    name, methods = request.path["name"], lists_of(request)
    entries = {entry.name: (each, entry) for each in methods for entry in context.engine.catalogs[each].entries}
    if name not in entries:
        suggestion, kind = closest(name, entries), LISTS[methods[0]][:-1]
        raise ApiError(
            404, f"There is no {kind} {name[:200]!r}" + (f"; did you mean {suggestion!r}?" if suggestion else "")
        )
    return entries[name]


def _viewer_of(context: ConsoleContext, request: ApiRequest, totals: WorkerTally) -> Viewer:
    query = request.query
    name = query.get("as") or request.session.who
    scopes = totals.principals.get(name, frozenset())
    if query.get("scopes"):
        scopes = frozenset(filter(None, (each.strip() for each in query["scopes"].split(","))))
    return Viewer(Principal(name, scopes), context.revision(query.get("revision", "")))


def _list_responses(context: ConsoleContext, viewer: Viewer, method: str) -> list[bytes]:
    """Return the responses to a request for a list, page by page. No rate limit is charged."""
    conversation = Dispatcher(context.engine, NullChannel(), viewer.principal)
    responses: list[bytes] = []
    cursor: str | UnsetType = UNSET
    while True:
        responses.append(list_page(method, conversation, len(responses) + 1, viewer.revision, cursor).body)
        cursor = decode(responses[-1])["result"].get("nextCursor")
        if not cursor:
            return responses


# Calls and callers, by worker


class WorkerTally(Struct):
    """The calls by tool, and the callers, of one worker or of all."""

    tools: dict[str, Tally] = {}
    principals: dict[str, frozenset[str]] = {}  # the scopes, by principal id

    def add(self, other: WorkerTally) -> None:
        for name, tally in other.tools.items():
            self.tools.setdefault(name, Tally()).add(tally)
        self.principals = {**other.principals, **self.principals}


async def _collect_tallies(context: ConsoleContext) -> WorkerTally:
    """Return the sum of all workers that answer in time."""
    if context.workers == 1:
        return _own_tally(context)
    totals = WorkerTally()
    for reply in await context.ask_workers("tally", {}):
        totals.add(decode(reply, type=WorkerTally))
    return totals


async def publish_tally(context: ConsoleContext, data: Object) -> None:
    await context.topics.publish(data["topic"], encode(_own_tally(context)))


def _own_tally(context: ConsoleContext) -> WorkerTally:
    return WorkerTally(
        context.feed.tools, {principal.id: principal.scopes for principal in context.feed.principals.values()}
    )


# One entry


def _row(
    context: ConsoleContext,
    viewer: Viewer,
    method: str,
    entry: ToolEntry,
    listed: Object | None,
    pins: ConsolePins,
    look_alike_names: dict[str, str],
    totals: WorkerTally,
) -> Object:
    tool, tally = entry.tool, totals.tools.get(entry.label, Tally())
    members: Object = {
        "name": entry.name,
        "title": title_of(entry) or entry.name,
        "description": "" if tool.description is UNSET else tool.description,
        "input_schema": tool.input_schema,
        "icons": [_icon_row(each) for each in getattr(entry, "listing", tool).icons or []],
        "tags": sorted(entry.tags),
        "scopes": sorted(entry.scopes),
        "on": context.engine.catalogs[method].is_on(entry),
        "exposed": listed is not None,
        "hidden_because": "" if listed is not None else _hidden_because(context, viewer, method, entry),
        "limits": list(_limits(context, viewer.principal, entry)),
        "calls": tally.calls,
        "errors": tally.errors,
        "refused": tally.refused,
        "p95_ms": round(tally.p95 * 1000, 3),
        "last": tally.last,
        "tokens": estimated_tokens(entry.definition(viewer.revision) if listed is None else listed),
        "upstream": entry.upstream,
        "stopped": ("tool", entry.name) in context.engine.stops,
        "warnings": list(_warnings(entry, look_alike_names, context.lock_flaw if method == TOOLS else "")),
        **_verdict(context, viewer, entry),
    }
    if isinstance(entry, ResourceEntry | PromptEntry):
        members |= _listing_members(entry)
    else:
        members |= {"signature": signature(definition(tool)), "fingerprint": entry.fingerprint}
        members |= {"annotations": tool.annotations or {}, "pin": pins.state(entry)}
        members |= {} if tool.output_schema is UNSET else {"output_schema": tool.output_schema}
    redacted: Object = context.redactor.definition(members)
    return redacted


def _listing_members(entry: ResourceEntry | PromptEntry) -> Object:
    """Return what is listed of a resource or a prompt only."""
    listing, completes = to_builtins(entry.listing), sorted(entry.complete)
    kind = "template" if isinstance(entry.listing, ResourceTemplate) else entry.kind
    members = {name: listing[name] for name in ("mimeType", "size", "annotations") if name in listing}
    if isinstance(entry, ResourceEntry) and entry.template is not None:  # what has a default may be required in a URI
        required = [each for each in entry.template.names if each not in entry.template.optional]
        members["input_schema"] = {**entry.tool.input_schema, "required": required}
    return {"kind": kind, "own_name": entry.listing.name, "completes": completes, **members}


def _hidden_because(context: ConsoleContext, viewer: Viewer, method: str, entry: ToolEntry) -> str:
    if not context.engine.catalogs[method].is_on(entry):
        return "It is switched off"
    if not entry.is_visible_to(viewer.principal.scopes):
        missing = " ".join(sorted(entry.scopes - viewer.principal.scopes))
        return f"Its author shows it only to callers with the scope {missing}"
    if entry.withheld:
        return f"It {entry.withheld}"
    hiding = context.guards.policy.hides(viewer.principal, entry.subject, viewer.revision.name)
    return f"This server lists no {entry.kind}s" if hiding is None else f"Hidden by {hiding.rule}: {hiding.why}"


def _verdict(context: ConsoleContext, viewer: Viewer, entry: ToolEntry) -> Object:
    missing_scopes = entry.scopes - viewer.principal.scopes
    if missing_scopes:
        return {
            "verdict": "deny",
            "rule": "scopes",
            "why": f"its author wants the scope {' '.join(sorted(missing_scopes))}",
        }
    outcomes = context.guards.policy.possible_decisions(viewer.principal, entry.subject, viewer.revision.name)
    if len({each.verdict for each in outcomes}) == 1:
        return {"verdict": outcomes[0].verdict, "rule": outcomes[0].rule, "why": outcomes[0].why}
    reasons = "; ".join(f"{each.verdict} by {each.rule} ({each.why})" for each in outcomes[:-1])
    last = f"{outcomes[-1].verdict} by {outcomes[-1].rule}"
    return {"verdict": "depends", "rule": ", ".join(each.rule for each in outcomes), "why": f"{reasons}; else {last}"}


def _limits(context: ConsoleContext, principal: Principal, entry: ToolEntry) -> Iterator[str]:
    rates = context.engine.guard_options.get("rates", Rates())
    if rates is not None:
        plan = Plans(rates, context.guards.find_limit)[entry.limit_name]
        own, is_shared = plan.rate, plan.owner != "this tool"
        if own.rate:
            yield f"{_rate_text(own.rate)} of {plan.owner if is_shared else f'this {entry.kind}'}, by each caller"
        if own.concurrent is not None:
            yield f"{own.concurrent}{f' of {plan.owner}' if is_shared else ''} at once, by all callers"
        everything = rates.address if principal.id == ANONYMOUS else rates.principal
        if everything and (principal.id != LOCAL or rates.local):
            counted_by = "each address" if principal.id == ANONYMOUS else "each caller"
            yield f"{_rate_text(everything)} of all tools, by {counted_by}"
        if own.cost != 1:
            yield f"each counts as {own.cost:g} calls"
    yield f"cancelled after {entry.idle:g} s without progress, or {entry.total:g} s in all"


def _rate_text(text: str) -> str:
    rate = Rate.parse(text)
    burst = f", {rate.burst:,} in one go" if rate.burst != rate.count else ""
    return f"{rate.count:,} a {rate.unit}{burst}"


def _warnings(entry: ToolEntry, look_alike_names: dict[str, str], flaw: str) -> Iterator[str]:
    if flaw:
        yield f"It cannot be compared with its locked definition: {flaw}"
    value = entry.tool.description
    if value is not UNSET and len(value) > MAX_DESCRIPTION:
        yield f"Its description has {len(value):,} characters: clients leave out what has over {MAX_DESCRIPTION:,}"
    if (other := look_alike_names.get(entry.tool.name)) is not None:
        yield f"Its name looks like {other!a}"
    for member, value in definition(entry.tool).items():
        if any(escape(text) != text for text in texts_in(value)):
            yield f"Its {member} has characters that are invisible or control a terminal"


def _icon_row(icon_json: Json) -> Object:
    source = icon_json.get("src") if type(icon_json) is dict else None
    blank_row = {"src": "", "from": "", "why_not": ""}
    if type(source) is not str or not safe_icons([icon_json]):
        source_start = source[:60] if type(source) is str else ""
        is_svg = source_start.lower().startswith("data:image/svg")
        reason = "drawings in SVG can hold programs" if is_svg else "it is neither a small picture nor an https address"
        return {**blank_row, "why_not": f"Not shown: {reason}"}
    return {**blank_row, "src" if source[:5].lower() == "data:" else "from": source}


# Pins: earlier definitions of tools


class ConsolePins:
    """The pins of one server. `locked` has priority, unless the current definition of a tool was accepted here."""

    def __init__(
        self,
        context: ConsoleContext,
        baselines: dict[str, tuple[float, Object]],
        locked: LockedServer | None,
        since: float,
    ) -> None:
        upstreams = context.server.upstreams.values()  # whose tools the gateway pins
        self._upstream_tools = {tool.name: tool for upstream in upstreams for tool in upstream.tools}
        self._baselines = baselines
        self._locked = locked
        self._since = since
        self._newest = context.engine.offer.newest.name

    def state(self, entry: ToolEntry) -> Object:
        name = entry.tool.name
        if entry.upstream:
            tool = self._upstream_tools.get(name)
            state = {"quarantined": "changed", "new": "new"}.get(tool.state, "pinned") if tool else "none"
            change_rows = [change_row(each) for each in tool.changes[:MAX_CHANGES]] if tool else []
            return {"state": state, "since": 0.0, "changes": change_rows}
        at, baseline = self._baselines.get(name, (0.0, None))
        if baseline is not None and fingerprint(baseline) == entry.fingerprint:
            return {"state": "pinned", "since": at, "changes": []}
        if self._locked is None:
            previous, revision = baseline, self._newest
        else:
            previous, at, revision = self._locked.tools.get(name), self._since, self._locked.revision
        if previous is None:
            return {"state": "new", "since": 0.0, "changes": []}
        differences = compare_definitions(*comparable(previous, revision, definition(entry.tool), self._newest))
        change_rows = [change_row(each) for each in differences[:MAX_CHANGES]]
        return {"state": "changed" if differences else "pinned", "since": at, "changes": change_rows}


async def load_pins(context: ConsoleContext) -> ConsolePins:
    """Load the pins; the first time, store the current definitions of all tools."""
    locked, since = _read_lock_file(context)
    prefix, after = _pin_prefix(context), ""
    mark = prefix.replace("tool", "tools", 1)
    if locked is None and await context.store.get(mark) is None:
        pin_ops = (_pin_op(context, entry) for entry in context.engine.catalog.entries if not entry.upstream)
        await context.store.commit([Put(mark, b"", if_absent=True), *pin_ops])
    baselines: dict[str, tuple[float, Object]] = {}
    while rows := await context.store.scan(prefix, after=after):
        baselines |= {key[len(prefix) :]: tuple(decode(raw)) for key, raw in rows}
        after = rows[-1][0]
    return ConsolePins(context, baselines, locked, since)


def _pin_op(context: ConsoleContext, entry: ToolEntry) -> Put:
    return Put(_pin_prefix(context) + entry.tool.name, encode([context.clock(), definition(entry.tool)]))


def _pin_prefix(context: ConsoleContext) -> str:
    """Return the prefix of this server's pins: several servers may share a store, and a name."""
    return f"console-tool:{sha256(encode([context.server.name, str(context.source)])).hexdigest()[:16]}:"


def _read_lock_file(context: ConsoleContext) -> tuple[LockedServer | None, float]:
    """Return this server's part of the `tools.lock` beside the served file, and the time of that file."""
    path = None if context.source is None else context.source.parent / LOCK_FILE
    if path is None or not path.is_file():
        return None, 0.0
    stamp = path.stat().st_mtime
    lock_state = context.lock_file
    if lock_state is None or lock_state[1] != stamp:
        context.lock_flaw = ""
        try:
            servers = read_lock(path)
            only_server = next(iter(servers.values())) if len(servers) == 1 else None
            lock_state = servers.get(context.server.name) or only_server, stamp
        except LockError as problem:  # then no tool counts as agreed to
            context.lock_flaw = str(problem)
            lock_state = LockedServer("", "", {}), stamp
        context.lock_file = lock_state
    return lock_state


def change_row(change: Change) -> Object:
    sides = {side: _side(getattr(change, side)) for side in ("before", "after")}
    return {"kind": CHANGE_LABELS.get(change.kind, change.kind), "path": change.path, **sides}


def _side(value: Json) -> str:
    if value is UNSET:
        return ""
    text = value if type(value) is str else json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= MAX_SIDE_CHARS else text[: MAX_SIDE_CHARS - 1] + "…"
