"""Many calls a second while a page is open. What that costs the server is measured by `benchmarks/console.py`."""

from __future__ import annotations

import asyncio

from handrail import Server
from handrail.testing import Peer
from requirements import requirement
from rigs_console import PATIENCE, consoled

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
        assert len(rig.console.feed.kept) == 500
