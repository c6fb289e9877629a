"""The decoder gives a message or a refusal for any bytes, and agrees with a second strict reader on every text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings, strategies as st

from handrail import jsonrpc
from malformed import CASES, LIMIT, line_of
from requirements import requirement
from tests.fuzz import oracle
from tests.fuzz.decoder import CORPUS, difference, fuzz, seeds

Json = Any

VALID = [
    b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":{"text":"a:b \\"c\\": d"}}}',
    b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"x","reason":"\\ud83d\\ude00"}}',
    b'[{"jsonrpc":"2.0","id":"a","method":"ping"},{"jsonrpc":"2.0","id":2,"result":{"a":[1,2.5,-3e-7,null,true]}}]',
    b'{"jsonrpc":"2.0","id":3,"error":{"code":-32603,"message":"no","data":{"":{},"\\u0000":[]}}}',
]

ANSWERS = [
    '{"jsonrpc":"2.0","id":1,"result":{"v":?}}',
    '{"jsonrpc":"2.0","id":1,"result":?}',
    '{"jsonrpc":"2.0","id":?,"result":{}}',
    '{"jsonrpc":?,"id":1,"result":{}}',
    '{"jsonrpc":"2.0","id":1,"result":{},"more":?}',
    '{"id":1,"jsonrpc":"2.0","result":{"v":?}}',
]

# JSON as text, written in every way it can be: with keys that are alike once read, odd spaces and escapes.
SPACE = st.sampled_from(["", "", "", " ", "\t", "\r", " \n "])
KEY = st.sampled_from(
    [
        "a",
        "b",
        "\\u0061",
        "\\u0062",
        "",
        ":",
        'a\\":',
        "\\/",
        "/",
        "\\u002f",
        "A",
        "\\ud83d\\ude00",
        "\U0001f600",
        " :",
        "e\u0301",
    ]
)
TEXT = st.one_of(
    st.text(max_size=8).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.text(max_size=8).map(json.dumps),
    st.sampled_from(
        [
            '"\\ud800"',
            '"\\udc00x"',
            '"\\ud83d\\u0041"',
            '"::"',
            '"\\":"',
            '" :"',
            '"\\"a\\":1"',
            '"\\u2028"',
            '"\x7f"',
            '"\t"',
        ]
    ),
)
NUMBER = st.one_of(
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,4})?", fullmatch=True),
    st.sampled_from(
        ["NaN", "Infinity", "-Infinity", "01", "1.", ".5", "+1", "-", "1e", "-0", "-0.0", "1e400", "0e999999"]
    ),
    st.builds("{}{}".format, st.sampled_from(["", "-", "0.", "-1.", "1e-"]), st.integers(990, 1010).map("1".__mul__)),
    st.builds("0.{}1e-{}".format, st.integers(490, 510).map("0".__mul__), st.integers(490, 510).map("0".__mul__)),
)


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    members = draw(st.lists(st.tuples(KEY, values), max_size=4))
    parts = [f'{draw(SPACE)}"{key}"{draw(SPACE)}:{draw(SPACE)}{value}{draw(SPACE)}' for key, value in members]
    return "{" + ",".join(parts) + "}"


@st.composite
def arrays(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    return "[" + ",".join(f"{draw(SPACE)}{value}{draw(SPACE)}" for value in draw(st.lists(values, max_size=4))) + "]"


TEXTS = st.recursive(
    st.one_of(st.sampled_from(["null", "true", "false", "{}", "[]", "nul", "True"]), NUMBER, TEXT),
    lambda inner: st.one_of(objects(inner), arrays(inner)),
    max_leaves=12,
)


@requirement("P-01", everywhere=True)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\x00")
@example(b"\xff\xfe{\x00}\x00")
def test_any_bytes_are_a_message_or_a_refusal(data: bytes) -> None:
    assert difference(data) == ""


@requirement("P-01", "P-02", everywhere=True)
@settings(max_examples=300)
@given(TEXTS)
def test_generated_texts_are_read_as_the_oracle_reads_them(text: str) -> None:
    try:
        whole = f'{{"jsonrpc":"2.0","id":1,"method":"m","params":{{"v":{text}}}}}'.encode()
    except UnicodeEncodeError:
        assume(False)
    assert difference(text.encode()) == ""
    assert difference(b"[" + text.encode() + b"]") == ""
    assert difference(whole) == ""
    try:
        wanted = oracle.decode(text.encode())
    except oracle.Refused:
        return
    got = jsonrpc.decode(whole)
    assert isinstance(got, jsonrpc.Request)
    assert oracle.same(got.params["v"], wanted)


# A request as clients write it, in the two orders there are, and nearly.
REQUESTS = (
    '{"jsonrpc":"2.0","id":?,"method":"m","params":{}}',
    '{"jsonrpc":"2.0","id":1,"method":"m","params":?}',
    '{"method":"m","params":?,"jsonrpc":"2.0","id":"1"}',
    '{"method":"m","params":{},"jsonrpc":"2.0","id":?}',
    '{"method":?,"params":{},"jsonrpc":"2.0","id":1}',
    '{"jsonrpc":?,"id":1,"method":"m","params":{}}',
    '{"method":"m","params":{},"jsonrpc":?,"id":1}',
    '{"id":1,"method":"m","params":?}',
    '{"method":"m","params":?,"id":1}',
    '{"jsonrpc":"2.0","id":1,"method":"m","params":?,"params":{}}',
    '{"jsonrpc":"2.0","id":1,"method":"m","params":?,"more":1}',
    '{"method":"m","params":{},"jsonrpc":"2.0","id":1,"result":?}',
)


@requirement("P-01", "P-02", everywhere=True)
@settings(max_examples=500)
@given(TEXTS, st.sampled_from(REQUESTS))
@example('"2.0"', REQUESTS[5])
@example('"2.1"', REQUESTS[5])
@example("1.0", REQUESTS[0])
@example("true", REQUESTS[3])
@example("9" * 400, REQUESTS[3])
@example('{"a":{"b":[1,2.5,"\u00fc"]}}', REQUESTS[1])
@example('{"a":1,"a":2}', REQUESTS[2])
@example('{"a":' * 126 + "{}" + "}" * 126, REQUESTS[2])
@example('{"a":' * 127 + "{}" + "}" * 127, REQUESTS[2])
def test_requests_are_read_the_same_in_the_short_way(text: str, request: str) -> None:
    try:
        data = request.replace("?", text).encode()
    except UnicodeEncodeError:
        assume(False)
    assert difference(data) == ""
    spaced = data.replace(b"{", b"{ ", 1)  # which is not what we would write
    assert repr(jsonrpc.decode(data)) == repr(jsonrpc.decode(spaced)) or isinstance(
        jsonrpc.decode(data), jsonrpc.InvalidMessage
    )


@requirement("P-01", "P-02", everywhere=True)
@settings(max_examples=300)
@given(TEXTS, st.sampled_from([*ANSWERS, *map(bytes.decode, VALID)]))
@example('[{"a":{"b":[1,2.5,"\u00fc"]}}]', ANSWERS[0])
@example('{"a":1,"a":2}', ANSWERS[0])
@example("[" * 126 + "]" * 126, ANSWERS[0])
@example("[" * 127 + "]" * 127, ANSWERS[0])
@example('"' + "[" * 200 + '"', ANSWERS[0])
@example("9" * 1001, ANSWERS[2])
def test_answers_are_read_the_same_in_the_short_way(text: str, answer: str) -> None:
    try:
        data = answer.replace("?", text).encode()
    except UnicodeEncodeError:
        assume(False)
    assert repr(jsonrpc.decode_response(data)) == repr(jsonrpc.decode(data))


@requirement("P-01", "P-02", everywhere=True)
@settings(max_examples=300)
@given(
    st.sampled_from(VALID),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 6), st.binary(max_size=4)), max_size=5),
)
def test_changed_messages_are_read_as_the_oracle_reads_them(
    message: bytes, changes: list[tuple[int, int, bytes]]
) -> None:
    data = bytearray(message)
    for at, gone, new in changes:
        at = min(at, len(data))
        data[at : at + gone] = new
    assert difference(bytes(data)) == ""


@given(st.sampled_from(VALID), st.data())
def test_every_beginning_of_a_message_is_refused(message: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(message) - 1))
    assert isinstance(jsonrpc.decode(message[:cut]), jsonrpc.InvalidMessage)
    assert difference(message[:cut]) == ""


@requirement("P-02", everywhere=True)
@given(
    st.integers(1, 140),
    st.sampled_from([(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]"), (b' { "a" : [ ', b" ] } ")]),
    st.sampled_from([b"1", b'"::"', b"{}", b"[]"]),
)
@example(128, (b"[", b"]"), b"1")
@example(129, (b"[", b"]"), b"1")
@example(127, (b'{"a":', b"}"), b"{}")
@example(128, (b'{"a":', b"}"), b"{}")
def test_depth_is_counted_alike(levels: int, kind: tuple[bytes, bytes], core: bytes) -> None:
    assert difference(kind[0] * levels + core + kind[1] * levels) == ""


@requirement("P-01", everywhere=True)
@pytest.mark.parametrize("levels", [1_000, 5_000, 100_000, 1_000_000])
@pytest.mark.parametrize("kind", [(b"[", b"]"), (b'{"a":', b"}")])
def test_bottomless_texts_are_refused(levels: int, kind: tuple[bytes, bytes]) -> None:
    for data in (kind[0] * levels, kind[0] * levels + b"1" + kind[1] * levels, kind[1] * levels):
        assert isinstance(jsonrpc.decode(data), jsonrpc.InvalidMessage)


SHAPES = [
    b"[]",
    b"{}",
    b"[[[[[]]]]]",
    b"[" * 100 + b"]" * 100,
    b'{"a":' * 100 + b"1" + b"}" * 100,
    b'{"a":1}',
    b'{"a":":"}',
    b'"\\":"',
    b'{"a":1,"a":1}',
    b"NaN",
    b"9" * 999,
    b"1e-" + b"0" * 990,
    b'"\\ud83d\\ude00"',
    b'"' + b"1" * 1100 + b'"',
]
CLOCK = """
import sys, time
from handrail.jsonrpc import decode
for line in sys.stdin.buffer.read().split(b"\\n"):
    began = time.process_time()
    decode(line)
    print(time.process_time() - began)
"""


@requirement("P-01", everywhere=True)
def test_no_message_within_the_limit_takes_a_second() -> None:
    """In time of the processor, so that a busy machine does not count; in a process with nothing else in it."""
    head, tail = b'{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":[', b'],"u":"::"}}'
    room = LIMIT - len(head) - len(tail)
    messages = [head + b",".join([unit] * (room // (len(unit) + 1))) + tail for unit in SHAPES]
    told = subprocess.run(
        [sys.executable, "-c", CLOCK], input=b"\n".join(messages), stdout=subprocess.PIPE, check=True, timeout=120
    )
    slow = {
        unit[:20]: taken for unit, taken in zip(SHAPES, map(float, told.stdout.split()), strict=True) if taken > 1.0
    }
    assert slow == {}


@requirement("P-02", everywhere=True)
@given(st.integers(9_995, 10_005), st.booleans(), st.integers(0, 2))
@settings(max_examples=12)
def test_keys_are_counted_alike(count: int, colons: bool, twice: int) -> None:
    members = [b'"k%d":%b' % (n, b'"::"' if colons else b"0") for n in range(count)]
    members += [b'"k0":1'] * twice
    assert difference(b"[{" + b",".join(members) + b"}]") == ""


@requirement("P-02", everywhere=True)
@given(
    st.integers(0, 3_000),
    st.sampled_from(["{}", "-{}", "0.{}", "-1.{}", "1e-{}", "1.5E+0{}", "1{}.5", '"{}"', '"1{}:"']),
    st.integers(0, 1_001),
    st.sampled_from(["0", "1", "9"]),
    st.booleans(),
)
@example(999, "1.5E+0{}", 0, "0", False)
@example(1_000, "-{}", 0, "9", True)
@example(1_000, "-{}", 0, "9", False)
def test_digits_are_counted_alike_wherever_they_stand(
    count: int, shape: str, before: int, digit: str, colons: bool
) -> None:
    number = shape.format(digit * count)
    data = f'{{"pad":"{"x" * before}","u":"{"::" if colons else ""}","n":[{number}]}}'.encode()
    assert difference(data) == ""


@requirement("P-02", everywhere=True)
@given(
    st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(max_size=10),
        ),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
        max_leaves=15,
    ),
    st.one_of(st.integers(-(10**999), 10**999), st.text(max_size=10)),
)
def test_what_we_send_is_strict_and_comes_back_the_same(value: Json, ident: int | str) -> None:
    sent = jsonrpc.request(ident, "m", {"v": value})
    assert b"\n" not in sent
    read = oracle.decode(sent)
    assert oracle.same(read["id"], ident)
    assert oracle.same(read["params"]["v"], value)
    got = jsonrpc.decode(sent)
    assert isinstance(got, jsonrpc.Request)
    assert oracle.same(got.params["v"], value)


def test_the_table_of_malformed_messages_is_read_as_the_oracle_reads_it() -> None:
    wrong = [
        f"{case.name}: {found}"
        for case in CASES
        if len(case.line) < 200_000 and not case.size
        for line in line_of(case, "2026-07-28", 7).split(b"\n")
        if (found := difference(line))
    ]
    assert wrong == []


@requirement("P-01", everywhere=True)
def test_a_seeded_tenth_of_the_fuzzer_finds_nothing() -> None:
    tried, wrong = fuzz(20260728, lambda tried: tried < 12_000)
    assert tried >= 12_000
    assert [(problem, data[:200]) for data, problem in wrong] == []


def test_the_corpus_is_kept_and_read() -> None:
    kept = list(CORPUS.glob("*.bin"))
    assert kept
    assert all(Path(path).read_bytes() in seeds() for path in kept)


@pytest.mark.parametrize(
    ("data", "right"),
    [
        (b'{"a":1,"a":2}', False),
        (b'{"a":1,"\\u0061":2}', False),
        (b'["\\ud800"]', False),
        (b"[NaN]", False),
        (b"\xef\xbb\xbf[]", False),
        (b"[" + b"9" * 1001 + b"]", False),
        (b"[" + b"-" + b"9" * 1000 + b"]", True),
        (b"[" * 128 + b"]" * 128, True),
        (b"[" * 129 + b"]" * 129, False),
        (b'{"a":[1,2.5,"\\ud83d\\ude00"]}', True),
    ],
)
def test_the_oracle_itself(data: bytes, right: bool) -> None:
    try:
        oracle.decode(data)
    except oracle.Refused:
        assert not right
    else:
        assert right
    assert not oracle.same([1], [1.0])
    assert not oracle.same([True], [1])
    assert not oracle.same(0.0, -0.0)
