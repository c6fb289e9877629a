"""The limits of `limits.py`, kept in a store: processes that share it share them.

One exchange with the store is under way at a time. Whatever comes meanwhile (calls, slots given back, leases to renew)
is settled together by the next: read, decide, write if no other process has written in between, else begin again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from hashlib import blake2b
from secrets import token_bytes, token_hex

from msgspec import Struct
from msgspec.json import decode, encode

from handrail.errors import Kind, Refused
from handrail.guards.limits import (
    ANONYMOUS,
    BUSY_SECONDS,
    LOCAL,
    MAX_BUCKETS,
    Admission,
    Charge,
    MemoryLimiter,
    Plans,
    Rates,
    Throttled,
    busy,
    network,
)
from handrail.stores import Delete, Put, Store, StoreError

log = logging.getLogger("handrail")

MAX_GROUP = 256  # calls settled together
MAX_ATTEMPTS = 100  # that other processes may spoil
CONTENDED = Throttled(BUSY_SECONDS, "what the store can count", "concurrency")
COUNT_TIMEOUT_SECONDS = 10.0  # for one of them
EXTRA_TTL_SECONDS = 1.0  # that the store keeps a value for longer than it is needed


class StoreLimiter:
    """Counts in `store`, by the time of day, which is what processes have in common.

    When that goes back, a bucket is at worst empty, and fills in its own time. A slot is held by a lease, renewed while
    the call runs: the slots of a process that was killed are free when its lease ends.

    For one event loop. The store need not be durable: to lose some counts in a power cut does no harm. Servers of
    different names count apart, and `alone` says what need not be asked of the store.
    """

    def __init__(
        self,
        store: Store,
        rates: Rates,
        *,
        name: str = "",
        local_limiter: MemoryLimiter | None = None,
        lease_seconds: float = 30.0,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store = store
        self._prefix = f"{len(name)}:{name}:" if name else ""
        self._local_limiter = local_limiter
        self._plans = Plans(rates)
        self._lease = round(lease_seconds * 1e9)
        self._clock = clock
        self._holder_id = token_hex(8)
        self._salt = b""
        self._held: Counter[str] = Counter()  # slots, by tool
        self._stale: set[str] = set()  # tools of whose slots the store has to be told
        self._waiting: list[_PendingTake] = []
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # By caller and tool: from when until when, and what was said.
        self._refusals: dict[tuple[str, str], dict[str, tuple[int, int, Throttled]]] = {}

    def take(self, principal: str, tool: str, address: str = "") -> Throttled | Awaitable[Admission] | None:
        plan = self._plans[tool]
        if address and principal == ANONYMOUS:
            charges, kind, caller = plan.address_charges, "address", network(address)
        else:
            charges, kind, caller = (
                plan.local_charges if principal == LOCAL else plan.principal_charges,
                "principal",
                principal,
            )
        throttled = None if self._local_limiter is None else self._local_limiter.take(principal, tool, address)
        if isinstance(throttled, Throttled):
            return throttled
        if not charges and plan.slots is None:
            return None
        caller, tool = self._prefix + caller, self._prefix + tool
        # No token is put back, so a refusal stands until its time has come: a flood does not reach the store.
        refusals = self._refusals.get((kind, caller))
        if refusals is not None and tool in refusals:
            since, until, throttled = refusals[tool]
            if since <= (now := self._clock()) < until:
                return Throttled((until - now) / 1e9, throttled.limit, throttled.scope)
        return self._enqueue(tool, kind, caller, charges, plan.slots)

    def take_slot(self, tool: str) -> Awaitable[Admission] | None:
        slots = self._plans[tool].slots
        return None if slots is None else self._enqueue(self._prefix + tool, "", "", [], slots)

    def _enqueue(
        self, tool: str, kind: str, caller: str, charges: list[Charge], slots: int | None
    ) -> Awaitable[Admission]:
        pending = _PendingTake(tool, kind, caller, charges, slots, asyncio.get_running_loop().create_future())
        self._waiting.append(pending)
        self._ensure_running()
        return _await_admission(pending)

    async def close(self) -> None:
        """Give back what is held. The store stays open."""
        if self._timer is not None:
            self._timer.cancel()
        self._stale |= self._held.keys()
        self._held.clear()
        self._ensure_running()
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    def _release(self, tool: str) -> None:
        self._held[tool] -= 1
        self._stale.add(tool)
        self._ensure_running()

    def renew(self) -> None:
        """Renew the leases of what is held. This happens by itself, three times in the time of a lease."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._held = +self._held  # without what is 0
        self._stale |= self._held.keys()
        if self._held:
            self._timer = asyncio.get_running_loop().call_later(self._lease / 3e9, self.renew)
            self._ensure_running()

    def _grant_slot(self, tool: str) -> Callable[[], None]:
        self._held[tool] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._lease / 3e9, self.renew)
        return partial(self._release, tool)

    def _ensure_running(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._waiting or self._stale:
            group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
            stale, self._stale = self._stale, set()
            try:
                await self._settle([each for each in group if not each.admission.done()], stale)
            except Exception as problem:  # whatever it is, the callers have to hear of it
                for each in group:
                    if not each.admission.done():
                        each.admission.set_exception(StoreError(f"limits: {problem}"))

    async def _settle(self, group: list[_PendingTake], stale: set[str]) -> None:
        if not self._salt and any(each.kind == "address" for each in group):
            await self._store.put("rate:salt", token_bytes(16), if_absent=True)
            self._salt = await self._store.get("rate:salt") or b""
        for each in group:
            each.keys = [_key(each, charge, self._salt) for charge in each.charges]
        tools = stale | {each.tool for each in group if each.slots is not None}
        keys = [*{key for each in group for key in each.keys}, *map(_slots, tools)]
        now = 0
        for _ in range(MAX_ATTEMPTS):
            values = dict(zip(keys, await asyncio.gather(*map(self._store.get, keys)), strict=True))
            now = self._clock()  # only now: what was found is not of the future, unless the clock went back
            settlement = _Settlement(values, now, self._lease, self._holder_id, Counter(self._held))
            admissions = [settlement.charge(each) for each in group]
            changes = settlement.changes(tools)
            if not changes or await self._store.commit(changes):
                break
        else:
            admissions = [CONTENDED] * len(group)
        for each, admission in zip(group, admissions, strict=True):
            if each.admission.done():  # cancelled meanwhile: its slot is free
                self._stale |= tools & {each.tool}
            elif admission is None and each.slots is not None:
                each.admission.set_result(self._grant_slot(each.tool))
            else:
                each.admission.set_result(admission)
            self._remember_refusal(each, now, admission)

    def _remember_refusal(self, pending: _PendingTake, now: int, refusal: Throttled | None) -> None:
        if refusal is None:  # from now on the others are refused for longer
            self._refusals.pop((pending.kind, pending.caller), None)
        elif refusal.scope != "concurrency":
            if len(self._refusals) >= MAX_BUCKETS:
                self._refusals.clear()
            until = now + round(refusal.retry_after * 1e9)
            self._refusals.setdefault((pending.kind, pending.caller), {})[pending.tool] = (now, until, refusal)


async def await_charge(pending: Awaitable[Admission]) -> None:
    """Until a request that takes no slot was counted; `Refused` if there were too many, or the store fails."""
    try:
        async with asyncio.timeout(COUNT_TIMEOUT_SECONDS):
            admission = await pending
    except (StoreError, TimeoutError) as problem:
        log.error("a request was refused, as it cannot be counted: %s", str(problem) or "it takes too long")
        raise Refused(Kind.UNRECORDED, "This cannot be counted now; the server's log says why") from None
    if isinstance(admission, Throttled):
        raise admission.refusal()


class _PendingTake(Struct, eq=False):
    """A call that waits for its turn."""

    tool: str
    kind: str
    caller: str
    charges: list[Charge]
    slots: int | None
    admission: asyncio.Future[Admission]
    keys: list[str] = []


async def _await_admission(pending: _PendingTake) -> Admission:
    try:
        return await pending.admission
    except asyncio.CancelledError:
        release = None if pending.admission.cancelled() else pending.admission.result()
        if callable(release):
            release()
        raise


class _Settlement(Struct, eq=False):
    """What was found in the store, and what a group of calls makes of it."""

    stored_values: dict[str, bytes | None]
    now: int
    lease: int
    holder_id: str
    held: Counter[str]
    full_at: dict[str, int] = {}

    def charge(self, pending: _PendingTake) -> Throttled | None:
        now, tightest, wait, ends = self.now, None, 0, {}
        for charge, key in zip(pending.charges, pending.keys, strict=True):
            window = charge.cost + charge.slack
            # No bucket is more than empty: one that seems to be is from before the clock went back.
            end = self.full_at.setdefault(key, min(int(self.stored_values[key] or 0), now + window))
            ends[key] = max(end, now) + charge.cost
            if ends[key] - now - window > wait:
                tightest, wait = charge, ends[key] - now - window
        if tightest is not None:
            return Throttled(wait / 1e9, tightest.limit, tightest.scope)
        if pending.slots is not None:
            if (
                self.held[pending.tool] + sum(slots for slots, _ in self._other_leases(pending.tool).values())
                >= pending.slots
            ):
                return busy(pending.slots)
            self.held[pending.tool] += 1
        self.full_at |= ends
        return None

    def changes(self, tools: Iterable[str]) -> list[Put | Delete]:
        """What has to be written, if what was found is still there."""
        operations: list[Put | Delete] = []
        for key, end in self.full_at.items():
            if end > self.now and b"%d" % end != self.stored_values[key]:
                operations.append(self._put(key, b"%d" % end, end))
        for tool in tools:
            key, until = _slots(tool), self.now + self.lease
            leases = self._other_leases(tool)
            if self.held[tool] > 0:
                slots, end = self._leases(tool).get(self.holder_id, (0, 0))
                is_good = slots == self.held[tool] and end - self.now > self.lease * 3 // 4
                leases[self.holder_id] = (slots, end) if is_good else (self.held[tool], until)
            value = encode(leases, order="sorted")
            if leases and value != self.stored_values[key]:
                operations.append(self._put(key, value, until))
            elif not leases and self.stored_values[key] is not None:
                operations.append(Delete(key, if_equals=self.stored_values[key]))
        return operations

    def _put(self, key: str, value: bytes, end: int) -> Put:
        current = self.stored_values[key]
        ttl = (end - self.now) / 1e9 + EXTRA_TTL_SECONDS
        return Put(key, value, ttl, if_absent=current is None, if_equals=current)

    def _leases(self, tool: str) -> dict[str, tuple[int, int]]:
        """Slots that processes hold, and until when."""
        leases = decode(self.stored_values[_slots(tool)] or b"{}", type=dict[str, tuple[int, int]])
        latest = self.now + self.lease
        return {holder: (slots, min(end, latest)) for holder, (slots, end) in leases.items() if end > self.now}

    def _other_leases(self, tool: str) -> dict[str, tuple[int, int]]:
        return {holder: lease for holder, lease in self._leases(tool).items() if holder != self.holder_id}


def _slots(tool: str) -> str:
    return f"slots:{tool}"


def _key(pending: _PendingTake, charge: Charge, salt: bytes) -> str:
    """Where a bucket is kept. Addresses, of which a client can make up any number, share 65,536 of each sort.

    Which addresses share one is a secret: no client can choose an address to use up the bucket of another.
    """
    caller = pending.caller
    if pending.kind == "address":
        caller = blake2b(caller.encode("utf-8", "surrogatepass"), key=salt, digest_size=2).hexdigest()
    return f"rate:{pending.kind}:{len(caller)}:{caller}:{charge.name}"
