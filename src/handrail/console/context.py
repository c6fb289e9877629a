"""The context of the console's handlers: the engine, the stores, the sessions, and messages to pages and workers."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from handrail.audit.format import ConsoleRecord, TrailError
from handrail.config import ConsoleSettings
from handrail.console.access import ApiError, ConsoleSession, SessionStore
from handrail.console.redact import Redactor
from handrail.engine.catalog import ToolEntry
from handrail.guards.tool_definitions import LockedServer
from handrail.jsonrpc import encode
from handrail.model import Json, Object
from handrail.observe.activity import ActivityFeed
from handrail.revisions import Revision
from handrail.server import Server
from handrail.stores import Store, supports

__all__ = ["ConsoleContext", "PendingRun"]

log = logging.getLogger("handrail")

REPLY_SECONDS = 0.5  # that workers have to reply to a question


class PendingRun(Struct, eq=False):
    """A tool run started from a page: its task, and the answers it waits for, by key."""

    session_key: str
    task: asyncio.Task[None] | None = None
    answers: dict[str, asyncio.Future[Json]] = field(default_factory=dict)


class ConsoleContext:
    """The state of one console in one process, shared by its handlers."""

    sessions: SessionStore
    store: Store  # codes, sessions, approvals
    topics: Store  # messages between workers, and from workers to pages
    stopping: asyncio.Event  # ends the event streams
    verify_lock: asyncio.Lock
    stop_lock: asyncio.Lock  # a start waits for the end of a stop

    def __init__(
        self,
        server: Server,
        settings: ConsoleSettings,
        *,
        target: str = "",
        source: Path | None = None,
        transport: str = "memory",
        workers: int = 1,
    ) -> None:
        self.server = server
        self.settings = settings
        self.engine = server.engine
        self.guards = server.engine.guard_set
        self.feed = ActivityFeed.of(server.engine)
        self.target = target  # the argument of `handrail call` for this server
        self.source = source  # the file of the server
        self.transport = transport
        self.endpoint = ""
        self.workers = workers  # processes of this server; in a fleet those of all machines, and at least 2
        self.worker = ""  # the name of this process; empty if it is the only one
        self.channel = secrets.token_hex(8)  # of the topics: the same in all workers
        self.replicas: list[Object] = []  # in a fleet
        self.started = self.clock()
        self.on_watch: Callable[[], None] = lambda: None  # a page is open, here or in another worker
        self.runs: dict[str, PendingRun] = {}  # tool runs started from a page, by id
        self.argument_previews: dict[str, str] = {}  # by call id
        self.upstream_counts: dict[str, tuple[Any, Mapping[str, int]]] = {}  # by name: of which list of tools
        self.tasks: set[asyncio.Task[Any]] = set()
        self.lock_file: tuple[LockedServer | None, float] | None = None  # of `tools.lock`, and its mtime
        self.lock_flaw = ""  # why `tools.lock` cannot be read
        self.verified: tuple[Any, Object, float] | None = None  # stamps of the audit files, the report, and when

    def open(self, topics: Store, worker: str) -> None:
        """Set the stores of this process, when it starts to serve. The replicas of a fleet have one set of topics."""
        if topics is self.guards.shared_store:
            self.workers, self.channel = max(self.workers, 2), "fleet"
        self.worker = worker
        self.topics = topics
        self.stopping, self.verify_lock, self.stop_lock = asyncio.Event(), asyncio.Lock(), asyncio.Lock()
        store = self.guards.store
        self.store = topics if self.workers > 1 and not supports(store, "processes") else store
        self.sessions = SessionStore(self.store, self.server.name, self.clock, self.settings.roles)

    def clock(self) -> float:
        return self.engine.clock()

    @cached_property
    def redactor(self) -> Redactor:
        return Redactor(self.engine)

    def find_entry(self, label: str) -> ToolEntry | None:
        """Return the tool, the prompt or the resource that calls have under this label, if it is there now."""
        find, name = self.engine.find, label.removeprefix("prompt:")
        entry, _ = find("tool", label) if name == label else find("prompt", name)
        return entry or find("resource", label)[0] or self.engine.templates.get(label)

    def revision(self, name: str) -> Revision:
        """Return the revision of this name, or the newest for an empty name."""
        offer = self.engine.offer
        revision = offer.handshake.get(name) or offer.stateless.get(name) if name else offer.newest
        if revision is None:
            raise ApiError(400, f"revision: {name[:40]!r} is not one of {', '.join(offer.supported)}")
        return revision

    async def publish(self, event: str, data: Any, *, to: str = "") -> None:
        """Send an event to every page, or to the pages of one session, in whichever worker they are connected."""
        await self.publish_raw(event, encode(data), to=to)

    async def publish_raw(self, event: str, data: bytes, *, to: str = "") -> None:
        """Send an event whose data is already encoded."""
        await self.topics.publish(f"console:{self.channel}", f"{event}\n{to}\n".encode() + data)

    async def send_command(self, name: str, data: Object) -> None:
        """Run a command of `routes.COMMANDS` in every worker."""
        await self.topics.publish(f"console-do:{self.channel}", f"{name}\n".encode() + encode(data))

    async def ask_workers(self, name: str, data: Object) -> list[bytes]:
        """Run a command that replies, in every worker; return the replies that come within REPLY_SECONDS."""
        replies: list[bytes] = []
        topic = f"console-reply:{secrets.token_hex(8)}"
        async with self.topics.subscribe(topic) as messages:
            await self.send_command(name, {**data, "topic": topic})
            with suppress(TimeoutError):
                async with asyncio.timeout(REPLY_SECONDS):
                    while len(replies) < self.workers:
                        replies.append(await anext(messages))
        return replies

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run what a command must not wait for; it is cancelled when the console closes."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def write_audit_record(self, session: ConsoleSession, step: str, **members: Any) -> None:
        """Record an action of a person before it is done; refuse the action if it cannot be recorded."""
        if self.guards.trail is None:
            return
        record = ConsoleRecord("console", step=step, by=session.who, server=self.guards.name, **members)
        try:
            await self.guards.trail.write(record)
        except TrailError as problem:
            log.error("console: audit record of %r not written: %s", step, problem)
            raise ApiError(503, "It was not done: it cannot be recorded now; the server's log says why") from None
