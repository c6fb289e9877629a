"""The end of a process that listens: signals, cancelling, and applications that do not stop."""

from __future__ import annotations

import asyncio
import signal

import pytest

from faults import rounds, until
from requirements import requirement
from servers_listen import App, listening
from wires_http1 import (
    LASTING,
    caught,
    connected,
    get,
    listener,
    posix,
    post,
    served,
)


@posix
@requirement("P-12")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_streams_and_lets_requests_answer(number: int) -> None:
    async def one(at: int) -> None:
        async with (
            served(grace=LASTING) as server,
            connected(server.url) as stream,
            connected(server.url) as wire,
            connected(server.url) as idle,
        ):
            assert await idle.text(post("echo", b"x")) == "1 one x"
            await stream.send(get("stream"))
            await stream.reader.readuntil(b"begun\n\r\n")
            await wire.send(get("wait"))
            await server.says("running")
            server.process.send_signal(number)
            await server.says("stop")
            answer = await wire.answer()
            assert answer.body == b"waited"
            assert answer.headers["connection"] == "close"
            assert (await stream.rest()).endswith(b"ended\n\r\n0\r\n\r\n")
            assert await idle.rest() == b""
            assert await server.ended(2) == 0
            await server.says("returned")
            assert await server.errors() == ""

    await rounds(10 if number == signal.SIGTERM else 3, one, at_once=2)


@posix
@requirement("P-12")
@pytest.mark.parametrize("path", ["block", "stubborn"])
async def test_a_blocked_application_does_not_keep_the_process(path: str) -> None:
    async with served(grace=0.5) as server, connected(server.url) as wire:
        await wire.send(get(path))
        await server.says("running")
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended(0.5 + 1.5 + 1) == 0


@posix
@requirement("P-12")
@pytest.mark.parametrize("path", ["block", "stubborn"])
async def test_a_second_interrupt_does_not_wait(path: str) -> None:
    async with served(grace=LASTING) as server, connected(server.url) as wire:
        await wire.send(get(path))
        await server.says("running")
        server.process.send_signal(signal.SIGINT)
        if path == "stubborn":
            await server.says("stop")
        else:
            await caught(server.process.pid)
        server.process.send_signal(signal.SIGINT)
        assert await server.ended(2) == 130


@requirement("P-12")
async def test_request_that_does_not_end_is_abandoned_after_the_grace() -> None:
    app = App()
    async with listener(app, grace=0.2) as url, connected(url) as wire:
        await wire.send(get("until_gone"))
        await until(lambda: len(app.scopes) == 1, "the request runs")
    assert app.disconnected.get_nowait() == "until_gone"


async def test_cancelled_server_shuts_down() -> None:
    app = App()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve() -> None:
        async with listening(app) as url:
            ready.set_result(url)
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    async with connected(await ready) as wire:
        await wire.send(get("wait"))
        await until(lambda: len(app.scopes) == 1, "the request runs")
        serving.cancel()
        assert (await wire.answer()).body == b"waited"
        with pytest.raises(asyncio.CancelledError):
            await serving


async def test_stop_that_fails_or_hangs_is_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(App):
        async def stop(self) -> None:
            raise KeyError("x")

    class Endless(App):
        async def stop(self) -> None:
            await asyncio.Event().wait()

    for app in (Failing(), Endless()):
        async with listener(app, grace=0.1) as url, connected(url) as wire:
            assert await wire.text(post("echo", b"x")) == "1 one x"
    told = [record.getMessage() for record in caplog.records if record.name == "handrail"]
    assert [" failed " in text for text in told] == [True, False]
