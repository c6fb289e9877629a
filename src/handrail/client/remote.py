"""One server, as its tools: listed, kept while fresh, called, checked, recorded."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable

from msgspec import Struct

from handrail.client.answers import Answers
from handrail.client.consent import Confirm, Confirmation, allow, rule
from handrail.client.dialog import Dialog
from handrail.client.flight import Clocks, Log, Progress
from handrail.client.listing import MAX_DESCRIPTION, ListedTool, Tools
from handrail.client.pins import Pins
from handrail.client.results import CallResult
from handrail.client.state import State
from handrail.client.targets import Target
from handrail.errors import (
    CallFailed,
    CallTimeout,
    ConfirmationRequired,
    Denied,
    InvalidResult,
    PeerError,
    RemoteProtocolError,
    SchemaError,
    Sent,
    TransportError,
)
from handrail.guards.audit import CallRecord, Recorder
from handrail.model import Json, Object
from handrail.revisions import Revision
from handrail.transports.link import Link

log = logging.getLogger("handrail")

MAX_PAGES = 100
MAX_TOOLS = 1_000
MAX_ROUNDS = 10  # of questions in one call
MAX_WAITS = 100  # for a server that says "later"
FIRST_WAIT, LONGEST_WAIT = 0.25, 5.0
_MISMATCH = -32020
_VISIT_FIRST = -32042
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "notice": logging.INFO, "warning": logging.WARNING}

Watch = Callable[[Progress | Log], None]


class Policy(Struct):
    """What a client does around every call."""

    record: Recorder
    trusted: bool = False
    confirm: Confirm | None = None
    raise_on_error: bool = False
    log: Callable[[str, Log], None] | None = None
    state: State | None = None  # where pins are kept


class Remote:
    """A server, and what is known of its tools."""

    def __init__(
        self,
        target: Target,
        prefix: str,
        *,
        answers: Answers,
        policy: Policy,
        revision: str,
        clocks: Clocks,
        me: Object,
    ) -> None:
        self.name = target.name
        self.capabilities = answers.capabilities
        self.dialog = Dialog(target.name, target.make, self, revision=revision, clocks=clocks, me=me, key=target.key)
        self._prefix = prefix
        self._answers = answers
        self._policy = policy
        self._tools: Tools | None = None
        self._fresh_until = 0.0
        self._stale = False  # by a notice
        self._told_by: tuple[Link, int] | None = None  # where a notice would come from
        self._pins = Pins(target.key or target.name, policy.state)
        self._listing = asyncio.Lock()

    # As the host of the dialog

    async def answer(self, method: str, params: Object, revision: Revision) -> Json:
        return await self._answers.answer(self.name, method, params, revision)

    def changed(self) -> None:
        self._stale = True

    def logged(self, entry: Log) -> None:
        if self._policy.log is not None:
            self._policy.log(self.name, entry)
        else:
            log.log(_LEVELS.get(entry.level, logging.ERROR), "%s says: %.1000r", self.name, entry.data)

    # Listing

    async def tools(self, *, fresh: bool = False) -> Tools:
        """All tools, over all pages: from memory while the server says they stay the same."""
        async with self._listing:
            known = self._tools
            told = self._told_by is not None and self._told_by == self._teller
            if known is None or fresh or self._stale or not (told or time.monotonic() < self._fresh_until):
                known = await self._list()
            return known

    async def _list(self) -> Tools:
        await self._ready()
        self.dialog.want_news()
        self._stale = False
        told_by = self._teller
        found: list[ListedTool] = []
        names: set[str] = set()
        refused: dict[str, str] = {}
        fresh_until = float("inf")
        async for page in self._pages():
            ttl = page.get("ttlMs", 0)
            seconds = ttl / 1000 if type(ttl) in (int, float) and ttl > 0 else 0.0
            fresh_until = min(fresh_until, time.monotonic() + seconds)
            for raw in page["tools"]:
                self._add(raw, found, names, refused)
        self._pins.look(found)
        for name, why in refused.items():
            log.warning("%s: the tool %.100r is left out: %.300s", self.name, name, why)
        self._tools, self._fresh_until, self._told_by = Tools(found, refused), fresh_until, told_by
        return self._tools

    async def _pages(self) -> AsyncIterator[Object]:
        params: Object = {}
        seen: set[str] = set()
        for _ in range(MAX_PAGES):
            page = await self._request_safely("tools/list", params)
            if type(page.get("tools")) is not list:
                raise InvalidResult("tools/list: there is no list of tools", result=page, server=self.name)
            yield page
            cursor = page.get("nextCursor")
            revision = self.dialog.revision
            if cursor is None or (cursor == "" and revision is not None and revision.complete):
                return
            if type(cursor) is not str or cursor in seen:
                raise InvalidResult(
                    f"tools/list: the cursor {cursor!r:.100} came before", result=page, server=self.name
                )
            seen.add(cursor)
            params = {"cursor": cursor}
        raise InvalidResult(f"tools/list: over {MAX_PAGES} pages", result={}, server=self.name)

    def _add(self, raw: Json, found: list[ListedTool], names: set[str], refused: dict[str, str]) -> None:
        """One entry of a list, unless it is of no use: the others stay usable."""
        if type(raw) is not dict or type(raw.get("name")) is not str or not raw["name"]:
            refused[str(raw)[:60]] = "it has no name"
            return
        if len(found) >= MAX_TOOLS:
            raise InvalidResult(f"tools/list: over {MAX_TOOLS} tools", result=raw, server=self.name)
        tool = ListedTool(raw, self.name, self._prefix + raw["name"])
        flaw = self._flaw(tool)
        if tool.name in names:
            flaw = "another tool of this server has the same name"
        names.add(tool.name)
        if flaw:
            refused[tool.name] = flaw
            return
        found.append(tool)

    def _flaw(self, tool: ListedTool) -> str:
        if len(tool.description) > MAX_DESCRIPTION:
            return f"its description is longer than {MAX_DESCRIPTION:,} characters"
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
        tools = self.dialog.welcome.get("capabilities", {}).get("tools")
        return (link, link.news) if type(tools) is dict and tools.get("listChanged") is True else None

    async def _ready(self) -> None:
        """Connected to a server that says it has tools."""
        await self.dialog.open()
        if "tools" not in self.dialog.welcome.get("capabilities", {}):
            raise RemoteProtocolError("the server says that it has no tools", sent=Sent.NO, server=self.name)

    async def _request_safely(self, method: str, params: Object) -> Object:
        """A request that changes nothing, so it may be repeated once when the transport broke."""
        try:
            return await self.dialog.request(method, params)
        except TransportError as broken:
            log.debug("%s; once more", broken)
            return await self.dialog.request(method, params)

    # Calling

    async def call(
        self,
        name: str,
        arguments: Object,
        *,
        clocks: Clocks,
        confirm: Confirm | None = None,
        watch: Watch | None = None,
        meta: Object | None = None,
        repeat: bool = False,
    ) -> CallResult:
        if self._tools is None or self._stale:
            clocks = await self._list_before(clocks)
        tool = self._known(name)
        record = CallRecord(self.name, tool.own_name, arguments)
        try:
            record.confirmed = await self._agreed(tool, arguments, confirm or self._policy.confirm)
            raw = await self._exchange(tool, arguments, clocks, watch, meta, repeat)
            result = self._checked(raw, tool)
            record.outcome = "tool_error" if result.is_error else "ok"
        except PeerError as problem:
            record.outcome, record.sent = problem.kind, str(problem.sent)
            raise
        except asyncio.CancelledError:
            record.outcome, record.sent = "cancelled", str(Sent.UNKNOWN)
            raise
        finally:
            record.revision = self.dialog.revision.name if self.dialog.revision is not None else ""
            kept = self._policy.record(record)
            if inspect.isawaitable(kept):
                await kept
        if result.is_error and self._policy.raise_on_error:
            raise CallFailed(result.text, result=result, server=self.name, phase=f"tools/call {tool.own_name}")
        return result

    async def _list_before(self, clocks: Clocks) -> Clocks:
        """List the tools for a call, on the time of that call; what is left of it."""
        ends = time.monotonic() + clocks.total
        try:
            async with asyncio.timeout(clocks.total):
                await self.tools()
        except TimeoutError:
            text = f"the tools were not listed within {clocks.total:g} s"
            raise CallTimeout(text, clock="total", server=self.name, phase="tools/list") from None
        return clocks.within(max(ends - time.monotonic(), 0.001))

    def _known(self, name: str) -> ListedTool:
        assert self._tools is not None
        tool = self._tools.get(self._prefix + name)
        if tool is None:
            tool = ListedTool({"name": name}, self.name, self._prefix + name)
            tool.listed = False
        return tool

    async def _agreed(self, tool: ListedTool, arguments: Object, confirm: Confirm | None) -> str:
        """By whom the call was agreed to: `handler`, or `code` that made it. Denied if not."""
        why, strict = rule(tool, trusted=self._policy.trusted)
        if not why:
            return "rule"
        phase = f"tools/call {tool.own_name}"
        if confirm is None:
            if strict:
                hint = "Give Client(confirm=…) somebody to ask, or confirm=allow"
                raise ConfirmationRequired(why, server=self.name, phase=phase, hint=hint)
            return "unconfirmed"
        asked = confirm(Confirmation(self.name, tool.own_name, arguments, tool.annotations, why, tool))
        if not (await asked if inspect.isawaitable(asked) else asked):
            raise Denied("the call was not agreed to", server=self.name, phase=phase)
        self._pins.agree(tool)
        return "allowed" if confirm is allow else "confirmed"

    async def _exchange(
        self,
        tool: ListedTool,
        arguments: Object,
        clocks: Clocks,
        watch: Watch | None,
        meta: Object | None,
        repeat: bool,
    ) -> Object:
        """The call, with answers to whatever the server asks on the way; its last result."""
        ends = time.monotonic() + clocks.total
        params: Object = {"name": tool.own_name, "arguments": arguments}
        if meta:
            params["_meta"] = meta
        more: Object = {}
        rounds, waits, pause = 0, 0, FIRST_WAIT
        while True:
            left = clocks.within(max(ends - time.monotonic(), 0.001)) if rounds or waits else clocks
            raw = await self._call_once(tool, {**params, **more}, left, watch, repeat)
            kind = raw.get("resultType", "complete")
            if kind == "complete" or self.dialog.revision is None or self.dialog.revision.asks != "retry":
                return raw
            asked, state = raw.get("inputRequests"), raw.get("requestState")
            if kind != "input_required" or (type(asked) is not dict and type(state) is not str):
                raise InvalidResult(f"a result of the unknown type {kind!r:.60}", result=raw, server=self.name)
            more = {"requestState": state} if type(state) is str else {}
            if type(asked) is dict and asked:
                rounds += 1
                more["inputResponses"] = {key: await self._answered(each, raw) for key, each in asked.items()}
            else:
                waits += 1
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_WAIT)
            if rounds > MAX_ROUNDS or waits > MAX_WAITS:
                raise InvalidResult("the server keeps asking", result=raw, server=self.name)

    async def _answered(self, asked: Json, raw: Object) -> Json:
        revision = self.dialog.revision
        if type(asked) is not dict or type(asked.get("method")) is not str or revision is None:
            raise InvalidResult("a question that is not one", result=raw, server=self.name)
        params = asked.get("params")
        try:
            return await self.answer(asked["method"], params if type(params) is dict else {}, revision)
        except RemoteProtocolError as refused:
            raise Denied(refused.text, sent=Sent.FAILED, server=self.name, phase=asked["method"]) from refused

    async def _call_once(
        self, tool: ListedTool, params: Object, clocks: Clocks, watch: Watch | None, repeat: bool
    ) -> Object:
        claims = tool.annotations if self._policy.trusted else {}
        harmless = repeat or claims.get("idempotentHint") is True or claims.get("readOnlyHint") is True
        for last in (False, True):
            try:
                return await self.dialog.request(
                    "tools/call", params, clocks=clocks, header_map=self._mirrored(tool), watch=watch, tracked=True
                )
            except RemoteProtocolError as refused:
                if refused.code == _MISMATCH and not last:
                    tool = (await self.tools(fresh=True)).get(tool.name) or tool
                    continue
                if refused.code == _VISIT_FIRST and not last and await self._visited(refused.data):
                    continue
                refused.phase = f"tools/call {tool.own_name}"
                if not tool.listed and self._tools is not None:
                    close = difflib.get_close_matches(tool.own_name, [each.own_name for each in self._tools], 3)
                    refused.hint = f"Did you mean {' or '.join(close)}?" if close else ""
                raise
            except PeerError as broken:
                again = isinstance(broken, TransportError) and (broken.sent is Sent.NO or harmless)
                if last or not again:
                    broken.phase = f"tools/call {tool.own_name}"
                    raise
        raise AssertionError("the second time is the last")

    async def _visited(self, data: Json) -> bool:
        """Whether the pages a call needs to have been visited first were."""
        pages = data.get("elicitations") if type(data) is dict else None
        revision = self.dialog.revision
        if type(pages) is not list or not pages or revision is None or "url" not in self._modes:
            return False
        for page in pages[:MAX_ROUNDS]:
            params = {**page, "mode": "url"} if type(page) is dict else {}
            if (await self._answered({"method": "elicitation/create", "params": params}, {}))["action"] != "accept":
                return False
        return True

    @property
    def _modes(self) -> Object:
        modes: Object = self.capabilities.get("elicitation", {})
        return modes

    def _checked(self, raw: Object, tool: ListedTool) -> CallResult:
        """The result, if it is what the tool has promised."""
        revision = self.dialog.revision
        assert revision is not None
        problems: list[str] = []
        result = CallResult(raw, tool, revision, problems)
        if tool.output_schema is None or result.is_error:
            return result
        if tool.unchecked:
            problems.append(tool.unchecked)
            return result
        if "structuredContent" in raw:
            wrong = "; ".join(each.text for each in tool.problems(raw["structuredContent"]))
        else:
            wrong = "" if "toolResult" in raw else "there is no structured content"
        if wrong:
            text = f"the result does not fit the tool's own schema: {wrong}"
            raise InvalidResult(text, result=result, server=self.name, phase=f"tools/call {tool.own_name}")
        return result
