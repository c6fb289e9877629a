"""Servers whose tools do what tools should not: print, block, hang, fork, ignore being cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

from handrail import Call, Limits, Server
from patience import PATIENCE

MARK = "NOT-A-MESSAGE"


class Odd(BaseException):
    """Not an `Exception`."""


def _tell(text: str) -> None:
    """Say something on standard error at once, for a test that waits for it."""
    os.write(2, f"{text}\n".encode())


def _say() -> None:
    print(MARK, "from a forked child", flush=True)
    os.write(1, f"{MARK} written by a forked child\n".encode())


def _add_loud_tools(server: Server) -> None:
    @server.tool
    def noisy() -> str:
        """Writes to standard output in every way there is."""
        print(MARK)
        print(MARK, flush=True)
        sys.__stdout__.write(f"{MARK}\n")  # type: ignore[union-attr]  # it is there, or the test fails
        sys.stdout.buffer.write(f"{MARK} in bytes\n".encode())
        os.write(1, f"{MARK} from a C library\n".encode())
        ctypes.CDLL(None).puts(f"{MARK} from the C library's own buffer".encode())
        os.system(f"echo {MARK} from a shell")
        subprocess.run([sys.executable, "-c", f"print('{MARK} from a child')"], check=True, timeout=PATIENCE)
        subprocess.run(f"(echo {MARK} from a grandchild &)", shell=True, check=True, timeout=PATIENCE)
        child = multiprocessing.get_context("fork").Process(target=_say)
        child.start()
        child.join(PATIENCE)
        return "done"

    @server.tool
    def greedy() -> str:
        """Reads standard input, itself and in a child."""
        own = sys.stdin.read()
        child = subprocess.run(["cat"], check=True, stdout=subprocess.PIPE, timeout=PATIENCE).stdout
        return f"{own!r} {child!r} {os.read(0, 100)!r}"

    @server.tool
    def asks_the_terminal() -> str:
        """Calls `input`."""
        return input("Your name? ")

    @server.tool
    def prints_for_ever() -> str:
        """A `def` tool that never ends and prints all the time."""
        _tell("running")
        while True:
            print(MARK)
            time.sleep(0.001)

    @server.tool
    async def prints_when_cancelled() -> str:
        """Will not be stopped, and complains."""
        _tell("running")
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                print(MARK, "when cancelled")


def _add_stuck_tools(server: Server) -> None:
    @server.tool
    async def blocks_loop(seconds: float = 60) -> str:
        """Sleeps where it should wait."""
        _tell("running")
        time.sleep(seconds)  # noqa: ASYNC251  # blocking the loop is the fault
        return "slept"

    @server.tool
    async def computes() -> str:
        """Keeps the main thread in C, for a minute or so; no signal handler can run there."""
        _tell("running")
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 100_000_000)
        return "computed"

    @server.tool
    def hangs() -> str:
        """A `def` tool that never ends."""
        _tell("running")
        threading.Event().wait()
        return "never"

    @server.tool
    async def hangs_elsewhere() -> str:
        """Hangs in a thread of the loop's own pool, which the interpreter waits for at its end."""
        _tell("running")
        await asyncio.to_thread(threading.Event().wait)
        return "never"

    @server.tool
    async def stubborn() -> str:
        """Ignores being cancelled."""
        _tell("running")
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    @server.tool
    async def starts_a_thread() -> str:
        """Leaves a thread behind that is not a daemon."""
        threading.Thread(target=threading.Event().wait).start()
        return "started"

    @server.tool
    async def ticks(call: Call) -> str:
        """Shows on standard error that it is alive."""
        at = 0
        while not call.cancelled:
            at += 1
            _tell(f"tick {at}")
            await asyncio.sleep(0.02)
        return "stopped"


def _add_plain_tools(server: Server) -> None:
    @server.tool
    async def echo(text: str) -> str:
        """Give the text back."""
        return text

    @server.tool
    def thread_echo(text: str) -> str:
        """Give the text back, from a worker thread."""
        return text

    @server.tool(inline=True)
    def inline_echo(text: str) -> str:
        """Give the text back, on the loop."""
        return text

    @server.tool
    async def after(seconds: float, text: str) -> str:
        """Answers later."""
        await asyncio.sleep(seconds)
        return text

    @server.tool
    def thread_after(seconds: float, text: str) -> str:
        """Answers later, from a worker thread."""
        time.sleep(seconds)
        return text

    @server.tool
    async def when(path: str, text: str) -> str:
        """Answers as soon as there is a file of this name."""
        _tell("running")
        while not os.path.exists(path):  # noqa: ASYNC110, ASYNC240  # another process makes the file
            await asyncio.sleep(0.005)
        return text

    @server.tool
    async def big(size: int, text: str = "") -> str:
        """A long text."""
        return text + "x" * size

    @server.tool
    async def takes_signals() -> str:
        """Handles a signal of its own, as asyncio offers."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)
        return "ready"

    @server.tool
    def forks() -> str:
        """Starts a child by fork, ends it by SIGTERM; how the child ended."""
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
        child.start()
        child.terminate()
        child.join(PATIENCE)
        code = child.exitcode
        child.kill()
        child.join()
        return str(code)

    @server.tool
    async def runs_a_program() -> str:
        """Runs a program the asynchronous way."""
        made = await asyncio.create_subprocess_exec("echo", "hello", stdout=asyncio.subprocess.PIPE)
        out, _ = await made.communicate()
        return out.decode().strip()

    def thrown(kind: str) -> BaseException:
        kinds: dict[str, type[BaseException]] = {
            each.__name__: each
            for each in (KeyboardInterrupt, SystemExit, GeneratorExit, Odd, asyncio.CancelledError, StopIteration)
        }
        return kinds[kind]()

    @server.tool
    async def raises(kind: str) -> str:
        """Raises what is not an `Exception`."""
        raise thrown(kind)

    @server.tool
    def raises_in_thread(kind: str) -> str:
        """The same, from a worker thread."""
        raise thrown(kind)

    @server.tool(inline=True)
    def raises_inline(kind: str) -> str:
        """The same, on the loop."""
        raise thrown(kind)


def faults(limits: Limits | None = None) -> Server:
    server = Server("faults") if limits is None else Server("faults", limits=limits)
    _add_loud_tools(server)
    _add_stuck_tools(server)
    _add_plain_tools(server)
    return server


def early() -> Server:
    print(MARK, "before the server runs")
    return faults()


def impatient() -> Server:
    """Gives a peer that does not read three seconds."""
    return faults(Limits(write_seconds=3.0, max_unsent_bytes=64 * 1024))


def hasty() -> Server:
    """Gives a peer that does not read three seconds, but keeps more for it."""
    return faults(Limits(write_seconds=3.0))


def patient() -> Server:
    """As `impatient`, but waits longer than any test does: for a reader, and for calls that run at its end."""
    return faults(Limits(write_seconds=10 * PATIENCE, max_unsent_bytes=64 * 1024, grace_seconds=10 * PATIENCE))


def lasting() -> Server:
    """Waits longer than any test does for calls that run at its end, so one that ends has not waited."""
    return faults(Limits(grace_seconds=10 * PATIENCE))


def tiny() -> Server:
    """Takes messages of a kilobyte."""
    return faults(Limits(max_message_bytes=1024))
