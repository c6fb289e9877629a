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
from handrail.client.hearing import FOREVER, LISTEN, ConnectionHandler, ConnectionReceiver
from handrail.client.inflight import Clocks, InFlightRequest, Log, Progress, deadline_at
from handrail.client.negotiation import Negotiation
from handrail.client.targets import ServerTarget
from handrail.errors import CallTimeout, HttpRefused, PeerError, RemoteProtocolError, Sent, TransportError
from handrail.model import Object
from handrail.protocol.http_rules import mirrored_headers
from handrail.revisions import Revision
from handrail.revisions.base import CAPABILITIES, CLIENT_INFO, VERSION
from handrail.transports.base import ClientTransport, PendingRequest

log = logging.getLogger("handrail")

RESTARTS = 3  # within a minute, without a pause; then it doubles, up to
MAX_PAUSE_SECONDS = 30.0


class ClientConnection(ConnectionReceiver):
    """One server, over one transport at a time; a transport that died is made anew for the next request."""

    def __init__(
        self,
        target: ServerTarget,
        host: ConnectionHandler,
        *,
        clocks: Clocks,
        revision: str,
        client_info: Object,
        tap: Callable[[str, bytes], None] | None = None,
    ) -> None:
        super().__init__(target.name, host, tap)
        self.clocks = clocks
        self.client_info = client_info
        self.negotiation = Negotiation(self, revision, target.key)
        self.handshake_result: Object = {}
        self._make_transport = target.make_transport
        self._last_id = 0
        self._request_meta: Object = {}
        self._opener: asyncio.Task[None] | None = None  # whoever wants to be connected waits for the same
        self._closing_tasks: set[asyncio.Task[None]] = set()  # of transports that were let go of
        self._closed = False
        self._listener: asyncio.Task[None] | None = None
        self._is_subscribed = False

    # Beginning and end

    @property
    def is_open(self) -> bool:
        return self.failure is None and self._opener is None

    async def open(self) -> None:
        """Connect and find out what the server speaks, unless that is done."""
        if not self.is_open:
            await self._open_once(self._connect)

    async def _open_once(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do this, unless the like is being done already: who gives up waiting takes it from nobody."""
        if self._closed:
            raise TransportError("the client is closed", server=self.name)
        opener = self._opener
        if opener is None:
            opener = self._opener = self._loop.create_task(self._run_open(work))
            opener.add_done_callback(self._on_open_done)
        await asyncio.wait({opener})
        if opener.cancelled():
            raise TransportError("the client was closed", server=self.name)
        problem = opener.exception()
        if isinstance(problem, PeerError):
            raise _copy_error(problem) from problem
        if problem is not None:
            raise problem

    async def _run_open(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except BaseException as problem:
            if isinstance(problem, PeerError):
                self.add_context(problem, "connect")
            self._disconnect(problem if isinstance(problem, PeerError) else TransportError("not connected"))
            raise
        if self._is_subscribed:
            self._listen()

    def _on_open_done(self, opener: asyncio.Task[None]) -> None:
        self._opener = None
        if not opener.cancelled():
            opener.exception()  # seen: perhaps nobody waits any more

    async def _connect(self) -> None:
        if self._closing_tasks:
            await asyncio.wait(self._closing_tasks)
        await self._pause()
        await self.start()
        await self.negotiation.run()

    async def start(self) -> None:
        """A new transport."""
        if self.transport is not None:
            await self.transport.close()
        if self._closed:
            raise TransportError("the client is closed")
        self.revision, self.failure = None, None
        self.transport = self._make_transport()
        seconds = self.clocks.connect
        try:
            async with asyncio.timeout(seconds):
                await self.transport.open(self)
        except TimeoutError:
            raise CallTimeout(f"no connection within {seconds:g} s", clock="connect") from None

    def use_revision(self, revision: Revision, handshake_result: Object) -> None:
        """From now on this is spoken."""
        self.revision, self.handshake_result = revision, handshake_result
        self._request_meta = self.request_meta(revision)
        if self.transport is None:
            raise TransportError("the client was closed")
        self.transport.set_revision(revision)
        self.host.on_tools_changed()  # another process, or session, may have other tools

    async def close(self) -> None:
        """End the conversation; whoever waits is told."""
        self._closed = True
        if self._opener is not None:
            self._opener.cancel()
        self._disconnect(TransportError("the client was closed"))
        cancellation: asyncio.CancelledError | None = None
        while unfinished := {*self._closing_tasks, *filter(None, [self._opener])}:
            try:
                await asyncio.wait(unfinished)
            except asyncio.CancelledError as cancelled:  # then it ends at once, but it ends
                cancellation = cancelled
                for task in unfinished:
                    task.cancel()
        if cancellation is not None:
            raise cancellation

    def _disconnect(self, problem: PeerError) -> None:
        """Tell everybody who waits, and end the transport, which may take a while."""
        self.on_failure(problem)
        self._set_timer(FOREVER)
        tasks = [*self._response_tasks.values(), *filter(None, [self._listener])]
        for task in tasks:
            task.cancel()
        self._listener = None
        transport, self.transport = self.transport, None
        if transport is not None or tasks:
            ending = self._loop.create_task(self._close_transport(transport, tasks))
            self._closing_tasks.add(ending)
            ending.add_done_callback(self._closing_tasks.discard)

    async def _close_transport(self, transport: ClientTransport | None, tasks: list[asyncio.Task[None]]) -> None:
        try:
            if transport is not None:
                await transport.close()
        except Exception:
            log.exception("%s: the transport did not end as it should", self.name)
        finally:
            if tasks:
                await asyncio.wait(tasks, timeout=1.0)

    async def _pause(self) -> None:
        """A server that keeps dying is not started again at once."""
        now = self.now()
        self.failure_times = [each for each in self.failure_times if now - each < 60.0]
        extra = len(self.failure_times) - RESTARTS
        if extra >= 0:
            seconds = min(2.0**extra, MAX_PAUSE_SECONDS)
            if seconds > self.clocks.connect:
                raise TransportError(f"ended {len(self.failure_times)} times within a minute", server=self.name)
            await asyncio.sleep(seconds)

    # Requests

    def request_meta(self, revision: Revision) -> Object:
        """What every request of a stateless revision says of us."""
        capabilities = revision.declare(self.host.capabilities)
        return (
            {VERSION: revision.name, CLIENT_INFO: self.client_info, CAPABILITIES: capabilities}
            if revision.stateless
            else {}
        )

    async def request(
        self,
        method: str,
        params: Object,
        clocks: Clocks,
        deadline: float,
        *,
        header_map: dict[str, tuple[str, ...]] | None = None,
        on_event: Callable[[Progress | Log], None] | None = None,
        with_progress: bool = False,
    ) -> Object:
        """The result of a request; PeerError says why there is none.

        `tracked` asks for progress; `ends` is when its total clock fires.
        """
        if not self.is_open:
            async with deadline_at(deadline, clocks):
                await self.open()
        handshake_result = self.handshake_result
        pending = self.start_request(
            method, params, clocks, deadline, header_map=header_map, on_event=on_event, with_progress=with_progress
        )
        try:
            return await pending.future  # as `result` does: one coroutine less for every call
        except asyncio.CancelledError:
            self.cancel_request(pending)
            raise
        except HttpRefused as error:
            # The session is gone, and so nothing was done: shake hands anew, and say it once more.
            session_expired = error.status == 404 and error.sent is Sent.FAILED
            if not session_expired or self.revision is None or self.revision.stateless:
                raise
        if handshake_result is self.handshake_result:  # else another request has done so already
            async with deadline_at(deadline, clocks):
                await self._open_once(self.negotiation.initialize if self.failure is None else self._connect)
        pending = self.start_request(
            method, params, clocks, deadline, header_map=header_map, on_event=on_event, with_progress=with_progress
        )
        return await self.result(pending)

    def start_request(
        self,
        method: str,
        params: Object,
        clocks: Clocks,
        deadline: float | None = None,
        *,
        revision: Revision | None = None,
        header_map: dict[str, tuple[str, ...]] | None = None,
        on_event: Callable[[Progress | Log], None] | None = None,
        with_progress: bool = False,
    ) -> InFlightRequest:
        """Send a request. Its `future` is to be awaited by `result`."""
        transport = self.transport
        if transport is None:
            raise TransportError("the client is closed", server=self.name)
        self._last_id = request_id = self._last_id + 1
        now, future = self.now(), self._loop.create_future()
        deadline, check_at = now + clocks.total if deadline is None else deadline, now + clocks.first
        check_at = check_at if check_at < deadline else deadline
        pending = InFlightRequest(
            request_id,
            method,
            future,
            clocks=clocks,
            last_activity=now,
            check_at=check_at,
            total_deadline=deadline,
            on_event=on_event,
        )
        wire_revision = revision or self.revision
        if wire_revision is not None and wire_revision.stateless:
            meta: Object = {**self._request_meta} if revision is None else self.request_meta(wire_revision)
            if transport.disconnect_cancels:
                pending.headers = {
                    "MCP-Protocol-Version": wire_revision.name,
                    **mirrored_headers(method, params, header_map or {}),
                }
        else:
            meta = {}
        if with_progress:
            meta["progressToken"] = request_id
        if meta:
            caller_meta = params.get("_meta")
            params = {**params, "_meta": {**caller_meta, **meta} if caller_meta else meta}
        message = jsonrpc.request(request_id, method, params if params else UNSET)
        self._pending[request_id] = pending
        if pending.check_at < self._timer_at:
            self._set_timer(pending.check_at)
        if self.tap is not None:
            self._tap_message(">", message)
        transport.send(message, pending)
        return pending

    async def result(self, pending: PendingRequest) -> Object:
        """What a request was answered with."""
        try:
            return await pending.future
        except asyncio.CancelledError:
            self.cancel_request(pending)
            raise

    def discard(self, pending: PendingRequest) -> None:
        """Nobody waits any more, and the server need not know."""
        self._pending.pop(pending.id, None)

    def notify(self, method: str) -> None:
        self._reply(jsonrpc.notification(method))

    # What the server says unasked

    def subscribe(self) -> None:
        """Be told of changes, where that has to be asked for."""
        if not self._is_subscribed:
            self._is_subscribed = True
            self._listen()

    @property
    def has_list_changed(self) -> bool:
        """Whether the server says that it tells when its tools change."""
        tools = self.handshake_result.get("capabilities", {}).get("tools")
        return type(tools) is dict and tools.get("listChanged") is True

    def _listen(self) -> None:
        stateless = self.revision is not None and self.revision.stateless
        if stateless and self.has_list_changed and (self._listener is None or self._listener.done()):
            self._listener = self._loop.create_task(self._keep_listening())

    async def _keep_listening(self) -> None:
        clocks, pause = Clocks(self.clocks.connect, self.clocks.first, FOREVER, FOREVER), 0.5
        while self.failure is None:
            began = self.now()
            try:
                await self.result(self.start_request(LISTEN, {"notifications": {"toolsListChanged": True}}, clocks))
            except RemoteProtocolError as refused:
                log.debug("%s: changes are not announced: %s", self.name, refused)
                return
            except PeerError as problem:
                log.debug("%s: %s", self.name, problem)
            self.host.on_tools_changed()  # whatever was said in between was missed
            pause = 0.5 if self.now() - began > 60.0 else min(2 * pause, MAX_PAUSE_SECONDS)
            await asyncio.sleep(pause)


def _copy_error(problem: PeerError) -> PeerError:
    """The same for somebody else, who may say more of it."""
    error = type(problem).__new__(type(problem), *problem.args)
    vars(error).update(vars(problem))
    return error
