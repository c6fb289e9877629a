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
from handrail.config import Console as Settings
from handrail.console import access, playground as trying, tools
from handrail.console.access import CODE_SECONDS, Access, Download, Problem, Request, Session, cookie_name, new_code
from handrail.console.events import Pulse
from handrail.console.pins import pins
from handrail.console.playground import Try
from handrail.console.redact import Mask
from handrail.console.routes import COMMANDS, find
from handrail.jsonrpc import encode
from handrail.model import Object
from handrail.protocol import http_rules as http
from handrail.protocol.http_rules import Door, Headers
from handrail.revisions import Revision
from handrail.server import Server
from handrail.stores import Store, StoreError
from handrail.stores.memory import MemoryStore
from handrail.transports.http.response import Fields, Receive, Response, Scope, Send
from handrail.transports.http1.listen import Address, HttpLimits

__all__ = ["Console"]

log = logging.getLogger("handrail")

DEFAULT = "127.0.0.1:7420"
AT_SECONDS = 60.0
AGAIN_SECONDS = 1.0
GRACE_SECONDS = 0.5
NOBODY = Session(key="", who="", roles=frozenset(), csrf="", server="", began=0.0, renewed=0.0)

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FIELDS: Fields = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_UNKEPT = (b"cache-control", b"no-store")
_JSON = (b"content-type", b"application/json")


class Console:
    """The console of one server, in each of its processes."""

    access: Access
    store: Store  # codes, sessions, approvals
    topics: Store  # what workers tell each other
    closing: AsyncExitStack
    pulse: Pulse

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
        self.gate = server.engine.gate
        self.feed = server.engine.watch()
        self.target = target  # what `handrail call` takes for this server
        self.source = source  # the file it is in
        self.transport = transport
        self.endpoint = ""
        self.workers = workers
        self.worker = ""  # the name of this process, where there are several
        self.state: dict[str, Any] = {}
        self.tries: dict[str, Try] = {}
        self.firsts: dict[str, str] = {}  # the first arguments of calls, by their ids
        self.door = Door(self.settings.hosts)
        self.code = new_code()  # of the start link
        self.name = secrets.token_hex(8)  # of this start of the server, the same in all its workers
        self.started = self.clock()
        self._shared = shared  # a file for `topics`, where there are several workers
        self._socket: socket.socket | None = None
        self.url = ""
        self.ready: Callable[[], None] = lambda: None  # told when pages are served

    def clock(self) -> float:
        return self.engine.clock()

    @cached_property
    def hide(self) -> Mask:
        """What hides the secrets of this server."""
        return Mask(self.engine)

    def revision(self, name: str) -> Revision:
        """The one of this name, or the newest."""
        offer = self.engine.offer
        found = offer.handshake.get(name) or offer.stateless.get(name) if name else offer.newest
        if found is None:
            raise Problem(400, f"revision: {name[:40]!r} is not one of {', '.join(offer.supported)}")
        return found

    @property
    def link(self) -> str:
        """With the code of the start, which is good once, and for five minutes."""
        return f"{self.url}/#code={self.code}"

    # From the start of the server to its end

    @contextmanager
    def listening(self, address: str = "") -> Iterator[None]:
        """Hold a socket, before there are workers to serve it. Without an address: the usual one, else any free one."""
        with contextlib.ExitStack() as stack:
            place = Address.parse(address or DEFAULT)
            try:
                self._socket = stack.enter_context(place.listening())
            except OSError:
                if address:
                    raise
                place = Address(port=0)
                self._socket = stack.enter_context(place.listening())
            self.url = place.url(self._socket, "http")
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
                self.gate.desk.shared = True  # somebody at this server can decide
            self.access = Access(self.store, self.server.name, self.clock, self.settings.roles)
            left = self.started + CODE_SECONDS - self.clock()
            if left > 0:  # else this is a worker that was started again
                await self.access.offer(self.code, self.settings.principal, None, left)
            self.pulse = Pulse(self)
            await pins(self)  # what changes before anybody has looked is noticed too
            hearing = asyncio.Event()
            for task in (self._hear(hearing), self.pulse.run(), self._keep_address()):
                stack.push_async_callback(_end, asyncio.create_task(task))
            await hearing.wait()
            await tools.keep_switches(self)
            watcher, loop = self._tools_changed, asyncio.get_running_loop()
            self._loop = loop
            self.engine.catalog.watchers.add(watcher)
            stack.callback(self.engine.catalog.watchers.discard, watcher)
            if self._socket is not None:
                from handrail.transports.http1.server import served

                serving = served(self, self._socket, limits=HttpLimits(), grace=GRACE_SECONDS)
                await stack.enter_async_context(serving)
                stack.callback(self.pulse.end)  # streams end before connections are waited for
            stack.push_async_callback(trying.end, self.tries)
            self.ready()
            yield

    def _open_topics(self) -> Store:
        if self._shared is None:
            return MemoryStore()
        from handrail.stores.sqlite import SqliteStore

        return SqliteStore(self._shared, durable=False)

    async def _keep_address(self) -> None:
        """Where `handrail console` finds us, for as long as we are here."""
        key, said = f"console-at:{self.server.name}:{self.name}", encode({"url": self.url, "pid": os.getpid()})
        try:
            while self.url:
                with contextlib.suppress(StoreError):
                    await self.store.put(key, said, ttl=AT_SECONDS)
                await asyncio.sleep(AT_SECONDS / 3)
        finally:
            with contextlib.suppress(StoreError):
                await self.store.delete(key)

    def _tools_changed(self) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(lambda: self.pulse.soon(self.publish("tools", {})))

    # What workers tell each other

    async def publish(self, event: str, data: Any, *, to: str = "") -> None:
        """To every page, wherever it is connected; or to those of one session."""
        await self.topics.publish(f"console:{self.name}", f"{event}\n{to}\n".encode() + encode(data))

    async def command(self, name: str, data: Object) -> None:
        """Let every worker do something."""
        await self.topics.publish(f"console-do:{self.name}", f"{name}\n".encode() + encode(data))

    async def _hear(self, hearing: asyncio.Event) -> None:
        while True:
            try:
                async with self.topics.subscribe(f"console-do:{self.name}") as commands:
                    hearing.set()
                    async for message in commands:
                        name, _, data = message.partition(b"\n")
                        try:
                            await COMMANDS[name.decode()](self, decode(data))
                        except Exception:
                            log.exception("console: %s failed", name.decode())
            except StoreError as problem:
                log.warning("console: commands of other workers may be lost: %s", problem)
                await asyncio.sleep(AGAIN_SECONDS)

    async def note(self, session: Session, step: str, **more: Any) -> None:
        """Put on record what somebody did here, before it is done."""
        if self.gate.trail is not None:
            record = {"event": "console", "step": step, "by": session.who, "server": self.gate.name, **more}
            try:
                await self.gate.trail.write(record)
            except TrailError as problem:
                log.error("console: %s: %s", step, problem)
                raise Problem(503, "It was not done: it cannot be recorded now; the server's log says why") from None

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"this application speaks HTTP, not {scope['type']}")
        response = Response(scope, receive, send, {}, self.engine.limits)
        headers, twice = http.headers_of(scope["headers"])
        refusal = self.door.refusal(scope.get("scheme", "http"), headers) or _strange(scope["path"], headers)
        try:
            if refusal or twice:
                raise Problem(403 if refusal else 400, refusal or f"The header {twice} stands twice")
            answer = await self._answer(scope, receive, headers)
        except Problem as problem:
            told: Object = {"error": problem.text}
            told |= {"problems": problem.problems} if problem.problems else {}
            response.whole(problem.status, [*_FIELDS, _UNKEPT, _JSON], encode(told))
        except Exception:
            log.exception("console: %s %s failed", scope["method"], quote(scope["path"][:200]))
            told = {"error": "The console failed; the server's log has the details"}
            response.whole(500, [*_FIELDS, _UNKEPT, _JSON], encode(told))
        else:
            if isinstance(answer, Download) and not isinstance(answer.body, bytes):
                await _stream(response, _fields(answer), answer.body)
                return
            if not isinstance(answer, Download):
                answer = Download(encode(answer), "application/json")
            assert isinstance(answer.body, bytes)
            response.whole(200, _fields(answer), answer.body)
        await response.close()

    async def _answer(self, scope: Scope, receive: Receive, headers: Headers) -> Any:
        method, raw = scope["method"], scope.get("raw_path") or quote(scope["path"]).encode()
        route, path = find(method, raw.decode("latin-1"))
        port = (scope.get("server") or ("", 0))[1] or 0  # a socket in the file system has none
        token = access.token_in(headers, cookie_name(port))
        session = await self.access.session(token)
        if method == "POST" and (flaw := http.fitness(headers.get(b"content-type", b""), None, b"")[2]):
            raise Problem(415, flaw)
        access.check(session, route.access, headers)
        request = Request(
            session=session or NOBODY,
            path=path,
            query=dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)),
            body=await self._body(receive) if method == "POST" else None,
            headers=headers,
            port=port,
            token=token,
        )
        return await route.handler(self, request)

    async def _body(self, receive: Receive) -> Object:
        pieces, size, most = [], 0, self.engine.limits.max_message_bytes
        more = True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise Problem(400, "The request ended before its body did")
            pieces.append(event.get("body", b""))
            size += len(pieces[-1])
            more = event.get("more_body", False)
            if size > most:
                raise Problem(413, f"A request has at most {most:,} bytes")
        try:
            body = decode(b"".join(pieces))
        except (MsgspecError, RecursionError, ValueError) as problem:
            raise Problem(400, f"The body is not JSON: {problem}") from None
        if type(body) is not dict:
            raise Problem(400, "The body is not a JSON object")
        return body


def _strange(path: str, headers: Headers) -> str:
    """Why another site's page may not ask for this; links to the page itself may stand anywhere."""
    site = headers.get(b"sec-fetch-site", b"same-origin")
    return "" if site in (b"same-origin", b"none") or path == "/" else "Another site's page cannot use the console"


def _fields(answer: Download) -> Fields:
    fields = [*_FIELDS, (b"content-type", answer.kind.encode("latin-1", "replace")), *answer.fields]
    if answer.name:
        name = re.sub(r"[^A-Za-z0-9._-]", "-", answer.name)[:100]
        fields.append((b"content-disposition", f'attachment; filename="{name}"'.encode()))
    return fields if any(name == b"cache-control" for name, _ in fields) else [*fields, _UNKEPT]


async def _stream(response: Response, fields: Fields, body: AsyncIterator[bytes]) -> None:
    async def write() -> None:
        await response.begin(fields)
        async for piece in body:
            await response.write(piece)
        await response.write(b"", more=False)

    tasks = asyncio.ensure_future(write()), asyncio.ensure_future(response.watch())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        problems = await asyncio.gather(*tasks, return_exceptions=True)
        for problem in problems:
            if isinstance(problem, Exception):
                log.error("console: a stream failed", exc_info=problem)


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))
