"""The audit log of a client's calls, in the form of a server's (P-15, CLI-26).

Nothing is sent before the intent is on the disk, and no result is returned before the outcome is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from secrets import token_hex
from time import perf_counter
from typing import Protocol

from msgspec import UNSET

from handrail.audit.format import TrailError
from handrail.audit.log import Trail, open_trail
from handrail.audit.records import OutgoingCallRecord, measure_arguments
from handrail.client.results import CallResult
from handrail.client.tools import ListedTool
from handrail.errors import HandrailError, Sent, Unrecorded
from handrail.model import Object, Text

log = logging.getLogger("handrail")


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
            self._trail = open_trail(audit) if isinstance(audit, str | Path) else audit
        except (OSError, HandrailError) as problem:
            raise Unrecorded(f"calls cannot be recorded in {audit}: {problem}") from problem
        self._open_calls = 0
        self._is_closed = False

    async def record_call(self, outgoing: RecordedCall, call: Awaitable[CallResult]) -> CallResult:
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

    async def _write_outcome(self, call: RecordedCall, outcome: CallResult | BaseException) -> bool:
        """Return whether the outcome is recorded. If nothing was sent, its record is not waited for."""
        if call.intent_written:
            record = OutgoingCallRecord("outcome", call=call.call_id)
        else:
            record = _new_record(call, "refusal")
        if isinstance(outcome, CallResult):
            record.outcome = "tool_error" if outcome.is_error else "ok"
            record.characters = sum(len(each.text) for each in outcome.content if isinstance(each, Text))
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
