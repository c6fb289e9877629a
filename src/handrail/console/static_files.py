"""The files of the page, built from `web/` into the package."""

from __future__ import annotations

import gzip
import re
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from operator import attrgetter

from handrail.console.access import ApiError, ApiRequest, RawResponse
from handrail.console.context import ConsoleContext

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
_STATIC = files("handrail.console").joinpath("static")
_ASSETS = b"./assets/"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9]+)+")


async def page(context: ConsoleContext, request: ApiRequest) -> RawResponse:
    """Return the page. The addresses of its files contain the build id: files of two builds never mix."""
    html = _read("index.html").replace(_ASSETS, b"%b%b/" % (_ASSETS, _build_id().encode()))
    return _response(request, html, "index.html", b"no-cache")


async def asset(context: ConsoleContext, request: ApiRequest) -> RawResponse:
    name = request.path["name"]
    if not _NAME.fullmatch(name):
        raise ApiError(404, f"There is no file {name[:200]!r}")
    body = _read("assets", name)
    if request.path["build"] != _build_id():
        raise ApiError(404, "The page was opened before the server was updated: reload it")
    return _response(request, body, name, b"max-age=31536000, immutable")


def _build_id() -> str:
    """Return a digest of the files. They are read each time: that is quick, and an update can come while we run."""
    digest = sha256()
    for each in sorted(_STATIC.joinpath("assets").iterdir(), key=attrgetter("name")):
        body = each.read_bytes()
        digest.update(b"%b %d " % (each.name.encode(), len(body)) + body)
    return digest.hexdigest()[:16]


def _read(*names: str) -> bytes:
    try:
        return _STATIC.joinpath(*names).read_bytes()
    except OSError:
        raise ApiError(404, f"There is no file {'/'.join(names)}; `make console` builds the page") from None


def _response(request: ApiRequest, body: bytes, name: str, cache_control: bytes) -> RawResponse:
    media_type = _MEDIA_TYPES.get("." + name.rpartition(".")[2], "application/octet-stream")
    headers = [(b"cache-control", cache_control), (b"vary", b"accept-encoding")]
    if b"gzip" in request.headers.get(b"accept-encoding", b""):
        body = _compress(body)
        headers.append((b"content-encoding", b"gzip"))
    return RawResponse(body, media_type, headers=tuple(headers))


@lru_cache(32)
def _compress(body: bytes) -> bytes:
    return gzip.compress(body, 9, mtime=0)
