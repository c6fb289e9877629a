"""Starting a coroutine so that it runs at once, in a task of its own, up to where it first has to wait.

Most calls never wait. A task that starts at the next turn of the loop would cost them a queue and a callback; one that
starts here costs an object, and inside it `asyncio.current_task`, `asyncio.timeout` and context variables behave as
everywhere. Python 3.12 can do this itself. On 3.11 a task asks its loop for one thing when it is made: to call its
first step soon. `_start_by_hand` takes that step out of the loop's hands and calls it now.

Both may only be used from a callback of the loop, never from inside another task.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

__all__ = ["start"]


def _start_eagerly(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> asyncio.Task[Any]:
    make: Callable[..., asyncio.Task[Any]] = asyncio.Task
    return make(coroutine, loop=loop, eager_start=True)


def _start_by_hand(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> asyncio.Task[Any]:
    steps: list[tuple[Callable[[], object], Context]] = []

    def take(step: Callable[[], object], *, context: Context) -> None:
        steps.append((step, context))

    try:
        vars(loop)["call_soon"] = take
    except TypeError:  # a loop without attributes of its own, such as uvloop's
        return loop.create_task(coroutine)
    try:
        task = asyncio.Task(coroutine, loop=loop)
    finally:
        del vars(loop)["call_soon"]
    step, context = steps.pop()
    context.run(step)
    return task


start = _start_eagerly if sys.version_info >= (3, 12) else _start_by_hand
