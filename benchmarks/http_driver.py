"""A server on a port: requests out on kept connections, answers counted, time and CPU taken.

The driver has to be much cheaper than any server. One loop waits for all connections, requests are encoded beforehand,
and of an answer no more is read than where it ends; what is in it is looked at when the clock has stopped.

Driver and server have a core each wherever there are two, whatever the number of connections: what the driver does for
many of them is then not taken from the server.

Every connection belongs to a client of its own, with a session of its own where there are sessions. Connections are
made for each round, and have had one answer before it begins: servers close those that were idle for some seconds.
"""

from __future__ import annotations

import re
import select
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from benchmarks.process import HANG_S, KEEP_MEMORY, KEPT_BYTES, READ_BYTES, Process, Round, deadline
from benchmarks.scenarios import CLIENT, ENVELOPE, REVISIONS, Answer, Scenario, Wire

__all__ = ["HttpServer"]

CHUNKED = -1
LAST_CHUNK = b"\r\n0\r\n\r\n"


class HttpServer(Process):
    """A spawned server that listens. It is given the port as its last argument."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._port = _free_port()
        super().__init__([*argv, str(self._port)], subprocess.DEVNULL, **KEEP_MEMORY)
        self._sessions: list[str] = []
        self.url = f"http://127.0.0.1:{self._port}/mcp"
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def ask(self, wire: Wire, method: str, params: dict[str, Any]) -> bytes:
        """One request of any method, with the id 0; the bytes of the answer."""
        with deadline(), self._connected(wire, method, params, 1) as (connection,):
            return _body(connection.ask(_tail(wire, 0, method, params)))

    def play(self, scenario: Scenario, calls: int) -> tuple[Round, list[Answer]]:
        """Every connection sends its next request when it has its answer: so many are always unanswered."""
        wire, method, window = scenario.wire, scenario.method, scenario.window
        tails = [_tail(wire, id, method, scenario.params(id)) for id in self._next_ids(window + calls)]
        with deadline(), self._connected(wire, method, scenario.params(0), window) as connections:
            _exchange(connections, tails[:window])
            cpu, begun = self.cpu_ns(), time.perf_counter_ns()
            latencies, answers = _exchange(connections, tails[window:])
            wall, cpu = time.perf_counter_ns() - begun, self.cpu_ns() - cpu
        return Round(calls, cpu, wall, latencies), [msgspec.json.decode(_body(answer)) for answer in answers]

    @contextmanager
    def _connected(self, wire: Wire, method: str, params: dict[str, Any], count: int) -> Iterator[list[Connection]]:
        while wire == "session" and len(self._sessions) < count:
            self._sessions.append(self._new_session())
        own = {"MCP-Protocol-Version": REVISIONS[wire]}
        if wire == "stateless":
            own["Mcp-Method"] = method
            if "name" in params:
                own["Mcp-Name"] = params["name"]
        connections: list[Connection] = []
        try:
            for number in range(count):
                if wire == "session":
                    own["Mcp-Session-Id"] = self._sessions[number]
                connections.append(Connection(self._port, own))
            yield connections
        except OSError as problem:
            raise self._ended() from problem
        finally:
            for connection in connections:
                connection.close()

    def _new_session(self) -> str:
        revision = REVISIONS["session"]
        hello = {"protocolVersion": revision, "capabilities": {}, "clientInfo": CLIENT}
        connection = Connection(self._port, {})
        answer = connection.ask(_tail("session", 0, "initialize", hello))
        assert msgspec.json.decode(_body(answer))["result"]["protocolVersion"] == revision, answer
        named = re.search(rb"\r\nmcp-session-id: *([!-~]+)\r\n", answer, re.IGNORECASE)
        assert named, answer
        session = named[1].decode()
        connection.close()
        connection = Connection(self._port, {"MCP-Protocol-Version": revision, "Mcp-Session-Id": session})
        answer = connection.ask(_tail("session", None, "notifications/initialized", {}))
        assert answer.startswith(b"HTTP/1.1 202"), answer
        connection.close()
        return session

    def _wait(self) -> None:
        end = time.monotonic() + HANG_S
        while True:
            try:
                Connection(self._port, {}).close()
                return
            except ConnectionRefusedError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise self._ended() from None
                time.sleep(0.01)


class Connection:
    """One kept connection, with at most one request on it. Its requests have the same head but for the length."""

    def __init__(self, port: int, fields: dict[str, str]) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.fileno = self._socket.fileno
        self.close = self._socket.close
        fields = {
            "Host": f"127.0.0.1:{port}",
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            **fields,
        }
        lines = [f"{name}: {value}\r\n" for name, value in fields.items()]
        self._head = ("POST /mcp HTTP/1.1\r\n" + "".join(lines) + "Content-Length: ").encode()
        self._pieces: list[bytes] = []
        self._size = 0
        self._end: int | None = None  # where the answer ends, or CHUNKED; None until its head is here
        self._last = b""

    def ask(self, tail: bytes) -> bytes:
        self.send(tail)
        while not self.receive():
            pass
        return self.take()

    def send(self, tail: bytes) -> None:
        self.sent_ns = time.perf_counter_ns()
        self._socket.sendall(self._head + tail)

    def receive(self) -> bool:
        """Read once; whether the answer is whole now."""
        piece = self._socket.recv(READ_BYTES)
        if not piece:
            raise ConnectionError("closed before the answer was whole")
        self._pieces.append(piece)
        self._size += len(piece)
        if self._end is None:
            self._end = _end(piece if len(self._pieces) == 1 else b"".join(self._pieces))
            if self._end is None:
                return False
        if self._end == CHUNKED:
            self._last = (self._last + piece)[-len(LAST_CHUNK) :]
            return self._last == LAST_CHUNK
        return self._size >= self._end

    def take(self) -> bytes:
        answer = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._size, self._end, self._last = [], 0, None, b""
        return answer


def _exchange(connections: Sequence[Connection], tails: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
    """Send all these requests, one at a time on each connection; how long each took, and the first answers."""
    waiting = {connection.fileno(): connection for connection in connections}
    latencies: list[int] = []
    answers: list[bytes] = []
    kept = 0
    clock = time.perf_counter_ns
    unsent = iter(tails)
    with select.epoll() as poll:
        for descriptor in waiting:
            poll.register(descriptor, select.EPOLLIN)
        for connection, tail in zip(connections, unsent, strict=False):
            connection.send(tail)
        while len(latencies) < len(tails):
            for descriptor, _ in poll.poll():
                connection = waiting[descriptor]
                if connection.receive():
                    latencies.append(clock() - connection.sent_ns)
                    answer = connection.take()
                    if kept < KEPT_BYTES:
                        answers.append(answer)
                        kept += len(answer)
                    if tail := next(unsent, b""):
                        connection.send(tail)
    return latencies, answers


def _tail(wire: Wire, id: int | None, method: str, params: dict[str, Any]) -> bytes:
    """A request from behind `Content-Length: `."""
    known = {} if id is None else {"id": id}
    envelope = {"_meta": ENVELOPE} if wire == "stateless" else {}
    body = msgspec.json.encode({"jsonrpc": "2.0", **known, "method": method, "params": {**params, **envelope}})
    return b"%d\r\n\r\n%b" % (len(body), body)


def _end(data: bytes) -> int | None:
    """How long the answer is that begins like this, or CHUNKED; None if its head is not whole."""
    head = data.find(b"\r\n\r\n")
    if head < 0:
        return None
    fields = data[:head].lower()
    at = fields.find(b"\r\ncontent-length:")
    if at >= 0:
        return head + 4 + int(fields[at + 17 :].partition(b"\r\n")[0])
    return CHUNKED if b"\r\ntransfer-encoding: chunked" in fields else head + 4


def _body(answer: bytes) -> bytes:
    """The message in an answer that has to be a good one: a body, or the last event of a stream."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise AssertionError(answer[:1000].decode(errors="replace"))
    fields = head.lower()
    if b"\r\ntransfer-encoding: chunked" in fields:
        chunks = []
        while body:
            size, _, rest = body.partition(b"\r\n")
            length = int(size, 16)
            chunks.append(rest[:length])
            body = rest[length + 2 :]
        body = b"".join(chunks)
    if b"\r\ncontent-type: text/event-stream" in fields:
        body = [line for line in body.splitlines() if line.startswith(b"data:")][-1].removeprefix(b"data:")
    return body


def _free_port() -> int:
    """A port nobody listens on. Not every server says which one it got; all can be told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
