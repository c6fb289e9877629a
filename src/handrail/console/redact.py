"""Arguments, results and messages for the page: secrets masked, sizes limited, results block by block.

Values are masked when a page asks for them, not when a call runs. Masked are the server's own secrets, the operator's
patterns, texts that look like a secret, and values under a name such as `password`. It may hide too much
(`text/controls.py`).
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

from msgspec import UNSET, MsgspecError, to_builtins
from msgspec.json import decode

from handrail.guards.sanitize import Sanitize, check_media, size_of
from handrail.jsonrpc import encode
from handrail.model import RISK, Audio, Block, EmbeddedResource, Image, Json, Object, ResourceLink, Text, ToolResult
from handrail.text.controls import mask, mask_secrets
from handrail.text.secrets import Secrets

if TYPE_CHECKING:
    from handrail.engine.core import Engine

__all__ = ["Redactor"]

MAX_TEXT_CHARS = 64 * 1024  # of one text
MAX_MEDIA_BYTES = 1024 * 1024  # of one picture or sound
MARGIN_CHARS = 8 * 1024  # masked beyond a cut: a secret that is cut in two must not appear
PLAYABLE_MEDIA_TYPES = {
    *("image/png", "image/jpeg", "image/gif", "image/webp", "image/avif", "image/bmp"),
    *("audio/wav", "audio/x-wav", "audio/mpeg", "audio/mp3", "audio/aac", "audio/ogg", "audio/flac", "audio/mp4"),
    "audio/webm",
}
_ANNOTATION_KEYS = ("audience", "priority", "lastModified")


class Redactor:
    """Masks the secrets of one server."""

    def __init__(self, engine: Engine) -> None:
        self._find = engine.find
        self._server_secrets = engine.guard_set.secrets
        self._secrets = Secrets(self._server_secrets, (engine.guard_options.get("sanitize") or Sanitize()).patterns)
        self._margin = max([MARGIN_CHARS, *map(len, self._server_secrets)])

    def text(self, text: str) -> str:
        return self._redact_plain(self.redact_json(text) or text)

    def redact_json(self, text: str) -> str | None:
        """Return the text with its secrets masked value by value, if it is JSON; else None."""
        if text.lstrip()[:1] not in ("{", "["):
            return None
        try:
            parsed = decode(text)
            redacted = self.value(parsed)
            return text if redacted == parsed else encode(redacted).decode()
        except (MsgspecError, RecursionError, UnicodeEncodeError):  # not JSON, or nested too deeply
            return None

    def _redact_plain(self, text: str) -> str:
        return mask(
            text if self._secrets.has_none(text) else self._secrets.mask_texts([text])[0][0], self._server_secrets
        )

    def truncate(self, text: str) -> tuple[str, bool]:
        """Return the text, or its beginning, masked; and whether it was cut."""
        if len(text) <= MAX_TEXT_CHARS:
            return self.text(text), False
        return self._redact_plain((self.redact_json(text) or text)[: MAX_TEXT_CHARS + self._margin])[
            :MAX_TEXT_CHARS
        ], True

    def value(self, value: Json) -> Json:
        """Return a copy of a JSON value with its secrets masked."""
        redacted = mask_secrets(value, self._server_secrets)
        return redacted if self._has_no_secret(redacted) else self._redact_strings(redacted)

    def definition(self, value: Json) -> Json:
        """Mask a part of a tool definition: by its values only, since `password` is a name of an argument there."""
        return value if self._has_no_secret(value) else self._redact_strings(value)

    def bounded_value(self, value: Json) -> Json:
        """Return the value masked; a value that is too large for the page becomes a sentence that says so."""
        size = len(encode(value))
        return self.value(value) if size <= MAX_TEXT_CHARS else f"{size:,} bytes of JSON, too much to be shown here"

    def _has_no_secret(self, value: Json) -> bool:
        """Return True if the encoded value has no secret; False if it has escapes, which may hide one."""
        encoded = encode(value).decode()
        return "\\" not in encoded and self._secrets.has_none(encoded)

    def _redact_strings(self, value: Json) -> Json:
        if type(value) is str:
            return value if self._secrets.has_none(value) else self._secrets.mask_texts([value])[0][0]
        if type(value) is dict:
            return {self._redact_strings(key): self._redact_strings(inner) for key, inner in value.items()}
        return [self._redact_strings(inner) for inner in value] if type(value) is list else value

    # Messages and results

    def wire_message(self, message: bytes) -> Object:
        """Return a message as it was on the wire: byte for byte, unless a secret in it is masked."""
        text = self.full_wire_message(message)
        return {"text": text[:MAX_TEXT_CHARS], "bytes": len(message), "cut": len(text) > MAX_TEXT_CHARS}

    def full_wire_message(self, message: bytes) -> str:
        text = message.decode("utf-8", "replace")
        return self.redact_json(text) or self.text(text)

    def result(self, result: ToolResult) -> Object:
        """Return the `Result` of the page."""
        blocks = [_page_block(self, each) for each in result.content]
        for block, role in zip(blocks, getattr(result, "roles", ()), strict=False):  # of a prompt
            block["role"] = role
        meta = {} if result.meta is UNSET else result.meta
        risk = meta.get(RISK)
        page_result: Object = {
            "is_error": result.is_error,
            "blocks": blocks,
            "risk": result.risk or (str(risk.get("reason", "")) if type(risk) is dict else ""),
            "bytes": sum(each.get("bytes", 0) for each in blocks),
        }
        if result.structured is not UNSET:
            page_result["structured"] = self.bounded_value(result.structured)
        if meta:
            page_meta = self.bounded_value(meta)
            page_result["meta"] = page_meta if type(page_meta) is dict else {"": page_meta}
        return page_result

    def is_readable(self, uri: str) -> bool:
        """Return whether this server has a resource at the URI."""
        return self._find("resource", uri)[0] is not None

    def block(self, result: ToolResult, index: int) -> bytes:
        """Return all of one block, for a download. Call it in a thread: large texts take long."""
        if not 0 <= index < len(result.content):
            raise LookupError(f"block {index}: there are {len(result.content)}")
        match result.content[index]:
            case Text(text=text) | EmbeddedResource(resource={"text": text}):
                return self.text(text).encode()
            case Image(data=data) | Audio(data=data) | EmbeddedResource(resource={"blob": data}):
                return b64decode(data) if isinstance(data, str) else bytes(data)
            case other:
                return encode(self.value(to_builtins(other)))


def _page_block(redactor: Redactor, block: Block) -> Object:
    notes = block.get("annotations") if isinstance(block, dict) else block.annotations
    members: Object = {"notes": _page_annotations(redactor, notes)}
    match block:
        case Text():
            text, cut = redactor.truncate(block.text)
            return {"type": "text", "text": text, "bytes": len(block.text.encode()), "cut": cut, **members}
        case Image() | Audio():
            kind = "image" if isinstance(block, Image) else "audio"
            return {"type": kind, "mime": block.mime_type, **_media(block.mime_type, block.data), **members}
        case ResourceLink():
            names = {"name": block.name, "title": block.title, "description": block.description, "uri": block.uri}
            texts = {name: "" if value is UNSET else redactor.truncate(value)[0] for name, value in names.items()}
            members |= {"readable": redactor.is_readable(block.uri)}
            members |= {} if block.size is UNSET else {"size": block.size}
            return {"type": "link", **texts, "mime": "" if block.mime_type is UNSET else block.mime_type, **members}
        case EmbeddedResource(resource=inner):
            members |= {"uri": redactor.truncate(inner["uri"])[0], "readable": redactor.is_readable(inner["uri"])}
            members["mime"] = str(inner.get("mimeType", ""))
            if "text" not in inner:
                return {"type": "resource", **_media(members["mime"], inner["blob"]), **members}
            text, cut = redactor.truncate(inner["text"])
            return {"type": "resource", "text": text, "bytes": len(inner["text"].encode()), "cut": cut, **members}
    return {"type": "other", "json": redactor.bounded_value(block), **members}


def _media(mime_type: str, data: bytes | str) -> Object:
    """Return a picture or a sound that the page may show; of all else only the size."""
    playable = mime_type.lower() in PLAYABLE_MEDIA_TYPES and check_media(mime_type, data) is None
    size = size_of(data)
    is_embedded = playable and size <= MAX_MEDIA_BYTES
    text = "" if not is_embedded else data if isinstance(data, str) else b64encode(data).decode()
    return {"data": text, "bytes": size, "cut": not is_embedded, "playable": playable}


def _page_annotations(redactor: Redactor, notes: Json) -> Object:
    block_annotations = notes if type(notes) is dict else {}
    return {name: redactor.value(block_annotations[name]) for name in _ANNOTATION_KEYS if name in block_annotations}
