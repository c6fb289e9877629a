"""Requests in flight: timeouts, progress, and how a request that fails is reported."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import Context

from msgspec import Struct

from handrail.errors import CallTimeout, PeerError, Sent
from handrail.jsonrpc import Id, Notification
from handrail.model import Json, Object
from handrail.suggest import seconds
from handrail.transports.base import PendingRequest

log = logging.getLogger("handrail")

FOREVER = float("inf")
LISTEN = "subscriptions/listen"


class Clocks(Struct, frozen=True):
    """Timeouts in seconds: to connect, until the first activity, between two activities, and in all."""

    connect: float = 10.0
    first: float = 30.0
    idle: float = 60.0
    total: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            seconds(f"Clocks: {name}", getattr(self, name))

    def within(self, timeout: float | Clocks | None) -> Clocks:
        """Return these clocks, limited to `timeout` seconds in all; a `Clocks` replaces them."""
        if timeout is None or isinstance(timeout, Clocks):
            return timeout or self
        most = seconds("timeout", timeout)
        return Clocks(min(most, self.connect), min(most, self.first), min(most, self.idle), most)


class Progress(Struct, frozen=True):
    """Progress of a call, as the server reports it."""

    done: float
    total: float | None = None
    message: str = ""

    @classmethod
    def read(cls, params: Object) -> Progress | None:
        done: Json = params.get("progress")
        total: Json = params.get("total")
        message: Json = params.get("message")
        if not _is_number(done):
            return None
        return cls(done, total if _is_number(total) else None, message if type(message) is str else "")


class Log(Struct, frozen=True):
    """A log message of a server."""

    level: str
    data: Json
    logger: str = ""


class InFlightRequest(PendingRequest, kw_only=True):
    """A request in flight, with its timeouts. Times are those of the event loop."""

    clocks: Clocks
    last_activity: float
    check_at: float  # when its timeouts are checked next
    total_deadline: float
    has_activity: bool = False
    progress: Progress | None = None
    on_event: Callable[[Progress | Log], None] | None = None
    on_notification: Callable[[Notification], None] | None = None  # of a subscription
    context: Context | None = None  # of the task that sent the request, for input handlers


class PendingRequests:
    """The requests of one connection that wait for a response, and one timer for all their timeouts.

    `is_paused` returns whether the server waits for this client; that time does not count as silence. `on_timeout`
    gets each request that timed out and the reason.
    """

    def __init__(
        self, server: str, is_paused: Callable[[], bool], on_timeout: Callable[[PendingRequest, str], None]
    ) -> None:
        self.by_id: dict[Id, InFlightRequest] = {}
        self.next_check = FOREVER  # when the timer fires
        self._server = server
        self._is_paused = is_paused
        self._on_timeout = on_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def only(self) -> InFlightRequest | None:
        """Return the one request that waits for a response, if there is exactly one; subscriptions do not count."""
        waiting = [each for each in self.by_id.values() if each.method != LISTEN]
        return waiting[0] if len(waiting) == 1 else None

    def fail(self, pending: PendingRequest, problem: PeerError) -> None:
        self.by_id.pop(pending.id, None)
        if not pending.future.done():
            pending.future.set_exception(add_context(problem, self._server, pending.method))
            pending.future.exception()  # marked as retrieved, so that asyncio does not log it if no task waits

    def emit(self, pending: PendingRequest | None, event: Progress | Log) -> None:
        """Call the request's listener, if it has one; a listener that raises is not called again."""
        if not isinstance(pending, InFlightRequest) or pending.on_event is None:
            return
        try:
            pending.on_event(event)
        except Exception:
            log.exception("client: %s: progress listener of %s failed and was removed", self._server, pending.method)
            pending.on_event = None

    # Timeouts

    def mark_active(self, pending: InFlightRequest) -> None:
        """Restart the silence timeout. After the first activity it is `Clocks.idle`, which may be shorter."""
        now = pending.last_activity = self._loop.time()
        if not pending.has_activity and not pending.future.done():
            pending.has_activity = True
            pending.check_at = min(pending.check_at, now + pending.clocks.idle)
            if pending.check_at < self.next_check:
                self.schedule(pending.check_at)

    def schedule(self, when: float) -> None:
        """Set the timer to `when`; FOREVER stops it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._on_timer) if when < FOREVER else None
        self.next_check = when

    def _on_timer(self) -> None:
        """Fail the requests that have timed out; set the timer for the next one that can."""
        self._timer, self.next_check = None, FOREVER
        now, soonest = self._loop.time(), FOREVER
        for pending in list(self.by_id.values()):
            if pending.check_at <= now:
                self._check_timeouts(pending, now)
            if not pending.future.done():
                soonest = min(soonest, pending.check_at)
        self.schedule(soonest)

    def _check_timeouts(self, pending: InFlightRequest, now: float) -> None:
        clock = "idle" if pending.has_activity else "first"
        if self._is_paused():
            pending.last_activity = now
        seconds = getattr(pending.clocks, clock)
        if now >= pending.total_deadline:
            clock, text = "total", f"not done within {pending.clocks.total:g} s"
        elif now >= pending.last_activity + seconds:
            text = f"no activity for {seconds:g} s"
        else:
            pending.check_at = min(pending.last_activity + seconds, pending.total_deadline)
            return
        progress = pending.progress
        progress_text = "" if progress is None else f"; progress had reached {format_progress(progress)}"
        hint = f"The clock is Clocks({clock}=…)"
        problem = CallTimeout(text + progress_text, clock=clock, progress=progress, sent=pending.sent, hint=hint)
        self.fail(pending, problem)
        self._on_timeout(pending, f"time-out: {text}")


def add_context(problem: PeerError, server: str, phase: str) -> PeerError:
    """Return the problem with its server and phase filled in where they are missing."""
    problem.server, problem.phase = problem.server or server, problem.phase or phase
    return problem


@contextlib.asynccontextmanager
async def deadline_at(deadline: float, clocks: Clocks, sent: Sent = Sent.NO) -> AsyncIterator[None]:
    """Limit the steps of a request beside its own response; `sent` is how far the request had got before."""
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise CallTimeout(f"not done within {clocks.total:g} s", clock="total", sent=sent) from None
    except PeerError as problem:
        problem.sent = Sent.NO if sent is Sent.NO else problem.sent
        raise


@contextlib.contextmanager
def keep_sent(first: Sent) -> Iterator[None]:
    """Give an error that says "not sent" the state of an earlier attempt, which it does not undo."""
    try:
        yield
    except PeerError as problem:
        problem.sent = first if problem.sent is Sent.NO else problem.sent
        raise


def _is_number(value: Json) -> bool:
    """Return whether the value is a number that fits a float; larger integers cannot be formatted."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def format_progress(progress: Progress) -> str:
    done = f"{progress.done:g}" if progress.total is None else f"{progress.done:g} of {progress.total:g}"
    return f"{done} ({progress.message[:100]})" if progress.message else done
