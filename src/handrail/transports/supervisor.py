"""The end of one serving process: on a signal, with its parent or with its input, and within a time limit.

Tool code can block the event loop or the whole main thread. So a thread supervises the process: it receives signals as
the operating system delivers them, notices the end of the parent and of the input, and exits the process when the time
limit has passed.
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

SHUTDOWN_EXTRA_SECONDS = 1.5  # a shutdown may take this long beyond the grace for calls
PARENT_POLL_SECONDS = 1.0  # between two checks for the parent, on systems without pidfd

Ready = Callable[[Callable[[str], None], Callable[[], None]], None]
Serve = Callable[[asyncio.Event, Callable[[], None]], Coroutine[Any, Any, None]]
"""Serves until the event is set; calls the function when it is ready."""


def run_until_exit(serve: Callable[[Ready], Coroutine[Any, Any, None]], source: int, grace: float) -> None:
    """Serve one client until `serve` returns, a signal arrives, the parent exits, or `source` is closed.

    `serve` registers its own `stop(why)` and `input_closed()` with the function it is called with.
    """
    supervisor = ProcessSupervisor(grace, source=source, parent=os.getppid(), lives_on=False)
    supervisor.run(serve(supervisor.ready))


def run_process(serve: Serve, grace: float, ready: Callable[[], None], **options: Any) -> None:
    """Serve in this process until a signal arrives; `options` are those of `ProcessSupervisor`."""
    stop_event = asyncio.Event()
    supervisor = ProcessSupervisor(grace, **options)
    supervisor.ready(lambda why: stop_event.set())
    supervisor.run(serve(stop_event, ready))


def exit_signals() -> list[signal.Signals]:
    """Return the signals that request a shutdown: SIGINT, SIGTERM and SIGHUP, the latter not under `nohup`."""
    signals = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    return [each for each in signals if each.name != "SIGHUP" or signal.getsignal(each) is not signal.SIG_IGN]


class ProcessSupervisor:
    """A thread that receives the signals of the process and ends the process in time.

    With `lives_on` the process goes on after a requested shutdown, unless a task or thread is stuck. With `parent` 0 no
    parent is watched.
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
        self._seconds = grace + SHUTDOWN_EXTRA_SECONDS
        self._source = source
        self._parent = parent
        self._lives_on = lives_on
        self._stop: Callable[[str], None] = lambda why: None  # until `ready`
        self._input_closed: Callable[[], None] = lambda: None
        self._stop_requested = False
        self._deadline: float | None = None
        self._code = 0
        self._is_finished = False
        self._handlers: dict[int, Any] = {}
        self._inbox, self._outbox = socket.socketpair()  # carries the numbers of signals; 0 only wakes the thread
        self._outbox.setblocking(False)
        if sys.platform != "win32":
            self._poll = select.poll()
            self._poll.register(self._inbox, select.POLLIN)
        if threading.current_thread() is threading.main_thread():
            self._install_signal_handlers(exit_signals() if signals is None else signals)

    def ready(self, stop: Callable[[str], None], input_closed: Callable[[], None] | None = None) -> None:
        self._stop = stop
        if input_closed is not None and sys.platform != "win32":  # not earlier: a slow start must not cost responses
            self._input_closed = input_closed
            self._poll.register(self._source, getattr(select, "POLLRDHUP", 0))
            self._wake(0)
        if self._stop_requested:
            stop("shutdown was requested before the start")

    def run(self, serving: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine; exit the process if a task or thread is left that cannot be stopped."""
        before = set(threading.enumerate())
        threading.Thread(target=self._supervise, name="handrail-watch", daemon=True).start()
        code = 1
        try:
            self._loop.run_until_complete(serving)
            code = 0
        finally:
            self._set_deadline(code)
            finished = _close_loop(self._loop)
            stuck = [each for each in threading.enumerate() if not each.daemon and each not in before]
            if stuck or not finished or (self._stop_requested and not self._lives_on):
                if code:
                    traceback.print_exc()
                exit_now(code)  # the interpreter would wait for what still runs
            self._restore_signals()

    def _set_deadline(self, code: int = 0) -> None:
        self._code = code
        if self._deadline is None:
            self._deadline = time.monotonic() + self._seconds
            self._wake(0)

    def _restore_signals(self) -> None:
        """Restore the earlier signal handlers, and end the thread."""
        self._is_finished = True
        handlers, self._handlers = self._handlers, {}
        if handlers:
            signal.set_wakeup_fd(self._old_wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self._wake(0)

    # Signals

    def _install_signal_handlers(self, signals: Sequence[signal.Signals]) -> None:
        self._old_wakeup = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        for number in signals:
            self._handlers[number] = signal.signal(number, self._on_signal)
        if sys.platform != "win32":
            # A forked child inherits these handlers and the socket: no signal may reach it before it has released
            # them. Fork hooks cannot be removed; after the end of this supervisor they do nothing.
            forking_threads: set[int] = set()  # the threads that fork

            def hold() -> None:
                if not self._is_finished:
                    forking_threads.add(threading.get_ident())
                    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

            def release() -> None:
                if threading.get_ident() in forking_threads:
                    forking_threads.remove(threading.get_ident())
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

            os.register_at_fork(before=hold, after_in_parent=release, after_in_child=self._restore_signals)
            os.register_at_fork(after_in_child=release)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # a worker starts with them blocked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The thread has received the number already, unless an event loop has replaced the wakeup fd.
        if signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False) != self._outbox.fileno():
            self._wake(number)

    def _wake(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._outbox.send(bytes((number,)))

    # In the thread

    def _supervise(self) -> None:
        parent_fd = -1
        if self._parent and sys.platform == "linux":
            with contextlib.suppress(OSError):  # the parent has exited already, or the kernel is too old
                parent_fd = os.pidfd_open(self._parent)
                self._poll.register(parent_fd, select.POLLIN)
        while not self._is_finished:
            timeout = PARENT_POLL_SECONDS if self._parent and parent_fd < 0 else None
            if self._deadline is not None:
                timeout = max(0.0, self._deadline - time.monotonic())
            ready_descriptors = self._wait(timeout)
            if parent_fd in ready_descriptors or (self._parent and os.getppid() != self._parent):
                self._request_stop("the parent has died")
            if self._source in ready_descriptors:
                self._set_deadline()
                self._call_in_loop(self._input_closed)
            if self._inbox.fileno() in ready_descriptors:
                self._on_signal_numbers(self._inbox.recv(64))
            if self._deadline is not None and time.monotonic() >= self._deadline and not self._is_finished:
                exit_now(self._code)

    def _wait(self, seconds: float | None) -> list[int]:
        """Return the descriptors that are ready; each but the inbox is reported only once."""
        if sys.platform == "win32":  # select() takes only sockets there
            return [each.fileno() for each in select.select([self._inbox], [], [], seconds)[0]]
        descriptors = [number for number, _ in self._poll.poll(None if seconds is None else seconds * 1000)]
        for number in descriptors:
            if number != self._inbox.fileno():
                self._poll.unregister(number)
        return descriptors

    def _on_signal_numbers(self, numbers: bytes) -> None:
        for number in filter(self._handlers.__contains__, numbers):
            # A second SIGTERM changes nothing: a signal to the whole process group reaches a worker twice.
            if number == signal.SIGINT and self._stop_requested:
                exit_now(128 + number)  # a second Ctrl-C ends the process at once
            self._request_stop(f"signal {number}")

    def _request_stop(self, why: str) -> None:
        if not self._stop_requested:
            self._stop_requested = True
            self._set_deadline()
            self._call_in_loop(self._stop, why)

    def _call_in_loop(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed already
            self._loop.call_soon_threadsafe(function, *args)


def _close_loop(loop: asyncio.AbstractEventLoop) -> bool:
    """Cancel the tasks that tools left, and close the loop; return whether all of them ended."""
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


def exit_now(code: int) -> None:
    """Flush the standard streams and exit, without waiting for threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


KEY = "HANDRAIL_KEY"
_FIRST_PAUSE_SECONDS = 0.1  # before the second restart within a minute; twice as long each time after that
_EXIT_NOT_STARTED = 3  # exit code of a worker that never served


class WorkerPool:
    """Worker processes that serve the same socket, and this process as their parent.

    The parent runs no event loop and no thread: it forks workers, passes signals on, and replaces workers that crash.
    """

    def __init__(self, count: int, serve: Serve, grace: float) -> None:
        self._count = count
        self._serve = serve
        self._grace = grace
        self._pids: set[int] = set()
        self._stop_requested = self._failed = False
        self._restarts: list[float] = []
        self._key = secrets.token_urlsafe(32)  # workers must be able to open each other's cursors and sealed states
        self._pid = os.getpid()
        self._signals = (*exit_signals(), signal.SIGALRM)

    def run(self, ready: Callable[[], None]) -> None:
        handlers = {number: signal.signal(number, self._on_signal) for number in self._signals}
        try:
            ready()  # before the fork: the socket listens, and the workers inherit what `ready` has set
            for _ in range(self._count):
                self._fork()
            while self._pids:
                self._on_worker_exit(*os.wait())
        finally:
            self._kill(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self._failed:
            raise NotStarted("a worker could not start serving; what it wrote says why")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM or (number == signal.SIGINT and self._stop_requested):
            self._kill(signal.SIGKILL)
            if number == signal.SIGINT:
                exit_now(128 + number)
        else:
            self._stop()

    def _stop(self) -> None:
        if not self._stop_requested:
            self._stop_requested = True
            signal.setitimer(signal.ITIMER_REAL, self._grace + SHUTDOWN_EXTRA_SECONDS)
        self._kill(signal.SIGTERM)

    def _kill(self, number: int) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _fork(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise parent and worker would both write its buffer
        # Blocked until the worker is in `_pids`, so that no signal misses it; the worker unblocks them itself.
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        try:
            if self._stop_requested:
                return
            pid = os.fork()
            if pid == 0:
                self._run_worker()
            self._pids.add(pid)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)

    def _run_worker(self) -> None:
        """Serve in the forked process, and exit."""
        code = _EXIT_NOT_STARTED

        def ready() -> None:
            nonlocal code
            code = 1

        try:
            self._pids.clear()
            for number in (signal.SIGALRM, signal.SIGTERM):  # no handler of the parent in a worker or its forks
                signal.signal(number, signal.SIG_DFL)
            for number in (signal.SIGINT, signal.SIGHUP):  # sent to the whole group; the parent decides
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM, signal.SIGINT, signal.SIGHUP))
            os.environ.setdefault(KEY, self._key)
            run_process(self._serve, self._grace, ready, parent=self._pid, signals=[signal.SIGTERM])
            code = 0
        except NotStarted as problem:
            log.error("http: worker %d: %s", os.getpid(), problem)
        except BaseException:
            traceback.print_exc()
        finally:
            exit_now(code)

    def _on_worker_exit(self, pid: int, status: int) -> None:
        if pid not in self._pids:
            return  # not a worker
        self._pids.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        if code == _EXIT_NOT_STARTED:
            self._failed = True  # the next worker would fail in the same way
            self._stop()
        elif not self._stop_requested:
            pause = self._next_restart_delay()
            log.warning("http: worker %d ended unexpectedly (%d); another starts in %.1f s", pid, code, pause)
            until = time.monotonic() + pause
            while not self._stop_requested and time.monotonic() < until:
                time.sleep(0.05)
            self._fork()

    def _next_restart_delay(self) -> float:
        """Count a restart, and return the seconds to wait before it: at most ten restarts a minute."""
        now = time.monotonic()
        self._restarts = [each for each in self._restarts if each > now - 60]
        pause = min(_FIRST_PAUSE_SECONDS * 2 ** len(self._restarts), 60.0) if self._restarts else 0.0
        self._restarts.append(now + pause)
        return pause
