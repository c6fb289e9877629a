"""The approval of a call by a person, as its revision allows: a question, a held call, or a call that is repeated.

| the caller | the person at the client can be asked | an operator decides |
|---|---|---|
| stateless, declares forms | `input_required` with a form | held, then `input_required` with a state only: call again |
| earlier, declares forms | a question on the call's own stream | held, with progress as a sign of life |
| declares nothing | never asked | held; then a result that says what to do: call again with the same arguments |

The first decision counts. A repeated call is matched by what the approval is bound to, and runs once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from handrail.approvals.queue import Approval, ApprovalError, ApprovalQueue, ApprovalRequest
from handrail.audit.format import TrailError
from handrail.engine.call import Call
from handrail.engine.call_state import CallState
from handrail.engine.catalog import ToolEntry
from handrail.engine.input_requests import Answer, Form, RetryLater
from handrail.errors import Kind, Refused, TransportError
from handrail.guards.policy import SubjectKind
from handrail.jsonrpc import encode
from handrail.model import Object
from handrail.stores import StoreError
from handrail.text.controls import escape, one_line

MAX_ROUNDS = 9  # of "call again": clients give up after the tenth
HEARTBEAT_SECONDS = 5.0
FORM_SECONDS = 60.0  # for so long, a client that got a form counts as waiting
MAX_DESCRIPTION = 300  # characters of a tool's description
LONG_ARGUMENTS_CHARS = 1_000  # a person may not read all arguments that are longer

REMEMBER_SECONDS = {"no": 0.0, "for an hour": 3600.0, "for a day": 86400.0, "for 30 days": 30 * 86400.0}


class ApprovalFlow:
    """The approval of one call: by its caller, by an operator, or by the first of them."""

    def __init__(
        self,
        call: CallState,
        request: ApprovalRequest,
        queue: ApprovalQueue,
        preview: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self._call = call
        self._request = request
        self._queue = queue
        self._preview = preview
        by = request.by
        self._can_ask_caller = by in ("anyone", "caller") and call.can_ask("elicitation.form")
        self._operators_decide = by in ("operator", "another") or (queue.shared and by != "caller")

    async def run(self) -> Approval:
        """Return an approval that is valid for this call, or raise why there is none."""
        if not self._can_ask_caller and not self._operators_decide:
            text = f"{self._call.name} needs a person's approval, but no person can be asked:"
            look = trust_hint(self._call.entry)
            raise Refused(Kind.DENIED, f"{text} the client takes no questions. Nothing was done.{look}")
        call, seconds = self._call, self._queue.options.expires
        try:
            approval = await self._approval_of_retry() or await self._file_request()
            call.agreed = f"approval {approval.id}"
            while approval.state == "pending":
                call.deadline = (
                    call.now() + seconds + call.entry.total
                )  # a person's time does not count towards the timeout
                try:
                    approval = await self._wait_for_decision(approval)
                except asyncio.CancelledError:
                    await self._cancel(approval)
                    raise
                call.deadline = call.now() + call.entry.total
                if approval.state != "cancelled":
                    break
                approval = await self._file_request()  # an identical call had waited for the same approval
                call.agreed = f"approval {approval.id}"
        except ApprovalError as problem:
            raise Refused(Kind.DENIED, f"{self._call.name} was not approved: {problem}") from None
        if approval.state == "approved":
            return approval
        raise self._refusal(approval)

    async def _file_request(self) -> Approval:
        """File the request whole or not at all; cancel it if the call is cancelled meanwhile."""
        filing = asyncio.ensure_future(self._queue.find_or_create(self._request, self._preview))
        try:
            return await asyncio.shield(filing)
        except asyncio.CancelledError:
            with suppress(StoreError, TrailError, ApprovalError):
                approval = await filing
                if approval.state == "pending":
                    await self._cancel(approval)
            raise

    async def _approval_of_retry(self) -> Approval | None:
        """Return the approval that a retry names, if it belongs to this call and is still valid."""
        for key, answer in self._call.answers.items():
            if key.startswith("approval-") and type(answer) is dict:
                approval = await self._queue.get(key.removeprefix("approval-"))
                if (
                    approval is None
                    or approval.digest != self._request.digest()
                    or not self._queue.is_current(approval)
                ):
                    continue
                if approval.state == "pending" or (
                    approval.state == "approved" and answer.get("ticket", "") == approval.ticket
                ):
                    return approval
        return None

    async def _wait_for_decision(self, approval: Approval) -> Approval:
        if not self._can_ask_caller:
            return await self._wait_for_operator(approval)
        if self._call.revision.input_mode == "retry":
            async with self._queue.caller_waiting(approval, FORM_SECONDS, returns=True):
                answer = await self._ask_caller(approval)  # ends this try if the client has not answered yet
            return await self._decide_by_answer(approval, answer)
        seconds = approval.expires - self._queue.now()
        asking = asyncio.ensure_future(self._ask_caller(approval))
        waiting = asyncio.ensure_future(self._queue.wait(approval, seconds))
        try:
            async with self._queue.caller_waiting(approval, seconds):
                await asyncio.wait((asking, waiting), return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() else await self._decide_by_answer(approval, asking.result())
        finally:
            for each in (asking, waiting):
                each.cancel()
            await asyncio.gather(asking, waiting, return_exceptions=True)
            if not self._operators_decide:
                await self._cancel(approval)

    async def _cancel(self, approval: Approval) -> None:
        """Cancel the approval request. If the store is down, it expires by itself.

        It stays open while the endpoint is stopping: the client is still there, and will call again.
        """
        if not self._call.reply_channel.stopping:
            with suppress(StoreError, TrailError, ApprovalError):
                await self._queue.cancel(approval)  # only if it is still pending: a decision made meanwhile counts

    async def _ask_caller(self, approval: Approval) -> Answer:
        text = _question_text(approval, self._request, self._call.entry.kind) + trust_hint(self._call.entry)
        key, question = f"approval-{approval.id}", _Consent(text, self._queue)
        try:
            answer: Answer = (await Call(self._call).ask_all({key: question}))[key]
            return answer
        except TransportError:  # the client has disconnected
            raise asyncio.CancelledError from None

    async def _decide_by_answer(self, approval: Approval, answer: Answer) -> Approval:
        """Decide by the answer of the person at the client, unless an operator was faster."""
        if answer.action == "cancel":
            await self._queue.cancel(approval)
            latest = await self._queue.get(approval.id)
            if latest is None or latest.state == "cancelled":
                text = f"{self._call.name} was not approved: the question was dismissed. Nothing was done."
                raise Refused(Kind.DENIED, text)
            return latest
        yes, who = answer.action == "accept", approval.asked.principal
        remember = REMEMBER_SECONDS.get(str(answer.content), 0.0) if approval.asked.remember else 0.0
        try:
            return await self._queue.decide(approval.id, yes, by=who, role="caller", remember=remember)
        except ApprovalError:
            latest = await self._queue.get(approval.id)
            if latest is None or latest.state == "pending":
                raise
            return latest

    async def _wait_for_operator(self, approval: Approval) -> Approval:
        call, options = self._call, self._queue.options
        key = f"approval-{approval.id}"
        stateless = call.revision.input_mode == "retry"
        seconds = min(options.round if stateless else options.wait, approval.expires - self._queue.now())
        ends = call.now() + seconds
        beats = 0
        call.waiting += 1
        try:
            async with self._queue.caller_waiting(approval, seconds, returns=stateless):
                while approval.state == "pending" and (left := ends - call.now()) > 0:
                    approval = await self._queue.wait(approval, min(left, HEARTBEAT_SECONDS))
                    beats += 1
                    await Call(call).progress(beats * 1e-6, message=f"waits for approval {approval.id}")
        finally:
            call.waiting -= 1
        if approval.state == "pending" and self._queue.now() < approval.expires:
            answer = call.answers.get(key)
            turn = answer.get("round", 1) if type(answer) is dict else 1
            if stateless and type(turn) is int and turn < MAX_ROUNDS:
                call.answered = {**call.answered, key: {"round": turn + 1}}
                raise RetryLater
            await self._queue.publish_change(approval)  # its caller does not wait any more
            minutes = max(1, round((approval.expires - self._queue.now()) / 60))
            text = f"{call.name} waits for a person's approval ({approval.id}), and was not carried out yet. "
            text += f"Call it again with the same arguments later; the question is open for {minutes} more minutes."
            raise Refused(Kind.PENDING, text, {"approval": approval.id, "expires": approval.expires})
        return approval

    def _refusal(self, approval: Approval) -> Refused:
        name, note = self._call.name, f": {approval.note}" if approval.note else ""
        if approval.state == "denied":
            who = "its user" if approval.by == approval.asked.principal else "an operator"
            return Refused(Kind.DENIED, f"{name} was not approved by {who}{note}. Nothing was done.")
        if approval.state == "consumed":
            return approval_used_up(name)
        return Refused(Kind.DENIED, f"{name} was not approved in time. Nothing was done; call again to ask again.")


def trust_hint(entry: ToolEntry) -> str:
    """Return what makes calls of an upstream's tools ask less, if no person has looked at them yet."""
    if entry.trusted or not entry.upstream:
        return ""
    return f" (No person has looked at the tools of {entry.upstream} yet: `handrail trust {entry.upstream}` does.)"


def approval_used_up(name: str) -> Refused:
    """Return the refusal of a call whose approval an identical call has used."""
    text = f"{name}: its approval has just been used by another call. Nothing was done; call again to ask again."
    return Refused(Kind.DENIED, text)


def _question_text(approval: Approval, request: ApprovalRequest, kind: SubjectKind) -> str:
    """Return the question: title and description of the tool, all arguments, the preview, and why it is asked."""
    arguments_text = escape(encode(request.arguments).decode(), lines=False)
    if len(arguments_text) > LONG_ARGUMENTS_CHARS:  # short arguments first: a long one must not hide them
        by_length = sorted(request.arguments.items(), key=lambda each: len(encode(each)))
        arguments_text = escape(encode(dict(by_length)).decode(), lines=False)
    # The caller learns the name of an operator's rule, not what the rule looks at.
    why = f"because {request.why}" if request.rule.startswith("built in") else f"by the rule {request.rule!r}"
    label = request.tool.removeprefix("prompt:") if kind == "prompt" else request.tool
    tool, server, why = (escape(each, lines=False) for each in (label, request.server, why))
    since = "".join(f"\nSince it was last allowed: {escape(each, lines=False)}." for each in approval.before)
    name = f"{escape(request.title, lines=False)} ({tool})" if request.title not in ("", request.tool) else tool
    about = f"\n{one_line(request.description, MAX_DESCRIPTION)}" if request.description else ""
    # Each line of a preview is marked: its text may come from anywhere, and must not pass for the question's.
    lines = escape(approval.preview).splitlines()
    preview = "".join(["\nPreview:", *(f"\n| {line}" for line in lines)]) if lines else ""
    verb = {"tool": "Allow", "resource": "Read", "prompt": "Get the prompt"}[kind]
    arguments_line = f"\n{arguments_text}" if request.arguments or kind == "tool" else ""
    return f"{verb} {name} on {server}?{about}{arguments_line}{preview}\nAsked {why}.{since}"


class _Consent(Form):
    """The question whether a call may run. The action decides: accept allows it once, decline denies it.

    The form has only an optional field: how long to remember the approval, where that is allowed.
    """

    def __init__(self, message: str, queue: ApprovalQueue) -> None:
        choices = [word for word, seconds in REMEMBER_SECONDS.items() if seconds <= queue.options.remember]
        title = "Do not ask again for the same arguments"
        field = {"type": "string", "title": title, "enum": choices, "default": "no"}
        fields: Object = {"remember": field} if len(choices) > 1 else {}
        super().__init__(message, {"type": "object", "properties": fields}, as_is=True)

    def read(self, answer: Object) -> Answer:
        """Return the action, and how long to remember an approval. An answer without an action counts as cancel."""
        action, content = answer.get("action"), answer.get("content")
        if action == "accept":
            return Answer("accept", content.get("remember") if type(content) is dict else None)
        return Answer("decline" if action == "decline" else "cancel")
