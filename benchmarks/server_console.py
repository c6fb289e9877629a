"""What `benchmarks/console.py` calls: a quick tool, and one that takes a while. `handrail serve` serves it."""

from __future__ import annotations

import asyncio

from handrail import Server

server = Server("bench", rates=None)


@server.tool
async def add(a: int, b: int) -> int:
    return a + b


@server.tool
async def hold(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"
