"""Discovery of the authorization server: from the challenge of an MCP server to the metadata of its issuer.

Without I/O: the flows here are generators that yield requests and are sent the responses. All responses are untrusted:
every URL passes `validate_url` before it is yielded, and every document has to name its subject, the resource metadata
the server and the server metadata the issuer (RFC 9728, section 3.3; RFC 8414, section 3.3).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct, ValidationError, convert

from handrail.errors import AuthorizationError
from handrail.model import Json
from handrail.protocol.http_rules import is_local

__all__ = [
    "Challenge",
    "Discovered",
    "FlowRequest",
    "FlowResponse",
    "ServerMetadata",
    "discover",
    "origin",
    "read_challenge",
    "validate_url",
]

MAX_URL_CHARS = 8192
MAX_CHALLENGE_CHARS = 8192
MAX_SCOPES = 100
RESOURCE_METADATA_PATH = "/.well-known/oauth-protected-resource"
SERVER_METADATA_PATH = "/.well-known/oauth-authorization-server"
OPENID_CONFIGURATION_PATH = "/.well-known/openid-configuration"

# Only characters on which all URL parsers agree (RFC 3986, section 2).
PLAIN_URL = re.compile(r"(?i:https?)://[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+")
HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9a-f:.]+")
SCOPE = re.compile(r"[!#-\[\]-~]+")  # RFC 6749, section 3.3
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
PART = re.compile(  # a parameter, or a scheme with or without its one value (RFC 9110, section 11)
    rf'[\s,]*(?:(?P<name>{_TOKEN})\s*=\s*(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s,"=][^\s,"]*))'
    rf"|(?P<scheme>{_TOKEN})(?:\s+[A-Za-z0-9._~+/-]+=*(?=\s*(?:,|$)))?(?=[\s,]|$))"
)

T = TypeVar("T")
D = TypeVar("D", bound=Struct)


class Redacted(Struct, frozen=True):
    """A struct without its members in its repr: they may be secret."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"


class FlowRequest(Redacted, frozen=True):
    """GET `url`, or POST the secret `data` to it; the flow is sent a FlowResponse."""

    url: str
    data: dict[str, str] | bytes | None = None  # fields of a form, or JSON
    headers: dict[str, str] = {}


class AuthorizationRequest(Redacted, frozen=True):
    """Have the user open `url` and consent; the flow is sent the whole URL of the redirect."""

    url: str
    state: str
    issuer: str


Flow = Generator[FlowRequest | AuthorizationRequest, Any, T]
"""Yields its steps and is sent the result of each."""


class FlowResponse(Redacted, frozen=True):
    """A response; `body` is its JSON, None if it is not JSON."""

    status: int
    body: Json = None


class Challenge(Struct, frozen=True):
    """The Bearer challenge of a server."""

    metadata_url: str = ""
    scopes: tuple[str, ...] = ()
    error: str = ""


class ResourceMetadata(Struct):
    """RFC 9728."""

    resource: str
    authorization_servers: list[str] | None = None
    scopes_supported: list[str] | None = None


class ServerMetadata(Struct):
    """RFC 8414, and the members of OpenID Connect Discovery that are the same."""

    issuer: str
    authorization_endpoint: str | None = None
    token_endpoint: str | None = None
    registration_endpoint: str | None = None
    code_challenge_methods_supported: list[str] | None = None
    token_endpoint_auth_methods_supported: list[str] | None = None
    scopes_supported: list[str] | None = None
    client_id_metadata_document_supported: bool | None = None
    authorization_response_iss_parameter_supported: bool | None = None


class Discovered(Struct, frozen=True):
    """The authorization server of a resource; every URL in it is validated."""

    resource: str
    scopes: tuple[str, ...]
    server: ServerMetadata
    is_guess: bool = False  # no metadata: the default endpoints of 2025-03-26


def read_challenge(header: str) -> Challenge:
    """Return the Bearer challenges of a `WWW-Authenticate` as one; malformed parts are ignored."""
    params: dict[str, str] = {}
    scheme, at = "", 0
    while (part := PART.match(header, at, MAX_CHALLENGE_CHARS)) is not None:
        at = part.end()
        if part["scheme"]:
            scheme = part["scheme"].lower()
        elif scheme == "bearer":
            value = part["bare"] if part["quoted"] is None else re.sub(r"\\(.)", r"\1", part["quoted"])
            params.setdefault(part["name"].lower(), value)
    return Challenge(
        params.get("resource_metadata", ""), unique_scopes(params.get("scope", "").split()), params.get("error", "")
    )


def unique_scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    """Return the valid scopes, each once."""
    return tuple(dict.fromkeys(filter(SCOPE.fullmatch, scopes)))[:MAX_SCOPES]


def validate_url(url: str, what: str, *, local: bool) -> str:
    """Return `url` if it is https, or with `local` http to this machine; AuthorizationError if not."""
    try:
        parts = urlsplit(url) if len(url) <= MAX_URL_CHARS and PLAIN_URL.fullmatch(url) else SplitResult(*[""] * 5)
        is_good = HOST.fullmatch(parts.hostname or "") and parts.port != 0 and not {"@", "#"} & {*url}
        is_good = is_good and (parts.scheme == "https" or (local and is_local(url)))
    except ValueError:  # an invalid port, or unmatched brackets
        is_good = False
    if not is_good:
        raise AuthorizationError(
            f"{what} is {url[:100]!a}: https is needed, or http to this machine if the server is on it too"
        )
    return url


def origin(url: str) -> str:
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    default = {"https": 443, "http": 80}.get(parts.scheme)
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port not in (None, default) else "")


def discover(url: str, challenge: Challenge, issuer: str | None = None) -> Flow[Discovered]:
    """Return the authorization server of the MCP server at `url`: `issuer`, by default the first it names.

    A server without resource metadata is one of 2025-03-26 and its own authorization server.
    """
    local = is_local(url)
    validate_url(url, "the server's URL", local=local)
    home, path = origin(url), urlsplit(url).path.rstrip("/")
    places = [validate_url(challenge.metadata_url, "resource_metadata", local=local)] if challenge.metadata_url else []
    places += [home + RESOURCE_METADATA_PATH + path, home + RESOURCE_METADATA_PATH]
    resource = yield from _fetch_first(places, ResourceMetadata)
    name, scopes, servers = home + path, unique_scopes(()), [home]
    if resource is not None:
        name, scopes = _own_resource(resource.resource, url), unique_scopes(resource.scopes_supported or ())
        servers = resource.authorization_servers or []
    if not servers or (issuer is not None and issuer not in servers):
        raise AuthorizationError(
            "the server does not name the authorization server of the client_id"
            if servers
            else "the server names no authorization server"
        )
    chosen = validate_url(issuer or servers[0], "the authorization server", local=local)
    server = yield from _fetch_first(_metadata_urls(chosen), ServerMetadata)
    is_guess = server is None and resource is None
    if server is None and resource is None:
        server = ServerMetadata(home, f"{home}/authorize", f"{home}/token", f"{home}/register", ["S256"])
    if server is None:
        raise AuthorizationError(f"there is no metadata of the authorization server {chosen}")
    # For a server of 2025-03-26 the issuer may end with a slash or not: both have the same metadata URL.
    if server.issuer != chosen and not (resource is None and server.issuer == chosen + "/"):
        raise AuthorizationError(f"the metadata of {chosen} is that of another issuer, {server.issuer[:100]!a}")
    for field in ("authorization_endpoint", "token_endpoint", "registration_endpoint"):
        if (endpoint := getattr(server, field)) is not None:
            validate_url(endpoint, field, local=local)
    return Discovered(name, scopes, server, is_guess)


def _metadata_urls(issuer: str) -> list[str]:
    home, path = origin(issuer), urlsplit(issuer).path.rstrip("/")
    if urlsplit(issuer).query:
        raise AuthorizationError("the authorization server has a query in its name")
    return [
        home + SERVER_METADATA_PATH + path,
        home + OPENID_CONFIGURATION_PATH + path,
        *([home + path + OPENID_CONFIGURATION_PATH] if path else []),
    ]


def _fetch_first(places: list[str], kind: type[D]) -> Flow[D | None]:
    """Return the document at the first of `places` that has one; a status of 500 or more is an error, not absence."""
    for url in dict.fromkeys(places):
        answer: FlowResponse = yield FlowRequest(url)
        if answer.status >= 500:
            raise AuthorizationError(f"{url} answers with status {answer.status}", hint="Try again later.")
        if answer.status == 200 and isinstance(answer.body, dict):
            try:
                return convert(answer.body, kind)
            except ValidationError as wrong:
                raise AuthorizationError(f"the metadata at {url} cannot be read: {wrong}") from None
    return None


def _own_resource(resource: str, url: str) -> str:
    """Return `resource` if the server at `url` is the resource, or a part of it (RFC 8707, section 2)."""
    own, named = urlsplit(url), urlsplit(resource if PLAIN_URL.fullmatch(resource) else "")
    path = named.path.rstrip("/")
    try:
        is_own = origin(resource) == origin(url) and f"{own.path.rstrip('/')}/".startswith(f"{path}/")
    except ValueError:
        is_own = False
    if not is_own or "#" in resource or named.query not in ("", own.query) or "@" in named.netloc:
        raise AuthorizationError(f"the server's metadata is that of another resource, {resource[:100]!a}")
    return resource
