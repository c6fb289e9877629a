"""Schemas compiled once into checks: bounded, offline, and with the linear-time regular expression engine (P-07).

This is the one place that builds validators. A schema is small in three ways or it is refused: as a tree, in what
applies to one value when its references are followed, and in its regular expressions. Validators follow references
that lead further down only as far as the value goes, but those that stay at the same value 2^n times, or for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple
from urllib.parse import unquote, urljoin

import jsonschema_rs
from jsonschema_rs import Draft7Validator, Draft202012Validator, RegexOptions, Validator
from msgspec import json

from handrail.errors import SchemaError
from handrail.model import Json, Object, Problem
from handrail.schema.explain import Rules, Targets, closest, explain
from handrail.schema.plain import plain, pointer

__all__ = ["Checker", "closest", "compile_schema", "header_map", "sensitive_headers"]

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 2_000
MAX_BYTES = 256 * 1024
MAX_UNFOLDED = 20_000
MAX_UNEVALUATED = 2_000
MAX_PATTERN_CHARACTERS = 10_000
MAX_PATTERN_MEMORY = 8 * 1024 * 1024

DIALECTS = {
    "json-schema.org/draft/2020-12/schema": Draft202012Validator,
    "json-schema.org/draft-07/schema": Draft7Validator,
}

_MAX_CHAIN = 200  # references through references; also bounds the recursion here
_NAME_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_NOT_SCHEMAS = frozenset({"const", "enum", "default", "examples"})
_SAME_VALUE = ("not", "if", "then", "else", "allOf", "anyOf", "oneOf", "dependentSchemas", "dependencies")
_FLAGS = re.compile(r"\(\?[a-zA-Z-]*[ix]")
_HEADER_TYPES = ("string", "integer", "boolean")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SENSITIVE = frozenset(
    {"apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "jwt", "key", "passphrase"}
    | {"passwd", "password", "pin", "pwd", "secret", "secrets", "session", "ssn", "token", "tokens"}
)


class Checker:
    """A compiled schema. `valid(value)` is the validator's own method: nothing is added to the hot path."""

    __slots__ = ("_rules", "valid")

    valid: Callable[[Json], bool]

    def __init__(self, validator: Validator, rules: Rules) -> None:
        self.valid = validator.is_valid
        self._rules = rules

    def problems(self, value: Json, *, limit: int = 20) -> list[Problem]:
        """Everything that is wrong with `value`, in sentences; bounded in number, in length and in work."""
        return [] if self.valid(value) else explain(self._rules, value, limit)


def compile_schema(schema: Object, where: str, *, any_root: bool = False, formats: bool = True) -> Checker:
    """Check the schema itself, then compile it; SchemaError says what is wrong with it and what would be right.

    `where` begins the message: `"tool 'x': input_schema"`. Without `$schema` the dialect is 2020-12, or draft-07
    when the schema is valid only there (PD-9). `formats` off leaves `format` an annotation.
    """
    copy, nodes = _own_copy(schema, where)
    if not any_root and copy.get("type") != "object":
        raise SchemaError(f'{where}: the root must have "type": "object", not {copy.get("type")!r}')
    dialects = _dialects(copy, where)
    targets = _targets(nodes, where)
    _check_unfolding(nodes, targets, where)
    pattern_options = _pattern_options(nodes, where)
    refusal: SchemaError | None = None
    for kind in dialects:

        def build(part: Object, kind: type[Validator] = kind) -> Validator:
            return kind(
                part,
                offline=True,
                validate_formats=formats,
                ignore_unknown_formats=True,
                pattern_options=pattern_options,
            )

        try:
            validator = build(copy)
        except jsonschema_rs.ValidationError as error:
            refusal = refusal or SchemaError(f"{where}: {_reason(error)}")
        except ValueError as error:
            raise SchemaError(f"{where}: {error}") from None
        else:
            noun = "member" if any_root else "argument"
            return Checker(validator, Rules(copy, targets, build, noun, kind is Draft7Validator))
    raise refusal or SchemaError(where)


def header_map(schema: Object, where: str) -> dict[str, tuple[str, ...]]:
    """`x-mcp-header` annotations: header suffix to the path of the property it mirrors (REVISIONS.md section 23)."""
    found: dict[str, tuple[str, ...]] = {}
    seen: dict[str, str] = {}
    for node, keys, _ in _own_copy(schema, where)[1]:
        if "x-mcp-header" not in node:
            continue
        name, place = node["x-mcp-header"], _place(keys)
        here = f"{where}: x-mcp-header at {place or 'the root'}"
        if type(name) is not str or not _TOKEN.fullmatch(name):
            raise SchemaError(f"{here}: {name!r} is not a header name; use letters, digits and hyphens")
        if not keys or any(keyword != "properties" for keyword in keys[::2]):
            raise SchemaError(f"{here}: only a property reached through 'properties' alone can be mirrored")
        if node.get("type") not in _HEADER_TYPES:
            raise SchemaError(f"{here}: the type must be one of {', '.join(_HEADER_TYPES)}, not {node.get('type')!r}")
        if name.lower() in seen:
            raise SchemaError(f"{here}: {name!r} is used at {seen[name.lower()]} already; case does not count")
        seen[name.lower()] = place
        found[name] = keys[1::2]
    return found


def sensitive_headers(schema: Object) -> list[str]:
    """Names of mirrored properties that sound like secrets: headers end up in logs (SRV-612)."""
    names = {path[-1]: header for header, path in header_map(schema, "schema").items()}
    return [name for name, header in names.items() if _SENSITIVE & (_words(name) | _words(header))]


class _Node(NamedTuple):
    schema: Object
    keys: tuple[str, ...]  # that lead to it from the root
    base: str  # the address its references are relative to


def _own_copy(schema: object, where: str) -> tuple[Object, list[_Node]]:
    """The schema as JSON values that nobody else can change, and every subschema in it, in order."""
    if type(schema) is not dict:
        raise SchemaError(f"{where}: expected a JSON Schema as a dict, got {type(schema).__name__}")
    try:
        raw = json.encode(plain(schema))
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{where}: not JSON: {error}") from None
    if len(raw) > MAX_BYTES:
        raise SchemaError(f"{where}: {len(raw)} bytes, more than {MAX_BYTES}; make it smaller")
    copy: Object = json.decode(raw)
    found: list[_Node] = []
    stack: list[tuple[Json, tuple[str, ...], str, int, bool]] = [(copy, (), "", 1, False)]
    while stack:
        node, keys, base, depth, is_names = stack.pop()
        if type(node) is dict and not is_names:
            if type(node.get("$id")) is str:
                base = _joined(base, node["$id"].partition("#")[0], where)
            found.append(_Node(node, keys, base))
            depth += 1
        if depth > MAX_DEPTH + 1:
            raise SchemaError(f"{where}: nested deeper than {MAX_DEPTH} subschemas; flatten it")
        if len(found) > MAX_SUBSCHEMAS:
            raise SchemaError(f"{where}: more than {MAX_SUBSCHEMAS} subschemas; make it smaller")
        inside = list(node.items() if type(node) is dict else enumerate(node))
        for key, child in reversed(inside):
            if type(child) in (dict, list) and (is_names or key not in _NOT_SCHEMAS):
                stack.append((child, (*keys, str(key)), base, depth, not is_names and key in _NAME_MAPS))
    return copy, found


def _targets(nodes: list[_Node], where: str) -> Targets:
    """Where references lead. What is not found here is left to the validator, which refuses or knows it."""
    subschemas = {id(node) for node, _, _ in nodes}
    resources: dict[str, Json] = {}
    anchors: dict[str, Json] = {}
    for node, _, base in nodes:
        resources.setdefault(base, node)
        old_anchor = str(node.get("$id", "")).partition("#")[2]  # as draft-07 wrote them
        for name in (node.get("$anchor"), node.get("$dynamicAnchor"), old_anchor):
            anchors[f"{base}#{name}"] = node
    targets: Targets = {}
    for node, _, base in nodes:
        for keyword in ("$ref", "$dynamicRef"):
            reference = node.get(keyword)
            if type(reference) is not str:
                continue
            url, _, fragment = reference.partition("#")
            url, fragment = _joined(base, url, where), unquote(fragment)
            is_name = fragment and not fragment.startswith("/")
            target = anchors.get(f"{url}#{fragment}") if is_name else _at(resources.get(url), fragment)
            if type(target) is bool or id(target) in subschemas:
                targets.setdefault(id(node), []).append(target)
            elif target is not None or keyword == "$dynamicRef":  # the validator would let everything pass
                raise SchemaError(
                    f"{where}: {keyword} {reference[:200]!r} leads to no schema; references are never fetched"
                )
    return targets


def _check_unfolding(nodes: list[_Node], targets: Targets, where: str) -> None:
    # Each subschema is weighed once, so that 2^n references cost n steps here.
    weights: dict[int, int] = {}

    def weigh(node: Object, chain: int) -> int:
        known = weights.get(id(node))
        if known == 0:
            raise SchemaError(f"{where}: references lead in a loop without going deeper into the value")
        if known is None:
            if chain > _MAX_CHAIN:
                raise SchemaError(f"{where}: $ref through $ref, more than {_MAX_CHAIN} times; flatten it")
            weights[id(node)] = 0
            known = 1 + len(_names(node, "properties")) // 16
            known += sum(weigh(each, chain + 1) for each in _applied(node, targets))
            weights[id(node)] = known
        if known > MAX_UNFOLDED:
            raise SchemaError(f"{where}: its $refs unfold to more than {MAX_UNFOLDED} subschemas; refer less often")
        return known

    # The compiler copies, for each unevaluated… keyword, everything that applies to the same value.
    copied = 0
    for node, _, _ in nodes:
        weight = weigh(node, 0)
        copied += weight if "unevaluatedProperties" in node or "unevaluatedItems" in node else 0
    if copied > MAX_UNEVALUATED:
        raise SchemaError(f"{where}: unevaluatedProperties or unevaluatedItems over too many branches; use fewer")


def _applied(node: Object, targets: Targets) -> Iterator[Object]:
    """The subschemas that apply to the same value as this one."""
    inside = list(targets.get(id(node), ()))
    for keyword in _SAME_VALUE:
        rule = node.get(keyword)
        if type(rule) is list:
            inside += rule
        elif type(rule) is dict:
            inside += rule.values() if keyword in _NAME_MAPS else [rule]
    return (each for each in inside if type(each) is dict)


def _names(node: Object, keyword: str) -> Object:
    """A keyword's map of names; nothing where it is none, for nobody has checked the schema yet."""
    return node[keyword] if type(node.get(keyword)) is dict else {}


def _pattern_options(nodes: list[_Node], where: str) -> RegexOptions:
    """The engine's limits, such that all patterns together stay within ours."""
    patterns = [name for node, _, _ in nodes for name in _names(node, "patternProperties")]
    patterns += [node["pattern"] for node, _, _ in nodes if type(node.get("pattern")) is str]
    if sum(map(len, patterns)) > MAX_PATTERN_CHARACTERS:
        raise SchemaError(f"{where}: more than {MAX_PATTERN_CHARACTERS} characters of patterns; use fewer")
    for pattern in patterns:
        if _FLAGS.search(pattern):  # ignoring case, one `\W` takes the engine 8 ms
            raise SchemaError(f"{where}: pattern {pattern[:60]!r}: JSON Schema's expressions have no (?i) or (?x)")
    size = min(MAX_PATTERN_MEMORY // 8, MAX_PATTERN_MEMORY // max(len(patterns), 1))
    return RegexOptions(size_limit=size, dfa_size_limit=size)


def _dialects(schema: Object, where: str) -> list[type[Validator]]:
    if "$schema" not in schema:
        return [Draft202012Validator, Draft7Validator]
    name = schema["$schema"]
    known = DIALECTS.get(re.sub(r"^https?://|#$", "", name)) if type(name) is str else None
    if known is None:
        supported = "https://json-schema.org/draft/2020-12/schema and http://json-schema.org/draft-07/schema#"
        raise SchemaError(f"{where}: unsupported $schema {str(name)[:200]!r}; supported are {supported}")
    return [known]


def _reason(error: jsonschema_rs.ValidationError) -> str:
    at = f"at {_place(error.instance_path)[:200]}: " if error.instance_path else ""
    message = error.message if len(error.message) <= 300 else error.message[:299] + "…"
    if error.kind.name == "$ref":
        advice = "References are never fetched: put the target under $defs and write '#/$defs/Name'"
        return f"{at}a $ref cannot be resolved: {message}. {advice}"
    if error.kind.name == "format":
        return f"{at}{message} for the linear-time engine: no look-around, no back-references, few counted repetitions"
    return f"{at}not a valid schema: {message}"


def _joined(base: str, url: str, where: str) -> str:
    try:
        return urljoin(base, url)
    except ValueError as error:
        raise SchemaError(f"{where}: {url[:200]!r} is not an address: {error}") from None


def _at(node: Json, fragment: str) -> Json:
    for part in fragment.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if type(node) is list and key.isdecimal() and len(key) < 6:
            node = dict(enumerate(node)).get(int(key))
        else:
            node = node.get(key) if type(node) is dict else None
    return node


def _place(keys: tuple[str, ...] | list[str | int]) -> str:
    return "".join(pointer("", key) for key in keys)


def _words(name: str) -> set[str]:
    words = [word.lower() for word in _WORDS.findall(name)]
    return {*words, *(a + b for a, b in pairwise(words))}
