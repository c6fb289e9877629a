"""The seed texts, example by example: what they print is what goes over the wire, and what comes is understood."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

import seed_servers
import seeds_data as data
from handrail import Text, ToolResult
from handrail.errors import RemoteProtocolError
from handrail.model import UNSET
from handrail.testing import Peer
from requirements import requirement
from script import Script
from seeds_data import (
    CAPABILITIES,
    CONTENT,
    DEFINITIONS,
    EMPTY_SCHEMAS,
    EXCHANGES,
    FAILURES,
    NAMES,
    NOTICES,
    PAGES,
    REVISION,
    live,
)
from shared_texts import NO_SEEDS, SEEDS
from wires import TRANSPORTS, Wire, shared_http, wire_to

Object = dict[str, Any]
Ran = Callable[[str, str], None]
Connect = Callable[..., AbstractAsyncContextManager[Wire]]


transports = pytest.mark.parametrize("transport", TRANSPORTS)


def each(examples: list[Any], *, proving: bool = False) -> pytest.MarkDecorator:
    """One test an example; `proving` also tags it with the rules it shows."""

    def name(example: Any) -> str:
        said = getattr(example, "name", getattr(example, "tool", getattr(example, "server", "")))
        return f"{example.seed} {said}".strip()

    def marks(example: Any) -> list[pytest.MarkDecorator]:
        return [requirement(*example.proves)] if proving else []

    return pytest.mark.parametrize(
        "example", [pytest.param(each, id=name(each), marks=marks(each)) for each in examples]
    )


async def opened(wire: Wire) -> Wire:
    """Shake hands, with an id no seed uses."""
    params = {"protocolVersion": wire.revision, "capabilities": {}, "clientInfo": {"name": "seeds", "version": "1"}}
    answer = await exchange(wire, {"jsonrpc": "2.0", "id": "hello", "method": "initialize", "params": params})
    wire.welcome = answer["result"]
    await wire.notify("notifications/initialized")
    return wire


async def exchange(wire: Wire, request: Object) -> Object:
    """Send a request as it is, and give the whole answer."""
    await wire.send(request)
    return await wire.answer(request["id"])


@pytest.fixture
def connect(request: pytest.FixtureRequest, transport: str) -> Connect:
    """`connect(revision, server)`: a wire to a server of `seed_servers.py`, not yet opened."""

    def connected(revision: str, server: str, *, fresh: bool = False) -> AbstractAsyncContextManager[Wire]:
        variant = f"seed_servers:{server}"
        if transport == "http" and not fresh:
            return shared_http(request, revision, variant)
        return wire_to(revision, transport, variant)

    return connected


# As a server: the request as printed gives the response as printed.


@transports
@each(CAPABILITIES)
@requirement("SRV-105", "SRV-106")
async def test_the_declared_capability_is_the_printed_one(
    example: data.Capability, connect: Connect, transport: str, ran: Ran
) -> None:
    revision = REVISION[example.seed]
    async with connect(revision, example.server) as wire:
        await opened(wire)
        ran(revision, transport)
        assert {"tools": wire.welcome["capabilities"]["tools"]} == example.capabilities


@transports
@each(PAGES)
@requirement("SRV-301", "SRV-308")
async def test_the_printed_list_request_gives_the_printed_page(
    example: data.Page, connect: Connect, transport: str, ran: Ran
) -> None:
    revision = REVISION[example.seed]
    async with connect(revision, example.server) as wire:
        await opened(wire)
        ran(revision, transport)
        request, expected = dict(example.request), json.loads(json.dumps(example.response))
        if "params" in request:
            assert request["params"] == {"cursor": data.CURSOR}
            first = await exchange(wire, {"jsonrpc": "2.0", "id": "first", "method": "tools/list"})
            request["params"] = {"cursor": first["result"]["nextCursor"]}
        answer = await exchange(wire, request)
        if "nextCursor" in expected["result"]:
            cursor = answer["result"]["nextCursor"]
            assert isinstance(cursor, str) and cursor and cursor != request["params"]["cursor"]
            following = await exchange(
                wire, {"jsonrpc": "2.0", "id": "next", "method": "tools/list", "params": {"cursor": cursor}}
            )
            assert [tool["name"] for tool in following["result"]["tools"]] == ["last"]
            assert "nextCursor" not in following["result"]
            expected["result"]["nextCursor"] = cursor
        assert answer == expected


@transports
@each(DEFINITIONS, proving=True)
async def test_a_tool_is_listed_as_printed(
    example: data.Definition, connect: Connect, transport: str, ran: Ran
) -> None:
    revision = REVISION[example.seed]
    async with connect(revision, example.server) as wire:
        await opened(wire)
        ran(revision, transport)
        answer = await wire.request("tools/list")
        listed = {tool["name"]: tool for tool in answer["result"]["tools"]}
        assert listed[example.printed["name"]] == example.printed


@transports
@each(EXCHANGES, proving=True)
async def test_the_printed_call_gives_the_printed_result(
    example: data.Exchange, connect: Connect, transport: str, ran: Ran
) -> None:
    revision = REVISION[example.seed]
    async with connect(revision, example.server) as wire:
        await opened(wire)
        ran(revision, transport)
        answer = await exchange(wire, example.request)
        expected = example.response
        if example.parsed:
            answer, expected = parsed(answer), parsed(expected)
        assert answer == expected


def parsed(answer: Object) -> Object:
    """With the text read as JSON, and `isError` written out."""
    result = answer["result"]
    content = [{**block, "text": json.loads(block["text"])} for block in result["content"]]
    return {**answer, "result": {"isError": False, **result, "content": content}}


@transports
@each(FAILURES, proving=True)
async def test_a_wrong_call_gives_the_printed_error(
    example: data.Failure, connect: Connect, transport: str, ran: Ran
) -> None:
    revision = REVISION[example.seed]
    async with connect(revision, example.server) as wire:
        await opened(wire)
        ran(revision, transport)
        assert await exchange(wire, example.request) == example.response


@transports
@each(CONTENT)
@requirement("SRV-402")
async def test_a_content_block_is_written_as_printed(
    example: data.Content, connect: Connect, transport: str, ran: Ran
) -> None:
    revision = REVISION[example.seed]
    async with connect(revision, f"content_{example.seed}") as wire:
        await opened(wire)
        ran(revision, transport)
        answer = await exchange(wire, data.call(2, example.tool))
        assert answer == {
            "jsonrpc": "2.0",
            "id": 2,
            "result": {"content": [live(example.printed)], "isError": False},
        }


@transports
@each(NOTICES)
@requirement("SRV-510")
async def test_a_change_of_the_list_is_told_as_printed(
    example: data.Notice, connect: Connect, transport: str, ran: Ran
) -> None:
    revision = REVISION[example.seed]
    async with connect(revision, "changing", fresh=True) as wire:
        await opened(wire)
        ran(revision, transport)
        assert "result" in await wire.call("grow")
        assert await wire.notice("notifications/tools/list_changed") == example.printed
        listed = await wire.request("tools/list")
        assert [tool["name"] for tool in listed["result"]["tools"]] == ["grow", "grown"]


@transports
async def test_the_empty_capability_of_seed_002_means_no_notices(connect: Connect, transport: str, ran: Ran) -> None:
    async with connect("2024-10-07", "changing_quietly", fresh=True) as wire:
        await opened(wire)
        ran("2024-10-07", transport)
        assert wire.welcome["capabilities"]["tools"] == {}
        assert "result" in await wire.call("grow")
        assert await wire.silent()


# Seed 001, beyond its messages.


@transports
@each(EMPTY_SCHEMAS)
async def test_a_schema_for_no_parameters_is_kept_as_printed(
    example: data.EmptySchema, connect: Connect, transport: str, ran: Ran
) -> None:
    revision = REVISION[example.seed]
    async with connect(revision, "schemas") as wire:
        await opened(wire)
        ran(revision, transport)
        answer = await wire.request("tools/list")
        listed = {tool["name"]: tool["inputSchema"] for tool in answer["result"]["tools"]}
        assert listed[example.tool] == example.printed
        called = await wire.call(example.tool, {"a": 1})
        assert called["result"]["isError"] is (example.printed.get("additionalProperties") is False)


@transports
@pytest.mark.parametrize("server", ["schemas", "draft07"])
@requirement("SRV-319")
async def test_calculate_sum_works_in_either_dialect(server: str, connect: Connect, transport: str, ran: Ran) -> None:
    async with connect("2025-11-25", server) as wire:
        await opened(wire)
        ran("2025-11-25", transport)
        answer = await wire.call("calculate_sum", {"a": 1, "b": 2.5})
        assert answer["result"] == {"content": [{"type": "text", "text": "3.5"}], "isError": False}
        answer = await wire.call("calculate_sum", {"a": 1, "b": "2.5"})
        assert answer["result"]["isError"] is True


@transports
@requirement("SRV-307")
async def test_names_within_and_beyond_the_limits_work(connect: Connect, transport: str, ran: Ran) -> None:
    async with connect("2025-11-25", "names") as wire:
        await opened(wire)
        ran("2025-11-25", transport)
        names = [*NAMES, "x", "y" * 128, "z" * 129]
        listed = await wire.request("tools/list")
        assert [tool["name"] for tool in listed["result"]["tools"]] == names
        for name in names:
            answer = await wire.call(name)
            assert answer["result"]["content"] == [{"type": "text", "text": name}]
            answer = await wire.call(name.swapcase())
            assert answer["error"]["code"] == -32602


@requirement("SRV-307")
def test_only_the_name_of_129_characters_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "handrail"):
        seed_servers.names()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "z" * 129 in caplog.text


# Seed 004, beyond its messages.


@transports
@requirement("SRV-404", "SRV-414")
async def test_a_pocket_tool_that_fails_says_so(connect: Connect, transport: str, ran: Ran) -> None:
    async with connect("pocket", "pocket") as wire:
        await opened(wire)
        ran("pocket", transport)
        assert await exchange(wire, data.call(7, "fails")) == {
            "jsonrpc": "2.0",
            "id": 7,
            "result": {
                "content": [{"type": "text", "text": "It ran, and failed."}],
                "structuredContent": {},
                "isError": True,
            },
        }
        error = await exchange(wire, data.call(8, "no_such_tool"))
        assert error["error"]["code"] == -32602


@transports
@requirement("SRV-310")
async def test_a_pocket_list_ends_with_an_empty_cursor(connect: Connect, transport: str, ran: Ran) -> None:
    async with connect("pocket", "pocket_pages") as wire:
        await opened(wire)
        ran("pocket", transport)
        first = (await wire.request("tools/list"))["result"]
        assert first["nextCursor"]
        second = (await wire.request("tools/list", {"cursor": first["nextCursor"]}))["result"]
        assert second["nextCursor"] == ""
        assert [tool["name"] for page in (first, second) for tool in page["tools"]] == ["one", "two"]


# As a client: a script says what is printed, and our peer understands it.


@each(CAPABILITIES)
async def test_a_printed_capability_is_understood(example: data.Capability) -> None:
    revision = REVISION[example.seed]
    result = {
        "protocolVersion": revision,
        "capabilities": example.capabilities,
        "serverInfo": {"name": "script", "version": "0"},
    }
    async with Peer(Script({"initialize": [{"jsonrpc": "2.0", "result": result}]}), revision=revision) as peer:
        assert peer.welcome["capabilities"] == example.capabilities


@each(PAGES)
async def test_a_printed_page_is_understood(example: data.Page) -> None:
    end = {"jsonrpc": "2.0", "result": {"tools": []}}
    script = Script({"tools/list": [example.response, end]})
    async with Peer(script, revision=REVISION[example.seed]) as peer:
        assert await peer.tools() == example.tools
    cursors = [each.get("params", {}).get("cursor") for each in script.received if each["method"] == "tools/list"]
    assert cursors == ([None, data.NEXT_CURSOR] if "nextCursor" in example.response["result"] else [None])


@each(DEFINITIONS)
async def test_a_printed_tool_is_understood(example: data.Definition) -> None:
    script = Script({"tools/list": [{"jsonrpc": "2.0", "result": {"tools": [example.printed]}}]})
    async with Peer(script, revision=REVISION[example.seed]) as peer:
        assert await peer.tools() == [example.tool]


@each(EXCHANGES)
async def test_a_printed_result_is_understood(example: data.Exchange) -> None:
    script = Script({"tools/call": [example.response]})
    params = example.request["params"]
    async with Peer(script, revision=REVISION[example.seed]) as peer:
        assert await peer.call(params["name"], params["arguments"]) == example.means
    # What the peer asked is the printed request, but for the id.
    asked = script.received[-1]
    assert {**asked, "id": example.request["id"]} == example.request


@each(FAILURES)
async def test_a_printed_error_is_understood(example: data.Failure) -> None:
    script = Script({"tools/call": [example.response]})
    params = example.request["params"]
    async with Peer(script, revision=REVISION[example.seed]) as peer:
        with pytest.raises(RemoteProtocolError) as caught:
            await peer.call(params["name"], params["arguments"])
    error = example.response["error"]
    assert (caught.value.code, str(caught.value), caught.value.data) == (-32602, error["message"], error.get("data"))


@each(CONTENT)
async def test_a_printed_block_is_understood(example: data.Content) -> None:
    result = {"content": [live(example.printed)]}
    script = Script({"tools/call": [{"jsonrpc": "2.0", "result": result}]})
    async with Peer(script, revision=REVISION[example.seed]) as peer:
        assert await peer.call(example.tool) == ToolResult([example.means])


@each(NOTICES)
async def test_a_printed_notice_is_understood(example: data.Notice) -> None:
    script = Script({}, notices=[example.printed])
    async with Peer(script, revision=REVISION[example.seed]) as peer:
        assert await peer.notice("notifications/tools/list_changed") == example.printed


async def test_the_peer_reads_the_ends_of_a_pocket_list() -> None:
    tool = {"name": "one", "description": "One", "inputSchema": {"type": "object"}}
    script = Script({"tools/list": [{"jsonrpc": "2.0", "result": {"tools": [tool], "nextCursor": ""}}]})
    async with Peer(script, revision="pocket") as peer:
        assert [tool.name for tool in await peer.tools()] == ["one"]


async def test_the_peer_reads_a_pocket_result_that_failed() -> None:
    result = {**data.POCKET_RESULT, "isError": True}
    async with Peer(Script({"tools/call": [{"jsonrpc": "2.0", "result": result}]}), revision="pocket") as peer:
        read = await peer.call("<tool-name>", {})
    assert read == ToolResult([Text("…")], structured=UNSET, is_error=True)


# Nothing forgotten, nothing made up.

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|…|[{}]|[^"{}…/]+|/', re.DOTALL)


def examples_in(text: str) -> Iterator[Object]:
    """Every outermost JSON object of a text, read past comments, `…` and newlines inside strings."""
    at = 0
    while (start := text.find("{", at)) >= 0:
        kept, depth = [], 0
        for token in _TOKEN.finditer(text, start):
            part = token[0]
            depth += {"{": 1, "}": -1}.get(part, 0)
            if part != "…" and not part.startswith("//"):
                kept.append(part)
            at = token.end()
            if depth == 0:
                break
        yield json.loads("".join(kept), strict=False)


@pytest.mark.parametrize("seed", list(data.FILES))
def test_every_object_a_seed_prints_is_an_example_here(seed: str) -> None:
    if SEEDS is None:
        pytest.skip(NO_SEEDS)
    text = (SEEDS / data.FILES[seed]).read_text("utf-8")

    def counted(values: list[Object]) -> Counter[str]:
        return Counter(json.dumps(value, sort_keys=True, ensure_ascii=False) for value in values)

    found, ours = counted(list(examples_in(text))), counted(data.printed(seed))
    assert found - ours == Counter(), "printed by the seed, missing here"
    assert ours - found == Counter(), "not printed by the seed"
    if seed == "001":
        assert all(f"- {name}\n" in text for name in NAMES)


def test_the_reader_of_seeds_sees_what_is_there() -> None:
    text = 'a { "b": "x\ny", // no\n "c": { … } } and {"d": "// {…}"}, {}'
    assert list(examples_in(text)) == [{"b": "x\ny", "c": {}}, {"d": "// {…}"}, {}]
