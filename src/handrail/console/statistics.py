"""The figures of a server: its last sixty seconds, who was refused and why, its tools, and how it is, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import Struct, field

from handrail.engine.catalog import title_of
from handrail.model import Object
from handrail.observe.per_minute import RECENT, Tally

if TYPE_CHECKING:
    from handrail.console import Console

__all__ = ["Figures", "figures", "health", "merged", "shown"]

FEW = 5  # calls of which nothing follows
MAX_LISTED = 100  # callers and tools, of one process
MAX_SHOWN = 20

# Outcomes that are one reason to whoever looks; others are called as they are.
REASONS = {
    "overloaded": "rate limit",
    "throttled": "rate limit",
    "forbidden": "rule",
    "denied": "denied by a person",
    "pending": "waiting for approval",
    "bad_arguments": "wrong arguments",
    "bad_params": "invalid request",
    "unrecorded": "not recorded",
}


class Figures(Struct):
    """Of one process, or of all."""

    last: Tally = field(default_factory=Tally)  # the last sixty seconds
    calls: int = 0  # of the last five minutes, like all that follows
    errors: int = 0
    unrecorded: int = 0
    refused: list[tuple[str, str, int]] = []  # who, the outcome, how often; most often first
    tools: dict[str, Tally] = {}


def figures(console: Console) -> Figures:
    """What this process knows."""
    minutes = console.feed.minutes
    recent = [*minutes.past, minutes.now][-RECENT:]
    refused: Counter[tuple[str, str]] = Counter()
    tools: dict[str, Tally] = {}
    for minute in recent:
        refused.update(minute.whose)
        for name, tally in minute.tools.items():
            tools.setdefault(name, Tally()).add(tally)
    return Figures(
        minutes.last(console.clock()),
        sum(each.calls for each in recent),
        sum(each.errors for each in recent),
        sum(each.unrecorded for each in recent),
        _listed(refused),
        dict(_most_called(tools)[:MAX_LISTED]),
    )


def merged(each: Iterable[Figures]) -> Figures:
    made, refused, tools = Figures(), Counter[tuple[str, str]](), dict[str, Tally]()
    for one in each:
        made.last.add(one.last)
        made.calls += one.calls
        made.errors += one.errors
        made.unrecorded += one.unrecorded
        refused.update({(who, how): count for who, how, count in one.refused})
        for name, tally in one.tools.items():
            tools.setdefault(name, Tally()).add(tally)
    made.refused, made.tools = _listed(refused), tools
    return made


def shown(console: Console, of: Figures) -> Object:
    """The `Figures` of the page."""
    by_caller: Counter[tuple[str, str]] = Counter()
    for who, how, count in of.refused:
        by_caller[who, _reason(how)] += count
    last = of.last
    return {
        "last": {"calls": last.calls, "errors": last.errors, "refused": last.refused, "p95_ms": _ms(last)},
        "refused": [
            {"who": who, "reason": why, "calls": count} for (who, why), count in by_caller.most_common(MAX_SHOWN)
        ],
        "tools": [
            {
                "tool": name,
                "title": title_of(console.engine.catalog.get(name)) or name,
                "calls": tally.calls,
                "errors": tally.errors,
                "refused": tally.refused,
                "p95_ms": _ms(tally),
            }
            for name, tally in _most_called(of.tools)[:MAX_SHOWN]
        ],
    }


def health(console: Console, of: Figures, waiting: int) -> Object:
    """A `Health`: what the last five minutes say."""
    tools, calls, errors = len(list(console.engine.catalog)), of.calls, of.errors
    reasons: Counter[str] = Counter()
    for _, how, count in of.refused:
        reasons[_reason(how)] += count
    refused = reasons.total()
    notes = []
    if of.unrecorded:
        notes.append("Calls were refused because they could not be recorded; the server's log says why.")
    if waiting:
        notes.append(f"{_many(waiting, 'call')} waiting for approval.")
    if not tools:
        notes.append("The server has no tools, or all of them are switched off.")
    if console.gate.trail is None:
        notes.append("Calls are not recorded: the audit log is off.")
    level = "good"
    if of.unrecorded or (calls >= FEW and errors * 2 > calls):
        level = "bad"
    elif not tools or max(errors, refused) * 10 > calls:
        level = "warn"
    begin = "Mostly healthy: " if level == "good" else ""
    why = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
    if of.unrecorded:
        sentence = "Calls cannot be recorded, and are refused."
    elif errors and refused:
        failed = f"{errors:,} of {_many(calls, 'call')} failed"
        sentence = f"{begin}{failed} and {refused:,} refused in the last five minutes: {why}."
    elif refused:
        sentence = f"{begin}{refused:,} of {_many(calls, 'call')} refused in the last five minutes: {why}."
    elif errors:
        sentence = f"{begin}{errors:,} of {_many(calls, 'call')} failed in the last five minutes."
    elif calls:
        sentence = "Healthy: no call failed or was refused in the last five minutes."
    else:
        sentence = f"Idle: {_many(tools, 'tool')}, no calls in the last five minutes."
    return {"level": level, "sentence": sentence, "notes": notes}


def _listed(refused: Counter[tuple[str, str]]) -> list[tuple[str, str, int]]:
    return [(who, how, count) for (who, how), count in refused.most_common(MAX_LISTED)]


def _most_called(tools: dict[str, Tally]) -> list[tuple[str, Tally]]:
    return sorted(tools.items(), key=lambda item: (-item[1].calls, item[0]))


def _reason(outcome: str) -> str:
    return REASONS.get(outcome, outcome.replace("_", " "))


def _ms(tally: Tally) -> float:
    return round(tally.p95 * 1000, 3)


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
