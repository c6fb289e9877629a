"""Questions in the middle of a call: by request where the revision has them, by answer and retry where it has not."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

from handrail import Call, Principal, Server
from handrail.testing import Peer
from patience import PATIENCE
from requirements import requirement
from servers_calling import CHOICES, failure, said
from wires import MemoryWire, Open, StdioWire, Wire
from wires_http import HttpWire
from wires_shared import everywhere, open_wire as open_wire, processes as processes, wire as wire

Json = Any
Object = dict[str, Any]
Reply = Callable[[str, Object], Object]

R3, R4, R5, P = "2025-06-18", "2025-11-25", "2026-07-28", "pocket"
BY_REQUEST = (R3, R4, P)
ASKING = "servers_calling:asking"

FORM: Object = {"elicitation": {}}
EVERYTHING: Object = {"elicitation": {"form": {}, "url": {}}, "sampling": {"tools": {}}, "roots": {}}

SAID_BY_MODEL: Object = {"role": "assistant", "content": {"type": "text", "text": "Paris"}, "model": "m"}
FOLDERS: Object = {"roots": [{"uri": "file:///a"}, {"uri": "file:///b"}]}


def accept(**content: Json) -> Object:
    return {"action": "accept", "content": content}


def person(method: str, params: Object) -> Object:
    """A client that answers everything: its name is the question."""
    if method == "elicitation/create":
        return accept(name=params["message"], colour="red") if "requestedSchema" in params else {"action": "accept"}
    return SAID_BY_MODEL if method == "sampling/createMessage" else FOLDERS


async def converse(wire: Wire, name: str, arguments: Object, reply: Reply) -> tuple[Object, list[Object]]:
    """Call a tool and answer what it asks; the answer in the end, and the questions as they came."""
    asked: list[Object] = []
    params: Object = {"name": name, "arguments": arguments}
    if wire.stateless:
        while True:
            answer = await wire.request("tools/call", params)
            if answer.get("result", {}).get("resultType") != "input_required":
                return answer, asked
            wanted = answer["result"]["inputRequests"]
            asked += wanted.values()
            replies = {key: reply(each["method"], each["params"]) for key, each in wanted.items()}
            state = answer["result"]["requestState"]
            params = {"name": name, "arguments": arguments, "inputResponses": replies, "requestState": state}
    ident = await wire.ask("tools/call", params)
    while True:
        message = await wire.receive()
        if message.get("id") == ident and "method" not in message:
            return message, asked
        if "id" in message:
            asked.append({"method": message["method"], "params": message.get("params", {})})
            result = reply(message["method"], message.get("params", {}))
            await wire.send({"jsonrpc": "2.0", "id": message["id"], "result": result})
        else:
            wire.others.append(message)


def always(reply: Object) -> Reply:
    return lambda method, params: reply


async def retry(wire: Wire, name: str, arguments: Object, state: Json, responses: Json = None) -> Object:
    params: Object = {"name": name, "arguments": arguments, "requestState": state}
    if responses is not None:
        params["inputResponses"] = responses
    return await wire.request("tools/call", params)


# The same tool for every way of asking

SCENARIOS: list[tuple[str, str]] = [
    ("asks", "accept Your name?"),
    ("asks_twice", "Your name? red"),
    ("asks_all", "Your name? assistant 2"),
    ("asks_blocking", "accept Name(name='Your name?')"),
    ("asks_blocking_thrice", "Your name? 2 assistant"),
    ("asks_in_group", "First? Second?"),
    ("swallows", "accept Your name?"),
    ("samples", "LLM response: {'type': 'text', 'text': 'Paris'}"),
    ("wants_roots", "file:///a, file:///b"),
]


@requirement("SRV-501", "SRV-507")
@everywhere(R3, R4, R5, P)
async def test_the_same_tool_asks_in_the_way_of_every_revision(open_wire: Open) -> None:
    wire: Wire = await open_wire(ASKING, capabilities=EVERYTHING)
    for name, expected in SCENARIOS:
        answer, asked = await converse(wire, name, {}, person)
        assert said(answer) == expected, name
        assert asked, name
    for name, expected in (("asks_url", "accept"), ("asks_everything", "accept accept assistant")):
        if wire.revision not in (R3, P):
            answer, asked = await converse(wire, name, {}, person)
            assert said(answer) == expected, name
        else:
            text = failure((await converse(wire, name, {}, person))[0])
            assert "example.com/connect" not in text, "the address is for people, not for the model"


@everywhere("2024-10-07", "2024-11-05", "2025-03-26")
async def test_older_revisions_ask_models_and_folders_but_not_people(open_wire: Open) -> None:
    wire: Wire = await open_wire(ASKING, capabilities=EVERYTHING)
    for name, expected in (("samples", SCENARIOS[-2][1]), ("wants_roots", SCENARIOS[-1][1])):
        assert said((await converse(wire, name, {}, person))[0]) == expected
    for name in ("asks", "asks_url", "asks_all"):
        answer, asked = await converse(wire, name, {}, person)
        assert not asked
        assert "elicitation" in failure(answer)


@requirement("SRV-507")
@everywhere(*BY_REQUEST)
async def test_the_question_is_a_request_in_the_words_of_the_revision(open_wire: Open) -> None:
    wire: Wire = await open_wire(capabilities=EVERYTHING)
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    _, (question,) = await converse(wire, "asks", {}, person)
    assert question["method"] == "elicitation/create"
    expected: Object = {"message": "Your name?", "requestedSchema": schema}
    assert question["params"] == ({"mode": "form", **expected} if wire.revision == R4 else expected)
    _, (question,) = await converse(wire, "samples", {}, person)
    message = {"role": "user", "content": {"type": "text", "text": "What is the capital of France?"}}
    assert question == {
        "method": "sampling/createMessage",
        "params": {"messages": [message], "maxTokens": 100},
    }
    _, (question,) = await converse(wire, "wants_roots", {}, person)
    assert question == {"method": "roots/list", "params": {}}
    if wire.revision == R4:
        _, (question,) = await converse(wire, "asks_url", {}, person)
        ident = question["params"].pop("elicitationId")
        assert ident
        assert question["params"] == {"mode": "url", "message": "Sign in first", "url": "https://example.com/connect"}


@requirement("SRV-507")
@everywhere(*BY_REQUEST)
async def test_nothing_undeclared_is_asked_by_request(open_wire: Open) -> None:
    wire: Wire = await open_wire(ASKING)
    for name, capability in (
        ("asks", "elicitation"),
        ("asks_url", "elicitation"),
        ("samples", "sampling"),
        ("wants_roots", "roots"),
        ("asks_blocking", "elicitation"),
        ("samples_with_tools", "sampling.tools"),
        ("requires", "sampling"),
    ):
        answer, asked = await converse(wire, name, {}, person)
        assert not asked
        assert capability in failure(answer)


@requirement("SRV-508")
@everywhere(R3, R4, R5, P)
async def test_decline_and_cancel_are_not_acceptance(open_wire: Open) -> None:
    wire: Wire = await open_wire(capabilities=EVERYTHING)
    for action in ("decline", "cancel"):
        # Content beside a refusal does not count.
        for reply in ({"action": action}, {"action": action, "content": {"name": "x"}}):
            answer, _ = await converse(wire, "asks", {}, always(reply))
            assert said(answer) == f"{action} -"
        if wire.revision in (R4, R5):
            answer, _ = await converse(wire, "asks_url", {}, always({"action": action}))
            assert said(answer) == action


# Forms


@everywhere(R3, R4, R5, P)
async def test_a_form_is_written_as_the_revision_can_read_it(open_wire: Open) -> None:
    wire: Wire = await open_wire(ASKING, capabilities=EVERYTHING)
    old = wire.revision in (R3, P)
    content = {"one": "b", "many__0": True, "many__1": False, "plain__1": True, "sure": False}
    if not old:
        content = {"one": "b", "many": ["x"], "plain": ["q"], "sure": False}
    answer, (question,) = await converse(wire, "asks_titled", {}, lambda method, params: accept(**content))
    schema = question["params"]["requestedSchema"]
    if old:
        assert schema["properties"] == {
            "one": {"type": "string", "enum": ["a", "b"], "enumNames": ["A", "B"]},
            "many__0": {"type": "boolean", "title": "Several: X"},
            "many__1": {"type": "boolean", "title": "Several: Y"},
            "plain__0": {"type": "boolean", "title": "plain: p"},
            "plain__1": {"type": "boolean", "title": "plain: q"},
            "sure": {"type": "boolean", "default": True},
        }
        assert schema["required"] == ["one"]
    else:
        assert schema == CHOICES
    action, _, rest = said(answer).partition(" ")
    assert action == "accept"
    assert eval(rest) == {"one": "b", "many": ["x"], "plain": ["q"], "sure": False}

    answer, (question,) = await converse(wire, "asks_wish", {}, lambda method, params: accept(count=5))
    fields = question["params"]["requestedSchema"]["properties"]
    defaults = {name: field["default"] for name, field in fields.items() if "default" in field}
    assert defaults == ({"gift": True} if old else {"name": "nobody", "count": 3, "gift": True})
    assert said(answer) == "accept Wish(name='nobody', count=5, gift=True)"


MISFITS: list[Object] = [
    {"action": "accept"},
    {"action": "accept", "content": {}},
    {"action": "accept", "content": {"name": 5}},
    {"action": "accept", "content": None},
    {"action": "accept", "content": ["x"]},
    {"action": "maybe", "content": {"name": "x"}},
    {"action": None},
    {"content": {"name": "x"}},
    {},
]


@everywhere(*BY_REQUEST)
async def test_an_answer_that_does_not_fit_the_form_never_reaches_the_tool(open_wire: Open) -> None:
    wire: Wire = await open_wire(capabilities=FORM)
    for misfit in MISFITS:
        answer, _ = await converse(wire, "asks", {}, always(misfit))
        assert "answer" in failure(answer), misfit


@requirement("SRV-505")
@everywhere(R5)
async def test_an_answer_that_does_not_fit_the_form_is_asked_for_again(open_wire: Open) -> None:
    wire: Wire = await open_wire(capabilities=FORM)
    first = (await wire.call("asks"))["result"]
    for misfit in MISFITS:
        again = (await retry(wire, "asks", {}, first["requestState"], {"ask-1": misfit}))["result"]
        assert again["resultType"] == "input_required", misfit
        assert again["inputRequests"] == first["inputRequests"]
    answer = await retry(wire, "asks", {}, first["requestState"], {"ask-1": accept(name="x")})
    assert said(answer) == "accept x"


@everywhere(*BY_REQUEST)
async def test_a_client_that_answers_with_an_error_has_not_accepted(open_wire: Open) -> None:
    wire: Wire = await open_wire(capabilities=EVERYTHING)
    errors: list[Object] = [
        {"error": {"code": -1, "message": "User rejected"}},
        {"error": {"code": -32601, "message": "Method not found"}},
        {"error": {"code": "x"}},
        {"error": 5},
        {"result": None},
        {"result": ["accept"]},
    ]
    for error in errors:
        for name, method in (("asks", "elicitation/create"), ("samples", "sampling/createMessage")):
            ident = await wire.ask("tools/call", {"name": name})
            question = await wire.notice(method)
            await wire.send({"jsonrpc": "2.0", "id": question["id"], **error})
            answer = await wire.answer(ident)
            if name == "asks":
                assert said(answer) == "cancel -", error
            else:
                assert method in failure(answer), error
        ident = await wire.ask("tools/call", {"name": "wants_roots"})
        await wire.send({"jsonrpc": "2.0", "id": (await wire.notice("roots/list"))["id"], **error})
        assert "roots/list" in failure(await wire.answer(ident)), error


@everywhere(*BY_REQUEST)
async def test_answers_nobody_waits_for_are_ignored(open_wire: Open) -> None:
    wire: Wire = await open_wire(capabilities=FORM)
    await wire.send({"jsonrpc": "2.0", "id": 12345, "result": accept(name="stray")})
    await wire.send({"jsonrpc": "2.0", "id": "1", "result": accept(name="stray")})
    ident = await wire.ask("tools/call", {"name": "asks"})
    question = await wire.notice("elicitation/create")
    await wire.send({"jsonrpc": "2.0", "id": str(question["id"]), "result": accept(name="other type")})
    await wire.send({"jsonrpc": "2.0", "id": question["id"], "result": accept(name="first")})
    await wire.send({"jsonrpc": "2.0", "id": question["id"], "result": accept(name="second")})
    assert said(await wire.answer(ident)) == "accept first"
    assert await wire.silent()


# By answer and retry


@requirement("SRV-501")
@everywhere(R5)
async def test_a_question_is_an_answer_that_asks(open_wire: Open) -> None:
    wire: Wire = await open_wire(capabilities=EVERYTHING)
    result = (await wire.call("asks"))["result"]
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    assert result["inputRequests"] == {
        "ask-1": {
            "method": "elicitation/create",
            "params": {"mode": "form", "message": "Your name?", "requestedSchema": schema},
        }
    }
    assert isinstance(result["requestState"], str)
    result = (await wire.call("asks_url"))["result"]
    params = result["inputRequests"]["ask-1"]["params"]
    assert params == {"mode": "url", "message": "Sign in first", "url": "https://example.com/connect"}
    result = (await wire.call("asks_all"))["result"]
    methods = {key: each["method"] for key, each in result["inputRequests"].items()}
    assert methods == {
        "user_name": "elicitation/create",
        "greeting": "sampling/createMessage",
        "folders": "roots/list",
    }


UNDECLARED: list[tuple[str, Object, Object]] = [
    ("asks", {}, {"elicitation": {"form": {}}}),
    ("asks", {"elicitation": {"url": {}}}, {"elicitation": {"form": {}}}),
    ("asks", {"elicitation": True}, {"elicitation": {"form": {}}}),
    ("asks_url", {}, {"elicitation": {"url": {}}}),
    ("asks_url", {"elicitation": {}}, {"elicitation": {"url": {}}}),
    ("asks_url", {"elicitation": {"form": {}}}, {"elicitation": {"url": {}}}),
    ("samples", {"elicitation": {}, "roots": {}}, {"sampling": {}}),
    ("samples_with_tools", {"sampling": {}}, {"sampling": {"tools": {}}}),
    ("wants_roots", {"sampling": {}}, {"roots": {}}),
    ("asks_all", {"sampling": {}}, {"elicitation": {"form": {}}, "roots": {}}),
    ("asks_everything", {"elicitation": {"form": {}}, "sampling": {}}, {"elicitation": {"url": {}}}),
    ("asks_blocking", {}, {"elicitation": {"form": {}}}),
    ("requires", {}, {"sampling": {}}),
]
DECLARED: list[tuple[str, Object]] = [
    ("asks", {"elicitation": {}}),
    ("asks", {"elicitation": {"form": {}}}),
    ("asks", {"elicitation": {"form": {}, "url": {}}}),
    ("asks_url", {"elicitation": {"url": {}}}),
    ("samples", {"sampling": {}}),
    ("samples_with_tools", {"sampling": {"tools": {}}}),
    ("wants_roots", {"roots": {}}),
]


@requirement("SRV-502")
@everywhere(R5)
async def test_only_what_this_very_request_declared_is_asked(open_wire: Open) -> None:
    wire: Wire = await open_wire(ASKING)
    for name, capabilities, needed in UNDECLARED:
        wire.capabilities = EVERYTHING
        await wire.call("asks")  # what another request declared does not count
        wire.capabilities = capabilities
        error = (await wire.call(name))["error"]
        assert error["code"] == -32021, (name, capabilities)
        assert error["data"] == {"requiredCapabilities": needed}, (name, capabilities)
    for name, capabilities in DECLARED:
        wire.capabilities = capabilities
        assert (await wire.call(name))["result"]["resultType"] == "input_required", (name, capabilities)
    # A retry has to declare again what it answers, as every request does, if more is asked.
    wire.capabilities = FORM
    first = (await wire.call("asks_twice"))["result"]
    wire.capabilities = {}
    answer = await retry(wire, "asks_twice", {}, first["requestState"], {"step1": accept(name="x")})
    assert answer["error"]["code"] == -32021


@requirement("SRV-503")
@everywhere(R5)
async def test_no_other_method_asks(open_wire: Open) -> None:
    wire: Wire = await open_wire(capabilities=EVERYTHING)
    more: Object = {"inputResponses": {"ask-1": accept(name="x")}, "requestState": "x"}
    for method in ("tools/list", "server/discover"):
        for params in ({}, more):
            result = (await wire.request(method, params))["result"]
            assert result["resultType"] == "complete"
            assert not {"inputRequests", "requestState"} & set(result)


@requirement("SRV-504", "P-25")
@everywhere(R5)
async def test_a_state_that_was_changed_is_refused(open_wire: Open) -> None:
    wire: Wire = await open_wire(capabilities=FORM)
    first = (await wire.call("asks_twice"))["result"]
    second = (await retry(wire, "asks_twice", {}, first["requestState"], {"step1": accept(name="x")}))["result"]
    state = second["requestState"]
    answers = {"step2": accept(colour="red")}

    async def refused(changed: str) -> None:
        error = (await retry(wire, "asks_twice", {}, changed, answers))["error"]
        assert error["code"] == -32602, changed
        assert "requestState" in error["message"]

    for at, letter in enumerate(state):
        await refused(state[:at] + ("A" if letter != "A" else "B") + state[at + 1 :])
    for changed in ("", "A", state[:-1], state[1:], state + "A", state + "=", state + "==", " " + state, state + "\n"):
        await refused(changed)
    for changed in ("é", state.swapcase(), state[::-1], "A" * 100_000):
        await refused(changed)
    assert said(await retry(wire, "asks_twice", {}, state, answers)) == "x red"


@requirement("SRV-504", "P-25")
@everywhere(R5)
async def test_a_state_is_good_for_one_call_with_its_arguments(open_wire: Open) -> None:
    wire: Wire = await open_wire(ASKING, capabilities=FORM)
    answers = {"name": accept(name="x")}
    state = (await wire.call("asks_marked", {"mark": "a"}))["result"]["requestState"]
    for name, arguments in (
        ("asks_marked", {"mark": "b"}),
        ("asks_marked", {"mark": "A"}),
        ("asks", {}),
        ("counts_asking", {"mark": "a"}),
        ("echo", {"text": "a"}),
    ):
        assert (await retry(wire, name, arguments, state, answers))["error"]["code"] == -32602, (name, arguments)
    # A cursor is not a state either.
    assert said(await retry(wire, "asks_marked", {"mark": "a"}, state, answers)) == "a x"


@requirement("SRV-504", "P-25")
async def test_a_state_is_good_for_its_holder_and_until_its_hour_has_come() -> None:
    server = Server("held")
    now = [1_000_000.0]
    server.engine.clock = lambda: now[0]

    @server.tool
    async def asks(call: Call) -> str:
        """Asks."""
        answer = await call.ask("Sure?", {"type": "object", "properties": {"ok": {"type": "boolean"}}})
        return f"{call.principal.id} {answer.content}"

    answers = {"ask-1": accept(ok=True)}
    async with (
        Peer(server, revision=R5, capabilities=FORM, principal=Principal("one")) as one,
        Peer(server, revision=R5, capabilities=FORM, principal=Principal("other")) as other,
    ):
        state = (await one.request("tools/call", {"name": "asks"}))["result"]["requestState"]
        params = {"name": "asks", "inputResponses": answers, "requestState": state}
        assert (await other.request("tools/call", params))["error"]["code"] == -32602
        now[0] += 3_599
        assert said(await one.request("tools/call", params)) == "one {'ok': True}"
        now[0] += 1
        assert (await one.request("tools/call", params))["error"]["code"] == -32602
        now[0] -= 3_600
        assert said(await one.request("tools/call", params)) == "one {'ok': True}"


@requirement("SRV-505")
@everywhere(R5)
async def test_missing_answers_are_asked_for_again_and_strangers_ignored(open_wire: Open) -> None:
    wire: Wire = await open_wire(capabilities=EVERYTHING)
    first = (await wire.call("asks_all"))["result"]
    stray = {"nobody_asked": accept(name="y"), "": {}}
    none = (await retry(wire, "asks_all", {}, first["requestState"], stray))["result"]
    assert set(none["inputRequests"]) == {"user_name", "greeting", "folders"}
    some = (await retry(wire, "asks_all", {}, none["requestState"], {"user_name": accept(name="x"), **stray}))["result"]
    assert set(some["inputRequests"]) == {"greeting", "folders"}, "what was answered is not asked again"
    rest = {"greeting": SAID_BY_MODEL, "folders": FOLDERS}
    assert said(await retry(wire, "asks_all", {}, some["requestState"], rest)) == "x assistant 2"
    # What was answered before stands: it is in the seal.
    changed = {**rest, "user_name": accept(name="changed")}
    assert said(await retry(wire, "asks_all", {}, some["requestState"], changed)) == "x assistant 2"
    # All the answers at once, without any state, are an answer as well: there is nothing to protect yet.
    whole = {"user_name": accept(name="x"), **rest}
    answer = await wire.request("tools/call", {"name": "asks_all", "inputResponses": whole})
    assert said(answer) == "x assistant 2"


@requirement("SRV-505")
@everywhere(R5)
async def test_malformed_answers_are_an_error_of_the_protocol(open_wire: Open) -> None:
    wire: Wire = await open_wire(capabilities=FORM)
    state = (await wire.call("asks"))["result"]["requestState"]
    fine = {"ask-1": accept(name="x")}
    for responses in ([], "x", 5, True, [fine], {"ask-1": "x"}, {"ask-1": None}, {"ask-1": [accept(name="x")]}):
        params: Object = {"name": "asks", "requestState": state, "inputResponses": responses}
        assert (await wire.request("tools/call", params))["error"]["code"] == -32602, responses
    states: list[Json] = [5, None, True, {}, [state]]
    for wrong in states:
        params = {"name": "asks", "requestState": wrong, "inputResponses": fine}
        assert (await wire.request("tools/call", params))["error"]["code"] == -32602, wrong
    params = {"name": "asks", "requestState": state, "inputResponses": None}
    assert (await wire.request("tools/call", params))["error"]["code"] == -32602
    assert said(await retry(wire, "asks", {}, state, fine)) == "accept x"


@requirement("SRV-506")
@everywhere(R5)
async def test_a_retry_may_reach_another_instance_with_the_same_key(
    open_wire: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def instance(key: str) -> Wire:
        monkeypatch.setenv("HANDRAIL_KEY", key)  # the environment of a new process, and of this one
        wire: Wire = await open_wire(ASKING, capabilities=EVERYTHING, fresh=True)
        return wire

    shared, other = secrets.token_hex(32), secrets.token_hex(32)
    first, second, stranger = await instance(shared), await instance(shared), await instance(other)
    state = (await first.call("asks_twice"))["result"]["requestState"]
    answers = {"step1": accept(name="x")}
    assert (await retry(stranger, "asks_twice", {}, state, answers))["error"]["code"] == -32602
    state = (await retry(second, "asks_twice", {}, state, answers))["result"]["requestState"]
    assert said(await retry(first, "asks_twice", {}, state, {"step2": accept(colour="red")})) == "x red"


async def test_keys_are_given_to_the_server_or_its_environment_and_can_be_rotated() -> None:
    def made(*keys: bytes) -> Server:
        server = Server("keyed", keys=list(keys))

        @server.tool
        async def asks(call: Call) -> str:
            """Asks."""
            answer = await call.ask("Sure?", {"type": "object", "properties": {"ok": {"type": "boolean"}}})
            return str(answer.action)

        return server

    old, new, foreign = (sha256(name).digest() for name in (b"old", b"new", b"foreign"))
    async with Peer(made(old), revision=R5, capabilities=FORM) as peer:
        state = (await peer.request("tools/call", {"name": "asks"}))["result"]["requestState"]
    params = {"name": "asks", "inputResponses": {"ask-1": {"action": "decline"}}, "requestState": state}
    for keys, works in (((old,), True), ((new, old), True), ((new,), False), ((foreign, new), False)):
        async with Peer(made(*keys), revision=R5, capabilities=FORM) as peer:
            answer = await peer.request("tools/call", params)
            assert ("result" in answer) is works, keys
    with pytest.raises(ValueError, match="too few for a key, 32 are needed"):
        made(b"too short")


# Several, and the end of it


@everywhere(R3, R4, R5, P)
async def test_two_calls_that_ask_at_once_are_not_mixed(open_wire: Open) -> None:
    wire: Wire = await open_wire(ASKING, capabilities=FORM)
    if wire.stateless:
        states = {mark: (await wire.call("asks_marked", {"mark": mark}))["result"]["requestState"] for mark in "ab"}
        for mark in "ba":
            answers = {"name": accept(name=f"name of {mark}")}
            assert said(await retry(wire, "asks_marked", {"mark": mark}, states[mark], answers)) == (
                f"{mark} name of {mark}"
            )
        return
    idents = {mark: await wire.ask("tools/call", {"name": "asks_marked", "arguments": {"mark": mark}}) for mark in "ab"}
    questions = {}
    for _ in idents:
        question = await wire.notice("elicitation/create")
        questions[question["params"]["message"]] = question["id"]
    for mark in "ba":
        result = accept(name=f"name of {mark}")
        await wire.send({"jsonrpc": "2.0", "id": questions[f"The name of {mark}?"], "result": result})
        assert said(await wire.answer(idents[mark])) == f"{mark} name of {mark}"


@everywhere(*BY_REQUEST)
async def test_the_idle_clock_stands_still_while_a_question_is_open(open_wire: Open) -> None:
    wire: Wire = await open_wire(ASKING, capabilities=FORM)
    ident = await wire.ask("tools/call", {"name": "asks_patiently"})
    question = await wire.notice("elicitation/create")
    assert said(await wire.call("after", {"seconds": 1.5, "text": "three times as long"})) == "three times as long"
    await wire.send({"jsonrpc": "2.0", "id": question["id"], "result": accept(name="late")})
    assert said(await wire.answer(ident)) == "accept late"


@everywhere(*BY_REQUEST)
@pytest.mark.parametrize("tool", ["counts_asking", "counts_blocking"])
async def test_a_call_cancelled_while_it_asks_takes_its_question_back(open_wire: Open, tool: str) -> None:
    wire: Wire = await open_wire(ASKING, capabilities=FORM)
    mark = f"cancelled {tool} {wire.revision}"
    ident = await wire.ask("tools/call", {"name": tool, "arguments": {"mark": mark}})
    question = await wire.notice("elicitation/create")
    await wire.notify("notifications/cancelled", {"requestId": ident})
    taken_back = await wire.notice("notifications/cancelled")
    assert taken_back["params"] == {"requestId": question["id"]}
    # Its answer comes too late and changes nothing.
    await wire.send({"jsonrpc": "2.0", "id": question["id"], "result": accept(name="late")})
    async with asyncio.timeout(PATIENCE):
        while json.loads(said(await wire.call("how_it_went", {"mark": mark}))) != {"begun": 1, "ended": 1}:
            pass
    assert await wire.silent()


@everywhere(*BY_REQUEST)
async def test_a_client_that_goes_away_ends_the_call_that_asks_it(open_wire: Open) -> None:
    wire: Wire = await open_wire(ASKING, capabilities=FORM, fresh=True)
    await wire.ask("tools/call", {"name": "counts_asking", "arguments": {"mark": "gone"}})
    await wire.notice("elicitation/create")
    async with asyncio.timeout(PATIENCE):
        if isinstance(wire, StdioWire):
            assert await wire.close() == 0
        else:
            # Over HTTP by ending the session: a connection that breaks does not mean it.
            assert isinstance(wire, MemoryWire | HttpWire)
            await wire.close()
            another = (
                MemoryWire(wire.revision, wire.server)
                if isinstance(wire, MemoryWire)
                else HttpWire(wire.revision, wire.server)
            )
            await another.open()
            went = json.loads(said(await another.call("how_it_went", {"mark": "gone"})))
            assert went == {"begun": 1, "ended": 1}
            await another.close()


@everywhere(R5)
async def test_a_question_runs_the_tool_from_the_top_each_time_and_leaves_nothing_behind(open_wire: Open) -> None:
    wire: Wire = await open_wire(ASKING, capabilities=FORM)
    mark = f"{wire.transport} again"
    answer, asked = await converse(wire, "counts_asking", {"mark": mark}, person)
    assert said(answer) == "accept"
    assert len(asked) == 1
    assert json.loads(said(await wire.call("how_it_went", {"mark": mark}))) == {"begun": 2, "ended": 2}
