"""Servers for the tests over HTTP: their tools wait for gates the test opens and leave marks the test reads.

They are served from the test's own process on a real socket, so that gates, marks and clocks are within reach; what is
about processes is served by `shop` in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import socket
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pytest
import uvicorn

from checks import check_message, strict_json
from handrail import Call, Server
from handrail.transports.http.endpoint import Endpoint
from patience import PATIENCE
from servers_listen import listening
from wires import ENVELOPE, MODERN, Json, Object
from wires_http import BOTH, WITH_HEADER, Headers, Reply, http, mirrored

KEY = sha256(b"one").digest()  # that several processes have
MIRRORED = {
    "type": "object",
    "properties": {
        "region": {"type": "string", "x-mcp-header": "Region"},
        "count": {"type": "integer", "x-mcp-header": "Count"},
        "dry": {"type": "boolean", "x-mcp-header": "Dry"},
        "place": {"type": "object", "properties": {"city": {"type": "string", "x-mcp-header": "City"}}},
        "plain": {"type": "string"},
    },
}


@dataclass
class Sum:
    sum: float


class Desk:
    """A server, and what its tools did."""

    def __init__(self, **options: Any) -> None:
        self.ran: Counter[str] = Counter()
        self.begun: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.stopped: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.ended: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.server = Server("desk", version="1", **{"keys": [KEY], "rates": None, **options})
        self.url = ""
        self.endpoint: Endpoint
        _add_tools(self)

    def grow(self, name: str) -> None:
        """Add a tool: the list changes."""

        async def grown() -> str:
            """Was not there before."""
            return "new"

        self.server.add(grown, name=name)

    async def wait(self, event: asyncio.Event) -> None:
        async with asyncio.timeout(PATIENCE):
            await event.wait()


def _add_tools(desk: Desk) -> None:
    server = desk.server

    @server.tool
    async def echo(text: str) -> str:
        """Give the text back."""
        desk.ran["echo"] += 1
        return text

    @server.tool
    async def add(a: float, b: float) -> Sum:
        """Add two numbers."""
        return Sum(a + b)

    @server.tool(name="größe")
    async def size(text: str) -> int:
        """How long a text is; its name is not ASCII."""
        desk.ran["größe"] += 1
        return len(text)

    @server.tool(input_schema=MIRRORED)
    async def mirrors(**arguments: Any) -> str:
        """Has arguments that stand in headers too."""
        desk.ran["mirrors"] += 1
        return json.dumps(arguments, sort_keys=True, ensure_ascii=False)

    @server.tool
    async def held(mark: str, call: Call, before: int = 1, after: int = 1) -> str:
        """Say some things, wait to be let go, say some more."""
        desk.ran["held"] += 1
        desk.begun[mark].set()
        try:
            for number in range(before):
                await call.progress(number + 1, message=mark)
            await desk.gates[mark].wait()
            for number in range(after):
                await call.progress(before + number + 1, message=mark)
            return mark
        except asyncio.CancelledError:
            desk.stopped[mark].set()
            raise
        finally:
            desk.ended[mark].set()

    @server.tool
    async def leaves(mark: str, call: Call) -> str:
        """Send the client away, and have more to say later."""
        await call.progress(1, message=mark)
        await call.close_stream()
        await desk.gates[mark].wait()
        await call.progress(2, message=mark)
        desk.ended[mark].set()
        return mark

    @server.tool
    async def talks(mark: str, call: Call) -> str:
        """Say all there is to say, while the list of tools changes."""
        await call.log("error", mark)
        await call.progress(1, message=mark)
        desk.grow(f"by {mark}")
        await call.log("debug", mark)
        await desk.gates[mark].wait()
        await call.progress(2, message=mark)
        return mark

    @server.tool
    async def chatters(times: int, call: Call) -> int:
        """Say a lot."""
        for number in range(times):
            await call.progress(number, message="x" * 100)
        return times

    @server.tool
    async def asks(call: Call) -> str:
        """Ask for a name."""
        wanted = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        answer = await call.ask("Your name?", wanted)
        return f"{answer.action} {answer.content['name'] if answer.content else '-'}"

    @server.tool(
        input_schema={"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    )
    async def needs(call: Call, region: str = "") -> str:
        """Go on only with a capability the client seldom has."""
        call.require("sampling")
        return "fine"


def shop() -> Server:
    """For a process of its own."""
    server = Server("shop", version="1")

    @server.tool
    async def echo(text: str) -> str:
        """Give the text back."""
        return text

    return server


@asynccontextmanager
async def served(endpoint: Endpoint, listener: str = "handrail", **limits: Any) -> AsyncIterator[str]:
    """The address of an endpoint served from here: by our own listener, or by uvicorn as it comes."""
    async with listening(endpoint, **limits) if listener == "handrail" else _by_uvicorn(endpoint, limits) as url:
        try:
            yield f"{url}/mcp"
        finally:
            await endpoint.stop()  # uvicorn would wait for streams to end by themselves


@asynccontextmanager
async def _by_uvicorn(endpoint: Endpoint, limits: Object) -> AsyncIterator[str]:
    found = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(endpoint, log_level="error", http="httptools", **limits))
    task = asyncio.create_task(server.serve(sockets=[found]))
    try:
        yield f"http://127.0.0.1:{found.getsockname()[1]}"
    finally:
        server.should_exit = True
        async with asyncio.timeout(PATIENCE):
            await task


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that is seen from inside alone, such as that the server has noticed a broken connection."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE):
        while not condition():
            turn = loop.create_future()
            loop.call_soon(turn.set_result, None)
            await turn


OPEN: list[Reply] = []
"""Every response a test has asked for; closed after it."""


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    """For every module that imports it."""
    yield
    for reply in OPEN:
        await reply.gone()
    OPEN.clear()


async def fetch(
    url: str, method: str, headers: Headers | list[tuple[str, str]] | None = None, body: bytes | None = None
) -> Reply:
    """As `http`, with the connection closed when the test is over."""
    reply = await http(url, method, headers or {}, body)
    OPEN.append(reply)
    return reply


class Client:
    """A client of one revision that writes every header itself; a header given as None is left out."""

    def __init__(self, url: str, revision: str) -> None:
        self.url = url
        self.revision = revision
        self.session = ""
        self.asked: dict[Json, str] = {}

    @property
    def stateless(self) -> bool:
        return self.revision in MODERN

    def message(self, ident: Json, method: str, params: Object | None = None, **meta: Json) -> Object:
        """A request; in a stateless revision with its envelope."""
        own: Object = dict(meta)
        if self.stateless:
            own = {ENVELOPE + "protocolVersion": self.revision, ENVELOPE + "clientCapabilities": {}, **own}
        whole = {**(params or {}), **({"_meta": own} if own else {})}
        self.asked[ident] = method
        return {"jsonrpc": "2.0", "id": ident, "method": method, **({"params": whole} if whole else {})}

    def call(self, ident: Json, name: str, arguments: Object | None = None, **meta: Json) -> Object:
        return self.message(ident, "tools/call", {"name": name, "arguments": arguments or {}}, **meta)

    def headers(self, message: Json = None, **changes: str | None) -> Headers:
        own: dict[str, str | None] = {"Content-Type": "application/json", "Accept": BOTH}
        if self.session:
            own["Mcp-Session-Id"] = self.session
        if self.stateless or (self.session and self.revision in WITH_HEADER):
            own["MCP-Protocol-Version"] = self.revision
        if self.stateless:
            own |= mirrored(message)
        own |= {name.replace("_", "-"): value for name, value in changes.items()}
        return {name: value for name, value in own.items() if value is not None}

    async def post(self, message: Json, **changes: str | None) -> Reply:
        body = message if isinstance(message, bytes) else json.dumps(message, ensure_ascii=False).encode()
        return await fetch(self.url, "POST", self.headers(message, **changes), body)

    async def get(self, **changes: str | None) -> Reply:
        wanted: dict[str, str | None] = {"Accept": "text/event-stream", "Content-Type": None, **changes}
        return await fetch(self.url, "GET", self.headers(**wanted))

    async def delete(self, **changes: str | None) -> Reply:
        return await fetch(self.url, "DELETE", self.headers(**{"Content-Type": None, "Accept": None, **changes}))

    async def open(self, capabilities: Object | None = None) -> Client:
        """Shake hands where the revision does; for 2024 too, over the one URL."""
        if self.stateless:
            return self
        params = {
            "protocolVersion": self.revision,
            "capabilities": capabilities or {},
            "clientInfo": {"name": "rig", "version": "1"},
        }
        reply = await self.post(self.message("open", "initialize", params))
        assert reply.status == 200
        self.session = reply.headers["mcp-session-id"]
        assert (await self.read(reply))["result"]["protocolVersion"] == self.revision
        reply = await self.post({"jsonrpc": "2.0", "method": "notifications/initialized"})
        assert (reply.status, await reply.body()) == (202, b"")
        return self

    def checked(self, data: bytes) -> Json:
        message = strict_json(data)
        for each in message if isinstance(message, list) else [message]:
            check_message(each, self.revision, self.asked.get(each.get("id")) if "method" not in each else None)
        return message

    async def read(self, reply: Reply) -> Json:
        """The one message of a response, however it came; its notifications are left out."""
        if reply.is_stream:
            return [each for each in await self.messages(reply) if "method" not in each][-1]
        assert reply.headers.get("content-type") == "application/json", (reply.status, reply.headers)
        return self.checked(await reply.body())

    async def messages(self, reply: Reply) -> list[Object]:
        """All messages of a stream, to its end."""
        return [self.checked(each["data"].encode()) for each in await rest(reply.events()) if each.get("data")]

    async def ask(self, message: Json, **changes: str | None) -> tuple[int, Json]:
        reply = await self.post(message, **changes)
        return reply.status, await self.read(reply)


async def rest(events: AsyncIterator[Headers]) -> list[Headers]:
    """What a stream still says until it ends."""
    async with asyncio.timeout(PATIENCE):
        return [event async for event in events]


async def take(events: AsyncIterator[Headers], count: int = 1) -> list[Headers]:
    """The next events that carry a message."""
    taken: list[Headers] = []
    async with asyncio.timeout(PATIENCE):
        while len(taken) < count:
            event = await anext(events)
            if event.get("data"):
                taken.append(event)
    return taken


def data(event: Headers) -> Json:
    return strict_json(event["data"].encode())


def encoded(text: str) -> str:
    """A header's value in the form for what is not plain ASCII."""
    return f"=?base64?{b64encode(text.encode()).decode()}?="


def code(answer: Object) -> Json:
    return answer["error"]["code"]


def methods(messages: Iterable[Object]) -> list[str]:
    return [each["method"] for each in messages if "method" in each]
