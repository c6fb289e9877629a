"""One list of a server: its pages, what is left out of it, and how long it is good."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

from msgspec.json import encode

from handrail.client.connection import ClientConnection
from handrail.client.inflight import add_context, deadline_at, keep_sent
from handrail.client.tools import MAX_DESCRIPTION, E, ListedEntries
from handrail.errors import InvalidResult, PeerError, TransportError
from handrail.model import Json, Object
from handrail.revisions.base import LISTS
from handrail.transports.base import ClientTransport

log = logging.getLogger("handrail")

L = TypeVar("L", bound=ListedEntries[Any])

MAX_PAGES = 100
MAX_TOOLS, MAX_ENTRIES = 1_000, 10_000  # of another list
MAX_ENTRY_BYTES = 256 * 1024
MAX_LIST_BYTES = 16 * 1024 * 1024
MAX_TTL_MS = 24 * 3600 * 1000


class _EndlessList(InvalidResult):
    """The pages of a list do not end, or there is too much on them."""


class ServerList(Generic[E, L]):
    """One list of a server: fetched over all pages, cached until the server announces a change or it expires.

    `make` makes an entry; `flaw` says why one is left out; `finish` makes the list, of the entries by their own names
    or URIs and of what was left out. A list that does not end is an error, or as long as it was with `on_endless`.
    """

    def __init__(
        self,
        connection: ClientConnection,
        method: str,
        make: Callable[[Object], E],
        finish: Callable[[dict[str, E], dict[str, str]], L],
        *,
        member: str = "name",
        trusted: bool = False,
        flaw: Callable[[E], str] = lambda entry: "",
        on_endless: Callable[[InvalidResult], None] | None = None,
    ) -> None:
        self.capability = method.partition("/")[0]
        self.cached: L | None = None
        self.is_changed = True  # not listed yet, or changed since
        self._connection = connection
        self._method = method
        self._make = make
        self._finish = finish
        self._member = member  # that tells the entries apart
        self._trusted = trusted
        self._flaw = flaw
        self._on_endless = on_endless
        self._fresh_until = 0.0
        self._has_ttl = False  # the server limits how long the list is fresh
        self.is_private = True  # for one caller only; a server that says nothing may mean that
        self._watched_stream: tuple[ClientTransport, int] | None = None  # carries list_changed for the cached list
        self._lock = asyncio.Lock()

    async def get(self, *, fresh: bool = False, stale: bool = False) -> L:
        """Return the entries of all pages; cached until a change is announced or, unless `stale`, the list expires."""
        clocks, deadline = self._connection.clocks, self._connection.now() + self._connection.clocks.total
        try:
            async with deadline_at(deadline, clocks):
                await self._lock.acquire()
            try:
                cached = self.cached
                is_watched = self._watched_stream is not None and self._watched_stream == self._list_changed_stream
                is_fresh = stale or is_watched or time.monotonic() < self._fresh_until
                if cached is None or fresh or self.is_changed or not is_fresh:
                    cached = await self._fetch(deadline)
                return cached
            finally:
                self._lock.release()
        except PeerError as problem:
            add_context(problem, self._connection.name, self._method)
            raise

    @property
    def is_stale(self) -> bool:
        """Whether a call needs a new list: there is none, a change was announced, or it has expired."""
        return self.cached is None or self.is_changed or (self._has_ttl and time.monotonic() >= self._fresh_until)

    @property
    def fresh_seconds(self) -> float:
        """How long the server lets the list be kept from now on."""
        return max(0.0, self._fresh_until - time.monotonic())

    async def _fetch(self, deadline: float) -> L:
        async with deadline_at(deadline, self._connection.clocks):
            await self._connection.open()
        self._connection.require(self.capability)
        self._connection.subscription.start()
        self.is_changed = False
        stream = self._list_changed_stream
        entries: dict[str, E] = {}
        refused: dict[str, str] = {}
        fresh_until, size, most = float("inf"), 0, MAX_TOOLS if self.capability == "tools" else MAX_ENTRIES
        is_private = False
        try:
            async for page in self._pages(deadline):
                ttl = page.get("ttlMs", 0)
                seconds = min(ttl, MAX_TTL_MS) / 1000 if type(ttl) in (int, float) and ttl > 0 else 0.0
                fresh_until = min(fresh_until, time.monotonic() + seconds)
                self._has_ttl = seconds > 0
                is_private = is_private or page.get("cacheScope") != "public"
                for raw in page[LISTS[self._method]]:
                    size += self._add(raw, entries, refused)
                    if len(entries) + len(refused) > most or size > MAX_LIST_BYTES:
                        text = f"over {most:,} {self.capability}, or {MAX_LIST_BYTES:,} bytes of them"
                        raise _EndlessList(text, result={})
        except _EndlessList as problem:
            if self._on_endless is None:
                self.is_changed = True
                raise InvalidResult(problem.text, result=problem.result) from None
            self._on_endless(problem)
        except BaseException:
            self.is_changed = True  # the announced change is not in any list yet
            raise
        listed = self._finish(entries, refused)
        self.cached, self._fresh_until, self._watched_stream = listed, fresh_until, stream
        self.is_private = is_private
        return listed

    async def _pages(self, deadline: float) -> AsyncIterator[Object]:
        params: Object = {}
        cursors: set[str] = set()
        for _ in range(MAX_PAGES):
            page = await self._page(params, deadline)
            if type(page.get(LISTS[self._method])) is not list:
                raise InvalidResult(f"there is no list of {self.capability}", result=page)
            yield page
            cursor = page.get("nextCursor")
            revision = self._connection.revision
            if cursor is None or (cursor == "" and revision is not None and revision.no_optional_members):
                return
            if type(cursor) is not str:
                raise _EndlessList(f"the cursor {cursor!r:.100} is not a text", result=page)
            if cursor in cursors:
                raise _EndlessList(f"the cursor {cursor!r:.100} came before", result=page)
            cursors.add(cursor)
            params = {"cursor": cursor}
        raise _EndlessList(f"over {MAX_PAGES} pages", result={})

    async def _page(self, params: Object, deadline: float) -> Object:
        """Request one page; once more if the transport fails, since the request changes nothing."""
        clocks = self._connection.clocks
        try:
            return await self._connection.request(self._method, params, clocks, deadline)
        except TransportError as broken:
            log.debug("client: %s: %s repeated: %s", self._connection.name, self._method, broken)
            first = broken.sent
        with keep_sent(first):
            return await self._connection.request(self._method, params, clocks, deadline)

    def _add(self, raw: Json, entries: dict[str, E], refused: dict[str, str]) -> int:
        """Add one entry of a list, or the reason why it is left out, and return its size."""
        member = self._member
        if type(raw) is not dict or type(raw.get(member)) is not str or not raw[member]:
            refused[f"{str(raw)[:60]} ({len(refused)})"] = f"it has no {member}"
            return 0
        entry = self._make(raw)
        size = len(encode(raw))
        if len(entry.description) > MAX_DESCRIPTION and not self._trusted:
            flaw = f"its description is longer than {MAX_DESCRIPTION:,} characters"
        elif size > MAX_ENTRY_BYTES:
            flaw = f"its definition is longer than {MAX_ENTRY_BYTES:,} bytes"
        else:
            flaw = self._flaw(entry)
        if flaw:
            refused[entry.key[:200]] = flaw
        elif entry.own_name in entries:
            flaw = f"another {entry.kind} of this server has the same {member}"
            refused[f"{entry.key[:200]} ({len(refused)})"] = flaw
        else:
            entries[entry.own_name] = entry
            return size
        return 0

    @property
    def _list_changed_stream(self) -> tuple[ClientTransport, int] | None:
        """The stream that carries list_changed, or None."""
        connection, transport, revision = self._connection, self._connection.transport, self._connection.revision
        if (
            transport is None
            or transport.notification_stream == 0
            or connection.failure is not None
            or revision is None
            or revision.stateless
        ):
            return None
        offers = connection.subscription.is_offered(self.capability)
        return (transport, transport.notification_stream) if offers else None
