"""Scripted upstream servers for tests of the gateway: `scripted_upstream.py` over stdio, HTTP and HTTP+SSE.

`running(dialect, transport)` gives a `Rig`: its `target` is what a client or a gateway connects to, its `events` are
everything that reached the server and what became of each call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import scripted_upstream
from patience import PATIENCE
from scripted_upstream import R0, R1, R5, Json, Object, P, Session, Upstream, since

HANDSHAKE_ONLY = "sse"  # a transport that the stateless revision does not have
NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}  # what `Mcp-Name` repeats
STATUSES = (401, 403, 429, 503)  # codes of the tool `error` that become a status without a message
CHALLENGE = 'Bearer realm="canary-challenge", resource_metadata="https://auth.example/canary-challenge"'
MODERN_STATUS = {-32601: 404, -32020: 400, -32021: 400, -32022: 400}

Headers = dict[str, str]
Fits = Callable[[Object], bool]


class Rig:
    """A running upstream, seen by the test."""

    def __init__(self, dialect: str, transport: str) -> None:
        self.dialect = dialect
        self.transport = transport
        self.target: Any = None
        self.events: list[Object] = []
        self._news = asyncio.Event()

    @property
    def options(self) -> Object:
        """How a client finds this server: pocket is spoken where it is asked for, and never offered."""
        return {"revision": P} if self.dialect == P else {}

    def note(self, event: Object) -> None:
        self.events.append(event)
        self._news.set()

    async def wait(self, fits: Fits, count: int = 1) -> Object:
        """The `count`-th event that fits, once it is there."""
        async with asyncio.timeout(PATIENCE):
            while len(found := [each for each in self.events if fits(each)]) < count:
                self._news.clear()
                await self._news.wait()
        return found[count - 1]

    async def became(self, kind: str, mark: str) -> Object:
        """What became of a call: `started`, `cancelled`, `released`, `disconnected`."""
        return await self.wait(lambda event: event["kind"] == kind and event.get("mark") == mark)

    def has(self, kind: str, mark: str) -> bool:
        return any(event["kind"] == kind and event.get("mark") == mark for event in self.events)

    def heard(self, method: str) -> list[Object]:
        """The events of the messages of a method; "" for answers to questions."""
        messages = [event for event in self.events if event["kind"] == "message"]
        return [event for event in messages if event["message"].get("method", "") == method]

    def calls(self, name: str, **arguments: Json) -> list[Object]:
        """The calls of a tool with these arguments, each the event of its message."""
        return [
            event
            for event in self.heard("tools/call")
            if event["message"]["params"]["name"] == name
            and arguments.items() <= event["message"]["params"].get("arguments", {}).items()
        ]

    def command(self, **order: Json) -> None:
        raise NotImplementedError


@asynccontextmanager
async def running(dialect: str, transport: str) -> AsyncIterator[Rig]:
    """An upstream of a dialect over `stdio`, `http` or `sse`."""
    async with _children(dialect) if transport == "stdio" else _listening(dialect, transport) as rig:
        yield rig


# Over stdio: a process for each connection, which tells through a socket what it hears


class _Children(Rig):
    def __init__(self, dialect: str) -> None:
        super().__init__(dialect, "stdio")
        self._controls: set[asyncio.StreamWriter] = set()
        self._ended = asyncio.Event()

    async def follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._controls.add(writer)
        self._ended.clear()
        with contextlib.suppress(ConnectionError):
            async for line in reader:
                self.note(json.loads(line))
        writer.close()
        self._controls.discard(writer)
        if not self._controls:
            self._ended.set()

    def command(self, **order: Json) -> None:
        for writer in self._controls:
            writer.write(json.dumps(order).encode() + b"\n")

    async def all_ended(self) -> None:
        """Wait until no process is left."""
        async with asyncio.timeout(PATIENCE):
            while self._controls:
                await self._ended.wait()


@asynccontextmanager
async def _children(dialect: str) -> AsyncIterator[Rig]:
    rig = _Children(dialect)
    with tempfile.TemporaryDirectory(prefix="rig-") as folder:
        path = f"{folder}/control"
        server = await asyncio.start_unix_server(rig.follow, path, limit=64 * 1024 * 1024)
        # Without `site` and the environment's own: it starts in half the time, and needs nothing that is installed.
        rig.target = [sys.executable, "-S", "-E", str(Path(scripted_upstream.__file__)), dialect, path]
        try:
            yield rig
        finally:
            server.close()
            await rig.all_ended()


# Over HTTP


class _Post:
    """A POST of one request, from its arrival to the end of its answer."""

    def __init__(self, ident: Json, writer: asyncio.StreamWriter) -> None:
        self.id = ident
        self.writer = writer
        self.said: list[bytes] = []
        self.is_stream = False
        self.is_answered = False
        self.ended = asyncio.Event()

    def write(self, message: Object) -> None:
        self.is_answered = self.is_answered or ("method" not in message and message.get("id") == self.id)
        data = json.dumps(message).encode()
        if self.is_stream:
            self.writer.write(_event(data))
            if self.is_answered:
                self.ended.set()
        else:
            self.said.append(data)


class _Connection:
    """A session over HTTP: where its messages go."""

    def __init__(self, rig: _Listening, ident: str) -> None:
        self.id = ident
        self.session: Session = rig.upstream.begin(self.write, self.die)
        self.posts: dict[str, _Post] = {}
        self.stream: asyncio.StreamWriter | None = None  # for what belongs to no request
        self._unsent: list[bytes] = []
        self._is_old = rig.transport == "sse"

    def write(self, message: Object, about: Json) -> None:
        post = self.posts.get(json.dumps(about))
        if post is not None and about is not None:
            post.write(message)
        else:
            self._unsent.append(json.dumps(message).encode())
            self.flush()

    def flush(self) -> None:
        while self.stream is not None and self._unsent:
            self.stream.write(_event(self._unsent.pop(0), "message" if self._is_old else ""))

    def die(self) -> None:
        """Close the connections of what was asked last."""
        for each in [self.stream] if self._is_old else [post.writer for post in [*self.posts.values()][-1:]]:
            if each is not None:
                each.transport.abort()


class _Listening(Rig):
    """A server for Streamable HTTP, or for HTTP with an event stream beside it."""

    def __init__(self, dialect: str, transport: str) -> None:
        super().__init__(dialect, transport)
        self.upstream = Upstream(dialect, self.note)
        self.connections: dict[str, _Connection] = {}
        self.stale = 0  # how a request of before an upgrade is answered, or one without a session: a status or a code
        self._tasks: set[asyncio.Task[None]] = set()

    def command(self, **order: Json) -> None:
        self.upstream.command(order)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its response; whether the connection can be used again."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        verb, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.note({"kind": "http", "verb": verb, "path": path, "headers": headers})
        if self.transport == "sse":
            return await self._old(verb, path, headers, body, reader, writer)
        if verb == "GET":
            return await self._listen(headers, reader, writer)
        if verb == "DELETE":
            connection = self.connections.pop(headers.get("mcp-session-id", ""), None)
            if connection is not None:
                self.upstream.end(connection.session)
            return _plain(writer, 200 if connection else 404)
        if verb != "POST":
            return _plain(writer, 405)
        return await self._post(json.loads(body), headers, reader, writer)

    async def _post(
        self, message: Object, headers: Headers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        method, params = message.get("method"), message.get("params", {})
        is_modern = self.dialect == R5
        if is_modern and self.stale and "mcp-session-id" in headers:
            if self.stale == 404:
                return _plain(writer, 404)
            return _json(writer, 400, _error(message.get("id"), self.stale, "Unsupported protocol version"))
        if is_modern and (problem := _header_problem(message, headers)):
            return _json(writer, 400, _error(message.get("id"), -32020, problem))
        code = params.get("arguments", {}).get("code") if method == "tools/call" else None
        if code in STATUSES:
            self.note({"kind": "message", "message": message, "headers": headers, "session": 0})
            return _plain(writer, code, f"WWW-Authenticate: {CHALLENGE}\r\nRetry-After: 7\r\n")
        if is_modern or method == "initialize":
            connection = _Connection(self, f"s-{len(self.events)}")
            if not is_modern:
                self.connections[connection.id] = connection
        else:
            if "mcp-session-id" not in headers:
                # A probe of another era, or a client that has forgotten its session.
                if self.stale > 0:
                    return _plain(writer, self.stale)
                return _json(writer, 400, _error(message.get("id"), self.stale or -32600, "no session"))
            found = self.connections.get(headers["mcp-session-id"])
            if found is None:
                return _plain(writer, 404)
            connection = found
            if since(self.dialect, "2025-06-18") and headers.get("mcp-protocol-version") != self.dialect:
                return _json(writer, 400, _error(message.get("id"), -32600, "another version than agreed on"))
        session = connection.session
        if method is None or "id" not in message:
            self.upstream.take(session, message, headers)
            return _plain(writer, 202)
        post = connection.posts[json.dumps(message["id"])] = _Post(message["id"], writer)
        try:
            self.upstream.take(session, message, headers)
            more = f"Mcp-Session-Id: {connection.id}\r\n" if method == "initialize" and not is_modern else ""
            if writer.is_closing():
                return False
            if post.is_answered and len(post.said) == 1:
                answer = json.loads(post.said[0])
                status = MODERN_STATUS.get(answer.get("error", {}).get("code"), 200) if is_modern else 200
                return _json(writer, status, answer, more)
            writer.write(f"{_STREAM}{more}\r\n".encode())
            post.is_stream = True
            for data in post.said:
                writer.write(_event(data))
            if not post.is_answered and not await _ends_first(post.ended, reader):
                if is_modern:
                    session.cancel(message["id"], "disconnect")
                else:
                    held = session.held.get(message["id"])
                    self.note({"kind": "disconnected", "mark": held.mark if held else ""})
            await writer.drain()
            return False
        finally:
            del connection.posts[json.dumps(message["id"])]
            if is_modern and session in self.upstream.sessions:  # else the server has changed meanwhile
                self.upstream.sessions.remove(session)

    async def _listen(self, headers: Headers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        connection = self.connections.get(headers.get("mcp-session-id", ""))
        if connection is None or self.dialect == R5:
            return _plain(writer, 405 if self.dialect == R5 else 404)
        writer.write(f"{_STREAM}\r\n".encode())
        await self._stream(connection, reader, writer)
        return False

    async def _stream(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connection.stream = writer
        connection.flush()
        try:
            await reader.read(1)
        finally:
            if connection.stream is writer:
                connection.stream = None

    async def _old(
        self,
        verb: str,
        path: str,
        headers: Headers,
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        _, _, ident = path.partition("?sessionId=")
        if verb == "GET" and not ident:
            connection = _Connection(self, f"e-{len(self.events)}")
            self.connections[connection.id] = connection
            writer.write(f"{_STREAM}\r\n".encode())
            writer.write(_event(f"/messages?sessionId={connection.id}".encode(), "endpoint"))
            try:
                await self._stream(connection, reader, writer)
            finally:
                del self.connections[connection.id]
                self.upstream.end(connection.session)
            return False
        found = self.connections.get(ident)
        if verb != "POST" or not ident or found is None:
            return _plain(writer, 404 if ident else 405)
        _plain(writer, 202)
        self.upstream.take(found.session, json.loads(body), headers)
        return True


@asynccontextmanager
async def _listening(dialect: str, transport: str) -> AsyncIterator[Rig]:
    rig = _Listening(dialect, transport)
    server = await asyncio.start_server(rig.serve, "127.0.0.1", 0, limit=64 * 1024 * 1024)
    host, port = server.sockets[0].getsockname()[:2]
    rig.target = f"http://{host}:{port}/{'sse' if transport == 'sse' else 'mcp'}"
    try:
        yield rig
    finally:
        server.close()
        await rig.close()


_STREAM = "HTTP/1.1 200 x\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"


def _event(data: bytes, kind: str = "") -> bytes:
    return (f"event: {kind}\n".encode() if kind else b"") + b"data: " + data + b"\n\n"


def _error(ident: Json, code: int, text: str) -> Object:
    return {"jsonrpc": "2.0", "id": ident, "error": {"code": code, "message": text}}


def _plain(writer: asyncio.StreamWriter, status: int, more: str = "") -> bool:
    writer.write(f"HTTP/1.1 {status} x\r\n{more}Content-Length: 0\r\n\r\n".encode())
    return True


def _json(writer: asyncio.StreamWriter, status: int, message: Object, more: str = "") -> bool:
    data = json.dumps(message).encode()
    head = f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\n{more}Content-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return True


async def _ends_first(ended: asyncio.Event, reader: asyncio.StreamReader) -> bool:
    """Whether the answer was given before the client went away."""
    answer, gone = asyncio.ensure_future(ended.wait()), asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)
    return ended.is_set()


def _header_problem(message: Object, headers: Headers) -> str:
    """What is wrong with the headers that repeat the body, by the rules of 2026-07-28; empty if nothing is."""
    params = message.get("params", {})
    expected = {"mcp-protocol-version": R5, "mcp-method": message.get("method", "")}
    if message.get("method") in NAMED:
        expected["mcp-name"] = params[NAMED[message["method"]]]
    if message.get("method") == "tools/call" and params["name"] == "region":
        expected["mcp-param-region"] = params["arguments"]["place"]
    if message.get("method") == "initialize":
        return ""  # an unknown method, which is told so
    for name, value in expected.items():
        if _decoded(headers.get(name, "")) != value:
            return f"{name}: {headers.get(name)!r} is not {value!r}"
    unknown = [name for name in headers if name.startswith("mcp-param-") and name not in expected]
    return f"{unknown[0]} was not asked for" if unknown else ""


def _decoded(value: str) -> str:
    if value.startswith("=?base64?") and value.endswith("?="):
        return b64decode(value[9:-2]).decode()
    return value


def strings(value: Json) -> Iterator[str]:
    """Every text in a value, also the names of members: for the search for what must not be there."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
    elif isinstance(value, str):
        yield value


__all__ = ["CHALLENGE", "R0", "R1", "Rig", "running", "strings"]
