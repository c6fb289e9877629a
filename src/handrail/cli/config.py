"""`handrail config`: the servers that hosts are configured with, and what they miss."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

from handrail.cli.codes import Code
from handrail.cli.screen import Screen
from handrail.client.entries import Entry, EntryError, Missing, known_files, load
from handrail.guards.inert import MASK, inert, mask, mask_words
from handrail.model import Object

__all__ = ["run"]

_VARIABLE = re.compile(r"(?:Bearer )?\$\{[\w:]+\}")


def run(args: Namespace, screen: Screen) -> int:
    files = [_file(host, path) for host, path in _places(args.files)]
    if screen.as_json:
        screen.data({"files": files})
    else:
        for each in files:
            _show(each, screen)
        if not files:
            screen.note("no configuration of a host was found here; name a file to read that")
    complete = not any(each["problems"] or any(server["missing"] for server in each["servers"]) for each in files)
    return Code.OK if complete else Code.USAGE


def _places(given: list[str]) -> Iterator[tuple[str, Path]]:
    if given:
        yield from (("", Path(name)) for name in given)
        return
    seen = set()
    for host, path in known_files(os.environ, sys.platform):
        if path.is_file() and path not in seen:  # at home, the project's file is the user's
            seen.add(path)
            yield host, path


def _file(host: str, path: Path) -> Object:
    made: Object = {"host": host, "path": str(path), "servers": [], "problems": []}
    try:
        entries, _ = load(path, None)  # as they are written: a variable's value is nobody's business here
        _, missing = load(path, os.environ)
    except EntryError as problem:
        made["problems"] = [mask(each) for each in problem.problems]
        return made
    made["servers"] = [_server(entry, [each for each in missing if each.entry == entry.name]) for entry in entries]
    return made


def _server(entry: Entry, missing: list[Missing]) -> Object:
    made: Object = {
        "name": entry.name,
        "kind": entry.kind,
        "disabled": entry.disabled,
        "missing": [] if entry.disabled else [{"variable": each.variable, "where": each.where} for each in missing],
    }
    if entry.kind == "stdio":
        return made | {"command": mask_words(entry.command), "cwd": entry.cwd, "env": _hidden(entry.env)}
    return made | {"url": mask(entry.url), "headers": _hidden(entry.headers)}


def _hidden(values: Mapping[str, str]) -> Object:
    """Which there are; what is written out may be a secret, what refers to a variable says where it is."""
    return {name: text if _VARIABLE.fullmatch(text) else MASK for name, text in values.items()}


def _show(file: Object, screen: Screen) -> None:
    title = f"{inert(file['path'], lines=False)}"
    screen.say(screen.paint(title, "bold") + (f"  ({file['host']})" if file["host"] else ""))
    for problem in file["problems"]:
        screen.say(f"  {screen.paint('wrong', 'red')}: {inert(problem, lines=False)}")
    rows = []
    for server in file["servers"]:
        target = " ".join(_quoted(word) for word in server["command"]) if "command" in server else server["url"]
        rows.append((server["name"], "disabled" if server["disabled"] else server["kind"], target))
    if rows:
        screen.table(rows, indent="  ", styles=("cyan", "dim"))
    for server in file["servers"]:
        for each in server["missing"]:
            where = inert(f"{each['variable']} is not set ({each['where']})", lines=False)
            screen.say(f"  {screen.paint('missing', 'yellow')}: {where}")
    if not rows and not file["problems"]:
        screen.say("  no servers")
    screen.say()


def _quoted(word: str) -> str:
    """So that it can be seen where a word ends. For eyes: no shell is meant."""
    return repr(word) if not word or set(word) & set(" '\"") else word
