"""Running a tool, reading a resource and getting a prompt: an in-memory client that calls as the signed-in person.

The call passes all guards, as any other does. Questions of the server go to the page; nothing is answered, opened or
fetched here. A question can be answered at any worker: its schema is in the store, and the first answer that deletes it
there counts.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import Struct, ValidationError, convert
from msgspec.json import decode

from handrail.client.client import Client
from handrail.client.inflight import Clocks, Log, Progress
from handrail.client.input_handlers import Elicitation
from handrail.client.prompts import PromptMessages, complete
from handrail.client.resources import ReadResult
from handrail.client.state_dir import allow
from handrail.console.access import MAX_SESSION_SECONDS, ApiError, ApiRequest
from handrail.console.context import ConsoleContext, PendingRun
from handrail.console.tools import lists_of
from handrail.engine.prompts import to_messages
from handrail.errors import CallTimeout, InvalidResult, Kind, PeerError, RemoteProtocolError, Sent, TransportError
from handrail.jsonrpc import encode
from handrail.model import EmbeddedResource, Json, Object, Principal, ToolResult
from handrail.revisions import Revision
from handrail.revisions.base import LOG_LEVEL
from handrail.schema.compile import compile_schema
from handrail.schema.repair import repair
from handrail.server import Server
from handrail.stores import StoreError
from handrail.text.controls import confusable_names
from handrail.transports.memory import MemoryChannel

if TYPE_CHECKING:
    from handrail.engine.catalog import ToolEntry

__all__ = ["ToolRun", "answer", "cancel", "cancel_all", "cancel_runs", "check", "deliver_answer", "start", "suggest"]

log = logging.getLogger("handrail")

MAX_RUNS, MAX_RUNS_PER_SESSION = 32, 8
MAX_RUN_SECONDS = 900.0
MAX_LOGS = 200
PROGRESS_INTERVAL_SECONDS = 0.1  # between two progress events
_DEFAULT_PORTS = {"https": 443, "http": 80}
_GUARD_KINDS = {Kind.FORBIDDEN, Kind.DENIED, Kind.PENDING, Kind.THROTTLED, Kind.OVERLOADED, Kind.UNRECORDED}


class _RunParams(Struct, forbid_unknown_fields=True):
    """What is called: one of the first three. A resource is a URI, or a template with its variables in `arguments`."""

    tool: str = ""
    resource: str = ""
    prompt: str = ""
    arguments: Object = {}
    revision: str = ""

    @property
    def name(self) -> str:
        return self.tool or self.resource or self.prompt


async def check(context: ConsoleContext, request: ApiRequest) -> Object:
    """Return the problems with these arguments, and the decision of the policy, without a call."""
    params, revision = _parse(context, request)
    principal = Principal(request.session.who)
    entry, arguments = _visible_entry(context, params, principal, revision)
    errors: Json = [] if entry.input.valid(arguments) else (entry.bad_arguments(arguments).data or {})["errors"]
    problems = [{"path": each["path"], "text": each["message"]} for each in errors]
    verdict, rule = "", ""
    if not entry.scopes <= principal.scopes:
        verdict, rule = "deny", f"needs the scope {' '.join(sorted(entry.scopes - principal.scopes))}"
    elif not problems:
        decision = context.guards.policy.decide(principal, entry.subject, arguments, revision.name)
        verdict, rule = decision.verdict, decision.rule
    checked = {"valid": not problems, "problems": problems, "verdict": verdict, "rule": rule}
    return {**checked, "uri": params.resource, "entry": entry.limit_name} if params.resource else checked


async def suggest(context: ConsoleContext, request: ApiRequest) -> Object:
    """Return what the server suggests for an argument of a prompt, or for a variable of a template."""
    name, is_template = request.path["name"], lists_of(request)[0] == "resources/list"
    argument, value, others = request.body_text("argument"), request.body_text("value"), request.body.get("context", {})
    if type(others) is not dict:
        raise ApiError(400, "context: expected an object, the other arguments by name")
    target = _InMemoryTarget(context.server, Principal(request.session.who), f"console {secrets.token_hex(6)}")
    try:
        async with Client(target, trusted=True, log=lambda *_: None, name="handrail console") as client:
            (remote,) = client.servers.values()
            completion = await complete(remote, name, is_template, argument, value, others)
    except PeerError as problem:
        raise ApiError(409, context.redactor.text(problem.text)) from None
    return {"values": [context.redactor.text(each) for each in completion]}


async def start(context: ConsoleContext, request: ApiRequest) -> Object:
    params, revision = _parse(context, request)
    runs, session = context.runs, request.session
    own_runs = [each for each in runs.values() if each.session_key == session.key]
    if len(own_runs) >= MAX_RUNS_PER_SESSION or len(runs) >= MAX_RUNS:
        raise ApiError(429, f"{len(own_runs)} runs of yours are under way: wait for one, or cancel it")
    seconds_left = session.began + MAX_SESSION_SECONDS - context.clock()
    run = ToolRun(context, session.key, Principal(session.who), min(MAX_RUN_SECONDS, seconds_left))
    runs[run.id] = run.pending
    try:
        await context.store.put(run.key, session.key.encode(), ttl=MAX_RUN_SECONDS)
        if await context.sessions.find_session(request.token) is None:
            raise ApiError(401, "You have signed out")
    except BaseException:
        del runs[run.id]
        raise
    task = run.pending.task = asyncio.create_task(run.run(params, revision))
    task.add_done_callback(lambda _: runs.pop(run.id, None))
    return {"id": run.id}


async def answer(context: ConsoleContext, request: ApiRequest) -> Object:
    run_id, key, action = await _own_run_id(context, request), request.body_text("key"), request.body_text("action")
    content: Json = request.body.get("content")
    if action not in ("accept", "decline", "cancel"):
        raise ApiError(400, f"action: {action[:40]!r} is not accept, decline or cancel")
    schema_json = await context.store.get(f"console-question:{run_id}:{key[:40]}")
    if schema_json is None:
        raise ApiError(409, "The run does not wait for this answer any more")
    schema = decode(schema_json)
    if action == "accept" and schema:
        if type(content) is not dict:
            raise ApiError(400, "content: expected an object, the answers by name")
        form_values = {**Elicitation("", "", schema).defaults, **content}
        if problems := compile_schema(schema, "the form").problems(form_values):
            form_errors = [{"path": each.path, "text": each.text} for each in problems]
            raise ApiError(422, "These answers do not fit the form", form_errors)
    if not await context.store.delete(f"console-question:{run_id}:{key[:40]}"):
        raise ApiError(409, "It has just been answered")
    accepted: Json = (content if schema else True) if action == "accept" else None
    await context.send_command(
        "answer", {"id": run_id, "key": key, "said": "cancel" if action == "cancel" else accepted}
    )
    return {}


async def cancel(context: ConsoleContext, request: ApiRequest) -> Object:
    await context.send_command("untry", {"id": await _own_run_id(context, request)})
    return {}


async def deliver_answer(context: ConsoleContext, data: Object) -> None:
    """Resume the run that waits for the answer, if it is in this worker."""
    run = context.runs.get(data["id"])
    pending_answer = None if run is None else run.answers.get(data["key"])
    if pending_answer is not None and not pending_answer.done():
        pending_answer.set_result(data["said"])


async def cancel_runs(context: ConsoleContext, data: Object) -> None:
    """Cancel one run, or all runs of a session that has ended."""
    for run_id, each in context.runs.items():
        if each.task is not None and data in ({"id": run_id}, {"session": each.session_key}):
            each.task.cancel()


async def _own_run_id(context: ConsoleContext, request: ApiRequest) -> str:
    """Return the id in the path; ApiError if it is not a run of this session."""
    run_id = request.path["id"]
    if await context.store.get(f"console-try:{run_id}") != request.session.key.encode():
        raise ApiError(404, "There is no such run: it has ended, or belongs to another session")
    return run_id


def _parse(context: ConsoleContext, request: ApiRequest) -> tuple[_RunParams, Revision]:
    try:
        params = convert(request.body, _RunParams)
        if [params.tool, params.resource, params.prompt].count("") != 2:
            raise ValidationError("give one of tool, resource and prompt")
        texts = {} if params.tool else convert(params.arguments, dict[str, str])
        entry = context.engine.templates.get(params.resource)
        if entry is not None and entry.template is not None:
            params.resource = entry.template.expand(texts)
    except ValidationError as problem:
        raise ApiError(400, f"A run has a tool, arguments and a revision: {problem}") from None
    except KeyError as missing:
        raise ApiError(400, f"arguments: the template needs {missing}") from None
    return params, context.revision(params.revision)


def _visible_entry(
    context: ConsoleContext, params: _RunParams, principal: Principal, revision: Revision
) -> tuple[ToolEntry, Object]:
    """Return what is to be run, with its arguments, if this caller can see it, by the same checks as a call."""
    engine, arguments = context.engine, params.arguments
    entry: ToolEntry | None = engine.catalog.get(params.tool) or engine.prompts.get(params.prompt)
    if params.resource:
        entry, arguments = engine.find("resource", params.resource)
    if entry is None or not entry.is_visible_to(principal.scopes) or context.guards.hides(entry, principal, revision):
        raise ApiError(404, f"There is no {params.name[:200]!r} for {principal.id}")
    reading = None if params.tool else repair(entry.input, arguments)  # all others come as texts
    return entry, arguments if reading is None else reading[0]


async def cancel_all(runs: dict[str, PendingRun]) -> None:
    tasks = [each.task for each in runs.values() if each.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _InMemoryTarget(Struct):
    """The server in this process, as a target of a client with its own principal."""

    server: Server
    principal: Principal
    address: str

    @property
    def name(self) -> str:
        return self.server.name

    def serving(self) -> AbstractAsyncContextManager[Any]:
        return self.server.serving()

    def connect(self) -> MemoryChannel:
        return MemoryChannel(self.server.engine, self.principal, self.address)


class ToolRun:
    """One call from the page: it runs the call and publishes its progress, questions and result."""

    def __init__(self, context: ConsoleContext, session_key: str, principal: Principal, seconds: float) -> None:
        self.id = secrets.token_hex(6)
        self.key = f"console-try:{self.id}"
        self.seconds = seconds  # the longest time it may take
        self.pending = PendingRun(session_key)
        self._context = context
        self._target = _InMemoryTarget(context.server, principal, f"console {self.id}")

    async def run(self, params: _RunParams, revision: Revision) -> None:
        loop = asyncio.get_running_loop()
        began, ending = loop.time(), Object()
        try:
            async for event in self._events(params, revision):
                if isinstance(event, ToolResult):
                    ending["result"] = await asyncio.to_thread(self._context.redactor.result, event)
                else:
                    await self._publish_update(event)
        except PeerError as problem:
            ending["error"] = self._error(problem)
        except asyncio.CancelledError:
            text = "Cancelled. Something may have been done already"
            ending["error"] = {"kind": "refused", "message": text}
        except Exception:  # the page must get an event that ends the run
            log.exception("console: run of %.100r failed", params.name)
            text = "The console failed, and the call may have run or not: look for it under Now and Audit, then"
            ending["error"] = {"kind": "internal", "message": f"{text} try again. The server's log says why"}
        call = self._last_call
        done = {"kind": "done", "seconds": loop.time() - began, "call": "" if call is None else call.id, **ending}
        try:
            await self._publish(done)
            await self._context.store.delete(self.key)
        except StoreError as problem:  # the page is not notified; the entry of the store expires
            log.error("console: end of run %s not published: %s", self.id, problem)

    async def _events(self, params: _RunParams, revision: Revision) -> AsyncIterator[Progress | Log | ToolResult]:
        seconds = self.seconds
        events: asyncio.Queue[Progress | Log | None] = asyncio.Queue()
        next_progress_at, logs, now = 0.0, 0, asyncio.get_running_loop().time

        def on_event(event: Progress | Log) -> None:
            nonlocal next_progress_at, logs
            if isinstance(event, Log):
                logs += 1
                is_shown = logs <= MAX_LOGS
            elif is_shown := now() >= next_progress_at:
                next_progress_at = now() + PROGRESS_INTERVAL_SECONDS
            if is_shown:
                events.put_nowait(event)

        client = Client(
            self._target,
            revision=revision.name,
            timeout=Clocks(first=seconds, idle=seconds, total=seconds),
            trusted=True,
            confirm=allow,  # the person has pressed the button
            elicit=self._elicit,
            elicit_url=self._elicit,
            log=lambda _, entry: on_event(entry),
            name="handrail console",
        )
        async with client:
            meta = {LOG_LEVEL: "debug"} if revision.stateless else {}
            request = asyncio.create_task(_send_request(client, params, meta, on_event))
            request.add_done_callback(lambda _: events.put_nowait(None))
            try:
                while (event := await events.get()) is not None:
                    yield event
                yield await request
            finally:
                request.cancel()
                await asyncio.wait({request})

    @property
    def _last_call(self) -> Any:
        """The snapshot of the last call of this run, from the activity feed."""
        feed, address = self._context.feed, self._target.address
        snapshots = [*feed.recent, *feed.running.values()]
        return next((snapshot for snapshot in reversed(snapshots) if snapshot.address == address), None)

    async def _publish_update(self, event: Progress | Log) -> None:
        redactor = self._context.redactor
        if isinstance(event, Log):
            text = event.data if type(event.data) is str else encode(event.data).decode()
            await self._publish({"kind": "log", "level": event.level, "text": redactor.truncate(text)[0]})
            return
        progress: Object = {"done": event.done, "at": self._context.clock()}
        progress |= {} if event.total is None else {"total": event.total}
        progress |= {"message": redactor.truncate(event.message)[0]} if event.message else {}
        await self._publish({"kind": "progress", "progress": progress})

    async def _elicit(self, question: Elicitation) -> Json:
        key = secrets.token_hex(6)
        self.pending.answers[key] = asyncio.get_running_loop().create_future()
        stored = f"console-question:{self.id}:{key}"
        await self._context.store.put(stored, encode(question.schema), ttl=MAX_RUN_SECONDS)
        try:
            await self._publish({"kind": "question", "key": key, "question": _question_json(question)})
            return await self.pending.answers[key]
        finally:
            del self.pending.answers[key]
            with suppress(StoreError):
                await self._context.store.delete(stored)

    async def _publish(self, event: Object) -> None:
        await self._context.publish("try", {"id": self.id, **event}, to=self.pending.session_key)

    def _error(self, problem: PeerError) -> Object:
        """Return the error for the page, which tells refusals of guards from other protocol errors."""
        redactor, snapshot = self._context.redactor, self._last_call
        error: Object = {"message": redactor.text(problem.text)}
        match problem:
            case InvalidResult(sent=Sent.NO):  # the definition is wrong, not the result of a call
                error |= {
                    "kind": "refused",
                    "message": f"Not called, as other clients may not call it either: {problem.text}",
                }
            case RemoteProtocolError():
                kind = "" if snapshot is None or snapshot.refusal is None else snapshot.refusal[0]
                has_run = snapshot is not None and snapshot.result is not None  # which had no place for an error
                kind = "refused" if kind in _GUARD_KINDS else "failed" if has_run else "protocol"
                error |= {"kind": kind, "code": problem.code}
                error |= {} if problem.data is None else {"data": redactor.bounded_value(problem.data)}
            case CallTimeout():
                error["kind"] = "timeout"
            case TransportError():
                error["kind"] = "transport"
            case _:
                error["kind"] = "refused"
        return error


async def _send_request(
    client: Client, params: _RunParams, meta: Object, on_event: Callable[[Progress | Log], None]
) -> ToolResult:
    """Call a tool, read a resource or get a prompt; return the contents or messages as blocks."""
    if params.tool:
        return (await client.call(params.tool, params.arguments, meta=meta, progress=on_event)).result
    (remote,) = client.servers.values()
    if params.prompt:
        prompt: Object = {"name": params.prompt, "arguments": params.arguments, "_meta": meta}
        answer = await remote.request("prompt", params.prompt, "prompts/get", prompt, PromptMessages, progress=on_event)
        return to_messages(answer.messages)
    resource: Object = {"uri": params.resource, "_meta": meta}
    result = await remote.request(
        "resource", params.resource, "resources/read", resource, ReadResult, progress=on_event
    )
    return ToolResult([EmbeddedResource(each) for each in result.raw["contents"]])


# Questions


def _question_json(elicitation: Elicitation) -> Object:
    question: Object = {"server": elicitation.server, "message": elicitation.message}
    if not elicitation.url:
        return {**question, "schema": elicitation.schema, "defaults": elicitation.defaults}
    return {**question, **describe_url(elicitation.url)}


def describe_url(url: str) -> Object:
    """Return the address of a page that a person is asked to visit: the URL, its host, and warnings about it."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    location: Object = {"url": url, "host": host}
    warnings = []
    if parts.scheme != "https":
        warnings.append("The connection is not encrypted: others can read what you enter there")
    try:
        ip_address(host)
        warnings.append("The host is a number, not a name: it does not say whose it is")
    except ValueError:
        pass
    if parts.port not in (None, _DEFAULT_PORTS.get(parts.scheme)):
        warnings.append(f"It is at the unusual port {parts.port}")
    letters, punycode = _host_spellings(host)
    if letters != punycode:
        location |= {} if host == punycode else {"host_shown": punycode}
        warnings.append(f"{punycode} is not in plain letters: it reads {letters}")
        warnings += [f"{name} looks like {other}" for name, other in confusable_names([letters])]
    return {**location, "warnings": warnings}


def _host_spellings(host: str) -> tuple[str, str]:
    """Return a host in Unicode letters, and in punycode."""
    try:
        return host.encode("ascii").decode("idna") if host.isascii() else host, host.encode("idna").decode()
    except UnicodeError:
        return host, host
