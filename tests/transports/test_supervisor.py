"""When the process ends: with its input, on a signal, with its parent; after answering, and whatever its tools do."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pty
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from checks import strict_json
from faults import call, gone, lines, opening, put_away, rounds, text_of, until, victim
from paths import SUPPORT
from patience import PATIENCE, SOAK
from requirements import requirement
from wires import ALL

HERE = SUPPORT
ROUNDS = 50 if SOAK else 7

Ran = Callable[[str, str], None]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


# End of input


@requirement("P-12")
async def test_end_of_input_after_a_call_still_yields_its_answer(ran: Ran) -> None:
    """Quick and slow, async, inline and in a thread, with and without a last newline."""
    calls: list[tuple[str, dict[str, object]]] = [
        ("echo", {}),
        ("thread_echo", {}),
        ("inline_echo", {}),
        ("after", {"seconds": 0.2}),
        ("thread_after", {"seconds": 0.2}),
    ]
    kinds = list(itertools.product(calls, (b"\n", b"")))

    async def one(number: int) -> None:
        revision = ALL[number % len(ALL)]
        (tool, arguments), last = kinds[number % len(kinds)]
        async with victim(revision=revision, opened=False) as server:
            asked = call(revision, "last", tool, text=f"mark {number}", **arguments)
            await server.write(lines(*opening(revision)) + asked + last)
            server.close_input()
            got = {each["id"]: each for each in await server.rest()}
            assert text_of(got["last"]) == f"mark {number}", tool
            assert await server.ended(2) == 0
        ran(revision, "stdio")

    await rounds(max(2 * len(kinds), ROUNDS), one)


@requirement("SRV-125")
@pytest.mark.parametrize("revision", ALL)
async def test_end_of_input_ends_an_idle_server_at_once(revision: str, ran: Ran) -> None:
    async with victim(revision=revision) as server:
        server.close_input()
        assert await server.ended(2) == 0
        assert await server.rest() == []
        assert await server.errors() == b""
        ran(revision, "stdio")


@requirement("P-12")
async def test_many_calls_in_flight_at_the_end_of_input_are_all_answered(ran: Ran) -> None:
    async def one(number: int) -> None:
        revision = ALL[number]
        async with victim(revision=revision, opened=False) as server:
            asked = [
                call(revision, n, ("after", "thread_after")[n % 2], seconds=0.01 * (n % 10), text=str(n))
                for n in range(100)
            ]
            await server.write(lines(*opening(revision), *asked)[:-1])
            server.close_input()
            got = {each["id"]: each for each in await server.rest() if each["id"] != "open"}
            assert {n: text_of(answer) for n, answer in got.items()} == {n: str(n) for n in range(100)}
            assert await server.ended(2) == 0
        ran(revision, "stdio")

    await rounds(len(ALL), one, at_once=2)


async def test_thread_left_by_a_tool_does_not_keep_the_process() -> None:
    async with victim() as server:
        await server.call("starts_a_thread")
        server.close_input()
        assert await server.ended(2) == 0


# Signals


@requirement("P-12")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_an_idle_server(number: signal.Signals, ran: Ran) -> None:
    async def one(at: int) -> None:
        revision = ALL[at % len(ALL)]
        async with victim(revision=revision) as server:
            if at % 2:
                # Right after an answer the server is about to wait for more: the moment to miss a signal.
                await server.call("echo", text="x")
            server.signal(number)
            assert await server.ended(2) == 0
            assert await server.rest() == []
            assert await server.errors() == b""
        ran(revision, "stdio")

    await rounds(ROUNDS, one)


@requirement("P-12")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_calls_answer_first(number: signal.Signals, ran: Ran) -> None:
    async def one(at: int) -> None:
        revision = ALL[at % len(ALL)]
        with tempfile.TemporaryDirectory() as folder:
            gate = Path(folder) / "go"
            async with victim(revision=revision) as server:
                await server.write(
                    lines(
                        call(revision, "async", "after", seconds=0.3, text="async"),
                        call(revision, "thread", "thread_after", seconds=0.3, text="thread"),
                        call(revision, "gate", "when", path=str(gate), text="gate"),
                    )
                )
                await server.says("running")
                server.signal(number)
                await _taken(server.pid)
                gate.touch()
                got = {each["id"]: text_of(each) for each in await server.rest() if "result" in each}
                assert got == {"async": "async", "thread": "thread", "gate": "gate"}
                assert await server.ended(5) == 0
        ran(revision, "stdio")

    await rounds(ROUNDS, one)


@pytest.mark.parametrize("tool", ["hangs", "blocks_loop", "stubborn"])
async def test_a_second_interrupt_leaves_at_once(tool: str) -> None:
    async with victim() as server:
        await server.ask(tool)
        await server.says("running")
        server.signal(signal.SIGINT)
        await _taken(server.pid)
        server.signal(signal.SIGINT)
        assert await server.ended(1) == 128 + signal.SIGINT


@requirement("P-12")
async def test_tool_with_its_own_signal_handlers_does_not_disable_the_servers() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        async with victim() as server:
            assert text_of(await server.call("takes_signals")) == "ready"
            server.signal(signal.SIGUSR1)
            assert text_of(await server.call("echo", text="x")) == "x"
            server.signal(number)
            assert await server.ended(2) == 0


async def test_the_end_of_a_forked_child_is_not_the_end_of_the_server() -> None:
    async with victim() as server:
        assert text_of(await server.call("forks")) == str(-signal.SIGTERM)
        assert text_of(await server.call("echo", text="still here")) == "still here"


async def test_a_signal_before_the_first_message() -> None:
    async def one(number: int) -> None:
        async with victim(opened=False) as server:
            # As soon as the handlers are in place, however early that is.
            await until(lambda: _handled(server.pid, signal.SIGTERM), "the server handles signals")
            server.signal(signal.SIGTERM)
            assert await server.ended(2) == 0

    await rounds(4, one)


@requirement("P-12", "P-10")
async def test_a_client_that_does_not_read_does_not_keep_the_process() -> None:
    ends = ["input", "SIGTERM", "SIGINT"]

    async def one(number: int) -> None:
        unread, sink = os.pipe()
        source, own = os.pipe()
        os.set_blocking(own, False)
        try:
            async with victim("faults", opened=False, stdin=source, stdout=sink) as server:
                os.close(source)
                os.close(sink)
                flood = [call(server.revision, n, "big", size=200_000) for n in range(100)]
                os.write(own, lines(*opening(server.revision), call(server.revision, "t", "ticks"), *flood))
                await server.says("tick 5")
                if ends[number] == "input":
                    os.close(own)
                else:
                    server.signal(getattr(signal, ends[number]))
                assert await server.ended(6) == 0
        finally:
            os.close(unread)
            with suppress(OSError):
                os.close(own)

    await rounds(len(ends), one)


def _signals(pid: int, kind: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().split("\n"):
        if line.startswith(kind + ":"):
            return int(line.split()[1], 16)
    raise AssertionError(kind)


def _handled(pid: int, number: int) -> bool:
    return bool(_signals(pid, "SigCgt") >> (number - 1) & 1)


async def _taken(pid: int) -> None:
    """Wait until no signal is pending any more."""
    with suppress(FileNotFoundError, ProcessLookupError):
        await until(lambda: not _signals(pid, "ShdPnd") | _signals(pid, "SigPnd"), "the signal arrives")


# The parent


PARENT = """
import json, os, subprocess, sys, time
program, first, then = sys.argv[1], sys.argv[2].encode(), sys.argv[3].encode()
source, own = os.pipe()
holder = subprocess.Popen(["sleep", "100"], pass_fds=[own], stdout=subprocess.DEVNULL)  # so that the input never ends
server = subprocess.Popen([sys.executable, program, "servers_faults:faults"], stdin=source, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE)
os.close(source)
os.write(own, first)
server.stdout.readline()
os.write(own, then)
if then:
    while b"running" not in server.stderr.readline():
        pass
print(json.dumps([server.pid, holder.pid]), flush=True)
time.sleep(100)
"""


@asynccontextmanager
async def orphan(tool: str, revision: str = "2025-11-25") -> AsyncIterator[int]:
    """The number of a server whose parent has just been killed, and whose input will not end."""
    first, then = lines(*opening(revision)), lines(call(revision, 1, tool)) if tool else b""
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PARENT,
        str(HERE / "subject.py"),
        first.decode(),
        then.decode(),
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    async with asyncio.timeout(PATIENCE):
        server, holder = json.loads(await parent.stdout.readline())
    try:
        assert not gone(server)
        parent.kill()
        await parent.wait()
        yield server
    finally:
        for pid in (server, holder):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        await put_away(parent)


STUCK = ["blocks_loop", "hangs", "hangs_elsewhere", "stubborn"]
ENDS = ["input", "input first", "SIGTERM", "SIGINT", "parent"]


@requirement("P-12")
async def test_process_ends_with_tools_that_block_or_ignore_cancellation(ran: Ran) -> None:
    """However it is told to end: none of these tools ever gives way. All at once, because each takes its whole time."""
    kinds = [*itertools.product(ENDS, STUCK), *((end, "computes") for end in ("input first", "SIGTERM", "parent"))]
    kinds.append(("parent", ""))

    async def one(number: int) -> None:
        end, tool = kinds[number]
        revision = ALL[number % len(ALL)]
        if end == "parent":
            async with orphan(tool) as pid:
                await until(lambda: gone(pid), f"the server has gone, {tool or 'idle'}")
            return
        async with victim("faults", revision=revision, opened=end != "input first") as server:
            first = opening(revision) if end == "input first" else []
            await server.write(lines(*first, call(revision, 1, tool)))
            if end == "input first":
                server.close_input()
            await server.says("running")
            if end == "input":
                server.close_input()
            elif end != "input first":
                server.signal(getattr(signal, end))
            # 5 s are promised; one more for a machine that runs two dozen of these.
            assert await server.ended(6) == 0, f"{end}, {tool}"
        ran(revision, "stdio")

    await rounds(len(kinds), one, at_once=len(kinds))


async def test_the_server_lives_as_long_as_its_parent() -> None:
    """The twin without the fault: what is gone in the test above was alive because its parent was."""
    async with victim() as server:
        await asyncio.sleep(0.5)
        assert not gone(server.pid)
        assert text_of(await server.call("echo", text="alive")) == "alive"


# A terminal


@pytest.mark.parametrize("busy", [False, True])
async def test_ctrl_c_in_a_terminal_exits_clean(busy: bool) -> None:
    async with terminal() as (main, process):
        os.write(main, lines(*opening("2025-11-25")))
        await _shown(main, b'"serverInfo"')
        if busy:
            os.write(main, lines(call("2025-11-25", 1, "when", path="/nowhere", text="")))
            await _shown(main, b"running")
        os.write(main, b"\x03")
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 0
        assert b"Traceback" not in await _shown(main, None)


async def test_ctrl_d_in_a_terminal_is_the_end_of_input() -> None:
    async with terminal() as (main, process):
        os.write(main, lines(*opening("2025-11-25")))
        await _shown(main, b'"serverInfo"')
        os.write(main, b"\x04")
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 0


@asynccontextmanager
async def terminal() -> AsyncIterator[tuple[int, asyncio.subprocess.Process]]:
    main, other = pty.openpty()
    starter = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        f"os.execv(sys.executable, [sys.executable, {str(HERE / 'subject.py')!r}, 'servers_faults:faults'])"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", starter, stdin=other, stdout=other, stderr=other, start_new_session=True
    )
    os.close(other)
    try:
        yield main, process
    finally:
        await put_away(process)
        os.close(main)


async def _shown(main: int, text: bytes | None) -> bytes:
    """What the terminal shows, until it shows `text`, or is left by the last who used it."""
    data = b""
    async with asyncio.timeout(PATIENCE):
        while text is None or text not in data:
            try:
                data += await asyncio.to_thread(os.read, main, 65_536)
            except OSError:
                if text is None:
                    return data
                raise
    return data


def test_what_a_round_sends_is_json() -> None:
    assert all(strict_json(line) for revision in ALL for line in [*opening(revision), call(revision, 1, "echo")])
