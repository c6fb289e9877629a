"""What `tools/list` shows, in pages and in every dialect: requirements section 3."""

from __future__ import annotations

import json
import logging
from hashlib import sha256
from typing import Any

import jsonschema
import pytest

import servers_lifecycle
from handrail import Server
from handrail.errors import SchemaError
from handrail.model import Principal
from handrail.protocol.seal import Seal
from requirements import requirement
from servers_lifecycle import DRESSED_INPUT, DRESSED_OUTPUT, ICON, NAMES, OUTPUT_VALUES, OUTPUTS, WRAPPED_TREE
from wires import MODERN, MemoryWire, Object, Open, Wire, everywhere, open_wire as open_wire, wire as wire, wire_to

Json = Any

DAY = 24 * 3600
OBJECT: Object = {"type": "object"}


class _Stranger(MemoryWire):
    """Another caller of the same server."""

    def __init__(self, revision: str, server: Server) -> None:
        super().__init__(revision, server)
        self._channel = server.connect(Principal("other"))


async def _page(wire: Wire, cursor: str | None = None) -> Object:
    result: Object = (await wire.request("tools/list", {} if cursor is None else {"cursor": cursor}))["result"]
    return result


async def _pages(wire: Wire) -> list[list[str]]:
    """The names on all pages, as a client that only follows cursors sees them."""
    pages = []
    cursor: str | None = None
    while True:
        page = await _page(wire, cursor)
        pages.append([tool["name"] for tool in page["tools"]])
        cursor = page.get("nextCursor")
        if cursor is None or (cursor == "" and wire.revision == "pocket"):
            return pages
        assert len(pages) < 100, "the pages do not end"


async def _tools(wire: Wire) -> dict[str, Object]:
    return {tool["name"]: tool for tool in (await _page(wire))["tools"]}


def _failed(answer: Object) -> bool:
    """Whether a call came to nothing, in whichever way the revision says so."""
    result = answer.get("result", {})
    bare = result.get("toolResult")
    return "error" in answer or result.get("isError") is True or (isinstance(bare, dict) and "error" in bare)


# What a tool looks like


_ALWAYS = {"name", "description", "inputSchema"}
_MEMBERS = {
    "2024-10-07": _ALWAYS,
    "2024-11-05": _ALWAYS,
    "2025-03-26": _ALWAYS | {"annotations"},
    "2025-06-18": _ALWAYS | {"annotations", "title", "outputSchema", "_meta"},
    "2025-11-25": _ALWAYS | {"annotations", "title", "outputSchema", "_meta", "icons"},
    "2026-07-28": _ALWAYS | {"annotations", "title", "outputSchema", "_meta", "icons"},
    "pocket": _ALWAYS | {"annotations", "outputSchema"},
}
_FULL: Object = {
    "name": "full",
    "title": "Full dress",
    "description": "Every member there is.",
    "annotations": {"readOnlyHint": True, "openWorldHint": False},
    "icons": [ICON],
    "_meta": {"example.org/x": 1},
}
# Booleans as property schemas and names of headers came with 2026-07-28. Values and names that look like them stay.
_OLDER_INPUT: Object = {
    "type": "object",
    "properties": {
        "region": {"type": "string"},
        "deep": {
            "type": "object",
            "properties": {"count": {"type": "integer"}, "x-mcp-header": {"type": "string"}, "free": {}},
        },
        "anything": {},
        "never": {"not": {}},
        "list": {"type": "array", "items": {"type": "object", "properties": {"free": {}}}},
        "value": {"const": {"properties": {"x": True}}},
        "named": {"$ref": "#/$defs/Named"},
    },
    "$defs": {"Named": {"$anchor": "named", "type": "object", "properties": {"never": {"not": {}}}}},
    "x-unknown": {"kept": True},
}
_OLDER_OUTPUT: Object = {"type": "object", "properties": {"region": {"type": "string"}, "free": {}}}


@requirement("SRV-301", "SRV-302", "SRV-318")
@everywhere()
async def test_a_tool_is_listed_with_the_members_its_revision_knows_and_no_other(open_wire: Open) -> None:
    wire = await open_wire("servers_lifecycle:dressed")
    newest = wire.revision == "2026-07-28"
    whole = {
        **_FULL,
        "inputSchema": DRESSED_INPUT if newest else _OLDER_INPUT,
        "outputSchema": DRESSED_OUTPUT if newest else _OLDER_OUTPUT,
    }
    expected = {name: value for name, value in whole.items() if name in _MEMBERS[wire.revision]}
    if wire.revision == "2025-03-26":  # the only place it has for a title
        expected["annotations"] = {**expected["annotations"], "title": "Full dress"}
    listed = await _tools(wire)
    assert listed["full"] == expected
    twice = listed["titled_twice"]
    if "annotations" in twice:
        assert twice["annotations"] == {"title": "Mine", "destructiveHint": False}
    # What the schemas say did not change on the way: the same arguments pass.
    for arguments, passes in [
        ({"anything": None, "deep": {"free": [1]}, "list": [{"free": 1}]}, True),
        ({"value": {"properties": {"x": True}}, "deep": {"x-mcp-header": "a"}}, True),
        ({"never": 1}, False),
        ({"named": {"never": 1}}, False),
        ({"deep": {"x-mcp-header": 5}}, False),
    ]:
        assert _failed(await wire.call("full", arguments)) is not passes, arguments


@requirement("SRV-303")
@everywhere("pocket")
async def test_pocket_gives_every_tool_a_description(open_wire: Open) -> None:
    wire = await open_wire("servers_lifecycle:dressed")
    descriptions = {name: tool["description"] for name, tool in (await _tools(wire)).items()}
    assert descriptions == {
        "full": "Every member there is.",
        "titled_twice": "Has a title in its annotations too.",
        "bare": "bare",
        "titled": "Only a title",
    }


@requirement("SRV-301", "SRV-305")
@everywhere("2025-11-25", "2026-07-28")
async def test_a_tool_without_parameters_says_that_it_takes_none(wire: Wire) -> None:
    listed = await _tools(wire)
    assert listed["nothing"] == {
        "name": "nothing",
        "description": "No arguments, no answer.",
        "inputSchema": {"type": "object", "additionalProperties": False},
    }
    assert _failed(await wire.call("nothing", {"surplus": 1}))


# Registration


_NO_ROOTS: list[Json] = [
    {},
    {"type": "array"},
    {"type": ["object", "null"]},
    {"properties": {"x": {"type": "string"}}},
    {"oneOf": [{"type": "object"}]},
    {"type": "object", "properties": []},
    {"type": "object", "required": "x"},
    {"type": "objekt"},
    {"type": "object", "properties": {"x": None}},
    [],
    [OBJECT],
    True,
    "object",
    5,
]


@requirement("SRV-304")
@pytest.mark.parametrize("schema", _NO_ROOTS, ids=lambda schema: json.dumps(schema))
def test_an_input_schema_that_is_not_an_object_schema_is_refused_at_registration(schema: Json) -> None:
    server = Server("strict")

    async def tool(**arguments: Any) -> str:
        return "never"

    with pytest.raises(SchemaError):
        server.add(tool, input_schema=schema)
    assert server.tools == []


@requirement("SRV-304", "SRV-306")
@everywhere()
async def test_a_running_server_refuses_bad_schemas_and_second_tools_of_a_name(open_wire: Open) -> None:
    wire = await open_wire("servers_lifecycle:grudging", fresh=True)
    assert not _failed(await wire.call("register", {"name": "twin"}))
    for name in ("twin", "register"):
        answer = await wire.call("register", {"name": name})
        assert _failed(answer)
        assert "exists already" in json.dumps(answer)
    for at, schema in enumerate(_NO_ROOTS):
        assert _failed(await wire.call("register", {"name": f"bad{at}", "schema": schema})), schema
    tools = (await _page(wire))["tools"]
    assert [tool["name"] for tool in tools] == ["register", "twin"]
    assert all(tool["inputSchema"]["type"] == "object" for tool in tools)
    assert not _failed(await wire.call("twin"))


@requirement("SRV-306")
def test_a_name_is_free_again_once_its_tool_is_gone() -> None:
    server = Server("strict")

    @server.tool
    async def one() -> str:
        return "first"

    server.disable("one")  # hidden is not gone
    with pytest.raises(SchemaError, match="exists already"):
        server.add(one)
    server.remove("one")
    server.add(one)
    assert [tool.name for tool in server.tools] == ["one"]


_GOOD_NAMES = ["g", "Get", "get", "a.b-c_D9", "getUser", "DATA_EXPORT_v2", "admin.tools.list", "n" * 128]
_ODD_NAMES = ["n" * 129, "a b", "größe", "x,y", "../etc", "🚀", " ", "a\n", "tool\u200b"]


@requirement("SRV-307")
@pytest.mark.parametrize(
    ("name", "warns"), [(name, False) for name in _GOOD_NAMES] + [(name, True) for name in _ODD_NAMES]
)
def test_a_name_outside_the_recommendation_is_taken_with_a_warning(
    name: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server("named")

    async def tool() -> None: ...

    with caplog.at_level(logging.WARNING, "handrail"):
        server.add(tool, name=name)
    assert [each.name for each in server.tools] == [name]
    assert [record.name for record in caplog.records] == ["handrail"] * warns
    assert not warns or repr(name) in caplog.text


@requirement("SRV-307")
@pytest.mark.parametrize("name", ["", 5])
def test_a_name_that_is_no_text_at_all_is_refused(name: Json) -> None:
    server = Server("named")

    async def tool() -> None: ...

    with pytest.raises((SchemaError, TypeError)):
        server.add(tool, name=name)
    assert server.tools == []


@requirement("SRV-307")
@everywhere("2025-11-25", "2026-07-28")
async def test_names_are_told_apart_by_case_and_every_tool_can_be_called_by_its_own(open_wire: Open) -> None:
    wire = await open_wire("servers_lifecycle:named")
    assert [tool["name"] for tool in (await _page(wire))["tools"]] == NAMES
    for name in NAMES:
        answer = await wire.call(name, {})
        assert answer["result"]["content"] == [{"type": "text", "text": f"this is {name}"}]
    for name in ("GET", "get ", "G", "n" * 127, "n" * 130):
        assert (await wire.call(name, {}))["error"]["code"] == -32602


# Pages


@requirement("SRV-308", "SRV-309", "SRV-310", "SRV-312")
@everywhere()
async def test_pages_hold_every_tool_once_in_their_order_and_come_to_an_end(open_wire: Open) -> None:
    wire = await open_wire("servers_lifecycle:ticking", fresh=True)
    names = ["advance", "asks", "drop", "tool0", "tool1", "tool2", "tool3", "tool4"]
    for _ in range(2):  # eight make four full pages, seven leave one half full
        pages = await _pages(wire)
        assert pages == [names[at : at + 2] for at in range(0, len(names), 2)]
        assert await _pages(wire) == pages
        first, last = await _page(wire), await _last(wire)
        assert isinstance(first["nextCursor"], str) and first["nextCursor"]
        assert last.get("nextCursor", "absent") == ("" if wire.revision == "pocket" else "absent")
        await wire.call("drop", {"name": names.pop()})


async def _last(wire: Wire) -> Object:
    page = await _page(wire)
    while page.get("nextCursor"):
        page = await _page(wire, page["nextCursor"])
    return page


@requirement("SRV-308", "SRV-309", "SRV-310")
@everywhere()
async def test_a_change_between_two_pages_neither_hides_nor_repeats_the_others(open_wire: Open) -> None:
    wire = await open_wire("servers_lifecycle:ticking", fresh=True)
    second = (await _page(wire))["nextCursor"]
    third = (await _page(wire, second))["nextCursor"]
    await wire.call("drop", {"name": "asks"})  # the one the cursor stands after
    assert [tool["name"] for tool in (await _page(wire, second))["tools"]] == ["drop", "tool0"]
    for name in ("tool1", "tool2", "tool3", "tool4"):
        await wire.call("drop", {"name": name})
    end = await _page(wire, third)
    assert end["tools"] == []
    assert end.get("nextCursor", "absent") == ("" if wire.revision == "pocket" else "absent")


@requirement("SRV-311")
@everywhere()
async def test_a_cursor_that_is_not_ours_or_too_old_is_refused(open_wire: Open) -> None:
    wire = await open_wire("servers_lifecycle:ticking", fresh=True, capabilities={"elicitation": {}})
    ours = (await _page(wire))["nextCursor"]
    other_key = Seal([sha256(b"other").digest()])
    foreign: list[Json] = [
        *(ours[:at] + ("A" if ours[at] != "A" else "B") + ours[at + 1 :] for at in range(len(ours))),
        *("", "x", "2", ours + "A", ours + "=", ours[:-1], ours[1:], ours.swapcase(), f" {ours}", "é", "\x00"),
        other_key.seal("tools/list", "local", 2, 2**40),
        *(None, 2, True, [ours], {"cursor": ours}),
    ]
    if wire.stateless:  # sealed with the right key, for another purpose
        foreign.append((await wire.call("asks"))["result"]["requestState"])
    for cursor in foreign:
        answer = await wire.request("tools/list", {"cursor": cursor})
        assert answer["error"]["code"] == -32602, cursor
    await wire.call("advance", {"seconds": DAY - 1})
    assert (await _page(wire, ours))["tools"]
    await wire.call("advance", {"seconds": 1})
    await wire.reopen(wire.revision)  # sessions over HTTP end after a day too (PD-30)
    assert (await wire.request("tools/list", {"cursor": ours}))["error"]["code"] == -32602
    assert (await _page(wire))["nextCursor"] != ours
    assert len(await _pages(wire)) == 4


@requirement("SRV-311")
@pytest.mark.parametrize("revision", ["2024-10-07", "2025-11-25", "pocket", "2026-07-28"])
async def test_a_cursor_is_good_for_its_holder_on_any_connection_and_for_nobody_else(revision: str) -> None:
    async with wire_to(revision, "memory", "paged") as mine:
        assert isinstance(mine, MemoryWire)
        await mine.open()
        cursor = (await _page(mine))["nextCursor"]
        again = MemoryWire(revision, mine.server)
        await again.open()
        assert (await _page(again, cursor))["tools"]
        theirs = _Stranger(revision, mine.server)
        await theirs.open()
        assert (await theirs.request("tools/list", {"cursor": cursor}))["error"]["code"] == -32602
        assert (await _page(theirs, (await _page(theirs))["nextCursor"]))["tools"]
        await again.close()
        await theirs.close()


@requirement("SRV-311")
async def test_a_cursor_outlives_the_process_that_made_it_only_where_the_key_does() -> None:
    def made(*keys: bytes) -> Server:
        server = Server("paged", page_size=1, keys=list(keys))
        for name in ("one", "two"):
            server.add(servers_lifecycle._giving(name), name=name, input_schema=OBJECT)
        return server

    old, new = sha256(b"old").digest(), sha256(b"new").digest()
    cursor = ""
    for server, accepted in [(made(old), True), (made(new, old), True), (made(new), False)]:
        async with server.serving():
            wire = MemoryWire("2025-11-25", server)
            await wire.open()
            cursor = cursor or (await _page(wire))["nextCursor"]
            answer = await wire.request("tools/list", {"cursor": cursor})
            assert ("result" in answer) is accepted
            await wire.close()


@requirement("SRV-312", "SRV-313")
@everywhere(*MODERN)
async def test_the_list_is_the_same_on_every_connection_and_after_whatever_was_asked(open_wire: Open) -> None:
    wire = await open_wire()
    first = await _page(wire)
    await wire.call("add", {"a": 1, "b": 2})
    await wire.call("crashes")
    await wire.reopen("2024-10-07")  # a handshake, and what it declares, change nothing
    await wire.request("tools/list")
    wire.revision, wire.capabilities = "2026-07-28", {"elicitation": {}, "sampling": {}}
    assert await _page(wire) == first
    assert await _page(await open_wire()) == first


@requirement("SRV-313", "SRV-314")
async def test_the_list_is_shared_between_callers_only_while_it_is_the_same_for_all() -> None:
    async with wire_to("2026-07-28", "memory") as mine:
        assert isinstance(mine, MemoryWire)
        theirs = _Stranger("2026-07-28", mine.server)
        page = await _page(mine)
        assert await _page(theirs) == page
        assert page["cacheScope"] == "public"
        await theirs.close()


@requirement("SRV-314")
@everywhere(*MODERN)
async def test_every_page_says_how_long_and_by_whom_it_may_be_kept(open_wire: Open) -> None:
    for variant, ttl, count in [("servers_lifecycle:ticking", 0, 4), ("paged", 60_000, 3)]:
        wire = await open_wire(variant)
        hints = []
        cursor: str | None = None
        for _ in range(count):
            page = await _page(wire, cursor)
            hints.append((page["ttlMs"], page["cacheScope"]))
            cursor = page.get("nextCursor")
        assert hints == [(ttl, "public")] * count
        assert type(hints[0][0]) is int
        assert cursor is None


@requirement("SRV-315")
@everywhere()
async def test_a_server_whose_tools_are_all_gone_answers_with_an_empty_list(open_wire: Open) -> None:
    wire = await open_wire("empty")
    page = await _page(wire)
    assert page["tools"] == []
    assert page.get("nextCursor", "absent") == ("" if wire.revision == "pocket" else "absent")
    opening = wire.welcome if not wire.stateless else (await wire.request("server/discover"))["result"]
    assert opening["capabilities"]["tools"] == {"listChanged": True}
    assert (await wire.call("echo"))["error"]["code"] == -32602  # the method is there, the tool is not


@requirement("SRV-316")
@everywhere("2024-10-07", "2025-11-25")
async def test_the_first_draft_gets_everything_on_one_page_unless_a_size_was_set(open_wire: Open) -> None:
    wire = await open_wire("servers_lifecycle:crowd")
    sizes = [len(page) for page in await _pages(wire)]
    assert sizes == ([1_200] if wire.revision == "2024-10-07" else [1_000, 200])
    assert [len(page) for page in await _pages(await open_wire("paged"))] == [2, 2, 1]


# Schemas


def _wrapped(schema: Object) -> Object:
    return {"type": "object", "properties": {"result": schema}, "required": ["result"]}


@requirement("SRV-317")
@everywhere("2025-06-18", "2025-11-25", "2026-07-28", "pocket")
async def test_output_that_is_no_object_is_wrapped_for_those_who_know_only_objects(open_wire: Open) -> None:
    wire = await open_wire("servers_lifecycle:wrapping")
    listed = {name: tool["outputSchema"] for name, tool in (await _tools(wire)).items()}
    if wire.stateless:
        assert listed == OUTPUTS
    else:
        assert listed == {**{name: _wrapped(schema) for name, schema in OUTPUTS.items()}, "tree": WRAPPED_TREE}
    for name, value in OUTPUT_VALUES.items():
        structured = (await wire.call(name))["result"]["structuredContent"]
        assert structured == (value if wire.stateless else {"result": value})
        jsonschema.Draft202012Validator(listed[name]).validate(structured)
    # The moved references still mean what they meant.
    broken: Json = {"next": {"$ref": 5}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(listed["tree"]).validate(broken if wire.stateless else {"result": broken})


_PAIR_TURNED = {"pair": ["one", 2]}
_CARD_ALONE = {"card": "1234"}
_DIALECTS: list[tuple[str, Object, bool]] = [
    ("items-07", {"pair": [1, "two"]}, True),
    ("items-07", _PAIR_TURNED, False),
    ("prefix-07", _PAIR_TURNED, True),  # unknown there
    ("prefix-none", {"pair": [1, "two"]}, True),
    ("prefix-none", _PAIR_TURNED, False),
    ("prefix-2020", _PAIR_TURNED, False),
    ("needs-07", {"card": "1234", "address": "here"}, True),
    ("needs-07", _CARD_ALONE, False),
    ("needs-none", _CARD_ALONE, True),  # not in 2020-12 any more
    ("needs-2020", _CARD_ALONE, True),
    ("required-none", _CARD_ALONE, False),
    ("required-07", _CARD_ALONE, True),  # not yet in draft-07
    ("items-none", {"pair": [1, "two"]}, True),
    ("items-none", _PAIR_TURNED, False),
]


@requirement("SRV-319")
@everywhere()
async def test_a_schema_means_what_its_dialect_says_for_input_and_output(open_wire: Open) -> None:
    wire = await open_wire("servers_lifecycle:dialects")
    for name, value, passes in _DIALECTS:
        for direction in ("in", "out"):
            answer = await wire.call(f"{direction}-{name}", value)
            assert _failed(answer) is not passes, (direction, name, value, answer)


@requirement("SRV-319")
@pytest.mark.parametrize("where", ["input_schema", "output_schema"])
def test_a_schema_that_is_invalid_in_the_dialect_it_names_is_refused(where: str) -> None:
    server = Server("strict")

    async def tool(**arguments: Any) -> Json: ...

    pair = {"pair": {"items": [{"type": "integer"}]}}
    for schema in (
        {"$schema": servers_lifecycle.DRAFT_2020_12, "type": "object", "properties": pair},
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "object"},
        {"$schema": "https://example.org/mine", "type": "object"},
        {"$schema": 7, "type": "object"},
    ):
        options: Any = {"input_schema": OBJECT, where: schema}
        with pytest.raises(SchemaError, match=f"tool.*{where}"):
            server.add(tool, **options)
