"""Calls that wait for a person, as cards: what would happen, what is different this time, and the decision."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec import Struct, ValidationError, convert

from handrail.approvals.differences import unusual
from handrail.approvals.edits import edit_problems, unmasked
from handrail.approvals.grants import narrow
from handrail.approvals.queue import Approval, ApprovalError, Asked, Desk, Grant
from handrail.console.access import Problem, Request, Session
from handrail.console.redact import Mask
from handrail.engine.catalog import title_of
from handrail.jsonrpc import encode, encode_sorted
from handrail.model import Json, Object

if TYPE_CHECKING:
    from handrail.console import Console
    from handrail.engine.catalog import Entry

__all__ = ["card", "cards", "check", "decide", "revoke", "view"]

REMEMBER_SECONDS = 8 * 3600.0  # of what is suggested
MAX_SAID = 80  # characters of a value, in a sentence
MAX_SIDE = 2_000  # and in a difference


async def view(console: Console, request: Request) -> Object:
    desk, hide, now = console.gate.desk, console.hide, console.gate.desk.now()
    ours = [each for each in await desk.recent() if each.asked.server == console.gate.name]
    grants = [each for each in await desk.grants() if each.server == console.gate.name and each.until > now]
    return {
        "open": await cards(console, request.session),
        "recent": [await _card(console, request.session, each) for each in ours],
        "grants": [_grant(hide, each) for each in grants],
        "remember_seconds": desk.options.remember,
    }


async def cards(console: Console, session: Session) -> list[Object]:
    """All that wait. Several servers may share a store: those of others are not shown here, nor decided."""
    waiting = await console.gate.desk.open(console.gate.name)
    return [await _card(console, session, each) for each in waiting]


async def card(console: Console, session: Session, ident: str) -> Object | None:
    known = await console.gate.desk.get(ident)
    is_ours = known is not None and known.asked.server == console.gate.name
    return await _card(console, session, known) if known is not None and is_ours else None


class _Decision(Struct, forbid_unknown_fields=True):
    yes: bool
    note: str = ""
    edited: Object | None = None
    remember: float = 0.0
    matching: dict[str, Object] = {}


async def decide(console: Console, request: Request) -> Object:
    try:
        said = convert(request.body, _Decision)
    except ValidationError as problem:
        raise Problem(400, f"A decision is yes or no, with a note, other arguments, or how long: {problem}") from None
    desk, session = console.gate.desk, request.session
    known = await _known(console, request.path["id"])
    _refuse_if_over(known)
    if why := _why_not(desk, known, session):
        raise Problem(403, why)
    edited = None
    if said.yes and said.edited is not None:
        edited, problems = _restored(console, known, said.edited)
        if problems:
            raise Problem(422, "These arguments cannot be used", problems)
        if encode_sorted(edited) == encode_sorted(known.asked.arguments):
            edited = None
        elif said.remember:
            raise Problem(400, "Other arguments are agreed to once: leave remembering out")
    try:
        made = await desk.decide(
            known.id,
            said.yes,
            by=f"operator {session.who}",  # of whom a caller need not have heard
            who=session.who,
            note=said.note,
            edited=edited,
            remember=said.remember if said.yes else 0.0,
            matching=said.matching if said.yes else None,
        )
    except ApprovalError as problem:
        _refuse_if_over(await _known(console, known.id))
        raise Problem(400, str(problem)) from None
    return await _card(console, session, made)


async def check(console: Console, request: Request) -> Object:
    """Whether a call could run with other arguments. Whether it may is decided again when it does."""
    given = request.body.get("arguments") if type(request.body) is dict else None
    if type(given) is not dict:
        raise Problem(400, "arguments: expected an object")
    problems = _restored(console, await _known(console, request.path["id"]), given)[1]
    return {"valid": not problems, "problems": problems, "verdict": "", "rule": ""}


async def revoke(console: Console, request: Request) -> Object:
    desk, ident = console.gate.desk, request.path["id"]
    ours = [each for each in await desk.grants() if (each.id, each.server) == (ident, console.gate.name)]
    if not ours or not await desk.revoke(ident, by=f"operator {request.session.who}"):
        raise Problem(404, "Nothing of that name is remembered: it has ended, or was revoked before")
    return {}


async def _known(console: Console, ident: str) -> Approval:
    known = await console.gate.desk.get(ident)
    if known is None or known.asked.server != console.gate.name:
        raise Problem(404, f"There is no approval {ident[:40]}: it was long ago, or is of another server")
    return known


def _refuse_if_over(known: Approval) -> None:
    """Whoever comes second hears who was first."""
    if known.state != "pending":
        by = f" by {known.by}" if known.by else ""
        raise Problem(409, f"It has been {known.state}{by} already; nothing was changed")


def _why_not(desk: Desk, approval: Approval, session: Session) -> str:
    if "approve" not in session.roles:
        return "Your session may not decide: it has not the role approve"
    why = desk.why_not(approval, session.who)
    if why and approval.asked.by == "another":
        return "You made this call: somebody else has to decide (approvals.by)"
    return why[:1].upper() + why[1:]


# Cards


async def _card(console: Console, session: Session, approval: Approval) -> Object:
    desk, hide, asked = console.gate.desk, console.hide, approval.asked
    entry = _entry(console, asked)
    shown = hide.value(asked.arguments)
    state = "expired" if approval.state == "pending" and approval.expires <= desk.now() else approval.state
    is_open = state == "pending"
    lately = await desk.lately(asked) if is_open else []
    why_not = _why_not(desk, approval, session) if is_open else ""
    made: Object = {
        "id": approval.id,
        "state": state,
        "caller": "waiting" if state in ("pending", "approved") and await desk.is_attended(approval) else "left",
        "used": state == "consumed",
        "server": asked.server,
        "tool": asked.tool,
        "title": _title(entry, asked.tool),
        "description": hide.text(asked.description),
        "preview": hide.text(approval.preview),
        "sentence": _sentence(_title(entry, asked.tool), shown),
        "who": asked.principal,
        "client": asked.client,
        "rule": asked.rule,
        "why": asked.why,
        "arguments": shown,
        "masked": bool(asked.hidden) or shown != asked.arguments,
        "differences": _differences(hide, lately, asked) if lately else [],
        "fingerprint": asked.fingerprint,
        "created": approval.created,
        "expires": approval.expires,
        "by": approval.by,
        "at": approval.at,
        "note": hide.text(approval.note),
        "editable": is_open and entry is not None and len(shown) == len(asked.arguments),
        "may": is_open and not why_not,
        "why_not": why_not,
        "suggestions": _suggestions(asked, shown) if is_open else [],
    }
    if approval.edited is not None:
        made["edited"] = hide.value(approval.edited)
    if entry is not None and is_open:
        made["schema"] = hide.definition(entry.tool.input_schema)
    return made


def _entry(console: Console, asked: Asked) -> Entry | None:
    """The tool, if it is still the one that was asked about."""
    found = console.engine.catalog.get(asked.tool) if asked.server == console.gate.name else None
    return found if found is not None and found.fingerprint == asked.fingerprint else None


def _title(entry: Entry | None, name: str) -> str:
    words = re.sub(r"[_.\s-]+", " ", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)).strip() or name
    return title_of(entry) or words[:1].upper() + words[1:]


def _sentence(title: str, arguments: Object) -> str:
    """`Cancel an order: order_id 7`"""
    said = ", ".join(f"{name} {_said(value, MAX_SAID)}" for name, value in arguments.items())
    return f"{title}: {said}" if said else title


def _said(value: Json, most: int) -> str:
    text = encode(value).decode()
    return text if len(text) <= most else text[: most - 1] + "…"


def _differences(hide: Mask, lately: list[Asked], now: Asked) -> list[Object]:
    """To the last call that was allowed; only what is unusual. Two values may differ that are shown alike."""
    was = lately[0]
    before, after = hide.value(was.arguments), hide.value(now.arguments)
    found: list[Object] = []
    if was.fingerprint != now.fingerprint:
        found.append({"name": "(the tool itself)", "before": was.fingerprint[:12], "after": now.fingerprint[:12]})
    marked = unusual(lately, now)
    for name in (each for each in dict.fromkeys([*now.arguments, *was.arguments]) if each in marked):
        sides = {"before": before, "after": after}
        shown = {side: _said(given[name], MAX_SIDE) for side, given in sides.items() if name in given}
        found.append({"name": name, **shown})
    return found


def _suggestions(asked: Asked, shown: Object) -> list[Object]:
    seconds = min(REMEMBER_SECONDS, asked.remember)
    if seconds <= 0:
        return []
    hours = f"for {seconds / 3600:g} hours" if seconds >= 3600 else f"for {max(1, round(seconds / 60))} minutes"
    found: list[tuple[str, dict[str, Object]]] = [("exactly these values", {})]
    open_ones = {name: each for name, each in asked.arguments.items() if shown.get(name) == each}
    open_ones = {name: each for name, each in open_ones.items() if name not in asked.hidden}
    found += [(f"when {words}", matching) for words, matching in narrow(open_ones)]
    return [{"text": f"allow {text}, {hours}", "seconds": seconds, "matching": each} for text, each in found]


def _grant(hide: Mask, grant: Grant) -> Object:
    return {
        "id": grant.id,
        "who": grant.principal,
        "tool": grant.tool,
        "arguments": hide.value(grant.arguments),
        "matching": hide.value(grant.matching),
        "made": grant.made,
        "until": grant.until,
        "by": grant.by,
    }


# Arguments that were edited as they were shown


def _restored(console: Console, approval: Approval, edited: Object) -> tuple[Object, list[Object]]:
    """The arguments a person means who saw masks, and what is wrong with them."""
    asked, entry = approval.asked, _entry(console, approval.asked)
    if entry is None:
        raise Problem(409, "The tool is not there any more as it was asked about: only yes and no are left")
    found: list[tuple[str, str]] = []
    made: Object = unmasked(asked.arguments, console.hide.value(asked.arguments), edited, "", found)
    found = found or edit_problems(asked.arguments, {*asked.hidden}, made, entry.input)
    return made, [{"path": path, "text": console.hide.text(text)} for path, text in found]
