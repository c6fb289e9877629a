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
from handrail.protocol.lines import LineReader

__all__ = ["Pipe", "private_descriptors"]

log = logging.getLogger("handrail")

_CHUNK = 256 * 1024


@contextlib.contextmanager
def private_descriptors() -> Iterator[tuple[int, int]]:
    """Copies of descriptors 0 and 1 that nobody else knows; the public ones are harmless until the end."""
    sys.stdout.flush()
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(nothing, 0)
        try:
            os.dup2(2, 1)
        except OSError:  # started without standard error
            os.dup2(nothing, 1)
        yield source, sink
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os.dup2(source, 0)
        os.dup2(sink, 1)
        for descriptor in (source, sink, nothing):
            os.close(descriptor)


class Pipe:
    """The server's end of a pair of descriptors: lines in, lines out."""

    def __init__(self, engine: Engine, source: int, sink: int, principal: Principal) -> None:
        self._limits = engine.limits
        self._source = source
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._conversation = Conversation(engine, self, principal)
        self._lines = LineReader(engine.limits.max_message_bytes)
        self._waiting: deque[bytes | None] = deque()  # lines read, not yet handled, because too much is unsent
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._left: memoryview | None = None  # of the last write that did not fit
        self._flushing = False
        self._writing = False
        self._write_timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._reading = False
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
            await self._conversation.finish(self._limits.grace_seconds)
            await self._empty()
        finally:
            self._stop_reading()
            self._conversation.drop()
            if self._writing:
                self._loop.remove_writer(self._sink)
            if self._write_timer is not None:
                self._write_timer.cancel()
            if was_blocking:
                os.set_blocking(self._sink, True)

    def stop(self, why: str) -> None:
        if not self._end.done():
            self._end.set_result(why)

    # Out

    def send(self, message: bytes) -> None:
        self._unsent += (message, b"\n")
        self._unsent_bytes += len(message) + 1
        self._emptied.clear()
        if self._unsent_bytes > self._limits.max_unsent_bytes:
            self._room.clear()
        if not self._flushing and self._left is None:
            self._flushing = True
            self._loop.call_soon(self._flush)

    async def drain(self) -> None:
        if not self._room.is_set():
            await self._room.wait()

    def _flush(self) -> None:
        """Write what there is, as far as the peer takes it."""
        self._flushing = False
        if self._left is None:
            if not self._unsent:
                return
            data = self._unsent[0] + b"\n" if len(self._unsent) == 2 else b"".join(self._unsent)
            self._unsent = []
            self._left = memoryview(data)
        try:
            written = os.write(self._sink, self._left)
        except (BlockingIOError, InterruptedError):
            written = 0
        except OSError as problem:
            self._broken(f"the client does not read any more: {problem}")
            return
        self._unsent_bytes -= written
        self._left = self._left[written:] if written < len(self._left) else None
        if self._left is not None or self._unsent:
            self._write_later(progress=written > 0)
            return
        if self._writing:
            self._loop.remove_writer(self._sink)
            self._writing = False
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._emptied.set()
        if not self._room.is_set():
            self._room.set()
            self._loop.call_soon(self._work)

    def _write_later(self, *, progress: bool) -> None:
        if not self._pollable_sink:
            self._loop.call_soon(self._flush)
            return
        if not self._writing:
            self._loop.add_writer(self._sink, self._flush)
            self._writing = True
        if progress and self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self._write_timer is None:
            seconds = self._limits.write_seconds
            self._write_timer = self._loop.call_later(
                seconds, self._broken, f"the client read nothing for {seconds:g} s"
            )

    def _broken(self, why: str) -> None:
        if not self._end.done():
            log.warning("stdio: %s", why)
        self._unsent, self._unsent_bytes, self._left = [], 0, None
        self._conversation.drop()
        self._room.set()
        self._emptied.set()
        if self._writing:
            self._loop.remove_writer(self._sink)
            self._writing = False
        self.stop(why)

    async def _empty(self) -> None:
        """Wait until all is written, or the peer has had its time."""
        self._flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(self._limits.write_seconds, self._limits.grace_seconds)):
                await self._emptied.wait()

    def _make_sink_unblocking(self) -> bool:
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
            data = os.read(self._source, _CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._took(data)

    def _took(self, data: bytes) -> None:
        if data:
            lines = self._lines.feed(data)
        else:
            lines = self._lines.end()
            self._ended_input = True
            self._stop_reading()
        self._waiting += lines
        self._work()

    def _work(self) -> None:
        """Handle lines until there are none, or too much is unsent: then the peer has to read first."""
        receive, waiting = self._conversation.receive, self._waiting
        self._flushing = True
        while waiting and self._room.is_set() and not self._end.done():
            line = waiting.popleft()
            if line is None:
                most = self._limits.max_message_bytes
                answer: bytes | None = self._conversation.refuse(Kind.INVALID_REQUEST, f"A line of over {most:,} bytes")
            else:
                answer = receive(line)
            if answer is not None:
                self.send(answer)
        self._flushing = False
        if self._left is None and self._unsent:
            self._flush()
        self._regulate()

    def _regulate(self) -> None:
        """Read on only while the peer keeps up; end when the input has ended and all of it is handled."""
        if self._ended_input:
            if not self._waiting:
                self.stop("end of input")
        elif self._waiting:
            if self._thread is None:
                self._stop_reading()
        elif not self._end.done():
            self._read_on()


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
