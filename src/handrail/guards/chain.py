"""The form of an audit trail, and how to tell whether one is whole (P-16). One JSON object a line:

    {"length":     412,"hash":"<SHA-256>","number":17,"prev":"<hash of 16>","writer":"<16 digits>",…the record…}

`length` and `hash` are those of all that follows the hash's comma, up to the closing brace: so they cover `prev`, and
by it everything before. There is one chain a file: whoever appends holds the file meanwhile, other processes included.

What is noticed: a byte that was changed, a record that was taken out, put in or moved, a beginning that was cut off.
What is not: whole records cut off the end; the oldest of several files taken away whole, though the verdict says which
record comes first; and a trail that somebody wrote anew from some record on, for there is no secret in it. Whoever
knows the hash of a later record notices these too: note the head down elsewhere, and give it to `verify`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, NamedTuple

from msgspec import DecodeError, Struct
from msgspec.json import Decoder, encode

from handrail.errors import HandrailError
from handrail.jsonrpc import encode_sorted
from handrail.model import Json, Object

__all__ = ["MARK", "MAX_BYTES", "ORIGIN", "RESERVED", "Flaw", "Link", "TrailError", "Verdict", "frame", "link_of"]
__all__ += ["notice", "records_in", "verify", "weighed"]

MARK = b'{"length":'
MAX_BYTES = 16 * 1024 * 1024
"""Of one record; the width of `length` has room for more."""
RESERVED = frozenset({"length", "hash", "number", "prev", "time", "writer"})

_HEAD = re.compile(
    rb'\{"length":( {0,7}[0-9]{1,8}),"hash":"([0-9a-f]{64})",("number":([0-9]{1,18}),"prev":"([0-9a-f]{64})",)'
)


class TrailError(HandrailError):
    """The trail could not be written, and nothing counts as written. The text names the file: it is not for a peer."""


class Link(NamedTuple):
    """A record's place in the chain; the hash in hexadecimal."""

    number: int
    hash: bytes


ORIGIN = Link(0, b"0" * 64)


def frame(bodies: Iterable[bytes], writer: bytes, now: float, last: Link) -> tuple[list[bytes], Link]:
    """The lines of records that follow `last`, without their newlines, and the last of them.

    A body is a JSON object that is not empty.
    """
    time = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
    same = b'","writer":"%b","time":"%b",' % (writer, time.encode())
    lines = []
    number, prev = last
    for body in bodies:
        number += 1
        rest = b'"number":%d,"prev":"%b%b%b' % (number, prev, same, body[1:])
        prev = sha256(rest).hexdigest().encode()
        lines.append(b'{"length":%8d,"hash":"%b",%b' % (len(rest), prev, rest))
    return lines, Link(number, prev)


def notice(event: str, **more: Any) -> bytes:
    """The body of a record of the trail's own affairs."""
    return encode({"event": event, **more})


def weighed(arguments: Json) -> Object:
    """What a record says of arguments, whoever writes it."""
    written = encode_sorted(arguments)
    return {"arguments_digest": digest(written), "arguments_bytes": len(written)}


def digest(written: bytes) -> str:
    return "sha256:" + sha256(written).hexdigest()


def link_of(line: bytes) -> Link | None:
    """Where a line says it is; None if it is no record. What it says is not checked: `verify` does that."""
    head = _HEAD.match(line)
    return Link(int(head[4]), head[2]) if head else None


def records_in(data: bytes) -> Iterator[bytes]:
    """Every whole record in the bytes of whatever: of a file that nothing else can be read of any more."""
    for head in _HEAD.finditer(data):
        end = head.start(3) + int(head[1])
        if end - head.start(3) <= MAX_BYTES and sha256(data[head.start(3) : end]).hexdigest().encode() == head[2]:
            yield data[head.start() : end]


class Event(Struct):
    """A record whose members are known beforehand."""

    event: str


class Flaw(Struct, frozen=True):
    """The first record that is wrong: where it stands, which one should stand there, and what is wrong."""

    place: str
    number: int
    text: str


class Verdict(Struct, frozen=True, kw_only=True):
    """What was found. Torn bytes and unfinished calls are signs of a crash, not of tampering."""

    records: int  # that are as they were written
    first: int = 0
    last: int = 0
    head: str = ""  # the hash of the last one
    flaw: Flaw | None = None
    bad: int = 0  # lines that are no record, and places where some are missing
    torn: int = 0  # bytes after the last newline: a record that was never finished
    unfinished: tuple[str, ...] = ()  # calls with an intent and no outcome
    missed: int = 0  # records that could not be written, as the trail itself says


class _Told(Struct):
    event: Any = None
    call: Any = None
    to: Any = None
    digest: Any = None
    records: Any = 0
    refusals: Any = 0


_told = Decoder(_Told).decode


def verify(lines: Iterable[tuple[str, bytes]], *, head: str = "") -> Verdict:
    """Read a trail from its beginning: each line with its newline, and where it stands.

    A `head` is the hash of a record that has to be there. `event` and `call` of the records tell which calls have begun
    (`intent`) and ended (`outcome`).
    """
    flaws: list[Flaw] = []
    first: Link | None = None  # where the trail says it goes on from
    start = last = ORIGIN
    is_sure, begins_well, found = True, False, not head
    good = torn = missed = 0
    calls: dict[str, None] = {}
    place = ""

    for place, line in lines:
        if not line.endswith(b"\n"):
            torn += len(line)
            continue
        read = _read(line[:-1])
        if isinstance(read, str):
            flaws.append(Flaw(place, last.number + 1, read))
            is_sure = False  # what follows cannot be held against it
            continue
        link, prev, told = read
        if first is None:
            first, start = Link(link.number - 1, prev), link
            begins_well = first == ORIGIN or told.event == "rotated" or bool(flaws)
        elif link.number != last.number + 1 and (is_sure or link.number <= last.number):
            flaws.append(Flaw(place, last.number + 1, f"record {link.number} follows {last.number}"))
        elif is_sure and prev != last.hash:
            flaws.append(Flaw(place, link.number, "it does not follow from the record before it"))
        is_sure, last = True, link
        good += 1
        found = found or link.hash == head.encode()
        match told.event:
            case "intent":
                calls[str(told.call)] = None
            case "outcome":
                calls.pop(str(told.call), None)
            case "gap":
                missed += sum(each for each in (told.records, told.refusals) if isinstance(each, int))
            case "trimmed" if (told.to, str(told.digest).encode()) == first:
                begins_well = True
    if first is not None and not begins_well:
        flaws.insert(0, Flaw("the beginning", 1, f"it begins with record {start.number}; those before it are missing"))
    if not found:
        flaws.append(Flaw(place or "the end", last.number + 1, f"no record has the hash {head}: the end was cut off"))
    return Verdict(
        records=good,
        first=start.number,
        last=last.number,
        head=last.hash.decode() if good else "",
        flaw=flaws[0] if flaws else None,
        bad=len(flaws),
        torn=torn,
        unfinished=tuple(calls),
        missed=missed,
    )


def _read(line: bytes) -> tuple[Link, bytes, _Told] | str:
    """A record's place, the hash it follows and what it says; or what is wrong with it."""
    if (head := _HEAD.match(line)) is None:
        return "it is not a record of a trail"
    rest = line[head.start(3) :]
    if head[1] != b"%8d" % len(rest):
        return f"it should have {int(head[1])} bytes and has {len(rest)}"
    if sha256(rest).hexdigest().encode() != head[2]:
        return "its hash does not fit: it was changed"
    try:
        return Link(int(head[4]), head[2]), head[5], _told(b"{" + rest)
    except DecodeError as problem:
        return f"it is not JSON: {problem}"
