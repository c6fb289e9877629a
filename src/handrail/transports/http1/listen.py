"""Addresses, limits and TLS of an HTTP listener."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import ssl
import stat
from collections.abc import Iterator

from msgspec import Struct

from handrail.suggest import expect

__all__ = ["Address", "CannotListen", "HttpLimits", "tls_context"]

log = logging.getLogger("handrail")

_FORMS = "'127.0.0.1:8000', ':8000', '[::1]:8000', 'localhost:0' or 'unix:/run/handrail.sock'"


class HttpLimits(Struct, frozen=True, kw_only=True):
    """Limits on sizes and times, for each process."""

    max_header_bytes: int = 32 * 1024  # request line, headers and trailers
    max_headers: int = 100
    header_seconds: float = 10.0  # from the first byte, or the connection, to the end of the headers
    body_seconds: float = 30.0  # from the end of the headers to the end of the body
    idle_seconds: float = 75.0  # between two requests of a connection
    write_seconds: float = 30.0  # then a peer that reads nothing of a response is disconnected
    max_connections: int = 10_000

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            expect(f"HttpLimits: {name}", getattr(self, name), "a number", int, float)
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not more than 0")


class CannotListen(OSError):
    """An address that is in use, or not of this machine."""


class Address(Struct, frozen=True):
    """An address to listen on: a host and a port, or the path of a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str | int) -> Address:
        """Parse an address; a number alone is a port of this machine."""
        if isinstance(text, int) and not isinstance(text, bool):
            text = f":{text}"
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not an address: write '127.0.0.1:8000', or a port: 8000")
        if text.startswith("unix:"):
            if text == "unix:" or "\0" in text:
                raise ValueError(f"{text!r} has no path: write 'unix:/run/handrail.sock'")
            return cls(path=text.removeprefix("unix:"))
        host, colon, port = text.rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is not an address with a port from 0 to 65535: write {_FORMS}")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
            with contextlib.suppress(ValueError):
                return cls(host=str(ipaddress.IPv6Address(host)), port=int(port))
            raise ValueError(f"{text!r}: {host!r} is not an IPv6 address")
        if not set(host).isdisjoint("[]:/@ \0"):
            raise ValueError(f"{text!r} is not an address: write {_FORMS}, without a scheme or a path")
        return cls(host=host or "127.0.0.1", port=int(port))

    @contextlib.contextmanager
    def listen(self) -> Iterator[socket.socket]:
        """Open a listening socket; the caller accepts its connections."""
        sock = self._bind_unix() if self.path else self._bind_inet()
        try:
            sock.listen()
            yield sock
        finally:
            sock.close()
            if self.path:
                with contextlib.suppress(OSError):
                    os.unlink(self.path)

    def url(self, listening: socket.socket, scheme: str) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{listening.getsockname()[1]}"

    def _bind_inet(self) -> socket.socket:
        candidates = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Only one of them: with port 0 each would get another port. For "localhost" that is 127.0.0.1, which every
        # client tries.
        family, kind, protocol, _, sockaddr = min(candidates, key=lambda each: each[0] != socket.AF_INET)
        ip = ipaddress.ip_address(str(sockaddr[0]).partition("%")[0])
        if not ip.is_loopback:
            where = "all interfaces" if ip.is_unspecified else f"{ip}"
            log.warning("http: listening on %s: clients on other machines can try to call the tools", where)
        # With its protocol: asyncio sets TCP_NODELAY only on sockets whose protocol is TCP.
        sock = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(sockaddr)
        except OSError as problem:
            sock.close()
            hint = "; end what listens there, or choose another port" if problem.errno == errno.EADDRINUSE else ""
            text = f"cannot listen on {self.host}:{self.port}: {problem.strerror}{hint}"
            raise CannotListen(problem.errno, text) from None
        return sock

    def _bind_unix(self) -> socket.socket:
        if not hasattr(socket, "AF_UNIX"):
            raise ValueError(f"unix:{self.path}: there are no Unix sockets on this system")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if os.path.exists(self.path) and stat.S_ISSOCK(os.stat(self.path).st_mode):
                # Left by a process that was killed, unless a connection succeeds.
                if sock.connect_ex(self.path) == 0:
                    raise CannotListen(f"cannot listen on {self.path}: another process listens there")
                os.unlink(self.path)
            sock.bind(self.path)
        except OSError as problem:
            sock.close()
            if problem.errno is None:
                raise
            raise CannotListen(f"cannot listen on {self.path}: {problem.strerror}") from None
        return sock


def tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    if certificate is None:
        if key is not None:
            raise ValueError("key: there is no certificate to go with it")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key)
    except OSError as problem:  # ssl.SSLError is one
        raise ValueError(f"cannot use the certificate {certificate!r} with key {key!r}: {problem}") from None
    return context
