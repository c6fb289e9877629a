"""Guarded servers in processes of their own, which die where a test says: `python servers_guarded.py FD`.

That process is a nursery: it has imported everything, and forks a server for each message of its socket, on the
descriptors that come along. The tests use the rest: `Nursery` starts servers, `StdioConnection` talks to one.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NoReturn, cast
from urllib.parse import urlsplit

from msgspec import convert

import handrail.audit.log as trails
import handrail.engine.guard_set as gates
import handrail.stores.sqlite as sqlite
from handrail import Call, Server
from handrail.approvals.queue import Approval, ApprovalQueue, Approvals
from handrail.audit.sqlite import SqliteTable
from handrail.engine.approval_flow import ApprovalFlow
from handrail.engine.call_state import CallState
from handrail.engine.inflight import InFlightCalls
from handrail.engine.outcome import intent_record, outcome_record
from handrail.engine.reply_channel import Reply
from handrail.guards.identity import ApiKeys
from handrail.guards.limits import Rates
from handrail.transports.http.exchange import HttpResponse
from patience import PATIENCE, cpu_of
from wires import Wire

KEY = sha256(b"one").digest()  # that several processes have
STEPS = ("asked", "decided", "agreed", "intending", "writing", "written", "intended", "done", "recorded")
"""Where a server can be told to die: from a question that is filed to an answer that may leave."""


# The server


def make(options: dict[str, Any]) -> Server:
    """Tools whose effects are lines of a file: what it was done with, the call, and the approval if there was one."""
    server = Server(
        "shop",
        version="1",
        keys=[KEY],
        audit=options["audit"],  # None: there is none
        approvals=Approvals(**options.get("approvals", {})),
        rates=convert(options["rates"], Rates) if "rates" in options else None,
    )
    skipped = options.get("skipped", 0.0)
    server.engine.clock = lambda: time.time() + skipped
    effects = os.open(options["effects"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def have_effect(tool_call: Call, what: object) -> None:
        call = tool_call._state
        approval = "-" if call.approval is None else call.approval.id
        os.write(effects, f"{what} {call.serial} {approval}\n".encode())

    @server.tool(annotations={"destructiveHint": True}, description=options.get("description", "Cancels an order."))
    async def cancel(call: Call, order: int, fast: bool = False) -> str:
        have_effect(call, order)
        os.fsync(effects)
        if options.get("dies") == "done":
            die()
        return f"order {order} is cancelled"

    @server.tool
    async def act(call: Call, mark: str) -> str:
        """Has an effect, and asks nobody."""
        have_effect(call, mark)
        return mark

    @server.tool
    async def echo(text: str) -> str:
        """Give the text back."""
        return text

    def look(text: str) -> str:
        """Work as most tools do it, in a thread."""
        return text

    server.add(look)
    server.add(look, name="stare")

    @server.tool
    def held(call: Call, mark: str, gate: str, then: Literal["answer", "ask", "fail"] = "answer") -> str:
        """Has an effect, and goes on when there is a byte in `gate`, a named pipe."""
        have_effect(call, mark)
        with open(gate, "rb", 0) as file:
            said = file.read(1).decode()
        if then == "ask":
            call.blocking.ask("Go on?", {"type": "object", "properties": {}})
        if then == "fail":
            raise RuntimeError
        return said

    return server


def serve(options: dict[str, Any]) -> None:
    if "flood" in options:
        flood(**options["flood"])
        return
    if "dies" in options:
        DEATHS[options["dies"]]()
    if "wrong" in options:
        WRONGS[options["wrong"]]()
    server = make(options)
    if not options.get("http"):
        server.run()
        return
    auth: dict[str, Any] = {"auth": ApiKeys(options["keys"])} if "keys" in options else {}
    server.run(http="127.0.0.1:0", ready=lambda url: print(url, flush=True), **auth)


def flood(url: str, request: str, connections: int, count: int) -> None:
    """Make a request over so many connections, on each again as soon as it is answered; tell how, and after how many.

    It says so when as many as there are connections were answered, and when `count` were.
    """
    place, answers = (urlsplit(url).hostname, urlsplit(url).port), Counter[str]()
    with ExitStack() as stack, selectors.DefaultSelector() as ready:
        for _ in range(connections):
            made = stack.enter_context(socket.create_connection(place))
            made.sendall(request.encode())
            ready.register(made, selectors.EVENT_READ)
        for goal in (connections, count):
            while answers.total() < goal:
                for key, _ in ready.select():
                    made = cast(socket.socket, key.fileobj)
                    answers[made.recv(65536)[9:12].decode()] += 1
                    made.sendall(request.encode())
            print(json.dumps(answers), flush=True)


# Where it dies


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def put(owner: Any, name: str, what: Any) -> None:
    """Change a server that is about to begin; a name it does not have is a mistake of the test's."""
    getattr(owner, name)
    setattr(owner, name, what)


def _after(owner: Any, name: str, is_it: Callable[[Sequence[Any], Any], bool] = lambda args, found: True) -> None:
    """Die when this function has given what is meant."""
    inner = getattr(owner, name)

    async def outer(*args: Any, **more: Any) -> Any:
        found = await inner(*args, **more)
        if is_it(args, found):
            die()
        return found

    put(owner, name, outer)


def _is_decided(args: Sequence[Any], found: Approval) -> bool:
    return found.state != "pending"


def _dies_once_decided() -> None:
    _after(ApprovalQueue, "decide")
    _after(ApprovalQueue, "wait", _is_decided)


def _dies_before_the_intent() -> None:
    async def intend(gate: gates.GuardSet, call: CallState) -> None:
        die()

    put(gates.GuardSet, "record_intent", intend)


def _in_the_transaction(then: Callable[[], None]) -> None:
    inner = SqliteTable._append

    def outer(table: SqliteTable, bodies: list[bytes], changes: Mapping[int, Any], *more: Any) -> Any:
        done = inner(table, bodies, changes, *more)
        if any(b'"event":"intent"' in bodies[at] for at in changes):
            then()
        return done

    put(SqliteTable, "_append", outer)


def _dies_before_the_answer() -> None:
    def land(*more: Any) -> None:
        die()

    put(InFlightCalls, "_on_recorded", land)


def _dies_after_the_commit() -> None:
    def settle(*more: Any) -> None:
        die()

    def soon() -> None:
        put(sqlite, "_deliver_outcomes", settle)

    _in_the_transaction(soon)


DEATHS: dict[str, Callable[[], None]] = {
    "asked": lambda: _after(ApprovalQueue, "find_or_create"),
    "decided": _dies_once_decided,
    "agreed": lambda: _after(ApprovalFlow, "run"),
    "intending": _dies_before_the_intent,
    "writing": lambda: _in_the_transaction(die),
    "written": _dies_after_the_commit,
    "intended": lambda: _after(gates.GuardSet, "record_intent"),
    "done": lambda: None,  # the tool sees to it
    "recorded": _dies_before_the_answer,
}


# Servers that are not as they should be, for the tests to notice


def _acts_before_its_intent() -> None:
    inner = trails._Trail.submit

    def hand(trail: trails._Trail, record: Any, then: trails.Callback | None = None) -> None:
        if then is not None and record.event == "intent":
            inner(trail, record)
            then(None)
        else:
            inner(trail, record, then)

    put(trails._Trail, "submit", hand)


def _answers_before_its_outcome() -> None:
    def recorded(flight: InFlightCalls, call: CallState, how: Any, reply: Reply | None) -> Reply | None:
        assert call.trail is not None
        flight.loop.call_later(0.02, call.trail.submit, outcome_record(call, how))
        return reply

    put(InFlightCalls, "_record_outcome", recorded)


def _uses_an_approval_twice() -> None:
    async def intend(gate: gates.GuardSet, call: CallState) -> None:
        assert gate.trail is not None
        call.intended = await gate.trail.write(intent_record(call, None))

    put(gates.GuardSet, "record_intent", intend)


def _refuses_at_once() -> None:
    put(HttpResponse, "is_rate_limited", False)


WRONGS: dict[str, Callable[[], None]] = {
    "refused at once": _refuses_at_once,
    "effect first": _acts_before_its_intent,
    "answer first": _answers_before_its_outcome,
    "used twice": _uses_an_approval_twice,
}


def main(control: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 65536, 3)
        if not data:
            os.killpg(0, signal.SIGKILL)  # the test has gone, and nothing of this is left behind
        child = os.fork()
        if not child:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            for number, each in enumerate(descriptors):
                os.dup2(each, number)
                os.close(each)
            serve(json.loads(data))
            os._exit(0)
        for each in descriptors:
            os.close(each)
        control.send(b"%d" % child)


# The test's end of it


class Guarded:
    """A server that runs, or did."""

    def __init__(self, pid: int, source: int, sink: int, log: Path) -> None:
        self.pid = pid
        self.url = ""
        self.log = log
        self._source = source
        self._sink = sink
        self._is_over = False

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
        protocol = asyncio.StreamReaderProtocol(self.reader)
        self._reading, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(self._source, "rb", 0))
        writing, flow = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(self._sink, "wb", 0))
        self.writer = asyncio.StreamWriter(writing, flow, None, loop)

    async def line(self, patience: float = PATIENCE) -> bytes:
        """The next line of its output; empty if it has gone."""
        async with asyncio.timeout(patience):
            return await self.reader.readline()

    def kill(self) -> None:
        if not self._is_over:  # else the number may be that of another by now
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def gone(self) -> list[bytes]:
        """What it still had to say. An output that has ended is that of a process that has ended."""
        async with asyncio.timeout(PATIENCE):
            data = await self.reader.read()
        return data.split(b"\n")[:-1]

    async def close(self) -> None:
        self.kill()
        await self.gone()
        self._is_over = True
        self.writer.close()
        self._reading.close()

    def cpu(self) -> float:
        """Seconds of a processor it has used."""
        return cpu_of(self.pid)


class Nursery:
    def __init__(self, folder: Path) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = folder
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environ,
            start_new_session=True,
        )
        theirs.close()

    def close(self) -> None:
        self._control.close()
        self._process.wait(PATIENCE)

    @asynccontextmanager
    async def server(self, **options: Any) -> AsyncIterator[Guarded]:
        """A server with these options, which is there until it is killed, at the latest now."""
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        log = self._folder / "log"
        with log.open("ab") as file:
            socket.send_fds(self._control, [json.dumps(options).encode()], [theirs_in, theirs_out, file.fileno()])
        os.close(theirs_in)
        os.close(theirs_out)
        self._control.settimeout(PATIENCE)
        server = Guarded(int(self._control.recv(100)), ours_out, ours_in, log)
        await server.open()
        try:
            if options.get("http"):
                server.url = (await server.line()).decode().strip()
            yield server
        finally:
            await server.close()


class Pipe(Wire):
    """A client of a server on its standard input and output."""

    def __init__(self, revision: str, server: Guarded) -> None:
        super().__init__(revision, "stdio")
        self._server = server

    async def write(self, data: bytes) -> None:
        self._server.writer.write(data + b"\n")
        await self._server.writer.drain()

    async def read(self) -> bytes:
        line = await self._server.line()
        if not line.endswith(b"\n"):
            raise EOFError("the server has gone")
        return line[:-1]

    async def close(self) -> None:
        """Its server is closed by whoever started it."""


class Gate:
    """What `held` waits for."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "gate")
        os.mkfifo(self.path)
        self._file = os.open(self.path, os.O_RDWR)

    def let_go(self, count: int = 1) -> None:
        os.write(self._file, b"x" * count)

    def close(self) -> None:
        os.close(self._file)


async def command(folder: Path, *words: str) -> tuple[int, str]:
    """`handrail` in a process of its own, with its state in `folder`; its code, and what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "handrail",
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XDG_STATE_HOME": str(folder)},
        cwd=folder,
    )
    try:
        said, _ = await process.communicate()
    except asyncio.CancelledError:  # what it was wanted for has come of it already
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
        raise
    assert process.returncode is not None
    return process.returncode, said.decode()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
