"""When a process that serves one client ends: on a signal, with its parent, with its input, and never much later.

Only for a process of our own. Tool code can block the loop, or the whole main thread, so a thread keeps watch: it hears
signals as the operating system delivers them, sees the parent die and the input end, and has the last word.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

MORE_SECONDS = 1.5  # what an end may take beyond the grace given to calls
LOOK_SECONDS = 1.0  # how often to look for the parent where it cannot be watched

# What is written to the watch beside the numbers of signals.
_READY, _LEAVING, _LEFT = 253, 254, 255

Ready = Callable[[Callable[[str], None], Callable[[], None]], None]


def run_to_the_end(serve: Callable[[Ready], Coroutine[Any, Any, None]], source: int, grace: float) -> None:
    """Run a server until it ends by itself, by signal, or because its parent died or `source` was closed.

    `serve` gets a function to which it hands its own `stop(why)` and `input_closed()`.
    """
    before = set(threading.enumerate())
    loop = asyncio.new_event_loop()
    watch = _Watch(loop, source, grace + MORE_SECONDS)
    code = 1
    try:
        loop.run_until_complete(serve(watch.ready))
        code = 0
    finally:
        watch.tell(_LEAVING)
        finished = _close(loop)
        stuck = [each for each in threading.enumerate() if not each.daemon and each not in before]
        if watch.asked or stuck or not finished:
            if code:
                traceback.print_exc()
            _leave(code)  # whatever still runs cannot be stopped, and the interpreter would wait for it
        watch.tell(_LEFT)
        watch.let_go()


class _Watch:
    """A thread that sees to it that the process ends when it should."""

    def __init__(self, loop: asyncio.AbstractEventLoop, source: int, seconds: float) -> None:
        self.asked = False
        self._loop = loop
        self._seconds = seconds
        self._stop: Callable[[str], None] = _nothing
        self._input_closed: Callable[[], None] = _nothing
        self._deadline: float | None = None
        self._inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        self._handlers: dict[int, Any] = {}
        self._old_wakeup = -1
        if threading.current_thread() is threading.main_thread():
            self._old_wakeup = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal)
            if sys.platform != "win32":
                os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._let_child_go)
        threading.Thread(target=self._keep, args=(source,), name="handrail-watch", daemon=True).start()

    def ready(self, stop: Callable[[str], None], input_closed: Callable[[], None]) -> None:
        self._stop, self._input_closed = stop, input_closed
        self.tell(_READY)
        if self.asked:
            stop("asked to end before it began")

    def tell(self, what: int) -> None:
        with contextlib.suppress(OSError):
            self._outbox.send(bytes((what,)))

    def let_go(self) -> None:
        """Signals are somebody else's again."""
        handlers, self._handlers = self._handlers, {}
        if handlers:
            signal.set_wakeup_fd(self._old_wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    # A forked child has our handlers and our socket for a moment: no signal may reach it before it has let go of them.

    def _hold(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _let_child_go(self) -> None:
        self.let_go()
        self._release()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The number has gone to the watch already, unless somebody (a loop's own handlers) took its place.
        current = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        if current != self._outbox.fileno():
            self.tell(number)

    def _keep(self, source: int) -> None:
        parent = os.getppid()
        wait, self._watch_source, seconds = _waiter(self._inbox.fileno(), source, parent)
        while True:
            left = seconds if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            news = wait(left)
            if "parent" in news or os.getppid() != parent:
                self._ask("the parent has died")
            if "closed" in news:
                self._leave_soon()
                self._on_loop(self._input_closed)
            if "told" in news and not all(map(self._hear, self._inbox.recv(64))):
                return
            if self._deadline is not None and time.monotonic() >= self._deadline:
                _leave(0)

    def _hear(self, what: int) -> bool:
        if what in self._handlers:
            if self.asked:
                _leave(128 + what)  # a second Ctrl-C means now
            self._ask(f"signal {what}")
        elif what == _READY:
            self._watch_source()  # not before: a slow start must not cost the answers
        elif what == _LEAVING:
            self._leave_soon()
        return what != _LEFT

    def _ask(self, why: str) -> None:
        if not self.asked:
            self.asked = True
            self._leave_soon()
            self._on_loop(self._stop, why)

    def _leave_soon(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._seconds

    def _on_loop(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed already
            self._loop.call_soon_threadsafe(function, *args)


def _nothing(*args: object) -> None:
    """Not serving yet."""


def _waiter(
    told: int, source: int, parent: int
) -> tuple[Callable[[float | None], set[str]], Callable[[], None], float | None]:
    """A way to wait for news, one to watch the input too, and how long to wait: for ever, if the parent is watched."""
    if sys.platform == "win32":
        return lambda seconds: {"told"} if select.select([told], [], [], seconds)[0] else set(), _nothing, LOOK_SECONDS
    poll = select.poll()
    names = {told: "told", source: "closed"}
    poll.register(told, select.POLLIN)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it has died already, or the kernel is too old
            watched = os.pidfd_open(parent)
            poll.register(watched, select.POLLIN)
            names[watched] = "parent"

    def wait(seconds: float | None) -> set[str]:
        found = [number for number, _ in poll.poll(None if seconds is None else seconds * 1000)]
        for number in found:
            if number != told:
                poll.unregister(number)  # news only once
        return {names[number] for number in found}

    def watch_source() -> None:
        poll.register(source, getattr(select, "POLLRDHUP", 0))

    return wait, watch_source, None if "parent" in names.values() else LOOK_SECONDS


def _close(loop: asyncio.AbstractEventLoop) -> bool:
    """End what tools left running; whether all of it ended."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=0.5))
    loop.run_until_complete(loop.shutdown_asyncgens())
    with contextlib.suppress(TimeoutError):
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_default_executor(), 0.5))
    finished = all(task.done() for task in tasks)
    if finished:
        loop.close()
    return finished


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
