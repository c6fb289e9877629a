"""The Revision type, and the parts several revisions share: reading parameters, writing tools, results and faults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal, get_args

from msgspec import UNSET, Struct, UnsetType, field, to_builtins

from handrail import jsonrpc
from handrail.errors import Kind, Refused
from handrail.jsonrpc import Id
from handrail.model import ClientInfo, Json, Object, Tool, ToolResult

# The reserved members of `_meta`. Only stateless revisions write them; every revision must recognise the first.
VERSION = "io.modelcontextprotocol/protocolVersion"
CLIENT_INFO = "io.modelcontextprotocol/clientInfo"
CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
LOG_LEVEL = "io.modelcontextprotocol/logLevel"
SERVER_INFO = "io.modelcontextprotocol/serverInfo"
SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"

Level = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
LEVELS = get_args(Level)


class Meta(Struct):
    """What is read from a request's `_meta`. A trace may be of any type: a bad one is ignored, not refused."""

    traceparent: Json = UNSET
    tracestate: Json = UNSET
    baggage: Json = UNSET
    progress_token: int | str | UnsetType = field(default=UNSET, name="progressToken")


class ListParams(Struct):
    cursor: str | UnsetType = UNSET
    meta: Meta | UnsetType = field(default=UNSET, name="_meta")


class CallParams(Struct):
    name: str
    arguments: Object = {}
    meta: Meta | UnsetType = field(default=UNSET, name="_meta")


class LevelParams(Struct):
    level: Level


class ReadParams(Struct):
    uri: str
    meta: Meta | UnsetType = field(default=UNSET, name="_meta")


class PromptParams(Struct):
    name: str
    arguments: dict[str, str] = {}
    meta: Meta | UnsetType = field(default=UNSET, name="_meta")


class PromptReference(Struct, tag_field="type", tag="ref/prompt"):
    kind: ClassVar[str] = "prompt"
    name: str


class ResourceReference(Struct, tag_field="type", tag="ref/resource"):
    kind: ClassVar[str] = "resource template"
    uri: str


class CompletionArgument(Struct):
    name: str
    value: str


class CompletionContext(Struct, frozen=True):
    """The arguments that have values already."""

    arguments: dict[str, str] = {}


class CompleteParams(Struct):
    ref: PromptReference | ResourceReference
    argument: CompletionArgument
    meta: Meta | UnsetType = field(default=UNSET, name="_meta")


class CompleteInContextParams(CompleteParams):
    context: CompletionContext = CompletionContext()


class Implementation(Struct):
    name: str
    version: str
    title: str | UnsetType = UNSET


class InitializeParams(Struct, rename="camel"):
    protocol_version: str
    capabilities: Object
    client_info: Implementation


class ErrorMapping(Struct, frozen=True):
    """The form of a kind of failure: a JSON-RPC error with this code, or (0) a result of the tool."""

    code: int
    status: int = 200


class Identity(Struct, frozen=True, rename="camel"):
    """The name, version and description of a server."""

    name: str
    version: str
    title: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    icons: list[Object] | UnsetType = UNSET
    website_url: str | UnsetType = UNSET


class ServerDescription(Struct, frozen=True):
    """Everything that the result of `initialize` or `server/discover` may contain; a revision encodes its part."""

    identity: Identity
    capabilities: Object
    instructions: str | UnsetType
    supported: list[str]
    ttl_ms: int


_DEFINITION_LOSSES = {
    "title": "LOSSY-01",
    "outputSchema": "LOSSY-02",
    "annotations": "LOSSY-04",
    "icons": "LOSSY-05",
    "_meta": "LOSSY-06",
}


class Revision(Struct, frozen=True, kw_only=True):
    """One dated dialect of the protocol, as data: its methods, and how messages are encoded and decoded."""

    name: str
    stateless: bool = False  # each request names its own revision
    offered: bool = True  # may be named to a peer that did not ask for it
    batches: bool = False
    pages: bool = True  # the list comes in pages even if no page size was set
    always_announces: bool = False  # change notices are part of the dialect and cannot be switched off
    http_default: bool = False  # over HTTP: what a client speaks that does not say
    version_header: bool = True  # over HTTP: every request after the handshake names the revision
    priming_event: bool = False  # over HTTP: a stream begins with an event that only carries an id
    no_optional_members: bool = False  # no member is left out: an empty one stands for none
    null_id: bool = True  # an error about an unreadable message says `"id": null`
    progress_message: bool = False
    elicitation_modes: bool = False  # pages beside forms, and choices with titles as `oneOf`
    typed_meta: bool = False  # `_meta` of a request may hold more than a progress token
    input_mode: Literal["request", "retry"] = "request"
    input_methods: frozenset[str] = frozenset({"sampling/createMessage", "roots/list"})
    requests: Mapping[str, Any]  # method -> its parameters; absent: unknown method
    envelope: type | None = None  # what the parameters of every request must hold, of any method too
    notifications: frozenset[str]
    sender: Callable[[Any], ClientInfo] | None = (
        None  # the client that a request names; None: the client of the handshake
    )
    tool: Callable[[Tool], Object]
    definition: Callable[[Struct], Object]  # a resource, a template or a prompt as it is listed
    server_capabilities: frozenset[str] = frozenset({"experimental", "logging", "tools", "resources", "prompts"})
    encoders: Mapping[str, Callable[..., Object]]
    """By method, what encodes its result.

    `initialize`, `server/discover`: of a ServerDescription. Lists: of (entries, cursor, time to live in ms, cache
    scope). `tools/call`: of (ToolResult, whether a value of any type is wrapped in an object). `resources/read`: of
    (ToolResult, time to live in ms, cache scope). `prompts/get`: of PromptResult. `completion/complete`: of the values.
    """
    structured: Literal["bare", "none", "object", "any"] = "bare"
    """Where a result has structured data: it is the result, nowhere, in a member that holds an object, or any value."""
    losses: Callable[[ToolResult, bool], list[str]] = (
        lambda result, wraps: []
    )  # what of a result cannot be expressed; a gateway counts it
    read: Callable[[Object], ToolResult]  # the inverse, for clients
    read_block: Callable[[Json], Any] = lambda block: None
    """Of a block that `read` left as it came: what is left of it without bad optional members."""
    result_problems: Callable[[Object], list[str]]  # what is wrong with the members of a result that came
    declare: Callable[[Object], Object]  # a client's capabilities, in the words of this revision
    error_mappings: Mapping[Kind, ErrorMapping]
    explain: Callable[[Refused], tuple[str, Json]]
    encode_input: Callable[[str, Object], Object]  # a question's parameters, in the words of this revision
    decode_input: Callable[
        [Object, Object], Object
    ]  # (what we wanted to ask, the answer) -> the answer in the model's words
    add_server_info: Callable[[Object, Identity], Object] | None = (
        None  # what every result carries beside its own members
    )

    def definition_losses(self, listed: Struct) -> list[str]:
        """Return what of a tool, a resource, a template or a prompt the revision cannot express."""
        whole, out = to_builtins(listed), self.tool(listed) if isinstance(listed, Tool) else self.definition(listed)
        lost = [case for member, case in _DEFINITION_LOSSES.items() if member in whole and member not in out]
        if not isinstance(listed, Tool):
            lost = [each for each in lost if each != "LOSSY-04"]
            return [*lost, "LOSSY-14"] if whole.get("annotations") != out.get("annotations") else lost
        if "title" in whole and whole["title"] == out.get("annotations", {}).get("title"):
            lost = [each for each in lost if each != "LOSSY-01"]
        is_wrapped = "outputSchema" in out and whole["outputSchema"].get("type") != "object"
        return [*lost, "LOSSY-03"] if is_wrapped and out["outputSchema"].get("type") == "object" else lost

    def error(self, request_id: Id | UnsetType, code: int, refused: Refused) -> bytes:
        """Return the JSON-RPC error for a refusal."""
        return jsonrpc.error(None if request_id is UNSET and self.null_id else request_id, code, *self.explain(refused))


def initialize_result(
    server: ServerDescription, *, info: Collection[str] = ("name", "version"), with_instructions: bool = True
) -> Object:
    """Return the result of `initialize`, with these members of `serverInfo`."""
    server_info = {name: value for name, value in to_builtins(server.identity).items() if name in info}
    out: Object = {"capabilities": server.capabilities, "serverInfo": server_info}
    if with_instructions and server.instructions is not UNSET:
        out["instructions"] = server.instructions
    return out


def explain(refused: Refused) -> tuple[str, Json]:
    return refused.prefix + refused.text, refused.data if refused.data is not None else UNSET


LISTS = {
    "tools/list": "tools",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
    "prompts/list": "prompts",
}
"""The methods that list, and the member of their results that has the entries."""

MAX_COMPLETIONS = 100
MAX_COUNTED_COMPLETIONS = 10_000  # of more, the total is not said


def completion_result(values: list[str]) -> Object:
    """Return the result of `completion/complete`; `values` are all there are, or one more than are counted."""
    total = {"total": len(values)} if len(values) <= MAX_COUNTED_COMPLETIONS else {}
    return {"completion": {"values": values[:MAX_COMPLETIONS], **total, "hasMore": len(values) > MAX_COMPLETIONS}}


# A kind that is missing here becomes a result of the tool.
ERROR_MAPPINGS: Mapping[Kind, ErrorMapping] = {
    **dict.fromkeys(Kind, ErrorMapping(0)),
    Kind.PARSE: ErrorMapping(-32700, 400),
    Kind.INVALID_REQUEST: ErrorMapping(-32600, 400),
    Kind.UNKNOWN_METHOD: ErrorMapping(-32601),
    **dict.fromkeys(
        (Kind.BAD_PARAMS, Kind.UNKNOWN_TOOL, Kind.UNKNOWN_PROMPT, Kind.BAD_ARGUMENTS), ErrorMapping(-32602)
    ),
    Kind.UNKNOWN_RESOURCE: ErrorMapping(-32002),
    Kind.OVERLOADED: ErrorMapping(429, 429),
    Kind.FORBIDDEN: ErrorMapping(403, 403),
    Kind.VERSION: ErrorMapping(-32602, 400),
    Kind.INTERNAL: ErrorMapping(-32603),
    Kind.UNRECORDED: ErrorMapping(-32603, 503),
    Kind.ENVELOPE: ErrorMapping(-32602, 400),
    Kind.MISMATCH: ErrorMapping(-32020, 400),
    Kind.NO_SESSION: ErrorMapping(-32600, 404),
}

REFUSAL_ERRORS: Mapping[Kind, ErrorMapping] = {
    Kind.BAD_ARGUMENTS: ErrorMapping(-32602),
    Kind.THROTTLED: ErrorMapping(429, 429),
    Kind.DENIED: ErrorMapping(403, 403),
    Kind.PENDING: ErrorMapping(403, 403),
    Kind.TIMEOUT: ErrorMapping(408),
}
"""What becomes a result of a tool, and is an error (else -32603) where a result has no place for failures."""
