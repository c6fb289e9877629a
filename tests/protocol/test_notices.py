"""What is sent without being asked for: changes, progress, logs; and what stops when it is cancelled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from handrail import Call, Server
from handrail.testing import Peer
from requirements import requirement
from servers_calling import said, until
from wires import ALL, LEGACY, PIPES, Open, StdioWire, Wire
from wires_http import OLD, HttpWire
from wires_shared import everywhere, open_wire as open_wire, processes as processes, wire as wire

Json = Any
Object = dict[str, Any]

R5 = "2026-07-28"
CHANGED = "notifications/tools/list_changed"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
CANCELLED = "notifications/cancelled"
SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"
SINCE_R1 = tuple(each for each in ALL if each != "2024-10-07")
CENSUS = "servers_calling:census"
TALKATIVE = "servers_calling:talkative"


# Changes of the list


async def names(wire: Wire) -> set[str]:
    return {tool["name"] for tool in (await wire.request("tools/list"))["result"]["tools"]}


@requirement("SRV-510")
@everywhere(*LEGACY)
async def test_a_change_of_the_tools_is_announced_once(wire: Wire) -> None:
    assert wire.welcome["capabilities"]["tools"] == {"listChanged": True}
    added = f"added_{wire.revision}"
    await wire.call("add_tool", {"name": added})
    assert await wire.notice(CHANGED) == {"jsonrpc": "2.0", "method": CHANGED}
    assert added in await names(wire)
    assert await wire.silent()
    await wire.call("remove_tool", {"name": added})
    await wire.notice(CHANGED)
    assert added not in await names(wire)
    assert await wire.silent()


@requirement("SRV-510")
@everywhere(*LEGACY)
async def test_changes_are_not_announced_where_that_is_switched_off(open_wire: Open) -> None:
    wire: Wire = await open_wire("quiet")
    added = f"added_{wire.revision}"
    await wire.call("add_tool", {"name": added})
    if wire.revision == "pocket":  # the dialect always announces
        assert wire.welcome["capabilities"]["tools"] == {"listChanged": True}
        await wire.notice(CHANGED)
    else:
        assert wire.welcome["capabilities"]["tools"] == {}
    assert added in await names(wire)
    assert await wire.silent()


@requirement("SRV-510")
@everywhere(*LEGACY, transports=PIPES)
async def test_nothing_is_announced_before_the_client_is_ready(wire: Wire) -> None:
    await _announces_when_ready(wire)


@everywhere(*OLD, transports=["http"])  # the later ones have no such rule over HTTP (PD-30)
async def test_nothing_is_announced_on_an_old_stream_before_the_client_is_ready(wire: Wire) -> None:
    await _announces_when_ready(wire)


async def _announces_when_ready(wire: Wire) -> None:
    params = {"protocolVersion": wire.revision, "capabilities": {}, "clientInfo": {"name": "rig", "version": "1"}}
    await wire.request("initialize", params)
    await wire.call("add_tool", {"name": f"early_{wire.revision}"})
    assert await wire.silent()
    await wire.notify("notifications/initialized")
    await wire.call("remove_tool", {"name": f"early_{wire.revision}"})
    await wire.notice(CHANGED)


async def test_a_change_from_another_thread_or_by_a_switch_reaches_every_peer() -> None:
    server = Server("changing")

    @server.tool
    async def echo(text: str) -> str:
        """Give the text back."""
        return text

    async with Peer(server) as one, Peer(server, revision="2024-10-07") as two:
        for change in (
            lambda: server.disable("echo"),
            lambda: server.enable("echo"),
            lambda: server.remove("echo"),
            lambda: server.add(echo),
        ):
            await asyncio.to_thread(change)
            for peer in (one, two):
                await peer.notice(CHANGED)
                peer.notices.clear()
        server.enable("echo")  # it is: nothing changed
        for peer in (one, two):
            await peer.request("ping")
            assert not peer.notices


async def listen(wire: Wire, ident: Json, **wanted: Json) -> Object:
    """Open a subscription; its acknowledgement."""
    params = wire.params({"notifications": wanted})
    await wire.send({"jsonrpc": "2.0", "id": ident, "method": "subscriptions/listen", "params": params})
    return await wire.notice(ACKNOWLEDGED)


def subscription(message: Object) -> str:
    return repr(message["params"]["_meta"][SUBSCRIPTION])


@requirement("SRV-511", "SRV-512", "SRV-513")
@everywhere(R5)
async def test_changes_go_to_those_who_listen_for_them_under_their_own_id(open_wire: Open) -> None:
    wire: Wire = await open_wire(fresh=True)
    await wire.call("add_tool", {"name": "unheard"})
    assert await wire.silent(), "nobody listens yet"

    number = await listen(wire, 701, toolsListChanged=True, promptsListChanged=True, resourceSubscriptions=["a:b"])
    assert number["params"]["notifications"] == {"toolsListChanged": True}, "only what is honoured"
    text = await listen(wire, "701", toolsListChanged=True)
    deaf = await listen(wire, "deaf", toolsListChanged=False, promptsListChanged=True)
    assert deaf["params"]["notifications"] == {}
    silent = await listen(wire, "silent")
    assert silent["params"]["notifications"] == {}
    assert [subscription(each) for each in (number, text, deaf, silent)] == ["701", "'701'", "'deaf'", "'silent'"]
    assert await wire.silent(), "the acknowledgement is all"

    await wire.call("add_tool", {"name": "heard"})
    heard = [await wire.notice(CHANGED), await wire.notice(CHANGED)]
    assert sorted(map(subscription, heard)) == ["'701'", "701"]
    assert await wire.silent()

    await wire.notify(CANCELLED, {"requestId": "701"})
    await wire.call("remove_tool", {"name": "heard"})
    assert subscription(await wire.notice(CHANGED)) == "701"
    assert await wire.silent()
    # The id is free again, the other one is not; over HTTP every request is a world of its own.
    await listen(wire, "701", toolsListChanged=True)
    if wire.transport == "http":
        return
    params = wire.params({"notifications": {}})
    await wire.send({"jsonrpc": "2.0", "id": 701, "method": "subscriptions/listen", "params": params})
    assert (await wire.answer(701))["error"]["code"] == -32600


@requirement("SRV-511", "SRV-512")
@everywhere(R5)
async def test_a_server_that_announces_nothing_honours_nothing(open_wire: Open) -> None:
    wire: Wire = await open_wire("quiet", fresh=True)
    acknowledged = await listen(wire, "s", toolsListChanged=True)
    assert acknowledged["params"]["notifications"] == {}
    await wire.call("add_tool", {"name": "unheard"})
    assert await wire.silent()


@requirement("SRV-512")
@everywhere(R5)
async def test_a_malformed_wish_to_listen_is_refused(wire: Wire) -> None:
    malformed: list[Object] = [
        {},
        {"notifications": None},
        {"notifications": []},
        {"notifications": "tools"},
        {"notifications": {"toolsListChanged": "yes"}},
        {"notifications": {"toolsListChanged": None}},
    ]
    for params in malformed:
        assert (await wire.request("subscriptions/listen", params))["error"]["code"] == -32602, params


@requirement("SRV-511")
@everywhere(R5)
async def test_both_eras_on_one_pipe_hear_of_a_change_in_their_own_way(open_wire: Open) -> None:
    wire: Wire = await open_wire(fresh=True)
    await wire.reopen("2025-06-18")
    await wire.reopen(R5)
    await listen(wire, "s", toolsListChanged=True)
    await wire.call("add_tool", {"name": "heard"})
    plain, tagged = sorted([await wire.notice(CHANGED), await wire.notice(CHANGED)], key=len)
    assert plain == {"jsonrpc": "2.0", "method": CHANGED}
    assert subscription(tagged) == "'s'"
    assert await wire.silent()


@requirement("SRV-514")
@everywhere(R5)
async def test_the_end_of_the_server_ends_subscriptions_gracefully(open_wire: Open) -> None:
    wire: Wire = await open_wire(fresh=True)
    for ident in (801, "801"):
        await listen(wire, ident, toolsListChanged=True)
    if isinstance(wire, StdioWire):
        wire.process.fork.terminate()
    else:
        await wire.finish()
    for ident in (801, "801"):
        ended = await wire.answer(ident)
        assert ended["result"]["resultType"] == "complete"
        assert ended["result"]["_meta"][SUBSCRIPTION] == ident
        assert type(ended["result"]["_meta"][SUBSCRIPTION]) is type(ident)
        if wire.transport != "http":  # there the end of the stream says it (PD-8)
            told = await wire.receive()
            assert told == {"jsonrpc": "2.0", "method": CANCELLED, "params": {"requestId": ident}}
    assert not wire.others
    if isinstance(wire, StdioWire):
        assert await wire.close() == 0
    elif isinstance(wire, HttpWire):
        with pytest.raises(EOFError):
            await wire.read()
        assert wire.server.end() == 0


# Progress


@requirement("SRV-515")
@everywhere()
async def test_progress_comes_with_a_token_grows_and_ends_with_the_call(wire: Wire) -> None:
    for token in ("a token", 0, 7, ""):
        answer = await wire.call("progresses", progressToken=token)
        assert said(answer) == "done"
        notices = [each["params"] for each in wire.others if each["method"] == "notifications/progress"]
        assert len(notices) == len(wire.others)
        wire.others.clear()
        assert [each["progress"] for each in notices] == [0, 50, 100], "only what grows"
        for each in notices:
            assert each["progressToken"] == token
            assert type(each["progressToken"]) is type(token)
            assert each["total"] == 100
        messages = [each.get("message") for each in notices]
        if wire.revision in ("2024-10-07", "2024-11-05"):
            assert messages == [None] * 3
        else:
            assert messages == ["begun", "half", "done"]
    assert said(await wire.call("progresses")) == "done"
    assert not wire.others, "nobody asked to be told"


@requirement("SRV-515")
@everywhere()
async def test_nothing_is_told_of_a_call_that_is_over(open_wire: Open) -> None:
    wire: Wire = await open_wire(TALKATIVE)
    more: Object = {"logLevel": "debug"} if wire.stateless else {}
    assert said(await wire.call("talks_after", None, progressToken="t", **more)) == "done"
    assert said(await wire.call("release")) == "released"
    assert await wire.silent()


# Cancelling


@requirement("SRV-516")
@everywhere(*SINCE_R1)
async def test_a_cancelled_call_stops_and_says_nothing_more(open_wire: Open) -> None:
    wire: Wire = await open_wire(TALKATIVE)
    mark = wire.revision
    ident = await wire.ask("tools/call", {"name": "waits", "arguments": {"mark": mark}})
    assert said(await wire.call("was_stopped", {"mark": mark})) == "false"
    await wire.notify(CANCELLED, {"requestId": ident, "reason": "changed my mind"})
    await until(wire, "was_stopped", mark)
    assert await wire.silent()

    # In a worker thread, which learns of it through `call.cancelled`.
    blocked = {"name": "blocks_aloud", "arguments": {"mark": mark}}
    ident = await wire.ask("tools/call", blocked, progressToken="begun")
    await wire.notice("notifications/progress")
    await wire.notify(CANCELLED, {"requestId": ident})
    await until(wire, "has_stopped", mark)
    assert await wire.silent()


@requirement("SRV-516")
@everywhere("2024-10-07")
async def test_the_first_revision_has_no_cancelling(wire: Wire) -> None:
    ident = await wire.ask("tools/call", {"name": "after", "arguments": {"seconds": 0.05, "text": "done"}})
    await wire.notify(CANCELLED, {"requestId": ident})
    assert said(await wire.answer(ident)) == "done"


@requirement("SRV-517")
@everywhere()
async def test_cancelling_what_is_not_there_changes_nothing(wire: Wire) -> None:
    done = await wire.ask("tools/call", {"name": "echo", "arguments": {"text": "done"}})
    await wire.answer(done)
    waiting = await wire.ask("tools/call", {"name": "after", "arguments": {"seconds": 0.1, "text": "still"}})
    for ident in (
        done,
        424242,
        "never",
        str(waiting),
        float(waiting) + 0.5,
        None,
        True,
        [waiting],
        {"id": waiting},
        "",
    ):
        await wire.notify(CANCELLED, {"requestId": ident})
    await wire.notify(CANCELLED, {})
    await wire.notify(CANCELLED)
    assert said(await wire.call("echo", {"text": "on"})) == "on"
    assert said(await wire.answer(waiting)) == "still"
    assert await wire.silent()


@requirement("P-09")
@everywhere()
async def test_two_hundred_cancelled_calls_leave_nothing_behind(open_wire: Open) -> None:
    wire: Wire = await open_wire(CENSUS)
    before = json.loads(said(await wire.call("census")))
    can_cancel = wire.revision != "2024-10-07"
    calls: list[Object] = [{"name": "waits", "arguments": {"mark": f"{wire.revision} {at}"}} for at in range(200)]
    if not can_cancel:
        calls = [{"name": "after", "arguments": {"seconds": 0.1, "text": "done"}}] * 200
    idents = [await wire.ask("tools/call", call) for call in calls]
    for ident in idents:
        await wire.notify(CANCELLED, {"requestId": ident})
    if can_cancel:
        for call in calls:
            await until(wire, "was_stopped", call["arguments"]["mark"])
    else:
        assert {said(await wire.answer(ident)) for ident in idents} == {"done"}
    assert await wire.silent()
    after = json.loads(said(await wire.call("census")))
    assert after["tasks"] <= before["tasks"] + 1  # over HTTP a request in two pieces may have one of its own
    assert after["calls"] <= before["calls"]


@requirement("P-09")
@everywhere()
async def test_a_thousand_cancels_that_race_the_answer_leave_nothing_behind(open_wire: Open) -> None:
    """A thousand in one revision that shakes hands and in the one that does not; in the others some."""
    wire: Wire = await open_wire(CENSUS)
    count = 1_000 if wire.revision in ("2024-11-05", R5) else 250

    async def race(rounds: int) -> tuple[Object, int]:
        idents = []
        for at in range(rounds):
            arguments = {"seconds": 0 if at % 2 else 0.001, "text": str(at)}
            idents.append(await wire.ask("tools/call", {"name": "after", "arguments": arguments}))
            await wire.notify(CANCELLED, {"requestId": idents[-1]})
        # Whatever waited that long ago has been answered before this is.
        assert said(await wire.call("after", {"seconds": 0.05, "text": "last"})) == "last"
        census = json.loads(said(await wire.call("census")))
        answered = [each["id"] for each in wire.others]
        texts = {each["id"]: said(each) for each in wire.others}
        wire.others.clear()
        assert len(answered) == len(set(answered)), "answered twice"
        assert texts == {ident: str(at) for at, ident in enumerate(idents) if ident in texts}
        return census, len(answered)

    before, _ = await race(100)  # warms whatever is made once
    after, answered = await race(count)
    if wire.revision == "2024-10-07":
        assert answered == count
    assert after["tasks"] <= before["tasks"] + 1
    assert after["calls"] <= before["calls"]
    if wire.transport != "memory":  # where this counts the test's own
        assert after["objects"] < before["objects"] + 500
    assert said(await wire.call("echo", {"text": "on"})) == "on"


async def test_a_tool_that_will_not_be_cancelled_is_not_heard_any_more() -> None:
    server = Server("stubborn")
    begun, may_end = asyncio.Event(), asyncio.Event()
    ended = asyncio.Event()

    @server.tool
    async def stubborn(call: Call) -> str:
        """Goes on."""
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await may_end.wait()
        await call.progress(1)
        await call.log("emergency", "still here")
        ended.set()
        return "at last"

    async with Peer(server) as peer:
        answer = asyncio.create_task(peer.call("stubborn", progressToken="t"))
        await begun.wait()
        await peer.notify(CANCELLED, {"requestId": 2})
        may_end.set()
        await peer.request("ping")
        await ended.wait()
        await peer.request("ping")
        assert not peer.notices
        assert not answer.done()
        answer.cancel()
        assert not any(b"at last" in message for message in peer.wire)


# Logs

LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
LOGGED = {"debug": 3, "info": 2, "notice": 1, "warning": 1, "error": 1, "critical": 0, "alert": 0, "emergency": 0}


async def logged(wire: Wire, **meta: Json) -> list[Object]:
    assert said(await wire.call("logs", **meta)) == "logged"
    notices = [each["params"] for each in wire.others if each["method"] == "notifications/message"]
    assert len(notices) == len(wire.others)
    wire.others.clear()
    return notices


@requirement("SRV-518")
@everywhere(*LEGACY)
async def test_logs_come_from_the_level_that_was_set(wire: Wire) -> None:
    assert wire.welcome["capabilities"]["logging"] == {}
    assert [each["level"] for each in await logged(wire)] == ["info", "error"], "info, if nothing was set"
    for level in LEVELS:
        assert (await wire.request("logging/setLevel", {"level": level}))["result"] == {}
        assert len(await logged(wire)) == LOGGED[level], level
    await wire.request("logging/setLevel", {"level": "debug"})
    small, middle, big = await logged(wire)
    assert small == {"level": "debug", "data": "small"}
    assert middle == {"level": "info", "logger": "subject", "data": {"step": 1}}
    assert big == {"level": "error", "data": "big"}
    # A new handshake begins anew.
    await wire.reopen(wire.revision)
    assert len(await logged(wire)) == 2


@requirement("SRV-518")
@everywhere(*LEGACY)
async def test_a_level_nobody_knows_is_refused_and_changes_nothing(wire: Wire) -> None:
    await wire.request("logging/setLevel", {"level": "error"})
    for params in ({"level": "loud"}, {"level": "INFO"}, {"level": 3}, {"level": None}, {"level": ["info"]}, {}):
        assert (await wire.request("logging/setLevel", params))["error"]["code"] == -32602, params
    assert len(await logged(wire)) == 1


@requirement("SRV-519")
@everywhere(R5)
async def test_a_stateless_request_names_its_own_level_or_gets_no_logs(open_wire: Open) -> None:
    wire: Wire = await open_wire(fresh=True)
    assert await logged(wire) == []
    for level in LEVELS:
        assert len(await logged(wire, logLevel=level)) == LOGGED[level], level
        assert await logged(wire) == [], "the level was remembered"
    for wrong in ("loud", "INFO", 3, None):
        assert (await wire.call("logs", logLevel=wrong))["error"]["code"] == -32602, wrong
    assert (await wire.request("logging/setLevel", {"level": "debug"}))["error"]["code"] == -32601
    # Not on a subscription either, and not because an older client on the same pipe set a level.
    await listen(wire, "s", toolsListChanged=True)
    assert await logged(wire) == []
    assert all("_meta" not in each for each in await logged(wire, logLevel="debug"))
    await wire.reopen("2025-06-18")
    await wire.request("logging/setLevel", {"level": "debug"})
    await wire.reopen(R5)
    assert await logged(wire) == []
    assert len(await logged(wire, logLevel="error")) == 1


async def test_a_tool_cannot_log_or_report_what_json_or_the_rules_do_not_know() -> None:
    server = Server("wrong")

    @server.tool
    async def wrong(kind: str, call: Call) -> str:
        """Says something wrong."""
        try:
            if kind == "level":
                await call.log("loud", "x")
            elif kind == "data":
                await call.log("error", {"x": float("nan")})
            elif kind == "object":
                await call.log("error", object())
            elif kind == "done":
                await call.progress(float("nan"))
            else:
                await call.progress(1, float("inf"))
        except (ValueError, TypeError) as problem:
            return f"refused: {problem}"
        return "sent"

    async with Peer(server) as peer:
        for kind in ("level", "data", "object", "done", "total"):
            assert (await peer.call("wrong", {"kind": kind}, progressToken="t")).text.startswith("refused: "), kind
        assert not peer.notices
