"""Child programs that misbehave in one way each, without the package: `python servers_child.py <behaviour> [argument]`.

`holder` is the other side: it opens links to some of them, tells so, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

MIB = 1024 * 1024


def say(data: bytes | str | dict[str, Any], end: bytes = b"\n") -> None:
    if isinstance(data, dict):
        data = json.dumps(data)
    sys.stdout.buffer.write((data.encode() if isinstance(data, str) else data) + end)
    sys.stdout.buffer.flush()


def complain(text: bytes) -> None:
    while text:
        text = text[os.write(2, text) :]


def heard() -> Iterator[bytes]:
    yield from iter(sys.stdin.buffer.readline, b"")


def ready(**more: Any) -> None:
    say({"ready": os.getpid(), **more})


def wait_for_ever() -> None:
    while True:
        signal.pause()


def echo(_: str) -> None:
    for line in heard():
        say(line, end=b"")


def over_long(size: str) -> None:
    say(b'{"long":"' + b"x" * int(size) + b'"}')
    say({"good": 1})
    wait_for_ever()


def noise(_: str) -> None:
    say("Server 1.0 starts \x1b[31m\u202e")
    say(" \t")
    say(' {"one": 1}')
    say(b"caf\xe9")
    say("[2]")
    say("x" * 1000)
    say({"three": 3})
    wait_for_ever()


def bursts(count: str) -> None:
    """So many messages in one write."""
    os.write(1, b'{"n":1}\n' * int(count))
    wait_for_ever()


def floods_stderr(size: str) -> None:
    ready()
    for _ in heard():
        complain(b"a line of forty bytes on standard error\n" * (int(size) // 40))
        complain(b"caf\xe9 \x1b[31m\r\nthe last")
        say({"flooded": True})


def endless_stderr(size: str) -> None:
    complain(b"x" * int(size))


def exits(code: str) -> None:
    complain(b"Traceback\n  something\n\nNoSuchModule: \x1b[31mthat\xff\n")
    sys.exit(int(code))


def dies(number: str) -> None:
    os.kill(os.getpid(), int(number))


def exits_on_first(_: str) -> None:
    next(heard())
    say({"last": 1})
    sys.exit(3)


def exits_full(count: str) -> None:
    """More on the way than is read at once."""
    for number in range(int(count)):
        say({"number": number, "filled": "x" * 1000})


def half_a_line(_: str) -> None:
    say({"whole": 1})
    say('{"jsonrpc":"2.0","id":1,"resu', end=b"")


def no_last_newline(_: str) -> None:
    say({"whole": 1}, end=b"")


def answers_at_the_end(_: str) -> None:
    ready()
    for _line in heard():
        pass
    say({"answer": "late"})


def ignores_end(_: str) -> None:
    ready()
    for _line in heard():
        pass
    wait_for_ever()


def ignores_everything(_: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ignores_end("")


def forks(how: str) -> None:
    """A child of ours keeps the pipes; `away` is one that leaves the group, and writes for ever."""
    ours, theirs = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        if how == "away":
            os.setsid()
        os.write(ours[1], b".")
        os.read(theirs[0], 1)
        lines = (json.dumps({"numbers": [1] * 500}) + "\n").encode() * 200
        while how == "away":
            os.write(1, lines)  # faster than anybody reads
        wait_for_ever()
    os.read(ours[0], 1)
    ready(child=child)
    os.write(theirs[1], b".")
    if how == "stays":
        ignores_end("")
    next(heard())


def never_reads(_: str) -> None:
    ready()
    wait_for_ever()


def reads_when_told(_: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    ready()
    signal.sigwait([signal.SIGUSR1])
    echo("")


def closes(descriptor: str) -> None:
    ready()
    next(heard())
    os.close(int(descriptor))
    say({"still": "here"}) if descriptor == "0" else None
    wait_for_ever()


def tells_env(_: str) -> None:
    say({"env": dict(os.environ), "cwd": os.getcwd(), "args": sys.argv[2:], "fds": sorted(os.listdir("/proc/self/fd"))})
    wait_for_ever()


def holder(_: str) -> None:
    from handrail.transports.subprocess import SubprocessTransport

    class Ear:
        def __init__(self) -> None:
            self.first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def on_message(self, message: bytes | bytearray, about: object = None) -> None:
            self.first.set_result(json.loads(message))

        def on_activity(self, about: object = None) -> None: ...
        def on_failure(self, problem: Exception, about: object = None) -> None: ...
        def on_stream(self) -> None: ...
        def on_discarded(self, why: str, *, too_long: bool = False) -> None: ...

    async def hold() -> None:
        said = []
        for behaviour in ["ignores_end", "ignores_everything", "never_reads", "ignores_end", "forks stays"]:
            ear = Ear()
            await SubprocessTransport([sys.executable, "-S", __file__, *behaviour.split()]).open(ear)
            said.append(await ear.first)
        fork = os.fork()  # as `multiprocessing` does; it has all that we had open
        if fork == 0:
            wait_for_ever()
        say({"servers": [each["ready"] for each in said], "grandchild": said[-1]["child"], "fork": fork})
        wait_for_ever()

    asyncio.run(hold())


if __name__ == "__main__":
    globals()[sys.argv[1]]([*sys.argv, ""][2])
