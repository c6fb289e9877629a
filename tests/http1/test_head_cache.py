"""A head that was read before is not read again: whatever comes, nobody can tell."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, assume, example, given, settings, strategies as st

from handrail.protocol.http_rules import Headers
from handrail.transports.http1 import server as acceptor
from handrail.transports.http1.connection import CachedHead, Http1Connection
from handrail.transports.http1.request import RequestResponseCycle
from servers_http import until
from servers_listen import listening

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Pairs = list[tuple[bytes, bytes]]

ASGI = {"version": "3.0", "spec_version": "2.3"}


class Seen(NamedTuple):
    """A request as the application got it."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    version: str
    headers: Pairs
    state: dict[str, Any]
    body: bytes


class Plain:
    """An application that writes down what it gets, and then spoils it."""

    is_parsed = False  # every request is, also one whose head was seen before

    def __init__(self) -> None:
        self.connections: list[Watched] = []
        self.seen: list[Seen] = []
        self.repeated = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        body, more = b"", True
        if scope["path"] == "/slow":
            for _ in range(3):
                await asyncio.sleep(0)
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        self.note(scope, scope["headers"], body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    def note(self, scope: Message, headers: Pairs, body: bytes) -> None:
        method, path, raw_path, query = scope["method"], scope["path"], scope["raw_path"], scope["query_string"]
        state = dict(scope.get("state", {}))
        self.seen.append(Seen(method, path, raw_path, query, scope["http_version"], list(headers), state, body))
        assert scope["asgi"] == ASGI
        headers.append((b"x-mine", b"leaked"))
        scope.get("state", {})["mine"] = "leaked"
        scope["asgi"]["mine"] = "leaked"
        for name in ("method", "path", "raw_path", "query_string", "http_version", "scheme", "root_path"):
            scope[name] = "leaked"

    async def _live(self, scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        scope["state"]["given"] = 1
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def stop(self) -> None:
        pass


class Parsed(Plain):
    is_parsed = True


class AtOnce(Plain):
    """As our own endpoint: what came whole is answered without a task."""

    def at_once(self, cycle: RequestResponseCycle, headers: Headers) -> bool:
        scope = cycle.scope
        if scope["path"] == "/slow":
            return False
        if scope["path"] == "/work":
            scope.update(headers=list(headers.items()), state={"given": 1}, asgi=ASGI.copy())
            cycle.start(self(scope, cycle.receive, cycle.send))
            return True
        scope.update(state={"given": 1}, asgi=ASGI.copy())
        self.note(scope, list(headers.items()), bytes(cycle.body))
        cycle.respond(200, [], b"")
        return True


class Watched(Http1Connection):
    """A connection that tells how far it is."""

    sent = 0  # by the test
    got = 0
    is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._app.connections.append(self)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.got += len(data)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        super().connection_lost(exc)

    def _cache_head(self, data: bytes) -> None:
        if not self._app.is_parsed:
            super()._cache_head(data)

    def _serve_cached(self, head: CachedHead, digits: bytes, body: bytes) -> None:
        self._app.repeated += 1
        super()._serve_cached(head, digits, body)

    def rests(self) -> bool:
        """Whether there is nothing left to do for it."""
        over = self.is_lost or self.transport.is_closing() or self._refusal is not None
        return (over or self.got == self.sent) and not self._buffered and not self._is_busy()


class Outcome(NamedTuple):
    statuses: list[int]
    seen: list[Seen]
    repeated: int


class Rig:
    """The same listener three times."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._run = runner.run
        self._stack = AsyncExitStack()
        self._ports: dict[Plain, int] = {}
        self.plain, self.parsed, self.at_once = Plain(), Parsed(), AtOnce()
        for app in (self.plain, self.parsed, self.at_once):
            self._run(self._open(app))

    async def _open(self, app: Plain) -> None:
        serving = listening(app, grace=0.1, max_headers=20, max_header_bytes=4096)
        self._ports[app] = int((await self._stack.enter_async_context(serving)).rsplit(":", 1)[1])

    def close(self) -> None:
        self._run(self._stack.aclose())

    def sent(self, app: Plain, pieces: list[bytes]) -> Outcome:
        """What comes of these bytes on one connection, each piece read before the next is sent."""
        return self._run(self._send(app, pieces))

    async def _send(self, app: Plain, pieces: list[bytes]) -> Outcome:
        app.seen, app.repeated, app.connections = [], 0, []
        reader, writer = await asyncio.open_connection("127.0.0.1", self._ports[app])
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await until(lambda: bool(app.connections))
        (connection,) = app.connections
        # Who sends more to what is about to close may lose the answer.
        has_last = any(map(ends, pieces))
        for piece in pieces:
            if connection.is_lost or connection.transport.is_closing():
                break
            connection.sent += len(piece)
            writer.write(piece)
            await until(lambda: connection.rests() or (connection.got == connection.sent and not has_last))
        for _ in range(3):
            await until(connection.rests)
            await asyncio.sleep(0)  # what is answered goes on at the next turn of the loop
        writer.write_eof()
        answers = await reader.read()
        writer.close()
        await until(lambda: connection.is_lost)
        return Outcome(statuses_in(answers), app.seen, app.repeated)


def ends(request: bytes) -> bool:
    return b"HTTP/1.0" in request or b"Connection: close" in request


def statuses_in(answers: bytes) -> list[int]:
    """The statuses of all answers; who answers at once need not promise a continuation first."""
    statuses = []
    while answers:
        head, _, rest = answers.partition(b"\r\n\r\n")
        found = re.search(rb"content-length: ([0-9]+)", head)
        statuses.append(int(head.split(b" ", 2)[1]))
        answers = rest[int(found[1]) if found else 0 :]
    return [status for status in statuses if status != 100]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setattr(acceptor, "Http1Connection", Watched)

        async def made() -> None: ...

        runner.run(made())
        rig = Rig(runner)
        yield rig
        rig.close()


# What is sent


class Head(NamedTuple):
    line: bytes
    before: bytes
    length: bytes  # %d stands for it, once or twice
    after: bytes

    def around(self, body: bytes, claimed: int | None = None) -> bytes:
        number = b"%d" % (len(body) if claimed is None else claimed)
        return b"%b\r\nHost: a\r\n%b%b%b\r\n%b" % (
            self.line,
            self.before,
            self.length.replace(b"%d", number),
            self.after,
            body,
        )


POST = b"POST /a?x=%20y HTTP/1.1"
LONG = b"y" * 70_000
LENGTH = b"Content-Length: %d\r\n"
SIMPLE = Head(POST, b"Accept: b\r\n", LENGTH, b"X: y\r\n")

good_lengths = st.sampled_from(
    [
        *[LENGTH] * 8,
        b"content-length: %d\r\n",
        b"CONTENT-LENGTH: %d\r\n",
        b"Content-Length:%d\r\n",
        b"Content-Length:  %d\r\n",
        b"Content-Length: %d \r\n",
        b"Content-Length: %d\t\r\n",
        b"Content-Length: 0%d\r\n",
        b"Content-Length: 00000000%d\r\n",
        b"Content-Length: 000000000%d\r\n",
        b"Content-Length: 0000000000000%d\r\n",
        b"X-Content-Length: 3\r\nContent-Length: %d\r\n",
        b"Content-Length: %d\r\nConnection: keep-alive\r\n",
        b"Content-Length: %d\r\nExpect: something\r\n",
        b"Content-Length: %d\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n",
    ]
)
bad_lengths = st.sampled_from(
    [
        b"Content-Length: +%d\r\n",
        b"Content-Length: -%d\r\n",
        b"Content-Length: %d,%d\r\n",
        b"Content-Length: %d %d\r\n",
        b"Content-Length: 0x%d\r\n",
        b"Content-Length: %d_0\r\n",
        b"Content-Length: \xc2\xb2%d\r\n",
        b"Content-Length : %d\r\n",
        b"Content-Length: %d\r\nContent-Length: %d\r\n",
        b"Content-Length: %d\r\ncontent-length: 5\r\n",
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n",
        b"Content-Length: \r\n %d\r\n",
        b"Content-Length: %d\r\n 1\r\n",
        b"Content-Length: %d\n",
        b"Content-Length: %d\r",
        b"Content-Length: \r\n",
        b"Content-Length: 99999999999999999999%d\r\n",
        b"Content-Length: %d\r\nHost: b\r\n",
        b"Content-Length: %d\r\nConnection: close\r\n",
        b"",
    ]
)
lines = st.sampled_from(
    [
        *[POST] * 5,
        b"POST /b HTTP/1.1",
        b"POST /slow HTTP/1.1",
        b"POST /work HTTP/1.1",
        b"PUT /a HTTP/1.1",
        b"GET /a HTTP/1.1",
        b"HEAD /a HTTP/1.1",
        b"POST http://b/a HTTP/1.1",
    ]
)
odd_lines = st.sampled_from([b"POST /a HTTP/1.0", b"POST  /a HTTP/1.1", b"POST /\xe9 HTTP/1.1", b"post /a HTTP/1.1"])
fields = st.sampled_from([b"", b"", b"X: y\r\n", b"x: y\r\n", b"X: z\r\n", b"X: y\r\nX: y\r\n", b"X:\r\n", b"Y: 5\r\n"])
good_heads = st.builds(Head, lines, fields, good_lengths, fields)
heads = st.builds(Head, lines | lines | lines | odd_lines, fields, good_lengths | bad_lengths, fields)
bodies = st.binary(max_size=12) | st.sampled_from(
    [b"", b"5", b"\r\n\r\n", SIMPLE.around(b"x"), b"GET / HTTP/1.1\r\nHost: evil\r\n\r\n", b"x" * 1000, LONG]
)
chunked = st.builds(
    lambda head, body: (
        head._replace(length=b"Transfer-Encoding: chunked\r\n").around(b"")
        + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"")
        + b"0\r\n\r\n"
    ),
    good_heads,
    bodies,
)


@st.composite
def sequences(draw: st.DrawFn, kinds: st.SearchStrategy[Head], off: bool) -> list[bytes]:
    """Requests with few heads and many bodies."""
    known = draw(st.lists(kinds, min_size=1, max_size=3))
    made = []
    for _ in range(draw(st.integers(1, 7))):
        choice = draw(st.integers(0, 11))
        if choice == 0:
            made.append(draw(chunked))
        elif choice == 1 and off:
            whole = bytearray(draw(st.sampled_from(known)).around(draw(bodies)))
            whole[draw(st.integers(0, len(whole) - 1))] = draw(st.integers(0, 255))
            made.append(bytes(whole))
        else:
            body = draw(bodies)
            claimed = max(0, len(body) + draw(st.sampled_from([0] * 10 + [1, -1, 5, 100]))) if off else None
            made.append(draw(st.sampled_from(known)).around(body, claimed))
    return made


class Sent(NamedTuple):
    """The same bytes twice: request by request, and cut in other ways."""

    whole: list[bytes]
    pieces: list[bytes]

    def __repr__(self) -> str:
        return re.sub("y{100,}", "y…", f"Sent({self.whole}, {self.pieces})")


def cut(draw: st.DrawFn, requests: list[bytes]) -> list[bytes]:
    """The same bytes, in a packet for each request or in others."""
    if draw(st.booleans()):
        return requests
    whole = b"".join(requests)
    ends = {sum(map(len, requests[:number])) for number in range(1, len(requests))}
    cuts = draw(st.sets(st.integers(0, len(whole)), max_size=6))
    edges = sorted({0, len(whole)} | cuts | set(draw(st.lists(st.sampled_from(sorted(ends or {0}))))))
    return [whole[a:b] for a, b in pairwise(edges)]


@st.composite
def cut_sequences(draw: st.DrawFn) -> Sent:
    requests = draw(sequences(heads | good_heads, off=True))
    return Sent(requests, cut(draw, requests))


slowly = settings(max_examples=250, suppress_health_check=list(HealthCheck))


@slowly
@given(sent=cut_sequences())
@example(sent=Sent([SIMPLE.around(b"x")] * 3, [SIMPLE.around(b"x")] * 3))
def test_cached_head_reads_as_the_parser_reads_it(rig: Rig, sent: Sent) -> None:
    assume(len(b"".join(sent.whole)) < 60_000 or not any(map(ends, sent.whole)))  # else it may be reset
    expected = rig.sent(rig.parsed, [b"".join(sent.whole)])
    for data in sent:
        assert rig.sent(rig.parsed, data)[:2] == expected[:2]
        for app in (rig.plain, rig.at_once):
            assert rig.sent(app, data)[:2] == expected[:2]


@slowly
@given(sent=sequences(good_heads | heads, off=False).map(lambda made: Sent(made, [])))
def test_each_request_is_read_as_if_it_were_the_first(rig: Rig, sent: Sent) -> None:
    statuses: list[int] = []
    seen: list[Seen] = []
    for request in sent.whole:
        alone = rig.sent(rig.parsed, [request])
        statuses += alone.statuses
        seen += alone.seen
        if not alone.statuses or set(alone.statuses) != {200} or ends(request):
            break
    for app in (rig.plain, rig.at_once):
        assert rig.sent(app, sent.whole)[:2] == (statuses, seen)


# What must not be mistaken


def served(rig: Rig, *pieces: bytes) -> tuple[list[int], list[bytes], int]:
    """Statuses, bodies, and how many of the requests were recognised; the same for both kinds of application."""
    found = rig.sent(rig.plain, list(pieces))
    expected = rig.sent(rig.parsed, list(pieces))
    assert found[:2] == expected[:2]
    assert rig.sent(rig.at_once, list(pieces)) == found
    return found.statuses, [each.body for each in found.seen], found.repeated


def test_same_head_with_other_lengths_is_cached(rig: Rig) -> None:
    sent = [b"x" * size for size in (5, 0, 1, 12, 9_999, 5, 0)]
    assert served(rig, *map(SIMPLE.around, sent)) == ([200] * 7, sent, 6)


@pytest.mark.parametrize("at", [1, 30, -6, -5, -1])
def test_a_request_in_two_packets_is_parsed(rig: Rig, at: int) -> None:
    known, late = SIMPLE.around(b"known"), SIMPLE.around(b"later")
    assert served(rig, known, late[:at], late[at:], known) == ([200] * 3, [b"known", b"later", b"known"], 1)


def test_two_requests_in_a_packet_are_parsed(rig: Rig) -> None:
    known, both = SIMPLE.around(b"known"), SIMPLE.around(b"a") + SIMPLE.around(b"bc")
    assert served(rig, known, both, known) == ([200] * 4, [b"known", b"a", b"bc", b"known"], 1)


def test_head_is_cached_only_from_a_request_alone_in_a_packet(rig: Rig) -> None:
    request = SIMPLE.around(b"x")
    assert served(rig, request * 2, request, request)[2] == 1
    assert served(rig, b"\r\n" + request, request, request)[2] == 1


def test_every_byte_of_a_head_counts(rig: Rig) -> None:
    known = SIMPLE.around(b"body")
    for at in range(len(known) - 4):
        other = bytearray(known)
        other[at] ^= 0x20 if chr(known[at]).isalpha() else 0x01
        statuses, _, repeated = served(rig, known, bytes(other))
        assert statuses[0] == 200
        is_length = other[:at].endswith(b"Content-Length: ")
        assert repeated == 0 or is_length
        if is_length:
            assert (statuses, repeated) == ([200, 200] if other[at] < known[at] else [200], 0)


@pytest.mark.parametrize(
    "digits",
    [
        *(b"5\r\nX: y", b"5 ", b" 5", b"\t5", b"+5", b"-5", b"5,5", b"5, 5", b"5\n", b"5\r", b"5\0", b"0x5", b""),
        *(b"5\r\nContent-Length: 5", b"5\r\nTransfer-Encoding: chunked", b"5\r\n 5", b"5e0", b"0005\x0b", b"5_0"),
        *(b"\xd9\xa5", b"\xb2", b"0000000005", b"000000005", b"05", b"99999999999999999999", b"4294967301"),
    ],
)
def test_only_digits_match_as_a_length(rig: Rig, digits: bytes) -> None:
    known = SIMPLE.around(b"known")
    other = known.replace(b": 5\r\n", b": %b\r\n" % digits).replace(b"known", b"other")
    _, bodies, repeated = served(rig, known, other)
    assert repeated == (digits in (b"000000005", b"05"))
    assert bodies == [b"known"] or bodies == [b"known", b"other"] or digits == b""


@pytest.mark.parametrize("more", [b"z", b"\r\n", SIMPLE.around(b"hid"), b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n"])
def test_bytes_behind_a_body_are_not_part_of_it(rig: Rig, more: bytes) -> None:
    known = SIMPLE.around(b"known")
    _, bodies, repeated = served(rig, known, SIMPLE.around(b"other") + more)
    assert repeated == 0
    assert bodies[:2] == [b"known", b"other"]


def test_short_body_is_waited_for(rig: Rig) -> None:
    known = SIMPLE.around(b"known")
    assert served(rig, known, SIMPLE.around(b"sho", 5)) == ([200], [b"known"], 0)
    assert served(rig, known, SIMPLE.around(b"sho", 5), b"rt", known)[1:] == ([b"known", b"short", b"known"], 1)


@pytest.mark.parametrize("form", [b"Content-Length:%d", b"Content-Length: %d ", b"Content-Length: 0000000000%d"])
def test_lengths_in_other_forms_are_parsed_each_time(rig: Rig, form: bytes) -> None:
    length = form + b"\r\n"
    assert served(rig, *[SIMPLE._replace(length=length).around(b"x")] * 3) == ([200] * 3, [b"x"] * 3, 0)


@pytest.mark.parametrize("field", [b"Expect: 100-continue\r\n", b"Expect: x\r\n", b"X: a\r\nX: b\r\n"])
def test_head_with_expect_or_a_repeated_field_is_not_cached(rig: Rig, field: bytes) -> None:
    assert served(rig, *[SIMPLE._replace(before=field).around(b"x")] * 3)[2] == 0


@pytest.mark.parametrize("line", [b"GET /a HTTP/1.1", b"PUT /a HTTP/1.1", b"HEAD /a HTTP/1.1", b"POST /a HTTP/1.0"])
def test_head_of_another_method_or_version_is_not_cached(rig: Rig, line: bytes) -> None:
    assert served(rig, *[SIMPLE._replace(line=line).around(b"x")] * 3)[2] == 0


def test_the_last_request_of_a_connection_is_the_last(rig: Rig) -> None:
    known, last = SIMPLE.around(b"x"), SIMPLE._replace(before=b"Connection: close\r\n").around(b"last")
    assert served(rig, known, known, last, known) == ([200] * 3, [b"x", b"x", b"last"], 1)
    assert served(rig, known, known, last + known) == ([200] * 3, [b"x", b"x", b"last"], 1)


def test_two_heads_are_cached_and_only_the_first_sixteen(rig: Rig) -> None:
    several = [SIMPLE._replace(before=b"Number: %d\r\n" % number).around(b"x") for number in range(6)]
    assert served(rig, *several[:2], *several[:2])[2] == 2
    assert served(rig, *several, *several)[2] == 0
    assert served(rig, *several * 3, *several[-1:] * 2)[2] <= 2
    (connection,) = rig.plain.connections
    assert len(connection._heads) == 2


def test_length_with_leading_zeros_is_read(rig: Rig) -> None:
    body = b"x" * 100_000
    request = SIMPLE.around(body).replace(b": 100000\r\n", b": 000000000100000\r\n")
    assert b"000000000100000" in request
    assert served(rig, request[:-90_000], request[-90_000:]) == ([200], [body], 0)


def test_long_head_is_not_cached(rig: Rig) -> None:
    """Idle connections of strangers are not to cost much (P-30)."""
    long = SIMPLE._replace(before=b"Long: %b\r\n" % (b"x" * 2048)).around(b"x")
    assert served(rig, long, long) == ([200] * 2, [b"x"] * 2, 0)


def test_application_that_changes_its_scope_does_not_change_the_cache(rig: Rig) -> None:
    for app in (rig.plain, rig.at_once):
        found = rig.sent(app, [SIMPLE.around(b"x")] * 4)
        assert found.repeated == 3
        assert len({(each.method, each.path, each.query, each.version, str(each.headers)) for each in found.seen}) == 1
        assert found.seen[-1].headers[-1] == (b"x", b"y")
        assert found.seen[-1].state == {"given": 1}
        assert found.seen[-1].path == "/a"
