"""The numbers of a server as a page for Prometheus.

Workers share a port, so whichever is asked answers for all: each keeps its numbers in the store, every few seconds and
whenever it is asked itself, so that no number goes back between two answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from msgspec.json import decode

from handrail.engine.core import Engine
from handrail.guards.identity import ApiKeys
from handrail.jsonrpc import encode
from handrail.metrics import Snapshot, text
from handrail.protocol import http
from handrail.protocol.http import Door
from handrail.stores import Store, StoreError
from handrail.transports.response import Receive, Response, Scope, Send

log = logging.getLogger("handrail")

SHARE_SECONDS, KEEP_SECONDS = 5.0, 15.0
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_FIELDS = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8"), (b"cache-control", b"no-store")]


class Page:
    """`/metrics` as an ASGI application, under the server's names and those of this machine (P-22)."""

    def __init__(self, engine: Engine, hosts: Iterable[str], token: str | None, *, shared: bool) -> None:
        self.metrics = engine.count()
        self.shared = shared  # several workers answer for each other
        self._engine = engine
        self._door = Door([*hosts, *_LOCAL])
        self._keys = None if token is None else ApiKeys({"metrics": ApiKeys.hashed(token)})
        self._store: Store | None = None
        self._prefix = f"metrics:{secrets.token_hex(8)}:"  # the same in every worker of this server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"this application speaks HTTP, not {scope['type']}")
        headers, twice = http.headers_of(scope["headers"])
        refusal = self._door.refusal(scope.get("scheme", "http"), headers)
        response = Response(scope, receive, send, {}, self._engine.limits)
        if refusal or twice:
            response.text(403 if refusal else 400, refusal or f"The header {twice} stands twice")
        elif scope["path"].removeprefix(scope.get("root_path", "")) != "/metrics":
            response.text(404, "Not found")
        elif scope["method"] not in ("GET", "HEAD"):
            response.text(405, "Method not allowed", [(b"allow", b"GET, HEAD")])
        elif self._keys is not None and await self._keys.verify(http.bearer(headers)) is None:
            response.text(401, "A valid token is needed", [http.challenge({})])
        else:
            response.whole(200, _FIELDS, await self._text())
        await response.close()

    @contextlib.asynccontextmanager
    async def sharing(self, store: Store) -> AsyncIterator[None]:
        """Tell the other workers, for as long as this is entered."""
        self._store = store
        task = asyncio.create_task(self._keep_sharing(store))
        try:
            yield
        finally:
            self._store = None
            task.cancel()
            await asyncio.wait((task,))
            with contextlib.suppress(StoreError):
                await store.delete(f"{self._prefix}{os.getpid()}")

    async def _text(self) -> bytes:
        if self._store is None:
            return text([self._snapshot()])
        await self._share(self._store)
        return text([decode(value, type=Snapshot) for _, value in await self._store.scan(self._prefix)])

    async def _keep_sharing(self, store: Store) -> None:
        while True:
            try:
                await self._share(store)
            except StoreError as problem:
                log.warning("metrics: the other workers cannot be told: %s", problem)
            await asyncio.sleep(SHARE_SECONDS)

    async def _share(self, store: Store) -> None:
        worker = str(os.getpid())
        await store.put(self._prefix + worker, encode(self._snapshot(worker)), ttl=KEEP_SECONDS)

    def _snapshot(self, worker: str = "") -> Snapshot:
        metrics = self.metrics
        metrics.tools.set(len(list(self._engine.catalog)))
        metrics.cpu.values[()] = time.process_time()
        if sys.platform == "linux":
            fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
            metrics.started.values.setdefault((), booted + int(fields[19]) / os.sysconf("SC_CLK_TCK"))
            metrics.memory.set(int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))
        return metrics.snapshot(worker)
