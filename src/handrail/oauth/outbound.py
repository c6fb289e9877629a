"""Asking where a stranger points us: the address is looked up, checked, and connected to as it was checked.

A server chooses the URLs its clients fetch in the course of authorization, so it could choose ones that only the client
can reach. Public addresses may be asked; those of this machine if the server is on it, those of private networks if the
server is in one; all others never. There are no redirects.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from msgspec import json

from handrail.errors import AuthorizationError, TransportError, missing_extra
from handrail.oauth.discovery import FlowRequest, FlowResponse, validate_url
from handrail.oauth.fetch import exchange
from handrail.protocol.http_rules import is_local

try:
    from aiohttp import TCPConnector
    from aiohttp.abc import AbstractResolver, ResolveResult
except ModuleNotFoundError:
    raise missing_extra("http", "talking to an address needs aiohttp") from None

__all__ = ["Outbound", "Resolve", "address_kind", "fetch_public", "resolve_host"]

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""The addresses of a host."""
AddressInfo = tuple[int, int, int, str, tuple[object, ...]]

NETWORKS = {  # what is in none of them is public
    # This network, link-local, protocol assignments, documentation, 6to4 relays, benchmarks, multicast, reserved;
    # where clouds tell a machine its secrets, as far as not link-local; Teredo and other assignments, documentation,
    # 6to4.
    "forbidden": "0.0.0.0/8 169.254.0.0/16 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15 198.51.100.0/24"
    " 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 100.100.100.200 168.63.129.16 fd00:ec2::254"
    " 2001::/23 2001:db8::/32 2002::/16 3fff::/20",
    "loopback": "127.0.0.0/8 ::1",
    "private": "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 100.64.0.0/10 fc00::/7",
}
NETWORK_KINDS = [(ip_network(net), kind) for kind, nets in NETWORKS.items() for net in nets.split()]
PUBLIC_IPV6 = ip_network("2000::/3")  # what is not in there is link-local, multicast, NAT64, or nothing yet


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
    """What may be asked on behalf of the MCP server at `url`, which the user chose."""

    def __init__(self, url: str, *, resolve: Resolve = resolve_host, deadline: float = 15) -> None:
        self._url, self._local = url, is_local(url)
        self._resolve, self._deadline = resolve, deadline
        self._allowed: frozenset[str] | None = None

    async def send(self, step: FlowRequest) -> FlowResponse:
        """The answer to `step`; AuthorizationError if there is none, or if it must not be asked."""
        validate_url(step.url, "the URL", local=self._local)
        try:
            # In the clear only to this machine, wherever its name leads.
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
        """The kinds of addresses that may be asked."""
        if self._allowed is None:
            kinds = (
                {"loopback"}
                if self._local
                else {address_kind(each) for each in await _addresses_of(self._resolve, self._url)}
            )
            # A name that leads to this machine is its owner's doing, not the user's.
            more = kinds if self._local or kinds == {"private"} else set()
            self._allowed = frozenset({"public", *more})
        return self._allowed


async def fetch_public(url: str, *, resolve: Resolve = resolve_host, deadline: float = 15) -> bytes:
    """What is at a public https address that a stranger named; TransportError if that is nothing we may have."""
    if not url.lower().startswith("https:") or is_local(url):
        raise TransportError("only public https addresses are fetched")
    connector = _connector(resolve, frozenset({"public"}))
    status, _, body = await exchange(url, deadline, headers={"Accept": "*/*"}, connector=connector)
    if status != 200:
        raise TransportError(f"status {status}")
    return body


def _connector(resolve: Resolve, allowed: frozenset[str]) -> TCPConnector:
    resolver = _CheckedResolver(resolve, allowed)
    return TCPConnector(
        resolver=resolver, use_dns_cache=False, happy_eyeballs_delay=None, socket_factory=resolver.socket
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


class _CheckedResolver(AbstractResolver):
    """Only addresses of the kinds that are `allowed`: as looked up, and again when one is connected to."""

    def __init__(self, resolve: Resolve, allowed: frozenset[str]) -> None:
        self._resolve, self._allowed = resolve, allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._resolve(host)
        for address in addresses:  # one bad one spoils them all: it is not there by chance
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
        """A socket for the address that is about to be connected to, named in the URL or looked up."""
        family, kind, proto, _, address = info
        self._check(str(address[0]))
        return socket.socket(family, kind, proto)

    def _check(self, address: str) -> None:
        if (kind := address_kind(address)) not in self._allowed:
            raise TransportError(f"its address is {kind}, and no server may send us there")
