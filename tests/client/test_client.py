"""The client against scripted servers, in every revision and over every transport."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clients import ALL, LEGACY, R0, R1, R2, R3, R4, R5, Heard, OpenRig, P, open_rig
from handrail import CallResult, Client, Clocks, Confirmation, Elicitation, Progress, allow
from handrail.errors import (
    CallFailed,
    CallTimeout,
    ConfirmationRequired,
    Denied,
    InvalidResult,
    PeerError,
    RemoteProtocolError,
    Sent,
    TransportError,
)
from handrail.transports.subprocess import SubprocessTransport
from patience import PATIENCE
from requirements import requirement
from rigs import VERSION, HttpRig, Object, Rig, ordinary
from rigs_client import GOOD_ICONS, ICONS

__all__ = ["open_rig"]

TRANSPORTS = ("memory", "stdio", "http")


def everywhere(*revisions: str, transports: tuple[str, ...] = TRANSPORTS) -> pytest.MarkDecorator:
    places = [(revision, transport) for revision in revisions for transport in transports]
    return pytest.mark.parametrize(("revision", "transport"), places)


# How a conversation begins


@requirement("CLI-02")
@everywhere(*LEGACY)
async def test_a_handshake_comes_first(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("ordinary", revision, transport) as (client, heard):
        await client.tools()
        first, second, third, *_ = heard.messages
        assert first["method"] == "initialize" and first["params"]["protocolVersion"] == revision
        assert second == {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert third["method"] == "tools/list"
        assert client.revision == revision


@requirement("CLI-02", "CLI-04")
@everywhere(R0, R1, R2, R3, R4, P, transports=("stdio", "memory"))
async def test_an_old_server_is_found_by_asking(open_rig: OpenRig, revision: str, transport: str) -> None:
    """The newest version is proposed, the server's own is taken."""
    async with open_rig("ordinary", revision, transport, revision="auto") as (client, heard):
        assert [each["method"] for each in heard.messages[:2]] == ["server/discover", "initialize"]
        assert heard.messages[1]["params"]["protocolVersion"] == R4
        assert client.revision == revision
        assert (await client.call("echo", {"a": 1})).text == '{"a": 1}'


@requirement("CLI-03")
@everywhere(*LEGACY)
async def test_a_version_nobody_speaks_ends_the_conversation(open_rig: OpenRig, revision: str, transport: str) -> None:
    with pytest.raises(RemoteProtocolError, match="1990-01-01") as caught:
        async with open_rig("unusable_version", revision, transport):
            pass
    assert caught.value.server and "spoken here" in caught.value.hint


@requirement("CLI-04")
@pytest.mark.parametrize("script", ["refuses_probe_32601", "refuses_probe_32602", "refuses_probe_32000"])
@everywhere(*LEGACY, transports=("stdio",))
async def test_any_ordinary_refusal_means_a_handshake(
    open_rig: OpenRig, revision: str, transport: str, script: str
) -> None:
    async with open_rig(script, revision, transport, revision="auto") as (client, _):
        assert client.revision == revision


@requirement("CLI-04")
@pytest.mark.parametrize("script", ["silent_on_probe", "dies_on_probe"])
@everywhere(*LEGACY, transports=("stdio",))
async def test_a_server_that_bears_no_questions_gets_a_handshake(
    open_rig: OpenRig, revision: str, transport: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.client.negotiation.PROBE_SECONDS", 0.3)
    async with open_rig(script, revision, transport, revision="auto") as (client, heard):
        assert client.revision == revision
        assert (await client.call("echo", {"a": 1})).text == '{"a": 1}'
        assert len(heard.asked("initialize")) == 1


@requirement("CLI-04", "CLI-06")
@pytest.mark.parametrize("script", ["refuses_probe_32020", "refuses_probe_32021", "refuses_version"])
@everywhere(R5)
async def test_a_refusal_of_the_new_kind_is_no_reason_to_go_back(
    open_rig: OpenRig, revision: str, transport: str, script: str
) -> None:
    heard: list[Heard] = []
    with pytest.raises(RemoteProtocolError) as caught:
        async with open_rig(script, revision, transport, revision="auto") as (_, it):
            heard.append(it)
    assert caught.value.code == (-32022 if script == "refuses_version" else -int(script[-5:]))
    assert "2031-01-01" in caught.value.hint or script != "refuses_version"


@requirement("CLI-04")
@everywhere(R5, transports=("stdio",))
async def test_a_new_server_is_not_asked_for_a_handshake(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("ordinary", revision, transport, revision="auto") as (client, heard):
        await client.tools()
        assert client.revision == R5
        assert [each["method"] for each in heard.messages] == ["server/discover", "tools/list"]


@requirement("CLI-06")
@everywhere(R5)
async def test_a_listed_version_is_tried_again(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("changes_its_mind", revision, transport) as (client, heard):
        assert client.revision == R5 and len(heard.asked("server/discover")) == 2


@requirement("CLI-07")
@everywhere(R5)
async def test_every_request_says_who_asks(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("ordinary", revision, transport, elicit=lambda q: None, sample=lambda q: None) as (
        client,
        heard,
    ):
        await client.tools()
        await client.call("echo", {})
        for message in heard.messages:
            meta = message["params"]["_meta"]
            assert meta[VERSION] == R5
            assert meta["io.modelcontextprotocol/clientInfo"]["name"] == "handrail"
            assert meta["io.modelcontextprotocol/clientCapabilities"] == {"elicitation": {"form": {}}, "sampling": {}}


@everywhere(R2, R3, R4)
async def test_what_is_declared_fits_the_revision(open_rig: OpenRig, revision: str, transport: str) -> None:
    options: Any = {"elicit": lambda q: None, "elicit_url": lambda q: None, "roots": ["/tmp"]}
    async with open_rig("ordinary", revision, transport, **options) as (_, heard):
        declared = heard.messages[0]["params"]["capabilities"]
        modes: dict[str, Object] = {R2: {}, R3: {"elicitation": {}}, R4: {"elicitation": {"form": {}, "url": {}}}}
        assert declared == {"roots": {}, **modes[revision]}


# Listing


@requirement("CLI-17")
@everywhere(*ALL)
async def test_a_server_without_tools_is_not_asked_for_them(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("without_tools", revision, transport) as (client, heard):
        assert list(await client.tools()) == []
        with pytest.raises(RemoteProtocolError, match="no tools") as caught:
            await client.call("echo", {})
        assert caught.value.sent is Sent.NO
        assert not heard.asked("tools/list") and not heard.asked("tools/call")


@requirement("CLI-18")
@everywhere(*ALL)
async def test_cursors_are_followed_to_the_end(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("three_pages", revision, transport) as (client, heard):
        assert [tool.name for tool in await client.tools()] == ["t0", "t1", "t2"]
        assert [each.get("params", {}).get("cursor") for each in heard.asked("tools/list")] == [None, "1", "2"]


@requirement("CLI-18")
@everywhere(*ALL)
async def test_an_empty_cursor_is_one_except_in_pocket(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("empty_cursor", revision, transport) as (client, _):
        names = [tool.name for tool in await client.tools()]
        assert names == (["first"] if revision == P else ["first", "second"])


@requirement("CLI-19", "P-35")
@pytest.mark.parametrize("script", ["repeats_cursor", "endless_pages", "too_many_tools"])
@everywhere(*ALL)
async def test_a_list_without_end_is_an_error(open_rig: OpenRig, revision: str, transport: str, script: str) -> None:
    async with open_rig(script, revision, transport) as (client, heard):
        with pytest.raises(InvalidResult, match="tools/list"):
            await client.tools()
        assert len(heard.asked("tools/list")) <= 101


@requirement("CLI-38", "CLI-39")
@everywhere(*ALL)
async def test_odd_entries_do_not_hide_good_ones(
    open_rig: OpenRig, revision: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_rig("odd_tools", revision, transport) as (client, _):
        tools = await client.tools()
        assert [tool.name for tool in tools] == ["good", "bare"]
        assert tools["good"].raw == {
            "name": "good",
            "inputSchema": {"type": "object", "x-unknown": [1]},
            "x-member": {"a": None},
        }
        assert tools["bare"].input_schema == {"type": "object"}
        assert len(tools.refused) == 4 and "long" in tools.refused
        assert caplog.text.count(" left out: ") == 4


@requirement("CLI-29")
@everywhere(*LEGACY, transports=("memory", "stdio"))
async def test_a_notice_makes_the_list_stale(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("changes_tools", revision, transport) as (client, heard):
        assert len(await client.tools()) == len(await client.tools()) == 1
        assert len(heard.asked("tools/list")) == 1
        await client.call("echo", {})
        assert [tool.name for tool in await client.tools()] == ["echo", "new"]


@requirement("CLI-29")
@everywhere(*LEGACY, transports=("http",))
async def test_a_notice_on_the_stream_of_a_call_makes_the_list_stale(
    open_rig: OpenRig, revision: str, transport: str
) -> None:
    async with open_rig("changes_tools", revision, transport) as (client, _):
        assert len(await client.tools()) == 1
        await client.call("echo", {})
        assert [tool.name for tool in await client.tools()] == ["echo", "new"]


@requirement("CLI-29")
@everywhere(*LEGACY, transports=("http",))
async def test_a_list_is_not_kept_where_no_notice_can_come(open_rig: OpenRig, revision: str, transport: str) -> None:
    """Many servers announce notices of changes, and have no stream to send them on."""
    async with open_rig("ordinary", revision, transport) as (client, heard):
        await client.tools()
        await client.tools()
        assert len(heard.asked("tools/list")) == 2


@requirement("CLI-29")
@everywhere(*LEGACY, transports=("memory", "stdio"))
async def test_a_server_that_began_anew_may_have_other_tools(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("dies_on_call", revision, transport) as (client, heard):
        await client.tools()
        with pytest.raises(TransportError):
            await client.call("echo", {})
        await client.tools()
        assert len(heard.asked("tools/list")) == 2


class StreamingRig(HttpRig):
    """Has a stream for what is said unasked; whoever takes it from `streams` may cut it."""

    def __init__(self) -> None:
        super().__init__("ordinary", R4)
        self.streams: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def other(self, verb: str, writer: asyncio.StreamWriter) -> bool:
        if verb != "GET":
            return await super().other(verb, writer)
        writer.write(b"HTTP/1.1 200 x\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\nretry: 1\n\n")
        await self.streams.put(writer)
        await writer.wait_closed()
        return False


@requirement("CLI-29")
async def test_a_list_is_kept_as_long_as_the_stream_that_would_bring_a_notice(ran: Callable[[str, str], None]) -> None:
    rig = StreamingRig()
    async with asyncio.timeout(PATIENCE), rig.listening() as url, Client(url, revision=R4) as client:
        stream = await rig.streams.get()
        kept = None
        while kept is None or await client.tools() is not kept:  # it may not have heard of its stream yet
            kept = await client.tools()
        stream.close()
        await rig.streams.get()
        assert await client.tools() is not kept  # something may have been said between the two
    ran(R4, "http")


@requirement("CLI-34")
@everywhere(R5)
async def test_a_list_is_kept_as_long_as_the_server_says(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("caches", revision, transport) as (client, heard):
        await client.tools()
        await client.tools()
        assert len(heard.asked("tools/list")) == 1
        await client.tools(fresh=True)
        assert len(heard.asked("tools/list")) == 2


@requirement("CLI-34")
@everywhere(R5)
@pytest.mark.parametrize("script", ["caches_negatively", "ordinary"])
async def test_a_list_without_a_time_is_stale_at_once(
    open_rig: OpenRig, revision: str, transport: str, script: str
) -> None:
    async with open_rig(script, revision, transport) as (client, heard):
        await client.tools()
        await client.tools()
        assert len(heard.asked("tools/list")) == 2


# Calling


@requirement("CLI-20")
@pytest.mark.parametrize("value", ["text", {"a": 1}, [1, 2], 3.5, True, None, {"error": "it broke", "status": "x"}])
@everywhere(R0)
async def test_the_first_draft_answers_with_any_value(
    open_rig: OpenRig, revision: str, transport: str, value: Any
) -> None:
    async with open_rig("draft_values", revision, transport) as (client, _):
        result = await client.call("echo", {"value": value})
        assert result.raw == {"toolResult": value}
        if isinstance(value, dict) and "error" in value:
            assert result.is_error and result.text == "it broke"
        elif isinstance(value, str):
            assert result.text == value and result.data is None
        else:
            assert result.data == value and json.loads(result.text) == value


@requirement("CLI-21")
@everywhere(R5)
async def test_a_result_without_a_type_is_complete(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("without_result_type", revision, transport) as (client, _):
        assert (await client.call("echo", {})).text == "ok"


@requirement("CLI-21")
@pytest.mark.parametrize("kind", ["later", "", 7, None, "input_required"])
@everywhere(R5)
async def test_a_result_of_an_unknown_type_is_not_a_result(
    open_rig: OpenRig, revision: str, transport: str, kind: Any
) -> None:
    async with open_rig("odd_result_type", revision, transport) as (client, _):
        with pytest.raises(InvalidResult) as caught:
            await client.call("echo", {"kind": kind})
        assert caught.value.result["resultType"] == kind


@requirement("CLI-22")
@everywhere(R3, R4, R5)
async def test_a_lie_is_told_with_what_was_said(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("lies", revision, transport) as (client, _):
        with pytest.raises(InvalidResult, match="own schema") as caught:
            await client.call("sum", {})
        assert isinstance(caught.value.result, CallResult)
        assert caught.value.result.raw["structuredContent"] == {"sum": "three"}
        assert caught.value.sent is Sent.FAILED


@requirement("CLI-22", "CLI-36")
@everywhere(R3, R4, R5)
async def test_a_failure_need_not_keep_the_promise(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("fails_without_data", revision, transport) as (client, _):
        result = await client.call("sum", {})
        assert result.is_error and result.text == "broken" and "failed" in result.for_model()


@requirement("CLI-36", "CLI-37")
@everywhere(*ALL)
async def test_an_error_of_the_protocol_is_raised(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("answers_error", revision, transport) as (client, _):
        with pytest.raises(RemoteProtocolError, match="bad a") as caught:
            await client.call("echo", {"code": -32602, "message": "bad a"})
        assert caught.value.code == -32602 and caught.value.phase == "tools/call echo"


@requirement("CLI-37")
@everywhere(*ALL)
async def test_a_failure_of_the_tool_is_a_result(open_rig: OpenRig, revision: str, transport: str) -> None:
    said: Object = {"content": [{"type": "text", "text": "bad a"}], "isError": True}
    said = {"toolResult": {"error": "bad a"}} if revision == R0 else said
    said = {"resultType": "complete", **said} if revision == R5 else said
    async with open_rig("echoes_result", revision, transport) as (client, _):
        result = await client.call("echo", {"result": said})
        assert result.is_error and result.text == "bad a"
    async with open_rig("echoes_result", revision, transport, raise_on_error=True) as (client, _):
        with pytest.raises(CallFailed, match="bad a") as caught:
            await client.call("echo", {"result": said})
        assert caught.value.result.is_error


@requirement("CLI-24", "CLI-38")
@everywhere(*ALL)
async def test_what_is_unknown_or_broken_survives_and_is_named(
    open_rig: OpenRig, revision: str, transport: str
) -> None:
    blocks = [
        {"type": "hologram", "beams": 3},
        {"type": "image", "data": "not base64!", "mimeType": "image/png"},
        {"type": "text"},
        {"type": "text", "text": "a\u200b\u202eb\x1b[31m", "x": 1},
        {"type": "text", "text": "secret", "annotations": {"audience": ["user"]}},
        {"type": "text", "text": "plain"},
    ]
    said = {"content": blocks, "isError": False, "_meta": {"x.org/y": [1]}, "surprise": {"a": None}}
    said = {"resultType": "complete", **said} if revision == R5 else said
    async with open_rig("echoes_result", revision, transport) as (client, _):
        result = await client.call("echo", {"result": said})
        assert result.raw == said
        assert result.content[0] == blocks[0] and result.content[2] == blocks[2]
        assert [each.split(":")[0] for each in result.problems] == ["content/1", "content/2", "content/3"]
        shown = result.for_model()
        assert "plain" in shown and "secret" not in shown and "\x1b" not in shown and "\u202e" not in shown


@requirement("CLI-43")
@everywhere(R2)
async def test_answers_in_batches_are_understood(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("answers_in_batches", revision, transport) as (client, _):
        assert (await client.call("echo", {})).text == "ok"


# Clocks


@requirement("CLI-25", "P-06")
@everywhere(*ALL)
async def test_a_silent_call_ends_by_its_clock_and_the_server_hears_of_it(
    open_rig: OpenRig, revision: str, transport: str
) -> None:
    async with open_rig("never_answers", revision, transport) as (client, heard):
        await client.tools()
        clock = "idle" if transport == "http" else "first"  # over HTTP the rig begins to answer, and then says nothing
        clocks = Clocks(**{"first": PATIENCE, "idle": PATIENCE, clock: 0.05})
        with pytest.raises(CallTimeout) as caught:
            await client.call("echo", {}, timeout=clocks)
        assert (caught.value.clock, caught.value.sent) == (clock, Sent.UNKNOWN)
        await client.tools(fresh=True)  # whatever was told before is heard by now
        told = heard.asked("notifications/cancelled")
        (call,) = heard.asked("tools/call")
        if revision == R0 or (revision == R5 and transport == "http"):
            assert not told
        else:
            assert told[0]["params"]["requestId"] == call["id"]
        if revision == R5 and transport == "http":
            async with asyncio.timeout(PATIENCE):
                await heard.rig.closed.wait()  # type: ignore[attr-defined]  # an HttpRig


@requirement("CLI-25")
@everywhere(*ALL)
async def test_progress_feeds_one_clock_and_not_the_other(open_rig: OpenRig, revision: str, transport: str) -> None:
    seen: list[Progress] = []
    async with open_rig("progresses_and_stops", revision, transport) as (client, _):
        await client.tools()
        for clocks, clock in (
            (Clocks(first=PATIENCE, idle=1.0), "idle"),
            (Clocks(first=PATIENCE, idle=PATIENCE, total=1.5), "total"),
        ):
            with pytest.raises(CallTimeout, match="5 of 10") as caught:
                await client.call("echo", {}, timeout=clocks, progress=seen.append)
            assert caught.value.clock == clock
            assert caught.value.progress == seen[-1]
            assert (seen[-1].done, seen[-1].total) == (5, 10)


@requirement("CLI-25", "P-06")
@everywhere(R4, R5, transports=("memory", "http"))
async def test_a_call_takes_no_longer_because_the_tools_are_listed_first(
    open_rig: OpenRig, revision: str, transport: str
) -> None:
    def never_lists(rig: Rig, message: Object) -> None:
        if message.get("method") != "tools/list":
            ordinary(rig, message)

    async with open_rig(never_lists, revision, transport) as (client, heard):
        with pytest.raises(CallTimeout, match="not done within") as caught:
            async with asyncio.timeout(PATIENCE):
                await client.call("echo", {}, timeout=0.5)
        assert (caught.value.clock, caught.value.sent) == ("total", Sent.NO)
        assert heard.asked("tools/list") and not heard.asked("tools/call")


@requirement("CLI-25")
@everywhere(R4, R5)
async def test_after_a_sign_of_life_a_shorter_clock_counts_from_there(
    open_rig: OpenRig, revision: str, transport: str
) -> None:
    async with open_rig("progresses_and_stops", revision, transport) as (client, _):
        await client.tools()
        with pytest.raises(CallTimeout) as caught:
            async with asyncio.timeout(PATIENCE):
                await client.call("echo", {}, timeout=Clocks(first=30, idle=0.05))
        assert caught.value.clock == "idle"


@requirement("CLI-25")
@everywhere(*ALL)
async def test_who_goes_away_takes_the_call_along(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("progresses_and_stops", revision, transport) as (client, heard):
        begun = asyncio.Event()
        call = asyncio.create_task(client.call("echo", {}, progress=lambda _: begun.set()))
        async with asyncio.timeout(PATIENCE):
            await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await client.tools(fresh=True)
        by_message = revision != R0 and not (revision == R5 and transport == "http")
        assert len(heard.asked("notifications/cancelled")) == by_message


# Consent and records


@requirement("CLI-27")
@everywhere(*ALL)
async def test_nothing_is_sent_that_was_not_agreed_to(open_rig: OpenRig, revision: str, transport: str) -> None:
    asked: list[Confirmation] = []

    async def confirm(call: Confirmation) -> bool:
        assert not heard.asked("tools/call")
        asked.append(call)
        return False

    async with open_rig("ordinary", revision, transport, confirm=confirm) as (client, heard):
        with pytest.raises(Denied) as caught:
            await client.call("echo", {"path": "/etc"})
        assert caught.value.sent is Sent.NO and not heard.asked("tools/call")
        (question,) = asked
        assert (question.tool, question.arguments) == ("echo", {"path": "/etc"})
        assert question.server and question.why
        assert (await client.call("echo", {}, confirm=allow)).text == "{}"


@requirement("CLI-28")
@everywhere(R2, R3, R4, R5)
async def test_claims_of_a_stranger_skip_no_question(open_rig: OpenRig, revision: str, transport: str) -> None:
    asked: list[Confirmation] = []

    def confirm(call: Confirmation) -> bool:
        asked.append(call)
        return True

    for trusted, questions in ((False, ["wipe", "peek", "plain"]), (True, ["wipe", "plain"])):
        asked.clear()
        async with open_rig("destructive", revision, transport, confirm=confirm, trusted=trusted) as (client, _):
            for name in ("wipe", "peek", "plain"):
                await client.call(name, {})
        assert [each.tool for each in asked] == questions
        assert asked[0].claims == {"destructiveHint": True}


@requirement("CLI-27", "CLI-28")
@everywhere(R2, R3, R4, R5)
async def test_code_does_not_count_as_consent_to_destroy(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("destructive", revision, transport) as (client, heard):
        with pytest.raises(ConfirmationRequired):
            await client.call("wipe", {})
        assert not heard.asked("tools/call")
        await client.call("plain", {})
    async with open_rig("destructive", revision, transport, confirm=allow) as (client, _):
        await client.call("wipe", {})


@requirement("P-31")
@everywhere(*ALL)
async def test_a_tool_that_changed_is_not_called_unseen(open_rig: OpenRig, revision: str, transport: str) -> None:
    why: list[str] = []

    def confirm(call: Confirmation) -> bool:
        why.append(call.why)
        return True

    async with open_rig("pulls_the_rug", revision, transport) as (client, heard):
        await client.call("echo", {})
        assert (await client.tools(fresh=True))["echo"].changed
        with pytest.raises(ConfirmationRequired, match="changed"):
            await client.call("echo", {})
        await client.call("echo", {}, confirm=confirm)
        assert "changed" in why[0]
        await client.call("echo", {})  # it has been seen now
        assert len(heard.asked("tools/call")) == 3


async def test_pins_outlive_the_client(tmp_path: Path) -> None:
    for lists in (0, 1):
        # A rig in this process, so that it can be told how often it was listed.
        rig = Rig("pulls_the_rug", R5)
        rig.state["lists"] = lists
        async with Client(rig, revision=R5, state=tmp_path / "state") as client:
            assert (await client.tools())["echo"].changed is bool(lists)
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


@requirement("CLI-26")
@everywhere(*ALL)
async def test_every_call_leaves_a_record(open_rig: OpenRig, revision: str, transport: str, tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    async with open_rig("answers_error", revision, transport, audit=file) as (client, _):
        with pytest.raises(RemoteProtocolError):
            await client.call("echo", {"code": 1, "message": "no", "password": "hunter2"})
        with pytest.raises(Denied):
            await client.call("echo", {}, confirm=lambda _: False)
    _, intent, outcome, refusal = map(json.loads, file.read_text().splitlines())
    assert (intent["event"], intent["side"], intent["tool"]) == ("intent", "client", "echo")
    assert intent["revision"] == revision and intent["arguments_digest"].startswith("sha256:")
    assert (intent["agreed"], outcome["call"]) == ("unconfirmed", intent["call"])
    assert (outcome["event"], outcome["outcome"], outcome["sent"]) == ("outcome", "protocol", "failed")
    assert (refusal["event"], refusal["outcome"], refusal["sent"]) == ("refusal", "denied", "not sent")
    assert "hunter2" not in file.read_text()


# Questions of the server


FORM: Object = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer", "default": 3}},
    "required": ["name"],
}


@requirement("CLI-32")
@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"name": "Ada"}, {"action": "accept", "content": {"size": 3, "name": "Ada"}}),
        (None, {"action": "decline"}),
        ("cancel", {"action": "cancel"}),
    ],
)
@everywhere(R3, R4)
async def test_a_form_is_shown_and_answered(
    open_rig: OpenRig, revision: str, transport: str, said: Any, wanted: Object
) -> None:
    asked: list[Elicitation] = []

    async def elicit(question: Elicitation) -> Any:
        asked.append(question)
        return said

    async with open_rig("asks_things", revision, transport, elicit=elicit) as (client, _):
        params = {"message": "Who?", "requestedSchema": FORM}
        result = await client.call("echo", {"method": "elicitation/create", "params": params})
        assert json.loads(result.text) == {"result": wanted}
        (question,) = asked
        assert question.server and question.message == "Who?" and question.schema == FORM
        assert question.defaults == {"size": 3}


@requirement("CLI-32")
@everywhere(R3, R4)
async def test_what_does_not_fit_the_form_is_not_sent(
    open_rig: OpenRig, revision: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_rig("asks_things", revision, transport, elicit=lambda _: {"name": 7}) as (client, _):
        params = {"message": "Who?", "requestedSchema": FORM}
        result = await client.call("echo", {"method": "elicitation/create", "params": params})
        assert json.loads(result.text)["error"]["code"] == -32603
        assert "does not fit" in caplog.text or "name" in caplog.text


@requirement("CLI-32", "CLI-33")
@everywhere(R4)
async def test_only_declared_modes_are_answered(open_rig: OpenRig, revision: str, transport: str) -> None:
    page = {"mode": "url", "message": "Sign in", "url": "https://example.org/?a=1", "elicitationId": "e"}
    asked: list[Elicitation] = []

    def visit(question: Elicitation) -> bool:
        asked.append(question)
        return True

    async with open_rig("asks_things", revision, transport, elicit=lambda _: {}) as (client, _):
        result = await client.call("echo", {"method": "elicitation/create", "params": page})
        assert json.loads(result.text)["error"]["code"] == -32602
    async with open_rig("asks_things", revision, transport, elicit_url=visit) as (client, _):
        result = await client.call("echo", {"method": "elicitation/create", "params": page})
        assert json.loads(result.text) == {"result": {"action": "accept"}}
        assert asked[0].url == "https://example.org/?a=1"
        bad = [
            "javascript:alert(1)",
            "https://evil.example\\@bank.example/",
            "https://u@h/",
            "http://[x",
            "https://a b",
        ]
        for url in bad:
            result = await client.call("echo", {"method": "elicitation/create", "params": page | {"url": url}})
            assert json.loads(result.text)["error"]["code"] == -32602
        assert len(asked) == 1


@everywhere(R4)
async def test_a_page_to_be_visited_first_is_shown_and_the_call_repeated(
    open_rig: OpenRig, revision: str, transport: str
) -> None:
    asked: list[Elicitation] = []

    def visit(question: Elicitation) -> bool:
        asked.append(question)
        return True

    async with open_rig("visit_first", revision, transport) as (client, _):
        with pytest.raises(RemoteProtocolError) as caught:
            await client.call("echo", {})
        assert caught.value.code == -32042
    async with open_rig("visit_first", revision, transport, elicit_url=visit) as (client, _):
        assert (await client.call("echo", {})).text == "{}"
        assert [each.url for each in asked] == ["https://example.org/connect"]


@requirement("CLI-44")
@everywhere(*LEGACY)
async def test_a_question_nobody_answers_is_refused(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("pings", revision, transport) as (client, _):
        result = await client.call("echo", {})
        assert json.loads(result.text) == {"a": "ok", "b": -32601, "c": -32601}


@requirement("CLI-30")
@everywhere(R5)
async def test_calls_that_are_asked_back_are_not_mixed_up(open_rig: OpenRig, revision: str, transport: str) -> None:
    async def elicit(question: Elicitation) -> Object:
        await asyncio.sleep(0)
        return {"name": question.message.upper()}

    async with open_rig("asks_by_retry", revision, transport, elicit=elicit) as (client, heard):
        await client.tools()
        results = await asyncio.gather(*(client.call("echo", {"who": who}) for who in ("ann", "bob")))
        for who, result in zip(("ann", "bob"), results, strict=True):
            ended = json.loads(result.text)
            assert ended["state"] is None and ended["arguments"] == {"who": who}
            assert ended["answers"] == {"q": {"action": "accept", "content": {"name": who.upper()}}}
        calls = heard.asked("tools/call")
        assert len({each["id"] for each in calls}) == len(calls) == 6
        states = [each["params"].get("requestState") for each in calls if each["params"]["arguments"]["who"] == "ann"]
        assert states == [None, "ann-1 ü\\u0000", None]


@requirement("CLI-30")
@everywhere(R5)
async def test_questions_without_end_are_an_error(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("asks_for_ever", revision, transport, roots=[]) as (client, heard):
        with pytest.raises(InvalidResult, match="keeps asking"):
            await client.call("echo", {})
        assert len(heard.asked("tools/call")) == 11


@requirement("CLI-31")
@everywhere(R5)
async def test_later_is_waited_for(
    open_rig: OpenRig, revision: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.client.server_tools.FIRST_WAIT_SECONDS", 0.001)
    async with open_rig("says_later", revision, transport) as (client, heard):
        assert (await client.call("echo", {})).text == "ok"
        states = [each["params"].get("requestState") for each in heard.asked("tools/call")]
        assert states == [None, "x", "xx"]
        assert all("inputResponses" not in each["params"] for each in heard.asked("tools/call"))


# Ends


@requirement("CLI-16", "CLI-41", "P-14")
@everywhere(*ALL)
async def test_a_lost_call_is_not_made_twice(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("dies_on_call", revision, transport) as (client, heard):
        with pytest.raises(TransportError) as caught:
            await client.call("echo", {})
        assert caught.value.sent is Sent.UNKNOWN and caught.value.phase == "tools/call echo"
        assert len(heard.asked("tools/call")) == 1
        assert len(await client.tools(fresh=True)) == 1  # the server is there again
        with pytest.raises(TransportError):
            await client.call("echo", {}, repeat=True)
        calls = heard.asked("tools/call")
        assert len(calls) == 3 and calls[1]["id"] != calls[2]["id"]


@everywhere(*ALL)
async def test_closing_ends_what_waits(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("progresses_and_stops", revision, transport) as (client, _):
        begun = asyncio.Event()
        call = asyncio.create_task(client.call("echo", {}, progress=lambda _: begun.set()))
        async with asyncio.timeout(PATIENCE):
            await begun.wait()
            await client.close()
            with pytest.raises(TransportError, match="closed") as caught:
                await call
        assert caught.value.sent is Sent.UNKNOWN
        with pytest.raises(TransportError, match="closed"):
            await client.tools(fresh=True)


@requirement("CLI-45")
@everywhere(R4, R5)
async def test_only_harmless_icons_are_shown(open_rig: OpenRig, revision: str, transport: str) -> None:
    async with open_rig("has_icons", revision, transport) as (client, _):
        tool = (await client.tools())["echo"]
        assert [icon["src"] for icon in tool.icons] == GOOD_ICONS
        assert tool.raw["icons"] == ICONS


@requirement("CLI-41")
@everywhere(*ALL, transports=("stdio",))
async def test_a_server_that_will_not_go_is_ended(
    open_rig: OpenRig, revision: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.client.mcp_config.SubprocessTransport", partial(SubprocessTransport, grace=0.05))
    monkeypatch.setattr("handrail.transports.subprocess.TERM_SECONDS", 0.05)
    async with open_rig("ignores_the_end", revision, transport) as (client, _):
        await client.tools()
        link = client.servers[next(iter(client.servers))].connection.transport
        assert isinstance(link, SubprocessTransport) and link.returncode is None
    assert link.returncode == -signal.SIGKILL


def test_every_error_of_a_client_is_a_peer_error() -> None:
    for kind in (CallFailed, CallTimeout, ConfirmationRequired, Denied, InvalidResult, TransportError):
        assert issubclass(kind, PeerError) and kind.kind


async def test_nothing_is_done_outside_of_with() -> None:
    client = Client(Rig("ordinary"))
    with pytest.raises(TransportError, match="not connected"):
        await client.tools()
