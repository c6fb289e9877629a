"""One client over standard input and output, in a way that cannot be broken from inside.

The server keeps private copies of descriptors 0 and 1. What else writes to standard output (`print`, a C library, a
child process) reaches standard error; what reads standard input finds it empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

from handrail.engine.core import Engine
from handrail.engine.dispatch import Conversation
from handrail.errors import Kind
from handrail.model import Principal
from handrail.protocol.lines import Line, LineReader

if sys.platform == "linux":
    from fcntl import F_SETPIPE_SZ, fcntl

log = logging.getLogger("handrail")

_CHUNK = 256 * 1024
_PIPE_BYTES = 256 * 1024  # of 64 MiB for all pipes of a user
_JOIN_BYTES = 64 * 1024
_VECTORS = 64
LAST_WRITE_SECONDS = 0.5


def take_descriptors() -> tuple[int, int]:
    """Copies of descriptors 0 and 1 that nobody else knows; from now on the public ones are harmless."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    # Started without standard error, descriptor 2 is somebody else's file by now.
    os.dup2(nothing if sys.__stderr__ is None else 2, 1)
    os.close(nothing)
    _flush_prints()
    return source, sink


@contextlib.contextmanager
def private_descriptors() -> Iterator[tuple[int, int]]:
    """As `take_descriptors`, and given back at the end."""
    source, sink = take_descriptors()
    try:
        yield source, sink
    finally:
        _flush_prints()
        os.dup2(source, 0)
        os.dup2(sink, 1)
        os.close(source)
        os.close(sink)


def _flush_prints() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never there
        sys.stdout.flush()


class Pipe:
    """The server's end of a pair of descriptors: lines in, lines out."""

    def __init__(self, engine: Engine, source: int, sink: int, principal: Principal) -> None:
        self._limits = engine.limits
        self._source = source
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._conversation = Conversation(engine, self, principal)
        self._lines = LineReader(engine.limits.max_message_bytes)
        self._waiting: deque[Line] = deque()  # lines read, not yet handled, because too much is unsent
        self._unsent: list[bytes | memoryview] = []
        self._unsent_bytes = 0
        self._flushing = False
        self._blocked = False  # the last write did not fit
        self._write_timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._reading = False
        # Read into one place: a new large buffer for each read would cost more than a small call does.
        self._chunk = bytearray(_CHUNK)
        self._view = memoryview(self._chunk)
        self._end_by: float | None = None
        self._end: asyncio.Future[str] = self._loop.create_future()
        self._ended_input = False
        self._thread: _ThreadReader | None = None
        self._pollable_sink = False

    async def serve(self) -> None:
        """Until the input ends, the peer stops reading, or `stop` is called; accepted calls are answered first."""
        was_blocking = self._make_sink_unblocking()
        try:
            self._start_reading()
            why = await self._end
            log.debug("stdio ends: %s", why)
            self._stop_reading()
            await self._conversation.finish(self._time_left())
            await self._empty(self._time_left() + LAST_WRITE_SECONDS)
        finally:
            self._stop_reading()
            self._conversation.drop()
            self._caught_up()
            if was_blocking:
                os.set_blocking(self._sink, True)

    def stop(self, why: str) -> None:
        self._time_left()
        if not self._end.done():
            self._end.set_result(why)

    def input_closed(self) -> None:
        """Nothing more will come; what is there has only so long to be handled, whether the peer reads or not."""
        self._loop.call_later(self._time_left(), self.stop, "the input has been closed")

    def _time_left(self) -> float:
        """What is left of the time to end in, which begins when this is first asked."""
        now = self._loop.time()
        if self._end_by is None:
            self._end_by = now + self._limits.grace_seconds
        return max(0.0, self._end_by - now)

    # Out

    def send(self, message: bytes) -> None:
        self._unsent += (message, b"\n")
        self._unsent_bytes += len(message) + 1
        if self._unsent_bytes > self._limits.max_unsent_bytes:
            self._room.clear()
        if not self._flushing and not self._blocked:
            self._flushing = True
            self._loop.call_soon(self._flush)

    async def drain(self) -> None:
        if not self._room.is_set():
            await self._room.wait()

    def _flush(self) -> None:
        """Write what there is, as far as the peer takes it."""
        self._flushing = False
        unsent, before = self._unsent, self._unsent_bytes
        while unsent:
            if len(unsent) > 1 and (self._unsent_bytes < _JOIN_BYTES or sys.platform == "win32"):
                unsent[:] = [b"".join(unsent)]
            try:
                # A long message is not copied once more just to get its newline.
                vector = len(unsent) > 1
                written = os.writev(self._sink, unsent[:_VECTORS]) if vector else os.write(self._sink, unsent[0])
            except (BlockingIOError, InterruptedError):
                written = 0
            except OSError as problem:
                self._broken(f"the client does not read any more: {problem}")
                return
            self._unsent_bytes -= written
            if not _take(unsent, written) and self._pollable_sink:
                self._write_later(progress=self._unsent_bytes < before)
                return
        if self._blocked or not self._room.is_set():
            self._caught_up()

    def _caught_up(self) -> None:
        """What did not fit at first has gone out."""
        if self._blocked:
            self._loop.remove_writer(self._sink)
        self._blocked = False
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if not self._room.is_set():
            self._room.set()
            self._loop.call_soon(self._work)

    def _write_later(self, *, progress: bool) -> None:
        if not self._blocked:
            self._blocked = True
            self._loop.add_writer(self._sink, self._flush)
        if self._write_timer is None or progress:
            if self._write_timer is not None:
                self._write_timer.cancel()
            seconds = self._limits.write_seconds
            why = f"the client read nothing for {seconds:g} s"
            self._write_timer = self._loop.call_later(seconds, self._broken, why)

    def _broken(self, why: str) -> None:
        if not self._end.done():
            log.warning("stdio: %s", why)
        self._unsent.clear()
        self._unsent_bytes = 0
        self._conversation.drop()
        self._caught_up()
        self.stop(why)

    async def _empty(self, seconds: float) -> None:
        """Wait until all is written, or the peer has had its time."""
        self._flush()
        if self._unsent:
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._room.wait()

    def _make_sink_unblocking(self) -> bool:
        if sys.platform == "linux":
            for descriptor in (self._source, self._sink):
                with contextlib.suppress(OSError):  # not a pipe, or over the user's share of wide ones
                    fcntl(descriptor, F_SETPIPE_SZ, _PIPE_BYTES)
        mode = os.fstat(self._sink).st_mode
        self._pollable_sink = os.name == "posix" and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))
        if not self._pollable_sink or not os.get_blocking(self._sink):
            return False
        os.set_blocking(self._sink, False)
        return True

    # In

    def _start_reading(self) -> None:
        try:
            self._read_on()
        except (PermissionError, NotImplementedError):  # a file, or a loop that cannot watch descriptors
            self._reading = False
            self._thread = _ThreadReader(self._source, self._loop, self._took)

    def _read_on(self) -> None:
        if self._thread is not None:
            self._thread.read_on()
        elif not self._reading:
            self._reading = True
            self._loop.add_reader(self._source, self._readable)

    def _stop_reading(self) -> None:
        if self._thread is not None:
            self._thread.stopped = True
        elif self._reading:
            self._reading = False
            self._loop.remove_reader(self._source)

    def _readable(self) -> None:
        try:
            size = os.readv(self._source, (self._chunk,))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size = 0
        data = bytes(self._view[:size])
        if data[:1] == b"{" and data.find(b"\n") == size - 1 and self._up_to_date(size):
            # One whole message, as a client sends that waits for each answer.
            answer = self._conversation.receive(data)
            if answer:
                self._flushing = True
                self.send(answer)
                self._flush()
        else:
            self._took(data)

    def _up_to_date(self, size: int) -> bool:
        fits = size <= self._limits.max_message_bytes
        return fits and not self._lines.held and not self._waiting and self._room.is_set() and not self._blocked

    def _took(self, data: bytes) -> None:
        if data:
            lines = self._lines.feed(data)
        else:
            lines = self._lines.end()
            self._ended_input = True
            self._stop_reading()
            self.input_closed()
        self._waiting += lines
        self._work()

    def _work(self) -> None:
        """Handle lines until there are none, or too much is unsent: then the peer has to read first."""
        receive, waiting, most = self._conversation.receive, self._waiting, self._limits.max_unsent_bytes
        self._flushing = True
        while waiting and self._unsent_bytes <= most and not self._end.done():
            line = waiting.popleft()
            if line is None:
                limit = self._limits.max_message_bytes
                answer: bytes | None = self._conversation.refuse(
                    Kind.INVALID_REQUEST, f"A line of over {limit:,} bytes"
                )
            else:
                answer = receive(line)
            if answer:
                self.send(answer)
        self._flushing = False
        if self._unsent and not self._blocked:
            self._flush()
        # Read on only while the peer keeps up; end when the input has ended and all of it is handled.
        if self._ended_input:
            if not waiting:
                self.stop("end of input")
        elif not waiting and not self._end.done():
            self._read_on()
        elif self._thread is None:
            self._stop_reading()


def _take(unsent: list[bytes | memoryview], written: int) -> bool:
    """Forget what was written; whether that was whole pieces."""
    done = 0
    for piece in unsent:
        if written < len(piece):
            break
        written -= len(piece)
        done += 1
    del unsent[:done]
    if written:
        unsent[0] = memoryview(unsent[0])[written:]
    return done > 0 and not written


class _ThreadReader:
    """Reads a descriptor the loop cannot watch; one chunk at a time, the next when the last has been handled."""

    def __init__(self, source: int, loop: asyncio.AbstractEventLoop, took: Callable[[bytes], None]) -> None:
        self.stopped = False
        self._source = source
        self._loop = loop
        self._took = took
        self._wanted = threading.Event()
        self._wanted.set()
        threading.Thread(target=self._read, name="handrail-stdin", daemon=True).start()

    def read_on(self) -> None:
        self._wanted.set()

    def _read(self) -> None:
        data = b"-"
        while data and not self.stopped:
            self._wanted.wait()
            self._wanted.clear()
            try:
                data = os.read(self._source, _CHUNK)
            except OSError:
                data = b""
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._took, data)
