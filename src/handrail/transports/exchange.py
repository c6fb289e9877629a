"""One HTTP request and what comes of it."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs

from msgspec import UNSET, UnsetType

from handrail import jsonrpc
from handrail.engine.dispatch import Conversation
from handrail.engine.flight import LATER
from handrail.engine.sessions import EventLog, Session
from handrail.errors import Kind, Refused
from handrail.jsonrpc import Id, Message, Notification, Refusal, Request
from handrail.model import Json, Principal
from handrail.protocol import http, sse
from handrail.protocol.connection import Connection, names_version
from handrail.protocol.http import PROTOCOL, SESSION, Headers
from handrail.revisions.base import CAPABILITIES, VERSION
from handrail.transports.response import JSON, RETRY_MS, Fields, Receive, Response, Scope, Send

if TYPE_CHECKING:
    from handrail.transports.asgi import Endpoint

WATCH_SECONDS = 0.05  # a call that takes longer is watched for its caller going away
_WAITING = ("tools/call", "subscriptions/listen")
QUIET_SECONDS = 2.0  # then the answer becomes a stream, so that nobody in between takes it for dead


class Exchange(Response):
    """What every kind of request needs: its head, the way back, and a conversation to be part of."""

    conversation: Conversation
    principal: Principal
    task: asyncio.Task[Any]  # in which it is answered, if that takes a while
    _watcher: asyncio.Task[None] | None = None

    def __init__(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        super().__init__(send, receive, headers, endpoint.engine.limits)
        self.endpoint = endpoint
        self.engine = endpoint.engine
        self.scope = scope

    async def run(self) -> None:
        raise NotImplementedError

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def here(self) -> str:
        """The address of the server, as the caller knows it."""
        scheme, root = self.scope.get("scheme", "http"), self.scope.get("root_path", "")
        return f"{scheme}://{self.header(b'host')}{root}"

    def _converse(self, connection: Connection | None = None) -> Connection:
        self.conversation = Conversation(self.engine, self, self.principal, connection)
        self.conversation.headers = self.headers
        return self.conversation.connection

    def _enter(self) -> None:
        """From now on the endpoint knows of this, which takes a while."""
        self.task = cast("asyncio.Task[Any]", asyncio.current_task())
        self.endpoint.open.add(self)

    def _leave(self) -> None:
        self.endpoint.open.discard(self)
        if self._watcher is not None:
            self._watcher.cancel()

    def _begin_watching(self) -> None:
        self._watcher = asyncio.create_task(self.watch())

    async def _outlive(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that goes on when whoever asked for it has gone, and the request with it."""
        self.task, leaving = asyncio.create_task(work), asyncio.create_task(self.left())
        self.endpoint.tasks.add(self.task)
        self.task.add_done_callback(self.endpoint.tasks.discard)
        try:
            await asyncio.wait((self.task, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()

    async def _find(self, ident: bytes) -> Session:
        """The session of an id, which speaks what the header says it does."""
        session = await self.endpoint.sessions.find(ident, self.principal)
        if session is None:
            raise Refused(Kind.NO_SESSION, "Session not found: begin again with initialize")
        agreed, said = session.connection.voice.name, self.header(PROTOCOL)
        if PROTOCOL in self.headers and said != agreed:
            raise Refused(Kind.INVALID_REQUEST, f"MCP-Protocol-Version {said[:50]!r}: this session speaks {agreed}")
        return session

    async def _refuse_as_text(self, refused: Refused) -> None:
        status = self.engine.offer.newest.faults[refused.kind].status
        await self.text(status, refused.text)

    def _log(self, session: Session | None, kind: str = "") -> tuple[EventLog | None, bytes]:
        """Where the events of a stream are kept, and what it begins with."""
        first = b"" if self.unsent else sse.KEEP_ALIVE  # so that the head goes out
        if session is None:
            return None, first
        log = EventLog(self.endpoint.sessions.store, session, kind + secrets.token_urlsafe(9))
        if session.connection.voice.primes:
            first = sse.event(b"", ident=log.ident(0), retry_ms=RETRY_MS)
        return log, first


class Post(Exchange):
    """A message: a request of any revision, a notification, an answer, or a batch of them."""

    _wants_json = True

    async def run(self) -> None:
        headers, query = self.headers, self.scope["query_string"]
        self._wants_json, self.two_way = http.accepts(headers.get(b"accept", b""))
        ident = parse_qs(query.decode("latin-1")).get("sessionId", [""])[0] if query else ""
        if not http.is_json(headers.get(b"content-type", b"")):
            await self.text(415, "Content-Type must be application/json")
        elif headers.get(b"content-encoding", b"identity") != b"identity":
            await self.text(415, "Compressed bodies are not taken")
        elif not self._wants_json and not self.two_way and not ident:
            await self.text(406, "Accept must name application/json or text/event-stream")
        else:
            body = await self._body()
            if body is not None:
                message = jsonrpc.decode(body)
                if ident and not (type(message) is Request and names_version(message)):
                    await self._to_pipe(ident, body)
                elif type(message) is Request:
                    await self._request(message)
                elif isinstance(message, Refusal):
                    await self._unreadable(message)
                else:
                    await self._other(message, body)

    async def _body(self) -> bytes | None:
        """The whole body; None if it was too long, or never came."""
        most = self.limits.max_message_bytes
        declared = self.headers.get(b"content-length", b"")
        got = int(declared[:20]) if declared.isdigit() else 0
        pieces: list[bytes] = []
        while got <= most:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                return None
            pieces.append(event.get("body", b""))
            if not event.get("more_body"):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            got = max(got, sum(map(len, pieces)))
        await self.text(413, f"A message has at most {most:,} bytes")
        return None

    async def _to_pipe(self, ident: str, body: bytes) -> None:
        conversation = self.endpoint.pipes.get(ident)
        if not self.endpoint.sessions.owns_pipe(ident, self.principal):
            await self.text(404, "No such stream: open one with GET")
            return
        if conversation is None:
            await self.endpoint.sessions.pass_on(ident, body)
        else:
            conversation.say(conversation.receive(body) or None)
        await self.whole(202, [], b"")

    # Who is speaking: the body says so, or the session does.

    async def _request(self, request: Request) -> None:
        session: Session | None = None
        try:
            if names_version(request) and self.engine.offer.stateless:
                self._check_stateless(request, self._converse())
            elif request.method == "initialize":
                return await self._initialize(request)
            else:
                session = await self._session(request)
                self._converse(session.connection)
        except Refused as refused:
            return await self._refuse(request.id, refused)
        return await self._answer(request, session)

    async def _unreadable(self, refusal: Refusal) -> None:
        is_modern = self.header(PROTOCOL) in self.engine.offer.stateless
        kind = Kind.ENVELOPE if is_modern and refusal.kind is Kind.BAD_PARAMS else refusal.kind
        await self._refuse(refusal.id, Refused(kind, refusal.text))

    async def _other(self, message: Message | list[Json], body: bytes) -> None:
        """A notification, an answer, or a batch."""
        if type(message) is Notification and self.header(PROTOCOL) in self.engine.offer.stateless:
            await self.whole(202, [], b"")  # those have none over HTTP; nobody waits for an answer
            return
        try:
            session = await self._session(message)
        except Refused as refused:
            await self._refuse(UNSET, refused)
            return
        connection = self._converse(session.connection)
        if session.name and not connection.waits_for(message):
            await self.endpoint.sessions.pass_on(session.name, body)
        await self._answer(message, session)

    def _check_stateless(self, request: Request, connection: Connection) -> None:
        http.check_version(request, self.headers)
        connection.check_envelope(request, connection.speaker(request))
        http.check_mirrors(request, self.headers)
        if request.method == "subscriptions/listen" and not self.two_way:
            raise Refused(Kind.INVALID_REQUEST, "subscriptions/listen is answered with events: accept them")

    async def _initialize(self, request: Request) -> None:
        connection = self._converse()
        self.finish(self.conversation.handle(request, self.finish))
        fields: Fields = []
        if connection.revision is not None:
            fields = [(SESSION, self.endpoint.sessions.begin(connection, self.principal).encode())]
        if self._wants_json or self.conversation.status != 200:
            await self._say(fields)
        else:
            await self.begin_events(fields=fields)
            await self.events(None)

    async def _session(self, message: Message | list[Json]) -> Session:
        """The session a message belongs to."""
        offer, ident = self.engine.offer, self.headers.get(SESSION)
        said = self.header(PROTOCOL)
        if said in offer.stateless and not isinstance(message, list):
            raise Refused(Kind.ENVELOPE, f"{said}: params._meta lacks {VERSION!r} and {CAPABILITIES!r}")
        if ident:
            return await self._find(ident)
        if isinstance(message, list) and (said or not self.endpoint.legacy_stateless):
            raise Refused(Kind.INVALID_REQUEST, "Batches are for sessions of 2025-03-26: send one message at a time")
        if said and said not in offer.handshake:
            known = {"supported": offer.supported, "requested": said[:100]}
            raise Refused(Kind.ENVELOPE, "Unsupported protocol version", known)
        if not self.endpoint.legacy_stateless:
            raise Refused(Kind.INVALID_REQUEST, "Mcp-Session-Id is missing: begin with initialize")
        connection = self._converse()
        connection.revision = offer.handshake.get(said) or offer.assumed
        return Session("", connection)

    async def _refuse(self, ident: Id | UnsetType, refused: Refused) -> None:
        """Refuse a message in the words of whoever speaks, as far as that is known."""
        voice = (self.conversation.connection if hasattr(self, "conversation") else self._converse()).voice
        self.finish(self.conversation.refusal(voice, ident, refused))
        await self._say([])

    async def _answer(self, message: Message | list[Json], session: Session | None) -> None:
        """Handle a message, and say what there is to say in the shortest form that will do."""
        conversation = self.conversation
        waits = message.method in _WAITING if type(message) is Request else type(message) is list
        if waits and self.endpoint.calls[self.principal.id] >= self.limits.max_calls:
            ident = message.id if type(message) is Request else UNSET
            await self._refuse(ident, Refused(Kind.OVERLOADED, "Too many requests are in flight; wait for some to end"))
            return
        first = conversation.handle(message, self.finish)
        if first is not LATER:
            self.finish(first)
        elif type(message) is list:
            conversation.status = 200  # whatever became of its members
        named = session if session is not None and session.name else None
        if named is not None and type(message) is Request and message.method == "logging/setLevel":
            await self.endpoint.sessions.note_level(named)
        as_json = self._wants_json or first is None or conversation.status != 200
        if as_json and self.ended and not self.unsent:
            await self._say([])
            return
        self._enter()
        self.endpoint.calls[self.principal.id] += 1
        later = self._answer_later(named, is_stateless=session is None)
        await (later if named is None else self._outlive(later))

    async def _answer_later(self, session: Session | None, *, is_stateless: bool) -> None:
        try:
            if not self.unsent and not self.paused:
                await self.wait(WATCH_SECONDS)
            self._begin_watching()
            if not self.unsent and not self.paused and not self.ended:
                await self.wait(QUIET_SECONDS - WATCH_SECONDS)
            said_more = self.unsent or self.paused or not self.ended
            if self.two_way and (said_more or not self._wants_json):
                log, first = self._log(session)
                await self.begin_events(first)
                await self.events(log, outlives=0.0 if log is None else math.inf)
                return
            while not self.ended and not self.gone:
                await self.wait(QUIET_SECONDS)
            if not self.gone:
                await self._say([])
        finally:
            self._leave()
            self.endpoint.calls[self.principal.id] -= 1
            if is_stateless and not self.ended:
                self.conversation.drop()  # whoever goes away does not want the answer

    async def _say(self, fields: Fields) -> None:
        """The answer as JSON, or the news that there is none."""
        answer, status = self.answer, self.conversation.status
        if answer is None:
            await self.whole(202, fields, b"")
        else:
            if status == 429:
                fields = [*fields, (b"retry-after", b"1")]
            elif status == 403:
                needed = {"error": "insufficient_scope", "scope": " ".join(sorted(self.conversation.needed))}
                fields = [*fields, http.challenge({**self.endpoint.challenge(self), **needed})]
            await self.whole(status, JSON + fields if fields else JSON, answer)
