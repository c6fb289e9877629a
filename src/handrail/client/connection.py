"""The client's half of a conversation with one server: which revision it speaks, requests in flight, their clocks.

Every request settles: with an answer, by one of its clocks, or when the transport dies. Nothing here reads tools.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import UNSET

from handrail import jsonrpc
from handrail.client.hearing import FOREVER, LISTEN, Hearing, Host
from handrail.client.inflight import Clocks, Flight, Log, Progress, until
from handrail.client.negotiation import Era
from handrail.client.targets import Target
from handrail.errors import CallTimeout, HttpRefused, PeerError, RemoteProtocolError, Sent, TransportError
from handrail.model import Object
from handrail.protocol.http_rules import mirrors
from handrail.revisions import Revision
from handrail.revisions.base import CAPABILITIES, CLIENT_INFO, VERSION
from handrail.transports.base import Link, Waiting

log = logging.getLogger("handrail")

RESTARTS = 3  # within a minute, without a pause; then it doubles, up to
LONGEST_PAUSE = 30.0


class Dialog(Hearing):
    """One server, over one transport at a time; a transport that died is made anew for the next request."""

    def __init__(
        self,
        target: Target,
        host: Host,
        *,
        clocks: Clocks,
        revision: str,
        me: Object,
        tap: Callable[[str, bytes], None] | None = None,
    ) -> None:
        super().__init__(target.name, host, tap)
        self.clocks = clocks
        self.me = me
        self.era = Era(self, revision, target.key)
        self.welcome: Object = {}
        self._make = target.make
        self._last_id = 0
        self._envelope: Object = {}
        self._opener: asyncio.Task[None] | None = None  # whoever wants to be connected waits for the same
        self._endings: set[asyncio.Task[None]] = set()  # of transports that were let go of
        self._closed = False
        self._listener: asyncio.Task[None] | None = None
        self._wants_news = False

    # Beginning and end

    @property
    def is_open(self) -> bool:
        return self.dead is None and self._opener is None

    async def open(self) -> None:
        """Connect and find out what the server speaks, unless that is done."""
        if not self.is_open:
            await self._opened(self._connect)

    async def _opened(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do this, unless the like is being done already: who gives up waiting takes it from nobody."""
        if self._closed:
            raise TransportError("the client is closed", server=self.name)
        opener = self._opener
        if opener is None:
            opener = self._opener = self._loop.create_task(self._opening(work))
            opener.add_done_callback(self._is_opened)
        await asyncio.wait({opener})
        if opener.cancelled():
            raise TransportError("the client was closed", server=self.name)
        problem = opener.exception()
        if isinstance(problem, PeerError):
            raise _again(problem) from problem
        if problem is not None:
            raise problem

    async def _opening(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except BaseException as problem:
            if isinstance(problem, PeerError):
                self.named(problem, "connect")
            self._let_go(problem if isinstance(problem, PeerError) else TransportError("not connected"))
            raise
        if self._wants_news:
            self._listen()

    def _is_opened(self, opener: asyncio.Task[None]) -> None:
        self._opener = None
        if not opener.cancelled():
            opener.exception()  # seen: perhaps nobody waits any more

    async def _connect(self) -> None:
        if self._endings:
            await asyncio.wait(self._endings)
        await self._pause()
        await self.start()
        await self.era.settle()

    async def start(self) -> None:
        """A new transport."""
        if self.link is not None:
            await self.link.close()
        if self._closed:
            raise TransportError("the client is closed")
        self.revision, self.dead = None, None
        self.link = self._make()
        seconds = self.clocks.connect
        try:
            async with asyncio.timeout(seconds):
                await self.link.open(self)
        except TimeoutError:
            raise CallTimeout(f"no connection within {seconds:g} s", clock="connect") from None

    def agree(self, revision: Revision, welcome: Object) -> None:
        """From now on this is spoken."""
        self.revision, self.welcome = revision, welcome
        self._envelope = self.envelope(revision)
        if self.link is None:
            raise TransportError("the client was closed")
        self.link.agreed(revision)
        self.host.changed()  # another process, or session, may have other tools

    async def close(self) -> None:
        """End the conversation; whoever waits is told."""
        self._closed = True
        if self._opener is not None:
            self._opener.cancel()
        self._let_go(TransportError("the client was closed"))
        hurry: asyncio.CancelledError | None = None
        while left := {*self._endings, *filter(None, [self._opener])}:
            try:
                await asyncio.wait(left)
            except asyncio.CancelledError as cancelled:  # then it ends at once, but it ends
                hurry = cancelled
                for task in left:
                    task.cancel()
        if hurry is not None:
            raise hurry

    def _let_go(self, problem: PeerError) -> None:
        """Tell everybody who waits, and end the transport, which may take a while."""
        self.lost(problem)
        self._look_at(FOREVER)
        tasks = [*self._answers.values(), *filter(None, [self._listener])]
        for task in tasks:
            task.cancel()
        self._listener = None
        link, self.link = self.link, None
        if link is not None or tasks:
            ending = self._loop.create_task(self._ending(link, tasks))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _ending(self, link: Link | None, tasks: list[asyncio.Task[None]]) -> None:
        try:
            if link is not None:
                await link.close()
        except Exception:
            log.exception("%s: the transport did not end as it should", self.name)
        finally:
            if tasks:
                await asyncio.wait(tasks, timeout=1.0)

    async def _pause(self) -> None:
        """A server that keeps dying is not started again at once."""
        now = self.now()
        self.deaths = [each for each in self.deaths if now - each < 60.0]
        extra = len(self.deaths) - RESTARTS
        if extra >= 0:
            seconds = min(2.0**extra, LONGEST_PAUSE)
            if seconds > self.clocks.connect:
                raise TransportError(f"ended {len(self.deaths)} times within a minute", server=self.name)
            await asyncio.sleep(seconds)

    # Requests

    def envelope(self, revision: Revision) -> Object:
        """What every request of a stateless revision says of us."""
        capabilities = revision.declare(self.host.capabilities)
        return {VERSION: revision.name, CLIENT_INFO: self.me, CAPABILITIES: capabilities} if revision.stateless else {}

    async def request(
        self,
        method: str,
        params: Object,
        clocks: Clocks,
        ends: float,
        *,
        header_map: dict[str, tuple[str, ...]] | None = None,
        watch: Callable[[Progress | Log], None] | None = None,
        tracked: bool = False,
    ) -> Object:
        """The result of a request; PeerError says why there is none.

        `tracked` asks for progress; `ends` is when its total clock fires.
        """
        if not self.is_open:
            async with until(ends, clocks):
                await self.open()
        welcome = self.welcome
        flight = self.begin(method, params, clocks, ends, header_map=header_map, watch=watch, tracked=tracked)
        try:
            return await flight.future  # as `result` does: one coroutine less for every call
        except asyncio.CancelledError:
            self.abandon(flight)
            raise
        except HttpRefused as gone:
            # The session is gone, and so nothing was done: shake hands anew, and say it once more.
            turned_away = gone.status == 404 and gone.sent is Sent.FAILED
            if not turned_away or self.revision is None or self.revision.stateless:
                raise
        if welcome is self.welcome:  # else another request has done so already
            async with until(ends, clocks):
                await self._opened(self.era.shake_hands if self.dead is None else self._connect)
        flight = self.begin(method, params, clocks, ends, header_map=header_map, watch=watch, tracked=tracked)
        return await self.result(flight)

    def begin(
        self,
        method: str,
        params: Object,
        clocks: Clocks,
        ends: float | None = None,
        *,
        revision: Revision | None = None,
        header_map: dict[str, tuple[str, ...]] | None = None,
        watch: Callable[[Progress | Log], None] | None = None,
        tracked: bool = False,
    ) -> Flight:
        """Send a request. Its `future` is to be awaited by `result`."""
        link = self.link
        if link is None:
            raise TransportError("the client is closed", server=self.name)
        self._last_id = ident = self._last_id + 1
        now, future = self.now(), self._loop.create_future()
        ends, due = now + clocks.total if ends is None else ends, now + clocks.first
        due = due if due < ends else ends
        flight = Flight(ident, method, future, clocks=clocks, last=now, due=due, total_by=ends, watch=watch)
        speaks = revision or self.revision
        if speaks is not None and speaks.stateless:
            meta: Object = {**self._envelope} if revision is None else self.envelope(speaks)
            if link.disconnect_cancels:
                flight.headers = {"MCP-Protocol-Version": speaks.name, **mirrors(method, params, header_map or {})}
        else:
            meta = {}
        if tracked:
            meta["progressToken"] = ident
        if meta:
            given = params.get("_meta")
            params = {**params, "_meta": {**given, **meta} if given else meta}
        message = jsonrpc.request(ident, method, params if params else UNSET)
        self._waiting[ident] = flight
        if flight.due < self._looks_at:
            self._look_at(flight.due)
        if self.tap is not None:
            self._tapped(">", message)
        link.send(message, flight)
        return flight

    async def result(self, flight: Waiting) -> Object:
        """What a request was answered with."""
        try:
            return await flight.future
        except asyncio.CancelledError:
            self.abandon(flight)
            raise

    def forget(self, flight: Waiting) -> None:
        """Nobody waits any more, and the server need not know."""
        self._waiting.pop(flight.id, None)

    def notify(self, method: str) -> None:
        self._reply(jsonrpc.notification(method))

    # What the server says unasked

    def want_news(self) -> None:
        """Be told of changes, where that has to be asked for."""
        if not self._wants_news:
            self._wants_news = True
            self._listen()

    @property
    def announces(self) -> bool:
        """Whether the server says that it tells when its tools change."""
        tools = self.welcome.get("capabilities", {}).get("tools")
        return type(tools) is dict and tools.get("listChanged") is True

    def _listen(self) -> None:
        stateless = self.revision is not None and self.revision.stateless
        if stateless and self.announces and (self._listener is None or self._listener.done()):
            self._listener = self._loop.create_task(self._keep_listening())

    async def _keep_listening(self) -> None:
        clocks, pause = Clocks(self.clocks.connect, self.clocks.first, FOREVER, FOREVER), 0.5
        while self.dead is None:
            began = self.now()
            try:
                await self.result(self.begin(LISTEN, {"notifications": {"toolsListChanged": True}}, clocks))
            except RemoteProtocolError as refused:
                log.debug("%s: changes are not announced: %s", self.name, refused)
                return
            except PeerError as problem:
                log.debug("%s: %s", self.name, problem)
            self.host.changed()  # whatever was said in between was missed
            pause = 0.5 if self.now() - began > 60.0 else min(2 * pause, LONGEST_PAUSE)
            await asyncio.sleep(pause)


def _again(problem: PeerError) -> PeerError:
    """The same for somebody else, who may say more of it."""
    made = type(problem).__new__(type(problem), *problem.args)
    vars(made).update(vars(problem))
    return made
