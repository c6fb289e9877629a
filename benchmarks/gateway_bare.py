"""The floor for gateways: the relay anyone would write with msgspec, on asyncio's pipes and aiohttp, without checks.

`gateway_bare.py TARGET [sockets] [PORT]`: a command or an address is offered on stdio, or over HTTP on uvicorn. Each
message is decoded, gets an id and a tool name of the other side, and is encoded; of the answer only the id is changed
back. With `sockets`, an upstream over HTTP is reached without aiohttp: most of such a call is otherwise aiohttp's.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import uvicorn

from benchmarks.bare import other
from benchmarks.scenarios import CLIENT, REVISIONS

Object = dict[str, Any]
Event = dict[str, Any]
Reply = Callable[[Object], None]
Send = Callable[[Object, Reply], None]  # a request, and what is called with its answer

LONGEST_LINE = 1 << 24
HELLO = {"protocolVersion": REVISIONS["pipe"], "capabilities": {}, "clientInfo": CLIENT}

encode, decode = msgspec.json.encode, msgspec.json.decode


@asynccontextmanager
async def pipes(command: list[str]) -> AsyncIterator[Send]:
    server = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=LONGEST_LINE)
    assert server.stdin and server.stdout
    write, lines = server.stdin.write, server.stdout
    waiting: dict[int, tuple[Any, Reply]] = {}
    ids = count(1)

    async def listen() -> None:
        async for line in lines:
            message = decode(line)
            message["id"], reply = waiting.pop(message["id"])
            reply(message)

    def send(message: Object, reply: Reply) -> None:
        id = next(ids)
        waiting[id] = message["id"], reply
        message["id"] = id
        write(encode(message) + b"\n")

    listener = asyncio.create_task(listen())
    yield send
    server.stdin.close()
    await listener
    await server.wait()


@asynccontextmanager
async def http(url: str) -> AsyncIterator[Send]:
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    headers["MCP-Protocol-Version"] = REVISIONS["session"]
    running: set[asyncio.Task[None]] = set()
    ids = count(1)
    async with aiohttp.ClientSession() as session:

        async def exchange(message: Object, id: Any, reply: Reply) -> None:
            async with session.post(url, data=encode(message), headers=headers) as response:
                answer = decode(await response.read())
                if "Mcp-Session-Id" not in headers:
                    headers["Mcp-Session-Id"] = response.headers["Mcp-Session-Id"]
            answer["id"] = id
            reply(answer)

        def send(message: Object, reply: Reply) -> None:
            id, message["id"] = message["id"], next(ids)
            task = asyncio.create_task(exchange(message, id, reply))
            running.add(task)
            task.add_done_callback(running.discard)

        yield send


@asynccontextmanager
async def sockets(url: str) -> AsyncIterator[Send]:
    address = urlsplit(url)
    assert address.hostname and address.port
    host, port = address.hostname, address.port
    fields = [f"POST {address.path} HTTP/1.1", f"Host: {address.netloc}", "Content-Type: application/json"]
    fields += ["Accept: application/json, text/event-stream", f"MCP-Protocol-Version: {REVISIONS['session']}"]
    head = "\r\n".join(fields).encode()
    idle: list[Connection] = []
    running: set[asyncio.Task[None]] = set()
    ids = count(1)
    loop = asyncio.get_running_loop()

    async def connect(request: bytes, reply: Callable[[bytes, bytes], None]) -> None:
        _, connection = await loop.create_connection(lambda: Connection(idle), host, port)
        connection.exchange(request, reply)

    def send(message: Object, reply: Reply) -> None:
        id, message["id"] = message["id"], next(ids)
        body = encode(message)

        def receive(fields: bytes, body: bytes) -> None:
            nonlocal head
            if method == "initialize":
                session = re.search(rb"(?i)\r\n(mcp-session-id:[^\r]*)", fields)
                assert session
                head += b"\r\n" + session[1]
            answer = decode(body)
            answer["id"] = id
            reply(answer)

        method = message["method"]
        request = b"%b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
        if idle:
            idle.pop().exchange(request, receive)
        else:
            task = asyncio.create_task(connect(request, receive))
            running.add(task)
            task.add_done_callback(running.discard)

    yield send


class Connection(asyncio.Protocol):
    """One kept connection with a request at a time. Its answers have a length."""

    def __init__(self, idle: list[Connection]) -> None:
        self._idle = idle
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._write = transport.write

    def exchange(self, request: bytes, reply: Callable[[bytes, bytes], None]) -> None:
        self._reply = reply
        self._write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        fields, end, body = self._received.partition(b"\r\n\r\n")
        if end:
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", fields)
            assert length
            if len(body) == int(length[1]):
                self._received = b""
                self._idle.append(self)
                self._reply(fields, body)


def upstream(target: str, library: str) -> AbstractAsyncContextManager[Send]:
    if target.startswith("http"):
        return sockets(target) if library == "sockets" else http(target)
    return pipes(shlex.split(target))


async def ask(send: Send, method: str, params: Object) -> Object:
    answer: asyncio.Future[Object] = asyncio.get_running_loop().create_future()
    send({"jsonrpc": "2.0", "id": 0, "method": method, "params": params}, answer.set_result)
    result: Object = (await answer)["result"]
    return result


async def greet(send: Send) -> dict[str, str]:
    """Open the session; return the upstream's name of each tool by ours."""
    await ask(send, "initialize", HELLO)
    listed = await ask(send, "tools/list", {})
    return {tool["name"]: tool["name"] for tool in listed["tools"]}


def relay(message: Object, names: dict[str, str], send: Send, reply: Reply) -> None:
    method, params = message["method"], message.get("params", {})
    if method == "tools/call":
        params["name"] = names[params["name"]]
        send(message, reply)
    elif method == "tools/list":
        send(message, reply)
    else:
        reply({"jsonrpc": "2.0", "id": message["id"], "result": other(method, params)})


async def serve_stdio(target: str, library: str) -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=LONGEST_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    output, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sys.stdout)
    write = output.write

    def reply(message: Object) -> None:
        write(encode(message) + b"\n")

    async with upstream(target, library) as send:
        names = await greet(send)
        async for line in lines:
            message = decode(line)
            if "id" in message:
                relay(message, names, send, reply)


class Application:
    """The ASGI application. uvicorn starts its loop; so the upstream is connected to in its lifespan."""

    def __init__(self, target: str, library: str) -> None:
        self._target, self._library = target, library
        self._names: dict[str, str] = {}
        self._send: Send

    async def __call__(
        self, scope: Event, receive: Callable[[], Awaitable[Event]], send: Callable[[Event], Awaitable[None]]
    ) -> None:
        event = await receive()
        if scope["type"] == "lifespan":
            async with upstream(self._target, self._library) as self._send:
                self._names = await greet(self._send)
                await send({"type": "lifespan.startup.complete"})
                await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body: bytes = event["body"]
        while event["more_body"]:
            event = await receive()
            body += event["body"]
        message = decode(body or b"{}")
        status, answer = 202 if message else 405, b""  # 405: there is no stream, and no end of a session
        if "id" in message:
            answered: asyncio.Future[Object] = asyncio.get_running_loop().create_future()
            relay(message, self._names, self._send, answered.set_result)
            status, answer = 200, encode(await answered)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        headers.append((b"mcp-session-id", b"0"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


def main() -> None:
    target, *more = sys.argv[1:]
    library = "sockets" if "sockets" in more else "aiohttp"
    if more and more[-1].isdecimal():
        options: dict[str, Any] = {"http": "httptools", "loop": "asyncio", "lifespan": "on", "log_level": "warning"}
        options |= {"port": int(more[-1]), "access_log": False, "timeout_keep_alive": 60}
        uvicorn.run(Application(target, library), **options)
    else:
        asyncio.run(serve_stdio(target, library))


if __name__ == "__main__":
    main()
