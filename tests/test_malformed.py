"""Whatever a client sends, it gets the answer the rules prescribe, and its next call is answered."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import time
from collections.abc import Callable

import pytest

from checks import check_message, strict_json
from fuzz.decoder import mutations
from malformed import CASES, ECHO, MAYBE, NONE, Case, Expect, Json, line_of
from requirements import requirement
from wires import ALL, Object, Open, Wire, everywhere, open_wire as open_wire, wire_to

PATIENCE = 1.0  # no hang over a second
FIRST = 10_000  # the id of the first case

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
    wire: Wire = await open_wire()
    wrong: list[str] = []
    for at, case in enumerate(CASES):
        flaw = await _flaw(wire, case, at)
        if "slow" in flaw:  # A busy machine may lose a second; at the same message twice it is not the machine.
            flaw = await _flaw(wire, case, at)
        if flaw:
            wrong.append(f"{case.name}: {flaw}")
        if "nothing after" in flaw:
            break  # deaf
    assert not wrong, f"{len(wrong)} of {len(CASES)}:\n" + "\n".join(wrong)


@everywhere()
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
            flaw = _judge(got, expect, ident, wire.revision)
            assert not flaw, f"{case.name}: {flaw}"
    await writing
    assert "the end" in str(await wire.receive())


@everywhere()
@requirement("P-04", "P-08")
async def test_an_id_in_flight_is_refused_and_one_of_another_type_is_another(open_wire: Open) -> None:
    wire: Wire = await open_wire()
    params = wire.params({"name": "after", "arguments": {"seconds": 0.3, "text": "first"}})
    other = wire.params({"name": "after", "arguments": {"seconds": 0.3, "text": "second"}})
    await wire.send({"jsonrpc": "2.0", "id": 1_000_001, "method": "tools/call", "params": params})
    await wire.send({"jsonrpc": "2.0", "id": "1000001", "method": "tools/call", "params": other})
    await wire.send({"jsonrpc": "2.0", "id": 1_000_001, "method": "tools/call", "params": other})
    refused = await wire.receive()
    assert refused["id"] == 1_000_001
    assert refused["error"]["code"] == -32600
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
                async with asyncio.timeout(10):
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
    began = time.monotonic()
    got: list[Json] = []
    try:
        async with asyncio.timeout(10 * PATIENCE):
            await wire.write(line)
            probe = await wire.ask("tools/call", {"name": "echo", "arguments": {"text": mark}})
            while True:
                message = await wire.receive()
                if isinstance(message, dict) and message.get("id") == probe:
                    break
                got.append(message)
    except (TimeoutError, EOFError) as problem:
        return f"nothing after it was answered: {problem!r}"
    except AssertionError as problem:
        return f"an answer that is not allowed: {str(problem)[:300]}"
    if mark not in str(message):
        return f"the call after it got {str(message)[:200]}"
    took = time.monotonic() - began
    return _judge(got, case.expected(wire.revision), ident, wire.revision) or (
        f"slow: {took:.2f} s" if took > PATIENCE else ""
    )


def _judge(got: list[Json], expect: Expect, ident: Json, revision: str) -> str:
    """What is wrong with an answer; empty if nothing."""
    if expect.kind == "silent":
        return f"expected silence, got {str(got)[:300]}" if got else ""
    wanted = expect.items if expect.kind == "several" else (expect,)
    if len(got) != len(wanted):
        return f"expected {len(wanted)} answers, got {len(got)}: {str(got)[:300]}"
    return "; ".join(filter(None, map(lambda g, w: _judge_one(g, w, ident, revision), got, wanted)))


def _judge_one(got: Json, expect: Expect, ident: Json, revision: str) -> str:
    if expect.kind == "batch":
        if not isinstance(got, list) or len(got) != len(expect.items):
            return f"expected a batch of {len(expect.items)}, got {str(got)[:300]}"
        found = [_judge_one(each, wanted, ident, revision) for each, wanted in zip(got, expect.items, strict=True)]
        return "; ".join(filter(None, found))
    if not isinstance(got, dict):
        return f"not a message: {str(got)[:300]}"
    kind = "error" if "error" in got else "failed" if _is_failure(got["result"]) else "result"
    if kind != expect.kind:
        return f"expected {expect.kind}, got {str(got)[:300]}"
    if kind == "error" and got["error"]["code"] not in expect.codes:
        return f"expected {expect.codes}, got {str(got)[:300]}"
    return _judge_id(got, expect.ident, ident, revision)


def _judge_id(got: Object, wanted: Json, ident: Json, revision: str) -> str:
    unreadable = {"id": None} if revision in NULL_ID else {}
    found = {name: value for name, value in got.items() if name == "id"}
    echoed = {"id": ident if wanted in (ECHO, MAYBE) else wanted}
    right = [unreadable] if wanted == NONE else [echoed, unreadable] if wanted == MAYBE else [echoed]
    if found in right and all(type(found.get("id")) is type(r.get("id")) for r in right if r == found):
        return ""
    return f"expected {' or '.join(map(str, right))[:100]}, got {str(found)[:100]}"


def _is_failure(result: Object) -> bool:
    told = result.get("toolResult")
    return bool(result.get("isError")) or (isinstance(told, dict) and "error" in told)


async def test_the_judge_sees_a_wrong_answer() -> None:
    """The twin without the fault: the check can fail."""
    expect = Expect("error", (-32700,), NONE)
    good: Object = {"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": ""}}
    assert _judge([good], expect, 5, "2024-11-05") == ""
    assert _judge([good], expect, 5, "2025-11-25")
    assert _judge([good | {"id": 5}], expect, 5, "2024-11-05")
    assert _judge([], expect, 5, "2024-11-05")
    assert _judge([good, good], expect, 5, "2024-11-05")
    assert _judge([good | {"error": {"code": -32600, "message": ""}}], expect, 5, "2024-11-05")
    assert _judge([{"jsonrpc": "2.0", "id": 5, "result": {}}], expect, 5, "2024-11-05")
    check_message(strict_json(b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":""}}'), "2024-11-05", None)
