"""Calls whose answer comes a moment later: without a task of their request, and all else as if they had one."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from handrail import Call, Limits
from handrail.engine.dispatcher import Dispatcher
from handrail.guards.identity import ApiKeys
from handrail.stores.sqlite import SqliteStore
from handrail.transports.http.exchange import Exchange
from patience import PATIENCE
from requirements import requirement
from servers_http import Client, Desk, closed, data, methods, rest, served, take, until
from wires import Json, Object
from wires_http import BOTH, Headers, Reply

__all__ = ["closed"]

R2, R4, R5 = "2025-03-26", "2025-11-25", "2026-07-28"
MIB = 1 << 20
ORIGIN = "http://localhost:5000"

Ran = Callable[[str, str], None]


def of(*revisions: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("revision", revisions)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pending stays so, also on a machine that has much to do."""
    monkeypatch.setattr("handrail.transports.http.exchange.WATCH_DELAY_SECONDS", PATIENCE)


class Visitor(Client):
    """A client with a key, on a web page."""

    key = ""

    def headers(self, message: Json = None, **changes: str | None) -> Headers:
        known = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return super().headers(message, Origin=ORIGIN, **known, **changes)


@asynccontextmanager
async def opened(
    desk: Desk, revision: str, by: str = "handrail", key: str = "", **options: Any
) -> AsyncIterator[Client]:
    """A client of a desk that has a tool more, which waits a turn of the loop."""

    async def later(call: Call, size: int = 1) -> str:
        await asyncio.sleep(0)
        if not size:
            call.require("sampling")
        return "x" * size

    desk.server.add(later)
    limits = options.pop("limits", {})
    desk.endpoint = desk.server.asgi(origins=[ORIGIN], **options)
    async with served(desk.endpoint, by, **limits) as desk.url:
        client = Visitor(desk.url, revision)
        client.key = key
        yield await client.open()
        for gate in desk.gates.values():
            gate.set()


async def begin(
    desk: Desk, client: Client, mark: str = "mark", *, after: int = 0, **changes: str
) -> asyncio.Task[Reply]:
    """Call a tool that waits to be let go; its request is pending."""
    call = client.call(1, "held", {"mark": mark, "before": 0, "after": after}, progressToken=mark)
    asking = asyncio.create_task(client.post(call, **changes))
    await desk.wait(desk.begun[mark])
    assert [each.task for each in desk.endpoint.state.deferred.due] == [None]
    return asking


def is_over(desk: Desk) -> bool:
    """Whether the endpoint has forgotten all requests."""
    return not (desk.endpoint.state.deferred.due or desk.endpoint.state.open or desk.endpoint.state.calls)


# The answer


@of(R4, R5)
@pytest.mark.usefixtures("patient")
async def test_a_call_that_waits_a_moment_takes_no_task(revision: str, ran: Ran) -> None:
    ran(revision, "http")
    desk = Desk()
    async with opened(desk, revision) as client:
        before = len(asyncio.all_tasks())
        asking = await begin(desk, client)
        assert len(asyncio.all_tasks()) == before + 2  # that of the tool, and ours
        desk.gates["mark"].set()
        reply = await asking
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
        assert (await client.read(reply))["result"]["content"] == [{"type": "text", "text": "mark"}]
        assert is_over(desk)


@of(R4, R5)
@pytest.mark.parametrize("accept", [BOTH, "application/json", "text/event-stream"])
async def test_the_answer_is_the_same_on_every_way_to_it(revision: str, accept: str, tmp_path: Path, ran: Ran) -> None:
    ran(revision, "http")
    key, hashed = ApiKeys.new()
    ways: dict[str, Object] = {
        "ours": {},
        "uvicorn": {"by": "uvicorn"},
        "watched": {"access_log": True},
        "known": {"key": key, "auth": ApiKeys({"alice": hashed})},
        "on disk": {"store": SqliteStore(tmp_path / "store.db", durable=False)},
    }
    told: dict[str, list[Json]] = {}
    for way, options in ways.items():
        desk, found = Desk(), told.setdefault(way, [])
        async with opened(desk, revision, **options) as client:
            for size in (1, 2 * MIB, 9 * MIB, 0):  # the last ones are refused, and in different ways
                reply = await client.post(client.call(1, "later", {"size": size}), Accept=accept)
                cross = {
                    name: reply.headers[name] for name in reply.headers if name.startswith(("access", "content-t"))
                }
                found.append((reply.status, cross, await client.read(reply)))
            await until(lambda: is_over(desk))  # noqa: B023  # and it is, before the next
    for found in told.values():
        assert found == told["uvicorn"]


@of(R2)
async def test_a_batch_that_waits_a_moment_is_answered_as_a_whole(revision: str, ran: Ran) -> None:
    ran(revision, "http")
    desk = Desk()
    async with opened(desk, revision) as client:
        reply = await client.post([client.call(n, name, {}) for n, name in enumerate(("later", "echo", "later"))])
        answers = await client.read(reply)
        assert (reply.status, sorted(each["id"] for each in answers)) == (200, [0, 1, 2])
        assert is_over(desk)


@of(R4, R5)
@requirement("P-30")
@pytest.mark.usefixtures("patient")
async def test_what_is_pending_is_counted_as_in_flight(revision: str, ran: Ran) -> None:
    ran(revision, "http")
    desk = Desk(limits=Limits(max_calls=1))
    async with opened(desk, revision) as client:
        asking = await begin(desk, client)
        other = await Client(desk.url, revision).open()
        assert (await other.post(other.call(2, "echo", {"text": "x"}))).status == 429
        desk.gates["mark"].set()
        assert (await asking).status == 200
        assert (await other.post(other.call(3, "later"))).status == 200


@of(R4, R5)
async def test_a_call_that_waits_leaves_nothing_for_the_garbage_collector(revision: str, ran: Ran) -> None:
    ran(revision, "http")
    desk = Desk()

    def alive() -> int:
        return sum(isinstance(each, Exchange | Dispatcher | Call) for each in gc.get_objects())

    async with opened(desk, revision) as client:
        await (await client.post(client.call(1, "later"))).body()
        gc.collect()
        gc.disable()
        try:
            before = alive()
            for number in range(10):
                await (await client.post(client.call(number, "later"))).body()
            assert alive() <= before + 2  # of the last one, perhaps
        finally:
            gc.enable()


async def test_pipelined_calls_are_answered_in_order(ran: Ran) -> None:
    ran(R5, "http")
    desk = Desk()
    async with opened(desk, R5) as client:
        calls = [client.call("first", "held", {"mark": "mark", "before": 0, "after": 0})]
        calls += [
            client.call(n, "later" if n % 3 else "echo", {"size": n} if n % 3 else {"text": "x"}) for n in range(50)
        ]
        reader, writer = await connect(desk)
        writer.write(b"".join(request(client, call) for call in calls))
        await desk.wait(desk.begun["mark"])
        assert desk.ran["echo"] == 0
        desk.gates["mark"].set()
        async with asyncio.timeout(PATIENCE):
            assert [(await answer(reader))["id"] for _ in calls] == [call["id"] for call in calls]
        writer.close()
        await until(lambda: is_over(desk))


# More than the answer


@of(R4, R5)
@pytest.mark.usefixtures("patient")
async def test_the_first_thing_a_pending_call_says_makes_its_answer_a_stream(revision: str, ran: Ran) -> None:
    ran(revision, "http")
    desk = Desk()
    async with opened(desk, revision) as client:
        asking = await begin(desk, client, after=3)
        desk.gates["mark"].set()
        reply = await asking
        assert reply.is_stream
        messages = await client.messages(reply)
        assert methods(messages) == ["notifications/progress"] * 3
        assert messages[-1]["id"] == 1
        await until(lambda: is_over(desk))


@of(R4, R5)
async def test_so_does_what_it_says_when_it_is_pending_no_more(revision: str, ran: Ran) -> None:
    ran(revision, "http")
    desk = Desk()
    async with opened(desk, revision) as client:
        asking = await begin(desk, client, after=1)
        await until(lambda: not desk.endpoint.state.deferred.due)
        (exchange,) = desk.endpoint.state.open
        assert exchange.task is not None
        desk.gates["mark"].set()
        reply = await asking
        assert reply.is_stream
        assert methods(await client.messages(reply)) == ["notifications/progress"]


@of(R4, R5)
@pytest.mark.usefixtures("patient")
async def test_a_client_that_takes_json_alone_stays_pending_whatever_the_tool_says(revision: str, ran: Ran) -> None:
    ran(revision, "http")
    desk = Desk()
    async with opened(desk, revision) as client:
        asking = await begin(desk, client, after=3, Accept="application/json")
        desk.gates["mark"].set()
        reply = await asking
        assert not reply.is_stream and (await client.read(reply))["id"] == 1


@of(R4)
@requirement("SRV-213")
@pytest.mark.usefixtures("patient")
async def test_a_stream_that_began_when_the_call_was_pending_can_be_come_back_for(revision: str, ran: Ran) -> None:
    ran(revision, "http")
    desk = Desk()
    async with opened(desk, revision) as client:
        asking = asyncio.create_task(client.post(client.call(1, "leaves", {"mark": "mark"}, progressToken="mark")))
        reply = await asking
        events = await rest(reply.events())  # the tool sent us away
        last = [each["id"] for each in events if each.get("id")][-1]
        desk.gates["mark"].set()
        again = await client.get(**{"Last-Event-ID": last})
        (progress, final) = await take(again.events(), 2)
        assert (data(progress)["params"]["progress"], data(final)["id"]) == (2, 1)


# Going away


@of(R4, R5)
@requirement("SRV-215", "SRV-216")
async def test_whoever_goes_while_a_call_is_pending_stops_it_only_without_a_session(
    revision: str, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.transports.http.exchange.WATCH_DELAY_SECONDS", 0.3)
    ran(revision, "http")
    desk = Desk()
    async with opened(desk, revision) as client:
        asking = await begin(desk, client)
        (exchange,) = desk.endpoint.state.deferred.due
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert exchange.cycle is not None
        await until(lambda: exchange.cycle is not None and exchange.cycle.complete)
        assert (
            desk.endpoint.state.deferred.due and not desk.stopped["mark"].is_set()
        )  # it is heard of when the time has come
        if revision == R5:
            await desk.wait(desk.stopped["mark"])
        else:
            await until(lambda: exchange.stream.disconnected)
            desk.gates["mark"].set()
            await desk.wait(desk.ended["mark"])
            assert not desk.stopped["mark"].is_set()
        await until(lambda: is_over(desk))


@of(R4, R5)
@pytest.mark.usefixtures("patient")
async def test_an_answer_for_whoever_has_gone_goes_nowhere(revision: str, ran: Ran) -> None:
    ran(revision, "http")
    desk = Desk()
    async with opened(desk, revision) as client:
        asking = await begin(desk, client)
        (exchange,) = desk.endpoint.state.deferred.due
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert exchange.cycle is not None
        await until(lambda: exchange.cycle is not None and exchange.cycle.complete)
        desk.gates["mark"].set()
        await until(lambda: is_over(desk))
        assert not exchange.cycle.is_started


@of(R4)
@requirement("SRV-215")
async def test_under_any_server_a_request_ends_with_its_peer_and_a_call_of_a_session_goes_on(
    revision: str, ran: Ran
) -> None:
    ran(revision, "http")
    desk = Desk()
    async with opened(desk, revision) as client:
        message = client.call(1, "held", {"mark": "mark"})
        fields = {**client.headers(message), "Host": desk.url.split("/")[2]}
        scope = {"type": "http", "method": "POST", "path": "/mcp", "query_string": b""}
        came: list[Object] = [
            {"type": "http.request", "body": json.dumps(message).encode()},
            {"type": "http.disconnect"},
        ]

        async def receive() -> Object:
            return came.pop(0)

        async def send(message: MutableMapping[str, Any]) -> None:
            raise OSError("nobody is there")

        headers = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
        async with asyncio.timeout(PATIENCE):
            await desk.endpoint({**scope, "headers": headers}, receive, send)
        assert desk.begun["mark"].is_set() and not desk.ended["mark"].is_set()
        desk.gates["mark"].set()
        await desk.wait(desk.ended["mark"])
        await until(lambda: is_over(desk))


@of(R4)
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("how", ["cancelled", "its session ended"])
async def test_a_pending_call_that_is_given_up_has_no_answer(revision: str, how: str, ran: Ran) -> None:
    ran(revision, "http")
    desk = Desk()
    async with opened(desk, revision) as client:
        asking = await begin(desk, client)
        if how == "cancelled":
            notice = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}
            assert (await client.post(notice)).status == 202
        else:
            assert (await client.delete()).status == 204
        await desk.wait(desk.stopped["mark"])
        reply = await asking
        assert (reply.status, await reply.body()) == (202, b"")
        await until(lambda: is_over(desk))


# The end of the server, and a peer that does not read


@of(R4, R5)
@requirement("P-12")
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("ends", [True, False], ids=["in time", "never"])
async def test_a_server_that_stops_lets_what_is_pending_be_answered(revision: str, ends: bool, ran: Ran) -> None:
    ran(revision, "http")
    desk = Desk(limits=Limits(grace_seconds=PATIENCE if ends else 0.1))
    async with opened(desk, revision) as client:
        asking = await begin(desk, client)
        stopping = asyncio.create_task(desk.endpoint.stop())
        await until(lambda: desk.endpoint.state.stopping)
        if ends:
            desk.gates["mark"].set()
        else:
            await desk.wait(desk.stopped["mark"])
        reply = await asking
        assert (reply.status, bool(await reply.body())) == ((200, True) if ends else (202, False))
        await stopping
        assert is_over(desk)


@requirement("P-11")
@pytest.mark.parametrize("reads", [True, False])
async def test_late_answers_wait_for_a_peer_to_read_and_not_for_ever(
    reads: bool, ran: Ran, caplog: pytest.LogCaptureFixture
) -> None:
    ran(R5, "http")
    caplog.set_level("INFO", "handrail")
    desk, loop = Desk(), asyncio.get_running_loop()
    async with opened(desk, R5, limits={"write_seconds": PATIENCE if reads else 0.2}) as client:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        await loop.sock_connect(deaf, ("127.0.0.1", int(desk.url.split("/")[2].split(":")[1])))
        await loop.sock_sendall(deaf, request(client, client.call(1, "later", {"size": 3 * MIB})) * 3)
        await until(
            lambda: bool(desk.endpoint.state.open) and not desk.endpoint.state.deferred.due
        )  # the second, behind the first
        if not reads:
            await until(lambda: "the client read nothing" in caplog.text and is_over(desk))
        reader, writer = await asyncio.open_connection(sock=deaf)
        async with asyncio.timeout(PATIENCE):
            if reads:
                assert [len((await answer(reader))["result"]["content"][0]["text"]) for _ in range(3)] == [3 * MIB] * 3
            else:
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await answer(reader)
        writer.close()
        await until(lambda: is_over(desk))
        assert (await client.ask(client.call(2, "later")))[0] == 200


async def connect(desk: Desk) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*desk.url.split("/")[2].split(":"))


def request(client: Client, message: Object) -> bytes:
    body = json.dumps(message).encode()
    fields = {**client.headers(message), "Content-Length": str(len(body)), "Host": client.url.split("/")[2]}
    return (
        "".join(["POST /mcp HTTP/1.1\r\n", *(f"{name}: {fields[name]}\r\n" for name in fields), "\r\n"]).encode() + body
    )


async def answer(reader: asyncio.StreamReader) -> Object:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    found: Object = json.loads(await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0])))
    return found
