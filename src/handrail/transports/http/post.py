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
from handrail.engine.dispatcher import Conversation
from handrail.engine.http_sessions import EventLog, Session
from handrail.engine.inflight import LATER
from handrail.errors import Kind, Refused
from handrail.jsonrpc import Id, Message, Notification, Refusal, Request
from handrail.model import Json, Principal
from handrail.protocol import http_rules as http, sse
from handrail.protocol.connection import Connection, names_version
from handrail.protocol.http_rules import PROTOCOL, SESSION, Headers
from handrail.protocol.trace import NO_TRACE, trace_headers
from handrail.revisions.base import CAPABILITIES, VERSION
from handrail.transports.http.response import JSON, RETRY_MS, Fields, Receive, Response, Scope, Send

if TYPE_CHECKING:
    from handrail.transports.http.endpoint import Endpoint
    from handrail.transports.http1.request import Cycle

WATCH_SECONDS = 0.05  # a call that takes longer is watched for its caller going away
_WAITING = ("tools/call", "subscriptions/listen")
Rest = Coroutine[Any, Any, None] | None  # of the work; None: there is none, or the answer will come by itself
QUIET_SECONDS = 2.0  # then the answer becomes a stream, so that nobody in between takes it for dead


class Exchange(Response):
    """What every kind of request needs: its head, the way back, and a conversation to be part of."""

    conversation: Conversation | None = None  # when it is known who speaks, and until that is over
    connection: Connection | None = None  # of that conversation
    principal: Principal
    message: Message | list[Json] | None = None
    raw = b""  # the same, as it came
    task: asyncio.Task[Any] | None = None  # in which it is answered, if that takes a while
    cycle: Cycle | None = None  # of a listener of ours, which takes an answer at any time
    _watcher: asyncio.Task[None] | None = None

    def __init__(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        super().__init__(scope, receive, send, headers, endpoint.engine.limits)
        self.endpoint = endpoint
        self.engine = endpoint.engine

    async def run(self) -> None:
        raise NotImplementedError

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def here(self) -> str:
        """The address of the server, as the caller knows it."""
        scheme, root = self.scope.get("scheme", "http"), self.scope.get("root_path", "")
        return f"{scheme}://{self.header(b'host')}{root}"

    @property
    def peer(self) -> str:
        """Where the caller is, as far as the listener knows."""
        client = self.scope.get("client")
        return str(client[0]) if client else "unix"

    def _converse(self, connection: Connection | None = None) -> Conversation:
        self.conversation = conversation = Conversation(self.engine, self, self.principal, connection)
        self.connection = conversation.connection
        conversation.address, conversation.raw = self.peer, self.raw
        conversation.is_identified = self.endpoint.auth is not None
        conversation.headers = headers = self.headers
        conversation.traced = trace_headers(headers) if b"traceparent" in headers else NO_TRACE
        if b"authorization" in headers:  # no business of a tool's
            conversation.headers = {name: headers[name] for name in headers if name != b"authorization"}
        return conversation

    def _leave(self) -> None:
        self.endpoint.open.discard(self)
        self.part()
        if self._watcher is not None:
            self._watcher.cancel()

    def part(self) -> None:
        """Conversation and exchange know each other: left like that, only the garbage collector would find them."""
        self.conversation = None

    async def _outlive(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that goes on when whoever asked for it has gone, and the request with it."""
        self.task = task = asyncio.create_task(work)
        self.endpoint.tasks.add(task)
        task.add_done_callback(self.endpoint.tasks.discard)
        self._left = left = task.get_loop().create_future()
        if not self.gone:
            await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()

    def _fitting(self, session: Session | None) -> Session:
        """The session that was looked for, if it is there and speaks what the header says it does."""
        if session is None:
            raise Refused(Kind.NO_SESSION, "Session not found: begin again with initialize")
        said = self.headers.get(PROTOCOL)
        if said is not None and said != session.version:
            text = f"MCP-Protocol-Version {said[:50].decode('latin-1')!r}: this session speaks "
            raise Refused(Kind.INVALID_REQUEST, text + session.connection.voice.name)
        return session

    def refuse_to_begin(self) -> None:
        self.text(503, "The server is stopping", [(b"retry-after", b"1")])

    def _log(self, session: Session | None, kind: str = "") -> tuple[EventLog | None, bytes]:
        """Where the events of a stream are kept, and what it begins with."""
        first = b"" if self.unsent else sse.KEEP_ALIVE  # so that the head goes out
        if session is None or not session.name:
            return None, first
        log = EventLog(self.endpoint.sessions.store, session, kind + secrets.token_urlsafe(9))
        if session.connection.voice.primes:
            first = sse.event(b"", ident=log.ident(0), retry_ms=RETRY_MS)
        return log, first


class Post(Exchange):
    """A message: a request of any revision, a notification, an answer, or a batch of them.

    Most are answered where they are taken, or by the call itself when it ends: what is pending takes no task. What
    takes longer, or has more to say than its answer, comes back as a coroutine, the rest of the work.
    """

    session: Session | None = None  # it is part of; in a stateless revision none, else perhaps one without a name
    _wants_json = True

    async def run(self) -> None:
        body = None if self._is_unfit() else await self._body()
        rest = None if body is None else self._read(body)
        if rest is not None:
            await rest

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
        self.text(413, f"A message has at most {most:,} bytes")
        return None

    def accept(self, body: bytes) -> Rest:
        """Take a message that came whole."""
        if self._is_unfit():
            return None
        if len(body) > self.limits.max_message_bytes:
            self.text(413, f"A message has at most {self.limits.max_message_bytes:,} bytes")
            return None
        return self._read(body)

    def _is_unfit(self) -> bool:
        """Whether the head of a request speaks against its body; if so, that is said."""
        get = self.headers.get
        fit = http.fitness(get(b"content-type", b""), get(b"content-encoding"), get(b"accept", b""))
        self._wants_json, self.two_way, flaw = fit
        if flaw:
            self.text(415, flaw)
        elif not self._wants_json and not self.two_way and not self._pipe_named():
            self.text(406, "Accept must name application/json or text/event-stream")
        return self.said is not None

    def _pipe_named(self) -> str:
        """The pipe of the transport of 2024 a message is for."""
        query = self.scope["query_string"]
        return parse_qs(query.decode("latin-1")).get("sessionId", [""])[0] if query else ""

    def _read(self, body: bytes) -> Rest:
        """Who is speaking: the body says so, or the session does."""
        if self.endpoint.stopping:  # since the head came
            self.refuse_to_begin()
            return None
        self.raw, self.message = body, (message := jsonrpc.decode(body))
        pipe = self.scope["query_string"] and self._pipe_named()
        if pipe and not (type(message) is Request and names_version(message)):
            return self._to_pipe(pipe, message, body)
        if isinstance(message, Refusal):
            is_modern = self.header(PROTOCOL) in self.engine.offer.stateless
            kind = Kind.ENVELOPE if is_modern and message.kind is Kind.BAD_PARAMS else message.kind
            return self._refuse(message.id, Refused(kind, message.text))
        try:
            if type(message) is Request and names_version(message) and self.engine.offer.stateless:
                conversation = self._converse()
                self._check_stateless(message, conversation.connection)
                return self._answer(conversation, message)
            if type(message) is Request and message.method == "initialize":
                return self._initialize(message)
            if type(message) is Notification and self.header(PROTOCOL) in self.engine.offer.stateless:
                self.whole(202, [], b"")  # that revision has none over HTTP; nobody waits for an answer
                return None
            session = self._session(message)
        except Refused as refused:
            return self._refuse(message.id if type(message) is Request else UNSET, refused)
        if session is None:
            return self._take_later(message, body)
        return self._take_in(session, message, body)

    async def _take_later(self, message: Message | list[Json], body: bytes) -> None:
        """With a session that is to be looked for in a store which takes its time."""
        try:
            session = self._fitting(await self.endpoint.sessions.find(self.headers[SESSION], self.principal))
        except Refused as refused:
            self._refuse(message.id if type(message) is Request else UNSET, refused)
            return
        if self.endpoint.stopping:
            self.refuse_to_begin()
            return
        rest = self._take_in(session, message, body)
        if rest is not None:
            await rest

    def _take_in(self, session: Session, message: Message | list[Json], body: bytes) -> Rest:
        conversation, self.session = self._converse(session.connection), session
        if type(message) is Request or not session.name or session.connection.waits_for(message):
            return self._answer(conversation, message)
        return self._pass_on(session.name, body)

    async def _pass_on(self, name: str, body: bytes) -> None:
        """An answer or a notice that somebody in another process waits for."""
        await self.endpoint.sessions.pass_on(name, body)
        self.whole(202, [], b"")

    async def _to_pipe(self, ident: str, message: Message | list[Json], body: bytes) -> None:
        conversation = self.endpoint.pipes.get(ident)
        if not self.endpoint.sessions.owns_pipe(ident, self.principal):
            self.text(404, "No such stream: open one with GET")
        # What a notice is about may still be on its way here from another process: then it follows on the same way.
        elif conversation is None or not conversation.connection.waits_for(message):
            await self._pass_on(ident, body)
        else:
            conversation.say(conversation.receive(body) or None)
            self.whole(202, [], b"")

    def _check_stateless(self, request: Request, connection: Connection) -> None:
        http.check_version(request, self.headers)
        revision = connection.speaker(request)
        try:
            http.check_mirrors(request, self.headers)
        except Refused:
            connection.check_envelope(request, revision)  # else it is checked with the parameters
            raise
        if request.method == "subscriptions/listen" and not self.two_way:
            connection.check_envelope(request, revision)
            raise Refused(Kind.INVALID_REQUEST, "subscriptions/listen is answered with events: accept them")

    def _initialize(self, request: Request) -> Rest:
        conversation = self._converse()
        self.finish(conversation.handle(request, self.finish))
        fields: Fields = []
        if conversation.connection.revision is not None:
            fields = [(SESSION, self.endpoint.sessions.begin(conversation.connection, self.principal).encode())]
        if self._wants_json or conversation.status != 200:
            return self._say(self.answer, fields)
        return self._as_events(fields)

    async def _as_events(self, fields: Fields) -> None:
        await self.begin_events(fields=fields)
        await self.events(None)

    def _session(self, message: Message | list[Json]) -> Session | None:
        """The session a message belongs to; None if that can only be told after a while."""
        offer, ident = self.engine.offer, self.headers.get(SESSION)
        said = self.header(PROTOCOL)
        if said in offer.stateless and type(message) is jsonrpc.Response:
            text = f"{said}: a server sends no requests, so there is nothing to answer"
            raise Refused(Kind.INVALID_REQUEST, f"{text}; answers go into params.inputResponses of the repeated call")
        if said in offer.stateless and not isinstance(message, list):
            raise Refused(Kind.ENVELOPE, f"{said}: params._meta lacks {VERSION!r} and {CAPABILITIES!r}")
        if ident:
            sessions = self.endpoint.sessions
            return None if sessions.peek is None else self._fitting(sessions.find_at_once(ident, self.principal))
        if isinstance(message, list) and (said or not self.endpoint.legacy_stateless):
            raise Refused(Kind.INVALID_REQUEST, "Batches are for sessions of 2025-03-26: send one message at a time")
        if said and said not in offer.handshake:
            known = {"supported": offer.supported, "requested": said[:100]}
            raise Refused(Kind.ENVELOPE, "Unsupported protocol version", known)
        if not self.endpoint.legacy_stateless:
            raise Refused(Kind.INVALID_REQUEST, "Mcp-Session-Id is missing: begin with initialize")
        connection = Connection(offer, self.engine.hidden)
        connection.revision = offer.handshake.get(said) or offer.assumed
        return Session("", connection)

    def _refuse(self, ident: Id | UnsetType, refused: Refused) -> Rest:
        """Refuse a message in the words of whoever speaks, as far as that is known."""
        conversation = self.conversation or self._converse()
        connection = conversation.connection
        if type(self.message) is Request:
            conversation.turned_away(self.message, connection.voice_for(self.message), refused)
        return self._say(conversation.refusal(connection.voice, ident, refused))

    def _answer(self, conversation: Conversation, message: Message | list[Json]) -> Rest:
        """Handle a message, and say what there is to say in the shortest form that will do."""
        endpoint = self.endpoint
        waits = message.method in _WAITING if type(message) is Request else type(message) is list
        if waits and endpoint.calls.get(self.principal.id, 0) >= self.limits.max_calls:
            ident = message.id if type(message) is Request else UNSET
            text = "Too many requests are in flight; wait for some to end"
            if self.session is None and type(message) is Request:
                conversation.connection.check_envelope(message, conversation.connection.speaker(message))
            return self._refuse(ident, Refused(Kind.OVERLOADED, text))
        answer = conversation.handle(message, self.finish)
        if answer and waits and self._wants_json and not self.unsent:
            return self._say(answer)  # the usual call
        session = self.session
        if session and session.name and type(message) is Request and message.method == "logging/setLevel":
            return self._note_level(conversation, session, answer)
        if answer is LATER and type(message) is list:
            conversation.status = 200  # whatever became of its members
        return self._deliver(conversation, answer)

    def _deliver(self, conversation: Conversation, answer: bytes | None) -> Rest:
        endpoint = self.endpoint
        if answer is LATER and self.ended:  # the last of a batch came at once
            answer = self.answer
        as_json = self._wants_json or answer is None or conversation.status != 200
        if as_json and answer is not LATER and not self.unsent:
            return self._say(answer)
        if answer is not LATER:
            self.finish(answer)
        endpoint.open.add(self)
        endpoint.calls[self.principal.id] += 1
        if self.cycle is None or self.ended or self.unsent or self.paused:
            return self._rest(WATCH_SECONDS)
        self.cycle.is_late = True
        endpoint.expect(self, conversation.loop)
        return None

    def tell(self) -> None:
        cycle, conversation = self.cycle, self.conversation
        if self.endpoint.pending.pop(self, None) is None or cycle is None or conversation is None:
            super().tell()
        elif self.answer is not None and self._wants_json and conversation.status == 200 and not cycle.complete:
            self._leave()
            cycle.answer(*self.whole(200, JSON, self.answer))
        else:
            cycle.start(self.endpoint.end(self, self._rest(0.0)))

    def _rest(self, seconds: float) -> Coroutine[Any, Any, None]:
        later = self._answer_later(seconds)
        return self._outlive(later) if self.session and self.session.name else later

    async def _note_level(self, conversation: Conversation, session: Session, answer: bytes | None) -> None:
        await self.endpoint.sessions.note_level(session)
        rest = self._deliver(conversation, answer)
        if rest is not None:
            await rest

    async def _answer_later(self, seconds: float) -> None:
        """Nobody is watched for going away in the first `seconds`: most answers come sooner."""
        self.task, is_stateless = self.task or asyncio.current_task(), self.session is None
        try:
            if seconds and not self.unsent and not self.paused:
                await self.wait(seconds)
            if not self.ended:
                self._watcher = asyncio.create_task(self.watch())
            if not self.unsent and not self.paused and not self.ended:
                await self.wait(QUIET_SECONDS - WATCH_SECONDS)
            if self.gone and is_stateless:
                return
            said_more = self.unsent or self.paused or not self.ended
            if self.two_way and (said_more or not self._wants_json):
                log, first = self._log(self.session)
                await self.begin_events(first)
                await self.events(log, outlives=0.0 if log is None else math.inf)
                return
            while not self.ended and not (self.gone and is_stateless):
                await self.wait(QUIET_SECONDS)
            if self.ended:
                self._say(self.answer)
        finally:
            if is_stateless and not self.ended and self.conversation is not None:
                self.conversation.drop()  # whoever goes away does not want the answer
            self._leave()

    def _leave(self) -> None:
        super()._leave()
        calls, caller = self.endpoint.calls, self.principal.id
        calls[caller] -= 1
        if not calls[caller]:
            del calls[caller]

    def _say(self, answer: bytes | None, fields: Fields | None = None) -> Rest:
        """The answer as JSON, or the news that there is none: then nothing is left to do."""
        assert self.conversation is not None
        status = self.conversation.status
        if status == 429:
            fields = [(b"retry-after", b"%d" % math.ceil(self.conversation.retry_after))]
        elif status == 403 and self.conversation.needed:  # else more scopes would not help
            needed = {"error": "insufficient_scope", "scope": " ".join(sorted(self.conversation.needed))}
            fields = [http.challenge({**self.endpoint.challenge(self), **needed})]
        if answer is None:
            self.whole(202, fields or [], b"")
        else:
            self.whole(status, JSON + fields if fields else JSON, answer)
        return None
