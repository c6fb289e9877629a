"""A server with every guard on, whose tools meet each of them; its trail can be read while it serves."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from handrail import Call, Server, ToolError, ToolResult
from handrail.approvals.queue import Approvals
from handrail.audit.log import TrailSettings
from handrail.engine.pipeline import Handler
from handrail.errors import Kind, Refused
from handrail.guards.limits import Rates, ToolRate
from handrail.guards.policy import Policy, Rule

ACTS = "\x1b[31m\x07\x9b2J\u202e\u200b\U000e0041"
SECRET = "hunter2-is-not-for-you"
DESTROYS = {"destructiveHint": True}
RULES = [
    Rule(verdict="hide", name="not for anybody", tools=["concealed"]),
    Rule(verdict="deny", name="no large sums", tools=["pay"], arguments={"amount": {"over": 100}}),
]
RATES = Rates(tools={"narrow": ToolRate(rate="1/day")})
QUICK = Approvals(wait=0.05, round=0.005)


def guarded(**options: Any) -> Server:
    folder = Path(tempfile.mkdtemp(prefix="guards-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "trail.db"
    kept = {"audit": file, "trail": TrailSettings(sync="power-cut-loses-last-calls")}  # nobody cuts the power here
    options = {"policy": Policy(RULES), "rates": RATES, "approvals": QUICK, "secrets": [SECRET], **kept, **options}
    server = Server("guarded", **options)
    ran: Counter[str] = Counter()

    @server.tool
    async def where() -> str:
        """The file of the trail."""
        return str(file)

    @server.tool
    async def times_run() -> dict[str, int]:
        """How often each tool did what it is there for."""
        return ran

    @server.tool
    async def pay(amount: Annotated[int, Meta(ge=1)], note: str = "") -> str:
        """Allowed up to 100."""
        ran["pay"] += 1
        return f"paid {amount}"

    @server.tool
    def pay_slowly(amount: int) -> str:
        """In a thread."""
        ran["pay_slowly"] += 1
        return f"paid {amount}"

    @server.tool(inline=True)
    def pay_now(amount: int) -> str:
        """On the loop."""
        ran["pay_now"] += 1
        return f"paid {amount}"

    @server.tool
    async def concealed() -> str:
        ran["concealed"] += 1
        return "seen"

    @server.tool
    async def dirty(call: Call, fail: bool = False) -> str:
        """Says what nobody is to obey, and nobody to know."""
        await call.log("error", f"log {ACTS} {SECRET}")
        if fail:
            raise ToolError(f"fail {ACTS} {SECRET}")
        return f"text {ACTS} {SECRET}"

    @server.tool(scopes=["admin"])
    async def scoped() -> str:
        ran["scoped"] += 1
        return "seen"

    @server.tool(scopes=["admin"], hide=True)
    async def scoped_and_hidden() -> str:
        ran["scoped_and_hidden"] += 1
        return "seen"

    @server.tool
    async def narrow() -> str:
        ran["narrow"] += 1
        return "once a day"

    @server.tool(annotations=DESTROYS)
    async def wipe(folder: str, count: int = 1) -> str:
        ran["wipe"] += 1
        return f"wiped {folder} {count}"

    @server.tool
    async def asks(call: Call, count: int = 1) -> str:
        answer = await call.ask("Go on?", {"type": "object", "properties": {"allow": {"type": "boolean"}}})
        ran["asks"] += 1
        return f"{answer.action} {count}"

    @server.tool
    async def fails() -> str:
        ran["fails"] += 1
        raise ToolError("no")

    @server.tool
    async def breaks() -> str:
        ran["breaks"] += 1
        raise RuntimeError("a bug")

    @server.tool(timeout=0.05)
    async def waits() -> str:
        ran["waits"] += 1
        await asyncio.Event().wait()
        return ""

    @server.tool(timeout=0.05)
    async def clings() -> str:
        """Goes on after its time, and says so too late."""
        ran["clings"] += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "too late"
        return ""

    @server.tool
    async def hangs(call: Call) -> str:
        """Until it is cancelled."""
        ran["hangs"] += 1
        await call.log("warning", "begun")
        await asyncio.Event().wait()
        return ""

    schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}

    @server.tool(input_schema={**schema, "required": ["region"]})
    async def mirrored(region: str) -> str:
        ran["mirrored"] += 1
        return region

    @server.tool
    async def answered_for() -> str:
        ran["answered_for"] += 1
        return "by itself"

    @server.tool
    async def refused_for() -> str:
        ran["refused_for"] += 1
        return "by itself"

    @server.middleware
    async def in_between(call: Call, following: Handler) -> ToolResult:
        if call.name == "answered_for":
            return ToolResult([])
        if call.name == "refused_for":
            raise Refused(Kind.FORBIDDEN, "not today")
        return await following(call)

    other = Server("other")

    @other.tool
    async def far(amount: int) -> str:
        ran["in_far"] += 1
        return f"far {amount}"

    @other.tool(annotations=DESTROYS)
    async def far_wipe() -> str:
        ran["in_far_wipe"] += 1
        return "wiped"

    server.include(other, prefix="in_")
    return server


def repairing() -> Server:
    """The same, which reads `"5"` as 5, and writes arguments down."""
    return guarded(repair=True, audit_arguments=True)
