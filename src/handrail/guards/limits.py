"""Counting calls: token buckets for each caller, and slots for each tool.

A bucket is one number: the time at which it will be full again. To take a token is to move that time on by what the
token needs to grow back; a bucket whose time is past is full, which is the same as no bucket at all. Times are whole
nanoseconds, so that nothing is lost to rounding: a rate of 10 lets ten through, not nine.

A call is charged to all its buckets or, if one of them says no, to none: a refused caller loses nothing by it.

The limits of `limits.py`, kept in a store: processes that share it share them.

One exchange with the store is under way at a time. Whatever comes meanwhile (calls, slots given back, leases to renew)
is settled together by the next: read, decide, write if no other process has written in between, else begin again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from hashlib import blake2b
from ipaddress import IPv6Address
from secrets import token_bytes, token_hex
from types import NoneType
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct, field
from msgspec.json import decode, encode
from msgspec.structs import replace

from handrail.errors import Kind, Refused
from handrail.guards.identity import RESERVED_NAMES
from handrail.stores import Delete, Put, Store, StoreError
from handrail.suggest import expect, mapping

log = logging.getLogger("handrail")

UNIT_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}
RATE_PATTERN = re.compile(rf"([1-9]\d{{0,8}}) ?/ ?({'|'.join(UNIT_SECONDS)})(?: burst ([1-9]\d{{0,8}}))?", re.ASCII)
DEFAULT_RATES = {
    "principal": "1000/second burst 5000",
    "address": "200/second burst 2000",
    "lists": "200/second burst 2000",
}


class Rate(Struct, frozen=True):
    """So many a unit of time, and so many at once after a time without any.

    >>> Rate.parse("10/minute burst 20")
    Rate(count=10, unit='minute', burst=20)
    """

    count: int
    unit: str
    burst: int

    @classmethod
    def parse(cls, text: str) -> Rate:
        match = RATE_PATTERN.fullmatch(text.strip())
        if match is None:
            units = ", ".join(UNIT_SECONDS)
            raise ValueError(f"{text[:50]!r} is not a rate, as '60/minute' or '60/minute burst 100' ({units})")
        return cls(int(match[1]), match[2], int(match[3] or match[1]))

    def __str__(self) -> str:
        return f"{self.count}/{self.unit}" + (f" burst {self.burst}" if self.burst != self.count else "")


def _parse_rate(name: str, text: str) -> Rate | None:
    expect(name, text, "a text such as '60/minute'", str)
    try:
        return Rate.parse(text) if text else None
    except ValueError as problem:
        raise ValueError(f"{name}: {problem}") from None


class ToolRate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often a tool may be called."""

    rate: Annotated[
        str, Meta(description="Calls by each caller, as '60/minute' or '60/minute burst 100'; empty: any number.")
    ] = ""
    concurrent: Annotated[int | None, Meta(description="Calls at once, by all callers; unset: any number.")] = None
    each: Annotated[
        int | None,
        Meta(description="Calls at once, by one caller; unset: all but one of `concurrent`, if that is over 1."),
    ] = None
    cost: Annotated[float, Meta(description="How many calls of its caller's rate a call of this tool counts as.")] = 1.0

    def __post_init__(self) -> None:
        _parse_rate("rate", self.rate)
        expect("concurrent", self.concurrent, "a number of calls, or None for any", int, NoneType)
        expect("cost", self.cost, "a number of calls, as 1 or 2.5", int, float)
        expect("each", self.each, "a number of calls, or None for all but one", int, NoneType)
        if self.concurrent is not None and self.concurrent < 1:
            raise ValueError(f"concurrent: {self.concurrent} is less than 1")
        if self.each is not None and self.each < 1:
            raise ValueError(f"each: {self.each} is less than 1")
        if not 0 <= self.cost < math.inf:
            raise ValueError(f"cost: {self.cost} is not a number of calls, as 1 or 2.5")

    @property
    def share(self) -> int | None:
        """The most calls at once of one caller, so that another one gets in; None: any number."""
        if self.each is not None or self.concurrent is None or self.concurrent == 1:
            return self.each
        return self.concurrent - 1


NO_LIMIT = ToolRate()


class UpstreamRate(ToolRate, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often an upstream server may be called. Its tools, resources and prompts are counted together."""

    tools: Annotated[
        dict[str, ToolRate],
        Meta(description="By its own names of tools, as 'search_*': each is counted by itself, not with the others."),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, each in mapping("UpstreamRate: tools", self.tools, "ToolRate(…) by name").items():
            expect(f"UpstreamRate: tools.{name}", each, 'ToolRate(rate="10/minute")', ToolRate)

    @property
    def together(self) -> ToolRate:
        """What holds for all that is not in `tools`."""
        return ToolRate(rate=self.rate, concurrent=self.concurrent, each=self.each, cost=self.cost)

    @property
    def all(self) -> list[ToolRate]:
        """Every limit that is set."""
        return [each for each in (self.together, *self.tools.values()) if each != NO_LIMIT]

    def limit_of(self, upstream: str, tool: str | None) -> NamedRate | None:
        """Return what holds for a tool by its own name, or for a resource or a prompt; None if nothing is set."""
        for pattern, each in self.tools.items() if tool is not None else ():
            if fnmatchcase(tool or "", pattern):
                return "", each
        return None if self.together == NO_LIMIT else (f"upstream {upstream}", self.together)


NamedRate = tuple[str, ToolRate]
"""A limit, and what is counted by it together; an empty name for a tool by itself."""
FindLimit = Callable[[str], NamedRate | None]
"""Returns what an upstream server's settings say of one of our names."""


class Rates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often callers may come.

    The defaults are out of the reach of a model, which takes seconds for a thought, and of most scripts it writes; a
    flood that keeps to them leaves the server most of its time for others.
    """

    principal: Annotated[str, Meta(description="Calls by each principal; empty: any number.")] = DEFAULT_RATES[
        "principal"
    ]
    address: Annotated[
        str, Meta(description="Calls by nobody in particular from each address, or IPv6 network of 64 bits.")
    ] = DEFAULT_RATES["address"]
    lists: Annotated[
        str, Meta(description="Requests that are not calls, as lists, handshakes and pings, by each caller.")
    ] = DEFAULT_RATES["lists"]
    tool: Annotated[ToolRate, Meta(description="What holds for a tool that nothing in `tools` fits.")] = field(
        default_factory=ToolRate
    )
    tools: Annotated[
        dict[str, ToolRate], Meta(description="By name or pattern, as 'mail_*'; the first that fits a tool holds.")
    ] = field(default_factory=dict)
    shared: Annotated[
        bool | None,
        Meta(description="Count over all processes that use the same store; unset: those limits that were set."),
    ] = None
    local: Annotated[
        bool, Meta(description="Whether the user of this machine is limited too, beyond what holds for a tool.")
    ] = False
    exact: Annotated[
        bool,
        Meta(description="On Redis: ask for every call, also at rates over 200 a second, where processes take shares."),
    ] = False
    when_down: Annotated[
        Literal["refuse", "local"] | None,
        Meta(
            description="While Redis is away: refuse calls, or count them in each process; unset: refuse those that a"
            " limit was set for."
        ),
    ] = None

    def __post_init__(self) -> None:
        expect("Rates: tool", self.tool, "ToolRate(…)", ToolRate)
        for name, each in mapping("Rates: tools", self.tools, "ToolRate(…) by name").items():
            expect(f"Rates: tools.{name}", each, 'ToolRate(rate="10/minute")', ToolRate)
        _parse_rate("lists", self.lists)
        self.check_costs({"tool": self.tool, **{f"tools.{name}": each for name, each in self.tools.items()}})

    def check_costs(self, limits: Mapping[str, ToolRate]) -> None:
        """Refuse limits, by their names, whose calls cost more than a caller ever has."""
        for name in ("principal", "address"):
            rate = _parse_rate(name, getattr(self, name))
            for where, each in limits.items():
                if rate is not None and each.cost > rate.burst:
                    raise ValueError(f"{where}.cost: {each.cost:g} is more than `{name}` ever has, {rate.burst}")

    def split(self, *, has_upstreams: bool = False) -> tuple[Rates, Rates | None]:
        """What each process counts by itself, and what they count together.

        To count together takes a look at a file. What is built in is only there against floods, which each process can
        tell by itself; a configured limit holds as it is configured. Upstream servers may have limits of their own.
        """
        if self.shared is False:
            return self, None
        names = [each for each in DEFAULT_RATES if self.shared or getattr(self, each) != DEFAULT_RATES[each]]
        tools = [self.tool, *self.tools.values()]
        is_limited = any(tool_rate.rate or tool_rate.concurrent for tool_rate in tools)
        if not is_limited and not has_upstreams and not any(getattr(self, each) for each in names):
            return self, None
        unlimited, *others = map(_without_counts, tools)
        local_rates = replace(
            self, tool=unlimited, tools=dict(zip(self.tools, others, strict=True)), **dict.fromkeys(names, "")
        )
        return local_rates, replace(self, **{each: "" for each in DEFAULT_RATES if each not in names})


def _without_counts(limit: ToolRate) -> ToolRate:
    """Return what is left of a limit in a process that does not count it: what a call costs its caller."""
    return replace(limit, rate="", concurrent=None)


def without_counts(find: FindLimit) -> FindLimit:
    """Return what a process counts by itself of the limits of upstream servers that a store counts."""

    def find_uncounted(name: str) -> NamedRate | None:
        limit = find(name)
        return None if limit is None else (limit[0], _without_counts(limit[1]))

    return find_uncounted


ANONYMOUS, LOCAL = RESERVED_NAMES
MAX_BUCKETS = 10_000
"""For principals, and as many for addresses: a client can make addresses up, and must not displace principals."""
MAX_TOOLS = 10_000  # that are counted one by one; all further ones that a pattern fits are counted as one
SWEEP_BUCKETS = 4  # buckets looked at when a call adds some: more than it adds, so that full ones cannot pile up
OVERFLOW_BUCKET = ""
BUSY_SECONDS = 1.0  # in place of the unknown time until a slot is free

Scope = Literal["principal", "address", "lists", "tool", "concurrency"]
_Ring = deque[tuple[dict[str, int], str]]  # the buckets of one sort of callers, in the order they are looked at


class Throttled(Struct, frozen=True):
    """Too many. The same call is allowed after `retry_after` seconds, if no other caller comes first."""

    retry_after: float
    limit: str
    scope: Scope

    def refusal(self) -> Refused:
        """Return the error for the caller. A tool's limit is an error of the tool, which its model reads."""
        kind = Kind.THROTTLED if self.scope in ("tool", "concurrency") else Kind.OVERLOADED
        text = f"Too many requests: the limit is {self.limit}; retry after {math.ceil(self.retry_after)} s"
        return Refused(kind, text, {"retryAfter": self.retry_after}, retry_after=self.retry_after)


Admission = Throttled | Callable[[], None] | None
"""No; or what gives the slot of a call back, once it has ended; or None: go on, there is nothing to give back."""


class CallerSlots:
    """The slots of a tool that each caller holds in this process; one caller does not hold all of them.

    A caller without another one beside it, over standard input, keeps only to what `each` says.
    """

    def __init__(self, rates: Rates, find: FindLimit | None = None) -> None:
        self.plans = Plans(rates, find)
        self._held: Counter[tuple[str, str]] = Counter()

    def forget(self, tool: str) -> None:
        """Look up the limit of a tool anew."""
        self.plans.forget(tool)

    def max_slots(self, principal: str, tool: str) -> int | None:
        """Return the most that one caller may hold; None: any number."""
        limit = self.plans[tool].rate
        return limit.each if principal == LOCAL else limit.share

    def take(self, principal: str, tool: str, address: str) -> Throttled | Callable[[], None] | None:
        limit = self.max_slots(principal, tool)
        if limit is None:
            return None
        plan = self.plans[tool]
        key = (plan.name, network(address) if address and principal == ANONYMOUS else principal)
        if self._held[key] >= limit:
            return Throttled(BUSY_SECONDS, f"{limit} of {plan.owner} at once for one caller", "concurrency")
        self._held[key] += 1
        return partial(self._release, key)

    def _release(self, key: tuple[str, str]) -> None:
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]


class Limiter(Protocol):
    """Says who may go on."""

    def take(self, principal: str, tool: str, address: str = "") -> Admission | Awaitable[Admission]:
        """Count a call of a tool there is; with `""` for the tool, a request that is not a call.

        `address` counts if the caller has no name but `anonymous`.
        """

    def take_slot(self, tool: str) -> Admission | Awaitable[Admission]:
        """Take a concurrency slot without charging the rate again, after an approval."""


class MemoryLimiter:
    """Counts in this process, on the monotonic clock: what happens to the time of day does not matter (P-21)."""

    def __init__(
        self,
        rates: Rates,
        *,
        find: FindLimit | None = None,
        max_buckets: int = MAX_BUCKETS,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.plans = Plans(rates, find)
        self._clock = clock
        self._max_buckets = max_buckets
        self._principal_ring = _Ring()
        self._address_ring = _Ring()
        self._running: Counter[str] = Counter()  # calls that have slots, by the name of their plan

    def take(self, principal: str, tool: str, address: str = "") -> Admission:
        plan = self.plans[tool]
        if address and principal == ANONYMOUS:
            charges, caller, ring = plan.address_charges, network(address), self._address_ring
        else:
            charges, caller, ring = (
                plan.local_charges if principal == LOCAL else plan.principal_charges,
                principal,
                self._principal_ring,
            )
        if not charges and plan.slots is None:
            return None
        now = self._clock()
        tightest, wait, is_new, updates = None, 0, False, []
        for charge in charges:
            bucket = caller
            end = charge.full_at.get(bucket)
            if end is None:
                is_new = True
                # When there are too many, those who come late share one. None is dropped to make room: else a
                # client that makes up enough callers gets rid of an empty bucket.
                if len(ring) >= self._max_buckets:
                    bucket = OVERFLOW_BUCKET
                end = charge.full_at.get(bucket, now)
            if end < now:
                end = now
            elif end > now + charge.slack and end - now - charge.slack > wait:
                tightest, wait = charge, end - now - charge.slack
            updates.append((charge.full_at, bucket, end + charge.cost))
        if is_new:
            _sweep(ring, now)
        if tightest is not None:
            return Throttled(wait / 1e9, tightest.limit, tightest.scope)
        slot = None
        if plan.slots is not None:
            slot = self.take_slot(tool)
            if isinstance(slot, Throttled):
                return slot
        for full_at, bucket, end in updates:
            if is_new and bucket not in full_at:
                ring.append((full_at, bucket))
            full_at[bucket] = end
        return slot

    def forget(self, tool: str) -> None:
        """Look up the limit of a tool anew."""
        self.plans.forget(tool)

    def take_slot(self, tool: str) -> Admission:
        plan = self.plans[tool]
        if plan.slots is None:
            return None
        if self._running[plan.name] >= plan.slots:
            return busy(plan.slots, plan.owner)
        self._running[plan.name] += 1
        return partial(self._release, plan.name)

    def _release(self, name: str) -> None:
        self._running[name] -= 1


def _sweep(ring: _Ring, now: int) -> None:
    """Forget some of the buckets that are full."""
    for _ in range(min(SWEEP_BUCKETS, len(ring))):
        full_at, caller = ring.popleft()
        if full_at[caller] > now:
            ring.append((full_at, caller))
        else:
            del full_at[caller]


class Charge(Struct, eq=False):
    """What a request takes from a bucket of its caller, in nanoseconds."""

    name: str
    scope: Scope
    limit: str
    cost: int
    slack: int  # how far from full the bucket may be, to have as much
    token: int  # what one call of cost 1 takes
    full_at: dict[str, int]  # caller -> when the bucket will be


class Plan(Struct, eq=False):
    """What a request is charged to, depending on who makes it. What an upstream offers may share one."""

    principal_charges: list[Charge]
    address_charges: list[Charge]  # callers with an address and no name
    local_charges: list[Charge]
    name: str = ""  # of what is counted together: a tool, or an upstream server
    owner: str = "this tool"  # the same, for people
    rate: ToolRate = NO_LIMIT
    slots: int | None = None


class Plans(dict[str, Plan]):
    """The plan for each tool, made when it is first called; and for `""`, requests that are not calls.

    Of the limits that fit a tool one holds: that of its name in `rates.tools`, else of its upstream, else `rates.tool`.
    """

    def __init__(self, rates: Rates, find: FindLimit | None = None) -> None:
        self._rates = rates
        self._find = find
        self._principals: dict[str, int] = {}
        self._addresses: dict[str, int] = {}

    def limit_of(self, tool: str) -> tuple[str, ToolRate]:
        """Return the limit of a tool, and the name of what is counted by it together."""
        for pattern, each in self._rates.tools.items():
            if fnmatchcase(tool, pattern):
                return (tool if len(self) < MAX_TOOLS else pattern), each
        name, limit = (self._find and self._find(tool)) or ("", self._rates.tool)
        return name or (tool if len(self) < MAX_TOOLS else "*"), limit

    def forget(self, tool: str) -> bool:
        """Drop the plan of a tool if another limit holds now; one that stays keeps its counts."""
        plan = self.get(tool)
        is_other = plan is not None and (plan.name, plan.rate) != self.limit_of(tool)
        if is_other:
            del self[tool]
        return is_other

    def __missing__(self, tool: str) -> Plan:
        rates = self._rates
        if not tool:
            principal_charges, address_charges = (
                _charges("lists", "lists", rates.lists, "requests that are not calls") for _ in range(2)
            )
            return self.setdefault(
                tool, Plan(principal_charges, address_charges, principal_charges if rates.local else [])
            )
        name, limit = self.limit_of(tool)
        plan = self.get(name)
        if plan is None or plan.rate != limit:
            plan = self[name] = self._plan(name, limit, "this tool" if name in (tool, "*") else name)
        if name != tool and len(self) < MAX_TOOLS:
            self[tool] = plan
        return plan

    def _plan(self, name: str, limit: ToolRate, owner: str) -> Plan:
        rates = self._rates
        tool_charges, address_charges = (_charges(f"tool {name}", "tool", limit.rate, owner) for _ in range(2))
        principal_charges = tool_charges + _charges(
            "principal", "principal", rates.principal, "this caller", self._principals, limit.cost
        )
        address_charges += _charges("address", "address", rates.address, "this address", self._addresses, limit.cost)
        local_charges = principal_charges if rates.local else tool_charges
        return Plan(principal_charges, address_charges, local_charges, name, owner, limit, limit.concurrent)


def _charges(
    name: str, scope: Scope, text: str, owner: str, full_at: dict[str, int] | None = None, cost: float = 1.0
) -> list[Charge]:
    """One, or none if there is no limit."""
    if not text:
        return []
    rate = Rate.parse(text)
    token_ns = -(-UNIT_SECONDS[rate.unit] * 1_000_000_000 // rate.count)  # rounded up: in no time more than the rate
    cost_ns = round(cost * token_ns)
    return [
        Charge(
            name,
            scope,
            f"{rate} for {owner}",
            cost_ns,
            rate.burst * token_ns - cost_ns,
            token_ns,
            {} if full_at is None else full_at,
        )
    ]


def busy(slots: int, owner: str) -> Throttled:
    """Return the refusal of a call whose tool, or upstream server, has no free slot."""
    return Throttled(BUSY_SECONDS, f"{slots} of {owner} at once", "concurrency")


def network(address: str) -> str:
    """The part of an address that tells customers apart: all of IPv4, 64 bits of IPv6, where each has all the rest."""
    return _network(address) if ":" in address else address


@lru_cache(maxsize=1024)
def _network(address: str) -> str:
    try:
        ip = IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(ip.ipv4_mapped or IPv6Address(int(ip) >> 64 << 64))


MAX_GROUP = 256  # calls settled together
MAX_ATTEMPTS = 100  # that other processes may spoil
CONTENDED = Throttled(BUSY_SECONDS, "what the store can count", "concurrency")
COUNT_TIMEOUT_SECONDS = 10.0  # for one of them
EXTRA_TTL_SECONDS = 1.0  # that the store keeps a value for longer than it is needed


class SharedLimiter:
    """A limiter whose processes count together; a subclass settles a group of calls in one exchange.

    A slot is held by a lease, renewed while the call runs: the slots of a process that was killed are free when its
    lease ends. Servers of different names count apart. `local_limiter` has what each process counts by itself.

    For one event loop.
    """

    trouble = ""  # why the processes cannot count together now; empty while they can

    def __init__(
        self,
        rates: Rates,
        name: str,
        find: FindLimit | None,
        local_limiter: MemoryLimiter | None,
        lease_seconds: float,
        clock: Callable[[], int],
    ) -> None:
        self._prefix = f"{len(name)}:{name}:" if name else ""
        self._local_limiter = local_limiter
        self.plans = Plans(rates, find)
        self._lease = round(lease_seconds * 1e9)
        self._clock = clock
        self._holder_id = token_hex(8)
        self._held: Counter[str] = Counter()  # slots, by tool
        self._stale: set[str] = set()  # tools of whose slots the store has to be told
        self._waiting: list[PendingTake] = []
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # By caller and tool: from when until when, and what was said.
        self._refusals: dict[tuple[str, str], dict[str, tuple[int, int, Throttled]]] = {}

    def take(self, principal: str, tool: str, address: str = "") -> Admission | Awaitable[Admission]:
        plan = self.plans[tool]
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
        caller, name = self._prefix + caller, self._prefix + plan.name
        refusal = self._standing_refusal(name, kind, caller)
        return self._enqueue(tool, plan, kind, caller, charges) if refusal is None else refusal

    def _standing_refusal(self, name: str, kind: str, caller: str) -> Throttled | None:
        """Return an earlier refusal of such a call while its time has not come.

        No token is put back, so it stands until then: a flood does not reach the store.
        """
        refusals = self._refusals.get((kind, caller))
        if refusals is not None and name in refusals:
            since, until, throttled = refusals[name]
            if since <= (now := self._clock()) < until:
                return Throttled((until - now) / 1e9, throttled.limit, throttled.scope)
        return None

    def forget(self, tool: str) -> None:
        """Look up the limit of a tool anew."""
        if self._local_limiter is not None:
            self._local_limiter.forget(tool)
        if self.plans.forget(tool):
            self._refusals.clear()  # what was refused may be allowed now

    def take_slot(self, tool: str) -> Admission | Awaitable[Admission]:
        plan = self.plans[tool]
        return None if plan.slots is None else self._enqueue(tool, plan, "", "", [])

    def _enqueue(
        self, called: str, plan: Plan, kind: str, caller: str, charges: list[Charge]
    ) -> Admission | Awaitable[Admission]:
        name, admission = self._prefix + plan.name, asyncio.get_running_loop().create_future()
        pending = PendingTake(called, name, kind, caller, charges, plan.slots, plan.owner, admission)
        self._waiting.append(pending)
        self._ensure_running()
        return admission if plan.slots is None else _await_admission(pending)

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

    async def _settle(self, group: list[PendingTake], stale: set[str]) -> None:
        """Decide a group of calls, and say how many slots of the `stale` tools this process holds."""
        raise NotImplementedError

    def _resolve(self, pending: PendingTake, admission: Throttled | None, now: int) -> None:
        """Tell a call what was decided."""
        if pending.admission.done():  # cancelled meanwhile: its slot is free
            if pending.slots is not None:
                self._stale.add(pending.tool)
        elif admission is None and pending.slots is not None:
            pending.admission.set_result(self._grant_slot(pending.tool))
        else:
            pending.admission.set_result(admission)
        if admission is not None or self._refusals:
            self._remember_refusal(pending, now, admission)

    def _remember_refusal(self, pending: PendingTake, now: int, refusal: Throttled | None) -> None:
        if refusal is None:  # from now on the others are refused for longer
            self._refusals.pop((pending.kind, pending.caller), None)
        elif refusal.scope != "concurrency":
            if len(self._refusals) >= MAX_BUCKETS:
                self._refusals.clear()
            until = now + round(refusal.retry_after * 1e9)
            self._refusals.setdefault((pending.kind, pending.caller), {})[pending.tool] = (now, until, refusal)


class StoreLimiter(SharedLimiter):
    """Counts in `store`, by the time of day, which is what processes have in common.

    When that goes back, a bucket is at worst empty, and fills in its own time. The store need not be durable: to lose
    some counts in a power cut does no harm.
    """

    def __init__(
        self,
        store: Store,
        rates: Rates,
        *,
        name: str = "",
        find: FindLimit | None = None,
        local_limiter: MemoryLimiter | None = None,
        lease_seconds: float = 30.0,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__(rates, name, find, local_limiter, lease_seconds, clock)
        self._store = store
        self._salt = b""

    async def _settle(self, group: list[PendingTake], stale: set[str]) -> None:
        if not self._salt and any(each.kind == "address" for each in group):
            self._salt = await shared_salt(self._store)
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
            self._resolve(each, admission, now)


async def await_charge(pending: Awaitable[Admission]) -> None:
    """Until a request that takes no slot was counted; `Refused` if there were too many, or the store fails."""
    try:
        async with asyncio.timeout(COUNT_TIMEOUT_SECONDS):
            admission = await pending
    except (StoreError, TimeoutError) as problem:
        log.error("limits: request refused, it cannot be counted: %s", str(problem) or "it takes too long")
        raise Refused(Kind.UNRECORDED, "This cannot be counted now; the server's log says why") from None
    if isinstance(admission, Throttled):
        raise admission.refusal()


class PendingTake(Struct, eq=False):
    """A call that waits for its turn."""

    called: str  # the tool
    tool: str  # or what is counted together
    kind: str
    caller: str
    charges: list[Charge]
    slots: int | None
    owner: str
    admission: asyncio.Future[Admission]
    keys: list[str] = []


async def _await_admission(pending: PendingTake) -> Admission:
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

    def charge(self, pending: PendingTake) -> Throttled | None:
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
                return busy(pending.slots, pending.owner)
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


async def shared_salt(store: Store) -> bytes:
    """Return the secret of all processes by which addresses are distributed over buckets."""
    await store.put("rate:salt", token_bytes(16), if_absent=True)
    return await store.get("rate:salt") or b""


def bucket_owner(pending: PendingTake, salt: bytes) -> str:
    """Return whose bucket a call is charged to. Addresses, of which a client can make up any number, share 65,536.

    Which addresses share one is a secret: no client can choose an address to use up the bucket of another.
    """
    if pending.kind != "address":
        return pending.caller
    return blake2b(pending.caller.encode("utf-8", "surrogatepass"), key=salt, digest_size=2).hexdigest()


def _key(pending: PendingTake, charge: Charge, salt: bytes) -> str:
    owner = bucket_owner(pending, salt)
    return f"rate:{pending.kind}:{len(owner)}:{owner}:{charge.name}"
