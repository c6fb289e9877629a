"""What every message of ours must satisfy, whichever test it turns up in."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, NoReturn

import jsonschema_rs

from shared_texts import SCHEMAS

Json = Any
Object = dict[str, Any]

_SCHEMA_OF = {"pocket": "2025-06-18"}
_RESULT_OF = {
    "initialize": "InitializeResult",
    "tools/list": "ListToolsResult",
    "tools/call": "CallToolResult",
    "ping": "EmptyResult",
    "logging/setLevel": "EmptyResult",
    "server/discover": "DiscoverResult",
    "subscriptions/listen": "SubscriptionsListenResult",
    "resources/list": "ListResourcesResult",
    "resources/templates/list": "ListResourceTemplatesResult",
    "resources/read": "ReadResourceResult",
    "resources/subscribe": "EmptyResult",
    "resources/unsubscribe": "EmptyResult",
    "prompts/list": "ListPromptsResult",
    "prompts/get": "GetPromptResult",
    "completion/complete": "CompleteResult",
}
LISTS = {
    "tools/list": "tools",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
    "prompts/list": "prompts",
}
"""The methods that list something, and the member it stands under."""
_CACHED = (*LISTS, "server/discover", "resources/read")
_MAY_ASK = ("tools/call", "prompts/get", "resources/read")
_MESSAGE_OF = {
    "notifications/progress": "ProgressNotification",
    "notifications/message": "LoggingMessageNotification",
    "notifications/cancelled": "CancelledNotification",
    "notifications/tools/list_changed": "ToolListChangedNotification",
    "notifications/prompts/list_changed": "PromptListChangedNotification",
    "notifications/resources/list_changed": "ResourceListChangedNotification",
    "notifications/resources/updated": "ResourceUpdatedNotification",
    "notifications/subscriptions/acknowledged": "SubscriptionsAcknowledgedNotification",
    "notifications/elicitation/complete": "ElicitationCompleteNotification",
    "elicitation/create": "ElicitRequest",
    "sampling/createMessage": "CreateMessageRequest",
    "roots/list": "ListRootsRequest",
}


def strict_json(data: bytes) -> Json:
    """Parse with the standard library, as strictly as it can be made to be."""
    assert b"\n" not in data, "a newline inside a message"
    return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)


def _unique(pairs: list[tuple[str, Json]]) -> Object:
    made = dict(pairs)
    assert len(made) == len(pairs), f"a member stands twice: {pairs}"
    return made


def _refuse(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


@cache
def _validator(revision: str, name: str) -> jsonschema_rs.Validator | None:
    if SCHEMAS is None:
        return None
    path = SCHEMAS / f"{_SCHEMA_OF.get(revision, revision)}.json"
    if not path.exists():
        return None
    # One of the names in the oldest schema is not allowed in a reference.
    schema = json.loads(path.read_text("utf-8").replace("Record<string,string>", "RecordOfStrings"))
    home = "$defs" if "$defs" in schema else "definitions"
    if name not in schema[home]:
        raise AssertionError(f"{revision} has no {name}")
    whole = {"$schema": schema["$schema"], home: schema[home], "$ref": f"#/{home}/{name}"}
    return jsonschema_rs.validator_for(whole)


def _check_schema(value: Json, revision: str, name: str) -> None:
    validator = _validator(revision, name)
    if validator is not None:
        errors = [f"{each.instance_path}: {each.message}" for each in validator.iter_errors(value)]
        assert not errors, f"{revision} {name}: {errors}\n{json.dumps(value)[:2000]}"


# The members each revision may use. The schemas are open: without these lists a newer member would pass unseen.

_ORDER = ["2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"]


def _since(revision: str, first: str) -> bool:
    return _ORDER.index(_SCHEMA_OF.get(revision, revision)) >= _ORDER.index(first)


def _allowed_tool(revision: str) -> set[str]:
    allowed = {"name", "description", "inputSchema"}
    if _since(revision, "2025-03-26"):
        allowed |= {"annotations"}
    if _since(revision, "2025-06-18"):
        allowed |= {"outputSchema"}
    if _since(revision, "2025-06-18") and revision != "pocket":
        allowed |= {"title", "_meta"}
    if _since(revision, "2025-11-25"):
        allowed |= {"icons"}
    return allowed


def _allowed_entry(revision: str, method: str) -> set[str]:
    """The members of what is listed beside tools."""
    allowed = {"name", "description"}
    if method == "prompts/list":
        allowed |= {"arguments"}
    else:
        allowed |= {"uri" if method == "resources/list" else "uriTemplate", "mimeType"}
        if _since(revision, "2024-11-05"):
            allowed |= {"annotations"} | ({"size"} if method == "resources/list" else set())
    return allowed | _allowed_names(revision) | ({"icons"} if _since(revision, "2025-11-25") else set())


def _allowed_names(revision: str) -> set[str]:
    """Titles and `_meta` are of one age."""
    return {"title", "_meta"} if _since(revision, "2025-06-18") and revision != "pocket" else set()


def _allowed_capabilities(revision: str) -> dict[str, set[str]]:
    allowed: dict[str, set[str]] = {
        "tools": {"listChanged"},
        "prompts": {"listChanged"},
        "resources": {"listChanged", "subscribe"},
        "logging": set(),
    }
    return allowed | ({"completions": set()} if _since(revision, "2025-03-26") else {})


def _allowed_result(revision: str, method: str) -> set[str]:
    modern = _since(revision, "2026-07-28")
    table = {
        "initialize": {"protocolVersion", "capabilities", "serverInfo"},
        **{each: {member, "nextCursor"} for each, member in LISTS.items()},
        "tools/call": {"content", "isError", "_meta"},
        "resources/read": {"contents", "_meta"},
        "prompts/get": {"messages", "description", "_meta"},
        "completion/complete": {"completion"},
        "server/discover": {"supportedVersions", "capabilities", "instructions", "ttlMs", "cacheScope"},
    }
    allowed = set(table.get(method, set()))
    if method == "initialize" and _since(revision, "2024-11-05"):
        allowed |= {"instructions"}
    if method == "tools/call":
        if revision == "2024-10-07":
            return {"toolResult", "_meta"}
        if _since(revision, "2025-06-18"):
            allowed |= {"structuredContent"}
        if modern:
            allowed |= {"inputRequests", "requestState"}
    if modern:
        allowed |= {"resultType", "_meta"}
        if method in _CACHED:
            allowed |= {"ttlMs", "cacheScope"}
    return allowed


def _allowed_block(revision: str, kind: str) -> set[str]:
    table = {
        "text": {"type", "text"},
        "image": {"type", "data", "mimeType"},
        "resource": {"type", "resource"},
    }
    if _since(revision, "2025-03-26"):
        table["audio"] = {"type", "data", "mimeType"}
    if _since(revision, "2025-06-18"):
        table["resource_link"] = {"type", "uri", "name", "title", "description", "mimeType", "size"}
        if _since(revision, "2025-11-25"):
            table["resource_link"] |= {"icons"}
    assert kind in table, f"{revision} has no content of type {kind!r}"
    allowed = table[kind] | ({"annotations"} if _since(revision, "2024-11-05") else set())
    return allowed | {"_meta"} if _since(revision, "2025-06-18") and revision != "pocket" else allowed


def _only(value: Object, allowed: set[str], where: str) -> None:
    extra = set(value) - allowed
    assert not extra, f"{where}: {sorted(extra)} do not belong here: {json.dumps(value)[:500]}"


def _no_nulls(value: Json, where: str = "") -> None:
    if isinstance(value, dict):
        for name, each in value.items():
            if name in ("structuredContent", "toolResult", "data", "inputSchema", "outputSchema", "requestedSchema"):
                continue  # a value, or somebody else's JSON
            assert each is not None, f"{where}/{name} is null"
            _no_nulls(each, f"{where}/{name}")
    elif isinstance(value, list):
        for at, each in enumerate(value):
            _no_nulls(each, f"{where}/{at}")


def check_message(message: Object, revision: str, method: str | None) -> None:
    """Check one message we sent, in `revision`; `method` is what it answers, if it is an answer to a known one."""
    assert message["jsonrpc"] == "2.0"
    if "method" in message:
        _only(message, {"jsonrpc", "id", "method", "params"}, "message")
        _check_schema(message, revision, _MESSAGE_OF[message["method"]])
        _no_nulls(message)
        _check_notice(message, revision)
    elif "error" in message:
        _check_error(message, revision)
    else:
        _only(message, {"jsonrpc", "id", "result"}, "answer")
        _no_nulls(message)
        if method is not None:
            check_result(message["result"], revision, method)


def _check_notice(message: Object, revision: str) -> None:
    """A notice of a change: what it is about, and in a stateless revision whose subscription it answers."""
    method, params = message["method"], message.get("params", {})
    if not method.startswith("notifications/") or not method.endswith(("/list_changed", "/updated")):
        return
    modern = _since(revision, "2026-07-28")
    about = {"uri"} if method.endswith("/updated") else set()
    _only(params, about | ({"_meta"} if modern else set()), f"{revision} {method}")
    if modern and "params" in message:  # without them it is for a client of the other era on the same pipe
        assert "io.modelcontextprotocol/subscriptionId" in params["_meta"], "no subscription asked for it"


def _check_error(message: Object, revision: str) -> None:
    _only(message, {"jsonrpc", "id", "error"}, "error answer")
    _only(message["error"], {"code", "message", "data"}, "error")
    assert isinstance(message["error"]["code"], int)
    assert message["error"]["code"] != -32002 or not _since(revision, "2026-07-28"), "-32002 is not used any more"
    assert isinstance(message["error"]["message"], str)
    if "id" in message and message["id"] is None:
        assert not _since(revision, "2025-11-25"), "an unreadable id is omitted, not null"
        return  # JSON-RPC asks for null here; the old schemas do not know it
    if "id" in message:
        name = "JSONRPCErrorResponse" if _since(revision, "2025-11-25") else "JSONRPCError"
        _check_schema(message, revision, name)


def check_result(result: Object, revision: str, method: str) -> None:
    name = _RESULT_OF[method]
    if result.get("resultType") == "input_required":
        assert method in _MAY_ASK
        _only(result, {"resultType", "inputRequests", "requestState", "_meta"}, "input_required")
        _check_schema(result, revision, "InputRequiredResult")
        return
    _check_schema(result, revision, name)
    _only(result, _allowed_result(revision, method), f"{revision} {name}")
    if _since(revision, "2026-07-28"):
        assert result["resultType"] == "complete"
        if method in _CACHED:
            assert result["ttlMs"] >= 0
            assert result["cacheScope"] in ("public", "private")
    for tool in result.get("tools", ()):
        _only(tool, _allowed_tool(revision), f"{revision} Tool")
        if revision == "pocket":
            assert isinstance(tool["description"], str)
    if method in LISTS and method != "tools/list":
        for entry in result[LISTS[method]]:
            _check_entry(entry, revision, method)
    for block in result.get("content", ()):
        _check_block(block, revision)
    for message in result.get("messages", ()):
        _only(message, {"role", "content"}, f"{revision} PromptMessage")
        _check_block(message["content"], revision)
    for part in result.get("contents", ()):
        meta = _allowed_names(revision) & {"_meta"}
        _only(part, {"uri", "mimeType", "text", "blob"} | meta, f"{revision} contents")
        assert len({"text", "blob"} & set(part)) == 1, f"text or blob, one of them: {part}"
    if "completion" in result:
        _check_completion(result["completion"])
    if method == "tools/call" and revision == "pocket":
        assert result["content"]
        assert isinstance(result["structuredContent"], dict)
        assert isinstance(result["isError"], bool)
    if method in LISTS and revision == "pocket":
        assert isinstance(result["nextCursor"], str)
    if method == "initialize":
        info = {"name", "version"}
        if _since(revision, "2025-06-18"):
            info |= {"title"}
        if _since(revision, "2025-11-25"):
            info |= {"description", "icons", "websiteUrl"}
        _only(result["serverInfo"], info, f"{revision} serverInfo")
    if "capabilities" in result:
        capabilities = _allowed_capabilities(revision)
        _only(result["capabilities"], {*capabilities, "experimental", "extensions"}, f"{revision} capabilities")
        for name in capabilities.keys() & result["capabilities"].keys():
            _only(result["capabilities"][name], capabilities[name], f"{revision} capabilities.{name}")


def _check_entry(entry: Object, revision: str, method: str) -> None:
    _only(entry, _allowed_entry(revision, method), f"{revision} {method}")
    _check_annotations(entry, revision)
    for argument in entry.get("arguments", ()):
        names = {"name", "description", "required"} | (_allowed_names(revision) & {"title"})
        _only(argument, names, f"{revision} PromptArgument")


def _check_completion(completion: Object) -> None:
    _only(completion, {"values", "total", "hasMore"}, "completion")
    values, total = completion["values"], completion.get("total")
    assert len(values) <= 100
    assert total is None or total >= len(values)
    if total is not None and "hasMore" in completion:
        assert completion["hasMore"] is (total > len(values))


def _check_block(block: Object, revision: str) -> None:
    _only(block, _allowed_block(revision, block["type"]), f"{revision} {block['type']} block")
    _check_annotations(block, revision)
    if block["type"] == "resource" and not _since(revision, "2025-06-18"):
        _only(block["resource"], {"uri", "mimeType", "text", "blob"}, f"{revision} resource")


def _check_annotations(value: Object, revision: str) -> None:
    annotations = {"audience", "priority"} | ({"lastModified"} if _since(revision, "2025-06-18") else set())
    _only(value.get("annotations", {}), annotations, f"{revision} annotations")
