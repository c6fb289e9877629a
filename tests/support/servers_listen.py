"""An ASGI application to listen for, and a process that does: `python servers_listen.py ADDRESS {"workers": 2}`.

The process tells on standard output what happens to it, a word a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from handrail.transports.http1.listen import Address, HttpLimits, tls_context
from handrail.transports.http1.server import run_http, serve_app

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MIB = 1024 * 1024


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class App:
    """What it does is in the path of the request."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()  # opened by `/open`, or at the end
        self.streams_end = asyncio.Event()
        self.requests: list[tuple[str, int]] = []  # path, size of the body
        self.disconnected: asyncio.Queue[str] = asyncio.Queue()
        self.scopes: list[Message] = []

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        self.scopes.append(scope)
        await getattr(self, f"do_{scope['path'].strip('/')}")(scope, receive, send)

    async def stop(self) -> None:
        say("stop")
        self.streams_end.set()
        self.gate.set()

    async def do_pid(self, scope: Message, receive: Receive, send: Send) -> None:
        await answer(send, f"{os.getpid()} {os.environ.get('HANDRAIL_KEY')}")

    async def do_echo(self, scope: Message, receive: Receive, send: Send) -> None:
        """The size of the body, how many pieces it came in, and its last bytes."""
        body, pieces, more = b"", 0, True
        size = 0
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected.put_nowait("echo")
                return
            pieces += 1
            size += len(message["body"])
            body = (body + message["body"])[-16:]
            more = message["more_body"]
        self.requests.append((scope["path"], size))
        await answer(send, f"{size} {'one' if pieces == 1 else 'many'} {body.decode()}")

    async def do_early(self, scope: Message, receive: Receive, send: Send) -> None:
        await answer(send, "too much", 413)

    async def do_wait(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers when the gate is opened."""
        say("running")
        await self.gate.wait()
        await answer(send, "waited")

    async def do_open(self, scope: Message, receive: Receive, send: Send) -> None:
        self.gate.set()
        await answer(send, "opened")

    async def do_until_gone(self, scope: Message, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected.put_nowait("until_gone")

    async def do_stream(self, scope: Message, receive: Receive, send: Send) -> None:
        """Open until the end, and then says so."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun\n", "more_body": True})
        await self.streams_end.wait()
        await send({"type": "http.response.body", "body": b"ended\n"})

    async def do_fifty(self, scope: Message, receive: Receive, send: Send) -> None:
        """50 MiB, a piece at a time."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(50 * 16):
            await send({"type": "http.response.body", "body": b"x" * (MIB // 16), "more_body": True})
        await send({"type": "http.response.body"})
        say("sent")

    async def do_fail(self, scope: Message, receive: Receive, send: Send) -> None:
        raise RuntimeError("on purpose")

    async def do_sized(self, scope: Message, receive: Receive, send: Send) -> None:
        await answer(send, "x" * int(scope["query_string"]))

    async def do_block(self, scope: Message, receive: Receive, send: Send) -> None:
        say("running")
        time.sleep(3600)  # noqa: ASYNC251 - the subject of the test

    async def do_stubborn(self, scope: Message, receive: Receive, send: Send) -> None:
        """Cannot be cancelled."""
        say("running")
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue


async def answer(send: Send, text: str, status: int = 200) -> None:
    body = text.encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def broken(scope: Message, receive: Receive, send: Send) -> None:
    """An application that does not start."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no database"})


@asynccontextmanager
async def listening(
    app: Any,
    address: str = "127.0.0.1:0",
    *,
    certificate: str | None = None,
    key: str | None = None,
    grace: float = 3.0,
    stop: Callable[[], Awaitable[None]] | None = None,
    **limits: Any,
) -> AsyncIterator[str]:
    """The address of an application that is served in this loop."""
    place, tls = Address.parse(address), tls_context(certificate, key)
    with place.listen() as found:
        stop = stop or app.stop
        async with serve_app(app, found, limits=HttpLimits(**limits), tls=tls, stop=stop, grace=grace):
            yield place.url(found, "http" if tls is None else "https")


def main(address: str, options: dict[str, Any]) -> None:
    app = App()
    limits = HttpLimits(**options.pop("limits", {}))
    fails = options.pop("broken", False)
    run_http(
        broken if fails else app,
        address,
        stop=app.stop,
        limits=limits,
        ready=lambda url: say("ready", url),
        **options,
    )
    say("returned")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
