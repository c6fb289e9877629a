"""One server, as its tools: called, checked, recorded."""

from __future__ import annotations

import asyncio
import copy
import difflib
import logging
from collections.abc import Callable

from msgspec import Struct

from handrail.client.consent import LOCAL, Confirm, Confirmation, allow, rule
from handrail.client.inflight import Clocks, Log, Progress, after, until
from handrail.client.input_handlers import said_by
from handrail.client.known import Known
from handrail.client.results import CallResult
from handrail.client.tools import ListedTool
from handrail.errors import (
    CallFailed,
    ConfirmationRequired,
    Denied,
    InvalidResult,
    LocalProtocolError,
    PeerError,
    RemoteProtocolError,
    SchemaError,
    Sent,
    TransportError,
)
from handrail.model import Json, Object
from handrail.revisions import Revision
from handrail.schema.jsonable import NotJson, plain

log = logging.getLogger("handrail")

MAX_ROUNDS = 10  # of questions in one call
MAX_QUESTIONS = 32  # in one round
MAX_FLAWS = 10  # of a result, in one error
MAX_WAITS = 100  # for a server that says "later"
FIRST_WAIT, LONGEST_WAIT = 0.25, 5.0
_MISMATCH = -32020
_VISIT_FIRST = -32042

Watch = Callable[[Progress | Log], None]


_UNSEEN = ListedTool({"name": ""}, "")
_UNSEEN.listed = False


class Calling(Struct):
    """A call, and how to make it."""

    server: str
    name: str
    params: Object
    clocks: Clocks
    ends: float
    confirm: Confirm | None
    watch: Watch | None
    repeat: bool
    tool: ListedTool = _UNSEEN  # as it was last listed
    revision: str = ""
    rule: str = ""  # that decided, if there are rules
    agreed: str = ""  # by whom; "unconfirmed": by the code that called
    serial: str = ""  # in the record
    began: float = 0.0
    intended: bool = False  # on record, and perhaps sent

    @property
    def arguments(self) -> Object:
        arguments: Object = self.params["arguments"]
        return arguments


class Remote(Known):
    """A server whose tools can be called."""

    async def call(
        self,
        name: str,
        arguments: Object,
        *,
        timeout: float | Clocks | None = None,
        confirm: Confirm | None = None,
        watch: Watch | None = None,
        meta: Object | None = None,
        repeat: bool = False,
    ) -> CallResult:
        terms = self._terms
        clocks = terms.clocks if timeout is None else terms.clocks.within(timeout)
        confirm = confirm or terms.confirm
        if confirm is not None or terms.policy is not None or terms.recorder is not None:
            arguments = copy.deepcopy(arguments)  # what is agreed to, and recorded, is what is sent
        params: Object = {"name": name, "arguments": arguments}
        if meta:
            params["_meta"] = meta
        try:
            params = plain(params)  # an encoder would write `null` for what is not finite
        except NotJson as problem:
            raise LocalProtocolError(f"{self.name}: tools/call {name}: not sent: {problem}") from None
        if type(params["arguments"]) is not dict:
            raise LocalProtocolError(f"{self.name}: tools/call {name}: not sent: arguments are a dict, by name")
        it = Calling(self.name, name, params, clocks, self.dialog.now() + clocks.total, confirm, watch, repeat)
        call = self._call(it)
        try:
            result = await (call if terms.recorder is None else terms.recorder.around(it, call))
            if result.is_error and terms.raise_on_error:
                raise CallFailed(result.text, result=result)
            return result
        except PeerError as problem:
            self.dialog.named(problem, f"tools/call {name}")
            raise

    async def _call(self, it: Calling) -> CallResult:
        if self.is_stale:
            await self._refresh(it)
        it.tool, revision = self._known(it.name), self.dialog.revision
        it.revision = "" if revision is None else revision.name
        if why := self._question(it):
            asked = self.dialog.now()
            await self._agree(it, why)
            it.ends += self.dialog.now() - asked  # people take their time
            if self._stale:  # and meanwhile the tools have changed
                await self._refresh(it)
                await self._as_agreed(it)
        raw = await self._call_once(it)
        if raw.get("resultType", "complete") != "complete":
            raw = await self._completed(it, raw)
        return self._checked(raw, it, self.dialog.revision or revision)

    async def _refresh(self, it: Calling, *, fresh: bool = False) -> None:
        async with until(it.ends, it.clocks):
            await self.tools(fresh=fresh)

    def _known(self, name: str) -> ListedTool:
        """The tool as it was last listed. One that is not listed may be called; one that was left out may not."""
        tool = self._listed.get(name)
        if tool is not None:
            return tool
        assert self._tools is not None
        if flaw := self._tools.refused.get((self._prefix + name)[:200]):
            raise InvalidResult(f"the tool was left out: {flaw}", result={}, sent=Sent.NO)
        tool = ListedTool({"name": name}, self.name, self._prefix + name, trusted=self._terms.trusted)
        tool.listed = False
        self._pins.miss(tool)
        return tool

    def _question(self, it: Calling) -> str:
        """Why somebody has to agree to a call, empty if nobody has to; Denied if a rule says no."""
        policy, decision = self._terms.policy, None
        if policy is not None:
            decision = policy.decide(LOCAL, it.tool.facts, it.arguments, it.revision)
            it.rule = decision.rule
            if decision.verdict in ("deny", "hide"):
                raise Denied(f"{decision.rule}: {decision.why}")
        why, strict = rule(it.tool, decision)
        if strict or (why and it.confirm is not None):
            return why
        it.agreed = "unconfirmed" if why else "" if decision else "trusted"
        return ""

    async def _agree(self, it: Calling, why: str) -> None:
        """Denied if nobody agrees to the call."""
        if it.tool.barred:
            raise Denied(why, hint="handrail lock --check shows the difference, handrail lock agrees to it")
        if it.confirm is None:
            raise ConfirmationRequired(why, hint="Give Client(confirm=…) somebody to ask, or confirm=allow")
        question = Confirmation(self.name, it.name, it.arguments, it.tool.annotations, why, it.tool)
        if await said_by(it.confirm, question) is not True:
            raise Denied("the call was not agreed to")
        if it.tool.listed:
            self._pins.agree(it.tool)
        it.agreed = "allowed" if it.confirm is allow else "confirmed"

    async def _as_agreed(self, it: Calling) -> None:
        """The tool as it is listed now; agreed to anew if it is not the one that was, but for how it is called."""
        was, it.tool = it.tool, self._known(it.name)
        is_other = it.tool.described != was.described or (it.tool.changed and self._terms.lock is not None)
        if is_other and (why := self._question(it)):
            await self._agree(it, why)

    async def _completed(self, it: Calling, raw: Object) -> Object:
        """The last result of a call, with answers to whatever the server asks before that."""
        params, rounds, waits, pause = it.params, 0, 0, FIRST_WAIT
        while True:
            kind = raw.get("resultType", "complete")
            if kind == "complete" or self.dialog.revision is None or self.dialog.revision.asks != "retry":
                return raw
            state: Json = raw.get("requestState")
            asked: Json = raw.get("inputRequests")
            if kind != "input_required" or (type(asked) is not dict and type(state) is not str):
                raise InvalidResult(f"a result of the unknown type {kind!r:.60}", result=raw)
            more: Object = {"requestState": state} if type(state) is str else {}
            asked = asked if type(asked) is dict else {}
            rounds, waits = (rounds + 1, waits) if asked else (rounds, waits + 1)
            if rounds > MAX_ROUNDS or waits > MAX_WAITS:
                raise InvalidResult("the server keeps asking", result=raw)
            if len(asked) > MAX_QUESTIONS:
                raise InvalidResult(f"the server asks {len(asked):,} things at once", result=raw)
            # From here on it has been sent, and the tool may have done something already.
            with after(Sent.UNKNOWN):
                async with until(it.ends, it.clocks, Sent.UNKNOWN):
                    if asked:
                        more["inputResponses"] = {key: await self._answered(asked[key], raw) for key in asked}
                    else:
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, LONGEST_WAIT)
                it.params = {**params, **more}
                raw = await self._call_once(it)

    async def _answered(self, asked: Json, raw: Object) -> Json:
        revision = self.dialog.revision
        if type(asked) is not dict or type(asked.get("method")) is not str or revision is None:
            raise InvalidResult("a question that is not one", result=raw)
        params = asked.get("params")
        try:
            return await self.answer(asked["method"], params if type(params) is dict else {}, revision)
        except (RemoteProtocolError, SchemaError) as refused:
            text = f"the server asks what is not answered here: {refused}"
            raise RemoteProtocolError(text, sent=Sent.UNKNOWN) from refused

    async def _call_once(self, it: Calling, *, repeats: bool = True) -> Object:
        if not self.dialog.is_open:  # nothing of the call has been sent yet; what fails here is not tried again
            async with until(it.ends, it.clocks):
                await self.dialog.open()
        if self._terms.recorder is not None and not it.intended:
            await self._terms.recorder.intend(it)
        try:
            return await self.dialog.request(
                "tools/call",
                it.params,
                it.clocks,
                it.ends,
                header_map=self._mirrored(it.tool),
                watch=it.watch,
                tracked=True,
            )
        except PeerError as problem:
            problem.phase = f"tools/call {it.name}"
            if isinstance(problem, RemoteProtocolError) and not it.tool.listed and self._tools is not None:
                close = difflib.get_close_matches(it.tool.own_name, [each.own_name for each in self._tools], 3)
                problem.hint = f"Did you mean {' or '.join(close)}?" if close else ""
            first = await self._repeatable(problem, it) if repeats else None
            if first is None:
                raise
        with after(first):
            return await self._call_once(it, repeats=False)

    async def _repeatable(self, problem: PeerError, it: Calling) -> Sent | None:
        """How far a call has got that failed and may be made again; None if it may not."""
        if isinstance(problem, TransportError):
            claims = it.tool.annotations if it.tool.trusted else {}
            harmless = it.repeat or claims.get("idempotentHint") is True or claims.get("readOnlyHint") is True
            return problem.sent if harmless or problem.sent is Sent.NO else None
        if not isinstance(problem, RemoteProtocolError):
            return None
        # It may have been refused for what its headers said, or for what was not done before.
        if problem.code == _MISMATCH:
            await self._refresh(it, fresh=True)
            await self._as_agreed(it)
            return Sent.NO
        return Sent.NO if problem.code == _VISIT_FIRST and await self._visited(problem.data, it) else None

    async def _visited(self, data: Json, it: Calling) -> bool:
        """Whether the pages a call needs to have been visited first were."""
        pages = data.get("elicitations") if type(data) is dict else None
        if type(pages) is not list or not pages or "url" not in self.capabilities.get("elicitation", {}):
            return False
        for page in pages[:MAX_ROUNDS]:
            params = {**page, "mode": "url"} if type(page) is dict else {}
            async with until(it.ends, it.clocks):
                said = await self._answered({"method": "elicitation/create", "params": params}, {})
            if said["action"] != "accept":
                return False
        return True

    def _checked(self, raw: Object, it: Calling, revision: Revision | None) -> CallResult:
        """The result, if it is what the tool has promised."""
        assert revision is not None
        tool, problems = it.tool, list[str]()
        result = CallResult(raw, tool, revision, problems)
        if self._terms.strict and (flaws := result.problems):
            raise InvalidResult(f"the result is malformed: {'; '.join(flaws[:MAX_FLAWS])}", result=result)
        if tool.output_schema is None or result.is_error:
            return result
        if tool.unchecked:
            problems.append(tool.unchecked)
            return result
        if "structuredContent" in raw:
            found = tool.problems(raw["structuredContent"])
            wrong = "; ".join([each.text for each in found]) if found else ""
        else:
            wrong = "" if "toolResult" in raw else "there is no structured content"
        if wrong:
            raise InvalidResult(f"the result does not fit the tool's own schema: {wrong}", result=result)
        return result
