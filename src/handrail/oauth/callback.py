"""Login in the browser: open the page, and receive the redirect on a local listener, once."""

from __future__ import annotations

import asyncio
import hmac
import webbrowser
from contextlib import suppress
from functools import partial
from urllib.parse import parse_qs, urlsplit

from handrail.errors import AuthorizationError
from handrail.oauth.discovery import validate_url

__all__ = ["RedirectListener", "open_browser"]

MAX_HEAD_BYTES = 16 * 1024
MAX_CONNECTIONS = 16
READ_SECONDS = 10
PAGE = """<!doctype html><meta charset="utf-8"><title>Handrail</title><p>{}</p>"""
HEADERS = (
    "Content-Type: text/html; charset=utf-8\r\nCache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n"
    "Content-Security-Policy: default-src 'none'; frame-ancestors 'none'\r\nX-Content-Type-Options: nosniff\r\n"
    "Connection: close\r\n"
)
RESPONSES = {
    200: ("OK", "The answer has arrived. You can close this window."),
    400: ("Bad Request", "This is not the answer to a question that was asked."),
    404: ("Not Found", "There is nothing here."),
}


def open_browser(url: str, host: str = "") -> bool:
    """Open `url` in the user's browser, if it is https, or http to this machine; for `OAuth(browser=…)`.

    With this function every server may have a page of its authorization server opened without a question.
    """
    validate_url(url, "the page to open", local=True)
    return webbrowser.open(url)


class RedirectListener:
    """HTTP listener on this machine for the redirect of the browser to `redirect` (http, an address or localhost).

    A request without the right path, host and `state` is refused, and the listener continues to wait.
    """

    def __init__(self, redirect: str) -> None:
        self.redirect = redirect
        self._state = ""
        self._redirect_url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}

    async def start(self, *, any_port: bool) -> None:
        """Listen; with `any_port` on another port if that of `redirect` is in use. `redirect` gets the port."""
        parts = urlsplit(self.redirect)
        address = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
        listen = partial(asyncio.start_server, self._serve, address, limit=MAX_HEAD_BYTES)
        try:
            try:
                self._server = await listen(port=parts.port or 0)
            except OSError:
                if not any_port:
                    raise
                self._server = await listen(port=0)
        except OSError as failed:
            raise AuthorizationError(
                f"the browser cannot come back to {parts.netloc}: {failed.strerror}", hint="Give another `redirect`."
            ) from failed
        port = self._server.sockets[0].getsockname()[1]
        name = parts.netloc.removesuffix(f":{parts.port}")
        self.redirect = parts._replace(netloc=f"{name}:{port}").geturl()

    async def wait(self, state: str) -> str:
        """Return the URL of the first request with `state`."""
        self._state = state
        return await self._redirect_url

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._connections:
                writer.transport.abort()
            await asyncio.gather(*filter(None, self._connections.values()), return_exceptions=True)
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back = ""
        self._connections[writer] = asyncio.current_task()
        try:
            if len(self._connections) <= MAX_CONNECTIONS:
                async with asyncio.timeout(READ_SECONDS):
                    status, back = self._check_request(await reader.readuntil(b"\r\n\r\n"))
                    words, page = RESPONSES[status]
                    body = PAGE.format(page).encode()
                    head = f"HTTP/1.1 {status} {words}\r\n{HEADERS}Content-Length: {len(body)}\r\n\r\n"
                    writer.write(head.encode() + body)
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):  # TimeoutError is an OSError
            pass
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            del self._connections[writer]
            if back and not self._redirect_url.done():
                self._redirect_url.set_result(back)

    def _check_request(self, head: bytes) -> tuple[int, str]:
        """Return the status to respond with, and the URL if it is the expected redirect."""
        first, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = first.partition(" ")
        target, _, version = rest.partition(" ")
        redirect_parts = urlsplit(self.redirect)
        path, _, query = target.partition("?")
        hosts = [line[5:].strip().lower() for line in lines if line[:5].lower() == "host:"]
        if (
            method != "GET"
            or not version.startswith("HTTP/1.")
            or path != redirect_parts.path
            or hosts != [redirect_parts.netloc]
        ):
            return 404, ""
        try:
            states = parse_qs(query, max_num_fields=32).get("state", [])
        except ValueError:
            states = []
        is_ours = len(states) == 1 and self._state and hmac.compare_digest(states[0].encode(), self._state.encode())
        if not is_ours:
            return 400, ""
        self._state = ""  # valid once
        return 200, f"{self.redirect}?{query}"
