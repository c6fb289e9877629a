"""Raw conversations with a server of `subject.py`, one face for every transport.

Whatever a test receives is checked on the way: strict JSON by a parser that is not ours, the official schema of its
revision, and a list of the members that revision may use (`checks.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import subject
from checks import check_message, strict_json
from forks import Fork, forks
from handrail.server import Server
from patience import PATIENCE, cpu_of
from requirements import record_ran

Json = Any
Object = dict[str, Any]

HERE = Path(__file__).resolve().parent
LEGACY = ("2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "pocket")
MODERN = ("2026-07-28",)
ALL = (*LEGACY, *MODERN)
TRANSPORTS = ("memory", "stdio", "http")
PIPES = ("memory", "stdio")  # one channel each way, in order; HTTP has many
ENVELOPE = "io.modelcontextprotocol/"


class Wire:
    """One client's end. `request` gives the whole answer; what else arrives is kept in `others`."""

    def __init__(self, revision: str, transport: str) -> None:
        self.revision = revision
        self.transport = transport
        self.capabilities: Object = {}
        self.others: list[Object] = []
        self.asked: dict[Json, str] = {}  # id -> method, for checking the answer
        self.welcome: Object = {}
        self._ids = 0

    @property
    def stateless(self) -> bool:
        return self.revision in MODERN

    async def write(self, data: bytes) -> None:
        raise NotImplementedError

    async def read(self) -> bytes:
        raise NotImplementedError

    @property
    def cpu(self) -> float:
        """Seconds of a processor that the server has used; in memory, with what the test itself has."""
        return time.process_time()

    async def send(self, message: Json) -> None:
        """Send a message, or bytes as they are."""
        if isinstance(message, bytes):
            await self.write(message)
            return
        if isinstance(message, dict) and "method" in message and isinstance(message.get("id"), int | str):
            self.asked[message["id"]] = message["method"]
        await self.write(json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode())

    async def receive(self, patience: float = PATIENCE) -> Json:
        """The next message, checked."""
        async with asyncio.timeout(patience):
            data = await self.read()
        message = strict_json(data)
        for each in message if isinstance(message, list) else [message]:
            check_message(each, self.revision, self.asked.get(each.get("id")) if "method" not in each else None)
        return message

    async def close(self) -> Any:
        raise NotImplementedError

    async def finish(self) -> None:
        """Ask the server to end; what it still has to say can be read."""
        await self.close()

    async def log(self) -> str:
        """End the server; what it wrote to its log, where it has one of its own (`stderr=PIPE`)."""
        raise NotImplementedError

    async def settle(self) -> None:
        """Wait until everything that was sent has its answer, where that could be overtaken by the next one."""

    async def silent(self) -> bool:
        """Whether nothing comes but the answer to a question asked now."""
        answer = await self.request("ping" if not self.stateless else "server/discover")
        return "result" in answer and not self.others

    def params(self, params: Object | None, **meta: Json) -> Object:
        """Parameters with what this revision wants in `_meta`."""
        known = {"logLevel": ENVELOPE + "logLevel"}
        own = {known.get(name, name): value for name, value in meta.items()}
        if self.stateless:
            own = {
                ENVELOPE + "protocolVersion": self.revision,
                ENVELOPE + "clientCapabilities": self.capabilities,
                ENVELOPE + "clientInfo": {"name": "rig", "version": "1"},
                **own,
            }
        return {**(params or {}), "_meta": {**(params or {}).get("_meta", {}), **own}} if own else params or {}

    async def ask(self, method: str, params: Object | None = None, **meta: Json) -> int:
        """Send a request without waiting; gives its id."""
        self._ids += 1
        ident = self._ids
        whole = self.params(params, **meta)
        message: Object = {"jsonrpc": "2.0", "id": ident, "method": method}
        if whole:
            message["params"] = whole
        await self.send(message)
        return ident

    async def answer(self, ident: Json, patience: float = PATIENCE) -> Object:
        """The answer to a request; whatever comes before it is kept."""
        while True:
            for at, each in enumerate(self.others):
                if each.get("id") == ident and type(each.get("id")) is type(ident) and "method" not in each:
                    return self.others.pop(at)
            self.others.append(await self.receive(patience))

    async def request(self, method: str, params: Object | None = None, **meta: Json) -> Object:
        return await self.answer(await self.ask(method, params, **meta))

    async def call(self, name: str, arguments: Object | None = None, **meta: Json) -> Object:
        """`tools/call`, the whole answer."""
        params: Object = {"name": name}
        if arguments is not None:
            params["arguments"] = arguments
        return await self.request("tools/call", params, **meta)

    async def notify(self, method: str, params: Object | None = None) -> None:
        message: Object = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        await self.send(message)

    async def notice(self, method: str) -> Object:
        """The first message of ours with this method: a notification, or a question to the client."""
        while True:
            for at, each in enumerate(self.others):
                if each.get("method") == method:
                    return self.others.pop(at)
            self.others.append(await self.receive())

    async def open(self, capabilities: Object | None = None) -> None:
        """Shake hands where the revision does; after that `call` and the like just work."""
        self.capabilities = {} if capabilities is None else capabilities
        if self.stateless:
            return
        params = {
            "protocolVersion": self.revision,
            "capabilities": self.capabilities,
            "clientInfo": {"name": "rig", "version": "1"},
        }
        answer = await self.request("initialize", params)
        self.welcome = answer["result"]
        assert self.welcome["protocolVersion"] == self.revision
        await self.notify("notifications/initialized")

    async def reopen(self, revision: str, capabilities: Object | None = None) -> None:
        """Speak another revision on the same wire from now on."""
        self.revision = revision
        await self.open(capabilities)


class MemoryWire(Wire):
    def __init__(self, revision: str, server: Server) -> None:
        super().__init__(revision, "memory")
        self.server = server
        self._channel = server.connect()

    async def write(self, data: bytes) -> None:
        # What a line is over stdio, a message is here.
        for line in data.split(b"\n"):
            if line.strip():
                await self._channel.deliver(line)

    async def read(self) -> bytes:
        return await self._channel.receive()

    async def close(self) -> None:
        await self._channel.close()


class StdioWire(Wire):
    def __init__(self, revision: str, process: Process) -> None:
        super().__init__(revision, "stdio")
        self.process = process

    @property
    def cpu(self) -> float:
        return cpu_of(self.process.fork.pid)

    async def write(self, data: bytes) -> None:
        self.process.stdin.write(data + b"\n")
        await self.process.stdin.drain()

    async def read(self) -> bytes:
        line = await self.process.stdout.readline()
        if not line:
            raise EOFError("the server closed its output")
        assert line.endswith(b"\n")
        return line[:-1]

    async def close(self) -> int:
        """End of input; the exit code."""
        self.process.stdin.close()
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()

    async def log(self) -> str:
        await self.close()
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()


class Process(NamedTuple):
    """A server of `subject.py` and our ends of its pipes."""

    fork: Fork
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader | None

    async def wait(self) -> int:
        if self.fork.returncode is None:
            self.fork.told.setblocking(False)
            self.fork.returncode = int(await asyncio.get_running_loop().sock_recv(self.fork.told, 32))
            self.fork.told.close()
        return self.fork.returncode


@asynccontextmanager
async def spawn(variant: str, stderr: int = asyncio.subprocess.DEVNULL) -> AsyncIterator[Process]:
    """A process of its own, which ends with its input."""
    loop = asyncio.get_running_loop()

    async def reads(descriptor: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
        pipe = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb"))
        opened.append(pipe[0])
        return reader

    opened: list[asyncio.BaseTransport] = []
    errors, error_sink = os.pipe() if stderr == asyncio.subprocess.PIPE else (-1, os.open(os.devnull, os.O_WRONLY))
    source, stdin = os.pipe()
    stdout, sink = os.pipe()
    fork = forks().start("subject:serve", variant, descriptors=[source, sink, error_sink])
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(stdin, "wb"))
    opened.append(transport)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    process = Process(fork, writer, await reads(stdout), await reads(errors) if errors >= 0 else None)
    try:
        yield process
    finally:
        writer.close()
        try:
            async with asyncio.timeout(PATIENCE):
                await process.wait()
        except TimeoutError:
            fork.kill()
            await process.wait()
            raise AssertionError("the server did not end with its input") from None
        finally:
            for each in opened:
                each.close()
            await asyncio.sleep(0)  # in which they are


@asynccontextmanager
async def wire_to(revision: str, transport: str, variant: str = "default", **options: Any) -> AsyncIterator[Wire]:
    """A wire to a fresh server; not yet opened."""
    if transport == "memory":
        server = subject.make(variant)
        async with server.serving():
            memory = MemoryWire(revision, server)
            yield memory
            await memory.close()
        return
    if transport == "http":
        import wires_http  # which is made of this module

        listening = wires_http.HttpServer(variant)
        try:
            client = wires_http.HttpWire(revision, listening)
            try:
                yield client
            finally:
                await client.close()
        finally:
            listening.stop()
        return
    async with spawn(variant, **options) as process:
        yield StdioWire(revision, process)


Open = Callable[..., Any]


@asynccontextmanager
async def shared_http(request: pytest.FixtureRequest, revision: str, variant: str) -> AsyncIterator[Wire]:
    """A wire to the server of this variant that all tests of a module share."""
    import wires_http

    wire = wires_http.HttpWire(revision, wires_http.servers_of(request).get(variant))
    try:
        yield wire
    finally:
        await wire.close()


@pytest.fixture
async def open_wire(request: pytest.FixtureRequest, revision: str, transport: str) -> AsyncIterator[Open]:
    """`await open_wire(variant, capabilities=…, fresh=True)`: an opened wire of this test's parameters, recorded.

    Its server is its own; over HTTP only if it has to be `fresh`, for there a server has many clients anyway.
    """
    async with AsyncExitStack() as stack:

        async def opened(
            variant: str = "default", *, capabilities: Object | None = None, fresh: bool = False, **options: Any
        ) -> Wire:
            if transport == "http" and not fresh and not options:
                wire = await stack.enter_async_context(shared_http(request, revision, variant))
            else:
                wire = await stack.enter_async_context(wire_to(revision, transport, variant, **options))
            await wire.open(capabilities)
            record_ran(request, revision, transport)
            return wire

        yield opened


@pytest.fixture
async def wire(open_wire: Open) -> Wire:
    """An opened wire to the default server, in this test's revision and transport."""
    opened: Wire = await open_wire()
    return opened


def everywhere(*revisions: str, transports: Sequence[str] = TRANSPORTS) -> pytest.MarkDecorator:
    """Run a test for each of these revisions (all, if none is named) over each transport."""
    return pytest.mark.parametrize(
        ("revision", "transport"),
        [(revision, transport) for revision in (revisions or ALL) for transport in transports],
    )
