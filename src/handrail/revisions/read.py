"""Reading what servers answer, tolerantly: results into the model."""

from __future__ import annotations

from typing import cast

from msgspec import UNSET

from handrail.errors import RemoteProtocolError
from handrail.jsonrpc import encode
from handrail.model import Audio, Block, EmbeddedResource, Image, Json, Object, ResourceLink, Text, ToolResult

_KNOWN = {kind.__struct_config__.tag: kind for kind in (Text, Image, Audio, ResourceLink, EmbeddedResource)}


def read_result(result: Object, has_schema: bool) -> ToolResult:
    """A result with content blocks, or the bare `toolResult` of 2024-10-07."""
    meta = result.get("_meta", UNSET)
    if "toolResult" in result and "content" not in result:
        return _tool_result(result["toolResult"], meta)
    content = result.get("content", [])
    if type(content) is not list or not all(type(block) is dict for block in content):
        raise RemoteProtocolError("tools/call: content is not a list of blocks")
    structured = result.get("structuredContent", UNSET)
    return ToolResult([_block(block) for block in content], structured, result.get("isError") is True, meta)


def _tool_result(value: Json, meta: Json) -> ToolResult:
    """Any JSON value; an `error` text in it marks a failure."""
    if type(value) is str:
        return ToolResult([Text(value)], meta=meta)
    if type(value) is dict and type(value.get("error")) is str and value["error"]:
        data = dict(value)
        return ToolResult([Text(data.pop("error"))], is_error=True, meta=meta, data=data)
    return ToolResult([Text(encode(value).decode())], structured=value, meta=meta)


def _block(block: Object) -> Block:
    """A block of a known type and shape, or the mapping as it came: nothing a server sends is dropped."""
    kind = _KNOWN.get(str(block.get("type")))
    if kind is None:
        return block
    fields = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
    try:
        return cast(Block, kind(**{fields[name]: value for name, value in block.items() if name != "type"}))
    except (KeyError, TypeError, ValueError):
        return block
