"""The console: a page beside a server that shows its calls as they happen, and lets a person decide.

An ASGI application on an address of its own, which is this machine's unless somebody says otherwise. It looks at the
server from outside: the engine knows nothing of it. Workers of one server tell each other what pages have to show.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

from msgspec import MsgspecError
from msgspec.json import decode

from handrail.audit.format import TrailError
from handrail.audit.records import ConsoleRecord
from handrail.config import ConsoleSettings as Settings
from handrail.console import access, playground as trying, tools
from handrail.console.access import (
    CODE_SECONDS,
    ApiError,
    ApiRequest,
    ConsoleSession,
    RawResponse,
    SessionStore,
    cookie_name,
    new_code,
)
from handrail.console.events import ActivityPublisher
from handrail.console.pins import load_pins
from handrail.console.playground import ToolRun
from handrail.console.redact import Redactor
from handrail.console.routes import COMMANDS, find_route
from handrail.jsonrpc import encode
from handrail.model import Object
from handrail.protocol import http_rules as http
from handrail.protocol.http_rules import Headers, HostOriginCheck
from handrail.revisions import Revision
from handrail.server import Server
from handrail.stores import Store, StoreError
from handrail.stores.memory import MemoryStore
from handrail.transports.http.response import Fields, HttpResponse, Receive, Scope, Send
from handrail.transports.http1.listen import Address, HttpLimits

__all__ = ["Console"]

log = logging.getLogger("handrail")

DEFAULT_ADDRESS = "127.0.0.1:7420"
ADDRESS_TTL_SECONDS = 60.0
RETRY_SECONDS = 1.0
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
    """The console of one server, in each of its processes."""

    sessions: SessionStore
    store: Store  # codes, sessions, approvals
    topics: Store  # what workers tell each other
    closing: AsyncExitStack
    publisher: ActivityPublisher

    def __init__(
        self,
        server: Server,
        settings: Settings | None = None,
        *,
        target: str = "",
        source: Path | None = None,
        transport: str = "memory",
        workers: int = 1,
        shared: Path | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.server = server
        self.engine = server.engine
        self.gate = server.engine.guard_set
        self.feed = server.engine.enable_feed()
        self.target = target  # what `handrail call` takes for this server
        self.source = source  # the file it is in
        self.transport = transport
        self.endpoint = ""
        self.workers = workers
        self.worker = ""  # the name of this process, where there are several
        self.state: dict[str, Any] = {}
        self.runs: dict[str, ToolRun] = {}
        self.argument_previews: dict[str, str] = {}  # the first arguments of calls, by their ids
        self.host_check = HostOriginCheck(self.settings.hosts)
        self.start_code = new_code()  # of the start link
        self.instance_id = secrets.token_hex(8)  # of this start of the server, the same in all its workers
        self.started = self.clock()
        self._topics_file = shared  # a file for `topics`, where there are several workers
        self._socket: socket.socket | None = None
        self.url = ""
        self.on_ready: Callable[[], None] = lambda: None  # told when pages are served

    def clock(self) -> float:
        return self.engine.clock()

    @cached_property
    def redactor(self) -> Redactor:
        """What hides the secrets of this server."""
        return Redactor(self.engine)

    def revision(self, name: str) -> Revision:
        """The one of this name, or the newest."""
        offer = self.engine.offer
        revision = offer.handshake.get(name) or offer.stateless.get(name) if name else offer.newest
        if revision is None:
            raise ApiError(400, f"revision: {name[:40]!r} is not one of {', '.join(offer.supported)}")
        return revision

    @property
    def link(self) -> str:
        """With the code of the start, which is good once, and for five minutes."""
        return f"{self.url}/#code={self.start_code}"

    # From the start of the server to its end

    @contextmanager
    def listening(self, address: str = "") -> Iterator[None]:
        """Hold a socket, before there are workers to serve it. Without an address: the usual one, else any free one."""
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
        """For as long as the server serves, in one of its processes."""
        async with AsyncExitStack() as self.closing:
            stack = self.closing
            self.feed.open()
            self.worker = str(os.getpid()) if self.workers > 1 else ""
            self.topics = self._open_topics()
            stack.push_async_callback(self.topics.close)
            self.store = (
                self.topics if self.workers > 1 and isinstance(self.gate.store, MemoryStore) else self.gate.store
            )
            if self.workers == 1:
                self.gate.approval_queue.shared = True  # somebody at this server can decide
            self.sessions = SessionStore(self.store, self.server.name, self.clock, self.settings.roles)
            seconds_left = self.started + CODE_SECONDS - self.clock()
            if seconds_left > 0:  # else this is a worker that was started again
                await self.sessions.add_code(self.start_code, self.settings.principal, None, seconds_left)
            self.publisher = ActivityPublisher(self)
            await load_pins(self)  # what changes before anybody has looked is noticed too
            subscribed = asyncio.Event()
            for task in (self._run_commands(subscribed), self.publisher.run(), self._advertise_address()):
                stack.push_async_callback(_cancel_task, asyncio.create_task(task))
            await subscribed.wait()
            await tools.restore_switches(self)
            listener, loop = self._on_tools_changed, asyncio.get_running_loop()
            self._loop = loop
            self.engine.catalog.watchers.add(listener)
            stack.callback(self.engine.catalog.watchers.discard, listener)
            if self._socket is not None:
                from handrail.transports.http1.server import serve_app

                serving = serve_app(self, self._socket, limits=HttpLimits(), grace=GRACE_SECONDS)
                await stack.enter_async_context(serving)
                stack.callback(self.publisher.close)  # streams end before connections are waited for
            stack.push_async_callback(trying.cancel_all, self.runs)
            self.on_ready()
            yield

    def _open_topics(self) -> Store:
        if self._topics_file is None:
            return MemoryStore()
        from handrail.stores.sqlite import SqliteStore

        return SqliteStore(self._topics_file, durable=False)

    async def _advertise_address(self) -> None:
        """Where `handrail console` finds us, for as long as we are here."""
        key, location = (
            f"console-at:{self.server.name}:{self.instance_id}",
            encode({"url": self.url, "pid": os.getpid()}),
        )
        try:
            while self.url:
                with contextlib.suppress(StoreError):
                    await self.store.put(key, location, ttl=ADDRESS_TTL_SECONDS)
                await asyncio.sleep(ADDRESS_TTL_SECONDS / 3)
        finally:
            with contextlib.suppress(StoreError):
                await self.store.delete(key)

    def _on_tools_changed(self) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(lambda: self.publisher.spawn(self.publish("tools", {})))

    # What workers tell each other

    async def publish(self, event: str, data: Any, *, to: str = "") -> None:
        """To every page, wherever it is connected; or to those of one session."""
        await self.topics.publish(f"console:{self.instance_id}", f"{event}\n{to}\n".encode() + encode(data))

    async def send_command(self, name: str, data: Object) -> None:
        """Let every worker do something."""
        await self.topics.publish(f"console-do:{self.instance_id}", f"{name}\n".encode() + encode(data))

    async def _run_commands(self, subscribed: asyncio.Event) -> None:
        while True:
            try:
                async with self.topics.subscribe(f"console-do:{self.instance_id}") as commands:
                    subscribed.set()
                    async for message in commands:
                        name, _, data = message.partition(b"\n")
                        try:
                            await COMMANDS[name.decode()](self, decode(data))
                        except Exception:
                            log.exception("console: %s failed", name.decode())
            except StoreError as problem:
                log.warning("console: commands of other workers may be lost: %s", problem)
                await asyncio.sleep(RETRY_SECONDS)

    async def write_audit_record(self, session: ConsoleSession, step: str, **members: Any) -> None:
        """Put on record what somebody did here, before it is done."""
        if self.gate.trail is not None:
            record = ConsoleRecord("console", step=step, by=session.who, server=self.gate.name, **members)
            try:
                await self.gate.trail.write(record)
            except TrailError as problem:
                log.error("console: %s: %s", step, problem)
                raise ApiError(503, "It was not done: it cannot be recorded now; the server's log says why") from None

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"this application speaks HTTP, not {scope['type']}")
        response = HttpResponse(scope, receive, send, {}, self.engine.limits)
        headers, repeated_header = http.headers_of(scope["headers"])
        refusal = self.host_check.refusal(scope.get("scheme", "http"), headers) or _cross_site_refusal(
            scope["path"], headers
        )
        try:
            if refusal or repeated_header:
                raise ApiError(403 if refusal else 400, refusal or f"The header {repeated_header} stands twice")
            payload = await self._handle(scope, receive, headers)
        except ApiError as problem:
            error_body: Object = {"error": problem.text}
            error_body |= {"problems": problem.problems} if problem.problems else {}
            response.respond(problem.status, [*_SECURITY_HEADERS, _NO_STORE, _JSON_TYPE], encode(error_body))
        except Exception:
            log.exception("console: %s %s failed", scope["method"], quote(scope["path"][:200]))
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
        port = (scope.get("server") or ("", 0))[1] or 0  # a socket in the file system has none
        token = access.token_from_cookies(headers, cookie_name(port))
        session = await self.sessions.find_session(token)
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
        return await route.handler(self, request)

    async def _body(self, receive: Receive) -> Object:
        pieces, size, max_bytes = [], 0, self.engine.limits.max_message_bytes
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
    """Why another site's page may not ask for this; links to the page itself may stand anywhere."""
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
                log.error("console: a stream failed", exc_info=problem)


async def _cancel_task(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))
