"""Calls as the console shows them: while they run, when they have ended, cancelled; and who is connected."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cli_runs import COMMAND, environment
from handrail import Call, Client, Server, ToolError
from handrail.approvals.queue import Approvals
from handrail.console import Console, events as streaming, statistics, tools
from handrail.engine.core import Limits
from handrail.guards.limits import Rates, ToolRate
from handrail.guards.policy import Policy, Rule
from handrail.model import Principal
from handrail.observe import activity as watching
from handrail.observe.activity import ActivityFeed, MinuteStats, TrialTally, p95
from handrail.stores import Put
from handrail.stores.memory import MemoryStore
from handrail.testing import Peer
from patience import PATIENCE
from requirements import requirement
from rigs_console import Page, Refused, Rig, consoled

LARGE = 64 * 1024 * 1024

Object = dict[str, Any]


class Shop:
    """A server whose slow tools end when a test lets them."""

    def __init__(self, **options: Any) -> None:
        self.server = server = Server("shop", **options)
        self.go = asyncio.Event()
        self.released = threading.Event()
        self.noticed = threading.Event()

        @server.tool(title="Add two")
        async def add(a: int, b: int) -> int:
            return a + b

        @server.tool(inline=True)
        def quick(text: str) -> str:
            return text

        @server.tool
        async def fail() -> str:
            raise ToolError("out of stock")

        @server.tool
        async def crash() -> str:
            raise RuntimeError("secret in the stack")

        @server.tool
        async def hold(call: Call, password: str = "") -> str:
            await call.progress(1, 4, "begun")
            await call.log("warning", {"left": 3})
            await self.go.wait()
            return "let go"

        @server.tool
        async def stubborn() -> str:
            while not self.go.is_set():
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    continue
            return "done anyway"

        @server.tool
        def blocked(call: Call) -> str:
            while not call.cancelled:
                self.released.wait(0.01)
            self.noticed.set()
            self.released.wait(PATIENCE)
            return "at last"

    @property
    def feed(self) -> ActivityFeed:
        return ActivityFeed.of(self.server.engine)


async def row_of(page: Page, tool: str, state: str) -> Object:
    """The next tick in which a call of the tool is in that state; how it looks there."""
    async with asyncio.timeout(PATIENCE):
        while True:
            tick = await page.event("tick")
            for row in tick["finished"] if state == "done" else tick["running"]:
                if (row["tool"], row["state"]) == (tool, state):
                    assert isinstance(row, dict)
                    return row


@asynccontextmanager
async def watched(shop: Shop, **options: Any) -> AsyncIterator[tuple[Rig, Page, Peer]]:
    async with consoled(shop.server, **options) as rig, Peer(shop.server) as peer:
        page = await rig.page()
        await page.listen()
        yield rig, page, peer


# While it runs, and after


@requirement("APP-02")
async def test_a_call_is_there_while_it_runs_and_when_it_has_ended() -> None:
    shop = Shop()
    async with watched(shop) as (_, page, peer):
        call = asyncio.create_task(peer.call("hold", {}))
        row = await row_of(page, "hold", "running")
        assert (row["who"], row["client"], row["revision"], row["from"]) == (
            *("local", "handrail-testing", "2025-11-25", "memory"),
        )
        assert row["stage"] == "run" and row["progress"] | {"at": 0} == {
            "done": 1,
            "total": 4,
            "message": "begun",
            "at": 0,
        }
        assert "outcome" not in row
        shop.go.set()
        await call
        done = await row_of(page, "hold", "done")
        assert (done["id"], done["outcome"], done["began"]) == (row["id"], "ok", row["began"])
        assert done["seconds"] > 0


async def test_a_stream_begins_with_everything_as_it_is() -> None:
    shop = Shop()
    async with consoled(shop.server) as rig, Peer(shop.server) as peer:
        await peer.call("add", {"a": 1, "b": 2})
        await peer.call("fail", {})
        call = asyncio.create_task(peer.call("hold", {}))
        page = await rig.page()
        hello = await page.listen()
        assert [row["tool"] for row in hello["running"]] == ["hold"] and hello["running_total"] == 1
        assert [(row["tool"], row["title"], row["outcome"]) for row in hello["finished"]] == [
            ("add", "Add two", "ok"),
            ("fail", "fail", "tool_error"),
        ]
        assert hello["totals"] == {"calls": 2, "errors": 1, "refused": 0}
        assert hello["minute"]["calls"] == 2 and hello["minutes"] == [] and hello["approvals"] == []
        assert hello["health"]["level"] == "warn" and "1 of 2 calls failed" in hello["health"]["sentence"]
        assert [each["client"] for each in hello["connections"]] == ["handrail-testing"]
        shop.go.set()
        await call


@requirement("APP-14", "APP-04")
async def test_the_story_of_a_call() -> None:
    shop = Shop()
    async with watched(shop) as (rig, page, peer):
        await peer.request("logging/setLevel", {"level": "debug"})
        call = asyncio.create_task(peer.call("hold", {"password": "hunter2hunter2"}, progressToken="p"))
        row = await row_of(page, "hold", "running")
        early = await page.get(f"calls/{row['id']}")
        assert early["source"] == "memory" and early["row"]["state"] == "running"
        assert [each["name"] for each in early["stages"]][-1] == "intent" and "result" not in early
        assert [each["way"] for each in early["wire"]] == ["in", "out", "out"]
        shop.go.set()
        await call
        story = await page.get(f"calls/{row['id']}")
        assert [each["name"] for each in story["stages"]] == [
            *("middleware", "limit", "validate", "approve", "intent", "run", "sanitize"),
        ]
        assert story["result"]["blocks"][0]["text"] == "let go" and not story["result"]["is_error"]
        assert [(each["done"], each["total"], each["message"]) for each in story["progress"]] == [(1, 4, "begun")]
        assert [(each["level"], each["text"]) for each in story["logs"]] == [("warning", '{"left":3}')]
        methods = [json.loads(each["text"]).get("method", "answer") for each in story["wire"]]
        assert methods == ["tools/call", "notifications/progress", "notifications/message", "answer"]
        assert "hunter2" not in json.dumps(story)
        assert (await page.raw(f"calls/{row['id']}/wire/3")).decode() == story["wire"][3]["text"]
        assert await page.raw(f"calls/{row['id']}/blocks/0") == b"let go"
        for missing in ("blocks/1", "wire/4", "blocks/x", "wire/-1"):
            with pytest.raises(Refused) as refused:
                await page.get(f"calls/{row['id']}/{missing}")
            assert refused.value.status == 404
        with pytest.raises(Refused, match="no call 'nothing'"):
            await page.get("calls/nothing")
        assert rig.console.context.feed.find(row["id"]) is not None


async def test_calls_of_one_batch_are_shown_with_their_own_arguments() -> None:
    shop = Shop()
    async with consoled(shop.server) as rig, Peer(shop.server, revision="2025-03-26") as peer:
        page = await rig.page()
        await page.listen()
        given = [("add", {"a": 1, "b": 1}), ("add", {"a": 2, "b": 2}), ("add", {"a": 3}), ("nothing", {"a": 4})]
        batch = [
            {"jsonrpc": "2.0", "id": f"b{number}", "method": "tools/call", "params": {"name": tool, "arguments": args}}
            for number, (tool, args) in enumerate(given)
        ]
        await peer.send(json.dumps(batch).encode())
        async with asyncio.timeout(PATIENCE):
            while shop.feed.totals[0] < len(batch):
                await page.event("tick")
        stories = [await page.get(f"calls/{seen.id}") for seen in shop.feed.recent]
    shown = [(story["row"]["tool"], story["arguments"]) for story in stories]
    assert sorted(shown, key=str) == sorted(given, key=str)


@pytest.mark.parametrize(
    ("tool", "arguments", "outcome", "refusal", "stage"),
    [
        ("add", {"a": 1, "b": 2}, "ok", None, "sanitize"),
        ("add", {"a": 1}, "bad_arguments", "b", "validate"),
        ("fail", {}, "tool_error", None, "sanitize"),
        ("crash", {}, "tool_error", None, "sanitize"),
        ("nothing", {}, "unknown_tool", "Unknown tool: nothing", ""),
    ],
)
async def test_how_calls_end(tool: str, arguments: Object, outcome: str, refusal: str | None, stage: str) -> None:
    shop = Shop()
    async with watched(shop) as (_, page, peer):
        await peer.request("tools/call", {"name": tool, "arguments": arguments})
        row = await row_of(page, tool, "done")
        assert (row["outcome"], row["stage"]) == (outcome, stage)
        story = await page.get(f"calls/{row['id']}")
        assert (story.get("refusal") is None) == (refusal is None)
        assert refusal is None or refusal in story["refusal"]["text"]
        assert "secret in the stack" not in json.dumps(story)


@requirement("APP-15")
async def test_a_large_result_is_not_there_until_it_is_asked_for() -> None:
    server = Server("large", sanitize=None, limits=Limits(max_message_bytes=LARGE, max_unsent_bytes=LARGE))
    text = "x" * 20_000_000

    @server.tool
    async def much() -> str:
        return text

    async with consoled(server) as rig:
        page = await rig.page()
        await page.listen()
        async with Client(server) as client:
            await client.call("much", {})
        row = await row_of(page, "much", "done")
        raw = await page.raw(f"calls/{row['id']}")
        assert len(raw) < 300_000
        story = json.loads(raw)
        block, last = story["result"]["blocks"][0], story["wire"][-1]
        assert (block["cut"], block["bytes"], len(block["text"])) == (True, 20_000_000, 64 * 1024)
        assert last["cut"] and last["bytes"] > 20_000_000 and len(last["text"]) <= 64 * 1024
        assert await page.raw(f"calls/{row['id']}/blocks/0") == text.encode()


@requirement("P-34")
@pytest.mark.parametrize("padding", ["", "u" * 70_000])
async def test_a_secret_of_several_words_is_hidden_whole_wherever_it_is_shown(padding: str) -> None:
    secret = 'correct horse, battery "staple"; & more}'
    server = Server("safe", rates=None, sanitize=None)

    @server.tool
    async def log_in(call: Call, password: str, more: str = "") -> Object:
        await call.log("error", {"password": password})
        return {"password": password, "more": more}

    async with consoled(server) as rig:
        page = await rig.page()
        await page.listen()
        await page.post("try", tool="log_in", arguments={"password": secret, "more": padding})
        told = [await page.event("try", kind=kind) for kind in ("log", "done")]
        place = f"calls/{told[-1]['call']}"
        count = len((await page.get(place))["wire"])
        seen = [await page.raw(each) for each in (place, f"{place}/blocks/0")]
        seen += [await page.raw(f"{place}/wire/{index}") for index in range(count)]
    assert count == 3
    for word in ("horse", "staple", "more}"):
        assert word not in json.dumps(told) and not [each for each in seen if word.encode() in each], word


async def test_a_call_that_is_no_longer_kept_is_told_from_the_audit(tmp_path: Path) -> None:
    shop = Shop(audit=tmp_path / "audit.db")
    async with watched(shop) as (rig, page, peer):
        await peer.call("add", {"a": 1, "b": 2})
        row = await row_of(page, "add", "done")
        kept = await page.get(f"calls/{row['id']}")
        assert kept["source"] == "memory" and [each["event"] for each in kept["records"]] == ["intent", "outcome"]
        rig.console.context.feed._ring.clear()
        story = await page.get(f"calls/{row['id']}")
        assert story["source"] == "audit" and story["row"]["outcome"] == "ok" and story["row"]["tool"] == "add"
        assert "arguments" not in story and "result" not in story and story["wire"] == []
        assert [each["name"] for each in story["stages"]][-1] == "sanitize"


# Cancelled by an operator


@requirement("APP-12")
@pytest.mark.parametrize("audited", [False, True])
async def test_an_operator_cancels_a_call_and_its_caller_is_told(audited: bool, tmp_path: Path) -> None:
    options: Object = {"audit": tmp_path / "audit.jsonl"} if audited else {}
    shop = Shop(**options)
    async with watched(shop) as (_, page, peer):
        call = asyncio.create_task(peer.call("hold", {}))
        row = await row_of(page, "hold", "running")
        await page.post(f"calls/{row['id']}/cancel")
        result = await call
        assert result.is_error and result.text == "The tool hold was cancelled by an operator."
        assert (await row_of(page, "hold", "done"))["outcome"] == "cancelled"
        with pytest.raises(Refused, match="is over"):
            await page.post(f"calls/{row['id']}/cancel")
    if audited:
        lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text("utf-8").splitlines()]
        told = [(each["event"], each.get("outcome")) for each in lines if each.get("call") == row["id"]]
        assert told == [("intent", None), ("console", None), ("outcome", "cancelled")]
        assert [each["by"] for each in lines if each.get("step") == "cancelled"] == ["local"]


@requirement("APP-12")
async def test_a_tool_that_does_not_react_is_shown_as_being_cancelled() -> None:
    shop = Shop()
    async with watched(shop) as (_, page, peer):
        call = asyncio.create_task(peer.call("stubborn", {}))
        row = await row_of(page, "stubborn", "running")
        await page.post(f"calls/{row['id']}/cancel")
        assert "cancelled by an operator" in (await call).text, "its caller need not wait for it"
        assert (await row_of(page, "stubborn", "cancelling"))["id"] == row["id"]
        shop.go.set()
        assert (await row_of(page, "stubborn", "done"))["outcome"] == "cancelled"


@requirement("APP-12")
async def test_a_thread_sees_that_it_is_cancelled_and_is_shown_until_it_ends() -> None:
    shop = Shop()
    async with watched(shop) as (_, page, peer):
        call = asyncio.create_task(peer.call("blocked", {}))
        row = await row_of(page, "blocked", "running")
        await page.post(f"calls/{row['id']}/cancel")
        assert "cancelled by an operator" in (await call).text
        assert (await row_of(page, "blocked", "cancelling"))["id"] == row["id"]
        assert await asyncio.to_thread(shop.noticed.wait, PATIENCE)
        shop.released.set()
        assert (await row_of(page, "blocked", "done"))["outcome"] == "cancelled"


@requirement("APP-12")
async def test_a_call_that_is_cancelled_while_it_waits_for_a_thread_never_runs() -> None:
    shop = Shop(workers=1)
    ran = []

    @shop.server.tool
    def charge() -> str:
        ran.append("charge")
        return "charged"

    async with watched(shop) as (_, page, peer):
        first = asyncio.create_task(peer.call("blocked", {}))
        ahead = await row_of(page, "blocked", "running")
        call = asyncio.create_task(peer.call("charge", {}))
        row = await row_of(page, "charge", "running")
        for each in (row, ahead):
            await page.post(f"calls/{each['id']}/cancel")
        assert "cancelled by an operator" in (await call).text and "cancelled" in (await first).text
        shop.released.set()
        assert (await row_of(page, "charge", "done"))["outcome"] == "cancelled"
    assert not ran, "its caller was told that it was cancelled"


async def test_a_client_that_cancels_hears_nothing_and_the_page_does() -> None:
    shop = Shop()
    async with watched(shop) as (_, page, peer):
        call = asyncio.create_task(peer.request("tools/call", {"name": "hold", "arguments": {}}))
        await row_of(page, "hold", "running")
        await peer.notify("notifications/cancelled", {"requestId": 2})
        assert (await row_of(page, "hold", "done"))["outcome"] == "cancelled"
        assert not call.done()
        call.cancel()


async def test_a_call_that_waits_for_approval_asks_and_can_be_cancelled() -> None:
    policy = Policy([Rule(name="ask first", verdict="ask", tools=["add"])])
    shop = Shop(policy=policy, approvals=Approvals(by="operator"))
    async with watched(shop) as (_, page, peer):
        call = asyncio.create_task(peer.call("add", {"a": 1, "b": 2}))
        row = await row_of(page, "add", "asking")
        assert row["stage"] == "approve" and row["approval"] and "progress" not in row
        card = await page.event("approval", id=row["approval"])
        assert card["state"] == "pending"
        await page.post(f"calls/{row['id']}/cancel")
        assert "cancelled by an operator" in (await call).text
        assert (await row_of(page, "add", "done"))["approval"] == row["approval"]


async def test_who_may_only_try_tools_cancels_their_own_calls() -> None:
    shop = Shop()
    async with watched(shop) as (rig, page, peer):
        calls = [asyncio.create_task(peer.call("hold", {})) for _ in range(1)]
        row = await row_of(page, "hold", "running")
        for who, roles in (("ada", "view call"), ("local", "view approve")):
            other = await rig.page(who, roles)
            with pytest.raises(Refused) as refused:
                await other.post(f"calls/{row['id']}/cancel")
            assert refused.value.status == 403
        mine = await rig.page("local", "call")
        await mine.post(f"calls/{row['id']}/cancel")
        assert "operator" in (await calls[0]).text


# What is kept, and what is counted


async def test_the_last_500_calls_are_kept() -> None:
    shop = Shop(rates=None)
    feed = shop.feed
    async with Peer(shop.server) as peer:
        for number in range(520):
            await peer.call("quick", {"text": str(number)})
    kept = feed.recent
    assert len(kept) == watching.RING_CALLS == 500
    assert [json.loads(seen.raw_request)["params"]["arguments"]["text"] for seen in (kept[0], kept[-1])] == [
        "20",
        "519",
    ]
    assert feed.totals[0] == 520 and feed.find(kept[0].id) is kept[0]


async def test_what_is_kept_is_at_most_16_mib_of_wire() -> None:
    shop = Shop(rates=None, sanitize=None)
    feed = shop.feed
    async with Peer(shop.server) as peer:
        for _ in range(12):
            await peer.call("quick", {"text": "x" * 1_000_000})
            assert sum(seen.memory_bytes for seen in feed.recent) <= watching.RING_BYTES
    assert 1 < len(feed.recent) < 12, "the oldest went first"
    assert feed.totals[0] == 12


async def test_what_was_never_sent_counts_too() -> None:
    """Results that are too large for the wire, and what a tool logs for nobody."""
    shop = Shop(rates=None, sanitize=None)
    feed = shop.feed

    @shop.server.tool
    async def huge() -> str:
        return "x" * 6_000_000

    @shop.server.tool
    async def chatty(call: Call) -> str:
        for number in range(99):
            await call.log("debug", f"{number}" + "x" * 60_000)
        await call.log("debug", "x" * 5_000_000)
        return "said"

    async with Peer(shop.server) as peer:
        for _ in range(6):
            assert (await peer.call("huge", {})).is_error
        assert len(feed.recent) <= 2
        for _ in range(6):
            await peer.call("chatty", {})
        assert len(feed.recent) <= 3 and max(len(data) for _, _, data in feed.recent[-1].logs) < 100_000


class Odd:
    def __str__(self) -> str:
        return "odd"


@pytest.mark.parametrize(
    ("done", "message", "data"),
    [
        (Fraction(1, 3), "", Odd()),
        (2**70, "", {"half": "\udcff"}),
        (1, "file \udcff", 2**70),
    ],
)
async def test_what_is_not_json_can_be_looked_at_and_stops_nothing(done: Any, message: str, data: Any) -> None:
    shop = Shop(rates=None)

    @shop.server.tool
    async def odd(call: Call) -> str:
        await call.progress(done, message=message)
        await call.log("debug", data)
        await shop.go.wait()
        return "gone on"

    async with watched(shop) as (rig, page, peer):
        call = asyncio.create_task(peer.call("odd", {}))
        row = await row_of(page, "odd", "running")
        assert row["progress"]["done"] == pytest.approx(float(done))
        shop.go.set()
        await call
        assert (await row_of(page, "odd", "done"))["id"] == row["id"]
        story = await page.get(f"calls/{row['id']}")
        assert len(story["logs"]) == 1
        assert (await (await rig.page()).listen())["finished"][-1]["id"] == row["id"]


async def test_nothing_is_held_on_to_but_what_is_shown() -> None:
    shop = Shop(rates=None)
    async with Peer(shop.server) as peer:
        shop.feed  # noqa: B018
        await peer.call("add", {"a": 1, "b": 2})
        [seen] = shop.feed.recent
        assert seen.call is None and not shop.feed.running


async def test_every_call_is_counted_once_however_it_ends() -> None:
    shop = Shop(rates=None)
    feed = shop.feed
    async with Peer(shop.server) as peer:
        for name, arguments, times in [
            ("add", {"a": 1, "b": 2}, 7),
            ("fail", {}, 5),
            ("crash", {}, 2),
            ("add", {"a": "x", "b": 2}, 3),
            ("nothing", {}, 4),
        ]:
            for _ in range(times):
                await peer.request("tools/call", {"name": name, "arguments": arguments})
    assert feed.totals == (21, 7, 7)
    assert {name: (each.calls, each.errors) for name, each in feed.tools.items()} == {
        "add": (10, 0),
        "fail": (5, 5),
        "crash": (2, 2),
    }
    assert feed.minutes.current.calls == 21 and feed.minutes.current.errors == 7
    assert not feed.running


async def test_who_looks_on_does_not_come_between_a_call_and_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()

    def news() -> None:
        raise RuntimeError("nobody can look")

    async with Peer(shop.server, timeout=PATIENCE) as peer:
        shop.feed.on_change = news
        assert (await peer.call("add", {"a": 1, "b": 2})).text == "3"
        assert (await peer.request("tools/call", {"name": "nothing"}))["error"]["code"] == -32602
        held = asyncio.create_task(peer.call("hold"))
        assert (await peer.call("quick", {"text": "meanwhile"})).text == "meanwhile"
        shop.go.set()
        assert (await held).text == "let go"
    assert "nobody can look" in caplog.text


async def test_clients_that_share_a_pipe_are_told_apart() -> None:
    shop = Shop()
    async with Peer(shop.server) as old:
        meta = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": {"name": "new", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        ActivityFeed.of(shop.server.engine)
        for each in ({}, meta, {}, meta):
            await old.request("tools/call", {"name": "add", "arguments": {"a": 1, "b": 2}, "_meta": each})
    revisions = ["2025-11-25", "2026-07-28"] * 2
    assert [each.revision for each in shop.feed.recent] == revisions
    assert [each.client == "new" for each in shop.feed.recent] == [False, True] * 2


async def test_a_caller_is_known_with_the_scopes_of_its_last_call() -> None:
    shop = Shop()
    ActivityFeed.of(shop.server.engine)
    for scopes in (frozenset({"read"}), frozenset({"read", "admin"})):
        async with Peer(shop.server, principal=Principal("ann", scopes=scopes)) as peer:
            await peer.call("add", {"a": 1, "b": 2})
        assert shop.feed.principals["ann"].scopes == scopes


def test_what_ends_a_little_before_its_minute_takes_nothing_away() -> None:
    minutes = MinuteStats(600.0)
    minutes.count(630.0, [1] * 3)
    minutes.count(660.1, [1] * 2)
    minutes.count(659.9, [1])
    assert (minutes.current.start, minutes.current.calls) == (660, 3)
    minutes.roll(720.0)
    assert [(each.start, each.calls) for each in minutes.past] == [(600, 3), (660, 3)]
    minutes.count(610.0, [1])  # a clock that was set back
    minutes.roll(800.0)
    assert [(each.start, each.calls) for each in minutes.past] == [(600, 1), (660, 0), (720, 0)]


def test_minutes_pass_also_while_nothing_happens() -> None:
    minutes = MinuteStats(600.0)
    minutes.count(610.0, [100_000_000])
    minutes.count(659.9, [100_000_000], errors=1)
    assert (minutes.current.start, minutes.current.calls, minutes.current.errors) == (600, 2, 1) and not minutes.past
    assert minutes.roll(905.0).start == 900
    assert [(each.start, each.calls) for each in minutes.past] == [(600, 2), (660, 0), (720, 0), (780, 0), (840, 0)]
    minutes.roll(905.0 + 7200)
    assert len(minutes.past) == 60 and minutes.past[-1].start == 8040
    minutes.roll(300.0)  # a clock that was set back
    assert minutes.current.start == 300


@pytest.mark.parametrize("seconds", [0.000_02, 0.001, 0.25, 3.0, 500.0])
def test_p95_is_right_to_about_a_tenth(seconds: float) -> None:
    minutes = MinuteStats(0.0)
    assert p95(minutes.current.times) == 0.0
    minutes.count(1.0, [round(seconds * 1e9)] * 96 + [round(100 * seconds * 1e9)] * 4)
    assert p95(minutes.current.times) == pytest.approx(seconds, rel=0.13)


# The stream


async def test_nothing_is_told_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "WATCH_SECONDS", 0.3)
    monkeypatch.setattr(streaming, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(streaming, "SLOW_TICK_SECONDS", 0.1)
    shop = Shop()
    async with consoled(shop.server) as rig, Peer(shop.server) as peer:
        pulse, feed = rig.console.publisher, rig.console.context.feed

        def looks() -> bool:
            return feed.on_change is not None

        await peer.call("add", {"a": 1, "b": 2})
        assert not looks() and pulse.ticks == 0 and not feed.unread
        page = await rig.page()
        await page.listen()
        await peer.call("add", {"a": 1, "b": 2})
        await row_of(page, "add", "done")
        assert pulse.ticks and looks()
        await page.close()
        async with asyncio.timeout(PATIENCE):
            while looks():
                await peer.tools()
        ticks = pulse.ticks
        await peer.call("add", {"a": 1, "b": 2})
        assert not feed.unread and pulse.ticks == ticks
        assert feed.totals[0] == 3, "counted, whoever looks"


async def test_of_very_many_calls_a_sample_is_shown_failures_first() -> None:
    shop = Shop(rates=None)
    async with watched(shop) as (_, page, peer):
        await peer.call("fail", {})
        for _ in range(60):
            await peer.call("quick", {"text": "x"})
        shown: list[Object] = []
        totals = {"calls": 0}
        while totals["calls"] < 61:
            tick = await page.event("tick")
            shown += tick["finished"]
            totals = tick["totals"]
            assert len(tick["finished"]) <= 20
        assert "tool_error" in [row["outcome"] for row in shown] and totals["errors"] == 1


async def test_a_change_of_the_tools_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop()
    async with watched(shop) as (_, page, _peer):
        await asyncio.to_thread(shop.server.disable, "add")
        assert await page.event("tools") == {}


async def test_health_is_told_in_words_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SLOW_TICK_SECONDS", 0.05)
    monkeypatch.setattr(streaming, "RENEW_SECONDS", 0.1)
    shop = Shop()
    async with watched(shop) as (_, page, peer):
        for _ in range(6):
            await peer.call("fail", {})
        async with asyncio.timeout(PATIENCE):
            while (health := await page.event("health"))["sentence"] != "6 of 6 calls failed in the last five minutes.":
                pass
        assert health["level"] == "bad"
        for name in [tool.name for tool in shop.server.tools]:
            shop.server.disable(name)
        async with asyncio.timeout(PATIENCE):
            while not any("no tools" in note for note in (await page.event("health"))["notes"]):
                pass


@requirement("APP-02")
async def test_refusals_are_counted_by_caller_and_reason() -> None:
    """At the headline, in the figures, by tool and by tool since the start; the time of a refusal is nobody's p95."""
    limits = Rates(tools={"quick": ToolRate(rate="2/minute")})
    shop = Shop(rates=limits, policy=Policy([Rule(name="no adding", verdict="deny", tools=["add"])]))
    async with consoled(shop.server) as rig, Peer(shop.server) as peer:
        for _ in range(3):
            await peer.request("tools/call", {"name": "add", "arguments": {"a": 1, "b": 2}})
        for number in range(7):
            await peer.request("tools/call", {"name": "quick", "arguments": {"text": f"number {number}"}})
        await peer.request("tools/call", {"name": "fail", "arguments": {}})
        await peer.request("tools/call", {"name": "made up", "arguments": {}})
        page = await rig.page()
        hello = await page.listen()
        tools = {each["name"]: each for each in (await page.get("tools"))["tools"]}
    assert hello["health"]["sentence"] == (
        "1 of 12 calls failed and 9 refused in the last five minutes: 5 rate limit, 3 rule, 1 unknown tool."
    )
    assert hello["health"]["level"] == "warn"
    figures = hello["figures"]
    assert figures["refused"] == [
        {"who": "local", "reason": "rate limit", "calls": 5},
        {"who": "local", "reason": "rule", "calls": 3},
        {"who": "local", "reason": "unknown tool", "calls": 1},
    ]
    assert figures["last"] | {"p95_ms": 0} == {"calls": 12, "errors": 1, "refused": 9, "p95_ms": 0}
    listed = [tuple(each[name] for name in ("tool", "calls", "errors", "refused")) for each in figures["tools"]]
    assert listed == [("quick", 7, 0, 5), ("add", 3, 0, 3), ("fail", 1, 1, 0)]
    assert [each["p95_ms"] > 0 for each in figures["tools"]] == [True, False, True]
    assert [(tools[name]["calls"], tools[name]["refused"]) for name in ("quick", "add", "fail", "hold")] == [
        *((7, 5), (3, 3), (1, 0), (0, 0)),
    ]
    assert tools["quick"]["p95_ms"] > 0 == tools["add"]["p95_ms"]


async def test_figures_are_of_the_last_sixty_seconds_and_told_when_time_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "SLOW_TICK_SECONDS", 0.05)
    now = [1_000_030.0]  # in the middle of a minute
    shop = Shop()
    shop.server.engine.clock = lambda: now[0]
    async with watched(shop) as (_, page, peer):

        async def calls(number: int) -> None:
            async with asyncio.timeout(PATIENCE):
                while (await page.event("figures"))["last"]["calls"] != number:
                    pass

        await peer.call("add", {"a": 1, "b": 2})
        await calls(1)
        now[0] += 45  # another minute by the clock, and yet within sixty seconds
        await peer.call("add", {"a": 1, "b": 2})
        await calls(2)
        now[0] += 30
        await calls(1)  # though nothing happened
        now[0] += 30
        await calls(0)


async def test_a_row_has_the_first_arguments_with_secrets_masked() -> None:
    shop = Shop()
    async with watched(shop) as (_, page, peer):
        await peer.call("add", {"a": 1, "b": 2})
        assert (await row_of(page, "add", "done"))["first"] == "a 1, b 2"
        call = asyncio.create_task(peer.call("hold", {"password": "open-sesame-4711"}))
        first = (await row_of(page, "hold", "running"))["first"]
        assert first.startswith("password ") and "sesame" not in first
        shop.go.set()
        await call
        await peer.call("quick", {"text": "long\n" * 200})
        assert (await row_of(page, "quick", "done"))["first"] == "text … 1,202 bytes"
        await peer.call("quick", {"text": "\u202eevil"})
        assert "\u202e" not in (await row_of(page, "quick", "done"))["first"]


# Connections


@requirement("APP-14")
async def test_connections_appear_and_go() -> None:
    now = [1_000_000.0]
    shop = Shop()
    shop.server.engine.clock = lambda: now[0]
    async with consoled(shop.server) as rig:

        async def there() -> list[tuple[str, str, bool, int]]:
            page = await rig.page()
            found = (await page.listen())["connections"]
            await page.close()
            return [(each["who"], each["revision"], each["open"], each["calls"]) for each in found]

        assert await there() == []
        async with Peer(shop.server, principal=Principal("ada")) as ada:
            await ada.call("add", {"a": 1, "b": 2})
            async with Peer(shop.server, revision="2026-07-28", principal=Principal("bob")) as bob:
                await bob.tools()
                assert await there() == [("ada", "2025-11-25", True, 1), ("bob", "2026-07-28", True, 0)]
            now[0] += 59
            assert await there() == [("ada", "2025-11-25", True, 1), ("bob", "2026-07-28", False, 0)]
            now[0] += 2
            assert await there() == [("ada", "2025-11-25", True, 1)], "for as long as its stream is open"
        now[0] += 61
        assert await there() == []


async def test_who_goes_is_gone_from_the_page_although_nothing_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SLOW_TICK_SECONDS", 0.05)
    now = [1_000_000.0]
    shop = Shop()
    shop.server.engine.clock = lambda: now[0]
    async with consoled(shop.server) as rig:
        page = await rig.page()
        await page.listen()
        async with Peer(shop.server) as peer:
            await peer.call("add", {"a": 1, "b": 2})
            await open_ones(page, 1)
        await open_ones(page, 0)
        now[0] += 61
        async with asyncio.timeout(PATIENCE):
            while await page.event("connections"):
                pass


async def open_ones(page: Page, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while len([each for each in await page.event("connections") if each["open"]]) != count:
            pass


async def test_two_who_say_the_same_of_themselves_are_two_if_they_shook_hands() -> None:
    shop = Shop()
    async with consoled(shop.server) as rig, Peer(shop.server), Peer(shop.server) as second:
        await second.tools()
        page = await rig.page()
        first, other = (await page.listen())["connections"]
        assert first["id"] != other["id"] and first["client"] == other["client"]


# Several workers


@asynccontextmanager
async def beside(first: Rig, shop: Shop, shared: Path) -> AsyncIterator[Console]:
    """The console of another worker of the same server."""
    second = Console(shop.server, workers=2, shared=shared)
    second.context.channel = first.console.context.channel
    async with shop.server.serving(), second.serving():
        second.context.worker = "second"
        yield second


async def test_a_stream_shows_what_all_workers_do(tmp_path: Path) -> None:
    store = MemoryStore()
    one, two = Shop(store=store), Shop(store=store)
    shared = tmp_path / "console.sqlite"
    async with (
        consoled(one.server, workers=2, shared=shared) as rig,
        beside(rig, two, shared),
        Peer(one.server) as here,
        Peer(two.server) as there,
    ):
        await here.call("add", {"a": 1, "b": 2})
        await there.call("fail", {})
        page = await rig.page()
        hello = await page.listen()
        assert hello["totals"] == {"calls": 2, "errors": 1, "refused": 0}
        assert hello["minute"]["calls"] == 2 and len(hello["finished"]) == 2
        last = hello["figures"]["last"]
        assert (last["calls"], last["errors"], last["refused"]) == (2, 1, 0) and last["p95_ms"] > 0
        assert {each["tool"] for each in hello["figures"]["tools"]} == {"add", "fail"}
        assert len({each["worker"] for each in hello["connections"]}) == 2
        calls = [asyncio.create_task(peer.call("hold", {})) for peer in (here, there)]
        async with asyncio.timeout(PATIENCE):
            while len((tick := await page.event("tick"))["running"]) < 2:
                pass
        assert tick["running_total"] == 2
        far = next(row for row in tick["running"] if row["worker"] == "second")
        await page.post(f"calls/{far['id']}/cancel")
        assert "operator" in (await calls[1]).text and not calls[0].done()
        one.go.set()
        await calls[0]
        async with asyncio.timeout(PATIENCE):
            while (await page.event("tick"))["totals"]["calls"] < 4:
                pass


@pytest.mark.parametrize("how", ["stopped", "signed out"])
async def test_a_stream_that_waits_for_a_worker_ends_when_it_is_to(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "GREET_SECONDS", PATIENCE)
    async with consoled(Shop().server, workers=2, shared=tmp_path / "console.sqlite") as rig:
        page, watching = await rig.page(), asyncio.Event()
        monkeypatch.setattr(rig.console.context, "on_watch", watching.set)
        reading = asyncio.create_task(page._read())
        async with asyncio.timeout(PATIENCE / 2):
            await watching.wait()  # it was greeted by the one worker there is
            if how == "stopped":
                rig.console.context.stopping.set()
            else:
                await page.post("sign-out")
            await reading


async def test_calls_of_a_worker_that_was_killed_do_not_run_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "LOST_SECONDS", 0.5)
    monkeypatch.setattr(streaming, "SLOW_TICK_SECONDS", 0.1)
    store = MemoryStore()
    one, two = Shop(store=store), Shop(store=store)
    shared = tmp_path / "console.sqlite"
    async with (
        consoled(one.server, workers=2, shared=shared) as rig,
        beside(rig, two, shared) as second,
        Peer(one.server) as here,
        Peer(two.server) as there,
    ):
        page = await rig.page()
        await page.listen()
        calls = [asyncio.create_task(peer.call("hold", {})) for peer in (here, there)]
        async with asyncio.timeout(PATIENCE):
            while (await page.event("tick"))["running_total"] < 2:
                pass
            publish = second.context.topics.publish
            monkeypatch.setattr(
                second.context.topics, "publish", lambda *_: asyncio.Event().wait()
            )  # as if it were dead
            while (tick := await page.event("tick"))["running_total"] > 1:
                pass
            assert [row["worker"] for row in tick["running"]] == [rig.console.context.worker]
            while {each["worker"] for each in await page.event("connections")} != {rig.console.context.worker}:
                pass
            monkeypatch.setattr(second.context.topics, "publish", publish)
        for shop in (one, two):
            shop.go.set()
        await asyncio.gather(*calls)


async def test_counts_of_a_tool_are_those_of_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handrail.console.context.REPLY_SECONDS", PATIENCE)
    store = MemoryStore()
    one, two = Shop(store=store), Shop(store=store)
    shared = tmp_path / "console.sqlite"
    async with (
        consoled(one.server, workers=2, shared=shared) as rig,
        beside(rig, two, shared),
        Peer(one.server) as here,
        Peer(two.server, principal=Principal("far", frozenset({"admin"}))) as there,
    ):
        for peer in (here, there, there):
            await peer.call("add", {"a": 1, "b": 2})
            await peer.call("fail", {})
        page = await rig.page()
        view = await page.get("tools")
        found = {each["name"]: each for each in view["tools"]}
        assert (found["add"]["calls"], found["add"]["errors"]) == (3, 0)
        assert (found["fail"]["calls"], found["fail"]["errors"]) == (3, 3)
        assert "far" in view["principals"]
        assert (await page.get("tools", **{"as": "far"}))["scopes"] == ["admin"]
        last = max(tally.last for tally in (two.feed.tools["add"], one.feed.tools["add"]))
        assert found["add"]["last"] == last


async def test_a_worker_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handrail.console.context.REPLY_SECONDS", 0.1)
    shop = Shop()
    async with consoled(shop.server, workers=2, shared=tmp_path / "console.sqlite") as rig, Peer(shop.server) as peer:
        await peer.call("add", {"a": 1, "b": 2})
        view = await (await rig.page()).get("tools")
        assert next(each for each in view["tools"] if each["name"] == "add")["calls"] == 1


async def test_a_worker_that_begins_later_has_the_switches_as_they_are(tmp_path: Path) -> None:
    store = MemoryStore()
    one, two = Shop(store=store), Shop(store=store)
    two.server.disable("crash")
    shared = tmp_path / "console.sqlite"
    async with consoled(one.server, workers=2, shared=shared) as rig:
        page = await rig.page()
        for tool, on in (("add", False), ("fail", False), ("fail", True), ("crash", False), ("crash", True)):
            await page.post(f"tools/{tool}/switch", on=on)
        prefix = f"{tools.SWITCH_PREFIX}{tools.TOOLS} "
        gone = [Put(f"{prefix}a{number:04}", b"false") for number in range(1_000)]  # tools there were once
        assert await rig.console.context.topics.commit(gone)
        async with beside(rig, two, shared), Peer(two.server) as there:
            names = {each.name for each in await there.tools()}
            assert "add" not in names and {"fail", "crash"} <= names


def start(home: Path, *words: str) -> tuple[subprocess.Popen[str], str, str]:
    process = subprocess.Popen(
        [*COMMAND, "serve", *words], stderr=subprocess.PIPE, encoding="utf-8", cwd=home, env=environment(home)
    )
    assert process.stderr is not None
    said = ""
    while "Console: " not in said and (line := process.stderr.readline()):
        said += line
    endpoint, link = re.search(r"on (http:\S+)", said), re.search(r"Console: (http:\S+)", said)
    assert endpoint and link, said
    return process, endpoint[1], link[1]


SERVED = """
from handrail import Server
server = Server("shop")

@server.tool
def add(a: int, b: int) -> int:
    return a + b
"""


async def test_two_processes_are_one_console(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SERVED, "utf-8")
    words = ("shop.py", "--http", "127.0.0.1:0", "--console", "127.0.0.1:0", "--workers", "2")
    process, endpoint, link = await asyncio.to_thread(start, tmp_path, *words)
    assert process.stderr is not None
    with closing(process.stderr):
        try:
            url, code = link.split("/#code=")
            page = Page(aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)), url)
            me = await page.sign_in(code)
            assert me["server"]["workers"] == 2 and me["server"]["transport"] == "http" and me["server"]["audit"]
            assert me["server"]["endpoint"] == me["server"]["target"] == endpoint  # with the port it was given
            await page.listen()
            for _ in range(8):  # each has a connection of its own, and comes to one of both
                async with Client(endpoint) as client:
                    await client.call("add", {"a": 1, "b": 2})
            async with asyncio.timeout(PATIENCE):
                while (tick := await page.event("tick"))["totals"]["calls"] < 8:
                    pass
            assert tick["totals"] == {"calls": 8, "errors": 0, "refused": 0}
            for _ in range(6):  # whichever worker is asked knows the session
                assert (await page.get("me"))["who"] == "local"
            await page.close()
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, PATIENCE)
    assert process.returncode == 0


async def test_over_stdio_the_console_is_served_in_the_same_process(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SERVED, "utf-8")
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "serve", "shop.py", "--console", "127.0.0.1:0"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    assert process.stdin and process.stdout and process.stderr
    line = b"-"
    while line and not line.startswith(b"Console: "):
        line = await process.stderr.readline()
    link = line.decode().removeprefix("Console: ").strip()
    url, code = link.split("/#code=")
    page = Page(aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)), url)
    assert (await page.sign_in(code))["server"]["transport"] == "stdio"
    await page.listen()
    me: Object = {"clientInfo": {"name": "t", "version": "1"}}
    messages: list[Object] = [
        {"id": 1, "method": "initialize", "params": {"protocolVersion": "2025-11-25", "capabilities": {}, **me}},
        {"id": 2, "method": "tools/call", "params": {"name": "add", "arguments": {"a": 1, "b": 2}}},
    ]
    for message in messages:
        process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        await process.stdout.readline()
    row = await row_of(page, "add", "done")
    assert (row["from"], row["outcome"]) == ("stdio", "ok")
    again = await asyncio.create_subprocess_exec(
        *COMMAND,
        "console",
        "--as",
        "grace",
        "--roles",
        "view",
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    second, _ = await again.communicate()
    other = Page(aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)), url)
    me = await other.sign_in(second.decode().strip().split("/#code=")[1])
    assert (me["who"], me["roles"]) == ("grace", ["view"])
    await page.close()
    await other.close()
    process.stdin.close()
    await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 0


async def test_the_usual_address_gives_way_unless_it_was_asked_for() -> None:
    first, second = Console(Server("a")), Console(Server("b"))
    with first.listening("127.0.0.1:0"):
        taken = first.url.removeprefix("http://")
        with pytest.raises(OSError, match="cannot listen"), second.listening(taken):
            pass
    with first.listening(), second.listening():
        assert first.url != second.url


# Rules on trial


async def test_rules_on_trial_are_counted_and_shown_with_what_they_would_have_decided(tmp_path: Path) -> None:
    """On the page of the call, also when only the audit log has it; and all of them, with those that match nothing."""
    rules = [
        Rule(verdict="deny", tools=["drop*"], name="no drops", mode="audit"),
        Rule(verdict="ask", tools=["never"], name="a: b", mode="audit"),
        Rule(verdict="allow", tools=["drop_copy"], name="copies", mode="audit"),
        Rule(verdict="allow"),
    ]
    server = Server("trials", policy=Policy(rules), audit=tmp_path / "audit.db")
    for name in ("read", "drop", "drop_copy"):
        server.add(lambda: "done", name=name)
    async with consoled(server) as rig, Peer(server) as peer:
        page = await rig.page()
        none = {"calls": 0, "differs": 0, "last": 0.0}
        assert (await page.listen())["figures"]["trials"] == [
            {"rule": "no drops", "verdict": "deny", **none},
            {"rule": "a: b", "verdict": "ask", **none},
            {"rule": "copies", "verdict": "allow", **none},
        ]
        for name in ("read", "drop", "drop", "drop_copy"):
            assert not (await peer.call(name)).is_error
        figures = await page.event("figures")
        while figures["trials"][0]["calls"] < 3:
            figures = await page.event("figures")
        drops, other, copies = figures["trials"]
        assert (drops["calls"], drops["differs"], drops["last"] > 0) == (3, 3, True)
        assert other == {"rule": "a: b", "verdict": "ask", **none}
        assert (copies["calls"], copies["differs"]) == (1, 0)  # it is allowed now as well
        finished = (await page.listen())["finished"]
        stories = {row["tool"]: await page.get(f"calls/{row['id']}") for row in finished}
        assert stories["read"]["would_decide"] == []
        assert stories["drop_copy"]["would_decide"] == ["no drops: deny", "copies: allow"]
        rig.console.context.feed._ring.clear()  # as after 500 other calls
        later = await page.get(f"calls/{stories['drop']['row']['id']}")
        assert (later["source"], later["would_decide"]) == ("audit", ["no drops: deny"])


def test_counts_of_rules_on_trial_are_those_of_all_workers() -> None:
    one = statistics.Figures(trials={"a: deny": TrialTally(2, 1, 5.0)})
    other = statistics.Figures(trials={"a: deny": TrialTally(3, 3, 4.0), "b: ask": TrialTally(1, 0, 1.0)})
    merged = statistics.merge_figures([one, other]).trials
    assert merged == {"a: deny": TrialTally(5, 4, 5.0), "b: ask": TrialTally(1, 0, 1.0)}
    assert one.trials == {"a: deny": TrialTally(2, 1, 5.0)}
    assert statistics.merge_figures([]).trials == {}
