"""The tools of one server: list, check, call, record. Its other requests are sent under the same rules.

The audit log of a client's calls, in the form of a server's (P-15, CLI-26).

Nothing is sent before the intent is on the disk, and no result is returned before the outcome is.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from secrets import token_hex
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import UNSET, Struct

from handrail.audit.format import OutgoingCallRecord, TrailError, measure_arguments
from handrail.client.connection import ClientConnection
from handrail.client.inflight import Clocks, Log, Progress, add_context, deadline_at, keep_sent
from handrail.client.input_handlers import InputHandlers, call_handler
from handrail.client.mcp_config import ServerTarget
from handrail.client.pins import LockedPins, ToolPins
from handrail.client.results import CallResult
from handrail.client.server_list import ServerList
from handrail.client.state_dir import LOCAL_PRINCIPAL, Confirm, Confirmation, StateDirectory, allow, needs_confirmation
from handrail.client.tools import READS, E, ListedEntries, ListedTool, Tools, has_invisible_names
from handrail.errors import (
    CallFailed,
    ConfirmationRequired,
    Denied,
    HandrailError,
    InvalidResult,
    LocalProtocolError,
    PeerError,
    RemoteProtocolError,
    SchemaError,
    Sent,
    TransportError,
    Unrecorded,
)
from handrail.guards.tool_definitions import LockedServer
from handrail.model import Json, Object, Text
from handrail.revisions import Revision
from handrail.schema.jsonable import NotJson, to_jsonable

if TYPE_CHECKING:
    from handrail.audit.log import Trail
    from handrail.guards.policy import Policy, SubjectKind

log = logging.getLogger("handrail")

R = TypeVar("R")


class RecordedCall(Protocol):
    """A call as it is recorded. The recorder sets the last three members."""

    server: str
    name: str
    revision: str
    tool: ListedTool
    rule: str  # that decided, if there are rules
    confirmed_by: str
    call_id: str
    started_at: float
    intent_written: bool

    @property
    def arguments(self) -> Object: ...


class Recorder:
    """Records the calls of one client. The trail closes with the client, or with a call that ends later."""

    def __init__(self, audit: str | Path | Trail) -> None:
        self._owns_trail = isinstance(audit, str | Path)
        try:
            from handrail.audit.log import open_trail  # deferred: most clients have no audit log

            self._trail = open_trail(audit) if isinstance(audit, str | Path) else audit
        except (OSError, HandrailError) as problem:
            raise Unrecorded(f"calls cannot be recorded in {audit}: {problem}") from problem
        self._open_calls = 0
        self._is_closed = False

    async def record_call(self, outgoing: RecordedCall, call: Awaitable[R]) -> R:
        outgoing.call_id, outgoing.started_at = token_hex(8), perf_counter()
        self._open_calls += 1
        try:
            try:
                result = await call
            except (Exception, asyncio.CancelledError) as problem:
                if await self._write_outcome(outgoing, problem) or isinstance(problem, asyncio.CancelledError):
                    raise
                raise _unrecorded_error() from problem
            if not await self._write_outcome(outgoing, result):
                raise _unrecorded_error()
            return result
        finally:
            self._open_calls -= 1
            if self._is_closed:
                await self.close()

    async def write_intent(self, call: RecordedCall) -> None:
        call.intent_written = True  # if the call is cancelled meanwhile, the record may be on the disk
        try:
            await self._trail.write(_new_record(call, "intent"))
        except TrailError as problem:
            call.intent_written = False
            raise Unrecorded(str(problem)) from problem

    async def close(self) -> None:
        self._is_closed = True
        if self._owns_trail and not self._open_calls:
            await self._trail.close()

    async def _write_outcome(self, call: RecordedCall, outcome: object) -> bool:
        """Return whether the outcome is recorded. If nothing was sent, its record is not waited for."""
        if call.intent_written:
            record = OutgoingCallRecord("outcome", call=call.call_id)
        else:
            record = _new_record(call, "refusal")
        if not isinstance(outcome, BaseException):
            record.outcome = "tool_error" if isinstance(outcome, CallResult) and outcome.is_error else "ok"
            blocks = outcome.content if isinstance(outcome, CallResult) else [Text(getattr(outcome, "text", ""))]
            record.characters = sum(len(each.text) for each in blocks if isinstance(each, Text))
        else:
            is_cancelled = isinstance(outcome, asyncio.CancelledError)
            record.outcome = "cancelled" if is_cancelled else getattr(outcome, "kind", "internal")
            record.sent = getattr(outcome, "sent", Sent.UNKNOWN if call.intent_written else Sent.NO)
        record.seconds = round(perf_counter() - call.started_at, 6)
        if not call.intent_written:
            self._trail.submit(record)
            return True
        try:
            return await self._trail.write(record)
        except TrailError as problem:
            log.error("audit: outcome of %s (%s) not written: %s", call.name, call.call_id, problem)
            return False


def _new_record(call: RecordedCall, event: str) -> OutgoingCallRecord:
    digest, size = measure_arguments(call.arguments)
    return OutgoingCallRecord(
        event,
        side="client",
        call=call.call_id,
        server=call.server,
        revision=call.revision,
        tool=call.name,
        fingerprint=call.tool.fingerprint if call.tool.listed else UNSET,
        arguments_digest=digest,
        arguments_bytes=size,
        rule=call.rule or UNSET,
        agreed=call.confirmed_by or UNSET,
    )


def _unrecorded_error() -> Unrecorded:
    text = "what came of it could not be recorded and is withheld"
    return Unrecorded(text, sent=Sent.UNKNOWN, hint="Do not simply repeat it")


TOOLS_CALL = "tools/call"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "notice": logging.INFO, "warning": logging.WARNING}
MAX_ROUNDS = 10  # of input requests in one call
MAX_INPUT_REQUESTS = 32  # in one round
MAX_FLAWS = 10  # of a result, listed in one error
MAX_WAITS = 100  # retries of a call that the server asks to repeat later
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.25, 5.0
_DOT_SEGMENT = re.compile(r"(?:[/\\]|%2F|%5C)\.{1,2}(?:[/\\?#]|%2F|%5C|$)")
_HEADER_MISMATCH = -32020
_URL_ELICITATION_REQUIRED = -32042

EventCallback = Callable[[Progress | Log], None]


_UNLISTED_TOOL = ListedTool({"name": ""}, "")
_UNLISTED_TOOL.listed = False


class OutgoingCall(Struct):
    """A call, or another request, and its options. `name` is that of the tool or prompt, or the URI."""

    server: str
    name: str
    params: Object
    clocks: Clocks
    deadline: float
    confirm: Confirm | None
    on_event: EventCallback | None
    repeat: bool
    tool: ListedTool = _UNLISTED_TOOL  # as last listed
    method: str = TOOLS_CALL
    revision: str = ""
    rule: str = ""  # the rule that decided, if there are rules
    confirmed_by: str = ""  # "confirmed", "allowed", "trusted" or "unconfirmed", for the audit record
    call_id: str = ""  # in the audit record
    started_at: float = 0.0
    intent_written: bool = False  # in the audit log; the call may have been sent

    @property
    def arguments(self) -> Object:
        arguments: Object = self.params.get("arguments", {})
        return arguments


class ClientSettings(Struct, frozen=True, kw_only=True):
    """The options of a client that hold for all its servers."""

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
    state: StateDirectory | None  # for pins
    lock: dict[str, LockedServer] | None  # by server
    on_tools_changed: Callable[[str], None] | None
    ask_on_change: bool  # confirm a tool that differs from the lock, instead of refusing it
    strict: bool  # a malformed result is an error


class ServerTools:
    """The tools of one server, listed and called. To its connection, the handler."""

    def __init__(
        self, target: ServerTarget, prefix: str, settings: ClientSettings, recorder: Recorder | None = None
    ) -> None:
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
        self.prefix = prefix  # of the names of tools and prompts
        self._settings = settings
        self._recorder = recorder
        self._log = settings.log
        self._tools_changed_callback = settings.on_tools_changed
        self._tools: ServerList[ListedTool, Tools] = ServerList(
            self.connection,
            "tools/list",
            lambda raw: ListedTool(raw, self.name, prefix, trusted=settings.trusted),
            self._finish,
            trusted=settings.trusted,
            flaw=self._flaw,
        )
        self._lists: dict[str, ServerList[Any, Any]] = {"tools/list": self._tools}
        self._pins: ToolPins | LockedPins = (
            ToolPins(target.key or target.name, settings.state)
            if settings.lock is None
            else LockedPins(settings.lock, target.name, is_only_server=not prefix, ask_on_change=settings.ask_on_change)
        )
        self._listed: dict[str, ListedTool] = {}  # by their own names, also blocked and hidden tools

    # Handler of the connection

    async def handle_request(self, method: str, params: Object, revision: Revision) -> Json:
        try:
            return to_jsonable(await self._settings.input_handlers.respond(self.name, method, params, revision))
        except NotJson as problem:
            raise SchemaError(f"the answer to {method}: {problem}") from None

    def on_list_changed(self, capability: str = "") -> None:
        had_tools = not self._tools.is_changed
        for each in self._lists.values():
            each.is_changed = each.is_changed or capability in ("", each.capability)
        if had_tools and self._tools.is_changed and self._tools_changed_callback is not None:
            try:
                self._tools_changed_callback(self.name)
            except Exception:
                log.exception("client: %s: on_tools_changed failed and was removed", self.name)
                self._tools_changed_callback = None

    def on_log_message(self, entry: Log) -> None:
        if self._log is None:
            log.log(_LEVELS.get(entry.level, logging.ERROR), "client: %s: server log: %.1000r", self.name, entry.data)
            return
        try:
            self._log(self.name, entry)
        except Exception:
            log.exception("client: %s: log handler failed and was removed", self.name)
            self._log = None

    def on_page_completed(self, identifier: str) -> None:
        """A call that needs the page is repeated by the user, not by this client."""

    # Listing

    async def tools(self, *, fresh: bool = False) -> Tools:
        """Return the tools of all pages; cached until the server announces a change or the list expires."""
        return await self._tools.get(fresh=fresh)

    @property
    def is_stale(self) -> bool:
        """Whether a call needs a new list of the tools."""
        return self._tools.is_stale

    def list_of(self, method: str, entry_type: type[E]) -> ServerList[E, ListedEntries[E]]:
        """Return the list of resources, templates or prompts; rules hide entries of it, notifications make it stale."""
        if method not in self._lists:
            self._lists[method] = ServerList[E, ListedEntries[E]](
                self.connection,
                method,
                lambda raw: entry_type(raw, self.name, self.prefix),
                lambda by_name, refused: ListedEntries(self._visible(by_name.values(), refused), refused),
                member=entry_type.key_member,
                trusted=self._settings.trusted,
            )
        return self._lists[method]

    def _finish(self, tools_by_name: dict[str, ListedTool], refused: dict[str, str]) -> Tools:
        self._pins.check([*tools_by_name.values()], self._revision_name)
        refused |= {tool.name[:200]: tool.change for tool in tools_by_name.values() if tool.is_blocked}
        self._listed = tools_by_name
        return Tools(self._visible([tool for tool in tools_by_name.values() if not tool.is_blocked], refused), refused)

    def _visible(self, entries: Iterable[E], refused: dict[str, str]) -> list[E]:
        """Return the entries that no rule hides; the others are added to what was left out before, which is logged."""
        for name, why in refused.items():
            log.warning("client: %s: %.100r left out: %.300s", self.name, name, why)
        entries, policy = list(entries), self._settings.policy
        if policy is None:
            return entries
        visible = []
        for entry in entries:
            decision = policy.hides(LOCAL_PRINCIPAL, entry.subject, self._revision_name)
            if decision is None:
                visible.append(entry)
            else:
                why = "a rule hides it" if decision.verdict == "hide" else f"no rule allows it: {decision.rule}"
                refused[entry.key[:200]] = why
        return visible

    @property
    def _revision_name(self) -> str:
        return "" if self.connection.revision is None else self.connection.revision.name

    def _flaw(self, tool: ListedTool) -> str:
        if has_invisible_names(tool.input_schema):
            return "names of its arguments hold invisible characters"
        try:
            self._header_map(tool)
        except SchemaError as wrong:
            return str(wrong)
        return ""

    def _header_map(self, tool: ListedTool) -> dict[str, tuple[str, ...]]:
        """Return the arguments to mirror in headers: over HTTP, in revisions that have this."""
        transport, revision = self.connection.transport, self.connection.revision
        mirrors = transport is not None and transport.disconnect_cancels and revision is not None and revision.stateless
        return tool.header_map if mirrors else {}

    # Calling

    async def call(
        self,
        name: str,
        arguments: Object,
        *,
        timeout: float | Clocks | None = None,
        confirm: Confirm | None = None,
        on_event: EventCallback | None = None,
        meta: Object | None = None,
        repeat: bool = False,
    ) -> CallResult:
        settings = self._settings
        clocks = settings.clocks if timeout is None else settings.clocks.within(timeout)
        confirm = confirm or settings.confirm
        if confirm is not None or settings.policy is not None or self._recorder is not None:
            arguments = copy.deepcopy(
                arguments
            )  # the caller cannot change them between confirmation, record and sending
        params: Object = {"name": name, "arguments": arguments}
        if meta:
            params["_meta"] = meta
        try:
            params = to_jsonable(params)  # the encoder would write `null` for NaN and infinity
        except NotJson as problem:
            raise LocalProtocolError(f"{self.name}: tools/call {name}: not sent: {problem}") from None
        if type(params["arguments"]) is not dict:
            raise LocalProtocolError(f"{self.name}: tools/call {name}: not sent: arguments are a dict, by name")
        outgoing = OutgoingCall(
            self.name, name, params, clocks, self.connection.now() + clocks.total, confirm, on_event, repeat
        )
        call = self._call(outgoing)
        try:
            result = await (call if self._recorder is None else self._recorder.record_call(outgoing, call))
            if result.is_error and settings.raise_on_error:
                raise CallFailed(result.text, result=result)
            return result
        except PeerError as problem:
            add_context(problem, self.name, f"tools/call {name}")
            raise

    async def _call(self, call: OutgoingCall) -> CallResult:
        if self._tools.is_stale:
            await self._refresh(call)
        call.tool, revision = self._listed_tool(call.name), self.connection.revision
        call.revision = "" if revision is None else revision.name
        if why := self._confirmation_reason(call):
            asked_at = self.connection.now()
            await self._confirm(call, why)
            call.deadline += self.connection.now() - asked_at  # the time of the confirmation does not count
            if self._tools.is_changed:  # meanwhile
                await self._refresh(call)
                await self._reconfirm_if_changed(call)
        raw = await self._call_once(call)
        if raw.get("resultType", "complete") != "complete":
            raw = await self._resolve_input_requests(call, raw)
        return self._check_result(raw, call, self.connection.revision or revision)

    async def request(
        self,
        kind: SubjectKind,
        name: str,
        method: str,
        params: Object,
        read: Callable[[Object, Revision], R],
        *,
        clocks: Clocks | None = None,
        deadline: float | None = None,
        confirm: Confirm | None = None,
        progress: Callable[[Progress], None] | None = None,
        send: Callable[[OutgoingCall], Awaitable[Object]] | None = None,
    ) -> R:
        """Send a request that only reads under the rules of a call; rules and records see `name`.

        `send` sends it in another way than as one request.
        """
        clocks = clocks or self._settings.clocks
        deadline, confirm = deadline or self.connection.now() + clocks.total, confirm or self._settings.confirm
        on_event = None if progress is None else lambda event: progress(event) if isinstance(event, Progress) else None
        tool = self._entry_of(kind, name)
        call = OutgoingCall(self.name, tool.name, params, clocks, deadline, confirm, on_event, True, tool, method)
        result = self._request(call, read, send or self._call_once)
        try:
            return await (result if self._recorder is None else self._recorder.record_call(call, result))
        except PeerError as problem:
            add_context(problem, self.name, f"{method} {name}")
            raise

    async def _request(
        self,
        call: OutgoingCall,
        read: Callable[[Object, Revision], R],
        send: Callable[[OutgoingCall], Awaitable[Object]],
    ) -> R:
        async with deadline_at(call.deadline, call.clocks):
            await self.connection.open()
        self.connection.require(f"{call.tool.kind}s")
        call.revision = self._revision_name
        if why := self._confirmation_reason(call):
            asked_at = self.connection.now()
            await self._confirm(call, why)
            call.deadline += self.connection.now() - asked_at
        await self._write_intent(call)
        raw = await send(call)
        if raw.get("resultType", "complete") != "complete":
            raw = await self._resolve_input_requests(call, raw)
        assert self.connection.revision is not None
        result = read(raw, self.connection.revision)
        if self._settings.strict and (flaws := getattr(result, "problems", None)):
            raise InvalidResult(f"the result is malformed: {'; '.join(flaws[:MAX_FLAWS])}", result=result)
        return result

    async def _write_intent(self, call: OutgoingCall) -> None:
        if self._recorder is not None and not call.intent_written:
            await self._recorder.write_intent(call)

    def _entry_of(self, kind: SubjectKind, name: str) -> ListedTool:
        """Return what rules, confirmation and records see of a resource or a prompt, which only read."""
        from handrail.protocol.uri_template import normalize_uri

        name, prefix = (name, "prompt:") if kind == "prompt" else (normalize_uri(name), "")
        tool = ListedTool({"name": name, "annotations": READS}, self.name, prefix, trusted=True)
        tool.kind, tool.listed = kind, False
        return tool

    async def _refresh(self, call: OutgoingCall, *, fresh: bool = False) -> None:
        async with deadline_at(call.deadline, call.clocks):
            await self.tools(fresh=fresh)

    def _listed_tool(self, name: str) -> ListedTool:
        """Return the tool as last listed. An unlisted tool may be called; one that was left out may not."""
        tool = self._listed.get(name)
        if tool is not None:
            return tool
        assert self._tools.cached is not None
        if flaw := self._tools.cached.refused.get((self.prefix + name)[:200]):
            raise InvalidResult(f"the tool was left out: {flaw}", result={}, sent=Sent.NO)
        tool = ListedTool({"name": name}, self.name, self.prefix, trusted=self._settings.trusted)
        tool.listed = False
        self._pins.mark_missing(tool)
        return tool

    def _confirmation_reason(self, call: OutgoingCall) -> str:
        """Return why the call needs confirmation, empty if it does not; Denied if a rule denies it."""
        policy, decision = self._settings.policy, None
        if policy is not None:
            if call.tool.kind == "resource":
                _check_uri(call.tool.own_name)
            decision = policy.decide(LOCAL_PRINCIPAL, call.tool.subject, call.arguments, call.revision)
            call.rule = decision.rule
            if decision.verdict in ("deny", "hide"):
                raise Denied(f"{decision.rule}: {decision.why}")
        why, strict = needs_confirmation(call.tool, decision)
        if strict or (why and call.confirm is not None):
            return why
        call.confirmed_by = "unconfirmed" if why else "" if decision or call.tool.kind != "tool" else "trusted"
        return ""

    async def _confirm(self, call: OutgoingCall, why: str) -> None:
        """Ask for confirmation; Denied without it."""
        if call.tool.is_blocked:
            raise Denied(why, hint="handrail lock --check shows the difference, handrail lock agrees to it")
        if call.confirm is None:
            raise ConfirmationRequired(why, hint="Use Client(confirm=…) with a function that asks, or confirm=allow")
        confirmation = Confirmation(self.name, call.name, call.arguments, call.tool.annotations, why, call.tool)
        if await call_handler(call.confirm, confirmation) is not True:
            raise Denied("the call was not agreed to")
        if call.tool.listed:
            self._pins.accept(call.tool)
        call.confirmed_by = "allowed" if call.confirm is allow else "confirmed"

    async def _reconfirm_if_changed(self, call: OutgoingCall) -> None:
        """Use the tool as listed now; confirm again if it differs in more than its input schema."""
        previous, call.tool = call.tool, self._listed_tool(call.name)
        is_different = call.tool.definition_without_schema != previous.definition_without_schema or (
            call.tool.changed and self._settings.lock is not None
        )
        if is_different and (why := self._confirmation_reason(call)):
            await self._confirm(call, why)

    async def _resolve_input_requests(self, call: OutgoingCall, raw: Object) -> Object:
        """Return the final result of a call, after answering the input requests before it."""
        params, rounds, waits, pause = call.params, 0, 0, FIRST_WAIT_SECONDS
        while True:
            kind = raw.get("resultType", "complete")
            if kind == "complete" or self.connection.revision is None or self.connection.revision.input_mode != "retry":
                return raw
            state: Json = raw.get("requestState")
            input_requests: Json = raw.get("inputRequests")
            if kind != "input_required" or (type(input_requests) is not dict and type(state) is not str):
                raise InvalidResult(f"a result of the unknown type {kind!r:.60}", result=raw)
            more: Object = {"requestState": state} if type(state) is str else {}
            input_requests = input_requests if type(input_requests) is dict else {}
            rounds, waits = (rounds + 1, waits) if input_requests else (rounds, waits + 1)
            if rounds > MAX_ROUNDS or waits > MAX_WAITS:
                raise InvalidResult("the server keeps asking", result=raw)
            if len(input_requests) > MAX_INPUT_REQUESTS:
                raise InvalidResult(f"the server asks {len(input_requests):,} things at once", result=raw)
            # From here on the call was sent, and the tool may have had effects already.
            with keep_sent(Sent.UNKNOWN):
                async with deadline_at(call.deadline, call.clocks, Sent.UNKNOWN):
                    if input_requests:
                        more["inputResponses"] = {
                            key: await self._input_response(input_requests[key], raw) for key in input_requests
                        }
                    else:
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, MAX_WAIT_SECONDS)
                call.params = {**params, **more}
                raw = await self._call_once(call)

    async def _input_response(self, input_request: Json, raw: Object) -> Json:
        revision = self.connection.revision
        if type(input_request) is not dict or type(input_request.get("method")) is not str or revision is None:
            raise InvalidResult("a question that is not one", result=raw)
        params = input_request.get("params")
        try:
            return await self.handle_request(input_request["method"], params if type(params) is dict else {}, revision)
        except (RemoteProtocolError, SchemaError) as refused:
            text = f"the server asks what is not answered here: {refused}"
            raise RemoteProtocolError(text, sent=Sent.UNKNOWN) from refused

    async def _call_once(self, call: OutgoingCall, *, repeats: bool = True) -> Object:
        if not self.connection.is_open:  # the call is not sent yet; an error here is not retried
            async with deadline_at(call.deadline, call.clocks):
                await self.connection.open()
        await self._write_intent(call)
        try:
            return await self.connection.request(
                call.method,
                call.params,
                call.clocks,
                call.deadline,
                header_map=self._header_map(call.tool),
                on_event=call.on_event,
                with_progress=True,
            )
        except PeerError as problem:
            problem.phase = f"{call.method} {call.tool.own_name}"
            tools = self._tools.cached if call.method == TOOLS_CALL else None
            if isinstance(problem, RemoteProtocolError) and not call.tool.listed and tools is not None:
                close = difflib.get_close_matches(call.tool.own_name, [each.own_name for each in tools], 3)
                problem.hint = f"Did you mean {' or '.join(close)}?" if close else ""
            first = await self._sent_if_repeatable(problem, call) if repeats else None
            if first is None:
                raise
        with keep_sent(first):
            return await self._call_once(call, repeats=False)

    async def _sent_if_repeatable(self, problem: PeerError, call: OutgoingCall) -> Sent | None:
        """Return how far a failed call got if it may be repeated; None if it may not."""
        if isinstance(problem, TransportError):
            claims = call.tool.annotations if call.tool.trusted else {}
            harmless = call.repeat or claims.get("idempotentHint") is True or claims.get("readOnlyHint") is True
            return problem.sent if harmless or problem.sent is Sent.NO else None
        if not isinstance(problem, RemoteProtocolError):
            return None
        # Refused for its mirrored headers, or because pages have to be visited first.
        if problem.code == _HEADER_MISMATCH and call.method == TOOLS_CALL:
            await self._refresh(call, fresh=True)
            await self._reconfirm_if_changed(call)
            return Sent.NO
        return (
            Sent.NO
            if problem.code == _URL_ELICITATION_REQUIRED and await self._visit_pages(problem.data, call)
            else None
        )

    async def _visit_pages(self, data: Json, call: OutgoingCall) -> bool:
        """Have the user visit the pages that a call requires; return whether all were."""
        pages = data.get("elicitations") if type(data) is dict else None
        if type(pages) is not list or not pages or "url" not in self.capabilities.get("elicitation", {}):
            return False
        for page in pages[:MAX_ROUNDS]:
            params = {**page, "mode": "url"} if type(page) is dict else {}
            async with deadline_at(call.deadline, call.clocks):
                response = await self._input_response({"method": "elicitation/create", "params": params}, {})
            if response["action"] != "accept":
                return False
        return True

    def _check_result(self, raw: Object, call: OutgoingCall, revision: Revision | None) -> CallResult:
        """Return the result, if it fits the output schema of the tool."""
        assert revision is not None
        tool, problems = call.tool, list[str]()
        result = CallResult(raw, tool, revision, problems)
        if self._settings.strict and (flaws := result.problems):
            raise InvalidResult(f"the result is malformed: {'; '.join(flaws[:MAX_FLAWS])}", result=result)
        if tool.output_schema is None or result.is_error:
            return result
        if tool.unchecked:
            problems.append(tool.unchecked)
            return result
        if "structuredContent" in raw:
            schema_problems = tool.problems(raw["structuredContent"])
            wrong = "; ".join([each.text for each in schema_problems]) if schema_problems else ""
        else:
            wrong = "" if "toolResult" in raw else "there is no structured content"
        if wrong:
            raise InvalidResult(f"the result does not fit the tool's own schema: {wrong}", result=result)
        return result


def _check_uri(uri: str) -> None:
    """Refuse a URI that a server may take for one that the rules were not asked about."""
    if _DOT_SEGMENT.search(uri):
        raise Denied(f"rules cannot judge a URI with '..' or '.' in its path: {uri[:200]}")
