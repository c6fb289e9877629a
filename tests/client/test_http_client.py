"""A client's end of HTTP: what it sends, what it makes of every answer and of none, and what it leaves: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from handrail import Client, Clocks, Server
from handrail.errors import AuthorizationError, HttpRefused, RemoteProtocolError, Sent, TransportError
from handrail.protocol.framing import ServerSentEvent
from handrail.protocol.http_rules import mirrored_headers
from handrail.revisions import REVISIONS
from handrail.transports import http_client as web
from handrail.transports.http_client import HttpClientTransport, ResumableStream
from patience import PATIENCE
from requirements import requirement
from rigs_web import (
    EVENTS,
    HANDSHAKE,
    INITIALIZED,
    JSON,
    SESSION,
    STATELESS,
    Asked,
    Notes,
    Object,
    Script,
    linked,
    rig,
    session_server,
    talking,
)
from servers_http import served

Ran = Callable[[str, str], None]

MODERN = "2026-07-28"
ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "rig", "version": "1"},
}
TOKEN = "t0p-s3cr3t"

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="looks into /proc, or relies on how Linux queues connections"
)


async def answers(asked: Asked) -> None:
    await asked.answer({"ok": True})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes back, comes back at once, unless the server says otherwise."""
    monkeypatch.setattr(web, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(web, "MIN_RETRY_SECONDS", 0.001)


# The address, and the headers


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a/x",
        "a/b",
        "http://",
        "http://me:secret@a/",
        "http://me@a/",
        "//a/x",
        "http://a:99999/",
        "http://a b/",
        "http://a/b\n",
        "",
    ],
)
def test_an_address_that_cannot_be_used_is_refused_when_it_is_given(url: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        HttpClientTransport(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["Accept", "content-type", "MCP-Protocol-Version", "mcp-anything", "Last-Event-ID", "a b", "", "a\r\nb"]
)
def test_headers_that_are_ours_or_no_headers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="headers"):
        HttpClientTransport("https://a/", headers={name: "x"})


def test_a_value_that_would_begin_another_header_is_refused() -> None:
    with pytest.raises(ValueError, match="headers"):
        HttpClientTransport("https://a/", headers={"x": "y\r\nz: 1"})
    with pytest.raises(ValueError, match="headers"):
        HttpClientTransport("https://a/", headers={"authorization": "x"}, auth=Tokens())
    with pytest.raises(ValueError, match="transport"):
        HttpClientTransport("https://a/", transport="smoke")  # type: ignore[arg-type]  # whatever the hints say


@requirement("CLI-12")
async def test_a_request_is_one_post_with_the_headers_it_needs(ran: Ran) -> None:
    ran(MODERN, "http")
    async with talking(answers, headers={"X-Mine": "1", "User-Agent": "me"}) as (server, talk):
        about = talk.begin("tools/list", {"a": "ä"}, headers={"Mcp-Method": "tools/list"})
        assert (await talk.settled(about))["result"] == {"ok": True}
        asked = server.asked[0]
        assert (asked.method, asked.target) == ("POST", "/mcp")
        assert asked.message == {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"a": "ä"}}
        assert asked.headers.pop("content-length") == str(len(asked.body))
        assert asked.headers == {
            "host": server.url.split("/")[2],
            "accept": "application/json, text/event-stream",
            "accept-encoding": "identity",
            "content-type": "application/json",
            "user-agent": "me",
            "x-mine": "1",
            "mcp-method": "tools/list",
        }
        assert len(asked.lines) == len(asked.headers) + 1
        assert (about.status, about.sent) == (200, Sent.UNKNOWN)
        assert talk.notes.heard == [(asked.result({"ok": True}), about)]


def test_without_aiohttp_one_sentence_says_what_to_install() -> None:
    code = (
        "import sys\nsys.modules['aiohttp'] = None\nfrom handrail.transports.http_client import HttpClientTransport\n"
        "try:\n    HttpClientTransport('http://a/')\nexcept ModuleNotFoundError as problem:\n    print(problem)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "python -m pip install 'uvicorn" in run.stdout
    code = "import sys, handrail.transports.http_client\nprint('aiohttp' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert run.stdout == "False\n"


async def test_cookies_are_neither_kept_nor_sent_and_the_environment_has_no_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")

    async def script(asked: Asked) -> None:
        await asked.answer(Set_Cookie="a=b")

    async with rig(script) as server, linked(server.url.replace("127.0.0.1", "localhost")) as talk:
        await talk.ask()
        await talk.ask()
        assert "cookie" not in server.asked[1].headers


# Answers


@requirement("CLI-12")
async def test_an_event_stream_is_heard_event_by_event_and_its_connection_used_again(ran: Ran) -> None:
    ran(MODERN, "http")

    async def script(asked: Asked) -> None:
        await asked.begin(EVENTS + "; charset=utf-8")
        await asked.chunk(b"\xef\xbb\xbf: hello\r\n\r\ndata:\n\n")
        await asked.event({"method": "notifications/progress"}, event="message")
        await asked.event({"never": "heard"}, event="other")
        await talk.notes.until(lambda: len(talk.notes.heard) % 2)
        whole = json.dumps(asked.result("ä" * 3)).encode()
        await asked.chunk(b"data: " + whole[:40])
        await talk.notes.until(lambda: talk.notes.signs)
        await asked.chunk(whole[40:] + b"\n\n")
        await talk.settled(talk.notes.waiting[asked.id])
        await asked.end()

    async with talking(script) as (server, talk):
        for _ in range(2):
            about = talk.begin()
            talk.notes.signs.clear()
            assert (await talk.settled(about))["result"] == "äää"
            assert set(talk.notes.signs) == {about}
            await server.asked[-1].is_over.wait()
            await rounds()
        assert [said.get("method") for said, _ in talk.notes.heard] == ["notifications/progress", None] * 2
        assert talk.notes.left_out == []
        assert server.connections == 1


async def test_comments_show_that_the_server_is_there() -> None:
    async def script(asked: Asked) -> None:
        await asked.begin()
        for count in range(1, 4):
            await asked.chunk(b": still there\n\n")
            await talk.notes.signs_to(count)
        await asked.event(asked.result())
        await asked.end()

    async with talking(script) as (_, talk):
        about = talk.begin()
        await talk.settled(about)
        assert talk.notes.signs == [about] * 3


async def test_a_flood_of_keep_alives_is_one_sign_for_many() -> None:
    async def script(asked: Asked) -> None:
        await asked.begin()
        for _ in range(20):
            await asked.chunk(b":\n\n" * 20_000)
        await asked.event(asked.result("dry"))
        await asked.end()

    async with talking(script) as (_, talk):
        assert (await talk.ask())["result"] == "dry"
        assert len(talk.notes.signs) < 1000  # of 400,000


async def test_what_comes_after_the_answer_is_not_heard() -> None:
    async def script(asked: Asked) -> None:
        await asked.begin()
        answer = json.dumps(asked.result()).encode()
        await asked.chunk(b'data: %b\n\ndata: {"method": "late"}\n\n' % answer)
        await asked.event({"method": "later"})
        await asked.gone()

    async with talking(script) as (_, talk):
        await talk.ask()
        assert len(talk.notes.heard) == 1


@requirement("CLI-12")
async def test_an_answer_in_pieces_is_one_answer(ran: Ran) -> None:
    ran(MODERN, "http")

    async def script(asked: Asked) -> None:
        await asked.begin(JSON)
        whole = json.dumps(asked.result("x" * 10)).encode()
        for at in range(0, len(whole), 20):
            signs = len(talk.notes.signs)
            await asked.chunk(whole[at : at + 20])
            await talk.notes.signs_to(signs + 1)
        await asked.end()

    async with talking(script) as (server, talk):
        about = talk.begin()
        assert (await talk.settled(about))["result"] == "x" * 10
        assert set(talk.notes.signs) == {about}
        await talk.ask()
        assert server.connections == 1


@requirement("CLI-43")
async def test_an_array_is_handed_over_as_it_is(ran: Ran) -> None:
    ran("2025-03-26", "http")

    async def script(asked: Asked) -> None:
        await asked.reply(200, json.dumps([{"method": "notice"}, asked.result(1)]).encode())

    async with talking(script) as (_, talk):
        assert (await talk.ask())["result"] == 1
        assert isinstance(talk.notes.heard[0][0], list)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", ""])
async def test_json_may_be_announced_in_other_ways(kind: str) -> None:
    async def script(asked: Asked) -> None:
        await asked.reply(200, asked.result(), kind)

    async with talking(script) as (_, talk):
        await talk.ask()


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (202, b"", "", "HTTP 202 with nothing"),
        (200, b"", JSON, "HTTP 200 with nothing"),
        (200, b"<html>", "text/html; charset=utf-8", "HTTP 200 with text/html"),
        (200, b"{", JSON, "something else"),
        (200, b'{"jsonrpc": "2.0", "id": 99, "result": {}}', JSON, "something else"),
        (200, b"data: {}\n\n", EVENTS, "ended before the answer"),
        (200, b"", EVENTS, "ended before the answer"),
    ],
)
async def test_a_status_that_says_yes_without_an_answer(status: int, body: bytes, kind: str, text: str) -> None:
    async def script(asked: Asked) -> None:
        length = f"Content-Length: {len(body)}\r\n\r\n".encode()
        await asked.send(f"HTTP/1.1 {status} OK\r\nContent-Type: {kind}\r\n".encode() + length + body)

    async with talking(script) as (server, talk):
        problem = await talk.problem()
        assert text in str(problem)
        assert problem.sent is Sent.UNKNOWN
        if isinstance(problem, HttpRefused):
            assert problem.status == status
        await talk.problem()
        assert server.connections == 1 + (kind == EVENTS and 0)


# Refusals

ERROR: Object = {"jsonrpc": "2.0", "error": {"code": -32022, "message": "no"}}


@requirement("CLI-05")
@pytest.mark.parametrize("status", [400, 403, 404, 413, 429, 500, 503])
@pytest.mark.parametrize("ident", [{}, {"id": None}, {"id": 1}])
async def test_a_refusal_with_a_message_is_heard(ran: Ran, status: int, ident: Object) -> None:
    ran(MODERN, "http")

    async def script(asked: Asked) -> None:
        await asked.reply(status, {**ERROR, **ident})

    async with talking(script) as (_, talk):
        about = talk.begin()
        assert (await talk.settled(about))["error"]["code"] == -32022
        assert about.status == status
        assert talk.notes.losses == []


@requirement("CLI-05")
@pytest.mark.parametrize(
    ("status", "sent"),
    [
        *((400, Sent.FAILED), (403, Sent.FAILED), (404, Sent.FAILED), (405, Sent.FAILED), (302, Sent.FAILED)),
        *((500, Sent.UNKNOWN), (502, Sent.UNKNOWN), (504, Sent.UNKNOWN)),
    ],
)
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"<html>", b'{"a": 1}', b"[]", b'{"error": {}, "id": 99}', b"\xff", b"[" * 9999, b"x" * 100_000),
        # What looks like JSON-RPC, and is not.
        *(b'{"error":"rate limited"}', b'{"error":{"code":503,"message":"busy"}}', b'{"jsonrpc":"2.0","error":"x"}'),
        b'{"jsonrpc":"1.0","id":1,"error":{"code":1,"message":"x"}}',
        b'{"jsonrpc":"2.0","id":2,"error":{"code":1,"message":"x"}}',
        b'{"jsonrpc":"2.0","id":1,"error":{"code":"1","message":"x"}}',
        b'{"jsonrpc":"2.0","id":1,"error":{"code":true,"message":"x"}}',
        b'{"jsonrpc":"2.0","id":1,"error":{"code":1.5,"message":"x"}}',
        b'{"jsonrpc":"2.0","id":1,"error":{"code":1}}',
        b'{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":null}}',
        b'{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"x"},"result":{}}',
        b'{"jsonrpc":"2.0","id":1,"method":"x","error":{"code":1,"message":"x"}}',
        b'{"jsonrpc":"2.0","id":true,"error":{"code":1,"message":"x"}}',
    ],
)
async def test_a_refusal_without_one_says_whether_it_was_done(ran: Ran, status: int, sent: Sent, body: bytes) -> None:
    ran(MODERN, "http")

    async def script(asked: Asked) -> None:
        await asked.reply(status, body)

    async with talking(script) as (_, talk):
        about = talk.begin()
        problem = await talk.problem(about)
        assert isinstance(problem, HttpRefused)
        assert (problem.status, problem.sent, about.status) == (status, sent, status)
        assert problem.body == body[: 64 * 1024]
        assert str(status) in str(problem)
        assert talk.notes.heard == []


async def test_a_refusal_that_is_cut_short_is_one() -> None:
    async def script(asked: Asked) -> None:
        await asked.send(b"HTTP/1.1 403 No\r\nContent-Type: text/plain\r\nContent-Length: 50\r\n\r\nhalf")
        asked.hang_up()
        await asked.gone()

    async with talking(script) as (_, talk):
        problem = await talk.problem()
        assert isinstance(problem, HttpRefused)
        assert (problem.status, problem.sent) == (403, Sent.FAILED)


async def test_the_words_of_a_refusal_are_in_the_error_without_what_could_disturb_a_terminal() -> None:
    async def script(asked: Asked) -> None:
        await asked.reply(403, b"Host 'x' is not\x1b[31m a name\r\n" + b"y" * 1000, "text/plain; charset=utf-8")

    async with talking(script) as (_, talk):
        problem = await talk.problem()
        assert str(problem).startswith("HTTP 403: Host 'x' is not\\x1b[31m a name")
        assert "\x1b" not in str(problem)
        assert len(str(problem)) < 250


@pytest.mark.parametrize("status", [429, 503])
async def test_how_long_to_wait_is_passed_on(status: int) -> None:
    waits = iter(["7", formatdate(time.time() + 3600, usegmt=True), "soon", "-1", "", formatdate(0, usegmt=True)])

    async def script(asked: Asked) -> None:
        await asked.reply(status, b"busy", "text/plain", Retry_After=next(waits))

    async with talking(script) as (_, talk):
        found = [await talk.problem() for _ in range(6)]
        got = [vars(problem)["retry_after"] for problem in found]
        assert got[0] == 7
        assert 3500 < got[1] <= 3600
        assert got[2:] == [None, None, None, 0]
        assert found[0].hint == "Try again in 7 s"
        assert found[2].hint == ""


@requirement("P-35")
async def test_the_response_to_one_request_answers_no_other(ran: Ran) -> None:
    ran("2025-11-25", "http")
    calls: list[Asked] = []
    both, refused = asyncio.Event(), asyncio.Event()
    about = {
        "protocolVersion": "2025-11-25",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "x", "version": "1"},
    }
    told = {"initialize": about, "tools/list": {"tools": [{"name": "one", "inputSchema": {"type": "object"}}]}}

    def said(text: str) -> Object:
        return {"content": [{"type": "text", "text": text}]}

    async def script(asked: Asked) -> None:
        method = (asked.message or {}).get("method", "")
        if method in told:
            await asked.answer(told[method])
        elif method != "tools/call":
            await asked.reply(202 if asked.method == "POST" else 405)
        elif calls:
            calls.append(asked)
            both.set()
            await refused.wait()
            await asked.answer(said("right"))
        else:
            calls.append(asked)
            await both.wait()
            await asked.reply(200, {"jsonrpc": "2.0", "id": calls[1].id, "result": said("forged")})

    async with rig(script) as server, Client(server.url, revision="2025-11-25") as client:
        await client.tools()
        first = asyncio.ensure_future(client.call("one", {}))
        await server.was_asked(5)  # initialize, initialized, GET, tools/list, tools/call
        second = asyncio.ensure_future(client.call("one", {}))
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(RemoteProtocolError, match=r"answered with the id \d+, not \d+"):
                await first
            refused.set()
            assert (await second).text == "right"


@requirement("P-35")
async def test_what_arrives_on_an_idle_connection_answers_no_later_request(ran: Ran) -> None:
    ran(MODERN, "http")
    async with talking(answers) as (server, talk), linked(server.url) as other:
        await talk.ask()
        forged = json.dumps({"jsonrpc": "2.0", "id": 2, "result": "forged"}).encode()
        await server.asked[0].reply(200, forged)
        await other.ask()  # so much later, the response has arrived
        assert (await talk.ask())["result"] == {"ok": True}
        await server.asked[0].gone()
        assert server.connections == 3


@requirement("P-35")
async def test_a_response_on_the_stream_of_notifications_answers_no_request(ran: Ran) -> None:
    ran("2025-11-25", "http")
    news = asyncio.Event()

    async def stream(asked: Asked) -> None:
        await asked.begin()
        await news.wait()
        for ident in (1, 2, 3):
            await asked.event({"jsonrpc": "2.0", "id": ident, "result": "forged"})
        await asked.event({"jsonrpc": "2.0", "method": "notifications/x"})
        await asked.gone()

    async def after_news(asked: Asked) -> None:
        news.set()
        await talk.notes.until(lambda: talk.notes.left_out)
        await asked.answer("right")

    async with talking(session_server(after_news, streams=stream)) as (server, talk):
        await talk.shake_hands()
        await server.was_asked(1, "GET")
        assert (await talk.ask())["result"] == "right"
        await talk.notes.until(lambda: len(talk.notes.left_out) == 3)
        assert (await talk.ask())["result"] == "right"
        assert not [each for each, about in talk.notes.heard if about is None and "result" in each]


@requirement("P-35")
async def test_many_lines_at_once_are_worked_off_in_turns_of_the_loop(ran: Ran) -> None:
    ran(MODERN, "http")

    async def script(asked: Asked) -> None:
        await asked.begin()
        await asked.chunk(b"data: x\n" * 8_000)
        await asked.chunk(b"\n\n")
        await asked.event(asked.result("right"))
        await asked.end()

    async with talking(script, max_message_bytes=1_000) as (_, talk):
        problem = await talk.problem()
        assert "an event of over 1,000 bytes" in str(problem)
    async with talking(script) as (_, talk):
        calling = talk.begin()
        await talk.notes.signs_to(10)  # one for each turn
        assert (await talk.settled(calling))["result"] == "right"


@requirement("P-35")
async def test_many_events_at_once_are_worked_off_in_turns_of_the_loop(ran: Ran) -> None:
    ran(MODERN, "http")
    notice = b'data: {"jsonrpc":"2.0","method":"notifications/x"}\n\n'

    async def script(asked: Asked) -> None:
        await asked.begin()
        await asked.chunk(notice * 800)
        await asked.event(asked.result())
        await asked.end()

    async with talking(script) as (_, talk):
        calling = talk.begin()
        counts = {len(talk.notes.heard)}
        while not calling.future.done():
            await asyncio.sleep(0)
            counts.add(len(talk.notes.heard))
        assert len(talk.notes.heard) == 801
        assert len(counts) >= 800 / (2 * web.EVENTS_PER_TURN)  # seen in between


# Too much


@requirement("P-03", "P-35")
@pytest.mark.parametrize("how", ["declared", "chunks", "without end", "event", "lines", "zipped"])
async def test_an_answer_over_the_limit_is_not_taken(ran: Ran, how: str) -> None:
    ran(MODERN, "http")
    limit = 64 * 1024
    zipped = gzip.compress(bytes(200_000_000))

    async def script(asked: Asked) -> None:
        if how == "declared":
            await asked.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 70000\r\n\r\n{")
        elif how == "zipped":
            await asked.reply(200, zipped, Content_Encoding="gzip")
        else:
            await asked.begin(JSON if how in ("chunks", "without end") else EVENTS)
            piece = {"lines": b"data: x\n", "event": b"data: "}.get(how, b"") + b"x" * (0 if how == "lines" else 5000)
            for _ in range({"without end": 20_000, "lines": 20_000}.get(how, 30)):
                await asked.chunk(piece)
                if asked.is_closing():
                    break
        await asked.gone()

    async with talking(script, max_message_bytes=limit) as (_, talk):
        tracemalloc.start()
        try:
            problem = await talk.problem()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert "of over 65,536 bytes" in str(problem)
        assert isinstance(problem, TransportError)
        assert problem.sent is Sent.UNKNOWN
        assert talk.notes.heard == []
        assert peak < 8 * 1024 * 1024


async def test_an_answer_of_just_the_limit_is_taken() -> None:
    async def script(asked: Asked) -> None:
        whole = json.dumps(asked.result("")).encode()
        whole = whole.replace(b'""', b'"%b"' % (b"x" * (5000 - len(whole))))
        if asked.id == 1:
            await asked.reply(200, whole)
        else:
            await asked.begin()
            await asked.chunk(b"id: 1\nevent: message\ndata: " + whole + b"\n\n")
            await asked.end()

    async with talking(script, max_message_bytes=5000) as (_, talk):
        assert len(json.dumps(await talk.ask())) == 5000
        assert len(json.dumps(await talk.ask())) == 5000
    async with talking(script, max_message_bytes=4999) as (_, talk):
        await talk.problem()
        await talk.problem()


async def test_a_head_without_end_is_not_taken() -> None:
    async def script(asked: Asked) -> None:
        await asked.send(b"HTTP/1.1 200 OK\r\nX: ")
        for _ in range(1000):
            await asked.send(b"x" * 10_000)

    async with talking(script) as (_, talk):
        problem = await talk.problem()
        assert problem.sent is Sent.UNKNOWN


async def test_a_long_request_is_sent_whole_and_without_a_warning() -> None:
    async def script(asked: Asked) -> None:
        await asked.answer(len(asked.message["params"]["text"]))

    async with talking(script) as (_, talk):
        assert (await talk.ask(params={"text": "x" * 3_000_000}))["result"] == 3_000_000


async def test_so_many_requests_are_open_at_once_and_answers_to_the_server_pass_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise calls that wait for an answer of ours would keep it from being sent."""
    monkeypatch.setattr(web, "MAX_REQUESTS", 2)
    gate = asyncio.Event()

    async def script(asked: Asked) -> None:
        if asked.message.get("method") == "tools/call":
            await gate.wait()
            await asked.answer(asked.id)
        else:
            await asked.reply(202)
            gate.set()

    async with talking(script) as (server, talk):
        waiting = [talk.begin() for _ in range(4)]
        await server.was_asked(2)
        talk.link.send(b'{"jsonrpc":"2.0","id":5,"result":{}}', None)
        assert (await server.was_asked(3)).message == {"jsonrpc": "2.0", "id": 5, "result": {}}
        assert [(await talk.settled(each))["result"] for each in waiting] == [1, 2, 3, 4]


def pings(count: int) -> list[Object]:
    return [{"jsonrpc": "2.0", "id": f"ping-{number}", "method": "ping"} for number in range(count)]


class Asking:
    """A server that asks on the stream of each call; a reply is accepted once `gate` is open."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.gate = asyncio.Event()
        self.replies: list[Object] = []
        self.posting = self.most = 0  # replies whose POST is open, now and at most
        self.news, self.first = asyncio.Event(), asyncio.Event()

    async def was_replied_to(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.first.wait()

    async def script(self, asked: Asked) -> None:
        if asked.method != "POST":
            await asked.reply(405)
        elif asked.message.get("method") == "initialize":
            welcome = {"protocolVersion": R4, "capabilities": {"tools": {}}, "serverInfo": {"name": "a", "version": ""}}
            await asked.answer(welcome)
        elif asked.message.get("method") == "tools/list":
            await asked.answer({"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in "ab"]})
        elif asked.message.get("method") == "tools/call":
            await self._call(asked)
        elif "method" in asked.message:
            await asked.reply(202)
        else:
            self.posting += 1
            self.most = max(self.most, self.posting)
            self.replies.append(asked.message)
            self.news.set()
            self.first.set()
            await self.gate.wait()
            self.posting -= 1
            await asked.reply(202)

    async def _call(self, asked: Asked) -> None:
        if asked.message["params"]["name"] == "b":
            await asked.answer({"content": [{"type": "text", "text": "at once"}]})
            return
        await asked.begin()
        await asked.chunk(b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in pings(self.count)))
        while len(self.replies) < self.count:
            self.news.clear()
            await self.news.wait()
        await asked.event(asked.result({"content": [{"type": "text", "text": "all answered"}]}))
        await asked.end()


R4 = "2025-11-25"


@requirement("CLI-41", "P-11")
async def test_500_pings_on_the_stream_of_a_call_are_all_answered_over_few_connections(
    ran: Ran, caplog: pytest.LogCaptureFixture
) -> None:
    ran(R4, "http")
    asking = Asking(500)
    asking.gate.set()
    async with rig(asking.script) as server, Client(server.url, revision=R4, timeout=PATIENCE) as client:
        assert (await client.call("a", {})).text == "all answered"
        assert sorted(each["id"] for each in asking.replies) == sorted(each["id"] for each in pings(500))
        assert all(each["result"] == {} for each in asking.replies)
        assert asking.most <= 8 and server.connections <= 16
        assert "dropped" not in caplog.text


async def test_replies_that_are_not_accepted_pause_the_stream_that_asks_and_no_other_call(ran: Ran) -> None:
    ran(R4, "http")
    asking, heard = Asking(2_000), 0

    def tap(direction: str, message: bytes) -> None:
        nonlocal heard
        heard += direction == "<" and b"ping-" in message

    async with (
        rig(asking.script) as server,
        Client(server.url, revision=R4, timeout=Clocks(total=10 * PATIENCE, idle=10 * PATIENCE), tap=tap) as client,
    ):
        await client.tools()
        call = asyncio.create_task(client.call("a", {}))
        await asking.was_replied_to()
        assert (await client.call("b", {})).text == "at once"  # although no reply was accepted yet
        await rounds(2_000)
        assert 8 <= heard <= 300  # so many wait, and the rest was not read
        assert asking.most <= 8 and server.connections <= 16
        asking.gate.set()
        async with asyncio.timeout(10 * PATIENCE):
            assert (await call).text == "all answered"
        assert sorted(each["id"] for each in asking.replies) == sorted(each["id"] for each in pings(2_000))


async def test_a_reply_whose_post_stays_unanswered_holds_up_no_call(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(R4, "http")
    monkeypatch.setattr(web, "CLOSE_SECONDS", 0.02)
    monkeypatch.setattr(web, "ORDER_SECONDS", 10 * PATIENCE)
    asking = Asking(1)
    async with rig(asking.script) as server, Client(server.url, revision=R4, timeout=PATIENCE) as client:
        assert (await client.call("a", {})).text == "all answered"
        assert asking.posting == 1
        assert (await client.call("b", {})).text == "at once"
        assert (await client.call("a", {})).text == "all answered"
        asking.gate.set()


async def test_cancellations_pass_the_same_gate_as_replies(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(R4, "http")
    monkeypatch.setattr(web, "CLOSE_SECONDS", 0.02)
    cancelled, gate = 0, asyncio.Event()
    posting = most = 0

    async def script(asked: Asked) -> None:
        nonlocal cancelled, posting, most
        if asked.message["method"] == "tools/call":
            await asked.gone()
        else:
            posting, cancelled = posting + 1, cancelled + 1
            most = max(most, posting)
            await gate.wait()
            posting -= 1
            await asked.reply(202)

    async with talking(script) as (server, talk):
        for number in range(50):
            message = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": number}}
            talk.link.send(json.dumps(message).encode(), None)
        await server.was_asked(8)
        await rounds()
        assert server.connections == 8
        gate.set()
        await server.was_asked(50)
        assert (cancelled, most) == (50, 8)
        assert server.connections <= 9


# Broken


@requirement("CLI-16", "P-11")
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 20",
        b"HTTP/1.1 200 OK\r\nContent-Type: appl",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"jsonrpc": "2.0",',
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {"jsonrpc": "2.0", "id": 1, "res',
        b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {"jsonrpc": "2.0", "id": 1, "result": {}}\n',
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"SSH-2.0-OpenSSH_9.2p1\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
async def test_what_breaks_after_it_was_sent_may_have_been_done(ran: Ran, said: bytes) -> None:
    ran(MODERN, "http")

    async def script(asked: Asked) -> None:
        await asked.send(said)
        asked.hang_up()
        await asked.gone()

    async with talking(script) as (server, talk):
        talk.link.set_revision(STATELESS)
        about = talk.begin()
        problem = await talk.problem(about)
        assert isinstance(problem, TransportError)
        assert problem.sent is Sent.UNKNOWN
        assert about.sent is Sent.UNKNOWN
        assert len(server.asked) == 1


async def test_an_answer_without_length_ends_with_its_connection() -> None:
    async def script(asked: Asked) -> None:
        await asked.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: ")
        await asked.send(json.dumps(asked.result()).encode() + b"\n\n")
        asked.hang_up()

    async with talking(script) as (server, talk):
        await talk.ask()
        await talk.ask()
        assert server.connections == 2


async def test_a_connection_that_was_kept_and_has_died_may_have_brought_the_request() -> None:
    async def script(asked: Asked) -> None:
        if asked.id == 1:
            await asked.answer()
        else:
            asked.hang_up()
            await asked.gone()

    async with talking(script) as (server, talk):
        await talk.ask()
        problem = await talk.problem()
        assert (problem.sent, server.connections, len(server.asked)) == (Sent.UNKNOWN, 1, 2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("url", "text"),
    [("http://127.0.0.1:{port}/x?key=hidden", "127.0.0.1"), ("http://nobody.invalid/", "the name cannot be resolved")],
)
async def test_what_could_not_be_sent_says_so(url: str, text: str) -> None:
    async with linked(url.format(port=free_port())) as talk:
        about = talk.begin()
        problem = await talk.problem(about)
        assert isinstance(problem, TransportError)
        assert (problem.sent, about.sent) == (Sent.NO, Sent.NO)
        assert text in str(problem)
        assert "hidden" not in str(problem)
        assert problem.hint


@pytest.mark.parametrize("junk", [b"zz\r\n", b"3\r\nabcX", b"HTTP/1.1 502 Bad Gateway\r\n\r\n"])
async def test_a_stream_that_goes_on_in_gibberish_is_broken(junk: bytes) -> None:
    async def script(asked: Asked) -> None:
        await asked.begin()
        await asked.event({"method": "notifications/progress"})
        await talk.notes.until(lambda: len(talk.notes.heard) % 2)
        if asked.id < 3:
            await asked.event(asked.result())
            await asked.end()
        else:
            await asked.send(junk)
            await asked.gone()

    async with talking(script) as (server, talk):
        await talk.ask()
        await talk.ask()
        problem = await talk.problem()
        assert problem.sent is Sent.UNKNOWN
        assert server.connections == 1


@linux
@requirement("P-11", everywhere=True)
async def test_a_peer_that_is_silent_for_long_is_asked_whether_it_is_there() -> None:
    async with talking(answers) as (server, talk):
        await talk.ask()
        assert asks_whether_there(int(server.url.split(":")[2].split("/")[0])) == [1]


def asks_whether_there(port: int) -> list[int]:
    """For each connection of this process to a port, whether it asks a silent peer if it is there."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        if link.is_socket():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as each:
                if each.family == socket.AF_INET and each.getpeername()[1] == port:
                    found.append(each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
    return found


@linux
@requirement("P-11", everywhere=True)
async def test_connecting_has_a_deadline() -> None:
    with socket.socket() as deaf, socket.socket() as first, socket.socket() as second:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for each in (first, second):  # the queue is full: what else comes, waits
            each.setblocking(False)
            each.connect_ex(deaf.getsockname())
        async with linked(f"http://127.0.0.1:{deaf.getsockname()[1]}/", connect_seconds=0.1) as talk:
            problem = await talk.problem()
            assert "within 0.1 s" in str(problem)
            assert (problem.sent, problem.kind) == (Sent.NO, "transport")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    made, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    options = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost".split()
    subprocess.run([openssl, *options, "-keyout", key, "-out", made], check=True, capture_output=True)
    return made, key


async def test_a_certificate_nobody_vouches_for_is_refused(certificate: tuple[str, str]) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    async with rig(answers, tls) as server, linked(server.url, headers={"Authorization": TOKEN}) as talk:
        problem = await talk.problem()
        assert problem.sent is Sent.NO
        assert "certificate" in str(problem)
        assert server.asked == []


async def test_https_to_a_server_without_it_says_so() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, linked(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/") as talk:
        problem = await talk.problem()
        assert problem.sent is Sent.NO


# Redirects


@pytest.mark.parametrize("status", [307, 308])
async def test_a_redirect_to_the_same_place_is_followed_with_all_that_was_sent(status: int) -> None:
    async def script(asked: Asked) -> None:
        if asked.target == "/mcp":
            await asked.reply(status, b"moved", "text/plain", Location="/new?a=%2F#part")
        elif asked.target.startswith("/new"):
            await asked.reply(status, Location=server.url.replace("/mcp", "/end"))
        else:
            await asked.answer(asked.message["params"])

    async with talking(script, headers={"Authorization": TOKEN}) as (server, talk):
        assert (await talk.ask(params={"a": 1}))["result"] == {"a": 1}
        assert [asked.target for asked in server.asked] == ["/mcp", "/new?a=%2F", "/end"]
        assert [asked.headers["authorization"] for asked in server.asked] == [TOKEN] * 3
        assert server.connections == 1


async def test_redirects_have_an_end() -> None:
    async def script(asked: Asked) -> None:
        await asked.reply(307, Location=f"{asked.target}x")

    async with talking(script) as (server, talk):
        problem = await talk.problem()
        assert isinstance(problem, HttpRefused)
        assert (problem.status, problem.sent, len(server.asked)) == (307, Sent.FAILED, 4)


@requirement("P-27", everywhere=True)
@pytest.mark.parametrize(
    "where", ["http://{other}/", "//{other}/x", "https://{same}/mcp", "http://me@{same}/", "", "http://["]
)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_to_anywhere_else_is_not_followed(status: int, where: str) -> None:
    async with rig(answers) as other:

        async def script(asked: Asked) -> None:
            places = {"other": other.url.split("/")[2], "same": server.url.split("/")[2]}
            await asked.reply(status, Location=where.format(**places))

        async with talking(script, headers={"Authorization": TOKEN}) as (server, talk):
            problem = await talk.problem()
            assert isinstance(problem, HttpRefused)
            assert (problem.status, len(server.asked), other.connections) == (status, 1, 0)


# Who is calling


class Tokens:
    """Gives a new token each time the server wants another, so often."""

    def __init__(self, more: int = 0) -> None:
        self.count = 0
        self.more = more
        self.asked: list[tuple[str, int, str]] = []

    async def headers(self, url: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {TOKEN}-{self.count}"}

    async def challenged(self, url: str, status: int, challenge: str) -> bool:
        self.asked.append((url, status, challenge))
        self.count += 1
        return self.count <= self.more


def wants(*steps: tuple[int, str]) -> Script:
    """A server that refuses so often before it answers."""
    left = list(steps)

    async def script(asked: Asked) -> None:
        if left:
            status, challenge = left.pop(0)
            await asked.reply(status, {**ERROR, "id": asked.id}, WWW_Authenticate=challenge)
        else:
            await asked.answer(asked.headers.get("authorization"))

    return script


SCOPE = 'Bearer error="insufficient_scope", scope="files:write"'


async def test_a_server_that_wants_a_token_and_gets_none() -> None:
    async with talking(wants((401, 'Bearer realm="x"'), (403, SCOPE))) as (server, talk):
        for status in (401, 403):
            problem = await talk.problem()
            assert isinstance(problem, AuthorizationError)
            assert problem.sent is Sent.FAILED
            assert f"HTTP {status}" in str(problem)
            assert problem.hint
        assert server.connections == 1


async def test_a_challenge_is_met_once_and_the_request_repeated() -> None:
    tokens = Tokens(9)
    async with talking(wants((401, "Bearer a"), (403, SCOPE)), auth=tokens) as (server, talk):
        assert (await talk.ask(params={"x": 1}))["result"] == f"Bearer {TOKEN}-2"
        assert tokens.asked == [(server.url, 401, "Bearer a"), (server.url, 403, SCOPE)]
        assert [asked.headers["authorization"][-2:] for asked in server.asked] == ["-0", "-1", "-2"]
        assert len({asked.body for asked in server.asked}) == 1


async def test_a_request_that_was_turned_away_counts_as_not_sent() -> None:
    class Watching(Tokens):
        async def headers(self, url: str) -> dict[str, str]:
            seen.append(talk.notes.waiting[1].sent)
            return {}

        async def challenged(self, url: str, status: int, challenge: str) -> bool:
            seen.append(talk.notes.waiting[1].sent)
            return True

    async def script(asked: Asked) -> None:
        if asked.target == "/x":
            await asked.answer()
        else:
            await asked.reply(401 if len(server.asked) == 1 else 307, Location="/x")

    seen: list[Sent] = []
    async with talking(script, auth=Watching()) as (server, talk):
        await talk.ask()
        assert seen == [Sent.NO] * 4


@pytest.mark.parametrize("more", [9, 0])
async def test_a_challenge_that_comes_again_or_cannot_be_met_is_an_error(more: int) -> None:
    tokens = Tokens(more)
    async with talking(wants(*[(401, "Bearer a")] * 3), auth=tokens) as (server, talk):
        problem = await talk.problem()
        assert isinstance(problem, AuthorizationError)
        assert len(tokens.asked) == 1
        assert len(server.asked) == 1 + (more > 0)
        assert TOKEN not in str(problem)


async def test_a_plain_403_is_not_a_challenge() -> None:
    tokens = Tokens(9)
    async with talking(wants((403, "Bearer")), auth=tokens) as (_, talk):
        assert "error" in await talk.ask()
        assert tokens.asked == []


@pytest.mark.parametrize("problem", [AuthorizationError("no browser"), RuntimeError("a bug"), OSError("a disk")])
async def test_who_cannot_show_who_is_calling_is_told_to_the_caller(
    problem: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Tokens):
        async def headers(self, url: str) -> dict[str, str]:
            raise problem

    async with talking(answers, auth=Broken()) as (server, talk):
        found = await talk.problem()
        assert found is problem or isinstance(found, TransportError)
        assert found.sent is Sent.NO
        talk.link.send(INITIALIZED, None)
        await talk.problem()
        assert server.asked == []


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost"])
async def test_a_token_in_the_clear_is_warned_about_once(host: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with rig(answers) as server, linked(server.url.replace("127.0.0.1", host), auth=Tokens()) as talk:
        for _ in range(3):
            await talk.ask()
    assert caplog.text.count("in the clear") == (host == "0.0.0.0")
    assert TOKEN not in caplog.text


async def test_without_a_token_nothing_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    async with rig(answers) as server, linked(server.url.replace("127.0.0.1", "0.0.0.0")) as talk:
        await talk.ask()
    assert caplog.text == ""


# Sessions


@requirement("CLI-13", "CLI-14")
@pytest.mark.parametrize("revision", ["2025-06-18", "2025-11-25", "pocket"])
async def test_a_session_is_named_in_all_that_follows_and_ended_at_the_end(ran: Ran, revision: str) -> None:
    ran(revision, "http")
    async with rig(session_server(answers)) as server:
        async with linked(server.url) as talk:
            await talk.shake_hands(REVISIONS[revision])
            assert talk.link.session == SESSION
            await talk.ask("tools/list")
            await server.was_asked(1, "GET")
        first, *others = server.asked
        assert "mcp-session-id" not in first.headers
        assert "mcp-protocol-version" not in first.headers
        assert [asked.method for asked in others] in (
            ["POST", "POST", "GET", "DELETE"],
            ["POST", "GET", "POST", "DELETE"],
        )
        assert {asked.headers["mcp-session-id"] for asked in others} == {SESSION}
        assert {asked.headers["mcp-protocol-version"] for asked in others} == {revision}


@requirement("CLI-14")
async def test_a_revision_without_the_version_header_does_not_send_it(ran: Ran) -> None:
    ran("2025-03-26", "http")
    revision: Any = SimpleNamespace(name="2025-03-26", stateless=False, version_header=False)
    async with talking(session_server(answers)) as (server, talk):
        await talk.shake_hands(revision)
        await talk.ask("tools/list")
        assert all("mcp-protocol-version" not in asked.headers for asked in server.asked)
        assert server.asked[-1].headers["mcp-session-id"] == SESSION


@requirement("CLI-08")
async def test_a_stateless_request_has_the_headers_it_was_given_and_no_session(ran: Ran) -> None:
    ran(MODERN, "http")

    async def script(asked: Asked) -> None:
        await (asked.answer(Mcp_Session_Id="a-trap") if "id" in asked.message else asked.reply(202))

    params: Object = {"name": "größe", "arguments": {}, "_meta": ENVELOPE}
    headers = {"MCP-Protocol-Version": MODERN, **mirrored_headers("tools/call", params, {})}
    async with rig(script) as server:
        async with linked(server.url) as talk:
            await talk.ask("server/discover", headers=headers)
            await talk.ask("initialize")
            talk.link.set_revision(STATELESS)
            await talk.ask("tools/call", params=params, headers=headers)
            talk.link.send(INITIALIZED, None)
            await server.was_asked(4)
        assert all("mcp-session-id" not in asked.headers for asked in server.asked)
        assert server.asked[2].headers["mcp-name"] == "=?base64?Z3LDtsOfZQ==?="
        assert server.asked[2].headers["mcp-protocol-version"] == MODERN
        assert [asked.method for asked in server.asked] == ["POST"] * 4


async def test_a_session_id_that_cannot_be_sent_back_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async with talking(session_server(answers, session="a b")) as (server, talk):
        await talk.shake_hands()
        await talk.ask()
        assert talk.link.session == ""
        assert all("mcp-session-id" not in asked.headers for asked in server.asked)
        assert "session id" in caplog.text


@requirement("CLI-13")
@pytest.mark.parametrize(
    "body", [b"", json.dumps({**ERROR, "id": 3}).encode(), b'{"jsonrpc":"2.0","id":2,"result":{}}']
)
async def test_a_session_the_server_has_forgotten_is_forgotten(ran: Ran, body: bytes) -> None:
    ran("2025-11-25", "http")

    async def script(asked: Asked) -> None:
        if asked.headers["mcp-session-id"] == SESSION:
            await asked.reply(404, body)
        else:
            await asked.answer("new")

    sessions = iter([SESSION, "s-2"])

    async def server_script(asked: Asked) -> None:
        is_opening = (asked.message or {}).get("method") == "initialize"
        await session_server(script, session=next(sessions) if is_opening else "")(asked)

    async with rig(server_script) as server:
        async with linked(server.url) as talk:
            await talk.shake_hands()
            waiting = [talk.begin(), talk.begin()]
            for about in waiting:
                problem = await talk.problem(about)
                assert isinstance(problem, HttpRefused)
                assert (problem.status, problem.sent) == (404, Sent.FAILED)
            assert talk.link.session == ""
            await talk.shake_hands()
            assert talk.link.session == "s-2"
            assert (await talk.ask())["result"] == "new"
        opened = [asked for asked in server.asked if (asked.message or {}).get("method") == "initialize"]
        assert all("mcp-session-id" not in asked.headers for asked in opened)
        assert [asked.headers["mcp-session-id"] for asked in server.asked if asked.method == "DELETE"] == ["s-2"]


@pytest.mark.parametrize("seen", ["request", "note", "stream"])
async def test_a_session_known_to_be_gone_is_not_ended_again(seen: str) -> None:
    async def script(asked: Asked) -> None:
        message = asked.message or {}
        if message.get("method") == "initialize":
            await asked.answer(Mcp_Session_Id=SESSION)
        elif message.get("method", "").startswith("notifications/"):
            await asked.reply(404 if seen == "note" else 202)
        else:
            await asked.reply(404)

    async with rig(script) as server:
        async with linked(server.url) as talk:
            await talk.shake_hands()
            if seen == "stream":
                await server.was_asked(1, "GET")
                await rounds(200)
            elif seen == "request":
                await talk.problem()
            else:
                await server.was_asked(2)
        assert [asked.method for asked in server.asked if asked.method == "DELETE"] == []


@requirement("CLI-02")
async def test_a_request_waits_until_the_handshake_was_confirmed(ran: Ran) -> None:
    ran("2025-11-25", "http")
    gate = asyncio.Event()

    async def script(asked: Asked) -> None:
        if asked.message.get("method") == "notifications/initialized":
            await gate.wait()
            await asked.reply(202)
        else:
            await asked.answer()

    async with talking(script) as (server, talk):
        revision: Any = SimpleNamespace(name="", stateless=False, version_header=False)  # so that nothing listens
        await talk.ask("initialize")
        talk.link.set_revision(revision)
        talk.link.send(INITIALIZED, None)
        about = talk.begin()
        await server.was_asked(2)
        await rounds()
        assert len(server.asked) == 2
        gate.set()
        await talk.settled(about)


async def test_a_request_does_not_wait_for_what_is_sent_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "CLOSE_SECONDS", 0.02)

    async def script(asked: Asked) -> None:
        if "id" in asked.message:
            await asked.answer()
        else:
            await asked.gone()

    async with talking(script) as (_, talk):
        talk.link.set_revision(HANDSHAKE)
        about = talk.begin()
        talk.link.send(INITIALIZED, None)
        await talk.settled(about)
        late = talk.begin()
        await rounds()
        assert not late.future.done()
        talk.link.cancel(late)


async def rounds(count: int = 50) -> None:
    """Let everything happen that can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_notification_nobody_accepts_holds_up_requests_only_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web, "ORDER_SECONDS", 0.02)
    monkeypatch.setattr(web, "CLOSE_SECONDS", 0.02)

    async def script(asked: Asked) -> None:
        if "id" in asked.message:
            await asked.answer()
        else:
            await asked.gone()

    async with talking(script) as (_, talk):
        talk.link.set_revision(HANDSHAKE)
        talk.link.send(INITIALIZED, None)
        await talk.ask()


@pytest.mark.parametrize("status", [200, 202, 204, 400, 500])
async def test_what_becomes_of_a_notification_is_nobodys_business(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def script(asked: Asked) -> None:
        await (asked.answer() if "id" in asked.message else asked.reply(status, b"" if status == 204 else b"{}"))

    async with talking(script) as (server, talk):
        talk.link.send(INITIALIZED, None)
        await talk.ask()
        await server.was_asked(2)
        assert (talk.notes.losses, len(talk.notes.heard), caplog.text) == ([], 1, "")


async def test_a_notification_to_nobody_is_nobodys_business(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with linked(f"http://127.0.0.1:{free_port()}/") as talk:
        talk.link.send(INITIALIZED, None)
        await talk.problem()
        assert (len(talk.notes.losses), caplog.text) == (1, "")


# What is said unasked

CHANGED = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}


@requirement("CLI-15")
async def test_what_the_server_says_unasked_is_heard_and_the_stream_opened_again(ran: Ran, quick: None) -> None:
    ran("2025-11-25", "http")

    async def stream(asked: Asked) -> None:
        count = len([each for each in server.asked if each.method == "GET"])
        if count == 2:
            asked.hang_up()
        elif count == 3:
            await asked.reply(503, b"later", "text/plain")
        else:
            await asked.begin()
            await asked.chunk(b": here\n\nid: ev-%d\xc3\xa4\nretry: 1\n\n" % count)
            await rounds()
            await asked.event(CHANGED)
            if count == 5:
                await asked.gone()
            await asked.end()

    async with talking(session_server(answers, streams=stream)) as (server, talk):
        await talk.shake_hands()
        last = await server.was_asked(5, "GET")
        await talk.notes.until(lambda: len(talk.notes.heard) == 4)
        gets = [asked for asked in server.asked if asked.method == "GET"]
        assert [asked.headers.get("last-event-id") for asked in gets] == [None, *["ev-1ä"] * 3, "ev-4ä"]
        assert gets[0].headers["accept"] == EVENTS
        assert gets[0].headers["mcp-session-id"] == SESSION
        assert gets[0].headers["mcp-protocol-version"] == HANDSHAKE.name
        assert "content-type" not in gets[0].headers
        assert talk.notes.heard[1:] == [(CHANGED, None)] * 3
        assert talk.notes.signs == []  # of no request
        assert last.headers["last-event-id"] == "ev-4ä"


@pytest.mark.parametrize("status", [200, 400, 404, 405, 307])
async def test_a_server_with_nothing_to_say_unasked_is_asked_once(status: int, quick: None) -> None:
    async def stream(asked: Asked) -> None:
        await asked.reply(status, b"{}")

    async with talking(session_server(answers, streams=stream)) as (server, talk):
        await talk.shake_hands()
        await server.was_asked(1, "GET")
        talk.link.send(INITIALIZED, None)
        await talk.ask()
        await rounds()
        assert len([asked for asked in server.asked if asked.method == "GET"]) == 1


async def test_nothing_is_listened_to_where_that_would_open_the_older_transport() -> None:
    async def script(asked: Asked) -> None:
        await (asked.answer() if "id" in asked.message else asked.reply(202))

    async with talking(script) as (server, talk):
        revision: Any = SimpleNamespace(name="", stateless=False, version_header=False)
        await talk.shake_hands(revision)
        await talk.ask()
        await rounds()
        assert [asked.method for asked in server.asked] == ["POST"] * 3


async def test_an_event_too_long_is_told_and_the_stream_goes_on() -> None:
    async def stream(asked: Asked) -> None:
        await asked.begin()
        await asked.chunk(b"data: " + b"x" * 2000 + b"\n\n")
        await asked.event(CHANGED)
        await asked.gone()

    async with talking(session_server(answers, streams=stream), max_message_bytes=1000) as (_, talk):
        await talk.shake_hands()
        await talk.notes.until(lambda: len(talk.notes.heard) == 2)
        assert talk.notes.left_out == ["an event of over 1,000 bytes (too long)"]


async def test_a_new_session_has_a_new_stream() -> None:
    async def stream(asked: Asked) -> None:
        await asked.begin()
        await asked.gone()

    async with talking(session_server(answers, streams=stream)) as (server, talk):
        await talk.shake_hands()
        first = await server.was_asked(1, "GET")
        await talk.shake_hands()
        await server.was_asked(2, "GET")
        async with asyncio.timeout(PATIENCE):
            await first.is_over.wait()
        opened = [asked for asked in server.asked if (asked.message or {}).get("method") == "initialize"]
        assert [asked.headers.get("mcp-session-id") for asked in opened] == [None, None]


# Coming back to a stream


def breaking(how: str, *more: Script, **fields: Any) -> tuple[Script, Script]:
    """A stream that begins with an event of these fields and breaks; and what the GETs that follow are answered."""
    rest = list(more)
    asked_first: list[Asked] = []

    async def begins(asked: Asked) -> None:
        asked_first.append(asked)
        await asked.begin()
        await asked.event(**fields)
        if how == "ends":
            await asked.end()
        else:
            asked.hang_up()
            await asked.gone()

    async def resumed(asked: Asked) -> None:
        if "last-event-id" not in asked.headers:
            await asked.reply(405)
            return
        asked.message = asked_first[0].message
        await rest.pop(0)(asked)

    return begins, resumed


async def on_stream(asked: Asked) -> None:
    await asked.begin()
    await asked.event(asked.result("at last"))
    await asked.end()


async def one_more(asked: Asked) -> None:
    await asked.begin()
    await asked.event({"method": "notifications/progress"}, id="second")
    await asked.end()


@requirement("CLI-15")
@pytest.mark.parametrize("how", ["ends", "breaks"])
async def test_a_stream_that_broke_is_resumed_after_its_last_event(ran: Ran, quick: None, how: str) -> None:
    ran("2025-11-25", "http")
    begins, resumed = breaking(how, one_more, on_stream, id="first one", retry=1)
    async with talking(session_server(begins, streams=resumed)) as (server, talk):
        await talk.shake_hands()
        about = talk.begin()
        assert (await talk.settled(about))["result"] == "at last"
        gets = [asked for asked in server.asked if "last-event-id" in asked.headers]
        assert [asked.headers["last-event-id"] for asked in gets] == ["first one", "second"]
        for asked in gets:
            assert (asked.method, asked.headers["accept"], asked.body) == ("GET", EVENTS, b"")
            assert asked.headers["mcp-session-id"] == SESSION
            assert asked.headers["mcp-protocol-version"] == HANDSHAKE.name
        assert [who for _, who in talk.notes.heard[1:]] == [about, about]


@requirement("CLI-15")
async def test_the_opening_itself_may_be_resumed(ran: Ran, quick: None) -> None:
    ran("2025-11-25", "http")

    async def script(asked: Asked) -> None:
        if asked.method == "POST":
            await asked.begin(Mcp_Session_Id=SESSION)
            await asked.event(id="e", retry=1)
            await asked.end()
        else:
            asked.message = server.asked[0].message
            await on_stream(asked)

    async with talking(script) as (server, talk):
        assert (await talk.ask("initialize"))["result"] == "at last"
        assert server.asked[1].headers["mcp-session-id"] == SESSION


@requirement("CLI-15")
async def test_the_time_the_server_names_is_waited_for(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    ran("2025-11-25", "http")
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(web.asyncio, "sleep", sleep)  # type: ignore[attr-defined]  # where it is imported to

    async def nothing(asked: Asked) -> None:
        await asked.begin()
        await asked.end()

    async def unwell(asked: Asked) -> None:
        await asked.reply(502)

    begins, resumed = breaking("ends", nothing, unwell, one_more, one_more, on_stream, id="x", retry=500)
    async with talking(session_server(begins, streams=resumed)) as (_, talk):
        await talk.shake_hands()
        await talk.ask()
        assert slept == [0.5, 1.0, 2.0, 0.5, 0.5]


def test_how_long_to_wait() -> None:
    mark = ResumableStream(1000)
    assert [mark.pause(count) for count in (0, 1, 2, 4, 5, 6, 10_000)] == [1, 2, 4, 16, 30, 30, 30]
    mark.update_position(ServerSentEvent(retry_ms=500))
    assert [mark.pause(count) for count in (0, 1, 9)] == [0.5, 1, 30]
    mark.update_position(ServerSentEvent(retry_ms=60_000))
    assert [mark.pause(count) for count in (0, 1, 9)] == [60, 60, 60]
    for said, wait in ((0, 0.1), (10**15 - 1, 300)):
        mark.update_position(ServerSentEvent(retry_ms=said))
        assert mark.pause(0) == wait
    for ident, last in (("a", "a"), ("", ""), ("b", "b"), ("c\x01", ""), ("ä" * 2048, "ä" * 2048), ("x" * 2049, "")):
        mark.update_position(ServerSentEvent(event_id=ident))
        assert mark.last_event_id == last


@requirement("CLI-15")
@pytest.mark.parametrize("status", [400, 404, 405, 200, 401])
async def test_a_stream_the_server_will_not_resume_is_lost(ran: Ran, quick: None, status: int) -> None:
    ran("2025-11-25", "http")

    async def refuses(asked: Asked) -> None:
        await asked.reply(status, {**ERROR, "id": asked.id})

    begins, resumed = breaking("ends", refuses, id="x", retry=1)
    async with talking(session_server(begins, streams=resumed)) as (_, talk):
        await talk.shake_hands()
        problem = await talk.problem()
        assert problem.sent is Sent.UNKNOWN
        assert isinstance(problem, AuthorizationError if status == 401 else HttpRefused)
        assert talk.link.session == ("" if status == 404 else SESSION)


@requirement("CLI-15", "P-35")
async def test_a_stream_with_nothing_more_to_say_is_given_up(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    ran("2025-11-25", "http")
    monkeypatch.setattr(web, "MAX_BACK_OFF_SECONDS", 0.001)
    monkeypatch.setattr(web, "MIN_RETRY_SECONDS", 0.001)

    async def nothing(asked: Asked) -> None:
        await asked.begin()
        await asked.end()

    begins, resumed = breaking("ends", *[nothing] * 20, id="x", retry=0)
    async with talking(session_server(begins, streams=resumed)) as (server, talk):
        await talk.shake_hands()
        problem = await talk.problem()
        assert problem.sent is Sent.UNKNOWN
        assert len([asked for asked in server.asked if "last-event-id" in asked.headers]) == 10


@requirement("CLI-16")
@pytest.mark.parametrize("how", ["ends", "breaks"])
async def test_a_broken_stream_of_a_stateless_revision_is_lost(ran: Ran, how: str) -> None:
    ran(MODERN, "http")
    begins, _ = breaking(how, id="x", retry=1)
    async with talking(begins) as (server, talk):
        talk.link.set_revision(STATELESS)
        problem = await talk.problem()
        assert problem.sent is Sent.UNKNOWN
        assert [asked.method for asked in server.asked] == ["POST"]


async def test_a_stream_without_ids_is_lost() -> None:
    begins, resumed = breaking("ends", retry=1)
    async with talking(session_server(begins, streams=resumed)) as (server, talk):
        await talk.shake_hands()
        problem = await talk.problem()
        assert problem.sent is Sent.UNKNOWN
        assert not [asked for asked in server.asked if "last-event-id" in asked.headers]


# Nobody waits any more


async def waits(asked: Asked) -> None:
    await asked.gone()


async def streams_and_waits(asked: Asked) -> None:
    await asked.begin()
    await asked.event({"method": "notifications/progress"}, id="x", retry=1)
    await asked.gone()


async def answers_slowly(asked: Asked) -> None:
    await asked.begin(JSON)
    await asked.chunk(b'{"jsonrpc"')
    await asked.gone()


@requirement("CLI-25")
@pytest.mark.parametrize("revision", [MODERN, "2025-11-25"])
@pytest.mark.parametrize("script", [waits, streams_and_waits, answers_slowly])
async def test_giving_up_closes_the_connection(ran: Ran, script: Script, revision: str) -> None:
    ran(revision, "http")
    closed = asyncio.Event()

    async def run(asked: Asked) -> None:
        if asked.id == 1:
            await script(asked)
            closed.set()
        else:
            await asked.answer()

    async with talking(run) as (server, talk):
        talk.link.set_revision(REVISIONS[revision])
        about = talk.begin()
        await server.was_asked(1)
        if script is streams_and_waits:
            await talk.notes.until(lambda: talk.notes.heard)
        talk.link.cancel(about)
        talk.link.cancel(about)
        async with asyncio.timeout(PATIENCE):
            await closed.wait()
        await talk.ask()
        assert server.connections == 2
        assert talk.notes.losses == []


@linux
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n: hello\n\n"])
async def test_giving_up_while_the_server_does_not_read_closes_the_connection(said: bytes) -> None:
    """Closing alone would wait until the server has taken the rest."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads as well
        writer.write(said)
        came.set_result(writer)

    came: asyncio.Future[asyncio.StreamWriter] = asyncio.Future()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with linked(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/") as talk:
        before = descriptors()
        about = talk.begin(params={"text": "x" * 20_000_000})
        writer = await came
        if said:
            await talk.notes.signs_to(1)
        await rounds(200)
        assert about.sent is Sent.UNKNOWN
        assert descriptors() == before + 2
        talk.link.cancel(about)
        await rounds()
        assert descriptors() == before + 1
        writer.transport.abort()
        server.close()


async def test_a_connection_that_is_reset_while_nobody_uses_it_is_nobodys_business(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(asked: Asked) -> None:
        await asked.begin()
        await asked.event(asked.result())
        await talk.settled(talk.notes.waiting[asked.id])
        await asked.end()
        await rounds()
        asked.reset()

    async with talking(script) as (server, talk):
        for count in (1, 2):
            await talk.ask()
            await server.idle()
            await rounds()
            gc.collect()
            assert server.connections == count
        assert caplog.text == ""


@requirement("CLI-25")
async def test_what_is_said_not_to_have_been_sent_does_not_leave_later(ran: Ran) -> None:
    """The stream of 2024 ends while a request still waits for its token."""
    ran("2024-11-05", "http")
    gate = asyncio.Event()

    class Slow(Tokens):
        async def headers(self, url: str) -> dict[str, str]:
            self.count += 1
            if self.count > 1:
                await gate.wait()
            return await super().headers(url)

    script, opened = old_server("/messages")
    async with talking(script, transport="sse", auth=Slow()) as (server, talk):
        about = talk.begin("initialize")
        (await opened).hang_up()
        await talk.problem(about)
        assert about.sent is Sent.NO  # as a client says
        gate.set()
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait({about.task})
        assert [asked.method for asked in server.asked] == ["GET"]


async def test_giving_up_before_it_was_sent_sends_nothing() -> None:
    async with talking(answers) as (server, talk):
        about = talk.begin()
        talk.link.cancel(about)
        await talk.ask()
        assert about.sent is Sent.NO
        assert [asked.id for asked in server.asked] == [2]


# The older transport


def old_server(endpoint: str, *, first: bytes = b"") -> tuple[Script, asyncio.Future[Asked]]:
    """HTTP+SSE of 2024: answers come on the stream."""
    opened: asyncio.Future[Asked] = asyncio.get_running_loop().create_future()

    async def script(asked: Asked) -> None:
        if asked.method == "GET":
            await asked.begin()
            await asked.chunk(b": hello\n\n" + (first or f"event: endpoint\ndata: {endpoint}\n\n".encode()))
            opened.set_result(asked)
            await asked.gone()
        elif not asked.target.startswith("/messages"):
            await asked.reply(405)
        else:
            await asked.reply(202, b"Accepted", "text/plain")
            if "id" in asked.message:
                await (await opened).event(asked.result(asked.target), event="message")

    return script, opened


@pytest.mark.parametrize("endpoint", ["/messages?s=1", "messages?s=1", "http://{place}/messages?s=1"])
@pytest.mark.parametrize("transport", ["auto", "sse"])
async def test_the_transport_of_2024(ran: Ran, endpoint: str, transport: str) -> None:
    ran("2024-11-05", "http")
    place = ""

    async def script(asked: Asked) -> None:
        await inner(asked)

    async with rig(script) as server:
        place = server.url.split("/")[2]
        inner, _ = old_server(endpoint.format(place=place))
        async with linked(server.url, transport=transport, headers={"Authorization": TOKEN}) as talk:
            if transport == "auto":
                problem = await talk.problem(talk.begin("initialize"))
                assert isinstance(problem, HttpRefused)
                assert problem.status == 405
                assert await talk.link.fall_back()
            assert not await talk.link.fall_back()
            about = talk.begin("initialize")
            assert (await talk.settled(about))["result"] == "/messages?s=1"
            talk.link.set_revision(REVISIONS["2024-11-05"])
            talk.link.send(INITIALIZED, None)
            assert (await talk.ask())["result"] == "/messages?s=1"
            assert talk.notes.heard[-1][1] is None
            assert talk.notes.signs == [None] * len(talk.notes.signs)
            assert len([asked for asked in server.asked if asked.method == "GET"]) == 1
        assert {asked.headers["authorization"] for asked in server.asked} == {TOKEN}
        assert [asked.method for asked in server.asked if asked.method == "DELETE"] == []


@requirement("P-27", everywhere=True)
@pytest.mark.parametrize("endpoint", ["http://{other}/messages", "//{other}/messages", "https://{same}/messages"])
@pytest.mark.parametrize("transport", ["auto", "sse"])
async def test_messages_are_not_sent_to_another_place(endpoint: str, transport: str) -> None:
    async def script(asked: Asked) -> None:
        await inner(asked)

    async with rig(answers) as other, rig(script) as server:
        inner, _ = old_server(endpoint.format(other=other.url.split("/")[2], same=server.url.split("/")[2]))
        with pytest.raises(TransportError, match="another place"):
            async with linked(server.url, transport=transport, headers={"Authorization": TOKEN}) as talk:
                await talk.link.fall_back()
        await server.idle()
        assert other.connections == 0
        assert [asked.method for asked in server.asked] == ["GET"]


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (405, "", b""),
        (404, EVENTS, b"event: endpoint\ndata: /x\n\n"),
        (200, JSON, b"{}"),
        (200, EVENTS, b""),
        (200, EVENTS, b"data: {}\n\nevent: endpoint\ndata: /x\n\n"),
    ],
)
async def test_a_server_without_it_is_recognised(status: int, kind: str, body: bytes) -> None:
    async def script(asked: Asked) -> None:
        await (asked.answer() if asked.method == "POST" else asked.reply(status, body, kind))

    async with talking(script) as (server, talk):
        assert not await talk.link.fall_back()
        await talk.ask()
        with pytest.raises(TransportError, match="no event stream"):
            await HttpClientTransport(server.url, transport="sse").open(Notes())
    async with talking(script, transport="streamable") as (server, talk):
        assert not await talk.link.fall_back()
        assert server.asked == []


async def test_the_opening_of_the_older_transport_has_a_deadline() -> None:
    async def script(asked: Asked) -> None:
        await asked.begin()
        await asked.chunk(b": hello\n\n")
        await asked.gone()

    async with talking(script, connect_seconds=0.1) as (server, talk):
        with pytest.raises(TransportError, match=r"within 0\.1 s"):
            await talk.link.fall_back()
        await server.idle()
    async with linked(f"http://127.0.0.1:{free_port()}/") as talk:
        with pytest.raises(TransportError, match="no connection") as failed:
            await talk.link.fall_back()
        assert failed.value.__context__ is None  # which would hold the headers


@pytest.mark.parametrize("how", ["ends", "breaks"])
async def test_when_the_only_stream_ends_everything_is_lost(how: str) -> None:
    async def script(asked: Asked) -> None:
        if asked.method == "POST":
            await asked.reply(202)
            return
        await asked.begin()
        await asked.chunk(b"event: endpoint\ndata: /x\n\ndata: 12")
        await server.was_asked(2, "POST")
        await (asked.end() if how == "ends" else asked.send(b"zz"))
        asked.hang_up()

    async with rig(script) as server, linked(server.url, transport="sse") as talk:
        waiting = [talk.begin(), talk.begin()]
        problems = [await talk.problem(about) for about in waiting]
        assert [each.sent for each in problems] == [Sent.UNKNOWN] * 2
        assert [about for _, about in talk.notes.losses] == [None]
        late = await talk.problem()
        assert late.sent is Sent.NO
        assert len(server.asked) == 3


async def test_what_comes_with_the_address_to_post_to_is_heard() -> None:
    async def script(asked: Asked) -> None:
        await asked.begin()
        await asked.chunk(b"event: endpoint\ndata: /x\n\ndata: %b\n\n" % json.dumps(CHANGED).encode())
        await asked.gone()

    async with talking(script, transport="sse") as (_, talk):
        await talk.notes.until(lambda: talk.notes.heard)
        assert talk.notes.heard == [(CHANGED, None)]


async def test_a_refusal_of_the_older_transport_is_one() -> None:
    async def script(asked: Asked) -> None:
        if asked.method == "GET":
            await asked.begin()
            await asked.chunk(b"event: endpoint\ndata: /x\n\n: alive\n\n")
            await asked.gone()
        else:
            await asked.reply(500, b"no")

    async with talking(script, transport="sse") as (_, talk):
        problem = await talk.problem()
        assert isinstance(problem, HttpRefused)
        assert problem.sent is Sent.UNKNOWN


# The end


@requirement("CLI-13")
@pytest.mark.parametrize("how", ["204", "405", "500", "hangs", "breaks"])
async def test_closing_ends_the_session_in_bounded_time(ran: Ran, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran("2025-11-25", "http")
    monkeypatch.setattr(web, "CLOSE_SECONDS", 0.05 if how == "hangs" else 5.0)

    async def script(asked: Asked) -> None:
        if asked.method != "DELETE":
            await session_server(waits)(asked)
        elif how == "hangs":
            await asked.gone()
        elif how == "breaks":
            asked.hang_up()
        else:
            await asked.reply(int(how))

    async with rig(script) as server:
        async with linked(server.url) as talk:
            await talk.shake_hands()
            about = talk.begin()
            await server.was_asked(3, "POST")
            await talk.link.close()
            await talk.link.close()
            ended = [asked for asked in server.asked if asked.method == "DELETE"]
            assert {asked.headers["mcp-session-id"] for asked in ended} == {SESSION}
            assert not about.future.done()
            assert talk.notes.losses == []
            late = await talk.problem()
            assert late.sent is Sent.NO
            talk.link.send(INITIALIZED, None)
        await server.idle()


async def test_closing_that_is_broken_off_leaves_nothing_behind() -> None:
    async with talking(waits) as (server, talk):
        talk.begin()
        talk.link.send(INITIALIZED, None)
        await server.was_asked(2)
        closing = asyncio.create_task(talk.link.close())
        await rounds()
        closing.cancel()
        await asyncio.wait({closing})
        assert closing.cancelled()
        assert talk.notes.losses == []
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "handrail web"]
        await server.idle()


async def test_a_message_sent_just_before_closing_still_leaves() -> None:
    async with rig(session_server(answers)) as server:
        async with linked(server.url) as talk:
            await talk.shake_hands()
        assert server.asked[1].body == INITIALIZED


async def test_closing_in_the_middle_of_anything_leaves_nothing_behind() -> None:
    async def script(asked: Asked) -> None:
        scripts = [waits, streams_and_waits, answers_slowly, answers]
        if asked.method == "GET":
            await streams_and_waits(asked)
        else:
            await session_server(scripts[(asked.message or {}).get("id", 0) % 4])(asked)

    async with rig(script) as server:
        for count in range(8):
            await server.idle()
            gc.collect()
            before = descriptors(), asyncio.all_tasks()
            async with linked(server.url) as talk:
                await talk.shake_hands()
                for _ in range(count):
                    talk.begin()
                await rounds(count * 10)
            await server.idle()
            gc.collect()
            assert (descriptors(), asyncio.all_tasks()) == before


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


# Against our own server


@pytest.mark.parametrize("revision", [*REVISIONS])
async def test_our_own_server_is_spoken_to_in_every_revision(ran: Ran, revision: str) -> None:
    ran(revision, "http")
    server = Server("subject", version="1")

    @server.tool
    async def greet(name: str) -> str:
        """Say hello."""
        return f"hello {name}"

    spoken = REVISIONS[revision]
    is_old = revision.startswith("2024")
    async with served(server.asgi()) as url:
        async with linked(url, transport="sse" if is_old else "auto") as talk:
            params: Object = {"name": "greet", "arguments": {"name": "Zoë"}}
            if spoken.stateless:
                talk.link.set_revision(spoken)
                params["_meta"] = ENVELOPE
                headers = {"MCP-Protocol-Version": revision, **mirrored_headers("tools/call", params, {})}
            else:
                info = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "me", "version": "1"}}
                assert (await talk.ask("initialize", params=info))["result"]["protocolVersion"] == revision
                talk.link.set_revision(spoken)
                talk.link.send(INITIALIZED, None)
                headers = {}
                assert bool(talk.link.session) is not is_old
            for _ in range(3):
                told = await talk.ask("tools/call", params=params, headers=headers)
                assert "hello Zoë" in json.dumps(told, ensure_ascii=False)
            if not spoken.stateless:

                @server.tool
                async def added() -> str:
                    """Was not there before."""
                    return "new"

                await talk.notes.until(lambda: any("list_changed" in str(said) for said, _ in talk.notes.heard))
        assert talk.notes.losses == []
