"""2026-07-28: no handshake. Each request says who speaks; input is asked for by answer and retry; lists are cached."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field, to_builtins
from msgspec.structs import replace

from handrail.errors import Kind
from handrail.model import ClientInfo, Json, Object, ToolResult
from handrail.revisions import base, r2025_11_25
from handrail.revisions.base import Fault, Identity, Peer, Welcome
from handrail.revisions.decode import flaws


class Envelope(base.Meta, kw_only=True):
    """What every request says of its sender."""

    version: str = field(name=base.VERSION)
    capabilities: Object = field(name=base.CAPABILITIES)
    client: Peer | UnsetType = field(default=UNSET, name=base.CLIENT_INFO)
    log_level: base.Level | UnsetType = field(default=UNSET, name=base.LOG_LEVEL)


class Params(Struct):
    meta: Envelope = field(name="_meta")


class ListParams(Params):
    cursor: str | UnsetType = UNSET


class CallParams(Params, kw_only=True):
    name: str
    arguments: Object = {}
    input_responses: dict[str, Object] | UnsetType = field(default=UNSET, name="inputResponses")
    request_state: str | UnsetType = field(default=UNSET, name="requestState")


class Filter(Struct, rename="camel"):
    tools_list_changed: bool = False


class ListenParams(Params, kw_only=True):
    notifications: Filter


def sender(params: Params) -> ClientInfo:
    who = Peer("", "") if params.meta.client is UNSET else params.meta.client
    return ClientInfo(who.name, who.version, who.title, params.meta.capabilities)


def welcome(it: Welcome) -> Object:
    out: Object = {
        "resultType": "complete",
        "supportedVersions": it.supported,
        "capabilities": it.capabilities,
        "ttlMs": it.ttl_ms,
        "cacheScope": "public",
    }
    if it.instructions is not UNSET:
        out["instructions"] = it.instructions
    return out


def page(tools: Json, cursor: str | UnsetType, ttl_ms: int, scope: str) -> Object:
    out: Object = {"resultType": "complete", "tools": tools, "ttlMs": ttl_ms, "cacheScope": scope}
    if cursor is not UNSET:
        out["nextCursor"] = cursor
    return out


def result(it: ToolResult, wraps: bool) -> Object:
    out: Object = {"resultType": "complete", "content": it.content, "isError": it.is_error}
    if it.structured is not UNSET:
        out["structuredContent"] = it.structured
    if it.meta is not UNSET:
        out["_meta"] = it.meta
    return out


def stamp(result: Object, identity: Identity) -> Object:
    result["_meta"] = {**result.get("_meta", {}), base.SERVER_INFO: identity}
    return result


REVISION = replace(
    r2025_11_25.REVISION,
    name="2026-07-28",
    stateless=True,
    primes=False,
    asks="retry",
    flaws=flaws,
    requests={
        "server/discover": Params,
        "tools/list": ListParams,
        "tools/call": CallParams,
        "subscriptions/listen": ListenParams,
    },
    envelope=Params,
    sender=sender,
    notifications=frozenset({"notifications/cancelled"}),
    welcome=welcome,
    tool=to_builtins,
    page=page,
    result=result,
    faults={
        **r2025_11_25.REVISION.faults,
        Kind.UNKNOWN_METHOD: Fault(-32601, 404),
        Kind.NEEDS_CAPABILITY: Fault(-32021, 400),
        Kind.NEEDS_URL: Fault(-32021, 400),
        Kind.VERSION: Fault(-32022, 400),
    },
    ask=lambda method, params: {k: v for k, v in params.items() if k != "elicitationId"},
    stamp=stamp,
)
