"""pocket: a small dialect on top of 2025-06-18 in which nothing is optional. Never offered, only asked for."""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from handrail.model import RISK, Json, Object, Text, Tool, ToolResult
from handrail.revisions import r2025_06_18
from handrail.revisions.base import Page
from handrail.revisions.levels import BlockRules, blocks, json_text
from handrail.revisions.read import read_content, read_page

_BLOCKS = BlockRules(meta=False, icons=False)


def tool(it: Tool) -> Object:
    out = r2025_06_18.tool(it)
    out.pop("_meta", None)
    title = out.pop("title", it.name)
    out.setdefault("description", title)
    return out


def page(it: Page) -> Object:
    return {"tools": it.tools, "nextCursor": "" if it.cursor is UNSET else it.cursor}


def result(it: ToolResult, wraps: bool) -> Object:
    shown = it
    risk: Json = it.meta.get(RISK) if it.meta is not UNSET else None
    if risk:
        shown = replace(it, content=[Text(f"[caution: {risk['reason']}]"), *it.content])
    elif not it.content:
        shown = replace(it, content=[Text("") if it.structured is UNSET else json_text(it.structured)])
    out = r2025_06_18.structured_result(shown, wraps, blocks(shown.content, _BLOCKS))
    out.setdefault("structuredContent", {})
    return out


def read_pocket_page(result: Object) -> tuple[list[Object], str | None]:
    tools, cursor = read_page(result)
    return tools, cursor or None


def read_result(result: Object, has_schema: bool) -> ToolResult:
    read = read_content(result, has_schema)
    if read.structured == {} and not has_schema:
        read.structured = UNSET
    if read.content == [Text("")]:
        read.content = []
    return read


REVISION = replace(
    r2025_06_18.REVISION,
    name="pocket",
    offered=False,
    announces=True,
    tool=tool,
    page=page,
    result=result,
    read_page=read_pocket_page,
    read_result=read_result,
)
