"""Whatever a client sends, it gets the answer the rules prescribe, and its next call is answered."""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from checks import check_message, strict_json
from malformed import CASES, ECHO, LIMIT, MAYBE, NONE, TOO_LONG, Case, Expect, Json, line_of
from patience import PATIENCE
from requirements import requirement
from tests.fuzz.decoder import mutations
from wires import (
    ALL,
    ENVELOPE,
    LEGACY,
    PIPES,
    Object,
    Open,
    Wire,
    everywhere,
    open_wire as open_wire,
    wire_to,
)
from wires_http import NAMED, OLD, VERSION, HttpWire, Refusal, envelope_of

A_SECOND = 1.0  # of the server's processor, at most: the machine may be busy with something else
FIRST = 10_000  # the id of the first case

R5 = "2026-07-28"
NULL_ID = ("2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", "pocket")


def test_the_table_is_large_enough_and_has_no_name_twice() -> None:
    names = collections.Counter(case.name for case in CASES)
    assert len(CASES) >= 120
    assert [name for name, count in names.items() if count > 1] == []
    lines = collections.Counter(line_of(case, ALL[0], 1) for case in CASES)
    assert [line[:100] for line, count in lines.items() if count > 1] == []


@everywhere()
@requirement("P-01", "P-02", "P-03", "P-04", "SRV-121", "SRV-122", "SRV-123")
async def test_each_message_gets_its_answer_and_the_next_call_too(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_lifecycle:unlimited")
    wrong: list[str] = []
    for at, case in enumerate(CASES):
        if flaw := await _flaw(wire, case, at):
            wrong.append(f"{case.name}: {flaw}")
        if "nothing after" in flaw:
            break  # deaf
    assert not wrong, f"{len(wrong)} of {len(CASES)}:\n" + "\n".join(wrong)


@everywhere(transports=PIPES)  # over HTTP each has its own connection: there is no order to keep
@requirement("P-01")
async def test_all_messages_at_once_are_answered_in_order(open_wire: Open) -> None:
    wire: Wire = await open_wire()
    lines = [(case, FIRST + at, line_of(case, wire.revision, FIRST + at)) for at, case in enumerate(CASES)]
    small = [(case, ident, line) for case, ident, line in lines if len(line) < 20_000]
    assert len(small) > 300

    async def write() -> None:
        for part in range(0, len(small), 40):
            await wire.write(b"\n".join(line for _, _, line in small[part : part + 40]))
        await wire.ask("tools/call", {"name": "echo", "arguments": {"text": "the end"}})

    writing = asyncio.create_task(write())
    for case, ident, _ in small:
        expect = case.expected(wire.revision)
        if expect.kind != "silent":
            count = len(expect.items) if expect.kind == "several" else 1
            got = [await wire.receive() for _ in range(count)]
            flaw = _judge(got, expect, ident, wire)
            assert not flaw, f"{case.name}: {flaw}"
    await writing
    assert "the end" in str(await wire.receive())


# Stateless requests over HTTP are each a world of their own: no id can be in use.
@pytest.mark.parametrize(
    ("revision", "transport"), [*itertools.product(ALL, PIPES), *itertools.product(LEGACY, ["http"])]
)
@requirement("P-04", "P-08")
async def test_an_id_in_flight_is_refused_and_one_of_another_type_is_another(open_wire: Open, tmp_path: Path) -> None:
    wire: Wire = await open_wire()
    gate = tmp_path / "go"
    params = wire.params({"name": "when", "arguments": {"path": str(gate), "text": "first"}})
    other = wire.params({"name": "when", "arguments": {"path": str(gate), "text": "second"}})
    await wire.send({"jsonrpc": "2.0", "id": 1_000_001, "method": "tools/call", "params": params})
    await wire.send({"jsonrpc": "2.0", "id": "1000001", "method": "tools/call", "params": other})
    await wire.send({"jsonrpc": "2.0", "id": 1_000_001, "method": "tools/call", "params": other})
    refused = await wire.receive()
    assert refused["id"] == 1_000_001
    assert refused["error"]["code"] == -32600
    gate.touch()
    got = {(type(each["id"]), each["id"]): str(each) for each in [await wire.receive(), await wire.receive()]}
    assert "first" in got[int, 1_000_001]
    assert "second" in got[str, "1000001"]
    assert await wire.silent()


@everywhere()
@requirement("SRV-122", "P-04")
async def test_nothing_runs_for_a_call_that_cannot_be_answered(open_wire: Open) -> None:
    """Not for one without id, not for one whose id is no id, not for one whose text is doubtful."""
    wire: Wire = await open_wire()
    params = json.dumps(wire.params({"name": "add", "arguments": {"a": 1, "b": 2}})).encode()
    before = await wire.call("times_run", {"name": "add"})
    for head in (
        b"",
        b'"id":null,',
        b'"id":true,',
        b'"id":1.5,',
        b'"id":[1],',
        b'"id":"\\ud800",',
        b'"id":"\xff",',
        b'"id":777,"id":777,',
        b'"id":777,"method":"ping",',
        b'"id":777,"x":NaN,',
        b'"id":777,"result":{},',
    ):
        await wire.send(b'{"jsonrpc":"2.0",' + head + b'"method":"tools/call","params":' + params + b"}")
    await wire.settle()
    after = await wire.call("times_run", {"name": "add"})
    assert after["result"] == before["result"]
    await wire.call("add", {"a": 1, "b": 2})
    assert (await wire.call("times_run", {"name": "add"}))["result"] != before["result"]


@pytest.mark.parametrize("revision", ALL)
@requirement("P-01", "P-02")
async def test_mutated_messages_leave_the_server_answering(revision: str, ran: Callable[[str, str], None]) -> None:
    """Whole conversations, not only the decoder: nothing raises, nothing hangs, all that comes back is strict."""
    pool = [line_of(case, revision, 5) for case in CASES if len(case.line) < 500 and not case.size]
    messages = mutations(random.Random(revision), [line for line in pool if line])
    async with wire_to(revision, "memory") as wire:
        await wire.open()
        for at in range(4_000):
            await wire.write(next(messages))
            if at % 50 == 49:
                probe = f"probe {at}"
                await wire.write(_probe(revision, probe))
                async with asyncio.timeout(PATIENCE):
                    while b"still here" not in (answer := await wire.read()) or probe.encode() not in answer:
                        strict_json(answer)
        ran(revision, "memory")


def _probe(revision: str, ident: str) -> bytes:
    params = b'{@META@,"name":"echo","arguments":{"text":"still here"}}'
    line = b'{"jsonrpc":"2.0","id":"%b","method":"tools/call","params":%b}' % (ident.encode(), params)
    return line_of(Case("", line, Expect("result")), revision, 0)


async def _flaw(wire: Wire, case: Case, at: int) -> str:
    """Send one case and a good call after it; what was wrong with what came back."""
    ident = FIRST + at
    line = line_of(case, wire.revision, ident)
    mark = f"still here {at}"
    began = wire.cpu
    got: list[Json] = []
    statuses: list[int] = []
    try:
        async with asyncio.timeout(PATIENCE):
            await wire.write(line)
            await wire.settle()
            probe = await wire.ask("tools/call", {"name": "echo", "arguments": {"text": mark}})
            while True:
                try:
                    message = await wire.receive()
                except Refusal as refusal:
                    got.append(refusal)
                    continue
                if isinstance(message, dict) and message.get("id") == probe:
                    break
                got.append(message)
                statuses += [wire.status] if isinstance(wire, HttpWire) else []
    except (TimeoutError, EOFError) as problem:
        return f"nothing after it was answered: {problem!r}"
    except AssertionError as problem:
        return f"an answer that is not allowed: {str(problem)[:300]}"
    if mark not in str(message):
        return f"the call after it got {str(message)[:200]}"
    took = wire.cpu - began
    expect = _over_http(case, line, wire.revision) if isinstance(wire, HttpWire) else case.expected(wire.revision)
    flaw = _judge(got, expect, ident, wire) or (f"slow: {took:.2f} s" if took > A_SECOND else "")
    if isinstance(wire, HttpWire) and not flaw:
        wanted = [_statuses(each, line, wire.revision) for each in got if not isinstance(each, Refusal)]
        if expect.kind == "silent":
            statuses, wanted = wire.statuses[-2:-1], [{202}]
        if not all(map(set.__contains__, wanted, statuses)):
            flaw = f"HTTP {statuses} for {str(got)[:200]}, not {wanted}"
    return flaw


def _over_http(case: Case, line: bytes, revision: str) -> Expect:
    """What a case is answered with where a body is a message, and headers repeat some of it (REVISIONS 6)."""
    expect = case.http or case.expected(revision)
    if len(line) > LIMIT:
        return TOO_LONG
    message = _lenient(line)
    is_piped = revision in OLD and envelope_of(message) is None
    if is_piped or not isinstance(message, dict) or {-32700, -32600} & set(expect.codes):
        return expect
    if "method" not in message:
        # Answers are of no use without a session.
        return expect if revision != R5 else Expect("error", (-32600, -32602), NONE)
    envelope = envelope_of(message)
    if envelope is None:
        is_lacking = revision == R5 and "id" in message and message["method"] != "initialize"
        return Expect("error", (-32602,), ECHO) if is_lacking else expect
    version = envelope[VERSION]
    if not isinstance(version, str):
        return Expect("error", (-32020,), ECHO)
    if version != version.strip():
        return Expect("error", (-32020, -32022), ECHO)
    if version == R5 and _has_envelope(message):
        method, name = message["method"], message["params"].get("name")
        if max(len(method), len(str(name))) > 30_000:
            return Expect("refused", (431,))
        if not method.isascii() or not method.isprintable() or method != method.strip():
            return Expect("error", (-32020, -32601), ECHO)
        if method in NAMED and not isinstance(message["params"].get(NAMED[method]), str):
            return Expect("error", (-32020,), ECHO)
    return expect


def _lenient(line: bytes) -> Json:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _has_envelope(message: Object) -> bool:
    params = message.get("params")
    meta = params.get("_meta") if isinstance(params, dict) else None
    if not isinstance(meta, dict):
        return False
    client = meta.get(ENVELOPE + "clientInfo", {"name": "", "version": ""})
    return (
        isinstance(meta.get(ENVELOPE + "clientCapabilities"), dict)
        and isinstance(client, dict)
        and {"name", "version"} <= set(client)
        and isinstance(meta.get(ENVELOPE + "protocolVersion"), str)
    )


def _statuses(answer: Json, line: bytes, revision: str) -> set[int]:
    """The statuses an answer may come with: one, as a rule."""
    code = answer["error"]["code"] if isinstance(answer, dict) and "error" in answer else 0
    message = _lenient(line)
    if not code or (revision in OLD and envelope_of(message) is None):
        return {200}
    if code not in (-32601, -32602) or "method" not in message:
        return {400}
    is_modern = envelope_of(message) is not None or (revision == R5 and message["method"] != "initialize")
    if code == -32601:
        return {404} if is_modern else {200}
    if is_modern and not _has_envelope(message):
        return {400}
    # Not among what every request has to say, but in the midst of it.
    is_beside = is_modern and {"progressToken", ENVELOPE + "logLevel"} & set(message["params"]["_meta"])
    return {200, 400} if is_beside else {200}


def _judge(got: list[Json], expect: Expect, ident: Json, wire: Wire) -> str:
    """What is wrong with an answer; empty if nothing."""
    if expect.kind == "silent":
        return f"expected silence, got {str(got)[:300]}" if got else ""
    wanted = expect.items if expect.kind == "several" else (expect,)
    if len(got) != len(wanted):
        return f"expected {len(wanted)} answers, got {len(got)}: {str(got)[:300]}"
    return "; ".join(filter(None, map(lambda g, w: _judge_one(g, w, ident, wire), got, wanted)))


def _judge_one(got: Json, expect: Expect, ident: Json, wire: Wire) -> str:
    if isinstance(got, Refusal) or expect.kind == "refused":
        is_right = isinstance(got, Refusal) and got.status in expect.codes
        return "" if is_right else f"expected {expect.kind} {expect.codes}, got {str(got)[:300]}"
    if expect.kind == "batch":
        if not isinstance(got, list) or len(got) != len(expect.items):
            return f"expected a batch of {len(expect.items)}, got {str(got)[:300]}"
        found = [_judge_one(each, wanted, ident, wire) for each, wanted in zip(got, expect.items, strict=True)]
        return "; ".join(filter(None, found))
    if not isinstance(got, dict):
        return f"not a message: {str(got)[:300]}"
    kind = "error" if "error" in got else "failed" if _is_failure(got["result"]) else "result"
    if kind != expect.kind:
        return f"expected {expect.kind}, got {str(got)[:300]}"
    if kind == "error" and got["error"]["code"] not in expect.codes:
        return f"expected {expect.codes}, got {str(got)[:300]}"
    return _judge_id(got, expect.ident, ident, wire)


def _judge_id(got: Object, wanted: Json, ident: Json, wire: Wire) -> str:
    unreadable: list[Object] = [{"id": None} if wire.revision in NULL_ID else {}]
    if wire.transport == "http" and wire.revision not in OLD:
        unreadable.append({})  # what cannot be read belongs to no session, and so to no revision
    found = {name: value for name, value in got.items() if name == "id"}
    echoed = {"id": ident if wanted in (ECHO, MAYBE) else wanted}
    right = unreadable if wanted == NONE else [echoed, *unreadable] if wanted == MAYBE else [echoed]
    if found in right and all(type(found.get("id")) is type(r.get("id")) for r in right if r == found):
        return ""
    return f"expected {' or '.join(map(str, right))[:100]}, got {str(found)[:100]}"


def _is_failure(result: Object) -> bool:
    told = result.get("toolResult")
    return bool(result.get("isError")) or (isinstance(told, dict) and "error" in told)


async def test_the_judge_sees_a_wrong_answer() -> None:
    """The twin without the fault: the check can fail."""
    old, new, web = (Wire("2024-11-05", "memory"), Wire("2025-11-25", "memory"), Wire("2025-06-18", "http"))
    expect = Expect("error", (-32700,), NONE)
    good: Object = {"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": ""}}
    assert _judge([good], expect, 5, old) == ""
    assert _judge([good], expect, 5, new)
    assert _judge([good | {"id": 5}], expect, 5, old)
    assert _judge([], expect, 5, old)
    assert _judge([good, good], expect, 5, old)
    assert _judge([good | {"error": {"code": -32600, "message": ""}}], expect, 5, old)
    assert _judge([{"jsonrpc": "2.0", "id": 5, "result": {}}], expect, 5, old)
    assert _judge([good], expect, 5, web) == ""
    assert _judge([good | {"id": 5}], expect, 5, web)
    assert _judge([Refusal(413, "")], expect, 5, web)
    assert _judge([Refusal(413, "")], TOO_LONG, 5, web) == ""
    assert _judge([good], TOO_LONG, 5, web)
    check_message(strict_json(b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":""}}'), "2024-11-05", None)
