"""A server as a child process: lines to its standard input, lines from its standard output.

The server leads a process group of its own, and the whole group ends with it: what a server has forked does not outlive
it. A guard process kills the group if this process is killed, because a server need not exit when its input ends. A
process that has left the group (a daemon) is out of reach. The event loop must be able to watch pipes: not on Windows.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import IO

from msgspec import MsgspecError, Raw, json

from handrail.errors import Sent, TransportError
from handrail.protocol.framing import Line, LineReader
from handrail.text.controls import escape
from handrail.transports.base import ClientTransport, MessageHandler, PendingRequest

if sys.platform == "linux":
    from fcntl import F_SETPIPE_SZ, fcntl

log = logging.getLogger("handrail")

DEFAULT_ENV = (
    *"HOME LOGNAME PATH SHELL TERM USER LANG LC_* TMPDIR TZ".split(),
    *"APPDATA COMSPEC LOCALAPPDATA PATHEXT SYSTEMDRIVE SYSTEMROOT TEMP TMP USERNAME USERPROFILE WINDIR".split(),
)
"""Environment variables that a server inherits. The others may hold secrets that it has no need of (P-28)."""

MAX_UNSENT_BYTES = 16 * 1024 * 1024
LINES_AT_ONCE = 64  # of one read; more are worked off in turns of the event loop
LINES_PER_TURN = 8  # between two of which others are served: a flood costs them little
STALL_SECONDS = 30.0  # a server that reads nothing for so long is killed
STATUS_SECONDS = 0.5  # to wait for the exit status after the server has closed a pipe
TERM_SECONDS = 1.0  # between SIGTERM and SIGKILL
KILL_SECONDS = 2.0  # to wait after SIGKILL
MAX_STDERR_LINES, MAX_STDERR_BYTES = 200, 64 * 1024  # of standard error that are kept
MAX_WRITTEN = 512  # messages in one writev; the kernel accepts 1,024
_CHUNK, _PIPE_BYTES = 64 * 1024, 256 * 1024  # as in stdio.py
_SHELL = "/bin/sh"

_HINTS = {
    errno.EACCES: "It has to be a file that you may execute (chmod +x)",
    errno.EAGAIN: "There are too many processes",
    errno.ENOENT: "Is it installed, and on PATH? In a script: is the program of the first line?",
    errno.ENOEXEC: "A script needs a first line like #!/bin/sh, or its interpreter before it in the command",
}
_not_started = partial(TransportError, sent=Sent.NO, phase="connect")
_text = partial(str, encoding="utf-8", errors="backslashreplace")

_CLOSE_AFTER_FORK: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()
"""Write ends of pipes that a fork of this process (`multiprocessing`) must close: while it holds one, the reader does
not notice that this process has ended."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [end.close() for end in _CLOSE_AFTER_FORK])


class SubprocessTransport(ClientTransport):
    """A transport that starts its server and ends it.

    The server inherits the environment variables named in `inherit_env` (`LC_*`: all with this prefix), and gets those
    of `env`. `on_stderr` is called with each line of its standard error; by default they are logged at level INFO.
    `MessageHandler.on_failure` without a request is called exactly once, however the server ends.
    """

    disconnect_cancels = False
    notification_stream = 1

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        inherit_env: Iterable[str] = DEFAULT_ENV,
        max_message_bytes: int = 4 * 1024 * 1024,
        grace: float = 3.0,
        on_stderr: Callable[[str], None] | None = None,
    ) -> None:
        if isinstance(command, str) or not command or not command[0]:
            raise ValueError(f"command: a list of a program and its arguments, not {command!r}")
        self._command = list(command)
        self._env = dict(env or {})
        self._inherit_env = tuple(inherit_env)
        self._cwd, self._limit, self._grace, self._on_stderr = cwd, max_message_bytes, grace, on_stderr
        if any("\0" in part for part in (*self._command, *self._env, *self._env.values(), os.fspath(cwd or ""))):
            raise ValueError("command, env and cwd: no NUL characters")
        if any(not name or "=" in name for name in self._env):
            raise ValueError("env: a name is empty, or has = in it")
        self._opened = self._closing = False
        self._exited = asyncio.Event()
        self._sink = self._source = self._errors = self._pidfd = -1  # -1: not open
        self._lines = LineReader(max_message_bytes)
        self._error_lines = LineReader(MAX_STDERR_BYTES)
        self._stderr_tail = bytearray()
        self._backlog: list[Line] = []  # of the last read, not handled yet; nothing is read meanwhile
        self._is_ending = False  # the process has ended: all that is left is handled at once
        self._last_output = ""  # the last line that was not a message
        self._queue: deque[tuple[bytes | memoryview, PendingRequest | None]] = deque()
        self._queued = 0  # bytes in the queue
        self._is_batching = False  # messages sent now are written together, at the end of the loop's turn
        self._stall: asyncio.TimerHandle | None = None  # runs while the pipe is full
        self._status: asyncio.TimerHandle | None = None  # runs while the server is about to exit
        self._problem: TransportError | None = None  # the error that `on_failure` has reported

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._opened else None

    @property
    def returncode(self) -> int | None:
        """Exit code as in `subprocess`: minus the number of a signal; None while the server runs."""
        return self._process.returncode if self._opened else None

    @property
    def stderr(self) -> str:
        """Last lines of the server's standard error."""
        return "\n".join(_text(self._stderr_tail).splitlines()[-MAX_STDERR_LINES:])

    async def open(self, handler: MessageHandler) -> None:
        if self._opened or self._closing:
            raise RuntimeError("a SubprocessTransport is opened once")
        if os.name != "posix":
            raise _not_started("child processes need pipes that the loop can watch", hint="On this system, use HTTP")
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._process = process = self._start()
        self._opened = True
        self._guard = _guard_group(process.pid)
        self._streams = [stream for stream in (process.stdin, process.stdout, process.stderr) if stream]
        _CLOSE_AFTER_FORK.add(self._streams[0])
        try:
            self._sink, self._source, self._errors = (stream.fileno() for stream in self._streams)
            for descriptor in (self._sink, self._source, self._errors):
                os.set_blocking(descriptor, False)  # of this end only
                if sys.platform == "linux" and descriptor != self._errors:
                    with contextlib.suppress(OSError):  # the user has too many wide pipes
                        fcntl(descriptor, F_SETPIPE_SZ, _PIPE_BYTES)
            self._loop.add_reader(self._source, self._readable)
            self._loop.add_reader(self._errors, self._errors_readable)
            if sys.platform == "linux":
                with contextlib.suppress(OSError):  # an old kernel, or a sandbox
                    self._pidfd = os.pidfd_open(process.pid)
            if self._pidfd >= 0:
                self._loop.add_reader(self._pidfd, self._clean_up)
            else:
                threading.Thread(target=self._wait, name="handrail-child", daemon=True).start()
        except (OSError, RuntimeError) as problem:
            self._problem = _not_started(f"the server cannot be watched: {problem}")
            self._clean_up()
            raise self._problem from problem

    def _start(self) -> Popen[bytes]:
        begin = tuple(name[:-1] for name in self._inherit_env if name.endswith("*"))
        env = {name: os.environ[name] for name in os.environ if name in self._inherit_env or name.startswith(begin)}
        env |= self._env
        try:
            return Popen(
                self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=self._cwd, env=env, start_new_session=True
            )
        except OSError as problem:
            what, hint = f"{self._command[0]!r} cannot be started", _HINTS.get(problem.errno or 0, "")
            if self._cwd is not None and problem.filename == self._cwd:
                what, hint = f"cwd {str(self._cwd)!r} cannot be used", "It has to be a folder that you may enter"
            raise _not_started(f"{what}: {problem.strerror}", hint=hint) from problem

    # Out

    def send(self, message: bytes, request: PendingRequest | None) -> None:
        data = message + b"\n"
        written = 0
        if not self._queue and not self._is_batching:
            try:
                written = os.write(self._sink, data)
            except BlockingIOError:
                pass
            except OSError:  # one of the two sides has closed the pipe
                self._on_write_error(request)
                return
            if written and request is not None:
                request.sent = Sent.UNKNOWN
            if written == len(data):
                return
        elif self._queued + len(data) > MAX_UNSENT_BYTES:
            if request is not None:
                text = f"over {MAX_UNSENT_BYTES:,} bytes wait for the server to read them"
                self._handler.on_failure(TransportError(text, sent=Sent.NO), request)
            return
        if self._is_batching and not self._queue:
            self._loop.call_soon(self._flush)
        self._queue.append((memoryview(data)[written:] if written else data, request))
        self._queued += len(data) - written
        if self._stall is None and not self._is_batching:
            self._write_later()

    def _write_later(self) -> None:
        self._loop.add_writer(self._sink, self._flush)
        self._stall = self._loop.call_later(STALL_SECONDS, self._on_stall)

    def cancel(self, request: PendingRequest) -> None:
        if request.sent is Sent.NO:  # reported as not sent, so it must not be sent later
            self._queue = deque(entry for entry in self._queue if entry[1] is not request)
            self._queued = sum(len(data) for data, _ in self._queue)
            if not self._queue:
                self._flush()

    def _flush(self) -> None:
        progress = False
        while self._queue:
            try:
                written = os.writev(self._sink, [data for data, _ in islice(self._queue, MAX_WRITTEN)])
            except BlockingIOError:
                break
            except OSError:
                self._on_write_error(None)
                return
            progress = True
            self._queued -= written
            while written > 0:
                data, request = self._queue.popleft()
                if request is not None:
                    request.sent = Sent.UNKNOWN
                if written < len(data):
                    self._queue.appendleft((memoryview(data)[written:], request))
                written -= len(data)
        if not self._queue:
            self._stop_writing()
            if self._closing:
                self._close_input()
        elif self._stall is None:
            self._write_later()
        elif progress:
            self._stall.cancel()
            self._stall = self._loop.call_later(STALL_SECONDS, self._on_stall)

    def _stop_writing(self) -> None:
        if self._stall is not None:
            self._loop.remove_writer(self._sink)
            self._stall.cancel()
            self._stall = None

    def _close_input(self) -> None:
        """Close the pipe to the server; drop the queue."""
        self._stop_writing()
        self._queue.clear()
        self._queued = 0
        if self._sink >= 0:
            self._sink = -1
            self._streams[0].close()

    def _on_write_error(self, request: PendingRequest | None) -> None:
        self._close_input()
        if self._problem is None:
            self._expect_exit("the server closed its input")  # will fail all requests
        elif request is not None:
            self._handler.on_failure(TransportError(self._problem.text, sent=Sent.NO, hint=self._problem.hint), request)

    def _on_stall(self) -> None:
        self._fail(f"the server took nothing of what was sent for {STALL_SECONDS:g} s")
        self._signal(signal.SIGKILL)

    # In

    def _readable(self) -> bool:
        """Read once from standard output; return whether there may be more."""
        data = _read(self._source)
        if data:
            lines = self._lines.feed(data)
            self._is_batching = len(lines) > 1  # their callers may send again, all in the same turn of the loop
            if len(lines) > LINES_AT_ONCE and not self._is_ending:
                lines, self._backlog = lines[:LINES_PER_TURN], lines[LINES_PER_TURN:]
                self._loop.remove_reader(self._source)
                self._loop.call_soon(self._work_off_backlog)
            self._on_lines(lines)
        elif data is not None:
            self._on_output_end()
        return bool(data)

    def _work_off_backlog(self) -> None:
        """Handle some more lines of one read; in between, the loop serves others. Then read on."""
        lines, self._backlog = self._backlog[:LINES_PER_TURN], self._backlog[LINES_PER_TURN:]
        self._on_lines(lines)
        if self._backlog:
            self._loop.call_soon(self._work_off_backlog)
        elif self._source >= 0:
            self._loop.add_reader(self._source, self._readable)

    def _on_lines(self, lines: list[Line]) -> None:
        for line in lines if self._problem is None else ():
            if line is None:
                self._handler.on_discarded(f"a line of over {self._limit:,} bytes", too_long=True)
            elif line[0] == 0x7B or line.lstrip()[:1] in (b"{", b"["):
                self._handler.on_message(line)
            else:
                self._last_output = _text(line[:100])
                self._handler.on_discarded(f"no message: {self._last_output!r}")

    def _on_output_end(self) -> None:
        if self._source >= 0:
            self._loop.remove_reader(self._source)
            self._source = -1
            for line in self._lines.flush():
                if line is not None and not _is_whole(line):
                    line = b"half a line: " + line
                self._on_lines([line])
            self._expect_exit("the server closed its output")

    def _errors_readable(self) -> bool:
        """Read once from standard error; return whether there may be more."""
        data = _read(self._errors)
        if data:
            self._stderr_tail += data
            del self._stderr_tail[:-MAX_STDERR_BYTES]
            self._emit_stderr(self._error_lines.feed(data))
        elif data is not None and self._errors >= 0:
            self._loop.remove_reader(self._errors)
            self._errors = -1
            self._emit_stderr(self._error_lines.flush())
        return bool(data)

    def _emit_stderr(self, lines: list[Line]) -> None:
        try:
            for line in lines:
                text = f"(a line of over {MAX_STDERR_BYTES:,} bytes)" if line is None else _text(line).rstrip("\r")
                if self._on_stderr is not None:
                    self._on_stderr(text)
                elif log.isEnabledFor(logging.INFO):
                    log.info("%s: standard error: %s", self._command[0], escape(text, lines=False))
        except Exception:
            log.exception("subprocess: on_stderr failed; it is not called again")
            self._on_stderr = None

    # The end of the server

    async def close(self) -> None:
        """Close its input and wait, then send SIGTERM, then SIGKILL; if cancelled, kill at once."""
        self._closing = True
        if not self._opened or self._exited.is_set():
            return
        try:
            if not self._queue:
                self._close_input()  # otherwise `_flush` closes it
            grace = self._grace if self._problem is None else 0.0  # the connection has failed while the server runs
            for seconds, then in ((grace, signal.SIGTERM), (TERM_SECONDS, signal.SIGKILL), (KILL_SECONDS, 0)):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._exited.wait()
                    return
                self._signal(then)
        finally:
            self._clean_up()

    def _wait(self) -> None:
        """Wait for the exit in a thread, on systems without pidfd."""
        self._process.wait()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)  # now: later the id may belong to another group
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(self._clean_up)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(OSError):  # the group is empty; on macOS also if only a zombie is left
                os.killpg(self._process.pid, number)

    def _expect_exit(self, why: str) -> None:
        """Wait a moment for the exit status, which explains more than `why`, before failing."""
        if self._status is None and not self._closing:
            self._status = self._loop.call_later(STATUS_SECONDS, self._fail, why)

    def _clean_up(self) -> None:
        """Kill what is left of the process group, deliver the remaining output, and close all descriptors."""
        if self._exited.is_set():
            return
        self._signal(signal.SIGKILL)  # the id cannot be reused before `wait`
        if self._guard is not None:
            with self._guard:
                self._guard.kill()  # while its input is open: it must never kill another group with the same id
        with contextlib.suppress(TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        self._close_input()
        self._is_ending = True
        backlog, self._backlog = self._backlog, []
        self._on_lines(backlog)
        for read in (self._readable, self._errors_readable):
            for _ in range(64):  # more than a pipe holds; a daemon may hold the other end and write without end
                if not read():
                    break
        self._on_output_end()
        code = self._process.returncode
        signals = {-number: f"was ended by {number.name}" for number in signal.Signals}
        self._fail(f"the server {signals.get(code or 0, f'exited with code {code}')}")
        if self._errors >= 0:
            self._loop.remove_reader(self._errors)
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        for stream in self._streams:
            stream.close()
        self._exited.set()

    def _fail(self, text: str) -> None:
        """Report, once, that no more messages will arrive."""
        if self._status is not None:
            self._status.cancel()
        if self._problem is None:
            # With `on_stderr` the user has each line already.
            output_hint = "" if self._on_stderr else _quote_output("It said", self.stderr)
            hint = output_hint or _quote_output("It printed what is no message", self._last_output)
            text, hint = ("the link was closed", "") if self._closing else (text, hint)
            self._problem = TransportError(text, sent=Sent.UNKNOWN, hint=hint)
            self._close_input()
            self._handler.on_failure(self._problem)


def _read(descriptor: int) -> bytes | None:
    """Read what is there: empty at the end of the stream, None if there is nothing yet."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _is_whole(line: bytes | bytearray) -> bool:
    """Return whether a last line without a newline is complete JSON."""
    with contextlib.suppress(MsgspecError, RecursionError):
        json.decode(line, type=Raw)
        return True
    return False


def _quote_output(label: str, output: str) -> str:
    """Return the last lines as one, without control characters that a terminal would obey (P-33)."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"{label}: {escape(' | '.join(lines[-5:])[-500:], lines=False)[-500:]}" if lines else ""


def _guard_group(group: int) -> Popen[bytes] | None:
    """Start a shell that kills a process group when its own input ends, which happens when this process dies."""
    shell = (_SHELL, "-c", 'read -r _ || kill -9 "-$1"', "sh", str(group))
    try:
        guard = Popen(shell, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, cwd="/", env={}, start_new_session=True)
    except OSError as problem:
        log.debug("subprocess: no guard for process %d, which may outlive this process: %s", group, problem)
        return None
    _CLOSE_AFTER_FORK.update(filter(None, [guard.stdin]))
    return guard
