"""A wire that can be cut: every byte between a client and a real server passes here, and is remembered.

The client's command is a stub that hands its pipes over to us; the server at the other end is forked from a process
that has everything imported already (`Zygote`), which makes a real server cost milliseconds. Over HTTP the same is a
proxy. In memory it is messages that pass, not bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from forks import forks
from handrail import Call, Server
from handrail.errors import TransportError

Way = Literal["up", "down"]  # to the server, to the client
How = Literal["exit", "close", "half", "silent", "kill", "reset"]
WAYS: tuple[Way, Way] = ("up", "down")

STUB = """
import os, sys
from _socket import AF_UNIX, SOCK_STREAM, SOL_SOCKET, SCM_RIGHTS, socket
wire = socket(AF_UNIX, SOCK_STREAM)
wire.connect(sys.argv[1])
wire.sendmsg([b"x"], [(SOL_SOCKET, SCM_RIGHTS, (0).to_bytes(4, sys.byteorder) + (1).to_bytes(4, sys.byteorder))])
os.close(0), os.close(1)
os._exit(len(wire.recv(1)))
"""


def made() -> Server:
    """The server at the other end: few tools, so that a list of them is short."""
    server = Server("relayed", version="1")
    stopped: list[str] = []

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def progresses(call: Call) -> str:
        for done in range(1, 4):
            await call.progress(done, 3)
        return "all done"

    @server.tool
    async def asks(call: Call) -> str:
        form = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        answer = await call.ask("Who?", form)
        return f"{answer.action} {answer.content}"

    @server.tool
    async def waits(mark: str) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(mark)
        return "never"

    @server.tool
    async def was_stopped(mark: str) -> bool:
        return mark in stopped

    return server


class Plan(NamedTuple):
    """Cut the wire when so many bytes (in memory: messages) have passed one way; `everything`: all there is of it."""

    way: Way
    at: int
    how: How
    everything: bool = True


class Tape:
    """What came from one side on one connection, and how much of it was passed on."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.passed = 0


class End:
    """One side of a connection: a socket, or the two pipes of a process."""

    def __init__(self, wire: socket.socket | tuple[int, int]) -> None:
        self._socket = wire if isinstance(wire, socket.socket) else None
        self.source, self._sink = (wire.fileno(),) * 2 if isinstance(wire, socket.socket) else wire
        os.set_blocking(self.source, False)
        os.set_blocking(self._sink, False)

    def read(self) -> bytes | None:
        try:
            return os.read(self.source, 65536)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def write(self, data: bytes) -> bool:
        """Whether anybody takes it."""
        while data:
            try:
                data = data[os.write(self._sink, data) :]
            except BlockingIOError:
                select.select([], [self._sink], [], 1.0)
            except OSError:
                return False
        return True

    def close_sink(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        elif self._sink >= 0:
            os.close(self._sink)
            self._sink = -1

    def close_source(self) -> None:
        if self._socket is None and self.source >= 0:
            os.close(self.source)
            self.source = -1

    def close(self, *, reset: bool = False) -> None:
        if self._socket is None:
            self.close_sink()
            self.close_source()
            return
        if reset and self._socket.fileno() >= 0:  # the other direction may have closed it
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


class Connection:
    """One connection through a relay."""

    def __init__(
        self, relay: Relay, client: End, server: End, *, pid: int = 0, stub: socket.socket | None = None
    ) -> None:
        self.up, self.down = Tape(), Tape()
        self.pid = pid
        self._relay = relay
        self._client, self._server = client, server
        self._stub = stub
        self._is_silent = False
        self._loop = asyncio.get_running_loop()
        self._watched: set[int] = set()
        self._watch("up", client)
        self._watch("down", server)

    def _watch(self, way: Way, end: End) -> None:
        self._watched.add(end.source)
        self._loop.add_reader(end.source, self._move, way)

    def _unwatch(self, end: End) -> None:
        if end.source in self._watched:
            self._watched.discard(end.source)
            self._loop.remove_reader(end.source)

    def _move(self, way: Way) -> None:
        source, sink, tape = (
            (self._client, self._server, self.up) if way == "up" else (self._server, self._client, self.down)
        )
        data = source.read()
        if data is None:
            return
        if not data:
            self._ended(way, source, sink)
            return
        tape.got += data
        if self._is_silent:
            return
        allowed = self._relay.allow(way, len(data))
        if allowed and not sink.write(data[:allowed]):
            self.close()
            return
        tape.passed += allowed
        if self._relay.is_due():
            self._relay.cut(self)

    def _ended(self, way: Way, source: End, sink: End) -> None:
        self._unwatch(source)
        if self._stub is not None and way == "down":  # a process has ended
            self.close()
            return
        sink.close_sink()
        if not self._watched or self._is_silent:
            self.close()

    def cut(self, plan: Plan) -> None:
        match plan.how:
            case "silent":
                self._is_silent = True
            case "kill":  # what has been said already still passes
                self._relay.kill(self.pid)
            case "half" if plan.way == "down" or self._stub is None:
                self._client.close_sink()
                self._is_silent = self._stub is None
            case "half":
                self._unwatch(self._client)
                self._client.close_source()
            case "close" if self._stub is not None:  # its pipes, and it lives on
                self._let_go(keep_stub=True)
            case "close":
                self._client.close_sink()
                self._is_silent = True
                self._unwatch(self._server)
                self._server.close()
            case how:
                self._let_go(reset=how == "reset")

    def _let_go(self, *, keep_stub: bool = False, reset: bool = False) -> None:
        self._unwatch(self._client)
        self._unwatch(self._server)
        self._client.close(reset=reset)
        self._server.close()
        if self._stub is not None and not keep_stub:
            self._stub.close()

    def close(self) -> None:
        self._let_go()


class Relay:
    """All connections of one client, and the plan to cut them once."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan
        self.is_cut = False
        self.connections: list[Connection] = []
        self.counts: dict[Way, int] = {"up": 0, "down": 0}
        self.steps: dict[Way, list[int]] = {"up": [], "down": []}  # how much had passed after each piece
        self.url = ""
        self.command: list[str] = []
        self.victim = 0  # of "kill", if that is not the server
        self.on_cut: Callable[[], None] = lambda: None
        self._has_killed = False
        self._listening: socket.socket | None = None
        self._loop = asyncio.get_running_loop()

    def allow(self, way: Way, size: int) -> int:
        """How much of a piece may pass."""
        if self.plan is not None and not self.is_cut and way == self.plan.way:
            size = min(size, self.plan.at - self.counts[way])
        self.counts[way] += size
        self.steps[way].append(self.counts[way])
        return size

    def is_due(self) -> bool:
        return self.plan is not None and not self.is_cut and self.counts[self.plan.way] >= self.plan.at

    def cut(self, connection: Connection) -> None:
        assert self.plan is not None
        self.is_cut = True
        for each in self.connections if self.plan.everything else [connection]:
            each.cut(self.plan)
        self.on_cut()

    def kill(self, pid: int) -> None:
        """End the victim, or else the server of a connection; once, for later the number may be another's."""
        if not self._has_killed:
            self._has_killed = True
            os.kill(self.victim or pid, signal.SIGKILL)

    def refuse(self) -> None:
        """No more connections."""
        listening, self._listening = self._listening, None
        if listening is not None:
            self._loop.remove_reader(listening)
            listening.close()

    @contextlib.contextmanager
    def to_url(self, url: str, pid: int = 0) -> Iterator[Relay]:
        """A proxy: `self.url` is where to connect to instead."""
        place, slash, path = url.removeprefix("http://").partition("/")
        host, _, port = place.partition(":")
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}{slash}{path}"

        def connect(client: socket.socket) -> None:
            try:
                server = socket.create_connection((host, int(port)), 5)
            except OSError:
                client.close()
            else:
                self.connections.append(Connection(self, End(client), End(server), pid=pid))

        with self._accept(listening, connect):
            yield self

    @contextlib.contextmanager
    def to_process(self) -> Iterator[Relay]:
        """Between a stub, which `self.command` starts, and a server that is forked for it."""
        folder = tempfile.mkdtemp(prefix="relay")
        path = os.path.join(folder, "s")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen()
        self.command = [sys.executable, "-ISc", STUB, path]
        waiting: set[socket.socket] = set()

        def connect(stub: socket.socket) -> None:
            waiting.add(stub)
            self._loop.add_reader(stub, begin, stub)

        def begin(stub: socket.socket) -> None:
            waiting.discard(stub)
            self._loop.remove_reader(stub)
            _, given, _, _ = socket.recv_fds(stub, 1, 2)
            if not given:  # it was ended before it had begun
                stub.close()
                return
            server_source, ours_out = os.pipe()
            ours_in, server_sink = os.pipe()
            descriptors = [server_source, server_sink, os.open(os.devnull, os.O_WRONLY)]
            pid = forks().start("subject:serve", "relays:made", descriptors=descriptors).detach()
            client, server = End((given[0], given[1])), End((ours_in, ours_out))
            self.connections.append(Connection(self, client, server, pid=pid, stub=stub))

        try:
            with self._accept(listening, connect):
                yield self
        finally:
            for stub in waiting:
                self._loop.remove_reader(stub)
                stub.close()
            os.unlink(path)
            os.rmdir(folder)

    @contextlib.contextmanager
    def _accept(self, listening: socket.socket, connect: Callable[[socket.socket], None]) -> Iterator[None]:
        self._listening = listening
        self._loop.add_reader(listening, lambda: connect(listening.accept()[0]))
        try:
            yield
        finally:
            self.refuse()
            for each in self.connections:
                each.close()


# In memory


class Between:
    """A server object whose messages pass a relay: `up` and `down` are what did."""

    name = "relayed"

    def __init__(self, server: Server, plan: Plan | None = None) -> None:
        self.plan = plan
        self.is_cut = False
        self.passed: dict[Way, list[bytes]] = {"up": [], "down": []}
        self.channels: list[BetweenChannel] = []
        self._server = server

    def serving(self) -> Any:
        return self._server.serving()

    def connect(self) -> BetweenChannel:
        self.channels.append(BetweenChannel(self, self._server.connect()))
        return self.channels[-1]

    def is_due(self, way: Way) -> bool:
        plan = self.plan
        return plan is not None and not self.is_cut and plan.way == way and len(self.passed[way]) >= plan.at


class BetweenChannel:
    def __init__(self, between: Between, channel: Any) -> None:
        self._between = between
        self._channel = channel
        self._cut = asyncio.Event()

    async def deliver(self, message: bytes) -> None:
        if not self._cut.is_set() and self._between.is_due("up"):
            self._end()
        if self._cut.is_set():
            self._refuse()
            return
        self._between.passed["up"].append(message)
        await self._channel.deliver(message)

    async def receive(self) -> bytes:
        if not self._cut.is_set():
            waiting = {asyncio.create_task(self._channel.receive()), asyncio.create_task(self._cut.wait())}
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                message: bytes | None = None
                for task in waiting:
                    if task.done() and isinstance(task.result(), bytes):
                        message = task.result()
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.wait(waiting)
            if message is not None and not self._cut.is_set():
                if not self._between.is_due("down"):
                    self._between.passed["down"].append(message)
                    return message
                self._end()
        self._refuse()
        await asyncio.Event().wait()
        raise AssertionError

    def _end(self) -> None:
        self._between.is_cut = True
        self._cut.set()

    def _refuse(self) -> None:
        assert self._between.plan is not None
        if self._between.plan.how != "silent":
            raise TransportError("the wire was cut")

    async def close(self) -> None:
        await self._channel.close()


# Processes


def forked_client(target: Any, **options: Any) -> tuple[int, int]:
    """A client that calls without end: its number, and what is to be closed here at last."""
    out, sink = os.pipe()
    null = [os.open(os.devnull, os.O_RDWR) for _ in range(2)]
    order = json.dumps({"target": target, **options})
    return forks().start("relays:call_on", order, descriptors=[null[0], sink, null[1]]).detach(), out


def call_on(order: str) -> None:
    """Until it is killed."""
    asyncio.run(_client(json.loads(order)))


async def _client(options: Any) -> None:
    from handrail import Client

    target = options.pop("target")
    async with Client(target, elicit=lambda _: {"name": "Ada"}, **options) as client:
        while True:
            await asyncio.gather(client.call("echo", {"text": "x"}), client.call("progresses"), client.call("asks"))
            await client.tools(fresh=True)


# Reading what has passed


def requests(data: bytes | bytearray, *, http: bool) -> Iterator[tuple[int, bytes]]:
    """Where each message begins, and all of it that came, with its head."""
    at = 0
    while at < len(data):
        if not http:
            end = data.find(b"\n", at) + 1 or len(data)
        else:
            end = data.find(b"\r\n\r\n", at) + 4
            head = bytes(data[at:end]).lower() if end > 3 else b""
            length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
            end = end + int(length or b"0") if end > 3 else len(data)
        yield at, bytes(data[at:end])
        at = end


def messages(data: bytes, *, is_open: bool) -> Iterator[Any]:
    """Every whole message in what has passed: a line (the last one ends also with a pipe), an event, a body."""
    text = data.decode("utf-8", "replace")
    decoder = json.JSONDecoder()
    at = text.find('{"jsonrpc"')
    while at >= 0:
        try:
            message, end = decoder.raw_decode(text, at)
        except ValueError:
            end = at + 1
        else:
            before, after = text[max(0, at - 6) : at], text[end : end + 2]
            if after == "\n\n" if before == "data: " else after[:1] == "\n" or before.endswith("\r\n") or not is_open:
                yield message
        at = text.find('{"jsonrpc"', end)
