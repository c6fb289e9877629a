"""Seven dialects of clients against seven of upstream servers, over every transport: the tables of TRANSLATION.

Neither end is made of this package: clients are the raw wires of `wires.py`, upstreams are scripted. What the tables
say is written down here once more, as plain functions of the two dialects.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from handrail.guards import Rule
from patience import PATIENCE, SOAK
from requirements import record_ran, requirement
from rigs_gateway import running, strings
from scripted_upstream import (
    COMPLETED,
    CURSOR,
    DIALECTS,
    ENVELOPE,
    INSTRUCTIONS,
    MODIFIED,
    R0,
    R1,
    R2,
    R3,
    R4,
    R5,
    TOOLS,
    Json,
    Object,
    P,
    blocks_of,
    definition,
    questions_of,
    since,
    state_of,
)
from wires_gateway import LEGS, PREFIX, UPSTREAMS, Gateway, Gateways, LegWire, Pair, Talk, failure_of, text_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

ABSENT: Any = object()
CHANGED = "notifications/tools/list_changed"
PROGRESSED = "notifications/progress"
THREE = (R1, R4, R5)  # the revisions whose transports are all tried
_marks = itertools.count()

Connect = Callable[..., Any]


def fresh_mark(pair: Pair) -> str:
    return f"{next(_marks)}.{pair}"


# Who talks to whom

_EVERY = [Pair(*each) for each in itertools.product(DIALECTS, LEGS, DIALECTS, LEGS)]
_REVISIONS = [Pair(client, "http", upstream, "http") for client in DIALECTS for upstream in DIALECTS]
_TRANSPORTS = [Pair(*each) for each in itertools.product(THREE, LEGS, THREE, LEGS)]
# A rule holds over each transport of a client, in each revision.
_PLACES = [
    Pair(client, leg, upstream, "http") for client in DIALECTS for leg, upstream in (("memory", R5), ("stdio", R4))
]
_SOME = [*_REVISIONS, *_PLACES]
PAIRS = [pair for pair in dict.fromkeys([*_SOME, *_TRANSPORTS, *(_EVERY if SOAK else ())]) if pair.exists]


def between(
    *,
    clients: Sequence[str] = DIALECTS,
    upstreams: Sequence[str] = DIALECTS,
    legs: Sequence[str] = (*LEGS, "memory"),
    carried_alike: bool = False,
) -> pytest.MarkDecorator:
    """Run a test for each pair of these; `carried_alike`: pairs of transports do not matter for it, but in a soak."""
    found = [
        each
        for each in (PAIRS if SOAK or not carried_alike else _SOME)
        if each.client in clients and each.upstream in upstreams and each.leg in legs
    ]
    return pytest.mark.parametrize("pair", found, ids=str)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways() -> AsyncIterator[Gateways]:
    opened = Gateways()
    yield opened
    heard = [event for rig in opened.rigs for event in rig.events if "caller-secret" in json.dumps(event)]
    await opened.close()
    assert not heard, "what identifies a caller has reached an upstream"


@pytest_asyncio.fixture(loop_scope="module")
async def connect(request: pytest.FixtureRequest, pair: Pair, gateways: Gateways) -> AsyncIterator[Connect]:
    """`await connect(capabilities)`: the client of the test's pair, opened and recorded."""
    async with AsyncExitStack() as stack:

        async def connected(capabilities: Object | None = None) -> Talk:
            gateway = await gateways.get(pair.up_leg)
            wire = await stack.enter_async_context(gateway.wire(pair.client, pair.leg, capabilities or {}))
            record_ran(request, pair.client, "http" if pair.leg == "sse" else pair.leg)
            return Talk(pair, wire, gateway)

        yield connected


@pytest_asyncio.fixture(loop_scope="module")
async def talk(connect: Connect) -> Talk:
    """The client of the test's pair; it declares nothing."""
    connected: Talk = await connect()
    return connected


# List (TRANSLATION 3 and 5)


def listed(pair: Pair, raw: Object) -> Object:
    """A definition of the upstream as the client has to see it."""
    client = pair.client
    out: Object = {"name": PREFIX[pair.upstream] + raw["name"], "inputSchema": _input_schema(client, raw)}
    if "description" in raw or client == P:
        out["description"] = raw.get("description", raw.get("title", out["name"]))
    if "annotations" in raw and since(client, R2):
        out["annotations"] = raw["annotations"]
    if "title" in raw and since(client, R2):
        if client == R2:
            out["annotations"] = {"title": raw["title"], **out.get("annotations", {})}
        elif client != P:
            out["title"] = raw["title"]
    if "outputSchema" in raw and since(client, R3):
        is_whole = client == R5 or raw["outputSchema"]["type"] == "object"
        wrapped = {"type": "object", "properties": {"result": raw["outputSchema"]}, "required": ["result"]}
        out["outputSchema"] = raw["outputSchema"] if is_whole else wrapped
    if "icons" in raw and since(client, R4):
        out["icons"] = raw["icons"]
    if "_meta" in raw and since(client, R3) and client != P:
        out["_meta"] = raw["_meta"]
    return out


def _input_schema(client: str, raw: Object) -> Object:
    schema: Object = raw["inputSchema"]
    if client == R5 or "properties" not in schema:
        return schema
    plain = {
        name: {} if inner is True else {k: v for k, v in inner.items() if k != "x-mcp-header"}
        for name, inner in schema["properties"].items()
    }
    return {**schema, "properties": plain}


async def pages(talk: Talk) -> list[Object]:
    """All pages of the list of tools; every cursor is the gateway's own."""
    found = []
    params: Object = {}
    while True:
        page = (await talk.wire.request("tools/list", params))["result"]
        found.append(page)
        cursor = page.get("nextCursor")
        if talk.pair.client == P:
            assert isinstance(cursor, str)
            cursor = cursor or None
        if cursor is None:
            return found
        assert cursor not in ("", CURSOR)
        params = {"cursor": cursor}


@requirement("GW-01", "GW-09")
@between()
async def test_tools_are_listed_in_the_words_of_the_client(pair: Pair, talk: Talk) -> None:
    seen = talk.gateway.lists.setdefault((pair.client, pair.leg), {})
    if not seen:  # one list has the tools of all upstreams
        seen |= {tool["name"]: tool for page in await pages(talk) for tool in page["tools"]}
    tools: dict[str, Object] = seen
    for raw in upstream_tools(talk):
        expected = listed(pair, {name: value for name, value in raw.items() if name != "execution"})
        got = tools[expected["name"]]
        if "_meta" in expected:
            assert expected["_meta"].items() <= got["_meta"].items()
        assert without_meta(got) == without_meta(expected)


def upstream_tools(talk: Talk) -> list[Object]:
    """What the upstream lists from its beginning."""
    return [definition(talk.pair.upstream, tool) for tool in TOOLS]


def without_meta(value: Object) -> Object:
    return {name: inner for name, inner in value.items() if name != "_meta"}


@requirement("GW-07")
@between(clients=[R5], carried_alike=True)
async def test_the_cache_hints_are_the_least_of_all_parts(pair: Pair, talk: Talk) -> None:
    for page in await pages(talk):  # handshake upstreams are among the parts: nothing is known of theirs
        assert (page["ttlMs"], page["cacheScope"]) == (0, "private")


@requirement("GW-01")
@pytest.mark.parametrize("client", DIALECTS)
async def test_instructions_of_the_upstreams_are_the_gateways(
    client: str, request: pytest.FixtureRequest, gateways: Gateways
) -> None:
    gateway = await gateways.get("http")
    async with gateway.wire(client, "memory", {}) as first:
        await first.request("tools/list")  # so that every upstream has been asked
    async with gateway.wire(client, "memory", {}, fresh=True) as wire:
        record_ran(request, client, "memory")
        welcome = wire.welcome if client != R5 else (await wire.request("server/discover"))["result"]
        if client == R0:
            assert "instructions" not in welcome
            return
        text = welcome["instructions"]
        assert text.count(INSTRUCTIONS) == len([each for each in DIALECTS if each != R0])
        assert all(name in text for name in ("r1", "r4", "r5"))


# Results (TRANSLATION 4.1 and 4.2)


def text_block(text: str) -> Object:
    return {"type": "text", "text": text}


def result_of(client: str, content: list[Object], structured: Json = ABSENT) -> Object:
    """A result in the words of the client."""
    if client == R0:
        is_text = len(content) == 1 and content[0]["type"] == "text"
        only = content[0]["text"] if is_text else {"content": content} if content else None
        return {"toolResult": only if structured is ABSENT else structured}
    is_said = any(block["type"] == "text" and _parsed(block["text"]) == structured for block in content)
    if structured is not ABSENT and not is_said and client in (R1, R2):  # where it has no other place
        content = [*content, text_block(json.dumps(structured, separators=(",", ":")))]
    out: Object = {"content": content, "isError": False}
    if structured is not ABSENT and since(client, R3):
        is_whole = client == R5 or isinstance(structured, dict)
        out["structuredContent"] = structured if is_whole else {"result": structured}
    if client == P:
        out.setdefault("structuredContent", {})
    if client == R5:
        out["resultType"] = "complete"
    return out


def _parsed(text: str) -> Json:
    try:
        return json.loads(text)
    except ValueError:
        return ABSENT


def as_read(upstream: str, value: Json, text: str) -> tuple[list[Object], Json]:
    """What is left of a value and its text, once the upstream has said it."""
    if upstream == R0:
        return [text_block(json.dumps(value, separators=(",", ":")))], value
    if upstream in (R1, R2):
        return [text_block(text)], ABSENT  # text that happens to be JSON is not taken for data
    is_whole = upstream == R5 or isinstance(value, dict)
    return [text_block(text)], value if is_whole else {"result": value}


@requirement("GW-01")
@between()
async def test_a_call_comes_back_with_the_text_it_took(pair: Pair, talk: Talk) -> None:
    for text in ("", 'héllo "€😀" \\ \n\t end ', fresh_mark(pair)):
        content = [text_block(text)] if text or pair.upstream != P else []  # an empty text stands for nothing there
        if pair.client == P and not content:
            content = [text_block("")]
        assert await talk.result("echo", {"text": text}) == result_of(pair.client, content)
    assert len(talk.rig.calls("echo", text=text)) == 1


@requirement("GW-01", "GW-04")
@between()
async def test_a_structured_result_has_the_shape_of_the_clients_revision(pair: Pair, talk: Talk) -> None:
    content, value = as_read(pair.upstream, {"sum": 3}, '{"sum": 3}')
    assert await talk.result("add", {"a": 1, "b": 2}) == result_of(pair.client, content, value)

    content, value = as_read(pair.upstream, [2, 3, 5], "[2,3,5]")
    # What came wrapped stays so: the upstream may have meant it (LOSSY-11).
    assert await talk.result("numbers") == result_of(pair.client, content, value)

    content, value = as_read(pair.upstream, {}, "{}")
    assert await talk.result("empty") == result_of(pair.client, content, value)

    content, value = as_read(pair.upstream, None, "null")
    assert await talk.result("null") == result_of(pair.client, content, value)


# Content (TRANSLATION 4.3)


def block_of(client: str, block: Object) -> list[Object]:
    """A block in the closest form that the client's revision has."""
    out = {name: value for name, value in block.items() if name not in ("_meta", "annotations", "icons")}
    notes = {k: v for k, v in block.get("annotations", {}).items() if client not in (R1, R2) or k != "lastModified"}
    shared = {"annotations": notes} if notes and client != R0 else {}
    if block["type"] == "audio" and client == R1:
        moved = {"uri": "urn:mcp-content:sha256:…", "mimeType": "audio/wav", "blob": block["data"]}
        return [{"type": "resource", "resource": moved, **shared}, text_block("[audio, audio/wav, 44 B]")]
    if block["type"] == "resource_link" and client in (R1, R2):
        return [{**text_block("c — note://c (text/x-c)\nEntry"), **shared}]
    if "_meta" in block and since(client, R3) and client != P:
        out["_meta"] = block["_meta"]
    if "icons" in block and (client == R0 or since(client, R4)):
        out["icons"] = block["icons"]
    return [{**out, **shared}]


@requirement("GW-01", "GW-04")
@between()
async def test_every_kind_of_content_is_said_in_the_closest_way(pair: Pair, talk: Talk) -> None:
    result = await talk.result("blocks")
    blocks = blocks_of(pair.upstream)
    if pair.upstream == R0:  # a value as any other
        value = {"content": blocks}
        assert result == result_of(pair.client, [text_block(json.dumps(value, separators=(",", ":")))], value)
        return
    content = [moved for block in blocks for moved in block_of(pair.client, block)]
    got = result["toolResult"]["content"] if pair.client == R0 else result["content"]
    for block in got:
        uri = block.get("resource", {}).get("uri", "")
        if re.fullmatch(r"urn:mcp-content:sha256:[0-9a-f]{16}", uri):
            block["resource"]["uri"] = "urn:mcp-content:sha256:…"
    assert got == content
    assert MODIFIED in json.dumps(got) or pair.client in (R0, R1, R2) or pair.upstream in (R1, R2)


@requirement("GW-04")
@between(clients=[R1, R2], upstreams=DIALECTS[1:], carried_alike=True)
async def test_content_of_an_unknown_type_is_replaced_by_a_note(pair: Pair, talk: Talk) -> None:
    assert (await talk.result("strange"))["content"] == [text_block("[unsupported content: hologram]")]


# Errors (TRANSLATION 7)


async def status_of(talk: Talk) -> int:
    """The HTTP status of the last answer; 200 where there is none."""
    return talk.wire.status if isinstance(talk.wire, LegWire) and talk.pair.leg == "http" else 200


@requirement("GW-01", "GW-15")
@between()
async def test_a_failure_of_the_tool_is_a_failure_of_the_tool(pair: Pair, talk: Talk) -> None:
    answer = await talk.call("fail")
    assert failure_of(answer) == "it did not work"
    assert await status_of(talk) == 200
    if pair.client == P:
        assert answer["result"]["structuredContent"] == {}
    if pair.client == pair.upstream == R0:
        assert answer["result"]["toolResult"] == {"error": "it did not work", "status": "failed"}


@requirement("GW-01", "GW-15")
@between()
async def test_codes_of_an_upstream_are_kept_translated_or_withheld_by_their_kind(pair: Pair, talk: Talk) -> None:
    for code, expected in ((4711, 4711), (-1, -1), (-32603, -32603), (-32050, -32603), (-32000, -32603)):
        mark = fresh_mark(pair)
        answer = await talk.call("error", {"code": code, "mark": mark})
        assert answer["error"]["code"] == expected, (code, answer)
        assert await status_of(talk) == 200
        assert len(talk.rig.calls("error", mark=mark)) == 1
        if expected != code:
            assert str(code) in json.dumps(answer["error"]["data"]["upstream"])
        elif code > -32000:
            assert f"error {code} of the rig" in answer["error"]["message"]


@requirement("GW-01", "GW-15")
@between(carried_alike=True)
async def test_arguments_that_only_the_upstream_refuses_are_bad_arguments(pair: Pair, talk: Talk) -> None:
    answer = await talk.call("error", {"code": -32602})
    assert await status_of(talk) == 200
    if pair.client in (R4, R5):
        assert "error -32602 of the rig" in failure_of(answer)
    else:
        assert answer["error"]["code"] == -32602
        told = answer["error"]["data"]["reason"] if pair.client == R0 else answer["error"]["message"]
        assert "error -32602 of the rig" in told


@requirement("GW-15", "GW-16")
@between()
async def test_arguments_that_break_the_schema_never_reach_the_upstream(pair: Pair, talk: Talk) -> None:
    mark = fresh_mark(pair)
    answer = await talk.call("add", {"a": mark, "b": 2})
    if pair.client in (R4, R5):
        assert "expected number" in failure_of(answer)
    else:
        assert answer["error"]["code"] == -32602
        assert pair.client != R0 or "expected number" in answer["error"]["data"]["reason"]
    assert await status_of(talk) == 200
    assert (await talk.call("add", {"a": 1, "b": 2}))["result"]  # later than the other would have been
    assert not talk.rig.calls("add", a=mark)


@requirement("GW-01", "GW-15")
@between()
async def test_an_unknown_tool_is_told_by_the_name_the_client_used(pair: Pair, talk: Talk) -> None:
    for name in (talk.prefix + "no_such_tool", "echo"):
        answer = await talk.wire.call(name, {})
        assert answer["error"]["code"] == -32602
        told = answer["error"]["data"]["reason"] if pair.client == R0 else answer["error"]["message"]
        assert told == f"Unknown tool: {name}"
        assert await status_of(talk) == 200
    assert not talk.rig.calls("no_such_tool")


@requirement("GW-15")
@pytest.mark.parametrize("pair", [each for each in PAIRS if each.leg == each.up_leg == "http"], ids=str)
async def test_a_tool_that_its_upstream_has_silently_dropped_is_unknown(pair: Pair, talk: Talk) -> None:
    name = f"gone_{next(_marks)}"
    assert await talk.text("change", {"name": name}) == "changed"
    async with asyncio.timeout(PATIENCE):
        while talk.prefix + name not in [tool["name"] for page in await pages(talk) for tool in page["tools"]]:
            pass
    talk.rig.command(do="forget", name=name)
    answer = await talk.call(name)
    assert answer["error"]["code"] == -32602
    told = answer["error"]["data"]["reason"] if pair.client == R0 else answer["error"]["message"]
    assert told == f"Unknown tool: {talk.prefix}{name}"


@requirement("GW-15")
@between(carried_alike=True)
async def test_an_unknown_method_stays_one_with_the_status_of_the_client(pair: Pair, talk: Talk) -> None:
    answer = await talk.wire.request("no/such/method")
    assert answer["error"]["code"] == -32601
    assert await status_of(talk) == (404 if (pair.client, pair.leg) == (R5, "http") else 200)
    assert not talk.rig.heard("no/such/method")


@requirement("GW-15")
@between(upstreams=[R5], carried_alike=True)
async def test_a_header_mismatch_is_tried_once_more_and_then_an_internal_error(pair: Pair, talk: Talk) -> None:
    mark = fresh_mark(pair)
    lists = len(talk.rig.heard("tools/list"))
    answer = await talk.call("error", {"code": -32020, "mark": mark})
    assert answer["error"]["code"] == -32603
    assert await status_of(talk) == 200
    assert len(talk.rig.calls("error", mark=mark)) == 2
    assert len(talk.rig.heard("tools/list")) > lists


@requirement("GW-15")
@between(upstreams=[R5], carried_alike=True)
async def test_a_refused_version_never_looks_like_success(pair: Pair, talk: Talk) -> None:
    failure_of(await talk.call("error", {"code": -32022}))
    assert await status_of(talk) == 200
    assert await talk.text("echo", {"text": "agreed again"}) == "agreed again"


@requirement("GW-15")
@between(upstreams=[R5], carried_alike=True)
async def test_a_missing_capability_is_told_in_the_way_of_the_client(pair: Pair, talk: Talk) -> None:
    answer = await talk.call("error", {"code": -32021})
    if pair.client == R5:
        assert answer["error"]["code"] == -32021
        assert await status_of(talk) == (400 if pair.leg == "http" else 200)
    else:
        failure_of(answer)


_WITH_STATUS = [each for each in PAIRS if each.up_leg == "http"]


@requirement("GW-08", "GW-15")
@pytest.mark.parametrize("pair", _WITH_STATUS, ids=str)
async def test_a_status_of_the_upstream_is_a_failure_and_its_challenge_stays_here(pair: Pair, talk: Talk) -> None:
    for status in (401, 403, 429):
        answer = await talk.call("error", {"code": status})
        text = failure_of(answer)
        assert "canary" not in json.dumps(answer), "its challenge is for the gateway"
        assert "127.0.0.1" not in text, "an upstream has the name that the operator gave it"
        assert text.startswith(talk.prefix.removesuffix("_"))
        assert await status_of(talk) == 200


@requirement("GW-15", "GW-17")
@pytest.mark.parametrize("pair", _WITH_STATUS, ids=str)
async def test_an_upstream_that_goes_away_during_a_call_is_a_failure_and_the_next_call_works(
    pair: Pair, talk: Talk
) -> None:
    mark = fresh_mark(pair)
    assert failure_of(await talk.call("die", {"mark": mark}))
    assert len(talk.rig.calls("die", mark=mark)) == 1  # nobody knows whether it was carried out
    assert await talk.text("echo", {"text": mark}) == mark


@requirement("GW-04", "GW-15")
@between(upstreams=[R4, R5], carried_alike=True)
async def test_a_page_to_visit_first_is_named_to_those_who_can_open_it(pair: Pair, connect: Connect) -> None:
    talk: Talk = await connect({"elicitation": {"url": {}}})
    mark = fresh_mark(pair)
    if not since(pair.client, R4):
        text = failure_of(await talk.call("visit", {"mark": mark}))
        assert "canary" not in text
        return
    page: Object = {}
    if pair.client == pair.upstream == R4:
        answer = await talk.call("visit", {"mark": mark})
        assert answer["error"]["code"] == -32042
        [page] = answer["error"]["data"]["elicitations"]
        assert await talk.text("visit", {"mark": mark}) == "visited"
    else:
        answer = await talk.converse("visit", {"mark": mark}, replies)
        assert text_of(answer) == "visited"
        [(_, page)] = talk.asked
    assert (page["mode"], page["message"]) == ("url", "Link your bank first")
    assert page["url"].endswith("canary-url")
    assert bool(page.get("elicitationId")) is (pair.client == R4)
    assert len(talk.rig.calls("visit", mark=mark)) == 2


@requirement("GW-04", "GW-10")
@between(clients=[R4, R5], upstreams=[R4])
async def test_a_caller_hears_that_its_page_is_completed_before_the_result_of_its_call(
    pair: Pair, connect: Connect
) -> None:
    talk: Talk = await connect({"elicitation": {"url": {}}})
    lossy = talk.gateway.server.upstreams[talk.prefix.removesuffix("_")].lossy
    before = lossy["LOSSY-27"]
    answer = await talk.converse("ask", {"kind": "page", "mark": fresh_mark(pair)}, replies)
    assert json.loads(text_of(answer)) == {"q": {"action": "accept"}}
    [(_, page)] = talk.asked
    if pair.client == R4:
        assert page["elicitationId"] != "e-7"  # another upstream may have the same
        assert talk.notices(COMPLETED) == [{"elicitationId": page["elicitationId"]}]
    else:
        assert not talk.notices(COMPLETED)
    if pair.leg != "stdio":  # there the gateway is another process
        assert lossy["LOSSY-27"] - before == (pair.client == R5)


@requirement("GW-04", "GW-10")
@between(clients=[R4], upstreams=[R4], legs=["http", "stdio", "memory"])
async def test_only_the_caller_that_was_sent_to_a_page_hears_that_it_is_completed(pair: Pair, connect: Connect) -> None:
    """Both callers share one connection to the upstream, and have no call in flight."""
    talks: list[Talk] = [await connect({"elicitation": {"url": {}}})]
    if pair.leg != "stdio":  # there is one client
        talks.append(await connect({"elicitation": {"url": {}}}))
    marks, pages = [fresh_mark(pair) for _ in talks], []
    for talk, mark in zip(talks, marks, strict=True):
        answer = await talk.call("visit", {"mark": mark})
        pages.append(answer["error"]["data"]["elicitations"][0]["elicitationId"])
    rig = talks[0].rig
    rig.command(do="complete", id="e-of-nobody")
    for mark, talk, page in [*zip(marks, talks, pages, strict=True)][::-1]:
        for _ in range(2):  # said twice, it is heard once
            rig.command(do="complete", id=f"e-{mark}")
        assert (await talk.wire.notice(COMPLETED))["params"] == {"elicitationId": page}
    for talk in talks:
        assert await talk.text("echo", {"text": "x"}) == "x"
        assert not talk.notices(COMPLETED)


@requirement("GW-04", "GW-15")
@between(upstreams=[R4, R5], carried_alike=True)
async def test_a_page_to_visit_first_is_kept_from_those_who_cannot_open_it(pair: Pair, connect: Connect) -> None:
    for capabilities in ({}, FULL[R3]):
        talk: Talk = await connect(capabilities)
        answer = await talk.call("visit", {"mark": fresh_mark(pair)})
        if pair.client == R5:
            assert answer["error"]["code"] == -32021
            assert await status_of(talk) == (400 if pair.leg == "http" else 200)
        else:
            text = failure_of(answer)
            assert pair.upstream == R5 or "bank.example" in text
        assert "canary" not in json.dumps(answer), "the address is for people, not for models"


@requirement("GW-15", "GW-17")
@pytest.mark.parametrize("up_leg", LEGS)
async def test_an_upstream_that_is_gone_is_still_listed_and_its_calls_are_failures(
    request: pytest.FixtureRequest, up_leg: str, gateways: Gateways
) -> None:
    other = (await gateways.get("http")).rigs[R5]
    async with AsyncExitStack() as stack:
        async with running(R4, up_leg) as rig:
            gateway = Gateway({R4: rig, R5: other})
            await gateway.start()
            stack.push_async_callback(gateway.close)
            async with gateway.wire(R4, "http", {}) as wire:
                before = await Talk(Pair(R4, "http", R4, up_leg), wire, gateway).text("echo", {"text": "x"})
                assert before == "x"
            rig.command(do="die")
        for client in DIALECTS:
            wire = await stack.enter_async_context(gateway.wire(client, "http", {}))
            record_ran(request, client, "http")
            talk = Talk(Pair(client, "http", R4, up_leg), wire, gateway)
            names = [tool["name"] for page in await pages(talk) for tool in page["tools"]]
            assert "r4_echo" in names
            failure = failure_of(await talk.call("echo", {"text": "y"}))
            assert "r4" in failure
            assert "127.0.0.1" not in failure
            assert await status_of(talk) == 200
            healthy = Talk(Pair(client, "http", R5, "http"), wire, gateway)
            assert await healthy.text("echo", {"text": "z"}) == "z"


@requirement("GW-15", "GW-16")
@pytest.mark.parametrize("leg", ["memory", "http"])
async def test_rules_of_the_gateway_hold_for_tools_of_its_upstreams(
    request: pytest.FixtureRequest, gateways: Gateways, leg: str
) -> None:
    behind = (await gateways.get("http")).rigs
    rules = [Rule(verdict="hide", tools=["*_echo"]), Rule(verdict="deny", tools=["*_null"]), Rule(verdict="allow")]
    gateway = Gateway({dialect: behind[dialect] for dialect in (R0, R4, R5)}, rules)
    await gateway.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(gateway.close)
        for client, upstream in itertools.product(DIALECTS, gateway.rigs):
            async with gateway.wire(client, leg, {}) as wire:
                record_ran(request, client, leg)
                talk = Talk(Pair(client, leg, upstream, "http"), wire, gateway)
                mark = fresh_mark(talk.pair)
                hidden = await talk.call("echo", {"text": mark})
                assert hidden["error"]["code"] == -32602
                told = hidden["error"]["data"]["reason"] if client == R0 else hidden["error"]["message"]
                assert told == f"Unknown tool: {talk.prefix}echo"
                calls = len(talk.rig.calls("null"))
                assert failure_of(await talk.call("null"))
                assert await status_of(talk) == 200
                assert len(talk.rig.calls("null")) == calls
                assert not talk.rig.calls("echo", text=mark)
                names = [tool["name"] for page in await pages(talk) for tool in page["tools"]]
                assert talk.prefix + "null" in names
                assert talk.prefix + "echo" not in names


# Progress, cancellation, disconnect (TRANSLATION 10)


@requirement("GW-01", "GW-13")
@between()
async def test_progress_has_the_callers_token_and_only_grows(pair: Pair, talk: Talk) -> None:
    mark = fresh_mark(pair)
    for token in ("tök-1", 1_000_000_007):
        mark += "+"
        assert await talk.text("steps", {"mark": mark}, progressToken=token) == "done"
        seen = talk.notices(PROGRESSED)
        talk.wire.others.clear()
        assert [each["progress"] for each in seen] == [1, 3, 4]
        assert all(each["progressToken"] == token and type(each["progressToken"]) is type(token) for each in seen)
        assert {each["total"] for each in seen} == {4}
        has_text = since(pair.client, R2) and since(pair.upstream, R2)
        assert [each.get("message") for each in seen] == ([f"step {n}" for n in (1, 3, 4)] if has_text else [None] * 3)
        [call] = talk.rig.calls("steps", mark=mark)
        assert call["message"]["params"]["_meta"]["progressToken"] != token
    assert await talk.text("steps", {"mark": mark}) == "done"
    assert not talk.notices(PROGRESSED)


@requirement("GW-13")
@between()
async def test_two_callers_with_the_same_token_each_get_their_own_progress(pair: Pair, connect: Connect) -> None:
    talks = [await connect({"experimental": {f"caller-{at}": {}}}) for at in (1, 2)]
    marks = [fresh_mark(pair) for _ in talks]
    idents = []
    for at, talk in enumerate(talks):
        idents.append(await talk.start("slow", {"mark": marks[at], "at": 5 + at}, progressToken="same"))
        await talk.rig.became("started", marks[at])
    for at, talk in enumerate(talks):
        talk.rig.command(do="release", mark=marks[at])
        assert text_of(await talk.wire.answer(idents[at])) == "released"
        seen = talk.notices(PROGRESSED)
        assert [(each["progressToken"], each["progress"]) for each in seen] == [("same", 5 + at)]


@requirement("GW-01", "GW-12")
@between(clients=[each for each in DIALECTS if each != R0])
async def test_a_cancelled_call_is_cancelled_upstream_in_its_way(pair: Pair, talk: Talk) -> None:
    mark = fresh_mark(pair)
    ident = await talk.start("slow", {"mark": mark})
    started = await talk.rig.became("started", mark)
    await talk.wire.notify("notifications/cancelled", {"requestId": ident})
    if pair.upstream == R0:  # where nobody can be told: the answer is discarded (LOSSY-33)
        assert await talk.text("echo", {"text": mark}) == mark
        talk.rig.command(do="release", mark=mark)
        await talk.rig.became("released", mark)
        told = [each for each in talk.rig.heard("notifications/cancelled") if each["session"] == started["session"]]
        assert not told
    else:
        event = await talk.rig.became("cancelled", mark)
        assert event["how"] == ("disconnect" if (pair.upstream, pair.up_leg) == (R5, "http") else "notification")
    assert await talk.text("echo", {"text": mark}) == mark
    assert not [each for each in talk.wire.others if each.get("id") == ident]


@requirement("GW-12")
@between(clients=[R0])
async def test_the_first_draft_has_no_cancellation(pair: Pair, talk: Talk) -> None:
    mark = fresh_mark(pair)
    ident = await talk.start("slow", {"mark": mark})
    await talk.rig.became("started", mark)
    await talk.wire.notify("notifications/cancelled", {"requestId": ident})
    assert await talk.text("echo", {"text": mark}) == mark
    talk.rig.command(do="release", mark=mark)
    assert text_of(await talk.wire.answer(ident)) == "released"
    assert not talk.rig.has("cancelled", mark)


@requirement("GW-12")
@between(clients=[R2, R3, R4, P], legs=["http"])
async def test_a_handshake_client_that_loses_its_connection_has_cancelled_nothing(pair: Pair, talk: Talk) -> None:
    assert isinstance(talk.wire, LegWire)
    mark = fresh_mark(pair)
    ident = await talk.start("slow", {"mark": mark}, progressToken=mark)
    await talk.wire.notice(PROGRESSED)  # so that there is a stream to lose
    last = talk.wire.last_event
    await talk.wire.hang_up(ident)
    for _ in range(3):
        assert await talk.text("echo", {"text": mark}) == mark
    talk.rig.command(do="release", mark=mark)
    await talk.rig.became("released", mark)
    assert not talk.rig.has("cancelled", mark)
    assert not talk.rig.has("disconnected", mark)
    await talk.wire.resume(last)
    assert text_of(await talk.wire.answer(ident)) == "released"


@requirement("GW-12")
@between(clients=[R5], legs=["http"])
async def test_a_stateless_client_that_closes_its_stream_has_cancelled(pair: Pair, talk: Talk) -> None:
    assert isinstance(talk.wire, LegWire)
    mark = fresh_mark(pair)
    ident = await talk.start("slow", {"mark": mark}, progressToken=mark)
    await talk.rig.became("started", mark)
    await talk.wire.hang_up(ident)
    if pair.upstream != R0:
        await talk.rig.became("cancelled", mark)
    assert await talk.text("echo", {"text": mark}) == mark


# Change notices (TRANSLATION 9)

_SUBSCRIBED = {(each.leg, each.up_leg) for each in PAIRS}
_PLACED = {(each.leg, each.up_leg) for each in _PLACES}


@requirement("GW-01", "GW-11")
@pytest.mark.parametrize(("leg", "up_leg"), sorted(_SUBSCRIBED))
async def test_a_change_is_told_once_to_each_subscriber(
    request: pytest.FixtureRequest, gateways: Gateways, leg: str, up_leg: str
) -> None:
    gateway = await gateways.get(up_leg)
    clients = [each for each in DIALECTS if Pair(each, leg, R0, "http").exists]
    async with AsyncExitStack() as stack:
        talks: dict[str, Talk] = {}
        for client in clients if (leg, up_leg) in _PLACED or leg != "stdio" else [R4, R5]:  # a process for each
            # A pipe on which another era was spoken before would be told in its words too.
            wire = await stack.enter_async_context(gateway.wire(client, leg, {}, fresh=True))
            record_ran(request, client, "http" if leg == "sse" else leg)
            talks[client] = Talk(Pair(client, leg, R4, up_leg), wire, gateway)
            await talks[client].text("echo", {"text": "x"})  # for a list that could change
            await pages(talks[client])
        listening = {}
        for client, talk in talks.items():
            if talk.wire.stateless:
                asked = {"notifications": {"toolsListChanged": True}}
                listening[client] = [await talk.wire.ask("subscriptions/listen", asked) for _ in range(2)]
                for _ in range(2):
                    await talk.wire.notice("notifications/subscriptions/acknowledged")
            talk.wire.others.clear()
        expected = {client: len(listening.get(client, [1])) for client in talks}
        # Over stdio each client has a gateway of its own, with an upstream of its own.
        for dialect in gateway.rigs if leg == up_leg == "http" else (R4, R5) if up_leg != "sse" else (R1, R4):
            for changer in talks if leg == "stdio" and up_leg == "stdio" else [next(iter(talks))]:
                name = f"new_{next(_marks)}"
                told = [changer] if leg == "stdio" and up_leg == "stdio" else [*talks]
                talk = Talk(Pair(changer, leg, dialect, up_leg), talks[changer].wire, gateway)
                assert await talk.text("change", {"name": name}) == "changed"
                for client in told:
                    names: list[str] = []
                    while PREFIX[dialect] + name not in names:  # what a test before changed may be told late
                        for _ in range(expected[client]):
                            await talks[client].wire.notice(CHANGED)
                        names = [tool["name"] for page in await pages(talks[client]) for tool in page["tools"]]
        for client, talk in talks.items():
            await talk.text("echo", {"text": "after"})
            assert not talk.notices(CHANGED), f"{client} was told more than once"
            for ident in listening.get(client, []):
                await talk.wire.notify("notifications/cancelled", {"requestId": ident})


@requirement("GW-11", "GW-17")
@pytest.mark.parametrize("up_leg", LEGS)
async def test_changes_are_told_also_after_an_upstream_was_started_again(
    request: pytest.FixtureRequest, gateways: Gateways, up_leg: str
) -> None:
    behind = (await gateways.get(up_leg)).rigs
    gateway = Gateway({dialect: behind[dialect] for dialect in (R1, R4, R5) if dialect in behind})
    async with gateway.server.serving(), AsyncExitStack() as stack:
        for dialect in gateway.rigs:
            # -32022 is what only a stateless upstream can say; elsewhere it is no reason to start again.
            wire = await stack.enter_async_context(gateway.wire(R4, "memory", {}, fresh=True))
            record_ran(request, R4, "memory")
            talk = Talk(Pair(R4, "memory", dialect, up_leg), wire, gateway)
            await pages(talk)
            for how in ("die", "error") if dialect == R5 else ("die",):
                assert failure_of(await talk.call(how, {"mark": "m"} if how == "die" else {"code": -32022}))
                name = f"new_{next(_marks)}"
                assert await talk.text("change", {"name": name}) == "changed"
                names: list[str] = []
                while talk.prefix + name not in names:  # a new process may have fewer tools, which is a change too
                    await wire.notice(CHANGED)
                    names = [tool["name"] for page in await pages(talk) for tool in page["tools"]]


@requirement("GW-01")
@between(clients=[R2])
async def test_a_batch_is_taken_apart(pair: Pair, talk: Talk) -> None:
    mark = fresh_mark(pair)
    batch: list[Object] = [
        {
            "jsonrpc": "2.0",
            "id": f"{tool}-{mark}",
            "method": "tools/call",
            "params": {"name": talk.prefix + tool, **more},
        }
        for tool, more in (("echo", {"arguments": {"text": mark}}), ("fail", {}), ("numbers", {}))
    ]
    await talk.wire.send(batch)
    answers: dict[str, Object] = {}
    while len(answers) < len(batch):
        message = await talk.wire.receive()
        answers |= {each["id"]: each for each in (message if isinstance(message, list) else [message]) if "id" in each}
    assert text_of(answers[f"echo-{mark}"]) == mark
    assert failure_of(answers[f"fail-{mark}"]) == "it did not work"
    assert len(talk.rig.calls("echo", text=mark)) == 1


# Questions (TRANSLATION 8)

_FORMS: Object = {"elicitation": {}}
_PAGES: Object = {"elicitation": {"form": {}, "url": {}}}
FULL: dict[str, Object] = {
    client: {"sampling": {}, "roots": {}, **(_PAGES if since(client, R4) else _FORMS if since(client, R3) else {})}
    for client in DIALECTS
}
SAMPLE: Object = {
    "role": "assistant",
    "content": {"type": "text", "text": "Paris"},
    "model": "m",
    "stopReason": "endTurn",
}
ROOTS: Object = {"roots": [{"uri": "file:///work", "name": "work"}]}
NAMED: Object = {"action": "accept", "content": {"name": "Ada"}}


def can_answer(client: str, kind: str) -> bool:
    if kind in ("form", "twice", "choices"):
        return since(client, R3)
    return since(client, R4) if kind == "url" else True


def replies(method: str, params: Object) -> Object:
    """What a willing client answers."""
    if method == "sampling/createMessage":
        return SAMPLE
    if method == "roots/list":
        return ROOTS
    return {"action": "accept"} if params.get("mode") == "url" else NAMED


def question_for(client: str, question: Object) -> tuple[str, Object]:
    """A question of the upstream as the client has to see it."""
    params = {**question.get("params", {})}
    if question["method"] == "elicitation/create":
        params.pop("elicitationId", None)
        if not since(client, R4):
            params.pop("mode", None)
        else:
            params.setdefault("mode", "form")
    return question["method"], params


KINDS = ("form", "url", "sampling", "roots", "both", "twice")
_ASKED = [each for each in PAIRS if each.up_leg != "sse" or each.leg in ("http", "sse")]


@requirement("GW-01", "GW-10", "GW-22")
@between()
async def test_questions_of_the_upstream_are_answered_by_the_client(pair: Pair, connect: Connect) -> None:
    talk: Talk = await connect(FULL[pair.client])
    for kind in KINDS:
        rounds = questions_of(pair.upstream, kind)
        if not rounds or not can_answer(pair.client, kind):
            continue
        mark = fresh_mark(pair)
        talk.asked.clear()
        talk.states.clear()
        answer = await talk.converse("ask", {"kind": kind, "mark": mark}, replies)
        got = json.loads(text_of(answer))

        questions = [question for each in rounds for question in each.values()]
        for (method, params), expected in zip(sorted(talk.asked, key=str), sorted(questions, key=str), strict=True):
            seen = {name: value for name, value in params.items() if name != "_meta"}
            identifier = seen.pop("elicitationId", None)
            assert (method, seen) == question_for(pair.client, expected), kind
            assert bool(identifier) is (pair.client == R4 and kind == "url")
        keys = rounds[-1] if pair.upstream == R5 else {key: None for each in rounds for key in each}
        expected_answers = {
            key: replies(*question_for(pair.upstream, question))
            for each in rounds
            for key, question in each.items()
            if key in keys
        }
        assert got == expected_answers, kind

        calls = [each["message"]["params"] for each in talk.rig.calls("ask", mark=mark)]
        if pair.upstream != R5:
            assert len(calls) == 1, "an upstream that asks by request is called once, however often the client calls"
            continue
        given = [each.get("requestState") for each in calls]
        assert given == [None, *(state_of(mark, turn + 1) for turn in range(len(rounds)))]
        for state in talk.states:
            assert state not in given
            assert mark not in state


@requirement("GW-10")
@between(carried_alike=True)
async def test_a_question_that_is_declined_or_failed_is_so_upstream(pair: Pair, connect: Connect) -> None:
    if not since(pair.client, R3) or not since(pair.upstream, R3):
        talk: Talk = await connect({"roots": {}})
        if talk.wire.stateless:
            return
        answer = await talk.converse(
            "ask", {"kind": "roots", "mark": fresh_mark(pair)}, lambda method, params: {"code": -1, "message": "no"}
        )
        assert "no" in (failure_of(answer) if pair.upstream == R5 else json.dumps(answer["result"]))
        return
    talk = await connect(FULL[pair.client])
    answers: list[tuple[Object, str]] = [({"action": "decline"}, "decline"), ({"action": "cancel"}, "cancel")]
    if not talk.wire.stateless:
        answers.append(({"code": -32603, "message": "the window was closed"}, "cancel"))
    for given, expected in answers:
        answer = await talk.converse(
            "ask",
            {"kind": "form", "mark": fresh_mark(pair)},
            lambda method, params, given=given: given,  # type: ignore[misc]
        )
        assert json.loads(text_of(answer)) == {"q": {"action": expected}}


@requirement("GW-10", "GW-12")
@between(
    clients=[each for each in DIALECTS if each not in (R0, R5)],
    upstreams=[each for each in DIALECTS if each not in (R0, R5)],
)
async def test_a_call_that_is_cancelled_while_its_client_is_asked_is_cancelled_upstream(
    pair: Pair, connect: Connect
) -> None:
    talk: Talk = await connect(FULL[pair.client])
    mark = fresh_mark(pair)
    ident = await talk.start("ask", {"kind": "roots", "mark": mark})
    question = await talk.wire.notice("roots/list")
    await talk.wire.notify("notifications/cancelled", {"requestId": ident})
    await talk.rig.became("cancelled", mark)
    await talk.wire.send({"jsonrpc": "2.0", "id": question["id"], "result": ROOTS})  # too late
    assert await talk.text("echo", {"text": mark}) == mark
    assert not talk.notices("roots/list"), "what a cancelled call wanted to know is not asked again"
    assert not [each for each in talk.wire.others if each.get("id") == ident and "method" not in each]


@requirement("GW-10")
@between(clients=[R2, R3, R4, P], upstreams=[R4, R5], legs=["http"], carried_alike=True)
async def test_a_client_that_takes_only_json_is_not_left_waiting(pair: Pair, connect: Connect) -> None:
    talk: Talk = await connect(FULL[pair.client])
    assert isinstance(talk.wire, LegWire)
    talk.wire.extra = {"Accept": "application/json"}
    try:
        answers = {
            kind: await talk.converse("ask", {"kind": kind, "mark": fresh_mark(pair)}, replies)
            for kind in ("roots", "form")
        }
    finally:
        talk.wire.extra = {}
    if talk.asked:  # on another of its streams
        assert json.loads(text_of(answers["roots"])) == {"q": ROOTS}
        return
    if pair.upstream == R5 or not since(pair.client, R3):
        assert pair.upstream != R5 or failure_of(answers["roots"])
    else:
        assert "error" in json.loads(text_of(answers["roots"]))["q"]
    if since(pair.client, R3):
        said = json.loads(text_of(answers["form"]))["q"]
        assert "error" in said or said == {"action": "cancel"}
    else:
        assert failure_of(answers["form"])


_EXACT = [each for each in PAIRS if each.up_leg == "http" and each.upstream != R5 and each.leg != "stdio"]


@requirement("GW-10")
@pytest.mark.parametrize("pair", _EXACT, ids=str)
async def test_a_question_goes_to_the_caller_whose_call_asks_and_to_nobody_else(pair: Pair, connect: Connect) -> None:
    full = FULL[pair.client]
    asking: Talk = await connect({**full, "experimental": {"caller-1": {}}})
    other: Talk = await connect({**full, "experimental": {"caller-2": {}}})
    marks = [fresh_mark(pair) for _ in range(2)]
    conversation = asyncio.create_task(
        asking.converse("ask", {"kind": "roots", "mark": marks[0], "waits": True}, replies)
    )
    await asking.rig.became("started", marks[0])
    ident = await other.start("slow", {"mark": marks[1]})  # a call of the same principal, begun later
    await other.rig.became("started", marks[1])
    asking.rig.command(do="release", mark=marks[0])
    assert json.loads(text_of(await conversation)) == {"q": ROOTS}
    assert [method for method, _ in asking.asked] == ["roots/list"]
    other.rig.command(do="release", mark=marks[1])
    assert text_of(await other.wire.answer(ident)) == "released"
    assert not other.notices("roots/list")


@requirement("GW-10")
@between(clients=[R5], upstreams=[each for each in DIALECTS if each != R5], carried_alike=True)
async def test_a_question_that_was_not_answered_is_asked_again(pair: Pair, connect: Connect) -> None:
    talk: Talk = await connect(FULL[R5])
    mark = fresh_mark(pair)
    given: Object = {"name": talk.prefix + "ask", "arguments": {"kind": "both", "mark": mark}}
    asked = []
    answer = await talk.wire.request("tools/call", given)
    while (result := answer["result"])["resultType"] == "input_required":
        asked.append(sorted(each["method"] for each in result["inputRequests"].values()))
        key, question = next(iter(result["inputRequests"].items()))
        one = {"inputResponses": {key: replies(question["method"], {})}, "requestState": result["requestState"]}
        answer = await talk.wire.request("tools/call", given | one)
    assert [len(each) for each in asked] == [2, 1]
    assert json.loads(text_of(answer)) == {"r": ROOTS, "s": SAMPLE}
    assert len(talk.rig.calls("ask", mark=mark)) == 1


@requirement("GW-10")
@pytest.mark.parametrize("pair", [each for each in _REVISIONS if each.upstream == R5], ids=str)
async def test_an_upstream_that_asks_for_time_gets_it_with_its_state(pair: Pair, talk: Talk) -> None:
    mark = fresh_mark(pair)
    params: Object = {"name": talk.prefix + "later", "arguments": {"mark": mark}}
    answer = await talk.wire.request("tools/call", params)
    for _ in range(2):
        if not talk.wire.stateless:
            break
        assert "inputRequests" not in answer["result"]
        again = {"requestState": answer["result"]["requestState"]}
        answer = await talk.wire.request("tools/call", params | again)
    assert text_of(answer) == "now"
    states = [each["message"]["params"].get("requestState") for each in talk.rig.calls("later", mark=mark)]
    assert states == [None, state_of(mark, 1), state_of(mark, 2)]


@requirement("GW-10")
@pytest.mark.parametrize("pair", [each for each in _REVISIONS if each.upstream == R5 != each.client], ids=str)
async def test_an_upstream_that_never_stops_asking_is_given_up(pair: Pair, connect: Connect) -> None:
    talk: Talk = await connect(FULL[pair.client])
    mark = fresh_mark(pair)
    assert failure_of(await talk.converse("ask", {"kind": "endless", "mark": mark}, replies))
    assert len(talk.asked) == 8


@requirement("GW-04", "GW-10")
@between(upstreams=[R4, R5], carried_alike=True)
async def test_a_message_of_several_blocks_is_not_cut_for_a_client_that_takes_one(pair: Pair, connect: Connect) -> None:
    talk: Talk = await connect(FULL[pair.client])
    one: Object = {"type": "text", "text": "Capital of France?"}
    answer = await talk.converse("ask", {"kind": "single", "mark": fresh_mark(pair)}, replies)
    assert json.loads(text_of(answer)) == {"q": SAMPLE}
    [(_, params)] = talk.asked
    assert params["messages"][0]["content"] == ([one] if since(pair.client, R4) else one)
    talk.asked.clear()
    answer = await talk.converse("ask", {"kind": "parts", "mark": fresh_mark(pair)}, replies)
    if since(pair.client, R4):
        [(_, params)] = talk.asked
        assert params["messages"][0]["content"] == [one, one]
        assert json.loads(text_of(answer)) == {"q": SAMPLE}
    else:
        assert not talk.asked
        assert pair.upstream == R4 or failure_of(answer)
        assert pair.upstream == R5 or "error" in json.loads(text_of(answer))["q"]


def form_for(client: str, upstream: str) -> Object:
    """The fields of the form with choices, as the client has to see them."""
    titles = [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]
    one: Object = {"oneOf": titles} if since(client, R4) else {"enum": ["a", "b"], "enumNames": ["A", "B"]}
    fields: Object = {"yes": {"type": "boolean", "default": True}, "one": {"type": "string", **one}}
    if not since(upstream, R4):
        return fields
    if since(client, R4):
        fields["many"] = {"type": "array", "items": {"type": "string", "enum": ["x", "y", "z"]}}
        fields["size"] = {"type": "string", "default": "small"}
    else:
        fields |= {f"many__{at}": {"type": "boolean", "title": f"many: {name}"} for at, name in enumerate("xyz")}
        fields["size"] = {"type": "string"}
    return fields


@requirement("GW-04", "GW-10")
@between(clients=[R3, R4, R5, P], upstreams=[R3, R4, R5, P], carried_alike=True)
async def test_a_form_has_the_fields_that_the_client_knows(pair: Pair, connect: Connect) -> None:
    talk: Talk = await connect(FULL[pair.client])
    content: Object = {"yes": False, "one": "a"}
    many: Object = {}
    if since(pair.upstream, R4):
        many = {"many": ["x", "z"]} if since(pair.client, R4) else {"many__0": True, "many__1": False, "many__2": True}
    given: Object = {"action": "accept", "content": {**content, **many}}
    answer = await talk.converse("ask", {"kind": "choices", "mark": fresh_mark(pair)}, lambda method, params: given)
    [(_, params)] = talk.asked
    assert params["requestedSchema"]["properties"] == form_for(pair.client, pair.upstream)
    assert params["requestedSchema"]["required"] == ["one"]
    whole = {**content, **({"many": ["x", "z"]} if many else {})}
    assert json.loads(text_of(answer)) == {"q": {"action": "accept", "content": whole}}


@requirement("GW-14")
@between(carried_alike=True)
async def test_what_is_declared_upstream_is_what_this_caller_can_be_asked(pair: Pair, connect: Connect) -> None:
    talk: Talk = await connect({})
    assert json.loads(await talk.text("who", {"mark": fresh_mark(pair)})) == {}
    for kind in KINDS:
        if not questions_of(pair.upstream, kind):
            continue
        mark = fresh_mark(pair)
        answer = await talk.converse("ask", {"kind": kind, "mark": mark}, replies)
        await talk.rig.became("undeclared", mark)
        assert not talk.asked
        if pair.client == pair.upstream == R5:
            assert answer["error"]["code"] == -32021
            assert answer["error"]["data"]["requiredCapabilities"]
        else:
            assert failure_of(answer)
    full: Talk = await connect(FULL[pair.client])
    declared = json.loads(await full.text("who", {"mark": fresh_mark(pair)}))
    both = {"sampling", "roots"}
    # An older upstream is told in the words of the version that it was offered first.
    assert both <= set(declared) <= both | ({"elicitation"} if since(pair.client, R3) else set())
    if since(pair.client, R3) and since(pair.upstream, R3):
        assert set(declared["elicitation"]) <= ({"form", "url"} if since(pair.client, R4) else {"form"})
        assert ("url" in declared["elicitation"]) is (since(pair.client, R4) and pair.upstream != P)


@requirement("GW-10", "GW-22")
@between(clients=[R5], carried_alike=True)
async def test_a_state_is_good_for_this_call_only(pair: Pair, connect: Connect) -> None:
    talk: Talk = await connect(FULL[R5])
    kind = "roots"
    mark = fresh_mark(pair)
    answer = (await talk.call("ask", {"kind": kind, "mark": mark}))["result"]
    [key] = answer["inputRequests"]
    state = answer["requestState"]
    middle = len(state) // 2
    forged = f"{state[:middle]}{'A' if state[middle] != 'A' else 'B'}{state[middle + 1 :]}"
    name = talk.prefix + "ask"
    for arguments, said in (({"kind": kind, "mark": mark}, forged), ({"kind": kind, "mark": "other"}, state)):
        params = {"name": name, "arguments": arguments, "inputResponses": {key: ROOTS}, "requestState": said}
        refused = await talk.wire.request("tools/call", params)
        assert "error" in refused or refused["result"].get("isError") is True, refused
    assert not talk.rig.calls("ask", mark="other")
    params = {"name": name, "arguments": {"kind": kind, "mark": mark}}
    params |= {"inputResponses": {key: ROOTS}, "requestState": state}
    assert json.loads(text_of(await talk.wire.request("tools/call", params))) == {"q": ROOTS}


# Log messages (TRANSLATION 10)


@requirement("GW-01")
@between(carried_alike=True)
async def test_log_messages_come_at_the_level_that_was_asked_for(pair: Pair, connect: Connect) -> None:
    talk: Talk = await connect({"experimental": {"logs": {}}})
    mark, meta = fresh_mark(pair), {}
    if talk.wire.stateless:
        meta = {"logLevel": "info"}
        assert await talk.text("log", {"mark": mark}) == "logged"
        assert not talk.notices("notifications/message")
    else:
        await talk.wire.request("logging/setLevel", {"level": "info"})
    assert await talk.text("log", {"mark": mark}, **meta) == "logged"
    seen = talk.notices("notifications/message")
    expected = [{"mark": mark, "level": level} for level in ("info", "error")]
    assert [each["data"] for each in seen] == expected
    assert [each["level"] for each in seen] == ["info", "error"]
    if pair.upstream == R5:
        levels = [
            each["message"]["params"]["_meta"].get(ENVELOPE + "logLevel") for each in talk.rig.calls("log", mark=mark)
        ]
        assert levels == ([None, "info"] if talk.wire.stateless else ["info"])


# Headers and tokens (TRANSLATION 11)


@requirement("GW-05", "GW-19")
@between(upstreams=[R5])
async def test_headers_are_made_anew_for_the_name_and_the_schema_of_the_upstream(pair: Pair, talk: Talk) -> None:
    for place in ("eu-1", " Zürich ", "=?base64?x?="):
        if isinstance(talk.wire, LegWire) and talk.wire.stateless:
            if place != "eu-1":
                continue  # the rig writes no encoded headers
            talk.wire.mirrors = {talk.prefix + "region": {"place": "Region"}}
            talk.wire.extra = {"Mcp-Param-Evil": "canary", "Mcp-Param-Sum": "canary"}
        try:
            # An upstream over HTTP compares each header with the body, and refuses those it has not asked for.
            assert await talk.text("region", {"place": place}) == "I am region"
        finally:
            if isinstance(talk.wire, LegWire):
                talk.wire.mirrors, talk.wire.extra = {}, {}


@requirement("GW-05", "GW-06")
@between(clients=[R5], upstreams=[R5], legs=["http"])
async def test_a_header_that_differs_from_the_body_is_refused_here(pair: Pair, talk: Talk) -> None:
    assert isinstance(talk.wire, LegWire)
    before = len(talk.rig.calls("region"))
    for name, value in (("Mcp-Param-Region", "other"), ("Mcp-Name", "r5_echo"), ("Mcp-Method", "tools/list")):
        talk.wire.mirrors = {talk.prefix + "region": {"place": "Region"}}
        talk.wire.extra = {name: value}
        try:
            answer = await talk.call("region", {"place": "eu-1"})
        finally:
            talk.wire.mirrors, talk.wire.extra = {}, {}
        assert answer["error"]["code"] == -32020
        assert await status_of(talk) == 400
    assert (await talk.call("region", {"place": "eu-1"}))["error"]["code"] == -32020  # without the header
    assert len(talk.rig.calls("region")) == before


@requirement("GW-06")
@between(clients=[R3], legs=["http"])
async def test_headers_of_another_revision_decide_nothing(pair: Pair, talk: Talk) -> None:
    assert isinstance(talk.wire, LegWire)
    talk.wire.extra = {"Mcp-Name": "no_such_tool", "Mcp-Method": "tools/list", "Mcp-Param-Region": "x"}
    try:
        assert await talk.text("echo", {"text": "by its body"}) == "by its body"
    finally:
        talk.wire.extra = {}


SECRETS = {"Authorization": "Bearer caller-secret", "Cookie": "session=caller-secret", "X-Api-Key": "caller-secret"}


@requirement("GW-08")
@between(carried_alike=True)
async def test_nothing_that_identifies_the_caller_reaches_an_upstream(pair: Pair, connect: Connect) -> None:
    secret: Object = {"experimental": {"secret": {}}}
    talk: Talk = await connect(secret)
    mark = fresh_mark(pair)
    session = ""
    if isinstance(talk.wire, LegWire):
        talk.wire.extra = SECRETS
        await talk.wire.reopen(pair.client, secret)
        session = talk.wire.session
    try:
        assert await talk.text("echo", {"text": mark}) == mark
        await pages(talk)
        await talk.call("error", {"code": 4711})
    finally:
        if isinstance(talk.wire, LegWire):
            talk.wire.extra = {}
    [call] = talk.rig.calls("echo", text=mark)
    assert not {"origin", "cookie", "authorization", "last-event-id"} & set(call["headers"])
    for event in talk.rig.events[-200:]:  # the rest is searched at the end of all tests
        for text in strings(event):
            assert "caller-secret" not in text
            assert not session or session not in text
    for event in talk.rig.heard("initialize"):
        assert event["message"]["params"]["clientInfo"]["name"] != "rig", "to the upstream the client is the gateway"
    for event in (each for each in talk.rig.events if each["kind"] == "process"):
        assert UPSTREAMS not in event["environ"], "what the gateway was started with is its own"


@requirement("GW-05")
@between(carried_alike=True)
async def test_a_trace_goes_on_where_the_upstream_takes_any_meta(pair: Pair, talk: Talk) -> None:
    mark, trace = fresh_mark(pair), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert await talk.text("echo", {"text": mark}, traceparent=trace) == mark
    [call] = talk.rig.calls("echo", text=mark)
    passed_on = call["message"]["params"].get("_meta", {}).get("traceparent")
    if since(pair.upstream, R3):
        assert passed_on is not None
        assert passed_on.split("-")[1] == trace.split("-")[1]
    else:
        assert passed_on is None


# What is lost is counted (TRANSLATION 12)


def lost(pair: Pair, what: str) -> set[str]:
    """What cannot be carried from the upstream of a pair to its client, by the register of losses."""
    client, upstream = pair.client, pair.upstream
    has_meta = upstream in (R3, R4, R5)
    table: dict[str, dict[str, bool]] = {
        "echo": {},
        "add": {"LOSSY-08": client in (R1, R2) and upstream not in (R1, R2)},
        "numbers": {
            "LOSSY-08": client in (R1, R2) and upstream not in (R1, R2),
            "LOSSY-03": client in (R3, R4, P) and upstream in (R0, R5),
        },
        "fail": {"LOSSY-09": client == R0, "LOSSY-10": upstream == R0},
        "blocks": {
            "LOSSY-08": client in (R1, R2) and upstream == R0,
            "LOSSY-12": client == R1 and since(upstream, R2),
            "LOSSY-13": client in (R1, R2) and since(upstream, R3),
            "LOSSY-14": client in (R1, R2) and since(upstream, R3),
            "LOSSY-06": (not since(client, R3) or client == P) and has_meta,
            "LOSSY-05": client in (R3, P) and upstream in (R4, R5),
        },
        "error": {"LOSSY-22": True},
        "steps": {"LOSSY-32": client in (R0, R1) and since(upstream, R2)},
    }
    return {case for case, holds in table[what].items() if holds}


@requirement("GW-04")
@pytest.mark.parametrize("pair", [each for each in PAIRS if each.leg == each.up_leg == "http"], ids=str)
async def test_each_loss_is_counted_once_for_the_call_it_happens_in(pair: Pair, connect: Connect) -> None:
    talk: Talk = await connect({})
    upstream = talk.gateway.server.upstreams[talk.prefix.removesuffix("_")]

    counted: dict[str, dict[str, int]] = {}
    expected: dict[str, dict[str, int]] = {}

    async def count(what: str, cases: set[str], call: Callable[[], Any]) -> None:
        before = dict(upstream.lossy)
        await call()
        now = upstream.lossy.items()
        counted[what] = {case: number - before.get(case, 0) for case, number in now if number != before.get(case)}
        expected[what] = dict.fromkeys(cases, 1)

    calls: dict[str, Object] = {"echo": {"text": "x"}, "add": {"a": 1, "b": 2}, "error": {"code": -32602}}
    for what in ("echo", "add", "numbers", "fail", "blocks", "error", "steps"):
        await count(what, lost(pair, what), lambda: talk.call(what, calls.get(what), progressToken="t"))  # noqa: B023

    mark = fresh_mark(pair)
    await count("unauthorized", {"LOSSY-21"}, lambda: talk.call("error", {"code": 401}))
    if pair.upstream == R4:
        await count("visit", {"LOSSY-20"}, lambda: talk.call("visit", {"mark": mark}))
    if pair.upstream in (R4, R5) and pair.client in (R3, P):
        asking: Talk = await connect(FULL[pair.client])
        choices, given = {"kind": "choices", "mark": mark}, {"action": "accept", "content": {"one": "a"}}
        asked = asking.converse("ask", choices, lambda method, params: given)
        await count("choices", {"LOSSY-28", "LOSSY-29"}, lambda: asked)
    if pair.upstream == R0 and pair.client != R0:
        ident = await talk.start("slow", {"mark": mark})
        await talk.rig.became("started", mark)

        async def cancel() -> None:
            await talk.wire.notify("notifications/cancelled", {"requestId": ident})
            async with asyncio.timeout(PATIENCE):
                while upstream.lossy["LOSSY-33"] == before:  # a closed connection is noticed in its own time
                    await talk.text("echo", {"text": mark})

        before = upstream.lossy["LOSSY-33"]
        await count("cancel", {"LOSSY-33"}, cancel)
        talk.rig.command(do="release", mark=mark)
    assert counted == expected


# Time-outs


@requirement("GW-12", "GW-15")
async def test_a_call_that_takes_too_long_is_a_failure_here_and_cancelled_there(
    request: pytest.FixtureRequest, gateways: Gateways
) -> None:
    behind = (await gateways.get("http")).rigs
    rigs = {dialect: behind[dialect] for dialect in (R1, R4, R5)}
    gateway = Gateway(rigs, timeout=(0.2, 0.2))
    async with gateway.server.serving(), AsyncExitStack() as stack:

        async def late(client: str, upstream: str) -> None:
            wire = await stack.enter_async_context(gateway.wire(client, "memory", {}, fresh=True))
            record_ran(request, client, "memory")
            talk = Talk(Pair(client, "memory", upstream, "http"), wire, gateway)
            mark = fresh_mark(talk.pair)
            assert failure_of(await talk.call("slow", {"mark": mark}))
            await talk.rig.became("cancelled", mark)
            assert not talk.rig.has("released", mark)

        await asyncio.gather(*(late(client, upstream) for client in DIALECTS for upstream in rigs))


async def test_the_matrix_is_as_large_as_was_promised() -> None:
    """All pairs of revisions over one pair of transports, and all pairs of transports for three revisions."""
    assert {(each.client, each.upstream) for each in PAIRS if each.leg == each.up_leg == "http"} == set(
        itertools.product(DIALECTS, DIALECTS)
    )
    for client, upstream in itertools.product(THREE, THREE):
        legs = {(each.leg, each.up_leg) for each in PAIRS if (each.client, each.upstream) == (client, upstream)}
        expected = {
            (leg, up_leg) for leg, up_leg in itertools.product(LEGS, LEGS) if Pair(client, leg, upstream, up_leg).exists
        }
        assert expected <= legs
