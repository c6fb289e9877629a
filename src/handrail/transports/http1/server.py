"""The way in over HTTP: an application behind a listening socket, and every connection that comes through."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from email.utils import formatdate
from socket import socket
from typing import TYPE_CHECKING, Any

from handrail.errors import NotStarted, missing_extra

try:
    import uvicorn

    from handrail.transports.http1.connection import Http1Connection
except ModuleNotFoundError as missing:
    if missing.name is not None and missing.name.split(".")[0] in ("uvicorn", "httptools"):
        raise missing_extra("http", "serving HTTP needs uvicorn and httptools", missing.name) from None
    raise

from handrail.engine.eager import Start, starter

if TYPE_CHECKING:
    from handrail.transports.http1.listen import HttpLimits

log = logging.getLogger("handrail")

Stop = Callable[[], Awaitable[None]]

_BACKLOG = 2048
_SHUTDOWN_STEP_SECONDS = 0.25  # for each of the last steps of an end


class ServerState:
    """What the connections of one listener share."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.connections: set[Http1Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.start: Start = starter(asyncio.get_running_loop())
        self.date = b"date: "  # the line of every answer
        self.stopping = False
        self._closed_event = asyncio.Event()

    def connection_closed(self) -> None:
        if self.stopping:
            self._closed_event.set()

    async def wait_closed(self) -> None:
        """Wait until there is no connection."""
        while self.connections:
            self._closed_event.clear()
            await self._closed_event.wait()

    async def update_date(self) -> None:
        while True:
            self.date = f"date: {formatdate(usegmt=True)}".encode()
            await asyncio.sleep(1.0)


@contextlib.asynccontextmanager
async def serve_app(
    app: Any,
    listener: socket,
    *,
    limits: HttpLimits,
    tls: ssl.SSLContext | None = None,
    stop: Stop | None = None,
    grace: float = 3.0,
) -> AsyncIterator[None]:
    """Serve on a socket for as long as this is entered.

    At the end no connection is accepted any more, `stop()` is awaited, and open connections may finish: both within
    `grace`. Then whatever is left is ended.
    """
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(
        app, http=Http1Connection, ws="none", interface="asgi3", log_config=None, proxy_headers=False
    )
    config.load()
    lifespan = config.lifespan_class(config)
    await lifespan.startup()
    if lifespan.should_exit:
        raise NotStarted("the application did not start; what it wrote says why")
    state = ServerState(limits)
    # Not create_unix_server: that removes the path when it ends, which other workers still listen on.
    server = await loop.create_server(
        lambda: Http1Connection(config.loaded_app, state, lifespan.state),
        sock=listener,
        backlog=_BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else limits.header_seconds,
    )
    date_task = asyncio.create_task(state.update_date())
    try:
        yield
    finally:
        server.close()
        state.stopping = True
        for connection in list(state.connections):
            if connection.cycle is not None:
                connection.cycle.keep_alive = False
        end = loop.time() + grace
        if stop is not None:
            await _call_stop(stop, grace)
        date_task.cancel()
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(max(end, loop.time()) + _SHUTDOWN_STEP_SECONDS):
                await state.wait_closed()
        for connection in list(state.connections):
            connection.transport.abort()
        unfinished = await _unfinished(state.tasks)  # they have been told that the peer is gone: most end by themselves
        for task in unfinished:
            task.cancel()
        await _unfinished(unfinished)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHUTDOWN_STEP_SECONDS):
                await lifespan.shutdown()


async def _unfinished(tasks: Iterable[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Those that have not ended after a moment."""
    tasks = set(tasks)
    return (await asyncio.wait(tasks, timeout=_SHUTDOWN_STEP_SECONDS))[1] if tasks else tasks


async def _call_stop(stop: Stop, seconds: float) -> None:
    """Await the application's own end, but not for longer, and whatever it does with being cancelled."""

    async def call() -> None:
        try:
            await stop()
        except Exception:
            log.exception("http: the application failed while it was stopped")

    task = asyncio.create_task(call())
    done, _ = await asyncio.wait((task,), timeout=seconds)
    if not done:
        log.warning("http: the application did not stop within %g s", seconds)
        task.cancel()
