"""Tools as servers list them, unchanged; accessors validate. Everything a server says of a tool is a claim.

A tool as the signature of a function with documentation; all texts of the server are escaped.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload
from urllib.parse import unquote_to_bytes, urlsplit

from handrail.errors import SchemaError
from handrail.guards.sanitize import check_media
from handrail.guards.tool_definitions import (
    Change,
    canonical,
    change_kinds,
    compare_definitions,
    definition,
    fingerprint,
)
from handrail.model import Json, Object, Violation
from handrail.schema.compile import Checker, compile_schema, header_map
from handrail.text.controls import escape, one_line, strip_invisible

if TYPE_CHECKING:
    from handrail.guards.policy import Subject, SubjectKind

__all__ = ["describe", "estimated_tokens", "signature"]

E = TypeVar("E", bound="ListedEntry")

Api = Literal["anthropic", "gemini", "mcp", "openai"]

MAX_DESCRIPTION = 16 * 1024
CHARS_PER_TOKEN = 4
READS = {"readOnlyHint": True}
MAX_TITLE = 200
MAX_ICON_BYTES = 64 * 1024
_IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_NOT_FOR_MODELS = re.compile(r"[^A-Za-z0-9_-]")
_MAX_MODEL_NAME = 64
_SCHEMA = {"anthropic": "input_schema", "gemini": "parametersJsonSchema", "mcp": "inputSchema", "openai": "parameters"}


class ListedEntry:
    """An entry of a list of a server; `raw` is the whole entry, `key` its name or URI in this client."""

    kind: SubjectKind
    key_member = "name"  # that tells the entries of one server apart
    trusted = False  # the annotations of the server
    listed = True

    def __init__(self, raw: Object, server: str, prefix: str = "") -> None:
        self.raw = raw
        self.server = server
        self.own_name: str = raw[self.key_member]
        self.key = self.name = prefix + self.own_name

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name!r} of {self.server!r}>"

    @property
    def title(self) -> str:
        """The title for display, from either place of the entry, or the name."""
        title = self.raw.get("title") or self.annotations.get("title")
        return strip_invisible(title)[:MAX_TITLE] if type(title) is str else self.name

    @property
    def description(self) -> str:
        text = self.raw.get("description")
        return text if type(text) is str else ""

    @cached_property
    def annotations(self) -> Object:
        """Claims of the server: `readOnlyHint`, `destructiveHint`, …"""
        claims = self.raw.get("annotations")
        return claims if type(claims) is dict else {}

    @property
    def icons(self) -> list[Object]:
        """The icons that are safe to display; `raw` has all."""
        return safe_icons(self.raw.get("icons"))

    @cached_property
    def subject(self) -> Subject:
        """The entry as rules see it. What is not a tool only reads, by the protocol."""
        from handrail.guards.policy import Subject  # few clients have rules
        from handrail.protocol.uri_template import normalize_uri

        is_tool, name = self.kind == "tool", self.own_name
        return Subject(
            self.kind,
            normalize_uri(name) if self.kind == "resource" else name,
            annotations=self.annotations if is_tool else READS,
            trusted=self.trusted or not is_tool,
            server=self.server,
            transient=not self.listed,
        )


class ListedTool(ListedEntry):
    """A tool of a server, or another request as guards see it."""

    kind: SubjectKind = "tool"
    changed = False  # since it was first listed, or locked
    change_since = "it was first seen"
    definitions: tuple[Object | None, Object | None] | None = None  # before and now; None: unknown
    is_blocked = False  # by a lock: calls are refused

    def __init__(self, raw: Object, server: str, prefix: str = "", *, trusted: bool = False) -> None:
        super().__init__(raw, server, prefix)
        self.trusted = trusted

    @property
    def input_schema(self) -> Object:
        schema = self.raw.get("inputSchema")
        return schema if type(schema) is dict else {"type": "object"}

    @cached_property
    def output_schema(self) -> Object | None:
        schema = self.raw.get("outputSchema")
        return schema if type(schema) is dict else None

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


class ListedEntries(Generic[E]):
    """A list, indexed by position, name or URI; `refused` has what was left out, with the reason.

    Where two servers list the same URI, the index gives the entry of the first.
    """

    def __init__(self, entries: Sequence[E] = (), refused: dict[str, str] | None = None) -> None:
        self._entries = list(entries)
        self._by_key: dict[str, E] = {}
        for entry in entries:
            self._by_key.setdefault(entry.key, entry)
        self.refused = refused or {}

    @overload
    def __getitem__(self, key: int | str) -> E: ...
    @overload
    def __getitem__(self, key: slice) -> list[E]: ...
    def __getitem__(self, key: int | str | slice) -> E | list[E]:
        return self._by_key[key] if isinstance(key, str) else self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[E]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key if isinstance(key, str) else key in self._entries

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._by_key)})"

    def get(self, name: str) -> E | None:
        return self._by_key.get(name)


class Tools(ListedEntries[ListedTool]):
    """A list of tools, indexed by position or name; `refused` has the tools that were left out, with the reason."""

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
        return self._model_names.get(model_name) or self._by_key[model_name]

    @cached_property
    def _model_names(self) -> dict[str, ListedTool]:
        names: dict[str, ListedTool] = {}
        for tool in self._entries:
            name = _NOT_FOR_MODELS.sub("_", tool.name)
            if len(name) > _MAX_MODEL_NAME or name in names:
                digest = hashlib.sha256(tool.name.encode()).hexdigest()[:8]
                name = f"{name[: _MAX_MODEL_NAME - 9]}_{digest}"
            names[name] = tool
        return names


def estimated_tokens(definition: Object) -> int:
    """Return about how many tokens a definition costs a model: characters of its JSON divided by 4, rounded up.

    The JSON is what hosts pass on: the name, the description and the input schema, without blanks between them.
    Tokenizers differ, and are not asked: texts in English have about 4 characters a token.
    """
    members = {name: definition[name] for name in ("name", "description", "inputSchema") if name in definition}
    text = json.dumps(members, separators=(",", ":"), ensure_ascii=False)
    return -(-len(text) // CHARS_PER_TOKEN)


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


MAX_MEMBERS = 12
MAX_DEPTH = 5  # of models in models
MAX_ROWS, MAX_COUNTED_ROWS = 80, 400  # printed, and counted
_NAMES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_CLAIMS = {
    "readOnlyHint": ("only reads", "may change something"),
    "destructiveHint": ("may destroy something", "destroys nothing"),
    "idempotentHint": ("harmless to repeat", "counts each time"),
    "openWorldHint": ("reaches out of this machine", "stays inside"),
}

_BOUNDS = (
    ("minimum", "maximum", ""),
    ("exclusiveMinimum", "exclusiveMinimum", ""),
    ("exclusiveMaximum", "exclusiveMaximum", ""),
    ("multipleOf", "multipleOf", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " items"),
    ("minProperties", "maxProperties", " members"),
    ("format", "format", ""),
    ("pattern", "pattern", ""),
)
_SINGLE = {"exclusiveMinimum": "more than", "exclusiveMaximum": "less than", "multipleOf": "a multiple of"}
_SINGLE |= {"format": "format", "pattern": "matches"}

Paint = Callable[..., str]


def signature(tool: Object) -> str:
    """`get_weather(location: str, units: "metric"|"imperial" = "metric") -> {…}`"""
    schema = _object(tool.get("inputSchema"))
    properties = _object(schema.get("properties"))
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    parameters = []
    for name, inner in sorted(properties.items(), key=lambda each: each[0] not in required):
        default = _object(inner).get("default")
        optional = name not in required and default is None
        end = "" if default is None else f" = {_value(default)}"
        parameters.append(f"{_name(name)}{'?' if optional else ''}: {_type(inner, 2)}{end}")
    output = tool.get("outputSchema")
    result = f" -> {_type(output, 2)}" if isinstance(output, dict) else ""
    name = _name(str(tool.get("name", "?")))
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) <= 100 or not parameters:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + f"){result}"


def describe(tool: Object, paint: Paint = lambda text, *styles: text) -> str:
    """Return the signature, then the descriptions of tool and arguments. Claims are marked as claims (APP-05)."""
    lines = [paint(signature(tool), "bold")]
    annotations = _object(tool.get("annotations"))
    title = tool.get("title") or annotations.get("title")
    if isinstance(title, str) and title != tool.get("name"):
        lines.append(f"    {paint(one_line(title, 100), 'cyan')}")
    if isinstance(text := tool.get("description"), str) and text.strip():
        lines += ["", *(f"    {line}".rstrip() for line in escape(text.strip()).splitlines())]
    rows = _rows(tool.get("inputSchema"))
    if rows:
        names, facts = (max(len(row[at]) for row in rows[:MAX_ROWS]) for at in (0, 1))
        names, facts = min(names, 40), min(facts, 50)
        lines.append("")
        for name, fact, text in rows[:MAX_ROWS]:
            line = f"    {paint(name, 'cyan')}{' ' * (names - len(name))}  {fact:{facts}}  {text}"
            lines.append(line.rstrip())
        if len(rows) > MAX_ROWS:
            lines.append(f"    … and {len(rows) - MAX_ROWS:,} more")
    hints = {key: value for key, value in annotations.items() if isinstance(value, bool)}
    claims = [words[not hints[key]] for key, words in _CLAIMS.items() if key in hints]
    if claims:
        lines += ["", f"    declared by the server: {', '.join(claims)}"]
    return "\n".join(lines)


# Each argument, and each member of what it consists of


def _rows(schema: Json) -> list[tuple[str, str, str]]:
    """Return name, type with bounds and default, and description of each argument and each of its members."""
    whole = _object(schema)
    rows: list[tuple[str, str, str]] = []
    _add_members(rows, "", whole, whole, MAX_DEPTH, frozenset())
    return rows


def _add_members(
    rows: list[tuple[str, str, str]], path: str, shape: Object, whole: Object, depth: int, references: frozenset[str]
) -> None:
    required = shape.get("required")
    required = required if isinstance(required, list) else []
    for name, member in _object(shape.get("properties")).items():
        if len(rows) > MAX_COUNTED_ROWS:
            return
        place = f"{path}{_name(name)}"
        text = _object(member).get("description")
        facts = _facts(_object(member), name in required)
        rows.append((place, facts, one_line(text, 200) if isinstance(text, str) else ""))
        if depth:
            for step, model, names in _models(member, whole, references, MAX_DEPTH):
                _add_members(rows, f"{place}{step}.", model, whole, depth - 1, names)


def _models(
    member: Json, whole: Object, references: frozenset[str], depth: int
) -> Iterator[tuple[str, Object, frozenset[str]]]:
    """Yield the objects a member can be or contain, each with its step; a recursive model only once."""
    shape = _object(member)
    if isinstance(reference := shape.get("$ref"), str):
        if reference not in references and depth:
            yield from _models(_target(reference, whole), whole, references | {reference}, depth - 1)
    elif isinstance(shape.get("properties"), dict):
        yield "", shape, references
    elif depth:
        branches = [each for name in ("anyOf", "oneOf", "allOf") if isinstance(each := shape.get(name), list)]
        for branch in (each for alternatives in branches for each in alternatives[:MAX_MEMBERS]):
            yield from _models(branch, whole, references, depth - 1)
        for step, model, names in _models(shape.get("items"), whole, references, depth - 1):
            yield f"[]{step}", model, names


def _target(reference: str, whole: Object) -> Json:
    """Return the target of a reference inside the schema; other references are ignored."""
    node: Json = whole
    if not reference.startswith("#/"):
        return None
    for step in reference[2:].split("/"):
        node = _object(node).get(step.replace("~1", "/").replace("~0", "~"))
    return node


def _facts(shape: Object, is_required: bool) -> str:
    """`int, 1 to 10, default 3`"""
    facts = [_type(shape, 0 if "properties" in shape else 1)]  # its members have rows of their own
    for low, high, unit in _BOUNDS:
        least, most = shape.get(low), shape.get(high)
        if low != high and least is not None and most is not None:
            facts.append(f"{_value(least)} to {_value(most)}{unit}")
        elif least is not None:
            facts.append(f"{_SINGLE.get(low, 'at least')} {_value(least)}{unit}")
        elif most is not None:
            facts.append(f"{_SINGLE.get(high, 'at most')} {_value(most)}{unit}")
    if shape.get("uniqueItems") is True:
        facts.append("all different")
    if "default" in shape:
        facts.append(f"default {_value(shape['default'])}")
    elif not is_required:
        facts.append("optional")
    return ", ".join(facts)


def _type(schema: Json, depth: int) -> str:
    shape = _object(schema)
    if isinstance(reference := shape.get("$ref"), str):
        return one_line(reference.rpartition("/")[2], 40)
    if "const" in shape:
        return _value(shape["const"])
    if isinstance(choices := shape.get("enum"), list):
        return "|".join([*map(_value, choices[:MAX_MEMBERS]), *["…"] * (len(choices) > MAX_MEMBERS)])
    for name in ("anyOf", "oneOf"):
        if isinstance(branches := shape.get(name), list) and branches:
            return " | ".join(dict.fromkeys(_type(each, depth) for each in branches[:MAX_MEMBERS]))
    kind = shape.get("type", "object" if "properties" in shape else None)
    if isinstance(kind, list):
        return " | ".join(_type({**shape, "type": each}, depth) for each in kind[:7])
    if kind == "array":
        inner = _type(shape["items"], depth - 1) if isinstance(shape.get("items"), dict) and depth else "any"
        return f"list[{inner}]"
    if kind == "object":
        members = _object(shape.get("properties"))
        if not members or not depth:
            return "{…}" if members else "dict"
        listed = [f"{_name(name)}: {_type(each, depth - 1)}" for name, each in members.items()]
        return "{" + ", ".join([*listed[:MAX_MEMBERS], *["…"] * (len(listed) > MAX_MEMBERS)]) + "}"
    return _NAMES.get(str(kind), "any")


def _name(name: str) -> str:
    """Escape a name and keep its spaces: names that differ must look different."""
    text = escape(name, lines=False)
    return text if len(text) <= 128 else text[:127] + "…"


def _value(value: Json) -> str:
    return one_line(json.dumps(value, ensure_ascii=False), 60)


def _object(value: Any) -> Object:
    return value if isinstance(value, dict) else {}
