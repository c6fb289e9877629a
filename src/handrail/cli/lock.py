"""`handrail lock`: the tools of servers in a file that is read and committed, and what has changed since (P-31)."""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path

from msgspec import to_builtins

from handrail.cli.connect import client
from handrail.cli.exit_codes import Code, Usage
from handrail.cli.terminal import Screen
from handrail.client.state_dir import write_file
from handrail.guards.fingerprint import comparable, definition
from handrail.guards.lockfile import Locked, lock_text, read_lock
from handrail.guards.tool_diff import Change, changes, difference, kinds
from handrail.model import Object
from handrail.text.confusables import look_alikes
from handrail.text.controls import mask_words, one_line

__all__ = ["run_lock"]

Found = dict[tuple[str, str], list[Change]]  # by server and tool


def run_lock(args: Namespace, screen: Screen) -> int:
    path = Path(args.file)
    if not args.servers and not path.exists():
        raise Usage(f"no server: name one, as `handrail lock server.py`; {path}, which would name some, is not there")
    was = read_lock(path) if path.exists() or args.check else {}
    servers = args.servers or _recorded(was, args, screen)
    now: dict[str, Locked] = {}
    notes: list[str] = []
    for server in servers:
        for name, locked in _listed(server, args, screen, notes).items():
            if name in now:
                raise Usage(f"two servers are called {name}: give each its own --file, or a name in an mcpServers file")
            now[name] = locked
    gone = {name: each for name, each in was.items() if each.target in servers and name not in now}
    found = {
        (server, tool): changed
        for server in sorted(now.keys() | gone.keys())
        for tool, changed in _compared(was.get(server), now.get(server)).items()
    }
    names = [tool for each in now.values() for tool in each.tools]
    notes += [f"{name!a} can be taken for {other!a}" for name, other in look_alikes(names)]
    if not args.check:
        kept = {name: each for name, each in was.items() if name not in gone}
        try:
            write_file(path, lock_text({**kept, **now}).encode(), mode=0o644)
        except OSError as problem:
            raise Usage(f"--file: {path}: cannot be written: {problem.strerror}") from None
    _tell(args, screen, found if args.check or was else {}, len(names))
    for note in notes:
        screen.note(one_line(note, 300))
    return Code.DENIED if args.check and found else Code.OK


def _recorded(was: dict[str, Locked], args: Namespace, screen: Screen) -> list[str]:
    """The servers of the file. A file is not believed unseen: what it names is started or connected to (P-28)."""
    if unknown := [name for name, each in was.items() if not each.target]:
        raise Usage(f"{args.file} does not say how to reach {', '.join(unknown)}: name the servers")
    targets = [*dict.fromkeys(each.target for each in was.values())]
    if targets and not args.yes:
        for target in targets:
            screen.note(f"{args.file} names the server {one_line(target, 500)}")
        if not screen.ask("Start, or connect to, all of them?"):
            raise Usage("not agreed to; name the servers, or agree with --yes")
    return targets


def _listed(server: str, args: Namespace, screen: Screen, notes: list[str]) -> dict[str, Locked]:
    """The tools that a server lists now, by the names of the servers behind it."""
    whole = client(Namespace(**{**vars(args), "server": server}), screen)
    with whole as it, screen.progress(f"listing the tools of {server}"):
        tools = it.tools()
        spoken = {name: each.dialog.revision for name, each in whole.servers.items()}
    for problem in whole.problems.values():
        raise problem
    notes += [f"left out: {one_line(name, 60)}: {why}" for name, why in tools.refused.items()]
    made = {name: Locked(_public(server), revision.name if revision else "", {}) for name, revision in spoken.items()}
    for tool in tools:
        made[tool.server].tools[tool.own_name] = definition(tool.raw)
    return made


def _public(server: str) -> str:
    """What a server is reached by, unless that holds something that looks secret: the file is made to be shared."""
    try:
        words = shlex.split(server)
    except ValueError:
        return ""
    return server if mask_words(words) == words else ""


def _compared(was: Locked | None, now: Locked | None) -> dict[str, list[Change]]:
    old, new = (each.tools if each else {} for each in (was, now))
    found: dict[str, list[Change]] = {}
    for name in sorted(old.keys() | new.keys()):
        pair: tuple[Object | None, Object | None] = old.get(name), new.get(name)
        if was and now and name in old and name in new:
            pair = comparable(old[name], was.revision, new[name], now.revision)
        if changed := changes(*pair):
            found[name] = changed
    return found


def _tell(args: Namespace, screen: Screen, found: Found, count: int) -> None:
    if screen.as_json:
        told = [
            {"server": server, "tool": tool, "kinds": kinds(changed), "changes": to_builtins(changed)}
            for (server, tool), changed in found.items()
        ]
        screen.data({"file": args.file, "tools": count, "changed": told})
        return
    for (server, tool), changed in found.items():
        screen.say(f"{one_line(server, 60)}: {one_line(tool, 128)}: {', '.join(kinds(changed))}")
        screen.say("\n".join(f"  {line}" for line in difference(changed).split("\n")))
    if args.check and found:
        screen.say(f"{len(found)} not as {args.file} has them; handrail lock agrees to what is there now")
    else:
        tools = "1 tool" if count == 1 else f"{count} tools"
        screen.say(f"{tools}, all as {args.file} has them" if args.check else f"{tools} in {args.file}")
