"""From what an upstream lists to entries of the catalog, and from what it answers to results and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from msgspec import UNSET, Struct, UnsetType
from msgspec.json import decode as parse
from msgspec.structs import replace

from handrail.client.tools import ListedEntry, ListedTool, safe_icons
from handrail.engine.call import Call
from handrail.engine.catalog import ToolEntry, make_entry
from handrail.engine.completion import Completer, RequestPeer
from handrail.engine.prompts import PromptEntry, make_prompt_entry
from handrail.engine.resources import ResourceEntry, make_resource_entry, unknown_resource
from handrail.errors import (
    AuthorizationError,
    CallTimeout,
    HttpRefused,
    InvalidResult,
    Kind,
    PeerError,
    Refused,
    RemoteProtocolError,
    Sent,
    ToolError,
    TransportError,
)
from handrail.gateway.settings import Terms, short_name
from handrail.gateway.trust import ACCEPTED_HINTS, Verdict, propose_class
from handrail.jsonrpc import encode
from handrail.model import (
    REFUSED,
    EmbeddedResource,
    Json,
    Object,
    Prompt,
    PromptResult,
    Text,
    Tool,
    ToolResult,
)
from handrail.protocol.uri_template import UriTemplate
from handrail.revisions import Revision
from handrail.revisions.base import SERVER_INFO

__all__ = ["failure_of", "prompt_entry", "prompt_result", "read_result", "resource_entry", "tool_entry", "tool_result"]

Send = Callable[[Object, Call], Coroutine[Any, Any, ToolResult]]
"""Sends a call with these arguments to the upstream."""

MAX_TITLE_CHARS = 200
MAX_ERROR_CHARS = 2_000
MAX_ERROR_DATA_BYTES = 16 * 1024
_ADDRESS = re.compile(r"\b[a-z]+://\S+|(?<![\w.])(?:/[\w.@+-]+){2,}|\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?")
_HINTS = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")
_ANNOTATIONS = frozenset({"audience", "priority", "lastModified"})
_KNOWN_BLOCKS = frozenset({"text", "image", "audio", "resource_link", "resource"})
_NOT_PASSED_ON = frozenset({REFUSED, SERVER_INFO})  # of `_meta`: they speak of this gateway, not of its upstream
_INVALID_PARAMS, _MISSING_CAPABILITY, _URL_REQUIRED, _NOT_FOUND = -32602, -32021, -32042, -32002
_SAME_KINDS = {
    -32700: Kind.PARSE,
    -32600: Kind.INVALID_REQUEST,
    -32601: Kind.UNKNOWN_METHOD,
    _MISSING_CAPABILITY: Kind.NEEDS_CAPABILITY,
}
_RESERVED = range(-32768, -31999)


# Entries


def _text(raw: Object, name: str) -> str | UnsetType:
    value: Json = raw.get(name)
    return value if type(value) is str else UNSET


def _about(raw: Object) -> Object:
    """Return the members that every listed thing may have, as far as they are what they should be."""
    about: Object = {name: _text(raw, name) for name in ("title", "description")}
    if type(about["title"]) is str:
        about["title"] = about["title"][:MAX_TITLE_CHARS]
    about["icons"] = safe_icons(raw.get("icons")) or UNSET
    about["meta"] = raw["_meta"] if type(raw.get("_meta")) is dict else UNSET
    return about


def tool_name(terms: Terms, own_name: str) -> str:
    """Return the name of an upstream's tool here."""
    return short_name(terms.prefix + terms.rename.get(own_name, own_name))


def tool_entry(listed: ListedTool, name: str, terms: Terms, verdict: Verdict, owner: Any, send: Send) -> ToolEntry:
    """Return the entry of an upstream's tool; SchemaError if its definition cannot be used."""
    raw = listed.raw
    claims: Object = {
        hint: value for hint, value in listed.annotations.items() if hint in _HINTS and type(value) is bool
    }
    if claims.get("readOnlyHint") and claims.get("destructiveHint"):
        del claims["readOnlyHint"]
    if type(title := listed.annotations.get("title")) is str:
        claims["title"] = title[:MAX_TITLE_CHARS]
    output = raw.get("outputSchema")
    tool = Tool(
        name=name,
        input_schema={"type": "object", **listed.input_schema},
        output_schema=output if type(output) is dict else UNSET,
        annotations=claims if type(raw.get("annotations")) is dict else UNSET,
        **_about(raw),
    )
    if (text := terms.describe.get(listed.own_name)) is not None:
        tool = replace(tool, description=text)
    entry = make_entry(tool, invoke=send, dangerous=UNSET, **_run_options(terms, owner))
    believes = terms.trusted and verdict.state != "new"  # a tool that came later was never looked at
    entry.trusted = believes or bool(verdict.accepted)
    accepted = verdict.accepted
    if believes and not accepted and not {"readOnlyHint", "destructiveHint"} & claims.keys():
        accepted = propose_class(raw)  # half of the public servers give no hints
    entry.hints = dict(ACCEPTED_HINTS[accepted]) if accepted else None
    entry.withheld = verdict.withheld
    return entry


def _run_options(terms: Terms, owner: Any) -> Object:
    return {
        "mode": "async",
        "idle": terms.idle,
        "total": terms.total,
        "tags": frozenset(),
        "owner": owner,
        "upstream": terms.name,
        "takes_call": True,
    }


Complete = Callable[[str, str, dict[str, str], RequestPeer], Coroutine[Any, Any, list[str]]]
"""Asks the upstream for values: the argument, its value so far, the other arguments, and who asks."""


def _completers(names: Any, complete: Complete | None) -> dict[str, Completer]:
    if complete is None:
        return {}

    def completer(name: str, ask: Complete) -> Completer:
        async def values(value: str, context: dict[str, str], peer: RequestPeer) -> list[str]:
            return await ask(name, value, context, peer)

        return Completer(values, takes_context=True, takes_peer=True)

    return {name: completer(name, complete) for name in names}


def resource_entry(
    listed: ListedEntry, terms: Terms, owner: Any, send: Send, complete: Complete | None = None
) -> ResourceEntry:
    """Return the entry of a resource or a template; SchemaError or ValueError if it cannot be used."""
    raw, uri = listed.raw, listed.own_name
    about = {**_about(raw), "name": str(raw.get("name") or uri)}
    if type(raw.get("mimeType")) is str:
        about["mime_type"] = raw["mimeType"]
    if type(size := raw.get("size")) is int and size >= 0 and "{" not in uri:
        about["size"] = size
    if type(raw.get("annotations")) is dict:
        about["annotations"] = raw["annotations"]
    names = UriTemplate(uri).names if "{" in uri else ()
    schema: Object = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "additionalProperties": False,
    }
    entry = make_resource_entry(uri, about, schema, invoke=send, **_run_options(terms, owner))
    entry.complete = _completers(names, complete)
    return entry


def prompt_entry(
    listed: ListedEntry, terms: Terms, owner: Any, send: Send, complete: Complete | None = None
) -> PromptEntry:
    """Return the entry of a prompt; SchemaError if its definition cannot be used."""
    raw = listed.raw
    arguments = raw.get("arguments")
    listed_arguments = (
        [each for each in arguments if type(each) is dict and type(each.get("name")) is str] if arguments else []
    )
    properties: Object = {}
    for each in listed_arguments:
        texts = {key: each[key] for key in ("title", "description") if type(each.get(key)) is str}
        properties[each["name"]] = {"type": "string", **texts}
    schema: Object = {
        "type": "object",
        "properties": properties,
        "required": [each["name"] for each in listed_arguments if each.get("required") is True],
        "additionalProperties": False,
    }
    prompt = Prompt(name=short_name(terms.prefix + listed.own_name), **_about(raw))
    entry = make_prompt_entry(prompt, schema, invoke=send, **_run_options(terms, owner))
    entry.complete = _completers(properties, complete)
    return entry


# Results


def tool_result(raw: Object, revision: Revision, caller_revision: Revision, entry: ToolEntry) -> ToolResult:
    """Return the result of an upstream's tool in the neutral form, its data also as a text for callers that need it."""
    if type(raw.get("content", [])) is not list:
        raise InvalidResult("its content is not a list of blocks", result=raw)
    result = revision.read(raw)
    if result.structured is None and revision.structured == "object":
        result.structured = UNSET  # there, data is an object: null stands for none
    if result.structured is UNSET and entry.output is not None and raw.get("structuredContent") == {}:
        result.structured = {}  # a revision without optional members writes "none" like this, if there is no schema
    blocks = [each if _is_plain_text(each) else _block(each, revision) for each in result.content]
    structured, kind = result.structured, caller_revision.structured
    needs_text = kind == "none" or (kind == "any" and type(structured) is not dict)
    if (
        structured is not UNSET
        and needs_text
        and not any(type(each) is Text and _is_json_of(each.text, structured) for each in blocks)
    ):
        blocks.append(Text(encode(structured).decode()))
    result.content = blocks
    result.meta = _meta(result.meta)
    return result


def _is_plain_text(block: Any) -> bool:
    return type(block) is Text and block.annotations is UNSET


def _is_json_of(text: str, value: Json) -> bool:
    try:
        return bool(parse(text) == value)
    except ValueError:
        return False


def _block(block: Any, revision: Revision) -> Any:
    """Return a block that can leave: one of a known type that is malformed becomes a text that says so."""
    if type(block) is dict and type(block.get("type")) is str and block["type"] not in _KNOWN_BLOCKS:
        return block  # revisions that know it pass it on
    if not isinstance(block, Struct):
        kind = block.get("type") if type(block) is dict else None
        block = revision.read_block(block)
        if block is None:
            return Text(f"[malformed {kind if type(kind) is str else 'content'} of the upstream server]")
    annotations = block.annotations
    if annotations is not UNSET and not _ANNOTATIONS.issuperset(annotations):
        return replace(block, annotations={name: annotations[name] for name in _ANNOTATIONS & annotations.keys()})
    return block


def _meta(meta: Json) -> Object | UnsetType:
    if type(meta) is not dict:
        return UNSET
    members = {name: value for name, value in meta.items() if name not in _NOT_PASSED_ON}
    return members or UNSET


def read_result(raw: Object, *_: object) -> ToolResult:
    """Return the contents of an upstream's resource."""
    contents = raw.get("contents")
    if type(contents) is not list:
        raise InvalidResult("there is no list of contents", result=raw)
    try:
        return ToolResult([EmbeddedResource(dict(each)) for each in contents], meta=_meta(raw.get("_meta")))
    except (TypeError, ValueError) as problem:
        raise InvalidResult(f"malformed contents: {problem}", result=raw) from None


def prompt_result(raw: Object, revision: Revision, *_: object) -> PromptResult:
    """Return the messages of an upstream's prompt."""
    messages = raw.get("messages")
    if type(messages) is not list or not all(type(each) is dict for each in messages):
        raise InvalidResult("there is no list of messages", result=raw)
    content = [
        _block(block, revision)
        for each in messages
        for block in revision.read({"content": [each.get("content")]}).content
    ]
    roles = ["assistant" if each.get("role") == "assistant" else "user" for each in messages]
    return PromptResult(content, meta=_meta(raw.get("_meta")), roles=roles)


# Failures


def failure_of(problem: PeerError, name: str, method: str, uri: str = "") -> Refused | ToolError:
    """Return what a caller is told of a failure of the upstream `name`, by its kind (GW-15)."""
    status = problem.status if isinstance(problem, HttpRefused) else 0
    if isinstance(problem, InvalidResult):
        return ToolError(f"{name} gave a malformed result: {_plain(problem.text)}")
    if status == 429:
        assert isinstance(problem, HttpRefused)
        text = f"{name} takes no more calls now; try again later."
        return Refused(Kind.THROTTLED, text, retry_after=problem.retry_after or 1.0)
    if status in (401, 403) or isinstance(problem, AuthorizationError):
        # Its challenge is for the gateway, and is not passed on (LOSSY-21).
        return ToolError(f"{name} did not accept the gateway's credentials; its operator has to renew them.")
    if status:
        return ToolError(f"{name} answered with the HTTP status {status} ({_sent(problem)}).")
    if isinstance(problem, RemoteProtocolError) and problem.code:
        return _refusal(problem, name, method, uri)
    if isinstance(problem, CallTimeout):
        return ToolError(f"{name} did not answer in time ({_sent(problem)}).")
    if isinstance(problem, TransportError):
        return ToolError(f"{name} cannot be reached: {_plain(problem.text)} ({_sent(problem)}).")
    return ToolError(f"{name}: {_plain(problem.text)} ({_sent(problem)}).")


def _plain(text: str) -> str:
    """Return the text of an error without addresses and paths, and not too long; the log has all of it."""
    return _ADDRESS.sub("…", text[: 2 * MAX_ERROR_CHARS])[:MAX_ERROR_CHARS]


def _small(data: Object | None) -> Object | None:
    """Return the data of an error if it is not too large."""
    return data if data is None or len(encode(data)) <= MAX_ERROR_DATA_BYTES else None


def _sent(problem: PeerError) -> str:
    is_refused = isinstance(problem, HttpRefused) and 400 <= problem.status < 500
    return "nothing was done" if problem.sent is Sent.NO or is_refused else "the outcome is unknown"


def _first_host(data: Json) -> str:
    """Return the host of the first page that has to be visited; never its path, which may hold a secret."""
    pages = data.get("elicitations") if type(data) is dict else None
    url = pages[0].get("url") if type(pages) is list and pages and type(pages[0]) is dict else None
    try:
        return (urlsplit(url).hostname or "")[:200] if type(url) is str else ""
    except ValueError:
        return ""


def _refusal(problem: RemoteProtocolError, name: str, method: str, uri: str) -> Refused | ToolError:
    code, text, data = problem.code, problem.text[:MAX_ERROR_CHARS], problem.data
    members = _small(data if type(data) is dict else None)
    if code == _NOT_FOUND and method == "resources/read":
        return unknown_resource(uri)
    if code == _INVALID_PARAMS:
        if method == "resources/read" and members is not None and "uri" in members:
            return unknown_resource(uri)
        return Refused(Kind.BAD_ARGUMENTS, text, members)
    if code == _MISSING_CAPABILITY:
        required = None if members is None else {"requiredCapabilities": members.get("requiredCapabilities", {})}
        return Refused(Kind.NEEDS_CAPABILITY, text, required)
    if code == _URL_REQUIRED:
        host = _first_host(data)
        where = f" at {host}" if host else ""
        text = f"{name}: a step in a browser{where} is needed first; this client cannot open it"
        return Refused(Kind.NEEDS_URL, text)
    if code in _SAME_KINDS:
        return Refused(_SAME_KINDS[code], text, members)
    if code not in _RESERVED and abs(code) < 1 << 31:
        return Refused(Kind.FAILED, text, members, code=code)
    return Refused(
        Kind.INTERNAL,
        f"{name}: {text}",
        {"upstream": {"code": str(code) if abs(code) >= 1 << 31 else code, "message": text}},
    )
