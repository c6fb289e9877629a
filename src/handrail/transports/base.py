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


class Waiting(Struct, eq=False):
    """A request of ours, from when it is made until it is settled; `future` gives the result, or why there is none."""

    id: Id
    method: str
    future: asyncio.Future[Object]
    # Between conversation and transport
    headers: dict[str, str] = {}  # over HTTP, beside those every request has
    status: int = 0  # over HTTP, that of the answer
    sent: Sent = Sent.NO  # the transport says UNKNOWN as soon as a part of it may have left
    trail: Any = None  # the transport's own: what it has to end if nobody waits any more


class Ear(Protocol):
    """The conversation, as a transport sees it. None of these raises, or waits."""

    def hear(self, message: bytes | bytearray, about: Waiting | None = None) -> None:
        """A message came; `about` where it came in answer to that request, and can be about no other."""

    def alive(self, about: Waiting | None = None) -> None:
        """The peer showed that it is there (a keep-alive, a part of a long answer), for one request or for all."""

    def lost(self, problem: PeerError, about: Waiting | None = None) -> None:
        """Nothing more will come for one request, or (None) for any: the transport is dead."""

    def skipped(self, why: str, *, too_long: bool = False) -> None:
        """Something came that was no message, or too long for one; it was left out."""


class Link(Protocol):
    """A client's end of a transport."""

    disconnect_cancels: bool  # in stateless revisions: giving up a request is all the cancelling there is
    news: int  # which stream brings what the server says unasked, counted from 1; 0: none, just now or at all

    async def open(self, ear: Ear) -> None:
        """Connect, or start the server. TransportError says why not. What comes from now on goes to `ear`."""

    def send(self, message: bytes, about: Waiting | None) -> None:
        """Send a message; `about` is the request it is, None for notifications and answers. Never waits or raises."""

    def agreed(self, revision: Revision) -> None:
        """What is spoken from now on."""
        return

    async def fall_back(self) -> bool:
        """Try an older form of the transport, if there is one; whether there is."""
        return False

    def give_up(self, about: Waiting) -> None:
        """Nobody waits for this request any more."""
        return

    async def close(self) -> None:
        """End it, in bounded time; may be called twice."""
