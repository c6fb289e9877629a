"""Peers, applications and tools that misbehave: nothing hangs, nothing is lost, nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any

import pytest

from faults import MODERN, call as message, text_of, until
from handrail import Server
from handrail.engine.eager import starter
from handrail.transports.http1.connection import Http1Connection
from handrail.transports.http1.request import RequestResponseCycle
from patience import PATIENCE
from servers_listen import App, Message, Receive, Send, listening
from tests.http1.test_listen import (
    MIB,
    Wire,
    admitted,
    certificate,
    connected,
    get,
    linux,
    listener,
    opened,
    posix,
    post,
    served,
    unread_capacity,
)

__all__ = ["certificate"]  # a fixture


class Odd(App):
    """More that an application may do."""

    async def do_raise(self, scope: Message, receive: Receive, send: Send) -> None:
        raise {"exit": SystemExit, "interrupt": KeyboardInterrupt, "cancelled": asyncio.CancelledError}.get(
            scope["query_string"].decode(), ValueError
        )

    async def do_raise_later(self, scope: Message, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0)
        await self.do_raise(scope, receive, send)

    async def do_raise_begun(self, scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        raise ValueError

    async def do_raise_promised(self, scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError

    async def do_nothing(self, scope: Message, receive: Receive, send: Send) -> None:
        pass

    async def do_cancel(self, scope: Message, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async def do_lies(self, scope: Message, receive: Receive, send: Send) -> None:
        """Promises five bytes, and sends what the query says."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        for piece in scope["query_string"].split(b","):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})

    async def do_upper(self, scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"Content-Length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def do_unsized(self, scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def do_last(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})


def cycles() -> int:
    gc.collect()
    return sum(isinstance(each, RequestResponseCycle) for each in gc.get_objects())


def connections() -> int:
    gc.collect()
    return sum(isinstance(each, Http1Connection) for each in gc.get_objects())


def port(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


# Order, and nothing lost


async def test_a_bad_request_behind_several_good_ones_does_not_spoil_their_answers() -> None:
    app = App()
    async with opened(app) as wire:
        await wire.send(get("wait") + get("echo") + get("echo") + b"nonsense\r\n\r\n")
        await until(lambda: len(app.scopes) == 1, "the first request runs")
        app.gate.set()
        assert (await wire.answer()).body == b"waited"
        assert (await wire.answer()).body == b"0 one "
        assert (await wire.answer()).body == b"0 one "
        await wire.refused(400)


async def test_a_refusal_does_not_cut_off_the_answer_before_it() -> None:
    """A client that is slow to read a long answer has more than the second a refusal is waited for."""
    async with listener() as url, connected(url, limit=4096) as wire:
        await wire.send(get(f"sized?{16 * MIB}") + b"nonsense\r\n\r\n")
        size, began = 0, time.monotonic()
        while time.monotonic() - began < 1.5:
            size += len(await wire.reader.read(4096))
            await asyncio.sleep(0.01)  # the subject of the test
        assert size < 12 * MIB
        rest = await wire.rest()
        assert size + len(rest) > 16 * MIB
        assert rest.endswith(b"This is not a valid HTTP request.\n")


async def test_nothing_is_answered_behind_a_last_answer() -> None:
    async with opened() as wire:
        await wire.send(get(f"sized?{8 * MIB}", "Connection: close") + get("echo"))
        rest = await wire.rest()
        assert rest.count(b"HTTP/1.1 ") == 1
        assert len(rest) > 8 * MIB


@pytest.mark.parametrize("last", ["last", "raise", "raise_later"])
async def test_no_request_behind_a_last_answer_is_begun(last: str) -> None:
    """Who pipelined it may send it again: it must not have been served."""
    app = Odd()
    async with opened(app) as wire:
        await wire.send(get(last) + post("echo", b"x") * 3 + post("echo", b"x" * 40_000))
        assert (await wire.answer()).status in (200, 500)
        assert await wire.rest() == b""
    assert app.requests == []


@posix
async def test_no_request_behind_a_last_answer_is_begun_in_tls(certificate: tuple[str, str]) -> None:
    app = Odd()
    async with secure(app, certificate) as (url, trusting), connected(url, ssl=trusting) as wire:
        await wire.send(get("last") + post("echo", b"x" * 40_000) + post("echo", b"x") * 100)
        assert (await wire.answer()).status == 200
        assert await wire.rest() == b""
    assert app.requests == []


@asynccontextmanager
async def secure(
    app: Any, certificate: tuple[str, str], *, is_secure: bool = True, **limits: Any
) -> AsyncIterator[tuple[str, ssl.SSLContext | None]]:
    """As `listener`, with TLS."""
    made, key = certificate if is_secure else (None, None)
    async with listening(app, certificate=made, key=key, **limits) as url:
        yield url, ssl.create_default_context(cafile=made) if is_secure else None


@pytest.mark.parametrize("path", ["early", "raise", "last"])
@pytest.mark.parametrize("fields", [(), ("Connection: close",)])
async def test_a_last_answer_before_the_end_of_the_body_arrives(path: str, fields: tuple[str, ...]) -> None:
    """Closed with bytes unread, TCP takes the answer back."""
    async with listener(Odd()) as url:
        for _ in range(5):
            async with connected(url) as wire:
                await wire.send(post(path, b"x" * 2 * MIB, *fields)[: 256 * 1024])
                await asyncio.sleep(0.02)  # the answer is there, and not read
                await wire.send(b"x" * 256 * 1024)
                await asyncio.sleep(0.02)
                assert (await wire.answer()).status in (200, 413, 500)


async def test_a_client_that_has_no_more_to_say_still_gets_its_answers() -> None:
    async with listener() as url:
        for request in (get("echo"), get("echo") * 3, get(f"sized?{4 * MIB}")):
            async with connected(url) as wire:
                await wire.send(request)
                wire.writer.write_eof()
                rest = await wire.rest()
                assert rest.count(b"HTTP/1.1 200") == request.count(b"GET")


@pytest.mark.parametrize("fields", [(), ("Connection: keep-alive",)])
async def test_the_end_of_an_answer_to_http_1_0_is_seen(fields: tuple[str, ...]) -> None:
    async with opened(Odd()) as wire:
        await wire.send(get("unsized", *fields, version="1.0"))
        rest = await wire.rest()
        assert rest.endswith(b"\r\n\r\nok")
        assert b"connection: close" in rest


async def test_http_1_0_is_promised_no_continuation() -> None:
    async with opened() as wire:
        await wire.send(post("echo", b"x", "Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await wire.answer()).status == 200


async def test_a_body_nobody_asked_for_is_not_waited_for() -> None:
    """Told to wait for a continuation, a client that gets an answer instead may never send the body."""
    async with opened() as wire:
        await wire.send(get("early", "Content-Length: 100", "Expect: 100-continue"))
        found = await wire.answer()
        assert (found.status, found.headers.get("connection")) == (413, "close")
        assert await wire.rest() == b""


async def test_a_long_head_that_offers_to_speak_something_else_is_served() -> None:
    fields = ("Connection: Upgrade", "Upgrade: h2c", f"X: {'x' * 20_000}")
    async with opened() as wire:
        assert await wire.text(post("echo", b"body", *fields)) == "4 one body"


async def test_requests_of_all_kinds_on_one_connection() -> None:
    async with opened(Odd()) as wire:
        for _ in range(3):
            await wire.send(get("sized?10").replace(b"GET", b"HEAD"))
            head = await asyncio.wait_for(wire.reader.readuntil(b"\r\n\r\n"), PATIENCE)
            assert b"content-length: 10" in head
            assert await wire.text(post("echo", b"abc")) == "3 one abc"
            await wire.send(get("echo", "Content-Length: 3", "Expect: 100-continue"))
            assert (await wire.answer()).status == 100
            assert await wire.text(b"abc") == "3 one abc"
            assert await wire.text(post("echo", b"abc", "Connection: Upgrade", "Upgrade: h2c")) == "3 one abc"
            chunks = b"3\r\nabc\r\n0\r\nX: y\r\n\r\n"
            assert (await wire.text(get("echo", "Transfer-Encoding: chunked") + chunks)).startswith("3 ")


# Who goes, and who does not read


async def test_a_client_that_goes_leaves_nothing_behind() -> None:
    app = Odd()
    async with listener(app) as url:
        tasks = len(asyncio.all_tasks())
        for request in (
            get("until_gone") + get("echo") * 100,
            post("echo", b"x" * 100_000)[:50_000],
            get("echo", "Transfer-Encoding: chunked") + b"5\r\nab",
            get("fifty"),
            get("stream") + get("echo"),
            get("wait") + b"nonsense\r\n\r\n",
            get("wait") + get("echo") + b"nonsense\r\n\r\n",
            get("echo", "Expect: 100-continue", "Content-Length: 5"),
            b"nonsense\r\n\r\n",
            b"GET /echo HT",
            b"",
        ):
            for is_rude in (True, False):
                async with connected(url) as wire:
                    await wire.send(request)
                    await asyncio.sleep(0.02)
                    if is_rude:
                        wire.writer.transport.abort()
        app.gate.set()
        app.streams_end.set()
        await until(lambda: len(asyncio.all_tasks()) == tasks, "the tasks have ended")
        app.scopes.clear()
        await until(lambda: cycles() == 0 and connections() == 0, "all of it is forgotten")


@linux
async def test_a_thousand_connections_leave_nothing_behind() -> None:
    app = App()
    async with listener(app) as url:
        async with connected(url) as wire:
            assert await wire.text(post("echo", b"x")) == "1 one x"
        tasks, files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))

        async def one(number: int) -> None:
            async with connected(url) as wire:
                for _ in range(number % 4):
                    assert await wire.text(post("echo", b"x")) == "1 one x"
                if number % 5 == 0:
                    await wire.send(get("until_gone"))
                if number % 3 == 0:
                    wire.writer.transport.abort()

        for start in range(0, 1000, 100):
            await asyncio.gather(*(one(number) for number in range(start, start + 100)))
        await until(lambda: len(asyncio.all_tasks()) == tasks, "the tasks have ended")
        app.scopes.clear()
        await until(lambda: cycles() == 0 and connections() == 0, "all of it is forgotten")
        assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.parametrize("size", range(-96, 96, 24))
async def test_who_says_goodbye_and_reads_nothing_is_cut_off(size: int) -> None:
    """Closing waits for what is unsent, and by itself for ever: also when it is the peer that closes first."""
    async with listener(write_seconds=0.3, max_connections=1, idle_seconds=1000) as url:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", port(url)))
            deaf.sendall(get(f"sized?{unread_capacity() + size * 1024}"))
            await asyncio.sleep(0.1)
            deaf.shutdown(socket.SHUT_WR)
            async with admitted(url):
                pass


@pytest.mark.parametrize("size", range(-96, 96, 24))
async def test_an_answer_that_breaks_off_unread_does_not_keep_its_connection(size: int) -> None:
    class Breaking(App):
        async def do_break(self, scope: Message, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            body = b"x" * int(scope["query_string"])
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async with listener(Breaking(), write_seconds=0.3, max_connections=1, idle_seconds=1000) as url:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", port(url)))
            deaf.sendall(get(f"break?{unread_capacity() + size * 1024}"))
            async with admitted(url):
                pass


@linux
async def test_who_pipelines_and_does_not_read_costs_little() -> None:
    async with served(limits={"write_seconds": 1.0}) as server, connected(server.url) as other:
        server.memory()
        before = server.memory()
        with socket.create_connection(("127.0.0.1", port(server.url))) as deaf:
            deaf.setblocking(False)
            began, flood = time.monotonic(), get("sized?100000") * 1000
            while time.monotonic() - began < 0.8:
                with suppress(BlockingIOError):
                    deaf.send(flood)
                await asyncio.sleep(0.01)
            assert await other.text(post("echo", b"x")) == "1 one x"
        assert server.memory() - before < 8 * MIB


# Applications that fail


@pytest.mark.parametrize("path", ["raise", "raise_later"])
@pytest.mark.parametrize("how", ["", "?exit", "?interrupt", "?cancelled"])
async def test_an_application_that_raises_is_answered_for(path: str, how: str) -> None:
    async with listener(Odd()) as url:
        for _ in range(2):
            async with connected(url) as wire:
                await wire.send(get(path + how))
                await wire.refused(500)
        async with connected(url) as wire:
            assert await wire.text(post("echo", b"x")) == "1 one x"


@pytest.mark.parametrize("path", ["nothing", "cancel", "raise_promised", "lies?123456", "lies?123", "lies?", "missing"])
async def test_an_application_that_does_not_answer_is_answered_for(path: str) -> None:
    async with listener(Odd()) as url, connected(url) as wire:
        assert await wire.text(post("echo", b"x")) == "1 one x"
        await wire.send(get(path))
        if path in ("lies?123", "lies?"):  # which has begun
            assert (await wire.rest()).count(b"HTTP/1.1 200") == 1
        else:
            await wire.refused(500)


@pytest.mark.parametrize("path", ["raise_begun", "lies?123", "lies?123,456"])
async def test_an_answer_that_breaks_off_is_seen_to(path: str) -> None:
    async with opened(Odd()) as wire:
        await wire.send(get(path) + get("echo"))
        rest = await wire.rest()
        assert rest.count(b"HTTP/1.1 ") == 1
        assert not rest.endswith(b"0\r\n\r\n")


async def test_an_application_that_cannot_be_called_is_answered_for() -> None:
    class Wrong(App):
        def __call__(self, scope: Message, receive: Receive, send: Send) -> Any:
            raise TypeError("not a coroutine")

    async with listener(Wrong()) as url:
        for _ in range(2):
            async with connected(url) as wire:
                await wire.send(get("echo") * 2)
                await wire.refused(500)


async def test_names_of_headers_may_be_in_any_case() -> None:
    async with opened(Odd()) as wire:
        assert await wire.text(get("upper")) == "ok"
        assert await wire.text(post("echo", b"x")) == "1 one x"


# The end


@pytest.mark.parametrize("is_secure", [False, True])
async def test_the_end_lets_a_body_arrive_and_a_stream_end(is_secure: bool, certificate: tuple[str, str]) -> None:
    app = Odd()
    async with AsyncExitStack() as clients:
        async with secure(app, certificate, is_secure=is_secure) as (url, trusting):
            half, stream = [await clients.enter_async_context(connected(url, ssl=trusting)) for _ in range(2)]
            request = post("echo", b"x" * 1000)
            await half.send(request[:-500])
            await stream.send(get("stream"))
            await stream.reader.readuntil(b"begun\n\r\n")
            await until(lambda: len(app.scopes) == 2, "both requests run")
            asyncio.get_running_loop().call_later(0.1, half.writer.write, request[-500:])  # after the end began
        found = await half.answer()
        assert found.body.startswith(b"1000 ")
        assert found.headers["connection"] == "close"
        assert (await stream.rest()).endswith(b"ended\n\r\n0\r\n\r\n")


# Tools that fail, through the endpoint that answers at once


CALLED: ContextVar[int] = ContextVar("CALLED", default=0)


class Exotic(BaseException):
    pass


class Poison:
    """Cannot be looked at."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __iter__(self) -> Any:
        raise self.kind

    def __str__(self) -> str:
        raise self.kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self.kind


KINDS: dict[str, type[BaseException]] = {
    each.__name__: each
    for each in (
        SystemExit,
        KeyboardInterrupt,
        GeneratorExit,
        asyncio.CancelledError,
        StopIteration,
        StopAsyncIteration,
        RecursionError,
        MemoryError,
        TimeoutError,
        Exotic,
    )
}


def odd_server() -> Server:
    server = Server("odd", version="1")

    @server.tool
    async def raises(kind: str, waits: bool = False) -> str:
        """Raise something."""
        if waits:
            await asyncio.sleep(0)
        raise KINDS[kind]

    @server.tool(inline=True)
    def raises_inline(kind: str) -> str:
        """Raise something, in the loop."""
        raise KINDS[kind]

    @server.tool
    def raises_thread(kind: str) -> str:
        """Raise something, in a thread."""
        raise KINDS[kind]

    @server.tool
    async def poisons(kind: str, waits: bool = False) -> Any:
        """Return what raises when it is looked at."""
        if waits:
            await asyncio.sleep(0)
        return Poison(KINDS[kind])

    @server.tool
    async def begins(how: str) -> str:
        """Do what needs a task at the very start."""
        CALLED.set(CALLED.get() + 1)
        task = asyncio.current_task()
        assert task is not None
        if how == "timeout":
            try:
                async with asyncio.timeout(0):
                    await asyncio.sleep(10)
            except TimeoutError:
                return f"{CALLED.get()} timeout"
        elif how == "group":
            async with asyncio.TaskGroup() as group:
                made = group.create_task(asyncio.sleep(0, "made"))
            return f"{CALLED.get()} {made.result()}"
        elif how == "cancel":
            task.cancel()
        elif how == "cancel wait":
            task.cancel()
            await asyncio.sleep(10)
        elif how == "uncancel":
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(10)
            task.uncancel()
        elif how == "nested":
            assert await asyncio.create_task(asyncio.sleep(0, "x")) == "x"
        return f"{CALLED.get()} {task.get_name()}"

    @server.tool
    async def long(size: int) -> str:
        """A long answer."""
        return "x" * size

    @server.tool
    async def blocks() -> str:
        """Hold the loop for a moment."""
        time.sleep(0.2)  # noqa: ASYNC251 - the subject of the test
        return "blocked"

    return server


@asynccontextmanager
async def calling(server: Server, grace: float = 3.0, **limits: Any) -> AsyncIterator[str]:
    async with listener(server.asgi(), grace=grace, **limits) as url:
        yield url


def called(name: str, ident: int = 1, **arguments: Any) -> bytes:
    body = message(MODERN, ident, name, **arguments)
    fields = (
        "Content-Type: application/json",
        "Accept: application/json, text/event-stream",
        f"MCP-Protocol-Version: {MODERN}",
        "Mcp-Method: tools/call",
        f"Mcp-Name: {name}",
    )
    return post("mcp", body, *fields).replace(b"Host: a", b"Host: localhost")


async def result(wire: Wire) -> dict[str, Any]:
    found = await wire.answer()
    answer: dict[str, Any] = json.loads(found.body)
    return answer


@pytest.mark.parametrize("tool", ["raises", "raises_inline", "raises_thread", "poisons"])
@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_a_tool_raises_is_an_answer(tool: str, kind: str) -> None:
    async with calling(odd_server()) as url, connected(url) as wire:
        for more in ({}, {"waits": True}) if tool in ("raises", "poisons") else ({},):
            for _ in range(3):
                await wire.send(called(tool, kind=kind, **more))
                found = await result(wire)
                assert "error" in found or found["result"]["isError"]
        await wire.send(called("long", size=3))
        assert text_of(await result(wire)) == "xxx"


@pytest.mark.parametrize("how", ["plain", "timeout", "group", "cancel", "cancel wait", "uncancel", "nested"])
async def test_a_tool_may_use_its_task_at_the_very_start(how: str) -> None:
    async with calling(odd_server()) as url, connected(url) as wire:
        texts = []
        for _ in range(4):
            await wire.send(called("begins", how=how))
            texts.append(text_of(await result(wire)))
        assert len(set(texts)) == 1
        assert texts[0].startswith("1 ") or how.startswith("cancel")
        tasks = len(asyncio.all_tasks())
        await wire.send(called("begins", how=how) * 3)
        assert [text_of(await result(wire)) for _ in range(3)] == texts[:3]
        assert len(asyncio.all_tasks()) == tasks


async def test_long_answers_and_short_ones_in_one_packet() -> None:
    sizes = [1, 3 * MIB, 2, 100_000, 3, 70_000, 65_000, 4]
    async with calling(odd_server()) as url, connected(url) as wire:
        for _ in range(2):
            await wire.send(b"".join(called("long", ident, size=size) for ident, size in enumerate(sizes)))
            for ident, size in enumerate(sizes):
                found = await result(wire)
                assert (found["id"], len(text_of(found))) == (ident, size)


async def test_a_tool_that_blocks_delays_others_and_loses_nothing() -> None:
    async with calling(odd_server()) as url, connected(url) as wire, connected(url) as other:
        await wire.send(called("blocks") * 3)
        await other.send(called("long", size=1))
        assert text_of(await result(other)) == "x"
        assert [text_of(await result(wire)) for _ in range(3)] == ["blocked"] * 3


async def test_a_call_whose_body_comes_too_late_does_not_run_after_the_end() -> None:
    """When the server's lifespan is over, what its tools need is closed."""
    ran: list[bool] = []
    server = Server("late", version="1")

    @server.tool
    async def late() -> str:
        """Remember whether the server still served."""
        ran.append(server.is_serving)
        return "ran"

    endpoint = server.asgi()
    async with listener(endpoint) as url, connected(url) as wire:
        request = called("late")
        await wire.send(request[:-10])
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(endpoint.stop())
        await asyncio.wait((stopping,), timeout=PATIENCE)
        await wire.send(request[-10:])
        assert (await wire.answer()).status == 503
    assert ran == []


# Tasks that begin at once


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python does it itself")
async def test_garbage_that_is_collected_while_a_task_is_made_reaches_the_loop() -> None:
    """Destructors run wherever memory is asked for; a StreamWriter's closes its transport, and so calls the loop."""
    loop = asyncio.get_running_loop()
    start = starter(loop)
    told: list[int] = []

    class Dying:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            loop.call_soon(told.append, 1)

    async def work() -> int:
        return 5

    before = gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        for count in range(50):
            Dying()
            coroutine = work()
            gc.set_threshold(1 + count % 10)
            gc.enable()
            task = start(coroutine)
            gc.disable()
            assert await task == 5
    finally:
        gc.set_threshold(*before)
        gc.enable()
    gc.collect()
    await asyncio.sleep(0)
    assert len(told) == 50
