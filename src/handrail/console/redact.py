"""What the page gets of arguments, results and messages: secrets masked, no more than a page can carry, block by block.

Masking is done when somebody looks, not when a call is made. It covers the secrets the server knows, the operator's
patterns, what looks like a secret and what stands under a name that says so; it may hide too much (`text/controls.py`).
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

from msgspec import UNSET, MsgspecError, to_builtins
from msgspec.json import decode

from handrail.guards.sanitize import Sanitize
from handrail.jsonrpc import encode
from handrail.model import RISK, Audio, Block, EmbeddedResource, Image, Json, Object, ResourceLink, Text, ToolResult
from handrail.text.controls import mask, mask_secrets
from handrail.text.media import size_of, trouble
from handrail.text.secrets import Secrets

if TYPE_CHECKING:
    from handrail.engine.core import Engine

__all__ = ["Mask"]

MAX_TEXT = 64 * 1024  # characters of one text
MAX_MEDIA = 1024 * 1024  # bytes of one picture or sound
MARGIN = 8 * 1024  # read beyond a cut, so that no secret is shown by being cut in two
PLAYABLE = {
    *("image/png", "image/jpeg", "image/gif", "image/webp", "image/avif", "image/bmp"),
    *("audio/wav", "audio/x-wav", "audio/mpeg", "audio/mp3", "audio/aac", "audio/ogg", "audio/flac", "audio/mp4"),
    "audio/webm",
}
_NOTES = ("audience", "priority", "lastModified")


class Mask:
    """What hides the secrets of one server."""

    def __init__(self, engine: Engine) -> None:
        self._known = engine.gate.secrets
        self._secrets = Secrets(self._known, (engine.guards.get("sanitize") or Sanitize()).patterns)
        self._margin = max([MARGIN, *map(len, self._known)])

    def text(self, text: str) -> str:
        return self._plain(self.read(text) or text)

    def read(self, text: str) -> str | None:
        """The text as JSON, if it is that: there a secret ends where it does, whatever is in it."""
        if text.lstrip()[:1] not in ("{", "["):
            return None
        try:
            said = decode(text)
            shown = self.value(said)
            return text if shown == said else encode(shown).decode()
        except (MsgspecError, RecursionError, UnicodeEncodeError):  # it is none, or nested too deep to be walked
            return None

    def _plain(self, text: str) -> str:
        return mask(text if self._secrets.absent(text) else self._secrets.masked([text])[0][0], self._known)

    def cut(self, text: str) -> tuple[str, bool]:
        """The text, or its beginning; and whether there is more."""
        if len(text) <= MAX_TEXT:
            return self.text(text), False
        return self._plain((self.read(text) or text)[: MAX_TEXT + self._margin])[:MAX_TEXT], True

    def value(self, value: Json) -> Json:
        """A copy of a JSON value without its secrets."""
        found = mask_secrets(value, self._known)
        return found if self._is_without(found) else self._walked(found)

    def definition(self, value: Json) -> Json:
        """A part of a tool: names of arguments hide nothing in it, but what is known to be a secret is one."""
        return value if self._is_without(value) else self._walked(value)

    def small(self, value: Json) -> Json:
        """As `value`; what is too big for a page becomes a sentence that says so."""
        size = len(encode(value))
        return self.value(value) if size <= MAX_TEXT else f"{size:,} bytes of JSON, too much to be shown here"

    def _is_without(self, value: Json) -> bool:
        """Whether one look at all of it finds nothing; what is written as an escape in JSON is another text in it."""
        said = encode(value).decode()
        return "\\" not in said and self._secrets.absent(said)

    def _walked(self, value: Json) -> Json:
        if type(value) is str:
            return value if self._secrets.absent(value) else self._secrets.masked([value])[0][0]
        if type(value) is dict:
            return {self._walked(key): self._walked(inner) for key, inner in value.items()}
        return [self._walked(inner) for inner in value] if type(value) is list else value

    # Messages and results

    def wire(self, message: bytes) -> Object:
        """One message as it was on the wire; byte for byte, where nothing in it is secret."""
        text = self.whole_wire(message)
        return {"text": text[:MAX_TEXT], "bytes": len(message), "cut": len(text) > MAX_TEXT}

    def whole_wire(self, message: bytes) -> str:
        text = message.decode("utf-8", "replace")
        return self.read(text) or self.text(text)

    def result(self, given: ToolResult) -> Object:
        """The `Result` of the page."""
        blocks = [_block(self, each) for each in given.content]
        meta = {} if given.meta is UNSET else given.meta
        risk = meta.get(RISK)
        made: Object = {
            "is_error": given.is_error,
            "blocks": blocks,
            "risk": given.risk or (str(risk.get("reason", "")) if type(risk) is dict else ""),
            "bytes": sum(each.get("bytes", 0) for each in blocks),
        }
        if given.structured is not UNSET:
            made["structured"] = self.small(given.structured)
        if meta:
            shown = self.small(meta)
            made["meta"] = shown if type(shown) is dict else {"": shown}
        return made

    def block(self, given: ToolResult, index: int) -> bytes:
        """All of one block, for a download. Large texts take a while: not on the loop."""
        if not 0 <= index < len(given.content):
            raise LookupError(f"block {index}: there are {len(given.content)}")
        match given.content[index]:
            case Text(text=text) | EmbeddedResource(resource={"text": text}):
                return self.text(text).encode()
            case Image(data=data) | Audio(data=data) | EmbeddedResource(resource={"blob": data}):
                return b64decode(data) if isinstance(data, str) else bytes(data)
            case other:
                return encode(self.value(to_builtins(other)))


def _block(hide: Mask, given: Block) -> Object:
    notes = given.get("annotations") if isinstance(given, dict) else given.annotations
    made: Object = {"notes": _notes(hide, notes)}
    match given:
        case Text():
            text, cut = hide.cut(given.text)
            return {"type": "text", "text": text, "bytes": len(given.text.encode()), "cut": cut, **made}
        case Image() | Audio():
            kind, size = "image" if isinstance(given, Image) else "audio", size_of(given.data)
            playable = given.mime_type.lower() in PLAYABLE and trouble(given.mime_type, given.data) is None
            is_shown = playable and size <= MAX_MEDIA
            data = given.data if isinstance(given.data, str) else b64encode(given.data).decode() if is_shown else ""
            made |= {"data": data if is_shown else "", "bytes": size, "cut": not is_shown, "playable": playable}
            return {"type": kind, "mime": given.mime_type, **made}
        case ResourceLink():
            names = {"name": given.name, "title": given.title, "description": given.description, "uri": given.uri}
            told = {name: "" if said is UNSET else hide.cut(said)[0] for name, said in names.items()}
            made |= {} if given.size is UNSET else {"size": given.size}
            return {"type": "link", **told, "mime": "" if given.mime_type is UNSET else given.mime_type, **made}
        case EmbeddedResource(resource=inner):
            made |= {"uri": hide.cut(inner["uri"])[0], "mime": str(inner.get("mimeType", ""))}
            if "text" not in inner:
                return {"type": "resource", "bytes": size_of(inner["blob"]), "cut": True, **made}
            text, cut = hide.cut(inner["text"])
            return {"type": "resource", "text": text, "bytes": len(inner["text"].encode()), "cut": cut, **made}
    return {"type": "other", "json": hide.small(given), **made}


def _notes(hide: Mask, notes: Json) -> Object:
    known = notes if type(notes) is dict else {}
    return {name: hide.value(known[name]) for name in _NOTES if name in known}
