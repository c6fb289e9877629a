"""The server: tools, resources and prompts from typed functions, and ways to serve them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, cast, get_args, overload

from msgspec import UNSET

from handrail.engine.call import Call
from handrail.engine.catalog import HINTS, Catalog, annotations_of, make_entry
from handrail.engine.core import Engine, ServerOptions
from handrail.engine.guard_lifecycle import offer_read_more, open_guards
from handrail.engine.guard_set import FILES_READ, GuardOptions
from handrail.engine.outcome import CallSink
from handrail.engine.pipeline import Middleware
from handrail.engine.preview import make_preview
from handrail.engine.prompts import make_prompt_entry
from handrail.engine.resources import make_resource_entry
from handrail.errors import Kind, SchemaError, missing_extra
from handrail.gateway.settings import UpstreamOptions
from handrail.guards.policy import SubjectKind
from handrail.guards.tool_definitions import source_of
from handrail.model import Object, Principal, Prompt, Resource, ResourceTemplate, Tool
from handrail.revisions.base import ErrorMapping
from handrail.schema.derive import derive
from handrail.suggest import check_options, collection, describe_value, expect, seconds, suggest_names, texts
from handrail.transports.http.options import EndpointOptions, HttpOptions
from handrail.transports.memory import MemoryChannel
from handrail.transports.stdio import StdioConnection, explain_terminal, private_descriptors, script, take_descriptors
from handrail.transports.supervisor import Ready, run_until_exit

if TYPE_CHECKING:
    from handrail.approvals.queue import ApprovalQueue
    from handrail.engine.files import FolderFile
    from handrail.engine.resources import ResourceEntry
    from handrail.gateway.upstream import Upstream
    from handrail.gateway.upstreams import Upstreams
    from handrail.stores import Store
    from handrail.transports.http.endpoint import Endpoint

__all__ = ["Gateway", "Server"]

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


class PromptOptions(TypedDict, total=False):
    """Options of a prompt, and of a resource; each overrides what is read from the function.

    name: the name in lists (the name of the function)
    title: the name that people read
    description: what it is for (the docstring)
    icons: icons as the protocol writes them: src, mimeType, sizes
    meta: its _meta
    complete: functions (value) or (value, context) that return the values an argument may have, by name
    tags: names for groups, for the rules of a policy
    timeout: seconds, or (idle, total) seconds (60, 600)
    scopes: scopes that a caller's token must have
    hide: do not list it for callers without these scopes (False)
    """

    name: str
    title: str
    description: str
    icons: list[Object]
    meta: Object
    complete: Mapping[str, Callable[..., Any]]
    tags: Iterable[str]
    timeout: float | tuple[float, float]
    scopes: Iterable[str]
    hide: bool


class ResourceOptions(PromptOptions, total=False):
    """Options of a resource, or of a template of resources, whose arguments are its variables.

    mime_type: the media type of what is read (text/plain, application/json or application/octet-stream)
    size: bytes of what is read, if they are known; not of a template
    annotations: as the protocol writes them: audience, priority, lastModified
    cache_seconds: how long a client may keep what it read (0)
    """

    mime_type: str
    size: int
    annotations: Object
    cache_seconds: float


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


_LISTED = ("name", "title", "description", "icons", "meta")
_NO_ARGUMENTS: Object = {"type": "object", "additionalProperties": False}
_OPTION_TYPES = {
    "name": ("a text", str),
    "meta": ("a dict", dict),
    "mime_type": ("a text such as 'text/plain'", str),
    "size": ("a number of bytes", int),
    "complete": ("a dict of functions by argument", Mapping),
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
        "completion": "@server.prompt(complete={…}) or @server.resource(uri, complete={…})",
        "add_resource": "server.resource(uri)(function), or server.add_files(folder)",
        "add_prompt": "server.prompt(name)(function)",
        "list_resources": "server.resources",
        "list_resource_templates": "server.templates",
        "list_prompts": "server.prompts",
        "read_resource": "`async with handrail.Client(server) as client: await client.read(uri)`",
        "get_prompt": "`async with handrail.Client(server) as client: await client.prompt(name, {…})`",
        "resource_template": '@server.resource("notes://{name}")',
        "remove_resource": 'server.remove(uri, kind="resource")',
        "remove_prompt": 'server.remove(name, kind="prompt")',
        "send_resource_updated": "server.resource_updated(uri)",
    }
)
class Server:
    """A set of tools, resources and prompts, served in every revision of the protocol at once.

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
        self._upstreams: Upstreams | None = None
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

        return _decorator("tool", function, options, lambda each: self.add(each, **options))

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
        if options.get("inline") and inspect.iscoroutinefunction(function):
            raise SchemaError(f"{where}: inline=True is for `def` functions; this one is async")
        preview = None
        if "preview" in options:
            preview = make_preview(options["preview"], function, where, input_schema=input_schema, extra=extra)
        entry = make_entry(
            tool,
            invoke=signature.invoke,
            dangerous=options.get("dangerous", UNSET),
            preview=preview,
            **self._run_options(function, cast(Object, options), where),
        )
        self.engine.catalog.add(entry)
        return tool

    def _run_options(self, function: Callable[..., Any], options: Object, where: str) -> Object:
        """Return how a function is run, and for whom, from the options that tools, resources and prompts share."""
        idle, total = _parse_timeout(options.get("timeout"), f"{where}: timeout")
        runs_async = inspect.iscoroutinefunction(function)
        return {
            "mode": "async" if runs_async else "inline" if options.get("inline") else "thread",
            "idle": idle,
            "total": total,
            "tags": frozenset(texts(f"{where}: tags", options.get("tags", ()))),
            "scopes": frozenset(texts(f"{where}: scopes", options.get("scopes", ()))),
            "hide": options.get("hide", False),
            "owner": self,
            "source": source_of(function),
        }

    # Resources and prompts

    @_takes_options(ResourceOptions, PromptOptions)
    def resource(self, uri: str, **options: Unpack[ResourceOptions]) -> Callable[[F], F]:
        """Make a function a resource: `@server.resource("config://app")`, `@server.resource("file:///notes/{name}")`.

        The variables of a URI template become the function's arguments, of the types in its hints. The function
        returns a text, bytes, JSON, `EmbeddedResource(…)`, or a list of these; or it raises `ResourceNotFound()`.
        """

        def register(function: F) -> F:
            names, schema, run = self._read_function(function, {**options}, ResourceOptions, f"resource {uri!r}")
            names = {key: names[key] for key in (*_LISTED, "mime_type", "size", "annotations") if key in names}
            if options.get("cache_seconds") is not None:
                run["ttl_ms"] = _milliseconds(options["cache_seconds"], f"resource {uri!r}: cache_seconds")
            self.engine.add_resource(make_resource_entry(uri, names, schema, complete=options.get("complete"), **run))
            return function

        if not isinstance(uri, str):
            raise TypeError(
                f'resource: expected a URI as in @server.resource("config://app"), got {describe_value(uri)}'
            )
        return register

    @overload
    def prompt(self, function: F, /) -> F: ...
    @overload
    def prompt(self, name: str | None = None, /, **options: Unpack[PromptOptions]) -> Callable[[F], F]: ...
    @_takes_options(PromptOptions)
    def prompt(self, function: F | str | None = None, /, **options: Unpack[PromptOptions]) -> F | Callable[[F], F]:
        """Make a function a prompt: `@server.prompt`, `@server.prompt("name")`, or `@server.prompt(title="…")`.

        Its arguments are texts on the wire, and arrive as the types in the function's hints. The function returns a
        text, `PromptMessage(…)`, a content block such as `Image(…)`, or a list of these.
        """

        def register(function: F) -> None:
            where = f"prompt {options.get('name', _name_of(function))!r}"
            names, schema, run = self._read_function(function, {**options}, PromptOptions, where)
            prompt = Prompt(**{key: names[key] for key in _LISTED if key in names})
            self.engine.prompts.add(make_prompt_entry(prompt, schema, complete=options.get("complete"), **run))

        return _decorator("prompt", function, options, register)

    def _read_function(
        self, function: Callable[..., Any], options: Object, kind: Any, where: str
    ) -> tuple[Object, Object, Object]:
        """Check a resource or a prompt. Return its options with defaults, its input schema, and how it is run."""
        check_options(where, options, kind.__annotations__)
        options = {option: value for option, value in options.items() if value is not None}
        for option, (expected, option_type) in _OPTION_TYPES.items():
            if option in options:
                expect(f"{where}: {option}", options[option], expected, option_type)
        if "icons" in options:
            options["icons"] = collection(f"{where}: icons", options["icons"], "icons")
        if "annotations" in options:
            expect(f"{where}: annotations", options["annotations"], "a dict", Mapping)
        signature = derive(function, call_type=Call)
        names = {"name": _name_of(function), "description": signature.description or UNSET, **options}
        run_options = self._run_options(function, options, where)
        run_options |= {"invoke": signature.invoke, "takes_call": signature.takes_call}
        return names, signature.input_schema, run_options

    def add_files(
        self,
        folder: str | Path,
        *,
        uri: str | None = None,
        pattern: str = "*",
        max_bytes: int = 1024 * 1024,
        tags: Iterable[str] = (),
        scopes: Iterable[str] = (),
        hide: bool = False,
    ) -> Callable[[], None]:
        """Offer the files of a folder, and of the folders in it, as resources that can only be read.

        No link is followed, and no name that begins with a dot is there. Files are listed as they are now; later ones
        can be read at once, and are listed when the function that is returned is called.

        uri: what the URIs begin with (`file:///NAME/`, with the name of the folder)
        pattern: which files, by their path below the folder, as in "*.md"; `*` also stands for /
        max_bytes: files that are larger cannot be read
        tags, scopes, hide: as of a resource, for all files
        """
        from handrail.engine.files import MAX_SCANNED, Folder  # deferred: few servers have files

        files = Folder(folder, uri, pattern, max_bytes)
        options = {"tags": tags, "scopes": scopes, "hide": hide}
        run_options = {**self._run_options(files.read, options, f"add_files {str(folder)!r}"), "source": ""}
        run_options["limited_as"] = files.template.text  # one budget for all files
        listed: dict[FolderFile, ResourceEntry] = {}

        def read(path: str, call: Any) -> Any:
            return files.read(path, call.name)

        def refresh() -> None:
            present = set(files.files())
            gone = [listed.pop(file) for file in listed.keys() - present]
            disabled, new = {each.name for each in gone if not each.enabled}, sorted(present - listed.keys())
            for file in new:
                about = {"name": file.path, "mime_type": files.media_type(file.path), "size": file.size}
                invoke = partial(lambda path, _, call: read(path, call), file.path)
                entry = make_resource_entry(files.uri_of(file.path), about, _NO_ARGUMENTS, invoke=invoke, **run_options)
                entry.enabled = entry.name not in disabled
                listed[file] = entry
            for problem in self.engine.resources.exchange(gone, [listed[file] for file in new]):
                log.warning("add_files %r: not listed: %s", str(folder), problem)

        template = make_resource_entry(
            files.template.text,
            {"name": Path(folder).resolve().name},
            {**_NO_ARGUMENTS, "properties": {"path": {"type": "string"}}, "required": ["path"]},
            invoke=lambda arguments, call: read(arguments["path"], call),
            complete={"path": lambda value: [each.path for each in files.files(value, MAX_SCANNED)]},
            **run_options,
        )
        self.engine.add_resource(template)
        refresh()
        return refresh

    def resource_updated(self, uri: str) -> None:
        """Notify the clients that have subscribed to a resource, in all processes; from any thread."""
        expect("resource_updated: uri", uri, "a text", str)
        self.engine.resource_updated(uri)

    @property
    def resources(self) -> list[Resource]:
        """The resources that are listed, in their order."""
        return [cast(Resource, entry.listing) for entry in self.engine.resources]

    @property
    def templates(self) -> list[ResourceTemplate]:
        """The templates of resources that are listed, in their order."""
        return [cast(ResourceTemplate, entry.listing) for entry in self.engine.templates]

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts that are listed, in their order."""
        return [entry.listing for entry in self.engine.prompts]

    def _catalog_of(self, name: str, kind: SubjectKind) -> Catalog[Any]:
        if kind not in get_args(SubjectKind):
            raise ValueError(f"kind: {kind!r} is not one of {', '.join(get_args(SubjectKind))}")
        engine = self.engine
        for other in ("resource", "prompt") if kind == "tool" and not engine.find("tool", name)[0] else ():
            if any(each.name == name for each in self._catalog_of(name, other).entries):
                raise KeyError(f"no tool {name!r}, but a {other}: add kind={other!r}")
        if kind == "resource":
            return engine.templates if "{" in name else engine.resources
        return engine.prompts if kind == "prompt" else engine.catalog

    def remove(self, name: str, *, kind: SubjectKind = "tool") -> None:
        """Remove a tool, a resource (by its URI or template) or a prompt. Calls in flight are not cancelled."""
        self._catalog_of(name, kind).remove(name)

    def enable(self, name: str, *, kind: SubjectKind = "tool") -> None:
        """List again what was disabled."""
        self._catalog_of(name, kind).enable(name, True)

    def disable(self, name: str, *, kind: SubjectKind = "tool") -> None:
        """Disable a tool, a resource or a prompt: it is not listed and cannot be used until `enable`."""
        self._catalog_of(name, kind).enable(name, False)

    @property
    def tools(self) -> list[Tool]:
        """The tools that are listed, in their order."""
        return [entry.tool for entry in self.engine.catalog]

    @_takes_options(UpstreamOptions)
    def include(self, other: Any, *, prefix: str | None = None, **options: Unpack[UpstreamOptions]) -> None:
        """Offer what another server has under `prefix`; changes are mirrored.

        other: a `Server` of this process, with its middleware and state; or what a `Client` takes (a command, a URL,
            an `mcpServers` entry or file, a `Client`): an upstream server, called when a tool of it is called
        prefix: goes before its names ("" for one server, NAME_ for each of several)
        """
        if not isinstance(other, Server):
            self._include_upstream(other, prefix, options)
            return
        check_options(f"include {other.name!r}: a server of this process", options, ())
        self._mirror(other, prefix or "")

    def _include_upstream(self, thing: Any, prefix: str | None, options: UpstreamOptions) -> None:
        from handrail.gateway.upstreams import Upstreams  # deferred: it loads the client

        if self.is_serving:
            raise RuntimeError(f"server {self.name!r}: upstream servers cannot be included while it serves")
        if self._upstreams is None:
            self._upstreams = Upstreams(self.engine, self)
            self._alongside.append(self._upstreams.serving)
        self._upstreams.include(thing, prefix, options)

    @property
    def upstreams(self) -> dict[str, Upstream]:
        """The upstream servers that are included, by name."""
        return {} if self._upstreams is None else dict(self._upstreams.by_name)

    def _mirror(self, other: Server, prefix: str) -> None:
        if other._includes(self):
            raise ValueError(f"server {other.name!r} cannot be included here: it is, or includes, this one")
        for theirs, ours in zip(other.engine.catalogs.values(), self.engine.catalogs.values(), strict=True):
            for problem in filter(None, (ours.conflict(each.renamed(prefix)) for each in theirs)):
                raise SchemaError(f"server {other.name!r} with the prefix {prefix!r}: {problem}")
        missing_guards = sorted(other.engine.guard_options.keys() - self.engine.guard_options.keys())
        if any(each.all for each in other.engine.guard_set.upstream_limits.values()):
            missing_guards.append("limits of upstream servers")
        if missing_guards:
            log.warning(
                "server %r: %s of %r do not hold here; guard this one too",
                self.name,
                ", ".join(missing_guards),
                other.name,
            )
        self._included.append(other)
        for theirs, ours in zip(other.engine.catalogs.values(), self.engine.catalogs.values(), strict=True):
            ours.mirror(theirs, prefix, other)
        other.engine.on_resource_updated.add(self.engine.resource_updated)

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

        store: a store for what processes share, and what outlives one (that of the server, if replicas share it, or in
            memory)
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
            if (shared_store := self.engine.guard_set.shared_store) is not None:
                from handrail.engine.fleet import joined  # deferred: few servers are replicas

                await self._stack.enter_async_context(joined(self.engine, shared_store))
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


class Gateway(Server):
    """A server that includes upstream servers: each in `servers` is what `Server.include` takes.

    >>> gateway = Gateway("npx -y some-server", "https://example.org/mcp", name="work")
    """

    def __init__(self, *servers: Any, name: str = "gateway", **options: Unpack[ServerOptions]) -> None:
        super().__init__(name, **options)
        for each in servers:
            self.include(each)


def _spans(forms: Mapping[Kind, ErrorMapping]) -> CallSink:
    try:
        from handrail.observe.tracing import SpanSink
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] != "opentelemetry":
            raise
        raise missing_extra("otel", "tracing=True needs opentelemetry-api", missing.name) from None
    return SpanSink(forms)


def _decorator(
    kind: str, function: F | str | None, options: Any, register: Callable[[F], object]
) -> F | Callable[[F], F]:
    """Return the function, registered, or the decorator that registers it: `@server.tool("refund")` names it."""

    def decorate(function: F) -> F:
        register(function)
        return function

    if isinstance(function, str):
        if "name" in options:
            raise TypeError(f"{kind} {function!r}: name: given twice, also as {options['name']!r}; leave one out")
        options["name"] = function
    return decorate if function is None or isinstance(function, str) else decorate(function)


def _milliseconds(value: Any, where: str) -> int:
    expect(where, value, "a number of seconds", int, float)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{where}: {value!r} is not a number of seconds from 0 on")
    milliseconds: int = round(value * 1000)
    return milliseconds


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
