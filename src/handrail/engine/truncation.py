"""Truncated results: the rest of a result that was too long to send, stored for its caller for a while (P-25).

The rest is in the server's store, for every process that shares the store; without one, in memory. It was sanitized
before it was cut. The tool `read_more` returns it part by part, under one handle.
"""

from __future__ import annotations

import logging
from collections import deque
from secrets import token_hex
from typing import Any

from msgspec import UNSET, Struct
from msgspec.msgpack import decode, encode

from handrail.engine.call import Call
from handrail.engine.catalog import ToolCatalog, make_entry
from handrail.errors import SchemaError, ToolError
from handrail.guards.sanitize import Sanitize, ToolSanitize
from handrail.model import RISK, Json, Object, Text, Tool, ToolResult
from handrail.stores import Delete, Put, Store, StoreError

log = logging.getLogger("handrail")

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
            key, value = self._prefix + handle, encode(Remainder(principal, text, len(rest), risk))
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
        rest = None if value is None else decode(value, type=Remainder)
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
