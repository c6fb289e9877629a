"""A listener that no peer can hold, fill or confuse, and that ends when it is asked to."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from faults import gone, put_away, rounds, until
from handrail.transports.http1.listen import Address, HttpLimits
from handrail.transports.http1.request import RequestResponseCycle
from paths import SUPPORT
from patience import PATIENCE, in_time
from requirements import requirement
from servers_listen import App, listening

HERE = SUPPORT
MIB = 1024 * 1024
LASTING = 10 * PATIENCE  # as a grace: a server that ends has not waited for it

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
posix = pytest.mark.skipif(os.name != "posix", reason="Unix sockets, signals or fork")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Wire:
    """A client that sends what it is told, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with suppress(ConnectionError):  # refused in the middle: what the server says counts
            await self.writer.drain()

    async def answer(self) -> Answer:
        async with asyncio.timeout(PATIENCE):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(head[0].split()[1]), headers, body)

    async def text(self, request: bytes) -> str:
        await self.send(request)
        return (await self.answer()).body.decode()

    async def rest(self) -> bytes:
        async with asyncio.timeout(PATIENCE):
            with suppress(ConnectionResetError):
                return await self.reader.read()
        return b""

    async def refused(self, status: int) -> str:
        """It was answered with an error, and the connection closed."""
        answer = await self.answer()
        assert answer.status == status
        assert answer.headers["connection"] == "close"
        assert "server" not in answer.headers
        assert await self.rest() == b""
        return answer.body.decode()


def get(path: str, *fields: str, version: str = "1.1") -> bytes:
    return "\r\n".join((f"GET /{path} HTTP/{version}", "Host: a", *fields, "", "")).encode()


def post(path: str, body: bytes, *fields: str) -> bytes:
    return get(path, f"Content-Length: {len(body)}", *fields).replace(b"GET", b"POST", 1) + body


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Wire]:
    if url.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix:"))
    else:
        host, port = url.split("//")[1].rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), **options)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@asynccontextmanager
async def listener(
    app: Any = None, address: str = "127.0.0.1:0", *, grace: float = 3.0, **limits: Any
) -> AsyncIterator[str]:
    """As `listening`, which ends in time."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(listening(app or App(), address, grace=grace, **limits))
        try:
            yield url
        finally:
            began = time.monotonic()
            async with asyncio.timeout(PATIENCE):
                await stack.aclose()
            in_time(time.monotonic() - began, grace + 2, "the end of the listener")


@asynccontextmanager
async def opened(app: Any = None, **limits: Any) -> AsyncIterator[Wire]:
    async with listener(app, **limits) as url, connected(url) as wire:
        yield wire


class Served:
    """A process that listens."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    async def says(self, word: str) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            line = await self.process.stdout.readline()
        assert line.decode().split()[:1] == [word]

    async def ended(self, within: float) -> int:
        """The exit code; `within` is promised for a machine that does nothing else."""
        began = time.monotonic()
        async with asyncio.timeout(PATIENCE):
            code = await self.process.wait()
        in_time(time.monotonic() - began, within, "the end of the process")
        return code

    async def errors(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    def memory(self) -> int:
        """The most it ever had, since the last time this was asked."""
        status = Path(f"/proc/{self.process.pid}/status").read_text().split("\n")
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024


@asynccontextmanager
async def served(
    address: str = "127.0.0.1:0", *, env: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[Served]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "servers_listen.py"),
        address,
        json.dumps(options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE):
            ready = (await process.stdout.readline()).decode().split()
        yield Served(process, ready[1] if ready else "")
    finally:
        await put_away(process, group=True)


# Requests that are served


async def test_requests_of_one_connection_are_answered_in_turn() -> None:
    async with opened() as wire:
        assert await wire.text(post("echo", b"one")) == "3 one one"
        assert await wire.text(post("echo", b"three")) == "5 one three"
        answer = b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
        assert (await wire.text(get("echo", "Transfer-Encoding: chunked") + answer)).endswith("abcde")


async def test_no_header_tells_what_server_this_is() -> None:
    async with opened() as wire:
        await wire.send(get("echo"))
        assert set((await wire.answer()).headers) == {"date", "content-length"}


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with opened() as wire:
        await wire.send(b"".join(post("echo", b"x" * n) for n in range(1, 1000)) + get("echo") * 2000)
        for n in (*range(1, 1000), *([0] * 2000)):
            assert (await wire.answer()).body.split()[0] == b"%d" % n


async def test_few_pipelined_requests_are_in_memory_at_a_time() -> None:
    app = App()
    async with opened(app, grace=0.1) as wire:
        await wire.send(get("until_gone"))
        await until(lambda: len(app.scopes) == 1, "the first request runs")
        sending = asyncio.create_task(wire.send(get("echo") * 500_000))
        done, _ = await asyncio.wait((sending,), timeout=0.5)
        assert not done
        assert sum(isinstance(each, RequestResponseCycle) for each in gc.get_objects()) < 1000
        wire.writer.transport.abort()
        await sending


async def test_what_is_pipelined_behind_a_long_answer_waits_outside() -> None:
    """Neither requests nor their bodies pile up in memory, and no clock runs against who cannot be heard."""
    app = App()
    flood = post("echo", b"x" * 1000) * 10_000
    async with opened(app, header_seconds=0.2, body_seconds=0.2, idle_seconds=0.2) as wire:
        await wire.send(get("wait") + post("echo", b"first") + get("echo")[:-5])
        sending = asyncio.create_task(wire.send(b"\r\n\r\n" + flood))
        done, _ = await asyncio.wait((sending,), timeout=0.5)
        assert not done
        assert len(app.scopes) == 1
        app.gate.set()
        assert (await wire.answer()).body == b"waited"
        assert (await wire.answer()).body == b"5 one first"
        assert (await wire.answer()).body == b"0 one "
        assert (await wire.answer()).body.startswith(b"1000 ")
        wire.writer.transport.abort()
        await sending


async def test_a_client_that_goes_ends_the_request_it_waits_for_and_not_only_the_one_behind() -> None:
    app = App()
    async with listener(app) as url:
        async with connected(url) as wire:
            await wire.send(get("until_gone") + get("echo"))
            await until(lambda: len(app.scopes) == 1, "the request runs")
            await wire.send(get("echo"))
        async with asyncio.timeout(PATIENCE):
            assert await app.disconnected.get() == "until_gone"


async def test_http_1_0_is_answered_and_closed() -> None:
    async with opened() as wire:
        await wire.send(get("echo", version="1.0"))
        assert (await wire.answer()).status == 200
        assert await wire.rest() == b""


async def test_an_offer_to_speak_http_2_or_websocket_is_ignored() -> None:
    """Java's client makes one by default; the body must not get lost over it."""
    app = App()
    async with opened(app) as wire:
        http2, websocket = (
            post("echo", b"body", "Connection: Upgrade", f"Upgrade: {offer}") for offer in ("h2c", "websocket")
        )
        assert await wire.text(http2) == "4 one body"
        await wire.send(websocket + http2 + websocket)
        assert [(await wire.answer()).body for _ in range(3)] == [b"4 one body"] * 3
        assert "upgrade" not in dict(app.scopes[0]["headers"])


async def test_trailers_are_not_taken_for_headers() -> None:
    app = App()
    async with opened(app) as wire:
        chunks = b"1\r\nx\r\n0\r\nHost: evil\r\nAuthorization: x\r\n\r\n"
        await wire.text(get("echo", "Transfer-Encoding: chunked") + chunks)
        assert [name for name, _ in app.scopes[0]["headers"]] == [b"host", b"transfer-encoding"]


async def test_a_continuation_is_promised_when_the_application_reads() -> None:
    async with opened(body_seconds=0.3) as wire:
        request = post("echo", b"later", "Expect: 100-continue")
        await wire.send(request[:-5])
        assert (await wire.answer()).status == 100
        assert await wire.text(b"later") == "5 one later"


@requirement("SRV-231")
async def test_an_answer_before_the_end_of_the_body_arrives() -> None:
    async with opened() as wire:
        sending = asyncio.create_task(wire.send(post("early", b"x" * 4 * MIB)))
        assert (await wire.answer()).status == 413
        await sending
        assert await wire.text(post("echo", b"next")) == "4 one next"


@linux
@requirement("P-03", "SRV-231")
async def test_a_large_body_reaches_the_application_in_pieces() -> None:
    async with served() as server, connected(server.url) as wire:
        server.memory()
        before = server.memory()
        await wire.send(get("echo", f"Content-Length: {64 * MIB}"))
        for _ in range(64):
            await wire.send(b"x" * MIB)
        assert (await wire.answer()).body.startswith(b"%d many" % (64 * MIB))
        assert server.memory() - before < 8 * MIB


# Requests that are not


@requirement("P-03", "SRV-231")
@pytest.mark.parametrize(
    "request_",
    [
        get("echo", f"X: {'x' * 40 * 1024}"),
        get("echo", *(f"X-{n}: {'x' * 1000}" for n in range(40))),
        get("x" * 40 * 1024),
        b"GET /" + b"x" * MIB,
        b"GET / HTTP/1.1\r\nX: " + b"x" * MIB,
        get("echo", *(f"X-{n}: {n}" for n in range(100))),
        get("echo") + get("echo", f"X: {'x' * 60 * 1024}"),
        get("echo", "Transfer-Encoding: chunked") + b"1\r\nx\r\n0\r\nX: " + b"x" * MIB,
        get("echo", "Transfer-Encoding: chunked") + b"1\r\nx\r\n0\r\n" + b"X: y\r\n" * 100,
        get("echo", "Transfer-Encoding: chunked") + b"1;" + b"x" * MIB,
    ],
    ids=[
        "40 KiB in one header",
        "40 KiB in many",
        "40 KiB in the path",
        "a request line that never ends",
        "a header that never ends",
        "101 headers",
        "the second request",
        "a trailer that never ends",
        "101 with trailers",
        "a chunk line that never ends",
    ],
)
async def test_too_long_a_head_is_refused(request_: bytes) -> None:
    async with opened() as wire:
        sending = asyncio.create_task(wire.send(request_))
        if request_.startswith(get("echo") + b"GET"):
            assert (await wire.answer()).status == 200
        await wire.refused(431)
        await sending


@requirement("P-03")
@pytest.mark.parametrize("cut", [1, 7, 1000, 16 * 1024, 32 * 1024])
async def test_a_head_of_just_the_limit_is_served_however_it_is_cut(cut: int) -> None:
    limit = 2048 if cut < 1000 else 32 * 1024
    room = limit - len(get("echo", "X: ")) + len("GET " + " HTTP/1.1\r\n" + "\r\n")
    request = get("echo", f"X: {'x' * room}")
    async with opened(max_header_bytes=limit) as wire:
        for at in range(0, len(request), cut):
            await wire.send(request[at : at + cut])
        assert (await wire.answer()).status == 200
        await wire.send(request.replace(b"X: x", b"X: xx"))
        await wire.refused(431)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /echo HTTP/1.1\r\n\r\n", 400),
        (get("echo", "Host: b"), 400),
        (get("echo", "HOST: a"), 400),
        (post("echo", b"x", "Transfer-Encoding: chunked"), 400),
        (get("echo", "Transfer-Encoding: chunked", "Content-Length: 1") + b"x", 400),
        (post("echo", b"x", "Content-Length: 1"), 400),
        (post("echo", b"x", "Content-Length: 2"), 400),
        (get("echo", "Content-Length: 1, 1") + b"x", 400),
        (get("echo", "Content-Length: +1") + b"x", 400),
        (get("echo", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), 400),
        (get("echo", "Transfer-Encoding: gzip"), 400),
        (get("echo", "Transfer-Encoding: chunked", version="1.0"), 400),
        (get("echo", "Transfer-Encoding: chunked") + b"nonsense\r\n", 400),
        (get("echo", " folded: x"), 400),
        (get("echo", "Space : x"), 400),
        (get("echo").replace(b"\r\n", b"\n"), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"\0" * 100, 400),
        (b"HELO there\r\n", 400),
        (get("").replace(b"/ ", b"\xff\xfe "), 400),
        (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        (get("echo", version="2.0"), 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ],
)
async def test_what_could_be_read_in_two_ways_is_refused(request_: bytes, status: int) -> None:
    app = App()
    async with listener(app) as url:
        async with connected(url) as wire:
            await wire.send(request_)
            await wire.refused(status)
        assert app.requests == []
        async with connected(url) as wire:
            assert await wire.text(post("echo", b"next")) == "4 one next"


async def test_a_client_that_is_still_sending_can_read_why_it_is_refused() -> None:
    """Closed at once, the connection would be reset, and the answer lost with it."""
    async with opened() as wire:
        await wire.send(get("echo", "Host: b"))
        assert (await wire.answer()).status == 400
        for _ in range(3):
            wire.writer.write(b"x" * 100_000)
            await wire.writer.drain()
        assert await wire.reader.read() == b""


async def test_a_bad_request_behind_a_good_one_does_not_spoil_its_answer() -> None:
    app = App()
    async with opened(app) as wire:
        await wire.send(get("wait") + b"nonsense\r\n\r\n")
        await until(lambda: len(app.scopes) == 1, "the first request runs")
        app.gate.set()
        assert (await wire.answer()).body == b"waited"
        await wire.refused(400)


@requirement("P-11")
async def test_every_good_request_before_a_bad_one_is_answered() -> None:
    app = App()
    async with opened(app, idle_seconds=5) as wire:
        await wire.send(get("wait") + post("echo", b"second") + get("echo") + b"nonsense\r\n\r\n")
        await until(lambda: len(app.scopes) == 1, "the first request runs")
        app.gate.set()
        assert [(await wire.answer()).body for _ in range(3)] == [b"waited", b"6 one second", b"0 one "]
        await wire.refused(400)


async def test_what_is_behind_an_answer_that_closes_does_not_run() -> None:
    app = App()
    async with opened(app) as wire:
        await wire.send(get("fail") + get("echo"))
        assert (await wire.answer()).status == 500
        assert await wire.rest() == b""
    assert [scope["path"] for scope in app.scopes] == ["/fail"]


@requirement("P-03")
async def test_a_head_behind_another_request_has_the_same_limit() -> None:
    async with opened() as wire:
        await wire.send(post("echo", b"x" * 16_000) + get("echo", *(f"X{n}: {'x' * 1000}" for n in range(44))))
        assert (await wire.answer()).status == 200
        await wire.refused(431)


async def test_a_body_that_breaks_off_in_the_middle_of_its_answer_just_closes() -> None:
    async with opened() as wire:
        await wire.send(get("stream", "Transfer-Encoding: chunked"))
        assert await wire.reader.readuntil(b"begun\n\r\n")
        await wire.send(b"nonsense\r\n")
        assert await wire.rest() == b""


# Time


@requirement("P-11")
async def test_headers_that_trickle_are_cut() -> None:
    async with opened(header_seconds=0.3) as wire:
        began = time.monotonic()
        trickling = asyncio.create_task(trickle(wire, b"GET /echo HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 1000))
        await wire.refused(408)
        took = time.monotonic() - began
        assert took > 0.2
        in_time(took, 2, "the cut")
        trickling.cancel()


@requirement("P-11")
async def test_a_body_that_trickles_is_cut_and_the_application_told() -> None:
    app = App()
    async with opened(app, body_seconds=1.5, header_seconds=0.7) as wire:
        began = time.monotonic()
        await wire.send(get("echo", "Content-Length: 1000"))
        trickling = asyncio.create_task(trickle(wire, b"x" * 1000))
        await wire.refused(408)
        took = time.monotonic() - began
        assert took > 1.2  # not by the clock of the headers
        in_time(took, 3, "the cut")
        trickling.cancel()
        async with asyncio.timeout(PATIENCE):
            assert await app.disconnected.get() == "echo"


async def trickle(wire: Wire, data: bytes) -> None:
    for at in range(len(data)):
        await wire.send(data[at : at + 1])
        await asyncio.sleep(0.02)  # the subject of the test


@requirement("P-11")
async def test_a_connection_without_a_request_is_closed() -> None:
    async with listener(header_seconds=0.8, idle_seconds=1.6) as url:
        async with connected(url) as wire:
            assert await wire.rest() == b""
        async with connected(url) as wire:
            began = time.monotonic()
            assert await wire.text(post("echo", b"x")) == "1 one x"
            await wire.send(b"\r\n")  # an end of line is not a request
            assert await wire.rest() == b""
            took = time.monotonic() - began
            assert took > 1.2
            in_time(took, 3, "the end of an idle connection")
        async with connected(url) as wire:
            await wire.send(post("early", b"x" * 10)[:-5])
            assert (await wire.answer()).status == 413
            await wire.send(b"x" * 5)  # answered before its end: then it is idle as any other
            assert await wire.rest() == b""


@requirement("P-11")
@pytest.mark.parametrize("size", [0, 256 * 1024], ids=["no body", "more than is read ahead"])
async def test_an_application_may_take_longer_than_its_client(size: int) -> None:
    app = App()
    async with opened(app, header_seconds=0.7, body_seconds=0.7, idle_seconds=0.7) as wire:
        await wire.send(post("wait", b"x" * size))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await wire.reader.read(1)
        app.gate.set()
        assert (await wire.answer()).body == b"waited"


@linux
@requirement("P-03", "P-11")
async def test_a_client_that_never_reads_costs_little_and_is_cut() -> None:
    async with served(limits={"write_seconds": 0.5}) as server, connected(server.url) as other:
        server.memory()
        before = server.memory()
        deaf = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        with deaf:
            deaf.sendall(get("fifty"))
            began = time.monotonic()
            assert await other.text(post("echo", b"x")) == "1 one x"
            await server.says("sent")  # to nobody: the connection was cut
            took = time.monotonic() - began
            assert took > 0.4
            in_time(took, 5, "the cut")
        assert server.memory() - before < 8 * MIB
        assert await other.text(post("echo", b"x")) == "1 one x"


@requirement("P-11")
async def test_a_client_that_reads_slowly_is_served() -> None:
    async with opened(write_seconds=1.5) as slow:
        await slow.send(get(f"sized?{16 * MIB}", "Connection: close"))
        size, began = 0, time.monotonic()
        while time.monotonic() - began < 3.5:
            size += len(await slow.reader.read(64 * 1024))
            await asyncio.sleep(0.02)  # the subject of the test
        assert size < 16 * MIB
        assert size + len(await slow.rest()) > 16 * MIB


@requirement("P-11")
async def test_an_unread_last_answer_does_not_keep_a_connection() -> None:
    """Closing waits for what is unsent, for ever; and of some of these sizes too little is unsent to be pushed back."""
    fits = unread_capacity()
    sizes = range(fits - 96 * 1024, fits + 96 * 1024, 24 * 1024)
    async with listener(write_seconds=0.3, max_connections=len(sizes)) as url, AsyncExitStack() as stack:
        for size in sizes:
            deaf = stack.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
            deaf.sendall(get(f"sized?{size}", "Connection: close"))
        for _ in sizes:
            await stack.enter_async_context(admitted(url))


def unread_capacity() -> int:
    """How much can be sent to a client that reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(server.getsockname())
        sender, _ = server.accept()
        with sender:
            sender.setblocking(False)
            return sender.send(b"x" * 16 * MIB)


@asynccontextmanager
async def admitted(url: str) -> AsyncIterator[Wire]:
    """A connection that is served, as soon as there is room for it."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE:
        async with connected(url) as wire:
            await wire.send(get("echo"))
            if (await wire.answer()).status == 200:
                yield wire
                return
    raise AssertionError(f"not served within {PATIENCE:g} s")


@requirement("SRV-231")
async def test_connections_over_the_limit_are_told_so() -> None:
    async with listener(max_connections=2) as url, connected(url) as first:
        async with connected(url) as second:
            assert await first.text(post("echo", b"x")) == "1 one x"
            assert await second.text(post("echo", b"x")) == "1 one x"
            for _ in range(3):
                async with connected(url) as third:
                    await third.send(post("echo", b"x" * 100_000))
                    await third.refused(503)
        async with admitted(url) as third:
            assert await third.text(post("echo", b"x")) == "1 one x"


# The end


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


async def caught(pid: int) -> None:
    """Wait until no signal is pending: it has been delivered."""
    status = Path(f"/proc/{pid}/status")

    def pending() -> bool:
        return any(line.startswith(("SigPnd", "ShdPnd")) and int(line.split()[1], 16) for line in _lines(status))

    await until(lambda: not pending(), "the signal is delivered")


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")


@requirement("P-12")
async def test_a_request_that_does_not_end_is_left_after_the_grace() -> None:
    app = App()
    async with listener(app, grace=0.2) as url, connected(url) as wire:
        await wire.send(get("until_gone"))
        await until(lambda: len(app.scopes) == 1, "the request runs")
    assert app.disconnected.get_nowait() == "until_gone"


async def test_cancelling_ends_it_as_well_as_asking() -> None:
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


async def test_a_failing_or_endless_stop_is_told_and_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
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


# Several processes


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def who(url: str) -> tuple[int, str]:
    """The process and the key that answer a new connection."""
    async with connected(url) as wire:
        pid, key = (await wire.text(get("pid"))).split()
        return int(pid), key


@linux
async def test_workers_share_a_socket_and_a_key() -> None:
    async with served(workers=2) as server:
        first, key = await who(server.url)
        os.kill(first, signal.SIGSTOP)
        second, same = await who(server.url)
        os.kill(first, signal.SIGCONT)
        assert {first, second} == set(children(server.process.pid))
        assert key == same
        assert len(key) > 40
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended(5) == 0
        assert gone(first) and gone(second)


@linux
async def test_workers_keep_the_key_they_are_given() -> None:
    async with served(workers=2, env={"HANDRAIL_KEY": "given"}) as server:
        assert (await who(server.url))[1] == "given"


@linux
async def test_a_worker_that_dies_is_replaced_and_the_others_serve() -> None:
    async with served(workers=2) as server:
        await who(server.url)
        before = set(children(server.process.pid))
        victim, other = before
        os.kill(victim, signal.SIGKILL)
        assert (await who(server.url))[0] != victim
        await until(lambda: len(set(children(server.process.pid)) - {victim}) == 2, "another has started")
        (new,) = set(children(server.process.pid)) - before
        os.kill(other, signal.SIGSTOP)
        assert (await who(server.url))[0] == new
        os.kill(other, signal.SIGCONT)
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended(5) == 0
        assert "ended unexpectedly" in await server.errors()


@linux
@requirement("P-12")
async def test_workers_end_with_a_parent_that_is_killed() -> None:
    async with served(workers=2) as server:
        await who(server.url)
        workers = children(server.process.pid)
        os.kill(server.process.pid, signal.SIGKILL)
        for pid in workers:
            await until(partial(gone, pid), "the worker has ended")


@linux
@requirement("P-12")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_to_parent_and_workers_lets_requests_answer(number: int) -> None:
    """As Ctrl-C in a terminal, and as service managers end a group of processes."""
    async with served(workers=2, grace=LASTING) as server, connected(server.url) as wire:
        await wire.send(get("wait"))
        await server.says("running")
        os.killpg(server.process.pid, number)
        assert (await wire.answer()).body == b"waited"
        assert await server.ended(5) == 0


@linux
@requirement("P-12")
async def test_blocked_and_stopped_workers_are_left_behind_by_nobody() -> None:
    async with served(workers=2, grace=0.3) as server, connected(server.url) as wire:
        await wire.send(get("block"))
        await server.says("running")
        workers = children(server.process.pid)
        os.kill(workers[0], signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended(0.3 + 1.5 + 1) == 0
        assert all(map(gone, workers))


@linux
async def test_a_second_interrupt_of_the_parent_kills_the_workers() -> None:
    async with served(workers=2, grace=LASTING) as server, connected(server.url) as wire:
        await wire.send(get("stubborn"))
        await server.says("running")
        workers = children(server.process.pid)
        server.process.send_signal(signal.SIGINT)
        await server.says("stop")
        server.process.send_signal(signal.SIGINT)
        assert await server.ended(2) == 130
        for pid in workers:
            await until(partial(gone, pid), "the worker has ended")


@linux
@pytest.mark.parametrize("workers", [1, 2])
async def test_an_application_that_does_not_start_is_not_started_again(workers: int) -> None:
    async with served(workers=workers, broken=True) as server:
        assert await server.ended(5) == 1
        assert "did not start" in await server.errors()


# Addresses


@requirement("SRV-202")
@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8000", Address("127.0.0.1", 8000)),
        (":8000", Address("127.0.0.1", 8000)),
        ("[::1]:8000", Address("::1", 8000)),
        ("localhost:0", Address("localhost", 0)),
        ("unix:/run/x.sock", Address(path="/run/x.sock")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert Address.parse(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "8000", "localhost", "localhost:", "a:b", "a:-1", "a:65536", "a:٣", "::1:80", "[::1]", "[x]:80"),
        *("http://a:80", "a:80/mcp", "http://localhost:80/", "u@a:80", "unix", "unix:", "unix:\0x"),
    ],
)
def test_wrong_addresses_are_explained(text: str) -> None:
    with pytest.raises(ValueError, match=r"write |is not an IPv6 address") as problem:
        Address.parse(text)
    assert repr(text) in str(problem.value)


@requirement("SRV-202")
@pytest.mark.parametrize("address", [":0", "localhost:0", "[::1]:0", "0.0.0.0:0"])
async def test_only_what_others_can_reach_is_warned_of(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "handrail"):
        try:
            async with listener(address=address) as url, connected(url) as wire:
                assert await wire.text(post("echo", b"x")) == "1 one x"
        except OSError as problem:
            pytest.skip(f"no {address} here: {problem}")
    warned = [record.getMessage() for record in caplog.records if "all interfaces" in record.getMessage()]
    assert len(warned) == (1 if address.startswith("0") else 0)


async def test_an_address_in_use_is_said() -> None:
    async with listener() as url:
        with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1:"):
            async with listener(address=url.removeprefix("http://")):
                pass


@posix
async def test_a_unix_socket_is_made_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()  # as a process leaves it that was killed
    async with listener(address=f"unix:{path}") as url, connected(url) as wire:
        assert url == f"unix:{path}"
        assert await wire.text(post("echo", b"x")) == "1 one x"
        with pytest.raises(OSError, match="another process listens there"):
            async with listener(address=f"unix:{path}"):
                pass
        assert await wire.text(post("echo", b"x")) == "1 one x"
        assert path.exists()
    assert not path.exists()
    path.write_text("a file of somebody's")
    with pytest.raises(OSError, match="in use"):
        async with listener(address=f"unix:{path}"):
            pass
    assert path.exists()


# TLS, limits, and what has to be installed


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    made, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    subprocess.run([openssl, *new, *subject, "-keyout", key, "-out", made], check=True, capture_output=True)
    return made, key


@posix
@requirement("P-11")
async def test_tls(certificate: tuple[str, str]) -> None:
    trusting = ssl.create_default_context(cafile=certificate[0])
    limits = {"header_seconds": 0.5}
    async with served(certificate=certificate[0], key=certificate[1], limits=limits) as server:
        assert server.url.startswith("https://")
        async with connected(server.url) as silent:
            assert await silent.rest() == b""  # no handshake is waited for either
        async with connected(server.url, ssl=trusting) as wire:
            assert await wire.text(post("echo", b"x")) == "1 one x"
            await wire.send(get("echo", "Host: b"))
            await wire.refused(400)
        async with connected(server.url, ssl=trusting) as wire:
            await wire.send(get("wait"))
            await server.says("running")
            server.process.send_signal(signal.SIGTERM)
            assert (await wire.answer()).body == b"waited"
        assert await server.ended(5) == 0


async def test_a_wrong_certificate_is_said_before_anything_listens(tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    for certificate, key, text in ((nothing, None, "cannot use the certificate"), (None, nothing, "no certificate")):
        with pytest.raises(ValueError, match=text):
            async with listening(App(), certificate=certificate, key=key):
                pass


@pytest.mark.parametrize("name", HttpLimits.__struct_fields__)
def test_limits_are_more_than_nothing(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: 0 is not more than 0"):
        HttpLimits(**{name: 0})


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("sys.modules['uvicorn'] = None", "python -m pip install 'uvicorn"),
        ("sys.modules['httptools'] = None", "python -m pip install 'uvicorn"),
    ],
)
def test_a_missing_package_is_said_in_one_sentence(before: str, told: str) -> None:
    code = f"import sys; {before}; from handrail import Server; Server('x').run(http=':0')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 1
    assert told in ran.stderr.strip().split("\n")[-1]
