"""What the guards would do: the settings in force (`handrail check`), and each guard's word on a call (`explain`)."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from handrail.cli.arguments import arguments, document, unknown_tool
from handrail.cli.exit_codes import Code, Usage
from handrail.cli.guarded_server import Guarded
from handrail.cli.terminal import Screen, json_text
from handrail.config import SECTIONS, Config
from handrail.engine.catalog import Entry
from handrail.guards.limits import ANONYMOUS, LOCAL, Plans, Shares
from handrail.guards.policy import Policy
from handrail.guards.rates import Rates
from handrail.model import Object, Principal
from handrail.revisions import REVISIONS
from handrail.schema.repair import repair
from handrail.server import Server
from handrail.text.controls import one_line

__all__ = ["run_check", "run_explain"]

Row = tuple[str, str, str]


def run_check(args: Namespace, screen: Screen) -> int:
    guarded = Guarded(args, args.target)
    config, policy, theirs = guarded.config, guarded.config.policy(), dict[str, Any]()
    doubts, source, server = policy.warnings + guarded.self_approval(None), "", None
    if args.target or config.server.target:
        found = guarded.source(args.target)
        server, source = found.load(), found.shown
        theirs = {name: it for name, it in server.engine.guards.items() if not guarded.speaks_of(name)}
        guarded.rule(server)
        policy = server.engine.gate.policy
        doubts = guarded.doubts(server, server.engine.catalog)
    if screen.as_json:
        own = {name: _plain(it) for name, it in theirs.items()}
        told = {"file": str(guarded.path or ""), "config": to_builtins(config), "server": own, "warnings": doubts}
        over_http, over_stdio = guarded.deciders(server)
        screen.data({**told, "approved_by": {"http": over_http, "stdio": over_stdio}})
        return Code.OK
    screen.say(f"{guarded.path}: all right" if guarded.path else "no handrail.toml: what is built in is in force")
    rows = _settings(config, guarded, {section for name in theirs for section in SECTIONS.get(name, {name})})
    rows += [(name, source, json_text(_plain(it))) for name, it in theirs.items() if name != "policy"]
    over_http, over_stdio = guarded.deciders(server)
    set_in = source if "approvals" in theirs else str(guarded.path) if guarded.speaks_of("approvals") else "built in"
    rows.append(("calls are approved by", set_in, f"{over_http} over HTTP, {over_stdio} over standard input"))
    whose = source if "policy" in theirs else str(guarded.path)
    for number, rule in enumerate(policy.decisions, 1):
        rows.append((f"rules[{number}]", whose, f"{rule.rule}: {rule.verdict} if {rule.why}"))
    screen.table(rows, indent="  ", styles=("bold", "dim"))
    for doubt in doubts:
        screen.note(f"careful: {doubt}")
    return Code.OK


def _settings(config: Config, guarded: Guarded, others: set[str]) -> list[Row]:
    """Each setting, where it is from, and what it is; those of `others` are not in force."""
    found: list[Row] = []
    for section in config.__struct_fields__:
        value, written = getattr(config, section), guarded.written.get(section)
        if section == "rules" or section in others:
            continue
        keys = value.__struct_fields__ if isinstance(value, Struct) else ("",)
        for key in keys:
            is_written = written is not None and (not key or key in written)
            held = to_builtins(getattr(value, key) if key else value)
            name = f"{section}.{key}" if key else section
            found.append((name, str(guarded.path) if is_written else "built in", json_text(held)))
    return found


def _plain(value: Any) -> Any:
    """What the author of a server said in Python, as far as it can be shown."""
    if isinstance(value, Policy):
        return [to_builtins(each) for each in value.decisions]
    if value is None or isinstance(value, bool):
        return value
    return to_builtins(value) if isinstance(value, Struct) else one_line(str(value), 200)


# Explaining: nothing is run or written


def run_explain(args: Namespace, screen: Screen) -> int:
    if args.call != "call":
        raise Usage(f"explain: {args.call!r}: only a call can be explained: handrail explain call TOOL KEY=VALUE")
    guarded = Guarded(args, args.server)
    server = guarded.source(args.server, "add --server FILE").load()
    guarded.rule(server)
    if args.revision not in REVISIONS:
        raise Usage(f"--revision: {args.revision!r} is not one of {', '.join(REVISIONS)}")
    entry = server.engine.catalog.get(args.tool)
    if entry is None:
        raise unknown_tool(args.tool, [each.name for each in server.tools])
    if args.arguments_json is None:
        given = arguments(args.words, {**entry.tool.input_schema, "required": []})
    else:
        given = document(args.arguments_json)
    who = Principal(args.as_, frozenset(args.scope))
    by = guarded.deciders(server)[args.as_ == LOCAL]
    stages, allowed = _stages(server, entry, who, given, args.revision, by)
    stages.append(_audit(guarded, server))
    if screen.as_json:
        screen.data([{"stage": stage, "verdict": verdict, "why": why} for stage, verdict, why in stages])
    else:
        screen.table(stages, styles=("bold",))
    return Code.OK if allowed else Code.DENIED


def _audit(guarded: Guarded, server: Server) -> Row:
    audit, own = guarded.config.audit, server.engine.guards.get("audit")
    if own is not None and not guarded.speaks_of("audit"):
        return "audit", "on", str(own) if isinstance(own, str | Path) else "where its author wants it"
    return "audit", "on" if audit.on else "off", audit.file or "in the state folder"


def _limits(rates: Rates | None, who: Principal, tool: str) -> list[str]:
    """All that holds for these calls."""
    if rates is None:
        return []
    plan = Plans(rates)[tool]
    charges = {LOCAL: plan.local, ANONYMOUS: plan.strange}.get(who.id, plan.known)
    slots = [f"{plan.slots} of this tool at once"] if plan.slots else []
    share = Shares(rates).most(who.id, tool)
    return (
        [each.limit for each in charges] + slots + ([f"{share} of this tool at once for one caller"] if share else [])
    )


def _stages(
    server: Server, entry: Entry, who: Principal, given: Object, revision: str, by: str
) -> tuple[list[Row], bool]:
    gate, policy = server.engine.gate, server.engine.gate.policy
    hiding = policy.hides(who, entry.facts, revision)
    stages: list[Row] = []
    if hiding is not None:
        return [("find", "hidden", f"answered as an unknown tool by {hiding.rule}: {hiding.why}")], False
    if not entry.scopes <= who.scopes:
        lacking = ", ".join(sorted(entry.scopes - who.scopes))
        return [("find", "hidden" if entry.hide else "forbidden", f"its author wants the scope {lacking}")], False
    stages.append(("find", "listed", "for this caller"))
    limits = _limits(server.engine.guards.get("rates", Rates()), who, entry.tool.name)
    stages.append(("limit", "on" if limits else "off", ", ".join(limits)))
    if entry.input.valid(given):
        stages.append(("validate", "valid", ""))
    else:
        found = repair(entry.input, given) if gate.repairs else None
        if found is None:
            stages.append(("validate", "refused", entry.bad_arguments(given).text))
            return stages, False
        given = found[0]
        stages.append(("validate", "repaired", ", ".join(each.path for each in found[1])))
    for name, matched, why in policy.explain(who, entry.facts, given, revision):
        stages.append((f"rule {name}", "matches" if matched else "does not", why))
    decision = policy.decide(who, entry.facts, given, revision)
    stages.append(("decide", decision.verdict, f"by {decision.rule}: {decision.why}"))
    if decision.verdict == "deny":
        return stages, False
    if decision.verdict == "ask":
        options = gate.desk.options
        stages.append(("approve", by, f"held {options.wait:g} s, void after {options.expires:g} s"))
    stages.append(("run", "not now", "this only explains"))
    stages.append(("sanitize", "off" if gate.sanitizer is None else "on", ""))
    return stages, True
