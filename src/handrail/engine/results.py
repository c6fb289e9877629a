"""From the value that a tool returned to a result: strict JSON that fits the output schema.

Truncated results: the rest of a result that was too long to send, stored for its caller for a while (P-25).

The rest is in the server's store, for every process that shares the store; without one, in memory. It was sanitized
before it was cut. The tool `read_more` returns it part by part, under one handle.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from msgspec import UNSET, MsgspecError, Struct, msgpack
from msgspec.json import decode as parse
from msgspec.structs import replace

from handrail.engine.call import Call
from handrail.engine.catalog import ToolCatalog, ToolEntry, make_entry
from handrail.errors import SchemaError, ToolError
from handrail.guards.sanitize import Sanitize, ToolSanitize
from handrail.jsonrpc import encode
from handrail.model import (
    RISK,
    Audio,
    Block,
    EmbeddedResource,
    Image,
    Json,
    Object,
    ResourceLink,
    Text,
    Tool,
    ToolResult,
    Violation,
)
from handrail.schema.jsonable import NotJson, to_jsonable
from handrail.stores import Delete, Put, Store, StoreError
from handrail.suggest import collection

log = logging.getLogger("handrail")

_BLOCKS = (Text, Image, Audio, ResourceLink, EmbeddedResource)


def to_result(entry: ToolEntry, value: Any) -> ToolResult:
    """Return the value of a tool as a result; an error result if it is not JSON or does not fit the output schema."""
    schema = entry.output
    if type(value) is str and schema is None and entry.convert is None:
        result = ToolResult([Text(value)])
    else:
        try:
            if entry.convert is not None:
                value = entry.convert(value, entry.tool.name)
            if entry.upstream and isinstance(value, ToolResult):  # it came as JSON
                result = value
            else:
                is_result = isinstance(value, ToolResult)
                result = _normalize_result(value) if is_result else _wrap_value(value, schema is not None)
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
            log.error("%s %r returned what cannot be sent: %s", entry.kind, entry.tool.name, problem)
            return error_result(f"The {entry.kind} {entry.tool.name} returned a value that cannot be sent: {problem}")
        except BaseException:  # raised by the value's own methods; its text is not for the peer
            log.exception("%s %r returned what cannot be sent", entry.kind, entry.tool.name)
            return error_result(f"The {entry.kind} {entry.tool.name} returned a value that cannot be sent.")
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
    return replace(result, content=content, structured=structured, meta=meta, data=data, risk=str(result.risk))


def _has_value(block: Block, value: Json) -> bool:
    try:
        return type(block) is Text and bool(parse(block.text) == value)
    except MsgspecError:
        return False


TOOL_NAME = "read_more"
KEEP_SECONDS = 900.0
MAX_HANDLES, MAX_BYTES = 1_000, 64 * 1024 * 1024  # of one process; the oldest are deleted first
MAX_REST = 8 * 1024 * 1024  # characters
NOTICE_CHARS = 200  # characters reserved for the notice at the cut

_PLACE = {"type": "integer", "minimum": 0, "default": 0, "description": "How many characters of the rest to leave out"}
TOOL = Tool(
    name=TOOL_NAME,
    description="Reads on where the result of a tool was cut. The notice at the cut names the handle, and the offset.",
    input_schema={
        "type": "object",
        "properties": {"handle": {"type": "string"}, "offset": _PLACE},
        "required": ["handle"],
        "additionalProperties": False,
    },
    annotations={"readOnlyHint": True, "idempotentHint": True, "openWorldHint": False},
)


class Remainder(Struct, frozen=True):
    principal: str
    text: bytes
    total: int  # characters of the whole text
    risk: Json  # the risk mark of the result


class TruncatedResults:
    """The remainders of one server's results, while it serves."""

    def __init__(self, server: str, cap: int, store: Store) -> None:
        self._prefix = f"rest:{server}:"
        self._size = cap - NOTICE_CHARS
        self._store = store
        self._handles: deque[tuple[str, int]] = deque()
        self._bytes = 0
        self.unsaved: list[tuple[str, str]] = []  # handles and texts of the result that is being sanitized

    def new_handle(self, rest: str) -> str:
        """Return a handle for a rest; it is valid once `save` is done."""
        self.unsaved.append((token_hex(16), rest))
        return self.unsaved[-1][0]

    def take_unsaved(self) -> list[tuple[str, str]]:
        """Return what was cut off the result that was sanitized just now."""
        unsaved, self.unsaved = self.unsaved, []
        return unsaved

    def offer(self, catalog: ToolCatalog, owner: Any) -> bool:
        """Add the tool `read_more`; False if the author has a tool of that name."""
        rest: Object = {"idle": 60.0, "total": 600.0, "dangerous": UNSET, "tags": frozenset(), "owner": owner}
        try:
            catalog.add(make_entry(TOOL, invoke=self._invoke, mode="async", trusted_output=True, **rest))
        except SchemaError:
            log.warning(
                "there is a tool %r already: results that are too long are cut, and cannot be read on", TOOL_NAME
            )
            return False
        return True

    async def _invoke(self, arguments: Object, call: Call) -> ToolResult:
        return await self.read(call.principal.id, arguments["handle"], int(arguments.get("offset", 0)))

    async def save(self, unsaved: list[tuple[str, str]], principal: str, result: ToolResult) -> None:
        """Store what was cut off this result."""
        risk = None if result.meta is UNSET else result.meta.get(RISK)
        for handle, rest in unsaved:
            text = rest[:MAX_REST].encode("utf-8", "surrogatepass")
            key, value = self._prefix + handle, msgpack.encode(Remainder(principal, text, len(rest), risk))
            self._handles.append((key, len(value)))
            self._bytes += len(value)
            gone: list[Delete] = []
            while len(self._handles) > MAX_HANDLES or self._bytes > MAX_BYTES:
                oldest, size = self._handles.popleft()
                self._bytes -= size
                gone.append(Delete(oldest))
            try:
                await self._store.commit([*gone, Put(key, value, KEEP_SECONDS)])
            except StoreError as problem:
                log.error("read_more: the rest of a result not stored: %s", problem)

    async def read(self, principal: str, handle: str, offset: int) -> ToolResult:
        """Return the part of a rest after `offset` characters, as long as one result may be."""
        value = await self._store.get(self._prefix + handle)
        rest = None if value is None else msgpack.decode(value, type=Remainder)
        if rest is None or rest.principal != principal:
            raise ToolError("Unknown handle, or too old. Call the tool again that the result was of.")
        text = rest.text.decode("utf-8", "surrogatepass")
        if offset >= len(text):
            raise ToolError(f"offset: {offset} is past the end; there are {len(text)} characters")
        end = min(offset + self._size, len(text))
        excerpt = text[offset:end]
        if end < len(text):
            excerpt += f"\n[… {offset:,} to {end:,} of {rest.total:,} characters shown; "
            excerpt += f'call {TOOL_NAME} with handle "{handle}" and offset {end} for the rest]'
        elif end < rest.total:
            excerpt += f"\n[… the last {rest.total - end:,} characters were cut, so ask for less at a time]"
        return ToolResult([Text(excerpt)], meta={RISK: rest.risk} if rest.risk else UNSET)


def smallest_cap(options: Sanitize) -> int:
    """Return the least number of characters that a text or a result is cut at; 0: nothing is cut."""
    policies: list[Sanitize | ToolSanitize] = [options, *options.tools.values()]
    return min((cap for each in policies for cap in (each.max_text, each.max_result) if cap), default=0)
