"""Schemas compiled once into checks: bounded, offline, and with the linear-time regular expression engine (P-07).

This is the one place that builds validators. A schema is small as a tree, in what its references unfold to, and in
its regular expressions, or it is refused. References that lead deeper into the value are followed only as far as the
value goes; those that stay at the same value unfold 2^n times, or for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from urllib.parse import unquote, urljoin

import jsonschema_rs
from jsonschema_rs import Draft7Validator, Draft202012Validator, RegexOptions, Validator, meta
from msgspec import json

from handrail.errors import SchemaError
from handrail.model import Json, Object, Violation
from handrail.schema.explain import SchemaContext, Targets, explain
from handrail.schema.jsonable import keys_of, pointer, to_jsonable

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 2_000
MAX_BYTES = 256 * 1024
MAX_UNFOLDED = 20_000
MAX_UNEVALUATED = 2_000
MAX_PATTERN_CHARACTERS = 10_000
MAX_PATTERN_MEMORY = 8 * 1024 * 1024
_MAX_CHAIN = 200  # references through references; also bounds the recursion here

_DIALECTS = {
    "json-schema.org/draft/2020-12/schema": Draft202012Validator,
    "json-schema.org/draft-07/schema": Draft7Validator,
}
_DRAFT_07 = "http://json-schema.org/draft-07/schema#"
_SUPPORTED = f"https://json-schema.org/draft/2020-12/schema and {_DRAFT_07}"
_NAME_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_NOT_SCHEMAS = frozenset({"const", "enum", "default", "examples"})
_IN_PLACE_KEYWORDS = ("not", "if", "then", "else", "allOf", "anyOf", "oneOf", "dependentSchemas", "dependencies")
_FLAGS = re.compile(r"\(\?[a-zA-Z-]*[ix]")
_HEADER_TYPES = ("string", "integer", "boolean")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRETS = frozenset(
    "apikey auth authorization bearer cookie credential credentials jwt key passphrase passwd password pin pwd secret "
    "secrets session ssn token tokens".split()
)
Headers = dict[str, tuple[str, ...]]


class Checker(SchemaContext, frozen=True, kw_only=True):
    """A compiled schema. `valid(value)` is the validator's own method: nothing is added to the hot path.

    `headers` are the `x-mcp-header` annotations: header suffix to the path of the property it mirrors.
    """

    valid: Callable[[Json], bool]
    headers: Headers

    def problems(self, value: Json, *, limit: int = 20) -> list[Violation]:
        """Everything that is wrong with `value`, in sentences; bounded in number, in length and in work."""
        return [] if self.valid(value) else explain(self, value, limit)


def compile_schema(schema: Object, where: str, *, any_root: bool = False, formats: bool = True) -> Checker:
    """Check the schema itself, then compile it; SchemaError says what is wrong with it and what would be right.

    `where` begins the message: `"tool 'x': input_schema"`. `any_root` is for results: their schema need not be that
    of an object, and mirrors nothing into headers. `formats` off leaves `format` an annotation.
    """
    try:
        nodes = _subschemas(schema)
        root = nodes[0].schema
        if not any_root and root.get("type") != "object":
            raise ValueError(f'the root must have "type": "object", not {root.get("type")!r}')
        dialect, targets, patterns = _dialect(nodes), _targets(nodes), _pattern_options(nodes)
        _check_unfolding(nodes, targets)
        options: Object = {"offline": True, "ignore_unknown_formats": True, "validate_formats": formats}
        build: Callable[[Object], Validator] = partial(dialect, **options, pattern_options=patterns)
        noun, headers = ("member", {}) if any_root else ("argument", _headers(nodes))
        stands_alone = dialect is Draft7Validator
        return Checker(root, targets, build, noun, stands_alone, valid=build(root).is_valid, headers=headers)
    except jsonschema_rs.ValidationError as error:
        raise SchemaError(f"{where}: {_reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{where}: {error}") from None


def header_map(schema: Object) -> Headers:
    """The `x-mcp-header` annotations of a foreign schema; SchemaError if they cannot be mirrored."""
    try:
        return _headers(_subschemas(schema))
    except (ValueError, RecursionError) as error:
        raise SchemaError(str(error)) from None


def sensitive_properties(headers: Headers) -> list[str]:
    """Names of mirrored properties that sound like secrets: headers end up in logs (SRV-612)."""
    property_words = [(path[-1], _WORD.findall(f"{path[-1]} {header}")) for header, path in headers.items()]
    return [name for name, words in property_words if not _SECRETS.isdisjoint(map(str.lower, words))]


def _dialect(nodes: list[_Node]) -> type[Validator]:
    """The declared dialect; else 2020-12, or draft-07 when the schema is valid only there (PD-9)."""
    root = nodes[0].schema
    name = re.sub(r"^https?://|#$", "", str(root.get("$schema", "json-schema.org/draft/2020-12/schema")))
    if name not in _DIALECTS:
        raise ValueError(f"unsupported $schema {name[:200]!r}; supported are {_SUPPORTED}")
    if "$schema" not in root and not meta.is_valid(root) and meta.is_valid({**root, "$schema": _DRAFT_07}):
        return Draft7Validator
    if _DIALECTS[name] is Draft202012Validator:
        for node, _, _ in nodes:
            node.pop("dependencies", None)  # no keyword of 2020-12, but the validator would keep it
    return _DIALECTS[name]


def _headers(nodes: list[_Node]) -> Headers:
    headers: Headers = {}
    for node, keys, _ in nodes:
        if "x-mcp-header" not in node:
            continue
        name, kind = node["x-mcp-header"], node.get("type")
        here = f"x-mcp-header at {_place(keys) or 'the root'}"
        if type(name) is not str or not _TOKEN.fullmatch(name):
            raise ValueError(f"{here}: {name!r} is not a header name; use letters, digits and hyphens")
        if not keys or any(keyword != "properties" for keyword in keys[::2]):
            raise ValueError(f"{here}: only a property reached through 'properties' alone can be mirrored")
        if kind not in _HEADER_TYPES:
            raise ValueError(f"{here}: the type must be one of {', '.join(_HEADER_TYPES)}, not {kind!r}")
        if name.lower() in map(str.lower, headers):
            raise ValueError(f"{here}: {name!r} is used already; case does not count")
        headers[name] = keys[1::2]
    return headers


class _Node(NamedTuple):
    schema: Object
    keys: tuple[str, ...]  # that lead to it from the root
    base: str  # the address its references are relative to


def _subschemas(schema: Object) -> list[_Node]:
    """Every subschema, in order, of a copy as JSON values; the root comes first."""
    if type(schema) is not dict:
        raise ValueError(f"expected a JSON Schema as a dict, got {type(schema).__name__}")
    raw = json.encode(to_jsonable(schema))
    if len(raw) > MAX_BYTES:
        raise ValueError(f"{len(raw)} bytes, more than {MAX_BYTES}; make it smaller")
    nodes: list[_Node] = []
    stack: list[tuple[Json, tuple[str, ...], str, int, bool]] = [(json.decode(raw), (), "", 0, False)]
    while stack:
        node, keys, base, depth, is_names = stack.pop()
        if type(node) is dict and not is_names:
            if type(node.get("$id")) is str:
                base = urljoin(base, node["$id"].partition("#")[0])
            nodes.append(_Node(node, keys, base))
            depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} subschemas; flatten it")
        if len(nodes) > MAX_SUBSCHEMAS:
            raise ValueError(f"more than {MAX_SUBSCHEMAS} subschemas; make it smaller")
        for key, child in reversed(list(node.items() if type(node) is dict else enumerate(node))):
            if type(child) in (dict, list) and (is_names or key not in _NOT_SCHEMAS):
                stack.append((child, (*keys, str(key)), base, depth, not is_names and key in _NAME_MAPS))
    return nodes


def _targets(nodes: list[_Node]) -> Targets:
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
            if type(node.get(keyword)) is not str:
                continue
            url, _, fragment = node[keyword].partition("#")
            url, fragment = urljoin(base, url), unquote(fragment)
            is_name = fragment and not fragment.startswith("/")
            target = anchors.get(f"{url}#{fragment}") if is_name else _at(resources.get(url), fragment)
            if type(target) is bool or id(target) in subschemas:
                targets.setdefault(id(node), []).append(target)
            elif target is not None or keyword == "$dynamicRef":  # the validator would let everything pass
                raise ValueError(f"{keyword} {node[keyword][:200]!r} leads to no schema; references are never fetched")
    return targets


def _check_unfolding(nodes: list[_Node], targets: Targets) -> None:
    # Each subschema is weighed once, so that 2^n references cost n steps here.
    weights: dict[int, int] = {}

    def weigh(node: Object, chain: int) -> int:
        if weights.get(id(node)) == 0:
            raise ValueError("references lead in a loop without going deeper into the value")
        if chain > _MAX_CHAIN:
            raise ValueError(f"$ref through $ref, more than {_MAX_CHAIN} times; flatten it")
        if id(node) not in weights:
            weights[id(node)] = 0
            names = len(_names(node, "properties"))
            weights[id(node)] = (
                1 + names // 16 + sum(weigh(each, chain + 1) for each in _in_place_subschemas(node, targets))
            )
        if weights[id(node)] > MAX_UNFOLDED:
            raise ValueError(f"its $refs unfold to more than {MAX_UNFOLDED} subschemas; refer less often")
        return weights[id(node)]

    # The compiler copies, for each unevaluated… keyword, everything that applies to the same value.
    copied = 0
    for node, _, _ in nodes:
        weight = weigh(node, 0)
        copied += weight if "unevaluatedProperties" in node or "unevaluatedItems" in node else 0
    if copied > MAX_UNEVALUATED:
        raise ValueError("unevaluatedProperties or unevaluatedItems over too many branches; use fewer")


def _in_place_subschemas(node: Object, targets: Targets) -> list[Object]:
    """The subschemas that apply to the same value as this one."""
    inside = list(targets.get(id(node), ()))
    for keyword in _IN_PLACE_KEYWORDS:
        rule = node.get(keyword)
        inside += rule if type(rule) is list else _names(node, keyword).values() if keyword in _NAME_MAPS else [rule]
    return [each for each in inside if type(each) is dict]


def _names(node: Object, keyword: str) -> Object:
    """A keyword's map of names; nothing where it is none: the schema is not checked yet."""
    return node[keyword] if type(node.get(keyword)) is dict else {}


def _pattern_options(nodes: list[_Node]) -> RegexOptions:
    """The engine's limits, such that all patterns together stay within ours."""
    patterns = [name for node, _, _ in nodes for name in _names(node, "patternProperties")]
    patterns += [node["pattern"] for node, _, _ in nodes if type(node.get("pattern")) is str]
    if sum(map(len, patterns)) > MAX_PATTERN_CHARACTERS:
        raise ValueError(f"more than {MAX_PATTERN_CHARACTERS} characters of patterns; use fewer")
    for pattern in filter(_FLAGS.search, patterns):  # ignoring case, one `\W` takes the engine 8 ms
        raise ValueError(f"pattern {pattern[:60]!r}: JSON Schema's expressions have no (?i) or (?x)")
    size = MAX_PATTERN_MEMORY // max(len(patterns), 8)
    return RegexOptions(size_limit=size, dfa_size_limit=size)


def _reason(error: jsonschema_rs.ValidationError) -> str:
    at = f"at {_place(error.instance_path)[:200]}: " if error.instance_path else ""
    message = error.message if len(error.message) <= 300 else error.message[:299] + "…"
    if error.kind.name == "$ref":
        return f"{at}a $ref cannot be resolved: {message}. References are never fetched: put the target under $defs"
    if error.kind.name == "format":
        return f"{at}{message} for the linear-time engine: no look-around, no back-references, few counted repetitions"
    return f"{at}not a valid schema: {message}"


def _at(node: Json, fragment: str) -> Json:
    for key in keys_of(fragment):
        if type(node) is list:
            node = dict(zip(map(str, range(len(node))), node, strict=True))
        node = node.get(key) if type(node) is dict else None
    return node


def _place(keys: tuple[str, ...] | list[str | int]) -> str:
    return "".join(pointer("", key) for key in keys)
