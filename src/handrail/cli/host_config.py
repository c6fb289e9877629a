"""Configuration files of hosts: list their servers (`handrail config`), add an entry to one (`install`, P-28)."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from handrail.cli.arguments import read_text
from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.terminal import Screen
from handrail.client.mcp_config import (
    MAX_BYTES,
    EntryError,
    MissingVariable,
    ServerEntry,
    host_config_files,
    load,
    parse,
)
from handrail.client.state_dir import write_file
from handrail.errors import Denied
from handrail.model import Object
from handrail.text.controls import MASK, escape, mask, mask_words

__all__ = [
    "indent_of",
    "mask_values",
    "member_spans",
    "put_member",
    "read_file",
    "run_config",
    "run_install",
    "show_difference",
    "skip_blanks",
]

_VARIABLE = re.compile(r"(?:Bearer )?\$\{[\w:]+\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,63}")
_DECODER = json.JSONDecoder()


def run_config(args: Namespace, screen: Screen) -> int:
    places = {Path(name): "" for name in args.files}
    for host, path in () if args.files else host_config_files(os.environ, sys.platform):
        if path.is_file():
            places.setdefault(path, host)  # in the home folder, the project's file is also the user's
    files = [_file(host, path) for path, host in places.items()]
    if screen.as_json:
        screen.data({"files": files})
    else:
        for each in files:
            _show(each, screen)
        if not files:
            screen.note("no host is configured on this machine; name a FILE to read")
    complete = not any(each["problems"] or any(server["missing"] for server in each["servers"]) for each in files)
    return ExitCode.OK if complete else ExitCode.USAGE


def _file(host: str, path: Path) -> Object:
    report: Object = {"host": host, "path": str(path), "servers": [], "problems": []}
    try:
        entries, _ = load(path, None)  # variables stay unexpanded: their values can be secrets
        _, missing = load(path, os.environ)
    except EntryError as problem:
        report["problems"] = [mask(each) for each in problem.problems]
        return report
    report["servers"] = [_server(entry, [each for each in missing if each.entry == entry.name]) for entry in entries]
    return report


def _server(entry: ServerEntry, missing: list[MissingVariable]) -> Object:
    summary: Object = {
        "name": entry.name,
        "kind": entry.kind,
        "disabled": entry.disabled,
        "missing": [] if entry.disabled else [{"variable": each.variable, "where": each.where} for each in missing],
    }
    if entry.kind == "stdio":
        return summary | {"command": mask_words(entry.command), "cwd": entry.cwd, "env": mask_values(entry.env)}
    return summary | {"url": mask(entry.url), "headers": mask_values(entry.headers)}


def mask_values(values: Mapping[str, str]) -> Object:
    """Mask the values, which may be secrets; references to variables stay."""
    return {name: text if _VARIABLE.fullmatch(text) else MASK for name, text in values.items()}


def _show(file: Object, screen: Screen) -> None:
    title = screen.paint(escape(file["path"], lines=False), "bold")
    screen.write(title + (f"  ({file['host']})" if file["host"] else ""))
    for problem in file["problems"]:
        screen.write(f"  {screen.paint('wrong', 'red')}: {escape(problem, lines=False)}")
    rows = []
    for server in file["servers"]:
        target = " ".join(_quote_word(word) for word in server["command"]) if "command" in server else server["url"]
        rows.append((server["name"], "disabled" if server["disabled"] else server["kind"], target))
    if rows:
        screen.table(rows, indent="  ", styles=("cyan", "dim"))
    for server in file["servers"]:
        for each in server["missing"]:
            where = escape(f"{each['variable']} is not set ({each['where']})", lines=False)
            screen.write(f"  {screen.paint('missing', 'yellow')}: {where}")
    if not rows and not file["problems"]:
        screen.write("  no servers")
    screen.write()


def _quote_word(word: str) -> str:
    """Quote a word for display, so that its end is visible. Not for a shell."""
    return repr(word) if not word or set(word) & set(" '\"") else word


# `handrail install`


def run_install(args: Namespace, screen: Screen) -> int:
    from handrail.cli.load_server import (
        ServerFile,  # they import a whole server
        settings_for,
    )

    path = Path(args.file).resolve() if args.file else _host_file(args.host)
    source = ServerFile(args.target)
    name = args.name or source.load().name
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name: {name!r} is not a name of letters, digits, spaces and . _ -, at most 64")
    target = f"{source.path}:{source.object}" if source.object else str(source.path)
    words = ["-m", "handrail", "serve", target]
    # The host starts the server in another folder, where no handrail.toml applies.
    if (guards := settings_for(args.target)) is not None:
        words += ["--config", str(guards.resolve())]
    entry: Object = {"command": sys.executable, "args": words}
    if args.host == "vscode":
        entry = {"type": "stdio", **entry}
    before = read_file(path)
    after = _with_entry(before, "servers" if args.host == "vscode" else "mcpServers", name, entry, path)
    written, backup = False, ""
    if before != after:
        show_difference(path, before, after, screen)
        if not args.yes and not screen.ask(f"Write this to {path}?"):
            raise Denied("nothing was written; --yes writes without asking")
        try:
            written, backup = True, _write(path, before, after)
        except OSError as problem:
            raise UsageError(f"{path}: cannot be written: {problem.strerror}") from None
    if screen.as_json:
        screen.data({"file": str(path), "name": name, "entry": entry, "written": written, "backup": backup})
    else:
        backup_note = f"; as it was: {backup}" if backup else ""
        screen.write(escape(f"{name} {'is now' if written else 'was already'} in {path}{backup_note}"))
    return ExitCode.OK


def show_difference(path: Path, before: str, after: str, screen: Screen) -> None:
    """Print what changes in a file, without what looks like a secret."""
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), str(path), str(path), n=2)
    for line in mask("".join(lines)).splitlines():
        style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "dim")
        print(screen.paint(escape(line, lines=False), style, stream=sys.stderr), file=sys.stderr)


def _host_file(host: str) -> Path:
    places = [path for each, path in host_config_files(os.environ, sys.platform) if each == host]
    if not places:
        raise UsageError(
            f"--host {host}: its configuration file has no usual place on {sys.platform}; name it with --file"
        )
    # Of the project's file and the user's, in this order. Claude Code rewrites its user's file all the time.
    path = places[0] if host in ("claude-code", "vscode") else places[-1]
    return path.resolve()  # a symbolic link stays; its target is replaced


def read_file(path: Path) -> str:
    try:
        return read_text(str(path), MAX_BYTES)
    except ValueError as problem:
        if isinstance(problem.__cause__, FileNotFoundError):
            return ""
        raise UsageError(str(problem)) from None


def _with_entry(text: str, table: str, name: str, entry: Object, path: Path) -> str:
    """Return the text with the entry added and every other character unchanged."""
    if not text.strip():
        return json.dumps({table: {name: entry}}, indent=2) + "\n"
    by_hand = f"add by hand to {table!r}: {json.dumps({name: entry})}"
    try:
        document = parse(text)
    except ValueError as problem:
        raise UsageError(f"{path}: {problem}; mend it first") from None
    try:
        json.loads(text)
    except ValueError:
        raise UsageError(f"{path}: has comments or a comma too many, which would not survive; {by_hand}") from None
    if not isinstance(document, dict) or not isinstance(document.get(table, {}), dict):
        raise UsageError(f"{path}: not an object with one under {table!r}; it is not a file of that host")
    if document.get(table, {}).get(name) == entry:
        return text
    indent = indent_of(text)
    root = skip_blanks(text, 0)
    tables, _ = member_spans(text, root)
    if table in tables:
        result = put_member(text, tables[table][0], name, entry, indent, 2)
    else:
        result = put_member(text, root, table, {name: entry}, indent, 1)
    document.setdefault(table, {})[name] = entry
    if parse(result) != document:
        raise UsageError(f"{path}: cannot be changed safely; {by_hand}")
    return result


def indent_of(text: str) -> str:
    """Return the blanks that a document of JSON is indented with."""
    return match[1] if (match := re.search(r"\n([ \t]+)\S", text)) else "  "


def put_member(text: str, at: int, name: str, value: Object, indent: str, depth: int) -> str:
    """Return the text with a member of the object at `at` replaced, or added after the last one."""
    line = "\r\n" if "\r\n" in text else "\n"
    new = json.dumps(value, indent=indent, ensure_ascii=False).replace("\n", line + indent * depth)
    members, end = member_spans(text, at)
    if name in members:
        start, end = members[name]
        return text[:start] + new + text[end:]
    member = f"{line}{indent * depth}{json.dumps(name, ensure_ascii=False)}: {new}"
    if members:
        last = max(end for _, end in members.values())
        return f"{text[:last]},{member}{text[last:]}"
    return f"{text[: at + 1]}{member}{line}{indent * (depth - 1)}{text[end:]}"


def member_spans(text: str, at: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the spans of the values of the object at `at`, and its end. The text must be valid JSON."""
    spans: dict[str, tuple[int, int]] = {}
    at = skip_blanks(text, at + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = skip_blanks(text, at)
        _, end = _DECODER.raw_decode(text, start)
        spans[name] = start, end
        at = skip_blanks(text, end)
    return spans, at


def skip_blanks(text: str, at: int) -> int:
    while text[at] in " \t\r\n:,":
        at += 1
    return at


def _write(path: Path, before: str, after: str) -> str:
    """Replace the file atomically. Return the path of the backup beside it, or "" if there was no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if read_file(path) != before:
        raise UsageError(f"{path}: has changed meanwhile; nothing was written")
    if not before:
        write_file(path, after.encode())
        return ""
    mode = path.stat().st_mode & 0o777
    backup = path.with_name(f"{path.name}.before-handrail")
    write_file(backup, before.encode(), mode)
    write_file(path, after.encode(), mode)
    return str(backup)
