"""Arguments of a tool from words on a command line, typed by the tool's input schema.

    city=Paris days:=3 tags=a tags=b place.lat=48.8 note=@note.txt

`key=text` is converted to the type in the schema: a number, a boolean, an enum, an item of an array. `key:=JSON` is
used unchanged. `@file` in place of a text or of JSON stands for the content of the file (`@-`: standard input). A dot
leads into an object, unless the schema has a property with the dot in its name. If several types fit, the most specific
one is used, and string is the least specific; `key:=` decides explicitly.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from handrail import jsonrpc
from handrail.cli.exit_codes import UsageError
from handrail.model import Json, Object
from handrail.suggest import closest
from handrail.text.controls import escape, one_line

__all__ = ["parse_arguments", "parse_document", "parse_seconds", "read_text", "typed_value", "unknown_name"]

MAX_BYTES = 4 * 1024 * 1024
MAX_LISTED = 20  # in the error for an unknown name
_WORD = re.compile(r"([^=:]*(?::(?!=)[^=:]*)*)(:?=)(.*)", re.DOTALL)
_INTEGER = re.compile(r"[+-]?[0-9]{1,1000}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_EXAMPLES = {"integer": "3", "number": "2.5", "boolean": "true", "object": '{"a": 1}', "array": "[1, 2]"}
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_TIME = re.compile(r"([0-9]{1,6})([smhd])")


class _WordError(ValueError):
    """A problem with one word, without its key."""


def parse_arguments(words: Iterable[str], schema: Object) -> Object:
    """Return the arguments that the words stand for; one `UsageError` names all problems with them."""
    result: Object = {}
    problems: list[str] = []
    for word in words:
        if any("\ud800" <= char <= "\udfff" for char in word):
            problems.append(f"{one_line(word)!r} is not UTF-8")
            continue
        match = _WORD.fullmatch(word)
        if not match or not match[1]:
            problems.append(f"{one_line(word)!r} is not key=value or key:=JSON")
            continue
        key, sign, text = match.groups()
        try:
            path, value_schema = _find(key, _resolve_ref(schema, schema), schema)
            if text.startswith("@"):
                text = read_text(text[1:])
            value = _json(text) if sign == ":=" else typed_value(text, value_schema, schema)
            _put(result, path, value, is_array=sign == "=" and "array" in _types(value_schema, schema))
        except _WordError as problem:
            problems.append(f"{one_line(key)}: {problem}")
    missing = [name for name in _list(schema.get("required")) if isinstance(name, str) and name not in result]
    if missing and not problems:
        problems.append(f"missing: {', '.join(map(one_line, missing))}")
    if problems:
        raise UsageError("\n".join(problems))
    return result


def unknown_name(kind: str, name: str, names: list[str]) -> UsageError:
    """Return the error for an unknown tool, resource or prompt, with the closest name, or with all of them."""
    parts = {part: each for each in reversed(names) for part in re.split(r"[._/:-]", each) if len(part) > 2}
    if near := closest(name, names) or parts.get(closest(name, parts) or ""):
        return UsageError(f"no {kind} {one_line(name, 100)!r}; did you mean {escape(near, lines=False)}?")
    names_text = ", ".join([*(one_line(each, 60) for each in names[:MAX_LISTED]), *["…"] * (len(names) > MAX_LISTED)])
    return UsageError(
        f"no {kind} {one_line(name, 100)!r}; " + (f"there are {names_text}" if names else "the server has none")
    )


def parse_document(text: str) -> Object:
    """Return arguments from one JSON object: the text itself, `-` for standard input, or `@file`."""
    try:
        value = _json(read_text(text.removeprefix("@")) if text == "-" or text.startswith("@") else text)
    except _WordError as problem:
        raise UsageError(f"the arguments: {problem}") from None
    if not isinstance(value, dict):
        raise UsageError(f"the arguments: {one_line(text)} is not a JSON object")
    return value


def read_text(name: str, most: int = MAX_BYTES) -> str:
    """Return the text of a file of at most `most` bytes (`-`: standard input); ValueError if it cannot be read."""
    where = one_line(name, 300)
    try:
        if name == "-":
            data = sys.stdin.buffer.read(most + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(most + 1)
    except OSError as problem:
        raise _WordError(f"{where}: cannot be read: {problem.strerror}") from problem
    if len(data) > most:
        raise _WordError(f"{where}: over {most:,} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise _WordError(f"{where}: not a text in UTF-8") from None


def parse_seconds(text: str) -> int | None:
    """Return the seconds of `90s`, `30m`, `2h` or `7d`; None for any other text."""
    match = _TIME.fullmatch(text)
    return int(match[1]) * _UNITS[match[2]] if match else None


def _find(key: str, schema: Object, root: Object) -> tuple[list[str], Json]:
    """Return the path of a value, and its schema."""
    path: list[str] = []
    rest = key
    while True:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        step, dot, after = (rest, "", "") if rest in properties else rest.partition(".")
        more = schema.get("additionalProperties", not properties)
        if step not in properties and more is False and "patternProperties" not in schema:
            near = closest(step, properties)
            names_text = ", ".join(one_line(name, 40) for name in list(properties)[:20]) or "nothing"
            hint = f"did you mean {one_line(near, 40)}?" if near else f"there is {names_text}"
            raise _WordError(f"there is no argument {one_line(step, 40)!r}; {hint}")
        inner = properties.get(step, more)
        path.append(step)
        if not dot:
            return path, inner
        rest, schema = after, next(iter(_shapes(inner, root, "object")), {})


def _put(target: Object, path: list[str], value: Json, *, is_array: bool) -> None:
    for step in path[:-1]:
        target = target.setdefault(step, {})
        if not isinstance(target, dict):
            raise _WordError(f"{one_line(step, 40)} already has a value that is not an object")
    last = path[-1]
    if is_array and isinstance(value, list) and isinstance(target.get(last), list):
        target[last] += value
    elif last in target:
        raise _WordError("occurs twice; only an array takes several values")
    else:
        target[last] = value


def typed_value(text: str, schema: Json, root: Object) -> Json:
    """Convert a text to a type of the schema, the most specific first; ValueError says what would be right."""
    shapes = list(_shapes(schema, root))
    choices = [
        each for option in shapes for each in ([option["const"]] if "const" in option else _list(option.get("enum")))
    ]
    for each in choices:
        if text == (each if isinstance(each, str) else json.dumps(each)):
            return each
    if choices and all("enum" in shape or "const" in shape or shape.get("type") == "null" for shape in shapes):
        near = closest(text, [each for each in choices if isinstance(each, str)])
        listed = ", ".join(one_line(json.dumps(each, ensure_ascii=False), 40) for each in choices[:20])
        raise _WordError(
            f"{one_line(text, 40)!r} is not one of {listed}" + (f"; did you mean {near!r}?" if near else "")
        )
    types = _types(schema, root)
    for value in _readings(text, types, next((shape["items"] for shape in shapes if "items" in shape), {}), root):
        return value
    forms = " or ".join(f"{'an' if kind[0] in 'aio' else 'a'} {kind}" for kind in types)
    example = next((f", such as {_EXAMPLES[kind]}" for kind in types if kind in _EXAMPLES), "")
    raise _WordError(f"{one_line(text, 40)!r} is not {forms}{example}")


def _readings(text: str, types: list[str], items: Json, root: Object) -> Iterator[Json]:
    """Yield the text as a value of each type that it can have."""
    is_number = "number" in types
    if "null" in types and text == "null":
        yield None
    # Beside other types only true and false are booleans: 1 and "on" are probably a number and a text.
    if "boolean" in types and text.lower() in (_BOOLEANS if len(types) == 1 else ("true", "false")):
        yield _BOOLEANS[text.lower()]
    if (is_number or "integer" in types) and _INTEGER.fullmatch(text):
        yield int(text)
    if is_number and _NUMBER.fullmatch(text) and math.isfinite(number := float(text)):
        yield number
    if text[:1] in ("[", "{") and ("array" if text[0] == "[" else "object") in types:
        yield _json(text)
    if "array" in types and "string" not in types:
        try:
            yield [typed_value(text, items, root)]
        except RecursionError:
            raise _WordError("its items are infinitely nested arrays; use key:=JSON") from None
    if "string" in types or not types:
        yield text


def _types(schema: Json, root: Object) -> list[str]:
    type_names: list[str] = []
    for shape in _shapes(schema, root):
        kinds = shape.get("type", "object" if "properties" in shape else [])
        type_names += kinds if isinstance(kinds, list) else [kinds]
    return [*dict.fromkeys(kind for kind in type_names if isinstance(kind, str))]


def _shapes(schema: Json, root: Object, kind: str = "") -> Iterator[Object]:
    """Yield the schemas that apply to a value, each branch of `anyOf` and `oneOf`; with `kind`, only of this type."""
    pending, steps = [schema], 0
    while pending and steps < 100:
        steps += 1
        shape = _resolve_ref(pending.pop(0), root)
        branches = [each for name in ("anyOf", "oneOf") for each in _list(shape.get(name))]
        pending += branches
        if not branches and (not kind or shape.get("type", kind) == kind):
            yield shape


def _resolve_ref(schema: Json, root: Object) -> Object:
    """Return the schema, with a reference into the same document replaced by its target."""
    for _ in range(20):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Json = root
        for step in reference[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        schema = target
    return schema if isinstance(schema, dict) else {}


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _json(text: str) -> Json:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        value: Json = json.loads(text, parse_constant=refuse)
        strict_value = jsonrpc.decode(
            f"[{text}]".encode()
        )  # as strict as a server: no duplicate names, no huge numbers
    except (ValueError, RecursionError) as problem:
        raise _WordError(f"{one_line(text, 40)!r} is not JSON: {problem}") from None
    if isinstance(strict_value, jsonrpc.InvalidMessage):
        raise _WordError(f"{one_line(text, 40)!r}: {strict_value.text[0].lower()}{strict_value.text[1:]}")
    return value
