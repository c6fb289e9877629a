"""What arrives from a server, and the clocks of what has not: every request settles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from msgspec import UNSET

from handrail import jsonrpc
from handrail.client.inflight import Flight, Log, Progress, shown
from handrail.errors import CallTimeout, PeerError, RemoteProtocolError, Sent, TransportError
from handrail.jsonrpc import Id, Message, Notification, Refusal, Request, Response, decode_answer, encode, read
from handrail.model import Json, Object
from handrail.protocol.connection import CANCELLED
from handrail.revisions import Revision
from handrail.revisions.base import SUBSCRIPTION
from handrail.text.controls import one_line
from handrail.transports.base import Link, Waiting

log = logging.getLogger("handrail")

FOREVER = float("inf")
MAX_BATCH = 1_000  # messages in one answer
MAX_QUESTIONS = 32  # of the server's, being answered at once
_CHANGED = "notifications/tools/list_changed"
_ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
LISTEN = "subscriptions/listen"
_NOT_FOUND = -32601


class Host(Protocol):
    """Whoever has the dialog: answers the server's questions, and hears of what it says unasked."""

    capabilities: Object

    async def answer(self, method: str, params: Object, revision: Revision) -> Json: ...
    def changed(self) -> None: ...
    def logged(self, entry: Log) -> None: ...


class Hearing:
    """The half of a dialog that listens. To a transport it is the `Ear`."""

    revision: Revision | None = None
    link: Link | None = None

    def __init__(self, name: str, host: Host, tap: Callable[[str, bytes], None] | None) -> None:
        self.name = name
        self.host = host
        self.tap = tap  # sees every message: ">" is ours, "<" the server's
        self.skips: list[str] = []  # the last things that came and were no messages
        self.dead: PeerError | None = TransportError("not connected")
        self.deaths: list[float] = []
        self._waiting: dict[Id, Flight] = {}
        self._answers: dict[Id, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = FOREVER  # when it fires
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time

    def hear(self, message: bytes | bytearray, about: Waiting | None = None) -> None:
        if self.tap is not None:
            self._tapped("<", message)
        found = decode_answer(message)
        if type(found) is Response and type(found.result) is dict:  # the usual case, in a short way
            flight = self._waiting.pop(found.id, None)
            if flight is not None and not flight.future.done():
                flight.future.set_result(found.result)
                return
        if isinstance(found, list):
            for each in found[:MAX_BATCH]:
                self._take(read(each), about)
        elif isinstance(found, Refusal) and about is None:
            self._refused(found, message)
        else:
            self._take(found, about)

    def alive(self, about: Waiting | None = None) -> None:
        now = self.now()
        for flight in self._waiting.values() if about is None else (about,):
            if isinstance(flight, Flight):
                self._lives(flight, now)

    def _lives(self, flight: Flight, now: float) -> None:
        """From the first sign of life another clock counts, which may be the shorter one."""
        flight.last = now
        if not flight.heard and not flight.future.done():
            flight.heard = True
            flight.due = min(flight.due, now + flight.clocks.idle)
            if flight.due < self._looks_at:
                self._look_at(flight.due)

    def lost(self, problem: PeerError, about: Waiting | None = None) -> None:
        if about is not None:
            self._fail(about, problem)
            return
        if self.dead is None:
            self.dead = problem
            self.deaths.append(self.now())
        for flight in list(self._waiting.values()):
            self._fail(flight, TransportError(problem.text, sent=flight.sent, hint=problem.hint))

    def skipped(self, why: str, *, too_long: bool = False) -> None:
        self.skips = [*self.skips[-9:], why]
        log.debug("%s: skipped %s", self.name, why)
        if too_long and (flight := self._only()):  # of several, nobody can say whose it was
            self._fail(flight, RemoteProtocolError(f"the answer is too long: {why}", sent=Sent.UNKNOWN))

    def _only(self) -> Flight | None:
        """The one request that waits for an answer, if it is one; a subscription does not."""
        waiting = [each for each in self._waiting.values() if each.method != LISTEN]
        return waiting[0] if len(waiting) == 1 else None

    def _take(self, message: Message, about: Waiting | None) -> None:
        if isinstance(message, Response):
            self._answered(message, about)
        elif isinstance(message, Notification):
            self._notified(message, about)
        elif isinstance(message, Request):
            self._asked(message, about)
        elif about is not None:
            sent = Sent.UNKNOWN if message.id is UNSET else Sent.FAILED  # perhaps it comes from a proxy
            self._fail(about, RemoteProtocolError(f"the answer is not a message: {message.text}", sent=sent))
        else:
            self.skipped(f"what is not a message: {message.text}")

    def _refused(self, refusal: Refusal, message: bytes | bytearray) -> None:
        """Something that came on a pipe cannot be read. Whoever waits for just that is told now, not by its clock."""
        flight, sent = self._waiting.get(refusal.id) if refusal.id is not UNSET else None, Sent.FAILED
        if refusal.id is UNSET:
            flight, sent = self._only(), Sent.UNKNOWN
        # A line of a log may have an id too, and a question of the server's one that is also ours.
        if flight is not None and b'"jsonrpc"' in message and b'"method"' not in message:
            self._fail(flight, RemoteProtocolError(f"the answer is not a message: {refusal.text}", sent=sent))
        else:
            self.skipped(f"what is not a message: {refusal.text}")

    def _answered(self, message: Response, about: Waiting | None) -> None:
        flight: Waiting | None = self._waiting.get(message.id)
        if flight is None and message.id == "" and message.error is not UNSET:  # about what could not be read
            flight = about or self._only()
        if flight is None:
            if about is not None:
                self._fail(about, RemoteProtocolError(f"answered with the id {message.id!r}, not {about.id!r}"))
        elif message.error is not UNSET:
            self._fail(flight, _error(message.error))
        elif type(message.result) is not dict:
            self._fail(flight, RemoteProtocolError("the result is not an object"))
        elif not flight.future.done():
            self._waiting.pop(flight.id, None)
            flight.future.set_result(message.result)

    def _notified(self, message: Notification, about: Waiting | None) -> None:
        params = message.params
        if message.method == "notifications/progress":
            token = params.get("progressToken")
            flight = self._waiting.get(token) if type(token) is int else None
            progress = None if flight is None else Progress.read(params)
            if flight is not None and progress is not None:
                self._lives(flight, self.now())
                flight.progress = progress
                self._tell(flight, progress)
        elif message.method == "notifications/message":
            entry = Log(str(params.get("level", "info")), params.get("data"), str(params.get("logger", "")))
            about = about or self._only()  # on a pipe nothing says whose it is
            if about is not None:
                self.alive(about)
                self._tell(about, entry)
            self.host.logged(entry)
        elif message.method == _CHANGED:
            self.host.changed()
        elif message.method == _ACKNOWLEDGED:
            self._acknowledged(params)
        elif message.method == CANCELLED:
            ident = params.get("requestId")
            task = self._answers.get(ident) if isinstance(ident, int | str) else None
            ended = self._waiting.get(ident) if type(ident) is int else None
            if task is not None:
                task.cancel()
            elif ended is not None and ended.method == LISTEN:
                self._fail(ended, TransportError("the server ended the subscription"))

    def _acknowledged(self, params: Object) -> None:
        """From now on we are told of changes; of those between the last list and now we were not."""
        meta = params.get("_meta")
        ident = meta.get(SUBSCRIPTION) if type(meta) is dict else None
        flight = self._waiting.get(ident) if type(ident) is int else None
        honoured = params.get("notifications")
        if flight is None:
            return
        self.alive(flight)
        self.host.changed()
        if type(honoured) is not dict or honoured.get("toolsListChanged") is not True:
            log.warning("%s: says that its tools change, and does not say when", self.name)

    def _tell(self, flight: Waiting | None, event: Progress | Log) -> None:
        if not isinstance(flight, Flight) or flight.watch is None:
            return
        try:
            flight.watch(event)
        except Exception:
            log.exception("%s: whoever watches the call failed, and is not told any more", self.name)
            flight.watch = None

    def _asked(self, request: Request, about: Waiting | None) -> None:
        if self.link is None:  # closed: no reply can be sent, and nothing would cancel the task that makes it
            return
        if about is not None:
            self.alive(about)
        if self.revision is not None and self.revision.stateless:
            self.skipped(f"a request ({request.method[:60]}), which servers of {self.revision.name} do not send")
        elif request.method == "ping":
            self._reply(jsonrpc.answer(request.id, {}))
        elif request.id in self._answers or len(self._answers) >= MAX_QUESTIONS:
            self._reply(jsonrpc.error(request.id, 429, f"{MAX_QUESTIONS} questions are being answered already"))
        else:
            task = self._answers[request.id] = self._loop.create_task(self._answer(request))
            task.add_done_callback(lambda _: self._answers.pop(request.id, None))  # also if it never began

    async def _answer(self, request: Request) -> None:
        try:
            if self.revision is None or request.method not in self.revision.questions:
                raise RemoteProtocolError(f"Unknown method: {request.method[:100]}", code=_NOT_FOUND)
            reply = jsonrpc.answer(request.id, await self.host.answer(request.method, request.params, self.revision))
        except RemoteProtocolError as refused:
            reply = jsonrpc.error(request.id, refused.code, refused.text)
        except Exception:
            log.exception("%s: %s could not be answered", self.name, request.method)
            reply = jsonrpc.error(request.id, -32603, "Internal error")
        finally:
            self.alive()  # the time it took was ours, not the server's
        self._reply(reply)

    def _reply(self, message: bytes) -> None:
        """Send what is no request."""
        if self.link is not None:
            self._tapped(">", message)
            self.link.send(message, None)

    def _tapped(self, direction: str, message: bytes | bytearray) -> None:
        if self.tap is not None:
            try:
                self.tap(direction, bytes(message))
            except Exception:
                log.exception("%s: the tap failed, and is not called again", self.name)
                self.tap = None

    def abandon(self, flight: Waiting, why: str = "the caller does not wait any longer") -> None:
        """Nobody waits any more: the server is told in the way of its revision."""
        self._waiting.pop(flight.id, None)
        link, revision = self.link, self.revision
        if link is None or revision is None:
            return
        by_disconnect = revision.stateless and link.disconnect_cancels
        if not by_disconnect and CANCELLED in revision.notifications:
            self._reply(jsonrpc.notification(CANCELLED, {"requestId": flight.id, "reason": why}))
        link.give_up(flight)

    # Clocks

    def _look_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._look) if when < FOREVER else None
        self._looks_at = when

    def _look(self) -> None:
        """End what has taken too long; look again when the next one would have."""
        self._timer, self._looks_at = None, FOREVER
        now, soonest = self.now(), FOREVER
        for flight in list(self._waiting.values()):
            if flight.due <= now:
                self._judge(flight, now)
            if not flight.future.done():
                soonest = min(soonest, flight.due)
        self._look_at(soonest)

    def _judge(self, flight: Flight, now: float) -> None:
        clock = "idle" if flight.heard else "first"
        if self._answers:  # the server waits for us
            flight.last = now
        seconds = getattr(flight.clocks, clock)
        if now >= flight.total_by:
            clock, text = "total", f"not done within {flight.clocks.total:g} s"
        elif now >= flight.last + seconds:
            text = f"nothing was heard for {seconds:g} s"
        else:
            flight.due = min(flight.last + seconds, flight.total_by)
            return
        got = "" if flight.progress is None else f"; progress had reached {shown(flight.progress)}"
        hint = f"The clock is Clocks({clock}=…)"
        problem = CallTimeout(text + got, clock=clock, progress=flight.progress, sent=flight.sent, hint=hint)
        self._fail(flight, problem)
        self.abandon(flight, f"time-out: {text}")

    def _fail(self, flight: Waiting, problem: PeerError) -> None:
        self._waiting.pop(flight.id, None)
        if not flight.future.done():
            flight.future.set_exception(self.named(problem, flight.method))
            flight.future.exception()  # seen: whoever waits gets it all the same

    def named(self, problem: PeerError, phase: str) -> PeerError:
        """The problem, with where and in what it came up, unless it says that already."""
        problem.server, problem.phase = problem.server or self.name, problem.phase or phase
        return problem


def _error(error: Json) -> RemoteProtocolError:
    if flaw := jsonrpc.error_flaw(error):
        return RemoteProtocolError(f"answered with {flaw}: {one_line(encode(error).decode(), 200)}")
    code, text, data = error["code"], error["message"], error.get("data")
    if type(data) is dict and type(data.get("reason")) is str:  # the first draft says there what is wrong
        text = f"{text}: {data['reason']}"
    return RemoteProtocolError(text, code=code, data=data)
