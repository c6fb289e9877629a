"""`handrail check`: whether a configuration is right, what is in force, and from where."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from msgspec import Struct, to_builtins

from handrail.cli.codes import Code
from handrail.cli.guarded import Guarded
from handrail.cli.screen import Screen, json_text
from handrail.config import Config

__all__ = ["run"]


def run(args: Namespace, screen: Screen) -> int:
    guarded = Guarded(args)
    config, policy = guarded.config, guarded.config.policy()
    is_named = args.target or config.server.target
    names = [tool.name for tool in guarded.source(args.target).load().tools] if is_named else []
    doubts = [*policy.warnings, *(policy.warnings_for(names) if names else [])]
    if screen.as_json:
        screen.data({"file": str(guarded.path or ""), "config": to_builtins(config), "warnings": doubts})
        return Code.OK
    screen.say(f"{guarded.path}: all right" if guarded.path else "no handrail.toml: what is built in is in force")
    rows = [
        (f"{section}.{key}" if key else section, "built in" if value == usual else str(guarded.path), json_text(value))
        for section, key, value, usual in _settings(config)
        if section != "rules"
    ]
    for number, rule in enumerate(policy.decisions, 1):
        rows.append((f"rules[{number}]", str(guarded.path), f"{rule.rule}: {rule.verdict} if {rule.why}"))
    screen.table(rows, indent="  ", styles=("bold", "dim"))
    for doubt in doubts:
        screen.note(f"careful: {doubt}")
    return Code.OK


def _settings(config: Config) -> list[tuple[str, str, Any, Any]]:
    """Section, key, what is in force, what would be without the file."""
    found: list[tuple[str, str, Any, Any]] = []
    usual = Config()
    for section in config.__struct_fields__:
        value, built_in = getattr(config, section), getattr(usual, section)
        if not isinstance(value, Struct):
            found.append((section, "", to_builtins(value), to_builtins(built_in)))
            continue
        for key in value.__struct_fields__:
            found.append((section, key, to_builtins(getattr(value, key)), to_builtins(getattr(built_in, key))))
    return found
