"""Signed checkpoints of an audit log, without which a person who can write the file could write all of it anew.

A checkpoint is a record with a statement and its Ed25519 signature. The statement names the heads of the chains in the
log as they were on the disk, so it covers every record before them; the record of a checkpoint comes after them. A
writer names all chains at first, and later those that have changed since, 256 at a time: what each of many replicas
signs does not grow with their number.

    {…,"event":"checkpoint","statement":{"writer":"<16 digits>","time":"…","every_records":1000,"every_seconds":300.0,
     "heads":{"":"<hash>@1..2741,365d"},"key":"ed25519:…"},"signature":"…"}

The name of a chain is that of its writer, or empty where a file has one chain. `next` is the key that follows `key`:
from then on `key` counts for nothing. `closes` says that the writer has ended. What is sent elsewhere is the object of
`statement` and `signature` alone, and only once its record is in the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct, to_builtins
from msgspec.json import encode

from handrail.audit.format import NotedHead
from handrail.errors import HandrailError, missing_extra
from handrail.model import Object
from handrail.protocol.http_rules import HttpPost, is_secure_url
from handrail.text.controls import one_line

if TYPE_CHECKING:
    from handrail.audit.signing import SigningKey

__all__ = ["CheckpointWriter", "Checkpoints", "Statement", "is_path"]

log = logging.getLogger("handrail")

LEAST_SECONDS = 1.0  # from one checkpoint to the next, however many records there are
DELIVERY_SECONDS = 10.0
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 300.0
CLOSE_SECONDS = 5.0  # for deliveries that are left when the log is closed
MAX_WAITING = 100  # checkpoints that wait for one destination: the oldest gives way
MAX_HEADS = 256  # of one checkpoint
NEVER = 1 << 62


class Checkpoints(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Signed checkpoints of the audit log, which show that it was not written anew."""

    key: Annotated[
        str, Meta(description="The private key: a file, env:VARIABLE, or command:PROGRAM …; empty: not signed.")
    ] = ""
    previous_key: Annotated[
        str, Meta(description="The private key before `key`, for one start: it signs that `key` follows.")
    ] = ""
    records: Annotated[int, Meta(ge=1, description="Records after which the log is signed again.")] = 1000
    seconds: Annotated[float, Meta(gt=0, description="Seconds after which records that are not signed yet are.")] = (
        300.0
    )
    file: Annotated[
        str, Meta(description="A second file for the checkpoints, best on another machine or append-only.")
    ] = ""
    webhook: Annotated[
        str, Meta(description="An https address, or http on this machine, that each checkpoint is posted to.")
    ] = ""
    required: Annotated[bool, Meta(description="Refuse new calls while the log cannot be signed.")] = False

    def __post_init__(self) -> None:
        if not self.key:
            for name in ("previous_key", "file", "webhook", "required"):
                if getattr(self, name):
                    raise ValueError(f"checkpoints.{name}: nothing is signed without checkpoints.key; name the key")
            return
        if self.records < 1:
            raise ValueError(f"checkpoints.records: {self.records} is less than 1")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"checkpoints.seconds: {self.seconds!r} is not a number of seconds above 0")
        if self.webhook and not is_secure_url(self.webhook):
            # The address is not repeated: it may have a token in it.
            raise ValueError("checkpoints.webhook: https is needed, or http to this machine, and no password in it")
        if self.webhook and find_spec("aiohttp") is None:
            raise missing_extra("http", "checkpoints.webhook needs aiohttp")
        if find_spec("cryptography") is None:
            raise missing_extra("signing", "checkpoints.key needs cryptography")


def is_path(source: str) -> bool:
    """Return whether the place of a key is a file."""
    return bool(source) and not source.startswith(("env:", "command:"))


class Statement(Struct, frozen=True, omit_defaults=True):
    """What is signed. Members of later versions are signed with the rest, and not read."""

    writer: str
    time: str
    every_records: int
    every_seconds: float
    heads: Mapping[str, str]
    key: str
    next: str = ""
    closes: bool = False


class CheckpointWriter:
    """Signs the log of one writer when enough is new in it. Nothing of it is on the way of a call."""

    def __init__(
        self,
        settings: Checkpoints,
        name: str,
        writer: str,
        heads: Callable[[], Awaitable[Mapping[str, NotedHead]]],
        write: Callable[[Object], Awaitable[bool]],
        clock: Callable[[], float],
        post: HttpPost | None = None,
    ) -> None:
        if settings.webhook and post is None:
            raise ValueError("checkpoints.webhook: only a server sends checkpoints; leave it out, or name a file")
        self.pending = 0  # records that are not signed yet; counted by the trail
        self.wake_at = 1  # how many there are when it calls `wake`
        self.problem = ""  # why the log is not signed now
        self.required = settings.required
        self._settings = settings
        self._name = name
        self._writer = writer
        self._heads = heads
        self._write = write
        self._clock = clock
        self._keys: list[SigningKey] = []  # the one that signs, and before it the one whose place it takes
        self._has_signed = False
        self._signed: dict[str, str] = {}  # the head of each chain that a checkpoint of ours has named
        self._task: asyncio.Task[None] | None = None
        self._full = asyncio.Event()
        self._outlets: list[_Outlet] = []
        if settings.file:
            self._outlets.append(_Outlet(settings.file, partial(_append_line, Path(settings.file))))
        if settings.webhook and post is not None:
            host = f"webhook {urlsplit(settings.webhook).hostname}"
            self._outlets.append(_Outlet(host, partial(_post_line, post, settings.webhook)))

    def wake(self) -> None:
        """Take note that `wake_at` records are pending."""
        if self._task is None or self._task.done() or self._task.get_loop().is_closed():
            self._full = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._run())
        self.wake_at = self._settings.records
        if self.pending >= self._settings.records:
            self._full.set()
            self.wake_at = NEVER

    async def close(self) -> None:
        """Sign what is new, and send what waits, as far as there is time for it."""
        if self._task is not None:
            if not self._task.get_loop().is_closed():
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            is_hopeless = self.problem and not self._keys  # a program that prints no key would hold up the end
            if (self.pending or self._has_signed) and not is_hopeless:
                await self._try_to_sign(closes=True)
        await asyncio.gather(*(each.close() for each in self._outlets))

    async def _run(self) -> None:
        """Sign once for each interval in which there are new records, then end."""
        try:
            await self._load_keys()  # at once: an operator should see soon that there is none
            while self.pending:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.seconds):
                        await self._full.wait()
                self._full.clear()
                is_signed = await self._try_to_sign()
                self.wake_at = self._settings.records if is_signed else NEVER
                await asyncio.sleep(LEAST_SECONDS)
                if is_signed and self.pending >= self._settings.records:
                    self._full.set()
        finally:
            self.wake_at = 1

    async def _load_keys(self) -> bool:
        from handrail.audit.signing import load_signing_key  # deferred: most logs are not signed

        if not self._keys:
            sources = [each for each in (self._settings.previous_key, self._settings.key) if each]
            try:
                self._keys = [await asyncio.to_thread(load_signing_key, each) for each in sources]
            except ValueError as problem:
                self._fail(problem)
                return False
        return True

    async def _try_to_sign(self, closes: bool = False) -> bool:
        if not await self._load_keys():
            return False
        try:
            *before, key = self._keys
            if before:
                await self._sign(before[0], following=key.public)
                self._keys = [key]
            await self._sign(key, closes=closes)
        except (HandrailError, OSError, ValueError, RuntimeError) as problem:
            self._fail(problem)
            return False
        if self.problem:
            log.warning("audit: %s is signed again", self._name)
        self.problem = ""
        return True

    async def _sign(self, key: SigningKey, *, following: str = "", closes: bool = False) -> None:
        covered, self.wake_at = self.pending, NEVER  # its own record is no reason for another
        heads = {chain: str(head) for chain, head in (await self._heads()).items()}
        changed = sorted(
            heads.items() - self._signed.items(), key=lambda each: (each[0] != self._writer, random.random())
        )
        named = dict(changed[:MAX_HEADS])
        statement = to_builtins(
            Statement(
                writer=self._writer,
                time=datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds"),
                every_records=self._settings.records,
                every_seconds=float(self._settings.seconds),
                heads=named,
                key=key.public,
                next=following,
                closes=closes,
            )
        )
        checkpoint = {"statement": statement, "signature": key.sign(statement)}
        await self._write({"event": "checkpoint", **checkpoint})
        self.pending -= covered + 1  # its own record was counted too
        self._has_signed = True
        if not following:  # what the old key has signed, the new one signs again
            self._signed = {chain: head for chain, head in self._signed.items() if chain in heads} | named
        for each in self._outlets:
            each.add(encode(checkpoint))

    def _fail(self, problem: Exception) -> None:
        self.problem = one_line(str(problem), 300)
        log.error("audit: %s is not signed: %s", self._name, self.problem)


class _Outlet:
    """A second place for checkpoints. They wait in a bounded queue, and are sent again until they are taken."""

    def __init__(self, name: str, deliver: Callable[[bytes], Awaitable[None]]) -> None:
        self._name = name
        self._deliver = deliver
        self._waiting: deque[bytes] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, line: bytes) -> None:
        """Send the checkpoint as soon as possible. This neither waits nor fails."""
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            log.warning("audit: checkpoint dropped for %s: %d wait for it", self._name, MAX_WAITING)
        self._waiting.append(line)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is None or self._task.get_loop().is_closed():
            return
        await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
        if not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._waiting:
            log.warning("audit: %d checkpoints not sent to %s: the log was closed", len(self._waiting), self._name)

    async def _run(self) -> None:
        delay = FIRST_RETRY_SECONDS
        while self._waiting:
            line = self._waiting[0]
            try:
                async with asyncio.timeout(DELIVERY_SECONDS):
                    await self._deliver(line)
            except (HandrailError, OSError, ValueError) as problem:  # TimeoutError is an OSError
                reason = one_line(str(problem) or type(problem).__name__, 200)
                log.warning("audit: checkpoint not sent to %s: %s; it is sent again", self._name, reason)
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(2 * delay, MAX_RETRY_SECONDS)
            else:
                delay = FIRST_RETRY_SECONDS
                with suppress(ValueError):  # it may have given way
                    self._waiting.remove(line)


async def _append_line(path: Path, line: bytes) -> None:
    await asyncio.to_thread(_append, path, line + b"\n")


def _append(path: Path, line: bytes) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        size = os.fstat(file).st_size
        os.lseek(file, max(0, size - 1), os.SEEK_SET)
        if os.read(file, 1) not in (b"", b"\n"):  # a power cut has torn the last one
            line = b"\n" + line
        if os.write(file, line) < len(line):
            os.ftruncate(file, size)
            raise OSError("the disk is full")
        os.fsync(file)
    finally:
        os.close(file)


async def _post_line(post: HttpPost, url: str, line: bytes) -> None:
    status, _, _ = await post(url, line, {"Content-Type": "application/json"})
    if not 200 <= status < 300:
        raise ValueError(f"status {status}")
