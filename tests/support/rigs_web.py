"""HTTP servers that do just what a test tells them, byte by byte; and a conversation that only takes notes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from handrail.errors import PeerError
from handrail.revisions import REVISIONS, Revision
from handrail.transports.base import ClientTransport, PendingRequest
from handrail.transports.http_client import HttpClientTransport
from patience import PATIENCE

JSON = "application/json"
EVENTS = "text/event-stream"
HANDSHAKE = REVISIONS["2025-11-25"]
STATELESS = REVISIONS["2026-07-28"]
INITIALIZED = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
SESSION = "s-1"

Object = dict[str, Any]


class Asked:
    """One request as it came, and the means to answer it."""

    def __init__(self, head: str, body: bytes, wire: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        first, *lines = head.split("\r\n")
        self.method, self.target, _ = first.split(" ")
        self.lines = [line for line in lines if line]  # the headers, byte for byte
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in self.lines)}
        self.body = body
        self.message: Any = json.loads(body) if body else None
        self.is_over = asyncio.Event()
        self._reader, self._writer = wire

    @property
    def id(self) -> Any:
        return self.message["id"]

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def reply(self, status: int = 200, body: bytes | Object = b"", kind: str = JSON, **more: str) -> None:
        """A whole response; names of headers are written with underscores."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.send(self._head(status, kind if data else "", Content_Length=str(len(data)), **more) + data)

    async def answer(self, result: Any = None, **more: str) -> None:
        await self.reply(200, self.result(result), **more)

    def result(self, result: Any = None) -> Object:
        return {"jsonrpc": "2.0", "id": self.id, "result": {} if result is None else result}

    async def begin(self, kind: str = EVENTS, status: int = 200, **more: str) -> None:
        """A response that comes in chunks."""
        await self.send(self._head(status, kind, Transfer_Encoding="chunked", **more))

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, message: Any = None, **fields: Any) -> None:
        lines = [f"{name}: {value}" for name, value in fields.items()]
        lines += [] if message is None else [f"data: {json.dumps(message)}"]
        await self.chunk("\n".join([*lines, "", ""]).encode())

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    def is_closing(self) -> bool:
        return self._writer.is_closing()

    def hang_up(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Close the connection in the way that tells the client of an error."""
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def gone(self) -> None:
        """Wait until the client has closed the connection."""
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                while await self._reader.read(65536):
                    pass

    @staticmethod
    def _head(status: int, kind: str, **headers: str) -> bytes:
        lines = [f"HTTP/1.1 {status} Said", *([f"Content-Type: {kind}"] if kind else [])]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("utf-8")


Script = Callable[[Asked], Awaitable[None]]


class Rig:
    """A running server: what it was asked, and how often it was connected to."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.asked: list[Asked] = []
        self.connections = 0
        self.url = ""
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.failures: list[BaseException] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("utf-8")
                length = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
                body = await reader.readexactly(int(length[0].split(":")[1])) if length else b""
                asked = Asked(head, body, (reader, writer))
                self.asked.append(asked)
                self._tell()
                try:
                    await self._script(asked)
                finally:
                    asked.is_over.set()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        except Exception as problem:
            self.failures.append(problem)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()
            self._tasks.discard(task)
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def was_asked(self, count: int, method: str = "") -> Asked:
        """Wait for so many requests (with this method); the last of them."""
        async with asyncio.timeout(PATIENCE):
            while len(found := [each for each in self.asked if method in ("", each.method)]) < count:
                await self._news.wait()
        return found[count - 1]

    async def idle(self) -> None:
        """Wait until nobody is connected."""
        async with asyncio.timeout(PATIENCE):
            while self._tasks:
                await self._news.wait()

    async def stop(self) -> None:
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert not self.failures, self.failures


@asynccontextmanager
async def rig(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[Rig]:
    made = Rig(script)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    made.url = f"http{'s' if tls else ''}://127.0.0.1:{port}/mcp"
    try:
        yield made
    finally:
        server.close()
        await made.stop()
        await server.wait_closed()


class Notes:
    """A conversation that settles a request with whatever comes in answer to it, and writes down the rest."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, PendingRequest | None]] = []
        self.signs: list[PendingRequest | None] = []
        self.losses: list[tuple[PeerError, PendingRequest | None]] = []
        self.left_out: list[str] = []
        self.waiting: dict[Any, PendingRequest] = {}
        self._news = asyncio.Event()

    def on_message(self, message: bytes | bytearray, about: PendingRequest | None = None) -> None:
        try:
            said = json.loads(message)
        except ValueError:
            self.left_out.append("not JSON")
            return
        self.heard.append((said, about))
        for each in said if isinstance(said, list) else [said]:
            waits = about if about is not None else self.waiting.get(each.get("id"))
            is_answer = "result" in each or "error" in each
            if waits is not None and is_answer and each.get("id") in (None, waits.id) and not waits.future.done():
                waits.future.set_result(each)
        self._tell()

    def on_activity(self, about: PendingRequest | None = None) -> None:
        self.signs.append(about)
        self._tell()

    def on_failure(self, problem: PeerError, about: PendingRequest | None = None) -> None:
        self.losses.append((problem, about))
        for each in self.waiting.values() if about is None else [about]:
            if not each.future.done():
                each.future.set_exception(problem)
                each.future.exception()  # seen: `losses` has it, whether or not the test waits for it
        self._tell()

    def on_stream(self) -> None: ...

    def on_discarded(self, why: str, *, too_long: bool = False) -> None:
        self.left_out.append(f"{why}{' (too long)' if too_long else ''}")
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def signs_to(self, count: int) -> None:
        """Wait for so many signs of life."""
        await self.until(lambda: len(self.signs) >= count)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await self._news.wait()


class Talk:
    """A link, and who listens at it."""

    def __init__(self, link: HttpClientTransport) -> None:
        self.link = link
        self.notes = Notes()
        self._ids = 0

    def begin(
        self, method: str = "tools/call", params: Object | None = None, *, headers: Mapping[str, str] | None = None
    ) -> PendingRequest:
        self._ids += 1
        about = PendingRequest(self._ids, method, asyncio.get_running_loop().create_future())
        about.headers.update(headers or {})
        message = {"jsonrpc": "2.0", "id": about.id, "method": method, "params": params or {}}
        self.notes.waiting[about.id] = about
        self.link.send(json.dumps(message).encode(), about)
        return about

    async def settled(self, about: PendingRequest) -> Any:
        async with asyncio.timeout(PATIENCE):
            return await about.future

    async def ask(self, method: str = "tools/call", **options: Any) -> Any:
        return await self.settled(self.begin(method, **options))

    async def shake_hands(self, revision: Revision = HANDSHAKE) -> None:
        await self.ask("initialize")
        self.link.set_revision(revision)
        self.link.send(INITIALIZED, None)

    async def problem(self, about: PendingRequest | None = None) -> PeerError:
        """Why a request failed."""
        about = about or self.begin()
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait({about.future})
        found = about.future.exception()
        assert isinstance(found, PeerError), about.future.result()
        assert any(loss is found for loss, _ in self.notes.losses)
        return found


@asynccontextmanager
async def linked(url: str, **options: Any) -> AsyncIterator[Talk]:
    """A link that is open; afterwards it has left nothing behind."""
    before = asyncio.all_tasks()
    talk = Talk(HttpClientTransport(url, **options))
    link: ClientTransport = talk.link
    await link.open(talk.notes)
    try:
        yield talk
    finally:
        async with asyncio.timeout(PATIENCE):
            await link.close()
        ours = {task for task in asyncio.all_tasks() - before if task.get_name() == "handrail web"}
        assert ours == set()


@asynccontextmanager
async def talking(script: Script, **options: Any) -> AsyncIterator[tuple[Rig, Talk]]:
    async with rig(script) as server, linked(server.url, **options) as talk:
        yield server, talk


def session_server(script: Script, *, streams: Script | None = None, session: str = SESSION) -> Script:
    """A script for what comes after the handshake; GET is not allowed unless there is a script for it."""

    async def run(asked: Asked) -> None:
        match asked.method, (asked.message or {}).get("method"):
            case "POST", "initialize":
                await asked.answer({}, Mcp_Session_Id=session)
            case "POST", str(method) if method.startswith("notifications/"):
                await asked.reply(202)
            case "POST", _:
                await script(asked)
            case "GET", _ if streams is not None:
                await streams(asked)
            case "DELETE", _:
                await asked.reply(204)
            case _:
                await asked.reply(405)

    return run
