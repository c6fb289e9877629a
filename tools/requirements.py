"""Which rules of docs/requirements.md have a passing test, where they have to have one.

Run by `make requirements`, after `make test`. A rule is

    ok     its tests passed in every revision and on every transport of its Rev column
    part   in some of them; the missing ones are named
    none   no test passed

`--strict 1 3 SRV-601` exits with 1 unless every named section or rule is ok.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["REVISIONS", "TRANSPORTS", "Place", "Rule", "places", "read_rules", "report", "revisions_of"]

TRANSPORTS = ("stdio", "memory", "http")
"""A row that names none needs all of these."""

REVISIONS = {
    "R0": "2024-10-07",
    "R1": "2024-11-05",
    "R2": "2025-03-26",
    "R3": "2025-06-18",
    "R4": "2025-11-25",
    "R5": "2026-07-28",
    "P": "pocket",
}
DATED = ("R0", "R1", "R2", "R3", "R4", "R5")
GROUPS = {"all": (*DATED, "P"), "leg": (*DATED[:-1], "P")}

EXCEPTIONS = {
    "SRV-509": "reviewed by a person, see the end of docs/requirements.md",
    "SRV-521": "tasks come later",
    "SRV-522": "tasks come later",
    "CLI-40": "tasks come later",
}
HTTP = {"SRV-606", "SRV-608", "SRV-609", "CLI-12", "CLI-13", "CLI-14", "CLI-15", "CLI-42"}
HTTP |= {"GW-05", "GW-06", "GW-07", "GW-08", "GW-19"}
"""Rules about tokens, sessions, streams and headers: HTTP alone has them, which their Rev column does not say."""
NOTES = {"SRV-422": "without tasks only: the task half comes with them"}

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "docs" / "requirements.md"
RECORD = ROOT / ".requirements.json"

Place = tuple[str, str]
"""Revision as on the wire, transport."""


@dataclass(frozen=True)
class Rule:
    id: str
    rev: str
    section: str

    @property
    def needs(self) -> frozenset[Place]:
        return places(self.rev)


def revisions_of(rev: str) -> tuple[str, ...]:
    """The revisions a Rev column names, by their short names and in their order."""
    text = re.sub(r"\bHTTP\b|\bstdio\b|\bdual\b|\bext\b", " ", rev).strip()
    # `R5 (all)` is a rule of R5 kept in all revisions; any other bracket is a remark.
    text = "all" if re.search(r"\(\s*all\s*\)", text) else re.sub(r"\(.*?\)", " ", text).strip()
    if not text:
        return GROUPS["all"]
    without = ""
    if apart := re.fullmatch(r"(?:(?P<group>all|leg) but|not) (?P<without>R\d|P)", text):
        text, without = apart["group"] or "all", apart["without"]
    named: set[str] = set()
    for word in re.split(r"[\s,]+|×|↔", text):
        named.update(_expand(word, rev))
    named.discard(without)
    return tuple(name for name in REVISIONS if name in named)


def _expand(word: str, rev: str) -> Iterable[str]:
    if word in GROUPS:
        return GROUPS[word]
    if word in REVISIONS:
        return (word,)
    if match := re.fullmatch(r"(R\d)\+", word):
        return DATED[DATED.index(match[1]) :]
    if match := re.fullmatch(r"(R\d)[–-](R\d)", word):
        return DATED[DATED.index(match[1]) : DATED.index(match[2]) + 1]
    raise ValueError(f"Rev column {rev!r}: {word!r} is not understood")


def places(rev: str) -> frozenset[Place]:
    """Every revision and transport in which a rule with this Rev column has to be seen."""
    named = [transport for word, transport in (("HTTP", "http"), ("stdio", "stdio")) if re.search(rf"\b{word}\b", rev)]
    return frozenset(
        (REVISIONS[revision], transport) for revision in revisions_of(rev) for transport in named or TRANSPORTS
    )


def read_rules(text: str) -> Iterator[Rule]:
    """The rows of every table that has a Rev column."""
    section = ""
    in_table = False
    for line in text.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").strip()
        if not line.startswith("|"):
            in_table = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[:2] == ["Id", "Rev"]:
            in_table = True
        elif in_table and not line.startswith("|-"):
            rev = f"{cells[1]} HTTP" if cells[0] in HTTP else cells[1]
            yield Rule(id=cells[0], rev=rev, section=section)


def read_record(text: str) -> dict[str, set[Place]]:
    """Where each id was seen, from what the test run wrote; the place `("*", "*")` stands for everywhere."""
    seen: dict[str, set[Place]] = {}
    for entry in json.loads(text).values():
        for rule in entry["ids"]:
            seen.setdefault(rule, set()).update((revision, transport) for revision, transport in entry["ran"])
    return seen


def status(rule: Rule, seen: set[Place]) -> tuple[str, frozenset[Place]]:
    """`ok`, `part` or `none`, and the places that are missing."""
    if ("*", "*") in seen:
        return "ok", frozenset()
    missing = rule.needs - seen
    if not missing:
        return "ok", missing
    return ("part" if len(missing) < len(rule.needs) else "none"), missing


def _named(missing: frozenset[Place]) -> str:
    parts = []
    for transport in sorted({transport for _, transport in missing}):
        names = [short for short, wire in REVISIONS.items() if (wire, transport) in missing]
        parts.append(f"{transport} {'all' if len(names) == len(REVISIONS) else ' '.join(names)}")
    return "; ".join(parts)


def report(rules: Sequence[Rule], seen: dict[str, set[Place]], strict: Sequence[str] = ()) -> tuple[list[str], bool]:
    """The lines to print, and whether everything in `strict` (numbers of sections, ids) is ok."""
    lines: list[str] = []
    failed: list[str] = []
    summary = ["Totals", ""]
    sections = dict.fromkeys(rule.section for rule in rules)
    for section in sections:
        lines += [section, ""]
        totals = {"ok": 0, "part": 0, "none": 0}
        for rule in (rule for rule in rules if rule.section == section):
            word, missing = status(rule, seen.get(rule.id, set()))
            totals[word] += 1
            remarks = [f"missing: {_named(missing)}"] if word == "part" else []
            remarks += [table[rule.id] for table in (EXCEPTIONS, NOTES) if rule.id in table]
            lines.append(f"  {word:<5} {rule.id:<8} {'; '.join(remarks)}".rstrip())
            wanted = rule.id in strict or section.split()[0] in strict
            if wanted and word != "ok" and rule.id not in EXCEPTIONS:
                failed.append(rule.id)
        lines.append("")
        counts = ", ".join(f"{count} {word}" for word, count in totals.items() if count)
        summary.append(f"  {section}: {counts}")
    lines += summary
    known = {rule.id for rule in rules} | {section.split()[0] for section in sections}
    failed += [f"{name} (no such section or id)" for name in strict if name not in known]
    if failed:
        lines.append(f"not ok, but has to be: {', '.join(failed)}")
    return lines, not failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Which rules of docs/requirements.md have a passing test.")
    parser.add_argument("--strict", nargs="+", default=[], metavar="SECTION", help="sections or ids to insist on")
    strict: list[str] = parser.parse_args().strict
    if not RECORD.exists():
        print("No record of a test run yet: run `make test` first.")
    seen = read_record(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    lines, fine = report(list(read_rules(RULES.read_text("utf-8"))), seen, strict)
    print("\n".join(lines))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
