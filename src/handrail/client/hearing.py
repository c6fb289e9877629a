"""What arrives from a server, and the clocks of what has not: every request settles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from msgspec import UNSET

from handrail import jsonrpc
from handrail.client.inflight import InFlightRequest, Log, Progress, format_progress
from handrail.errors import CallTimeout, PeerError, RemoteProtocolError, Sent, TransportError
from handrail.jsonrpc import Id, InvalidMessage, Message, Notification, Request, Response, decode_response, encode, read
from handrail.model import Json, Object
from handrail.protocol.connection import CANCELLED
from handrail.revisions import Revision
from handrail.revisions.base import SUBSCRIPTION
from handrail.text.controls import one_line
from handrail.transports.base import ClientTransport, PendingRequest

log = logging.getLogger("handrail")

FOREVER = float("inf")
MAX_BATCH = 1_000  # messages in one answer
MAX_SERVER_REQUESTS = 32  # of the server's, being answered at once
_LIST_CHANGED = "notifications/tools/list_changed"
_ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
LISTEN = "subscriptions/listen"
_UNKNOWN_METHOD = -32601


class ConnectionHandler(Protocol):
    """Whoever has the dialog: answers the server's questions, and hears of what it says unasked."""

    capabilities: Object

    async def handle_request(self, method: str, params: Object, revision: Revision) -> Json: ...
    def on_tools_changed(self) -> None: ...
    def on_log_message(self, entry: Log) -> None: ...


class ConnectionReceiver:
    """The half of a dialog that listens. To a transport it is the `MessageHandler`."""

    revision: Revision | None = None
    transport: ClientTransport | None = None

    def __init__(self, name: str, host: ConnectionHandler, tap: Callable[[str, bytes], None] | None) -> None:
        self.name = name
        self.host = host
        self.tap = tap  # sees every message: ">" is ours, "<" the server's
        self.discard_reasons: list[str] = []  # the last things that came and were no messages
        self.failure: PeerError | None = TransportError("not connected")
        self.failure_times: list[float] = []
        self._pending: dict[Id, InFlightRequest] = {}
        self._response_tasks: dict[Id, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = FOREVER  # when it fires
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time

    def on_message(self, message: bytes | bytearray, request: PendingRequest | None = None) -> None:
        if self.tap is not None:
            self._tap_message("<", message)
        incoming = decode_response(message)
        if type(incoming) is Response and type(incoming.result) is dict:  # the usual case, in a short way
            pending = self._pending.pop(incoming.id, None)
            if pending is not None and not pending.future.done():
                pending.future.set_result(incoming.result)
                return
        if isinstance(incoming, list):
            for each in incoming[:MAX_BATCH]:
                self._dispatch(read(each), request)
        elif isinstance(incoming, InvalidMessage) and request is None:
            self._on_unreadable(incoming, message)
        else:
            self._dispatch(incoming, request)

    def on_activity(self, request: PendingRequest | None = None) -> None:
        now = self.now()
        for pending in self._pending.values() if request is None else (request,):
            if isinstance(pending, InFlightRequest):
                self._mark_active(pending, now)

    def _mark_active(self, pending: InFlightRequest, now: float) -> None:
        """From the first sign of life another clock counts, which may be the shorter one."""
        pending.last_activity = now
        if not pending.has_activity and not pending.future.done():
            pending.has_activity = True
            pending.check_at = min(pending.check_at, now + pending.clocks.idle)
            if pending.check_at < self._timer_at:
                self._set_timer(pending.check_at)

    def on_failure(self, problem: PeerError, request: PendingRequest | None = None) -> None:
        if request is not None:
            self._fail(request, problem)
            return
        if self.failure is None:
            self.failure = problem
            self.failure_times.append(self.now())
        for pending in list(self._pending.values()):
            self._fail(pending, TransportError(problem.text, sent=pending.sent, hint=problem.hint))

    def on_discarded(self, why: str, *, too_long: bool = False) -> None:
        self.discard_reasons = [*self.discard_reasons[-9:], why]
        log.debug("%s: skipped %s", self.name, why)
        if too_long and (pending := self._only_pending()):  # of several, nobody can say whose it was
            self._fail(pending, RemoteProtocolError(f"the answer is too long: {why}", sent=Sent.UNKNOWN))

    def _only_pending(self) -> InFlightRequest | None:
        """The one request that waits for an answer, if it is one; a subscription does not."""
        waiting = [each for each in self._pending.values() if each.method != LISTEN]
        return waiting[0] if len(waiting) == 1 else None

    def _dispatch(self, message: Message, about: PendingRequest | None) -> None:
        if isinstance(message, Response):
            self._on_response(message, about)
        elif isinstance(message, Notification):
            self._on_notification(message, about)
        elif isinstance(message, Request):
            self._on_request(message, about)
        elif about is not None:
            sent = Sent.UNKNOWN if message.id is UNSET else Sent.FAILED  # perhaps it comes from a proxy
            self._fail(about, RemoteProtocolError(f"the answer is not a message: {message.text}", sent=sent))
        else:
            self.on_discarded(f"what is not a message: {message.text}")

    def _on_unreadable(self, refusal: InvalidMessage, message: bytes | bytearray) -> None:
        """Something that came on a pipe cannot be read. Whoever waits for just that is told now, not by its clock."""
        pending, sent = self._pending.get(refusal.id) if refusal.id is not UNSET else None, Sent.FAILED
        if refusal.id is UNSET:
            pending, sent = self._only_pending(), Sent.UNKNOWN
        # A line of a log may have an id too, and a question of the server's one that is also ours.
        if pending is not None and b'"jsonrpc"' in message and b'"method"' not in message:
            self._fail(pending, RemoteProtocolError(f"the answer is not a message: {refusal.text}", sent=sent))
        else:
            self.on_discarded(f"what is not a message: {refusal.text}")

    def _on_response(self, message: Response, about: PendingRequest | None) -> None:
        pending: PendingRequest | None = self._pending.get(message.id)
        if pending is None and message.id == "" and message.error is not UNSET:  # about what could not be read
            pending = about or self._only_pending()
        if pending is None:
            if about is not None:
                self._fail(about, RemoteProtocolError(f"answered with the id {message.id!r}, not {about.id!r}"))
        elif message.error is not UNSET:
            self._fail(pending, _error(message.error))
        elif type(message.result) is not dict:
            self._fail(pending, RemoteProtocolError("the result is not an object"))
        elif not pending.future.done():
            self._pending.pop(pending.id, None)
            pending.future.set_result(message.result)

    def _on_notification(self, message: Notification, about: PendingRequest | None) -> None:
        params = message.params
        if message.method == "notifications/progress":
            token = params.get("progressToken")
            pending = self._pending.get(token) if type(token) is int else None
            progress = None if pending is None else Progress.read(params)
            if pending is not None and progress is not None:
                self._mark_active(pending, self.now())
                pending.progress = progress
                self._emit_event(pending, progress)
        elif message.method == "notifications/message":
            entry = Log(str(params.get("level", "info")), params.get("data"), str(params.get("logger", "")))
            about = about or self._only_pending()  # on a pipe nothing says whose it is
            if about is not None:
                self.on_activity(about)
                self._emit_event(about, entry)
            self.host.on_log_message(entry)
        elif message.method == _LIST_CHANGED:
            self.host.on_tools_changed()
        elif message.method == _ACKNOWLEDGED:
            self._on_subscription_acknowledged(params)
        elif message.method == CANCELLED:
            request_id = params.get("requestId")
            task = self._response_tasks.get(request_id) if isinstance(request_id, int | str) else None
            subscription = self._pending.get(request_id) if type(request_id) is int else None
            if task is not None:
                task.cancel()
            elif subscription is not None and subscription.method == LISTEN:
                self._fail(subscription, TransportError("the server ended the subscription"))

    def _on_subscription_acknowledged(self, params: Object) -> None:
        """From now on we are told of changes; of those between the last list and now we were not."""
        meta = params.get("_meta")
        subscription_id = meta.get(SUBSCRIPTION) if type(meta) is dict else None
        pending = self._pending.get(subscription_id) if type(subscription_id) is int else None
        filters = params.get("notifications")
        if pending is None:
            return
        self.on_activity(pending)
        self.host.on_tools_changed()
        if type(filters) is not dict or filters.get("toolsListChanged") is not True:
            log.warning("%s: says that its tools change, and does not say when", self.name)

    def _emit_event(self, pending: PendingRequest | None, event: Progress | Log) -> None:
        if not isinstance(pending, InFlightRequest) or pending.on_event is None:
            return
        try:
            pending.on_event(event)
        except Exception:
            log.exception("%s: whoever watches the call failed, and is not told any more", self.name)
            pending.on_event = None

    def _on_request(self, request: Request, about: PendingRequest | None) -> None:
        if self.transport is None:  # closed: no reply can be sent, and nothing would cancel the task that makes it
            return
        if about is not None:
            self.on_activity(about)
        if self.revision is not None and self.revision.stateless:
            self.on_discarded(f"a request ({request.method[:60]}), which servers of {self.revision.name} do not send")
        elif request.method == "ping":
            self._reply(jsonrpc.response(request.id, {}))
        elif request.id in self._response_tasks or len(self._response_tasks) >= MAX_SERVER_REQUESTS:
            self._reply(jsonrpc.error(request.id, 429, f"{MAX_SERVER_REQUESTS} questions are being answered already"))
        else:
            task = self._response_tasks[request.id] = self._loop.create_task(self._respond(request))
            task.add_done_callback(lambda _: self._response_tasks.pop(request.id, None))  # also if it never began

    async def _respond(self, request: Request) -> None:
        try:
            if self.revision is None or request.method not in self.revision.input_methods:
                raise RemoteProtocolError(f"Unknown method: {request.method[:100]}", code=_UNKNOWN_METHOD)
            reply = jsonrpc.response(
                request.id, await self.host.handle_request(request.method, request.params, self.revision)
            )
        except RemoteProtocolError as refused:
            reply = jsonrpc.error(request.id, refused.code, refused.text)
        except Exception:
            log.exception("%s: %s could not be answered", self.name, request.method)
            reply = jsonrpc.error(request.id, -32603, "Internal error")
        finally:
            self.on_activity()  # the time it took was ours, not the server's
        self._reply(reply)

    def _reply(self, message: bytes) -> None:
        """Send what is no request."""
        if self.transport is not None:
            self._tap_message(">", message)
            self.transport.send(message, None)

    def _tap_message(self, direction: str, message: bytes | bytearray) -> None:
        if self.tap is not None:
            try:
                self.tap(direction, bytes(message))
            except Exception:
                log.exception("%s: the tap failed, and is not called again", self.name)
                self.tap = None

    def cancel_request(self, pending: PendingRequest, why: str = "the caller does not wait any longer") -> None:
        """Nobody waits any more: the server is told in the way of its revision."""
        self._pending.pop(pending.id, None)
        transport, revision = self.transport, self.revision
        if transport is None or revision is None:
            return
        by_disconnect = revision.stateless and transport.disconnect_cancels
        if not by_disconnect and CANCELLED in revision.notifications:
            self._reply(jsonrpc.notification(CANCELLED, {"requestId": pending.id, "reason": why}))
        transport.cancel(pending)

    # Clocks

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._on_timer) if when < FOREVER else None
        self._timer_at = when

    def _on_timer(self) -> None:
        """End what has taken too long; look again when the next one would have."""
        self._timer, self._timer_at = None, FOREVER
        now, soonest = self.now(), FOREVER
        for pending in list(self._pending.values()):
            if pending.check_at <= now:
                self._check_timeouts(pending, now)
            if not pending.future.done():
                soonest = min(soonest, pending.check_at)
        self._set_timer(soonest)

    def _check_timeouts(self, pending: InFlightRequest, now: float) -> None:
        clock = "idle" if pending.has_activity else "first"
        if self._response_tasks:  # the server waits for us
            pending.last_activity = now
        seconds = getattr(pending.clocks, clock)
        if now >= pending.total_deadline:
            clock, text = "total", f"not done within {pending.clocks.total:g} s"
        elif now >= pending.last_activity + seconds:
            text = f"nothing was heard for {seconds:g} s"
        else:
            pending.check_at = min(pending.last_activity + seconds, pending.total_deadline)
            return
        progress_text = (
            "" if pending.progress is None else f"; progress had reached {format_progress(pending.progress)}"
        )
        hint = f"The clock is Clocks({clock}=…)"
        problem = CallTimeout(
            text + progress_text, clock=clock, progress=pending.progress, sent=pending.sent, hint=hint
        )
        self._fail(pending, problem)
        self.cancel_request(pending, f"time-out: {text}")

    def _fail(self, pending: PendingRequest, problem: PeerError) -> None:
        self._pending.pop(pending.id, None)
        if not pending.future.done():
            pending.future.set_exception(self.add_context(problem, pending.method))
            pending.future.exception()  # seen: whoever waits gets it all the same

    def add_context(self, problem: PeerError, phase: str) -> PeerError:
        """The problem, with where and in what it came up, unless it says that already."""
        problem.server, problem.phase = problem.server or self.name, problem.phase or phase
        return problem


def _error(error: Json) -> RemoteProtocolError:
    if flaw := jsonrpc.error_problem(error):
        return RemoteProtocolError(f"answered with {flaw}: {one_line(encode(error).decode(), 200)}")
    code, text, data = error["code"], error["message"], error.get("data")
    if type(data) is dict and type(data.get("reason")) is str:  # the first draft says there what is wrong
        text = f"{text}: {data['reason']}"
    return RemoteProtocolError(text, code=code, data=data)
