"""Method to answer, for every revision: one conversation with one peer.

`receive` takes a message and gives back the answer if there is one at once, which is the usual case. What takes longer
is answered later, through the outlet.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from msgspec import UNSET, UnsetType

from handrail import jsonrpc
from handrail.engine.call_state import CallState
from handrail.engine.inflight import InFlightCalls, Subscription
from handrail.engine.outcome import RefusedCall, refusal_record
from handrail.engine.reply_channel import NO_REPLY, Reply, ReplyCallback
from handrail.errors import Kind, Refused, RemoteProtocolError
from handrail.jsonrpc import Id, InvalidMessage, Message, Notification, Request, Response, decode
from handrail.model import ClientInfo, Json, Object
from handrail.protocol.connection import CANCELLED, names_version
from handrail.protocol.http_rules import Headers, check_param_headers
from handrail.revisions import Revision
from handrail.revisions.base import LEVELS, SUBSCRIPTION

log = logging.getLogger("handrail")

CHANGED = "notifications/tools/list_changed"
MAX_BATCH = 256
CURSOR_SECONDS = 24 * 3600


class Dispatcher(InFlightCalls):
    """One peer: its messages in, our messages out."""

    headers: Headers | None = None  # over HTTP, what the arguments are mirrored in
    _announcement_pending = False

    def unwatch_tools(self) -> None:
        self.engine.catalog.watchers.discard(self.tools_changed)
        self.engine.open_streams.discard(self)

    def watch_tools(self) -> None:
        """From now on, tell the peer when the tools change."""
        self.engine.catalog.watchers.add(self.tools_changed)
        self.engine.open_streams.add(self)

    def receive(self, data: bytes | bytearray) -> bytes:
        """Handle one message as it came. Return the response; empty if there is none, or if it is sent later."""
        self.raw_message = data
        reply = self.handle(decode(data), self.send_reply)
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
                if self.engine.on_request is not None and message.method != "tools/call":
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
        """The answer to something that was not even a message."""
        return self._unreadable(InvalidMessage(kind, text))

    # What arrives

    def respond(self, request: Request, respond: ReplyCallback) -> Reply | None:
        connection = self.connection
        try:
            revision = connection.revision_of(request)
        except Refused as refused:
            voice = connection.fallback_revision_for(request)
            return self._refuse(request, voice, refused)
        try:
            if request.id in connection.in_flight:
                raise Refused(Kind.INVALID_REQUEST, f"The id {request.id!r} is in use by a request still in flight")
            if request.method != "tools/call":
                is_list = request.method in _LISTS
                waits = self.engine.guard_set.charge_request(self.principal, self.address, is_list=is_list)
                if waits is not None:
                    self.start_request(self._list_when_charged(request, revision, waits, respond))
                    return None
            params = connection.parse_params(request, revision)
            return _METHODS[request.method](self, request.id, revision, params, respond)
        except Refused as refused:
            return self._refuse(request, revision, refused)
        except Exception:
            log.exception("%s failed", request.method)
            return self._refuse(request, revision, Refused(Kind.INTERNAL, "Internal error"))

    def _refuse(self, request: Request, revision: Revision, refused: Refused) -> Reply:
        reply = self.encode_refusal(revision, request.id, refused)
        self.record_refusal(request, revision, refused, reply.body)
        return reply

    async def _list_when_charged(
        self, request: Request, revision: Revision, waits: Awaitable[Any], respond: ReplyCallback
    ) -> None:
        from handrail.guards.store_limits import await_charge

        try:
            await await_charge(waits)
            params = self.connection.parse_params(request, revision)
            reply = _METHODS[request.method](self, request.id, revision, params, respond)
        except Refused as refused:
            reply = self.encode_refusal(revision, request.id, refused)
        except Exception:
            log.exception("%s failed", request.method)
            reply = self.encode_refusal(revision, request.id, Refused(Kind.INTERNAL, "Internal error"))
        if reply is not None:
            respond(reply)

    def record_refusal(
        self, request: Request, revision: Revision, refused: Refused, answer: bytes | None = None
    ) -> None:
        """Count and record a call that never became one."""
        engine, guards = self.engine, self.engine.guard_set
        if request.method != "tools/call" or not (engine.sinks or guards.trail is not None):
            return
        name = request.params.get("name")
        is_tool = type(name) is str and engine.catalog.get(name) is not None
        refusal = RefusedCall(
            origin=self, request=request, revision=revision, refused=refused, is_tool=is_tool, answer=answer
        )
        for sink in engine.sinks:
            try:
                sink.on_refusal(refusal)
            except Exception:
                log.exception("calls: a refused request was not observed")
        if guards.trail is not None:
            refusal.call_id = refusal.call_id or guards.next_serial()
            guards.trail.submit(refusal_record(refusal, guards.name))

    def _on_notification(self, message: Notification) -> None:
        if message.method == CANCELLED:
            request_id = message.params.get("requestId")
            request = (
                self.connection.in_flight.get(request_id)
                if type(request_id) is int or type(request_id) is str
                else None
            )
            # Whether a request can be cancelled is up to the revision it was made in.
            if request is not None and CANCELLED in request.revision.notifications:
                self.cancel_without_reply(request)
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
                batch.add(self.encode_refusal(voice, message.id, refused))
                continue
            reply = self.handle(message, batch.add)
            if reply is not None:
                batch.add(reply)
        return None

    def _unreadable(self, refusal: InvalidMessage) -> Reply:
        return self.encode_refusal(self.connection.fallback_revision, refusal.id, Refused(refusal.kind, refusal.text))

    # Methods

    def _initialize(self, request_id: Id, revision: Revision, params: Any, respond: object) -> Reply:
        negotiated = self.connection.initialize(params)
        asks = self._asks_user(negotiated, self.connection.client)
        return self.encode_response(
            negotiated,
            request_id,
            {"protocolVersion": negotiated.name, **self.engine.handshake_result(negotiated, asks_user=asks)},
        )

    def _ping(self, request_id: Id, revision: Revision, params: Any, respond: object) -> Reply:
        return self.encode_response(revision, request_id, {})

    def _set_level(self, request_id: Id, revision: Revision, params: Any, respond: object) -> Reply:
        self.connection.level = LEVELS.index(params.level)
        return self.encode_response(revision, request_id, {})

    def _discover(self, request_id: Id, revision: Revision, params: Any, respond: object) -> Reply:
        asks = revision.sender is not None and self._asks_user(revision, revision.sender(params))
        return self.encode_response(revision, request_id, self.engine.handshake_result(revision, asks_user=asks))

    def _asks_user(self, revision: Revision, client: ClientInfo) -> bool:
        """Whether this client's user is asked here before a destructive tool runs, and the client leaves that to us."""
        # The id of a session over HTTP does not hold what is experimental: its calls would not be known for such.
        has_capabilities = revision.stateless or self.headers is None
        return has_capabilities and self.engine.guard_set.promises_to_ask(revision, client, self.is_identified)

    def _list(self, request_id: Id, revision: Revision, params: Any, respond: object) -> Reply:
        engine = self.engine
        after: Json = 0
        if params.cursor is not UNSET:
            after = engine.seal.open("tools/list", self.principal.id, params.cursor, engine.clock())
            if type(after) is not int:
                raise Refused(Kind.BAD_PARAMS, "cursor: not one of ours, or too old; list from the start")
        hidden = engine.guard_set.hidden(engine.catalog, self.principal, revision)
        size, sanitizer = engine.page_size_for(revision), engine.guard_set.sanitizer
        clean = None if sanitizer is None else sanitizer.value
        tools, last = engine.catalog.page(revision, after, size, self.principal.scopes, hidden, clean)
        cursor: str | UnsetType = UNSET
        if last is not None:
            expires = int(engine.clock()) + CURSOR_SECONDS
            cursor = engine.seal.seal("tools/list", self.principal.id, last, expires)
        scope = "private" if engine.catalog.hiding or engine.guard_set.policy.hides_anything else "public"
        return self.encode_response(revision, request_id, revision.page(tools, cursor, engine.ttl_ms, scope))

    def _call(self, request_id: Id, revision: Revision, params: Any, respond: ReplyCallback) -> Reply | None:
        engine, guards = self.engine, self.engine.guard_set
        entry = engine.catalog.get(params.name)
        if (
            entry is None
            or not entry.is_visible_to(self.principal.scopes)
            or guards.hides(entry, self.principal, revision)
        ):
            guards.charge_request(self.principal, self.address)  # there is no tool whose limit would hold
            hidden = guards.hidden(engine.catalog, self.principal, revision)
            near = engine.catalog.closest(params.name, self.principal.scopes, hidden)
            hint = {"didYouMean": near} if near else None
            raise Refused(Kind.UNKNOWN_TOOL, f"Unknown tool: {params.name[:200]}", hint)
        if not entry.scopes <= self.principal.scopes:
            guards.charge_request(self.principal, self.address)
            text = f"{params.name} needs the scope {' '.join(sorted(entry.scopes))}"
            raise Refused(Kind.FORBIDDEN, text, needed_scopes=entry.scopes)
        if len(self.connection.in_flight) >= engine.limits.max_calls:
            self._refuse_overload()
        if entry.input.headers and self.headers is not None and revision.stateless:
            check_param_headers(entry.input.headers, params.arguments, self.headers)
        client = self.connection.client if revision.sender is None else revision.sender(params)
        call = CallState(
            self, request_id, entry, params.arguments, revision, client, self.principal, params.meta, respond
        )
        if revision.stateless:
            call.level = LEVELS.index(params.meta.log_level) if params.meta.log_level is not UNSET else len(LEVELS)
            if params.request_state is not UNSET or params.input_responses is not UNSET:
                call.answers = self.retry_answers(params)
        begun = self.begin(call)
        return begun if begun is None or isinstance(begun, Reply) else self.run(call, begun)

    def _listen(self, request_id: Id, revision: Revision, params: Any, respond: ReplyCallback) -> None:
        if len(self.connection.in_flight) >= self.engine.limits.max_calls:
            self._refuse_overload()
        tools = params.notifications.tools_list_changed and self.engine.list_changed and self.engine.has_tools
        self.connection.in_flight[request_id] = Subscription(request_id, revision, tools, respond)
        self.watch_tools()
        honoured = {"toolsListChanged": True} if tools else {}
        self._notify_subscriber("notifications/subscriptions/acknowledged", request_id, {"notifications": honoured})

    def _refuse_overload(self) -> NoReturn:
        most = self.engine.limits.max_calls
        raise Refused(Kind.OVERLOADED, f"{most} requests are in flight, no more are taken; wait for some to end")

    # Change notices

    def tools_changed(self) -> None:
        """From any thread. Changes in one turn of the loop are announced together."""
        if not self._announcement_pending:
            self._announcement_pending = True
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens
                self.loop.call_soon_threadsafe(self._announce)

    def _announce(self) -> None:
        self._announcement_pending = False
        revision = self.connection.revision
        if revision is not None and self.connection.ready and (self.engine.list_changed or revision.always_announces):
            self.reply_channel.send(jsonrpc.notification(CHANGED))
        for request in list(self.connection.in_flight.values()):
            if isinstance(request, Subscription) and request.tools:
                self._notify_subscriber(CHANGED, request.id, {})

    def _notify_subscriber(self, method: str, request_id: Id, params: Object) -> None:
        self.reply_channel.send(jsonrpc.notification(method, {**params, "_meta": {SUBSCRIPTION: request_id}}))

    def cancel_all(self) -> None:
        self.unwatch_tools()
        super().cancel_all()


_LISTS = frozenset({"tools/list", "server/discover"})  # handshakes and pings are counted by each process
_METHODS: dict[str, Callable[..., Reply | None]] = {
    "initialize": Dispatcher._initialize,
    "ping": Dispatcher._ping,
    "logging/setLevel": Dispatcher._set_level,
    "server/discover": Dispatcher._discover,
    "tools/list": Dispatcher._list,
    "tools/call": Dispatcher._call,
    "subscriptions/listen": Dispatcher._listen,
}


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
