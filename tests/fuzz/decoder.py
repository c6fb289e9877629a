"""Random and mutated messages against the decoder: it never raises, and agrees with the oracle on every one.

    python tests/fuzz/decoder.py --seconds 60 [--seed N]

Inputs that led to an outcome not seen before are kept as seeds for the rest of the run. An input on which the two
differ is written to tests/fuzz/corpus, which every run starts from: what broke once is tried for ever.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import UNSET

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parents[1]), str(HERE.parent / "support")]

from handrail import jsonrpc  # noqa: E402
from handrail.errors import Kind  # noqa: E402
from malformed import CASES, line_of  # noqa: E402
from tests.fuzz import oracle  # noqa: E402  # the path is set above

__all__ = ["CORPUS", "difference", "fuzz", "seeds"]

CORPUS = HERE / "corpus"
LONGEST = 20_000

_PIECES = [
    *(bytes([n]) for n in (0, 1, 9, 10, 13, 31, 32, 34, 44, 45, 48, 49, 58, 91, 92, 93, 101, 123, 125, 127, 128, 255)),
    b'"a":1',
    b'"a":2',
    b'"\\u0061":3',
    b'"a" :4',
    b'"id":1',
    b'"id":"x"',
    b'"id":null',
    b'"method":"ping"',
    b'"jsonrpc":"2.0"',
    b'"params":{}',
    b'"_meta":5',
    b"{}",
    b"[]",
    b"[{",
    b"}]",
    b"::",
    b'\\":',
    b'" :',
    b"NaN",
    b"-Infinity",
    b"null",
    b"true",
    b"1e400",
    b"-0",
    b"0.",
    b"1E+2",
    b"9" * 1000,
    b"9" * 1001,
    b"0" * 501,
    b".",
    b"e-",
    b"\\ud83d",
    b"\\ude00",
    b"\\u0000",
    b"\\/",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\xc0\x80",
    "\U0001f600".encode(),
    "\u2028".encode(),
    b"[" * 64,
    b"]" * 64,
    b'{"a":' * 64,
]


def seeds() -> list[bytes]:
    """What to start from: whatever broke once, and the table of malformed messages."""
    kept = [path.read_bytes() for path in sorted(CORPUS.glob("*.bin"))]
    lines = [line_of(case, "2024-11-05", 1) for case in CASES if len(case.line) < 1_000 and not case.size]
    return kept + [line for line in lines if line]


def difference(data: bytes) -> str:
    """What the decoder got wrong about a text; empty if nothing."""
    try:
        got = jsonrpc.decode(data)
    except BaseException as problem:
        return f"raised {problem!r}"
    parse_refused = isinstance(got, jsonrpc.InvalidMessage) and got.kind is Kind.PARSE
    flaw = _unsendable(got)
    if flaw:
        return flaw
    try:
        wanted = oracle.decode(data)
    except oracle.Refused as refused:
        # A number or a text alone is no message, however it is written.
        alone = data.strip(b" \t\r\n")[:1] not in (b"{", b"[")
        refused_too = isinstance(got, jsonrpc.InvalidMessage) and (parse_refused or alone)
        return "" if refused_too else f"accepted, though {refused}: {got!r}"[:500]
    if parse_refused:
        return f"refused, though it is strict JSON: {got!r}"[:500]
    return _misread(got, wanted)


def _unsendable(got: object) -> str:
    ident = getattr(got, "id", 0)
    if isinstance(got, jsonrpc.InvalidMessage) and ident is not UNSET:
        try:
            sent = jsonrpc.error(ident, -32700, got.text)
            if not oracle.same(oracle.decode(sent)["id"], ident):
                return f"the id {ident!r} does not survive being sent"
        except Exception as problem:
            return f"the refusal cannot be sent: {problem!r}"
    return ""


def _misread(got: object, wanted: object) -> str:
    match got:
        case list():
            right = oracle.same(got, wanted)
        case jsonrpc.Request(ident, method, params):
            right = isinstance(wanted, dict) and all(
                oracle.same(mine, wanted.get(name, {}))
                for name, mine in (("id", ident), ("method", method), ("params", params))
            )
        case jsonrpc.Notification(method, params):
            given = wanted.get("params", {}) if isinstance(wanted, dict) else None
            right = isinstance(wanted, dict) and "id" not in wanted and wanted["method"] == method
            right = right and oracle.same(params, given if isinstance(given, dict) else {})
        case jsonrpc.Response():
            right = isinstance(wanted, dict) and "method" not in wanted and ("result" in wanted) != ("error" in wanted)
        case jsonrpc.InvalidMessage(kind):
            named = wanted.get("id") if isinstance(wanted, dict) else None
            readable = type(named) in (int, str)
            right = kind in (Kind.INVALID_REQUEST, Kind.BAD_PARAMS)
            right = right and (oracle.same(got.id, named) if readable else got.id is UNSET)
        case _:
            right = False
    return "" if right else f"read as {got!r}"[:500]


def mutations(chance: random.Random, pool: list[bytes]) -> Iterator[bytes]:
    """Endless: texts of the pool, changed a little or much."""
    while True:
        data = bytearray(chance.choice(pool))
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            _change(chance, data, pool)
        yield bytes(data[:LONGEST])


def _change(chance: random.Random, data: bytearray, pool: list[bytes]) -> None:
    start = chance.randrange(len(data) + 1)
    end = min(len(data), start + chance.choice((0, 1, 1, 2, 4, 16, 64)))
    match chance.randrange(8):
        case 0:
            del data[start:end]
        case 1:
            data[start:start] = chance.choice(_PIECES)
        case 2:
            data[start:end] = chance.choice(_PIECES)
        case 3:
            data[start:start] = data[start:end] * chance.choice((1, 2, 100))
        case 4 if start < len(data):
            data[start] ^= 1 << chance.randrange(8)
        case 5:
            other = chance.choice(pool)
            cut = chance.randrange(len(other) + 1)
            data[start:end] = other[cut : cut + chance.choice((1, 8, 64, 1000))]
        case 6:
            del data[start:]
        case _:
            data[start:end] = chance.randbytes(chance.choice((1, 2, 4)))


def fuzz(seed: int, go_on: Callable[[int], bool]) -> tuple[int, list[tuple[bytes, str]]]:
    """Try inputs while `go_on(tried so far)`; how many were tried, and those on which decoder and oracle differ."""
    chance = random.Random(seed)
    pool = seeds()
    seen: set[str] = set()
    wrong: list[tuple[bytes, str]] = []
    tried = 0
    for data in pool[:]:
        tried += 1
        _note(data, wrong)
        seen.add(_outcome(data))
    for data in mutations(chance, pool):
        if not go_on(tried):
            return tried, wrong
        tried += 1
        if _note(data, wrong):
            continue
        outcome = _outcome(data)
        if outcome not in seen:
            seen.add(outcome)
            pool.append(data)
    raise AssertionError("unreachable")


def _note(data: bytes, wrong: list[tuple[bytes, str]]) -> bool:
    found = difference(data)
    if found:
        wrong.append((data, found))
    return bool(found)


def _outcome(data: bytes) -> str:
    got = jsonrpc.decode(data)
    told = got.text if isinstance(got, jsonrpc.InvalidMessage) else ""
    return f"{type(got).__name__} {re.sub(r'[0-9]+|`.*`|member .*', '', told)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    tried, wrong = fuzz(options.seed, lambda _: time.monotonic() < end)
    for data, problem in wrong[:20]:
        name = f"{hashlib.blake2b(data, digest_size=6).hexdigest()}.bin"
        (CORPUS / name).write_bytes(data)
        print(f"{name}: {problem}\n    {data[:200]!r}")
    print(f"seed {options.seed}: {tried:,} inputs in {options.seconds:g} s, {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
