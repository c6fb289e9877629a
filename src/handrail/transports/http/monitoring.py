"""The access log, counts of HTTP requests, and `/metrics` for Prometheus.

Workers share a port, so any of them answers for all: each writes its numbers to the store every few seconds and before
it answers itself, so that no number decreases between two responses.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from msgspec import Struct
from msgspec.json import decode

from handrail.engine.core import KINDS, Engine
from handrail.guards.identity import ApiKeys
from handrail.jsonrpc import Notification, Request, encode
from handrail.model import Object
from handrail.observe.metrics import Metrics, Snapshot, render
from handrail.protocol import http_rules as http
from handrail.protocol.http_rules import NAME_PARAMS, HostOriginCheck
from handrail.protocol.trace import read, read_headers
from handrail.revisions.base import VERSION
from handrail.stores import Store, StoreError
from handrail.transports.http.exchange import HttpResponse, Receive, Scope, Send

log = logging.getLogger("handrail")
access = logging.getLogger("handrail.access")

SHARE_SECONDS, SHARED_TTL_SECONDS = 5.0, 15.0
MAX_CHARS = 200
CLIENT_CLOSED = 499  # in place of a status: the client went away before there was one

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_FIELDS = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8"), (b"cache-control", b"no-store")]

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequestRecord(Struct, eq=False):
    """One request, under `scope["handrail"]`."""

    status: int = CLIENT_CLOSED
    size: int = 0
    streams: bool = False
    exchange: Any = None


class RequestMonitor:
    """A layer around the endpoint that counts and logs. It serves `/metrics` itself only if there is a token."""

    def __init__(
        self, engine: Engine, page: MetricsPage | None, *, serves_page: bool = False, logs: bool = False
    ) -> None:
        self.page = page
        self._engine = engine
        self._metrics = Metrics() if page is None else page.metrics
        self._serves_page = serves_page
        self._logs = logs
        if logs and access.level == logging.NOTSET:
            access.setLevel(logging.INFO)

    @classmethod
    def from_options(cls, engine: Engine, options: Any) -> RequestMonitor | None:
        """None if no option asks for it."""
        token, logs, page = options.get("metrics_token"), options.get("access_log", False), None
        if token is not None or options.get("metrics") is not None:
            page = MetricsPage(engine, options.get("hosts", ()), token, shared=options.get("workers", 1) > 1)
        return cls(engine, page, serves_page=token is not None, logs=logs) if page is not None or logs else None

    def sharing(self, store: Store) -> AbstractAsyncContextManager[None]:
        """Share the numbers of this worker with the others, if there are any, while entered."""
        return nullcontext() if self.page is None or not self.page.shared else self.page.sharing(store)

    def attach(self, exchange: Any) -> None:
        """Who serves a request: has a scope and a principal, and perhaps a message and a connection."""
        if "handrail" in exchange.scope:
            exchange.scope["handrail"].exchange = exchange

    async def __call__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        record, metrics, started_at = RequestRecord(), self._metrics, time.perf_counter()
        if self._logs:
            scope["handrail"] = record
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self.page is not None and self._serves_page and path == "/metrics":
            app = self.page

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                record.streams = (b"content-type", b"text/event-stream") in message["headers"]
                metrics.streams.add(by=record.streams)
            else:
                record.size += len(message.get("body", b""))
            await send(message)

        try:
            await app(scope, receive, sending)
        except Exception:
            record.status = 500 if record.status == CLIENT_CLOSED else record.status
            raise
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            metrics.streams.add(by=-record.streams)
            metrics.requests.add(method, str(record.status))
            if self._logs:
                self._log_request(record, method, scope, time.perf_counter() - started_at)

    def _log_request(self, request_record: RequestRecord, method: str, scope: Scope, seconds: float) -> None:
        """Who, what and how it went: no query, token, argument or session id (P-34), nothing but plain ASCII (P-33)."""
        record = {
            "method": method,
            "path": quote(scope["path"][:MAX_CHARS]),
            "status": request_record.status,
            "bytes": request_record.size,
            "ms": round(seconds * 1000, 3),
            **self._message_fields(request_record.exchange, http.headers_of(scope["headers"])[0]),
        }
        access.info("%s", json.dumps({name: value for name, value in record.items() if value is not None}))

    def _message_fields(self, exchange: Any, headers: http.Headers) -> Object:
        message = getattr(exchange, "message", None)
        params = message.params if isinstance(message, Request | Notification) else {}
        method, meta = getattr(message, "method", ""), params.get("_meta")
        name = params.get(NAME_PARAMS.get(method, "name"))
        entry = self._engine.find(KINDS.get(method, "tool"), name)[0] if type(name) is str else None
        meta = meta if type(meta) is dict else {}
        named, connection = meta.get(VERSION), getattr(exchange, "connection", None)
        agreed = None if connection is None else connection.revision
        trace = read(meta.get("traceparent")) or read_headers(headers)
        return {
            "principal": None if exchange is None else exchange.principal.id,
            "mcp_method": "batch" if type(message) is list else method[:MAX_CHARS] or None,
            "tool": None if entry is None else entry.limit_name,
            "revision": named if named in self._engine.offer.supported_stateless else agreed and agreed.name,
            "trace": trace and trace.trace_id,
        }


class MetricsPage:
    """`/metrics` as an ASGI application, under the server's names and those of this machine (P-22)."""

    def __init__(self, engine: Engine, hosts: Iterable[str], token: str | None, *, shared: bool) -> None:
        self.metrics = Metrics.of(engine)
        self.shared = shared  # several workers answer for each other
        self._engine = engine
        self._door = HostOriginCheck([*hosts, *_LOCAL])
        self._keys = None if token is None else ApiKeys({"metrics": ApiKeys.hashed(token)})
        self._store: Store | None = None
        self._prefix = f"metrics:{secrets.token_hex(8)}:"  # the same in every worker of this server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"this application speaks HTTP, not {scope['type']}")
        headers, duplicate = http.headers_of(scope["headers"])
        refusal = self._door.refusal(scope.get("scheme", "http"), headers)
        response = HttpResponse(receive, send, {}, self._engine.limits)
        if refusal or duplicate:
            response.respond_text(403 if refusal else 400, refusal or f"The header {duplicate} stands twice")
        elif scope["path"].removeprefix(scope.get("root_path", "")) != "/metrics":
            response.respond_text(404, "Not found")
        elif scope["method"] not in ("GET", "HEAD"):
            response.respond_text(405, "Method not allowed", [(b"allow", b"GET, HEAD")])
        elif self._keys is not None and await self._keys.verify(http.bearer(headers)) is None:
            response.respond_text(401, "A valid token is needed", [http.challenge({})])
        else:
            response.respond(200, _FIELDS, await self._text())
        await response.write_response()

    @asynccontextmanager
    async def sharing(self, store: Store) -> AsyncIterator[None]:
        """Share the numbers with the other workers while entered."""
        self._store = store
        task = asyncio.create_task(self._keep_sharing(store))
        try:
            yield
        finally:
            self._store = None
            task.cancel()
            await asyncio.wait((task,))
            with suppress(StoreError):
                await store.delete(f"{self._prefix}{os.getpid()}")

    async def _text(self) -> bytes:
        if self._store is None:
            return render([self._snapshot()])
        await self._share(self._store)
        return render([decode(value, type=Snapshot) for _, value in await self._store.scan(self._prefix)])

    async def _keep_sharing(self, store: Store) -> None:
        while True:
            try:
                await self._share(store)
            except StoreError as problem:
                log.warning("metrics: the other workers cannot be told: %s", problem)
            await asyncio.sleep(SHARE_SECONDS)

    async def _share(self, store: Store) -> None:
        worker = str(os.getpid())
        await store.put(self._prefix + worker, encode(self._snapshot(worker)), ttl=SHARED_TTL_SECONDS)

    def _snapshot(self, worker: str = "") -> Snapshot:
        metrics = self.metrics
        metrics.tools.set(len(list(self._engine.catalog)))
        metrics.engines_down.values = {(name,): 1.0 for name in self._engine.guard_set.troubles()}
        metrics.cpu.values[()] = time.process_time()
        if sys.platform == "linux":
            fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
            metrics.started.values.setdefault((), booted + int(fields[19]) / os.sysconf("SC_CLK_TCK"))
            metrics.memory.set(int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))
        return metrics.snapshot(worker)
