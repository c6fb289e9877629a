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
from handrail.engine.call import Call
from handrail.engine.inflight import LATER, Flight, Reply, Subscription
from handrail.engine.outcome import count_refused
from handrail.engine.records import Record, turned_away
from handrail.errors import Kind, Refused, RemoteProtocolError
from handrail.jsonrpc import Id, Message, Notification, Refusal, Request, Response, decode
from handrail.model import ClientInfo, Json, Object
from handrail.protocol.connection import CANCELLED, names_version
from handrail.protocol.http_rules import Headers, check_parameters
from handrail.revisions import Revision
from handrail.revisions.base import LEVELS, SUBSCRIPTION

log = logging.getLogger("handrail")

CHANGED = "notifications/tools/list_changed"
MAX_BATCH = 256
CURSOR_SECONDS = 24 * 3600


class Conversation(Flight):
    """One peer: its messages in, our messages out."""

    headers: Headers | None = None  # over HTTP, what the arguments are mirrored in
    needed: frozenset[str] = frozenset()  # scopes a refused call would have needed
    raw: bytes | bytearray = b""  # the message it is at, as it came
    _announcing = False

    def unwatch(self) -> None:
        self.engine.catalog.watchers.discard(self.tools_changed)

    def watch(self) -> None:
        """From now on, tell the peer when the tools change."""
        self.engine.catalog.watchers.add(self.tools_changed)

    def receive(self, data: bytes | bytearray) -> bytes | None:
        """Handle one message as it came; what is answered later goes out by itself."""
        self.raw = data
        return self.handle(decode(data), self.say)

    def handle(self, message: Message | list[Json], reply: Reply) -> bytes | None:
        """The answer to a message, LATER if it will be given to `reply`, or None. Never raises (P-01)."""
        try:
            if type(message) is Request:
                feed = self.engine.feed
                return self.respond(message, reply) if feed is None else feed.follow(self, message, reply)
            if type(message) is Notification:
                self._notified(message)
            elif type(message) is Response:
                self._answered(message)
            elif isinstance(message, Refusal):
                return self._unreadable(message)
            elif isinstance(message, list):
                return self._batch(message, reply)
        except Exception:
            log.exception("a message could not be handled")
            return self._unreadable(Refusal(Kind.INTERNAL, "Internal error"))
        return None

    def refuse(self, kind: Kind, text: str) -> bytes:
        """The answer to something that was not even a message."""
        return self._unreadable(Refusal(kind, text))

    # What arrives

    def respond(self, request: Request, reply: Reply) -> bytes | None:
        connection = self.connection
        try:
            revision = connection.speaker(request)
        except Refused as refused:
            voice = connection.voice_for(request)
            self.turned_away(request, voice, refused)
            return self.refusal(voice, request.id, refused)
        try:
            if request.id in connection.in_flight:
                raise Refused(Kind.INVALID_REQUEST, f"The id {request.id!r} is in use by a request still in flight")
            if request.method != "tools/call":
                is_list = request.method in _LISTS
                waits = self.engine.gate.allow(self.principal, self.address, is_list=is_list)
                if waits is not None:
                    self.wait(self._list_when_counted(request, revision, waits, reply))
                    return LATER
            params = connection.typed(request, revision)
            return _METHODS[request.method](self, request.id, revision, params, reply)
        except Refused as refused:
            self.turned_away(request, revision, refused)
            return self.refusal(revision, request.id, refused)
        except Exception:
            log.exception("%s failed", request.method)
            bug = Refused(Kind.INTERNAL, "Internal error")
            self.turned_away(request, revision, bug)
            return self.refusal(revision, request.id, bug)

    async def _list_when_counted(
        self, request: Request, revision: Revision, waits: Awaitable[Any], reply: Reply
    ) -> None:
        from handrail.guards.store_limits import counted

        try:
            await counted(waits)
            params = self.connection.typed(request, revision)
            answer = _METHODS[request.method](self, request.id, revision, params, reply)
        except Refused as refused:
            answer = self.refusal(revision, request.id, refused)
        except Exception:
            log.exception("%s failed", request.method)
            answer = self.refusal(revision, request.id, Refused(Kind.INTERNAL, "Internal error"))
        reply(answer)

    def turned_away(self, request: Request, revision: Revision, refused: Refused) -> None:
        """Count and record a call that never became one."""
        if request.method != "tools/call":
            return
        engine, gate = self.engine, self.engine.gate
        if engine.metrics is not None:
            count_refused(engine.metrics, engine.catalog, request, self.principal, refused)
        ident = "" if engine.feed is None else engine.feed.turned_away(self, request, revision, refused)
        if gate.trail is not None:
            where = Record(
                "refusal", ident or gate.serial(), "", self.principal.id, self.address, gate.name, "", revision.name
            )
            gate.trail.hand(turned_away(request, where, self.traced, refused))

    def _notified(self, message: Notification) -> None:
        if message.method == CANCELLED:
            ident = message.params.get("requestId")
            known = self.connection.in_flight.get(ident) if type(ident) is int or type(ident) is str else None
            # Whether a request can be cancelled is up to the revision it was made in.
            if known is not None and CANCELLED in known.revision.notifications:
                self.give_up(known)
        elif message.method == "notifications/initialized":
            self.connection.ready = self.connection.revision is not None

    def _answered(self, message: Response) -> None:
        waiter = self.connection.asked.pop(message.id, None)
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

    def _batch(self, items: list[Json], reply: Reply) -> bytes:
        voice = self.connection.voice
        if not voice.batches:
            return self.refuse(Kind.INVALID_REQUEST, f"{voice.name} has no batches: send one message at a time")
        if not 1 <= len(items) <= MAX_BATCH:
            return self.refuse(Kind.INVALID_REQUEST, f"A batch of {len(items)}: 1 to {MAX_BATCH} messages are allowed")
        batch = _Batch(self.outlet.send, reply, self.engine.limits.max_message_bytes, len(items))
        for item in items:
            message = jsonrpc.read(item)
            if type(message) is Request and (message.method == "initialize" or names_version(message)):
                refused = Refused(Kind.INVALID_REQUEST, f"{message.method}: not inside a batch")
                batch.take(self.refusal(voice, message.id, refused))
                continue
            answer = self.handle(message, batch.take)
            if answer is not LATER:
                batch.take(answer)
        return LATER

    def _unreadable(self, refusal: Refusal) -> bytes:
        return self.refusal(self.connection.voice, refusal.id, Refused(refusal.kind, refusal.text))

    # Methods

    def _initialize(self, ident: Id, revision: Revision, params: Any, reply: object) -> bytes:
        agreed = self.connection.initialize(params)
        asks = self._asks(agreed, self.connection.client)
        return self.answer(agreed, ident, {"protocolVersion": agreed.name, **self.engine.welcome(agreed, asks=asks)})

    def _ping(self, ident: Id, revision: Revision, params: Any, reply: object) -> bytes:
        return self.answer(revision, ident, {})

    def _set_level(self, ident: Id, revision: Revision, params: Any, reply: object) -> bytes:
        self.connection.level = LEVELS.index(params.level)
        return self.answer(revision, ident, {})

    def _discover(self, ident: Id, revision: Revision, params: Any, reply: object) -> bytes:
        asks = revision.sender is not None and self._asks(revision, revision.sender(params))
        return self.answer(revision, ident, self.engine.welcome(revision, asks=asks))

    def _asks(self, revision: Revision, client: ClientInfo) -> bool:
        """Whether this client's user is asked here before a destructive tool runs, and the client leaves that to us."""
        # The id of a session over HTTP does not hold what is experimental: its calls would not be known for such.
        is_known = revision.stateless or self.headers is None
        return is_known and self.engine.gate.promises(revision, client, self.is_identified)

    def _list(self, ident: Id, revision: Revision, params: Any, reply: object) -> bytes:
        engine = self.engine
        after: Json = 0
        if params.cursor is not UNSET:
            after = engine.seal.open("tools/list", self.principal.id, params.cursor, engine.clock())
            if type(after) is not int:
                raise Refused(Kind.BAD_PARAMS, "cursor: not one of ours, or too old; list from the start")
        hidden = engine.gate.hidden(engine.catalog, self.principal, revision)
        size, sanitizer = engine.size_for(revision), engine.gate.sanitizer
        clean = None if sanitizer is None else sanitizer.value
        tools, last = engine.catalog.page(revision, after, size, self.principal.scopes, hidden, clean)
        cursor: str | UnsetType = UNSET
        if last is not None:
            expires = int(engine.clock()) + CURSOR_SECONDS
            cursor = engine.seal.close("tools/list", self.principal.id, last, expires)
        scope = "private" if engine.catalog.hiding or engine.gate.policy.hides_anything else "public"
        return self.answer(revision, ident, revision.page(tools, cursor, engine.ttl_ms, scope))

    def _call(self, ident: Id, revision: Revision, params: Any, reply: Reply) -> bytes | None:
        engine, gate = self.engine, self.engine.gate
        entry = engine.catalog.get(params.name)
        if entry is None or not entry.shown_to(self.principal.scopes) or gate.hides(entry, self.principal, revision):
            gate.allow(self.principal, self.address)  # there is no tool whose limit would hold
            hidden = gate.hidden(engine.catalog, self.principal, revision)
            raise engine.catalog.unknown(params.name, self.principal.scopes, hidden)
        if not entry.scopes <= self.principal.scopes:
            gate.allow(self.principal, self.address)
            self.needed = entry.scopes
            raise Refused(Kind.FORBIDDEN, f"{params.name} needs the scope {' '.join(sorted(entry.scopes))}")
        if len(self.connection.in_flight) >= engine.limits.max_calls:
            self._no_room()
        if entry.input.headers and self.headers is not None and revision.stateless:
            check_parameters(entry.input.headers, params.arguments, self.headers)
        client = self.connection.client if revision.sender is None else revision.sender(params)
        call = Call(self, ident, entry, params.arguments, revision, client, self.principal, params.meta, reply)
        if revision.stateless:
            call.level = LEVELS.index(params.meta.log_level) if params.meta.log_level is not UNSET else len(LEVELS)
            if params.request_state is not UNSET or params.input_responses is not UNSET:
                call.answers = self.retried(params)
        return self.begin(call)

    def _listen(self, ident: Id, revision: Revision, params: Any, reply: Reply) -> bytes:
        if len(self.connection.in_flight) >= self.engine.limits.max_calls:
            self._no_room()
        tools = params.notifications.tools_list_changed and self.engine.list_changed and self.engine.has_tools
        self.connection.in_flight[ident] = Subscription(ident, revision, tools, reply)
        self.watch()
        honoured = {"toolsListChanged": True} if tools else {}
        self._tell_subscriber("notifications/subscriptions/acknowledged", ident, {"notifications": honoured})
        return LATER

    def _no_room(self) -> NoReturn:
        most = self.engine.limits.max_calls
        raise Refused(Kind.OVERLOADED, f"{most} requests are in flight, no more are taken; wait for some to end")

    # Change notices

    def tools_changed(self) -> None:
        """From any thread. Changes in one turn of the loop are announced together."""
        if not self._announcing:
            self._announcing = True
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens
                self.loop.call_soon_threadsafe(self._announce)

    def _announce(self) -> None:
        self._announcing = False
        agreed = self.connection.revision
        if agreed is not None and self.connection.ready and (self.engine.list_changed or agreed.announces):
            self.outlet.send(jsonrpc.notification(CHANGED))
        for known in list(self.connection.in_flight.values()):
            if isinstance(known, Subscription) and known.tools:
                self._tell_subscriber(CHANGED, known.id, {})

    def _tell_subscriber(self, method: str, ident: Id, params: Object) -> None:
        self.outlet.send(jsonrpc.notification(method, {**params, "_meta": {SUBSCRIPTION: ident}}))

    def drop(self) -> None:
        self.unwatch()
        super().drop()


_LISTS = frozenset({"tools/list", "server/discover"})  # handshakes and pings are counted by each process
_METHODS: dict[str, Callable[..., bytes | None]] = {
    "initialize": Conversation._initialize,
    "ping": Conversation._ping,
    "logging/setLevel": Conversation._set_level,
    "server/discover": Conversation._discover,
    "tools/list": Conversation._list,
    "tools/call": Conversation._call,
    "subscriptions/listen": Conversation._listen,
}


class _Batch:
    """Collects the answers to one batch; gives them on together when the last is there."""

    def __init__(self, send: Callable[[bytes], None], reply: Reply, limit: int, size: int) -> None:
        self._send = send
        self._reply = reply
        self._limit = limit
        self._open = size
        self._answers: list[bytes] = []

    def take(self, answer: bytes | None) -> None:
        """An answer, or the news that there will be none."""
        self._open -= 1
        if answer is not None:
            self._answers.append(answer)
        if self._open:
            return
        whole = b"[" + b",".join(self._answers) + b"]"
        if len(whole) > self._limit:  # an answer may also come by itself
            for each in self._answers:
                self._send(each)
        self._reply(whole if self._answers and len(whole) <= self._limit else None)
