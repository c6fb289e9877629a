"""The lists of one upstream server: when they are fetched, and who waits for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from handrail.client.prompts import ListedPrompt
from handrail.client.resources import ListedResource, ListedTemplate
from handrail.client.tools import ListedEntries, ListedEntry, ListedTool
from handrail.engine.call_state import CallPeer
from handrail.engine.catalog import ToolEntry
from handrail.errors import AuthorizationError, PeerError, Refused, RemoteProtocolError
from handrail.gateway.catalog import UpstreamCatalog, ViewKey
from handrail.gateway.pool import SessionPool
from handrail.gateway.questions import NO_CAPABILITIES, CapabilityKey
from handrail.gateway.session import SessionUpstream, UpstreamSession, principal_of
from handrail.gateway.sign_in import SignIn, is_anonymous
from handrail.oauth.client import SignInRequired

__all__ = ["UpstreamLists"]

log = logging.getLogger("handrail")

ENTRY_TYPES: Mapping[str, type[ListedEntry]] = {
    "tools/list": ListedTool,
    "resources/list": ListedResource,
    "resources/templates/list": ListedTemplate,
    "prompts/list": ListedPrompt,
}
COALESCE_SECONDS = 0.25  # in which change notices of an upstream become one refresh
BATCH_SECONDS = 1.0  # that a list which has come waits for the others of its refresh
RECHECK_SECONDS = 5.0  # before a list that its upstream does not watch over is fetched again
MAX_AGE_SECONDS = 60.0  # of such a list; a request for an older one waits for the new one
RETRY_SECONDS = 5.0  # before a list that could not be had is tried again
MAX_VIEWS = 256  # of one upstream
_UNKNOWN_METHOD = -32601


class ListUpstream(SessionUpstream, Protocol):
    """What the lists ask and tell their upstream."""

    is_shared: bool
    revision: str
    is_stopped: bool
    on_change: Callable[[], None]
    sign_in: SignIn | None

    def on_not_listed(self, problem: PeerError | Refused, owner: str) -> None: ...


class Batch:
    """Lists that are fetched because of one change: all are applied in one turn, so that a client hears of it once."""

    def __init__(self, size: int) -> None:
        self._missing = size
        self._is_complete = asyncio.Event()

    def arrive(self) -> None:
        self._missing -= 1
        if self._missing <= 0:
            self._is_complete.set()

    async def wait(self) -> None:
        """Wait for the others, but not for long: one slow session does not keep a change from the clients of others."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BATCH_SECONDS):
                await self._is_complete.wait()


class View:
    """The state of what an upstream lists for one owner with one set of capabilities."""

    def __init__(self, owner: str, key: CapabilityKey) -> None:
        self.owner = owner
        self.key = key
        self.is_loaded = False
        self.loading: asyncio.Task[bool] | None = None
        self.checked_at = self.listed_at = float("-inf")
        self.has_arrived = False  # its lists are fetched, and wait for those of others
        self.problem = ""  # why they could not be had, if this gateway refused it
        self.is_stale = False
        self.needs_sign_in = False  # its caller has no grant, or one that is not taken any more
        self.has_waited = False  # a request for a list has waited for a load, and none does again before it has come


class UpstreamLists:
    """Fetches the lists of one upstream, and brings them into the catalogs.

    A handshake upstream may list other things in each of its sessions, so each owner has a view.
    """

    def __init__(self, upstream: ListUpstream, pool: SessionPool, catalog: UpstreamCatalog) -> None:
        self.views: dict[ViewKey, View] = {}
        self._upstream = upstream
        self._pool = pool
        self._catalog = catalog
        self._refreshing: asyncio.TimerHandle | None = None

    def why_missing(self, owner: str, key: CapabilityKey) -> str:
        """Return why a caller has no lists of this upstream; empty if it has."""
        view = self.views.get(self._view_key(owner, key))
        if view is not None and view.is_loaded:
            return ""
        if view is not None and view.needs_sign_in and self._upstream.sign_in is not None:
            return self._upstream.sign_in.reason(principal_of(owner))
        problem = "" if view is None else view.problem
        return problem or f"{self._upstream.name} is not there now. Nothing was done."

    def prepare(self, owner: str, key: CapabilityKey, peer: CallPeer) -> asyncio.Task[bool] | None:
        """Have the lists ready for a caller; return the task to wait for, if there is one."""
        view = self._view(owner, key)
        if view.loading is None and not self._upstream.is_stopped:
            is_due = time.monotonic() - view.checked_at > (RECHECK_SECONDS if view.is_loaded else RETRY_SECONDS)
            is_watched = view.is_loaded and self._pool.is_watched(owner, key)
            if view.checked_at == float("-inf") or view.is_stale or (is_due and not is_watched):
                self._load(view, peer)
        return view.loading

    def wait_seconds(self, owner: str, key: CapabilityKey) -> float:
        """Return how long a request for a list waits for this upstream: for a first list, or in place of an old one."""
        view = self._view(owner, key)
        return 0.0 if view.has_waited or self._is_good(view) else self._upstream.terms.list_seconds

    def mark_waited(self, owner: str, key: CapabilityKey) -> None:
        """Let no other request for a list wait for this load."""
        view = self._view(owner, key)
        if self._is_good(view) or (view.is_loaded and view.loading is None):
            return
        if not view.has_waited:
            self._upstream.lose("LOSSY-23")
            what = "an old list of it was served" if view.is_loaded else "a list went without it"
            log.warning("gateway: %s: %s: it has not answered yet", self._upstream.name, what)
        view.has_waited = True

    def _is_good(self, view: View) -> bool:
        """Return whether a list can be served at once: its upstream watches over it, or it is not old."""
        is_new = time.monotonic() - view.listed_at <= MAX_AGE_SECONDS
        return view.is_loaded and (is_new or self._pool.is_watched(view.owner, view.key))

    def own_entry(self, entry: ToolEntry, owner: str, key: CapabilityKey) -> ToolEntry | None:
        """Return what a caller has in place of an entry; None if the upstream does not list it for that caller."""
        sign_in = self._upstream.sign_in
        if sign_in is not None and entry is sign_in.entry:
            return entry
        return self._catalog.own_entry(entry, self._view_key(owner, key))

    def hidden(self, method: str, owner: str, key: CapabilityKey) -> frozenset[str]:
        """Return the names of our entries that the upstream does not show to a caller."""
        hidden = self._catalog.hidden(method, self._view_key(owner, key))
        if (sign_in := self._upstream.sign_in) is None or method != "tools/list":
            return hidden
        view = self.views.get((owner, key))
        is_offered = view is not None and view.needs_sign_in and not is_anonymous(owner)
        return hidden if is_offered else hidden | {sign_in.entry.name}

    def variants(self, method: str, owner: str, key: CapabilityKey) -> list[ToolEntry]:
        """Return the entries that a caller has in place of those in the catalog."""
        return self._catalog.variants(method, self._view_key(owner, key))

    def _view_key(self, owner: str, key: CapabilityKey) -> ViewKey:
        return ("", NO_CAPABILITIES) if self._upstream.is_shared else (owner, key)

    def _view(self, owner: str, key: CapabilityKey) -> View:
        view_key = self._view_key(owner, key)
        view = self.views.get(view_key)
        if view is None:
            if len(self.views) >= MAX_VIEWS:
                oldest = next(iter(self.views))
                del self.views[oldest]
                self._catalog.forget(oldest)
            view = self.views[view_key] = View(owner, key)
        return view

    def _load(self, view: View, peer: CallPeer | None = None, batch: Batch | None = None) -> None:
        view.loading = asyncio.get_running_loop().create_task(self._load_view(view, peer, batch))
        view.loading.add_done_callback(partial(self._on_loaded, view, batch))

    def _on_loaded(self, view: View, batch: Batch | None, task: asyncio.Task[bool]) -> None:
        """Handle the end of a load, also of one that was cancelled before it began."""
        if batch is not None and not view.has_arrived:
            batch.arrive()
        view.checked_at = time.monotonic()
        if view.loading is task:
            view.loading = None
        if task.cancelled() or task.result():  # else everything is as it was
            self._upstream.on_change()

    async def _load_view(self, view: View, peer: CallPeer | None, batch: Batch | None) -> bool:
        """Fetch the lists of a view; return whether anything but their age may be another now."""
        view.is_stale, was_good = False, view.is_loaded and not view.needs_sign_in
        view.has_arrived = False
        session: UpstreamSession | None = None
        try:
            session = await self._pool.session(view.owner, view.key, peer)
            shared = self._view(view.owner, view.key)  # another one, if the upstream turned out to be stateless
            lists: dict[str, ListedEntries[Any] | None] = {}
            for method, entry_type in ENTRY_TYPES.items():
                try:
                    lists[method] = await session.fetch(method, entry_type)
                except RemoteProtocolError as refused:
                    if refused.code != _UNKNOWN_METHOD:
                        raise
                    lists[method] = None
            if batch is not None:
                view.has_arrived = True
                batch.arrive()
                await batch.wait()
            self._catalog.apply(self._view_key(view.owner, view.key), lists, self._upstream.revision)
            shared.is_loaded, view.needs_sign_in = True, False
            shared.has_waited, shared.listed_at = False, time.monotonic()
            if shared is not view:
                self.views.pop((view.owner, view.key), None)
            self._pool.breaker(view.owner).add_success()
            return not was_good or shared is not view
        except SignInRequired:
            view.has_waited = view.needs_sign_in = True
        except (PeerError, Refused) as problem:
            if (
                session is not None
                and isinstance(problem, PeerError)
                and await self._pool.is_put_back(session, problem)
            ):
                view.is_stale = True  # the next request for a list speaks the other revision
            view.has_waited, view.problem = True, problem.text if isinstance(problem, Refused) else ""
            if self._upstream.sign_in is not None and isinstance(problem, AuthorizationError):
                view.problem = self._upstream.sign_in.trouble
            log.warning("gateway: %s: not listed: %s", self._upstream.name, problem)
            self._upstream.on_not_listed(problem, view.owner)
        except Exception:
            log.exception("gateway: %s: its lists could not be used", self._upstream.name)
        return True

    def cache_hint(self, method: str) -> tuple[int, bool]:
        """Return how many milliseconds the list may be kept, and whether it is for one caller only."""
        session = self._pool.stateless
        if session is None or not session.connection.is_open:
            return 0, True  # an older server says nothing of it
        return session.cache_hint(method)

    def on_list_changed(self, session: UpstreamSession) -> None:
        """Refresh the lists of a session soon; several notices become one refresh."""
        view = self._view(session.owner, session.key)
        if not view.is_loaded:
            return
        view.is_stale = True
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().call_later(COALESCE_SECONDS, self._refresh_stale)

    def _refresh_stale(self) -> None:
        self._refreshing = None
        stale = [view for view in self.views.values() if view.is_stale and view.is_loaded]
        if any(view.loading is not None for view in stale):
            self._refreshing = asyncio.get_running_loop().call_later(COALESCE_SECONDS, self._refresh_stale)
        sessions = self._pool.sessions if self._pool.stateless is None else None
        due = [each for each in stale if sessions is None or (each.owner, each.key) in sessions]
        due = [each for each in due if each.loading is None and not self._upstream.is_stopped]
        batch = Batch(len(due)) if len(due) > 1 else None
        for view in due:
            self._load(view, batch=batch)

    async def load(self, key: CapabilityKey) -> None:
        """Fetch the lists for a set of capabilities, and wait for them as long as a first list may."""
        view = self._view("local", key)
        if view.loading is None:
            self._load(view)
        assert view.loading is not None
        await asyncio.wait({view.loading}, timeout=self._upstream.terms.list_seconds)

    async def refresh_for(self, owner: str, key: CapabilityKey) -> None:
        """Fetch the lists of one caller again, and wait for them."""
        view = self._view(owner, key)
        if view.loading is not None:  # it may have asked before what is to be known now
            await asyncio.wait({view.loading})
        if view.loading is None:
            for session in filter(None, (self._pool.stateless, self._pool.sessions.get((owner, key)))):
                session.expire_lists()
            self._load(view)
        if view.loading is not None:
            await asyncio.wait({view.loading})

    async def renew_for(self, principal: str, *, is_signed_in: bool) -> None:
        """Fetch the lists of a principal again whose grant has come or gone, and wait for them."""
        views = [each for each in self.views.values() if principal_of(each.owner) == principal]
        for view in views:
            if view.loading is not None:
                await asyncio.wait({view.loading})
            if not is_signed_in:
                self._catalog.forget((view.owner, view.key))
                view.is_loaded = False
            if view.loading is None:
                self._load(view)
        if loading := {each.loading for each in views if each.loading is not None}:
            await asyncio.wait(loading, timeout=self._upstream.terms.list_seconds)

    async def refresh(self) -> None:
        """Fetch the lists again for all callers, and wait for them."""
        for view in [*self.views.values()] or [self._view("local", NO_CAPABILITIES)]:
            if view.loading is None:
                for session in self._pool.sessions.values():
                    session.expire_lists()
                self._load(view)
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
