"""2024-10-07: the first draft. A call is answered with `toolResult`, any JSON value; failures stand inside it."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from handrail.errors import Kind, Refused
from handrail.model import Json, Object, Text, ToolResult
from handrail.revisions import base
from handrail.revisions.base import Revision
from handrail.revisions.decode import read, read_leniently, result_problems
from handrail.revisions.downlevel import (
    BlockRules,
    blocks,
    declare,
    decode_input,
    definition,
    encode_input,
    losses,
    prompt_result,
    read_result,
    tool,
)

_BLOCKS = BlockRules(annotations=frozenset(), drops=frozenset({"_meta"}), inner=False)
_MESSAGES = BlockRules(
    types=frozenset({"text", "image", "resource"}), annotations=frozenset(), drops=frozenset({"_meta"}), inner=False
)
_DEFINITIONS = BlockRules(drops=frozenset({"title", "icons", "_meta", "annotations", "size"}))
CONTENTS = ("uri", "mimeType", "text", "blob")
_INVALID = frozenset({Kind.BAD_PARAMS, Kind.UNKNOWN_TOOL, Kind.UNKNOWN_PROMPT, Kind.BAD_ARGUMENTS})


def page(member: str, entries: Json, cursor: str | UnsetType, ttl_ms: int, scope: str) -> Object:
    return {member: entries} if cursor is UNSET else {member: entries, "nextCursor": cursor}


def result(tool_result: ToolResult, wraps: bool) -> Object:
    out: Object = {"toolResult": _tool_result(tool_result)}
    if tool_result.meta is not UNSET:
        out["_meta"] = tool_result.meta
    return out


def _tool_result(tool_result: ToolResult) -> Json:
    all_text = all(type(block) is Text for block in tool_result.content)
    if tool_result.is_error:
        return {"error": tool_result.text} | tool_result.data | {"error": tool_result.text}
    if tool_result.structured is not UNSET:
        if type(tool_result.structured) is dict and not all_text:
            return {"structuredContent": tool_result.structured, "content": blocks(tool_result.content, _BLOCKS)}
        return tool_result.structured
    if not tool_result.content:
        return None
    return (
        tool_result.text
        if len(tool_result.content) == 1 and all_text
        else {"content": blocks(tool_result.content, _BLOCKS)}
    )


def explain(refused: Refused) -> tuple[str, Json]:
    return ("Invalid params", {"reason": refused.text}) if refused.kind in _INVALID else base.explain(refused)


REVISION = Revision(
    name="2024-10-07",
    pages=False,
    version_header=False,
    requests={
        "initialize": base.InitializeParams,
        "ping": dict,
        "tools/list": base.ListParams,
        "tools/call": base.CallParams,
        "logging/setLevel": base.LevelParams,
        "resources/list": base.ListParams,
        "resources/templates/list": base.ListParams,
        "resources/read": base.ReadParams,
        "resources/subscribe": base.ReadParams,
        "resources/unsubscribe": base.ReadParams,
        "prompts/list": base.ListParams,
        "prompts/get": base.PromptParams,
        "completion/complete": base.CompleteParams,
    },
    notifications=frozenset({"notifications/initialized"}),
    encoders={
        "initialize": partial(base.initialize_result, with_instructions=False),
        **{method: partial(page, member) for method, member in base.LISTS.items()},
        "tools/call": result,
        "resources/read": partial(read_result, CONTENTS),
        "prompts/get": partial(prompt_result, _MESSAGES),
        "completion/complete": base.completion_result,
    },
    tool=partial(tool, members=("name", "description", "inputSchema")),
    definition=partial(definition, rules=_DEFINITIONS),
    losses=partial(losses, replace(_BLOCKS, annotations=None), "bare", has_flag=False),
    read=read,
    read_block=read_leniently,
    result_problems=result_problems,
    declare=declare,
    error_mappings=base.ERROR_MAPPINGS,
    explain=explain,
    encode_input=encode_input,
    decode_input=decode_input,
)
