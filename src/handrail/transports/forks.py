"""The processes of a listener: one, or several that share its socket; each ends when asked to and never much later.

Only for processes of our own. The application can block its loop, so a thread in each keeps watch: it hears signals as
the operating system delivers them, sees the parent die, and has the last word. The parent of several runs no loop and
no thread: it starts them, passes signals on, and replaces those that die.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

from handrail.transports.lifetime import MORE_SECONDS, Watch, leave

log = logging.getLogger("handrail")

KEY = "HANDRAIL_KEY"
RESTARTS_A_MINUTE = 10
_FIRST_PAUSE = 0.1  # before the second restart within a minute; then twice as long each time
_CANNOT_START = 3  # the exit code of a worker that never served

Serve = Callable[[asyncio.Event, Callable[[], None]], Coroutine[Any, Any, None]]
"""Serves until the event is set; calls the function when it has begun to."""


def run_process(serve: Serve, grace: float, ready: Callable[[], None], lifeline: int | None = None) -> None:
    """Serve in this process until a signal comes, or the other end of `lifeline` is closed."""
    loop = asyncio.new_event_loop()
    ending = asyncio.Event()
    watch = _Watch(lambda: loop.call_soon_threadsafe(ending.set), grace + MORE_SECONDS, lifeline)
    watch.run(loop, serve(ending, ready))


class _Watch(Watch):
    """For a process that listens: ends with its parent, if that is one of ours."""

    def __init__(self, ask: Callable[[], object], seconds: float, lifeline: int | None) -> None:
        super().__init__(seconds)
        self._ask_loop = ask
        self._lifeline = lifeline
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._inbox, selectors.EVENT_READ)
        if lifeline is not None:
            self._selector.register(lifeline, selectors.EVENT_READ)
        self._take_signals()

    def _take_signals(self) -> None:
        super()._take_signals()
        if self._lifeline is not None:
            # A terminal sends Ctrl-C to all of us, and the parent says what follows from it.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.platform != "win32":
            # What tools fork has our handlers and our socket: its signals must not become ours.
            os.register_at_fork(after_in_child=self.let_go)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._handlers)  # a new worker is born with them blocked

    def _keep(self) -> None:
        while not self._over:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            news = [key.fileobj for key, _ in self._selector.select(left)]
            if self._lifeline in news:
                self._selector.unregister(self._lifeline)
                self._ask()
            if self._inbox in news:
                for number in self._inbox.recv(64):
                    self._hear(number)
            self._leave_in_time()

    def _hear(self, number: int) -> None:
        # A second SIGTERM is no news: who ends a whole group of processes reaches a worker twice.
        if number == signal.SIGINT and self.asked:
            leave(128 + number)  # a second Ctrl-C means now
        if number in self._handlers:
            self._ask()

    def _ask(self) -> None:
        if not self.asked:
            self.asked = True
            self.leave_soon()
            with contextlib.suppress(RuntimeError):  # the loop has closed already
                self._ask_loop()


class Workers:
    """Several processes that serve the same; this one is their parent."""

    def __init__(self, count: int, serve: Serve, grace: float) -> None:
        self._count = count
        self._serve = serve
        self._grace = grace
        self._pids: set[int] = set()
        self._asked = self._failed = False
        self._restarts: list[float] = []
        self._key = secrets.token_urlsafe(32)  # they have to understand each other's cursors and states
        # Its end for writing is the parent's alone: when the parent dies, however it dies, the workers see it closed.
        self._lifeline, self._held = os.pipe()

    def run(self, ready: Callable[[], None]) -> None:
        handlers = {number: signal.signal(number, self._on_signal) for number in self._signals}
        try:
            for _ in range(self._count):
                self._start()
            ready()
            while self._pids:
                self._ended(*os.wait())
        finally:
            self._kill(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(self._lifeline)
            os.close(self._held)
        if self._failed:
            raise RuntimeError("a worker could not start serving; what it wrote says why")

    _signals = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM or (number == signal.SIGINT and self._asked):
            self._kill(signal.SIGKILL)
            if number == signal.SIGINT:
                leave(128 + number)
        else:
            self._end()

    def _end(self) -> None:
        if not self._asked:
            self._asked = True
            signal.setitimer(signal.ITIMER_REAL, self._grace + MORE_SECONDS)
        self._kill(signal.SIGTERM)

    def _kill(self, number: int) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _start(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both of us would write what is in it
        # Blocked, a signal finds either no child or one that is on the list, and the child hears it when it can.
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        try:
            if self._asked:
                return
            pid = os.fork()
            if pid == 0:
                self._work()
            self._pids.add(pid)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)

    def _work(self) -> None:
        """All that a child ever does."""
        code = _CANNOT_START

        def ready() -> None:
            nonlocal code
            code = 1

        try:
            os.close(self._held)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            os.environ.setdefault(KEY, self._key)
            run_process(self._serve, self._grace, ready, self._lifeline)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            leave(code)

    def _ended(self, pid: int, status: int) -> None:
        if pid not in self._pids:
            return  # a child of somebody else's
        self._pids.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        if code == _CANNOT_START:
            self._failed = True  # nor will it the next time
            self._end()
        elif not self._asked:
            pause = self._pause()
            log.warning("worker %d ended unexpectedly (%d); another starts in %.1f s", pid, code, pause)
            until = time.monotonic() + pause
            while not self._asked and time.monotonic() < until:
                time.sleep(0.05)
            self._start()

    def _pause(self) -> float:
        """How long to wait before the next restart; it counts as made."""
        now = time.monotonic()
        self._restarts = [each for each in self._restarts if each > now - 60]
        pause = _FIRST_PAUSE * 2 ** len(self._restarts) if self._restarts else 0.0
        if len(self._restarts) >= RESTARTS_A_MINUTE:
            pause = max(pause, self._restarts[-RESTARTS_A_MINUTE] + 60 - now)
        pause = min(pause, 60.0)
        self._restarts.append(now + pause)
        return pause
