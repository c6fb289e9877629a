"""What is known of a server's tools: listed over all pages, kept while fresh, odd ones left out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.json import encode

from handrail.client.connection import Dialog
from handrail.client.consent import LOCAL, Confirm
from handrail.client.inflight import Clocks, Log, after, until
from handrail.client.input_handlers import Answers
from handrail.client.pins import LockedPins, Pins
from handrail.client.state_dir import State
from handrail.client.targets import Target
from handrail.client.tools import MAX_DESCRIPTION, ListedTool, Tools, hides
from handrail.errors import InvalidResult, PeerError, RemoteProtocolError, SchemaError, Sent, TransportError
from handrail.guards.lockfile import Locked
from handrail.model import Json, Object
from handrail.revisions import Revision
from handrail.schema.jsonable import NotJson, plain
from handrail.transports.base import Link

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


class Terms(Struct):
    """What a client was given for all its servers."""

    answers: Answers
    clocks: Clocks
    revision: str
    me: Object
    policy: Policy | None
    trusted: bool
    confirm: Confirm | None
    raise_on_error: bool
    log: Callable[[str, Log], None] | None
    tap: Callable[[str, bytes], None] | None
    state: State | None  # where pins are kept
    lock: dict[str, Locked] | None  # what tools have to be
    asks: bool  # about a tool that is not what the lock says, instead of refusing it
    strict: bool = False  # a malformed result is an error
    recorder: Recorder | None = None  # while the client is open


class Known:
    """A server, and what is known of its tools. To the dialog with it, the host."""

    def __init__(self, target: Target, prefix: str, terms: Terms) -> None:
        self.name = target.name
        self.capabilities = terms.answers.capabilities
        self.dialog = Dialog(target, self, clocks=terms.clocks, revision=terms.revision, me=terms.me, tap=terms.tap)
        self._prefix = prefix
        self._terms = terms
        self._tools: Tools | None = None
        self._fresh_until = 0.0
        self._expires = False  # the server said for how long
        self._stale = False  # by a notice
        self._told_by: tuple[Link, int] | None = None  # where a notice would come from
        self._pins: Pins | LockedPins = (
            Pins(target.key or target.name, terms.state)
            if terms.lock is None
            else LockedPins(terms.lock, target.name, alone=not prefix, asks=terms.asks)
        )
        self._listed: dict[str, ListedTool] = {}  # by their own names, also those that were barred or hidden
        self._listing = asyncio.Lock()

    # As the host of the dialog

    async def answer(self, method: str, params: Object, revision: Revision) -> Json:
        try:
            return plain(await self._terms.answers.answer(self.name, method, params, revision))
        except NotJson as problem:
            raise SchemaError(f"the answer to {method}: {problem}") from None

    def changed(self) -> None:
        self._stale = True

    def logged(self, entry: Log) -> None:
        if self._terms.log is None:
            log.log(_LEVELS.get(entry.level, logging.ERROR), "%s says: %.1000r", self.name, entry.data)
            return
        try:
            self._terms.log(self.name, entry)
        except Exception:
            log.exception("%s: Client(log=…) failed, and is not called again", self.name)
            self._terms.log = None

    # Listing

    async def tools(self, *, fresh: bool = False) -> Tools:
        """All tools, over all pages: from memory while the server says they stay the same."""
        clocks, ends = self.dialog.clocks, self.dialog.now() + self.dialog.clocks.total
        try:
            async with until(ends, clocks):
                await self._listing.acquire()
            try:
                known = self._tools
                told = self._told_by is not None and self._told_by == self._teller
                if known is None or fresh or self._stale or not (told or time.monotonic() < self._fresh_until):
                    known = await self._list(ends)
                return known
            finally:
                self._listing.release()
        except PeerError as problem:
            self.dialog.named(problem, "tools/list")
            raise

    @property
    def is_stale(self) -> bool:
        """Whether a call needs the list anew: there is none, a notice came, or its time has run out."""
        return self._tools is None or self._stale or (self._expires and time.monotonic() >= self._fresh_until)

    async def _list(self, ends: float) -> Tools:
        async with until(ends, self.dialog.clocks):
            await self.dialog.open()
        if "tools" not in self.dialog.welcome.get("capabilities", {}):
            raise RemoteProtocolError("the server says that it has no tools", sent=Sent.NO)
        self.dialog.want_news()
        self._stale = False
        told_by = self._teller
        found: dict[str, ListedTool] = {}
        refused: dict[str, str] = {}
        fresh_until, size = float("inf"), 0
        try:
            async for page in self._pages(ends):
                ttl = page.get("ttlMs", 0)
                seconds = min(ttl, MAX_TTL_MS) / 1000 if type(ttl) in (int, float) and ttl > 0 else 0.0
                fresh_until = min(fresh_until, time.monotonic() + seconds)
                self._expires = seconds > 0
                for raw in page["tools"]:
                    size += self._add(raw, found, refused)
                    if len(found) + len(refused) > MAX_TOOLS or size > MAX_LIST_BYTES:
                        raise InvalidResult(f"over {MAX_TOOLS:,} tools, or {MAX_LIST_BYTES:,} bytes of them", result={})
        except BaseException:
            self._stale = True  # whatever the notice told of is still to be seen
            raise
        revision, policy = self.dialog.revision, self._terms.policy
        spoken = "" if revision is None else revision.name
        self._pins.look([*found.values()], spoken)
        refused |= {tool.name[:200]: tool.change for tool in found.values() if tool.barred}
        for name, why in refused.items():
            log.warning("%s: the tool %.100r is left out: %.300s", self.name, name, why)
        shown = []
        for tool in found.values():
            hiding = None if policy is None or tool.barred else policy.hides(LOCAL, tool.facts, spoken)
            if hiding is not None:
                why = "a rule hides it" if hiding.verdict == "hide" else f"no rule allows it: {hiding.rule}"
                refused[tool.name[:200]] = why
            elif not tool.barred:
                shown.append(tool)
        self._listed, self._fresh_until, self._told_by = found, fresh_until, told_by
        self._tools = Tools(shown, refused)
        return self._tools

    async def _pages(self, ends: float) -> AsyncIterator[Object]:
        params: Object = {}
        cursors: set[str] = set()
        for _ in range(MAX_PAGES):
            page = await self._page(params, ends)
            if type(page.get("tools")) is not list:
                raise InvalidResult("there is no list of tools", result=page)
            yield page
            cursor = page.get("nextCursor")
            revision = self.dialog.revision
            if cursor is None or (cursor == "" and revision is not None and revision.complete):
                return
            if type(cursor) is not str:
                raise InvalidResult(f"the cursor {cursor!r:.100} is not a text", result=page)
            if cursor in cursors:
                raise InvalidResult(f"the cursor {cursor!r:.100} came before", result=page)
            cursors.add(cursor)
            params = {"cursor": cursor}
        raise InvalidResult(f"over {MAX_PAGES} pages", result={})

    async def _page(self, params: Object, ends: float) -> Object:
        """A request that changes nothing, so it may be repeated once when the transport broke."""
        clocks = self.dialog.clocks
        try:
            return await self.dialog.request("tools/list", params, clocks, ends)
        except TransportError as broken:
            log.debug("%s; once more", broken)
            first = broken.sent
        with after(first):
            return await self.dialog.request("tools/list", params, clocks, ends)

    def _add(self, raw: Json, found: dict[str, ListedTool], refused: dict[str, str]) -> int:
        """One entry of a list, unless it is of no use: the others stay usable. Its size."""
        if type(raw) is not dict or type(raw.get("name")) is not str or not raw["name"]:
            refused[f"{str(raw)[:60]} ({len(refused)})"] = "it has no name"
            return 0
        tool = ListedTool(raw, self.name, self._prefix + raw["name"], trusted=self._terms.trusted)
        size = len(encode(raw))
        if flaw := self._flaw(tool, size):
            refused[tool.name[:200]] = flaw
        elif tool.own_name in found:
            refused[f"{tool.name[:200]} ({len(refused)})"] = "another tool of this server has the same name"
        else:
            found[tool.own_name] = tool
            return size
        return 0

    def _flaw(self, tool: ListedTool, size: int) -> str:
        if len(tool.description) > MAX_DESCRIPTION and not tool.trusted:
            return f"its description is longer than {MAX_DESCRIPTION:,} characters"
        if size > MAX_TOOL_BYTES:
            return f"its definition is longer than {MAX_TOOL_BYTES:,} bytes"
        if hides(tool.input_schema):
            return "names of its arguments hold characters that nobody sees"
        try:
            self._mirrored(tool)
        except SchemaError as wrong:
            return str(wrong)
        return ""

    def _mirrored(self, tool: ListedTool) -> dict[str, tuple[str, ...]]:
        """Which arguments go into headers too: over HTTP, in revisions that have them."""
        link, revision = self.dialog.link, self.dialog.revision
        mirrors = link is not None and link.disconnect_cancels and revision is not None and revision.stateless
        return tool.header_map if mirrors else {}

    @property
    def _teller(self) -> tuple[Link, int] | None:
        """Who will say that the tools have changed; None if that has to be asked for, or nobody will."""
        link, revision = self.dialog.link, self.dialog.revision
        if link is None or link.news == 0 or self.dialog.dead is not None or revision is None or revision.stateless:
            return None
        return (link, link.news) if self.dialog.announces else None
