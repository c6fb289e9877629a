"""One HTTP request of the endpoint and its response: JSON if the reply is all there is to send, else events."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from functools import partial
from random import uniform
from typing import TYPE_CHECKING, Any, Protocol

from handrail.engine.core import Engine, Limits
from handrail.engine.dispatcher import Dispatcher
from handrail.engine.http_sessions import END, EventLog, HttpSession, HttpSessions
from handrail.engine.reply_channel import NO_REPLY, Reply
from handrail.errors import Kind, Refused
from handrail.guards.identity import Verifier
from handrail.jsonrpc import Message
from handrail.model import Json, Principal
from handrail.protocol import framing as sse, http_rules as http
from handrail.protocol.connection import Connection
from handrail.protocol.http_rules import ORIGIN, PROTOCOL, Headers, base_url
from handrail.protocol.trace import NO_TRACE, trace_headers
from handrail.stores import StoreError
from handrail.transports.http.forwarding import HEADER, STOPPING, Forwarder

if TYPE_CHECKING:
    from handrail.transports.http1.request import RequestResponseCycle

log = logging.getLogger("handrail")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Fields = list[tuple[bytes, bytes]]
WholeResponse = tuple[int, Fields, bytes]  # status, headers, body

KEEP_ALIVE_SECONDS = 15.0
WATCH_DELAY_SECONDS = 0.05  # a call that takes longer gets a task, which watches for its client to disconnect
RETRY_MS = 1_000
_HIDDEN_HEADERS = frozenset({b"authorization", HEADER})  # a tool must not see them
_YIELD_BYTES = 64 * 1024  # unsent; beyond, a sender lets other calls run

JSON: Fields = [(b"content-type", b"application/json")]
_TEXT: Fields = [(b"content-type", b"text/plain; charset=utf-8")]
_EVENTS: Fields = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
METADATA_PATH = "/.well-known/oauth-protected-resource"
RATE_LIMIT_PAUSE_SECONDS = (0.1, 0.4)
"""Delay before a 429, so that a flooding client is slowed. Random, so that clients do not retry together."""


class Stoppable(Protocol):
    """The endpoint, as a stream sees it."""

    stopping: bool


class ReplyStream:
    """The reply channel of one HTTP request: messages wait here until they are written as events."""

    reply = NO_REPLY  # the last message, when the stream has ended
    ended = False  # no more will come
    disconnected = False  # the client reads nothing any more
    resumable = False  # the client may resume the stream
    two_way = True  # the client accepts events, and so more than the reply
    paused = False  # the client is to resume the stream for the rest
    on_update: Callable[[], None] | None = None  # is called in place of waking the writer
    _unsent_bytes = 0
    _has_update = False
    _wakeup: asyncio.Future[None] | None = None
    _room: asyncio.Event | None = None
    _disconnected: asyncio.Future[None] | None = None

    def __init__(self, limits: Limits, endpoint: Stoppable | None = None) -> None:
        self._limits = limits
        self._endpoint = endpoint
        self.unsent: list[bytes] = []

    @property
    def stopping(self) -> bool:
        return self._endpoint is not None and self._endpoint.stopping

    def send(self, message: bytes) -> None:
        if self.ended or not self.two_way or (self.disconnected and not self.resumable):
            return
        self.unsent.append(message)
        self._unsent_bytes += len(message)
        self.notify()

    async def drain(self) -> None:
        if self.disconnected or self._unsent_bytes > _YIELD_BYTES:
            await asyncio.sleep(0)  # a tool that sends without end must not hold the event loop
        while (
            self._unsent_bytes > self._limits.max_unsent_bytes
            and (self.resumable or not self.disconnected)
            and not self.ended
        ):
            self._room = self._room or asyncio.Event()
            await self._room.wait()

    def take_unsent(self) -> list[bytes]:
        """Return the messages that were queued since the last time."""
        messages, self.unsent = self.unsent, []
        self._unsent_bytes = 0
        self._make_room()
        return messages

    def finish(self, reply: Reply = NO_REPLY) -> None:
        """End with the reply to the request; a second reply is dropped."""
        if self.ended:
            return
        self.reply = reply
        self.ended = True
        self._make_room()
        self.notify()

    def pause(self) -> None:
        self.paused = True
        self.notify()

    def disconnect(self) -> None:
        self.disconnected = True
        _wake(self._disconnected)
        self._make_room()
        self.notify()

    async def wait(self, seconds: float) -> bool:
        """Wait for a message, the reply or a disconnect; return whether one came. One task may wait at a time."""
        if not self._has_update:
            loop = asyncio.get_running_loop()
            self._wakeup = wakeup = loop.create_future()
            timer = loop.call_later(seconds, _wake, wakeup)
            try:
                await wakeup
            finally:
                timer.cancel()
                self._wakeup = None
        had_update, self._has_update = self._has_update, False
        return had_update

    def notify(self) -> None:
        """Wake the writer of the stream."""
        if self.on_update is not None:
            self.on_update()
        else:
            self._has_update = True
            _wake(self._wakeup)

    def disconnect_future(self) -> asyncio.Future[None]:
        """Return a future that is done when the client disconnects."""
        self._disconnected = future = asyncio.get_running_loop().create_future()
        if self.disconnected:
            future.set_result(None)
        return future

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class HttpResponse:
    """The response to one HTTP request. After the client has disconnected, writing does nothing."""

    whole: WholeResponse | None = None  # is written when the request is left
    is_begun = False  # in parts

    def __init__(
        self, receive: Receive, send: Send, headers: Headers, limits: Limits, endpoint: Stoppable | None = None
    ) -> None:
        self.stream = ReplyStream(limits, endpoint)
        self._request_headers = headers
        self._write_seconds = limits.write_seconds
        self._send = send
        self.receive = receive

    def respond(self, status: int, fields: Fields, body: bytes) -> WholeResponse:
        """Set the whole response; it is written when the request is left."""
        self.whole = whole = (status, self._shared(fields) if ORIGIN in self._request_headers else fields, body)
        return whole

    def respond_text(self, status: int, text: str, fields: Fields | None = None) -> None:
        self.respond(status, _TEXT + (fields or []), text.encode())

    def _shared(self, fields: Fields) -> Fields:
        """Add the fields that let an allowed web page read the response."""
        exposed = (b"access-control-expose-headers", b"mcp-session-id, www-authenticate")
        return [(b"access-control-allow-origin", self._request_headers[ORIGIN]), (b"vary", b"origin"), exposed, *fields]

    @property
    def is_rate_limited(self) -> bool:
        return self.whole is not None and self.whole[0] == 429

    async def write_response(self) -> None:
        """Write the whole response, if there is one."""
        if self.whole is not None:
            status, fields, body = self.whole
            if status != 204:
                fields = [*fields, (b"content-length", b"%d" % len(body))]
            start = {"type": "http.response.start", "status": status, "headers": fields}
            await self._send_messages(start, {"type": "http.response.body", "body": body})

    async def begin_events(self, first: bytes = b"", fields: Fields | None = None) -> None:
        fields = _EVENTS + (fields or [])
        await self.begin(self._shared(fields) if ORIGIN in self._request_headers else fields)
        if first:
            await self.write(first)

    async def begin(self, fields: Fields) -> None:
        await self.begin_with(200, fields)

    async def begin_with(self, status: int, fields: Fields) -> None:
        self.is_begun = True
        await self._send_messages({"type": "http.response.start", "status": status, "headers": fields})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._send_messages({"type": "http.response.body", "body": data, "more_body": more})

    async def _send_messages(self, *messages: MutableMapping[str, Any]) -> None:
        if self.stream.disconnected:
            return
        try:
            async with asyncio.timeout(self._write_seconds):
                for message in messages:
                    await self._send(message)
        except (TimeoutError, OSError):
            self.stream.disconnect()

    async def wait_disconnected(self) -> None:
        """Wait until the client disconnects."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.stream.disconnect()

    async def events(self, log: EventLog | None, *, name: str = "", outlives: float = 0.0) -> None:
        """Write the messages of the stream as events, to its end.

        A log keeps them; after a disconnect, for `outlives` seconds more.
        """
        loop, stream = asyncio.get_running_loop(), self.stream
        stream.resumable = log is not None
        end: float | None = None
        while True:
            ended = stream.ended  # a message that comes during the write is for the next turn
            last = [stream.reply.body] if ended and stream.reply.body else []
            for message in stream.take_unsent() + last:
                event_id = "" if log is None else await log.add(message)
                await self.write(sse.encode_event(message, event_id=event_id, name=name))
            if ended:
                break
            if stream.paused and log is not None and not stream.disconnected:
                await self.write(b"", more=False)
                self.stream.disconnect()
            if stream.disconnected and end is None:
                end = loop.time() + outlives
            seconds = KEEP_ALIVE_SECONDS if end is None else min(KEEP_ALIVE_SECONDS, end - loop.time())
            if seconds <= 0:
                break
            if not await stream.wait(seconds):
                await self.write(sse.KEEP_ALIVE)
        if log is not None and outlives == math.inf:
            await log.add(END)
        await self.write(b"", more=False)


class DeferredReplies:
    """The deferred requests of one endpoint, the oldest first. One timer serves all of them."""

    def __init__(self) -> None:
        self.due: dict[Exchange, float] = {}  # when each request gets a task
        self._timer_active = False

    def add(self, exchange: Exchange, resume: Callable[[Exchange], None], loop: asyncio.AbstractEventLoop) -> None:
        """Call `resume` when the stream of the exchange has a message or its reply, or when it is due."""
        exchange.stream.on_update = partial(self._resume, exchange, resume)
        self.due[exchange] = due = loop.time() + WATCH_DELAY_SECONDS
        if not self._timer_active:
            self._timer_active = True
            loop.call_at(due, self._on_timer, loop)

    def _resume(self, exchange: Exchange, resume: Callable[[Exchange], None]) -> None:
        exchange.stream.on_update = None
        del self.due[exchange]
        resume(exchange)

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer_active, now = False, loop.time()
        for exchange, due in list(self.due.items()):
            if due > now:  # few requests are still here when they are due
                self._timer_active = True
                loop.call_at(due, self._on_timer, loop)
                break
            exchange.stream.notify()


class EndpointState:
    """What the requests of one endpoint share."""

    sessions: HttpSessions
    stopping = False

    def __init__(self, engine: Engine, path: str, auth: Verifier | None, *, legacy_stateless: bool) -> None:
        self.engine = engine
        self.path = path
        self.auth = auth
        self.legacy_stateless = legacy_stateless
        self.sse_streams: dict[str, Dispatcher] = {}  # of the transport of 2024, by the id in their address
        self.open: set[Exchange] = set()  # requests that were not answered at once
        self.tasks: set[asyncio.Task[None]] = set()  # of those, the work that outlives its request
        self.calls: Counter[str] = Counter()  # of those, by principal
        self.deferred = DeferredReplies()
        self.forwarder = Forwarder(engine)

    def challenge(self, exchange: Exchange) -> dict[str, str]:
        """Return the parts of a `WWW-Authenticate` header."""
        parts = {"error": "invalid_token"} if http.bearer(exchange.headers) else {}
        if self.auth is not None and self.auth.metadata is not None:
            parts["resource_metadata"] = f"{exchange.base_url}{METADATA_PATH}{self.path}"
        return parts

    def conversations(self) -> list[Dispatcher]:
        return [each.conversation for each in self.open if each.conversation is not None]

    def end_session(self, connection: Connection) -> None:
        """Cancel the calls and end the streams of a session."""
        for exchange in list(self.open):
            if exchange.conversation is not None and exchange.conversation.connection is connection:
                exchange.conversation.cancel_all()
                exchange.stream.finish()


class Exchange:
    """One HTTP request: its head, its message, the conversation it belongs to, and its response."""

    conversation: Dispatcher | None = None  # from the moment the caller is known until the reply
    connection: Connection | None = None  # of that conversation
    principal: Principal
    message: Message | list[Json] | None = None
    raw = b""  # the message as it came
    session: HttpSession | None = None  # of a message; without a name for a client that has none
    wants_json = True
    task: asyncio.Task[Any] | None = None  # in which the response is written, if that takes a while
    cycle: RequestResponseCycle | None = None  # of the own listener, which takes a response at any time
    handler: Callable[[Exchange], Awaitable[None]] | None = None  # of a request that is no message
    is_placed = False  # in the replica that has the upstream process of its caller
    forwarded_for: str | None = None  # the address of the client, if another replica passed the request on
    forwarded_digest = ""  # of the message that it passed on
    _disconnect_task: asyncio.Task[None] | None = None

    def __init__(self, endpoint: EndpointState, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        self.endpoint = endpoint
        self.scope = scope
        self.headers = headers
        self.response = response = HttpResponse(receive, send, headers, endpoint.engine.limits, endpoint)
        self.stream = response.stream

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def base_url(self) -> str:
        """The address of the server, as the client knows it."""
        return base_url(self.scope, self.headers)

    @property
    def peer(self) -> str:
        """The address of the client, as the listener knows it, or as another replica that passed the request on."""
        if self.forwarded_for is not None:
            return self.forwarded_for
        client = self.scope.get("client")
        return str(client[0]) if client else "unix"

    @property
    def caller(self) -> str:
        """Who has one allowance, whatever the session."""
        return f"{self.principal.id} {self.peer}"

    def start_conversation(self, connection: Connection | None = None) -> Dispatcher:
        """Return a dispatcher for the message, in a session or in a conversation of its own."""
        endpoint = self.endpoint
        self.conversation = conversation = Dispatcher(endpoint.engine, self.stream, self.principal, connection)
        self.connection = conversation.connection
        conversation.address, conversation.raw_message = self.peer, self.raw
        conversation.is_identified = endpoint.auth is not None
        conversation.headers = headers = self.headers
        scope = self.scope  # it has the token of the caller, which no tool may see
        conversation.reached_at = scope.get("scheme", "http"), scope.get("root_path", "")
        conversation.path = endpoint.path
        conversation.trace_headers = trace_headers(headers) if b"traceparent" in headers else NO_TRACE
        if b"authorization" in headers or HEADER in headers:
            conversation.headers = {name: headers[name] for name in headers if name not in _HIDDEN_HEADERS}
        return conversation

    def check_session(self, session: HttpSession | None) -> HttpSession:
        """Return the session if it exists and speaks the revision that the header names."""
        if session is None:
            raise Refused(Kind.NO_SESSION, "Session not found: begin again with initialize")
        version = self.headers.get(PROTOCOL)
        if version is not None and version != session.version:
            text = f"MCP-Protocol-Version {version[:50].decode('latin-1')!r}: this session speaks "
            raise Refused(Kind.INVALID_REQUEST, text + session.connection.fallback_revision.name)
        return session

    def respond_stopping(self) -> None:
        fields = [] if self.forwarded_for is None else [(HEADER, STOPPING)]
        self.response.respond_text(503, "The server is stopping", [(b"retry-after", b"1"), *fields])

    def respond_store_failed(self, problem: StoreError) -> None:
        log.error("http: %s not done, the store failed: %s", self.scope["method"], problem)
        if not self.response.is_begun:
            text = "What the processes of this server share cannot be reached; the server's log says why"
            self.response.respond_text(503, text, [(b"retry-after", b"1")])

    def open_event_log(self, session: HttpSession | None, kind: str = "") -> tuple[EventLog | None, bytes]:
        """Return the log that keeps the events of a stream in a session, and the first bytes of the stream."""
        first = b"" if self.stream.unsent else sse.KEEP_ALIVE  # so that the head is sent
        if session is None or not session.name:
            return None, first
        log = EventLog(self.endpoint.sessions.store, session, kind + secrets.token_urlsafe(9))
        if session.connection.fallback_revision.priming_event:
            first = sse.encode_event(b"", event_id=log.event_id(0), retry_ms=RETRY_MS)
        return log, first

    async def run_detached(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that continues when the client disconnects; the request ends then."""
        self.task = task = asyncio.create_task(work)
        self.endpoint.tasks.add(task)
        task.add_done_callback(self.endpoint.tasks.discard)
        disconnected = self.stream.disconnect_future()
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()

    def watch_disconnect(self, then: Callable[[], None] | None = None) -> None:
        """Watch for the client to disconnect, until `release`."""

        async def watch() -> None:
            await self.response.wait_disconnected()
            if then is not None:
                then()

        self._disconnect_task = asyncio.create_task(watch())

    def release(self) -> None:
        """Forget the request, which has its response or needs none."""
        self.endpoint.open.discard(self)
        self.conversation = None
        if self._disconnect_task is not None:
            self._disconnect_task.cancel()

    async def complete(self, work: Coroutine[Any, Any, None] | None) -> None:
        """Do the rest of the work for the request, and write its response."""
        if work is not None:
            try:
                await work
            except StoreError as problem:
                self.respond_store_failed(problem)
        if self not in self.endpoint.open:  # else its call continues without the client
            self.conversation = None
        if self.response.is_rate_limited:
            await asyncio.sleep(uniform(*RATE_LIMIT_PAUSE_SECONDS))
        await self.response.write_response()
