"""A console on a real socket, and its page without a browser: the cookie, the API, the event stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from handrail import Server
from handrail.console import Console
from handrail.console.access import new_code
from patience import PATIENCE

Object = dict[str, Any]


class Refused(AssertionError):
    """The console answered with an error."""

    def __init__(self, status: int, body: Object) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.error: str = body["error"]
        self.problems: list[Object] = body.get("problems", [])


class Page:
    """One window of somebody who has signed in."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._csrf = ""
        self._events: list[tuple[str, Any]] = []
        self._news = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def sign_in(self, code: str) -> Object:
        me: Object = await self.post("sign-in", code=code)
        self._csrf = me["csrf"]
        return me

    async def get(self, path: str, **query: Any) -> Any:
        return json.loads(await self.raw(path, **query))

    async def raw(self, path: str, **query: Any) -> bytes:
        async with self._session.get(f"{self._url}/api/{path}", params=query, headers=self._held()) as response:
            body = await response.read()
            if response.status != 200:
                raise Refused(response.status, json.loads(body))
            return body

    async def post(self, path: str, **body: Any) -> Any:
        parts = urlsplit(self._url)
        headers = {"origin": f"{parts.scheme}://{parts.netloc}", **self._held()}
        async with self._session.post(f"{self._url}/api/{path}", json=body, headers=headers) as response:
            answer = await response.json()
            if response.status != 200:
                raise Refused(response.status, answer)
            return answer

    def _held(self) -> dict[str, str]:
        return {"x-handrail-csrf": self._csrf}

    async def listen(self) -> Object:
        """Open the event stream; what it began with."""
        self._task = asyncio.create_task(self._read())
        found: Object = await self.event("hello")
        return found

    async def event(self, name: str, **members: Any) -> Any:
        """The next event of this name with these members, or one that has come before and was not taken yet."""

        def fitting() -> int | None:
            for at, (kind, data) in enumerate(self._events):
                if kind == name and all(data.get(key) == value for key, value in members.items()):
                    return at
            return None

        async with asyncio.timeout(PATIENCE), self._news:
            await self._news.wait_for(lambda: fitting() is not None)
            at = fitting()
            assert at is not None
            return self._events.pop(at)[1]

    async def _read(self) -> None:
        async with self._session.get(f"{self._url}/api/events", headers=self._held()) as response:
            name = ""
            async for raw in response.content:
                line = raw.decode().rstrip("\n")
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    async with self._news:
                        self._events.append((name, json.loads(line[6:])))
                        self._news.notify_all()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, aiohttp.ClientError):
                await self._task
        await self._session.close()


class Rig:
    def __init__(self, console: Console) -> None:
        self.console = console
        self._pages: list[Page] = []

    async def page(self, who: str = "local", roles: str = "view call approve manage") -> Page:
        """Another window, for somebody who has just signed in."""
        code = new_code()
        await self.console.context.sessions.add_code(code, who, roles.split())
        jar = aiohttp.CookieJar(unsafe=True)  # which is: also of numbers
        page = Page(aiohttp.ClientSession(cookie_jar=jar, read_bufsize=32 * 1024 * 1024), self.console.url)
        self._pages.append(page)
        await page.sign_in(code)
        return page

    async def close(self) -> None:
        for page in self._pages:
            await page.close()


@asynccontextmanager
async def consoled(server: Server, **options: Any) -> AsyncIterator[Rig]:
    """A server that serves, with its console."""
    console = Console(server, **options)
    with console.listening("127.0.0.1:0"):
        async with server.serving(), console.serving():
            rig = Rig(console)
            try:
                yield rig
            finally:
                await rig.close()
