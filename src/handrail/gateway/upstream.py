"""One upstream server behind the gateway: its connections, its lists as entries of our catalogs, its calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

from msgspec import Struct

from handrail import __version__
from handrail.client.connection import ClientConnection
from handrail.client.mcp_config import ServerTarget
from handrail.client.prompts import ListedPrompt
from handrail.client.resources import ListedResource, ListedTemplate, ResourceSubscription
from handrail.client.tools import ListedEntries, ListedEntry, ListedTool
from handrail.engine.call import Call
from handrail.engine.call_state import CallPeer, CallState
from handrail.engine.catalog import ToolEntry
from handrail.engine.completion import RequestPeer
from handrail.engine.core import Engine
from handrail.engine.guard_set import owner_of, unknown
from handrail.engine.input_requests import InputRequired
from handrail.errors import (
    AuthorizationError,
    CallTimeout,
    HttpRefused,
    Kind,
    PeerError,
    Refused,
    RemoteProtocolError,
    SchemaError,
    Sent,
    ToolError,
    TransportError,
)
from handrail.gateway.entries import (
    failure_of,
    prompt_entry,
    prompt_result,
    read_result,
    resource_entry,
    tool_entry,
    tool_name,
    tool_result,
)
from handrail.gateway.health import CircuitBreaker
from handrail.gateway.questions import (
    NO_CAPABILITIES,
    CapabilityKey,
    Parked,
    ParkedCalls,
    capability_key,
)
from handrail.gateway.session import BridgedCall, UpstreamSession
from handrail.gateway.settings import Terms
from handrail.gateway.trust import Pins, Verdict, propose_class
from handrail.guards.tool_definitions import Change
from handrail.jsonrpc import encode_sorted
from handrail.model import InputRequest, Object, ToolResult
from handrail.revisions import Revision
from handrail.text.controls import mask, one_line

log = logging.getLogger("handrail")

METHODS: Mapping[str, type[ListedEntry]] = {
    "tools/list": ListedTool,
    "resources/list": ListedResource,
    "resources/templates/list": ListedTemplate,
    "prompts/list": ListedPrompt,
}
COALESCE_SECONDS = 0.25  # in which change notices of an upstream become one refresh
RECHECK_SECONDS = 5.0  # before a list that its upstream does not watch over is fetched again
REFRESH_WAIT_SECONDS = 0.5  # that a request for a list waits for such a refresh
RETRY_SECONDS = 5.0  # before a list that could not be had is tried again
POSITIONS = 1 << 32  # of one upstream: entries stand in the order of the configuration
STDERR_LINES, STDERR_CHARS = 50, 300
MAX_WATCHED = 1_000  # resources whose updates the gateway gets from one upstream
STDERR_LINES_IN_ERRORS = 5
_INVALID_PARAMS, _UNKNOWN_METHOD, _HEADER_MISMATCH, _VERSION, _URL_REQUIRED = -32602, -32601, -32020, -32022, -32042

State = Literal["new", "starting", "up", "down", "stopped"]


class UpstreamTool(Struct):
    """A tool as the upstream lists it, with what became of it here."""

    own_name: str
    name: str
    raw: Object
    proposal: str  # of a class; it decides nothing
    accepted: str  # the class that a person has accepted; empty for none
    state: Literal["listed", "new", "quarantined", "denied", "refused"]
    reason: str = ""  # why it is not offered
    changes: tuple[Change, ...] = ()


class View:
    """What an upstream lists for callers with one set of capabilities."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}  # of our entries, by method, in the upstream's order
        self.is_loaded = False
        self.loading: asyncio.Task[None] | None = None
        self.checked_at = float("-inf")
        self.load_began = 0.0
        self.is_stale = False
        self.has_waited = False  # a request for a list has waited for the first load, and does not again
        self.lists: Mapping[str, ListedEntries[Any] | None] = {}  # as they came last


class Upstream:
    """One upstream server. Calls of one owner with the same capabilities share a connection; stateless ones share all.

    `target` names it and makes its transports. `index` is its place in the configuration.
    """

    def __init__(self, engine: Engine, owner: Any, target: ServerTarget, terms: Terms, pins: Pins, index: int) -> None:
        self.engine = engine
        self.owner = owner  # the server it is included in
        self.target = target.with_stderr(self.on_stderr)
        self.terms = terms
        self.name = terms.name
        self.index = index
        self.client_info = {"name": "handrail-gateway", "version": __version__}
        self.sessions: dict[tuple[str, CapabilityKey], UpstreamSession] = {}
        self.views: dict[CapabilityKey, View] = {}
        self.parked = ParkedCalls()
        self.counts: Counter[str] = Counter()
        self.lossy: Counter[str] = Counter()
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self.tools: list[UpstreamTool] = []
        self.state: State = "new"
        self.problem = ""
        self.revision = ""
        self.era: Literal["", "handshake", "stateless"] = ""
        self.era_since = 0.0
        self.latency_ms = 0.0
        self._breakers: dict[str, CircuitBreaker] = {}  # by the owner of a connection; "" where all share one
        self._pins = pins
        self._entries: dict[str, dict[str, tuple[bytes, ToolEntry]]] = {method: {} for method in METHODS}
        self._views_of: dict[str, dict[str, set[CapabilityKey]]] = {method: {} for method in METHODS}
        self._hidden: dict[tuple[str, CapabilityKey], frozenset[str]] = {}
        self._stateless: UpstreamSession | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._opening = asyncio.Lock()
        self._refreshing: asyncio.TimerHandle | None = None
        self._stale_views: set[CapabilityKey] = set()
        self._counted: set[str] = set()  # revisions whose losses of definitions are counted
        self._watched: dict[str, asyncio.Task[None]] = {}
        self.is_stopped = False

    # Sessions

    def _view_key(self, key: CapabilityKey) -> CapabilityKey:
        return NO_CAPABILITIES if self.era == "stateless" else key

    def _owner(self, peer: CallPeer, key: CapabilityKey, revision: Revision) -> str:
        """Return whose connection a call uses. Upstreams keep the roots of a session, so clients with roots differ."""
        owner = owner_of(peer.principal, peer.address)
        return f"{owner} #{peer.connection.number}" if key[-1] and not revision.stateless else owner

    async def _session(self, owner: str, key: CapabilityKey, peer: CallPeer | None = None) -> UpstreamSession:
        """Return the open connection for an owner and its capabilities; open one if there is none."""
        if self._stateless is not None and self._stateless.connection.revision is not None:
            return self._stateless
        session = self.sessions.get((owner, key))
        if session is not None and session.connection.is_open:
            return session
        async with self._opening if self.era == "" else _nothing():
            session = self.sessions.get((owner, key)) or self._stateless
            if session is None:
                self._make_room()
                session = self.sessions[owner, key] = UpstreamSession(self, owner, key)
            session.peer = peer or session.peer
            await self._open(session)
        if self._view(key).is_loaded and not self._is_watched(owner, key):
            self.on_list_changed(session)  # a new connection hears of changes only after it has listed
        return self._stateless or session

    async def _open(self, session: UpstreamSession) -> None:
        if session.connection.is_open:
            return
        if self.state in ("new", "down"):
            self.state = "starting"
        try:
            await session.connection.open()
        except PeerError as problem:
            self._on_failure(problem, session.owner)
            self.state, self.problem = "down", _problem_text(problem)
            raise
        revision = session.connection.revision
        assert revision is not None
        era: Literal["handshake", "stateless"] = "stateless" if revision.stateless else "handshake"
        if (era, revision.name) != (self.era, self.revision):
            if self.era:
                log.warning("gateway: %s: speaks %s now, was %s", self.name, revision.name, self.revision)
            self.era, self.revision, self.era_since = era, revision.name, time.time()
            if not revision.stateless:
                self._stderr.clear()  # an old server complains of the probe for the newer protocol
        if revision.stateless:
            self._stateless = self._stateless or session
        elif self._stateless is session:
            self._stateless = None
        self.state, self.problem = "up", ""

    def _make_room(self) -> None:
        """Close the connection that was not used for the longest time, if there are too many."""
        if len(self.sessions) < self.terms.max_sessions:
            return
        idle = [each for each in self.sessions.values() if not each.calls]
        if not idle:
            most = self.terms.max_sessions
            raise Refused(Kind.OVERLOADED, f"{self.name}: {most} connections are in use; wait for a call to end")
        self._end(min(idle, key=lambda each: each.last_used))

    def _end(self, session: UpstreamSession) -> None:
        self.sessions.pop((session.owner, session.key), None)
        if self._stateless is session:
            self._stateless = None
        self._keep(asyncio.get_running_loop().create_task(session.close()))

    def _keep(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Calls

    async def send(self, method: str, params: Object, call: Call, tool: ListedTool | None, uri: str = "") -> ToolResult:
        """Send a call to the upstream, and return its result in the neutral form."""
        state, started = call._state, time.perf_counter()
        self.counts["calls"] += 1
        key = capability_key(state.revision, state.client)
        owner = self._owner(state.peer, key, state.revision)
        breaker = self._breaker(owner)
        self._check_open(state, breaker)
        try:
            raw, revision = await self._send(method, params, state, tool, owner, key)
            result = _READERS[method](raw, revision, state.revision, state.entry)
        except PeerError as problem:
            self.counts["errors"] += 1
            self._on_failure(problem, owner)
            self._raise_url_questions(problem, state)
            if isinstance(problem, RemoteProtocolError) and problem.code == _INVALID_PARAMS and tool is not None:
                await self._check_still_listed(tool, state)
                self.lose("LOSSY-22", state)
            is_refused = isinstance(problem, HttpRefused) and problem.status in (401, 403)
            if is_refused or isinstance(problem, AuthorizationError):
                self.lose("LOSSY-21", state)
            failure = failure_of(problem, self.name, method, uri)
            if isinstance(failure, ToolError) and self._stderr and isinstance(problem, TransportError):
                failure.data = {"stderr": self.stderr[-STDERR_LINES_IN_ERRORS:]}
            raise failure from None
        except asyncio.CancelledError:
            if state.timed_out:
                breaker.add_failure()
            else:
                breaker.release()
            raise
        breaker.add_success()
        self.latency_ms = (time.perf_counter() - started) * 1000
        state.upstream_revision = revision.name
        if revision.structured == "bare" and result.is_error:
            self.lose("LOSSY-10", state)
        if lossy := state.revision.losses(result, state.entry.wraps):
            state.lossy = (*state.lossy, *lossy)
            self.lossy.update(lossy)
            log.info("gateway: %s: %s for %s: %s", self.name, state.name, state.revision.name, ", ".join(lossy))
        return result

    async def _check_still_listed(self, tool: ListedTool, state: CallState) -> None:
        """Refuse a call as one of an unknown tool if the upstream no longer lists the tool that it refuses."""
        await self.refresh()
        if tool.own_name not in self._entries["tools/list"]:
            raise unknown("tool", state.name) from None

    def _breaker(self, owner: str) -> CircuitBreaker:
        """Return the breaker of an owner: one caller's crashes do not shut an upstream for another."""
        owner = "" if self.era == "stateless" else owner
        if owner not in self._breakers:
            if len(self._breakers) > 4 * self.terms.max_sessions:
                self._breakers.clear()
            self._breakers[owner] = CircuitBreaker(time.monotonic)
        return self._breakers[owner]

    def _check_open(self, state: CallState, breaker: CircuitBreaker) -> None:
        if self.engine.stops and (reason := self.engine.stop_reason(state.entry, state.principal)):
            raise ToolError(reason)
        if self.is_stopped:
            raise ToolError(f"{self.name} was stopped by an operator. Nothing was done.")
        if (wait := breaker.wait_seconds()) > 0:
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
        if method == "tools/call" and state.name in self.hidden("tools/list", key):
            raise unknown("tool", state.name)
        if (parked := self.parked.resume(owner, state)) is not None:
            return await self.parked.run(parked), parked.revision
        session = await self._session(owner, key, state.peer)
        revision = session.connection.revision
        assert revision is not None
        header_map = {} if tool is None else session.header_map(tool)
        try:
            if revision.stateless or state.revision.input_mode == "request" or not session.capabilities:
                raw = await session.request(BridgedCall(state, session), method, params, key, header_map)
            else:

                def work(parked: Parked) -> Any:
                    return session.request(BridgedCall(state, session, parked), method, params, key, header_map)

                raw = await self.parked.run(Parked(owner, state, work, revision))
        except TransportError as problem:
            if repeats and problem.sent is Sent.NO and not isinstance(problem, HttpRefused):
                return await self._send(method, params, state, tool, owner, key, repeats=False)
            raise
        except RemoteProtocolError as problem:
            if repeats and problem.code == _HEADER_MISMATCH:
                await self.refresh()
                return await self._send(method, params, state, tool, owner, key, repeats=False)
            if problem.code == _VERSION:  # it speaks another revision than before
                self._end(session)
                if repeats:
                    return await self._send(method, params, state, tool, owner, key, repeats=False)
                text = "it refuses the revision that it has offered"
                raise TransportError(text, sent=Sent.NO, server=self.name) from None
            raise
        return raw, session.connection.revision or revision

    def _on_failure(self, problem: PeerError, owner: str) -> None:
        """Count a failure of the upstream itself; errors that it answers with are none."""
        is_answer = isinstance(problem, HttpRefused) and 400 <= problem.status < 500
        if isinstance(problem, TransportError | CallTimeout) and not is_answer:
            self._breaker(owner).add_failure()
            self.problem = _problem_text(problem)
            if self.state in ("up", "starting"):
                self.state = "down"
                log.warning("gateway: %s: down: %s", self.name, self.problem)
        else:
            self._breaker(owner).add_success()

    def _raise_url_questions(self, problem: PeerError, state: CallState) -> None:
        """Pass on the pages that a call needs first (-32042) to callers that can open them."""
        if not isinstance(problem, RemoteProtocolError) or problem.code != _URL_REQUIRED:
            return
        pages = problem.data.get("elicitations") if type(problem.data) is dict else None
        accepts = state.revision.elicitation_modes and state.accepts("elicitation/create", "elicitation.url")
        if not accepts or type(pages) is not list:
            self.lose("LOSSY-20", state)
            return
        if state.revision.input_mode == "request":
            raise Refused(Kind.NEEDS_URL, problem.text, problem.data, code=_URL_REQUIRED) from None
        questions = {}
        for number, page in enumerate(pages[:10], 1):
            if type(page) is dict and type(page.get("url")) is str and type(page.get("message")) is str:
                members = {"mode": "url", "message": page["message"], "url": page["url"]}
                questions[f"url{number}"] = InputRequest("elicitation/create", members)
        if questions and not questions.keys() <= state.answers.keys():
            raise InputRequired(questions)

    async def complete(
        self, reference: Object, argument: str, value: str, context: Mapping[str, str], peer: RequestPeer
    ) -> list[str]:
        """Return the values that the upstream knows for an argument."""
        owner = owner_of(peer.principal, peer.address)
        keys = (key for other, key in self.sessions if other == owner)
        session = await self._session(owner, next(keys, NO_CAPABILITIES))
        if not session.connection.offers("completions") and self.revision not in _WITHOUT_COMPLETIONS_CAPABILITY:
            return []
        params: Object = {"ref": reference, "argument": {"name": argument, "value": value}}
        if context:
            params["context"] = {"arguments": dict(context)}
        deadline = session.connection.now() + 10.0
        try:
            raw = await session.connection.request("completion/complete", params, session.connection.clocks, deadline)
        except PeerError as problem:
            log.debug("gateway: %s: completion: %s", self.name, problem)
            return []
        completion = raw.get("completion")
        values = completion.get("values") if type(completion) is dict else None
        return [each for each in values if type(each) is str] if type(values) is list else []

    # Lists

    @property
    def is_missing(self) -> bool:
        """Whether its lists have never been had."""
        return not any(view.is_loaded for view in self.views.values())

    def prepare(self, peer: CallPeer, key: CapabilityKey, revision: Revision) -> asyncio.Task[None] | None:
        """Have the lists ready for a set of capabilities; return the task to wait for, if there is one."""
        view, owner = self._view(key), self._owner(peer, key, revision)
        now = time.monotonic()
        if view.loading is None and not self.is_stopped:
            is_due = now - view.checked_at > (RETRY_SECONDS if not view.is_loaded else RECHECK_SECONDS)
            is_first = not view.is_loaded and view.checked_at == float("-inf")
            if is_first or view.is_stale or (is_due and not (view.is_loaded and self._is_watched(owner, key))):
                self._load(view, owner, key, peer)
        return view.loading

    def wait_seconds(self, key: CapabilityKey) -> float:
        """Return how long a request for a list waits for this upstream."""
        view = self._view(key)
        if not view.is_loaded:
            return 0.0 if view.has_waited else self.terms.list_seconds
        return max(0.0, view.load_began + REFRESH_WAIT_SECONDS - time.monotonic())

    def mark_waited(self, key: CapabilityKey) -> None:
        """Let no other request for a list wait for the first load."""
        view = self._view(key)
        if not view.is_loaded and not view.has_waited:
            self.lose("LOSSY-23")
            log.warning("gateway: %s: a list went without it: it has not answered yet", self.name)
        view.has_waited = True

    def count_losses(self, method: str, revision: Revision) -> None:
        """Count, once for each change of the list, what its definitions lose in a revision."""
        if method != "tools/list" or revision.name in self._counted:
            return
        self._counted.add(revision.name)
        for _, entry in self._entries[method].values():
            self.lossy.update(revision.definition_losses(entry.tool))

    def _view(self, key: CapabilityKey) -> View:
        key = self._view_key(key)
        return self.views.get(key) or self.views.setdefault(key, View())

    def _is_watched(self, owner: str, key: CapabilityKey) -> bool:
        """Return whether the upstream announces changes of its lists on an open stream."""
        for session in (self._stateless, self.sessions.get((owner, key)), *self.sessions.values()):
            if session is not None and session.connection.is_open:
                connection = session.connection
                if connection.revision is not None and connection.revision.stateless:
                    return connection.subscription.is_running
                offers, transport = connection.subscription.is_offered("tools"), connection.transport
                return offers and transport is not None and transport.notification_stream != 0
        return False

    def _load(self, view: View, owner: str, key: CapabilityKey, peer: CallPeer | None = None) -> None:
        view.load_began = time.monotonic()
        view.loading = asyncio.get_running_loop().create_task(self._load_view(view, owner, key, peer))
        self._keep(view.loading)

    async def _load_view(self, view: View, owner: str, key: CapabilityKey, peer: CallPeer | None) -> None:
        view.is_stale = False
        try:
            session = await self._session(owner, key, peer)
            own = self._view(key)  # another one, if the upstream turned out to be stateless
            lists: dict[str, ListedEntries[Any] | None] = {}
            for method, entry_type in METHODS.items():
                try:
                    lists[method] = await session.fetch(method, entry_type)
                except RemoteProtocolError as refused:
                    if refused.code != _UNKNOWN_METHOD:
                        raise
                    lists[method] = None
            self._apply(self._view_key(key), own, lists)
            view.is_loaded = own.is_loaded = True
            self._breaker(owner).add_success()
        except (PeerError, Refused) as problem:
            if isinstance(problem, PeerError):
                self._on_failure(problem, owner)
                self.problem = _problem_text(problem)
            view.has_waited = True
            log.warning("gateway: %s: not listed: %s", self.name, problem)
            self.lose("LOSSY-23")
        except Exception:
            log.exception("gateway: %s: its lists could not be used", self.name)
        finally:
            view.checked_at = time.monotonic()
            view.loading = None

    def _apply(
        self,
        key: CapabilityKey,
        view: View,
        lists: Mapping[str, ListedEntries[Any] | None],
    ) -> None:
        """Make the catalogs show what the upstream lists now."""
        view.lists = lists
        for method, listed in lists.items():
            entries = [] if listed is None else [*listed]
            if method == "tools/list":
                specified = self._tool_entries(entries, {} if listed is None else listed.refused)
            else:
                specified = self._other_entries(method, entries)
            self._exchange(method, key, view, specified)
        self._hidden.clear()
        self._counted.clear()

    def _tool_entries(
        self, listed: list[ListedTool], refused: Mapping[str, str]
    ) -> dict[str, tuple[bytes, Callable[[], ToolEntry]]]:
        offered = [each for each in listed if self.terms.is_offered(each.own_name)]
        verdicts = self._pins.judge({each.own_name: each.raw for each in offered}, self.revision)
        tools: list[UpstreamTool] = []
        specified: dict[str, tuple[bytes, Callable[[], ToolEntry]]] = {}
        for each in listed:
            own_name = each.own_name
            name = tool_name(self.terms, own_name)
            verdict = verdicts.get(own_name, Verdict("listed"))
            tool = UpstreamTool(
                own_name, name, each.raw, propose_class(each.raw), verdict.accepted, verdict.state, verdict.withheld
            )
            tool.changes = verdict.changes
            tools.append(tool)
            if own_name not in verdicts:
                tool.state, tool.reason = "denied", "the configuration does not offer it"
                continue
            send = partial(self._call_tool, each)
            make = partial(tool_entry, each, name, self.terms, verdict, self.owner, send)
            stamp = encode_sorted([each.raw, verdict.accepted, verdict.withheld])
            specified[own_name] = stamp, partial(self._checked, make, tool)
        tools += [
            UpstreamTool(name, tool_name(self.terms, name), {}, "destroys", "", "refused", reason)
            for name, reason in refused.items()
        ]
        self.tools = tools
        return specified

    def _checked(self, make: Callable[[], ToolEntry], tool: UpstreamTool) -> ToolEntry:
        try:
            return make()
        except SchemaError as problem:
            tool.state, tool.reason = "refused", str(problem)
            raise

    def _other_entries(
        self, method: str, listed: list[ListedEntry]
    ) -> dict[str, tuple[bytes, Callable[[], ToolEntry]]]:
        specified: dict[str, tuple[bytes, Callable[[], ToolEntry]]] = {}
        for each in listed:
            is_prompt = method == "prompts/list"
            reference: Object = {"type": "ref/prompt", "name": each.own_name}
            if not is_prompt:
                reference = {"type": "ref/resource", "uri": each.own_name}
            complete = partial(self.complete, reference)
            make: Callable[[], ToolEntry]
            if is_prompt:
                make = partial(prompt_entry, each, self.terms, self.owner, partial(self._get_prompt, each), complete)
            else:
                make = partial(resource_entry, each, self.terms, self.owner, self._read, complete)
            specified[each.own_name] = encode_sorted(each.raw), make
        return specified

    def _exchange(
        self,
        method: str,
        key: CapabilityKey,
        view: View,
        specified: Mapping[str, tuple[bytes, Callable[[], ToolEntry]]],
    ) -> None:
        """Add and remove the entries of one list; those that other views still show stay."""
        entries, views = self._entries[method], self._views_of[method]
        gone: list[ToolEntry] = []
        added: list[ToolEntry] = []
        for place, (own_name, (stamp, make)) in enumerate(specified.items()):
            current = entries.get(own_name)
            if current is None or current[0] != stamp:
                try:
                    entry = make()
                except (SchemaError, ValueError, TypeError) as problem:  # one bad definition does not hide the others
                    log.warning("gateway: %s: %.100s left out: %s", self.name, own_name, problem)
                    if current is not None:
                        gone.append(current[1])
                        del entries[own_name]
                    continue
                if current is not None:
                    gone.append(current[1])
                entry.position = (self.index + 1) * POSITIONS + place
                entries[own_name] = stamp, entry
                added.append(entry)
            views.setdefault(own_name, set()).add(key)
        for own_name in [each for each in views if each not in specified]:
            views[own_name].discard(key)
            if not views[own_name]:
                del views[own_name]
                if (current := entries.pop(own_name, None)) is not None:
                    gone.append(current[1])
        if gone or added:
            self._add(method, gone, added)
        view.names[method] = [entries[name][1].name for name in specified if name in entries]

    def _add(self, method: str, gone: list[ToolEntry], added: list[ToolEntry]) -> None:
        """Exchange entries. A name that is taken goes to what stands first in the configuration, not to the first."""
        catalog = self.engine.catalogs[method]
        by_name = {each.name: each for each in catalog.entries if each not in gone}
        for entry in added:
            other = by_name.get(entry.name)
            if other is None:
                continue
            if self.terms.collide == "suffix" and entry.kind != "resource":
                number = next(n for n in range(2, 10_000) if f"{entry.name}_{n}" not in by_name)
                entry.rename(f"{entry.name}_{number}")
            elif other.upstream and other.position > entry.position:
                gone.append(other)
        for problem in catalog.exchange(gone, added, in_place=True):
            log.warning("gateway: %s: %s", self.name, problem)
            self.problem = problem

    def hidden(self, method: str, key: CapabilityKey) -> frozenset[str]:
        """Return the names of our entries that the upstream does not show to callers with these capabilities."""
        key = self._view_key(key)
        hidden = self._hidden.get((method, key))
        if hidden is None:
            view = self.views.get(key)
            visible = None if view is None or not view.is_loaded else set(view.names.get(method, ()))
            names = [entry.name for _, entry in self._entries[method].values()]
            hidden = frozenset() if visible is None else frozenset(each for each in names if each not in visible)
            if visible is not None:
                self._hidden[method, key] = hidden
        return hidden

    def cache_hint(self, method: str) -> tuple[int, bool]:
        """Return how many milliseconds the list may be kept, and whether it is for one caller only."""
        session = self._stateless
        if session is None or not session.connection.is_open:
            return 0, True  # an older server says nothing of it
        return session.cache_hint(method)

    def on_list_changed(self, session: UpstreamSession) -> None:
        """Refresh the lists soon; several notices become one refresh."""
        self._stale_views.add(self._view_key(session.key))
        self._view(session.key).is_stale = True
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().call_later(COALESCE_SECONDS, self._refresh_stale, session)

    def _refresh_stale(self, session: UpstreamSession) -> None:
        self._refreshing = None
        stale, self._stale_views = self._stale_views, set()
        for key in stale:
            view = self._view(key)
            if view.loading is not None:
                self._stale_views.add(key)
                self._refreshing = asyncio.get_running_loop().call_later(COALESCE_SECONDS, self._refresh_stale, session)
            elif view.is_loaded and not self.is_stopped:
                owner = next((owner for owner, other in self.sessions if other == key), session.owner)
                self._load(view, owner, key)

    def accept(self, classes: Mapping[str, str]) -> None:
        """Pin these tools, by their own names, as they are listed now, with the classes a person has accepted."""
        definitions = {each.own_name: each.raw for each in self.tools if each.own_name in classes and each.raw}
        self._pins.accept(definitions, {name: classes[name] for name in definitions}, self.revision)
        self.judge_again()

    def judge_again(self) -> None:
        """Apply what a person has accepted, or no longer accepts, to the lists as they came last."""
        for key, view in self.views.items():
            if view.is_loaded:
                self._apply(key, view, view.lists)

    async def load(self, key: CapabilityKey) -> None:
        """Fetch the lists for a set of capabilities, and wait for them as long as a first list may."""
        view = self._view(key)
        if view.loading is None:
            self._load(view, "local", key)
        assert view.loading is not None
        await asyncio.wait({view.loading}, timeout=self.terms.list_seconds)

    async def refresh(self) -> None:
        """Fetch the lists again for all capabilities that callers have had, and wait for them."""
        for key, view in [*self.views.items()] or [(NO_CAPABILITIES, self._view(NO_CAPABILITIES))]:
            if view.loading is None:
                owner = next((owner for owner, other in self.sessions if other == key), "")
                for session in self.sessions.values():
                    for each in session._lists.values():
                        each.is_changed = True
                self._load(view, owner, key)
            if view.loading is not None:
                await asyncio.wait({view.loading})

    # What entries call

    def _call_tool(self, listed: ListedTool, arguments: Object, call: Call) -> Any:
        return self.send("tools/call", {"name": listed.own_name, "arguments": arguments}, call, listed)

    def _get_prompt(self, listed: ListedEntry, arguments: Object, call: Call) -> Any:
        return self.send("prompts/get", {"name": listed.own_name, "arguments": arguments}, call, None)

    def _read(self, arguments: Object, call: Call) -> Any:
        entry = call._state.entry
        uri = entry.requested_uri or entry.listing.uri  # type: ignore[attr-defined]
        return self.send("resources/read", {"uri": uri}, call, None, uri)

    # Updates of resources

    def watch(self, entry: ToolEntry, owner: str) -> None:
        """Subscribe to a resource at the upstream, once, while the gateway serves."""
        uri = entry.requested_uri or entry.name
        if uri not in self._watched and len(self._watched) < MAX_WATCHED:
            task = asyncio.get_running_loop().create_task(self._watch(uri, owner))
            self._watched[uri] = task
            self._keep(task)
            task.add_done_callback(lambda _: self._watched.pop(uri, None))

    async def _watch(self, uri: str, owner: str) -> None:
        try:
            session = await self._session(owner, NO_CAPABILITIES)
            async with ResourceSubscription(uri, partial(_subscriber, session)) as updates:
                async for updated in updates:
                    self.engine.resource_updated(updated)
        except PeerError as problem:
            log.warning("gateway: %s: updates of %.200s are not announced: %s", self.name, uri, problem)

    # Lifecycle

    def end_idle_sessions(self, now: float) -> None:
        """End the connections that were not used for long; `now` is a time of the event loop."""
        for session in list(self.sessions.values()):
            is_idle = not session.calls and not self._watched and session is not self._stateless
            if is_idle and now - session.last_used > self.terms.idle_seconds:
                self._end(session)

    def withdraw(self) -> None:
        """Take its entries out of the catalogs."""
        for method, entries in self._entries.items():
            self.engine.catalogs[method].exchange([entry for _, entry in entries.values()], ())
            entries.clear()
        self._hidden.clear()
        self.views.clear()

    async def close(self) -> None:
        """Close all connections. The next call opens new ones."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            self._refreshing = None
        self.parked.close()
        for task in [*self._watched.values(), *(each.loading for each in self.views.values() if each.loading)]:
            task.cancel()
        sessions, self.sessions, self._stateless = [*self.sessions.values()], {}, None
        await asyncio.gather(*(each.close() for each in sessions), return_exceptions=True)
        if tasks := [each for each in self._tasks if each is not asyncio.current_task()]:
            await asyncio.wait(tasks, timeout=1.0)
        self.state, self._opening = "new", asyncio.Lock()
        for view in self.views.values():
            view.is_stale = True

    async def stop(self, reason: str = "") -> None:
        """Refuse its calls from now on, cancel those in flight and close its connections."""
        self.is_stopped, self.problem, self.state = True, reason or "stopped by an operator", "stopped"
        for session in self.sessions.values():
            for bridged in list(session.calls):
                bridged.state.cancel()
        await self.close()
        if self.is_stopped:  # and was not started again meanwhile
            self.state = "stopped"

    def start(self) -> None:
        """Serve its calls again after `stop`."""
        self.is_stopped, self.problem, self.state = False, "", "new"
        self._breakers.clear()

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
        log.info("gateway: %s: %s", self.name, case)

    def on_stderr(self, line: str) -> None:
        self._stderr.append(line[:STDERR_CHARS])

    @property
    def stderr(self) -> list[str]:
        """The last lines of its standard error, masked and on one line each."""
        return [one_line(mask(line), STDERR_CHARS) for line in self._stderr]


class _Subscriber(Struct):
    """An upstream's session, as a subscription uses it."""

    connection: ClientConnection

    async def request(self, *_: Any, send: Callable[[object], Awaitable[Object]]) -> Object:
        return await send(None)


async def _subscriber(session: UpstreamSession) -> Any:
    return _Subscriber(session.connection)


def _problem_text(problem: PeerError) -> str:
    return one_line(mask(str(problem)[:1_000]), 300)


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


_READERS: Mapping[str, Callable[[Object, Revision, Revision, ToolEntry], ToolResult]] = {
    "tools/call": tool_result,
    "resources/read": read_result,
    "prompts/get": prompt_result,
}
_WITHOUT_COMPLETIONS_CAPABILITY = frozenset({"2024-10-07", "2024-11-05"})
