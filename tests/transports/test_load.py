"""Load and faults over HTTP: whatever some clients do, or happens to a process, the others are served."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from faults import rounds, text_of, until
from patience import PATIENCE, SOAK, in_time
from requirements import requirement
from servers_http import OPEN, Client, take
from servers_load import MIB, Control, Process, Run, running, stopped
from wires import ALL, LEGACY, Json, Object
from wires_http import BOTH, OLD, Headers, Reply, http, send_request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

Ran = Callable[[str, str], None]

R1, R4, R5 = "2024-11-05", "2025-11-25", "2026-07-28"
STREAMABLE = ("2025-03-26", "2025-06-18", "2025-11-25", "pocket")
LIMIT = 4 * MIB
BODY = 64 * MIB

_names = itertools.count()


def fresh() -> str:
    """A mark no other call uses."""
    return f"mark-{next(_names)}"


@pytest.fixture
async def control() -> AsyncIterator[Control]:
    async with Control() as made:
        yield made
    for reply in OPEN:
        reply.close()
    OPEN.clear()


class Pipe:
    """A client of 2024: one stream for all it hears, and an address for what it says."""

    def __init__(self, client: Client, reply: Reply, events: AsyncIterator[Headers], address: str) -> None:
        self.client = client
        self.reply = reply
        self.events = events
        self.address = address

    async def say(self, message: Json) -> None:
        headers = {"Content-Type": "application/json", "Accept": BOTH}
        reply = await http(self.address, "POST", headers, json.dumps(message).encode())
        assert (reply.status, await reply.body()) == (202, b"")

    async def hear(self) -> Json:
        (event,) = await take(self.events)
        return self.client.checked(event["data"].encode())


async def pipe(url: str, revision: str = R1) -> Pipe:
    client = Client(url, revision)
    reply = await client.get()
    events = reply.events()
    async with asyncio.timeout(PATIENCE):
        address = urlsplit(url)._replace(path="", query="").geturl() + (await anext(events))["data"]
    opened = Pipe(client, reply, events, address)
    params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "rig", "version": "1"}}
    await opened.say(client.message("open", "initialize", params))
    assert (await opened.hear())["result"]["protocolVersion"] == revision
    await opened.say({"jsonrpc": "2.0", "method": "notifications/initialized"})
    return opened


async def remainder(reply: Reply) -> list[Object]:
    """The messages a stream still has. It must end as a chunked body ends, and not just break off."""
    text, size = b"", -1
    async with asyncio.timeout(PATIENCE):
        while size:
            line = await reply.reader.readuntil(b"\r\n")
            if line != b"\r\n":  # the end of the piece that was read last
                size = int(line, 16)
                text += (await reply.reader.readexactly(size + 2))[:-2]
    reply.close()
    lines = text.decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


# Bodies that are too long


@requirement("P-03", "SRV-231")
@pytest.mark.parametrize("form", ["declared", "chunked"])
async def test_a_body_of_64_mib_is_refused_early_and_costs_little(control: Control, ran: Ran, form: str) -> None:
    length = {"Content-Length": str(BODY)} if form == "declared" else {"Transfer-Encoding": "chunked"}
    async with running(control) as server:
        for revision in ALL:
            client = await Client(server.url, revision).open()
            ran(revision, "http")
            call = client.call(1, "echo", {"text": "hi"})
            assert (await client.ask(call))[0] == 200
            url = (await pipe(server.url, revision)).address if revision in OLD else server.url
            server.forget_peak()
            before = server.memory
            status, sent = _pour(url, head(url, {**client.headers(call), **length}), form)
            assert status == 413
            assert sent == 0 if form == "declared" else sent <= BODY / 2
            assert server.peak - before < 3 * LIMIT
            assert (await client.ask(call))[0] == 200


def head(url: str, headers: Headers) -> bytes:
    """The head of a POST."""
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    fields = {"Host": parts.netloc, **headers}
    lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode()


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), PATIENCE)


def _pour(url: str, request: bytes, form: str) -> tuple[int, int]:
    """Send all of a body, whatever is said to it; the status, and how much had been sent when that came."""
    piece = b"x" * MIB if form == "declared" else b"%x\r\n%b\r\n" % (MIB, b"x" * MIB)
    answered = None
    with connect(url) as made:
        made.sendall(request)
        with suppress(ConnectionError):
            for sent in range(0, BODY, MIB):
                patience = PATIENCE if form == "declared" and sent == 0 else 0  # it need not see any of it
                if answered is None and select.select([made], [], [], patience)[0]:
                    answered = sent
                made.sendall(piece)
        if answered is None:
            answered = BODY
        return int(made.recv(65536).split()[1]), answered


# Requests that take too long to arrive


@requirement("P-11")
async def test_heads_and_bodies_that_trickle_are_cut_on_time_while_others_are_served(
    control: Control, ran: Ran
) -> None:
    seconds = 5.0  # time enough for those that do not trickle, on a machine that has much to do
    http_limits = {"header_seconds": seconds, "body_seconds": seconds}
    async with running(control, http_limits=http_limits) as server, asyncio.TaskGroup() as group:
        clients = [await Client(server.url, revision).open() for revision in ALL]
        for client in clients:
            ran(client.revision, "http")
            call = client.call(1, "echo", {"text": "x" * 10_000})
            for part in ("head", "body", "chunks", "nothing"):
                group.create_task(_trickled(client, call, part, seconds))
        for turn in range(20):
            for client in clients:
                assert text_of((await client.ask(client.call(turn, "echo", {"text": "hi"})))[1]) == "hi"


async def _trickled(client: Client, call: Object, part: str, seconds: float) -> None:
    """A request of which this part comes byte by byte is cut after this time, and not before."""
    parts = urlsplit(client.url)
    body = json.dumps(call).encode()
    length = {"Transfer-Encoding": "chunked"} if part == "chunks" else {"Content-Length": str(len(body))}
    first = head(client.url, {**client.headers(call), **length})
    if part == "chunks":
        body = b"".join(b"1\r\n%c\r\n" % each for each in body)
    began = time.monotonic()  # before the server's own clock can begin
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    slow = {"head": first, "body": body, "chunks": body, "nothing": b""}[part]
    if part in ("body", "chunks"):
        writer.write(first)
    dripping = asyncio.create_task(_drip(writer, slow))
    try:
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read()
    finally:
        dripping.cancel()
        writer.close()
    took = time.monotonic() - began
    assert took > seconds * 0.9
    in_time(took, seconds + 3, "the cut")
    assert answer.startswith(b"HTTP/1.1 408 ") or not slow


async def _drip(writer: asyncio.StreamWriter, slow: bytes) -> None:
    with suppress(ConnectionError):
        for each in slow:
            writer.write(bytes((each,)))
            await writer.drain()
            await asyncio.sleep(0.02)  # the subject of the test


# Clients that never read


async def unread_streams(url: str) -> None:
    """A hundred streams of every kind, which nobody reads. In 56 of them a tool talks without end."""
    modern = Client(url, R5)
    wanted = {"notifications": {"toolsListChanged": True}}
    for _ in range(8):
        for revision in ALL:
            deaf(await flood(url, revision))
        for revision in STREAMABLE:
            deaf(await (await Client(url, revision).open()).get())
    for at in range(12):
        deaf(await modern.post(modern.message(at, "subscriptions/listen", wanted)))


async def flood(url: str, revision: str, size: int = 16 * 1024) -> Reply:
    """A stream on which a tool talks without end."""
    if revision not in OLD:
        client = await Client(url, revision).open()
        return await client.post(client.call("flood", "floods_caller", {"size": size}, progressToken="t"))
    old = await pipe(url, revision)
    await old.say(old.client.call("flood", "floods_caller", {"size": size}, progressToken="t"))
    return old.reply


def deaf(reply: Reply) -> None:
    """From now on nothing of it is taken from the system."""
    assert (reply.status, reply.is_stream) == (200, True)
    transport = reply.writer.transport
    assert isinstance(transport, asyncio.ReadTransport)
    transport.pause_reading()


async def said_so_far(client: Client) -> list[int]:
    """How much each flood that is going on has said."""
    found: list[int] = (await client.ask(client.call("said", "said_so_far")))[1]["result"]["structuredContent"]
    return found


async def stuck(client: Client, count: int) -> None:
    """Wait until so many floods have come to a halt, because nobody takes what they say."""
    said: list[int] = []
    async with asyncio.timeout(PATIENCE):
        while True:
            before, said = said, await said_so_far(client)
            if len(said) == count and said == before:
                return
            await asyncio.sleep(0.1)  # between two looks


class Caller:
    """A client that calls one tool again and again over one connection, and looks at the clocks."""

    def __init__(self, url: str) -> None:
        client = Client(url, R5)
        call = client.call(1, "echo", {"text": "hi"})
        body = json.dumps(call).encode()
        self._request = head(url, {**client.headers(call), "Content-Length": str(len(body))}) + body
        self._socket = connect(url)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *problem: object) -> None:
        self._socket.close()

    def p99(self, calls: int = 300) -> float:
        """What 99 of 100 calls take at most, in seconds."""
        took = []
        for _ in range(calls):
            began = time.perf_counter()
            self._socket.sendall(self._request)
            answer = self._socket.recv(65536)
            while not answer.endswith(b"}"):
                answer += self._socket.recv(65536)
            took.append(time.perf_counter() - began)
            assert answer.startswith(b"HTTP/1.1 200 ") and b'"text":"hi"' in answer
        return sorted(took)[math.ceil(calls * 0.99) - 1]


@requirement("P-10")
async def test_a_hundred_streams_nobody_reads_do_not_slow_another_client(control: Control, ran: Ran) -> None:
    """What a call costs the server's processor decides: how busy the machine is does not show in it."""
    patient = {"write_seconds": 600.0}  # or those that do not read would be cut off some time
    async with running(control) as idle, running(control, limits=patient, http_limits=patient) as loaded:
        await unread_streams(loaded.url)
        for revision in ALL:
            ran(revision, "http")
        await stuck(Client(loaded.url, R5), 56)
        costs: dict[Process, list[float]] = {idle: [], loaded: []}
        tails: dict[Process, list[float]] = {idle: [], loaded: []}
        with Caller(idle.url) as first, Caller(loaded.url) as second:
            for server, caller in ((idle, first), (loaded, second)) * 9:
                before = server.cpu
                tails[server].append(caller.p99())
                costs[server].append(server.cpu - before)
        assert min(costs[loaded]) <= 2 * min(costs[idle]), costs
        in_time(min(tails[loaded]), 2 * min(tails[idle]), "99 of 100 calls beside them")
        await stuck(Client(loaded.url, R5), 56)


@requirement("P-09", "P-10")
async def test_whoever_leaves_a_tool_talking_does_not_take_the_others_along(control: Control, ran: Ran) -> None:
    for revision, unread in itertools.product((R4, R5, R1), (True, False)):
        async with running(control) as server:
            other = Client(server.url, R5)
            reply = await flood(server.url, revision, 1000)
            ran(revision, "http")
            if unread:
                deaf(reply)
                await stuck(other, 1)
            else:
                await reply.reader.readexactly(MIB)
            server.forget_peak()
            before = server.memory
            reply.writer.transport.abort()
            async with asyncio.timeout(PATIENCE):
                assert text_of((await other.ask(other.call(1, "pid")))[1]) == str(server.pid)
                while revision != R4 and await said_so_far(other):  # a call of a session goes on
                    pass
            assert server.peak - before < 64 * MIB


# Clients that go away


async def abandon(url: str, count: int) -> list[Client]:
    """Let so many clients shake hands, over a few connections, and not be heard of again; the last of them."""
    parts = urlsplit(url)

    async def some(count: int) -> list[Client]:
        clients = [Client(url, revision) for revision in LEGACY]
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            for client in itertools.islice(itertools.cycle(clients), count):
                params = {
                    "protocolVersion": client.revision,
                    "capabilities": {"sampling": {}},
                    "clientInfo": {"name": "rig", "version": "1"},
                }
                client.session = ""
                first = await _posted(client, client.message(1, "initialize", params), reader, writer)
                assert first.status == 200
                client.session = first.headers["mcp-session-id"]
                ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
                assert (await _posted(client, ready, reader, writer)).status == 202
        finally:
            writer.close()
        return clients

    found = await asyncio.gather(*(some(count // 4) for _ in range(4)))
    return [client for each in found for client in each]


async def _posted(client: Client, message: Object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Reply:
    """Send a message over a connection that stays; the answer, read to its end."""
    body = json.dumps(message).encode()
    writer.write(head(client.url, {**client.headers(message), "Content-Length": str(len(body))}) + body)
    reply = Reply(reader, writer)
    await reply.read_head()
    async with asyncio.timeout(PATIENCE):
        async for _ in reply.pieces():
            pass
    return reply


@requirement("P-30")
async def test_five_thousand_abandoned_sessions_cost_next_to_nothing(control: Control, ran: Ran) -> None:
    count = 5000
    async with running(control) as server:
        await abandon(server.url, 500)
        before = server.memory
        clients = await abandon(server.url, count)
        assert server.memory - before < 2048 * count
        for client in clients:
            ran(client.revision, "http")
            assert (await client.ask(client.message(2, "ping")))[0] == 200
        modern = Client(server.url, R5)
        assert (await modern.ask(modern.call(1, "let_time_pass", {"seconds": 25 * 3600})))[0] == 200
        for client in clients:
            assert (await client.ask(client.message(3, "ping")))[0] == 404
        before = server.memory
        await abandon(server.url, count)  # there is nothing left of the others that could make this more
        assert server.memory - before < 256 * count


@requirement("P-30")
@pytest.mark.parametrize("revision", [R1, R4])
async def test_abandoned_streams_are_small(control: Control, ran: Ran, revision: str) -> None:
    count = 500

    async def one(at: int) -> None:
        if revision in OLD:
            reply = (await pipe(server.url, revision)).reply
        else:
            reply = await (await Client(server.url, revision).open()).get()
        await reply.gone()

    async with running(control) as server:
        await rounds(100, one, at_once=10)
        before = server.memory
        await rounds(count, one, at_once=10)
        OPEN.clear()
        assert server.memory - before < 30 * 1024 * count
        client = await Client(server.url, revision).open()
        ran(revision, "http")
        assert (await client.ask(client.message(1, "ping")))[0] == 200


# A worker that is killed


class Caught:
    """A call in the middle of which something happens, and the response or stream its answer would come in."""

    def __init__(self, client: Client, ident: str, run: Run, reply: Reply) -> None:
        self.client = client
        self.ident = ident
        self.run = run
        self.reply = reply

    async def answered(self) -> None:
        """It is, in the way it was asked to be, and the stream ends as it should."""
        if not self.reply.status:
            await self.reply.read_head()
        if self.reply.is_stream:
            (answer,) = [each for each in await remainder(self.reply) if "id" in each]
        else:
            answer = json.loads(await self.reply.body())
        assert self.client.checked(json.dumps(answer).encode())["id"] == self.ident
        assert text_of(answer) == f"{self.ident} {self.run.pid}"


async def caught(control: Control, url: str, revision: str, *, events: bool) -> Caught:
    """A call of `held` that has begun; with events, what it has said by then has been read."""
    mark = fresh()
    token = {"progressToken": mark} if events else {}
    if revision in OLD:
        old = await pipe(url, revision)
        await old.say(old.client.call(mark, "held", {"mark": mark}, **token))
        if events:
            assert (await old.hear())["method"] == "notifications/progress"
        return Caught(old.client, mark, await control.run(mark), old.reply)
    client = await Client(url, revision).open()
    call = client.call(mark, "held", {"mark": mark}, **token)
    headers = client.headers(call, **({} if events else {"Accept": "application/json"}))
    reply = await send_request(url, "POST", headers, json.dumps(call).encode())
    OPEN.append(reply)
    if events:
        await reply.read_head()
        assert client.checked((await take(reply.events()))[0]["data"].encode())["method"] == "notifications/progress"
    return Caught(client, mark, await control.run(mark), reply)


async def broken(reply: Reply) -> None:
    """A response breaks off: it is neither given, nor ended, nor left open."""
    rest = b""
    async with asyncio.timeout(PATIENCE):
        with suppress(ConnectionError):
            rest = await reply.reader.read()
    reply.close()
    assert b'"result"' not in rest and not rest.endswith(b"0\r\n\r\n")


async def test_a_worker_that_is_killed_costs_its_callers_an_error_and_nobody_else_anything(
    control: Control, ran: Ran
) -> None:
    async with running(control, workers=2) as server:
        victim, other = server.workers
        async with stopped(other):
            lost = [await caught(control, server.url, each, events=e) for each in ALL for e in (False, True)]
            listening = [await (await Client(server.url, each).open()).get() for each in STREAMABLE]
        async with stopped(victim):
            kept = [await caught(control, server.url, each, events=e) for each in STREAMABLE for e in (False, True)]
        assert {each.run.pid for each in lost} == {victim}
        assert {each.run.pid for each in kept} == {other}
        os.kill(victim, signal.SIGKILL)
        for each in lost:
            ran(each.client.revision, "http")
            assert await each.run.end() == ""
        for reply in [*listening, *(each.reply for each in lost)]:
            await broken(reply)
        clients = [each.client for each in lost if each.client.revision not in OLD]  # in the same sessions
        clients += [await Client(server.url, revision).open() for revision in OLD]
        for client in clients:
            assert text_of((await client.ask(client.call("next", "echo", {"text": "hi"})))[1]) == "hi"
        for each in kept:
            each.run.let_go()
            await each.answered()
        await until(lambda: len(server.workers - {victim}) == 2, "another worker has started")
        await server.serves(control)
        (new,) = server.workers - {victim, other}
        async with stopped(other):
            for client in clients:
                assert text_of((await client.ask(client.call("last", "pid")))[1]) == str(new)


# The end


async def listening(url: str, old: str, middle: str) -> tuple[list[Reply], Reply]:
    """Streams that have nothing to say: two that just end, and one that is told so."""
    unasked = await (await Client(url, middle).open()).get()
    await anext(unasked.events())
    modern = Client(url, R5)
    wanted = {"notifications": {"toolsListChanged": True}}
    subscribed = await modern.post(modern.message("sub", "subscriptions/listen", wanted))
    await take(subscribed.events())
    return [unasked, (await pipe(url, old)).reply], subscribed


# Longer than any test waits: a server that ends has not waited for this.
LASTING = {"grace_seconds": 10 * PATIENCE}


async def end(control: Control, server: Process, ran: Ran, at: int) -> None:
    """Ask a server to end that has streams open and calls running."""
    revisions = (OLD[at % len(OLD)], STREAMABLE[at % len(STREAMABLE)], R5)
    streams, subscribed = await listening(server.url, *revisions[:2])
    calls = [await caught(control, server.url, each, events=e) for each in revisions for e in (False, True)]
    server.signal(signal.SIGTERM)
    (told,) = await remainder(subscribed)
    assert (told["id"], told["result"]["resultType"]) == ("sub", "complete")
    for each in calls:  # it has begun to end, and they are still running
        ran(each.client.revision, "http")
        assert not each.run.is_over
        each.run.let_go()
    for each in calls:
        await each.answered()
    for reply in streams:
        assert await remainder(reply) == []
    assert await server.ended(5) == 0
    assert server.log() == ""


@requirement("P-12", "SRV-514")
async def test_a_signal_ends_streams_cleanly_and_every_call_is_answered(control: Control, ran: Ran) -> None:
    async def one(at: int) -> None:
        async with running(control, limits=LASTING) as server:
            await end(control, server, ran, at)

    await rounds(50 if SOAK else 12, one)


@requirement("P-12", "SRV-514")
async def test_a_signal_to_the_parent_of_workers_does_the_same(control: Control, ran: Ran) -> None:
    async def one(at: int) -> None:
        async with running(control, limits=LASTING, workers=2) as server:
            await end(control, server, ran, at)

    await rounds(4, one, at_once=2)
