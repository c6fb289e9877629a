"""Tools as servers list them: kept as they came, read with care. What a server says of a tool is a claim."""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, overload
from urllib.parse import unquote_to_bytes, urlsplit

from handrail.errors import SchemaError
from handrail.guards.fingerprint import canonical, definition, fingerprint
from handrail.guards.tool_diff import Change, change_kinds, compare_definitions
from handrail.model import Json, Object, Violation
from handrail.schema.compile import Checker, compile_schema, header_map
from handrail.text.controls import strip_invisible
from handrail.text.media import check_media

if TYPE_CHECKING:
    from handrail.guards.policy import Facts

Api = Literal["anthropic", "gemini", "mcp", "openai"]

MAX_DESCRIPTION = 16 * 1024
MAX_TITLE = 200
MAX_ICON_BYTES = 64 * 1024
_IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_NOT_FOR_MODELS = re.compile(r"[^A-Za-z0-9_-]")
_MAX_MODEL_NAME = 64
_SCHEMA = {"anthropic": "input_schema", "gemini": "parametersJsonSchema", "mcp": "inputSchema", "openai": "parameters"}


class ListedTool:
    """A tool of a server; `name` is what to call it by here, `raw` all that the server said of it."""

    changed = False  # since it was first seen, or locked
    change_since = "it was first seen"
    definitions: tuple[Object | None, Object | None] | None = (
        None  # what it was and is; None: that is not known any more
    )
    is_blocked = False  # by a lock: it cannot be called
    listed = True

    def __init__(self, raw: Object, server: str, name: str = "", *, trusted: bool = False) -> None:
        self.raw = raw
        self.server = server
        self.trusted = trusted  # what the server says of it
        self.own_name: str = raw["name"]
        self.name = name or self.own_name

    def __repr__(self) -> str:
        return f"<tool {self.name!r} of {self.server!r}>"

    @property
    def title(self) -> str:
        """For display: the title, wherever the server put it, or the name."""
        title = self.raw.get("title") or self.annotations.get("title")
        return strip_invisible(title)[:MAX_TITLE] if type(title) is str else self.name

    @property
    def description(self) -> str:
        text = self.raw.get("description")
        return text if type(text) is str else ""

    @property
    def input_schema(self) -> Object:
        schema = self.raw.get("inputSchema")
        return schema if type(schema) is dict else {"type": "object"}

    @cached_property
    def output_schema(self) -> Object | None:
        schema = self.raw.get("outputSchema")
        return schema if type(schema) is dict else None

    @cached_property
    def annotations(self) -> Object:
        """Claims of the server: `readOnlyHint`, `destructiveHint`, …"""
        claims = self.raw.get("annotations")
        return claims if type(claims) is dict else {}

    @cached_property
    def facts(self) -> Facts:
        """What rules see of it."""
        from handrail.guards.policy import Facts  # few clients have rules

        return Facts(self.own_name, annotations=self.annotations, trusted=self.trusted, server=self.server)

    @property
    def icons(self) -> list[Object]:
        """Those that are safe to show; `raw` has them all."""
        return safe_icons(self.raw.get("icons"))

    @cached_property
    def fingerprint(self) -> str:
        """Changes with anything a model or a person is told of the tool."""
        return fingerprint(self.raw)

    @property
    def definition_without_schema(self) -> Object:
        """What is said of the tool, apart from how it is called."""
        return {name: value for name, value in definition(self.raw).items() if name != "inputSchema"}

    @cached_property
    def changes(self) -> list[Change]:
        """What has changed in it; `handrail.guards.tool_diff.difference` shows that to people."""
        return compare_definitions(*self.definitions) if self.definitions else []

    @property
    def change(self) -> str:
        """What has become of it, in a sentence with the kinds of changes."""
        kinds = change_kinds(self.changes)
        if alone := {"new", "gone"}.intersection(kinds):
            return f"the tool is {alone.pop()} since {self.change_since}"
        return ": ".join(filter(None, (f"the tool has changed since {self.change_since}", ", ".join(kinds))))

    @cached_property
    def header_map(self) -> dict[str, tuple[str, ...]]:
        """Arguments to mirror into headers; SchemaError if the server asks for what cannot be."""
        return header_map(self.input_schema) if b"x-mcp-header" in canonical(self.input_schema) else {}

    @cached_property
    def _output(self) -> Checker | SchemaError | None:
        if self.output_schema is None:
            return None
        try:
            return compile_schema(self.output_schema, f"tool {self.own_name!r}: outputSchema", any_root=True)
        except SchemaError as unusable:
            return unusable

    def problems(self, structured: Json) -> list[Violation]:
        """What is wrong with structured content, by the tool's own promise."""
        check = self._output
        return check.problems(structured) if isinstance(check, Checker) else []

    @cached_property
    def unchecked(self) -> str:
        """Why its results cannot be checked, where it promises something that cannot be used."""
        return str(self._output) if isinstance(self._output, SchemaError) else ""


class Tools:
    """A list of tools, found by place or by name; `refused` says which were left out, and why."""

    def __init__(self, tools: Sequence[ListedTool] = (), refused: dict[str, str] | None = None) -> None:
        self._tools = list(tools)
        self._by_name = {tool.name: tool for tool in tools}
        self.refused = refused or {}

    @overload
    def __getitem__(self, key: int | str) -> ListedTool: ...
    @overload
    def __getitem__(self, key: slice) -> list[ListedTool]: ...
    def __getitem__(self, key: int | str | slice) -> ListedTool | list[ListedTool]:
        return self._by_name[key] if isinstance(key, str) else self._tools[key]

    def __len__(self) -> int:
        return len(self._tools)

    def __iter__(self) -> Iterator[ListedTool]:
        return iter(self._tools)

    def __contains__(self, key: object) -> bool:
        return key in self._by_name if isinstance(key, str) else key in self._tools

    def __repr__(self) -> str:
        return f"Tools({', '.join(self._by_name)})"

    def get(self, name: str) -> ListedTool | None:
        return self._by_name.get(name)

    def for_model(self, api: Api = "mcp") -> list[Object]:
        """Definitions in the shape a model's API takes them, without characters nobody sees.

        Names are made to fit; `named` finds the tool again.
        """
        definitions = [
            {
                "name": name,
                "description": strip_invisible(tool.description),
                _SCHEMA[api]: _strip_invisible(tool.input_schema),
            }
            for name, tool in self._model_names.items()
        ]
        return [{"type": "function", "function": each} for each in definitions] if api == "openai" else definitions

    def named(self, model_name: str) -> ListedTool:
        """The tool a model means."""
        return self._model_names.get(model_name) or self._by_name[model_name]

    @cached_property
    def _model_names(self) -> dict[str, ListedTool]:
        names: dict[str, ListedTool] = {}
        for tool in self._tools:
            name = _NOT_FOR_MODELS.sub("_", tool.name)
            if len(name) > _MAX_MODEL_NAME or name in names:
                digest = hashlib.sha256(tool.name.encode()).hexdigest()[:8]
                name = f"{name[: _MAX_MODEL_NAME - 9]}_{digest}"
            names[name] = tool
        return names


def safe_icons(icons: Json) -> list[Object]:
    """Those at https addresses without a password, and small pictures that are what they say. Nothing is fetched.

    Drawings in SVG are programs, and left out where they come inside.
    """
    candidates = icons if type(icons) is list else []
    return [
        icon for icon in candidates if type(icon) is dict and type(icon.get("src")) is str and _is_safe(icon["src"])
    ]


def _is_safe(source: str) -> bool:
    try:
        if source[:5].lower() == "data:":
            return _is_safe_image(source[5:])
        parts = urlsplit(source)
        return parts.scheme == "https" and bool(parts.hostname) and parts.username is None and parts.password is None
    except ValueError:
        return False


def _is_safe_image(rest: str) -> bool:
    head, comma, body = rest.partition(",")
    kind, *more = head.lower().split(";")
    if not comma or kind not in _IMAGE_TYPES or len(body) > 2 * MAX_ICON_BYTES:
        return False
    data = b64decode(body, validate=True) if "base64" in more else unquote_to_bytes(body)
    has_signature = kind != "image/webp" or data.startswith(b"RIFF")  # `trouble` looks at what comes behind that
    return len(data) <= MAX_ICON_BYTES and has_signature and check_media(kind, data) is None


def has_invisible_names(schema: Json) -> bool:
    """Whether names in it hold characters that nobody sees, but a model would read."""
    if type(schema) is dict:
        return any(strip_invisible(name) != name or has_invisible_names(inner) for name, inner in schema.items())
    return type(schema) is list and any(map(has_invisible_names, schema))


def _strip_invisible(value: Json) -> Json:
    if type(value) is str:
        return strip_invisible(value)
    if type(value) is dict:
        return {name: _strip_invisible(inner) for name, inner in value.items()}
    return [_strip_invisible(inner) for inner in value] if type(value) is list else value
