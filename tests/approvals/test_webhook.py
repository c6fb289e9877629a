"""A webhook decides what it is asked, if it says so in a way only it could; nothing else it does matters (P-19)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from hmac import new as hmac
from pathlib import Path
from typing import Any

import pytest

from cli_runs import handrail
from clients import R1, R4, R5
from handrail import Principal, Server
from handrail.approvals import webhook
from handrail.approvals.queue import ApprovalQueue, ApprovalRequest, Approvals
from handrail.approvals.webhook import Webhook, WebhookSender
from handrail.config import ConfigError, read
from handrail.stores import Store
from handrail.stores.memory import MemoryStore
from handrail.stores.sqlite import SqliteStore
from handrail.testing import Peer
from patience import PATIENCE
from requirements import requirement
from wires_http1 import certificate

__all__ = ["certificate"]  # a fixture

Object = dict[str, Any]
Reply = bytes | None  # None: nothing is ever said
Ran = Callable[[str, str], None]

NOW = 1_000_000
SECRET = "nW8-qv3Zt_6rKx1LbY0s"
OTHER = "u5Rk-2Qw_9sTb4VhXy7m"


def signed(body: bytes, *, at: float = NOW, secret: str = SECRET, status: str = "200 OK") -> bytes:
    """A whole answer, as somebody else would write it from the description."""
    stamp = str(int(at))
    mac = hmac(secret.encode(), stamp.encode() + b"." + body, sha256).hexdigest()
    return whole(body, status, f"Handrail-Timestamp: {stamp}", f"handrail-signature: v1={mac}")


def whole(body: bytes, status: str, *headers: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers])
    return head.encode() + b"\r\n\r\n" + body


def says(question: Object, decision: str = "approve", **more: Any) -> bytes:
    return json.dumps({"id": question["id"], "digest": question["digest"], "decision": decision, **more}).encode()


class Receiver:
    """Who is asked. `reply` says what each question is answered with; `gone` is set when nobody waits for that."""

    def __init__(self, reply: Callable[[Object], Reply]) -> None:
        self.reply = reply
        self.heads: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.asked, self.answered, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @property
    def questions(self) -> list[Object]:
        return [json.loads(body) for body in self.bodies]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        head = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        self.heads.append({"": first, **head})
        self.bodies.append(await reader.readexactly(int(head["content-length"])))
        reply = self.reply(self.questions[-1])
        self.asked.set()
        try:
            if reply is None:
                assert await reader.read(1) == b""
                self.gone.set()
            else:
                writer.write(reply)
                await writer.drain()
                self.answered.set()
        except ConnectionError:
            self.gone.set()
        finally:
            writer.close()

    @asynccontextmanager
    async def listening(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=tls)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/ask?token=t0ken-in-the-address"


class Lines(logging.Handler):
    """What is logged, and when."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.came = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        self.came.set()

    async def first(self) -> str:
        await soon(self.came.wait())
        return self.lines[0]


@pytest.fixture
async def logged(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lines]:
    monkeypatch.setenv("HOOK", SECRET)
    lines = Lines()
    logging.getLogger("handrail").addHandler(lines)
    yield lines
    logging.getLogger("handrail").removeHandler(lines)
    assert not any(SECRET in line or "t0ken" in line for line in lines.lines)


async def soon(what: Awaitable[Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        return await what


class Shop:
    def __init__(
        self, url: str, *, seconds: float = 30.0, wait: float = 30.0, by: Any = "operator", **options: Any
    ) -> None:
        hook = Webhook(url=url, secret_variable="HOOK", seconds=seconds)
        asking = Approvals(wait=wait, round=wait, by=by, webhook=hook)
        self.cancelled: list[int] = []
        self.server = Server("shop", approvals=asking, **options)
        self.server.engine.clock = lambda: float(NOW)

        @self.server.tool(annotations={"destructiveHint": True})
        async def cancel(order: int) -> str:
            self.cancelled.append(order)
            return f"order {order} is cancelled"

    @property
    def desk(self) -> ApprovalQueue:
        return self.server.approvals

    async def only(self) -> str:
        (waiting,) = await self.desk.open()
        assert waiting.state == "pending"
        return waiting.id


@requirement("P-19")
@pytest.mark.parametrize("revision", [R1, R4, R5])
async def test_p19_a_webhook_approves_denies_and_edits(revision: str, ran: Ran, logged: Lines) -> None:
    said: list[Object] = [
        {"decision": "approve"},
        {"decision": "deny", "note": "not on Sundays"},
        {"decision": "approve", "edited": {"order": 8}},
    ]
    receiver = Receiver(lambda question: signed(says(question, **said.pop(0))))
    async with receiver.listening() as url:
        shop = Shop(url)
        async with Peer(shop.server, revision=revision) as peer:
            ran(revision, "memory")
            assert (await peer.call("cancel", {"order": 1})).text == "order 1 is cancelled"
            denied = await peer.call("cancel", {"order": 2})
            assert denied.is_error and "not on Sundays" in denied.text
            assert (await peer.call("cancel", {"order": 3})).text == "order 8 is cancelled"
        first = receiver.questions[0]["id"]
        known = await shop.desk.get(first)
    assert shop.cancelled == [1, 8]
    assert known is not None and known.by == "webhook 127.0.0.1" and known.state == "consumed"
    assert len(receiver.bodies) == 3 and logged.lines == []


@requirement("P-19")
async def test_p19_a_yes_with_arguments_the_tool_does_not_take_leaves_the_question_open(logged: Lines) -> None:
    receiver = Receiver(lambda question: signed(says(question, edited={"order": "no number"})))
    async with receiver.listening() as url:
        shop = Shop(url)
        async with Peer(shop.server, revision=R4) as peer:
            call = asyncio.create_task(peer.call("cancel", {"order": 4}))
            assert "has not decided" in (said := await logged.first()) and "order: expected integer" in said
            await shop.desk.decide(await shop.only(), True, by="somebody else")
            assert (await soon(call)).text == "order 4 is cancelled"
    assert shop.cancelled == [4]


async def test_the_question_says_everything_and_is_signed(logged: Lines) -> None:
    receiver = Receiver(lambda question: signed(says(question)))
    async with receiver.listening() as url:
        shop = Shop(url)
        async with Peer(shop.server, revision=R4, principal=Principal("alice")) as peer:
            await peer.call("cancel", {"order": 7})
    (head,), (body,), (question,) = receiver.heads, receiver.bodies, receiver.questions
    rule = question.pop("rule")
    assert rule.startswith("built in") and len(question.pop("id")) == 10 and len(question.pop("digest")) == 64
    assert question == {
        "server": "shop",
        "tool": "cancel",
        "principal": "alice",
        "arguments": {"order": 7},
        "expires": NOW + 900.0,
    }
    assert head[""].startswith("POST /ask?token=") and head["content-type"] == "application/json"
    assert head["handrail-timestamp"] == str(NOW)
    mac = hmac(SECRET.encode(), f"{NOW}.".encode() + body, sha256).hexdigest()
    assert head["handrail-signature"] == f"v1={mac}"


def changed(question: Object, **other: str) -> Object:
    return {**question, **other}


WRONG: dict[str, tuple[Callable[[Object], Reply], str]] = {
    "another secret": (lambda q: signed(says(q), secret=OTHER), "not signed"),
    "no signature": (lambda q: whole(says(q), "200 OK", f"Handrail-Timestamp: {NOW}"), "not signed"),
    "no timestamp": (lambda q: whole(says(q), "200 OK"), "no timestamp"),
    "a signature that is no text": (
        lambda q: whole(says(q), "200 OK", f"Handrail-Timestamp: {NOW}", "Handrail-Signature: v1=\xff\u2028"),
        "not signed",
    ),
    "signed for another body": (lambda q: signed(says(q, note="a")).replace(b'"a"', b'"b"'), "not signed"),
    "stale": (lambda q: signed(says(q), at=NOW - 301), "not fresh"),
    "from the future": (lambda q: signed(says(q), at=NOW + 301), "not fresh"),
    "another id": (lambda q: signed(says(changed(q, id="0123456789"))), "another question"),
    "another digest": (lambda q: signed(says(changed(q, digest="0" * 64))), "another question"),
    "our own question back": (lambda q: signed(json.dumps(q).encode()), "has not decided"),
    "no decision we know": (lambda q: signed(says(q, "approve\x1b[2J\n")), "has not decided"),
    "a member nobody knows": (lambda q: signed(says(q, "approve", **{"editd\x1b[2J\n": {}})), "editd\\x1b[2J"),
    "garbage": (lambda q: signed(b"\x00\xff"), "has not decided"),
    "nested too deeply": (lambda q: signed(says(q)[:-1] + b',"edited":{"a":' + b"[" * 60_000), "has not decided"),
    "too long": (lambda q: signed(says(q, note="x" * 65_536)), "more than 65,536 bytes"),
    "without end": (lambda q: whole(b"x" * 10_000_000, "200 OK"), "more than 65,536 bytes"),
    "a redirect": (lambda q: whole(b"", "307 Temporary Redirect", "Location: /approve"), "status 307"),
    "an error": (lambda q: signed(says(q), status="500 Oops"), "status 500"),
    "no HTTP": (lambda q: b"approve\r\n\r\n", "ClientResponseError"),
    "nothing, and it hangs up": (lambda q: b"", "ServerDisconnectedError"),
}


@requirement("P-19")
@pytest.mark.parametrize("how", WRONG)
async def test_p19_what_is_not_a_right_answer_leaves_the_question_open(how: str, logged: Lines) -> None:
    reply, why = WRONG[how]
    receiver = Receiver(reply)
    async with receiver.listening() as url:
        shop = Shop(url)
        async with Peer(shop.server, revision=R4) as peer:
            call = asyncio.create_task(peer.call("cancel", {"order": 7}))
            line = await logged.first()
            await shop.desk.decide(await shop.only(), True, by="operator")
            assert not (await call).is_error
    assert why in line and line.isprintable() and len(logged.lines) == 1 and len(receiver.bodies) == 1


@requirement("P-19")
@pytest.mark.parametrize("quicker", ["webhook", "client"])
async def test_p19_whoever_decides_first_has_decided(quicker: str, logged: Lines) -> None:
    receiver = Receiver(lambda question: signed(says(question)) if quicker == "webhook" else None)

    async def answer(method: str, params: Object) -> Object:
        await receiver.asked.wait()
        if quicker == "webhook":
            await asyncio.Event().wait()
        return {"action": "accept", "content": {}}

    async with receiver.listening() as url:
        shop = Shop(url, by="anyone")
        async with Peer(shop.server, revision=R4, capabilities={"elicitation": {}}, answers=answer) as peer:
            assert not (await peer.call("cancel", {"order": 7})).is_error
        known = await shop.desk.get(receiver.questions[0]["id"])
    assert known is not None and known.by == {"webhook": "webhook 127.0.0.1", "client": "local"}[quicker]
    assert shop.cancelled == [7] and logged.lines == []


@requirement("P-19")
async def test_p19_an_answer_is_good_for_one_question_only(logged: Lines) -> None:
    """The same call asked about again has the same digest, and still it is another question."""
    replies: list[bytes] = []

    def first_again(question: Object) -> Reply:
        replies.append(signed(says(question)))
        return replies[0]

    receiver = Receiver(first_again)
    async with receiver.listening() as url:
        shop = Shop(url)
        async with Peer(shop.server, revision=R4) as peer:
            assert not (await peer.call("cancel", {"order": 7})).is_error
            call = asyncio.create_task(peer.call("cancel", {"order": 7}))
            assert "another question" in await logged.first()
            await shop.desk.decide(await shop.only(), False, by="operator")
            assert (await call).is_error
    assert shop.cancelled == [7] and receiver.questions[0]["digest"] == receiver.questions[1]["digest"]


async def test_202_leaves_it_to_others(logged: Lines) -> None:
    receiver = Receiver(lambda question: whole(b"", "202 Accepted"))
    async with receiver.listening() as url:
        shop = Shop(url)
        async with Peer(shop.server, revision=R4) as peer:
            call = asyncio.create_task(peer.call("cancel", {"order": 7}))
            await soon(receiver.answered.wait())
            await shop.desk.decide(await shop.only(), True, by="operator")
            assert not (await call).is_error
    assert logged.lines == []


async def test_a_silent_receiver_delays_nothing_and_is_given_up(logged: Lines) -> None:
    receiver = Receiver(lambda question: None)
    async with receiver.listening() as url:
        shop = Shop(url, seconds=0.05, wait=0.01)
        async with Peer(shop.server, revision=R4) as peer:
            assert "waits for a person's approval" in (await peer.call("cancel", {"order": 7})).text
            assert "no answer in time" in await logged.first()
            await soon(receiver.gone.wait())
            await shop.only()


@pytest.mark.parametrize("end", ["decided", "closed"])
async def test_nobody_goes_on_waiting_for_what_is_over(end: str, logged: Lines) -> None:
    receiver = Receiver(lambda question: None)
    async with receiver.listening() as url:
        shop = Shop(url, wait=0.01)
        async with Peer(shop.server, revision=R4) as peer:
            await peer.call("cancel", {"order": 7})
            await soon(receiver.asked.wait())
            if end == "decided":
                await shop.desk.decide(await shop.only(), True, by="operator")
                await soon(receiver.gone.wait())
        await soon(receiver.gone.wait())
    assert logged.lines == []


async def test_a_receiver_that_is_down_is_said_once(logged: Lines) -> None:
    async with Receiver(lambda question: None).listening() as url:
        pass
    shop = Shop(url, wait=0.01)
    async with Peer(shop.server, revision=R4) as peer:
        await peer.call("cancel", {"order": 7})
        assert "ClientConnectorError" in await logged.first()
        await peer.call("cancel", {"order": 7})  # the same question: it is not put again
        await shop.only()
    assert len(logged.lines) == 1


async def test_a_receiver_nobody_vouches_for_is_not_asked(logged: Lines, certificate: tuple[str, str]) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    receiver = Receiver(lambda question: signed(says(question)))
    async with receiver.listening(tls) as url:
        shop = Shop(url.replace("http:", "https:"), wait=0.01)
        async with Peer(shop.server, revision=R4) as peer:
            await peer.call("cancel", {"order": 7})
            assert "CertificateError" in await logged.first()
            await shop.only()
    assert receiver.bodies == []


@requirement("P-19")
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_p19_of_two_servers_on_one_store_the_one_that_filed_it_asks(
    kind: str, logged: Lines, tmp_path: Path
) -> None:
    receiver = Receiver(lambda question: signed(says(question)))
    store: Store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "state.db")
    async with receiver.listening() as url:
        shops = [Shop(url, store=store) for _ in range(2)]
        async with Peer(shops[0].server, revision=R4) as one, Peer(shops[1].server, revision=R4) as two:
            answers = await asyncio.gather(*(peer.call("cancel", {"order": 7}) for peer in (one, two)))
    await store.close()
    assert len(receiver.bodies) == 1
    assert sorted(answer.is_error for answer in answers) == [False, True]  # and it was approved once


@requirement("P-34")
async def test_p34_the_secret_is_in_no_result_log_or_record(logged: Lines, tmp_path: Path) -> None:
    receiver = Receiver(lambda question: signed(says(question), secret=[SECRET, OTHER][question["arguments"]["wrong"]]))
    async with receiver.listening() as url:
        shop = Shop(url, audit=(audit := tmp_path / "audit.jsonl"), audit_arguments=True)

        @shop.server.tool(annotations={"destructiveHint": True})
        async def dump(wrong: int, told: str = "") -> str:
            logging.getLogger("handrail").warning("the environment is %r", os.environ["HOOK"])
            return f"HOOK={os.environ['HOOK']}"

        async with Peer(shop.server, revision=R4) as peer:
            assert (await peer.call("dump", {"wrong": 0, "told": SECRET})).text.startswith("HOOK=")
            logged.came.clear()
            call = asyncio.create_task(peer.call("dump", {"wrong": 1, "told": SECRET}))
            await soon(logged.came.wait())
            await shop.desk.decide(await shop.only(), False, by="operator")
            assert (await call).is_error and not any(SECRET.encode() in each for each in peer.wire)
    record = audit.read_bytes()
    assert b"webhook 127.0.0.1" in record and SECRET.encode() not in record
    assert len(logged.lines) == 2  # and the fixture looks for the secret in them


async def test_no_more_than_so_many_are_asked_at_once(logged: Lines) -> None:
    begun, full = 0, asyncio.Event()

    async def never(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
        nonlocal begun
        begun += 1
        if begun == webhook.MAX_PENDING_REQUESTS:
            full.set()
        await asyncio.Event().wait()
        raise AssertionError

    desk = ApprovalQueue(MemoryStore(), clock=lambda: float(NOW))
    sender = WebhookSender(Webhook(url="https://example.com/", secret_variable="HOOK"), desk, never)
    desk.on_created = sender.send
    for number in range(webhook.MAX_PENDING_REQUESTS + 1):
        asked = ApprovalRequest("shop", f"p{number % 2}", "cancel", "f", {"order": number}, "1")
        await desk.find_or_create(asked)
    assert "100 questions are there already" in await logged.first()
    await soon(full.wait())
    await sender.close()
    assert begun == webhook.MAX_PENDING_REQUESTS and len(logged.lines) == 1


# Settings


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"url": "http://example.com/x"}, "https is needed"),
        ({"url": "http://10.0.0.1/x"}, "https is needed"),
        ({"url": "http://127.0.0.1.example.com/"}, "https is needed"),
        ({"url": "ftp://example.com/x"}, "https is needed"),
        ({"url": "https:///x"}, "https is needed"),
        ({"url": "https://me:t0ken@example.com/"}, "no password"),
        ({"url": "https://example.com/", "seconds": 0}, "approvals.webhook.seconds: 0"),
        ({"url": "https://example.com/", "secret_variable": ""}, "secret_variable: name the environment variable"),
        ({"url": "https://example.com/", "second": 9}, "approvals.webhook.second: unknown key; did you mean 'seconds'"),
    ],
)
def test_settings_that_cannot_be_used(section: Object, complaint: str) -> None:
    with pytest.raises(ConfigError) as told:
        read({"approvals": {"webhook": {"secret_variable": "HOOK", **section}}})
    assert complaint in str(told.value) and "t0ken" not in str(told.value)


@pytest.mark.parametrize(
    "url", ["https://example.com/x", "http://localhost:1/", "http://[::1]:1/", "http://127.9.9.9/"]
)
def test_settings_that_can(url: str) -> None:
    made = read({"approvals": {"webhook": {"url": url, "secret_variable": "HOOK"}}})
    assert made.approvals.webhook == Webhook(url=url, secret_variable="HOOK", seconds=60.0)
    assert read({}).approvals.webhook.url == ""


def test_a_webhook_with_nothing_to_decide() -> None:
    with pytest.raises(ValueError, match="nothing to decide"):
        Approvals(by="caller", webhook=Webhook(url="https://example.com/", secret_variable="HOOK"))


@pytest.mark.parametrize("secret", [None, "", "short", "changeme-changeme-1", "aaaaaaaaaaaaaaaaaaaa"])
def test_a_missing_or_weak_secret_prevents_the_start(secret: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    if secret is not None:
        monkeypatch.setenv("HOOK", secret)
    with pytest.raises(ValueError, match=r"HOOK is (weak|not set); use 16 or more random characters") as told:
        Shop("https://example.com/")
    assert not secret or secret not in str(told.value)


def test_the_command_line_says_so_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("from handrail import Server\nserver = Server('shop')\n")
    section = '[approvals.webhook]\nurl = "https://example.com/"\nsecret_variable = "HOOK"\n'
    (tmp_path / "handrail.toml").write_text(section)
    done = handrail("serve", "shop.py", home=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "HOOK is not set" in done.stderr


def test_without_the_extra_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ModuleNotFoundError, match=r"approvals\.webhook needs aiohttp: python -m pip install 'uvicorn"):
        Webhook(url="https://example.com/", secret_variable="HOOK")
