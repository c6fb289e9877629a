"""The client's half of a conversation with one server: which revision it speaks, requests in flight, their clocks.

Every request settles: with an answer, by one of its clocks, or when the transport dies. Nothing here reads tools.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from msgspec import UNSET

from handrail import jsonrpc
from handrail.client.era import Era
from handrail.client.flight import Clocks, Flight, Log, Progress
from handrail.client.hearing import FOREVER, Hearing, Host
from handrail.errors import CallTimeout, HttpRefused, PeerError, RemoteProtocolError, TransportError
from handrail.model import Json, Object
from handrail.protocol.mirrors import mirrors
from handrail.revisions import Revision
from handrail.revisions.base import CAPABILITIES, CLIENT_INFO, VERSION
from handrail.transports.link import Link, Waiting

log = logging.getLogger("handrail")

RESTARTS = 3  # within a minute, without a pause; then it doubles, up to
LONGEST_PAUSE = 30.0


class Dialog(Hearing):
    """One server, over one transport at a time; a transport that died is made anew for the next request."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Link],
        host: Host,
        *,
        revision: str,
        clocks: Clocks,
        me: Object,
        key: str = "",
    ) -> None:
        super().__init__(name, host)
        self.clocks = clocks
        self.me = me
        self.era = Era(self, revision, key)
        self.welcome: Object = {}
        self._make = make
        self._last_id = 0
        self._envelope: Object = {}
        self._opening = asyncio.Lock()
        self._handshakes = 0
        self._closed = False
        self._listener: asyncio.Task[None] | None = None
        self._wants_news = False

    # Beginning and end

    async def open(self) -> None:
        """Connect and find out what the server speaks, unless that is done."""
        async with self._opening:
            if self.dead is None:
                return
            if self._closed:
                raise TransportError("the client is closed", server=self.name)
            await self._pause()
            try:
                await self.start()
                await self.era.settle()
            except BaseException as problem:
                await self.end(problem if isinstance(problem, PeerError) else TransportError("not connected"))
                if isinstance(problem, PeerError):
                    self._name(problem, "connect")
                raise
            if self._wants_news:
                self._listen()

    async def start(self) -> None:
        """A new transport."""
        if self.link is not None:
            await self.link.close()
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
        self._handshakes += 1
        assert self.link is not None
        self.link.agreed(revision)
        self.host.changed()  # another process, or session, may have other tools

    async def close(self) -> None:
        """End the conversation; whoever waits is told."""
        self._closed = True
        await self.end(TransportError("the client was closed"))

    async def end(self, problem: PeerError) -> None:
        """Tell everybody who waits, and let go of the transport."""
        self.lost(problem)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = [*self._answers.values(), *filter(None, [self._listener])]
        for task in tasks:
            task.cancel()
        self._listener = None
        link, self.link = self.link, None
        try:
            if link is not None:
                await link.close()
        finally:
            if tasks:
                await asyncio.wait(tasks, timeout=1.0)

    async def _pause(self) -> None:
        """A server that keeps dying is not started again at once."""
        now = self._loop.time()
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
        *,
        clocks: Clocks | None = None,
        header_map: dict[str, tuple[str, ...]] | None = None,
        watch: Callable[[Progress | Log], None] | None = None,
        tracked: bool = False,
    ) -> Object:
        """The result of a request; PeerError says why there is none. `tracked` asks for progress."""
        if self.dead is not None or self._opening.locked():
            await self.open()
        again = self._handshakes
        flight = self.begin(method, params, clocks or self.clocks, header_map=header_map, watch=watch, tracked=tracked)
        try:
            return await self.result(flight)
        except HttpRefused as gone:
            # The session is gone, and so nothing was done: shake hands anew, and say it once more.
            if gone.status != 404 or self.revision is None or self.revision.stateless:
                raise
            async with self._opening:
                if again == self._handshakes:
                    await self.era.shake_hands()
        flight = self.begin(method, params, clocks or self.clocks, header_map=header_map, watch=watch, tracked=tracked)
        return await self.result(flight)

    def begin(
        self,
        method: str,
        params: Object,
        clocks: Clocks,
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
        now = self._loop.time()
        flight = Flight(ident, method, self._loop.create_future(), clocks, now)
        flight.watch = watch
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
            params = {**params, "_meta": {**params.get("_meta", {}), **meta}}
        self._waiting[ident] = flight
        if self._timer is None or flight.due < self._timer.when():
            self._look_at(flight.due)
        self._send(link, jsonrpc.request(ident, method, params if params else UNSET), flight)
        return flight

    async def result(self, flight: Waiting) -> Object:
        """What a request was answered with."""
        try:
            found: Json = await flight.future
        except asyncio.CancelledError:
            self.abandon(flight, "the caller does not wait any longer")
            raise
        finally:
            self._waiting.pop(flight.id, None)
        if type(found) is not dict:
            problem = RemoteProtocolError("the result is not an object")
            raise self._name(problem, flight.method)
        return found

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

    def _listen(self) -> None:
        tools = self.welcome.get("capabilities", {}).get("tools") or {}
        stateless = self.revision is not None and self.revision.stateless
        if stateless and tools.get("listChanged") is True and (self._listener is None or self._listener.done()):
            self._listener = self._loop.create_task(self._keep_listening())

    async def _keep_listening(self) -> None:
        clocks = Clocks(self.clocks.connect, self.clocks.first, FOREVER, FOREVER)
        pause = 0.5
        while self.dead is None:
            began = self._loop.time()
            try:
                wanted = {"notifications": {"toolsListChanged": True}}
                flight = self.begin("subscriptions/listen", wanted, clocks)
                await self.result(flight)
            except RemoteProtocolError as refused:
                log.debug("%s: changes are not announced: %s", self.name, refused)
                return
            except PeerError as problem:
                log.debug("%s: %s", self.name, problem)
            self.host.changed()  # whatever was said in between was missed
            pause = 0.5 if self._loop.time() - began > 60.0 else min(2 * pause, LONGEST_PAUSE)
            await asyncio.sleep(pause)
