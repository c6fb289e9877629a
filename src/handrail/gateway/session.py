"""One connection to an upstream server, and the calls that are on their way over it."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

from msgspec import UNSET, Struct
from msgspec.structs import replace

from handrail import jsonrpc
from handrail.client.connection import MAX_PAUSE_SECONDS, PAGE_COMPLETED, ClientConnection
from handrail.client.inflight import FOREVER, Clocks, Log, Progress, deadline_at
from handrail.client.mcp_config import ServerTarget
from handrail.client.server_list import ServerList
from handrail.client.tools import ListedEntries, ListedEntry, ListedTool, has_invisible_names
from handrail.engine.call import Call
from handrail.engine.call_state import CallPeer, CallState
from handrail.engine.input_requests import InputRequired
from handrail.engine.reply_channel import ReplyChannel
from handrail.errors import InvalidResult, RemoteProtocolError, SchemaError, Sent, ToolError, TransportError
from handrail.gateway.questions import (
    UPSTREAM,
    CapabilityKey,
    Parked,
    ask_caller,
    capabilities_of,
    capability_key,
    check_declared,
    encode_questions,
    form_losses,
    to_model,
)
from handrail.gateway.settings import Terms
from handrail.gateway.sign_in import KEY_PREFIX, SignIn
from handrail.jsonrpc import Id
from handrail.model import InputRequest, Json, Object
from handrail.oauth.client import OAuth
from handrail.protocol.connection import CANCELLED, Connection
from handrail.revisions import Revision
from handrail.revisions.base import CAPABILITIES, LEVELS, LOG_LEVEL
from handrail.text.controls import mask, one_line
from handrail.transports.base import ClientTransport

log = logging.getLogger("handrail")

MAX_ROUNDS = 8  # of questions to a caller that takes requests, in one call
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.25, 5.0  # before a call that the upstream asks to repeat
CONNECT_SECONDS = 30.0  # to start a command, or to connect, and for each message of the handshake
MAX_EVENTS, MAX_EVENTS_PER_SECOND = 200, 50  # of progress and log messages of one call
ASK_SECONDS = 60.0  # for the answer to a question outside of a call
STDERR_LINES, STDERR_CHARS = 5, 300  # of one process, for the errors of its calls
LIST_SECONDS = 60.0  # for all pages of one list
MAX_PAGES = 100  # to open, whose completion is awaited, of one connection; of more the newest
CALL_CLOCKS = Clocks(connect=CONNECT_SECONDS, first=FOREVER, idle=FOREVER, total=FOREVER)
"""The timeouts of a call are those of its entry: the engine cancels the call, and that cancels it here."""

_OWN_ANSWERS = ("io.handrail/", "approval-", KEY_PREFIX)  # names of answers to questions of the gateway itself

_ROOTS_OWNER = re.compile(r"(.*) #[0-9]+", re.DOTALL)


def principal_of(owner: str) -> str:
    """Return the id of the principal that owns a connection, as `SessionPool.owner` has written it."""
    match = _ROOTS_OWNER.fullmatch(owner)
    return (owner if match is None else match[1]).replace(" ##", " #")


_current: ContextVar[BridgedCall | None] = ContextVar("handrail_bridged_call", default=None)


class BridgedCall(Struct, eq=False):
    """A call on its way through an upstream: what the upstream sends about it goes to its caller."""

    state: CallState
    session: UpstreamSession
    parked: Parked | None = None  # the caller takes no requests: questions end its request
    events: int = 0
    began: float = 0.0
    ended: asyncio.Future[None] | None = None  # while a question waits for its caller

    def on_event(self, event: Progress | Log) -> None:
        """Pass on progress and log messages of the upstream."""
        state = self.state if self.parked is None else self.parked.state
        if state is None:  # the caller has no request in flight
            self.session.upstream.lose("LOSSY-26")
            return
        self.events += 1
        if self.events > MAX_EVENTS + MAX_EVENTS_PER_SECOND * (state.now() - self.began):
            self.session.upstream.lose("too many notifications")
            return
        call = Call(state)
        if isinstance(event, Progress):
            if event.message and not state.revision.progress_message and "LOSSY-32" not in state.lossy:
                self.session.upstream.lose("LOSSY-32", state)
            call.progress(event.done, event.total, event.message or None)
        elif event.level in LEVELS:
            call.log(event.level, event.data, logger=event.logger or None)

    def on_paused(self) -> None:
        """Close the caller's stream too, where the upstream closes its own to be asked for the rest later."""
        self.state.calls.close_stream(self.state)

    async def answer(self, request: InputRequest) -> Object:
        """Return the caller's answer to a question of the upstream."""
        if request.params.get("mode") == "url":
            page_id = self.session.add_page(self.state, request.params["elicitationId"])
            request = replace(request, params={**request.params, "elicitationId": page_id})
        if self.parked is not None:
            check_declared(self.state, request)
            return await self.parked.ask(request)
        return await self.session.ask(self.state, request)


class Page(Struct, frozen=True):
    """A page that a caller was asked to open. The caller hears when the upstream says that it is completed."""

    id: str  # that the caller knows: ids of several upstreams may be the same
    call_id: Id
    connection: Connection  # of the caller
    pipe: ReplyChannel | None  # of a caller that is not reached over HTTP
    revision: Revision


class SessionUpstream(Protocol):
    """The upstream of a session, as the session needs it."""

    name: str
    target: ServerTarget
    terms: Terms
    client_info: Object
    counts: Counter[str]
    sign_in: SignIn | None

    def note(self, text: str) -> None: ...
    def lose(self, case: str, state: CallState | None = None) -> None: ...
    def on_list_changed(self, session: UpstreamSession) -> None: ...
    def on_stderr(self, line: str) -> None: ...


class UpstreamSession:
    """A connection to an upstream, of one owner and one set of capabilities, or of all where it is stateless.

    To the connection it is the handler.
    """

    def __init__(self, upstream: SessionUpstream, owner: str, key: CapabilityKey) -> None:
        self.upstream = upstream
        self.owner = owner
        self.key = key
        self.capabilities = capabilities_of(key)
        self.is_started = False  # it was opened, or failed to open
        target = upstream.target.with_stderr(self._on_stderr)
        self._authorization: OAuth | None = None
        if upstream.sign_in is not None:  # a transport has the token of one caller, and no other
            self._authorization = upstream.sign_in.grants.of(principal_of(owner))
            target = target.with_auth(self._authorization)
        self.connection = ClientConnection(
            target,
            self,
            clocks=Clocks(connect=CONNECT_SECONDS, first=CONNECT_SECONDS, idle=LIST_SECONDS, total=LIST_SECONDS),
            revision=upstream.terms.revision,
            client_info=upstream.client_info,
            max_pause=min(upstream.terms.pauses[1], MAX_PAUSE_SECONDS),
        )
        self.calls: dict[BridgedCall, None] = {}
        self.last_used = self.connection.now()
        self.peer: CallPeer | None = None  # who is asked when the upstream asks outside of a call
        self._pages: dict[str, Page] = {}  # that callers were asked to open, by the ids of the upstream
        self._transport: ClientTransport | None = None  # of the last call
        self._level = "info"  # that the upstream was told; what our callers have by default
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._uses = 0  # openings and lists under way
        self._lists: dict[str, ServerList[Any, ListedEntries[Any]]] = {}

    def _on_stderr(self, line: str) -> None:
        self._stderr.append(line[:STDERR_CHARS])
        self.upstream.on_stderr(line)

    @property
    def stderr(self) -> list[str]:
        """The last lines that its own process wrote to standard error, masked and on one line each."""
        return [one_line(mask(line), STDERR_CHARS) for line in self._stderr]

    # Handler of the connection

    async def handle_request(self, method: str, params: Object, revision: Revision) -> Json:
        """Answer a question of the upstream with what the caller answers."""
        bridged = _current.get()
        try:
            request = to_model(method, params, revision)
        except RemoteProtocolError as refused:
            self.upstream.note(f"{method} refused: {refused.text}")
            raise
        answer = await self._answer_by_a_call(bridged, request, self._named_call(params))
        return _answer_of(answer) if request.method == "elicitation/create" else answer

    def _named_call(self, params: Object) -> BridgedCall | None:
        """Return the call whose progress token a question has, as servers send it that keep the `_meta` of a call."""
        meta = params.get("_meta")
        context = self.connection.context_of(meta.get("progressToken")) if type(meta) is dict else None
        return None if context is None else context.get(_current)

    async def _answer_by_a_call(
        self, bridged: BridgedCall | None, request: InputRequest, named: BridgedCall | None
    ) -> Object:
        """Return the answer of a caller: of the call that asks, of the one that is named, or of the last in flight.

        A pipe does not tell which of its owner's calls asks. If the call that was taken ends, it was another one.
        """
        is_certain, was_asked = bridged in self.calls, False
        while True:
            if not is_certain:
                bridged = named if named in self.calls else next(reversed(self.calls), None)
            if bridged is None or bridged not in self.calls:
                break
            if not (is_certain or was_asked or bridged is named or len(self.calls) == 1):
                self.upstream.lose("a question of one of several calls", bridged.state)
            was_asked = True
            bridged.ended = bridged.ended or asyncio.get_running_loop().create_future()
            answering = asyncio.ensure_future(bridged.answer(request))
            try:
                waits: set[asyncio.Future[Any]] = {answering, bridged.ended}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not answering.done():
                    answering.cancel()
            if not answering.cancelled() and answering.done():
                return answering.result()
        if was_asked:
            raise RemoteProtocolError("The call has ended", code=-32600)
        if request.method != "roots/list":
            self.upstream.lose(f"{request.method} outside of a call")
            self.upstream.note(f"{request.method} refused: no call is in flight")
            text = f"{request.method}: no call is in flight whose caller could be asked; ask while a call runs"
            raise RemoteProtocolError(text, code=-32600)
        return await self._ask_peer(request)

    async def _ask_peer(self, request: InputRequest) -> Object:
        """Ask the client that the connection belongs to for its roots, where no call is in flight.

        Servers of files ask right after the handshake. The client must have an open stream.
        """
        peer = self.peer
        revision = None if peer is None else peer.connection.revision
        channel = None if peer is None else _channel_of(peer.connection, _pipe_of(peer))
        if (
            peer is None
            or channel is None
            or revision is None
            or self.key != capability_key(revision, peer.connection.client)
        ):
            raise RemoteProtocolError("No call is in flight that could be asked", code=-32600)
        waiter: asyncio.Future[Object] = asyncio.get_running_loop().create_future()
        params = revision.encode_input(request.method, request.params)
        request_id, message = peer.connection.create_request(request.method, params, waiter)
        channel.send(message)
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return revision.decode_input(request.params, await waiter)
        except (TimeoutError, TransportError) as problem:
            raise RemoteProtocolError("The client did not answer", code=-1) from problem
        finally:
            peer.connection.pending.pop(request_id, None)

    def on_list_changed(self, capability: str = "") -> None:
        for each in self._lists.values():
            each.is_changed = each.is_changed or capability in ("", each.capability)
        if self._lists:
            self.upstream.on_list_changed(self)

    def on_log_message(self, entry: Log) -> None:
        if len(self.calls) != 1:
            self.upstream.lose("LOSSY-34" if self.calls else "log without a call")

    # Pages

    def add_page(self, state: CallState, page_id: str) -> str:
        """Note whom the upstream has asked to open a page; return the id of the page for that caller."""
        peer, own = state.peer, secrets.token_urlsafe(9)
        self._pages.pop(page_id, None)
        if len(self._pages) >= MAX_PAGES:
            del self._pages[next(iter(self._pages))]
        self._pages[page_id] = Page(own, state.id, peer.connection, _pipe_of(peer), state.revision)
        return own

    def on_page_completed(self, identifier: str) -> None:
        """Tell the caller that was asked to open a page, once, on the stream of its call or an open one."""
        page = self._pages.pop(identifier, None)
        if page is None:
            self.upstream.lose("a completed page of no question")
            return
        channel = _channel_of(page.connection, page.pipe)
        for bridged in self.calls:
            state = bridged.state
            if (state.peer.connection, state.id) == (page.connection, page.call_id) and not state.closed:
                channel = state.reply_channel if state.reply_channel.two_way else channel
        if page.revision.stateless or channel is None or channel.disconnected:
            self.upstream.lose("LOSSY-27")
        else:
            channel.send(jsonrpc.notification(PAGE_COMPLETED, {"elicitationId": page.id}))

    # Lists

    def list_of(self, method: str, entry_type: type[ListedEntry]) -> ServerList[Any, ListedEntries[Any]]:
        if method not in self._lists:
            self._lists[method] = ServerList(
                self.connection,
                method,
                partial(entry_type, server=self.upstream.name),
                lambda entries, refused: ListedEntries([*entries.values()], refused),
                member=entry_type.key_member,
                flaw=self._flaw if entry_type is ListedTool else lambda entry: "",
                on_endless=self._on_endless,
            )
        return self._lists[method]

    @property
    def is_busy(self) -> bool:
        """Whether it opens, calls or lists are on their way, or updates of resources are awaited."""
        return bool(self.calls or self._uses or self.connection.watches)

    def expire_lists(self) -> None:
        """Have each list fetched anew when it is asked for."""
        for each in self._lists.values():
            each.is_changed = True

    async def fetch(self, method: str, entry_type: type[ListedEntry]) -> ListedEntries[Any] | None:
        """Return a list of the upstream; None if it declares that it has none."""
        with self._using():
            async with deadline_at(self.last_used + LIST_SECONDS, self.connection.clocks):
                await self.connection.open()
                if not self.connection.offers(method.partition("/")[0]):
                    return None
                return await self.list_of(method, entry_type).get()

    async def open(self) -> None:
        """Connect, unless the connection is open."""
        with self._using():
            await self.connection.open()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the connection from being idle."""
        self.last_used = self.connection.now()
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            self.last_used = self.connection.now()

    def _on_endless(self, problem: InvalidResult) -> None:
        self.upstream.lose("LOSSY-16")
        self.upstream.note(f"a list does not end ({problem.text}); the first part is used")

    def cache_hint(self, method: str) -> tuple[int, bool]:
        """Return how many milliseconds the upstream lets its list be kept, and whether for one caller only."""
        listed = self._lists.get(method)
        return (0, True) if listed is None else (round(listed.fresh_seconds * 1000), listed.is_private)

    def _flaw(self, tool: ListedTool) -> str:
        if has_invisible_names(tool.input_schema):
            return "names of its arguments hold invisible characters"
        try:
            self.header_map(tool)
        except SchemaError as wrong:
            return str(wrong)
        return ""

    def header_map(self, tool: ListedTool) -> dict[str, tuple[str, ...]]:
        """Return the arguments to mirror in headers: over HTTP, in revisions that have this."""
        transport, revision = self.connection.transport, self.connection.revision
        mirrors = transport is not None and transport.disconnect_cancels and revision is not None and revision.stateless
        return tool.header_map if mirrors else {}

    # Calls

    async def request(
        self,
        bridged: BridgedCall,
        method: str,
        params: Object,
        key: CapabilityKey,
        header_map: dict[str, tuple[str, ...]],
    ) -> Object:
        """Send a call, and return its final result. Questions on the way go to the caller."""
        connection, state = self.connection, bridged.state
        self.last_used = bridged.began = connection.now()
        self.calls[bridged] = None
        try:
            revision = connection.revision
            if not connection.is_open or revision is None:  # the pool opens it: it may speak another revision then
                raise TransportError("the connection was lost", sent=Sent.NO, server=self.upstream.name)
            if connection.transport is not self._transport:
                self.upstream.counts["restarts"] += self._transport is not None
                self._transport, self._level = connection.transport, "info"
            meta = state.meta
            with_progress = meta is not UNSET and meta.progress_token is not UNSET
            envelope: Object | None = None
            if revision.stateless:
                envelope = {CAPABILITIES: revision.declare(capabilities_of(key))}
                if state.log_floor < len(LEVELS):
                    envelope[LOG_LEVEL] = LEVELS[state.log_floor]
            elif state.log_floor < len(LEVELS) and LEVELS[state.log_floor] != self._level:
                await self._set_level(LEVELS[state.log_floor])
            if meta is not UNSET and revision.typed_meta and (trace := _trace_of(meta)):
                params = {**params, "_meta": trace}
            if self.capabilities:
                _current.set(bridged)
            if revision.input_mode == "retry" and state.answers:
                params = {**params, **_retry_members(state.answers)}
            raw = await connection.request(
                method,
                params,
                CALL_CLOCKS,
                FOREVER,
                header_map=header_map,
                on_event=bridged.on_event,
                with_progress=with_progress,
                envelope=envelope,
                on_paused=bridged.on_paused,
            )
            if raw.get("resultType", "complete") == "complete" or revision.input_mode != "retry":
                return raw
            return await self._resolve(bridged, method, params, raw, envelope, header_map, with_progress)
        except asyncio.CancelledError:
            if connection.revision is not None and CANCELLED not in connection.revision.notifications:
                self.upstream.lose("LOSSY-33", state)
            raise
        finally:
            del self.calls[bridged]
            if bridged.ended is not None and not bridged.ended.done():
                bridged.ended.set_result(None)
            self.last_used = connection.now()

    async def _resolve(
        self,
        bridged: BridgedCall,
        method: str,
        params: Object,
        raw: Object,
        envelope: Object | None,
        header_map: dict[str, tuple[str, ...]],
        with_progress: bool,
    ) -> Object:
        """Return the final result of a call of a stateless upstream that wants input first."""
        connection, state, rounds, pause = self.connection, bridged.state, 0, FIRST_WAIT_SECONDS
        while raw.get("resultType", "complete") != "complete":
            upstream_state: Json = raw.get("requestState")
            requests: Json = raw.get("inputRequests") or {}
            if raw["resultType"] != "input_required" or type(requests) is not dict:
                raise InvalidResult(f"a result of the unknown type {raw['resultType']!r:.60}", result=raw)
            revision = connection.revision or state.revision
            try:
                questions = {name: _question(each, revision) for name, each in requests.items()}
            except InvalidResult:
                raise
            except RemoteProtocolError as refused:
                self.upstream.note(f"a question refused: {refused.text}")
                text = f"{self.upstream.name} asked what cannot be passed on: {refused.text}"
                raise ToolError(text) from None
            more: Object = {"requestState": upstream_state} if type(upstream_state) is str else {}
            if state.revision.input_mode == "retry":
                await self._pass_on(state, questions, more)
            if not questions and not more:
                raise InvalidResult("neither questions nor a state", result=raw)
            if questions:
                rounds += 1
                if rounds > MAX_ROUNDS:
                    self.upstream.lose("LOSSY-24", state)
                    raise ToolError(f"{self.upstream.name} keeps asking: more than {MAX_ROUNDS} rounds of questions.")
                more["inputResponses"] = {
                    name: await self._answer(bridged, question) for name, question in questions.items()
                }
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_WAIT_SECONDS)
            raw = await connection.request(
                method,
                {**params, **more},
                CALL_CLOCKS,
                FOREVER,
                header_map=header_map,
                on_event=bridged.on_event,
                with_progress=with_progress,
                envelope=envelope,
            )
        return raw

    async def ask(self, state: CallState, request: InputRequest) -> Object:
        """Send a question to a caller that takes requests, and count what its form loses."""
        for case in form_losses(request) if not state.revision.elicitation_modes else ():
            self.upstream.lose(case, state)
        return await ask_caller(state, request)

    async def _answer(self, bridged: BridgedCall, question: InputRequest) -> Object:
        try:
            answer = await self.ask(bridged.state, question)
        except RemoteProtocolError as refused:
            if question.method == "elicitation/create":
                return {"action": "cancel"}
            raise ToolError(f"The client did not answer {question.method}: {refused.text}") from None
        return _answer_of(answer) if question.method == "elicitation/create" else answer

    async def _pass_on(self, state: CallState, questions: dict[str, InputRequest], more: Object) -> None:
        """End the caller's request with the upstream's questions, and its state inside of our sealed one."""
        try:
            for each in questions.values():
                check_declared(state, each)
        except RemoteProtocolError as refused:
            raise ToolError(f"{self.upstream.name} asked although {refused.text}.") from None
        state.answered = {**state.answered, UPSTREAM: {**more, "keys": [*questions]}}
        raise InputRequired(await encode_questions(state, questions))

    async def _set_level(self, level: str) -> None:
        """Tell an upstream of a handshake revision from which level on log messages are wanted."""
        self._level = level
        if self.connection.offers("logging"):
            try:
                deadline = self.connection.now() + self.connection.clocks.connect
                await self.connection.request("logging/setLevel", {"level": level}, self.connection.clocks, deadline)
            except RemoteProtocolError as refused:
                log.debug("gateway: %s: logging/setLevel refused: %s", self.upstream.name, refused)

    async def close(self) -> None:
        await self.connection.close()
        if self._authorization is not None:
            await self._authorization.close()


def _pipe_of(peer: CallPeer) -> ReplyChannel | None:
    """Return the channel of a peer that is not reached over HTTP, where each request has its own."""
    return None if peer.trace_headers is not None else peer.reply_channel


def _channel_of(connection: Connection, pipe: ReplyChannel | None) -> ReplyChannel | None:
    """Return the stream on which a client gets what belongs to no request of its own; None if there is none."""
    streams: list[ReplyChannel] = [each.stream for each in connection.listeners[:1]]
    return next((each for each in [*streams, pipe] if each is not None and each.two_way), None)


def _question(raw: Json, revision: Revision) -> InputRequest:
    if type(raw) is not dict or type(raw.get("method")) is not str:
        raise InvalidResult("a question that is not one", result=raw)
    params = raw.get("params")
    return to_model(raw["method"], params if type(params) is dict else {}, revision)


def _answer_of(answer: Object) -> Object:
    return {name: answer[name] for name in ("action", "content") if name in answer}


def _trace_of(meta: Any) -> Object:
    names = ("traceparent", "tracestate", "baggage")
    return {name: value for name in names if type(value := getattr(meta, name)) is str}


def _retry_members(answers: Mapping[str, Any]) -> Object:
    """Return the members of a retry at a stateless upstream: its own state, and the answers that it asked for.

    Without a round before, the caller may know what the upstream will ask.
    """
    sealed = answers.get(UPSTREAM)
    if type(sealed) is not dict:
        own = {name: each for name, each in answers.items() if not name.startswith(_OWN_ANSWERS)}
        return {"inputResponses": own} if own else {}
    keys: Sequence[str] = sealed.get("keys") or ()
    responses = {name: answers[name] for name in keys if name in answers}
    more: Object = {"inputResponses": responses} if responses else {}
    return more | ({"requestState": sealed["requestState"]} if "requestState" in sealed else {})
