"""Down-levelling: messages in the closest form that an older revision has."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Literal

from msgspec import UNSET, Struct, to_builtins

from handrail.errors import Kind, LocalProtocolError, Refused
from handrail.model import Block, EmbeddedResource, Json, Object, PromptResult, Text, Tool, ToolResult

# The members of a schema that hold schemas: one or a list of them, or a mapping from names to them.
_SCHEMA_KEYWORDS = frozenset(
    "additionalItems additionalProperties allOf anyOf contains contentSchema else if items not oneOf prefixItems"
    " propertyNames then unevaluatedItems unevaluatedProperties".split()
)
_SCHEMA_MAP_KEYWORDS = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
_BOOLEAN_SCHEMAS: dict[bool, Object] = {True: {}, False: {"not": {}}}


Structured = Literal["bare", "none", "object", "any"]


class BlockRules(Struct, frozen=True):
    """What content blocks may hold in a revision."""

    types: frozenset[str] | None = None  # None: any, unknown ones included
    annotations: frozenset[str] | None = None  # members; None: any
    drops: frozenset[str] = frozenset()
    inner: bool = True  # whatever the author wrote inside an embedded resource stays there


def blocks(content: list[Block], rules: BlockRules) -> list[Json]:
    """Return content blocks as a revision encodes them."""
    for block in content:
        if type(block) is not Text or block.annotations is not UNSET or block.meta is not UNSET:
            return [
                _drop_members(supported_block, rules)
                for each in content
                for supported_block in _supported_blocks(to_builtins(each), rules)
            ]
    return content


def _supported_blocks(block: Object, rules: BlockRules) -> list[Object]:
    """Return the block, or its closest form in the types of the revision."""
    kind, mime = block.get("type"), block.get("mimeType", "")
    if rules.types is None or kind in rules.types:
        return [block]
    members = {"annotations": block["annotations"]} if "annotations" in block else {}
    if kind == "audio":
        # The type is lost, the bytes are not: they move into an embedded resource.
        data = block["data"]
        digest = hashlib.sha256(data.encode()).hexdigest()[:16]
        resource = {"uri": f"urn:mcp-content:sha256:{digest}", "mimeType": mime, "blob": data}
        size = len(data) * 3 // 4 - data.count("=")
        size_text = f"{size / 1000:.0f} kB" if size >= 1000 else f"{size} B"
        text = {"type": "text", "text": f"[audio, {mime}, {size_text}]"}
        return [{"type": "resource", "resource": resource, **members}, text]
    if kind == "resource_link":
        line = f"{block['name']} — {block['uri']}" + (f" ({mime})" if "mimeType" in block else "")
        about = f"\n{block['description']}" if "description" in block else ""
        return [{"type": "text", "text": line + about, **members}]
    return [{"type": "text", "text": f"[unsupported content: {kind}]"}]


def _drop_members(block: Object, rules: BlockRules) -> Object:
    """The block without the members the revision lacks."""
    out = {k: v for k, v in block.items() if k not in rules.drops}
    if block.get("type") == "resource":
        resource = block.get("resource", {})
        if rules.inner:
            out["resource"] = {k: v for k, v in resource.items() if k != "_meta" or k not in rules.drops}
        else:
            out["resource"] = {k: resource[k] for k in ("uri", "mimeType", "text", "blob") if k in resource}
            out["annotations"] = {**resource.get("annotations", {}), **block.get("annotations", {})}
    if "annotations" in out and rules.annotations is not None:
        annotations = {k: v for k, v in out.pop("annotations").items() if k in rules.annotations}
        if annotations:
            out["annotations"] = annotations
    return out


_LOST_TYPES = {"audio": "LOSSY-12", "resource_link": "LOSSY-13"}


def losses(
    rules: BlockRules,
    structured: Structured,
    result: ToolResult,
    wraps: bool,
    *,
    has_flag: bool = True,
) -> list[str]:
    """Return what of a result a revision cannot express, each case by its id (docs/reference/translation.md).

    `has_flag`: its results say whether the tool failed.
    """
    lost: dict[str, None] = {}
    if result.structured is not UNSET and structured in ("object", "none"):
        if structured == "none":
            lost["LOSSY-08"] = None
        elif wraps or type(result.structured) is not dict:
            lost["LOSSY-03"] = None
    if result.is_error and not has_flag:
        lost["LOSSY-09"] = None
    for block in result.content:
        if type(block) is Text and block.annotations is UNSET and block.meta is UNSET:
            continue
        members = to_builtins(block)
        kind, annotations = members.get("type"), members.get("annotations", {})
        if rules.types is not None and kind not in rules.types:
            lost[_LOST_TYPES.get(kind, "LOSSY-15")] = None
        if "icons" in members and "icons" in rules.drops:
            lost["LOSSY-05"] = None
        if "_meta" in members and "_meta" in rules.drops:
            lost["LOSSY-06"] = None
        if rules.annotations is not None and annotations and not rules.annotations.issuperset(annotations):
            lost["LOSSY-14"] = None
    return [*lost]


def messages(result: PromptResult, rules: BlockRules | None) -> list[Object]:
    """Return the messages of a prompt; content that a revision lacks may become several of them."""
    pairs = zip(result.roles, result.content, strict=True)
    return [
        {"role": role, "content": each}
        for role, block in pairs
        for each in ([block] if rules is None else blocks([block], rules))
    ]


def prompt_result(rules: BlockRules | None, result: PromptResult) -> Object:
    out: Object = {"messages": messages(result, rules)}
    if result.description is not UNSET:
        out["description"] = result.description
    if result.meta is not UNSET:
        out["_meta"] = result.meta
    return out


def read_result(members: Sequence[str], result: ToolResult, ttl_ms: int, scope: str) -> Object:
    """Return the contents of a resource with these members."""
    parts = [block.resource for block in result.content if isinstance(block, EmbeddedResource)]
    out: Object = {"contents": [{name: part[name] for name in members if name in part} for part in parts]}
    if result.meta is not UNSET:
        out["_meta"] = result.meta
    return out


def definition(listed: Struct, rules: BlockRules) -> Object:
    """A resource, a template or a prompt without the members a revision lacks."""
    out: Object = {name: value for name, value in to_builtins(listed).items() if name not in rules.drops}
    if "arguments" in out:
        out["arguments"] = [{k: v for k, v in each.items() if k not in rules.drops} for each in out["arguments"]]
    if "annotations" in out and rules.annotations is not None:
        annotations = {k: v for k, v in out.pop("annotations").items() if k in rules.annotations}
        if annotations:
            out["annotations"] = annotations
    return out


def tool(definition: Tool, members: Sequence[str]) -> Object:
    """A tool with these members only, its schemas as every revision before 2026-07-28 wants them."""
    whole = to_builtins(definition)
    out = {name: whole[name] for name in members if name in whole}
    out["inputSchema"] = _rewrite_schema(definition.input_schema)
    if "outputSchema" in out:
        schema = out["outputSchema"]
        out["outputSchema"] = _rewrite_schema(schema) if schema.get("type") == "object" else _wrap_schema(schema)
    return out


def _wrap_schema(schema: Object) -> Object:
    """An output schema of any root as the one member, `result`, of an object."""
    inner = _rewrite_schema(schema, root="#/properties/result")
    dialect = {"$schema": inner.pop("$schema")} if "$schema" in inner else {}
    return {**dialect, "type": "object", "properties": {"result": inner}, "required": ["result"]}


def _rewrite_schema(schema: Json, *, root: str = "#") -> Json:
    """Without header annotations, with objects for boolean property schemas, and pointers to where the root is now."""
    if type(schema) is not dict:
        return schema
    root = "#" if "$id" in schema else root  # a document of its own: pointers in it stay as they are
    deeper = partial(_rewrite_schema, root=root)
    out: Object = {}
    for key, value in schema.items():
        if key in _SCHEMA_MAP_KEYWORDS and type(value) is dict:
            value = {name: deeper(each) for name, each in value.items()}
        elif key in _SCHEMA_KEYWORDS:
            value = [deeper(each) for each in value] if type(value) is list else deeper(value)
        elif key in ("$ref", "$dynamicRef") and type(value) is str and (value == "#" or value.startswith("#/")):
            value = root + value[1:]
        if key == "properties" and type(value) is dict:
            value = {name: _BOOLEAN_SCHEMAS[each] if type(each) is bool else each for name, each in value.items()}
        if key != "x-mcp-header":
            out[key] = value
    return out


def encode_input(method: str, params: Object) -> Object:
    """A question in the words before 2025-11-25."""
    if method == "elicitation/create":
        return _encode_form(params)
    if method != "sampling/createMessage":
        return params
    out = {k: v for k, v in params.items() if k not in ("tools", "toolChoice")}
    out["messages"] = [dict(message) for message in params["messages"]]
    for message in out["messages"]:
        if type(message["content"]) is list:
            if len(message["content"]) != 1:
                raise LocalProtocolError("this client takes one content block a message; send one, or several messages")
            [message["content"]] = message["content"]
    return out


def _encode_form(params: Object) -> Object:
    """No modes, flat choices with `enumNames`, defaults for booleans only; a choice of several as boxes to tick."""
    if params.get("mode") == "url":
        host = params["url"].split("//", 1)[-1].split("/", 1)[0]
        raise Refused(Kind.NEEDS_URL, f"A browser step at {host} is needed first; this client cannot open it")
    requested_schema = params["requestedSchema"]
    properties: Object = {}
    for name, field in requested_schema["properties"].items():
        if field.get("type") == "array":
            for key, _, title in _checkboxes(name, field):
                properties[key] = {"type": "boolean", "title": f"{field.get('title', name)}: {title}"}
            continue
        plain = field.get("type") != "boolean"
        properties[name] = {k: v for k, v in field.items() if k != "oneOf" and not (plain and k == "default")}
        if "oneOf" in field:
            options = _options(field)
            properties[name] |= {"enum": [each for each, _ in options], "enumNames": [title for _, title in options]}
    schema: Object = {"type": "object", "properties": properties}
    required = [name for name in requested_schema.get("required", []) if name in properties]
    if required:
        schema["required"] = required
    return {"message": params["message"], "requestedSchema": schema}


def decode_input(params: Object, answer: Object) -> Object:
    """The answer to a form, the boxes ticked in it put together to lists again."""
    content = answer.get("content")
    if "requestedSchema" not in params or type(content) is not dict:
        return answer
    whole = dict(content)
    for name, field in params["requestedSchema"]["properties"].items():
        if field.get("type") == "array":
            whole[name] = [const for key, const, _ in _checkboxes(name, field) if whole.pop(key, None) is True]
    return {**answer, "content": whole}


def _checkboxes(name: str, field: Object) -> list[tuple[str, str, str]]:
    return [(f"{name}__{at}", const, title) for at, (const, title) in enumerate(_options(field["items"]))]


def _options(field: Object) -> list[tuple[str, str]]:
    titled = field.get("oneOf") or field.get("anyOf") or [{"const": value} for value in field.get("enum", [])]
    return [(option["const"], option.get("title", option["const"])) for option in titled]


def declare(capabilities: Object, *, elicits: bool = False) -> Object:
    """What a client can be asked, in a revision without modes of elicitation; `elicits` if it has that at all."""
    out = {name: value for name, value in capabilities.items() if name in ("experimental", "roots", "sampling")}
    if elicits and "form" in capabilities.get("elicitation", {}):
        out["elicitation"] = {}
    if "sampling" in out:
        out["sampling"] = {}
    return out
