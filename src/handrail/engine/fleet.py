"""A fleet: the replicas of one server that share a store. They seal with one key, and each one lists itself."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from secrets import token_hex

from msgspec import Struct
from msgspec.json import decode, encode

from handrail import __version__, stores
from handrail.engine.core import Engine
from handrail.protocol.seal import KEY_HINT
from handrail.stores import Store, StoreError, is_url

__all__ = ["Replica", "joined", "replicas_in"]

log = logging.getLogger("handrail")

BEAT_SECONDS = 5.0
REPLICA_TTL_SECONDS = 20.0
NOTE_TTL_SECONDS = 30 * 86_400.0  # of the key and the name of a server that no replica has for so long
BEATS_PER_NOTE = 720  # the key and the name are noted anew each hour
PREFIX = "replica:"
SERVER_PREFIX = "server:"  # in the part of a store that all servers share
KEY_NOTE = "sealing-key"


class Replica(Struct, frozen=True):
    """One process of a server, as it describes itself every few seconds."""

    id: str
    host: str
    process: int
    version: str  # of this package
    server_version: str
    started: float
    calls: int  # in flight
    beat: int  # grows while the replica lives


async def replicas_in(store: Store) -> list[Replica]:
    """Return the replicas of the server that a store was opened for; one that died is there for 20 seconds more."""
    return [decode(value, type=Replica) for _, value in await store.scan(PREFIX)]


async def servers_in(url: str) -> list[str]:
    """Return the names of the servers that have shared the store of a URL in the last thirty days."""
    directory = stores.open(url)
    try:
        return [key.removeprefix(SERVER_PREFIX) for key, _ in await directory.scan(SERVER_PREFIX)]
    finally:
        await directory.close()


async def _register(url: str, name: str) -> None:
    """Note the name of a server where commands find it: each server has keys of its own."""
    directory = stores.open(url)
    try:
        await directory.put(SERVER_PREFIX + name, b"", ttl=NOTE_TTL_SECONDS)
    finally:
        await directory.close()


@asynccontextmanager
async def joined(engine: Engine, store: Store) -> AsyncIterator[None]:
    """Be a replica in `store` while the context is open. A StoreError refuses a replica that seals with another key."""
    if not engine.has_shared_key:
        raise StoreError(
            f"HANDRAIL_KEY is not set: all replicas that share a store need the same key to read each other's"
            f" sessions; {KEY_HINT}"
        )
    fingerprints, place = engine.seal.fingerprints, engine.guard_options.get("store")

    async def note() -> None:
        await _note_key(fingerprints, store)
        if is_url(place):
            await _register(str(place), engine.identity.name)

    await note()
    started, identity = engine.clock(), token_hex(6)

    def replica(beat: int) -> bytes:
        calls = 0 if engine.in_flight is None else len(engine.in_flight.tasks)
        host, server_version = socket.gethostname(), engine.identity.version
        return encode(Replica(identity, host, os.getpid(), __version__, server_version, started, calls, beat))

    async def beat() -> None:
        number = 0
        while True:
            try:
                await store.put(PREFIX + identity, replica(number), ttl=REPLICA_TTL_SECONDS)
                if number % BEATS_PER_NOTE == BEATS_PER_NOTE - 1:
                    await note()
            except StoreError as problem:
                log.warning("fleet: this replica is not listed: %s", problem)
            number += 1
            await asyncio.sleep(BEAT_SECONDS)

    task = asyncio.get_running_loop().create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        with suppress(StoreError):
            await store.delete(PREFIX + identity)


async def _note_key(fingerprints: list[str], store: Store) -> None:
    """Note the key that this replica seals with, unless it cannot open what the others seal."""
    own = fingerprints[0].encode()
    while not await store.put(KEY_NOTE, own, ttl=NOTE_TTL_SECONDS, if_absent=True):
        noted = await store.get(KEY_NOTE)
        if noted is None:
            continue
        if noted.decode() not in fingerprints:
            raise StoreError(
                "this replica has another key than those that share its store: give it the same HANDRAIL_KEY, or, to"
                " replace a key, both with a comma between them"
            )
        if await store.put(KEY_NOTE, own, ttl=NOTE_TTL_SECONDS, if_equals=noted):
            return
