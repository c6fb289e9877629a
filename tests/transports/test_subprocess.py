"""A server as a child process, whatever it does: heard in full, ended in time, and nothing left of it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from faults import gone, until
from handrail.errors import PeerError, Sent, TransportError
from handrail.transports import subprocess as module
from handrail.transports.base import ClientTransport, PendingRequest
from handrail.transports.subprocess import SubprocessTransport
from paths import SUPPORT
from patience import PATIENCE
from requirements import requirement

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs pipes that a loop can watch")
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

PROGRAM = str(SUPPORT / "servers_child.py")
MIB = 1024 * 1024


class Ear:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.why: list[str] = []
        self.too_long = 0
        self.problems: list[tuple[TransportError, PendingRequest | None]] = []
        self.burst = self.largest_burst = self.turns = 0  # messages in one turn of the loop, and turns that had some
        self._changed = asyncio.Event()

    def on_message(self, message: bytes | bytearray, about: PendingRequest | None = None) -> None:
        assert self.lost_at_all is None, "heard after the end"
        self.heard.append(json.loads(message))
        if not self.burst:
            asyncio.get_running_loop().call_soon(self._turned)
        self.burst += 1
        self._changed.set()

    def _turned(self) -> None:
        self.largest_burst, self.burst = max(self.largest_burst, self.burst), 0
        self.turns += 1

    def on_activity(self, about: PendingRequest | None = None) -> None: ...

    def on_failure(self, problem: PeerError, about: PendingRequest | None = None) -> None:
        assert isinstance(problem, TransportError)
        self.problems.append((problem, about))
        self._changed.set()

    def on_stream(self) -> None: ...

    def on_discarded(self, why: str, *, too_long: bool = False) -> None:
        self.why.append(why)
        self.too_long += too_long
        self._changed.set()

    @property
    def lost_at_all(self) -> TransportError | None:
        found = [problem for problem, about in self.problems if about is None]
        assert len(found) < 2, "lost twice"
        return found[0] if found else None

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def message(self, number: int = 0) -> Any:
        await self.until(lambda: len(self.heard) > number)
        return self.heard[number]

    async def end(self) -> TransportError:
        await self.until(lambda: self.lost_at_all)
        assert self.lost_at_all is not None
        return self.lost_at_all


def server(behaviour: str, **options: Any) -> SubprocessTransport:
    return SubprocessTransport([sys.executable, "-S", PROGRAM, *behaviour.split()], **options)


@asynccontextmanager
async def opened(behaviour: str, **options: Any) -> AsyncIterator[tuple[SubprocessTransport, Ear]]:
    link, ear = server(behaviour, **options), Ear()
    await link.open(ear)
    try:
        yield link, ear
    finally:
        async with asyncio.timeout(PATIENCE):
            await link.close()
        assert link.returncode is not None
        assert ear.lost_at_all is not None


def request(number: int = 1) -> PendingRequest:
    return PendingRequest(number, "tools/call", asyncio.get_running_loop().create_future())


def children(parent: int) -> list[int]:
    """Of a process, those that nobody has collected among them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return sorted(found)


@pytest.fixture(params=["pidfd", "thread"])
def watching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to learn of an exit."""
    if request.param == "thread" and sys.platform == "linux":

        def refuse(pid: int, flags: int = 0) -> int:
            raise OSError("not here")

        monkeypatch.setattr(os, "pidfd_open", refuse)


# Lines


async def test_lines_are_echoed_in_order() -> None:
    async with opened("echo") as (link, ear):
        typed: ClientTransport = link
        for number in range(1000):
            typed.send(b'{"n":%d}' % number, None)
        await ear.message(999)
        assert ear.heard == [{"n": number} for number in range(1000)]
        assert link.pid is not None and link.returncode is None


async def test_line_of_3_mib_is_echoed() -> None:
    async with opened("echo") as (link, ear):
        link.send(json.dumps({"text": "ä" * (3 * MIB // 6)}).encode(), waiting := request())
        link.send(b'{"second":1}', None)
        assert waiting.sent is Sent.UNKNOWN  # a part of it has left
        assert len((await ear.message(0))["text"]) == 3 * MIB // 6
        assert await ear.message(1) == {"second": 1}


@requirement("P-03", "P-35")
async def test_line_over_the_limit_is_dropped_and_the_next_one_delivered() -> None:
    async with opened("over_long 70000", max_message_bytes=1000, grace=0) as (_, ear):
        assert await ear.message() == {"good": 1}
        assert (ear.why, ear.too_long) == (["a line of over 1,000 bytes"], 1)


@requirement("P-35")
async def test_line_that_is_no_message_is_dropped_and_counted() -> None:
    async with opened("noise", grace=0) as (_, ear):
        await ear.message(2)
        assert ear.heard == [{"one": 1}, [2], {"three": 3}]
        assert (len(ear.why), ear.too_long) == (3, 0)
        assert ear.why[0] == "no message: 'Server 1.0 starts \\x1b[31m\\u202e'"
        assert "caf\\\\xe9" in ear.why[1]
        assert len(ear.why[2]) < 150


async def test_event_loop_of_another_thread_can_run_the_transport() -> None:
    async def talk() -> None:
        async with opened("echo") as (link, ear):
            link.send(b"{}", None)
            heard.append(await ear.message())

    heard: list[Any] = []
    thread = threading.Thread(target=lambda: asyncio.run(talk()))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert heard == [{}]


# Standard error


@requirement("P-14")
async def test_standard_error_never_blocks_the_server_and_its_tail_is_kept() -> None:
    told: list[str] = []
    async with opened(f"floods_stderr {10 * MIB}", on_stderr=told.append) as (link, ear):
        link.send(b"{}", None)
        assert await ear.message(1) == {"flooded": True}
    lines = link.stderr.split("\n")
    assert len(lines) == 200
    assert lines[-2:] == ["caf\\xe9 \x1b[31m", "the last"]
    assert len(told) == 10 * MIB // 40 + 2
    assert told[-2:] == lines[-2:]


async def test_standard_error_without_newlines_is_bounded() -> None:
    told: list[str] = []
    async with opened(f"endless_stderr {MIB}", on_stderr=told.append) as (link, ear):
        await ear.end()
    assert link.stderr == "x" * module.MAX_STDERR_BYTES
    assert told == ["(a line of over 65,536 bytes)"]


async def test_on_stderr_that_fails_does_not_stop_the_reading(caplog: pytest.LogCaptureFixture) -> None:
    def fail(line: str) -> None:
        raise ZeroDivisionError

    async with opened(f"floods_stderr {MIB}", on_stderr=fail) as (link, ear):
        link.send(b"{}", None)
        assert await ear.message(1) == {"flooded": True}
    assert link.stderr.endswith("the last")
    assert [record.getMessage() for record in caplog.records] == [
        "subprocess: on_stderr failed; it is not called again"
    ]


# Its death


@requirement("P-14")
@pytest.mark.usefixtures("watching")
async def test_server_that_exits_at_once_is_reported_with_its_standard_error() -> None:
    async with opened("exits 7") as (link, ear):
        problem = await ear.end()
        assert problem.text == "the server exited with code 7"
        assert problem.hint == "It said: Traceback | something | NoSuchModule: \\x1b[31mthat\\xff"
        assert link.returncode == 7
        late = request()
        link.send(b"{}", late)
        assert late.sent is Sent.NO
        told, about = ear.problems[-1]
        assert about is late and told.sent is Sent.NO and told.text == problem.text


@requirement("P-14")
@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV")])
async def test_exit_by_signal_is_reported_with_its_name(number: int, name: str) -> None:
    async with opened(f"dies {number}") as (link, ear):
        assert (await ear.end()).text == f"the server was ended by {name}"
        assert link.returncode == -number


@requirement("P-14")
@pytest.mark.usefixtures("watching")
async def test_messages_before_the_exit_are_delivered_first() -> None:
    async with opened("exits_on_first") as (link, ear):
        waiting = request()
        link.send(b"{}", waiting)
        assert (await ear.end()).text == "the server exited with code 3"
        assert ear.heard == [{"last": 1}]
        assert waiting.sent is Sent.UNKNOWN


@linux
async def test_whole_content_of_the_pipe_is_delivered() -> None:
    async with opened("exits_full 150") as (link, ear):
        wait_without_the_loop(link)
        assert (await ear.end()).text == "the server exited with code 0"
        assert [each["number"] for each in ear.heard] == [*range(150)]


def wait_without_the_loop(link: SubprocessTransport) -> None:
    """Until it has exited; it fits into the pipe what it has to say."""
    os.waitid(os.P_PID, link.pid or 0, os.WEXITED | os.WNOWAIT)


async def test_incomplete_last_line_is_no_message() -> None:
    async with opened("half_a_line") as (_, ear):
        await ear.end()
        assert ear.heard == [{"whole": 1}]
        assert ear.why == ["""no message: 'half a line: {"jsonrpc":"2.0","id":1,"resu'"""]


async def test_the_last_message_needs_no_newline() -> None:
    async with opened("no_last_newline") as (_, ear):
        await ear.end()
        assert ear.heard == [{"whole": 1}]
        assert ear.why == []


@requirement("P-14", "P-11")
@pytest.mark.parametrize(("descriptor", "what"), [(0, "closed its input"), (1, "closed its output")])
async def test_a_server_that_closes_a_pipe_is_lost_even_if_it_lives(descriptor: int, what: str) -> None:
    async with opened(f"closes {descriptor}", grace=0.1) as (link, ear):
        await ear.message()
        link.send(b"{}", None)
        if descriptor == 0:
            await ear.message(1)
            unsent = request()
            link.send(b"{}", unsent)
            assert unsent.sent is Sent.NO
        problem = await ear.end()
        assert what in problem.text
        assert link.returncode is None


@linux
@requirement("P-14")
@pytest.mark.usefixtures("watching")
async def test_what_a_server_has_forked_ends_with_it() -> None:
    async with opened("forks") as (link, ear):
        forked = (await ear.message())["child"]
        link.send(b"{}", None)
        assert (await ear.end()).text == "the server exited with code 0"
        await until(lambda: gone(forked), "the fork has gone")


@linux
@requirement("P-14", "P-11")
async def test_a_fork_that_left_the_group_and_writes_for_ever_is_not_waited_for() -> None:
    async with opened("forks away") as (link, ear):
        await ear.until(lambda: any("child" in each for each in ear.heard))
        forked = next(each["child"] for each in ear.heard if "child" in each)
        try:
            link.send(b"{}", None)
            assert (await ear.end()).text == "the server exited with code 0"
            count = len(ear.heard)
        finally:
            await until(lambda: gone(forked), "it has nobody to write to any more")
        assert len(ear.heard) == count
        assert ear.largest_burst < 64 * 64


@requirement("P-35")
async def test_a_burst_is_worked_off_in_turns_of_the_loop() -> None:
    """Others are served in between: few messages are handled in one go, unless there are few in all."""
    async with opened("bursts 2000") as (_, ear):
        await ear.until(lambda: len(ear.heard) == 2000)
        assert ear.largest_burst <= module.LINES_AT_ONCE
        assert ear.turns >= 2000 / (2 * module.LINES_PER_TURN)  # a read may end anywhere


# What was sent, and what was not


@requirement("P-14")
async def test_request_counts_as_sent_once_a_byte_is_written() -> None:
    async with opened("never_reads") as (link, ear):
        await ear.message()
        whole, begun, queued = request(1), request(2), request(3)
        link.send(b"{}", whole)
        link.send(b"x" * MIB, begun)
        link.send(b"{}", queued)
        assert [each.sent for each in (whole, begun, queued)] == [Sent.UNKNOWN, Sent.UNKNOWN, Sent.NO]
        os.kill(link.pid or 0, signal.SIGKILL)
        assert (await ear.end()).sent is Sent.UNKNOWN
        assert queued.sent is Sent.NO
        assert len(ear.problems) == 1


async def test_cancelled_request_is_not_sent_later() -> None:
    async with opened("reads_when_told") as (link, ear):
        ready = await ear.message()
        requests = [request(number) for number in range(4)]
        for number, each in enumerate(requests):
            link.send(b'{"n":%d,"filled":"%b"}' % (number, b"x" * MIB), each)
        link.cancel(requests[0])  # which has begun to leave
        link.cancel(requests[2])
        os.kill(ready["ready"], signal.SIGUSR1)
        await ear.message(3)
        assert [each["n"] for each in ear.heard[1:]] == [0, 1, 3]
        assert requests[2].sent is Sent.NO
        assert requests[3].sent is Sent.UNKNOWN


@requirement("P-11")
async def test_too_much_unsent_is_refused_for_that_message_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 2 * MIB)
    async with opened("reads_when_told") as (link, ear):
        ready = await ear.message()
        first, second, third = request(1), request(2), request(3)
        link.send(b'"%b"' % (b"x" * MIB), first)
        link.send(b'"%b"' % (b"y" * 2 * MIB), second)
        assert [about for _, about in ear.problems] == [second]
        assert ear.problems[0][0].sent is second.sent is Sent.NO
        link.send(b'"%b"' % (b"z" * 2 * MIB), None)
        link.send(b'{"third":3}', third)
        os.kill(ready["ready"], signal.SIGUSR1)
        assert await ear.message(1) == {"third": 3}
        assert len(ear.problems) == 1


@linux
@requirement("P-11", "P-14")
async def test_server_that_reads_nothing_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 0.3)
    async with opened("never_reads") as (link, ear):
        ready = await ear.message()
        link.send(b"x" * MIB, None)
        assert (await ear.end()).text == "the server took nothing of what was sent for 0.3 s"
        await until(lambda: gone(ready["ready"]), "the server has gone")
        await until(lambda: link.returncode is not None, "it is known")
        assert len(ear.problems) == 1


async def test_cancelled_message_does_not_stall_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 0.05)
    async with opened("never_reads", grace=0) as (link, ear), opened("never_reads") as (other, clock):
        await asyncio.gather(ear.message(), clock.message())
        while True:  # fill the pipe to the brim, in pieces that leave whole or not at all
            link.send(b"x" * 4095, waiting := request())
            if waiting.sent is Sent.NO:
                break
        link.cancel(waiting)
        other.send(b"x" * MIB, None)
        assert "took nothing" in (await clock.end()).text
        assert ear.problems == []


# The end we give it


@requirement("CLI-41")
async def test_server_that_ends_with_its_input_gets_no_signal_and_is_read_to_the_end() -> None:
    async with opened("answers_at_the_end", grace=PATIENCE) as (link, ear):
        await ear.message()
        await link.close()
        assert link.returncode == 0
        assert ear.heard[1:] == [{"answer": "late"}]
        assert [problem.text for problem, _ in ear.problems] == ["the link was closed"]


@requirement("CLI-41")
async def test_what_is_queued_is_written_before_the_input_is_closed() -> None:
    async with opened("reads_when_told", grace=PATIENCE) as (link, ear):
        ready = await ear.message()
        link.send(json.dumps({"text": "x" * MIB}).encode(), None)
        closing = asyncio.create_task(link.close())
        os.kill(ready["ready"], signal.SIGUSR1)
        assert len((await ear.message(1))["text"]) == MIB
        await closing
        assert link.returncode == 0


@requirement("CLI-41", "P-14")
@pytest.mark.parametrize(
    ("behaviour", "number"),
    [("ignores_end", signal.SIGTERM), ("never_reads", signal.SIGTERM), ("ignores_everything", signal.SIGKILL)],
)
@pytest.mark.usefixtures("watching")
async def test_server_that_does_not_exit_gets_sigterm_then_sigkill(
    behaviour: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TERM_SECONDS", 0.1)
    async with opened(behaviour, grace=0.1) as (link, ear):
        await ear.message()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(link.close(), link.close())
            await link.close()
        assert link.returncode == -number


@linux
@requirement("CLI-41", "P-14")
async def test_closing_ends_forks_of_a_server_that_leaves_politely() -> None:
    async with opened("forks") as (link, ear):
        forked = (await ear.message())["child"]
        link.send(b"{}", None)
    await until(lambda: gone(forked), "the fork has gone")


@linux
@requirement("CLI-41", "P-14")
@pytest.mark.usefixtures("watching")
async def test_a_close_that_is_cancelled_leaves_no_process() -> None:
    before = children(os.getpid())
    async with opened("ignores_everything", grace=10 * PATIENCE) as (link, ear):
        await ear.message()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await link.close()
        assert link.returncode == -signal.SIGKILL
        assert children(os.getpid()) == before


async def test_close_without_open_does_nothing_and_second_open_raises() -> None:
    link = server("echo")
    await link.close()
    with pytest.raises(RuntimeError):
        await link.open(Ear())
    assert link.pid is None and link.returncode is None and link.stderr == ""
    async with opened("echo") as (link, _):
        with pytest.raises(RuntimeError):
            await link.open(Ear())


@linux
@requirement("P-14")
@pytest.mark.usefixtures("watching")
async def test_many_rounds_leave_no_descriptor_and_no_process() -> None:
    def state() -> tuple[int, list[int], int]:
        threads = sum(thread.name == "handrail-child" for thread in threading.enumerate())
        return len(os.listdir("/proc/self/fd")), children(os.getpid()), threads

    before = state()
    for number in range(20):
        async with opened(("echo", "exits 1", "exits_on_first", "forks")[number % 4]) as (link, ear):
            if number % 4 != 1:
                link.send(b"{}", None)
                await ear.until(lambda: ear.heard or ear.lost_at_all)
        with pytest.raises(TransportError):
            await SubprocessTransport(["./no-such-program"]).open(Ear())
    await until(lambda: state()[2] == 0, "the threads have ended")
    assert state() == before


@linux
@requirement("P-14")
@pytest.mark.parametrize("shell", ["/bin/sh", "./no-such-shell"])
async def test_missing_shell_leaves_the_transport_without_a_guard(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handrail.transports.subprocess._SHELL", shell)
    before = set(children(os.getpid()))
    async with opened("echo") as (link, ear):
        assert len(set(children(os.getpid())) - before) == (2 if shell == "/bin/sh" else 1)
        link.send(b"{}", None)
        await ear.message()


@linux
@requirement("P-14")
@pytest.mark.parametrize("how", ["alone", "with our group"])
async def test_killed_client_leaves_no_server_and_no_fork(how: str) -> None:
    held = await asyncio.create_subprocess_exec(
        sys.executable, PROGRAM, "holder", stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert held.stdout is not None
    family: list[int] = []
    fork = 0
    try:
        async with asyncio.timeout(PATIENCE):
            said = json.loads(await held.stdout.readline())
        family, fork = [*children(held.pid), said["grandchild"]], said["fork"]
        family.remove(fork)  # a copy of us that lives on, with all that we had open when it began
        assert len(family) == 5 + 5 + 1  # servers, their guards, a fork of a server's
        assert not any(gone(each) for each in family)
        os.kill(held.pid, signal.SIGKILL) if how == "alone" else os.killpg(held.pid, signal.SIGKILL)
        await until(lambda: all(gone(each) for each in family), "all have gone")
        assert gone(fork) == (how != "alone")
    finally:
        for each in filter(None, [held.pid, fork, *family]):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        await held.communicate()


# What is started, and with what


@requirement("P-28")
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ([], {}),
        ([""], {}),
        ("rm -rf /", {}),
        (["prog\0ram"], {}),
        (["program", "argu\0ment"], {}),
        (["program"], {"env": {"A\0": "1"}}),
        (["program"], {"env": {"A": "\0"}}),
        (["program"], {"cwd": "a\0b"}),
        (["program"], {"env": {"A=B": "1"}}),
        (["program"], {"env": {"": "1"}}),
    ],
)
def test_invalid_command_is_refused(command: Sequence[str], options: Any) -> None:
    with pytest.raises(ValueError, match=r"command|env|cwd"):
        SubprocessTransport(command, **options)


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("nothing", "'./program' cannot be started: No such file.*first line"),
        ("not on PATH", "'no-such-program' cannot be started: No such file.*on PATH"),
        ("not executable", "'./program' cannot be started: Permission denied.*chmod"),
        ("a folder", "'./program' cannot be started: Permission denied"),
        ("no script", "'./program' cannot be started: Exec format error.*#!/bin/sh"),
        ("no such folder", "cwd '.*nowhere' cannot be used: No such file.*a folder"),
    ],
)
async def test_command_that_cannot_start_is_explained(what: str, complaint: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    if what == "a folder":
        program.mkdir()
    elif what != "nothing":
        program.write_text("echo hello\n")
        program.chmod(0o644 if what == "not executable" else 0o755)
    command = ["no-such-program" if what == "not on PATH" else "./program"]
    link = SubprocessTransport(command, cwd=tmp_path / "nowhere" if what == "no such folder" else tmp_path)
    with pytest.raises(TransportError, match=complaint) as caught:
        await link.open(ear := Ear())
    assert caught.value.sent is Sent.NO
    assert caught.value.phase == "connect"
    assert ear.problems == []
    await link.close()


@linux
async def test_too_few_descriptors_open_or_explain_and_leave_none() -> None:
    before, (soft, hard) = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    texts, codes = set(), []
    for more in range(16):
        link, ear = server("ignores_end", grace=0), Ear()
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, hard))
        try:
            await link.open(ear)
        except TransportError as problem:
            texts.add(problem.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await link.close()
        codes.append(link.returncode)
    assert texts == {f"{sys.executable!r} cannot be started: Too many open files"}
    assert codes[0] is None and codes[-1] is not None
    assert len(os.listdir("/proc/self/fd")) == len(before)


@linux
async def test_event_loop_that_cannot_watch_pipes_raises_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("no pipes")

    monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", refuse)
    before = len(os.listdir("/proc/self/fd")), children(os.getpid())
    link, ear = server("ignores_everything"), Ear()
    with pytest.raises(TransportError, match="cannot be watched: no pipes"):
        await link.open(ear)
    assert ear.problems == []
    assert link.returncode == -signal.SIGKILL
    assert (len(os.listdir("/proc/self/fd")), children(os.getpid())) == before
    await link.close()


@linux
@requirement("P-28")
async def test_server_gets_only_its_arguments_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY_TOKEN", "secret")
    monkeypatch.setenv("LC_CANARY", "C")
    monkeypatch.setenv("HOME", "/home/of/ours")
    arguments = "$(touch here) ; -x `id` * \\".split(" ")
    command = [sys.executable, "-S", PROGRAM, "tells_env", *arguments, "a\nb", ""]
    inner, outer = os.pipe()
    os.set_inheritable(outer, True)
    link, ear = SubprocessTransport(command, env={"GIVEN": "ä", "HOME": "/elsewhere"}, cwd=tmp_path, grace=0), Ear()
    await link.open(ear)
    try:
        said = await ear.message()
    finally:
        await link.close()
        os.close(inner)
        os.close(outer)
    env = said["env"]
    assert env["GIVEN"] == "ä" and env["HOME"] == "/elsewhere" and env["LC_CANARY"] == "C"
    assert env["PATH"] == os.environ["PATH"]
    assert "CANARY_TOKEN" not in env
    names = set(module.DEFAULT_ENV) | {"GIVEN"}
    assert [name for name in env if name not in names and not name.startswith("LC_")] == []
    assert said["cwd"] == str(tmp_path)
    assert said["args"] == [*arguments, "a\nb", ""]
    assert said["fds"] == ["0", "1", "2", "3"]  # the last is the folder being listed
    assert os.listdir(tmp_path) == []


@linux
async def test_inherit_env_selects_the_inherited_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY_ONE", "1")
    monkeypatch.setenv("OTHER", "2")
    async with opened("tells_env", inherit_env=["CANARY_*"], grace=0) as (_, ear):
        env = (await ear.message())["env"]
        assert env.get("CANARY_ONE") == "1"
        assert "OTHER" not in env and "HOME" not in env
