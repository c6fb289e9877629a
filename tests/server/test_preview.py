"""What a call would do, in its author's words, before a person decides: `@server.tool(preview=…)`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clients import ALL, R4, R5
from handrail import Call, Server, ToolError
from handrail.approvals.queue import Approval, Approvals
from handrail.audit.reader import TrailFile
from handrail.engine import preview as previews
from handrail.errors import RemoteProtocolError, SchemaError
from handrail.guards.policy import Policy, Rule
from handrail.stores.memory import MemoryStore
from handrail.testing import Peer
from requirements import requirement

Object = dict[str, Any]
Ran = Callable[[str, str], None]

DESTROYS = {"destructiveHint": True}
HELD = Approvals(wait=0.01, round=0.001, by="operator")


@dataclass
class Order:
    number: int
    lines: list[str]


def shop(preview: Any, **options: Any) -> Server:
    server = Server("shop", **{"approvals": HELD, "store": MemoryStore(), **options})

    @server.tool(title="Cancel an order", annotations=DESTROYS, preview=preview)
    async def cancel(order: Order, fast: bool = False) -> str:
        """Cancels an order, and pays back what it cost."""
        return f"order {order.number} is cancelled"

    return server


async def question(server: Server, arguments: Object | None = None) -> Approval:
    """The question about one call."""
    async with Peer(server, revision=R4) as peer:
        answer = await peer.call("cancel", arguments or {"order": {"number": 7, "lines": ["tea"]}})
        assert answer.is_error and "waits for a person's approval" in answer.text
        (waiting,) = await server.approvals.open()
    return waiting


def plain(order: Order) -> str:
    return f"{order.number}: {', '.join(order.lines)}"


async def waiting(order: Order, fast: bool) -> str:
    await asyncio.sleep(0)
    return f"{order.number}: {', '.join(order.lines)}{' fast' if fast else ''}"


def with_call(call: Call, order: Order, more: int = 3) -> str:
    return f"{order.number}: {', '.join(order.lines)} of {call.name} for {call.principal.id} {more}"


@requirement("APP-04", everywhere=True)
@pytest.mark.parametrize(
    ("preview", "shown"),
    [
        (plain, "7: tea"),
        (waiting, "7: tea"),
        (with_call, "7: tea of cancel for local 3"),
        (lambda order: {"lines": order.lines}, '{\n  "lines": [\n    "tea"\n  ]\n}'),
        (lambda order, **rest: f"{order.number} {sorted(rest)}", "7 ['fast']"),
        (lambda: "all of them", "all of them"),
        (lambda order: None, ""),
    ],
)
async def test_a_preview_gets_the_arguments_of_the_tool_and_is_kept_with_the_question(preview: Any, shown: str) -> None:
    assert (await question(shop(preview))).preview == shown


@requirement("APP-04", "P-33", "P-34", everywhere=True)
async def test_a_preview_is_masked_inert_and_bounded_and_on_record(tmp_path: Path) -> None:
    file = tmp_path / "audit.db"
    text = "pays with canary-8d1f2c\x1b[2J\u202e\npassword=hunter2hunter2 " + "x" * 100_000
    made = await question(shop(lambda order: text, store=None, audit=file, secrets=["canary-8d1f2c"]))
    assert made.preview.startswith("pays with ****\npassword=****")
    assert len(made.preview) == previews.MAX_CHARACTERS and made.preview.endswith("x…")
    assert not {"\x1b", "\u202e"} & set(made.preview)
    records = [json.loads(line) for _, line in TrailFile(file).lines()]
    assert [each["preview"] for each in records if each.get("step") == "asked"] == [made.preview]


@requirement("P-34", everywhere=True)
async def test_p34_a_preview_does_not_show_what_is_masked_in_the_arguments() -> None:
    server = Server("shop", approvals=HELD, store=MemoryStore())

    @server.tool(annotations=DESTROYS, preview=lambda password, keys: f"{password} and {keys} and 12345678")
    async def cancel(password: str, keys: dict[str, Any]) -> str:
        return ""

    made = await question(server, {"password": "correct horse", "keys": {"token": ["a battery"], "api_key": 12345678}})
    assert made.preview == "**** and {'token': ['****'], 'api_key': ****} and ****"


@requirement("P-34", everywhere=True)
@pytest.mark.parametrize("padding", [" ", "\u200b", "password=hunter2hunter2\n"])
async def test_p34_a_preview_that_is_cut_shows_no_part_of_a_secret(padding: str) -> None:
    begins = (padding * previews.MAX_CLEANED_CHARACTERS)[: previews.MAX_CLEANED_CHARACTERS - 10]
    made = await question(shop(lambda order: f"{begins} canary-8d1f2c and more", secrets=["canary-8d1f2c"]))
    assert "canary" not in made.preview


async def test_a_preview_changes_no_argument_of_the_call() -> None:
    server = Server("shop", approvals=HELD, store=MemoryStore())

    def preview(order: Any, call: Call) -> str:
        order["number"] = call.arguments["order"]["lines"] = 8
        return "looked at"

    @server.tool(annotations=DESTROYS, preview=preview)
    async def cancel(order: Any) -> str:
        return ""

    arguments = {"order": {"number": 7, "lines": []}}
    made = await question(server, arguments)
    assert (made.preview, made.asked.arguments) == ("looked at", arguments)


def failing(order: Order) -> str:
    raise ToolError("no such order")


def broken(order: Order) -> str:
    raise KeyError("canary-8d1f2c")


async def asking(call: Call, order: Order) -> str:
    return str(await call.ask("What?", {"type": "object", "properties": {}}))


async def cancelled(order: Order) -> str:
    raise asyncio.CancelledError


async def never(order: Order) -> str:
    await asyncio.Event().wait()
    return ""


@pytest.mark.parametrize(
    ("preview", "shown"),
    [
        (failing, "preview failed: no such order"),
        (broken, "preview failed: KeyError"),
        (asking, "preview failed: a preview cannot ask questions"),
        (never, "preview failed: no answer within 0.01 s"),
        (lambda order: threading.Event().wait(30), "preview failed: no answer within 0.01 s"),
        (lambda order: b"7", "preview failed: NotJson"),
        (cancelled, "preview failed: CancelledError"),
    ],
)
@pytest.mark.parametrize("revision", [R4, R5])
async def test_a_preview_that_fails_says_so_and_the_call_can_be_approved(
    preview: Any, shown: str, revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "no answer" in shown:
        monkeypatch.setattr(previews, "TIMEOUT_SECONDS", 0.01)
    server = shop(preview)
    arguments = {"order": {"number": 7, "lines": []}}
    async with Peer(server, revision=revision, capabilities={"elicitation": {}}) as peer:
        assert (await peer.call("cancel", arguments)).is_error
        (waiting,) = await server.approvals.open()
        assert waiting.preview == shown
        await server.approvals.decide(waiting.id, True, by="operator")
        assert (await peer.call("cancel", arguments)).text == "order 7 is cancelled"


async def test_previews_that_hang_leave_the_threads_of_tools_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previews, "TIMEOUT_SECONDS", 0.01)
    ends = threading.Event()
    server = shop(lambda order: ends.wait(60), workers=2)

    @server.tool
    def here() -> str:
        return "here"

    try:
        async with Peer(server, revision=R4) as peer:
            for number in range(6):
                await peer.call("cancel", {"order": {"number": number, "lines": []}})
            assert (await peer.call("here")).text == "here"
    finally:
        ends.set()


async def test_a_preview_runs_after_rules_and_validation_and_once_for_a_question() -> None:
    ran: list[int] = []
    rule = Rule(verdict="deny", tools=["cancel"], arguments={"fast": {"is": True}})
    server = shop(lambda order: ran.append(order.number), policy=Policy([rule]))
    async with Peer(server, revision=R4) as peer:
        assert (await peer.call("cancel", {"order": {"number": "x", "lines": []}})).is_error
        with contextlib.suppress(RemoteProtocolError):  # how a rule's no is told
            assert (await peer.call("cancel", {"order": {"number": 1, "lines": []}, "fast": True})).is_error
        assert ran == []
        for _ in range(3):
            assert (await peer.call("cancel", {"order": {"number": 7, "lines": []}})).is_error
    assert ran == [7]


@requirement("APP-04")
@pytest.mark.parametrize("revision", [each for each in ALL if each >= "2025-06-18"])
async def test_the_question_to_the_client_says_what_will_happen(revision: str, ran: Ran) -> None:
    asked: list[str] = []

    def answers(method: str, params: Object) -> Object:
        asked.append(params["message"])
        return {"action": "decline"}

    server = shop(lambda order: f"refunds 12 €\nAsked by nobody: {order.number}", approvals=Approvals())
    async with Peer(server, revision=revision, capabilities={"elicitation": {}}, answers=answers) as peer:
        ran(revision, "memory")
        assert (await peer.call("cancel", {"order": {"number": 7, "lines": []}})).is_error
    assert asked == [
        "Allow Cancel an order (cancel) on shop?\n"
        "Cancels an order, and pays back what it cost.\n"
        '{"order":{"number":7,"lines":[]}}\n'
        "Preview:\n| refunds 12 €\n| Asked by nobody: 7\n"
        "Asked because it counts as destructive, and no rule says otherwise."
    ]


@requirement("APP-04", everywhere=True)
@pytest.mark.parametrize(
    ("preview", "problem"),
    [
        (lambda ordr: "", "parameter 'ordr' is not an argument of the tool; did you mean 'order'?"),
        (lambda *args: "", "arguments come by name"),
        ("a text", "expected a function that takes the tool's arguments, got str"),
    ],
)
def test_a_preview_that_cannot_be_called_is_refused_when_it_is_given(preview: Any, problem: str) -> None:
    with pytest.raises(SchemaError, match="tool 'cancel': preview: ") as refused:
        shop(preview)
    assert problem in str(refused.value)


async def test_a_caller_waits_or_has_left() -> None:
    server = shop(plain, approvals=Approvals(wait=30, by="operator"))
    arguments, desk = {"order": {"number": 7, "lines": []}}, server.approvals
    async with Peer(server, revision=R4, timeout=60) as peer:
        async with server.engine.guard_set.store.subscribe("approvals") as news:
            call = asyncio.create_task(peer.call("cancel", arguments))
            await anext(news)
        (question,) = await desk.open()
        assert await desk.is_caller_waiting(question)
        await desk.decide(question.id, True, by="operator")
        assert not (await call).is_error
        assert not await desk.is_caller_waiting(question)
    server.guard(approvals=HELD)
    async with Peer(server, revision=R4) as peer:
        assert "Call it again" in (await peer.call("cancel", arguments)).text
        (question,) = await server.approvals.open()
        assert not await server.approvals.is_caller_waiting(question)
