"""`handrail install`: our entry in a host's configuration, after the difference has been shown and agreed to (P-28)."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from argparse import Namespace
from pathlib import Path

from handrail.cli.codes import Code, Usage
from handrail.cli.screen import Screen
from handrail.cli.source import Source
from handrail.client.entries import MAX_BYTES, known_files, parse
from handrail.client.state import write_file
from handrail.errors import Denied
from handrail.guards.inert import inert, mask
from handrail.model import Object

__all__ = ["run"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,63}")
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


def run(args: Namespace, screen: Screen) -> int:
    path = Path(args.file).resolve() if args.file else _place(args.host)
    source = Source(args.target)
    name = args.name or source.load().name
    if not _NAME.fullmatch(name):
        raise Usage(f"--name: {name!r} is not a name of letters, digits, spaces and . _ -, at most 64")
    target = f"{source.path}:{source.object}" if source.object else str(source.path)
    entry = {"command": sys.executable, "args": ["-m", "handrail", "serve", target]}
    if args.host == "vscode":
        entry = {"type": "stdio", **entry}
    before = _read(path)
    after = _with_entry(before, "servers" if args.host == "vscode" else "mcpServers", name, entry, path)
    difference = "".join(
        difflib.unified_diff(before.splitlines(True), after.splitlines(True), str(path), str(path), n=2)
    )
    written, backup = False, ""
    if before != after:
        for line in mask(difference).splitlines():
            style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "dim")
            print(screen.paint(inert(line, lines=False), style, stream=sys.stderr), file=sys.stderr)
        if not args.yes and not screen.ask(f"Write this to {path}?"):
            raise Denied("nothing was written; --yes writes without asking")
        written, backup = True, _write(path, before, after)
    if screen.as_json:
        screen.data({"file": str(path), "name": name, "entry": entry, "written": written, "backup": backup})
    else:
        kept = f"; as it was: {backup}" if backup else ""
        screen.say(inert(f"{name} {'is now' if written else 'was already'} in {path}{kept}"))
    return Code.OK


def _place(host: str) -> Path:
    places = [path for each, path in known_files(os.environ, sys.platform) if each == host]
    if not places:
        raise Usage(f"--host {host}: it is not known where its file is on {sys.platform}; name it with --file")
    # Of the project's file and the user's, in this order. Claude Code rewrites its user's file all the time.
    path = places[0] if host in ("claude-code", "vscode") else places[-1]
    return path.resolve()  # a link stays one: what it leads to is replaced


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ""
    except OSError as problem:
        raise Usage(f"{path}: cannot be read: {problem.strerror}") from None
    if len(data) > MAX_BYTES:
        raise Usage(f"{path}: over {MAX_BYTES:,} bytes; a file of servers has fewer")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise Usage(f"{path}: not a text in UTF-8") from None


def _with_entry(text: str, table: str, name: str, entry: Object, path: Path) -> str:
    """The text with the entry in it and every other character as it was."""
    if not text.strip():
        return json.dumps({table: {name: entry}}, indent=2) + "\n"
    by_hand = f"add by hand to {table!r}: {json.dumps({name: entry})}"
    try:
        document = parse(text)
    except ValueError as problem:
        raise Usage(f"{path}: {problem}; mend it first") from None
    try:
        json.loads(text)
    except ValueError:
        raise Usage(f"{path}: has comments or a comma too many, which would not survive; {by_hand}") from None
    if not isinstance(document, dict) or not isinstance(document.get(table, {}), dict):
        raise Usage(f"{path}: not an object with one under {table!r}; it is not a file of that host")
    if document.get(table, {}).get(name) == entry:
        return text
    indent = found[1] if (found := re.search(r"\n([ \t]+)\S", text)) else "  "
    root = _Object(text, 0)
    if table not in root.members:
        made = root.put(table, {name: entry}, indent, 1)
    else:
        made = _Object(text, root.members[table][0]).put(name, entry, indent, 2)
    document.setdefault(table, {})[name] = entry
    if parse(made) != document:
        raise Usage(f"{path}: cannot be changed safely; {by_hand}")
    return made


class _Object:
    """Where the members of an object are in a JSON text that is known to be one."""

    def __init__(self, text: str, start: int) -> None:
        self.text = text
        self.members: dict[str, tuple[int, int]] = {}
        depth, key, began, end = 0, None, -1, -1
        for token in _TOKEN.finditer(text, start):
            if token[0] in "{[":
                depth += 1
                if depth == 1:
                    self.start = token.end()
                    continue
            elif token[0] in "]}":
                depth -= 1
            if depth == 0 or (depth == 1 and token[0] == ","):
                if key is not None:
                    self.members[key] = (began, end)
                key, began = None, -1
                if depth == 0:
                    self.end = token.start()
                    break
            elif depth == 1 and key is None:
                key = json.loads(token[0])
            elif began < 0 and token[0] != ":":
                began = token.start()
            end = token.end()

    def put(self, name: str, value: Object, indent: str, depth: int) -> str:
        """The text with a member replaced, or added after the last one."""
        line = "\r\n" if "\r\n" in self.text else "\n"
        new = json.dumps(value, indent=indent, ensure_ascii=False).replace("\n", line + indent * depth)
        if name in self.members:
            start, end = self.members[name]
            return self.text[:start] + new + self.text[end:]
        member = f"{line}{indent * depth}{json.dumps(name, ensure_ascii=False)}: {new}"
        if self.members:
            last = max(end for _, end in self.members.values())
            return f"{self.text[:last]},{member}{self.text[last:]}"
        return f"{self.text[: self.start]}{member}{line}{indent * (depth - 1)}{self.text[self.end :]}"


def _write(path: Path, before: str, after: str) -> str:
    """Replace the file in one go, with what it was beside it; the name of that, if there was anything."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if _read(path) != before:
        raise Usage(f"{path}: has changed meanwhile; nothing was written")
    if not before:
        write_file(path, after.encode())
        return ""
    mode = path.stat().st_mode & 0o777
    backup = path.with_name(f"{path.name}.before-handrail")
    write_file(backup, before.encode(), mode)
    write_file(path, after.encode(), mode)
    return str(backup)
