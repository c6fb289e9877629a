"""`handrail gateway --adopt HOST`: one gateway in place of a host's servers. `--undo HOST` gives them back (P-28)."""

from __future__ import annotations

import json
import os
import shlex
import sys
from argparse import Namespace
from pathlib import Path

from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.host_config import (
    indent_of,
    member_spans,
    put_member,
    read_file,
    show_difference,
    skip_blanks,
)
from handrail.cli.load_server import settings_for
from handrail.cli.terminal import Screen
from handrail.client.mcp_config import ServerEntry, host_config_files, load, parse
from handrail.client.state_dir import Consents, StateDirectory, state_folder, write_file
from handrail.errors import Denied
from handrail.model import Object
from handrail.text.controls import MASK, escape, mask_words, one_line

__all__ = ["run_adopt"]

HOSTS = ("claude", "claude-code", "cursor", "vscode", "windsurf")
MOVED_FILE = "mcp.handrail.json"  # beside the host's file: folders in it start from the same place
COPY_SUFFIX = ".before-gateway"
NAME = "handrail"


def run_adopt(args: Namespace, screen: Screen) -> int:
    host = args.adopt or args.undo
    places = [path for each, path in host_config_files(os.environ, sys.platform) if each == host] or [Path(host)]
    path = next((each.resolve() for each in places if each.is_file()), None)
    if path is None:
        raise UsageError(f"{host}: no such file, and no host with one; hosts are {', '.join(HOSTS)}")
    before = read_file(path)
    try:
        parse(before)  # which refuses a name that occurs twice
        document = json.loads(before)
    except ValueError:
        raise UsageError(f"{path}: not JSON, or with comments, which would not survive; change it by hand") from None
    tables = document if isinstance(document, dict) else {}
    table = "mcpServers" if "mcpServers" in tables else "servers"
    servers = tables.get(table)
    if not isinstance(servers, dict) or not servers:
        raise UsageError(f"{path}: no servers in it")
    return (_adopt if args.adopt else _undo)(path, before, table, servers, args, screen)


def _adopt(path: Path, before: str, table: str, servers: Object, args: Namespace, screen: Screen) -> int:
    moved, copy = path.with_name(MOVED_FILE), path.with_name(path.name + COPY_SUFFIX)
    if moved.exists():
        raise UsageError(f"{moved} is there: the servers were taken over before; --undo {args.adopt} gives them back")
    entries, missing = load(path, os.environ)
    staying = {each.entry: servers[each.entry] for each in missing}  # only the host has these variables
    servers = {name: server for name, server in servers.items() if name not in staying}
    for name in staying:
        screen.note(f"{one_line(name, 60)} stays with the host: it uses variables that are not set here")
    if not servers:
        raise UsageError(f"{path}: no server that could be taken over")
    entry: Object = {"command": sys.executable, "args": ["-m", "handrail", "gateway", str(moved)]}
    if (guards := Path(args.config) if args.config else settings_for(None)) is not None:
        entry["args"] += ["--config", str(guards.resolve())]
    if table == "servers":
        entry = {"type": "stdio", **entry}
    new_table = {NAME: entry, **staying}
    after = put_member(before, skip_blanks(before, 0), table, new_table, indent_of(before), 1)
    if parse(after) != {**parse(before), table: new_table}:
        raise UsageError(f"{path}: cannot be changed safely; change it by hand")
    _agree_to_change(path, before, after, entries, args, screen)
    _write(moved, json.dumps({"mcpServers": servers}, indent=2, ensure_ascii=False) + "\n")
    _write(copy, before, path)
    _write(path, after, path)
    consents = Consents(StateDirectory(state_folder(os.environ)))
    for each in load(moved, os.environ)[0]:  # they were in the host's file, and have just been shown
        consents.add(each)
    screen.write(escape(f"{', '.join(servers)}: from {path} into {moved}; as it was: {copy}"))
    screen.write(f"restart the host; `{shlex.join(['handrail', 'trust', str(moved)])}` shows their tools")
    return ExitCode.OK


def _undo(path: Path, before: str, table: str, servers: Object, args: Namespace, screen: Screen) -> int:
    moved, copy = path.with_name(MOVED_FILE), path.with_name(path.name + COPY_SUFFIX)
    if NAME not in servers or not copy.is_file() or not moved.is_file():
        raise UsageError(f"{path}: not taken over, or one of {copy} and {moved} is gone")
    original = read_file(copy)
    (start, end), (left, right) = (member_spans(text, skip_blanks(text, 0))[0][table] for text in (original, before))
    after = before[:left] + original[start:end] + before[right:]  # all else stays as the host has written it since
    for name, server in servers.items():
        if name != NAME and parse(original)[table].get(name) != server:
            at = member_spans(after, skip_blanks(after, 0))[0][table][0]
            after = put_member(after, at, name, server, indent_of(after), 2)
    _agree_to_change(path, before, after, load(copy, os.environ)[0], args, screen)
    _write(path, after, path)
    copy.unlink()
    originals = parse(original)[table]
    if all(originals.get(name) == server for name, server in parse(read_file(moved))["mcpServers"].items()):
        moved.unlink()
    else:
        screen.note(f"{moved} has been edited since, and stays")
    screen.write(escape(f"{path} has its own servers again"))
    return ExitCode.OK


def _agree_to_change(
    path: Path, before: str, after: str, entries: list[ServerEntry], args: Namespace, screen: Screen
) -> None:
    """Show the difference without the values of variables and headers, and ask."""
    before_masked, after_masked = before, after
    secrets = {value for each in load(path, None)[0] for value in (*each.env.values(), *each.headers.values())}
    for entry in entries:
        secrets |= {*entry.env.values(), *entry.headers.values()}
        secrets |= {
            word for word, masked in zip(entry.command, mask_words(entry.command), strict=True) if word != masked
        }
    for value in sorted((each for each in secrets if each and "${" not in each), key=len, reverse=True):
        for form in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
            before_masked, after_masked = (each.replace(form, f'"{MASK}"') for each in (before_masked, after_masked))
    show_difference(path, before_masked, after_masked, screen)
    if not args.yes and not screen.ask(f"Write this to {path}?"):
        raise Denied("nothing was written; --yes writes without asking")
    if read_file(path) != before:
        raise UsageError(f"{path}: has changed meanwhile; nothing was written")


def _write(path: Path, text: str, like: Path | None = None) -> None:
    try:
        write_file(path, text.encode(), 0o600 if like is None else like.stat().st_mode & 0o777)
    except OSError as problem:
        raise UsageError(f"{path}: cannot be written: {problem.strerror}") from None
