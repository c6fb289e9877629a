"""Arguments of a tool from words on a command line, typed by the tool's input schema.

    city=Paris days:=3 tags=a tags=b place.lat=48.8 note=@note.txt

`key=text` becomes what the schema says: a number, a boolean, one of an enumeration, an item of an array. `key:=JSON` is
taken as it is. `@file` in place of a text or of JSON is what the file holds (`@-`: standard input). A dot leads into an
object, unless the schema has a property with the dot in its name. Where several types fit, the most special one wins,
and text is the least special; `key:=` settles it.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from handrail.cli.codes import Usage
from handrail.guards.inert import one_line
from handrail.model import Json, Object
from handrail.schema.explain import closest

__all__ = ["arguments", "document", "typed"]

MAX_BYTES = 4 * 1024 * 1024
_WORD = re.compile(r"([^=:]*(?::(?!=)[^=:]*)*)(:?=)(.*)", re.DOTALL)
_INTEGER = re.compile(r"[+-]?[0-9]{1,1000}")
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_EXAMPLES = {"integer": "3", "number": "2.5", "boolean": "true", "object": '{"a": 1}', "array": "[1, 2]"}

Read = Callable[[str], str]


class _Wrong(ValueError):
    """What is wrong with one word, without its key."""


def arguments(words: Iterable[str], schema: Object, read: Read | None = None) -> Object:
    """The arguments that the words say; one `Usage` names everything that is wrong with them."""
    made: Object = {}
    problems: list[str] = []
    for word in words:
        if any("\ud800" <= char <= "\udfff" for char in word):
            problems.append(f"{one_line(word)!r} is not UTF-8")
            continue
        found = _WORD.fullmatch(word)
        if not found or not found[1]:
            problems.append(f"{one_line(word)!r} is not key=value or key:=JSON")
            continue
        key, sign, text = found.groups()
        try:
            path, wanted = _find(key, _resolved(schema, schema), schema)
            if text.startswith("@"):
                text = (read or _read)(text[1:])
            value = _json(text) if sign == ":=" else typed(text, wanted, schema)
            _put(made, path, value, is_array=sign == "=" and "array" in _types(wanted, schema))
        except _Wrong as problem:
            problems.append(f"{one_line(key)}: {problem}")
    missing = [name for name in _list(schema.get("required")) if isinstance(name, str) and name not in made]
    if missing and not problems:
        problems.append(f"missing: {', '.join(map(one_line, missing))}")
    if problems:
        raise Usage("\n".join(problems))
    return made


def document(text: str, read: Read | None = None) -> Object:
    """The arguments as one JSON object: the text itself, `-` for standard input, or `@file`."""
    try:
        value = _json((read or _read)(text.removeprefix("@")) if text == "-" or text.startswith("@") else text)
    except _Wrong as problem:
        raise Usage(f"the arguments: {problem}") from None
    if not isinstance(value, dict):
        raise Usage(f"the arguments: {one_line(text)} is not a JSON object")
    return value


def _find(key: str, schema: Object, root: Object) -> tuple[list[str], Json]:
    """The way to a value, and the schema of it."""
    path: list[str] = []
    rest = key
    while True:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        step, dot, after = (rest, "", "") if rest in properties else rest.partition(".")
        if step not in properties:
            more = schema.get("additionalProperties", not properties)
            if more is False and "patternProperties" not in schema:
                near = closest(step, properties)
                known = ", ".join(one_line(name, 40) for name in list(properties)[:20]) or "nothing"
                hint = f"did you mean {one_line(near, 40)}?" if near else f"there is {known}"
                raise _Wrong(f"the tool has no argument {one_line(step, 40)!r}; {hint}")
            step, dot, after = rest.partition(".")
            inner = more if isinstance(more, dict) else {}
        else:
            inner = properties[step]
        path.append(step)
        if not dot:
            return path, inner
        rest, schema = after, next(iter(_shapes(inner, root, "object")), {})


def _put(made: Object, path: list[str], value: Json, *, is_array: bool) -> None:
    for step in path[:-1]:
        made = made.setdefault(step, {})
        if not isinstance(made, dict):
            raise _Wrong(f"{one_line(step, 40)} has a value already, which is no object")
    last = path[-1]
    if is_array and isinstance(value, list) and isinstance(made.get(last), list):
        made[last] += value
    elif last in made:
        raise _Wrong("is there twice; only an array takes several")
    else:
        made[last] = value


def typed(text: str, wanted: Json, root: Object) -> Json:
    """A text as what a schema wants, the most special type first; ValueError says what would be right."""
    shapes = list(_shapes(wanted, root))
    for shape in shapes:
        for each in [shape["const"]] if "const" in shape else _list(shape.get("enum")):
            if text == (each if isinstance(each, str) else json.dumps(each)):
                return each
    types = _types(wanted, root)
    enums = [each for shape in shapes for each in _list(shape.get("enum"))]
    if enums and all("enum" in shape or "const" in shape or shape.get("type") == "null" for shape in shapes):
        near = closest(text, [each for each in enums if isinstance(each, str)])
        listed = ", ".join(one_line(json.dumps(each, ensure_ascii=False), 40) for each in enums[:20])
        raise _Wrong(f"{one_line(text, 40)!r} is not one of {listed}" + (f"; did you mean {near!r}?" if near else ""))
    for kind in ("null", "boolean", "integer", "number", "array", "object", "string"):
        if kind in types:
            items = [shape.get("items", {}) for shape in shapes] if kind == "array" else []
            # Beside other types only the plain words are booleans: 1 and "on" are not meant as such.
            found = list(_read_as(kind, text, items, root, len(types) == 1, "string" in types))
            if found:
                return found[0]
    if not types:
        return text
    forms = " or ".join(f"{'an' if kind[0] in 'aio' else 'a'} {kind}" for kind in types)
    example = next((f", such as {_EXAMPLES[kind]}" for kind in types if kind in _EXAMPLES), "")
    raise _Wrong(f"{one_line(text, 40)!r} is not {forms}{example}")


def _read_as(kind: str, text: str, items: list[Json], root: Object, alone: bool, beside_text: bool) -> Iterator[Json]:
    """The text as a value of that type, if it is one."""
    if kind == "string":
        yield text
    elif kind == "null" and text == "null":
        yield None
    elif kind == "boolean" and text.lower() in (_BOOLEANS if alone else ("true", "false")):
        yield _BOOLEANS[text.lower()]
    elif kind in ("integer", "number") and _INTEGER.fullmatch(text):
        yield int(text)
    elif kind == "number":
        try:
            if math.isfinite(number := float(text)) and "_" not in text:
                yield number
        except ValueError:
            pass
    elif kind in ("array", "object") and text[:1] == ("[" if kind == "array" else "{"):
        yield _json(text)
    elif kind == "array" and not beside_text:
        yield [typed(text, items[0] if items else {}, root)]


def _types(wanted: Json, root: Object) -> list[str]:
    found: list[str] = []
    for shape in _shapes(wanted, root):
        kinds = shape.get("type", "object" if "properties" in shape else [])
        found += kinds if isinstance(kinds, list) else [kinds]
    return [*dict.fromkeys(kind for kind in found if isinstance(kind, str))]


def _shapes(wanted: Json, root: Object, kind: str = "") -> Iterator[Object]:
    """The schemas a value may have, those of `anyOf` and `oneOf` one by one; `kind`: of this type only."""
    waiting, seen = [wanted], 0
    while waiting and seen < 100:
        seen += 1
        shape = _resolved(waiting.pop(0), root)
        branches = [each for name in ("anyOf", "oneOf") for each in _list(shape.get(name))]
        waiting += branches
        if not branches and (not kind or shape.get("type", kind) == kind):
            yield shape


def _resolved(schema: Json, root: Object) -> Object:
    """The schema itself in place of a reference to it inside the same document."""
    for _ in range(20):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Json = root
        for step in reference[2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = found
    return schema if isinstance(schema, dict) else {}


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _json(text: str) -> Json:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as problem:
        raise _Wrong(f"{one_line(text, 40)!r} is not JSON: {problem}") from None


def _read(name: str) -> str:
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except OSError as problem:
        raise _Wrong(f"{one_line(name)}: cannot be read: {problem.strerror}") from None
    if len(data) > MAX_BYTES:
        raise _Wrong(f"{one_line(name)}: over {MAX_BYTES:,} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise _Wrong(f"{one_line(name)}: not a text in UTF-8") from None
