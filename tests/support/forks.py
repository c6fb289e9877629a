"""Processes that begin warm: forked from one that has loaded what they need, which takes most of a fresh one's time."""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from patience import PATIENCE

WARM = "subject handrail.client.client".split()
WARM += [
    f"handrail.transports.{name}" for name in ("http1.server", "subprocess", "http.serve", "http_client")
]  # else loaded when first used
FUNCTION = re.compile(r"\w+:\w+")


class Fork:
    """One of them, as `subprocess.Popen` would show it."""

    def __init__(self, pid: int, told: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.told = told  # readable when it has ended

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.told.settimeout(timeout)
            try:
                self.returncode = int(self.told.recv(32))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None
            self.told.close()
        return self.returncode

    def detach(self) -> int:
        """Its number; nobody waits for it."""
        self.told.close()
        return self.pid

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and the word of it is on its way
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """Starts them, for as long as this process lives."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=theirs.fileno(), stdout=subprocess.DEVNULL
            )

    def start(self, work: str, *words: str, descriptors: Sequence[int]) -> Fork:
        """`module:function` of this folder, called with these words; 0, 1 and 2 are these, which are closed here.

        A word of that form names something to be loaded as well.
        """
        told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            order = json.dumps([dict(os.environ), [work, *words]]).encode()
            socket.send_fds(self._control, [order], [theirs.fileno(), *descriptors])
        for each in descriptors:
            os.close(each)
        told.settimeout(PATIENCE)
        return Fork(int(told.recv(32)), told)

    def close(self) -> None:
        self._control.close()
        self._process.wait(PATIENCE)


@cache
def forks() -> Forks:
    made = Forks()
    atexit.register(made.close)
    return made


def _serve(control: socket.socket) -> Callable[[], Any]:
    """Fork until the starter has gone; gives what there is to do, in each of them nothing but its own work."""
    for name in WARM:
        import_module(name)
    gc.freeze()  # what is not looked at is not copied
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            while (ended := _ended())[0]:
                with running.pop(ended[0]) as told, suppress(OSError):  # nobody may want to know
                    told.send(b"%d" % os.waitstatus_to_exitcode(ended[1]))
        if control in ready:
            order, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 4)
            if not order:
                return lambda: None
            environ, words = json.loads(order)
            modules = [import_module(word.partition(":")[0]) for word in words if FUNCTION.fullmatch(word)]
            theirs, *standard = descriptors
            pid = os.fork()
            if not pid:
                _become(standard)
                os.environ.clear()
                os.environ.update(environ)
                return partial(getattr(modules[0], words[0].partition(":")[2]), *words[1:])
            for each in standard:
                os.close(each)
            running[pid] = socket.socket(fileno=theirs)
            with suppress(OSError):
                running[pid].send(b"%d" % pid)


def _ended() -> tuple[int, int]:
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def _become(standard: list[int]) -> None:
    """A process as if it had been started with these."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for at, each in enumerate(standard):
        os.dup2(each, at)
    os.closerange(3, 1024)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    todo = _serve(socket.socket(fileno=os.dup(0)))
    try:
        todo()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # Taking down all that was loaded would cost as much as loading it has.
    sys.stderr.flush()
    os._exit(0)
