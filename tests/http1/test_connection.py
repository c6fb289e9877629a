"""One HTTP/1.1 connection: order, limits, refusals, and peers and applications that misbehave."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from faults import until
from handrail.transports.http1.connection import Http1Connection
from handrail.transports.http1.request import RequestResponseCycle
from patience import PATIENCE, in_time
from requirements import requirement
from servers_listen import App, Message, Receive, Send, listening
from wires_http1 import (
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
    """Applications with faults, and unusual ones."""

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


# Requests that are served


async def test_requests_on_one_connection_are_answered_in_order() -> None:
    async with opened() as wire:
        assert await wire.text(post("echo", b"one")) == "3 one one"
        assert await wire.text(post("echo", b"three")) == "5 one three"
        answer = b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
        assert (await wire.text(get("echo", "Transfer-Encoding: chunked") + answer)).endswith("abcde")


async def test_response_has_no_server_header() -> None:
    async with opened() as wire:
        await wire.send(get("echo"))
        assert set((await wire.answer()).headers) == {"date", "content-length"}


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with opened() as wire:
        await wire.send(b"".join(post("echo", b"x" * n) for n in range(1, 1000)) + get("echo") * 2000)
        for n in (*range(1, 1000), *([0] * 2000)):
            assert (await wire.answer()).body.split()[0] == b"%d" % n


async def test_pipelined_requests_are_parsed_a_few_at_a_time() -> None:
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


async def test_requests_behind_a_long_response_pause_reading() -> None:
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


async def test_client_that_disconnects_ends_the_running_request() -> None:
    app = App()
    async with listener(app) as url:
        async with connected(url) as wire:
            await wire.send(get("until_gone") + get("echo"))
            await until(lambda: len(app.scopes) == 1, "the request runs")
            await wire.send(get("echo"))
        async with asyncio.timeout(PATIENCE):
            assert await app.disconnected.get() == "until_gone"


async def test_http_1_0_request_is_answered_and_closed() -> None:
    async with opened() as wire:
        await wire.send(get("echo", version="1.0"))
        assert (await wire.answer()).status == 200
        assert await wire.rest() == b""


async def test_upgrade_to_http_2_or_websocket_is_ignored() -> None:
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


async def test_trailers_are_not_headers() -> None:
    app = App()
    async with opened(app) as wire:
        chunks = b"1\r\nx\r\n0\r\nHost: evil\r\nAuthorization: x\r\n\r\n"
        await wire.text(get("echo", "Transfer-Encoding: chunked") + chunks)
        assert [name for name, _ in app.scopes[0]["headers"]] == [b"host", b"transfer-encoding"]


async def test_expect_100_is_answered_when_the_application_reads() -> None:
    async with opened(body_seconds=0.3) as wire:
        request = post("echo", b"later", "Expect: 100-continue")
        await wire.send(request[:-5])
        assert (await wire.answer()).status == 100
        assert await wire.text(b"later") == "5 one later"


@requirement("SRV-231")
async def test_response_before_the_end_of_the_body_arrives() -> None:
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


# Requests that are refused


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
async def test_head_over_the_limit_is_refused(request_: bytes) -> None:
    async with opened() as wire:
        sending = asyncio.create_task(wire.send(request_))
        if request_.startswith(get("echo") + b"GET"):
            assert (await wire.answer()).status == 200
        await wire.refused(431)
        await sending


@requirement("P-03")
@pytest.mark.parametrize("cut", [1, 7, 1000, 16 * 1024, 32 * 1024])
async def test_head_of_exactly_the_limit_is_served_in_any_pieces(cut: int) -> None:
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
async def test_ambiguous_request_is_refused(request_: bytes, status: int) -> None:
    app = App()
    async with listener(app) as url:
        async with connected(url) as wire:
            await wire.send(request_)
            await wire.refused(status)
        assert app.requests == []
        async with connected(url) as wire:
            assert await wire.text(post("echo", b"next")) == "4 one next"


async def test_client_that_still_sends_can_read_the_refusal() -> None:
    """Closed at once, the connection would be reset, and the answer lost with it."""
    async with opened() as wire:
        await wire.send(get("echo", "Host: b"))
        assert (await wire.answer()).status == 400
        for _ in range(3):
            wire.writer.write(b"x" * 100_000)
            await wire.writer.drain()
        assert await wire.reader.read() == b""


async def test_bad_request_behind_a_good_one_leaves_its_response_whole() -> None:
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


async def test_request_behind_a_closing_response_does_not_run() -> None:
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


async def test_invalid_body_during_its_response_closes_without_an_error() -> None:
    async with opened() as wire:
        await wire.send(get("stream", "Transfer-Encoding: chunked"))
        assert await wire.reader.readuntil(b"begun\n\r\n")
        await wire.send(b"nonsense\r\n")
        assert await wire.rest() == b""


# Time limits


@requirement("P-11")
async def test_headers_that_trickle_are_refused_with_408() -> None:
    async with opened(header_seconds=0.3) as wire:
        began = time.monotonic()
        trickling = asyncio.create_task(trickle(wire, b"GET /echo HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 1000))
        await wire.refused(408)
        took = time.monotonic() - began
        assert took > 0.2
        in_time(took, 2, "the cut")
        trickling.cancel()


@requirement("P-11")
async def test_body_that_trickles_is_refused_and_the_application_sees_a_disconnect() -> None:
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
async def test_client_that_never_reads_is_aborted_and_costs_little_memory() -> None:
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
async def test_unread_last_response_does_not_keep_the_connection() -> None:
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


@requirement("SRV-231")
async def test_connection_over_the_limit_gets_503() -> None:
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


# Order of responses


async def test_bad_request_behind_several_good_ones_leaves_their_responses_whole() -> None:
    app = App()
    async with opened(app) as wire:
        await wire.send(get("wait") + get("echo") + get("echo") + b"nonsense\r\n\r\n")
        await until(lambda: len(app.scopes) == 1, "the first request runs")
        app.gate.set()
        assert (await wire.answer()).body == b"waited"
        assert (await wire.answer()).body == b"0 one "
        assert (await wire.answer()).body == b"0 one "
        await wire.refused(400)


async def test_refusal_leaves_the_response_before_it_whole() -> None:
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


async def test_no_response_follows_a_last_response() -> None:
    async with opened() as wire:
        await wire.send(get(f"sized?{8 * MIB}", "Connection: close") + get("echo"))
        rest = await wire.rest()
        assert rest.count(b"HTTP/1.1 ") == 1
        assert len(rest) > 8 * MIB


@pytest.mark.parametrize("last", ["last", "raise", "raise_later"])
async def test_no_request_behind_a_last_response_starts(last: str) -> None:
    """Who pipelined it may send it again: it must not have been served."""
    app = Odd()
    async with opened(app) as wire:
        await wire.send(get(last) + post("echo", b"x") * 3 + post("echo", b"x" * 40_000))
        assert (await wire.answer()).status in (200, 500)
        assert await wire.rest() == b""
    assert app.requests == []


@posix
async def test_no_request_behind_a_last_response_starts_over_tls(certificate: tuple[str, str]) -> None:
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
async def test_last_response_before_the_end_of_the_body_arrives(path: str, fields: tuple[str, ...]) -> None:
    """Closed with bytes unread, TCP takes the answer back."""
    async with listener(Odd()) as url:
        for _ in range(5):
            async with connected(url) as wire:
                await wire.send(post(path, b"x" * 2 * MIB, *fields)[: 256 * 1024])
                await asyncio.sleep(0.02)  # the answer is there, and not read
                await wire.send(b"x" * 256 * 1024)
                await asyncio.sleep(0.02)
                assert (await wire.answer()).status in (200, 413, 500)


async def test_client_that_half_closes_gets_its_responses() -> None:
    async with listener() as url:
        for request in (get("echo"), get("echo") * 3, get(f"sized?{4 * MIB}")):
            async with connected(url) as wire:
                await wire.send(request)
                wire.writer.write_eof()
                rest = await wire.rest()
                assert rest.count(b"HTTP/1.1 200") == request.count(b"GET")


@pytest.mark.parametrize("fields", [(), ("Connection: keep-alive",)])
async def test_response_to_http_1_0_ends_with_the_connection(fields: tuple[str, ...]) -> None:
    async with opened(Odd()) as wire:
        await wire.send(get("unsized", *fields, version="1.0"))
        rest = await wire.rest()
        assert rest.endswith(b"\r\n\r\nok")
        assert b"connection: close" in rest


async def test_http_1_0_gets_no_100_continue() -> None:
    async with opened() as wire:
        await wire.send(post("echo", b"x", "Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await wire.answer()).status == 200


async def test_body_without_100_continue_is_not_waited_for() -> None:
    """Told to wait for a continuation, a client that gets an answer instead may never send the body."""
    async with opened() as wire:
        await wire.send(get("early", "Content-Length: 100", "Expect: 100-continue"))
        found = await wire.answer()
        assert (found.status, found.headers.get("connection")) == (413, "close")
        assert await wire.rest() == b""


async def test_long_head_with_an_upgrade_is_served() -> None:
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


# Clients that disconnect, and clients that do not read


async def test_client_that_disconnects_leaves_no_objects() -> None:
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
async def test_thousand_connections_leave_no_objects() -> None:
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
async def test_client_that_half_closes_and_reads_nothing_is_aborted(size: int) -> None:
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
async def test_broken_unread_response_does_not_keep_the_connection(size: int) -> None:
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
async def test_client_that_pipelines_and_does_not_read_costs_little_memory() -> None:
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
async def test_application_that_raises_is_answered_with_500(path: str, how: str) -> None:
    async with listener(Odd()) as url:
        for _ in range(2):
            async with connected(url) as wire:
                await wire.send(get(path + how))
                await wire.refused(500)
        async with connected(url) as wire:
            assert await wire.text(post("echo", b"x")) == "1 one x"


@pytest.mark.parametrize("path", ["nothing", "cancel", "raise_promised", "lies?123456", "lies?123", "lies?", "missing"])
async def test_application_without_a_whole_response_gets_500_or_a_close(path: str) -> None:
    async with listener(Odd()) as url, connected(url) as wire:
        assert await wire.text(post("echo", b"x")) == "1 one x"
        await wire.send(get(path))
        if path in ("lies?123", "lies?"):  # which has begun
            assert (await wire.rest()).count(b"HTTP/1.1 200") == 1
        else:
            await wire.refused(500)


@pytest.mark.parametrize("path", ["raise_begun", "lies?123", "lies?123,456"])
async def test_response_that_breaks_off_closes_the_connection(path: str) -> None:
    async with opened(Odd()) as wire:
        await wire.send(get(path) + get("echo"))
        rest = await wire.rest()
        assert rest.count(b"HTTP/1.1 ") == 1
        assert not rest.endswith(b"0\r\n\r\n")


async def test_application_that_cannot_be_called_gets_500() -> None:
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


# Shutdown


@pytest.mark.parametrize("is_secure", [False, True])
async def test_shutdown_lets_a_body_arrive_and_a_stream_end(is_secure: bool, certificate: tuple[str, str]) -> None:
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
