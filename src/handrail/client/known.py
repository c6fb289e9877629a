"""What is known of a server's tools: listed over all pages, kept while fresh, odd ones left out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.json import encode

from handrail.client.connection import ClientConnection
from handrail.client.consent import LOCAL_PRINCIPAL, Confirm
from handrail.client.inflight import Clocks, Log, deadline_at, keep_sent
from handrail.client.input_handlers import InputHandlers
from handrail.client.pins import LockedPins, ToolPins
from handrail.client.state_dir import StateDirectory
from handrail.client.targets import ServerTarget
from handrail.client.tools import MAX_DESCRIPTION, ListedTool, Tools, has_invisible_names
from handrail.errors import InvalidResult, PeerError, RemoteProtocolError, SchemaError, Sent, TransportError
from handrail.guards.lockfile import LockedServer
from handrail.model import Json, Object
from handrail.revisions import Revision
from handrail.schema.jsonable import NotJson, to_jsonable
from handrail.transports.base import ClientTransport

if TYPE_CHECKING:
    from handrail.client.recording import Recorder
    from handrail.guards.policy import Policy

log = logging.getLogger("handrail")

MAX_PAGES = 100
MAX_TOOLS = 1_000
MAX_TOOL_BYTES = 256 * 1024
MAX_LIST_BYTES = 16 * 1024 * 1024
MAX_TTL_MS = 24 * 3600 * 1000
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "notice": logging.INFO, "warning": logging.WARNING}


class ClientSettings(Struct):
    """What a client was given for all its servers."""

    input_handlers: InputHandlers
    clocks: Clocks
    revision: str
    client_info: Object
    policy: Policy | None
    trusted: bool
    confirm: Confirm | None
    raise_on_error: bool
    log: Callable[[str, Log], None] | None
    tap: Callable[[str, bytes], None] | None
    state: StateDirectory | None  # where pins are kept
    lock: dict[str, LockedServer] | None  # what tools have to be
    ask_on_change: bool  # about a tool that is not what the lock says, instead of refusing it
    strict: bool = False  # a malformed result is an error
    recorder: Recorder | None = None  # while the client is open


class ServerToolList:
    """A server, and what is known of its tools. To the dialog with it, the host."""

    def __init__(self, target: ServerTarget, prefix: str, settings: ClientSettings) -> None:
        self.name = target.name
        self.capabilities = settings.input_handlers.capabilities
        self.connection = ClientConnection(
            target,
            self,
            clocks=settings.clocks,
            revision=settings.revision,
            client_info=settings.client_info,
            tap=settings.tap,
        )
        self._prefix = prefix
        self._settings = settings
        self._tools: Tools | None = None
        self._fresh_until = 0.0
        self._has_ttl = False  # the server said for how long
        self._stale = False  # by a notice
        self._watched_stream: tuple[ClientTransport, int] | None = None  # where a notice would come from
        self._pins: ToolPins | LockedPins = (
            ToolPins(target.key or target.name, settings.state)
            if settings.lock is None
            else LockedPins(settings.lock, target.name, is_only_server=not prefix, ask_on_change=settings.ask_on_change)
        )
        self._listed: dict[str, ListedTool] = {}  # by their own names, also those that were barred or hidden
        self._list_lock = asyncio.Lock()

    # As the host of the dialog

    async def handle_request(self, method: str, params: Object, revision: Revision) -> Json:
        try:
            return to_jsonable(await self._settings.input_handlers.respond(self.name, method, params, revision))
        except NotJson as problem:
            raise SchemaError(f"the answer to {method}: {problem}") from None

    def on_tools_changed(self) -> None:
        self._stale = True

    def on_log_message(self, entry: Log) -> None:
        if self._settings.log is None:
            log.log(_LEVELS.get(entry.level, logging.ERROR), "%s says: %.1000r", self.name, entry.data)
            return
        try:
            self._settings.log(self.name, entry)
        except Exception:
            log.exception("%s: Client(log=…) failed, and is not called again", self.name)
            self._settings.log = None

    # Listing

    async def tools(self, *, fresh: bool = False) -> Tools:
        """All tools, over all pages: from memory while the server says they stay the same."""
        clocks, deadline = self.connection.clocks, self.connection.now() + self.connection.clocks.total
        try:
            async with deadline_at(deadline, clocks):
                await self._list_lock.acquire()
            try:
                cached = self._tools
                is_watched = self._watched_stream is not None and self._watched_stream == self._list_changed_stream
                if cached is None or fresh or self._stale or not (is_watched or time.monotonic() < self._fresh_until):
                    cached = await self._list(deadline)
                return cached
            finally:
                self._list_lock.release()
        except PeerError as problem:
            self.connection.add_context(problem, "tools/list")
            raise

    @property
    def is_stale(self) -> bool:
        """Whether a call needs the list anew: there is none, a notice came, or its time has run out."""
        return self._tools is None or self._stale or (self._has_ttl and time.monotonic() >= self._fresh_until)

    async def _list(self, deadline: float) -> Tools:
        async with deadline_at(deadline, self.connection.clocks):
            await self.connection.open()
        if "tools" not in self.connection.handshake_result.get("capabilities", {}):
            raise RemoteProtocolError("the server says that it has no tools", sent=Sent.NO)
        self.connection.subscribe()
        self._stale = False
        stream = self._list_changed_stream
        tools_by_name: dict[str, ListedTool] = {}
        refused: dict[str, str] = {}
        fresh_until, size = float("inf"), 0
        try:
            async for page in self._pages(deadline):
                ttl = page.get("ttlMs", 0)
                seconds = min(ttl, MAX_TTL_MS) / 1000 if type(ttl) in (int, float) and ttl > 0 else 0.0
                fresh_until = min(fresh_until, time.monotonic() + seconds)
                self._has_ttl = seconds > 0
                for raw in page["tools"]:
                    size += self._add(raw, tools_by_name, refused)
                    if len(tools_by_name) + len(refused) > MAX_TOOLS or size > MAX_LIST_BYTES:
                        raise InvalidResult(f"over {MAX_TOOLS:,} tools, or {MAX_LIST_BYTES:,} bytes of them", result={})
        except BaseException:
            self._stale = True  # whatever the notice told of is still to be seen
            raise
        revision, policy = self.connection.revision, self._settings.policy
        revision_name = "" if revision is None else revision.name
        self._pins.check([*tools_by_name.values()], revision_name)
        refused |= {tool.name[:200]: tool.change for tool in tools_by_name.values() if tool.is_blocked}
        for name, why in refused.items():
            log.warning("%s: the tool %.100r is left out: %.300s", self.name, name, why)
        visible = []
        for tool in tools_by_name.values():
            decision = (
                None if policy is None or tool.is_blocked else policy.hides(LOCAL_PRINCIPAL, tool.facts, revision_name)
            )
            if decision is not None:
                why = "a rule hides it" if decision.verdict == "hide" else f"no rule allows it: {decision.rule}"
                refused[tool.name[:200]] = why
            elif not tool.is_blocked:
                visible.append(tool)
        self._listed, self._fresh_until, self._watched_stream = tools_by_name, fresh_until, stream
        self._tools = Tools(visible, refused)
        return self._tools

    async def _pages(self, deadline: float) -> AsyncIterator[Object]:
        params: Object = {}
        cursors: set[str] = set()
        for _ in range(MAX_PAGES):
            page = await self._page(params, deadline)
            if type(page.get("tools")) is not list:
                raise InvalidResult("there is no list of tools", result=page)
            yield page
            cursor = page.get("nextCursor")
            revision = self.connection.revision
            if cursor is None or (cursor == "" and revision is not None and revision.no_optional_members):
                return
            if type(cursor) is not str:
                raise InvalidResult(f"the cursor {cursor!r:.100} is not a text", result=page)
            if cursor in cursors:
                raise InvalidResult(f"the cursor {cursor!r:.100} came before", result=page)
            cursors.add(cursor)
            params = {"cursor": cursor}
        raise InvalidResult(f"over {MAX_PAGES} pages", result={})

    async def _page(self, params: Object, deadline: float) -> Object:
        """A request that changes nothing, so it may be repeated once when the transport broke."""
        clocks = self.connection.clocks
        try:
            return await self.connection.request("tools/list", params, clocks, deadline)
        except TransportError as broken:
            log.debug("%s; once more", broken)
            first = broken.sent
        with keep_sent(first):
            return await self.connection.request("tools/list", params, clocks, deadline)

    def _add(self, raw: Json, tools_by_name: dict[str, ListedTool], refused: dict[str, str]) -> int:
        """One entry of a list, unless it is of no use: the others stay usable. Its size."""
        if type(raw) is not dict or type(raw.get("name")) is not str or not raw["name"]:
            refused[f"{str(raw)[:60]} ({len(refused)})"] = "it has no name"
            return 0
        tool = ListedTool(raw, self.name, self._prefix + raw["name"], trusted=self._settings.trusted)
        size = len(encode(raw))
        if flaw := self._flaw(tool, size):
            refused[tool.name[:200]] = flaw
        elif tool.own_name in tools_by_name:
            refused[f"{tool.name[:200]} ({len(refused)})"] = "another tool of this server has the same name"
        else:
            tools_by_name[tool.own_name] = tool
            return size
        return 0

    def _flaw(self, tool: ListedTool, size: int) -> str:
        if len(tool.description) > MAX_DESCRIPTION and not tool.trusted:
            return f"its description is longer than {MAX_DESCRIPTION:,} characters"
        if size > MAX_TOOL_BYTES:
            return f"its definition is longer than {MAX_TOOL_BYTES:,} bytes"
        if has_invisible_names(tool.input_schema):
            return "names of its arguments hold characters that nobody sees"
        try:
            self._header_map(tool)
        except SchemaError as wrong:
            return str(wrong)
        return ""

    def _header_map(self, tool: ListedTool) -> dict[str, tuple[str, ...]]:
        """Which arguments go into headers too: over HTTP, in revisions that have them."""
        transport, revision = self.connection.transport, self.connection.revision
        mirrors = transport is not None and transport.disconnect_cancels and revision is not None and revision.stateless
        return tool.header_map if mirrors else {}

    @property
    def _list_changed_stream(self) -> tuple[ClientTransport, int] | None:
        """Who will say that the tools have changed; None if that has to be asked for, or nobody will."""
        transport, revision = self.connection.transport, self.connection.revision
        if (
            transport is None
            or transport.notification_stream == 0
            or self.connection.failure is not None
            or revision is None
            or revision.stateless
        ):
            return None
        return (transport, transport.notification_stream) if self.connection.has_list_changed else None
