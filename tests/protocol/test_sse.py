"""An event stream reads the same however it is cut; what is mirrored into headers is what a server expects there."""

from __future__ import annotations

import re
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from handrail.errors import Refused
from handrail.jsonrpc import Request
from handrail.protocol.framing import KEEP_ALIVE, EventReader, ServerSentEvent, encode_event
from handrail.protocol.http_rules import check_mirrored_headers, check_param_headers, encode_header, mirrored_headers
from requirements import requirement

BESIDE = 16 * 1024  # what an event may hold beside its data

ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])
LINES = st.sampled_from(
    [
        *(b"", b"", b"", b":", b": keep-alive", b"data", b"data:", b"data: x", b"data:  y", b"dataset: z", b"foo"),
        *(b"id: 7", b"id:", b"id", b"id: a\0b", b"id: \xff", b"event: message", b"event", b"data: " + b"x" * 40),
        *(b"retry: 500", b"retry: 5s", b"retry: -1", b"retry:", b"retry: 9999999999999999", b"x" * 9000, b": " * 9000),
    ]
)
PIECE = st.one_of(
    st.tuples(LINES, ENDS).map(b"".join),
    st.tuples(LINES, ENDS).map(b"".join),
    st.binary(max_size=12),
    st.sampled_from([b"\xef\xbb\xbf", b"\xef\xbb", b"\xef", b":", b" ", b"\0"]),
)


def read(pieces: list[bytes], limit: int = 1024) -> list[ServerSentEvent]:
    reader = EventReader(limit)
    return [each for piece in pieces for each in reader.feed(piece)]


def expected(stream: bytes, limit: int) -> list[ServerSentEvent]:
    """What the whole stream says, read in one go, as the specification words it."""
    *lines, unfinished = re.split(rb"\r\n|\r|\n", stream.removeprefix(b"\xef\xbb\xbf"))
    events: list[ServerSentEvent] = []
    data: list[bytes] = []
    event_id: str | None = None
    name, size, skipping = "", 0, False
    retry: int | None = None

    def is_too_long() -> bool:
        return size > limit + BESIDE or len(b"\n".join(data)) > limit

    for line in lines:
        if not line:
            if not skipping and (data or event_id is not None or retry is not None):
                events.append(ServerSentEvent(b"\n".join(data), event_id, name, retry))
            data, event_id, name, retry, size, skipping = [], None, "", None, 0, False
        if not line or line.startswith(b":") or skipping:
            continue
        size += len(line)
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if size > limit + BESIDE:
            pass
        elif field == b"data":
            data.append(value)
        elif field == b"id" and b"\0" not in value:
            event_id = value.decode("utf-8", "replace")
        elif field == b"event":
            name = value.decode("utf-8", "replace")
        elif field == b"retry" and re.fullmatch(rb"[0-9]{1,15}", value):
            retry = int(value)
        if is_too_long():
            events.append(ServerSentEvent(b"", event_id, name, retry, too_long=True))
            skipping = True
    if not skipping and not unfinished.startswith(b":") and size + len(unfinished) > limit + BESIDE:
        events.append(ServerSentEvent(b"", event_id, name, retry, too_long=True))
    return events


def cut(stream: bytes, data: st.DataObject) -> list[bytes]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    return [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


@requirement("CLI-12", "P-03", everywhere=True)
@settings(max_examples=300)
@given(st.lists(PIECE, max_size=30), st.data(), st.integers(1, 50))
def test_a_stream_gives_the_same_events_however_it_is_cut(pieces: list[bytes], data: st.DataObject, limit: int) -> None:
    stream = b"".join(pieces)
    wanted = expected(stream, limit)
    assert read([stream], limit) == wanted
    assert read(cut(stream, data), limit) == wanted
    if len(stream) < 2000:
        assert read([stream[n : n + 1] for n in range(len(stream))], limit) == wanted


EVENTS = st.builds(
    dict[str, Any],
    data=st.binary(max_size=30).filter(lambda data: not re.search(rb"[\r\n]", data)),
    event_id=st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=8),
    name=st.sampled_from(["", "message", "endpoint"]),
    retry_ms=st.integers(0, 10**9),
)


@given(st.lists(EVENTS, max_size=8), st.data())
def test_what_our_server_writes_is_what_is_read(sent: list[dict[str, Any]], data: st.DataObject) -> None:
    stream = b"".join(KEEP_ALIVE + encode_event(**each) for each in sent)
    reader = EventReader(1024)
    got = [each for piece in cut(stream, data) for each in reader.feed(piece)]
    assert [(each.data, each.event_id or "", each.name, each.retry_ms or 0) for each in got] == [
        tuple(each.values()) for each in sent
    ]
    assert reader.comment_count == len(sent)


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (
            b"data: a\n\ndata: b\r\n\r\ndata: c\r\rdata: d\n\r",
            [ServerSentEvent(b"a"), ServerSentEvent(b"b"), ServerSentEvent(b"c"), ServerSentEvent(b"d")],
        ),
        (b"\xef\xbb\xbfdata: a\n\n", [ServerSentEvent(b"a")]),
        (b"\n\xef\xbb\xbfdata: a\n\n", []),  # at the start only
        (b"data:a\ndata: b\ndata\ndata:  c\n\n", [ServerSentEvent(b"a\nb\n\n c")]),
        (b"data\n\n", [ServerSentEvent(b"")]),
        (b"data: \x0ba\x0cb\xc2\x85c\xe2\x80\xa8\n\n", [ServerSentEvent(b"\x0ba\x0cb\xc2\x85c\xe2\x80\xa8")]),
        (b": a comment\n:\n\n\n\n", []),
        (b"id: 5\n\n", [ServerSentEvent(event_id="5")]),
        (b"id\n\n", [ServerSentEvent(event_id="")]),
        (b"id: a\0b\ndata: x\n\n", [ServerSentEvent(b"x")]),
        (b"retry: 500\n\n", [ServerSentEvent(retry_ms=500)]),
        (b"retry: 0500\n\n", [ServerSentEvent(retry_ms=500)]),
        (b"data: a\r\ndata: b\r\n\r\n", [ServerSentEvent(b"a\nb")]),
        (b"retry: 999999999999999\n\n", [ServerSentEvent(retry_ms=999_999_999_999_999)]),
        (b"retry: 9999999999999999\nretry: " + b"9" * 5000 + b"\n\n", []),
        (b"retry: 5e2\nretry: +5\nretry: \xc2\xb2\nretry:\n\n", []),
        (b"event: endpoint\ndata: /x\n\ndata: y\n\n", [ServerSentEvent(b"/x", name="endpoint"), ServerSentEvent(b"y")]),
        (b"event: ping\n\ndata: y\n\n", [ServerSentEvent(b"y")]),
        (b"Data: x\n data: y\nfoo\n\n", []),
        (b"id: 1\ndata: unfinished\n", []),
    ],
)
def test_the_rules_of_the_format(stream: bytes, events: list[ServerSentEvent]) -> None:
    assert read([stream]) == events
    assert read([stream[n : n + 1] for n in range(len(stream))]) == events


@requirement("P-35", everywhere=True)
@pytest.mark.parametrize("ending", [b"\n", b"\r", b"\r\n"])
def test_an_event_at_the_limit_passes_and_one_byte_more_is_marked_and_skipped(ending: bytes) -> None:
    after = b"data: next" + ending * 2
    for size, wanted in ((64, ServerSentEvent(b"x" * 64, "1")), (65, ServerSentEvent(b"", "1", too_long=True))):
        whole = b"id: 1" + ending + b"data: " + b"x" * size + ending + b"data: more"[: (size > 64) * 10] + ending * 2
        assert read([whole + after], 64) == [wanted, ServerSentEvent(b"next")]
    lines = (b"data: " + b"x" * 20 + ending) * 9 + ending + after
    for pieces in ([lines], [lines[n : n + 1] for n in range(len(lines))]):
        assert read(pieces, 64) == [ServerSentEvent(too_long=True), ServerSentEvent(b"next")]


def test_an_event_without_end_is_told_while_it_comes_and_not_held() -> None:
    reader = EventReader(1024)
    tracemalloc.start()
    try:
        got = [each for _ in range(1000) for each in reader.feed(b"data: " + bytes(bytearray(b"x") * 4096))]
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got == [ServerSentEvent(too_long=True)]
    assert held < 8 * 1024
    assert peak < 64 * 1024
    assert reader.feed(b"\n\ndata: next\n\n") == [ServerSentEvent(b"next")]


@pytest.mark.parametrize("start", [b":", b"data: x\n:", b"\xef\xbb\xbf:"])
def test_a_comment_without_end_is_not_held_and_not_too_long(start: bytes) -> None:
    reader = EventReader(1024)
    reader.feed(start)
    tracemalloc.start()
    try:
        got = [each for _ in range(1000) for each in reader.feed(bytes(bytearray(b"x") * 4096))]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got == []
    assert held < 8 * 1024
    assert reader.feed(b"\ndata: y\n\n")[0].data.endswith(b"y")
    assert reader.comment_count == 1


def test_the_time_is_linear_in_the_bytes() -> None:
    """Four times the bytes, in as small pieces, take about four times as long; squared, it would be sixteen times."""

    def seconds(size: int) -> float:
        best = 1e9
        for _ in range(3):
            reader = EventReader(64 * 1024 * 1024)
            begun = time.process_time()
            for _ in range(size // 16):
                reader.feed(b"data: 0123456789")
            best = min(best, time.process_time() - begun)
        return best

    assert seconds(1_600_000) < 9 * seconds(400_000)


# Mirrors

PLACES = {"Text": ("text",), "Count": ("count",), "Dry": ("dry",), "City": ("place", "city"), "None": ("absent",)}
TEXTS = st.one_of(
    st.text(max_size=12),
    st.text(st.sampled_from("\t\n\r\0 ~ä=?€"), max_size=6),
    st.sampled_from(["", " ", " x", "x\t", "a b", "=?base64?eA==?=", "=?BASE64?eA==?=", "=?base64?", "größe", "a\nb"]),
).filter(lambda text: not re.search("[\ud800-\udfff]", text))
INTEGERS = st.integers(-(2**53) + 1, 2**53 - 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("eu-central-1", "eu-central-1"),
        ("Zürich", "=?base64?WsO8cmljaA==?="),
        (" x", "=?base64?IHg=?="),
        ("x\t", "=?base64?eAk=?="),
        ("a\tb c", "a\tb c"),
        ("=?base64?eA==?=", "=?base64?PT9iYXNlNjQ/ZUE9PT89?="),
        ("", ""),
        ("a\r\nX-Evil: 1", "=?base64?YQ0KWC1FdmlsOiAx?="),
    ],
)
@requirement("CLI-08", everywhere=True)
def test_a_text_as_the_value_of_a_header(text: str, value: str) -> None:
    assert encode_header(text) == value


@pytest.mark.parametrize(
    ("method", "params", "name"),
    [
        ("tools/call", {"name": "größe", "arguments": {}}, "=?base64?Z3LDtsOfZQ==?="),
        ("resources/read", {"uri": "file:///a b", "name": "no"}, "file:///a b"),
        ("prompts/get", {"name": "greet"}, "greet"),
        ("tools/list", {"name": "no"}, None),
        ("tools/call", {"name": 5}, None),
    ],
)
@requirement("CLI-08", everywhere=True)
def test_the_method_and_the_name_are_mirrored(method: str, params: dict[str, Any], name: str | None) -> None:
    wanted = {"Mcp-Method": method} | ({} if name is None else {"Mcp-Name": name})
    assert mirrored_headers(method, params, {}) == wanted


@requirement("CLI-09", everywhere=True)
def test_arguments_are_mirrored_and_null_and_absent_ones_are_not() -> None:
    arguments = {"text": "x", "count": -7.0, "dry": True, "place": {"city": "Zürich"}, "null": None, "list": [1]}
    places = {**PLACES, "Null": ("null",), "List": ("list",), "Deep": ("text", "x"), "Half": ("half",)}
    got = mirrored_headers("tools/call", {"name": "a", "arguments": arguments | {"half": 0.5}}, places)
    assert {name: value for name, value in got.items() if name.startswith("Mcp-Param-")} == {
        "Mcp-Param-Text": "x",
        "Mcp-Param-Count": "-7",
        "Mcp-Param-Dry": "true",
        "Mcp-Param-City": "=?base64?WsO8cmljaA==?=",
    }
    assert mirrored_headers("tools/call", {"name": "a"}, places) == {"Mcp-Method": "tools/call", "Mcp-Name": "a"}


@requirement("CLI-08", "CLI-09", everywhere=True)
@given(TEXTS, TEXTS, INTEGERS | INTEGERS.map(float), st.booleans(), TEXTS | st.none())
def test_a_server_finds_in_the_headers_what_the_body_says(
    name: str, text: str, count: float, dry: bool, city: str | None
) -> None:
    arguments = {"text": text, "count": count, "dry": dry, "place": {"city": city}}
    params = {"name": name, "arguments": arguments}
    made = mirrored_headers("tools/call", params, PLACES)
    assert all(re.fullmatch(r"[\t\x20-\x7e]*", value) for value in made.values())
    # As they arrive: blanks at the edges are not part of a value.
    headers = {key.lower().encode(): value.strip(" \t").encode() for key, value in made.items()}
    check_mirrored_headers(Request(1, "tools/call", params), headers)
    check_param_headers(PLACES, arguments, headers)
    if city is not None:
        with pytest.raises(Refused):
            check_param_headers(PLACES, arguments | {"place": {"city": city + "x"}}, headers)
