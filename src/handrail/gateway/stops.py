"""An operator's stops: upstream servers, tools and callers that are refused in all processes of one store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, cast

from handrail.engine.core import Engine
from handrail.stores import Store, StoreError

if TYPE_CHECKING:
    from handrail.gateway.upstreams import Upstreams

__all__ = ["StopKind", "delete_stop", "following_stops", "put_stop", "read_stops", "refresh_stops"]

log = logging.getLogger("handrail")

POLL_SECONDS = 0.5  # a stop counts within a second
PREFIX = "stop:"

StopKind = Literal["upstream", "tool", "caller"]


async def put_stop(store: Store, kind: StopKind, name: str, reason: str = "") -> None:
    """Stop an upstream, a tool or a caller, until `delete_stop`; `reason` goes to the callers."""
    await store.put(f"{PREFIX}{kind}:{name}", reason.encode())


async def delete_stop(store: Store, kind: StopKind, name: str) -> bool:
    """Return whether it was stopped."""
    return await store.delete(f"{PREFIX}{kind}:{name}")


async def read_stops(store: Store) -> dict[tuple[str, str], str]:
    """Return the reasons by kind and name."""
    stops: dict[tuple[str, str], str] = {}
    after = ""
    while rows := await store.scan(PREFIX, after=after):
        for key, reason in rows:
            kind, _, name = key.removeprefix(PREFIX).partition(":")
            stops[kind, name] = reason.decode("utf-8", "replace")
        after = rows[-1][0]
    return stops


@asynccontextmanager
async def following_stops(engine: Engine) -> AsyncIterator[None]:
    """Apply the stops of the server's store while it serves."""
    await refresh_stops(engine)
    task = asyncio.get_running_loop().create_task(_follow(engine))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _follow(engine: Engine) -> None:
    while True:
        await asyncio.sleep(POLL_SECONDS)
        try:
            await refresh_stops(engine)
        except StoreError as problem:
            log.error("stops: not read, the earlier ones hold: %s", problem)
        except Exception:
            log.exception("stops: not applied")


async def refresh_stops(engine: Engine) -> None:
    """Refuse new calls of what is stopped in the store now, and cancel those in flight."""
    stops = await read_stops(engine.guard_set.store)
    if stops == engine.stops:
        return
    before, engine.stops = engine.stops, stops
    for call in [] if engine.in_flight is None else [*engine.in_flight.tasks.values()]:
        if engine.stop_reason(call.entry, call.principal):
            call.cancel()
    upstreams = {} if engine.upstreams is None else dict(cast("Upstreams", engine.upstreams).by_name)
    for name, upstream in upstreams.items():
        upstream.parked.cancel_stopped(engine.stop_reason)
        if (reason := stops.get(("upstream", name))) is not None:
            await upstream.stop(reason)
        elif ("upstream", name) in before:
            upstream.start()
