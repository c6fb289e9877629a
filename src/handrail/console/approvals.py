"""Calls that wait for approval, as cards: the arguments, the differences to earlier calls, and the decision."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec import Struct, ValidationError, convert

from handrail.approvals.queue import Approval, ApprovalError, ApprovalGrant, ApprovalQueue, ApprovalRequest
from handrail.approvals.request import edit_problems, suggest_conditions, unmask, unusual_arguments
from handrail.console.access import ApiError, ApiRequest, ConsoleSession
from handrail.console.context import ConsoleContext
from handrail.console.redact import Redactor
from handrail.engine.catalog import title_of
from handrail.jsonrpc import encode, encode_sorted
from handrail.model import Json, Object

if TYPE_CHECKING:
    from handrail.engine.catalog import ToolEntry

__all__ = ["card", "cards", "check", "decide", "revoke", "view"]

REMEMBER_SECONDS = 8 * 3600.0  # suggested at most
MAX_VALUE_CHARS = 80  # of a value in a sentence
MAX_SIDE_CHARS = 2_000  # of a value in a difference


async def view(context: ConsoleContext, request: ApiRequest) -> Object:
    queue, redactor, now = context.guards.approval_queue, context.redactor, context.guards.approval_queue.now()
    own_approvals = [each for each in await queue.recent() if each.asked.server == context.guards.name]
    grants = [each for each in await queue.grants() if each.server == context.guards.name and each.until > now]
    return {
        "open": await cards(context, request.session),
        "recent": [await _approval_card(context, request.session, each) for each in own_approvals],
        "grants": [_grant_row(redactor, each) for each in grants],
        "remember_seconds": queue.options.remember,
    }


async def cards(context: ConsoleContext, session: ConsoleSession) -> list[Object]:
    """Return the cards of this server that are pending. Other servers may share the store: theirs are left out."""
    pending = await context.guards.approval_queue.open(context.guards.name)
    return [await _approval_card(context, session, each) for each in pending]


async def card(context: ConsoleContext, session: ConsoleSession, approval_id: str) -> Object | None:
    approval = await context.guards.approval_queue.get(approval_id)
    is_ours = approval is not None and approval.asked.server == context.guards.name
    return await _approval_card(context, session, approval) if approval is not None and is_ours else None


class _DecisionParams(Struct, forbid_unknown_fields=True):
    yes: bool
    note: str = ""
    edited: Object | None = None
    remember: float = 0.0
    matching: dict[str, Object] = {}


async def decide(context: ConsoleContext, request: ApiRequest) -> Object:
    try:
        decision = convert(request.body, _DecisionParams)
    except ValidationError as problem:
        raise ApiError(400, f"A decision is yes or no, with a note, other arguments, or how long: {problem}") from None
    queue, session = context.guards.approval_queue, request.session
    approval = await _get_approval(context, request.path["id"])
    _require_pending(approval)
    if reason := _refusal_reason(queue, approval, session):
        raise ApiError(403, reason)
    edited = None
    if decision.yes and decision.edited is not None:
        edited, problems = _unmask_edits(context, approval, decision.edited)
        if problems:
            raise ApiError(422, "These arguments cannot be used", problems)
        if encode_sorted(edited) == encode_sorted(approval.asked.arguments):
            edited = None
        elif decision.remember:
            raise ApiError(400, "Other arguments are agreed to once: leave remembering out")
    try:
        decided_approval = await queue.decide(
            approval.id,
            decision.yes,
            by=f"operator {session.who}",  # the caller may not know this name
            who=session.who,
            note=decision.note,
            edited=edited,
            remember=decision.remember if decision.yes else 0.0,
            matching=decision.matching if decision.yes else None,
        )
    except ApprovalError as problem:
        _require_pending(await _get_approval(context, approval.id))
        raise ApiError(400, str(problem)) from None
    return await _approval_card(context, session, decided_approval)


async def check(context: ConsoleContext, request: ApiRequest) -> Object:
    """Validate edited arguments. The policy decides about them again when the call runs."""
    arguments = request.body.get("arguments") if type(request.body) is dict else None
    if type(arguments) is not dict:
        raise ApiError(400, "arguments: expected an object")
    problems = _unmask_edits(context, await _get_approval(context, request.path["id"]), arguments)[1]
    return {"valid": not problems, "problems": problems, "verdict": "", "rule": ""}


async def revoke(context: ConsoleContext, request: ApiRequest) -> Object:
    queue, grant_id = context.guards.approval_queue, request.path["id"]
    own_grants = [each for each in await queue.grants() if (each.id, each.server) == (grant_id, context.guards.name)]
    if not own_grants or not await queue.revoke(grant_id, by=f"operator {request.session.who}"):
        raise ApiError(404, "There is no grant of that name: it has expired, or was revoked before")
    return {}


async def _get_approval(context: ConsoleContext, approval_id: str) -> Approval:
    approval = await context.guards.approval_queue.get(approval_id)
    if approval is None or approval.asked.server != context.guards.name:
        raise ApiError(404, f"There is no approval {approval_id[:40]}: it was long ago, or is of another server")
    return approval


def _require_pending(approval: Approval) -> None:
    """Raise ApiError if the approval is decided already, and say by whom."""
    if approval.state != "pending":
        by = f" by {approval.by}" if approval.by else ""
        raise ApiError(409, f"It has been {approval.state}{by} already; nothing was changed")


def _refusal_reason(queue: ApprovalQueue, approval: Approval, session: ConsoleSession) -> str:
    if "approve" not in session.roles:
        return "Your session may not decide: it has not the role approve"
    reason = queue.refusal_reason(approval, session.who)
    if reason and approval.asked.by == "another":
        return "You made this call: another person has to decide (approvals.by)"
    return reason[:1].upper() + reason[1:]


# Cards


async def _approval_card(context: ConsoleContext, session: ConsoleSession, approval: Approval) -> Object:
    queue, redactor, request = context.guards.approval_queue, context.redactor, approval.asked
    entry = _current_entry(context, request)
    title = _title(entry, request.tool)
    page_arguments = redactor.value(request.arguments)
    state = "expired" if approval.state == "pending" and approval.expires <= queue.now() else approval.state
    is_open = state == "pending"
    recent_requests = await queue.recently_allowed(request) if is_open else []
    why_not = _refusal_reason(queue, approval, session) if is_open else ""
    members: Object = {
        "id": approval.id,
        "state": state,
        "caller": "waiting" if state in ("pending", "approved") and await queue.is_caller_waiting(approval) else "left",
        "used": state == "consumed",
        "server": request.server,
        "tool": request.tool,
        "title": title,
        "description": redactor.text(request.description),
        "preview": redactor.text(approval.preview),
        "sentence": _sentence(title, page_arguments),
        "who": request.principal,
        "client": request.client,
        "rule": request.rule,
        "why": request.why,
        "arguments": page_arguments,
        "masked": bool(request.hidden) or page_arguments != request.arguments,
        "differences": _differences(redactor, recent_requests, request) if recent_requests else [],
        "fingerprint": request.fingerprint,
        "created": approval.created,
        "expires": approval.expires,
        "by": approval.by,
        "at": approval.at,
        "note": redactor.text(approval.note),
        "editable": is_open
        and entry is not None
        and entry.kind != "resource"
        and len(page_arguments) == len(request.arguments),
        "may": is_open and not why_not,
        "why_not": why_not,
        "suggestions": _suggestions(request, page_arguments) if is_open else [],
        "unseen_upstream": "" if entry is None or entry.trusted else entry.upstream,
    }
    if approval.edited is not None:
        members["edited"] = redactor.value(approval.edited)
    if entry is not None and is_open:
        members["schema"] = redactor.definition(entry.tool.input_schema)
    return members


def _current_entry(context: ConsoleContext, request: ApprovalRequest) -> ToolEntry | None:
    """Return the tool, resource or prompt, if its definition is still the one of the approval request."""
    entry = context.find_entry(request.tool) if request.server == context.guards.name else None
    return entry if entry is not None and entry.fingerprint == request.fingerprint else None


def _title(entry: ToolEntry | None, name: str) -> str:
    title, prompt_name = title_of(entry), name.removeprefix("prompt:")
    if prompt_name != name or (":" in name if entry is None else entry.kind == "resource"):
        verb = "Read" if prompt_name == name else "Get the prompt"
        return f"{verb} “{title}”" if title else f"{verb} {prompt_name}"
    words = re.sub(r"[_.\s-]+", " ", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)).strip() or name
    return title or words[:1].upper() + words[1:]


def _sentence(title: str, arguments: Object) -> str:
    """Return the call in one line: `Cancel an order: order_id 7`."""
    values = ", ".join(f"{name} {_short_value(value, MAX_VALUE_CHARS)}" for name, value in arguments.items())
    return f"{title}: {values}" if values else title


def _short_value(value: Json, max_chars: int) -> str:
    text = encode(value).decode()
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _differences(redactor: Redactor, recent_requests: list[ApprovalRequest], current: ApprovalRequest) -> list[Object]:
    """Return the unusual differences to the last allowed call. Two values may differ and look alike when masked."""
    previous = recent_requests[0]
    before, after = redactor.value(previous.arguments), redactor.value(current.arguments)
    differences: list[Object] = []
    if previous.fingerprint != current.fingerprint:
        differences.append(
            {"name": "(the tool itself)", "before": previous.fingerprint[:12], "after": current.fingerprint[:12]}
        )
    unusual_names = unusual_arguments(recent_requests, current)
    for name in (each for each in dict.fromkeys([*current.arguments, *previous.arguments]) if each in unusual_names):
        sides = {"before": before, "after": after}
        texts = {
            side: _short_value(arguments[name], MAX_SIDE_CHARS)
            for side, arguments in sides.items()
            if name in arguments
        }
        differences.append({"name": name, **texts})
    return differences


def _suggestions(request: ApprovalRequest, page_arguments: Object) -> list[Object]:
    seconds = min(REMEMBER_SECONDS, request.remember)
    if seconds <= 0:
        return []
    hours = f"for {seconds / 3600:g} hours" if seconds >= 3600 else f"for {max(1, round(seconds / 60))} minutes"
    options: list[tuple[str, dict[str, Object]]] = [("exactly these values", {})]
    open_ones = {name: each for name, each in request.arguments.items() if page_arguments.get(name) == each}
    open_ones = {name: each for name, each in open_ones.items() if name not in request.hidden}
    options += [(f"when {words}", matching) for words, matching in suggest_conditions(open_ones)]
    return [{"text": f"allow {text}, {hours}", "seconds": seconds, "matching": each} for text, each in options]


def _grant_row(redactor: Redactor, grant: ApprovalGrant) -> Object:
    return {
        "id": grant.id,
        "who": grant.principal,
        "tool": grant.tool,
        "arguments": redactor.value(grant.arguments),
        "matching": redactor.value(grant.matching),
        "made": grant.made,
        "until": grant.until,
        "by": grant.by,
    }


# Edited arguments


def _unmask_edits(context: ConsoleContext, approval: Approval, edited: Object) -> tuple[Object, list[Object]]:
    """Return the edited arguments with the secrets behind their masks put back, and the problems with them."""
    request, entry = approval.asked, _current_entry(context, approval.asked)
    if entry is None:
        raise ApiError(409, "The tool is not there any more as it was asked about: only yes and no are left")
    problems: list[tuple[str, str]] = []
    arguments: Object = unmask(request.arguments, context.redactor.value(request.arguments), edited, "", problems)
    problems = problems or edit_problems(request.arguments, {*request.hidden}, arguments, entry.input)
    return arguments, [{"path": path, "text": context.redactor.text(text)} for path, text in problems]
