"""How often callers may come: the section `limits` of the configuration."""

from __future__ import annotations

import math
import re
from types import NoneType
from typing import Annotated

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from handrail.options import expect, mapping

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
        tell by itself; what somebody has set holds as it is set.
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
