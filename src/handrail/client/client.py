"""Client: connect to any server of any revision, list its tools, call them.

>>> async with Client("https://example.org/mcp") as client:
...     for tool in await client.tools():
...         print(tool.name)
...     result = await client.call("add", {"a": 1, "b": 2})

In scripts and notebooks the same without `async` and `await`: `with Client(…) as client: client.call(…)`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar, overload

from handrail import __version__
from handrail.client.consent import Confirm
from handrail.client.inflight import Clocks, Log, Progress
from handrail.client.input_handlers import Answers, Elicitation, Sampling
from handrail.client.known import Terms
from handrail.client.mcp_config import Entry
from handrail.client.results import CallResult
from handrail.client.server_tools import Remote
from handrail.client.state_dir import State
from handrail.client.targets import Reach, Transport, targets
from handrail.client.tools import MAX_DESCRIPTION, ListedTool, Tools
from handrail.errors import PeerError, RemoteProtocolError, Sent, TransportError
from handrail.guards.lockfile import read_lock
from handrail.model import Object
from handrail.options import expect, mapping, shown
from handrail.other_names import NOT_HERE, also_known_as
from handrail.revisions.base import SERVER_INFO
from handrail.schema.explain import closest
from handrail.text.controls import seen
from handrail.transports.http_client import Authorizer

if TYPE_CHECKING:
    from handrail.audit.log import Trail
    from handrail.client.blocking import BlockingClient
    from handrail.guards.policy import Policy, Rule

log = logging.getLogger("handrail")

T = TypeVar("T")

MAX_EVENTS = 1_000  # that wait to be looked at


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
    **dict.fromkeys(("list_resources", "read_resource", "list_resource_templates", "subscribe_resource"), NOT_HERE),
    **dict.fromkeys(("list_prompts", "get_prompt", "complete"), NOT_HERE),
}


@also_known_as(OTHER_NAMES)
class Client:
    """One server, or the several of a configuration; then names of tools begin with the server's, and a dot.

    `target` is a URL, a command (list or string), a path to a Python file, a `Server`, an `mcpServers` entry, or the
    path of such a file.

    `policy` has the rules for calls, instead of what `trusted` and `confirm` make of them: nothing is sent that they
    deny, and what they hide is not listed. `audit` is a file, `.db` or `.jsonl`, for the record of each call.

    `lock` is a file of `handrail lock`. Tools that are not in it, or not what it says, are left out and refused; with
    `on_change="ask"` they are listed as `changed`, and asked for.

    `strict` makes a malformed result an `InvalidResult`; without it such a result is given with its `problems`.
    """

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
        agree: Callable[[Entry], bool] | None = None,
        on_stderr: Callable[[str], None] | None = None,
        server_asks: bool = False,
        tap: Callable[[str, bytes], None] | None = None,
        name: str = "handrail",
    ) -> None:
        switches = {"trusted": trusted, "raise_on_error": raise_on_error, "strict": strict, "server_asks": server_asks}
        for option, given in switches.items():
            expect(f"Client: {option}", given, "True or False", bool)
        handlers: dict[str, Any] = {
            "confirm": confirm,
            "elicit": elicit,
            "elicit_url": elicit_url,
            "sample": sample,
            "log": log,
        }
        handlers |= {"agree": agree, "on_stderr": on_stderr, "tap": tap}
        for option, handler in handlers.items():
            if handler is not None and not callable(handler):
                hint = "; confirm=allow of handrail.client agrees to everything" if option == "confirm" else ""
                raise TypeError(f"Client: {option}: expected a function, got {shown(handler)}{hint}")
        if auth is not None and not hasattr(auth, "challenged"):
            hint = 'a token goes into headers={"Authorization": "Bearer …"}'
            raise TypeError(f"Client: auth: expected OAuth(…), got {type(auth).__name__}; {hint}")
        for option, named in (("headers", headers), ("env", env)):
            if named is not None:
                mapping(f"Client: {option}", named, "texts by name")
        clocks = Clocks().within(timeout)
        self._targets = targets(target, Reach(transport, headers, auth, env, cwd, agree, on_stderr, clocks.connect))
        names = [each.name for each in self._targets]
        if len(set(names)) < len(names):
            raise ValueError(f"Client: two servers have the same name: {', '.join(names)}")
        if on_change not in ("refuse", "ask"):
            raise ValueError(f"Client: on_change={on_change!r:.40} is not 'refuse' or 'ask'")
        answers, me = Answers(elicit, elicit_url, sample, roots, server_asks), {"name": name, "version": __version__}
        kept = None if state is None else State(Path(state))
        locked, asks = None if lock is None else read_lock(lock), on_change == "ask"
        rules: Policy | None = None
        if policy is not None:
            from handrail.guards.policy import policy_of  # which most clients do without

            rules = policy_of(policy, "Client: policy")
        self._terms = Terms(
            answers,
            clocks,
            revision,
            me,
            rules,
            trusted,
            confirm,
            raise_on_error,
            log,
            tap,
            kept,
            locked,
            asks,
            strict,
        )
        self._audit = audit
        self._auth = auth
        self._remotes: dict[str, Remote] = {}
        self.problems: dict[str, PeerError] = {}  # servers of a configuration that could not be reached, and why

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
            from handrail.client.recording import Recorder  # which needs SQLite

            self._terms.recorder = Recorder(self._audit)
        for target in self._targets:
            self._remotes[target.name] = Remote(target, f"{target.name}." if several else "", self._terms)
        opened = await asyncio.gather(*(each.dialog.open() for each in self._remotes.values()), return_exceptions=True)
        for target, problem in zip(self._targets, opened, strict=True):
            if target.if_done and isinstance(problem, TransportError) and problem.text.endswith("exited with code 0"):
                problem.hint = ". ".join(filter(None, (problem.hint, target.if_done)))
            if isinstance(problem, PeerError) and several:
                log.warning("%s", problem)
                self.problems[target.name] = problem
            elif isinstance(problem, BaseException):
                raise problem

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __enter__(self) -> BlockingClient:
        from handrail.client.blocking import BlockingClient

        self._blocking = BlockingClient(self)
        return self._blocking

    def __exit__(self, *exc: object) -> None:
        self._blocking.close()

    async def close(self) -> None:
        """End every conversation; calls that still wait are told. From any task, and more than once."""
        await asyncio.gather(*(each.dialog.close() for each in self._remotes.values()), return_exceptions=True)
        if self._auth is not None and hasattr(self._auth, "close"):
            await self._auth.close()
        if self._terms.recorder is not None:
            await self._terms.recorder.close()

    # What is known of the servers

    @property
    def servers(self) -> dict[str, Remote]:
        return dict(self._remotes)

    @property
    def revision(self) -> str:
        """What is spoken with the (first) server."""
        spoken = self._first.dialog.revision
        return "" if spoken is None else spoken.name

    @property
    def welcome(self) -> Object:
        """What the (first) server said of itself, as it came."""
        return self._first.dialog.welcome

    @property
    def identity(self) -> Object:
        """Who the (first) server says it is: for display, never for decisions."""
        meta = self.welcome.get("_meta")
        found = self.welcome.get("serverInfo") or (meta.get(SERVER_INFO) if type(meta) is dict else None)
        claims = found.items() if type(found) is dict else ()
        return {name: seen(claim)[:MAX_DESCRIPTION] if type(claim) is str else claim for name, claim in claims}

    @property
    def instructions(self) -> str:
        """What the (first) server tells models to do: without what hides, and cut at 16,384 characters."""
        text = self.welcome.get("instructions")
        return seen(text)[:MAX_DESCRIPTION] if type(text) is str else ""

    @property
    def _first(self) -> Remote:
        for remote in self._remotes.values():
            return remote
        raise TransportError("not connected", hint="Use it inside `async with` or `with`")

    # Tools

    async def tools(self, *, fresh: bool = False) -> Tools:
        """Every tool there is. From memory as long as the server says they are the same, unless `fresh`."""
        if len(self._remotes) <= 1:
            return await self._first.tools(fresh=fresh)
        found: list[ListedTool] = []
        refused: dict[str, str] = {}
        asked = (each.tools(fresh=fresh) for each in self._remotes.values())
        listed = await asyncio.gather(*asked, return_exceptions=True)
        for name, tools in zip(self._remotes, listed, strict=True):
            if isinstance(tools, PeerError):  # one that is broken does not hide the others
                self.problems[name] = tools
            elif isinstance(tools, BaseException):
                raise tools
            else:
                self.problems.pop(name, None)
                refused.update(tools.refused)
                for tool in tools:
                    if self._find(tool.name)[0].name == name:
                        found.append(tool)
                    else:
                        refused[tool.name] = "it would be taken for a tool of another server"
        return Tools(found, refused)

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
        """Call a tool. Whatever goes wrong is a `PeerError` that says how far it got.

        `repeat` says that the call may be made twice, should its answer be lost. `into` is a class (dataclass, Struct,
        TypedDict or pydantic model) for the data of the result, which is then all that is returned; a tool that says
        that it failed raises `CallFailed`.
        """
        if misplaced:
            known = ("timeout", "confirm", "progress", "meta", "repeat", "into")
            near = closest(next(iter(misplaced)), known)
            hint = f"did you mean {near!r}?" if near else f"arguments go into a dict: call({name!r}, {misplaced!r})"
            raise TypeError(f"call: unknown option {next(iter(misplaced))!r}; {hint}")
        watch = None if progress is None else lambda event: progress(event) if isinstance(event, Progress) else None
        remote, own = self._find(name)
        result = await remote.call(
            own,
            arguments or {},
            timeout=timeout,
            confirm=confirm,
            watch=watch,
            meta=meta,
            repeat=repeat,
        )
        if into is None:
            return result
        try:
            return result.into(into)
        except PeerError as problem:
            remote.dialog.named(problem, f"tools/call {own}")
            raise

    async def events(
        self, name: str, arguments: Object | None = None, **options: Any
    ) -> AsyncIterator[Progress | Log | CallResult]:
        """Call a tool, and hear of it on the way: progress and log entries, then the result."""
        news: asyncio.Queue[Progress | Log | None] = asyncio.Queue(MAX_EVENTS)
        remote, own = self._find(name)

        def watch(event: Progress | Log) -> None:
            if news.full():
                news.get_nowait()  # the oldest says the least
            news.put_nowait(event)

        task = asyncio.create_task(remote.call(own, arguments or {}, watch=watch, **options))
        task.add_done_callback(lambda _: news.put_nowait(None) if not news.full() else None)
        try:
            while not task.done() or not news.empty():
                event = await news.get()
                if event is not None:
                    yield event
            yield await task
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _find(self, name: str) -> tuple[Remote, str]:
        if len(self._remotes) <= 1:
            return self._first, name
        for server in sorted(self._remotes, key=len, reverse=True):
            if name.startswith(f"{server}."):
                return self._remotes[server], name[len(server) + 1 :]
        hint = f"Names begin with the server's: {', '.join(self._remotes)}"
        raise RemoteProtocolError(f"no server for the tool {name!r:.100}", sent=Sent.NO, hint=hint)
