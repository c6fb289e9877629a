"""One caller does not hold all slots of a tool."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from handrail import Call, Server
from handrail.engine.pipeline import Handler
from handrail.guards.limits import Rates, ToolRate
from handrail.model import Principal, ToolResult
from handrail.testing import Peer


@pytest.mark.parametrize(
    ("limit", "share"),
    [
        (ToolRate(concurrent=2), 1),
        (ToolRate(concurrent=4), 3),
        (ToolRate(concurrent=4, each=1), 1),
        (ToolRate(concurrent=1), 1),
        (ToolRate(concurrent=3, each=3), 3),
    ],
    ids=["two", "four", "one each", "only one", "all by option"],
)
async def test_another_caller_gets_in_beside_one_that_takes_what_it_can(limit: ToolRate, share: int) -> None:
    server = Server("slots", rates=Rates(tools={"waits": limit}))
    gate, running = asyncio.Event(), asyncio.Semaphore(0)

    @server.tool
    async def waits() -> str:
        running.release()
        await gate.wait()
        return "done"

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server.serving())
        ada, bob = [
            await stack.enter_async_context(Peer(server.connect(Principal(name)), timeout=60))
            for name in ("ada", "bob")
        ]
        greedy = [asyncio.ensure_future(ada.call("waits")) for _ in range(10)]
        for _ in range(share):
            await asyncio.wait_for(running.acquire(), 30)
        while len(refused := [each for each in greedy if each.done()]) < 10 - share:
            await asyncio.wait([each for each in greedy if not each.done()], return_when=asyncio.FIRST_COMPLETED)
        for each in refused:
            assert each.result().is_error and "at once" in each.result().text
        other = asyncio.ensure_future(bob.call("waits"))
        if share < (limit.concurrent or 0):
            await asyncio.wait_for(running.acquire(), 30)
        else:  # there is no other
            assert (await other).is_error
        gate.set()
        await asyncio.gather(*greedy, other)
        again = [asyncio.ensure_future(ada.call("waits")) for _ in range(share)]
        assert [each.text for each in await asyncio.gather(*again)] == ["done"] * share


async def test_the_one_caller_over_standard_input_has_all_slots() -> None:
    server = Server("slots", rates=Rates(tools={"waits": ToolRate(concurrent=2)}))
    gate, running = asyncio.Event(), asyncio.Semaphore(0)

    @server.tool
    async def waits() -> str:
        running.release()
        await gate.wait()
        return "done"

    async with Peer(server, timeout=60) as peer:
        calls = [asyncio.ensure_future(peer.call("waits")) for _ in range(2)]
        for _ in calls:
            await asyncio.wait_for(running.acquire(), 30)
        gate.set()
        assert [each.text for each in await asyncio.gather(*calls)] == ["done", "done"]


@pytest.mark.parametrize("limit", [ToolRate(each=1), ToolRate(concurrent=3, each=1)], ids=["alone", "of three"])
async def test_a_share_that_was_set_holds_over_standard_input_too(limit: ToolRate) -> None:
    server = Server("slots", rates=Rates(tools={"waits": limit}))
    gate, running = asyncio.Event(), asyncio.Semaphore(0)

    @server.tool
    async def waits() -> str:
        running.release()
        await gate.wait()
        return "done"

    async with Peer(server, timeout=60) as peer:
        first = asyncio.ensure_future(peer.call("waits"))
        await asyncio.wait_for(running.acquire(), 30)
        second = asyncio.ensure_future(peer.call("waits"))
        begun = asyncio.ensure_future(running.acquire())
        await asyncio.wait([second, begun], return_when=asyncio.FIRST_COMPLETED)
        assert not begun.done()
        assert "1 of this tool at once for one caller" in (await second).text
        begun.cancel()
        gate.set()
        assert (await first).text == "done"


async def test_runs_of_a_call_side_by_side_all_give_their_slots_back() -> None:
    server = Server("slots", rates=Rates(tools={"works": ToolRate(concurrent=3, each=3)}))

    @server.tool
    async def works() -> str:
        await asyncio.sleep(0)
        return "done"

    @server.middleware
    async def twice_at_once(call: Call, inner: Handler) -> ToolResult:
        return (await asyncio.gather(inner(call), inner(call)))[0]

    async with Peer(server, timeout=60) as peer:
        for _ in range(4):
            assert (await peer.call("works")).text == "done"
