"""The client without `async`: for scripts and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import CancelledError
from typing import Any, TypeVar, overload

from handrail.client.client import OTHER_NAMES, Client
from handrail.client.results import CallResult
from handrail.client.tools import Tools
from handrail.errors import Sent, TransportError
from handrail.model import Object
from handrail.suggest import suggest_names

T = TypeVar("T")


@suggest_names(OTHER_NAMES)
class BlockingClient:
    """A client on an event loop and a thread of its own. Any thread may use and close it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="handrail-client", daemon=True)
        self._thread.start()
        try:
            self._run(client.__aenter__())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def tools(self, *, fresh: bool = False) -> Tools:
        return self._run(self._client.tools(fresh=fresh))

    @overload
    def call(self, name: str, arguments: Object | None = None, *, into: type[T], **options: Any) -> T: ...
    @overload
    def call(self, name: str, arguments: Object | None = None, *, into: None = None, **options: Any) -> CallResult: ...
    def call(self, name: str, arguments: Object | None = None, *, into: Any = None, **options: Any) -> Any:
        """Call a tool; the options are those of `Client.call`."""
        return self._run(self._client.call(name, arguments, into=into, **options))

    def events(self, name: str, arguments: Object | None = None, **options: Any) -> Iterator[Any]:
        """Call a tool and yield progress, log messages and the result; the options are those of `Client.events`."""
        events = self._client.events(name, arguments, **options)
        try:
            while (event := self._run(_next(events))) is not None:
                yield event
        finally:
            if not self._closed:  # else closing the client has ended the events, and its error says more
                self._run(_close(events))

    @property
    def revision(self) -> str:
        return self._client.revision

    @property
    def welcome(self) -> Object:
        return self._client.welcome

    @property
    def identity(self) -> Object:
        return self._client.identity

    @property
    def instructions(self) -> str:
        return self._client.instructions

    @property
    def problems(self) -> Any:
        return self._client.problems

    def close(self) -> None:
        """Close the client; calls that wait in other threads fail with TransportError."""
        if self._closed:
            return
        if threading.current_thread() is self._thread:
            raise RuntimeError("the client's own thread cannot close it")
        self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._close_client(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _close_client(self) -> None:
        """Close the client, then cancel the work of other threads that still waits."""
        await self._client.close()
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left, timeout=0.1)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed or threading.current_thread() is self._thread:
            work.close()
            why = "the client is closed" if self._closed else "the client's own thread cannot wait for it"
            raise TransportError(why)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise TransportError("the client was closed", sent=Sent.UNKNOWN) from None
        except BaseException:  # also Ctrl-C: the call is cancelled at the server too
            future.cancel()
            raise


async def _next(events: AsyncIterator[Any]) -> Any:
    return await anext(events, None)


async def _close(events: Any) -> None:
    while True:
        try:
            await events.aclose()
            return
        except RuntimeError:  # interrupted, and its cancellation is still under way
            await asyncio.sleep(0)
