"""The servers of a Redis: one, the master that sentinels name, or the masters of a cluster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any, TypeVar, cast

from msgspec import Struct
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ReadOnlyError, RedisError, ResponseError

from handrail.stores import StoreError
from handrail.stores.redis_connection import (
    COMMAND_SECONDS,
    Address,
    Command,
    ConnectionLost,
    RedisConnection,
    RedisUrl,
    address_text,
    describe_failure,
)

MAX_CONNECTIONS = 8  # of one store: to servers, one that listens, one to a sentinel
MAX_SERVERS = MAX_CONNECTIONS - 2
MAX_ATTEMPTS = 4  # of one command: to other servers, as they say
MAX_BACKOFF_SECONDS = 1.0  # between two attempts to connect

NAME_CONNECTION = ("CLIENT", "SETNAME", "handrail")

MASTER: Address = ("", 0)
"""Stands for the address of the master, which the sentinels know."""


T = TypeVar("T")


class _Server(Struct, eq=False):
    """One server, and the connection to it."""

    callbacks: dict[str, Any] = {}
    connection: RedisConnection | None = None
    connecting: asyncio.Task[RedisConnection] | None = None
    failures: int = 0
    retry_at: float = 0.0  # of the loop's clock
    problem: str = ""


class RedisNodes:
    """Sends commands to the server that has their slot. It connects by itself, and again after a failure."""

    def __init__(
        self,
        url: RedisUrl,
        check: Command,
        on_checked: Callable[[Any], str],
        *,
        on_push: Callable[[Any], bool],
        on_close: Callable[[str], None],
    ) -> None:
        self.url = url
        self._check = check  # sent first on each connection; `on_checked` returns what is wrong by its reply
        self._on_checked = on_checked
        self._servers: dict[Address, _Server] = {}
        self._listener = _Server({"on_push": on_push, "on_close": on_close})
        self._slots: dict[int, Address] = {}
        self._is_stale = True  # the slots have to be asked for
        self._refreshing: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def trouble(self) -> str:
        """Why a server could not be reached the last time, until it can be again."""
        return next((each.problem for each in (*self._servers.values(), self._listener) if each.problem), "")

    async def call(self, name: bytes, commands: Sequence[Command]) -> list[Any]:
        """Send commands to the server of the slot of `name`, and return their replies; errors are values."""
        deadline = asyncio.get_running_loop().time() + COMMAND_SECONDS
        address = await self._locate(name, deadline)
        asking = False
        for attempt in range(MAX_ATTEMPTS):
            server = self._servers.get(address)
            connection = None if server is None else server.connection
            if connection is None or connection.close_reason:
                connection = await self._command_connection(address, deadline)
            try:
                replies = await connection.request([("ASKING",), *commands] if asking else commands, deadline)
            except ConnectionLost as lost:
                if (server := self._servers.get(address)) is not None and server.connection is connection:
                    server.problem = str(lost)
                if lost.sent or attempt:
                    raise
                continue
            replies = replies[asking:]
            match replies[0]:
                case AskError() as redirection:  # MovedError is one, too
                    asking = not isinstance(redirection, MovedError)
                    address = (redirection.host or connection.address[0], redirection.port)
                    if not asking:
                        self._slots[key_slot(name)] = address
                        self._is_stale = True
                case ReadOnlyError():  # of a master that is a replica now: a new connection finds the new master
                    connection.close("it is a read-only replica")
                    return replies
                case ClusterDownError():
                    self._is_stale = True
                    return replies
                case _:
                    return replies
        raise StoreError(f"redis {address_text(address)}: the cluster is moving this slot; try again")

    async def masters(self) -> list[Address]:
        """Return the addresses of all servers that have a slot."""
        address = await self._locate(b"", asyncio.get_running_loop().time() + COMMAND_SECONDS)
        return sorted(set(self._slots.values())) if self.url.kind == "cluster" else [address]

    async def call_at(self, address: Address, *commands: Command) -> list[Any]:
        """Send commands to one of the masters, and return their replies; errors are values."""
        deadline = asyncio.get_running_loop().time() + COMMAND_SECONDS
        connection = await self._command_connection(address, deadline)
        return await connection.request(commands, deadline)

    async def listener(self, name: bytes) -> RedisConnection:
        """Return the connection that listens, to the server that has the slot of `name`."""
        deadline = asyncio.get_running_loop().time() + COMMAND_SECONDS
        return await self._connection(self._listener, await self._locate(name, deadline), deadline)

    def stop_listening(self, reason: str) -> None:
        if self._listener.connection is not None:
            self._listener.connection.close(reason)

    def follow(self, name: bytes, moved: Exception | None = None) -> None:
        """Close the connection that listens if the slot of `name` has another server now."""
        if isinstance(moved, MovedError):
            self._slots[key_slot(name)] = (moved.host, moved.port)
        master = self._servers.get(MASTER)
        if self.url.kind == "cluster":
            current = self._slots.get(key_slot(name))
        else:
            current = master.connection.address if master is not None and master.connection is not None else None
        listener = self._listener.connection
        if listener is not None and current not in (None, listener.address):
            listener.close("another server is the master now")

    async def _locate(self, name: bytes, deadline: float) -> Address:
        if self.url.kind != "cluster":
            return MASTER if self.url.kind else self.url.hosts[0]
        if self._is_stale:
            if self._refreshing is None:
                self._refreshing = _start(self._refresh())
            await _within(self._refreshing, deadline, "the slots of the cluster are not known")
        slot = key_slot(name)
        if slot not in self._slots:
            raise StoreError(f"redis {self.url}: slot {slot} has no server")
        return self._slots[slot]

    async def _command_connection(self, address: Address, deadline: float) -> RedisConnection:
        server = self._servers.get(address)
        if server is None:
            self._make_room()
            server = self._servers[address] = _Server()
        return await self._connection(server, address, deadline)

    async def _connection(self, server: _Server, address: Address, deadline: float) -> RedisConnection:
        if self._closed:
            raise StoreError("the store was closed")
        if server.connection is not None and not server.connection.close_reason:
            return server.connection
        if server.connecting is None:
            if asyncio.get_running_loop().time() < server.retry_at:
                raise StoreError(server.problem)
            server.connecting = _start(self._connect(address, server))
        return await _within(server.connecting, deadline, self._silence(address))

    def _make_room(self) -> None:
        if len(self._servers) < MAX_SERVERS:
            return
        for address, server in self._servers.items():
            if server.connecting is None and (server.connection is None or server.connection.is_idle):
                if server.connection is not None:
                    server.connection.close("another server is asked")
                del self._servers[address]
                return
        raise StoreError(f"redis {self.url}: all {MAX_SERVERS} connections are in use")

    async def _connect(self, address: Address, server: _Server) -> RedisConnection:
        try:
            server.connection = connection = await self._open_checked(address, server.callbacks)
            server.failures, server.problem = 0, ""
            return connection
        except StoreError as problem:
            self._is_stale = True
            server.failures, server.problem = server.failures + 1, str(problem)
            longest = min(MAX_BACKOFF_SECONDS, 0.05 * 2**server.failures)
            server.retry_at = asyncio.get_running_loop().time() + random.uniform(longest / 2, longest)
            raise
        finally:
            server.connecting = None

    async def _open_checked(self, address: Address, callbacks: dict[str, Any]) -> RedisConnection:
        """Open a connection and check that the server does what is needed."""
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                real_address = await self._ask_sentinels() if address == MASTER else address
                connection = await self._open(real_address, **callbacks)
                try:
                    # The name is for the operator, who sees it in CLIENT LIST; it may be refused.
                    role, checked, _ = await connection.request([("ROLE",), self._check, NAME_CONNECTION])
                    if self.url.kind == "sentinel" and (isinstance(role, ResponseError) or role[0] != b"master"):
                        raise StoreError(
                            f"redis {address_text(real_address)}: it is no master; a failover is under way"
                        )
                    if problem := self._on_checked(checked):
                        raise StoreError(f"redis {address_text(real_address)}: {problem}")
                except BaseException:
                    connection.close("it cannot be used")
                    raise
                return connection
        except TimeoutError:
            raise StoreError(self._silence(address)) from None

    async def _open(self, address: Address, *, to_sentinel: bool = False, **callbacks: Any) -> RedisConnection:
        connection = self.url.connection(address, to_sentinel=to_sentinel)
        try:
            await cast(Awaitable[None], connection.connect())  # type: ignore[no-untyped-call]  # of the library
        except BaseException as problem:
            await connection.disconnect(nowait=True)
            if not isinstance(problem, RedisError | OSError):
                raise
            raise StoreError(f"redis {address_text(address)}: {describe_failure(problem)}") from None
        return RedisConnection(address, connection, **callbacks)

    async def _ask_sentinels(self) -> Address:
        problem = ""
        for address in self.url.hosts:
            try:
                async with asyncio.timeout(COMMAND_SECONDS / (len(self.url.hosts) + 1)):
                    connection = await self._open(address, to_sentinel=True)
                    try:
                        [reply] = await connection.request([("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.url.service)])
                    finally:
                        connection.close("the sentinel was asked")
            except (StoreError, TimeoutError) as failure:
                problem = str(failure) or f"redis {address_text(address)}: no answer from this sentinel"
                continue
            if isinstance(reply, list):
                return reply[0].decode(), int(reply[1])
            answer = describe_failure(reply) if reply else f"it watches no service named {self.url.service!r}"
            problem = f"redis sentinel {address_text(address)}: {answer}"
        raise StoreError(problem)

    async def _refresh(self) -> None:
        """Ask any server which one has which slots."""
        loop = asyncio.get_running_loop()
        problem = StoreError(f"redis {self.url}: no server")
        try:
            for address in dict.fromkeys([*self._servers, *self.url.hosts]):
                try:
                    connection = await self._command_connection(address, loop.time() + COMMAND_SECONDS)
                    [reply] = await connection.request([("CLUSTER", "SLOTS")])
                except StoreError as failure:
                    problem = failure
                    continue
                if isinstance(reply, ResponseError):
                    problem = StoreError(f"redis {address_text(address)}: {describe_failure(reply)}")
                    continue
                self._slots = {
                    slot: ((host or b"").decode() or address[0], port)
                    for first, last, (host, port, *_), *_ in reply
                    for slot in range(first, last + 1)
                }
                self._is_stale = False
                self._forget_servers()
                return
            raise problem
        finally:
            self._refreshing = None

    def _forget_servers(self) -> None:
        """Close the connections to servers that have no slot any more, or another name."""
        for address in self._servers.keys() - set(self._slots.values()):
            server = self._servers[address]
            server.problem = ""
            if server.connecting is None and server.connection is not None and server.connection.is_idle:
                server.connection.close("it has no slot of the cluster")
                del self._servers[address]

    def _silence(self, address: Address) -> str:
        hint = "; does it speak TLS?" if self.url.tls else ""
        return f"redis {self._text(address)}: no answer to a new connection within {COMMAND_SECONDS:g} s{hint}"

    def _text(self, address: Address) -> str:
        return str(self.url) if address == MASTER else address_text(address)

    async def close(self) -> None:
        """Close all connections. What waits for an answer gets a StoreError."""
        self._closed = True
        servers = [*self._servers.values(), self._listener]
        tasks = [task for task in (self._refreshing, *(each.connecting for each in servers)) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection in (each.connection for each in servers):
            if connection is not None:
                connection.close("the store was closed")
                await connection.wait_closed()


def _start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start work that callers share; none of them ends it by being cancelled."""
    task = asyncio.get_running_loop().create_task(work, context=Context())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps all callers have gone
    return task


async def _within(task: asyncio.Task[T], deadline: float, text: str) -> T:
    loop = asyncio.get_running_loop()
    await asyncio.wait([task], timeout=max(deadline - loop.time(), 0))
    if not task.done():
        raise StoreError(text)
    if task.cancelled():
        raise StoreError("the store was closed")
    if (problem := task.exception()) is not None:
        raise StoreError(str(problem)) from problem  # a new one for each caller
    return task.result()
