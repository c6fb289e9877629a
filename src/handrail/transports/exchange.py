"""One HTTP request and what comes of it."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any
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
from handrail.protocol.http import PROTOCOL, SESSION
from handrail.revisions.base import CAPABILITIES, VERSION
from handrail.transports.response import JSON, RETRY_MS, Fields, Receive, Response, Scope

if TYPE_CHECKING:
    from handrail.transports.asgi import Endpoint

WATCH_SECONDS = 0.05  # a call that takes longer is watched for its caller going away
_WAITING = ("tools/call", "subscriptions/listen")
QUIET_SECONDS = 2.0  # then the answer becomes a stream, so that nobody in between takes it for dead


class Exchange:
    """What every kind of request needs: its head, the way back, and a conversation to be part of."""

    conversation: Conversation

    def __init__(
        self,
        endpoint: Endpoint,
        scope: Scope,
        receive: Receive,
        response: Response,
        principal: Principal,
        challenge: dict[str, str],
    ) -> None:
        self.endpoint = endpoint
        self.engine = endpoint.engine
        self.scope = scope
        self.headers = response.headers
        self.response = response
        self.principal = principal
        self.task: asyncio.Task[Any] = asyncio.current_task()  # type: ignore[assignment]  # an application runs in one
        self._receive = receive
        self._challenge = challenge  # what a caller that may not is told of how to get there

    async def run(self) -> None:
        raise NotImplementedError

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    def _converse(self, connection: Connection | None = None) -> Connection:
        self.conversation = Conversation(self.engine, self.response.stream, self.principal, connection)
        self.conversation.headers = self.headers
        return self.conversation.connection

    async def _outlive(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that goes on when whoever asked for it has gone, and the request with it."""
        self.task = asyncio.create_task(work)
        self.endpoint.tasks.add(self.task)
        self.task.add_done_callback(self.endpoint.tasks.discard)
        leaving = asyncio.create_task(self.response.stream.left.wait())
        try:
            await asyncio.wait((self.task, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()

    async def _find(self, text: str) -> Session:
        """The session of an id, which speaks what the header says it does."""
        session = await self.endpoint.sessions.find(text, self.principal)
        if session is None:
            raise Refused(Kind.NO_SESSION, "Session not found: begin again with initialize")
        agreed, said = session.connection.voice.name, self.header(PROTOCOL)
        if PROTOCOL in self.headers and said != agreed:
            raise Refused(Kind.INVALID_REQUEST, f"MCP-Protocol-Version {said[:50]!r}: this session speaks {agreed}")
        return session

    async def _refuse_as_text(self, refused: Refused) -> None:
        status = self.engine.offer.newest.faults[refused.kind].status
        await self.response.text(status, refused.text)

    def _log(self, session: Session | None, kind: str = "") -> tuple[EventLog | None, bytes]:
        """Where the events of a stream are kept, and what it begins with."""
        first = b"" if self.response.stream.unsent else sse.KEEP_ALIVE  # so that the head goes out
        if session is None:
            return None, first
        log = EventLog(self.endpoint.sessions.store, session, kind + secrets.token_urlsafe(9))
        if session.connection.voice.primes:
            first = sse.event(b"", ident=log.ident(0), retry_ms=RETRY_MS)
        return log, first


class Post(Exchange):
    """A message: a request of any revision, a notification, an answer, or a batch of them."""

    _wants_json = _wants_events = True

    async def run(self) -> None:
        headers, say = self.headers, self.response.text
        self._wants_json, self._wants_events = http.accepts(headers.get(b"accept", b""))
        self.response.stream.two_way = self._wants_events
        query = self.scope["query_string"]
        ident = parse_qs(query.decode("latin-1")).get("sessionId", [""])[0] if query else ""
        if not http.is_json(headers.get(b"content-type", b"")):
            await say(415, "Content-Type must be application/json")
        elif headers.get(b"content-encoding", b"identity") != b"identity":
            await say(415, "Compressed bodies are not taken")
        elif not self._wants_json and not self._wants_events and not ident:
            await say(406, "Accept must name application/json or text/event-stream")
        else:
            body = await self._body()
            if body is not None:
                message = jsonrpc.decode(body)
                if ident and not (type(message) is Request and names_version(message)):
                    await self._to_pipe(ident, body)
                else:
                    await self._take(message, body)

    async def _body(self) -> bytes | None:
        """The whole body; None if it was too long, or never came."""
        most = self.engine.limits.max_message_bytes
        declared = self.headers.get(b"content-length", b"")
        size = int(declared[:20]) if declared.isdigit() else 0
        pieces: list[bytes] = []
        got = 0
        while max(size, got) <= most:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                return None
            pieces.append(event.get("body", b""))
            if not event.get("more_body"):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            got += len(pieces[-1])
        await self.response.text(413, f"A message has at most {most:,} bytes")
        return None

    async def _to_pipe(self, ident: str, body: bytes) -> None:
        conversation = self.endpoint.pipes.get(ident)
        if not self.endpoint.sessions.owns_pipe(ident, self.principal):
            await self.response.text(404, "No such stream: open one with GET")
            return
        if conversation is None:
            await self.endpoint.sessions.pass_on(ident, body)
        else:
            conversation.say(conversation.receive(body) or None)
        await self.response.whole(202, [], b"")

    async def _take(self, message: Message | list[Json], body: bytes) -> None:
        """Who is speaking: the body says so, or the session does."""
        if isinstance(message, Refusal):
            self._converse()
            is_modern = self.header(PROTOCOL) in self.engine.offer.stateless
            kind = Kind.ENVELOPE if is_modern and message.kind is Kind.BAD_PARAMS else message.kind
            await self._refuse(message.id, Refused(kind, message.text))
        elif type(message) is Request and names_version(message) and self.engine.offer.stateless:
            await self._take_stateless(message)
        elif type(message) is Request and message.method == "initialize":
            await self._initialize(message)
        else:
            try:
                session = await self._session(message)
            except Refused as refused:
                self._converse()
                await self._refuse(message.id if type(message) is Request else UNSET, refused)
                return
            if session is None:
                await self.response.whole(202, [], b"")
            else:
                connection = self._converse(session.connection)
                if session.name and not connection.waits_for(message):
                    await self.endpoint.sessions.pass_on(session.name, body)
                await self._answer(message, session)

    async def _take_stateless(self, request: Request) -> None:
        connection = self._converse()
        try:
            http.check_version(request, self.headers)
            connection.check_envelope(request, connection.speaker(request))
            http.check_mirrors(request, self.headers)
            if request.method == "subscriptions/listen" and not self._wants_events:
                raise Refused(Kind.INVALID_REQUEST, "subscriptions/listen is answered with events: accept them")
        except Refused as refused:
            await self._refuse(request.id, refused)
        else:
            await self._answer(request, None)

    async def _initialize(self, request: Request) -> None:
        stream, connection = self.response.stream, self._converse()
        stream.finish(self.conversation.handle(request, stream.finish))
        fields: Fields = []
        if connection.revision is not None:
            fields = [(SESSION, self.endpoint.sessions.begin(connection, self.principal).encode())]
        if self._wants_json or self.conversation.status != 200:
            await self._say(fields)
        else:
            await self.response.begin_events(fields=fields)
            await self.response.events(None)

    async def _session(self, message: Message | list[Json]) -> Session | None:
        """The session a message belongs to; None if there is none and none is needed."""
        offer = self.engine.offer
        said = self.header(PROTOCOL)
        text = self.header(SESSION)
        if said in offer.stateless and not isinstance(message, list):
            if type(message) is Notification:
                return None  # that revision has none over HTTP; nobody waits for an answer
            raise Refused(Kind.ENVELOPE, f"{said}: params._meta lacks {VERSION!r} and {CAPABILITIES!r}")
        if isinstance(message, list) and not text and (said or not self.endpoint.legacy_stateless):
            raise Refused(Kind.INVALID_REQUEST, "Batches are for sessions of 2025-03-26: send one message at a time")
        if text:
            return await self._find(text)
        if said and said not in offer.handshake:
            known = {"supported": offer.supported, "requested": said[:100]}
            raise Refused(Kind.ENVELOPE, "Unsupported protocol version", known)
        if not self.endpoint.legacy_stateless:
            raise Refused(Kind.INVALID_REQUEST, "Mcp-Session-Id is missing: begin with initialize")
        connection = self._converse()
        connection.revision = offer.handshake.get(said) or offer.assumed
        return Session("", connection)

    async def _refuse(self, ident: Id | UnsetType, refused: Refused) -> None:
        conversation = self.conversation
        self.response.stream.finish(conversation.refusal(conversation.connection.voice, ident, refused))
        await self._say([])

    async def _answer(self, message: Message | list[Json], session: Session | None) -> None:
        """Handle a message, and say what there is to say in the shortest form that will do."""
        endpoint, stream = self.endpoint, self.response.stream
        named = session if session is not None and session.name else None
        waits = isinstance(message, Request) and message.method in _WAITING
        if endpoint.calls[self.principal.id] >= self.engine.limits.max_calls and (waits or isinstance(message, list)):
            ident = message.id if isinstance(message, Request) else UNSET
            await self._refuse(ident, Refused(Kind.OVERLOADED, "Too many requests are in flight; wait for some to end"))
            return
        first = self.conversation.handle(message, stream.finish)
        if first is not LATER:
            stream.finish(first)
        elif isinstance(message, list):
            self.conversation.status = 200  # whatever became of its members
        if named is not None and isinstance(message, Request) and message.method == "logging/setLevel":
            await endpoint.sessions.note_level(named)
        as_json = self._wants_json or first is None or self.conversation.status != 200
        if as_json and stream.ended and not stream.unsent:
            await self._say([])
            return
        endpoint.open.add(self)
        endpoint.calls[self.principal.id] += 1
        later = self._answer_later(named, is_stateless=session is None)
        await (later if named is None else self._outlive(later))

    async def _answer_later(self, session: Session | None, *, is_stateless: bool) -> None:
        endpoint, response, stream = self.endpoint, self.response, self.response.stream
        if not stream.unsent and not stream.paused:
            await stream.wait(WATCH_SECONDS)
        watcher = asyncio.create_task(response.watch())
        try:
            if not stream.ended and not stream.unsent and not stream.paused:
                await stream.wait(QUIET_SECONDS - WATCH_SECONDS)
            said_more = stream.unsent or stream.paused or not stream.ended
            if self._wants_events and (said_more or not self._wants_json):
                log, first = self._log(session)
                await response.begin_events(first)
                await response.events(log, outlives=0.0 if log is None else math.inf)
                return
            while not stream.ended and not stream.gone:
                await stream.wait(QUIET_SECONDS)
            if not stream.gone:
                await self._say([])
        finally:
            endpoint.open.discard(self)
            endpoint.calls[self.principal.id] -= 1
            watcher.cancel()
            if is_stateless and not stream.ended:
                self.conversation.drop()  # whoever goes away does not want the answer

    async def _say(self, fields: Fields) -> None:
        """The answer as JSON, or the news that there is none."""
        answer, status = self.response.stream.answer, self.conversation.status
        if answer is None:
            await self.response.whole(202, fields, b"")
        else:
            more: Fields = [(b"retry-after", b"1")] if status == 429 else []
            if status == 403:
                needed = {"error": "insufficient_scope", "scope": " ".join(sorted(self.conversation.needed))}
                more = [http.challenge({**self._challenge, **needed})]
            await self.response.whole(status, JSON + fields + more, answer)
