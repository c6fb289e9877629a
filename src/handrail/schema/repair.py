r"""Arguments of the wrong type: the one lossless reading of them that is valid, if there is exactly one.

A reading says the same in another JSON type. Nothing is guessed, wrapped, split, trimmed or filled in:

- A text that is JSON becomes what it says: `"5"`, `"5.5"`, `"true"`, `"null"`, `"[1, 2]"`, `"{\"a\": 1}"`. It is read
  as strictly as a message, and not at all where a digit would be lost; spaces may stand around objects and arrays
  only. What comes out is never a text again.
- An integer becomes its digits. A fraction or a boolean becomes text only where a similar text would not be valid,
  as in an `enum`: 1.10 and 1.1 are the same number, and `false` often means "none".
- Null, objects and arrays have no reading, and one value does not become an array of one.

Where to read anew is what the schema complains about, in every branch of `anyOf` and `oneOf`; whether it helps is
judged by the validator, on the whole. What nobody complains about stays as it came.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from decimal import Decimal

from msgspec import UNSET, Struct

from handrail import jsonrpc
from handrail.model import Json, Object, Problem
from handrail.schema.compile import Checker
from handrail.schema.explain import Walk
from handrail.schema.jsonable import keys_of

MAX_REPAIRS = 64
MAX_TRIED = 128
MAX_STEPS = 2_000
MAX_VALUES = 20_000  # in everything that is tried, together
MAX_TEXT = 1024 * 1024

_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_HOPELESS = frozenset({"not", "oneOf", "contains"})  # whether a reading would answer it, nobody knows
_IN_VAIN = frozenset({"additionalProperties", "false"})  # no reading answers it
_TOO_LONG = 10**jsonrpc.MAX_DIGITS

Paths = frozenset[str]


class Repair(Struct, frozen=True):
    """One value that was read anew: where (a JSON pointer), and its types. Never the value: it may be a secret."""

    path: str
    sent: str
    became: str


def repair(checker: Checker, arguments: Object) -> tuple[Object, tuple[Repair, ...]] | None:
    """Valid arguments and what was read anew for that; None where there is no such reading, or more than one.

    Valid arguments come back as they are. The work is bounded: what takes more has no reading.
    """
    if checker.valid(arguments):
        return arguments, ()
    search = _Search(checker, arguments)
    try:
        paths = search.paths()
    except (_Hopeless, RecursionError):
        return None
    kinds = {path: [_KINDS.get(type(each), "null") for each in search.readings[path]] for path in sorted(paths)}
    return search.read(paths), tuple(Repair(path, *them) for path, them in kinds.items())


class _Hopeless(Exception):
    """There is no reading, or more than one, or it takes too much work to find out."""


class _Choice(Problem, frozen=True):
    """What is wrong in each branch of an `anyOf` or `oneOf`."""

    branches: list[list[Problem]]


class _Search(Walk):
    """The walk that explains, with every branch that might have been meant instead of the likeliest."""

    def __init__(self, checker: Checker, arguments: Object) -> None:
        super().__init__(checker)
        self.valid = checker.valid
        self.arguments = arguments
        self.readings: dict[str, tuple[Json, Json]] = {}  # by path: the value there, and what it is read as
        self.tried = self.values = self.characters = 0

    def at(self, schema: Json, value: Json, path: str) -> Iterator[Problem]:
        self.steps += len(path) // 64  # a long name is copied into every path below it
        if self.steps >= MAX_STEPS:
            raise _Hopeless
        return super().at(schema, value, path)

    def best_branch(self, keyword: str, branches: list[Json], value: Json, path: str) -> Iterator[Problem]:
        tried = [list(self.at(each, value, path)) for each in branches]
        fitting = tried.count([])
        if not fitting:
            yield _Choice(path, keyword, "", tried)
        elif fitting > 1 and keyword == "oneOf":
            yield Problem(path, keyword, "")

    def paths(self) -> Paths:
        """The places to read anew."""
        found: list[Paths] = []
        known: dict[Paths, Object] = {frozenset(): self.arguments}
        pending = [frozenset[str]()]
        for made in pending:  # what was read may hold more to be read
            for more in self.ways(self.at(self.rules.schema, known[made], ""), known[made]):
                if (paths := made | more) not in known:
                    known[paths] = self.read(paths)
                    (found if self.helps(known[paths]) else pending).append(paths)
        if len(found) != 1 or len(found[0]) > MAX_REPAIRS or any(map(self.helps, self.rivals(found[0]))):
            raise _Hopeless
        return found[0]

    def ways(self, problems: Iterable[Problem], value: Json) -> set[Paths]:
        """The sets of places that answer all the problems, if read anew."""
        ways = {frozenset[str]()}
        for problem in problems:
            if isinstance(problem, _Choice):
                answers = {way for branch in problem.branches for way in self.ways(branch, value)}
            else:
                answers = {frozenset({problem.path})} if self.has_reading(problem, value) else set()
            self.steps += len(ways) * len(answers)
            if self.steps > MAX_STEPS or max(map(len, ways)) > MAX_REPAIRS:
                raise _Hopeless
            ways = {way | answer for way in ways for answer in answers}
            if not ways:
                break
        return ways

    def has_reading(self, problem: Problem, value: Json) -> bool:
        path, keyword = problem.path, problem.keyword
        if path not in self.readings:
            for key in keys_of(path):
                value = value[int(key) if type(value) is list else key]
            self.characters += len(value) if type(value) is str else 0
            if self.characters > MAX_TEXT:
                raise _Hopeless
            self.readings[path] = value, _reading(value)
        sent, new = self.readings[path]
        if keyword in _HOPELESS or (keyword in ("enum", "const") and type(sent) in (dict, list)):
            raise _Hopeless
        return new is not UNSET and keyword not in _IN_VAIN

    def read(self, paths: Paths) -> Object:
        """The arguments with these places read anew."""
        value = self.arguments
        for path in sorted(paths):
            value = _put(value, keys_of(path), self.readings[path][1])
        return value

    def helps(self, candidate: Json) -> bool:
        """Whether it is valid; only so much is tried."""
        self.tried += 1
        self.values += _size(candidate)
        if self.tried > MAX_TRIED or self.values > MAX_VALUES:
            raise _Hopeless
        return self.valid(candidate)

    def rivals(self, paths: Paths) -> Iterator[Json]:
        """What must not be valid as well: with one place as it was sent, and with a similar text."""
        whole = self.read(paths)
        for path in paths:
            sent, new = self.readings[path]
            yield _put(whole, keys_of(path), sent)
            if type(sent) in (bool, float):
                yield _put(whole, keys_of(path), new + new[-1])


def _reading(value: Json) -> Json:
    """The same in another type, or UNSET."""
    if type(value) is str:
        return _said(value)
    if type(value) not in (bool, int, float) or not -_TOO_LONG < value < _TOO_LONG:
        return UNSET
    return jsonrpc.encode(value).decode()


def _said(text: str) -> Json:
    """What a JSON text says."""
    if text.count("[") + text.count("{") > MAX_VALUES:
        return UNSET
    try:
        raw = text.encode()
        found = jsonrpc.decode(b"[%b]" % raw)
        value = found[0] if type(found) is list and len(found) == 1 else ""
        if type(value) is str or _size(value) > MAX_VALUES:
            return UNSET
        json.loads(text, parse_float=_exact)
    except (ValueError, ArithmeticError):
        return UNSET
    is_same = text.strip() == text if type(value) is float else jsonrpc.encode(value) == raw
    return value if type(value) in (dict, list) or is_same else UNSET


def _exact(text: str) -> None:
    value = float(text)
    # A whole number may become an `int` in the end, and that shows all its digits.
    if Decimal(text) != Decimal(value if value.is_integer() else repr(value)):
        raise ValueError


def _size(value: Json) -> int:
    """How many values there are; more than are allowed where they are nested too deeply."""
    depth, size = jsonrpc.extent([value])
    return size if depth <= jsonrpc.MAX_DEPTH else MAX_VALUES + 1


def _put(value: Json, keys: list[str], new: Json) -> Json:
    """A copy of `value`, as far as it differs, with `new` at these keys."""
    if not keys:
        return new
    key = int(keys[0]) if type(value) is list else keys[0]
    copy = value.copy()
    copy[key] = _put(value[key], keys[1:], new)
    return copy
