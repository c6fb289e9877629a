"""Client: connect to any server of any revision, list its tools, call them, read its resources.

>>> async with Client("https://example.org/mcp") as client:
...     for tool in await client.tools():
...         print(tool.name)
...     result = await client.call("add", {"a": 1, "b": 2})

In scripts and notebooks the same without `async` and `await`: `with Client(…) as client: client.call(…)`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar, overload

from handrail import __version__
from handrail.client.connection import Tap
from handrail.client.inflight import Clocks, Log, Progress, add_context, deadline_at
from handrail.client.input_handlers import Elicitation, InputHandlers, Sampling
from handrail.client.mcp_config import ConnectOptions, ServerEntry, ServerTarget, Transport, targets
from handrail.client.results import CallResult
from handrail.client.server_list import L
from handrail.client.server_tools import ClientSettings, ServerTools
from handrail.client.state_dir import Confirm, StateDirectory
from handrail.client.tools import MAX_DESCRIPTION, E, ListedEntries, ListedEntry, Tools
from handrail.errors import LocalProtocolError, PeerError, RemoteProtocolError, Sent, TransportError
from handrail.guards.tool_definitions import read_lock
from handrail.model import Object
from handrail.revisions.base import SERVER_INFO
from handrail.suggest import closest, describe_value, expect, mapping, suggest_names, suggest_options
from handrail.text.controls import strip_invisible
from handrail.transports.http_client import Authorizer

if TYPE_CHECKING:
    from handrail.audit.log import Trail
    from handrail.client.prompts import Completion, ListedPrompt, PromptMessages
    from handrail.client.resources import ListedResource, ListedTemplate, ReadResult, ResourceSubscription
    from handrail.client.server_tools import Recorder
    from handrail.guards.policy import Policy, Rule

log = logging.getLogger("handrail")

T = TypeVar("T")

MAX_QUEUED_EVENTS = 1_000  # of one call, not yet consumed
_UNKNOWN_METHOD = -32601

OTHER_NAMES = {
    "call_tool": "client.call(name, {…})",
    "list_tools": "client.tools()",
    "call_tool_mcp": "client.call(name, {…}).raw",
    "initialize": "nothing: `async with Client(…) as client:` has done so",
    "get_server_capabilities": "client.welcome",
    "initialize_result": "client.welcome",
    "server_info": "client.identity",
    "set_logging_level": "Client(…, log=function)",
    "list_roots": "Client(…, roots=[…])",
    "list_resources": "client.resources()",
    "list_resource_templates": "client.templates()",
    "list_templates": "client.templates()",
    "read_resource": "client.read(uri)",
    "get_resource": "client.read(uri)",
    "resource": "client.read(uri)",
    "subscribe_resource": "`async with client.subscribe(uri) as updates:`",
    "unsubscribe_resource": "`async with client.subscribe(uri) as updates:`",
    "unsubscribe": "`async with client.subscribe(uri) as updates:`",
    "list_prompts": "client.prompts()",
    "get_prompt": "client.prompt(name, {…})",
}


@suggest_names(OTHER_NAMES)
class Client:
    """A client of one server, or of the several servers of a configuration.

    Use it in `async with`, and await its methods. In a plain `with` it is a `BlockingClient`: nothing is awaited.

    `target` is a URL, a command (list or string), a path to a Python file, a `Server`, an `mcpServers` entry, or the
    path of a configuration file. With several servers the name of a tool or a prompt begins with the server's name and
    a dot.

    What is spoken, and for how long:
        revision: "auto" finds out; "legacy" initializes at once; or the name of one revision.
        timeout: seconds for a whole call, or `Clocks` for each timeout.
        name: the name in the client info that is sent to the server.

    How a server is reached:
        transport: over HTTP, "auto", "streamable", or "sse" for the transport of 2024.
        headers: more headers of each HTTP request.
        auth: authorization over HTTP, such as `OAuth(…)`.
        env: environment variables of a command, beside a short list of our own.
        cwd: the folder a command runs in.
        agree: `agree(entry)` returns whether a server of a configuration file may be started or connected to.
        on_stderr: gets each line of a command's standard error; without it they are logged.
        tap: `tap(direction, message)` gets each message, ">" sent and "<" received.

    Which calls are allowed, and which resources and prompts are read:
        trusted: believe the annotations of the server's tools.
        confirm: `confirm(call)` returns whether a call may be sent; `allow` agrees to every call.
        policy: rules that decide calls instead of `trusted` and `confirm`. A call they deny is not sent, a tool they
            hide is not listed.
        lock: a file of `handrail lock`. A tool that is not in it, or differs from it, is left out and refused.
        on_change: "refuse", or "ask" to list such a tool as `changed` and to ask `confirm`.
        state: a private folder for the fingerprints of tools; without it they last as long as the client.
        audit: a file, `.db` or `.jsonl`, or a `Trail`, for the record of each call.

    What the server may ask for, and what it sends unasked:
        elicit: answers a form, an `Elicitation`.
        elicit_url: answers the request to open a page, an `Elicitation` with `url`.
        sample: answers a `Sampling` with a model's text.
        roots: folders the server may use, or a function that returns them.
        server_asks: ask the server to elicit a confirmation before destructive tools run.
        log: `log(server, entry)` gets each log message; without it they go to the logger `handrail`.
        on_tools_changed: `on_tools_changed(server)` is called when the tools listed last may have changed, and not
            again until they are listed anew. It must not block.

    What a result becomes:
        raise_on_error: raise `CallFailed` where the tool reports a failure.
        strict: raise `InvalidResult` for a malformed result, instead of listing its `problems`.
    """

    @suggest_options("Client")
    def __init__(
        self,
        target: Any,
        *,
        revision: str = "auto",
        timeout: float | Clocks | None = None,
        transport: Transport = "auto",
        headers: Mapping[str, str] | None = None,
        auth: Authorizer | None = None,
        trusted: bool = False,
        confirm: Confirm | None = None,
        elicit: Callable[[Elicitation], Any] | None = None,
        elicit_url: Callable[[Elicitation], Any] | None = None,
        sample: Callable[[Sampling], Any] | None = None,
        roots: Iterable[str | Path] | Callable[[], Any] | None = None,
        log: Callable[[str, Log], None] | None = None,
        policy: Policy | Sequence[Rule] | None = None,
        audit: str | Path | Trail | None = None,
        state: str | Path | None = None,
        lock: str | Path | None = None,
        on_change: Literal["refuse", "ask"] = "refuse",
        raise_on_error: bool = False,
        strict: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        agree: Callable[[ServerEntry], bool] | None = None,
        on_stderr: Callable[[str], None] | None = None,
        server_asks: bool = False,
        tap: Tap | None = None,
        on_tools_changed: Callable[[str], None] | None = None,
        name: str = "handrail",
    ) -> None:
        switches = {"trusted": trusted, "raise_on_error": raise_on_error, "strict": strict, "server_asks": server_asks}
        for option, switch in switches.items():
            expect(f"Client: {option}", switch, "True or False", bool)
        handlers: dict[str, Any] = {"confirm": confirm, "elicit": elicit, "elicit_url": elicit_url, "sample": sample}
        handlers |= {"log": log, "agree": agree, "on_stderr": on_stderr, "tap": tap}
        handlers["on_tools_changed"] = on_tools_changed
        for option, handler in handlers.items():
            if handler is not None and not callable(handler):
                hint = "; confirm=handrail.allow agrees to everything" if option == "confirm" else ""
                raise TypeError(f"Client: {option}: expected a function, got {describe_value(handler)}{hint}")
        if auth is not None and not hasattr(auth, "challenged"):
            hint = 'a token goes into headers={"Authorization": "Bearer …"}'
            raise TypeError(f"Client: auth: expected OAuth(…), got {type(auth).__name__}; {hint}")
        for option, texts in (("headers", headers), ("env", env)):
            if texts is not None:
                mapping(f"Client: {option}", texts, "texts by name")
        clocks = Clocks().within(timeout)
        connect_options = ConnectOptions(transport, headers, auth, env, cwd, agree, on_stderr, clocks.connect)
        self._targets = targets(target, connect_options)
        names = [each.name for each in self._targets]
        if len(set(names)) < len(names):
            raise ValueError(f"Client: two servers have the same name: {', '.join(names)}")
        if on_change not in ("refuse", "ask"):
            raise ValueError(f"Client: on_change={on_change!r:.40} is not 'refuse' or 'ask'")
        rules: Policy | None = None
        if policy is not None:
            from handrail.guards.policy import policy_of  # deferred: most clients have no rules

            rules = policy_of(policy, "Client: policy")
        self._settings = ClientSettings(
            input_handlers=InputHandlers(elicit, elicit_url, sample, roots, server_asks),
            clocks=clocks,
            revision=revision,
            client_info={"name": name, "version": __version__},
            policy=rules,
            trusted=trusted,
            confirm=confirm,
            raise_on_error=raise_on_error,
            log=log,
            tap=tap,
            state=None if state is None else StateDirectory(Path(state)),
            lock=None if lock is None else read_lock(lock),
            on_tools_changed=on_tools_changed,
            ask_on_change=on_change == "ask",
            strict=strict,
        )
        self._audit = audit
        self._recorder: Recorder | None = None
        self._auth = auth
        self._servers: dict[str, ServerTools] = {}
        self._problems: dict[tuple[str, str], PeerError] = {}  # by server and method

    async def __aenter__(self) -> Client:
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        return self

    async def _open(self) -> None:
        several = len(self._targets) > 1
        if self._audit is not None:
            from handrail.client.server_tools import Recorder  # deferred: it needs SQLite

            self._recorder = Recorder(self._audit)
        for target in self._targets:
            prefix = f"{target.name}." if several else ""
            self._servers[target.name] = ServerTools(target, prefix, self._settings, self._recorder)
        outcomes = await asyncio.gather(
            *(each.connection.open() for each in self._servers.values()), return_exceptions=True
        )
        for target, problem in zip(self._targets, outcomes, strict=True):
            if target.exit_hint and isinstance(problem, TransportError) and problem.text.endswith("exited with code 0"):
                problem.hint = ". ".join(filter(None, (problem.hint, target.exit_hint)))
            if isinstance(problem, PeerError) and several:
                log.warning("%s", problem)
                self._problems[target.name, "connect"] = problem
            elif isinstance(problem, BaseException):
                raise problem

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __enter__(self) -> BlockingClient:

        self._blocking = BlockingClient(self)
        return self._blocking

    def __exit__(self, *exc: object) -> None:
        self._blocking.close()

    async def close(self) -> None:
        """Close every connection; pending calls fail. Any task may call it, and more than once."""
        await asyncio.gather(*(each.connection.close() for each in self._servers.values()), return_exceptions=True)
        if self._auth is not None and hasattr(self._auth, "close"):
            await self._auth.close()
        if self._recorder is not None:
            await self._recorder.close()

    # Servers

    @property
    def targets(self) -> list[ServerTarget]:
        """How each server is reached."""
        return list(self._targets)

    @property
    def servers(self) -> dict[str, ServerTools]:
        return dict(self._servers)

    @property
    def problems(self) -> dict[str, PeerError]:
        """The servers of a configuration that could not be reached, or did not list what they have."""
        return {name: problem for (name, _), problem in self._problems.items()}

    @property
    def revision(self) -> str:
        """The revision in use with the (first) server."""
        revision = self._first_server.connection.revision
        return "" if revision is None else revision.name

    @property
    def welcome(self) -> Object:
        """The result of `initialize` or `server/discover` of the (first) server, unchanged."""
        return self._first_server.connection.handshake_result

    @property
    def identity(self) -> Object:
        """The server info of the (first) server: for display, never for decisions."""
        meta = self.welcome.get("_meta")
        server_info = self.welcome.get("serverInfo") or (meta.get(SERVER_INFO) if type(meta) is dict else None)
        claims = server_info.items() if type(server_info) is dict else ()
        return {
            name: strip_invisible(claim)[:MAX_DESCRIPTION] if type(claim) is str else claim for name, claim in claims
        }

    @property
    def instructions(self) -> str:
        """The (first) server's instructions for models, without invisible characters, cut at 16,384 characters."""
        text = self.welcome.get("instructions")
        return strip_invisible(text)[:MAX_DESCRIPTION] if type(text) is str else ""

    @property
    def _first_server(self) -> ServerTools:
        for remote in self._servers.values():
            return remote
        raise TransportError("not connected", hint="Use it inside `async with` or `with`")

    # Tools

    async def tools(self, *, fresh: bool = False) -> Tools:
        """Return the tools of all servers. The list is cached until a server announces a change, unless `fresh`."""
        return await self._merged("tools/list", Tools, lambda each: each.tools(fresh=fresh))

    async def _listed(self, method: str, entry_type: type[E], **options: bool) -> ListedEntries[E]:
        return await self._merged(method, ListedEntries, lambda each: each.list_of(method, entry_type).get(**options))

    async def _merged(
        self,
        method: str,
        list_type: Callable[[list[E], dict[str, str]], L],
        fetch: Callable[[ServerTools], Awaitable[L]],
    ) -> L:
        """Return one list of the lists of all servers. The list of a server that declares none is empty."""

        async def fetch_declared(remote: ServerTools) -> L:
            try:
                return await fetch(remote)
            except RemoteProtocolError as refused:
                is_declared = not remote.connection.is_open or remote.connection.offers(method.partition("/")[0])
                # A server that has resources may know nothing of templates.
                if is_declared and (method != "resources/templates/list" or refused.code != _UNKNOWN_METHOD):
                    raise
                return list_type([], {})

        if len(self._servers) <= 1:
            return await fetch_declared(self._first_server)
        visible: list[E] = []
        refused: dict[str, str] = {}
        results = await asyncio.gather(*map(fetch_declared, self._servers.values()), return_exceptions=True)
        for name, entries in zip(self._servers, results, strict=True):
            if isinstance(entries, PeerError):  # a broken server does not hide the others
                self._problems[name, method] = entries
            elif isinstance(entries, BaseException):
                raise entries
            else:
                self._problems.pop((name, "connect"), None)
                self._problems.pop((name, method), None)
                refused.update(entries.refused)
                for entry in entries:
                    if entry.kind == "resource" or self._find(entry.key)[0].name == name:
                        visible.append(entry)
                    else:
                        refused[entry.key] = f"it would be taken for a {entry.kind} of another server"
        return list_type(visible, refused)

    @overload
    async def call(
        self,
        name: str,
        arguments: Object | None = None,
        *,
        timeout: float | Clocks | None = None,
        confirm: Confirm | None = None,
        progress: Callable[[Progress], None] | None = None,
        meta: Object | None = None,
        repeat: bool = False,
        into: None = None,
    ) -> CallResult: ...
    @overload
    async def call(
        self,
        name: str,
        arguments: Object | None = None,
        *,
        timeout: float | Clocks | None = None,
        confirm: Confirm | None = None,
        progress: Callable[[Progress], None] | None = None,
        meta: Object | None = None,
        repeat: bool = False,
        into: type[T],
    ) -> T: ...
    async def call(
        self,
        name: str,
        arguments: Object | None = None,
        *,
        timeout: float | Clocks | None = None,
        confirm: Confirm | None = None,
        progress: Callable[[Progress], None] | None = None,
        meta: Object | None = None,
        repeat: bool = False,
        into: type[T] | None = None,
        **misplaced: Never,
    ) -> CallResult | T:
        """Call a tool. Every failure is a `PeerError`; its `sent` says how far the call got.

        timeout: seconds for the whole call, or `Clocks`; in place of the client's.
        confirm: asked before the call is sent, in place of the client's.
        progress: gets each `Progress` the server reports.
        meta: more members of the request's `_meta`.
        repeat: the call may be sent twice, if its answer is lost.
        into: a dataclass, Struct, TypedDict or pydantic model. The data of the result is returned as an object of it;
            a tool that reports a failure raises `CallFailed`.
        """
        _refuse_misplaced("call", name, misplaced, ("timeout", "confirm", "progress", "meta", "repeat", "into"))
        on_event = None if progress is None else lambda event: progress(event) if isinstance(event, Progress) else None
        remote, own = self._find(name)
        result = await remote.call(
            own,
            arguments or {},
            timeout=timeout,
            confirm=confirm,
            on_event=on_event,
            meta=meta,
            repeat=repeat,
        )
        if into is None:
            return result
        try:
            return result.into(into)
        except PeerError as problem:
            add_context(problem, remote.name, f"tools/call {own}")
            raise

    async def events(
        self,
        name: str,
        arguments: Object | None = None,
        *,
        timeout: float | Clocks | None = None,
        confirm: Confirm | None = None,
        meta: Object | None = None,
        repeat: bool = False,
    ) -> AsyncIterator[Progress | Log | CallResult]:
        """Call a tool, and yield progress and log messages, then the result. The options are those of `call`."""
        queue: asyncio.Queue[Progress | Log | None] = asyncio.Queue(MAX_QUEUED_EVENTS)
        remote, own = self._find(name)

        def on_event(event: Progress | Log) -> None:
            if queue.full():
                queue.get_nowait()  # the oldest is the least useful
            queue.put_nowait(event)

        call = remote.call(
            own, arguments or {}, timeout=timeout, confirm=confirm, on_event=on_event, meta=meta, repeat=repeat
        )
        task = asyncio.create_task(call)
        task.add_done_callback(lambda _: queue.put_nowait(None) if not queue.full() else None)
        try:
            while not task.done() or not queue.empty():
                event = await queue.get()
                if event is not None:
                    yield event
            yield await task
        finally:
            task.cancel()
            await asyncio.wait({task})

    # Resources and prompts

    async def resources(self, *, fresh: bool = False) -> ListedEntries[ListedResource]:
        """Return the resources of all servers, cached as the tools are."""
        from handrail.client.resources import ListedResource

        return await self._listed("resources/list", ListedResource, fresh=fresh)

    async def templates(self, *, fresh: bool = False) -> ListedEntries[ListedTemplate]:
        """Return the resource templates of all servers, cached as the tools are."""
        from handrail.client.resources import ListedTemplate

        return await self._listed("resources/templates/list", ListedTemplate, fresh=fresh)

    async def prompts(self, *, fresh: bool = False) -> ListedEntries[ListedPrompt]:
        """Return the prompts of all servers, cached as the tools are."""
        from handrail.client.prompts import ListedPrompt

        return await self._listed("prompts/list", ListedPrompt, fresh=fresh)

    @suggest_options("read")
    async def read(
        self,
        uri: str | ListedResource,
        *,
        server: str = "",
        timeout: float | Clocks | None = None,
        confirm: Confirm | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> ReadResult:
        """Read a resource. An error of the server is a `RemoteProtocolError` with its `code` and `data`.

        server: which of several servers has the resource; else the one that lists it, or a template that matches.
        timeout, confirm, progress: as of `call`. Without rules, reading needs no confirmation.
        """
        from handrail.client.resources import ReadResult

        own, clocks = _own_uri("read", uri), self._settings.clocks.within(timeout)
        deadline = asyncio.get_running_loop().time() + clocks.total
        async with deadline_at(deadline, clocks):
            remote = await self._server_of(uri, server)
        options: Any = {"clocks": clocks, "deadline": deadline, "confirm": confirm, "progress": progress}
        return await remote.request("resource", own, "resources/read", {"uri": own}, ReadResult, **options)

    def subscribe(self, uri: str | ListedResource, *, server: str = "") -> ResourceSubscription:
        """Return the updates of a resource, to use in `async with` and `async for`.

        >>> async with client.subscribe("file:///notes/today") as updates:
        ...     async for uri in updates:
        ...         print((await client.read(uri)).text)

        It is renewed after a reconnect, with one update, since changes may have been missed.
        """
        from handrail.client.resources import ResourceSubscription

        return ResourceSubscription(_own_uri("subscribe", uri), lambda: self._server_of(uri, server))

    async def prompt(
        self,
        name: str | ListedPrompt,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout: float | Clocks | None = None,
        confirm: Confirm | None = None,
        progress: Callable[[Progress], None] | None = None,
        **misplaced: Never,
    ) -> PromptMessages:
        """Return the messages of a prompt. Arguments are sent as texts: what is no text as its JSON, None not at all.

        timeout, confirm, progress: as of `call`. Without rules, a prompt needs no confirmation.
        """
        from handrail.client.prompts import get_prompt

        _refuse_misplaced("prompt", name, misplaced, ("timeout", "confirm", "progress"))
        remote, own = self._find(name, "prompt")
        options: Any = {"clocks": self._settings.clocks.within(timeout), "confirm": confirm, "progress": progress}
        return await get_prompt(remote, own, arguments or {}, **options)

    async def complete(
        self,
        what: str | ListedPrompt | ListedTemplate,
        argument: str,
        value: str = "",
        *,
        context: Mapping[str, Any] | None = None,
        server: str = "",
    ) -> Completion:
        """Return the values that an argument of a prompt, or a variable of a template, can have; `value` is its start.

        what: the name of a prompt, or a URI template. `context` has other arguments that are known already.
        server: which of several servers has the template.

        A server that completes nothing is not asked: there are no values then.
        """
        from handrail.client.prompts import complete

        is_template = "{" in what if isinstance(what, str) else what.kind == "resource"
        if is_template:
            remote, own = await self._server_of(what, server), _own_uri("complete", what)
        else:
            remote, own = self._find(what, "prompt")
        return await complete(remote, own, is_template, argument, value, context or {})

    def _find(self, name: str | ListedEntry, kind: str = "tool") -> tuple[ServerTools, str]:
        if isinstance(name, ListedEntry):
            return self._server(name.server), name.own_name
        if len(self._servers) <= 1:
            return self._first_server, name
        for server in sorted(self._servers, key=len, reverse=True):
            if name.startswith(f"{server}."):
                return self._servers[server], name[len(server) + 1 :]
        hint = f"Names begin with the server's: {', '.join(self._servers)}"
        raise RemoteProtocolError(f"no server for the {kind} {name!r:.100}", sent=Sent.NO, hint=hint)

    def _server(self, name: str) -> ServerTools:
        if name not in self._servers:
            hint = f"The servers are {', '.join(self._servers)}"
            raise RemoteProtocolError(f"there is no server {name!r:.100}", sent=Sent.NO, hint=hint)
        return self._servers[name]

    async def _server_of(self, uri: str | ListedEntry, server: str) -> ServerTools:
        """Return the server of a resource or a template: the one named, the only one, or the only one that lists it.

        What a server lists that cannot be asked is unknown: it may be the right one, so no other one is taken.
        """
        if isinstance(uri, ListedEntry):
            return self._server(uri.server)
        if server:
            return self._server(server)
        if len(self._servers) <= 1:
            return self._first_server
        from handrail.client.resources import ListedResource, ListedTemplate

        names, silent = set[str](), list[str]()
        lists = {"resources/list": ListedResource, "resources/templates/list": ListedTemplate}
        for stale, method in product((True, False), lists):  # a list that has expired decides if it has the URI
            if not names and not silent:
                entries = await self._listed(method, lists[method], stale=stale)
                names = {each.server for each in entries if each.matches(uri)}
                silent = [name for name, other in self._problems if other == method]
        if silent or len(names) != 1:
            text = "several servers list" if names else "no server lists"
            text = f"could not ask {', '.join(silent)} for" if silent else text
            hint = f"Name it: server={' or '.join(sorted(names if names and not silent else self._servers))}"
            raise RemoteProtocolError(f"{text} {uri!r:.200}", sent=Sent.NO, hint=hint)
        return self._servers[names.pop()]


@suggest_names(OTHER_NAMES)
class BlockingClient:
    """A client on an event loop and a thread of its own. Any thread may use and close it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="handrail-client", daemon=True)
        self._thread.start()
        try:
            self._run(client.__aenter__())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def tools(self, *, fresh: bool = False) -> Tools:
        return self._run(self._client.tools(fresh=fresh))

    @overload
    def call(self, name: str, arguments: Object | None = None, *, into: type[T], **options: Any) -> T: ...
    @overload
    def call(self, name: str, arguments: Object | None = None, *, into: None = None, **options: Any) -> CallResult: ...
    def call(self, name: str, arguments: Object | None = None, *, into: Any = None, **options: Any) -> Any:
        """Call a tool; the options are those of `Client.call`."""
        return self._run(self._client.call(name, arguments, into=into, **options))

    def events(self, name: str, arguments: Object | None = None, **options: Any) -> Iterator[Any]:
        """Call a tool and yield progress, log messages and the result; the options are those of `Client.events`."""
        events = self._client.events(name, arguments, **options)
        try:
            while (event := self._run(_next(events))) is not None:
                yield event
        finally:
            if not self._closed:  # else closing the client has ended the events, and its error says more
                self._run(_close(events))

    def resources(self, *, fresh: bool = False) -> ListedEntries[ListedResource]:
        return self._run(self._client.resources(fresh=fresh))

    def templates(self, *, fresh: bool = False) -> ListedEntries[ListedTemplate]:
        return self._run(self._client.templates(fresh=fresh))

    def prompts(self, *, fresh: bool = False) -> ListedEntries[ListedPrompt]:
        return self._run(self._client.prompts(fresh=fresh))

    def read(self, uri: str | ListedResource, **options: Any) -> ReadResult:
        """Read a resource; the options are those of `Client.read`."""
        return self._run(self._client.read(uri, **options))

    def subscribe(self, uri: str | ListedResource, *, server: str = "") -> BlockingSubscription:
        """Subscribe to the updates of a resource: `with client.subscribe(uri) as updates: for uri in updates: …`"""
        return BlockingSubscription(self, self._client.subscribe(uri, server=server))

    def prompt(
        self, name: str | ListedPrompt, arguments: Mapping[str, Any] | None = None, **options: Any
    ) -> PromptMessages:
        """Return the messages of a prompt; the options are those of `Client.prompt`."""
        return self._run(self._client.prompt(name, arguments, **options))

    def complete(
        self, what: str | ListedPrompt | ListedTemplate, argument: str, value: str = "", **options: Any
    ) -> Completion:
        """Return values of an argument; the options are those of `Client.complete`."""
        return self._run(self._client.complete(what, argument, value, **options))

    @property
    def revision(self) -> str:
        return self._client.revision

    @property
    def welcome(self) -> Object:
        return self._client.welcome

    @property
    def identity(self) -> Object:
        return self._client.identity

    @property
    def instructions(self) -> str:
        return self._client.instructions

    @property
    def problems(self) -> Any:
        return self._client.problems

    def close(self) -> None:
        """Close the client; calls that wait in other threads fail with TransportError."""
        if self._closed:
            return
        if threading.current_thread() is self._thread:
            raise RuntimeError("the client's own thread cannot close it")
        self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._close_client(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _close_client(self) -> None:
        """Close the client, then cancel the work of other threads that still waits."""
        await self._client.close()
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left, timeout=0.1)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed or threading.current_thread() is self._thread:
            work.close()
            why = "the client is closed" if self._closed else "the client's own thread cannot wait for it"
            raise TransportError(why)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise TransportError("the client was closed", sent=Sent.UNKNOWN) from None
        except BaseException:  # also Ctrl-C: the call is cancelled at the server too
            future.cancel()
            raise


class BlockingSubscription:
    """The updates of a resource, for a `BlockingClient`."""

    def __init__(self, client: BlockingClient, updates: ResourceSubscription) -> None:
        self._client = client
        self._updates = updates

    def __enter__(self) -> BlockingSubscription:
        self._client._run(self._updates.__aenter__())
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._client._closed:
            self._client._run(self._updates.__aexit__())

    def __iter__(self) -> BlockingSubscription:
        self._updates.check_entered("with")
        return self

    def __next__(self) -> str:
        return self._client._run(anext(self._updates))


def _own_uri(verb: str, uri: object) -> str:
    uri = uri.own_name if isinstance(uri, ListedEntry) else uri
    if not isinstance(uri, str):
        raise LocalProtocolError(f"{verb}: not sent: a URI is a text, got {describe_value(uri)}")
    return uri


def _refuse_misplaced(verb: str, name: object, misplaced: Mapping[str, object], options: Sequence[str]) -> None:
    """Refuse an unknown option of a verb: it is misspelt, or an argument of the tool or the prompt."""
    for option in misplaced:
        near = closest(option, options)
        hint = f"did you mean {near!r}?" if near else f"arguments go into a dict: {verb}({name!r}, {misplaced!r})"
        raise TypeError(f"{verb}: unknown option {option!r}; {hint}")


async def _next(events: AsyncIterator[Any]) -> Any:
    return await anext(events, None)


async def _close(events: Any) -> None:
    while True:
        try:
            await events.aclose()
            return
        except RuntimeError:  # interrupted, and its cancellation is still under way
            await asyncio.sleep(0)
