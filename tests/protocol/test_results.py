"""What a tool returns, in the words of every revision: the tables of TRANSLATION 4.1 and 4.3, cell by cell."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import jsonschema
import pytest
from hypothesis import given, strategies as st

from checks import check_message, strict_json
from handrail import Audio, EmbeddedResource, Image, ResourceLink, Text, ToolResult, jsonrpc
from handrail.model import UNSET, Block
from handrail.revisions import REVISIONS
from requirements import requirement
from servers_calling import MODIFIED, failure
from subject import PNG, WAV
from wires import ALL, Open, Wire
from wires_shared import everywhere, open_wire as open_wire, processes as processes, wire as wire

Json = Any
Object = dict[str, Any]

R0, R1, R2, R3, R4, R5, P = (*ALL[:5], "2026-07-28", "pocket")
ABSENT = object()
SHAPES = "servers_calling:shapes"


def text(value: str, **more: Json) -> Object:
    return {"type": "text", "text": value, **more}


IMAGE: Object = {"type": "image", "data": base64.b64encode(PNG).decode(), "mimeType": "image/png"}
AUDIO: Object = {"type": "audio", "data": base64.b64encode(WAV).decode(), "mimeType": "audio/wav"}


def row(
    bare: Json, content: list[Json], structured: Json = ABSENT, *, whole: bool = True, error: bool = False
) -> Object:
    """A row of 4.1: `toolResult` for R0, then content and structured data for those that have them.

    `whole` off: before R5 the structured data stands under `result`.
    """
    wrapped = structured if whole or structured is ABSENT else {"result": structured}
    return {
        R0: {"toolResult": bare},
        R1: {"content": content, "isError": error},
        R2: {"content": content, "isError": error},
        R3: {"content": content, "isError": error, "structuredContent": wrapped},
        R4: {"content": content, "isError": error, "structuredContent": wrapped},
        R5: {"content": content, "isError": error, "structuredContent": structured, "resultType": "complete"},
        P: {
            "content": content or [text("")],
            "isError": error,
            "structuredContent": {} if wrapped is ABSENT else wrapped,
        },
    }


# TRANSLATION 4.1
RESULTS: dict[str, Object] = {
    "one_text": row("hello", [text("hello")]),
    "several_blocks": row({"content": [text("one"), IMAGE]}, [text("one"), IMAGE]),
    "object_as_text": row({"n": 1}, [text('{"n":1}')], {"n": 1}),
    "object_said_already": row({"n": 1}, [text('{ "n": 1 }')], {"n": 1}),
    "object_with_text": row({"n": 1}, [text("one"), text('{"n":1}')], {"n": 1}),
    "object_with_media": row(
        {"structuredContent": {"n": 1}, "content": [IMAGE, text('{"n":1}')]}, [IMAGE, text('{"n":1}')], {"n": 1}
    ),
    "value": row([2, 3, 5], [text("[2,3,5]")], [2, 3, 5], whole=False),
    "null": row(None, [text("null")], None, whole=False),
    "error": row({"error": "one\ntwo", "status": "failed"}, [text("one"), text("two")], error=True),
    "error_with_data": row({"error": 'no\n{"why":"x"}'}, [text("no"), text('{"why":"x"}')], {"why": "x"}, error=True),
    "empty": row(None, []),
    "declared_object": row({"n": 2}, [text('{"n":2}')], {"n": 2}),
    "declared_list": row([1], [text("[1]")], [1], whole=False),
    "declared_any": row({"n": 3}, [text('{"n":3}')], {"n": 3}, whole=False),
    "declared_error": row({"error": "no such thing"}, [text("no such thing")], error=True),
}


@requirement("SRV-401", "SRV-402", "SRV-403", "SRV-404")
@everywhere()
async def test_a_result_has_the_shape_of_its_revision(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHAPES)
    for name, by_revision in RESULTS.items():
        expected = {key: value for key, value in by_revision[wire.revision].items() if value is not ABSENT}
        got = dict((await wire.call(name))["result"])
        got.pop("_meta", None)
        assert got == expected, name


@everywhere()
async def test_the_meta_of_a_result_is_kept(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHAPES)
    meta = dict((await wire.call("with_meta"))["result"]["_meta"])
    if wire.revision == R5:
        assert meta.pop("io.modelcontextprotocol/serverInfo")["name"] == "shapes"
    assert meta == {"example.org/z": 3}


# TRANSLATION 4.3


def same(revisions: Iterable[str], content: list[Object]) -> dict[str, list[Object]]:
    return dict.fromkeys(revisions, content)


LINK: Object = {
    "type": "resource_link",
    "uri": "file:///a.rs",
    "name": "a.rs",
    "title": "A",
    "description": "Entry",
    "mimeType": "text/x-rust",
    "size": 7,
}
ICONS: Object = {"icons": [{"src": "https://example.org/i.png"}]}
LINK_NOTES: Object = {"annotations": {"priority": 0.5}}
LINK_META: Object = {"_meta": {"example.org/l": 1}}
LINK_TEXT = [text("a.rs — file:///a.rs (text/x-rust)\nEntry", **LINK_NOTES), text("after")]
BARE_TEXT = [text("b — file:///b"), text("after")]
BARE_LINK = [{"type": "resource_link", "uri": "file:///b", "name": "b"}, text("after")]

HEARD: Object = {"audience": ["user"]}
HEARD_WHEN: Object = {"audience": ["user"], "lastModified": MODIFIED}
MOVED_AUDIO: Object = {
    "type": "resource",
    "resource": {"uri": "urn:mcp-content:sha256:…", "mimeType": "audio/wav", "blob": AUDIO["data"]},
    "annotations": HEARD,
}

RESOURCE: Object = {"type": "resource", "resource": {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "hello"}}
BLOB: Object = {"type": "resource", "resource": {"uri": "file:///a.bin", "blob": "AAEC"}}

INSIDE: Object = {"audience": ["assistant"], "lastModified": MODIFIED}
NOTED: Object = {"uri": "file:///a.txt", "text": "hello"}
NOTED_FULL: Object = {**NOTED, "title": "A", "annotations": INSIDE}
NOTED_META: Object = {"_meta": {"example.org/r": 1}}
HALF: Object = {"annotations": {"priority": 0.5}}
BOTH: Object = {"annotations": {"audience": ["assistant"], "priority": 0.5}}

NOTE: Object = {"audience": ["user"], "priority": 0.7}
NOTE_WHEN: Object = {**NOTE, "lastModified": MODIFIED}
TWO_META = text("two", _meta={"example.org/y": 2})

CONTENT: dict[str, dict[str, list[Object]]] = {
    "image": same(ALL, [IMAGE]),
    "audio": {
        R0: [AUDIO],
        R1: [MOVED_AUDIO, text("[audio, audio/wav, 44 B]")],
        R2: [{**AUDIO, "annotations": HEARD}],
        **same((R3, R4, R5, P), [{**AUDIO, "annotations": HEARD_WHEN}]),
    },
    "link": {
        R0: [{**LINK, **ICONS}, text("after")],
        **same((R1, R2), LINK_TEXT),
        R3: [{**LINK, **LINK_NOTES, **LINK_META}, text("after")],
        **same((R4, R5), [{**LINK, **ICONS, **LINK_NOTES, **LINK_META}, text("after")]),
        P: [{**LINK, **LINK_NOTES}, text("after")],
    },
    "bare_link": {
        **same((R0, R3, R4, R5, P), BARE_LINK),
        **same((R1, R2), BARE_TEXT),
    },
    "text_resource": same(ALL, [RESOURCE]),
    "blob_resource": same(ALL, [BLOB]),
    "annotated_resource": {
        R0: [{"type": "resource", "resource": NOTED}],
        **same((R1, R2), [{"type": "resource", "resource": NOTED, **BOTH}]),
        **same((R3, R4, R5), [{"type": "resource", "resource": {**NOTED_FULL, **NOTED_META}, **HALF}]),
        P: [{"type": "resource", "resource": NOTED_FULL, **HALF}],
    },
    "annotated_text": {
        R0: [text("one"), text("two")],
        **same((R1, R2), [text("one", annotations=NOTE), text("two")]),
        **same((R3, R4, R5), [text("one", annotations=NOTE_WHEN), TWO_META]),
        P: [text("one", annotations=NOTE_WHEN), text("two")],
    },
}


@requirement("SRV-402", "SRV-418", "SRV-419")
@everywhere()
@pytest.mark.parametrize("name", list(CONTENT))
async def test_content_is_said_in_the_closest_way_the_revision_has(open_wire: Open, name: str) -> None:
    wire: Wire = await open_wire(SHAPES)
    result = (await wire.call(name))["result"]
    content = result["toolResult"]["content"] if wire.revision == R0 else result["content"]
    for block in content:
        uri = block.get("resource", {}).get("uri", "")
        if re.fullmatch(r"urn:mcp-content:sha256:[0-9a-f]{16}", uri):
            block["resource"]["uri"] = "urn:mcp-content:sha256:…"
    assert content == CONTENT[name][wire.revision]


@pytest.mark.parametrize("revision", ALL)
def test_content_of_an_unknown_type_is_passed_on_or_replaced_by_a_note(revision: str) -> None:
    strange: Object = {"type": "hologram", "light": [1, 2]}
    result = json.loads(jsonrpc.encode(REVISIONS[revision].encoders["tools/call"](ToolResult([strange]), False)))
    if revision in (R1, R2):
        assert result["content"] == [text("[unsupported content: hologram]")]
    elif revision == R0:
        assert result["toolResult"] == {"content": [strange]}
    else:
        assert result["content"] == [strange]


def test_a_result_moved_down_does_not_grow_beyond_twice_its_size() -> None:
    large = ToolResult([Audio(bytes(100_000), "audio/wav"), ResourceLink("file:///" + "a" * 5_000, "name")])
    sizes = {name: len(jsonrpc.encode(each.encoders["tools/call"](large, False))) for name, each in REVISIONS.items()}
    assert max(sizes.values()) < 2 * sizes[R5]


# Structured data


@requirement("SRV-405", "SRV-406", "SRV-407")
@everywhere(R3, R4, R5, P)
async def test_structured_data_fits_its_schema_is_an_object_and_stands_in_the_text_too(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHAPES)
    listed = (await wire.request("tools/list"))["result"]["tools"]
    schemas = {tool["name"]: tool["outputSchema"] for tool in listed if "outputSchema" in tool}
    for name, arguments in (
        ("add", {"a": 1, "b": 2}),
        ("declared_object", {}),
        ("declared_list", {}),
        ("declared_any", {}),
    ):
        result = (await wire.call(name, arguments))["result"]
        value = result["structuredContent"]
        jsonschema.Draft202012Validator(schemas[name]).validate(value)
        if wire.revision != R5:
            assert isinstance(value, dict)
        said = [json.loads(block["text"]) for block in result["content"] if block["type"] == "text"]
        assert value in said or value["result"] in said


@requirement("SRV-408")
@everywhere(R5)
async def test_structured_data_may_be_any_value_and_null_is_not_absence(wire: Wire) -> None:
    for kind, value in {"null": None, "string": "text", "number": 1.5, "boolean": True}.items():
        result = (await wire.call("any_value", {"kind": kind}))["result"]
        assert "structuredContent" in result
        assert result["structuredContent"] == value
        assert type(result["structuredContent"]) is type(value)
        assert json.loads(result["content"][0]["text"]) == value
    assert (await wire.call("list_numbers"))["result"]["structuredContent"] == [2, 3, 5]
    assert "structuredContent" not in (await wire.call("echo", {"text": "plain"}))["result"]
    assert "structuredContent" not in (await wire.call("nothing"))["result"]


@requirement("SRV-417", "P-06", "P-02")
@everywhere()
async def test_output_that_breaks_its_promise_never_leaves_as_success(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHAPES)
    for name in ("wrong_type", "no_structure", "only_text", "missing_member", "not_finite", "no_json_form"):
        answer = await wire.call(name)
        assert name in failure(answer)
        assert "many" not in failure(answer), "the value belongs into the log"
        assert answer["result"].get("structuredContent", {}) == {}


@requirement("P-02")
@everywhere()
@pytest.mark.parametrize(
    "name",
    ["loose_nan", "loose_bytes", "loose_cycle", "loose_meta", "loose_block_meta", "loose_resource", "loose_mixture"],
)
async def test_what_json_cannot_say_is_a_failure_of_the_tool(open_wire: Open, name: str) -> None:
    wire: Wire = await open_wire(SHAPES)
    assert name in failure(await wire.call(name))


@requirement("P-02")
@everywhere()
async def test_an_error_keeps_its_text_even_if_its_data_cannot_be_said(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHAPES)
    answer = await wire.call("error_with_nan")
    assert "it went wrong" in failure(answer)
    assert "null" not in json.dumps(answer)


# There and back (TRANSLATION 13)

names = st.text(st.characters(codec="utf-8"), max_size=8)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(names, values, max_size=3)
base64_texts = st.binary(max_size=12).map(lambda data: base64.b64encode(data).decode())
maybe_meta = st.just(UNSET) | objects


def notes(*, when: bool) -> st.SearchStrategy[Any]:
    members: dict[str, st.SearchStrategy[Any]] = {
        "audience": st.lists(st.sampled_from(["user", "assistant"]), unique=True),
        "priority": st.floats(0, 1) | st.integers(0, 1),
    }
    if when:
        members["lastModified"] = st.datetimes().map(lambda moment: moment.isoformat() + "Z")
    return st.just(UNSET) | st.fixed_dictionaries({}, optional=members).filter(bool)


def _filled(head: Object, part: tuple[str, str]) -> Object:
    return {**head, part[0]: part[1]}


def contents(revision: str) -> st.SearchStrategy[Block]:
    """Every block a revision can express."""
    new = revision not in (R1, R2)
    shared: dict[str, Any] = {"annotations": notes(when=new)}
    if new and revision != P:
        shared["meta"] = maybe_meta
    resources = st.fixed_dictionaries({"uri": st.just("file:///a")}, optional={"mimeType": st.just("text/plain")})
    inside = st.one_of(st.tuples(st.just("text"), texts), st.tuples(st.just("blob"), base64_texts))
    kinds: list[st.SearchStrategy[Any]] = [
        st.builds(Text, texts, **shared),
        st.builds(Image, base64_texts, st.just("image/png"), **shared),
        st.builds(EmbeddedResource, st.builds(_filled, resources, inside), **shared),
    ]
    if revision != R1:
        kinds.append(st.builds(Audio, base64_texts, st.just("audio/wav"), **shared))
    if new:
        members: dict[str, Any] = {
            "title": st.just(UNSET) | texts,
            "description": st.just(UNSET) | texts,
            "mime_type": st.just(UNSET) | st.just("text/x-rust"),
            "size": st.just(UNSET) | st.integers(0, 2**53),
            **shared,
        }
        if revision in (R4, R5):
            members["icons"] = st.just(UNSET) | st.just([{"src": "https://example.org/i.png"}])
        kinds.append(st.builds(ResourceLink, st.just("file:///b"), texts, **members))
    return st.one_of(kinds)


def results(revision: str) -> st.SearchStrategy[ToolResult]:
    """Every result a revision can express without loss."""
    if revision == R0:
        return bare_results()
    structured: st.SearchStrategy[Any] = st.just(UNSET)
    if revision in (R3, R4):
        structured |= objects
    elif revision == R5:
        structured |= values
    elif revision == P:
        structured |= objects.filter(bool)  # `{}` stands for nothing
    made = st.builds(ToolResult, st.lists(contents(revision), max_size=3), structured, st.booleans(), maybe_meta)
    if revision == P:  # the dialect has no empty content: a lone empty text stands for it
        made = made.filter(lambda each: each.content != [Text("")] and (each.content or each.structured is UNSET))
    return made


def bare_results() -> st.SearchStrategy[ToolResult]:
    """2024-10-07: a text, a value, or an error; anything else needs the marker only our own peers would set."""
    silent = objects.filter(lambda each: not (isinstance(each.get("error"), str) and each["error"]))
    valued = (silent | values.filter(lambda each: not isinstance(each, str | dict))).map(
        lambda value: ToolResult([Text(jsonrpc.encode(value).decode())], value)
    )
    failed = st.builds(
        lambda said, data: ToolResult([Text(said)], is_error=True, data=data),
        texts.filter(bool),
        objects.filter(lambda each: "error" not in each),
    )
    return texts.map(lambda said: ToolResult([Text(said)])) | valued | failed


@pytest.mark.parametrize("revision", ALL)
def test_what_a_revision_can_say_comes_back_the_same(revision: str) -> None:
    dialect = REVISIONS[revision]

    @given(results(revision))
    def there_and_back(result: ToolResult) -> None:
        message = strict_json(jsonrpc.response(1, dialect.encoders["tools/call"](result, False)))
        if revision != R0:
            check_message(_named(message), revision, "tools/call")
        assert dialect.read(message["result"]) == result

    there_and_back()


def _named(message: Object) -> Object:
    """The message without what tests made up: the check of nulls does not look into `_meta` of strangers."""
    copy: Object = json.loads(json.dumps(message))
    copy["result"].pop("_meta", None)
    for block in copy["result"].get("content", ()):
        block.pop("_meta", None)
    return copy


@given(values)
def test_a_value_wrapped_for_an_older_revision_is_not_unwrapped_by_guessing(value: Json) -> None:
    result = ToolResult([], value)
    for name in (R3, R4, P):
        message = strict_json(jsonrpc.response(1, REVISIONS[name].encoders["tools/call"](result, True)))
        assert REVISIONS[name].read(message["result"]).structured == {"result": value}


def test_the_nothing_of_pocket_is_kept_both_ways() -> None:
    pocket = REVISIONS[P]
    empty = {"content": [text("")], "structuredContent": {}, "isError": False}
    model = pocket.read(empty)
    assert model == ToolResult([])
    assert json.loads(jsonrpc.encode(pocket.encoders["tools/call"](model, False))) == empty


# Helpers


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"priority": 1.5}, "priority"),
        ({"priority": -0.1}, "priority"),
        ({"priority": "0.5"}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": float("nan")}, "priority"),
        ({"priority": None}, "priority"),
        ({"audience": "user"}, "audience"),
        ({"audience": ["everybody"]}, "audience"),
        ({"audience": ["user", 1]}, "audience"),
        ({"audience": None}, "audience"),
        ({"lastModified": "yesterday"}, "lastModified"),
        ({"lastModified": 1_746_282_600}, "lastModified"),
        ({"lastModified": ""}, "lastModified"),
        ({"lastModified": None}, "lastModified"),
        ({"lastModified": "2025-13-03T14:30:00Z"}, "lastModified"),
        (["audience"], "annotations"),
    ],
)
def test_wrong_annotations_are_refused_by_every_helper(bad: Any, named: str) -> None:
    makers: list[Callable[[], Any]] = [
        lambda: Text("x", annotations=bad),
        lambda: Image(PNG, "image/png", annotations=bad),
        lambda: Audio(WAV, "audio/wav", annotations=bad),
        lambda: ResourceLink("a:b", "b", annotations=bad),
        lambda: EmbeddedResource({"uri": "a:b", "text": "x"}, annotations=bad),
        lambda: EmbeddedResource({"uri": "a:b", "text": "x", "annotations": bad}),
    ]
    for make in makers:
        with pytest.raises((ValueError, TypeError), match=named):
            make()


@pytest.mark.parametrize(
    "fine",
    [
        {},
        {"priority": 0},
        {"priority": 1.0},
        {"audience": []},
        {"audience": ["user", "assistant"]},
        {"lastModified": "2025-01-12T15:00:58Z"},
        {"lastModified": "2025-01-12T15:00:58+02:00"},
        {"lastModified": "2025-01-12"},
        {"of_somebody_else": 1},
    ],
)
def test_right_annotations_are_taken(fine: Object) -> None:
    assert Text("x", annotations=fine).annotations == fine


# The helpers as they are seen by code that is not checked.
image: Any = Image
link: Any = ResourceLink
embedded: Any = EmbeddedResource
words: Any = Text

HELPERS: dict[str, Callable[[], Any]] = {
    "image of no type": lambda: Image(PNG, ""),
    "image with the type of a sound": lambda: Image(PNG, "audio/wav"),
    "image with a type that is no text": lambda: image(PNG, None),
    "image in text that is not base64": lambda: Image("not base64!", "image/png"),
    "image in base64 with a hole": lambda: Image("AAE", "image/png"),
    "image of something else": lambda: image(5, "image/png"),
    "audio with the type of an image": lambda: Audio(WAV, "image/png"),
    "audio in text that is not base64": lambda: Audio("ü", "audio/wav"),
    "link to nowhere": lambda: ResourceLink("", "name"),
    "link to a relative place": lambda: ResourceLink("a/b", "name"),
    "link with blanks": lambda: ResourceLink("file:///a b", "name"),
    "link without a name": lambda: link("file:///a", None),
    "link with a number for a name": lambda: link("file:///a", 5),
    "link with a number for a title": lambda: link("file:///a", "a", title=5),
    "link with a text for a size": lambda: link("file:///a", "a", size="5"),
    "link with a number for a type": lambda: link("file:///a", "a", mime_type=5),
    "resource without a place": lambda: EmbeddedResource({"text": "x"}),
    "resource with nothing in it": lambda: EmbeddedResource({"uri": "a:b"}),
    "resource with too much in it": lambda: EmbeddedResource({"uri": "a:b", "text": "x", "blob": "AAEC"}),
    "resource with a number for a text": lambda: EmbeddedResource({"uri": "a:b", "text": 5}),
    "resource with a bad blob": lambda: EmbeddedResource({"uri": "a:b", "blob": "!"}),
    "resource with a number for a type": lambda: EmbeddedResource({"uri": "a:b", "text": "x", "mimeType": 5}),
    "resource that is no object": lambda: embedded("a:b"),
    "text that is no text": lambda: words(5),
}


@pytest.mark.parametrize("name", list(HELPERS))
def test_wrong_content_is_refused_by_its_helper(name: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        HELPERS[name]()
    assert str(caught.value)
