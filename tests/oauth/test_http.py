"""Asking where strangers point us: which addresses, when they are looked up, and how much of an answer is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from handrail.errors import AuthorizationError
from handrail.oauth.flow import FlowRequest, FlowResponse
from handrail.oauth.http import Outbound, Resolve, address_kind
from requirements import requirement

PUBLIC = "93.184.215.14"
SERVER = "https://mcp.example/mcp"


class Stranger:
    """A listener on this machine: what it is asked, and what it says."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
        self.more: bytes = b""  # again and again
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-l")), 0)
            self.asked.append(head + (await reader.readexactly(length)).decode())
            writer.write(self.answer)
            while self.more:
                writer.write(self.more)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def stranger() -> AsyncIterator[Stranger]:
    it = Stranger()
    async with await asyncio.start_server(it.serve, "127.0.0.1", 0) as listener:
        it.port = listener.sockets[0].getsockname()[1]
        yield it
        it.more = b""


def book(**hosts: str | Sequence[str]) -> tuple[Resolve, list[str]]:
    """A resolver that knows `hosts` (without .example), in turn if there are several lists, and what it was asked."""
    asked: list[str] = []

    async def resolve(host: str) -> Sequence[str]:
        asked.append(host)
        return str(hosts[host.removesuffix(".example")]).split()

    return resolve, asked


@pytest.mark.parametrize(
    ("kind", "addresses"),
    [
        ("public", f"{PUBLIC} 1.1.1.1 2606:4700::1111 2a00:1450::1 ::ffff:1.1.1.1"),
        ("loopback", "127.0.0.1 127.255.255.254 ::1 ::ffff:127.0.0.1"),
        ("private", "10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 100.64.0.1 fc00::1 fd12::1 ::ffff:10.0.0.1"),
        ("forbidden", "0.0.0.0 0.1.2.3 :: 169.254.169.254 169.254.0.1 fe80::1 fe80::1%1 ::ffff:169.254.169.254"),
        ("forbidden", "100.100.100.200 168.63.129.16 192.0.0.192 fd00:ec2::254"),  # metadata of clouds
        ("forbidden", "224.0.0.1 239.255.255.255 ff02::1 ff0e::1 240.0.0.1 255.255.255.255"),
        ("forbidden", "64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1"),  # NAT64
        ("forbidden", "2002:7f00:1:: 2002:a00:1::1 192.88.99.1"),  # 6to4
        ("forbidden", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),  # Teredo
        ("forbidden", "::7f00:1 ::127.0.0.1 ::ffff:0:127.0.0.1"),  # IPv4 in IPv6, in old ways
        ("forbidden", "192.0.2.1 198.51.100.1 203.0.113.1 198.18.0.1 2001:db8::1 3fff::1 100::1 5f00::1"),
    ],
)
@requirement("P-27")
def test_the_kinds_of_addresses(kind: str, addresses: str) -> None:
    assert {address: address_kind(address) for address in addresses.split()} == dict.fromkeys(addresses.split(), kind)


@pytest.mark.parametrize("server", [PUBLIC, "127.0.0.1", f"{PUBLIC} 10.0.0.1", "169.254.169.254", "10.0.0.1"])
@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::", "0.0.0.0"])
@requirement("P-27")
async def test_a_name_that_leads_where_no_server_may_send_us(stranger: Stranger, server: str, address: str) -> None:
    resolve, _ = book(mcp=server, evil=address)
    with pytest.raises(AuthorizationError, match="no server may send us there"):
        await Outbound(SERVER, resolve=resolve).send(FlowRequest(f"https://evil.example:{stranger.port}/x"))
    assert stranger.asked == []


@pytest.mark.parametrize(("server", "is_asked"), [("10.0.0.1", True), (PUBLIC, False), (f"10.0.0.1 {PUBLIC}", False)])
@requirement("P-27")
async def test_private_addresses_are_for_servers_that_have_one(
    server: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve, _ = book(mcp=server, inside="10.0.0.2")
    connected: list[object] = []

    async def connect(self: object, sock: object, address: object) -> None:
        connected.append(address)
        raise OSError("far enough")

    monkeypatch.setattr(type(asyncio.get_running_loop()), "sock_connect", connect)
    with pytest.raises(AuthorizationError):
        await Outbound(SERVER, resolve=resolve).send(FlowRequest("https://inside.example/x"))
    assert connected == ([("10.0.0.2", 443)] if is_asked else [])


@pytest.mark.parametrize(
    "url",
    ["https://127.0.0.1:{}/", "https://[::1]:{}/", "https://[::ffff:127.0.0.1]:{}/", "https://169.254.169.254:{}/"],
)
@requirement("P-27")
async def test_an_address_in_the_url_is_checked_like_one_that_was_looked_up(stranger: Stranger, url: str) -> None:
    resolve, asked = book(mcp=PUBLIC)
    with pytest.raises(AuthorizationError, match="no server may send us there"):
        await Outbound(SERVER, resolve=resolve).send(FlowRequest(url.format(stranger.port)))
    assert (stranger.asked, asked) == ([], ["mcp.example"])


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.0.0.1."])
@requirement("P-27")
async def test_odd_spellings_of_an_address_lead_nowhere(stranger: Stranger, host: str) -> None:
    async def resolve(name: str) -> Sequence[str]:
        return [PUBLIC] if name == "mcp.example" else ["127.0.0.1"]  # as the C library has it

    with pytest.raises(AuthorizationError):
        await Outbound(SERVER, resolve=resolve).send(FlowRequest(f"https://{host}:{stranger.port}/"))
    assert stranger.asked == []


@requirement("P-27")
async def test_p27_one_bad_address_among_good_ones_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, _ = book(mcp=PUBLIC, evil=f"{PUBLIC} 127.0.0.1")
    connected: list[object] = []

    async def connect(self: object, sock: object, address: object) -> None:
        connected.append(address)
        raise OSError("far enough")

    monkeypatch.setattr(type(asyncio.get_running_loop()), "sock_connect", connect)
    with pytest.raises(AuthorizationError, match="no server may send us there"):
        await Outbound(SERVER, resolve=resolve).send(FlowRequest("https://evil.example/x"))
    assert connected == []


@requirement("P-27")
async def test_p27_a_resolver_that_changes_its_answer_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is connected to is what was checked: there is no second look-up for it to differ in."""
    answers = iter([PUBLIC, "127.0.0.1"])
    asked: list[str] = []
    connected: list[object] = []

    async def resolve(host: str) -> Sequence[str]:
        asked.append(host)
        return [PUBLIC if host == "mcp.example" else next(answers)]

    async def connect(self: object, sock: object, address: object) -> None:
        connected.append(address)
        raise OSError("far enough")

    monkeypatch.setattr(type(asyncio.get_running_loop()), "sock_connect", connect)
    outbound = Outbound(SERVER, resolve=resolve)
    for complaint in ("ClientConnectorError", "no server may send us there"):
        with pytest.raises(AuthorizationError, match=complaint):
            await outbound.send(FlowRequest("https://evil.example/x"))
    assert connected == [(PUBLIC, 443)]
    assert asked == ["mcp.example", "evil.example", "evil.example"]


@requirement("P-27")
async def test_http_to_this_machine_is_for_a_server_on_it(stranger: Stranger) -> None:
    resolve, _ = book(mcp=PUBLIC)
    with pytest.raises(AuthorizationError, match="https is needed"):
        await Outbound(SERVER, resolve=resolve).send(FlowRequest(stranger.url))
    assert await Outbound("http://localhost:1/mcp").send(FlowRequest(stranger.url)) == FlowResponse(200, {})
    assert len(stranger.asked) == 1


@requirement("P-27")
async def test_localhost_is_this_machine_and_nothing_else() -> None:
    async def resolve(host: str) -> Sequence[str]:
        return [PUBLIC]

    with pytest.raises(AuthorizationError, match="its address is public"):
        await Outbound("http://localhost:1/mcp", resolve=resolve).send(FlowRequest("http://localhost:2/x"))


@requirement("P-26", "P-27")
async def test_what_is_asked_is_all_that_is_said(stranger: Stranger) -> None:
    outbound = Outbound(stranger.url)
    await outbound.send(FlowRequest(f"{stranger.url}/get"))
    await outbound.send(FlowRequest(f"{stranger.url}/form", {"a": "b c"}, {"Authorization": "Basic x"}))
    await outbound.send(FlowRequest(f"{stranger.url}/json", b'{"a":["b"]}', {"Content-Type": "application/json"}))
    get, form, json = stranger.asked
    assert get.startswith("GET /get HTTP/1.1\r\n") and "Authorization" not in get and "Cookie" not in get
    assert form.startswith("POST /form ") and form.endswith("\r\n\r\na=b+c") and "Authorization: Basic x" in form
    assert json.startswith("POST /json ") and json.endswith('\r\n\r\n{"a":["b"]}') and "application/json" in json


@pytest.mark.parametrize("to", ["{}/", "https://evil.example/", "http://169.254.169.254/"])
@requirement("P-27")
async def test_p27_a_redirect_is_not_followed(stranger: Stranger, to: str) -> None:
    target = to.format(stranger.url)
    stranger.answer = f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode()
    assert await Outbound(stranger.url).send(FlowRequest(stranger.url)) == FlowResponse(302)
    assert len(stranger.asked) == 1


ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "more", "complaint"),
    [
        (ENDLESS, b" " * 10_000, "more than 65,536 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 70000\r\n\r\n" + b" " * 70_000, b"", "more than 65,536 bytes"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x" * 10_000, "asked in the course of authorization"),
        (b"220 smtp.example ESMTP\r\n", b"", "asked in the course of authorization"),
        (b"", b"", "asked in the course of authorization"),
    ],
    ids=["endless", "long", "header", "other protocol", "nothing"],
)
@requirement("P-27")
async def test_no_answer_is_too_long_for_us(stranger: Stranger, answer: bytes, more: bytes, complaint: str) -> None:
    stranger.answer, stranger.more = answer, more
    with pytest.raises(AuthorizationError, match=complaint):
        await Outbound(stranger.url).send(FlowRequest(stranger.url))


@requirement("P-27")
async def test_an_answer_that_does_not_come_is_not_waited_for(stranger: Stranger) -> None:
    never = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        never.set()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
        with pytest.raises(AuthorizationError, match="Timeout"):
            await Outbound(url, deadline=0.01).send(FlowRequest(url))
        await never.wait()


@pytest.mark.parametrize("body", [b"<html>", b"[" * 30_000, b"\xff\xfe", b""])
async def test_an_answer_that_is_no_json_has_no_body(stranger: Stranger, body: bytes) -> None:
    stranger.answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    assert await Outbound(stranger.url).send(FlowRequest(stranger.url)) == FlowResponse(200)


async def test_a_host_nobody_knows_is_named() -> None:
    async def resolve(host: str) -> Sequence[str]:
        raise OSError(-2, "Name or service not known")

    with pytest.raises(AuthorizationError, match=r"id\.example was asked in the course of authorization"):
        await Outbound(SERVER, resolve=resolve).send(FlowRequest("https://id.example/x"))
