"""Schemas compiled once into checks, the annotations in them that name HTTP headers, and no network ever.

This is the one place that builds validators: offline, with the linear-time regular expression engine and size limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

import jsonschema_rs
from jsonschema_rs import Draft7Validator, Draft202012Validator, RegexOptions, Validator

from handrail.errors import SchemaError
from handrail.model import Json, Object, Problem
from handrail.schema.bounds import Targets, bounded_copy, pointer, resolved
from handrail.schema.explain import Rules, closest, explain

__all__ = ["Checker", "closest", "compile_schema", "header_map", "sensitive_headers"]

DIALECTS = {
    "json-schema.org/draft/2020-12/schema": Draft202012Validator,
    "json-schema.org/draft-07/schema": Draft7Validator,
}

_PATTERNS = RegexOptions(size_limit=4 * 1024 * 1024, dfa_size_limit=1024 * 1024)
_TYPES = "array, boolean, integer, null, number, object, string"
_NOT_SCHEMAS = frozenset({"const", "enum", "default", "examples"})
_HEADER_TYPES = ("string", "integer", "boolean")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SENSITIVE = frozenset(
    {"apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "jwt", "key", "passphrase"}
    | {"passwd", "password", "pin", "pwd", "secret", "secrets", "session", "ssn", "token", "tokens"}
)


class Checker:
    """A compiled schema. `valid(value)` is the validator's own method: nothing is added to the hot path."""

    __slots__ = ("_formats", "_judges", "_kind", "_rules", "valid")

    valid: Callable[[Json], bool]

    def __init__(self, validator: Validator, schema: Object, targets: Targets, *, noun: str, formats: bool) -> None:
        self._kind = type(validator)
        self._formats = formats
        self._judges: dict[tuple[str, int], tuple[Callable[[Json], bool], Json]] = {}
        self._rules = Rules(schema, targets, self._judge, noun, self._kind is Draft7Validator)
        self.valid = validator.is_valid

    def problems(self, value: Json, *, limit: int = 20) -> list[Problem]:
        """Everything that is wrong with `value`, in sentences; bounded in number, in length and in work."""
        return [] if self.valid(value) else explain(self._rules, value, limit)

    def _judge(self, keyword: str, rule: Json) -> Callable[[Json], bool]:
        known = self._judges.get((keyword, id(rule)))
        if known is None or known[1] is not rule:
            known = (_build(self._kind, {keyword: rule}, formats=self._formats).is_valid, rule)
            self._judges[keyword, id(rule)] = known
        return known[0]


def compile_schema(schema: Object, where: str, *, any_root: bool = False, formats: bool = True) -> Checker:
    """Check the schema itself, then compile it; SchemaError says what is wrong with it and what would be right.

    `where` begins the message: `"tool 'x': input_schema"`. Without `$schema` the dialect is 2020-12, or draft-07
    when the schema is valid only there. `formats` off leaves `format` an annotation.
    """
    copy = bounded_copy(schema, where)
    if not any_root and copy.get("type") != "object":
        raise SchemaError(f'{where}: the root must have "type": "object", not {copy.get("type")!r}')
    noun = "member" if any_root else "argument"
    refusal = SchemaError(where)
    for kind in _dialects(copy, where):
        # Before the compiler: what references unfold to is what it would have to build.
        targets = resolved(copy, where, old_ids=kind is Draft7Validator)
        try:
            return Checker(_build(kind, copy, formats=formats), copy, targets, noun=noun, formats=formats)
        except jsonschema_rs.ValidationError as error:
            refusal = refusal if refusal.args[0] != where else SchemaError(f"{where}: {_reason(error)}")
        except ValueError as error:
            raise SchemaError(f"{where}: {error}") from None
    raise refusal


def header_map(schema: Object, where: str) -> dict[str, tuple[str, ...]]:
    """`x-mcp-header` annotations: header suffix to the path of the property it mirrors (REVISIONS.md section 23)."""
    found: dict[str, tuple[str, ...]] = {}
    seen: dict[str, str] = {}
    for place, path, node in _schemas(bounded_copy(schema, where)):
        if "x-mcp-header" not in node:
            continue
        name = node["x-mcp-header"]
        here = f"{where}: x-mcp-header at {place or 'the root'}"
        if type(name) is not str or not _TOKEN.fullmatch(name):
            raise SchemaError(f"{here}: {name!r} is not a header name; use letters, digits and hyphens")
        if not path:
            raise SchemaError(f"{here}: only a property reached through 'properties' alone can be mirrored")
        if node.get("type") not in _HEADER_TYPES:
            raise SchemaError(f"{here}: the type must be one of {', '.join(_HEADER_TYPES)}, not {node.get('type')!r}")
        if name.lower() in seen:
            raise SchemaError(f"{here}: {name!r} is used at {seen[name.lower()]} already; case does not count")
        seen[name.lower()] = place
        found[name] = path
    return found


def sensitive_headers(schema: Object) -> list[str]:
    """Names of mirrored properties that sound like secrets: headers end up in logs (SRV-612)."""
    names = {path[-1]: header for header, path in header_map(schema, "schema").items()}
    return [name for name, header in names.items() if _SENSITIVE & _words(name) or _SENSITIVE & _words(header)]


def _build(kind: type[Validator], schema: Object, *, formats: bool) -> Validator:
    return kind(
        schema,
        offline=True,
        validate_formats=formats,
        ignore_unknown_formats=True,
        pattern_options=_PATTERNS,
    )


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
    place = ""
    for key in error.instance_path:
        place = pointer(place, key)
    at = f"at {place[:200]}: " if place else ""
    message = error.message if len(error.message) <= 300 else error.message[:299] + "…"
    kind = error.kind.name
    if kind == "$ref":
        return (
            f"{at}a $ref cannot be resolved: {message}. References are never fetched: put the target under $defs "
            "and write '#/$defs/Name'"
        )
    if kind == "format" and error.kind.value == "regex":
        return (
            f"{at}{message} for the linear-time engine: no look-around, no back-references, and counted "
            "repetitions only as large as needed"
        )
    if error.instance_path and error.instance_path[-1] == "type":
        return f"{at}{message}; types are {_TYPES}"
    return f"{at}not a valid schema: {message}"


def _schemas(schema: Object) -> Iterator[tuple[str, tuple[str, ...], Object]]:
    """Every subschema with its pointer, and its property path where nothing but `properties` leads to it."""
    stack: list[tuple[Json, str, tuple[str, ...] | None, bool]] = [(schema, "", (), False)]
    while stack:
        node, place, path, names = stack.pop()
        if type(node) is list:
            stack.extend((child, pointer(place, i), None, False) for i, child in enumerate(node))
        elif type(node) is dict and names:
            for key, child in reversed(node.items()):
                stack.append((child, pointer(place, key), None if path is None else (*path, key), False))
        elif type(node) is dict:
            yield place, path or (), node
            for key, child in reversed(node.items()):
                if key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
                    stack.append((child, pointer(place, key), path if key == "properties" else None, True))
                elif key not in _NOT_SCHEMAS:
                    stack.append((child, pointer(place, key), None, False))


def _words(name: str) -> set[str]:
    words = [word.lower() for word in _WORDS.findall(name)]
    return {*words, *(a + b for a, b in pairwise(words))}
