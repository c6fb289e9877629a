"""The way from the engine back to one peer: replies to its messages, and what the server sends beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from handrail.model import Principal
from handrail.protocol.connection import Connection

__all__ = ["NO_REPLY", "NullChannel", "OpenStream", "Reply", "ReplyCallback", "ReplyChannel"]


class Reply(Struct, frozen=True, gc=False):
    """The reply to one message, or to a batch. Where a function may return None instead, the reply comes later."""

    body: bytes  # empty: the message gets no response
    status: int = 200  # over HTTP
    retry_after: float = 0.0  # seconds, with status 429
    needed_scopes: frozenset[str] = frozenset()  # with status 403: scopes that the caller lacks


NO_REPLY = Reply(b"")

ReplyCallback = Callable[[Reply], None]
"""Takes the one reply to a message that comes later."""


class ReplyChannel(Protocol):
    """Sends messages to one peer. Each transport has one."""

    @property
    def two_way(self) -> bool:
        """Whether the peer accepts more than the reply to its request."""

    @property
    def stopping(self) -> bool:
        """Whether the server stops while the peer stays and can repeat its request."""

    @property
    def disconnected(self) -> bool:
        """Whether the peer reads nothing any more."""

    def send(self, message: bytes) -> None:
        """Queue a message; never waits."""

    async def drain(self) -> None:
        """Wait while too much is unsent."""

    def pause(self) -> None:
        """Close the response stream, if there is one; the peer fetches the rest later."""


class OpenStream(Protocol):
    """A stream of notifications to one peer."""

    connection: Connection
    reply_channel: ReplyChannel
    principal: Principal
    address: str

    @property
    def subscribed_count(self) -> int:
        """How many resources its `subscriptions/listen` requests are subscribed to."""

    def list_changed(self, method: str) -> None:
        """Notify the peer, by a notification of this method, that a list has changed; from any thread."""

    def resource_updated(self, entry: Any) -> None:
        """Notify the peer of an update of a resource, if it has subscribed to it; from any thread."""


class NullChannel:
    """A reply channel to no peer: it discards what is sent."""

    two_way = True
    stopping = disconnected = False

    def send(self, message: bytes) -> None: ...
    async def drain(self) -> None: ...
    def pause(self) -> None: ...
