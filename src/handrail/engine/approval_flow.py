"""A call that waits for a person, in the ways its revision allows: asked at once, held open, or told to come back.

| the caller | the person at the client can be asked | somebody at the server decides |
|---|---|---|
| stateless, declares forms | `input_required` with a form | held, then `input_required` with a state only: ask again |
| earlier, declares forms | a question on the call's own stream | held, with progress as a sign of life |
| declares nothing | never asked | held; then a result that says what to do: call again with the same arguments |

Whoever decides first has decided. A repeat is matched by what the approval is bound to, and runs once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from handrail.approvals.queue import Approval, ApprovalError, Asked, Desk
from handrail.audit.format import TrailError
from handrail.engine.call import Call
from handrail.engine.input_requests import Answer, Form, Later
from handrail.errors import Kind, Refused, TransportError
from handrail.jsonrpc import encode
from handrail.model import Object
from handrail.stores import StoreError
from handrail.text.controls import inert, one_line

ROUNDS = 9  # of "ask again": clients give up after the tenth
BEAT_SECONDS = 5.0
FORM_SECONDS = 60.0  # a client that was sent a form counts as waiting
MAX_DESCRIPTION = 300  # characters of a tool's description
LONG = 1_000  # characters of arguments, of which a person may not read all

REMEMBER = {"no": 0.0, "for an hour": 3600.0, "for a day": 86400.0, "for 30 days": 30 * 86400.0}


class Agreement:
    """One call, and whoever may agree to it."""

    def __init__(
        self, call: Call, asked: Asked, desk: Desk, preview: Callable[[], Awaitable[str]] | None = None
    ) -> None:
        self._call = call
        self._asked = asked
        self._desk = desk
        self._preview = preview
        by = asked.by
        self._may_ask = by in ("anyone", "caller") and call.can_ask("elicitation.form")
        self._others = by in ("operator", "another") or (desk.shared and by != "caller")

    async def reached(self) -> Approval:
        """An approval that is good for this call; what was not agreed to is refused."""
        if not self._may_ask and not self._others:
            text = (
                f"{self._call.name} needs somebody's approval, and nobody can be asked: the client takes no questions."
            )
            raise Refused(Kind.DENIED, f"{text} Nothing was done.")
        call, seconds = self._call, self._desk.options.expires
        try:
            approval = await self._brought() or await self._claimed()
            call.agreed = f"approval {approval.id}"
            while approval.state == "pending":
                call.deadline = call.now() + seconds + call.entry.total  # a person's time is not the tool's
                try:
                    approval = await self._decided(approval)
                except asyncio.CancelledError:
                    await self._let_go(approval)
                    raise
                call.deadline = call.now() + call.entry.total
                if approval.state != "cancelled":
                    break
                approval = await self._claimed()  # another call of the same had waited for the same yes
                call.agreed = f"approval {approval.id}"
        except ApprovalError as problem:
            raise Refused(Kind.DENIED, f"{self._call.name} was not approved: {problem}") from None
        if approval.state == "approved":
            return approval
        raise self._refused(approval)

    async def _claimed(self) -> Approval:
        """The question is filed whole, or not at all; whoever gives up meanwhile takes it back."""
        filing = asyncio.ensure_future(self._desk.claim(self._asked, self._preview))
        try:
            return await asyncio.shield(filing)
        except asyncio.CancelledError:
            with suppress(StoreError, TrailError, ApprovalError):
                approval = await filing
                if approval.state == "pending":
                    await self._let_go(approval)
            raise

    async def _brought(self) -> Approval | None:
        """The approval a retry speaks of, if it is this call's and still good for it."""
        for key, said in self._call.answers.items():
            if key.startswith("approval-") and type(said) is dict:
                found = await self._desk.get(key.removeprefix("approval-"))
                if found is None or found.digest != self._asked.digest() or not self._desk.is_good(found):
                    continue
                if found.state == "pending" or (found.state == "approved" and said.get("ticket", "") == found.ticket):
                    return found
        return None

    async def _decided(self, approval: Approval) -> Approval:
        if not self._may_ask:
            return await self._held(approval)
        if self._call.revision.asks == "retry":
            async with self._desk.attending(approval, FORM_SECONDS, returns=True):
                answer = await self._question(approval)  # ends this try if there is no answer yet
            return await self._said(approval, answer)
        seconds = approval.expires - self._desk.now()
        asking = asyncio.ensure_future(self._question(approval))
        waiting = asyncio.ensure_future(self._desk.wait(approval, seconds))
        try:
            async with self._desk.attending(approval, seconds):
                await asyncio.wait((asking, waiting), return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() else await self._said(approval, asking.result())
        finally:
            for each in (asking, waiting):
                each.cancel()
            await asyncio.gather(asking, waiting, return_exceptions=True)
            if not self._others:
                await self._let_go(approval)

    async def _let_go(self, approval: Approval) -> None:
        """Nobody need decide any more. Where that cannot be said now, the question ends by its time.

        Of an endpoint that stops it stays open: the caller has not gone, and will call again.
        """
        endpoint = getattr(self._call._flight.outlet, "endpoint", None)
        if not getattr(endpoint, "stopping", False):
            with suppress(StoreError, TrailError, ApprovalError):
                await self._desk.cancel(approval)  # as it was when it was waited for: a yes since then is a yes

    async def _question(self, approval: Approval) -> Answer:
        key, question = f"approval-{approval.id}", _Consent(_wording(approval, self._asked), self._desk)
        try:
            answer: Answer = (await self._call.ask_all({key: question}))[key]
            return answer
        except TransportError:  # the client has gone, and its call with it
            raise asyncio.CancelledError from None

    async def _said(self, approval: Approval, answer: Answer) -> Approval:
        """What the person at the client said, as a decision; unless somebody else was quicker."""
        if answer.action == "cancel":
            await self._desk.cancel(approval)
            found = await self._desk.get(approval.id)
            if found is None or found.state == "cancelled":
                text = f"{self._call.name} was not approved: the question was dismissed. Nothing was done."
                raise Refused(Kind.DENIED, text)
            return found
        yes, who = answer.action == "accept", approval.asked.principal
        remember = REMEMBER.get(str(answer.content), 0.0) if approval.asked.remember else 0.0
        try:
            return await self._desk.decide(approval.id, yes, by=who, role="caller", remember=remember)
        except ApprovalError:
            found = await self._desk.get(approval.id)
            if found is None or found.state == "pending":
                raise
            return found

    async def _held(self, approval: Approval) -> Approval:
        call, options = self._call, self._desk.options
        key = f"approval-{approval.id}"
        stateless = call.revision.asks == "retry"
        seconds = min(options.round if stateless else options.wait, approval.expires - self._desk.now())
        ends = call.now() + seconds
        beats = 0
        call.waiting += 1
        try:
            async with self._desk.attending(approval, seconds, returns=stateless):
                while approval.state == "pending" and (left := ends - call.now()) > 0:
                    approval = await self._desk.wait(approval, min(left, BEAT_SECONDS))
                    beats += 1
                    await call.progress(beats * 1e-6, message=f"waits for approval {approval.id}")
        finally:
            call.waiting -= 1
        if approval.state == "pending" and self._desk.now() < approval.expires:
            said = call.answers.get(key)
            turn = said.get("round", 1) if type(said) is dict else 1
            if stateless and type(turn) is int and turn < ROUNDS:
                call.answered = {**call.answered, key: {"round": turn + 1}}
                raise Later
            await self._desk.tell(approval)  # its caller leaves
            minutes = max(1, round((approval.expires - self._desk.now()) / 60))
            text = f"{call.name} waits for somebody's approval ({approval.id}), and was not carried out yet. "
            text += f"Call it again with the same arguments later; the question is open for {minutes} more minutes."
            raise Refused(Kind.PENDING, text, {"approval": approval.id, "expires": approval.expires})
        return approval

    def _refused(self, approval: Approval) -> Refused:
        name, note = self._call.name, f": {approval.note}" if approval.note else ""
        if approval.state == "denied":
            who = "its user" if approval.by == approval.asked.principal else "an operator"
            return Refused(Kind.DENIED, f"{name} was not approved by {who}{note}. Nothing was done.")
        if approval.state == "consumed":
            return used_up(name)
        return Refused(Kind.DENIED, f"{name} was not approved in time. Nothing was done; call again to ask again.")


def used_up(name: str) -> Refused:
    """Of identical calls that waited for one yes, another was first."""
    text = f"{name}: its approval has just been used by another call. Nothing was done; call again to ask again."
    return Refused(Kind.DENIED, text)


def _wording(approval: Approval, asked: Asked) -> str:
    """What will happen: the tool's title and description, the arguments whole, the preview; and why it is asked."""
    shown = inert(encode(asked.arguments).decode(), lines=False)
    if len(shown) > LONG:  # nothing is left out, and nothing short stands behind something long
        by_length = sorted(asked.arguments.items(), key=lambda each: len(encode(each)))
        shown = inert(encode(dict(by_length)).decode(), lines=False)
    # What a rule of the operator's looks at is not the caller's business; its name has to do.
    why = f"because {asked.why}" if asked.rule.startswith("built in") else f"by the rule {asked.rule!r}"
    tool, server, why = (inert(each, lines=False) for each in (asked.tool, asked.server, why))
    since = "".join(f"\nSince it was last allowed: {inert(each, lines=False)}." for each in approval.before)
    name = f"{inert(asked.title, lines=False)} ({tool})" if asked.title not in ("", asked.tool) else tool
    about = f"\n{one_line(asked.description, MAX_DESCRIPTION)}" if asked.description else ""
    # Each of its lines is marked: what is in it may come from anywhere, and is none of ours.
    lines = inert(approval.preview).splitlines()
    preview = "".join(["\nPreview:", *(f"\n| {line}" for line in lines)]) if lines else ""
    return f"Allow {name} on {server}?{about}\n{shown}{preview}\nAsked {why}.{since}"


class _Consent(Form):
    """The question whether a call may run. The action is the answer: accept is yes, once; decline is no.

    The form asks only what need not be answered: whether to remember a yes, where that is allowed.
    """

    def __init__(self, message: str, desk: Desk) -> None:
        kept = [word for word, seconds in REMEMBER.items() if seconds <= desk.options.remember]
        title = "Do not ask again for the same arguments"
        field = {"type": "string", "title": title, "enum": kept, "default": "no"}
        fields: Object = {"remember": field} if len(kept) > 1 else {}
        super().__init__(message, {"type": "object", "properties": fields}, as_is=True)

    def read(self, answer: Object) -> Answer:
        """The action, and how long to remember a yes. No answer is asked for again: one without an action is none."""
        action, content = answer.get("action"), answer.get("content")
        if action == "accept":
            return Answer("accept", content.get("remember") if type(content) is dict else None)
        return Answer("decline" if action == "decline" else "cancel")
