"""One caller's result does not hold the others up while it is cleaned, whatever is in it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from handrail import Call, Server, Text, ToolResult
from handrail.guards.sanitize import Sanitizer
from handrail.testing import Peer
from handrail.text.controls import MASK
from requirements import requirement

TOKEN = "ghp_" + "Z9y8X7w6V5" * 4
CHARACTERS = 6_000_000


def much(unit: str, characters: int = CHARACTERS) -> str:
    return unit * (characters // len(unit))


HOSTILE: dict[str, Callable[[], Any]] = {
    "addresses with passwords": lambda: much("https://ada:p4ss9@example.com/a "),
    "tokens on one line": lambda: much(f"{TOKEN} "),
    "tokens on many lines": lambda: much(f"{TOKEN}\n"),
    "web tokens": lambda: much("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc "),
    "keys": lambda: much("-----BEGIN PRIVATE KEY-----\n" + "A" * 64 + "\n"),
    "keys without an end": lambda: much("-----BEGIN PRIVATE KEY-----\nAb: c"),
    "almost tokens": lambda: much("AKIAQWERTYUIOPASDFG2AKIA "),
    "zero width": lambda: much("a\u200b"),
    "joiners": lambda: much("\u200d"),
    "tags": lambda: much("\U000e0041"),
    "titles of terminals": lambda: much("\x1b]0;a\x07"),
    "titles without an end": lambda: much("\x1b]0;"),
    "returns": lambda: much("\r"),
    "members with a token": lambda: {f"k{at}": f"{TOKEN}{at}" for at in range(20_000)},
    "hidden keys": lambda: {f"k{at}\u200b": at for at in range(60_000)},
    "a list of tokens": lambda: [TOKEN] * 30_000,
    "many blocks": lambda: [Text(f"{at}\u200b") for at in range(40_000)],
    "notes on blocks": lambda: [Text("x", meta={"note": TOKEN}) for _ in range(20_000)],
}


def serving(make: Callable[[], Any]) -> Server:
    server, value = Server("hostile", rates=None), make()  # rates: what is asked here is asked as often as it can be

    @server.tool
    async def hostile() -> Any:
        return value

    @server.tool
    async def logs(call: Call) -> str:
        await call.log("error", value if isinstance(value, str | dict) else [])
        return "logged"

    @server.tool
    async def echo(text: str) -> str:
        return text

    return server


@requirement("SRV-604", everywhere=True)
@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
async def test_another_caller_is_answered_while_a_result_is_cleaned(make: Callable[[], Any]) -> None:
    server = serving(make)
    async with server.serving(), Peer(server.connect(), timeout=120) as one, Peer(server.connect()) as other:
        slow = asyncio.ensure_future(one.request("tools/call", {"name": "hostile", "arguments": {}}))
        await asyncio.sleep(0)  # it is asked
        for at in range(3):
            assert (await other.call("echo", {"text": f"{at}"})).text == f"{at}"
            assert not slow.done(), at
        await slow


@requirement("SRV-604", everywhere=True)
@pytest.mark.parametrize("name", ["tokens on one line", "zero width", "members with a token"])
async def test_another_caller_is_answered_while_a_log_message_is_cleaned(name: str) -> None:
    server = serving(HOSTILE[name])
    async with server.serving(), Peer(server.connect(), timeout=120) as one, Peer(server.connect()) as other:
        slow = asyncio.ensure_future(one.request("tools/call", {"name": "logs", "arguments": {}}))
        await asyncio.sleep(0)
        for at in range(3):
            assert (await other.call("echo", {"text": f"{at}"})).text == f"{at}"
            assert not slow.done(), at
        await slow


@requirement("SRV-604", everywhere=True)
async def test_inspectors_stay_in_the_thread_of_the_loop() -> None:
    threads: list[threading.Thread] = []

    def inspects(tool: str, result: ToolResult) -> None:
        threads.append(threading.current_thread())

    server = Server("inspected", inspectors=[inspects])

    @server.tool
    async def says() -> str:
        return much(f"{TOKEN}\n", 100_000)

    async with Peer(server) as peer:
        assert (await peer.call("says")).text.count(MASK) == 100_000 // len(f"{TOKEN}\n")
    assert threads == [threading.current_thread()]


@requirement("SRV-604", everywhere=True)
async def test_an_inline_tool_and_one_on_record_are_cleaned_off_the_loop_too(tmp_path: Any) -> None:
    server = Server("recorded", audit=tmp_path / "calls.db")

    @server.tool(inline=True)
    def says() -> str:
        return much("a\u200b", 200_000)

    async with Peer(server) as peer:
        result = await peer.call("says")
        assert result.text == "a" * 100_000 and result.meta == {
            "io.handrail/sanitized": {"invisible character": 100_000}
        }


PIECES = {
    "colours": ("\x1b[31mred\x1b[0m ", "red "),
    "titles": ("a\x1b]0;title\x1b\\b\x1b]2;t\x07c", "abc"),
    "returns": ("a\r\nb\rc", "a\r\nb\nc"),
    "families": ("👩‍💻👨‍👩‍👧‍👦", "👩‍💻👨‍👩‍👧‍👦"),
    "hearts and keys": ("❤️1️⃣", "❤️1️⃣"),
    "joiners": ("a\u200db\u200cc", "abc"),
    "scripts": ("می‌خواهم क्‍ष ", "می‌خواهم क्‍ष "),
    "tokens": (f"{TOKEN} ", f"ghp_{MASK} "),
    "tokens in quotes": (f'"{TOKEN}",', f'"ghp_{MASK}",'),
    "passwords": ("x://u:p4ss9@h ", f"x://u:{MASK}@h "),
    "bearer": (f"Bearer {TOKEN[4:]}/9;", f"Bearer {MASK};"),
    "keys": (
        f"-----BEGIN PRIVATE KEY-----\n{'A' * 64}\n-----END PRIVATE KEY-----\n",
        f"-----BEGIN PRIVATE KEY-----{MASK}\n",
    ),
    "known": ("it is hunter2-swordfish-9. ", f"it is {MASK}. "),
}


@requirement("SRV-604", "P-34", everywhere=True)
@pytest.mark.parametrize(("piece", "left"), PIECES.values(), ids=PIECES)
def test_a_long_text_is_cleaned_as_its_pieces_are(piece: str, left: str) -> None:
    """Whatever is handled part by part: no part begins or ends within what belongs together."""
    by = Sanitizer(secrets=["hunter2-swordfish-9"])
    for shift in range(len(piece)):
        times = 40_000 // len(piece)
        result, _ = by.clean("tool", ToolResult([Text("." * shift + piece * times)]))
        assert result.text == "." * shift + left * times, shift
        again, none = by.clean("tool", result)
        assert again is result and none == ()


def test_what_is_looked_at_in_another_thread_is_what_leaves() -> None:
    """An author's code may change its own objects meanwhile."""
    data: dict[str, Any] = {"list": [{"a": "b"}], "secret": TOKEN}
    given = ToolResult([Text(json.dumps(data, indent=1))], structured=data, meta={"m": {"n": 1}})
    walk = Sanitizer().scan("tool", given, copies=True)
    assert isinstance(walk.outcome, ToolResult)
    data["list"][0]["a"] = TOKEN
    assert walk.outcome.structured == {"list": [{"a": "b"}], "secret": f"ghp_{MASK}"}
    assert json.loads(walk.outcome.text) == walk.outcome.structured
    assert walk.outcome.meta == given.meta and walk.outcome.meta is not given.meta
