"""A server of `servers_faults.py` in a process of its own, on descriptors of the test's choice, and ways to hurt it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from checks import strict_json
from patience import PATIENCE, in_time

Json = Any
Object = dict[str, Any]

HERE = Path(__file__).resolve().parent
MODERN = "2026-07-28"
ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "rig", "version": "1"},
}


def opening(revision: str) -> list[bytes]:
    """What a client of this revision says first."""
    if revision == MODERN:
        return []
    params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "rig", "version": "1"}}
    return [
        _encoded({"jsonrpc": "2.0", "id": "open", "method": "initialize", "params": params}),
        b'{"jsonrpc":"2.0","method":"notifications/initialized"}',
    ]


def call(revision: str, ident: int | str, name: str, **arguments: Json) -> bytes:
    params: Object = {"name": name, "arguments": arguments}
    if revision == MODERN:
        params["_meta"] = ENVELOPE
    return _encoded({"jsonrpc": "2.0", "id": ident, "method": "tools/call", "params": params})


def _encoded(message: Json) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def text_of(answer: Object) -> str:
    """What a tool said, in whatever form its revision gives it."""
    result = answer["result"]
    if "toolResult" in result:
        told = result["toolResult"]
        return str(told["error"]) if isinstance(told, dict) else str(told)
    return str(result["content"][0]["text"])


def lines(*messages: bytes) -> bytes:
    return b"".join(message + b"\n" for message in messages)


class Victim:
    """A running server. Standard output is a pipe the test may leave unread; standard error is collected."""

    def __init__(self, process: asyncio.subprocess.Process, revision: str, out: asyncio.StreamReader | None) -> None:
        self.process = process
        self.pid = process.pid
        self.revision = revision
        self.out = out
        self.heard: list[Object] = []
        self._ids = 0

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    def close_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def open(self) -> None:
        """Shake hands, or say hello: either way it serves after this."""
        first = opening(self.revision)
        hello = {"jsonrpc": "2.0", "id": "open", "method": "server/discover", "params": {"_meta": ENVELOPE}}
        await self.write(lines(*(first or [_encoded(hello)])))
        assert (await self.message())["id"] == "open"

    async def message(self, patience: float = PATIENCE) -> Object:
        """The next line of standard output, which has to be a message."""
        assert self.out is not None
        async with asyncio.timeout(patience):
            line = await self.out.readline()
        if not line:
            raise EOFError(f"standard output has ended; standard error: {(await self.errors())[-2000:]!r}")
        message = strict_json(line.removesuffix(b"\n"))
        assert isinstance(message, dict) and message["jsonrpc"] == "2.0"
        return message

    async def ask(self, name: str, **arguments: Json) -> int:
        self._ids += 1
        await self.write(lines(call(self.revision, self._ids, name, **arguments)))
        return self._ids

    async def call(self, name: str, **arguments: Json) -> Object:
        ident = await self.ask(name, **arguments)
        while True:
            message = await self.message()
            if message.get("id") == ident:
                return message
            self.heard.append(message)

    async def rest(self) -> list[Object]:
        """Every message until the server closes its output."""
        assert self.out is not None
        async with asyncio.timeout(PATIENCE):
            data = await self.out.read()
        assert data == b"" or data.endswith(b"\n")
        return [strict_json(line) for line in data.split(b"\n")[:-1]]

    async def says(self, text: str) -> None:
        """Wait until a tool says this on standard error."""
        assert self.process.stderr is not None
        async with asyncio.timeout(PATIENCE):
            while text.encode() not in (line := await self.process.stderr.readline()):
                assert line, f"standard error has ended without {text!r}"

    async def errors(self) -> bytes:
        """The rest of standard error."""
        if self.process.stderr is None:
            return b""
        async with asyncio.timeout(PATIENCE):
            return await self.process.stderr.read()

    async def ended(self, within: float) -> int:
        """The exit code; `within` is promised for a machine that does nothing else."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                code = await self.process.wait()
        except TimeoutError:
            raise AssertionError(f"still running after {PATIENCE:g} s") from None
        in_time(time.monotonic() - began, within, "the end of the process")
        return code

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def memory(self) -> int:
        """The most bytes it ever had in memory, since `forget_memory`."""
        return _status(self.pid, "VmHWM")

    def forget_memory(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().split("\n"):
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name}")


@asynccontextmanager
async def victim(
    variant: str = "lasting",
    *,
    revision: str = "2025-11-25",
    opened: bool = True,
    env: dict[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[Victim]:
    """A server in a process of its own; whatever the test does, it is gone afterwards."""
    chosen = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "subject.py"),
        variant if ":" in variant else f"servers_faults:{variant}",
        limit=128 * 1024 * 1024,
        # Unbuffered, a print would be on the wire before any of our code runs.
        env={**os.environ, "PYTHONUNBUFFERED": "", **(env or {})},
        **{**chosen, **options},
    )
    server = Victim(process, revision, process.stdout)
    try:
        if opened:
            await server.open()
        yield server
    finally:
        await put_away(process)


async def put_away(process: asyncio.subprocess.Process, *, group: bool = False) -> None:
    """Kill it, with what it has started if that is its group, and close our ends of its pipes.

    Its death alone does not close them: a child of it, or only what it wrote last, keeps a pipe open. What the loop
    leaves open is then complained of in another test, when the garbage is collected.
    """
    with suppress(ProcessLookupError):
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        elif process.returncode is None:
            process.kill()
    await process.wait()
    process._transport.close()  # type: ignore[attr-defined]  # no public way closes them unread
    await asyncio.sleep(0)  # they are closed in the loop's next turn


async def rounds(count: int, one: Callable[[int], Awaitable[None]], *, at_once: int = 4) -> None:
    """Run `one(0)` … `one(count - 1)`, a few at a time; every failure is told."""
    turn = asyncio.Semaphore(at_once)

    async def run(number: int) -> None:
        async with turn:
            await one(number)

    found = await asyncio.gather(*map(run, range(count)), return_exceptions=True)
    wrong = [problem for problem in found if isinstance(problem, BaseException)]
    if wrong:
        raise ExceptionGroup(
            f"{len(wrong)} of {count} rounds failed",
            [each if isinstance(each, Exception) else RuntimeError(repr(each)) for each in wrong],
        )


async def until(condition: Callable[[], bool], what: str) -> float:
    """Wait until something outside of this process is true; how long it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > PATIENCE:
            raise AssertionError(f"not within {PATIENCE:g} s: {what}")
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has collected yet has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"
