"""How a caller is brought to sign in to an upstream: by a question of its call, or by a tool of the gateway.

| the caller | what it gets |
|---|---|
| takes questions with a page | the page as a question, then a form for the code that the page shows |
| takes such questions, but not on this stream (2025-11-25) | the page in the error -32042 |
| takes none | a text that names the tool to call, whose result has the page |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from msgspec import UNSET, Struct

from handrail.engine.call import Call
from handrail.engine.call_state import CallPeer
from handrail.engine.catalog import ToolEntry, make_entry
from handrail.engine.input_requests import RetryLater, Url
from handrail.errors import AuthorizationError, Kind, Refused, ToolError
from handrail.gateway.grants import FINISH_SECONDS, SIGN_IN_SECONDS, SignInRequest, UserGrants
from handrail.gateway.settings import Terms, short_name
from handrail.guards.limits import ANONYMOUS
from handrail.model import Object, Tool
from handrail.oauth.client import RedirectListener
from handrail.protocol.http_rules import base_url
from handrail.text.controls import mask, one_line

__all__ = ["KEY_PREFIX", "SignIn", "is_anonymous"]

log = logging.getLogger("handrail")

KEY_PREFIX = "sign-in-"  # of the names of questions
HOLD_SECONDS, MAX_ROUNDS = 20.0, 9  # that a caller without requests waits for its browser, and how often
MAX_LISTENERS = 16  # on this machine, of one upstream
_URL_REQUIRED = -32042
_FORM: Object = {
    "type": "object",
    "properties": {"code": {"type": "string", "title": "Code on the page", "minLength": 8, "maxLength": 20}},
    "required": ["code"],
}
_ARGUMENTS: Object = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "description": "The code on the page, after the sign-in.", "maxLength": 20}
    },
    "additionalProperties": False,
}


class _Listening(Struct, eq=False):
    """A sign-in whose redirect comes to this machine."""

    request: SignInRequest
    task: asyncio.Task[None]
    has_arrived: bool = False


class SignIn:
    """The sign-in of callers to one upstream. `entry` is the tool that begins one."""

    def __init__(self, grants: UserGrants, terms: Terms, owner: Any) -> None:
        self.grants = grants
        self.entry = _entry(terms, owner, self._run_tool)
        self._name = terms.name
        self._listening: dict[str, _Listening] = {}  # by caller

    @property
    def trouble(self) -> str:
        """What a caller is told whose grant does not work, for a reason that only the log has."""
        return f"{self._name} does not take your sign-in, or it cannot be renewed now. Nothing was done."

    def reason(self, principal: str) -> str:
        """Return what a caller without a grant is told."""
        if is_anonymous(principal):
            return (
                f"{self._name} is used with the sign-in of each caller, and this caller is anonymous: a grant needs an"
                " owner. Call with an API key or a token of your own. Nothing was done."
            )
        return f"{self._name} needs you to sign in first: call {self.entry.name}. Nothing was done."

    async def require(self, call: Call) -> None:
        """Let a caller with a grant pass; have any other sign in."""
        principal = call.principal.id
        if is_anonymous(principal):
            raise Refused(Kind.FORBIDDEN, self.reason(principal), readable=True)
        try:
            await self._settle(principal)
            is_signed_in = await self.grants.is_signed_in(principal)
        except AuthorizationError as problem:
            raise self._failure(problem) from None
        if not is_signed_in:
            await self.ask(call)

    async def ask(self, call: Call) -> None:
        """Ask a caller to sign in; return when it has. What ends the call otherwise says what to do."""
        state, principal = call._state, call.principal.id
        try:
            number = await self.grants.number_with_code(principal)
            if not number:
                request = await self.begin(principal, endpoint_of(state.peer))
                await self._ask_page(call, request)
                if not request.needs_code:
                    await self._wait(call, request.number)
                    return
                number = request.number
            if not state.can_ask("elicitation.form"):
                raise ToolError(f"After you have signed in, call {self.entry.name} with the code on the page.")
            answer = await call.ask(
                f"After you have signed in, the page shows a code. Enter it, and {self._name} is used for you.",
                _FORM,
                key=f"{KEY_PREFIX}{number}-code",
            )
            if answer.action != "accept":
                raise ToolError(f"You have not signed in to {self._name}. Nothing was done.")
            await self._confirm(principal, answer.content["code"])
        except AuthorizationError as problem:
            raise self._failure(problem) from None

    async def _ask_page(self, call: Call, request: SignInRequest) -> None:
        state, url = call._state, request.pending.url
        text = f"{self._name} wants to know who you are: sign in at {request.host}."
        if state.can_ask("elicitation.url"):
            answer = await call.ask_url(text, url, key=f"{KEY_PREFIX}{request.number}")
            if answer.action != "accept":
                raise ToolError(f"You have not signed in to {self._name}. Nothing was done.")
            return
        if state.revision.elicitation_modes and state.accepts("elicitation/create", "elicitation.url"):
            data: Object = {"elicitations": [Url(text, url).request.params]}
            raise Refused(Kind.NEEDS_URL, text, data, code=_URL_REQUIRED)
        raise Refused(Kind.FORBIDDEN, self.reason(call.principal.id), readable=True)

    async def _confirm(self, principal: str, code: str) -> None:
        if not await self.grants.confirm(principal, code):
            raise ToolError(
                "That is not the code on the page, or the sign-in has expired. Call again. Nothing was done."
            )

    async def _wait(self, call: Call, number: str) -> None:
        """Wait for a redirect to this machine."""
        state, key = call._state, f"{KEY_PREFIX}{number}-wait"
        listening = self._listening.get(call.principal.id)
        is_retried = state.revision.input_mode == "retry"
        if listening is not None:
            state.waiting += 1
            try:
                await asyncio.wait({listening.task}, timeout=HOLD_SECONDS if is_retried else SIGN_IN_SECONDS)
            finally:
                state.waiting -= 1
                state.last_activity = state.now()
        if await self.grants.is_signed_in(call.principal.id):
            return
        before = state.answers.get(key)
        rounds = before.get("round", 1) if type(before) is dict else 1
        is_open = listening is not None and not listening.task.done()
        if is_retried and is_open and type(rounds) is int and rounds < MAX_ROUNDS:
            state.answered = {**state.answered, key: {"round": rounds + 1}}
            raise RetryLater
        raise ToolError(f"You have not signed in to {self._name} yet. Sign in, and call again. Nothing was done.")

    async def _settle(self, principal: str) -> None:
        """Wait for the token, if the redirect of a caller has just come to this machine."""
        listening = self._listening.get(principal)
        if listening is not None and listening.has_arrived:
            await asyncio.wait({listening.task}, timeout=FINISH_SECONDS)

    def _failure(self, problem: AuthorizationError) -> ToolError:
        """Return what the caller is told: an address, or a word of the upstream, stays in the log."""
        log.warning("gateway: %s: no sign-in: %s", self._name, one_line(mask(problem.text), 300))
        return ToolError(f"{self._name}: no sign-in is possible now; the gateway's log says why. Nothing was done.")

    # The tool

    async def _run_tool(self, arguments: Object, call: Call) -> str:
        principal, state = call.principal.id, call._state
        if is_anonymous(principal):
            raise Refused(Kind.FORBIDDEN, self.reason(principal), readable=True)
        try:
            await self._settle(principal)
            if code := arguments.get("code"):
                await self._confirm(principal, code)
            elif not await self.grants.is_signed_in(principal):
                can_open = state.revision.elicitation_modes and state.accepts("elicitation/create", "elicitation.url")
                if not can_open and not await self.grants.number_with_code(principal):
                    request = await self.begin(principal, endpoint_of(state.peer))
                    then = f"call {self.entry.name} with the code on the page" if request.needs_code else "call again"
                    return f"Open this page, sign in to {self._name}, then {then}: {request.pending.url}"
                await self.ask(call)
        except AuthorizationError as problem:
            raise self._failure(problem) from None
        return f"You are signed in to {self._name}."

    # Where the browser comes back to

    async def begin(self, principal: str, endpoint: str) -> SignInRequest:
        """Begin a sign-in that comes back to an endpoint of this server; without one, to this machine."""
        if endpoint:
            return await self.grants.begin(principal, self.grants.redirect_at(endpoint), needs_code=True)
        self._listening = {who: each for who, each in self._listening.items() if not each.task.done()}
        if principal in self._listening:
            return self._listening[principal].request
        if len(self._listening) >= MAX_LISTENERS:
            raise AuthorizationError("too many sign-ins are under way")
        receiver = RedirectListener(await self.grants.loopback_redirect())
        await receiver.start(any_port=True)
        try:
            request = await self.grants.begin(principal, receiver.redirect, needs_code=False)
        except BaseException:
            await receiver.close()
            raise
        task = asyncio.get_running_loop().create_task(self._receive(receiver, principal, request.pending.state))
        self._listening[principal] = _Listening(request, task)
        return request

    async def _receive(self, receiver: RedirectListener, principal: str, state: str) -> None:
        try:
            async with asyncio.timeout(SIGN_IN_SECONDS):
                back = await receiver.wait(state)
            self._listening[principal].has_arrived = True
            await self.grants.finish(urlsplit(back).query)
        except (TimeoutError, AuthorizationError):
            pass  # the caller asks again
        finally:
            await receiver.close()

    async def close(self) -> None:
        """Stop listening for redirects to this machine."""
        tasks = [each.task for each in self._listening.values()]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


def is_anonymous(owner: str) -> bool:
    """Return whether a caller, or the owner of a connection, has no name of its own."""
    return owner == ANONYMOUS or owner.startswith(f"{ANONYMOUS} from ")


def endpoint_of(peer: CallPeer) -> str:
    """Return the URL of the endpoint that a caller has reached over HTTP; empty for any other."""
    if peer.reached_at is None:
        return ""
    scheme, root_path = peer.reached_at
    return base_url({"scheme": scheme, "root_path": root_path}, peer.headers or {}) + peer.path


def _entry(terms: Terms, owner: Any, run: Callable[[Object, Call], Any]) -> ToolEntry:
    tool = Tool(
        name=short_name(f"sign_in_to_{terms.name}"),
        description=f"Sign in to {terms.name}, whose tools are used with the account of each caller.",
        input_schema=_ARGUMENTS,
        annotations={"readOnlyHint": False, "destructiveHint": False, "idempotentHint": True, "openWorldHint": True},
    )
    return make_entry(
        tool,
        invoke=run,
        mode="async",
        dangerous=UNSET,
        idle=terms.idle,
        total=max(terms.total, SIGN_IN_SECONDS),
        tags=frozenset(),
        owner=owner,
        upstream=terms.name,
        takes_call=True,
    )
