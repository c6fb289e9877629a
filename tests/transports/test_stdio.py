"""Standard input and output that cannot be broken: not by what comes in, not by what a tool does, not by who reads."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import socket
import sys
import tempfile
import termios
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import subject
from checks import strict_json
from faults import call, lines, opening, rounds, text_of, until, victim
from paths import SUPPORT
from patience import PATIENCE, SOAK
from requirements import requirement
from servers_faults import MARK
from wires import ALL, Open, Wire, everywhere, open_wire as open_wire
from wires_http import Refusal

MIB = 1024 * 1024
LIMIT = 4 * MIB

Ran = Callable[[str, str], None]

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


# Lines that are too long


@linux
@requirement("P-03")
@pytest.mark.parametrize(
    ("revision", "end"),
    [*((revision, b'"}\n') for revision in ALL), ("2025-11-25", b"\n"), ("2026-07-28", b"")],
    ids=[*(f"64 MiB in one line, {revision}" for revision in ALL), "64 MiB that are no message", "a line with no end"],
)
async def test_an_over_long_line_is_refused_and_costs_little(revision: str, end: bytes, ran: Ran) -> None:
    async with victim(revision=revision) as server:
        assert text_of(await server.call("echo", text="before")) == "before"
        server.forget_memory()
        before = server.memory()
        writing = asyncio.create_task(_write(server, [b'{"jsonrpc":"2.0","id":5,"method":"', *([b"x" * MIB] * 64)]))
        refused = await server.message()  # long before the line ends
        assert refused["error"]["code"] == -32600
        assert refused.get("id") is None
        await writing
        if end:
            await server.write(end)
            assert text_of(await server.call("echo", text="after")) == "after"
            assert server.heard == []
        else:
            server.close_input()
            assert await server.rest() == []
            assert await server.ended(2) == 0
            return
        assert server.memory() - before < 3 * LIMIT
        ran(revision, "stdio")


async def _write(server: Any, pieces: list[bytes]) -> None:
    for piece in pieces:
        await server.write(piece)


@requirement("P-03")
@everywhere()
async def test_a_message_over_a_small_limit_is_refused_however_it_arrives(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_faults:tiny")
    head = call(wire.revision, 7, "echo", text="@")
    for size in (1024, 1025, 3000, 70_000):
        await wire.write(head.replace(b"@", b"x" * (size - len(head) + 1)))
        if size > 1024 and wire.transport == "http":
            with pytest.raises(Refusal) as caught:
                await wire.receive()
            assert caught.value.status == 413, f"{size} bytes"
            continue
        answer = await wire.receive()
        if size > 1024:
            assert answer["error"]["code"] == -32600, f"{size} bytes"
            assert answer.get("id") is None
        else:
            assert answer["id"] == 7  # its result is too long for the limit, but it was heard
    assert "fine" in str(await wire.call("echo", {"text": "fine"}))


@linux
async def test_many_over_long_lines_each_get_one_refusal() -> None:
    async with victim() as server:
        server.forget_memory()
        before = server.memory()
        for _ in range(5):
            await server.write(b"y" * (LIMIT + 1) + b"\n" + lines(call(server.revision, "next", "echo", text="x")))
            assert (await server.message())["error"]["code"] == -32600
            assert (await server.message())["id"] == "next"
        assert server.memory() - before < 3 * LIMIT


@linux
async def test_a_message_as_long_as_allowed_is_taken_and_one_as_long_is_sent() -> None:
    async with victim() as server:
        answer = await server.call("big", size=LIMIT - 4096)
        assert len(text_of(answer)) == LIMIT - 4096
        filled = call(server.revision, "full", "thread_echo", text="@")
        await server.write(filled.replace(b"@", b"z" * (LIMIT - len(filled) + 1)) + b"\n")
        assert (await server.message())["id"] == "full"
        too_long = await server.call("big", size=LIMIT)
        assert too_long["result"]["isError"]
        assert "at most" in text_of(too_long)


# Tools that write and read where they should not


@requirement("SRV-124")
@pytest.mark.parametrize("revision", ALL)
async def test_whatever_a_tool_prints_goes_to_standard_error(revision: str, ran: Ran) -> None:
    async with victim("early", revision=revision) as server:
        assert text_of(await server.call("noisy")) == "done"
        assert text_of(await server.call("echo", text="still in step")) == "still in step"
        server.close_input()
        assert await server.rest() == []  # `rest` fails on anything but messages
        assert await server.ended(2) == 0
        said = (await server.errors()).decode()
        for what in (
            "in bytes",
            "from a C library",
            "from a shell",
            "from a child",
            "from a grandchild",
            "from a forked child",
            "before the server runs",
            "from the C library's own buffer",
        ):
            assert f"{MARK} {what}" in said, what
        ran(revision, "stdio")


@requirement("SRV-124")
async def test_nothing_is_printed_on_the_wire_while_the_process_ends() -> None:
    kinds = list(itertools.product(["prints_for_ever", "prints_when_cancelled"], ["input", "signal"]))

    async def one(number: int) -> None:
        tool, end = kinds[number]
        async with victim("faults") as server:
            await server.ask(tool)
            await server.says("running")
            server.close_input() if end == "input" else server.signal(15)
            assert [each for each in await server.rest() if "result" not in each] == []
            assert await server.ended(6) == 0
            assert MARK.encode() in await server.errors()

    await rounds(len(kinds), one)


async def test_a_tool_that_reads_standard_input_finds_it_empty() -> None:
    async with victim() as server:
        # What is asked meanwhile must not be eaten.
        await server.write(lines(*(call(server.revision, f"m{n}", "echo", text=str(n)) for n in range(50))))
        assert text_of(await server.call("greedy")) == "'' b'' b''"
        assert len(server.heard) == 50
        failed = await server.call("asks_the_terminal")
        assert failed["result"]["isError"]
        assert text_of(await server.call("runs_a_program")) == "hello"


@requirement("P-01", "P-08")
@pytest.mark.parametrize("revision", ALL)
async def test_whatever_a_tool_raises_is_an_answer(revision: str, ran: Ran) -> None:
    kinds = ["KeyboardInterrupt", "SystemExit", "GeneratorExit", "Odd", "CancelledError", "StopIteration"]
    async with victim(revision=revision) as server:
        for tool in ("raises", "raises_in_thread", "raises_inline"):
            for kind in kinds:
                answer = await server.call(tool, kind=kind)
                assert "error" in answer or answer["result"].get("isError") or "error" in answer["result"]["toolResult"]
        assert text_of(await server.call("echo", text="still here")) == "still here"
        ran(revision, "stdio")


# Readers


@linux
@requirement("P-10", "P-11")
async def test_a_peer_that_never_reads_stops_itself_only(ran: Ran) -> None:
    """Other work goes on, memory stays bounded, and after `write_seconds` the server ends."""

    async def one(number: int) -> None:
        revision = ALL[number]
        unread, sink = os.pipe()
        try:
            async with victim("impatient", revision=revision, opened=False, stdout=sink) as server:
                os.close(sink)
                await server.write(lines(*opening(revision), call(revision, "t", "ticks")))
                await server.says("tick 1\n")
                server.forget_memory()
                before = server.memory()
                flood = lines(*(call(revision, n, "big", size=16_000) for n in range(400)))
                assert server.process.stdin is not None
                server.process.stdin.write(flood * 20)  # far more than pipes hold; nobody waits for it
                for n in range(2, 12):
                    await server.says(f"tick {n}\n")
                assert server.memory() - before < 8 * MIB
                assert await server.ended(11) == 0
                assert b"read nothing for 3 s" in await server.errors()
        finally:
            os.close(unread)
        ran(revision, "stdio")

    await rounds(len(ALL), one)


@linux
@requirement("P-10")
async def test_the_server_stops_reading_from_a_peer_that_does_not_read() -> None:
    unread, sink = os.pipe()
    source, own = os.pipe()
    os.set_blocking(own, False)
    try:
        async with victim("patient", opened=False, stdin=source, stdout=sink) as server:
            os.close(source)
            os.close(sink)
            flood = lines(
                *opening(server.revision), *(call(server.revision, n, "big", size=1_600) for n in range(40_000))
            )
            assert len(flood) > 3 * MIB
            written = 0

            def full() -> bool:
                nonlocal written
                added = _write_all_it_takes(own, flood[written:])
                written += added
                return not added

            for _ in range(5):  # it takes no more, and a while later still no more
                await until(full, "the input fills up")
                await asyncio.sleep(0.1)
            assert written < 2 * MIB  # what the pipe itself holds, and a little
            # All of it is answered, in order, when the peer begins to read.
            reading = asyncio.create_task(asyncio.to_thread(_read_all, unread))
            await until(lambda: full() and written == len(flood), "the input goes on")
            os.close(own)
            answers = [strict_json(line) for line in (await reading).split(b"\n")[:-1]]
            assert [each["id"] for each in answers] == ["open", *range(40_000)]
            assert await server.ended(5) == 0
    finally:
        os.close(unread)
        with suppress(OSError):
            os.close(own)


def _write_all_it_takes(descriptor: int, data: bytes) -> int:
    written = 0
    with suppress(BlockingIOError):
        while written < len(data):
            written += os.write(descriptor, data[written:])
    return written


def _read_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 65_536):
        parts.append(part)
    return b"".join(parts)


@requirement("P-10", "P-08")
async def test_a_slow_reader_gets_everything_in_order(ran: Ran) -> None:
    async def one(number: int) -> None:
        revision = ALL[number]
        unread, sink = os.pipe()
        try:
            async with victim("patient", revision=revision, opened=False, stdout=sink) as server:
                os.close(sink)
                # Some are more than a pipe holds; those go another way.
                sizes = [150_000 + n if n % 5 == 3 else 9_000 + 37 * n for n in range(120)]
                asked = [call(revision, n, "big", size=size, text=f"{n}:") for n, size in enumerate(sizes)]
                sending = asyncio.create_task(server.write(lines(*opening(revision), *asked)))
                data = bytearray()
                while data.count(b"\n") < 120 + (revision != "2026-07-28"):
                    data += await asyncio.to_thread(os.read, unread, 4_000)
                await sending
                got = [strict_json(bytes(line)) for line in data.split(b"\n")[:-1]]
                answers = [each for each in got if each["id"] != "open"]
                assert [each["id"] for each in answers] == list(range(120))
                assert all(text_of(each).startswith(f"{each['id']}:") for each in answers)
                assert all(size <= len(text_of(each)) < size + 9 for size, each in zip(sizes, answers, strict=True))
                server.close_input()
                assert await server.ended(2) == 0
        finally:
            os.close(unread)
        ran(revision, "stdio")

    await rounds(len(ALL), one)


@linux
@requirement("P-10")
async def test_a_reader_that_takes_one_answer_at_a_time_is_not_taken_for_dead() -> None:
    """Each read makes room for exactly one answer, so every write ends where an answer ends."""
    unread, sink = os.pipe()
    revision = "2025-11-25"
    try:
        async with victim("hasty", revision=revision, opened=False, stdout=sink) as server:
            os.close(sink)
            await server.write(lines(*opening(revision)))
            empty = lines(call(revision, 1000, "big", size=0))
            os.read(unread, 65_536)
            await server.write(empty)
            page = 4096 - len(os.read(unread, 65_536))  # what is missing for an answer of one page
            await server.write(lines(*(call(revision, n, "big", size=page) for n in range(1000, 1500))))
            took = bytearray()
            began = asyncio.get_running_loop().time()
            while len(took) < 500 * 4096:
                part = await asyncio.to_thread(os.read, unread, 4096)
                assert part, f"cut off after {len(took) // 4096} answers: {await server.errors()!r}"
                took += part
                # Longer than the server waits for one who reads nothing.
                if asyncio.get_running_loop().time() - began < 6.5:
                    await asyncio.sleep(0.05)
            assert [strict_json(bytes(line))["id"] for line in took.split(b"\n")[:-1]] == list(range(1000, 1500))
    finally:
        os.close(unread)


@linux
@requirement("P-10")
async def test_a_reader_that_makes_room_for_all_but_the_end_of_a_line_is_not_taken_for_dead() -> None:
    unread, sink = os.pipe()
    revision = "2025-11-25"
    try:
        async with victim("hasty", revision=revision, opened=False, stdout=sink) as server:
            os.close(sink)
            await server.write(lines(*opening(revision)))
            os.read(unread, 65_536)
            await server.write(lines(call(revision, 1, "big", size=0)))
            around = len(os.read(unread, 65_536)) - 1
            holds = fcntl.fcntl(unread, fcntl.F_GETPIPE_SZ)
            whole = holds + 4 * 4096  # without the end of its line
            await server.write(lines(call(revision, 2, "big", size=whole - around)))
            took = bytearray()
            while len(took) <= whole:
                await until(partial(_is_full, unread, min(holds, whole + 1 - len(took))), "the pipe is full")
                await asyncio.sleep(1.8)  # of 3, twice
                part = os.read(unread, 4 * 4096 if not took else holds)
                assert part, f"cut off after {len(took)} bytes: {await server.errors()!r}"
                took += part
            assert took.endswith(b"\n") and strict_json(bytes(took[:-1]))["id"] == 2
    finally:
        os.close(unread)


def _is_full(descriptor: int, size: int) -> bool:
    found = array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, found)
    return found[0] >= size


@requirement("P-10")
async def test_in_memory_a_peer_that_never_reads_is_held_up_and_others_are_not(ran: Ran) -> None:
    async def one(number: int) -> None:
        revision = ALL[number]
        server = subject.make("servers_faults:impatient")
        async with server.serving():
            deaf, other = server.connect(), server.connect()
            for line in opening(revision):
                await deaf.deliver(line)
                await other.deliver(line)
            delivered = 0
            with suppress(TimeoutError):
                while delivered < 10:
                    await deaf.deliver(call(revision, delivered, "big", size=16_000))
                    delivered += 1
            assert 1 < delivered < 10
            for n in range(100):
                await other.deliver(call(revision, n, "echo", text=str(n)))
            got = [strict_json(await other.receive()) for _ in range(100 + (revision != "2026-07-28"))]
            assert [each["id"] for each in got if each["id"] != "open"] == list(range(100))
            for _ in range(delivered):
                await deaf.receive()
            await deaf.deliver(call(revision, "again", "echo", text="again"))  # it has caught up
            await deaf.close()
            await other.close()
        ran(revision, "memory")

    await rounds(len(ALL), one, at_once=len(ALL))


@requirement("P-11")
@everywhere()
async def test_a_call_has_a_deadline(open_wire: Open) -> None:
    """One that gives no sign of life, and one that gives them for ever; both at once."""
    wire: Wire = await open_wire()
    asked = [
        await wire.ask("tools/call", {"name": "sleeps", "arguments": {"heartbeat": each}}) for each in (False, True)
    ]
    told = [str(await wire.answer(ident)) for ident in asked]
    assert "gave no sign of life for 1 s" in told[0]
    assert "took longer than 1.5 s" in told[1]
    assert await wire.silent()


# Floods


@requirement("P-08")
@pytest.mark.parametrize("revision", ALL)
async def test_a_flood_of_calls_is_answered_in_full(revision: str, ran: Ran) -> None:
    count = 10_000 if SOAK or revision in ("2024-10-07", "2026-07-28") else 1_500
    async with victim(revision=revision) as server:
        asked = lines(*(call(revision, n, "echo", text=f"mark {n}") for n in range(count)))
        sending = asyncio.create_task(server.write(asked))
        for n in range(count):
            answer = await server.message()
            assert answer["id"] == n
            assert text_of(answer) == f"mark {n}"
        await sending
        ran(revision, "stdio")


@requirement("P-08")
@pytest.mark.parametrize("revision", ALL)
async def test_calls_over_the_limit_are_refused_and_none_is_lost_or_doubled(revision: str, ran: Ran) -> None:
    count = 600
    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder) / "go"
        async with victim(revision=revision) as server:
            asked = [call(revision, n, "when", path=str(gate), text=f"mark {n}") for n in range(count)]
            await server.write(lines(*asked))
            refused = [await server.message() for _ in range(count - 256)]
            assert {each["error"]["code"] for each in refused} == {429}
            gate.touch()
            answered = [await server.message() for _ in range(256)]
            assert all(text_of(each) == f"mark {each['id']}" for each in answered)
            assert Counter(each["id"] for each in refused + answered) == Counter(range(count))
            assert text_of(await server.call("echo", text="room again")) == "room again"
    ran(revision, "stdio")


# Whatever standard input and output are


async def test_input_and_output_as_files(tmp_path: Path) -> None:
    asked, answered = tmp_path / "in", tmp_path / "out"
    count = 3_000
    asked.write_bytes(
        lines(*opening("2025-11-25"), *(call("2025-11-25", n, "echo", text="x" * 100) for n in range(count)))
        + call("2025-11-25", "late", "thread_after", seconds=0.2, text="late")
    )
    with asked.open("rb") as source, answered.open("wb") as sink:
        async with victim(opened=False, stdin=source, stdout=sink) as server:
            assert await server.ended(10) == 0
    got = [strict_json(line) for line in answered.read_bytes().split(b"\n")[:-1]]
    assert [each["id"] for each in got] == ["open", *range(count), "late"]


async def test_output_as_a_file_and_input_as_a_pipe(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as sink:
        async with victim(opened=False, stdout=sink) as server:
            await server.write(lines(*opening(server.revision), call(server.revision, 1, "big", size=MIB)))
            server.close_input()
            assert await server.ended(2) == 0
    got = [strict_json(line) for line in (tmp_path / "out").read_bytes().split(b"\n")[:-1]]
    assert [each["id"] for each in got] == ["open", 1]


@pytest.mark.parametrize("one", [True, False], ids=["one socket for both", "two sockets"])
async def test_input_and_output_as_sockets(one: bool) -> None:
    ours, theirs = socket.socketpair()
    more, others = socket.socketpair()
    with ours, theirs, more, others:
        async with victim(opened=False, stdin=theirs, stdout=theirs if one else others) as server:
            theirs.close()
            others.close()
            asked = [call(server.revision, n, "big", size=50_000) for n in range(40)]
            flood = lines(*opening(server.revision), *asked)
            sending = asyncio.create_task(asyncio.to_thread(ours.sendall, flood))
            data = b""
            while data.count(b"\n") < 41:
                data += await asyncio.to_thread((ours if one else more).recv, 65_536)
            await sending
            assert [strict_json(line)["id"] for line in data.split(b"\n")[:-1]] == ["open", *range(40)]
            ours.shutdown(socket.SHUT_WR)
            assert await server.ended(2) == 0


async def test_standard_error_closed() -> None:
    program = f"exec {sys.executable} {SUPPORT / 'subject.py'} servers_faults:faults 2>&-"
    process = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        program,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    asked = lines(
        *opening("2025-11-25"),
        call("2025-11-25", 1, "raises", kind="SystemExit"),  # would be logged
        call("2025-11-25", 2, "echo", text="heard"),
    )
    async with asyncio.timeout(PATIENCE):
        out, _ = await process.communicate(asked)
    got = [strict_json(line) for line in out.split(b"\n")[:-1]]
    assert [each["id"] for each in got] == ["open", 1, 2]
    assert text_of(got[2]) == "heard"
    assert process.returncode == 0


async def test_standard_error_closed_and_a_tool_that_prints() -> None:
    program = f"exec {sys.executable} {SUPPORT / 'subject.py'} default 2>&-"
    process = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        program,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    async with asyncio.timeout(PATIENCE):
        out, _ = await process.communicate(lines(*opening("2025-11-25"), call("2025-11-25", 1, "prints")))
    got = [strict_json(line) for line in out.split(b"\n")[:-1]]
    assert [each["id"] for each in got] == ["open", 1]
    assert text_of(got[1]) == "printed"


async def test_no_input_at_all() -> None:
    async with victim(opened=False, stdin=asyncio.subprocess.DEVNULL) as server:
        assert await server.rest() == []
        assert await server.ended(2) == 0


async def test_a_reader_that_goes_away_ends_the_server() -> None:
    async with victim() as server:
        assert server.out is not None
        transport: Any = server.process._transport  # type: ignore[attr-defined]  # no public way to its pipe
        transport.get_pipe_transport(1).close()
        await asyncio.sleep(0)  # it is closed in the loop's next turn; before, an answer would still fit into it
        await server.write(lines(call(server.revision, 1, "echo", text="x")))
        assert await server.ended(5) == 0
        assert b"Traceback" not in await server.errors()
