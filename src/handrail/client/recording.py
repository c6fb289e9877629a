"""The record of a client's calls, in the trail and the form of a server's (P-15, CLI-26).

Nothing is sent before the intent is on the disk, and nobody hears of a result before the outcome is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from secrets import token_hex
from time import perf_counter

from handrail.audit.format import TrailError, weighed
from handrail.audit.log import Trail, open_trail
from handrail.client.results import CallResult
from handrail.client.server_tools import Calling
from handrail.errors import HandrailError, Sent, Unrecorded
from handrail.model import Object, Text

log = logging.getLogger("handrail")


class Recorder:
    """Around the calls of one client. Whoever is last closes the trail: the client, or a call that it left behind."""

    def __init__(self, audit: str | Path | Trail) -> None:
        self._is_ours = isinstance(audit, str | Path)
        try:
            self._trail = open_trail(audit) if isinstance(audit, str | Path) else audit
        except (OSError, HandrailError) as problem:
            raise Unrecorded(f"calls cannot be recorded in {audit}: {problem}") from problem
        self._calls = 0
        self._is_closed = False

    async def around(self, it: Calling, call: Awaitable[CallResult]) -> CallResult:
        it.serial, it.began = token_hex(8), perf_counter()
        self._calls += 1
        try:
            try:
                result = await call
            except (Exception, asyncio.CancelledError) as problem:
                if await self._end(it, problem) or isinstance(problem, asyncio.CancelledError):
                    raise
                raise _withheld() from problem
            if not await self._end(it, result):
                raise _withheld()
            return result
        finally:
            self._calls -= 1
            if self._is_closed:
                await self.close()

    async def intend(self, it: Calling) -> None:
        it.intended = True  # whoever is cancelled while it is written may find it written
        try:
            await self._trail.write(_about(it, "intent"))
        except TrailError as problem:
            it.intended = False
            raise Unrecorded(str(problem)) from problem

    async def close(self) -> None:
        self._is_closed = True
        if self._is_ours and not self._calls:
            await self._trail.close()

    async def _end(self, it: Calling, how: CallResult | BaseException) -> bool:
        """Whether it is on record, or need not be waited for, since nothing was sent."""
        record: Object = {"event": "outcome", "call": it.serial} if it.intended else _about(it, "refusal")
        if isinstance(how, CallResult):
            record["outcome"] = "tool_error" if how.is_error else "ok"
            record["characters"] = sum(len(each.text) for each in how.content if isinstance(each, Text))
        else:
            is_cancelled = isinstance(how, asyncio.CancelledError)
            record["outcome"] = "cancelled" if is_cancelled else getattr(how, "kind", "internal")
            record["sent"] = getattr(how, "sent", Sent.UNKNOWN if it.intended else Sent.NO)
        record["seconds"] = round(perf_counter() - it.began, 6)
        if not it.intended:
            self._trail.hand(record)
            return True
        try:
            return await self._trail.write(record)
        except TrailError as problem:
            log.error("the outcome of %s (%s) could not be recorded: %s", it.name, it.serial, problem)
            return False


def _about(it: Calling, event: str) -> Object:
    record: Object = {
        "event": event,
        "side": "client",
        "call": it.serial,
        "server": it.server,
        "revision": it.revision,
        "tool": it.name,
        **({"fingerprint": it.tool.fingerprint} if it.tool.listed else {}),
        **weighed(it.arguments),
    }
    return record | {name: said for name, said in (("rule", it.rule), ("agreed", it.agreed)) if said}


def _withheld() -> Unrecorded:
    text = "what came of it could not be recorded and is withheld"
    return Unrecorded(text, sent=Sent.UNKNOWN, hint="Do not simply repeat it")
