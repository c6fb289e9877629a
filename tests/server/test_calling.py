"""Calling a tool: what reaches it, what does not, and how many at once."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from handrail import SchemaError, Server
from handrail.engine.dispatcher import MAX_BATCH
from requirements import requirement
from servers_calling import KEYWORDS, failure, said, until
from subject import SECRET
from wires import ALL, LEGACY, MemoryWire, Open, Wire, wire_to
from wires_shared import everywhere, open_wire as open_wire, processes as processes, wire as wire

Json = Any
Object = dict[str, Any]

BY_ERROR = ("2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", "pocket")
BY_RESULT = ("2025-11-25", "2026-07-28")


def refused(answer: Object, revision: str) -> str:
    """Bad arguments in the form of the revision (REVISIONS 16.1); gives the text."""
    if revision in BY_RESULT:
        return failure(answer)
    error = answer["error"]
    assert error["code"] == -32602
    if revision == "2024-10-07":
        assert error["message"] == "Invalid params"
        assert set(error["data"]) == {"reason"}
        return str(error["data"]["reason"])
    return str(error["message"])


# Parameters


@requirement("SRV-409")
@everywhere()
async def test_absent_arguments_are_an_empty_object(wire: Wire) -> None:
    assert said(await wire.call("nothing")) in ("null", "")
    assert said(await wire.call("nothing", {})) in ("null", "")
    assert "days" in refused(await wire.call("bounded"), wire.revision)


MALFORMED: list[Object] = [
    {},
    {"name": None},
    {"name": 5},
    {"name": ["echo"]},
    {"arguments": {"text": "x"}},
    {"name": "echo", "arguments": []},
    {"name": "echo", "arguments": None},
    {"name": "echo", "arguments": "text=x"},
    {"name": "echo", "arguments": 1},
    {"name": "echo", "arguments": {"text": "x"}, "_meta": {"progressToken": 1.5}},
    {"name": "echo", "arguments": {"text": "x"}, "_meta": {"progressToken": None}},
]


@requirement("SRV-410")
@everywhere()
async def test_malformed_parameters_are_an_error_of_the_protocol(wire: Wire) -> None:
    for params in MALFORMED:
        answer = await wire.request("tools/call", params)
        # Over HTTP a header repeats the name, and what it has to repeat is looked at first (REVISIONS 6, step d).
        is_nameless = wire.stateless and wire.transport == "http" and not isinstance(params.get("name"), str)
        assert answer["error"]["code"] == (-32020 if is_nameless else -32602), params
    # Members nobody knows are no error: decoders are tolerant.
    answer = await wire.request("tools/call", {"name": "echo", "arguments": {"text": "x"}, "novelty": 1})
    assert said(answer) == "x"


@requirement("SRV-411")
@everywhere()
async def test_an_unknown_tool_is_named_in_the_way_of_the_revision(wire: Wire) -> None:
    error = (await wire.call("nope", {}))["error"]
    assert error["code"] == -32602
    if wire.revision == "2024-10-07":
        assert error["message"] == "Invalid params"
        assert error["data"] == {"reason": "Unknown tool: nope"}
    else:
        assert error["message"] == "Unknown tool: nope"
        assert "data" not in error
    near = (await wire.call("ech", {}))["error"]
    if wire.revision == "2024-10-07":
        assert near["data"] == {"reason": "Unknown tool: ech"}
    else:
        assert near["message"] == "Unknown tool: ech"
        assert near["data"] == {"didYouMean": "echo"}
    # As long as a header may be that has to repeat it.
    length = 20_000 if wire.stateless and wire.transport == "http" else 100_000
    long = (await wire.call("x" * length, {}))["error"]
    assert len(json.dumps(long)) < 1_000


BAD_ADDITIONS: list[Object] = [
    {"a": "1", "b": 2},
    {"a": 1},
    {},
    {"a": 1, "b": None},
    {"a": 1, "b": 2, "c": 3},
    {"A": 1, "b": 2},
    {"a": True, "b": 2},
    {"a": [1], "b": {"value": 2}},
]


async def runs(wire: Wire, name: str) -> int:
    return int(said(await wire.call("times_run", {"name": name})))


async def _bad_additions(wire: Wire) -> list[Object]:
    before = await runs(wire, "add")
    answers = [await wire.call("add", arguments) for arguments in BAD_ADDITIONS]
    assert await runs(wire, "add") == before
    await wire.call("add", {"a": 1, "b": 2})
    assert await runs(wire, "add") == before + 1, "the counter does not count"
    return answers


@requirement("SRV-412")
@everywhere(*BY_ERROR)
async def test_bad_arguments_are_an_error_in_older_revisions_and_nothing_runs(wire: Wire) -> None:
    for answer in await _bad_additions(wire):
        assert refused(answer, wire.revision)
    missing = (await wire.call("echo", {}))["error"]
    if wire.revision == "2024-10-07":
        assert missing["data"] == {"reason": "Missing required argument: text"}
    else:
        assert missing["message"] == "Invalid arguments for tool echo: Missing required argument: text"
        assert missing["data"]["errors"] == [
            {"path": "", "keyword": "required", "message": "Missing required argument: text"}
        ]


@requirement("SRV-413")
@everywhere(*BY_RESULT)
async def test_bad_arguments_are_a_result_in_newer_revisions_and_nothing_runs(wire: Wire) -> None:
    for answer in await _bad_additions(wire):
        assert failure(answer)
    assert failure(await wire.call("echo", {})) == "Invalid arguments for tool echo: Missing required argument: text"


@everywhere()
@pytest.mark.parametrize("form", ["error", "result"])
async def test_the_form_of_bad_arguments_can_be_fixed_for_all_revisions(form: str, open_wire: Open) -> None:
    wire: Wire = await open_wire(f"servers_calling:always_{form}")
    answer = await wire.call("echo", {})
    if form == "error":
        assert answer["error"]["code"] == -32602
    else:
        assert "Missing required argument: text" in failure(answer)
    # What the tool itself refuses stays a failure of the tool.
    assert failure(await wire.call("fails", {"text": "no"})) == "no"


@requirement("SRV-414")
@everywhere()
async def test_what_goes_wrong_in_a_tool_is_told_by_its_result(wire: Wire) -> None:
    assert failure(await wire.call("fails", {"text": "the city is closed"})) == "the city is closed"
    if wire.revision == "2024-10-07":
        assert (await wire.call("fails", {}))["result"] == {
            "toolResult": {"error": "it did not work", "status": "failed"}
        }
    for name in ("crashes", "exits"):
        text = failure(await wire.call(name))
        assert name in text
        assert SECRET not in text
    assert said(await wire.call("echo", {"text": "still here"})) == "still here"


@requirement("SRV-415")
@everywhere()
async def test_a_broken_server_says_so_and_no_more(open_wire: Open) -> None:
    wire: Wire = await open_wire("broken")
    error = (await wire.call("add", {"a": 1, "b": 2}))["error"]
    assert error == {"code": -32603, "message": "Internal error"}
    assert said(await wire.call("echo", {"text": "still here"})) == "still here"


@requirement("SRV-416")
@everywhere()
async def test_a_server_without_tools_has_none_to_call(open_wire: Open) -> None:
    wire: Wire = await open_wire("without")
    assert "tools" not in wire.welcome.get("capabilities", {})
    for method, params in (("tools/call", {"name": "echo", "arguments": {}}), ("tools/list", {})):
        assert (await wire.request(method, params))["error"]["code"] == -32601


@requirement("SRV-420")
@everywhere()
async def test_a_handle_that_is_unknown_or_has_expired_is_told_to_the_model(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_calling:stateful")
    handle = said(await wire.call("open_basket"))
    assert said(await wire.call("put", {"handle": handle, "item": "apple"})) == "apple"
    assert "no basket 'other'" in failure(await wire.call("put", {"handle": "other", "item": "pear"}))
    await wire.call("expire", {"handle": handle})
    assert "has expired" in failure(await wire.call("put", {"handle": handle, "item": "pear"}))


@requirement("SRV-422", "SRV-423")
@everywhere()
async def test_a_wish_for_a_task_is_ignored(wire: Wire) -> None:
    for task in ({}, {"ttl": 60_000}, None, 5):
        params = {"name": "add", "arguments": {"a": 1, "b": 2}, "task": task}
        result = (await wire.request("tools/call", params))["result"]
        assert "task" not in result
        assert said({"result": result}).replace(" ", "") in ('{"sum":3.0}', '{"sum":3}')


@requirement("SRV-424")
@everywhere()
async def test_every_problem_is_listed_with_its_place(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_calling:keywords")
    answer = await wire.call("takes", {"text": 1, "number": 1.5, "share": "x", "flag": True, "words": ["a", 2]})
    text = refused(answer, wire.revision)
    for place in ("text", "number", "share", "words/1"):
        assert place in text
    assert "flag" not in text
    if wire.revision in ("2024-11-05", "2025-03-26", "2025-06-18", "pocket"):
        paths = {each["path"]: each["keyword"] for each in answer["error"]["data"]["errors"]}
        assert paths == dict.fromkeys(("/text", "/number", "/share", "/words/1"), "type")
    misspelt = refused(await wire.call("takes", {"txt": "a"}), wire.revision)
    assert "Unknown argument: txt; did you mean text?" in misspelt
    # Bounded, however much is wrong and however long it is.
    many = {"text": "a", "number": 1, "share": 1, "flag": True, "words": list(range(20_000))}
    long = {"text": ["y" * 100_000], "number": "z" * 100_000}
    for arguments in (many, long, {f"unknown{n}": n for n in range(5_000)}):
        assert len(json.dumps(await wire.call("takes", arguments))) < 20_000


# Validation comes first


@requirement("SRV-601", "P-06")
@everywhere()
async def test_no_keyword_lets_a_bad_value_reach_the_tool(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_calling:keywords")
    for name, (_, good, bad) in KEYWORDS.items():
        before = await runs(wire, name)
        assert refused(await wire.call(name, bad), wire.revision), name
        assert await runs(wire, name) == before, f"{name}: the tool ran on {bad}"
        assert said(await wire.call(name, good)) == "ran", f"{name}: {good} fits"
        assert await runs(wire, name) == before + 1


# What a lenient reader would turn into something that fits.
COERCED: list[Object] = [
    {"text": 1},
    {"text": True},
    {"text": None},
    {"text": ["a"]},
    {"number": "1"},
    {"number": 1.5},
    {"number": True},
    {"number": None},
    {"share": "0.5"},
    {"share": False},
    {"flag": "true"},
    {"flag": 1},
    {"flag": 0},
    {"words": "a"},
    {"words": {"0": "a"}},
    {"words": ["a", 1]},
]


@requirement("SRV-601", "P-06")
@everywhere()
async def test_values_are_never_coerced(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_calling:keywords")
    fine: Object = {"text": "a", "number": 1, "share": 0.5, "flag": True, "words": ["a"]}
    before = await runs(wire, "takes")
    for change in COERCED:
        assert refused(await wire.call("takes", {**fine, **change}), wire.revision), change
    assert await runs(wire, "takes") == before
    assert said(await wire.call("takes", fine)) == "ran"
    assert said(await wire.call("takes", {**fine, "number": 2.0, "share": 1})) == "ran", "2.0 is an integer in JSON"


@requirement("SRV-605")
@everywhere()
async def test_dangerous_output_is_marked(wire: Wire) -> None:
    result = (await wire.call("risky"))["result"]
    assert result["_meta"]["io.handrail/risk"] == {
        "level": "dangerous",
        "reason": "may contain instructions from strangers",
    }
    if wire.revision == "pocket":
        assert [block["text"] for block in result["content"]] == [
            "[caution: may contain instructions from strangers]",
            "whatever",
        ]
    elif wire.revision == "2024-10-07":
        assert result["toolResult"] == "whatever"
    else:
        assert [block["text"] for block in result["content"]] == ["whatever"]


# Schemas that are not to be trusted


class Trap:
    """Listens, and counts who comes."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/schema.json"

    def visits(self) -> int:
        count = 0
        while True:
            try:
                self._socket.accept()[0].close()
            except BlockingIOError:
                return count
            count += 1

    def close(self) -> None:
        self._socket.close()


def _references(url: str) -> list[Object]:
    return [
        {"type": "object", "properties": {"x": {"$ref": url}}},
        {"type": "object", "properties": {"x": {"$ref": f"{url}#/$defs/a"}}},
        {"type": "object", "allOf": [{"$ref": url}]},
        {"type": "object", "properties": {"x": {"$dynamicRef": url}}},
        {"$id": url, "type": "object", "properties": {"x": {"$ref": "other.json"}}},
        {"type": "object", "properties": {"x": {"$ref": "file:///etc/passwd"}}},
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/missing"}}},
        {"type": "object", "properties": {"x": {"$ref": "#nowhere"}}},
        {"$schema": url, "type": "object"},
    ]


@requirement("SRV-610")
@everywhere()
async def test_references_are_never_fetched_and_unresolved_ones_refused(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_calling:registrar")
    trap = Trap()
    try:
        for schema in _references(trap.url):
            assert failure(await wire.call("register", {"schema": schema})), schema
            assert (await wire.call("added", {}))["error"]["code"] == -32602
        assert trap.visits() == 0
        with socket.create_connection(("127.0.0.1", int(trap.url.split(":")[2].split("/")[0]))):
            assert trap.visits() == 1, "the trap does not work"
    finally:
        trap.close()
    assert said(await wire.call("echo", {"text": "on"})) == "on"


def _deep(levels: int) -> Object:
    schema: Object = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _doubling(levels: int) -> Object:
    names = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    return {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/d0"}},
        "$defs": {**names, f"d{levels}": {"type": "integer"}},
    }


BOMBS: dict[str, Object] = {
    "wide": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(9_000)}},
    "doubling": _doubling(30),
    "a loop of references that leads nowhere": {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "large repetition": {"type": "object", "properties": {"x": {"pattern": "((a{500}){500}){500}"}}},
    "look-around": {"type": "object", "properties": {"x": {"pattern": "(?=a)a"}}},
    "back-reference": {"type": "object", "properties": {"x": {"pattern": r"(a)\1"}}},
}


@requirement("SRV-611", "P-07")
@everywhere()
async def test_a_hostile_schema_costs_little(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_calling:registrar", fresh=True)
    for name, schema in BOMBS.items():
        began = wire.cpu
        answer = await wire.call("register", {"schema": schema})
        assert wire.cpu - began < 2, name
        assert '"added"' not in json.dumps(answer), name
        assert len(failure(answer)) < 1_000, name
    # Deeper ones do not even arrive; from the program itself they can only come as below.
    began = wire.cpu
    head, tail = '{"type":"object","properties":{"a":' * 10_000, "}}" * 10_000
    params = json.dumps(wire.params({"name": "register", "arguments": {"schema": "…"}}), ensure_ascii=False)
    deep = params.replace('"…"', f"{head}{{}}{tail}")
    await wire.send(f'{{"jsonrpc":"2.0","id":77777,"method":"tools/call","params":{deep}}}'.encode())
    refusal = await wire.receive()
    assert refusal["error"]["code"] == -32700
    assert wire.cpu - began < 2
    # A pattern that would make a backtracking engine think for ever.
    pattern = {"type": "object", "properties": {"x": {"pattern": "^(a|a)*(a+)+$"}}}
    assert said(await wire.call("register", {"schema": pattern})) == "added"
    began = wire.cpu
    refused(await wire.call("added", {"x": "a" * 5_000 + "!"}), wire.revision)
    assert wire.cpu - began < 2
    assert said(await wire.call("echo", {"text": "on"})) == "on"


@pytest.mark.parametrize("levels", [100, 10_000])
def test_a_schema_of_any_depth_is_refused_not_followed(levels: int) -> None:
    server = Server("deep")

    async def deep(**given: Json) -> str:
        return "ran"

    began = time.process_time()
    with pytest.raises(SchemaError, match="nested"):
        server.add(deep, input_schema=_deep(levels))
    assert time.process_time() - began < 2


@requirement("SRV-612", everywhere=True)
@pytest.mark.parametrize(
    ("name", "header", "warned"),
    [
        ("password", "Word", True),
        ("user_token", "Word", True),
        ("apiKey", "Word", True),
        ("word", "Api-Key", True),
        ("clientSecret", "Word", True),
        ("region", "Region", False),
        ("monkey", "Monkey", False),
        ("keyboard", "Keyboard", False),
    ],
)
def test_a_secret_mirrored_into_a_header_is_warned_of(
    name: str, header: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server("headers")

    async def mirrored(**given: Json) -> str:
        return "ran"

    schema = {"type": "object", "properties": {name: {"type": "string", "x-mcp-header": header}}}
    with caplog.at_level(logging.WARNING, "handrail"):
        server.add(mirrored, input_schema=schema)
    assert bool(caplog.records) is warned
    if warned:
        assert "looks like a secret" in caplog.text
        assert name in caplog.text


UNKNOWN_DIALECTS = [
    "https://example.org/my-dialect",
    "http://json-schema.org/draft-04/schema#",
    "https://json-schema.org/draft/2019-09/schema",
    "",
    "draft-07",
    5,
    None,
]


@requirement("SRV-613")
@everywhere()
async def test_an_unsupported_dialect_is_a_clear_error_and_the_server_goes_on(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_calling:registrar")
    for dialect in UNKNOWN_DIALECTS:
        text = failure(await wire.call("register", {"schema": {"$schema": dialect, "type": "object"}}))
        assert "unsupported $schema" in text
        assert "2020-12" in text
        assert "draft-07" in text
    for dialect in ("https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"):
        assert said(await wire.call("register", {"schema": {"$schema": dialect, "type": "object"}})) == "added"
        assert said(await wire.call("added", {})) == "ran"


# Secrets


@requirement("SRV-520")
@everywhere()
async def test_no_argument_ever_shows_up_in_a_log(open_wire: Open, caplog: pytest.LogCaptureFixture) -> None:
    """The server's own log at its most talkative, and the log messages it sends."""
    caplog.set_level(logging.DEBUG)
    wire: Wire = await open_wire("servers_calling:noisy", stderr=asyncio.subprocess.PIPE)
    if not wire.stateless:
        await wire.request("logging/setLevel", {"level": "debug"})
    secret = "hunter2-0451"
    tries: list[tuple[str, Object]] = [
        ("echo", {"text": secret}),
        ("logs", {"secret": secret}),
        ("hangs", {"secret": secret}),
        ("refuses", {"secret": secret}),
        ("tells", {"secret": secret}),
        ("bounded", {"days": secret}),
        ("bounded", {"days": 1, "units": secret}),
        ("add", {"a": 1, "b": 2, secret: 3}),
        (secret, {}),
    ]
    for name, arguments in tries:
        await wire.call(name, arguments, logLevel="debug") if wire.stateless else await wire.call(name, arguments)
    await wire.send(json.dumps({"jsonrpc": "2.0", "id": 99_999, "method": secret}).encode())
    await wire.answer(99_999)
    notices = [each for each in wire.others if each.get("method") == "notifications/message"]
    assert len(notices) == 3
    assert secret not in json.dumps(notices)
    log = caplog.text if wire.transport == "memory" else await wire.log()
    assert "hangs" in log, "nothing was logged: the test sees nothing"
    assert "refuses" in log
    assert secret not in log


# Many at once


@requirement("SRV-421", "P-08")
@everywhere()
async def test_each_of_many_calls_gets_its_own_answer_and_only_one(wire: Wire) -> None:
    order = random.Random(421)
    marks: dict[int, str] = {}
    for at in range(200):
        text = f"mark {at}"
        if at % 4:
            marks[await wire.ask("tools/call", {"name": "echo", "arguments": {"text": text}})] = text
        else:
            arguments = {"seconds": order.random() / 20, "text": text}
            marks[await wire.ask("tools/call", {"name": "after", "arguments": arguments})] = text
    answers: dict[int, str] = {}
    while len(answers) < len(marks):
        message = await wire.receive()
        assert message["id"] not in answers, "answered twice"
        answers[message["id"]] = said(message)
    assert answers == marks
    assert await wire.silent()


@requirement("P-08")
async def test_peers_with_the_same_ids_do_not_meet() -> None:
    async with wire_to("2025-11-25", "memory") as first:
        assert isinstance(first, MemoryWire)
        peers = [first, *(MemoryWire(revision, first.server) for revision in (*LEGACY, *LEGACY, *LEGACY))]
        for peer in peers:
            await peer.open()

        async def talk(peer: Wire, number: int) -> None:
            sent = {}
            for at in range(100):
                text = f"{number} {at}"
                tool, more = ("after", {"seconds": 0.001 * (at % 7)}) if at % 3 else ("echo", {})
                sent[await peer.ask("tools/call", {"name": tool, "arguments": {"text": text, **more}})] = text
            got: dict[int, str] = {}
            while len(got) < len(sent):
                message = await peer.receive()
                assert message["id"] not in got
                got[message["id"]] = said(message)
            assert got == sent
            assert await peer.silent()

        async with asyncio.TaskGroup() as group:
            for number, peer in enumerate(peers):
                group.create_task(talk(peer, number))


@requirement("P-08", "P-04")
@everywhere()
async def test_a_number_and_a_text_are_different_ids_and_one_in_use_is_refused(wire: Wire, tmp_path: Path) -> None:
    gate = tmp_path / "go"

    def after(ident: Json, text: str) -> Object:
        params = wire.params({"name": "when", "arguments": {"path": str(gate), "text": text}})
        return {"jsonrpc": "2.0", "id": ident, "method": "tools/call", "params": params}

    if wire.stateless and wire.transport == "http":  # each request is a world of its own: no id can be in use
        for ident, text in ((50_001, "number"), ("50001", "text"), (50_001, "again")):
            await wire.send(after(ident, text))
        gate.touch()
        found = [await wire.receive() for _ in range(3)]
        assert sorted((repr(each["id"]), said(each)) for each in found) == [
            ("'50001'", "text"),
            ("50001", "again"),
            ("50001", "number"),
        ]
        return
    await wire.send(after(50_001, "number"))
    await wire.send(after("50001", "text"))
    await wire.send(after(50_001, "number again"))
    await wire.send(after("50001", "text again"))
    for expected in (50_001, "50001"):
        twice = await wire.receive()
        assert twice["id"] == expected
        assert type(twice["id"]) is type(expected)
        assert twice["error"]["code"] == -32600
        assert "in use" in twice["error"]["message"]
    gate.touch()
    answers = [await wire.receive() for _ in range(2)]
    assert {repr(each["id"]): said(each) for each in answers} == {"50001": "number", "'50001'": "text"}
    # Once answered, an id may come again.
    await wire.send(after(50_001, "later"))
    assert said(await wire.answer(50_001)) == "later"


@everywhere()
async def test_too_many_calls_at_once_are_refused_with_429_and_the_others_answered(
    open_wire: Open, tmp_path: Path
) -> None:
    wire: Wire = await open_wire("small")
    gate = tmp_path / "go"
    waiting = [
        await wire.ask("tools/call", {"name": "when", "arguments": {"path": str(gate), "text": str(at)}})
        for at in range(4)
    ]
    error = (await wire.call("echo", {"text": "too many"}))["error"]
    assert error["code"] == 429
    assert "in flight" in error["message"]
    if not wire.stateless:
        assert (await wire.request("ping"))["result"] == {}, "only calls are counted"
    gate.touch()
    assert [said(await wire.answer(ident)) for ident in waiting] == ["0", "1", "2", "3"]
    assert said(await wire.call("echo", {"text": "again"})) == "again"


@everywhere("2024-10-07", "2025-06-18", "2026-07-28")
async def test_a_call_has_an_idle_clock_and_a_total_clock(wire: Wire) -> None:
    quiet = await wire.ask("tools/call", {"name": "sleeps"})
    busy = await wire.ask("tools/call", {"name": "sleeps", "arguments": {"heartbeat": True}}, progressToken="beat")
    assert failure(await wire.answer(quiet)) == "The tool sleeps gave no sign of life for 1 s."
    assert failure(await wire.answer(busy)) == "The tool sleeps took longer than 1.5 s."
    beats = len(wire.others)
    assert beats >= 2
    assert said(await wire.call("echo", {"text": "on"})) == "on"
    assert len(wire.others) == beats, "something came after the answer"


@everywhere()
async def test_a_blocking_tool_runs_in_a_thread_and_an_inline_one_does_not(wire: Wire) -> None:
    assert said(await wire.call("thread_echo", {"text": "x"})) == "x False"
    assert said(await wire.call("inline_echo", {"text": "x"})) == "x"


# Batches: only in 2025-03-26


# Ids are numbers the wire does not use itself.


def _request(ident: Json, method: str, params: Object | None = None) -> Object:
    return {"jsonrpc": "2.0", "id": ident, "method": method, **({} if params is None else {"params": params})}


def _tool(ident: Json, name: str, **arguments: Json) -> Object:
    return _request(ident, "tools/call", {"name": name, "arguments": arguments})


NOTHING_TO_SAY = {"jsonrpc": "2.0", "method": "notifications/nothing"}
IN_BATCH = everywhere("2025-03-26")


@IN_BATCH
async def test_a_batch_of_quick_and_slow_calls_is_answered_together(wire: Wire, tmp_path: Path) -> None:
    gate = tmp_path / "go"
    await wire.send(
        [
            _tool(10_101, "echo", text="quick"),
            _tool(10_102, "when", path=str(gate), text="slow"),
            NOTHING_TO_SAY,
            _request(10_103, "ping"),
            _tool("10101", "echo", text="text id"),
            _tool(10_104, "after", seconds=0.02, text="less slow"),
            _tool(10_105, "nope"),
            _tool(10_106, "echo"),
        ]
    )
    # What is not in the batch does not wait for it.
    assert said(await wire.call("echo", {"text": "alone"})) == "alone"
    gate.touch()
    answers = {repr(each["id"]): each for each in await wire.receive()}
    assert set(answers) == {"10101", "10102", "10103", "'10101'", "10104", "10105", "10106"}
    assert said(answers["10101"]) == "quick"
    assert said(answers["'10101'"]) == "text id"
    assert said(answers["10102"]) == "slow"
    assert said(answers["10104"]) == "less slow"
    assert answers["10103"]["result"] == {}
    assert answers["10105"]["error"]["code"] == answers["10106"]["error"]["code"] == -32602
    assert await wire.silent()


@IN_BATCH
async def test_a_batch_of_notifications_and_answers_has_no_answer(wire: Wire) -> None:
    await wire.send([NOTHING_TO_SAY, NOTHING_TO_SAY])
    await wire.send([{"jsonrpc": "2.0", "id": 77, "result": {}}, {"jsonrpc": "2.0", "id": 78, "error": {"code": 1}}])
    assert await wire.silent()


@IN_BATCH
@pytest.mark.parametrize("size", [0, MAX_BATCH + 1])
async def test_a_batch_of_none_or_too_many_is_refused_whole(wire: Wire, size: int) -> None:
    before = await runs(wire, "add")
    await wire.send([_tool(at + 10_000, "add", a=1, b=2) for at in range(size)])
    answer = await wire.receive()
    assert answer["error"]["code"] == -32600
    assert answer["id"] is None
    assert await runs(wire, "add") == before
    assert await wire.silent()


@IN_BATCH
async def test_the_largest_batch_is_served(wire: Wire) -> None:
    await wire.send([_tool(at + 10_000, "echo", text=str(at)) for at in range(MAX_BATCH)])
    assert [said(each) for each in await wire.receive()] == [str(at) for at in range(MAX_BATCH)]


@IN_BATCH
async def test_initialize_has_no_place_in_a_batch(wire: Wire) -> None:
    params = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    await wire.send([_request(10_101, "initialize", params), _tool(10_102, "echo", text="a")])
    first, second = await wire.receive()
    assert (first["id"], first["error"]["code"]) == (10_101, -32600)
    assert said(second) == "a"
    # The handshake has not been changed by it: batches are still allowed.
    await wire.send([_request(10_103, "ping")])
    assert (await wire.receive())[0]["result"] == {}


@IN_BATCH
async def test_what_is_no_message_is_refused_in_its_place(wire: Wire) -> None:
    await wire.send(
        [[_request(10_101, "ping")], 5, "ping", None, {}, {"jsonrpc": "1.0", "id": 10_109}, _request(10_102, "ping")]
    )
    answers = await wire.receive()
    assert [each["error"]["code"] for each in answers[:-1]] == [-32600] * 6
    assert [each["id"] for each in answers] == [None] * 5 + [10_109, 10_102]
    assert answers[-1]["result"] == {}


@IN_BATCH
async def test_a_modern_request_has_no_place_in_a_batch(wire: Wire) -> None:
    name = "io.modelcontextprotocol/"
    meta = {name + "protocolVersion": "2026-07-28", name + "clientCapabilities": {}}
    await wire.send(
        [_request(10_101, "server/discover", {"_meta": meta}), _request(10_102, "ping", {"_meta": {"a": 5}})]
    )
    first, second = await wire.receive()
    assert first["error"]["code"] == -32600
    assert second["result"] == {}


@IN_BATCH
async def test_a_cancelled_member_is_left_out_of_the_answer(wire: Wire) -> None:
    await wire.send([_tool(10_101, "waits", mark="one"), _tool(10_102, "after", seconds=0.1, text="two")])
    await wire.notify("notifications/cancelled", {"requestId": 10_101})
    (only,) = await wire.receive()
    assert (only["id"], said(only)) == (10_102, "two")
    # All cancelled: nothing is left to say.
    await wire.send([_tool(10_103, "waits", mark="three"), _tool(10_104, "waits", mark="four")])
    await wire.send(
        [{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": n}} for n in (10_103, 10_104)]
    )
    await until(wire, "was_stopped", "one")
    await until(wire, "was_stopped", "four")
    # Cancelled from inside the same batch, before its answer.
    cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 10_105}}
    await wire.send([_tool(10_105, "waits", mark="five"), cancel, _tool(10_106, "echo", text="six")])
    (only,) = await wire.receive()
    assert (only["id"], said(only)) == (10_106, "six")
    assert await wire.silent()


@IN_BATCH
async def test_an_id_twice_in_a_batch_is_refused_the_second_time(wire: Wire) -> None:
    await wire.send([_tool(10_101, "after", seconds=0.05, text="first"), _tool(10_101, "echo", text="second")])
    answers = await wire.receive()
    assert sorted(said(each) if "result" in each else str(each["error"]["code"]) for each in answers) == [
        "-32600",
        "first",
    ]


@everywhere(*(each for each in ALL if each != "2025-03-26"))
async def test_other_revisions_have_no_batches(open_wire: Open) -> None:
    wire: Wire = await open_wire(fresh=True)
    await wire.send([_tool(10_001, "add", a=1, b=2)])
    answer = await wire.receive()
    assert answer["error"]["code"] == -32600
    assert ("id" in answer) is (wire.revision not in ("2025-11-25", "2026-07-28"))
    assert await runs(wire, "add") == 0
