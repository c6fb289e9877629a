"""What was cut can be read on, all of it, by whoever was given the beginning and by nobody else (P-25)."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.json import decode

from cli_runs import client
from clients import ALL, R5
from handrail import Call, Principal, Server, Text, ToolResult
from handrail.engine import results as reading_on
from handrail.engine.pipeline import Handler
from handrail.guards.limits import Rates, ToolRate
from handrail.guards.policy import Policy, Rule
from handrail.guards.sanitize import Sanitize, Sanitizer, ToolSanitize
from handrail.model import RISK
from handrail.revisions import REVISIONS
from handrail.stores.sqlite import SqliteStore
from handrail.testing import Peer
from requirements import requirement
from servers_reading import CAP, TEXT
from wires import Open
from wires_shared import everywhere, open_wire, processes

__all__ = ["open_wire", "processes"]  # fixtures

Object = dict[str, Any]
Read = Callable[[str, Object], Awaitable[str]]

CUT = re.compile(r'\[… [^\n]* shown; call read_more with handle "([0-9a-f]{32})"(?: and offset (\d+))? for the rest\]')
ALICE, BOB = Principal("alice"), Principal("bob")


async def followed(text: str, read: Read) -> str:
    """The whole text, of a result that was cut at its end; each part is within the cap."""
    while True:
        whole, _, last = text.rpartition("\n")
        found = CUT.fullmatch(last)
        if found is None:
            return text
        more = await read("read_more", {"handle": found[1], "offset": int(found[2] or 0)})
        assert len(more) <= CAP
        text = whole + more


def reader(peer: Peer) -> Read:
    async def read(name: str, arguments: Object) -> str:
        result = await peer.call(name, arguments)
        assert not result.is_error, result.text
        return result.text

    return read


async def refusal(peer: Peer, arguments: Object) -> str:
    return str(await peer.request("tools/call", {"name": "read_more", "arguments": arguments}))


def library(text: str = TEXT, /, *, name: str = "library", **options: Any) -> Server:
    server = Server(name, **{"sanitize": Sanitize(max_text=CAP), **options})

    @server.tool
    async def book() -> str:
        return text

    return server


async def handle_in(peer: Peer, name: str = "book") -> str:
    found = CUT.search((await peer.call(name)).text)
    assert found is not None
    return found[1]


async def unknown(peer: Peer, handle: str) -> bool:
    answer = await peer.call("read_more", {"handle": handle})
    return answer.is_error and answer.text.startswith("Unknown handle")


@everywhere()
async def test_the_whole_text_is_read_on_everywhere(open_wire: Open) -> None:
    wire = await open_wire("servers_reading:library")

    async def read(name: str, arguments: Object) -> str:
        answer = await wire.call(name, arguments)
        return REVISIONS[wire.revision].read(answer["result"]).text

    listed = (await wire.request("tools/list"))["result"]["tools"]
    assert [each["name"] for each in listed] == ["book", "read_more"]
    assert await followed(await read("book", {}), read) == TEXT


@settings(max_examples=40)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=40), st.integers(1, 60))
def test_whatever_the_text_what_is_read_on_is_what_was_cleaned(pieces: list[str], times: int) -> None:
    text = "".join(pieces) * times
    cleaned, _ = Sanitizer(Sanitize()).clean("book", ToolResult([Text(text)]))

    async def run() -> str:
        async with Peer(library(text)) as peer:
            read = reader(peer)
            return await followed(await read("book", {}), read)

    assert [Text(asyncio.run(run()))] == cleaned.content


async def test_several_texts_and_data_are_read_on_as_one() -> None:
    server = Server("library", sanitize=Sanitize(max_result=CAP))
    texts = [f"{number}" * 700 for number in range(4)]
    data = {"lines": TEXT.splitlines()}

    @server.tool
    async def pages() -> ToolResult:
        return ToolResult([Text(each) for each in texts])

    @server.tool(output_schema=None)
    async def table() -> Object:
        return data

    async with Peer(server) as peer:
        read = reader(peer)
        assert await followed(await read("pages", {}), read) == "\n".join(texts)
        why, _, beginning = (await peer.call("table")).text.partition("\n")
        assert "of JSON" in why and decode(await followed(beginning, read)) == data


async def test_what_a_tool_may_say_is_in_its_rest_too() -> None:
    text = "\x1b[31mred\x1b[0m\r" * 500
    rules = Sanitize(tools={"book": ToolSanitize(controls="keep", max_text=CAP)})
    async with Peer(library(text, sanitize=rules)) as peer:
        read = reader(peer)
        assert await followed(await read("book", {}), read) == text


async def test_what_middleware_makes_of_a_result_is_cut_and_of_a_rest_is_cleaned() -> None:
    server = library("short")

    @server.middleware
    async def more(call: Call, following: Handler) -> ToolResult:
        if call.arguments.get("handle") == "mine":  # which it answers by itself
            return ToolResult([Text("\x1b[31mred")])
        result = await following(call)
        return ToolResult([Text(TEXT if call.name == "book" else f"\x1b[2J{result.text}")])

    async with Peer(server) as peer:
        read = reader(peer)
        assert await followed(await read("book", {}), read) == TEXT
        assert await read("read_more", {"handle": "mine"}) == "red"


@requirement("P-25")
@pytest.mark.parametrize("revision", ALL)
async def test_p25_a_foreign_handle_looks_unknown(revision: str) -> None:
    server = library()
    async with (
        Peer(server, revision=revision, principal=ALICE) as alice,
        Peer(server, revision=revision, principal=BOB) as bob,
    ):
        hers, his = await handle_in(alice), await handle_in(bob)
        asked = [{"name": "read_more", "arguments": {"handle": each}} for each in (hers, "0" * 32, his + "0", "")]
        foreign, *others = [(await bob.request("tools/call", params))["result"] for params in asked]
        assert foreign == others[0] == others[1] == others[2] and "Unknown handle" in str(foreign)
        for peer, handle in ((alice, hers), (bob, his)):
            assert not await unknown(peer, handle)


@requirement("P-25")
@pytest.mark.parametrize("kept", ["memory", "store", "audit"])
async def test_p25_a_handle_expires(kept: str, tmp_path: Path) -> None:
    now = 1_000_000.0
    store = SqliteStore(tmp_path / "state.db", clock=lambda: now)
    options: dict[str, Object] = {"memory": {}, "store": {"store": store}, "audit": {"audit": tmp_path / "audit.db"}}
    server = library(**options[kept])
    server.engine.clock = lambda: now
    async with Peer(server) as peer:
        handle = await handle_in(peer)
        now += 899
        assert not await unknown(peer, handle)
        now += 2
        assert await unknown(peer, handle)
    await store.close()


@requirement("P-25")
async def test_p25_processes_that_share_a_store_share_handles_and_other_servers_do_not(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    one, two = library(store=store), library(store=store)
    other = library(store=store, name="other")
    async with Peer(one) as at_one, Peer(two) as at_two, Peer(other) as at_other:
        read, read_on = reader(at_one), reader(at_two)
        assert await followed(await read("book", {}), read_on) == TEXT
        assert await unknown(at_other, await handle_in(at_one))
    await store.close()


@pytest.mark.parametrize(("limit", "value", "kept"), [("MAX_HANDLES", 3, 3), ("MAX_BYTES", 2 * len(TEXT.encode()), 2)])
async def test_what_is_kept_is_bounded_and_the_oldest_goes_first(
    limit: str, value: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_on, limit, value)
    async with Peer(library()) as peer:
        handles = [await handle_in(peer) for _ in range(6)]
        assert [await unknown(peer, each) for each in handles] == [True] * (6 - kept) + [False] * kept


async def test_a_rest_that_is_too_long_to_keep_says_where_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_on, "MAX_REST", 1_500)
    async with Peer(library()) as peer:
        read = reader(peer)
        first = (await peer.call("book")).text.rsplit("\n", 1)[0]
        whole = await followed(await read("book", {}), read)
        lost = len(TEXT) - len(first) - 1_500
        assert whole == TEXT[:-lost] + f"\n[… the last {lost:,} characters were cut, so ask for less at a time]"


async def test_a_part_can_be_read_again_and_offsets_are_checked() -> None:
    async with Peer(library()) as peer:
        handle = await handle_in(peer)
        parts = [(await peer.call("read_more", {"handle": handle, "offset": at})).text for at in (0, 10, 0, 0.0)]
        assert parts[0] == parts[2] == parts[3] and parts[1].startswith(parts[0].rpartition("\n")[0][10:])
        assert "past the end" in await refusal(peer, {"handle": handle, "offset": 10**9})
        for wrong in (-1, 1.5, "1", None):
            assert "Invalid arguments" in await refusal(peer, {"handle": handle, "offset": wrong})


async def test_a_mark_on_the_result_is_on_its_rest_too() -> None:
    server = library()

    @server.tool(dangerous="strangers wrote it")
    async def mail() -> str:
        return TEXT

    async with Peer(server) as peer:
        for name, marked in (("mail", True), ("book", False)):
            more = await peer.call("read_more", {"handle": await handle_in(peer, name)})
            assert (more.meta is not None and RISK in (more.meta or {})) is marked


@requirement("SRV-614", "P-15")
async def test_p15_reading_on_is_a_call_as_any_other(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    rates = Rates(local=True, tools={"read_more": ToolRate(rate="1/hour")})
    async with Peer(library(audit=audit, rates=rates)) as peer:
        handle = await handle_in(peer)
        assert not await unknown(peer, handle)
        assert "Too many requests" in await refusal(peer, {"handle": handle})
    seen = [json.loads(line) for line in audit.read_text("utf-8").splitlines()]
    assert [each["event"] for each in seen if each.get("tool") == "read_more"] == ["intent", "refusal"]
    assert [each["outcome"] for each in seen if each["event"] == "outcome"] == ["ok", "ok"]


@pytest.mark.parametrize("verdict", ["deny", "hide"])
async def test_rules_hold_for_it(verdict: Any) -> None:
    server = library(policy=Policy([Rule(name="no", tools=["read_more"], verdict=verdict)]))
    async with Peer(server) as peer:
        assert ("read_more" in [tool.name for tool in await peer.tools()]) is (verdict == "deny")
        told = await refusal(peer, {"handle": await handle_in(peer)})
        assert ("is not allowed" if verdict == "deny" else "Unknown tool") in told


@pytest.mark.parametrize(
    ("sanitize", "listed"),
    [
        (None, False),
        (Sanitize(), False),
        (Sanitize(max_text=0, max_result=0, max_media=5), False),
        (Sanitize(max_text=CAP), True),
        (Sanitize(max_result=CAP), True),
        (Sanitize(tools={"book": ToolSanitize(max_text=CAP)}), True),
        (Sanitize(tools={"book": ToolSanitize(controls="keep")}), False),
    ],
)
async def test_it_is_there_if_results_can_be_cut(sanitize: Sanitize | None, listed: bool) -> None:
    server = library(sanitize=sanitize)
    for _ in range(2):  # a server can be served again
        async with Peer(server) as peer:
            assert [tool.name for tool in await peer.tools()] == ["book", "read_more"][: 1 + listed]
            if listed:
                read = reader(peer)
                assert await followed(await read("book", {}), read) == TEXT
            else:
                assert (await peer.call("book")).text == TEXT
        assert [tool.name for tool in server.tools] == ["book"]


@pytest.mark.parametrize("is_enabled", [True, False])
async def test_a_tool_of_the_authors_is_left_alone(is_enabled: bool, caplog: pytest.LogCaptureFixture) -> None:
    server = library()

    @server.tool
    async def read_more() -> str:
        return "mine"

    if not is_enabled:
        server.disable("read_more")
    with caplog.at_level(logging.WARNING, "handrail"):
        async with Peer(server) as peer:
            assert "the rest was cut, so ask for less" in (await peer.call("book")).text
            if is_enabled:
                assert (await peer.call("read_more")).text == "mine"
    assert [record.message for record in caplog.records if "'read_more' already" in record.message]


@pytest.mark.parametrize("prefix", ["", "old_"])
async def test_an_included_servers_results_are_read_on_at_the_server_that_cut_them(prefix: str) -> None:
    outer = Server("outer", sanitize=Sanitize(max_text=CAP))
    outer.include(library(), prefix=prefix)
    async with Peer(outer, revision=R5) as peer:
        assert [tool.name for tool in await peer.tools()] == [f"{prefix}book", "read_more"]
        read = reader(peer)
        assert await followed(await read(f"{prefix}book", {}), read) == TEXT


async def test_a_tool_that_runs_on_the_loop_is_read_on_too(tmp_path: Path) -> None:
    server = Server("library", sanitize=Sanitize(max_text=CAP), store=(store := SqliteStore(tmp_path / "state.db")))

    @server.tool(inline=True)
    def book() -> str:
        return TEXT

    async with Peer(server) as peer:
        read = reader(peer)
        assert await followed(await read("book", {}), read) == TEXT
    await store.close()


async def test_a_store_that_fails_costs_the_rest_and_not_the_result(tmp_path: Path, caplog: Any) -> None:
    store = SqliteStore(tmp_path / "state.db")
    async with Peer(library(store=store)) as peer:
        await store.close()
        assert (await peer.call("book")).text.startswith(TEXT[:500])
    assert "not stored" in caplog.text


def test_it_outlives_a_reload(tmp_path: Path) -> None:
    source = tmp_path / "s.py"
    code = (
        "from handrail import Server\nserver = Server('s')\n@server.tool\ndef book() -> str:\n    return 'x' * 5000\n"
    )
    source.write_text(code)
    (tmp_path / "handrail.toml").write_text("[sanitize]\nmax_text = 1000\n")
    with client("serve", "s.py", "--reload", home=tmp_path) as peer:
        peer.open()
        for letter in "xyz":
            if letter != "x":
                source.write_text(code.replace("'x'", f"'{letter}'"))
                peer.changed()
            assert sorted(peer.names()) == ["book", "read_more"]
            found = CUT.search(peer.call("book"))
            assert found is not None and letter * 500 in peer.call("read_more", handle=found[1])


async def test_read_more_that_was_switched_off_does_not_outlive_the_serving() -> None:
    server = Server("long", sanitize=Sanitize(max_text=CAP))

    @server.tool
    async def long() -> str:
        return TEXT

    for _ in range(2):
        async with Peer(server) as peer:
            assert [each.name for each in await peer.tools()] == ["long", "read_more"]
            assert await followed((await peer.call("long")).text, reader(peer)) == TEXT
            server.engine.catalog.switch("read_more", False)
        server.engine.catalog.switch("read_more", True)
        assert [each.tool.name for each in server.engine.catalog.entries] == ["long"]
