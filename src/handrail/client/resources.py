"""The resources of one server: listed, read, and watched for updates."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from handrail.client.connection import ACKNOWLEDGED, MAX_PAUSE_SECONDS
from handrail.client.inflight import InFlightRequest, add_context, deadline_at
from handrail.client.tools import READS, ListedEntries, ListedEntry
from handrail.errors import InvalidResult, LocalProtocolError, PeerError, RemoteProtocolError, Sent
from handrail.jsonrpc import Notification
from handrail.model import Json, Object
from handrail.protocol.uri_template import MAX_URI_CHARS, UriTemplate, normalize_uri
from handrail.revisions import Revision

if TYPE_CHECKING:
    from handrail.client.server_tools import ServerTools
    from handrail.guards.policy import Subject

MAX_WAITING_UPDATES = 100  # URIs of one subscription that its owner has not taken yet
RENEW_SECONDS = 0.5  # before a short subscription is renewed; then doubled up to MAX_PAUSE_SECONDS
_LONG_SECONDS = 60.0
_UNKNOWN_METHOD = -32601


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

    @cached_property
    def subject(self) -> Subject:
        from handrail.guards.policy import Subject  # few clients have rules

        return Subject(self.kind, normalize_uri(self.own_name), annotations=READS, server=self.server)


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


class Resources(ListedEntries[ListedResource]):
    """A list of resources, indexed by position or URI; `refused` has what was left out, with the reason."""


class Templates(ListedEntries[ListedTemplate]):
    """A list of templates, indexed by position or template; `refused` has what was left out, with the reason."""


class ResourceContent(Struct, frozen=True):
    """One of the contents of a resource. `text` is None for a binary one; `data` has the bytes of either."""

    uri: str
    mime_type: str
    text: str | None
    data: bytes
    meta: Object


class ReadResult:
    """The contents of a resource. `raw` is all of the result, unchanged.

    `problems` lists what is malformed in it but does not make it useless; with `Client(strict=True)` such a result is
    an error.
    """

    is_error = False

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
        return ResourceContent(part["uri"], mime_type, text, text.encode("utf-8", "surrogatepass"), meta)
    if type(blob) is not str or text is not None:
        raise ValueError("not one of text and blob, as a text")
    return ResourceContent(part["uri"], mime_type, None, b64decode("".join(blob.split()), validate=True), meta)


async def list_resources(remote: ServerTools, *, fresh: bool) -> Resources:
    return await remote.list_of("resources/list", ListedResource, Resources).get(fresh=fresh)


async def list_templates(remote: ServerTools, *, fresh: bool) -> Templates:
    try:
        return await remote.list_of("resources/templates/list", ListedTemplate, Templates).get(fresh=fresh)
    except RemoteProtocolError as refused:
        if refused.code != _UNKNOWN_METHOD:  # of a server without templates
            raise
        return Templates()


async def read(remote: ServerTools, uri: str, **options: Any) -> ReadResult:
    if type(uri) is not str:
        raise LocalProtocolError(f"{remote.name}: resources/read: not sent: a URI is a text")
    params, name = {"uri": uri}, normalize_uri(uri)  # of which rules have one spelling
    return await remote.request("resource", name, "resources/read", params, ReadResult, **options)


class ResourceSubscription:
    """Updates of a resource: `async with client.subscribe(uri) as updates: async for uri in updates: …`

    Each is the URI that has changed: of the resource, or of a part of it. Updates that wait are one. The subscription
    is renewed while it is iterated over; then there is one more update, since changes may have been missed.
    """

    def __init__(self, uri: str, find_server: Callable[[], Awaitable[ServerTools]]) -> None:
        self.uri = uri
        self.session: Object | None = None  # the handshake with the server that was told; None: not by a handshake
        self._find_server = find_server
        self._listen: InFlightRequest | None = None  # in stateless revisions
        self._acknowledged: asyncio.Future[Json]
        self._waiting: dict[str, None] = {}
        self._news = asyncio.Event()
        self._began = self._pause = 0.0

    async def __aenter__(self) -> ResourceSubscription:
        self._remote = await self._find_server()
        self._connection = self._remote.connection
        try:
            await self._subscribe()
        except BaseException:
            self._connection.watches.discard(self)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        connection = self._connection
        connection.watches.discard(self)
        if self._listen is not None and not self._listen.future.done():
            connection.cancel_request(self._listen)
        elif self.session is not None:
            async with connection.subscribing:
                if connection.is_open and self.session is connection.handshake_result and not self._is_shared:
                    deadline = connection.now() + connection.clocks.total
                    with suppress(PeerError):
                        params = {"uri": self.uri}
                        await connection.request("resources/unsubscribe", params, connection.clocks, deadline)

    def __aiter__(self) -> ResourceSubscription:
        return self

    async def __anext__(self) -> str:
        while True:
            self._news.clear()
            for uri in self._waiting:
                del self._waiting[uri]
                return uri
            if self._is_lost:
                is_first = self._connection.now() - self._began > _LONG_SECONDS
                self._pause = 0.0 if is_first else min(2 * self._pause or RENEW_SECONDS, MAX_PAUSE_SECONDS)
                await asyncio.sleep(self._pause)
                await self._subscribe()
                return self.uri
            await self._news.wait()

    # As the connection sees it

    def on_notification(self, message: Notification) -> None:
        if message.method == ACKNOWLEDGED:
            if not self._acknowledged.done():
                self._acknowledged.set_result(message.params.get("notifications"))
            return
        uri = message.params.get("uri")
        if type(uri) is str and len(uri) <= MAX_URI_CHARS and (self._listen is not None or self._is_about(uri)):
            self._waiting[uri if len(self._waiting) < MAX_WAITING_UPDATES else self.uri] = None
            self._news.set()

    def on_lost(self) -> None:
        self._news.set()

    def _is_about(self, uri: str) -> bool:
        own, other = normalize_uri(self.uri), normalize_uri(uri)
        is_same_or_part = other.startswith(own) and (own.endswith("/") or other[len(own) :][:1] in ("", "/", "?", "#"))
        return is_same_or_part or len(self._connection.watches) == 1

    @property
    def _is_lost(self) -> bool:
        if self._listen is not None:
            return self._listen.future.done()
        return self._connection.failure is not None or self.session is not self._connection.handshake_result

    @property
    def _is_shared(self) -> bool:
        """Whether the server was told of this URI for another subscription."""
        others = (each for each in self._connection.watches if each is not self and each.uri == self.uri)
        return any(each.session is self._connection.handshake_result for each in others)

    async def _subscribe(self) -> None:
        connection = self._connection
        deadline = connection.now() + connection.clocks.total
        try:
            async with deadline_at(deadline, connection.clocks):
                await connection.open()
            connection.require("resources")
            self._remote.refuse_denied("resource", normalize_uri(self.uri))
            offers = connection.handshake_result["capabilities"]["resources"]
            if type(offers) is not dict or offers.get("subscribe") is not True:
                raise RemoteProtocolError("the server says that it announces no updates of resources", sent=Sent.NO)
            self._listen, self.session = None, None
            if connection.revision is not None and connection.revision.stateless:
                await self._start_listening(deadline)
            else:
                connection.watches.add(self)
                async with connection.subscribing:
                    if not self._is_shared:
                        params = {"uri": self.uri}
                        await connection.request("resources/subscribe", params, connection.clocks, deadline)
                    self.session = connection.handshake_result
        except PeerError as problem:
            add_context(problem, connection.name, f"subscribe {self.uri}")
            raise
        self._began = connection.now()

    async def _start_listening(self, deadline: float) -> None:
        connection, self._acknowledged = self._connection, asyncio.get_running_loop().create_future()
        listen = connection.listen({"resourceSubscriptions": [self.uri]}, self.on_notification)
        listen.future.add_done_callback(lambda _: self.on_lost())
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
