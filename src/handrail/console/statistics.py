"""The figures of a server: the last minute, refusals by caller and reason, tools, health, and connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from handrail.console.context import ConsoleContext
from handrail.engine.catalog import title_of
from handrail.guards.policy import Decision
from handrail.model import Object
from handrail.observe.activity import RECENT_MINUTES, Tally, TrialTally

__all__ = ["Figures", "health", "merge_figures", "page_figures", "process_figures"]

MIN_CALLS_FOR_RATE = 5  # with fewer calls, a failure rate means nothing
MAX_PROCESS_ROWS = 100  # of callers and of tools, in one process
MAX_PAGE_ROWS = 20

# The reasons on the page, by outcome; other outcomes go by their own name.
REASON_LABELS = {
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
    """The figures of one process, or of all."""

    last: Tally = field(default_factory=Tally)  # the last sixty seconds
    calls: int = 0  # this and all below: in the last five minutes
    errors: int = 0
    unrecorded: int = 0
    refused: list[tuple[str, str, int]] = []  # caller, outcome, count; most frequent first
    tools: dict[str, Tally] = {}
    trials: dict[str, TrialTally] = {}  # since the start, by rule on trial and its verdict


def process_figures(context: ConsoleContext) -> Figures:
    """Return the figures of this process."""
    minutes = context.feed.minutes
    recent = [*minutes.past, minutes.current][-RECENT_MINUTES:]
    refused: Counter[tuple[str, str]] = Counter()
    tools: dict[str, Tally] = {}
    for minute in recent:
        refused.update(minute.refusals_by_caller)
        for name, tally in minute.tools.items():
            tools.setdefault(name, Tally()).add(tally)
    return Figures(
        minutes.last(context.clock()),
        sum(each.calls for each in recent),
        sum(each.errors for each in recent),
        sum(each.unrecorded for each in recent),
        _refusal_rows(refused),
        dict(_most_called(tools)[:MAX_PROCESS_ROWS]),
        context.feed.trials,
    )


def merge_figures(parts: Iterable[Figures]) -> Figures:
    total, refused, tools = Figures(trials={}), Counter[tuple[str, str]](), dict[str, Tally]()
    for part in parts:
        total.last.add(part.last)
        total.calls += part.calls
        total.errors += part.errors
        total.unrecorded += part.unrecorded
        refused.update({(who, outcome): count for who, outcome, count in part.refused})
        for name, tally in part.tools.items():
            tools.setdefault(name, Tally()).add(tally)
        for rule, trial in part.trials.items():
            total.trials.setdefault(rule, TrialTally()).add(trial)
    total.refused, total.tools = _refusal_rows(refused), tools
    return total


def page_figures(context: ConsoleContext, total: Figures) -> Object:
    """Return the `Figures` of the page."""
    by_caller: Counter[tuple[str, str]] = Counter()
    for who, outcome, count in total.refused:
        by_caller[who, _reason(outcome)] += count
    last = total.last
    return {
        "last": {"calls": last.calls, "errors": last.errors, "refused": last.refused, "p95_ms": _ms(last)},
        "refused": [
            {"who": who, "reason": reason, "calls": count}
            for (who, reason), count in by_caller.most_common(MAX_PAGE_ROWS)
        ],
        "tools": [
            {
                "tool": name,
                "title": title_of(context.find_entry(name)) or name.removeprefix("prompt:"),
                "calls": tally.calls,
                "errors": tally.errors,
                "refused": tally.refused,
                "p95_ms": _ms(tally),
            }
            for name, tally in _most_called(total.tools)[:MAX_PAGE_ROWS]
        ],
        "trials": [_trial_row(each.decision, total.trials) for each in context.guards.policy.audited],
    }


def _trial_row(decision: Decision, trials: Mapping[str, TrialTally]) -> Object:
    trial = trials.get(f"{decision.rule}: {decision.verdict}", TrialTally())
    counts = {"calls": trial.calls, "differs": trial.differs, "last": trial.last}
    return {"rule": decision.rule, "verdict": decision.verdict, **counts}


def health(context: ConsoleContext, total: Figures, pending_count: int, upstream_rows: list[Object]) -> Object:
    """Return the `Health` of the page, from the last five minutes."""
    calls, errors = total.calls, total.errors
    reasons: Counter[str] = Counter()
    for _, outcome, count in total.refused:
        reasons[_reason(outcome)] += count
    refused = reasons.total()
    notes = []
    if total.unrecorded:
        notes.append("Calls were refused because they could not be recorded; the server's log says why.")
    if pending_count:
        notes.append(f"{_count_of(pending_count, 'call')} waiting for approval.")
    entries = Counter(catalog.kind.split()[0] for catalog in context.engine.catalogs.values() for _ in catalog)
    if not entries and not upstream_rows:  # whose tools are known once they are asked
        notes.append("The server has no tools, or all of them are switched off.")
    if context.guards.trail is None:
        notes.append("Calls are not recorded: the audit log is off.")
    level = "good"
    if total.unrecorded or (calls >= MIN_CALLS_FOR_RATE and errors * 2 > calls):
        level = "bad"
    elif (not entries and not upstream_rows) or max(errors, refused) * 10 > calls:
        level = "warn"
    prefix = "Mostly healthy: " if level == "good" else ""
    why = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
    if total.unrecorded:
        sentence = "Calls cannot be recorded, and are refused."
    elif errors and refused:
        failed = f"{errors:,} of {_count_of(calls, 'call')} failed"
        sentence = f"{prefix}{failed} and {refused:,} refused in the last five minutes: {why}."
    elif refused:
        sentence = f"{prefix}{refused:,} of {_count_of(calls, 'call')} refused in the last five minutes: {why}."
    elif errors:
        sentence = f"{prefix}{errors:,} of {_count_of(calls, 'call')} failed in the last five minutes."
    elif calls:
        sentence = "Healthy: no call failed or was refused in the last five minutes."
    else:
        offered = ", ".join(_count_of(count, kind) for kind, count in entries.items()) or "0 tools"
        sentence = f"Idle: {offered}, no calls in the last five minutes."
    if down := [each["name"] for each in upstream_rows if each["state"] == "down"]:
        level = "warn" if level == "good" else level
        names = ", ".join(down[:3]) + (f" and {len(down) - 3} more" if len(down) > 3 else "")
        rest = sentence.removeprefix("Healthy: ").removeprefix(prefix)
        sentence = f"Down: {names}. {rest[:1].upper()}{rest[1:]}"
    if troubles := context.guards.troubles():
        level = "bad"
        sentence = f"Not reachable: {' and '.join(troubles)}. {sentence}"
        notes += [f"{name}: {text}" for name, text in troubles.items()]
    for each in upstream_rows:
        if waiting := each["unseen"] + each["new"] + each["changed"]:
            notes.append(f"{each['name']}: {_count_of(waiting, 'tool')} to look at.")
        elif each["state"] == "stopped":
            notes.append(f"{each['name']} is stopped.")
    return {"level": level, "sentence": sentence, "notes": notes}


def _refusal_rows(refused: Counter[tuple[str, str]]) -> list[tuple[str, str, int]]:
    return [(who, outcome, count) for (who, outcome), count in refused.most_common(MAX_PROCESS_ROWS)]


def _most_called(tools: dict[str, Tally]) -> list[tuple[str, Tally]]:
    return sorted(tools.items(), key=lambda item: (-item[1].calls, item[0]))


def _reason(outcome: str) -> str:
    return REASON_LABELS.get(outcome, outcome.replace("_", " "))


def _ms(tally: Tally) -> float:
    return round(tally.p95 * 1000, 3)


def _count_of(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


# Connections


def connections(context: ConsoleContext) -> list[Object]:
    """Return the `Connection`s of this process, oldest first."""
    now = context.clock()
    return [
        {
            "id": peer.id,
            "client": peer.client,
            "version": peer.version,
            "revision": peer.revision,
            "transport": peer.transport,
            "who": peer.who,
            "from": peer.address,
            "since": peer.since,
            "seen": now if is_open else peer.last_active,
            "open": is_open,
            "calls": calls,
            "worker": context.worker,
        }
        for peer, calls, is_open in context.feed.connected()
    ]


def merge_connections(lists: Iterable[list[Object]]) -> list[Object]:
    return sorted((each for one in lists for each in one), key=lambda each: each["since"])
