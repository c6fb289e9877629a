"""`handrail stop`: revoke an upstream server, a tool or a caller in all processes that serve from here."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace

from handrail.audit.format import ConsoleRecord
from handrail.audit.log import open_trail
from handrail.cli.approve import operator_name
from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.gateway import records_of
from handrail.cli.load_server import CommandConfig
from handrail.cli.terminal import Screen
from handrail.client.state_dir import StateDirectory, state_folder
from handrail.gateway.stops import StopKind, delete_stop, put_stop, read_stops
from handrail.stores import Store
from handrail.text.controls import one_line

__all__ = ["run_stop", "write_record"]


def run_stop(args: Namespace, screen: Screen) -> int:
    return asyncio.run(_run(args, screen))


async def _run(args: Namespace, screen: Screen) -> int:
    choices: dict[StopKind, str | None] = {"upstream": args.upstream, "tool": args.tool, "caller": args.caller}
    things = [(kind, name) for kind, name in choices.items() if name]
    if len(things) > 1 or (args.undo and not things):
        raise UsageError("name one of them: the NAME of an upstream, --tool NAME or --caller ID")
    StateDirectory(state_folder(os.environ)).prepare()
    command_config = CommandConfig(args)
    store = await command_config.open_store(command_config.approval_place())
    try:
        if things:
            await _change(*things[0], args, command_config, store, screen)
        stops = await read_stops(store)
    finally:
        await store.close()
    if screen.as_json:
        screen.data([{"kind": kind, "name": name, "reason": reason} for (kind, name), reason in stops.items()])
    elif stops and not things:
        screen.table([(kind, name, reason) for (kind, name), reason in stops.items()])
    elif not things:
        screen.write("nothing is stopped")
    return ExitCode.OK


async def write_record(step: str, command_config: CommandConfig, store: Store) -> None:
    """Record what the operator does in the audit log, if there is one."""
    audit, place = command_config.config.audit, command_config.config.audit_place(state_folder(os.environ))
    if not audit.on:
        return
    trail = open_trail(store if place == command_config.approval_place() else place, audit.kept.unsigned, store=store)
    try:
        await trail.write(ConsoleRecord("console", step=step, by=operator_name(), server=""))
    finally:
        await trail.close()


async def _change(
    kind: StopKind, name: str, args: Namespace, command_config: CommandConfig, store: Store, screen: Screen
) -> None:
    """Record what the operator does in the audit log, and do it."""
    step = f"{'started' if args.undo else 'stopped'} {kind} {one_line(name, 100)}"
    await write_record(step, command_config, store)
    if not args.undo:
        await put_stop(store, kind, name, args.note or "")
    elif not await delete_stop(store, kind, name):
        raise UsageError(f"{name}: no {kind} of this name is stopped; `handrail stop` lists what is")
    if kind == "upstream" and not args.undo and not records_of(name):
        screen.note(f"careful: no gateway that has run here has a server {name!r}")
    screen.note(f"{kind} {one_line(name, 100)}: {'works again' if args.undo else 'stopped'}, within a second")
