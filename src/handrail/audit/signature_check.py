"""Whether an audit log is the one that was signed: what its checkpoints, and copies of them elsewhere, say of it.

Two passes: the first reads the checkpoints, the second, which `verify` shares, looks for the records they name. A hash
in a chain that `verify` has accepted stands for all records before it, so one record for each head is enough.

Trust begins with one public key. It goes on to the key that a checkpoint names as the next, and the key before counts
for nothing that comes later. A checkpoint of another key is no defect where a trusted one covers it: it was in the log
when that was signed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

from msgspec import DecodeError, Struct, ValidationError, convert
from msgspec.json import decode

from handrail.audit.checkpoints import Statement
from handrail.audit.format import BEGINNING, Defect, NotedHead, Retention, position_of, time_of
from handrail.audit.signing import is_signed
from handrail.model import Json

__all__ = ["Chains", "SignatureCheck", "SignatureReport"]

Chains = Iterable[tuple[str, Iterable[tuple[str, bytes]]]]
"""The chains of a log by their names, each with its lines and where they stand. A file has one, without a name."""
CHECKPOINT, REMOVED = b'"event":"checkpoint"', b'"event":"removed"'
GRACE_SECONDS = 60.0  # that a checkpoint may be late by, beside its own interval


class SignatureReport(Struct, frozen=True, kw_only=True):
    """What is signed. `flaws` are signs of tampering, the first of a chain first."""

    key: str  # the last key that is trusted
    checkpoints: int = 0  # in the log, by a trusted key
    copies: int = 0  # elsewhere, by a trusted key
    signed: dict[str, int] = {}  # the last record that is signed, by the chain
    at: str = ""  # when the last checkpoint was signed
    unsigned: int = 0  # records after the last one that is signed, the record of the last checkpoint among them
    open: tuple[str, ...] = ()  # writers that sign and have not signed their end
    other_keys: tuple[str, ...] = ()
    flaws: tuple[Defect, ...] = ()


class _Document(Struct, frozen=True):
    """A checkpoint as it is in the log, or elsewhere."""

    statement: dict[str, Json]
    signature: str
    event: str = ""


class _Checkpoint(NamedTuple):
    place: str
    chain: str | None  # None: it is a copy
    number: int
    statement: Statement
    signature: str  # with the key that the statement names: any other is none


class _Head(NamedTuple):
    number: int
    hash: bytes
    first: int
    limits: Retention
    time: str


class SignatureCheck:
    """One check of one log. `chains` are those of the first pass; `watch` gets the same again."""

    def __init__(self, key: str, chains: Chains, copies: Iterable[tuple[str, bytes]] = ()) -> None:
        self._flaws: list[Defect] = []
        # The copies first: a copy is made after its record is in the log.
        copied = [each for place, line in copies if (each := self._read(place, line, None)) is not None]
        logged = [
            each
            for chain, lines in chains
            for place, line in lines
            if CHECKPOINT in line and (each := self._read(place, line, chain)) is not None
        ]
        self.key, successors = _follow(key, [*logged, *copied])
        self._signatures = {each.signature for each in logged}
        self._trusted = [each for each in logged if _is_trusted(each, successors)]
        self._others = [each for each in logged if not _is_trusted(each, successors)]
        self._copies = [each for each in copied if _is_trusted(each, successors)]
        self._heads = _heads_by_chain([*self._trusted, *self._copies])
        self._signed = {chain: heads[-1].number for chain, heads in self._heads.items()}
        self._wanted = {(chain, head.hash) for chain, heads in self._heads.items() for head in heads}
        self._present: set[tuple[str, bytes]] = set()
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._oldest: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._ends: dict[str, int] = {}  # of chains that were deleted whole, as a record of another says
        self._tail_times: dict[str, list[float]] = {}  # of each writer: its first and last record that is not signed

    def _read(self, place: str, line: bytes, chain: str | None) -> _Checkpoint | None:
        """Return the checkpoint of a line; None if the line is none, or is of no use."""
        position = None if chain is None else position_of(line)
        number = position.number if position else 0
        try:
            document = decode(line, type=_Document)
            if chain is not None and document.event != "checkpoint":
                return None
            statement = convert(document.statement, Statement)
            for head in statement.heads.values():
                NotedHead.parse(head)
        except (DecodeError, ValidationError, ValueError, RecursionError) as problem:
            self._flaws.append(Defect(place, number, f"it is no checkpoint: {problem}"))
            return None
        if not is_signed(statement.key, document.signature, document.statement):
            self._flaws.append(Defect(place, number, "the signature of the checkpoint does not fit: it was changed"))
            return None
        return _Checkpoint(place, chain, number, statement, document.signature)

    def watch(self, chains: Chains) -> Iterator[tuple[str, Iterator[tuple[str, bytes]]]]:
        """Pass the chains on, and look for what is signed."""
        for chain, lines in chains:
            yield chain, self._watch_lines(chain, lines)

    def _watch_lines(self, chain: str, lines: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        for place, line in lines:
            position = position_of(line)
            if position is not None and line.endswith(b"\n"):
                if chain not in self._first:
                    self._first[chain], self._oldest[chain] = position.number, time_of(line) or 0.0
                self._last[chain] = position.number
                self._sizes[chain] = self._sizes.get(chain, 0) + len(line)
                if (chain, position.hash) in self._wanted:
                    self._present.add((chain, position.hash))
                if position.number > self._signed.get(chain, 0):
                    self._note_unsigned(line)
                if REMOVED in line:
                    self._note_removed(line)
            yield place, line

    def _note_unsigned(self, line: bytes) -> None:
        try:
            writer = decode(line, type=_Written).writer
        except DecodeError:
            return  # `verify` names it
        if (at := time_of(line)) is not None:
            self._tail_times.setdefault(writer, [at, at])[1] = at

    def _note_removed(self, line: bytes) -> None:
        with suppress(DecodeError):
            removed = decode(line, type=_Removed)
            if removed.event == "removed":
                self._ends[removed.chain] = removed.to

    def report(self, *, is_noted: bool = False, now: float | None = None) -> SignatureReport:
        """Return what is signed, when all lines have been watched. `is_noted`: a head says what may be missing."""
        now = time.time() if now is None else now
        signed: dict[str, int] = {}
        for chain, heads in self._heads.items():
            flaw, number = self._check_chain(chain, heads, now)
            flaw = flaw or (None if is_noted else self._check_beginning(chain, heads, now))
            if flaw is not None:
                self._flaws.append(flaw)
            if number:
                signed[chain] = number
        if not self._trusted:
            self._flaws.append(Defect("the log", 0, f"nothing in it is signed with {self.key}"))
        self._flaws += [_foreign(each) for each in self._others if each.number > signed.get(each.chain or "", 0)]
        self._flaws += self._removed()
        ends = {each.statement.writer: each.statement for each in self._trusted}
        open_writers = [writer for writer, statement in ends.items() if not statement.closes]
        for writer in open_writers:
            first, last = self._tail_times.get(writer, (0.0, 0.0))
            if last - first > 2 * ends[writer].every_seconds + GRACE_SECONDS:
                text = f"writer {writer} has written for {last - first:.0f} s after its last checkpoint, and one is due"
                text += f" every {ends[writer].every_seconds:g} s: checkpoints were removed, or could not be written"
                self._flaws.append(Defect("the end", 0, text))
        return SignatureReport(
            key=self.key,
            checkpoints=len(self._trusted),
            copies=len(self._copies),
            signed=signed,
            at=max((each.statement.time for each in self._trusted), default=""),
            unsigned=sum(last - signed.get(chain, 0) for chain, last in self._last.items()),
            open=tuple(open_writers),
            other_keys=tuple(dict.fromkeys(each.statement.key for each in self._others)),
            flaws=tuple(self._flaws),
        )

    def _check_chain(self, chain: str, heads: list[_Head], now: float) -> tuple[Defect | None, int]:
        """Return what is wrong with the first head that is not in the chain, and the number of the last that is."""
        first, last = self._first.get(chain, 0), self._last.get(chain, 0)
        subject = f"writer {chain}: " if chain else ""
        good = 0
        for head in heads:
            if (chain, head.hash) in self._present:
                good = head.number
            elif head.number < first or (not last and self._is_over(chain, head, now)):
                continue  # it was trimmed
            elif not last:
                return Defect(
                    "the log", 1, f"{subject}all records are missing: {head.number} was signed {head.time}"
                ), 0
            elif head.number > last:
                text = (
                    f"{subject}records {last + 1} to {head.number} are missing: the end was cut off after {head.time}"
                )
                return Defect("the end", last + 1, text), good
            else:
                start = max(good + 1, first)
                text = f"{subject}records {start} to {head.number} are not those that were signed {head.time}"
                return Defect("the log", start, f"{text}: the chain was written anew"), good
        return None, good

    def _is_over(self, chain: str, head: _Head, now: float) -> bool:
        """Return whether the whole chain may have been deleted by its age."""
        if head.limits.keep_days and self._ends.get(chain, 0) >= head.number:
            return True
        try:
            return head.limits.explains_loss(datetime.fromisoformat(head.time).timestamp(), 0, now)
        except ValueError:
            return False

    def _check_beginning(self, chain: str, heads: list[_Head], now: float) -> Defect | None:
        """Return what is wrong with a beginning that is gone: it has to be beyond limits that are signed."""
        start, first = self._first.get(chain, 0), min(head.first for head in heads)
        remaining = self._oldest.get(chain, now), self._sizes.get(chain, 0), now
        if first >= start or any(head.limits.explains_loss(*remaining) for head in heads):
            return None
        text = f"records {first} to {start - 1} are missing, and were within the limits that are signed"
        return Defect(BEGINNING, first, f"writer {chain}: {text}" if chain else text)

    def _removed(self) -> Iterator[Defect]:
        """Yield the copies of checkpoints that are not in the log and should be: a copy is made after the record."""
        for each in self._copies:
            heads = [(chain, NotedHead.parse(head).hash.encode()) for chain, head in each.statement.heads.items()]
            if each.signature not in self._signatures and heads and self._present.issuperset(heads):
                yield Defect(
                    each.place, 0, f"the checkpoint of {each.statement.time} is not in the log: it was removed"
                )


class _Written(Struct):
    writer: str = ""


class _Removed(Struct):
    event: str = ""
    chain: str = ""
    to: int = 0


def _follow(key: str, checkpoints: list[_Checkpoint]) -> tuple[str, dict[str, _Checkpoint | None]]:
    """Return the last key that is trusted, and for each trusted key the checkpoint with which the next took over."""
    successors: dict[str, _Checkpoint | None] = {}
    while key not in successors:
        own = [each for each in checkpoints if each.statement.key == key and each.statement.next]
        successors[key] = takeover = min(own, key=lambda each: each.statement.time, default=None)
        if takeover is None:
            break
        key = takeover.statement.next
    return key, successors


def _is_trusted(checkpoint: _Checkpoint, successors: dict[str, _Checkpoint | None]) -> bool:
    """Return whether the checkpoint was signed with a trusted key, and not after the next key had taken over."""
    statement = checkpoint.statement
    if statement.key not in successors:
        return False
    takeover = successors[statement.key]
    if takeover is None or statement == takeover.statement:
        return True
    is_later = checkpoint.chain == takeover.chain and checkpoint.number > takeover.number
    return statement.time <= takeover.statement.time and not is_later


def _foreign(checkpoint: _Checkpoint) -> Defect:
    text = (
        f"a checkpoint is signed with {checkpoint.statement.key}: a foreign key, or one whose place another has taken"
    )
    return Defect(checkpoint.place, checkpoint.number, text)


def _heads_by_chain(checkpoints: Iterable[_Checkpoint]) -> dict[str, list[_Head]]:
    heads: dict[str, set[_Head]] = {}
    for each in checkpoints:
        for chain, text in each.statement.heads.items():
            head = NotedHead.parse(text)
            signed = _Head(head.last, head.hash.encode(), head.first, head.limits, each.statement.time)
            heads.setdefault(chain, set()).add(signed)
    return {chain: sorted(each, key=lambda head: head.number) for chain, each in heads.items()}
