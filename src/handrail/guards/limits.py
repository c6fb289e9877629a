"""Counting calls: token buckets for each caller, and slots for each tool.

A bucket is one number: the time at which it will be full again. To take a token is to move that time on by what the
token needs to grow back; a bucket whose time is past is full, which is the same as no bucket at all. Times are whole
nanoseconds, so that nothing is lost to rounding: a rate of 10 lets ten through, not nine.

A call is charged to all its buckets or, if one of them says no, to none: a refused caller loses nothing by it.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from ipaddress import IPv6Address
from types import NoneType
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from handrail.errors import Kind, Refused
from handrail.guards.identity import RESERVED_NAMES
from handrail.suggest import expect, mapping

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
        Meta(description="Count over all processes that use the same state file; unset: those limits that were set."),
    ] = None
    local: Annotated[
        bool, Meta(description="Whether the user of this machine is limited too, beyond what holds for a tool.")
    ] = False

    def __post_init__(self) -> None:
        expect("Rates: tool", self.tool, "ToolRate(…)", ToolRate)
        for name, each in mapping("Rates: tools", self.tools, "ToolRate(…) by name").items():
            expect(f"Rates: tools.{name}", each, 'ToolRate(rate="10/minute")', ToolRate)
        _parse_rate("lists", self.lists)
        for name in ("principal", "address"):
            rate = _parse_rate(name, getattr(self, name))
            for where, each in (("tool", self.tool), *((f"tools.{key}", each) for key, each in self.tools.items())):
                if rate is not None and each.cost > rate.burst:
                    raise ValueError(f"{where}.cost: {each.cost:g} is more than `{name}` ever has, {rate.burst}")

    def split(self) -> tuple[Rates, Rates | None]:
        """What each process counts by itself, and what they count together.

        To count together takes a look at a file. What is built in is only there against floods, which each process can
        tell by itself; a configured limit holds as it is configured.
        """
        if self.shared is False:
            return self, None
        names = [each for each in DEFAULT_RATES if self.shared or getattr(self, each) != DEFAULT_RATES[each]]
        tools = [self.tool, *self.tools.values()]
        if not any(getattr(self, each) for each in names) and not any(
            tool_rate.rate or tool_rate.concurrent for tool_rate in tools
        ):
            return self, None
        unlimited, *others = (replace(each, rate="", concurrent=None) for each in tools)
        local_rates = replace(
            self, tool=unlimited, tools=dict(zip(self.tools, others, strict=True)), **dict.fromkeys(names, "")
        )
        return local_rates, replace(self, **{each: "" for each in DEFAULT_RATES if each not in names})


def _parse_rate(name: str, text: str) -> Rate | None:
    expect(name, text, "a text such as '60/minute'", str)
    try:
        return Rate.parse(text) if text else None
    except ValueError as problem:
        raise ValueError(f"{name}: {problem}") from None


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

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._limits: dict[str, ToolRate] = {}  # by tool
        self._held: Counter[tuple[str, str]] = Counter()

    def max_slots(self, principal: str, tool: str) -> int | None:
        """Return the most that one caller may hold; None: any number."""
        limit = self._limits.get(tool)
        if limit is None:
            if len(self._limits) >= MAX_TOOLS:
                self._limits.clear()
            matching = (each for pattern, each in self._rates.tools.items() if fnmatchcase(tool, pattern))
            limit = self._limits[tool] = next(matching, self._rates.tool)
        return limit.each if principal == LOCAL else limit.share

    def take(self, principal: str, tool: str, address: str) -> Throttled | Callable[[], None] | None:
        limit = self.max_slots(principal, tool)
        if limit is None:
            return None
        key = (tool, network(address) if address and principal == ANONYMOUS else principal)
        if self._held[key] >= limit:
            return Throttled(BUSY_SECONDS, f"{limit} of this tool at once for one caller", "concurrency")
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
        self, rates: Rates, *, max_buckets: int = MAX_BUCKETS, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._plans = Plans(rates)
        self._clock = clock
        self._max_buckets = max_buckets
        self._principal_ring = _Ring()
        self._address_ring = _Ring()
        self._running: Counter[str] = Counter()  # calls of tools that have slots

    def take(self, principal: str, tool: str, address: str = "") -> Admission:
        plan = self._plans[tool]
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

    def take_slot(self, tool: str) -> Admission:
        slots = self._plans[tool].slots
        if slots is None:
            return None
        if self._running[tool] >= slots:
            return busy(slots)
        self._running[tool] += 1
        return partial(self._release, tool)

    def _release(self, tool: str) -> None:
        self._running[tool] -= 1


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
    full_at: dict[str, int]  # caller -> when the bucket will be


class Plan(Struct, eq=False):
    """What a request is charged to, depending on who makes it."""

    principal_charges: list[Charge]
    address_charges: list[Charge]  # callers with an address and no name
    local_charges: list[Charge]
    slots: int | None = None


class Plans(dict[str, Plan]):
    """The plan for each tool, made when it is first called; and for `""`, requests that are not calls."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._principals: dict[str, int] = {}
        self._addresses: dict[str, int] = {}

    def __missing__(self, tool: str) -> Plan:
        rates = self._rates
        if not tool:
            principal_charges, address_charges = (
                _charges("lists", "lists", rates.lists, "requests that are not calls") for _ in range(2)
            )
            return self.setdefault(
                tool, Plan(principal_charges, address_charges, principal_charges if rates.local else [])
            )
        matching = ((pattern, each) for pattern, each in rates.tools.items() if fnmatchcase(tool, pattern))
        pattern, tool_rate = next(matching, ("*", rates.tool))
        name = tool if len(self) < MAX_TOOLS else pattern
        if name not in self:
            tool_charges, address_charges = (
                _charges(f"tool {name}", "tool", tool_rate.rate, "this tool") for _ in range(2)
            )
            principal_charges = tool_charges + _charges(
                "principal", "principal", rates.principal, "this caller", self._principals, tool_rate.cost
            )
            address_charges += _charges(
                "address", "address", rates.address, "this address", self._addresses, tool_rate.cost
            )
            self[name] = Plan(
                principal_charges,
                address_charges,
                principal_charges if rates.local else tool_charges,
                tool_rate.concurrent,
            )
        return self[name]


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
            {} if full_at is None else full_at,
        )
    ]


def busy(slots: int) -> Throttled:
    """Return the refusal of a call whose tool has no free slot."""
    return Throttled(BUSY_SECONDS, f"{slots} of this tool at once", "concurrency")


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
