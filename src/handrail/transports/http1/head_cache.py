"""The heads of requests: which are refused, what they say in the words of ASGI, and those seen before.

Clients say the same in every request of a connection, but for the length of the body. The parser keeps nothing from one
request to the next, so a whole request whose head is known, byte for byte, does not have to go through it.
"""

from __future__ import annotations

import asyncio
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools
from msgspec import Struct

if TYPE_CHECKING:
    from handrail.transports.http1.listen import HttpLimits

MAX_CACHED_HEADS = 2  # a connection remembers

_MAX_BYTES = 2048  # of a head that is remembered
_DIGITS = 9  # of a length that is read here
_LENGTH = re.compile(rb"\r\ncontent-length: ([0-9]{1,9})\r\n", re.IGNORECASE)


class CachedHead(Struct, frozen=True):
    """What a head says, apart from the length of the body."""

    before: bytes  # the number
    after: bytes
    scope: dict[str, Any]
    fields: dict[bytes, bytes]

    @classmethod
    def from_request(
        cls, data: bytes, scope: dict[str, Any], fields: dict[bytes, bytes], limit: int
    ) -> CachedHead | None:
        """The head of a request that came whole and alone, and was read as `scope` and `fields`."""
        head = data[: data.find(b"\r\n\r\n") + 4]
        length_match = _LENGTH.search(head)
        if length_match is None or not data.startswith(b"POST ") or len(data) - len(head) != int(length_match[1]):
            return None
        if len(head) + _DIGITS > min(limit, _MAX_BYTES):
            return None
        return cls(head[: length_match.start(1)], head[length_match.end(1) :], scope, fields.copy())

    def match(self, data: bytes) -> tuple[bytes, bytes] | None:
        """The length, and the body, of one whole request that begins with this head."""
        if not data.startswith(self.before):
            return None
        at = len(self.before)
        end = data.find(b"\r", at, at + _DIGITS + 1)
        digits, rest = data[at:end], end + len(self.after)
        if end < 0 or not digits.isdigit() or not data.startswith(self.after, end) or len(data) - rest != int(digits):
            return None
        return digits, data[rest:]


class RefusedHead(Exception):
    """Raised among the parser's callbacks: a status and a text for the peer."""


def check_head(headers: list[tuple[bytes, bytes]], url_size: int, version: str, limits: HttpLimits) -> None:
    """What another server on the way may have read in another way is refused, RFC 9112 sections 3.2 and 6."""
    names = [name for name, _ in headers]
    if version not in ("1.0", "1.1"):
        raise RefusedHead(505, "HTTP/1.1 is spoken here")
    if len(headers) > limits.max_headers:
        raise RefusedHead(431, "There are too many headers")
    if url_size + sum(len(name) + len(value) + 4 for name, value in headers) > limits.max_header_bytes:
        raise RefusedHead(431, "The headers are too long")
    if names.count(b"host") != 1:
        raise RefusedHead(400, "Exactly one Host header is needed")
    if names.count(b"content-length") + names.count(b"transfer-encoding") > 1:
        raise RefusedHead(400, "The length of the body is given twice")
    if version == "1.0" and b"transfer-encoding" in names:
        raise RefusedHead(400, "HTTP/1.0 has no Transfer-Encoding")


@lru_cache(64)
def target(url: bytes) -> tuple[str, bytes, bytes]:
    """Path, the path as it came, and the query."""
    parsed = httptools.parse_url(url)
    path = parsed.path or b"/"
    return unquote(path.decode("ascii")), path, parsed.query or b""


def scope_of(transport: asyncio.Transport) -> dict[str, Any]:
    """What is the same in all requests of a connection, in the words of ASGI."""

    def place(name: str) -> tuple[str, int | None] | None:
        sockaddr = transport.get_extra_info(name)
        return (str(sockaddr[0]), int(sockaddr[1])) if isinstance(sockaddr, tuple) else None

    scheme = "https" if transport.get_extra_info("sslcontext") else "http"
    return {
        "type": "http",
        "server": place("sockname"),
        "client": place("peername"),
        "scheme": scheme,
        "root_path": "",
    }
