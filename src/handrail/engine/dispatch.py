"""Method to answer, for every revision: one conversation with one peer.

`receive` takes a message and gives back the answer if there is one at once, which is the usual case. What takes longer
is answered later, through the outlet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

from msgspec import UNSET, MsgspecError, Struct, UnsetType
from msgspec.json import Encoder

from handrail import jsonrpc
from handrail.engine.ask import NeedInput
from handrail.engine.call import Call
from handrail.engine.core import Engine
from handrail.engine.eager import starter
from handrail.engine.pipeline import failed
from handrail.errors import Kind, Refused, RemoteProtocolError, TransportError
from handrail.jsonrpc import Id, Notification, Refusal, Request, Response, decode
from handrail.model import InputRequest, Json, Object, Principal, Text, ToolResult
from handrail.protocol.connection import Connection
from handrail.revisions import Revision
from handrail.revisions.base import LEVELS, SUBSCRIPTION, VERSION, Page

__all__ = ["Conversation", "Outlet"]

log = logging.getLogger("handrail")

CANCELLED = "notifications/cancelled"
CHANGED = "notifications/tools/list_changed"
MAX_BATCH = 256
CURSOR_SECONDS = 24 * 3600
STATE_SECONDS = 3600


class Outlet(Protocol):
    """Where messages to the peer go. `send` never waits; `drain` waits while too much is unsent."""

    def send(self, message: bytes) -> None: ...
    async def drain(self) -> None: ...


class Subscription(Struct):
    """A `subscriptions/listen` request that is still open."""

    id: Id
    revision: Revision
    tools: bool


class Conversation:
    """One peer: its messages in, our messages out."""

    def __init__(self, engine: Engine, outlet: Outlet, principal: Principal) -> None:
        self.engine = engine
        self.outlet = outlet
        self.principal = principal
        self.loop = asyncio.get_running_loop()
        self.connection = Connection(engine.offer)
        self._announcing = False
        self._stamps = engine.identify
        self._start = starter(self.loop)
        engine.peers.add(self)

    def receive(self, data: bytes) -> bytes | None:
        """Handle one message; the answer, if it is there already. Never raises (P-01)."""
        message = decode(data)
        try:
            if type(message) is Request:
                return self._request(message, None)
            if type(message) is list:
                return self._batch(message)
            return self._other(message, None)  # type: ignore[arg-type]
        except Exception:
            log.exception("a message could not be handled")
            ident = message.id if isinstance(message, Request) else UNSET
            return self._unreadable(Refusal(Kind.INTERNAL, "Internal error", ident))

    def refuse(self, kind: Kind, text: str) -> bytes:
        """The answer to something that was not even a message."""
        return self._unreadable(Refusal(kind, text))

    # What arrives

    def _request(self, request: Request, reply: Callable[[bytes | None], None] | None) -> bytes | None:
        connection = self.connection
        try:
            revision = connection.speaker(request)
        except Refused as refused:
            return self._refusal(connection.voice_for(request), request.id, refused)
        try:
            if request.id in connection.in_flight:
                raise Refused(Kind.INVALID_REQUEST, f"The id {request.id!r} is in use by a request still in flight")
            params = connection.typed(request, revision)
            return _METHODS[request.method](self, request.id, revision, params, reply)
        except Refused as refused:
            return self._refusal(revision, request.id, refused)
        except Exception:
            log.exception("%s failed", request.method)
            return self._refusal(revision, request.id, Refused(Kind.INTERNAL, "Internal error"))

    def _notified(self, message: Notification) -> None:
        if message.method == CANCELLED:
            ident = message.params.get("requestId")
            known = self.connection.in_flight.get(ident) if type(ident) is int or type(ident) is str else None
            # Whether a request can be cancelled is up to the revision it was made in.
            if known is not None and CANCELLED in known.revision.notifications:
                self._give_up(known)
        elif message.method == "notifications/initialized":
            self.connection.ready = self.connection.revision is not None

    def _answered(self, message: Response) -> None:
        waiter = self.connection.asked.pop(message.id, None)
        if waiter is None or waiter.done():
            return
        if message.error is not UNSET:
            code, text = message.error.get("code"), message.error.get("message")
            waiter.set_exception(
                RemoteProtocolError(
                    text if type(text) is str else "no reason given", code=code if type(code) is int else 0
                )
            )
        elif type(message.result) is dict:
            waiter.set_result(message.result)
        else:
            waiter.set_exception(RemoteProtocolError("the answer is not an object"))

    def _batch(self, items: list[Json]) -> bytes | None:
        voice = self.connection.voice
        if not voice.batches or not items or len(items) > MAX_BATCH:
            if not voice.batches:
                why = f"{voice.name} has no batches: send one message at a time"
            else:
                why = f"A batch of {len(items)}: 1 to {MAX_BATCH} messages are allowed"
            return self._unreadable(Refusal(Kind.INVALID_REQUEST, why))
        batch = _Batch(self.outlet.send)
        for item in items:
            batch.add(self._other(jsonrpc.read(item), batch))
        return batch.seal()

    def _other(self, message: jsonrpc.Message, batch: _Batch | None) -> bytes | None:
        """Whatever is not simply a request: a member of a batch, or something that asks for no answer."""
        if type(message) is Request:
            meta = message.params.get("_meta")
            if message.method == "initialize" or (type(meta) is dict and VERSION in meta):
                why = f"{message.method}: not inside a batch"
                return self._refusal(self.connection.voice, message.id, Refused(Kind.INVALID_REQUEST, why))
            return self._request(message, None if batch is None else batch.take)
        if type(message) is Notification:
            self._notified(message)
        elif type(message) is Response:
            self._answered(message)
        elif type(message) is Refusal:
            return self._unreadable(message)
        return None

    # Methods

    def _initialize(self, ident: Id, revision: Revision, params: Any, reply: object) -> bytes:
        agreed = self.connection.initialize(params)
        return self._answer(agreed, ident, {"protocolVersion": agreed.name, **self.engine.welcome(agreed)})

    def _ping(self, ident: Id, revision: Revision, params: Any, reply: object) -> bytes:
        return self._answer(revision, ident, {})

    def _set_level(self, ident: Id, revision: Revision, params: Any, reply: object) -> bytes:
        self.connection.level = LEVELS.index(params.level)
        return self._answer(revision, ident, {})

    def _discover(self, ident: Id, revision: Revision, params: Any, reply: object) -> bytes:
        return self._answer(revision, ident, self.engine.welcome(revision))

    def _list(self, ident: Id, revision: Revision, params: Any, reply: object) -> bytes:
        engine = self.engine
        self._check_tools("tools/list")
        after: Json = 0
        if params.cursor is not UNSET:
            after = engine.seal.open("tools/list", self.principal.id, params.cursor, engine.clock())
            if type(after) is not int:
                raise Refused(Kind.BAD_PARAMS, "cursor: not one of ours, or too old; list from the start")
        tools, last = engine.catalog.page(revision, after, engine.size_for(revision))
        cursor: str | UnsetType = UNSET
        if last is not None:
            expires = int(engine.clock()) + CURSOR_SECONDS
            cursor = engine.seal.close("tools/list", self.principal.id, last, expires)
        return self._answer(revision, ident, revision.page(Page(tools, cursor, engine.ttl_ms, "public")))

    def _call(
        self, ident: Id, revision: Revision, params: Any, reply: Callable[[bytes | None], None] | None
    ) -> bytes | None:
        engine = self.engine
        entry = engine.catalog.get(params.name)
        if entry is None:
            self._check_tools("tools/call")
            raise engine.catalog.unknown(params.name)
        in_flight = self.connection.in_flight
        if len(in_flight) >= engine.limits.max_calls:
            raise Refused(Kind.OVERLOADED, f"{len(in_flight)} calls are in flight; wait for some of them to end")
        client = self.connection.client if revision.sender is None else revision.sender(params)
        token = UNSET if params.meta is UNSET else params.meta.progress_token
        call = Call(self, ident, entry, params.arguments, revision, client, self.principal, token)
        if revision.stateless:
            call.level = LEVELS.index(params.meta.log_level) if params.meta.log_level is not UNSET else len(LEVELS)
            if params.request_state is not UNSET or params.input_responses is not UNSET:
                call.answers = self._retried(params)
        handle = engine.handle if entry.owner is engine.owner else engine.handler_for(entry.owner)
        if entry.mode == "inline" and handle is engine.inner:
            return self._finish(call, partial(_drive, handle(call)))
        task = self._start(handle(call))
        if task.done():
            return self._finish(call, task.result)
        call.task = task
        call.reply = reply
        in_flight[ident] = call
        self._arm(call)
        task.add_done_callback(partial(self._settle, call))
        return None if reply is None else _LATER

    def _listen(self, ident: Id, revision: Revision, params: Any, reply: object) -> None:
        if len(self.connection.in_flight) >= self.engine.limits.max_calls:
            raise Refused(Kind.OVERLOADED, "too many requests in flight")
        tools = params.notifications.tools_list_changed and self.engine.list_changed and self.engine.has_tools
        self.connection.in_flight[ident] = Subscription(ident, revision, tools)
        honoured = {"toolsListChanged": True} if tools else {}
        self._tell_subscriber("notifications/subscriptions/acknowledged", ident, {"notifications": honoured})

    # Calls that take longer

    async def tell(self, call: Call, message: bytes) -> None:
        if not call.closed:
            self.outlet.send(message)
            await self.outlet.drain()

    async def ask(self, call: Call, request: InputRequest) -> Object:
        if call.closed:
            raise asyncio.CancelledError
        waiter: asyncio.Future[Object] = self.loop.create_future()
        ident, message = self.connection.question(request.method, request.params, waiter)
        self.outlet.send(message)
        try:
            return await waiter
        finally:
            if self.connection.asked.pop(ident, None) is not None and CANCELLED in call.revision.notifications:
                self.outlet.send(jsonrpc.notification(CANCELLED, {"requestId": ident}))

    def log_floor(self, call: Call) -> int:
        return self.connection.level if call.level is None else call.level

    async def close_stream(self, call: Call) -> None:
        """There is one stream here, and it stays open."""

    def _settle(self, call: Call, task: asyncio.Task[ToolResult]) -> None:
        if call.closed:
            # Answered or given up before; what it still had to say is of no use.
            with contextlib.suppress(BaseException):
                task.result()
            return
        self._close(call)
        self._reply(call, self._finish(call, task.result))

    def _finish(self, call: Call, outcome: Callable[[], ToolResult]) -> bytes | None:
        """The answer to a call that has ended, however it ended."""
        revision = call.revision
        try:
            result = outcome()
        except Refused as refused:
            return self._refusal(revision, call.id, refused)
        except NeedInput as needed:
            return self._input_required(call, needed)
        except asyncio.CancelledError:
            result = failed(f"The tool {call.name} was cancelled.")
        except BaseException:
            log.exception("tools/call %r failed outside the tool", call.name)
            return self._refusal(revision, call.id, Refused(Kind.INTERNAL, "Internal error"))
        finally:
            call.closed = True
        try:
            answer = self._answer(revision, call.id, revision.result(result, call.entry.wraps))
        except (MsgspecError, ValueError, TypeError, RecursionError) as problem:
            log.error("tool %r returned what cannot be sent: %s", call.name, problem)
            answer = self._failure(call, f"The tool {call.name} returned a value that is not strict JSON.")
        if len(answer) > self.engine.limits.max_message_bytes:
            size, most = len(answer), self.engine.limits.max_message_bytes
            answer = self._failure(call, f"The result of {call.name} has {size:,} bytes; at most {most:,} can be sent.")
        return answer

    def _failure(self, call: Call, text: str) -> bytes:
        return self._answer(call.revision, call.id, call.revision.result(failed(text), False))

    def _reply(self, call: Call, answer: bytes | None) -> None:
        if call.reply is not None:
            call.reply(answer)
        elif answer is not None:
            self.outlet.send(answer)

    def _arm(self, call: Call) -> None:
        now = self.loop.time()
        wake = now + call.entry.idle if call.waiting else call.touched + call.entry.idle
        call.timer = self.loop.call_at(min(wake, call.deadline), self._tick, call)

    def _tick(self, call: Call) -> None:
        now = self.loop.time()
        if now >= call.deadline:
            self._time_out(call, f"took longer than {call.entry.total:g} s")
        elif not call.waiting and now - call.touched >= call.entry.idle:
            self._time_out(call, f"gave no sign of life for {call.entry.idle:g} s")
        else:
            self._arm(call)

    def _time_out(self, call: Call, what: str) -> None:
        log.warning("tool %r %s; given up", call.name, what)
        self._close(call)
        call.stop()
        self._reply(call, self._refusal(call.revision, call.id, Refused(Kind.TIMEOUT, f"The tool {call.name} {what}.")))

    def _give_up(self, known: Call | Subscription) -> None:
        """The peer does not want the answer any more: stop, and say nothing."""
        if isinstance(known, Call):
            self._close(known)
            known.stop()
            if known.reply is not None:
                known.reply(None)
        else:
            del self.connection.in_flight[known.id]

    def _close(self, call: Call) -> None:
        self.connection.in_flight.pop(call.id, None)
        if call.timer is not None:
            call.timer.cancel()

    # Input asked for by answer and retry

    def _input_required(self, call: Call, needed: NeedInput) -> bytes:
        expires = int(self.engine.clock()) + STATE_SECONDS
        state = self.engine.seal.close(_purpose(call.name, call.arguments), self.principal.id, call.answered, expires)
        result = {"resultType": "input_required", "inputRequests": needed.requests, "requestState": state}
        return self._answer(call.revision, call.id, result)

    def _retried(self, params: Any) -> Object:
        """All answers given so far: those sealed in the state, and those of this round."""
        answers: Object = {} if params.input_responses is UNSET else params.input_responses
        if params.request_state is UNSET:
            return answers
        purpose = _purpose(params.name, params.arguments)
        before = self.engine.seal.open(purpose, self.principal.id, params.request_state, self.engine.clock())
        if type(before) is not dict:
            raise Refused(
                Kind.BAD_PARAMS, "requestState: not ours, not for this call, or too old; call again without it"
            )
        return {**answers, **before}

    # Change notices

    def tools_changed(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens
            self.loop.call_soon_threadsafe(self._announce_soon)

    def _announce_soon(self) -> None:
        if not self._announcing:
            self._announcing = True
            self.loop.call_soon(self._announce)

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

    # The end

    def end_subscriptions(self) -> None:
        """Tell every listener that no more will come: by result, and by notification for those who wait for that."""
        for known in list(self.connection.in_flight.values()):
            if isinstance(known, Subscription):
                del self.connection.in_flight[known.id]
                result = {"resultType": "complete", "_meta": {SUBSCRIPTION: known.id}}
                self.outlet.send(self._answer(known.revision, known.id, result))
                self.outlet.send(jsonrpc.notification(CANCELLED, {"requestId": known.id}))

    async def finish(self, grace: float) -> None:
        """Let calls that were accepted end, for as long as `grace`; then give them up."""
        for waiter in self.connection.asked.values():
            if not waiter.done():
                waiter.set_exception(TransportError("the client has gone"))
        self.end_subscriptions()
        tasks = [known.task for known in self.connection.in_flight.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        self.drop()

    def drop(self) -> None:
        """Give up whatever is still running; the peer hears nothing more."""
        self.engine.peers.discard(self)
        for known in list(self.connection.in_flight.values()):
            self._give_up(known)

    # Answers

    def _answer(self, revision: Revision, ident: Id, result: Object) -> bytes:
        if revision.stamp is not None and self._stamps:
            result = revision.stamp(result, self.engine.identity)
        return jsonrpc.answer(ident, result)

    def _refusal(self, revision: Revision, ident: Id, refused: Refused) -> bytes:
        form = self.engine.forms.get(refused.kind) or revision.faults[refused.kind]
        if form.code:
            return revision.error(ident, form.code, refused)
        result = ToolResult([Text(refused.prefix + refused.text)], is_error=True)
        return self._answer(revision, ident, revision.result(result, False))

    def _unreadable(self, refusal: Refusal) -> bytes:
        voice = self.connection.voice
        code = voice.faults[refusal.kind].code
        return voice.error(refusal.id, code, Refused(refusal.kind, refusal.text))

    def _check_tools(self, method: str) -> None:
        if not self.engine.has_tools:
            raise Refused(Kind.UNKNOWN_METHOD, f"Unknown method: {method}; this server has no tools")


_METHODS: dict[str, Callable[..., bytes | None]] = {
    "initialize": Conversation._initialize,
    "ping": Conversation._ping,
    "logging/setLevel": Conversation._set_level,
    "server/discover": Conversation._discover,
    "tools/list": Conversation._list,
    "tools/call": Conversation._call,
    "subscriptions/listen": Conversation._listen,
}

_canonical = Encoder(order="sorted").encode

# In a batch: the answer will come, and is waited for.
_LATER = b""


class _Batch:
    """Collects the answers to one batch; sends them together when the last is there."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._answers: list[bytes] = []
        self._open = 0
        self._sealed = False

    def add(self, answer: bytes | None) -> None:
        if answer is _LATER:
            self._open += 1
        elif answer is not None:
            self._answers.append(answer)

    def take(self, answer: bytes | None) -> None:
        """An answer that came later, or the news that none will."""
        self._open -= 1
        self.add(answer)
        if self._sealed and not self._open and self._answers:
            self._send(self._whole())

    def seal(self) -> bytes | None:
        self._sealed = True
        return self._whole() if self._answers and not self._open else None

    def _whole(self) -> bytes:
        return b"[" + b",".join(self._answers) + b"]"


def _drive(coroutine: Coroutine[Any, Any, ToolResult]) -> ToolResult:
    """Run a coroutine that never waits."""
    try:
        copy_context().run(coroutine.send, None)
    except StopIteration as end:
        result: ToolResult = end.value
        return result
    raise RuntimeError("an inline tool cannot wait")


def _purpose(name: str, arguments: Object) -> str:
    """What a request state is good for: this call, with these arguments."""
    canonical = _canonical([name, arguments])
    return f"tools/call {blake2b(canonical, digest_size=16).hexdigest()}"
