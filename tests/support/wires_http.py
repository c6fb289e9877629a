"""A raw HTTP client for the rig: requests written by hand, answers read by hand, over a socket for each request.

The two dialects of 2024 use the transport of their time, HTTP with an event stream beside it; the others use Streamable
HTTP. Whatever the server says, on whatever stream, ends up in one inbox.

A request is on its way when `write` returns: its bytes were handed over on a connection made for it, and a server
accepts connections, and reads them, in the order they were made.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import tempfile
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from forks import forks
from patience import PATIENCE, cpu_of
from wires import ENVELOPE, MODERN, Json, Object, Wire

OLD = ("2024-10-07", "2024-11-05")
WITH_HEADER = ("2025-06-18", "2025-11-25", "pocket")
BOTH = "application/json, text/event-stream"
CANCELLED = "notifications/cancelled"
INITIALIZED = "notifications/initialized"
VERSION = ENVELOPE + "protocolVersion"
NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}  # what `Mcp-Name` repeats
LONG = 1_000_000  # a body that is not sent before the server has said that it wants it

Headers = dict[str, str]


class Refusal(Exception):
    """An answer that is no message: a status such as 413, and a text for people."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {text}")
        self.status = status
        self.text = text


# The server's process


class HttpServer:
    """A server of `subject.py` in a process of its own. It ends with this one, whatever happens to us."""

    def __init__(self, variant: str = "default") -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 — closed by `stop`; a pipe nobody reads would stop it
        source, self._lifeline = os.pipe()
        self._out, sink = os.pipe()
        descriptors = [source, sink, os.dup(self._log.fileno())]
        self.process = forks().start("subject:serve", variant, "http", descriptors=descriptors)
        self._was_asked = False
        is_there = select.select([self._out], [], [], PATIENCE)[0]
        self.url = os.read(self._out, 1000).decode().strip() if is_there else ""
        if not self.url:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not start:\n{self.log()}")

    def log(self) -> str:
        """What it wrote to standard error so far."""
        return os.pread(self._log.fileno(), 10_000_000, 0).decode()

    def ask_to_end(self) -> None:
        """By a signal, once: a second one would not let it finish."""
        if not self._was_asked:
            self._was_asked = True
            self.process.terminate()

    def end(self) -> int:
        """Ask it to end, and wait; the exit code."""
        self.ask_to_end()
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end when it was asked to:\n{self.log()}") from None

    def stop(self) -> None:
        """End it, and leave nothing behind."""
        try:
            self.end()
        finally:
            self.process.kill()
            self.process.wait()
            for pipe in (self._lifeline, self._out):
                os.close(pipe)
            self._log.close()


class HttpServers:
    """Running servers by variant: one does for all tests of a module that do not want their own."""

    def __init__(self) -> None:
        self._running: dict[str, HttpServer] = {}

    def get(self, variant: str) -> HttpServer:
        server = self._running.get(variant)
        if server is None or server.process.poll() is not None:
            server = self._running[variant] = HttpServer(variant)
        return server

    def close(self) -> None:
        for server in self._running.values():
            server.stop()


_SERVERS: pytest.StashKey[HttpServers] = pytest.StashKey()


def servers_of(request: pytest.FixtureRequest) -> HttpServers:
    """The servers of the module a test stands in."""
    module = request.node.getparent(pytest.Module)
    assert isinstance(module, pytest.Module)
    if _SERVERS not in module.stash:
        module.stash[_SERVERS] = HttpServers()
        module.addfinalizer(module.stash[_SERVERS].close)
    return module.stash[_SERVERS]


# One request


class Reply:
    """One response: its head at once, its body as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.status = 0
        self.headers: Headers = {}

    async def read_head(self) -> None:
        async with asyncio.timeout(PATIENCE):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {}
        for line in filter(None, lines):
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "") == "text/event-stream"

    async def pieces(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int((await self.reader.readline()).strip() or b"0", 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readline()
        elif "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
        elif self.status not in (202, 204):
            while piece := await self.reader.read(65536):
                yield piece

    async def body(self) -> bytes:
        async with asyncio.timeout(PATIENCE):
            whole = b"".join([piece async for piece in self.pieces()])
        self.close()
        return whole

    async def events(self) -> AsyncIterator[Headers]:
        """Events as mappings; comments come as `{"": text}`."""
        held = b""
        async for piece in self.pieces():
            held += piece
            while b"\n\n" in held:
                text, _, held = held.partition(b"\n\n")
                event: Headers = {}
                for line in text.decode().split("\n"):
                    name, _, value = line.partition(":")
                    event[name] = value.removeprefix(" ")
                yield event

    def close(self) -> None:
        self.writer.close()

    async def gone(self) -> None:
        """Close the connection, and wait until it is closed."""
        self.close()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                await self.writer.wait_closed()


async def send_request(
    url: str, method: str, headers: Headers | list[tuple[str, str]], body: bytes | None = None
) -> Reply:
    """Send a request on a connection of its own; what its head needs beside `headers` is added unless it is there.

    A long body is sent when the server asks for it: one that is refused by its length is not sent at all.
    """
    parts = urlsplit(url)
    pairs = list(headers.items()) if isinstance(headers, dict) else list(headers)
    names = {name.lower() for name, _ in pairs}
    if "host" not in names:
        pairs.append(("Host", parts.netloc))
    if body is not None and "content-length" not in names and "transfer-encoding" not in names:
        pairs.append(("Content-Length", str(len(body))))
    is_long = body is not None and len(body) >= LONG
    if is_long:
        pairs.append(("Expect", "100-continue"))
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    head = f"{method} {target} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in pairs) + "\r\n"
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=64 * 1024 * 1024)
        reply = Reply(reader, writer)
        try:
            writer.write(head.encode("latin-1"))
            if is_long:
                await reply.read_head()
                if reply.status != 100:
                    return reply
                reply.status = 0
            writer.write(body or b"")
            with contextlib.suppress(ConnectionError):  # it may have been refused by its head
                await writer.drain()
        except BaseException:
            reply.close()
            raise
    return reply


async def http(url: str, method: str, headers: Headers | list[tuple[str, str]], body: bytes | None = None) -> Reply:
    """One request, and the head of its response."""
    reply = await send_request(url, method, headers, body)
    try:
        if not reply.status:
            await reply.read_head()
    except BaseException:
        reply.close()
        raise
    return reply


# What the headers and the status have to be


def mirrored(message: Json) -> Headers:
    """The headers a client of 2026-07-28 repeats the body in. What no header can carry is left out."""
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        return {}
    out = {}
    if _is_plain(message["method"]):
        out["Mcp-Method"] = message["method"]
    params = message.get("params")
    name = params.get(NAMED.get(message["method"], "")) if isinstance(params, dict) else None
    if isinstance(name, str):
        plain = _is_plain(name) and name == name.strip() and not name.startswith("=?base64?")
        out["Mcp-Name"] = name if plain else f"=?base64?{b64encode(name.encode('utf-8', 'replace')).decode()}?="
    return out


def _is_plain(text: str) -> bool:
    return all(" " <= each <= "~" for each in text)


def envelope_of(message: Json) -> Object | None:
    """The `_meta` of a request that names its own version in it, whatever it names."""
    params = message.get("params") if isinstance(message, dict) else None
    meta = params.get("_meta") if isinstance(params, dict) else None
    return meta if isinstance(meta, dict) and VERSION in meta and "id" in message and "method" in message else None


_STATUS_OF = {-32700: {400}, -32600: {400}, -32020: {400}, -32021: {400}, -32022: {400}, 429: {429}, 403: {403}}
# Where a method is unknown, 404; to older clients it would mean that their session is gone.
_MODERN_STATUS_OF = {-32601: {404}, -32602: {200, 400}, -32603: {200, 503}}
_LEGACY_STATUS_OF = {-32601: {200}, -32602: {200}, -32603: {200, 503}, -32600: {200, 400, 404}}


def check_status(status: int, answer: Json, *, is_modern: bool) -> None:
    """Whether an answer came with a status it may have (REVISIONS 5 and 6)."""
    code = answer["error"]["code"] if isinstance(answer, dict) and "error" in answer else 0
    known = _STATUS_OF | (_MODERN_STATUS_OF if is_modern else _LEGACY_STATUS_OF)
    assert status in known.get(code, {200}), f"HTTP {status} with {json.dumps(answer)[:300]}"


# A conversation


class HttpWire(Wire):
    """A client of one server: of a process of ours, or of whatever listens at an address."""

    def __init__(self, revision: str, server: HttpServer | str) -> None:
        super().__init__(revision, "http")
        self.url = server if isinstance(server, str) else server.url
        self._server = server
        self.session = ""
        self.mirrors: dict[str, Headers] = {}  # tool -> argument (a plain text) -> the header that repeats it
        self.status = 0  # of the response the last message came in
        self.statuses: list[int] = []  # of every response to a POST
        self._inbox: asyncio.Queue[tuple[int, bytes] | Exception] = asyncio.Queue()
        self._streams: dict[asyncio.Task[None], Reply] = {}  # to GET
        self._waiting: dict[asyncio.Task[None], tuple[str, Reply]] = {}  # to POST, with the id that was sent
        self._sessions: dict[str, str] = {}  # that were begun and not ended, and what they speak
        self._heard: set[str] = set()  # sessions that have a stream for what is said unasked
        self._address = ""  # where an old client posts

    @property
    def cpu(self) -> float:
        return cpu_of(self.server.process.pid)

    @property
    def server(self) -> HttpServer:
        assert isinstance(self._server, HttpServer)
        return self._server

    @property
    def is_old(self) -> bool:
        return self.revision in OLD

    # Opening and closing

    async def open(self, capabilities: Object | None = None) -> None:
        if not self.stateless:
            await self.leave()
        await super().open(capabilities)

    async def _open_stream(self) -> None:
        reply = await http(self.url, "GET", {"Accept": "text/event-stream", **self._own()})
        if reply.status != 200 or not reply.is_stream:
            raise Refusal(reply.status, (await reply.body()).decode())
        events = reply.events()
        if self.is_old:
            async with asyncio.timeout(PATIENCE):
                first = await anext(events)
            assert first["event"] == "endpoint"
            self._address = urlsplit(self.url)._replace(path="", query="").geturl() + first["data"]
        task = asyncio.create_task(self._listen(reply, events))
        self._streams[task] = reply

    async def leave(self) -> None:
        """End the session, as a client does that goes away: everything of it, with all its streams."""
        for session, revision in self._sessions.items():
            headers = {"Mcp-Session-Id": session}
            if revision in WITH_HEADER:
                headers["MCP-Protocol-Version"] = revision
            (await http(self.url, "DELETE", headers)).close()
        self._sessions.clear()
        self.session = self._address = ""
        await self._hang_up(self._streams)

    async def _hang_up(self, tasks: dict[asyncio.Task[None], Any]) -> None:
        ended = dict(tasks)
        tasks.clear()
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        for kept in ended.values():
            await (kept[1] if isinstance(kept, tuple) else kept).gone()

    async def close(self) -> None:
        with contextlib.suppress(ConnectionError):  # it may have ended before
            await self.leave()
        await self._hang_up(self._waiting)
        await self._hang_up(self._streams)

    async def finish(self) -> None:
        self.server.ask_to_end()
        self._sessions.clear()  # they end with it
        if streams := [*self._streams, *self._waiting]:
            _, late = await asyncio.wait(streams, timeout=PATIENCE)
            assert not late, "a stream did not end with the server"
        self._inbox.put_nowait(EOFError("the server has ended"))

    async def log(self) -> str:
        await self.close()
        self.server.end()
        return self.server.log()

    # Sending

    def _own(self) -> Headers:
        own = {"Mcp-Session-Id": self.session} if self.session else {}
        if self.session and self.revision in WITH_HEADER:
            own["MCP-Protocol-Version"] = self.revision
        return own

    def _headers_for(self, message: Json) -> Headers:
        """What a client that sends this message says in its headers: the message decides whose client that is."""
        envelope = envelope_of(message)
        if envelope is not None or self.stateless:
            if envelope is None and _is_opening(message):
                return {}
            version = MODERN[0] if envelope is None else envelope[VERSION]
            is_sayable = isinstance(version, str) and _is_plain(version)
            said = {"MCP-Protocol-Version": version if is_sayable else MODERN[0], **mirrored(message)}
            params = message.get("params") if isinstance(message, dict) else None
            if isinstance(params, dict) and _method(message) == "tools/call":
                for argument, header in self.mirrors.get(str(params.get("name")), {}).items():
                    said[f"Mcp-Param-{header}"] = params["arguments"][argument]
            return said
        return {} if _is_opening(message) else self._own()

    async def write(self, data: bytes) -> None:
        """One body, whatever is in it."""
        message = _parsed(data)
        headers = {"Content-Type": "application/json", "Accept": BOTH}
        is_piped = self.is_old and envelope_of(message) is None
        if is_piped and not self._address:
            await self._open_stream()
        if not is_piped:
            headers |= self._headers_for(message)
        reply = await send_request(self._address if is_piped else self.url, "POST", headers, data)
        is_modern = self.stateless or envelope_of(message) is not None
        task = asyncio.create_task(self._hear(reply, is_modern=is_modern))
        self._waiting[task] = (json.dumps(message.get("id")) if isinstance(message, dict) else "", reply)
        task.add_done_callback(lambda done: self._waiting.pop(done, None))
        if is_piped or not _may_take_long(message):
            async with asyncio.timeout(PATIENCE):
                await asyncio.wait({task})
        if self.session and not self.is_old and _method(message) == INITIALIZED and self.session not in self._heard:
            self._heard.add(self.session)
            await self._open_stream()

    async def notify(self, method: str, params: Object | None = None) -> None:
        """A client of 2026-07-28 cancels by closing the stream of the answer."""
        if self.stateless and method == CANCELLED:
            ident = json.dumps((params or {}).get("requestId"))
            for task, (asked, _) in list(self._waiting.items()):
                if asked == ident:
                    await self._hang_up({task: self._waiting[task]})
                    return
        await super().notify(method, params)

    async def settle(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while self._waiting:
                await asyncio.wait(self._waiting)

    async def silent(self) -> bool:
        # Streams are read side by side: what was said before the first answer is here when the second one is.
        return await super().silent() and await super().silent()

    # Hearing

    async def _hear(self, reply: Reply, *, is_modern: bool) -> None:
        """One response to a POST. Whatever is wrong with it is raised by the next `read`."""
        try:
            if not reply.status:
                await reply.read_head()
            self.statuses.append(reply.status)
            session = reply.headers.get("mcp-session-id")
            if session is not None:
                self.session = session
                self._sessions[session] = self.revision
            if reply.is_stream:
                await self._listen(reply, reply.events())
                return
            body = await reply.body()
            if reply.headers.get("content-type") == "application/json":
                check_status(reply.status, json.loads(body), is_modern=is_modern)
                self._inbox.put_nowait((reply.status, body))
            elif reply.status != 202 or body:
                is_broken = reply.status >= 500 and isinstance(self._server, HttpServer)
                raise Refusal(reply.status, body.decode() + (self.server.log() if is_broken else ""))
        except Exception as problem:
            self._inbox.put_nowait(problem)
        finally:
            reply.close()

    async def _listen(self, reply: Reply, events: AsyncIterator[Headers]) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            async for event in events:
                if event.get("data"):
                    self._inbox.put_nowait((reply.status, event["data"].encode()))
        reply.close()

    async def read(self) -> bytes:
        found = await self._inbox.get()
        if isinstance(found, Exception):
            raise found
        self.status, data = found
        return data


def _parsed(body: bytes) -> Json:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _method(message: Json) -> Json:
    return message.get("method") if isinstance(message, dict) else None


def _is_opening(message: Json) -> bool:
    return _method(message) == "initialize" and "id" in message


def _may_take_long(message: Json) -> bool:
    """Whether something in it is a request: then what comes next must not wait for the answer."""
    items = message if isinstance(message, list) else [message]
    return any(isinstance(each, dict) and "method" in each and "id" in each for each in items)
