"""A process for `test_trail_faults.py` that does one thing for each line of its input, in a child that may die of it.

What the children say, and "ended" after each of them, goes to one pipe, so that nothing they acknowledged is lost.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import Any

from handrail.audit.log import Trail, TrailSettings, open_trail
from handrail.errors import HandrailError

WORKERS = 16


def say(**words: Any) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


async def load(path: str, effects: str, name: str, order: str, sync: Any, log: str) -> None:
    """Calls without end: intent, effect, outcome, answer; or, to be caught, in a wrong order."""
    if log:
        ctypes.CDLL(None).faults_watch(os.fsencode(Path(path).parent), os.open(log, os.O_RDWR | os.O_CREAT))
    trail = open_trail(path, TrailSettings(sync=sync))
    file = os.open(effects, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def work(worker: int) -> None:
        for i in count():
            call = f"{name}-{worker}-{i}"
            if order == "effect first":
                os.write(file, f"{call}\n".encode())
            await trail.write({"event": "intent", "call": call, "padding": "x" * 300})
            os.write(file, f"{call}\n".encode())
            if order == "answer first":
                say(call=call)
            await trail.write({"event": "outcome", "call": call})
            say(call=call)

    await asyncio.gather(*map(work, range(WORKERS)))


def tear(path: str, size: int) -> None:
    with Path(path).open("ab") as file:
        file.write(b'{"length":'.ljust(size))


async def faults(path: str, operation: str, n: int, torn: int) -> None:
    """Six calls, one after the other, of which the n-th operation fails; what was said of each."""
    lib = ctypes.CDLL(None)
    if operation:
        lib.faults_arm(os.fsencode(Path(path).parent), operation.encode(), n)
    said: list[str] = []
    trail: Trail | None = None
    for i in range(6):
        try:
            if i == 3 and trail is not None:  # as after a restart
                await trail.close()
                trail = None
            if i == 3 and torn:
                tear(path, torn)
            trail = trail or open_trail(path)
            await trail.write({"event": "intent", "call": str(i), "padding": "x" * 300})
            said.append("ok")
        except (HandrailError, OSError) as problem:
            said.append(f"{type(problem).__name__}: {problem}")
    if trail is not None:
        await trail.close()
    say(said=said, left=lib.faults_left() if operation else 0)


async def full(path: str) -> None:
    """Calls until the disk is full, some more, then as many again once there is space."""
    trail = open_trail(path)
    said: list[str] = []

    async def call(i: int) -> str:
        try:
            await trail.write({"event": "intent", "call": str(i), "padding": "x" * 3000})
        except HandrailError as problem:
            return f"{type(problem).__name__}: {problem}"
        return "ok"

    said.append(await call(0))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    said += await asyncio.gather(*map(call, range(1, 60)))
    said += [await call(i) for i in range(60, 120)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    said += [await call(i) for i in range(120, 180)]
    await trail.close()
    say(said=said)


DEEDS: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {"load": load, "faults": faults, "full": full}


def main() -> None:
    for line in sys.stdin:
        what = json.loads(line)
        do, after = DEEDS[what.pop("do")], what.pop("kill_after", None)
        child = os.fork()
        if not child:
            try:
                asyncio.run(do(**what))
            except BaseException as problem:
                say(problem=repr(problem))
            finally:
                os._exit(0)
        if after is not None:
            time.sleep(after)
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        say(ended=True)


if __name__ == "__main__":
    main()
