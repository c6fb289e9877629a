"""`handrail check`: whether a configuration is right, what is in force, and from where."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from msgspec import Struct, to_builtins

from handrail.cli.codes import Code
from handrail.cli.guarded import Guarded
from handrail.cli.screen import Screen, json_text
from handrail.config import SECTIONS, Config
from handrail.guards.inert import one_line
from handrail.guards.policy import Policy

__all__ = ["run"]

Row = tuple[str, str, str]


def run(args: Namespace, screen: Screen) -> int:
    guarded = Guarded(args)
    config, policy, theirs = guarded.config, guarded.config.policy(), dict[str, Any]()
    doubts, source = [], ""
    if args.target or config.server.target:
        found = guarded.source(args.target)
        server, source = found.load(), found.shown
        theirs = {name: it for name, it in server.engine.guards.items() if not guarded.speaks_of(name)}
        guarded.rule(server)
        policy = server.engine.gate.policy
        doubts = policy.warnings_for(tool.name for tool in server.tools)
    doubts = [*policy.warnings, *doubts]
    if screen.as_json:
        own = {name: _plain(it) for name, it in theirs.items()}
        told = {"file": str(guarded.path or ""), "config": to_builtins(config), "server": own, "warnings": doubts}
        screen.data(told)
        return Code.OK
    screen.say(f"{guarded.path}: all right" if guarded.path else "no handrail.toml: what is built in is in force")
    rows = _settings(config, guarded, {section for name in theirs for section in SECTIONS.get(name, {name})})
    rows += [(name, source, json_text(_plain(it))) for name, it in theirs.items() if name != "policy"]
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
