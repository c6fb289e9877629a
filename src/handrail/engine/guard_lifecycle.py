"""The start and the end of a server's guards: open the stores, the audit log and the approvals, then close them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, cast

from handrail import stores
from handrail.approvals.webhook import WebhookSender
from handrail.engine.catalog import ToolCatalog
from handrail.engine.guard_set import GuardSet, configured_store
from handrail.engine.results import TOOL_NAME, TruncatedResults, smallest_cap
from handrail.guards.limits import MemoryLimiter, Rates, without_counts
from handrail.guards.sanitize import Sanitize
from handrail.protocol.http_rules import HttpPost
from handrail.stores import Store, StoreError, is_url, public_url
from handrail.stores.memory import MemoryStore

if TYPE_CHECKING:
    from handrail.audit.log import Trail
    from handrail.guards.limits import SharedLimiter
    from handrail.stores.redis import RedisStore
log = logging.getLogger("handrail")


@asynccontextmanager
async def open_guards(guards: GuardSet, post: HttpPost, listener_store: Store | None = None) -> AsyncIterator[None]:
    """Open what the guards need while the server serves.

    `post` sends the requests of a webhook. The processes of one listener share limits in `listener_store`, unless the
    guards have a store of their own.
    """
    prefix, numbers = token_hex(6), count(1)  # random bytes for each call would be a system call each
    guards.next_serial = lambda: f"{prefix}{next(numbers)}"  # unique over all processes
    async with AsyncExitStack() as stack:
        await _GuardOpening(guards, stack).open(post, listener_store)
        yield


class _GuardOpening:
    """One opening of a server's guards. Everything it opens is closed by its stack, the last one first."""

    def __init__(self, guards: GuardSet, stack: AsyncExitStack) -> None:
        self._guards = guards
        self._stack = stack
        self._own_store: Store | None = None

    async def open(self, post: HttpPost, listener_store: Store | None) -> None:
        guards = self._guards
        audit, store_option = guards.options.get("audit"), guards.options.get("store")
        try:
            store = self._open_store(store_option) if isinstance(store_option, str | Path) else store_option
            if store is not None and stores.supports(store, "replicas"):
                self._stack.callback(setattr, guards, "shared_store", None)
                guards.shared_store = store
            if isinstance(audit, str | Path):
                store = self._open_trail(audit, store, post)
            else:
                self._stack.callback(setattr, guards, "trail", None)
                guards.trail = audit
                if audit is not None:
                    if audit.store is None:
                        raise ValueError("audit: this trail has no store to keep approvals in; open_trail(…, store=…)")
                    store = audit.store
                guards.use_store(store)
            await self._check_durability(guards.store)
        except (OSError, StoreError) as problem:
            places = " and ".join(
                public_url(str(each)) for each in (audit, store_option) if isinstance(each, str | Path)
            )
            cause = problem.strerror if isinstance(problem, OSError) else problem
            raise StoreError(f"{places or 'store'}: records and approvals cannot be kept there: {cause}") from problem
        self._share_limits(
            guards.shared_store or (None if stores.supports(guards.store, "replicas") else store) or listener_store
        )
        if guards.approval_queue.options.webhook.url:
            sender = WebhookSender(guards.approval_queue.options.webhook, guards.approval_queue, post)
            guards.approval_queue.on_created = sender.send
            self._stack.push_async_callback(sender.close)

    def _open_store(self, place: str | Path) -> Store:
        settings, guards = self._guards.options.get("trail"), self._guards
        if stores.is_database(str(place)):
            raise ValueError("store: PostgreSQL keeps the audit log and its approvals: give this URL as `audit`")
        durable = settings is None or settings.sync == "every-call"
        store = stores.open(place, durable=durable, clock=guards.clock, name=guards.name)
        if store.path:
            self._own_store = store
        self._stack.callback(guards.use_store, configured_store(guards.options))
        self._stack.push_async_callback(store.close)
        return store

    def _open_trail(self, place: str | Path, store: Store | None, post: HttpPost) -> Store | None:
        """Open the audit log; return the store of shared limits.

        In a database it has the approvals too: one transaction uses one up and records it. With a file and a store that
        replicas share, the approvals are in that store: the file is of one machine.
        """
        from handrail.audit.log import DATABASES, open_trail

        guards, settings = self._guards, self._guards.options.get("trail")
        if is_url(place):
            trail = open_trail(str(place), settings, clock=guards.clock, name=guards.name, post=post)
            self._use_trail(trail)
            guards.use_store(trail.store)
            return store
        path = Path(place)
        if path.suffix in DATABASES and (store is None or not stores.supports(store, "replicas")):
            if store is not None:
                raise ValueError(f"store: approvals are kept with the audit, in {path.name}; leave it out")
            own_store = self._open_store(path)
            self._use_trail(open_trail(own_store, settings, clock=guards.clock, post=post))
            guards.use_store(own_store)
            return own_store
        approval_store = MemoryStore(clock=guards.clock) if store is None else store
        self._use_trail(open_trail(path, settings, store=approval_store, clock=guards.clock, post=post))
        guards.use_store(approval_store, shared=store is not None)
        return store

    async def _check_durability(self, store: Store) -> None:
        """Refuse to keep approvals where a yes may be lost after it was used, and so count twice."""
        if self._guards.options.get("accept_loss") or not stores.supports(store, "replicas"):
            return
        report = await store.report()
        if report.losses:
            raise StoreError(
                f"{report.engine} may lose a write ({'; '.join(report.losses)}), and an approval could be used twice."
                " Mend that, keep the audit log in PostgreSQL, or accept it with accept_loss = true"
            )

    def _use_trail(self, trail: Trail) -> None:
        async def close() -> None:
            self._guards.trail = None
            await trail.close()

        self._guards.trail = trail
        self._stack.push_async_callback(close)

    def _share_limits(self, store: Store | None) -> None:
        """Count the limits of all processes in `store`, if there is one and the limits are worth sharing."""
        guards = self._guards
        rates = guards.options.get("rates", Rates())
        limits = guards.upstream_limits
        alone, together = (None, None) if rates is None else rates.split(has_upstreams=bool(limits))
        if rates is None or alone is None or together is None:
            return
        if store is None and rates.shared:
            raise ValueError("rates: shared: nothing to share them by; give the server an audit in SQLite, or a store")
        if store is None and is_url(guards.options.get("audit")):
            log.warning(
                "limits: each replica counts by itself, so callers get more; give the server a store, redis://…"
            )
        if store is None or (not stores.supports(store, "processes") and not rates.shared):
            return
        from handrail.guards.limits import StoreLimiter

        if self._own_store is not None and store is self._own_store and store.path:  # counts need not wait for the disk
            store = stores.open(self._own_store.path, durable=False, clock=guards.clock)
            self._stack.push_async_callback(store.close)
        local_limiter = MemoryLimiter(alone, find=without_counts(guards.find_limit))
        limiter: SharedLimiter
        if stores.supports(store, "scripts"):
            from handrail.guards.redis_limits import RedisLimiter

            limiter = RedisLimiter(
                cast("RedisStore", store),
                together,
                name=guards.name,
                find=guards.find_limit,
                local_limiter=local_limiter,
            )
        else:
            limiter = StoreLimiter(
                store, together, name=guards.name, find=guards.find_limit, local_limiter=local_limiter
            )
        guards.store_limiter = limiter
        if rates.split()[1] is not None or any(each.all for each in limits.values()):
            guards.limiter = guards.shared_limiter = limiter
        self._stack.push_async_callback(self._stop_sharing, limiter)

    async def _stop_sharing(self, limiter: SharedLimiter) -> None:
        await limiter.close()
        self._guards.limiter = self._guards.request_limiter
        self._guards.shared_limiter = self._guards.store_limiter = None


@contextmanager
def offer_read_more(guards: GuardSet, catalog: ToolCatalog, owner: Any) -> Iterator[None]:
    """List the tool that reads on where a result was cut, if results may be cut."""
    sanitizer, cap = guards.sanitizer, smallest_cap(guards.options.get("sanitize") or Sanitize())
    truncated_results = TruncatedResults(guards.name, cap, guards.store)
    if sanitizer is None or not cap or not truncated_results.offer(catalog, owner):
        yield
        return
    guards.truncated_results = truncated_results
    sanitizer.store_remainder = truncated_results.new_handle
    try:
        yield
    finally:
        guards.truncated_results = sanitizer.store_remainder = None
        if any(entry.trusted_output for entry in catalog.entries):  # also one that was switched off
            catalog.remove(TOOL_NAME)
