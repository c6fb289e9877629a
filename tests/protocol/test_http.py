"""The HTTP endpoint, request by request over real sockets: REVISIONS.md sections 5, 6, 17 and 23."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import pytest_asyncio

from handrail import Call, Limits
from handrail.engine.dispatcher import Dispatcher
from handrail.stores.memory import MemoryStore
from handrail.transports.http.exchange import Exchange
from patience import PATIENCE
from requirements import requirement
from servers_http import (
    OPEN,
    Client,
    Desk,
    code,
    data,
    encoded,
    fetch,
    methods,
    rest,
    served,
    take,
    until,
)
from servers_listen import listening
from wires import ENVELOPE, Json, Object
from wires_http import BOTH, Headers, HttpServer, Reply, mirrored

pytestmark = pytest.mark.asyncio(loop_scope="module")

Ran = Callable[[str, str], None]

OLD = ("2024-10-07", "2024-11-05")
STREAMABLE = ("2025-03-26", "2025-06-18", "2025-11-25")
WITH_VERSION_HEADER = ("2025-06-18", "2025-11-25")
R2, R4, R5 = "2025-03-26", "2025-11-25", "2026-07-28"
LEGACY = (*OLD, *STREAMABLE, "pocket")
ALL = (*LEGACY, R5)
CHANGED = "notifications/tools/list_changed"
TAG = ENVELOPE + "subscriptionId"
VERSION = ENVELOPE + "protocolVersion"
CAPABILITIES = ENVELOPE + "clientCapabilities"

_names = itertools.count()


def fresh(what: str = "mark") -> str:
    """A name no other test uses."""
    return f"{what}-{next(_names)}"


def of(*revisions: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("revision", revisions)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for reply in OPEN:
        reply.close()
    OPEN.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk() -> AsyncIterator[Desk]:
    """The server most tests share."""
    made = Desk()
    made.endpoint = made.server.asgi()
    async with served(made.endpoint) as made.url:
        yield made
        for gate in made.gates.values():
            gate.set()


@pytest_asyncio.fixture(loop_scope="module")
async def client(desk: Desk, revision: str, ran: Ran) -> Client:
    """A client of this test's revision, opened."""
    opened = await Client(desk.url, revision).open()
    ran(revision, "http")
    return opened


@pytest_asyncio.fixture(loop_scope="module")
async def modern(desk: Desk, ran: Ran) -> Client:
    ran(R5, "http")
    return Client(desk.url, R5)


# Answers as JSON or as events


@requirement("SRV-203")
@of(*STREAMABLE, R5)
async def test_an_answer_that_is_all_there_is_to_say_is_one_json_object(client: Client) -> None:
    reply = await client.post(client.call(1, "echo", {"text": "hi"}))
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    answer = client.checked(await reply.body())
    assert answer["id"] == 1 and answer["result"]["content"][0]["text"] == "hi"


@requirement("SRV-203")
@of(*STREAMABLE, R5)
async def test_progress_makes_the_answer_a_stream_that_ends_with_the_answer(client: Client, desk: Desk) -> None:
    mark = fresh()
    desk.gates[mark].set()
    reply = await client.post(client.call(1, "held", {"mark": mark}, progressToken=mark))
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream")
    messages = await client.messages(reply)
    assert methods(messages) == ["notifications/progress"] * 2
    assert [each.get("id") for each in messages] == [None, None, 1]


@requirement("SRV-203")
@of(*STREAMABLE, R5)
async def test_a_client_that_takes_json_alone_gets_the_answer_without_the_progress(client: Client, desk: Desk) -> None:
    mark = fresh()
    desk.gates[mark].set()
    call = client.call(1, "held", {"mark": mark}, progressToken=mark)
    reply = await client.post(call, Accept="application/json")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert client.checked(await reply.body())["result"]["content"][0]["text"] == mark


@requirement("SRV-203")
@of(*STREAMABLE, R5)
async def test_a_client_that_takes_events_alone_gets_events(client: Client) -> None:
    reply = await client.post(client.call(1, "echo", {"text": "hi"}), Accept="text/event-stream")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream")
    assert [each["id"] for each in await client.messages(reply)] == [1]


@requirement("SRV-203")
@of(*STREAMABLE)
async def test_a_handshake_is_told_as_events_to_a_client_that_takes_nothing_else(desk: Desk, revision: str) -> None:
    client = Client(desk.url, revision)
    params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "rig", "version": "1"}}
    reply = await client.post(client.message(1, "initialize", params), Accept="text/event-stream")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream")
    assert reply.headers["mcp-session-id"]
    assert [each["result"]["protocolVersion"] for each in await client.messages(reply)] == [revision]


@requirement("SRV-203")
@of(*STREAMABLE, R5)
@pytest.mark.parametrize("accept", ["application/json", BOTH])
async def test_a_tool_that_says_more_than_may_wait_to_be_sent_still_ends(revision: str, ran: Ran, accept: str) -> None:
    desk = Desk(limits=Limits(max_unsent_bytes=1000, grace_seconds=0.1))
    async with served(desk.server.asgi()) as url:
        client = await Client(url, revision).open()
        ran(revision, "http")
        async with asyncio.timeout(PATIENCE):
            reply = await client.post(client.call(1, "chatters", {"times": 50}, progressToken="t"), Accept=accept)
            answer = await client.read(reply)
        assert answer["id"] == 1 and "50" in answer["result"]["content"][0]["text"]


JSON, EVENTS = "application/json", "text/event-stream"
ACCEPTED = [
    (None, JSON),
    ("*/*", JSON),
    (BOTH, JSON),
    ("text/event-stream, application/json", JSON),
    ("application/json", JSON),
    ("APPLICATION/JSON", JSON),
    ("application/*", JSON),
    ("application/json; charset=utf-8", JSON),
    ("application/json;q=0.1, text/event-stream;q=0.9", JSON),
    ("text/html, */*;q=0.1", JSON),
    ("application/json, text/event-stream;q=0", JSON),
    ("text/event-stream", EVENTS),
    ("Text/Event-Stream", EVENTS),
    ("text/*", EVENTS),
    ("application/json;q=0, text/event-stream", EVENTS),
    ("text/html", ""),
    ("application/json;q=0", ""),
    ("*/*;q=0", ""),
    ("application/jsonx", ""),
    ("application/json-rpc, text/plain", ""),
    ("text/event-streams", ""),
]


@requirement("SRV-228")
@pytest.mark.parametrize(("accept", "kind"), ACCEPTED, ids=[str(each) for each, _ in ACCEPTED])
async def test_accept_decides_the_form_of_the_answer(desk: Desk, modern: Client, accept: str | None, kind: str) -> None:
    before = desk.ran["echo"]
    reply = await modern.post(modern.call(1, "echo", {"text": "hi"}), Accept=accept)
    if kind:
        assert (reply.status, reply.headers["content-type"]) == (200, kind)
        assert (await modern.read(reply))["result"]["content"][0]["text"] == "hi"
    else:
        assert reply.status == 406
        assert desk.ran["echo"] == before


@requirement("SRV-228")
@of(*ALL)
async def test_accept_of_neither_form_is_refused_before_anything_runs(client: Client, desk: Desk) -> None:
    before = desk.ran["echo"]
    reply = await client.post(client.call(1, "echo", {"text": "hi"}), Accept="text/html")
    assert reply.status == 406
    assert desk.ran["echo"] == before


@requirement("SRV-228")
@of(*ALL)
async def test_a_body_of_another_type_is_refused_before_anything_runs(client: Client, desk: Desk) -> None:
    before = desk.ran["echo"]
    for kind in (
        None,
        "",
        "text/plain",
        "text/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonx",
        "application/json-rpc",
        "application/json, text/plain",
        "application/json; charset=utf-16",
    ):
        reply = await client.post(client.call(1, "echo", {"text": "hi"}), Content_Type=kind)
        assert reply.status == 415, kind
    assert desk.ran["echo"] == before
    for kind in ("application/json", "Application/JSON", "application/json; charset=utf-8"):
        reply = await client.post(client.call(1, "echo", {"text": "hi"}), Content_Type=kind)
        assert reply.status == 200, kind
    assert desk.ran["echo"] == before + 3


@requirement("SRV-228")
@of(*ALL)
async def test_a_compressed_body_is_refused(client: Client) -> None:
    reply = await client.post(client.call(1, "echo", {"text": "hi"}), Content_Encoding="gzip")
    assert reply.status == 415


# What is not answered


@requirement("SRV-204")
@of(*STREAMABLE, R5)
async def test_what_needs_no_answer_is_taken_with_202_and_nothing(client: Client) -> None:
    notices = [
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 77}},
        {"jsonrpc": "2.0", "method": "notifications/never/heard/of", "params": {"x": 1}},
    ]
    answers = [
        {"jsonrpc": "2.0", "id": 12345, "result": {}},
        {"jsonrpc": "2.0", "id": "never asked", "error": {"code": -1, "message": "no"}},
    ]
    for message in notices + ([] if client.stateless else answers):
        reply = await client.post(message)
        assert (reply.status, await reply.body()) == (202, b""), message
    if client.stateless:  # which has no questions to answer
        for message in answers:
            reply = await client.post(message)
            assert 400 <= reply.status < 500, message


# Sessions


@requirement("SRV-205")
@of(*STREAMABLE)
async def test_session_ids_are_visible_ascii_and_never_the_same(desk: Desk, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    client = Client(desk.url, revision)
    params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "rig", "version": "1"}}
    opening = client.message(1, "initialize", params)
    seen: set[str] = set()
    for _ in range(20):
        replies = await asyncio.gather(*(client.post(opening) for _ in range(50)))
        seen |= {reply.headers["mcp-session-id"] for reply in replies}
        for reply in replies:
            reply.close()
        OPEN.clear()
    assert len(seen) == 1000
    for ident in seen:
        assert re.fullmatch(r"[\x21-\x7e]{22,}", ident)


@requirement("SRV-206")
@of(*STREAMABLE)
async def test_a_request_without_its_session_is_refused(client: Client, desk: Desk) -> None:
    before = desk.ran["echo"]
    for message in (
        client.call(7, "echo", {"text": "hi"}),
        client.message(7, "tools/list"),
        client.message(7, "ping"),
    ):
        status, answer = await client.ask(message, Mcp_Session_Id=None)
        assert (status, code(answer), answer["id"]) == (400, -32600, 7)
    reply = await client.post({"jsonrpc": "2.0", "method": "notifications/initialized"}, Mcp_Session_Id=None)
    assert reply.status == 400
    assert (await client.get(Mcp_Session_Id=None, MCP_Protocol_Version=client.revision)).status == 400
    assert (await client.delete(Mcp_Session_Id=None)).status == 400
    assert desk.ran["echo"] == before


@requirement("SRV-207", "SRV-208")
@of(*STREAMABLE)
async def test_a_session_that_was_ended_is_gone_for_every_verb(client: Client, desk: Desk) -> None:
    before = desk.ran["echo"]
    reply = await client.delete()
    assert 200 <= reply.status < 300
    status, answer = await client.ask(client.call(3, "echo", {"text": "hi"}))
    assert (status, answer["id"]) == (404, 3)
    reply = await client.post({"jsonrpc": "2.0", "method": "notifications/initialized"})
    assert reply.status == 404
    assert (await client.get()).status == 404
    assert (await client.get(Last_Event_ID="x.1")).status == 404
    assert (await client.delete()).status == 404
    assert desk.ran["echo"] == before
    assert (await (await Client(desk.url, client.revision).open()).ask(client.message(1, "ping")))[0] == 200


@requirement("SRV-208")
@of(*STREAMABLE)
async def test_a_session_that_was_ended_hears_nothing_more(client: Client, desk: Desk) -> None:
    other = await Client(desk.url, client.revision).open()
    streams = [(await each.get()).events() for each in (client, other)]
    for events in streams:
        await anext(events)
    assert 200 <= (await client.delete()).status < 300
    desk.grow(fresh("tool"))
    assert data((await take(streams[1]))[0])["method"] == CHANGED
    assert not [each for each in await rest(streams[0]) if each.get("data")]


@requirement("SRV-207", "P-25")
@of(*LEGACY)
async def test_a_session_id_that_was_changed_anywhere_is_unknown(client: Client, desk: Desk) -> None:
    before = desk.ran["echo"]
    genuine = client.session
    forged = ["x", "0", genuine[:-1], genuine + "A", genuine + "=", genuine * 2, genuine.swapcase(), "~" * 30, "é"]
    for at, each in enumerate(genuine):
        other = "A" if each != "A" else "B"
        forged.append(genuine[:at] + other + genuine[at + 1 :])
    call = client.call(1, "echo", {"text": "hi"})
    statuses = [(await client.post(call, Mcp_Session_Id=ident)).status for ident in forged]
    assert statuses == [404] * len(forged)
    assert desk.ran["echo"] == before
    assert (await client.post(call)).status == 200


@requirement("SRV-207")
@of(*STREAMABLE)
async def test_a_session_id_is_good_for_a_day_and_no_longer(ran: Ran, revision: str) -> None:
    desk = Desk()
    now = 1_000_000.0
    desk.server.engine.clock = lambda: now
    async with served(desk.server.asgi()) as url:
        client = await Client(url, revision).open()
        ran(revision, "http")
        now += 24 * 3600 - 10
        assert (await client.ask(client.message(1, "ping")))[0] == 200
        now += 20
        assert (await client.ask(client.message(2, "ping")))[0] == 404


@requirement("SRV-207", "P-25")
async def test_a_session_is_known_wherever_the_key_is_and_nowhere_else(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, other = secrets.token_hex(32), secrets.token_hex(32)
    keys = (shared, shared, other)
    with ExitStack() as stack:
        addresses = []
        for key in keys:
            monkeypatch.setenv("HANDRAIL_KEY", key)
            server = HttpServer("servers_http:shop")
            stack.callback(server.stop)
            addresses.append(server.url)
        for revision in STREAMABLE:
            client = await Client(addresses[0], revision).open()
            ran(revision, "http")
            found = []
            for client.url in addresses:
                found.append((await client.ask(client.call(1, "echo", {"text": "hi"})))[0])
            assert found == [200, 200, 404]


@of(*STREAMABLE)
async def test_what_one_endpoint_notes_of_a_session_another_with_its_store_knows(revision: str, ran: Ran) -> None:
    store, here, there = MemoryStore(), Desk(), Desk()
    async with served(here.server.asgi(store=store)) as first, served(there.server.asgi(store=store)) as second:
        client = await Client(first, revision).open()
        ran(revision, "http")
        assert (await client.ask(client.message(1, "logging/setLevel", {"level": "debug"})))[0] == 200
        told = []
        for client.url, desk in ((second, there), (first, here)):
            mark = fresh()
            desk.gates[mark].set()
            reply = await client.post(client.call(2, "talks", {"mark": mark}))
            told.append([m["params"]["level"] for m in await client.messages(reply) if "method" in m])
        assert told == [["error", "debug"]] * 2
        client.url = second
        assert (await client.delete()).status in (200, 204)
        client.url = first
        assert (await client.ask(client.message(3, "ping")))[0] == 404


@of(*STREAMABLE)
async def test_a_log_level_lasts_from_one_post_to_the_next_and_in_one_session_only(client: Client, desk: Desk) -> None:
    other = await Client(desk.url, client.revision).open()
    assert (await client.ask(client.message(1, "logging/setLevel", {"level": "emergency"})))[0] == 200
    mark = fresh()
    desk.gates[mark].set()
    reply = await client.post(client.call(2, "talks", {"mark": mark}))
    assert not reply.is_stream and client.checked(await reply.body())["id"] == 2
    mark = fresh()
    desk.gates[mark].set()
    assert methods(await other.messages(await other.post(other.call(2, "talks", {"mark": mark})))) == [
        "notifications/message"
    ]


@of("2025-06-18", R4)
async def test_an_answer_may_reach_another_endpoint_than_the_question_left(revision: str, ran: Ran) -> None:
    store, here, there = MemoryStore(), Desk(), Desk()
    async with served(here.server.asgi(store=store)) as first, served(there.server.asgi(store=store)) as second:
        client = await Client(first, revision).open({"elicitation": {}})
        ran(revision, "http")
        reply = await client.post(client.call(1, "asks"))
        events = reply.events()
        (question,) = await take(events)
        client.url = second
        answer = {"action": "accept", "content": {"name": "Ada"}}
        posted = await client.post({"jsonrpc": "2.0", "id": data(question)["id"], "result": answer})
        assert (posted.status, await posted.body()) == (202, b"")
        (result,) = await take(events)
        assert client.checked(result["data"].encode())["result"]["content"][0]["text"] == "accept Ada"


async def test_an_endpoint_that_heard_too_late_listens_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("handrail.transports.http.endpoint.RESUBSCRIBE_SECONDS", 0)
    listening: asyncio.Queue[str] = asyncio.Queue()

    class Watched(MemoryStore):
        def subscribe(self, topic: str) -> Any:
            listening.put_nowait(topic)
            return super().subscribe(topic)

    store, here, there = Watched(), Desk(), Desk()
    async with served(here.server.asgi(store=store)) as first, served(there.server.asgi(store=store)) as second:
        client = await Client(first, R4).open({"elicitation": {}})
        events = (await client.post(client.call(1, "asks"))).events()
        ident = data((await take(events))[0])["id"]
        with monkeypatch.context() as patched:
            patched.setattr("handrail.stores.memory.MAX_QUEUED_MESSAGES", 0)
            await store.publish(await listening.get(), b"one too many")
        await asyncio.wait_for(asyncio.gather(*(listening.get() for _ in range(3))), PATIENCE)
        client.url = second
        await client.post({"jsonrpc": "2.0", "id": ident, "result": {"action": "accept", "content": {"name": "Ada"}}})
        (result,) = await take(events)
    assert data(result)["result"]["content"][0]["text"] == "accept Ada"
    assert "messages of other processes may be lost" in caplog.text


# GET streams


@requirement("SRV-209")
@of(*STREAMABLE)
async def test_get_opens_a_stream_for_what_the_server_says_unasked(client: Client, desk: Desk) -> None:
    reply = await client.get()
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream")
    events = reply.events()
    await anext(events)
    desk.grow(fresh("tool"))
    assert data((await take(events))[0])["method"] == CHANGED
    reply = await client.get(Accept="application/json")
    assert reply.status == 405
    assert "POST" in reply.headers["allow"]


@requirement("SRV-210")
@of(*STREAMABLE)
async def test_of_two_streams_of_a_session_one_hears_of_a_change(client: Client, desk: Desk) -> None:
    heard: asyncio.Queue[Headers] = asyncio.Queue()

    async def listen(events: AsyncIterator[Headers]) -> None:
        async for event in events:
            if event.get("data"):
                heard.put_nowait(event)

    streams = [(await client.get()).events() for _ in range(2)]
    for events in streams:
        await anext(events)  # the stream is open
    tasks = [asyncio.create_task(listen(events)) for events in streams]
    for _ in range(5):
        desk.grow(fresh("tool"))
        async with asyncio.timeout(PATIENCE):
            assert data(await heard.get())["method"] == CHANGED
    assert (await client.ask(client.message(1, "ping")))[0] == 200
    assert heard.empty()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@requirement("SRV-210")
@of(*STREAMABLE)
@pytest.mark.parametrize("leaving", [0, 1])
async def test_the_stream_that_stays_hears_what_comes_after_the_other_left(
    client: Client, desk: Desk, leaving: int
) -> None:
    replies = [await client.get() for _ in range(2)]
    streams = [reply.events() for reply in replies]
    for events in streams:
        await anext(events)
    open_before = len(desk.endpoint.state.open)
    replies[leaving].close()
    await until(lambda: len(desk.endpoint.state.open) < open_before)
    desk.grow(fresh("tool"))
    assert data((await take(streams[1 - leaving]))[0])["method"] == CHANGED


# Coming back for the rest


@requirement("SRV-211", "SRV-215")
@pytest.mark.parametrize(("revision", "read"), [*itertools.product(STREAMABLE, (1, 2, 3)), (R4, 0)])
async def test_whoever_was_cut_off_gets_exactly_the_rest_of_that_stream(client: Client, desk: Desk, read: int) -> None:
    mark, other = fresh(), fresh()
    reply = await client.post(client.call("cut", "held", {"mark": mark, "before": 3}, progressToken=mark))
    beside = await client.post(client.call("beside", "held", {"mark": other, "before": 3}, progressToken=other))
    events = reply.events()
    seen = await take(events, read) if read else [await anext(events)]
    reply.close()
    desk.gates[mark].set()
    desk.gates[other].set()
    assert len(await client.messages(beside)) == 5
    await desk.wait(desk.ended[mark])
    assert not desk.stopped[mark].is_set()
    for _ in range(2):  # a second time too: the connection could be lost again
        resumed = await client.get(Last_Event_ID=seen[-1]["id"])
        assert (resumed.status, resumed.is_stream) == (200, True)
        messages = [data(each) for each in await rest(resumed.events()) if each.get("data")]
        numbers = [each["params"]["progress"] for each in messages if "method" in each]
        assert numbers == [1, 2, 3, 4][read:]
        assert {each["params"]["progressToken"] for each in messages if "method" in each} == {mark}
        assert [each["result"]["content"][0]["text"] for each in messages if "id" in each] == [mark]


@requirement("SRV-211", "SRV-215")
@of(*STREAMABLE)
async def test_whoever_comes_back_early_hears_the_rest_as_it_happens(client: Client, desk: Desk) -> None:
    mark = fresh()
    reply = await client.post(client.call("cut", "held", {"mark": mark}, progressToken=mark))
    (seen,) = await take(reply.events())
    reply.close()
    events = (await client.get(Last_Event_ID=seen["id"])).events()
    await anext(events)  # it is open, and the call still waits
    assert not desk.ended[mark].is_set()
    desk.gates[mark].set()
    told = await take(events, 2)
    assert [data(each).get("id") for each in told] == [None, "cut"]
    assert len({seen["id"], *(each["id"] for each in told)}) == 3
    assert not [each for each in await rest(events) if each.get("data")]


@requirement("SRV-211", "P-25")
@of(*STREAMABLE)
async def test_the_events_of_a_session_are_not_told_to_another(client: Client, desk: Desk) -> None:
    mark, stranger = fresh(), await Client(desk.url, client.revision).open()
    reply = await client.post(client.call("mine", "held", {"mark": mark}, progressToken=mark))
    (seen,) = await take(reply.events())
    ident = seen["id"].rpartition(".")
    for foreign in (seen["id"], f"{ident[0]}.0"):
        overheard: list[Headers] = []
        spying = await stranger.get(Last_Event_ID=foreign)
        assert spying.status in (200, 400, 404)
        task = asyncio.create_task(_collect(spying, overheard))
        desk.gates[mark].set()
        resumed = await client.get(Last_Event_ID=seen["id"])
        assert [data(each).get("id") for each in await rest(resumed.events()) if each.get("data")] == [None, "mine"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not [each for each in overheard if each.get("data")]


async def _collect(reply: Reply, into: list[Headers]) -> None:
    if reply.is_stream:
        async for event in reply.events():
            into.append(event)


@requirement("SRV-211")
@of(*STREAMABLE)
async def test_an_event_id_that_is_none_is_refused(client: Client) -> None:
    for ident in ("nonsense", "abc.", ".5", "abc.x", "abc.-1", "abc.1e3", "abc.99999999999999999999", "é.²", "abc.１"):
        reply = await fetch(
            client.url,
            "GET",
            client.headers(Accept="text/event-stream", Last_Event_ID=ident.encode().decode("latin-1")),
        )
        assert reply.status in (400, 404), ident
    assert (await client.ask(client.message(1, "ping")))[0] == 200


@requirement("SRV-211")
@of(*STREAMABLE)
async def test_a_stream_for_unasked_messages_goes_on_where_it_was_cut(client: Client, desk: Desk) -> None:
    reply = await client.get()
    events = reply.events()
    await anext(events)
    desk.grow(fresh("tool"))
    (seen,) = await take(events)
    reply.close()
    desk.grow(fresh("tool"))  # while nobody listens
    resumed = await client.get(Last_Event_ID=seen["id"])
    assert resumed.status == 200
    events = resumed.events()
    (missed,) = await take(events)
    desk.grow(fresh("tool"))
    (heard,) = await take(events)
    assert [data(each)["method"] for each in (missed, heard)] == [CHANGED] * 2
    assert len({each["id"] for each in (seen, missed, heard)}) == 3


@requirement("SRV-212")
@of(*STREAMABLE, "pocket", R5)
async def test_only_in_2025_11_25_a_stream_begins_with_an_event_that_is_only_an_id(client: Client, desk: Desk) -> None:
    mark = fresh()
    desk.gates[mark].set()
    replies = [await client.post(client.call(1, "held", {"mark": mark}, progressToken=mark))]
    if not client.stateless:
        replies.append(await client.get())
    for reply in replies:
        first = await anext(reply.events())
        if client.revision == R4:
            assert first["id"] and first["data"] == ""
            assert first["retry"].isdigit()
        else:
            assert "retry" not in first
            assert first.get("data") != ""
            assert "" in first or data(first)["method"] == "notifications/progress"


@requirement("SRV-212")
@of(R4)
async def test_a_tool_may_send_the_client_away_to_come_back_for_the_rest(client: Client, desk: Desk) -> None:
    mark = fresh()
    reply = await client.post(client.call("away", "leaves", {"mark": mark}, progressToken=mark))
    before = await rest(reply.events())
    assert before[0]["data"] == "" and before[0]["retry"].isdigit()
    assert [data(each).get("id", "-") for each in before[1:]] == ["-"]
    assert not desk.ended[mark].is_set()  # the connection ended first
    events = (await client.get(Last_Event_ID=before[-1]["id"])).events()
    await anext(events)
    desk.gates[mark].set()
    after = [data(each) for each in await rest(events) if each.get("data")]
    assert [each.get("id", "-") for each in after] == ["-", "away"]
    assert after[0]["params"]["progress"] == 2


@of("2025-03-26", "2025-06-18", "pocket", R5)
async def test_where_a_stream_cannot_be_left_for_a_while_it_stays_until_the_answer(client: Client, desk: Desk) -> None:
    mark = fresh()
    reply = await client.post(client.call("stays", "leaves", {"mark": mark}, progressToken=mark))
    events = reply.events()
    await take(events)
    desk.gates[mark].set()
    assert [data(each).get("id", "-") for each in await rest(events) if each.get("data")] == ["-", "stays"]


# The version header


@requirement("SRV-213")
@of(*WITH_VERSION_HEADER)
@pytest.mark.parametrize("verb", ["POST", "GET", "DELETE"])
@pytest.mark.parametrize("version", ["nonsense", "1999-01-01", "2099-01-01", "2024-11-05", R2, "pocket", "2025", ""])
async def test_a_version_header_that_does_not_fit_the_session_is_refused(
    client: Client, desk: Desk, verb: str, version: str
) -> None:
    before = desk.ran["echo"]
    if verb == "POST":
        reply = await client.post(client.call(1, "echo", {"text": "hi"}), MCP_Protocol_Version=version)
    elif verb == "GET":
        reply = await client.get(MCP_Protocol_Version=version)
    else:
        reply = await client.delete(MCP_Protocol_Version=version)
    assert reply.status == 400
    assert desk.ran["echo"] == before
    assert (await client.ask(client.call(1, "echo", {"text": "hi"})))[0] == 200


@requirement("SRV-214")
@of(*STREAMABLE)
async def test_without_a_session_the_header_names_the_revision_and_without_a_header_it_is_2025_03_26(
    revision: str, ran: Ran
) -> None:
    desk = Desk()
    async with served(desk.server.asgi(legacy_stateless=True)) as url:
        client = Client(url, revision)
        ran(revision, "http")
        said = None if revision == R2 else revision
        pair = [client.call(1, "add", {"a": 1, "b": 2}), client.message(2, "ping")]
        reply = await client.post(pair, MCP_Protocol_Version=said)
        if revision == R2:
            found = {each["id"]: each["result"] for each in client.checked(await reply.body())}
            assert reply.status == 200 and set(found) == {1, 2}
            assert "structuredContent" not in found[1]
        else:
            assert (reply.status, code(await client.read(reply))) == (400, -32600)
        status, answer = await client.ask(pair[0], MCP_Protocol_Version=said)
        assert status == 200
        assert ("structuredContent" in answer["result"]) == (revision != R2)
        assert "mcp-session-id" not in reply.headers


@of(R4, R5)
async def test_a_request_leaves_nothing_for_the_garbage_collector(client: Client, desk: Desk) -> None:
    """What it leaves is its whole answer, and of long ones there would be hundreds before the collector came."""
    messages = [
        client.call(1, "echo", {"text": "x"}),
        client.call(2, "echo", {}),
        client.call(3, "nobody"),
        client.message(4, "tools/list"),
        client.message(5, "no/such"),
    ]

    def alive() -> int:
        return sum(isinstance(each, Exchange | Dispatcher | Call) for each in gc.get_objects())

    for message in messages:
        await (await client.post(message)).body()
    gc.collect()
    gc.disable()
    try:
        before = alive()
        for _ in range(5):
            for message in messages:
                await (await client.post(message)).body()
        assert alive() <= before + 2  # of the last one, perhaps
    finally:
        gc.enable()


# Going away


@requirement("SRV-215")
@of(*STREAMABLE)
@pytest.mark.parametrize("accept", [BOTH, "application/json"])
async def test_going_away_does_not_stop_a_call(client: Client, desk: Desk, accept: str) -> None:
    mark, before = fresh(), set(desk.endpoint.state.open)
    call = client.call(1, "held", {"mark": mark}, **({"progressToken": mark} if accept == BOTH else {}))
    writing = asyncio.create_task(client.post(call, Accept=accept))
    await desk.wait(desk.begun[mark])
    answers = list(desk.endpoint.state.open - before)
    assert len(answers) == 1
    if accept == BOTH:
        (await writing).close()
    else:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    await until(lambda: answers[0].stream.disconnected)
    desk.gates[mark].set()
    await desk.wait(desk.ended[mark])
    assert not desk.stopped[mark].is_set()


@requirement("P-30")
@of(*STREAMABLE)
async def test_a_call_whose_caller_has_gone_still_counts_and_ends_with_its_session(client: Client, desk: Desk) -> None:
    mark, before = fresh(), set(desk.endpoint.state.open)
    writing = asyncio.create_task(client.post(client.call(1, "held", {"mark": mark}), Accept="application/json"))
    await desk.wait(desk.begun[mark])
    (answer,) = desk.endpoint.state.open - before
    counted = desk.endpoint.state.calls[answer.principal.id]
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await until(lambda: answer.stream.disconnected)
    await client.ask(client.message(2, "ping"))
    assert desk.endpoint.state.calls[answer.principal.id] == counted
    assert (await client.delete()).status == 204
    await desk.wait(desk.stopped[mark])


@requirement("SRV-201")
@of(*STREAMABLE)
async def test_every_answer_is_in_the_form_that_is_accepted(client: Client) -> None:
    for message in (client.message(1, "ping"), client.message(2, "logging/setLevel", {"level": "info"})):
        reply = await client.post(message, Accept="text/event-stream")
        assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream")
        assert data((await rest(reply.events()))[-1])["id"] == message["id"]


@requirement("P-12")
async def test_a_message_that_is_whole_only_when_the_server_stops_is_not_begun() -> None:
    desk = Desk()
    endpoint = desk.server.asgi()
    async with served(endpoint) as url:
        client, place = Client(url, R5), url.split("/")[2]
        message = client.call(1, "echo", {"text": "late"})
        body = json.dumps(message).encode()
        fields = {**client.headers(message), "Content-Length": str(len(body)), "Host": place, "Connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        reader, writer = await asyncio.open_connection(*place.split(":"))
        writer.write(f"POST /mcp HTTP/1.1\r\n{head}\r\n".encode() + body[:10])
        await client.ask(client.message(2, "server/discover"))  # which comes after the half
        await endpoint.stop()
        writer.write(body[10:])
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert desk.ran["echo"] == 0


@requirement("SRV-216")
@pytest.mark.parametrize("accept", [BOTH, "application/json", "text/event-stream"])
async def test_in_2026_07_28_going_away_stops_the_call(modern: Client, desk: Desk, accept: str) -> None:
    mark = fresh()
    call = modern.call(1, "held", {"mark": mark}, progressToken=mark)
    writing = asyncio.create_task(modern.post(call, Accept=accept))
    await desk.wait(desk.begun[mark])
    if accept == "application/json":
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    else:
        (await writing).close()
    await desk.wait(desk.stopped[mark])


@requirement("SRV-216")
async def test_in_2026_07_28_nothing_more_is_said_to_whoever_hung_up(modern: Client, desk: Desk) -> None:
    mark = fresh()
    reply = await modern.post(modern.call(1, "held", {"mark": mark}, progressToken=mark))
    events = reply.events()
    await take(events)
    reply.writer.write_eof()
    await desk.wait(desk.stopped[mark])
    desk.gates[mark].set()
    assert not [each for each in await rest(events) if each.get("data")]


# What may stand on a stream of 2026-07-28


@requirement("SRV-217")
async def test_a_stream_of_2026_07_28_carries_what_belongs_to_its_request_and_nothing_else(
    modern: Client, desk: Desk
) -> None:
    marks = [fresh() for _ in range(3)]
    level = {ENVELOPE + "logLevel": "debug"}
    replies = [
        await modern.post(modern.call(mark, "talks", {"mark": mark}, progressToken=mark, **level)) for mark in marks
    ]
    for mark in marks:
        desk.gates[mark].set()
    for mark, reply in zip(marks, replies, strict=True):
        messages = await modern.messages(reply)
        assert methods(messages) == [
            "notifications/message",
            "notifications/progress",
            "notifications/message",
            "notifications/progress",
        ]
        assert all("id" not in each for each in messages[:-1])
        assert messages[-1]["id"] == mark and "method" not in messages[-1]
        for each in messages[:-1]:
            assert mark in (each["params"].get("data"), each["params"].get("progressToken"))


@requirement("SRV-217")
async def test_a_question_of_2026_07_28_is_an_answer_not_a_request(modern: Client) -> None:
    able: Object = {CAPABILITIES: {"elicitation": {"form": {}}}}
    reply = await modern.post(modern.call(1, "asks", **able), Accept="text/event-stream, application/json;q=0")
    messages = await modern.messages(reply) if reply.is_stream else [await modern.read(reply)]
    assert [each.get("id") for each in messages] == [1]
    assert messages[0]["result"]["resultType"] == "input_required"


@requirement("SRV-218")
async def test_streams_are_not_to_be_buffered_and_say_now_and_then_that_they_live(
    modern: Client, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.transports.http.exchange.KEEP_ALIVE_SECONDS", 0.01)
    mark = fresh()
    for message in (
        modern.call("call", "held", {"mark": mark}, progressToken=mark),
        modern.message("listen", "subscriptions/listen", {"notifications": {"toolsListChanged": True}}),
    ):
        reply = await modern.post(message)
        assert reply.is_stream
        assert reply.headers["x-accel-buffering"] == "no"
        assert "no-" in reply.headers["cache-control"]
        events = reply.events()
        await take(events)
        async with asyncio.timeout(PATIENCE):
            for _ in range(3):
                assert set(await anext(events)) == {""}


@of(*STREAMABLE, R5)
async def test_a_call_that_is_quiet_for_long_becomes_a_stream_that_says_it_lives(
    client: Client, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.transports.http.exchange.KEEP_ALIVE_SECONDS", 0.01)
    monkeypatch.setattr("handrail.transports.http.methods.QUIET_SECONDS", 0.06)
    mark = fresh()
    reply = await client.post(client.call(1, "held", {"mark": mark}))
    assert reply.is_stream and not desk.ended[mark].is_set()
    events = reply.events()
    async with asyncio.timeout(PATIENCE):
        comments = 0
        while comments < 3:
            comments += "" in await anext(events)
    desk.gates[mark].set()
    assert [data(each)["id"] for each in await rest(events) if each.get("data")] == [1]


@of(*STREAMABLE, R5)
async def test_a_quiet_call_stays_json_for_whoever_takes_nothing_else(
    client: Client, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.transports.http.exchange.KEEP_ALIVE_SECONDS", 0.01)
    monkeypatch.setattr("handrail.transports.http.methods.QUIET_SECONDS", 0.06)
    mark, beside = fresh(), fresh()
    asking = asyncio.create_task(client.post(client.call(1, "held", {"mark": mark}), Accept="application/json"))
    await desk.wait(desk.begun[mark])
    assert (await client.post(client.call(2, "held", {"mark": beside}))).is_stream  # it was quiet for long enough
    assert not asking.done()
    desk.gates[mark].set()
    reply = await asking
    assert (reply.headers["content-type"], client.checked(await reply.body())["id"]) == ("application/json", 1)


@requirement("SRV-219")
async def test_2026_07_28_has_no_sessions_and_nothing_to_come_back_for(modern: Client, desk: Desk) -> None:
    session = (await Client(desk.url, R4).open()).session
    for ident in ("nonsense", session):
        mark = fresh()
        desk.gates[mark].set()
        call = modern.call(1, "held", {"mark": mark}, progressToken=mark)
        reply = await modern.post(call, Mcp_Session_Id=ident, Last_Event_ID="x.3")
        assert reply.status == 200 and "mcp-session-id" not in reply.headers
        events = await rest(reply.events())
        assert len(events) == 3
        assert not [each for each in events if "id" in each or "retry" in each]
    for message in (modern.message(1, "server/discover"), modern.message(2, "tools/list")):
        reply = await modern.post(message, Mcp_Session_Id="nonsense", Last_Event_ID="x.3")
        assert reply.status == 200 and "mcp-session-id" not in reply.headers


# Mirrored headers (P-05)

ARGUMENTS = {"region": "eu-Central", "count": 42, "dry": True, "place": {"city": "Zürich"}}
RIGHT = {
    "MCP-Protocol-Version": R5,
    "Mcp-Method": "tools/call",
    "Mcp-Name": "mirrors",
    "Mcp-Param-Region": "eu-Central",
    "Mcp-Param-Count": "42",
    "Mcp-Param-Dry": "true",
    "Mcp-Param-City": encoded("Zürich"),
}
OTHER = {
    "MCP-Protocol-Version": R4,
    "Mcp-Method": "tools/list",
    "Mcp-Name": "echo",
    "Mcp-Param-Region": "eu-central",
    "Mcp-Param-Count": "43",
    "Mcp-Param-Dry": "false",
    "Mcp-Param-City": "Zurich",
}
PLAIN_ONLY = ("MCP-Protocol-Version", "Mcp-Method")


def _variants(name: str) -> Iterator[tuple[str, list[tuple[str, str]], bool]]:
    """What, the lines in place of the right one, and whether it still counts as the same."""
    right, other, may_encode = RIGHT[name], OTHER[name], name not in PLAIN_ONLY
    value = "Zürich" if name == "Mcp-Param-City" else right
    yield "missing", [], False
    yield "other", [(name, other)], False
    yield "name in lower case", [(name.lower(), right)], True
    yield "name in upper case", [(name.upper(), right)], True
    yield "blanks around", [(name, f"  {right} ")], True
    yield "empty", [(name, "")], False
    yield "twice the same", [(name, right), (name, right)], False
    yield "twice, other first", [(name, other), (name, right)], False
    yield "twice, other last", [(name.upper(), right), (name.lower(), other)], False
    yield "two in one", [(name, f"{right}, {right}")], False
    yield "a prefix", [(name, right[:-1])], False
    yield "more", [(name, right + "x")], False
    yield "encoded", [(name, encoded(value))], may_encode
    yield "encoded, other", [(name, encoded(other))], False
    yield "encoded twice", [(name, encoded(encoded(value)))], False
    yield "not base64", [(name, "=?base64?%%?=")], False
    yield "not padded", [(name, "=?base64?YWJjZA?=")], False
    yield "not UTF-8", [(name, "=?base64?/w==?=")], False
    yield "empty inside", [(name, "=?base64??=")], False
    yield "marker in upper case", [(name, encoded(value).replace("base64", "BASE64"))], False
    yield "marker without end", [(name, encoded(value)[:-2])], False
    yield "raw UTF-8", [(name, value.encode().decode("latin-1") + "é".encode().decode("latin-1"))], False
    if right.upper() != right:
        yield "value in upper case", [(name, right.upper())], False
    if name == "Mcp-Param-City":
        yield "raw Latin-1", [(name, "Zürich")], False
        yield "raw UTF-8 of the value", [(name, "Zürich".encode().decode("latin-1"))], False


P05 = [pytest.param(name, lines, same, id=f"{name}: {what}") for name in RIGHT for what, lines, same in _variants(name)]


@requirement("P-05", "SRV-220", "SRV-221", "SRV-222", "SRV-223")
@pytest.mark.parametrize(("name", "lines", "same"), P05)
async def test_headers_say_what_the_body_says_or_nothing_runs(
    modern: Client, desk: Desk, name: str, lines: list[tuple[str, str]], same: bool
) -> None:
    before = desk.ran["mirrors"]
    body = json.dumps(modern.call("p-05", "mirrors", ARGUMENTS), ensure_ascii=False).encode()
    pairs = [("Content-Type", "application/json"), ("Accept", BOTH)]
    pairs += [(each, value) for each, value in RIGHT.items() if each != name] + lines
    reply = await fetch(modern.url, "POST", pairs, body)
    if same:
        answer = await modern.read(reply)
        assert (reply.status, answer["id"]) == (200, "p-05")
        assert json.loads(answer["result"]["content"][0]["text"]) == ARGUMENTS
        assert desk.ran["mirrors"] == before + 1
        return
    assert desk.ran["mirrors"] == before
    assert reply.status == 400
    answer = await modern.read(reply)
    assert (code(answer), answer["id"]) == (-32020, "p-05")


@requirement("P-05")
@pytest.mark.parametrize("name", RIGHT)
async def test_a_header_with_a_character_no_header_has_is_refused(modern: Client, desk: Desk, name: str) -> None:
    before = desk.ran["mirrors"]
    for character in ("\x00", "\x01", "\x7f"):
        lines = {**RIGHT, name: f"{RIGHT[name]}{character}"}
        body = json.dumps(modern.call(1, "mirrors", ARGUMENTS)).encode()
        reply = await fetch(modern.url, "POST", {"Content-Type": "application/json", "Accept": BOTH, **lines}, body)
        assert reply.status == 400
    assert desk.ran["mirrors"] == before


@requirement("P-05")
async def test_a_body_that_names_2026_07_28_is_not_read_past_its_headers_through_an_old_stream(
    modern: Client, desk: Desk
) -> None:
    before = desk.ran["echo"]
    reply = await fetch(desk.url, "GET", {"Accept": "text/event-stream"})
    address = data_of_endpoint(desk.url, await anext(reply.events()))
    call = modern.call(1, "echo", {"text": "hi"})
    lying = {**modern.headers(call), "Mcp-Method": "tools/list", "Mcp-Name": "other"}
    posted = await fetch(address, "POST", lying, json.dumps(call).encode())
    assert posted.status in (202, 400)
    assert (await modern.ask(modern.message(2, "server/discover")))[0] == 200
    assert desk.ran["echo"] == before


@requirement("SRV-222")
async def test_a_name_that_is_not_ascii_is_decoded_before_it_is_compared(modern: Client, desk: Desk) -> None:
    before = desk.ran["größe"]
    call = modern.call(1, "größe", {"text": "four"})
    assert mirrored(call)["Mcp-Name"] == encoded("größe")
    status, answer = await modern.ask(call)
    assert (status, answer["result"]["structuredContent"]) == (200, 4)
    for wrong in ("größe", "größe".encode().decode("latin-1"), encoded("grosse"), "=?base64?Z3LDtsOfZ?="):
        status, answer = await modern.ask(call, Mcp_Name=wrong)
        assert (status, code(answer)) == (400, -32020), wrong
    assert desk.ran["größe"] == before + 1


@requirement("SRV-222")
@pytest.mark.parametrize(
    ("params", "name", "expected"),
    [
        ({}, "echo", (-32020, "Mcp-Name 'echo' does not match params.name, which is missing")),
        ({"name": None}, "echo", (-32020, "Mcp-Name 'echo' does not match params.name null")),
        ({"name": 7}, "echo", (-32020, "Mcp-Name 'echo' does not match params.name 7")),
        ({"name": "other"}, "echo", (-32020, "Mcp-Name 'echo' does not match params.name 'other'")),
        ({"name": "echo"}, None, (-32020, "The header Mcp-Name is missing; it must repeat params.name")),
        ({}, None, (-32020, "The header Mcp-Name is missing; it must repeat params.name")),
    ],
)
async def test_a_name_that_is_missing_is_not_called_none(
    modern: Client, params: dict[str, object], name: str | None, expected: tuple[int, str]
) -> None:
    message = modern.message(1, "tools/call", params)
    status, answer = await modern.ask(message, Mcp_Name=name)
    assert (status, code(answer)) == (400, expected[0])
    assert expected[1] in answer["error"]["message"] and "None" not in answer["error"]["message"]


@requirement("SRV-220")
@pytest.mark.parametrize("answered", [{"result": {}}, {"error": {"code": 1, "message": "x"}}])
async def test_a_response_at_2026_07_28_is_refused_as_one(modern: Client, answered: dict[str, object]) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": 7, **answered}).encode()
    headers = {"Content-Type": "application/json", "Accept": BOTH, "MCP-Protocol-Version": R5}
    reply = await fetch(modern.url, "POST", headers, body)
    answer = json.loads(await reply.body())
    assert (reply.status, code(answer)) == (400, -32600) and "id" not in answer
    assert "nothing to answer" in answer["error"]["message"] and "_meta" not in answer["error"]["message"]


MIRRORS: list[tuple[dict[str, object], Headers, bool]] = [
    # the table of section 23
    ({"region": "eu-central-1"}, {"Region": "eu-central-1"}, True),
    ({"place": {"city": "Zürich"}}, {"City": "=?base64?WsO8cmljaA==?="}, True),
    ({"region": " x"}, {"Region": "=?base64?IHg=?="}, True),
    ({"count": -7}, {"Count": "-7"}, True),
    ({"dry": True}, {"Dry": "true"}, True),
    # null and absent need no header
    ({}, {}, True),
    ({"plain": "nothing to mirror"}, {}, True),
    ({"place": {}}, {}, True),
    # blanks count, once they are encoded
    ({"region": " x"}, {"Region": " x"}, False),
    ({"region": "x"}, {"Region": encoded(" x")}, False),
    # what looks like the sentinel is sent encoded
    ({"region": "=?base64?IHg=?="}, {"Region": encoded("=?base64?IHg=?=")}, True),
    ({"region": "=?base64?IHg=?="}, {"Region": "=?base64?IHg=?="}, False),
    ({"region": ""}, {"Region": ""}, True),
    ({"region": ""}, {}, False),
    # values are compared by their type
    ({"dry": False}, {"Dry": "false"}, True),
    ({"dry": False}, {}, False),
    ({"dry": True}, {"Dry": "True"}, False),
    ({"dry": True}, {"Dry": "1"}, False),
    ({"count": 0}, {}, False),
    ({"region": "42"}, {"Region": "42.0"}, False),
    # headers nobody declared are nobody's business
    ({}, {"Unknown": "x"}, True),
    ({"plain": "a"}, {"Plain": "b"}, True),
]


@requirement("SRV-223")
@pytest.mark.parametrize(("arguments", "said", "same"), MIRRORS)
async def test_declared_arguments_stand_in_their_headers_too(
    modern: Client, desk: Desk, arguments: dict[str, object], said: Headers, same: bool
) -> None:
    before = desk.ran["mirrors"]
    own = {f"Mcp-Param-{name}": value for name, value in said.items()}
    status, answer = await modern.ask(modern.call(5, "mirrors", arguments), **own)
    if same:
        assert (status, json.loads(answer["result"]["content"][0]["text"])) == (200, arguments)
    else:
        assert (status, code(answer), answer["id"]) == (400, -32020, 5)
    assert desk.ran["mirrors"] == before + same


@requirement("SRV-223")
async def test_an_argument_that_is_null_needs_no_header(modern: Client) -> None:
    status, answer = await modern.ask(modern.call(1, "mirrors", {"region": None}))
    assert status == 200  # the schema may refuse it; the headers do not
    assert "result" in answer


@requirement("SRV-224")
@pytest.mark.parametrize(
    ("number", "said", "same"),
    [
        (42, "42", True),
        (42, "42.0", True),
        (42, "42.000", True),
        (-7, "-7.0", True),
        (0, "0", True),
        (9007199254740991, "9007199254740991", True),
        (-9007199254740991, "-9007199254740991.0", True),
        (42, "42.5", False),
        (42, "43", False),
        (42, "-42", False),
        (42, "4.2e1x", False),
        (42, "0x2a", False),
        (42, "forty-two", False),
        (42, "４２", False),
        (42, "42 42", False),
        (42, "nan", False),
        (42, "inf", False),
        (1, "true", False),
        (9007199254740992, "9007199254740993", False),
    ],
)
async def test_integers_are_compared_as_numbers(modern: Client, desk: Desk, number: int, said: str, same: bool) -> None:
    before = desk.ran["mirrors"]
    header = said if said.isascii() else said.encode().decode("latin-1")
    status, answer = await modern.ask(modern.call(1, "mirrors", {"count": number}), Mcp_Param_Count=header)
    assert status == (200 if same else 400)
    assert same or code(answer) == -32020
    assert desk.ran["mirrors"] == before + same


# Batches


@requirement("SRV-225")
@of(R2)
async def test_a_batch_is_answered_as_a_whole(client: Client, desk: Desk) -> None:
    batch = [
        client.call(1, "echo", {"text": "one"}),
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        client.call("1", "echo", {"text": "two"}),
    ]
    status, answers = await client.ask(batch)
    assert status == 200
    told = {(type(each["id"]), each["id"]): each["result"]["content"][0]["text"] for each in answers}
    assert told == {(int, 1): "one", (str, "1"): "two"}
    mark = fresh()
    desk.gates[mark].set()
    batch = [client.call(1, "held", {"mark": mark}, progressToken=mark), client.message(2, "ping")]
    reply = await client.post(batch)
    assert reply.is_stream
    found = [each for part in await rest(reply.events()) for each in _flat(data(part))]
    assert methods(found) == ["notifications/progress"] * 2
    assert {each["id"] for each in found if "id" in each} == {1, 2}


def _flat(message: Json) -> list[Object]:
    return message if isinstance(message, list) else [message]


@requirement("SRV-225")
@of(R2)
async def test_a_batch_without_requests_is_taken_and_an_empty_one_refused(client: Client) -> None:
    notice = {"jsonrpc": "2.0", "method": "notifications/never/heard/of"}
    reply = await client.post([notice, notice])
    assert (reply.status, await reply.body()) == (202, b"")
    reply = await client.post([{"jsonrpc": "2.0", "id": 5, "result": {}}])
    assert (reply.status, await reply.body()) == (202, b"")
    status, answer = await client.ask([])
    assert (status, code(answer)) == (400, -32600)


@requirement("SRV-225")
@of(R2)
async def test_a_handshake_inside_a_batch_is_refused_and_its_neighbours_are_answered(client: Client) -> None:
    params = {"protocolVersion": R4, "capabilities": {}, "clientInfo": {"name": "rig", "version": "1"}}
    opening = client.message("again", "initialize", params)
    reply = await client.post([opening, client.call(2, "echo", {"text": "hi"})])
    answers = {each["id"]: each for each in client.checked(await reply.body())}
    assert code(answers["again"]) == -32600
    assert answers[2]["result"]["content"][0]["text"] == "hi"
    assert "mcp-session-id" not in reply.headers
    assert reply.status == 200  # a client reads anything else as the failure of all
    reply = await client.post([opening])
    assert [code(each) for each in client.checked(await reply.body())] == [-32600]
    assert (await client.ask([client.message(3, "ping")]))[0] == 200  # still 2025-03-26


@requirement("SRV-226")
@of("2024-10-07", "2024-11-05", "2025-06-18", "2025-11-25", "pocket", R5)
async def test_elsewhere_an_array_is_refused(client: Client, desk: Desk) -> None:
    before = desk.ran["echo"]
    call = client.call(1, "echo", {"text": "hi"})
    batches: list[Json] = [[call], [call, call], [], [{"jsonrpc": "2.0", "method": "notifications/initialized"}], [[]]]
    for batch in batches:
        own = {"Mcp-Method": "tools/call", "Mcp-Name": "echo"} if client.stateless else {}
        status, answer = await client.ask(batch, **own)
        assert (status, code(answer)) == (400, -32600), batch
    assert desk.ran["echo"] == before


# Methods


@requirement("SRV-227")
@of(*LEGACY)
async def test_an_unknown_method_is_no_lost_session(client: Client) -> None:
    for method in ("foo/bar", "server/discover", "subscriptions/listen", ""):
        status, answer = await client.ask(client.message(4, method))
        assert (status, code(answer), answer["id"]) == (200, -32601, 4), method
    assert (await client.ask(client.message(5, "ping")))[0] == 200


@of(R5)
async def test_an_unknown_method_of_2026_07_28_is_not_found(client: Client) -> None:
    for method in ("foo/bar", "initialize", "ping", "logging/setLevel", "resources/subscribe"):
        status, answer = await client.ask(client.message(4, method))
        assert (status, code(answer), answer["id"]) == (404, -32601, 4), method


# The transport of 2024


def data_of_endpoint(url: str, event: Headers) -> str:
    assert event["event"] == "endpoint"
    address = event["data"]
    assert address.startswith("/mcp?sessionId=")
    return url.removesuffix("/mcp") + address


@requirement("SRV-229")
@of(*OLD)
async def test_a_client_of_2024_has_one_stream_and_an_address_to_post_to(desk: Desk, revision: str, ran: Ran) -> None:
    reply = await fetch(desk.url, "GET", {"Accept": "text/event-stream"})
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream")
    events = reply.events()
    client = Client(data_of_endpoint(desk.url, await anext(events)), revision)
    ran(revision, "http")
    kind = {"Content-Type": "application/json"}
    params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "rig", "version": "1"}}
    for message in (
        client.message(1, "initialize", params),
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        client.call(2, "add", {"a": 1, "b": 2}),
        client.message("3", "foo/bar"),
    ):
        posted = await fetch(client.url, "POST", kind, json.dumps(message).encode())
        assert (posted.status, await posted.body()) == (202, b"")
    told = await take(events, 3)
    assert {each["event"] for each in told} == {"message"}
    answers = {each["id"]: each for each in (client.checked(each["data"].encode()) for each in told)}
    assert answers[1]["result"]["protocolVersion"] == revision
    assert ("toolResult" in answers[2]["result"]) == (revision == "2024-10-07")
    assert code(answers["3"]) == -32601
    desk.grow(fresh("tool"))
    (notice,) = await take(events)
    assert (notice["event"], data(notice)["method"]) == ("message", CHANGED)


@requirement("SRV-229")
@of(*OLD)
async def test_at_the_address_of_a_stream_that_was_left_nothing_runs(desk: Desk, revision: str, ran: Ran) -> None:
    reply = await fetch(desk.url, "GET", {"Accept": "text/event-stream"})
    events = reply.events()
    client = Client(data_of_endpoint(desk.url, await anext(events)), revision)
    ran(revision, "http")
    params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "rig", "version": "1"}}
    opening, call = client.message(1, "initialize", params), client.call(2, "echo", {"text": "hi"})
    kind = {"Content-Type": "application/json"}
    for message in (opening, call):
        assert (await fetch(client.url, "POST", kind, json.dumps(message).encode())).status == 202
    await take(events, 2)
    before, open_before = desk.ran["echo"], len(desk.endpoint.state.sse_streams)
    body = json.dumps(call).encode()
    assert (await fetch(client.url + "x", "POST", kind, body)).status == 404
    assert (await fetch(client.url.replace("sessionId", "sessionid"), "POST", kind, body)).status == 400
    reply.close()
    await until(lambda: len(desk.endpoint.state.sse_streams) < open_before)
    assert (await fetch(client.url, "POST", kind, body)).status in (202, 404)
    assert (await (await Client(desk.url, R4).open()).ask(client.message(1, "ping")))[0] == 200
    assert desk.ran["echo"] == before


@requirement("SRV-229")
@of(*OLD)
async def test_two_clients_of_2024_do_not_hear_each_other(desk: Desk, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    both = []
    for _ in range(2):
        reply = await fetch(desk.url, "GET", {"Accept": "text/event-stream"})
        events = reply.events()
        both.append((data_of_endpoint(desk.url, await anext(events)), events))
    assert both[0][0] != both[1][0]
    params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "rig", "version": "1"}}
    for at, (address, events) in enumerate(both):
        client = Client(address, revision)
        for message in (client.message(1, "initialize", params), client.call(2, "echo", {"text": f"for {at}"})):
            await fetch(address, "POST", {"Content-Type": "application/json"}, json.dumps(message).encode())
        answers = [client.checked(each["data"].encode()) for each in await take(events, 2)]
        assert [each["id"] for each in answers] == [1, 2]
        assert f"for {at}" in json.dumps(answers[1])


# One revision only


@requirement("SRV-230")
async def test_a_server_of_2026_07_28_alone_has_only_post(ran: Ran) -> None:
    desk = Desk(revisions=[R5])
    async with served(desk.server.asgi()) as url:
        client = Client(url, R5)
        ran(R5, "http")
        for verb in ("GET", "DELETE"):
            for headers in (
                {"Accept": "text/event-stream"},
                {"Accept": "text/event-stream", "MCP-Protocol-Version": R5},
                {"Accept": "text/event-stream", "Mcp-Session-Id": "x", "Last-Event-ID": "x.1"},
            ):
                reply = await fetch(url, verb, headers)
                assert (reply.status, reply.headers["allow"]) == (405, "POST")
        assert (await client.ask(client.call(1, "echo", {"text": "hi"})))[0] == 200
        params = {"protocolVersion": R4, "capabilities": {}, "clientInfo": {"name": "rig", "version": "1"}}
        opening = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
        status, answer = await client.ask(opening, MCP_Protocol_Version=None)
        assert status == 400 and answer["id"] == 1
        assert R5 in json.dumps(answer["error"])


@of(R4)
async def test_other_verbs_are_not_allowed(client: Client) -> None:
    for verb in ("PUT", "PATCH", "HEAD"):
        reply = await fetch(client.url, verb, client.headers())
        assert reply.status == 405
        assert set(reply.headers["allow"].split(", ")) == {"GET", "POST", "DELETE"}
    for path in ("/", "/mcpx", "/mcp/x", "/other"):
        url = client.url.removesuffix("/mcp") + path
        assert (await fetch(url, "POST", client.headers(), b"{}")).status == 404


# Limits


@requirement("SRV-231")
@of(*ALL)
async def test_a_body_that_is_too_long_is_refused_and_the_server_lives_on(revision: str, ran: Ran) -> None:
    desk = Desk(limits=Limits(max_message_bytes=64 * 1024))
    async with served(desk.server.asgi()) as url:
        client = await Client(url, revision).open()
        ran(revision, "http")
        small, large = (client.call(1, "echo", {"text": "x" * size}) for size in (60_000, 70_000))
        reply = await client.post(large)
        assert reply.status == 413
        # Declared, and never sent: the answer does not wait for it.
        reply = await client.post(b"{", **{**client.headers(large), "Content-Length": "10000000000"})
        assert reply.status == 413
        # Not declared, and without an end.
        pieces = b"".join(b"4000\r\n" + b" " * 0x4000 + b"\r\n" for _ in range(5))
        reply = await client.post(pieces, **{**client.headers(large), "Transfer-Encoding": "chunked"})
        assert reply.status == 413
        assert desk.ran["echo"] == 0
        assert (await client.ask(small))[0] == 200
        assert desk.ran["echo"] == 1


@requirement("SRV-231")
@of(*STREAMABLE)
async def test_too_many_streams_are_refused_and_those_that_are_open_stay(
    client: Client, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await client.get()
    events = first.events()
    await anext(events)
    monkeypatch.setattr("handrail.transports.http.methods.MAX_STREAMS", len(desk.endpoint.state.open))
    reply = await client.get()
    assert reply.status == 503 and reply.headers["retry-after"].isdigit()
    desk.grow(fresh("tool"))
    assert data((await take(events))[0])["method"] == CHANGED
    monkeypatch.undo()
    assert (await client.get()).status == 200


@requirement("SRV-231")
@of(*STREAMABLE, R5)
async def test_too_many_calls_at_once_are_refused_with_the_id_and_a_time_to_come_back(revision: str, ran: Ran) -> None:
    desk = Desk(limits=Limits(max_calls=3))
    async with served(desk.server.asgi()) as url:
        client = await Client(url, revision).open()
        ran(revision, "http")
        marks = [fresh() for _ in range(3)]
        replies = [await client.post(client.call(m, "held", {"mark": m}, progressToken=m)) for m in marks]
        reply = await client.post(client.call("over", "held", {"mark": fresh()}))
        assert reply.status == 429 and reply.headers["retry-after"].isdigit()
        answer = client.checked(await reply.body())
        assert (code(answer), answer.get("id")) == (429, "over")
        for mark, reply in zip(marks, replies, strict=True):
            desk.gates[mark].set()
            assert (await client.messages(reply))[-1]["id"] == mark
        assert (await client.ask(client.call(9, "echo", {"text": "hi"})))[0] == 200


@requirement("SRV-231")
@of(*ALL)
async def test_headers_that_are_too_long_or_too_many_are_refused(revision: str, ran: Ran) -> None:
    desk = Desk()
    async with served(desk.server.asgi(), max_header_bytes=4096, max_headers=30) as url:
        client = await Client(url, revision).open()
        ran(revision, "http")
        call = client.call(1, "echo", {"text": "hi"})
        assert (await client.post(call, **{"X-Long": "x" * 5000})).status == 431
        assert (await client.post(call, **{f"X-{at}": "x" for at in range(40)})).status == 431
        assert desk.ran["echo"] == 0
        assert (await client.post(call, **{"X-Long": "x" * 2000})).status == 200


@of("2025-06-18", R4)
async def test_a_question_to_a_client_that_cannot_be_asked_ends_the_call(desk: Desk, revision: str, ran: Ran) -> None:
    client = await Client(desk.url, revision).open({"elicitation": {}})
    ran(revision, "http")
    status, answer = await client.ask(client.call(1, "asks"), Accept="application/json")
    assert (status, answer["result"]["isError"]) == (200, True)


# Subscriptions


@of(R5)
async def test_a_subscription_is_acknowledged_then_told_of_changes_under_its_own_id(client: Client, desk: Desk) -> None:
    wanted = {"toolsListChanged": True, "promptsListChanged": True, "resourceSubscriptions": ["file:///x"]}
    streams = {}
    for ident in (7, "7", "sub-1"):
        reply = await client.post(client.message(ident, "subscriptions/listen", {"notifications": wanted}))
        assert (reply.status, reply.is_stream) == (200, True)
        streams[(type(ident), ident)] = reply.events()
    nothing = await client.post(client.message(8, "subscriptions/listen", {"notifications": {}}))
    quiet = nothing.events()
    assert data((await take(quiet))[0])["params"]["notifications"] == {}
    for (kind, ident), events in streams.items():
        (first,) = await take(events)
        message = client.checked(first["data"].encode())
        assert message["method"] == "notifications/subscriptions/acknowledged"
        assert message["params"]["notifications"] == {"toolsListChanged": True}
        assert (type(message["params"]["_meta"][TAG]), message["params"]["_meta"][TAG]) == (kind, ident)
    desk.grow(fresh("tool"))
    for (kind, ident), events in streams.items():
        (notice,) = await take(events)
        message = client.checked(notice["data"].encode())
        assert message["method"] == CHANGED
        assert (type(message["params"]["_meta"][TAG]), message["params"]["_meta"][TAG]) == (kind, ident)
    heard: list[Headers] = []
    task = asyncio.create_task(_gather(quiet, heard))
    desk.grow(fresh("tool"))
    for events in streams.values():
        await take(events)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not [each for each in heard if each.get("data")]


async def _gather(events: AsyncIterator[Headers], into: list[Headers]) -> None:
    async for event in events:
        into.append(event)


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_server_that_stops_ends_its_streams_with_a_result_and_its_calls_with_their_answer(
    ran: Ran, is_busy: bool
) -> None:
    desk = Desk()
    endpoint = desk.server.asgi()
    async with served(endpoint) as url:
        client, old = Client(url, R5), await Client(url, R4).open()
        for revision in (R4, R5):
            ran(revision, "http")
        wanted = {"notifications": {"toolsListChanged": True}}
        listening = (await client.post(client.message("sub", "subscriptions/listen", wanted))).events()
        await take(listening)
        unasked = (await old.get()).events()
        await anext(unasked)
        calls = []
        mark = fresh()
        for each in (client, old) if is_busy else ():
            reply = await each.post(each.call("call", "held", {"mark": mark}, progressToken=mark))
            calls.append(reply.events())
            await take(calls[-1])
        stopping = asyncio.create_task(endpoint.stop())
        told = [data(each) for each in await rest(listening) if each.get("data")]
        assert (await client.post(client.message(1, "server/discover"))).status == 503
        desk.gates[mark].set()
        for events in calls:
            assert [data(each).get("id") for each in await rest(events) if each.get("data")] == [None, "call"]
        assert not [each for each in await rest(unasked) if each.get("data")]
        await stopping
        assert [each.get("id") for each in told] == ["sub"]
        assert told[0]["result"]["resultType"] == "complete"
        assert told[0]["result"]["_meta"][TAG] == "sub"


# Who is speaking: section 6


CALL: Object = {"name": "echo", "arguments": {"text": "hi"}}
MODERN_META: Object = {VERSION: R5, CAPABILITIES: {}}


def _request(method: str = "tools/call", params: Object | None = None) -> Object:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": CALL if params is None else params}


MODERN_CALL = _request(params={**CALL, "_meta": MODERN_META})
SESSION = {"Mcp-Session-Id": "{session}"}  # of 2025-11-25
UNKNOWN = {"Mcp-Session-Id": "unknown"}
NONSENSE = {"MCP-Protocol-Version": "nonsense"}
MODERN = {"MCP-Protocol-Version": R5}
ROWS: list[tuple[int, Json, Headers, tuple[int, int | None]]] = [
    (1, b"not JSON", {"Origin": "http://evil.example", **SESSION}, (403, None)),
    (8, b"{", SESSION, (400, -32700)),
    (8, b"", SESSION, (400, -32700)),
    (8, b"\xff\xfe", {}, (400, -32700)),
    (8, b"\xff\xfe", UNKNOWN, (400, -32700)),
    (8, b'{"a":1}{"b":2}', NONSENSE, (400, -32700)),
    (9, [_request()], SESSION, (400, -32600)),
    (9, [_request()], MODERN, (400, -32600)),
    (9, [MODERN_CALL], MODERN, (400, -32600)),
    (9, [_request()], NONSENSE, (400, -32600)),
    (9, [_request()], {}, (400, -32600)),
    (10, 5, SESSION, (400, -32600)),
    (10, b"null", SESSION, (400, -32600)),
    (10, {"id": 1, "method": "tools/list"}, SESSION, (400, -32600)),
    (10, {"jsonrpc": "2.0", "id": None, "method": "tools/list"}, SESSION, (400, -32600)),
    (10, {"jsonrpc": "2.0", "id": 1}, NONSENSE, (400, -32600)),
    (11, MODERN_CALL, {**MODERN, **mirrored(MODERN_CALL), **SESSION}, (200, None)),
    (11, MODERN_CALL, {**MODERN, **mirrored(MODERN_CALL), **UNKNOWN}, (200, None)),
    (11, MODERN_CALL, SESSION, (400, -32020)),
    (11, _request("initialize", {"_meta": MODERN_META}), {**MODERN, "Mcp-Method": "initialize"}, (404, -32601)),
    (12, _request("initialize", {}), MODERN, (200, -32602)),
    (12, _request("initialize", {}), NONSENSE, (200, -32602)),
    (12, _request("initialize", {}), UNKNOWN, (200, -32602)),
    (13, _request(), {**MODERN, **SESSION}, (400, -32602)),
    (13, _request(), {**MODERN, **UNKNOWN}, (400, -32602)),
    (13, _request("ping", {}), MODERN, (400, -32602)),
    (14, _request(), SESSION, (200, None)),
    (14, _request(), {"MCP-Protocol-Version": R4, **SESSION}, (200, None)),
    (14, _request(), {"MCP-Protocol-Version": "2025-06-18", **SESSION}, (400, -32600)),
    (14, _request(), {**NONSENSE, **SESSION}, (400, -32600)),
    (14, _request(), {"MCP-Protocol-Version": R4, **UNKNOWN}, (404, -32600)),
    (15, _request(), NONSENSE, (400, -32602)),
    (16, _request(), {"MCP-Protocol-Version": R4}, (400, -32600)),
    (16, _request(), {}, (400, -32600)),
]


@requirement("SRV-213")
@pytest.mark.parametrize(("row", "message", "headers", "expected"), ROWS)
async def test_who_is_speaking(
    desk: Desk, ran: Ran, row: int, message: Json, headers: Headers, expected: tuple[int, int | None]
) -> None:
    """The rows of section 6 that are about POST."""
    client = await Client(desk.url, R4).open()
    for revision in (R4, R5):
        ran(revision, "http")
    before = desk.ran["echo"]
    own = {name: value.replace("{session}", client.session) for name, value in headers.items()}
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    reply = await fetch(desk.url, "POST", {"Content-Type": "application/json", "Accept": BOTH, **own}, body)
    text = await reply.body()
    answer = json.loads(text) if reply.headers["content-type"] == "application/json" else {}
    assert (reply.status, answer.get("error", {}).get("code")) == expected
    assert desk.ran["echo"] == before + (expected == (200, None))
    if row > 10:
        assert answer["id"] == 1


LOOKS: list[tuple[int, str, Headers, set[int]]] = [
    (3, "GET", {"Accept": EVENTS, **SESSION}, {200}),
    (3, "GET", {"Accept": EVENTS, "MCP-Protocol-Version": R4, **SESSION}, {200}),
    (4, "GET", {"Accept": EVENTS}, {200}),
    (5, "GET", {"Accept": JSON}, {405}),
    (5, "GET", {"Accept": JSON, **SESSION}, {405}),
    (5, "GET", {"Accept": EVENTS, "MCP-Protocol-Version": R4}, {400}),
    (5, "GET", {"Accept": EVENTS, "MCP-Protocol-Version": R5}, {405}),
    (5, "GET", {"Accept": EVENTS, "MCP-Protocol-Version": R5, **SESSION}, {405}),
    (5, "GET", {"Accept": EVENTS, "MCP-Protocol-Version": R5, "Last-Event-ID": "x.1", **SESSION}, {405}),
    (5, "GET", {"Accept": EVENTS, **UNKNOWN}, {404}),
    (6, "DELETE", SESSION, {200, 204}),
    (6, "DELETE", UNKNOWN, {404}),
    (6, "DELETE", {}, {400}),
    (6, "DELETE", {"MCP-Protocol-Version": R4}, {400}),
    (6, "DELETE", {"MCP-Protocol-Version": R5}, {405}),
    (6, "DELETE", {"MCP-Protocol-Version": R5, **SESSION}, {405}),
]


@requirement("SRV-208", "SRV-209")
@pytest.mark.parametrize(("row", "verb", "headers", "statuses"), LOOKS)
async def test_who_is_listening(
    desk: Desk, ran: Ran, row: int, verb: str, headers: Headers, statuses: set[int]
) -> None:
    """The rows of section 6 that are about GET and DELETE."""
    client = await Client(desk.url, R4).open()
    ran(R4, "http")
    own = {name: value.replace("{session}", client.session) for name, value in headers.items()}
    reply = await fetch(desk.url, verb, own)
    assert reply.status in statuses
    if headers.get("MCP-Protocol-Version") == R5:
        assert reply.headers["allow"] == "POST" and R5 in (await reply.body()).decode()
    if reply.status == 200 and verb == "GET":
        first = await anext(reply.events())
        assert (first.get("event") == "endpoint") == (row == 4)


async def test_what_is_missing_is_named(desk: Desk, ran: Ran) -> None:
    ran(R5, "http")
    client = Client(desk.url, R5)
    bare = {"jsonrpc": "2.0", "id": 3, "method": "tools/list"}
    status, answer = await client.ask(bare)
    assert (status, code(answer), answer["id"]) == (400, -32602, 3)
    assert VERSION in answer["error"]["message"] and CAPABILITIES in answer["error"]["message"]
    status, answer = await client.ask(bare, MCP_Protocol_Version="nonsense", Mcp_Method=None)
    assert (status, code(answer), answer["error"]["data"]["requested"]) == (400, -32602, "nonsense")
    assert R4 in answer["error"]["data"]["supported"] and "pocket" not in answer["error"]["data"]["supported"]


@requirement("SRV-220")
async def test_an_earlier_failure_hides_later_ones(modern: Client, desk: Desk) -> None:
    """The ladder of section 6: the request starts wrong in every way, and is put right step by step."""
    meta: dict[str, object] = {VERSION: R4}
    arguments: object = []
    params: dict[str, object] = {"name": "needs", "arguments": arguments, "_meta": meta}
    message: dict[str, object] = {"jsonrpc": "2.0", "id": "step", "method": "no/such/method", "params": params}
    headers = {"MCP-Protocol-Version": R5, "Mcp-Method": "tools/list", "Mcp-Name": "other", "Mcp-Param-Region": "us"}

    async def step() -> tuple[int, object]:
        own = {"Content-Type": "application/json", "Accept": BOTH, **headers}
        reply = await fetch(desk.url, "POST", own, json.dumps(message).encode())
        answer = await modern.read(reply)
        assert answer["id"] == "step"
        return reply.status, answer["error"]["code"] if "error" in answer else answer["result"]["isError"]

    assert await step() == (400, -32020)  # a: the header says another version
    headers["MCP-Protocol-Version"] = R4
    assert await step() == (400, -32022)  # b: both name a version that needs a handshake
    meta[VERSION] = headers["MCP-Protocol-Version"] = "2099-01-01"
    assert await step() == (400, -32022)  # b: and one that nobody knows
    meta[VERSION] = headers["MCP-Protocol-Version"] = R5
    assert await step() == (400, -32602)  # c: no capabilities
    meta[CAPABILITIES] = []
    assert await step() == (400, -32602)
    meta[CAPABILITIES] = {}
    meta[ENVELOPE + "clientInfo"] = {"name": 5}
    assert await step() == (400, -32602)
    meta[ENVELOPE + "clientInfo"] = {"name": "rig", "version": "1"}
    assert await step() == (400, -32020)  # d: another method
    headers["Mcp-Method"] = "no/such/method"
    assert await step() == (404, -32601)  # e: which does not exist
    message["method"] = headers["Mcp-Method"] = "tools/call"
    assert await step() == (400, -32020)  # d: another name
    headers["Mcp-Name"] = "needs"
    assert await step() == (200, -32602)  # f: arguments are no object
    params["arguments"] = {"region": "eu"}
    assert await step() == (400, -32020)  # g: another region
    headers["Mcp-Param-Region"] = "eu"
    assert await step() == (400, -32021)  # h: a capability
    params["name"] = headers["Mcp-Name"] = "no such tool"
    assert await step() == (200, -32602)  # i: whatever the handler says
    params["name"] = headers["Mcp-Name"] = "echo"
    assert await step() == (200, True)
    params["arguments"] = {"text": "hi"}
    assert await step() == (200, False)


# Each request its own answer


@requirement("P-08")
@of(*STREAMABLE, "pocket", R5)
async def test_ids_that_differ_in_type_alone_are_two(client: Client, desk: Desk) -> None:
    marks = {1: fresh(), "1": fresh()}
    replies = {
        ident: await client.post(client.call(ident, "held", {"mark": mark}, progressToken=mark))
        for ident, mark in marks.items()
    }
    for ident in ("1", 1):
        desk.gates[marks[ident]].set()
        answer = (await client.messages(replies[ident]))[-1]
        assert (type(answer["id"]), answer["id"]) == (type(ident), ident)
        assert answer["result"]["content"][0]["text"] == marks[ident]


@requirement("P-08")
@of(*STREAMABLE, "pocket")
async def test_an_id_in_use_is_refused_and_its_first_user_undisturbed(client: Client, desk: Desk) -> None:
    mark, second = fresh(), fresh()
    reply = await client.post(client.call(1, "held", {"mark": mark}, progressToken=mark))
    status, answer = await client.ask(client.call(1, "held", {"mark": second}))
    assert (status, code(answer), answer["id"]) == (400, -32600, 1)
    assert not desk.begun[second].is_set()
    desk.gates[mark].set()
    assert (await client.messages(reply))[-1]["result"]["content"][0]["text"] == mark


@requirement("P-08")
async def test_two_hundred_calls_with_the_same_ids_each_get_their_own_answer(desk: Desk, ran: Ran) -> None:
    clients = [await Client(desk.url, revision).open() for revision in (*LEGACY, R5, R5, R5, R5)]
    for each in clients:
        ran(each.revision, "http")

    async def one(client: Client, ident: object, mark: str) -> str:
        reply = await client.post(client.call(ident, "held", {"mark": mark}, progressToken=mark))
        messages = await client.messages(reply)
        answers = [each for each in messages if "method" not in each]
        assert [each["id"] for each in answers] == [ident]
        assert all(each["params"]["progressToken"] == mark for each in messages if "method" in each)
        return json.dumps(answers[0]["result"])

    marks = [[fresh() for _ in range(20)] for _ in clients]
    tasks = [
        asyncio.create_task(one(client, at if at % 2 else str(at), mark))
        for client, own in zip(clients, marks, strict=True)
        for at, mark in enumerate(own)
    ]
    every = [mark for own in marks for mark in own]
    for mark in every:
        await desk.wait(desk.begun[mark])
    for mark in reversed(every):  # all of them are in flight now
        desk.gates[mark].set()
    async with asyncio.timeout(PATIENCE):
        answers = await asyncio.gather(*tasks)
    assert len(answers) == 200
    for mark, answer in zip(every, answers, strict=True):
        assert f'"{mark}"' in answer


@requirement("SRV-202")
@of(*ALL)
async def test_an_address_without_a_host_is_for_this_machine_alone(desk: Desk, revision: str, ran: Ran) -> None:
    async with asyncio.timeout(PATIENCE), listening(desk.server.asgi(), ":0") as url:
        client = await Client(f"{url}/mcp", revision).open()
        ran(revision, "http")
        status, answer = await client.ask(client.message(1, "tools/list"))
        assert (status, "result" in answer) == (200, True)
        port = int(url.rpartition(":")[2])
        # 127.0.0.2 is another address of this machine: whoever listens on all of them answers there too.
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.2", port)
        for reply in OPEN:
            reply.close()
