"""The engine of one server: its tools, limits, keys, guards, middleware and threads, shared by all connections."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from handrail import jsonrpc
from handrail.engine.catalog import Catalog, ToolCatalog, ToolEntry
from handrail.engine.completion import CompletionPool
from handrail.engine.eager import ThreadPool
from handrail.engine.guard_set import GuardOptions, GuardSet, check_guard_options, owner_of
from handrail.engine.outcome import CallSink, RequestOrigin
from handrail.engine.pipeline import Handler, Middleware, Pipeline, compose
from handrail.engine.prompts import PromptEntry
from handrail.engine.reply_channel import OpenStream, Reply
from handrail.engine.resources import ResourceEntry, TemplateCatalog, find_resource
from handrail.engine.results import error_result
from handrail.errors import Kind, Refused
from handrail.guards.policy import SubjectKind
from handrail.jsonrpc import Id, Request
from handrail.model import REFUSED, SERVER_ASKS, ClientInfo, Object, Principal
from handrail.protocol.seal import KEY_HINT, Seal, key_problem
from handrail.revisions import Offer, Revision
from handrail.revisions.base import LISTS, REFUSAL_ERRORS, ErrorMapping, Identity, ServerDescription
from handrail.suggest import check_options, collection, expect

if TYPE_CHECKING:
    from handrail.engine.call_state import CallPeer
    from handrail.engine.inflight import InFlightCalls

log = logging.getLogger("handrail")

DEFAULT_PAGE = 1_000

_RESULT = ErrorMapping(0)  # a refusal as the result of the tool
_READABLE = ErrorMapping(403, 403)  # a refusal that a model may read, where a result has no place for it
_FAILED = ErrorMapping(-32603)
LIST_CHANGED = {each: f"notifications/{each}/list_changed" for each in ("tools", "resources", "prompts")}
"""The notifications of changed lists, by capability."""
KINDS: dict[str, SubjectKind] = {"tools/call": "tool", "resources/read": "resource", "prompts/get": "prompt"}
"""What the methods that run a function are about."""
_OF_RESOURCES = [f"resources/{each}" for each in ("list", "templates/list", "read", "subscribe", "unsubscribe")]

_FORMS = {
    "by_revision": {},
    "error": {Kind.BAD_ARGUMENTS: ErrorMapping(-32602)},
    "result": {Kind.BAD_ARGUMENTS: ErrorMapping(0)},
}


class Limits(Struct, frozen=True, kw_only=True):
    """Sizes and times that no peer can exceed."""

    max_message_bytes: int = 4 * 1024 * 1024  # of one message, in and out
    max_calls: int = 256  # in flight, of one peer
    max_unsent_bytes: int = 1024 * 1024  # to one peer; more has to wait until the peer reads
    write_seconds: float = 30.0  # a peer that reads nothing for so long is disconnected
    grace_seconds: float = 3.0  # for calls in flight when the server stops

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            expect(f"Limits: {name}", getattr(self, name), "a number", int, float)
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not more than 0")


class Holder(Protocol):
    """Another replica, which runs the upstream of a call."""

    @property
    def address(self) -> str: ...

    async def still_holds(self) -> bool: ...

    async def give_up(self) -> None:
        """End its lease: it cannot be reached."""


class UpstreamSet(Protocol):
    """The upstream servers whose entries stand in the catalogs of this one, as requests need them."""

    def prepare(self, method: str, peer: CallPeer, revision: Revision, client: ClientInfo) -> Ready:
        """Have the entries of a list ready for a client; return what to wait for, if that takes time."""

    def own_entry(self, entry: ToolEntry, peer: CallPeer, revision: Revision, client: ClientInfo) -> ToolEntry | None:
        """Return what a client has in place of an entry; None if its upstream does not list it for that client."""

    def why_absent(self, name: str, peer: CallPeer, revision: Revision, client: ClientInfo) -> str:
        """Return why a name may be missing: an upstream that may have it could not be listed. Empty if none is."""

    def hidden(self, method: str, peer: CallPeer, revision: Revision, client: ClientInfo) -> frozenset[str]:
        """Return the names in a list that upstreams do not show to a client."""

    def variants(self, method: str, peer: CallPeer, revision: Revision, client: ClientInfo) -> tuple[ToolEntry, ...]:
        """Return the entries of a list that a client has in place of those in the catalog."""

    def instructions(self, own: str | UnsetType) -> str | UnsetType:
        """Return the server's instructions for models, with those of upstreams under headings."""

    def is_up(self, name: str) -> bool:
        """Return whether an upstream of this name answers, as far as is known."""

    def is_leased(self, entry: ToolEntry) -> bool:
        """Return whether one replica of several runs the upstream of an entry for a caller."""

    async def other_holder(self, entry: ToolEntry, owner: str) -> Holder | None:
        """Return the replica that runs the upstream of an entry for a caller; None: this one does."""

    def cache_hint(self, method: str) -> tuple[int, bool]:
        """Return for how many milliseconds a list may be kept, and whether it is for one caller only."""

    async def finish_sign_in(self, name: str, query: str) -> tuple[int, str]:
        """Take a browser that comes back from signing in to an upstream; return status and HTML text of its page."""

    def watch(
        self,
        entry: ToolEntry,
        peer: CallPeer,
        revision: Revision,
        client: ClientInfo,
        is_wanted: Callable[[], Awaitable[object]],
    ) -> None:
        """Have the upstream of a resource announce its updates, as long as the client is subscribed."""


Ready = Awaitable[None] | None


class ServerOptions(GuardOptions, total=False):
    """Options of a server.

    version: the server's own version ("0.0.0")
    title: the name that people read
    description: what the server is for
    icons: icons as the protocol writes them: src, mimeType, sizes
    website_url: a page about the server
    instructions: how a model should use these tools together
    page_size: entries on one page of a list (1,000; all of them for 2024-10-07)
    list_changed: notify clients when the tools, resources or prompts change (True)
    tools: False: the server has no tools and says so (True)
    revisions: the names of the revisions to speak (all)
    workers: threads for `def` tools (16)
    keys: secrets that seal cursors and request states; the first seals, all open (those in HANDRAIL_KEY, else random)
    identify: name the server in every result of 2026-07-28 (True)
    cache_seconds: how long a client may keep the list (60)
    invalid_arguments: report them as "error" or as "result" ("by_revision")
    limits: sizes and times (Limits())
    tracing: an OpenTelemetry span for each call (False)
    """

    version: str
    title: str
    description: str
    icons: list[Object]
    website_url: str
    instructions: str
    page_size: int
    list_changed: bool
    tools: bool
    revisions: Iterable[str]
    workers: int
    keys: list[bytes]
    identify: bool
    cache_seconds: float
    invalid_arguments: Literal["by_revision", "error", "result"]
    limits: Limits
    tracing: bool


_MEANT: dict[str, tuple[str, *tuple[type, ...]]] = {
    **dict.fromkeys(("version", "title", "description", "website_url", "instructions"), ("a text", str)),
    **dict.fromkeys(("list_changed", "identify", "tracing"), ("True or False", bool)),
    "tools": ("True or False (functions are added with @server.tool or server.add)", bool),
    "page_size": ("a number of entries", int),
    "workers": ("a number of threads", int),
    "cache_seconds": ("a number of seconds", int, float),
    "limits": ("Limits(…)", Limits),
}


class Engine:
    """One server, as its connections use it."""

    def __init__(self, owner: Any, name: str, options: ServerOptions) -> None:
        check_options(f"server {name!r}", options, ServerOptions.__annotations__)
        expect("Server: name", name, "a text", str)
        for option, value in options.items():
            if value is not None and option in _MEANT:
                expect(f"server {name!r}: {option}", value, *_MEANT[option])
        guards = {key: value for key, value in options.items() if key in GuardOptions.__annotations__}
        options = cast(ServerOptions, {key: value for key, value in options.items() if value is not None})
        self.owner = owner
        about: Object = {key: value for key, value in options.items() if key in Identity.__struct_fields__}
        if "icons" in about:
            about["icons"] = collection(f"server {name!r}: icons", about["icons"], "icons")
        self.identity = Identity(**{"name": name, "version": "0.0.0", **about})
        self.instructions = options.get("instructions", UNSET)
        self.author_metadata = self.identity, self.instructions  # as the author wrote them, before sanitizing
        self.offer = Offer(options.get("revisions"))
        self.limits = options.get("limits") or Limits()
        self.page_size = options.get("page_size")
        if self.page_size is not None and self.page_size < 1:
            raise ValueError(f"page_size: {self.page_size} is less than 1")
        self.list_changed = options.get("list_changed", True)
        self.has_tools = options.get("tools", True)
        self.identify = options.get("identify", True)
        self.ttl_ms = round(options.get("cache_seconds", 60.0) * 1000)
        form = options.get("invalid_arguments", "by_revision")
        if form not in _FORMS:
            raise ValueError(f"invalid_arguments: {form!r} is not one of {', '.join(_FORMS)}")
        self.forms = _FORMS[form]
        keys = collection(f"server {name!r}: keys", options.get("keys", ()), "bytes")
        self.seal = Seal(keys or keys_from_environment())
        self.has_shared_key = bool(keys) or "HANDRAIL_KEY" in os.environ
        self.clock: Callable[[], float] = time.time
        self.catalog = ToolCatalog("tool")
        self.resources: Catalog[ResourceEntry] = Catalog("resource")
        self.templates = TemplateCatalog("resource template")
        self.prompts: Catalog[PromptEntry] = Catalog("prompt")
        self.catalogs: dict[str, Catalog[Any]] = {
            "tools/list": self.catalog,
            "resources/list": self.resources,
            "resources/templates/list": self.templates,
            "prompts/list": self.prompts,
        }
        self.upstreams: UpstreamSet | None = None
        self.has_leases = False  # one replica of several runs the commands of a caller
        self.address = ""  # at which other replicas reach the HTTP endpoint; empty: nothing is passed on to this one
        self.stops: dict[tuple[str, str], str] = {}  # what an operator has stopped, by kind and name, with the reason
        self.hidden: set[str] = set()  # methods behind a capability that is not declared
        self._hide_methods()
        for method, catalog in self.catalogs.items():
            catalog.watchers.append(partial(self._on_list_changed, LIST_CHANGED[method.partition("/")[0]]))
        self.on_resource_updated: set[Callable[[str, str], None]] = set()  # publish updates to other processes
        self.in_flight: InFlightCalls | None = None  # of the event loop that serves, as a rule there is one
        self.thread_pool = ThreadPool(options.get("workers", 16))
        self.completion_pool = CompletionPool()
        self.open_streams: set[OpenStream] = set()
        self.changing_for = ""  # the owner whose list a change of a catalog is about; empty: it is about all
        self.on_loss: list[Callable[[str, str, int], None]] = []  # upstream, case, how often; losses outside of calls
        self.middleware: list[Middleware] = []
        self.sinks: tuple[CallSink, ...] = ()
        self.on_request: Callable[[RequestOrigin, Request], None] | None = None  # after any request but a call
        self.guard_set = GuardSet(name, lambda: self.clock())
        self.pipeline = Pipeline(self.thread_pool, self.guard_set)
        self._handle: Handler  # the pipeline, inside the middleware
        self.guard_options: GuardOptions = {}  # all that were set
        self.guard(cast(GuardOptions, guards))

    def guard(self, options: GuardOptions) -> None:
        """Set guards; the others stay as they are."""
        self.guard_options = {**self.guard_options, **check_guard_options(options, f"server {self.identity.name!r}")}
        self.guard_set.configure(self.guard_options)
        self.identity, self.instructions = self.author_metadata
        if (sanitizer := self.guard_set.sanitizer) is not None:
            self.instructions = sanitizer.value(self.instructions)
            title, description = map(sanitizer.value, (self.identity.title, self.identity.description))
            self.identity = replace(self.identity, title=title, description=description)
        self._compose()

    def _on_list_changed(self, method: str) -> None:
        self._hide_methods()
        for stream in list(self.open_streams):
            if not self.changing_for or owner_of(stream.principal, stream.address) == self.changing_for:
                stream.list_changed(method)

    def announce_lists(self) -> None:
        """Notify all peers that the lists may have changed."""
        for method in LIST_CHANGED.values():
            self._on_list_changed(method)

    def _hide_methods(self) -> None:
        """Hide the methods of what the server does not have; any thread may read the set meanwhile."""
        has_upstreams = self.upstreams is not None  # what they have is known later
        has_resources = has_upstreams or self.resources.has_entries or self.templates.has_entries
        has_prompts = has_upstreams or self.prompts.has_entries
        for has_any, methods in (
            (self.has_tools, ("tools/list", "tools/call")),
            (has_resources, _OF_RESOURCES),
            (has_prompts, ("prompts/list", "prompts/get")),
            (self.templates.has_entries or has_prompts, ("completion/complete",)),
        ):
            (self.hidden.difference_update if has_any else self.hidden.update)(methods)

    def use_upstreams(self, upstreams: UpstreamSet) -> None:
        """Serve what upstream servers have beside the server's own."""
        self.upstreams = upstreams
        self._hide_methods()

    def record_loss(self, upstream: str, case: str, count: int = 1) -> None:
        """Count what could not be carried between two revisions, and belongs to no call."""
        for record in self.on_loss:
            record(upstream, case, count)

    def stop_reason(self, entry: ToolEntry, principal: Principal) -> str:
        """Return why an operator has stopped an upstream, a tool or a caller; empty if none of them is stopped."""
        for key in (("upstream", entry.upstream), ("tool", entry.name), ("caller", principal.id)):
            if (reason := self.stops.get(key)) is not None:
                return reason or f"The {key[0]} {key[1]} was stopped by an operator. Nothing was done."
        return ""

    def add_resource(self, entry: ResourceEntry) -> None:
        if entry.template is None:
            self.resources.add(entry)
        else:
            self.templates.add(entry)

    def find(self, kind: SubjectKind, name: str) -> tuple[ToolEntry | None, Object]:
        """Return the tool or prompt of a name, or what reads a URI with the variables in it; None if there is none."""
        if kind != "resource":
            return (self.catalog if kind == "tool" else self.prompts).get(name), {}
        match = find_resource(self.resources, self.templates, name)
        if match is None:
            return None, {}
        entry, variables = match
        masked = self.guard_set.mask_arguments(variables) if variables else variables
        if masked != variables and entry.template is not None:  # people and the audit log see the label
            entry.label = entry.template.expand(masked).replace("%2A", "*")
        return entry, variables

    def resource_updated(self, uri: str, owner: str = "") -> None:
        """Notify the subscribers of a resource, or those of one owner, in all processes, from any thread."""
        self.notify_subscribers(uri, owner)
        for publish in list(self.on_resource_updated):
            publish(uri, owner)

    def notify_subscribers(self, uri: str, owner: str = "") -> None:
        """Notify the subscribers of a resource, or those of one owner, in this process."""
        entry, _ = self.find("resource", uri)
        if entry is None:
            log.warning("resources: update of %.200s: there is no such resource", uri)
            return
        for stream in list(self.open_streams):
            if not owner or owner_of(stream.principal, stream.address) == owner:
                stream.resource_updated(entry)

    def announces(self, revision: Revision) -> bool:
        """Whether peers of a revision are notified when a list changes."""
        return self.list_changed or revision.always_announces

    def announced_lists(self, revision: Revision) -> list[str]:
        """Return the capabilities whose changes are announced."""
        is_declared = {each.partition("/")[0]: each not in self.hidden for each in LISTS}
        return [each for each in LIST_CHANGED if is_declared[each]] if self.announces(revision) else []

    def add_middleware(self, middleware: Middleware) -> None:
        self.middleware.append(middleware)
        self._compose()

    def add_sink(self, sink: CallSink) -> None:
        """Let a sink observe the calls that start from now on."""
        self.sinks = (*self.sinks, sink)

    def _compose(self) -> None:
        self._handle = compose(self.middleware, self.pipeline, self.guard_set)

    def handler_of(self, entry: ToolEntry) -> Handler:
        """Return the handler of a tool; one of an included server has that server's middleware inside ours."""
        if not entry.via:
            return self._handle
        theirs = [each for server in entry.via for each in server.engine.middleware]
        return compose([*self.middleware, *theirs], self.pipeline, self.guard_set)

    def page_size_for(self, revision: Revision) -> int:
        """Return how many tools a page has; 0: all."""
        return self.page_size or (DEFAULT_PAGE if revision.pages else 0)

    def handshake_result(self, method: str, revision: Revision, *, asks_user: bool = False) -> Object:
        """Return the result of the handshake; `asks_user`: the server asks the user before a destructive tool runs."""
        capabilities: Object = {"logging": {}}
        if asks_user:
            capabilities["experimental"] = {SERVER_ASKS: {}}
        changes: Object = {"listChanged": True} if self.announces(revision) else {}
        if self.has_tools:
            capabilities["tools"] = changes
        if "resources/read" not in self.hidden:
            capabilities["resources"] = {"subscribe": True, **changes}
        if "prompts/get" not in self.hidden:
            capabilities["prompts"] = changes
        if "completion/complete" not in self.hidden and "completions" in revision.server_capabilities:
            capabilities["completions"] = {}
        instructions = self.instructions
        if self.upstreams is not None:
            instructions = self.upstreams.instructions(instructions)
        return revision.encoders[method](
            ServerDescription(self.identity, capabilities, instructions, self.offer.supported, self.ttl_ms)
        )

    def encode_response(self, revision: Revision, request_id: Id, result: Object) -> Reply:
        if revision.add_server_info is not None and self.identify:
            result = revision.add_server_info(result, self.identity)
        return Reply(jsonrpc.response(request_id, result))

    def encode_refusal(
        self, revision: Revision, request_id: Id | UnsetType, refused: Refused, *, method: str = "tools/call"
    ) -> Reply:
        """Return a refusal in the form that the revision, or the option `invalid_arguments`, gives its kind.

        Only the result of `tools/call` has a place for failures; of any other method they are errors.
        """
        sanitizer = self.guard_set.sanitizer
        if sanitizer is not None:
            refused.text = sanitizer.text(refused.text)
            refused.data = None if refused.data is None else sanitizer.value(refused.data)
        form = _RESULT if refused.readable else self.forms.get(refused.kind) or revision.error_mappings[refused.kind]
        if refused.code:
            form = ErrorMapping(refused.code)
        if not form.code and method != "tools/call":
            form = REFUSAL_ERRORS.get(refused.kind, _READABLE if refused.readable else _FAILED)
        if form.code:
            body = revision.error(request_id, form.code, refused)
            return Reply(body, form.status, refused.retry_after, refused.needed_scopes)
        result = error_result(refused.prefix + refused.text)
        if refused.readable:
            result.meta = {REFUSED: refused.kind.value}
        return self.encode_response(
            revision, "" if request_id is UNSET else request_id, revision.encoders["tools/call"](result, False)
        )


def keys_from_environment() -> list[bytes]:
    """Return the keys in `HANDRAIL_KEY`, separated by commas, which processes share; else a random key.

    The first key seals and all open, so that a key can be replaced while its servers run.
    """
    text = os.environ.get("HANDRAIL_KEY")
    if text is None:
        return [secrets.token_bytes(32)]
    keys = [key.strip().encode() for key in text.split(",")]
    for number, key in enumerate(keys, 1):
        if flaw := key_problem(key):
            which = f", key {number}" if len(keys) > 1 else ""
            raise ValueError(f"HANDRAIL_KEY{which}: {flaw}; {KEY_HINT}")
    return keys
