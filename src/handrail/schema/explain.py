"""What is wrong with a value, in sentences: a lazy walk over schema and value together.

The compiled validator can list its errors too, but it collects all of them first and copies the offending value into
each: two million wrong items took 13 s and 3 GB, a recursive `oneOf` doubled with every level. This walk stops
at a number of problems and at a number of steps. Single keywords are still judged by the compiled validator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from jsonschema_rs import Validator
from msgspec import Struct, json

from handrail.model import Json, Object, Violation
from handrail.schema.jsonable import pointer
from handrail.suggest import closest

MAX_STEPS = 5_000
MAX_TEXT = 400
_MAX_VALUE_CHARS = 60
_MAX_BRANCH_PROBLEMS = 10

_SENTENCES = {
    "const": "{value} is not {rule}",
    "minimum": "{value} is less than the minimum {rule}",
    "maximum": "{value} is more than the maximum {rule}",
    "exclusiveMinimum": "{value} is not more than {rule}",
    "exclusiveMaximum": "{value} is not less than {rule}",
    "multipleOf": "{value} is not a multiple of {rule}",
    "pattern": "{value} does not match the pattern {rule}",
    "minLength": "{value} has {length} characters, fewer than the minimum {rule}",
    "maxLength": "{value} has {length} characters, more than the maximum {rule}",
    "minItems": "{length} items, fewer than the minimum {rule}",
    "maxItems": "{length} items, more than the maximum {rule}",
    "minProperties": "{length} members, fewer than the minimum {rule}",
    "maxProperties": "{length} members, more than the maximum {rule}",
    "uniqueItems": "the same item occurs twice",
    "enum": "{value} is not one of {rule}",
    "format": "{value} is not a valid {rule}",
}
_EXAMPLES = {
    "date-time": "2026-07-28T09:30:00Z",
    "date": "2026-07-28",
    "time": "09:30:00Z",
    "duration": "PT1H30M",
}
_KINDS = {str: "string ", bool: "boolean ", int: "integer ", float: "number "}

# A subschema's id() to the subschemas its references name.
Targets = dict[int, list[Json]]


class SchemaContext(Struct, frozen=True):
    """A schema ready to be explained; `build` compiles a keyword of it alone."""

    schema: Object
    targets: Targets
    build: Callable[[Object], Validator]
    noun: str
    reference_stands_alone: bool
    keyword_validators: dict[tuple[str, int], Callable[[Json], bool]] = {}


def explain(context: SchemaContext, value: Json, limit: int) -> list[Violation]:
    """Problems of a value the schema does not accept: at least one, at most `limit`."""
    problems: dict[Violation, None] = {}
    try:
        for problem in SchemaWalk(context).check(context.schema, value, ""):
            problems[problem] = None
            if len(problems) > limit:
                more = Violation("", "", f"There are more problems; the first {limit - 1} are listed.")
                return [*islice(problems, limit - 1), more]
    except RecursionError:  # too deep to be explained further
        pass
    return list(problems) or [Violation("", "", "The value does not match the schema.")]


class SchemaWalk:
    """One walk over a schema and a value.

    `on_step` is called with the walk and the path at each step, and may raise to end the walk. `on_choice` yields the
    problems of an `anyOf` or `oneOf`; the default is the problems of the likeliest branch.
    """

    def __init__(
        self,
        context: SchemaContext,
        on_step: Callable[[SchemaWalk, str], None] | None = None,
        on_choice: Callable[[SchemaWalk, str, list[Json], Json, str], Iterator[Violation]] | None = None,
    ) -> None:
        self.context = context
        self.steps = 0
        self._on_step = on_step
        self._on_choice = on_choice or _best_branch

    def check(self, schema: Json, value: Json, path: str) -> Iterator[Violation]:
        """Yield the problems of `value` at `path`, as they are met."""
        if self._on_step is not None:
            self._on_step(self, path)
        self.steps += 1
        if schema is False:
            yield _problem(path, "false", f"{_format_value(value)} is not allowed here")
        if type(schema) is not dict or self.steps > MAX_STEPS:
            return
        targets = self.context.targets.get(id(schema), ())
        for target in targets:
            yield from self.check(target, value, path)
        if targets and self.context.reference_stands_alone:
            return
        if "type" in schema and not self.validator_for("type", schema["type"])(value):
            yield _wrong_type(path, schema["type"], value)
            return  # the other keywords speak of the type that was expected
        for keyword, rule in schema.items():
            if keyword in _SENTENCES and not self.validator_for(keyword, rule)(value):
                yield _problem(path, keyword, _sentence(keyword, rule, value))
        if type(value) is dict:
            yield from self.members(schema, value, path)
        elif type(value) is list:
            yield from self.items(schema, value, path)
        for branch in self.branches(schema, value):
            yield from self.check(branch, value, path)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                yield from self._on_choice(self, keyword, schema[keyword], value, path)
        if "not" in schema and self.accepts(schema["not"], value):
            yield _problem(
                path, "not", f"{_format_value(value)} is excluded by {_format_value(schema['not'], brief=False)}"
            )

    def validator_for(self, keyword: str, rule: Json) -> Callable[[Json], bool]:
        validators = self.context.keyword_validators
        if (keyword, id(rule)) not in validators:
            validators[keyword, id(rule)] = self.context.build({keyword: rule}).is_valid
        return validators[keyword, id(rule)]

    def accepts(self, schema: Json, value: Json) -> bool:
        return not any(True for _ in self.check(schema, value, ""))

    def members(self, schema: Object, value: Object, path: str) -> Iterator[Violation]:
        properties, additional = schema.get("properties", {}), schema.get("additionalProperties")
        patterns = [
            (self.validator_for("pattern", each), inner) for each, inner in schema.get("patternProperties", {}).items()
        ]
        noun, place = (self.context.noun, "") if not path else ("member", f" in {_cut(path)}")
        unknown = []
        for name in islice(value, MAX_STEPS):
            subschemas = [properties[name]] if name in properties else []
            subschemas += [inner for matches, inner in patterns if matches(name)]
            if not subschemas and additional is False:
                unknown.append(name)
                continue
            for rule in subschemas or [additional]:
                yield from self.check(rule, value[name], pointer(path, name))
            for problem in self.check(schema["propertyNames"], name, "") if "propertyNames" in schema else ():
                yield _problem(path, "propertyNames", f"the name {problem.text}")
        for name in schema.get("required", ()):
            if name not in value:
                yield Violation(path, "required", f"Missing required {noun}: {_cut(name, _MAX_VALUE_CHARS)}{place}")
        for name in unknown:
            suggestion = closest(name, properties)
            text = f"Unknown {noun}: {_cut(name, _MAX_VALUE_CHARS)}{place}" + (
                f"; did you mean {suggestion}?" if suggestion else ""
            )
            yield Violation(pointer(path, name), "additionalProperties", text)

    def items(self, schema: Object, value: list[Json], path: str) -> Iterator[Violation]:
        first, rest = schema.get("prefixItems", ()), schema.get("items")
        if type(rest) is list:  # as draft-07 wrote it
            first, rest = rest, schema.get("additionalItems")
        for i, item in enumerate(value[: len(first) if rest is None else MAX_STEPS]):
            yield from self.check(first[i] if i < len(first) else rest, item, pointer(path, i))
        if "contains" in schema:
            fitting = sum(self.accepts(schema["contains"], item) for item in value[:MAX_STEPS])
            if not schema.get("minContains", 1) <= fitting <= schema.get("maxContains", len(value)):
                rule = _format_value(schema["contains"], brief=False)
                yield _problem(path, "contains", f"{fitting} items match {rule}: too few, or too many")

    def branches(self, schema: Object, value: Json) -> Iterator[Json]:
        """What must hold for the same value besides."""
        yield from schema.get("allOf", ())
        if "if" in schema:
            yield schema.get("then" if self.accepts(schema["if"], value) else "else")
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies") if type(value) is dict else ():
            for name, needs in schema.get(keyword, {}).items():
                if name in value:
                    yield {"required": needs} if type(needs) is list else needs


def _best_branch(walk: SchemaWalk, keyword: str, branches: list[Json], value: Json, path: str) -> Iterator[Violation]:
    branch_problems = [list(islice(walk.check(each, value, path), _MAX_BRANCH_PROBLEMS)) for each in branches]
    fitting = sum(not problems for problems in branch_problems)
    if fitting > 1 and keyword == "oneOf":
        yield _problem(path, keyword, f"{_format_value(value)} fits {fitting} of the allowed forms, not exactly one")
    if fitting:
        return
    right_type = [problems for problems in branch_problems if problems[0].keyword != "type" or problems[0].path != path]
    if right_type:
        # A wrong const or enum is mostly a discriminator: that branch was not meant.
        yield from min(right_type, key=lambda them: (sum(p.keyword in ("const", "enum") for p in them), len(them)))
    else:
        types = [problems[0].text.partition("expected ")[2].partition(", got ")[0] for problems in branch_problems]
        yield _wrong_type(path, list(dict.fromkeys(types)), value)


def _problem(path: str, keyword: str, text: str) -> Violation:
    label = _cut(path[1:] if path.count("/") == 1 else path)
    return Violation(path, keyword, _cut(f"{label}: {text}" if path else text, MAX_TEXT))


def _wrong_type(path: str, rule: Json, value: Json) -> Violation:
    expected = rule if type(rule) is str else " or ".join(rule)
    return _problem(path, "type", f"expected {expected}, got {_KINDS.get(type(value), '')}{_format_value(value)}")


def _sentence(keyword: str, rule: Json, value: Json) -> str:
    rule_text, hint = _format_value(rule, brief=False), ""
    if keyword == "enum":
        listed = [_format_value(each, brief=False) for each in rule[:20]] + ["…"] * (len(rule) > 20)
        rule_text = _cut(", ".join(listed), 240)
        suggestion = closest(value, (each for each in rule if type(each) is str)) if type(value) is str else None
        hint = f"; did you mean {_format_value(suggestion)}?" if suggestion else ""
    elif keyword == "format":
        rule_text = rule
        hint = f", such as {_EXAMPLES[rule]}" if rule in _EXAMPLES else ""
    length = len(value) if type(value) in (str, list, dict) else 0
    return _SENTENCES[keyword].format(value=_format_value(value), rule=rule_text, length=length) + hint


def _format_value(value: Json, *, brief: bool = True) -> str:
    """A value in at most 60 characters; `brief` leaves the inside of objects and arrays out."""
    if brief and value and type(value) in (dict, list):
        return f"an object of {len(value)} members" if type(value) is dict else f"an array of {len(value)} items"
    if type(value) is str:
        value = value[: _MAX_VALUE_CHARS + 1]
    elif type(value) is int and value.bit_length() > 8 * _MAX_VALUE_CHARS:
        return "a very long number"
    return _cut(json.encode(value).decode(), _MAX_VALUE_CHARS)


def _cut(text: str, length: int = 120) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
