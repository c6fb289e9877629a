"""Arguments of the wrong type: what is read anew, what is left to the caller, and what is never touched."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import count, islice, product
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from handrail.errors import SchemaError
from handrail.model import Json, Object
from handrail.schema.compile import Checker, compile_schema
from handrail.schema.derive import derive
from handrail.schema.repair import MAX_REPAIRS, MAX_TRIED, RepairedArgument, repair
from repair_corpus import BIG, INTEGER, INTEGERS, NESTED, NUMBER, OBJECT, READ, REFUSED, STRING, VALID, either, record
from requirements import requirement

WHERE = "tool 'x': input_schema"
KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}


def checker_of(schema: Json) -> Checker:
    """For one argument, `it`."""
    return compile_schema({"type": "object", "properties": {"it": schema}, "additionalProperties": False}, WHERE)


def kind(value: Json) -> str:
    return KINDS.get(type(value), "null")


def exact(value: Json) -> str:
    """A value with its types, which `==` does not see: 1 is 1.0 is True."""
    return repr(value)


def repaired(checker: Checker, arguments: Object) -> tuple[Object, tuple[RepairedArgument, ...]] | None:
    """What `repair` gives, after a look at what must always hold."""
    before = copy.deepcopy(arguments)
    result = repair(checker, arguments)
    assert exact(arguments) == exact(before)
    assert exact(repair(checker, arguments)) == exact(result)
    if result is not None:
        assert checker.valid(result[0])
        assert repair(checker, result[0]) == (result[0], ())
    return result


# --- the corpus


def test_the_corpus_is_large_enough() -> None:
    assert len(READ) + len(NESTED) >= 100
    assert len(READ) + len(NESTED) + len(REFUSED) >= 250
    assert sum(len(values) for _, values in VALID) >= 300


@requirement("SRV-601")
@pytest.mark.parametrize(("schema", "sent", "read"), READ)
def test_the_one_lossless_reading_is_taken(schema: Json, sent: Json, read: Json) -> None:
    checker = checker_of(schema)
    assert not checker.valid({"it": sent})
    result = repaired(checker, {"it": sent})
    assert exact(result) == exact(({"it": read}, (RepairedArgument("/it", kind(sent), kind(read)),)))


@requirement("SRV-601")
@pytest.mark.parametrize(("schema", "sent", "read", "became"), NESTED)
def test_every_place_that_was_read_is_named(schema: Object, sent: Object, read: Object, became: dict[str, str]) -> None:
    checker = compile_schema(schema, WHERE)
    assert not checker.valid(sent)
    result = repaired(checker, sent)
    assert result is not None
    assert exact(result[0]) == exact(read)
    assert {each.path: each.became for each in result[1]} == became


@requirement("SRV-601", "P-06")
@pytest.mark.parametrize(("schema", "sent", "told"), REFUSED)
def test_without_exactly_one_reading_the_caller_is_told(schema: Json, sent: Json, told: str) -> None:
    checker = checker_of(schema)
    assert repaired(checker, {"it": sent}) is None
    assert "; ".join(problem.text for problem in checker.problems({"it": sent})) == told


@requirement("SRV-601", "P-06")
@pytest.mark.parametrize(("schema", "values"), VALID)
def test_valid_values_stay_as_they_are(schema: Json, values: tuple[Json, ...]) -> None:
    checker = checker_of(schema)
    # The second argument is wrong, and must not draw the first one along.
    beside = compile_schema(record(it=schema, n=INTEGER), WHERE)
    for value in values:
        arguments = {"it": value}
        assert checker.valid(arguments)
        result = repaired(checker, arguments)
        assert result is not None
        assert result[0] is arguments
        assert result[1] == ()
        both = repaired(beside, {"it": value, "n": "5"})
        assert exact(both) == exact(({"it": value, "n": 5}, (RepairedArgument("/n", "string", "integer"),)))


# --- what else is promised


@requirement("SRV-601")
def test_a_reading_can_be_bound() -> None:
    def tool(n: int, ratio: float, ids: list[int], at: dict[str, int] | None = None) -> list[Any]:
        return [n, ratio, ids, at]

    signature = derive(tool, call_type=Checker)
    sent = {"n": "1.0", "ratio": "2", "ids": '["3", 1e3]', "at": '{"x": "4"}'}
    result = repaired(compile_schema(signature.input_schema, WHERE), sent)
    assert result is not None
    assert exact(signature.invoke(result[0], None)) == exact([1, 2.0, [3, 1000], {"x": 4}])


@requirement("SRV-601")
def test_a_repair_does_not_hold_the_value() -> None:
    checker = checker_of(record(token=INTEGER, more=OBJECT))
    result = repaired(checker, {"it": {"token": "4711", "more": '{"password": "hunter2"}'}})
    assert result is not None
    assert "4711" not in repr(result[1])
    assert "password" not in repr(result[1])
    assert [(each.path, each.sent, each.became) for each in result[1]] == [
        ("/it/more", "string", "object"),
        ("/it/token", "string", "integer"),
    ]


def test_the_same_text_at_two_places_is_not_one_object_afterwards() -> None:
    result = repaired(checker_of({"type": "array", "items": INTEGERS}), {"it": ["[1]", "[1]"]})
    assert result is not None
    assert result[0]["it"][0] is not result[0]["it"][1]


def test_numbers_of_many_digits_and_odd_values_raise_nothing() -> None:
    checker = checker_of(STRING)
    assert repaired(checker, {"it": 10**999}) == ({"it": str(10**999)}, (RepairedArgument("/it", "integer", "string"),))
    for odd in (10**1000, -(10**5000), float("inf"), float("nan")):
        assert repair(checker, {"it": odd}) is None


@requirement("SRV-611")
def test_only_so_many_places_are_read() -> None:
    checker = checker_of(INTEGERS)
    result = repair(checker, {"it": ["5"] * MAX_REPAIRS})
    assert result is not None
    assert len(result[1]) == MAX_REPAIRS
    assert repair(checker, {"it": ["5"] * (MAX_REPAIRS + 1)}) is None
    # Nor is the other branch taken because the longer one is not looked at.
    ambiguous = either(INTEGERS, {"type": "array", "prefixItems": [INTEGER]})
    assert repair(checker_of(ambiguous), {"it": ["5"] * (MAX_REPAIRS + 1)}) is None


@requirement("SRV-611")
def test_only_so_much_is_looked_at() -> None:
    checker = compile_schema(record(n=INTEGER, a=INTEGERS), WHERE)
    assert repair(checker, {"n": "5", "a": [1] * 1_500}) is not None
    assert repair(checker, {"n": "5", "a": [1] * 2_500}) is None


@requirement("SRV-611")
def test_only_so_much_is_tried() -> None:
    pairs = [either({"properties": {n: INTEGER}}, {"properties": {n + "x": INTEGER}}) for n in NAMES[:9]]
    checker, tried = compile_schema({"type": "object", "allOf": pairs}, WHERE), count()
    counted = replace(checker, valid=lambda value: next(tried) >= 0 and checker.valid(value))
    assert repair(counted, {key: "5" for n in NAMES[:9] for key in (n, n + "x")}) is None
    assert next(tried) == 1 + MAX_TRIED


@requirement("SRV-611")
def test_readings_do_not_nest_deeper_than_messages() -> None:
    checker = checker_of({"type": "array", "items": {"$ref": "#/properties/it"}})

    def arrays(depth: int, inside: Json) -> Json:
        return arrays(depth - 1, [inside]) if depth else inside

    assert repair(checker, {"it": arrays(60, json.dumps(arrays(60, [])))}) is not None
    assert repair(checker, {"it": arrays(100, json.dumps(arrays(100, [])))}) is None


def nested(text: str, times: int) -> str:
    for _ in range(times):
        text = json.dumps({"c": text})
    return text


NODE = {"type": "object", "properties": {"c": {"$ref": "#/properties/it"}}}
NAMES = [f"p{i}" for i in range(16)]
HOSTILE: dict[str, tuple[Json, Json]] = {
    "two million wrong items": (INTEGERS, ["5"] * 2_000_000),
    "two million items beside": (record(a={}, b=INTEGER), {"a": [5] * 2_000_000, "b": "5"}),
    "a text of many arrays": (INTEGERS, "[" + "[]," * 349_000 + "[]]"),
    "a text of many integers": (INTEGERS, "[" + "1," * 520_000 + "1]"),
    "a text of long fractions": (INTEGERS, "[" + "0.12345678901234567," * 50_000 + "1]"),
    "a text of braces": (OBJECT, "{" * 1_000_000),
    "many long texts": (INTEGERS, ["[" + "x" * 100_000] * 60),
    "a text that is too long": (OBJECT, '{"a": "' + "x" * 2_000_000 + '"}'),
    "an exponent": (NUMBER, "1e-99999999999999999999"),
    "a long name": (
        either({"additionalProperties": {"additionalProperties": INTEGER}}, INTEGER),
        {"x" * 1_000_000: {str(i): "x" for i in range(1_000)}},
    ),
    "recursive oneOf": (
        {"oneOf": [NODE, NODE | {"required": ["c"]}, INTEGER]},
        json.loads('{"c":' * 40 + '"5"' + "}" * 40),
    ),
    "texts in texts": ({"anyOf": [NODE, NODE | {"required": ["c"]}, INTEGER]}, nested("x", 14)),
    "a thousand branches": ({"anyOf": [INTEGER | {"minimum": 10 + i} for i in range(1_000)]}, "5"),
    "many ways": (
        either({"allOf": [either({"properties": {n: INTEGER}}, {"properties": {n + "x": INTEGER}}) for n in NAMES]}),
        {key: "5" for n in NAMES for key in (n, n + "x")},
    ),
}


@requirement("SRV-611")
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_value_costs_little(case: str) -> None:
    schema, value = HOSTILE[case]
    checker = checker_of(schema)
    repair(checker, {"it": value})  # what the schema costs once
    start = process_time()
    assert repair(checker, {"it": value}) is None
    assert process_time() - start < 0.2


# --- generated schemas and values

scalars = st.none() | st.booleans() | st.integers(-3, 12) | st.sampled_from([0.5, 1.0, 7.25, BIG, "", "a", "b"])
values = st.recursive(
    scalars | scalars.map(json.dumps),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.lists(inner, max_size=2).map(json.dumps),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(json.dumps),
    ),
    max_leaves=6,
)
types = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
leaves = st.one_of(
    st.fixed_dictionaries({"type": types}),
    st.fixed_dictionaries({"type": st.lists(types, min_size=1, max_size=2, unique=True)}),
    st.fixed_dictionaries({"enum": st.lists(values, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"const": values}),
    st.fixed_dictionaries({"type": st.just("integer"), "minimum": st.integers(-2, 9)}),
    st.fixed_dictionaries({"type": st.just("string"), "pattern": st.sampled_from(["a", "^[0-9]", "e$"])}),
    st.just({"$ref": "#/properties/a"}),
    st.just({}),
)


def deeper(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    some = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
    return st.one_of(
        st.fixed_dictionaries({"type": st.just("object"), "properties": named}),
        st.fixed_dictionaries({"properties": named, "additionalProperties": inner | st.booleans()}),
        st.fixed_dictionaries({"type": st.just("array"), "prefixItems": some, "items": inner}),
        st.fixed_dictionaries({"items": inner, "uniqueItems": st.booleans()}),
        st.fixed_dictionaries({"contains": inner}),
        st.fixed_dictionaries({"not": inner}),
        *(st.fixed_dictionaries({keyword: some}) for keyword in ("allOf", "anyOf", "anyOf", "oneOf")),
    )


schemas = st.recursive(leaves, deeper, max_leaves=8)
arguments = st.fixed_dictionaries({"a": values}, optional={"b": values, "c": values})


def alternatives(value: Json, path: str) -> Iterator[tuple[Json, frozenset[str]]]:
    """A value in all its readings, each with the places where it differs: by brute force."""
    if type(value) is dict:
        inner = [list(alternatives(each, f"{path}/{name}")) for name, each in value.items()]
        for some in product(*inner):
            yield dict(zip(value, (each for each, _ in some), strict=True)), frozenset().union(*(at for _, at in some))
        return
    if type(value) is list:
        inner = [list(alternatives(each, f"{path}/{i}")) for i, each in enumerate(value)]
        for some in product(*inner):
            yield [each for each, _ in some], frozenset().union(*(at for _, at in some))
        return
    yield value, frozenset()
    other = reading(value)
    if other is not UNSET:
        for each, at in alternatives(other, path) if type(other) in (dict, list) else [(other, frozenset[str]())]:
            yield each, at | {path}


def reading(value: Json) -> Json:
    if type(value) is not str:
        return UNSET if value is None else json.dumps(value)
    try:
        found = json.loads(value)
    except ValueError:
        return UNSET
    return UNSET if type(found) is str else found


def schema_of(value: Json, draw: st.DrawFn) -> Object:
    """A schema that the value fits; sometimes as one branch of several."""
    if type(value) is dict:
        inner = {name: schema_of(each, draw) for name, each in value.items()}
        found: Object = {"type": "object", "properties": inner}
    elif type(value) is list and value:
        found = {"type": "array", "prefixItems": [schema_of(each, draw) for each in value]}
    else:
        found = draw(st.sampled_from([{"type": kind(value)}, {"enum": [value, "b"]}]))
    keyword = draw(st.sampled_from(["", "", "allOf", "anyOf", "oneOf"]))
    return {keyword: [found, *draw(st.lists(schemas, max_size=2))]} if keyword else found


def spoilt(value: Json, draw: st.DrawFn) -> Json:
    """The value as a careless caller sends it: some of it as text."""
    if type(value) is dict:
        value = {name: spoilt(each, draw) for name, each in value.items()}
    elif type(value) is list:
        value = [spoilt(each, draw) for each in value]
    other = reading(value)
    return other if other is not UNSET and draw(st.booleans()) else value


@st.composite
def careless(draw: st.DrawFn) -> tuple[Object, Object]:
    meant = draw(arguments)
    return {name: schema_of(each, draw) for name, each in meant.items()}, {n: spoilt(v, draw) for n, v in meant.items()}


@requirement("SRV-601", "P-06")
@given(st.tuples(st.dictionaries(st.sampled_from("abc"), schemas, min_size=1), arguments) | careless())
@settings(max_examples=250)
def test_a_repair_is_the_least_change_that_makes_the_whole_valid(case: tuple[Object, Object]) -> None:
    properties, sent = case
    try:
        checker = compile_schema({"type": "object", "properties": {"a": {}, **properties}}, WHERE)
    except SchemaError:  # a loop of references
        return
    result = repaired(checker, sent)
    if checker.valid(sent):
        assert result is not None
        assert result[0] is sent
    if result is None:
        return
    value, repairs = result
    places = frozenset(each.path for each in repairs)
    everything = list(islice(alternatives(sent, ""), 2_000))
    assert {exact(each) for each, at in everything if at == places} <= {exact(value)}
    assert all(at >= places for each, at in everything if checker.valid(each))
