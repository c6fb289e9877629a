"""Tools as servers list them, unchanged; accessors validate. Everything a server says of a tool is a claim."""

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
    from handrail.guards.policy import Subject

Api = Literal["anthropic", "gemini", "mcp", "openai"]

MAX_DESCRIPTION = 16 * 1024
MAX_TITLE = 200
MAX_ICON_BYTES = 64 * 1024
_IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_NOT_FOR_MODELS = re.compile(r"[^A-Za-z0-9_-]")
_MAX_MODEL_NAME = 64
_SCHEMA = {"anthropic": "input_schema", "gemini": "parametersJsonSchema", "mcp": "inputSchema", "openai": "parameters"}


class ListedTool:
    """A tool of a server; `name` is its name in this client, `raw` the whole entry of the server."""

    changed = False  # since it was first listed, or locked
    change_since = "it was first seen"
    definitions: tuple[Object | None, Object | None] | None = None  # before and now; None: unknown
    is_blocked = False  # by a lock: calls are refused
    listed = True

    def __init__(self, raw: Object, server: str, name: str = "", *, trusted: bool = False) -> None:
        self.raw = raw
        self.server = server
        self.trusted = trusted  # the annotations of the server
        self.own_name: str = raw["name"]
        self.name = name or self.own_name

    def __repr__(self) -> str:
        return f"<tool {self.name!r} of {self.server!r}>"

    @property
    def title(self) -> str:
        """The title for display, from either place of the entry, or the name."""
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
    def subject(self) -> Subject:
        """The tool as rules see it."""
        from handrail.guards.policy import Subject  # few clients have rules

        return Subject("tool", self.own_name, annotations=self.annotations, trusted=self.trusted, server=self.server)

    @property
    def icons(self) -> list[Object]:
        """The icons that are safe to display; `raw` has all."""
        return safe_icons(self.raw.get("icons"))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that models and people see of the tool."""
        return fingerprint(self.raw)

    @property
    def definition_without_schema(self) -> Object:
        """The definition of the tool without its input schema."""
        return {name: value for name, value in definition(self.raw).items() if name != "inputSchema"}

    @cached_property
    def changes(self) -> list[Change]:
        """The changes between the two definitions; `guards.tool_diff.format_changes` formats them for people."""
        return compare_definitions(*self.definitions) if self.definitions else []

    @property
    def change(self) -> str:
        """The change of the tool in a sentence, with the kinds of changes."""
        kinds = change_kinds(self.changes)
        if alone := {"new", "gone"}.intersection(kinds):
            return f"the tool is {alone.pop()} since {self.change_since}"
        return ": ".join(filter(None, (f"the tool has changed since {self.change_since}", ", ".join(kinds))))

    @cached_property
    def header_map(self) -> dict[str, tuple[str, ...]]:
        """The arguments to mirror in headers; SchemaError if the schema marks one that cannot be mirrored."""
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
        """Return the violations of the output schema in structured content."""
        check = self._output
        return check.problems(structured) if isinstance(check, Checker) else []

    @cached_property
    def unchecked(self) -> str:
        """Why results are not checked: the output schema is not usable. Else empty."""
        return str(self._output) if isinstance(self._output, SchemaError) else ""


class Tools:
    """A list of tools, indexed by position or name; `refused` has the tools that were left out, with the reason."""

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
        """Return the definitions in the shape of a model's API, without invisible characters.

        Names are shortened to what the API allows; `named` returns the tool of such a name.
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
        """Return the tool for a name from `for_model`."""
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
    """Return the icons with an https URL without a password, and small inline images of the declared type.

    Nothing is fetched. Inline SVG is left out, since it can contain scripts.
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
    has_signature = kind != "image/webp" or data.startswith(b"RIFF")  # `check_media` checks the rest
    return len(data) <= MAX_ICON_BYTES and has_signature and check_media(kind, data) is None


def has_invisible_names(schema: Json) -> bool:
    """Return whether a name in the schema holds invisible characters, which a model would read."""
    if type(schema) is dict:
        return any(strip_invisible(name) != name or has_invisible_names(inner) for name, inner in schema.items())
    return type(schema) is list and any(map(has_invisible_names, schema))


def _strip_invisible(value: Json) -> Json:
    if type(value) is str:
        return strip_invisible(value)
    if type(value) is dict:
        return {name: _strip_invisible(inner) for name, inner in value.items()}
    return [_strip_invisible(inner) for inner in value] if type(value) is list else value
