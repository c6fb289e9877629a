"""`handrail lock`: write the tools of servers to a file to be committed, or compare them with it (P-31)."""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path

from msgspec import to_builtins

from handrail.cli.connect import client_for
from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.terminal import Screen
from handrail.client.state_dir import write_file
from handrail.guards.tool_definitions import (
    Change,
    LockedServer,
    change_kinds,
    comparable,
    compare_definitions,
    definition,
    format_changes,
    lock_text,
    read_lock,
)
from handrail.model import Object
from handrail.text.controls import confusable_names, mask_words, one_line

__all__ = ["run_lock"]

ChangesByTool = dict[tuple[str, str], list[Change]]  # key: server and tool


def run_lock(args: Namespace, screen: Screen) -> int:
    path = Path(args.file)
    if not args.servers and not path.exists():
        raise UsageError(
            f"no server: name one, as `handrail lock server.py`; {path}, which would name some, is not there"
        )
    previous = read_lock(path) if path.exists() or args.check else {}
    servers = args.servers or _servers_in_file(previous, args, screen)
    notes: list[str] = []
    now = _list_servers(servers, args, screen, notes)
    gone = {name: each for name, each in previous.items() if each.target in servers and name not in now}
    changes_by_tool = {
        (server, tool): changed
        for server in sorted(now.keys() | gone.keys())
        for tool, changed in _compare(previous.get(server), now.get(server)).items()
    }
    names = [tool for each in now.values() for tool in each.tools]
    notes += [f"{name!a} looks like {other!a}" for name, other in confusable_names(names)]
    if not args.check:
        remaining = {name: each for name, each in previous.items() if name not in gone}
        try:
            write_file(path, lock_text({**remaining, **now}).encode(), mode=0o644)
        except OSError as problem:
            raise UsageError(f"--file: {path}: cannot be written: {problem.strerror}") from None
    _report(args, screen, changes_by_tool if args.check or previous else {}, len(names))
    for note in notes:
        screen.note(one_line(note, 300))
    return ExitCode.DENIED if args.check and changes_by_tool else ExitCode.OK


def _servers_in_file(previous: dict[str, LockedServer], args: Namespace, screen: Screen) -> list[str]:
    """Return the servers in the file, after a person agrees: they are started or connected to (P-28)."""
    if unknown := [name for name, each in previous.items() if not each.target]:
        raise UsageError(f"{args.file} does not say how to reach {', '.join(unknown)}: name the servers")
    targets = [*dict.fromkeys(each.target for each in previous.values())]
    if targets and not args.yes:
        for target in targets:
            screen.note(f"{args.file} names the server {one_line(target, 500)}")
        if not screen.ask("Start, or connect to, all of them?"):
            raise UsageError("not confirmed; name the servers, or confirm with --yes")
    return targets


def _list_servers(servers: list[str], args: Namespace, screen: Screen, notes: list[str]) -> dict[str, LockedServer]:
    now: dict[str, LockedServer] = {}
    for server in servers:
        for name, locked in _list_tools(server, args, screen, notes).items():
            if name in now:
                raise UsageError(
                    f"two servers are called {name}: use a --file for each, or names of an mcpServers file"
                )
            now[name] = locked
    return now


def _list_tools(server: str, args: Namespace, screen: Screen, notes: list[str]) -> dict[str, LockedServer]:
    """Return the tools that a server lists now, by the names of the servers behind it."""
    mcp_client = client_for(Namespace(**{**vars(args), "server": server}), screen)
    with mcp_client as connection, screen.progress(f"listing the tools of {server}"):
        tools = connection.tools()
        revisions = {name: each.connection.revision for name, each in mcp_client.servers.items()}
    for problem in mcp_client.problems.values():
        raise problem
    notes += [f"left out: {one_line(name, 60)}: {why}" for name, why in tools.refused.items()]
    locked_servers = {
        name: LockedServer(_shareable_target(server), revision.name if revision else "", {})
        for name, revision in revisions.items()
    }
    for tool in tools:
        locked_servers[tool.server].tools[tool.own_name] = definition(tool.raw)
    return locked_servers


def _shareable_target(server: str) -> str:
    """Return the target of a server, or "" if it seems to contain a secret: the file is meant to be shared."""
    try:
        words = shlex.split(server)
    except ValueError:
        return ""
    return server if mask_words(words) == words else ""


def _compare(previous: LockedServer | None, now: LockedServer | None) -> dict[str, list[Change]]:
    old, new = (each.tools if each else {} for each in (previous, now))
    changes_by_name: dict[str, list[Change]] = {}
    for name in sorted(old.keys() | new.keys()):
        pair: tuple[Object | None, Object | None] = old.get(name), new.get(name)
        if previous and now and name in old and name in new:
            pair = comparable(old[name], previous.revision, new[name], now.revision)
        if changed := compare_definitions(*pair):
            changes_by_name[name] = changed
    return changes_by_name


def _report(args: Namespace, screen: Screen, changes_by_tool: ChangesByTool, count: int) -> None:
    if screen.as_json:
        rows = [
            {"server": server, "tool": tool, "kinds": change_kinds(changed), "changes": to_builtins(changed)}
            for (server, tool), changed in changes_by_tool.items()
        ]
        screen.data({"file": args.file, "tools": count, "changed": rows})
        return
    for (server, tool), changed in changes_by_tool.items():
        screen.write(f"{one_line(server, 60)}: {one_line(tool, 128)}: {', '.join(change_kinds(changed))}")
        screen.write("\n".join(f"  {line}" for line in format_changes(changed).split("\n")))
    if args.check and changes_by_tool:
        screen.write(
            f"{len(changes_by_tool)} not as {args.file} has them; handrail lock accepts the current definitions"
        )
    else:
        tools = "1 tool" if count == 1 else f"{count} tools"
        screen.write(f"{tools}, all as {args.file} has them" if args.check else f"{tools} in {args.file}")
