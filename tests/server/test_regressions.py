"""What a careful reader tripped over once: each of these was wrong."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

import pydantic
import pytest

from handrail import Call, Form, Image, Limits, RemoteProtocolError, SchemaError, Server, ToolError
from handrail.testing import Peer
from patience import PATIENCE

NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ASKS: dict[str, Any] = {"elicitation": {}}


class Leaky(pydantic.BaseModel):
    a: int = 1

    @pydantic.computed_field  # type: ignore[prop-decorator]  # pydantic's own advice
    @property
    def b(self) -> int:
        raise ValueError("the password is hunter2")


class Colour(str, Enum):  # noqa: UP042  # this kind shows another text than it is
    RED = "red"


async def test_what_a_value_raises_while_it_is_written_stays_in_the_log() -> None:
    server = Server("s")

    @server.tool(output_schema=None)
    async def leaks() -> Any:
        return Leaky()

    async with Peer(server) as peer:
        result = await peer.call("leaks")
        assert result.is_error
        assert "hunter2" not in str(peer.wire)


async def test_a_given_up_call_has_cleaned_up_before_the_lifespan_closes() -> None:
    order: list[str] = []

    @contextlib.asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[str]:
        yield "open"
        order.append("closed")

    server = Server("s", lifespan=lifespan, limits=Limits(grace_seconds=0.05))

    @server.tool
    async def waits(call: Call) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            order.append(f"cleaned up while {call.state}")
        return "never"

    async with Peer(server) as peer:
        await peer.send(b'{"jsonrpc":"2.0","id":99,"method":"tools/call","params":{"name":"waits"}}')
    assert order == ["cleaned up while open", "closed"]


async def test_when_one_of_several_answers_does_not_fit_the_others_are_withdrawn() -> None:
    server = Server("s")
    never = asyncio.Event()

    @server.tool
    async def asks(call: Call) -> str:
        await call.ask_all({"one": Form("1?", NAME), "two": Form("2?", NAME)})
        return "never"

    async def answers(method: str, params: dict[str, Any]) -> dict[str, Any]:
        if params["message"] == "2?":
            await never.wait()
        return {"action": "accept", "content": {"name": 5}}

    async with Peer(server, capabilities=ASKS, answers=answers) as peer:
        result = await peer.call("asks")
        assert result.is_error
        assert (await peer.notice("notifications/cancelled"))["params"]["requestId"] == 2


async def test_a_blocking_call_has_the_same_members() -> None:
    server = Server("s")

    @server.tool
    def looks(call: Call) -> str:
        call.blocking.require("elicitation")
        return f"{call.blocking.cancelled} {call.blocking.deadline == call.deadline}"

    async with Peer(server, capabilities=ASKS) as peer:
        assert (await peer.call("looks")).text == "False True"


async def test_none_means_not_given() -> None:
    # As code without hints does it.
    nothing: dict[str, Any] = {"title": None, "icons": None}
    more: dict[str, Any] = {"description": None, "annotations": None}
    server = Server("s", **nothing)

    async def tool() -> str:
        """Said here."""
        return ""

    server.add(tool, **nothing, **more)
    async with Peer(server) as peer:
        assert b"null" not in b"".join(peer.wire)
        assert (await peer.tools())[0].description == "Said here."
        assert b"null" not in b"".join(peer.wire)


@pytest.mark.parametrize("options", [{"meta": {"a": object()}}, {"title": 5}, {"icons": [{"src": "javascript:1"}]}])
def test_a_tool_that_would_break_the_list_is_refused(options: dict[str, Any]) -> None:
    async def tool() -> None:
        """Nothing."""

    with pytest.raises(SchemaError):
        Server("s").add(tool, **options)


async def test_values_arrive_as_what_they_are() -> None:
    server = Server("s")

    @server.tool
    async def colour() -> str:
        return Colour.RED

    @server.tool
    async def pictures() -> list[Image]:
        return []

    @server.tool(dangerous="strangers")
    async def risky() -> str:
        raise ToolError("no", error="other")

    async with Peer(server) as peer:
        assert (await peer.call("colour")).text == "red"
        assert (await peer.call("pictures")).content == []
        assert "io.handrail/risk" in ((await peer.call("risky")).meta or {})
    async with Peer(server, revision="2024-10-07") as old:
        assert (await old.request("tools/call", {"name": "risky"}))["result"]["toolResult"] == {"error": "no"}


async def test_a_batch_that_would_be_too_long_comes_in_pieces() -> None:
    server = Server("s", limits=Limits(max_message_bytes=1000))

    @server.tool
    async def text() -> str:
        return "x" * 400

    async with Peer(server, revision="2025-03-26") as peer:
        call = b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"text"}}'
        before = len(peer.wire)
        await peer.send(b"[" + b",".join(call % n for n in (11, 12, 13)) + b"]")
        await peer.request("ping")
        assert all(len(message) <= 1000 for message in peer.wire)
        assert len(peer.wire) - before == 4


async def test_an_include_that_fails_leaves_nothing_behind() -> None:
    ours, theirs = Server("ours"), Server("theirs")

    async def tool() -> None:
        """Nothing."""

    ours.add(tool, name="b")
    theirs.add(tool, name="a")
    theirs.add(tool, name="b")
    with pytest.raises(SchemaError, match="exists already"):
        ours.include(theirs)
    assert [each.name for each in ours.tools] == ["b"]
    ours.include(theirs, prefix="t.")
    ours.remove("t.a")
    theirs.remove("a")  # it is not there any more: no harm
    assert [each.name for each in ours.tools] == ["b", "t.b"]


async def test_the_peer_tells_what_is_wrong() -> None:
    server = Server("s", revisions=["2025-11-25"])

    @server.tool
    async def asks(call: Call) -> str:
        return (await call.ask("?", NAME)).action

    def answers(method: str, params: dict[str, Any]) -> dict[str, Any]:
        raise LookupError("a mistake in the test itself")

    async with Peer(server, capabilities=ASKS, answers=answers) as peer:
        with pytest.raises(LookupError, match="a mistake in the test"):
            await peer.call("asks")
    with pytest.raises(RemoteProtocolError, match="asked for 2024-11-05, the server speaks 2025-11-25"):
        async with Peer(server, revision="2024-11-05"):
            pass
    with pytest.raises(ValueError, match="known are 2024-10-07"):
        Peer(server, revision="1999-01-01")


def test_a_start_that_fails_says_so() -> None:
    program = """
import contextlib, threading
from handrail import Server
@contextlib.asynccontextmanager
async def lifespan(server):
    threading.Thread(target=threading.Event().wait).start()
    raise RuntimeError("no database")
    yield
Server("s", lifespan=lifespan).run()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    assert "no database" in done.stderr
