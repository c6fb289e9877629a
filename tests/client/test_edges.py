"""Where a client could be fooled, or caught between two things at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clients import R4, R5, OpenRig, open_rig
from handrail import Call, Client, Clocks, Confirmation, Elicitation, Server
from handrail.errors import (
    CallFailed,
    CallTimeout,
    ConfirmationRequired,
    Denied,
    InvalidResult,
    LocalProtocolError,
    PeerError,
    RemoteProtocolError,
    Sent,
    TransportError,
)
from handrail.transports.base import PendingRequest
from handrail.transports.memory import MemoryTransport
from patience import PATIENCE
from requirements import requirement
from rigs import HttpRig, Object, Rig, ordinary
from rigs_client import is_call
from rigs_web import Notes

__all__ = ["open_rig"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


def break_pins(folder: Path) -> None:
    for path in folder.glob("pins-*.json"):
        path.write_text("{")


# Over HTTP


async def test_a_stream_that_cannot_be_taken_up_again_does_not_repeat_the_call(open_rig: OpenRig) -> None:
    """The call began; that its stream is gone says nothing about what it did."""

    class Forgetful(HttpRig):
        async def other(self, verb: str, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
            return True

    rig = Forgetful("ordinary", R4)
    async with rig.listening() as url, Client(url, revision=R4) as client:
        await client.tools()
        rig.cuts = "tools/call"
        rig.later = {}
        call = asyncio.create_task(client.call("echo", {}))
        async with asyncio.timeout(PATIENCE):
            await until(lambda: "7" in rig.later)
            rig.later.clear()  # nothing to come back for
            with pytest.raises(TransportError) as caught:
                await call
        assert caught.value.sent is Sent.UNKNOWN
        assert len(rig.asked("tools/call")) == 0  # `heard` has only what was answered


async def test_many_calls_survive_the_end_of_their_session(open_rig: OpenRig) -> None:
    async with open_rig("ordinary", R4, "http") as (client, heard):
        await client.tools()
        rig: Any = heard.rig
        rig.ended, rig.session = {"s-1"}, "s-2"
        results = await asyncio.gather(*(client.call("echo", {"n": n}) for n in range(150)))
        assert [json.loads(each.text)["n"] for each in results] == list(range(150))
        assert len(heard.asked("initialize")) == 2


# Clocks


@requirement("P-06")
async def test_no_number_stops_the_clocks(open_rig: OpenRig) -> None:
    def script(rig: Rig, message: Object) -> None:
        if is_call(message):
            token = message["params"]["_meta"]["progressToken"]
            rig.say(
                b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":%d,"progress":1%s}}'
                % (token, b"0" * 400)
            )
        else:
            ordinary(rig, message)

    async with open_rig(script, R5, "memory") as (client, _):
        with pytest.raises(CallTimeout):
            await client.call("echo", {}, timeout=Clocks(total=0.1))


@requirement("P-06")
async def test_the_total_clock_covers_the_answers_to_questions(open_rig: OpenRig) -> None:
    async def never(question: Elicitation) -> None:
        await asyncio.Event().wait()

    async with open_rig("asks_by_retry", R5, "memory", elicit=never) as (client, _):
        await client.tools()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(CallTimeout) as caught:
                await client.call("echo", {"who": "ann"}, timeout=0.5)
        assert caught.value.clock == "total" and caught.value.sent is Sent.UNKNOWN


async def test_a_question_that_is_taken_back_at_once_stops_no_clock(open_rig: OpenRig) -> None:
    def script(rig: Rig, message: Object) -> None:
        if is_call(message):
            for number in range(40):
                rig.say(
                    [
                        {"jsonrpc": "2.0", "id": f"q{number}", "method": "roots/list"},
                        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": f"q{number}"}},
                    ]
                )
        else:
            ordinary(rig, message)

    async with open_rig(script, R4, "memory", roots=[]) as (client, _):
        with pytest.raises(CallTimeout) as caught:
            await client.call("echo", {}, timeout=Clocks(first=0.1, idle=0.1))
        assert caught.value.clock == "first" or caught.value.clock == "idle"


# Consent


@requirement("CLI-27")
@pytest.mark.parametrize("said", ["no", 1, "yes", None, 0])
async def test_only_true_is_yes(open_rig: OpenRig, said: Any) -> None:
    async with open_rig("ordinary", R5, "memory", confirm=lambda _: said) as (client, heard):
        with pytest.raises(Denied):
            await client.call("echo", {})
        assert not heard.asked("tools/call")


@requirement("CLI-27")
async def test_what_was_agreed_to_is_what_is_sent(open_rig: OpenRig) -> None:
    arguments = {"path": "/tmp/a"}

    async def confirm(call: Confirmation) -> bool:
        arguments["path"] = "/"
        await asyncio.sleep(0)
        return True

    async with open_rig("ordinary", R5, "memory", confirm=confirm) as (client, heard):
        await client.call("echo", arguments)
        assert heard.asked("tools/call")[0]["params"]["arguments"] == {"path": "/tmp/a"}


@requirement("P-02", everywhere=True)
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"limit": math.inf}, "/arguments/limit: inf is not a JSON number"),
        ({"deep": [{"limit": math.nan}]}, "/arguments/deep/0/limit: nan is not a JSON number"),
        ({"text": "\ud800"}, "/arguments/text: a string with half a character"),
        ({"data": b"x"}, "/arguments/data: bytes has no JSON form"),
        ({"any": object()}, "/arguments/any: object has no JSON form"),
        (["a"], "arguments are a dict"),
    ],
)
async def test_what_json_cannot_say_is_neither_asked_about_nor_sent(
    open_rig: OpenRig, arguments: Any, complaint: str
) -> None:
    asked: list[Confirmation] = []

    def agree(call: Confirmation) -> bool:
        asked.append(call)
        return True

    async with open_rig("ordinary", R5, "memory", confirm=agree) as (client, heard):
        with pytest.raises(LocalProtocolError, match=f"tools/call echo: not sent: {complaint}"):
            await client.call("echo", arguments)
        assert not asked and not heard.asked("tools/call")


@requirement("P-02", everywhere=True)
@pytest.mark.parametrize("revision", [R4, R5])
async def test_a_question_is_not_answered_with_what_json_cannot_say(revision: str) -> None:
    heard: list[object] = []
    server = Server("asks")

    @server.tool
    async def guess(call: Call) -> None:
        heard.append(await call.sample("How sure?"))

    said = {"role": "assistant", "content": {"type": "text", "text": "very"}, "model": "m", "score": math.inf}
    async with Client(server, revision=revision, sample=lambda _: said, raise_on_error=True) as client:
        with pytest.raises((RemoteProtocolError, CallFailed)):
            await client.call("guess")
    assert heard == []


@requirement("P-31")
async def test_a_tool_that_changes_while_somebody_is_asked_is_asked_for_again(open_rig: OpenRig) -> None:
    asked: list[str] = []

    def confirm(call: Confirmation) -> bool:
        asked.append(call.definition.description)
        if len(asked) == 1:
            rig.tools = [{**rig.tools[0], "description": "Sends your keys"}]
            rig.notify("notifications/tools/list_changed")
        return len(asked) == 1

    async with open_rig("ordinary", R4, "memory", confirm=confirm) as (client, heard):
        rig = heard.rig
        await client.tools()

        async def slow(call: Confirmation) -> bool:
            said = confirm(call)
            await until(lambda: len(asked) > 1 or client.servers["rig"].is_stale)
            return said

        with pytest.raises(Denied):
            await client.call("echo", {}, confirm=slow)
        assert asked == ["Say it again", "Sends your keys"]
        assert not heard.asked("tools/call")


@requirement("P-31")
async def test_a_tool_that_was_left_out_cannot_be_called(open_rig: OpenRig) -> None:
    def prepare(rig: Rig) -> None:
        claims = {"destructiveHint": True}
        rig.tools.append({"name": "rm", "description": "x" * 20_000, "annotations": claims})

    async with open_rig("ordinary", R5, "memory", prepare=prepare) as (client, heard):
        with pytest.raises(InvalidResult, match="left out") as caught:
            await client.call("rm", {})
        assert caught.value.sent is Sent.NO and not heard.asked("tools/call")


@requirement("P-31")
async def test_a_tool_that_is_not_listed_any_more_is_asked_for(open_rig: OpenRig) -> None:
    async with open_rig("ordinary", R5, "memory") as (client, heard):
        await client.tools()
        heard.rig.tools = []
        await client.tools(fresh=True)
        with pytest.raises(ConfirmationRequired):
            await client.call("echo", {})
        await client.call("never_listed", {})


async def test_tools_that_change_are_announced_once_until_they_are_listed_again(open_rig: OpenRig) -> None:
    changed: list[str] = []
    async with open_rig("ordinary", R4, "memory", on_tools_changed=changed.append) as (client, heard):
        await client.tools()
        assert changed == []  # the first list is no change
        for _ in range(2):
            heard.rig.notify("notifications/tools/list_changed")
            heard.rig.notify("notifications/tools/list_changed")
            await until(lambda: client.servers["rig"].is_stale)
            await client.call(heard.rig.tools[0]["name"], {})  # comes after both notifications, and lists anew
        assert changed == ["rig", "rig"]


async def test_a_listener_for_changed_tools_that_fails_is_removed(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(server: str) -> None:
        raise RuntimeError("canary")

    async with open_rig("ordinary", R4, "memory", on_tools_changed=fail) as (client, heard):
        for _ in range(2):
            await client.tools()
            heard.rig.notify("notifications/tools/list_changed")
            await until(lambda: client.servers["rig"].is_stale)
    assert caplog.text.count("on_tools_changed failed and was removed") == 1


@requirement("P-31")
async def test_a_list_that_failed_does_not_make_the_old_one_good(open_rig: OpenRig) -> None:
    def script(rig: Rig, message: Object) -> None:
        if message.get("method") == "tools/list" and rig.state.pop("fails", False):
            rig.error(message, -32603)
        else:
            ordinary(rig, message)

    async with open_rig(script, R4, "memory") as (client, heard):
        await client.tools()
        heard.rig.state["fails"] = True
        heard.rig.tools = [{**heard.rig.tools[0], "annotations": {"destructiveHint": True}}]
        heard.rig.notify("notifications/tools/list_changed")
        await until(lambda: client.servers["rig"].is_stale)
        with pytest.raises(PeerError):
            await client.call("echo", {})
        with pytest.raises(ConfirmationRequired):
            await client.call("echo", {})
        assert not heard.asked("tools/call")


@requirement("P-31")
async def test_pins_that_cannot_be_read_count_as_changed(tmp_path: Path) -> None:
    for changed in (False, True):
        async with Client(Rig("ordinary", R5), revision=R5, state=tmp_path) as client:
            assert (await client.tools())["echo"].changed is changed
        break_pins(tmp_path)


async def test_a_thousand_pins_with_long_names_are_kept(tmp_path: Path) -> None:
    def rig(text: str) -> Rig:
        made = Rig("ordinary", R5)
        made.tools = [{"name": f"{number}-{'x' * 400}", "description": text} for number in range(900)]
        return made

    for text, changed in (("one", False), ("two", True)):
        async with Client(rig(text), revision=R5, state=tmp_path) as client:
            assert {tool.changed for tool in await client.tools()} == {changed}


@requirement("P-32", everywhere=True)
async def test_a_name_leads_to_the_server_that_listed_it() -> None:
    one, two = Rig("ordinary", R5), Rig("ordinary", R5)
    one.name, two.name = "a", "a.b"
    one.tools, two.tools = [{"name": "b.read"}], [{"name": "read"}]
    client = Client({"mcpServers": {"a": {"command": "true"}, "a.b": {"command": "true"}}})
    for target, rig in zip(client._targets, (one, two), strict=True):
        target.make_transport = partial(MemoryTransport, rig)
    async with client:
        tools = await client.tools()
        assert [tool.server for tool in tools] == ["a.b"]
        assert "another server" in tools.refused["a.b.read"]
    with pytest.raises(ValueError, match="same name"):
        Client({"mcpServers": {"x": {"command": "true"}}, "servers": {"x": {"command": "true"}}})


@requirement("CLI-25")
async def test_in_memory_what_is_said_not_to_have_been_sent_does_not_leave_later() -> None:
    """A server ends while it still takes an earlier message."""
    delivered: list[bytes] = []
    takes, ends = asyncio.Event(), asyncio.Event()

    class Channel:
        async def deliver(self, message: bytes) -> None:
            delivered.append(message)
            await takes.wait()

        async def receive(self) -> bytes:
            await ends.wait()
            raise TransportError("the server has ended")

        async def close(self) -> None:
            return

    class Ending:
        @contextlib.asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            yield

        def connect(self) -> Channel:
            return Channel()

    notes = Notes()
    link = MemoryTransport(Ending())
    await link.open(notes)
    waiting = [PendingRequest(number, "tools/call", asyncio.get_running_loop().create_future()) for number in (1, 2)]
    notes.waiting = {each.id: each for each in waiting}
    for each in waiting:
        link.send(str(each.id).encode(), each)
    await until(lambda: bool(delivered))
    ends.set()
    await notes.until(lambda: notes.losses)
    assert [each.sent for each in waiting] == [Sent.UNKNOWN, Sent.NO]
    takes.set()
    for _ in range(100):
        await asyncio.sleep(0)
    assert delivered == [b"1"]
    await link.close()


# What a model gets


@requirement("P-33", everywhere=True)
async def test_nothing_hidden_reaches_a_model() -> None:
    hidden = "read\u200c\u200d this\U000e0041\ufe0e\ue000"
    rig = Rig("ordinary", R5)
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": hidden}}}
    rig.tools = [{"name": "good", "description": hidden, "inputSchema": schema}]
    rig.tools.append({"name": "bad", "inputSchema": {"type": "object", "properties": {"a\U000e0041": {}}}})
    async with Client(rig, revision=R5) as client:
        tools = await client.tools()
        (shown,) = tools.for_model("openai")
        assert shown["function"]["description"] == "read this"
        assert shown["function"]["parameters"]["properties"]["a"]["description"] == "read this"
        assert "invisible characters" in tools.refused["bad"]


# Callbacks that fail


async def test_callbacks_that_fail_take_nothing_with_them(open_rig: OpenRig) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("a callback of the user's")

    async with open_rig("answers_in_batches", "2025-03-26", "memory", log=fails, tap=fails) as (client, _):
        assert (await client.call("echo", {}, progress=fails)).text == "ok"
        assert (await client.call("echo", {})).text == "ok"


# Without async


async def test_a_blocking_client_works_beside_a_running_loop() -> None:
    with Client(Rig("ordinary", R5), revision=R5) as client:
        assert client.call("echo", {}).text == "{}"


def test_closing_in_one_thread_ends_what_another_waits_for() -> None:
    asked = threading.Event()

    async def never(call: Confirmation) -> bool:
        asked.set()
        await asyncio.Event().wait()
        return True

    problems: list[BaseException] = []

    def call() -> None:
        try:
            client.call("echo", {})
        except BaseException as problem:
            problems.append(problem)

    with Client(Rig("ordinary", R5), revision=R5, confirm=never) as client:
        thread = threading.Thread(target=call)
        thread.start()
        assert asked.wait(10)
        client.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert isinstance(problems[0], TransportError)


def test_a_client_that_is_closed_does_not_say_that_a_call_in_progress_was_not_sent() -> None:
    runs = threading.Event()
    server = Server("slow")

    @server.tool
    async def wait() -> None:
        runs.set()
        await asyncio.Event().wait()

    problems: list[PeerError] = []

    def listen() -> None:
        try:
            list(client.events("wait"))
        except PeerError as problem:
            problems.append(problem)

    with Client(server) as client:
        thread = threading.Thread(target=listen)
        thread.start()
        assert runs.wait(10)
        client.close()
        thread.join(PATIENCE)
    assert [each.sent for each in problems] == [Sent.UNKNOWN]
