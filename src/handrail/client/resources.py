"""The resources of one server: listed, read, and watched for updates."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Never

from msgspec import Struct

from handrail.client.connection import ACKNOWLEDGED, MAX_PAUSE_SECONDS
from handrail.client.inflight import InFlightRequest, add_context, deadline_at
from handrail.client.tools import ListedEntry
from handrail.errors import CallTimeout, InvalidResult, PeerError, RemoteProtocolError, Sent, TransportError
from handrail.jsonrpc import Notification
from handrail.model import Json, Object
from handrail.protocol.uri_template import MAX_URI_CHARS, UriTemplate, normalize_uri
from handrail.revisions import Revision

if TYPE_CHECKING:
    from handrail.client.server_tools import ServerTools

log = logging.getLogger("handrail")

MAX_WAITING_UPDATES = 100  # URIs of one subscription that its owner has not taken yet
RENEW_SECONDS = 0.5  # before a short subscription is renewed; then doubled up to MAX_PAUSE_SECONDS
UNSUBSCRIBE_SECONDS = 2.0
_LONG_SECONDS = 60.0


class ListedResource(ListedEntry):
    """A resource of a server; `raw` is the whole entry."""

    kind = "resource"
    key_member = "uri"

    def __init__(self, raw: Object, server: str, prefix: str = "") -> None:
        super().__init__(raw, server)  # a URI has no prefix
        name = raw.get("name")
        self.name = name if type(name) is str else self.key

    @property
    def uri(self) -> str:
        return self.own_name

    def matches(self, uri: str) -> bool:
        return uri == self.own_name

    @property
    def mime_type(self) -> str:
        """The media type; empty if the server does not tell."""
        mime_type = self.raw.get("mimeType")
        return mime_type if type(mime_type) is str else ""

    @property
    def size(self) -> int | None:
        """The size in bytes, if the server tells."""
        size = self.raw.get("size")
        return size if type(size) is int else None


class ListedTemplate(ListedResource):
    """A family of resources of a server: `uri_template` with a value for each variable is the URI of one."""

    key_member = "uriTemplate"

    @property
    def uri_template(self) -> str:
        return self.own_name

    def matches(self, uri: str) -> bool:
        """Return whether a URI, or the template itself, belongs to the family."""
        return uri == self.own_name or (self._template is not None and self._template.match(uri) is not None)

    @cached_property
    def _template(self) -> UriTemplate | None:
        with suppress(ValueError):  # RFC 6570 has more than can be matched
            return UriTemplate(self.own_name)
        return None


class ResourceContent(Struct, frozen=True):
    """One of the contents of a resource. `text` is None for a binary one; `data` has the bytes of either."""

    uri: str
    mime_type: str
    text: str | None
    blob: bytes
    meta: Object

    @property
    def data(self) -> bytes:
        return self.blob if self.text is None else self.text.encode("utf-8", "surrogatepass")


class ReadResult:
    """The contents of a resource. `raw` is all of the result, unchanged.

    `problems` lists what is malformed in it but does not make it useless; with `Client(strict=True)` such a result is
    an error.
    """

    def __init__(self, raw: Object, revision: Revision) -> None:
        self.raw = raw
        self.contents: list[ResourceContent] = []
        self.problems: list[str] = []
        parts = raw.get("contents")
        if type(parts) is not list:
            raise InvalidResult("there is no list of contents", result=raw)
        for place, part in enumerate(parts):
            try:
                self.contents.append(_content(part))
            except ValueError as problem:
                self.problems.append(f"contents/{place}: {problem}")
        if parts and not self.contents:
            raise InvalidResult("; ".join(self.problems[:3]), result=raw)

    def __repr__(self) -> str:
        return f"<{len(self.contents)} contents: {self.text[:100]!r}>"

    @property
    def text(self) -> str:
        """All texts, one below the other."""
        return "\n".join([each.text for each in self.contents if each.text is not None])


def _content(part: Json) -> ResourceContent:
    if type(part) is not dict or type(part.get("uri")) is not str:
        raise ValueError("not an object with a uri")
    mime_type, meta = part.get("mimeType") or "", part.get("_meta") or {}
    text, blob = part.get("text"), part.get("blob")
    if type(mime_type) is not str or type(meta) is not dict:
        raise ValueError("mimeType is not a text, or _meta not an object")
    if type(text) is str and blob is None:
        return ResourceContent(part["uri"], mime_type, text, b"", meta)
    if type(blob) is not str or text is not None:
        raise ValueError("not one of text and blob, as a text")
    return ResourceContent(part["uri"], mime_type, None, b64decode("".join(blob.split()), validate=True), meta)


class ResourceSubscription:
    """Updates of a resource: `async with client.subscribe(uri) as updates: async for uri in updates: …`

    Each is the URI that has changed: of the resource, or of a part of it. Updates that wait are one. While it is
    iterated over, a lost subscription is renewed until the client closes; then there is one update, since changes may
    have been missed.
    """

    def __init__(self, uri: str, find_server: Callable[[], Awaitable[ServerTools]]) -> None:
        self.uri = uri
        self._find_server = find_server
        self._is_entered = False
        self._is_lost = False
        self._listen: InFlightRequest | None = None  # in stateless revisions
        self._acknowledged: asyncio.Future[Json]
        self._waiting: dict[str, None] = {}
        self._news = asyncio.Event()
        self._began = self._pause = 0.0

    async def __aenter__(self) -> ResourceSubscription:
        remote = await self._find_server()
        self._connection, self._is_entered = remote.connection, True
        try:
            await remote.request("resource", self.uri, "subscribe", {}, lambda *_: None, send=self._subscribe)
        except BaseException:
            self._connection.watches.pop(self._on_event, None)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        connection = self._connection
        uri = connection.watches.pop(self._on_event, "")
        if self._listen is not None:
            if not self._listen.future.done():
                connection.cancel_request(self._listen)
            return
        deadline = connection.now() + UNSUBSCRIBE_SECONDS
        with suppress(PeerError):
            async with deadline_at(deadline, connection.clocks), connection.subscribing:
                if connection.is_open and uri not in connection.watches.values():
                    params = {"uri": self.uri}
                    await connection.request("resources/unsubscribe", params, connection.clocks, deadline)

    def check_entered(self, statement: str = "async with") -> None:
        if not self._is_entered:
            raise TypeError(f'subscribe: use it as "{statement} client.subscribe(uri) as updates:"')

    def __await__(self) -> Iterator[Never]:
        self.check_entered()
        return iter(())

    def __aiter__(self) -> ResourceSubscription:
        self.check_entered()
        return self

    async def __anext__(self) -> str:
        while True:
            self._news.clear()
            for uri in self._waiting:
                del self._waiting[uri]
                return uri
            if not self._is_lost:
                await self._news.wait()
                continue
            is_first = self._connection.now() - self._began > _LONG_SECONDS
            self._pause = 0.0 if is_first else min(2 * self._pause or RENEW_SECONDS, MAX_PAUSE_SECONDS)
            await asyncio.sleep(self._pause)
            try:
                await self._subscribe()
                return self.uri
            except (TransportError, CallTimeout) as problem:
                if self._connection.is_closed:
                    raise
                name = self._connection.name
                log.warning("client: %s: subscription to %s not renewed: %s", name, self.uri, problem.text)

    def _on_event(self, message: Notification | None) -> None:
        """Handle an update, the acknowledgement, or (None) what may have ended the subscription."""
        if message is None:
            self._is_lost = True
        elif message.method == ACKNOWLEDGED:
            if not self._acknowledged.done():
                self._acknowledged.set_result(message.params.get("notifications"))
            return
        else:
            uri = message.params.get("uri")
            if type(uri) is not str or len(uri) > MAX_URI_CHARS or not self._is_about(uri):
                return
            self._waiting[uri if len(self._waiting) < MAX_WAITING_UPDATES else self.uri] = None
        self._news.set()

    def _is_about(self, uri: str) -> bool:
        own, other = normalize_uri(self.uri), normalize_uri(uri)
        is_same_or_part = other.startswith(own) and (own.endswith("/") or other[len(own) :][:1] in ("", "/", "?", "#"))
        return is_same_or_part or self._listen is not None or len(self._connection.watches) == 1

    async def _subscribe(self, call: object = None) -> Object:
        connection, clocks = self._connection, self._connection.clocks
        self._began, self._listen = connection.now(), None
        deadline = self._began + clocks.total
        try:
            async with deadline_at(deadline, clocks):
                await connection.open()
                offers = connection.handshake_result["capabilities"].get("resources")
                if type(offers) is not dict or offers.get("subscribe") is not True:
                    raise RemoteProtocolError("the server says that it announces no updates of resources", sent=Sent.NO)
                revision, transport = connection.revision, connection.transport
                is_stateless = revision is not None and revision.stateless
                if not is_stateless and transport is not None and not await transport.has_stream():
                    raise RemoteProtocolError("the server has no stream on which updates could arrive", sent=Sent.NO)
            self._is_lost = False
            if is_stateless:
                await self._start_listening(deadline)
            else:
                connection.watches[self._on_event] = normalize_uri(self.uri)
                async with deadline_at(deadline, clocks, Sent.UNKNOWN), connection.subscribing:
                    await connection.request("resources/subscribe", {"uri": self.uri}, clocks, deadline)
        except BaseException as problem:
            self._is_lost = True
            if isinstance(problem, PeerError):
                add_context(problem, connection.name, f"subscribe {self.uri}")
            raise
        return {}

    async def _start_listening(self, deadline: float) -> None:
        connection, self._acknowledged = self._connection, asyncio.get_running_loop().create_future()
        listen = connection.listen({"resourceSubscriptions": [self.uri]}, self._on_event)
        listen.future.add_done_callback(lambda _: self._on_event(None))
        self._listen = listen
        try:
            async with deadline_at(deadline, connection.clocks, Sent.UNKNOWN):
                await asyncio.wait({listen.future, self._acknowledged}, return_when=asyncio.FIRST_COMPLETED)
            if not self._acknowledged.done():
                raise InvalidResult("the subscription ended before it began", result=await listen.future)
            honoured = self._acknowledged.result()
            uris = honoured.get("resourceSubscriptions") if type(honoured) is dict else None
            if type(uris) is not list or self.uri not in uris:
                text = f"the server does not announce updates of {self.uri:.200}"
                raise RemoteProtocolError(text, sent=Sent.FAILED)
        except BaseException:
            if not listen.future.done():
                connection.cancel_request(listen)
            raise
