"""A server in processes of its own, for the tests of workers and of load: `python servers_load.py {"run": {…}, …}`.

The tests use the rest: `running` starts such a process, `RoundRobin` stands in front of several, and to `Control` the
tools tell what they do, from whichever process they run in, and wait there for a word to go on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from faults import HERE, put_away, until
from handrail import Call, Limits, Server
from handrail.transports.http1.listen import HttpLimits
from patience import PATIENCE, cpu_of, in_time
from subject import Name, add_tools

MIB = 1024 * 1024


# The server


def make(control: str, limits: dict[str, Any], server_options: dict[str, Any]) -> Server:
    """The tools of `subject.py`, and some that tell which process they run in."""
    host, port = control.split(":")

    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        """Each process hangs on the test: when that has gone, nothing of this is left behind."""
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"serving {os.getpid()}\n".encode())
        lifeline = asyncio.create_task(_end_with(reader))
        try:
            yield
        finally:
            lifeline.cancel()
            writer.close()

    # rates: the load is more than any caller may make
    options: Any = {"version": "1", "title": "Load", "limits": Limits(**limits), "rates": None, **server_options}
    server = Server("load", lifespan=lifespan, **options)
    add_tools(server)
    skipped = 0.0
    floods: dict[object, int] = {}
    wall = server.engine.clock
    server.engine.clock = lambda: wall() + skipped

    @server.tool
    async def pid() -> str:
        """Which process this is."""
        return str(os.getpid())

    @server.tool
    async def held(mark: str, call: Call) -> str:
        """Say that it runs, and where; wait to be let go."""
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(f"{mark} {os.getpid()}\n".encode())
            await call.progress(1)
            await reader.readline()
            writer.write(b"done\n")
            return f"{mark} {os.getpid()}"
        except asyncio.CancelledError:
            writer.write(b"stopped\n")
            raise
        finally:
            writer.close()

    @server.tool
    async def asks_person(call: Call, question: str = "Your name?") -> str:
        """Ask for a name; tell it, and who asked."""
        answer = await call.ask(f"{question} {os.getpid()}", Name)
        return f"{answer.content.name} {os.getpid()}"

    @server.tool
    async def asks_model(call: Call, question: str = "What is the capital of France?") -> str:
        """Ask the client's model; tell what it said, and who asked."""
        answer = await call.sample(f"{question} {os.getpid()}")
        return f"{answer['content']['text']} {os.getpid()}"

    @server.tool
    async def floods_caller(call: Call, size: int = 16 * 1024) -> None:
        """Say things without end, as fast as they are taken."""
        mine, piece = object(), "x" * size
        floods[mine] = 0
        try:
            while True:
                floods[mine] += 1
                await call.progress(floods[mine], message=piece)
                await call.log("error", piece)
        finally:
            del floods[mine]

    @server.tool
    async def said_so_far() -> list[int]:
        """How much each flood that is going on has said."""
        return list(floods.values())

    @server.resource("load://{name}")
    async def thing(name: str) -> str:
        return name

    @server.tool
    async def touch(uri: str) -> str:
        """Say that a resource has changed."""
        server.resource_updated(uri)
        return str(os.getpid())

    @server.tool
    async def let_time_pass(seconds: float) -> None:
        """Put the clock forward."""
        nonlocal skipped
        skipped += seconds

    return server


async def _end_with(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        await reader.read()
    os.killpg(0, signal.SIGKILL)


def main(options: dict[str, Any]) -> None:
    server = make(options["control"], options["limits"], options["server"])
    limits = HttpLimits(**options["http_limits"])
    server.run(http="127.0.0.1:0", http_limits=limits, ready=lambda url: print(url, flush=True), **options["run"])


# The test's end of it


class Run:
    """A run of `held`, wherever it runs."""

    def __init__(self, pid: int, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._writer = writer
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def let_go(self) -> None:
        self._writer.write(b"on\n")

    def over(self, how: str) -> None:
        if not self._end.done():
            self._end.set_result(how)

    @property
    def is_over(self) -> bool:
        return self._end.done()

    async def end(self) -> str:
        """How it ended: done, stopped, or (empty) with its process."""
        async with asyncio.timeout(PATIENCE):
            return await asyncio.shield(self._end)


class Control:
    """What tools tell, and the word they wait for."""

    def __init__(self) -> None:
        self.serving: set[int] = set()  # processes that have begun to
        self._runs: defaultdict[str, asyncio.Future[Run]] = defaultdict(asyncio.get_running_loop().create_future)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Control:
        self._server = await asyncio.start_server(self._hear, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(self, *problem: object) -> None:
        self._server.close()
        await _cancelled(self._tasks)

    async def run(self, mark: str) -> Run:
        """The run of `held` with this mark, which has begun."""
        async with asyncio.timeout(PATIENCE):
            return await asyncio.shield(self._runs[mark])

    def begun(self, mark: str) -> Run | None:
        """The run with this mark, if it has got as far as to say so."""
        return self._runs[mark].result() if self._runs[mark].done() else None

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with _task_of(self._tasks):
            try:
                line = await reader.readline()
                if not line:
                    return  # stopped before it could say anything
                mark, pid = line.decode().split()
                run = Run(int(pid), writer)
                if mark == "serving":
                    self.serving.add(run.pid)
                else:
                    self._runs[mark].set_result(run)
                with suppress(ConnectionError):
                    run.over((await reader.readline()).decode().strip())
                run.over("")
            finally:
                writer.close()


class _task_of:  # noqa: N801 — used as a function
    """Keep the current task in a set for as long as it runs; being cancelled is its usual end."""

    def __init__(self, tasks: set[asyncio.Task[None]]) -> None:
        self._tasks = tasks

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> bool:
        return kind is asyncio.CancelledError


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Process:
    """A server that runs; with several workers, their parent."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, log: int) -> None:
        self.process = process
        self.pid = process.pid
        self.url = url
        self._log = log

    def log(self) -> str:
        """What it wrote to standard error so far."""
        return os.pread(self._log, 10_000_000, 0).decode()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def ended(self, within: float) -> int:
        """The exit code; `within` is promised for a machine that does nothing else."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                code = await self.process.wait()
        except TimeoutError:
            raise AssertionError(f"still running after {PATIENCE:g} s: {self.log()}") from None
        in_time(time.monotonic() - began, within, "the end of the process")
        return code

    async def serves(self, control: Control) -> None:
        """Wait until every process of it does."""
        await until(lambda: (self.workers or {self.pid}) <= control.serving, "every process serves")

    @property
    def workers(self) -> set[int]:
        text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return {int(each) for each in text.split()}

    @property
    def memory(self) -> int:
        """Bytes it has in memory now."""
        return self._status("VmRSS")

    @property
    def peak(self) -> int:
        """The most it had since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    @property
    def cpu(self) -> float:
        """Seconds of a processor it has used."""
        return cpu_of(self.pid)

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().split("\n")
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024


@asynccontextmanager
async def running(
    control: Control,
    *,
    env: dict[str, str] | None = None,
    limits: dict[str, Any] | None = None,
    http_limits: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    **run: Any,
) -> AsyncIterator[Process]:
    """A server in a process of its own; `server` goes to `Server`, and `run` to `Server.run`."""
    options = {
        "control": control.address,
        "limits": limits or {},
        "http_limits": http_limits or {},
        "server": server or {},
        "run": run,
    }
    # What it leaves behind when it is killed goes with this folder.
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(HERE / "servers_load.py"),
            json.dumps(options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, "TMPDIR": folder, **(env or {})},
            start_new_session=True,
        )
        started = Process(process, "", log.fileno())
        assert process.stdout is not None
        try:
            async with asyncio.timeout(PATIENCE):
                started.url = (await process.stdout.readline()).decode().strip()
            assert started.url, f"it did not start: {started.log()}"
            await started.serves(control)
            yield started
        finally:
            await put_away(process, group=True)


@asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    """A worker that does nothing for a while: what comes meanwhile is for the other one."""
    stat = Path(f"/proc/{pid}/stat")
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the worker has stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class RoundRobin:
    """One address in front of several servers: each new connection goes to the next of them."""

    def __init__(self, *urls: str) -> None:
        self._places = [(urlsplit(url).hostname, urlsplit(url).port) for url in urls]
        self._path = urlsplit(urls[0]).path
        self._tasks: set[asyncio.Task[None]] = set()
        self.turn = 0  # whose turn it is
        self.taken: list[int] = []  # who took each connection

    async def __aenter__(self) -> RoundRobin:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}{self._path}"
        return self

    async def __aexit__(self, *problem: object) -> None:
        self._server.close()
        await _cancelled(self._tasks)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at = self.turn
        self.turn = (at + 1) % len(self._places)
        self.taken.append(at)
        with _task_of(self._tasks):
            try:
                back, forth = await asyncio.open_connection(*self._places[at])
                try:
                    await asyncio.gather(_pass_on(reader, forth), _pass_on(back, writer))
                finally:
                    forth.close()
            except OSError:
                writer.transport.abort()
            finally:
                writer.close()


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()
    with suppress(OSError):  # the other side has gone already
        sink.write_eof()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
