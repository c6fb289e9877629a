"""2024-11-05: content blocks and `isError` instead of `toolResult`; cancellation; instructions."""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from handrail.model import Object, ToolResult
from handrail.revisions import r2024_10_07
from handrail.revisions.base import Welcome, explain
from handrail.revisions.levels import BlockRules, blocks
from handrail.revisions.read import read_content

_BLOCKS = BlockRules(
    types=frozenset({"text", "image", "resource"}),
    annotations=frozenset({"audience", "priority"}),
    meta=False,
    inner=False,
)


def welcome(it: Welcome) -> Object:
    out = r2024_10_07.welcome(it)
    if it.instructions is not UNSET:
        out["instructions"] = it.instructions
    return out


def result(it: ToolResult, wraps: bool) -> Object:
    return plain_result(it, _BLOCKS)


def plain_result(it: ToolResult, rules: BlockRules) -> Object:
    out: Object = {"content": blocks(it.content, rules), "isError": it.is_error}
    if it.meta is not UNSET:
        out["_meta"] = it.meta
    return out


REVISION = replace(
    r2024_10_07.REVISION,
    name="2024-11-05",
    pages=True,
    notifications=r2024_10_07.REVISION.notifications | {"notifications/cancelled"},
    welcome=welcome,
    result=result,
    explain=explain,
    read_result=read_content,
)
