"""What an upstream lists for one caller is that caller's, also where another has a definition of the same name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gateways_operated import behind, operated, simple, upstream_of
from handrail import Principal, Server
from handrail.testing import Peer
from patience import PATIENCE
from requirements import requirement
from rigs_gateway import Rig, running
from scripted_upstream import R4, R5, Json, Object, Session, definition

Ran = Callable[[str, str], None]

CHANGED = "notifications/tools/list_changed"
ALL_CHANGES = ["wording", "widened", "narrowed", "schema", "hint"]
SCHEMAS: dict[str, Object] = {
    name: {
        "type": "object",
        "properties": {name: {"type": "string"}},
        "required": [name],
        "additionalProperties": False,
    }
    for name in ("city", "zone")
}


def search(argument: str) -> Object:
    """The definition of a tool that takes this argument."""
    return {**simple("search", f"by {argument}"), "inputSchema": SCHEMAS[argument]}


@asynccontextmanager
async def differing(lists: dict[bool, list[Object]], **options: Json) -> AsyncIterator[tuple[Rig, Server]]:
    """A gateway and its upstream, whose first session has another list than the second, by whether it is the first."""
    async with running(R4, "http") as rig:

        def tools_of(session: Session) -> list[Object]:
            return [definition(R4, each) for each in lists[session.number == 1]]

        upstream_of(rig).tools_of = tools_of
        server = operated([behind(rig, name="up", **options)])
        async with server.serving():
            yield rig, server


def caller(server: Server, name: str, revision: str, capabilities: Object | None = None) -> Peer:
    return Peer(server, revision=revision, principal=Principal(name), capabilities=capabilities or {}, timeout=PATIENCE)


async def listed(peer: Peer) -> dict[str, tuple[str, Object]]:
    """The descriptions and schemas of the tools, by name."""
    tools = (await peer.request("tools/list"))["result"]["tools"]
    return {each["name"]: (each["description"], each["inputSchema"]) for each in tools}


async def search_by(peer: Peer, argument: str) -> str:
    answer = await peer.request("tools/call", {"name": "search", "arguments": {argument: "x"}})
    return str(answer.get("error", answer.get("result")))


@requirement("GW-14", "GW-16")
@pytest.mark.parametrize("revision", [R4, R5])
@pytest.mark.parametrize("by", ["owner", "capabilities"])
async def test_each_caller_has_its_own_definition_of_a_name(revision: str, by: str, ran: Ran) -> None:
    lists = {True: [simple("both"), search("city"), simple("last")], False: [simple("both"), search("zone")]}
    who = "bob" if by == "owner" else "alice"
    able: Object = {} if by == "owner" else {"sampling": {}}
    async with (
        differing(lists, pass_changes=ALL_CHANGES) as (rig, server),
        caller(server, "alice", revision) as first,
        caller(server, who, revision, able) as second,
    ):
        ran(revision, "memory")
        assert (await listed(first))["search"] == ("by city", SCHEMAS["city"])
        seen = await listed(second)
        assert seen["search"] == ("by zone", SCHEMAS["zone"])
        assert list(seen) == ["both", "search"]
        assert list(await listed(first)) == ["both", "search", "last"]
        for peer, argument, other in ((first, "city", "zone"), (second, "zone", "city")):
            assert (await listed(peer))["search"] == (f"by {argument}", SCHEMAS[argument])
            assert "I am search" in await search_by(peer, argument)
            assert "Invalid arguments" in await search_by(peer, other)
            assert len(rig.calls("search", **{argument: "x"})) == 1
        assert len({each["session"] for each in rig.calls("search")}) == 2


@requirement("GW-21")
async def test_a_definition_that_is_held_back_for_one_caller_is_not_for_another(ran: Ran) -> None:
    lists = {True: [search("city")], False: [search("zone")]}
    async with (
        differing(lists) as (rig, server),
        caller(server, "alice", R4) as first,
        caller(server, "bob", R4) as second,
    ):
        ran(R4, "memory")
        assert list(await listed(first)) == ["search"]
        assert list(await listed(second)) == []
        assert "has changed since it was accepted" in await search_by(second, "zone")
        assert "I am search" in await search_by(first, "city")
        assert not rig.calls("search", zone="x")
        [tool] = server.upstreams["up"].tools
        assert (tool.state, tool.raw["description"]) == ("quarantined", "by zone")  # the one that needs a look


@requirement("GW-11")
async def test_a_change_of_one_callers_list_is_told_to_that_caller(ran: Ran) -> None:
    lists = {True: [search("city")], False: [search("city"), simple("more")]}
    async with (
        differing(lists, pass_changes=ALL_CHANGES, new="allow") as (rig, server),
        caller(server, "alice", R4) as first,
        caller(server, "bob", R4) as second,
    ):
        ran(R4, "memory")
        assert list(await listed(first)) == ["search"]
        assert list(await listed(second)) == ["search", "more"]
        for peer in (first, second):
            await peer.notice(CHANGED)  # of what only one of them has
        for changed in ([search("zone"), simple("more")], [simple("more")]):
            for peer in (first, second):
                peer.notices.clear()
            lists[False] = changed
            for session in upstream_of(rig).sessions:
                session.announce()
            await second.notice(CHANGED)
            expected = {each["name"]: each["inputSchema"] for each in changed}
            assert {name: schema for name, (_, schema) in (await listed(second)).items()} == expected
            assert (await listed(first))["search"][1] == SCHEMAS["city"]
            assert not [each for each in first.notices if each["method"] == CHANGED]
