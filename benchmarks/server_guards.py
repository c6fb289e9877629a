"""A server with as many of its guards as it is told: `server_guards.py STEP FOLDER [PORT]`.

Each step has the guards of those before it, too. `off` is what a server without guards would be: nothing is limited,
decided, cleaned or recorded, and any object will do as arguments or result. The tools and how they are called are the
same in all of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from benchmarks.scenarios import LONG, STEPS
from benchmarks.tools import Sum
from handrail import Server
from handrail.audit.log import Callback, RecordBody, Trail, open_trail
from handrail.engine.guard_set import GuardOptions
from handrail.guards.limits import Rates, ToolRate
from handrail.guards.policy import Policy, Rule
from handrail.guards.sanitize import Sanitize
from handrail.schema.compile import compile_schema

__all__ = ["build"]

NEVER_MET = "100000000/second"
OPEN = Policy(destructive="allow")
# Each process counts for itself: else the limits would be counted in the file of the audit, as soon as there is one.
LIMITS = Rates(
    principal=NEVER_MET, address=NEVER_MET, lists=NEVER_MET, tool=ToolRate(rate=NEVER_MET), local=True, shared=False
)


def build(step: str, folder: Path) -> Server:
    """The server of one step; its audit is a file in the folder."""
    has = STEPS[: STEPS.index(step) + 1]
    guards: GuardOptions = {
        "rates": LIMITS if "limit" in has else None,
        "policy": Policy(rules()) if "decide" in has else OPEN,
        "sanitize": Sanitize() if "sanitize" in has else None,
    }
    if "outcome" in has:
        guards["audit"] = folder / "audit.db"
    elif "intent" in has:
        guards["audit"] = Intents(open_trail(folder / "audit.db"))
    server = Server("bench", **guards)
    for tool in (reply, total, text):
        server.tool(tool)
    if "validate" not in has:
        for entry in server.engine.catalog:  # no option does this
            entry.input, entry.output = compile_schema({"type": "object"}, entry.tool.name), None
    return server


async def reply(
    text: Annotated[str, Meta(min_length=1, max_length=4000)],
    language: Literal["de", "en", "fr"] = "en",
    tags: Annotated[list[str], Meta(max_length=10)] = [],  # noqa: B006  # a default as users write it
) -> str:
    """Give the text back."""
    return text


async def total(a: float, b: float, currency: Literal["EUR", "USD"] = "EUR") -> Sum:
    """Add two amounts."""
    return Sum(a + b)


async def text() -> str:
    """A long one."""
    return LONG


def rules() -> list[Rule]:
    """Fifty, as for a server with more tools than these two; of each tool that is called two look at the arguments."""
    others = [
        each
        for number in range(15)
        for each in (
            Rule(verdict="deny", tools=[f"admin_{number}_*"], without_scopes=["admin"]),
            Rule(verdict="ask", tools=[f"order_{number}_*"], arguments={"amount": {"over": 100 * number}}),
            Rule(verdict="allow", principals=[f"team-{number}-*"], tags=[f"team-{number}"]),
        )
    ]
    return [
        *others,
        Rule(verdict="deny", tools=["reply"], arguments={"text": {"matches": r"^DROP TABLE"}}),
        Rule(verdict="ask", tools=["reply"], arguments={"text": {"longer_than": 2000}, "language": {"is": "de"}}),
        Rule(verdict="deny", tools=["tot*"], arguments={"a": {"under": 0}}),
        Rule(verdict="ask", tools=["tot*"], arguments={"a": {"over": 1e12}, "currency": {"not_in": ["EUR", "USD"]}}),
        Rule(verdict="allow", tools=["reply", "total"]),
    ]


class Intents:
    """A trail that leaves the outcomes out, to tell what each half of the audit costs."""

    def __init__(self, trail: Trail) -> None:
        self._trail = trail
        self.store = trail.store
        self.write = trail.write
        self.close = trail.close

    def submit(self, record: RecordBody, callback: Callback | None = None) -> None:
        if getattr(record, "event", "") != "outcome":
            self._trail.submit(record, callback)
        elif callback is not None:
            callback(None)


if __name__ == "__main__":
    step, folder, *port = sys.argv[1:]
    server = build(step, Path(folder))
    if port:
        server.run(http=f"127.0.0.1:{port[0]}")
    else:
        server.run()
