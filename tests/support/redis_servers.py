"""Real Redis servers on free ports: one, a cluster of three masters, or a master and a replica with sentinels."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from msgspec.structs import replace

from handrail.stores import Append, Delete, Put
from handrail.stores.redis import RedisStore
from patience import PATIENCE

MEMORY_ONLY = ("--save", "", "--appendonly", "no")
ON_DISK = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")


def require_redis() -> None:
    """Skip the test where there is no redis-server; fail it under HANDRAIL_REQUIRE_PEERS=1."""
    if shutil.which("redis-server") is None:
        reason = "redis-server is not installed: run make peers"
        if os.environ.get("HANDRAIL_REQUIRE_PEERS") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def free_port() -> int:
    """Return a port that is free now, also the one that a server of a cluster adds 10,000 to."""
    while True:
        with socket.socket() as one, socket.socket() as bus:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port > 55_000:
                continue
            with suppress(OSError):
                bus.bind(("127.0.0.1", port + 10_000))
                return port


def until(is_so: Callable[[], object], what: str) -> None:
    """Ask again and again, for as long as the patience of tests lasts."""
    end = time.monotonic() + PATIENCE
    while True:
        with suppress(redis.RedisError, OSError):
            if is_so():
                return
        if time.monotonic() > end:
            raise TimeoutError(f"waited {PATIENCE:g} s for {what}")
        time.sleep(0.02)


class RedisServer:
    """One redis-server with a folder of its own. `stop` ends it; `kill` and `start` are a crash and a restart."""

    def __init__(self, *options: str, port: int = 0, sentinel: str = "") -> None:
        self.port = port or free_port()
        self.user: str | None = None  # that commands are run as, if the default one has a password
        self.folder = Path(tempfile.mkdtemp(prefix="handrail-redis-"))
        self._command = ["redis-server"]
        if sentinel:
            config = self.folder / "sentinel.conf"
            config.write_text(sentinel)
            self._command += [str(config), "--sentinel"]
        self._command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            # A session of its own: what stops the tests does not stop it first.
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        try:
            until(self._answers, "redis-server")
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        try:
            return bool(self.command("PING"))
        except redis.AuthenticationError:
            return True

    def command(self, *words: bytes | str | int) -> Any:
        """Run a command on a connection of its own."""
        password = self.user and "any"
        with redis.Redis(
            port=self.port, socket_timeout=PATIENCE, protocol=2, username=self.user, password=password
        ) as client:
            client.response_callbacks.clear()  # answers as they come
            return client.execute_command(*words)

    def info(self, section: str) -> dict[str, str]:
        lines = self.command("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def clients(self) -> list[dict[str, str]]:
        """Return what the server knows of each connection of a store."""
        lines = self.command("CLIENT", "LIST").decode().splitlines()
        clients = [dict(field.split("=", 1) for field in line.split(" ")) for line in lines]
        return [each for each in clients if each["name"] == "handrail"]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def url(self, userinfo: str = "", database: int = 0) -> str:
        return f"redis://{userinfo}{'@' if userinfo else ''}127.0.0.1:{self.port}/{database}"

    def kill(self) -> None:
        """End the server as a crash does; `start` starts it again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_ok(server: RedisServer) -> bool:
    return b"cluster_state:ok" in server.command("CLUSTER", "INFO")


class RedisCluster:
    """Three masters on loopback, which share the slots."""

    def __init__(self) -> None:
        options = (*MEMORY_ONLY, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        self.servers = [RedisServer(*options) for _ in range(3)]
        addresses = [f"127.0.0.1:{each.port}" for each in self.servers]
        create = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
        subprocess.run(create, check=True, capture_output=True, timeout=PATIENCE)
        until(
            lambda: all(b"cluster_state:ok" in each.command("CLUSTER", "INFO") for each in self.servers), "the cluster"
        )

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{each.port}" for each in self.servers)

    def stop(self) -> None:
        for server in self.servers:
            server.stop()


class Sentinels:
    """A master, a replica, and sentinels that watch them under the name `fleet`."""

    def __init__(self, sentinels: int = 1, *options: str) -> None:
        self.master = RedisServer(*options or MEMORY_ONLY)
        replica_of = ("--replicaof", f"127.0.0.1 {self.master.port}", "--repl-diskless-sync-delay", "0")
        self.replica = RedisServer(*options or MEMORY_ONLY, *replica_of)
        quorum = sentinels // 2 + 1
        config = (
            f"sentinel monitor fleet 127.0.0.1 {self.master.port} {quorum}\n"
            "sentinel down-after-milliseconds fleet 500\nsentinel failover-timeout fleet 2000\n"
        )
        self.sentinels = [RedisServer(sentinel=config) for _ in range(sentinels)]
        until(lambda: self.replica.info("replication")["master_link_status"] == "up", "the replica")
        until(lambda: all(self._knows_all(each, sentinels) for each in self.sentinels), "the sentinels")

    def _knows_all(self, sentinel: RedisServer, count: int) -> bool:
        [*values] = sentinel.command("SENTINEL", "MASTER", "fleet")
        state = dict(zip(values[::2], values[1::2], strict=True))
        return int(state[b"num-slaves"]) == 1 and int(state[b"num-other-sentinels"]) == count - 1

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        return f"redis+sentinel://{hosts}/fleet"

    def stop(self) -> None:
        for server in (*self.sentinels, self.replica, self.master):
            server.stop()


@functools.cache
def shared_server() -> RedisServer:
    """Return the server that all tests of this process share; each has a store of its own name."""
    require_redis()
    server = RedisServer(*MEMORY_ONLY)
    atexit.register(server.stop)
    return server


@functools.cache
def shared_cluster() -> RedisCluster:
    require_redis()
    cluster = RedisCluster()
    atexit.register(cluster.stop)
    return cluster


@contextmanager
def slow_way(port: int, seconds: float) -> Iterator[int]:
    """A port that leads to another one, by a way on which every byte takes so long."""

    async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await source.read(65536):
            loop.call_later(seconds, sink.write, data)
        loop.call_later(seconds, sink.close)

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            back, forth = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pass_on(reader, forth), pass_on(back, writer))

    async def serve() -> None:
        server, stop = await asyncio.start_server(lead, "127.0.0.1", 0), asyncio.Event()
        port: int = server.sockets[0].getsockname()[1]
        ready.set_result((port, partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)))
        await stop.wait()
        server.close()

    ready = Future[tuple[int, Callable[[], object]]]()
    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    port_before, stop = ready.result(PATIENCE)
    try:
        yield port_before
    finally:
        stop()
        thread.join(PATIENCE)


def fresh_name() -> str:
    return f"test-{secrets.token_hex(6)}"


SCALE = 1000  # times as long as a test says, so that its own duration does not matter

_SHIFT = """
for _, name in ipairs(redis.call('KEYS', ARGV[1])) do
  local till = redis.call('PEXPIRETIME', name)
  if redis.call('TYPE', name).ok == 'zset' and name:sub(-2) == '}e' then
    for _, member in ipairs(redis.call('ZRANGE', name, 0, -1)) do
      redis.call('ZINCRBY', name, -ARGV[2], member)
    end
  end
  if till > 0 then
    redis.call('PEXPIREAT', name, till - ARGV[2])
  end
end
"""


class TimedRedisStore(RedisStore):
    """A store whose time can be moved on: all ends of what it keeps are moved back instead."""

    def __init__(self, url: str, servers: Sequence[RedisServer]) -> None:
        self._pattern = fresh_name()
        self._servers = servers
        self._clients = [redis.Redis(port=each.port, socket_timeout=PATIENCE, protocol=2) for each in servers]
        super().__init__(url, name=self._pattern)

    def pass_time(self, seconds: float) -> None:
        for client in self._clients:
            client.eval(_SHIFT, 0, f"handrail:1:{{{self._pattern}:*", str(round(seconds * SCALE * 1000) + 1))

    async def close(self) -> None:
        await super().close()
        for client in self._clients:
            client.close()

    def count_indexed(self, tag: str) -> int:
        """Return how many keys of a tag the index has."""
        name = f"handrail:1:{{{self._pattern}:{tag}}}i"
        for server in self._servers:
            with suppress(redis.ResponseError):  # another one has the slot
                return int(server.command("ZCARD", name))
        raise AssertionError(f"no server has {name}")

    async def commit(self, changes: Sequence[Put | Delete | Append]) -> bool:
        return await super().commit([each if isinstance(each, Delete) else _scaled(each) for each in changes])

    async def add(self, key: str, amount: int = 1, *, ttl: float | None = None) -> int:
        return await super().add(key, amount, ttl=ttl and ttl * SCALE)

    async def append(self, log: str, value: bytes, *, keep: int, ttl: float | None = None) -> int:
        return await super().append(log, value, keep=keep, ttl=ttl and ttl * SCALE)


def _scaled(change: Put | Append) -> Put | Append:
    return replace(change, ttl=change.ttl and change.ttl * SCALE)
