"""What all conversations of one server share: its tools, its limits, its keys, the handler around a call."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec import UNSET, Struct
from msgspec.structs import replace

from handrail.engine.call import Call
from handrail.engine.catalog import Catalog
from handrail.engine.eager import Start, starter
from handrail.engine.guard_set import Gate, GuardOptions, checked
from handrail.engine.outcome import Observer, counted
from handrail.engine.pipeline import Handler, Middleware, compose, pipeline
from handrail.engine.thread_pool import Workers
from handrail.errors import Kind, missing_extra
from handrail.metrics import Metrics
from handrail.model import SERVER_ASKS, Object
from handrail.options import collection, expect
from handrail.protocol.seal import MAKES_ONE, Seal, key_flaw
from handrail.revisions import Offer, Revision
from handrail.revisions.base import Fault, Identity, Welcome
from handrail.schema.explain import check_options

if TYPE_CHECKING:
    from handrail.observe.activity import Feed

DEFAULT_PAGE = 1_000

_FORMS = {"by_revision": {}, "error": {Kind.BAD_ARGUMENTS: Fault(-32602)}, "result": {Kind.BAD_ARGUMENTS: Fault(0)}}


class Limits(Struct, frozen=True, kw_only=True):
    """Sizes and times nobody can exceed."""

    max_message_bytes: int = 4 * 1024 * 1024  # in and out
    max_calls: int = 256  # in flight, a peer
    max_unsent_bytes: int = 1024 * 1024  # then the peer has to read before it is served further
    write_seconds: float = 30.0  # then a peer that reads nothing is given up
    grace_seconds: float = 3.0  # for accepted calls, at the end

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            expect(f"Limits: {name}", getattr(self, name), "a number", int, float)
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not more than 0")


class ServerOptions(GuardOptions, total=False):
    """What can be said of a server beside its name."""

    version: str
    title: str
    description: str
    icons: list[Object]
    website_url: str
    instructions: str  # for the model: how to use these tools
    page_size: int  # tools a page of the list; unset: 1,000, and all of them for 2024-10-07
    list_changed: bool  # tell clients when the tools change (default), or never
    tools: bool  # False: this server has none and says so
    revisions: Iterable[str]  # speak only these
    workers: int  # threads for `def` tools (16)
    keys: list[bytes]  # for cursors and request states; the first seals, all open. Default: HANDRAIL_KEY, else random
    identify: bool  # name the server in every result of 2026-07-28 (default)
    cache_seconds: float  # how long a client may keep the list (60)
    invalid_arguments: Literal["by_revision", "error", "result"]  # how they are told
    limits: Limits
    tracing: bool  # an OpenTelemetry span for each call (False)


_MEANT: dict[str, tuple[str, *tuple[type, ...]]] = {
    **dict.fromkeys(("version", "title", "description", "website_url", "instructions"), ("a text", str)),
    **dict.fromkeys(("list_changed", "identify", "tracing"), ("True or False", bool)),
    "tools": ("True or False (functions are added with @server.tool or server.add)", bool),
    "page_size": ("a number of tools", int),
    "workers": ("a number of threads", int),
    "cache_seconds": ("a number of seconds", int, float),
    "limits": ("Limits(…)", Limits),
}


class Engine:
    """One server, seen from its conversations."""

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
        self.said = self.identity, self.instructions  # by its author
        self.offer = Offer(options.get("revisions"))
        self.limits = options.get("limits") or Limits()
        self.page_size = options.get("page_size")
        if self.page_size is not None and self.page_size < 1:
            raise ValueError(f"page_size: {self.page_size} is less than 1")
        self.list_changed = options.get("list_changed", True)
        self.has_tools = options.get("tools", True)
        self.hidden = frozenset() if self.has_tools else frozenset({"tools/list", "tools/call"})
        self.identify = options.get("identify", True)
        self.ttl_ms = round(options.get("cache_seconds", 60.0) * 1000)
        form = options.get("invalid_arguments", "by_revision")
        if form not in _FORMS:
            raise ValueError(f"invalid_arguments: {form!r} is not one of {', '.join(_FORMS)}")
        self.forms = _FORMS[form]
        keys = collection(f"server {name!r}: keys", options.get("keys", ()), "bytes")
        self.seal = Seal(keys or [key_from_environment()])
        self.clock: Callable[[], float] = time.time
        self.catalog = Catalog()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start: Start
        self._late: set[Call | None] = set()
        self.workers = Workers(options.get("workers", 16))
        self.warned: dict[str, float] = {}  # of tools that hold the event loop up, and when
        self.middleware: list[Middleware] = []
        self.metrics: Metrics | None = None
        self.feed: Feed | None = None
        self._observers: list[Observer] = [_spans(self.forms)] if options.get("tracing") else []
        self.gate = Gate(name, lambda: self.clock())
        self._pipeline = pipeline(self.workers, self.gate)
        self.inner: Handler  # what a call without middleware is handled by
        self.handle: Handler
        self.guards: GuardOptions = {}  # as they were given
        self.guard(cast(GuardOptions, guards))

    def guard(self, options: GuardOptions) -> None:
        """Set guards; those that are not named stay as they are."""
        self.guards = {**self.guards, **checked(options, f"server {self.identity.name!r}")}
        self.gate.configure(self.guards)
        self.identity, self.instructions = self.said
        if (sanitizer := self.gate.sanitizer) is not None:
            self.instructions = sanitizer.value(self.instructions)
            title, description = map(sanitizer.value, (self.identity.title, self.identity.description))
            self.identity = replace(self.identity, title=title, description=description)
        self._compose()

    def add_middleware(self, middleware: Middleware) -> None:
        self.middleware.append(middleware)
        self._compose()

    def count(self) -> Metrics:
        """Count calls from now on."""
        if self.metrics is None:
            self.metrics = Metrics()
            self._observers.insert(0, counted(self.metrics))
            self._compose()
        return self.metrics

    def watch(self) -> Feed:
        """Keep in view what goes on, from now on."""
        if self.feed is None:
            from handrail.observe.activity import Feed  # which most servers do without

            self.feed = Feed(lambda: self.clock())
        return self.feed

    def _compose(self) -> None:
        self.inner = self._observed(self._pipeline)
        self.handle = (
            self._observed(compose(self.middleware, self._pipeline, self.gate)) if self.middleware else self.inner
        )

    def _observed(self, handler: Handler) -> Handler:
        for each in reversed(self._observers):
            handler = each(handler)
        return handler

    def handler_through(self, servers: tuple[Any, ...]) -> Handler:
        """The handler of a tool that other servers brought along: their middleware inside ours."""
        theirs = [each for server in servers for each in server.engine.middleware]
        return self._observed(compose([*self.middleware, *theirs], self._pipeline, self.gate))

    def starter(self, loop: asyncio.AbstractEventLoop) -> Start:
        """How calls are started on a loop; there is one, as a rule."""
        if self._loop is not loop:
            self._loop, self._start, self._late = loop, starter(loop), set()
        return self._start

    def late(self, loop: asyncio.AbstractEventLoop) -> set[Call | None]:
        """Calls on a loop that have no timer yet; with None, if one is set by which they will get theirs."""
        self.starter(loop)
        return self._late

    def size_for(self, revision: Revision) -> int:
        """How many tools a page has; 0: all."""
        return self.page_size or (DEFAULT_PAGE if revision.pages else 0)

    def welcome(self, revision: Revision, *, asks: bool = False) -> Object:
        """The opening answer; `asks`: this server asks the caller's user before a destructive tool runs."""
        capabilities: Object = {"logging": {}}
        if asks:
            capabilities["experimental"] = {SERVER_ASKS: {}}
        if self.has_tools:
            announces = self.list_changed or revision.announces
            capabilities["tools"] = {"listChanged": True} if announces else {}
        return revision.welcome(
            Welcome(self.identity, capabilities, self.instructions, self.offer.supported, self.ttl_ms)
        )


def _spans(forms: Mapping[Kind, Fault]) -> Observer:
    try:
        from handrail.observe.tracing import spans
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] != "opentelemetry":
            raise
        raise missing_extra("otel", "tracing=True needs opentelemetry-api", missing.name) from None
    return spans(forms)


def key_from_environment() -> bytes:
    """`HANDRAIL_KEY`, shared by processes that must understand each other's cursors and states; else one of our own."""
    given = os.environ.get("HANDRAIL_KEY")
    if given is None:
        return secrets.token_bytes(32)
    if flaw := key_flaw(given.encode()):
        raise ValueError(f"HANDRAIL_KEY: {flaw}; {MAKES_ONE}")
    return given.encode()
