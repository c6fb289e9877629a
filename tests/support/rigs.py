"""Scripted servers for tests of the client: what they say is written down here, not made by this package.

A script gets each message and a `Rig` to answer through. The same script runs in memory (`Rig` is what a `Client` is
given), over stdio (`rigs.py NAME LOG`, a process of its own) and over HTTP (`HttpRig`). `heard` is what was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from patience import PATIENCE

Json = Any
Object = dict[str, Any]

VERSION = "io.modelcontextprotocol/protocolVersion"
MODERN = "2026-07-28"
TOOL: Object = {"name": "echo", "description": "Say it again", "inputSchema": {"type": "object"}}
SUM: Object = {
    "name": "sum",
    "inputSchema": {"type": "object"},
    "outputSchema": {"type": "object", "properties": {"sum": {"type": "number"}}, "required": ["sum"]},
}

Script = Callable[["Rig", Object], None]
SCRIPTS: dict[str, Script] = {}


class Rig:
    """A scripted server, as a client in the same process is given it."""

    name = "rig"

    def __init__(self, script: Script | str, revision: str = "2025-11-25") -> None:
        self.script = SCRIPTS[script] if isinstance(script, str) else script
        self.revision = revision
        self.heard: list[Object] = []
        self.tools: list[Object] = [dict(TOOL)]
        self.state: Object = {}  # the script's own
        self._said: asyncio.Queue[bytes | None] | None = None
        self._news: asyncio.Event | None = None

    # What a script says

    def say(self, message: Json) -> None:
        """A message; bytes go out as they are."""
        self.write(message if isinstance(message, bytes) else json.dumps(message).encode())

    def write(self, data: bytes) -> None:
        assert self._said is not None
        self._said.put_nowait(data)

    def result(self, message: Object, result: Json) -> None:
        self.say({"jsonrpc": "2.0", "id": message["id"], "result": result})

    def error(self, message: Object, code: int, text: str = "no", **more: Json) -> None:
        self.say({"jsonrpc": "2.0", "id": message["id"], "error": {"code": code, "message": text, **more}})

    def notify(self, method: str, **params: Json) -> None:
        self.say({"jsonrpc": "2.0", "method": method, "params": params})

    def ask(self, ident: Json, method: str, **params: Json) -> None:
        self.say({"jsonrpc": "2.0", "id": ident, "method": method, "params": params})

    def die(self) -> None:
        """The transport ends here."""
        assert self._said is not None
        self._said.put_nowait(None)

    def took(self, message: Object) -> None:
        self.heard.append(message)
        if self._news is not None:
            self._news.set()
        self.script(self, message)

    # What was heard

    def asked(self, method: str) -> list[Object]:
        return [each for each in self.heard if each.get("method") == method]

    async def wait_for(self, method: str, count: int = 1) -> Object:
        """The `count`-th message of a method; "" is an answer of the client's."""
        async with asyncio.timeout(PATIENCE):
            while len(found := [each for each in self.heard if each.get("method", "") == method]) < count:
                self._news = self._news or asyncio.Event()
                self._news.clear()
                await self._news.wait()
        return found[count - 1]

    # As a Server would be, for a client in the same process

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    def connect(self) -> Rig:
        self._said = asyncio.Queue()
        return self

    async def deliver(self, message: bytes) -> None:
        value = json.loads(message)
        self.took(value)
        await asyncio.sleep(0)

    async def receive(self) -> bytes:
        assert self._said is not None
        data = await self._said.get()
        if data is None:
            from handrail.errors import TransportError

            raise TransportError("the rig has ended")
        return data

    async def close(self) -> None:
        pass


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


@script
def ordinary(rig: Rig, message: Object) -> None:
    """A server that does what it should, in `rig.revision`; `echo` gives its arguments back as text."""
    method, params = message.get("method"), message.get("params", {})
    if "id" not in message or method is None:
        return
    modern = rig.revision == MODERN
    done: Object = {"resultType": "complete"} if modern else {}
    cached: Object = {"ttlMs": rig.state.get("ttl", 0), "cacheScope": "public"} if modern else {}
    if method == "initialize" and not modern:
        info = {"name": "rig", "version": "1"}
        capabilities = rig.state.get("capabilities", {"tools": {"listChanged": True}})
        rig.result(message, {"protocolVersion": rig.revision, "capabilities": capabilities, "serverInfo": info})
    elif method == "server/discover" and modern:
        capabilities = rig.state.get("capabilities", {"tools": {}})
        rig.result(message, {**done, **cached, "supportedVersions": [MODERN], "capabilities": capabilities})
    elif method == "tools/list":
        end = {"nextCursor": ""} if rig.revision == "pocket" else {}
        rig.result(message, {**done, **cached, "tools": rig.tools, **end})
    elif method == "tools/call":
        text = json.dumps(params.get("arguments"))
        if rig.revision == "2024-10-07":
            rig.result(message, {"toolResult": text})
        else:
            more: Object = {"structuredContent": {}} if rig.revision == "pocket" else {}
            content = [{"type": "text", "text": text}]
            rig.result(message, {**done, "content": content, "isError": False, **more})
    elif method == "ping":
        rig.result(message, {})
    else:
        rig.error(message, -32601, f"Unknown method: {method}")


class HttpRig(Rig):
    """The same over HTTP: an answer that is said at once comes as JSON, everything else as events.

    `statuses` are taken for the next answers, `headers` were heard.
    """

    def __init__(self, script: Script | str, revision: str = "2025-11-25") -> None:
        super().__init__(script, revision)
        self.headers: list[dict[str, str]] = []
        self.statuses: list[int] = []
        self.session = "" if revision == MODERN else "s-1"
        self.cuts = ""  # the next request of this method: its stream ends before its answer, which can be come back for
        self.later: dict[str, Object] = {}
        self.ended: set[str] = set()  # sessions that are not there any more
        self.closed = asyncio.Event()  # a connection was closed by the client while it waited
        self._answers: list[bytes] = []
        self._streams: dict[Json, asyncio.StreamWriter] = {}
        self.raw: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None  # writes the next response itself
        self._tasks: set[asyncio.Task[None]] = set()
        self._dies = False

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=64 * 1024 * 1024)
        host, port = server.sockets[0].getsockname()[:2]
        try:
            yield f"http://{host}:{port}/mcp"
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def write(self, data: bytes) -> None:
        stream = self._streams.pop(_answers_to(data), None)
        subscribed = self._streams.get(_belongs_to(data))
        if subscribed is not None:
            subscribed.write(b"data: " + data + b"\n\n")
        elif stream is None:
            self._answers.append(data)
        else:
            stream.write(b"data: " + data + b"\n\n")
            stream.close()

    def die(self) -> None:
        self._dies = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def other(self, verb: str, writer: asyncio.StreamWriter) -> bool:
        """What is no message: there is nothing here for it."""
        writer.write(b"HTTP/1.1 405 No\r\nContent-Length: 0\r\n\r\n")
        return True

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        verb = head[0].split(" ")[0]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.headers.append({"": verb, **headers})
        if verb == "GET" and headers.get("last-event-id") in self.later:
            self._answers = []
            self.took(self.later.pop(headers["last-event-id"]))
            writer.write(b"HTTP/1.1 200 x\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
            writer.write(b"".join(b"id: 8\ndata: " + each + b"\n\n" for each in self._answers))
            await writer.drain()
            return False
        if verb != "POST":
            return await self.other(verb, writer)
        if headers.get("mcp-session-id") in self.ended:
            writer.write(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
            return True
        message = json.loads(body)
        opens = message.get("method") in ("initialize", "server/discover")
        if self.session and not opens and "mcp-session-id" not in headers:
            writer.write(b"HTTP/1.1 400 No\r\nContent-Length: 0\r\n\r\n")
            return True
        if self.cuts == message.get("method"):
            self.cuts = ""
            self.later["7"] = message
            writer.write(b"HTTP/1.1 200 x\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
            writer.write(b"id: 7\nretry: 20\ndata:\n\n")
            await writer.drain()
            return False
        answers: list[bytes] = []
        self._answers = answers
        self.took(message)
        if self._dies:
            self._dies = False
            return False
        if self.raw is not None:
            raw, self.raw = self.raw, None
            await raw(writer)
            return False
        status = self.statuses.pop(0) if self.statuses else 0
        more = f"Mcp-Session-Id: {self.session}\r\n" if message.get("method") == "initialize" and self.session else ""
        if "id" not in message or "method" not in message:
            writer.write(f"HTTP/1.1 {status or 202} x\r\nContent-Length: 0\r\n\r\n".encode())
        elif len(answers) == 1 and _answers_to(answers[0]) == message["id"]:
            answers = [b""] if self.state.get("blank") and status >= 400 else answers
            size = f"Content-Length: {len(answers[0])}\r\n"
            start = f"HTTP/1.1 {status or 200} x\r\nContent-Type: application/json\r\n{more}{size}\r\n"
            writer.write(start.encode() + answers[0])
        else:
            start = "HTTP/1.1 200 x\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
            writer.write(f"{start}{more}\r\n: a comment\n\nid: 1\ndata:\n\nretry: 10\n\n".encode())
            for each in answers:
                writer.write(b"data: " + each + b"\n\n")
            await writer.drain()
            if message["id"] not in map(_answers_to, answers):
                self._streams[message["id"]] = writer
                await reader.read(1)
                self.closed.set()
            return False
        await writer.drain()
        return True


def _answers_to(data: bytes) -> Json:
    """The id of the request a message answers, also inside a batch."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    for each in found if isinstance(found, list) else [found]:
        if isinstance(each, dict) and "method" not in each:
            return each.get("id")
    return None


def _belongs_to(data: bytes) -> Json:
    """The subscription a notice is for."""
    try:
        return json.loads(data)["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def main(name: str, revision: str, log: str) -> None:
    """Over stdio: every message heard becomes a line of the file `log`."""
    rig = Rig(name, revision)
    rig.write = lambda data: _write(data + b"\n")  # type: ignore[method-assign]  # of this one process
    rig.die = lambda: os._exit(3)  # type: ignore[method-assign]
    with Path(log).open("ab", buffering=0) as heard:
        for line in sys.stdin.buffer:
            heard.write(line)
            rig.took(json.loads(line))


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def command(name: str, log: Path, revision: str = "2025-11-25") -> list[str]:
    """How to start a script as a process."""
    return [sys.executable, __file__, name, revision, str(log)]


if __name__ == "__main__":
    sys.modules["rigs"] = sys.modules["__main__"]  # where the scripts are registered
    import rigs_client  # noqa: F401
    import rigs_faults  # noqa: F401

    main(*sys.argv[1:4])
