"""A store in PostgreSQL 14 or newer, for what must never be lost: approvals, beside the audit log.

Keys are bytes, so they sort by code point whatever the collation is. Time is the server's. A message of a topic is a
row: NOTIFY only wakes up those who listen, on a connection of their own, and who looks by itself loses nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit
from zlib import crc32

import asyncpg
from msgspec import Struct

from handrail.stores import (
    Append,
    Delete,
    Put,
    Store,
    StoreError,
    StoreFeature,
    StoreReport,
    condition_holds,
    parse_counter,
)
from handrail.stores.memory import Topics

if TYPE_CHECKING:
    from asyncpg import Connection, Record

__all__ = ["DATABASE_ERRORS", "LOST", "PostgresDatabase", "PostgresStore", "PostgresUrl", "apply"]

P = ParamSpec("P")
T = TypeVar("T")

OLDEST_SERVER = (14, 0)
MAX_CONNECTIONS = 4  # of a store; one more listens, and one more writes the audit log
CONNECT_SECONDS = 2.0
COMMAND_SECONDS = 5.0  # of a verb, with the wait for a connection
CLOSE_SECONDS = 2.0
TRANSACTION_SECONDS = 10  # after which the server gives up a statement, or a transaction without one
TRANSACTION_LIMITS = ("statement_timeout", "idle_in_transaction_session_timeout")
POLL_SECONDS = 1.0  # between two looks for messages, where nothing wakes up those who listen
MESSAGE_SECONDS = 60.0  # a process that was away for less still hears what was published meanwhile
RECONNECT_SECONDS = 10.0  # until those who listen hear that nobody hears
SWEEP_SECONDS = 1.0
MAX_BATCH_ROWS = 1000  # rows swept in one statement, messages read in one poll

CHANNEL = "handrail"
LOCKS = 0x68616E64  # the first of two numbers of our advisory locks; the second is of what is locked
MIGRATION_LOCK = -1
KEY_LOCKS = 256  # as many as keys share: the memory that a server has for locks is small

LOST = (OSError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError)
"""The connection is gone, or an answer did not come in time: what was under way may have been done."""
DATABASE_ERRORS = (*LOST, asyncpg.PostgresError, asyncpg.InternalClientError)

MIGRATIONS = (
    (
        "CREATE TABLE handrail_entries (key bytea PRIMARY KEY, value bytea NOT NULL, expires timestamptz)",
        "CREATE INDEX handrail_entries_expire ON handrail_entries (expires) WHERE expires IS NOT NULL",
        "CREATE TABLE handrail_logs (log bytea PRIMARY KEY, last bigint NOT NULL, expires timestamptz)",
        "CREATE INDEX handrail_logs_expire ON handrail_logs (expires) WHERE expires IS NOT NULL",
        "CREATE TABLE handrail_lines (log bytea, number bigint, value bytea NOT NULL, PRIMARY KEY (log, number))",
        "CREATE TABLE handrail_topics (last bigint NOT NULL)",
        "INSERT INTO handrail_topics VALUES (0)",
        "CREATE TABLE handrail_messages (number bigint PRIMARY KEY, topic bytea NOT NULL, message bytea NOT NULL,"
        " expires timestamptz NOT NULL)",
        "CREATE INDEX handrail_messages_expire ON handrail_messages (expires)",
        "CREATE TABLE handrail_audit (position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,"
        ' chain text COLLATE "C" NOT NULL, number bigint NOT NULL, time timestamptz NOT NULL, line bytea NOT NULL,'
        " UNIQUE (chain, number))",
        "CREATE INDEX handrail_audit_time ON handrail_audit (time)",
    ),
)
"""From each version of the tables to the next. What was released is never edited: add a step."""
USABLE_FROM = 1
"""The oldest version of this list whose code may go on beside the tables as they are now: one before the last step."""

STORE_TABLES = tuple(f"handrail_{each}" for each in ("entries", "logs", "lines", "topics", "messages"))
CHECK = (
    "SELECT current_setting('synchronous_commit') AS synchronous_commit, current_setting('fsync') AS fsync,"
    " current_setting('transaction_read_only') AS read_only, current_setting('server_version') AS version,"
    " to_regclass('handrail_schema') IS NOT NULL AS has_tables"
)
RISKS = (
    "SELECT NOT ssl AND NOT inet_client_addr() <<= '127.0.0.0/8' AND inet_client_addr() <> '::1',"
    " current_setting('synchronous_standby_names') = '' AND EXISTS (SELECT FROM pg_stat_replication),"
    " has_table_privilege('handrail_audit', 'UPDATE'), has_table_privilege('handrail_audit', 'DELETE'),"
    " has_table_privilege('handrail_audit', 'TRUNCATE') FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
)
LIVE = "(expires IS NULL OR expires > clock_timestamp())"
SWEEPS = (
    "DELETE FROM handrail_entries WHERE ctid = ANY(ARRAY("
    "SELECT ctid FROM handrail_entries WHERE expires <= clock_timestamp() LIMIT $1 FOR UPDATE SKIP LOCKED))",
    "DELETE FROM handrail_lines WHERE ctid = ANY(ARRAY(SELECT lines.ctid FROM handrail_lines AS lines"
    " JOIN handrail_logs USING (log) WHERE expires <= clock_timestamp() LIMIT $1 FOR UPDATE SKIP LOCKED))",
    "DELETE FROM handrail_logs WHERE ctid = ANY(ARRAY(SELECT ctid FROM handrail_logs AS logs"
    " WHERE expires <= clock_timestamp() AND NOT EXISTS (SELECT FROM handrail_lines WHERE log = logs.log)"
    " LIMIT $1 FOR UPDATE SKIP LOCKED))",
    "DELETE FROM handrail_messages WHERE ctid = ANY(ARRAY("
    "SELECT ctid FROM handrail_messages WHERE expires <= clock_timestamp() LIMIT $1 FOR UPDATE SKIP LOCKED))",
)


_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.%-]*)(:[0-9]+)?")


class PostgresUrl(Struct, frozen=True):
    """Where a database is. The text of it names no user, no password and no option."""

    dsn: str
    name: str
    statement_cache_size: int

    @classmethod
    def parse(cls, url: str) -> PostgresUrl:
        """Read a URL; ValueError if it cannot be. The error repeats no part of it: that may be a password."""
        hint = "postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with %40 for @, %2F for / and so on in a password"
        try:
            parts = urlsplit(url)
            hosts = parts.netloc.rpartition("@")[2]
            options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
            cache_size = int(options.pop("statement_cache_size", "100"))
            if not all(map(_HOST.fullmatch, hosts.split(","))) or "@" in parts.path + parts.query or parts.fragment:
                raise ValueError
        except ValueError:
            raise ValueError(f"the URL of PostgreSQL cannot be read: it has to be {hint}") from None
        dsn = urlunsplit(parts._replace(query=urlencode(options)))
        return cls(dsn, f"postgresql://{hosts}{parts.path}", cache_size)

    def __repr__(self) -> str:
        return self.name


class PostgresDatabase:
    """The connections of one store: opened when they are needed, each one checked, never more than a few.

    For one event loop at a time, and not across a fork.
    """

    def __init__(self, url: PostgresUrl, durable: bool, application: str) -> None:
        self.name = url.name
        self.trouble = ""  # why it could not be reached the last time, until it can be again
        self._application = application
        self._url = url
        self._durable = durable
        self._cache_size = url.statement_cache_size
        self._process = os.getpid()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._idle: list[Connection[Record]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self.in_order = asyncio.Lock()  # for what has to be done in the order in which it was asked for

    async def connect(self, *, may_lose: bool = False) -> Connection[Record]:
        """Open a connection of the caller's own, to a server and tables that are fit for use."""
        self.check_usable()
        try:
            db = await asyncpg.connect(
                self._url.dsn,
                timeout=CONNECT_SECONDS,
                statement_cache_size=self._cache_size,
                server_settings={"application_name": self._application},
            )
        except (*DATABASE_ERRORS, ValueError) as problem:
            raise self.error(problem) from None
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                await self._check(db, self._durable and not may_lose)
        except DATABASE_ERRORS as problem:
            db.terminate()
            raise self.error(problem) from None
        except BaseException:
            db.terminate()
            raise
        self.trouble = ""
        return db

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection[Record]]:
        """Lend a connection for a verb. An error or a lack of time ends the connection too.

        So no answer is left on it for the next caller, and no transaction.
        """
        self.check_usable()
        is_connected = False
        try:
            async with asyncio.timeout(COMMAND_SECONDS), self._slots:
                while self._idle and self._idle[-1].is_closed():
                    self._idle.pop()
                db = self._idle.pop() if self._idle else await self.connect()
                is_connected = True
                try:
                    yield db
                except BaseException:
                    self.abandon(db)
                    raise
                self._idle.append(db)
                self.trouble = ""
        except DATABASE_ERRORS as problem:
            if is_connected and isinstance(problem, LOST):
                raise StoreError(f"{self.error(problem)}; what was asked for may have been done") from None
            raise self.error(problem) from None

    def check_usable(self) -> None:
        if os.getpid() != self._process:
            raise StoreError(f"this store was opened by process {self._process}; after a fork, open it anew")
        if self._is_closed:
            raise StoreError("the store was closed")
        if (loop := asyncio.get_running_loop()) is not self._loop:  # what was open in another has ended with it
            self._loop, self._idle, self._tasks = loop, [], set()
            self._slots, self.in_order = asyncio.Semaphore(MAX_CONNECTIONS), asyncio.Lock()

    def error(self, problem: BaseException) -> StoreError:
        """Return what went wrong, without a credential in it."""
        failure = self._describe(problem)
        if isinstance(problem, LOST):
            self.trouble = str(failure)
        return failure

    def _describe(self, problem: BaseException) -> StoreError:
        match problem:
            case StoreError():
                return problem
            case TimeoutError():
                text = "it did not answer in time"
            case OSError():
                cause = problem.strerror or str(problem)
                if cause.startswith("Connect call failed"):  # asyncio's words for ECONNREFUSED
                    cause = "connection refused: does it run there, and at this port?"
                text = f"it cannot be reached: {cause}"
            case asyncpg.ClientConfigurationError():
                text = f"an option of its URL cannot be used: {problem.args[0]}"
            case asyncpg.InvalidAuthorizationSpecificationError():
                text = f"it refuses the user or the password: {problem.args[0]}"
            case asyncpg.DuplicatePreparedStatementError() | asyncpg.InvalidSQLStatementNameError():
                self._cache_size = 0
                text = "a pooler mixes up the statements of its clients; they are not kept any more"
            case asyncpg.PostgresError() if problem.args:
                text = str(problem.args[0])
            case asyncpg.InterfaceError():
                text = f"the connection is gone: {problem.args[0] if problem.args else ''}"
            case _:
                text = type(problem).__name__
        return StoreError(f"{self.name}: {text}")

    async def carry_out(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. It is carried out even if the caller is cancelled, as in other stores."""
        return await asyncio.shield(self._start(work))

    def abandon(self, db: Connection[Record]) -> None:
        """Close a connection on which something may still be under way; no caller waits for that."""
        self._start(close_connection(db))

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller has it, unless that was cancelled

    async def close(self) -> None:
        self._is_closed = True
        if self._loop is asyncio.get_running_loop():
            while self._tasks:
                await asyncio.wait(self._tasks)
            for db in self._idle:
                await close_connection(db)
        self._idle.clear()

    async def _check(self, db: Connection[Record], durable: bool) -> None:
        version = db.get_server_version()
        if (version.major, version.minor) < OLDEST_SERVER:
            raise StoreError(f"{self.name}: PostgreSQL {version.major} is too old: 14 is the oldest that will do")
        row = await db.fetchrow(CHECK)
        assert row is not None
        if row["read_only"] == "on":
            raise StoreError(f"{self.name}: it takes no writes: a standby, or default_transaction_read_only is on")
        if durable:
            for name in ("fsync", "synchronous_commit"):
                if row[name] == "off":
                    raise StoreError(
                        f"{self.name}: {name} is off there: a crash of the server loses what was acknowledged."
                        f" Switch it on for this role, or say sync = 'power-cut-loses-last-calls'"
                    )
        tables = await db.fetchrow("SELECT version, usable_from FROM handrail_schema") if row["has_tables"] else None
        if tables is not None and tables["usable_from"] > len(MIGRATIONS):
            raise StoreError(
                f"{self.name}: its tables are of a newer Handrail (version {tables['version']}, for"
                f" {tables['usable_from']} and newer); this one knows up to {len(MIGRATIONS)}"
            )
        if tables is None or tables["version"] < len(MIGRATIONS):
            await self._migrate(db)

    async def _migrate(self, db: Connection[Record]) -> None:
        try:
            await db.execute(f"BEGIN; SELECT pg_advisory_xact_lock({LOCKS}, {MIGRATION_LOCK})")
            await db.execute(
                "CREATE TABLE IF NOT EXISTS handrail_schema (version int NOT NULL, usable_from int NOT NULL)"
            )
            version = await db.fetchval("SELECT version FROM handrail_schema") or 0
            for step in MIGRATIONS[version:]:
                for statement in step:
                    await db.execute(statement)
            if version < len(MIGRATIONS):
                await db.execute("DELETE FROM handrail_schema")
                await db.execute("INSERT INTO handrail_schema VALUES ($1, $2)", len(MIGRATIONS), USABLE_FROM)
            await db.execute("COMMIT")
        except asyncpg.InsufficientPrivilegeError as problem:
            raise StoreError(
                f"{self.name}: the tables are not there, or older than this version, and this role may not make them"
                f" ({problem.args[0]}); run `handrail audit prepare URL --grant ROLE` once, as a role that may"
            ) from None

    async def grant(self, role: str) -> None:
        """Grant a role what a server needs, and on the audit log only INSERT and SELECT."""
        db = await self.connect(may_lose=True)
        try:
            name = await db.fetchval("SELECT quote_ident($1)", role)
            await db.execute(f"GRANT SELECT ON handrail_schema TO {name}")
            await db.execute(f"GRANT SELECT, INSERT ON handrail_audit TO {name}")
            await db.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {', '.join(STORE_TABLES)} TO {name}")
        except DATABASE_ERRORS as problem:
            raise self.error(problem) from None
        finally:
            await close_connection(db)


async def close_connection(db: Connection[Record]) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await db.close()
    except DATABASE_ERRORS:
        db.terminate()


def carried_out(
    verb: Callable[Concatenate[PostgresStore, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[PostgresStore, P], Coroutine[Any, Any, T]]:
    """Make a verb one that goes on to its end if its caller is cancelled."""

    @wraps(verb)
    async def run(store: PostgresStore, /, *args: P.args, **options: P.kwargs) -> T:
        store.database.check_usable()
        return await store.database.carry_out(verb(store, *args, **options))

    return run


class PostgresStore(Store):
    """Opens its connections when it is first used. With `durable` a server that does not sync is refused.

    A call that is cancelled may still be carried out.
    """

    supports: frozenset[StoreFeature] = frozenset({"processes", "replicas", "postgres"})

    def __init__(self, url: str, *, durable: bool = True, name: str = "") -> None:
        self.durable = durable
        application = re.sub("[^ -~]", "?", f"handrail {name}".strip())
        self.database = PostgresDatabase(PostgresUrl.parse(url), durable, application)
        self._topics = Topics()
        self._listener: asyncio.Task[None] | None = None
        self._last_number = 0  # of the messages that listeners of this process have
        self._heard_at = 0.0  # when it was last known that there are no more
        self._sweep_at = float("-inf")

    def __repr__(self) -> str:
        return f"PostgresStore({self.database.name!r})"

    @property
    def trouble(self) -> str:  # type: ignore[override]  # it is read only
        return self.database.trouble

    @carried_out
    async def get(self, key: str) -> bytes | None:
        name = key.encode()
        async with self.database.connection() as db:
            value: bytes | None = await db.fetchval(
                f"SELECT value FROM handrail_entries WHERE key = $1 AND {LIVE}", name
            )
        return value

    @carried_out
    async def delete(self, key: str) -> bool:
        async with self._transaction(locks_of([Delete(key)])) as db:
            status = await db.execute(f"DELETE FROM handrail_entries WHERE key = $1 AND {LIVE}", key.encode())
        return status != "DELETE 0"

    @carried_out
    async def scan(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[tuple[str, bytes]]:
        start = prefix.encode()
        # No text has the byte 0xFF in it, so that is the end of all that begin with the prefix.
        sql = (
            "SELECT key, value FROM handrail_entries WHERE key >= $1 AND key > $2 AND key < $3"
            f" AND {LIVE} ORDER BY key LIMIT $4"
        )
        async with self.database.connection() as db:
            rows = await db.fetch(sql, start, after.encode(), start + b"\xff", max(limit, 0))
        return [(key.decode(), value) for key, value in rows]

    @carried_out
    async def add(self, key: str, amount: int = 1, *, ttl: float | None = None) -> int:
        put = Put(key, b"", ttl)
        async with self._transaction(locks_of([put])) as db:
            current = await db.fetchval(f"SELECT value FROM handrail_entries WHERE key = $1 AND {LIVE}", key.encode())
            total = parse_counter(key, current) + amount
            if current is None:
                await apply(db, [Put(key, b"%d" % total, ttl)])
            else:
                await db.execute("UPDATE handrail_entries SET value = $2 WHERE key = $1", key.encode(), b"%d" % total)
        return total

    @carried_out
    async def append(self, log: str, value: bytes, *, keep: int, ttl: float | None = None) -> int:
        change = Append(log, value, keep, ttl)
        async with self._transaction(locks_of([change])) as db:
            return await _append(db, change)

    @carried_out
    async def read(self, log: str, *, after: int = 0, limit: int = 1000) -> list[tuple[int, bytes]]:
        sql = (
            "SELECT number, value FROM handrail_lines JOIN handrail_logs USING (log)"
            f" WHERE log = $1 AND number > $2 AND {LIVE} ORDER BY number LIMIT $3"
        )
        name = log.encode()
        async with self.database.connection() as db:
            return [(number, value) for number, value in await db.fetch(sql, name, after, max(limit, 0))]

    @carried_out
    async def commit(self, changes: Sequence[Put | Delete | Append]) -> bool:
        if not changes:
            return True
        async with self._transaction(locks_of(changes)) as db:
            return await apply(db, changes)

    @carried_out
    async def publish(self, topic: str, message: bytes) -> None:
        sql = (
            "WITH next AS (UPDATE handrail_topics SET last = last + 1 RETURNING last), added AS ("
            "INSERT INTO handrail_messages SELECT last, $1, $2, clock_timestamp() + $3 * interval '1 second' FROM next"
            f" RETURNING number) SELECT pg_notify('{CHANNEL}', '') FROM added"
        )
        name = topic.encode()
        self.database.check_usable()
        async with self.database.in_order, self.database.connection() as db:
            await db.execute(sql, name, message, MESSAGE_SECONDS)
            await self._sweep(db)

    @asynccontextmanager
    async def subscribe(self, topic: str) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self.database.connection() as db:
            since = await _newest_number(db)
        try:
            with self._topics.subscribe(topic, since) as messages:
                if self._listener is None or self._listener.done():
                    self._listener = asyncio.create_task(self._listen(since))
                yield messages
        finally:
            if self._listener is not None and not self._topics:
                await self._stop_listening()

    async def report(self) -> StoreReport:
        db = await self.database.connect(may_lose=True)
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                begun = time.monotonic()
                row = await db.fetchrow(CHECK)
                round_trip = time.monotonic() - begun
                assert row is not None
                warnings = await self._warnings(db)
        except DATABASE_ERRORS as problem:
            raise self.database.error(problem) from None
        finally:
            await close_connection(db)
        losses = [
            f"{name} is off, and a crash of the server takes the last writes; switch it on for this role"
            for name in ("fsync", "synchronous_commit")
            if row[name] == "off"
        ]
        return StoreReport(
            engine=f"PostgreSQL {row['version']}",
            place=self.database.name,
            round_trip_ms=round_trip * 1000,
            losses=tuple(losses),
            warnings=tuple(warnings),
        )

    async def _warnings(self, db: Connection[Record]) -> list[str]:
        row = await db.fetchrow(RISKS)
        assert row is not None
        has_no_tls, has_lagging_standby, *rights = row
        warnings = []
        if has_no_tls:
            warnings.append(
                "the connection leaves the machine without TLS; add ?sslmode=verify-full&sslrootcert=FILE to the URL"
            )
        if has_lagging_standby:
            warnings.append("a fail-over may lose the last writes; name the standby in synchronous_standby_names")
        if verbs := [verb for verb, may in zip(("UPDATE", "DELETE", "TRUNCATE"), rights, strict=True) if may]:
            warnings.append(
                f"this role may {', '.join(verbs)} records of the audit log, and so hide them; grant it only INSERT and"
                " SELECT on handrail_audit"
            )
        return warnings

    async def close(self) -> None:
        """Close the connections. Listeners get a StoreError."""
        self._topics.close("the store was closed")
        if self._listener is not None:
            await self._stop_listening()
        await self.database.close()

    async def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None and listener.get_loop() is asyncio.get_running_loop():
            listener.cancel()
            await asyncio.wait([listener])

    @asynccontextmanager
    async def _transaction(self, locks: Sequence[int]) -> AsyncIterator[Connection[Record]]:
        """Lend a connection in a transaction that no other of these locks runs beside; it is committed in the end."""
        async with self.database.connection() as db:
            await db.execute(begin(locks))
            yield db
            await db.execute("COMMIT")
            await self._sweep(db)

    async def _sweep(self, db: Connection[Record]) -> None:
        if time.monotonic() < self._sweep_at:
            return
        swept = []
        with suppress(*DATABASE_ERRORS):  # what was asked for is done
            swept = [await db.execute(sql, MAX_BATCH_ROWS) for sql in SWEEPS]
        if f"DELETE {MAX_BATCH_ROWS}" not in swept:
            self._sweep_at = time.monotonic() + SWEEP_SECONDS

    async def _listen(self, last_number: int) -> None:
        """Deliver messages until there is nobody to hear them; reconnect for a while, and lose none by it."""
        self._last_number, self._heard_at = last_number, time.monotonic()
        while True:
            try:
                await self._deliver_messages()
            except StoreError as problem:
                if isinstance(problem, _MessagesLost) or time.monotonic() - self._heard_at > RECONNECT_SECONDS:
                    self._topics.close(str(problem))
                    return
                await asyncio.sleep(random.uniform(0.05, POLL_SECONDS))

    async def _deliver_messages(self) -> None:
        wakeup = asyncio.Event()
        db = await self.database.connect()
        try:
            with suppress(asyncpg.PostgresError):  # a pooler may not have it: then each look is by the clock
                async with asyncio.timeout(COMMAND_SECONDS):
                    await db.add_listener(CHANNEL, lambda *_: wakeup.set())
            while True:
                wakeup.clear()
                async with asyncio.timeout(COMMAND_SECONDS):
                    rows = await self._new_messages(db)
                self._heard_at = time.monotonic()
                for self._last_number, topic, message in rows:
                    self._topics.deliver(topic.decode(), message, self._last_number)
                if len(rows) < MAX_BATCH_ROWS:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(POLL_SECONDS):
                            await wakeup.wait()
        except DATABASE_ERRORS as problem:
            raise self.database.error(problem) from None
        finally:
            db.terminate()

    async def _new_messages(self, db: Connection[Record]) -> list[Record]:
        sql = "SELECT number, topic, message FROM handrail_messages WHERE number > $1 ORDER BY number LIMIT $2"
        rows = await db.fetch(sql, self._last_number, MAX_BATCH_ROWS)
        if not rows:
            if await _newest_number(db) == self._last_number:
                return rows
            rows = await db.fetch(sql, self._last_number, MAX_BATCH_ROWS)
        if not rows or rows[0][0] != self._last_number + 1:  # numbers have no gaps
            raise _MessagesLost(
                f"{self.database.name}: some messages are gone: nothing was heard for {MESSAGE_SECONDS:g} s, or the"
                " database is an older one than before"
            )
        return rows


class _MessagesLost(StoreError):
    pass


def locks_of(changes: Sequence[Put | Delete | Append]) -> list[int]:
    """Return the numbers of the locks that changes need, in the order in which all take them."""
    keys = (each.log if isinstance(each, Append) else each.key for each in changes)
    return sorted({crc32(key.encode()) % KEY_LOCKS for key in keys})


def begin(locks: Sequence[int]) -> str:
    """Return the statements that begin a transaction, and wait until no other has one of these locks."""
    numbers = ",".join(map(str, sorted(locks)))
    # A process that is cut off without a sign must not keep the locks.
    limits = "; ".join(f"SET LOCAL {name} = '{TRANSACTION_SECONDS}s'" for name in TRANSACTION_LIMITS)
    return f"BEGIN; {limits}; SELECT pg_advisory_xact_lock({LOCKS}, n) FROM unnest('{{{numbers}}}'::int[]) AS n"


async def apply(db: Connection[Record], changes: Sequence[Put | Delete | Append]) -> bool:
    """Make the changes in a transaction that has their locks; False, and nothing is done, if a condition fails."""
    if not await conditions_hold(db, changes):
        return False
    after: dict[bytes, Put | Delete] = {each.key.encode(): each for each in changes if not isinstance(each, Append)}
    puts = [(key, each.value, each.ttl) for key, each in after.items() if isinstance(each, Put)]
    if puts:
        await db.execute(
            "INSERT INTO handrail_entries SELECT key, value, clock_timestamp() + ttl * interval '1 second'"
            " FROM unnest($1::bytea[], $2::bytea[], $3::float8[]) AS puts (key, value, ttl)"
            " ON CONFLICT (key) DO UPDATE SET value = EXCLUDED.value, expires = EXCLUDED.expires",
            *map(list, zip(*puts, strict=True)),
        )
    if deletes := [key for key, each in after.items() if isinstance(each, Delete)]:
        await db.execute("DELETE FROM handrail_entries WHERE key = ANY($1)", deletes)
    for each in changes:
        if isinstance(each, Append):
            await _append(db, each)
    return True


async def conditions_hold(db: Connection[Record], changes: Sequence[Put | Delete | Append]) -> bool:
    conditional = [
        each
        for each in changes
        if not isinstance(each, Append) and (each.if_equals is not None or (isinstance(each, Put) and each.if_absent))
    ]
    if not conditional:
        return True
    sql = f"SELECT key, value FROM handrail_entries WHERE key = ANY($1) AND {LIVE}"
    rows = await db.fetch(sql, [each.key.encode() for each in conditional])
    current = {row[0]: row[1] for row in rows}
    return all(condition_holds(each, current.get(each.key.encode())) for each in conditional)


async def _append(db: Connection[Record], change: Append) -> int:
    log = change.log.encode()
    last = await db.fetchval(f"SELECT last FROM handrail_logs WHERE log = $1 AND {LIVE}", log)
    number = 1 if last is None else last + 1
    # Of a log that has ended, and was not swept yet, nothing is left.
    too_old = number - change.keep if last is not None else 1 << 62
    await db.execute("DELETE FROM handrail_lines WHERE log = $1 AND number <= $2", log, too_old)
    await db.execute("INSERT INTO handrail_lines VALUES ($1, $2, $3)", log, number, change.value)
    await db.execute(
        "INSERT INTO handrail_logs VALUES ($1, $2, clock_timestamp() + $3::float8 * interval '1 second')"
        " ON CONFLICT (log) DO UPDATE SET last = EXCLUDED.last, expires = EXCLUDED.expires",
        log,
        number,
        change.ttl,
    )
    return number


async def _newest_number(db: Connection[Record]) -> int:
    return int(await db.fetchval("SELECT last FROM handrail_topics"))
