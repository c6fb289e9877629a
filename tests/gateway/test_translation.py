"""What must come back the same, what may be lost, and what is never said: TRANSLATION section 13 as properties.

The encoders and decoders of each revision are asked directly; where the promise is the gateway's (whatever an upstream
answers, the state of its questions), a gateway is between a raw client and a scripted upstream.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import jsonschema_rs
import msgspec
import pytest
from hypothesis import assume, given, settings, strategies as st
from msgspec import UNSET

from checks import check_message, strict_json
from handrail import Audio, EmbeddedResource, Image, ResourceLink, Text, ToolResult, jsonrpc
from handrail.errors import Kind
from handrail.model import Block, Tool
from handrail.revisions import REVISIONS
from requirements import record_ran, requirement
from scripted_upstream import DIALECTS, PNG, R0, R1, R2, R3, R4, R5, Json, Object, P, since
from wires_gateway import PREFIX, Gateway, Gateways, Pair, Talk, text_of

CALL = "tools/call"
T = TypeVar("T")
few = settings(max_examples=60)  # where each example costs, for each of seven revisions

# Values

names = st.text(st.characters(codec="utf-8"), max_size=8)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(names, values, max_size=3)
metas = st.just(UNSET) | st.just({"example.org/x": 1}) | objects
encoded = st.binary(max_size=12).map(lambda data: base64.b64encode(data).decode())
ICONS = [{"src": "https://example.org/i.png"}]


def annotated(*, when: bool = True) -> st.SearchStrategy[Any]:
    members: dict[str, st.SearchStrategy[Any]] = {
        "audience": st.lists(st.sampled_from(["user", "assistant"]), unique=True),
        "priority": st.floats(0, 1),
    }
    if when:
        members["lastModified"] = st.datetimes().map(lambda moment: moment.isoformat() + "Z")
    return st.just(UNSET) | st.fixed_dictionaries({}, optional=members).filter(bool)


def blocks(revision: str) -> st.SearchStrategy[Block]:
    """Every block that a revision can express."""
    shared: dict[str, Any] = {"annotations": annotated(when=since(revision, R3))}
    if since(revision, R3) and revision != P:
        shared["meta"] = metas
    inside = st.sampled_from([{"text": "hello"}, {"blob": "AAEC"}, {"text": "", "mimeType": "text/plain"}])
    kinds: list[st.SearchStrategy[Any]] = [
        st.builds(Text, texts, **shared),
        st.builds(Image, encoded, st.just("image/png"), **shared),
        st.builds(EmbeddedResource, inside.map(lambda members: {"uri": "file:///a", **members}), **shared),
    ]
    if since(revision, R2):
        kinds.append(st.builds(Audio, encoded, st.just("audio/wav"), **shared))
    if since(revision, R3):
        more: dict[str, Any] = {name: st.just(UNSET) | texts for name in ("title", "description")}
        more["size"] = st.just(UNSET) | st.integers(0, 2**53)
        if since(revision, R4):
            more["icons"] = st.just(UNSET) | st.just(ICONS)
        kinds.append(st.builds(ResourceLink, st.just("file:///b"), texts, **more, **shared))
    return st.one_of(kinds)


def results(revision: str) -> st.SearchStrategy[ToolResult]:
    """Every result that a revision can express without loss."""
    if revision == R0:
        return bare_results()
    structured: st.SearchStrategy[Any] = st.just(UNSET)
    if revision == R5:
        structured |= values
    elif since(revision, R3):
        structured |= objects.filter(bool) if revision == P else objects
    made = st.builds(ToolResult, st.lists(blocks(revision), max_size=3), structured, st.booleans(), metas)
    if revision == P:  # no empty content there: a lone empty text stands for it
        made = made.filter(lambda each: each.content != [Text("")] and (each.content or each.structured is UNSET))
    return made


def bare_results() -> st.SearchStrategy[ToolResult]:
    """2024-10-07: a text, a value, or an error; anything else needs the marker that only our own peers would set."""

    def is_failure(value: Json) -> bool:
        return isinstance(value, dict) and isinstance(value.get("error"), str) and bool(value["error"])

    valued = values.filter(lambda each: not isinstance(each, str) and not is_failure(each)).map(
        lambda value: ToolResult([Text(jsonrpc.encode(value).decode())], value)
    )
    failed = st.builds(
        lambda text, data: ToolResult([Text(text)], is_error=True, data=data),
        texts.filter(bool),
        objects.filter(lambda each: "error" not in each),
    )
    return texts.map(lambda text: ToolResult([Text(text)])) | valued | failed


def strip_meta(message: Object) -> Object:
    """The message without what strangers wrote into `_meta`: anything may stand there."""
    copy: Object = json.loads(json.dumps(message))
    result = copy["result"]
    result.pop("_meta", None)
    for each in (*result.get("content", ()), *result.get("tools", ())):
        each.pop("_meta", None)
    return copy


def encode(revision: str, result: ToolResult, *, wraps: bool = False) -> Object:
    """A result as it stands in an answer of this revision; strict JSON, its schema, and no newer member."""
    answer = jsonrpc.response(1, REVISIONS[revision].encoders[CALL](result, wraps))
    message: Object = strict_json(answer)
    check_message(strip_meta(message), revision, CALL)
    out: Object = message["result"]
    return out


# 1: there and back


@requirement("GW-01", everywhere=True)
@pytest.mark.parametrize("revision", DIALECTS)
def test_a_result_comes_back_the_same_from_each_revision_that_can_express_it(revision: str) -> None:
    @few
    @given(results(revision))
    def there_and_back(result: ToolResult) -> None:
        assert REVISIONS[revision].read(encode(revision, result)) == result

    there_and_back()


schemas = st.sampled_from(
    [
        {"type": "object"},
        {"type": "object", "additionalProperties": False},
        {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"]},
        {"type": "object", "$defs": {"d": {"type": "number"}}, "properties": {"a": {"$ref": "#/$defs/d"}}},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "oneOf": [{"required": ["a"]}]},
    ]
)
hints = st.fixed_dictionaries(
    {}, optional={name: st.booleans() for name in ("readOnlyHint", "idempotentHint", "openWorldHint")}
)


def tools(revision: str) -> st.SearchStrategy[Tool]:
    """Every definition that a revision can express without loss."""
    members: dict[str, Any] = {
        "name": st.from_regex(r"[A-Za-z0-9_.-]{1,12}", fullmatch=True),
        "input_schema": schemas,
        "description": texts if revision == P else st.just(UNSET) | texts,
    }
    if since(revision, R2):
        members["annotations"] = st.just(UNSET) | hints
    if since(revision, R3):
        members["output_schema"] = st.just(UNSET) | schemas
        if revision != P:
            members |= {"title": st.just(UNSET) | texts, "meta": metas}
    if since(revision, R4):
        members["icons"] = st.just(UNSET) | st.just(ICONS)
    return st.builds(Tool, **members)


def listed(revision: str, tool: Tool) -> Object:
    """A definition as it stands in a list of this revision."""
    page = REVISIONS[revision].encoders["tools/list"]([REVISIONS[revision].tool(tool)], UNSET, 0, "private")
    message = strict_json(jsonrpc.response(1, page))
    check_message(strip_meta(message), revision, "tools/list")
    out: Object = message["result"]["tools"][0]
    return out


@requirement("GW-01", everywhere=True)
@pytest.mark.parametrize("revision", DIALECTS)
def test_a_definition_comes_back_the_same_from_each_revision_that_can_express_it(revision: str) -> None:
    @few
    @given(tools(revision))
    def there_and_back(tool: Tool) -> None:
        assert msgspec.convert(listed(revision, tool), Tool) == tool

    there_and_back()


# What cannot come back is named


@requirement("GW-04", everywhere=True)
@pytest.mark.parametrize("revision", [each for each in DIALECTS if each not in (R0, P)])
def test_what_does_not_come_back_is_named_as_a_loss_and_nothing_else_is(revision: str) -> None:
    dialect = REVISIONS[revision]

    @few
    @given(results(R5), st.booleans())
    def told(result: ToolResult, wraps: bool) -> None:
        assume(result.structured is UNSET or not wraps or not isinstance(result.structured, dict))
        comes_back = dialect.read(encode(revision, result, wraps=wraps)) == result
        lost = dialect.losses(result, wraps)
        assert comes_back == (not lost), lost

    told()


@requirement("GW-04", everywhere=True)
@pytest.mark.parametrize("revision", DIALECTS)
def test_what_a_definition_loses_is_named_and_nothing_else_is(revision: str) -> None:
    dialect = REVISIONS[revision]
    any_output = st.sampled_from([{"type": "array"}, {"type": ["string", "null"]}, {"anyOf": []}])

    @few
    @given(tools(R5), st.none() | any_output)
    def told(tool: Tool, output: Object | None) -> None:
        tool = tool if output is None else msgspec.structs.replace(tool, output_schema=output)
        assume(tool.title is UNSET or tool.annotations is UNSET or revision != R2)  # where it finds another place
        lost = dialect.definition_losses(tool)
        raw = listed(revision, tool)
        if revision == P and tool.description is UNSET:
            raw.pop("description")
        if revision == R2 and tool.title is not UNSET:
            assert raw.pop("annotations") == {"title": tool.title}
            raw["title"] = tool.title
        assert (msgspec.convert(raw, Tool) == tool) == (not lost), lost

    told()


# 2 and 3: wrapping, and the nothing of pocket


@requirement("GW-04", everywhere=True)
@given(values.filter(lambda value: not isinstance(value, dict)), st.sampled_from([R3, R4, P]))
def test_a_value_once_wrapped_is_never_unwrapped_and_never_wrapped_again(value: Json, older: str) -> None:
    result = ToolResult([Text(jsonrpc.encode(value).decode())], value)
    for _ in range(3):
        result = REVISIONS[older].read(encode(older, result))
        assert result.structured == {"result": value}
        result = REVISIONS[R5].read(encode(R5, result))
        assert result.structured == {"result": value}


@requirement("GW-04", everywhere=True)
@given(objects)
def test_an_object_is_wrapped_exactly_where_its_schema_was(value: Object) -> None:
    result = ToolResult([Text("x")], value)
    for older in (R3, R4, P):
        assert encode(older, result, wraps=True)["structuredContent"] == {"result": value}
        assert encode(older, result)["structuredContent"] == value
    assert encode(R5, result, wraps=True)["structuredContent"] == value


@requirement("GW-09", everywhere=True)
@given(results(P))
def test_pocket_says_every_member_and_an_empty_one_stands_for_none(result: ToolResult) -> None:
    raw = encode(P, result)
    assert {"content", "structuredContent", "isError"} <= set(raw)
    assert raw["content"]
    assert encode(P, REVISIONS[P].read(raw)) == raw
    assert raw["structuredContent"] or "structuredContent" not in encode(R5, REVISIONS[P].read(raw))


@requirement("GW-09", everywhere=True)
@pytest.mark.parametrize("revision", DIALECTS)
@pytest.mark.parametrize("cursor", [UNSET, "sealed.1"])
def test_only_pocket_has_a_cursor_at_the_end_of_a_list(revision: str, cursor: Any) -> None:
    page = REVISIONS[revision].encoders["tools/list"]([], cursor, 0, "private")
    end = {"nextCursor": ""} if revision == P else {}
    expected = end if cursor is UNSET else {"nextCursor": cursor}
    assert {name: value for name, value in page.items() if name == "nextCursor"} == expected


# 4: whatever the model holds, what is said fits the revision


def any_results() -> st.SearchStrategy[ToolResult]:
    needed: dict[str, st.SearchStrategy[Any]] = {"uri": st.just("file:///a"), "text": texts}
    notes = annotated().filter(lambda each: each is not UNSET)
    noted = st.fixed_dictionaries(needed, optional={"annotations": notes, "_meta": st.just({"example.org/r": 1})})
    content = st.lists(blocks(R5) | st.builds(EmbeddedResource, noted), max_size=4)
    data = st.dictionaries(names, values, max_size=2)
    return st.builds(
        ToolResult,
        content,
        st.just(UNSET) | values,
        st.booleans(),
        st.just(UNSET) | st.just({"example.org/x": 1}),
        data,
    )


@requirement("GW-04", everywhere=True)
@pytest.mark.parametrize("revision", DIALECTS)
def test_every_result_is_said_in_valid_words_of_the_revision(revision: str) -> None:
    @few
    @given(any_results(), st.booleans())
    def said(result: ToolResult, wraps: bool) -> None:
        raw = encode(revision, result, wraps=wraps)  # which is checked there
        if revision == R0:
            assert not result.is_error or raw["toolResult"]["error"] == result.text
        else:
            assert raw["isError"] is result.is_error

    said()


any_schemas = st.recursive(
    st.sampled_from(
        [
            {},
            {"type": "string"},
            {"type": "integer", "minimum": 2},
            {"type": "null"},
            {"enum": [1, "a", {"$ref": "#"}, {"properties": {"x": True}}]},
            {"const": {"$ref": "#/$defs/d", "x-mcp-header": "data"}},
            {"$ref": "#/$defs/d"},
            {"$ref": "#"},
            {"$ref": "#plain"},
            {"$id": "https://example.org/own", "$defs": {"d": {"type": "null"}}, "$ref": "#/$defs/d"},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda each: {"type": "array", "items": each}, inner),
        st.builds(
            lambda members: {"type": "object", "properties": members},
            st.dictionaries(st.sampled_from(["a", "$ref", "const", "properties"]), inner | st.booleans(), max_size=2),
        ),
        st.builds(lambda each: {"anyOf": each}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda each: {"not": each}, inner),
        st.builds(lambda each: {"type": "object", "additionalProperties": each}, inner),
    ),
    max_leaves=4,
)
small_values = st.recursive(
    st.sampled_from([None, 1, 2, 3, "a", "x", True, {"$ref": "#"}, {"$ref": "#/$defs/d", "x-mcp-header": "data"}]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["a", "$ref", "const", "properties", "z"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@requirement("GW-04", everywhere=True)
@pytest.mark.parametrize("revision", [R3, R4, P])
def test_a_wrapped_schema_accepts_what_it_accepted_before(revision: str) -> None:
    @settings(max_examples=100)
    @given(any_schemas, st.sampled_from([{"type": "integer"}, {"type": "string"}]), st.lists(small_values, max_size=6))
    def same(inner: Object, named: Object, candidates: list[Json]) -> None:
        whole = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$defs": {"d": named, "p": {"$anchor": "plain", "type": "boolean"}},
            "type": ["array", "string", "null"],
            "items": inner,
        }
        tool = Tool(name="t", description="d", input_schema={"type": "object"}, output_schema=whole)
        wrapped = listed(revision, tool)["outputSchema"]
        assert wrapped["$schema"] == whole["$schema"]
        assert (wrapped["type"], list(wrapped["properties"]), wrapped["required"]) == ("object", ["result"], ["result"])
        before, after = jsonschema_rs.validator_for(whole), jsonschema_rs.validator_for(wrapped)
        for value in (candidates, *candidates, None):
            assert before.is_valid(value) == after.is_valid({"result": value})

    same()


@requirement("GW-05", everywhere=True)
@pytest.mark.parametrize("revision", DIALECTS)
def test_an_input_schema_keeps_its_meaning_and_only_the_newest_its_headers(revision: str) -> None:
    @settings(max_examples=50)
    @given(any_schemas, st.lists(small_values, max_size=6))
    def same(inner: Object, candidates: list[Json]) -> None:
        header = {"type": "string", "x-mcp-header": "Region"}
        properties = {"a": inner, "region": header, "yes": True, "no": False}
        whole = {"type": "object", "$defs": {"d": {"$anchor": "plain"}}, "properties": properties}
        raw = listed(revision, Tool(name="t", description="d", input_schema=whole))["inputSchema"]
        if revision == R5:
            assert raw == whole
            return
        assert "x-mcp-header" not in raw["properties"]["region"]
        assert all(isinstance(each, dict) for each in raw["properties"].values())
        before, after = jsonschema_rs.validator_for(whole), jsonschema_rs.validator_for(raw)
        for value in candidates:
            for case in ({"a": value}, {"yes": value}, {"no": value}, {"region": value}):
                assert before.is_valid(case) == after.is_valid(case)

    same()


# 5: the kinds of failure, and their HTTP status

_HERE = (-32602, 200)
_RESULT = (0, 200)
FORMS: dict[Kind, dict[str, tuple[int, int]]] = {
    Kind.PARSE: dict.fromkeys(DIALECTS, (-32700, 400)),
    Kind.INVALID_REQUEST: dict.fromkeys(DIALECTS, (-32600, 400)),
    Kind.UNKNOWN_METHOD: {**dict.fromkeys(DIALECTS, (-32601, 200)), R5: (-32601, 404)},
    Kind.UNKNOWN_TOOL: dict.fromkeys(DIALECTS, _HERE),
    Kind.BAD_PARAMS: dict.fromkeys(DIALECTS, _HERE),
    Kind.BAD_ARGUMENTS: {**dict.fromkeys(DIALECTS, _HERE), R4: _RESULT, R5: _RESULT},
    Kind.NEEDS_CAPABILITY: {**dict.fromkeys(DIALECTS, _RESULT), R5: (-32021, 400)},
    Kind.THROTTLED: dict.fromkeys(DIALECTS, _RESULT),
    Kind.TIMEOUT: dict.fromkeys(DIALECTS, _RESULT),
    Kind.INTERNAL: dict.fromkeys(DIALECTS, (-32603, 200)),
}


@requirement("GW-15", everywhere=True)
@pytest.mark.parametrize("revision", DIALECTS)
@pytest.mark.parametrize("kind", FORMS)
def test_a_kind_of_failure_has_the_form_of_the_table(kind: Kind, revision: str) -> None:
    form = REVISIONS[revision].error_mappings[kind]
    assert (form.code, form.status) == FORMS[kind][revision]


# Through a gateway: whatever an upstream answers; 6: its state


class Bridge:
    """A gateway with its upstreams, in a loop of its own: properties are not coroutines."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._gateways = Gateways()
        self.gateway: Gateway = runner.run(self._gateways.get("http"))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def talk(self, stack: AsyncExitStack, client: str, upstream: str, capabilities: Object) -> Talk:
        wire = await stack.enter_async_context(self.gateway.wire(client, "memory", capabilities))
        return Talk(Pair(client, "memory", upstream, "http"), wire, self.gateway)

    def close(self) -> None:
        self.run(self._gateways.close())


@pytest.fixture(scope="module")
def bridge() -> Iterator[Bridge]:
    with asyncio.Runner() as runner:
        made = Bridge(runner)
        yield made
        made.close()


PICTURE = {"type": "image", "data": PNG, "mimeType": "image/png"}
NOTE = {"uri": "note://a", "text": "hello"}
SLOPPY: dict[str, tuple[Object, Object]] = {
    "null annotations": ({"type": "text", "text": "hi", "annotations": None}, {"text": "hi"}),
    "null meta": ({"type": "text", "text": "hi", "_meta": None}, {"text": "hi"}),
    "unknown member": ({"type": "text", "text": "hi", "x": 1}, {"text": "hi"}),
    "bad priority": ({"type": "text", "text": "hi", "annotations": {"priority": 3}}, {"text": "hi"}),
    "unknown annotation": ({"type": "text", "text": "hi", "annotations": {"other": 3}}, {"text": "hi"}),
    "null beside a picture": ({**PICTURE, "annotations": None, "_meta": None}, PICTURE),
    "null in a resource": ({"type": "resource", "resource": {**NOTE, "mimeType": None}}, {"resource": NOTE}),
    "null in a link": (
        {"type": "resource_link", "uri": "note://a", "name": "a", "description": None, "size": None, "title": None},
        {"uri": "note://a", "name": "a"},
    ),
}


@requirement("GW-15")
@pytest.mark.parametrize("case", SLOPPY)
def test_a_sloppy_optional_member_costs_nothing_but_itself(
    case: str, bridge: Bridge, request: pytest.FixtureRequest
) -> None:
    block, expected = SLOPPY[case]

    async def blocks_seen(client: str, upstream: str) -> list[Object]:
        async with AsyncExitStack() as stack:
            talk = await bridge.talk(stack, client, upstream, {})
            result = await talk.result("raw", {"result": {"content": [block], "isError": None, "_meta": None}})
            assert result["isError"] is False
            content: list[Object] = result["content"]
            return content

    for client in (R3, R4, R5, P):
        record_ran(request, client, "memory")
        for upstream in (R3, R4, R5, P):
            [seen] = bridge.run(blocks_seen(client, upstream))
            assert not seen.pop("annotations", None), "what is wrong is not passed on"
            assert seen == {"type": block["type"], **expected}


@requirement("GW-15")
@pytest.mark.parametrize("upstream", [R3, R4])
def test_null_is_no_structured_content_where_only_objects_are(
    upstream: str, bridge: Bridge, request: pytest.FixtureRequest
) -> None:
    raw: Object = {"content": [{"type": "text", "text": "hi"}], "structuredContent": None}

    async def seen(client: str) -> Object:
        async with AsyncExitStack() as stack:
            talk = await bridge.talk(stack, client, upstream, {})
            return await talk.result("raw", {"result": raw})

    for client in (R1, R4, R5):
        record_ran(request, client, "memory")
        result = bridge.run(seen(client))
        assert result["content"] == raw["content"]
        assert "structuredContent" not in result


SLOPPY_TOOLS: dict[str, tuple[Object, Object]] = {
    "null members": (
        {
            **dict.fromkeys(("title", "description", "outputSchema", "annotations", "icons", "_meta")),
            "inputSchema": {"type": "object", "properties": {}},
        },
        {"inputSchema": {"type": "object", "properties": {}}},
    ),
    "null schema": ({"inputSchema": None}, {"inputSchema": {"type": "object"}}),
    "no schema": ({}, {"inputSchema": {"type": "object"}}),
    "schema without a type": (
        {"inputSchema": {"properties": {}}},
        {"inputSchema": {"type": "object", "properties": {}}},
    ),
    "unknown member": ({"inputSchema": {"type": "object"}, "x-vendor": 1}, {"inputSchema": {"type": "object"}}),
    "unknown hint": (
        {"inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True, "costHint": "high"}},
        {"inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}},
    ),
}


@requirement("GW-01", "GW-17")
def test_a_sloppy_definition_is_listed_without_what_is_wrong_with_it(
    bridge: Bridge, request: pytest.FixtureRequest
) -> None:
    rigs = {upstream: bridge.gateway.rigs[upstream] for upstream in (R1, R4, R5)}
    for rig in rigs.values():
        for at, (raw, _) in enumerate(SLOPPY_TOOLS.values()):
            rig.command(do="offer", tool={"name": f"sloppy_{at}", **raw})

    async def listed_to(client: str) -> dict[str, Object]:
        gateway = Gateway(rigs)
        async with gateway.server.serving(), gateway.wire(client, "memory", {}) as wire:
            answer = await wire.request("tools/list")
            assert (await wire.call(f"{PREFIX[R4]}sloppy_0", {}))["result"]
            return {tool["name"]: tool for tool in answer["result"]["tools"]}

    try:
        for client in (R1, R4, R5):
            record_ran(request, client, "memory")
            tools = bridge.run(listed_to(client))
            for upstream in rigs:
                for at, (case, (_, expected)) in enumerate(SLOPPY_TOOLS.items()):
                    name = f"{PREFIX[upstream]}sloppy_{at}"
                    known = {key: value for key, value in expected.items() if key != "annotations" or client != R1}
                    assert tools[name] == {"name": name, **known}, f"{case} of {upstream} for {client}"
    finally:
        for rig in rigs.values():
            for at in range(len(SLOPPY_TOOLS)):
                rig.command(do="forget", name=f"sloppy_{at}")


known_notes = st.dictionaries(st.sampled_from(["audience", "priority", "lastModified"]), values)
sloppy_blocks = (
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}, optional={"x": values, "annotations": known_notes})
    | st.fixed_dictionaries({"type": st.sampled_from(["image", "audio"]), "data": texts, "mimeType": texts})
    | st.fixed_dictionaries({"type": st.just("resource_link"), "uri": texts, "name": texts}, optional={"size": values})
    | st.fixed_dictionaries({"type": st.just("resource"), "resource": values})
    | values
)
sloppy_results = st.fixed_dictionaries(
    {},
    optional={
        "content": st.lists(sloppy_blocks, max_size=3) | values,
        "structuredContent": values,
        "isError": st.booleans() | values,
        "resultType": st.just("complete"),
        "toolResult": values,
        "_meta": st.just({"example.org/x": 1}) | st.just({"io.handrail/refused": "denied"}),
        "nextCursor": st.just(""),
    },
)


@requirement("GW-15")
def test_whatever_an_upstream_answers_a_client_gets_a_valid_answer(
    bridge: Bridge, request: pytest.FixtureRequest
) -> None:
    @settings(max_examples=200)
    @given(st.sampled_from(DIALECTS), st.sampled_from(DIALECTS), sloppy_results)
    def answered(client: str, upstream: str, result: Object) -> None:
        async def call() -> Object:
            async with AsyncExitStack() as stack:
                talk = await bridge.talk(stack, client, upstream, {})
                return await talk.call("raw", {"result": result})  # the wire checks what it gets

        answer = bridge.run(call())
        record_ran(request, client, "memory")
        if result.get("isError") is True and "toolResult" not in result and "error" not in answer:
            shown = answer["result"]
            assert shown.get("isError") is True or shown["toolResult"]["error"] is not None

    answered()


states = st.text(st.characters(codec="utf-8"), max_size=200) | st.just("") | st.just("0" * 3000)


@requirement("GW-22")
@pytest.mark.parametrize("client", DIALECTS)
def test_the_state_of_a_question_comes_back_to_its_upstream_byte_by_byte(
    client: str, bridge: Bridge, request: pytest.FixtureRequest
) -> None:
    roots: Object = {"roots": [{"uri": "file:///work"}]}
    rig = bridge.gateway.rigs[R5]
    record_ran(request, client, "memory")

    @settings(max_examples=25)
    @given(states)
    def kept(state: str) -> None:
        async def call() -> None:
            async with AsyncExitStack() as stack:
                talk = await bridge.talk(stack, client, R5, {"roots": {}})
                seen = len(rig.heard(CALL))
                arguments = {"kind": "roots", "mark": "m", "state": state}
                answer = await talk.converse("ask", arguments, lambda method, params: roots)
                assert json.loads(text_of(answer)) == {"q": roots}
                sent = [event["message"]["params"] for event in rig.heard(CALL)[seen:]]
                assert [each.get("requestState") for each in sent] == [None, state]
                assert all(given != state for given in talk.states)

        bridge.run(call())

    kept()
