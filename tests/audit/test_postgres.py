"""An audit log in PostgreSQL: a chain for each writer, whole whatever becomes of connections, servers and replicas."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from cli_runs import handrail
from faults import until
from handrail import Server, stores
from handrail.approvals.queue import Approvals
from handrail.audit import postgres as tables
from handrail.audit.format import VerifyReport, merge_reports, verify_chains
from handrail.audit.log import Trail, TrailError, TrailSettings, open_trail
from handrail.audit.postgres_reader import PostgresLog
from handrail.audit.reader import open_log
from handrail.guards.policy import Policy, Rule
from handrail.model import Object
from handrail.stores import Delete, Put, StoreError, postgres as databases
from handrail.testing import Peer
from patience import PATIENCE, SOAK
from postgres_servers import PostgresServer, Schema
from requirements import requirement
from rigs_console import consoled

DAY = 86_400.0


@asynccontextmanager
async def opened(url: str, **settings: Any) -> AsyncIterator[Trail]:
    trail = open_trail(url, TrailSettings(**settings))
    try:
        yield trail
    finally:
        await trail.close()


def intent(call: object, **more: Any) -> Object:
    return {"event": "intent", "call": str(call), **more}


def outcome(call: object) -> Object:
    return {"event": "outcome", "call": str(call)}


def records(schema: Schema) -> list[Object]:
    """Every record, in the order of all writers."""
    rows = schema.sql("SELECT convert_from(line, 'UTF8') FROM handrail_audit ORDER BY position")
    return [json.loads(line) for (line,) in rows]


def calls(schema: Schema) -> list[str]:
    return [each["call"] for each in records(schema) if each["event"] == "intent"]


async def check(url: str, heads: dict[str, str] | None = None) -> dict[str, VerifyReport]:
    """Verify all chains, as a command does: in a thread without a loop."""
    return await asyncio.to_thread(lambda: dict(verify_chains(PostgresLog(url).chains(), heads or {})))


async def good(url: str, heads: dict[str, str] | None = None) -> dict[str, VerifyReport]:
    reports = await check(url, heads)
    assert merge_reports(reports.values()).flaw is None, reports
    return reports


# Writing


@requirement("P-15", everywhere=True)
async def test_p15_what_is_written_is_there_in_order_and_before_the_answer(schema: Schema) -> None:
    async with opened(schema.url) as trail:
        assert await trail.write(intent(1, text="é\n\u2028")) is True
        assert calls(schema) == ["1"]
        assert await asyncio.gather(*(trail.write(intent(i)) for i in range(2, 100))) == [True] * 98
        trail.submit({"event": "refused", "call": "100"})
    numbered = records(schema)
    assert [each["number"] for each in numbered] == list(range(1, 102))
    assert [each["prev"] for each in numbered] == ["0" * 64, *(each["hash"] for each in numbered[:-1])]
    assert (numbered[0]["event"], numbered[0]["process"]) == ("opened", os.getpid())
    assert numbered[1]["text"] == "é\n\u2028"
    ((writer, report),) = (await good(schema.url)).items()
    assert {each["writer"] for each in numbered} == {writer}
    assert (report.records, report.first, report.last, len(report.unfinished)) == (101, 1, 101, 99)


@requirement("P-16", everywhere=True)
async def test_p16_each_writer_has_a_chain_of_its_own_and_all_are_read_together(schema: Schema) -> None:
    async with opened(schema.url) as one, opened(schema.url) as other:
        for i in range(10):
            await (one, other)[i % 2].write(intent(i))
        await one.write(outcome(1))  # whoever writes it
        assert calls(schema) == [str(i) for i in range(10)]
    reports = await good(schema.url)
    assert sorted(each.records for each in reports.values()) == [6, 7]
    total = merge_reports(reports.values())
    assert (total.records, len(total.unfinished)) == (13, 10)
    lines = [line async for line in _lines(schema.url)]
    assert [json.loads(line)["call"] for line in lines if b'"intent"' in line] == [str(i) for i in range(10)]


async def _lines(url: str) -> AsyncIterator[bytes]:
    for _, line in await asyncio.to_thread(lambda: list(PostgresLog(url).lines())):
        yield line


async def test_a_log_is_read_from_its_end_and_from_any_place(schema: Schema) -> None:
    async with opened(schema.url) as trail:
        for i in range(250):  # more than are fetched at once
            trail.submit(intent(i), lambda _: None)
        await trail.write(intent("last"))
    log = open_log(schema.url)
    first, last = await asyncio.to_thread(lambda: log.span)
    assert (first, last) == (1, 252)
    newest = await asyncio.to_thread(lambda: list(log.newest_first()))
    assert [number for number, _ in newest] == list(range(252, 0, -1))
    assert await asyncio.to_thread(lambda: list(log.newest_first(3))) == newest[-2:]
    assert await asyncio.to_thread(lambda: len(list(log.lines(250)))) == 2


async def test_a_cancelled_write_leaves_the_others_alone_and_a_closed_trail_refuses(schema: Schema) -> None:
    async with opened(schema.url) as trail:
        writes = [asyncio.ensure_future(trail.write(intent(i))) for i in range(10)]
        await asyncio.sleep(0)
        writes[5].cancel()
        done = await asyncio.gather(*writes, return_exceptions=True)
        assert [i for i, each in enumerate(done) if each is not True] == [5]
    with pytest.raises(TrailError, match="was closed"):
        await trail.write(intent(2))
    await good(schema.url)


async def test_what_a_table_does_not_keep_by_is_refused(schema: Schema) -> None:
    with pytest.raises(ValueError, match="max_megabytes: PostgreSQL keeps records by their age alone; use keep_days"):
        open_trail(schema.url, TrailSettings(max_megabytes=64))


# Together with a change


@requirement("P-19", everywhere=True)
async def test_p19_an_approval_is_used_up_with_the_record_or_neither(schema: Schema) -> None:
    store = stores.open(schema.url)
    await store.put("approval:1", b"granted")
    trail = open_trail(store)
    use = Put("approval:1", b"used", if_equals=b"granted")
    tries = [trail.write(intent(i), [use, Put(f"call:{i}", b"")]) for i in range(20)]
    others = [trail.write(intent(f"other {i}")) for i in range(20)]
    done = await asyncio.gather(*(each for pair in zip(tries, others, strict=True) for each in pair))
    assert (done[::2].count(True), done[1::2]) == (1, [True] * 20)
    winner = done[::2].index(True)
    assert [key for key, _ in await store.scan("")] == ["approval:1", f"call:{winner}"]
    assert [call for call in calls(schema) if "other" not in call] == [str(winner)]
    assert not await trail.write(intent("late"), [Delete("approval:1", if_equals=b"granted")])
    await trail.close()
    assert await store.get("approval:1") == b"used"  # the store is the caller's
    await store.close()
    await good(schema.url)


RACE = """
import asyncio, sys
from handrail.audit.log import open_trail
from handrail.stores import Put
async def main():
    trail = open_trail(sys.argv[1])
    await trail.write({"event": "ready"})
    print("ready", flush=True)
    sys.stdin.readline()
    async def use(n):
        change = Put(f"approval:{n}", b"used", if_equals=b"granted")
        return await trail.write({"event": "intent", "call": f"{sys.argv[2]}-{n}"}, [change])
    done = await asyncio.gather(*(use(n) for n in range(int(sys.argv[3]))))
    print(*[n for n, each in enumerate(done) if each], flush=True)
    await trail.close()
asyncio.run(main())
"""


@requirement("P-19", everywhere=True)
async def test_p19_of_two_processes_that_race_for_each_approval_one_uses_it(schema: Schema) -> None:
    count = 40
    store = stores.open(schema.url)
    await store.commit([Put(f"approval:{n}", b"granted") for n in range(count)])
    used = await asyncio.to_thread(_race, schema.url, count)
    assert sorted(used["one"] + used["two"]) == list(range(count))
    assert sorted(calls(schema)) == sorted(f"{name}-{n}" for name, numbers in used.items() for n in numbers)
    await store.close()
    await good(schema.url)


def _race(url: str, count: int) -> dict[str, list[int]]:
    """Let two processes use the same approvals at once; return which each has used."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    start = partial(subprocess.Popen[str], env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    processes = {name: start([sys.executable, "-c", RACE, url, name, str(count)]) for name in ("one", "two")}
    for process in processes.values():
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes.values():
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = {name: process.communicate(timeout=PATIENCE)[0] for name, process in processes.items()}
    return {name: [int(n) for n in out.split()] for name, out in outputs.items()}


# Lost connections

Way = Literal["up", "down"]


class Relay:
    """Between a client and PostgreSQL: it can end a connection before a byte passes, in either way, or fall silent."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.passed: dict[Way, bytearray] = {"up": bytearray(), "down": bytearray()}
        self.plan: tuple[Way, int] | None = None
        self.falls_silent = False  # in place of an end
        self.cuts = 0
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        yield server.sockets[0].getsockname()[1]
        server.close()
        self.cut()
        await asyncio.sleep(0)

    def arm(self, plan: tuple[Way, int] | None = None) -> None:
        self.passed = {"up": bytearray(), "down": bytearray()}
        self.plan = plan

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, up_writer}
        with suppress(OSError):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass("up", reader, up_writer))
                group.create_task(self._pass("down", up_reader, writer))

    async def _pass(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.plan is not None and self.plan[0] == way:
                room = self.plan[1] - len(self.passed[way])
                if len(data) > room:
                    self.passed[way] += data[: max(room, 0)]
                    writer.write(data[: max(room, 0)])
                    with suppress(OSError):
                        await writer.drain()
                    self.plan = None
                    self.cuts += 1
                    if not self.falls_silent:
                        self.cut()
                    return
            self.passed[way] += data
            writer.write(data)
        writer.transport.abort()


def message_ends(data: bytes) -> list[int]:
    """Where each message of PostgreSQL's protocol ends: a letter, then a length that counts itself."""
    ends, at = [], 0
    while at < len(data):
        at += 1 + int.from_bytes(data[at + 1 : at + 5], "big")
        ends.append(at)
    return ends


@requirement("P-20", "P-19", everywhere=True)
@pytest.mark.parametrize("changes", [0, 1])
async def test_p20_a_connection_that_is_cut_in_a_commit_loses_and_doubles_nothing(
    changes: int, schema: Schema, postgres: PostgresServer
) -> None:
    """Cut at each end of a message, in both ways, and in the soak at each byte: the lost answer is looked up."""
    relay = Relay(postgres.port)
    expected: list[str] = []
    async with relay.open() as port:
        url = postgres.url(f"search_path={schema.search_path}&sslmode=disable", port=port)
        async with opened(url) as trail:

            async def write() -> None:
                name = str(len(expected))
                used = [Put(f"used:{name}", b"", if_absent=True)] * changes
                assert await trail.write(intent(name), used) is True
                expected.append(name)

            for _ in range(3):  # statements are prepared by then
                await write()
            relay.arm()
            await write()
            await asyncio.sleep(0)
            ends: dict[Way, list[int]] = {way: message_ends(bytes(data)) for way, data in relay.passed.items()}
            assert len(ends["down"]) > 3
            cuts = [(way, end - 1) for way in ends for end in ends[way]] + [(way, 0) for way in ends]
            if SOAK:
                cuts = [(way, at) for way in ends for at in range(ends[way][-1])]
            for cut in cuts:
                relay.arm(cut)
                await write()
                relay.arm()
                await write()
    assert relay.cuts == len(cuts)
    assert calls(schema) == expected
    if changes:
        assert schema.rows("entries") == len(expected)
    await good(schema.url)


@requirement("P-20", everywhere=True)
async def test_p20_a_replica_that_is_cut_off_without_a_sign_keeps_no_approval_from_the_others(
    schema: Schema, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "APPEND_SECONDS", 1.0)
    monkeypatch.setattr(tables, "ATTEMPT_SECONDS", 0.5)
    monkeypatch.setattr(databases, "TRANSACTION_SECONDS", 1)
    relay = Relay(postgres.port)
    use = [Put("approval:1", b"used", if_absent=True)]
    async with relay.open() as port, opened(schema.url) as other:
        url = postgres.url(f"search_path={schema.search_path}&sslmode=disable", port=port)
        async with opened(url) as lost:
            await lost.write(intent("first"), [Put("approval:0", b"used")])
            relay.arm()
            relay.falls_silent = True
            relay.plan = ("up", 300)  # after the transaction has begun, before it ends
            with suppress(TrailError):
                await lost.write(intent("lost"), use)
            assert relay.cuts == 1
            used = None
            async with asyncio.timeout(PATIENCE):
                while used is None:
                    with suppress(TrailError):
                        used = await other.write(intent("other"), use)
    assert calls(schema).count("other") == used and ("lost" in calls(schema)) is not used
    await good(schema.url)


@requirement("P-20", "P-15", everywhere=True)
async def test_p20_a_server_that_is_killed_in_mid_commit_loses_nothing_that_was_acknowledged(
    schema: Schema, postgres: PostgresServer
) -> None:
    seed = int(os.environ.get("HANDRAIL_SEED") or random.randrange(10**6))
    print(f"HANDRAIL_SEED={seed}")
    chance = random.Random(seed)
    acknowledged: list[str] = []
    refusals: dict[str, str] = {}
    is_over = False

    async with opened(schema.url) as trail:

        async def work(worker: int) -> None:
            number = 0
            while not is_over:
                name = f"{worker}-{number}"
                change = [Put(f"approval:{name}", b"used", if_absent=True)] if worker % 2 else []
                try:
                    if await trail.write(intent(name), change):
                        acknowledged.append(name)
                    else:
                        assert "not known" in refusals[name]  # it was used up by an attempt whose answer was lost
                    number += 1
                except TrailError as problem:
                    refusals[name] = str(problem)
                    await asyncio.sleep(0.01)

        async def progress() -> None:
            await until(partial(_has_grown, acknowledged, len(acknowledged) + 20), "records are written")

        workers = [asyncio.create_task(work(n)) for n in range(8)]
        for _ in range(50 if SOAK else 4):
            await progress()
            await asyncio.sleep(chance.uniform(0.0, 0.05))
            await asyncio.to_thread(postgres.kill)
            await asyncio.sleep(chance.uniform(0.0, 0.2))
            await asyncio.to_thread(postgres.start)
        await progress()  # it recovers by itself
        is_over = True
        await asyncio.gather(*workers)
    written = Counter(calls(schema))
    assert set(acknowledged) <= set(written)
    assert {name for name, count in written.items() if count > 1} <= set(refusals), "only what was refused is repeated"
    assert not any(postgres.password in text for text in refusals.values())
    await good(schema.url)
    print(f"{len(acknowledged)} acknowledged, {len(refusals)} refused at first")


@requirement("P-20", everywhere=True)
async def test_p20_calls_of_a_server_that_is_frozen_are_refused_in_time_and_nothing_runs(
    schema: Schema, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, seconds in (
        (tables, "APPEND_SECONDS", 1.0),
        (tables, "ATTEMPT_SECONDS", 0.5),
        (databases, "CONNECT_SECONDS", 0.5),
    ):
        monkeypatch.setattr(module, name, seconds)
    ran: list[int] = []
    server = Server("shop", audit=schema.url)

    @server.tool
    async def act(n: int) -> str:
        ran.append(n)
        return "done"

    async with Peer(server) as peer:
        assert (await peer.call("act", {"n": 0})).text == "done"
        postgres.freeze()
        try:
            async with asyncio.timeout(PATIENCE):
                tries = (peer.call("act", {"n": n}) for n in range(1, 9))
                frozen = await asyncio.gather(*tries, return_exceptions=True)
        finally:
            postgres.thaw()
            monkeypatch.undo()
        assert ran == [0]
        assert all("act was not called: it cannot be recorded now" in str(each) for each in frozen), frozen
        assert (await peer.call("act", {"n": 9})).text == "done"
    assert ran == [0, 9]
    done = {each["call"] for each in records(schema) if each["event"] == "outcome" and each["outcome"] == "ok"}
    assert len(done) == 2
    await good(schema.url)


async def test_an_answer_that_never_comes_is_not_guessed(
    schema: Schema, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "APPEND_SECONDS", 0.6)
    monkeypatch.setattr(tables, "ATTEMPT_SECONDS", 0.3)
    monkeypatch.setattr(databases, "CONNECT_SECONDS", 0.3)
    async with opened(schema.url) as trail:
        await trail.write(intent(1))
        postgres.freeze()
        try:
            with pytest.raises(TrailError, match="it is not known whether the records were written"):
                await trail.write(intent(2))
            with pytest.raises(TrailError, match="did not answer in time; nothing was recorded"):
                await trail.write(intent(3))
        finally:
            postgres.thaw()
            monkeypatch.undo()
        await until(lambda: not schema.sql(ACTIVE), "what was on its way has come or gone")
        assert await trail.write(intent(4))
    assert calls(schema) in (["1", "4"], ["1", "2", "4"])
    await good(schema.url)


ACTIVE = "SELECT pid FROM pg_stat_activity WHERE application_name = 'handrail' AND state <> 'idle'"


async def test_a_database_that_cannot_be_reached_refuses_at_once_and_says_so(postgres: PostgresServer) -> None:
    async with opened(postgres.url(port=1)) as trail:
        with pytest.raises(TrailError) as refusal:
            await trail.write(intent(1))
    text = "audit log: postgresql://127.0.0.1:1/postgres: it cannot be reached: connection refused"
    assert str(refusal.value).startswith(text) and str(refusal.value).endswith("; nothing was recorded")


# Rights


APPEND_ONLY = ["SELECT ON handrail_schema", "SELECT, INSERT ON handrail_audit"]
STORE_RIGHTS = [f"SELECT, INSERT, UPDATE, DELETE ON {each}" for each in databases.STORE_TABLES]


async def test_a_role_that_may_only_add_records_is_enough(schema: Schema) -> None:
    async with opened(schema.url) as trail:
        await trail.write(intent("owner"))
    url = schema.role(*APPEND_ONLY, *STORE_RIGHTS)
    store = stores.open(url)
    assert (await store.report()).warnings == ()
    trail = open_trail(store, TrailSettings(keep_days=1))
    assert await trail.write(intent("served"), [Put("approval:1", b"used", if_absent=True)])
    assert not await trail.write(intent("again"), [Put("approval:1", b"used", if_absent=True)])
    await trail.close()
    await store.close()
    assert calls(schema) == ["owner", "served"]
    await good(url)


async def test_a_role_that_may_change_records_is_named(schema: Schema) -> None:
    store = stores.open(schema.url)
    (warning,) = (await store.report()).warnings
    assert warning.startswith("this role may UPDATE, DELETE, TRUNCATE records of the audit log, and so hide them")
    await store.close()


async def test_a_reader_needs_one_right(schema: Schema) -> None:
    async with opened(schema.url) as trail:
        await trail.write(intent(1))
    await good(schema.role("SELECT ON handrail_audit"))


async def test_tables_that_are_missing_are_named_to_a_role_that_may_not_make_them(schema: Schema) -> None:
    async with opened(schema.role()) as trail:
        with pytest.raises(TrailError, match=r"the tables are not there.* run `handrail audit prepare URL --grant"):
            await trail.write(intent(1))


async def test_a_server_that_does_not_sync_is_refused_unless_the_loss_is_accepted(schema: Schema) -> None:
    url = f"{schema.url}&synchronous_commit=off"
    async with opened(url) as trail:
        with pytest.raises(
            TrailError, match=r"synchronous_commit is off there: .* sync = 'power-cut-loses-last-calls'"
        ):
            await trail.write(intent(1))
    async with opened(url, sync="power-cut-loses-last-calls") as trail:
        assert await trail.write(intent(2))
    store = stores.open(url)
    (loss,) = (await store.report()).losses
    assert loss.startswith("synchronous_commit is off, and a crash of the server takes the last writes")
    await store.close()


# Retention


@pytest.fixture
def timed(postgres: PostgresServer) -> Iterator[Schema]:
    """A schema whose clock the test turns."""
    made = Schema(postgres, clock=True)
    made.set_clock(1_785_000_000.0)
    yield made
    made.drop()


async def trim(url: str, keep_days: int) -> None:
    store = databases.PostgresStore(url)
    table = tables.PostgresTable(store, TrailSettings(keep_days=keep_days).limits, lambda: 0.0, owns_store=True)
    await table.trim()
    await table.close()


async def test_old_records_are_trimmed_in_each_chain_and_the_rest_can_still_be_checked(timed: Schema) -> None:
    start = 1_785_000_000.0
    async with opened(timed.url, keep_days=0) as gone, opened(timed.url, keep_days=0) as lasting:
        for day in range(40):
            timed.set_clock(start + day * DAY)
            await lasting.write(intent(f"lasting {day}"))
            if day < 5:
                await gone.write(intent(f"gone {day}"))
        before = await good(timed.url)
        heads = {writer: report.noted.replace(",365d", "") + ",30d" for writer, report in before.items()}
        await trim(timed.url, 30)
        left = calls(timed)
        assert left[0] == "lasting 8" and "gone 4" not in left, "the last that is too old is left"
        await lasting.write(intent("after"))  # its place was taken by the record that says so
        events = Counter(each["event"] for each in records(timed))
        assert (events["trimmed"], events["removed"]) == (1, 1)
        reports = await good(timed.url, heads)
        assert len(reports) == 2, "the chain of which all was too old is gone; one has the record that says so"
        await trim(timed.url, 30)
        assert Counter(each["event"] for each in records(timed)) == events, "there is nothing new to tell"


async def test_a_chain_that_is_shorter_than_its_limits_allow_is_noticed(timed: Schema) -> None:
    async with opened(timed.url, keep_days=30) as trail:
        for i in range(5):
            await trail.write(intent(i))
        heads = {writer: report.noted for writer, report in (await good(timed.url)).items()}
        await trim(timed.url, 30)
        await good(timed.url, heads)
        timed.sql("DELETE FROM handrail_audit WHERE number < 3")
        report = merge_reports((await check(timed.url, heads)).values())
        assert report.flaw is not None and "those before it are missing" in report.flaw.text


async def test_a_writer_that_had_nothing_to_record_for_long_begins_a_chain(timed: Schema) -> None:
    now = 1_785_000_000.0
    trail = open_trail(timed.url, TrailSettings(keep_days=1), clock=lambda: now)
    await trail.write(intent(1))
    now += 3 * DAY
    timed.set_clock(now)
    await trail.write(intent(2))
    now += DAY / 2
    timed.set_clock(now)
    await trail.write(intent(3))
    await trim(timed.url, 1)
    await trail.write(intent(4))
    await trail.close()
    assert calls(timed) == ["2", "3", "4"]
    await good(timed.url)


def _has_grown(items: list[str], size: int) -> bool:
    return len(items) >= size


async def test_writers_go_on_while_others_shorten_their_chains(timed: Schema) -> None:
    now = 1_785_000_000.0
    trails = [open_trail(timed.url, TrailSettings(keep_days=0)) for _ in range(3)]
    written: list[str] = []
    is_over = False

    async def write(worker: int) -> None:
        number = 0
        while not is_over:
            name = f"{worker}-{number}"
            assert await trails[worker % 3].write(intent(name), [Put(f"used:{name}", b"")] * (worker % 2))
            written.append(name)
            number += 1

    workers = [asyncio.create_task(write(n)) for n in range(6)]
    for _ in range(8):
        await until(partial(_has_grown, written, len(written) + 30), "records are written")
        now += DAY
        await asyncio.to_thread(timed.set_clock, now)
        await asyncio.gather(trim(timed.url, 2), trim(timed.url, 2))
    is_over = True
    await asyncio.gather(*workers)
    for trail in trails:
        await trail.close()
    events = Counter(each["event"] for each in records(timed))
    assert events["trimmed"] >= 6 and events["intent"] < len(written)
    assert set(calls(timed)) <= set(written) and calls(timed)[-1] in written[-18:]
    await good(timed.url)


# A long log, and a process that is killed


async def test_a_long_log_is_read_in_little_memory(schema: Schema) -> None:
    async with opened(schema.url) as trail:
        for _ in range(30):
            await asyncio.gather(*(trail.write(intent(i, text="x" * 8000)) for i in range(100)))
    size = int(schema.sql("SELECT sum(length(line)) FROM handrail_audit")[0][0])

    def verified() -> tuple[int, int]:
        tracemalloc.start()
        count = merge_reports(report for _, report in verify_chains(PostgresLog(schema.url).chains(), {})).records
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return count, peak

    count, peak = await asyncio.to_thread(verified)
    assert (count, size > 24_000_000) == (3001, True) and peak < size / 4


@requirement("P-15", everywhere=True)
def test_p15_a_replica_that_is_killed_has_answered_nothing_without_a_record(schema: Schema, tmp_path: Path) -> None:
    effects, answered = tmp_path / "effects", set[str]()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    chance = random.Random(11)
    for round_number in range(50 if SOAK else 4):
        command = [sys.executable, "-c", KILLED, schema.url, str(effects), str(round_number)]
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            answered |= {process.stdout.readline().strip() for _ in range(chance.randrange(1, 60))}
            process.kill()
            answered |= {line.strip() for line in process.stdout if line.endswith("\n")}
    events = {(each["event"], each.get("call")) for each in records(schema)}
    assert {call for call in answered if ("outcome", call) not in events} == set()
    assert {call for call in effects.read_text().split() if ("intent", call) not in events} == set()
    asyncio.run(_is_good(schema.url))


async def _is_good(url: str) -> None:
    await good(url)


KILLED = """
import asyncio, os, sys
from itertools import count
from handrail.audit.log import open_trail
async def main(url, effects, name):
    trail, file = open_trail(url), os.open(effects, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    async def work(worker):
        for i in count():
            call = f"{name}-{worker}-{i}"
            await trail.write({"event": "intent", "call": call})
            os.write(file, f"{call}\\n".encode())
            await trail.write({"event": "outcome", "call": call})
            print(call, flush=True)
    await asyncio.gather(*map(work, range(8)))
asyncio.run(main(*sys.argv[1:]))
"""


@requirement("P-21", everywhere=True)
async def test_p21_records_have_the_time_of_the_database_whatever_the_clock_of_a_replica_says(timed: Schema) -> None:
    trail = open_trail(timed.url, TrailSettings(keep_days=0), clock=lambda: 3600.0)
    await trail.write(intent(1))
    timed.set_clock(1_785_000_100.0)
    await trail.write(intent(2))
    await trail.write(intent(3))
    await trail.close()
    times = [datetime.fromisoformat(each["time"]).timestamp() for each in records(timed)]
    assert times[0] == times[1] == 1_785_000_000.0 and times[-1] == 1_785_000_100.0


# Tampering

TAMPERING: dict[str, tuple[str, str]] = {
    "deleted": ("DELETE FROM handrail_audit WHERE chain = '{a}' AND number = 4", "record 5 follows 3"),
    "changed": (
        "UPDATE handrail_audit SET line = convert_to(replace(convert_from(line, 'UTF8'), 'a-2', 'a-9'), 'UTF8')"
        " WHERE chain = '{a}' AND number = 4",
        "its hash does not fit",
    ),
    "reordered": (
        "UPDATE handrail_audit SET number = -number WHERE chain = '{a}' AND number IN (4, 5);"
        "UPDATE handrail_audit SET number = 9 + number WHERE chain = '{a}' AND number IN (-4, -5)",
        "follows",
    ),
    "moved to another chain": (
        "UPDATE handrail_audit SET chain = '{b}', number = 100 WHERE chain = '{a}' AND number = 4",
        "follows",
    ),
    "a whole chain named otherwise": ("UPDATE handrail_audit SET chain = 'f00d' WHERE chain = '{a}'", "was deleted"),
    "moved to the end of another chain": (
        "UPDATE handrail_audit SET chain = '{b}', number = 8 WHERE chain = '{a}' AND number = 7",
        "record 7 follows 7",
    ),
    "tail cut": ("DELETE FROM handrail_audit WHERE chain = '{a}' AND number > 4", "the end was cut off"),
    "beginning cut": ("DELETE FROM handrail_audit WHERE chain = '{a}' AND number < 4", "those before it are missing"),
    "a chain deleted": ("DELETE FROM handrail_audit WHERE chain = '{a}'", "its chain was deleted"),
    "a chain written anew": ("UPDATE handrail_audit SET line = {rewritten} WHERE chain = '{a}'", "the end was cut off"),
}


@requirement("P-16", everywhere=True)
@pytest.mark.parametrize("attack", TAMPERING)
async def test_p16_every_attack_on_the_rows_is_named(attack: str, schema: Schema) -> None:
    async with opened(schema.url) as one, opened(schema.url) as other:
        for i in range(6):
            await one.write(intent(f"a-{i}"))
            await other.write(intent(f"b-{i}"))
    reports = await good(schema.url)
    assert [each.records for each in reports.values()] == [7, 7]
    heads = {writer: report.noted for writer, report in reports.items()}
    a, b = (record["writer"] for record in records(schema) if record["event"] == "opened")
    statement, expected = TAMPERING[attack]
    if "{rewritten}" in statement:
        _write_anew(schema, a)
    else:
        schema.sql(statement.format(a=a, b=b))
    flaws = {writer: report.flaw for writer, report in (await check(schema.url, heads)).items() if report.flaw}
    assert expected in " ".join(flaw.text for flaw in flaws.values()), flaws
    assert (b in flaws) == attack.startswith("moved to")


@requirement("P-16", everywhere=True)
async def test_p16_a_record_in_the_chain_of_another_writer_is_named_without_a_head(schema: Schema) -> None:
    async with opened(schema.url) as trail:
        await trail.write(intent(1))
    schema.sql("UPDATE handrail_audit SET chain = 'f00d'")
    ((chain, report),) = (await check(schema.url)).items()
    assert chain == "f00d" and report.flaw is not None
    assert report.flaw.text == "it was written to the chain of another writer"


def _write_anew(schema: Schema, chain: str) -> None:
    from handrail.audit.format import ORIGIN, frame

    bodies = [json.dumps(intent(f"made up {i}")).encode() for i in range(7)]
    lines, _ = frame(bodies, chain.encode(), 1_785_000_000.0, ORIGIN)
    for number, line in enumerate(lines, 1):
        text = line.decode().replace("'", "''")
        row = f"chain = '{chain}' AND number = {number}"
        schema.sql(f"UPDATE handrail_audit SET line = convert_to('{text}', 'UTF8') WHERE {row}")


# The commands


async def test_the_commands_read_the_log_of_a_server(schema: Schema, tmp_path: Path) -> None:
    server = Server("shop", audit=schema.url)

    @server.tool
    async def act(n: int) -> str:
        return "done"

    async with Peer(server) as peer:
        for n in range(3):
            await peer.call("act", {"n": n})
    run = partial(handrail, "audit", home=tmp_path)
    shown = run("served", schema.url)
    assert (shown.returncode, shown.stdout.count("act"), shown.stderr) == (0, 3, "")
    assert run("served", schema.url, "--tail", "1").stdout.count("act") == 1
    exported = run("export", schema.url)
    assert [json.loads(line) for line in exported.stdout.splitlines()] == records(schema)
    report = json.loads(run("verify", schema.url, "--json").stdout)
    assert (report["ok"], report["records"], len(report["writers"])) == (True, 7, 1)
    assert schema.server.password not in shown.stdout + json.dumps(report)


async def test_p16_a_copy_can_be_verified_elsewhere(schema: Schema, tmp_path: Path) -> None:
    async with opened(schema.url) as one, opened(schema.url) as other:
        for i in range(5):
            await one.write(intent(i))
            await other.write(intent(i))
    run = partial(handrail, "audit", home=tmp_path)
    (tmp_path / "heads").write_text(run("verify", schema.url).stdout, "utf-8")
    copy = tmp_path / "copy.jsonl"
    copy.write_text(run("export", schema.url).stdout, "utf-8")
    schema.sql("DELETE FROM handrail_audit WHERE number = 6")
    checked = run("verify", schema.url, "--heads", str(tmp_path / "heads"))
    assert checked.returncode and "bad: 10 records of 2 writers" in checked.stdout, checked.stdout
    assert checked.stdout.count("the end was cut off") == 2
    checked = run("verify", str(copy), "--writers", "--heads", str(tmp_path / "heads"))
    assert checked.returncode == 0 and "good: 12 records of 2 writers" in checked.stdout, checked.stdout
    lines = copy.read_text("utf-8").splitlines(keepends=True)
    for damaged in (lines[:3] + lines[4:], lines[:6]):
        copy.write_text("".join(damaged), "utf-8")
        assert run("verify", str(copy), "--writers", "--heads", str(tmp_path / "heads")).returncode


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["verify", "{wrong}"], "it refuses the user or the password"),
        (["verify", "{empty}"], "there is no audit log: no server has used it yet"),
        (["verify", "{url}", "--head", "f" * 64], "--heads FILE takes an earlier output"),
        (["verify", "{url}", "--heads", "nothing"], "--heads: nothing: No such file"),
        (["verify", "postgresql://u:sec/ret@h/d"], "cannot be read: it has to be postgresql://USER"),
        (["prepare", "state.db"], "name a log in PostgreSQL"),
    ],
)
def test_what_a_command_cannot_do_is_said_without_a_secret(
    words: list[str], complaint: str, schema: Schema, tmp_path: Path
) -> None:
    asyncio.run(_one_record(schema.url))
    places = {"wrong": schema.server.url(password="hunter2"), "empty": schema.server.url(), "url": schema.url}
    done = handrail("audit", *(each.format(**places) for each in words), home=tmp_path)
    assert done.returncode and complaint in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for secret in ("hunter2", schema.server.password, "sec/ret"):
        assert secret not in done.stdout + done.stderr


async def _one_record(url: str) -> None:
    async with opened(url) as trail:
        await trail.write(intent(1))


def test_prepare_makes_the_tables_and_grants_a_role_what_a_server_needs(schema: Schema, tmp_path: Path) -> None:
    url = schema.role()
    role = url.partition("//")[2].partition(":")[0]
    done = handrail("audit", "prepare", schema.url, "--grant", role, home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith(f"ready, also for {role}\n")
    asyncio.run(_one_record(url))
    assert calls(schema) == ["1"]
    refused = handrail("audit", "trim", url, home=tmp_path)
    assert refused.returncode == 0
    (tmp_path / "handrail.toml").write_text("[audit.kept]\nkeep_days = 30\n", "utf-8")
    assert "records are kept 30 days" in handrail("audit", "trim", schema.url, home=tmp_path).stdout


# Approvals beside it

ASKS = Policy([Rule(verdict="ask", tools=["act"])])


@requirement("P-19", everywhere=True)
async def test_p19_a_call_of_one_replica_is_decided_elsewhere_and_used_once(schema: Schema, tmp_path: Path) -> None:
    ran: list[str] = []

    def replica(name: str) -> Server:
        server = Server("shop", audit=schema.url, policy=ASKS, approvals=Approvals(by="operator", wait=0.05))

        @server.tool
        async def act(n: int) -> str:
            ran.append(name)
            return "done"

        return server

    async with Peer(replica("one")) as one, Peer(replica("two")) as two:
        waiting = await asyncio.gather(one.call("act", {"n": 1}), two.call("act", {"n": 1}), return_exceptions=True)
        assert ran == [] and len(waiting) == 2
        run = partial(handrail, "approve", "--audit", schema.url, home=tmp_path)
        (question,) = json.loads((await asyncio.to_thread(run, "--json")).stdout)
        decided = await asyncio.to_thread(run, question["id"], "yes")
        assert decided.returncode == 0, decided.stderr
        await asyncio.gather(one.call("act", {"n": 1}), two.call("act", {"n": 1}), return_exceptions=True)
    assert len(ran) == 1, "one yes is for one call, of all replicas"
    steps = [each["step"] for each in records(schema) if each["event"] == "approval"]
    assert steps[:2] == ["asked", "approved"]
    assert calls(schema) != [] and len(calls(schema)) == 1
    await good(schema.url)


async def test_a_start_with_a_wrong_password_says_so_without_it(schema: Schema) -> None:
    server = Server("shop", audit=schema.server.url(password="hunter2"))
    with pytest.raises(StoreError, match=r"records and approvals cannot be kept there: .* refuses the user") as refusal:
        async with server.serving():
            pass
    assert "hunter2" not in str(refusal.value)


@requirement("APP-13", everywhere=True)
async def test_the_console_shows_checks_and_exports_the_records_of_all_writers(schema: Schema) -> None:
    async with opened(schema.url) as other:
        for i in range(3):
            await other.write({**intent(i), "tool": "elsewhere", "principal": "ada"})
        server = Server("shop", audit=schema.url)

        @server.tool
        async def act(n: int) -> str:
            return "done"

        async with consoled(server) as rig, Peer(rig.console.server) as peer:
            for n in range(3):
                await peer.call("act", {"n": n})
            page = await rig.page()
            view = await page.get("audit", limit=2)
            assert view["on"] and view["file"].startswith("postgresql://handrail:***@127.0.0.1:")
            shown = view["records"]
            while view["next"]:
                view = await page.get("audit", limit=2, before=view["next"])
                shown += view["records"]
            written = records(schema)
            assert [each["raw"]["hash"] for each in reversed(shown)] == [each["hash"] for each in written]
            assert len(await page.get("audit", tool="elsewhere")) and view["total"] == len(written)
            assert {each["who"] for each in (await page.get("audit", tool="elsewhere"))["records"]} == {"ada"}
            report = await page.get("audit/verify")
            assert (report["ok"], len(report["unfinished"])) == (True, 3)
            exported = await page.raw("audit/export", format="jsonl")
            assert [json.loads(line) for line in exported.splitlines()][: len(written)] == written
            schema.sql("UPDATE handrail_audit SET line = 'x' WHERE position = 2")
            report = await page.get("audit/verify")
            assert not report["ok"] and report["flaw"]["text"] == "it is not a record of a trail"
