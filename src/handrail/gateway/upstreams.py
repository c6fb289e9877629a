"""All upstream servers of one server, as its engine asks for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from msgspec import UnsetType
from msgspec.structs import replace

from handrail.client.client import Client
from handrail.client.mcp_config import ConnectOptions, targets
from handrail.engine.call_state import CallPeer
from handrail.engine.catalog import ToolEntry
from handrail.engine.core import Engine
from handrail.engine.guard_set import owner_of
from handrail.gateway.catalog import METHODS
from handrail.gateway.leases import ForeignLease, Lease, Leases
from handrail.gateway.pool import SessionPool
from handrail.gateway.questions import CapabilityKey, capability_key
from handrail.gateway.session import principal_of
from handrail.gateway.settings import Terms, UpstreamOptions
from handrail.gateway.trust import LockFile, Pins
from handrail.gateway.upstream import Upstream
from handrail.model import ClientInfo
from handrail.revisions import Revision
from handrail.stores import StoreError
from handrail.suggest import check_options
from handrail.text.controls import strip_invisible

__all__ = ["Upstreams"]

log = logging.getLogger("handrail")

T = TypeVar("T")

MAX_INSTRUCTION_CHARS, MAX_ALL_INSTRUCTION_CHARS = 4_096, 32_768  # of one upstream, and of all
MAX_MEMOS, MEMO_SECONDS = 1_000, 1.0
POLL_SECONDS = 0.5  # between two looks at tools.lock, and at connections that are not used
CHECK_SECONDS = 5.0  # between two looks at who is still subscribed to a resource


class Upstreams:
    """The upstream servers of one server, in the order of its configuration."""

    def __init__(self, engine: Engine, owner: Any) -> None:
        self.engine = engine
        self.owner = owner
        self.by_name: dict[str, Upstream] = {}
        self._locks: dict[str, LockFile] = {}
        self._memos: dict[Any, tuple[float, Any]] = {}  # what all upstreams together said, and until when it counts
        self.leases: Leases | None = None  # where replicas share a store
        self._is_warned = False  # that other replicas cannot reach this one
        self._last_index = -1
        self._is_serving = False
        self._changing = asyncio.Lock()

    def include(self, thing: Any, prefix: str | None, options: UpstreamOptions) -> list[Upstream]:
        """Add what a client could connect to: a command, an address, entries of a configuration, a client.

        Also while the server serves: its lists change then.
        """
        check_options("include", options, UpstreamOptions.__annotations__)
        connect = ConnectOptions(
            options.get("transport", "auto"),
            options.get("headers"),
            options.get("auth"),
            options.get("env"),
            options.get("cwd"),
            options.get("agree"),
        )
        reached = thing.targets if isinstance(thing, Client) else targets(thing, connect)
        if len(reached) > 1 and "name" in options:
            raise ValueError(f"include: name={options['name']!r}: {len(reached)} servers have names of their own")
        added = []
        for target in reached:
            name = options.get("name", target.name)
            if name in self.by_name:
                raise ValueError(f"include: there is an upstream {name!r} already; give this one another name=…")
            own_prefix = prefix if prefix is not None else f"{name}_" if len(reached) > 1 else ""
            terms = Terms.of(name, own_prefix, options)
            if not terms.restarts and target.key.startswith(("http://", "https://")):
                raise ValueError(f'include {name!r}: restart: "never" is for a command; an address is only tried again')
            self.engine.guard_set.limit_upstream(name, terms.limits)
            pins = Pins(self._lock(options.get("lock")), name, target.label, terms.new, terms.pass_changes)
            oauth = options.get("auth") if terms.is_of_users else None
            if oauth is not None and not target.key.startswith(("http://", "https://")):
                raise ValueError(f"include {name!r}: auth: callers sign in over HTTP; this server is a command")
            self._last_index += 1
            upstream = Upstream(
                self.engine,
                self.owner,
                replace(target, name=name),
                terms,
                pins,
                self._last_index,
                self.on_change,
                oauth,
            )
            if upstream.sign_in is not None:
                self.engine.catalog.add(upstream.sign_in.entry)
                if not self.engine.has_shared_key:
                    log.warning("gateway: %s: sign-ins end with this process: set HANDRAIL_KEY to keep them", name)
            if (reason := self.engine.stops.get(("upstream", name))) is not None:
                upstream.is_stopped, upstream.problem, upstream.state = True, reason, "stopped"
            self.by_name[name] = upstream
            added.append(upstream)
        self.engine.use_upstreams(self)
        self.on_change()
        if self._is_serving:
            self.engine.announce_lists()
        return added

    async def remove(self, name: str) -> None:
        """Cancel the calls of an upstream, close its connections and take its entries away."""
        async with self._changing:
            await self._remove(name)

    async def _remove(self, name: str) -> None:
        upstream = self.by_name.pop(name)
        await upstream.stop("its configuration was removed")
        upstream.catalog.withdraw()
        self.engine.guard_set.upstream_limits.pop(name, None)
        if upstream.sign_in is not None:
            self.engine.catalog.exchange([upstream.sign_in.entry], ())
        for each in self.by_name.values():
            each.catalog.judge_again()  # what had the same names may have them now
        self.on_change()

    async def replace(self, name: str, thing: Any, prefix: str | None, options: UpstreamOptions) -> Upstream:
        """Reach an upstream in another way, or with other options, at the same place in the order."""
        check_options("include", options, UpstreamOptions.__annotations__)  # a wrong one leaves the upstream as it is
        Terms.of(name, prefix or "", options)
        async with self._changing:
            previous, order = self.by_name[name], [*self.by_name]
            await self._remove(name)
            [upstream] = self.include(thing, prefix, {**options, "name": name})
            upstream.catalog.index = previous.catalog.index
            self.by_name = {each: self.by_name[each] for each in order if each in self.by_name} | self.by_name
            return upstream

    def _lock(self, path: str | Path | None) -> LockFile:
        key = "" if path is None else str(Path(path).absolute())
        if key not in self._locks:
            self._locks[key] = LockFile(path)
        return self._locks[key]

    # For the engine

    def prepare(self, method: str, peer: CallPeer, revision: Revision, client: ClientInfo) -> Awaitable[None] | None:
        key = capability_key(revision, client)
        owner = SessionPool.owner(peer, key, revision)
        memo = ("prepare", method, owner, key, revision.name)
        if self._remembered(memo) is not None:
            return None
        waits: dict[asyncio.Task[bool], float] = {}
        for upstream in self.by_name.values():
            task = upstream.lists.prepare(owner, key, peer)
            if task is not None and (seconds := upstream.lists.wait_seconds(owner, key)):
                waits[task] = seconds
        if waits:
            return _wait(waits, partial(self._on_waited, owner, key, method, revision))
        self._count_losses(method, revision)
        self._remember(memo, True)  # what is still loading tells by `on_change`
        return None

    def _on_waited(self, owner: str, key: CapabilityKey, method: str, revision: Revision) -> None:
        for upstream in self.by_name.values():
            upstream.lists.mark_waited(owner, key)
        self._count_losses(method, revision)

    def _count_losses(self, method: str, revision: Revision) -> None:
        for upstream in self.by_name.values() if method in METHODS else ():
            upstream.count_definition_losses(method, revision)

    def hidden(self, method: str, peer: CallPeer, revision: Revision, client: ClientInfo) -> frozenset[str]:
        key = capability_key(revision, client)
        owner = SessionPool.owner(peer, key, revision)
        memo = ("hidden", method, owner, key)
        hidden: frozenset[str] | None = self._remembered(memo)
        if hidden is None:
            parts = [upstream.lists.hidden(method, owner, key) for upstream in self.by_name.values()]
            hidden = self._remember(memo, frozenset().union(*parts))
        return hidden

    def variants(self, method: str, peer: CallPeer, revision: Revision, client: ClientInfo) -> tuple[ToolEntry, ...]:
        key = capability_key(revision, client)
        owner = SessionPool.owner(peer, key, revision)
        memo = ("variants", method, owner, key)
        variants: tuple[ToolEntry, ...] | None = self._remembered(memo)
        if variants is None:
            parts = [upstream.lists.variants(method, owner, key) for upstream in self.by_name.values()]
            variants = self._remember(memo, tuple(chain.from_iterable(parts)))
        return variants

    def cache_hint(self, method: str) -> tuple[int, bool]:
        hint: tuple[int, bool] | None = self._remembered(("hint", method))
        if hint is None:
            hints = [upstream.lists.cache_hint(method) for upstream in self.by_name.values()]
            least = min((ttl for ttl, _ in hints), default=0)
            hint = self._remember(("hint", method), (least, any(is_private for _, is_private in hints)))
        return hint

    def on_change(self) -> None:
        """Forget what was computed of all upstreams: one of them has changed."""
        self._memos.clear()

    def _remembered(self, memo: Any) -> Any:
        """Return what was computed a moment ago, while nothing has changed since; None if there is nothing."""
        until, value = self._memos.get(memo, (0.0, None))
        return value if time.monotonic() < until else None

    def _remember(self, memo: Any, value: T) -> T:
        if len(self._memos) >= MAX_MEMOS:
            self._memos.clear()
        self._memos[memo] = time.monotonic() + MEMO_SECONDS, value
        return value

    def instructions(self, own: str | UnsetType) -> str | UnsetType:
        parts = [own] if type(own) is str else []
        sanitizer = self.engine.guard_set.sanitizer
        for upstream in self.by_name.values():
            is_for_all = upstream.sign_in is None  # what one account is told may be about it
            if is_for_all and upstream.is_trusted and (text := upstream.instructions[:MAX_INSTRUCTION_CHARS]):
                clean = strip_invisible(text) if sanitizer is None else sanitizer.text(strip_invisible(text))
                parts.append(f"# {upstream.name}\n{clean}")
        return "\n\n".join(parts)[:MAX_ALL_INSTRUCTION_CHARS] if parts else own

    async def finish_sign_in(self, name: str, query: str) -> tuple[int, str]:
        upstream = self.by_name.get(name)
        if upstream is None or upstream.sign_in is None:
            return 404, "There is nothing here."
        return await upstream.sign_in.grants.finish(query)

    def watch(
        self,
        entry: ToolEntry,
        peer: CallPeer,
        revision: Revision,
        client: ClientInfo,
        is_wanted: Callable[[], Awaitable[object]],
    ) -> None:
        key = capability_key(revision, client)
        owner = SessionPool.owner(peer, key, revision)
        self.by_name[entry.upstream].watches.add(entry, peer, owner, key, is_wanted)

    def is_leased(self, entry: ToolEntry) -> bool:
        upstream = self.by_name.get(entry.upstream)
        if self.leases is None or upstream is None or not upstream.is_command:
            return False
        if not self.engine.address and not self._is_warned:
            self._is_warned = True
            log.warning("gateway: each replica runs processes of its own: no other one reaches this one; set advertise")
        return bool(self.engine.address)

    async def other_holder(self, entry: ToolEntry, owner: str) -> ForeignLease | None:
        assert self.leases is not None
        return await self.leases.other_holder(entry.upstream, owner)

    def _own_lease(self, replica: str) -> Lease:
        return Lease(self.engine.address, replica)

    def _is_used(self, name: str, owner: str) -> bool:
        """Return whether an owner has a connection to an upstream, or a call that waits for one or shares one."""
        upstream, in_flight = self.by_name.get(name), self.engine.in_flight
        if upstream is None:
            return False
        calls = [each.state for each in upstream.pool.calls]
        calls += [] if in_flight is None else [each for each in in_flight.tasks.values() if each.entry.upstream == name]
        return any(principal_of(each) == owner for each, _ in upstream.pool.sessions) or any(
            owner_of(each.principal, each.peer.address) == owner for each in calls
        )

    def _on_lease_lost(self, name: str, owner: str) -> None:
        if (upstream := self.by_name.get(name)) is not None:
            upstream.pool.end_of(owner)

    def is_up(self, name: str) -> bool:
        return name in self.by_name and self.by_name[name].state == "up"

    def own_entry(self, entry: ToolEntry, peer: CallPeer, revision: Revision, client: ClientInfo) -> ToolEntry | None:
        upstream = self.by_name.get(entry.upstream)
        if upstream is None:
            return None
        key = capability_key(revision, client)
        return upstream.lists.own_entry(entry, SessionPool.owner(peer, key, revision), key)

    def why_absent(self, name: str, peer: CallPeer, revision: Revision, client: ClientInfo) -> str:
        key = capability_key(revision, client)
        owner = SessionPool.owner(peer, key, revision)
        for upstream in self.by_name.values():
            if name.startswith(upstream.terms.prefix) and (why := upstream.lists.why_missing(owner, key)):
                return why
        return ""

    # Lifecycle

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Close all connections at the end."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(work) for work in (self._keep_house(), self._check_subscriptions())]
        self._is_serving = True
        async with AsyncExitStack() as stack:
            if (store := self.engine.guard_set.shared_store) is not None:
                own_lease = partial(self._own_lease, token_hex(8))
                self.leases = Leases(store, self.engine.seal, own_lease, self._is_used, self._on_lease_lost)
                await stack.enter_async_context(self.leases.renewing())
                self.engine.has_leases = True
                stack.callback(setattr, self.engine, "has_leases", False)
            try:
                yield
            finally:
                self._is_serving = False
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*(each.close() for each in self.by_name.values()), return_exceptions=True)

    def _listening(self) -> set[str]:
        """Return the owners of connections that have a client with an open stream for notifications."""
        owners = set()
        for stream in list(self.engine.open_streams):
            owner = owner_of(stream.principal, stream.address)
            owners |= {owner, f"{owner} #{stream.connection.number}"}
        return owners

    async def _keep_house(self) -> None:
        """Judge the tools anew when a person has accepted some in another process; end what is not used."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            listening = self._listening()
            for upstream in [*self.by_name.values()]:
                upstream.pool.end_idle(loop.time(), listening)
            for lock in self._locks.values():
                try:
                    if lock.refresh():
                        for upstream in self.by_name.values():
                            upstream.catalog.judge_again()
                except Exception as problem:  # it cannot be read, or what is listed now cannot be pinned in it
                    log.error("gateway: %s", problem)

    async def _check_subscriptions(self) -> None:
        """End subscriptions that no client needs any more. It has a task of its own, since the store may be slow."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for upstream in [*self.by_name.values()]:
                try:
                    await upstream.watches.check()
                except StoreError as problem:  # it knows who is subscribed
                    log.warning("gateway: %s: subscriptions not checked: %s", upstream.name, problem)
                except Exception:
                    log.exception("gateway: %s: subscriptions not checked", upstream.name)


async def _wait(waits: Mapping[asyncio.Task[bool], float], on_waited: Callable[[], None]) -> None:
    """Wait for each task as long as it may take: a slow upstream does not delay the lists of the others for ever."""
    try:
        await _wait_for_all(waits)
    finally:
        on_waited()


async def _wait_for_all(waits: Mapping[asyncio.Task[bool], float]) -> None:
    loop = asyncio.get_running_loop()
    began, pending = loop.time(), set(waits)
    while pending:
        now = loop.time() - began
        due = {task for task in pending if not task.done() and waits[task] > now}
        if not due:
            return
        _, pending = await asyncio.wait(
            due, timeout=max(waits[task] for task in due) - now, return_when=asyncio.FIRST_COMPLETED
        )
