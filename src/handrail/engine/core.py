"""What all conversations of one server share: its tools, its limits, its keys, the handler around a call."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import UnsetType

from handrail.engine.catalog import Catalog
from handrail.engine.pipeline import Handler, Middleware, compose, pipeline
from handrail.engine.workers import Workers
from handrail.errors import Kind
from handrail.model import Object
from handrail.protocol.seal import Seal
from handrail.revisions import Offer, Revision
from handrail.revisions.base import Fault, Identity, Welcome

__all__ = ["Engine", "Limits"]

DEFAULT_PAGE = 1_000


class Limits:
    """Sizes and times nobody can exceed. All of them are options of `Server`."""

    def __init__(
        self,
        *,
        max_message_bytes: int = 4 * 1024 * 1024,
        max_calls: int = 256,
        max_unsent_bytes: int = 1024 * 1024,
        write_seconds: float = 30.0,
        grace_seconds: float = 3.0,
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self.max_calls = max_calls
        self.max_unsent_bytes = max_unsent_bytes
        self.write_seconds = write_seconds
        self.grace_seconds = grace_seconds
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}: {value!r} is not more than 0")


class Watcher(Protocol):
    """A conversation that wants to hear of changes to the list of tools; called from any thread."""

    def tools_changed(self) -> None: ...


class Engine:
    """One server, seen from its conversations."""

    def __init__(
        self,
        *,
        owner: Any,
        identity: Identity,
        instructions: str | UnsetType,
        offer: Offer,
        limits: Limits,
        workers: Workers,
        keys: list[bytes] | None,
        page_size: int | None,
        list_changed: bool,
        has_tools: bool,
        identify: bool,
        cache_seconds: float,
        invalid_arguments: Fault | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.owner = owner
        self.identity = identity
        self.instructions = instructions
        self.offer = offer
        self.limits = limits
        self.workers = workers
        self.seal = Seal(keys or [_key_from_environment()])
        self.page_size = page_size
        self.list_changed = list_changed
        self.has_tools = has_tools
        self.hidden = frozenset() if has_tools else frozenset({"tools/list", "tools/call"})
        self.identify = identify
        self.ttl_ms = round(cache_seconds * 1000)
        self.forms = {} if invalid_arguments is None else {Kind.BAD_ARGUMENTS: invalid_arguments}
        self.clock = clock
        self.catalog = Catalog()
        self.catalog.watchers.append(self._changed)
        self.middleware: list[Middleware] = []
        self.peers: set[Watcher] = set()
        self.inner = pipeline(workers)
        self.handle: Handler = self.inner
        self._included: dict[int, Handler] = {}

    def add_middleware(self, middleware: Middleware) -> None:
        self.middleware.append(middleware)
        self.handle = compose(self.middleware, self.inner)
        self._included = {}

    def handler_for(self, owner: Any) -> Handler:
        """The handler of a tool that another server brought along: its middleware inside ours."""
        found = self._included.get(id(owner))
        if found is None:
            found = self._included[id(owner)] = compose([*self.middleware, *owner.engine.middleware], self.inner)
        return found

    def size_for(self, revision: Revision) -> int:
        """How many tools a page has; 0: all."""
        if self.page_size is not None:
            return self.page_size
        return DEFAULT_PAGE if revision.pages else 0

    def welcome(self, revision: Revision) -> Object:
        capabilities: Object = {"logging": {}}
        if self.has_tools:
            announces = self.list_changed or revision.announces
            capabilities["tools"] = {"listChanged": True} if announces else {}
        return revision.welcome(
            Welcome(self.identity, capabilities, self.instructions, self.offer.supported, self.ttl_ms, "public")
        )

    def _changed(self) -> None:
        for peer in list(self.peers):
            peer.tools_changed()


def _key_from_environment() -> bytes:
    """`HANDRAIL_KEY`, shared by processes that must understand each other's cursors and states; else one of our own."""
    given = os.environ.get("HANDRAIL_KEY")
    return given.encode() if given is not None else secrets.token_bytes(32)
