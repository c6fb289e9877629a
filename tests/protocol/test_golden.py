"""The bytes a server writes, one conversation for each revision, kept in `golden/`.

`HANDRAIL_WRITE_GOLDEN=1 pytest tests/protocol/test_golden.py` writes them anew; read the difference
before you commit it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from checks import check_message, strict_json
from handrail.errors import TransportError
from paths import TESTS
from patience import PATIENCE
from requirements import requirement
from wires import ALL, ENVELOPE, LEGACY, Object, Wire, everywhere, wire_to
from wires_http import OLD, HttpWire

Json = Any
Ran = Callable[[str, str], None]
Talk = Generator[tuple[Json, int], list[Object], None]

GOLDEN = TESTS / "golden"
WRITE = os.environ.get("HANDRAIL_WRITE_GOLDEN") == "1"
CLIENT = {"name": "golden", "version": "1"}
ABLE: Object = {"elicitation": {}}
NEWEST = "2026-07-28"


# The conversations. Each step is a message and how many come back; ids say what is asked: the files are to be read.


Ask = Callable[..., Object]


def asking(revision: str) -> Ask:
    def ask(ident: Json, method: str, params: Object | None = None, **meta: Json) -> Object:
        whole = dict(params or {})
        if revision == NEWEST:
            named = {"protocolVersion": revision, "clientCapabilities": ABLE, "clientInfo": CLIENT}
            meta = {ENVELOPE + name: value for name, value in named.items()} | meta
        if meta:
            whole["_meta"] = meta
        return {"jsonrpc": "2.0", "id": ident, "method": method, "params": whole}

    return ask


def resource_conversation(revision: str) -> Talk:
    """Resources, prompts and completion."""
    ask = asking(revision)

    def read(uri: Json, ident: str = "") -> Object:
        return ask(ident or f"read {uri}", "resources/read", {"uri": uri})

    def get(name: str, ident: str = "", **arguments: Json) -> Object:
        return ask(ident or f"get {name}", "prompts/get", {"name": name, "arguments": arguments})

    def complete(ident: str, kind: str, of: str, name: str, value: str) -> Object:
        ref = {"type": f"ref/{kind}", "name" if kind == "prompt" else "uri": of}
        return ask(f"complete {ident}", "completion/complete", {"ref": ref, "argument": {"name": name, "value": value}})

    yield from (_stateless_opening if revision == NEWEST else _handshake)(revision, ask)
    for method in ("resources/list", "resources/templates/list", "prompts/list"):
        [page] = yield ask(method, method), 1
        if cursor := page["result"].get("nextCursor"):
            yield ask(f"{method} 2", method, {"cursor": cursor}), 1
        yield ask(f"{method} bad cursor", method, {"cursor": "mine"}), 1
    for uri in ("doc://full", "image://dot", "data://several", "note://ada/3", "note://nobody/1", "no:such"):
        yield read(uri), 1
    yield read("note://ada/ten"), 1
    yield read("note://fails/1"), 1
    if revision != NEWEST:  # there a header is to say the same
        yield read(5, "malformed"), 1
    yield get("review", code="x = 1"), 1
    yield get("kinds"), 1
    yield get("review", "missing"), 1
    yield get("review", "extra", code="x", language="Python"), 1
    yield get("review", "not one of them", code="x", style="longer"), 1
    yield get("revue", "unknown"), 1
    yield complete("many", "prompt", "asks", "city", "city"), 1
    yield complete("choice", "prompt", "review", "style", "s"), 1
    yield complete("nothing", "resource", "note://{name}/{page}", "name", "a"), 1
    yield complete("unknown argument", "prompt", "review", "colour", ""), 1
    yield complete("unknown prompt", "prompt", "revue", "style", ""), 1
    yield ask("subscribe", "resources/subscribe", {"uri": "doc://full"}), 1
    yield ask("subscribe to nothing", "resources/subscribe", {"uri": "no:such"}), 1
    yield ask("unsubscribe", "resources/unsubscribe", {"uri": "image://dot"}), 1
    for ask_for in (read("note://asks/1", "asking read"), get("asks", "asking prompt")):
        [asked] = yield ask_for, 1
        if revision == NEWEST:
            params = ask_for["params"] | {
                "inputResponses": {"name": ADA},
                "requestState": asked["result"]["requestState"],
            }
            yield {**ask_for, "id": f"{ask_for['id']} again", "params": params}, 1
        elif "method" in asked:
            yield {"jsonrpc": "2.0", "id": asked["id"], "result": ADA}, 1
    if revision == NEWEST:
        kinds = ("toolsListChanged", "promptsListChanged", "resourcesListChanged")
        wanted: Object = {**dict.fromkeys(kinds, True), "resourceSubscriptions": ["doc://full", "no:such"]}
        yield ask("listens", "subscriptions/listen", {"notifications": wanted}), 1
    yield ask("grows", "tools/call", {"name": "grows", "arguments": {"number": 1}}), 4


ADA: Object = {"action": "accept", "content": {"name": "Ada"}}


def conversation(revision: str) -> Talk:
    ask = asking(revision)

    def call(ident: Json, tool: str, arguments: Object | None = None, **more: Json) -> Object:
        return ask(ident, "tools/call", {"name": tool, "arguments": arguments or {}, **more})

    yield from (_stateless_opening if revision == NEWEST else _handshake)(revision, ask)
    [page] = yield ask("page 1", "tools/list"), 1
    yield ask("page 2", "tools/list", {"cursor": page["result"]["nextCursor"]}), 1
    yield ask("bad cursor", "tools/list", {"cursor": "mine"}), 1
    yield from (
        (call(f"text {at}", "echo", {"text": text}), 1) for at, text in enumerate(["plain", 'a\n"b" ü 🦆 \u2028'])
    )
    yield call(0, "echo", {"text": "a number for an id"}), 1
    yield call("structured", "add", {"a": 1, "b": 2.5}), 1
    yield call("region", "regional", {"region": "eu", "free": None}), 1
    for tool in ("numbers", "null", "nothing", "picture", "sound", "link", "embedded", "annotated", "mixed", "risky"):
        yield call(tool, tool), 1
    yield call("tool error", "fails"), 1
    yield call("bad arguments", "add", {"a": "one", "bb": 2}), 1
    yield call("malformed", "add") | {"params": ask(0, "")["params"] | {"name": "add", "arguments": []}}, 1
    yield call("unknown tool", "ad"), 1
    yield ask("unknown method", "resources/list"), 1
    yield {"jsonrpc": "2.0", "id": None, "method": "ping"}, 1
    yield b'{"jsonrpc":"2.0","id":1,', 1
    yield [{"jsonrpc": "2.0", "id": f"batch {at}", "method": "ping"} for at in range(2)], 1
    yield {"jsonrpc": "2.0", "method": "notifications/no/such"}, 0
    yield ask("progress", "tools/call", {"name": "progresses"}, progressToken="token"), 3
    yield from (_retried if revision == NEWEST else _asked)(revision, call)
    yield from (_listened if revision == NEWEST else _logged)(revision, ask)


def _handshake(revision: str, ask: Ask) -> Talk:
    opening = {"protocolVersion": revision, "capabilities": ABLE, "clientInfo": CLIENT}
    yield ask("too early", "tools/list"), 1
    yield ask("unknown version", "initialize", {**opening, "protocolVersion": "1999-01-01"}), 1
    yield ask("hello", "initialize", opening), 1
    yield {"jsonrpc": "2.0", "method": "notifications/initialized"}, 0
    yield ask("ping", "ping"), 1


def _stateless_opening(revision: str, ask: Ask) -> Talk:
    yield ask("discover", "server/discover"), 1
    yield ask("other version", "server/discover", **{ENVELOPE + "protocolVersion": "2099-01-01"}), 1
    yield {"jsonrpc": "2.0", "id": "no envelope", "method": "tools/list"}, 1
    yield ask("ping", "ping"), 1


def _asked(revision: str, call: Ask) -> Talk:
    if revision in ("2024-10-07", "2024-11-05", "2025-03-26"):  # no forms yet
        yield call("asks", "asks"), 1
        return
    [question] = yield call("asks", "asks"), 1
    yield {"jsonrpc": "2.0", "id": question["id"], "result": {"action": "accept", "content": {"name": "Ada"}}}, 1


def _retried(revision: str, call: Ask) -> Talk:
    [needed] = yield call("asks", "asks"), 1
    answers = {key: {"action": "accept", "content": {"name": "Ada"}} for key in needed["result"]["inputRequests"]}
    state = needed["result"]["requestState"]
    yield call("asks again", "asks", inputResponses=answers, requestState=state), 1
    yield call("asks with a state not ours", "asks", inputResponses=answers, requestState=state[:-1]), 1
    unable = call("asks in vain", "asks")
    unable["params"]["_meta"][ENVELOPE + "clientCapabilities"] = {}
    yield unable, 1


def _logged(revision: str, ask: Ask) -> Talk:
    yield ask("logs from info on", "tools/call", {"name": "logs"}), 2
    yield ask("level", "logging/setLevel", {"level": "debug"}), 1
    yield ask("logs from debug on", "tools/call", {"name": "logs"}), 3
    yield ask("no such level", "logging/setLevel", {"level": "loud"}), 1
    yield ask("grows", "tools/call", {"name": "grows"}), 2


def _listened(revision: str, ask: Ask) -> Talk:
    yield ask("logs unasked", "tools/call", {"name": "logs"}), 1
    yield ask("logs", "tools/call", {"name": "logs"}, **{ENVELOPE + "logLevel": "debug"}), 3
    yield (
        ask(
            "listens", "subscriptions/listen", {"notifications": {"toolsListChanged": True, "promptsListChanged": True}}
        ),
        1,
    )
    yield ask("grows", "tools/call", {"name": "grows"}), 2


async def _held(wire: Wire, talk: Talk) -> tuple[list[bytes], dict[Json, str]]:
    """Every line the server wrote in its conversation, and which method each id asked for."""
    lines: list[bytes] = []
    asked: dict[Json, str] = {}
    message, count = next(talk)
    while True:
        if isinstance(message, dict) and "method" in message:
            asked[message.get("id")] = message["method"]
        await wire.send(message)
        async with asyncio.timeout(PATIENCE):
            step = [await wire.read() for _ in range(count)]
        if isinstance(message, dict) and message.get("id") == "grows":  # over HTTP the notice has its own stream
            step.sort(key=lambda line: b'"method"' in line)
        lines += step
        try:
            message, count = talk.send([json.loads(line) for line in lines[len(lines) - count :]])
        except StopIteration:
            break
    await wire.finish()
    try:
        while True:  # a message nobody expected stands here
            lines.append(await wire.read())
    except (EOFError, TransportError):
        return lines, asked


@requirement("SRV-101", "SRV-104", "SRV-120", "SRV-301")
@everywhere()
async def test_a_conversation_is_answered_with_the_very_bytes_on_record(
    revision: str, transport: str, ran: Ran
) -> None:
    await _compare(
        revision, transport, "servers_lifecycle:golden", conversation(revision), GOLDEN / f"{revision}.jsonl"
    )
    ran(revision, transport)


@requirement("SRV-702", "SRV-704", "SRV-707", "SRV-721", "SRV-722", "SRV-723", "SRV-732", "SRV-733")
@everywhere()
async def test_a_conversation_about_resources_and_prompts_is_answered_with_the_bytes_on_record(
    revision: str, transport: str, ran: Ran
) -> None:
    await _compare(
        revision,
        transport,
        "servers_resources:golden",
        resource_conversation(revision),
        GOLDEN / f"resources-{revision}.jsonl",
    )
    ran(revision, transport)


async def _compare(revision: str, transport: str, server: str, talk: Talk, path: Path) -> None:
    async with wire_to(revision, transport, server) as wire:
        if isinstance(wire, HttpWire):
            wire.mirrors = {"regional": {"region": "Region"}}
        lines, asked = await _held(wire, talk)
    for line in lines:
        _check(line, revision, asked)
    recorded = _record(path, lines, write=WRITE and transport == "memory")
    if transport == "http":
        lines, recorded = _without_words(lines), _without_words(_over_http(recorded, revision))
    for at, (line, record) in enumerate(zip(lines, recorded, strict=False)):
        assert line == record, f"{path.name} line {at + 1}"
    assert len(lines) == len(recorded)


def _record(path: Path, lines: list[bytes], *, write: bool) -> list[bytes]:
    if write:
        path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path.read_bytes().splitlines()


def _over_http(recorded: list[bytes], revision: str) -> list[bytes]:
    """What is otherwise over HTTP: whose client speaks is told by the session or a header, before anything else."""
    if revision in OLD:
        return recorded
    if revision == NEWEST:
        recorded = recorded[:-1]  # the end of the stream says what is said on a pipe by a notification (PD-8)
    early = {b'"too early"': b"-32600", b'"no envelope"': b"-32602"}
    out = []
    for line in recorded:
        ident = line.removeprefix(b'{"jsonrpc":"2.0","id":').partition(b",")[0]
        # What cannot be read belongs to no session, and so to no revision (REVISIONS 6, rows 8 and 10).
        if ident == b"null" and b"batches" not in line:
            line = line.replace(b'"id":null,', b"")
        if ident in early:
            line = b'{"jsonrpc":"2.0","id":%b,"error":{"code":%b,"message":""}}' % (ident, early[ident])
        out.append(line)
    return out


def _without_words(lines: list[bytes]) -> list[bytes]:
    """What is sealed is for its holder, who has another name over HTTP; what is told early has other words there.

    Questions do not begin with 1 there: another process may ask in the same session.
    """
    lines = [re.sub(rb'("id":)\d+(,"method":)', rb"\g<1>1\2", line) for line in lines]
    sealed = [re.sub(rb'"(nextCursor|requestState)":"[^"]+"', rb'"\1":""', line) for line in lines]
    early = re.compile(rb'\{"jsonrpc":"2.0",("id":("too early"|"no envelope"|null),)?"error"')
    return [re.sub(rb'"message":".*"', b'"message":""', line) if early.match(line) else line for line in sealed]


def _check(line: bytes, revision: str, asked: dict[Json, str]) -> None:
    message = strict_json(line)
    for each in message if isinstance(message, list) else [message]:
        agreed = "2025-11-25" if each.get("id") == "unknown version" else revision
        check_message(each, agreed, asked.get(each.get("id")) if "method" not in each else None)


def _recorded(revision: str, ident: str, of: str = "") -> Object:
    for line in (GOLDEN / f"{of}{revision}.jsonl").read_bytes().splitlines():
        message: Json = json.loads(line)
        if isinstance(message, dict) and message.get("id") == ident and "method" not in message:
            return message
    raise AssertionError(f"{revision}: no answer to {ident!r}")


# The check itself. A member that is too new passes the official schemas, which are open; it must not pass ours.

OPENING = "initialize"
LIST = "tools/list"
CALL = "tools/call"
BEFORE_2025_06 = ("2024-11-05", "2025-03-26")
BEFORE_2025_11 = (*BEFORE_2025_06, "2025-06-18", "pocket")
CONTENT = (*BEFORE_2025_11, "2025-11-25", NEWEST)

Change = Callable[[Object], None]


def _tool(**members: Json) -> Change:
    return lambda result: result["tools"][0].update(members)


def _block(**members: Json) -> Change:
    return lambda result: result["content"][0].update(members)


def _whole(**members: Json) -> Change:
    return lambda result: result.update(members)


_TOO_NEW: list[tuple[str, tuple[str, ...], str, str, Change]] = [
    ("resultType in an opening", LEGACY, "hello", OPENING, _whole(resultType="complete")),
    ("instructions", ("2024-10-07",), "hello", OPENING, _whole(instructions="x")),
    (
        "serverInfo.title",
        ("2024-10-07", *BEFORE_2025_06),
        "hello",
        OPENING,
        lambda it: it["serverInfo"].update(title="x"),
    ),
    (
        "serverInfo.icons",
        ("2024-10-07", *BEFORE_2025_11),
        "hello",
        OPENING,
        lambda it: it["serverInfo"].update(icons=[]),
    ),
    ("ttlMs in a list", LEGACY, "page 1", LIST, _whole(ttlMs=0)),
    ("cacheScope in a list", LEGACY, "page 1", LIST, _whole(cacheScope="public")),
    ("tool annotations", ("2024-10-07", "2024-11-05"), "page 1", LIST, _tool(annotations={})),
    ("tool title", ("2024-10-07", *BEFORE_2025_06, "pocket"), "page 1", LIST, _tool(title="x")),
    ("tool _meta", ("2024-10-07", *BEFORE_2025_06, "pocket"), "page 1", LIST, _tool(_meta={})),
    ("tool outputSchema", ("2024-10-07", *BEFORE_2025_06), "page 1", LIST, _tool(outputSchema={"type": "object"})),
    ("tool icons", ("2024-10-07", *BEFORE_2025_11), "page 1", LIST, _tool(icons=[])),
    ("tool execution", ALL, "page 1", LIST, _tool(execution={})),
    ("content beside toolResult", ("2024-10-07",), "text 0", CALL, _whole(content=[])),
    ("isError beside toolResult", ("2024-10-07",), "text 0", CALL, _whole(isError=False)),
    ("toolResult beside content", CONTENT, "text 0", CALL, _whole(toolResult="x")),
    ("structuredContent", ("2024-10-07", *BEFORE_2025_06), "text 0", CALL, _whole(structuredContent={})),
    ("resultType in a result", LEGACY, "text 0", CALL, _whole(resultType="complete")),
    ("block _meta", (*BEFORE_2025_06, "pocket"), "text 0", CALL, _block(_meta={})),
    (
        "block lastModified",
        BEFORE_2025_06,
        "text 0",
        CALL,
        _block(annotations={"lastModified": "2025-01-01T00:00:00Z"}),
    ),
    (
        "audio",
        ("2024-11-05",),
        "text 0",
        CALL,
        lambda it: it["content"].append({"type": "audio", "data": "", "mimeType": "audio/wav"}),
    ),
    (
        "resource_link",
        BEFORE_2025_06,
        "text 0",
        CALL,
        lambda it: it["content"].append({"type": "resource_link", "uri": "a:b", "name": "b"}),
    ),
    (
        "title inside a resource",
        BEFORE_2025_06,
        "embedded",
        CALL,
        lambda it: it["content"][0]["resource"].update(title="x"),
    ),
    ("no resultType", (NEWEST,), "text 0", CALL, lambda it: it.pop("resultType")),
    ("no ttlMs", (NEWEST,), "page 1", LIST, lambda it: it.pop("ttlMs")),
    ("no end of pages", ("pocket",), "page 2", LIST, lambda it: it.pop("nextCursor")),
    ("no isError", ("pocket",), "text 0", CALL, lambda it: it.pop("isError")),
    ("a null", CONTENT, "text 0", CALL, _whole(_meta={"x": None})),
]


@pytest.mark.parametrize(
    ("revision", "ident", "method", "change"),
    [
        pytest.param(revision, ident, method, change, id=f"{what}-{revision}")
        for what, revisions, ident, method, change in _TOO_NEW
        for revision in revisions
    ],
)
def test_the_check_sees_a_member_that_does_not_belong_to_the_revision(
    revision: str, ident: str, method: str, change: Change
) -> None:
    message = _recorded(revision, ident)
    check_message(message, revision, method)
    changed = copy.deepcopy(message)
    change(changed["result"])
    with pytest.raises((AssertionError, KeyError)):
        check_message(changed, revision, method)


BEFORE_TITLES = ("2024-10-07", *BEFORE_2025_06, "pocket")
BEFORE_ICONS = ("2024-10-07", *BEFORE_2025_11)
LISTED = ("resources/list", "resources/templates/list", "prompts/list")
ANSWERED = {
    "hello": OPENING,
    "read doc://full": "resources/read",
    "get review": "prompts/get",
    "complete many": "completion/complete",
    "subscribe": "resources/subscribe",
    **{method: method for method in LISTED},
}


def _first(**members: Json) -> Change:
    """Change the first entry, content, or block of the first message."""

    def change(result: Object) -> None:
        if "messages" in result:
            result["messages"][0]["content"].update(members)
        else:
            next(value for value in result.values() if isinstance(value, list))[0].update(members)

    return change


def _message(**members: Json) -> Change:
    return lambda result: result["messages"][0].update(members)


def _capability(name: str, **members: Json) -> Change:
    return lambda result: result["capabilities"].setdefault(name, {}).update(members)


AUDIO = {"type": "audio", "data": "", "mimeType": "audio/wav"}
LINK = {"type": "resource_link", "uri": "a:b", "name": "b"}
_TOO_NEW_BESIDE_TOOLS: list[tuple[str, tuple[str, ...], tuple[str, ...], Change]] = [
    ("title", BEFORE_TITLES, LISTED, _first(title="x")),
    ("_meta", BEFORE_TITLES, LISTED, _first(_meta={})),
    ("icons", BEFORE_ICONS, LISTED, _first(icons=[])),
    ("ttlMs", LEGACY, LISTED, _whole(ttlMs=0)),
    ("cacheScope", LEGACY, LISTED, _whole(cacheScope="public")),
    ("resultType", LEGACY, LISTED, _whole(resultType="complete")),
    ("no ttlMs", (NEWEST,), (*LISTED, "read doc://full"), lambda it: it.pop("ttlMs")),
    ("no resultType", (NEWEST,), (*LISTED, "get review", "complete many"), lambda it: it.pop("resultType")),
    ("no end of pages", ("pocket",), LISTED, lambda it: it.pop("nextCursor")),
    ("a null", ALL, LISTED, _first(description=None)),
    ("annotations", ("2024-10-07",), LISTED[:2], _first(annotations={})),
    ("annotations of a prompt", ALL, LISTED[2:], _first(annotations={})),
    ("lastModified", BEFORE_2025_06, LISTED[:2], _first(annotations={"lastModified": "2025-01-01T00:00:00Z"})),
    ("size", ("2024-10-07",), LISTED[:1], _first(size=1)),
    ("size of a template", ALL, LISTED[1:2], _first(size=1)),
    ("title of an argument", BEFORE_TITLES, LISTED[2:], lambda it: it["prompts"][0]["arguments"][0].update(title="x")),
    ("_meta of contents", BEFORE_TITLES, ("read doc://full",), _first(_meta={})),
    ("title of contents", ALL, ("read doc://full",), _first(title="x")),
    ("annotations of contents", ALL, ("read doc://full",), _first(annotations={})),
    ("text and blob", ALL, ("read doc://full",), _first(blob="")),
    ("ttlMs of contents", LEGACY, ("read doc://full",), _whole(ttlMs=0)),
    ("resultType of contents", LEGACY, ("read doc://full",), _whole(resultType="complete")),
    ("_meta of a block", BEFORE_TITLES, ("get review",), _first(_meta={})),
    ("annotations of a block", ("2024-10-07",), ("get review",), _first(annotations={})),
    ("name of a message", ALL, ("get review",), _message(name="x")),
    ("audio", ("2024-10-07", "2024-11-05"), ("get review",), _message(content=AUDIO)),
    ("resource_link", ("2024-10-07", *BEFORE_2025_06), ("get review",), _message(content=LINK)),
    ("structuredContent", ALL, ("get review",), _whole(structuredContent={})),
    ("isError", ALL, ("get review",), _whole(isError=False)),
    ("ttlMs of what is not cached", ALL, ("get review", "complete many"), _whole(ttlMs=0)),
    ("resultType of what is got", LEGACY, ("get review", "complete many"), _whole(resultType="complete")),
    ("101 values", ALL, ("complete many",), lambda it: it["completion"]["values"].append("x")),
    ("a total that is not", ALL, ("complete many",), lambda it: it["completion"].update(total=100)),
    ("a member of a completion", ALL, ("complete many",), lambda it: it["completion"].update(x=1)),
    ("completions", ("2024-10-07", "2024-11-05"), ("hello",), _capability("completions")),
    ("templates", LEGACY, ("hello",), _capability("resources", templates=True)),
    ("subscribe of prompts", LEGACY, ("hello",), _capability("prompts", subscribe=True)),
    ("resultType of a subscription", LEGACY, ("subscribe",), _whole(resultType="complete")),
]


@pytest.mark.parametrize(
    ("revision", "ident", "change"),
    [
        pytest.param(revision, ident, change, id=f"{what}-{ident}-{revision}")
        for what, revisions, idents, change in _TOO_NEW_BESIDE_TOOLS
        for revision in revisions
        for ident in idents
    ],
)
def test_the_check_sees_what_does_not_belong_to_the_revision_in_resources_and_prompts(
    revision: str, ident: str, change: Change
) -> None:
    message, method = _recorded(revision, ident, of="resources-"), ANSWERED[ident]
    check_message(message, revision, method)
    changed = copy.deepcopy(message)
    change(changed["result"])
    with pytest.raises((AssertionError, KeyError)):
        check_message(changed, revision, method)


@pytest.mark.parametrize("revision", ALL)
def test_the_check_takes_no_revision_for_another_that_differs(revision: str) -> None:
    """Each revision's own answers, held against the lists of all others."""
    accepted = {
        other
        for other in ALL
        if all(
            _passes(_recorded(revision, ident), other, method)
            for ident, method in [("page 1", LIST), ("sound", CALL), ("annotated", CALL)]
        )
    }
    wider = {
        "2024-10-07": {"2024-10-07"},
        "2024-11-05": {"2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"},
        "2025-03-26": {"2025-03-26", "2025-06-18", "2025-11-25"},
        "2025-06-18": {"2025-06-18", "2025-11-25"},
        "2025-11-25": {"2025-11-25"},
        "pocket": {"pocket", "2025-06-18", "2025-11-25"},
        NEWEST: {NEWEST},
    }
    assert accepted == wider[revision]


def _passes(message: Object, revision: str, method: str) -> bool:
    try:
        check_message(message, revision, method)
    except (AssertionError, KeyError):
        return False
    return True
