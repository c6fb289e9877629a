"""Signed checkpoints: whatever is done to a signed audit log without its key is named by `verify --key` (P-16)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from cli_runs import handrail
from handrail import Server
from handrail.audit import checkpoints as module, signing
from handrail.audit.format import ORIGIN, ChainPosition, frame, position_of, verify
from handrail.audit.reader import TrailFile
from handrail.audit.signature_check import SignatureCheck, SignatureReport
from handrail.audit.signing import SigningKey, load_signing_key, write_new_key
from handrail.guards import Checkpoints, TrailError, TrailSettings, open_trail
from handrail.model import Object
from handrail.stores.sqlite import connect
from handrail.testing import Peer
from paths import TESTS
from patience import PATIENCE
from requirements import requirement

DAY = 86_400.0
Lines = list[bytes]
BACKENDS = ["trail.db", "trail.jsonl"]
"""Where a signed log can be. The same promises hold for each."""


class Clock:
    def __init__(self) -> None:
        self.now = 1_785_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=BACKENDS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    write_new_key(tmp_path / "signing.pem")
    return tmp_path / "signing.pem"


def public(key: Path) -> str:
    return load_signing_key(str(key)).public


def intent(call: object, **more: Any) -> Object:
    return {"event": "intent", "call": str(call), **more}


async def write(
    path: Path, n: int, key: Path | str, clock: Any = None, keep: Object | None = None, **more: Any
) -> None:
    """Write `n` records, and what is signed when the log is closed."""
    options = TrailSettings(checkpoints=Checkpoints(key=str(key), **more), **(keep or {}))
    trail = open_trail(path, options, clock=clock or Clock())
    for i in range(n):
        await trail.write(intent(i))
    await trail.close()


def read(path: Path) -> Lines:
    return [line for _, line in TrailFile(path).lines()]


def records(lines: Lines) -> list[Object]:
    return [json.loads(line) for line in lines]


def checkpoints(lines: Lines) -> list[Object]:
    return [each for each in records(lines) if each["event"] == "checkpoint"]


def check(
    lines: Lines, key: str, copies: Lines | None = None, now: float | None = None
) -> tuple[list[str], SignatureReport]:
    """Everything that is wrong with a log, and what is signed of it."""
    placed = [(f"line {i}", line) for i, line in enumerate(lines, 1)]
    copied = [(f"copy {i}", line) for i, line in enumerate(copies or [], 1)]
    signatures = SignatureCheck(key, [("", placed)], copied)
    [(_, watched)] = signatures.watch([("", placed)])
    report = verify(watched, now=now)
    signed = signatures.report(now=now)
    return [each.text for each in (report.flaw, *signed.flaws) if each is not None], signed


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


def store(path: Path, lines: Lines) -> None:
    """Put the lines in place of what is in the file."""
    if path.suffix == ".jsonl":
        path.write_bytes(b"".join(lines))
        return
    with closing(connect(str(path), durable=False)) as db:
        db.execute("DELETE FROM audit")
        first = (position_of(lines[0]) or ORIGIN).number if lines else 0
        db.executemany("INSERT INTO audit VALUES (?, 0, ?)", [(i, line[:-1]) for i, line in enumerate(lines, first)])


# What is signed


@requirement("P-16", everywhere=True)
async def test_p16_a_signed_log_says_up_to_where_it_is_signed(path: Path, key: Path) -> None:
    await write(path, 5, key)
    await write(path, 3, key)
    lines = read(path)
    assert [each["event"] for each in records(lines)] == [
        *("opened", *["intent"] * 5, "checkpoint"),
        *("opened", *["intent"] * 3, "checkpoint"),
    ]
    flaws, signed = check(lines, public(key))
    assert flaws == []
    assert (signed.checkpoints, signed.signed, signed.unsigned, signed.open) == (2, {"": 11}, 1, ())
    statement = checkpoints(lines)[-1]["statement"]
    assert statement["heads"] == {"": f"{records(lines)[10]['hash']}@1..11,365d"}
    assert (statement["closes"], statement["writer"]) == (True, records(lines)[-1]["writer"])
    assert verify([("", line) for line in lines]).flaw is None, "without the key it is a chain as any other"


async def test_a_log_is_signed_while_it_is_written(path: Path, key: Path) -> None:
    options = TrailSettings(checkpoints=Checkpoints(key=str(key), records=3))
    trail = open_trail(path, options, clock=Clock())
    for i in range(3):
        await trail.write(intent(i))
    await until(lambda: checkpoints(read(path)) != [])
    await trail.write(intent("later"))
    flaws, signed = check(read(path), public(key))
    assert (flaws, signed.signed, signed.unsigned) == ([], {"": 4}, 2)
    assert signed.open == (records(read(path))[0]["writer"],), "it has not signed its end"
    await trail.close()
    flaws, signed = check(read(path), public(key))
    assert (flaws, signed.signed, signed.open) == ([], {"": 6}, ())


async def test_time_alone_makes_a_checkpoint_too(path: Path, key: Path) -> None:
    trail = open_trail(path, TrailSettings(checkpoints=Checkpoints(key=str(key), seconds=0.01)))
    await trail.write(intent(1))
    await until(lambda: checkpoints(read(path)) != [])
    await trail.close()


async def test_an_idle_log_is_not_signed_again(path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.0)
    trail = open_trail(path, TrailSettings(checkpoints=Checkpoints(key=str(key), seconds=0.001, records=1)))
    for i in range(3):
        await trail.write(intent(i))
        await until(partial(has_signed, path, i + 1))
    await asyncio.to_thread(lambda: None)
    signed = len(checkpoints(read(path)))
    for _ in range(50):
        await asyncio.to_thread(lambda: None)
    assert len(checkpoints(read(path))) == signed == 3
    await trail.close()


def has_signed(path: Path, n: int) -> bool:
    return len(checkpoints(read(path))) >= n


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(condition):
            pass


async def test_a_log_without_records_is_not_signed(path: Path, key: Path) -> None:
    await write(path, 0, key)
    assert read(path) == []


async def test_two_writers_of_one_file_sign_one_chain(path: Path, key: Path) -> None:
    options = TrailSettings(checkpoints=Checkpoints(key=str(key)))
    one, other = open_trail(path, options), open_trail(path, options)
    for i in range(6):
        await (one, other)[i % 2].write(intent(i))
    await one.close()
    await other.write(intent("last"))
    await other.close()
    flaws, signed = check(read(path), public(key))
    assert (flaws, signed.checkpoints, signed.unsigned, signed.open) == ([], 2, 1, ())


# What is named


async def signed_sample(path: Path, key: Path) -> tuple[Lines, Lines]:
    """A log of three writers with three checkpoints, and their copies."""
    copies = path.with_name("copies.jsonl")
    for n in (4, 3, 5):
        await write(path, n, key, file=str(copies))
    assert stat.S_IMODE(os.stat(copies).st_mode) == 0o600
    return read(path), copies.read_bytes().splitlines(keepends=True)


def changed(line: bytes) -> bytes:
    """A record that says something else, as long as before."""
    return re.sub(rb'"call":"[0-9]', b'"call":"x', line)


def foreign(lines: Lines, path: Path) -> Lines:
    """The chain written anew from its start, and its last checkpoint signed with a key of the writer's own."""
    write_new_key(path.with_name("foreign.pem"))
    other = load_signing_key(str(path.with_name("foreign.pem")))
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
async def test_p16_every_attack_on_the_record_is_named(
    attack: Callable[[Lines, Path], Lines], says: str, path: Path, key: Path
) -> None:
    lines, copies = await signed_sample(path, key)
    assert len(lines) == 18 and check(lines, public(key), copies)[0] == []
    store(path, attack(lines, path))
    flaws, _ = check(read(path), public(key), copies)
    assert says in "\n".join(flaws)


Mutation = Callable[[Lines], Lines]


def mutations() -> st.SearchStrategy[tuple[str, int, int, bool, bool]]:
    kind = st.sampled_from(["delete", "alter", "swap", "insert", "truncate"])
    return st.tuples(kind, st.integers(0, 17), st.integers(0, 17), st.booleans(), st.booleans())


def mutated(lines: Lines, kind: str, at: int, other: int, anew: bool, without: bool) -> Lines:
    result = [*lines]
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


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Lines, Lines]]:
    made = []
    for name in BACKENDS:
        folder = tmp_path_factory.mktemp("signed")
        write_new_key(folder / "signing.pem")
        lines, copies = asyncio.run(signed_sample(folder / name, folder / "signing.pem"))
        made.append((public(folder / "signing.pem"), lines, copies))
    return made


@requirement("P-16", everywhere=True)
@given(mutation=mutations())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_p16_any_mutation_of_what_is_signed_is_named(
    samples: list[tuple[str, Lines, Lines]], mutation: tuple[str, int, int, bool, bool]
) -> None:
    for key, lines, copies in samples:
        result = mutated(lines, *mutation)
        flaws, signed = check(result, key, copies)
        first_change = next((i for i, pair in enumerate(zip(lines, result, strict=False), 1) if len(set(pair)) > 1), 0)
        first_change = first_change or min(len(lines), len(result)) + 1
        if result == lines:
            assert flaws == []
        elif first_change <= 17:
            assert flaws != [], "it is before the last checkpoint"
        else:
            assert flaws != [] or signed.unsigned != 1, "it is the last checkpoint itself, or comes after it"
        flaws, signed = check(result, key)
        assert flaws != [] or signed.signed[""] < first_change, "without copies too, what counts as signed is unchanged"


@requirement("P-16", everywhere=True)
async def test_p16_a_tail_that_nothing_signs_is_named_once_a_checkpoint_was_due(path: Path, key: Path) -> None:
    clock = Clock()
    trail = open_trail(path, TrailSettings(checkpoints=Checkpoints(key=str(key), records=2, seconds=10)), clock=clock)
    for i in range(2):
        await trail.write(intent(i))
    await until(lambda: checkpoints(read(path)) != [])
    for i in range(10):
        await trail.write(intent(i))
        clock.now += 30
    await trail.close()
    lines = read(path)
    first = next(i for i, line in enumerate(lines) if b'"checkpoint"' in line)
    forged = chained([*lines[: first + 1], *(each for each in lines[first + 1 :] if b'"checkpoint"' not in each)])
    flaws, _ = check(forged, public(key))
    assert [each for each in flaws if "one is due every 10 s: checkpoints were removed" in each]


async def test_a_log_that_nothing_signs_is_not_taken_for_a_signed_one(key: Path) -> None:
    trail = TESTS / "trails" / "rotated.jsonl"
    flaws, signed = check(read(trail), public(key))
    assert flaws == [f"nothing in it is signed with {public(key)}"] and signed.signed == {}


async def test_copies_that_are_no_checkpoints_are_named(path: Path, key: Path) -> None:
    lines, copies = await signed_sample(path, key)
    broken = copies[0].replace(b'"closes":true', b'"closes":false')
    for copy, says in ((b"junk\n", "it is no checkpoint"), (b"{}\n", "it is no checkpoint"), (broken, "does not fit")):
        [flaw], _ = check(lines, public(key), [*copies[1:], copy])
        assert says in flaw


# Another key


@requirement("P-16", everywhere=True)
async def test_p16_a_key_hands_over_to_the_next_and_counts_for_nothing_afterwards(path: Path, key: Path) -> None:
    new = key.with_name("new.pem")
    write_new_key(new)
    await write(path, 3, key)
    await write(path, 3, new, previous_key=str(key))
    await write(path, 3, new, previous_key=str(key))  # a setting that was left in place
    lines = read(path)
    old_flaws, by_old = check(lines, public(key))
    new_flaws, by_new = check(lines, public(new))
    assert (old_flaws, by_old.key, by_old.unsigned) == ([], public(new), 1)
    assert (new_flaws, by_new.key, by_new.unsigned) == ([], public(new), 1)
    assert (by_old.checkpoints, by_new.checkpoints) == (4, 2)
    await write(path, 3, key)
    for each in (key, new):
        flaws, signed = check(read(path), public(each))
        assert signed.signed == by_new.signed
        assert [flaw for flaw in flaws if f"is signed with {public(key)}: a foreign key, or one whose place" in flaw]


@pytest.mark.parametrize("source", ["env:SIGNING_KEY", "command:cat signing.pem", "one line"])
async def test_a_key_can_be_in_a_variable_or_come_from_a_program(
    source: str, path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(key.parent)
    text = await asyncio.to_thread(key.read_text)
    if source == "one line":
        source, text = "env:SIGNING_KEY", "".join(text.splitlines()[1:-1])
    monkeypatch.setenv("SIGNING_KEY", text)
    await write(path, 1, source)
    assert check(read(path), public(key))[0] == []


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


async def test_calls_go_on_without_a_key_and_the_log_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await write(path, 3, path.with_name("nowhere.pem"))
    assert [each["event"] for each in records(read(path))] == ["opened", *["intent"] * 3]
    assert f"audit: {path} is not signed: {path.with_name('nowhere.pem')}: No such file" in caplog.text


@requirement("P-17", everywhere=True)
async def test_p17_calls_wait_for_a_key_only_where_it_is_required_and_go_on_when_it_is_there(path: Path) -> None:
    key = path.with_name("late.pem")
    options = TrailSettings(checkpoints=Checkpoints(key=str(key), seconds=0.01, required=True))
    trail = open_trail(path, options)
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
    assert check(read(path), public(key))[0] == []


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


async def test_a_second_file_gets_what_it_missed(path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 0.0)
    copies = path.with_name("later") / "copies.jsonl"
    options = TrailSettings(checkpoints=Checkpoints(key=str(key), records=2, file=str(copies)))
    trail = open_trail(path, options)
    for i in range(4):
        assert await trail.write(intent(i))
    await until(lambda: checkpoints(read(path)) != [])
    copies.parent.mkdir()
    await until(copies.exists)
    await trail.close()
    lines = copies.read_bytes().splitlines(keepends=True)
    assert check(read(path), public(key), lines)[1].copies == len(lines) == len(checkpoints(read(path)))


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


def shop(path: Path, key: Path, **more: Any) -> Server:
    server = Server("shop", audit=path, trail=TrailSettings(checkpoints=Checkpoints(key=str(key), records=2, **more)))

    @server.tool
    async def price(item: str) -> int:
        return 7

    return server


async def test_checkpoints_are_posted_until_they_are_taken(
    path: Path, key: Path, listen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 0.0)
    receiver = Receiver(refuses=2)
    async with Peer(shop(path, key, webhook=await listen(receiver))) as peer:
        for _ in range(3):
            assert not (await peer.call("price", {"item": "pear"})).is_error
    flaws, signed = check(read(path), public(key), receiver.bodies)
    assert (flaws, signed.unsigned) == ([], 1)
    assert signed.copies == len(receiver.bodies) == len(checkpoints(read(path))) >= 1


async def test_a_receiver_that_never_answers_holds_up_no_call_and_no_end(
    path: Path, key: Path, listen: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.01)
    async with Peer(shop(path, key, webhook=await listen(Receiver(answers=False)))) as peer:
        for _ in range(5):
            assert not (await peer.call("price", {"item": "pear"})).is_error
    assert "not sent to webhook 127.0.0.1: the log was closed" in caplog.text
    assert check(read(path), public(key))[0] == []


async def test_what_waits_for_a_second_place_is_bounded(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.0)
    path, missing = tmp_path / "trail.jsonl", tmp_path / "missing" / "copies.jsonl"
    trail = open_trail(path, TrailSettings(checkpoints=Checkpoints(key=str(key), records=1, file=str(missing))))
    for i in range(6):
        await trail.write(intent(i))
        await until(partial(has_signed, path, i + 1))
    await trail.close()
    assert "checkpoint dropped for" in caplog.text and "2 checkpoints not sent" in caplog.text


# Keeping


@requirement("P-16", everywhere=True)
async def test_p16_a_trimmed_log_can_be_verified_from_the_oldest_checkpoint_left(path: Path, key: Path) -> None:
    clock, copies = Clock(), path.with_name("copies.jsonl")
    keep: Object = {"keep_days": 10, "rotate_days": 2}
    for _ in range(40):
        await write(path, 2, key, clock=clock, keep=keep, file=str(copies))
        clock.now += DAY
    lines = read(path)
    first = position_of(lines[0])
    assert first is not None and first.number > 20
    copied = copies.read_bytes().splitlines(keepends=True)
    flaws, signed = check(lines, public(key), copied, now=clock.now)
    assert (flaws, signed.unsigned) == ([], 1)
    for cut in (1, 5, 20):
        flaws, _ = check(lines[cut:], public(key), copied, now=clock.now - 35 * DAY)
        assert [each for each in flaws if "are missing" in each], "its limits do not explain what is gone"


@requirement("P-16", everywhere=True)
async def test_p16_a_beginning_that_was_deleted_behind_a_made_up_record_is_named(path: Path, key: Path) -> None:
    """Though a running server signs it: limits that were never in force account for nothing."""
    clock = Clock()
    await write(path, 5, key, clock=clock)
    lines = read(path)
    last, end = position_of(lines[2]), position_of(lines[-1])
    assert last is not None and end is not None
    claim = {"event": "trimmed", "to": last.number, "digest": last.hash.decode(), "keep_days": 1, "max_megabytes": 0}
    made_up, _ = frame([json.dumps(claim).encode()], b"0" * 16, clock.now, end)
    clock.now += 30 * DAY
    store(path, [*lines[3:], made_up[0] + b"\n"])
    await write(path, 3, key, clock=clock)
    left = read(path)
    assert verify([("", line) for line in left], now=clock.now).flaw is None, "by itself the chain cannot tell"
    flaws, _ = check(left, public(key), now=clock.now)
    assert flaws == ["records 1 to 3 are missing, and were within the limits that are signed"]


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
async def test_p16_verify_says_what_is_signed_and_by_which_key(path: Path, key: Path) -> None:
    lines, copies = await signed_sample(path, key)
    words = ("audit", "verify", path.name, "--key", public(key), "--checkpoints", "copies.jsonl")

    async def run(*more: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(handrail, *words, *more, home=path.parent)

    at = json.loads(copies[-1])["statement"]["time"]
    good = await run()
    assert (good.returncode, good.stdout.splitlines()[:3]) == (
        0,
        [
            f"{path.name}: good: 18 records, 1 to 18",
            "  signed up to record 17",
            f"  3 checkpoints signed with {public(key)}, the last {at}; 1 records after it",
        ],
    )
    store(path, lines[:15])
    cut = await run()
    assert cut.returncode == 2
    assert cut.stdout.splitlines()[:3] == [
        f"{path.name}: bad: 15 records, 1 to 15",
        f"  record 16 (the end): records 16 to 17 are missing: the end was cut off after {at}",
        "  signed up to record 10",
    ]
    report = json.loads((await run("--json")).stdout)
    assert (report["ok"], report["flaw"], report["signatures"]["signed"]) == (False, None, {"": 10})
    assert report["signatures"]["flaws"][0]["number"] == 16


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
