"""2024-10-07: the first draft. A call is answered with `toolResult`, any JSON value; failures are told inside it."""

from __future__ import annotations

from msgspec import UNSET

from handrail.errors import Kind, Refused
from handrail.model import Json, Object, Tool, ToolResult
from handrail.revisions.base import (
    FAULTS,
    CallParams,
    InitializeParams,
    LevelParams,
    ListParams,
    NoParams,
    Page,
    Revision,
    Welcome,
)
from handrail.revisions.levels import BlockRules, all_text, blocks, dated_sampling, legacy_schema
from handrail.revisions.read import read_page, read_tool_result

_BLOCKS = BlockRules(annotations=frozenset(), meta=False, inner=False)
_INVALID = frozenset({Kind.BAD_PARAMS, Kind.UNKNOWN_TOOL, Kind.BAD_ARGUMENTS})


def welcome(it: Welcome) -> Object:
    return {"capabilities": it.capabilities, "serverInfo": {"name": it.identity.name, "version": it.identity.version}}


def tool(it: Tool) -> Object:
    out: Object = {"name": it.name}
    if it.description is not UNSET:
        out["description"] = it.description
    out["inputSchema"] = legacy_schema(it.input_schema)
    return out


def page(it: Page) -> Object:
    return {"tools": it.tools} if it.cursor is UNSET else {"tools": it.tools, "nextCursor": it.cursor}


def result(it: ToolResult, wraps: bool) -> Object:
    out: Object = {"toolResult": _tool_result(it)}
    if it.meta is not UNSET:
        out["_meta"] = it.meta
    return out


def _tool_result(it: ToolResult) -> Json:
    if it.is_error:
        return {"error": it.text, **it.data}
    if it.structured is not UNSET:
        if type(it.structured) is dict and not all_text(it):
            return {"structuredContent": it.structured, "content": blocks(it.content, _BLOCKS)}
        return it.structured
    if not it.content:
        return None
    if len(it.content) == 1 and all_text(it):
        return it.text
    return {"content": blocks(it.content, _BLOCKS)}


def explain(refused: Refused) -> tuple[str, Json]:
    if refused.kind in _INVALID:
        return "Invalid params", {"reason": refused.text}
    return refused.prefix + refused.text, UNSET if refused.data is None else refused.data


def ask(method: str, params: Object) -> Object:
    return dated_sampling(params) if method == "sampling/createMessage" else params


def heard(params: Object, answer: Object) -> Object:
    return answer


REVISION = Revision(
    name="2024-10-07",
    pages=False,
    requests={
        "initialize": InitializeParams,
        "ping": NoParams,
        "tools/list": ListParams,
        "tools/call": CallParams,
        "logging/setLevel": LevelParams,
    },
    notifications=frozenset({"notifications/initialized"}),
    welcome=welcome,
    tool=tool,
    page=page,
    result=result,
    faults=FAULTS,
    explain=explain,
    ask=ask,
    heard=heard,
    read_page=read_page,
    read_result=read_tool_result,
)
