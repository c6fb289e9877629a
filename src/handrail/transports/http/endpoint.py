"""The HTTP endpoint: one URL for every revision, as a plain ASGI application.

The body of a request decides who is speaking: it names a stateless revision, or shakes hands, or belongs to a session.
A request is answered as JSON when its answer is all there is to say, and with events as soon as there is more:
progress, a question, or two quiet seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import uniform
from typing import TYPE_CHECKING, Unpack

from msgspec.json import decode as parse

from handrail.engine.core import Engine
from handrail.engine.dispatcher import Dispatcher
from handrail.engine.http_sessions import TOPIC, HttpSessions
from handrail.engine.rejections import RejectionLog
from handrail.engine.reply_channel import NullChannel
from handrail.errors import HandrailError, Refused
from handrail.jsonrpc import encode
from handrail.model import Principal
from handrail.protocol import http_rules as http
from handrail.protocol.connection import Connection
from handrail.protocol.http_rules import Headers, HostOriginCheck
from handrail.stores import Store, StoreError
from handrail.suggest import describe_value, expect
from handrail.transports.http.monitoring import RequestMonitor
from handrail.transports.http.options import EndpointOptions
from handrail.transports.http.post import WATCH_DELAY_SECONDS, Continuation, Exchange, PostHandler
from handrail.transports.http.response import JSON, Fields, Receive, Scope, Send
from handrail.transports.http.streams import DeleteHandler, GetHandler

if TYPE_CHECKING:
    from handrail.transports.http1.request import RequestResponseCycle

log = logging.getLogger("handrail")

ANONYMOUS = Principal("anonymous")
FINAL_WRITE_SECONDS = 0.5
RESUBSCRIBE_SECONDS = 1.0
RATE_LIMIT_PAUSE_SECONDS = (0.1, 0.4)
"""How long whoever comes too often waits to be told so: a flood goes no faster than its answers. Of no fixed length,
else those who were refused together would come back together, and be in everybody's way."""

_PREFLIGHT: Fields = [
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-max-age", b"600"),
]
_METADATA_PATH = "/.well-known/oauth-protected-resource"
_HANDLERS: dict[str, type[Exchange]] = {"GET": GetHandler, "POST": PostHandler, "DELETE": DeleteHandler}


_OPTION_TYPES = {
    "path": ('a text such as "/mcp"', str),
    "metrics_token": ("a text", str),
    "legacy_stateless": ("True or False", bool),
    "access_log": ("True or False", bool),
}


class Endpoint:
    """The ASGI application of one server. All it keeps is about requests that are going on."""

    def __init__(
        self, engine: Engine, store: Store | Callable[[], Store], /, **options: Unpack[EndpointOptions]
    ) -> None:
        for option, (expected, kind) in _OPTION_TYPES.items():
            if options.get(option) is not None:
                expect(f"http: {option}", options.get(option), expected, kind)
        verifier = options.get("auth")
        if verifier is not None and (isinstance(verifier, type) or not callable(getattr(verifier, "verify", None))):
            raise TypeError(f"http: auth: expected a verifier such as ApiKeys({{…}}), got {describe_value(verifier)}")
        self.engine = engine
        self.path = options.get("path", "/mcp").rstrip("/")
        self.host_check = HostOriginCheck(options.get("hosts", ()), options.get("origins", ()))
        if self.host_check.allows_any_host:
            log.warning("http: any Host is answered: web pages can reach this server through names of their own")
        self._handlers = _HANDLERS if engine.offer.handshake else {"POST": PostHandler}
        self.sessions: HttpSessions
        self.legacy_stateless = options.get("legacy_stateless", False)
        self.sse_streams: dict[str, Dispatcher] = {}  # of the transport of 2024, by the id in their address
        self.open: set[Exchange] = set()  # requests that were not answered at once
        self.tasks: set[asyncio.Task[None]] = set()  # of those, what outlives its request
        self.calls: Counter[str] = Counter()  # of those, by principal
        self.pending: dict[PostHandler, float] = {}  # of those, which take no task before that time; the oldest first
        self._timer_active = False
        self.auth = options.get("auth")
        self._rejections = RejectionLog(engine.guard_set)
        self.monitor = RequestMonitor.from_options(engine, options)
        self._store = store
        self._stack: AsyncExitStack | None = None
        self._startup_lock = asyncio.Lock()
        self.stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._lifespan(scope, receive, send)
            return
        if self._stack is None:
            await self.startup()
        if self.monitor is None:
            await self._exchange(scope, receive, send)
        else:
            await self.monitor(self._exchange, scope, receive, send)

    def at_once(self, cycle: RequestResponseCycle, headers: Headers) -> bool:
        """For a listener of ours: take a request that came whole, and see to its answer; False: just call."""
        if self._stack is None or self.monitor is not None:
            return False
        exchange = self._admit(cycle.scope, cycle.receive, cycle.send, headers)
        exchange.cycle = cycle
        work: Continuation = None
        if exchange.response is None:
            if self.auth is not None or type(exchange) is not PostHandler:
                work = self._process(exchange)
            else:
                exchange.principal = ANONYMOUS
                continuation = exchange.accept(bytes(cycle.body))
                if continuation is not None or exchange.is_rate_limited:
                    work = self.complete(exchange, continuation)
        if work is not None:
            cycle.start(work)
        elif exchange.response is not None:
            exchange.detach_conversation()
            cycle.respond(*exchange.response)
        return True

    def add_pending(self, exchange: PostHandler, loop: asyncio.AbstractEventLoop) -> None:
        """Let a request wait for its answer, without a task if that comes soon."""
        self.pending[exchange] = due = loop.time() + WATCH_DELAY_SECONDS
        if not self._timer_active:
            self._timer_active = True
            loop.call_at(due, self._check_pending, loop)

    def _check_pending(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer_active, now = False, loop.time()
        for exchange, due in list(self.pending.items()):
            if due > now:  # there is one timer for all: few are still there when it is their time
                self._timer_active = True
                loop.call_at(due, self._check_pending, loop)
                break
            exchange.notify()

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, duplicate = http.headers_of(scope["headers"])
        await self._process(self._admit(scope, receive, send, headers, duplicate))

    async def _process(self, exchange: Exchange) -> None:
        if exchange.response is None and await self._identify(exchange):
            if self.monitor is not None:
                self.monitor.attach(exchange)
            await exchange.run()
        await self._close_exchange(exchange)

    async def complete(self, exchange: Exchange, continuation: Continuation) -> None:
        """Do what is left to do for a request, and write its answer."""
        if continuation is not None:
            await continuation
        await self._close_exchange(exchange)

    async def _close_exchange(self, exchange: Exchange) -> None:
        if exchange not in self.open:  # else its call goes on without the caller
            exchange.detach_conversation()
        if exchange.is_rate_limited:
            await asyncio.sleep(uniform(*RATE_LIMIT_PAUSE_SECONDS))
        await exchange.write_response()

    def _admit(self, scope: Scope, receive: Receive, send: Send, headers: Headers, duplicate: str = "") -> Exchange:
        """A request that came through the door; what is not to be taken has its answer already."""
        refusal = self.host_check.refusal(scope.get("scheme", "http"), headers)
        if refusal or duplicate:  # and not told what it may read
            exchange = Exchange(self, scope, receive, send, {})
            reason = refusal or f"The header {duplicate} stands twice"
            exchange.respond_text(403 if refusal else 400, reason)
            self._rejections.add(exchange.peer, "forbidden" if refusal else "invalid_request", reason)
            return exchange
        root, path, handler = scope.get("root_path"), scope["path"], self._handlers.get(scope["method"], Exchange)
        exchange = handler(self, scope, receive, send, headers)
        if root:
            path = path.removeprefix(root).rstrip("/") or self.path
        if path != self.path or self.stopping or handler is Exchange:
            self._answer_non_message(exchange, path.rstrip("/"))
        return exchange

    async def _identify(self, exchange: Exchange) -> bool:
        exchange.principal = ANONYMOUS
        if self.auth is not None:
            token = http.bearer(exchange.headers)
            principal = await self.auth.verify(token) if token else None
            if principal is None:
                self._rejections.add(
                    exchange.peer, "unauthenticated", "the token is not valid" if token else "no token"
                )
                try:
                    self.engine.guard_set.charge_request(
                        ANONYMOUS, exchange.peer
                    )  # whoever guesses tokens guesses slowly
                except Refused as refused:
                    exchange.respond_text(429, refused.text, [(b"retry-after", b"%d" % math.ceil(refused.retry_after))])
                    return False
                exchange.respond_text(401, "A valid token is needed", [http.challenge(self.challenge(exchange))])
                return False
            exchange.principal = principal
        return True

    def _answer_non_message(self, exchange: Exchange, path: str) -> None:
        """Answer what is not a message, or not to be taken now."""
        method, metadata = exchange.scope["method"], None if self.auth is None else self.auth.metadata
        if path in ("/healthz", "/readyz"):
            ready = path == "/healthz" or not self.stopping
            exchange.respond_text(200 if ready else 503, "ok" if ready else "stopping")
        elif path == _METADATA_PATH + self.path and metadata is not None:
            exchange.respond(200, JSON, encode({"resource": exchange.base_url + self.path, **metadata}))
        elif path not in (self.path, "/sse"):
            exchange.respond_text(404, "Not found")
        elif method == "OPTIONS":
            allowed = (b"access-control-allow-headers", http.preflight_headers(exchange.headers))
            exchange.respond(204, [*_PREFLIGHT, allowed], b"")
        elif self.stopping:
            exchange.respond_stopping()
        elif method not in self._handlers:
            exchange.respond_text(405, "Method not allowed", [(b"allow", ", ".join(self._handlers).encode())])

    def challenge(self, exchange: Exchange) -> dict[str, str]:
        """What a caller that may not is told of how to get there."""
        parts = {"error": "invalid_token"} if http.bearer(exchange.headers) else {}
        if self.auth is not None and self.auth.metadata is not None:
            parts["resource_metadata"] = f"{exchange.base_url}{_METADATA_PATH}{self.path}"
        return parts

    async def startup(self) -> None:
        """Enter the server's lifespan: by the lifespan of the application around us, or at the first request."""
        async with self._startup_lock:
            if self._stack is not None:
                return
            async with AsyncExitStack() as stack:
                store = self._store
                if callable(store):  # opened here, in the process and the loop that will use it
                    store = store()
                    stack.push_async_callback(store.close)
                if self.auth is not None:
                    stack.push_async_callback(self.auth.close)
                if not self.engine.owner.is_serving:  # else whoever serves it decides when that ends
                    await stack.enter_async_context(self.engine.owner.serving(store=store))
                if self.monitor is not None:
                    await stack.enter_async_context(self.monitor.sharing(store))
                self.sessions = HttpSessions(self.engine, store)
                listener = asyncio.create_task(self._receive_session_messages())
                stack.callback(listener.cancel)
                self._stack = stack.pop_all()

    async def stop(self) -> None:
        """Tell every stream that no more will come, let calls end, and leave the lifespan."""
        self.stopping = True
        conversations = self._conversations()
        for conversation in conversations:
            conversation.close_subscriptions()
        calls = [landing for each in conversations for landing in each.pending_replies()]
        if calls:
            await asyncio.wait(calls, timeout=self.engine.limits.grace_seconds)
        for conversation in self._conversations():
            conversation.cancel_all()
        for exchange in list(self.open):
            exchange.finish()
        tasks = {each.task for each in self.open if each.task is not None}
        if tasks:  # what they have to say last
            await asyncio.wait(tasks, timeout=FINAL_WRITE_SECONDS)
        if self._stack is not None:
            stack, self._stack = self._stack, AsyncExitStack()
            await stack.aclose()

    def _conversations(self) -> list[Dispatcher]:
        return [each.conversation for each in self.open if each.conversation is not None]

    def end_session(self, connection: Connection) -> None:
        """Give up what is going on in a session that was ended."""
        for exchange in list(self.open):
            if exchange.conversation is not None and exchange.conversation.connection is connection:
                exchange.conversation.cancel_all()
                exchange.finish()

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            raise ValueError(f"this application speaks HTTP, not {scope['type']}")
        await receive()
        try:
            await self.startup()
        except Exception as problem:
            if not isinstance(problem, HandrailError):  # whose message says it all
                log.exception("the server's lifespan failed")
            await send({"type": "lifespan.startup.failed", "message": str(problem)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _receive_session_messages(self) -> None:
        """Messages that reached another process than the one in which somebody waits for them."""
        while True:
            try:
                async with self.sessions.store.subscribe(TOPIC) as messages:
                    async for message in messages:
                        self._on_session_message(*parse(message, type=tuple[str, bytes | None]))
            except StoreError as problem:
                log.warning("http: messages of other processes may be lost: %s", problem)
                await asyncio.sleep(RESUBSCRIBE_SECONDS)

    def _on_session_message(self, name: str, body: bytes | None) -> None:
        conversation, connection = self.sse_streams.get(name), self.sessions.live(name)
        if conversation is None and connection is not None:
            conversation = Dispatcher(self.engine, NullChannel(), ANONYMOUS, connection)
        if conversation is not None and body is not None:
            conversation.receive_and_reply(body)
        elif connection is not None:
            self.end_session(connection)
