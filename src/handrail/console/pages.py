"""The page itself: the files that were built from `web/`, as they lie in the package."""

from __future__ import annotations

import gzip
import re
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

from handrail.console.access import Download, Problem, Request

if TYPE_CHECKING:
    from handrail.console import Console

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9]+)+")


async def page(console: Console, request: Request) -> Download:
    return _file(request, "index.html")


async def asset(console: Console, request: Request) -> Download:
    name = request.path["name"]
    if not _NAME.fullmatch(name):
        raise Problem(404, f"There is no file {name[:200]!r}")
    return _file(request, "assets", name)


def _file(request: Request, *names: str) -> Download:
    """Read anew each time: it is quick, and whoever works on the page sees what they do."""
    try:
        body = files("handrail.console").joinpath("static", *names).read_bytes()
    except OSError:
        raise Problem(404, f"There is no file {'/'.join(names)}; `make console` builds the page") from None
    kind = _KINDS.get("." + names[-1].rpartition(".")[2], "application/octet-stream")
    fields = [(b"cache-control", b"no-cache"), (b"vary", b"accept-encoding")]
    if b"gzip" in request.headers.get(b"accept-encoding", b""):
        body = _packed(body)
        fields.append((b"content-encoding", b"gzip"))
    return Download(body, kind, fields=tuple(fields))


@lru_cache(16)
def _packed(body: bytes) -> bytes:
    return gzip.compress(body, 9, mtime=0)
