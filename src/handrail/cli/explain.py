"""`handrail explain`: what each guard would say to a call, and which rule decides. Nothing is run or written."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from handrail.cli.codes import Code, Usage
from handrail.cli.guarded import Guarded
from handrail.cli.screen import Screen
from handrail.cli.words import arguments, document
from handrail.engine.catalog import Entry
from handrail.guards.rates import Rates
from handrail.model import Object, Principal
from handrail.revisions import REVISIONS
from handrail.schema.explain import closest
from handrail.schema.repair import repair
from handrail.server import Server

__all__ = ["run"]

Stage = tuple[str, str, str]


def run(args: Namespace, screen: Screen) -> int:
    if args.call != "call":
        raise Usage(f"explain: {args.call!r}: only a call can be explained: handrail explain call TOOL KEY=VALUE")
    guarded = Guarded(args)
    server = guarded.source(args.server).load()
    guarded.rule(server)
    if args.revision not in REVISIONS:
        raise Usage(f"--revision: {args.revision!r} is not one of {', '.join(REVISIONS)}")
    entry = server.engine.catalog.get(args.tool)
    if entry is None:
        near = closest(args.tool, (each.name for each in server.tools))
        raise Usage(f"{server.name} has no tool {args.tool!r}" + (f"; did you mean {near!r}?" if near else ""))
    if args.arguments_json is None:
        given = arguments(args.words, {**entry.tool.input_schema, "required": []})
    else:
        given = document(args.arguments_json)
    stages, allowed = _stages(server, entry, Principal(args.as_, frozenset(args.scope)), given, args.revision)
    stages.append(_audit(guarded, server))
    if screen.as_json:
        screen.data([{"stage": stage, "verdict": verdict, "why": why} for stage, verdict, why in stages])
    else:
        screen.table(stages, styles=("bold",))
    return Code.OK if allowed else Code.DENIED


def _audit(guarded: Guarded, server: Server) -> Stage:
    audit, own = guarded.config.audit, server.engine.guards.get("audit")
    if own is not None and not guarded.speaks_of("audit"):
        return "audit", "on", str(own) if isinstance(own, str | Path) else "where its author wants it"
    return "audit", "on" if audit.on else "off", audit.file or "in the state folder"


def _stages(server: Server, entry: Entry, who: Principal, given: Object, revision: str) -> tuple[list[Stage], bool]:
    gate, policy = server.engine.gate, server.engine.gate.policy
    hiding = policy.hides(who, entry.facts, revision)
    stages: list[Stage] = []
    if hiding is not None:
        return [("find", "hidden", f"answered as an unknown tool by {hiding.rule}: {hiding.why}")], False
    if not entry.scopes <= who.scopes:
        lacking = ", ".join(sorted(entry.scopes - who.scopes))
        return [("find", "hidden" if entry.hide else "forbidden", f"its author wants the scope {lacking}")], False
    stages.append(("find", "listed", "for this caller"))
    rates = server.engine.guards.get("rates", Rates())
    if rates is None or (who.id == "local" and not rates.local):
        stages.append(("limit", "off", "" if rates is None else "for the user of this machine, but for a tool's own"))
    else:
        stages.append(("limit", "on", f"{rates.principal or 'any number'} for each caller"))
    if entry.input.valid(given):
        stages.append(("validate", "valid", ""))
    else:
        found = repair(entry.input, given) if gate.repairs else None
        if found is None:
            stages.append(("validate", "refused", entry.bad_arguments(given).text))
            return stages, False
        given = found[0]
        stages.append(("validate", "repaired", ", ".join(each.path for each in found[1])))
    for name, matched, why in policy.explain(who, entry.facts, given, revision)[:-1]:  # the last is what is decided
        stages.append((f"rule {name}", "matches" if matched else "does not", why))
    decision = policy.decide(who, entry.facts, given, revision)
    stages.append(("decide", decision.verdict, f"by {decision.rule}: {decision.why}"))
    if decision.verdict == "deny":
        return stages, False
    if decision.verdict == "ask":
        options = gate.desk.options
        stages.append(("approve", options.by, f"held {options.wait:g} s, void after {options.expires:g} s"))
    stages.append(("run", "not now", "this only explains"))
    stages.append(("sanitize", "off" if gate.sanitizer is None else "on", ""))
    return stages, True
