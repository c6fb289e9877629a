"""Short questions over HTTP, asked once however many wait for the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from msgspec import json

from handrail.errors import TransportError, missing_extra
from handrail.protocol.http_rules import is_secure_url

if TYPE_CHECKING:
    from aiohttp import BaseConnector

__all__ = ["SingleFlight", "check_secure_url", "exchange", "fetch_json", "post"]

MAX_RESPONSE_BYTES = 64 * 1024
MAX_FLIGHTS = 256
CONNECT_SECONDS = 10.0
HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity"}

T = TypeVar("T")


def check_secure_url(url: str) -> str:
    """`url`, if what comes from there can be believed and fetched: https, or http from this machine."""
    if not is_secure_url(url):
        name = urlsplit(url).hostname or ""
        raise ValueError(f"{name!r}: https is needed, or http to this machine, and no password in the URL")
    try:
        import aiohttp  # noqa: F401
    except ModuleNotFoundError:
        raise missing_extra("http", "asking an issuer needs aiohttp") from None
    return url


async def fetch_json(
    url: str,
    kind: type[T],
    deadline: float,
    *,
    form: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> T:
    """The JSON at `url`, or in answer to `form`; TransportError if there is no good one."""
    status, _, body = await exchange(url, deadline, data=form, headers=headers)
    if status != 200:
        raise TransportError(f"status {status}")
    try:
        return json.decode(body, type=kind)
    except (ValueError, RecursionError) as failed:
        raise TransportError(type(failed).__name__) from failed


async def post(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
    """As `exchange`; how long an answer may take is up to whoever waits for it."""
    return await exchange(url, None, data=body, headers=headers)


async def exchange(
    url: str,
    deadline: float | None,
    *,
    data: Mapping[str, str] | bytes | None = None,
    headers: Mapping[str, str] | None = None,
    connector: BaseConnector | None = None,
) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers by their names in lower case, and body of the answer to a GET, or to a POST of `data`.

    TransportError if there is none. No redirects, cookies, compression, or proxies of the environment. A connection
    for each: questions are rare, and one kept open fails now and then when it is used again.
    """
    import aiohttp

    session = aiohttp.ClientSession(
        headers={**HEADERS, **(headers or {})},
        timeout=aiohttp.ClientTimeout(total=deadline, sock_connect=None if deadline else CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        connector=connector,
    )
    method = "GET" if data is None else "POST"
    try:
        async with session, session.request(method, url, data=data, allow_redirects=False) as response:
            body = b""
            async for piece in response.content.iter_chunked(8192):
                body += piece
                if len(body) > MAX_RESPONSE_BYTES:
                    raise TransportError(f"more than {MAX_RESPONSE_BYTES:,} bytes")
            return response.status, {name.lower(): value for name, value in response.headers.items()}, body
    except (aiohttp.ClientError, OSError, ValueError, RecursionError) as failed:  # TimeoutError is an OSError
        raise TransportError(type(failed).__name__) from None  # their texts may have the whole address


class SingleFlight:
    """Questions under way: who asks one again waits for the same answer.

    A question is not its asker's: one who goes away does not take the answer from the others.
    """

    def __init__(self) -> None:
        self._tasks: dict[bytes | str, asyncio.Task[Any]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    async def do(self, key: bytes | str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer to `question`; TransportError if too many are under way, or this is closed."""
        if (task := self._tasks.get(key)) is None:
            if self._closed or len(self._tasks) >= MAX_FLIGHTS:
                raise TransportError("closed, or too much is asked at once")
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(partial(self._on_done, key))
        await asyncio.wait({task})
        if task.cancelled():
            raise TransportError("closed")
        result: T = task.result()
        return result

    def _on_done(self, key: bytes | str, task: asyncio.Task[Any]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # seen, also when nobody waits any more

    async def close(self) -> None:
        """End them all; those who wait are told."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
