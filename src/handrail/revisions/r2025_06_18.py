"""2025-06-18: batches out; structured output, titles, resource links, elicitation and `_meta` in."""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from handrail.model import Json, Object, Tool, ToolResult
from handrail.revisions import r2024_10_07, r2024_11_05, r2025_03_26
from handrail.revisions.base import Welcome
from handrail.revisions.levels import BlockRules, blocks, dated_answer, dated_form, legacy_schema, wrap_schema

_BLOCKS = BlockRules(icons=False)


def welcome(it: Welcome) -> Object:
    out = r2024_11_05.welcome(it)
    if it.identity.title is not UNSET:
        out["serverInfo"]["title"] = it.identity.title
    return out


def tool(it: Tool) -> Object:
    out: Object = {"name": it.name}
    if it.title is not UNSET:
        out["title"] = it.title
    if it.description is not UNSET:
        out["description"] = it.description
    out["inputSchema"] = legacy_schema(it.input_schema)
    if it.output_schema is not UNSET:
        schema = legacy_schema(it.output_schema)
        out["outputSchema"] = schema if schema.get("type") == "object" else wrap_schema(schema)
    if it.annotations is not UNSET:
        out["annotations"] = it.annotations
    if it.meta is not UNSET:
        out["_meta"] = it.meta
    return out


def result(it: ToolResult, wraps: bool) -> Object:
    return structured_result(it, wraps, blocks(it.content, _BLOCKS))


def structured_result(it: ToolResult, wraps: bool, content: list[Json]) -> Object:
    out: Object = {"content": content, "isError": it.is_error}
    if it.meta is not UNSET:
        out["_meta"] = it.meta
    if it.structured is not UNSET:
        whole = type(it.structured) is dict and not wraps
        out["structuredContent"] = it.structured if whole else {"result": it.structured}
    return out


def ask(method: str, params: Object) -> Object:
    return dated_form(params) if method == "elicitation/create" else r2024_10_07.ask(method, params)


def heard(params: Object, answer: Object) -> Object:
    return dated_answer(params, answer) if "requestedSchema" in params else answer


REVISION = replace(
    r2025_03_26.REVISION,
    name="2025-06-18",
    batches=False,
    questions=r2025_03_26.REVISION.questions | {"elicitation/create"},
    welcome=welcome,
    tool=tool,
    result=result,
    ask=ask,
    heard=heard,
)
