"""What every store promises, asked of each backend; then what only a file and several processes can show."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import weakref
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from itertools import takewhile
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from faults import put_away, until
from handrail import stores
from handrail.audit.log import open_trail
from handrail.stores import Append, Delete, Put, Store, StoreError
from handrail.stores.memory import MAX_QUEUED_MESSAGES, MemoryStore
from handrail.stores.sqlite import SqliteStore
from patience import PATIENCE, SOAK
from postgres_servers import PostgresServer, Schema
from redis_servers import TimedRedisStore, shared_cluster, shared_server

DEADLINE = 5 * int(PATIENCE)

Change = Put | Delete | Append


class Clock:
    """A clock that a test moves on. `on_change` hears of it, for an engine that has its own."""

    def __init__(self) -> None:
        self._now = 1000.0
        self.on_change: Callable[[float, float], None] = lambda before, now: None
        self.schema: Schema | None = None

    def __call__(self) -> float:
        return self._now

    @property
    def now(self) -> float:
        return self._now

    @now.setter
    def now(self, now: float) -> None:
        self.on_change(self._now, now)
        self._now = now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def open_backend(request: pytest.FixtureRequest, path: Path, clock: Clock) -> Store:
    match request.param:
        case "memory":
            return MemoryStore(clock=clock)
        case "sqlite":
            return SqliteStore(path, durable=False, clock=clock)
        case "postgres":
            clock.schema = schema = Schema(request.getfixturevalue("postgres"), clock=True)
            clock.on_change = lambda before, now: schema.set_clock(now)
            return stores.open(schema.url)
        case "redis":
            server = shared_server()
            store = TimedRedisStore(server.url(), [server])
        case _:
            cluster = shared_cluster()
            store = TimedRedisStore(cluster.url, cluster.servers)
    clock.on_change = lambda before, now: store.pass_time(now - before)
    return store


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis", "cluster"])
async def store(request: pytest.FixtureRequest, path: Path, clock: Clock) -> AsyncIterator[Store]:
    opened = open_backend(request, path, clock)
    yield opened
    await opened.close()
    if clock.schema is not None:
        clock.schema.drop()


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, **options)
    try:
        yield store
    finally:
        await store.close()


# Values


async def test_a_value_is_there_until_it_is_deleted(store: Store) -> None:
    assert await store.get("a") is None
    assert await store.put("a", b"1")
    assert await store.put("a", b"")
    assert await store.get("a") == b""
    assert await store.delete("a")
    assert not await store.delete("a")
    assert await store.get("a") is None


async def test_if_absent(store: Store) -> None:
    assert await store.put("a", b"1", if_absent=True)
    assert not await store.put("a", b"2", if_absent=True)
    assert await store.get("a") == b"1"


async def test_if_equals(store: Store) -> None:
    assert not await store.put("a", b"1", if_equals=b"")
    assert await store.get("a") is None
    await store.put("a", b"1")
    assert not await store.put("a", b"3", if_equals=b"2")
    assert await store.put("a", b"2", if_equals=b"1")
    assert await store.get("a") == b"2"


async def test_an_expired_value_is_absent_to_every_verb(store: Store, clock: Clock) -> None:
    for key in ("get", "delete", "absent", "equals", "add"):
        await store.put(key, b"5", ttl=10)
    clock.now += 9.9
    assert len(await store.scan("")) == 5
    clock.now += 0.1
    assert await store.scan("") == []
    assert await store.get("get") is None
    assert not await store.delete("delete")
    assert await store.put("absent", b"6", if_absent=True)
    assert not await store.put("equals", b"6", if_equals=b"5")
    assert await store.add("add") == 1


async def test_a_new_value_has_its_own_time_to_live(store: Store, clock: Clock) -> None:
    await store.put("longer", b"1", ttl=10)
    await store.put("longer", b"2", ttl=20)
    await store.put("forever", b"1", ttl=10)
    await store.put("forever", b"2")
    await store.put("shorter", b"1")
    await store.put("shorter", b"2", ttl=5)
    clock.now += 15
    assert await store.scan("") == [("forever", b"2"), ("longer", b"2")]


async def test_scan_gives_a_prefix_in_order_and_in_pages(store: Store) -> None:
    inside = ["k:", "k:\x00", "k:A", "k:a", "k:a:b", "k:é", "k:\ufffd", "k:\U0001f600", "k:\U0010ffff", "k:\U0010ffffz"]
    for key in [*reversed(inside), "", "k", "j:a", "k;", "l"]:
        await store.put(key, key.encode())
    assert await store.scan("k:") == [(key, key.encode()) for key in inside]
    pages, after = [], ""
    while page := await store.scan("k:", after=after, limit=3):
        pages.append([key for key, _ in page])
        after = page[-1][0]
    assert pages == [inside[i : i + 3] for i in range(0, len(inside), 3)]
    assert await store.scan("k:", after="k;") == []
    assert await store.scan("k:", limit=0) == []


# Counters


async def test_a_counter_counts_and_can_be_read(store: Store) -> None:
    assert await store.add("n") == 1
    assert await store.add("n", 41) == 42
    assert await store.add("n", -50) == -8
    assert await store.add("n", 0) == -8
    assert await store.get("n") == b"-8"
    assert await store.put("n", b"7", if_equals=b"-8")
    assert await store.add("n") == 8


async def test_the_time_of_a_counter_counts_from_its_creation(store: Store, clock: Clock) -> None:
    await store.add("n", ttl=10)
    clock.now += 9
    assert await store.add("n", ttl=10) == 2
    clock.now += 1
    assert await store.add("n", ttl=10) == 1


async def test_what_is_no_number_is_no_counter(store: Store) -> None:
    for value in (b"", b"-", b"one", b"1.0", b" 1"):
        await store.put("n", value)
        with pytest.raises(StoreError, match=r"^n: .* not a counter$"):
            await store.add("n")
        assert await store.get("n") == value


# Logs


async def test_a_log_keeps_its_last_values_and_goes_on_counting(store: Store) -> None:
    assert [await store.append("log", b"%d" % i, keep=3) for i in range(1, 6)] == [1, 2, 3, 4, 5]
    assert await store.read("log") == [(3, b"3"), (4, b"4"), (5, b"5")]
    assert await store.read("log", after=3) == [(4, b"4"), (5, b"5")]
    assert await store.read("log", after=3, limit=1) == [(4, b"4")]
    assert await store.read("log", after=5) == []
    assert await store.append("log", b"6", keep=1) == 6
    assert await store.read("log") == [(6, b"6")]


async def test_logs_and_values_have_names_of_their_own(store: Store) -> None:
    await store.append("a", b"line", keep=3)
    await store.put("a", b"value")
    await store.delete("a")
    assert await store.read("a") == [(1, b"line")]
    assert await store.read("b") == []


async def test_each_append_renews_the_time_of_a_log(store: Store, clock: Clock) -> None:
    await store.append("log", b"1", keep=3, ttl=10)
    clock.now += 9
    await store.append("log", b"2", keep=3, ttl=10)
    clock.now += 9
    assert await store.read("log") == [(1, b"1"), (2, b"2")]
    clock.now += 1
    assert await store.read("log") == []
    assert await store.append("log", b"new", keep=3) == 1
    assert await store.read("log") == [(1, b"new")]


async def test_a_log_that_keeps_nothing_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="keep: 0 is less than 1"):
        await store.append("log", b"", keep=0)


# Commits


async def test_a_commit_does_all_of_it(store: Store) -> None:
    await store.put("approval", b"granted")
    assert await store.commit(
        [
            Delete("approval", if_equals=b"granted"),
            Put("intent", b"pay", if_absent=True),
            Append("audit", b"pay", keep=10),
            Append("audit", b"paid", keep=10),
        ]
    )
    assert await store.scan("") == [("intent", b"pay")]
    assert await store.read("audit") == [(1, b"pay"), (2, b"paid")]
    assert await store.commit([])


@pytest.mark.parametrize(
    "failing",
    [
        Put("there", b"2", if_absent=True),
        Put("there", b"2", if_equals=b"2"),
        Put("absent", b"2", if_equals=b"2"),
        Delete("there", if_equals=b"2"),
        Delete("absent", if_equals=b"2"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("place", [0, 1, 4])
async def test_a_commit_with_a_condition_that_fails_does_nothing(store: Store, failing: Change, place: int) -> None:
    await store.put("there", b"1")
    await store.append("log", b"1", keep=3)
    fine: list[Change] = [
        Put("new", b"1"),
        Delete("there"),
        Append("log", b"2", keep=1),
        Put("there", b"9", if_equals=b"1"),
    ]
    assert not await store.commit([*fine[:place], failing, *fine[place:]])
    assert await store.scan("") == [("there", b"1")]
    assert await store.read("log") == [(1, b"1")]


async def test_conditions_are_about_what_was_there_before_the_commit(store: Store) -> None:
    assert not await store.commit([Put("a", b"1"), Put("a", b"2", if_equals=b"1")])
    assert await store.commit([Put("a", b"1", if_absent=True), Put("a", b"2", if_absent=True)])
    assert await store.get("a") == b"2"


# Many at once


async def test_a_hundred_tasks_count_to_a_hundred(store: Store) -> None:
    assert sorted(await asyncio.gather(*(store.add("n") for _ in range(100)))) == list(range(1, 101))


async def test_of_many_who_want_to_be_first_one_is(store: Store) -> None:
    won = await asyncio.gather(*(store.put("lease", b"%d" % i, if_absent=True) for i in range(50)))
    assert Counter(won) == {True: 1, False: 49}
    assert await store.get("lease") == b"%d" % won.index(True)


async def test_compare_and_set_loses_no_update(store: Store) -> None:
    await store.put("n", b"0")

    async def increment() -> None:
        while True:
            seen = await store.get("n") or b""
            if await store.put("n", b"%d" % (int(seen) + 1), if_equals=seen):
                return

    await asyncio.gather(*(increment() for _ in range(20)))
    assert await store.get("n") == b"20"


async def test_a_log_numbers_concurrent_appends_without_a_gap(store: Store) -> None:
    values = [b"%d" % i for i in range(60)]
    numbers = await asyncio.gather(*(store.append("log", value, keep=100) for value in values))
    assert sorted(numbers) == list(range(1, 61))
    assert await store.read("log") == sorted(zip(numbers, values, strict=True))


async def test_a_cancelled_call_leaves_the_others_alone(store: Store) -> None:
    calls = [asyncio.ensure_future(store.put(f"k{i}", b"1")) for i in range(10)]
    calls[5].cancel()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert [i for i, each in enumerate(done) if each is not True] == [5]


# Topics


async def test_a_listener_hears_its_topic_from_when_it_came(store: Store) -> None:
    await store.publish("t", b"too early")
    async with store.subscribe("t") as messages, store.subscribe("t") as others:
        await store.publish("u", b"elsewhere")
        for i in range(5):
            await store.publish("t", b"%d" % i)
        assert [await anext(messages) for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
        await store.publish("t", b"5")
        async with store.subscribe("t") as late:
            await store.publish("t", b"6")
            assert await anext(late) == b"6"
        assert [await anext(messages) for _ in range(2)] == [b"5", b"6"]
        assert [await anext(others) for _ in range(7)] == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]
    await store.publish("t", b"nobody listens")
    async with store.subscribe("t") as messages:
        await store.publish("t", b"again")
        assert await anext(messages) == b"again"


async def test_too_slow_a_listener_is_told_and_the_others_go_on(store: Store) -> None:
    async with store.subscribe("t") as slow, store.subscribe("t") as quick:
        for start in (0, 600):
            numbers = [b"%d" % i for i in range(start, start + 600)]
            await asyncio.gather(*(store.publish("t", number) for number in numbers))
            assert [await anext(quick) for _ in numbers] == numbers
        assert [await anext(slow) for _ in range(MAX_QUEUED_MESSAGES)] == [
            b"%d" % i for i in range(MAX_QUEUED_MESSAGES)
        ]
        with pytest.raises(StoreError, match="too slow"):
            await anext(slow)
        await store.publish("t", b"more")
        assert await anext(quick) == b"more"


async def test_closing_ends_the_subscriptions(store: Store) -> None:
    async with store.subscribe("t") as messages:
        waiting = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        await store.close()
        with pytest.raises(StoreError, match="closed"):
            await waiting


# What has expired


async def test_a_hundred_thousand_expired_keys_do_not_stay(store: Store, path: Path, clock: Clock) -> None:
    value = b"%d" % os.getpid()  # in memory, each key holds a reference to it
    before = sys.getrefcount(value)

    def kept() -> int:
        if clock.schema is not None:
            return clock.schema.rows("entries")
        match store:
            case MemoryStore():
                return sys.getrefcount(value) - before
            case TimedRedisStore():
                return store.count_indexed("k")
            case _:
                return _rows(path, "entries")

    await store.put("k:stays", b"")
    is_quick = clock.schema is None and not isinstance(store, TimedRedisStore)  # in Redis each write sweeps as many
    count = 100_000 if is_quick else 10_000
    for start in range(0, count, 1000):
        await store.commit([Put(f"k:{i}", value, ttl=10) for i in range(start, start + 1000)])
    assert kept() >= count
    clock.now += 10
    if clock.schema is not None:  # it sweeps once a second, by another clock
        while kept() > 2:
            await asyncio.gather(*(store.put("k:tick", b"") for _ in range(100)))
        return
    for _ in range(count // 100 + 100):
        await store.put("k:tick", b"")
    assert kept() <= 2


async def test_what_is_written_again_and_again_takes_no_room() -> None:
    """A lease that is renewed, an approval that is used: their ends are long after them."""
    store = MemoryStore()
    keys = [f"{i}:".ljust(40) for i in range(2000)]
    before = sum(map(sys.getrefcount, keys))
    for key in keys:
        await store.put(key, b"1", ttl=3600)
        await store.put(key, b"2", ttl=3600)
        await store.delete(key)
    assert sum(map(sys.getrefcount, keys)) - before < 200


async def test_a_file_does_not_hold_what_was_written_until_the_next_write(path: Path) -> None:
    """It may be large: with the record of a call waits its answer."""
    store = SqliteStore(path, durable=False)

    class Name(str):
        __slots__ = ("__weakref__",)

    name = Name("key")
    held = weakref.ref(name)
    await store.put(name, b"value")
    assert await store.get("key") == b"value"
    del name
    await until(lambda: held() is None, "the store lets go of what it has written")
    await store.close()


async def test_a_change_that_fails_does_not_hold_those_beside_it(path: Path) -> None:
    class Value(bytearray):
        pass

    def large(db: sqlite3.Connection, now: float) -> Value:
        return Value(1)

    def fails(db: sqlite3.Connection, now: float) -> None:
        raise ValueError("no")

    store = SqliteStore(path, durable=False)
    begun = threading.Event()
    first = asyncio.create_task(store.writer.run(lambda db, now: begun.wait(DEADLINE)))
    together = [asyncio.create_task(store.writer.run(each)) for each in (large, fails)]
    await asyncio.sleep(0)  # they wait for the first, and share a transaction
    begun.set()
    await first
    held = weakref.ref(await together[0])
    with pytest.raises(ValueError, match="no"):
        await together.pop()
    together.clear()
    gc.disable()
    try:
        await until(lambda: held() is None, "the store lets go of what it has given")
    finally:
        gc.enable()
    await store.close()


async def test_one_write_starts_a_sweep_that_goes_on_to_the_end(path: Path, clock: Clock) -> None:
    async with opened(path, durable=False, clock=clock) as store:
        await store.commit([Append(f"log:{i % 50}", b"", keep=100, ttl=10) for i in range(5000)])
        await asyncio.gather(*(store.publish("t", b"") for _ in range(2500)))
        clock.now += 60
        await store.put("tick", b"")
        while any(_rows(path, table) for table in ("logs", "lines", "messages")):
            await store.get("tick")


def _rows(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


# Both backends against a model


class Model:
    """What the verbs mean, in the shortest words."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.values: dict[str, tuple[bytes, float]] = {}
        self.logs: dict[str, tuple[list[bytes], int, float]] = {}  # all there ever was, and how many to show

    def live(self) -> dict[str, bytes]:
        return {key: value for key, (value, end) in self.values.items() if end > self.clock.now}

    def end(self, ttl: float | None) -> float:
        return self.clock.now + (float("inf") if ttl is None else ttl)

    def get(self, key: str) -> bytes | None:
        return self.live().get(key)

    def put(self, **fields: Any) -> bool:
        return self.commit([Put(**fields)])

    def delete(self, key: str) -> bool:
        there = key in self.live()
        return self.commit([Delete(key)]) and there

    def scan(self, prefix: str, after: str, limit: int) -> list[tuple[str, bytes]]:
        return sorted((k, v) for k, v in self.live().items() if k.startswith(prefix) and k > after)[:limit]

    def add(self, key: str, amount: int, ttl: float | None) -> int | str:
        try:
            total = int(self.live().get(key, b"0")) + amount
        except ValueError:
            return "StoreError"
        self.values[key] = (b"%d" % total, self.values[key][1] if key in self.live() else self.end(ttl))
        return total

    def append(self, **fields: Any) -> int:
        self.commit([Append(**fields)])
        return len(self.logs[fields["log"]][0])

    def read(self, log: str, after: int = 0, limit: int = 1000) -> list[tuple[int, bytes]]:
        written, keep, end = self.logs.get(log, ([], 0, 0.0))
        numbered = list(enumerate(written, 1))[max(0, len(written) - keep) :] if end > self.clock.now else []
        return [each for each in numbered if each[0] > after][:limit]

    def commit(self, changes: list[Change]) -> bool:
        before = self.live()
        for change in changes:
            match change:
                case Put(if_absent=True) if change.key in before:
                    return False
                case Put(if_equals=bytes()) | Delete(if_equals=bytes()) if before.get(change.key) != change.if_equals:
                    return False
        for change in changes:
            match change:
                case Put():
                    self.values[change.key] = (change.value, self.end(change.ttl))
                case Delete():
                    self.values.pop(change.key, None)
                case Append(log, value, keep, ttl):
                    written, shown, _ = self.logs[log] if self.read(log) else ([], 0, 0.0)
                    self.logs[log] = ([*written, value], min(shown + 1, keep), self.end(ttl))
        return True


names = st.sampled_from(["", "a", "ab", "b", "é"])
values = st.sampled_from([b"", b"1", b"-2", b"x"])
ttls = st.sampled_from([None, 2, 5])
conditions = st.none() | values
Fields = st.SearchStrategy[dict[str, Any]]
puts: Fields = st.fixed_dictionaries(
    {"key": names, "value": values, "ttl": ttls, "if_absent": st.booleans(), "if_equals": conditions}
)
appends: Fields = st.fixed_dictionaries({"log": names, "value": values, "keep": st.integers(1, 4), "ttl": ttls})
changes = st.one_of(
    puts.map(lambda fields: Put(**fields)),
    st.builds(Delete, names, conditions),
    appends.map(lambda fields: Append(**fields)),
)
limits = st.integers(0, 4)
arguments: dict[str, Fields] = {
    "get": st.fixed_dictionaries({"key": names}),
    "put": puts,
    "delete": st.fixed_dictionaries({"key": names}),
    "scan": st.fixed_dictionaries({"prefix": names, "after": names, "limit": limits}),
    "add": st.fixed_dictionaries({"key": names, "amount": st.integers(-3, 3), "ttl": ttls}),
    "append": appends,
    "read": st.fixed_dictionaries({"log": names, "after": st.integers(0, 4), "limit": limits}),
    "commit": st.fixed_dictionaries({"changes": st.lists(changes, max_size=4)}),
    "wait": st.fixed_dictionaries({"seconds": st.integers(1, 3)}),
}
calls = st.sampled_from(sorted(arguments)).flatmap(lambda verb: st.tuples(st.just(verb), arguments[verb]))


async def play(store: Store | Model, clock: Clock, script: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    results: list[Any] = []
    for verb, fields in script:
        if verb == "wait":
            clock.now += fields["seconds"]
        elif isinstance(store, Model):
            results.append(getattr(store, verb)(**fields))
        else:
            try:
                results.append(await getattr(store, verb)(**fields))
            except StoreError:
                results.append("StoreError")
    return results


@given(st.lists(calls, max_size=30))
@settings(max_examples=100)
def test_every_backend_does_what_the_model_does(script: list[tuple[str, dict[str, Any]]]) -> None:
    async def compare() -> None:
        clocks = [Clock(), Clock(), Clock()]
        expected = await play(Model(clocks[0]), clocks[0], script)
        assert await play(MemoryStore(clock=clocks[1]), clocks[1], script) == expected
        with tempfile.TemporaryDirectory() as folder:
            async with opened(Path(folder, "state.db"), durable=False, clock=clocks[2]) as store:
                assert await play(store, clocks[2], script) == expected

    asyncio.run(compare())


@pytest.fixture(scope="module")
def model_schema(postgres: PostgresServer) -> Iterator[Schema]:
    made = Schema(postgres, clock=True)
    yield made
    made.drop()


@given(script=st.lists(calls, max_size=30))
@settings(max_examples=200 if SOAK else 20)
def test_postgres_does_what_the_model_does(model_schema: Schema, script: list[tuple[str, dict[str, Any]]]) -> None:
    async def compare() -> None:
        clock, shown = Clock(), Clock()
        expected = await play(Model(clock), clock, script)
        store = stores.open(model_schema.url)
        await store.get("")
        model_schema.sql("TRUNCATE handrail_entries, handrail_logs, handrail_lines")
        shown.on_change = lambda before, now: model_schema.set_clock(now)
        shown.now = 1000.0
        assert await play(store, shown, script) == expected
        await store.close()

    asyncio.run(compare())


@given(script=st.lists(calls, min_size=20, max_size=40))  # short ones rarely come back to a key
@settings(max_examples=1000 if SOAK else 40)
def test_redis_does_what_the_model_does(script: list[tuple[str, dict[str, Any]]]) -> None:
    async def compare() -> None:
        clock, other = Clock(), Clock()
        expected = await play(Model(clock), clock, script)
        store = TimedRedisStore(server.url(), [server])
        other.on_change = lambda before, now: store.pass_time(now - before)
        assert await play(store, other, script) == expected
        await store.close()

    server = shared_server()
    asyncio.run(compare())


# One file


async def test_the_file_is_for_its_owner_only(path: Path) -> None:
    async with opened(path) as store:
        await store.put("a", b"secret")
        modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
    assert modes == dict.fromkeys(["state.db", "state.db-wal", "state.db-shm"], 0o600)


async def test_a_file_of_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 1000")
    with pytest.raises(StoreError, match=r"state\.db: version 1000 is of a newer Handrail; this one knows up to \d+"):
        SqliteStore(path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,)


def test_what_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"not a database, " * 100)
    with pytest.raises(StoreError, match="not a database"):
        SqliteStore(path)
    with pytest.raises(FileNotFoundError):
        SqliteStore(path.parent / "no" / "such" / "folder")


async def test_a_store_that_is_opened_again_has_everything(path: Path) -> None:
    async with opened(path) as store:
        await store.put("a", b"1")
        await store.add("n", 5)
        await store.append("log", b"1", keep=5)
    async with opened(path) as store:
        assert await store.scan("") == [("a", b"1"), ("n", b"5")]
        assert await store.append("log", b"2", keep=5) == 2


async def test_two_stores_on_one_file_see_each_other(path: Path) -> None:
    async with opened(path) as one, opened(path) as other:
        await one.put("a", b"1")
        assert await other.put("a", b"2", if_equals=b"1")
        assert await one.get("a") == b"2"
        totals = await asyncio.gather(*(store.add("n") for store in (one, other) for _ in range(20)))
        assert sorted(totals) == list(range(1, 41))
        async with one.subscribe("t") as messages, other.subscribe("t") as others:
            await other.publish("t", b"from the other")
            await one.publish("t", b"from the one")
            for each in (messages, others):
                assert [await anext(each), await anext(each)] == [b"from the other", b"from the one"]


async def test_reading_does_not_wait_for_writing(path: Path) -> None:
    async with opened(path) as store:
        await store.put("a", b"1")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # nobody else can write now
            writing = asyncio.ensure_future(store.put("a", b"2"))
            assert await store.get("a") == b"1"
            assert not writing.done()
            other.execute("ROLLBACK")
        assert await writing
        assert await store.get("a") == b"2"


async def test_a_call_that_fails_undoes_itself_and_no_other(path: Path) -> None:
    """All of these wait while another writer has the file, and so share a transaction."""
    unwritable = "\ud800"
    async with opened(path) as store:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            calls = [
                store.put("first", b"1"),
                store.commit([Put("half", b"1"), Append(unwritable, b"1", keep=1)]),
                store.put("first", b"2", if_absent=True),
                store.put("last", b"1"),
            ]
            waiting = [asyncio.ensure_future(call) for call in calls]
            await store.get("a")
            other.execute("ROLLBACK")
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) if isinstance(each, Exception) else each for each in done] == [
            True,
            UnicodeEncodeError,
            False,
            True,
        ]
        assert await store.scan("") == [("first", b"1"), ("last", b"1")]


async def test_close_finishes_what_was_accepted_and_takes_no_more(path: Path) -> None:
    async with opened(path) as store:
        accepted = [asyncio.ensure_future(store.put(f"k:{i:03}", b"")) for i in range(300)]
        await asyncio.sleep(0)
        await store.close()
        assert await asyncio.gather(*accepted) == [True] * 300
        for refused in (store.get("a"), store.put("a", b"")):
            with pytest.raises(StoreError, match="closed"):
                await refused
    async with opened(path) as store:
        assert len(await store.scan("k:")) == 300


def test_a_store_outlives_its_loop(path: Path) -> None:
    async def leave_a_write_behind() -> SqliteStore:
        store = SqliteStore(path)
        holding.append(asyncio.ensure_future(store.put("a", b"1")))
        await asyncio.sleep(0)
        return store

    async def use_it_again() -> None:
        async with store.subscribe("t") as messages:
            await store.publish("t", b"1")
            assert await anext(messages) == b"1"
            assert await store.get("a") == b"1"
        await store.close()

    holding: list[asyncio.Future[bool]] = []
    store = asyncio.run(leave_a_write_behind())
    assert holding[0].cancelled()
    asyncio.run(use_it_again())


# Several processes

HEAD = """
import asyncio, os, sys
from handrail.stores import Append, Put
from handrail.stores.sqlite import SqliteStore
path = sys.argv[1]
def say(*words): print(*words, flush=True)
async def main():
"""


def script(body: str) -> str:
    """A program whose main coroutine has this body."""
    return HEAD + indent(body, "    ") + "\nasyncio.run(main())"


@asynccontextmanager
async def process(body: str, path: Path) -> AsyncIterator[Process]:
    """Another process that runs `body`, and is killed in the end if it has not ended."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", script(body), str(path), stdin=PIPE, stdout=PIPE)
    try:
        yield child
    finally:
        await put_away(child)


def output(child: Process) -> asyncio.StreamReader:
    assert child.stdout is not None
    return child.stdout


ECHO = """
store = SqliteStore(path)
async with store.subscribe("there") as messages:
    say("listening")
    async for message in messages:
        await store.publish("back", b"heard " + message)
"""


async def test_topics_reach_other_processes(path: Path) -> None:
    async with opened(path) as store, store.subscribe("back") as messages, process(ECHO, path) as child:
        assert await output(child).readline() == b"listening\n"
        for i in range(20):
            await store.publish("there", b"%d" % i)
        assert [await anext(messages) for _ in range(20)] == [b"heard %d" % i for i in range(20)]


COUNT = """
say("ready")
sys.stdin.readline()
store = SqliteStore(path)
for _ in range(10):
    await asyncio.gather(*(store.add("n") for _ in range(10)))
await store.close()
say("done")
"""


async def test_processes_that_open_a_new_file_at_once_count_together(path: Path) -> None:
    async with (
        process(COUNT, path) as one,
        process(COUNT, path) as two,
        process(COUNT, path) as three,
        process(COUNT, path) as four,
    ):
        children = (one, two, three, four)
        for child in children:
            assert await output(child).readline() == b"ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write(b"go\n")
        for child in children:
            assert await output(child).readline() == b"done\n"
        async with opened(path) as store:
            assert await store.get("n") == b"400"


WRITE = """
store = SqliteStore(path)
async def work(worker):
    for i in range(10**6):
        key = f"{worker}:{i:06}"
        await store.commit([Put("a:" + key, b""), Append("log", key.encode(), keep=10**6), Put("b:" + key, b"")])
        say(key)
await asyncio.gather(*map(work, range(10)))
"""


async def test_a_killed_writer_leaves_a_whole_file_with_all_it_acknowledged(path: Path) -> None:
    async with process(WRITE, path) as child:
        acknowledged = [await output(child).readline() for _ in range(500)]
        child.kill()
        acknowledged += [line async for line in output(child)]
    keys = {line.decode().strip() for line in takewhile(lambda line: line.endswith(b"\n"), acknowledged)}
    async with opened(path) as store:
        first = {key.removeprefix("a:") for key, _ in await store.scan("a:", limit=10**6)}
        second = {key.removeprefix("b:") for key, _ in await store.scan("b:", limit=10**6)}
        log = [value.decode() for _, value in await store.read("log", limit=10**6)]
        assert keys <= first
        assert first == second == set(log)
        assert len(log) == len(first)
        assert await store.append("log", b"next", keep=1) == len(log) + 1
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


FORK = """
store = SqliteStore(path)
child = os.fork()
if not child:
    for verb in (store.get("a"), store.put("a", b""), store.close()):
        try:
            await verb
        except Exception as problem:
            say(type(problem).__name__, problem)
    os._exit(0)
os.waitpid(child, 0)
say(await store.put("a", b""))
await store.close()
"""


async def test_a_store_is_refused_in_a_forked_child_and_goes_on_in_the_parent(path: Path) -> None:
    async with process(FORK, path) as child:
        lines = [await output(child).readline() for _ in range(4)]
        refusal = f"StoreError this store was opened by process {child.pid}; after a fork, open the file anew\n"
        assert lines == [*[refusal.encode()] * 3, b"True\n"]


FORGET = """
now = 1000.0
store = SqliteStore(path, clock=lambda: now)
await store.publish("t", b"forgotten")
now += 61
await store.publish("t", b"remembered")
await store.close()
"""


async def test_a_listener_that_was_stopped_for_too_long_is_told_so(path: Path) -> None:
    async with opened(path, clock=lambda: 1000.0) as store, store.subscribe("t") as messages:
        await store.publish("t", b"first")
        assert await anext(messages) == b"first"
        _stop_the_loop_while(FORGET, path)
        with pytest.raises(StoreError, match="messages are gone"):
            await anext(messages)


def _stop_the_loop_while(body: str, path: Path) -> None:
    subprocess.run([sys.executable, "-c", script(body), str(path)], check=True, timeout=DEADLINE)


def _delete(path: Path) -> None:
    path.unlink()


def _replace(path: Path) -> None:
    asyncio.run(_put_one(path.with_name("other")))
    path.with_name("other").replace(path)


async def _put_one(path: Path) -> None:
    other = SqliteStore(path)
    await other.put("other", b"1")
    await other.close()


@pytest.mark.parametrize("change", [_delete, _replace])
async def test_a_file_that_is_deleted_or_replaced_is_opened_anew(change: Callable[[Path], None], path: Path) -> None:
    stores = [SqliteStore(path), SqliteStore(path)]
    for i, store in enumerate(stores):
        await store.put(f"before {i}", b"1")
    async with stores[0].subscribe("topic") as messages:
        await stores[1].publish("topic", b"1")
        assert await anext(messages) == b"1"
        await asyncio.to_thread(change, path)
        for i, store in enumerate(stores):
            await store.put(f"after {i}", b"2")
        with pytest.raises(StoreError, match="the file was deleted or replaced: some messages are gone"):
            await anext(messages)
    for store in stores:
        assert [key for key, _ in await store.scan("")][:2] == ["after 0", "after 1"]
        assert await store.get("before 0") is None
        await store.close()
    again = SqliteStore(path)
    assert await again.get("after 1") == b"2"
    assert (await again.get("other") is not None) == (change is _replace)
    await again.close()


@pytest.mark.parametrize("form", ["{path}", "sqlite:///{path}"])
async def test_a_path_or_url_of_a_file_opens_a_store_that_processes_share(form: str, path: Path) -> None:
    opened = stores.open(form.format(path=path), durable=False)
    assert opened.supports == {"processes", "transaction"} and opened.path == str(path) and not opened.durable
    await opened.put("a", b"1")
    await opened.close()
    again = stores.open(path)
    assert await again.get("a") == b"1" and again.durable
    with pytest.raises(StoreError, match="without waiting"):
        _ = again.peek
    await again.close()


@pytest.mark.parametrize("name", ["c://state.db", "a b/~/state.db", "Sqlite://state.db", "memory"])
async def test_a_text_that_is_no_url_is_a_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    opened = stores.open(name, durable=False)
    assert opened.path == str(tmp_path / name)
    await opened.close()


async def test_memory_url_opens_a_store_that_is_read_without_waiting() -> None:
    opened = stores.open("memory:")
    await opened.put("a", b"1")
    assert opened.supports == {"peek"} and opened.peek("a") == b"1"
    with pytest.raises(StoreError, match="no transactions"):
        opened.transaction(lambda db, now: None, lambda value, problem: None)
    with pytest.raises(ValueError, match="no transactions for records"):
        open_trail(opened)


@pytest.mark.parametrize("url", ["mongodb://localhost", "sqlite://host/a", "sqlite:///"])
def test_a_url_of_no_backend_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not memory:, sqlite:///path"):
        stores.open(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:se/cret@host:6379/1", "redis://***@host:6379"),
        ("redis://:se?cret@host", "redis://***@host"),
        ("postgresql://user:se@cr/et@host/db?sslmode=require", "postgresql://***@host"),
        ("postgresql://user:se@cret@host/db?password=secret", "postgresql://user:***@host/db"),
        ("https://host/@person", "https://host/@person"),
        ("sqlite:///a@b:c.db", "sqlite:///a@b:c.db"),
    ],
)
def test_a_url_is_shown_without_any_part_of_a_password_also_if_that_is_not_escaped(url: str, shown: str) -> None:
    assert stores.public_url(url) == shown
