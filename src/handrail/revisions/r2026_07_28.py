"""2026-07-28: no handshake. Each request says who speaks; input is asked for by answer and retry; lists are cached."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET, Struct, UnsetType, field, to_builtins
from msgspec.structs import replace

from handrail.errors import Kind
from handrail.model import ClientInfo, Json, Object, ToolResult
from handrail.revisions import base, downlevel as levels, r2025_06_18, r2025_11_25
from handrail.revisions.base import ErrorMapping, Identity, Implementation, ServerDescription
from handrail.revisions.decode import result_problems


class Envelope(base.Meta, kw_only=True):
    """What every request says of its sender."""

    version: str = field(name=base.VERSION)
    capabilities: Object = field(name=base.CAPABILITIES)
    client: Implementation | UnsetType = field(default=UNSET, name=base.CLIENT_INFO)
    log_level: base.Level | UnsetType = field(default=UNSET, name=base.LOG_LEVEL)


class StatelessParams(Struct):
    meta: Envelope = field(name="_meta")


class StatelessListParams(StatelessParams):
    cursor: str | UnsetType = UNSET


class StatelessCallParams(StatelessParams, kw_only=True):
    name: str
    arguments: Object = {}
    input_responses: dict[str, Object] | UnsetType = field(default=UNSET, name="inputResponses")
    request_state: str | UnsetType = field(default=UNSET, name="requestState")


class StatelessReadParams(StatelessParams, kw_only=True):
    uri: str
    input_responses: dict[str, Object] | UnsetType = field(default=UNSET, name="inputResponses")
    request_state: str | UnsetType = field(default=UNSET, name="requestState")


class StatelessPromptParams(StatelessParams, kw_only=True):
    name: str
    arguments: dict[str, str] = {}
    input_responses: dict[str, Object] | UnsetType = field(default=UNSET, name="inputResponses")
    request_state: str | UnsetType = field(default=UNSET, name="requestState")


class StatelessCompleteParams(StatelessParams, kw_only=True):
    ref: base.PromptReference | base.ResourceReference
    argument: base.CompletionArgument
    context: base.CompletionContext = base.CompletionContext()


class NotificationFilter(Struct, rename="camel"):
    tools_list_changed: bool = False
    prompts_list_changed: bool = False
    resources_list_changed: bool = False
    resource_subscriptions: list[str] = []


class ListenParams(StatelessParams, kw_only=True):
    notifications: NotificationFilter


def sender(params: StatelessParams) -> ClientInfo:
    client_info = Implementation("", "") if params.meta.client is UNSET else params.meta.client
    return ClientInfo(client_info.name, client_info.version, client_info.title, params.meta.capabilities)


def discover_result(server: ServerDescription) -> Object:
    out: Object = {
        "resultType": "complete",
        "supportedVersions": server.supported,
        "capabilities": server.capabilities,
        "ttlMs": server.ttl_ms,
        "cacheScope": "public",
    }
    if server.instructions is not UNSET:
        out["instructions"] = server.instructions
    return out


def page(member: str, entries: Json, cursor: str | UnsetType, ttl_ms: int, scope: str) -> Object:
    out: Object = {"resultType": "complete", member: entries, "ttlMs": ttl_ms, "cacheScope": scope}
    if cursor is not UNSET:
        out["nextCursor"] = cursor
    return out


def result(tool_result: ToolResult, wraps: bool) -> Object:
    out: Object = {"resultType": "complete", "content": tool_result.content, "isError": tool_result.is_error}
    if tool_result.structured is not UNSET:
        out["structuredContent"] = tool_result.structured
    if tool_result.meta is not UNSET:
        out["_meta"] = tool_result.meta
    return out


def read_result(tool_result: ToolResult, ttl_ms: int, scope: str) -> Object:
    out = levels.read_result(r2025_06_18.CONTENTS, tool_result, ttl_ms, scope)
    return {"resultType": "complete", **out, "ttlMs": ttl_ms, "cacheScope": scope}


def add_server_info(result: Object, identity: Identity) -> Object:
    result["_meta"] = {**result.get("_meta", {}), base.SERVER_INFO: identity}
    return result


REVISION = replace(
    r2025_11_25.REVISION,
    name="2026-07-28",
    stateless=True,
    priming_event=False,
    input_mode="retry",
    result_problems=result_problems,
    requests={
        "server/discover": StatelessParams,
        "tools/list": StatelessListParams,
        "tools/call": StatelessCallParams,
        "resources/list": StatelessListParams,
        "resources/templates/list": StatelessListParams,
        "resources/read": StatelessReadParams,
        "prompts/list": StatelessListParams,
        "prompts/get": StatelessPromptParams,
        "completion/complete": StatelessCompleteParams,
        "subscriptions/listen": ListenParams,
    },
    envelope=StatelessParams,
    sender=sender,
    notifications=frozenset({"notifications/cancelled"}),
    encoders={
        "server/discover": discover_result,
        **{method: partial(page, member) for method, member in base.LISTS.items()},
        "tools/call": result,
        "resources/read": read_result,
        "prompts/get": lambda result: {"resultType": "complete", **levels.prompt_result(None, result)},
        "completion/complete": lambda values: {"resultType": "complete", **base.completion_result(values)},
    },
    tool=to_builtins,
    structured="any",
    losses=lambda result, wraps: [],
    error_mappings={
        **r2025_11_25.REVISION.error_mappings,
        Kind.UNKNOWN_METHOD: ErrorMapping(-32601, 404),
        Kind.UNKNOWN_RESOURCE: ErrorMapping(-32602),
        Kind.NEEDS_CAPABILITY: ErrorMapping(-32021, 400),
        Kind.NEEDS_URL: ErrorMapping(-32021, 400),
        Kind.VERSION: ErrorMapping(-32022, 400),
    },
    encode_input=lambda method, params: {k: v for k, v in params.items() if k != "elicitationId"},
    add_server_info=add_server_info,
)
