"""HTTP requests of OAuth, and which addresses they may go to.

A server chooses the URLs its clients fetch in the course of authorization, so it could choose ones that only the client
can reach. Public addresses are allowed; those of this machine if the server is on it, those of private networks if the
server is in one; all others never. The address is resolved, checked, and connected to as it was checked. There are no
redirects.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

from msgspec import json

from handrail.errors import AuthorizationError, TransportError, missing_extra
from handrail.oauth.flow import FlowRequest, FlowResponse, validate_url
from handrail.protocol.http_rules import is_local, is_secure_url

if TYPE_CHECKING:  # aiohttp is optional, and imported where it is used
    from aiohttp import BaseConnector, TCPConnector
    from aiohttp.abc import AbstractResolver, ResolveResult

__all__ = [
    "Outbound",
    "Resolve",
    "SingleFlight",
    "address_kind",
    "check_secure_url",
    "exchange",
    "fetch_json",
    "fetch_public",
    "require_aiohttp",
    "resolve_host",
]

MAX_RESPONSE_BYTES = 64 * 1024
MAX_FLIGHTS = 256  # calls under way in one SingleFlight
CONNECT_SECONDS = 10.0
HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity"}

T = TypeVar("T")
Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Returns the addresses of a host."""
AddressInfo = tuple[int, int, int, str, tuple[object, ...]]

NETWORKS = {  # an address in none of them is public
    # This network, link-local, protocol assignments, documentation, 6to4 relays, benchmarks, multicast, reserved;
    # metadata services of clouds that are not link-local; Teredo and other assignments, documentation, 6to4.
    "forbidden": "0.0.0.0/8 169.254.0.0/16 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15 198.51.100.0/24"
    " 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 100.100.100.200 168.63.129.16 fd00:ec2::254"
    " 2001::/23 2001:db8::/32 2002::/16 3fff::/20",
    "loopback": "127.0.0.0/8 ::1",
    "private": "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 100.64.0.0/10 fc00::/7",
}
NETWORK_KINDS = [(ip_network(net), kind) for kind, nets in NETWORKS.items() for net in nets.split()]
PUBLIC_IPV6 = ip_network("2000::/3")  # the rest is link-local, multicast, NAT64 or unassigned


def check_secure_url(url: str) -> str:
    """Return `url`, if its response can be trusted and fetched: https, or http to this machine."""
    if not is_secure_url(url):
        name = urlsplit(url).hostname or ""
        raise ValueError(f"{name!r}: https is needed, or http to this machine, and no password in the URL")
    require_aiohttp("asking an issuer")
    return url


def require_aiohttp(purpose: str) -> None:
    """ModuleNotFoundError with the command that installs aiohttp, if it is missing."""
    try:
        import aiohttp  # noqa: F401  # only tried
    except ModuleNotFoundError:
        raise missing_extra("http", f"{purpose} needs aiohttp") from None


async def fetch_json(
    url: str,
    kind: type[T],
    deadline: float,
    *,
    form: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> T:
    """Return the JSON at `url`, or in answer to `form`; TransportError if there is none or it does not fit `kind`."""
    status, _, body = await exchange(url, deadline, data=form, headers=headers)
    if status != 200:
        raise TransportError(f"status {status}")
    try:
        return json.decode(body, type=kind)
    except (ValueError, RecursionError) as failed:
        raise TransportError(type(failed).__name__) from failed


async def exchange(
    url: str,
    deadline: float | None,
    *,
    data: Mapping[str, str] | bytes | None = None,
    headers: Mapping[str, str] | None = None,
    connector: BaseConnector | None = None,
) -> tuple[int, Mapping[str, str], bytes]:
    """Return status, headers (names in lower case) and body of the response to a GET, or to a POST of `data`.

    TransportError if there is none. Without a deadline only connecting has a timeout. No redirects, cookies,
    compression, or proxies of the environment. Each request has a connection of its own: requests are rare, and a
    connection that stays open fails now and then when it is used again.
    """
    import aiohttp

    session = aiohttp.ClientSession(
        headers={**HEADERS, **(headers or {})},
        timeout=aiohttp.ClientTimeout(total=deadline, sock_connect=None if deadline else CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        connector=connector,
    )
    method = "GET" if data is None else "POST"
    try:
        async with session, session.request(method, url, data=data, allow_redirects=False) as response:
            body = b""
            async for piece in response.content.iter_chunked(8192):
                body += piece
                if len(body) > MAX_RESPONSE_BYTES:
                    raise TransportError(f"more than {MAX_RESPONSE_BYTES:,} bytes")
            return response.status, {name.lower(): value for name, value in response.headers.items()}, body
    except (aiohttp.ClientError, OSError, ValueError, RecursionError) as failed:  # TimeoutError is an OSError
        raise TransportError(type(failed).__name__) from None  # without its text, which may have the whole address


def address_kind(address: str) -> str:
    """`public`, `loopback`, `private`, or `forbidden`."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    usual = "public" if ip.version == 4 or ip in PUBLIC_IPV6 else "forbidden"
    return next((kind for net, kind in NETWORK_KINDS if ip in net), usual)


async def resolve_host(host: str) -> Sequence[str]:
    infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in infos]


class Outbound:
    """Requests in the course of authorization, on behalf of the MCP server at `url`, which the user chose."""

    def __init__(self, url: str, *, resolve: Resolve = resolve_host, deadline: float = 15) -> None:
        self._url, self._local = url, is_local(url)
        self._resolve, self._deadline = resolve, deadline
        self._allowed: frozenset[str] | None = None

    async def send(self, step: FlowRequest) -> FlowResponse:
        """Return the response to `step`; AuthorizationError if there is none, or its address is not allowed."""
        validate_url(step.url, "the URL", local=self._local)
        try:
            # Without TLS only to this machine, whatever the name resolves to.
            allowed = await self._allowed_kinds() if step.url.lower().startswith("https:") else frozenset({"loopback"})
            connector = _connector(self._resolve, allowed)
            status, _, body = await exchange(
                step.url, self._deadline, data=step.data, headers=step.headers, connector=connector
            )
        except TransportError as failed:
            host = urlsplit(step.url).netloc
            raise AuthorizationError(f"{host} was asked in the course of authorization: {failed.text}") from failed
        try:
            return FlowResponse(status, json.decode(body))
        except (ValueError, RecursionError):
            return FlowResponse(status)

    async def _allowed_kinds(self) -> frozenset[str]:
        """Return the kinds of addresses that are allowed."""
        if self._allowed is None:
            kinds = (
                {"loopback"}
                if self._local
                else {address_kind(each) for each in await _addresses_of(self._resolve, self._url)}
            )
            # A name that resolves to this machine is the choice of its owner, not of the user.
            more = kinds if self._local or kinds == {"private"} else set()
            self._allowed = frozenset({"public", *more})
        return self._allowed


async def fetch_public(url: str, *, resolve: Resolve = resolve_host, deadline: float = 15) -> bytes:
    """Return what is at a public https address of untrusted origin; TransportError if it is not allowed."""
    if not url.lower().startswith("https:") or is_local(url):
        raise TransportError("only public https addresses are fetched")
    connector = _connector(resolve, frozenset({"public"}))
    status, _, body = await exchange(url, deadline, headers={"Accept": "*/*"}, connector=connector)
    if status != 200:
        raise TransportError(f"status {status}")
    return body


def _connector(resolve: Resolve, allowed: frozenset[str]) -> TCPConnector:
    from aiohttp import TCPConnector

    resolver = _CheckedResolver(resolve, allowed)
    return TCPConnector(
        resolver=cast("AbstractResolver", resolver),  # it has the methods; the base class would import aiohttp
        use_dns_cache=False,
        happy_eyeballs_delay=None,
        socket_factory=resolver.socket,
    )


async def _addresses_of(resolve: Resolve, url: str) -> Sequence[str]:
    host = urlsplit(url).hostname or ""
    try:
        return [str(ip_address(host))]
    except ValueError:
        try:
            return await resolve(host)
        except OSError as failed:
            raise TransportError(f"{host} is not known: {failed.strerror}") from failed


class _CheckedResolver:
    """A resolver that allows some kinds of addresses: checked when resolved, and again when connected to."""

    def __init__(self, resolve: Resolve, allowed: frozenset[str]) -> None:
        self._resolve, self._allowed = resolve, allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        from aiohttp.abc import ResolveResult

        addresses = await self._resolve(host)
        for address in addresses:  # one that is not allowed spoils all: it is not there by chance
            self._check(address)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass

    def socket(self, info: AddressInfo) -> socket.socket:
        """Return a socket for the address that is connected to next, from the URL or resolved."""
        family, kind, proto, _, address = info
        self._check(str(address[0]))
        return socket.socket(family, kind, proto)

    def _check(self, address: str) -> None:
        if (kind := address_kind(address)) not in self._allowed:
            raise TransportError(f"its address is {kind}, and no server may send us there")


class SingleFlight:
    """Work under way by key: a second caller with the same key waits for the same result.

    The work does not belong to its first caller: a caller that is cancelled does not cancel it for the others.
    """

    def __init__(self) -> None:
        self._tasks: dict[bytes | str, asyncio.Task[Any]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    async def do(self, key: bytes | str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work`; TransportError if too much is under way, or this is closed."""
        if (task := self._tasks.get(key)) is None:
            if self._closed or len(self._tasks) >= MAX_FLIGHTS:
                raise TransportError("closed, or too much is asked at once")
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(partial(self._on_done, key))
        await asyncio.wait({task})
        if task.cancelled():
            raise TransportError("closed")
        result: T = task.result()
        return result

    def _on_done(self, key: bytes | str, task: asyncio.Task[Any]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # marked as retrieved: perhaps no task waits any more

    async def close(self) -> None:
        """Cancel all work; its callers get TransportError."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
