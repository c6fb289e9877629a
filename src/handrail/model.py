"""Neutral types, shaped like the newest revision: tools, content, results, callers.

Absent is not null: optional members default to `UNSET`, because `structuredContent: null` is a value.
`annotations`, `icons` and `_meta` are plain mappings in the specification's own spelling.
"""

from __future__ import annotations

import re
import reprlib
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal

from msgspec import UNSET as UNSET, Struct, UnsetType, field
from msgspec.structs import force_setattr

from handrail.suggest import texts

Json = Any
Object = dict[str, Any]

RISK = "io.handrail/risk"
REFUSED = "io.handrail/refused"  # in `_meta` of a result: a guard said no, and nothing was done; the kind of refusal
SANITIZED = "io.handrail/sanitized"

_AUDIENCES = frozenset({"user", "assistant"})
_BYTES = (bytes, bytearray, memoryview)
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+")


class _Block(Struct, frozen=True, tag_field="type", rename="camel", kw_only=True):
    annotations: Object | UnsetType = UNSET
    meta: Object | UnsetType = field(default=UNSET, name="_meta")

    def __post_init__(self) -> None:
        check_members(f"{type(self).__name__}.", {name: getattr(self, name) for name in self.__struct_fields__})


class Text(_Block, frozen=True, tag="text"):
    """A text.

    >>> Text("for people only", annotations={"audience": ["user"], "priority": 0.3}).text
    'for people only'
    """

    text: str

    def __post_init__(self) -> None:
        # The usual text is not looked at further.
        if type(self.text) is not str or self.annotations is not UNSET or self.meta is not UNSET:
            super().__post_init__()


class _Media(_Block, frozen=True):
    data: bytes | str
    mime_type: str

    def __post_init__(self) -> None:
        super().__post_init__()
        family = f"{self.__struct_config__.tag}/"
        if not self.mime_type.startswith(family):
            raise ValueError(f"mime_type: {self.mime_type!r} does not begin with {family!r}")


class Image(_Media, frozen=True, tag="image"):
    """A picture: its bytes (or their base64 text) and its media type."""


class Audio(_Media, frozen=True, tag="audio"):
    """A sound: its bytes (or their base64 text) and its media type."""


class ResourceLink(_Block, frozen=True, tag="resource_link"):
    """A pointer to something the client can fetch itself."""

    uri: str
    name: str
    title: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    mime_type: str | UnsetType = UNSET
    size: int | UnsetType = UNSET
    icons: list[Object] | UnsetType = UNSET


class EmbeddedResource(_Block, frozen=True, tag="resource"):
    """A resource carried inside the result, as the specification writes it.

    >>> note = EmbeddedResource({"uri": "note://1", "mimeType": "text/plain", "text": "hello"})

    `resource` has `uri` and exactly one of `text` (a string) and `blob` (bytes, or their base64 text).
    """

    resource: Object

    def __post_init__(self) -> None:
        super().__post_init__()
        check_members("EmbeddedResource.resource.", {"uri": None, **self.resource})
        if ("text" in self.resource) == ("blob" in self.resource):
            raise ValueError("EmbeddedResource.resource: give exactly one of 'text' and 'blob'")
        if not isinstance(self.resource.get("blob", ""), str):
            force_setattr(self, "resource", {**self.resource, "blob": b64encode(self.resource["blob"]).decode()})


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
    risk: str = ""  # why it must be handled with care; the client is told

    @property
    def text(self) -> str:
        """All text blocks, one below the other."""
        return "\n".join([block.text for block in self.content if isinstance(block, Text)])


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


class _Listed(Struct, frozen=True, rename="camel", kw_only=True):
    """What every entry of a list may say of itself."""

    name: str
    title: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    icons: list[Object] | UnsetType = UNSET
    meta: Object | UnsetType = field(default=UNSET, name="_meta")


class Resource(_Listed, frozen=True):
    """A resource as it is listed."""

    uri: str
    mime_type: str | UnsetType = UNSET
    size: int | UnsetType = UNSET
    annotations: Object | UnsetType = UNSET


class ResourceTemplate(_Listed, frozen=True):
    """A family of resources as it is listed; `uri_template` is one of RFC 6570."""

    uri_template: str
    mime_type: str | UnsetType = UNSET
    annotations: Object | UnsetType = UNSET


class PromptArgument(Struct, frozen=True, rename="camel"):
    """An argument of a prompt; on the wire its value is a text."""

    name: str
    title: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    required: bool | UnsetType = UNSET


class Prompt(_Listed, frozen=True):
    """A prompt as it is listed."""

    arguments: list[PromptArgument] | UnsetType = UNSET


class PromptMessage(Struct, frozen=True):
    """One message of a prompt.

    >>> PromptMessage("assistant", "What should the review look at?").role
    'assistant'
    """

    role: Literal["user", "assistant"]
    content: str | Block

    def __post_init__(self) -> None:
        if self.role not in ("user", "assistant"):
            raise ValueError(f"PromptMessage.role: {self.role!r} is not 'user' or 'assistant'")


class PromptResult(ToolResult):
    """What a prompt answered: `content` has a block for each message, `roles` says whose it is."""

    roles: list[str] = []
    description: str | UnsetType = UNSET


class InputRequest(Struct, frozen=True):
    """A question to the client in the middle of a call: its method and parameters."""

    method: str
    params: Object


class Principal(Struct, frozen=True):
    """Who is calling. Over stdio and in memory that is the local user."""

    id: str
    scopes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if type(self.scopes) is not frozenset:  # a verifier of one's own may have a list, or one text
            force_setattr(self, "scopes", frozenset(texts("Principal: scopes", self.scopes)))


SERVER_ASKS = "handrail-server-asks"
"""Of a client's `experimental` capabilities: it does not ask its user about destructive tools if the server does. A
server that answers with the same promises to ask, through the client, before any such tool runs."""


class ClientInfo(Struct, frozen=True):
    """What the client says of itself: for display, never for decisions."""

    name: str = ""
    version: str = ""
    title: str | UnsetType = UNSET
    capabilities: Object = {}

    @property
    def delegates_confirmation(self) -> bool:
        """Whether the client leaves it to the server to ask its user about destructive tools."""
        return self.declares(f"experimental.{SERVER_ASKS}")

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


class Violation(Struct, frozen=True):
    """One thing that is wrong with a value: where (a JSON pointer), which rule, and a sentence."""

    path: str
    keyword: str
    text: str


MemberRule = tuple[Callable[[Any], Any], str]

_STRING: MemberRule = (lambda value: isinstance(value, str), "a string")
_DICT: MemberRule = (lambda value: type(value) is dict, "a dict")
_BASE64: MemberRule = (
    lambda value: isinstance(value, _BYTES) or b64decode(value, validate=True) is not None,
    "bytes or base64 text",
)

# What a member must be, wherever it stands: the rule is false, or raises, for anything else.
_RULES: dict[str, MemberRule] = {
    **dict.fromkeys(("text", "name", "title", "description", "mime_type", "mimeType"), _STRING),
    **dict.fromkeys(("annotations", "resource", "meta", "_meta"), _DICT),
    "icons": (lambda value: type(value) is list and all(type(each) is dict for each in value), "a list of dicts"),
    **dict.fromkeys(("data", "blob"), _BASE64),
    "uri": (_URI.fullmatch, "a URI"),
    "size": (lambda value: type(value) is int and value >= 0, "a number of bytes"),
    "audience": (
        lambda value: isinstance(value, list | tuple) and {*value} <= _AUDIENCES,
        "a list of 'user' and 'assistant'",
    ),
    "priority": (
        lambda value: type(value) is not bool and isinstance(value, int | float) and 0 <= value <= 1,
        "a number from 0 to 1",
    ),
    "lastModified": (datetime.fromisoformat, "an ISO 8601 time"),
}


def check_members(where: str, members: Object) -> None:
    """Refuse a member that is not what the specification says; ValueError begins with `where`."""
    for name, value in members.items():
        if name not in _RULES or value is UNSET:
            continue
        rule, expected = _RULES[name]
        try:
            fits = rule(value)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(f"{where}{name}: {reprlib.repr(value)} is not {expected}")
        if name == "annotations":
            check_members(f"{where}annotations.", value)
