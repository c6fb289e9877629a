"""pocket: a small dialect on top of 2025-06-18 in which nothing is optional. Never offered, only asked for."""

from __future__ import annotations

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from handrail.jsonrpc import encode
from handrail.model import RISK, Json, Object, Text, Tool, ToolResult
from handrail.revisions import downlevel as levels, r2025_06_18
from handrail.revisions.decode import read_complete
from handrail.revisions.downlevel import BlockRules

_BLOCKS = BlockRules(drops=frozenset({"_meta", "icons"}))


def tool(it: Tool) -> Object:
    out = levels.tool(it, members=("name", "description", "inputSchema", "outputSchema", "annotations"))
    out.setdefault("description", it.name if it.title is UNSET else it.title)
    return out


def page(tools: Json, cursor: str | UnsetType, ttl_ms: int, scope: str) -> Object:
    return {"tools": tools, "nextCursor": "" if cursor is UNSET else cursor}


def result(it: ToolResult, wraps: bool) -> Object:
    risk: Json = it.meta.get(RISK) if it.meta is not UNSET else None
    if risk:
        it = replace(it, content=[Text(f"[caution: {risk['reason']}]"), *it.content])
    elif not it.content:
        it = replace(it, content=[Text("" if it.structured is UNSET else encode(it.structured).decode())])
    out = r2025_06_18.result(_BLOCKS, it, wraps)
    out.setdefault("structuredContent", {})
    return out


REVISION = replace(
    r2025_06_18.REVISION,
    name="pocket",
    offered=False,
    announces=True,
    complete=True,
    tool=tool,
    page=page,
    result=result,
    read=read_complete,
)
