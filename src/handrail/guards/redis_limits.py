"""Rate limits that are decided at Redis, by scripts and by its clock.

A bucket is a debt: the time it takes until it is full. A call is let through if its cost fits in beside the debt. All
calls that wait are one group: one run of a script decides all those of one caller. No process reads and writes back.

Leased budgets: where a rate is high, a process takes a share of the bucket with its calls, and lets the next ones
through by itself. The share is charged when it is taken, and it ends after at most two epochs. Three rules keep the sum
of all processes within rate × time + burst, in any span of time:

- A bucket never fills beyond what is not in hand: its debt is at least the shares that have not ended.
- What is left of a share is given back only while the share has not ended, and the process forgets it before it asks.
- A share whose answer is lost, or whose process dies, is lost.

The price is that a call may be refused while another process has a share in hand. A share is at most a tenth of a
second of the rate, and at most half of what the bucket has, unless that is little.

A script has its keys in one slot of a cluster: the buckets of one caller, or the slots of one tool. All scripts of a
group are sent together. A call that needs both is two round trips, first that of the tool: a call that is refused for
its rate has held a slot for the time of the second one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from itertools import chain, starmap
from typing import Any
from urllib.parse import quote

from msgspec import Struct
from msgspec.msgpack import decode, encode
from msgspec.structs import replace

from handrail.guards.limits import (
    ANONYMOUS,
    DEFAULT_RATES,
    MAX_BUCKETS,
    Admission,
    Charge,
    FindLimit,
    MemoryLimiter,
    PendingTake,
    Plan,
    Rates,
    SharedLimiter,
    Throttled,
    bucket_owner,
    busy,
    shared_salt,
)
from handrail.stores import StoreError
from handrail.stores.redis import RedisStore, Script

log = logging.getLogger("handrail")

FIRST_SHARE = 4  # calls, of the first share of a caller
MAX_GROWTH = 8  # times from one share to the next
BUSY_PAUSE_NS = 20_000_000  # until Redis is asked again about a tool without a free slot
PROBE_SECONDS = 0.25  # between looks whether Redis is back; up to twice as long


class Leasing(Struct, frozen=True):
    """Which rates are leased, and in what shares. All times are in nanoseconds."""

    token: int = 1_000_000_000 // 200  # the longest time for one call: from 200 calls a second on
    share: int = 100_000_000  # the largest share, in time of the rate; a bucket that holds less is not leased
    small_share: int = 20_000_000  # what one process may take at once of a bucket that has little
    epoch: int = 500_000_000  # a share ends with the epoch after the one it was taken in
    pause: int = 50_000_000  # until a bucket that had too little is asked again: so a flood is 20 scripts a second


LEASING = Leasing()

RATE_SCRIPT = Script("""#!lua
-- KEYS: the buckets of one caller. ARGV: the buckets, the calls, an epoch in microseconds, a small share.
local buckets, calls, epoch_us, small = unpack(cmsgpack.unpack(ARGV[1]))
local seconds, micros = unpack(redis.call('TIME'))
local now = seconds * 1000000 + micros
local epoch = math.floor(now / epoch_us)
local debts, currents, previouses, changed = {}, {}, {}, {}

for i, bucket in ipairs(buckets) do
  local _, left, granted, granted_in = unpack(bucket)
  local debt, at, last, current, previous = 0, now, epoch, 0, 0
  local stored = redis.call('GET', KEYS[i])
  if stored then
    debt, at, last, current, previous = unpack(cmsgpack.unpack(stored))
  end
  if at > now then  -- the clock went back
    at, last, current, previous, changed[i] = now, epoch, current + previous, 0, true
  end
  -- Shares that are out keep the bucket from filling until they end, which is at the borders of epochs.
  while last < epoch and current + previous > 0 do
    local border = (last + 1) * epoch_us
    debt = math.max(debt - (border - at) * 1000, current + previous)
    at, last, current, previous = border, last + 1, 0, current
  end
  debt = math.max(debt - (now - at) * 1000, current + previous, 0)
  if granted > 0 and granted_in == epoch then
    current = math.max(current - granted, 0)
    debt, changed[i] = math.max(debt - left, current + previous), true
  elseif granted > 0 and granted_in == epoch - 1 then
    previous = math.max(previous - granted, 0)
    debt, changed[i] = math.max(debt - left, current + previous), true
  end
  debts[i], currents[i], previouses[i] = debt, current, previous
end

local verdicts = {}
for i, call in ipairs(calls) do
  local count, admitted, wait, tightest = call[1], 0, 0, 0
  while admitted < count and wait == 0 do
    for j = 2, #call, 2 do
      local missing = debts[call[j]] + call[j + 1] - buckets[call[j]][1]
      if missing > wait then
        wait, tightest = missing, j / 2 - 1
      end
    end
    if wait == 0 then
      admitted = admitted + 1
      for j = 2, #call, 2 do
        debts[call[j]], changed[call[j]] = debts[call[j]] + call[j + 1], true
      end
    end
  end
  verdicts[i] = {admitted, math.ceil(wait / 1000) * 1000, tightest}
end

local shares = {}
for i, bucket in ipairs(buckets) do
  local free = math.max(bucket[1] - debts[i], 0)
  local share = math.min(bucket[5], math.max(math.floor(free / 2), math.min(free, small)))
  if share < bucket[6] then  -- less than one call
    share = 0
  end
  if share > 0 then
    debts[i], currents[i], changed[i] = debts[i] + share, currents[i] + share, true
  end
  shares[i] = share
  if changed[i] then
    local ms = math.max(debts[i] / 1000000, currents[i] + previouses[i] > 0 and epoch_us / 500 or 0)
    local value = cmsgpack.pack({debts[i], now, epoch, currents[i], previouses[i]})
    redis.call('SET', KEYS[i], value, 'PX', string.format('%.0f', math.ceil(ms) + 1000))
  end
end
return cmsgpack.pack({verdicts, shares, epoch, (epoch + 2) * epoch_us - now})
""")

SLOT_SCRIPT = Script("""#!lua
-- KEYS: the slots of one tool by holder, and when the leases end. ARGV: the holder, how many slots it has, how
-- many it wants, how many there are, a lease in microseconds. Returns how many it gets.
local counts, ends = KEYS[1], KEYS[2]
local holder, held, wanted, slots, lease = ARGV[1], ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0, ARGV[5] + 0
local seconds, micros = unpack(redis.call('TIME'))
local now = seconds * 1000000 + micros
-- A lease that ends too late is from before the clock went back.
for _, late in ipairs(redis.call('ZRANGEBYSCORE', ends, string.format('(%.0f', now + lease), '+inf')) do
  redis.call('ZADD', ends, now + lease, late)
end
local others = (redis.call('HGET', counts, 'total') or 0) - (redis.call('HGET', counts, holder) or 0)
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', string.format('%.0f', now))) do
  if dead ~= holder then
    others = others - (redis.call('HGET', counts, dead) or 0)
    redis.call('HDEL', counts, dead)
    redis.call('ZREM', ends, dead)
  end
end
local admitted = math.max(0, math.min(wanted, slots - others - held))
held = held + admitted
if others + held == 0 then
  redis.call('DEL', counts, ends)
  return admitted
end
if held > 0 then
  redis.call('HSET', counts, holder, held)
  redis.call('ZADD', ends, now + lease, holder)
else
  redis.call('HDEL', counts, holder)
  redis.call('ZREM', ends, holder)
end
redis.call('HSET', counts, 'total', others + held)
redis.call('PEXPIRE', counts, math.ceil(lease / 1000) + 1000)
redis.call('PEXPIRE', ends, math.ceil(lease / 1000) + 1000)
return admitted
""")


class _Share(Struct, eq=False):
    """What this process may let through by itself, in nanoseconds of the rate."""

    size: int  # of the next share
    left: int = 0
    until: int = 0  # by the clock of this process
    taken_at: int = 0
    granted: int = 0
    epoch: int = -1
    paused_until: int = 0


_Decisions = dict[PendingTake, Throttled | None]


class RedisLimiter(SharedLimiter):
    """Counts at Redis, by its clock. The time of day of this process does not matter.

    While Redis does not answer, `trouble` says why, and calls are refused or counted by this process alone. The
    limiter goes back to Redis by itself.
    """

    def __init__(
        self,
        store: RedisStore,
        rates: Rates,
        *,
        name: str = "",
        find: FindLimit | None = None,
        local_limiter: MemoryLimiter | None = None,
        lease_seconds: float = 30.0,
        leasing: Leasing = LEASING,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(rates, name, find, local_limiter, lease_seconds, clock)
        self._store = store
        self._salt = b""
        self._leasing = replace(leasing, token=0) if rates.exact else leasing
        self._when_down = rates.when_down
        self._built_in = {each for each in DEFAULT_RATES if getattr(rates, each) == DEFAULT_RATES[each]}
        self._stand_in = MemoryLimiter(rates, find=find, clock=clock)
        self._shares: dict[tuple[str, str, str], _Share] = {}
        self._busy_until: dict[str, int] = {}  # tools that had no free slot
        self._unreported: set[str] = set()  # tools of whose slots Redis has to be told when it is back
        self._retry: Callable[[], Awaitable[object]] = partial(self._run_rates, [_key("probe", "", "")], [(0,) * 6], ())
        self._probe_task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        await super().close()
        if self._probe_task is not None:  # also one that began now
            self._probe_task.cancel()
            await asyncio.wait([self._probe_task])

    def _release(self, tool: str) -> None:
        self._busy_until.pop(tool, None)
        super()._release(tool)

    def forget(self, tool: str) -> None:
        super().forget(tool)
        self._stand_in.forget(tool)
        self._shares.clear()  # they may be of another rate

    def _enqueue(
        self, called: str, plan: Plan, kind: str, caller: str, charges: list[Charge]
    ) -> Admission | Awaitable[Admission]:
        if self.trouble:
            if self._must_refuse(charges, plan.slots):
                return _fail(self.trouble)
            return self._take_alone(called, kind, caller)
        if plan.slots is None and self._shares:
            if self._spend(kind, caller, charges):
                return None
            if (throttled := self._pause(kind, caller, charges)) is not None:
                return throttled
        elif plan.slots is not None and self._busy_until.get(self._prefix + plan.name, 0) > self._clock():
            return busy(plan.slots, plan.owner)
        return super()._enqueue(called, plan, kind, caller, charges)

    def _spend(self, kind: str, caller: str, charges: list[Charge]) -> bool:
        """Charge the shares of this process; False if one of them is missing, used up or too old."""
        now, shares = self._clock(), []
        for charge in charges:
            share = self._shares.get((kind, caller, charge.name))
            if share is None or share.left < charge.cost or share.until <= now:
                return False
            shares.append(share)
        for share, charge in zip(shares, charges, strict=True):
            share.left -= charge.cost
        return True

    def _pause(self, kind: str, caller: str, charges: list[Charge]) -> Throttled | None:
        """Refuse a call while its bucket had little to lend a moment ago.

        A process that asks again at once would get each single token as it grows, and the others none.
        """
        now = self._clock()
        for charge in charges:
            share = self._shares.get((kind, caller, charge.name))
            if share is not None and share.paused_until > now:
                return Throttled((share.paused_until - now) / 1e9, charge.limit, charge.scope)
        return None

    async def _settle(self, group: list[PendingTake], stale: set[str]) -> None:
        asking: list[PendingTake] = []
        for each in group:  # the exchange before this one may have decided it
            refusal = self._standing_refusal(each.tool, each.kind, each.caller) if self._refusals else None
            is_spent = False
            if refusal is None and each.slots is None and self._shares:
                is_spent = self._spend(each.kind, each.caller, each.charges)
                refusal = None if is_spent else self._pause(each.kind, each.caller, each.charges)
            if refusal is None and not is_spent:
                asking.append(each)
            else:
                self._resolve(each, refusal, self._clock())
        if not asking and not stale:
            return
        try:
            if self.trouble:
                raise StoreError(self.trouble)
            if not self._salt and any(each.kind == "address" for each in asking):
                self._salt = await shared_salt(self._store)
            decisions = await self._decide(asking, stale)
        except StoreError as problem:
            self._unreported |= stale | {each.tool for each in asking if each.slots is not None}
            self._go_down(str(problem))
            for each in asking:
                if each.admission.done():
                    continue
                if self._must_refuse(each.charges, each.slots):
                    each.admission.set_exception(StoreError(f"limits: {problem}"))
                else:
                    each.admission.set_result(self._take_alone(each.called, each.kind, each.caller))
        else:
            for each, admission in decisions.items():
                self._resolve(each, admission, self._clock())

    async def _decide(self, group: list[PendingTake], stale: set[str]) -> _Decisions:
        by_tool: dict[str, list[PendingTake]] = {tool: [] for tool in stale}
        for each in group:
            if each.slots is not None:
                by_tool.setdefault(each.tool, []).append(each)
        decisions = await _together(starmap(self._take_slots, by_tool.items()))
        by_caller: dict[tuple[str, str], list[PendingTake]] = {}
        for each in group:
            if each.charges and decisions.get(each) is None:
                by_caller.setdefault((each.kind, each.caller), []).append(each)
        for each, refusal in (await _together(map(self._charge, by_caller.values()))).items():
            decisions[each] = refusal
            if refusal is not None and each.slots is not None:
                self._stale.add(each.tool)
        return decisions

    async def _take_slots(self, tool: str, calls: Sequence[PendingTake]) -> _Decisions:
        """Say how many slots of a tool this process holds, and take one for each call."""
        slots = (calls and calls[0].slots) or 0
        keys = [_key("tool", tool, part) for part in ("counts", "ends")]
        arguments = (self._holder_id.encode(), self._held[tool], len(calls), slots, self._lease // 1000)
        try:
            admitted = await self._store.run_script(SLOT_SCRIPT, keys, arguments)
        except StoreError:
            self._retry = partial(self._take_slots, tool, ())
            raise
        if admitted < len(calls):
            self._busy_until[tool] = self._clock() + BUSY_PAUSE_NS
        return {each: None if at < admitted else busy(slots, each.owner) for at, each in enumerate(calls)}

    async def _charge(self, calls: Sequence[PendingTake]) -> _Decisions:
        """Charge calls of one caller to its buckets."""
        buckets: dict[str, tuple[float, int, int, int, int, int]] = {}
        shares: dict[str, _Share] = {}
        rows: dict[int, tuple[list[float], list[PendingTake]]] = {}  # calls with the same charges are one
        owner = bucket_owner(calls[0], self._salt)
        for each in calls:
            if id(each.charges) not in rows:
                words: list[float] = [0]
                can_spend = each.slots is None and all(map(self._is_leased, each.charges))
                for charge in each.charges:
                    key = _key(each.kind, owner, charge.name)
                    if key not in buckets:
                        buckets[key] = (float(charge.cost + charge.slack), 0, 0, 0, 0, 0)
                    if can_spend and key not in shares:  # what is left goes back, and must not be spent meanwhile
                        shares[key] = share = self._share_for(each, charge)
                        share_state = (share.left, share.granted, share.epoch, share.size, charge.cost)
                        buckets[key] = (buckets[key][0], *share_state)
                        share.left = share.granted = 0
                    words += (1 + list(buckets).index(key), float(charge.cost))
                rows[id(each.charges)] = (words, [])
            row = rows[id(each.charges)]
            row[0][0] += 1
            row[1].append(each)
        asked_at = self._clock()
        verdicts, grants, epoch, life = await self._run_rates(
            list(buckets), list(buckets.values()), [words for words, _ in rows.values()]
        )
        for key, granted in zip(buckets, grants, strict=True):
            if key in shares:
                share = shares[key]
                share.left = share.granted = int(granted)
                share.epoch, share.taken_at, share.until = epoch, asked_at, asked_at + int(life) * 1000
                is_little = granted < min(share.size, self._leasing.small_share)
                share.paused_until = asked_at + self._leasing.pause if is_little else 0
        decisions: _Decisions = {}
        for (_, equal), (admitted, wait, tightest) in zip(rows.values(), verdicts, strict=True):
            refusal = self._refusal(equal[0].charges[int(tightest)], wait) if wait else None
            decisions |= {each: None if at < admitted else refusal for at, each in enumerate(equal)}
        return decisions

    async def _run_rates(self, keys: list[str], buckets: Sequence[object], rows: Sequence[object]) -> Any:
        arguments = encode((buckets, rows, self._leasing.epoch // 1000, self._leasing.small_share))
        try:
            return decode(await self._store.run_script(RATE_SCRIPT, keys, [arguments]))
        except StoreError:
            self._retry = partial(self._run_rates, keys, [(0,) * 6] * len(keys), ())
            raise

    def _refusal(self, charge: Charge, wait: float) -> Throttled:
        wait = max(wait, self._leasing.pause) if self._is_leased(charge) else wait
        return Throttled(wait / 1e9, charge.limit, charge.scope)

    def _is_leased(self, charge: Charge) -> bool:
        return charge.token <= self._leasing.token and charge.cost + charge.slack >= self._leasing.share

    def _share_for(self, pending: PendingTake, charge: Charge) -> _Share:
        """Return the share of a bucket, with the size that the next one should have."""
        place, largest = (pending.kind, pending.caller, charge.name), self._leasing.share
        first = min(FIRST_SHARE * max(charge.cost, charge.token), largest)
        share = self._shares.get(place)
        if share is None:
            if len(self._shares) >= MAX_BUCKETS:
                self._shares.clear()
            share = self._shares[place] = _Share(first)
        elif (lasted := self._clock() - share.taken_at) < (target := self._leasing.epoch // 2):
            share.size = min(share.size * min(target // max(lasted, 1), MAX_GROWTH), largest)
        elif share.left > share.size // 2:
            share.size = max(share.size // 2, first)
        return share

    # While Redis is away

    def _must_refuse(self, charges: Sequence[Charge], slots: int | None) -> bool:
        if self._when_down is not None:
            return self._when_down == "refuse"
        return slots is not None or any(each.scope not in self._built_in for each in charges)

    def _take_alone(self, tool: str, kind: str, caller: str) -> Admission:
        """Count a call in this process."""
        if not kind:
            return self._stand_in.take_slot(tool)
        caller = caller.removeprefix(self._prefix)
        return self._stand_in.take(*((ANONYMOUS, tool, caller) if kind == "address" else (caller, tool)))

    def _go_down(self, reason: str) -> None:
        if self.trouble:
            return
        self.trouble = reason
        action = "refused" if self._must_refuse((), 1) else "counted by this process alone"
        log.error("limits: Redis does not answer, calls with shared limits are %s: %s", action, reason)
        self._probe_task = asyncio.get_running_loop().create_task(self._probe())

    async def _probe(self) -> None:
        """Repeat the script that failed, without its calls, until Redis answers."""
        down_at = self._clock()
        while self.trouble:
            await asyncio.sleep(PROBE_SECONDS * random.uniform(1, 2))
            try:
                await self._retry()
            except StoreError as problem:
                self.trouble = str(problem)
            else:
                self.trouble = ""
        log.warning("limits: Redis answers, limits are shared again after %.1f s", (self._clock() - down_at) / 1e9)
        self._stale |= self._unreported | self._held.keys()
        self._unreported.clear()
        self._ensure_running()


def _key(kind: str, owner: str, part: str) -> str:
    """Return a key whose second part, which has no colon, decides its slot in a cluster."""
    return f"limit:{kind}-{quote(owner, safe='', errors='surrogatepass')}:{part}"


async def _together(scripts: Iterable[Coroutine[Any, Any, _Decisions]]) -> _Decisions:
    """Run scripts in one round trip."""
    running = list(scripts)
    parts = [await running[0]] if len(running) == 1 else await asyncio.gather(*running)
    return dict(chain.from_iterable(part.items() for part in parts))


async def _fail(reason: str) -> Admission:
    raise StoreError(f"limits: {reason}")
