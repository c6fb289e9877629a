"""What every measured client does: connect, take orders on standard input, say on standard output what they cost.

The first line names the wires: where each leads to, and in which revision. Every other line has calls to make over one
of them. Needs nothing but Python: the peers' interpreters run it too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

__all__ = ["Call", "Target", "take_orders"]

Object = dict[str, Any]
Target = str | list[str]  # an address, or a command
Call = Callable[[str, Object], Awaitable[tuple[str, Any]]]  # a tool and its arguments to text and structured content

LONGEST_ORDER = 1 << 26


def take_orders(connect: Callable[[Target, str], AbstractAsyncContextManager[Call]]) -> None:
    """Until standard input ends. `connect` gives the `call` of a client connected to a target in a revision."""
    asyncio.run(_take_orders(connect))


async def _take_orders(connect: Callable[[Target, str], AbstractAsyncContextManager[Call]]) -> None:
    # Not a blocking read: between orders a client has to notice that a server has closed an idle connection.
    orders = asyncio.StreamReader(limit=LONGEST_ORDER)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    async with AsyncExitStack() as stack:
        wires = {
            name: await stack.enter_async_context(connect(wire["target"], wire["revision"]))
            for name, wire in json.loads(await orders.readline()).items()
        }
        _say({})
        async for line in orders:
            order = json.loads(line)
            _say(await _carried_out(wires[order["wire"]], order["tool"], order["calls"], order["window"]))


async def _carried_out(call: Call, tool: str, calls: list[tuple[int, Object]], window: int) -> Object:
    """Make the calls, `window` at a time; what it took this process, each of them, and what they gave."""
    # Connections are made and have had an answer before the clock runs: idle ones may have been closed.
    await asyncio.gather(*(call(tool, calls[0][1]) for _ in range(window)))
    latencies: list[int] = []
    answers: list[tuple[int, str, Any]] = []
    unsent = iter(calls)
    callers = [_one_by_one(call, tool, unsent, latencies, answers) for _ in range(window)]
    cpu, begun = time.process_time_ns(), time.perf_counter_ns()
    if window == 1:
        await callers[0]
    else:
        await asyncio.gather(*callers)
    wall, cpu = time.perf_counter_ns() - begun, time.process_time_ns() - cpu
    return {"cpu_ns": cpu, "wall_ns": wall, "latencies_ns": latencies, "answers": answers}


async def _one_by_one(
    call: Call,
    tool: str,
    calls: Iterable[tuple[int, Object]],
    latencies: list[int],
    answers: list[tuple[int, str, Any]],
) -> None:
    clock = time.perf_counter_ns
    for id, arguments in calls:
        sent = clock()
        text, data = await call(tool, arguments)
        latencies.append(clock() - sent)
        answers.append((id, text, data))


def _say(what: Object) -> None:
    print(json.dumps(what), flush=True)
