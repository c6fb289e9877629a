"""2025-06-18: batches out; structured output, titles, resource links, elicitation and `_meta` in."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET
from msgspec.structs import replace

from handrail.model import Object, ToolResult
from handrail.revisions import base, downlevel as levels, r2024_11_05, r2025_03_26
from handrail.revisions.decode import flaws
from handrail.revisions.downlevel import BlockRules

TOOL = ("name", "title", "description", "inputSchema", "outputSchema", "annotations", "_meta")


def result(rules: BlockRules | None, it: ToolResult, wraps: bool) -> Object:
    out = r2024_11_05.result(rules, it, wraps)
    if it.structured is not UNSET:
        whole = type(it.structured) is dict and not wraps
        out["structuredContent"] = it.structured if whole else {"result": it.structured}
    return out


REVISION = replace(
    r2025_03_26.REVISION,
    name="2025-06-18",
    batches=False,
    assumed=False,
    version_header=True,
    flaws=partial(flaws, structured="object"),
    questions=r2025_03_26.REVISION.questions | {"elicitation/create"},
    welcome=partial(base.welcome, info=("name", "version", "title")),
    tool=partial(levels.tool, members=TOOL),
    result=partial(result, BlockRules(drops=frozenset({"icons"}))),
    declare=partial(levels.declare, elicits=True),
)
