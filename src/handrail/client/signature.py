"""A tool as the signature of a function with documentation; all texts of the server are escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from handrail.model import Json, Object
from handrail.text.controls import escape, one_line

__all__ = ["describe", "signature"]

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
