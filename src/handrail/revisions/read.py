"""Reading what servers answer, tolerantly: pages and results into the model."""

from __future__ import annotations

from typing import cast

from msgspec import UNSET, Struct

from handrail.errors import RemoteProtocolError
from handrail.jsonrpc import encode
from handrail.model import Audio, Block, EmbeddedResource, Image, Json, Object, ResourceLink, Text, ToolResult

_KNOWN: dict[str, type[Struct]] = {
    "text": Text,
    "image": Image,
    "audio": Audio,
    "resource_link": ResourceLink,
    "resource": EmbeddedResource,
}


def read_page(result: Object) -> tuple[list[Object], str | None]:
    """The tools of one page as they came, and the cursor of the next."""
    tools = result.get("tools")
    if type(tools) is not list or not all(type(tool) is dict for tool in tools):
        raise RemoteProtocolError("tools/list: the answer has no list of tools")
    cursor = result.get("nextCursor")
    return tools, cursor if type(cursor) is str else None


def read_content(result: Object, has_schema: bool) -> ToolResult:
    """A result with content blocks, as every revision from 2024-11-05 on writes it."""
    if "toolResult" in result and "content" not in result:
        return read_tool_result(result, has_schema)
    content = result.get("content", [])
    if type(content) is not list or not all(type(block) is dict for block in content):
        raise RemoteProtocolError("tools/call: content is not a list of blocks")
    return ToolResult(
        [read_block(block) for block in content],
        structured=result.get("structuredContent", UNSET),
        is_error=result.get("isError") is True,
        meta=result.get("_meta", UNSET),
    )


def read_tool_result(result: Object, has_schema: bool) -> ToolResult:
    """The bare `toolResult` of 2024-10-07: any JSON value; an `error` text in it marks a failure."""
    if "toolResult" not in result:
        return read_content(result, has_schema)
    value: Json = result["toolResult"]
    meta = result.get("_meta", UNSET)
    if type(value) is str:
        return ToolResult([Text(value)], meta=meta)
    error = value.get("error") if type(value) is dict else None
    if type(error) is str and error:
        return ToolResult(
            [Text(error)], is_error=True, meta=meta, data={k: v for k, v in value.items() if k != "error"}
        )
    return ToolResult([Text(encode(value).decode())], structured=value, meta=meta)


def read_block(block: Object) -> Block:
    """A block of a known type and shape, or the mapping as it came: nothing a server sends is dropped."""
    kind = _KNOWN.get(str(block.get("type")))
    if kind is None:
        return block
    fields = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
    try:
        made = kind(**{fields[name]: value for name, value in block.items() if name != "type"})
    except (KeyError, TypeError, ValueError):
        return block
    return cast(Block, made)
