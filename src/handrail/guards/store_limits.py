"""The limits of `limits.py`, kept in a store: processes that share it share them.

One exchange with the store is under way at a time. Whatever comes meanwhile (calls, slots given back, leases to renew)
is settled together by the next: read, decide, write if nobody else has written in between, else begin again.
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
    Charge,
    MemoryLimiter,
    Plans,
    Taken,
    Throttled,
    busy,
    network,
)
from handrail.guards.rates import Rates
from handrail.stores import Delete, Put, Store, StoreError

log = logging.getLogger("handrail")

GROUP = 256  # calls settled together
TRIES = 100  # that other processes may spoil
CONTENDED = Throttled(BUSY_SECONDS, "what the store can count", "concurrency")
COUNT_SECONDS = 10.0  # for one of them
SPARE_SECONDS = 1.0  # that the store keeps a value for longer than it is needed


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
        alone: MemoryLimiter | None = None,
        lease_seconds: float = 30.0,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store = store
        self._prefix = f"{len(name)}:{name}:" if name else ""
        self._alone = alone
        self._plans = Plans(rates)
        self._lease = round(lease_seconds * 1e9)
        self._clock = clock
        self._me = token_hex(8)
        self._salt = b""
        self._held: Counter[str] = Counter()  # slots, by tool
        self._stale: set[str] = set()  # tools of whose slots the store has to be told
        self._waiting: list[_Taking] = []
        self._turn: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # By caller and tool: from when until when, and what was said.
        self._refused: dict[tuple[str, str], dict[str, tuple[int, int, Throttled]]] = {}

    def take(self, principal: str, tool: str, address: str = "") -> Throttled | Awaitable[Taken] | None:
        plan = self._plans[tool]
        if address and principal == ANONYMOUS:
            charges, kind, caller = plan.strange, "address", network(address)
        else:
            charges, kind, caller = plan.local if principal == LOCAL else plan.known, "principal", principal
        said = None if self._alone is None else self._alone.take(principal, tool, address)
        if isinstance(said, Throttled):
            return said
        if not charges and plan.slots is None:
            return None
        caller, tool = self._prefix + caller, self._prefix + tool
        # Nobody puts tokens back, so a refusal stands until its time has come: a flood does not reach the store.
        refused = self._refused.get((kind, caller))
        if refused is not None and tool in refused:
            since, until, said = refused[tool]
            if since <= (now := self._clock()) < until:
                return Throttled((until - now) / 1e9, said.limit, said.scope)
        return self._taken(tool, kind, caller, charges, plan.slots)

    def place(self, tool: str) -> Awaitable[Taken] | None:
        slots = self._plans[tool].slots
        return None if slots is None else self._taken(self._prefix + tool, "", "", [], slots)

    def _taken(self, tool: str, kind: str, caller: str, charges: list[Charge], slots: int | None) -> Awaitable[Taken]:
        taking = _Taking(tool, kind, caller, charges, slots, asyncio.get_running_loop().create_future())
        self._waiting.append(taking)
        self._wake()
        return _answer(taking)

    async def close(self) -> None:
        """Give back what is held. The store stays open."""
        if self._timer is not None:
            self._timer.cancel()
        self._stale |= self._held.keys()
        self._held.clear()
        self._wake()
        while self._turn is not None and not self._turn.done():
            await asyncio.wait([self._turn])

    def _release(self, tool: str) -> None:
        self._held[tool] -= 1
        self._stale.add(tool)
        self._wake()

    def renew(self) -> None:
        """Renew the leases of what is held. This happens by itself, three times in the time of a lease."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._held = +self._held  # without what is 0
        self._stale |= self._held.keys()
        if self._held:
            self._timer = asyncio.get_running_loop().call_later(self._lease / 3e9, self.renew)
            self._wake()

    def _hold(self, tool: str) -> Callable[[], None]:
        self._held[tool] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._lease / 3e9, self.renew)
        return partial(self._release, tool)

    def _wake(self) -> None:
        if self._turn is None or self._turn.done():
            self._turn = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._waiting or self._stale:
            group, self._waiting = self._waiting[:GROUP], self._waiting[GROUP:]
            stale, self._stale = self._stale, set()
            try:
                await self._settle([each for each in group if not each.answer.done()], stale)
            except Exception as problem:  # whatever it is, the callers have to hear of it
                for each in group:
                    if not each.answer.done():
                        each.answer.set_exception(StoreError(f"limits: {problem}"))

    async def _settle(self, group: list[_Taking], stale: set[str]) -> None:
        if not self._salt and any(each.kind == "address" for each in group):
            await self._store.put("rate:salt", token_bytes(16), if_absent=True)
            self._salt = await self._store.get("rate:salt") or b""
        for each in group:
            each.keys = [_key(each, charge, self._salt) for charge in each.charges]
        tools = stale | {each.tool for each in group if each.slots is not None}
        keys = [*{key for each in group for key in each.keys}, *map(_slots, tools)]
        now = 0
        for _ in range(TRIES):
            found = dict(zip(keys, await asyncio.gather(*map(self._store.get, keys)), strict=True))
            now = self._clock()  # only now: what was found is not of the future, unless the clock went back
            books = _Books(found, now, self._lease, self._me, Counter(self._held))
            answers = [books.charge(each) for each in group]
            changes = books.changes(tools)
            if not changes or await self._store.commit(changes):
                break
        else:
            answers = [CONTENDED] * len(group)
        for each, answer in zip(group, answers, strict=True):
            if each.answer.done():  # cancelled meanwhile: nobody holds its slot
                self._stale |= tools & {each.tool}
            elif answer is None and each.slots is not None:
                each.answer.set_result(self._hold(each.tool))
            else:
                each.answer.set_result(answer)
            self._remember(each, now, answer)

    def _remember(self, it: _Taking, now: int, said: Throttled | None) -> None:
        if said is None:  # from now on the others are refused for longer
            self._refused.pop((it.kind, it.caller), None)
        elif said.scope != "concurrency":
            if len(self._refused) >= MAX_BUCKETS:
                self._refused.clear()
            until = now + round(said.retry_after * 1e9)
            self._refused.setdefault((it.kind, it.caller), {})[it.tool] = (now, until, said)


async def counted(taken: Awaitable[Taken]) -> None:
    """Until a request that takes no slot was counted; `Refused` if there were too many, or nobody can tell."""
    try:
        async with asyncio.timeout(COUNT_SECONDS):
            said = await taken
    except (StoreError, TimeoutError) as problem:
        log.error("a request was refused, as it cannot be counted: %s", str(problem) or "it takes too long")
        raise Refused(Kind.UNRECORDED, "This cannot be counted now; the server's log says why") from None
    if isinstance(said, Throttled):
        raise said.refusal()


class _Taking(Struct, eq=False):
    """A call that waits for its turn."""

    tool: str
    kind: str
    caller: str
    charges: list[Charge]
    slots: int | None
    answer: asyncio.Future[Taken]
    keys: list[str] = []


async def _answer(taking: _Taking) -> Taken:
    try:
        return await taking.answer
    except asyncio.CancelledError:
        given = None if taking.answer.cancelled() else taking.answer.result()
        if callable(given):
            given()
        raise


class _Books(Struct, eq=False):
    """What was found in the store, and what a group of calls makes of it."""

    found: dict[str, bytes | None]
    now: int
    lease: int
    me: str
    held: Counter[str]
    full: dict[str, int] = {}

    def charge(self, it: _Taking) -> Throttled | None:
        now, worst, wait, ends = self.now, None, 0, {}
        for charge, key in zip(it.charges, it.keys, strict=True):
            window = charge.cost + charge.slack
            # No bucket is more than empty: one that seems to be is from before the clock went back.
            end = self.full.setdefault(key, min(int(self.found[key] or 0), now + window))
            ends[key] = max(end, now) + charge.cost
            if ends[key] - now - window > wait:
                worst, wait = charge, ends[key] - now - window
        if worst is not None:
            return Throttled(wait / 1e9, worst.limit, worst.scope)
        if it.slots is not None:
            if self.held[it.tool] + sum(slots for slots, _ in self._others(it.tool).values()) >= it.slots:
                return busy(it.slots)
            self.held[it.tool] += 1
        self.full |= ends
        return None

    def changes(self, tools: Iterable[str]) -> list[Put | Delete]:
        """What has to be written, if what was found is still there."""
        out: list[Put | Delete] = []
        for key, end in self.full.items():
            if end > self.now and b"%d" % end != self.found[key]:
                out.append(self._put(key, b"%d" % end, end))
        for tool in tools:
            key, until = _slots(tool), self.now + self.lease
            leases = self._others(tool)
            if self.held[tool] > 0:
                slots, end = self._leases(tool).get(self.me, (0, 0))
                is_good = slots == self.held[tool] and end - self.now > self.lease * 3 // 4
                leases[self.me] = (slots, end) if is_good else (self.held[tool], until)
            value = encode(leases, order="sorted")
            if leases and value != self.found[key]:
                out.append(self._put(key, value, until))
            elif not leases and self.found[key] is not None:
                out.append(Delete(key, if_equals=self.found[key]))
        return out

    def _put(self, key: str, value: bytes, end: int) -> Put:
        found = self.found[key]
        ttl = (end - self.now) / 1e9 + SPARE_SECONDS
        return Put(key, value, ttl, if_absent=found is None, if_equals=found)

    def _leases(self, tool: str) -> dict[str, tuple[int, int]]:
        """Slots that processes hold, and until when."""
        found = decode(self.found[_slots(tool)] or b"{}", type=dict[str, tuple[int, int]])
        most = self.now + self.lease
        return {who: (slots, min(end, most)) for who, (slots, end) in found.items() if end > self.now}

    def _others(self, tool: str) -> dict[str, tuple[int, int]]:
        return {who: lease for who, lease in self._leases(tool).items() if who != self.me}


def _slots(tool: str) -> str:
    return f"slots:{tool}"


def _key(it: _Taking, charge: Charge, salt: bytes) -> str:
    """Where a bucket is kept. Addresses, of which anybody can make up any number, share 65,536 of each sort.

    Who shares with whom is a secret: nobody can choose an address to use up the bucket of another.
    """
    caller = it.caller
    if it.kind == "address":
        caller = blake2b(caller.encode("utf-8", "surrogatepass"), key=salt, digest_size=2).hexdigest()
    return f"rate:{it.kind}:{len(caller)}:{caller}:{charge.name}"
