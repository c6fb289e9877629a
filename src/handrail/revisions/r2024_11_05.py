"""2024-11-05: content blocks and `isError` instead of `toolResult`; cancellation; instructions."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET
from msgspec.structs import replace

from handrail.model import Object, ToolResult
from handrail.revisions import r2024_10_07
from handrail.revisions.base import explain, welcome
from handrail.revisions.downlevel import BlockRules, blocks

BLOCKS = BlockRules(
    types=frozenset({"text", "image", "resource"}),
    annotations=frozenset({"audience", "priority"}),
    drops=frozenset({"_meta"}),
    inner=False,
)


def result(rules: BlockRules | None, it: ToolResult, wraps: bool) -> Object:
    content = it.content if rules is None else blocks(it.content, rules)
    out: Object = {"content": content, "isError": it.is_error}
    if it.meta is not UNSET:
        out["_meta"] = it.meta
    return out


REVISION = replace(
    r2024_10_07.REVISION,
    name="2024-11-05",
    pages=True,
    notifications=r2024_10_07.REVISION.notifications | {"notifications/cancelled"},
    welcome=welcome,
    result=partial(result, BLOCKS),
    explain=explain,
)
