"""The server: tools from typed functions, and ways to serve them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, cast, overload

from msgspec import UNSET
from msgspec.structs import replace

from handrail.engine.call import Call
from handrail.engine.catalog import HINTS, ToolEntry, annotations_of, make_entry
from handrail.engine.core import Engine, ServerOptions
from handrail.engine.guard_lifecycle import offer_read_more, open_guards
from handrail.engine.guard_set import FILES_READ, GuardOptions
from handrail.engine.outcome import CallSink
from handrail.engine.pipeline import Middleware
from handrail.engine.preview import make_preview
from handrail.errors import Kind, SchemaError, missing_extra
from handrail.guards.tool_definitions import source_of
from handrail.model import Object, Principal, Tool
from handrail.revisions.base import ErrorMapping
from handrail.schema.derive import derive
from handrail.suggest import NOT_HERE, check_options, collection, describe_value, expect, seconds, suggest_names, texts
from handrail.transports.http.options import EndpointOptions, HttpOptions
from handrail.transports.memory import MemoryChannel
from handrail.transports.stdio import StdioConnection, explain_terminal, private_descriptors, script, take_descriptors
from handrail.transports.supervisor import Ready, run_until_exit

if TYPE_CHECKING:
    from handrail.approvals.queue import ApprovalQueue
    from handrail.stores import Store
    from handrail.transports.http.endpoint import Endpoint

__all__ = ["Server"]

log = logging.getLogger("handrail")

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=Middleware)
Lifespan = Callable[["Server"], AbstractAsyncContextManager[Any]]

IDLE_SECONDS = 60.0
TOTAL_SECONDS = 600.0
LOCAL_PRINCIPAL = Principal("local")


class ToolOptions(TypedDict, total=False):
    """Options of a tool; each overrides what is read from the function.

    name: 1–128 characters of A-Za-z0-9_.- (the name of the function)
    title: the name that people read
    description: what the tool does, for the model (the docstring)
    input_schema: a JSON Schema, kept as written: 2020-12, or draft-07 if its $schema says so (from the type hints)
    output_schema: the same for results; None: no schema, whatever the return annotation says
    read_only: the tool changes nothing
    destructive: the tool may destroy something: a person is asked before it runs
    idempotent: a second call with the same arguments changes nothing more
    open_world: the tool reaches others than the server's own data
    annotations: the same hints as the protocol writes them: readOnlyHint, destructiveHint, …; and title
    icons: icons as the protocol writes them: src, mimeType, sizes
    meta: the _meta of the tool
    tags: names for groups of tools, for the rules of a policy
    timeout: seconds, or (idle, total) seconds (60, 600)
    scopes: scopes that a caller's token must have
    hide: do not list the tool for callers without these scopes (False)
    dangerous: why the tool's output must be handled with care; its results are marked with this text
    inline: run a `def` tool on the event loop: quick, but it must not block (False)
    extra: "allow" accepts arguments that the signature does not name ("forbid")
    preview: a function that says what a call would do, for the person who is asked about it; same arguments
    """

    name: str
    title: str
    description: str
    input_schema: Object
    output_schema: Object | None
    read_only: bool
    destructive: bool
    idempotent: bool
    open_world: bool
    annotations: Object
    icons: list[Object]
    meta: Object
    tags: Iterable[str]
    timeout: float | tuple[float, float]
    scopes: Iterable[str]
    hide: bool
    dangerous: str
    inline: bool
    extra: Literal["forbid", "allow"]
    preview: Callable[..., Any]


class _Default:
    """The default of an option in a signature; its documentation says what it is."""

    def __repr__(self) -> str:
        return "…"


def _takes_options(*classes: Any) -> Callable[[F], F]:
    """Write out the options of a function that ends in `**options: Unpack[…]`, in its signature and its docstring.

    Type checkers and editors read `Unpack`; `help()` and `inspect.signature()` read what is set here. Each class is a
    TypedDict whose docstring documents its own members, one a line. The class that inherits comes first.
    """

    def write_out(function: F) -> F:
        signature = inspect.signature(function)
        annotations: dict[str, Any] = {}
        for each in reversed(classes):
            own = {name: kind for name, kind in each.__annotations__.items() if name not in annotations}
            annotations = own | annotations
        keywords = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_Default(), annotation=kind.__forward_arg__)
            for name, kind in annotations.items()
        ]
        named = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__dict__["__signature__"] = signature.replace(parameters=[*named, *keywords])
        texts = [each.__doc__ or "" for each in (function, *classes)]  # none with python -OO
        function.__doc__ = "\n\n".join(map(inspect.cleandoc, texts))
        return function

    return write_out


_OPTION_TYPES = {
    "name": ("a text", str),
    "meta": ("a dict", dict),
    "hide": ("True or False", bool),
    "inline": ("True or False", bool),
    "dangerous": ("the reason as a text", str),
}


@suggest_names(
    {
        "add_tool": "server.add(function)",
        "remove_tool": "server.remove(name)",
        "list_tools": "server.tools",
        "get_tools": "server.tools",
        "call_tool": "`async with handrail.Client(server) as client: await client.call(name, {…})`",
        "mount": "server.include(other, prefix=…), or server.asgi() for a web application",
        "import_server": "server.include(other, prefix=…)",
        "streamable_http_app": "server.asgi()",
        "http_app": "server.asgi()",
        "sse_app": "server.asgi(), which serves that transport too",
        "run_stdio_async": "await server.run_async()",
        "run_http_async": "server.run(http=8000), or serve server.asgi()",
        "run_streamable_http_async": "server.run(http=8000), or serve server.asgi()",
        "run_sse_async": "server.run(http=8000), or serve server.asgi()",
        "add_middleware": "server.middleware(function)",
        "get_context": "a parameter of the tool with the type handrail.Call",
        **dict.fromkeys(("resource", "prompt", "completion", "add_resource", "add_prompt"), NOT_HERE),
    }
)
class Server:
    """A set of tools, served in every revision of the protocol at once.

    >>> server = Server("weather")
    >>> @server.tool
    ... async def forecast(city: str, days: int = 3) -> str:
    ...     '''Weather for the next days.'''
    ...     return f"{city}: sun for {days} days"
    """

    @_takes_options(ServerOptions, GuardOptions)
    def __init__(self, name: str, *, lifespan: Lifespan | None = None, **options: Unpack[ServerOptions]) -> None:
        """Make a server without tools; `@server.tool` adds one.

        name: what clients see as the name of the server
        lifespan: an async context manager `lifespan(server)`; what it yields is `call.state`
        """
        self.name = name
        self.engine = Engine(self, name, options)
        if options.get("tracing"):
            self.engine.add_sink(_spans(self.engine.forms))
        self.state: Any = None
        self._lifespan = None if lifespan is None else _check_lifespan(lifespan, self)
        self._included: list[Server] = []
        self._serving_count = 0
        self._stack = AsyncExitStack()
        self._alongside: list[Callable[[], AbstractAsyncContextManager[Any]]] = []
        self._lifecycle_lock = asyncio.Lock()

    # Tools

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(self, name: str | None = None, /, **options: Unpack[ToolOptions]) -> Callable[[F], F]: ...
    @_takes_options(ToolOptions)
    def tool(self, function: F | str | None = None, /, **options: Unpack[ToolOptions]) -> F | Callable[[F], F]:
        """Make a function a tool: `@server.tool`, `@server.tool("name")`, or `@server.tool(title="…")`.

        The function's name, docstring and type hints become name, description and schemas. `async def` runs on the
        event loop, `def` in a worker thread.
        """

        def register(function: F) -> F:
            self.add(function, **options)
            return function

        if isinstance(function, str):  # @server.tool("refund")
            if "name" in options:
                raise TypeError(f"tool {function!r}: name: given twice, also as {options['name']!r}; leave one out")
            options["name"] = function
            return register
        return register if function is None else register(function)

    @_takes_options(ToolOptions)
    def add(self, function: Callable[..., Any], **options: Unpack[ToolOptions]) -> Tool:
        """Add a function or a method as a tool, also while the server runs: `@server.tool` as a plain call."""
        if not self.engine.has_tools:
            raise SchemaError(f"server {self.name!r} has tools=False")
        name = options.get("name", _name_of(function))
        where = f"tool {name!r}"
        check_options(where, options, ToolOptions.__annotations__)
        silent = options.get("output_schema", UNSET) is None
        options = cast(ToolOptions, {key: value for key, value in options.items() if value is not None})
        for option, (expected, kind) in _OPTION_TYPES.items():
            if option in options:
                expect(f"{where}: {option}", options.get(option), expected, kind)
        input_schema = options.get("input_schema")
        extra = options.get("extra", "forbid")
        if extra not in ("forbid", "allow"):
            raise SchemaError(f"{where}: extra: expected 'forbid' or 'allow', got {describe_value(extra)}")
        signature = derive(function, call_type=Call, input_schema=input_schema, extra=extra)
        hints = {key: value for key, value in options.items() if key in HINTS}
        listed: Object = {key: value for key, value in options.items() if key in ("title", "meta")}
        if "icons" in options:
            listed["icons"] = collection(f"{where}: icons", options["icons"], "icons")
        tool = Tool(
            name=name,
            description=options.get("description", signature.description or UNSET),
            input_schema=signature.input_schema,
            output_schema=UNSET if silent else options.get("output_schema") or signature.output_schema,
            annotations=annotations_of(options.get("annotations", UNSET), cast(Object, hints), where),
            **listed,
        )
        idle, total = _parse_timeout(options.get("timeout"), f"{where}: timeout")
        runs_async = inspect.iscoroutinefunction(function)
        if options.get("inline") and runs_async:
            raise SchemaError(f"{where}: inline=True is for `def` functions; this one is async")
        preview = None
        if "preview" in options:
            preview = make_preview(options["preview"], function, where, input_schema=input_schema, extra=extra)
        entry = make_entry(
            tool,
            invoke=signature.invoke,
            mode="async" if runs_async else "inline" if options.get("inline") else "thread",
            idle=idle,
            total=total,
            dangerous=options.get("dangerous", UNSET),
            tags=frozenset(texts(f"{where}: tags", options.get("tags", ()))),
            scopes=frozenset(texts(f"{where}: scopes", options.get("scopes", ()))),
            hide=options.get("hide", False),
            owner=self,
            preview=preview,
            source=source_of(function),
        )
        self.engine.catalog.add(entry)
        return tool

    def remove(self, name: str) -> None:
        """Remove a tool, also while the server runs. Calls in flight are not cancelled."""
        self.engine.catalog.remove(name)

    def enable(self, name: str) -> None:
        """List a disabled tool again."""
        self.engine.catalog.enable(name, True)

    def disable(self, name: str) -> None:
        """Disable a tool: it is not listed and cannot be called until `enable`."""
        self.engine.catalog.enable(name, False)

    @property
    def tools(self) -> list[Tool]:
        """The tools that are listed, in their order."""
        return [entry.tool for entry in self.engine.catalog]

    def include(self, other: Server, *, prefix: str = "") -> None:
        """Offer the tools of another server under `prefix`, with its middleware and state; changes are mirrored."""
        if other._includes(self):
            raise ValueError(f"server {other.name!r} cannot be included here: it is, or includes, this one")
        duplicate_names = {entry.tool.name for entry in self.engine.catalog.entries} & {
            prefix + each.name for each in other.tools
        }
        if duplicate_names:
            raise SchemaError(
                f"server {other.name!r}: tool {min(duplicate_names)!r} exists already; choose another prefix"
            )
        if missing_guards := sorted(other.engine.guard_options.keys() - self.engine.guard_options.keys()):
            log.warning(
                "server %r: %s of %r do not hold here; guard this one too",
                self.name,
                ", ".join(missing_guards),
                other.name,
            )
        self._included.append(other)
        copied: dict[str, ToolEntry] = {}

        def copy_tools() -> None:
            theirs = {entry.tool.name: entry for entry in other.engine.catalog if not entry.trusted_output}
            for name, ours in list(copied.items()):
                if theirs.get(name) is not ours.origin:
                    with contextlib.suppress(KeyError):  # removed here before
                        self.engine.catalog.remove(ours.tool.name)
                    del copied[name]
            for name, entry in theirs.items():
                if name not in copied:
                    tool = replace(entry.tool, name=prefix + name)
                    copied[name] = replace(entry, tool=tool, origin=entry, via=(other, *entry.via))
                    self.engine.catalog.add(copied[name])

        copy_tools()
        other.engine.catalog.watchers.add(copy_tools)

    def _includes(self, server: Server) -> bool:
        return self is server or any(each._includes(server) for each in self._included)

    def middleware(self, function: M) -> M:
        """Add middleware around every call: `async def f(call, next)` returns `await next(call)`, changed or not."""
        self.engine.add_middleware(function)
        return function

    @_takes_options(GuardOptions)
    def guard(self, **options: Unpack[GuardOptions]) -> None:
        """Set guards; those that are not named stay as they are. Raises RuntimeError while the server serves."""
        if self.is_serving:
            raise RuntimeError(f"server {self.name!r}: guards cannot be changed while it serves")
        check_options(f"server {self.name!r}", options, GuardOptions.__annotations__)
        self.engine.guard(options)

    @property
    def approvals(self) -> ApprovalQueue:
        """The queue of calls that wait for a person, to be listed and decided."""
        return self.engine.guard_set.approval_queue

    # Serving

    @_takes_options(EndpointOptions)
    def asgi(self, *, store: Store | None = None, **options: Unpack[EndpointOptions]) -> Endpoint:
        """Return the server as an ASGI application, to be served or mounted anywhere.

        store: a store for what processes share, and what outlives one (in memory)
        """
        from handrail.stores.memory import MemoryStore
        from handrail.transports.http.endpoint import Endpoint

        check_options("asgi", options, EndpointOptions.__annotations__)  # a misspelt `auth` would let everybody in
        return Endpoint(self.engine, MemoryStore if store is None else store, **options)

    @_takes_options(HttpOptions, EndpointOptions)
    def run(self, *, http: str | int | None = None, **options: Unpack[HttpOptions]) -> None:
        """Serve until a signal comes: one client over standard input and output, or any number of them over HTTP.

        Over stdio it also ends when the client closes the input or the parent process dies. All options but `http` are
        for HTTP.

        http: an address, "127.0.0.1:8000", or a port of this machine, 8000 (serve over standard input and output)
        """
        _warn_of_unused_settings()
        if http is not None:
            from handrail.transports.http.serve import run_endpoint
            from handrail.transports.http1.listen import CannotListen

            try:
                run_endpoint(self.engine, http, options)
            except CannotListen as problem:  # a traceback would say no more
                raise SystemExit(f"server {self.name!r}: {problem.strerror or problem}") from None
            return
        if options:
            raise TypeError(f"run: {min(options)!r} is unknown, or for HTTP only: give http='127.0.0.1:8000'")
        explain_terminal(self.name)
        source, sink = take_descriptors()
        grace = self.engine.limits.grace_seconds
        run_until_exit(lambda ready: self._serve(source, sink, ready), source, grace)

    async def run_async(self) -> None:
        """Serve standard input and output in a running event loop. The caller handles signals and exits the process."""
        with private_descriptors() as (source, sink):
            await self._serve(source, sink, lambda stop, input_closed: None)

    async def _serve(self, source: int, sink: int, ready: Ready) -> None:
        async with self.serving():
            pipe = StdioConnection(self.engine, source, sink, LOCAL_PRINCIPAL)
            ready(pipe.stop, pipe.input_closed)
            await pipe.serve()

    def alongside(self, other: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        """Enter a context manager of yours whenever the server begins to serve, in each of its processes."""
        self._alongside.append(other)

    def connect(self, principal: Principal = LOCAL_PRINCIPAL) -> MemoryChannel:
        """Return the client's end of a connection in this process; use it inside `async with server.serving():`."""
        return MemoryChannel(self.engine, principal)

    @property
    def is_serving(self) -> bool:
        return self._serving_count > 0

    @contextlib.asynccontextmanager
    async def serving(self, *, store: Store | None = None) -> AsyncIterator[Any]:
        """Run the lifespan of this server and of included ones. The first caller enters it, the last one leaves it.

        `store` is shared by the processes of one listener; they count the limits in it if the server has no store.
        """
        if self._serving_count == 0 and not self._lifecycle_lock.locked():
            self._lifecycle_lock = asyncio.Lock()  # a lock belongs to one loop, a server does not
        async with self._lifecycle_lock:
            if self._serving_count == 0:
                await self._start(store)
            self._serving_count += 1
        try:
            yield self.state
        finally:
            async with self._lifecycle_lock:
                self._serving_count -= 1
                if self._serving_count == 0:
                    await self._stack.aclose()
                    self.state = None

    async def _start(self, store: Store | None) -> None:
        self._stack = AsyncExitStack()
        try:
            for other in self._included:
                await self._stack.enter_async_context(other.serving())
            await self._stack.enter_async_context(open_guards(self.engine.guard_set, _post_to_webhook, store))
            if self._lifespan is not None:
                entered = self._lifespan(self)
                if not hasattr(entered, "__aenter__"):
                    raise TypeError(
                        f"server {self.name!r}: lifespan: {type(entered).__name__} is no asynchronous context manager;"
                        " give an async function decorated with @asynccontextmanager"
                    )
                self.state = await self._stack.enter_async_context(entered)
            self._stack.enter_context(offer_read_more(self.engine.guard_set, self.engine.catalog, self))
            for each in self._alongside:
                await self._stack.enter_async_context(each())
        except BaseException:
            await self._stack.aclose()
            raise


def _spans(forms: Mapping[Kind, ErrorMapping]) -> CallSink:
    try:
        from handrail.observe.tracing import SpanSink
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] != "opentelemetry":
            raise
        raise missing_extra("otel", "tracing=True needs opentelemetry-api", missing.name) from None
    return SpanSink(forms)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", repr(function)))


def _warn_of_unused_settings() -> None:
    """Warn of a `handrail.toml` beside the file that Python was started with, unless the code has read it."""
    file = script()
    settings = os.path.join(os.path.dirname(file), "handrail.toml")
    if file and os.path.exists(settings) and os.path.realpath(settings) not in FILES_READ:
        text = "%s is not used: the guards are those of the code. `handrail serve %s` uses it"
        log.warning(text, os.path.relpath(settings), os.path.relpath(file))


def _parse_timeout(timeout: float | tuple[float, float] | None, where: str) -> tuple[float, float]:
    if timeout is None:
        return IDLE_SECONDS, TOTAL_SECONDS
    both = timeout if isinstance(timeout, tuple | list) else (timeout, timeout)
    try:
        idle, total = (seconds(where, each) for each in both)
    except ValueError as problem:
        raise SchemaError(f"{where}: expected seconds, or (idle, total), got {timeout!r}: {problem}") from None
    if not idle <= total < float("inf"):
        raise SchemaError(f"{where}: {timeout!r} is not a time in seconds, or (idle, total)")
    return idle, total


def _check_lifespan(lifespan: Lifespan, server: Server) -> Lifespan:
    where = f"server {server.name!r}: lifespan"
    name = _name_of(lifespan)
    if inspect.isasyncgenfunction(lifespan) or inspect.isgeneratorfunction(lifespan):
        raise TypeError(f"{where}: decorate {name} with @asynccontextmanager (of contextlib)")
    if inspect.iscoroutinefunction(lifespan):
        raise TypeError(
            f"{where}: {name} has no `yield`; yield the state, and decorate {name} with @asynccontextmanager"
        )
    expected = "expected a function decorated with @asynccontextmanager"
    if hasattr(lifespan, "__aenter__") and not isinstance(lifespan, type):
        raise TypeError(f"{where}: {expected}, got what it returned; give the function itself, without calling it")
    if not callable(lifespan):
        raise TypeError(f"{where}: {expected}, got {describe_value(lifespan)}")
    try:
        inspect.signature(lifespan).bind(server)
    except TypeError:
        raise TypeError(f"{where}: {name} must take the server: `async def {name}(server): …`") from None
    except ValueError:  # it has no signature that can be read
        pass
    return lifespan


async def _post_to_webhook(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
    from handrail.oauth.http import exchange  # deferred: few servers have a webhook

    return await exchange(url, None, data=body, headers=headers)
