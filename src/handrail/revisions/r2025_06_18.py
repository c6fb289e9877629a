"""2025-06-18: batches out; structured output, titles, resource links, elicitation and `_meta` in."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET
from msgspec.structs import replace

from handrail.model import Object, ToolResult
from handrail.revisions import base, downlevel as levels, r2024_10_07, r2024_11_05, r2025_03_26
from handrail.revisions.decode import result_problems
from handrail.revisions.downlevel import BlockRules

CONTENTS = (*r2024_10_07.CONTENTS, "_meta")
_BLOCKS = BlockRules(drops=frozenset({"icons"}))
TOOL = ("name", "title", "description", "inputSchema", "outputSchema", "annotations", "_meta")


def result(rules: BlockRules | None, tool_result: ToolResult, wraps: bool) -> Object:
    out = r2024_11_05.result(rules, tool_result, wraps)
    if tool_result.structured is not UNSET:
        whole = type(tool_result.structured) is dict and not wraps
        out["structuredContent"] = tool_result.structured if whole else {"result": tool_result.structured}
    return out


REVISION = replace(
    r2025_03_26.REVISION,
    name="2025-06-18",
    batches=False,
    http_default=False,
    version_header=True,
    typed_meta=True,
    result_problems=partial(result_problems, structured="object"),
    requests={**r2025_03_26.REVISION.requests, "completion/complete": base.CompleteInContextParams},
    input_methods=r2025_03_26.REVISION.input_methods | {"elicitation/create"},
    encoders={
        **r2025_03_26.REVISION.encoders,
        "initialize": partial(base.initialize_result, info=("name", "version", "title")),
        "tools/call": partial(result, _BLOCKS),
        "resources/read": partial(levels.read_result, CONTENTS),
        "prompts/get": partial(levels.prompt_result, _BLOCKS),
    },
    definition=partial(levels.definition, rules=_BLOCKS),
    structured="object",
    losses=partial(levels.losses, _BLOCKS, "object"),
    tool=partial(levels.tool, members=TOOL),
    declare=partial(levels.declare, elicits=True),
)
