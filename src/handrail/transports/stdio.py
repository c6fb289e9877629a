"""One client over standard input and output, safe from prints of the tools.

The server keeps private copies of descriptors 0 and 1. Any other output to standard output (`print`, a C library, a
child process) reaches standard error; what reads standard input finds it empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import stat
import sys
import threading
from collections import deque
from collections.abc import Iterator

from handrail.engine.core import Engine
from handrail.engine.dispatcher import Dispatcher
from handrail.errors import Kind
from handrail.model import Principal
from handrail.protocol.framing import Line, LineReader
from handrail.text.controls import escape

if sys.platform == "linux":
    from fcntl import F_SETPIPE_SZ, fcntl

log = logging.getLogger("handrail")

_LARGE_BYTES = 64 * 1024  # what a pipe holds
_GATHERS = hasattr(os, "writev")
_CHUNK_BYTES = 64 * 1024  # more would cost a small call more, and gain a large one little
_PIPE_BYTES = 256 * 1024  # of 64 MiB for all pipes of a user
LAST_WRITE_SECONDS = 0.5


def take_descriptors() -> tuple[int, int]:
    """Return private copies of descriptors 0 and 1, and point the public ones at /dev/null and standard error."""
    source, sink = os.dup(0), os.dup(1)
    if sys.platform == "linux":
        for descriptor in (source, sink):
            with contextlib.suppress(OSError):  # not a pipe, or over the user's share of wide ones
                fcntl(descriptor, F_SETPIPE_SZ, _PIPE_BYTES)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    # In a process without standard error, descriptor 2 may be any file by now.
    os.dup2(nothing if sys.__stderr__ is None else 2, 1)
    os.close(nothing)
    _flush_prints()
    return source, sink


@contextlib.contextmanager
def private_descriptors() -> Iterator[tuple[int, int]]:
    """Take the descriptors, and restore them at the end."""
    source, sink = take_descriptors()
    try:
        yield source, sink
    finally:
        _flush_prints()
        os.dup2(source, 0)
        os.dup2(sink, 1)
        os.close(source)
        os.close(sink)


def script() -> str:
    """Return the file that Python was started with; empty for a module, as in `python -m handrail`, and at a prompt."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None) or ""
    is_module = getattr(main, "__spec__", None) is not None  # debuggers leave it out
    return file if file.endswith(".py") and not is_module else ""


def explain_terminal(name: str, target: str = "") -> None:
    """Say on standard error what is waited for, where the input is a terminal: a person has started the server.

    `target` is what `handrail list` takes; without it, the file that Python was started with.
    """
    if not target and (file := script()):
        target = os.path.relpath(file)
    if sys.stderr is None or not target or not os.isatty(0):
        return
    text = f"{name} waits for a client on standard input: a program that speaks MCP starts it and writes there. "
    text += f"To try it: Ctrl-C, then `handrail list {shlex.quote(target)}`"
    print(escape(text, lines=False), file=sys.stderr, flush=True)


def _flush_prints() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never there
        sys.stdout.flush()


class StdioConnection:
    """The server's end of a pair of descriptors, with one message a line."""

    two_way = True
    stopping = disconnected = False

    def __init__(self, engine: Engine, source: int, sink: int, principal: Principal) -> None:
        self._limits = engine.limits
        self._source = source
        self._sink = sink
        self._source_watchable = _watchable(source) or (os.name == "posix" and os.isatty(source))
        self._sink_watchable = _watchable(sink)
        self._loop = asyncio.get_running_loop()
        self._conversation = Dispatcher(engine, self, principal)
        self._conversation.address = "stdio"
        self._conversation.watch()
        self._lines = LineReader(engine.limits.max_message_bytes)
        self._unhandled: deque[Line] = deque()  # lines read, not yet handled, because too much is unsent
        self._large: memoryview | None = None  # the rest of a message that is not copied; it goes before the others
        self._unsent = bytearray()
        self._flushing = False  # `_flush` will be called anyway
        self._write_timer: asyncio.TimerHandle | None = None  # runs while the sink takes no more
        self._room = asyncio.Event()
        self._room.set()
        self._reading = False
        self._input_ended = False
        self._stop_deadline: float | None = None
        self._stop_reason: asyncio.Future[str] = self._loop.create_future()

    async def serve(self) -> None:
        """Serve until the input ends, the peer stops reading, or `stop` is called; accepted calls get their replies."""
        blocking = self._sink_watchable and os.get_blocking(self._sink)
        try:
            if blocking:
                os.set_blocking(self._sink, False)
            self._resume_reading()
            log.debug("stdio ends: %s", await self._stop_reason)
            self._stop_reading()
            await self._conversation.close(self._time_left())
            await self._flush_all(self._time_left() + LAST_WRITE_SECONDS)
        finally:
            self._stop_reading()
            self._conversation.cancel_all()
            self._on_drained()
            if blocking:
                os.set_blocking(self._sink, True)

    def stop(self, why: str) -> None:
        self._time_left()
        if not self._stop_reason.done():
            self._stop_reason.set_result(why)

    def input_closed(self) -> None:
        """Handle what was read within the grace time, whether the peer reads or not."""
        self._loop.call_later(self._time_left(), self.stop, "the input has been closed")

    def _time_left(self) -> float:
        """Return what is left of the grace time, which begins at the first call."""
        now = self._loop.time()
        if self._stop_deadline is None:
            self._stop_deadline = now + self._limits.grace_seconds
        return max(0.0, self._stop_deadline - now)

    # Out

    def send(self, message: bytes) -> None:
        if len(message) > _LARGE_BYTES and not self._unsent:
            self._large = memoryview(message)
        else:
            self._unsent += message
        self._unsent += b"\n"
        size = len(self._unsent) if self._large is None else len(self._unsent) + len(self._large)
        if size > self._limits.max_unsent_bytes:
            self._room.clear()
        if not self._flushing and self._write_timer is None:
            self._flushing = True
            self._loop.call_soon(self._flush)

    async def drain(self) -> None:
        await self._room.wait()

    def pause(self) -> None:
        """There is one stream for all calls; it stays open."""

    def _flush(self) -> None:
        """Write unsent messages, as far as the peer reads them."""
        self._flushing = False
        while self._unsent:
            try:
                written = os.write(self._sink, self._unsent) if self._large is None else self._write_large(self._large)
            except BlockingIOError:
                written = 0
            except OSError as problem:
                self._on_write_error(f"the client does not read any more: {problem}")
                return
            if self._large is None:
                del self._unsent[:written]
            elif written < len(self._large):
                self._large = self._large[written:]
            else:
                del self._unsent[: written - len(self._large)]
                self._large = None
            if self._unsent and self._sink_watchable:
                self._write_later(progress=written > 0)
                return
        self._on_drained()

    def _write_large(self, message: memoryview) -> int:
        """Write it together with what follows, at least its newline: else the peer would be woken twice."""
        return os.writev(self._sink, [message, self._unsent]) if _GATHERS else os.write(self._sink, message)

    def _on_drained(self) -> None:
        """Resume reading: all messages are written."""
        if self._write_timer is not None:
            self._loop.remove_writer(self._sink)
            self._write_timer.cancel()
            self._write_timer = None
        if not self._room.is_set():
            self._room.set()
            self._loop.call_soon(self._process_lines)

    def _write_later(self, *, progress: bool) -> None:
        if self._write_timer is None:
            self._loop.add_writer(self._sink, self._flush)
        elif progress:
            self._write_timer.cancel()
        else:
            return
        seconds = self._limits.write_seconds
        self._write_timer = self._loop.call_later(
            seconds, self._on_write_error, f"the client read nothing for {seconds:g} s"
        )

    def _on_write_error(self, why: str) -> None:
        if not self._stop_reason.done():
            log.warning("stdio: %s", why)
        self._large = None
        self._unsent.clear()
        self._conversation.cancel_all()
        self._on_drained()
        self.stop(why)

    async def _flush_all(self, seconds: float) -> None:
        """Wait until all is written, for at most `seconds`."""
        self._flush()
        if self._unsent:
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._room.wait(), seconds)

    # In

    def _resume_reading(self) -> None:
        if self._reading:
            return
        self._reading = True
        if self._source_watchable:
            self._loop.add_reader(self._source, self._readable)
        else:
            threading.Thread(target=self._read_in_thread, name="handrail-stdin", daemon=True).start()

    def _stop_reading(self) -> None:
        if self._reading and self._source_watchable:
            self._reading = False
            self._loop.remove_reader(self._source)

    def _readable(self) -> None:
        try:
            data = os.read(self._source, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._on_data(data)

    def _read_in_thread(self) -> None:
        """Read once, in a thread, from a file or another source that the loop cannot watch."""
        try:
            data = os.read(self._source, _CHUNK_BYTES)
        except OSError:
            data = b""
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(self._on_data, data)

    def _on_data(self, data: bytes) -> None:
        if not self._source_watchable:
            self._reading = False  # that was one read
        if data:
            self._unhandled += self._lines.feed(data)
        else:
            self._unhandled += self._lines.flush()
            self._input_ended = True
            self._stop_reading()
            self.input_closed()
        self._process_lines()

    def _process_lines(self) -> None:
        """Handle the lines that were read, until too much is unsent: then the peer has to read first."""
        unhandled, unsent = self._unhandled, self._unsent
        self._flushing = True
        while unhandled and self._room.is_set() and not self._stop_reason.done():
            line = unhandled.popleft()
            if line is None:
                text = f"A line of over {self._limits.max_message_bytes:,} bytes"
                body = self._conversation.refuse(Kind.INVALID_REQUEST, text).body
            else:
                body = self._conversation.receive(line)
            if body:
                self.send(body)
        self._flushing = False
        if unsent and self._write_timer is None:
            self._flush()
        if unhandled:
            self._stop_reading()  # until the peer keeps up
        elif self._input_ended:
            self.stop("end of input")
        elif not self._stop_reason.done():
            self._resume_reading()


def _watchable(descriptor: int) -> bool:
    """Return whether the loop can watch it: not a file, nor a terminal, which must stay in blocking mode."""
    mode = os.fstat(descriptor).st_mode
    return os.name == "posix" and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))
