"""Trying a tool from the page: a client of our own, in memory, as whoever is signed in.

The call goes through everything that any other goes through. What the server asks on the way is put to the page;
nothing is answered, opened or fetched here. A question can be answered at any worker: what is needed to check an answer
is in the store, and whoever takes it from there was first.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import Struct, ValidationError, convert
from msgspec.json import decode

from handrail.client.client import Client
from handrail.client.consent import allow
from handrail.client.inflight import Clocks, Log, Progress
from handrail.client.input_handlers import Elicitation
from handrail.client.results import CallResult
from handrail.console.access import MOST_SECONDS, Problem, Request
from handrail.errors import CallTimeout, InvalidResult, Kind, PeerError, RemoteProtocolError, Sent, TransportError
from handrail.jsonrpc import encode
from handrail.model import Json, Object, Principal
from handrail.revisions import Revision
from handrail.revisions.base import LOG_LEVEL
from handrail.schema.compile import compile_schema
from handrail.server import Server
from handrail.stores import StoreError
from handrail.text.confusables import look_alikes
from handrail.transports.memory import Channel

if TYPE_CHECKING:
    from handrail.console import Console
    from handrail.engine.catalog import Entry

__all__ = ["Try", "answer", "answered", "begin", "cancel", "check", "end", "stopped"]

log = logging.getLogger("handrail")

MAX_TRIES, MAX_TRIES_EACH = 32, 8
MAX_SECONDS = 900.0
MAX_LOGS = 200
TELL_SECONDS = 0.1  # between two signs of progress
_PORTS = {"https": 443, "http": 80}
_GUARDS = {Kind.FORBIDDEN, Kind.DENIED, Kind.PENDING, Kind.THROTTLED, Kind.OVERLOADED, Kind.UNRECORDED}


class _Tried(Struct, forbid_unknown_fields=True):
    tool: str
    arguments: Object = {}
    revision: str = ""


async def check(console: Console, request: Request) -> Object:
    """What the server would find wrong with these arguments, and what its rules would say."""
    said, revision = _read(console, request)
    who = Principal(request.session.who)
    entry = _entry(console, said.tool, who, revision)
    problems = [{"path": each.path, "text": each.text} for each in entry.input.problems(said.arguments)]
    verdict, rule = "", ""
    if not entry.scopes <= who.scopes:
        verdict, rule = "deny", f"needs the scope {' '.join(sorted(entry.scopes - who.scopes))}"
    elif not problems:
        decision = console.gate.policy.decide(who, entry.facts, said.arguments, revision.name)
        verdict, rule = decision.verdict, decision.rule
    return {"valid": not problems, "problems": problems, "verdict": verdict, "rule": rule}


async def begin(console: Console, request: Request) -> Object:
    said, revision = _read(console, request)
    tries, session = console.tries, request.session
    mine = [each for each in tries.values() if each.session == session.key]
    if len(mine) >= MAX_TRIES_EACH or len(tries) >= MAX_TRIES:
        raise Problem(429, f"{len(mine)} tries of yours are under way: wait for one, or cancel it")
    left = session.began + MOST_SECONDS - console.clock()  # of a session that is used only its week can run out
    made = Try(console, session.key, Principal(session.who), min(MAX_SECONDS, left))
    tries[made.id] = made
    try:
        await console.store.put(made.key, session.key.encode(), ttl=MAX_SECONDS)
        if await console.access.session(request.token) is None:
            raise Problem(401, "You have signed out")
    except BaseException:
        del tries[made.id]
        raise
    made.task = asyncio.create_task(made.run(said, revision))
    made.task.add_done_callback(lambda _: tries.pop(made.id, None))
    return {"id": made.id}


async def answer(console: Console, request: Request) -> Object:
    ident, key, action = await _own(console, request), request.text("key"), request.text("action")
    content: Json = request.body.get("content")
    if action not in ("accept", "decline", "cancel"):
        raise Problem(400, f"action: {action[:40]!r} is not accept, decline or cancel")
    asked = await console.store.get(f"console-question:{ident}:{key[:40]}")
    if asked is None:
        raise Problem(409, "Nobody waits for this answer any more")
    schema = decode(asked)
    if action == "accept" and schema:
        if type(content) is not dict:
            raise Problem(400, "content: expected an object, the answers by name")
        given = {**Elicitation("", "", schema).defaults, **content}
        if problems := compile_schema(schema, "the form").problems(given):
            told = [{"path": each.path, "text": each.text} for each in problems]
            raise Problem(422, "These answers do not fit the form", told)
    if not await console.store.delete(f"console-question:{ident}:{key[:40]}"):
        raise Problem(409, "It has just been answered")
    accepted: Json = (content if schema else True) if action == "accept" else None
    await console.command("answer", {"id": ident, "key": key, "said": "cancel" if action == "cancel" else accepted})
    return {}


async def cancel(console: Console, request: Request) -> Object:
    await console.command("untry", {"id": await _own(console, request)})
    return {}


async def answered(console: Console, data: Object) -> None:
    """In every worker: the one that waits for the answer goes on."""
    found = console.tries.get(data["id"])
    waiting = None if found is None else found.waiting.get(data["key"])
    if waiting is not None and not waiting.done():
        waiting.set_result(data["said"])


async def stopped(console: Console, data: Object) -> None:
    """One try, or all of a session that has ended."""
    for each in console.tries.values():
        if each.task is not None and data in ({"id": each.id}, {"session": each.session}):
            each.task.cancel()


async def _own(console: Console, request: Request) -> str:
    """The id of a try that is this session's."""
    ident = request.path["id"]
    if await console.store.get(f"console-try:{ident}") != request.session.key.encode():
        raise Problem(404, "There is no such try: it has ended, or is of another window's session")
    return ident


def _read(console: Console, request: Request) -> tuple[_Tried, Revision]:
    try:
        said = convert(request.body, _Tried)
    except ValidationError as problem:
        raise Problem(400, f"A try names a tool, its arguments and a revision: {problem}") from None
    return said, console.revision(said.revision)


def _entry(console: Console, name: str, who: Principal, revision: Revision) -> Entry:
    """The tool, if it is there for this caller: the same question a call asks."""
    entry = console.engine.catalog.get(name)
    if entry is None or not entry.shown_to(who.scopes) or console.gate.hides(entry, who, revision):
        raise Problem(404, f"There is no tool {name[:200]!r} for {who.id}")
    return entry


async def end(tries: dict[str, Try]) -> None:
    tasks = [each.task for each in tries.values() if each.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Door(Struct):
    """The server, as somebody in particular finds it from here."""

    server: Server
    who: Principal
    address: str

    @property
    def name(self) -> str:
        return self.server.name

    def serving(self) -> AbstractAsyncContextManager[Any]:
        return self.server.serving()

    def connect(self) -> Channel:
        return Channel(self.server.engine, self.who, self.address)


class Try:
    """One call, from the page and back."""

    def __init__(self, console: Console, session: str, who: Principal, seconds: float) -> None:
        self.id = secrets.token_hex(6)
        self.key = f"console-try:{self.id}"
        self.session = session
        self.seconds = seconds  # it may take
        self.task: asyncio.Task[None] | None = None
        self.waiting: dict[str, asyncio.Future[Json]] = {}
        self._console = console
        self._door = _Door(console.server, who, f"console {self.id}")

    async def run(self, said: _Tried, revision: Revision) -> None:
        loop = asyncio.get_running_loop()
        began, told = loop.time(), Object()
        try:
            async for event in self._events(said, revision):
                if isinstance(event, CallResult):
                    told["result"] = await asyncio.to_thread(self._console.hide.result, event.result)
                else:
                    await self._tell(event)
        except PeerError as problem:
            told["error"] = self._error(problem)
        except asyncio.CancelledError:
            text = "Cancelled: whether the tool had done something already is not known"
            told["error"] = {"kind": "refused", "message": text}
        except Exception:  # whoever waits at the page must hear that it is over
            log.exception("console: a try of %.100r failed", said.tool)
            text = "The console failed, and what became of the call is not known: look for it under Now and Audit, then"
            told["error"] = {"kind": "internal", "message": f"{text} try again. The server's log says why"}
        call = self._call
        done = {"kind": "done", "seconds": loop.time() - began, "call": "" if call is None else call.id, **told}
        try:
            await self._publish(done)
            await self._console.store.delete(self.key)
        except StoreError as problem:  # the page does not hear of it; what is kept ends by its time
            log.error("console: the end of a try cannot be told: %s", problem)

    async def _events(self, said: _Tried, revision: Revision) -> AsyncIterator[Progress | Log | CallResult]:
        seconds = self.seconds
        client = Client(
            self._door,
            revision=revision.name,
            timeout=Clocks(first=seconds, idle=seconds, total=seconds),
            trusted=True,
            confirm=allow,  # whoever pressed the button
            elicit=self._ask,
            elicit_url=self._ask,
            log=lambda *_: None,
            name="handrail console",
        )
        meta = {LOG_LEVEL: "debug"} if revision.stateless else None
        next_tell, logs, now = 0.0, 0, asyncio.get_running_loop().time
        async with client:
            async for event in client.events(said.tool, said.arguments, meta=meta):
                if isinstance(event, Progress):
                    if now() < next_tell:
                        continue
                    next_tell = now() + TELL_SECONDS
                elif isinstance(event, Log):
                    logs += 1
                    if logs > MAX_LOGS:
                        continue
                yield event

    @property
    def _call(self) -> Any:
        """The last call that came from here, as the feed knows it."""
        feed, address = self._console.feed, self._door.address
        known = [*feed.kept, *feed.running.values()]
        return next((seen for seen in reversed(known) if seen.address == address), None)

    async def _tell(self, event: Progress | Log) -> None:
        hide = self._console.hide
        if isinstance(event, Log):
            text = event.data if type(event.data) is str else encode(event.data).decode()
            await self._publish({"kind": "log", "level": event.level, "text": hide.cut(text)[0]})
            return
        progress: Object = {"done": event.done, "at": self._console.clock()}
        progress |= {} if event.total is None else {"total": event.total}
        progress |= {"message": hide.cut(event.message)[0]} if event.message else {}
        await self._publish({"kind": "progress", "progress": progress})

    async def _ask(self, question: Elicitation) -> Json:
        key = secrets.token_hex(6)
        self.waiting[key] = asyncio.get_running_loop().create_future()
        stored = f"console-question:{self.id}:{key}"
        await self._console.store.put(stored, encode(question.schema), ttl=MAX_SECONDS)
        try:
            await self._publish({"kind": "question", "key": key, "question": _question(question)})
            return await self.waiting[key]
        finally:
            del self.waiting[key]
            with suppress(StoreError):
                await self._console.store.delete(stored)

    async def _publish(self, event: Object) -> None:
        await self._console.publish("try", {"id": self.id, **event}, to=self.session)

    def _error(self, problem: PeerError) -> Object:
        """What a guard refused is not what broke the protocol, though both are told as errors."""
        hide, seen = self._console.hide, self._call
        made: Object = {"message": hide.text(problem.text)}
        match problem:
            case InvalidResult(sent=Sent.NO):  # the definition is wrong, not what came of a call
                made |= {
                    "kind": "refused",
                    "message": f"Not called, as other clients may not call it either: {problem.text}",
                }
            case RemoteProtocolError():
                kind = "" if seen is None or seen.refusal is None else seen.refusal[0]
                made |= {"kind": "refused" if kind in _GUARDS else "protocol", "code": problem.code}
                made |= {} if problem.data is None else {"data": hide.small(problem.data)}
            case CallTimeout():
                made["kind"] = "timeout"
            case TransportError():
                made["kind"] = "transport"
            case _:
                made["kind"] = "refused"
        return made


# Questions


def _question(asked: Elicitation) -> Object:
    made: Object = {"server": asked.server, "message": asked.message}
    if not asked.url:
        return {**made, "schema": asked.schema, "defaults": asked.defaults}
    return {**made, **page_of(asked.url)}


def page_of(url: str) -> Object:
    """A page somebody is to visit: the whole address, whose it is, and what to be careful about."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    made: Object = {"url": url, "host": host}
    warnings = []
    if parts.scheme != "https":
        warnings.append("The connection is not encrypted: others can read what you enter there")
    try:
        ip_address(host)
        warnings.append("The host is a number, not a name: nobody can tell whose it is")
    except ValueError:
        pass
    if parts.port not in (None, _PORTS.get(parts.scheme)):
        warnings.append(f"It is at the unusual port {parts.port}")
    letters, punycode = _spelled(host)
    if letters != punycode:
        made |= {} if host == punycode else {"host_shown": punycode}
        warnings.append(f"{punycode} is not in plain letters: it reads {letters}")
        warnings += [f"{name} can be taken for {other}" for name, other in look_alikes([letters])]
    return {**made, "warnings": warnings}


def _spelled(host: str) -> tuple[str, str]:
    """A host in letters, and in punycode."""
    try:
        return host.encode("ascii").decode("idna") if host.isascii() else host, host.encode("idna").decode()
    except UnicodeError:
        return host, host
