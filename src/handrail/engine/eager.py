"""Starting a coroutine so that it runs at once, in a task of its own, up to where it first has to wait.

Most calls never wait. A task that starts at the next turn of the loop would cost them a queue and a callback; one that
starts here costs an object, and inside it `asyncio.current_task`, `asyncio.timeout` and context variables behave as
everywhere. Python 3.12 can do this itself. On 3.11 a new task asks its loop for one thing: to call its first step soon.
`_EagerStarter311` intercepts that step and calls it now.

A task that starts another one this way is suspended for that moment: a loop runs one task at a time.

Threads for tools that block. Bounded, our own, and never waited for at exit.

The standard pool joins its threads when the interpreter ends, so one tool that hangs would keep the process alive.
A thread cannot be stopped: after its call was cancelled it keeps its place until the tool returns, and is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any

from msgspec import Struct

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


class _Job(Struct, eq=False):
    work: Callable[[], Any]
    done: asyncio.Future[Any]
    running: bool = False
    abandoned: bool = False
    ended: Callable[[], None] | None = None


class ThreadPool:
    """A bounded set of threads; `run` waits for a free one."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"workers: {size} is less than 1")
        self.size = size
        self.busy = 0
        self.abandoned = 0  # cancelled, still running
        self._threads = 0
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()

    async def run(self, function: Callable[..., Any], *args: Any, ended: Callable[[], None] | None = None) -> Any:
        """Return the result of the function. `ended` is called when it has returned, also after a cancellation."""
        work = partial(copy_context().run, function, *args)
        job = _Job(work, asyncio.get_running_loop().create_future(), ended=ended)
        with self._lock:
            self.busy += 1
            if self._threads < min(self.size, self.busy):
                self._threads += 1
                threading.Thread(target=self._work, name=f"handrail-worker-{self._threads}", daemon=True).start()
        self._jobs.put(job)
        try:
            return await job.done
        finally:
            with self._lock:
                if job.running:
                    job.abandoned = True
                    self.abandoned += 1
            if ended is not None and not job.abandoned:
                ended()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            with self._lock:
                job.running = not job.done.cancelled()
            if job.running:
                self._run(job)
            with self._lock:
                self.busy -= 1
            del job

    def _run(self, job: _Job) -> None:
        value, problem = None, None
        try:
            value = job.work()
        except BaseException as raised:  # of any kind: the caller waits for it in the loop
            problem = raised
        with self._lock:
            job.running = False
            self.abandoned -= job.abandoned
        with contextlib.suppress(RuntimeError):  # the loop has closed, and its calls with it
            loop = job.done.get_loop()
            loop.call_soon_threadsafe(_settle, job.done, value, problem)
            if job.abandoned and job.ended is not None:
                loop.call_soon_threadsafe(job.ended)


def _settle(done: asyncio.Future[Any], value: Any, problem: BaseException | None) -> None:
    if done.done():
        return
    if problem is None:
        done.set_result(value)
    elif isinstance(problem, StopIteration):  # a future does not take it
        done.set_exception(RuntimeError("the tool raised StopIteration"))
    else:
        done.set_exception(problem)
