"""Requests of an HTTP client: only to the origin of its server, with the client's credentials, and in bounded number.

Only this module and `http_client` use aiohttp; it is imported when it is first needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from msgspec import Struct

from handrail import __version__
from handrail.errors import GIVE_KEY, AuthorizationError, Sent, TransportError, missing_extra
from handrail.protocol.http_rules import is_local
from handrail.text.controls import is_secret, one_line
from handrail.transports.base import PendingRequest

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession, StreamReader
    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.client_proto import ResponseHandler
    from yarl import URL

log = logging.getLogger("handrail")

EVENTS = "text/event-stream"
JSON = "application/json"

MAX_REDIRECTS = 3
MAX_POSTS = 8  # messages without a response, in parallel
MAX_WAITING = 256  # of these; beyond, no more requests of the server are read
IDLE_SECONDS = 4.0  # uvicorn and Node close idle connections after 5: a request sent at that moment would fail
LINGER_SECONDS, LINGER_BYTES = 1.0, 64 * 1024

_CHUNK_BYTES = 64 * 1024
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}  # a dead peer is detected after two minutes
_RESERVED_HEADERS = frozenset(
    "accept accept-encoding connection content-encoding content-length content-type expect last-event-id"
    " transfer-encoding upgrade".split()
)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_WRITTEN = re.compile(r"[\x21-\x7e]+")
_VALUE = re.compile(r"[\t\x20-\x7e]*")


class Authorizer(Protocol):
    """Source of the credentials that a client sends to a server."""

    async def headers(self, url: str) -> dict[str, str]:
        """Return additional headers for this server; called before each request."""

    async def challenged(self, url: str, status: int, challenge: str) -> bool:
        """Handle a 401 or 403 with its challenge; return whether to retry once with new `headers`."""


class HttpRequester:
    """Sends requests to one server, without cookies and without the proxies of the environment."""

    def __init__(self, url: str, headers: Mapping[str, str], auth: Authorizer | None, connect_seconds: float) -> None:
        self.url = url
        parts = urlsplit(url)
        is_odd = "@" in parts.netloc or parts.port == 0 or any(each.isspace() for each in url)
        if parts.scheme not in ("http", "https") or not parts.hostname or is_odd:
            raise ValueError("url: an address such as 'https://example.org/mcp' is needed, without a password in it")
        self.origin = f"{parts.scheme}://{parts.netloc}"  # the only part of the address that may be logged
        self._user_headers = _checked(headers, auth)
        self._auth = auth
        self._connect_seconds = connect_seconds
        self._is_exposed = parts.scheme == "http" and not is_local(url)  # unencrypted, to another machine
        if self._is_exposed:
            self._warn({})  # before anything is sent
        try:
            self._body = body_class()
        except ModuleNotFoundError:
            raise missing_extra("http", "a server at a URL needs aiohttp") from None
        self.address = _url(url)
        # Of each connection, the last body that arrived in parts.
        self._bodies: dict[ResponseHandler, StreamReader] = {}

    def open(self) -> None:
        """Open the connection pool; called in the event loop that uses it."""
        import aiohttp

        # No limit here: `HttpClientTransport` limits the requests.
        connector = connector_class()(limit=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_socket)
        self._http: ClientSession = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, connect=self._connect_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": f"{JSON}, {EVENTS}", "Accept-Encoding": "identity", **self._user_headers},
        )

    async def close(self) -> None:
        await self._http.close()

    async def request(
        self,
        method: str,
        url: URL,
        headers: dict[str, str],
        message: bytes | None = None,
        request: PendingRequest | None = None,
    ) -> ClientResponse:
        """Send a request and return the response, after redirects within the origin and after authorization."""
        redirects = 0
        challenged_statuses: set[int] = set()  # that the authorizer has handled
        while True:
            if request is not None:
                request.sent = Sent.NO  # also after a redirect or challenge: the request was not accepted
            request_headers = headers
            if self._auth is not None:
                request_headers = {**headers, **await self._auth.headers(self.url)}
            if self._is_exposed:
                self._warn(request_headers)
            body = None if message is None else self._body(message, request)
            try:
                response = await self._http.request(
                    method, url, data=body, headers=request_headers, allow_redirects=False
                )
            except asyncio.CancelledError:
                if body is not None:
                    body.abort()
                raise
            if response.connection is not None:  # the body has not arrived completely
                self._watch_connection(response)
            status = response.status
            if status not in (307, 308, 401, 403):
                return response
            challenge = ", ".join(response.headers.getall("WWW-Authenticate", ()))
            if status == 401 or (status == 403 and "insufficient_scope" in challenge):
                await drain_response(response)
                if self._auth is None or status in challenged_statuses:
                    raise self._unauthorized(status, challenge)
                challenged_statuses.add(status)
                if request is not None:
                    request.sent = Sent.NO  # during `challenged`, which may wait for a person
                if not await self._auth.challenged(self.url, status, challenge):
                    raise self._unauthorized(status, challenge)
                continue
            target = same_origin_url(url, response.headers.get("Location", "")) if status < 400 else None
            if target is None or redirects == MAX_REDIRECTS:
                return response
            await drain_response(response)
            url = target
            redirects += 1

    def _watch_connection(self, response: ClientResponse) -> None:
        """Fail the reader of the body when its connection is lost.

        aiohttp (3.14.5) does not do so where a chunk is malformed, as when a proxy writes its error into a stream: the
        reader would wait for ever.
        """
        protocol = response.connection.protocol if response.connection is not None else None
        if protocol is None:
            return
        is_new = protocol not in self._bodies
        self._bodies[protocol] = response.content
        if is_new and (closed := protocol.closed) is not None:
            closed.add_done_callback(partial(self._on_connection_closed, protocol))
        elif is_new:
            self._on_connection_closed(protocol)

    def _on_connection_closed(self, protocol: ResponseHandler, closed: asyncio.Future[None] | None = None) -> None:
        from aiohttp import ClientPayloadError
        from aiohttp.http_exceptions import HttpProcessingError

        body = self._bodies.pop(protocol)
        if closed is not None and not closed.cancelled():
            closed.exception()  # retrieved, so that asyncio does not log it
        if isinstance(protocol.exception(), HttpProcessingError) and not body.is_eof() and body.exception() is None:
            body.set_exception(ClientPayloadError("malformed"))

    def _unauthorized(self, status: int, challenge: str) -> AuthorizationError:
        text = f"HTTP {status}: {self.origin} wants to know who is calling"
        if "authorization" in map(str.lower, self._user_headers):
            text, hint = f"HTTP {status}: {self.origin} has not accepted the key or token", GIVE_KEY
        else:
            hint = GIVE_KEY if self._auth is None else ""
        return AuthorizationError(
            f"{text} ({one_line(challenge, 200)})" if challenge else text, sent=Sent.FAILED, hint=hint
        )

    def transport_error(self, problem: Exception, sent: Sent) -> TransportError:
        """Return the error for a broken connection, without any part of the request: headers hold secrets."""
        import aiohttp

        hint = ""
        match problem:
            case aiohttp.ConnectionTimeoutError():
                text = f"no connection to {self.origin} within {self._connect_seconds:g} s"
                hint = "Is the address right, and can it be reached from here?"
            case aiohttp.ClientConnectorDNSError():
                text, hint = f"no connection to {self.origin}: the name cannot be resolved", "Is the address right?"
            case aiohttp.ClientConnectorCertificateError():
                text = f"no connection to {self.origin}: {problem.certificate_error}"
                hint = "Its certificate is not one this machine trusts"
            case aiohttp.ClientConnectorSSLError():
                text, hint = f"no connection to {self.origin}: no TLS there", "Is it an http:// address?"
            case aiohttp.ClientConnectorError():
                text = f"no connection to {self.origin}: {problem.os_error.strerror or problem.os_error}"
                hint = "Is the server running?"
            case aiohttp.ClientResponseError():
                text = f"{self.origin} did not answer in HTTP: {one_line(problem.message, 200)}"
            case TimeoutError():
                text = f"nothing came from {self.origin} within {self._connect_seconds:g} s"
            case _:
                text = f"the connection to {self.origin} broke ({type(problem).__name__})"
        return TransportError(text, sent=sent, hint=hint)

    def _warn(self, headers: Mapping[str, str]) -> None:
        if secret := [name for name in (*self._user_headers, *headers) if is_secret(name)]:
            text = "%s: the header %s is sent in the clear to another machine, where others can read it; use https"
            log.warning(text, self.origin, secret[0])
            self._is_exposed = False  # warn once


class OutgoingMessage(Struct, eq=False):
    """A message, the session headers at the time it was added, and a future that is done when its POST is over."""

    message: bytes
    headers: dict[str, str]
    done: asyncio.Future[None]


class Outbox:
    """Queue of messages that have no response: notifications, and responses to requests of the server.

    Each message is a POST. At most `MAX_POSTS` run at a time and the others wait in order, so that a server with many
    requests does not get as many connections. While many wait, reading pauses on the stream that carries these
    requests: the server is slowed down, and no response is dropped. `start` runs a coroutine as a task.
    """

    def __init__(
        self,
        post: Callable[[bytes, dict[str, str]], Awaitable[None]],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._post = post
        self._start = start
        self._queue: deque[OutgoingMessage] = deque()
        self._open: set[asyncio.Future[None]] = set()  # of messages that wait or are being posted
        self._posting = 0
        self._room: asyncio.Future[None] | None = None
        self.added = 0  # messages in total

    def add(self, message: bytes, headers: dict[str, str]) -> asyncio.Future[None]:
        """Queue a message; the future is done when its POST has succeeded or failed."""
        outgoing = OutgoingMessage(message, headers, asyncio.get_running_loop().create_future())
        self._queue.append(outgoing)
        self._open.add(outgoing.done)
        outgoing.done.add_done_callback(self._open.discard)
        self.added += 1
        if self._posting < MAX_POSTS:
            self._posting += 1
            self._start(self._work())
        return outgoing.done

    async def wait_for_room(self) -> None:
        """Wait until at most `MAX_WAITING` messages wait."""
        while len(self._queue) > MAX_WAITING:
            self._room = self._room or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._room)

    async def wait_empty(self) -> None:
        """Wait until no message waits or is being posted."""
        while self._open:
            await asyncio.wait(self._open)

    def clear(self) -> int:
        """Drop the waiting messages, and return their number."""
        count = len(self._queue)
        self._queue.clear()
        self._release_waiter()
        return count

    async def _work(self) -> None:
        try:
            while self._queue:
                outgoing = self._queue.popleft()
                self._release_waiter()
                try:
                    await self._post(outgoing.message, outgoing.headers)
                finally:
                    if not outgoing.done.done():
                        outgoing.done.set_result(None)
        finally:
            self._posting -= 1

    def _release_waiter(self) -> None:
        if self._room is not None and len(self._queue) <= MAX_WAITING:
            self._room.set_result(None)
            self._room = None


@cache
def body_class() -> Any:
    """Return the class of request bodies; a subclass of an aiohttp class, which is imported late."""
    from aiohttp.payload import Payload

    class Body(Payload):
        """A message that marks its request as possibly sent before the first byte is written."""

        _autoclose = True

        def __init__(self, message: bytes, request: PendingRequest | None) -> None:
            super().__init__(message, content_type=JSON)
            self._about = request
            self._transport: asyncio.WriteTransport | None = None

        @property
        def size(self) -> int:
            return len(self._value)

        def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
            return str(self._value, encoding, errors)

        async def write(self, writer: AbstractStreamWriter) -> None:
            self._transport = getattr(writer, "transport", None)
            if self._about is not None:
                if self._about.future.done():  # reported as not sent, so it must not be sent
                    raise ConnectionAbortedError
                self._about.sent = Sent.UNKNOWN
            if len(self._value) <= _CHUNK_BYTES:
                await writer.write(self._value)
                return
            whole = memoryview(self._value)
            for at in range(0, len(whole), _CHUNK_BYTES):
                # Waits until the peer has read most of the earlier pieces.
                await writer.write(whole[at : at + _CHUNK_BYTES])

        def abort(self) -> None:
            """Close the connection without waiting for the peer to read the rest."""
            if self._transport is not None:
                self._transport.abort()

    return Body


@cache
def connector_class() -> Any:
    """Return the class of connection pools; a subclass of an aiohttp class, which is imported late."""
    from aiohttp import TCPConnector
    from aiohttp.client import ClientTimeout
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

    class Connector(TCPConnector):
        """A pool that closes an idle connection on which something has arrived.

        aiohttp (3.14.5) takes that for the response to the next request. It is the second response to an earlier one.
        """

        async def connect(self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout) -> Connection:
            while True:
                connection = await super().connect(req, traces, timeout)
                if connection.protocol is None or not connection.protocol.should_close:
                    return connection
                connection.close()

    return Connector


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket with TCP keep-alive, which detects a dead peer: a stream may be silent for hours (P-11)."""
    sock = socket.socket(*address[:3])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock


def close_response(response: ClientResponse) -> None:
    """Close a response; its connection is aborted unless the body has arrived completely."""
    if not response.closed:
        connection = response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
        response.close()


async def drain_response(response: ClientResponse) -> None:
    """Read and discard the rest of a response for a moment, so that its connection can be reused."""
    if response.closed:
        return
    spare = LINGER_BYTES
    try:
        with contextlib.suppress(*connection_errors()):
            async with asyncio.timeout(LINGER_SECONDS):
                while spare > 0 and (piece := await response.content.readany()):
                    spare -= len(piece)
    finally:
        close_response(response)


@cache
def connection_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of a connection that cannot be opened, breaks, or carries invalid HTTP."""
    from aiohttp import ClientError
    from aiohttp.http_exceptions import HttpProcessingError

    return ClientError, HttpProcessingError, OSError  # a TimeoutError is one


def _checked(headers: Mapping[str, str], auth: Authorizer | None) -> dict[str, str]:
    """Return the user's headers with a User-Agent; raise ValueError if one is invalid or set by the client itself."""
    for name, value in headers.items():
        plain = name.lower()
        if plain in _RESERVED_HEADERS or plain.startswith("mcp-") or (auth is not None and plain == "authorization"):
            raise ValueError(f"headers: {name!r} is set by the client itself")
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError(f"headers: {name!r} cannot be sent as a header")
    agent = {} if "user-agent" in map(str.lower, headers) else {"User-Agent": f"handrail/{__version__}"}
    return {**agent, **headers}


def _url(text: str) -> URL:
    """Return an address as it is written, quoted only if a request could not carry it."""
    from yarl import URL

    return URL(text, encoded=_WRITTEN.fullmatch(text) is not None)


def same_origin_url(url: URL, text: str) -> URL | None:
    """Resolve `text` against `url`; return None unless scheme, host and port are the same."""
    try:
        target = url.join(_url(text))
        is_same = (target.scheme, target.host, target.port) == (url.scheme, url.host, url.port)
    except ValueError:
        return None
    is_plain = target.raw_user is None and target.raw_password is None
    return target if text and is_same and is_plain else None
