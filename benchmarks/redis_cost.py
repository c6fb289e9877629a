"""What the store in Redis costs this process: `python benchmarks/redis_cost.py [--rounds 20]`.

A read and a change, one after the other and 64 at a time, by the store and by redis-py's own client, which sends the
same script. The rounds of both alternate, because on a machine with neighbours a second can cost twice what the one
before did. Compared is the CPU of this process, not that of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import redis.asyncio
from redis.exceptions import RedisError

from handrail import stores
from handrail.stores import Put
from handrail.stores.redis import COMMIT, RedisStore

TOGETHER = 64
CALLS = 1024  # of one program in one round
START_SECONDS = 10.0
Work = Callable[[], Awaitable[object]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=20)
    chosen = options.parse_args()
    if shutil.which("redis-server") is None:
        sys.exit("redis-server is not installed")
    with server() as port:
        asyncio.run(measure(port, chosen.rounds))


@contextmanager
def server() -> Iterator[int]:
    """Run a server without a disk; yield its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            end = time.monotonic() + START_SECONDS
            while time.monotonic() < end:
                with suppress(RedisError), redis.Redis(port=port) as client:
                    client.ping()
                    break
                time.sleep(0.05)
            yield port
        finally:
            process.terminate()
            process.wait()


async def measure(port: int, rounds: int) -> None:
    store = stores.open(f"redis://127.0.0.1:{port}")
    assert isinstance(store, RedisStore)
    plain = redis.asyncio.Redis(port=port)
    value = b"x" * 200
    await store.put("k:a", value, ttl=60)
    names = [name async for name in plain.scan_iter("*")]
    [key] = [name for name in names if name.endswith(b"v:k:a")]
    index, ends = (key.partition(b"}")[0] + each for each in (b"}i", b"}e"))

    async def plain_change() -> object:
        arguments = (index, ends, key, "put", "", "k:a", value, 60_000, "")
        return await plain.evalsha(COMMIT.digest, 3, *arguments)

    works: dict[str, tuple[Work, Work]] = {
        "get": (lambda: store.get("k:a"), lambda: plain.get(key)),
        "commit": (lambda: store.commit([Put("k:a", value, 60)]), plain_change),
    }
    print(f"{'':28}{'store µs':>10}{'redis-py µs':>13}{'ratio':>8}")
    for name, pair in works.items():
        for together in (1, TOGETHER):
            costs = [[await cost(work, together) for work in pair] for _ in range(rounds)]
            ours, theirs = (statistics.median(each) for each in zip(*costs, strict=True))
            ratio = statistics.median(one / other for one, other in costs)
            print(f"{f'{name}, {together} at a time':28}{ours:10.1f}{theirs:13.1f}{ratio:8.2f}")
    await plain.aclose()
    await store.close()


async def cost(work: Work, together: int) -> float:
    """Return the microseconds of CPU that one call takes this process."""
    began = time.process_time()
    for _ in range(CALLS // together):
        if together == 1:
            await work()
        else:
            await asyncio.gather(*(work() for _ in range(together)))
    return (time.process_time() - began) / CALLS * 1e6


if __name__ == "__main__":
    main()
