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
from handrail.oauth.discovery import Answer, Ask, checked
from handrail.oauth.fetch import exchange
from handrail.protocol.http_rules import is_local

try:
    from aiohttp import TCPConnector
    from aiohttp.abc import AbstractResolver, ResolveResult
except ModuleNotFoundError:
    raise missing_extra("http", "talking to an address needs aiohttp") from None

__all__ = ["Outbound", "Resolve", "fetched", "kind_of", "look_up"]

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""The addresses of a host."""
AddressInfo = tuple[int, int, int, str, tuple[object, ...]]

NETS = {  # what is in none of them is public
    # This network, link-local, protocol assignments, documentation, 6to4 relays, benchmarks, multicast, reserved;
    # where clouds tell a machine its secrets, as far as not link-local; Teredo and other assignments, documentation,
    # 6to4.
    "forbidden": "0.0.0.0/8 169.254.0.0/16 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15 198.51.100.0/24"
    " 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 100.100.100.200 168.63.129.16 fd00:ec2::254"
    " 2001::/23 2001:db8::/32 2002::/16 3fff::/20",
    "loopback": "127.0.0.0/8 ::1",
    "private": "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 100.64.0.0/10 fc00::/7",
}
KINDS = [(ip_network(net), kind) for kind, nets in NETS.items() for net in nets.split()]
PUBLIC_IPV6 = ip_network("2000::/3")  # what is not in there is link-local, multicast, NAT64, or nothing yet


def kind_of(address: str) -> str:
    """`public`, `loopback`, `private`, or `forbidden`."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    usual = "public" if found.version == 4 or found in PUBLIC_IPV6 else "forbidden"
    return next((kind for net, kind in KINDS if found in net), usual)


async def look_up(host: str) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in found]


class Outbound:
    """What may be asked on behalf of the MCP server at `url`, which the user chose."""

    def __init__(self, url: str, *, resolve: Resolve = look_up, deadline: float = 15) -> None:
        self._url, self._local = url, is_local(url)
        self._resolve, self._deadline = resolve, deadline
        self._allowed: frozenset[str] | None = None

    async def ask(self, step: Ask) -> Answer:
        """The answer to `step`; AuthorizationError if there is none, or if it must not be asked."""
        checked(step.url, "the URL", local=self._local)
        try:
            # In the clear only to this machine, wherever its name leads.
            allowed = await self._kinds() if step.url.lower().startswith("https:") else frozenset({"loopback"})
            connector = _connector(self._resolve, allowed)
            status, _, body = await exchange(
                step.url, self._deadline, data=step.data, headers=step.headers, connector=connector
            )
        except TransportError as failed:
            host = urlsplit(step.url).netloc
            raise AuthorizationError(f"{host} was asked in the course of authorization: {failed.text}") from failed
        try:
            return Answer(status, json.decode(body))
        except (ValueError, RecursionError):
            return Answer(status)

    async def _kinds(self) -> frozenset[str]:
        """The kinds of addresses that may be asked."""
        if self._allowed is None:
            kinds = {"loopback"} if self._local else {kind_of(each) for each in await _found(self._resolve, self._url)}
            # A name that leads to this machine is its owner's doing, not the user's.
            more = kinds if self._local or kinds == {"private"} else set()
            self._allowed = frozenset({"public", *more})
        return self._allowed


async def fetched(url: str, *, resolve: Resolve = look_up, deadline: float = 15) -> bytes:
    """What is at a public https address that a stranger named; TransportError if that is nothing we may have."""
    if not url.lower().startswith("https:") or is_local(url):
        raise TransportError("only public https addresses are fetched")
    connector = _connector(resolve, frozenset({"public"}))
    status, _, body = await exchange(url, deadline, headers={"Accept": "*/*"}, connector=connector)
    if status != 200:
        raise TransportError(f"status {status}")
    return body


def _connector(resolve: Resolve, allowed: frozenset[str]) -> TCPConnector:
    checked = _Checked(resolve, allowed)
    return TCPConnector(resolver=checked, use_dns_cache=False, happy_eyeballs_delay=None, socket_factory=checked.socket)


async def _found(resolve: Resolve, url: str) -> Sequence[str]:
    host = urlsplit(url).hostname or ""
    try:
        return [str(ip_address(host))]
    except ValueError:
        try:
            return await resolve(host)
        except OSError as failed:
            raise TransportError(f"{host} is not known: {failed.strerror}") from failed


class _Checked(AbstractResolver):
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
        if (kind := kind_of(address)) not in self._allowed:
            raise TransportError(f"its address is {kind}, and no server may send us there")
