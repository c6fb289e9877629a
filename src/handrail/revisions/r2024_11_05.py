"""2024-11-05: content blocks and `isError` instead of `toolResult`; cancellation; instructions."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET
from msgspec.structs import replace

from handrail.model import Object, ToolResult
from handrail.revisions import r2024_10_07
from handrail.revisions.base import explain, initialize_result
from handrail.revisions.downlevel import BlockRules, blocks, definition, losses, prompt_result

BLOCKS = BlockRules(
    types=frozenset({"text", "image", "resource"}),
    annotations=frozenset({"audience", "priority"}),
    drops=frozenset({"_meta"}),
    inner=False,
)


DEFINITIONS = replace(BLOCKS, drops=frozenset({"title", "icons", "_meta"}))


def result(rules: BlockRules | None, tool_result: ToolResult, wraps: bool) -> Object:
    content = tool_result.content if rules is None else blocks(tool_result.content, rules)
    out: Object = {"content": content, "isError": tool_result.is_error}
    if tool_result.meta is not UNSET:
        out["_meta"] = tool_result.meta
    return out


REVISION = replace(
    r2024_10_07.REVISION,
    name="2024-11-05",
    pages=True,
    notifications=r2024_10_07.REVISION.notifications | {"notifications/cancelled"},
    encoders={
        **r2024_10_07.REVISION.encoders,
        "initialize": initialize_result,
        "tools/call": partial(result, BLOCKS),
        "prompts/get": partial(prompt_result, BLOCKS),
    },
    definition=partial(definition, rules=DEFINITIONS),
    structured="none",
    losses=partial(losses, BLOCKS, "none"),
    explain=explain,
)
