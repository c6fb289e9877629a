"""Leases of upstream commands: which replica runs the command of an upstream server for a caller.

A command may keep state, so all calls of one owner go to one process of it. The replica that takes a call first takes a
lease in the store that replicas share, and renews it while it has the connection; the others pass the calls on to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import cached_property, partial
from hashlib import blake2b

from msgspec import Struct

from handrail.protocol.seal import Seal
from handrail.stores import Delete, Store, StoreError

__all__ = ["Lease", "Leases"]

log = logging.getLogger("handrail")

LEASE_SECONDS = 15.0
RENEW_SECONDS = 5.0
KNOWN_SECONDS = 2.0  # for which the holder of a lease is not looked up again
MAX_KNOWN = 10_000
_PURPOSE, _NEVER = "lease", 2**53  # the store ends a lease


class Lease(Struct, frozen=True):
    """Who holds it: the address of a replica, and its id, which no earlier one had."""

    address: str
    replica: str


class ForeignLease(Struct, frozen=True):
    """A lease that another replica holds."""

    leases: Leases
    key: str
    address: str
    value: bytes  # as it is stored

    async def still_holds(self) -> bool:
        """Return whether the replica has its lease; False if it does not renew it, or has given it back."""
        return await self.leases.store.get(self.key) == self.value

    async def give_up(self) -> None:
        """End the lease of a replica that cannot be reached any more."""
        self.leases.forget(self.key)
        await self.leases.store.commit([Delete(self.key, if_equals=self.value)])


class _Held(Struct, eq=False):
    upstream: str
    owner: str
    until: float  # by the clock of the event loop


class Leases:
    """The leases of one replica, and what it knows of those of others."""

    def __init__(
        self,
        store: Store,
        seal: Seal,
        own: Callable[[], Lease],
        is_used: Callable[[str, str], bool],
        on_lost: Callable[[str, str], None],
    ) -> None:
        """`own` is asked once the server listens. `is_used` tells whether an owner has a connection to an upstream,
        or a call of it; `on_lost` has to end the connection.
        """
        self.store = store
        self._seal = seal
        self._own = own
        self._is_used = is_used
        self._on_lost = on_lost
        self._held: dict[str, _Held] = {}  # by key
        self._known: dict[str, tuple[float, ForeignLease | None]] = {}  # of other replicas, and until when that counts

    @cached_property
    def _value(self) -> bytes:
        """This replica's leases, as they are stored. Requests go to their address: who writes the store forges none."""
        own = self._own()
        return self._seal.seal(_PURPOSE, "", [own.address, own.replica], _NEVER).encode()

    def _foreign(self, key: str, value: bytes) -> ForeignLease:
        content = self._seal.read(_PURPOSE, "", value.decode("latin-1"))
        if content is None:
            raise StoreError("what is stored there is no lease of a replica")
        return ForeignLease(self, key, content[1][0], value)

    async def other_holder(self, upstream: str, owner: str) -> ForeignLease | None:
        """Return the lease of another replica; None if this one has it. One that is free is taken.

        While the store is away a replica goes on with what it has, and serves the rest by itself.
        """
        key, now = _key(upstream, owner), asyncio.get_running_loop().time()
        if (held := self._held.get(key)) is not None and held.until > now:
            return None
        until, lease = self._known.get(key, (0.0, None))
        if lease is not None and until > now:
            return lease
        try:
            lease = await self._claim(key)
            while lease is not None and lease.address == self._own().address:
                await lease.give_up()  # of a process that was here before this one
                lease = await self._claim(key)
        except StoreError as problem:
            log.warning("gateway: %s: not known which replica has it, served by this one: %s", upstream, problem)
            return None
        if lease is None:
            self._held[key] = _Held(upstream, owner, now + LEASE_SECONDS)
            return None
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[key] = now + KNOWN_SECONDS, lease
        return lease

    async def _claim(self, key: str) -> ForeignLease | None:
        """Take a lease if it is free; return that of another replica; None if this one has it."""
        while not await self.store.put(key, self._value, ttl=LEASE_SECONDS, if_absent=True):
            if (value := await self.store.get(key)) is not None:
                return None if value == self._value else self._foreign(key, value)
        return None

    def forget(self, key: str) -> None:
        """Look up again who holds a lease."""
        self._known.pop(key, None)

    @asynccontextmanager
    async def renewing(self) -> AsyncIterator[None]:
        """Keep the leases that are used while the context is open, then give all of them back."""
        task = asyncio.get_running_loop().create_task(self._renew_for_ever())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            with suppress(StoreError):
                for key in [*self._held]:
                    await self.store.commit([Delete(key, if_equals=self._value)])
            self._held.clear()

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            # All at once: one after the other, many would take longer than they last.
            await asyncio.gather(*(self._renew_or_lose(key, held) for key, held in self._held.items()))

    async def _renew_or_lose(self, key: str, held: _Held) -> None:
        try:
            await self._renew(key, held)
        except StoreError as problem:
            log.warning("gateway: %s: lease not renewed: %s", held.upstream, problem)
        if held.until <= asyncio.get_running_loop().time() and self._held.pop(key, None) is not None:
            text = "gateway: %s: lease lost: not renewed in time, or another replica advertises the address of this one"
            log.warning(text, held.upstream)
            self._on_lost(held.upstream, held.owner)

    async def _renew(self, key: str, held: _Held) -> None:
        """Renew a lease, or give it back if its connection has ended. One that another replica has now is lost."""
        now = asyncio.get_running_loop().time()
        if not self._is_used(held.upstream, held.owner):
            del self._held[key]
            await self.store.commit([Delete(key, if_equals=self._value)])
            return
        put = partial(self.store.put, key, self._value, ttl=LEASE_SECONDS)
        is_ours = await put(if_equals=self._value) or await put(if_absent=True)  # the store may have lost it
        held.until = now + LEASE_SECONDS if is_ours else now


def _key(upstream: str, owner: str) -> str:
    digest = blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"upstream-lease:{upstream}:{digest}"
