"""Attacks on the guards that once worked."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from handrail import Call, Principal, Server, ToolResult
from handrail.approvals.queue import Approvals
from handrail.audit.reader import TrailFile
from handrail.errors import RemoteProtocolError
from handrail.guards.limits import Rates, ToolRate
from handrail.guards.sanitize import Sanitizer
from handrail.model import Text
from handrail.stores.memory import MemoryStore
from handrail.testing import Peer
from requirements import requirement

Object = dict[str, Any]
LATEST = "2025-11-25"
KEY = "-----BEGIN PRIVATE KEY-----"


@requirement("P-34", everywhere=True)
@pytest.mark.parametrize(
    "text",
    [
        KEY + "\nAb-c: x" * 60,
        KEY + ("\nA: " + "b" * 150) * 200,
        "".join(f"{KEY}\nX-y: {'z' * 30}\n" for _ in range(200)),
    ],
)
def test_p34_no_text_takes_the_sanitizer_long(text: str) -> None:
    began = time.process_time()
    Sanitizer(secrets=["canary-8d1f2c"]).clean("tool", ToolResult([Text(text)]))
    assert time.process_time() - began < 1.0  # it was half a minute


@requirement("P-34", everywhere=True)
def test_p34_keys_that_become_equal_cost_no_more_than_others() -> None:
    hidden = "\u200b\u2060\u2061\u2062"
    spoilt = {"a" + "".join(hidden[number >> 2 * at & 3] for at in range(6)): number for number in range(3000)}
    began = time.process_time()
    made, _ = Sanitizer().clean("tool", ToolResult([], spoilt))
    assert time.process_time() - began < 2.0 and type(made.structured) is dict and len(made.structured) == 3000


@requirement("P-34", everywhere=True)
def test_p34_a_member_called_blob_is_cleaned_like_any_other() -> None:
    made, found = Sanitizer(secrets=["canary-8d1f2c"]).clean(
        "tool", ToolResult([], {"blob": {"blob": "canary-8d1f2c"}})
    )
    assert found and made.structured == {"blob": {"blob": "****"}}


def asking(**options: Any) -> tuple[Server, list[Object]]:
    server, ran = Server("s", store=MemoryStore(), **options), []

    @server.tool(annotations={"destructiveHint": True}, extra="allow")
    async def wipe(call: Call) -> str:
        ran.append(call.arguments)
        return "wiped"

    return server, ran


@requirement("P-19")
@pytest.mark.parametrize(
    "arguments",
    [
        {"a": f"{KEY} X-y: ", "path": "/etc", "b": "A" * 64},
        {"note": "n" * 50_000, "path": "/etc"},
        {"token": "ghp_" + "a1B2" * 9, "path": "/etc"},
    ],
)
async def test_p19_what_is_agreed_to_was_shown_all_of_it(arguments: Object, ran: Any) -> None:
    server, _ = asking()
    asked: list[str] = []

    def answers(method: str, params: Object) -> Object:
        asked.append(params["message"])
        return {"action": "decline"}

    async with Peer(server, revision=LATEST, capabilities={"elicitation": {}}, answers=answers) as peer:
        ran(LATEST, "memory")
        await peer.call("wipe", arguments)
    shown = json.loads(asked[0].splitlines()[1])
    assert shown == arguments
    assert next(iter(shown)) == "path" or len(json.dumps(arguments)) < 1000


@requirement("P-19")
async def test_p19_arguments_nobody_could_read_are_not_asked_about(ran: Any) -> None:
    server, done = asking(approvals=Approvals(wait=0.01, round=0.01))
    async with Peer(server, revision=LATEST) as peer:
        ran(LATEST, "memory")
        refused = await peer.call("wipe", {"note": "n" * 200_000})
    assert refused.is_error and "nobody reads more" in refused.text and done == []
    assert await server.approvals.open() == []


@requirement("P-19", "P-25")
async def test_p19_the_yes_of_one_without_a_name_is_not_that_of_another(ran: Any) -> None:
    server, done = asking(approvals=Approvals(wait=0.01, round=0.01, by="operator"))
    async with server.serving():
        for address in ("192.0.2.1", "192.0.2.2"):
            async with Peer(server, revision=LATEST, principal=Principal("anonymous")) as peer:
                ran(LATEST, "memory")
                peer._channel._conversation.address = address  # type: ignore[attr-defined]  # as a listener says it
                if address.endswith("1"):
                    await peer.call("wipe", {"x": 1})
                    (waiting,) = await server.approvals.open()
                    await server.approvals.decide(waiting.id, True, by="operator", remember=60)
                else:
                    assert (await peer.call("wipe", {"x": 1})).is_error
    assert done == []


@requirement("P-15")
async def test_p15_of_many_calls_cancelled_at_once_each_has_its_outcome(tmp_path: Path, ran: Any) -> None:
    # rates: what is attacked is the audit, as fast as it can be
    server = Server("s", audit=tmp_path / "audit.db", rates=None)
    begun = asyncio.Event()

    @server.tool
    async def waits(last: bool = False) -> str:
        if last:
            begun.set()
        await asyncio.Event().wait()
        return ""

    number = 200
    async with Peer(server, revision=LATEST) as peer:
        ran(LATEST, "memory")
        for ident in range(number):
            params = {"name": "waits", "arguments": {"last": ident == number - 1}}
            await peer.send(
                json.dumps({"jsonrpc": "2.0", "id": ident, "method": "tools/call", "params": params}).encode()
            )
        await begun.wait()
        for ident in range(number):
            await peer.notify("notifications/cancelled", {"requestId": ident})
    records = [json.loads(line) for _, line in TrailFile(tmp_path / "audit.db").lines()]
    events = [each["event"] for each in records]
    assert events.count("intent") == events.count("outcome") == number and "gap" not in events


@requirement("P-30", "SRV-603")
async def test_p30_a_thread_nobody_waits_for_keeps_its_place(ran: Any) -> None:
    one = Rates(tools={"sleeps": ToolRate(concurrent=1)})
    server, wake, runs = Server("s", rates=one), threading.Event(), threading.Semaphore(0)

    @server.tool
    def sleeps() -> str:
        runs.release()
        wake.wait(30)
        return "slept"

    async with Peer(server, revision=LATEST) as peer:
        ran(LATEST, "memory")
        message = {"jsonrpc": "2.0", "id": "a", "method": "tools/call", "params": {"name": "sleeps", "arguments": {}}}
        await peer.send(json.dumps(message).encode())
        await asyncio.to_thread(runs.acquire)
        await peer.notify("notifications/cancelled", {"requestId": "a"})
        assert "Too many" in (await peer.call("sleeps")).text
        wake.set()
        while (await peer.call("sleeps")).is_error:
            pass


@requirement("P-33", "P-34")
async def test_p33_a_definition_and_a_log_are_cleaned_too(caplog: pytest.LogCaptureFixture, ran: Any) -> None:
    server = Server("s", secrets=["canary-8d1f2c"])

    @server.tool(description="Uses canary-8d1f2c\x1b[31m")
    async def spoilt(key: str = "canary-8d1f2c") -> str:
        raise ValueError("a\x1b]0;b\x07\u202e")

    with caplog.at_level(logging.DEBUG):
        async with Peer(server, revision=LATEST) as peer:
            ran(LATEST, "memory")
            (tool,) = await peer.tools()
            assert "canary" not in json.dumps([tool.description, tool.input_schema])
            await peer.call("spoilt")
    assert "\x1b" not in caplog.text and "\u202e" not in caplog.text and "ValueError" in caplog.text


@requirement("P-15", "SRV-614")
async def test_p15_a_server_whose_record_is_not_open_runs_nothing(tmp_path: Path, ran: Any) -> None:
    server, done = Server("s", audit=tmp_path / "audit.db"), []

    @server.tool
    async def tool() -> str:
        done.append(1)
        return ""

    async with Peer(server.connect(), revision=LATEST) as peer:
        ran(LATEST, "memory")
        with pytest.raises(RemoteProtocolError, match="not called"):
            await peer.call("tool")
    assert done == []
