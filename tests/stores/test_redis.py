"""What only Redis can show: its URL, its connections, its faults, and what its settings may lose."""

from __future__ import annotations

import asyncio
import re
import secrets
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from redis.crc import key_slot

from faults import until as soon
from handrail import Server, stores
from handrail.guards import Approvals, Rates, ToolRate
from handrail.stores import Append, Delete, Put, StoreError
from handrail.stores.redis import RedisStore, Script, tag_of
from handrail.stores.redis_connection import COMMAND_SECONDS, LATE_SECONDS, MAX_WAITING
from handrail.stores.redis_nodes import MAX_CONNECTIONS
from handrail.testing import Peer
from paths import ROOT
from patience import PATIENCE, SOAK
from redis_servers import (
    MEMORY_ONLY,
    ON_DISK,
    RedisServer,
    Sentinels,
    free_port,
    fresh_name,
    require_redis,
    shared_cluster,
    shared_server,
)
from relays import Plan, Relay, Way
from requirements import requirement

SECRET = "hunter2-in-the-url"
STORES_PAGE = ROOT / "docs" / "reference" / "stores.md"
KEY = secrets.token_bytes(32)


@asynccontextmanager
async def opened(url: str, name: str = "") -> AsyncIterator[RedisStore]:
    store = stores.open(url, name=name or fresh_name())
    assert isinstance(store, RedisStore)
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def own_server(*options: str) -> Iterator[RedisServer]:
    require_redis()
    server = RedisServer(*options or MEMORY_ONLY)
    try:
        yield server
    finally:
        server.stop()


async def recovered(store: RedisStore, *, reads: bool = False) -> None:
    """Wait until the store works again, by itself."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(StoreError):
                await (store.get("recovered") if reads else store.put("recovered", b""))
                return
            await asyncio.sleep(0.02)


# URLs


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (f"redis://:{SECRET}@host:port", "the port is not a number"),
        (f"redis://:{SECRET}@host:0", "the port is not a number"),
        (f"redis://:{SECRET}@host/zero", "expected redis://"),
        (f"redis://:{SECRET}@ho\u2100st", "expected redis://"),
        (f"redis://:{SECRET}@[::1", "expected redis://"),
        (f"redis://:{SECRET}@host/0/1", "expected redis://"),
        (f"redis://:{SECRET}@host#1", "expected redis://"),
        (f"redis://:{SECRET}@one,two", "several hosts are a cluster or sentinels"),
        (f"redis+cluster://:{SECRET}@host/1", "a cluster has no databases"),
        (f"redis+sentinel://:{SECRET}@host:26379", "the name of the service"),
        (f"redis+proxy://:{SECRET}@host", "expected redis://"),
        (f"redis://:{SECRET}@host?timeout=5", "no option but replicas"),
        (f"redis://:{SECRET}@host?ssl_ca_certs=a", "belong to rediss://"),
        (f"redis://:{SECRET}@host?replicas=-1", "the number of replicas"),
    ],
)
def test_a_url_that_is_wrong_is_refused_without_its_password(url: str, text: str) -> None:
    with pytest.raises(ValueError, match=text) as refusal:
        stores.open(url)
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://user:{SECRET}@host", "redis://host:6379/0"),
        (f"rediss://:{SECRET}@host:7000/3", "rediss://host:7000/3"),
        (f"redis+cluster://:{SECRET}@one:1,two:2", "redis+cluster://one:1,two:2/0"),
        (
            f"redis+sentinel://:{SECRET}@one,[::1]:2/fleet?sentinel_password={SECRET}",
            "redis+sentinel://one:26379,[::1]:2/fleet/0",
        ),
    ],
)
def test_a_store_is_shown_without_its_password(url: str, shown: str) -> None:
    store = stores.open(url)
    assert repr(store) == f"<RedisStore {shown}>"
    assert SECRET not in repr(vars(store))


def test_without_the_extra_the_error_names_it() -> None:
    program = "import sys; sys.modules['redis'] = None\nfrom handrail import stores; stores.open('redis://localhost')"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 1
    assert "pip install 'handrail[redis]'" in run.stderr.splitlines()[-1]


# Names


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        (
            "approval",
            ["approval:1", "approval-open:a:b:1", "approval-for:x", "approval-caller:1:", "approved-last:x", "grant:1"],
        ),
        ("session:s1", ["session:s1", "subscriptions:s1", "events:s1:l-1"]),
        ("caller:alice", ["subscribed:alice"]),
        ("rate", ["rate:caller:5:alice:a", "slots:tool", "rate:salt"]),
        ("console", ["console-code:1", "console-session:1", "console-tool:x:a", "console-tools:x:"]),
        ("", ["a", "", "key without a kind"]),
        ("limit:%7Bx%7D", ["limit:{x}:1", "limit:{x}:2"]),
    ],
)
def test_keys_that_change_together_have_one_tag(family: str, keys: list[str]) -> None:
    assert {tag_of(key) for key in keys} == {family}


@pytest.mark.parametrize("name", ["plain", "with {braces}", "}{", "", "100 %", "*[x]?\\"])
async def test_names_and_keys_may_have_any_text(name: str) -> None:
    cluster = shared_cluster()
    own = f"{name}{fresh_name()}"
    texts = [
        "k:}",
        "k:{",
        "k:{x}",
        "k:\x00\n",
        "k:*",
        "k:\U0010ffff",
    ]
    async with opened(cluster.url, own) as store, opened(cluster.url, f"{own}x") as other:
        await other.put("k:other", b"")
        assert await store.commit([Put(key, key.encode()) for key in texts])
        assert await store.scan("k:") == sorted((key, key.encode()) for key in texts)
        assert await store.scan("") == sorted((key, key.encode()) for key in texts)
        assert [await store.get(key) for key in texts] == [key.encode() for key in texts]
        async with store.subscribe("{t}") as messages:
            await store.publish("{t}", b"\x00\xff")
            assert await anext(messages) == b"\x00\xff"


async def test_a_cluster_has_the_sessions_in_many_slots_and_each_in_one() -> None:
    cluster = shared_cluster()
    name = fresh_name()
    async with opened(cluster.url, name) as store:
        for i in range(30):
            assert await store.commit(
                [
                    Put(f"session:{i}", b"", 60),
                    Put(f"subscriptions:{i}", b"", 60),
                    Append(f"events:{i}:stream", b"", 9, 60),
                ]
            )
        assert len(await store.scan("session:")) == 30
        kept = {server: server.command("KEYS", f"handrail:1:{{{name}:*") for server in cluster.servers}
        ends = [server.command("PTTL", each) for server, names in kept.items() for each in names]
    names = [each for some in kept.values() for each in some]
    assert all(kept.values()) and len({key_slot(each) for each in names}) > 20
    assert {each.partition(b"}")[0].rpartition(b":")[2] for each in names} == {b"%d" % i for i in range(30)}
    assert len(ends) == 5 * 30 and min(ends) > 0  # the indexes end, too


@pytest.mark.parametrize("backend", ["redis", "cluster"])
async def test_keys_of_two_kinds_are_no_commit(backend: str) -> None:
    url = shared_server().url() if backend == "redis" else shared_cluster().url
    async with opened(url) as store:
        with pytest.raises(StoreError, match="keys of different kinds are not kept together in Redis: a, b"):
            await store.commit([Put("a:1", b""), Put("b:1", b"")])
        with pytest.raises(StoreError, match="not kept together"):
            await store.run_script(Script("#!lua\nreturn 1"), ["a:1", "b:1"], [])
        assert await store.scan("") == []


async def test_what_is_deleted_or_expired_leaves_nothing_behind() -> None:
    with own_server() as server:
        async with opened(server.url()) as store:
            await store.commit(
                [Put("k:a", b""), Put("k:b", b"", 0.001), Put("k:c", b"", 3600), Append("k:log", b"", 9, 1)]
            )
            assert await store.delete("k:a")
            assert await store.commit([Delete("k:c"), Put("k:d", b"", 0), Delete("k:d")])
            await soon(lambda: not server.command("KEYS", "*}[vl]:*"), "all but the indexes has expired")
            await store.delete("k:none")  # each change sweeps
            assert server.command("KEYS", "*") == []


async def test_a_counter_keeps_its_time_and_a_log_has_that_of_its_last_entry() -> None:
    with own_server() as server:
        async with opened(server.url(), "s") as store:
            await store.put("k:n", b"-007", ttl=3600)  # digits, as other stores take them
            assert await store.add("k:n") == -6
            assert 1_000_000 < server.command("PTTL", "handrail:1:{s:k}v:k:n") <= 3_600_000
            with pytest.raises(StoreError, match="overflow"):
                await store.add("k:n", -(2**63 - 1))
            assert await store.get("k:n") == b"-6"
            await store.append("k:log", b"1", keep=9, ttl=60)
            assert 0 < server.command("PTTL", "handrail:1:{s:k}l:k:log") <= 60_000
            await store.append("k:log", b"2", keep=9)
            assert server.command("PTTL", "handrail:1:{s:k}l:k:log") == -1
            assert [server.command("PTTL", f"handrail:1:{{s:k}}{index}") > 0 for index in "ie"] == [True, True]
            await store.put("k:stays", b"")  # and so does its place in the order
            await store.put("k:goes", b"", ttl=60)
            assert server.command("PTTL", "handrail:1:{s:k}i") == -1


# Scripts and round trips


COUNT = Script("#!lua\nreturn {redis.call('INCRBY', KEYS[1], ARGV[1]), ARGV[2]}")


@pytest.mark.parametrize("backend", ["redis", "cluster"])
async def test_a_script_runs_once_also_after_the_server_has_forgotten_it(backend: str) -> None:
    server = shared_server() if backend == "redis" else shared_cluster()
    servers = [server] if isinstance(server, RedisServer) else server.servers
    async with opened(server.url() if isinstance(server, RedisServer) else server.url) as store:
        assert stores.supports(store, "scripts")
        assert await store.run_script(COUNT, ["limit:alice:a"], [2, b"\x00\xff"]) == [2, b"\x00\xff"]
        for each in servers:
            each.command("SCRIPT", "FLUSH")
        assert await store.run_script(COUNT, ["limit:alice:a"], [3, b""]) == [5, b""]
        assert await store.get("limit:alice:a") is None  # scripts have names of their own
        assert await store.put("a", b"1", if_absent=True)
        with pytest.raises(StoreError, match=r"^redis: .*value is not an integer"):
            await store.run_script(COUNT, ["limit:alice:a"], [b"x", b""])


async def test_a_commit_is_one_command_and_all_callers_share_a_connection() -> None:
    with own_server() as server:
        async with opened(server.url()) as store:
            await store.put("a", b"")
            server.command("CONFIG", "RESETSTAT")
            await asyncio.gather(*(store.commit([Put(f"k:{i}", b""), Append("k:", b"", 9)]) for i in range(100)))
            stats = server.info("commandstats")
            assert stats["cmdstat_evalsha"].startswith("calls=100,")
            assert "cmdstat_eval" not in stats
            assert len(server.clients()) == 1
            # The commands of one turn leave in one write, and are read in few.
            assert int(server.info("stats")["total_reads_processed"]) < 50


async def test_a_store_has_few_connections() -> None:
    cluster = shared_cluster()
    async with opened(cluster.url) as store:
        before = _connections(cluster.servers)
        async with store.subscribe("a"), store.subscribe("b"):
            await asyncio.gather(*(store.put(f"session:{i}", b"", ttl=60) for i in range(300)))
            assert len(_connections(cluster.servers) - before) <= 4 <= MAX_CONNECTIONS


def _connections(servers: list[RedisServer]) -> set[tuple[int, str]]:
    return {(server.port, each["id"]) for server in servers for each in server.clients()}


async def test_the_answer_to_a_cancelled_command_goes_to_no_other() -> None:
    with own_server() as server:
        async with opened(server.url()) as store:
            for i in range(100):
                await store.put(f"k:{i}", b"%d" % i)
            server.freeze()
            try:
                calls = [asyncio.ensure_future(store.get(f"k:{i}")) for i in range(100)]
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                for call in calls[::2]:
                    call.cancel()
            finally:
                server.thaw()
            after = [asyncio.ensure_future(store.get(f"k:{i}")) for i in range(100)]
            assert await asyncio.gather(*calls[1::2]) == [b"%d" % i for i in range(1, 100, 2)]
            assert await asyncio.gather(*after) == [b"%d" % i for i in range(100)]


async def test_more_commands_than_may_wait_are_refused() -> None:
    with own_server() as server:
        async with opened(server.url()) as store:
            await store.get("a")
            server.freeze()
            try:
                calls = [asyncio.ensure_future(store.get("a")) for _ in range(MAX_WAITING + 5)]
                results = await asyncio.gather(*calls, return_exceptions=True)
            finally:
                server.thaw()
            texts = [str(each).split(": ")[-1] for each in results]
            assert texts.count("too many commands wait for an answer") == 5
            assert texts.count(f"no answer within {COMMAND_SECONDS:g} s") == MAX_WAITING
            await recovered(store)


# Processes and loops


def test_a_store_may_be_used_in_one_loop_after_another() -> None:
    server, name = shared_server(), fresh_name()
    store = stores.open(server.url(), name=name)

    async def use(close: bool) -> None:
        async with store.subscribe("t") as messages:
            await store.publish("t", b"1")
            assert await anext(messages) == b"1"
        await store.add("n")
        if close:
            await store.close()

    asyncio.run(use(False))
    asyncio.run(use(True))
    with pytest.raises(StoreError, match="the store was closed"):
        asyncio.run(use(False))


FORK = """
import asyncio, os, sys
from handrail import stores
async def main():
    store = stores.open(sys.argv[1])
    await store.get("a")
    child = os.fork()
    if not child:
        for verb in (store.get("a"), store.put("a", b""), store.close()):
            try:
                await verb
            except Exception as problem:
                print(type(problem).__name__, problem, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(await store.put("a", b""), flush=True)
    await store.close()
asyncio.run(main())
"""


def test_a_store_is_refused_in_a_forked_child() -> None:
    command = [sys.executable, "-c", FORK, shared_server().url()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    lines = run.stdout.splitlines()
    assert [line.split(" by process")[0] for line in lines[:3]] == ["StoreError this store was opened"] * 3
    assert lines[3:] == ["True"]


# Faults


async def test_after_a_crash_everything_acknowledged_is_there_and_the_store_goes_on() -> None:
    with own_server(*ON_DISK) as server:
        async with opened(server.url()) as store:
            acknowledged: list[str] = []
            enough = asyncio.Event()

            async def write(worker: int) -> None:
                with suppress(StoreError):
                    for i in range(10**6):
                        key = f"k:{worker}:{i}"
                        await store.commit(
                            [Put(f"{key}:a", b""), Append("k:log", key.encode(), 10**6), Put(f"{key}:b", b"")]
                        )
                        acknowledged.append(key)
                        if len(acknowledged) >= 300:
                            enough.set()

            writers = [asyncio.create_task(write(worker)) for worker in range(10)]
            await asyncio.wait_for(enough.wait(), PATIENCE)
            async with store.subscribe("t") as messages:
                await asyncio.to_thread(server.kill)
                with pytest.raises(StoreError, match=r"^redis 127\.0\.0\.1"):
                    await anext(messages)
            await asyncio.gather(*writers)
            with pytest.raises(StoreError):
                await store.get("a")
            assert store.trouble
            await asyncio.to_thread(server.start)
            await recovered(store)
            assert store.trouble == ""
            rows = {key for key, _ in await store.scan("k:", limit=10**6)}
            log = [value.decode() for _, value in await store.read("k:log", limit=10**6)]
            assert set(acknowledged) <= set(log)
            assert rows == {f"{key}:{end}" for key in log for end in "ab"}
            async with store.subscribe("t") as messages:
                await store.publish("t", b"again")
                assert await anext(messages) == b"again"


async def test_a_frozen_server_is_an_error_within_the_deadline() -> None:
    with own_server() as server:
        async with opened(server.url()) as store, store.subscribe("t") as messages:
            await store.put("a", b"1")
            server.freeze()
            try:
                reading, writing = (asyncio.ensure_future(each) for each in (store.get("a"), store.put("a", b"2")))
                with pytest.raises(StoreError, match=r"no answer within 1\.5 s$"):
                    await reading
                with pytest.raises(StoreError, match=r"no answer within 1\.5 s; it is not known whether it was done$"):
                    await writing
                with pytest.raises(StoreError, match="no answer to a new connection"):  # nothing was sent
                    await store.put("b", b"2")
                with pytest.raises(StoreError):
                    await anext(messages)
            finally:
                server.thaw()
            await recovered(store)
            assert await store.get("a") in (b"1", b"2")
            assert await store.get("b") is None


async def test_a_process_that_was_busy_does_not_blame_the_server() -> None:
    async with opened(shared_server().url()) as store, store.subscribe("t") as messages:
        await store.put("a", b"1")
        reading = asyncio.ensure_future(store.get("a"))
        for _ in range(3):  # until it is sent
            await asyncio.sleep(0)
        _hold_the_loop(COMMAND_SECONDS + 2 * LATE_SECONDS)
        assert await reading == b"1"
        await store.publish("t", b"1")
        assert await anext(messages) == b"1"


def _hold_the_loop(seconds: float) -> None:
    threading.Event().wait(seconds)


@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_commit_that_is_cut_anywhere_is_whole_or_nothing_and_never_called_done(way: Way) -> None:
    """Every byte boundary of the command, and of its answer."""
    server = shared_server()
    name = fresh_name()
    changes: list[Put | Delete | Append] = [
        Put("k:a", b"1"),
        Append("k:log", b"line", 9),
        Delete("k:gone"),
        Put("k:b", b"2", if_absent=True),
    ]
    outcomes: set[tuple[bool, bool]] = set()
    reasons: set[str] = set()
    relay = Relay()
    with relay.to_url(f"http://127.0.0.1:{server.port}"):
        async with opened(server.url(), name) as direct:

            async def once(cut_at: int | None) -> int:
                """Commit through the relay, cut after so many bytes; return how many there are without a cut."""
                await direct.commit([Delete("k:a"), Delete("k:b"), Put("k:gone", b"")])
                before = await direct.append("k:log", b"before", keep=9)
                async with opened(relay.url.replace("http", "redis"), name) as store:
                    await store.get("k:a")
                    start = relay.counts[way]
                    relay.is_cut, relay.plan = False, None if cut_at is None else Plan(way, start + cut_at, "exit")
                    try:
                        is_done: bool | None = await store.commit(changes)
                    except StoreError as problem:
                        reasons.add(str(problem).rpartition("; ")[2])
                        is_done = None
                    size = relay.counts[way] - start
                    relay.plan = None
                state = [key for key, _ in await direct.scan("k:")]
                lines = (await direct.read("k:log"))[-1][0] - before
                assert (state, lines) in ((["k:a", "k:b"], 1), (["k:gone"], 0))
                assert is_done is None or lines == 1
                outcomes.add((is_done is None, lines == 1))
                return size

            size = await once(None)
            step = 1 if SOAK or way == "down" else 7
            for cut_at in range(1, size, step):
                await once(cut_at)
    assert outcomes == {(False, True), (True, way == "down")}
    assert reasons == {"it is not known whether it was done"}


async def test_a_connection_that_listens_and_is_closed_ends_every_subscription() -> None:
    server = shared_server()
    async with opened(server.url()) as store:
        async with store.subscribe("a") as first, store.subscribe("b") as second:
            await store.publish("a", b"before")
            for each in server.clients():
                if each["ssub"] == "2":
                    server.command("CLIENT", "KILL", "ID", each["id"])
            await store.publish("a", b"lost")
            assert await anext(first) == b"before"
            for messages in (first, second):
                with pytest.raises(StoreError):
                    await anext(messages)
        async with store.subscribe("a") as messages:
            await store.publish("a", b"after")
            assert await anext(messages) == b"after"


async def test_each_connection_that_listens_is_asked_for_signs_of_life() -> None:
    with own_server() as server:
        async with opened(server.url()) as store:
            async with store.subscribe("t") as messages:
                for each in server.clients():
                    server.command("CLIENT", "KILL", "ID", each["id"])
                with pytest.raises(StoreError):
                    await anext(messages)
            async with store.subscribe("t") as messages:  # at once, on a new connection
                server.freeze()
                try:
                    with pytest.raises(StoreError, match="no answer within"):
                        await asyncio.wait_for(anext(messages), PATIENCE)
                finally:
                    server.thaw()


async def test_sentinels_name_the_new_master_and_nothing_that_a_replica_had_is_lost() -> None:
    require_redis()
    with ExitStack() as stack:
        fleet = Sentinels(1)
        stack.callback(fleet.stop)
        async with opened(f"{fleet.url}?replicas=1") as store:
            done = [i for i in range(50) if await store.put(f"k:{i}", b"")]
            async with store.subscribe("t") as messages:
                fleet.master.kill()
                with pytest.raises(StoreError):
                    await anext(messages)
            with pytest.raises(StoreError):
                await store.put("k:down", b"")
            await soon(lambda: fleet.replica.command("ROLE")[0] == b"master", "the replica is promoted")
            await recovered(store, reads=True)
            assert {f"k:{i}" for i in done} <= {key for key, _ in await store.scan("k:")}
            # There is no replica now: what is written is not safe, and is not called so.
            with pytest.raises(StoreError, match="only 0 of 1 replicas had it in time"):
                await store.put("k:alone", b"")


async def test_a_sentinel_that_is_away_or_frozen_costs_no_more_than_its_share_of_the_time() -> None:
    require_redis()
    with ExitStack() as stack:
        master = stack.enter_context(own_server())
        watch = f"sentinel monitor fleet 127.0.0.1 {master.port} 1\n"
        frozen, guarded = (RedisServer(sentinel=watch + more) for more in ("", f"requirepass {SECRET}\n"))
        for each in (frozen, guarded):
            stack.callback(each.stop)
        frozen.freeze()
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{frozen.port},127.0.0.1:{guarded.port}"
        async with opened(f"redis+sentinel://{hosts}/fleet?sentinel_password={SECRET}") as store:
            await recovered(store)
            assert SECRET not in repr(store) + store.trouble
        async with opened(f"redis+sentinel://127.0.0.1:{guarded.port}/fleet") as store:
            with pytest.raises(StoreError, match="Authentication required"):
                await store.get("a")
        async with opened(f"redis+sentinel://127.0.0.1:{guarded.port}/ship?sentinel_password={SECRET}") as store:
            with pytest.raises(StoreError, match="it watches no service named 'ship'"):
                await store.get("a")


async def test_a_slot_that_moves_takes_its_keys_along_and_ends_the_subscriptions() -> None:
    cluster = shared_cluster()
    name = fresh_name()
    async with opened(cluster.url, name) as store:
        await store.commit([Put("k:a", b"1"), Append("k:log", b"1", 9)])
        async with store.subscribe("t") as messages:
            await asyncio.to_thread(_move, f"handrail:1:{{{name}:k}}")
            await asyncio.to_thread(_move, f"handrail:1:{{{name}:topics}}")
            assert await store.get("k:a") == b"1"
            assert await store.put("k:a", b"2", if_equals=b"1")
            assert await store.append("k:log", b"2", keep=9) == 2
            with pytest.raises(StoreError):
                await anext(messages)
        async with store.subscribe("t") as messages:
            await store.publish("t", b"here")
            assert await anext(messages) == b"here"


def _move(name: str) -> None:
    """Move the slot of a name to another master of the cluster, as an operator does."""
    servers = shared_cluster().servers
    slot = key_slot(name.encode())
    ids = {each.port: each.command("CLUSTER", "MYID") for each in servers}
    keys: list[bytes] = []
    for source in servers:
        with suppress(redis.ResponseError):
            source.command("GET", name)
            target = next(each for each in servers if each is not source)
            target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
            source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.port])
            keys = source.command("CLUSTER", "GETKEYSINSLOT", slot, 100)
            if keys:
                source.command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            for each in (target, source, *servers):
                each.command("CLUSTER", "SETSLOT", slot, "NODE", ids[target.port])
            return
    raise AssertionError(f"no server has slot {slot}")


# Set-ups that are wrong


REFUSALS = [
    ("redis://127.0.0.1:{port}", r"NOAUTH|Authentication required"),
    ("redis://:wrong-" + SECRET + "@127.0.0.1:{port}", "WRONGPASS|invalid username-password"),
    ("redis://nobody:" + SECRET + "@127.0.0.1:{port}", "WRONGPASS|invalid username-password"),
    ("redis://:" + SECRET + "@127.0.0.1:{port}/99", "DB index is out of range"),
    ("redis://reader:" + SECRET + "@127.0.0.1:{port}", r"may not run .*SET, .*ZADD.* on handrail:1:"),
    ("redis://elsewhere:" + SECRET + "@127.0.0.1:{port}", r"may not run GET, .* on handrail:1:"),
    ("redis://deaf:" + SECRET + "@127.0.0.1:{port}", r"may not run SPUBLISH, SSUBSCRIBE on handrail:1:"),
    ("rediss://:" + SECRET + "@127.0.0.1:{port}", "does it speak TLS"),
    ("redis://scriptless:" + SECRET + "@127.0.0.1:{port}", "no permissions to run the 'eval' command"),
    ("redis+sentinel://:" + SECRET + "@127.0.0.1:{port}/fleet", "NOAUTH|Authentication required|unknown command"),
    ("redis+cluster://:" + SECRET + "@127.0.0.1:{port}", "cluster support disabled"),
]


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    """A server with a password, and with users that lack something."""
    with own_server() as server:
        ours = ("~handrail:*", "&handrail:*", "+@all")
        server.command("ACL", "SETUSER", "operator", "on", "nopass", "~*", "&*", "+@all")
        server.user = "operator"
        server.command("ACL", "SETUSER", "reader", "on", f">{SECRET}", *ours, "-@write")
        server.command("ACL", "SETUSER", "elsewhere", "on", f">{SECRET}", "~other:*", "&*", "+@all")
        server.command("ACL", "SETUSER", "deaf", "on", f">{SECRET}", "~handrail:*", "resetchannels", "+@all")
        server.command("ACL", "SETUSER", "scriptless", "on", f">{SECRET}", *ours, "-eval")
        server.command("ACL", "SETUSER", "modest", "on", f">{SECRET}", *ours, "-@dangerous", "-@admin", "+ping")
        rights = re.search(r"ACL SETUSER handrail on >PASSWORD ([^`]+)```", STORES_PAGE.read_text("utf-8"))
        assert rights is not None
        server.command("ACL", "SETUSER", "documented", "on", f">{SECRET}", *rights[1].split())
        server.command("ACL", "SETUSER", "default", "resetpass", f">{SECRET}")
        yield server


@pytest.mark.parametrize(("url", "text"), REFUSALS)
async def test_a_wrong_set_up_is_an_error_that_names_it_and_no_password(
    guarded: RedisServer, url: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(url.format(port=guarded.port)) as store:
        for verb in (store.get("a"), store.put("a", b""), store.report(), _subscribed(store)):
            with pytest.raises(StoreError, match=text) as refusal:
                await verb
            assert SECRET not in str(refusal.value) + caplog.text + store.trouble
            assert SECRET not in "".join(traceback.format_exception(refusal.value))
            assert str(refusal.value).startswith("redis ")


@pytest.mark.parametrize("host", ["ho\u2100st", "host:port"])
def test_the_doctor_repeats_no_password_of_a_url_that_is_wrong(host: str) -> None:
    command = [sys.executable, "-m", "handrail", "doctor", f"redis://:{SECRET}@{host}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode and "expected redis://" in run.stdout
    assert SECRET not in run.stdout + run.stderr


async def _subscribed(store: RedisStore) -> None:
    async with store.subscribe("t"):
        pass


@pytest.mark.parametrize("user", ["modest", "documented"])
async def test_a_user_that_may_do_what_is_needed_and_no_more_is_enough(guarded: RedisServer, user: str) -> None:
    async with opened(f"redis://{user}:{SECRET}@127.0.0.1:{guarded.port}") as store:
        assert await store.put("a", b"1", ttl=60)
        assert await store.scan("") == [("a", b"1")]
        async with store.subscribe("t") as messages:
            await store.publish("t", b"1")
            assert await anext(messages) == b"1"
        report = await store.report()
        unknown = [each for each in report.losses if "cannot read" in each]
        assert ["+config|get" in each for each in unknown] == [True] * (user == "modest")
        assert not store.durable  # it has no append-only file


async def test_a_port_that_is_closed_is_an_error_at_once() -> None:
    async with opened(f"redis://127.0.0.1:{free_port()}") as store:
        for _ in range(3):  # between two attempts the reason stays the same
            with pytest.raises(StoreError, match=r"redis 127\.0\.0\.1:\d+: .*[Cc]onnect"):
                await store.get("a")


async def test_a_replica_is_read_and_its_refusal_to_write_is_named() -> None:
    require_redis()
    with ExitStack() as stack:
        fleet = Sentinels(1)
        stack.callback(fleet.stop)
        name = fresh_name()
        async with opened(fleet.master.url(), name) as master, opened(fleet.replica.url(), name) as store:
            await master.put("a", b"1")
            await soon(lambda: int(fleet.replica.command("DBSIZE")) == 2, "the replica has the value")
            assert await store.get("a") == b"1"
            with pytest.raises(StoreError, match=r"read.only replica"):
                await store.put("a", b"2")
            with pytest.raises(StoreError, match="it is a read-only replica; name its master, or the sentinels"):
                await store.report()
            report = await master.report()
            assert any("a failover takes writes" in each for each in report.losses)


@pytest.mark.parametrize(
    ("settings", "query", "losses"),
    [
        ({"appendonly": "no"}, "", ["appendonly is no"]),
        ({"appendonly": "yes", "appendfsync": "everysec"}, "", ["appendfsync is everysec"]),
        ({"appendonly": "yes", "appendfsync": "everysec"}, "?replicas=1", []),
        ({"appendonly": "yes", "appendfsync": "always"}, "", []),
        (
            {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "allkeys-lru"},
            "",
            ["maxmemory-policy is"],
        ),
    ],
    ids=str,
)
async def test_a_report_names_the_settings_that_lose_writes(
    settings: dict[str, str], query: str, losses: list[str], own: RedisServer
) -> None:
    for name, value in ({"maxmemory-policy": "noeviction"} | settings).items():
        own.command("CONFIG", "SET", name, value)
    async with opened(own.url() + query) as store:
        report = await store.report()
        assert report.engine.startswith(("Redis 7.", "Redis 8.", "Valkey ")) and report.round_trip_ms > 0
        assert [each.partition(",")[0][: len(text)] for each, text in zip(report.losses, losses, strict=True)] == losses
        assert store.durable == (not losses)
        assert bool(report.warnings) == bool(query)


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [("maxmemory", "1", "used memory > 'maxmemory'"), ("min-replicas-to-write", "1", "Not enough good replicas")],
)
async def test_a_server_that_takes_no_writes_says_so_and_nothing_is_half_done(
    setting: str, value: str, text: str, own: RedisServer
) -> None:
    async with opened(own.url()) as store:
        await store.put("k:a", b"1")
        own.command("CONFIG", "SET", "maxmemory-policy", "noeviction", setting, value)
        try:
            with pytest.raises(StoreError, match=text):
                await store.commit([Delete("k:a"), Put("k:b", b""), Append("k:log", b"", 9)])
            assert await store.scan("k:") == [("k:a", b"1")]
            assert await store.read("k:log") == []
        finally:
            own.command("CONFIG", "SET", setting, "0")
        assert await store.delete("k:a")


async def test_a_report_of_a_cluster_says_once_what_all_its_masters_say() -> None:
    cluster = shared_cluster()
    async with opened(cluster.url) as store:
        assert [each.partition(",")[0] for each in (await store.report()).losses] == ["appendonly is no"]
        cluster.servers[1].command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        try:
            report = await store.report()
        finally:
            cluster.servers[1].command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        assert len(report.losses) == 2 and any("maxmemory-policy" in each for each in report.losses)
        assert report.place == repr(store.url) and report.warnings == ()


@pytest.fixture(scope="module")
def own() -> Iterator[RedisServer]:
    with own_server() as server:
        yield server


async def test_tls_is_checked_against_the_name_and_the_authority(tmp_path: Path) -> None:
    """Self-signed for `localhost`: good by that name and with its authority, and in no other way."""
    require_redis()
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    _make_certificate(key, certificate, "localhost")
    tls_port = free_port()
    tls = (
        "--tls-port",
        str(tls_port),
        "--tls-cert-file",
        str(certificate),
        "--tls-key-file",
        str(key),
        "--tls-auth-clients",
        "no",
        "--tls-ca-cert-file",
        str(certificate),
    )
    with own_server(*MEMORY_ONLY, *tls):
        async with opened(f"rediss://localhost:{tls_port}?ssl_ca_certs={certificate}") as store:
            assert await store.put("a", b"1")
        for wrong, text in [
            (f"rediss://localhost:{tls_port}", "certificate verify failed"),
            (f"rediss://127.0.0.1:{tls_port}?ssl_ca_certs={certificate}", "IP address mismatch"),
        ]:
            async with opened(wrong) as store:
                with pytest.raises(StoreError, match=text):
                    await store.put("a", b"1")


def _make_certificate(key_file: Path, file: Path, name: str) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    key_file.write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    file.write_bytes(certificate.public_bytes(encoding))


# The package on a cluster


class Replica:
    """One of several servers of one name, with a tool that asks first, on the cluster."""

    def __init__(self, name: str) -> None:
        self.store = stores.open(shared_cluster().url, name=name)
        rates = Rates(principal="100/minute", tools={"cancel": ToolRate(rate="100/minute", concurrent=5)})
        approvals = Approvals(by="operator", wait=0.2, round=0.02)
        self.server = Server(name, store=self.store, accept_loss=True, approvals=approvals, rates=rates, keys=[KEY])
        self.cancelled: list[int] = []

        @self.server.tool(annotations={"destructiveHint": True})
        async def cancel(order: int) -> str:
            self.cancelled.append(order)
            return "cancelled"


@requirement("P-19")
async def test_an_approval_and_the_limits_of_replicas_are_counted_once_on_a_cluster(
    ran: Callable[[str, str], None],
) -> None:
    """No change of the package touches two slots: the cluster would refuse it."""
    name = fresh_name()
    replicas = [Replica(name) for _ in range(3)]
    async with AsyncExitStack() as stack:
        for each in replicas:
            stack.push_async_callback(each.store.close)
        peers = [await stack.enter_async_context(Peer(each.server, revision="2025-11-25")) for each in replicas]
        ran("2025-11-25", "memory")
        assert (await peers[0].call("cancel", {"order": 7})).is_error
        [waiting] = await replicas[1].server.approvals.open()
        await replicas[1].server.approvals.decide(waiting.id, True, by="ops", remember=0)
        answers = await asyncio.gather(*(peer.call("cancel", {"order": 7}) for peer in peers))
        assert [answer.text for answer in answers if not answer.is_error] == ["cancelled"]
        assert [order for each in replicas for order in each.cancelled] == [7]
        assert (await peers[0].call("cancel", {"order": 7})).is_error  # there is a question again
        [waiting] = await replicas[2].server.approvals.open()
        await replicas[2].server.approvals.decide(waiting.id, True, by="ops", remember=60)
        assert [(await peer.call("cancel", {"order": 7})).text for peer in peers] == ["cancelled"] * 3
        [grant] = await replicas[0].server.approvals.grants()
        assert await replicas[0].server.approvals.revoke(grant.id, by="ops")
    assert replicas[0].store.trouble == ""
