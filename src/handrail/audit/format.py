"""The form of an audit trail, and how to tell whether one is whole (P-16). One JSON object a line:

    {"length":     412,"hash":"<SHA-256>","number":17,"prev":"<hash of 16>","writer":"<16 digits>",…the record…}

`length` and `hash` are those of all that follows the hash's comma, up to the closing brace: so they cover `prev`, and
by it everything before. There is one chain a file: an append locks the file, also against other processes. PostgreSQL
has one for each writer.

`verify` notices a byte that was changed, a record that was taken out, put in or moved, and a beginning that is gone
without a `trimmed` record. There is no secret in the chain, so by itself it cannot notice whole records cut off the
end, or a trail written anew from some record on, with a `trimmed` record of the attacker's. Both are noticed with a
noted head (`HASH@first..last,365d`): the hash must be in the chain, and the records since `first` must be there, unless
what is left shows that those before were too old. To show it, trimming leaves the last record that is too old.

The records that go into an audit log: one form for each kind of event, and the only place that names their members.

The order of the fields is the order of the members in the file. Arguments are recorded as a digest, and masked only on
request; results are never recorded.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, NamedTuple, Self

from msgspec import UNSET, DecodeError, Struct, UnsetType, field
from msgspec.json import Decoder, decode, encode
from msgspec.structs import asdict, replace

from handrail.errors import HandrailError
from handrail.jsonrpc import encode_sorted
from handrail.model import Json

__all__ = [
    "BEGINNING",
    "DAY_SECONDS",
    "MAX_RECORD_BYTES",
    "ORIGIN",
    "RECORD_PREFIX",
    "RESERVED_MEMBERS",
    "ApprovalRecord",
    "AuditRecord",
    "CallRecord",
    "ChainPosition",
    "ConsoleRecord",
    "Defect",
    "NotedHead",
    "OutgoingCallRecord",
    "RejectionRecord",
    "Retention",
    "TrailError",
    "UnsettledError",
    "VerifyReport",
    "authentic_records",
    "frame",
    "measure_arguments",
    "merge_reports",
    "notice",
    "position_of",
    "records_in",
    "replaced",
    "time_of",
    "trimmed",
    "verify",
    "verify_chains",
]

RECORD_PREFIX = b'{"length":'
MAX_RECORD_BYTES = 16 * 1024 * 1024
"""Of one record; the width of `length` has room for more."""
RESERVED_MEMBERS = frozenset({"length", "hash", "number", "prev", "time", "writer"})
DAY_SECONDS = 86_400.0
BEGINNING = "the beginning"
"""The place of a flaw that is not in a record: those before the first are gone."""

_RECORD_START = re.compile(
    rb'\{"length":( {0,7}[0-9]{1,8}),"hash":"([0-9a-f]{64})",("number":([0-9]{1,18}),"prev":"([0-9a-f]{64})",)'
)
_RECORD_TIME = re.compile(_RECORD_START.pattern + rb'"writer":"[0-9a-f]{1,64}","time":"([^"]{1,64})"')


class TrailError(HandrailError):
    """The trail could not be written, and nothing counts as written. The text names the file: it is not for a peer."""


class UnsettledError(TrailError):
    """It is not known whether the records were written."""


class ChainPosition(NamedTuple):
    """A record's place in the chain; the hash in hexadecimal."""

    number: int
    hash: bytes


ORIGIN = ChainPosition(0, b"0" * 64)


class Retention(Struct, frozen=True, omit_defaults=True):
    """How much of a trail is stored; 0 is no limit."""

    keep_days: int = 0
    max_megabytes: int = 0

    def explains_loss(self, oldest: float, size: int, now: float) -> bool:
        """Return whether these limits account for a beginning that is gone, by the oldest record left and the size."""
        is_old = self.keep_days > 0 and oldest < now - self.keep_days * DAY_SECONDS
        return is_old or (self.max_megabytes > 0 and 3 * size >= self.max_megabytes * 1_000_000)


class NotedHead(Struct, frozen=True):
    """The end of a trail as it is noted elsewhere: `HASH@first..last`, then its limits (`,365d,64MB`)."""

    hash: str
    first: int = 0  # 0: only the hash was noted
    last: int = 0
    limits: Retention = Retention()

    @classmethod
    def parse(cls, text: str) -> NotedHead:
        match = re.fullmatch(r"([0-9a-f]{64})(?:@([0-9]+)\.\.([0-9]+)(?:,([0-9]+)d)?(?:,([0-9]+)MB)?)?", text)
        if match is None:
            raise ValueError(f"{text!r} is not a head, such as `handrail audit verify` prints: HASH@first..last")
        first, last, *limits = (int(each or 0) for each in match.groups()[1:])
        return cls(match[1], first, last, Retention(*limits))

    def __str__(self) -> str:
        days = f",{self.limits.keep_days}d" if self.limits.keep_days else ""
        size = f",{self.limits.max_megabytes}MB" if self.limits.max_megabytes else ""
        return f"{self.hash}@{self.first}..{self.last}{days}{size}"


def frame(bodies: Iterable[bytes], writer: bytes, now: float, last: ChainPosition) -> tuple[list[bytes], ChainPosition]:
    """The lines of records that follow `last`, without their newlines, and the last of them.

    A body is a JSON object that is not empty.
    """
    moment = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
    same = b'","writer":"%b","time":"%b",' % (writer, moment.encode())
    lines = []
    number, prev = last
    for body in bodies:
        number += 1
        rest = b'"number":%d,"prev":"%b%b%b' % (number, prev, same, body[1:])
        prev = sha256(rest).hexdigest().encode()
        lines.append(b'{"length":%8d,"hash":"%b",%b' % (len(rest), prev, rest))
    return lines, ChainPosition(number, prev)


def digest(encoded: bytes) -> str:
    return "sha256:" + sha256(encoded).hexdigest()


def position_of(line: bytes) -> ChainPosition | None:
    """Where a line says it is; None if it is no record. What it says is not checked: `verify` does that."""
    match = _RECORD_START.match(line)
    return ChainPosition(int(match[4]), match[2]) if match else None


def time_of(line: bytes) -> float | None:
    """Return when a record says it was written; None if it is no record."""
    match = _RECORD_TIME.match(line)
    try:
        return datetime.fromisoformat(match[6].decode()).timestamp() if match else None
    except (ValueError, OverflowError):
        return None


def records_in(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Every whole record in the bytes of whatever, and where it begins: also one that was never written as a record."""
    for match in _RECORD_START.finditer(data):
        end = match.start(3) + int(match[1])
        if (
            end - match.start(3) <= MAX_RECORD_BYTES
            and sha256(data[match.start(3) : end]).hexdigest().encode() == match[2]
        ):
            yield match.start(), data[match.start() : end]


def authentic_records(candidates: Iterable[tuple[bytes, bool]]) -> list[bytes]:
    """Return the records that were written to the audit log, in order, from what remains of a file.

    Each candidate comes with whether it stands where the trail writes records. Any other may be a text that looks like
    one, such as a result stored for a caller: it counts only if a record that counts follows from it.
    """
    records: dict[int, bytes] = {}
    loose: dict[bytes, bytes] = {}
    for line, is_placed in candidates:
        if (match := _RECORD_START.match(line)) is None:
            continue
        if is_placed:
            records.setdefault(int(match[4]), line)
        else:
            loose.setdefault(match[2], line)
    for line in [*records.values()]:
        while (match := _RECORD_START.match(line)) and (previous := loose.pop(match[5], None)):
            records.setdefault(int(match[4]) - 1, previous)
            line = previous
    return [records[number] for number in sorted(records)]


class Defect(Struct, frozen=True):
    """The first record that is wrong: where it stands, which one should stand there, and what is wrong."""

    place: str
    number: int
    text: str


class VerifyReport(Struct, frozen=True, kw_only=True):
    """The result of a check. Torn bytes and unfinished calls are signs of a crash, not of tampering."""

    records: int  # that are as they were written
    first: int = 0
    last: int = 0
    head: str = ""  # the hash of the last one
    noted: str = ""  # the head as it is to be noted
    flaw: Defect | None = None
    bad: int = 0  # lines that are no record, and places where some are missing
    torn: int = 0  # bytes after the last newline: a record that was never finished
    unfinished: tuple[str, ...] = ()  # calls with an intent and no outcome
    missed: int = 0  # records that could not be written, as the trail itself says


class _RecordInfo(Struct):
    event: Any = None
    call: Any = None
    to: Any = None
    digest: Any = None
    records: Any = 0
    refusals: Any = 0
    keep_days: Any = 0
    max_megabytes: Any = 0

    @property
    def limits(self) -> Retention:
        return Retention(*(each if type(each) is int else 0 for each in (self.keep_days, self.max_megabytes)))


_decode_info = Decoder(_RecordInfo).decode


def verify(lines: Iterable[tuple[str, bytes]], *, head: str = "", now: float | None = None) -> VerifyReport:
    """Read a trail from its beginning: each line with its newline, and where it stands.

    A `head` was noted earlier, as `VerifyReport.noted` or the hash alone. Its record has to be present, and a record
    that was present then and is missing now has to be beyond the noted limits at the time `now`. `event` and `call` of
    the records tell which calls have begun (`intent`) and ended (`outcome`).
    """
    noted = NotedHead.parse(head) if head else None
    defects: list[Defect] = []
    replaced: list[tuple[int, Defect]] = []
    first: ChainPosition | None = None  # where the trail says it goes on from
    trimmed: tuple[int, Retention] | None = None  # the record that says why
    start = last = ORIGIN
    oldest: float | None = None
    limits = Retention()
    is_sure, begins_well, noted_at = True, False, 0
    valid_count = torn = missed = size = 0
    calls: dict[str, None] = {}
    place = ""

    for place, line in lines:
        if not line.endswith(b"\n"):
            torn += len(line)
            continue
        parsed = _parse_record(line[:-1])
        if isinstance(parsed, str):
            defects.append(Defect(place, last.number + 1, parsed))
            is_sure = False  # what follows cannot be held against it
            continue
        position, prev, info = parsed
        if first is None:
            first, start, oldest = ChainPosition(position.number - 1, prev), position, time_of(line)
            begins_well = first == ORIGIN or bool(defects)
        elif position.number != last.number + 1 and (is_sure or position.number <= last.number):
            defects.append(Defect(place, last.number + 1, f"record {position.number} follows {last.number}"))
        elif is_sure and prev != last.hash:
            defects.append(Defect(place, position.number, "it does not follow from the record before it"))
        is_sure, last = True, position
        valid_count += 1
        size += len(line)
        if noted is not None and position.hash == noted.hash.encode():
            noted_at = position.number
        match info.event:
            case "intent":
                calls[str(info.call)] = None
            case "outcome":
                calls.pop(str(info.call), None)
            case "gap":
                missed += sum(each for each in (info.records, info.refusals) if isinstance(each, int))
            case "opened":
                limits = info.limits
            case "trimmed":
                limits = info.limits
                if trimmed is None and (info.to, str(info.digest).encode()) == first:
                    trimmed = position.number, info.limits
            case "replaced":
                text = f"the file was deleted or replaced here: records up to {info.to} are not in it"
                replaced.append((position.number, Defect(place, position.number, text)))
                begins_well = begins_well or position == start
    # What the noted head says was there already is not held against the trail again.
    defects += [flaw for number, flaw in replaced if number > noted_at]
    if first is not None and not begins_well:
        now = time.time() if now is None else now
        if text := _unexplained_loss(start.number, trimmed, noted, noted_at, (oldest or now, size, now)):
            defects.insert(0, Defect(BEGINNING, 1, text))
    if noted is not None and not noted_at:
        text = f"no record has the hash {noted.hash}: the end was cut off"
        if 0 < noted.last < start.number:
            text = f"the noted record {noted.last} is gone with those before {start.number}: nothing ties them together"
        defects.append(Defect(place or "the end", last.number + 1, text))
    return VerifyReport(
        records=valid_count,
        first=start.number,
        last=last.number,
        head=last.hash.decode() if valid_count else "",
        noted=str(NotedHead(last.hash.decode(), start.number, last.number, limits)) if valid_count else "",
        flaw=defects[0] if defects else None,
        bad=len(defects),
        torn=torn,
        unfinished=tuple(calls),
        missed=missed,
    )


def verify_chains(
    chains: Iterable[tuple[str, Iterable[tuple[str, bytes]]]], heads: Mapping[str, str], *, now: float | None = None
) -> Iterator[tuple[str, VerifyReport]]:
    """Read the chains of all writers, as `verify` reads one; then name those that were noted and are not there.

    A chain of which every record was too old is deleted whole. Another chain has the record that says so.
    """
    removed: dict[str, _RemovedChain] = {}
    missing = dict(heads)
    for chain, lines in chains:
        watched = _ChainWatch(chain, removed)
        report = verify(watched.pass_on(lines), head=missing.pop(chain, ""), now=now)
        if report.flaw is None and watched.foreign is not None:
            report = replace(report, flaw=watched.foreign, bad=1)
        yield chain, report
    for chain, head in missing.items():
        noted, end = NotedHead.parse(head), removed.get(chain)
        if end is not None and noted.limits.keep_days and _is_later(end, noted):
            continue
        text = f"no record of this writer is left, and the head {noted.hash} was noted: its chain was deleted"
        yield chain, VerifyReport(records=0, flaw=Defect(f"chain {chain}", noted.last, text), bad=1)


def merge_reports(reports: Iterable[VerifyReport]) -> VerifyReport:
    """Return what holds of all chains together; its first flaw is that of the first chain that has one."""
    total = VerifyReport(records=0)
    for each in reports:
        total = VerifyReport(
            records=total.records + each.records,
            flaw=total.flaw or each.flaw,
            bad=total.bad + each.bad,
            unfinished=total.unfinished + each.unfinished,
            missed=total.missed + each.missed,
        )
    return total


class _RemovedChain(Struct):
    event: Any = None
    chain: Any = None
    to: Any = None
    digest: Any = None


class _ChainWatch:
    """What else the records of one chain tell while it is verified: chains that were deleted, and a foreign record."""

    def __init__(self, chain: str, removed: dict[str, _RemovedChain]) -> None:
        self.foreign: Defect | None = None
        self._writer = b'"writer":"%b"' % chain.encode()
        self._removed = removed

    def pass_on(self, lines: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        for place, line in lines:
            match = _RECORD_START.match(line)
            if self.foreign is None and match is not None and not line.startswith(self._writer, match.end()):
                self.foreign = Defect(place, int(match[4]), "it was written to the chain of another writer")
            if b'"event":"removed"' in line:
                with suppress(DecodeError):
                    end = decode(line, type=_RemovedChain)
                    if end.event == "removed":
                        self._removed[str(end.chain)] = end
            yield place, line


def _is_later(end: _RemovedChain, noted: NotedHead) -> bool:
    """Return whether the noted head may be that of an earlier record of the same chain, or of its last."""
    return type(end.to) is int and (end.to > noted.last or (end.to == noted.last and end.digest == noted.hash))


def _unexplained_loss(
    start: int,
    trimmed: tuple[int, Retention] | None,
    noted: NotedHead | None,
    noted_at: int,
    remaining: tuple[float, int, float],
) -> str:
    """Return why nothing accounts for the records before `start`; empty if something does."""
    if noted is not None and noted.first >= start:
        return ""  # they were gone when the head was noted
    begins = f"it begins with record {start}; those before it are missing"
    if trimmed is None:
        return f"{begins}, and no record says why"
    at, limits = trimmed
    if noted is None:
        if limits == Retention() or limits.explains_loss(*remaining):  # none: of a version that did not write them down
            return ""
        return f"{begins}. Record {at} says that they were trimmed, but they were within its own limits"
    if not noted.first:
        if at <= noted_at:
            return ""
        return f"{begins}. Record {at} says that they were trimmed, and was written after the head was noted"
    if noted.limits.explains_loss(*remaining):
        return ""
    limits_text = ", ".join(f"{each} = {getattr(noted.limits, each)}" for each in ("keep_days", "max_megabytes"))
    return (
        f"{begins}. Records {noted.first} to {start - 1} were there when the head was noted. Record {at} says that "
        f"they were trimmed, but they were within the limits of that time ({limits_text})"
    )


def _parse_record(line: bytes) -> tuple[ChainPosition, bytes, _RecordInfo] | str:
    """A record's place, the hash it follows and what it says; or what is wrong with it."""
    if (match := _RECORD_START.match(line)) is None:
        return "it is not a record of a trail"
    rest = line[match.start(3) :]
    if match[1] != b"%8d" % len(rest):
        return f"it should have {int(match[1])} bytes and has {len(rest)}"
    if sha256(rest).hexdigest().encode() != match[2]:
        return "its hash does not fit: it was changed"
    try:
        return ChainPosition(int(match[4]), match[2]), match[5], _decode_info(b"{" + rest)
    except DecodeError as problem:
        return f"it is not JSON: {problem}"


def measure_arguments(arguments: Json) -> tuple[str, int]:
    """Return the digest of arguments and their size in bytes."""
    encoded = encode_sorted(arguments)
    return digest(encoded), len(encoded)


class AuditRecord(Struct):
    """One event in an audit log."""

    event: str


def notice(event: str, **members: Json) -> bytes:
    """Return the encoded record of an event of the log itself: `opened`, `gap`, `recovered` or `rotated`."""
    return encode({"event": event, **members})


def trimmed(last: ChainPosition, limits: Retention) -> bytes:
    """Return the encoded record of a deletion: the last record deleted, and the limits."""
    return notice("trimmed", to=last.number, digest=last.hash.decode(), **asdict(limits))


def replaced(last: ChainPosition) -> bytes:
    """Return the encoded record of a file that was deleted or replaced: the last record written to it."""
    return notice("replaced", to=last.number, digest=last.hash.decode())


class CallRecord(AuditRecord, omit_defaults=True):
    """A call at a server. A member that does not apply is left out.

    The event of a call that began is `intent` or `outcome`; of one that did not, `refusal`, `answered` or `asked`.
    """

    call: str  # the same in all records of one call
    outcome: str = ""
    principal: str = ""
    address: str = field(default="", name="from")
    server: str = ""
    client: str = ""
    revision: str = ""
    tool: str = ""
    fingerprint: str = ""
    arguments_digest: str = ""
    arguments_bytes: int = 0
    rule: str = ""
    agreed: str = ""
    trace: str = ""
    arguments: Json = UNSET
    asked_digest: str = ""  # of the arguments that a person was asked about, and changed
    repaired: Sequence[str] = ()
    seconds: float | UnsetType = UNSET
    stages_ns: Struct | UnsetType = UNSET
    characters: int | UnsetType = UNSET
    findings: Sequence[str] = ()
    sanitized: Mapping[str, int] = {}  # changes in the result and in messages, counted by class
    would_decide: Sequence[str] = ()  # rules on trial that match, each with its verdict
    upstream: str = ""  # the upstream server of the tool, behind a gateway
    upstream_revision: str = ""
    lossy: Sequence[str] = ()  # what could not be carried between the two revisions, by case


class RejectionRecord(AuditRecord, kw_only=True, omit_defaults=True):
    """An HTTP request that was rejected before its message was read."""

    call: str
    principal: str
    address: str = field(name="from")
    server: str
    tool: str
    outcome: str
    why: str
    left_out: int = 0  # rejections before this one that were not recorded


class OutgoingCallRecord(AuditRecord, kw_only=True):
    """A call of a client, as the client records it."""

    side: str | UnsetType = UNSET
    call: str
    server: str | UnsetType = UNSET
    revision: str | UnsetType = UNSET
    tool: str | UnsetType = UNSET
    fingerprint: str | UnsetType = UNSET
    arguments_digest: str | UnsetType = UNSET
    arguments_bytes: int | UnsetType = UNSET
    rule: str | UnsetType = UNSET
    agreed: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    characters: int | UnsetType = UNSET
    sent: str | UnsetType = UNSET
    seconds: float | UnsetType = UNSET


class ApprovalRecord(AuditRecord, kw_only=True):
    """A step of an approval, or the end of a grant."""

    step: str
    approval: str | UnsetType = UNSET
    digest: str | UnsetType = UNSET
    principal: str | UnsetType = UNSET
    tool: str | UnsetType = UNSET
    fingerprint: str | UnsetType = UNSET
    rule: str | UnsetType = UNSET
    grant: str | UnsetType = UNSET
    by: str
    preview: str | UnsetType = UNSET
    edited_digest: str | UnsetType = UNSET

    @classmethod
    def revocation(cls, grant: str, by: str) -> Self:
        return cls("approval", step="revoked", grant=grant, by=by)


class ConsoleRecord(AuditRecord, kw_only=True):
    """An action of a person at the console."""

    step: str
    by: str
    server: str
    roles: Sequence[str] | UnsetType = UNSET
    call: str | UnsetType = UNSET
    tool: str | UnsetType = UNSET
    fingerprint: str | UnsetType = UNSET
    format: str | UnsetType = UNSET
