"""Several worker processes on one listening socket."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType

from handrail.errors import NotStarted
from handrail.transports.supervisor import SHUTDOWN_EXTRA_SECONDS, Serve, exit_now, exit_signals, run_process

log = logging.getLogger("handrail")

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
