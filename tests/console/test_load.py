"""Many calls a second while a page is open. What that costs the server is measured by `benchmarks/console.py`."""

from __future__ import annotations

import asyncio
import json

from handrail import Server
from handrail.engine.call_state import CallState
from handrail.engine.dispatcher import Dispatcher
from handrail.engine.outcome import CallEnd, RefusedCall
from handrail.engine.reply_channel import NullChannel
from handrail.model import Principal
from handrail.observe.activity import ActivityFeed
from handrail.observe.metrics import Metrics
from handrail.testing import Peer
from patience import PATIENCE
from requirements import requirement
from rigs_console import consoled

CALLS = 3_000


@requirement("APP-15")
async def test_a_flood_is_counted_exactly_and_told_in_few_events() -> None:
    server = Server("flood", rates=None)

    @server.tool(inline=True)
    def tick(number: int) -> int:
        return number

    async with consoled(server) as rig, Peer(server) as peer:
        page = await rig.page()
        hello = await page.listen()
        assert hello["totals"]["calls"] == 0
        for number in range(CALLS):
            await peer.request("tools/call", {"name": "tick", "arguments": {"number": number}})
        events = shown = 0
        async with asyncio.timeout(PATIENCE):
            while True:
                found = await page.event("tick")
                events += 1
                shown += len(found["finished"])
                assert len(found["finished"]) <= 20 and len(found["running"]) <= 100
                if found["totals"]["calls"] == CALLS:
                    break
        assert events < CALLS / 20, "ten a second, however many calls there are"
        assert shown <= 20 * events and found["minute"]["calls"] <= CALLS
        assert len(rig.console.context.feed.recent) == 500


class Failing:
    """A sink that fails whenever it is told of a call."""

    def on_start(self, call: CallState) -> None:
        raise RuntimeError("start")

    def on_end(self, call: CallState, end: CallEnd, answer: bytes | None) -> None:
        raise RuntimeError("end")

    def on_refusal(self, refusal: RefusedCall) -> None:
        raise RuntimeError("refusal")


async def test_a_sink_that_fails_takes_nothing_from_the_call_and_the_other_sinks() -> None:
    server = Server("observed")
    metrics = Metrics.of(server.engine)
    server.engine.add_sink(Failing())
    feed = ActivityFeed.of(server.engine)

    @server.tool
    def number() -> int:
        return 7

    async with Peer(server) as peer:
        assert (await peer.call("number", {})).text == "7"
        assert "error" in await peer.request("tools/call", {"name": "nothing", "arguments": {}})
    assert feed.totals == (2, 0, 1) and not feed.running
    assert list(metrics.in_flight.values.values()) == [0]


async def test_a_call_made_while_another_is_handled_is_counted_as_well() -> None:
    """A tool may call an application in its own process, which then answers before the tool goes on."""
    server = Server("nested", rates=None)
    feed = ActivityFeed.of(server.engine)

    @server.tool
    async def inner(number: int) -> int:
        return number

    @server.tool
    async def outer() -> str:
        answers = [within.receive(_call("inner", {"number": number})) for number in (1, 2)]
        answers.append(within.receive(_call("inner", {"number": "three"})))
        answers.append(within.receive(_call("nothing", {})))
        return b" ".join(each or b"later" for each in answers).decode()

    within = Dispatcher(server.engine, NullChannel(), Principal("inside"))
    within.receive(_message("initialize", HELLO))
    async with Peer(server) as peer:
        answer = await peer.call("outer", {})
        await peer.call("inner", {"number": 4})
    assert '"result":1' in answer.text and '"result":2' in answer.text
    assert feed.totals == (6, 0, 2) and not feed.running
    assert [(seen.number, seen.tool, seen.outcome) for seen in feed.recent] == [
        (2, "inner", "ok"),
        (3, "inner", "ok"),
        (4, "inner", "bad_arguments"),
        (5, "nothing", "unknown_tool"),
        (1, "outer", "ok"),
        (6, "inner", "ok"),
    ]
    assert {name: each.calls for name, each in feed.tools.items()} == {"inner": 4, "outer": 1}
    assert all(seen.answer and seen.seconds > 0 for seen in feed.recent)


HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "within", "version": "1"}}


def _call(tool: str, arguments: object) -> bytes:
    return _message("tools/call", {"name": tool, "arguments": arguments})


def _message(method: str, params: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
