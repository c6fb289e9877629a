"""Limits on a schema before any validator sees it (P-07).

A schema is small in four ways or it is refused: as a tree (depth, subschemas, values, characters), as the tree its
references unfold to, as the regular expressions in it, and in what `unevaluated…` keywords make the compiler unfold.
The compiler walks each of those; some of them, measured, for minutes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urljoin

from msgspec import json

from handrail.errors import SchemaError
from handrail.model import Json, Object

__all__ = ["Targets", "bounded_copy", "pointer", "resolved"]

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 2_000
MAX_VALUES = 10_000
MAX_CHARACTERS = 256 * 1024
MAX_UNFOLDED = 20_000
MAX_UNEVALUATED = 2_000
MAX_REGEX_WEIGHT = 50_000

_MAX_NESTING = 160  # lists and name maps lie between subschemas
_MAX_CHAIN = 250  # references through references; bounds recursion here and in the compiler
_MAX_INTEGER_BITS = 4096

_NAME_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_PATTERNS: dict[str, Callable[[Any], list[str]]] = {
    "pattern": lambda rule: [rule] if isinstance(rule, str) else [],
    "patternProperties": lambda rule: [one for one in rule if isinstance(one, str)] if isinstance(rule, dict) else [],
}
_CONTAINERS = (dict, list, tuple)
_IN_PLACE = ("not", "if", "then", "else")
_IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")

# A copied subschema's id() to the subschema its $ref names.
Targets = dict[int, Json]

_Trail = tuple[Any, str | int] | None


def bounded_copy(schema: object, where: str) -> Object:
    """The schema as plain JSON values, unshared with the original; SchemaError when it is too large or not JSON."""
    if type(schema) is not dict:
        raise SchemaError(f"{where}: expected a JSON Schema as a dict, got {_named(schema)}")
    values = subschemas = characters = weight = 0
    stack: list[tuple[Any, int, int, bool, _Trail]] = [(schema, 0, 0, False, None)]
    while stack:
        node, depth, nesting, names, trail = stack.pop()
        values += len(node)
        if not names and isinstance(node, dict):
            subschemas += 1
            depth += 1
        # A Python object that contains itself ends here too: it is endlessly deep.
        if depth > MAX_DEPTH or nesting > _MAX_NESTING:
            raise SchemaError(f"{where}: nested deeper than {MAX_DEPTH} subschemas (or contains itself); flatten it")
        if subschemas > MAX_SUBSCHEMAS or values > MAX_VALUES:
            raise SchemaError(f"{where}: more than {MAX_SUBSCHEMAS} subschemas or {MAX_VALUES} values; make it smaller")
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(node, dict):
                if not isinstance(key, str):
                    raise SchemaError(f"{where}: at {_trail(trail)}: the key {key!r} is not a string")
                characters += len(key)
                if not names and key in _PATTERNS:
                    weight += sum(_regex_weight(each, where) for each in _PATTERNS[key](child))
            if isinstance(child, str):
                characters += len(child)
            elif isinstance(child, _CONTAINERS):
                stack.append((child, depth, nesting + 1, not names and key in _NAME_MAPS, (trail, key)))
            elif child is not None and not _is_number(child):
                raise SchemaError(f"{where}: at {_trail((trail, key))}: {_named(child)} is not a JSON value")
        if characters > MAX_CHARACTERS:
            raise SchemaError(f"{where}: more than {MAX_CHARACTERS} characters; make it smaller")
        if weight > MAX_REGEX_WEIGHT:
            raise SchemaError(f"{where}: its patterns repeat too much to be compiled; use minLength and maxLength")
    try:
        copy: Object = json.decode(json.encode(schema))
    except ValueError as error:  # a lone surrogate
        raise SchemaError(f"{where}: not JSON: {error}") from None
    return copy


def resolved(schema: Object, where: str, *, old_ids: bool) -> Targets:
    """Where each local `$ref` leads; SchemaError when following them unfolds to too much.

    What cannot be resolved is left out: only the validator knows what is a schema and what merely looks like one.
    `old_ids` is for draft-07, where `"$id": "#name"` is an anchor.
    """
    resources: dict[str, Json] = {"": schema}
    anchors: dict[tuple[str, str], Json] = {}
    references: list[tuple[Object, str, str]] = []
    dynamic = () if old_ids else ("$dynamicRef",)
    unevaluated: list[Object] = []
    stack: list[tuple[Json, str]] = [(schema, "")]
    while stack:
        node, base = stack.pop()
        if type(node) is list:
            stack.extend((child, base) for child in node)
        if type(node) is not dict:
            continue
        name = node.get("$id")
        if type(name) is str:
            if old_ids and name.startswith("#"):
                anchors[base, name[1:]] = node
            else:
                base = urljoin(base, name.partition("#")[0])
                resources[base] = node
        for keyword in ("$anchor", "$dynamicAnchor"):
            if type(node.get(keyword)) is str:
                anchors[base, node[keyword]] = node
        for keyword in ("$ref", *dynamic):
            if type(node.get(keyword)) is str:
                references.append((node, keyword, base))
        if "unevaluatedProperties" in node or "unevaluatedItems" in node:
            unevaluated.append(node)
        stack.extend((child, base) for child in node.values())
    targets: Targets = {}
    for node, keyword, base in references:
        url, _, fragment = node[keyword].partition("#")
        place = urljoin(base, url) if url else base
        if not fragment or fragment.startswith("/"):
            target = _at(resources.get(place), unquote(fragment))
        else:
            target = anchors.get((place, unquote(fragment)))
        if target is not None:
            targets[id(node)] = target
        elif keyword == "$dynamicRef":  # the validator would let everything pass
            raise SchemaError(
                f"{where}: $dynamicRef {node[keyword][:200]!r} leads nowhere; references are never fetched"
            )
    _unfold(schema, targets, where)
    steps = 0
    for node in unevaluated:
        steps = _unfold_in_place(node, targets, where, steps, set())
    return targets


def pointer(path: str, key: str | int) -> str:
    """The JSON pointer one step below `path` (RFC 6901)."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"


def _unfold(schema: Object, targets: Targets, where: str) -> None:
    # Counted once per node, so that 2^n references cost n steps here.
    sizes: dict[int, tuple[int, int]] = {}

    def size(node: Json, chain: int) -> tuple[int, int]:
        known = sizes.get(id(node))
        if known is not None:
            return known
        if chain > _MAX_CHAIN:
            raise SchemaError(f"{where}: $ref through $ref, nested deeper than {_MAX_CHAIN}; flatten it")
        sizes[id(node)] = (1, 0)  # on the way down: a loop, which validators follow only as far as the value goes
        total, height = 1, 0
        inside = node if type(node) is list else [v for k, v in node.items() if k not in _DEFINITIONS]
        for child in [each for each in inside if type(each) is dict or type(each) is list]:
            below, tall = size(child, chain + 1)
            total, height = total + below, max(height, tall + 1)
        target = targets.get(id(node))
        if type(target) is dict:
            below, tall = size(target, chain + 1)
            total, height = total + below, max(height, tall + 1)
        if total > MAX_UNFOLDED:
            raise SchemaError(f"{where}: its $refs unfold to more than {MAX_UNFOLDED} subschemas; refer less often")
        if chain + height > _MAX_CHAIN:
            raise SchemaError(f"{where}: $ref through $ref, nested deeper than {_MAX_CHAIN}; flatten it")
        sizes[id(node)] = (total, height)
        return total, height

    size(schema, 0)


def _unfold_in_place(node: Json, targets: Targets, where: str, steps: int, above: set[int]) -> int:
    # The compiler copies, for each unevaluated… keyword, everything that applies to the same value, path by path.
    if type(node) is not dict or id(node) in above:
        return steps
    names = node.get("properties")
    steps += 1 + (len(names) // 16 if type(names) is dict else 0)
    if steps > MAX_UNEVALUATED:
        raise SchemaError(f"{where}: unevaluatedProperties or unevaluatedItems over too many branches; use fewer")
    above = above | {id(node)}
    inside = [node.get(keyword) for keyword in _IN_PLACE]
    for keyword in _IN_PLACE_LISTS:
        listed = node.get(keyword)
        inside.extend(listed if type(listed) is list else ())
    dependent = node.get("dependentSchemas")
    inside.extend(dependent.values() if type(dependent) is dict else ())
    for child in [*inside, targets.get(id(node))]:
        steps = _unfold_in_place(child, targets, where, steps, above)
    return steps


_REGEX_TOKEN = re.compile(
    r"\\(?P<wide>[pP])(?:\{[^}]*\}|.)?|\\[xu]\{[^}]*\}|\\(?P<escape>.)|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])"
    r"|(?P<open>\()(?:\?(?:[:=!]|<[=!]|P?<[^>]*>))?|(?P<close>\))"
    r"|\{(?P<low>\d+)(?:,(?P<high>\d*))?\}\??|(?P<any>\.)|[*+?|^$]|(?P<char>.)",
    re.DOTALL,
)
# In units of one literal character, about 0.3 µs and 128 bytes when compiled.
_WIDE, _BROAD = 1000, 20
_EACH_PATTERN, _EACH_TOKEN, _IGNORING_CASE = 30, 4, 6


def _regex_weight(pattern: str, where: str) -> int:
    if re.search(r"\(\?[a-zA-Z]*x", pattern):
        raise SchemaError(f"{where}: pattern {pattern[:60]!r}: the x flag is not part of JSON Schema's expressions")
    groups = [0]
    last = tokens = 0
    if len(pattern) * _EACH_TOKEN > MAX_REGEX_WEIGHT:
        return len(pattern) * _EACH_TOKEN  # measured by its length alone: reading it takes time too
    for token in _REGEX_TOKEN.finditer(pattern):
        tokens += 1
        kind = token.lastgroup
        if kind == "open":
            groups.append(0)
            last = 0
        elif kind == "close":
            last = groups.pop() if len(groups) > 1 else 0
            groups[-1] += last
        elif kind in ("low", "high"):
            times = max(int(token["low"][:6]), int((token["high"] or "0")[:6]))
            more = last * max(times - 1, 0)
            groups[-1] += more
            last += more
        elif token[0] not in "*+?|^$":
            last = _WIDE if kind == "wide" or "\\p" in token[0] or "\\P" in token[0] else _narrow(token[0])
            groups[-1] += last
    times = _IGNORING_CASE if re.search(r"\(\?[a-zA-Z]*i", pattern) else 1
    return _EACH_PATTERN + tokens * _EACH_TOKEN + sum(groups) * times


def _narrow(token: str) -> int:
    if token in (".", "\\s", "\\S", "\\W", "\\D") or token.startswith("[^") or not token.isascii():
        return _BROAD
    return _BROAD if token.startswith("[") and re.search(r"\\[sSWDux]", token) else 1


def _at(node: Json, fragment: str) -> Json:
    for part in fragment.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if type(node) is dict:
            node = node.get(key)
        elif type(node) is list and key.isdecimal() and len(key) < 6 and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


def _is_number(node: object) -> bool:
    if type(node) is float:
        return math.isfinite(node)
    return isinstance(node, int) and node.bit_length() <= _MAX_INTEGER_BITS


def _trail(trail: _Trail) -> str:
    keys: list[str | int] = []
    while trail is not None:
        trail, key = trail
        keys.append(key)
    path = ""
    for key in reversed(keys):
        path = pointer(path, key)
    return path or "the root"


def _named(value: object) -> str:
    if value is None:
        return "None"
    return f"a number such as {value}" if isinstance(value, float) else f"a value of type {type(value).__name__}"
