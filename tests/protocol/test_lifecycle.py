"""Opening, naming a revision, and the rules every message keeps: requirements section 1."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from checks import check_message, strict_json
from handrail.errors import TransportError
from paths import TESTS
from patience import PATIENCE
from requirements import requirement
from wires import (
    ALL,
    ENVELOPE,
    LEGACY,
    MODERN,
    PIPES,
    Object,
    Open,
    StdioWire,
    Wire,
    everywhere,
    open_wire as open_wire,
    wire as wire,
    wire_to,
)
from wires_http import OLD, HttpServer, HttpWire

Json = Any
Ran = Callable[[str, str], None]

SCRIPT = TESTS / "golden" / "interleaved.jsonl"
SERVER = "io.modelcontextprotocol/serverInfo"
VERSION = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
CLIENT = "io.modelcontextprotocol/clientInfo"

STREAMABLE = tuple(each for each in LEGACY if each not in OLD)

# A process for each costs time: where the pipe cannot make a difference, memory is enough.
in_memory = pytest.mark.parametrize(("revision", "transport"), [(each, "memory") for each in ALL])
opened_in_memory = pytest.mark.parametrize(("revision", "transport"), [(each, "memory") for each in LEGACY])
over_stdio = pytest.mark.parametrize(("revision", "transport"), [(each, "stdio") for each in ALL])


# All dialects on one process


@requirement("SRV-101", "SRV-120")
@pytest.mark.parametrize("transport", ["memory", "stdio"])
async def test_seven_dialects_share_one_process_and_each_sees_only_its_own_shapes(transport: str, ran: Ran) -> None:
    async with wire_to("2026-07-28", transport, "servers_lifecycle:interleaved") as wire:
        answers = await _play(wire, SCRIPT.read_bytes().splitlines())
    for revision in ALL:
        mine = {name.removeprefix(f"{revision} "): each for name, each in answers.items() if name.startswith(revision)}
        assert mine["held" if revision in LEGACY else "held 3"]["result"] == _said(
            revision, f"{_mark(revision)} was held"
        )
        assert mine["add" if revision in LEGACY else "add 3"]["result"] == _sum(
            revision, 3.0 if revision in LEGACY else 6.0
        )
        bad = mine["bad" if revision in LEGACY else "bad 3"]
        assert ("error" in bad) is (revision not in ("2025-11-25", "2026-07-28"))
        state = mine["state" if revision in LEGACY else "state 3"]["result"]
        client = revision if revision in LEGACY else ""
        assert state == _said(revision, f"the state {client} {revision} local True")
        ran(revision, transport)
    for revision in LEGACY:
        assert answers[f"{revision} hello"]["result"]["protocolVersion"] == revision
        assert f"for {revision}" in json.dumps(answers[f"{revision} question"]["result"])
        assert answers[f"{revision} ping"]["result"] == {}
    assert answers["2025-03-26 batch held"]["result"] == _said("2025-03-26", "batch was held")
    assert answers["2026-07-28 asks again"]["result"]["content"] == [{"type": "text", "text": "accept Ada"}]


@requirement("SRV-101", "SRV-120")
async def test_seven_rigs_share_one_url_and_each_sees_only_its_own_shapes(ran: Ran) -> None:
    server = HttpServer("servers_lifecycle:interleaved")
    rigs = [HttpWire(revision, server) for revision in ALL]
    try:
        for rig in rigs:
            await rig.open()
        held = [await rig.ask("tools/call", {"name": "hold", "arguments": {"mark": rig.revision}}) for rig in rigs]
        sums = [await rig.ask("tools/call", {"name": "add", "arguments": {"a": 1, "b": 2}}) for rig in rigs]
        bad = [await rig.ask("tools/call", {"name": "add", "arguments": {"a": "one"}}) for rig in rigs]
        for at, rig in enumerate(rigs):
            revision = rig.revision
            following = rigs[(at + 1) % len(rigs)]
            await following.call("release", {"mark": revision})
            assert (await rig.answer(held[at]))["result"] == _said(revision, f"{revision} was held")
            assert (await rig.answer(sums[at]))["result"] == _sum(revision, 3.0)
            assert ("error" in await rig.answer(bad[at])) is (revision not in ("2025-11-25", "2026-07-28"))
            state = (await rig.call("state"))["result"]
            assert state == _said(revision, f"the state rig {revision} anonymous True")
            assert not rig.others
            ran(revision, "http")
        for rig in rigs:
            await rig.close()
    finally:
        server.stop()


async def _play(wire: Wire, lines: list[bytes]) -> dict[str, Object]:
    """Send raw lines, all at once but for answers to questions not yet asked; every answer by its id, checked."""
    asked: dict[Json, str] = {}
    answers: dict[str, Object] = {}
    questions: set[Json] = set()

    async def hear() -> None:
        async with asyncio.timeout(PATIENCE):
            message = strict_json(await wire.read())
        for each in message if isinstance(message, list) else [message]:
            if "method" in each:
                check_message(each, _revision_of_notice(each), None)
                questions.add(each.get("id"))
            else:
                assert each["id"] not in answers
                answers[each["id"]] = each
                check_message(each, each["id"].split(" ")[0], asked[each["id"]])

    for line in lines:
        message = json.loads(line)
        for each in message if isinstance(message, list) else [message]:
            if "id" in each and "method" in each:
                asked[each["id"]] = each["method"]
        while isinstance(message, dict) and "method" not in message and message["id"] not in questions:
            await hear()
        await wire.write(line)
    while set(asked) - set(answers) != {"2026-07-28 listen"}:
        await hear()
    await wire.finish()
    with contextlib.suppress(EOFError, TransportError):
        while True:
            await hear()
    assert set(answers) == set(asked)
    return answers


def _revision_of_notice(message: Object) -> str:
    """Whose wire a notice or a question of ours was written for."""
    params = message.get("params", {})
    match message["method"]:
        case "notifications/progress":
            revision: str = params["progressToken"].split(" ")[0]
            assert ("message" in params) is (revision not in ("2024-10-07", "2024-11-05"))
            return revision
        case "sampling/createMessage" | "elicitation/create":
            return LEGACY[message["id"] - 1]
        case "notifications/tools/list_changed" if not params:
            return "pocket"
    return "2026-07-28"


def _mark(revision: str) -> str:
    return revision if revision in LEGACY else f"{revision} 3"


def _said(revision: str, text: str) -> Object:
    """The result of a tool that returned a text."""
    return _result(revision, text, [{"type": "text", "text": text}], None)


def _sum(revision: str, value: float) -> Object:
    """The result of a tool that returned an object and has an output schema."""
    structured = {"sum": value}
    return _result(
        revision, structured, [{"type": "text", "text": json.dumps(structured, separators=(",", ":"))}], structured
    )


def _result(revision: str, bare: Json, content: list[Object], structured: Json) -> Object:
    if revision == "2024-10-07":
        return {"toolResult": bare}
    whole: Object = {"content": content, "isError": False}
    if structured is not None and revision not in ("2024-11-05", "2025-03-26"):
        whole["structuredContent"] = structured
    if revision == "pocket":
        whole.setdefault("structuredContent", {})
    if revision == "2026-07-28":
        whole["resultType"] = "complete"
        whole["_meta"] = {SERVER: {"name": "subject", "version": "1.2.3", "title": "The subject"}}
    return whole


# The handshake


@requirement("SRV-102")
@everywhere(*LEGACY)
async def test_a_supported_version_is_answered_with_itself_whatever_was_agreed_before(open_wire: Open) -> None:
    wire = await open_wire()
    first, own = wire.welcome, wire.revision
    assert first["protocolVersion"] == own
    for other in LEGACY:
        await wire.reopen(other)
        assert wire.welcome["protocolVersion"] == other
    await wire.reopen(own)
    assert wire.welcome == first


@requirement("SRV-103")
@everywhere(*LEGACY)
async def test_an_unknown_or_stateless_version_is_answered_with_the_newest_that_shakes_hands(wire: Wire) -> None:
    own = wire.revision
    for asked in ("1999-01-01", "2026-07-28", "2099-01-01", "", "Pocket", "2024-11-05 ", "latest"):
        wire.revision = "2025-11-25"  # that is what the answer has to be written in
        answer = await wire.request("initialize", {**_hello(asked)})
        assert answer["result"]["protocolVersion"] == "2025-11-25", asked
        await wire.notify("notifications/initialized")
        assert "error" not in await wire.call("echo", {"text": "go on"})
    await wire.reopen(own)
    assert "error" not in await wire.call("echo", {"text": "back again"})


def _hello(version: str, capabilities: Object | None = None) -> Object:
    client = {"name": "rig", "version": "1"}
    return {"protocolVersion": version, "capabilities": capabilities or {}, "clientInfo": client}


_ICON = {"src": "https://example.org/icon.png", "mimeType": "image/png", "sizes": ["48x48"]}
_NAMED = {"name": "dressed", "version": "3.2.1"}
_TITLED = {**_NAMED, "title": "Dressed up"}
_FULL = {**_TITLED, "description": "Says everything", "icons": [_ICON], "websiteUrl": "https://example.org/"}
_SERVER_INFO = {
    "2024-10-07": _NAMED,
    "2024-11-05": _NAMED,
    "2025-03-26": _NAMED,
    "2025-06-18": _TITLED,
    "2025-11-25": _FULL,
    "pocket": _TITLED,
}


@requirement("SRV-104")
@everywhere(*LEGACY)
async def test_the_opening_answer_says_of_the_server_what_its_revision_has_a_place_for(open_wire: Open) -> None:
    wire = await open_wire("servers_lifecycle:dressed")
    expected: Object = {
        "protocolVersion": wire.revision,
        "capabilities": {"logging": {}, "tools": {"listChanged": True}},
        "serverInfo": _SERVER_INFO[wire.revision],
    }
    if wire.revision != "2024-10-07":
        expected["instructions"] = "Look closely."
    assert wire.welcome == expected


@requirement("SRV-104")
@opened_in_memory
async def test_an_opening_request_that_lacks_something_is_refused_and_changes_nothing(wire: Wire) -> None:
    whole = _hello("2025-03-26" if wire.revision != "2025-03-26" else "pocket")
    for member in whole:
        lacking = {name: value for name, value in whole.items() if name != member}
        for params in (lacking, {**lacking, member: None}, {**lacking, member: 5}):
            answer = await wire.request("initialize", params)
            assert answer["error"]["code"] == -32602, params
    said = await wire.call("state")
    assert f"rig {wire.revision} local" in json.dumps(said["result"])


@requirement("SRV-105")
@everywhere()
async def test_tools_are_declared_by_a_server_that_has_them_and_only_by_that(open_wire: Open) -> None:
    quiet, without = await open_wire("quiet"), await open_wire("without")
    declared = (await _opening(quiet))["capabilities"]["tools"]
    assert declared == ({"listChanged": True} if quiet.revision == "pocket" else {})
    assert "tools" not in (await _opening(without))["capabilities"]


async def _opening(wire: Wire) -> Object:
    """What the server says of itself, in whichever way the revision asks."""
    if not wire.stateless:
        return wire.welcome
    result: Object = (await wire.request("server/discover"))["result"]
    return result


@requirement("SRV-106")
@everywhere("pocket")
async def test_pocket_always_promises_change_notices_and_keeps_the_promise(open_wire: Open) -> None:
    for variant in ("default", "quiet"):
        wire = await open_wire(variant)
        assert wire.welcome["capabilities"]["tools"] == {"listChanged": True}
        await wire.call("add_tool", {"name": "one_more"})
        assert await wire.notice("notifications/tools/list_changed")


@requirement("SRV-107", "SRV-108")
@everywhere(*STREAMABLE, transports=["http"])
async def test_before_a_session_nothing_is_answered_over_http(revision: str, transport: str, ran: Ran) -> None:
    """Not even a ping: a message of these revisions belongs to a session (PD-29)."""
    async with wire_to(revision, transport) as wire:
        assert isinstance(wire, HttpWire)
        for method in ("ping", "tools/list", "tools/call", "logging/setLevel", "no/such"):
            answer = await wire.request(method, {"name": "add", "arguments": {"a": 1, "b": 2}})
            assert (wire.status, answer["error"]["code"]) == (400, -32600), method
        await wire.notify("notifications/initialized")
        told = await wire.receive()
        assert (wire.status, told["error"]["code"], "id" in told) == (400, -32600, False)
        await wire.open()
        assert (await wire.request("ping"))["result"] == {}
        assert _text((await wire.call("times_run", {"name": "add"}))["result"]) == "0"
        ran(revision, transport)


@requirement("SRV-107", "SRV-108")
@pytest.mark.parametrize(
    ("revision", "transport"), [*itertools.product(LEGACY, PIPES), *itertools.product(OLD, ["http"])]
)
async def test_before_the_handshake_only_ping_is_answered(revision: str, transport: str, ran: Ran) -> None:
    async with wire_to(revision, transport) as wire:
        assert (await wire.request("ping"))["result"] == {}
        for method, params in [
            ("tools/list", None),
            ("tools/call", {"name": "add", "arguments": {"a": 1, "b": 2}}),
            ("logging/setLevel", {"level": "info"}),
            ("no/such", None),
        ]:
            answer = await wire.request(method, params)
            assert answer["error"]["code"] in (-32602, -32601, -32600), method
        await wire.notify("notifications/initialized")  # completes nothing
        assert "error" in await wire.request("tools/list")
        assert (await wire.request("ping", {"_meta": {}}))["result"] == {}
        await wire.open()
        assert wire.welcome["protocolVersion"] == revision
        assert (await wire.request("tools/list"))["result"]["tools"]
        ran(revision, transport)


@requirement("SRV-107", "SRV-108")
@opened_in_memory
async def test_ping_is_answered_at_once_also_beside_a_call_in_flight(open_wire: Open) -> None:
    wire = await open_wire("servers_lifecycle:interleaved")
    held = await wire.ask("tools/call", {"name": "hold", "arguments": {"mark": "m"}})
    for params in (None, {"_meta": {"progressToken": 1}}):
        assert (await wire.request("ping", params))["result"] == {}
    assert not wire.others
    await wire.call("release", {"mark": "m"})
    assert "m was held" in json.dumps(await wire.answer(held))


# Without a handshake


@requirement("SRV-109", "SRV-110")
@everywhere(*MODERN)
async def test_discover_may_be_the_first_message_and_says_what_can_be_spoken(wire: Wire) -> None:
    first = await wire.request("server/discover")
    assert first["result"] == {
        "resultType": "complete",
        "supportedVersions": ["2026-07-28", "2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05", "2024-10-07"],
        "capabilities": {"logging": {}, "tools": {"listChanged": True}},
        "instructions": "Be kind.",
        "ttlMs": 60_000,
        "cacheScope": "public",
        "_meta": {SERVER: {"name": "subject", "version": "1.2.3", "title": "The subject"}},
    }
    own = wire.revision
    await wire.reopen("pocket")  # a handshake does not change the answer
    wire.revision = own
    assert (await wire.request("server/discover"))["result"] == first["result"]


@requirement("SRV-111", "SRV-118")
@everywhere(*MODERN)
@pytest.mark.parametrize(
    ("variant", "named"),
    [("default", {"name": "subject", "version": "1.2.3", "title": "The subject"}), ("modern", None)],
)
async def test_every_result_has_a_type_and_names_the_server_unless_that_is_switched_off(
    open_wire: Open, variant: str, named: Object | None
) -> None:
    wire = await open_wire(variant, capabilities={"elicitation": {}}, fresh=True)
    listening = await wire.ask("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
    results = [(await wire.request(method))["result"] for method in ("server/discover", "tools/list")]
    for name in ("nothing", "add", "mixed", "crashes", "fails", "lies", "prints", "asks"):
        results.append((await wire.call(name, {"a": 1, "b": 2} if name == "add" else {}))["result"])
    results.append((await wire.call("add", {"a": "no"}))["result"])
    await wire.finish()
    ended = (await wire.answer(listening))["result"]
    for result in [*results, ended]:
        assert result["resultType"] == ("input_required" if "inputRequests" in result else "complete")
        assert result.get("_meta", {}).get(SERVER) == named
    assert ended["_meta"]["io.modelcontextprotocol/subscriptionId"] == listening
    assert [each["resultType"] for each in results].count("input_required") == 1


_GOOD: Object = {VERSION: "2026-07-28", CAPABILITIES: {}, CLIENT: {"name": "rig", "version": "1"}}
_ENVELOPES: list[tuple[str, Json, int]] = [
    ("complete", {"_meta": _GOOD}, 0),
    ("without clientInfo", {"_meta": {VERSION: "2026-07-28", CAPABILITIES: {}}}, 0),
    ("with members nobody knows", {"_meta": {**_GOOD, "example.org/x": None}, "unknown": [1]}, 0),
    ("no params", None, -32602),
    ("no _meta", {}, -32602),
    ("empty _meta", {"_meta": {}}, -32602),
    ("_meta null", {"_meta": None}, -32602),
    ("_meta a list", {"_meta": [VERSION]}, -32602),
    ("no version", {"_meta": {CAPABILITIES: {}, CLIENT: {"name": "rig", "version": "1"}}}, -32602),
    ("version null", {"_meta": {**_GOOD, VERSION: None}}, -32602),
    ("version a number", {"_meta": {**_GOOD, VERSION: 20260728}}, -32602),
    ("no capabilities", {"_meta": {VERSION: "2026-07-28", CLIENT: {"name": "rig", "version": "1"}}}, -32602),
    ("capabilities null", {"_meta": {**_GOOD, CAPABILITIES: None}}, -32602),
    ("capabilities a list", {"_meta": {**_GOOD, CAPABILITIES: []}}, -32602),
    ("clientInfo null", {"_meta": {**_GOOD, CLIENT: None}}, -32602),
    ("clientInfo without version", {"_meta": {**_GOOD, CLIENT: {"name": "rig"}}}, -32602),
    ("clientInfo a text", {"_meta": {**_GOOD, CLIENT: "rig 1"}}, -32602),
    ("bad log level", {"_meta": {**_GOOD, ENVELOPE + "logLevel": "loud"}}, -32602),
]


@requirement("SRV-112")
@everywhere(*MODERN)
async def test_a_request_has_to_name_its_revision_and_capabilities(wire: Wire) -> None:
    for at, (what, params, code) in enumerate(_ENVELOPES):
        for method in ("server/discover", "tools/list", "tools/call"):
            message: Object = {"jsonrpc": "2.0", "id": f"{method} {at}", "method": method}
            if params is not None:
                message["params"] = {**params, "name": "nothing"}
            await wire.send(message)
            answer = await wire.receive()
            assert answer["id"] == message["id"], what
            # A header repeats the version, and is compared with it first (REVISIONS 6, step a).
            is_compared = wire.transport == "http" and what in ("version null", "version a number")
            assert answer.get("error", {}).get("code", 0) == (-32020 if is_compared else code), (what, answer)
            if isinstance(wire, HttpWire):
                assert wire.status == (400 if code else 200) or what == "bad log level", what


@requirement("SRV-113")
@everywhere(*MODERN)
async def test_a_version_that_is_not_spoken_without_handshake_is_refused_with_those_that_are(wire: Wire) -> None:
    for version in ("2099-01-01", "2025-11-25", "2024-10-07", "pocket", "", "2026-07-28 "):
        for method in ("server/discover", "tools/list", "tools/call", "initialize", "no/such"):
            answer = await wire.request(method, {"name": "nothing", "_meta": {}}, **{VERSION: version})
            error = answer["error"]
            if wire.transport == "http" and version != version.strip():  # which a header cannot say
                assert error["code"] in (-32020, -32022)
                continue
            assert error["code"] == -32022, (version, method)
            assert error["data"] == {"supported": ["2026-07-28"], "requested": version}
    assert "result" in await wire.call("nothing")


@requirement("SRV-112", "SRV-113", "SRV-116", "SRV-117")
@everywhere(*MODERN)
async def test_of_several_faults_the_first_of_the_ladder_is_told(open_wire: Open) -> None:
    wire = await open_wire("without")
    bare = {VERSION: "2026-07-28"}
    for what, method, params, code in [
        ("version before capabilities", "tools/list", {"_meta": {VERSION: "2099-01-01"}}, -32022),
        ("version before method", "no/such", {"_meta": {VERSION: "2099-01-01"}}, -32022),
        ("capabilities before method", "no/such", {"_meta": bare}, -32602),
        ("method before its params", "tools/call", {"_meta": _GOOD, "name": "a", "arguments": []}, -32601),
        ("method before its cursor", "tools/list", {"_meta": _GOOD, "cursor": 5}, -32601),
    ]:
        await wire.send({"jsonrpc": "2.0", "id": what, "method": method, "params": params})
        answer = await wire.receive()
        assert (answer["id"], answer["error"]["code"]) == (what, code)


@requirement("SRV-114")
@everywhere(*MODERN)
async def test_what_one_request_declared_does_not_count_for_the_next(wire: Wire) -> None:
    able: Object = {CAPABILITIES: {"elicitation": {"form": {}}}}
    unable: Object = {CAPABILITIES: {}}
    for _ in range(2):
        asked = await wire.call("asks", **able)
        assert asked["result"]["resultType"] == "input_required"
        refused = await wire.call("asks", **unable)
        assert refused["error"]["code"] == -32021
    named = await wire.call("state", **{CLIENT: {"name": "Ada", "version": "1"}})
    caller = "anonymous" if wire.transport == "http" else "local"
    assert named["result"]["content"][0]["text"] == f"the state Ada 2026-07-28 {caller} True"
    params = {"name": "state", "_meta": {VERSION: "2026-07-28", CAPABILITIES: {}}}
    await wire.send({"jsonrpc": "2.0", "id": "nameless", "method": "tools/call", "params": params})
    assert (await wire.receive())["result"]["content"][0]["text"] == f"the state  2026-07-28 {caller} True"


@requirement("SRV-114")
@everywhere(*MODERN)
async def test_what_a_handshake_declared_does_not_count_for_stateless_requests_nor_the_other_way(wire: Wire) -> None:
    await wire.reopen("2025-11-25", {"elicitation": {"form": {}}})
    wire.revision, wire.capabilities = "2026-07-28", {}
    assert (await wire.call("asks"))["error"]["code"] == -32021
    await wire.reopen("2025-11-25", {})
    wire.revision, wire.capabilities = "2026-07-28", {"elicitation": {}}
    assert (await wire.call("asks"))["result"]["resultType"] == "input_required"
    wire.revision = "2025-11-25"
    assert (await wire.call("asks"))["result"]["isError"] is True
    assert not wire.others


@requirement("SRV-115")
@everywhere(*MODERN)
async def test_a_capability_that_is_needed_and_not_declared_is_named_in_the_refusal(open_wire: Open) -> None:
    wire = await open_wire(capabilities={})
    for tool, arguments, needed in [
        ("asks", {}, {"elicitation": {"form": {}}}),
        ("asks_url", {}, {"elicitation": {"url": {}}}),
        ("samples", {}, {"sampling": {}}),
        ("wants_roots", {}, {"roots": {}}),
        ("asks_all", {}, {"elicitation": {"form": {}}, "sampling": {}, "roots": {}}),
        ("requires", {"capability": "sampling"}, {"sampling": {}}),
        ("requires", {"capability": "sampling.tools"}, {"sampling": {"tools": {}}}),
    ]:
        error = (await wire.call(tool, arguments))["error"]
        assert error["code"] == -32021, tool
        assert error["data"] == {"requiredCapabilities": needed}, tool


@requirement("SRV-116")
@everywhere(*MODERN)
async def test_methods_that_only_a_handshake_knows_are_unknown_to_stateless_requests(wire: Wire) -> None:
    own = wire.revision
    for _ in range(2):
        for method, params in [
            ("initialize", _hello("2025-11-25")),
            ("ping", {}),
            ("logging/setLevel", {"level": "info"}),
            ("resources/subscribe", {"uri": "file:///a"}),
            ("notifications/initialized", {}),
            ("tools/List", {}),
            ("", {}),
            ("no/such", {}),
        ]:
            answer = await wire.request(method, params)
            assert answer["error"]["code"] == -32601, method
        await wire.reopen("2025-06-18")  # nor does it help to have shaken hands
        wire.revision = own


@requirement("SRV-117")
@everywhere(*MODERN)
async def test_a_server_without_tools_does_not_know_their_methods(open_wire: Open) -> None:
    wire = await open_wire("without")
    assert "result" in await wire.request("server/discover")
    for method, params in [("tools/list", {}), ("tools/call", {"name": "echo", "arguments": {"text": "x"}})]:
        assert (await wire.request(method, params))["error"]["code"] == -32601
    await wire.ask("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
    honoured = await wire.notice("notifications/subscriptions/acknowledged")
    assert honoured["params"]["notifications"] == {}


@requirement("SRV-119")
@everywhere(*MODERN)
async def test_a_server_without_handshakes_names_what_it_speaks_to_those_who_try_one(open_wire: Open) -> None:
    wire = await open_wire("modern")
    for version in ("2025-11-25", "2024-10-07", "pocket", "2026-07-28"):
        await wire.send({"jsonrpc": "2.0", "id": version, "method": "initialize", "params": _hello(version)})
        answer = await wire.receive()
        assert answer["id"] == version
        assert answer["error"]["code"] == -32022
        assert answer["error"]["data"] == {"supported": ["2026-07-28"], "requested": version}
        assert "2026-07-28" in answer["error"]["message"]
    for method in ("tools/list", "tools/call", "ping", "logging/setLevel"):
        await wire.send({"jsonrpc": "2.0", "id": method, "method": method, "params": {"name": "nothing"}})
        assert "error" in await wire.receive()
    assert "result" in await wire.call("nothing")


# What no message does


_NEW_WORDS = {"resultType", "ttlMs", "cacheScope", "inputRequests", "requestState", SERVER, "supportedVersions"}


@requirement("SRV-120")
@everywhere(*LEGACY)
async def test_nothing_of_the_newest_revision_leaks_onto_an_older_wire(open_wire: Open) -> None:
    wire = await open_wire(capabilities={"elicitation": {"form": {}}})
    messages = [wire.welcome, *[message async for message in _everything(wire)]]
    for message in messages:
        leaked = {name for path, _ in _members(message) for name in path} & _NEW_WORDS
        assert not leaked, message


async def _everything(wire: Wire) -> Any:
    """One answer of each kind there is, and what came beside them."""
    yield await wire.request("tools/list")
    yield await wire.request("tools/list", {"cursor": "mine"})
    yield await wire.request("no/such")
    yield await wire.request("server/discover")
    if not wire.stateless:
        yield await wire.request("ping")
        yield await wire.request("logging/setLevel", {"level": "debug"})
        yield await wire.request("logging/setLevel", {"level": "loud"})
    for name in ("nothing", "list_numbers", "plain_dict", "picture", "sound", "link", "embedded", "annotated", "mixed"):
        yield await wire.call(name)
    for name in ("fails", "crashes", "exits", "lies", "not_finite", "surrogate", "risky", "nope", "wants_roots"):
        yield await wire.call(name)
    for kind in ("null", "string", "number", "boolean"):
        yield await wire.call("any_value", {"kind": kind})
    yield await wire.call("add", {"a": 1, "b": 2})
    yield await wire.call("add", {"a": "x"})
    yield await wire.call("add_tool", {"name": "one_more"})
    yield await wire.call("progresses", progressToken="p")
    yield await wire.call("logs", logLevel="debug")
    asked = await wire.ask("tools/call", {"name": "asks"})
    if wire.revision in ("2025-06-18", "2025-11-25", "pocket"):
        question = await wire.notice("elicitation/create")
        yield question
        await wire.send({"jsonrpc": "2.0", "id": question["id"], "result": {"action": "decline"}})
    yield await wire.answer(asked)
    for message in wire.others:
        yield message
    wire.others.clear()


def _members(value: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Json]]:
    """Every member of every object in a message, with the path to it."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield (*path, name), each
            yield from _members(each, (*path, name))
    elif isinstance(value, list):
        for each in value:
            yield from _members(each, path)


@requirement("SRV-127")
@everywhere()
async def test_no_member_is_null_but_a_value_that_is_nothing(open_wire: Open) -> None:
    wire = await open_wire(capabilities={"elicitation": {"form": {}}})
    nulls = set()
    async for message in _everything(wire):
        nulls |= {path for path, value in _members(message) if value is None}
    nothing: dict[str, set[tuple[str, ...]]] = {
        "2024-10-07": {("result", "toolResult"), ("result", "toolResult", "b")},
        "2024-11-05": set(),
        "2025-03-26": set(),
        "2026-07-28": {("result", "structuredContent")},
    }
    # `any_value(null)` has a schema that is not an object's: older revisions see it as the member `result`.
    allowed = nothing.get(wire.revision, {("result", "structuredContent", "result")})
    assert nulls - {("result", "toolResult", "b")} == allowed - {("result", "toolResult", "b")}


# Ids


def _refusals(wire: Wire) -> list[tuple[int, str]]:
    """One request for each class of error, its id still to be put in."""

    def whole(method: str, params: Object | None = None) -> str:
        message: Object = {"jsonrpc": "2.0", "id": "ID", "method": method}
        if known := wire.params(params):
            message["params"] = known
        return json.dumps(message).replace('"ID"', "ID")

    later = wire.revision in ("2025-11-25", "2026-07-28")
    nameless = -32020 if wire.stateless and wire.transport == "http" else -32602  # a header has to repeat the name
    return [
        (-32601, whole("no/such")),
        (-32602, whole("tools/list", {"cursor": "mine"})),
        (-32602, whole("tools/list", {"cursor": 5})),
        (nameless, whole("tools/call")),
        (nameless, whole("tools/call", {"name": 5})),
        (-32602, whole("tools/call", {"name": "echo", "arguments": []})),
        (-32602, whole("tools/call", {"name": "nope"})),
        (0 if later else -32602, whole("tools/call", {"name": "echo", "arguments": {}})),
        (0, whole("tools/call", {"name": "fails"})),
        (0, whole("tools/call", {"name": "crashes"})),
        (-32603, whole("tools/call", {"name": "add", "arguments": {"a": 1, "b": 2}})),
        (-32602, '{"jsonrpc":"2.0","id":ID,"method":"tools/list","params":[]}'),
        (-32600, '{"jsonrpc":"1.0","id":ID,"method":"tools/list"}'),
        (-32600, '{"id":ID,"method":"tools/list"}'),
        (-32600, '{"jsonrpc":"2.0","id":ID,"method":7}'),
        (-32600, '{"jsonrpc":"2.0","id":ID}'),
        (-32600, '{"jsonrpc":"2.0","id":ID,"method":"ping","result":{}}'),
        (-32700, '{"jsonrpc":"2.0","id":ID,"method":"tools/list","params":{"cursor":NaN}}'),
        (-32700, '{"jsonrpc":"2.0","id":ID,"method":"tools/list","params":{"a":1,"a":2}}'),
    ]


@requirement("SRV-121")
@everywhere()
async def test_an_error_carries_the_id_of_its_request_whatever_the_error(open_wire: Open) -> None:
    wire = await open_wire("broken")
    idents = ["text", "", 0, -7, 2**53 + 1, "1", "ä\u2028"]
    for at, (code, text) in enumerate(_refusals(wire)):
        ident = idents[at % len(idents)]
        await wire.send(text.replace("ID", json.dumps(ident), 1).encode())
        answer = await wire.receive()
        assert answer["id"] == ident, text
        assert type(answer["id"]) is type(ident), text
        assert answer.get("error", {}).get("code", 0) == code, text


@requirement("SRV-121")
@everywhere("2025-03-26")
async def test_errors_inside_a_batch_carry_their_ids_too(wire: Wire) -> None:
    batch = [
        {"jsonrpc": "2.0", "id": "unknown", "method": "no/such"},
        {"jsonrpc": "2.0", "id": 2, "method": "initialize", "params": _hello("2025-03-26")},
        {"jsonrpc": "2.0", "id": "3", "method": "tools/call", "params": {"name": "nope"}},
        {"jsonrpc": "2.0", "id": 4, "method": "ping", "params": {"_meta": 5}},
        {"jsonrpc": "2.0", "id": None, "method": "ping"},
        7,
    ]
    await wire.send(batch)
    answers = await wire.receive()
    found = [(each.get("id"), each.get("error", {}).get("code")) for each in answers]
    expected = [("unknown", -32601), (2, -32600), ("3", -32602), (None, -32600), (None, -32600)]
    assert [each for each in found if each[0] != 4] == expected
    assert [each[0] for each in found].count(4) == 1
    assert await wire.silent()


@requirement("SRV-122")
@everywhere()
async def test_an_id_that_is_no_text_or_integer_is_refused_without_one(wire: Wire) -> None:
    for ident in ("null", "true", "false", "1.5", "1.0", "1e2", "-0.0", "[]", "[1]", "{}", '{"a":1}'):
        for method in ("ping", "tools/list", "initialize", "no/such"):
            await wire.send(f'{{"jsonrpc":"2.0","id":{ident},"method":"{method}"}}'.encode())
            answer = await wire.receive()
            assert answer["error"]["code"] == -32600, ident
            # Told as null where the revision's schema wants a member, left out since it need not be there (PD-28), and
            # over HTTP, where what cannot be read belongs to no session (REVISIONS 6, rows 8 and 10).
            is_absent = wire.revision in ("2025-11-25", "2026-07-28") or (
                wire.transport == "http" and wire.revision not in OLD
            )
            assert answer.get("id", "absent") == ("absent" if is_absent else None)
    assert await wire.silent()


_PARAMS: list[Json] = [None, {}, [], 5, "x", {"requestId": None}, {"requestId": [1]}, {"name": "nope"}, {"_meta": 5}]


@requirement("SRV-123")
@everywhere()
async def test_a_notification_is_never_answered_whatever_is_wrong_with_it(open_wire: Open) -> None:
    wire = await open_wire(fresh=True)
    for method in (
        "notifications/initialized",
        "notifications/cancelled",
        "notifications/progress",
        "notifications/roots/list_changed",
        "notifications/no/such",
        "no/such",
        "",
        "ping",
        "initialize",
        "tools/list",
        "tools/call",
        "server/discover",
        "subscriptions/listen",
    ):
        for params in _PARAMS:
            message: Object = {"jsonrpc": "2.0", "method": method, "params": params}
            await wire.send(message)
        await wire.send({"jsonrpc": "2.0", "method": method})
        await wire.notify(method, wire.params({"name": "nothing"}))
    assert await wire.silent()
    # Nor does a call that is sent as one run.
    await wire.notify("tools/call", wire.params({"name": "add", "arguments": {"a": 1, "b": 2}}))
    runs = await wire.call("times_run", {"name": "add"})
    assert _text(runs["result"]) in (0, "0")


def _text(result: Object) -> Json:
    return result["toolResult"] if "toolResult" in result else result["content"][0]["text"]


# Lines and characters


@requirement("SRV-124")
@over_stdio
async def test_whatever_a_tool_writes_to_standard_output_stays_off_the_wire(wire: Wire) -> None:
    ident = await wire.ask("tools/call", {"name": "prints"})
    answer = await wire.receive()  # checked: strict JSON, one line, allowed members
    assert answer["id"] == ident
    assert _text(answer["result"]) == "printed"
    assert await wire.silent()


@requirement("SRV-125")
@over_stdio
async def test_the_server_leaves_soon_after_its_input_ends(wire: Wire) -> None:
    await wire.call("echo", {"text": "hello"})
    assert isinstance(wire, StdioWire)
    async with asyncio.timeout(PATIENCE):
        assert await wire.close() == 0
    with pytest.raises(EOFError):
        await wire.read()


_TEXTS = [
    "line one\nline two\r\nline three",
    "emoji 🦆👩‍👩‍👧‍👦🏳️‍🌈",
    "separators \u2028 \u2029 \x0c",
    "private use \ue000 \uf8ff \U000f0000 \U0010fffd",
    "e\u0301 is not é",
    "עברית العربية می‌خواهم",
    'quotes " \\ / \\u0041 \\n',
    "𝕬𐍈 beyond the first plane",
    "",
]
# What acts or hides, which the sanitizer removes and tells; without it, it survives as well.
_HIDDEN_TEXTS = [
    "line two\r\nline three\rend",
    "separators \u0085 \x0b",
    "zero \u0000 and \u001f \u007f",
    "\ufeffmark at the front, \ufffe\uffff \U0010ffff noncharacters",
    "עברית \u202eabc\u202c \u200b \xad \U000e0041",
]


@requirement("SRV-126")
@everywhere()
async def test_any_text_survives_the_round_trip_however_it_is_written(wire: Wire) -> None:
    for escaped in (True, False):
        for at, text in enumerate(_TEXTS):
            answer = await _echoed(wire, f"{escaped} {at} {text}", text, escaped)
            assert _text(answer["result"]) == text
            assert "io.handrail/sanitized" not in answer["result"].get("_meta", {})


@requirement("SRV-126", "SRV-604")
@everywhere()
async def test_text_that_acts_or_hides_is_changed_and_that_is_told(wire: Wire) -> None:
    for escaped in (True, False):
        for at, text in enumerate(_HIDDEN_TEXTS):
            answer = await _echoed(wire, f"{escaped} {at} {text}", text, escaped)
            assert _text(answer["result"]) != text
            counts = answer["result"]["_meta"]["io.handrail/sanitized"]
            assert counts and all(type(count) is int and count > 0 for count in counts.values())


@requirement("SRV-126")
@everywhere()
async def test_without_the_sanitizer_every_text_survives(open_wire: Open) -> None:
    wire = await open_wire("servers_lifecycle:unsanitized")
    for escaped in (True, False):
        for at, text in enumerate(_TEXTS + _HIDDEN_TEXTS):
            answer = await _echoed(wire, f"{escaped} {at} {text}", text, escaped)
            assert _text(answer["result"]) == text


async def _echoed(wire: Wire, ident: str, text: str, escaped: bool) -> Any:
    params = wire.params({"name": "echo", "arguments": {"text": text}})
    message = {"jsonrpc": "2.0", "id": ident, "method": "tools/call", "params": params}
    await wire.send(json.dumps(message, ensure_ascii=escaped).encode())
    answer = await wire.receive()
    assert answer["id"] == ident
    return answer


@requirement("SRV-126")
@in_memory
async def test_what_is_not_utf_8_is_refused_and_the_next_message_read(wire: Wire) -> None:
    for bad in (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", "ö".encode("latin-1")):
        params = json.dumps(wire.params({"name": "echo", "arguments": {"text": "HERE"}})).encode()
        line = b'{"jsonrpc":"2.0","id":"not text","method":"tools/call","params":' + params + b"}"
        await wire.send(line.replace(b"HERE", bad))
        answer = await wire.receive()
        assert answer["error"]["code"] == -32700, bad
    assert await wire.silent()
