"""Pictures and sounds that are what they say: the first bytes of a block against its declared type."""

from __future__ import annotations

import re
from base64 import b64decode
from html import unescape

__all__ = ["active_svg", "check_media", "size_of"]

_HEAD_BYTES = 512

# What begins so, or has this from the given place on, is of that type. The first that fits counts.
_SIGNATURES: tuple[tuple[str, int, tuple[bytes, ...]], ...] = (
    ("image/png", 0, (b"\x89PNG\r\n\x1a\n",)),
    ("image/jpeg", 0, (b"\xff\xd8\xff",)),
    ("image/gif", 0, (b"GIF87a", b"GIF89a")),
    ("image/webp", 8, (b"WEBP",)),
    ("image/bmp", 0, (b"BM",)),
    ("image/tiff", 0, (b"II*\0", b"MM\0*")),
    ("image/avif", 4, (b"ftypavif",)),
    ("image/heic", 4, (b"ftyphei", b"ftypmif1")),
    ("audio/wav", 8, (b"WAVE",)),
    ("audio/mpeg", 0, (b"ID3", b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2")),
    ("audio/aac", 0, (b"\xff\xf1", b"\xff\xf9")),
    ("audio/ogg", 0, (b"OggS",)),
    ("audio/flac", 0, (b"fLaC",)),
    ("audio/webm", 0, (b"\x1aE\xdf\xa3",)),
    ("audio/mp4", 4, (b"ftyp",)),
    ("application/pdf", 0, (b"%PDF",)),
    ("an archive", 0, (b"PK\x03\x04", b"\x1f\x8b", b"Rar!", b"7z\xbc\xaf")),
    ("a document with macros", 0, (b"\xd0\xcf\x11\xe0", b"{\\rtf")),
    ("a program", 0, (b"MZ", b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"\0asm", b"#!")),
)
_TYPE_ALIASES = {
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
    "image/x-ms-bmp": "image/bmp",
    "image/heif": "image/heic",
    "audio/x-wav": "audio/wav",
    "audio/wave": "audio/wav",
    "audio/vnd.wave": "audio/wav",
    "audio/mp3": "audio/mpeg",
    "audio/x-aac": "audio/aac",
    "audio/aacp": "audio/aac",
    "audio/opus": "audio/ogg",
    "audio/vorbis": "audio/ogg",
    "audio/x-flac": "audio/flac",
    "audio/x-m4a": "audio/mp4",
    "audio/m4a": "audio/mp4",
}
_RECOGNISED_TYPES = frozenset(kind for kind, _, _ in _SIGNATURES if kind.startswith(("image/", "audio/")))


# What a picture of markup acts with: scripts, handlers of events, pages inside of it, addresses that are scripts.
_ACTIVE = re.compile(
    r"<\s*(?:[a-z]{1,20}:)?(?:script|foreignobject|iframe|embed|object|handler)\b"
    r"|[\s\"'/]on[a-z]{3,30}\s*=|(?:javascript|vbscript)\s*:|data\s*:\s*text/html|<!ENTITY",
    re.IGNORECASE,
)
_SVG = re.compile(
    r"\s*(?:<\?xml[^>]{0,200}>\s*)?(?:<!--.{0,2000}?-->\s*)?(?:<!DOCTYPE\s+svg|<svg[\s>])", re.IGNORECASE | re.DOTALL
)


def active_svg(declared: str, text: str) -> str:
    """Why a text that is a picture of markup is not to be shown as one; "" if it is none, or cannot act.

    A text that is declared as another kind of text is read, not shown.
    """
    kind = declared.partition(";")[0].strip().lower()
    is_svg = kind.startswith("image/svg") or (kind in ("", "text/xml", "application/xml") and _SVG.match(text))
    return f"{declared or 'image/svg+xml'} holds scripts" if is_svg and _ACTIVE.search(unescape(text)) else ""


def size_of(data: bytes | str) -> int:
    """How many bytes that is; a text is their base64."""
    return len(data) if not isinstance(data, str) else len(data) * 3 // 4 - data[-2:].count("=")


def check_media(declared: str, data: bytes | str) -> tuple[str, str] | None:
    """What is wrong with the bytes of a picture or a sound: the rule, and the reason; None when nothing is.

    "scripts": a picture that can hold them. "mismatch": the bytes are of another type. "unrecognised": they begin like
    nothing that is known here, so they may be damaged, or made up for a test. Other types are not judged.
    """
    kind = declared.partition(";")[0].strip().lower()
    kind = _TYPE_ALIASES.get(kind, kind)
    if kind.startswith("image/svg"):
        return "scripts", f"{declared} can hold scripts"
    if kind not in _RECOGNISED_TYPES:
        return None
    detected = _kind_of(b64decode(data[: _HEAD_BYTES // 3 * 4]) if isinstance(data, str) else bytes(data[:_HEAD_BYTES]))
    if detected is None:
        return "unrecognised", f"declared {declared}, but it does not begin like one"
    return None if detected == kind else ("mismatch", f"declared {declared}, but the bytes are {detected}")


def _kind_of(head: bytes) -> str | None:
    for kind, at, signs in _SIGNATURES:
        if head.startswith(signs, at):
            return kind
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    is_markup = text[:1] == b"<" and (text[1:2].isalpha() or text[1:2] in (b"!", b"?"))
    return "markup, which can hold scripts" if is_markup else None
