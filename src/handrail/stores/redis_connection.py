"""The URL of a Redis, and one connection that carries the commands of all callers.

The commands of one turn of the event loop leave in one write, and the answers come back in order. So the answer to a
caller that was cancelled has its own place, and is dropped. A connection whose oldest command has no answer within
COMMAND_SECONDS is closed, with all that waits on it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from hiredis import pack_command
from msgspec import Struct
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from handrail.stores import StoreError

COMMAND_SECONDS = 1.5  # from a command to its answer, a new connection included
LATE_SECONDS = 0.1  # a timer that is later than this says that this process was busy, and not the server
MAX_WAITING = 10_000  # commands without an answer, on one connection
MAX_WAITING_BYTES = 64 * 1024 * 1024  # of them, not sent yet

Address = tuple[str, int]
Argument = bytes | str | int
Command = Sequence[Argument]

_TLS_OPTIONS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
_OPTIONS = _TLS_OPTIONS | {"replicas", "sentinel_username", "sentinel_password"}
_FORM = "redis://[user:password@]host[:port][/database]"


class RedisUrl(Struct, frozen=True, repr_omit_defaults=True):
    """Where Redis is, and how it is spoken to. Its text has no password."""

    kind: str  # "", "sentinel" or "cluster"
    tls: bool
    hosts: tuple[Address, ...]
    service: str
    database: int
    username: str
    password: str
    options: dict[str, str]

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Read `redis://`, `rediss://` (TLS), and the same with `+sentinel` or `+cluster`."""
        # Nothing of the text is repeated in an error: there may be a password anywhere in it.
        scheme, _, _ = url.partition("://")
        base, _, kind = scheme.partition("+")
        if base not in ("redis", "rediss") or kind not in ("", "sentinel", "cluster"):
            raise ValueError("store: expected redis://, rediss://, redis+sentinel:// or redis+cluster://")
        try:
            rest = urlsplit(url)
        except ValueError:
            raise ValueError(f"store: expected {_FORM}") from None
        userinfo, _, netloc = rest.netloc.rpartition("@")
        username, _, password = userinfo.partition(":")
        options = dict(parse_qsl(rest.query, keep_blank_values=True))
        if options.keys() - _OPTIONS:
            raise ValueError(f"store: a Redis URL has no option but {', '.join(sorted(_OPTIONS))}")
        if not base.endswith("ss") and options.keys() & _TLS_OPTIONS:
            raise ValueError("store: options of TLS belong to rediss://")
        if not options.get("replicas", "0").isdecimal():
            raise ValueError("store: replicas: expected the number of replicas that must have a write")
        parts = [part for part in rest.path.split("/") if part]
        service = unquote(parts.pop(0)) if kind == "sentinel" and parts else ""
        if kind == "sentinel" and not service:
            raise ValueError("store: expected the name of the service: redis+sentinel://host:port,host:port/service")
        database = parts.pop(0) if parts else "0"
        if parts or rest.fragment or not database.isdecimal() or (kind == "cluster" and database != "0"):
            raise ValueError(f"store: expected {_FORM}; a cluster has no databases")
        port = 26379 if kind == "sentinel" else 6379
        hosts = tuple(_address(each, port) for each in netloc.split(","))
        if len(hosts) > 1 and not kind:
            raise ValueError("store: several hosts are a cluster or sentinels: redis+cluster:// or redis+sentinel://")
        return cls(kind, base == "rediss", hosts, service, int(database), unquote(username), unquote(password), options)

    @property
    def replicas(self) -> int:
        """How many replicas must have a write before it is answered."""
        return int(self.options.get("replicas", 0))

    def __repr__(self) -> str:
        scheme = ("rediss" if self.tls else "redis") + (f"+{self.kind}" if self.kind else "")
        path = "/".join([self.service] * bool(self.service) + [str(self.database)])
        return f"{scheme}://{','.join(map(address_text, self.hosts))}/{path}"

    __str__ = __repr__

    def connection(self, address: Address, *, to_sentinel: bool = False) -> Connection:
        """Return a connection that is not open yet, without any of the retries of the library."""
        host, port = address
        tls: dict[str, Any] = {name: self.options[name] for name in _TLS_OPTIONS & self.options.keys()}
        username, password, database = self.username, self.password, self.database
        if to_sentinel:
            username, password = (self.options.get(f"sentinel_{name}", "") for name in ("username", "password"))
            database = 0
        return (SSLConnection if self.tls else Connection)(
            host=host,
            port=port,
            db=database,
            username=username or None,
            password=password or None,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,
            socket_connect_timeout=COMMAND_SECONDS,
            driver_info=None,
            **tls,
        )


def _address(text: str, default_port: int) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    host = host.strip("[]")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"store: expected {_FORM}: the port is not a number from 1 to 65535")
    return unquote(host) or "localhost", int(port)


def address_text(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_pack = cast(Callable[[tuple[Argument, ...]], bytes], pack_command)  # its stub knows commands of one word


class ConnectionLost(StoreError):
    """The connection ended. What was `sent` on it may have been done."""

    def __init__(self, text: str, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


class _Request(Struct, eq=False):
    packed: bytes
    missing: int  # replies
    future: asyncio.Future[list[Any]]
    deadline: float
    replies: list[Any]


class RedisConnection:
    """An open connection to one server: requests are written together and answered in order.

    `on_push` sees each reply first, and returns whether it is a message and not an answer. `on_close` gets the reason.
    """

    def __init__(
        self,
        address: Address,
        connection: Connection,
        *,
        on_push: Callable[[Any], bool] | None = None,
        on_close: Callable[[str], None] | None = None,
    ) -> None:
        self.address = address
        self.close_reason = ""
        self._connection = connection
        self._on_push = on_push
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[_Request] = deque()
        self._unsent_bytes = 0
        self._unanswered: deque[_Request] = deque()
        self._wakeup = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        # Not in the context of the caller that came first: it would be kept as long as the connection.
        self._tasks = [self._loop.create_task(each, context=Context()) for each in (self._send(), self._receive())]

    @property
    def is_idle(self) -> bool:
        return not self._unsent and not self._unanswered

    def request(self, commands: Sequence[Command], deadline: float | None = None) -> asyncio.Future[list[Any]]:
        """Send commands one after the other; the future gets a reply for each, an error of the server as a value."""
        if self.close_reason:
            raise ConnectionLost(self.close_reason, sent=False)
        if len(self._unsent) + len(self._unanswered) >= MAX_WAITING or self._unsent_bytes > MAX_WAITING_BYTES:
            raise StoreError(f"redis {address_text(self.address)}: too many commands wait for an answer")
        packed = b"".join(_pack(tuple(command)) for command in commands)
        deadline = deadline or self._loop.time() + COMMAND_SECONDS
        request = _Request(packed, len(commands), self._loop.create_future(), deadline, [])
        self._unsent.append(request)
        self._unsent_bytes += len(packed)
        self._wakeup.set()
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check_deadline)
        return request.future

    async def _send(self) -> None:
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                pieces = [each.packed for each in self._unsent]
                for each in self._unsent:
                    each.packed = b""
                self._unanswered.extend(self._unsent)
                self._unsent.clear()
                self._unsent_bytes = 0
                await self._connection.send_packed_command(pieces, check_health=False)
        except (RedisError, OSError) as problem:
            self.close(describe_failure(problem))

    async def _receive(self) -> None:
        read = self._connection.read_response
        try:
            while True:
                try:
                    reply = await read(disable_decoding=True, disconnect_on_error=False)
                except ResponseError as problem:
                    reply = problem
                if self._on_push is None or not self._on_push(reply):
                    self._answer(reply)
        except (RedisError, OSError) as problem:
            self.close(describe_failure(problem))
        finally:
            self.close("the event loop has ended")
            await self._connection.disconnect(nowait=True)

    def _answer(self, reply: Any) -> None:
        if not self._unanswered:
            self.close("an answer came to no command")
            return
        request = self._unanswered[0]
        request.replies.append(reply)
        request.missing -= 1
        if not request.missing:
            self._unanswered.popleft()
            if not request.future.done():  # a caller that was cancelled
                request.future.set_result(request.replies)

    def _check_deadline(self) -> None:
        self._timer = None
        oldest = self._unanswered or self._unsent
        if not oldest:
            return
        request, now = oldest[0], self._loop.time()
        if now - request.deadline > LATE_SECONDS:  # this process was busy: the answer may have come meanwhile
            request.deadline = now + LATE_SECONDS / 2
        if now < request.deadline:
            self._timer = self._loop.call_at(request.deadline, self._check_deadline)
        else:
            self.close(f"no answer within {COMMAND_SECONDS:g} s")

    def close(self, reason: str) -> None:
        """Close the connection at once; the requests on it get a ConnectionLost."""
        if self.close_reason:
            return
        self.close_reason = f"redis {address_text(self.address)}: {reason}"
        if self._timer is not None:
            self._timer.cancel()
        for requests, sent in ((self._unanswered, True), (self._unsent, False)):
            for request in requests:
                if not request.future.done():
                    request.future.set_exception(ConnectionLost(self.close_reason, sent))
            requests.clear()
        for task in self._tasks:
            task.cancel()
        if self._on_close is not None:
            self._on_close(self.close_reason)

    async def wait_closed(self) -> None:
        await asyncio.wait(self._tasks)


_HINTS = {
    "Authentication required": "give the user and the password: redis://USER:PASSWORD@HOST",
    "WRONGPASS": "the user or the password in the URL is wrong",
    "Connect call failed": "the connection was refused: does the server run there, and at this port?",
    "Protocol error, got": "what answers there is not Redis",
    "DB index is out of range": "the database is the number behind the last slash of the URL",
}
"""What to do, by a part of a failure's text."""


def describe_failure(problem: BaseException) -> str:
    """Return the text of a failure, with what would be right, and without what it may repeat of a command."""
    lines = str(problem).split(", with args beginning with")[0].splitlines()
    text = (lines and lines[0][:300]) or type(problem).__name__
    return next((f"{text.rstrip('.')}; {hint}" for sign, hint in _HINTS.items() if sign in text), text)
