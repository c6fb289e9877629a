"""Processes of ours, and when they end: on a signal, with their parent, with their input, and never much later.

Tool code can block the loop, or the whole main thread, so a thread keeps watch: it hears signals as the operating
system delivers them, sees the parent die and the input end, and has the last word. The parent of several workers runs
no loop and no thread: it starts them, passes signals on, and replaces those that die.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType
from typing import Any

from handrail.errors import NotStarted

log = logging.getLogger("handrail")

KEY = "HANDRAIL_KEY"
MORE_SECONDS = 1.5  # what an end may take beyond the grace given to calls
LOOK_SECONDS = 1.0  # how often to look for the parent where it cannot be watched
_FIRST_PAUSE = 0.1  # before the second restart within a minute; then twice as long each time
_CANNOT_START = 3  # the exit code of a worker that never served

Ready = Callable[[Callable[[str], None], Callable[[], None]], None]
Serve = Callable[[asyncio.Event, Callable[[], None]], Coroutine[Any, Any, None]]
"""Serves until the event is set; calls the function when it has begun to."""


def run_to_the_end(serve: Callable[[Ready], Coroutine[Any, Any, None]], source: int, grace: float) -> None:
    """Serve one client until it ends by itself, by signal, or because its parent died or `source` was closed.

    `serve` gets a function to which it hands its own `stop(why)` and `input_closed()`.
    """
    watch = Watch(grace, source=source, parent=os.getppid(), lives_on=False)
    watch.run(serve(watch.ready))


def run_process(serve: Serve, grace: float, ready: Callable[[], None], **options: Any) -> None:
    """Serve in this process until a signal comes; `options` are those of `Watch`."""
    ending = asyncio.Event()
    watch = Watch(grace, **options)
    watch.ready(lambda why: ending.set())
    watch.run(serve(ending, ready))


def _ending() -> list[signal.Signals]:
    """The signals that ask for an end: Ctrl-C, whoever ends processes, a terminal that was closed (but for `nohup`)."""
    found = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    return [each for each in found if each.name != "SIGHUP" or signal.getsignal(each) is not signal.SIG_IGN]


class Watch:
    """A thread that sees to it that the process ends when it should, and hears the signals of the process.

    It `lives_on` after an end that was asked for, if nothing is stuck. A `parent` of 0 is nobody's concern.
    """

    def __init__(
        self,
        grace: float,
        *,
        source: int = -1,
        parent: int = 0,
        signals: Sequence[signal.Signals] | None = None,
        lives_on: bool = True,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._seconds = grace + MORE_SECONDS
        self._source = source
        self._parent = parent
        self._lives_on = lives_on
        self._stop: Callable[[str], None] = lambda why: None  # not serving yet
        self._input_closed: Callable[[], None] = lambda: None
        self._asked = False
        self._deadline: float | None = None
        self._code = 0
        self._over = False
        self._handlers: dict[int, Any] = {}
        self._inbox, self._outbox = socket.socketpair()  # takes the numbers of signals; 0 means: look again
        self._outbox.setblocking(False)
        if sys.platform != "win32":
            self._poll = select.poll()
            self._poll.register(self._inbox, select.POLLIN)
        if threading.current_thread() is threading.main_thread():
            self._take_signals(_ending() if signals is None else signals)

    def ready(self, stop: Callable[[str], None], input_closed: Callable[[], None] | None = None) -> None:
        self._stop = stop
        if input_closed is not None and sys.platform != "win32":  # not before: a slow start must not cost the answers
            self._input_closed = input_closed
            self._poll.register(self._source, getattr(select, "POLLRDHUP", 0))
            self._tell(0)
        if self._asked:
            stop("asked to end before it began")

    def run(self, serving: Coroutine[Any, Any, None]) -> None:
        """Run to the end, and no further than that."""
        before = set(threading.enumerate())
        threading.Thread(target=self._keep, name="handrail-watch", daemon=True).start()
        code = 1
        try:
            self._loop.run_until_complete(serving)
            code = 0
        finally:
            self._leave_soon(code)
            finished = _close(self._loop)
            stuck = [each for each in threading.enumerate() if not each.daemon and each not in before]
            if stuck or not finished or (self._asked and not self._lives_on):
                if code:
                    traceback.print_exc()
                leave(code)  # what still runs cannot be stopped, and the interpreter would wait for it
            self._let_go()

    def _leave_soon(self, code: int = 0) -> None:
        self._code = code
        if self._deadline is None:
            self._deadline = time.monotonic() + self._seconds
            self._tell(0)

    def _let_go(self) -> None:
        """Signals are somebody else's again, and the process may live on."""
        self._over = True
        handlers, self._handlers = self._handlers, {}
        if handlers:
            signal.set_wakeup_fd(self._old_wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self._tell(0)

    # Signals

    def _take_signals(self, signals: Sequence[signal.Signals]) -> None:
        self._old_wakeup = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        for number in signals:
            self._handlers[number] = signal.signal(number, self._on_signal)
        if sys.platform != "win32":
            # A forked child has our handlers and our socket: no signal may reach it before it has let go of them.
            # Hooks cannot be undone, but once this is over they do nothing.
            held: set[int] = set()  # the threads that fork

            def hold() -> None:
                if not self._over:
                    held.add(threading.get_ident())
                    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

            def release() -> None:
                if threading.get_ident() in held:
                    held.remove(threading.get_ident())
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

            os.register_at_fork(before=hold, after_in_parent=release, after_in_child=self._let_go)
            os.register_at_fork(after_in_child=release)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # a worker is born with them blocked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The number has gone to the watch already, unless somebody (a loop's own handlers) took its place.
        if signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False) != self._outbox.fileno():
            self._tell(number)

    def _tell(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._outbox.send(bytes((number,)))

    # In the thread

    def _keep(self) -> None:
        watched = -1
        if self._parent and sys.platform == "linux":
            with contextlib.suppress(OSError):  # it has died already, or the kernel is too old
                watched = os.pidfd_open(self._parent)
                self._poll.register(watched, select.POLLIN)
        while not self._over:
            left = LOOK_SECONDS if self._parent and watched < 0 else None
            if self._deadline is not None:
                left = max(0.0, self._deadline - time.monotonic())
            news = self._wait(left)
            if watched in news or (self._parent and os.getppid() != self._parent):
                self._ask("the parent has died")
            if self._source in news:
                self._leave_soon()
                self._on_loop(self._input_closed)
            if self._inbox.fileno() in news:
                self._hear(self._inbox.recv(64))
            if self._deadline is not None and time.monotonic() >= self._deadline and not self._over:
                leave(self._code)

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
        for number in filter(self._handlers.__contains__, numbers):
            # A second SIGTERM is no news: who ends a whole group of processes reaches a worker twice.
            if number == signal.SIGINT and self._asked:
                leave(128 + number)  # a second Ctrl-C means now
            self._ask(f"signal {number}")

    def _ask(self, why: str) -> None:
        if not self._asked:
            self._asked = True
            self._leave_soon()
            self._on_loop(self._stop, why)

    def _on_loop(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed already
            self._loop.call_soon_threadsafe(function, *args)


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
        self._pid = os.getpid()
        self._signals = (*_ending(), signal.SIGALRM)

    def run(self, ready: Callable[[], None]) -> None:
        handlers = {number: signal.signal(number, self._on_signal) for number in self._signals}
        try:
            ready()  # the socket listens, and what is told of it the workers know too
            for _ in range(self._count):
                self._start()
            while self._pids:
                self._ended(*os.wait())
        finally:
            self._kill(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self._failed:
            raise NotStarted("a worker could not start serving; what it wrote says why")

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
            self._pids.clear()
            for number in (signal.SIGALRM, signal.SIGTERM):  # also what a tool forks must not speak for the parent
                signal.signal(number, signal.SIG_DFL)
            for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's are for all: the parent says what follows
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM, signal.SIGINT, signal.SIGHUP))
            os.environ.setdefault(KEY, self._key)
            run_process(self._serve, self._grace, ready, parent=self._pid, signals=[signal.SIGTERM])
            code = 0
        except NotStarted as problem:
            log.error("worker %d: %s", os.getpid(), problem)
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
        """How long to wait before the next restart, of which there are at most ten in a minute; it counts as made."""
        now = time.monotonic()
        self._restarts = [each for each in self._restarts if each > now - 60]
        pause = min(_FIRST_PAUSE * 2 ** len(self._restarts), 60.0) if self._restarts else 0.0
        self._restarts.append(now + pause)
        return pause


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
