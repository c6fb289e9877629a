"""A tool as the signature of a function, with its documentation; everything in it is the server's word, made inert."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from handrail.guards.inert import inert, one_line
from handrail.model import Json, Object

__all__ = ["describe", "signature"]

MAX_MEMBERS = 12
_NAMES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_CLAIMS = {
    "readOnlyHint": ("only reads", "may change something"),
    "destructiveHint": ("may destroy something", "destroys nothing"),
    "idempotentHint": ("harmless to repeat", "counts each time"),
    "openWorldHint": ("reaches out of this machine", "stays inside"),
}

Paint = Callable[..., str]


def signature(tool: Object) -> str:
    """`get_weather(location: str, units: "metric"|"imperial" = "metric") -> {…}`"""
    schema = _object(tool.get("inputSchema"))
    properties = _object(schema.get("properties"))
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    made = []
    for name, inner in sorted(properties.items(), key=lambda each: each[0] not in required):
        default = _object(inner).get("default")
        optional = name not in required and default is None
        end = "" if default is None else f" = {_value(default)}"
        made.append(f"{_name(name)}{'?' if optional else ''}: {_type(inner, 2)}{end}")
    output = tool.get("outputSchema")
    result = f" -> {_type(output, 2)}" if isinstance(output, dict) else ""
    name = _name(str(tool.get("name", "?")))
    line = f"{name}({', '.join(made)}){result}"
    if len(line) <= 100 or not made:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in made) + f"){result}"


def describe(tool: Object, paint: Paint = lambda text, *styles: text) -> str:
    """The signature, then what the server says of the tool and of each argument. Claims are called claims (APP-05)."""
    lines = [paint(signature(tool), "bold")]
    annotations = _object(tool.get("annotations"))
    title = tool.get("title") or annotations.get("title")
    if isinstance(title, str) and title != tool.get("name"):
        lines.append(f"    {paint(one_line(title, 100), 'cyan')}")
    if isinstance(text := tool.get("description"), str) and text.strip():
        lines += ["", *(f"    {line}".rstrip() for line in inert(text.strip()).splitlines())]
    described = []
    for name, inner in _object(_object(tool.get("inputSchema")).get("properties")).items():
        if isinstance(text := _object(inner).get("description"), str):
            described.append((_name(name), one_line(text, 200)))
    if described:
        width = max(len(name) for name, _ in described)
        lines += ["", *(f"    {paint(name, 'cyan')}{' ' * (width - len(name))}  {text}" for name, text in described)]
    said = {key: value for key, value in annotations.items() if isinstance(value, bool)}
    claims = [words[not said[key]] for key, words in _CLAIMS.items() if key in said]
    if claims:
        lines += ["", f"    declared by the server: {', '.join(claims)}"]
    return "\n".join(lines)


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
    """As it is, spaces and all: two names that differ shall look different."""
    made = inert(name, lines=False)
    return made if len(made) <= 128 else made[:127] + "…"


def _value(value: Json) -> str:
    return one_line(json.dumps(value, ensure_ascii=False), 60)


def _object(value: Any) -> Object:
    return value if isinstance(value, dict) else {}
