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
from handrail.console.access import Download, Problem, Request
from handrail.console.pins import Pins, keeping, pins
from handrail.engine.catalog import Entry, title_of
from handrail.engine.dispatcher import Conversation
from handrail.errors import PeerError
from handrail.guards.fingerprint import definition
from handrail.guards.limits import ANONYMOUS, LOCAL
from handrail.guards.rates import Rate, Rates
from handrail.jsonrpc import encode
from handrail.model import Json, Object, Principal
from handrail.observe.per_minute import Tally
from handrail.revisions import Revision
from handrail.schema.explain import closest
from handrail.text.confusables import look_alikes
from handrail.text.controls import inert, texts_in
from handrail.text.media import trouble

if TYPE_CHECKING:
    from handrail.console import Console

__all__ = ["accept", "icon", "keep_switches", "switch", "switched", "tally", "view", "wire"]

SWITCH = "console-switch:"  # of a tool, among what the workers share: as long as the server runs
TALLY_SECONDS = 0.5
BYTES_A_TOKEN = 4  # about: models differ
_ICONS = ("image/png", "image/jpeg", "image/gif", "image/webp")


class _Eye(Struct):
    """Whose view it is."""

    who: Principal
    revision: Revision


async def view(console: Console, request: Request) -> Object:
    known = await _all_known(console)
    eye = _eye(console, request, known)
    answers = _answers(console, eye)
    listed = [each for answer in answers for each in decode(answer)["result"]["tools"]]
    by_name = {str(each["name"]): each for each in listed}
    entries, kept = console.engine.catalog.entries, await pins(console)
    alike = dict(look_alikes(entry.tool.name for entry in entries))
    tools = [_tool(console, eye, each, by_name.get(each.tool.name), kept, alike, known) for each in entries]
    offer = console.engine.offer
    return {
        "as": eye.who.id,
        "scopes": sorted(eye.who.scopes),
        "revision": eye.revision.name,
        "principals": [*dict.fromkeys([LOCAL, ANONYMOUS, *console.gate.policy.principals, *known.principals])],
        "revisions": offer.supported,
        "tools": tools,
        "tokens": sum(each["tokens"] for each in tools if each["exposed"]),
        "bytes": sum(map(len, answers)),
    }


async def wire(console: Console, request: Request) -> Download:
    """The answers to `tools/list`, a line each: more than one only if there is more than a page."""
    eye = _eye(console, request, await _all_known(console))
    return Download(b"\n".join(_answers(console, eye)), "text/plain; charset=utf-8")


async def switch(console: Console, request: Request) -> Object:
    name, on = _known(console, request).tool.name, request.body.get("on")
    if type(on) is not bool:
        raise Problem(400, "on: expected true or false")
    await console.note(request.session, "switched on" if on else "switched off", tool=name)
    await console.topics.put(SWITCH + name, encode(on))
    await console.command("switch", {"tool": name, "on": on})
    return {}


async def switched(console: Console, data: Object) -> None:
    """In every worker."""
    console.engine.catalog.switch(data["tool"], data["on"])


async def keep_switches(console: Console) -> None:
    """In a worker that begins after somebody has switched."""
    after = ""
    while rows := await console.topics.scan(SWITCH, after=after):
        for key, on in rows:
            await switched(console, {"tool": key.removeprefix(SWITCH), "on": decode(on)})
        after = rows[-1][0]


async def accept(console: Console, request: Request) -> Object:
    entry = _known(console, request)
    await console.note(request.session, "accepted", tool=entry.tool.name, fingerprint=entry.fingerprint)
    await console.store.commit([keeping(console, entry)])
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


def _eye(console: Console, request: Request, known: _Known) -> _Eye:
    query = request.query
    name = query.get("as") or request.session.who
    scopes = known.principals.get(name, frozenset())
    if query.get("scopes"):
        scopes = frozenset(filter(None, (each.strip() for each in query["scopes"].split(","))))
    return _Eye(Principal(name, scopes), console.revision(query.get("revision", "")))


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


# What workers know of callers and calls


class _Known(Struct):
    """What one of them has seen, or all of them."""

    tools: dict[str, Tally] = {}
    principals: dict[str, frozenset[str]] = {}  # and their scopes

    def add(self, other: _Known) -> None:
        for name, tally in other.tools.items():
            self.tools.setdefault(name, Tally()).add(tally)
        self.principals = {**other.principals, **self.principals}


async def _all_known(console: Console) -> _Known:
    """Of all workers; but nobody waits for one that does not answer."""
    known = _known_here(console)
    if console.workers == 1:
        return known
    known, topic = _Known(), f"console-tally:{secrets.token_hex(8)}"
    async with console.topics.subscribe(topic) as told:
        await console.command("tally", {"topic": topic})
        with suppress(TimeoutError):
            async with asyncio.timeout(TALLY_SECONDS):
                for _ in range(console.workers):
                    known.add(decode(await anext(told), type=_Known))
    return known


async def tally(console: Console, data: Object) -> None:
    await console.topics.publish(data["topic"], encode(_known_here(console)))


def _known_here(console: Console) -> _Known:
    return _Known(console.feed.tools, {who.id: who.scopes for who in console.feed.principals.values()})


# One tool


def _tool(
    console: Console,
    eye: _Eye,
    entry: Entry,
    listed: Object | None,
    kept: Pins,
    alike: dict[str, str],
    known: _Known,
) -> Object:
    tool, name = entry.tool, entry.tool.name
    claims: Object = {} if tool.annotations is UNSET else tool.annotations
    tally = known.tools.get(name, Tally())
    size = len(encode(listed if listed is not None else eye.revision.tool(tool)))
    made: Object = {
        "name": name,
        "title": title_of(entry) or name,
        "description": "" if tool.description is UNSET else tool.description,
        "signature": signature(definition(tool)),
        "input_schema": tool.input_schema,
        "annotations": claims,
        "icons": [_icon(each) for each in ([] if tool.icons is UNSET else tool.icons)],
        "tags": sorted(entry.tags),
        "scopes": sorted(entry.scopes),
        "on": console.engine.catalog.is_on(entry),
        "exposed": listed is not None,
        "hidden_because": "" if listed is not None else _hidden_because(console, eye, entry),
        "limits": list(_limits(console, eye.who, entry)),
        "tokens": -(-size // BYTES_A_TOKEN),
        "calls": tally.calls,
        "errors": tally.errors,
        "refused": tally.refused,
        "p95_ms": round(tally.p95 * 1000, 3),
        "last": tally.last,
        "fingerprint": entry.fingerprint,
        "pin": kept.state(entry),
        "warnings": list(_warnings(entry, alike, console.state.get("lock-flaw", ""))),
        **_verdict(console, eye, entry),
    }
    if tool.output_schema is not UNSET:
        made["output_schema"] = tool.output_schema
    shown: Object = console.hide.definition(made)
    return shown


def _hidden_because(console: Console, eye: _Eye, entry: Entry) -> str:
    if not console.engine.catalog.is_on(entry):
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
    said = entry.tool.description
    if said is not UNSET and len(said) > MAX_DESCRIPTION:
        yield f"Its description has {len(said):,} characters: clients leave out what has over {MAX_DESCRIPTION:,}"
    if (other := alike.get(entry.tool.name)) is not None:
        yield f"Its name can be taken for {other!a}"
    for member, said in definition(entry.tool).items():
        if any(inert(text) != text for text in texts_in(said)):
            yield f"Its {member} has characters that are not seen, or act on a screen"


def _icon(given: Json) -> Object:
    source = given.get("src") if type(given) is dict else None
    made = {"src": "", "from": "", "why_not": ""}
    if type(source) is not str or not safe_icons([given]):
        said = source[:60] if type(source) is str else ""
        is_svg = said.lower().startswith("data:image/svg")
        why = "drawings in SVG can hold programs" if is_svg else "it is neither a small picture nor an https address"
        return {**made, "why_not": f"Not shown: {why}"}
    return {**made, "src" if source[:5].lower() == "data:" else "from": source}
