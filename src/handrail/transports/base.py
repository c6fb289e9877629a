"""What a client's conversation and its transport know of each other.

A transport does not read messages, a conversation does no I/O: the one hands over bytes as they come, the other says
which request an outgoing message is.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from msgspec import Struct

from handrail.errors import PeerError, Sent
from handrail.jsonrpc import Id
from handrail.model import Object
from handrail.revisions import Revision


class PendingRequest(Struct, eq=False):
    """A request of ours, from when it is made until it is settled; `future` gives the result, or why there is none."""

    id: Id
    method: str
    future: asyncio.Future[Object]
    # Between conversation and transport
    headers: dict[str, str] = {}  # over HTTP, beside those every request has
    status: int = 0  # over HTTP, that of the answer
    sent: Sent = Sent.NO  # the transport says UNKNOWN as soon as a part of it may have left
    task: Any = None  # the transport's own: what it has to end if nobody waits any more


class MessageHandler(Protocol):
    """The conversation, as a transport sees it. None of these raises, or waits."""

    def on_message(self, message: bytes | bytearray, request: PendingRequest | None = None) -> None:
        """A message came; `about` where it came in answer to that request, and can be about no other."""

    def on_activity(self, request: PendingRequest | None = None) -> None:
        """The peer showed that it is there (a keep-alive, a part of a long answer), for one request or for all."""

    def on_failure(self, problem: PeerError, request: PendingRequest | None = None) -> None:
        """Nothing more will come for one request, or (None) for any: the transport is dead."""

    def on_discarded(self, why: str, *, too_long: bool = False) -> None:
        """Something came that was no message, or too long for one; it was left out."""


class ClientTransport(Protocol):
    """A client's end of a transport."""

    disconnect_cancels: bool  # in stateless revisions: giving up a request is all the cancelling there is
    notification_stream: (
        int  # which stream brings what the server says unasked, counted from 1; 0: none, just now or at all
    )

    async def open(self, handler: MessageHandler) -> None:
        """Connect, or start the server. TransportError says why not. What comes from now on goes to `ear`."""

    def send(self, message: bytes, request: PendingRequest | None) -> None:
        """Send a message; `about` is the request it is, None for notifications and answers. Never waits or raises."""

    def set_revision(self, revision: Revision) -> None:
        """What is spoken from now on."""
        return

    async def fall_back(self) -> bool:
        """Try an older form of the transport, if there is one; whether there is."""
        return False

    def cancel(self, request: PendingRequest) -> None:
        """Nobody waits for this request any more."""
        return

    async def close(self) -> None:
        """End it, in bounded time; may be called twice."""
