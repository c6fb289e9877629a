"""Options of a server over HTTP. A module of their own: `Server` documents them without loading the endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from handrail.guards.identity import Verifier
    from handrail.transports.http1.listen import HttpLimits

__all__ = ["EndpointOptions", "HttpOptions"]


class EndpointOptions(TypedDict, total=False):
    """Options of the endpoint.

    path: the path of the endpoint ("/mcp")
    hosts: the names it answers to, with or without a port; "*": any (names of this machine)
    origins: web pages that may use it, beside those of its own address
    auth: a verifier of callers: ApiKeys, JwtVerifier, Introspection or your own (every caller is anonymous)
    legacy_stateless: serve clients of handshake revisions without a session (False)
    metrics_token: serve `/metrics` for requests with this token (there is no such page)
    access_log: log a line of JSON for each request, by the logger "handrail.access" (False)
    advertise: where other replicas reach this one, such as http://10.1.2.3:8000; they pass calls on (where it listens)
    """

    path: str
    hosts: Iterable[str]
    origins: Iterable[str]
    auth: Verifier
    legacy_stateless: bool
    metrics_token: str
    access_log: bool
    advertise: str


class HttpOptions(EndpointOptions, total=False):
    """Options of the listener.

    store: a SQLite file for what processes share, and what outlives one (in memory; several workers: a temporary file)
    workers: processes on one port (1)
    certificate: a file, for TLS
    key: a file with the key of the certificate
    http_limits: sizes and times of connections (HttpLimits())
    metrics: an address of its own for `/metrics`
    ready: called with the URL when the server listens (print the URL to standard error)
    """

    store: str | Path
    workers: int
    certificate: str
    key: str
    http_limits: HttpLimits
    metrics: str
    ready: Callable[[str], None]
