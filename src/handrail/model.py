"""Neutral types, shaped like the newest revision: tools, content, results, callers.

Absent is not null: optional members default to `UNSET`, because `structuredContent: null` is a value.
`annotations`, `icons` and `_meta` are plain mappings in the specification's own spelling.
"""

from __future__ import annotations

import base64
import binascii
import re
from datetime import datetime
from typing import Any

from msgspec import UNSET as UNSET, Struct, UnsetType, field
from msgspec.structs import force_setattr

Json = Any
Object = dict[str, Any]

RISK = "io.handrail/risk"

_AUDIENCES = frozenset({"user", "assistant"})
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+")


class _Block(Struct, frozen=True, tag_field="type", rename="camel", kw_only=True):
    annotations: Object | UnsetType = UNSET
    meta: Object | UnsetType = field(default=UNSET, name="_meta")

    def __post_init__(self) -> None:
        if self.annotations is not UNSET:
            _check_annotations(self.annotations)


class Text(_Block, frozen=True, tag="text"):
    """A text.

    >>> Text("for people only", annotations={"audience": ["user"], "priority": 0.3}).text
    'for people only'
    """

    text: str

    def __post_init__(self) -> None:
        if type(self.text) is not str:
            raise TypeError(f"Text.text: expected a string, got {type(self.text).__name__}")
        if self.annotations is not UNSET:
            _check_annotations(self.annotations)


class Image(_Block, frozen=True, tag="image"):
    """A picture: its bytes (or their base64 text) and its media type."""

    data: bytes | str
    mime_type: str

    def __post_init__(self) -> None:
        _check_media(self.data, self.mime_type, "image/")
        super().__post_init__()


class Audio(_Block, frozen=True, tag="audio"):
    """A sound: its bytes (or their base64 text) and its media type."""

    data: bytes | str
    mime_type: str

    def __post_init__(self) -> None:
        _check_media(self.data, self.mime_type, "audio/")
        super().__post_init__()


class ResourceLink(_Block, frozen=True, tag="resource_link"):
    """A pointer to something the client can fetch itself."""

    uri: str
    name: str
    title: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    mime_type: str | UnsetType = UNSET
    size: int | UnsetType = UNSET
    icons: list[Object] | UnsetType = UNSET

    def __post_init__(self) -> None:
        _check_uri(self.uri, "ResourceLink.uri")
        for name in ("name", "title", "description", "mime_type"):
            if not isinstance(getattr(self, name), str | UnsetType):
                raise TypeError(f"ResourceLink.{name}: expected a string, got {type(getattr(self, name)).__name__}")
        if self.size is not UNSET and (type(self.size) is not int or self.size < 0):
            raise ValueError(f"ResourceLink.size: {self.size!r} is not a number of bytes")
        super().__post_init__()


class EmbeddedResource(_Block, frozen=True, tag="resource"):
    """A resource carried inside the result, as the specification writes it.

    >>> note = EmbeddedResource({"uri": "note://1", "mimeType": "text/plain", "text": "hello"})

    `resource` has `uri` and exactly one of `text` (a string) and `blob` (bytes, or their base64 text).
    """

    resource: Object

    def __post_init__(self) -> None:
        if type(self.resource) is not dict:
            raise TypeError(f"EmbeddedResource.resource: expected a dict, got {type(self.resource).__name__}")
        _check_uri(self.resource.get("uri"), "EmbeddedResource.resource['uri']")
        if ("text" in self.resource) == ("blob" in self.resource):
            raise ValueError("EmbeddedResource.resource: give exactly one of 'text' and 'blob'")
        for name in ("text", "mimeType"):
            if not isinstance(self.resource.get(name, ""), str):
                raise TypeError(f"EmbeddedResource.resource[{name!r}]: expected a string")
        if "blob" in self.resource:
            blob = self.resource["blob"]
            _check_base64(blob, "EmbeddedResource.resource['blob']")
            if not isinstance(blob, str):
                force_setattr(self, "resource", {**self.resource, "blob": base64.b64encode(blob).decode()})
        inner = self.resource.get("annotations", UNSET)
        if inner is not UNSET:
            _check_annotations(inner)
        super().__post_init__()


# A block of a type this package does not know is kept as the mapping it came as.
Block = Text | Image | Audio | ResourceLink | EmbeddedResource | Object


class ToolResult(Struct):
    """What a tool answered, complete: content blocks, structured data, error flag, `_meta`.

    `data` belongs to an error and is written where the revision has a place for it.
    """

    content: list[Block] = []
    structured: Json | UnsetType = UNSET
    is_error: bool = False
    meta: Object | UnsetType = UNSET
    data: Object = {}

    @property
    def text(self) -> str:
        """All text blocks, one below the other."""
        return "\n".join(block.text for block in self.content if isinstance(block, Text))


class Tool(Struct, frozen=True, rename="camel", kw_only=True):
    """A tool as it is listed."""

    name: str
    title: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    input_schema: Object
    output_schema: Object | UnsetType = UNSET
    annotations: Object | UnsetType = UNSET
    icons: list[Object] | UnsetType = UNSET
    meta: Object | UnsetType = field(default=UNSET, name="_meta")


class InputRequest(Struct, frozen=True):
    """A question to the client in the middle of a call: its method and parameters."""

    method: str
    params: Object


class Principal(Struct, frozen=True):
    """Who is calling. Over stdio and in memory that is the local user."""

    id: str
    scopes: frozenset[str] = frozenset()


class ClientInfo(Struct, frozen=True):
    """What the client says of itself: for display, never for decisions."""

    name: str = ""
    version: str = ""
    title: str | UnsetType = UNSET
    capabilities: Object = {}

    def declares(self, capability: str) -> bool:
        """Whether a capability such as `"sampling"` or `"elicitation.url"` was declared."""
        if capability == "elicitation.form":
            # Before there were modes there were forms; an object that names no mode still means them.
            modes = self.capabilities.get("elicitation")
            return type(modes) is dict and ("form" in modes or "url" not in modes)
        here: Json = self.capabilities
        for name in capability.split("."):
            if type(here) is not dict or name not in here:
                return False
            here = here[name]
        return True


class Problem(Struct, frozen=True):
    """One thing that is wrong with a value: where (a JSON pointer), which rule, and a sentence."""

    path: str
    keyword: str
    text: str


def _check_annotations(annotations: Object) -> None:
    if type(annotations) is not dict:
        raise TypeError(f"annotations: expected a dict, got {type(annotations).__name__}")
    audience = annotations.get("audience", UNSET)
    if audience is not UNSET and (not isinstance(audience, list | tuple) or not _AUDIENCES.issuperset(audience)):
        raise ValueError(f"annotations.audience: {audience!r} is not a list of 'user' and 'assistant'")
    priority = annotations.get("priority", UNSET)
    if priority is not UNSET and (
        isinstance(priority, bool) or not isinstance(priority, int | float) or not 0 <= priority <= 1
    ):
        raise ValueError(f"annotations.priority: {priority!r} is not a number from 0 to 1")
    modified = annotations.get("lastModified", UNSET)
    if modified is not UNSET:
        try:
            datetime.fromisoformat(modified)
        except (TypeError, ValueError):
            raise ValueError(f"annotations.lastModified: {modified!r} is not an ISO 8601 time") from None


def _check_media(data: bytes | str, mime_type: str, family: str) -> None:
    if not isinstance(mime_type, str) or not mime_type.startswith(family):
        raise ValueError(f"mime_type: {mime_type!r} does not begin with {family!r}")
    _check_base64(data, "data")


def _check_base64(data: bytes | str, where: str) -> None:
    if isinstance(data, bytes | bytearray | memoryview):
        return
    if not isinstance(data, str):
        raise TypeError(f"{where}: expected bytes or base64 text, got {type(data).__name__}")
    try:
        base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{where}: not base64: {error}") from None


def _check_uri(uri: object, where: str) -> None:
    if not isinstance(uri, str) or not _URI.fullmatch(uri):
        raise ValueError(f"{where}: {uri!r} is not a URI")
