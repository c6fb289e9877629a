"""A client's end of HTTP: Streamable HTTP, and the event stream with a second address that came before it.

A request is a POST of its own, and what comes back is about it alone. In handshake revisions one more stream, opened
with GET, is for what the server says unasked, and a stream that breaks is asked for again by the id of its last event.
Time is the conversation's: here only connecting has a deadline, and what nobody waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Literal

from handrail.errors import PeerError, Sent, TransportError
from handrail.revisions import Revision
from handrail.transports.base import Ear, Waiting
from handrail.transports.http_body import (
    EventStream,
    is_error,
    media_type,
    read_some,
    read_whole,
    refusal,
    unanswered,
)
from handrail.transports.http_request import EVENTS, JSON, Asker, Authorizer, broken, drop, leave, same_place
from handrail.transports.outbox import Outbox

if TYPE_CHECKING:
    from aiohttp import ClientResponse

__all__ = ["Authorizer", "Web"]

log = logging.getLogger("handrail")

SESSION = "Mcp-Session-Id"
PROTOCOL = "MCP-Protocol-Version"

MAX_REQUESTS = 100  # open at once; more wait. Replies and notifications do not: a request may be waiting for one
MAX_TOLD = 10  # of those that were not accepted: a server that asks without end must not fill a log
MAX_FRUITLESS = 10  # times to come back to a broken stream that has nothing more to say
MAX_REFUSAL_BYTES = 64 * 1024
NOTE_SECONDS = 30.0
ORDER_SECONDS = 10.0  # that a request waits for the end of the handshake before it to be accepted
CLOSE_SECONDS = 2.0

_TRANSPORTS = ("auto", "streamable", "sse")
_SESSION_ID = re.compile(r"[\x21-\x7e]{1,4096}")


class Web:
    """A link to the server at `url`.

    `auto` speaks Streamable HTTP, and lets the conversation fall back to the transport of 2024; the others are one of
    the two. `headers` go with every request, and nowhere else.
    """

    disconnect_cancels = True

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        auth: Authorizer | None = None,
        connect_seconds: float = 10.0,
        max_message_bytes: int = 4 * 1024 * 1024,
        transport: Literal["auto", "streamable", "sse"] = "auto",
    ) -> None:
        if transport not in _TRANSPORTS:
            raise ValueError(f"transport: {transport!r} is none of {', '.join(_TRANSPORTS)}")
        self._asker = Asker(url, headers or {}, auth, connect_seconds)
        self._place = self._asker.place
        self._address = self._post_address = self._asker.address
        self._connect_seconds = connect_seconds
        self._limit = max_message_bytes
        self._transport = transport
        self._is_closed = True
        self._session = ""
        self._is_gone = False  # the server does not know the session any more
        self._revision: Revision | None = None
        self._own: dict[str, str] = {}  # headers of every request after the handshake
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox = Outbox(self._note, self._start)
        self._greeting: asyncio.Future[None] | None = None  # the message that ends the handshake, on its way
        self._is_greeting_due = False
        self._unaccepted = 0
        self._listener: asyncio.Task[None] | None = None
        self.news = self._streams = 0
        self._is_old = False  # what comes, comes on one stream
        self._dead: TransportError | None = None  # that stream, if it has ended

    @property
    def session(self) -> str:
        """The id of the session the server has begun; empty if it has not, or does not know it any more."""
        return "" if self._is_gone else self._session

    # The link

    async def open(self, ear: Ear) -> None:
        self._ear = ear
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(MAX_REQUESTS)
        self._asker.open()
        self._is_closed = False
        if self._transport == "sse":
            try:
                if not await self.fall_back():
                    raise TransportError(f"{self._place} has no event stream that says where to post to")
            except BaseException:
                await self.close()
                raise

    def send(self, message: bytes, about: Waiting | None) -> None:
        if self._is_closed:
            if about is not None:
                self._loop.call_soon(self._ear.lost, TransportError("the connection was closed"), about)
        elif about is not None:
            about.trail = self._start(self._request(message, about, self._greeting))
        else:
            posted = self._outbox.add(message, self._own)
            if self._is_greeting_due:
                self._is_greeting_due, self._greeting = False, posted

    def agreed(self, revision: Revision) -> None:
        self._revision = revision
        self._own = {}
        if revision.stateless:
            self._session = ""
            return
        self._is_greeting_due = True
        if self._session:
            self._own[SESSION] = self._session
        if revision.version_header:
            self._own[PROTOCOL] = revision.name

    def forget_session(self) -> None:
        """Begin anew: the next request is the first."""
        self._session = ""
        self._is_gone = False
        self._revision = None
        self._own = {}
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None

    def give_up(self, about: Waiting) -> None:
        if about.trail is not None:
            about.trail.cancel()  # and with it its connection

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_SECONDS / 2):
                        await self._outbox.emptied()
                if left := self._outbox.clear():
                    log.warning("%s: %d messages were not accepted before the end", self._place, left)
                await self._end()
                if self._session and not self._is_gone:
                    await leave(await self._asker.ask("DELETE", self._address, self._own))
        except Exception as problem:
            log.debug("%s: the session was not ended: %s", self._place, type(problem).__name__)
        finally:
            await self._end()
            await self._asker.close()

    async def _end(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name="handrail web")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # One exchange

    async def _request(self, message: bytes, about: Waiting, greeting: asyncio.Future[None] | None) -> None:
        try:
            if greeting is not None and not greeting.done():
                await asyncio.wait({greeting}, timeout=ORDER_SECONDS)
            async with self._room:
                await self._exchange(message, about)
        except PeerError as problem:
            self._ear.lost(problem, about)
        except broken() as problem:
            self._ear.lost(self._asker.verdict(problem, about.sent), about)
        except Exception as problem:
            log.exception("%s: a request ended in a way it should not", self._place)
            self._ear.lost(TransportError(f"{type(problem).__name__} while asking", sent=about.sent), about)

    async def _exchange(self, message: bytes, about: Waiting) -> None:
        if self._dead is not None:
            raise TransportError(self._dead.text)
        is_first = about.method == "initialize"
        headers = {} if is_first else self._own
        session = headers.get(SESSION, "")
        if about.headers:
            headers = {**headers, **about.headers}
        response = await self._asker.ask("POST", self._post_address, headers, message, about)
        about.status = status = response.status
        try:
            if status >= 300:
                await self._refused(response, about, session)
            elif self._is_old:
                await leave(response)  # the answer comes on the stream
            else:
                if is_first:
                    self._begun(response.headers.get(SESSION, ""))
                kind = media_type(response)
                if kind == JSON or not kind:
                    body = await read_whole(response, self._limit, self._ear, about)
                    if body:
                        self._ear.hear(body, about)
                    if not about.future.done():
                        raise unanswered(status, "the answer to something else" if body else "nothing")
                elif kind == EVENTS:
                    await self._hear(response, about)
                else:
                    body = await read_some(response, MAX_REFUSAL_BYTES)
                    raise unanswered(status, f"{kind[:100]}, not a message", body)
        finally:
            drop(response)

    def _begun(self, session: str) -> None:
        self.forget_session()
        if _SESSION_ID.fullmatch(session):
            self._session = session
            self._own = {SESSION: session}
        elif session:
            log.warning("%s: its session id cannot be sent back, and was left out", self._place)

    async def _hear(self, response: ClientResponse, about: Waiting) -> None:
        """The answer as an event stream."""
        stream = EventStream(self._limit)
        try:
            await stream.hand_over(response, self._ear, about, self._outbox)
        except broken() as problem:
            log.debug("%s: a stream broke: %s", self._place, type(problem).__name__)
        if about.future.done():
            await leave(response)
            return
        drop(response)
        # Stateless revisions have no ids to come back with.
        if stream.last and (self._session or (self._revision is not None and not self._revision.stateless)):
            await self._resume(about, stream)
        if not about.future.done():
            raise TransportError("the event stream ended before the answer", sent=Sent.UNKNOWN)

    async def _resume(self, about: Waiting, stream: EventStream) -> None:
        """Ask for the rest of a stream, again and again, while the server has something to say on it."""
        fruitless = 0
        while fruitless < MAX_FRUITLESS and not about.future.done():
            await asyncio.sleep(stream.pause(fruitless))
            before = stream.pieces
            try:
                await self._read_on(about, stream)
            except PeerError as problem:
                problem.sent = Sent.UNKNOWN  # whatever becomes of its stream, the request was sent
                raise
            fruitless = fruitless + 1 if stream.pieces == before else 0

    async def _read_on(self, about: Waiting | None, stream: EventStream) -> None:
        """GET a stream, from where we were in it, and hand over what it says until it breaks."""
        session, resumed = self._session, {"Last-Event-ID": stream.last} if stream.last else {}
        try:
            response = await self._asker.ask("GET", self._address, {**self._own, "Accept": EVENTS, **resumed})
            try:
                if response.status < 300 and media_type(response) == EVENTS:
                    if about is None:
                        self._streams += not resumed  # what is not resumed may have missed something
                        self.news = self._streams
                    await stream.hand_over(response, self._ear, about, self._outbox)
                    await leave(response)
                elif response.status < 500:
                    body = await read_some(response, MAX_REFUSAL_BYTES)
                    self._lost_session(response, session)
                    raise refusal(response, body)
            finally:
                drop(response)
        except broken() as problem:
            log.debug("%s: a stream broke: %s", self._place, type(problem).__name__)

    async def _note(self, message: bytes, headers: dict[str, str]) -> None:
        """Post a notification, or a reply. What the server answers is nobody's business; that it takes it is."""
        try:
            async with asyncio.timeout(NOTE_SECONDS):
                response = await self._asker.ask("POST", self._post_address, headers, message)
                await leave(response)
            status = response.status
            if status < 300:
                self._listen()
                return
            if status == 404 and self._session:
                self._is_gone = True  # which the next request will find out, too
            log.debug("%s: a message was answered with HTTP %d", self._place, status)
        except Exception as problem:
            is_gone = isinstance(problem, OSError) and not isinstance(problem, TimeoutError)  # as calls are told, too
            self._unaccepted += not is_gone
            level = logging.DEBUG if is_gone or self._unaccepted > MAX_TOLD else logging.WARNING
            log.log(level, "%s: a reply or notification was not accepted: %s", self._place, type(problem).__name__)

    # What is said unasked

    def _listen(self) -> None:
        is_due = self._revision is not None and not self._revision.stateless and not self._is_closed
        # Without a header of the session a GET would ask for the older transport.
        if is_due and self._own and self._listener is None and not self._is_old:
            self._listener = self._start(self._listening())

    async def _listening(self) -> None:
        stream = EventStream(self._limit)
        failures = 0
        while True:
            before = stream.pieces
            try:
                await self._read_on(None, stream)
            except PeerError as problem:
                log.debug("%s: no stream: %s", self._place, problem)
                return  # it has nothing to say unasked
            except Exception:
                log.exception("%s: a stream ended in a way it should not", self._place)
                return
            finally:
                self.news = 0
            failures = 0 if stream.pieces != before else failures
            await asyncio.sleep(stream.pause(failures))
            failures += 1

    # The older transport

    async def fall_back(self) -> bool:
        """Whether the server speaks the HTTP of 2024; if so, that is spoken from now on."""
        if self._transport == "streamable" or self._is_old:
            return False
        self.forget_session()
        try:
            async with asyncio.timeout(self._connect_seconds):
                await self._open_old()
        except broken() as problem:
            failed = self._asker.verdict(problem, Sent.NO)
        else:
            return self._is_old
        raise failed  # not in the `except`: its context would hold the headers

    async def _open_old(self) -> None:
        """Speak the older transport, if that is what the stream begins with: where the server wants its messages."""
        response = await self._asker.ask("GET", self._address, {"Accept": EVENTS})
        try:
            stream = EventStream(self._limit)
            is_stream = response.status < 300 and media_type(response) == EVENTS
            said = await stream.opening(response) if is_stream else None
            if said is None or said.name != "endpoint":
                return
            address = same_place(response.url, said.data.decode("utf-8", "replace"))
            if address is None:
                # It would be sent all that is said, and every token (P-27).
                raise TransportError(f"{self._place} wants its messages to be sent to another place; refused")
            self._is_old, self._post_address, self.news = True, address, 1
            self._start(self._old_stream(response, stream))
        finally:
            if not self._is_old:
                drop(response)

    async def _old_stream(self, response: ClientResponse, stream: EventStream) -> None:
        how = "ended"
        try:
            await stream.hand_over(response, self._ear, None, self._outbox, is_only=True)
        except broken() as problem:
            how = f"broke ({type(problem).__name__})"
        finally:
            drop(response)
        self._dead = TransportError(f"the event stream of {self._place} {how}", sent=Sent.UNKNOWN)
        self._ear.lost(self._dead)

    # What went wrong

    async def _refused(self, response: ClientResponse, about: Waiting, session: str) -> None:
        """A status that says no: with a message, which is heard, or without."""
        body = await read_some(response, MAX_REFUSAL_BYTES)
        if not (response.status == 404 and session) and is_error(body, about):
            self._ear.hear(body, about)
        if not about.future.done():
            self._lost_session(response, session)
            raise refusal(response, body)

    def _lost_session(self, response: ClientResponse, session: str) -> None:
        if response.status == 404 and session and session == self._session:
            self._is_gone = True  # the id stays until a handshake begins another
