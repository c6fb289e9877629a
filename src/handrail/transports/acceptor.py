"""The way in over HTTP: a listening socket, the application behind it, and every connection that came through."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from email.utils import formatdate
from socket import socket
from typing import TYPE_CHECKING, Any

import uvicorn

from handrail.engine.eager import Start, starter
from handrail.transports.guarded import Guarded

if TYPE_CHECKING:
    from handrail.transports.listen import HttpLimits

_BACKLOG = 2048
_LAST_SECONDS = 0.25  # for each of the last steps of an end


class State:
    """What the connections of one listener share."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.connections: set[Guarded] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.start: Start = starter(asyncio.get_running_loop())
        self.date = b"date: "  # the line of every answer
        self.ending = False
        self._fewer = asyncio.Event()

    def one_less(self) -> None:
        if self.ending:
            self._fewer.set()

    async def left(self) -> None:
        """Wait until there is no connection."""
        while self.connections:
            self._fewer.clear()
            await self._fewer.wait()


class Acceptor:
    """A listening socket, the application behind it, and every connection that came through."""

    def __init__(self, app: Any, limits: HttpLimits, tls: ssl.SSLContext | None) -> None:
        self._config = uvicorn.Config(
            app, http=Guarded, ws="none", interface="asgi3", log_config=None, proxy_headers=False
        )
        self._config.load()
        self._lifespan = self._config.lifespan_class(self._config)
        self._limits = limits
        self._tls: dict[str, Any] = {}
        if tls is not None:
            self._tls = {"ssl": tls, "ssl_handshake_timeout": limits.header_seconds}

    async def open(self, listening: socket) -> None:
        await self._lifespan.startup()
        if self._lifespan.should_exit:
            raise RuntimeError("the application did not start; the log says why")
        self._state = State(self._limits)
        # Not create_unix_server: that removes the path when it ends, which other workers still listen on.
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Guarded(self._config.loaded_app, self._state, self._lifespan.state),
            sock=listening,
            backlog=_BACKLOG,
            **self._tls,
        )
        self._dating = asyncio.create_task(self._keep_date())

    def stop_accepting(self) -> None:
        """No more connections, and of those that are open no more than the requests they have begun."""
        self._server.close()
        self._state.ending = True
        for connection in list(self._state.connections):
            if connection.cycle is not None:
                connection.cycle.keep_alive = False

    async def close(self, seconds: float) -> None:
        """Let connections finish for a while; then end whatever is left."""
        self._dating.cancel()
        for connection in list(self._state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + _LAST_SECONDS):
                await self._state.left()
        for connection in list(self._state.connections):
            connection.transport.abort()
        tasks = set(self._state.tasks)
        if tasks:
            # They have been told that the peer is gone: most end by themselves.
            tasks = (await asyncio.wait(tasks, timeout=_LAST_SECONDS))[1]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                await self._lifespan.shutdown()

    async def _keep_date(self) -> None:
        while True:
            self._state.date = f"date: {formatdate(usegmt=True)}".encode()
            await asyncio.sleep(1.0)
