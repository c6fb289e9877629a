"""Results made to be slow to clean: how long each takes, and how long another caller waits meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from handrail import Server, Text
from handrail.guards.sanitize import Sanitizer
from handrail.model import ToolResult
from handrail.testing import Peer

__all__ = ["CORPUS", "longest_wait_ms"]

CHARACTERS = 3_000_000
TOKEN = "ghp_" + "Z9y8X7w6V5" * 4
UNITS = {
    "prose": "the quick brown fox jumps over the lazy dog. ",
    "mail addresses": "ada.lovelace@example.com, ",
    "addresses": "https://example.com:443/a/b ",
    "addresses with passwords": "https://ada:p4ss9@example.com/a ",
    "beginnings of addresses": "://a:",
    "tokens on one line": f"{TOKEN} ",
    "tokens on many lines": f"{TOKEN}\n",
    "web tokens": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc ",
    "parts of web tokens": ".eyJaaaaaaaa",
    "bearer": "Bearer Z9y8X7w6V5Z9y8X7w6V5/9 ",
    "keys": "-----BEGIN PRIVATE KEY-----\n" + "A" * 64 + "\n",
    "beginnings of keys": "-----BEGIN PRIVATE KEY-----",
    "keys without an end": "-----BEGIN PRIVATE KEY-----\nAb: c",
    "key ids": "AKIAQWERTYUIOPASDFG2 ",
    "beginnings of key ids": "AKIA",
    "hyphens": "-_",
    "escapes": "\x1b",
    "colours": "\x1b[31m",
    "titles": "\x1b]0;a\x07",
    "titles without an end": "\x1b]0;",
    "returns": "\r",
    "zero width": "a\u200b",
    "joiners": "\u200d",
    "tags": "\U000e0041",
    "direction": "a\u202eb",
    "families": "👩‍💻",
    "halves of characters": "a\ud83d",
    "all of it": f"ü\u200b {TOKEN} a@b://c:d@e \x1b[1m",
}


def _text(unit: str) -> Callable[[], Any]:
    return lambda: unit * (CHARACTERS // len(unit))


CORPUS: dict[str, Callable[[], Any]] = {
    **{name: _text(unit) for name, unit in UNITS.items()},
    "members with a token": lambda: {f"k{at}": f"{TOKEN}{at}" for at in range(30_000)},
    "a list of tokens": lambda: [TOKEN] * 60_000,
    "hidden keys": lambda: {f"k{at}\u200b": at for at in range(100_000)},
    "members, one with a token": lambda: {**{f"k{at}": f"v{at}" for at in range(200_000)}, "t": TOKEN},
    "many blocks": lambda: [Text(f"{at}\u200b") for at in range(60_000)],
}


def longest_wait_ms() -> tuple[str, float]:
    """The longest time in which the event loop of a server did not turn, and the result that was cleaned then."""
    waits = {name: asyncio.run(_wait_ms(make())) for name, make in CORPUS.items()}
    worst = max(waits, key=waits.__getitem__)
    return worst, waits[worst]


async def _wait_ms(value: Any) -> float:
    server = Server("hostile", rates=None)

    @server.tool
    async def hostile() -> Any:
        return value

    async with server.serving(), Peer(server.connect(), timeout=600) as peer:
        slow = asyncio.ensure_future(peer.request("tools/call", {"name": "hostile", "arguments": {}}))
        longest, before = 0.0, time.perf_counter()
        while not slow.done():
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
        await asyncio.wait([slow])
    return longest * 1000


def _cpu_ms(value: Any) -> float:
    result = ToolResult([Text(value)]) if isinstance(value, str) else ToolResult(structured=value)
    if isinstance(value, list) and isinstance(value[0], Text):
        result = ToolResult(value)
    begun = time.process_time()
    Sanitizer().clean("tool", result)
    return (time.process_time() - begun) * 1000


if __name__ == "__main__":
    for name, make in CORPUS.items():
        print(f"| {name} | {_cpu_ms(make()):.0f} | {asyncio.run(_wait_ms(make())):.0f} |", flush=True)
