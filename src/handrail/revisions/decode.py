"""Results as clients read them: tolerant, and nothing a server sends is dropped."""

from __future__ import annotations

from typing import cast, get_args

from msgspec import UNSET
from msgspec.structs import replace

from handrail.jsonrpc import encode
from handrail.model import RISK, Block, Json, Object, Text, ToolResult

_BLOCK_TYPES = [each for each in get_args(Block) if each != Object]
_OPTIONAL_MEMBERS = frozenset({"annotations", "meta", "title", "description", "mime_type", "size", "icons"})
_BLOCKS = {
    each.__struct_config__.tag: (each, dict(zip(each.__struct_encode_fields__, each.__struct_fields__, strict=True)))
    for each in _BLOCK_TYPES
}


def read(result: Object) -> ToolResult:
    """Return a result with content blocks, or the bare `toolResult` of the first draft, in any revision."""
    meta = result.get("_meta", UNSET)
    if "toolResult" in result and "content" not in result:
        return _read_bare(result["toolResult"], meta)
    content = result.get("content")
    blocks = list(map(_block, content)) if type(content) is list else []
    return ToolResult(blocks, result.get("structuredContent", UNSET), _is_failure(result), meta)


def result_problems(result: Object, *, structured: str = "any") -> list[str]:
    """Return what is wrong with the members of a result: where, what came, and what would be right.

    `structured` is what `structuredContent` may be: any value, or an "object".
    """
    problems: list[str] = []
    meta = result.get("_meta", {})
    if type(meta) is not dict:
        problems.append(f"_meta: {_excerpt(meta)} is not an object")
    elif RISK in meta and (type(meta[RISK]) is not dict or type(meta[RISK].get("reason")) is not str):
        problems.append(f"_meta/{RISK}: {_excerpt(meta[RISK])} is not an object with a reason")
    if "toolResult" in result and "content" not in result:
        return problems
    if type(result.get("isError", False)) is not bool:
        problems.append(f"isError: {_excerpt(result['isError'])} is not true or false")
    if structured == "object" and type(result.get("structuredContent", {})) is not dict:
        problems.append(f"structuredContent: {_excerpt(result['structuredContent'])} is not an object")
    content = result.get("content", UNSET)
    if content is UNSET:
        problems.append("content: missing; it is a list of blocks")
    elif type(content) is not list:
        problems.append(f"content: {_excerpt(content)} is not a list of blocks")
    else:
        problems += [
            f"content/{place}: {problem}" for place, block in enumerate(content) if (problem := _block_problem(block))
        ]
    return problems


def _is_failure(result: Object) -> bool:
    """Return whether a result says that the tool failed. A flag that is neither true nor false is no success."""
    flag = result.get("isError")
    return flag is True or (flag is not False and flag is not None)


def _block_problem(block: Json) -> str:
    """Return what is wrong with a content block; empty for a good one, or one of a type that is not known here."""
    kind = block.get("type") if type(block) is dict else None
    if type(kind) is not str:
        return f"{_excerpt(block)} is not a block: an object with a type"
    if kind not in _BLOCKS:
        return ""
    block_type, fields = _BLOCKS[kind]
    unknown = [name for name in block if name not in fields and name != "type"]
    if unknown:
        return f"not a well-formed {kind}: the member {_excerpt(unknown[0])} is not known"
    try:
        block_type(**{fields[name]: value for name, value in block.items() if name != "type"})
    except (TypeError, ValueError) as problem:
        return f"not a well-formed {kind}: {problem}"
    return ""


def _excerpt(value: Json) -> str:
    """Return the JSON of a value that came from outside, cut short."""
    text = encode(value).decode()
    return text if len(text) <= 60 else f"{text[:60]}…"


def read_leniently(block: Json) -> Block | None:
    """Return a block of a known type without the optional members that are not what they should be; None for others."""
    kind = block.get("type") if type(block) is dict else None
    if type(kind) is not str or kind not in _BLOCKS:
        return None
    block_type, fields = _BLOCKS[kind]
    members = {fields[name]: value for name, value in block.items() if name in fields and value is not None}
    if type(resource := members.get("resource")) is dict:
        members["resource"] = {name: value for name, value in resource.items() if value is not None}
    optional = [name for name in members if name in _OPTIONAL_MEMBERS]
    for dropped in ((), *((name,) for name in optional), optional):
        try:
            return cast(Block, block_type(**{name: each for name, each in members.items() if name not in dropped}))
        except (TypeError, ValueError):
            continue
    return None


def read_empty_as_unset(result: Object) -> ToolResult:
    """Where no member is left out, an empty one stands for none."""
    tool_result = read(result)
    content = [] if tool_result.content == [Text("")] else tool_result.content
    return replace(
        tool_result, content=content, structured=UNSET if tool_result.structured == {} else tool_result.structured
    )


def _read_bare(value: Json, meta: Json) -> ToolResult:
    """Any JSON value; an `error` text in it marks a failure."""
    if type(value) is str:
        return ToolResult([Text(value)], meta=meta)
    if type(value) is dict and type(value.get("error")) is str and value["error"]:
        data = dict(value)
        return ToolResult([Text(data.pop("error"))], is_error=True, meta=meta, data=data)
    return ToolResult([Text(encode(value).decode())], structured=value, meta=meta)


def _block(block: Json) -> Block:
    """Return a block, or the value as it came if its type or shape is not of the protocol."""
    try:
        if block["type"] == "text" and len(block) == 2:  # the usual one
            return Text(block["text"])
        kind, fields = _BLOCKS[block["type"]]
        return cast(Block, kind(**{fields[name]: value for name, value in block.items() if name != "type"}))
    except (KeyError, TypeError, ValueError):
        return cast(Block, block)
