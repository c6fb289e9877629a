"""Posting to an address the operator chose: no redirects, cookies, proxies of the environment, or long answers."""

from __future__ import annotations

from collections.abc import Mapping

from handrail.errors import TransportError

__all__ = ["post"]

MAX_ANSWER_BYTES = 64 * 1024
CONNECT_SECONDS = 10.0


async def post(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers by their names in lower case, and body of the answer; TransportError if there is none.

    How long an answer may take is up to whoever waits for it. A connection for each: they are rare.
    """
    import aiohttp

    session = aiohttp.ClientSession(
        headers={**headers, "Accept": "application/json", "Accept-Encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )
    try:
        async with session, session.post(url, data=body, allow_redirects=False) as response:
            answer = b""
            async for piece in response.content.iter_chunked(8192):
                answer += piece
                if len(answer) > MAX_ANSWER_BYTES:
                    raise TransportError(f"more than {MAX_ANSWER_BYTES:,} bytes")
            return response.status, {name.lower(): value for name, value in response.headers.items()}, answer
    except (aiohttp.ClientError, OSError, ValueError) as failed:  # their texts may have the whole address
        raise TransportError(type(failed).__name__) from None
