"""The HTTP endpoint: one URL for every revision, for any ASGI server and for the own listener.

The body of a request decides its revision: it names a stateless one, or is a handshake, or belongs to a session. The
response is JSON if the reply is all there is to send, and an event stream if there is more: progress, a question, or
no reply within two seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack
from urllib.parse import unquote

from msgspec.json import decode as parse

from handrail.engine.core import Engine
from handrail.engine.dispatcher import Dispatcher
from handrail.engine.http_sessions import HttpSessions, topic_of
from handrail.engine.rejections import RejectionLog
from handrail.engine.reply_channel import NullChannel
from handrail.errors import HandrailError, Refused
from handrail.jsonrpc import encode
from handrail.model import Principal
from handrail.protocol import http_rules as http
from handrail.protocol.http_rules import Headers, HostOriginCheck
from handrail.stores import Store, StoreError, supports
from handrail.suggest import describe_value, expect
from handrail.transports.http import methods as post, methods as streams
from handrail.transports.http.exchange import JSON, METADATA_PATH, EndpointState, Exchange, Fields, Receive, Scope, Send
from handrail.transports.http.forwarding import HEADER, origin_in
from handrail.transports.http.methods import Continuation
from handrail.transports.http.monitoring import RequestMonitor
from handrail.transports.http.options import EndpointOptions

if TYPE_CHECKING:
    from handrail.transports.http1.request import RequestResponseCycle

log = logging.getLogger("handrail")

ANONYMOUS = Principal("anonymous")
FINAL_WRITE_SECONDS = 0.5
RESUBSCRIBE_SECONDS = 1.0
SUBSCRIBE_SECONDS = 2.0  # that a start waits until messages of other processes are heard
_PREFLIGHT: Fields = [
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-max-age", b"600"),
]
Handler = Callable[[Exchange], Awaitable[None]]
_HANDLERS: dict[str, Handler] = {"GET": streams.get, "POST": post.run, "DELETE": streams.delete}


_OPTION_TYPES = {
    "path": ('a text such as "/mcp"', str),
    "metrics_token": ("a text", str),
    "legacy_stateless": ("True or False", bool),
    "access_log": ("True or False", bool),
    "advertise": ("a text such as 'http://10.1.2.3:8000'", str),
}


class Endpoint:
    """The HTTP application of one server: an ASGI application, with a shorter way in for the own listener."""

    def __init__(
        self, engine: Engine, store: Store | Callable[[], Store], /, **options: Unpack[EndpointOptions]
    ) -> None:
        """Take a store, or what opens one; that of a server's replicas goes before one that is opened."""
        for option, (expected, kind) in _OPTION_TYPES.items():
            if options.get(option) is not None:
                expect(f"http: {option}", options.get(option), expected, kind)
        verifier = options.get("auth")
        if verifier is not None and (isinstance(verifier, type) or not callable(getattr(verifier, "verify", None))):
            raise TypeError(f"http: auth: expected a verifier such as ApiKeys({{…}}), got {describe_value(verifier)}")
        self.engine = engine
        self.host_check = HostOriginCheck(options.get("hosts", ()), options.get("origins", ()))
        if self.host_check.allows_any_host:
            log.warning("http: any Host is answered: web pages can reach this server through names of their own")
        self._handlers = _HANDLERS if engine.offer.handshake else {"POST": post.run}
        self.auth, self.path = verifier, options.get("path", "/mcp").rstrip("/")
        self.state = EndpointState(engine, self.path, verifier, legacy_stateless=options.get("legacy_stateless", False))
        self._rejections = RejectionLog(engine.guard_set)
        self.monitor = RequestMonitor.from_options(engine, options)
        if advertise := options.get("advertise"):
            self.engine.address = advertise.rstrip("/") + self.path
        self._store = store
        self._stack: AsyncExitStack | None = None
        self._startup_lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request of any ASGI server."""
        if scope["type"] != "http":
            await self._lifespan(scope, receive, send)
            return
        if self._stack is None:
            await self.startup()
        if self.monitor is not None:
            await self.monitor(self._process, scope, receive, send)
            return
        exchange = self._admit(scope, receive, send, *http.headers_of(scope["headers"]))
        if exchange.handler is not None:
            await exchange.handler(exchange)
        elif exchange.response.whole is None and (self.auth is None or await self._identify(exchange)):
            try:
                await self._handlers[scope["method"]](exchange)
            except StoreError as problem:
                exchange.respond_store_failed(problem)
        await exchange.complete(None)

    def at_once(self, cycle: RequestResponseCycle, headers: Headers) -> bool:
        """Serve a request that the own listener received whole; return False to be called as an ASGI application."""
        if self._stack is None or self.monitor is not None:
            return False
        exchange = self._admit(cycle.scope, cycle.receive, cycle.send, headers)
        exchange.cycle = cycle
        work: Continuation = None
        if exchange.response.whole is None:
            if self.auth is not None or cycle.scope["method"] != "POST":
                work = self._serve(exchange)
            else:
                continuation = post.take_whole(exchange, bytes(cycle.body))
                if continuation is not None or exchange.response.is_rate_limited:
                    work = exchange.complete(continuation)
        if work is not None:
            cycle.start(work)
        elif exchange.response.whole is not None:
            exchange.conversation = None
            cycle.respond(*exchange.response.whole)
        return True

    async def _process(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(self._admit(scope, receive, send, *http.headers_of(scope["headers"])))

    async def _serve(self, exchange: Exchange) -> None:
        if exchange.handler is not None:
            await exchange.handler(exchange)
        elif exchange.response.whole is None and (self.auth is None or await self._identify(exchange)):
            if self.monitor is not None:
                self.monitor.attach(exchange)
            try:
                await self._handlers[exchange.scope["method"]](exchange)
            except StoreError as problem:
                exchange.respond_store_failed(problem)
        await exchange.complete(None)

    def _admit(self, scope: Scope, receive: Receive, send: Send, headers: Headers, duplicate: str = "") -> Exchange:
        """Check the head of a request; one that is refused, or is no message, has its response already."""
        refusal = self.host_check.refusal(scope.get("scheme", "http"), headers)
        if refusal or duplicate:  # a refused web page may not read the response
            exchange = Exchange(self.state, scope, receive, send, {})
            reason = refusal or f"The header {duplicate} stands twice"
            exchange.response.respond_text(403 if refusal else 400, reason)
            self._rejections.add(exchange.peer, "forbidden" if refusal else "invalid_request", reason)
            return exchange
        root, path, method = scope.get("root_path"), scope["path"], scope["method"]
        exchange = Exchange(self.state, scope, receive, send, headers)
        exchange.principal = ANONYMOUS
        if HEADER in headers and (origin := origin_in(self.engine, headers[HEADER])) is not None:
            exchange.forwarded_for, exchange.forwarded_digest = origin
        if root:
            path = path.removeprefix(root).rstrip("/") or self.path
        if path != self.path or self.state.stopping or method not in self._handlers:
            self._answer_non_message(exchange, path.rstrip("/"))
        return exchange

    async def _identify(self, exchange: Exchange) -> bool:
        assert self.auth is not None
        token = http.bearer(exchange.headers)
        principal = await self.auth.verify(token) if token else None
        if principal is not None:
            exchange.principal = principal
            return True
        self._rejections.add(exchange.peer, "unauthenticated", "the token is not valid" if token else "no token")
        try:
            self.engine.guard_set.charge_request(ANONYMOUS, exchange.peer)  # slows down guessing of tokens
        except Refused as refused:
            fields = [(b"retry-after", b"%d" % math.ceil(refused.retry_after))]
            exchange.response.respond_text(429, refused.text, fields)
            return False
        challenge = http.challenge(self.state.challenge(exchange))
        exchange.response.respond_text(401, "A valid token is needed", [challenge])
        return False

    def _answer_non_message(self, exchange: Exchange, path: str) -> None:
        """Respond to a request that is no message, or that comes while the server stops."""
        method, metadata = exchange.scope["method"], None if self.auth is None else self.auth.metadata
        if path in ("/healthz", "/readyz"):
            ready = path == "/healthz" or not self.state.stopping
            lines = ["ok" if ready else "stopping"]
            if path == "/readyz":  # all replicas have the same engines: to take one out would help no caller
                lines += [f"{name}: not reachable" for name in self.engine.guard_set.troubles()]
            exchange.response.respond_text(200 if ready else 503, "\n".join(lines))
        elif path.startswith("/readyz/") and self.engine.upstreams is not None:
            is_up = self.engine.upstreams.is_up(unquote(path.removeprefix("/readyz/")))
            exchange.response.respond_text(200 if is_up else 503, "up" if is_up else "not up")
        elif path.startswith(self.path + http.CONNECT_PATH) and method == "GET" and self.engine.upstreams is not None:
            exchange.handler = partial(self._finish_sign_in, path.removeprefix(self.path + http.CONNECT_PATH))
        elif path == METADATA_PATH + self.path and metadata is not None:
            exchange.response.respond(200, JSON, encode({"resource": exchange.base_url + self.path, **metadata}))
        elif path not in (self.path, "/sse"):
            exchange.response.respond_text(404, "Not found")
        elif method == "OPTIONS":
            allowed = (b"access-control-allow-headers", http.preflight_headers(exchange.headers))
            exchange.response.respond(204, [*_PREFLIGHT, allowed], b"")
        elif self.state.stopping:
            exchange.respond_stopping()
        elif method not in self._handlers:
            exchange.response.respond_text(405, "Method not allowed", [(b"allow", ", ".join(self._handlers).encode())])

    async def _finish_sign_in(self, name: str, exchange: Exchange) -> None:
        """Respond to a browser that comes back from the authorization server of an upstream."""
        assert self.engine.upstreams is not None
        try:
            self.engine.guard_set.charge_request(ANONYMOUS, exchange.peer)
            query = exchange.scope.get("query_string", b"").decode("latin-1")
            status, text = await self.engine.upstreams.finish_sign_in(name, query)
        except Refused as refused:
            status, text = 429, refused.text
        except HandrailError as problem:
            status, text = 503, "The sign-in cannot be finished now; the log of the server says why."
            log.error("http: a sign-in to %.100s was not finished: %s", name, problem)
        exchange.response.respond(status, http.PAGE_FIELDS, http.PAGE.format(text).encode())

    async def startup(self) -> None:
        """Enter the server's lifespan, at the ASGI lifespan event or at the first request."""
        async with self._startup_lock:
            if self._stack is not None:
                return
            async with AsyncExitStack() as stack:
                store = self._store
                if callable(store):  # opened here, in the process and event loop that use it
                    store = store()
                    stack.push_async_callback(store.close)
                stack.push_async_callback(self.state.forwarder.close)
                if self.auth is not None:
                    stack.push_async_callback(self.auth.close)
                if not self.engine.owner.is_serving:  # else it was entered elsewhere, and ends there
                    await stack.enter_async_context(self.engine.owner.serving(store=store))
                if self.monitor is not None:  # the workers of this machine; each replica has a page of its own
                    await stack.enter_async_context(self.monitor.sharing(store))
                if callable(self._store):
                    store = self.engine.guard_set.shared_store or store
                self.state.sessions = HttpSessions(self.engine, store)
                for process_id in ("", self.state.sessions.process_id):
                    subscribed = asyncio.Event()
                    listener = asyncio.create_task(self._receive_session_messages(topic_of(process_id), subscribed))
                    stack.callback(listener.cancel)
                    with suppress(TimeoutError):  # else what another process sends for the first requests is lost
                        async with asyncio.timeout(SUBSCRIBE_SECONDS):
                            await subscribed.wait()
                if supports(store, "processes"):
                    stack.enter_context(self._announcing_updates(asyncio.get_running_loop()))
                self._stack = stack.pop_all()

    async def stop(self) -> None:
        """End every stream, wait for calls up to the grace time, and leave the lifespan."""
        self.state.stopping = True
        conversations = self.state.conversations()
        for conversation in conversations:
            conversation.close_subscriptions()
        calls: list[asyncio.Future[Any]] = [landing for each in conversations for landing in each.pending_replies()]
        calls += self.state.forwarder.tasks
        if calls:
            await asyncio.wait(calls, timeout=self.engine.limits.grace_seconds)
        for conversation in self.state.conversations():
            conversation.cancel_all()
        for exchange in list(self.state.open):
            exchange.stream.finish()
        tasks = {each.task for each in self.state.open if each.task is not None}
        if tasks:  # to write their last events
            await asyncio.wait(tasks, timeout=FINAL_WRITE_SECONDS)
        if self._stack is not None:
            stack, self._stack = self._stack, AsyncExitStack()
            await stack.aclose()

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

    async def _receive_session_messages(self, topic: str, subscribed: asyncio.Event) -> None:
        """Handle messages that other workers received for requests in this one."""
        while True:
            try:
                async with self.state.sessions.store.subscribe(topic) as messages:
                    subscribed.set()
                    async for message in messages:
                        self._on_session_message(*parse(message, type=tuple[str, bytes | None]))
            except StoreError as problem:
                log.warning("http: messages of other processes may be lost: %s", problem)
                await asyncio.sleep(RESUBSCRIBE_SECONDS)

    @contextmanager
    def _announcing_updates(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Tell other processes which resources were updated in this one."""
        tasks: set[asyncio.Task[None]] = set()

        async def publish(uri: str, owner: str) -> None:
            try:
                body = f"{uri}\n{owner}".encode()
                await self.state.sessions.publish(f"updated by {self.state.sessions.process_id}", body)
            except StoreError as problem:
                log.warning("http: other processes were not told of the update of %s: %s", uri, problem)

        def start(uri: str, owner: str) -> None:
            tasks.add(task := loop.create_task(publish(uri, owner)))
            task.add_done_callback(tasks.discard)

        def on_update(uri: str, owner: str) -> None:
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(start, uri, owner)

        self.engine.on_resource_updated.add(on_update)
        try:
            yield
        finally:
            self.engine.on_resource_updated.discard(on_update)
            for task in tasks:
                task.cancel()

    def _on_session_message(self, name: str, body: bytes | None) -> None:
        if name.startswith("updated by "):
            if name != f"updated by {self.state.sessions.process_id}" and body is not None:
                uri, _, owner = body.decode().partition("\n")
                self.engine.notify_subscribers(uri, owner)
            return
        conversation, connection = self.state.sse_streams.get(name), self.state.sessions.live(name)
        if conversation is None and connection is not None:
            conversation = Dispatcher(self.engine, NullChannel(), ANONYMOUS, connection)
        if conversation is not None and body is not None:
            conversation.receive_and_reply(body)
        elif connection is not None:
            self.state.end_session(connection)
