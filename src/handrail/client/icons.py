"""Icons of strangers: which may be shown at all."""

from __future__ import annotations

from base64 import b64decode
from urllib.parse import unquote_to_bytes, urlsplit

from handrail.model import Json, Object

MAX_BYTES = 64 * 1024
_BEGINNINGS = {
    "image/png": b"\x89PNG\r\n\x1a\n",
    "image/jpeg": b"\xff\xd8\xff",
    "image/gif": b"GIF8",
    "image/webp": b"RIFF",
}


def safe_icons(icons: Json) -> list[Object]:
    """Those at https addresses without a password, and small pictures that are what they say. Nothing is fetched.

    Drawings in SVG are programs, and left out where they come inside.
    """
    found = icons if type(icons) is list else []
    return [icon for icon in found if type(icon) is dict and type(icon.get("src")) is str and _is_safe(icon["src"])]


def _is_safe(source: str) -> bool:
    if source[:5].lower() == "data:":
        return _is_picture(source[5:])
    try:
        parts = urlsplit(source)
        return parts.scheme == "https" and bool(parts.hostname) and parts.username is None and parts.password is None
    except ValueError:
        return False


def _is_picture(rest: str) -> bool:
    head, comma, body = rest.partition(",")
    kind, *more = head.lower().split(";")
    begins = _BEGINNINGS.get(kind)
    if not comma or begins is None or len(body) > 2 * MAX_BYTES:
        return False
    try:
        data = b64decode(body, validate=True) if "base64" in more else unquote_to_bytes(body)
    except ValueError:
        return False
    return len(data) <= MAX_BYTES and data.startswith(begins) and (kind != "image/webp" or data[8:12] == b"WEBP")
