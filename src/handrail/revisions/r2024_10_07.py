"""2024-10-07: the first draft. A call is answered with `toolResult`, any JSON value; failures are told inside it."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET, UnsetType

from handrail.errors import Kind, Refused
from handrail.model import Json, Object, Text, ToolResult
from handrail.revisions import base
from handrail.revisions.base import Revision
from handrail.revisions.decode import flaws, read
from handrail.revisions.downlevel import BlockRules, ask, blocks, declare, heard, tool

_BLOCKS = BlockRules(annotations=frozenset(), drops=frozenset({"_meta"}), inner=False)
_INVALID = frozenset({Kind.BAD_PARAMS, Kind.UNKNOWN_TOOL, Kind.BAD_ARGUMENTS})


def page(tools: Json, cursor: str | UnsetType, ttl_ms: int, scope: str) -> Object:
    return {"tools": tools} if cursor is UNSET else {"tools": tools, "nextCursor": cursor}


def result(it: ToolResult, wraps: bool) -> Object:
    out: Object = {"toolResult": _tool_result(it)}
    if it.meta is not UNSET:
        out["_meta"] = it.meta
    return out


def _tool_result(it: ToolResult) -> Json:
    all_text = all(type(block) is Text for block in it.content)
    if it.is_error:
        return {"error": it.text} | it.data | {"error": it.text}
    if it.structured is not UNSET:
        if type(it.structured) is dict and not all_text:
            return {"structuredContent": it.structured, "content": blocks(it.content, _BLOCKS)}
        return it.structured
    if not it.content:
        return None
    return it.text if len(it.content) == 1 and all_text else {"content": blocks(it.content, _BLOCKS)}


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
    },
    notifications=frozenset({"notifications/initialized"}),
    welcome=partial(base.welcome, instructed=False),
    tool=partial(tool, members=("name", "description", "inputSchema")),
    page=page,
    result=result,
    read=read,
    flaws=flaws,
    declare=declare,
    faults=base.FAULTS,
    explain=explain,
    ask=ask,
    heard=heard,
)
