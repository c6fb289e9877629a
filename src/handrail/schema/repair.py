r"""Arguments of the wrong type: the one lossless reading of them that is valid, if there is exactly one.

A reading says the same in another JSON type. Nothing is guessed, wrapped, split, trimmed or filled in:

- A text that is JSON becomes what it says: `"5"`, `"5.5"`, `"true"`, `"null"`, `"[1, 2]"`, `"{\"a\": 1}"`. It is read
  as strictly as a message, and not at all where a digit would be lost; spaces may stand around objects and arrays
  only. What comes out is never a text again.
- An integer becomes its digits. A fraction or a boolean becomes text only where a similar text would not be valid,
  as in an `enum`: 1.10 and 1.1 are the same number, and `false` often means "none".
- Null, objects and arrays have no reading, and one value does not become an array of one.

Where to read anew is what the schema complains about, in every branch of `anyOf` and `oneOf`; whether it helps is
judged by the validator, on the whole. Values without a problem stay as they came.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from decimal import Decimal

from msgspec import UNSET, Struct

from handrail import jsonrpc
from handrail.model import Json, Object, Violation
from handrail.schema.compile import Checker
from handrail.schema.explain import SchemaWalk
from handrail.schema.jsonable import keys_of

MAX_REPAIRS = 64
MAX_TRIED = 128
MAX_STEPS = 2_000
MAX_VALUES = 20_000  # in everything that is tried, together
MAX_TEXT = 1024 * 1024

_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_UNDECIDABLE_KEYWORDS = frozenset({"not", "oneOf", "contains"})  # whether a reading would answer it is unknown
_UNREPAIRABLE_KEYWORDS = frozenset({"additionalProperties", "false"})  # no reading answers it
_INTEGER_BOUND = 10**jsonrpc.MAX_DIGITS

Paths = frozenset[str]


class RepairedArgument(Struct, frozen=True):
    """One value that was read anew: where (a JSON pointer), and its types. Never the value: it may be a secret."""

    path: str
    sent: str
    became: str


def repair(checker: Checker, arguments: Object) -> tuple[Object, tuple[RepairedArgument, ...]] | None:
    """Valid arguments and what was read anew for that; None where there is no such reading, or more than one.

    Valid arguments come back as they are. The work is bounded: what takes more has no reading.
    """
    if checker.valid(arguments):
        return arguments, ()
    search = _Search(checker, arguments)
    try:
        paths = search.paths()
    except (_NoReading, RecursionError):
        return None
    kinds = {path: [_KINDS.get(type(each), "null") for each in search.readings[path]] for path in sorted(paths)}
    return search.apply(paths), tuple(RepairedArgument(path, *them) for path, them in kinds.items())


class _NoReading(Exception):
    """There is no reading, or more than one, or it takes too much work to find out."""


class _Choice(Violation, frozen=True):
    """What is wrong in each branch of an `anyOf` or `oneOf`."""

    branches: list[list[Violation]]


def _count_step(walk: SchemaWalk, path: str) -> None:
    walk.steps += len(path) // 64  # a long name is copied into every path below it
    if walk.steps >= MAX_STEPS:
        raise _NoReading


def _every_branch(walk: SchemaWalk, keyword: str, branches: list[Json], value: Json, path: str) -> Iterator[Violation]:
    """Yield the problems of all branches as one choice: each branch might have been meant."""
    branch_problems = [list(walk.check(each, value, path)) for each in branches]
    fitting = branch_problems.count([])
    if not fitting:
        yield _Choice(path, keyword, "", branch_problems)
    elif fitting > 1 and keyword == "oneOf":
        yield Violation(path, keyword, "")


class _Search:
    """The search for the one set of places whose readings make the arguments valid."""

    def __init__(self, checker: Checker, arguments: Object) -> None:
        self.walk = SchemaWalk(checker, _count_step, _every_branch)
        self.schema = checker.schema
        self.valid = checker.valid
        self.arguments = arguments
        self.readings: dict[str, tuple[Json, Json]] = {}  # by path: the value there, and what it is read as
        self.tried = self.values = self.characters = 0

    def paths(self) -> Paths:
        """The places to read anew."""
        solutions: list[Paths] = []
        candidates: dict[Paths, Object] = {frozenset(): self.arguments}
        pending = [frozenset[str]()]
        for base in pending:  # what was read may hold more to be read
            for more in self.repair_sets(self.walk.check(self.schema, candidates[base], ""), candidates[base]):
                if (paths := base | more) not in candidates:
                    candidates[paths] = self.apply(paths)
                    (solutions if self.is_solution(candidates[paths]) else pending).append(paths)
        if (
            len(solutions) != 1
            or len(solutions[0]) > MAX_REPAIRS
            or any(map(self.is_solution, self.alternatives(solutions[0])))
        ):
            raise _NoReading
        return solutions[0]

    def repair_sets(self, problems: Iterable[Violation], value: Json) -> set[Paths]:
        """The sets of places that answer all the problems, if read anew."""
        combinations = {frozenset[str]()}
        for problem in problems:
            if isinstance(problem, _Choice):
                answers = {
                    combination for branch in problem.branches for combination in self.repair_sets(branch, value)
                }
            else:
                answers = {frozenset({problem.path})} if self.has_reading(problem, value) else set()
            self.walk.steps += len(combinations) * len(answers)
            if self.walk.steps > MAX_STEPS or max(map(len, combinations)) > MAX_REPAIRS:
                raise _NoReading
            combinations = {combination | answer for combination in combinations for answer in answers}
            if not combinations:
                break
        return combinations

    def has_reading(self, problem: Violation, value: Json) -> bool:
        path, keyword = problem.path, problem.keyword
        if path not in self.readings:
            for key in keys_of(path):
                value = value[int(key) if type(value) is list else key]
            self.characters += len(value) if type(value) is str else 0
            if self.characters > MAX_TEXT:
                raise _NoReading
            self.readings[path] = value, _reading(value)
        sent, new = self.readings[path]
        if keyword in _UNDECIDABLE_KEYWORDS or (keyword in ("enum", "const") and type(sent) in (dict, list)):
            raise _NoReading
        return new is not UNSET and keyword not in _UNREPAIRABLE_KEYWORDS

    def apply(self, paths: Paths) -> Object:
        """The arguments with these places read anew."""
        value = self.arguments
        for path in sorted(paths):
            value = _put(value, keys_of(path), self.readings[path][1])
        return value

    def is_solution(self, candidate: Json) -> bool:
        """Whether it is valid; only so much is tried."""
        self.tried += 1
        self.values += _size(candidate)
        if self.tried > MAX_TRIED or self.values > MAX_VALUES:
            raise _NoReading
        return self.valid(candidate)

    def alternatives(self, paths: Paths) -> Iterator[Json]:
        """What must not be valid as well: with one place as it was sent, and with a similar text."""
        whole = self.apply(paths)
        for path in paths:
            sent, new = self.readings[path]
            yield _put(whole, keys_of(path), sent)
            if type(sent) in (bool, float):
                yield _put(whole, keys_of(path), new + new[-1])


def _reading(value: Json) -> Json:
    """The same in another type, or UNSET."""
    if type(value) is str:
        return _parse_json_text(value)
    if type(value) not in (bool, int, float) or not -_INTEGER_BOUND < value < _INTEGER_BOUND:
        return UNSET
    return jsonrpc.encode(value).decode()


def _parse_json_text(text: str) -> Json:
    """What a JSON text says."""
    if text.count("[") + text.count("{") > MAX_VALUES:
        return UNSET
    try:
        raw = text.encode()
        items = jsonrpc.decode(b"[%b]" % raw)
        value = items[0] if type(items) is list and len(items) == 1 else ""
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
