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
from functools import partial
from types import FrameType
from typing import Any

MORE_SECONDS = 1.5  # what an end may take beyond the grace given to calls
LOOK_SECONDS = 1.0  # how often to look for the parent where it cannot be watched

Ready = Callable[[Callable[[str], None], Callable[[], None]], None]


def run_to_the_end(serve: Callable[[Ready], Coroutine[Any, Any, None]], source: int, grace: float) -> None:
    """Run a server until it ends by itself, by signal, or because its parent died or `source` was closed.

    `serve` gets a function to which it hands its own `stop(why)` and `input_closed()`.
    """
    loop = asyncio.new_event_loop()
    watch = _Watch(loop, source, grace + MORE_SECONDS)
    watch.run(loop, serve(watch.ready))


class Watch:
    """A thread that sees to it that the process ends when it should, and hears the signals of the process."""

    lives_on = True  # after an end that was asked for, if nothing is stuck

    def __init__(self, seconds: float) -> None:
        self.asked = False
        self._seconds = seconds
        self._deadline: float | None = None
        self._code = 0
        self._over = False
        self._handlers: dict[int, Any] = {}
        self._inbox, self._outbox = socket.socketpair()  # takes the numbers of signals; 0 means: look again
        self._outbox.setblocking(False)

    def run(self, loop: asyncio.AbstractEventLoop, serving: Coroutine[Any, Any, None]) -> None:
        """Run to the end, and no further than that."""
        before = set(threading.enumerate())
        threading.Thread(target=self._keep, name="handrail-watch", daemon=True).start()
        code = 1
        try:
            loop.run_until_complete(serving)
            code = 0
        finally:
            self.leave_soon(code)
            finished = _close(loop)
            stuck = [each for each in threading.enumerate() if not each.daemon and each not in before]
            if stuck or not finished or (self.asked and not self.lives_on):
                if code:
                    traceback.print_exc()
                leave(code)  # what still runs cannot be stopped, and the interpreter would wait for it
            self.let_go()

    def leave_soon(self, code: int = 0) -> None:
        self._code = code
        if self._deadline is None:
            self._deadline = time.monotonic() + self._seconds
            self._tell(0)

    def let_go(self) -> None:
        """Signals are somebody else's again, and the process may live on."""
        self._over = True
        handlers, self._handlers = self._handlers, {}
        if handlers:
            signal.set_wakeup_fd(self._old_wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self._tell(0)

    def _keep(self) -> None:
        raise NotImplementedError

    def _take_signals(self) -> None:
        self._old_wakeup = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The number has gone to the watch already, unless somebody (a loop's own handlers) took its place.
        if signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False) != self._outbox.fileno():
            self._tell(number)

    def _tell(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._outbox.send(bytes((number,)))

    def _leave_in_time(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline and not self._over:
            leave(self._code)


class _Watch(Watch):
    """For a process that serves one client: ends with its parent and its input as well."""

    lives_on = False

    def __init__(self, loop: asyncio.AbstractEventLoop, source: int, seconds: float) -> None:
        super().__init__(seconds)
        self._loop = loop
        self._source = source
        self._stop: Callable[[str], None] = lambda why: None  # not serving yet
        self._input_closed: Callable[[], None] = lambda: None
        if sys.platform != "win32":
            self._poll = select.poll()
            self._poll.register(self._inbox, select.POLLIN)
        if threading.current_thread() is threading.main_thread():
            self._take_signals()

    def ready(self, stop: Callable[[str], None], input_closed: Callable[[], None]) -> None:
        self._stop, self._input_closed = stop, input_closed
        if sys.platform != "win32":  # and not before: a slow start must not cost the answers
            self._poll.register(self._source, getattr(select, "POLLRDHUP", 0))
            self._tell(0)
        if self.asked:
            stop("asked to end before it began")

    def _take_signals(self) -> None:
        super()._take_signals()
        if sys.platform != "win32":
            # A forked child has our handlers and our socket: no signal may reach it before it has let go of them.
            hold, release = (
                partial(signal.pthread_sigmask, how, self._handlers) for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK)
            )
            os.register_at_fork(before=hold, after_in_parent=release, after_in_child=self.let_go)
            os.register_at_fork(after_in_child=release)

    def _keep(self) -> None:
        parent, watched = os.getppid(), -1
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # it has died already, or the kernel is too old
                watched = os.pidfd_open(parent)
                self._poll.register(watched, select.POLLIN)
        while not self._over:
            left = None if watched >= 0 else LOOK_SECONDS
            if self._deadline is not None:
                left = max(0.0, self._deadline - time.monotonic())
            news = self._wait(left)
            if watched in news or os.getppid() != parent:
                self._ask("the parent has died")
            if self._source in news:
                self.leave_soon()
                self._on_loop(self._input_closed)
            if self._inbox.fileno() in news:
                self._hear(self._inbox.recv(64))
            self._leave_in_time()

    def _wait(self, seconds: float | None) -> list[int]:
        """The descriptors there is news of; of all but our own, only once."""
        if sys.platform == "win32":  # where only sockets can be waited for
            return [each.fileno() for each in select.select([self._inbox], [], [], seconds)[0]]
        found = [number for number, _ in self._poll.poll(None if seconds is None else seconds * 1000)]
        for number in found:
            if number != self._inbox.fileno():
                self._poll.unregister(number)
        return found

    def _hear(self, numbers: bytes) -> None:
        for number in numbers:
            if number in self._handlers:
                if self.asked:
                    leave(128 + number)  # a second Ctrl-C means now
                self._ask(f"signal {number}")

    def _ask(self, why: str) -> None:
        if not self.asked:
            self.asked = True
            self.leave_soon()
            self._on_loop(self._stop, why)

    def _on_loop(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed already
            self._loop.call_soon_threadsafe(function, *args)


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


def leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
