"""When a process that serves one client ends: on a signal, with its parent, and never later than a few seconds after.

Only for a process of our own. Tool code can block the loop, so what must happen in any case happens in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from types import FrameType
from typing import Any

__all__ = ["run_to_the_end"]

LEAVE_SECONDS = 4.5


def run_to_the_end(
    serve: Callable[[Callable[[Callable[[str], None]], None]], Coroutine[Any, Any, None]], *, with_parent: bool = True
) -> None:
    """Run a server until it ends by itself, by signal, or because its parent died.

    `serve` gets a function to which it hands its own `stop(why)`.
    """
    loop = asyncio.new_event_loop()
    before = set(threading.enumerate())
    ending = _Ending(loop)
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, ending.on_signal)
    if with_parent:
        threading.Thread(target=_watch_parent, args=(ending.stop,), name="handrail-parent", daemon=True).start()
    try:
        loop.run_until_complete(serve(ending.ready))
    finally:
        ending.leave_soon()
        finished = _close(loop)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        stuck = [each for each in threading.enumerate() if not each.daemon and each not in before]
        if ending.asked or stuck or not finished:
            # Whatever still runs cannot be stopped, and the interpreter would wait for it.
            _leave(0)
        ending.left.set()


class _Ending:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.asked = False
        self.left = threading.Event()
        self._loop = loop
        self._stop: Callable[[str], None] | None = None
        # Started now, because a signal handler must not start threads; its queue may be used in one.
        self._last_call: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._last_resort, name="handrail-end", daemon=True).start()

    def ready(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        if self.asked:
            stop("asked to end before it began")

    def stop(self, why: str) -> None:
        """From any thread, or a signal handler."""
        self.asked = True
        if self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed already
                self._loop.call_soon_threadsafe(self._stop, why)
        self.leave_soon()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            _leave(128 + number)  # a second Ctrl-C means now
        self.stop(f"signal {number}")

    def leave_soon(self) -> None:
        self._last_call.put(None)

    def _last_resort(self) -> None:
        self._last_call.get()
        if not self.left.wait(LEAVE_SECONDS):
            _leave(0)


def _close(loop: asyncio.AbstractEventLoop) -> bool:
    """End what tools left running; whether all of it ended."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=0.5))
    finished = all(task.done() for task in tasks)
    loop.run_until_complete(loop.shutdown_asyncgens())
    with contextlib.suppress(TimeoutError):
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_default_executor(), 0.5))
    if finished:
        loop.close()
    return finished


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _watch_parent(stop: Callable[[str], None]) -> None:
    """Wait for the parent's death. Standard input ends with it only if nobody else holds its other end."""
    parent = os.getppid()
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(parent)
            if os.getppid() == parent:
                select.select([descriptor], [], [])
            stop("the parent has died")
            return
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):
            queue = select.kqueue()
            event = select.kevent(parent, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
            if os.getppid() == parent:
                queue.control([event], 1)
            stop("the parent has died")
            return
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(1.0)
    stop("the parent has died")
