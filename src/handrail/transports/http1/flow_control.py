"""What goes out on a connection: slower if the peer is slow, and not at all if it takes nothing for a while."""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger("handrail")


class FlowControl(asyncio.Protocol):
    """A connection whose peer has to read."""

    transport: asyncio.Transport
    write_paused = False
    _drained: asyncio.Event | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(self, seconds: float) -> None:
        self.loop = asyncio.get_running_loop()
        self._stall_seconds = seconds

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.write_paused = False
        self._wake()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._watch_writes()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._wake()
        self._watch_writes()

    async def drain(self) -> None:
        """Until the peer has taken what was written."""
        while self.write_paused:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()

    def close(self) -> None:
        if not self.transport.is_closing():  # one of TLS forgets its protocol the second time
            self.transport.close()
            self._watch_writes()  # closing waits for what is unsent, and by itself for ever

    def _wake(self) -> None:
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    def _watch_writes(self) -> None:
        """Look after a while whether the peer took anything, if an answer waits for that."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self.write_paused or self.transport.is_closing()):
            self._stall_timer = self.loop.call_later(self._stall_seconds, self._check_progress, unsent)

    def _check_progress(self, unsent_before: int) -> None:
        if self.transport.get_write_buffer_size() < unsent_before:
            self._watch_writes()
        else:
            log.info("http: a client read nothing for %g s and was cut off", self._stall_seconds)
            self.transport.abort()
