"""Which caller a question of an upstream goes to, where the wire does not tell; and what comes outside of a call."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from gateways_operated import behind, place
from requirements import requirement
from rigs_gateway import Rig, running
from scripted_upstream import R4, R5, Json, Object
from wires import Wire
from wires_gateway import text_of

Ran = Callable[[str, str], None]

FORMS: Object = {"elicitation": {"form": {}}}
PAGES: Object = {"elicitation": {"form": {}, "url": {}}}
ABLE: Object = {**PAGES, "sampling": {}, "roots": {}}
NAMED: Object = {"action": "accept", "content": {"name": "Ada"}}
AMBIGUOUS = "a question of one of several calls"
COMPLETED = "notifications/elicitation/complete"


async def begin(wire: Wire, rig: Rig, mark: str, **arguments: Json) -> int:
    """Call a tool that asks when it is told to."""
    arguments = {"kind": "form", "mark": mark, "waits": True, **arguments}
    ident = await wire.ask("tools/call", {"name": "ask", "arguments": arguments}, progressToken=f"of {mark}")
    await rig.became("started", mark)
    return ident


async def finish(wire: Wire, ident: int, mark: str, **arguments: Json) -> str:
    """Answer the question that a call has ended with."""
    result = (await wire.answer(ident))["result"]
    assert result["resultType"] == "input_required", result
    arguments = {"kind": "form", "mark": mark, "waits": True, **arguments}
    answers = {"inputResponses": dict.fromkeys(result["inputRequests"], NAMED), "requestState": result["requestState"]}
    retry = await wire.request("tools/call", {"name": "ask", "arguments": arguments, **answers})
    return text_of(retry)


@requirement("GW-10")
async def test_a_question_over_a_pipe_goes_to_the_call_that_it_names(ran: Ran) -> None:
    async with running(R4, "stdio") as rig, place("memory", [behind(rig, name="up")]) as gateway:
        wire = await gateway.client(R5, FORMS)
        ran(R5, "memory")
        first = await begin(wire, rig, "first", names=True)
        second = await begin(wire, rig, "second", names=True)
        for ident, mark in ((first, "first"), (second, "second")):  # the second began last
            rig.command(do="release", mark=mark)
            assert "Ada" in await finish(wire, ident, mark, names=True)
        assert AMBIGUOUS not in gateway.server.upstreams["up"].lossy


@requirement("GW-04", "GW-10")
async def test_a_question_that_names_no_call_goes_to_the_last_one_and_is_counted(ran: Ran) -> None:
    async with running(R4, "stdio") as rig, place("memory", [behind(rig, name="up")]) as gateway:
        wire = await gateway.client(R5, FORMS)
        ran(R5, "memory")
        lossy = gateway.server.upstreams["up"].lossy
        alone = await begin(wire, rig, "alone")
        rig.command(do="release", mark="alone")
        assert "Ada" in await finish(wire, alone, "alone")
        assert lossy[AMBIGUOUS] == 0
        await begin(wire, rig, "first")
        last = await begin(wire, rig, "last")
        rig.command(do="release", mark="last")
        assert "Ada" in await finish(wire, last, "last")
        assert lossy[AMBIGUOUS] == 1


@requirement("GW-04", "GW-10")
@pytest.mark.parametrize("up_leg", ["stdio", "http"])
@pytest.mark.parametrize("leg", ["memory", "http"])
async def test_outside_of_a_call_only_roots_are_asked_for(up_leg: str, leg: str, ran: Ran) -> None:
    async with running(R4, up_leg) as rig, place(leg, [behind(rig, name="up")]) as gateway:
        wire = await gateway.client(R4, ABLE)
        ran(R4, leg)
        assert text_of(await wire.call("echo", {"text": "x"})) == "x"
        for number, (kind, method) in enumerate(
            [("form", "elicitation/create"), ("url", "elicitation/create"), ("sampling", "sampling/createMessage")], 1
        ):
            rig.command(do="ask", kind=kind)
            answer = await rig.wait(lambda event: event.get("message", {}).get("id") == "idle-0", number)
            assert answer["message"]["error"]["code"] == -32600
            assert method in answer["message"]["error"]["message"]
        lossy = gateway.server.upstreams["up"].lossy
        assert lossy["elicitation/create outside of a call"] == 2
        assert lossy["sampling/createMessage outside of a call"] == 1
        rig.command(do="ask", kind="roots")
        question = await wire.notice("roots/list")
        await wire.send({"jsonrpc": "2.0", "id": question["id"], "result": {"roots": []}})
        answer = await rig.wait(lambda event: event.get("message", {}).get("id") == "idle-0", 4)
        assert answer["message"]["result"] == {"roots": []}
        assert not [each for each in wire.others if "id" in each]


@requirement("GW-10")
@pytest.mark.parametrize("up_leg", ["stdio", "http"])
@pytest.mark.parametrize("leg", ["memory", "http"])
@pytest.mark.parametrize("tool", ["ask", "visit"])
async def test_a_completed_page_is_told_to_who_was_asked_to_open_it(tool: str, up_leg: str, leg: str, ran: Ran) -> None:
    async with running(R4, up_leg) as rig, place(leg, [behind(rig, name="up")]) as gateway:
        wire = await gateway.client(R4, PAGES)
        ran(R4, leg)
        if tool == "visit":
            answer = await wire.call("visit", {"mark": "m"})
            page: Object = answer["error"]["data"]["elicitations"][0]
        else:
            ident = await wire.ask("tools/call", {"name": "ask", "arguments": {"kind": "url", "mark": "m"}})
            question = await wire.notice("elicitation/create")
            page = question["params"]
            await wire.send({"jsonrpc": "2.0", "id": question["id"], "result": {"action": "accept"}})
            assert "accept" in text_of(await wire.answer(ident))
        own = {"visit": "e-m", "ask": "e-7"}[tool]
        assert page["elicitationId"] != own  # another upstream may have the same
        for identifier in ("e-0", own, own):  # of another one, and twice
            rig.command(do="complete", id=identifier)
        assert (await wire.notice(COMPLETED))["params"] == {"elicitationId": page["elicitationId"]}
        assert text_of(await wire.call("echo", {"text": "x"})) == "x"
        assert not [each for each in wire.others if each.get("method") == COMPLETED]


@requirement("GW-04", "GW-10")
async def test_a_completed_page_is_not_told_to_a_client_that_calls_again(ran: Ran) -> None:
    async with running(R4, "http") as rig, place("memory", [behind(rig, name="up")]) as gateway:
        wire = await gateway.client(R5, PAGES)
        ran(R5, "memory")
        answer = await wire.call("visit", {"mark": "m"})
        assert "elicitationId" not in json.dumps(answer)
        rig.command(do="complete", id="e-m")
        await gateway.server.upstreams["up"].refresh()
        assert text_of(await wire.call("echo", {"text": "x"})) == "x"
        assert gateway.server.upstreams["up"].lossy["LOSSY-27"] == 1
        assert not [each for each in wire.others if each.get("method") == COMPLETED]
