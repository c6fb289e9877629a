"""The client and the five seeds: their answers are understood, and what is asked is what they print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import seeds_data as data
from clients import OpenRig, open_rig
from handrail import ToolResult
from handrail.errors import RemoteProtocolError
from requirements import requirement
from rigs import Object, Rig, Script, ordinary
from seeds_data import CONTENT, DEFINITIONS, EXCHANGES, FAILURES, NOTICES, PAGES, REVISION, live

__all__ = ["open_rig"]


def each(examples: Sequence[Any]) -> pytest.MarkDecorator:
    places = [(example, transport) for example in examples for transport in ("memory", "http")]
    names = [f"{example.seed}-{number // 2}-{transport}" for number, (example, transport) in enumerate(places)]
    return pytest.mark.parametrize(("example", "transport"), places, ids=names)


def saying(method: str, *answers: Object) -> Script:
    """A server that gives these answers to a method, one after the other, with the ids that were asked."""
    rest = [dict(answer) for answer in answers]

    def script(rig: Rig, message: Object) -> None:
        if message.get("method") == method and rest:
            rig.say({**live(rest.pop(0)), "id": message["id"]})
        else:
            ordinary(rig, message)

    return script


def without_meta(message: Object, ident: int) -> Object:
    """A request as the seeds print it."""
    params = {name: value for name, value in message.get("params", {}).items() if name != "_meta"}
    return {**message, "id": ident, "params": params}


@requirement("CLI-18")
@each(PAGES)
async def test_a_printed_page_is_read(example: data.Page, transport: str, open_rig: OpenRig) -> None:
    script = saying("tools/list", example.response, {"jsonrpc": "2.0", "result": {"tools": []}})
    async with open_rig(script, REVISION[example.seed], transport) as (client, heard):
        tools = await client.tools()
        assert [tool.raw for tool in tools] == example.response["result"]["tools"]
        follows = "nextCursor" in example.response["result"]
        asked = [dict(message.get("params", {})) for message in heard.asked("tools/list")]
        assert asked == ([{}, {"cursor": data.NEXT_CURSOR}] if follows else [{}])


@each(DEFINITIONS)
async def test_a_printed_tool_is_read(example: data.Definition, transport: str, open_rig: OpenRig) -> None:
    script = saying("tools/list", {"jsonrpc": "2.0", "result": {"tools": [example.printed]}})
    async with open_rig(script, REVISION[example.seed], transport) as (client, _):
        (tool,) = await client.tools()
        assert tool.raw == example.printed
        assert tool.input_schema == example.tool.input_schema


@each(EXCHANGES)
async def test_a_printed_call_is_made_and_its_result_read(
    example: data.Exchange, transport: str, open_rig: OpenRig
) -> None:
    params = example.request["params"]
    script = saying("tools/call", example.response)
    async with open_rig(script, REVISION[example.seed], transport) as (client, heard):
        result = await client.call(params["name"], params["arguments"])
        assert result.result == example.means
        (asked,) = heard.asked("tools/call")
        assert without_meta(asked, example.request["id"]) == example.request


@each(FAILURES)
async def test_a_printed_error_is_raised(example: data.Failure, transport: str, open_rig: OpenRig) -> None:
    params, error = example.request["params"], example.response["error"]
    script = saying("tools/call", example.response)
    async with open_rig(script, REVISION[example.seed], transport) as (client, heard):
        with pytest.raises(RemoteProtocolError) as caught:
            await client.call(params["name"], params["arguments"])
        assert (caught.value.code, caught.value.data) == (error["code"], error.get("data"))
        assert caught.value.text.startswith(error["message"])
        assert error.get("data", {}).get("reason", "") in str(caught.value)
        (asked,) = heard.asked("tools/call")
        assert without_meta(asked, example.request["id"]) == example.request


@each(CONTENT)
async def test_a_printed_block_is_read(example: data.Content, transport: str, open_rig: OpenRig) -> None:
    script = saying("tools/call", {"jsonrpc": "2.0", "result": {"content": [example.printed], "isError": False}})
    async with open_rig(script, REVISION[example.seed], transport) as (client, _):
        result = await client.call(example.tool)
        assert result.result == ToolResult([example.means]) and not result.problems


@pytest.mark.parametrize("example", NOTICES, ids=lambda example: example.seed)
async def test_a_printed_notice_makes_the_list_stale(example: data.Notice, open_rig: OpenRig) -> None:
    def script(rig: Rig, message: Object) -> None:
        if message.get("method") == "tools/call":
            rig.say(example.printed)
        ordinary(rig, message)

    async with open_rig(script, REVISION[example.seed], "memory") as (client, heard):
        await client.tools()
        await client.call("echo", {})
        await client.tools()
        assert len(heard.asked("tools/list")) == 2
