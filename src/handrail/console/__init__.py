"""The console: a page beside a server that shows its calls as they happen, and lets a person approve them.

An ASGI application on an address of its own, by default one that only this machine can reach. The engine does not know
of it. The workers of one server send each other what their pages show, over the topics of a store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import parse_qsl, quote

from msgspec import MsgspecError, to_builtins
from msgspec.json import decode

from handrail import stores
from handrail.config import ConsoleSettings
from handrail.console import access, playground, tools
from handrail.console.access import (
    CODE_SECONDS,
    ApiError,
    ApiRequest,
    ConsoleSession,
    RawResponse,
    cookie_name,
    new_code,
)
from handrail.console.context import ConsoleContext
from handrail.console.events import ActivityPublisher
from handrail.console.routes import COMMANDS, find_route
from handrail.engine.fleet import replicas_in
from handrail.gateway.stops import refresh_stops
from handrail.jsonrpc import encode
from handrail.model import Object
from handrail.protocol import http_rules as http
from handrail.protocol.http_rules import Headers, HostOriginCheck
from handrail.server import Server
from handrail.stores import Store, StoreError
from handrail.transports.http.exchange import Fields, HttpResponse, Receive, Scope, Send
from handrail.transports.http1.listen import Address, HttpLimits

__all__ = ["Console"]

log = logging.getLogger("handrail")

DEFAULT_ADDRESS = "127.0.0.1:7420"
ADDRESS_TTL_SECONDS = 60.0
RETRY_SECONDS = 1.0
REPLICAS_SECONDS = 2.0  # between two looks at the list of replicas
GRACE_SECONDS = 0.5
NO_SESSION = ConsoleSession(key="", who="", roles=frozenset(), csrf="", server="", began=0.0, renewed=0.0)

_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY_HEADERS: Fields = [
    (b"content-security-policy", _CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_NO_STORE = (b"cache-control", b"no-store")
_JSON_TYPE = (b"content-type", b"application/json")


class Console:
    """The console of one server, in each of its processes: its socket, its tasks and its ASGI application."""

    publisher: ActivityPublisher

    def __init__(
        self,
        server: Server,
        settings: ConsoleSettings | None = None,
        *,
        target: str = "",
        source: Path | None = None,
        transport: str = "memory",
        workers: int = 1,
        shared: Path | None = None,
    ) -> None:
        self.context = ConsoleContext(
            server, settings or ConsoleSettings(), target=target, source=source, transport=transport, workers=workers
        )
        self.server = server
        self.start_code = new_code()  # of the start link
        self.url = ""
        self._address_id = token_hex(8)
        self.on_ready: Callable[[], None] = lambda: None  # called when pages are served
        self._host_check = HostOriginCheck(self.context.settings.hosts)
        self._topics_file = shared  # the file of the topics, if there are several workers
        self._socket: socket.socket | None = None

    @property
    def link(self) -> str:
        """The start link. Its code works once, and for five minutes."""
        return f"{self.url}/#code={self.start_code}"

    def set_endpoint(self, url: str) -> None:
        """Set the address of the server itself, once it listens."""
        self.context.target = self.context.endpoint = url

    # Lifecycle

    @contextmanager
    def listening(self, address: str = "") -> Iterator[None]:
        """Open the socket, before workers are started. Without an address: the usual one, or else any free one."""
        with contextlib.ExitStack() as stack:
            bind_address = Address.parse(address or DEFAULT_ADDRESS)
            try:
                self._socket = stack.enter_context(bind_address.listen())
            except OSError:
                if address:
                    raise
                bind_address = Address(port=0)
                self._socket = stack.enter_context(bind_address.listen())
            self.url = bind_address.url(self._socket, "http")
            yield

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve pages while the server serves, in one of its processes."""
        context = self.context
        async with AsyncExitStack() as stack:
            context.feed.open()
            shared = context.guards.shared_store
            topics = self._open_topics() if shared is None else shared
            if shared is None:
                stack.push_async_callback(topics.close)
            process = f"{socket.gethostname()}/{os.getpid()}" if shared is not None else str(os.getpid())
            context.open(topics, process if context.workers > 1 or shared is not None else "")
            if shared is not None:
                stack.push_async_callback(_cancel_task, asyncio.create_task(self._follow_replicas(shared)))
            if context.workers == 1:
                context.guards.approval_queue.enable_operators()
            seconds_left = context.started + CODE_SECONDS - context.clock()
            if seconds_left > 0:  # else this is a worker that was restarted
                await context.sessions.add_code(self.start_code, context.settings.principal, None, seconds_left)
            publisher = self.publisher = ActivityPublisher(context)
            context.on_watch = publisher.activate
            await tools.load_pins(context)  # so that a change is noticed even if no page was open before it
            stack.callback(lambda: [each.cancel() for each in context.tasks])
            subscribed = asyncio.Event()
            for task in (self._run_commands(subscribed), publisher.run(), self._advertise_address()):
                stack.push_async_callback(_cancel_task, asyncio.create_task(task))
            await subscribed.wait()
            await tools.restore_switches(context)
            await refresh_stops(context.engine)
            loop = asyncio.get_running_loop()

            def on_lists_changed() -> None:  # called in any thread
                with contextlib.suppress(RuntimeError):  # the loop has closed
                    loop.call_soon_threadsafe(lambda: context.spawn(context.publish("tools", {})))

            for catalog in context.engine.catalogs.values():
                catalog.watchers.append(on_lists_changed)
                stack.callback(catalog.watchers.remove, on_lists_changed)
            if self._socket is not None:
                from handrail.transports.http1.server import serve_app

                await stack.enter_async_context(serve_app(self, self._socket, limits=HttpLimits(), grace=GRACE_SECONDS))
                stack.callback(context.stopping.set)  # streams end before the server waits for its connections
            stack.push_async_callback(playground.cancel_all, context.runs)
            self.on_ready()
            yield

    def _open_topics(self) -> Store:
        return stores.open("memory:" if self._topics_file is None else self._topics_file, durable=False)

    async def _follow_replicas(self, store: Store) -> None:
        """Keep the list of the replicas that share a store."""
        context, beats, clock = self.context, dict[str, tuple[int, float]](), asyncio.get_running_loop().time
        while True:
            with contextlib.suppress(StoreError):
                replicas = await replicas_in(store)
                beats = {each.id: _latest_beat(beats.get(each.id), each.beat, clock()) for each in replicas}
                rows: list[Object] = [
                    {**to_builtins(each), "seen": max(0, round(clock() - beats[each.id][1]))} for each in replicas
                ]
                context.replicas, context.workers = rows, max(2, len(rows))
            await asyncio.sleep(REPLICAS_SECONDS)

    async def _advertise_address(self) -> None:
        """Keep the address in the store, where `handrail console` looks for it."""
        context = self.context
        key = f"console-at:{context.server.name}:{self._address_id}"
        location = encode({"url": self.url, "pid": os.getpid()})
        try:
            while self.url:
                with contextlib.suppress(StoreError):
                    await context.store.put(key, location, ttl=ADDRESS_TTL_SECONDS)
                await asyncio.sleep(ADDRESS_TTL_SECONDS / 3)
        finally:
            with contextlib.suppress(StoreError):
                await context.store.delete(key)

    async def _run_commands(self, subscribed: asyncio.Event) -> None:
        topics, channel = self.context.topics, f"console-do:{self.context.channel}"
        while True:
            try:
                async with topics.subscribe(channel) as commands:
                    subscribed.set()
                    async for message in commands:
                        name, _, data = message.partition(b"\n")
                        try:
                            await COMMANDS[name.decode()](self.context, decode(data))
                        except Exception:
                            log.exception("console: command %s failed", name.decode())
            except StoreError as problem:
                log.warning("console: commands of other workers may be lost: %s", problem)
                await asyncio.sleep(RETRY_SECONDS)

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"this application speaks HTTP, not {scope['type']}")
        response = HttpResponse(receive, send, {}, self.context.engine.limits)
        headers, repeated_header = http.headers_of(scope["headers"])
        refusal = self._host_check.refusal(scope.get("scheme", "http"), headers) or _cross_site_refusal(
            scope["path"], headers
        )
        try:
            if refusal or repeated_header:
                raise ApiError(403 if refusal else 400, refusal or f"The header {repeated_header} occurs twice")
            payload = await self._handle(scope, receive, headers)
        except ApiError as problem:
            error_body: Object = {"error": problem.text}
            error_body |= {"problems": problem.problems} if problem.problems else {}
            response.respond(problem.status, [*_SECURITY_HEADERS, _NO_STORE, _JSON_TYPE], encode(error_body))
        except Exception:
            log.exception("console: request %s %s failed", scope["method"], quote(scope["path"][:200]))
            error_body = {"error": "The console failed; the server's log has the details"}
            response.respond(500, [*_SECURITY_HEADERS, _NO_STORE, _JSON_TYPE], encode(error_body))
        else:
            if isinstance(payload, RawResponse) and not isinstance(payload.body, bytes):
                await _stream(response, _response_headers(payload), payload.body)
                return
            if not isinstance(payload, RawResponse):
                payload = RawResponse(encode(payload), "application/json")
            assert isinstance(payload.body, bytes)
            response.respond(200, _response_headers(payload), payload.body)
        await response.write_response()

    async def _handle(self, scope: Scope, receive: Receive, headers: Headers) -> Any:
        method, raw = scope["method"], scope.get("raw_path") or quote(scope["path"]).encode()
        route, path = find_route(method, raw.decode("latin-1"))
        port = (scope.get("server") or ("", 0))[1] or 0  # a Unix socket has none
        token = access.token_from_cookies(headers, cookie_name(port))
        session = await self.context.sessions.find_session(token)
        if method == "POST" and (reason := http.negotiate_content(headers.get(b"content-type", b""), None, b"")[2]):
            raise ApiError(415, reason)
        access.check_access(session, route.access, headers)
        request = ApiRequest(
            session=session or NO_SESSION,
            path=path,
            query=dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)),
            body=await self._body(receive) if method == "POST" else None,
            headers=headers,
            port=port,
            token=token,
        )
        return await route.handler(self.context, request)

    async def _body(self, receive: Receive) -> Object:
        pieces, size, max_bytes = [], 0, self.context.engine.limits.max_message_bytes
        more = True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise ApiError(400, "The request ended before its body did")
            pieces.append(event.get("body", b""))
            size += len(pieces[-1])
            more = event.get("more_body", False)
            if size > max_bytes:
                raise ApiError(413, f"A request has at most {max_bytes:,} bytes")
        try:
            body = decode(b"".join(pieces))
        except (MsgspecError, RecursionError, ValueError) as problem:
            raise ApiError(400, f"The body is not JSON: {problem}") from None
        if type(body) is not dict:
            raise ApiError(400, "The body is not a JSON object")
        return body


def _cross_site_refusal(path: str, headers: Headers) -> str:
    """Return why a request from another site is refused, or "". The page itself can be linked from anywhere."""
    site = headers.get(b"sec-fetch-site", b"same-origin")
    return "" if site in (b"same-origin", b"none") or path == "/" else "Another site's page cannot use the console"


def _response_headers(raw_response: RawResponse) -> Fields:
    headers = [
        *_SECURITY_HEADERS,
        (b"content-type", raw_response.media_type.encode("latin-1", "replace")),
        *raw_response.headers,
    ]
    if raw_response.filename:
        filename = re.sub(r"[^A-Za-z0-9._-]", "-", raw_response.filename)[:100]
        headers.append((b"content-disposition", f'attachment; filename="{filename}"'.encode()))
    return headers if any(filename == b"cache-control" for filename, _ in headers) else [*headers, _NO_STORE]


async def _stream(response: HttpResponse, headers: Fields, body: AsyncIterator[bytes]) -> None:
    async def write() -> None:
        await response.begin(headers)
        async for piece in body:
            await response.write(piece)
        await response.write(b"", more=False)

    tasks = asyncio.ensure_future(write()), asyncio.ensure_future(response.wait_disconnected())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        problems = await asyncio.gather(*tasks, return_exceptions=True)
        for problem in problems:
            if isinstance(problem, Exception):
                log.error("console: event stream or download failed", exc_info=problem)


def _latest_beat(before: tuple[int, float] | None, beat: int, now: float) -> tuple[int, float]:
    """Return a beat, and when it was seen first, by the clock of this process."""
    return before if before is not None and before[0] == beat else (beat, now)


async def _cancel_task(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))
