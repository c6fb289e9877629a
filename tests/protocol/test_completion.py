"""Completion of prompt arguments and template variables, in every dialect. Requirements section 11."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from handrail import SchemaError, Server
from requirements import requirement
from servers_calling import said
from servers_guards import ACTS
from servers_resources import CITIES, SECRET, answering, taking_a
from wires import ALL, Open, Wire
from wires_shared import everywhere, open_wire as open_wire, processes as processes

Json = Any
Object = dict[str, Any]

R0, R1, R2, R3, R4, R5, P = (*ALL[:5], "2026-07-28", "pocket")
SHELF, COMPLETING = "servers_resources:shelf", "servers_resources:completing"


def reference(name: str) -> Object:
    """Of a template, if it is a URI; else of a prompt."""
    return {"type": "ref/resource", "uri": name} if ":" in name else {"type": "ref/prompt", "name": name}


async def complete(wire: Wire, name: str, argument: str, value: str = "", context: Json = None) -> Object:
    more: Object = {} if context is None else {"context": {"arguments": context}}
    params = {"ref": reference(name), "argument": {"name": argument, "value": value}, **more}
    return await wire.request("completion/complete", params)


async def values(wire: Wire, name: str, argument: str, value: str = "", context: Json = None) -> list[str]:
    answer = (await complete(wire, name, argument, value, context))["result"]["completion"]
    assert answer.get("total", len(answer["values"])) >= len(answer["values"])
    texts: list[str] = answer["values"]
    return texts


SOURCES: list[tuple[str, str, str, list[str]]] = [  # what is completed, the value so far, and what it could be
    ("travel", "city", "city 00", CITIES[:10]),
    ("travel", "city", "007", ["city 007"]),
    ("travel", "city", "Atlantis", []),
    ("travel", "street", "x", ["-: x"]),
    ("travel", "season", "", ["spring", "summer"]),
    ("travel", "season", "su", ["summer"]),
    ("travel", "season", "winter", []),
    ("travel", "dry", "", ["true", "false"]),
    ("travel", "dry", "t", ["true"]),
    ("review", "style", "", ["short", "long"]),
    ("review", "code", "x", []),
    ("typed", "side", "b", ["back"]),
    ("typed", "flag", "", ["true", "false"]),
    ("typed", "count", "1", []),
    ("optional", "text", "", []),
    ("act", "what", "", []),
    ("note://{name}", "name", "", ["ada", "alan", "barbara", "grace"]),
    ("note://{name}", "name", "a", ["ada", "alan"]),
    ("note://{name}", "name", "A", []),
    ("book://{name}/{page}", "name", "g", ["grace"]),
    ("book://{name}/{page}", "page", "3", ["- 3"]),
    ("side://{side}/{flag}", "side", "", ["front", "back"]),
    ("side://{side}/{flag}", "flag", "f", ["false"]),
    ("path:///{+path}", "path", "a/", []),
    ("search://items{?q,limit}", "q", "x", []),
    ("search://items{?q,limit}", "limit", "", []),
]


@requirement("SRV-731")
@everywhere()
async def test_values_come_from_the_author_or_from_the_choices_of_a_type(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    for name, argument, value, expected in SOURCES:
        assert await values(wire, name, argument, value) == expected, (name, argument, value)


def nothing() -> list[str]:
    return []


@requirement("SRV-731", everywhere=True)
@pytest.mark.parametrize(
    "functions",
    [
        {"b": lambda value: []},
        {"a": "ada"},
        {"a": ["ada"]},
        {"a": nothing},
        {"a": lambda value, context, more: []},
        ["a"],
    ],
    ids=["no such argument", "a text", "a list", "no parameter", "three parameters", "no mapping"],
)
def test_a_completion_that_can_never_work_is_refused_at_registration(functions: Any) -> None:
    server = Server("strict")
    with pytest.raises((SchemaError, TypeError, ValueError), match="complete"):
        server.prompt("p", complete=functions)(taking_a("x"))
    with pytest.raises((SchemaError, TypeError, ValueError), match="complete"):
        server.resource("x:{a}", complete=functions)(taking_a("x"))
    assert server.prompts == [] and server.templates == []


# How many


@requirement("SRV-732")
@everywhere()
async def test_at_most_a_hundred_values_come_and_their_number_is_true(open_wire: Open) -> None:
    wire: Wire = await open_wire(COMPLETING)
    for name, count in itertools.product(("count", "count://{a}"), (0, 1, 99, 100, 101, 250, 9_999, 20_000)):
        completion = (await complete(wire, name, "a", str(count)))["result"]["completion"]
        assert completion["values"] == [f"value {at:05}" for at in range(min(count, 100))]
        assert completion.get("hasMore", False) is (count > 100)
        assert completion.get("total", count) == count, "a number that is not known is not given"
        assert "total" in completion or count == 20_000


@requirement("SRV-732", "P-35")
@everywhere()
async def test_values_without_end_come_to_an_end(open_wire: Open) -> None:
    wire: Wire = await open_wire(COMPLETING)
    completion = (await complete(wire, "endless", "a", "x"))["result"]["completion"]
    assert completion["values"] == [f"x{at}" for at in range(100)]
    assert completion["hasMore"] is True


# Context

BOTH = {"city": "Rome", "a": "x"}


@requirement("SRV-732")
@everywhere()
async def test_arguments_that_are_known_already_reach_the_function_where_the_revision_has_them(open_wire: Open) -> None:
    wire: Wire = await open_wire(COMPLETING)
    has_context = wire.revision in (R3, R4, R5, P)
    for name in ("context", "context://{a}"):
        assert await values(wire, name, "a") == ["none"]
        assert await values(wire, name, "a", context={}) == ["none"]
        assert await values(wire, name, "a", context=BOTH) == (["a=x", "city=Rome"] if has_context else ["none"])
    shelf: Wire = await open_wire(SHELF)
    known = "ada" if has_context else "-"
    assert await values(shelf, "book://{name}/{page}", "page", "3", {"name": "ada"}) == [f"{known} 3"]
    assert await values(shelf, "travel", "season", "s", {"city": "Rome"}) == ["spring", "summer"]


@requirement("SRV-732")
@everywhere(R3, R4, R5, P)
async def test_a_context_without_arguments_is_an_empty_one(open_wire: Open) -> None:
    wire: Wire = await open_wire(COMPLETING)
    params = {"ref": reference("context"), "argument": {"name": "a", "value": ""}, "context": {}}
    assert (await wire.request("completion/complete", params))["result"]["completion"]["values"] == ["none"]


# What cannot be completed

UNKNOWN: list[tuple[str, str]] = [
    ("nope", "a"),
    ("", "a"),
    ("REVIEW", "code"),
    ("review ", "code"),
    ("echo", "text"),
    ("review", "nope"),
    ("review", ""),
    ("review", "Code"),
    ("act", "call"),
    ("plain", "x"),
    ("nope://{name}", "name"),
    ("note://ada", "name"),
    ("note://{other}", "other"),
    ("note://{name}", "nope"),
    ("note://{name}", "value"),
    ("config://app", "x"),
    ("x" * 5_000, "a"),
    ("note://{name}" + "x" * 5_000, "name"),
    ("review", "x" * 5_000),
]


@requirement("SRV-733")
@everywhere()
async def test_what_is_not_there_cannot_be_completed(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    for name, argument in UNKNOWN:
        error = (await complete(wire, name, argument, "x"))["error"]
        assert error["code"] == -32602, (name, argument)
        assert len(json.dumps(error)) < 5_000


REF: Object = {"type": "ref/prompt", "name": "review"}
ARGUMENT: Object = {"name": "style", "value": ""}
NO_TEXTS: list[Json] = [None, 5, True, ["x"], {}]
WRONG_REFERENCES: list[Json] = ["review", None, 5, [], {}, [REF], {"name": "review"}, {"type": "ref/prompt"}]
WRONG_ARGUMENTS: list[Json] = ["style", None, [], {}, {"name": "style"}, {"value": ""}, [ARGUMENT]]
MALFORMED: list[Object] = [
    {},
    {"ref": REF},
    {"argument": ARGUMENT},
    *({"ref": each, "argument": ARGUMENT} for each in WRONG_REFERENCES),
    *(
        {"ref": {**REF, "type": each}, "argument": ARGUMENT}
        for each in ("ref/tool", "prompt", "", None, 5, "ref/resource")
    ),
    *({"ref": {**REF, "name": each}, "argument": ARGUMENT} for each in NO_TEXTS),
    *({"ref": {"type": "ref/resource", "uri": each}, "argument": ARGUMENT} for each in NO_TEXTS),
    *({"ref": REF, "argument": each} for each in WRONG_ARGUMENTS),
    *({"ref": REF, "argument": {**ARGUMENT, "value": each}} for each in NO_TEXTS),
    *({"ref": REF, "argument": {**ARGUMENT, "name": each}} for each in NO_TEXTS),
]
WRONG_KNOWN: list[Json] = ["x", 5, None, [], {"a": 5}, {"a": None}, {"a": ["x"]}]
WRONG_CONTEXT: list[Json] = ["x", 5, [], None, *({"arguments": each} for each in WRONG_KNOWN)]


@requirement("SRV-733", "SRV-410")
@everywhere()
async def test_malformed_params_are_refused(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    for params in MALFORMED:
        answer = await wire.request("completion/complete", params)
        assert answer.get("error", {"code": 0})["code"] == -32602, params
    if wire.revision in (R3, R4, R5, P):
        for context in WRONG_CONTEXT:
            answer = await wire.request("completion/complete", {"ref": REF, "argument": ARGUMENT, "context": context})
            assert answer.get("error", {"code": 0})["code"] == -32602, context
    assert await values(wire, "review", "style") == ["short", "long"]


@requirement("SRV-733")
@everywhere()
async def test_what_is_switched_off_cannot_be_completed_until_it_is_switched_on(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF, fresh=True)
    for kind, name, argument in (("prompt", "review", "style"), ("resource", "note://{name}", "name")):
        offered = await values(wire, name, argument)
        await wire.call("change", {"kind": kind, "verb": "disable", "name": name})
        assert (await complete(wire, name, argument))["error"]["code"] == -32602
        await wire.call("change", {"kind": kind, "verb": "enable", "name": name})
        assert await values(wire, name, argument) == offered != []


@requirement("SRV-733", "P-34")
@everywhere()
async def test_a_function_that_fails_is_an_error_without_its_text(open_wire: Open) -> None:
    wire: Wire = await open_wire(COMPLETING)
    for name in ("crashes", "one-text", "numbers", "nothing"):
        for each in (name, f"{name}://{{a}}"):
            answer = await complete(wire, each, "a", "x")
            assert answer.get("error", {"code": 0})["code"] == -32603, each
            assert SECRET not in json.dumps(answer)
    assert (await complete(wire, "fails", "a"))["error"]["code"] == -32603
    assert await values(wire, "count", "a", "1") == ["value 00000"]


@requirement("SRV-731", "P-33")
@everywhere()
async def test_values_are_cleaned_as_everything_that_leaves(open_wire: Open) -> None:
    wire: Wire = await open_wire(COMPLETING)
    answer = await complete(wire, "dirty", "a")
    assert not set(json.dumps(answer, ensure_ascii=False)) & (set(ACTS) - set("[31m2J"))
    assert "\\u001b" not in json.dumps(answer)
    assert answer["result"]["completion"]["values"][0].startswith("a")


@requirement("SRV-731", "P-35")
@everywhere()
async def test_a_value_of_any_length_and_kind_is_only_a_value(open_wire: Open) -> None:
    wire: Wire = await open_wire(COMPLETING)
    ran = int(said(await wire.call("times_run", {"name": "count"})))
    for value in ("\0", "\u202e", "{{7*7}}", '"}]', "ü 🦆", "%s%n", "\r\n\r\n"):
        assert await values(wire, "context", "a", value) == ["none"]
    long = "x" * 1_000_000
    assert await values(wire, "context", "a", long) == ["none"]
    shelf: Wire = await open_wire(SHELF)
    assert await values(shelf, "travel", "city", long) == []
    assert await values(shelf, "travel", "season", long) == []
    assert int(said(await wire.call("times_run", {"name": "count"}))) == ran


@requirement("SRV-731")
@everywhere()
async def test_a_server_with_templates_alone_completes_nothing_of_prompts(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_resources:templates_only")
    assert await values(wire, "a:c/{a}", "a", "x") == []
    assert (await complete(wire, "bare", "x"))["error"]["code"] == -32602


@requirement("SRV-731", everywhere=True)
def test_completion_is_registered_for_a_prompt_and_a_template_alike() -> None:
    server = Server("alike")
    server.prompt("p", complete={"a": lambda value: [value]})(taking_a("x"))
    server.resource("x:{a}", complete={"a": lambda value, context: [value]})(taking_a("x"))
    server.resource("x:y")(answering("x"))
    assert [each.name for each in server.prompts] == ["p"]
    assert [each.uri_template for each in server.templates] == ["x:{a}"]
