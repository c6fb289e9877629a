"""One upstream server behind the gateway: its state, and its calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

from handrail import __version__
from handrail.client.mcp_config import ServerTarget
from handrail.client.tools import ListedTool
from handrail.engine.call import Call
from handrail.engine.call_state import CallState
from handrail.engine.catalog import ToolEntry
from handrail.engine.completion import RequestPeer
from handrail.engine.core import Engine
from handrail.engine.guard_set import unknown
from handrail.engine.input_requests import InputRequired
from handrail.errors import (
    AuthorizationError,
    CallTimeout,
    HttpRefused,
    Kind,
    PeerError,
    Refused,
    RemoteProtocolError,
    Sent,
    ToolError,
    TransportError,
)
from handrail.gateway.catalog import UpstreamCatalog, UpstreamTool
from handrail.gateway.entries import failure_of, prompt_result, read_result, tool_result
from handrail.gateway.grants import UserGrants
from handrail.gateway.health import CircuitBreaker
from handrail.gateway.lists import UpstreamLists
from handrail.gateway.pool import SessionPool
from handrail.gateway.questions import (
    NO_CAPABILITIES,
    PARKED,
    CapabilityKey,
    Parked,
    ParkedCalls,
    capability_key,
    encode_questions,
    to_model,
)
from handrail.gateway.session import BridgedCall, UpstreamSession
from handrail.gateway.settings import Terms
from handrail.gateway.sign_in import SignIn
from handrail.gateway.trust import Pins
from handrail.gateway.watches import ResourceWatches
from handrail.guards.policy import hints
from handrail.model import InputRequest, Object, ToolResult
from handrail.oauth.client import OAuth, SignInRequired
from handrail.revisions import Revision
from handrail.text.controls import mask, one_line

__all__ = ["Upstream", "UpstreamTool"]

log = logging.getLogger("handrail")

STDERR_LINES, STDERR_CHARS = 50, 300
COMPLETION_SECONDS = 10.0
MAX_PAGES = 10  # that a call can require to be visited first
_INVALID_PARAMS, _HEADER_MISMATCH, _VERSION, _URL_REQUIRED = -32602, -32020, -32022, -32042

State = Literal["new", "starting", "up", "down", "stopped"]


class Upstream:
    """One upstream server. `target` names it and makes its transports; `index` is its place in the configuration.

    `on_change` is called whenever it lists something else, or may. With `oauth` each caller has a grant of its own.
    """

    def __init__(
        self,
        engine: Engine,
        owner: Any,
        target: ServerTarget,
        terms: Terms,
        pins: Pins,
        index: int,
        on_change: Callable[[], None],
        oauth: OAuth | None = None,
    ) -> None:
        self.engine = engine
        self.on_change = on_change
        self.target = target.with_stderr(self.on_stderr)
        self.is_command = not target.key.startswith(("http://", "https://"))
        self.terms = terms
        self.name = terms.name
        self.client_info = {"name": "handrail-gateway", "version": __version__}
        self.state: State = "new"
        self.problem = ""
        self.revision = ""
        self.instructions = ""  # for models, as it gave them
        self.era: Literal["", "handshake", "stateless"] = ""
        self.is_shared = False  # one connection serves all callers
        self.era_since = 0.0
        self.latency_ms = 0.0
        self.counts: Counter[str] = Counter()
        self.lossy: Counter[str] = Counter()
        self.is_stopped = False
        self.sign_in: SignIn | None = None
        if oauth is not None:
            grants = UserGrants(engine, self.name, target.key, oauth, self.on_grant_change)
            self.sign_in = SignIn(grants, terms, owner)
        self.catalog = UpstreamCatalog(engine, owner, terms, pins, index, self)
        self.pool = SessionPool(self)
        self.lists = UpstreamLists(self, self.pool, self.catalog)
        self.parked = ParkedCalls()
        self.watches = ResourceWatches(self)
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._answered_at = 0.0

    # Calls

    async def send(self, method: str, params: Object, call: Call, tool: ListedTool | None, uri: str = "") -> ToolResult:
        """Send a call to the upstream, and return its result in the neutral form."""
        state, started = call._state, time.perf_counter()
        self.counts["calls"] += 1
        key = capability_key(state.revision, state.client)
        owner = self.pool.owner(state.peer, key, state.revision)
        breaker = self.pool.breaker(owner)
        self._check_open(state, owner, breaker)
        try:
            if self.sign_in is None:
                raw, revision = await self._send(method, params, state, tool, owner, key)
            else:
                raw, revision = await self._send_as_user(self.sign_in, method, params, call, tool, owner, key)
            result = _READERS[method](raw, revision, state.revision, state.entry)
        except PeerError as problem:
            self.counts["errors"] += 1
            self._on_failure(problem, owner)
            session = self.pool.sessions.get((owner, key)) or self.pool.stateless
            await self._raise_url_questions(problem, state, session)
            if isinstance(problem, RemoteProtocolError) and problem.code == _INVALID_PARAMS and tool is not None:
                await self._check_still_listed(state, owner, key)
                self.lose("LOSSY-22", state)
            is_refused = isinstance(problem, HttpRefused) and problem.status in (401, 403)
            if is_refused or isinstance(problem, AuthorizationError):
                self.lose("LOSSY-21", state)
            failure = failure_of(problem, self.name, method, uri)
            if isinstance(failure, ToolError) and isinstance(problem, TransportError) and session and session.stderr:
                failure.data = {"stderr": session.stderr}
            raise failure from None
        except asyncio.CancelledError:
            if state.timed_out and self._answered_at < started:  # else it answers others
                breaker.add_failure()
            else:
                breaker.release()
            raise
        except InputRequired:
            breaker.add_success()
            raise
        except BaseException:
            breaker.release()
            raise
        breaker.add_success()
        self._answered_at = time.perf_counter()
        self.latency_ms = (self._answered_at - started) * 1000
        state.upstream_revision = revision.name
        if revision.structured == "bare" and result.is_error:
            self.lose("LOSSY-10", state)
        if lossy := state.revision.losses(result, state.entry.wraps):
            state.lossy = (*state.lossy, *lossy)
            self.lossy.update(lossy)
            log.info("gateway: %s: %s for %s: %s", self.name, state.name, state.revision.name, ", ".join(lossy))
        return result

    async def _check_still_listed(self, state: CallState, owner: str, key: CapabilityKey) -> None:
        """Refuse a call as one of an unknown tool if the upstream no longer lists the tool that it refuses."""
        await self.lists.refresh_for(owner, key)
        if self.lists.own_entry(state.entry, owner, key) is None:
            raise unknown("tool", state.name) from None

    def _check_open(self, state: CallState, owner: str, breaker: CircuitBreaker) -> None:
        if self.engine.stops and (reason := self.engine.stop_reason(state.entry, state.principal)):
            raise ToolError(reason)
        if self.is_stopped:
            raise ToolError(f"{self.name} was stopped by an operator. Nothing was done.")
        if self.pool.has_ended(owner):
            raise ToolError(f"{self.name} has ended, and is not started again by itself. Nothing was done.")
        if PARKED not in state.answers and (wait := breaker.wait_seconds()) > 0:
            raise ToolError(f"{self.name} is down; it is tried again in {max(wait, 1):.0f} s. Nothing was done.")

    async def _send(
        self,
        method: str,
        params: Object,
        state: CallState,
        tool: ListedTool | None,
        owner: str,
        key: CapabilityKey,
        *,
        repeats: bool = True,
    ) -> tuple[Object, Revision]:
        if state.answers and (parked := self.parked.resume(owner, state)) is not None:
            return await self.parked.run(parked), parked.revision
        session = await self.pool.session(owner, key, state.peer)
        revision = session.connection.revision
        assert revision is not None
        header_map = session.header_map(tool) if tool is not None and revision.stateless else {}
        try:
            if revision.stateless or state.revision.input_mode == "request" or not session.capabilities:
                raw = await session.request(BridgedCall(state, session), method, params, key, header_map)
            else:

                def work(parked: Parked) -> Any:
                    return session.request(BridgedCall(state, session, parked), method, params, key, header_map)

                raw = await self.parked.run(Parked(owner, state, work, revision))
            if session.connection.revision is not revision:  # it was upgraded: the pool has to learn of it
                self.pool.end(session)
        except TransportError as problem:
            is_harmless = problem.sent is Sent.NO or _only_reads(state.entry)
            if repeats and isinstance(problem, HttpRefused):
                is_harmless = await self.pool.is_put_back(session, problem)
            if repeats and is_harmless:
                return await self._send(method, params, state, tool, owner, key, repeats=False)
            raise
        except RemoteProtocolError as problem:
            if repeats and problem.code == _HEADER_MISMATCH and revision.stateless:
                await self.lists.refresh_for(owner, key)
                return await self._send(method, params, state, tool, owner, key, repeats=False)
            is_stateless_error = problem.code == _HEADER_MISMATCH and not revision.stateless
            if problem.code == _VERSION or is_stateless_error:  # it speaks another revision than before
                self.pool.end(session)
                if repeats:
                    return await self._send(method, params, state, tool, owner, key, repeats=False)
                text = "it refuses the revision that it has offered"
                raise TransportError(text, sent=Sent.NO, server=self.name) from None
            if repeats and await self.pool.is_put_back(session, problem):
                return await self._send(method, params, state, tool, owner, key, repeats=False)
            raise
        return raw, session.connection.revision or revision

    async def _send_as_user(
        self,
        sign_in: SignIn,
        method: str,
        params: Object,
        call: Call,
        tool: ListedTool | None,
        owner: str,
        key: CapabilityKey,
    ) -> tuple[Object, Revision]:
        """Send a call with the grant of its caller; ask the caller for one that is missing or not taken any more."""
        await sign_in.require(call)
        try:
            return await self._send(method, params, call._state, tool, owner, key)
        except SignInRequired:
            await sign_in.ask(call)
            return await self._send(method, params, call._state, tool, owner, key)
        except AuthorizationError as problem:
            log.warning("gateway: %s: a caller's grant does not work: %s", self.name, _problem_text(problem))
            raise ToolError(sign_in.trouble) from None

    async def _raise_url_questions(self, problem: PeerError, state: CallState, session: UpstreamSession | None) -> None:
        """Pass on the pages that a call needs first (-32042) to callers that can open them."""
        if not isinstance(problem, RemoteProtocolError) or problem.code != _URL_REQUIRED:
            return
        pages = problem.data.get("elicitations") if type(problem.data) is dict else None
        accepts = state.revision.elicitation_modes and state.accepts("elicitation/create", "elicitation.url")
        if not accepts or type(pages) is not list:
            self.lose("LOSSY-20", state)
            return
        questions: dict[str, InputRequest] = {}
        for number, page in enumerate(pages[:MAX_PAGES], 1):
            with suppress(RemoteProtocolError):  # not an address that can be passed on
                members = {**page, "mode": "url"} if type(page) is dict else {}
                question = to_model("elicitation/create", members, state.revision)
                if session is not None and question.params["elicitationId"] == members.get("elicitationId"):
                    question.params["elicitationId"] = session.add_page(state, question.params["elicitationId"])
                questions[f"url{number}"] = question
        if not questions:
            return
        if state.revision.input_mode == "request":
            data = {"elicitations": [each.params for each in questions.values()]}
            raise Refused(Kind.NEEDS_URL, problem.text, data, code=_URL_REQUIRED) from None
        if not questions.keys() <= state.answers.keys():
            raise InputRequired(await encode_questions(state, questions))

    async def complete(
        self, reference: Object, argument: str, value: str, context: Mapping[str, str], peer: RequestPeer
    ) -> list[str]:
        """Return the values that the upstream knows for an argument."""
        owner = SessionPool.owner_without_roots(peer)
        keys = (key for other, key in self.pool.sessions if other == owner)
        params: Object = {"ref": reference, "argument": {"name": argument, "value": value}}
        if context:
            params["context"] = {"arguments": dict(context)}
        try:
            session = await self.pool.session(owner, next(keys, NO_CAPABILITIES))
            revision = session.connection.revision
            is_declared = revision is None or "completions" in revision.server_capabilities
            if is_declared and not session.connection.offers("completions"):
                return []
            deadline = session.connection.now() + COMPLETION_SECONDS
            raw = await session.connection.request("completion/complete", params, session.connection.clocks, deadline)
        except (PeerError, Refused) as problem:
            log.debug("gateway: %s: completion: %s", self.name, problem)
            return []
        completion = raw.get("completion")
        values = completion.get("values") if type(completion) is dict else None
        return [each for each in values if type(each) is str] if type(values) is list else []

    # What its connections and lists tell

    def on_opening(self) -> None:
        if self.state in ("new", "down"):
            self.state = "starting"

    def on_open(self, revision: Revision, handshake_result: Object) -> None:
        text = handshake_result.get("instructions")
        self.instructions = text if type(text) is str else ""
        era: Literal["handshake", "stateless"] = "stateless" if revision.stateless else "handshake"
        if (era, revision.name) != (self.era, self.revision):
            if self.era:
                log.warning("gateway: %s: speaks %s now, was %s", self.name, revision.name, self.revision)
            self.era, self.revision, self.era_since = era, revision.name, time.time()
            self.is_shared = revision.stateless and not self.terms.is_of_users
            self.on_change()  # whose lists count is another question now
            if not revision.stateless:
                self._stderr.clear()  # an old server complains of the probe for the newer protocol
        self.state, self.problem = "up", ""

    def on_open_failed(self, problem: PeerError, owner: str) -> None:
        self._on_failure(problem, owner)
        if self.sign_in is not None and isinstance(problem, AuthorizationError):  # that is the trouble of one caller
            self.state = "new" if self.state == "starting" else self.state
            return
        self.state, self.problem = "down", _problem_text(problem)

    def on_not_listed(self, problem: PeerError | Refused, owner: str) -> None:
        if isinstance(problem, PeerError):
            self._on_failure(problem, owner)
            self.problem = _problem_text(problem)
        self.lose("LOSSY-23")

    def on_list_changed(self, session: UpstreamSession) -> None:
        self.on_change()
        self.lists.on_list_changed(session)

    def _on_failure(self, problem: PeerError, owner: str) -> None:
        """Count a failure of the upstream itself; errors that it answers with are none."""
        is_answer = isinstance(problem, HttpRefused) and 400 <= problem.status < 500
        if isinstance(problem, TransportError | CallTimeout) and not is_answer:
            self.pool.breaker(owner).add_failure()
            self.problem = _problem_text(problem)
            if self.state in ("up", "starting"):
                self.state = "down"
                log.warning("gateway: %s: down: %s", self.name, self.problem)
        else:
            self.pool.breaker(owner).add_success()

    def note(self, text: str) -> None:
        """Keep what an operator should know of the upstream."""
        self.counts["notes"] += 1
        self.problem = one_line(mask(text), 200)
        log.warning("gateway: %s: %s", self.name, self.problem)

    def lose(self, case: str, state: CallState | None = None) -> None:
        """Count a case in which something cannot be carried between two revisions (GW-04)."""
        self.lossy[case] += 1
        if state is not None:
            state.lossy = (*state.lossy, case)
        else:
            self.engine.record_loss(self.name, case)
        log.info("gateway: %s: %s", self.name, case)

    def count_definition_losses(self, method: str, revision: Revision) -> None:
        """Count what its definitions lose for callers of a revision, once for each change of a list (GW-04)."""
        if losses := self.catalog.new_losses(method, revision):
            for case, count in losses.items():
                self.engine.record_loss(self.name, case, count)
            summary = ", ".join(f"{case} in {count}" for case, count in sorted(losses.items()))
            log.info("gateway: %s: %s for %s: definitions lose %s", self.name, method, revision.name, summary)

    def on_stderr(self, line: str) -> None:
        self._stderr.append(line[:STDERR_CHARS])

    @property
    def stderr(self) -> list[str]:
        """The last lines of its standard error, masked and on one line each."""
        return [one_line(mask(line), STDERR_CHARS) for line in self._stderr]

    @property
    def tools(self) -> list[UpstreamTool]:
        """Its tools as it lists them, with what became of each."""
        return self.catalog.tools

    @property
    def is_trusted(self) -> bool:
        """Whether the operator trusts it, or a person has accepted tools of it."""
        return self.terms.trusted or any(tool.accepted for tool in self.tools)

    async def refresh(self) -> None:
        """Fetch its lists again, and wait for them. What has failed is tried at once."""
        self.pool.restart()
        await self.lists.refresh()

    def accept(self, classes: Mapping[str, str]) -> None:
        """Pin these tools, by their own names, as they are listed now, with the classes a person has accepted."""
        self.catalog.accept(classes)

    async def on_grant_change(self, principal: str) -> None:
        """Use what a caller has signed in for, or has no longer: new connections, and lists of its own."""
        assert self.sign_in is not None
        self.pool.end_of(principal)
        await self.lists.renew_for(principal, is_signed_in=await self.sign_in.grants.is_signed_in(principal))
        self.on_change()
        self.catalog.tell_owner("tools/list", principal)

    # Lifecycle

    async def close(self) -> None:
        """Close all connections. The next call opens new ones."""
        self.parked.close()
        self.lists.close()
        self.watches.close()
        self.state = "new"
        if self.sign_in is not None:
            await self.sign_in.close()
        await self.pool.close()
        self.on_change()

    async def stop(self, reason: str = "") -> None:
        """Refuse its calls from now on, cancel those in flight and close its connections."""
        self.is_stopped, self.problem, self.state = True, reason or "stopped by an operator", "stopped"
        for bridged in self.pool.calls:
            bridged.state.cancel()
        await self.close()
        if self.is_stopped:  # and was not started again meanwhile
            self.state = "stopped"

    def start(self) -> None:
        """Serve its calls again after `stop`."""
        self.is_stopped, self.problem, self.state = False, "", "new"
        self.on_change()
        self.pool.restart()


def _only_reads(entry: ToolEntry) -> bool:
    """Return whether a call may be sent again whose answer was lost: the upstream is trusted, and says so."""
    claims = hints(entry.subject)
    return entry.kind != "tool" or claims.get("readOnlyHint") is True or claims.get("idempotentHint") is True


def _problem_text(problem: PeerError) -> str:
    return one_line(mask(str(problem)[:1_000]), 300)


_READERS: Mapping[str, Callable[[Object, Revision, Revision, ToolEntry], ToolResult]] = {
    "tools/call": tool_result,
    "resources/read": read_result,
    "prompts/get": prompt_result,
}
