"""The guards through the whole server: what they conceal, what they let happen, and what is on record of it."""

from __future__ import annotations

import asyncio
import json
from base64 import urlsafe_b64decode
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings, strategies as st
from msgspec import to_builtins

from handrail import Principal, Server
from handrail.audit.format import verify
from handrail.audit.log import Callback, RecordBody
from handrail.audit.reader import TrailFile
from handrail.guards.limits import Rates
from handrail.guards.policy import Policy, Rule
from handrail.guards.tool_definitions import fingerprint
from handrail.observe.metrics import MAX_LABEL_SETS, Metrics
from handrail.stores import Delete, Put, Store
from handrail.stores.memory import MemoryStore
from handrail.testing import Peer
from patience import PATIENCE
from requirements import requirement
from servers_calling import failure, said
from servers_guards import ACTS, QUICK, SECRET, guarded
from tests.server.test_asking import converse
from wires import ALL, LEGACY, Open, Wire
from wires_http import BOTH, HttpWire, send_request
from wires_shared import everywhere, open_wire as open_wire, processes as processes, wire as wire

Json = Any
Object = dict[str, Any]

R5 = "2026-07-28"
ASK = ("2025-06-18", "2025-11-25", R5, "pocket")  # revisions with questions to the user
GUARDED, REPAIRING = "servers_guards:guarded", "servers_guards:repairing"
FORM: Object = {"elicitation": {}}
TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACED = f"00-{TRACE}-b7ad6b7169203331-01"
FROM = {"memory": "memory", "stdio": "stdio", "http": "127.0.0.1"}
WHO = {"memory": "local", "stdio": "local", "http": "anonymous"}
OWN = ("where", "times_run")


class Ledger:
    """The trail of a server on the other end of a wire, as it grows."""

    _seen: ClassVar[Counter[Path]] = Counter()  # records of a trail, by whoever looked

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    async def new(self) -> list[Object]:
        """The records since the last time, without those of the tools that only tell."""
        path = Path(said(await self.wire.call("where")))  # on record itself: so is all that was before
        fresh = [json.loads(line) for _, line in islice(TrailFile(path).lines(), self._seen[path], None)]
        self._seen[path] += len(fresh)
        skipped = {each["call"] for each in fresh if each.get("tool") in OWN}
        return [each for each in fresh if "call" in each and each["call"] not in skipped]

    async def ran(self, tool: str = "") -> Json:
        """How often a tool ran; without a name, all of them."""
        counts = json.loads(said(await self.wire.call("times_run")))
        return counts.get(tool, 0) if tool else counts


@asynccontextmanager
async def unharmed(ledger: Ledger) -> AsyncIterator[list[Object]]:
    """What is recorded meanwhile, while nothing may happen."""
    before, records = await ledger.ran(), list[Object]()
    await ledger.new()
    yield records
    records += await ledger.new()
    assert await ledger.ran() == before


def is_refused(answer: Object) -> bool:
    if "error" in answer:
        return True
    result = answer["result"]
    return bool(result.get("isError")) or (type(told := result.get("toolResult")) is dict and "error" in told)


def digest(arguments: Json) -> str:
    written = json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + sha256(written.encode()).hexdigest()


def no(method: str, params: Object) -> Object:
    return {"action": "decline"}


def yes(method: str, params: Object) -> Object:
    return {"action": "accept", "content": {}}


# Refusals

REFUSED: list[tuple[str, Json, str, str]] = [
    ("no_such_tool", {"a": 1}, "unknown_tool", ""),
    ("concealed", {}, "unknown_tool", ""),
    ("scoped_and_hidden", {}, "unknown_tool", ""),
    ("scoped", {}, "forbidden", ""),
    ("pay", {"amount": 101}, "forbidden", "no large sums"),
    ("pay", {"amount": 0}, "bad_arguments", ""),
    ("pay", {"amount": "5"}, "bad_arguments", ""),
    ("pay", {"amount": 5, "more": None}, "bad_arguments", ""),
    ("pay_slowly", {}, "bad_arguments", ""),
    ("pay_now", {"amount": []}, "bad_arguments", ""),
    ("pay", 5, "bad_params", ""),
    ("narrow", {}, "throttled", ""),
    ("refused_for", {}, "forbidden", ""),
    ("in_far", {"amount": "x"}, "bad_arguments", ""),
]


@requirement("SRV-614", "SRV-602", "SRV-601", "SRV-603")
@everywhere()
async def test_every_refusal_leaves_one_record_and_no_effect(open_wire: Open) -> None:
    wire: Wire = await open_wire(GUARDED)
    ledger = Ledger(wire)
    await wire.call("narrow")  # all there is for a day
    async with unharmed(ledger) as records:
        for tool, arguments, _, _ in REFUSED:
            params = {"name": tool, "arguments": arguments}
            assert is_refused(await wire.request("tools/call", params, traceparent=TRACED)), tool
    assert len(records) == len(REFUSED)
    for (tool, arguments, outcome, rule), record in zip(REFUSED, records, strict=True):
        assert (record["event"], record["outcome"]) == ("refusal", outcome), tool
        assert (record["principal"], record["from"]) == (WHO[wire.transport], FROM[wire.transport])
        assert (record["revision"], record["tool"], record["trace"]) == (wire.revision, tool, TRACE)
        assert record["arguments_digest"] == digest(arguments) and record["arguments_bytes"] > 0
        assert record.get("rule", "") == rule and "arguments" not in record


@requirement("SRV-614", "P-19")
@everywhere()
async def test_a_call_that_waits_for_an_approval_is_recorded_and_does_nothing(open_wire: Open) -> None:
    wire: Wire = await open_wire(GUARDED)
    for tool, arguments in (("wipe", {"folder": f"/{wire.revision}"}), ("in_far_wipe", {})):
        ledger = Ledger(wire)
        async with unharmed(ledger) as records:
            answer = await wire.call(tool, arguments)
            tries = 1
            while answer.get("result", {}).get("resultType") == "input_required":
                state = answer["result"]["requestState"]
                params = {"name": tool, "arguments": arguments, "requestState": state}
                answer = await wire.request("tools/call", params)
                tries += 1
            assert "waits for a person's approval" in failure(answer)
        asked, [last] = records[:-1], records[-1:]
        assert [each["event"] for each in asked] == ["asked"] * (tries - 1)
        assert (last["event"], last["outcome"], last["rule"]) == (
            "refusal",
            "pending",
            "built in: destructive tools ask",
        )
        assert len({each["agreed"] for each in records}) == 1 and last["agreed"].startswith("approval ")
        assert last["stages_ns"]["approve"] > 0 if "approve" in last["stages_ns"] else last["seconds"] > 0


@requirement("SRV-614", "P-19")
@everywhere(*ASK)
async def test_what_a_person_says_is_recorded(open_wire: Open) -> None:
    """A no is one refusal, a yes an intent and an outcome; each question is on record too."""
    wire: Wire = await open_wire(GUARDED, capabilities=FORM)
    ledger, arguments = Ledger(wire), {"folder": f"/asked/{wire.revision}/{wire.transport}"}
    async with unharmed(ledger) as records:
        answer, asked = await converse(wire, "wipe", arguments, no)
        assert is_refused(answer) and len(asked) == 1
    told = [(each["event"], each["outcome"]) for each in records]
    assert told == [*([("asked", "input_required")] if wire.stateless else []), ("refusal", "denied")]
    before = await ledger.ran("wipe")
    answer, asked = await converse(wire, "wipe", arguments, yes)
    assert said(answer) == f"wiped {arguments['folder']} 1" and len(asked) == 1
    *asked, intent, outcome = await ledger.new()
    assert [each["event"] for each in asked] == (["asked"] if wire.stateless else [])
    assert (intent["event"], outcome["event"], outcome["outcome"]) == ("intent", "outcome", "ok")
    assert intent["call"] == outcome["call"] and intent["agreed"].startswith("approval ")
    assert await ledger.ran("wipe") == before + 1


UNFIT: list[tuple[dict[str, str], Object, str]] = [
    ({"Mcp-Name": "wipe"}, {}, "mismatch"),
    ({"Mcp-Method": "tools/list"}, {}, "mismatch"),
    ({"MCP-Protocol-Version": "2025-11-25"}, {}, "mismatch"),
    ({}, {"name": "mirrored", "arguments": {"region": "eu"}}, "mismatch"),  # without the header that repeats it
    ({}, {"version": "2099-01-01"}, "version"),
    ({"Mcp-Session-Id": "x" * 40}, {"version": ""}, "no_session"),
]


@requirement("SRV-614")
@everywhere(R5, transports=["http"])
async def test_calls_that_http_turns_away_are_recorded_too(open_wire: Open) -> None:
    wire: HttpWire = await open_wire(GUARDED)
    for headers, sent, outcome in UNFIT:
        name, version = sent.get("name", "pay"), sent.get("version", R5)
        params = wire.params({"name": name, "arguments": sent.get("arguments", {"amount": 1})})
        usual = {"Content-Type": "application/json", "Accept": BOTH}
        if version:
            params["_meta"]["io.modelcontextprotocol/protocolVersion"] = version
            usual |= {"MCP-Protocol-Version": version, "Mcp-Method": "tools/call", "Mcp-Name": name}
        else:  # as before there were envelopes
            del params["_meta"]
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        async with unharmed(Ledger(wire)) as records:
            reply = await send_request(wire.url, "POST", usual | headers, json.dumps(message).encode())
            await reply.read_head()
            reply.writer.close()
            assert 400 <= reply.status < 500, outcome
        assert [(each["event"], each["outcome"], each["tool"]) for each in records] == [("refusal", outcome, name)]


@requirement("SRV-614")
@everywhere(*LEGACY, transports=["memory", "stdio"])
async def test_a_call_in_a_revision_nobody_speaks_is_recorded(open_wire: Open) -> None:
    wire: Wire = await open_wire(GUARDED)
    ledger = Ledger(wire)
    async with unharmed(ledger) as records:
        wrong = {"io.modelcontextprotocol/protocolVersion": "2099-01-01"}
        answer = await wire.request("tools/call", {"name": "pay", "arguments": {"amount": 1}, "_meta": wrong})
        assert is_refused(answer)
    assert [(each["event"], each["outcome"]) for each in records] == [("refusal", "version")]


# What runs

STAGES = ["middleware", "limit", "validate", "approve", "intent", "run", "sanitize"]
DONE: list[tuple[str, Object, str, str]] = [
    ("pay", {"amount": 7, "note": "é\u202e"}, "ok", "default"),
    ("pay_slowly", {"amount": 7}, "ok", "default"),
    ("pay_now", {"amount": 7}, "ok", "default"),
    ("in_far", {"amount": 7}, "ok", "default"),
    ("fails", {}, "tool_error", "default"),
    ("breaks", {}, "tool_error", "default"),
]


@requirement("SRV-614", "P-15")
@everywhere()
async def test_p15_every_call_that_runs_is_an_intent_and_an_outcome(open_wire: Open) -> None:
    wire: Wire = await open_wire(GUARDED)
    ledger = Ledger(wire)
    tools = {each.name: each for each in guarded().tools}
    await ledger.new()
    before = await ledger.ran()
    for tool, arguments, outcome, _ in DONE:
        answer = await wire.call(tool, arguments, traceparent=TRACED)
        assert is_refused(answer) is (outcome != "ok")
    records, after = await ledger.new(), await ledger.ran()
    assert len(records) == 2 * len(DONE)
    for (tool, arguments, outcome, rule), begun, over in zip(DONE, records[::2], records[1::2], strict=True):
        assert (begun["event"], over["event"], over["outcome"]) == ("intent", "outcome", outcome)
        assert begun["call"] == over["call"] and after[tool] == before.get(tool, 0) + 1
        assert (begun["principal"], begun["from"]) == (WHO[wire.transport], FROM[wire.transport])
        assert (begun["client"], begun["revision"], begun["tool"]) == ("rig", wire.revision, tool)
        assert (begun["fingerprint"], begun["rule"]) == (fingerprint(tools[tool]), rule)
        assert (begun["arguments_digest"], begun["trace"]) == (digest(arguments), TRACE)
        assert over["characters"] > 0 and over["seconds"] >= sum(over["stages_ns"].values()) // 1000 / 1e6 > 0
        assert [*over["stages_ns"]] == STAGES


@requirement("SRV-614")
@everywhere()
async def test_what_middleware_answers_is_recorded_too(open_wire: Open) -> None:
    wire: Wire = await open_wire(GUARDED)
    async with unharmed(Ledger(wire)) as records:
        assert "result" in await wire.call("answered_for")
    assert [(each["event"], each["outcome"], each["tool"]) for each in records] == [("answered", "ok", "answered_for")]


@requirement("SRV-614", "P-15")
@everywhere()
async def test_p15_a_call_that_takes_too_long_has_one_outcome(open_wire: Open) -> None:
    """Also one that goes on regardless, and ends well in the end."""
    wire: Wire = await open_wire(GUARDED)
    ledger = Ledger(wire)
    for tool in ("waits", "clings"):
        await ledger.new()
        assert is_refused(await wire.call(tool))
        begun, over = [*await ledger.new(), *await ledger.new()]
        assert (begun["event"], over["event"], over["outcome"]) == ("intent", "outcome", "timeout"), tool
        assert begun["call"] == over["call"]


@requirement("SRV-614", "P-15")
@everywhere(*ALL[1:])  # the first revision knows no cancelling
async def test_p15_a_call_that_is_cancelled_has_an_outcome(open_wire: Open) -> None:
    wire: Wire = await open_wire(GUARDED)
    ledger = Ledger(wire)
    await ledger.new()
    before = await ledger.ran("hangs")
    ident = await wire.ask("tools/call", {"name": "hangs", "arguments": {}})
    async with asyncio.timeout(PATIENCE):
        while await ledger.ran("hangs") == before:
            pass
        await wire.notify("notifications/cancelled", {"requestId": ident})
        records = await ledger.new()
        while len(records) < 2:
            records += await ledger.new()
    begun, over = records
    assert (begun["event"], over["event"], over["outcome"]) == ("intent", "outcome", "cancelled")
    assert begun["call"] == over["call"]


# What leaves


@requirement("SRV-604", "P-33", "P-34")
@everywhere()
async def test_p33_p34_nothing_leaves_that_acts_or_that_nobody_is_to_know(open_wire: Open) -> None:
    wire: Wire = await open_wire(GUARDED)
    meta = {"io.modelcontextprotocol/logLevel": "debug"} if wire.stateless else {}
    for fail in (False, True):
        answer = await wire.call("dirty", {"fail": fail}, **meta)
        text = failure(answer) if fail else said(answer)
        assert ("fail " if fail else "text ") in text
        notices = [each for each in wire.others if each.get("method") == "notifications/message"]
        assert notices
        for said_of_it in (json.dumps(answer, ensure_ascii=False), json.dumps(notices, ensure_ascii=False)):
            assert SECRET not in said_of_it and not set(said_of_it) & set(ACTS.replace("[31m", "").replace("2J", ""))
            assert "\\u001b" not in said_of_it and "\\u202e" not in said_of_it


# Whoever is not to see a tool cannot tell it from none

NAMES = ["alpha", "alphas", "beta", "wipe"]
TAGS = {"alpha": "shop", "alphas": "shop", "beta": "mail", "wipe": "mail"}


class Book:
    """A trail of a user's own making: it keeps what it is given."""

    def __init__(self, store: MemoryStore) -> None:
        self.records: list[Object] = []
        self.store: Store | None = store

    async def write(self, record: RecordBody, changes: Sequence[Put | Delete] = ()) -> bool:
        assert self.store is not None
        done = await self.store.commit(changes) if changes else True
        if done:
            self.submit(record)
        return done

    def submit(self, record: RecordBody, callback: Callback | None = None) -> None:
        self.records.append(to_builtins(record))
        if callback is not None:
            callback(None)

    async def close(self) -> None: ...


class World:
    """A server with some of the tools, its policy, and what has become of both."""

    def __init__(self, rules: Sequence[Rule], names: Sequence[str] = NAMES) -> None:
        self.ran: Counter[str] = Counter()
        store = MemoryStore()
        self.book = Book(store)
        self.server = Server(
            "world", policy=Policy(rules), audit=self.book, store=store, approvals=QUICK, keys=[sha256(b"one").digest()]
        )
        for name in names:
            self._add(name)
        self.server.add(lambda: "", name="nobodys", scopes=["none"], hide=True)  # the list is nobody else's in any case

    def _add(self, name: str) -> None:
        async def tool(count: int) -> str:
            self.ran[name] += 1
            return f"{name} {count}"

        hints = {"destructiveHint": True} if name == "wipe" else {}
        scopes = ["deep"] if name == "alphas" else []
        self.server.add(tool, name=name, annotations=hints, tags=[TAGS[name]], scopes=scopes, hide=bool(scopes))


some_rules = st.lists(
    st.builds(
        lambda verdict, tools, tags, who, scopes, spoken, over: Rule(
            verdict=verdict,
            tools=tools,
            tags=tags,
            principals=who,
            without_scopes=scopes,
            revisions=spoken,
            arguments={} if verdict == "hide" or over is None else {"count": {"over": over}},
        ),
        st.sampled_from(["allow", "deny", "ask", "hide", "hide"]),
        st.lists(st.sampled_from([*NAMES, "alpha*", "*"]), max_size=2),
        st.lists(st.sampled_from(["shop", "mail"]), max_size=1),
        st.lists(st.sampled_from(["alice", "bob", "b*"]), max_size=1),
        st.lists(st.sampled_from(["deep", "other"]), max_size=1),
        st.lists(st.sampled_from(ALL), max_size=3),
        st.none() | st.integers(0, 3),
    ),
    max_size=4,
)
somebody = st.builds(Principal, st.sampled_from(["alice", "bob"]), st.frozensets(st.sampled_from(["deep", "other"])))
some_calls = st.lists(
    st.tuples(
        st.sampled_from([*NAMES, "alpho", "wip", "nothing"]),
        st.sampled_from([{"count": 1}, {"count": 3}, {}, {"x": 1}]),
    ),
    min_size=1,
    max_size=4,
)


@requirement("SRV-602", "SRV-614", "P-29", everywhere=True)
@settings(max_examples=150)
@given(some_rules, somebody, st.sampled_from(ALL), some_calls)
def test_what_is_not_listed_is_answered_as_what_does_not_exist(
    rules: list[Rule], who: Principal, revision: str, calls: list[tuple[str, Object]]
) -> None:
    """To the byte: a server that never had the hidden tools gives the same list and the same answers."""

    async def walk() -> None:
        world = World(rules)
        async with Peer(world.server, revision=revision, principal=who) as peer:
            listed = [tool.name for tool in await peer.tools()]
            bare = World(rules, listed)
            async with Peer(bare.server, revision=revision, principal=who) as other:
                await other.tools()
                assert peer.wire[-1] == other.wire[-1]
                for name, arguments in calls:
                    params = {"name": name, "arguments": arguments}
                    world.book.records.clear()
                    ran = world.ran[name]
                    answer = await peer.request("tools/call", params)
                    without = await raw(other, params)
                    records = [each for each in world.book.records if each["event"] != "approval"]
                    if name in listed:
                        assert "Unknown tool" not in json.dumps(answer)
                    else:
                        assert peer.wire[-1] == without
                        assert world.ran[name] == ran and [each["outcome"] for each in records] == ["unknown_tool"]
                    check(records, world.ran[name] - ran, answer)

    asyncio.run(walk())


async def raw(peer: Peer, params: Object) -> bytes:
    await peer.request("tools/call", params)
    return peer.wire[-1]


def check(records: list[Object], ran: int, answer: Object) -> None:
    """One record and no effect; or an intent, one effect, and an outcome."""
    events = [each["event"] for each in records]
    if ran:
        assert events == ["intent", "outcome"] and ran == 1 and not is_refused(answer)
        assert records[0]["call"] == records[1]["call"] and records[1]["outcome"] == "ok"
    elif answer.get("result", {}).get("resultType") == "input_required":
        assert events == ["asked"]
    else:
        assert events == ["refusal"] and is_refused(answer)


@requirement("SRV-602", everywhere=True)
@pytest.mark.parametrize("hidden", [0, 1, 3, 2_000])
async def test_pages_and_cursors_do_not_tell_of_hidden_tools(hidden: int) -> None:
    """Neither how full they are nor how long, nor what is in a cursor for whoever takes it apart."""
    server = Server(
        "paged", page_size=2, policy=Policy([Rule(verdict="hide", tools=["secret*"])]), keys=[sha256(b"one").digest()]
    )
    for number in range(hidden):
        server.add(lambda: "", name=f"secret{number}")
    for name in ("one", "two", "three"):
        server.add(lambda: "", name=name)
    async with Peer(server) as peer:
        first = (await peer.request("tools/list", {}))["result"]
        assert [tool["name"] for tool in first["tools"]] == ["one", "two"]
        rest = (await peer.request("tools/list", {"cursor": first["nextCursor"]}))["result"]
    assert [tool["name"] for tool in rest["tools"]] == ["three"] and not rest.get("nextCursor")
    taken_apart = urlsafe_b64decode(first["nextCursor"])
    assert len(taken_apart) == 48 and not taken_apart[16:].isascii()  # no JSON, and as long for any number


@requirement("SRV-602", everywhere=True)
async def test_a_hidden_tool_is_not_suggested() -> None:
    async with Peer(World([Rule(verdict="hide", tools=["alpha"])]).server) as peer:
        assert b"alpha" not in (await raw(peer, {"name": "alpho"})).replace(b"alpho", b"")
    async with Peer(World([]).server) as peer:
        assert b"alpha" in await raw(peer, {"name": "alpho"})


# Repair


@requirement("SRV-601", "P-06")
@everywhere()
async def test_arguments_with_one_reading_are_repaired_and_said_to_be(open_wire: Open) -> None:
    wire: Wire = await open_wire(REPAIRING)
    ledger = Ledger(wire)
    await ledger.new()
    answer = await wire.call("pay", {"amount": "7", "note": "5"})
    assert said(answer) == "paid 7"
    if "_meta" in answer["result"] or wire.revision != "2024-10-07":
        told = answer["result"]["_meta"]["io.handrail/repaired"]
        assert [(each["path"], each["sent"], each["became"]) for each in told] == [("/amount", "string", "integer")]
    intent, outcome = await ledger.new()
    assert (intent["repaired"], intent["arguments"]) == (["/amount"], {"amount": 7, "note": "5"})
    assert intent["arguments_digest"] == digest({"amount": 7, "note": "5"}) and outcome["outcome"] == "ok"
    untouched = await wire.call("pay", {"amount": 7})
    assert "io.handrail/repaired" not in json.dumps(untouched)
    plain: Wire = await open_wire(GUARDED)
    refused = json.dumps(await plain.call("pay", {"amount": "7"}))
    assert "amount" in refused and "integer" in refused


@requirement("SRV-601", "P-19")
@everywhere(*ASK)
@pytest.mark.parametrize("tool", ["asks", "wipe"])
async def test_a_repaired_call_that_asks_goes_on_with_the_answer(open_wire: Open, tool: str) -> None:
    """What a retry brings is what was sent, before it was repaired."""
    wire: Wire = await open_wire(REPAIRING, capabilities=FORM)
    sent = {"asks": {"count": "5"}, "wipe": {"folder": f"/{wire.revision}/{wire.transport}", "count": "5"}}[tool]
    answer, asked = await converse(wire, tool, sent, yes)
    assert len(asked) == 1 and said(answer).endswith(" 5")
    assert answer["result"]["_meta"]["io.handrail/repaired"]


@requirement("P-34", "SRV-614")
@everywhere(transports=["memory"])
async def test_p34_arguments_are_written_down_without_the_secrets_in_them(open_wire: Open) -> None:
    wire: Wire = await open_wire(REPAIRING)
    key = "sk-" + "a1B2c3D4" * 4
    notes = [f"it is {SECRET}", f"Authorization: Bearer {key}", f"https://me:{key}@example.org/", "nothing to hide"]
    for note in notes:
        said(await wire.call("pay", {"amount": 1, "note": note}))
    path = Path(said(await wire.call("where")))
    written = [json.loads(line) for _, line in TrailFile(path).lines()]
    kept = [each["arguments"]["note"] for each in written if each.get("tool") == "pay"]
    assert kept[-1] == notes[-1] and all("****" in each for each in kept[:-1])
    for file in path.parent.iterdir():
        data = file.read_bytes()
        assert SECRET.encode() not in data and key.encode() not in data


# What happens to those who wait


async def test_a_client_that_goes_while_it_is_asked_has_cancelled_its_call(caplog: pytest.LogCaptureFixture) -> None:
    asked = asyncio.Event()

    async def never(method: str, params: Object) -> Object:
        asked.set()
        await asyncio.Event().wait()
        return {}

    world = World([])
    async with world.server.serving():
        async with Peer(world.server, revision="2025-11-25", capabilities=FORM, answers=never) as peer:
            call = asyncio.create_task(peer.request("tools/call", {"name": "wipe", "arguments": {"count": 1}}))
            async with asyncio.timeout(PATIENCE):
                await asked.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        [record] = [each for each in world.book.records if each["event"] != "approval"]
        assert (record["event"], record["outcome"], record["tool"]) == ("refusal", "cancelled", "wipe")
    assert not world.ran and not [each for each in caplog.records if each.levelname == "ERROR"]


@requirement("P-15", everywhere=True)
async def test_p15_a_call_cancelled_while_its_intent_is_written_has_an_outcome() -> None:
    """It may be on the disk by then: whoever reads the trail is to see that it has ended."""
    writing = asyncio.Event()

    class Slow(Book):
        def submit(self, record: RecordBody, callback: Callback | None = None) -> None:
            self.records.append(to_builtins(record))
            writing.set()

    world = World([])
    book = Slow(MemoryStore())
    world.server.guard(audit=book)
    async with Peer(world.server, revision="2025-11-25") as peer:
        message = {"jsonrpc": "2.0", "id": "a", "method": "tools/call"}
        await peer.send(json.dumps({**message, "params": {"name": "alpha", "arguments": {"count": 1}}}).encode())
        await writing.wait()
        await peer.notify("notifications/cancelled", {"requestId": "a"})
        await peer.request("ping")
    begun, over = book.records
    assert (begun["event"], over["event"], over["outcome"]) == ("intent", "outcome", "cancelled")
    assert begun["call"] == over["call"] and not world.ran


@requirement("P-25")
@everywhere()
async def test_p25_a_cursor_that_was_changed_anywhere_is_refused(open_wire: Open) -> None:
    wire: Wire = await open_wire("paged")
    page = (await wire.request("tools/list"))["result"]
    cursor: str = page.get("nextCursor") or "made-up"
    for place in range(len(cursor)):
        changed = cursor[:place] + ("A" if cursor[place] != "A" else "B") + cursor[place + 1 :]
        answer = await wire.request("tools/list", {"cursor": changed})
        assert answer["error"]["code"] == -32602, place


@requirement("P-25", everywhere=True)
@pytest.mark.parametrize("revision", ALL[1:])  # the first has no pages
async def test_p25_the_cursor_of_another_is_refused_in_memory_too(revision: str) -> None:
    server = Server("paged", page_size=1)
    for name in NAMES:
        server.add(lambda: "", name=name)
    async with Peer(server, revision=revision, principal=Principal("alice")) as alice:
        cursor = (await alice.request("tools/list"))["result"]["nextCursor"]
        assert "result" in await alice.request("tools/list", {"cursor": cursor})
        async with Peer(server, revision=revision, principal=Principal("bob")) as bob:
            assert (await bob.request("tools/list", {"cursor": cursor}))["error"]["code"] == -32602


# What is counted


@requirement("SRV-614", everywhere=True)
async def test_stages_and_callers_are_counted() -> None:
    world = World([Rule(verdict="deny", tools=["beta"])])
    metrics = Metrics.of(world.server.engine)
    async with Peer(world.server, principal=Principal("alice")) as peer:
        for name, arguments in [("alpha", {"count": 1}), ("beta", {"count": 1}), ("alpha", {}), ("nothing", {})]:
            await peer.request("tools/call", {"name": name, "arguments": arguments})
    outcomes = ["ok", "forbidden", "bad_arguments", "unknown_tool"]
    assert metrics.caller_calls.values == {("alice", outcome): 1 for outcome in outcomes}
    counts = {key: sum(row[:-1]) for key, row in metrics.stages.rows.items()}
    begun = {"middleware": 2, "limit": 2, "end": 2}  # one of each tool was refused
    alpha = {**begun, "validate": 1, "approve": 1, "intent": 1, "run": 1, "sanitize": 1}
    beta = {"middleware": 1, "limit": 1, "validate": 1, "end": 1}
    expected = {("alpha", stage): count for stage, count in alpha.items()}
    assert counts == expected | {("beta", stage): count for stage, count in beta.items()}
    assert sum(metrics.caller_seconds.rows["alice",][:-1]) == 3
    stages = sum(row[-1] for row in metrics.stages.rows.values())
    assert stages == pytest.approx(metrics.caller_seconds.rows["alice",][-1])  # nothing of a call is in none of them
    lines = [line for page in metrics.snapshot().values() for line in page]
    assert any(line.startswith('handrail_caller_calls_total{caller="alice",outcome="ok"} 1') for line in lines)
    assert any(line.startswith('handrail_stage_seconds_count{tool="alpha",stage="limit"} 2') for line in lines)


@requirement("P-30", everywhere=True)
async def test_p30_callers_without_end_are_counted_as_one() -> None:
    world = World([])
    metrics = Metrics.of(world.server.engine)
    async with world.server.serving():
        for number in range(MAX_LABEL_SETS + 50):
            async with Peer(world.server, revision=R5, principal=Principal(f"caller-{number}")) as peer:
                await peer.request("tools/call", {"name": "nothing", "arguments": {}})
    assert len(metrics.caller_calls.values) == MAX_LABEL_SETS + 1
    assert metrics.caller_calls.values["", "unknown_tool"] == 50


@requirement("P-30", everywhere=True)
async def test_p30_tools_without_end_are_counted_as_one() -> None:
    server = Server("busy")
    metrics = Metrics.of(server.engine)
    async with Peer(server) as peer:
        for number in range(MAX_LABEL_SETS + 5):
            server.add(lambda: "", name=f"tool-{number}", inline=True)
            await peer.call(f"tool-{number}")
            server.remove(f"tool-{number}")
    assert len(metrics.calls.values) == len(metrics.call_seconds.rows) == MAX_LABEL_SETS + 1
    assert metrics.calls.values["", "ok"] == sum(metrics.call_seconds.rows["",][:-1]) == 5
    tools = {tool for tool, _ in metrics.stages.rows}
    assert "" in tools and len(metrics.stages.rows) < MAX_LABEL_SETS + 10


@requirement("P-30", "SRV-603", everywhere=True)
async def test_p30_calls_of_tools_there_are_not_are_limited_too() -> None:
    """Nor does a limit tell a hidden tool from none: both count as requests that are no calls."""
    world = World([Rule(verdict="hide", tools=["alpha"])])
    world.server.guard(rates=Rates(lists="3/day"))
    answers = []
    async with Peer(world.server, revision=R5, principal=Principal("alice")) as peer:
        for name in ("alpha", "nothing", "alphas", "alpha", "nothing", "alphas"):
            answer = await peer.request("tools/call", {"name": name, "arguments": {}})
            answers.append(answer["error"]["code"])
        assert not is_refused(await peer.request("tools/call", {"name": "beta", "arguments": {"count": 1}}))
    assert answers[:3] == [answers[0]] * 3 and answers[3:] == [429] * 3
    assert [each["outcome"] for each in world.book.records[:6]] == ["unknown_tool"] * 3 + ["overloaded"] * 3


@requirement("P-19", everywhere=True)
@pytest.mark.parametrize(
    ("file", "store"), [("trail.db", ""), ("trail.jsonl", ""), ("trail.jsonl", "given"), ("trail.jsonl", "path")]
)
async def test_p19_a_yes_counts_though_approvals_and_records_are_separate(
    tmp_path: Path, file: str, store: str
) -> None:
    """Also where the audit is one file, and what waits is in another."""
    places: dict[str, Object] = {"given": {"store": MemoryStore()}, "path": {"store": tmp_path / "waits.db"}}
    server, ran = Server("shop", audit=tmp_path / file, approvals=QUICK, **places.get(store, {})), list[int]()

    @server.tool(annotations={"destructiveHint": True})
    async def cancel(order: int) -> str:
        ran.append(order)
        return "cancelled"

    for _ in range(2):  # each time it is served
        async with Peer(server, capabilities=FORM, answers=yes) as peer:
            assert (await peer.call("cancel", {"order": 7})).text == "cancelled"
    assert ran == [7, 7]
    found = verify(TrailFile(tmp_path / file).lines())
    assert found.flaw is None and not found.unfinished
    told = [json.loads(line) for _, line in TrailFile(tmp_path / file).lines()]
    assert [each["event"] for each in told if "call" in each] == ["intent", "outcome"] * 2
