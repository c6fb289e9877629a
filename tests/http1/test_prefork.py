"""Several worker processes on one socket."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from faults import gone, until
from requirements import requirement
from wires_http1 import (
    LASTING,
    connected,
    get,
    linux,
    served,
)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def who(url: str) -> tuple[int, str]:
    """The process and the key that answer a new connection."""
    async with connected(url) as wire:
        pid, key = (await wire.text(get("pid"))).split()
        return int(pid), key


@linux
async def test_workers_share_a_socket_and_a_key() -> None:
    async with served(workers=2) as server:
        first, key = await who(server.url)
        os.kill(first, signal.SIGSTOP)
        second, same = await who(server.url)
        os.kill(first, signal.SIGCONT)
        assert {first, second} == set(children(server.process.pid))
        assert key == same
        assert len(key) > 40
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended(5) == 0
        assert gone(first) and gone(second)


@linux
async def test_workers_keep_the_key_they_are_given() -> None:
    async with served(workers=2, env={"HANDRAIL_KEY": "given"}) as server:
        assert (await who(server.url))[1] == "given"


@linux
async def test_a_worker_that_dies_is_replaced_and_the_others_serve() -> None:
    async with served(workers=2) as server:
        await who(server.url)
        before = set(children(server.process.pid))
        victim, other = before
        os.kill(victim, signal.SIGKILL)
        assert (await who(server.url))[0] != victim
        await until(lambda: len(set(children(server.process.pid)) - {victim}) == 2, "another has started")
        (new,) = set(children(server.process.pid)) - before
        os.kill(other, signal.SIGSTOP)
        assert (await who(server.url))[0] == new
        os.kill(other, signal.SIGCONT)
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended(5) == 0
        assert "ended unexpectedly" in await server.errors()


@linux
@requirement("P-12")
async def test_workers_end_when_their_parent_is_killed() -> None:
    async with served(workers=2) as server:
        await who(server.url)
        workers = children(server.process.pid)
        os.kill(server.process.pid, signal.SIGKILL)
        for pid in workers:
            await until(partial(gone, pid), "the worker has ended")


@linux
@requirement("P-12")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_to_parent_and_workers_lets_requests_answer(number: int) -> None:
    """As Ctrl-C in a terminal, and as service managers end a group of processes."""
    async with served(workers=2, grace=LASTING) as server, connected(server.url) as wire:
        await wire.send(get("wait"))
        await server.says("running")
        os.killpg(server.process.pid, number)
        assert (await wire.answer()).body == b"waited"
        assert await server.ended(5) == 0


@linux
@requirement("P-12")
async def test_blocked_and_stopped_workers_are_killed() -> None:
    async with served(workers=2, grace=0.3) as server, connected(server.url) as wire:
        await wire.send(get("block"))
        await server.says("running")
        workers = children(server.process.pid)
        os.kill(workers[0], signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended(0.3 + 1.5 + 1) == 0
        assert all(map(gone, workers))


@linux
async def test_a_second_interrupt_of_the_parent_kills_the_workers() -> None:
    async with served(workers=2, grace=LASTING) as server, connected(server.url) as wire:
        await wire.send(get("stubborn"))
        await server.says("running")
        workers = children(server.process.pid)
        server.process.send_signal(signal.SIGINT)
        await server.says("stop")
        server.process.send_signal(signal.SIGINT)
        assert await server.ended(2) == 130
        for pid in workers:
            await until(partial(gone, pid), "the worker has ended")


@linux
@pytest.mark.parametrize("workers", [1, 2])
async def test_an_application_that_does_not_start_is_not_started_again(workers: int) -> None:
    async with served(workers=workers, broken=True) as server:
        assert await server.ended(5) == 1
        assert "did not start" in await server.errors()
