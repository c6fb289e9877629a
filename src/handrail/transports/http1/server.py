"""The HTTP/1.1 server: one ASGI application behind a listening socket, in one process or several."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from email.utils import formatdate
from socket import socket
from typing import Any

from handrail.errors import NotStarted, missing_extra

try:
    import uvicorn

    from handrail.transports.http1.connection import Http1Connection, ServerState
except ModuleNotFoundError as missing:
    if missing.name is not None and missing.name.split(".")[0] in ("uvicorn", "httptools"):
        raise missing_extra("http", "serving HTTP needs uvicorn and httptools", missing.name) from None
    raise

from handrail.transports.http1.listen import Address, HttpLimits, tls_context
from handrail.transports.supervisor import WorkerPool, run_process

log = logging.getLogger("handrail")

Stop = Callable[[], Awaitable[None]]

_BACKLOG = 2048
_SHUTDOWN_STEP_SECONDS = 0.25  # for each step of a shutdown after the grace


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
    """Serve on a socket while the context is open.

    At its end the listener accepts no more connections, awaits `stop()`, and lets open connections finish their
    requests: both within `grace` seconds. Then all connections and tasks that are left are aborted.
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
    # Not create_unix_server: at its end that removes the path, on which other workers still listen.
    server = await loop.create_server(
        lambda: Http1Connection(config.loaded_app, state, lifespan.state),
        sock=listener,
        backlog=_BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else limits.header_seconds,
    )
    date_task = asyncio.create_task(_update_date(state))
    try:
        yield
    finally:
        server.close()
        await _shut_down(state, stop, grace)
        date_task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHUTDOWN_STEP_SECONDS):
                await lifespan.shutdown()


async def _shut_down(state: ServerState, stop: Stop | None, grace: float) -> None:
    """Let requests finish within `grace` seconds, then abort connections, then cancel tasks."""
    loop = asyncio.get_running_loop()
    state.stopping = True
    for connection in list(state.connections):
        if connection.cycle is not None:
            connection.cycle.keep_alive = False
    end = loop.time() + grace
    if stop is not None:
        await _call_stop(stop, grace)
    for connection in list(state.connections):
        connection.shutdown()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(max(end, loop.time()) + _SHUTDOWN_STEP_SECONDS):
            await state.wait_closed()
    for connection in list(state.connections):
        connection.transport.abort()
    unfinished = await _unfinished(state.tasks)  # most end by themselves: their peer is gone
    for task in unfinished:
        task.cancel()
    await _unfinished(unfinished)


async def _update_date(state: ServerState) -> None:
    while True:
        state.date = f"date: {formatdate(usegmt=True)}".encode()
        await asyncio.sleep(1.0)


async def _unfinished(tasks: Iterable[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait for one shutdown step; return the tasks that have not ended."""
    tasks = set(tasks)
    return (await asyncio.wait(tasks, timeout=_SHUTDOWN_STEP_SECONDS))[1] if tasks else tasks


async def _call_stop(stop: Stop, seconds: float) -> None:
    """Await `stop()` for at most `seconds`, even if it ignores its cancellation."""

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


def run_http(
    app: Any,
    address: str | int,
    *,
    limits: HttpLimits,
    stop: Stop,
    grace: float = 3.0,
    workers: int = 1,
    certificate: str | None = None,
    key: str | None = None,
    ready: Callable[[str], None],
    second_app: tuple[Any, str] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, in this process or in `workers` child processes; handle the signals meanwhile.

    The shutdown is that of `serve_app` and takes at most `grace` and 1.5 s. What has not ended by then is abandoned; a
    second Ctrl-C ends the process at once. `second_app` is an application and its address, served for the same time.
    """
    if workers < 1:
        raise ValueError(f"workers: {workers} is less than 1")
    if workers > 1 and not hasattr(os, "fork"):
        raise ValueError(f"workers: {workers}: this system cannot fork, start several processes instead")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("run takes the signals of the process: call it in the main thread, or serve `asgi()`")
    tls = tls_context(certificate, key)
    target, scheme = Address.parse(address), "https" if tls else "http"
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(target.listen())
        second_socket = None
        if second_app is not None:
            second = Address.parse(second_app[1])
            second_socket = stack.enter_context(second.listen())
            log.info("http: also listening on %s", second.url(second_socket, scheme))

        async def serve(stop_event: asyncio.Event, on_started: Callable[[], None]) -> None:
            async with contextlib.AsyncExitStack() as stack:
                if second_app is not None and second_socket is not None:
                    second_server = serve_app(second_app[0], second_socket, limits=limits, tls=tls, grace=0.0)
                    await stack.enter_async_context(second_server)
                server = serve_app(app, listening, limits=limits, tls=tls, stop=stop, grace=grace)
                await stack.enter_async_context(server)
                on_started()
                await stop_event.wait()

        def on_ready() -> None:
            ready(target.url(listening, scheme))

        if workers == 1:
            run_process(serve, grace, on_ready)
        else:
            WorkerPool(workers, serve, grace).run(on_ready)
