"""The options of a server's guards, and their check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from handrail.approvals.queue import Approvals
from handrail.guards.limits import Rates
from handrail.guards.policy import Policy, Rule, policy_of
from handrail.guards.sanitize import Inspector, Sanitize
from handrail.stores import Store
from handrail.suggest import collection, describe_value, expect, texts

if TYPE_CHECKING:
    from handrail.audit.log import Trail, TrailSettings

FILES_READ: set[str] = set()
"""Configuration files that this process has read, by their real paths: what lies beside a server and is not here is not
in force."""


class GuardOptions(TypedDict, total=False):
    """Guards; the defaults are safe.

    policy: a Policy, or a list of Rules: who may call what (destructive tools ask, all others are allowed)
    rates: rate limits; None: no limit (Rates())
    sanitize: what may leave; None: whatever a tool returns (Sanitize())
    inspectors: functions (tool, result) of your own that check each result
    secrets: further values that must not leave (those of the environment)
    approvals: who is asked about a call, and for how long (Approvals())
    repair: read "5" as 5 where only that fits (False)
    audit: a file for the audit log, .db or .jsonl; or a Trail (no audit log)
    trail: how that file is kept (TrailSettings())
    audit_arguments: log arguments, masked; else a digest of them (False)
    store: where approvals wait, and shared limits are counted: a .db file or a Store (the audit log's, or memory)
    """

    policy: Policy | Sequence[Rule]
    rates: Rates | None
    sanitize: Sanitize | None
    inspectors: Sequence[Inspector]
    secrets: Iterable[str]
    approvals: Approvals
    repair: bool
    audit: str | Path | Trail | None
    trail: TrailSettings
    audit_arguments: bool
    store: Store | str | Path


_MEANT: dict[str, tuple[str, *tuple[type, ...]]] = {
    "rates": ('Rates(principal="10/second") of handrail.guards, or None for no limits', Rates),
    "sanitize": ("Sanitize(…) of handrail.guards, or None for none", Sanitize),
    "approvals": ('Approvals(by="operator") of handrail.guards', Approvals),
    "repair": ("True or False", bool),
    "audit_arguments": ("True or False", bool),
}


def check_guard_options(options: GuardOptions, where: str) -> GuardOptions:
    """Return checked guard options; raise TypeError for a wrong value. A list of rules becomes a policy."""
    guards: dict[str, Any] = {**options}
    for name, (meant, *kinds) in _MEANT.items():
        if guards.get(name) is not None:
            expect(f"{where}: {name}", guards[name], meant, *kinds)
    if "policy" in guards:
        guards["policy"] = policy_of(guards["policy"], f"{where}: policy")
    if "secrets" in guards:
        guards["secrets"] = frozenset(texts(f"{where}: secrets", guards["secrets"]))
    if "inspectors" in guards:
        guards["inspectors"] = collection(f"{where}: inspectors", guards["inspectors"], "functions (tool, result)")
        for each in guards["inspectors"]:
            if not callable(each):
                raise TypeError(
                    f"{where}: inspectors: expected functions (tool, result), got {describe_value(each)} among them"
                )
    # A trail, its settings and a store are recognised by a method: their classes would import SQLite.
    for name, verb, meant in (
        ("audit", "submit", 'a file such as "calls.db" or "calls.jsonl", or a Trail'),
        ("store", "commit", 'a file such as "state.db", or a Store'),
        ("trail", "keep_days", "TrailSettings(…) of handrail.guards"),
    ):
        value = guards.get(name)
        if value is not None and not hasattr(value, verb) and (name == "trail" or not isinstance(value, str | Path)):
            raise TypeError(f"{where}: {name}: expected {meant}, got {describe_value(value)}")
    return cast(GuardOptions, guards)


def configured_store(options: GuardOptions) -> Store | None:
    """Return the store of the options, unless it is a file: that is opened when the server starts."""
    store = options.get("store")
    return None if isinstance(store, str | Path) else store
