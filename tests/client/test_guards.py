"""The client's own guards, which are the server's: the record of its calls, and rules that decide them."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from clients import R4, R5, OpenRig, open_rig
from handrail import Client, Confirmation, allow
from handrail.audit.format import verify
from handrail.audit.log import open_trail
from handrail.audit.reader import TrailFile
from handrail.errors import ConfirmationRequired, Denied, InvalidResult, PeerError, Sent, TransportError, Unrecorded
from handrail.guards.policy import Policy, Rule
from requirements import requirement
from rigs import Object, Rig, ordinary
from rigs_client import destructive, is_call, never_answers, pulls_the_rug

__all__ = ["open_rig"]


@pytest.fixture(params=["calls.db", "calls.jsonl"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def records(file: Path) -> list[Object]:
    """What is on the disk, and whole, without what the trail says of itself."""
    assert verify(TrailFile(file).lines()).flaw is None
    found = [json.loads(line) for _, line in TrailFile(file).lines()]
    return [each for each in found if each["event"] in ("intent", "outcome", "refusal")]


def outcomes(file: Path) -> list[tuple[str, str, str]]:
    return [(each["event"], each.get("outcome", ""), each.get("sent", "")) for each in records(file)]


# The record


@requirement("CLI-26", "P-15")
async def test_p15_nothing_is_sent_before_it_is_on_the_disk(open_rig: OpenRig, file: Path) -> None:
    found: list[list[Object]] = []

    def looks(rig: Rig, message: Object) -> None:
        if is_call(message):
            found.append(records(file))
        ordinary(rig, message)

    async with open_rig(looks, R5, "memory", audit=file, trusted=True) as (client, _):
        result = await client.call("echo", {"token": "hunter2"})
        ((intent,),) = found
        assert [each["event"] for each in records(file)] == ["intent", "outcome"]
        assert intent["fingerprint"] == (await client.tools())["echo"].fingerprint
    outcome = records(file)[1]
    assert (outcome["outcome"], outcome["call"]) == ("ok", intent["call"])
    assert outcome["characters"] == len(result.text) and outcome["seconds"] > 0
    assert intent.items() >= {"side": "client", "server": "rig", "tool": "echo", "agreed": "unconfirmed"}.items()
    assert "hunter2" not in json.dumps([intent, outcome])


@requirement("P-17", everywhere=True)
async def test_p17_what_cannot_be_recorded_is_not_sent(open_rig: OpenRig, tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    async with open_rig("ordinary", R5, "memory", audit=file) as (client, heard):
        file.write_text("this is no trail")
        with pytest.raises(Unrecorded, match="move it away") as caught:
            await client.call("echo", {})
        assert caught.value.sent is Sent.NO and not heard.asked("tools/call")
        file.unlink()
        await client.call("echo", {})  # without a restart
    assert [each[:2] for each in outcomes(file)] == [("refusal", "unrecorded"), ("intent", ""), ("outcome", "ok")]


@requirement("P-15", everywhere=True)
@pytest.mark.parametrize("fails", [False, True])
async def test_p15_a_result_that_cannot_be_recorded_is_withheld(
    open_rig: OpenRig, tmp_path: Path, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "calls.jsonl"

    def spoils(rig: Rig, message: Object) -> None:
        if is_call(message):
            file.write_text("this is no trail")
            if fails:
                return rig.error(message, -32000, "secret: 7")
        return ordinary(rig, message)

    async with open_rig(spoils, R5, "memory", audit=file) as (client, _):
        with pytest.raises(Unrecorded, match="withheld") as caught:
            await client.call("echo", {})
        assert caught.value.sent is Sent.UNKNOWN
    assert "not written" in caplog.text


async def test_a_record_that_cannot_be_begun_is_told_before_anything_is_started(tmp_path: Path) -> None:
    rig = Rig("ordinary", R5)
    with pytest.raises(Unrecorded, match="calls cannot be recorded"):
        async with Client(rig, revision=R5, audit=tmp_path / "nowhere" / "calls.jsonl"):
            pass
    with pytest.raises(ValueError, match=r"\.jsonl"):
        async with Client(rig, revision=R5, audit="calls.txt"):
            pass
    assert not rig.heard


@requirement("CLI-26", "CLI-27", everywhere=True)
async def test_a_call_that_was_not_sent_leaves_one_record(open_rig: OpenRig, file: Path) -> None:
    def odd(rig: Rig, message: Object) -> None:
        rig.tools = [{"name": "long", "description": "x" * 20_000, "inputSchema": {}}, {"name": "echo"}]
        rig.tools.append({"name": "wipe", "annotations": {"destructiveHint": True}})
        ordinary(rig, message)

    def breaks(call: Confirmation) -> bool:
        raise RuntimeError("a handler of the user's")

    async with open_rig(odd, R5, "memory", audit=file) as (client, heard):
        for name, confirm, problem in (
            ("echo", lambda _: False, Denied),
            ("echo", breaks, RuntimeError),
            ("wipe", None, ConfirmationRequired),
            ("long", None, InvalidResult),
        ):
            with pytest.raises(problem):
                await client.call(name, {}, confirm=confirm)
        await client.close()
        with pytest.raises(TransportError):
            await client.call("echo", {})  # too late for the record as well
        assert not heard.asked("tools/call")
    kinds = ("denied", "internal", "confirmation", "invalid_result")
    assert outcomes(file) == [("refusal", kind, "not sent") for kind in kinds]


async def test_a_server_that_is_gone_is_on_record_as_not_called(file: Path) -> None:
    rig = Rig("ordinary", R5)
    async with Client(rig, revision=R5, audit=file) as client:
        await client.tools()

        def gone(rig: Rig, message: Object) -> None:
            rig.die()

        rig.script = gone
        rig.die()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not client.servers["rig"].connection.is_open
        with pytest.raises(PeerError) as caught:
            await client.call("echo", {})
        assert caught.value.sent is Sent.NO
    assert [(event, sent) for event, _, sent in outcomes(file)] == [("refusal", "not sent")]


@pytest.mark.parametrize("ends", ["cancel", "close"])
async def test_who_ends_a_call_finds_its_end_on_record(open_rig: OpenRig, file: Path, ends: str) -> None:
    async with open_rig(never_answers, R4, "memory", audit=file) as (client, heard):
        call = asyncio.create_task(client.call("echo", {}))
        await heard.rig.wait_for("tools/call")
        if ends == "cancel":
            call.cancel()
        else:
            await client.close()
        with pytest.raises(asyncio.CancelledError if ends == "cancel" else TransportError):
            await call
        kind = "cancelled" if ends == "cancel" else "transport"
        assert outcomes(file) == [("intent", "", ""), ("outcome", kind, "sent, outcome unknown")]


async def test_a_call_that_outlives_its_client_is_recorded_and_closes_the_file(open_rig: OpenRig, file: Path) -> None:
    before, asked, answer = {*threading.enumerate()}, asyncio.Event(), asyncio.Event()

    async def elicit(_: Any) -> Object:
        asked.set()
        await answer.wait()
        return {"name": "Ada"}

    async with open_rig("asks_by_retry", R5, "memory", audit=file, elicit=elicit) as (client, _):
        call = asyncio.create_task(client.call("echo", {"who": "ann"}))
        await asked.wait()
    assert [each[0] for each in outcomes(file)] == ["intent"]
    answer.set()
    with pytest.raises(TransportError):
        await call
    assert outcomes(file)[1:] == [("outcome", "transport", "sent, outcome unknown")]
    left = [
        each for each in {*threading.enumerate()} - before if each.name.startswith(("handrail-sql", "handrail-aud"))
    ]
    assert not left


async def test_several_clients_share_a_file_and_one_may_bring_its_own_trail(file: Path) -> None:
    async def calls(audit: Any) -> None:
        async with Client(Rig("ordinary", R5), revision=R5, audit=audit) as client:
            await asyncio.gather(*(client.call("echo", {"i": i}) for i in range(10)))

    trail = open_trail(file)
    await asyncio.gather(calls(file), calls(str(file)), calls(trail))
    await trail.write({"event": "intent", "call": "it is still open"})
    await trail.close()
    assert len(records(file)) == 3 * 10 * 2 + 1


async def test_questions_and_repeats_are_one_call_on_record(open_rig: OpenRig, file: Path) -> None:
    answer = {"name": "Ada"}
    async with open_rig("asks_by_retry", R5, "memory", audit=file, elicit=lambda _: answer) as (client, heard):
        await client.call("echo", {"who": "ann"})
        assert len(heard.asked("tools/call")) == 3
    assert [each[:2] for each in outcomes(file)] == [("intent", ""), ("outcome", "ok")]


async def test_what_is_recorded_is_what_is_sent(open_rig: OpenRig, file: Path) -> None:
    arguments = {"to": ["alice"]}
    async with open_rig("ordinary", R5, "memory", audit=file) as (client, heard):
        await client.tools()
        call = asyncio.create_task(client.call("echo", arguments))
        await asyncio.sleep(0)  # it waits for the disk
        arguments["to"].append("mallory")
        await call
        assert heard.asked("tools/call")[0]["params"]["arguments"] == {"to": ["alice"]}


# Rules


DENY = Rule(verdict="deny", name="no", tools=["plain"])
ASK = Rule(verdict="ask", tools=["plain"], arguments={"sum": {"over": 100}})
ALLOW = Rule(verdict="allow", name="yes")
READS = Rule(verdict="allow", annotations={"readOnlyHint": True})


@requirement("CLI-27", "CLI-28")
@pytest.mark.parametrize(
    ("rules", "trusted", "call", "verdict"),
    [
        ([DENY], False, ("plain", {}), "denied"),
        ([DENY, ALLOW], False, ("plain", {}), "denied"),
        ([ALLOW], False, ("plain", {}), "sent"),
        ([ALLOW], False, ("wipe", {}), "sent"),
        ([ALLOW], False, ("unlisted", {}), "sent"),
        ([ASK, ALLOW], False, ("plain", {"sum": 101}), "asked"),
        ([ASK, ALLOW], False, ("plain", {"sum": 99}), "sent"),
        ([], False, ("plain", {}), "asked"),  # nobody trusts the server
        ([], False, ("peek", {}), "asked"),
        ([], True, ("peek", {}), "sent"),
        ([], True, ("plain", {}), "asked"),  # it does not say that it destroys nothing
        ([], True, ("wipe", {}), "asked"),
        ([READS], False, ("peek", {}), "asked"),  # a stranger's hints open no door
        ([READS], True, ("peek", {}), "sent"),
        ([Rule(verdict="deny", servers=["rig"])], True, ("peek", {}), "denied"),
        ([Rule(verdict="allow", servers=["another"])], False, ("peek", {}), "asked"),
        ([Rule(verdict="hide", tools=["plain"])], False, ("plain", {}), "denied"),
        ([Rule(verdict="hide", annotations={"readOnlyHint": True}), ALLOW], True, ("peek", {}), "denied"),
    ],
    ids=str,
)
async def test_rules_decide_a_call(
    open_rig: OpenRig, rules: list[Rule], trusted: bool, call: tuple[str, Object], verdict: str
) -> None:
    asked: list[str] = []

    def confirm(question: Confirmation) -> bool:
        asked.append(question.why)
        return True

    policy = Policy(rules)
    async with open_rig(destructive, R5, "memory", policy=policy, trusted=trusted, confirm=confirm) as (client, heard):
        if verdict == "denied":
            with pytest.raises(Denied, match=policy.decisions[0].rule) as caught:
                await client.call(*call)
            assert caught.value.sent is Sent.NO
        else:
            await client.call(*call)
        assert bool(asked) is (verdict == "asked")
        assert bool(heard.asked("tools/call")) is (verdict != "denied")
    async with open_rig(destructive, R5, "memory", policy=policy, trusted=trusted) as (client, heard):
        if verdict == "sent":
            await client.call(*call)
        else:
            with pytest.raises(Denied if verdict == "denied" else ConfirmationRequired):
                await client.call(*call)
        assert bool(heard.asked("tools/call")) is (verdict == "sent")


async def test_what_is_hidden_is_not_listed(open_rig: OpenRig) -> None:
    policy = Policy([Rule(verdict="hide", tools=["w*"]), ALLOW])
    async with open_rig(destructive, R5, "memory", policy=policy) as (client, _):
        tools = await client.tools()
        assert [tool.name for tool in tools] == ["peek", "plain"]
        assert tools.refused == {"wipe": "a rule hides it"}


@requirement("P-31", everywhere=True)
async def test_p31_no_rule_allows_a_tool_that_changed(open_rig: OpenRig) -> None:
    async with open_rig(pulls_the_rug, R5, "memory", policy=Policy([ALLOW])) as (client, heard):
        await client.call("echo", {})
        await client.tools(fresh=True)
        with pytest.raises(ConfirmationRequired, match="changed"):
            await client.call("echo", {})
        await client.call("echo", {}, confirm=allow)
        assert len(heard.asked("tools/call")) == 2


async def test_the_rule_is_on_record(open_rig: OpenRig, file: Path) -> None:
    policy = Policy([DENY, ALLOW])
    async with open_rig(destructive, R5, "memory", policy=policy, audit=file) as (client, _):
        await client.call("peek", {})
        with pytest.raises(Denied):
            await client.call("plain", {})
    intent, _, refusal = records(file)
    assert (intent["rule"], "agreed" in intent) == ("yes", False)
    assert (refusal["rule"], refusal["outcome"]) == ("no", "denied")
