"""Words of a command line as the arguments of a tool, and a tool as a signature."""

from __future__ import annotations

import contextlib
import json
import math
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from handrail.cli.arguments import parse_arguments, parse_document
from handrail.cli.exit_codes import UsageError
from handrail.client.tools import describe, signature
from handrail.model import Json, Object
from handrail.text.controls import escape
from requirements import requirement

WEATHER: Object = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "height": {"type": "number"},
        "wind": {"type": "boolean"},
        "nothing": {"type": "null"},
        "units": {"enum": ["metric", "imperial", 3, None]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "numbers": {"type": "array", "items": {"type": "integer"}},
        "place": {"$ref": "#/$defs/place"},
        "when": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["boolean", "string"]},
        "one_or_many": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "level": {"oneOf": [{"const": 1}, {"const": "high"}]},
        "free": {},
        "dotted.name": {"type": "integer"},
    },
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("words", "made"),
    [
        ("city=Paris", {"city": "Paris"}),
        ("city=", {"city": ""}),
        ("city=a=b:=c", {"city": "a=b:=c"}),
        ("city=12", {"city": "12"}),
        ("city=https://x/?a=b", {"city": "https://x/?a=b"}),
        ("days=3", {"days": 3}),
        ("days=-3", {"days": -3}),
        ("days:=3.5", {"days": 3.5}),  # as it is: whether it may be is not decided here
        ("height=2.5", {"height": 2.5}),
        ("height=2", {"height": 2}),
        ("height=1e3", {"height": 1000.0}),
        ("wind=true", {"wind": True}),
        ("wind=No", {"wind": False}),
        ("wind=1", {"wind": True}),
        ("nothing=null", {"nothing": None}),
        ("units=metric", {"units": "metric"}),
        ("units=3", {"units": 3}),
        ("units=null", {"units": None}),
        ("tags=a", {"tags": ["a"]}),
        ("tags=a tags=b", {"tags": ["a", "b"]}),
        ('tags=["a","b"] tags=c', {"tags": ["a", "b", "c"]}),
        ('tags:=["a"]', {"tags": ["a"]}),
        ("numbers=1 numbers=2", {"numbers": [1, 2]}),
        ("place.lat=48.8 place.name=Paris", {"place": {"lat": 48.8, "name": "Paris"}}),
        ('place={"lat":1}', {"place": {"lat": 1}}),
        ("when=5", {"when": 5}),
        ("when=noon", {"when": "noon"}),
        ("when=null", {"when": None}),
        ('when:="5"', {"when": "5"}),
        ("either=true", {"either": True}),
        ("either=1", {"either": "1"}),
        ("one_or_many=a", {"one_or_many": "a"}),
        ('one_or_many=["a"]', {"one_or_many": ["a"]}),
        ("level=1", {"level": 1}),
        ("level=high", {"level": "high"}),
        ("free=5", {"free": "5"}),
        ("free:=5", {"free": 5}),
        ("dotted.name=5", {"dotted.name": 5}),
    ],
)
def test_words_become_what_the_schema_says(words: str, made: Object) -> None:
    assert parse_arguments(words.split(), WEATHER) == made


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("city", "'city' is not key=value or key:=JSON"),
        ("=x", "'=x' is not key=value"),
        ("days=many", "days: 'many' is not an integer, such as 3"),
        ("days=3.5", "days: '3.5' is not an integer"),
        ("height=high", "height: 'high' is not a number, such as 2.5"),
        ("height=nan", "height: 'nan' is not a number"),
        ("wind=maybe", "wind: 'maybe' is not a boolean, such as true"),
        ("nothing=x", "nothing: 'x' is not a null"),
        ("units=metrics", "units: 'metrics' is not one of \"metric\", \"imperial\", 3, null; did you mean 'metric'?"),
        ("level=x", "level: 'x' is not one of 1, \"high\""),
        ("cty=Paris", "cty: there is no argument 'cty'; did you mean city?"),
        ("zzzzzzzzz=1", "there is city, days, height"),
        ("place.lon=2", "place.lon: there is no argument 'lon'; there is lat, name"),
        ("place=x", "place: 'x' is not an object, such as {\"a\": 1}"),
        ("numbers=x", "numbers: 'x' is not an integer"),
        ("tags=[x", "tags: '[x' is not JSON"),
        ("days=1 days=2", "days: occurs twice; only an array takes several"),
        ("free=1 free.x=2", "free.x: free already has a value"),
        ("days:=NaN", "days: 'NaN' is not JSON: NaN is not a JSON number"),
        ("days:=", "days: '' is not JSON"),
        ("days:=1e999", "days: '1e999': not acceptable JSON: Number out of range"),
        ('days:={"a":1,"a":2}', "the member 'a' stands twice in one object"),
        ("city=@/no/such/file", "city: /no/such/file: cannot be read: No such file"),
        ("a\x1b[2J=1", r"there is no argument 'a\\x1b[2J'"),
    ],
)
def test_what_is_wrong_is_said_with_its_key_and_what_is_wanted(words: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_arguments(words.split(" "), WEATHER)
    assert told in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_all_that_is_wrong_is_said_at_once_and_what_is_missing() -> None:
    with pytest.raises(UsageError) as caught:
        parse_arguments(["days=x", "wind=x"], WEATHER)
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(UsageError, match=r"^missing: city, days$"):
        parse_arguments([], WEATHER | {"required": ["city", "days"]})


def test_a_schema_that_says_nothing_takes_anything() -> None:
    assert parse_arguments(["a=1", "b.c:=2"], {"type": "object"}) == {"a": "1", "b": {"c": 2}}
    open_schema = {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}
    assert parse_arguments(["b=1"], open_schema) == {"b": 1}
    with pytest.raises(UsageError, match="there is no argument 'b'; there is a"):
        parse_arguments(["b=1"], {"properties": {"a": {}}})


def test_a_schema_that_goes_round_in_circles_ends() -> None:
    loop: Object = {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 2}}}
    assert parse_arguments(["a=1"], loop) == {"a": "1"}
    assert parse_arguments(["a=1"], {"properties": {"a": {"$ref": "#/properties/a"}}}) == {"a": "1"}
    with pytest.raises(UsageError, match="a: its items are infinitely nested arrays"):
        parse_arguments(["a=1"], {"properties": {"a": {"type": "array", "items": {"$ref": "#/properties/a"}}}})


def test_files_are_read_where_a_word_says_so(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("a\nb", "utf-8")
    (tmp_path / "place").write_text('{"lat": 1}', "utf-8")
    note, place = tmp_path / "note", tmp_path / "place"
    assert parse_arguments([f"city=@{note}", f"place:=@{place}"], WEATHER) == {"city": "a\nb", "place": {"lat": 1}}
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not a text in UTF-8"):
        parse_arguments([f"city=@{tmp_path / 'latin'}"], WEATHER)
    with pytest.raises(UsageError, match="over 4,194,304 bytes"):
        parse_arguments(["city=@/dev/zero"], WEATHER)


def test_a_whole_document_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_document('{"a": 1}') == {"a": 1}
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b'{"a": 3}')))
    assert parse_document("-") == {"a": 3}
    (tmp_path / "x").write_text('{"a": 2}')
    assert parse_document(f"@{tmp_path / 'x'}") == {"a": 2}
    for text in ("[1]", "x", "-1"):
        with pytest.raises(UsageError, match="the arguments: "):
            parse_document(text)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8")),
)


@given(values)
def test_what_json_says_arrives_as_it_is(value: Json) -> None:
    assert parse_arguments([f"free:={json.dumps(value)}"], WEATHER) == {"free": value}


@given(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.text().filter(lambda each: each[:1] != "@"),
)
def test_what_is_written_plainly_comes_back(days: int, height: float, wind: bool, city: str) -> None:
    words = [f"days={days}", f"height={height!r}", f"wind={str(wind).lower()}", f"city={city}"]
    made = parse_arguments(words, WEATHER)
    assert made == {"days": days, "height": height, "wind": wind, "city": city}
    assert math.copysign(1, made["height"]) == math.copysign(1, height)


# Signatures


TOOL: Object = {
    "name": "get_weather",
    "title": "Weather",
    "description": "What the sky does.\n\nFor any place.",
    "inputSchema": {
        "type": "object",
        "properties": {
            "units": {"enum": ["metric", "imperial"], "default": "metric"},
            "location": {"type": "string", "description": "a city"},
        },
        "required": ["location"],
    },
    "outputSchema": {"type": "object", "properties": {"degrees": {"type": "number"}}},
    "annotations": {"readOnlyHint": True, "destructiveHint": False, "title": "Other"},
}


def test_a_tool_reads_like_a_function() -> None:
    assert signature(TOOL) == 'get_weather(location: str, units: "metric"|"imperial" = "metric") -> {degrees: float}'


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ({"type": "integer"}, "int"),
        ({"type": ["string", "null"]}, "str | None"),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "bool | None"),
        ({"type": "array", "items": {"type": "string"}}, "list[str]"),
        ({"type": "array"}, "list[any]"),
        ({"type": "object"}, "dict"),
        ({"properties": {"a": {"properties": {"b": {"properties": {"c": {}}}}}}}, "{a: {b: {…}}}"),
        ({"$ref": "#/$defs/Place"}, "Place"),
        ({"const": "x"}, '"x"'),
        ({"enum": list(range(20))}, "0|1|2|3|4|5|6|7|8|9|10|11|…"),
        ({}, "any"),
        (True, "any"),
        ({"type": 5, "enum": "x", "anyOf": 3}, "any"),
    ],
)
def test_types_are_written_as_people_read_them(schema: Any, shown: str) -> None:
    assert signature({"name": "f", "inputSchema": {"properties": {"a": schema}}}) == f"f(a?: {shown})"


def test_a_long_signature_has_a_line_for_each_argument() -> None:
    properties = {f"argument_{i}": {"type": "string"} for i in range(6)}
    lines = signature({"name": "f", "inputSchema": {"properties": properties}}).splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("f(", ")", 8)


def test_what_the_server_says_of_a_tool_is_told_as_its_word() -> None:
    told = describe(TOOL)
    assert told.splitlines()[0].startswith("get_weather("), "the real name, whatever the title"
    assert "    Weather\n" in told
    assert ["location", "str", "a", "city"] in [line.split() for line in told.splitlines()]
    assert "declared by the server: only reads, destroys nothing" in told
    assert "    What the sky does.\n\n    For any place." in told


EVIL = "\x1b]0;owned\x07\u202e\U000e0041\x9b2J\r"


@requirement("P-33", "APP-08", everywhere=True)
def test_nothing_a_tool_says_of_itself_can_act() -> None:
    evil: Object = {
        "name": EVIL,
        "title": EVIL + "t",
        "description": EVIL,
        "inputSchema": {
            "properties": {EVIL: {"description": EVIL, "enum": [EVIL], "default": EVIL}, "r": {"$ref": f"#/{EVIL}"}},
            "required": [EVIL],
        },
        "outputSchema": {"properties": {EVIL: {"const": EVIL}}},
        "annotations": {"readOnlyHint": EVIL},
    }
    shown = describe(evil)
    assert escape(shown) == shown
    assert not {"\x1b", "\x07", "\r", "\x9b", "\u202e", "\U000e0041"} & set(shown)
    assert "declared" not in shown


KEYWORDS = (
    "type properties items enum const anyOf oneOf required default description name title $ref additionalProperties"
)
scalars = (
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from(["object", "array", "string", "#/a", "name", ""])
)
odd = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS.split()), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*KEYWORDS.split(), "inputSchema", "annotations"]), odd), odd)
def test_whatever_a_server_sends_can_be_shown_and_asked_for(tool: Object, schema: Json) -> None:
    describe({**tool, "inputSchema": schema})
    for words in (["name=x"], ["type.items=1", "name=[1]"], ["name={", "name=1"]):
        with contextlib.suppress(UsageError):
            parse_arguments(words, schema if isinstance(schema, dict) else {"properties": {"name": schema}})
