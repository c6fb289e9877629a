"""Every request as it is seen from outside: counted, and told to the access log."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from handrail.engine.core import Engine
from handrail.jsonrpc import Notification, Request
from handrail.metrics import Metrics
from handrail.model import Object
from handrail.protocol import http
from handrail.protocol.trace import read, read_headers
from handrail.revisions.base import VERSION
from handrail.stores import Store
from handrail.transports.response import Receive, Scope, Send
from handrail.transports.scrape import Page

access = logging.getLogger("handrail.access")

MAX_CHARS = 200
GONE = 499  # in place of a status: the client went away before there was one

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Visit(Struct, eq=False):
    """One request, under `scope["handrail"]`."""

    status: int = GONE
    size: int = 0
    streams: bool = False
    exchange: Any = None


class Watch:
    """Stands between the listener and an endpoint; its page is part of that only if it has a token."""

    def __init__(self, engine: Engine, page: Page | None, *, is_shown: bool = False, logs: bool = False) -> None:
        self.page = page
        self._engine = engine
        self._metrics = Metrics() if page is None else page.metrics
        self._is_shown = is_shown
        self._logs = logs
        if logs and access.level == logging.NOTSET:
            access.setLevel(logging.INFO)

    @classmethod
    def wanted(cls, engine: Engine, options: Any) -> Watch | None:
        """None if no option asks for it."""
        token, logs, page = options.get("metrics_token"), options.get("access_log", False), None
        if token is not None or options.get("metrics") is not None:
            page = Page(engine, options.get("hosts", ()), token, shared=options.get("workers", 1) > 1)
        return cls(engine, page, is_shown=token is not None, logs=logs) if page is not None or logs else None

    def sharing(self, store: Store) -> AbstractAsyncContextManager[None]:
        """Where workers tell each other of their numbers, if there are any."""
        return nullcontext() if self.page is None or not self.page.shared else self.page.sharing(store)

    def see(self, exchange: Any) -> None:
        """Who serves a request: has a scope and a principal, and perhaps a message and a connection."""
        if "handrail" in exchange.scope:
            exchange.scope["handrail"].exchange = exchange

    async def __call__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        visit, metrics, begun = Visit(), self._metrics, time.perf_counter()
        if self._logs:
            scope["handrail"] = visit
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self.page is not None and self._is_shown and path == "/metrics":
            app = self.page

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                visit.streams = (b"content-type", b"text/event-stream") in message["headers"]
                metrics.streams.add(by=visit.streams)
            else:
                visit.size += len(message.get("body", b""))
            await send(message)

        try:
            await app(scope, receive, sending)
        except Exception:
            visit.status = 500 if visit.status == GONE else visit.status
            raise
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            metrics.streams.add(by=-visit.streams)
            metrics.requests.add(method, str(visit.status))
            if self._logs:
                self._tell(visit, method, scope, time.perf_counter() - begun)

    def _tell(self, visit: Visit, method: str, scope: Scope, seconds: float) -> None:
        """Who, what and how it went: no query, token, argument or session id (P-34), nothing but plain ASCII (P-33)."""
        known = {
            "method": method,
            "path": quote(scope["path"][:MAX_CHARS]),
            "status": visit.status,
            "bytes": visit.size,
            "ms": round(seconds * 1000, 3),
            **self._said(visit.exchange, http.headers_of(scope["headers"])[0]),
        }
        access.info("%s", json.dumps({name: value for name, value in known.items() if value is not None}))

    def _said(self, exchange: Any, headers: http.Headers) -> Object:
        message = getattr(exchange, "message", None)
        params = message.params if isinstance(message, Request | Notification) else {}
        name, meta = params.get("name"), params.get("_meta")
        meta = meta if type(meta) is dict else {}
        named, connection = meta.get(VERSION), getattr(exchange, "connection", None)
        agreed = None if connection is None else connection.revision
        trace = read(meta.get("traceparent")) or read_headers(headers)
        return {
            "principal": None if exchange is None else exchange.principal.id,
            "mcp_method": "batch" if type(message) is list else getattr(message, "method", "")[:MAX_CHARS] or None,
            "tool": name if type(name) is str and self._engine.catalog.get(name) is not None else None,
            "revision": named if named in self._engine.offer.supported_stateless else agreed and agreed.name,
            "trace": trace and trace.trace_id,
        }
