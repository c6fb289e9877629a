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
from handrail.engine.dispatcher import Dispatcher
from handrail.engine.http_sessions import EventLog, HttpSession
from handrail.engine.reply_channel import Reply
from handrail.errors import Kind, Refused
from handrail.jsonrpc import Id, InvalidMessage, Message, Notification, Request
from handrail.model import Json, Principal
from handrail.protocol import http_rules as http, sse
from handrail.protocol.connection import Connection, names_version
from handrail.protocol.http_rules import PROTOCOL, SESSION, Headers
from handrail.protocol.trace import NO_TRACE, trace_headers
from handrail.revisions.base import CAPABILITIES, VERSION
from handrail.transports.http.response import JSON, RETRY_MS, Fields, HttpResponse, Receive, Scope, Send

if TYPE_CHECKING:
    from handrail.transports.http.endpoint import Endpoint
    from handrail.transports.http1.request import RequestResponseCycle

WATCH_DELAY_SECONDS = 0.05  # a call that takes longer is watched for its caller going away
_LONG_METHODS = ("tools/call", "subscriptions/listen")
Continuation = Coroutine[Any, Any, None] | None  # of the work; None: there is none, or the answer will come by itself
QUIET_SECONDS = 2.0  # then the answer becomes a stream, so that nobody in between takes it for dead


class Exchange(HttpResponse):
    """What every kind of request needs: its head, the way back, and a conversation to be part of."""

    conversation: Dispatcher | None = None  # when it is known who speaks, and until that is over
    connection: Connection | None = None  # of that conversation
    principal: Principal
    message: Message | list[Json] | None = None
    raw = b""  # the same, as it came
    task: asyncio.Task[Any] | None = None  # in which it is answered, if that takes a while
    cycle: RequestResponseCycle | None = None  # of a listener of ours, which takes an answer at any time
    _disconnect_task: asyncio.Task[None] | None = None

    def __init__(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        super().__init__(scope, receive, send, headers, endpoint.engine.limits)
        self.endpoint = endpoint
        self.engine = endpoint.engine

    async def run(self) -> None:
        raise NotImplementedError

    @property
    def stopping(self) -> bool:
        return self.endpoint.stopping

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def base_url(self) -> str:
        """The address of the server, as the caller knows it."""
        scheme, root = self.scope.get("scheme", "http"), self.scope.get("root_path", "")
        return f"{scheme}://{self.header(b'host')}{root}"

    @property
    def peer(self) -> str:
        """Where the caller is, as far as the listener knows."""
        client = self.scope.get("client")
        return str(client[0]) if client else "unix"

    def _start_conversation(self, connection: Connection | None = None) -> Dispatcher:
        self.conversation = conversation = Dispatcher(self.engine, self, self.principal, connection)
        self.connection = conversation.connection
        conversation.address, conversation.raw_message = self.peer, self.raw
        conversation.is_identified = self.endpoint.auth is not None
        conversation.headers = headers = self.headers
        conversation.trace_headers = trace_headers(headers) if b"traceparent" in headers else NO_TRACE
        if b"authorization" in headers:  # no business of a tool's
            conversation.headers = {name: headers[name] for name in headers if name != b"authorization"}
        return conversation

    def _release(self) -> None:
        self.endpoint.open.discard(self)
        self.detach_conversation()
        if self._disconnect_task is not None:
            self._disconnect_task.cancel()

    def detach_conversation(self) -> None:
        """Conversation and exchange know each other: left like that, only the garbage collector would find them."""
        self.conversation = None

    async def _run_detached(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that goes on when whoever asked for it has gone, and the request with it."""
        self.task = task = asyncio.create_task(work)
        self.endpoint.tasks.add(task)
        task.add_done_callback(self.endpoint.tasks.discard)
        self._disconnected = disconnected = task.get_loop().create_future()
        if not self.disconnected:
            await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()

    def _check_session(self, session: HttpSession | None) -> HttpSession:
        """The session that was looked for, if it is there and speaks what the header says it does."""
        if session is None:
            raise Refused(Kind.NO_SESSION, "Session not found: begin again with initialize")
        version = self.headers.get(PROTOCOL)
        if version is not None and version != session.version:
            text = f"MCP-Protocol-Version {version[:50].decode('latin-1')!r}: this session speaks "
            raise Refused(Kind.INVALID_REQUEST, text + session.connection.fallback_revision.name)
        return session

    def respond_stopping(self) -> None:
        self.respond_text(503, "The server is stopping", [(b"retry-after", b"1")])

    def _open_event_log(self, session: HttpSession | None, kind: str = "") -> tuple[EventLog | None, bytes]:
        """Where the events of a stream are kept, and what it begins with."""
        first = b"" if self.unsent else sse.KEEP_ALIVE  # so that the head goes out
        if session is None or not session.name:
            return None, first
        log = EventLog(self.endpoint.sessions.store, session, kind + secrets.token_urlsafe(9))
        if session.connection.fallback_revision.priming_event:
            first = sse.encode_event(b"", event_id=log.event_id(0), retry_ms=RETRY_MS)
        return log, first


class PostHandler(Exchange):
    """A message: a request of any revision, a notification, an answer, or a batch of them.

    Most are answered where they are taken, or by the call itself when it ends: what is pending takes no task. What
    takes longer, or has more to say than its answer, comes back as a coroutine, the rest of the work.
    """

    session: HttpSession | None = None  # it is part of; in a stateless revision none, else perhaps one without a name
    _wants_json = True

    async def run(self) -> None:
        body = None if self._rejects_headers() else await self._body()
        continuation = None if body is None else self._read(body)
        if continuation is not None:
            await continuation

    async def _body(self) -> bytes | None:
        """The whole body; None if it was too long, or never came."""
        max_bytes = self.limits.max_message_bytes
        declared = self.headers.get(b"content-length", b"")
        received_bytes = int(declared[:20]) if declared.isdigit() else 0
        pieces: list[bytes] = []
        while received_bytes <= max_bytes:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                return None
            pieces.append(event.get("body", b""))
            if not event.get("more_body"):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            received_bytes = max(received_bytes, sum(map(len, pieces)))
        self.respond_text(413, f"A message has at most {max_bytes:,} bytes")
        return None

    def accept(self, body: bytes) -> Continuation:
        """Take a message that came whole."""
        if self._rejects_headers():
            return None
        if len(body) > self.limits.max_message_bytes:
            self.respond_text(413, f"A message has at most {self.limits.max_message_bytes:,} bytes")
            return None
        return self._read(body)

    def _rejects_headers(self) -> bool:
        """Whether the head of a request speaks against its body; if so, that is said."""
        get = self.headers.get
        content = http.negotiate_content(get(b"content-type", b""), get(b"content-encoding"), get(b"accept", b""))
        self._wants_json, self.two_way, defect = content
        if defect:
            self.respond_text(415, defect)
        elif not self._wants_json and not self.two_way and not self._sse_stream_id():
            self.respond_text(406, "Accept must name application/json or text/event-stream")
        return self.response is not None

    def _sse_stream_id(self) -> str:
        """The pipe of the transport of 2024 a message is for."""
        query = self.scope["query_string"]
        return parse_qs(query.decode("latin-1")).get("sessionId", [""])[0] if query else ""

    def _read(self, body: bytes) -> Continuation:
        """Who is speaking: the body says so, or the session does."""
        if self.endpoint.stopping:  # since the head came
            self.respond_stopping()
            return None
        self.raw, self.message = body, (message := jsonrpc.decode(body))
        stream_id = self.scope["query_string"] and self._sse_stream_id()
        if stream_id and not (type(message) is Request and names_version(message)):
            return self._receive_on_sse(stream_id, message, body)
        if isinstance(message, InvalidMessage):
            is_modern = self.header(PROTOCOL) in self.engine.offer.stateless
            kind = Kind.ENVELOPE if is_modern and message.kind is Kind.BAD_PARAMS else message.kind
            return self._refuse(message.id, Refused(kind, message.text))
        try:
            if type(message) is Request and names_version(message) and self.engine.offer.stateless:
                conversation = self._start_conversation()
                self._check_stateless(message, conversation.connection)
                return self._answer(conversation, message)
            if type(message) is Request and message.method == "initialize":
                return self._initialize(message)
            if type(message) is Notification and self.header(PROTOCOL) in self.engine.offer.stateless:
                self.respond(202, [], b"")  # that revision has none over HTTP; nobody waits for an answer
                return None
            session = self._session(message)
        except Refused as refused:
            return self._refuse(message.id if type(message) is Request else UNSET, refused)
        if session is None:
            return self._find_session_and_receive(message, body)
        return self._receive_in_session(session, message, body)

    async def _find_session_and_receive(self, message: Message | list[Json], body: bytes) -> None:
        """With a session that is to be looked for in a store which takes its time."""
        try:
            session = self._check_session(await self.endpoint.sessions.find(self.headers[SESSION], self.principal))
        except Refused as refused:
            self._refuse(message.id if type(message) is Request else UNSET, refused)
            return
        if self.endpoint.stopping:
            self.respond_stopping()
            return
        continuation = self._receive_in_session(session, message, body)
        if continuation is not None:
            await continuation

    def _receive_in_session(self, session: HttpSession, message: Message | list[Json], body: bytes) -> Continuation:
        conversation, self.session = self._start_conversation(session.connection), session
        if type(message) is Request or not session.name or session.connection.expects(message):
            return self._answer(conversation, message)
        return self._forward(session.name, body)

    async def _forward(self, name: str, body: bytes) -> None:
        """An answer or a notice that somebody in another process waits for."""
        await self.endpoint.sessions.publish(name, body)
        self.respond(202, [], b"")

    async def _receive_on_sse(self, stream_id: str, message: Message | list[Json], body: bytes) -> None:
        conversation = self.endpoint.sse_streams.get(stream_id)
        if not self.endpoint.sessions.owns_pipe(stream_id, self.principal):
            self.respond_text(404, "No such stream: open one with GET")
        # What a notice is about may still be on its way here from another process: then it follows on the same way.
        elif conversation is None or not conversation.connection.expects(message):
            await self._forward(stream_id, body)
        else:
            conversation.receive_and_reply(body)
            self.respond(202, [], b"")

    def _check_stateless(self, request: Request, connection: Connection) -> None:
        http.check_version(request, self.headers)
        revision = connection.revision_of(request)
        try:
            http.check_mirrored_headers(request, self.headers)
        except Refused:
            connection.check_envelope(request, revision)  # else it is checked with the parameters
            raise
        if request.method == "subscriptions/listen" and not self.two_way:
            connection.check_envelope(request, revision)
            raise Refused(Kind.INVALID_REQUEST, "subscriptions/listen is answered with events: accept them")

    def _initialize(self, request: Request) -> Continuation:
        conversation = self._start_conversation()
        reply = conversation.handle(request, self.finish)
        assert reply is not None  # a handshake waits for nothing
        fields: Fields = []
        if conversation.connection.revision is not None:
            fields = [(SESSION, self.endpoint.sessions.issue_id(conversation.connection, self.principal).encode())]
        if self._wants_json or reply.status != 200:
            return self._respond(reply, fields)
        self.finish(reply)
        return self._as_events(fields)

    async def _as_events(self, fields: Fields) -> None:
        await self.begin_events(fields=fields)
        await self.events(None)

    def _session(self, message: Message | list[Json]) -> HttpSession | None:
        """The session a message belongs to; None if that can only be told after a while."""
        offer, session_id = self.engine.offer, self.headers.get(SESSION)
        version = self.header(PROTOCOL)
        if version in offer.stateless and type(message) is jsonrpc.Response:
            text = f"{version}: a server sends no requests, so there is nothing to answer"
            raise Refused(Kind.INVALID_REQUEST, f"{text}; answers go into params.inputResponses of the repeated call")
        if version in offer.stateless and not isinstance(message, list):
            raise Refused(Kind.ENVELOPE, f"{version}: params._meta lacks {VERSION!r} and {CAPABILITIES!r}")
        if session_id:
            sessions = self.endpoint.sessions
            return (
                None
                if sessions.peek is None
                else self._check_session(sessions.find_at_once(session_id, self.principal))
            )
        if isinstance(message, list) and (version or not self.endpoint.legacy_stateless):
            raise Refused(Kind.INVALID_REQUEST, "Batches are for sessions of 2025-03-26: send one message at a time")
        if version and version not in offer.handshake:
            data = {"supported": offer.supported, "requested": version[:100]}
            raise Refused(Kind.ENVELOPE, "Unsupported protocol version", data)
        if not self.endpoint.legacy_stateless:
            raise Refused(Kind.INVALID_REQUEST, "Mcp-Session-Id is missing: begin with initialize")
        connection = Connection(offer, self.engine.hidden)
        connection.revision = offer.handshake.get(version) or offer.http_default
        return HttpSession("", connection)

    def _refuse(self, request_id: Id | UnsetType, refused: Refused) -> Continuation:
        """Refuse a message in the words of whoever speaks, as far as that is known."""
        conversation = self.conversation or self._start_conversation()
        connection = conversation.connection
        if type(self.message) is Request:
            conversation.record_refusal(self.message, connection.fallback_revision_for(self.message), refused)
        return self._respond(conversation.encode_refusal(connection.fallback_revision, request_id, refused))

    def _answer(self, conversation: Dispatcher, message: Message | list[Json]) -> Continuation:
        """Handle a message, and say what there is to say in the shortest form that will do."""
        endpoint = self.endpoint
        waits = message.method in _LONG_METHODS if type(message) is Request else type(message) is list
        if waits and endpoint.calls.get(self.principal.id, 0) >= self.limits.max_calls:
            request_id = message.id if type(message) is Request else UNSET
            text = "Too many requests are in flight; wait for some to end"
            if self.session is None and type(message) is Request:
                conversation.connection.check_envelope(message, conversation.connection.revision_of(message))
            return self._refuse(request_id, Refused(Kind.OVERLOADED, text))
        reply = conversation.handle(message, self.finish)
        if reply is not None and waits and self._wants_json and not self.unsent:
            return self._respond(reply)  # the usual call
        session = self.session
        if session and session.name and type(message) is Request and message.method == "logging/setLevel":
            return self._store_log_level(conversation, session, reply)
        return self._deliver(conversation, reply)

    def _deliver(self, conversation: Dispatcher, reply: Reply | None) -> Continuation:
        endpoint = self.endpoint
        if reply is None and self.ended:  # the last of a batch came at once
            reply = self.reply
        if reply is not None:
            as_json = self._wants_json or not reply.body or reply.status != 200
            if as_json and not self.unsent:
                return self._respond(reply)
            self.finish(reply)
        endpoint.open.add(self)
        endpoint.calls[self.principal.id] += 1
        if self.cycle is None or self.ended or self.unsent or self.paused:
            return self._continuation(WATCH_DELAY_SECONDS)
        self.cycle.is_deferred = True
        endpoint.add_pending(self, conversation.loop)
        return None

    def notify(self) -> None:
        cycle, conversation = self.cycle, self.conversation
        if self.endpoint.pending.pop(self, None) is None or cycle is None or conversation is None:
            super().notify()
        elif self.reply.body and self._wants_json and self.reply.status == 200 and not cycle.complete:
            self._release()
            cycle.respond(*self.respond(200, JSON, self.reply.body))
        else:
            cycle.start(self.endpoint.complete(self, self._continuation(0.0)))

    def _continuation(self, seconds: float) -> Coroutine[Any, Any, None]:
        later = self._answer_later(seconds)
        return self._run_detached(later) if self.session and self.session.name else later

    async def _store_log_level(self, conversation: Dispatcher, session: HttpSession, reply: Reply | None) -> None:
        await self.endpoint.sessions.save_level(session)
        continuation = self._deliver(conversation, reply)
        if continuation is not None:
            await continuation

    async def _answer_later(self, seconds: float) -> None:
        """Nobody is watched for going away in the first `seconds`: most answers come sooner."""
        self.task, is_stateless = self.task or asyncio.current_task(), self.session is None
        try:
            if seconds and not self.unsent and not self.paused:
                await self.wait(seconds)
            if not self.ended:
                self._disconnect_task = asyncio.create_task(self.wait_disconnected())
            if not self.unsent and not self.paused and not self.ended:
                await self.wait(QUIET_SECONDS - WATCH_DELAY_SECONDS)
            if self.disconnected and is_stateless:
                return
            has_more = self.unsent or self.paused or not self.ended
            if self.two_way and (has_more or not self._wants_json):
                log, first = self._open_event_log(self.session)
                await self.begin_events(first)
                await self.events(log, outlives=0.0 if log is None else math.inf)
                return
            while not self.ended and not (self.disconnected and is_stateless):
                await self.wait(QUIET_SECONDS)
            if self.ended:
                self._respond(self.reply)
        finally:
            if is_stateless and not self.ended and self.conversation is not None:
                self.conversation.cancel_all()  # whoever goes away does not want the answer
            self._release()

    def _release(self) -> None:
        super()._release()
        calls, caller = self.endpoint.calls, self.principal.id
        calls[caller] -= 1
        if not calls[caller]:
            del calls[caller]

    def _respond(self, reply: Reply, fields: Fields | None = None) -> Continuation:
        """Respond with the reply as JSON, or with 202 where there is none: nothing is left to do."""
        if reply.status == 429:
            fields = [(b"retry-after", b"%d" % math.ceil(reply.retry_after))]
        elif reply.status == 403 and reply.needed_scopes:  # else more scopes would not help
            needed = {"error": "insufficient_scope", "scope": " ".join(sorted(reply.needed_scopes))}
            fields = [http.challenge({**self.endpoint.challenge(self), **needed})]
        if reply.body:
            self.respond(reply.status, JSON + fields if fields else JSON, reply.body)
        else:
            self.respond(202, fields or [], b"")
        return None
