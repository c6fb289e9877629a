"""A store in Redis 7.0 or Valkey 7.2, shared by all machines that reach it.

A key is kept under the name `handrail:1:{SERVER:TAG}v:KEY`: the format's version, the name of the server, and a tag.
What is between braces decides the slot of a cluster. The tag is the family of the key's kind, so all keys that change
together have one; see `tag_of`. An index of all keys of a tag, for `scan`, and one of their ends, by which it is swept,
lie in the same slot. All that changes something is one script. Time is the server's.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from hashlib import sha1
from ipaddress import ip_address
from typing import Any

from redis.exceptions import MovedError, NoScriptError, ResponseError

from handrail.stores import Append, Delete, Put, Store, StoreError, StoreFeature, StoreReport
from handrail.stores.memory import Topics
from handrail.stores.redis_connection import (
    Address,
    Command,
    ConnectionLost,
    RedisConnection,
    RedisUrl,
    describe_failure,
)
from handrail.stores.redis_nodes import RedisNodes

FORMAT = "handrail:1:"
HEARTBEAT_SECONDS = 3.0  # between two signs of life of a connection that listens
REPLICA_SECONDS = 0.5  # until the replicas must have a write
MAX_TTL_MILLISECONDS = 10**14
MAX_PAGE_ROWS = 1000  # of one run of the script that scans

SETTINGS = ("appendonly", "appendfsync", "maxmemory-policy")

FAMILIES = {"approved": "approval", "grant": "approval", "slots": "rate"}
"""Kinds, up to their first `-`, that change together with those of another name."""
DIVIDED = {
    "session": "session",
    "subscriptions": "session",
    "events": "session",
    "subscribed": "caller",
    "limit": "limit",
}
"""Kinds of which each session, or each caller, has a tag of its own: the part of the key after the kind."""


class Script:
    """A Lua script for Redis 7.0. It begins with `#!lua`, and with `#!lua flags=no-writes` if it only reads."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.digest = sha1(source.encode(), usedforsecurity=False).hexdigest()
        self.writes = "no-writes" not in source.partition("\n")[0]


COMMIT = Script("""#!lua
-- KEYS: the index, the ends, a name for each change.
-- ARGV, for each change: verb, conditions, key, value, milliseconds to live, what the value must equal.
local index, ends, count = KEYS[1], KEYS[2], #KEYS - 2
for i = 1, count do
  local verb, conditions, equals = ARGV[6 * i - 5], ARGV[6 * i - 4], ARGV[6 * i]
  if conditions ~= '' then
    local current = redis.call('GET', KEYS[i + 2])
    if current and conditions:find('absent') or current ~= equals and conditions:find('equals') then
      return false
    end
  elseif verb == 'add' then
    local current = redis.call('GET', KEYS[i + 2])
    if current and not current:find('^-?%d+$') then
      return redis.error_reply('NOCOUNTER')
    end
  end
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local last, longest, forever = redis.call('PEXPIRETIME', index), 0, false

local function forget(key)
  redis.call('ZREM', index, key)
  redis.call('ZREM', ends, key)
end

local function keep(name, key, value, ttl)
  if ttl == '' then
    redis.call('SET', name, value)
    redis.call('ZADD', index, 0, key)
    redis.call('ZREM', ends, key)
    forever = true
  elseif tonumber(ttl) <= 0 then
    redis.call('DEL', name)
    forget(key)
  else
    local till = now + ttl
    redis.call('SET', name, value, 'PXAT', till)
    redis.call('ZADD', index, 0, key)
    redis.call('ZADD', ends, till, key)
    longest = math.max(longest, till)
  end
end

local function append(name, value, keep, ttl)
  local number = 1
  for _, entry in ipairs(redis.call('XREVRANGE', name, '+', '-', 'COUNT', 1)) do
    number = tonumber(entry[1]:match('^%d+')) + 1
  end
  redis.call('XADD', name, 'MAXLEN', '=', keep, number .. '-0', '', value)
  if ttl == '' then
    redis.call('PERSIST', name)
  else
    redis.call('PEXPIREAT', name, now + ttl)
  end
  return number
end

local results = {}
for i = 1, count do
  local verb, extra, key, value, ttl = ARGV[6 * i - 5], ARGV[6 * i], ARGV[6 * i - 3], ARGV[6 * i - 2], ARGV[6 * i - 1]
  local name = KEYS[i + 2]
  if verb == 'put' then
    keep(name, key, value, ttl)
    results[i] = 1
  elseif verb == 'delete' then
    results[i] = redis.call('DEL', name)
    forget(key)
  elseif verb == 'append' then
    results[i] = append(name, value, extra, ttl)
  elseif redis.call('EXISTS', name) == 0 then
    keep(name, key, value, ttl)
    results[i] = value
  else
    local sign, digits = redis.call('GET', name):match('^(-?)0*(%d+)$')
    redis.call('SET', name, digits == '0' and digits or sign .. digits, 'KEEPTTL')
    redis.call('INCRBY', name, value)
    results[i] = redis.call('GET', name)
  end
end

-- An index whose keys all end ends with the last of them.
if forever then
  redis.call('PERSIST', index)
  redis.call('PERSIST', ends)
elseif longest > 0 and last ~= -1 then
  redis.call('PEXPIREAT', index, math.max(longest, last))
  redis.call('PEXPIREAT', ends, math.max(longest, last))
end
local limit = math.min(100 + count, 1000)
local expired = redis.call('ZRANGEBYSCORE', ends, '-inf', string.format('(%.0f', now), 'LIMIT', 0, limit)
if #expired > 0 then
  redis.call('ZREM', index, unpack(expired))
  redis.call('ZREM', ends, unpack(expired))
end
return results
""")

SCAN = Script("""#!lua flags=no-writes
-- KEYS: the index. ARGV: the first and the last key, how many, what the names of values begin with.
local keys = redis.call('ZRANGEBYLEX', KEYS[1], ARGV[1], ARGV[2], 'LIMIT', 0, ARGV[3])
local rows = {}
for _, key in ipairs(keys) do
  local value = redis.call('GET', ARGV[4] .. key)
  if value then
    rows[#rows + 1] = key
    rows[#rows + 1] = value
  end
end
return {#keys, keys[#keys] or '', rows}
""")

CHECK = """#!lua flags=no-writes
-- ARGV: what the names of keys and channels begin with. Returns the commands that this user may not run.
local lacking = {}
for _, command in ipairs({
  {'GET', 'K'}, {'SET', 'K', ''}, {'DEL', 'K'}, {'INCRBY', 'K', '1'}, {'EXISTS', 'K'},
  {'HGET', 'K', ''}, {'HSET', 'K', '', ''}, {'HDEL', 'K', ''}, {'PEXPIRE', 'K', '1'}, {'TIME'}, {'PING'},
  {'PERSIST', 'K'}, {'PEXPIREAT', 'K', '1'}, {'PEXPIRETIME', 'K'},
  {'ZADD', 'K', '0', ''}, {'ZREM', 'K', ''}, {'ZRANGEBYLEX', 'K', '-', '+'}, {'ZRANGEBYSCORE', 'K', '0', '1'},
  {'XADD', 'K', '*', '', ''}, {'XRANGE', 'K', '-', '+'}, {'XREVRANGE', 'K', '+', '-'},
  {'EVALSHA', '', '1', 'K'}, {'SPUBLISH', 'K', ''}, {'SSUBSCRIBE', 'K'}, {'SUNSUBSCRIBE', 'K'},
}) do
  for i = 2, #command do
    command[i] = command[i] == 'K' and ARGV[1] or command[i]
  end
  if not redis.acl_check_cmd(unpack(command)) then
    lacking[#lacking + 1] = command[1]
  end
end
return lacking
"""


class RedisStore(Store):
    """Opens no connection before it is used. For one event loop at a time.

    A call that is cancelled may still be carried out. One whose connection is lost before its answer came raises a
    StoreError that says whether that is known. A subscription ends with a StoreError when its connection is lost.
    """

    def __init__(self, url: str, *, name: str = "") -> None:
        self.supports: frozenset[StoreFeature] = frozenset({"processes", "replicas", "scripts"})
        self.durable = False  # until `report` says that it is
        self.url = RedisUrl.parse(url)
        self._prefix = f"{FORMAT}{{{_escape(name)}:"
        self._process = os.getpid()
        self._topics = Topics()
        self._subscribers: Counter[bytes] = Counter()  # of each channel
        self._leaving: Counter[bytes] = Counter()  # channels, by requests under way
        self._listener: RedisConnection | None = None
        self._heartbeat: asyncio.Task[None] | None = None  # of the listener
        check = ("EVAL", CHECK, 0, self._prefix)
        self._nodes = RedisNodes(self.url, check, self._lacking, on_push=self._on_push, on_close=self._topics.close)
        self._wait: list[Command] = []
        if self.url.replicas:
            self._wait.append(("WAIT", self.url.replicas, round(REPLICA_SECONDS * 1000)))

    def __repr__(self) -> str:
        return f"<RedisStore {self.url}>"

    # Values

    async def get(self, key: str) -> bytes | None:
        name = self._name(key, "v")
        value: bytes | None = await self._call(name, "GET", name)
        return value

    async def delete(self, key: str) -> bool:
        return bool((await self._commit([Delete(key)]) or [0])[0])

    async def add(self, key: str, amount: int = 1, *, ttl: float | None = None) -> int:
        change = ("add", "", key, amount, _milliseconds(ttl), "")
        try:
            [total] = await self._run(COMMIT, [*self._indexes(tag_of(key)), self._name(key, "v")], change, self._wait)
        except StoreError as problem:
            if "NOCOUNTER" in str(problem):
                raise StoreError(f"{key}: what is kept there is not a counter") from None
            raise
        return int(total)

    async def scan(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[tuple[str, bytes]]:
        """As in `Store`. A prefix that does not say the tag of its keys takes a look at all names of the database."""
        tag = tag_of_prefix(prefix)
        if tag is not None:
            return await self._scan_tag(self._indexes(tag)[0], prefix, after, limit)
        glob = re.sub(r"([*?[\]\\])", r"\\\1", self._prefix)
        indexes = [name for each in await self._nodes.masters() async for name in self._names(each, f"{glob}*}}i")]
        rows = [await self._scan_tag(index, prefix, after, limit) for index in indexes]
        return [*heapq.merge(*rows)][: max(limit, 0)]

    async def _names(self, address: Address, pattern: str) -> AsyncIterator[bytes]:
        """Yield the names at one server that match."""
        cursor, names = b"0", set[bytes]()
        while True:
            [reply] = await self._nodes.call_at(address, ("SCAN", cursor, "MATCH", pattern, "COUNT", MAX_PAGE_ROWS))
            cursor, page = _checked(reply)
            for name in page:
                if name not in names:
                    names.add(name)
                    yield name
            if cursor == b"0":
                return

    async def _scan_tag(self, index: bytes, prefix: str, after: str, limit: int) -> list[tuple[str, bytes]]:
        rows: list[tuple[str, bytes]] = []
        first = b"(" + after.encode() if after >= prefix else b"[" + prefix.encode()
        last = b"(" + prefix.encode() + b"\xff"  # no key in UTF-8 has this byte
        while len(rows) < limit:
            page = min(limit - len(rows), MAX_PAGE_ROWS)
            count, end, pairs = await self._run(SCAN, [index], [first, last, page, index[:-1] + b"v:"])
            rows += zip((key.decode() for key in pairs[::2]), pairs[1::2], strict=True)
            if count < page:
                break
            first = b"(" + end
        return rows

    # Logs

    async def append(self, log: str, value: bytes, *, keep: int, ttl: float | None = None) -> int:
        number: int
        [number] = await self._commit([Append(log, value, keep, ttl)]) or [0]
        return number

    async def read(self, log: str, *, after: int = 0, limit: int = 1000) -> list[tuple[int, bytes]]:
        name = self._name(log, "l")
        entries = await self._call(name, "XRANGE", name, f"({max(after, 0)}-0", "+", "COUNT", max(limit, 0))
        return [(int(number.partition(b"-")[0]), fields[1]) for number, fields in entries or ()]

    # Topics

    async def publish(self, topic: str, message: bytes) -> None:
        channel = self._channel(topic)
        await self._call(channel, "SPUBLISH", channel, message)

    @asynccontextmanager
    async def subscribe(self, topic: str) -> AsyncIterator[AsyncIterator[bytes]]:
        channel = self._channel(topic)
        self._subscribers[channel] += 1
        connection = None
        try:
            connection = await self._listen(channel)
            with self._topics.subscribe(channel.decode()) as messages:
                if connection.close_reason:  # since its answer came
                    messages.close(connection.close_reason)
                yield messages
        finally:
            self._subscribers[channel] -= 1
            if not self._subscribers[channel]:
                del self._subscribers[channel]
                if connection is not None and not connection.close_reason:
                    self._leaving[channel] += 1
                    connection.request([("SUNSUBSCRIBE", channel)]).add_done_callback(_ignore)

    async def _listen(self, channel: bytes) -> RedisConnection:
        """Return the connection that listens, when the server has confirmed that it listens to `channel`, too."""
        self._check_process()
        reply: Any = None
        for _ in range(2):
            connection = await self._nodes.listener(channel)
            if connection is not self._listener:
                if self._heartbeat is not None:
                    self._heartbeat.cancel()
                self._listener = connection
                loop = asyncio.get_running_loop()
                self._heartbeat = loop.create_task(self._beat(connection, channel), context=Context())
            # Also where others listen to it: what comes before the answer was published before.
            [reply] = await connection.request([("SSUBSCRIBE", channel)])
            if not isinstance(reply, ResponseError):
                return connection
            if not isinstance(reply, MovedError):
                break
            self._nodes.follow(channel, reply)
        raise StoreError(f"redis: {describe_failure(reply)}")

    def _on_push(self, reply: Any) -> bool:
        match reply:
            case [b"smessage", channel, message]:
                self._topics.deliver(channel.decode(), message)
                return True
            case [b"sunsubscribe", channel, _]:
                if self._leaving[channel]:
                    self._leaving[channel] -= 1
                    return False
                self._nodes.stop_listening("the slot of the topics has moved")
                return True
        return False

    async def _beat(self, connection: RedisConnection, channel: bytes) -> None:
        with suppress(ConnectionLost):
            while not connection.close_reason:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                if self._subscribers:
                    self._nodes.follow(channel)
                    await connection.request([("PING",)])
                else:
                    connection.close("nothing is subscribed to")

    # Changes and scripts

    async def commit(self, changes: Sequence[Put | Delete | Append]) -> bool:
        """As in `Store`. The keys of all changes have one tag: those of one kind have."""
        return not changes or await self._commit(changes) is not None

    async def _commit(self, changes: Sequence[Put | Delete | Append]) -> list[int] | None:
        names: list[bytes] = []
        arguments: list[bytes | str | int] = []
        tags = set()
        for change in changes:
            if isinstance(change, Append):
                tags.add(tag_of(change.log))
                names.append(self._name(change.log, "l"))
                arguments += ("append", "", "", change.value, _milliseconds(change.ttl), change.keep)
                continue
            tags.add(tag_of(change.key))
            names.append(self._name(change.key, "v"))
            conditions = "equals" if change.if_equals is not None else ""
            equals = b"" if change.if_equals is None else change.if_equals
            if isinstance(change, Put):
                conditions += "absent" * change.if_absent
                arguments += ("put", conditions, change.key, change.value, _milliseconds(change.ttl), equals)
            else:
                arguments += ("delete", conditions, change.key, b"", "", equals)
        if len(tags) > 1:
            raise StoreError(
                f"commit: keys of different kinds are not kept together in Redis: {', '.join(sorted(tags))}"
            )
        results: list[int] | None = await self._run(COMMIT, [*self._indexes(tags.pop()), *names], arguments, self._wait)
        return results

    async def run_script(self, script: Script, keys: Sequence[str], args: Sequence[bytes | int]) -> Any:
        """Run a script in one round trip. Its keys have names of their own, and one tag: that of their kind.

        What it writes is for what may be lost, such as counts: it does not wait for replicas.
        """
        if len({tag_of(key) for key in keys}) != 1:
            raise StoreError(f"script: its keys are not kept together in Redis: {', '.join(keys)}")
        return await self._run(script, [self._name(key, "x") for key in keys], args)

    async def _run(
        self, script: Script, names: Sequence[bytes], args: Sequence[bytes | str | int], wait: Sequence[Command] = ()
    ) -> Any:
        self._check_process()
        rest = (len(names), *names, *args)
        try:
            replies = await self._nodes.call(names[0], [("EVALSHA", script.digest, *rest), *wait])
            if isinstance(replies[0], NoScriptError):
                replies = await self._nodes.call(names[0], [("EVAL", script.source, *rest), *wait])
        except ConnectionLost as lost:
            if lost.sent and script.writes:
                raise StoreError(f"{lost}; it is not known whether it was done") from lost
            raise
        result = _checked(replies[0])
        if wait and _checked(replies[1]) < self.url.replicas:
            text = f"it was done, but only {replies[1]} of {self.url.replicas} replicas had it in time"
            raise StoreError(f"redis {self.url}: {text}")
        return result

    async def _call(self, name: bytes, *command: bytes | str | int) -> Any:
        self._check_process()
        return _checked((await self._nodes.call(name, [command]))[0])

    # The engine

    @property
    def trouble(self) -> str:  # type: ignore[override]  # it is read only
        return self._nodes.trouble

    async def report(self) -> StoreReport:
        """As in `Store`; `durable` is what it says from then on."""
        self._check_process()
        losses: dict[str, None] = {}  # an ordered set: the masters of a cluster often say the same
        warnings: dict[str, None] = {}
        engine, round_trip = "", 0.0
        for address in await self._nodes.masters():
            commands = [("INFO",), *(("CONFIG", "GET", name) for name in SETTINGS)]
            info, *settings = await self._nodes.call_at(address, *commands)
            lines = [] if isinstance(info, ResponseError) else info.decode().splitlines()
            fields = dict(line.split(":", 1) for line in lines if ":" in line)
            if fields.get("role", "master") != "master":
                raise StoreError(f"redis {self.url}: it is a read-only replica; name its master, or the sentinels")
            started = time.perf_counter()
            await self._nodes.call_at(address, ("PING",))
            round_trip = max(round_trip, time.perf_counter() - started)
            is_valkey = "valkey_version" in fields
            version = fields.get("valkey_version" if is_valkey else "redis_version", "of an unknown version")
            engine = f"{'Valkey' if is_valkey else 'Redis'} {version}"
            values = dict(_setting(reply) for reply in settings)
            losses |= dict.fromkeys(self._losses(fields, values))
            if self.url.replicas and values.get("appendfsync", "always") != "always":
                text = f"appendfsync is {values['appendfsync']}: a master that restarts before a failover loses writes"
                warnings[f"{text}; set appendfsync always"] = None
        if not self.url.tls and (far := [host for host, _ in self.url.hosts if not _is_loopback(host)]):
            warnings[f"no TLS to {', '.join(far)}: values and the password can be read on the way; use rediss://"] = (
                None
            )
        self.durable = not losses
        return StoreReport(
            engine=engine,
            place=str(self.url),
            round_trip_ms=round_trip * 1000,
            losses=tuple(losses),
            warnings=tuple(warnings),
        )

    def _losses(self, info: dict[str, str], settings: dict[str, str]) -> Iterator[str]:
        """Yield what may lose a write that was answered."""
        unknown = [name for name in SETTINGS if name not in settings]
        if unknown or not info:
            yield f"this user cannot read {', '.join(unknown) or 'INFO'}, so it is not known; grant +config|get +info"
        if settings.get("appendonly") == "no":
            yield "appendonly is no, and a restart takes everything; set appendonly yes"
        elif settings.get("appendfsync", "always") != "always" and not self.url.replicas:
            yield f"appendfsync is {settings['appendfsync']}, and a crash takes the last writes; set appendfsync always"
        if settings.get("maxmemory-policy", "noeviction") != "noeviction":
            yield f"maxmemory-policy is {settings['maxmemory-policy']}, and evicts what is in use; set noeviction"
        has_replicas = self.url.kind == "sentinel" or int(info.get("connected_slaves", 0))
        if has_replicas and not self.url.replicas:
            yield "a failover takes writes that no replica has yet; add ?replicas=1 to the URL, and wait for one"

    async def close(self) -> None:
        """Close the connections. Listeners, and calls that have no answer yet, get a StoreError."""
        self._check_process()
        self._topics.close("the store was closed")
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.wait([self._heartbeat])
        await self._nodes.close()

    # Names

    def _name(self, key: str, form: str) -> bytes:
        return f"{self._prefix}{tag_of(key)}}}{form}:{key}".encode()

    def _indexes(self, tag: str) -> tuple[bytes, bytes]:
        return f"{self._prefix}{tag}}}i".encode(), f"{self._prefix}{tag}}}e".encode()

    def _channel(self, topic: str) -> bytes:
        return f"{self._prefix}topics}}{self.url.database}:{topic}".encode()

    def _lacking(self, reply: Any) -> str:
        if isinstance(reply, ResponseError):
            old = "compiling" in str(reply)
            return "it is older than Redis 7.0, or no Redis" if old else describe_failure(reply)
        names = ", ".join(name.decode() for name in reply)
        return names and f"this user may not run {names} on {FORMAT}*; see the ACL of the server"

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StoreError(f"this store was opened by process {self._process}; after a fork, open the URL anew")


def _setting(reply: Any) -> tuple[str, str]:
    """Return name and value of a setting; an empty name if this user may not read it, or the server has none."""
    if isinstance(reply, ResponseError) or not reply:
        return "", ""
    return reply[0].decode(), reply[1].decode()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tag_of(key: str) -> str:
    """Return what a key is kept under, together with all keys that have the same."""
    kind, colon, rest = key.partition(":")
    family = kind.partition("-")[0] if colon else ""
    if family in DIVIDED:
        return _escape(f"{DIVIDED[family]}:{rest.partition(':')[0]}")
    return _escape(FAMILIES.get(family, family))


def tag_of_prefix(prefix: str) -> str | None:
    """Return the tag of all keys that begin with `prefix`, None if they may have several."""
    kind, *parts = prefix.split(":")
    return tag_of(prefix) if len(parts) > (kind.partition("-")[0] in DIVIDED) else None


def _escape(text: str) -> str:
    """Return the text without what would end the part of a name that decides the slot."""
    return text.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")


def _milliseconds(ttl: float | None) -> int | str:
    return "" if ttl is None else min(math.ceil(ttl * 1000), MAX_TTL_MILLISECONDS)


def _checked(reply: Any) -> Any:
    if isinstance(reply, ResponseError):
        raise StoreError(f"redis: {describe_failure(reply)}")
    return reply


def _ignore(done: asyncio.Future[Any]) -> None:
    """Retrieve a failure, which is of interest to no caller."""
    if not done.cancelled():
        done.exception()
