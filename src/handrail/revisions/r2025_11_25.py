"""2025-11-25: icons, URL elicitation, richer forms; invalid arguments become results the model can read."""

from __future__ import annotations

from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from handrail.errors import Kind
from handrail.model import Object, Tool, ToolResult
from handrail.revisions import r2024_10_07, r2024_11_05, r2025_06_18
from handrail.revisions.base import Fault, Welcome


def welcome(it: Welcome) -> Object:
    return {**r2024_11_05.welcome(it), "serverInfo": to_builtins(it.identity)}


def tool(it: Tool) -> Object:
    out = r2025_06_18.tool(it)
    if it.icons is not UNSET:
        out["icons"] = it.icons
    return out


def result(it: ToolResult, wraps: bool) -> Object:
    return r2025_06_18.structured_result(it, wraps, it.content)


def ask(method: str, params: Object) -> Object:
    return params


REVISION = replace(
    r2025_06_18.REVISION,
    name="2025-11-25",
    null_id=False,
    welcome=welcome,
    tool=tool,
    result=result,
    faults={**r2025_06_18.REVISION.faults, Kind.BAD_ARGUMENTS: Fault(0)},
    ask=ask,
    heard=r2024_10_07.heard,
)
