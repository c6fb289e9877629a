"""A client of the HTTP/1.1 listener that sends bytes as they are, and the listener in a loop or a process."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from faults import put_away, until
from paths import SUPPORT
from patience import PATIENCE, in_time
from servers_listen import App, listening

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
        str(SUPPORT / "servers_listen.py"),
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


async def caught(pid: int) -> None:
    """Wait until no signal is pending: it has been delivered."""
    status = Path(f"/proc/{pid}/status")

    def pending() -> bool:
        return any(line.startswith(("SigPnd", "ShdPnd")) and int(line.split()[1], 16) for line in _lines(status))

    await until(lambda: not pending(), "the signal is delivered")


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")


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
