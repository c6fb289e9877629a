"""From the value that a tool returned to a result: strict JSON that fits the output schema."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, MsgspecError
from msgspec.json import decode as parse

from handrail.engine.catalog import ToolEntry
from handrail.errors import ToolError
from handrail.jsonrpc import encode
from handrail.model import RISK, Audio, Block, EmbeddedResource, Image, Json, ResourceLink, Text, ToolResult, Violation
from handrail.schema.jsonable import NotJson, to_jsonable
from handrail.suggest import collection

log = logging.getLogger("handrail")

_BLOCKS = (Text, Image, Audio, ResourceLink, EmbeddedResource)


def to_result(entry: ToolEntry, value: Any) -> ToolResult:
    """Return the value of a tool as a result; an error result if it is not JSON or does not fit the output schema."""
    schema = entry.output
    if type(value) is str and schema is None:
        result = ToolResult([Text(value)])
    else:
        try:
            result = (
                _normalize_result(value) if isinstance(value, ToolResult) else _wrap_value(value, schema is not None)
            )
            if schema is not None and not result.is_error:
                if result.structured is UNSET:
                    raise _OutputMismatch("no structured content")
                if not schema.valid(result.structured):
                    problems = schema.problems(result.structured)
                    raise _OutputMismatch("; ".join(each.text for each in problems), problems)
        except _OutputMismatch as problem:
            log.error("tool %r broke its output schema: %s", entry.tool.name, problem)
            return error_result(
                f"The tool {entry.tool.name} returned output that does not fit its own schema{problem.locations}."
            )
        except NotJson as problem:
            log.error("tool %r returned what cannot be sent: %s", entry.tool.name, problem)
            return error_result(f"The tool {entry.tool.name} returned a value that cannot be sent: {problem}")
        except BaseException:  # raised by the value's own methods; its text is not for the peer
            log.exception("tool %r returned what cannot be sent", entry.tool.name)
            return error_result(f"The tool {entry.tool.name} returned a value that cannot be sent.")
    return result if entry.dangerous is UNSET and not result.risk else mark_dangerous(entry, result)


def failure_result(name: str, failure: ToolError) -> ToolResult:
    """Return a ToolError as a result, in its own words."""
    try:
        return ToolResult([Text(failure.text)], is_error=True, data=to_jsonable(failure.data))
    except BaseException as problem:  # raised by its own methods; some would end the event loop
        log.error("tool %r: the data of a ToolError cannot be sent: %r", name, problem)
        return error_result(failure.text)


def error_result(text: str) -> ToolResult:
    return ToolResult([Text(text)], is_error=True)


def mark_dangerous(entry: ToolEntry, result: ToolResult) -> ToolResult:
    reason = result.risk or entry.dangerous
    if reason is not UNSET:
        meta = {} if result.meta is UNSET else result.meta
        result.meta = {**meta, RISK: {"level": "dangerous", "reason": reason}}
    return result


class _OutputMismatch(Exception):
    """Output that does not fit the tool's schema. `locations` names members and rules, never values."""

    def __init__(self, text: str, problems: Sequence[Violation] = ()) -> None:
        super().__init__(text)
        locations = [f"{each.path or 'the whole'} ({each.keyword})" for each in problems if each.keyword]
        self.locations = f" at {', '.join(dict.fromkeys(locations))}" if locations else ""


def _wrap_value(value: Any, structured: bool) -> ToolResult:
    if not structured:
        if value is None or value == []:
            return ToolResult([])
        if isinstance(value, str):
            return ToolResult([Text(str.__str__(value))])
        if isinstance(value, _BLOCKS):
            return _normalize_result(ToolResult([value]))
        if isinstance(value, list | tuple) and any(isinstance(item, _BLOCKS) for item in value):
            return _normalize_result(ToolResult([Text(item) if isinstance(item, str) else item for item in value]))
    data = to_jsonable(value)
    return ToolResult([Text(encode(data).decode())], data)


def _normalize_result(result: ToolResult) -> ToolResult:
    """Return a copy in strict JSON; structured data is also in a text block, for clients that read only text."""
    try:
        content = collection("ToolResult.content", result.content, "blocks such as Text(…)")
    except TypeError as problem:
        raise NotJson(str(problem)) from None
    for block in content:
        if not isinstance(block, _BLOCKS):
            raise NotJson(f"ToolResult.content: {type(block).__name__} is not a content block")
        for name in ("annotations", "meta", "resource", "icons"):
            part = getattr(block, name, UNSET)
            if part is not UNSET:
                to_jsonable(part)
    structured: Json = UNSET
    if result.structured is not UNSET:
        structured = to_jsonable(result.structured)
        if not any(_has_value(block, structured) for block in content):
            content.append(Text(encode(structured).decode()))
    meta = UNSET if result.meta is UNSET else to_jsonable(result.meta)
    data = to_jsonable(result.data) if result.data else {}
    return ToolResult(content, structured, result.is_error, meta, data, str(result.risk))


def _has_value(block: Block, value: Json) -> bool:
    try:
        return type(block) is Text and bool(parse(block.text) == value)
    except MsgspecError:
        return False
