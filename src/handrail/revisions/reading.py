"""Results as clients read them: tolerant, and nothing a server sends is dropped."""

from __future__ import annotations

from typing import cast, get_args

from msgspec import UNSET
from msgspec.structs import replace

from handrail.jsonrpc import encode
from handrail.model import Block, Json, Object, Text, ToolResult

_KINDS = [each for each in get_args(Block) if each != Object]
_BLOCKS = {
    each.__struct_config__.tag: (each, dict(zip(each.__struct_encode_fields__, each.__struct_fields__, strict=True)))
    for each in _KINDS
}


def read(result: Object) -> ToolResult:
    """A result with content blocks, or the bare `toolResult` of the first draft, whoever sends it."""
    meta = result.get("_meta", UNSET)
    if "toolResult" in result and "content" not in result:
        return _read_bare(result["toolResult"], meta)
    content = result.get("content")
    blocks = list(map(_block, content)) if type(content) is list else []
    return ToolResult(blocks, result.get("structuredContent", UNSET), result.get("isError") is True, meta)


def read_complete(result: Object) -> ToolResult:
    """Where no member is left out, an empty one stands for none."""
    it = read(result)
    content = [] if it.content == [Text("")] else it.content
    return replace(it, content=content, structured=UNSET if it.structured == {} else it.structured)


def _read_bare(value: Json, meta: Json) -> ToolResult:
    """Any JSON value; an `error` text in it marks a failure."""
    if type(value) is str:
        return ToolResult([Text(value)], meta=meta)
    if type(value) is dict and type(value.get("error")) is str and value["error"]:
        data = dict(value)
        return ToolResult([Text(data.pop("error"))], is_error=True, meta=meta, data=data)
    return ToolResult([Text(encode(value).decode())], structured=value, meta=meta)


def _block(block: Json) -> Block:
    """A block of a known type and shape, or the value as it came."""
    try:
        if block["type"] == "text" and len(block) == 2:  # the usual one
            return Text(block["text"])
        kind, fields = _BLOCKS[block["type"]]
        return cast(Block, kind(**{fields[name]: value for name, value in block.items() if name != "type"}))
    except (KeyError, TypeError, ValueError):
        return cast(Block, block)
