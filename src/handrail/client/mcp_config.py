"""The entries of `mcpServers` configuration files, validated (P-28).

An entry is an argument vector or an address. Nothing here starts a process, and no text ever goes to a shell.
Relative folders, and commands without one, start from the folder of the file (for `.vscode/` and `.cursor/` the one
above), so that a consent does not depend on the working folder.

Targets of a client: a URL, a command, a file, a server object, or a configuration.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from handrail.errors import ConfirmationRequired, Denied, HandrailError
from handrail.model import Object
from handrail.schema.jsonable import pointer
from handrail.suggest import closest
from handrail.text.controls import is_secret, mask
from handrail.transports.base import ClientTransport
from handrail.transports.http_client import Authorizer, HttpClientTransport
from handrail.transports.subprocess import SubprocessTransport

__all__ = [
    "MAX_BYTES",
    "EntryError",
    "MissingVariable",
    "ServerEntry",
    "host_config_files",
    "load",
    "parse",
    "read_entries",
]

MAX_BYTES = 1024 * 1024
MAX_ENTRIES = 1_000

TransportKind = Literal["stdio", "http", "sse"]
_KINDS: dict[str, TransportKind] = {
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
# A string that is not closed runs to the end, so that each character is matched once.
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*(?:"|\Z))|//[^\r\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*(?:"|\Z))|,(?=\s*[}\]])', re.DOTALL)


class ServerEntry(Struct, frozen=True, kw_only=True):
    """One server of a configuration."""

    name: str
    kind: TransportKind
    command: tuple[str, ...] = ()
    url: str = ""
    env: dict[str, str] = {}
    cwd: str = ""
    headers: dict[str, str] = {}
    auth: dict[str, str] = {}  # settings of its authorization, of `handrail.toml`
    source: str = ""  # path of the configuration file; empty: from code
    disabled: bool = False


class MissingVariable(Struct, frozen=True):
    """A variable that an entry uses and that is not set; `where` is a JSON pointer."""

    variable: str
    entry: str
    where: str


class EntryError(HandrailError, ValueError):
    """A configuration that cannot be used; `problems` lists every problem in a sentence."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__("\n".join(f"{source}: {each}" if source else each for each in problems))
        self.source = source
        self.problems = problems


def read_entries(source: str | Path | Mapping[str, Any], environ: Mapping[str, str]) -> list[ServerEntry]:
    """Return the servers of a file or document, with `${VAR}`, `${VAR:-x}` and `${env:VAR}` substituted.

    One `EntryError` lists everything that is wrong or missing; a disabled entry may miss variables.
    """
    entries, missing = load(source, environ)
    off = {entry.name for entry in entries if entry.disabled}
    if unset_variables := [each for each in missing if each.entry not in off]:
        problems = [f"{each.where}: the variable {each.variable} is not set" for each in unset_variables]
        raise EntryError("" if isinstance(source, Mapping) else str(source), problems)
    return entries


def load(
    source: str | Path | Mapping[str, Any], environ: Mapping[str, str] | None
) -> tuple[list[ServerEntry], list[MissingVariable]]:
    """Return the servers and the missing variables, which stay as `${VAR}`; with `environ` None all variables do."""
    if isinstance(source, Mapping):
        return _Reader("", environ).read(source, "server")
    path = Path(source)
    return _Reader(str(path.absolute()), environ).read(_document(path), path.stem)


def fill_in(
    texts: Mapping[str, str], where: str, entry: str, environ: Mapping[str, str] | None
) -> tuple[dict[str, str], list[MissingVariable]]:
    """Return texts of an entry with their variables substituted, and the missing ones; `where` is a JSON pointer."""
    reader = _Reader("", environ)
    reader.entry = entry
    filled = {name: reader.line(text, pointer(where, name)) for name, text in texts.items()}
    if reader.problems:
        raise EntryError("", reader.problems)
    return filled, reader.missing


def parse(text: str) -> Any:
    """Parse JSON that may have comments and trailing commas; a name that occurs twice is an error."""
    try:
        return _strict(text)
    except json.JSONDecodeError as first:
        bare = _COMMENT.sub(lambda match: match[1] or re.sub(r"[^\r\n]+", " ", match[0]), text)
        try:
            return _strict(_LAST_COMMA.sub(lambda match: match[1] or " ", bare))
        except json.JSONDecodeError as problem:
            raise ValueError(f"not JSON: {problem if bare != text else first}") from None


def host_config_files(environ: Mapping[str, str], platform: str, folder: Path | None = None) -> list[tuple[str, Path]]:
    """Return the configuration files of the usual hosts, whether they exist or not; `folder` is the project's."""
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
    # For other systems there is no Claude Desktop with a documented path.
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
        members = dict(pairs)
        if len(members) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"the name {twice!r} occurs twice in one object")
        return members

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not a JSON number")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


class _Reader:
    """Reads one document and collects all problems instead of stopping at the first."""

    def __init__(self, source: str, environ: Mapping[str, str] | None) -> None:
        self.source = source
        self.environ = environ
        self.problems: list[str] = []
        self.missing: list[MissingVariable] = []
        self.entry = ""
        above = Path(source).parent
        self.base = above.parent if above.name in (".vscode", ".cursor") else above

    def read(self, document: Any, name: str) -> tuple[list[ServerEntry], list[MissingVariable]]:
        entries = [self._entry(key, value, where) for key, value, where in self._server_items(document, name)]
        if self.problems:
            raise EntryError(self.source, self.problems)
        return entries, self.missing

    def _server_items(self, document: Any, name: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
        if not isinstance(document, Mapping):
            self._add_problem("", document, "an object")
            return
        if any(isinstance(document.get(key), str) for key in ("command", *_ADDRESSES)):
            yield name, document, ""
            return
        tables = [key for key in _TABLES if key in document]
        if not tables and not self.source:  # a host's file may have only other settings
            self.problems.append('no servers: {"mcpServers": {"name": {"command": …}}} has one')
        for table in tables:
            servers = document[table]
            if not isinstance(servers, Mapping):
                self._add_problem(f"/{table}", servers, "an object with a server under each name")
                continue
            if len(servers) > MAX_ENTRIES:
                self.problems.append(f"/{table}: {len(servers):,} servers are more than {MAX_ENTRIES:,}")
                return
            for key, value in servers.items():
                where = pointer(f"/{table}", key)
                if isinstance(value, Mapping):
                    yield key, value, where
                else:
                    self._add_problem(where, value, 'an object such as {"command": "uvx", "args": ["weather"]}')

    def _entry(self, name: str, value: Mapping[str, Any], where: str) -> ServerEntry:
        self.entry = name
        if not name or not name.isprintable():
            self.problems.append(f"{where}: a name is not empty, and has only characters that can be seen")
        address = next((key for key in _ADDRESSES if key in value), "")
        kind: TransportKind | None = "http" if address else "stdio"
        if (type_name := value.get("type")) is not None:
            kind = _KINDS.get(type_name) if isinstance(type_name, str) else None
        if kind is None:
            self._add_problem(f"{where}/type", type_name, "stdio, http or sse")
        elif kind == "stdio" and "command" not in value:
            near = next((f"; {key!r}: did you mean {word!r}?" for key in value if (word := closest(key, _TARGETS))), "")
            text = 'neither "command" nor "url" is there; one of them says what to connect to'
            self.problems.append(f"{where}: {text}{near}")
        elif kind != "stdio" and not address:
            self.problems.append(f'{where}: "url" is not there, and {type_name} needs one')
        elif "command" in value and address:
            self.problems.append(f'{where}: both "command" and "{address}" are there; only one can be meant')
        return ServerEntry(
            name=name,
            kind=kind or "stdio",
            command=self._command(value, where) if "command" in value else (),
            url=self._url(value[address], f"{where}/{address}") if address else "",
            env=self._texts(value.get("env"), f"{where}/env", "variable", self._variable),
            cwd=self._folder(value.get("cwd"), f"{where}/cwd") if kind == "stdio" else "",
            headers=self._texts(value.get("headers"), f"{where}/headers", "header", self.line),
            source=self.source,
            disabled=bool(self._value_of_type(bool, value.get("disabled"), f"{where}/disabled", "true or false")),
        )

    def _command(self, value: Mapping[str, Any], where: str) -> tuple[str, ...]:
        args = (
            self._value_of_type(list, value.get("args"), f"{where}/args", "an array of texts, one for each argument")
            or []
        )
        program = self.line(value["command"], f"{where}/command")
        rest = [self.line(each, f"{where}/args/{i}") for i, each in enumerate(args)]
        if isinstance(value["command"], str) and (not program.strip() or program.startswith("-")):
            self._add_problem(f"{where}/command", program, "the name or the path of a program")
        if _BATCH_FILE.search(program) and any(_BATCH_MEANING.search(each) for each in rest):
            # Windows runs a batch file in its shell, which parses the arguments once more.
            self.problems.append(f'{where}/args: a batch file gets no arguments with any of "%&|<>^!()')
        return (program, *rest)

    def _url(self, value: Any, where: str) -> str:
        url = self.line(value, where)
        if isinstance(value, str) and not re.match(r"https?://[^\s/]|\$\{", url):
            self._add_problem(where, url, "an address that begins with https:// or http://")
        return url

    def _folder(self, value: Any, where: str) -> str:
        folder = "" if value is None else self.line(value, where)
        return str(self.base / folder) if self.source and not folder.startswith("${") else folder

    def _texts(self, value: Any, where: str, what: str, read: Callable[[Any, str], str]) -> dict[str, str]:
        texts = self._value_of_type(Mapping, value, where, "an object of texts") or {}
        for name in texts:
            if not _NAMES[what].fullmatch(name):
                self.problems.append(f"{where}: {name!r} is not the name of a {what}")
        return {name: read(text, pointer(where, name)) for name, text in texts.items()}

    def _value_of_type(self, kind: type, value: Any, where: str, expected: str) -> Any:
        """Return the value if it has this type; else None, with a problem unless it is absent."""
        if value is None or isinstance(value, kind):
            return value
        self._add_problem(where, value, expected)
        return None

    def _variable(self, value: Any, where: str) -> str:
        if isinstance(value, bool | int | float):  # often written without quotes, and meant as text
            value = json.dumps(value)
        text = self._text(value, where)
        if "\0" in text:
            self.problems.append(f"{where}: has a character that no variable can have, U+0000")
        return text

    def line(self, value: Any, where: str) -> str:
        text = self._text(value, where)
        if _BREAKS.search(text):
            self.problems.append(f"{where}: has a new line or U+0000; it must be one line")
        return text

    def _text(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            self._add_problem(where, value, "a text")
            return ""
        text, references = _VARIABLE.subn(lambda match: self._value(match, where), value)
        if references != value.count("${"):
            self.problems.append(f"{where}: a ${{ inside another, or without its }}")
        return text

    def _value(self, match: re.Match[str], where: str) -> str:
        reference = _REFERENCE.fullmatch(match[1])
        if self.environ is None:
            return match[0]
        if reference and (value := self.environ.get(reference[1])) is not None and (value or reference[2] is None):
            return value
        if reference and reference[2] is not None:
            return reference[2]
        # Variables that only the host can fill in (`${input:key}`, `${workspaceFolder}`) are missing too.
        self.missing.append(MissingVariable(reference[1] if reference else match[1], self.entry, where))
        return match[0]

    def _add_problem(self, where: str, value: Any, expected: str) -> None:
        text = json.dumps("…" if is_secret(where.rpartition("/")[2]) else value, ensure_ascii=False, default=str)
        text = text if len(text) <= 60 else text[:59] + "…"
        self.problems.append(f"{where or 'the document'}: {text} is not {expected}")


Transport = Literal["auto", "streamable", "sse"]


class ServerTarget(Struct):
    """A server: its name, its transport, and the key under which its kind of negotiation is cached.

    `exit_hint` is the hint if the process ends with code 0.
    """

    name: str
    make_transport: Callable[[], ClientTransport]
    key: str = ""
    exit_hint: str = ""

    def with_stderr(self, on_stderr: Callable[[str], None]) -> ServerTarget:
        """Return the target with another reader of a command's standard error."""
        make = self.make_transport
        if not isinstance(make, partial) or make.func is not SubprocessTransport:
            return self
        return replace(self, make_transport=partial(make, on_stderr=on_stderr))

    def with_auth(self, auth: Authorizer) -> ServerTarget:
        """Return the target with another authorization over HTTP."""
        make = self.make_transport
        if not isinstance(make, partial) or make.func is not HttpClientTransport:
            return self
        return replace(self, make_transport=partial(make, auth=auth))

    @property
    def label(self) -> str:
        """The command, or the address without what may be secret in it, to display."""
        if not self.key.startswith(("http://", "https://")):
            return mask(self.key.removesuffix(" in "))
        parts = urlsplit(self.key)
        return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"


class ConnectOptions(Struct):
    """Options of connections."""

    transport: Transport = "auto"  # over HTTP; "sse" is that of 2024
    headers: Mapping[str, str] | None = None
    auth: Authorizer | None = None
    env: Mapping[str, str] | None = None
    cwd: str | Path | None = None
    agree: Callable[[ServerEntry], bool] | None = None  # to a command out of a configuration file
    on_stderr: Callable[[str], None] | None = None
    connect_seconds: float = 10.0


def targets(thing: Any, options: ConnectOptions) -> list[ServerTarget]:
    """Return the servers of a target: several for a configuration with several."""
    if hasattr(thing, "connect") and hasattr(thing, "serving"):
        from handrail.transports.memory import MemoryTransport  # loads the engine, which other targets do without

        return [ServerTarget(getattr(thing, "name", "server"), partial(MemoryTransport, thing))]
    if isinstance(thing, ServerEntry):
        return [_entry(thing, options)]
    is_file = isinstance(thing, str) and thing.endswith((".py", ".json")) and os.path.isfile(thing)
    if is_file or isinstance(thing, Path):
        path = thing = Path(thing)
        if path.suffix != ".json":
            target = _command((sys.executable, str(path)), options, path.stem)
            command = shlex.join(("handrail", "serve", str(path)))
            target.exit_hint = f"Does it call server.run()? If not, the command `{command}` serves it"
            return [target]
    if isinstance(thing, Mapping | Path):
        entries = read_entries(thing, os.environ)
        if all(each.disabled for each in entries):
            why = "all its servers are disabled" if entries else "no servers in it"
            raise EntryError(str(thing) if isinstance(thing, Path) else "", [f"{why}; there is nothing to connect to"])
        return [_entry(each, options) for each in entries if not each.disabled]
    if isinstance(thing, str):
        is_url = thing.startswith(("http://", "https://"))
        return [_url(thing, options) if is_url else _command(shlex.split(thing), options)]
    if isinstance(thing, Sequence) and thing and all(isinstance(each, str | os.PathLike) for each in thing):
        return [_command([os.fspath(each) for each in thing], options)]
    raise TypeError(f"Client: {thing!r:.100} is not a URL, a command, a file, a Server or a configuration")


def _entry(entry: ServerEntry, options: ConnectOptions) -> ServerTarget:
    # No configuration file starts a command, or sends values of the environment, without consent (P-28).
    if entry.source and options.agree is None:
        hint = "See what it does (`handrail config`), and agree with Client(…, agree=…)"
        raise ConfirmationRequired("a server of a configuration file was not agreed to", server=entry.name, hint=hint)
    if entry.source and options.agree is not None and not options.agree(entry):
        raise Denied("the server was not agreed to", server=entry.name)
    if entry.url:
        transport: Transport = "sse" if entry.kind == "sse" else options.transport
        headers = {**(options.headers or {}), **entry.headers}
        return _url(entry.url, replace(options, headers=headers, transport=transport), entry.name)
    options = replace(options, env={**(options.env or {}), **entry.env}, cwd=entry.cwd or options.cwd)
    return _command(entry.command, options, entry.name)


def _url(url: str, options: ConnectOptions, name: str = "") -> ServerTarget:
    make_transport = partial(HttpClientTransport, url, headers=options.headers, auth=options.auth)
    make_transport = partial(make_transport, transport=options.transport, connect_seconds=options.connect_seconds)
    make_transport()  # a bad URL or option raises here, not at the first request
    return ServerTarget(name or urlsplit(url).hostname or url, make_transport, url)


def _command(command: Sequence[str], options: ConnectOptions, name: str = "") -> ServerTarget:
    make_transport = partial(
        SubprocessTransport, tuple(command), env=options.env, cwd=options.cwd, on_stderr=options.on_stderr
    )
    make_transport()
    return ServerTarget(name or Path(command[0]).name, make_transport, f"{shlex.join(command)} in {options.cwd or ''}")
