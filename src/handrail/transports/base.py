"""The interface between a client's connection and its transport.

A transport does not parse messages, and a connection does no I/O: the transport delivers bytes as they arrive, and the
connection names the request that an outgoing message is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from handrail.errors import PeerError, Sent
from handrail.jsonrpc import Id
from handrail.model import Object
from handrail.revisions import Revision


class PendingRequest(Struct, eq=False):
    """A request of this client that has no result yet; `future` gets the result or the error."""

    id: Id
    method: str
    future: asyncio.Future[Object]
    # Shared by connection and transport
    headers: dict[str, str] = {}  # over HTTP: headers of this request only
    status: int = 0  # over HTTP: status of the response
    sent: Sent = Sent.NO  # the transport sets UNKNOWN as soon as a part may have been sent
    task: Any = None  # owned by the transport: the task to cancel with the request
    on_paused: Callable[[], None] | None = None  # the server has closed the stream, to be asked for the rest later


class MessageHandler(Protocol):
    """The connection, as its transport calls it. No method raises or blocks."""

    def on_message(self, message: bytes | bytearray, request: PendingRequest | None = None) -> None:
        """Handle a message; `request` is set where the message can only be a part of the answer to that request."""

    def on_activity(self, request: PendingRequest | None = None) -> None:
        """Handle a sign that the peer is alive (a keep-alive, a part of a long answer), for one request or for all."""

    def on_failure(self, problem: PeerError, request: PendingRequest | None = None) -> None:
        """Handle the end of one request, or (None) of the transport: no more messages will arrive."""

    def on_stream(self) -> None:
        """Handle a notification stream that was opened, or that cannot be opened again: updates may be lost."""

    def on_discarded(self, why: str, *, too_long: bool = False) -> None:
        """Handle input that was dropped because it is not a message, or too long."""


class ClientTransport(Protocol):
    """A client's end of a transport."""

    disconnect_cancels: bool  # in stateless revisions, closing the response of a request cancels it
    notification_stream: int  # number of the open notification stream, from 1; 0 if none is open

    async def open(self, handler: MessageHandler) -> None:
        """Connect, or start the server, and deliver messages to `handler`. Raise TransportError if that fails."""

    def send(self, message: bytes, request: PendingRequest | None) -> None:
        """Send a message without blocking or raising; `request` is None for notifications and responses."""

    def set_revision(self, revision: Revision) -> None:
        """Set the negotiated revision."""
        return

    async def has_stream(self) -> bool:
        """Wait for the notification stream; return False if the server has none."""
        return True

    async def fall_back(self) -> bool:
        """Try an older form of the transport; return whether the server supports one."""
        return False

    def cancel(self, request: PendingRequest) -> None:
        """Stop working on a request whose caller no longer waits."""
        return

    async def close(self) -> None:
        """Disconnect in bounded time; a second call does nothing."""
