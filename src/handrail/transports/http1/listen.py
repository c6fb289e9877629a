"""Listening for HTTP: on an address, for any ASGI application, until asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from handrail.options import expect
from handrail.transports.process.supervisor import WorkerPool, run_process

if TYPE_CHECKING:
    from handrail.transports.http1.server import Stop

__all__ = ["Address", "CannotListen", "HttpLimits", "run_http", "tls_context"]

log = logging.getLogger("handrail")

_FORMS = "'127.0.0.1:8000', ':8000', '[::1]:8000', 'localhost:0' or 'unix:/run/handrail.sock'"


class HttpLimits(Struct, frozen=True, kw_only=True):
    """Sizes and times no peer can exceed, for each process."""

    max_header_bytes: int = 32 * 1024  # request line, headers and trailers
    max_headers: int = 100
    header_seconds: float = 10.0  # from the first byte, or the connection, to the end of the headers
    body_seconds: float = 30.0  # from the end of the headers to the end of the body
    idle_seconds: float = 75.0  # between two requests of a connection
    write_seconds: float = 30.0  # then a peer that takes nothing of an answer is cut off
    max_connections: int = 10_000

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            expect(f"HttpLimits: {name}", getattr(self, name), "a number", int, float)
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not more than 0")


class CannotListen(OSError):
    """An address that is taken, or not ours."""


class Address(Struct, frozen=True):
    """Where to listen: a host and a port, or the path of a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str | int) -> Address:
        """Read an address; a number alone is a port of this machine."""
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
        """A socket connections can be made to, though nobody accepts them yet."""
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
        # One of several: with port 0 each would get its own. "localhost" is 127.0.0.1, which every client tries.
        family, kind, protocol, _, place = min(candidates, key=lambda each: each[0] != socket.AF_INET)
        ip = ipaddress.ip_address(str(place[0]).partition("%")[0])
        if not ip.is_loopback:
            where = "all interfaces" if ip.is_unspecified else f"{ip}"
            log.warning("listens on %s, not only for this machine: whoever reaches it can try to call its tools", where)
        # With its protocol: asyncio sets TCP_NODELAY only on sockets that say they are TCP.
        sock = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
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
                # Left behind by a process that was killed, or somebody listens on it.
                if sock.connect_ex(self.path) == 0:
                    raise CannotListen(f"cannot listen on {self.path}: somebody does already")
                os.unlink(self.path)
            sock.bind(self.path)
        except OSError as problem:
            sock.close()
            if problem.errno is None:
                raise
            raise CannotListen(f"cannot listen on {self.path}: {problem.strerror}") from None
        return sock


def run_http(
    app: Any,
    address: str | int,
    *,
    limits: HttpLimits,
    stop: Stop,
    grace: float = 3.0,
    workers: int = 1,
    certificate: str | None = None,
    key: str | None = None,
    ready: Callable[[str], None],
    second_app: tuple[Any, str] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, in this process or in `workers` children of it; signals are ours meanwhile.

    It ends as `served` does, within `grace` and 1.5 s. What does not end by then is left, and a second Ctrl-C does not
    wait. `beside` is a second application, with an address of its own, that is served for as long.
    """
    from handrail.transports.http1.server import serve_app  # what is missing is said before anything listens

    if workers < 1:
        raise ValueError(f"workers: {workers} is less than 1")
    if workers > 1 and not hasattr(os, "fork"):
        raise ValueError(f"workers: {workers}: this system cannot fork, start several processes instead")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("run takes the signals of the process: call it in the main thread, or serve `asgi()`")
    tls = tls_context(certificate, key)
    place, scheme = Address.parse(address), "https" if tls else "http"
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(place.listen())
        other = None
        if second_app is not None:
            where = Address.parse(second_app[1])
            other = stack.enter_context(where.listen())
            log.info("also listens on %s", where.url(other, scheme))

        async def serve(stop_event: asyncio.Event, on_started: Callable[[], None]) -> None:
            async with contextlib.AsyncExitStack() as stack:
                if second_app is not None and other is not None:
                    await stack.enter_async_context(serve_app(second_app[0], other, limits=limits, tls=tls, grace=0.0))
                await stack.enter_async_context(
                    serve_app(app, listening, limits=limits, tls=tls, stop=stop, grace=grace)
                )
                on_started()
                await stop_event.wait()

        def begun() -> None:
            ready(place.url(listening, scheme))

        if workers == 1:
            run_process(serve, grace, begun)
        else:
            WorkerPool(workers, serve, grace).run(begun)


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
