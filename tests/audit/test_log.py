"""An audit trail in both its forms: what is written is there, in order; what is done to it afterwards is noticed."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec import ValidationError, convert

from cli_runs import Terminal, handrail
from handrail.audit import log as trails
from handrail.audit.format import (
    BEGINNING,
    ORIGIN,
    ChainPosition,
    Defect,
    VerifyReport,
    frame,
    position_of,
    records_in,
    verify,
)
from handrail.audit.log import RESERVED_MEGABYTES, Trail, TrailError, TrailSettings, open_trail
from handrail.audit.reader import TrailFile
from handrail.model import Object
from handrail.stores import Delete, Put, StoreError
from handrail.stores.memory import MemoryStore
from handrail.stores.sqlite import MIGRATIONS, SqliteStore
from paths import TESTS
from patience import PATIENCE
from requirements import requirement

DAY = 86_400.0
Lines = list[tuple[str, bytes]]


class Clock:
    now = 1_785_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["trail.db", "trail.jsonl"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


@asynccontextmanager
async def opened(
    where: Path | SqliteStore, store: Any = None, clock: Any = None, **options: Any
) -> AsyncIterator[Trail]:
    made = open_trail(where, TrailSettings(**options), store=store, clock=clock or Clock())
    try:
        yield made
    finally:
        await made.close()


def intent(call: object, **more: Any) -> Object:
    return {"event": "intent", "call": str(call), **more}


def outcome(call: object) -> Object:
    return {"event": "outcome", "call": str(call)}


def read(path: Path) -> Lines:
    return [*TrailFile(path).lines()]


def events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for _, line in read(path)]


def calls(path: Path) -> list[str]:
    return [record["call"] for _, line in read(path) if "call" in (record := json.loads(line))]


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def change(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


def good(path: Path, head: str = "") -> VerifyReport:
    verdict = verify(read(path), head=head)
    assert (verdict.flaw, verdict.torn) == (None, 0)
    return verdict


# Writing


async def test_what_is_written_is_there_in_order(path: Path) -> None:
    async with opened(path) as trail:
        assert await trail.write(intent(1, text="é\n\u2028")) is True
        assert await asyncio.gather(*(trail.write(intent(i)) for i in range(2, 100))) == [True] * 98
        trail.submit({"event": "refused", "call": "100"})
    assert calls(path) == [str(i) for i in range(1, 101)]
    records = [json.loads(line) for _, line in read(path)]
    assert [record["number"] for record in records] == list(range(1, 102))
    assert [record["prev"] for record in records] == ["0" * 64, *(record["hash"] for record in records[:-1])]
    assert records[0]["event"] == "opened" and records[0]["process"] == os.getpid()
    assert records[1]["text"] == "é\n\u2028"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    verdict = good(path)
    assert (verdict.records, verdict.first, verdict.last, verdict.head) == (101, 1, 101, records[-1]["hash"])
    assert len(verdict.unfinished) == 99


async def test_a_second_writer_goes_on_with_the_chain(path: Path) -> None:
    for i in range(3):
        async with opened(path) as trail:
            await trail.write(intent(i))
    async with opened(path) as one, opened(path) as other:
        for i in range(3, 13):
            await (one, other)[i % 2].write(intent(i))
    assert calls(path) == [str(i) for i in range(13)]
    assert events(path).count("opened") == 5
    assert len({json.loads(line)["writer"] for _, line in read(path)}) == 5
    good(path)


async def test_a_trail_nobody_writes_to_has_no_records(path: Path) -> None:
    async with opened(path):
        pass
    assert good(path) == VerifyReport(records=0)


@pytest.mark.parametrize(
    "record",
    [{}, {"call": "1"}, *({"event": "x", name: 1} for name in ("length", "hash", "number", "prev", "writer"))],
    ids=str,
)
async def test_a_record_without_an_event_or_with_words_of_ours_is_refused(record: Object, tmp_path: Path) -> None:
    async with opened(tmp_path / "trail.jsonl") as trail:
        with pytest.raises(ValueError, match="a record has an event, and no hash, length"):
            await trail.write(record)
        with pytest.raises(ValueError, match="bytes: 16777216 are the most"):
            await trail.write({"event": "x", "text": "x" * 2**24})


async def test_a_cancelled_write_leaves_the_others_alone(path: Path) -> None:
    async with opened(path) as trail:
        writes = [asyncio.ensure_future(trail.write(intent(i))) for i in range(10)]
        await asyncio.sleep(0)
        writes[5].cancel()
        done = await asyncio.gather(*writes, return_exceptions=True)
        assert [i for i, each in enumerate(done) if each is not True] == [5]
        with pytest.raises(TypeError):
            await trail.write(intent(object()) | {"x": object()})
        assert await trail.write(intent("last"))
    good(path)


async def test_a_closed_trail_refuses(path: Path) -> None:
    async with opened(path) as trail:
        accepted = asyncio.ensure_future(trail.write(intent(1)))
        await asyncio.sleep(0)
    assert await accepted
    with pytest.raises(TrailError, match="was closed"):
        await trail.write(intent(2))
    assert calls(path) == ["1"]


def test_where_a_trail_can_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trail\.txt: a trail's name ends in \.jsonl, or in \.db, \.sqlite"):
        open_trail(tmp_path / "trail.txt")
    with pytest.raises(FileNotFoundError):
        open_trail(tmp_path / "no" / "such" / "trail.jsonl")
    (tmp_path / "aim.jsonl").write_bytes(b"")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "aim.jsonl")
    with pytest.raises(OSError, match="symbolic link"):
        open_trail(tmp_path / "link.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(OSError, match="directory"):
        open_trail(tmp_path / "folder.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(TrailError, match="not a file"):
        open_trail(tmp_path / "pipe.jsonl")


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"sync": "every_call"}, "sync: 'every_call' is neither 'every-call' nor 'power-cut-loses-last-calls'"),
        ({"keep_days": -1}, "keep_days: -1 is less than 0"),
        ({"rotate_megabytes": 0}, "rotate_megabytes: 0 is less than 1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(setting: Object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        TrailSettings(**setting)
    with pytest.raises(ValidationError):
        convert(setting, TrailSettings)
    assert convert({"keep_days": 3}, TrailSettings) == TrailSettings(keep_days=3)


@pytest.mark.parametrize(
    "content", [b"text", b"some lines\n", b'{"tool":"x"}\n', b'{"tool":"x"}\n{"to', b"\n"], ids=repr
)
async def test_a_file_that_is_no_trail_is_left_as_it_is(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
    path.write_bytes(content)
    async with opened(path) as trail:
        with pytest.raises(TrailError, match="move it away"):
            await trail.write(intent(1))
    assert path.read_bytes() == content


async def test_a_store_of_the_first_version_gets_a_trail(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as db:
        for statement in (*MIGRATIONS[0], "PRAGMA user_version = 1"):
            db.execute(statement)
    async with opened(path) as trail:
        await trail.write(intent(1))
    assert good(path).records == 2


# Together with a change


async def test_p19_an_approval_is_used_up_with_the_record_or_neither(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    await store.put("approval:1", b"granted")
    async with opened(store) as trail:
        use = Put("approval:1", b"used", if_equals=b"granted")
        tries = [trail.write(intent(i), [use, Put(f"call:{i}", b"")]) for i in range(20)]
        others = [trail.write(intent(f"other {i}")) for i in range(20)]
        done = await asyncio.gather(*(each for pair in zip(tries, others, strict=True) for each in pair))
        assert (done[::2].count(True), done[1::2]) == (1, [True] * 20)
        winner = done[::2].index(True)
        assert [key for key, _ in await store.scan("")] == ["approval:1", f"call:{winner}"]
        assert [call for call in calls(tmp_path / "state.db") if "other" not in call] == [str(winner)]
        assert not await trail.write(intent("late"), [Delete("approval:1", if_equals=b"granted")])
        assert await trail.write(intent("end"), [Delete("approval:1", if_equals=b"used")])
        assert await store.get("approval:1") is None
    await store.put("the store", b"is still open")
    await store.close()
    good(tmp_path / "state.db")


async def test_p19_of_two_trails_on_one_file_one_uses_it(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with opened(path) as one, opened(path) as other:
        await one.write(intent("grant"), [Put("approval:1", b"granted", if_absent=True)])
        use = Delete("approval:1", if_equals=b"granted")
        done = await asyncio.gather(*(trail.write(intent(i), [use]) for i in range(5) for trail in (one, other)))
    assert done.count(True) == 1
    assert len(calls(path)) == 2


async def test_a_trail_of_lines_changes_the_store_it_was_given(tmp_path: Path) -> None:
    store = MemoryStore()
    await store.put("approval:1", b"granted")
    use = Delete("approval:1", if_equals=b"granted")
    async with opened(tmp_path / "trail.jsonl", store=store) as trail:
        assert await trail.write(intent(1), [use])
        assert not await trail.write(intent(2), [use])
    async with opened(tmp_path / "trail.jsonl") as trail:
        with pytest.raises(ValueError, match="in the store it was given"):
            await trail.write(intent(3), [use])
    assert calls(tmp_path / "trail.jsonl") == ["1"]


async def test_a_change_that_cannot_be_made_stops_no_other(tmp_path: Path) -> None:
    async with opened(tmp_path / "trail.db") as trail:
        writes = [trail.write(intent(1)), trail.write(intent(2), [Put("\ud800", b"")]), trail.write(intent(3))]
        done = await asyncio.gather(*writes, return_exceptions=True)
    assert (done[0], type(done[1]), done[2]) == (True, UnicodeEncodeError, True)
    assert calls(tmp_path / "trail.db") == ["1", "3"]


async def test_a_store_that_is_less_durable_than_the_trail_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db", durable=False)
    with pytest.raises(ValueError, match=r"'every-call' is not how the store was opened \(durable=False\)"):
        open_trail(store)
    async with opened(store, sync="power-cut-loses-last-calls") as trail:
        assert await trail.write(intent(1))
    await store.close()


# What is noticed


async def sample(path: Path) -> Lines:
    async with opened(path) as trail:
        for i in range(3):
            await trail.write(intent(i))
            await trail.write(outcome(i))
    return read(path)


def split(data: bytes) -> Lines:
    return [(f"line {i}", line) for i, line in enumerate(io.BytesIO(data), 1)]


@requirement("P-16", everywhere=True)
async def test_p16_every_changed_byte_is_noticed_and_its_record_named(path: Path) -> None:
    lines = await sample(path)
    data = b"".join(line for _, line in lines)
    place = 0
    for number, (_, line) in enumerate(lines, 1):
        for i in range(len(line)):
            for flip in (0x01, 0x20, 0x80, 0xFF, line[i] ^ 0x0A or 0x01):
                changed = bytearray(data)
                changed[place + i] ^= flip
                verdict = verify(split(bytes(changed)))
                assert verdict.records >= number - 1
                if verdict.flaw is None:
                    assert place + i == len(data) - 1 and verdict.torn, "the last newline makes a torn tail"
                else:
                    assert verdict.flaw.number == number
        place += len(line)


@requirement("P-16", everywhere=True)
async def test_p16_every_cut_leaves_the_records_before_it(path: Path) -> None:
    data = b"".join(line for _, line in await sample(path))
    head = verify(split(data)).head
    for size in range(len(data)):
        cut = split(data[:size])
        verdict = verify(cut)
        whole = data[:size].count(b"\n")
        assert (verdict.records, verdict.flaw) == (whole, None)
        assert verdict.torn == size - (data.rfind(b"\n", 0, size) + 1)
        assert verify(cut, head=head).flaw is not None, "whoever knows the head sees it"
        beginning = verify(split(data[size:])) if size else None
        assert beginning is None or beginning.flaw is not None
    assert verify(split(data), head=head).flaw is None


@requirement("P-16", everywhere=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=10))
def test_p16_records_in_any_other_order_or_number_are_noticed(order: list[int]) -> None:
    made, _ = frame([b'{"event":"%d"}' % i for i in range(10)], b"0" * 16, 0.0, ORIGIN)
    verdict = verify([(str(i), made[i] + b"\n") for i in order])
    assert (verdict.flaw is None) == (order == list(range(len(order)))), "only whole records at the end can be missing"


@requirement("P-16", everywhere=True)
async def test_p16_a_record_out_of_another_trail_is_noticed(tmp_path: Path) -> None:
    one, other = await sample(tmp_path / "one.jsonl"), await sample(tmp_path / "other.db")
    for i in range(len(one)):
        verdict = verify([*one[:i], other[i], *one[i + 1 :]])
        assert verdict.flaw is not None
        assert verdict.flaw.number in (i + 1, i + 2), "the first cannot be told from the right one, the next can"


@requirement("P-16", everywhere=True)
@pytest.mark.parametrize("size", [1, 9, 10, 17, 60, 150, 200])
async def test_p16_a_torn_line_is_cut_off_and_said_so(size: int, tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
    lines = await sample(path)
    data = path.read_bytes()
    path.write_bytes(data + lines[1][1][:size])
    assert verify(read(path)).torn == size
    async with opened(path) as trail:
        await trail.write(intent("next"))
        with path.open("ab") as file:  # another process dies while we have it open
            file.write(b'{"len\0\0\0')
        await trail.write(intent("last"))
    assert path.read_bytes().startswith(data)
    records = [json.loads(line) for _, line in read(path)][len(lines) :]
    assert [record.get("bytes", record["event"]) for record in records] == [size, "opened", "intent", 8, "intent"]
    good(path)


def test_what_a_verdict_tells() -> None:
    bodies = [intent(1), outcome(1), intent(2), {"event": "gap", "refusals": 3}, {"event": "gap", "records": 4}]
    made, last = frame([json.dumps(each).encode() for each in bodies], b"0" * 16, 0.0, ORIGIN)
    verdict = verify([(str(i), line + b"\n") for i, line in enumerate(made)])
    assert (verdict.unfinished, verdict.missed, verdict.head) == (("2",), 7, last.hash.decode())


# Keeping


async def rotated(path: Path, clock: Clock, n: int, **options: Any) -> None:
    async with opened(path, clock=clock, **options) as trail:
        for i in range(n):
            await trail.write(intent(i, padding="x" * 100_000))
            clock.now += DAY


async def test_a_full_file_is_followed_by_another_that_goes_on_with_the_chain(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "trail.jsonl"
    await rotated(path, clock, 35, rotate_megabytes=1, rotate_days=0)
    assert names(tmp_path) == [f"trail.{i}.jsonl" for i in (1, 2, 3)] + [path.name]
    assert calls(path) == [str(i) for i in range(35)]
    assert events(path).count("rotated") == 3
    good(path)
    (tmp_path / "trail.1.jsonl").unlink()
    verdict = verify(read(path))
    assert verdict.flaw == Defect(BEGINNING, 1, f"it begins with record 12; {MISSING}, and no record says why")
    assert verdict.bad == 1, "what is left can be checked without it"
    good(path, verdict.noted)
    change(tmp_path / "trail.2.jsonl", lambda data: b"".join(data.splitlines(True)[:-1]))
    assert verify(read(path), head=verdict.noted).flaw is not None, "what is missing in between is noticed"


async def test_an_old_file_is_followed_by_another_and_deleted_in_the_end(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "trail.jsonl"
    await rotated(path, clock, 30, rotate_days=10, keep_days=30)
    assert names(tmp_path) == ["trail.1.jsonl", "trail.2.jsonl", "trail.jsonl"]
    noted = good(path).noted
    for each in names(tmp_path):
        os.utime(tmp_path / each, (0, 0))  # its own time counts, whatever the file system says
    await rotated(path, clock, 30, rotate_days=10, keep_days=30)
    assert names(tmp_path) == [f"trail.{i}.jsonl" for i in (2, 3, 4, 5)] + [path.name]
    assert good(path).first > 10
    verdict = verify(read(path), head=noted, now=clock.now)
    assert verdict.flaw is None, "what is left shows that those before it were too old"
    (tmp_path / "trail.2.jsonl").unlink()
    verdict = verify(read(path), now=clock.now)
    assert verdict.flaw is not None and "no record says why" in verdict.flaw.text


async def test_who_has_a_file_open_that_another_rotates_goes_on_in_the_new_one(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "trail.jsonl"
    async with opened(path, clock=clock) as one, opened(path, clock=clock) as other:
        for i in range(60):
            await (one, other)[i % 2].write(intent(i))
            clock.now += DAY
    assert calls(path) == [str(i) for i in range(60)]
    path.rename(tmp_path / "trail.3.jsonl")  # as one that dies before it has made the new file
    async with opened(path, clock=clock) as trail:
        await trail.write(intent("next"))
    assert [json.loads(line)["event"] for line in path.read_bytes().splitlines()] == ["rotated", "opened", "intent"]
    good(path)


async def test_old_records_are_trimmed_and_the_rest_can_still_be_checked(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "trail.db"
    async with opened(path, clock=clock, keep_days=10) as trail:
        for i in range(40):
            await trail.write(intent(i))
            clock.now += DAY
    kept = calls(path)
    assert 10 <= len(kept) <= 14 and kept[-1] == "39"
    verdict = good(path)
    assert verdict.first > 20
    assert verdict.last == verdict.first + verdict.records - 1
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM audit WHERE number = (SELECT min(number) FROM audit)")
    flaw = verify(read(path)).flaw
    assert flaw is not None and "those before it are missing" in flaw.text


TRAILS = TESTS / "trails"
"""Written by version 0.1.0, before heads were noted with the first number."""
HASH = {
    "trimmed.db": "eeed0d577994dda522d716a99fe28d726a4d2fd1f4dc1d3c99626faab7db34e4",
    "rotated.jsonl": "27efccddb4b15e84a6d2498cededd0c9b7d62f863f9aabc960e0a023ac6920ff",
}


@requirement("P-16", everywhere=True)
@pytest.mark.parametrize("name", HASH)
async def test_p16_trails_of_earlier_versions_are_read_checked_and_gone_on_with(name: str, tmp_path: Path) -> None:
    for each in TRAILS.iterdir():
        shutil.copy(each, tmp_path)
    path = tmp_path / name
    old = good(path, head=HASH[name])
    assert old.head == HASH[name]
    assert old.noted == f"{HASH[name]}@{old.first}..{old.last}", "how long it is kept was not written down then"
    before = [line for _, line in read(path)]
    async with opened(path, clock=time.time, keep_days=0) as trail:
        await trail.write(intent("next"))
    assert [line for _, line in read(path)][: len(before)] == before and calls(path)[-1] == "next"
    for head in (HASH[name], old.noted):
        assert good(path, head=head).noted.startswith(f"{good(path).head}@{old.first}..")
    assert [*TrailFile(path).salvage()][: len(before)] == before
    code, shown, _ = audit(tmp_path, "verify", str(path), "--head", HASH[name])
    assert code == 0 and "good" in shown


def appended(lines: Lines, *bodies: Object) -> Lines:
    """As somebody who has the file can: the chain has no secret."""
    end = position_of(lines[-1][1])
    assert end is not None
    made, _ = frame([json.dumps(each).encode() for each in bodies], b"0" * 16, Clock.now, end)
    return [*lines, *(("made up", line + b"\n") for line in made)]


MISSING = "those before it are missing"


@requirement("P-16", everywhere=True)
@pytest.mark.parametrize("noted", ["noted", "hash"])
@pytest.mark.parametrize(
    ("keeps", "claims", "days", "says"),
    [
        ({}, None, 1, "no record says why"),
        ({}, {}, 1, ""),
        ({}, {"keep_days": 0, "max_megabytes": 1}, 1, ""),
        ({}, {"keep_days": 365}, 1, ""),
        ({}, {"keep_days": 1}, 30, ""),
        ({"keep_days": 0}, {"keep_days": 1}, 3650, "keep_days = 0"),
        ({"keep_days": 3000}, {"keep_days": 30}, 2999, "keep_days = 3000"),
    ],
    ids=str,
)
async def test_p16_a_noted_head_shows_that_the_beginning_was_deleted_behind_a_made_up_record(
    path: Path, noted: str, keeps: Object, claims: Object | None, days: float, says: str
) -> None:
    async with opened(path, **keeps) as trail:
        for i in range(10):
            await trail.write(intent(i))
    lines = read(path)
    head = getattr(verify(lines), "noted" if noted == "noted" else "head")
    gone = position_of(lines[4][1])
    assert gone is not None
    left = lines[5:]
    if claims is not None:
        left = appended(left, {"event": "trimmed", "to": gone.number, "digest": gone.hash.decode(), **claims})
    verdict = verify(left, head=head, now=Clock.now + days * DAY)
    assert verdict.flaw is not None
    assert (verdict.flaw.place, verdict.bad) == (BEGINNING, 1)
    assert verdict.flaw.text.startswith(f"it begins with record 6; {MISSING}")
    assert says in verdict.flaw.text or (noted == "hash" and "after the head was noted" in verdict.flaw.text)
    (path.parent / "left.jsonl").write_bytes(b"".join(line for _, line in left))
    code, shown, _ = audit(path.parent, "verify", str(path.parent / "left.jsonl"), "--head", head)
    assert code == 2 and MISSING in shown and f": incomplete: {len(left)} records, 6 to" in shown
    again = verify(left).noted
    assert verify(left, head=again).flaw is None, "whoever notes the head again has accepted it"


@requirement("P-16", everywhere=True)
async def test_p16_a_noted_head_holds_while_records_grow_too_old(path: Path, clock: Clock) -> None:
    heads: list[str] = []
    lines: Lines = []
    for i in range(60):
        async with opened(path, clock=clock, keep_days=10, rotate_days=2) as trail:
            await trail.write(intent(i))
        lines = read(path)
        for head in heads[-9:]:
            assert verify(lines, head=head, now=clock.now).flaw is None
        verdict = verify(lines, now=clock.now)
        assert verdict.flaw is None and verdict.noted.endswith(f"@{verdict.first}..{verdict.last},10d")
        heads.append(verdict.noted)
        clock.now += DAY
    assert verify(lines, now=clock.now).first > 60, "most are gone"
    gone = verify(lines, head=heads[0], now=clock.now).flaw
    assert gone is not None and "the noted record 2 is gone" in gone.text


async def test_a_head_that_is_none_is_refused(path: Path) -> None:
    await sample(path)
    for head in ("5f3c", "f" * 64 + "@1", "F" * 64, "f" * 64 + "@1..2,3", " "):
        code, _, told = audit(path.parent, "verify", str(path), "--head", head)
        assert code == 2 and "is not a head, such as `handrail audit verify` prints: HASH@first..last" in told


# A clock that jumps, a limit of size


@pytest.mark.parametrize("jump", [2 * DAY, 30 * DAY, 3650 * DAY], ids=lambda each: f"{each / DAY:g} days")
async def test_a_clock_far_ahead_for_a_moment_deletes_nothing(path: Path, clock: Clock, jump: float) -> None:
    keeps = {"keep_days": 10, "rotate_days": 1}
    for i in range(9):
        async with opened(path, clock=clock, **keeps) as trail:
            await trail.write(intent(i))
        clock.now += DAY
    clock.now += jump
    for i in range(9, 12):  # by processes that were started, and in one that goes on
        async with opened(path, clock=clock, **keeps) as trail:
            for _ in range(3):
                await trail.write(intent(i))
                clock.now += 3600.0
    clock.now -= jump
    for i in range(12, 15):
        async with opened(path, clock=clock, **keeps) as trail:
            await trail.write(intent(i))
    assert list(dict.fromkeys(calls(path))) == [str(i) for i in range(15)]
    good(path)
    for i in range(15, 40):  # and nothing is kept for ever because of it
        async with opened(path, clock=clock, **keeps) as trail:
            await trail.write(intent(i))
        clock.now += DAY
    assert 10 <= len(calls(path)) <= 15
    assert verify(read(path), now=clock.now).flaw is None


async def test_the_oldest_records_go_when_there_are_too_many_megabytes(path: Path, clock: Clock) -> None:
    noted = ""
    async with opened(path, clock=clock, max_megabytes=1, keep_days=0) as trail:
        for i in range(300):
            await asyncio.gather(*(trail.write(intent(f"{i}-{j}", padding="x" * 1000)) for j in range(10)))
            clock.now += 1.0
            size = sum(each.stat().st_size for each in path.parent.iterdir() if each.suffix == ".jsonl")
            assert size < 1_100_000
            if i == 200:
                noted = verify(read(path)).noted
    assert os.stat(path).st_size < 1_500_000
    lines = read(path)
    assert 400 < len(lines) < 1000 and calls(path)[-1].startswith("299-")
    assert noted.endswith(",1MB") and good(path).first > 1000
    left = good(path)
    recent = read(path)[: len(lines) // 2]
    assert verify(recent, head="").flaw is not None, "what is left is too little to be what a limit of size left"
    assert verify(lines, head=left.noted).flaw is None
    with pytest.raises(ValueError, match="max_megabytes: -1 is less than 0"):
        TrailSettings(max_megabytes=-1)


# A file that is gone while it is written


def _delete(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()


def _delete_only(path: Path) -> None:
    path.unlink()


def _rename(path: Path) -> None:
    path.rename(path.with_name(f"aside{path.suffix}"))


def _replace(path: Path) -> None:
    other = path.with_name(f"other{path.suffix}")
    asyncio.run(_write_one(other))
    os.replace(other, path)


async def _write_one(path: Path) -> None:
    async with opened(path) as trail:
        await trail.write(intent("other"))


@requirement("P-15", everywhere=True)
@pytest.mark.parametrize("change", [_delete, _delete_only, _rename, _replace], ids=lambda each: each.__name__)
async def test_p15_a_file_that_is_gone_is_made_anew_and_a_record_says_so(
    path: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(path) as one, opened(path) as other:
        for i in range(10):
            await (one, other)[i % 2].write(intent(i))
        before = verify(read(path))
        await asyncio.to_thread(change, path)
        await one.write(intent("one"))
        await other.write(intent("other one"))
        await asyncio.gather(*(each.write(intent("last")) for each in (one, other)))
    assert "was deleted or replaced" in caplog.text
    assert [each for each in calls(path) if each != "other"] == ["one", "other one", "last", "last"]
    records = [json.loads(line) for _, line in read(path)]
    assert before.head in [each.get("digest") for each in records if each["event"] == "replaced"]
    flaw = verify(read(path)).flaw
    assert flaw is not None and "the file was deleted or replaced here: records up to 1" in flaw.text
    assert verify(read(path), head=before.noted).bad > 1
    good(path, verify(read(path)).noted)
    if change is _rename:
        aside = path.with_name(f"aside{path.suffix}")
        assert good(aside, before.noted).last == before.last, "what was written before is there"


# Salvaging


@requirement("P-16", everywhere=True)
@pytest.mark.parametrize("number", [1, 3, 1000])
async def test_p16_a_record_planted_in_a_result_is_not_salvaged(path: Path, number: int) -> None:
    before = ChainPosition(number - 1, b"0" * 64)
    planted, _ = frame([b'{"event":"outcome","call":"planted"}'] * 3, b"0" * 16, Clock.now, before)
    texts = [b"\n".join([b"", *planted, b""]), planted[0], b"\x05\0\x07\xc3\xa9\x20\0\0\0\0\0\0" + planted[0]]
    store = SqliteStore(path if path.suffix == ".db" else path.with_name("store.db"))
    async with opened(store if path.suffix == ".db" else path) as trail:
        for i in range(200):
            await trail.write(intent(i, text=texts[i % 3].decode(), padding="x" * 500))
            await store.put(f"rest:{i}", texts[i % 3] * (1 + i % 5 * 20))
            if i % 3 == 0:
                await store.delete(f"rest:{i}")
    await store.close()
    _salvage_damaged(path)


def _salvage_damaged(path: Path) -> None:
    lines = [line for _, line in read(path)]
    assert [*TrailFile(path).salvage()] == lines
    data = path.read_bytes()
    for at in (0, len(data) // 3, len(data) // 2, len(data) * 9 // 10):
        path.write_bytes(data[:at] + b"\xa5" * 100 + data[at + 100 :])
        salvaged = [*TrailFile(path).salvage()]
        assert set(salvaged) <= set(lines) and len(salvaged) > 150


# When it cannot be written


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow: SIGXFSZ is ignored by every Python."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@requirement("P-17", everywhere=True)
async def test_p17_a_full_disk_refuses_and_the_next_write_goes_on(path: Path) -> None:
    async with opened(path) as trail:
        await trail.write(intent(1))
        with full_disk():
            for i in (2, 3):
                with pytest.raises(TrailError, match=rf"{path.name}: .*; nothing was recorded"):
                    await trail.write(intent(i))
            trail.submit({"event": "refused", "call": "4"})
            await asyncio.gather(*(trail.write(intent(i)) for i in (5, 6)), return_exceptions=True)
        await trail.write(intent(7))
    assert calls(path) == ["1", "7"]
    verdict = good(path)
    assert verdict.missed == 1, "nobody waited for the note, so the trail has to tell"


@requirement("P-17", everywhere=True)
async def test_p17_a_connection_that_has_failed_is_not_used_again(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    used: list[sqlite3.Connection] = []

    def fail(db: sqlite3.Connection, now: float) -> None:
        used.append(db)
        db.execute("ROLLBACK")  # as SQLite does when it cannot go on
        raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(StoreError, match="SQLite: disk I/O error"):
        await store.writer.run(fail)
    await store.writer.run(lambda db, now: used.append(db))
    assert used[0] is not used[1]
    await store.close()


@requirement("P-17", everywhere=True)
async def test_p17_failing_open_is_asked_for_and_counted(path: Path) -> None:
    async with opened(path, fail_open=True) as trail:
        with full_disk():
            assert await trail.write(intent(1))
            assert all(await asyncio.gather(trail.write(intent(2)), trail.write(intent(3))))
            if path.suffix == ".db":
                with pytest.raises(TrailError):
                    await trail.write(intent(4), [Put("approval", b"used")])
        await trail.write(intent(5))
    assert events(path) == ["opened", "gap", "intent"]
    assert good(path).missed == 3


async def test_notes_that_are_too_many_are_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trails, "MAX_NOTES", 10)
    async with opened(path) as trail:
        for i in range(25):
            trail.submit({"event": "refused", "call": str(i)})
        await trail.write(intent("x"))
        await trail.write(intent("y"))
    assert events(path) == ["opened", "gap", *["refused"] * 10, "intent", "intent"]
    assert good(path).missed == 15


async def test_what_was_missed_is_told_at_the_latest_when_the_trail_is_closed(path: Path) -> None:
    async with opened(path, fail_open=True) as trail:
        with full_disk():
            await trail.write(intent(1))
    trail.submit({"event": "refused"})
    assert events(path) == ["opened", "gap"]


def test_records_of_a_loop_that_has_ended_do_not_hold_up_another(path: Path) -> None:
    async def hand() -> Trail:
        trail = open_trail(path)
        trail.submit(intent(1), lambda problem: None)
        return trail

    async def go_on(trail: Trail) -> None:
        assert await asyncio.wait_for(trail.write(intent(2)), PATIENCE)
        await trail.close()

    asyncio.run(go_on(asyncio.run(hand())))
    assert calls(path) == ["1", "2"]


async def test_records_written_together_are_read_one_by_one_from_any_place(path: Path) -> None:
    async with opened(path) as trail:
        await asyncio.gather(*(trail.write(intent(i)) for i in range(40)))
        await trail.write(intent(40))
    file, n = TrailFile(path), 42
    assert file.span == (1, n)
    for before in range(1, n + 2):
        assert [number for number, _ in file.newest_first(before)] == list(range(before - 1, 0, -1))
    if path.suffix == ".db":
        for after in range(n + 1):
            assert [place.split()[-1] for place, _ in file.lines(after)] == [str(i) for i in range(after + 1, n + 1)]
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("SELECT count(*) FROM audit").fetchone() < (10,)


# Several processes

WRITE = """
import asyncio, sys
from handrail.audit.log import TrailSettings, open_trail
async def main():
    path, name, n = sys.argv[1:]
    print("ready", flush=True)
    sys.stdin.readline()
    trail = open_trail(path, TrailSettings(rotate_days=0, rotate_megabytes=1))
    async def work(worker):
        for i in range(int(n)):
            await trail.write({"event": "intent", "call": f"{name}-{worker}-{i}", "padding": "x" * 900})
    await asyncio.gather(*map(work, range(5)))
    await trail.close()
asyncio.run(main())
"""


@requirement("P-16", everywhere=True)
def test_p16_processes_that_write_at_once_share_one_chain(path: Path) -> None:
    n = 60
    pipe = subprocess.PIPE
    children = [
        subprocess.Popen([sys.executable, "-c", WRITE, str(path), str(i), str(n)], stdin=pipe, stdout=pipe)
        for i in range(3)
    ]
    for child in children:
        assert child.stdout and child.stdout.readline() == b"ready\n"
    for child in children:
        assert child.stdin
        child.stdin.write(b"\n")
        child.stdin.flush()
    for child in children:
        child.communicate(timeout=PATIENCE)
    assert [child.returncode for child in children] == [0, 0, 0]
    found = calls(path)
    assert len(found) == len(set(found)) == 3 * 5 * n
    for name in (f"{i}-{worker}" for i in range(3) for worker in range(5)):
        assert [call for call in found if call.startswith(f"{name}-")] == [f"{name}-{i}" for i in range(n)]
    good(path)


# The command


def audit(home: Path, *words: str) -> tuple[int, str, str]:
    done = handrail("audit", *words, home=home, env={"XDG_STATE_HOME": str(home / "state")})
    return done.returncode, done.stdout, done.stderr


@requirement("P-16", everywhere=True)
async def test_p16_verify_tells_whether_a_trail_is_whole(path: Path) -> None:
    lines = await sample(path)
    home = path.parent
    head = json.loads(lines[-1][1])["hash"]
    assert audit(home, "verify", str(path)) == (0, f"{path}: good: 7 records, 1 to 7\n  head {head}@1..7,365d\n", "")
    assert "no record has the hash ffff" in audit(home, "verify", str(path), "--head", "f" * 64)[1]
    if path.suffix == ".db":
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE audit SET line = ? WHERE number = 6", (lines[5][1][:-1].replace(b'"2"', b'"9"'),))
        place = "trail.db, record 6"
    else:
        change(path, lambda data: data.replace(b'"2"', b'"9"', 1) + b'{"le')
        place = "trail.jsonl:6"
    code, shown, _ = audit(home, "verify", str(path))
    assert code == 2
    assert shown.splitlines()[:2] == [
        f"{path}: bad: 6 records, 1 to 7",
        f"  record 6 ({place}): its hash does not fit: it was changed",
    ]
    found = json.loads(audit(home, "verify", str(path), "--json")[1])
    assert (found["ok"], found["records"], found["flaw"]["number"]) == (False, 6, 6)
    assert ("never finished" in shown) == (path.suffix == ".jsonl") == bool(found["torn"])


async def test_what_is_exported_can_be_verified_elsewhere(path: Path) -> None:
    lines = await sample(path)
    home = path.parent
    code, shown, _ = audit(home, "export", str(path))
    assert (code, shown.encode()) == (0, b"".join(line for _, line in lines))
    (home / "export.jsonl").write_text(shown)
    assert audit(home, "verify", str(home / "export.jsonl"))[1].splitlines()[0].endswith("good: 7 records, 1 to 7")
    terminal = Terminal(sys.executable, "-m", "handrail", "audit", "export", str(path), home=home)
    assert "a terminal might obey them" in terminal.end()[1]
    assert "No such file" in audit(home, "verify")[2], "the state folder has none yet"


@requirement("P-16", everywhere=True)
async def test_p16_all_that_is_left_of_a_damaged_database_is_exported(tmp_path: Path) -> None:
    path = tmp_path / "trail.db"
    async with opened(path) as trail:
        await asyncio.gather(*(trail.write(intent(i, padding="x" * 700)) for i in range(200)))
        await trail.write(intent("long", padding="y" * 100_000))
    lines = [line for _, line in read(path)]
    data = bytearray(path.read_bytes())
    places = [data.find(line[:200]) for line in lines]
    pages = sorted({place // 8192 for place in places})
    hit = pages[len(pages) // 2]
    kinds: list[tuple[str, Callable[[bytearray], None], set[int]]] = [
        ("a page", lambda it: _fill(it, hit * 8192, 8192), {n for n, at in enumerate(places) if at // 8192 == hit}),
        ("its head", lambda it: _fill(it, hit * 8192, 20), set()),
        ("the first page", lambda it: _fill(it, 0, 8192), {201}),
        ("the end", lambda it: it.__delitem__(slice(len(it) * 2 // 3, None)), set(range(100, 202))),
    ]
    for name, damage, lost in kinds:
        broken = bytearray(data)
        damage(broken)
        target = tmp_path / f"{name}.db"
        target.write_bytes(broken)
        code, shown, _ = audit(tmp_path, "verify", str(target))
        assert code == 2 and "export --salvage" in shown, name
        salvaged = [*TrailFile(target).salvage()]
        assert {n for n, line in enumerate(lines) if line not in salvaged} <= lost, name
        assert set(salvaged) <= set(lines), name
    assert [line + b"\n" for _, line in records_in(b"junk".join(lines))] == lines


def _fill(data: bytearray, start: int, size: int) -> None:
    data[start : start + size] = b"\xa5" * size


# A disk that is nearly full


@requirement("P-17", everywhere=True)
@pytest.mark.parametrize("is_open", [False, True])
async def test_p17_the_last_space_is_for_calls_that_have_begun(path: Path, is_open: bool) -> None:
    """Also in a store that was opened before; and when there is space again, the next call goes on."""
    left, asked = [RESERVED_MEGABYTES * 1_000_000], list[str]()

    def free(folder: str) -> int:
        asked.append(folder)
        return left[0]

    store = SqliteStore(path) if path.suffix == ".db" else None
    trail = open_trail(store or path, TrailSettings(fail_open=is_open), free_bytes=free)
    assert await trail.write(intent(1))
    left[0] -= 1
    for _ in range(2):
        with nullcontext() if is_open else pytest.raises(TrailError, match=r"3,999,999 bytes left.* recorded"):
            await trail.write(intent(2))
    assert await trail.write(outcome(1))
    left[0] += 1
    assert await trail.write(intent(3))
    await trail.close()
    if store is not None:
        await store.close()
    assert calls(path) == (["1", "2", "2", "1", "3"] if is_open else ["1", "1", "3"])
    assert set(asked) == (set() if is_open else {str(path.parent)})


@requirement("P-17", everywhere=True)
async def test_p17_calls_that_share_the_way_share_the_look_at_the_disk(tmp_path: Path) -> None:
    looks = Counter[str]()

    def free(folder: str) -> int:
        looks[folder] += 1
        return 10**9

    trail = open_trail(tmp_path / "trail.jsonl", free_bytes=free)
    await asyncio.gather(*(trail.write(intent(i)) for i in range(100)))
    await trail.close()
    assert looks.total() <= 2
