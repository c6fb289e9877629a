"""Stores of state: values that expire, counters, logs and topics, behind one protocol of ten verbs.

Keys are text, `kind:id`, and sort by code point. A counter is a value too, its digits in ASCII. Logs have names of
their own and end by their time to live. Times to live are in seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import Any, Literal, Protocol, cast
from urllib.parse import unquote

from msgspec import Struct

from handrail.errors import HandrailError

StoreFeature = Literal["peek", "processes", "replicas", "scripts", "transaction", "postgres"]
"""`peek`: it reads without waiting. `processes`: several processes of a machine share it. `replicas`: so do several
machines. `scripts`: it runs scripts of Redis. `transaction`: it runs SQL for others. `postgres`: the audit log can be
beside it, in PostgreSQL."""
DoneCallback = Callable[[Any, BaseException | None], None]
"""Receives the result of a job, or the reason why there is none."""

_URL = re.compile(r"([a-z][a-z0-9+]+)://(/?)(.*)", re.DOTALL)  # `c://…` is a path of Windows


class StoreError(HandrailError):
    """The store cannot do it: it is closed, belongs to another process, or its value does not fit the request."""


class Put(Struct, frozen=True):
    """Keep `value` under `key`, in place of what is there and of its time to live."""

    key: str
    value: bytes
    ttl: float | None = None
    if_absent: bool = False
    if_equals: bytes | None = None


class Delete(Struct, frozen=True):
    key: str
    if_equals: bytes | None = None


class Append(Struct, frozen=True):
    """Add `value` to the end of `log`, forget all but the last `keep`, and let the log live for `ttl` from now."""

    log: str
    value: bytes
    keep: int
    ttl: float | None = None

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep: {self.keep} is less than 1")


class StoreReport(Struct, frozen=True, kw_only=True):
    """The state of the engine behind a store, as the engine itself tells it."""

    engine: str  # name and version
    place: str = ""  # the URL without a password, or the path of the file
    round_trip_ms: float = 0.0
    losses: tuple[str, ...] = ()  # what may lose a write that was acknowledged; what cannot be read counts
    warnings: tuple[str, ...] = ()  # settings that are a risk in another way, each with what would be right


class Store(Protocol):
    """The protocol of a backend. A class that inherits from it gets `put`, and the features of most backends."""

    supports: frozenset[StoreFeature] = frozenset({"processes"})
    durable: bool = False  # a write is on the disk when it returns
    path: str = ""  # of the file, if it is one
    trouble: str = ""  # why the engine could not be reached the last time, until it can be again

    @property
    def peek(self) -> Callable[[str], bytes | None]:
        """A function that returns what `get` does, without waiting; only of a store that supports `peek`."""
        raise StoreError("this store cannot be read without waiting")

    def transaction(self, work: Callable[[Any, float], Any], on_done: DoneCallback) -> None:
        """Run `work` with a connection and the time in a transaction; only of a store that supports `transaction`."""
        raise StoreError("this store has no transactions for others")

    async def get(self, key: str) -> bytes | None: ...
    async def put(
        self,
        key: str,
        value: bytes,
        *,
        ttl: float | None = None,
        if_absent: bool = False,
        if_equals: bytes | None = None,
    ) -> bool:
        """Whether the condition held, and so whether it was done."""
        return await self.commit([Put(key, value, ttl, if_absent, if_equals)])

    async def delete(self, key: str) -> bool:
        """Whether it was there."""

    async def scan(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[tuple[str, bytes]]:
        """The first `limit` keys that begin with `prefix` and come after `after`, in order."""

    async def add(self, key: str, amount: int = 1, *, ttl: float | None = None) -> int:
        """The counter's new value. It begins at 0, and `ttl` with it: a later one changes nothing."""

    async def append(self, log: str, value: bytes, *, keep: int, ttl: float | None = None) -> int:
        """Return the number of the entry: from 1, and never used twice while the log lives."""

    async def read(self, log: str, *, after: int = 0, limit: int = 1000) -> list[tuple[int, bytes]]: ...
    async def publish(self, topic: str, message: bytes) -> None: ...
    def subscribe(self, topic: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """What any process publishes once this is entered. Too slow a listener gets a StoreError, never a gap."""

    async def commit(self, changes: Sequence[Put | Delete | Append]) -> bool:
        """All, in order; or none, and False, if one condition does not hold of what was there before."""

    async def report(self) -> StoreReport:
        """Ask the engine for its version and settings. A StoreError says why it cannot be used."""
        return StoreReport(engine=type(self).__name__, place=self.path)

    async def close(self) -> None: ...


def is_url(place: object) -> bool:
    """Return whether an option names a store or an audit log by its URL, and not by the path of a file."""
    return isinstance(place, str) and (place == "memory:" or _URL.fullmatch(place) is not None)


def is_database(url: str) -> bool:
    """Return whether a URL is that of PostgreSQL, which keeps the audit log and the approvals."""
    return url.startswith(("postgresql://", "postgres://"))


def public_url(url: str) -> str:
    """Return a URL as it may be shown: without a password, and without a query, which may have one."""
    scheme, colon, rest = url.partition("://")
    if not colon:
        return url
    authority, slash, path = rest.partition("?")[0].partition("/")
    if ":" in authority and "@" in rest[len(authority) :]:  # a "/" or "?" that may be of a password, not written %2F
        return f"{scheme}://***@{rest.rpartition('@')[2].partition('?')[0].partition('/')[0]}"
    user, at, hosts = authority.rpartition("@")
    name = user.partition(":")[0]
    return f"{scheme}://{name}{':***' if ':' in user else ''}{at}{hosts}{slash}{path}"


def password_of(url: str) -> str:
    """Return the password in a URL, decoded; empty if there is none."""
    authority = url.partition("://")[2].partition("/")[0]
    return unquote(authority.rpartition("@")[0].partition(":")[2])


def supports(store: Store, feature: StoreFeature) -> bool:
    """Return whether a store has a feature. A class that does not inherit from `Store` need not have `supports`."""
    return feature in getattr(store, "supports", Store.supports)


def condition_holds(change: Put | Delete, current: bytes | None) -> bool:
    """Return whether the condition of `change` holds for the value `current`. All backends use this."""
    if isinstance(change, Put) and change.if_absent and current is not None:
        return False
    return change.if_equals in (None, current)


def parse_counter(key: str, current: bytes | None) -> int:
    """The number a counter stands at. All backends ask here."""
    if current is not None and not current.removeprefix(b"-").isdigit():
        raise StoreError(f"{key}: what is kept there is not a counter")
    return int(current or 0)


def open(
    url: str | os.PathLike[str], *, durable: bool = True, clock: Callable[[], float] | None = None, name: str = ""
) -> Store:
    """Open the store of a URL, or the plain path of a SQLite file.

    `memory:`; `sqlite:///path/to/file`, and `sqlite:////var/lib/state.db` for an absolute path; `postgresql://…`;
    `redis://host:port/0`, `redis+sentinel://host:port,host:port/service` and `redis+cluster://host:port`, each with
    `rediss` for TLS. `name` is that of a server: in an engine that several servers use, each has keys of its own.
    PostgreSQL goes by its own clock, and shows the name as that of a connection. Redis goes by its own clock, and its
    settings decide whether a write is durable.
    """
    options = {} if clock is None else {"clock": clock}
    if url == "memory:":
        return cast(Store, import_module("handrail.stores.memory").MemoryStore(**options))
    if isinstance(url, str) and (match := _URL.fullmatch(url)):
        # By name: a backend imports this module, and its own dependencies only where it is used.
        if is_database(url):
            return cast(Store, _backend("postgres", "asyncpg").PostgresStore(url, durable=durable, name=name))
        scheme, slash, path = match.groups()
        if scheme.partition("+")[0] in ("redis", "rediss"):
            return cast(Store, _backend("redis", "redis", "hiredis").RedisStore(url, name=name))
        if scheme != "sqlite" or not slash or not path:
            raise ValueError(f"store: {scheme}:// is not memory:, sqlite:///path, redis://host:port or a file's path")
        url = path
    return cast(Store, import_module("handrail.stores.sqlite").SqliteStore(url, durable=durable, **options))


def _backend(name: str, *packages: str) -> Any:
    try:
        return import_module(f"handrail.stores.{name}")
    except ModuleNotFoundError as problem:
        package = (problem.name or "").partition(".")[0]
        if package not in packages:
            raise
        raise StoreError(f"store: {name} needs the package {package}: pip install 'handrail[{name}]'") from None
