"""The lists of one upstream server: when they are fetched, and who waits for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

from handrail.client.prompts import ListedPrompt
from handrail.client.resources import ListedResource, ListedTemplate
from handrail.client.tools import ListedEntries, ListedEntry, ListedTool
from handrail.engine.call_state import CallPeer
from handrail.errors import PeerError, Refused, RemoteProtocolError
from handrail.gateway.catalog import UpstreamCatalog
from handrail.gateway.pool import SessionPool
from handrail.gateway.questions import NO_CAPABILITIES, CapabilityKey
from handrail.gateway.session import SessionUpstream, UpstreamSession
from handrail.revisions import Revision

__all__ = ["UpstreamLists"]

log = logging.getLogger("handrail")

ENTRY_TYPES: Mapping[str, type[ListedEntry]] = {
    "tools/list": ListedTool,
    "resources/list": ListedResource,
    "resources/templates/list": ListedTemplate,
    "prompts/list": ListedPrompt,
}
COALESCE_SECONDS = 0.25  # in which change notices of an upstream become one refresh
RECHECK_SECONDS = 5.0  # before a list that its upstream does not watch over is fetched again
REFRESH_WAIT_SECONDS = 0.5  # that a request for a list waits for such a refresh
RETRY_SECONDS = 5.0  # before a list that could not be had is tried again
_UNKNOWN_METHOD = -32601


class ListUpstream(SessionUpstream, Protocol):
    """What the lists ask and tell their upstream."""

    era: Any
    revision: str
    is_stopped: bool

    def on_not_listed(self, problem: PeerError | Refused, owner: str) -> None: ...


class View:
    """The state of what an upstream lists for callers with one set of capabilities."""

    def __init__(self) -> None:
        self.is_loaded = False
        self.loading: asyncio.Task[None] | None = None
        self.checked_at = float("-inf")
        self.load_began = 0.0
        self.is_stale = False
        self.has_waited = False  # a request for a list has waited for the first load, and does not again


class UpstreamLists:
    """Fetches the lists of one upstream, and brings them into the catalogs."""

    def __init__(self, upstream: ListUpstream, pool: SessionPool, catalog: UpstreamCatalog) -> None:
        self.views: dict[CapabilityKey, View] = {}
        self._upstream = upstream
        self._pool = pool
        self._catalog = catalog
        self._refreshing: asyncio.TimerHandle | None = None
        self._stale_views: set[CapabilityKey] = set()

    @property
    def is_missing(self) -> bool:
        """Whether its lists have never been had."""
        return not any(view.is_loaded for view in self.views.values())

    def prepare(self, peer: CallPeer, key: CapabilityKey, revision: Revision) -> asyncio.Task[None] | None:
        """Have the lists ready for a set of capabilities; return the task to wait for, if there is one."""
        view, owner = self._view(key), self._pool.owner(peer, key, revision)
        now = time.monotonic()
        if view.loading is None and not self._upstream.is_stopped:
            is_due = now - view.checked_at > (RETRY_SECONDS if not view.is_loaded else RECHECK_SECONDS)
            is_first = not view.is_loaded and view.checked_at == float("-inf")
            if is_first or view.is_stale or (is_due and not (view.is_loaded and self._pool.is_watched(owner, key))):
                self._load(view, owner, key, peer)
        return view.loading

    def wait_seconds(self, key: CapabilityKey) -> float:
        """Return how long a request for a list waits for this upstream."""
        view = self._view(key)
        if not view.is_loaded:
            return 0.0 if view.has_waited else self._upstream.terms.list_seconds
        return max(0.0, view.load_began + REFRESH_WAIT_SECONDS - time.monotonic())

    def mark_waited(self, key: CapabilityKey) -> None:
        """Let no other request for a list wait for the first load."""
        view = self._view(key)
        if not view.is_loaded and not view.has_waited:
            self._upstream.lose("LOSSY-23")
            log.warning("gateway: %s: a list went without it: it has not answered yet", self._upstream.name)
        view.has_waited = True

    def hidden(self, method: str, key: CapabilityKey) -> frozenset[str]:
        """Return the names of our entries that the upstream does not show to callers with these capabilities."""
        return self._catalog.hidden(method, self._view_key(key))

    def _view_key(self, key: CapabilityKey) -> CapabilityKey:
        return NO_CAPABILITIES if self._upstream.era == "stateless" else key

    def _view(self, key: CapabilityKey) -> View:
        key = self._view_key(key)
        return self.views.get(key) or self.views.setdefault(key, View())

    def _load(self, view: View, owner: str, key: CapabilityKey, peer: CallPeer | None = None) -> None:
        view.load_began = time.monotonic()
        view.loading = asyncio.get_running_loop().create_task(self._load_view(view, owner, key, peer))

    async def _load_view(self, view: View, owner: str, key: CapabilityKey, peer: CallPeer | None) -> None:
        view.is_stale = False
        try:
            session = await self._pool.session(owner, key, peer)
            own = self._view(key)  # another one, if the upstream turned out to be stateless
            lists: dict[str, ListedEntries[Any] | None] = {}
            for method, entry_type in ENTRY_TYPES.items():
                try:
                    lists[method] = await session.fetch(method, entry_type)
                except RemoteProtocolError as refused:
                    if refused.code != _UNKNOWN_METHOD:
                        raise
                    lists[method] = None
            self._catalog.apply(self._view_key(key), lists, self._upstream.revision)
            view.is_loaded = own.is_loaded = True
            self._pool.breaker(owner).add_success()
        except (PeerError, Refused) as problem:
            view.has_waited = True
            log.warning("gateway: %s: not listed: %s", self._upstream.name, problem)
            self._upstream.on_not_listed(problem, owner)
        except Exception:
            log.exception("gateway: %s: its lists could not be used", self._upstream.name)
        finally:
            view.checked_at = time.monotonic()
            view.loading = None

    def cache_hint(self, method: str) -> tuple[int, bool]:
        """Return how many milliseconds the list may be kept, and whether it is for one caller only."""
        session = self._pool.stateless
        if session is None or not session.connection.is_open:
            return 0, True  # an older server says nothing of it
        return session.cache_hint(method)

    def on_list_changed(self, session: UpstreamSession) -> None:
        """Refresh the lists soon; several notices become one refresh."""
        if not self._view(session.key).is_loaded:
            return
        self._stale_views.add(self._view_key(session.key))
        self._view(session.key).is_stale = True
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().call_later(COALESCE_SECONDS, self._refresh_stale, session)

    def _refresh_stale(self, session: UpstreamSession) -> None:
        self._refreshing = None
        stale, self._stale_views = self._stale_views, set()
        for key in stale:
            view = self._view(key)
            if view.loading is not None:
                self._stale_views.add(key)
                self._refreshing = asyncio.get_running_loop().call_later(COALESCE_SECONDS, self._refresh_stale, session)
            elif view.is_loaded and not self._upstream.is_stopped:
                self._load(view, self._pool.owner_of_view(key, session.owner), key)

    async def load(self, key: CapabilityKey) -> None:
        """Fetch the lists for a set of capabilities, and wait for them as long as a first list may."""
        view = self._view(key)
        if view.loading is None:
            self._load(view, "local", key)
        assert view.loading is not None
        await asyncio.wait({view.loading}, timeout=self._upstream.terms.list_seconds)

    async def refresh(self) -> None:
        """Fetch the lists again for all capabilities that callers have had, and wait for them."""
        for key, view in [*self.views.items()] or [(NO_CAPABILITIES, self._view(NO_CAPABILITIES))]:
            if view.loading is None:
                for session in self._pool.sessions.values():
                    session.expire_lists()
                self._load(view, self._pool.owner_of_view(key), key)
            if view.loading is not None:
                await asyncio.wait({view.loading})

    def close(self) -> None:
        """Stop what is under way; lists are fetched again when they are asked for."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            self._refreshing = None
        for view in self.views.values():
            view.is_stale = True
            if view.loading is not None:
                view.loading.cancel()
