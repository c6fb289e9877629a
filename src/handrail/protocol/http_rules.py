"""The rules of HTTP, without I/O: allowed hosts and origins, and the headers that mirror a message.

The body decides the revision of a request; headers are cross-checks, and the session comes second. They mirror members
of the body for proxies, which do not read bodies.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from msgspec import UNSET

from handrail.errors import Kind, Refused
from handrail.jsonrpc import Request, encode
from handrail.model import Json, Object
from handrail.revisions.base import VERSION
from handrail.suggest import texts

Headers = Mapping[bytes, bytes]
HttpPost = Callable[[str, bytes, Mapping[str, str]], Awaitable[tuple[int, Mapping[str, str], bytes]]]
"""Posts a body with headers to an address: the status, the headers by their names in lower case, and the body."""

SESSION = b"mcp-session-id"
PROTOCOL = b"mcp-protocol-version"
ORIGIN = b"origin"
CONNECT_PATH = "/connect/"  # below the endpoint, before the name of an upstream: where browsers come back to
PAGE = """<!doctype html><meta charset="utf-8"><title>Handrail</title><p>{}</p>"""
PAGE_FIELDS = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
]

# Headers that must not occur twice: two readers of one request could read two different values.
_SINGLE_HEADERS = frozenset((b"authorization", b"content-type", b"host", b"last-event-id", ORIGIN, SESSION))
_LIST_HEADERS = frozenset((b"accept", b"tracestate", b"baggage"))
_CORS_HEADERS = (b"authorization", b"content-type", b"last-event-id", b"mcp-method", b"mcp-name", PROTOCOL, SESSION)
_HOST = r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?"
_MAX_CACHED_KEYS, _MAX_KEY_CHARS = 1_000, 512  # of the cache of accepted requests: entries, and length of one
_HOST_PORT = re.compile(_HOST)
_ORIGIN = re.compile(r"(https?)://" + _HOST)
_PORTS = {"http": "80", "https": "443"}
_LOOPBACK = re.compile(r"localhost|127(\.[0-9]{1,3}){3}|\[::1\]")
_SENTINEL = "=?base64?"
_BASE64_VALUE = re.compile(r"=\?base64\?(.*)\?=", re.DOTALL)
# No blanks at the edges: HTTP drops them.
_SAFE_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)?")
# Exactly that: a web page may send other types without asking first.
_JSON = re.compile(rb'(?i)\s*application/json\s*(;\s*(charset=(utf-8|"utf-8")\s*)?)?')
_LEGAL_VALUE = re.compile(r"[\t\x20-\x7e]*")
_INTEGER = re.compile(r"-?[0-9]{1,16}(?:\.0+)?")
# Which parameter of a method is repeated in `Mcp-Name`.
NAME_PARAMS = {"tools/call": "name", "resources/read": "uri", "prompts/get": "name"}


def is_local(url: str) -> bool:
    """Return whether `url` names this machine, by an address or as localhost: a DNS name can point anywhere."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def is_secure_url(url: str) -> bool:
    """Return whether `url` is safe from eavesdropping and holds no password: https, or http on this machine."""
    parts = urlsplit(url)
    is_http_here = parts.scheme == "http" and is_local(url)
    return bool(parts.hostname) and parts.username is None and (parts.scheme == "https" or is_http_here)


def base_url(scope: Mapping[str, Any], headers: Headers) -> str:
    """Return the address of the server of an ASGI request, as its client knows it."""
    host = headers.get(b"host", b"").decode("latin-1")
    return f"{scope.get('scheme', 'http')}://{host}{scope.get('root_path', '')}"


def headers_of(pairs: Sequence[tuple[bytes, bytes]]) -> tuple[Headers, str]:
    """Return the headers by name, and the name of one that occurs twice and must not."""
    headers = dict(pairs)
    if len(headers) != len(pairs):
        names: set[bytes] = set()
        for name, _ in pairs:
            if name in names and name in _SINGLE_HEADERS:
                return headers, name.decode("latin-1")
            if name in names and name.startswith((b"mcp-", b"traceparent")):
                headers[name] = b"\0"  # equal to nothing
            elif name in names and name in _LIST_HEADERS:
                headers[name] = b",".join(value for other, value in pairs if other == name)
            names.add(name)
    return headers, ""


class HostOriginCheck:
    """The check of the `Host` and `Origin` headers against DNS rebinding and foreign web pages (P-22).

    Without a list of hosts only names of the local machine are accepted, so that no DNS name can be pointed here. A web
    page may call the server if it was loaded from the same address, or its origin is listed.
    """

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        hosts, origins = texts("hosts", hosts), texts("origins", origins)
        self.allows_any_host = "*" in hosts
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(filter(None, map(_origin_parts, origins)))
        self._accepted_keys: set[tuple[str, bytes | None, bytes | None]] = set()  # accepted before
        for host in self._hosts - {"*"}:
            if not _HOST_PORT.fullmatch(host):
                raise ValueError(f"hosts: {host!r} is not a name such as 'example.org', with or without a port")
        for origin in origins:
            if _origin_parts(origin) is None:
                raise ValueError(f"origins: {origin!r} is not an address such as 'https://example.org'")

    def refusal(self, scheme: str, headers: Headers) -> str:
        """Return why a request is refused; empty if it is accepted."""
        key = (scheme, headers.get(b"host"), headers.get(ORIGIN))
        if key in self._accepted_keys:
            return ""
        refusal = self._check(scheme, headers)
        if (
            not refusal
            and len(self._accepted_keys) < _MAX_CACHED_KEYS
            and sum(map(len, filter(None, key))) < _MAX_KEY_CHARS
        ):
            self._accepted_keys.add(key)
        return refusal

    def _check(self, scheme: str, headers: Headers) -> str:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        host_match = _HOST_PORT.fullmatch(host)
        if host_match is None:
            return "Host is missing, or not a host"
        named = {"*", host, host_match[1]} & self._hosts
        if not named and (self._hosts or not _LOOPBACK.fullmatch(host_match[1])):
            return f"Host {host[:100]!r} is not a name of this server; list it under `hosts`"
        if ORIGIN not in headers:
            return ""
        origin = _origin_parts(headers[ORIGIN].decode("latin-1"))
        if origin is None or (origin != _origin_parts(f"{scheme}://{host}") and origin not in self._origins):
            return "Origin is not allowed; list it under `origins`"
        return ""


def _origin_parts(text: str) -> tuple[str, str, str] | None:
    """Return scheme, host and port of an origin, to be compared whole, never by prefix."""
    match = _ORIGIN.fullmatch(text.lower())
    return (match[1], match[2], match[3] or _PORTS[match[1]]) if match else None


def preflight_headers(headers: Headers) -> bytes:
    """Return the headers that an allowed web page may send: those of the protocol, and mirrored arguments."""
    requested = headers.get(b"access-control-request-headers", b"").lower().replace(b" ", b"").split(b",")
    return b", ".join([*_CORS_HEADERS, *(name for name in requested if name.startswith(b"mcp-param-"))])


def bearer(headers: Headers) -> str:
    """Return the token of a request. Only the header counts: a URL ends up in logs."""
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def challenge(parts: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return the `WWW-Authenticate` header for a caller without a valid token."""
    text = ", ".join(f'{name}="{value}"' for name, value in parts.items())
    return b"www-authenticate", f"Bearer {text}".strip().encode("latin-1", "replace")


@lru_cache(64)
def negotiate_content(kind: bytes, content_encoding: bytes | None, accept: bytes) -> tuple[bool, bool, str]:
    """Return whether the client accepts JSON, whether it accepts events, and why the body is refused, if it is."""
    problem = "" if content_encoding in (None, b"identity") else "Compressed bodies are not taken"
    if not _JSON.fullmatch(kind):
        problem = "Content-Type must be application/json"
    accepted: dict[str, bool] = {}
    for part in accept.decode("latin-1").lower().split(","):
        name, *parameters = [each.strip() for each in part.split(";")]
        if name:
            accepted[name] = not any(re.fullmatch(r"q=0(\.0*)?", each) for each in parameters)

    def has(*names: str) -> bool:
        return next((accepted[each] for each in names if each in accepted), not accepted)  # no Accept header means both

    return has("application/json", "application/*", "*/*"), has("text/event-stream", "text/*", "*/*"), problem


def check_version(request: Request, headers: Headers) -> None:
    """Refuse a stateless request whose header names another version than its body."""
    named = request.params["_meta"][VERSION]
    header = headers.get(PROTOCOL)
    if header is None or not _header_equals(header, named):
        raise _mismatch("MCP-Protocol-Version", header, f"params._meta[{VERSION!r}]", named)


def check_mirrored_headers(request: Request, headers: Headers) -> None:
    """Refuse a request whose `Mcp-Method` or `Mcp-Name` differs from its body (P-05)."""
    method = headers.get(b"mcp-method")
    if method is None or not _header_equals(method, request.method):
        raise _mismatch("Mcp-Method", method, "method", request.method)
    member = NAME_PARAMS.get(request.method)
    if member is None:
        return
    name = headers.get(b"mcp-name")
    value: Json = request.params.get(member, UNSET)
    is_plain = type(value) is str and value.isascii() and value.isidentifier()  # as almost every tool's
    if name is None or (not (is_plain and name == value.encode()) and _decode_header("Mcp-Name", name) != value):
        raise _mismatch("Mcp-Name", name, f"params.{member}", value)


def check_param_headers(header_map: Mapping[str, tuple[str, ...]], arguments: Object, headers: Headers) -> None:
    """Refuse arguments that differ from the headers a tool mirrors them into."""
    for suffix, path in header_map.items():
        value: Json = arguments
        for member in path:
            value = value.get(member) if type(value) is dict else None
        header = headers.get(b"mcp-param-" + suffix.lower().encode())
        if value is None:
            continue  # no header is expected, and none is looked at
        if header is None or not _value_equals(_decode_header(f"Mcp-Param-{suffix}", header), value):
            raise _mismatch(f"Mcp-Param-{suffix}", header, "/".join(("params.arguments", *path)), value)


def encode_header(text: str) -> str:
    """Return a text as the value of a header: unchanged where HTTP keeps it whole, else as base64."""
    if _SAFE_VALUE.fullmatch(text) and not text.lower().startswith(_SENTINEL):
        return text
    return f"{_SENTINEL}{b64encode(text.encode()).decode()}?="


def mirrored_headers(
    method: str, params: Mapping[str, Any], header_map: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """Return the headers of a stateless request; `header_map`: the path of the argument for each `Mcp-Param-…`."""
    out = {"Mcp-Method": encode_header(method)}
    name = params.get(NAME_PARAMS.get(method, ""))
    if type(name) is str:
        out["Mcp-Name"] = encode_header(name)
    for suffix, path in header_map.items():
        value: Json = params.get("arguments")
        for member in path:
            value = value.get(member) if isinstance(value, Mapping) else None
        if isinstance(value, bool):
            value = "true" if value else "false"
        elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
            value = str(int(value))
        if isinstance(value, str):  # no header can be about anything else
            out[f"Mcp-Param-{suffix}"] = encode_header(value)
    return out


def _value_equals(text: str, value: Json) -> bool:
    if type(value) is bool:
        return text == ("true" if value else "false")
    if type(value) is int or type(value) is float:
        return _INTEGER.fullmatch(text) is not None and bool(int(text.partition(".")[0]) == value)
    return bool(text == value)


def _header_equals(raw: bytes, text: Json) -> bool:
    return type(text) is str and (raw == text.encode() or _header_text(raw) == text)


def _header_text(raw: bytes) -> str:
    return raw.decode("latin-1").strip(" \t")


def _decode_header(name: str, raw: bytes) -> str:
    text = _header_text(raw)
    encoded = _BASE64_VALUE.fullmatch(text)
    try:
        if encoded:
            return b64decode(encoded[1], validate=True).decode()
    except ValueError:
        raise Refused(Kind.MISMATCH, f"{name}: not base64 of UTF-8") from None
    if not _LEGAL_VALUE.fullmatch(text):
        raise Refused(Kind.MISMATCH, f"{name}: characters outside of ASCII; send them as =?base64?…?=")
    return text


def _mismatch(name: str, raw: bytes | None, member: str, value: Json) -> Refused:
    if raw is None:
        return Refused(Kind.MISMATCH, f"The header {name} is missing; it must repeat {member}")
    header = f"{name} {raw.decode('latin-1')[:100]!r}"
    if value is UNSET:
        return Refused(Kind.MISMATCH, f"{header} does not match {member}, which is missing")
    excerpt = repr(value[:100]) if type(value) is str else encode(value).decode()[:100]
    return Refused(Kind.MISMATCH, f"{header} does not match {member} {excerpt}")
