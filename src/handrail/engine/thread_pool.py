"""Threads for tools that block. Bounded, our own, and never waited for at exit.

The standard pool joins its threads when the interpreter ends, so one tool that hangs would keep the process alive.
A thread cannot be stopped: after its call was cancelled it keeps its place until the tool returns, and is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any

from msgspec import Struct


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
