"""Servers as hosts configure them: the entries of `mcpServers` files, read with care (P-28).

An entry is an argument vector or an address. Nothing here starts anything, and no text is ever given to a shell.
Relative folders, and commands without one, start from the folder of the file (for `.vscode/` and `.cursor/` the one
above), so that what was agreed to does not depend on where it is started from.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from handrail.errors import HandrailError
from handrail.model import Object
from handrail.schema.explain import closest
from handrail.schema.jsonable import pointer
from handrail.text.controls import is_secret

__all__ = ["MAX_BYTES", "Entry", "EntryError", "Missing", "known_files", "load", "parse", "read_entries"]

MAX_BYTES = 1024 * 1024
MAX_ENTRIES = 1_000

Kind = Literal["stdio", "http", "sse"]
_KINDS: dict[str, Kind] = {
    "stdio": "stdio",
    "http": "http",
    "streamable-http": "http",
    "streamableHttp": "http",
    "sse": "sse",
}
_TABLES = ("mcpServers", "servers")
_ADDRESSES = ("url", "serverUrl")  # the second is Windsurf's
_TARGETS = ("command", *_ADDRESSES)
_VARIABLE = re.compile(r"\$\{([^{}]*)\}")
_REFERENCE = re.compile(r"(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_NAMES = {"variable": re.compile(r"[^=\0]+"), "header": re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")}
_BREAKS = re.compile(r"[\x00\r\n]")
_BATCH_FILE = re.compile(r"\.(?:bat|cmd)\Z", re.IGNORECASE)
_BATCH_MEANING = re.compile(r'["%&|<>^!()]')
# A text that is never closed runs to the end: it is looked at once.
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*(?:"|\Z))|//[^\r\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*(?:"|\Z))|,(?=\s*[}\]])', re.DOTALL)


class Entry(Struct, frozen=True, kw_only=True):
    """One server as a configuration names it."""

    name: str
    kind: Kind
    command: tuple[str, ...] = ()
    url: str = ""
    env: dict[str, str] = {}
    cwd: str = ""
    headers: dict[str, str] = {}
    source: str = ""  # the file it is from; empty: from code
    disabled: bool = False


class Missing(Struct, frozen=True):
    """A variable that an entry wants and that is not there; `where` is a JSON pointer."""

    variable: str
    entry: str
    where: str


class EntryError(HandrailError, ValueError):
    """A configuration that cannot be used; `problems` are all of them, a sentence each."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__("\n".join(f"{source}: {each}" if source else each for each in problems))
        self.source = source
        self.problems = problems


def read_entries(source: str | Path | Mapping[str, Any], environ: Mapping[str, str]) -> list[Entry]:
    """The servers of a file, or of a document already read, with `${VAR}`, `${VAR:-x}` and `${env:VAR}` filled in.

    Raises one `EntryError` that names everything that is wrong or missing; what is disabled may miss variables.
    """
    entries, missing = load(source, environ)
    off = {entry.name for entry in entries if entry.disabled}
    if wanted := [each for each in missing if each.entry not in off]:
        problems = [f"{each.where}: the variable {each.variable} is not set" for each in wanted]
        raise EntryError("" if isinstance(source, Mapping) else str(source), problems)
    return entries


def load(
    source: str | Path | Mapping[str, Any], environ: Mapping[str, str] | None
) -> tuple[list[Entry], list[Missing]]:
    """As `read_entries`, with what is missing beside it, left in the texts as `${VAR}`; None: all are left."""
    if isinstance(source, Mapping):
        return _Reader("", environ).read(source, "server")
    path = Path(source)
    return _Reader(str(path.absolute()), environ).read(_document(path), path.stem)


def parse(text: str) -> Any:
    """JSON, where comments and commas after the last item are forgiven, and a name that occurs twice is not."""
    try:
        return _strict(text)
    except json.JSONDecodeError as first:
        bare = _COMMENT.sub(lambda found: found[1] or re.sub(r"[^\r\n]+", " ", found[0]), text)
        try:
            return _strict(_LAST_COMMA.sub(lambda found: found[1] or " ", bare))
        except json.JSONDecodeError as problem:
            raise ValueError(f"not JSON: {problem if bare != text else first}") from None


def known_files(environ: Mapping[str, str], platform: str, folder: Path | None = None) -> list[tuple[str, Path]]:
    """Where the usual hosts keep their servers, whether the files exist or not; `folder` is the project's."""
    home = Path(environ.get("USERPROFILE" if platform == "win32" else "HOME") or Path.home())
    here = folder or Path.cwd()
    if platform == "win32":
        settings = Path(environ.get("APPDATA") or home / "AppData" / "Roaming")
    elif platform == "darwin":
        settings = home / "Library" / "Application Support"
    else:
        settings = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    places = [
        ("claude", settings / "Claude" / "claude_desktop_config.json"),
        ("claude-code", here / ".mcp.json"),
        ("claude-code", home / ".claude.json"),
        ("cursor", here / ".cursor" / "mcp.json"),
        ("cursor", home / ".cursor" / "mcp.json"),
        ("vscode", here / ".vscode" / "mcp.json"),
        ("vscode", settings / "Code" / "User" / "mcp.json"),
        ("windsurf", home / ".codeium" / "windsurf" / "mcp_config.json"),
    ]
    # There is no Claude Desktop for other systems whose place its makers name.
    return places if platform in ("win32", "darwin") else places[1:]


def _document(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"over {MAX_BYTES:,} bytes; a file of servers has fewer")
        return parse(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        why = "not a text in UTF-8"
    except OSError as problem:
        why = f"cannot be read: {problem.strerror}"
    except ValueError as problem:
        why = str(problem)
    raise EntryError(str(path), [why])


def _strict(text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> Object:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"the name {twice!r} occurs twice in one object")
        return made

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not a JSON number")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


class _Reader:
    """One document; collects what is wrong instead of stopping at the first."""

    def __init__(self, source: str, environ: Mapping[str, str] | None) -> None:
        self.source = source
        self.environ = environ
        self.problems: list[str] = []
        self.missing: list[Missing] = []
        self.entry = ""
        above = Path(source).parent
        self.base = above.parent if above.name in (".vscode", ".cursor") else above

    def read(self, document: Any, name: str) -> tuple[list[Entry], list[Missing]]:
        found = [self._entry(key, value, where) for key, value, where in self._named(document, name)]
        if self.problems:
            raise EntryError(self.source, self.problems)
        return found, self.missing

    def _named(self, document: Any, name: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
        if not isinstance(document, Mapping):
            self._wrong("", document, "an object")
            return
        if any(isinstance(document.get(key), str) for key in ("command", *_ADDRESSES)):
            yield name, document, ""
            return
        tables = [key for key in _TABLES if key in document]
        if not tables and not self.source:  # a host's file may be about other things only
            self.problems.append('no servers: {"mcpServers": {"name": {"command": …}}} has one')
        for table in tables:
            servers = document[table]
            if not isinstance(servers, Mapping):
                self._wrong(f"/{table}", servers, "an object with a server under each name")
                continue
            if len(servers) > MAX_ENTRIES:
                self.problems.append(f"/{table}: {len(servers):,} servers are more than {MAX_ENTRIES:,}")
                return
            for key, value in servers.items():
                where = pointer(f"/{table}", key)
                if isinstance(value, Mapping):
                    yield key, value, where
                else:
                    self._wrong(where, value, 'an object such as {"command": "uvx", "args": ["weather"]}')

    def _entry(self, name: str, value: Mapping[str, Any], where: str) -> Entry:
        self.entry = name
        if not name or not name.isprintable():
            self.problems.append(f"{where}: a name is not empty, and has only characters that can be seen")
        address = next((key for key in _ADDRESSES if key in value), "")
        kind: Kind | None = "http" if address else "stdio"
        if (said := value.get("type")) is not None:
            kind = _KINDS.get(said) if isinstance(said, str) else None
        if kind is None:
            self._wrong(f"{where}/type", said, "stdio, http or sse")
        elif kind == "stdio" and "command" not in value:
            near = next((f"; {key!r}: did you mean {word!r}?" for key in value if (word := closest(key, _TARGETS))), "")
            text = 'neither "command" nor "url" is there; one of them says what to connect to'
            self.problems.append(f"{where}: {text}{near}")
        elif kind != "stdio" and not address:
            self.problems.append(f'{where}: "url" is not there, and {said} needs one')
        elif "command" in value and address:
            self.problems.append(f'{where}: both "command" and "{address}" are there; only one can be meant')
        return Entry(
            name=name,
            kind=kind or "stdio",
            command=self._command(value, where) if "command" in value else (),
            url=self._url(value[address], f"{where}/{address}") if address else "",
            env=self._texts(value.get("env"), f"{where}/env", "variable", self._variable),
            cwd=self._folder(value.get("cwd"), f"{where}/cwd") if kind == "stdio" else "",
            headers=self._texts(value.get("headers"), f"{where}/headers", "header", self._line),
            source=self.source,
            disabled=bool(self._of(bool, value.get("disabled"), f"{where}/disabled", "true or false")),
        )

    def _command(self, value: Mapping[str, Any], where: str) -> tuple[str, ...]:
        args = self._of(list, value.get("args"), f"{where}/args", "an array of texts, one for each argument") or []
        program = self._line(value["command"], f"{where}/command")
        rest = [self._line(each, f"{where}/args/{i}") for i, each in enumerate(args)]
        if isinstance(value["command"], str) and (not program.strip() or program.startswith("-")):
            self._wrong(f"{where}/command", program, "the name or the path of a program")
        if _BATCH_FILE.search(program) and any(_BATCH_MEANING.search(each) for each in rest):
            # Windows gives the line of a batch file to its shell, which reads the arguments once more.
            self.problems.append(f'{where}/args: a batch file gets no arguments with any of "%&|<>^!()')
        return (program, *rest)

    def _url(self, value: Any, where: str) -> str:
        url = self._line(value, where)
        if isinstance(value, str) and not re.match(r"https?://[^\s/]|\$\{", url):
            self._wrong(where, url, "an address that begins with https:// or http://")
        return url

    def _folder(self, value: Any, where: str) -> str:
        given = "" if value is None else self._line(value, where)
        return str(self.base / given) if self.source and not given.startswith("${") else given

    def _texts(self, value: Any, where: str, what: str, read: Callable[[Any, str], str]) -> dict[str, str]:
        texts = self._of(Mapping, value, where, "an object of texts") or {}
        for name in texts:
            if not _NAMES[what].fullmatch(name):
                self.problems.append(f"{where}: {name!r} is not the name of a {what}")
        return {name: read(text, pointer(where, name)) for name, text in texts.items()}

    def _of(self, kind: type, value: Any, where: str, wanted: str) -> Any:
        """A value of this type, if it is there; None if it is not, or is another."""
        if value is None or isinstance(value, kind):
            return value
        self._wrong(where, value, wanted)
        return None

    def _variable(self, value: Any, where: str) -> str:
        if isinstance(value, bool | int | float):  # written without quotes by many, and meant as they look
            value = json.dumps(value)
        text = self._text(value, where)
        if "\0" in text:
            self.problems.append(f"{where}: has a character that no variable can have, U+0000")
        return text

    def _line(self, value: Any, where: str) -> str:
        text = self._text(value, where)
        if _BREAKS.search(text):
            self.problems.append(f"{where}: has a new line or U+0000; it must be one line")
        return text

    def _text(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            self._wrong(where, value, "a text")
            return ""
        made, references = _VARIABLE.subn(lambda found: self._value(found, where), value)
        if references != value.count("${"):
            self.problems.append(f"{where}: a ${{ inside another, or without its }}")
        return made

    def _value(self, found: re.Match[str], where: str) -> str:
        reference = _REFERENCE.fullmatch(found[1])
        if self.environ is None:
            return found[0]
        if reference and (value := self.environ.get(reference[1])) is not None and (value or reference[2] is None):
            return value
        if reference and reference[2] is not None:
            return reference[2]
        # What only the host can know (`${input:key}`, `${workspaceFolder}`) is missing as well.
        self.missing.append(Missing(reference[1] if reference else found[1], self.entry, where))
        return found[0]

    def _wrong(self, where: str, value: Any, wanted: str) -> None:
        shown = json.dumps("…" if is_secret(where.rpartition("/")[2]) else value, ensure_ascii=False, default=str)
        shown = shown if len(shown) <= 60 else shown[:59] + "…"
        self.problems.append(f"{where or 'the document'}: {shown} is not {wanted}")
