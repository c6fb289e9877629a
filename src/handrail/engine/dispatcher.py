"""One conversation with one peer: takes its messages, of any revision, and has them answered.

Most messages have their reply when the method returns. A later reply goes to a callback, or over the reply channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from time import perf_counter_ns
from typing import Any, Literal, NoReturn

from msgspec import UNSET, Struct, UnsetType

from handrail import jsonrpc
from handrail.engine.call_state import CallState
from handrail.engine.catalog import Catalog, ToolEntry
from handrail.engine.completion import find_values, known_arguments
from handrail.engine.core import KINDS, LIST_CHANGED, Engine
from handrail.engine.guard_set import needs_scopes, unknown
from handrail.engine.http_sessions import MAX_CALLER_CHARS, MAX_SUBSCRIBED_CHARS, MAX_SUBSCRIPTIONS, count_chars
from handrail.engine.inflight import InFlightCalls, state_purpose
from handrail.engine.outcome import RefusedCall, refusal_record
from handrail.engine.reply_channel import NO_REPLY, Reply, ReplyCallback, ReplyChannel
from handrail.engine.resources import ResourceEntry, unknown_resource
from handrail.errors import Kind, Refused, RemoteProtocolError, TransportError
from handrail.guards.policy import SubjectKind
from handrail.jsonrpc import Id, InvalidMessage, Message, Notification, Request, Response, decode
from handrail.model import ClientInfo, Json, Object, Principal
from handrail.protocol.connection import CANCELLED, Connection, names_version
from handrail.protocol.http_rules import NAME_PARAMS, Headers, check_param_headers
from handrail.revisions import Revision
from handrail.revisions.base import LEVELS, LISTS, SUBSCRIPTION
from handrail.stores import StoreError
from handrail.suggest import closest

log = logging.getLogger("handrail")

UPDATED = "notifications/resources/updated"
MAX_BATCH = 256
CURSOR_SECONDS = 24 * 3600
CLEANUP_SECONDS = 0.3  # at the end, for tools that were cancelled
OWN_KEYS = "io.handrail/"  # begin the names of answers that only a sealed state may hold
ENTRY_METHODS = {kind: method for method, kind in KINDS.items()}
_LIST_OF = {"tool": "tools/list", "resource": "resources/list", "prompt": "prompts/list"}


class Subscription(Struct):
    """A `subscriptions/listen` request that is still open."""

    id: Id
    revision: Revision
    methods: frozenset[str]  # of the notifications
    uris: Mapping[str, str]  # canonical URIs of resources, and how the client wrote them
    reply: ReplyCallback


class AsyncRequest(Struct):
    """A request in flight that is answered in a task and is no call."""

    id: Id
    revision: Revision
    reply: ReplyCallback
    task: asyncio.Task[None]


class Dispatcher:
    """One peer: takes its messages, and has each answered by the handler of its method."""

    address = ""  # an IP address, `unix`, `stdio` or `memory`
    is_identified = False  # the transport has verified who the peer is
    trace_headers: Headers | None = None  # over HTTP, the headers that name a trace
    raw_message: bytes | bytearray = b""  # the message that is handled now, as it came
    _request: Request  # that is handled now
    _request_tasks: set[asyncio.Task[None]] | None = None  # of requests other than calls that are answered later
    headers: Headers | None = None  # over HTTP, what the arguments are mirrored in
    reached_at: tuple[str, str] | None = None  # over HTTP, the scheme and the root path of the request
    path = ""  # over HTTP, of the endpoint
    _unannounced: dict[tuple[str, str], None] | None = None  # method and URI; of a watched stream
    _announcement_pending = False
    max_subscribed_chars = MAX_SUBSCRIBED_CHARS  # less if the caller's other sessions have subscribed to much
    find_subscription: Callable[[str], Awaitable[str]] | None = None  # of a session, whose subscriptions are in a store

    def __init__(
        self, engine: Engine, reply_channel: ReplyChannel, principal: Principal, connection: Connection | None = None
    ) -> None:
        self.engine = engine
        self.calls = InFlightCalls.of(engine)
        self.reply_channel = reply_channel
        self.principal = principal
        self.connection = connection or Connection(engine.offer, engine.hidden)

    def unwatch(self) -> None:
        self.engine.open_streams.discard(self)

    def watch(self) -> None:
        """Notify the peer when a list, or a resource that it has subscribed to, changes."""
        self._unannounced = {} if self._unannounced is None else self._unannounced
        self.engine.open_streams.add(self)

    def receive(self, data: bytes | bytearray) -> bytes:
        """Handle one message as it came. Return the response; empty if there is none, or if it is sent later."""
        self.raw_message = data
        reply = self.handle(decode(data), self._send_reply)
        return b"" if reply is None else reply.body

    def receive_and_reply(self, data: bytes) -> None:
        """Handle one message as it came; the response goes out over the reply channel."""
        response = self.receive(data)
        if response:
            self.reply_channel.send(response)

    def handle(self, message: Message | list[Json], respond: ReplyCallback) -> Reply | None:
        """Return the reply to a message, or None if `respond` gets it later. Never raises (P-01)."""
        try:
            if type(message) is Request:
                reply = self.respond(message, respond)
                if self.engine.on_request is not None and message.method not in NAME_PARAMS:
                    self.engine.on_request(self, message)
                return reply
            if type(message) is Notification:
                self._on_notification(message)
            elif type(message) is Response:
                self._on_response(message)
            elif isinstance(message, InvalidMessage):
                return self._unreadable(message)
            elif isinstance(message, list):
                return self._batch(message, respond)
        except Exception:
            log.exception("a message could not be handled")
            return self._unreadable(InvalidMessage(Kind.INTERNAL, "Internal error"))
        return NO_REPLY

    def refuse(self, kind: Kind, text: str) -> Reply:
        """Return the reply to bytes that are no message."""
        return self._unreadable(InvalidMessage(kind, text))

    # What arrives

    def respond(self, request: Request, respond: ReplyCallback) -> Reply | None:
        connection, started_ns = self.connection, perf_counter_ns()
        self._request = request
        try:
            revision = connection.revision_of(request)
        except Refused as refused:
            voice = connection.fallback_revision_for(request)
            return self._refuse(request, voice, refused, started_ns)
        try:
            if request.id in connection.in_flight:
                raise Refused(Kind.INVALID_REQUEST, f"The id {request.id!r} is in use by a request still in flight")
            if request.method != "tools/call" and request.method not in NAME_PARAMS:
                is_list = request.method in METHODS and METHODS[request.method].counts_as == "list"
                waits = self.engine.guard_set.charge_request(self.principal, self.address, is_list=is_list)
                if waits is not None:
                    work = self._list_when_charged(request, revision, waits, respond)
                    self.answer_later(request.id, revision, request.method, respond, work)
                    return None
            params = connection.parse_params(request, revision)
            return METHODS[request.method].handler(self, request.id, revision, params, respond)
        except Refused as refused:
            return self._refuse(request, revision, refused, started_ns)
        except Exception:
            log.exception("%s failed", request.method)
            return self._refuse(request, revision, Refused(Kind.INTERNAL, "Internal error"), started_ns)

    def _refuse(self, request: Request, revision: Revision, refused: Refused, started_ns: int) -> Reply:
        reply = self.engine.encode_refusal(revision, request.id, refused, method=request.method)
        self.record_refusal(request, revision, refused, reply.body, started_ns)
        return reply

    async def _list_when_charged(
        self, request: Request, revision: Revision, waits: Awaitable[Any], respond: ReplyCallback
    ) -> Reply | None:
        from handrail.guards.limits import await_charge

        await await_charge(waits)
        self._request = request
        params = self.connection.parse_params(request, revision)
        return METHODS[request.method].handler(self, request.id, revision, params, respond)

    def answer_later(
        self,
        request_id: Id,
        revision: Revision,
        method: str,
        respond: ReplyCallback,
        work: Coroutine[Any, Any, Reply | None],
    ) -> None:
        """Answer a request that is no call in a task. The peer can cancel it as it can cancel a call."""

        async def answer() -> None:
            try:
                reply = await work
            except Refused as refused:
                reply = self.engine.encode_refusal(revision, request_id, refused, method=method)
            except Exception:
                log.exception("%s failed", method)
                reply = self.engine.encode_refusal(revision, request_id, Refused(Kind.INTERNAL, "Internal error"))
            finally:
                self.connection.in_flight.pop(request_id, None)
            if reply is not None:
                respond(reply)

        task = self._keep(self.calls.loop.create_task(answer()))
        self.connection.in_flight[request_id] = AsyncRequest(request_id, revision, respond, task)

    def handle_when_ready(
        self,
        ready: Awaitable[None],
        method: str,
        request_id: Id,
        revision: Revision,
        params: Any,
        respond: ReplyCallback,
    ) -> None:
        """Handle a request again when upstream servers are ready for it."""
        request, message = self._request, self.raw_message

        def handle() -> None:
            self.raw_message = message  # others came meanwhile
            try:
                reply = METHODS[method].handler(self, request_id, revision, params, respond, is_ready=True)
            except Refused as refused:
                reply = self._refuse(request, revision, refused, perf_counter_ns())
            except Exception:
                log.exception("%s failed", method)
                reply = self._refuse(request, revision, Refused(Kind.INTERNAL, "Internal error"), perf_counter_ns())
            if reply is not None:
                respond(reply)

        async def wait() -> None:
            await ready
            self.calls.loop.call_soon(handle)  # a call starts its own task, which is only possible outside of this one

        self.answer_later(request_id, revision, method, respond, wait())

    def client_of(self, revision: Revision, params: Any) -> ClientInfo:
        return self.connection.client if revision.sender is None else revision.sender(params)

    def record_refusal(
        self,
        request: Request,
        revision: Revision,
        refused: Refused,
        answer: bytes | None = None,
        started_ns: int | None = None,
    ) -> None:
        """Record a request for a call that was refused before it became one. `started_ns`: now, if it is not given."""
        engine, guards = self.engine, self.engine.guard_set
        if request.method not in NAME_PARAMS or not (engine.sinks or guards.trail is not None):
            return
        name = request.params.get(NAME_PARAMS[request.method])
        refusal = RefusedCall(
            origin=self,
            request=request,
            revision=revision,
            refused=refused,
            entry=engine.find(KINDS[request.method], name)[0] if type(name) is str else None,
            answer=answer,
            started_ns=perf_counter_ns() if started_ns is None else started_ns,
        )
        for sink in engine.sinks:
            try:
                sink.on_refusal(refusal)
            except Exception:
                log.exception("calls: a refused request was not observed")
        if guards.trail is not None:
            refusal.call_id = refusal.call_id or guards.next_serial()
            guards.trail.submit(refusal_record(refusal, guards.name, guards.secrets))

    def _on_notification(self, message: Notification) -> None:
        if message.method == CANCELLED:
            request_id = message.params.get("requestId")
            request = (
                self.connection.in_flight.get(request_id)
                if type(request_id) is int or type(request_id) is str
                else None
            )
            # The revision of the request says whether it can be cancelled.
            if request is not None and CANCELLED in request.revision.notifications:
                self._cancel_without_reply(request)
        elif message.method == "notifications/initialized":
            self.connection.ready = self.connection.revision is not None

    def _on_response(self, message: Response) -> None:
        waiter = self.connection.pending.pop(message.id, None)
        if waiter is None or waiter.done():
            return
        if message.error is not UNSET:
            error = message.error if type(message.error) is dict else {}
            code, text = error.get("code"), error.get("message", "no reason given")
            waiter.set_exception(RemoteProtocolError(str(text), code=code if type(code) is int else 0))
        elif type(message.result) is dict:
            waiter.set_result(message.result)
        else:
            waiter.set_exception(RemoteProtocolError("the answer is not an object"))

    def _batch(self, items: list[Json], respond: ReplyCallback) -> Reply | None:
        voice = self.connection.fallback_revision
        if not voice.batches:
            return self.refuse(Kind.INVALID_REQUEST, f"{voice.name} has no batches: send one message at a time")
        if not 1 <= len(items) <= MAX_BATCH:
            return self.refuse(Kind.INVALID_REQUEST, f"A batch of {len(items)}: 1 to {MAX_BATCH} messages are allowed")
        batch = _Batch(self.reply_channel.send, respond, self.engine.limits.max_message_bytes, len(items))
        for item in items:
            message = jsonrpc.read(item)
            if type(message) is Request and (message.method == "initialize" or names_version(message)):
                refused = Refused(Kind.INVALID_REQUEST, f"{message.method}: not inside a batch")
                batch.add(self.engine.encode_refusal(voice, message.id, refused))
                continue
            reply = self.handle(message, batch.add)
            if reply is not None:
                batch.add(reply)
        return None

    def _unreadable(self, refusal: InvalidMessage) -> Reply:
        return self.engine.encode_refusal(
            self.connection.fallback_revision, refusal.id, Refused(refusal.kind, refusal.text)
        )

    # Change notices

    def list_changed(self, method: str) -> None:
        self._announce_later(method, "")

    def resource_updated(self, entry: ToolEntry) -> None:
        connection, revision = self.connection, self.connection.revision or self.engine.offer.newest
        is_wanted = (
            self.find_subscription is not None
            or entry.name in connection.subscriptions
            or any(entry.name in each.uris for each in self.subscriptions())
        )
        if is_wanted and self.is_visible(entry, revision):
            self._announce_later(UPDATED, entry.name)

    def subscriptions(self) -> list[Subscription]:
        return [each for each in list(self.connection.in_flight.values()) if isinstance(each, Subscription)]

    async def find_own_subscription(self, uri: str) -> str:
        """Return a canonical URI as the peer wrote it; empty if it is not subscribed to that, or has gone."""
        own = [self.connection.subscriptions, *(each.uris for each in self.subscriptions())]
        return next((each[uri] for each in own if uri in each), "") if self in self.engine.open_streams else ""

    @property
    def subscribed_count(self) -> int:
        return sum(len(each.uris) for each in self.subscriptions())

    def is_visible(self, entry: ToolEntry, revision: Revision) -> bool:
        is_in_scope = entry.is_visible_to(self.principal.scopes)
        return is_in_scope and not self.engine.guard_set.hides(entry, self.principal, revision)

    def _announce_later(self, method: str, uri: str) -> None:
        """Notify the peer, from any thread. Changes in one turn of the loop are announced together."""
        assert self._unannounced is not None
        self._unannounced[method, uri] = None
        if not self._announcement_pending:
            self._announcement_pending = True
            with contextlib.suppress(RuntimeError):  # the loop has closed, and the connection with it
                self.calls.loop.call_soon_threadsafe(self._start_announcing)

    def _start_announcing(self) -> None:
        self._keep(self.calls.start_task(self._announce(), None))

    async def _announce(self) -> None:
        """Send the notifications that are due. While the peer does not read, later ones wait, each of them once."""
        unannounced = self._unannounced or {}
        try:
            while unannounced:
                for method, uri in list(unannounced):
                    del unannounced[method, uri]
                    await self._notify(method, uri)
                await self.reply_channel.drain()
        except StoreError as problem:
            log.warning("subscriptions: an update was not announced: %s", problem)
        finally:
            self._announcement_pending = False
        for method, uri in list(unannounced)[:1]:  # came since the end of the loop, from another thread
            self._announce_later(method, uri)

    async def _notify(self, method: str, uri: str) -> None:
        connection, revision = self.connection, self.connection.revision
        if uri and self.find_subscription is not None:
            if subscribed := await self.find_subscription(uri):
                self.reply_channel.send(jsonrpc.notification(method, {"uri": subscribed}))
        elif uri in connection.subscriptions:
            self.reply_channel.send(jsonrpc.notification(method, {"uri": connection.subscriptions[uri]}))
        elif not uri and revision is not None and connection.ready and self.engine.announces(revision):
            self.reply_channel.send(jsonrpc.notification(method))
        for each in self.subscriptions():
            if uri in each.uris:
                self.notify_subscriber(method, each.id, {"uri": each.uris[uri]})
            elif method in each.methods:
                self.notify_subscriber(method, each.id, {})

    def notify_subscriber(self, method: str, request_id: Id, params: Object) -> None:
        self.reply_channel.send(jsonrpc.notification(method, {**params, "_meta": {SUBSCRIPTION: request_id}}))

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Keep a task that `close` waits for."""
        self._request_tasks = self._request_tasks or set()
        self._request_tasks.add(task)
        task.add_done_callback(self._request_tasks.discard)
        return task

    def _cancel_without_reply(self, request: CallState | Subscription | AsyncRequest) -> None:
        """Cancel a request for its peer, without a reply."""
        if isinstance(request, CallState):
            request.calls.abandon(request)
            return
        del self.connection.in_flight[request.id]
        if isinstance(request, AsyncRequest):
            request.task.cancel()
        request.reply(NO_REPLY)

    def _send_reply(self, reply: Reply) -> None:
        if reply.body:
            self.reply_channel.send(reply.body)

    async def close(self, grace: float) -> None:
        """Wait up to `grace` seconds for the calls in flight, then cancel them."""
        for waiter in self.connection.pending.values():
            if not waiter.done():
                waiter.set_exception(TransportError("the client has gone"))
        self.close_subscriptions()
        if landings := self.pending_replies():
            await asyncio.wait(landings, timeout=grace)
        self.cancel_all()
        tasks = [task for task, call in self.calls.tasks.items() if call.peer is self]
        if tasks:  # their clean-up may need what the lifespan is about to close
            await asyncio.wait(tasks, timeout=CLEANUP_SECONDS)

    def pending_replies(self) -> list[asyncio.Future[None]]:
        """Return a future for each request in flight, done when it has its reply."""
        calls = [request for request in self.connection.in_flight.values() if isinstance(request, CallState)]
        for call in calls:
            call.reply_future = call.reply_future or self.calls.loop.create_future()
        return [*(call.reply_future for call in calls if call.reply_future is not None), *(self._request_tasks or ())]

    def close_subscriptions(self) -> None:
        """End every subscription: by its result, and by a notification for clients that wait for one."""
        for subscription in self.subscriptions():
            del self.connection.in_flight[subscription.id]
            result = {"resultType": "complete", "_meta": {SUBSCRIPTION: subscription.id}}
            subscription.reply(self.engine.encode_response(subscription.revision, subscription.id, result))
            self.reply_channel.send(jsonrpc.notification(CANCELLED, {"requestId": subscription.id}))

    def cancel_all(self) -> None:
        """Cancel all requests of this peer without replies."""
        self.unwatch()
        for request in list(self.connection.in_flight.values()):
            self._cancel_without_reply(request)
        for task in self._request_tasks or ():
            task.cancel()


class _Batch:
    """The responses to one batch; they are sent together when the last one has come."""

    def __init__(self, send: Callable[[bytes], None], respond: ReplyCallback, limit: int, size: int) -> None:
        self._send = send
        self._respond = respond
        self._limit = limit
        self._pending = size
        self._bodies: list[bytes] = []

    def add(self, reply: Reply) -> None:
        """Add the reply to one message of the batch."""
        self._pending -= 1
        if reply.body:
            self._bodies.append(reply.body)
        if self._pending:
            return
        whole = b"[" + b",".join(self._bodies) + b"]"
        if len(whole) > self._limit:  # a response may also come by itself
            for each in self._bodies:
                self._send(each)
        self._respond(Reply(whole) if self._bodies and len(whole) <= self._limit else NO_REPLY)


# Methods of the protocol. `Revision.requests` has the parameters of each method that a revision has.


def initialize(peer: Dispatcher, request_id: Id, revision: Revision, params: Any, respond: object) -> Reply:
    negotiated = peer.connection.initialize(params)
    asks = _asks_user(peer, negotiated, peer.connection.client)
    return peer.engine.encode_response(
        negotiated,
        request_id,
        {"protocolVersion": negotiated.name, **peer.engine.handshake_result("initialize", negotiated, asks_user=asks)},
    )


def ping(peer: Dispatcher, request_id: Id, revision: Revision, params: Any, respond: object) -> Reply:
    return peer.engine.encode_response(revision, request_id, {})


def set_level(peer: Dispatcher, request_id: Id, revision: Revision, params: Any, respond: object) -> Reply:
    peer.connection.level = LEVELS.index(params.level)
    return peer.engine.encode_response(revision, request_id, {})


def discover(peer: Dispatcher, request_id: Id, revision: Revision, params: Any, respond: object) -> Reply:
    asks = revision.sender is not None and _asks_user(peer, revision, revision.sender(params))
    return peer.engine.encode_response(
        revision, request_id, peer.engine.handshake_result("server/discover", revision, asks_user=asks)
    )


def _asks_user(peer: Dispatcher, revision: Revision, client: ClientInfo) -> bool:
    """Return whether the server asks this client's user before a destructive tool runs, in place of the client."""
    # The id of a session over HTTP holds no experimental capabilities: later calls could not be recognised.
    has_capabilities = revision.stateless or peer.headers is None
    return has_capabilities and peer.engine.guard_set.promises_to_ask(revision, client, peer.is_identified)


def list_entries(
    method: str,
    peer: Dispatcher,
    request_id: Id,
    revision: Revision,
    params: Any,
    respond: ReplyCallback,
    *,
    is_ready: bool = False,
) -> Reply | None:
    ready = None if is_ready else _when_listed(peer, method, revision, params)
    if ready is not None:
        peer.handle_when_ready(ready, method, request_id, revision, params, respond)
        return None
    client = None if peer.engine.upstreams is None else peer.client_of(revision, params)
    return list_page(method, peer, request_id, revision, params.cursor, client)


def _why_absent(peer: Dispatcher, params: Any, revision: Revision) -> str:
    upstreams, client = peer.engine.upstreams, peer.client_of(revision, params)
    return "" if upstreams is None else upstreams.why_absent(params.name, peer, revision, client)


def _when_listed(peer: Dispatcher, method: str, revision: Revision, params: Any) -> Awaitable[None] | None:
    """Return what to wait for until upstream servers have listed what they have; None if they have."""
    upstreams = peer.engine.upstreams
    if upstreams is None:
        return None
    return upstreams.prepare(method, peer, revision, peer.client_of(revision, params))


def list_page(
    method: str,
    peer: Dispatcher,
    request_id: Id,
    revision: Revision,
    sealed: str | UnsetType,
    client: ClientInfo | None = None,
) -> Reply:
    """Return one page of a list; `client` is who asks, where upstream servers show some clients less than others."""
    engine, catalog = peer.engine, peer.engine.catalogs[method]
    after: Json = 0
    if sealed is not UNSET:
        after = engine.seal.open(method, peer.principal.id, sealed, engine.clock())
        if type(after) is not int:
            raise Refused(Kind.BAD_PARAMS, "cursor: not one of ours, or too old; list from the start")
    hidden = engine.guard_set.hidden(catalog, peer.principal, revision)
    ttl_ms, is_private = engine.ttl_ms, bool(catalog.hiding) or engine.guard_set.policy.hides_anything
    variants: tuple[ToolEntry, ...] = ()
    if engine.upstreams is not None:
        if client is not None:
            variants = engine.upstreams.variants(method, peer, revision, client)
            hidden -= {each.name for each in variants}
            hidden |= {each.name for each in variants if engine.guard_set.hides(each, peer.principal, revision)}
            hidden |= engine.upstreams.hidden(method, peer, revision, client)
        most, is_for_one = engine.upstreams.cache_hint(method)
        ttl_ms, is_private = min(ttl_ms, most), is_private or is_for_one
    size, sanitizer = engine.page_size_for(revision), engine.guard_set.sanitizer
    clean = None if sanitizer is None else sanitizer.value
    entries, last = catalog.page(revision, after, size, peer.principal.scopes, hidden, clean, variants)
    cursor: str | UnsetType = UNSET
    if last is not None:
        expires = int(engine.clock()) + CURSOR_SECONDS
        cursor = engine.seal.seal(method, peer.principal.id, last, expires)
    scope = "private" if is_private else "public"
    return engine.encode_response(revision, request_id, revision.encoders[method](entries, cursor, ttl_ms, scope))


def start_call(
    kind: SubjectKind,
    peer: Dispatcher,
    request_id: Id,
    revision: Revision,
    params: Any,
    respond: ReplyCallback,
    *,
    is_ready: bool = False,
) -> Reply | None:
    """Start a call of a tool, a read of a resource, or a request for a prompt."""
    engine, guards = peer.engine, peer.engine.guard_set
    entry: ToolEntry | None
    if kind == "resource":
        entry, arguments = engine.find(kind, params.uri)
    else:
        entry, arguments = (engine.catalog if kind == "tool" else engine.prompts).get(params.name), params.arguments
    upstreams = engine.upstreams
    if entry is not None and upstreams is not None and entry.upstream:
        entry = upstreams.own_entry(entry, peer, revision, peer.client_of(revision, params))
    if entry is None and not is_ready:
        ready = _when_listed(peer, _LIST_OF[kind], revision, params)
        if ready is not None:
            peer.handle_when_ready(ready, ENTRY_METHODS[kind], request_id, revision, params, respond)
            return None
    if entry is None or not entry.is_visible_to(peer.principal.scopes) or guards.hides(entry, peer.principal, revision):
        guards.charge_request(peer.principal, peer.address)  # there is no entry with a limit of its own
        if kind == "resource":
            raise unknown_resource(params.uri)
        is_open = entry is None and not guards.policy.hides_anything
        if is_open and upstreams is not None and (why := _why_absent(peer, params, revision)):
            raise Refused(Kind.FAILED, why, readable=True)
        catalog: Catalog[Any] = engine.catalog if kind == "tool" else engine.prompts
        hidden = guards.hidden(catalog, peer.principal, revision)
        if upstreams is not None:
            hidden |= upstreams.hidden(_LIST_OF[kind], peer, revision, peer.client_of(revision, params))
        raise unknown(kind, params.name, catalog.closest(params.name, peer.principal.scopes, hidden))
    if not entry.scopes <= peer.principal.scopes:
        guards.charge_request(peer.principal, peer.address)
        raise needs_scopes(entry)
    if engine.stops and (reason := engine.stop_reason(entry, peer.principal)):
        guards.charge_request(peer.principal, peer.address)
        raise Refused(Kind.FORBIDDEN, reason, readable=True)
    if entry.withheld:
        guards.charge_request(peer.principal, peer.address)
        raise Refused(Kind.FORBIDDEN, f"{entry.name} {entry.withheld}", readable=True)
    if len(peer.connection.in_flight) >= engine.limits.max_calls:
        _refuse_overload(peer)
    if entry.input.headers and peer.headers is not None and revision.stateless:
        check_param_headers(entry.input.headers, arguments, peer.headers)
    client = peer.connection.client if revision.sender is None else revision.sender(params)  # no call more than needed
    call = CallState(
        peer,
        peer.calls,
        peer.reply_channel,
        request_id,
        entry,
        arguments,
        revision,
        client,
        peer.principal,
        params.meta,
        respond,
    )
    if revision.stateless:
        call.level = LEVELS.index(params.meta.log_level) if params.meta.log_level is not UNSET else len(LEVELS)
        if params.request_state is not UNSET or params.input_responses is not UNSET:
            call.answers = _retry_answers(call, params)
    begun = peer.calls.begin(call)
    return begun if begun is None or isinstance(begun, Reply) else peer.calls.run(call, begun)


def complete(
    peer: Dispatcher,
    request_id: Id,
    revision: Revision,
    params: Any,
    respond: ReplyCallback,
    *,
    is_ready: bool = False,
) -> None:
    """Complete an argument of a prompt, or a variable of a template."""
    engine, argument, is_prompt = peer.engine, params.argument.name, params.ref.kind == "prompt"
    name = params.ref.name if is_prompt else params.ref.uri
    entry: ToolEntry | None = (engine.prompts if is_prompt else engine.templates).get(name)
    if entry is not None and engine.upstreams is not None and entry.upstream:
        entry = engine.upstreams.own_entry(entry, peer, revision, peer.client_of(revision, params))
    if entry is None and not is_ready:
        ready = _when_listed(peer, "prompts/list" if is_prompt else "resources/templates/list", revision, params)
        if ready is not None:
            peer.handle_when_ready(ready, "completion/complete", request_id, revision, params, respond)
            return
    if entry is None or not peer.is_visible(entry, revision):
        raise Refused(Kind.BAD_PARAMS, f"Unknown {params.ref.kind}: {name[:200]}")
    engine.guard_set.check_allowed(entry, {}, peer.principal, revision)
    if engine.stops and (reason := engine.stop_reason(entry, peer.principal)):
        raise Refused(Kind.FORBIDDEN, reason)
    arguments = entry.tool.input_schema.get("properties", {})
    if argument not in arguments:
        near = closest(argument, arguments)
        text = f"{name[:200]} has no argument {argument[:200]!r}"
        raise Refused(Kind.BAD_PARAMS, f"{text}; did you mean {near!r}?" if near else text)
    if len(peer.connection.in_flight) >= engine.limits.max_calls:
        _refuse_overload(peer)
    work = _complete(peer, request_id, revision, entry, params)
    peer.answer_later(request_id, revision, "completion/complete", respond, work)


async def _complete(peer: Dispatcher, request_id: Id, revision: Revision, entry: ToolEntry, params: Any) -> Reply:
    engine = peer.engine
    values: Json = await find_values(entry, params, engine.completion_pool, peer)
    if isinstance(entry, ResourceEntry):
        values = _visible_values(peer, revision, entry, params, values)
    values, _ = await engine.guard_set.sanitize_message(values)
    reply = engine.encode_response(revision, request_id, revision.encoders["completion/complete"](values))
    if len(reply.body) > engine.limits.max_message_bytes:
        raise Refused(Kind.FAILED, f"The values have {len(reply.body):,} bytes, which are too many to be sent")
    return reply


def _visible_values(
    peer: Dispatcher, revision: Revision, entry: ResourceEntry, params: Any, values: list[str]
) -> list[str]:
    """Return the values of a template's variable without those whose URI is hidden from the caller."""
    engine, template, argument = peer.engine, entry.template, params.argument.name
    policy = engine.guard_set.policy
    missing_scopes = (engine.resources.hiding | engine.templates.hiding) - peer.principal.scopes
    is_ruled = policy.hides_anything and policy.concerns("resource", "hide")
    if template is None or not (missing_scopes or is_ruled):
        return values
    variables = known_arguments(params)
    if {*template.names} - template.optional - {argument} - variables.keys():
        return []  # the URI is not known
    entries = [engine.find("resource", template.expand({**variables, argument: value}))[0] for value in values]
    pairs = zip(values, entries, strict=True)
    return [value for value, each in pairs if each is not None and peer.is_visible(each, revision)]


def subscribe(peer: Dispatcher, request_id: Id, revision: Revision, params: Any, respond: object) -> Reply:
    connection, before = peer.connection, peer.connection.subscriptions
    name = _subscribable(peer, revision, params.uri)
    after = {**before, name: params.uri}
    chars = count_chars(after)
    is_more = name not in before or chars > connection.subscribed_chars
    if is_more and (len(after) > MAX_SUBSCRIPTIONS or chars > _max_subscribed_chars(peer)):
        raise Refused(Kind.OVERLOADED, "Too many or too long URIs are subscribed to; unsubscribe from some first")
    connection.subscriptions, connection.subscribed_chars = after, chars
    _watch(peer, revision, params, name)
    return peer.engine.encode_response(revision, request_id, {})


def _max_subscribed_chars(peer: Dispatcher) -> int:
    """Return how many characters the URIs of a peer may have beside those of the caller's other streams."""
    caller, streams = (peer.principal, peer.address), peer.engine.open_streams
    others = [each.connection for each in streams if (each.principal, each.address) == caller]
    others_chars = sum(each.subscribed_chars for each in others if each is not peer.connection)
    return min(peer.max_subscribed_chars, MAX_CALLER_CHARS - others_chars)


def _watch(peer: Dispatcher, revision: Revision, params: Any, uri: str) -> None:
    """Have an upstream server announce the updates of its resource."""
    upstreams = peer.engine.upstreams
    entry = None if upstreams is None else peer.engine.find("resource", uri)[0]
    if upstreams is not None and entry is not None and entry.upstream and peer.is_visible(entry, revision):
        is_wanted = partial(peer.find_subscription or peer.find_own_subscription, uri)
        upstreams.watch(entry, peer, revision, peer.client_of(revision, params), is_wanted)


def _subscribable(peer: Dispatcher, revision: Revision, uri: str) -> str:
    """Return the canonical URI, also of a hidden resource below a template, which looks like any absent one there."""
    engine = peer.engine
    entry, variables = engine.find("resource", uri)
    if entry is None or not peer.is_visible(entry, revision):
        visible = (each for each in engine.templates if each.template and peer.is_visible(each, revision))
        if entry is None or not any(each.template.match(uri) for each in visible if each.template):
            raise unknown_resource(uri)
        return entry.name  # it has no updates while it is hidden
    engine.guard_set.check_allowed(entry, variables, peer.principal, revision)
    return entry.name


def unsubscribe(peer: Dispatcher, request_id: Id, revision: Revision, params: Any, respond: object) -> Reply:
    before = peer.connection.subscriptions
    entry, _ = peer.engine.find("resource", params.uri)
    name = "" if entry is None else entry.name
    after = {key: uri for key, uri in before.items() if uri != params.uri and key != name}
    if len(after) == len(before) and (entry is None or not peer.is_visible(entry, revision)):
        _subscribable(peer, revision, params.uri)
    peer.connection.subscriptions, peer.connection.subscribed_chars = after, count_chars(after)
    return peer.engine.encode_response(revision, request_id, {})


def listen(peer: Dispatcher, request_id: Id, revision: Revision, params: Any, respond: ReplyCallback) -> None:
    engine, in_flight, filters = peer.engine, peer.connection.in_flight, params.notifications
    if len(in_flight) >= engine.limits.max_calls:
        _refuse_overload(peer)
    capabilities = [each for each in engine.announced_lists(revision) if getattr(filters, f"{each}_list_changed")]
    honoured: Object = {f"{each}ListChanged": True for each in capabilities}
    streams = [each for each in engine.open_streams if (each.principal, each.address) == (peer.principal, peer.address)]
    room = MAX_SUBSCRIPTIONS - sum(each.subscribed_count for each in streams)
    uris: dict[str, str] = {}
    left = MAX_SUBSCRIBED_CHARS
    for uri in filters.resource_subscriptions[: max(room, 0)]:
        if (left := left - len(uri)) < 0:
            break
        with contextlib.suppress(Refused):
            uris.setdefault(_subscribable(peer, revision, uri), uri)
    if uris:
        honoured["resourceSubscriptions"] = [*uris.values()]
        for name in uris:
            _watch(peer, revision, params, name)
    methods = frozenset(LIST_CHANGED[each] for each in capabilities)
    in_flight[request_id] = Subscription(request_id, revision, methods, uris, respond)
    peer.watch()
    peer.notify_subscriber("notifications/subscriptions/acknowledged", request_id, {"notifications": honoured})


def _refuse_overload(peer: Dispatcher) -> NoReturn:
    most = peer.engine.limits.max_calls
    raise Refused(Kind.OVERLOADED, f"{most} requests are in flight, no more are taken; wait for some to end")


def _retry_answers(call: CallState, params: Any) -> Object:
    """Return all answers so far: those sealed in the state, and those of this round."""
    responses: Object = {} if params.input_responses is UNSET else params.input_responses
    answers = {name: each for name, each in responses.items() if not name.startswith(OWN_KEYS)}
    if params.request_state is UNSET:
        return answers
    engine = call.calls.engine
    purpose = state_purpose(call.entry.method, call.name, call.arguments)
    before = engine.seal.open(purpose, call.principal.id, params.request_state, engine.clock())
    if type(before) is not dict:
        raise Refused(Kind.BAD_PARAMS, "requestState: not ours, not for this call, or too old; call again without")
    return {**answers, **before}


class Method(Struct, frozen=True):
    """One method: its handler, and what a request counts as for the rate limits."""

    handler: Callable[..., Reply | None]
    counts_as: Literal["call", "list", "request"] = "request"
    """`call`: the pipeline charges it. `list`: all processes charge it together. `request`: each process does."""


METHODS: dict[str, Method] = {
    "initialize": Method(initialize),
    "ping": Method(ping),
    "logging/setLevel": Method(set_level),
    "server/discover": Method(discover, counts_as="list"),
    **{method: Method(partial(list_entries, method), counts_as="list") for method in LISTS},
    **{method: Method(partial(start_call, kind), counts_as="call") for method, kind in KINDS.items()},
    "resources/subscribe": Method(subscribe),
    "resources/unsubscribe": Method(unsubscribe),
    "completion/complete": Method(complete),
    "subscriptions/listen": Method(listen),
}
