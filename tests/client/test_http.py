"""The client over HTTP: what it says in headers, how it finds out what is spoken, sessions that end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from clients import LEGACY, R2, R3, R4, R5, OpenRig, open_rig
from handrail import Client
from handrail.errors import HttpRefused, PeerError, RemoteProtocolError, Sent
from patience import PATIENCE
from requirements import requirement
from rigs import HttpRig, Object, Rig, ordinary

__all__ = ["open_rig"]

Prepare = Callable[[HttpRig], None]


def answering(*statuses: int, blank: bool = False) -> Prepare:
    """The first answers have these statuses, and perhaps nothing else."""

    def prepare(rig: HttpRig) -> None:
        rig.statuses = list(statuses)
        rig.state["blank"] = blank

    return prepare


@requirement("CLI-05")
@pytest.mark.parametrize("blank", [False, True])
@pytest.mark.parametrize("status", [400, 404, 405])
@pytest.mark.parametrize("revision", LEGACY)
async def test_a_refusal_that_says_nothing_new_means_a_handshake(
    open_rig: OpenRig, revision: str, status: int, blank: bool
) -> None:
    prepare = answering(status, blank=blank)
    async with open_rig("ordinary", revision, "http", revision="auto", prepare=prepare) as (client, heard):
        assert client.revision == revision
        assert [each["method"] for each in heard.messages[:2]] == ["server/discover", "initialize"]


async def test_a_verdict_is_remembered_until_it_stops_working(open_rig: OpenRig) -> None:
    def prepare(rig: HttpRig) -> None:
        rig.session = ""

    async with open_rig("ordinary", R4, "http", revision="auto", prepare=prepare) as (_, heard):
        rig: Any = heard.rig
        async with rig.listening() as url:
            for methods in (["server/discover", "initialize"], ["initialize"]):
                rig.heard.clear()
                async with Client(url) as client:
                    assert client.revision == R4
                assert [each["method"] for each in rig.heard[: len(methods)]] == methods
            rig.revision = R5  # the server was upgraded
            async with Client(url) as client:
                assert client.revision == R5


@requirement("CLI-05")
@pytest.mark.parametrize("blank", [False, True])
@pytest.mark.parametrize("status", [401, 403, 500, 503])
@pytest.mark.parametrize("revision", [R4, R5])
async def test_other_statuses_say_nothing_about_an_era(
    open_rig: OpenRig, revision: str, status: int, blank: bool
) -> None:
    rigs: list[HttpRig] = []

    def prepare(rig: HttpRig) -> None:
        rigs.append(rig)
        answering(*[status] * 9, blank=blank)(rig)

    script: Any = "ordinary" if revision == R4 else "refuses_probe_32000"
    with pytest.raises(PeerError):
        async with open_rig(script, revision, "http", revision="auto", prepare=prepare):
            pass
    assert {each["method"] for each in rigs[0].heard} == {"server/discover"}


def saying(status: int, body: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    """A proxy's answer, with the seconds to wait."""

    async def write(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nRetry-After: 7\r\nConnection: close\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    return write


RATE_LIMITED = b'{"error":"rate limited"}'


@requirement("CLI-05", "CLI-25")
@pytest.mark.parametrize(("status", "sent"), [(503, Sent.UNKNOWN), (429, Sent.FAILED)])
@pytest.mark.parametrize("revision", [R2, R4, R5])
async def test_call_refused_by_a_rate_limiter_in_front_is_refused_with_status_and_seconds(
    open_rig: OpenRig, revision: str, status: int, sent: Sent
) -> None:
    async with open_rig("ordinary", revision, "http") as (client, heard):
        await client.tools()
        rig: Any = heard.rig
        rig.raw = saying(status, RATE_LIMITED)
        with pytest.raises(HttpRefused) as caught:
            await client.call("echo", {})
        refused = caught.value
        assert (refused.status, refused.retry_after, refused.sent) == (status, 7.0, sent)
        assert refused.body == RATE_LIMITED and "Try again in 7 s" in str(refused)
        rig.raw = saying(200, RATE_LIMITED)
        with pytest.raises(RemoteProtocolError, match=r'the answer is not a message: jsonrpc must be "2\.0"') as odd:
            await client.call("echo", {})
        assert odd.value.sent is Sent.UNKNOWN


@requirement("CLI-05", "CLI-06")
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    "body", [b"", RATE_LIMITED, b'{"jsonrpc":"2.0","id":1,"error":{"code":429,"message":"Too many requests"}}']
)
async def test_a_rate_limit_on_connect_says_nothing_about_an_era(
    open_rig: OpenRig, body: bytes, is_known: bool
) -> None:
    rig = HttpRig("ordinary", R4)
    async with rig.listening() as url:
        if is_known:  # as one that shakes hands
            async with Client(url):
                pass
        rig.heard.clear()
        rig.raw = saying(429, body)
        with pytest.raises(PeerError) as caught:
            async with Client(url):
                pass
        assert [each["method"] for each in rig.heard] == ["initialize" if is_known else "server/discover"]
        assert "429" in str(caught.value) or "Too many requests" in str(caught.value)
        assert getattr(caught.value, "retry_after", 7) == 7
        async with Client(url) as client:  # later
            assert client.revision == R4


@requirement("CLI-05", "CLI-06")
async def test_a_refusal_of_the_new_kind_is_looked_at_before_going_back(open_rig: OpenRig) -> None:
    async with open_rig("changes_its_mind", R5, "http", revision="auto", prepare=answering(400)) as (client, heard):
        assert client.revision == R5
        assert not heard.asked("initialize")


@requirement("CLI-08")
@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("plain", "plain"),
        ("größe", "=?base64?Z3LDtsOfZQ==?="),
        (" edge", "=?base64?IGVkZ2U=?="),
        ("=?base64?eA==?=", "=?base64?PT9iYXNlNjQ/ZUE9PT89?="),
    ],
)
async def test_every_request_is_mirrored_in_its_headers(open_rig: OpenRig, name: str, header: str) -> None:
    async with open_rig("ordinary", R5, "http") as (client, heard):
        await client.call(name, {})
        for message, headers in zip(heard.messages, heard.rig.headers, strict=True):  # type: ignore[attr-defined]
            assert headers["mcp-protocol-version"] == R5
            assert headers["mcp-method"] == message["method"]
            assert headers.get("mcp-name") == (header if message["method"] == "tools/call" else None)
            assert "mcp-session-id" not in headers


def region(**schema: Any) -> Object:
    return {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region", **schema}}}


@requirement("CLI-09")
async def test_marked_arguments_are_mirrored(open_rig: OpenRig) -> None:
    nested = {"type": "object", "properties": {"deep": {"type": "integer", "x-mcp-header": "Deep"}}}
    schema = region()
    schema["properties"] |= {"dry": {"type": "boolean", "x-mcp-header": "Dry"}, "inner": nested}

    def prepare(rig: Rig) -> None:
        rig.tools = [{"name": "echo", "inputSchema": schema}]

    cases: list[tuple[Object, Object]] = [
        ({"region": "eu", "dry": True, "inner": {"deep": -7}}, {"region": "eu", "dry": "true", "deep": "-7"}),
        ({"region": "Zürich"}, {"region": "=?base64?WsO8cmljaA==?="}),
        ({"region": None, "inner": {}}, {}),
        ({}, {}),
    ]
    async with open_rig("ordinary", R5, "http", prepare=prepare) as (client, heard):
        for arguments, wanted in cases:
            await client.call("echo", arguments)
            sent = heard.rig.headers[-1]  # type: ignore[attr-defined]  # an HttpRig
            found = {name[10:]: value for name, value in sent.items() if name.startswith("mcp-param-")}
            assert found == wanted


@requirement("CLI-10")
async def test_tools_that_cannot_be_mirrored_are_left_out(open_rig: OpenRig, caplog: pytest.LogCaptureFixture) -> None:
    bad = [
        region(type="number"),
        region(type="array"),
        region(type="object"),
        region(type=["string", "null"]),
        region(**{"x-mcp-header": ""}),
        region(**{"x-mcp-header": "Two Words"}),
        region(**{"x-mcp-header": "Umlaut-ä"}),
        region(**{"x-mcp-header": 7}),
        {"type": "object", "x-mcp-header": "Root"},
        {"type": "object", "properties": {"a": {"type": "array", "items": region()["properties"]["region"]}}},
        {"type": "object", "anyOf": [region()]},
        {"type": "object", "properties": {**region()["properties"], "b": {"type": "string", "x-mcp-header": "REGION"}}},
    ]

    def prepare(rig: Rig) -> None:
        rig.tools = [{"name": f"bad{number}", "inputSchema": schema} for number, schema in enumerate(bad)]
        rig.tools.append({"name": "good", "inputSchema": region()})

    async with open_rig("ordinary", R5, "http", prepare=prepare) as (client, _):
        tools = await client.tools()
        assert [tool.name for tool in tools] == ["good"]
        assert len(tools.refused) == len(bad) == caplog.text.count(" left out: ")


@requirement("CLI-11")
@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_mismatch_makes_the_list_anew_and_the_call_once_more(open_rig: OpenRig, stubborn: bool) -> None:
    def script(rig: Rig, message: Object) -> None:
        calls = rig.asked("tools/call")
        if message.get("method") == "tools/call" and (stubborn or len(calls) == 1):
            rig.tools = [{**rig.tools[0], "inputSchema": region()}]
            rig.error(message, -32020, "Mcp-Param-Region is missing")
        else:
            ordinary(rig, message)

    def prepare(rig: HttpRig) -> None:
        rig.state["ttl"] = 3_600_000

    async with open_rig(script, R5, "http", prepare=prepare) as (client, heard):
        if stubborn:
            with pytest.raises(RemoteProtocolError) as caught:
                await client.call("echo", {"region": "eu"})
            assert caught.value.code == -32020
        else:
            assert "eu" in (await client.call("echo", {"region": "eu"})).text
        assert len(heard.asked("tools/list")) == len(heard.asked("tools/call")) == 2
        assert heard.rig.headers[-1]["mcp-param-region"] == "eu"  # type: ignore[attr-defined]  # an HttpRig


@requirement("CLI-12")
@pytest.mark.parametrize("revision", [R2, R3, R4, R5])
async def test_both_kinds_of_answer_are_asked_for_and_read(open_rig: OpenRig, revision: str) -> None:
    """The second call is answered by events, with a comment and an empty event before its answer."""
    seen: list[Any] = []

    def script(rig: Rig, message: Object) -> None:
        if message.get("method") == "tools/call" and message["params"]["arguments"]:
            token = message["params"]["_meta"]["progressToken"]
            rig.notify("notifications/progress", progressToken=token, progress=1)
        ordinary(rig, message)

    async with open_rig(script, revision, "http") as (client, heard):
        assert (await client.call("echo", {})).text == "{}"
        assert (await client.call("echo", {"a": 1}, progress=seen.append)).text == '{"a": 1}'
        assert len(seen) == 1
        posts = [each for each in heard.rig.headers if each[""] == "POST"]  # type: ignore[attr-defined]
        assert {each["accept"] for each in posts} == {"application/json, text/event-stream"}
        assert {each["content-type"] for each in posts} == {"application/json"}


@requirement("CLI-13", "CLI-14")
@pytest.mark.parametrize("revision", [R2, R3, R4])
async def test_a_session_is_named_in_every_request_and_ended(open_rig: OpenRig, revision: str) -> None:
    async with open_rig("ordinary", revision, "http") as (client, heard):
        await client.call("echo", {})
    first, *others = heard.rig.headers  # type: ignore[attr-defined]  # an HttpRig
    assert "mcp-session-id" not in first and "mcp-protocol-version" not in first
    assert {each["mcp-session-id"] for each in others} == {"s-1"}
    assert {each.get("mcp-protocol-version") for each in others} == {None if revision == R2 else revision}
    assert others[-1][""] == "DELETE"


@requirement("CLI-13")
@pytest.mark.parametrize("revision", [R2, R3, R4])
async def test_a_session_that_is_gone_is_begun_anew(open_rig: OpenRig, revision: str) -> None:
    async with open_rig("ordinary", revision, "http") as (client, heard):
        await client.tools()
        rig: Any = heard.rig
        rig.ended, rig.session = {"s-1"}, "s-2"
        results = await asyncio.gather(*(client.call("echo", {"n": n}) for n in range(5)))
        assert [json.loads(each.text)["n"] for each in results] == [0, 1, 2, 3, 4]
        assert len(heard.asked("initialize")) == 2
        again = [each for each in rig.headers if each[""] == "POST"]
        assert sum("mcp-session-id" not in each for each in again) == 2
        rig.ended, rig.session = {"s-1", "s-2", "s-3"}, "s-3"  # and gone again at once
        with pytest.raises(PeerError):
            await client.call("echo", {})


@requirement("CLI-15")
@pytest.mark.parametrize("revision", [R2, R3, R4])
async def test_a_stream_that_ends_too_early_is_taken_up_again(open_rig: OpenRig, revision: str) -> None:
    def prepare(rig: HttpRig) -> None:
        rig.cuts = "tools/call"

    async with open_rig("ordinary", revision, "http", prepare=prepare) as (client, heard):
        assert (await client.call("echo", {"a": 1})).text == '{"a": 1}'
        came_back = [each for each in heard.rig.headers if "last-event-id" in each]  # type: ignore[attr-defined]
        (head,) = came_back
        assert (head[""], head["last-event-id"], head["mcp-session-id"]) == ("GET", "7", "s-1")


async def test_a_stateless_stream_that_ends_too_early_is_lost(open_rig: OpenRig) -> None:
    def prepare(rig: HttpRig) -> None:
        rig.cuts = "tools/call"

    async with open_rig("ordinary", R5, "http", prepare=prepare) as (client, heard):
        with pytest.raises(PeerError) as caught:
            await client.call("echo", {})
        assert caught.value.sent is Sent.UNKNOWN
        assert not [each for each in heard.rig.headers if each[""] == "GET"]  # type: ignore[attr-defined]


@requirement("CLI-34", "CLI-35")
@pytest.mark.parametrize("transport", ["memory", "stdio", "http"])
async def test_a_subscription_says_when_the_list_is_stale(open_rig: OpenRig, transport: str) -> None:
    async with open_rig("announces", R5, transport) as (client, heard):
        async with asyncio.timeout(PATIENCE):
            while len(heard.asked("subscriptions/listen")) < 1 or client.servers[_name(client)].is_stale:
                await client.tools()
                await asyncio.sleep(0)
        before = len(heard.asked("tools/list"))
        await client.tools()
        assert len(heard.asked("tools/list")) == before
        await client.call("echo", {})
        async with asyncio.timeout(PATIENCE):
            while len(heard.asked("tools/list")) == before:
                await client.tools()
                await asyncio.sleep(0)


def _name(client: Client) -> str:
    return next(iter(client.servers))
