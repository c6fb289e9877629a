"""Signed checkpoints: whatever is done to a signed audit log without its key is named by `verify --key` (P-16)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from functools import partial
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import given, strategies as st

from cli_runs import handrail
from handrail import Server
from handrail.audit import checkpoints as module, signing
from handrail.audit.format import ORIGIN, ChainPosition, frame, merge_reports, position_of, verify, verify_chains
from handrail.audit.postgres import PostgresTable
from handrail.audit.reader import TrailFile
from handrail.audit.signature_check import SignatureCheck, SignatureReport
from handrail.audit.signing import SigningKey, load_signing_key, write_new_key
from handrail.guards import Checkpoints, TrailError, TrailSettings, open_trail
from handrail.model import Object
from handrail.stores.postgres import PostgresStore
from handrail.stores.sqlite import connect
from handrail.testing import Peer
from paths import TESTS
from patience import PATIENCE, SOAK
from postgres_servers import PostgresServer, Schema
from requirements import requirement

DAY = 86_400.0
Lines = list[bytes]
Chains = list[tuple[str, Lines]]
BACKENDS = ["trail.db", "trail.jsonl", "postgresql"]
"""Where a signed log can be. The same promises hold for each."""


class Clock:
    def __init__(self) -> None:
        self.now = 1_785_000_000.0

    def __call__(self) -> float:
        return self.now


class Log(Protocol):
    """An audit log of a test: where it is, and what is in it, chain by chain."""

    where: Path | str
    folder: Path

    def chains(self) -> Chains: ...
    def store(self, chains: Chains) -> None: ...

    @property
    def lines(self) -> Lines:
        return [line for _, lines in self.chains() for line in lines]


class FileLog(Log):
    def __init__(self, path: Path) -> None:
        self.where, self.folder = path, path.parent

    def chains(self) -> Chains:
        return [("", [line for _, line in TrailFile(Path(self.where)).lines()])]

    def store(self, chains: Chains) -> None:
        """Put the lines in place of what is in the file."""
        lines = [line for _, lines in chains for line in lines]
        if Path(self.where).suffix == ".jsonl":
            Path(self.where).write_bytes(b"".join(lines))
            return
        with closing(connect(str(self.where), durable=False)) as db:
            db.execute("DELETE FROM audit")
            first = (position_of(lines[0]) or ORIGIN).number if lines else 0
            db.executemany(
                "INSERT INTO audit VALUES (?, 0, ?)", [(i, line[:-1]) for i, line in enumerate(lines, first)]
            )


class DatabaseLog(Log):
    def __init__(self, schema: Schema, folder: Path) -> None:
        self.where, self.folder = schema.url, folder
        self._sql = schema.sql

    def chains(self) -> Chains:
        rows = self._sql(
            "SELECT chain, convert_from(line, 'UTF8') FROM handrail_audit"
            " ORDER BY (SELECT min(position) FROM handrail_audit AS a WHERE a.chain = handrail_audit.chain), number"
        )
        return [(chain, [row[1].encode() + b"\n" for row in group]) for chain, group in groupby(rows, itemgetter(0))]

    def store(self, chains: Chains) -> None:
        rows = [
            f"('{chain}', {number}, now(), decode('{line[:-1].hex()}', 'hex'))"
            for chain, lines in chains
            for number, line in enumerate(lines, 1)
        ]
        insert = f"; INSERT INTO handrail_audit (chain, number, time, line) VALUES {', '.join(rows)}" if rows else ""
        self._sql(f"TRUNCATE handrail_audit{insert}")


@pytest.fixture(params=BACKENDS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Log:
    if request.param == "postgresql":
        return DatabaseLog(request.getfixturevalue("schema"), tmp_path)
    return FileLog(tmp_path / str(request.param))


@pytest.fixture(params=BACKENDS[:2])
def file_log(request: pytest.FixtureRequest, tmp_path: Path) -> Log:
    return FileLog(tmp_path / str(request.param))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    write_new_key(tmp_path / "signing.pem")
    return tmp_path / "signing.pem"


def public(key: Path) -> str:
    return load_signing_key(str(key)).public


def intent(call: object, **more: Any) -> Object:
    return {"event": "intent", "call": str(call), **more}


async def write(
    where: Path | str, n: int, key: Path | str, clock: Any = None, keep: Object | None = None, **more: Any
) -> None:
    """Write `n` records, and what is signed when the log is closed."""
    options = TrailSettings(checkpoints=Checkpoints(key=str(key), **more), **(keep or {}))
    trail = open_trail(where, options, clock=clock or Clock())
    for i in range(n):
        await trail.write(intent(i))
    await trail.close()


def records(lines: Lines) -> list[Object]:
    return [json.loads(line) for line in lines]


def checkpoints(lines: Lines) -> list[Object]:
    return [each for each in records(lines) if each["event"] == "checkpoint"]


def check(
    chains: Chains, key: str, copies: Lines | None = None, now: float | None = None
) -> tuple[list[str], SignatureReport]:
    """Everything that is wrong with a log, and what is signed of it."""
    placed = [(chain, [(f"line {i}", line) for i, line in enumerate(lines, 1)]) for chain, lines in chains]
    copied = [(f"copy {i}", line) for i, line in enumerate(copies or [], 1)]
    signatures = SignatureCheck(key, placed, copied)
    watched = signatures.watch(placed)
    if [chain for chain, _ in placed] == [""]:
        report = verify(next(watched)[1], now=now)
    else:
        report = merge_reports(each for _, each in verify_chains(watched, {}, now=now))
    signed = signatures.report(now=now)
    return [each.text for each in (report.flaw, *signed.flaws) if each is not None], signed


def single(lines: Lines) -> Chains:
    return [("", lines)]


BODY = re.compile(rb'\{"length":[ 0-9]+,"hash":"\w+","number":[0-9]+,"prev":"\w+",(.*)\}\n', re.DOTALL)


def chained(lines: Lines, last: ChainPosition = ORIGIN) -> Lines:
    """The same records in a chain of their own, as one who has the file can write them."""
    made = []
    number, prev = last
    for line in lines:
        match = BODY.fullmatch(line)
        assert match
        number += 1
        rest = b'"number":%d,"prev":"%b",%b}' % (number, prev, match[1])
        prev = sha256(rest).hexdigest().encode()
        made.append(b'{"length":%8d,"hash":"%b",%b\n' % (len(rest), prev, rest))
    return made


# What is signed


@requirement("P-16", everywhere=True)
async def test_p16_a_signed_log_says_up_to_where_it_is_signed(log: Log, key: Path) -> None:
    await write(log.where, 5, key)
    await write(log.where, 3, key)
    lines = log.lines
    assert [each["event"] for each in records(lines)] == [
        *("opened", *["intent"] * 5, "checkpoint"),
        *("opened", *["intent"] * 3, "checkpoint"),
    ]
    flaws, signed = check(log.chains(), public(key))
    assert (flaws, signed.checkpoints, signed.unsigned, signed.open) == ([], 2, 1, ())
    assert sum(signed.signed.values()) == 11
    statement = checkpoints(lines)[-1]["statement"]
    assert records(lines)[10]["hash"] in [head.split("@")[0] for head in statement["heads"].values()]
    assert len(statement["heads"]) == len(log.chains()), "it names the heads of all chains"
    assert (statement["closes"], statement["writer"]) == (True, records(lines)[-1]["writer"])
    for chain, of_chain in log.chains():
        assert verify([(chain, line) for line in of_chain]).flaw is None, "without the key they are chains as any other"


async def test_a_log_is_signed_while_it_is_written(log: Log, key: Path) -> None:
    options = TrailSettings(checkpoints=Checkpoints(key=str(key), records=3))
    trail = open_trail(log.where, options, clock=Clock())
    for i in range(3):
        await trail.write(intent(i))
    await until(partial(has_signed, log, 1))
    await trail.write(intent("later"))
    flaws, signed = check(log.chains(), public(key))
    assert (flaws, [*signed.signed.values()], signed.unsigned) == ([], [4], 2)
    assert signed.open == (records(log.lines)[0]["writer"],), "it has not signed its end"
    await trail.close()
    flaws, signed = check(log.chains(), public(key))
    assert (flaws, [*signed.signed.values()], signed.open) == ([], [6], ())


async def test_time_alone_makes_a_checkpoint_too(log: Log, key: Path) -> None:
    trail = open_trail(log.where, TrailSettings(checkpoints=Checkpoints(key=str(key), seconds=0.01)))
    await trail.write(intent(1))
    await until(partial(has_signed, log, 1))
    await trail.close()


async def test_an_idle_log_is_not_signed_again(log: Log, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.0)
    trail = open_trail(log.where, TrailSettings(checkpoints=Checkpoints(key=str(key), seconds=0.001, records=1)))
    for i in range(3):
        await trail.write(intent(i))
        await until(partial(has_signed, log, i + 1))
    for _ in range(50):
        await asyncio.to_thread(lambda: None)
    assert len(checkpoints(log.lines)) == 3
    await trail.close()


def has_signed(log: Log, n: int) -> bool:
    return len(checkpoints(log.lines)) >= n


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(condition):
            pass


async def test_a_log_without_records_is_not_signed(file_log: Log, key: Path) -> None:
    await write(file_log.where, 0, key)
    assert file_log.lines == []


async def test_two_writers_sign_each_other_s_records(log: Log, key: Path) -> None:
    options = TrailSettings(checkpoints=Checkpoints(key=str(key)))
    one, other = open_trail(log.where, options), open_trail(log.where, options)
    for i in range(6):
        await (one, other)[i % 2].write(intent(i))
    await one.close()
    await other.write(intent("last"))
    await other.close()
    flaws, signed = check(log.chains(), public(key))
    assert (flaws, signed.checkpoints, signed.unsigned, signed.open) == ([], 2, 1, ())


@pytest.mark.parametrize("most", [1, 2, 256])
async def test_a_checkpoint_names_what_has_changed_and_not_more_than_its_share(
    most: int, schema: Schema, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HEADS", most)
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.0)
    log = DatabaseLog(schema, tmp_path)
    for _ in range(3):
        await write(log.where, 1, key)
    trail = open_trail(log.where, TrailSettings(checkpoints=Checkpoints(key=str(key), records=1)), clock=Clock())
    for i in range(6):
        await trail.write(intent(i))
        await until(partial(has_signed, log, 4 + i))
    chain, lines = log.chains()[-1]
    await trail.close()
    named = [[*each["statement"]["heads"]] for each in checkpoints(lines)]
    assert all(each[0] == chain and len(each) <= most for each in named), "its own is always among them"
    if most == 1:
        assert named == [[chain]] * 6
    else:  # all chains have their turn, and then only the one that goes on
        assert len({name for each in named for name in each}) == 4 and named[-1] == [chain]
    assert check(log.chains(), public(key))[0] == []


WRITE = """
import asyncio, sys
from handrail.audit import checkpoints
from handrail.guards import Checkpoints, TrailSettings, open_trail
checkpoints.LEAST_SECONDS = 0.0
async def main():
    where, key, copies = sys.argv[1:]
    trail = open_trail(where, TrailSettings(checkpoints=Checkpoints(key=key, records=2, file=copies)))
    for i in range(10_000):
        await trail.write({"event": "intent", "call": str(i)})
        print(i, flush=True)
asyncio.run(main())
"""


@requirement("P-16", everywhere=True)
async def test_p16_a_writer_killed_while_it_signs_leaves_nothing_that_looks_like_tampering(log: Log, key: Path) -> None:
    copies = log.folder / "copies.jsonl"
    for records_before in range(1, 40) if SOAK else (2, 5, 13):
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITE, str(log.where), str(key), str(copies), stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        async with asyncio.timeout(PATIENCE):
            for _ in range(records_before):
                assert await child.stdout.readline()
            child.kill()
            await child.wait()
        copied = copies.read_bytes().splitlines(keepends=True) if copies.exists() else []
        chains = log.chains()
        chains[-1:] = [(chain, [each for each in lines if each.endswith(b"}\n")]) for chain, lines in chains[-1:]]
        flaws, _ = check(chains, public(key), [each for each in copied if each.endswith(b"}\n")])
        assert flaws == ([] if checkpoints(log.lines) else [f"nothing in it is signed with {public(key)}"])
    await write(log.where, 1, key)
    flaws, signed = check(log.chains(), public(key))
    assert (flaws, signed.unsigned) == ([], 1), "the next writer signs what the killed ones left"


# What is named


async def signed_sample(log: Log, key: Path) -> tuple[Chains, Lines]:
    """A log of three writers with three checkpoints, and their copies."""
    copies = log.folder / "copies.jsonl"
    for n in (4, 3, 5):
        await write(log.where, n, key, file=str(copies))
    assert stat.S_IMODE(os.stat(copies).st_mode) == 0o600
    return log.chains(), copies.read_bytes().splitlines(keepends=True)


def changed(line: bytes) -> bytes:
    """A record that says something else, as long as before."""
    return re.sub(rb'"call":"[0-9]', b'"call":"x', line)


def foreign(lines: Lines, folder: Path) -> Lines:
    """The chain written anew from its start, and its last checkpoint signed with a key of the writer's own."""
    write_new_key(folder / "foreign.pem")
    other = load_signing_key(str(folder / "foreign.pem"))
    *rest, last = [line for line in lines if b'"checkpoint"' not in line] + [lines[-1]]
    rest = chained([changed(line) for line in rest])
    head = position_of(rest[-1])
    assert head is not None
    return [*rest, *chained([signed_by(other, last, head)], head)]


def signed_by(key: SigningKey, line: bytes, head: ChainPosition) -> bytes:
    record = json.loads(line)
    statement = {**record["statement"], "key": key.public, "heads": {"": f"{head.hash.decode()}@1..{head.number}"}}
    record |= {"statement": statement, "signature": key.sign(statement)}
    return json.dumps(record, separators=(",", ":")).encode().replace(b'"length":', b'"length":     ') + b"\n"


ATTACKS: list[tuple[str, Callable[[Lines, Path], Lines], str]] = [
    ("row deleted", lambda lines, _: [*lines[:3], *lines[4:]], "record 5 follows 3"),
    ("changed", lambda lines, _: [*lines[:3], changed(lines[3]), *lines[4:]], "its hash does not fit"),
    ("reordered", lambda lines, _: [*lines[:2], lines[3], lines[2], *lines[4:]], "record 4 follows 2"),
    ("checkpoint deleted", lambda lines, _: [*lines[:5], *lines[6:]], "record 7 follows 5"),
    (
        "chain written anew",
        lambda lines, _: chained([changed(line) for line in lines]),
        "records 1 to 5 are not those that were signed",
    ),
    (
        "written anew from the middle",
        lambda lines, _: chained([*lines[:7], changed(lines[7]), *lines[8:]]),
        "records 6 to 10 are not those that were signed",
    ),
    (
        "checkpoint removed and written anew",
        lambda lines, _: chained([*lines[:5], *lines[6:]]),
        "records 6 to 10 are not those that were signed",
    ),
    ("tail cut", lambda lines, _: lines[:14], "records 15 to 17 are missing: the end was cut off"),
    ("tail cut at a checkpoint", lambda lines, _: lines[:11], "records 12 to 17 are missing: the end was cut off"),
    ("last checkpoint cut off", lambda lines, _: lines[:17], "is not in the log: it was removed"),
    (
        "last checkpoint cut off and gone on",
        lambda lines, _: chained([*lines[:17], lines[16]]),
        "is not in the log: it was removed",
    ),
    ("foreign key", foreign, "a foreign key"),
    ("everything deleted", lambda lines, _: [], "all records are missing"),
]


@requirement("P-16", everywhere=True)
@pytest.mark.parametrize(("attack", "says"), [each[1:] for each in ATTACKS], ids=[each[0] for each in ATTACKS])
async def test_p16_every_attack_on_a_file_is_named(
    attack: Callable[[Lines, Path], Lines], says: str, file_log: Log, key: Path
) -> None:
    [(_, lines)], copies = await signed_sample(file_log, key)
    assert len(lines) == 18 and check(single(lines), public(key), copies)[0] == []
    file_log.store(single(attack(lines, file_log.folder)))
    flaws, _ = check(file_log.chains(), public(key), copies)
    assert says in "\n".join(flaws)


def with_chain(chains: Chains, at: int, lines: Lines) -> Chains:
    """The same log with other lines in one of its chains."""
    return [(chain, lines if i == at else own) for i, (chain, own) in enumerate(chains)]


CHAIN_ATTACKS: list[tuple[str, Callable[[Chains, Path], Chains], str]] = [
    ("row deleted", lambda log, _: with_chain(log, 0, [*log[0][1][:3], *log[0][1][4:]]), "record 5 follows 3"),
    (
        "changed",
        lambda log, _: with_chain(log, 1, [log[1][1][0], changed(log[1][1][1]), *log[1][1][2:]]),
        "its hash does not fit",
    ),
    (
        "reordered",
        lambda log, _: with_chain(log, 0, [*log[0][1][:2], log[0][1][3], log[0][1][2], *log[0][1][4:]]),
        "record 4 follows 2",
    ),
    (
        "chain written anew",
        lambda log, _: with_chain(log, 0, chained([changed(line) for line in log[0][1]])),
        "records 1 to 5 are not those that were signed",
    ),
    (
        "all chains written anew",
        lambda log, _: [(chain, chained([changed(line) for line in lines])) for chain, lines in log],
        "records 1 to 5 are not those that were signed",
    ),
    ("tail of a chain cut", lambda log, _: with_chain(log, 0, log[0][1][:3]), "records 4 to 5 are missing"),
    ("tail of the last chain cut", lambda log, _: with_chain(log, 2, log[2][1][:3]), "records 4 to 6 are missing"),
    ("a writer's chain deleted", lambda log, _: [log[0], log[2]], "all records are missing"),
    ("the last writer's chain deleted", lambda log, _: log[:2], "all records are missing"),
    ("a chain named otherwise", lambda log, _: [("f00d", log[0][1]), *log[1:]], "all records are missing"),
    (
        "a chain put in place of another",
        lambda log, _: [(log[0][0], log[1][1]), *log[1:]],
        "records 1 to 5 are not those that were signed",
    ),
    ("checkpoint removed", lambda log, _: with_chain(log, 2, log[2][1][:6]), "is not in the log: it was removed"),
    (
        "foreign key",
        lambda log, folder: with_chain(log, 2, foreign(log[2][1], folder)),
        "a foreign key",
    ),
    ("everything deleted", lambda log, _: [], "all records are missing"),
]


@requirement("P-16", everywhere=True)
@pytest.mark.parametrize(
    ("attack", "says"), [each[1:] for each in CHAIN_ATTACKS], ids=[each[0] for each in CHAIN_ATTACKS]
)
async def test_p16_every_attack_on_the_chains_of_a_database_is_named(
    attack: Callable[[Chains, Path], Chains], says: str, schema: Schema, tmp_path: Path, key: Path
) -> None:
    log = DatabaseLog(schema, tmp_path)
    chains, copies = await signed_sample(log, key)
    assert [len(lines) for _, lines in chains] == [6, 5, 7] and check(chains, public(key), copies)[0] == []
    log.store(attack(chains, tmp_path))
    flaws, _ = check(log.chains(), public(key), copies)
    assert says in "\n".join(flaws)


def mutations() -> st.SearchStrategy[tuple[str, int, int, bool, bool]]:
    kind = st.sampled_from(["delete", "alter", "swap", "insert", "truncate"])
    return st.tuples(kind, st.integers(0, 17), st.integers(0, 17), st.booleans(), st.booleans())


def mutated(lines: Lines, kind: str, at: int, other: int, anew: bool, without: bool) -> Lines:
    result, at, other = [*lines], at % len(lines), other % len(lines)
    match kind:
        case "delete":
            del result[at]
        case "alter":
            result[at] = result[at].replace(b'"writer":"', b'"writer":"0')
        case "swap":
            result[at], result[other] = result[other], result[at]
        case "insert":
            result.insert(at, result[other])
        case "truncate":
            del result[at:]
    if without:  # the checkpoints that would show it
        result = [line for i, line in enumerate(result) if i < at or b'"checkpoint"' not in line]
    return chained(result) if anew or without else result


@requirement("P-16", everywhere=True)
async def test_p16_any_mutation_of_what_is_signed_is_named(log: Log, key: Path) -> None:
    chains, copies = await signed_sample(log, key)
    before = check(chains, public(key), copies)[1]

    @given(st.integers(0, len(chains) - 1), mutations())
    def is_named(victim: int, mutation: tuple[str, int, int, bool, bool]) -> None:
        chain, lines = chains[victim]
        result = mutated(lines, *mutation)
        others = with_chain(chains, victim, result)
        log_left = [each for each in others if each[1] or not each[0]]  # without records a database has no chain
        flaws, signed = check(log_left, public(key), copies)
        same = next((i for i, pair in enumerate(zip(lines, result, strict=False)) if len(set(pair)) > 1), None)
        first_change = 1 + (min(len(lines), len(result)) if same is None else same)
        if result == lines:
            assert flaws == []
        elif first_change <= before.signed[chain]:
            assert flaws != [], "it is before the last checkpoint"
        else:
            assert flaws != [] or signed.unsigned != before.unsigned, "it is the last checkpoint, or comes after it"
        flaws, signed = check(log_left, public(key))
        assert flaws != [] or signed.signed.get(chain, 0) < first_change, "what counts as signed is unchanged"

    await asyncio.to_thread(is_named)


@requirement("P-16", everywhere=True)
async def test_p16_a_tail_that_nothing_signs_is_named_once_a_checkpoint_was_due(file_log: Log, key: Path) -> None:
    clock = Clock()
    trail = open_trail(
        file_log.where, TrailSettings(checkpoints=Checkpoints(key=str(key), records=2, seconds=10)), clock=clock
    )
    for i in range(2):
        await trail.write(intent(i))
    await until(partial(has_signed, file_log, 1))
    for i in range(10):
        await trail.write(intent(i))
        clock.now += 30
    await trail.close()
    lines = file_log.lines
    first = next(i for i, line in enumerate(lines) if b'"checkpoint"' in line)
    forged = chained([*lines[: first + 1], *(each for each in lines[first + 1 :] if b'"checkpoint"' not in each)])
    flaws, _ = check(single(forged), public(key))
    assert [each for each in flaws if "one is due every 10 s: checkpoints were removed" in each]


async def test_a_log_that_nothing_signs_is_not_taken_for_a_signed_one(key: Path) -> None:
    trail = TESTS / "trails" / "rotated.jsonl"
    flaws, signed = check(FileLog(trail).chains(), public(key))
    assert flaws == [f"nothing in it is signed with {public(key)}"] and signed.signed == {}


async def test_copies_that_are_no_checkpoints_are_named(log: Log, key: Path) -> None:
    chains, copies = await signed_sample(log, key)
    broken = copies[0].replace(b'"closes":true', b'"closes":false')
    for copy, says in ((b"junk\n", "it is no checkpoint"), (b"{}\n", "it is no checkpoint"), (broken, "does not fit")):
        [flaw], _ = check(chains, public(key), [*copies[1:], copy])
        assert says in flaw


# Another key


@requirement("P-16", everywhere=True)
async def test_p16_a_key_hands_over_to_the_next_and_counts_for_nothing_afterwards(log: Log, key: Path) -> None:
    new, clock = key.with_name("new.pem"), Clock()
    write_new_key(new)
    await write(log.where, 3, key, clock)
    for _ in range(2):  # the second time with a setting that was left in place
        clock.now += DAY
        await write(log.where, 3, new, clock, previous_key=str(key))
    chains = log.chains()
    old_flaws, by_old = check(chains, public(key))
    new_flaws, by_new = check(chains, public(new))
    assert (old_flaws, by_old.key, by_old.unsigned) == ([], public(new), 1)
    assert (new_flaws, by_new.key, by_new.unsigned) == ([], public(new), 1)
    assert (by_old.checkpoints, by_new.checkpoints) == (4, 2)
    clock.now += DAY
    await write(log.where, 3, key, clock)
    for each in (key, new):
        flaws, signed = check(log.chains(), public(each))
        assert signed.signed == by_new.signed
        assert [flaw for flaw in flaws if f"is signed with {public(key)}: a foreign key, or one whose place" in flaw]


@pytest.mark.parametrize("source", ["env:SIGNING_KEY", "command:cat signing.pem", "one line"])
async def test_a_key_can_be_in_a_variable_or_come_from_a_program(
    source: str, log: Log, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(key.parent)
    text = await asyncio.to_thread(key.read_text)
    if source == "one line":
        source, text = "env:SIGNING_KEY", "".join(text.splitlines()[1:-1])
    monkeypatch.setenv("SIGNING_KEY", text)
    await write(log.where, 1, source)
    assert check(log.chains(), public(key))[0] == []


def test_keys_of_openssl_are_taken(tmp_path: Path) -> None:
    (tmp_path / "k.pem").touch(0o600)
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / "k.pem"], check=True)
    subprocess.run(["openssl", "pkey", "-in", tmp_path / "k.pem", "-pubout", "-out", tmp_path / "p.pem"], check=True)
    asyncio.run(write(tmp_path / "trail.jsonl", 1, tmp_path / "k.pem"))
    assert handrail("audit", "verify", "trail.jsonl", "--key", "p.pem", home=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nowhere.pem", "nowhere.pem: No such file"),
        ("open.pem", "open.pem can be read by every user of this machine: chmod 600"),
        ("junk.pem", "junk.pem is not a private key; `handrail audit key FILE` makes one"),
        ("ec.pem", "ec.pem is a key of another kind than Ed25519"),
        ("locked.pem", "locked.pem is a key with a passphrase"),
        ("env:NOWHERE", "the environment variable NOWHERE is not set"),
        ("env:JUNK", "the environment variable JUNK is not a private key"),
        ("command:", "`command:` names no program"),
        ("command:/no/such/program --token canary", "the program /no/such/program cannot be started"),
        ("command:sh -c 'echo canary; exit 3'", "the program sh has ended with status 3"),
        ("command:echo canary", "the output of the command is not a private key"),
        ("command:sh -c 'sleep 1000 & wait'", "the program sh has not ended within"),
    ],
)
def test_a_key_that_cannot_be_used_is_said_to_be_and_not_shown(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUNK", "canary")
    monkeypatch.setattr(signing, "COMMAND_SECONDS", 0.2 if "sleep" in source else PATIENCE)
    write_new_key(tmp_path / "open.pem")
    os.chmod(tmp_path / "open.pem", 0o644)
    for name, text in (("junk.pem", "canary"), ("ec.pem", EC_KEY), ("locked.pem", "-----BEGIN ENCRYPTED PRIVATE KEY")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    with pytest.raises(ValueError, match=re.escape(says)) as problem:
        load_signing_key(source)
    assert "canary" not in str(problem.value)


EC_KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgevZzL1gdAFr88hb2
OF/2NxApJCzGCEDdfSp6VQO30hyhRANCAAQRWz+jn65BtOMvdyHKcvjBeBSDZH2r
1RTwjmYSi9R/zpBnuQ4EiMnCqfMPWiZqB4QdbAd0E7oH50VpuZ1P087G
-----END PRIVATE KEY-----
"""
"""The example of RFC 9500: a key for tests, known to everybody."""


# What it must not do


async def test_calls_go_on_without_a_key_and_the_log_says_so(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    await write(log.where, 3, log.folder.joinpath("nowhere.pem"))
    assert [each["event"] for each in records(log.lines)] == ["opened", *["intent"] * 3]
    place = log.where if isinstance(log.where, Path) else "audit log"
    assert f"audit: {place} is not signed: {log.folder.joinpath('nowhere.pem')}: No such file" in caplog.text


async def test_a_server_shows_that_its_log_is_not_signed_until_it_is(tmp_path: Path) -> None:
    key = tmp_path / "late.pem"
    server = shop(FileLog(tmp_path / "trail.db"), key, seconds=0.01)
    async with Peer(server) as peer:
        assert not (await peer.call("price", {"item": "pear"})).is_error
        await until(lambda: "late.pem: No such file" in server.engine.guard_set.troubles().get("signing key", ""))
        write_new_key(key)
        await until(lambda: not server.engine.guard_set.troubles())


@requirement("P-17", everywhere=True)
async def test_p17_calls_wait_for_a_key_only_where_it_is_required_and_go_on_when_it_is_there(log: Log) -> None:
    key = log.folder.joinpath("late.pem")
    options = TrailSettings(checkpoints=Checkpoints(key=str(key), seconds=0.01, required=True))
    trail = open_trail(log.where, options)
    refused = ""

    async def is_written() -> bool:
        nonlocal refused
        try:
            return await trail.write(intent("x"))
        except TrailError as problem:
            refused = str(problem)
            return False

    async with asyncio.timeout(PATIENCE):
        while await is_written():
            pass
        assert "late.pem: No such file or directory; nothing was recorded" in refused
        assert await trail.write({"event": "outcome", "call": "x"}), "what has begun is recorded"
        write_new_key(key)
        while not await is_written():
            await asyncio.to_thread(key.stat)
    await trail.close()
    assert check(log.chains(), public(key))[0] == []


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong, says in (
        ({"file": "x.jsonl"}, "checkpoints.file: nothing is signed without checkpoints.key"),
        ({"key": "k", "records": 0}, "checkpoints.records: 0 is less than 1"),
        ({"key": "k", "seconds": 0}, "checkpoints.seconds: 0 is not a number of seconds above 0"),
        ({"key": "k", "webhook": "http://example.org/?token=canary"}, "checkpoints.webhook: https is needed"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)) as problem:
            Checkpoints(**wrong)
        assert "canary" not in str(problem.value)
    with pytest.raises(ValueError, match=r"checkpoints\.required: fail_open lets calls go on"):
        TrailSettings(fail_open=True, checkpoints=Checkpoints(key="k", required=True))
    with pytest.raises(ValueError, match=r"checkpoints\.webhook: only a server sends checkpoints"):
        open_trail("x.jsonl", TrailSettings(checkpoints=Checkpoints(key="k", webhook="https://example.org")))


# Elsewhere


async def test_a_second_file_gets_what_it_missed(log: Log, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 0.0)
    copies = log.folder.joinpath("later") / "copies.jsonl"
    options = TrailSettings(checkpoints=Checkpoints(key=str(key), records=2, file=str(copies)))
    trail = open_trail(log.where, options)
    for i in range(4):
        assert await trail.write(intent(i))
    await until(lambda: checkpoints(log.lines) != [])
    copies.parent.mkdir()
    await until(copies.exists)
    await trail.close()
    lines = copies.read_bytes().splitlines(keepends=True)
    assert check(log.chains(), public(key), lines)[1].copies == len(lines) == len(checkpoints(log.lines))


async def test_a_copy_that_was_torn_takes_no_other_with_it(tmp_path: Path, key: Path) -> None:
    log, copies = FileLog(tmp_path / "trail.jsonl"), tmp_path / "copies.jsonl"
    copies.write_bytes(b'{"statement":{"wri')
    for _ in range(2):
        await write(log.where, 1, key, file=str(copies))
    torn, *lines = copies.read_bytes().splitlines(keepends=True)
    assert torn == b'{"statement":{"wri\n'
    assert check(log.chains(), public(key), lines)[1].copies == 2


class Receiver:
    """An HTTP server that takes checkpoints, once it has been asked for as many as it refuses; or never answers."""

    def __init__(self, refuses: int = 0, answers: bool = True) -> None:
        self.bodies: Lines = []
        self._refuses = refuses
        self._answers = answers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"(?i)content-length: (\d+)", head)
        body = await reader.readexactly(int(size[1])) if size else b""
        if not self._answers:
            await reader.read()
        elif self._refuses:
            self._refuses -= 1
            writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")
        else:
            self.bodies.append(body)
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()


@pytest.fixture
async def listen() -> AsyncIterator[Callable[[Receiver], Any]]:
    servers: list[asyncio.Server] = []

    async def start(receiver: Receiver) -> str:
        server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/checkpoints"

    yield start
    for server in servers:
        server.close()


def shop(log: Log, key: Path, **more: Any) -> Server:
    settings = TrailSettings(checkpoints=Checkpoints(key=str(key), records=2, **more))
    server = Server("shop", audit=log.where, trail=settings)

    @server.tool
    async def price(item: str) -> int:
        return 7

    return server


async def test_checkpoints_are_posted_until_they_are_taken(
    log: Log, key: Path, listen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 0.0)
    receiver = Receiver(refuses=2)
    async with Peer(shop(log, key, webhook=await listen(receiver))) as peer:
        for _ in range(3):
            assert not (await peer.call("price", {"item": "pear"})).is_error
    flaws, signed = check(log.chains(), public(key), receiver.bodies)
    assert (flaws, signed.unsigned) == ([], 1)
    assert signed.copies == len(receiver.bodies) == len(checkpoints(log.lines)) >= 1


async def test_a_receiver_that_never_answers_holds_up_no_call_and_no_end(
    log: Log, key: Path, listen: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.01)
    async with Peer(shop(log, key, webhook=await listen(Receiver(answers=False)))) as peer:
        for _ in range(5):
            assert not (await peer.call("price", {"item": "pear"})).is_error
    assert "not sent to webhook 127.0.0.1: the log was closed" in caplog.text
    assert check(log.chains(), public(key))[0] == []


async def test_what_waits_for_a_second_place_is_bounded(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.0)
    log, missing = FileLog(tmp_path / "trail.jsonl"), tmp_path / "missing" / "copies.jsonl"
    trail = open_trail(log.where, TrailSettings(checkpoints=Checkpoints(key=str(key), records=1, file=str(missing))))
    for i in range(6):
        await trail.write(intent(i))
        await until(partial(has_signed, log, i + 1))
    await trail.close()
    assert "checkpoint dropped for" in caplog.text and "2 checkpoints not sent" in caplog.text


# Keeping


@requirement("P-16", everywhere=True)
async def test_p16_a_trimmed_log_can_be_verified_from_the_oldest_checkpoint_left(file_log: Log, key: Path) -> None:
    clock, copies = Clock(), file_log.folder.joinpath("copies.jsonl")
    keep: Object = {"keep_days": 10, "rotate_days": 2}
    for _ in range(40):
        await write(file_log.where, 2, key, clock=clock, keep=keep, file=str(copies))
        clock.now += DAY
    lines = file_log.lines
    first = position_of(lines[0])
    assert first is not None and first.number > 20
    copied = copies.read_bytes().splitlines(keepends=True)
    flaws, signed = check(single(lines), public(key), copied, now=clock.now)
    assert (flaws, signed.unsigned) == ([], 1)
    for cut in (1, 5, 20):
        flaws, _ = check(single(lines[cut:]), public(key), copied, now=clock.now - 35 * DAY)
        assert [each for each in flaws if "are missing" in each], "its limits do not explain what is gone"


@requirement("P-16", everywhere=True)
async def test_p16_a_beginning_that_was_deleted_behind_a_made_up_record_is_named(file_log: Log, key: Path) -> None:
    """Though a running server signs it: limits that were never in force account for nothing."""
    clock = Clock()
    await write(file_log.where, 5, key, clock=clock)
    lines = file_log.lines
    last, end = position_of(lines[2]), position_of(lines[-1])
    assert last is not None and end is not None
    claim = {"event": "trimmed", "to": last.number, "digest": last.hash.decode(), "keep_days": 1, "max_megabytes": 0}
    made_up, _ = frame([json.dumps(claim).encode()], b"0" * 16, clock.now, end)
    clock.now += 30 * DAY
    file_log.store(single([*lines[3:], made_up[0] + b"\n"]))
    await write(file_log.where, 3, key, clock=clock)
    left = file_log.lines
    assert verify([("", line) for line in left], now=clock.now).flaw is None, "by itself the chain cannot tell"
    flaws, _ = check(single(left), public(key), now=clock.now)
    assert flaws == ["records 1 to 3 are missing, and were within the limits that are signed"]


@requirement("P-16", everywhere=True)
async def test_p16_a_chain_that_was_deleted_by_its_age_is_not_missed(postgres: PostgresServer, key: Path) -> None:
    schema, clock = Schema(postgres, clock=True), Clock()
    log = DatabaseLog(schema, key.parent)
    for _ in range(12):
        schema.set_clock(clock.now)
        await write(log.where, 2, key, clock, {"keep_days": 10})
        clock.now += DAY
    before = log.chains()
    store = PostgresStore(schema.url)
    table = PostgresTable(store, TrailSettings(keep_days=5).limits, clock, owns_store=True)
    await table.trim()
    await table.close()
    await write(log.where, 2, key, clock, {"keep_days": 10})
    left = log.chains()
    assert before[0] not in left and len(left) < len(before)
    flaws, signed = check(left, public(key), now=clock.now)
    schema.drop()
    assert (flaws, signed.unsigned) == ([], 1)


# The command


def test_a_key_pair_is_made_once_and_its_public_key_printed(tmp_path: Path) -> None:
    made = handrail("audit", "key", "signing.pem", home=tmp_path)
    assert made.returncode == 0 and re.fullmatch(r"ed25519:[A-Za-z0-9+/]{43}=\n", made.stdout)
    assert stat.S_IMODE((tmp_path / "signing.pem").stat().st_mode) == 0o600
    before = (tmp_path / "signing.pem").read_bytes()
    again = handrail("audit", "key", "signing.pem", "--json", home=tmp_path)
    assert json.loads(again.stdout) == {"file": "signing.pem", "new": False, "public_key": made.stdout.strip()}
    assert (tmp_path / "signing.pem").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("key", "name the file of the private key"),
        ("key folder/signing.pem", "folder/signing.pem: No such file or directory"),
        ("key trail.jsonl", "trail.jsonl is not a private key"),
        ("verify trail.jsonl --key signing.pem", "--key: a private key, which stays with the server"),
        ("verify trail.jsonl --key trail.jsonl", "--key: not a public key, ed25519:… or PEM"),
        ("verify trail.jsonl --key ed25519:AAAA", "--key: not a public key, ed25519:… or PEM"),
        ("verify trail.jsonl --key nowhere.pem", "--key: nowhere.pem: No such file or directory"),
        ("verify trail.jsonl --checkpoints copies.jsonl", "--checkpoints: they are checked with the public key"),
    ],
)
def test_wrong_words_are_answered_with_right_ones(words: str, says: str, tmp_path: Path, key: Path) -> None:
    (tmp_path / "trail.jsonl").touch(0o600)
    ended = handrail("audit", *words.split(), home=tmp_path)
    assert ended.returncode == 2 and says in ended.stderr


@requirement("P-16", everywhere=True)
async def test_p16_verify_says_what_is_signed_in_a_file(file_log: Log, key: Path) -> None:
    [(_, lines)], copies = await signed_sample(file_log, key)
    name = Path(file_log.where).name
    words = ("audit", "verify", name, "--key", public(key), "--checkpoints", "copies.jsonl")

    async def run(*more: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(handrail, *words, *more, home=file_log.folder)

    at = json.loads(copies[-1])["statement"]["time"]
    good = await run()
    assert (good.returncode, good.stdout.splitlines()[:3]) == (
        0,
        [
            f"{name}: good: 18 records, 1 to 18",
            "  signed up to record 17",
            f"  3 checkpoints signed with {public(key)}, the last {at}; 1 records after it",
        ],
    )
    file_log.store(single(lines[:15]))
    cut = await run()
    assert cut.returncode == 2
    assert cut.stdout.splitlines()[:3] == [
        f"{name}: bad: 15 records, 1 to 15",
        f"  record 16 (the end): records 16 to 17 are missing: the end was cut off after {at}",
        "  signed up to record 10",
    ]
    report = json.loads((await run("--json")).stdout)
    assert (report["ok"], report["flaw"], report["signatures"]["signed"]) == (False, None, {"": 10})
    assert report["signatures"]["flaws"][0]["number"] == 16


@requirement("P-16", everywhere=True)
async def test_p16_verify_says_what_is_signed_in_a_database(schema: Schema, tmp_path: Path, key: Path) -> None:
    log = DatabaseLog(schema, tmp_path)
    chains, copies = await signed_sample(log, key)
    words = ("audit", "verify", schema.url, "--key", public(key), "--checkpoints", "copies.jsonl")

    async def run(*more: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(handrail, *words, *more, home=tmp_path)

    at = json.loads(copies[-1])["statement"]["time"]
    good = await run()
    assert good.returncode == 0, good.stdout
    assert good.stdout.splitlines()[1:3] == [
        "  3 writers are signed, 17 records",
        f"  3 checkpoints signed with {public(key)}, the last {at}; 1 records after it",
    ]
    log.store(chains[1:])
    cut = await run()
    assert cut.returncode == 2 and "bad: 12 records of 2 writers" in cut.stdout
    assert f"writer {chains[0][0]}: all records are missing" in cut.stdout
    report = json.loads((await run("--json")).stdout)
    assert (report["ok"], report["flaw"], len(report["signatures"]["signed"])) == (False, None, 2)
    assert schema.server.password not in good.stdout + cut.stdout + json.dumps(report)


@requirement("P-16", everywhere=True)
async def test_p16_an_exported_log_of_many_writers_can_be_verified_with_the_key(
    schema: Schema, tmp_path: Path, key: Path
) -> None:
    await signed_sample(DatabaseLog(schema, tmp_path), key)

    async def run(*words: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(handrail, "audit", *words, home=tmp_path)

    exported = (await run("export", schema.url)).stdout
    words = ("verify", "copy.jsonl", "--writers", "--key", public(key), "--checkpoints", "copies.jsonl")
    (tmp_path / "copy.jsonl").write_text(exported, "utf-8")
    assert (await run(*words)).returncode == 0
    lines = exported.splitlines(keepends=True)
    writer = json.loads(lines[0])["writer"]
    (tmp_path / "copy.jsonl").write_text("".join(each for each in lines if json.loads(each)["writer"] != writer))
    checked = await run(*words)
    assert checked.returncode == 2 and "all records are missing" in checked.stdout


async def test_check_says_that_a_log_in_a_database_is_not_signed(schema: Schema, tmp_path: Path) -> None:
    (tmp_path / "handrail.toml").write_text(f'[audit]\nurl = "{schema.url}"\n')
    checked = await asyncio.to_thread(handrail, "check", home=tmp_path)
    assert re.search(r"the audit log is signed by .* no key: all who may write to the database", checked.stdout)


def test_check_says_by_which_key_the_log_is_signed_and_why_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    checked = handrail("check", home=tmp_path)
    assert "signed" not in checked.stdout + checked.stderr, "nothing is said of what nobody asked for"
    section = '[audit]\nfile = "log/calls.db"\n[audit.kept.checkpoints]\nfile = "log/copies.jsonl"\n'
    (tmp_path / "handrail.toml").write_text(section + 'key = "signing.pem"\n')
    checked = handrail("check", home=tmp_path)
    assert "checkpoints.key: the audit log is not signed: signing.pem: No such file" in checked.stderr
    made = handrail("audit", "key", "signing.pem", home=tmp_path)
    checked = handrail("check", home=tmp_path)
    assert re.search(rf"the audit log is signed by +handrail.toml +{re.escape(made.stdout.strip())}", checked.stdout)
    assert "it is beside the audit log; a copy elsewhere is worth more" in checked.stderr
    (tmp_path / "handrail.toml").write_text(section + 'key = "command:cat --token canary signing.pem"\n')
    checked = handrail("check", "--json", home=tmp_path)
    assert "canary" not in checked.stdout + checked.stderr
