"""pocket: a small dialect on top of 2025-06-18 in which nothing is optional. Never offered, only asked for."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from handrail.jsonrpc import encode
from handrail.model import RISK, Json, Object, Text, Tool, ToolResult
from handrail.revisions import base, downlevel as levels, r2024_10_07, r2025_06_18
from handrail.revisions.decode import read_empty_as_unset
from handrail.revisions.downlevel import BlockRules

_BLOCKS = BlockRules(drops=frozenset({"_meta", "icons"}))


def tool(definition: Tool) -> Object:
    out = levels.tool(definition, members=("name", "description", "inputSchema", "outputSchema", "annotations"))
    out.setdefault("description", definition.name if definition.title is UNSET else definition.title)
    return out


def page(member: str, entries: Json, cursor: str | UnsetType, ttl_ms: int, scope: str) -> Object:
    return {member: entries, "nextCursor": "" if cursor is UNSET else cursor}


def result(tool_result: ToolResult, wraps: bool) -> Object:
    risk: Json = tool_result.meta.get(RISK) if tool_result.meta is not UNSET else None
    if risk:
        tool_result = replace(tool_result, content=[Text(f"[caution: {risk['reason']}]"), *tool_result.content])
    elif not tool_result.content:
        tool_result = replace(
            tool_result,
            content=[Text("" if tool_result.structured is UNSET else encode(tool_result.structured).decode())],
        )
    out = r2025_06_18.result(_BLOCKS, tool_result, wraps)
    out.setdefault("structuredContent", {})
    return out


REVISION = replace(
    r2025_06_18.REVISION,
    name="pocket",
    offered=False,
    always_announces=True,
    no_optional_members=True,
    tool=tool,
    losses=partial(levels.losses, _BLOCKS, "object"),
    definition=partial(levels.definition, rules=replace(_BLOCKS, drops=_BLOCKS.drops | {"title"})),
    encoders={
        **r2025_06_18.REVISION.encoders,
        **{method: partial(page, member) for method, member in base.LISTS.items()},
        "tools/call": result,
        "resources/read": partial(levels.read_result, r2024_10_07.CONTENTS),
        "prompts/get": partial(levels.prompt_result, _BLOCKS),
    },
    read=read_empty_as_unset,
)
