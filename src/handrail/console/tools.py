"""The tools of a server as one caller finds them, with a reason for whatever that caller does not.

What is listed comes from the wire's own function.
"""

from __future__ import annotations

import asyncio
import secrets
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, UnsetType
from msgspec.json import decode

from handrail.client.signature import signature
from handrail.client.tools import MAX_DESCRIPTION, safe_icons
from handrail.console.access import ApiError, ApiRequest, RawResponse
from handrail.console.pins import ConsolePins, load_pins, pin_op
from handrail.engine.catalog import ToolEntry, title_of
from handrail.engine.dispatcher import Dispatcher
from handrail.errors import PeerError
from handrail.guards.fingerprint import definition
from handrail.guards.limits import ANONYMOUS, LOCAL
from handrail.guards.rates import Rate, Rates
from handrail.jsonrpc import encode
from handrail.model import Json, Object, Principal
from handrail.observe.per_minute import Tally
from handrail.revisions import Revision
from handrail.schema.explain import closest
from handrail.text.confusables import confusable_names
from handrail.text.controls import escape, texts_in
from handrail.text.media import check_media

if TYPE_CHECKING:
    from handrail.console import Console

__all__ = ["accept", "apply_switch", "icon", "publish_tally", "restore_switches", "switch", "view", "wire"]

SWITCH_PREFIX = "console-switch:"  # of a tool, among what the workers share: as long as the server runs
TALLY_SECONDS = 0.5
BYTES_PER_TOKEN = 4  # about: models differ
_ICON_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")


class _Viewer(Struct):
    """Whose view it is."""

    principal: Principal
    revision: Revision


async def view(console: Console, request: ApiRequest) -> Object:
    totals = await _collect_tallies(console)
    viewer = _viewer_of(console, request, totals)
    responses = _list_responses(console, viewer)
    listed = [each for response in responses for each in decode(response)["result"]["tools"]]
    by_name = {str(each["name"]): each for each in listed}
    entries, tool_pins = console.engine.catalog.entries, await load_pins(console)
    look_alike_names = dict(confusable_names(entry.tool.name for entry in entries))
    tools = [
        _tool_row(console, viewer, each, by_name.get(each.tool.name), tool_pins, look_alike_names, totals)
        for each in entries
    ]
    offer = console.engine.offer
    return {
        "as": viewer.principal.id,
        "scopes": sorted(viewer.principal.scopes),
        "revision": viewer.revision.name,
        "principals": [*dict.fromkeys([LOCAL, ANONYMOUS, *console.gate.policy.principals, *totals.principals])],
        "revisions": offer.supported,
        "tools": tools,
        "tokens": sum(each["tokens"] for each in tools if each["exposed"]),
        "bytes": sum(map(len, responses)),
    }


async def wire(console: Console, request: ApiRequest) -> RawResponse:
    """The answers to `tools/list`, a line each: more than one only if there is more than a page."""
    viewer = _viewer_of(console, request, await _collect_tallies(console))
    return RawResponse(b"\n".join(_list_responses(console, viewer)), "text/plain; charset=utf-8")


async def switch(console: Console, request: ApiRequest) -> Object:
    name, on = _requested_entry(console, request).tool.name, request.body.get("on")
    if type(on) is not bool:
        raise ApiError(400, "on: expected true or false")
    await console.write_audit_record(request.session, "switched on" if on else "switched off", tool=name)
    await console.topics.put(SWITCH_PREFIX + name, encode(on))
    await console.send_command("switch", {"tool": name, "on": on})
    return {}


async def apply_switch(console: Console, data: Object) -> None:
    """In every worker."""
    console.engine.catalog.switch(data["tool"], data["on"])


async def restore_switches(console: Console) -> None:
    """In a worker that begins after somebody has switched."""
    after = ""
    while rows := await console.topics.scan(SWITCH_PREFIX, after=after):
        for key, on in rows:
            await apply_switch(console, {"tool": key.removeprefix(SWITCH_PREFIX), "on": decode(on)})
        after = rows[-1][0]


async def accept(console: Console, request: ApiRequest) -> Object:
    entry = _requested_entry(console, request)
    await console.write_audit_record(request.session, "accepted", tool=entry.tool.name, fingerprint=entry.fingerprint)
    await console.store.commit([pin_op(console, entry)])
    await console.publish("tools", {})
    return {}


async def icon(console: Console, request: ApiRequest) -> Object:
    """Fetch a picture that somebody wants to see, from a public address, without saying who asks."""
    tool, index = _requested_entry(console, request).tool, request.body.get("index")
    icons = [] if tool.icons is UNSET else tool.icons
    if type(index) is not int or not 0 <= index < len(icons):
        raise ApiError(404, f"{tool.name[:100]} has {len(icons)} icons, counted from 0")
    icon_row = _icon_row(icons[index])
    if icon_row["why_not"] or icon_row["src"]:
        raise ApiError(409, icon_row["why_not"] or "It is part of the tool: there is nothing to fetch")
    try:
        from handrail.oauth.outbound import fetch_public

        data = await fetch_public(icon_row["from"])
    except ModuleNotFoundError as problem:
        raise ApiError(501, str(problem)) from None
    except (PeerError, ValueError) as problem:
        raise ApiError(502, f"The icon was not fetched: {problem}") from None
    media_type = next((each for each in _ICON_TYPES if check_media(each, data) is None), "")
    if not media_type:
        raise ApiError(502, "What is at that address is not a picture that may be shown (PNG, JPEG, GIF or WebP)")
    return {"src": f"data:{media_type};base64,{b64encode(data).decode()}"}


def _requested_entry(console: Console, request: ApiRequest) -> ToolEntry:
    name = request.path["name"]
    entries = {entry.tool.name: entry for entry in console.engine.catalog.entries}
    if name not in entries:
        suggestion = closest(name, entries)
        raise ApiError(
            404, f"There is no tool {name[:200]!r}" + (f"; did you mean {suggestion!r}?" if suggestion else "")
        )
    return entries[name]


def _viewer_of(console: Console, request: ApiRequest, totals: _WorkerTally) -> _Viewer:
    query = request.query
    name = query.get("as") or request.session.who
    scopes = totals.principals.get(name, frozenset())
    if query.get("scopes"):
        scopes = frozenset(filter(None, (each.strip() for each in query["scopes"].split(","))))
    return _Viewer(Principal(name, scopes), console.revision(query.get("revision", "")))


class _NullOutlet:
    def send(self, message: bytes) -> None: ...
    async def drain(self) -> None: ...


class _Cursor(Struct):
    cursor: str | UnsetType = UNSET


def _list_responses(console: Console, viewer: _Viewer) -> list[bytes]:
    """What the wire would say, page by page; nobody's limits are charged for looking."""
    conversation = Dispatcher(console.engine, _NullOutlet(), viewer.principal)
    responses: list[bytes] = []
    params = _Cursor()
    while True:
        responses.append(conversation._list(len(responses) + 1, viewer.revision, params, None))
        cursor = decode(responses[-1])["result"].get("nextCursor")
        if not cursor:
            return responses
        params = _Cursor(cursor)


# What workers know of callers and calls


class _WorkerTally(Struct):
    """What one of them has seen, or all of them."""

    tools: dict[str, Tally] = {}
    principals: dict[str, frozenset[str]] = {}  # and their scopes

    def add(self, other: _WorkerTally) -> None:
        for name, tally in other.tools.items():
            self.tools.setdefault(name, Tally()).add(tally)
        self.principals = {**other.principals, **self.principals}


async def _collect_tallies(console: Console) -> _WorkerTally:
    """Of all workers; but nobody waits for one that does not answer."""
    totals = _own_tally(console)
    if console.workers == 1:
        return totals
    totals, topic = _WorkerTally(), f"console-tally:{secrets.token_hex(8)}"
    async with console.topics.subscribe(topic) as replies:
        await console.send_command("tally", {"topic": topic})
        with suppress(TimeoutError):
            async with asyncio.timeout(TALLY_SECONDS):
                for _ in range(console.workers):
                    totals.add(decode(await anext(replies), type=_WorkerTally))
    return totals


async def publish_tally(console: Console, data: Object) -> None:
    await console.topics.publish(data["topic"], encode(_own_tally(console)))


def _own_tally(console: Console) -> _WorkerTally:
    return _WorkerTally(
        console.feed.tools, {principal.id: principal.scopes for principal in console.feed.principals.values()}
    )


# One tool


def _tool_row(
    console: Console,
    viewer: _Viewer,
    entry: ToolEntry,
    listed: Object | None,
    tool_pins: ConsolePins,
    look_alike_names: dict[str, str],
    totals: _WorkerTally,
) -> Object:
    tool, name = entry.tool, entry.tool.name
    claims: Object = {} if tool.annotations is UNSET else tool.annotations
    tally = totals.tools.get(name, Tally())
    size = len(encode(listed if listed is not None else viewer.revision.tool(tool)))
    members: Object = {
        "name": name,
        "title": title_of(entry) or name,
        "description": "" if tool.description is UNSET else tool.description,
        "signature": signature(definition(tool)),
        "input_schema": tool.input_schema,
        "annotations": claims,
        "icons": [_icon_row(each) for each in ([] if tool.icons is UNSET else tool.icons)],
        "tags": sorted(entry.tags),
        "scopes": sorted(entry.scopes),
        "on": console.engine.catalog.is_on(entry),
        "exposed": listed is not None,
        "hidden_because": "" if listed is not None else _hidden_because(console, viewer, entry),
        "limits": list(_limits(console, viewer.principal, entry)),
        "tokens": -(-size // BYTES_PER_TOKEN),
        "calls": tally.calls,
        "errors": tally.errors,
        "refused": tally.refused,
        "p95_ms": round(tally.p95 * 1000, 3),
        "last": tally.last,
        "fingerprint": entry.fingerprint,
        "pin": tool_pins.state(entry),
        "warnings": list(_warnings(entry, look_alike_names, console.state.get("lock-flaw", ""))),
        **_verdict(console, viewer, entry),
    }
    if tool.output_schema is not UNSET:
        members["output_schema"] = tool.output_schema
    redacted: Object = console.redactor.definition(members)
    return redacted


def _hidden_because(console: Console, viewer: _Viewer, entry: ToolEntry) -> str:
    if not console.engine.catalog.is_on(entry):
        return "It is switched off"
    if not entry.is_visible_to(viewer.principal.scopes):
        missing = " ".join(sorted(entry.scopes - viewer.principal.scopes))
        return f"Its author shows it only to callers with the scope {missing}"
    hiding = console.gate.policy.hides(viewer.principal, entry.facts, viewer.revision.name)
    return "This server lists no tools" if hiding is None else f"Hidden by {hiding.rule}: {hiding.why}"


def _verdict(console: Console, viewer: _Viewer, entry: ToolEntry) -> Object:
    missing_scopes = entry.scopes - viewer.principal.scopes
    if missing_scopes:
        return {
            "verdict": "deny",
            "rule": "scopes",
            "why": f"its author wants the scope {' '.join(sorted(missing_scopes))}",
        }
    outcomes = console.gate.policy.possible_decisions(viewer.principal, entry.facts, viewer.revision.name)
    if len({each.verdict for each in outcomes}) == 1:
        return {"verdict": outcomes[0].verdict, "rule": outcomes[0].rule, "why": outcomes[0].why}
    reasons = "; ".join(f"{each.verdict} by {each.rule} ({each.why})" for each in outcomes[:-1])
    last = f"{outcomes[-1].verdict} by {outcomes[-1].rule}"
    return {"verdict": "depends", "rule": ", ".join(each.rule for each in outcomes), "why": f"{reasons}; else {last}"}


def _limits(console: Console, principal: Principal, entry: ToolEntry) -> Iterator[str]:
    rates = console.engine.guard_options.get("rates", Rates())
    if rates is not None:
        own = next((each for name, each in rates.tools.items() if fnmatchcase(entry.tool.name, name)), rates.tool)
        if own.rate:
            yield f"{_rate_text(own.rate)} of this tool, by each caller"
        if own.concurrent is not None:
            yield f"{own.concurrent} at once, by all callers"
        everything = rates.address if principal.id == ANONYMOUS else rates.principal
        if everything and (principal.id != LOCAL or rates.local):
            counted_by = "each address" if principal.id == ANONYMOUS else "each caller"
            yield f"{_rate_text(everything)} of all tools, by {counted_by}"
        if own.cost != 1:
            yield f"each counts as {own.cost:g} calls"
    yield f"given up after {entry.idle:g} s without a sign of life, or {entry.total:g} s"


def _rate_text(text: str) -> str:
    rate = Rate.parse(text)
    burst = f", {rate.burst:,} in one go" if rate.burst != rate.count else ""
    return f"{rate.count:,} a {rate.unit}{burst}"


def _warnings(entry: ToolEntry, look_alike_names: dict[str, str], flaw: str) -> Iterator[str]:
    if flaw:
        yield f"What it should be is not known: {flaw}"
    value = entry.tool.description
    if value is not UNSET and len(value) > MAX_DESCRIPTION:
        yield f"Its description has {len(value):,} characters: clients leave out what has over {MAX_DESCRIPTION:,}"
    if (other := look_alike_names.get(entry.tool.name)) is not None:
        yield f"Its name can be taken for {other!a}"
    for member, value in definition(entry.tool).items():
        if any(escape(text) != text for text in texts_in(value)):
            yield f"Its {member} has characters that are not seen, or act on a screen"


def _icon_row(icon_json: Json) -> Object:
    source = icon_json.get("src") if type(icon_json) is dict else None
    blank_row = {"src": "", "from": "", "why_not": ""}
    if type(source) is not str or not safe_icons([icon_json]):
        source_start = source[:60] if type(source) is str else ""
        is_svg = source_start.lower().startswith("data:image/svg")
        reason = "drawings in SVG can hold programs" if is_svg else "it is neither a small picture nor an https address"
        return {**blank_row, "why_not": f"Not shown: {reason}"}
    return {**blank_row, "src" if source[:5].lower() == "data:" else "from": source}
