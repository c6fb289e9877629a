"""The tools of a server as one caller finds them, with a reason for whatever that caller does not.

What is listed comes from the wire's own function. What a tool looked like is kept: as `tools.lock` beside the served
file has it, or else as it was first seen here, until somebody accepts how it is now.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, UnsetType
from msgspec.json import decode

from handrail.client.icons import safe_icons
from handrail.client.signature import signature
from handrail.console.access import Download, Problem, Request
from handrail.console.shown import mask_of
from handrail.engine.catalog import Entry
from handrail.engine.dispatch import Conversation
from handrail.errors import PeerError
from handrail.guards.changes import Change, changes
from handrail.guards.inert import inert
from handrail.guards.limits import ANONYMOUS, LOCAL
from handrail.guards.lock import Locked, LockError, read_lock
from handrail.guards.look_alikes import look_alikes
from handrail.guards.media import trouble
from handrail.guards.pins import comparable, definition, fingerprint
from handrail.guards.rates import Rate, Rates
from handrail.jsonrpc import encode
from handrail.model import Json, Object, Principal
from handrail.revisions import Revision
from handrail.schema.explain import closest
from handrail.stores import Put

if TYPE_CHECKING:
    from handrail.console import Console

__all__ = ["accept", "icon", "pins", "switch", "switched", "view", "wire"]

LOCK = "tools.lock"
BYTES_A_TOKEN = 4  # about: models differ
MAX_SIDE = 4_000  # characters of one side of a difference
MAX_CHANGES = 50
KINDS = {
    "wording": "wording",
    "widened": "schema widened",
    "narrowed": "schema narrowed",
    "schema": "schema changed",
    "hint": "new hint",
    "invisible": "invisible characters",
    "new": "new",
    "gone": "gone",
}
_ICONS = ("image/png", "image/jpeg", "image/gif", "image/webp")


class _Eye(Struct):
    """Whose view it is."""

    who: Principal
    revision: Revision


async def view(console: Console, request: Request) -> Object:
    eye = _eye(console, request)
    answers = _answers(console, eye)
    listed = [each for answer in answers for each in decode(answer)["result"]["tools"]]
    by_name = {str(each["name"]): each for each in listed}
    entries, kept = console.engine.catalog.entries, await pins(console)
    alike = dict(look_alikes(entry.tool.name for entry in entries))
    tools = [_tool(console, eye, each, by_name.get(each.tool.name), kept, alike) for each in entries]
    feed, offer = console.feed, console.engine.offer
    return {
        "as": eye.who.id,
        "scopes": sorted(eye.who.scopes),
        "revision": eye.revision.name,
        "principals": [*dict.fromkeys([LOCAL, ANONYMOUS, *console.gate.policy.principals, *feed.principals])],
        "revisions": offer.supported,
        "tools": tools,
        "tokens": sum(each["tokens"] for each in tools if each["exposed"]),
        "bytes": sum(map(len, answers)),
    }


async def wire(console: Console, request: Request) -> Download:
    """The answers to `tools/list`, a line each: more than one only if there is more than a page."""
    return Download(b"\n".join(_answers(console, _eye(console, request))), "text/plain; charset=utf-8")


async def switch(console: Console, request: Request) -> Object:
    name, on = _known(console, request).tool.name, request.body.get("on")
    if type(on) is not bool:
        raise Problem(400, "on: expected true or false")
    await console.note(request.session, "switched on" if on else "switched off", tool=name)
    await console.command("switch", {"tool": name, "on": on})
    return {}


async def switched(console: Console, data: Object) -> None:
    """In every worker."""
    if any(entry.tool.name == data["tool"] for entry in console.engine.catalog.entries):
        (console.server.enable if data["on"] else console.server.disable)(data["tool"])


async def accept(console: Console, request: Request) -> Object:
    entry = _known(console, request)
    await console.note(request.session, "accepted", tool=entry.tool.name, fingerprint=entry.fingerprint)
    await console.store.commit([_keeping(console, entry)])
    await console.publish("tools", {})
    return {}


async def icon(console: Console, request: Request) -> Object:
    """Fetch a picture that somebody wants to see, from a public address, without saying who asks."""
    tool, index = _known(console, request).tool, request.body.get("index")
    icons = [] if tool.icons is UNSET else tool.icons
    if type(index) is not int or not 0 <= index < len(icons):
        raise Problem(404, f"{tool.name[:100]} has {len(icons)} icons, counted from 0")
    shown = _icon(icons[index])
    if shown["why_not"] or shown["src"]:
        raise Problem(409, shown["why_not"] or "It is part of the tool: there is nothing to fetch")
    try:
        from handrail.oauth.outbound import fetched

        data = await fetched(shown["from"])
    except ModuleNotFoundError as problem:
        raise Problem(501, str(problem)) from None
    except (PeerError, ValueError) as problem:
        raise Problem(502, f"The icon was not fetched: {problem}") from None
    kind = next((each for each in _ICONS if trouble(each, data) is None), "")
    if not kind:
        raise Problem(502, "What is at that address is not a picture that may be shown (PNG, JPEG, GIF or WebP)")
    return {"src": f"data:{kind};base64,{b64encode(data).decode()}"}


def _known(console: Console, request: Request) -> Entry:
    name = request.path["name"]
    entries = {entry.tool.name: entry for entry in console.engine.catalog.entries}
    if name not in entries:
        near = closest(name, entries)
        raise Problem(404, f"There is no tool {name[:200]!r}" + (f"; did you mean {near!r}?" if near else ""))
    return entries[name]


def _eye(console: Console, request: Request) -> _Eye:
    query, offer = request.query, console.engine.offer
    name = query.get("as") or request.session.who
    seen = console.feed.principals.get(name)
    scopes = seen.scopes if seen is not None else frozenset()
    if query.get("scopes"):
        scopes = frozenset(filter(None, (each.strip() for each in query["scopes"].split(","))))
    wanted = query.get("revision") or offer.newest.name
    revision = offer.handshake.get(wanted) or offer.stateless.get(wanted)
    if revision is None:
        raise Problem(400, f"revision: {wanted[:40]!r} is not one of {', '.join(offer.supported)}")
    return _Eye(Principal(name, scopes), revision)


class _Nowhere:
    def send(self, message: bytes) -> None: ...
    async def drain(self) -> None: ...


class _Cursor(Struct):
    cursor: str | UnsetType = UNSET


def _answers(console: Console, eye: _Eye) -> list[bytes]:
    """What the wire would say, page by page; nobody's limits are charged for looking."""
    conversation = Conversation(console.engine, _Nowhere(), eye.who)
    made: list[bytes] = []
    params = _Cursor()
    while True:
        made.append(conversation._list(len(made) + 1, eye.revision, params, None))
        cursor = decode(made[-1])["result"].get("nextCursor")
        if not cursor:
            return made
        params = _Cursor(cursor)


# One tool


def _tool(
    console: Console, eye: _Eye, entry: Entry, listed: Object | None, kept: Pins, alike: dict[str, str]
) -> Object:
    tool, name = entry.tool, entry.tool.name
    claims: Object = {} if tool.annotations is UNSET else tool.annotations
    tally = console.feed.tools.get(name)
    size = len(encode(listed if listed is not None else eye.revision.tool(tool)))
    made: Object = {
        "name": name,
        "title": str((tool.title if tool.title is not UNSET else claims.get("title")) or name),
        "description": "" if tool.description is UNSET else tool.description,
        "signature": signature(definition(tool)),
        "input_schema": tool.input_schema,
        "annotations": claims,
        "icons": [_icon(each) for each in ([] if tool.icons is UNSET else tool.icons)],
        "tags": sorted(entry.tags),
        "scopes": sorted(entry.scopes),
        "on": entry.enabled,
        "exposed": listed is not None,
        "hidden_because": "" if listed is not None else _hidden_because(console, eye, entry),
        "limits": list(_limits(console, eye.who, entry)),
        "tokens": -(-size // BYTES_A_TOKEN),
        "calls": 0 if tally is None else tally.calls,
        "errors": 0 if tally is None else tally.errors,
        "last": 0.0 if tally is None else tally.last,
        "fingerprint": entry.fingerprint,
        "pin": kept.state(entry),
        "warnings": list(_warnings(entry, alike, console.state.get("lock-flaw", ""))),
        **_verdict(console, eye, entry),
    }
    if tool.output_schema is not UNSET:
        made["output_schema"] = tool.output_schema
    shown: Object = mask_of(console).definition(made)
    return shown


def _hidden_because(console: Console, eye: _Eye, entry: Entry) -> str:
    if not entry.enabled:
        return "It is switched off"
    if not entry.shown_to(eye.who.scopes):
        return f"Its author shows it only to callers with the scope {' '.join(sorted(entry.scopes - eye.who.scopes))}"
    hiding = console.gate.policy.hides(eye.who, entry.facts, eye.revision.name)
    return "This server lists no tools" if hiding is None else f"Hidden by {hiding.rule}: {hiding.why}"


def _verdict(console: Console, eye: _Eye, entry: Entry) -> Object:
    lacking = entry.scopes - eye.who.scopes
    if lacking:
        return {"verdict": "deny", "rule": "scopes", "why": f"its author wants the scope {' '.join(sorted(lacking))}"}
    found = console.gate.policy.outlook(eye.who, entry.facts, eye.revision.name)
    if len({each.verdict for each in found}) == 1:
        return {"verdict": found[0].verdict, "rule": found[0].rule, "why": found[0].why}
    told = "; ".join(f"{each.verdict} by {each.rule} ({each.why})" for each in found[:-1])
    last = f"{found[-1].verdict} by {found[-1].rule}"
    return {"verdict": "depends", "rule": ", ".join(each.rule for each in found), "why": f"{told}; else {last}"}


def _limits(console: Console, who: Principal, entry: Entry) -> Iterator[str]:
    rates = console.engine.guards.get("rates", Rates())
    if rates is not None:
        own = next((each for name, each in rates.tools.items() if fnmatchcase(entry.tool.name, name)), rates.tool)
        if own.rate:
            yield f"{_often(own.rate)} of this tool, by each caller"
        if own.concurrent is not None:
            yield f"{own.concurrent} at once, by all callers"
        everything = rates.address if who.id == ANONYMOUS else rates.principal
        if everything and (who.id != LOCAL or rates.local):
            yield f"{_often(everything)} of all tools, by {'each address' if who.id == ANONYMOUS else 'each caller'}"
        if own.cost != 1:
            yield f"each counts as {own.cost:g} calls"
    yield f"given up after {entry.idle:g} s without a sign of life, or {entry.total:g} s"


def _often(text: str) -> str:
    rate = Rate.parse(text)
    burst = f", {rate.burst:,} in one go" if rate.burst != rate.count else ""
    return f"{rate.count:,} a {rate.unit}{burst}"


def _warnings(entry: Entry, alike: dict[str, str], flaw: str) -> Iterator[str]:
    if flaw:
        yield f"What it should be is not known: {flaw}"
    if (other := alike.get(entry.tool.name)) is not None:
        yield f"Its name can be taken for {other!a}"
    for member, said in definition(entry.tool).items():
        if any(inert(text) != text for text in _texts(said)):
            yield f"Its {member} has characters that are not seen, or act on a screen"


def _texts(value: Json) -> Iterator[str]:
    if type(value) is str:
        yield value
    elif type(value) is dict:
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif type(value) is list:
        for inner in value:
            yield from _texts(inner)


def _icon(given: Json) -> Object:
    source = given.get("src") if type(given) is dict else None
    made = {"src": "", "from": "", "why_not": ""}
    if type(source) is not str or not safe_icons([given]):
        said = source[:60] if type(source) is str else ""
        is_svg = said.lower().startswith("data:image/svg")
        why = "drawings in SVG can hold programs" if is_svg else "it is neither a small picture nor an https address"
        return {**made, "why_not": f"Not shown: {why}"}
    return {**made, "src" if source[:5].lower() == "data:" else "from": source}


# What tools looked like


class Pins:
    """`locked` counts before what was seen here, unless that was accepted and is how the tool is now."""

    def __init__(
        self, kept: dict[str, tuple[float, Object]], locked: Locked | None, since: float, now: Revision
    ) -> None:
        self._kept = kept
        self._locked = locked
        self._since = since
        self._now = now.name

    def state(self, entry: Entry) -> Object:
        name = entry.tool.name
        at, seen = self._kept.get(name, (0.0, None))
        if seen is not None and fingerprint(seen) == entry.fingerprint:
            return {"state": "pinned", "since": at, "changes": []}
        if self._locked is None:
            was, revision = seen, self._now
        else:
            was, at, revision = self._locked.tools.get(name), self._since, self._locked.revision
        if was is None:
            return {"state": "new", "since": 0.0, "changes": []}
        found = changes(*comparable(was, revision, definition(entry.tool), self._now))
        told = [_change(each) for each in found[:MAX_CHANGES]]
        return {"state": "changed" if found else "pinned", "since": at, "changes": told}


async def pins(console: Console) -> Pins:
    """What is kept of the tools; the first time, all of them are."""
    locked, since = _lock(console)
    prefix, after = _prefix(console), ""
    mark = prefix.replace("tool", "tools", 1)
    if locked is None and await console.store.get(mark) is None:
        seen = (_keeping(console, entry) for entry in console.engine.catalog.entries)
        await console.store.commit([Put(mark, b"", if_absent=True), *seen])
    kept: dict[str, tuple[float, Object]] = {}
    while rows := await console.store.scan(prefix, after=after):
        kept |= {key[len(prefix) :]: tuple(decode(raw)) for key, raw in rows}
        after = rows[-1][0]
    return Pins(kept, locked, since, console.engine.offer.newest)


def _keeping(console: Console, entry: Entry) -> Put:
    return Put(_prefix(console) + entry.tool.name, encode([console.clock(), definition(entry.tool)]))


def _prefix(console: Console) -> str:
    """Several servers may share a store, and a name."""
    return f"console-tool:{sha256(encode([console.server.name, str(console.source)])).hexdigest()[:16]}:"


def _lock(console: Console) -> tuple[Locked | None, float]:
    """What the lock beside the served file says of this server, if there is one, and since when."""
    path = None if console.source is None else console.source.parent / LOCK
    if path is None or not path.is_file():
        return None, 0.0
    stamp = path.stat().st_mtime
    known: tuple[Locked | None, float] | None = console.state.get("lock")
    if known is None or known[1] != stamp:
        console.state["lock-flaw"] = ""
        try:
            servers = read_lock(path)
            alone = next(iter(servers.values())) if len(servers) == 1 else None
            known = servers.get(console.server.name) or alone, stamp
        except LockError as problem:  # then nothing is as somebody agreed to
            console.state["lock-flaw"] = str(problem)
            known = Locked("", "", {}), stamp
        console.state["lock"] = known
    return known


def _change(change: Change) -> Object:
    sides = {side: _side(getattr(change, side)) for side in ("before", "after")}
    return {"kind": KINDS.get(change.kind, change.kind), "path": change.path, **sides}


def _side(value: Json) -> str:
    if value is UNSET:
        return ""
    text = value if type(value) is str else json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= MAX_SIDE else text[: MAX_SIDE - 1] + "…"
