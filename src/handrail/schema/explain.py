"""What is wrong with a value, in sentences: a lazy walk over schema and value together.

The compiled validator can list its errors too, but it collects all of them first and copies the offending value into
each: two million wrong items took 13 s and 3 GB, a recursive `oneOf` doubled with every level. This walk stops
at a number of problems and at a number of steps. Single keywords are still judged by the compiled validator.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from msgspec import Struct, json

from handrail.model import Json, Object, Problem
from handrail.schema.bounds import Targets, pointer

__all__ = ["Rules", "closest", "explain"]

MAX_STEPS = 5_000
MAX_TEXT = 400

_MAX_SHOWN = 60
_MAX_WALK = 200
_MAX_BRANCH_PROBLEMS = 10
_MAX_CANDIDATES = 1_000

_EXAMPLES = {
    "date-time": "2026-07-28T09:30:00Z",
    "date": "2026-07-28",
    "time": "09:30:00Z",
    "duration": "PT1H30M",
    "email": "name@example.org",
    "uri": "https://example.org/page",
    "uuid": "6f1c1f1e-0f4b-4c8e-9a55-2f4d3a7f9b10",
}
_LENGTHS = {
    "minLength": ("characters", "fewer than the minimum"),
    "maxLength": ("characters", "more than the maximum"),
    "minItems": ("items", "fewer than the minimum"),
    "maxItems": ("items", "more than the maximum"),
    "minProperties": ("members", "fewer than the minimum"),
    "maxProperties": ("members", "more than the maximum"),
}
_COMPARED = {
    "const": "is not",
    "minimum": "is less than the minimum",
    "maximum": "is more than the maximum",
    "exclusiveMinimum": "is not more than",
    "exclusiveMaximum": "is not less than",
    "multipleOf": "is not a multiple of",
    "pattern": "does not match the pattern",
}
_SIMPLE = frozenset({"type", "enum", "format", "uniqueItems", *_LENGTHS, *_COMPARED})


class Rules(Struct, frozen=True):
    """A schema ready to be explained: `judge(keyword, its value)` gives the compiled check of that keyword alone."""

    schema: Object
    targets: Targets
    judge: Callable[[str, Json], Callable[[Json], bool]]
    noun: str
    reference_stands_alone: bool


def explain(rules: Rules, value: Json, limit: int) -> list[Problem]:
    """Problems of a value the schema does not accept: at least one, at most `limit`."""
    found = list(islice(_unrepeated(_Walk(rules).at(rules.schema, value, "", 0)), limit + 1))
    if len(found) > limit:
        more = Problem("", "", f"There are more problems; the first {limit - 1} are listed.")
        found = [*found[: limit - 1], more]
    return found or [Problem("", "", "The value does not match the schema.")]


def closest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, if one is close enough."""
    near = [each for each in islice(names, _MAX_CANDIDATES) if abs(len(each) - len(name)) <= 3 and len(each) <= 128]
    folded = {_fold(each): each for each in near}
    found = difflib.get_close_matches(_fold(name[:132]), folded, 1, 0.65)
    return folded[found[0]] if found else None


class _Walk:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.steps = 0

    def at(self, schema: Json, value: Json, path: str, depth: int) -> Iterator[Problem]:
        self.steps += 1
        if schema is True or self.steps > MAX_STEPS or depth > _MAX_WALK:
            return
        if schema is False:
            yield _problem(path, "false", f"{_shown(value)} is not allowed here")
        if type(schema) is not dict:
            return
        target = self.rules.targets.get(id(schema))
        if target is not None:
            yield from self.at(target, value, path, depth + 1)
            if self.rules.reference_stands_alone:
                return
        if "type" in schema and not self.rules.judge("type", schema["type"])(value):
            yield _problem(path, "type", _simple("type", schema["type"], value))
            return  # the other keywords speak of the type that was expected
        for keyword in schema:
            if keyword in _SIMPLE:
                if not self.rules.judge(keyword, schema[keyword])(value):
                    yield _problem(path, keyword, _simple(keyword, schema[keyword], value))
            elif keyword in _IN_PLACE:
                yield from _IN_PLACE[keyword](self, schema, value, path, depth + 1)
            elif type(value) is dict and keyword in _OF_OBJECTS:
                yield from _OF_OBJECTS[keyword](self, schema, value, path, depth + 1)
            elif type(value) is list and keyword in _OF_ARRAYS:
                yield from _OF_ARRAYS[keyword](self, schema, value, path, depth + 1)

    def accepts(self, schema: Json, value: Json, depth: int) -> bool:
        return next(self.at(schema, value, "", depth), None) is None

    def all_of(self, schema: Object, value: Json, path: str, depth: int) -> Iterator[Problem]:
        for branch in schema["allOf"]:
            yield from self.at(branch, value, path, depth)

    def any_of(self, schema: Object, value: Json, path: str, depth: int) -> Iterator[Problem]:
        return self.best_branch("anyOf", schema["anyOf"], value, path, depth)

    def one_of(self, schema: Object, value: Json, path: str, depth: int) -> Iterator[Problem]:
        return self.best_branch("oneOf", schema["oneOf"], value, path, depth)

    def best_branch(self, keyword: str, branches: list[Json], value: Json, path: str, depth: int) -> Iterator[Problem]:
        tried = [list(islice(self.at(each, value, path, depth), _MAX_BRANCH_PROBLEMS)) for each in branches]
        fitting = sum(not problems for problems in tried)
        if fitting > 1 and keyword == "oneOf":
            yield _problem(path, keyword, f"{_shown(value)} fits {fitting} of the allowed forms, not exactly one")
        if fitting:
            return
        right_type = [problems for problems in tried if problems[0].keyword != "type" or problems[0].path != path]
        if right_type:
            # A wrong const or enum is mostly a discriminator: that branch was not meant.
            yield from min(right_type, key=lambda them: (sum(p.keyword in ("const", "enum") for p in them), len(them)))
        else:
            types = [name for branch in branches for name in self.types(branch, 0)]
            yield _problem(path, "type", _simple("type", list(dict.fromkeys(types)), value))

    def types(self, schema: Json, depth: int) -> list[str]:
        if type(schema) is not dict or depth > _MAX_WALK:
            return []
        named = schema.get("type")
        if type(named) is str:
            return [named]
        return list(named) if named else self.types(self.rules.targets.get(id(schema)), depth + 1)

    def not_(self, schema: Object, value: Json, path: str, depth: int) -> Iterator[Problem]:
        if self.accepts(schema["not"], value, depth):
            yield _problem(path, "not", f"{_shown(value)} is excluded by {_shown(schema['not'], brief=False)}")

    def if_(self, schema: Object, value: Json, path: str, depth: int) -> Iterator[Problem]:
        branch = "then" if self.accepts(schema["if"], value, depth) else "else"
        yield from self.at(schema.get(branch, True), value, path, depth)

    def required(self, schema: Object, value: Object, path: str, depth: int) -> Iterator[Problem]:
        for name in schema["required"]:
            if name not in value:
                yield self.missing(name, path, "required", "")

    def missing(self, name: str, path: str, keyword: str, why: str) -> Problem:
        noun = self.rules.noun if not path else "member"
        place = f" in {_cut(path)}" if path else ""
        return Problem(path, keyword, _cut(f"Missing required {noun}: {_cut(name, _MAX_SHOWN)}{place}{why}", MAX_TEXT))

    def unknown(self, name: str, known: Iterable[str], path: str, keyword: str) -> Problem:
        noun = self.rules.noun if not path else "member"
        place = f" in {_cut(path)}" if path else ""
        meant = closest(name, known)
        hint = f"; did you mean {meant}?" if meant is not None else ""
        text = f"Unknown {noun}: {_cut(name, _MAX_SHOWN)}{place}{hint}"
        return Problem(pointer(path, name), keyword, _cut(text, MAX_TEXT))

    def properties(self, schema: Object, value: Object, path: str, depth: int) -> Iterator[Problem]:
        for name, inner in schema["properties"].items():
            if name in value:
                yield from self.at(inner, value[name], pointer(path, name), depth)

    def pattern_properties(self, schema: Object, value: Object, path: str, depth: int) -> Iterator[Problem]:
        for pattern, inner in schema["patternProperties"].items():
            matches = self.rules.judge("pattern", pattern)
            for name in filter(matches, value):
                yield from self.at(inner, value[name], pointer(path, name), depth)

    def additional(self, schema: Object, value: Object, path: str, depth: int) -> Iterator[Problem]:
        inner = schema["additionalProperties"]
        known = schema.get("properties", {})
        patterns = [self.rules.judge("pattern", each) for each in schema.get("patternProperties", ())]
        for name in value:
            if name in known or any(matches(name) for matches in patterns):
                continue
            if inner is False:
                yield self.unknown(name, known, path, "additionalProperties")
            else:
                yield from self.at(inner, value[name], pointer(path, name), depth)

    def unevaluated(self, schema: Object, value: Object, path: str, depth: int) -> Iterator[Problem]:
        if schema["unevaluatedProperties"] is not False:
            return
        known: dict[str, None] = {}
        if self.evaluated(schema, value, known, depth):
            for name in value:
                if name not in known:
                    yield self.unknown(name, known, path, "unevaluatedProperties")

    def evaluated(self, schema: Json, value: Object, known: dict[str, None], depth: int) -> bool:
        """Collect the names that some applicable part speaks of; False when all names are spoken of."""
        self.steps += 1
        if type(schema) is not dict or self.steps > MAX_STEPS or depth > _MAX_WALK:
            return True
        if "additionalProperties" in schema:
            return False
        known.update(dict.fromkeys(schema.get("properties", ())))
        for pattern in schema.get("patternProperties", ()):
            known.update(dict.fromkeys(filter(self.rules.judge("pattern", pattern), value)))
        branches = [self.rules.targets.get(id(schema)), *schema.get("allOf", ())]
        branches += [each for keyword in ("anyOf", "oneOf") for each in schema.get(keyword, ())]
        branches += [schema[keyword] for keyword in ("if", "then", "else") if keyword in schema]
        some_left = True
        for each in branches:
            some_left = self.evaluated(each, value, known, depth + 1) and some_left
        return some_left

    def names(self, schema: Object, value: Object, path: str, depth: int) -> Iterator[Problem]:
        for name in value:
            for problem in self.at(schema["propertyNames"], name, "", depth):
                yield _problem(path, "propertyNames", f"the name {problem.text}")

    def dependent(self, schema: Object, value: Object, path: str, depth: int) -> Iterator[Problem]:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needs in schema.get(keyword, {}).items():
                if name not in value:
                    continue
                if type(needs) is not list:
                    yield from self.at(needs, value, path, depth)
                    continue
                for other in needs:
                    if other not in value:
                        yield self.missing(other, path, keyword, f" (it goes with {_cut(name, _MAX_SHOWN)})")

    def items(self, schema: Object, value: list[Json], path: str, depth: int) -> Iterator[Problem]:
        inner = schema["items"]
        first: list[Json] = inner if type(inner) is list else schema.get("prefixItems", [])
        rest = schema.get("additionalItems", True) if type(inner) is list else inner
        if type(inner) is list:
            yield from self.each(first, value, path, depth)
        for i in range(len(first), len(value)):
            yield from self.at(rest, value[i], pointer(path, i), depth)
            if self.steps > MAX_STEPS:
                return

    def prefix_items(self, schema: Object, value: list[Json], path: str, depth: int) -> Iterator[Problem]:
        return self.each(schema["prefixItems"], value, path, depth)

    def each(self, schemas: list[Json], value: list[Json], path: str, depth: int) -> Iterator[Problem]:
        for i, (inner, item) in enumerate(zip(schemas, value, strict=False)):
            yield from self.at(inner, item, pointer(path, i), depth)

    def contains(self, schema: Object, value: list[Json], path: str, depth: int) -> Iterator[Problem]:
        least, most = schema.get("minContains", 1), schema.get("maxContains", len(value))
        fitting = sum(self.accepts(schema["contains"], item, depth) for item in value[:MAX_STEPS])
        if not least <= fitting <= most:
            wanted = f"at least {least}" if fitting < least else f"at most {most}"
            inner = _shown(schema["contains"], brief=False)
            yield _problem(path, "contains", f"{fitting} items match {inner}, {wanted} expected")


_IN_PLACE = {
    "allOf": _Walk.all_of,
    "anyOf": _Walk.any_of,
    "oneOf": _Walk.one_of,
    "not": _Walk.not_,
    "if": _Walk.if_,
}
_OF_OBJECTS = {
    "required": _Walk.required,
    "properties": _Walk.properties,
    "patternProperties": _Walk.pattern_properties,
    "additionalProperties": _Walk.additional,
    "unevaluatedProperties": _Walk.unevaluated,
    "propertyNames": _Walk.names,
    "dependentRequired": _Walk.dependent,
    "dependentSchemas": _Walk.dependent,
    "dependencies": _Walk.dependent,
}
_OF_ARRAYS = {
    "items": _Walk.items,
    "prefixItems": _Walk.prefix_items,
    "contains": _Walk.contains,
}


def _unrepeated(problems: Iterator[Problem]) -> Iterator[Problem]:
    seen: set[Problem] = set()
    for problem in problems:
        if problem not in seen:
            seen.add(problem)
            yield problem


def _problem(path: str, keyword: str, text: str) -> Problem:
    label = _cut(path[1:] if path.count("/") == 1 else path)
    return Problem(path, keyword, _cut(f"{label}: {text}" if path else text, MAX_TEXT))


def _simple(keyword: str, rule: Json, value: Json) -> str:
    if keyword in _COMPARED:
        return f"{_shown(value)} {_COMPARED[keyword]} {_shown(rule, brief=False)}"
    if keyword in _LENGTHS:
        unit, relation = _LENGTHS[keyword]
        return f"{_shown(value)} has {len(value)} {unit}, {relation} {rule}"
    if keyword == "type":
        expected = " or ".join([rule] if type(rule) is str else rule) or "something else"
        return f"expected {expected}, got {_kind(value)}{_shown(value)}"
    if keyword == "enum":
        listed = ", ".join(_shown(each, brief=False) for each in rule[:20]) + (", …" if len(rule) > 20 else "")
        meant = closest(value, filter(lambda each: type(each) is str, rule)) if type(value) is str else None
        hint = f"; did you mean {_shown(meant)}?" if meant is not None else ""
        return f"{_shown(value)} is not one of {_cut(listed, 240)}{hint}"
    if keyword == "format":
        example = f", such as {_EXAMPLES[rule]}" if rule in _EXAMPLES else ""
        return f"{_shown(value)} is not a valid {rule}{example}"
    return "the same item occurs twice"


def _shown(value: Json, *, brief: bool = True) -> str:
    """A value in at most 60 characters; `brief` leaves the inside of objects and arrays out."""
    if type(value) is dict and brief:
        return f"an object of {len(value)} members" if value else "{}"
    if type(value) is list and brief:
        return f"an array of {len(value)} items" if value else "[]"
    if type(value) is str:
        value = value[: _MAX_SHOWN + 1]
    elif type(value) is int and value.bit_length() > 8 * _MAX_SHOWN:
        return "a very long number"
    return _cut(json.encode(value).decode(), _MAX_SHOWN)


def _kind(value: Json) -> str:
    return {str: "string ", bool: "boolean ", int: "integer ", float: "number "}.get(type(value), "")


def _cut(text: str, length: int = 120) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _fold(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
