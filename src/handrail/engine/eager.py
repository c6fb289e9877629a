"""Starting a coroutine so that it runs at once, in a task of its own, up to where it first has to wait.

Most calls never wait. A task that starts at the next turn of the loop would cost them a queue and a callback; one that
starts here costs an object, and inside it `asyncio.current_task`, `asyncio.timeout` and context variables behave as
everywhere. Python 3.12 can do this itself. On 3.11 a new task asks its loop for one thing: to call its first step soon.
`_EagerStarter311` intercepts that step and calls it now.

A task that starts another one this way is suspended for that moment: a loop runs one task at a time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

Start = Callable[..., "asyncio.Task[Any]"]
"""Starts a coroutine, or goes on with one, in a copy of the current context or in one that is named."""

_NAME = "tools/call"  # a name of its own would be generated for each task


def starter(loop: asyncio.AbstractEventLoop) -> Start:
    """A function that starts a coroutine on this loop."""
    if sys.version_info >= (3, 12):
        make: Callable[..., asyncio.Task[Any]] = asyncio.Task
        return lambda coroutine, context=None: make(coroutine, loop=loop, name=_NAME, context=context, eager_start=True)
    if hasattr(loop, "__dict__"):
        return _EagerStarter311(loop).start
    return lambda coroutine, context=None: loop.create_task(coroutine, context=context)  # such as uvloop's


class _EagerStarter311:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._attributes = vars(loop)
        self._current: dict[Any, asyncio.Task[Any]] = asyncio.tasks._current_tasks  # type: ignore[attr-defined]  # 3.11
        self._call_soon = loop.call_soon
        self._steps: list[tuple[Callable[[], object], Context]] = []

    def _capture_step(self, step: Callable[..., object], *args: object, context: Context | None = None) -> object:
        # Memory is allocated meanwhile, so destructors may run and call the loop too.
        if args or context is None:
            return self._call_soon(step, *args, context=context)
        self._steps.append((step, context))
        return None

    def start(self, coroutine: Coroutine[Any, Any, Any], context: Context | None = None) -> asyncio.Task[Any]:
        self._attributes["call_soon"] = self._capture_step
        try:
            task = asyncio.Task(coroutine, loop=self._loop, name=_NAME, context=context)
        finally:
            del self._attributes["call_soon"]
        step, inside = self._steps.pop() if len(self._steps) == 1 else self._first_step(task)
        outer = self._current.get(self._loop)
        if outer is None:
            inside.run(step)
        else:
            asyncio.tasks._leave_task(self._loop, outer)
            try:
                inside.run(step)
            finally:
                asyncio.tasks._enter_task(self._loop, outer)
        return task

    def _first_step(self, task: asyncio.Task[Any]) -> tuple[Callable[[], object], Context]:
        first = self._steps.pop()
        while self._steps:  # of tasks that destructors started
            other = self._steps.pop()
            if getattr(other[0], "__self__", None) is task:
                first, other = other, first
            self._call_soon(other[0], context=other[1])
        return first
