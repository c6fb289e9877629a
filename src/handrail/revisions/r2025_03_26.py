"""2025-03-26: tool annotations, audio, progress messages and batches in."""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from handrail.model import Object, Tool, ToolResult
from handrail.revisions import r2024_10_07, r2024_11_05
from handrail.revisions.levels import BlockRules

_BLOCKS = BlockRules(
    types=frozenset({"text", "image", "audio", "resource"}),
    annotations=frozenset({"audience", "priority"}),
    meta=False,
    inner=False,
)


def tool(it: Tool) -> Object:
    out = r2024_10_07.tool(it)
    annotations = {} if it.annotations is UNSET else dict(it.annotations)
    if it.title is not UNSET:
        annotations.setdefault("title", it.title)
    if annotations or it.annotations is not UNSET:
        out["annotations"] = annotations
    return out


def result(it: ToolResult, wraps: bool) -> Object:
    return r2024_11_05.plain_result(it, _BLOCKS)


REVISION = replace(
    r2024_11_05.REVISION,
    name="2025-03-26",
    batches=True,
    progress_message=True,
    tool=tool,
    result=result,
)
