"""Down-levelling: what an older revision cannot say, said in the closest way it can."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from msgspec import UNSET, Struct, to_builtins

from handrail.errors import Kind, LocalProtocolError, Refused
from handrail.jsonrpc import encode
from handrail.model import Block, Json, Object, Text, ToolResult


class BlockRules(Struct, frozen=True):
    """What content blocks may hold in a revision."""

    types: frozenset[str] | None = None  # None: any, unknown ones included
    annotations: frozenset[str] | None = None  # members; None: any
    meta: bool = True
    icons: bool = True
    inner: bool = True  # whatever the author wrote inside an embedded resource stays there


def blocks(content: list[Block], rules: BlockRules) -> list[Json]:
    """Content blocks in the words of a revision."""
    for block in content:
        if type(block) is not Text or block.annotations is not UNSET or block.meta is not UNSET:
            return [made for block in content for made in _block(to_builtins(block), rules)]
    return content


def _block(block: Object, rules: BlockRules) -> Iterable[Object]:
    kind = block.get("type")
    if rules.types is not None and kind not in rules.types:
        yield from _replace(block, rules)
        return
    out = {k: v for k, v in block.items() if k not in ("annotations", "_meta", "icons")}
    annotations = block.get("annotations")
    if kind == "resource" and not rules.inner:
        inner = block.get("resource", {})
        out["resource"] = {k: inner[k] for k in ("uri", "mimeType", "text", "blob") if k in inner}
        if type(inner.get("annotations")) is dict:
            annotations = {**inner["annotations"], **(annotations or {})}
    elif kind == "resource" and not rules.meta:
        out["resource"] = {k: v for k, v in block.get("resource", {}).items() if k != "_meta"}
    if type(annotations) is dict:
        kept = annotations
        if rules.annotations is not None:
            kept = {k: v for k, v in annotations.items() if k in rules.annotations}
        if kept or rules.annotations is None:
            out["annotations"] = kept
    if rules.meta and "_meta" in block:
        out["_meta"] = block["_meta"]
    if rules.icons and "icons" in block:
        out["icons"] = block["icons"]
    yield out


def _replace(block: Object, rules: BlockRules) -> Iterable[Object]:
    kind = block.get("type")
    if kind == "audio":
        # The type is lost, the bytes are not: they move into an embedded resource.
        data = str(block.get("data", ""))
        digest = hashlib.sha256(data.encode()).hexdigest()[:16]
        mime = block.get("mimeType", "")
        size = len(data) * 3 // 4 - data.count("=")
        shown = f"{size / 1000:.0f} kB" if size >= 1000 else f"{size} B"
        resource = {"uri": f"urn:mcp-content:sha256:{digest}", "mimeType": mime, "blob": data}
        moved = {"type": "resource", "resource": resource}
        if "annotations" in block:
            moved["annotations"] = block["annotations"]
        yield from _block(moved, rules)
        yield {"type": "text", "text": f"[audio, {mime}, {shown}]"}
    elif kind == "resource_link":
        mime = f" ({block['mimeType']})" if "mimeType" in block else ""
        about = f"\n{block['description']}" if "description" in block else ""
        line = {"type": "text", "text": f"{block.get('name')} — {block.get('uri')}{mime}{about}"}
        if "annotations" in block:
            line["annotations"] = block["annotations"]
        yield from _block(line, rules)
    else:
        yield {"type": "text", "text": f"[unsupported content: {kind}]"}


def all_text(result: ToolResult) -> bool:
    return all(type(block) is Text for block in result.content)


_ONE = frozenset(
    "additionalItems additionalProperties contains contentSchema else if items not propertyNames then"
    " unevaluatedItems unevaluatedProperties".split()
)
_MANY = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})


def _rewrite(schema: Json, change: Callable[[Object], Object], *, into_ids: bool = True) -> Json:
    """A copy of a schema with `change` applied to every subschema object, innermost first."""
    if type(schema) is not dict:
        return schema
    out: Object = {}
    for key, value in schema.items():
        if key in _NAMED and type(value) is dict:
            value = {name: _step(each, change, into_ids) for name, each in value.items()}
        elif key in _MANY and type(value) is list:
            value = [_step(each, change, into_ids) for each in value]
        elif key in _ONE:
            value = _step(value, change, into_ids)
        out[key] = value
    return change(out)


def _step(schema: Json, change: Callable[[Object], Object], into_ids: bool) -> Json:
    if type(schema) is dict and "$id" in schema and not into_ids:
        return schema
    return _rewrite(schema, change, into_ids=into_ids)


def legacy_schema(schema: Object) -> Object:
    """Without header annotations, and with objects for the boolean property schemas only 2026-07-28 knows."""

    def change(sub: Object) -> Object:
        sub.pop("x-mcp-header", None)
        properties = sub.get("properties")
        if type(properties) is dict:
            for name, each in properties.items():
                if type(each) is bool:
                    properties[name] = {} if each else {"not": {}}
        return sub

    found: Object = _rewrite(schema, change)
    return found


def wrap_schema(schema: Object) -> Object:
    """An output schema of any root as the one member, `result`, of an object.

    Pointers into the same document move along; plain-name fragments and other documents do not.
    """

    def change(sub: Object) -> Object:
        for key in ("$ref", "$dynamicRef"):
            target = sub.get(key)
            if type(target) is str and (target == "#" or target.startswith("#/")):
                sub[key] = "#/properties/result" + target[1:]
        return sub

    inner = _rewrite(schema, change, into_ids=False) if "$id" not in schema else dict(schema)
    dialect = inner.pop("$schema", None)
    wrapped = {"type": "object", "properties": {"result": inner}, "required": ["result"]}
    return wrapped if dialect is None else {"$schema": dialect, **wrapped}


def dated_form(params: Object) -> Object:
    """A form in the words of 2025-06-18: no modes, flat choices with `enumNames`, defaults for booleans only."""
    if params.get("mode") == "url":
        raise Refused(
            Kind.NEEDS_URL, f"A browser step at {_host(params['url'])} is needed first; this client cannot open it"
        )
    properties: Object = {}
    required = list(params["requestedSchema"].get("required", []))
    for name, field in params["requestedSchema"]["properties"].items():
        if field.get("type") == "array":
            for at, (_, title) in enumerate(_options(field["items"])):
                properties[f"{name}__{at}"] = {"type": "boolean", "title": f"{field.get('title', name)}: {title}"}
            if name in required:
                required.remove(name)
            continue
        properties[name] = _dated_field(field)
    schema: Object = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    return {"message": params["message"], "requestedSchema": schema}


def _dated_field(field: Object) -> Object:
    out = dict(field)
    if "oneOf" in field:
        del out["oneOf"]
        out["enum"] = [const for const, _ in _options(field)]
        out["enumNames"] = [title for _, title in _options(field)]
    if field.get("type") != "boolean":
        out.pop("default", None)
    return out


def dated_answer(params: Object, answer: Object) -> Object:
    """What `dated_form` took apart, put together again."""
    content = answer.get("content")
    if type(content) is not dict or params.get("mode") == "url":
        return answer
    whole = dict(content)
    for name, field in params["requestedSchema"]["properties"].items():
        if field.get("type") == "array":
            options = _options(field["items"])
            chosen = [const for at, (const, _) in enumerate(options) if content.get(f"{name}__{at}") is True]
            for at in range(len(options)):
                whole.pop(f"{name}__{at}", None)
            whole[name] = chosen
    return {**answer, "content": whole}


def _options(field: Object) -> list[tuple[str, str]]:
    titled = field.get("oneOf") or field.get("anyOf")
    if titled:
        return [(option["const"], option.get("title", option["const"])) for option in titled]
    return [(value, value) for value in field.get("enum", [])]


def _host(url: str) -> str:
    return url.split("//", 1)[-1].split("/", 1)[0]


def dated_sampling(params: Object) -> Object:
    """A sampling request in the words before 2025-11-25: one block a message, no tools."""
    out = {k: v for k, v in params.items() if k not in ("tools", "toolChoice")}
    out["messages"] = [{**message, "content": _single(message["content"])} for message in params["messages"]]
    return out


def _single(content: Json) -> Json:
    if type(content) is not list:
        return content
    if len(content) != 1:
        raise LocalProtocolError("this client takes one content block a message; send one, or several messages")
    return content[0]


def json_text(value: Json) -> Text:
    return Text(encode(value).decode())
