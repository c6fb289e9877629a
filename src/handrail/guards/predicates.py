"""What a rule asks of the arguments of a call.

Every test answers yes, no, or that it cannot tell. It cannot tell when a value is there but of another kind than the
test is about: a text where numbers are compared, a list where the path goes on by name, null where none is named.
Doubt never favours the caller: a rule that allows needs a yes; for one that denies or asks it is enough that the
answer is not no. So `"500"` is not allowed as at most 1000, and is denied as perhaps over 100.

What is missing is not over, not under, not in any list and matches no pattern: the answer is no. What a negated test
(`is_not`, `not_in`, `not_matches`) says of it cannot be told, so "deny unless the path is below /tmp" cannot be
dodged by leaving out the path; `present = true` beside it makes it no. A tool may have defaults of its own: where they
matter, allow what is right and deny the rest.

`*` in a path stands for every element. A rule that allows needs a yes from each, and at least one; for one that
denies or asks, a single element is enough.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from math import isfinite
from types import NoneType
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType, ValidationError, convert
from msgspec.structs import asdict, fields

from handrail.jsonrpc import encode
from handrail.model import Json, Object
from handrail.schema.compile import compile_schema
from handrail.schema.jsonable import to_jsonable
from handrail.suggest import closest

__all__ = ["Predicate", "TriState", "all_of", "check_choice", "compile_condition", "first_step"]

TriState = bool | None
"""Yes, no, or None: unknown."""
Test = Callable[[Json], TriState]

_Number = int | float | UnsetType
_Size = Annotated[int, Meta(ge=0)] | UnsetType
_Values = Annotated[list[Any], Meta(min_length=1)] | UnsetType


class Predicate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"is_": "is", "in_": "in"}):
    """What is asked of one argument. All that is given must hold."""

    present: Annotated[bool | UnsetType, Meta(description="Whether it is there at all.")] = UNSET
    is_: Annotated[Any, Meta(description="Equal to this, numbers exactly; true is no number.")] = UNSET
    is_not: Annotated[Any, Meta(description="Not equal to this.")] = UNSET
    in_: Annotated[_Values, Meta(description="Equal to one of these.")] = UNSET
    not_in: Annotated[_Values, Meta(description="Equal to none of these.")] = UNSET
    over: Annotated[_Number, Meta(description="A number greater than this.")] = UNSET
    at_least: Annotated[_Number, Meta(description="A number not less than this.")] = UNSET
    under: Annotated[_Number, Meta(description="A number less than this.")] = UNSET
    at_most: Annotated[_Number, Meta(description="A number not greater than this.")] = UNSET
    matches: Annotated[str | UnsetType, Meta(description="A text in which this regular expression is found.")] = UNSET
    not_matches: Annotated[str | UnsetType, Meta(description="A text in which it is not found.")] = UNSET
    longer_than: Annotated[_Size, Meta(description="Text of more characters, or list of more elements.")] = UNSET
    shorter_than: Annotated[_Size, Meta(description="Text of fewer characters, or list of fewer elements.")] = UNSET


_NAMES = tuple(each.encode_name for each in fields(Predicate))
_KINDS = {str: "text", bool: "boolean", int: "number", float: "number", NoneType: "null", list: "list", dict: "object"}
_STEP = re.compile(r"\*|(?:[^\\.*]|\\[\\.*])+")
_WILDCARD = object()  # the step `*`
_MISSING = object()
_UNREACHABLE = object()  # the path goes on, but not in what is there


def check_choice(where: str, word: str, words: Iterable[str]) -> None:
    """ValueError unless `word` is one of `words`; it names the one that was probably meant."""
    words = list(words)
    if word not in words:
        near = closest(str(word), words)
        hint = f"did you mean {near!r}?" if near else f"known are {', '.join(words)}"
        raise ValueError(f"{where}: unknown: {word!r}; {hint}")


def compile_condition(
    path: str, conditions: Object, where: str, *, every: bool
) -> tuple[str, Callable[[Object], TriState]]:
    """The condition in words, and as a function of the arguments of a call; ValueError begins with `where`.

    `every`: each element a `*` stands for must fulfil it, rather than one.
    """
    where = f"{where}: arguments.{path}"
    steps, test = _parse_path(path, where), _compile_test(conditions, where)
    phrases = [
        f"{path} {name.replace('_', ' ')} {encode(to_jsonable(value)).decode()}" for name, value in conditions.items()
    ]
    words = ", ".join(phrases)
    if _WILDCARD in steps:
        return words, lambda arguments: _combine([test(value) for value in _values_at(arguments, steps)], every)
    if len(steps) == 1:
        return words, lambda arguments, name=steps[0]: test(arguments.get(name, _MISSING))

    def read(arguments: Object) -> TriState:
        value: Json = arguments
        for step in steps:
            value = value.get(step, _MISSING) if type(value) is dict else _member(value, step)
        return test(value)

    return words, read


def first_step(path: str) -> str | None:
    """The name of the argument a path begins with; None: any."""
    step = _parse_path(path, "")[0]
    return None if step is _WILDCARD else str(step)


def all_of(tests: list[Callable[[Any], TriState]]) -> Callable[[Any], TriState]:
    """All tests as one: no if one says no, else doubtful if one is."""
    if len(tests) == 1:
        return tests[0]

    def test(value: Any) -> TriState:
        answer: TriState = True
        for each in tests:
            result = each(value)
            if result is False:
                return False
            answer = answer and result
        return answer

    return test


def _combine(answers: list[TriState], every: bool) -> TriState:
    decisive = not every  # one yes decides for any of them, one no for all
    if decisive in answers or not answers:
        return bool(answers) and decisive
    return None if None in answers else every


def _parse_path(path: str, where: str) -> list[Any]:
    if path.startswith("/"):
        parts = path[1:].split("/")
        return [_WILDCARD if part == "*" else part.replace("~1", "/").replace("~0", "~") for part in parts]
    parts = _STEP.findall(path)
    if ".".join(parts) != path or not path:
        raise ValueError(f"{where}: not a path such as order.id or items.*.price; \\. is a dot, \\* a star in a name")
    return [_WILDCARD if part == "*" else re.sub(r"\\(.)", r"\1", part) for part in parts]


def _values_at(value: Json, steps: list[Any]) -> list[Json]:
    values = [value]
    for step in steps:
        if step is _WILDCARD:
            values = [inner for each in values for inner in _elements(each)]
        else:
            values = [_member(each, step) for each in values]
    return values


def _elements(value: Json) -> Iterable[Json]:
    if type(value) is dict:
        return value.values()
    return value if type(value) is list else (_MISSING if value is _MISSING else _UNREACHABLE,)


def _member(value: Json, step: str) -> Json:
    if type(value) is dict:
        return value.get(step, _MISSING)
    if type(value) is list and step.isdecimal():
        return value[int(step)] if int(step) < len(value) else _MISSING
    return _MISSING if value is _MISSING else _UNREACHABLE


def _compile_test(conditions: Object, where: str) -> Test:
    for name in conditions:
        check_choice(where, name, _NAMES)
    if not conditions:
        raise ValueError(f"{where}: nothing is asked of it; known are {', '.join(_NAMES)}")
    try:
        predicate = convert(conditions, Predicate)
    except ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        raise ValueError(f"{where}{place.rstrip('`')}: {text}") from None
    operands = {name: value for name, value in asdict(predicate).items() if value is not UNSET}
    if predicate.present is False and len(operands) > 1:
        raise ValueError(f"{where}: present = false leaves nothing else to ask")
    return all_of([_TESTS[name](value, f"{where}.{name.rstrip('_')}") for name, value in operands.items()])


def _equal(values: list[Json], where: str) -> Test:
    try:
        values = [to_jsonable(each) for each in values]
    except ValueError as problem:
        raise ValueError(f"{where}: {problem}") from None
    kinds = {_KINDS[type(each)] for each in values}
    simple = {(_KINDS[type(each)], each) for each in values if type(each) not in (list, dict)}

    def test(value: Json) -> TriState:
        kind = _KINDS.get(type(value))
        if kind not in kinds:
            return False if value is _MISSING else None
        if kind == "list" or kind == "object":
            return any(_is_equal(each, value) for each in values)
        return (kind, value) in simple

    return test


def _is_equal(one: Json, two: Json) -> bool:
    kind = _KINDS[type(one)]
    if kind != _KINDS.get(type(two)):
        return False
    if kind == "list":
        return len(one) == len(two) and all(map(_is_equal, one, two))
    if kind == "object":
        return one.keys() == two.keys() and all(_is_equal(value, two[key]) for key, value in one.items())
    return bool(one == two)


def _number(compare: Callable[[Any, Any], bool], limit: int | float, where: str) -> Test:
    if type(limit) is float and not isfinite(limit):
        raise ValueError(f"{where}: {limit} is not a number to compare with")

    def test(value: Json) -> TriState:
        kind = type(value)
        if kind is int or (kind is float and value == value):
            return compare(value, limit)
        return False if value is _MISSING else None

    return test


def _size(compare: Callable[[int, int], bool], limit: int) -> Test:
    def test(value: Json) -> TriState:
        if type(value) is str or type(value) is list:
            return compare(len(value), limit)
        return False if value is _MISSING else None

    return test


def _pattern(pattern: str, where: str) -> Test:
    """In linear time, with the engine that checks schemas."""
    is_match = compile_schema({"pattern": pattern}, where, any_root=True).valid

    def test(value: Json) -> TriState:
        if type(value) is not str:
            return False if value is _MISSING else None
        try:
            return is_match(value)
        except UnicodeEncodeError:  # half a character, which the engine does not take
            return None

    return test


def _not(test: Test) -> Test:
    def negated(value: Json) -> TriState:
        answer = None if value is _MISSING else test(value)
        return answer if answer is None else not answer

    return negated


_TESTS: dict[str, Callable[[Any, str], Test]] = {
    "present": lambda present, _: lambda value: None if value is _UNREACHABLE else (value is not _MISSING) is present,
    "is_": lambda value, where: _equal([value], where),
    "is_not": lambda value, where: _not(_equal([value], where)),
    "in_": _equal,
    "not_in": lambda values, where: _not(_equal(values, where)),
    "over": lambda limit, where: _number(operator.gt, limit, where),
    "at_least": lambda limit, where: _number(operator.ge, limit, where),
    "under": lambda limit, where: _number(operator.lt, limit, where),
    "at_most": lambda limit, where: _number(operator.le, limit, where),
    "matches": _pattern,
    "not_matches": lambda pattern, where: _not(_pattern(pattern, where)),
    "longer_than": lambda limit, _: _size(operator.gt, limit),
    "shorter_than": lambda limit, _: _size(operator.lt, limit),
}
