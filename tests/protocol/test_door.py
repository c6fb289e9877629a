"""Who may come in over HTTP: Host, Origin and what web pages may read (SRV-201, P-22). A counter says what ran."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from handrail import Server
from handrail.audit.format import verify
from handrail.audit.reader import TrailFile
from handrail.engine.rejections import RejectionLog
from handrail.guards.identity import ApiKeys
from patience import PATIENCE
from requirements import requirement
from servers_http import OPEN, Client, Desk, fetch, served
from wires_http import Reply

pytestmark = pytest.mark.asyncio(loop_scope="module")

Ran = Callable[[str, str], None]
Lines = list[tuple[str, str]]
Object = dict[str, Any]

R4, R5 = "2025-11-25", "2026-07-28"
ALL = ("2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "pocket", R5)
EVIL = "http://evil.example"


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for reply in OPEN:
        reply.close()
    OPEN.clear()


LISTENERS = ["handrail", "uvicorn"]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LISTENERS)
async def desk(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    """A server that was told nothing of its names."""
    made = Desk()
    made.endpoint = made.server.asgi()
    async with served(made.endpoint, request.param) as made.url:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def listed() -> AsyncIterator[Desk]:
    """A server with names of its own and pages that may talk to it."""
    made = Desk()
    made.endpoint = made.server.asgi(
        hosts=["tools.example", "api.example:8443"], origins=["https://app.example", "http://localhost:3000"]
    )
    async with served(made.endpoint) as made.url:
        yield made


async def knock(desk: Desk, lines: Lines, verb: str = "POST", path: str = "/mcp") -> Reply:
    """A call that would run, with these headers in place of its own of the same name."""
    client = Client(desk.url, R5)
    call = client.call(1, "echo", {"text": "in"})
    said = {name.lower() for name, _ in lines}
    pairs = [(name, value) for name, value in client.headers(call).items() if name.lower() not in said]
    port = str(urlsplit(desk.url).port)
    # As bytes on the wire, whatever script it is written in.
    pairs += [(name, value.replace("{port}", port).encode().decode("latin-1")) for name, value in lines]
    body = json.dumps(call).encode() if verb == "POST" else None
    return await fetch(desk.url.removesuffix("/mcp") + path, verb, pairs, body)


def cors(reply: Reply) -> list[str]:
    return sorted(name for name in reply.headers if name.startswith("access-control-"))


async def refused(desk: Desk, lines: Lines, statuses: tuple[int, ...] = (403,), **how: str) -> None:
    before = desk.ran["echo"]
    reply = await knock(desk, lines, **how)
    assert reply.status in statuses, (reply.status, await reply.body())
    assert not cors(reply)
    assert desk.ran["echo"] == before


async def let_in(desk: Desk, lines: Lines) -> Reply:
    before = desk.ran["echo"]
    reply = await knock(desk, lines)
    assert reply.status == 200, await reply.body()
    assert json.loads(await reply.body())["result"]["content"][0]["text"] == "in"
    assert desk.ran["echo"] == before + 1
    return reply


# Host

OURS = [
    "127.0.0.1:{port}",
    "127.0.0.1",
    "127.8.9.1:{port}",
    "localhost:{port}",
    "localhost",
    "LocalHost:{port}",
    "[::1]:{port}",
    "[::1]",
]
NOT_OURS = [
    "evil.example",
    "evil.example:{port}",
    "localhost.evil.example",
    "localhost.evil.example:{port}",
    "evil.example.localhost",
    "127.0.0.1.evil.example",
    "127.0.0.1.nip.io:{port}",
    "notlocalhost",
    "localhost-evil",
    "localhost.",
    "127.0.0.1.",
    ".localhost",
    "localhost@evil.example",
    "evil.example@localhost",
    "user:word@localhost:{port}",
    "localhost:{port}@evil.example",
    "localhost:{port}:80",
    "localhost:port",
    "localhost:-1",
    "localhost:123456",
    "localhost, evil.example",
    "evil.example, localhost",
    "localhost,localhost",
    "localhost evil.example",
    "localhost/evil.example",
    "localhost?evil.example",
    "localhost#evil.example",
    "localhost\\evil.example",
    "localhost%2eevil.example",
    "%6cocalhost",
    "http://localhost:{port}",
    "//localhost",
    "[::1",
    "::1",
    "[::1].evil.example",
    "[::2]:{port}",
    "[::1%25lo]",
    "0.0.0.0:{port}",
    "127.1:{port}",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
    "10.0.0.1",
    "169.254.169.254",
    "192.168.127.1",
    "lоcalhost",  # with a Cyrillic letter
    "localhost。",
    "①②⑦.0.0.1",
    "*",
    "",
]


@requirement("P-22")
@pytest.mark.parametrize("host", OURS)
async def test_the_names_of_the_local_machine_are_ours(desk: Desk, ran: Ran, host: str) -> None:
    ran(R5, "http")
    assert not cors(await let_in(desk, [("Host", host)]))


@requirement("P-22")
@pytest.mark.parametrize("host", NOT_OURS)
async def test_p22_no_other_name_is_ours(desk: Desk, ran: Ran, host: str) -> None:
    ran(R5, "http")
    await refused(desk, [("Host", host)])
    # Neither if the page came from there: a name can be made to point here.
    if host and host.isascii() and " " not in host:
        await refused(desk, [("Host", host), ("Origin", f"http://{host}")])


@requirement("P-22")
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_request_without_a_host_is_refused(desk: Desk, ran: Ran, version: str) -> None:
    ran(R5, "http")
    before = desk.ran["echo"]
    client = Client(desk.url, R5)
    call = client.call(1, "echo", {"text": "in"})
    body = json.dumps(call).encode()
    lines = {**client.headers(call), "Content-Length": str(len(body)), "Connection": "close"}
    head = f"POST /mcp HTTP/{version}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(desk.url).port)
    reply = Reply(reader, writer)
    OPEN.append(reply)
    writer.write(head.encode() + b"\r\n" + body)
    await reply.read_head()
    assert reply.status in (400, 403)
    assert desk.ran["echo"] == before


# Origin

SAME = [
    ("127.0.0.1:{port}", "http://127.0.0.1:{port}"),
    ("localhost:{port}", "http://localhost:{port}"),
    ("LOCALHOST:{port}", "http://localhost:{port}"),
    ("localhost:{port}", "HTTP://LOCALHOST:{port}"),
    ("[::1]:{port}", "http://[::1]:{port}"),
    ("localhost", "http://localhost"),
    ("localhost", "http://localhost:80"),
    ("localhost:80", "http://localhost"),
]
FOREIGN = [
    EVIL,
    "https://evil.example",
    "http://evil.example:{port}",
    "null",
    "NULL",
    "*",
    "",
    "http://",
    "http://127.0.0.1",
    "http://127.0.0.1:1",
    "http://127.0.0.1:{port}0",
    "http://127.0.0.1:0{port}",
    "http://127.0.0.1:+{port}",
    "http://127.0.0.1:",
    "https://127.0.0.1:{port}",
    "ws://127.0.0.1:{port}",
    "ftp://127.0.0.1:{port}",
    "file://",
    "file:///tmp/evil.html",
    "chrome-extension://abcdefgh",
    "javascript:alert(1)",
    "data:text/html,x",
    "http://localhost:{port}",  # the same machine, but another origin
    "http://[::1]:{port}",
    "http://0.0.0.0:{port}",
    "http://127.1:{port}",
    "http://2130706433:{port}",
    "http://127.0.0.1.:{port}",
    "http://127.0.0.1.evil.example:{port}",
    "http://evil127.0.0.1:{port}",
    "http://127.0.0.1:{port}.evil.example",
    "http://127.0.0.1:{port}@evil.example",
    "http://evil.example@127.0.0.1:{port}",
    "http://user:word@127.0.0.1:{port}",
    "http://127.0.0.1\\@evil.example:{port}",
    "http://127.0.0.1:{port}/",
    "http://127.0.0.1:{port}/path",
    "http://127.0.0.1:{port}?x",
    "http://127.0.0.1:{port}#x",
    "http://127.0.0.1%3a{port}",
    "http:127.0.0.1:{port}",
    "http:/127.0.0.1:{port}",
    "http:///127.0.0.1:{port}",
    "//127.0.0.1:{port}",
    "127.0.0.1:{port}",
    "http://127.0.0.1:{port} http://evil.example",
    "http://evil.example http://127.0.0.1:{port}",
    "http://127.0.0.1:{port},http://evil.example",
    "http://evil.example, http://127.0.0.1:{port}",
    "http://127.0.0.1:{port}, http://127.0.0.1:{port}",
    "http://127.0.0.1:{port};http://evil.example",
    '"http://127.0.0.1:{port}"',
    "http://１２７.0.0.1:{port}",
]


@requirement("P-22")
@pytest.mark.parametrize(("host", "origin"), SAME)
async def test_a_page_of_ours_may_talk_to_us(desk: Desk, ran: Ran, host: str, origin: str) -> None:
    ran(R5, "http")
    reply = await let_in(desk, [("Host", host), ("Origin", origin)])
    assert (
        reply.headers["access-control-allow-origin"].lower()
        == origin.replace("{port}", str(urlsplit(desk.url).port)).lower()
    )
    assert "origin" in reply.headers["vary"].lower()
    assert "access-control-allow-credentials" not in reply.headers


@requirement("SRV-201", "P-22")
@pytest.mark.parametrize("origin", FOREIGN)
async def test_p22_a_page_from_elsewhere_may_not(desk: Desk, ran: Ran, origin: str) -> None:
    ran(R5, "http")
    await refused(desk, [("Origin", origin)])


@requirement("SRV-201", "P-22")
@pytest.mark.parametrize("verb", ["GET", "DELETE", "OPTIONS", "PUT", "HEAD"])
@pytest.mark.parametrize("path", ["/mcp", "/mcp/", "/sse", "/", "/other", "/.well-known/oauth-protected-resource/mcp"])
async def test_the_door_is_before_every_verb_and_path(desk: Desk, ran: Ran, verb: str, path: str) -> None:
    ran(R5, "http")
    await refused(desk, [("Origin", EVIL), ("Accept", "text/event-stream")], verb=verb, path=path)
    await refused(desk, [("Host", "evil.example"), ("Accept", "text/event-stream")], verb=verb, path=path)


@requirement("SRV-201", "P-22")
@pytest.mark.parametrize("revision", ALL)
async def test_a_page_from_elsewhere_may_not_in_any_revision(desk: Desk, ran: Ran, revision: str) -> None:
    client = await Client(desk.url, revision).open()
    ran(revision, "http")
    before = desk.ran["echo"]
    call = client.call(1, "echo", {"text": "in"})
    for bad in ({"Origin": EVIL}, {"Origin": "null"}, {"Host": "evil.example"}):
        posted = await client.post(call, **bad)
        assert posted.status == 403 and not cors(posted)
        if not client.stateless:
            for reply in (await client.get(**bad), await client.delete(**bad)):
                assert reply.status == 403 and not cors(reply)
    assert desk.ran["echo"] == before
    assert (await client.ask(call))[0] == 200  # the session was not ended either
    assert desk.ran["echo"] == before + 1


@requirement("SRV-201", "P-22")
@pytest.mark.parametrize("revision", ["2024-10-07", "2024-11-05"])
async def test_nor_through_the_stream_of_a_client_of_2024(desk: Desk, ran: Ran, revision: str) -> None:
    stream = {"Accept": "text/event-stream"}
    for bad in ({"Origin": EVIL}, {"Host": "evil.example"}):
        reply = await fetch(desk.url, "GET", {**stream, **bad})
        assert reply.status == 403 and not cors(reply)
    reply = await fetch(desk.url, "GET", stream)
    events = reply.events()
    address = desk.url.removesuffix("/mcp") + (await anext(events))["data"]
    ran(revision, "http")
    client = Client(address, revision)
    params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "rig", "version": "1"}}
    kind = {"Content-Type": "application/json"}
    for message in (client.message(1, "initialize", params), client.call(2, "echo", {"text": "in"})):
        for bad in ({"Origin": EVIL}, {"Origin": "null"}, {"Host": "evil.example"}):
            posted = await fetch(address, "POST", {**kind, **bad}, json.dumps(message).encode())
            assert posted.status == 403 and not cors(posted)
    before = desk.ran["echo"]
    for message in (client.message(1, "initialize", params), client.call(2, "echo", {"text": "in"})):
        assert (await fetch(address, "POST", kind, json.dumps(message).encode())).status == 202
    async with asyncio.timeout(PATIENCE):
        assert [json.loads((await anext(events))["data"])["id"] for _ in range(2)] == [1, 2]
    assert desk.ran["echo"] == before + 1


# Several of one

TWICE = [
    [("Host", "127.0.0.1:{port}"), ("Host", "127.0.0.1:{port}")],
    [("Host", "127.0.0.1:{port}"), ("Host", "evil.example")],
    [("Host", "evil.example"), ("Host", "127.0.0.1:{port}")],
    [("Host", "evil.example"), ("host", "127.0.0.1:{port}")],
    [("Origin", EVIL), ("Origin", EVIL)],
    [("Origin", "http://127.0.0.1:{port}"), ("Origin", "http://127.0.0.1:{port}")],
    [("Origin", "http://127.0.0.1:{port}"), ("Origin", EVIL)],
    [("Origin", EVIL), ("Origin", "http://127.0.0.1:{port}")],
    [("ORIGIN", EVIL), ("origin", "http://127.0.0.1:{port}")],
    [("Origin", "null"), ("Origin", "http://127.0.0.1:{port}")],
    [("Origin", ""), ("Origin", "http://127.0.0.1:{port}")],
    [("Content-Type", "application/json"), ("Content-Type", "application/json")],
    [("Content-Type", "text/plain"), ("Content-Type", "application/json")],
    [("Content-Type", "application/json"), ("Content-Type", "text/plain")],
    [("Mcp-Session-Id", "a"), ("Mcp-Session-Id", "b")],
    [("Authorization", "Bearer a"), ("Authorization", "Bearer b")],
    [("Content-Length", "10"), ("Content-Length", "11")],
    [("Content-Length", "10"), ("Transfer-Encoding", "chunked")],
]


@requirement("P-22")
@pytest.mark.parametrize("lines", TWICE, ids=[" + ".join(f"{n} {v}" for n, v in each) for each in TWICE])
async def test_p22_what_stands_twice_is_refused(desk: Desk, ran: Ran, lines: Lines) -> None:
    ran(R5, "http")
    await refused(desk, lines, (400, 403, 415))


# What a page can send without asking first

SIMPLE = [
    None,
    "",
    "text/plain",
    "text/plain;charset=UTF-8",
    "text/plain; application/json",
    "text/plain, application/json",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "multipart/form-data; boundary=application/json",
]


@requirement("SRV-201", "P-22")
@pytest.mark.parametrize("kind", SIMPLE)
async def test_a_form_of_another_page_runs_nothing(desk: Desk, ran: Ran, kind: str | None) -> None:
    ran(R5, "http")
    before = desk.ran["echo"]
    client = Client(desk.url, R5)
    call = client.call(1, "echo", {"text": "in"})
    for origin, status in ((EVIL, 403), ("null", 403), (None, 415)):
        reply = await client.post(call, Content_Type=kind, Origin=origin)
        assert reply.status == status
        assert not cors(reply)
    assert desk.ran["echo"] == before


# What a page asks first

ASKING = [
    ("Access-Control-Request-Method", "POST"),
    ("Access-Control-Request-Headers", "content-type,mcp-protocol-version,mcp-method,mcp-name,mcp-session-id"),
]


NEEDED = "authorization content-type last-event-id mcp-method mcp-name mcp-protocol-version mcp-session-id"


@requirement("P-22")
async def test_a_page_of_ours_is_told_what_it_may_send(desk: Desk, listed: Desk, ran: Ran) -> None:
    ran(R5, "http")
    for server, lines in (
        (desk, [("Origin", "http://127.0.0.1:{port}")]),
        (listed, [("Host", "tools.example"), ("Origin", "https://app.example")]),
    ):
        before = server.ran["echo"]
        reply = await knock(server, [*lines, *ASKING], verb="OPTIONS")
        assert reply.status in (200, 204)
        origin = lines[-1][1].replace("{port}", str(urlsplit(server.url).port))
        assert reply.headers["access-control-allow-origin"] == origin
        assert "POST" in reply.headers["access-control-allow-methods"]
        allowed = {each.strip().lower() for each in reply.headers["access-control-allow-headers"].split(",")}
        assert {*NEEDED.split()} <= allowed
        assert server.ran["echo"] == before
        reply = await let_in(server, lines)
        assert "mcp-session-id" in reply.headers["access-control-expose-headers"].lower()


@requirement("P-22")
async def test_a_page_of_ours_may_mirror_arguments(listed: Desk, ran: Ran) -> None:
    ran(R5, "http")
    lines = [("Host", "tools.example"), ("Origin", "https://app.example"), ASKING[0]]
    lines.append(("Access-Control-Request-Headers", "content-type,mcp-param-region"))
    reply = await knock(listed, lines, verb="OPTIONS")
    assert "mcp-param-region" in reply.headers["access-control-allow-headers"].lower()


@requirement("SRV-201", "P-22")
@pytest.mark.parametrize(
    "lines",
    [
        [("Origin", EVIL)],
        [("Origin", "null")],
        [("Origin", "https://127.0.0.1:{port}")],
        [("Origin", "http://127.0.0.1:1")],
        [("Host", "evil.example"), ("Origin", EVIL)],
        [("Host", "evil.example")],
        [("Origin", EVIL), ("Access-Control-Request-Private-Network", "true")],
    ],
)
async def test_a_page_from_elsewhere_is_told_nothing(desk: Desk, ran: Ran, lines: Lines) -> None:
    ran(R5, "http")
    await refused(desk, [*lines, *ASKING], verb="OPTIONS")


# Names of its own

MINE = [
    ("tools.example", None),
    ("tools.example:9999", None),
    ("TOOLS.Example", None),
    ("api.example:8443", None),
    ("tools.example", "https://app.example"),
    ("tools.example", "https://app.example:443"),
    ("tools.example", "HTTPS://APP.EXAMPLE"),
    ("tools.example", "http://localhost:3000"),
    ("tools.example", "http://tools.example"),
    ("tools.example:8000", "http://tools.example:8000"),
]
NOT_MINE = [
    ("127.0.0.1:{port}", None),
    ("localhost", None),
    ("example", None),
    ("tools.example.", None),
    ("sub.tools.example", None),
    ("xtools.example", None),
    ("tools.example.evil.example", None),
    ("tools-example", None),
    ("toolsxexample", None),
    ("api.example", None),
    ("api.example:8444", None),
    ("api.example:84430", None),
    ("tools.example@evil.example", None),
    ("tools.example", EVIL),
    ("tools.example", "null"),
    ("tools.example", "http://app.example"),
    ("tools.example", "https://app.example:8443"),
    ("tools.example", "https://app.example."),
    ("tools.example", "https://sub.app.example"),
    ("tools.example", "https://evil-app.example"),
    ("tools.example", "https://appxexample"),
    ("tools.example", "https://app.example.evil.example"),
    ("tools.example", "https://app.example@evil.example"),
    ("tools.example", "https://app.example, http://evil.example"),
    ("tools.example", "https://app.example/"),
    ("tools.example", "http://localhost"),
    ("tools.example", "http://localhost:30000"),
    ("tools.example", "http://127.0.0.1:3000"),
    ("tools.example", "https://tools.example"),
    ("tools.example", "http://tools.example:8000"),
    ("evil.example", "https://app.example"),
]


def _lines(host: str, origin: str | None) -> Lines:
    return [("Host", host)] + ([] if origin is None else [("Origin", origin)])


@requirement("P-22")
@pytest.mark.parametrize(("host", "origin"), MINE)
async def test_listed_names_and_pages_are_let_in(listed: Desk, ran: Ran, host: str, origin: str | None) -> None:
    ran(R5, "http")
    reply = await let_in(listed, _lines(host, origin))
    assert reply.headers.get("access-control-allow-origin") == origin
    assert "access-control-allow-credentials" not in reply.headers


@requirement("SRV-201", "P-22")
@pytest.mark.parametrize(("host", "origin"), NOT_MINE)
async def test_what_only_looks_like_them_is_not(listed: Desk, ran: Ran, host: str, origin: str | None) -> None:
    ran(R5, "http")
    await refused(listed, _lines(host, origin))


@requirement("P-22")
@pytest.mark.parametrize("host", ["evil.example", "localhost", "[fe80::1]:80"])
async def test_any_name_is_ours_only_if_that_was_asked_for_and_then_the_log_says_so(
    host: str, ran: Ran, caplog: pytest.LogCaptureFixture
) -> None:
    ran(R5, "http")
    desk = Desk()
    with caplog.at_level(logging.WARNING, "handrail"):
        async with served(desk.server.asgi(hosts=["*"])) as desk.url:
            await let_in(desk, [("Host", host)])
            await refused(desk, [("Host", host), ("Origin", "http://other.example")])
    assert [each for each in caplog.messages if "host" in each.lower()]


@pytest.mark.parametrize(
    "options",
    [
        {"hosts": ["http://tools.example"]},
        {"hosts": ["tools.example/mcp"]},
        {"hosts": ["*.example"]},
        {"hosts": [""]},
        {"origins": ["app.example"]},
        {"origins": ["https://app.example/"]},
        {"origins": ["*"]},
        {"origins": ["null"]},
        {"origins": ["https://*.example"]},
    ],
)
async def test_a_name_that_could_never_match_is_refused_when_the_server_is_made(options: dict[str, list[str]]) -> None:
    with pytest.raises(ValueError, match=min(options)):
        Desk().server.asgi(**options)  # type: ignore[arg-type]  # one of either


@pytest.mark.parametrize("option", ["hosts", "origins"])
async def test_one_name_in_place_of_a_list_is_not_read_letter_by_letter(option: str) -> None:
    wanted = {"hosts": "tools.example", "origins": "https://app.example"}[option]
    with pytest.raises((TypeError, ValueError)):
        Desk().server.asgi(**{option: wanted})  # type: ignore[arg-type]  # the mistake is the point


# What is on record of it


def records(path: Path) -> list[Object]:
    """Those of the door."""
    told = [json.loads(line) for _, line in TrailFile(path).lines()]
    return [each for each in told if each["event"] == "refusal"]


@requirement("SRV-614", "P-22", "P-24", everywhere=True)
@pytest.mark.parametrize("listener", LISTENERS)
async def test_what_is_refused_at_the_door_is_on_record_without_the_token(listener: str, tmp_path: Path) -> None:
    desk, (key, stored) = Desk(audit=tmp_path / "calls.db"), ApiKeys.new()
    async with served(desk.server.asgi(auth=ApiKeys({"alice": stored})), listener) as desk.url:
        statuses = [
            (await knock(desk, lines)).status
            for lines in (
                [("Host", "evil.example")],
                [("Origin", EVIL), ("Authorization", f"Bearer {key}")],
                [],
                [("Authorization", "Bearer guessed-by-somebody")],
                [("Authorization", f"Bearer {key}")],
            )
        ]
    assert statuses == [403, 403, 401, 401, 200]
    told = records(tmp_path / "calls.db")
    assert [(each["outcome"], each["why"]) for each in told] == [
        ("forbidden", "Host 'evil.example' is not a name of this server; list it under `hosts`"),
        ("forbidden", "Origin is not allowed; list it under `origins`"),
        ("unauthenticated", "no token"),
        ("unauthenticated", "the token is not valid"),
    ]
    assert {(each["from"], each["server"], each["principal"]) for each in told} == {("127.0.0.1", "desk", "anonymous")}
    assert verify(TrailFile(tmp_path / "calls.db").lines()).flaw is None
    assert not [each for each in map(json.dumps, told) if key in each or "guessed" in each]


@requirement("SRV-614", "P-30", everywhere=True)
async def test_p30_a_flood_at_the_door_fills_no_disk(tmp_path: Path) -> None:
    """Also one from many addresses; what was left out is counted."""
    server = Server("shop", audit=tmp_path / "calls.jsonl")
    now = [0]
    book = RejectionLog(server.engine.guard_set, clock=lambda: now[0])
    async with server.serving():
        for number in range(2_000):
            book.add(f"192.0.2.{number % 2}", "unauthenticated", "no token")
        for number in range(2_000):
            book.add(f"198.51.{number % 250}.{number // 250}", "unauthenticated", "no token")
        now[0] += 60_000_000_000
        book.add("203.0.113.1", "forbidden", "no such host")
    told = records(tmp_path / "calls.jsonl")
    assert len(told) == 101
    assert Counter(each["from"] for each in told)["192.0.2.0"] == 10
    assert len(told) + sum(each.get("left_out", 0) for each in told) == 4_001


async def test_without_an_audit_nothing_is_written_of_it() -> None:
    server = Server("shop")
    async with server.serving():
        RejectionLog(server.engine.guard_set).add("192.0.2.1", "forbidden", "no such host")
