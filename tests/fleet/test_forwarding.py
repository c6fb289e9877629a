"""Requests that one replica of a gateway passes on to another, when the other is away, stops, hangs, or is none."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from operator import sub
from pathlib import Path
from secrets import token_bytes

import pytest
import redis

from consoles import Served, key_of, people
from faults import until
from fleets import SETTINGS, Fleet, fleet
from handrail import Client, HandrailError, stores
from handrail.gateway import leases as gateway_leases
from handrail.gateway.leases import Lease, Leases
from handrail.protocol.seal import Seal
from handrail.stores import Append, Delete, Put, Store
from handrail.stores.memory import MemoryStore
from patience import PATIENCE
from redis_servers import shared_server
from servers_http import OPEN, Client as SessionClient

TARGET = Path(__file__).parents[1] / "support" / "servers_fleet_gateway.py"
DATABASE = 6  # no other server has a name there
SEAL = Seal([token_bytes(32)])
CALLERS = ("ada", "bob", "cem", "dan", "eve")  # each has a lease of its own

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for reply in OPEN:
        reply.close()
    OPEN.clear()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    url, folder = shared_server().url(database=DATABASE), tmp_path_factory.mktemp("forwarding")
    settings = SETTINGS + people(*CALLERS)
    with fleet(folder, url, count=0, settings=settings, target=TARGET) as made:
        for _ in range(2):
            made.add(FLEET_GRACE="60")
        yield made


@contextlib.asynccontextmanager
async def lease_store(url: str) -> AsyncIterator[Store]:
    store = stores.open(url, name="fleet-gateway")
    try:
        yield store
    finally:
        await store.close()


def caller(served: Served, who: str) -> Client:
    return Client(served.endpoint, headers={"authorization": f"Bearer {key_of(who)}"})


async def step(served: Served, who: str) -> int:
    """Call the counter; return in which process it ran."""
    async with caller(served, who) as client:
        return int((await client.call("step")).text.split()[1])


def lease_of(two: Fleet, address: str) -> bytes:
    """Return a lease as a replica of the fleet stores it."""
    return Seal([two.key.encode()]).seal("lease", "", [address, "a replica of the test"], 2**53).encode()


@contextlib.asynccontextmanager
async def held_at(two: Fleet, who: str, address: str) -> AsyncIterator[tuple[Store, str]]:
    """Let the lease of a caller be that of a replica at `address`; yield the store, and the key there."""
    async with lease_store(two.store) as store:
        before = {key for key, _ in await store.scan("upstream-lease:")}
        await step(two.replicas[1], who)
        [key] = {key for key, _ in await store.scan("upstream-lease:")} - before
        await store.put(key, lease_of(two, address))
        yield store, key


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An address that answers no attempt to connect, as that of a machine that is gone."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):  # as many as wait to be accepted; the next one gets no answer
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"


Handler = Callable[[dict[str, str], asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def replica(respond: Handler) -> AsyncIterator[str]:
    """A replica of the test's own: it takes requests, and responds as the test wants it."""

    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        await reader.readexactly(int(headers["content-length"]))
        await respond(headers, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_a_machine_that_answers_nothing_is_replaced_by_the_first_call(two: Fleet) -> None:
    with black_hole() as address:
        async with held_at(two, "ada", address) as (store, key), asyncio.timeout(PATIENCE):
            pid = await step(two.replicas[0], "ada")
            assert await step(two.replicas[0], "ada") == pid
            assert await store.get(key) != lease_of(two, address)


async def stop(headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
    fields = "Content-Length: 0\r\nConnection: close\r\nHandrail-Forwarded: stopping"
    writer.write(f"HTTP/1.1 503 Service Unavailable\r\n{fields}\r\n\r\n".encode())
    await writer.drain()
    writer.close()


async def test_a_call_that_is_passed_on_to_a_replica_that_stops_is_served_elsewhere(two: Fleet) -> None:
    async with replica(stop) as address, held_at(two, "bob", address), asyncio.timeout(PATIENCE):
        assert await step(two.replicas[0], "bob")


async def test_the_mark_of_a_passed_on_request_counts_for_its_message_only(two: Fleet) -> None:
    marks: list[str] = []

    async def keep(headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        marks.append(headers["handrail-forwarded"])
        await stop(headers, writer)

    async with replica(keep) as address, held_at(two, "cem", address), asyncio.timeout(PATIENCE):
        await step(two.replicas[0], "cem")
    client = SessionClient(two.replicas[1].endpoint, "2026-07-28")
    headers = {"Authorization": f"Bearer {key_of('cem')}"}
    assert (await client.post(client.message(1, "tools/list"), **headers)).status == 200
    refused = await client.post(client.message(2, "tools/list"), **headers, Handrail_Forwarded=marks[0])
    assert refused.status == 400 and b"another message" in await refused.body()


async def test_a_stream_of_a_replica_that_hangs_is_ended_with_its_lease(two: Fleet) -> None:
    begun = asyncio.Event()

    async def begin(headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n: \n\n")
        await writer.drain()
        begun.set()

    async with replica(begin) as address, held_at(two, "dan", address) as (store, key), asyncio.timeout(PATIENCE):
        call = asyncio.create_task(step(two.replicas[0], "dan"))
        await begun.wait()
        await store.delete(key)
        with pytest.raises(HandrailError):
            await call


async def test_a_replica_that_stops_waits_for_the_calls_it_passed_on(two: Fleet, tmp_path: Path) -> None:
    extra = await asyncio.to_thread(two.add)
    try:
        pid = await step(two.replicas[0], "eve")
        async with caller(extra, "eve") as client:
            call = asyncio.create_task(client.call("hold", {"file": str(tmp_path / "go")}))
            await until(lambda: (tmp_path / "go-begun").exists(), "the call runs")
            ending = asyncio.create_task(asyncio.to_thread(extra.end))
            await until(lambda: not _listens(extra), "the replica stops")
            assert not (await asyncio.wait({call}, timeout=1.0))[0], "the call was broken off"
            (tmp_path / "go").touch()
            assert int((await call).text) == pid
        await ending
    finally:
        extra.stop()
        two.replicas.remove(extra)


def _listens(served: Served) -> bool:
    host, _, port = served.endpoint.split("/")[2].partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


async def test_a_lease_lasts_as_long_as_a_call_whose_connection_others_share(tmp_path: Path) -> None:
    settings, database = SETTINGS + people("ada", "bob"), shared_server().url(database=7)
    with fleet(tmp_path, database, count=1, settings=settings, target=TARGET) as one:
        [replica] = one.replicas

        with closing(redis.Redis.from_url(database)) as engine:

            def times() -> list[int]:
                """Milliseconds that each lease is good for."""
                return [engine.pttl(key) for key in sorted(engine.scan_iter("*upstream-lease:*"))]

            async with caller(replica, "ada") as ada, caller(replica, "bob") as bob:
                await ada.call("step")
                call = asyncio.create_task(bob.call("hold", {"file": str(tmp_path / "go")}))
                await until(lambda: (tmp_path / "go-begun").exists(), "the call runs")
                least = times()
                assert len(least) == 2

                def is_renewed() -> bool:
                    nonlocal least
                    previous, least = least, times()
                    return len(least) < 2 or max(map(sub, least, previous)) > 0

                await until(is_renewed, "leases are renewed, or given back")
                assert len(times()) == 2
                (tmp_path / "go").touch()
                await call


class GatheringStore(MemoryStore):
    """A store that does no change of a lease before a number of them are on their way."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.barrier = asyncio.Barrier(number)
        self.passed = asyncio.Event()
        self.is_gathering = False

    async def commit(self, changes: Sequence[Put | Delete | Append]) -> bool:
        if self.is_gathering and not self.passed.is_set():
            await self.barrier.wait()
            self.passed.set()
        return await super().commit(changes)


async def test_leases_are_renewed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, many would take longer than a lease lasts."""
    monkeypatch.setattr(gateway_leases, "RENEW_SECONDS", 0.01)
    store = GatheringStore(20)
    leases = Leases(store, SEAL, lambda: Lease("http://one", "1"), lambda *_: True, lambda *_: None)
    async with leases.renewing():
        for number in range(20):
            assert await leases.other_holder("counter", f"caller {number}") is None
        store.is_gathering = True
        try:
            async with asyncio.timeout(PATIENCE):
                await store.passed.wait()
        finally:
            store.passed.set()


async def test_a_lease_that_no_replica_has_written_sends_no_request_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    """Requests carry the tokens of callers: who can write the store must not say where they go."""
    store = MemoryStore()
    leases = Leases(store, SEAL, lambda: Lease("http://here", "1"), lambda *_: True, lambda *_: None)
    other = Leases(store, SEAL, lambda: Lease("http://there", "2"), lambda *_: True, lambda *_: None)
    assert await other.other_holder("counter", "ada") is None
    held = await leases.other_holder("counter", "ada")
    assert held is not None and held.address == "http://there"
    leases.forget(held.key)
    changed = held.value[:-9] + held.value[-9:][::-1] + b"A"
    for forged in (b'{"address":"http://evil","replica":"3"}', changed, b"\xff"):
        await store.put(held.key, forged)
        assert await leases.other_holder("counter", "ada") is None
        assert "served by this one" in caplog.text
        caplog.clear()


async def test_two_replicas_that_advertise_one_address_are_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each takes the other for a process that was there before it."""
    monkeypatch.setattr(gateway_leases, "RENEW_SECONDS", 0.01)
    store, lost = MemoryStore(), asyncio.Event()

    def leases(replica: str) -> Leases:
        return Leases(store, SEAL, lambda: Lease("http://balancer", replica), lambda *_: True, lambda *_: lost.set())

    one, other = leases("1"), leases("2")
    async with one.renewing(), asyncio.timeout(PATIENCE):
        assert await one.other_holder("counter", "ada") is None
        assert await other.other_holder("counter", "ada") is None
        await lost.wait()
    assert "counter: lease lost" in caplog.text
