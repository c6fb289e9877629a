"""One HTTP request of a client: to its server and nowhere else, and after showing who we are.

This and `stream.py` are all that knows aiohttp; it is imported when it is first needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

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
IDLE_SECONDS = 4.0  # uvicorn and Node close an idle connection after 5: do not send into that
LINGER_SECONDS, LINGER_BYTES = 1.0, 64 * 1024

_CHUNK_BYTES = 64 * 1024
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}  # gone after two minutes
_RESERVED_HEADERS = frozenset(
    "accept accept-encoding connection content-encoding content-length content-type expect last-event-id"
    " transfer-encoding upgrade".split()
)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_WRITTEN = re.compile(r"[\x21-\x7e]+")
_VALUE = re.compile(r"[\t\x20-\x7e]*")


class Authorizer(Protocol):
    """Shows a server who is calling."""

    async def headers(self, url: str) -> dict[str, str]:
        """What to send to this server beside everything else; asked before each request."""

    async def challenged(self, url: str, status: int, challenge: str) -> bool:
        """The server wants more, and says what; whether to try once more, with new `headers`."""


class HttpRequester:
    """Sends requests to one server; without cookies, and without proxies of the environment."""

    def __init__(self, url: str, headers: Mapping[str, str], auth: Authorizer | None, connect_seconds: float) -> None:
        self.url = url
        parts = urlsplit(url)
        is_odd = "@" in parts.netloc or parts.port == 0 or any(each.isspace() for each in url)
        if parts.scheme not in ("http", "https") or not parts.hostname or is_odd:
            raise ValueError("url: an address such as 'https://example.org/mcp' is needed, without a password in it")
        self.origin = f"{parts.scheme}://{parts.netloc}"  # all of the address that may stand in a log
        self._user_headers = _checked(headers, auth)
        self._auth = auth
        self._connect_seconds = connect_seconds
        self._is_exposed = parts.scheme == "http" and not is_local(url)  # others can read what is sent
        if self._is_exposed:
            self._warn({})  # before anything is sent
        try:
            self._body = body_class()
        except ModuleNotFoundError:
            raise missing_extra("http", "a server at a URL needs aiohttp") from None
        self.address = _url(url)
        # The last that came on a connection, of those that came in parts.
        self._bodies: dict[ResponseHandler, StreamReader] = {}

    def open(self) -> None:
        """In the loop it will be used in."""
        import aiohttp

        # `HttpClientTransport` limits what is open.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_socket)
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
        """The response, after redirects to the same place and after showing who we are."""
        redirects = 0
        challenged_statuses: set[int] = set()  # how we were refused before
        while True:
            if request is not None:
                request.sent = Sent.NO  # nor was it, if it was turned away
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
            if response.connection is not None:  # there is more of it to come
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
                    request.sent = Sent.NO  # meanwhile: somebody may have to be asked
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
        """See to it that whoever reads a body is told when its connection is lost.

        aiohttp (3.14.5) does not tell where a chunk is malformed, as when a proxy writes its error into a stream: the
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
            closed.exception()  # seen
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
        """What a broken connection means. Nothing of the request is in it: headers hold secrets."""
        import aiohttp

        hint = ""
        match problem:
            case aiohttp.ConnectionTimeoutError():
                text = f"no connection to {self.origin} within {self._connect_seconds:g} s"
                hint = "Is the address right, and can it be reached from here?"
            case aiohttp.ClientConnectorDNSError():
                text, hint = f"no connection to {self.origin}: the name is not known", "Is the address right?"
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
            self._is_exposed = False  # once is enough


@cache
def body_class() -> Any:
    """The type of a request's body, made when aiohttp is there."""
    from aiohttp.payload import Payload

    class Body(Payload):
        """A message on its way out. As soon as a part of it may have left, its request says so."""

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
                if self._about.future.done():  # its caller was told that it was not sent: so it must not leave later
                    raise ConnectionAbortedError
                self._about.sent = Sent.UNKNOWN
            if len(self._value) <= _CHUNK_BYTES:
                await writer.write(self._value)
                return
            whole = memoryview(self._value)
            for at in range(0, len(whole), _CHUNK_BYTES):  # each waits until the peer has taken most of those before
                await writer.write(whole[at : at + _CHUNK_BYTES])

        def abort(self) -> None:
            """Close its connection without waiting until the peer takes the rest."""
            if self._transport is not None:
                self._transport.abort()

    return Body


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket that asks a silent peer whether it is there: on a stream nobody may speak for hours (P-11)."""
    sock = socket.socket(*address[:3])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock


def close_response(response: ClientResponse) -> None:
    """Be done with a response; unless all of it has come, its connection is closed at once."""
    if not response.closed:
        connection = response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
        response.close()


async def drain_response(response: ClientResponse) -> None:
    """Let a response of which nothing more is wanted end by itself, for a moment: its connection can be used again."""
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
    """What is raised when a connection cannot be made, or breaks, or brings what is not HTTP."""
    from aiohttp import ClientError
    from aiohttp.http_exceptions import HttpProcessingError

    return ClientError, HttpProcessingError, OSError  # a TimeoutError is one


def _checked(headers: Mapping[str, str], auth: Authorizer | None) -> dict[str, str]:
    """A user's headers, if they can be sent and are not ours to set; and who we are."""
    for name, value in headers.items():
        plain = name.lower()
        if plain in _RESERVED_HEADERS or plain.startswith("mcp-") or (auth is not None and plain == "authorization"):
            raise ValueError(f"headers: {name!r} is set by the client itself")
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError(f"headers: {name!r} cannot be sent as a header")
    agent = {} if "user-agent" in map(str.lower, headers) else {"User-Agent": f"handrail/{__version__}"}
    return {**agent, **headers}


def _url(text: str) -> URL:
    """An address just as it is written, as far as a request can hold that."""
    from yarl import URL

    return URL(text, encoded=_WRITTEN.fullmatch(text) is not None)


def same_origin_url(url: URL, text: str) -> URL | None:
    """Where `text` points to from `url`, if that is at the same scheme, host and port."""
    try:
        target = url.join(_url(text))
        is_same = (target.scheme, target.host, target.port) == (url.scheme, url.host, url.port)
    except ValueError:
        return None
    is_plain = target.raw_user is None and target.raw_password is None
    return target if text and is_same and is_plain else None
