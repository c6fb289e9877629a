"""The connection to one server: transport, revision, requests in flight, and what the server sends.

Every request ends in a result, an error or a timeout. Nothing here knows tools, resources or prompts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, Protocol

from msgspec import UNSET

from handrail import jsonrpc
from handrail.client.inflight import (
    FOREVER,
    LISTEN,
    Clocks,
    InFlightRequest,
    Log,
    PendingRequests,
    Progress,
    add_context,
    deadline_at,
)
from handrail.client.mcp_config import ServerTarget
from handrail.client.negotiation import Negotiation
from handrail.errors import CallTimeout, HttpRefused, PeerError, RemoteProtocolError, Sent, TransportError
from handrail.jsonrpc import Id, InvalidMessage, Message, Notification, Request, Response, decode_response, encode, read
from handrail.model import Json, Object
from handrail.protocol.connection import CANCELLED
from handrail.protocol.http_rules import mirrored_headers
from handrail.revisions import Revision
from handrail.revisions.base import CAPABILITIES, CLIENT_INFO, SUBSCRIPTION, VERSION
from handrail.text.controls import one_line
from handrail.transports.base import ClientTransport, PendingRequest

log = logging.getLogger("handrail")

MAX_BATCH = 1_000  # messages in one batch
MAX_SERVER_REQUESTS = 32  # requests of the server in work at once
MAX_DISCARD_REASONS = 10
RESTARTS = 3  # within a minute without a pause; the pause then doubles up to `max_pause`
MAX_PAUSE_SECONDS = 30.0
_LIST_CHANGED = {f"notifications/{each}/list_changed": each for each in ("tools", "resources", "prompts")}
UPDATED = "notifications/resources/updated"
PAGE_COMPLETED = "notifications/elicitation/complete"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
_UNKNOWN_METHOD = -32601

Tap = Callable[[str, bytes], None]


class ConnectionHandler(Protocol):
    """The owner of a connection: answers the server's requests and gets its notifications."""

    capabilities: Object

    async def handle_request(self, method: str, params: Object, revision: Revision) -> Json: ...
    def on_list_changed(self, capability: str = "") -> None:
        """Handle a change of the tools, resources or prompts; perhaps of all where none is named."""

    def on_log_message(self, entry: Log) -> None: ...
    def on_page_completed(self, identifier: str) -> None:
        """Handle the end of what a user did on a page that the server had asked to open."""


class ClientConnection:
    """One server over one transport at a time; the next request after a failure opens a new transport.

    To the transport it is the `MessageHandler`.
    """

    def __init__(
        self,
        target: ServerTarget,
        handler: ConnectionHandler,
        *,
        clocks: Clocks,
        revision: str,
        client_info: Object,
        tap: Tap | None = None,
        max_pause: float = MAX_PAUSE_SECONDS,
    ) -> None:
        self.name = target.name
        self.handler = handler
        self.clocks = clocks
        self.client_info = client_info
        self.negotiation = Negotiation(self, revision, target.key)
        self.revision: Revision | None = None
        self.transport: ClientTransport | None = None
        self.handshake_result: Object = {}
        self.failure: PeerError | None = TransportError("not connected")
        self.discard_reasons: list[str] = []  # the last ones, oldest first
        self._make_transport = target.make_transport
        self._tap = None if tap is None else _guarded_tap(target.name, tap)
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self._server_requests = ServerRequests(self)
        self._pending = PendingRequests(self.name, self._server_requests.is_busy, self.cancel_request)
        self.subscription = ListSubscription(self)
        self.subscribing = asyncio.Lock()  # of resources/subscribe and unsubscribe: none overtakes another
        self.watches: dict[Callable[[Notification | None], None], str] = {}
        """URIs by what gets each update of a resource, and None where subscriptions of the session may be lost."""
        self._backoff = RestartBackoff(self.name, self.now, max_pause)
        self._last_id = 0
        self._request_meta: Object = {}
        self._opener: asyncio.Task[None] | None = None  # shared by all tasks that wait for the connection
        self._closing_tasks: set[asyncio.Task[None]] = set()  # of earlier transports
        self.is_closed = False

    # Open and close

    @property
    def is_open(self) -> bool:
        return self.failure is None and self._opener is None

    async def open(self) -> None:
        """Connect and agree on a revision, unless the connection is open."""
        if not self.is_open:
            await self._open_once(self._connect)

    async def _open_once(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work`, or wait for the opening under way. A task that stops waiting does not cancel it for others."""
        if self.is_closed:
            raise TransportError("the client is closed", server=self.name)
        opener = self._opener
        if opener is None:
            opener = self._opener = self._loop.create_task(self._run_open(work))
            opener.add_done_callback(self._on_open_done)
        await asyncio.wait({opener})
        if opener.cancelled():
            raise TransportError("the client was closed", server=self.name)
        problem = opener.exception()
        if isinstance(problem, PeerError):
            raise _copy_error(problem) from problem
        if problem is not None:
            raise problem

    async def _run_open(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except BaseException as problem:
            if isinstance(problem, PeerError):
                add_context(problem, self.name, "connect")
            self._disconnect(problem if isinstance(problem, PeerError) else TransportError("not connected"))
            raise
        self.subscription.resume()
        self.on_stream()

    def _on_open_done(self, opener: asyncio.Task[None]) -> None:
        self._opener = None
        if not opener.cancelled():
            opener.exception()  # marked as retrieved: perhaps no task waits any more

    async def _connect(self) -> None:
        if self._closing_tasks:
            await asyncio.wait(self._closing_tasks)
        await self._backoff.wait(self.clocks.connect)
        await self.start()
        await self.negotiation.run()

    async def _renew(self) -> None:
        """Initialize again after the session was lost; a server that no longer takes that is asked what it speaks."""
        try:
            await self.negotiation.initialize()
        except RemoteProtocolError as refused:
            if refused.code != _UNKNOWN_METHOD:
                raise
            log.debug("client: %s: there is no initialize any more; connecting anew", self.name)
            await self._connect()

    async def start(self) -> None:
        """Open a new transport in place of the present one."""
        if self.transport is not None:
            await self.transport.close()
        if self.is_closed:
            raise TransportError("the client is closed")
        self.revision, self.failure = None, None
        self.transport = self._make_transport()
        seconds = self.clocks.connect
        try:
            async with asyncio.timeout(seconds):
                await self.transport.open(self)
        except TimeoutError:
            raise CallTimeout(f"no connection within {seconds:g} s", clock="connect") from None

    def use_revision(self, revision: Revision, handshake_result: Object) -> None:
        """Use the revision agreed on for all later messages."""
        self.revision, self.handshake_result = revision, handshake_result
        self._request_meta = self.request_meta(revision)
        if self.transport is None:
            raise TransportError("the client was closed")
        self.transport.set_revision(revision)
        self.handler.on_list_changed()  # another process, or session, may have other lists

    async def close(self) -> None:
        """End the connection; requests in flight fail with TransportError."""
        self.is_closed = True
        if self._opener is not None:
            self._opener.cancel()
        self._disconnect(TransportError("the client was closed"))
        cancellation: asyncio.CancelledError | None = None
        while unfinished := {*self._closing_tasks, *filter(None, [self._opener])}:
            try:
                await asyncio.wait(unfinished)
            except asyncio.CancelledError as cancelled:  # the transport is ended at once instead of gracefully
                cancellation = cancelled
                for task in unfinished:
                    task.cancel()
        if cancellation is not None:
            raise cancellation

    def offers(self, capability: str) -> bool:
        """Whether the server declares a capability."""
        return capability in self.handshake_result.get("capabilities", {})

    def require(self, capability: str) -> None:
        """Refuse, before anything is sent, what the server does not declare."""
        if not self.offers(capability):
            raise RemoteProtocolError(f"the server says that it has no {capability}", sent=Sent.NO)

    def _disconnect(self, problem: PeerError) -> None:
        """Fail all requests and close the transport, in a task of its own since that may take a while."""
        self.on_failure(problem)
        self._pending.schedule(FOREVER)
        tasks = [*self._server_requests.tasks.values(), *self.subscription.stop()]
        for task in tasks:
            task.cancel()
        transport, self.transport = self.transport, None
        if transport is not None or tasks:
            closing = self._loop.create_task(self._close_transport(transport, tasks))
            self._closing_tasks.add(closing)
            closing.add_done_callback(self._closing_tasks.discard)

    async def _close_transport(self, transport: ClientTransport | None, tasks: list[asyncio.Task[None]]) -> None:
        try:
            if transport is not None:
                await transport.close()
        except Exception:
            log.exception("client: %s: transport not closed properly", self.name)
        finally:
            if tasks:
                await asyncio.wait(tasks, timeout=1.0)

    # Send

    def request_meta(self, revision: Revision) -> Object:
        """Return the `_meta` of every request of a stateless revision: version, client info and capabilities."""
        if not revision.stateless:
            return {}
        capabilities = revision.declare(self.handler.capabilities)
        return {VERSION: revision.name, CLIENT_INFO: self.client_info, CAPABILITIES: capabilities}

    async def request(
        self,
        method: str,
        params: Object,
        clocks: Clocks,
        deadline: float,
        *,
        header_map: dict[str, tuple[str, ...]] | None = None,
        on_event: Callable[[Progress | Log], None] | None = None,
        with_progress: bool = False,
        envelope: Object | None = None,
        on_paused: Callable[[], None] | None = None,
    ) -> Object:
        """Send a request and return its result; PeerError says why there is none.

        `deadline` is when its total clock fires. `with_progress` asks the server for progress notifications. `envelope`
        are members of `_meta` in place of this client's own, where the revision has some in every request. `on_paused`
        is called when the server closes the stream of the response, to be asked for the rest later.
        """
        if not self.is_open:
            async with deadline_at(deadline, clocks):
                await self.open()
        handshake_result = self.handshake_result
        pending = self.start_request(
            method,
            params,
            clocks,
            deadline,
            header_map=header_map,
            on_event=on_event,
            with_progress=with_progress,
            envelope=envelope,
            on_paused=on_paused,
        )
        try:
            return await pending.future  # as `result` does, with one coroutine less per call
        except asyncio.CancelledError:
            self.cancel_request(pending)
            raise
        except HttpRefused as error:
            # The session has expired and the server did nothing: initialize again and repeat the request.
            session_expired = error.status == 404 and error.sent is Sent.FAILED
            if not session_expired or self.revision is None or self.revision.stateless:
                raise
        if handshake_result is self.handshake_result:  # else another request has initialized already
            async with deadline_at(deadline, clocks):
                await self._open_once(self._renew if self.failure is None else self._connect)
        pending = self.start_request(
            method,
            params,
            clocks,
            deadline,
            header_map=header_map,
            on_event=on_event,
            with_progress=with_progress,
            envelope=envelope,
            on_paused=on_paused,
        )
        return await self.result(pending)

    def start_request(
        self,
        method: str,
        params: Object,
        clocks: Clocks,
        deadline: float | None = None,
        *,
        revision: Revision | None = None,
        header_map: dict[str, tuple[str, ...]] | None = None,
        on_event: Callable[[Progress | Log], None] | None = None,
        with_progress: bool = False,
        envelope: Object | None = None,
        on_paused: Callable[[], None] | None = None,
    ) -> InFlightRequest:
        """Send a request; await it by `result`."""
        transport, requests = self.transport, self._pending
        if transport is None:
            raise TransportError("the client is closed", server=self.name)
        self._last_id = request_id = self._last_id + 1
        now, future = self.now(), self._loop.create_future()
        deadline, check_at = now + clocks.total if deadline is None else deadline, now + clocks.first
        check_at = check_at if check_at < deadline else deadline
        pending = InFlightRequest(
            request_id,
            method,
            future,
            clocks=clocks,
            last_activity=now,
            check_at=check_at,
            total_deadline=deadline,
            on_event=on_event,
            on_paused=on_paused,
        )
        if self.handler.capabilities:  # the server may send input requests
            pending.context = copy_context()
        wire_revision = revision or self.revision
        if wire_revision is not None and wire_revision.stateless:
            meta: Object = {**self._request_meta} if revision is None else self.request_meta(wire_revision)
            if envelope is not None:
                meta |= envelope
            if transport.disconnect_cancels:
                pending.headers = {
                    "MCP-Protocol-Version": wire_revision.name,
                    **mirrored_headers(method, params, header_map or {}),
                }
        else:
            meta = {}
        if with_progress:
            meta["progressToken"] = request_id
        if meta:
            caller_meta = params.get("_meta")
            params = {**params, "_meta": {**caller_meta, **meta} if caller_meta else meta}
        message = jsonrpc.request(request_id, method, params if params else UNSET)
        requests.by_id[request_id] = pending
        if check_at < requests.next_check:
            requests.schedule(check_at)
        if self._tap is not None:
            self._tap(">", message)
        transport.send(message, pending)
        return pending

    def listen(self, notifications: Object, on_notification: Callable[[Notification], None]) -> InFlightRequest:
        """Open a subscription of a stateless revision, which ends when the server or the transport ends it.

        `on_notification` gets its acknowledgement, and each update of a resource.
        """
        clocks = Clocks(self.clocks.connect, self.clocks.first, FOREVER, FOREVER)
        pending = self.start_request(LISTEN, {"notifications": notifications}, clocks)
        pending.on_notification = on_notification
        return pending

    async def result(self, pending: PendingRequest) -> Object:
        """Wait for the result of a request. Cancelling the waiting task cancels the request at the server."""
        try:
            return await pending.future
        except asyncio.CancelledError:
            self.cancel_request(pending)
            raise

    def discard(self, pending: PendingRequest) -> None:
        """Ignore the response to a request, without cancelling it."""
        self._pending.by_id.pop(pending.id, None)

    def cancel_request(self, pending: PendingRequest, why: str = "the caller does not wait any longer") -> None:
        """Drop a request and tell the server in the way of its revision: a notification, or a disconnect."""
        self.discard(pending)
        transport, revision = self.transport, self.revision
        if transport is None or revision is None:
            return
        by_disconnect = revision.stateless and transport.disconnect_cancels
        if not by_disconnect and CANCELLED in revision.notifications:
            self.send_message(jsonrpc.notification(CANCELLED, {"requestId": pending.id, "reason": why}))
        transport.cancel(pending)

    def context_of(self, token: Json) -> Context | None:
        """Return the context variables of the request in flight that has a progress token."""
        pending = self._pending.by_id.get(token) if type(token) is int else None
        return None if pending is None else pending.context

    def send_message(self, message: bytes) -> None:
        """Send a notification or a response."""
        if self.transport is not None:
            if self._tap is not None:
                self._tap(">", message)
            self.transport.send(message, None)

    # Receive, as the handler of the transport

    def on_message(self, message: bytes | bytearray, request: PendingRequest | None = None) -> None:
        if self._tap is not None:
            self._tap("<", bytes(message))
        incoming = decode_response(message)
        is_own = request is None or (type(incoming) is Response and incoming.id == request.id)
        if is_own and type(incoming) is Response and type(incoming.result) is dict:  # short cut for the usual case
            pending = self._pending.by_id.pop(incoming.id, None)
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
        for pending in self._pending.by_id.values() if request is None else (request,):
            if isinstance(pending, InFlightRequest):
                self._pending.mark_active(pending)

    def on_failure(self, problem: PeerError, request: PendingRequest | None = None) -> None:
        if request is not None:
            self._pending.fail(request, problem)
            return
        if self.failure is None:
            self.failure = problem
            self._backoff.add_failure()
        for pending in list(self._pending.by_id.values()):
            self._pending.fail(pending, TransportError(problem.text, sent=pending.sent, hint=problem.hint))
        self.on_stream()

    def on_stream(self) -> None:
        for watch in self.watches:
            watch(None)

    def on_discarded(self, why: str, *, too_long: bool = False) -> None:
        self.discard_reasons = [*self.discard_reasons[1 - MAX_DISCARD_REASONS :], why]
        log.debug("client: %s: input discarded: %s", self.name, why)
        if too_long and (pending := self._pending.only()):  # with several requests, its request is unknown
            problem = RemoteProtocolError(f"the answer is too long: {why}", sent=Sent.UNKNOWN)
            self._pending.fail(pending, problem)

    def _dispatch(self, message: Message, about: PendingRequest | None) -> None:
        """Handle one message; `about` is the request in answer to which it came, where the transport tells."""
        if isinstance(message, Response):
            self._on_response(message, about)
        elif isinstance(message, Notification):
            self._on_notification(message, about)
        elif isinstance(message, Request):
            if about is not None:
                self.on_activity(about)
            self._server_requests.handle(message, about or self._pending.only())
        elif about is not None:
            sent = Sent.UNKNOWN if message.id is UNSET else Sent.FAILED  # without an id it may come from a proxy
            self._pending.fail(about, RemoteProtocolError(f"the answer is not a message: {message.text}", sent=sent))
        else:
            self.on_discarded(f"what is not a message: {message.text}")

    def _on_unreadable(self, refusal: InvalidMessage, message: bytes | bytearray) -> None:
        """Fail the request that an unreadable message of a pipe answers, at once instead of by its timeout."""
        pending, sent = self._pending.by_id.get(refusal.id) if refusal.id is not UNSET else None, Sent.FAILED
        if refusal.id is UNSET:
            pending, sent = self._pending.only(), Sent.UNKNOWN
        # A line of a log may have an id too, and a request of the server an id that is also in use here.
        if pending is not None and b'"jsonrpc"' in message and b'"method"' not in message:
            self._pending.fail(pending, RemoteProtocolError(f"the answer is not a message: {refusal.text}", sent=sent))
        else:
            self.on_discarded(f"what is not a message: {refusal.text}")

    def _on_response(self, message: Response, about: PendingRequest | None) -> None:
        pending: PendingRequest | None = self._pending.by_id.get(message.id)
        if about is not None and pending is not about:  # the response to one request answers no other
            pending = None
        if pending is None and message.id == "" and message.error is not UNSET:  # the server could not read the request
            pending = about or self._pending.only()
        if pending is None:
            if about is not None:
                problem = RemoteProtocolError(f"answered with the id {message.id!r}, not {about.id!r}")
                self._pending.fail(about, problem)
        elif message.error is not UNSET:
            self._pending.fail(pending, _error(message.error))
        elif type(message.result) is not dict:
            self._pending.fail(pending, RemoteProtocolError("the result is not an object"))
        elif not pending.future.done():
            self.discard(pending)
            pending.future.set_result(message.result)

    def _on_notification(self, message: Notification, about: PendingRequest | None) -> None:
        params = message.params
        if message.method == "notifications/progress":
            token = params.get("progressToken")
            pending = self._pending.by_id.get(token) if type(token) is int else None
            progress = None if pending is None else Progress.read(params)
            if pending is not None and progress is not None:
                self._pending.mark_active(pending)
                pending.progress = progress
                self._pending.emit(pending, progress)
        elif message.method == "notifications/message":
            entry = Log(str(params.get("level", "info")), params.get("data"), str(params.get("logger", "")))
            about = about or self._pending.only()  # a pipe does not tell to which request a message belongs
            if about is not None:
                self.on_activity(about)
                self._pending.emit(about, entry)
            self.handler.on_log_message(entry)
        elif capability := _LIST_CHANGED.get(message.method):
            self.handler.on_list_changed(capability)
        elif message.method in (ACKNOWLEDGED, UPDATED):
            meta = params.get("_meta")
            subscription_id = meta.get(SUBSCRIPTION) if type(meta) is dict else None
            pending = self._pending.by_id.get(subscription_id) if type(subscription_id) is int else None
            if pending is not None and pending.on_notification is not None:
                self.on_activity(pending)
                pending.on_notification(message)
            elif message.method == UPDATED:
                for watch in self.watches:
                    watch(message)
        elif message.method == PAGE_COMPLETED:
            if type(identifier := params.get("elicitationId")) is str:
                self.handler.on_page_completed(identifier)
        elif message.method == CANCELLED:
            request_id = params.get("requestId")
            pending = self._pending.by_id.get(request_id) if type(request_id) is int else None
            is_cancelled = isinstance(request_id, int | str) and self._server_requests.cancel(request_id)
            if not is_cancelled and pending is not None and pending.method == LISTEN:
                self._pending.fail(pending, TransportError("the server ended the subscription"))


class ServerRequests:
    """Requests of the server (ping, elicitation, sampling, roots); a task of its own answers each."""

    def __init__(self, connection: ClientConnection) -> None:
        self.tasks: dict[Id, asyncio.Task[None]] = {}
        self._connection = connection

    def is_busy(self) -> bool:
        return bool(self.tasks)

    def handle(self, request: Request, origin: PendingRequest | None) -> None:
        """Answer a request, in the context variables of the call it belongs to, where that is known."""
        connection, revision = self._connection, self._connection.revision
        if connection.transport is None:  # closed: no response can be sent, and nothing would cancel the task
            return
        if revision is not None and revision.stateless:
            why = f"a request ({request.method[:60]}), which servers of {revision.name} do not send"
            connection.on_discarded(why)
        elif request.method == "ping":
            connection.send_message(jsonrpc.response(request.id, {}))
        elif request.id in self.tasks or len(self.tasks) >= MAX_SERVER_REQUESTS:
            text = f"{MAX_SERVER_REQUESTS} questions are being answered already"
            connection.send_message(jsonrpc.error(request.id, 429, text))
        else:
            context = origin.context if isinstance(origin, InFlightRequest) else None
            context = Context() if context is None else context.copy()
            task = asyncio.create_task(self._respond(request), context=context)
            self.tasks[request.id] = task
            task.add_done_callback(lambda _: self.tasks.pop(request.id, None))  # also if the task never started

    def cancel(self, request_id: Id) -> bool:
        """Cancel the answer to a request; return whether there is such a request."""
        task = self.tasks.get(request_id)
        if task is not None:
            task.cancel()
        return task is not None

    async def _respond(self, request: Request) -> None:
        connection, revision = self._connection, self._connection.revision
        try:
            if revision is None or request.method not in revision.input_methods:
                raise RemoteProtocolError(f"Unknown method: {request.method[:100]}", code=_UNKNOWN_METHOD)
            result = await connection.handler.handle_request(request.method, request.params, revision)
            reply = jsonrpc.response(request.id, result)
        except RemoteProtocolError as refused:
            reply = jsonrpc.error(request.id, refused.code, refused.text)
        except Exception:
            log.exception("client: %s: server request %s failed", connection.name, request.method)
            reply = jsonrpc.error(request.id, -32603, "Internal error")
        finally:
            connection.on_activity()  # the time this took was the client's, not the server's
        connection.send_message(reply)


class ListSubscription:
    """Notifications that lists changed, in revisions where a client has to subscribe to them."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._is_started = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Subscribe to all lists that the server offers, now and after each reconnect."""
        if not self._is_started:
            self._is_started = True
            self.resume()

    def resume(self) -> None:
        """Subscribe again on a new transport, if the subscription was started."""
        revision = self._connection.revision
        is_due = self._is_started and not self.is_running and revision is not None and revision.stateless
        if is_due and self._filter():
            self._task = asyncio.create_task(self._run())

    def is_offered(self, capability: str) -> bool:
        """Whether the server declares that it announces changes of its tools, resources or prompts."""
        offers = self._connection.handshake_result.get("capabilities", {}).get(capability)
        return type(offers) is dict and offers.get("listChanged") is True

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def stop(self) -> list[asyncio.Task[None]]:
        """Return the task to cancel, if there is one."""
        task, self._task = self._task, None
        return [] if task is None else [task]

    def _filter(self) -> Object:
        return {f"{each}ListChanged": True for each in _LIST_CHANGED.values() if self.is_offered(each)}

    def _on_notification(self, message: Notification) -> None:
        """Mark the lists as changed: changes before the acknowledgement were not announced."""
        if message.method != ACKNOWLEDGED:
            return
        filters = message.params.get("notifications")
        self._connection.handler.on_list_changed()
        for name in self._filter():
            if type(filters) is not dict or filters.get(name) is not True:
                log.warning("client: %s: server declares listChanged but does not announce it", self._connection.name)

    async def _run(self) -> None:
        connection, pause = self._connection, 0.5
        while connection.failure is None:
            began = connection.now()
            try:
                await connection.result(connection.listen(self._filter(), self._on_notification))
            except RemoteProtocolError as refused:
                log.debug("client: %s: subscription refused: %s", connection.name, refused)
                return
            except PeerError as problem:
                log.debug("client: %s: subscription ended: %s", connection.name, problem)
            connection.handler.on_list_changed()  # changes until the next subscription are not announced
            pause = 0.5 if connection.now() - began > 60.0 else min(2 * pause, MAX_PAUSE_SECONDS)
            await asyncio.sleep(pause)


class RestartBackoff:
    """Pauses before a server that keeps failing is started again."""

    def __init__(self, server: str, now: Callable[[], float], max_pause: float) -> None:
        self._server = server
        self._now = now
        self._max_pause = max_pause
        self._failure_times: list[float] = []

    def add_failure(self) -> None:
        self._failure_times.append(self._now())

    async def wait(self, most: float) -> None:
        """Wait as long as the failures of the last minute require; TransportError if that is over `most` seconds."""
        now = self._now()
        self._failure_times = [each for each in self._failure_times if now - each < 60.0]
        extra = len(self._failure_times) - RESTARTS
        if extra >= 0:
            seconds = min(2.0**extra, self._max_pause)
            if seconds > most:
                text = f"ended {len(self._failure_times)} times within a minute"
                raise TransportError(text, server=self._server)
            await asyncio.sleep(seconds)


def _guarded_tap(server: str, tap: Tap) -> Tap:
    """Return the tap so that it cannot break the connection: it is not called again after it raised."""
    active: Tap | None = tap

    def call(direction: str, message: bytes) -> None:
        nonlocal active
        if active is not None:
            try:
                active(direction, message)
            except Exception:
                log.exception("client: %s: tap failed and was removed", server)
                active = None

    return call


def _copy_error(problem: PeerError) -> PeerError:
    """Return a copy for another waiting task, which may add context to it."""
    error = type(problem).__new__(type(problem), *problem.args)
    vars(error).update(vars(problem))
    return error


def _error(error: Json) -> RemoteProtocolError:
    if flaw := jsonrpc.error_problem(error):
        return RemoteProtocolError(f"answered with {flaw}: {one_line(encode(error).decode(), 200)}")
    code, text, data = error["code"], error["message"], error.get("data")
    if type(data) is dict and type(data.get("reason")) is str:  # the first draft of the revision has the cause there
        text = f"{text}: {data['reason']}"
    return RemoteProtocolError(text, code=code, data=data)
