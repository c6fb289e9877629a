"""The protocol state of one peer: its revision, its client, and the requests in flight in both directions.

A revision belongs to a message, not to a connection: a request that names a stateless revision is read by that one,
any other by the revision of the last handshake. So old and new clients can share one pipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import count
from typing import Any, NoReturn

from msgspec import UNSET, ValidationError, convert

from handrail import jsonrpc
from handrail.errors import Kind, Refused
from handrail.jsonrpc import Id, Message, Notification, Request, Response
from handrail.model import ClientInfo, Json, Object
from handrail.revisions import Offer, Revision
from handrail.revisions.base import LEVELS, VERSION, InitializeParams

CANCELLED = "notifications/cancelled"
_METHODS_BEFORE_HANDSHAKE = frozenset({"initialize", "ping"})


_numbers = count(1)


def names_version(request: Request) -> bool:
    """Return whether a request names its own revision, as those of stateless revisions do."""
    meta = request.params.get("_meta")
    return type(meta) is dict and VERSION in meta


class Connection:
    """The server's side of a conversation."""

    revision: Revision | None = None  # of the last handshake
    client = ClientInfo()
    ready = False  # the client has confirmed the handshake; notifications may be sent only then
    level = LEVELS.index("info")
    last_request_id = 0  # of the server's own requests
    subscriptions: Mapping[str, str] = {}  # canonical URIs of resources, and how the client wrote them
    subscribed_chars = 0  # of those URIs

    def __init__(self, offer: Offer, hidden: Set[str] = frozenset()) -> None:
        self.number = next(_numbers)  # in this process
        self.offer = offer
        self._hidden = hidden  # methods behind a capability that is not declared; may change
        self.in_flight: dict[Id, Any] = {}
        self.pending: dict[Id, Any] = {}
        self.listeners: list[
            Any
        ] = []  # open streams that no request opened; the first one gets notifications and requests

    @property
    def fallback_revision(self) -> Revision:
        """The revision in which to answer a message that could not be read."""
        return self.revision or self.offer.newest

    def fallback_revision_for(self, request: Request) -> Revision:
        """Return the revision in which to refuse a request whose own revision is unclear."""
        return self.offer.newest if names_version(request) else self.fallback_revision

    def revision_of(self, request: Request) -> Revision:
        """Return the revision of a request."""
        if self.offer.stateless and names_version(request):
            named = request.params["_meta"][VERSION]
            if type(named) is not str:
                raise Refused(Kind.BAD_PARAMS, f"params._meta[{VERSION!r}] must be a string")
            return self.offer.stateless.get(named) or self._unsupported(named)
        if self.revision is not None:
            return self.revision
        if request.method in _METHODS_BEFORE_HANDSHAKE:
            more = f"; without a handshake, {', '.join(self.offer.supported)} is spoken here"
            return self.offer.newest_handshake or self._unsupported(
                str(request.params.get("protocolVersion", "")), more
            )
        if request.method not in self.offer.methods:
            raise Refused(Kind.UNKNOWN_METHOD, f"Unknown method: {request.method[:100]}")
        raise Refused(
            Kind.BAD_PARAMS,
            f"{request.method} before initialize, and without params._meta[{VERSION!r}]: send initialize first, "
            f"or name a revision in every request ({', '.join(self.offer.supported_stateless)})",
        )

    def parse_params(self, request: Request, revision: Revision) -> Any:
        """Return the parameters of a request, decoded by its revision."""
        kind = None if request.method in self._hidden else revision.requests.get(request.method)
        if kind is None:
            self.check_envelope(request, revision)
            raise Refused(Kind.UNKNOWN_METHOD, f"Unknown method: {request.method[:100]}")
        try:
            return convert(request.params, kind)
        except ValidationError as problem:
            self.check_envelope(request, revision)
            raise _invalid_params(Kind.BAD_PARAMS, request, problem) from None

    def check_envelope(self, request: Request, revision: Revision) -> None:
        """Refuse a request that lacks what every request of its revision has to hold."""
        try:
            if revision.envelope is not None:
                convert(request.params, revision.envelope)
        except ValidationError as problem:
            raise _invalid_params(Kind.ENVELOPE, request, problem) from None

    def initialize(self, params: InitializeParams) -> Revision:
        """Accept a handshake, the first or a later one; return the revision."""
        revision = self.offer.handshake.get(params.protocol_version) or self.offer.newest_handshake
        assert revision is not None  # `revision_of` has refused a handshake where there is none
        client_info = params.client_info
        self.revision = revision
        self.client = ClientInfo(client_info.name, client_info.version, client_info.title, params.capabilities)
        self.ready = False
        self.level = LEVELS.index("info")
        self.subscriptions, self.subscribed_chars = {}, 0
        return revision

    def expects(self, message: Message | list[Json]) -> bool:
        """Return whether a message belongs to a request in this process, and not in another worker."""
        if isinstance(message, Response):
            return message.id in self.pending
        if isinstance(message, Notification) and message.method == CANCELLED:
            request_id = message.params.get("requestId")
            return not isinstance(request_id, int | str) or request_id in self.in_flight
        return True

    def create_request(self, method: str, params: Object, waiter: object) -> tuple[Id, bytes]:
        """Return the id and the bytes of a request of the server. `waiter` is in `pending` until the response comes."""
        self.last_request_id = request_id = self.last_request_id + 1
        self.pending[request_id] = waiter
        return request_id, jsonrpc.request(request_id, method, params if params else UNSET)

    def _unsupported(self, named: str, more: str = "") -> NoReturn:
        data = {"supported": self.offer.supported_stateless, "requested": named[:100]}
        raise Refused(Kind.VERSION, f"Unsupported protocol version{more}", data)


def _invalid_params(kind: Kind, request: Request, problem: ValidationError) -> Refused:
    return Refused(kind, f"{request.method}: {str(problem).replace('`$', '`params')}")
