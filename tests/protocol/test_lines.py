"""A stream of bytes gives the same lines however it is cut, and never costs much more than the longest line allowed."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, strategies as st

from handrail.protocol.framing import LineReader
from requirements import requirement

Lines = list[bytes | bytearray | None]

PIECE = st.one_of(
    st.binary(max_size=12),
    st.sampled_from(
        [b"\n", b"\n\n", b"\r\n", b" ", b"\t\n", b"{}", b'{"a":1}\n', b"x" * 7, b"x" * 8, b"x" * 9, b"x" * 40]
    ),
)


def read(pieces: list[bytes], limit: int) -> Lines:
    reader = LineReader(limit)
    lines: Lines = []
    for piece in pieces:
        lines += reader.feed(piece)
    return lines + reader.flush()


def expected(stream: bytes, limit: int) -> Lines:
    """What the whole stream says, read in one go: lines, None for each that is too long, nothing for blank ones."""
    lines: Lines = []
    for line in stream.split(b"\n"):
        if len(line) > limit:
            lines.append(None)
        elif line.strip(b" \t\r\n\x0b\x0c"):
            lines.append(line)
    return lines


@requirement("P-03", everywhere=True)
@given(st.lists(PIECE, max_size=30), st.data(), st.integers(1, 16))
def test_a_stream_gives_the_same_lines_however_it_is_cut(pieces: list[bytes], data: st.DataObject, limit: int) -> None:
    stream = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    wanted = expected(stream, limit)
    assert read([stream], limit) == wanted
    assert read(parts, limit) == wanted
    assert read([stream[n : n + 1] for n in range(len(stream))], limit) == wanted


@given(st.lists(st.binary(max_size=30), max_size=10), st.integers(1, 16))
def test_an_over_long_line_is_told_as_soon_as_it_is_over_long(pieces: list[bytes], limit: int) -> None:
    """Not only at its end: a line without end would never be told."""
    reader = LineReader(limit)
    stream = b""
    got: Lines = []
    for piece in pieces:
        stream += piece
        got += reader.feed(piece)
        *whole, rest = stream.split(b"\n")
        told = expected(b"\n".join([*whole, b""]), limit) + ([None] if len(rest) > limit else [])
        assert got == told


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65])
def test_a_line_at_the_limit_passes_and_one_byte_more_does_not(size: int) -> None:
    line = b"x" * size
    wanted: Lines = [] if size == 0 else [line] if size <= 64 else [None]
    for pieces in ([line + b"\n"], [line, b"\n"], [line[:10], line[10:], b"\n"], [line]):
        assert read(pieces, 64) == wanted
        assert read([*pieces, b"\nnext\n"], 64) == [*wanted, b"next"]


@requirement("P-03", everywhere=True)
@pytest.mark.parametrize("chunk", [1, 2, 3, 100, 4096, 65_536])
@pytest.mark.parametrize("length", [1.0, 4.0])
def test_what_is_held_is_bounded_by_the_limit_and_not_by_the_number_of_pieces(chunk: int, length: float) -> None:
    limit = 32 * 1024
    reader = LineReader(limit)
    count = int(limit * length) // chunk
    tracemalloc.start()
    try:
        for _ in range(max(1, count)):
            # A fresh object each time, as reading from a descriptor gives.
            reader.feed(bytes(bytearray(b"x") * chunk))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    slack = 8 * 1024
    assert held <= 1.25 * limit + chunk + slack
    assert peak <= 1.5 * limit + 3 * chunk + slack  # the last chunk, and a buffer on the way to its next size


def test_after_an_over_long_line_nothing_of_it_is_held() -> None:
    reader = LineReader(1024)
    tracemalloc.start()
    try:
        for _ in range(1000):
            reader.feed(bytes(bytearray(b"x") * 4096))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 8 * 1024
    assert reader.feed(b"x\n{}\n") == [b"{}"]
