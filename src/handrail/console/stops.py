"""What an operator has stopped: upstreams, tools and callers. `handrail stop` sets and lifts the same stops."""

from __future__ import annotations

from msgspec import Struct, ValidationError, convert

from handrail.console import upstreams
from handrail.console.access import ApiError, ApiRequest
from handrail.console.context import ConsoleContext
from handrail.gateway.stops import StopKind, delete_stop, put_stop, refresh_stops
from handrail.model import Object


class StopParams(Struct):
    kind: StopKind
    name: str
    on: bool  # False: stopped
    reason: str = ""  # callers are told


async def view(context: ConsoleContext, request: ApiRequest) -> Object:
    stops = context.engine.stops.items()
    return {"stops": [{"kind": kind, "name": name, "reason": reason} for (kind, name), reason in stops]}


async def change(context: ConsoleContext, request: ApiRequest) -> Object:
    """Stop an upstream, a tool or a caller in all workers, and cancel its calls; or let it work again."""
    try:
        params = convert(request.body, StopParams)
    except ValidationError as problem:
        raise ApiError(400, f"A stop is of a kind and a name, on or off, with a reason: {problem}") from None
    if params.kind == "upstream":
        upstreams.find(context, params.name)
    elif params.kind == "tool" and context.engine.find("tool", params.name)[0] is None and not params.on:
        raise ApiError(404, f"There is no tool {params.name[:200]!r}")
    step = f"{'started' if params.on else 'stopped'} {params.kind}"
    await context.write_audit_record(request.session, step, tool=params.name)
    await _put(context, params)
    await context.send_command("stop", request.body)
    return {}


async def apply(context: ConsoleContext, data: Object) -> None:
    context.spawn(_apply(context, convert(data, StopParams)))


async def _apply(context: ConsoleContext, params: StopParams) -> None:
    async with context.stop_lock:
        await _put(context, params)
        await refresh_stops(context.engine)
    await context.publish("tools", {})
    if params.on and params.kind == "upstream":
        await upstreams.find(context, params.name).refresh()


async def _put(context: ConsoleContext, params: StopParams) -> None:
    store = context.guards.store  # which the workers share, or each has its own
    if params.on:
        await delete_stop(store, params.kind, params.name)
    else:
        await put_stop(store, params.kind, params.name, params.reason)
