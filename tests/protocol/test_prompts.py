"""Prompts in every dialect: lists, messages, arguments; and what prompts and reads may do meanwhile. Section 11."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from handrail import Call, Principal, Server
from handrail.testing import Peer
from patience import PATIENCE
from requirements import requirement
from servers_calling import said, until
from servers_resources import (
    FORM,
    ICON,
    META,
    MODIFIED,
    SECRET,
    UNFIT_MESSAGES,
    WAYS,
    Way,
    converse,
    entries,
    shelf,
    text_of,
)
from subject import PNG, WAV
from wires import ALL, LEGACY, Open, Wire
from wires_http import HttpWire
from wires_shared import everywhere, open_wire as open_wire, processes as processes

Json = Any
Object = dict[str, Any]

R0, R1, R2, R3, R4, R5, P = (*ALL[:5], "2026-07-28", "pocket")
SHELF = "servers_resources:shelf"
CANCELLED = "notifications/cancelled"
WITH_FORMS = (R3, R4, R5, P)
by_way = pytest.mark.parametrize("way", WAYS, ids=[each.method for each in WAYS])


async def get(wire: Wire, name: Json, arguments: Json = None) -> Object:
    return await wire.request("prompts/get", {"name": name, **({} if arguments is None else {"arguments": arguments})})


async def times_run(wire: Wire, name: str) -> int:
    return int(said(await wire.call("times_run", {"name": name})))


# Lists


ARGUMENTS: list[Object] = [
    {"name": "one", "description": "The first.", "required": True},
    {"name": "two", "description": "The second.", "required": False},
]
TITLED: list[Object] = [ARGUMENTS[0], {**ARGUMENTS[1], "title": "Second"}]
BARE: Object = {"name": "full", "description": "Every member there is."}
DRESSED: Object = {**BARE, "title": "Full prompt", "_meta": META, "arguments": TITLED}
LISTED: dict[str, Object] = {
    **{each: {**BARE, "arguments": ARGUMENTS} for each in (R0, R1, R2, P)},
    R3: DRESSED,
    **{each: {**DRESSED, "icons": [ICON]} for each in (R4, R5)},
}


@requirement("SRV-721")
@everywhere()
async def test_a_prompt_is_listed_with_the_members_of_its_revision(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    prompts = {each["name"]: each for each in await entries(wire, "prompts/list")}
    for prompt in prompts.values():
        for argument in prompt.get("arguments", ()):
            argument.setdefault("required", False)  # which is what its absence says
    assert prompts["full"] == LISTED[wire.revision]
    review = prompts["review"]
    assert review.pop("arguments") == [{"name": "code", "required": True}, {"name": "style", "required": False}]
    assert review == {"name": "review", "description": "Ask for a review."}
    assert [each["name"] for each in prompts["act"]["arguments"]] == ["what", "mark"], "the call is no argument"


@requirement("SRV-721")
@everywhere()
async def test_a_prompt_that_says_nothing_of_itself_has_a_name(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_resources:bare")
    [prompt] = await entries(wire, "prompts/list")
    assert prompt.pop("arguments", []) == []
    assert prompt == {"name": "bare"}


@requirement("SRV-721", everywhere=True)
def test_a_server_gives_its_own_code_the_prompts_it_lists() -> None:
    prompts = {each.name: each for each in shelf().prompts}
    assert list(prompts)[:2] == ["review", "plain"]
    assert (prompts["full"].title, prompts["full"].icons) == ("Full prompt", [ICON])


# Messages


def user(content: Object) -> Object:
    return {"role": "user", "content": content}


def model(content: Object) -> Object:
    return {"role": "assistant", "content": content}


def text(value: str, **more: Json) -> Object:
    return {"type": "text", "text": value, **more}


def same(revisions: tuple[str, ...], messages: list[Object]) -> dict[str, list[Object]]:
    return dict.fromkeys(revisions, messages)


OLD_NOTE: Object = {"audience": ["user"], "priority": 0.5}
NOTE: Object = {**OLD_NOTE, "lastModified": MODIFIED}
IMAGE: Object = {"type": "image", "data": base64.b64encode(PNG).decode(), "mimeType": "image/png"}
AUDIO: Object = {"type": "audio", "data": base64.b64encode(WAV).decode(), "mimeType": "audio/wav"}
MOVED: Object = {
    "type": "resource",
    "resource": {"uri": "urn:mcp-content:sha256:…", "mimeType": "audio/wav", "blob": AUDIO["data"]},
}
LINK: Object = {
    "type": "resource_link",
    "uri": "config://app",
    "name": "app",
    "title": "App",
    "description": "Settings",
    "mimeType": "text/plain",
    "size": 7,
}
INNER: Object = {"uri": "config://app", "mimeType": "text/plain", "text": "hello"}
LOOK = user(text("Look:"))


def embedded(inner: Object, **more: Json) -> list[Object]:
    return [LOOK, user({"type": "resource", "resource": inner, **more})]


MESSAGES: dict[str, dict[str, list[Object]]] = {
    "plain": same(ALL, [user(text("Go on."))]),
    "talk": same(ALL, [user(text("What is the capital?")), model(text("Paris.")), user(text("Thanks."))]),
    "words": {
        R0: [user(text("annotated"))],
        **same((R1, R2), [user(text("annotated", annotations=OLD_NOTE))]),
        **same((R3, R4, R5), [user(text("annotated", annotations=NOTE, _meta=META))]),
        P: [user(text("annotated", annotations=NOTE))],
    },
    "picture": same(ALL, [user(IMAGE)]),
    "sound": {
        **same((R0, R1), [model(MOVED), model(text("[audio, audio/wav, 44 B]"))]),
        **same((R2, R3, R4, R5, P), [model(AUDIO)]),
    },
    "link": {
        **same((R0, R1, R2), [user(text("app — config://app (text/plain)\nSettings"))]),
        **same((R3, P), [user(LINK)]),
        **same((R4, R5), [user({**LINK, "icons": [ICON]})]),
    },
    "embedded": {
        R0: embedded(INNER),
        **same((R1, R2), embedded(INNER, annotations=OLD_NOTE)),
        **same((R3, R4, R5, P), embedded({**INNER, "title": "App"}, annotations=NOTE)),
    },
}


@requirement("SRV-722", "SRV-418", "SRV-419")
@everywhere()
async def test_a_message_is_said_in_the_closest_way_the_revision_has(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    for name, by_revision in MESSAGES.items():
        messages = (await get(wire, name))["result"]["messages"]
        for each in messages:
            resource = each["content"].get("resource", {})
            if re.fullmatch(r"urn:mcp-content:sha256:[0-9a-f]{16}", resource.get("uri", "")):
                resource["uri"] = "urn:mcp-content:sha256:…"
        assert messages == by_revision[wire.revision], name


@requirement("SRV-722")
@everywhere()
async def test_a_prompt_is_given_with_its_description(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    result = (await get(wire, "review", {"code": "x = 1\r\n\t'ü' 🦆"}))["result"]
    assert result["description"] == "Ask for a review."
    assert result["messages"] == [user(text("Review in short: x = 1\r\n\t'ü' 🦆"))]
    assert "description" not in (await get(wire, "plain"))["result"]
    assert (await get(wire, "talk"))["result"]["description"] == "Two sides."
    assert (await get(wire, "talk", {}))["result"]["description"] == "Two sides."


@requirement("SRV-722", "P-02", "P-34")
@everywhere()
async def test_a_prompt_that_cannot_be_given_is_one_error_and_nothing_of_it_leaves(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    error = (await get(wire, "act", {"what": "fails", "mark": "Atlantis"}))["error"]
    assert (error["code"], "No such city: Atlantis" in error["message"]) == (-32603, True)
    answer = await get(wire, "act", {"what": "crashes", "mark": "x"})
    assert answer["error"]["code"] == -32603
    assert SECRET not in json.dumps(answer)
    for name in UNFIT_MESSAGES:
        answer = await get(wire, f"unfit-{name}")
        assert answer.get("error", {"code": 0})["code"] == -32603, name
        assert "object at 0x" not in json.dumps(answer)
    assert text_of(await get(wire, "plain")) == "Go on."


# Arguments


TYPED: Object = {"count": "3", "share": "1.5", "flag": "true", "side": "front"}
READ: list[tuple[str, Object, str]] = [
    ("typed", TYPED, "3 1.5 True front -"),
    ("typed", {**TYPED, "flag": "false", "side": "back", "text": "5"}, "3 1.5 False back 5"),
    ("typed", {**TYPED, "share": "2", "text": ""}, "3 2.0 True front "),
    ("typed", {**TYPED, "share": "-1e3", "text": "true"}, "3 -1000.0 True front true"),
    ("optional", {}, "None None"),
    ("optional", {"text": "x", "count": "4"}, "'x' 4"),
    ("optional", {"text": "5"}, "'5' None"),
    ("optional", {"text": "null", "count": "-1"}, "'null' -1"),
    ("review", {"code": "x"}, "Review in short: x"),
    ("review", {"code": "", "style": "long"}, "Review in long: "),
    ("travel", {"city": "Rome", "dry": "false"}, "Rome  spring False"),
]


@requirement("SRV-723")
@everywhere()
async def test_the_texts_of_arguments_become_the_types_of_the_parameters(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    for name, arguments, expected in READ:
        assert text_of(await get(wire, name, arguments)) == expected, (name, arguments)


def without(name: str) -> Object:
    return {each: value for each, value in TYPED.items() if each != name}


WRONG: list[tuple[str, Json, str]] = [  # the prompt, its arguments, and what the error has to name
    ("review", None, "code"),
    ("review", {}, "code"),
    ("review", {"style": "long"}, "code"),
    *(("typed", without(name), name) for name in TYPED),
    ("review", {"code": "x", "lines": "5"}, "lines"),
    ("review", {"code": "x", "Style": "long"}, "Style"),
    ("plain", {"code": "x"}, "code"),
    ("act", {"what": "hello", "mark": "x", "call": "x"}, "call"),
    ("review", {"code": "x", "style": "LONG"}, "style"),
    ("review", {"code": "x", "style": ""}, "style"),
    *(("typed", {**TYPED, "count": each}, "count") for each in ("", "0", "-1", "1.5", "ten", " 1", "3 ", "٣")),
    *(
        ("typed", {**TYPED, "count": each}, "count")
        for each in ("null", "true", "[1]", '"1"', "0x1", "1_0", "9" * 5_000)
    ),
    *(("typed", {**TYPED, "share": each}, "share") for each in ("", "nan", "NaN", "Infinity", "1,5", "half", "null")),
    *(("typed", {**TYPED, "flag": each}, "flag") for each in ("", "yes", "1", "TRUE", "null", "0")),
    ("typed", {**TYPED, "side": "front,back"}, "side"),
    ("optional", {"count": "four"}, "count"),
]


@requirement("SRV-723", "P-06")
@everywhere()
async def test_wrong_arguments_are_refused_by_name_and_nothing_runs(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    before = [await times_run(wire, name) for name in ("review", "typed", "act hello")]
    for name, arguments, named in WRONG:
        error = (await get(wire, name, arguments)).get("error", {"code": 0})
        assert error["code"] == -32602, (name, arguments)
        assert named in json.dumps(error), (name, arguments)
        assert len(json.dumps(error)) < 2_000
    assert [await times_run(wire, name) for name in ("review", "typed", "act hello")] == before


MALFORMED: list[Object] = [
    {},
    *({"name": each} for each in (None, 5, True, ["review"], {"name": "review"})),
    *({"name": "review", "arguments": each} for each in ("code", 5, True, [], ["code"], [["code", "x"]])),
    *({"name": "review", "arguments": {"code": each}} for each in (5, 1.5, True, None, ["x"], {"x": "x"})),
    {"name": "typed", "arguments": {**TYPED, "count": 3}},
    {"name": "typed", "arguments": {**TYPED, "flag": True}},
]


@requirement("SRV-723", "SRV-410")
@everywhere()
async def test_arguments_that_are_no_texts_and_malformed_params_are_refused(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    before = [await times_run(wire, name) for name in ("review", "typed")]
    for params in MALFORMED:
        code = (await wire.request("prompts/get", params)).get("error", {"code": 0})["code"]
        has_header = wire.stateless and wire.transport == "http"  # which has to repeat a name that is none
        assert code == -32602 or (has_header and code == -32020), params
    assert [await times_run(wire, name) for name in ("review", "typed")] == before


UNKNOWN = ["nope", "", "REVIEW", "review ", " review", "review\0", "prompt:review", "config://app", "echo", "x" * 5_000]


@requirement("SRV-723")
@everywhere()
async def test_an_unknown_prompt_is_an_error_of_the_protocol(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF, fresh=True)
    for name in UNKNOWN:
        error = (await get(wire, name, {"code": "x"}))["error"]
        assert error["code"] == -32602, name
        assert len(json.dumps(error)) < 2_000
    await wire.call("change", {"kind": "prompt", "verb": "disable", "name": "plain"})
    assert (await get(wire, "plain"))["error"]["code"] == -32602
    await wire.call("change", {"kind": "prompt", "verb": "enable", "name": "plain"})
    assert text_of(await get(wire, "plain")) == "Go on."


# Asking


EVERYTHING: Object = {"elicitation": {"form": {}, "url": {}}, "sampling": {}, "roots": {}}
FORMS: Object = {"elicitation": {}}
SAID_BY_MODEL: Object = {"role": "assistant", "content": {"type": "text", "text": "Paris"}, "model": "m"}
FOLDERS: Object = {"roots": [{"uri": "file:///a"}, {"uri": "file:///b"}]}
BY_PEOPLE = [("asks", "accept Your name?"), ("asks-twice", "Your name? Surname, Your name??")]
BY_CLIENTS = [("samples", "{'type': 'text', 'text': 'Paris'}"), ("roots", "file:///a, file:///b")]


def accept(**content: Json) -> Object:
    return {"action": "accept", "content": content}


def always(reply: Object) -> Callable[[str, Object], Object]:
    return lambda method, params: reply


def person(method: str, params: Object) -> Object:
    """A client that answers everything: its name is the question."""
    if method == "elicitation/create":
        return accept(name=params["message"])
    return SAID_BY_MODEL if method == "sampling/createMessage" else FOLDERS


async def retry(wire: Wire, method: str, params: Object, state: Json, responses: Json = None) -> Object:
    answered = {} if responses is None else {"inputResponses": responses}
    return await wire.request(method, {**params, "requestState": state, **answered})


@requirement("SRV-724", "SRV-501", "SRV-507")
@everywhere()
@by_way
async def test_a_prompt_and_a_resource_ask_as_a_tool_does(open_wire: Open, way: Way) -> None:
    wire: Wire = await open_wire(SHELF, capabilities=EVERYTHING)
    for what, expected in BY_CLIENTS:
        answer, asked = await converse(wire, way.method, way.params(what), person)
        assert text_of(answer) == expected
        assert len(asked) == 1
    for what, expected in BY_PEOPLE:
        answer, asked = await converse(wire, way.method, way.params(what), person)
        if wire.revision in WITH_FORMS:
            assert text_of(answer) == expected
            assert len(asked) == what.count("-") + 1
            assert asked[0]["method"] == "elicitation/create"
            assert asked[0]["params"]["requestedSchema"] == FORM
        else:
            assert (answer["error"]["code"], asked) == (-32603, []), "a revision without questions to people"
            assert "elicitation" in answer["error"]["message"]


@requirement("SRV-724", "SRV-508")
@everywhere(*WITH_FORMS)
@by_way
async def test_decline_and_cancel_are_not_acceptance(open_wire: Open, way: Way) -> None:
    wire: Wire = await open_wire(SHELF, capabilities=FORMS)
    for action in ("decline", "cancel"):
        reply = always({"action": action, "content": {"name": "x"}})
        answer, _ = await converse(wire, way.method, way.params("asks"), reply)
        assert text_of(answer) == f"{action} -"


@requirement("SRV-724", "SRV-502", "SRV-507")
@everywhere()
@by_way
async def test_nothing_undeclared_is_asked(open_wire: Open, way: Way) -> None:
    wire: Wire = await open_wire(SHELF)
    for what, capability in (
        ("asks", "elicitation"),
        ("samples", "sampling"),
        ("roots", "roots"),
        ("requires", "sampling"),
    ):
        error = (await wire.request(way.method, way.params(what)))["error"]
        assert capability in error["message"]
        if wire.stateless:
            needed: Object = {"form": {}} if capability == "elicitation" else {}
            assert (error["code"], error["data"]) == (-32021, {"requiredCapabilities": {capability: needed}})
        else:
            assert error["code"] == -32603
    assert not wire.others


MALFORMED_ANSWERS: list[Json] = [[], "x", 5, None, {"one": "x"}, {"one": None}, {"one": [accept(name="x")]}]
MALFORMED_STATES: list[Json] = [5, None, True, {}, ["x"]]


@requirement("SRV-724", "SRV-501", "SRV-505")
@everywhere(R5)
@by_way
async def test_a_question_is_an_answer_that_asks_until_all_of_it_is_answered(open_wire: Open, way: Way) -> None:
    wire: Wire = await open_wire(SHELF, capabilities=FORMS)
    params = way.params("asks-twice")
    first = (await wire.request(way.method, params))["result"]
    assert first["resultType"] == "input_required"
    assert set(first["inputRequests"]) == {"one"}
    state = first["requestState"]
    for misfit in ({"stray": accept(name="x")}, {"one": accept()}, {"one": {"action": "maybe"}}, {}):
        again = (await retry(wire, way.method, params, state, misfit))["result"]
        assert (again["resultType"], set(again["inputRequests"])) == ("input_required", {"one"}), misfit
    for malformed in MALFORMED_ANSWERS:
        answer = await wire.request(way.method, {**params, "requestState": state, "inputResponses": malformed})
        assert answer["error"]["code"] == -32602, malformed
    for wrong in MALFORMED_STATES:
        assert (await retry(wire, way.method, params, wrong))["error"]["code"] == -32602, wrong
    second = (await retry(wire, way.method, params, state, {"one": accept(name="Ada")}))["result"]
    assert second["inputRequests"]["two"]["params"]["message"] == "Surname, Ada?"
    answer = await retry(wire, way.method, params, second["requestState"], {"two": accept(name="L."), "one": accept()})
    assert text_of(answer) == "Ada L."


@requirement("SRV-724", "SRV-504", "P-25")
@everywhere(R5)
@by_way
async def test_a_state_that_was_changed_is_refused(open_wire: Open, way: Way) -> None:
    wire: Wire = await open_wire(SHELF, capabilities=FORMS)
    params, answers = way.params("asks"), {"name": accept(name="x")}
    state = (await wire.request(way.method, params))["result"]["requestState"]
    changed = [state[:at] + ("A" if sign != "A" else "B") + state[at + 1 :] for at, sign in enumerate(state)]
    changed += ["", "A", state[:-1], state[1:], f"{state}A", f"{state}=", f" {state}", state.swapcase(), "A" * 50_000]
    for each in changed:
        error = (await retry(wire, way.method, params, each, answers))["error"]
        assert (error["code"], "requestState" in error["message"]) == (-32602, True), each
    assert text_of(await retry(wire, way.method, params, state, answers)) == "accept x"


ASKING: list[tuple[str, Object]] = [
    ("tools/call", {"name": "asks", "arguments": {}}),
    *((way.method, way.params("asks", mark)) for way in WAYS for mark in ("x", "y")),
    *((way.method, way.params("asks-twice")) for way in WAYS),
]


@requirement("SRV-724", "SRV-504", "P-25")
@everywhere(R5)
async def test_a_state_is_good_for_one_request_of_one_method(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF, capabilities=FORMS)
    states = [(await wire.request(method, params))["result"]["requestState"] for method, params in ASKING]
    answers = {"name": accept(name="x"), "one": accept(name="x")}
    for at, (method, params) in enumerate(ASKING):
        for other, state in enumerate(states):
            answer = await retry(wire, method, params, state, answers)
            if at == other:
                assert "result" in answer, (method, params)
            else:
                assert answer["error"]["code"] == -32602, (method, params, ASKING[other])


@requirement("SRV-724", "SRV-504", "P-25")
async def test_a_state_is_bound_to_the_method_where_name_and_arguments_are_the_same(ran: Any) -> None:
    server = Server("same")

    async def asks(call: Call, a: str = "") -> str:
        """Asks."""
        answer = await call.ask("Your name?", FORM, key="name")
        return f"{call.method} {answer.action}"

    server.add(asks, name="x:a")
    server.prompt("x:a")(asks)
    server.resource("x:a")(asks)
    methods: list[tuple[str, Object]] = [
        ("tools/call", {"name": "x:a", "arguments": {}}),
        ("prompts/get", {"name": "x:a", "arguments": {}}),
        ("resources/read", {"uri": "x:a"}),
    ]
    async with Peer(server, revision=R5, capabilities=FORMS) as peer:
        ran(R5, "memory")
        states = [(await peer.request(method, params))["result"]["requestState"] for method, params in methods]
        for at, (method, params) in enumerate(methods):
            for other, state in enumerate(states):
                more = {"requestState": state, "inputResponses": {"name": {"action": "decline"}}}
                answer = await peer.request(method, {**params, **more})
                assert ("result" in answer) is (at == other), (method, methods[other][0])
                assert "result" in answer or answer["error"]["code"] == -32602


@requirement("SRV-724", "SRV-504", "P-25")
@by_way
async def test_a_state_is_good_for_its_holder_and_until_its_hour_has_come(way: Way, ran: Any) -> None:
    server = shelf()
    now = [1_000_000.0]
    server.engine.clock = lambda: now[0]
    async with (
        Peer(server, revision=R5, capabilities=FORMS, principal=Principal("one")) as one,
        Peer(server, revision=R5, capabilities=FORMS, principal=Principal("other")) as other,
    ):
        ran(R5, "memory")
        state = (await one.request(way.method, way.params("asks")))["result"]["requestState"]
        params = {**way.params("asks"), "inputResponses": {"name": accept(name="x")}, "requestState": state}
        assert (await other.request(way.method, params))["error"]["code"] == -32602
        now[0] += 3_599
        assert text_of(await one.request(way.method, params)) == "accept x"
        now[0] += 1
        assert (await one.request(way.method, params))["error"]["code"] == -32602


@requirement("SRV-724", "SRV-503")
@everywhere(R5)
async def test_no_other_method_asks(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF, capabilities=EVERYTHING)
    state = (await wire.request("prompts/get", WAYS[1].params("asks")))["result"]["requestState"]
    more: Object = {"inputResponses": {"name": accept(name="x")}, "requestState": state}
    complete: Object = {
        "ref": {"type": "ref/prompt", "name": "act"},
        "argument": {"name": "what", "value": "asks"},
        "context": {"arguments": {"mark": "x"}},
    }
    for method, params in (
        *((each, {}) for each in ("server/discover", "tools/list", "prompts/list")),
        *((each, {}) for each in ("resources/list", "resources/templates/list")),
        ("completion/complete", complete),
    ):
        for each in (params, {**params, **more}):
            result = (await wire.request(method, each))["result"]
            assert result["resultType"] == "complete"
            assert not {"inputRequests", "requestState"} & set(result)


# Logs, progress, times, cancelling


@requirement("SRV-725", "SRV-518", "SRV-519")
@everywhere()
@by_way
async def test_log_messages_come_from_the_level_that_was_asked_for(open_wire: Open, way: Way) -> None:
    wire: Wire = await open_wire(SHELF)
    both = [{"level": "debug", "data": "small"}, {"level": "error", "logger": "shelf", "data": {"step": 1}}]
    for level, expected in (("debug", both), ("error", both[1:]), ("emergency", [])):
        meta: Object = {"logLevel": level} if wire.stateless else {}
        if not wire.stateless:
            assert (await wire.request("logging/setLevel", {"level": level}))["result"] == {}
        answer = await wire.request(way.method, way.params("logs"), **meta)
        assert text_of(answer).startswith("logs x")
        messages = [each["params"] for each in wire.others]
        assert [{name: each[name] for name in each if name != "_meta"} for each in messages] == expected
        assert all(each["method"] == "notifications/message" for each in wire.others)
        wire.others.clear()
    if wire.stateless:
        await wire.request(way.method, way.params("logs"))
        assert not wire.others, "nobody asked to be told"


@requirement("SRV-725", "SRV-515")
@everywhere()
@by_way
async def test_progress_comes_with_a_token_and_grows(open_wire: Open, way: Way) -> None:
    wire: Wire = await open_wire(SHELF)
    for token in ("a token", 0, ""):
        answer = await wire.request(way.method, way.params("progresses"), progressToken=token)
        assert text_of(answer).startswith("progresses")
        notices = [each["params"] for each in wire.others if each["method"] == "notifications/progress"]
        assert len(notices) == len(wire.others)
        wire.others.clear()
        assert [each["progress"] for each in notices] == [0, 50, 100]
        assert all(each["progressToken"] == token and each["total"] == 100 for each in notices)
    await wire.request(way.method, way.params("progresses"))
    assert not wire.others, "nobody asked to be told"


@requirement("SRV-725")
@everywhere()
@by_way
async def test_what_takes_too_long_is_an_error_and_the_next_one_is_answered(open_wire: Open, way: Way) -> None:
    wire: Wire = await open_wire(SHELF)
    error = (await wire.request(way.method, way.quick()))["error"]
    assert (error["code"], "quick" in error["message"]) == (408, True)
    assert text_of(await wire.request(way.method, way.params("hello"))) == f"hello x {way.method} True"


@requirement("SRV-725", "SRV-516", "P-09")
@everywhere(*ALL[1:])  # the first revision knows no cancelling
@by_way
async def test_a_cancelled_request_stops_and_says_nothing_more(open_wire: Open, way: Way) -> None:
    wire: Wire = await open_wire(SHELF)
    mark = f"{way.method.partition('/')[0]}-{wire.revision}-{wire.transport}"
    ident = await wire.ask(way.method, way.params("waits", mark))
    await until(wire, "has_begun", mark)
    await wire.notify(CANCELLED, {"requestId": ident, "reason": "changed my mind"})
    await until(wire, "was_stopped", mark)
    assert await wire.silent()


@requirement("SRV-725", "SRV-507")
@everywhere(R3, R4, P)
@by_way
async def test_a_request_cancelled_while_it_asks_takes_its_question_back(open_wire: Open, way: Way) -> None:
    wire: Wire = await open_wire(SHELF, capabilities=FORMS)
    ident = await wire.ask(way.method, way.params("asks"))
    question = await wire.notice("elicitation/create")
    await wire.notify(CANCELLED, {"requestId": ident})
    assert (await wire.notice(CANCELLED))["params"] == {"requestId": question["id"]}
    await wire.send({"jsonrpc": "2.0", "id": question["id"], "result": accept(name="late")})
    assert await wire.silent()


@requirement("SRV-725", "P-09")
@everywhere(*LEGACY, transports=["http"])
@by_way
async def test_what_a_client_that_leaves_had_asked_for_stops(open_wire: Open, way: Way) -> None:
    wire: HttpWire = await open_wire(SHELF)
    mark = f"{way.method.partition('/')[0]}-{wire.revision}-left"
    another = HttpWire(wire.revision, wire.server)
    try:
        await another.open()
        await wire.ask(way.method, way.params("waits", mark))
        await until(another, "has_begun", mark)
        await wire.close()
        await until(another, "was_stopped", mark)
    finally:
        await another.close()


@requirement("SRV-725", "P-08")
@everywhere()
async def test_many_reads_and_prompts_at_once_get_each_its_own_answer(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    wanted = [(way, f"m{at}") for at in range(25) for way in WAYS]
    idents = [await wire.ask(way.method, way.params("hello", mark)) for way, mark in wanted]
    async with asyncio.timeout(PATIENCE):
        for ident, (way, mark) in zip(reversed(idents), reversed(wanted), strict=True):
            assert text_of(await wire.answer(ident)) == f"hello {mark} {way.method} True"
