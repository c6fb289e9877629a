"""The verbs about the tools of a server, and the server: `handrail list`, `show`, `call`, `inspect` and `doctor`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import ssl
import sys
import tempfile
import time
from argparse import Namespace
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import MsgspecError, Struct, json as msgspec_json

from handrail.cli.arguments import parse_arguments, parse_document, unknown_name
from handrail.cli.connect import changed_lines, client_for, confirm_on_terminal, target_of
from handrail.cli.engines import reports_of
from handrail.cli.exit_codes import ExitCode, exit_code_for
from handrail.cli.terminal import Screen, Spinner, json_text
from handrail.client.client import BlockingClient
from handrail.client.inflight import Progress
from handrail.client.mcp_config import EntryError, ServerEntry
from handrail.client.results import CallResult
from handrail.client.server_tools import MAX_FLAWS
from handrail.client.state_dir import CALLS_FILE, state_folder
from handrail.client.tools import E, ListedEntries, ListedEntry, ListedTool, describe, estimated_tokens
from handrail.errors import HandrailError, PeerError
from handrail.model import Audio, Block, EmbeddedResource, Image, Json, Object, ResourceLink, Text
from handrail.stores import is_url
from handrail.text.controls import escape, mask, mask_secrets, one_line

__all__ = ["run_call", "run_doctor", "run_inspect", "run_list", "run_show"]

MAX_FILES = 20
CONNECT_TIMEOUT_SECONDS = 10.0
_MARKS = {"ok": "green", "warning": "yellow", "failed": "red"}
_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/gif": ".gif", "image/webp": ".webp"}
_SUFFIXES |= {"audio/wav": ".wav", "audio/mpeg": ".mp3", "audio/ogg": ".ogg"}
_SUFFIXES |= {"text/plain": ".txt", "text/markdown": ".md", "application/json": ".json", "application/pdf": ".pdf"}
MAX_DIFFERENCE = 2_000  # lines of a changed tool
MAX_WIRE_MESSAGES = 1_000  # with --json: the last ones


def run_list(args: Namespace, screen: Screen) -> int:
    def texts(tool: ListedTool) -> tuple[str, str, str]:
        return tool.name, tool.title, ("changed: " if tool.changed else "") + tool.description

    with client_for(args, screen) as connection:
        with screen.progress(f"listing the tools of {args.server}"):
            lists = {"tools": connection.tools()}
        estimate = _estimate if args.cost else None
        print_lists(connection, lists, texts, screen, estimate)
    return ExitCode.OK


def print_lists(
    connection: BlockingClient,
    lists: Mapping[str, ListedEntries[E]],
    texts: Callable[[E], tuple[str, str, str]],
    screen: Screen,
    estimate: Callable[[E], int] | None = None,
) -> None:
    """Print lists of servers by their member in JSON; `texts` gives key, title and description of an entry.

    `estimate` gives the tokens that an entry costs.
    """
    refused = {name: why for entries in lists.values() for name, why in entries.refused.items()}
    if screen.as_json:
        listed = {
            member: [_raw(each) | ({} if estimate is None else {"tokens": estimate(each)}) for each in entries]
            for member, entries in lists.items()
        }
        left_out = [{"name": name, "why": why} for name, why in refused.items()]
        failed = {name: str(problem) for name, problem in connection.problems.items()}
        screen.data({"revision": connection.revision, **listed, "refused": left_out, "problems": failed})
        return
    rows: list[tuple[str, ...]] = []
    for entry in (each for entries in lists.values() for each in entries):
        key, title, description = texts(entry)
        first = description.strip().split("\n")[0]
        about = one_line(f"{title}: {first}" if title != entry.name else first, 100)
        rows.append((key, about) if estimate is None else (key, f"{estimate(entry):,}", about))
    if rows:
        screen.table(rows, styles=("bold",))
        if estimate is not None:
            total = sum(estimate(each) for entries in lists.values() for each in entries)
            screen.note(
                f"about {total:,} tokens in all: characters of name, description and input schema, divided by 4"
            )
    else:
        screen.note(f"no {next(iter(lists))}")
    for name, why in refused.items():
        screen.note(f"left out: {one_line(name, 60)}: {one_line(why, 200)}")
    for problem in connection.problems.values():
        screen.note(str(problem))


def _estimate(tool: ListedTool) -> int:
    return estimated_tokens({**tool.raw, "name": tool.name})


def run_show(args: Namespace, screen: Screen) -> int:
    with client_for(args, screen) as connection, screen.progress(f"asking {args.server}"):
        tool = find_entry("tool", connection.tools(), args.tool)
    if screen.as_json:
        screen.data(_raw(tool))
        return ExitCode.OK
    screen.write(describe({**tool.raw, "name": tool.name}, screen.paint))
    if tool.changed:
        screen.note("the tool has changed since its first use here:")
        for line in changed_lines(tool, MAX_DIFFERENCE):
            screen.show_context(f"  {line}")
    return ExitCode.OK


def run_call(args: Namespace, screen: Screen) -> int:
    mcp_client = client_for(args, screen, audit=state_folder(os.environ) / CALLS_FILE)
    with mcp_client as connection:
        with screen.progress(f"asking {args.server}"):
            tool = find_entry("tool", connection.tools(), args.tool)
        call_arguments = read_arguments(args, tool.input_schema)
        welcome = mcp_client.welcome if len(mcp_client.servers) == 1 else {}
        confirm = confirm_on_terminal(tool, call_arguments, args, screen, welcome)
        with screen.progress(f"calling {tool.name}") as spinner:
            result = connection.call(tool.name, call_arguments, confirm=confirm, progress=report_to(spinner))
    if screen.as_json:
        screen.data(result.raw)
    else:
        _print(result, args, screen)
    if result.refused:
        return ExitCode.DENIED
    return ExitCode.TOOL if result.is_error else ExitCode.OK


def read_arguments(args: Namespace, schema: Object) -> Object:
    """Return the arguments on the command line; words override members of the document."""
    if args.arguments_json is None:
        return parse_arguments(args.words, schema)
    return parse_document(args.arguments_json) | parse_arguments(args.words, {**schema, "required": []})


def report_to(spinner: Spinner) -> Callable[[Progress], None]:
    return lambda far: spinner.update(far.done, far.total, far.message)


def run_inspect(args: Namespace, screen: Screen) -> int:
    wire: list[Object] = []

    def tap(direction: str, message: bytes) -> None:
        try:
            masked: Json = mask_secrets(json.loads(message))
        except (ValueError, RecursionError):
            masked = mask(message.decode("utf-8", "backslashreplace"))
        if screen.as_json:
            wire.append({"to" if direction == ">" else "from": masked})
            del wire[:-MAX_WIRE_MESSAGES]
        else:
            print(f"{direction} {json_text(masked)}", file=sys.stderr, flush=True)

    began = time.monotonic()
    with client_for(args, screen, tap=tap if args.wire else None) as connection:
        connected = time.monotonic() - began
        welcome, identity, revision = connection.welcome, connection.identity, connection.revision
        began = time.monotonic()
        lists: dict[str, ListedEntries[Any]] = {}
        problem, code = "", ExitCode.OK
        try:
            for kind in ("tools", "resources", "templates", "prompts"):
                lists[kind] = getattr(connection, kind)()
        except PeerError as failed:
            problem, code = str(failed), exit_code_for(failed)
        listed = time.monotonic() - began
    report: Object = {
        "server": identity,
        "revision": revision,
        "capabilities": welcome.get("capabilities"),
        "supported": welcome.get("supportedVersions"),
        "instructions": welcome.get("instructions"),
        "tools": None,
        **{kind: len(entries) for kind, entries in lists.items()},
        "refused": {name: why for entries in lists.values() for name, why in entries.refused.items()},
        "connect_seconds": round(connected, 3),
        "list_seconds": round(listed, 3),
        "problem": problem or None,
    }
    if screen.as_json:
        screen.data(report | ({"wire": wire} if args.wire else {}))
    else:
        rows = [(name.replace("_", " "), _cell(value)) for name, value in report.items() if value not in (None, {}, [])]
        screen.table(rows, styles=("bold",))
    return code


def _raw(entry: ListedEntry) -> Object:
    changed = {"changed": entry.changed} if isinstance(entry, ListedTool) else {}
    return {**entry.raw, "name": entry.name, "server": entry.server, **changed}


def find_entry(kind: str, entries: ListedEntries[E], name: str) -> E:
    entry = entries.get(name)
    if entry is None:
        raise unknown_name(kind, name, [each.key for each in entries])
    return entry


def _print(result: CallResult, args: Namespace, screen: Screen) -> None:
    if result.risk:
        screen.note(f"careful: {one_line(result.risk, 200)}")
    if result.refused:
        screen.note(f"{result.tool.name}: the server refused it: {one_line(result.text, 600)}")
        return
    if result.is_error:
        screen.note(f"{result.tool.name} reported an error:")
    files = FileSaver(args.save)
    for number, block in enumerate(result.content):
        screen.write(render_block(block, number, files))
    if not result.content and result.data is not None:
        screen.write(_pretty(json_text(result.data)))
    print_problems(result.problems, screen)


def print_problems(problems: list[str], screen: Screen) -> None:
    for problem in problems[:MAX_FLAWS]:
        screen.note(one_line(problem, 300))
    if len(problems) > MAX_FLAWS:
        screen.note(f"and {len(problems) - MAX_FLAWS:,} more problems")


def render_block(block: Block | str, number: int, files: FileSaver) -> str:
    if isinstance(block, Text):
        return escape(_pretty(block.text))
    if isinstance(block, Image | Audio):
        data = block.data if isinstance(block.data, bytes) else b64decode(block.data)
        return files.save(data, block.mime_type, number)
    if isinstance(block, ResourceLink):
        return f"{escape(block.name, lines=False)}: {escape(block.uri, lines=False)}"
    if isinstance(block, EmbeddedResource) and "text" in block.resource:
        return f"{escape(block.resource['uri'], lines=False)}:\n{escape(block.resource['text'])}"
    return f"[{one_line(_kind(block) or 'unreadable content', 60)}; --json shows it]"


def _pretty(text: str) -> str:
    """Indent a JSON object or list if standard output is a terminal; return any other text unchanged."""
    if sys.stdout.isatty() and text.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(MsgspecError, RecursionError):
            return msgspec_json.format(text, indent=2)
    return text


def _kind(block: Json) -> str:
    """Return the type of a content block; empty if it has none."""
    if isinstance(block, Struct):
        return str(block.__struct_config__.tag)
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else ""


class FileSaver:
    """The folder for what is not text: that of `--save`, or a temporary one, created for the first file."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)

    def save(self, data: bytes, mime_type: str, number: int) -> str:
        """Save bytes to a new file, never over an old one, and return a line with its path. We choose the name."""
        kind, suffix = one_line(mime_type, 60), _SUFFIXES.get(mime_type, ".bin")
        if number >= MAX_FILES:
            return f"{kind}, not saved: the first {MAX_FILES} were; --json shows it"
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="handrail-"))
            self._folder.mkdir(parents=True, exist_ok=True)
            for attempt in range(1000):
                path = self._folder / f"result-{number}{f'-{attempt}' if attempt else ''}{suffix}"
                try:
                    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                except FileExistsError:
                    continue
                with open(descriptor, "wb") as file:
                    file.write(data)
                return f"{kind}, {len(data):,} bytes: {path}"
        except OSError as problem:  # the tool has run: the rest of its result must not be lost
            where = self._folder or tempfile.gettempdir()
            return f"{kind}, not saved: {where}: {problem.strerror}; --json shows it"
        return f"{kind}, not saved: too many files are there already"


def _cell(value: Json) -> str:
    return one_line(escape(value) if isinstance(value, str) else json_text(value), 400)


# `handrail doctor`


class Step(Struct):
    """One check: its subject, its verdict, and a fix."""

    subject: str
    verdict: str = "ok"
    detail: str = ""
    fix: str = ""
    code: int = 0


def run_doctor(args: Namespace, screen: Screen) -> int:
    steps = []
    for step in _steps(args, screen):
        steps.append(step)
        if not screen.as_json:
            mark = screen.paint(f"{step.verdict:8}", _MARKS[step.verdict])
            screen.write(f"{mark} {one_line(step.subject, 80)}: {one_line(step.detail, 300)}")
            if step.fix:
                screen.write(f"         try: {one_line(step.fix, 400)}")
    if screen.as_json:
        rows = [{"what": each.subject, "verdict": each.verdict, "says": each.detail, "fix": each.fix} for each in steps]
        screen.data({"steps": rows})
    return next((step.code for step in steps if step.verdict == "failed"), ExitCode.OK)


def _steps(args: Namespace, screen: Screen) -> Iterator[Step]:
    if args.server.startswith(("redis", "postgres")) and is_url(args.server):
        yield from _engine(args.server)
        return
    try:
        target = target_of(args.server)
        entry = target if isinstance(target, ServerEntry) else None
        url = entry.url if entry else target if str(target).startswith(("http://", "https://")) else ""
        words = list(entry.command) if entry else [] if url or isinstance(target, Path) else shlex.split(target)
        _ = urlsplit(url).port
    except (HandrailError, ValueError) as error:
        fix = "handrail config shows what is configured" if isinstance(error, EntryError) else ""
        yield Step("the name", "failed", str(error), fix, ExitCode.USAGE)
        return
    kind = "a file" if isinstance(target, Path) else "an address" if url else "a command"
    yield Step("the name", detail=f"{entry.name} of {entry.source}" if entry else kind)
    if isinstance(target, Path):
        checks = iter([Step("the file", detail=str(target))])
    else:
        checks = _network(url) if url else _program(words, entry.env if entry else {})
    for step in checks:
        yield step
        if step.verdict == "failed":
            return
    yield from _protocol(args, screen)


def _engine(url: str) -> Iterator[Step]:
    """Check what replicas share: Redis, or PostgreSQL."""
    try:
        parts = urlsplit(url)
        has_address = bool(parts.hostname and parts.port)
    except ValueError:  # whose text may repeat the password; the store says what is wrong, without it
        has_address = False
    try:
        if has_address:
            for step in _network(url):
                yield step
                if step.verdict == "failed":
                    return
        [report] = reports_of({"": url}).values()
    except (HandrailError, ValueError) as problem:
        yield Step("the engine", "failed", str(problem).removeprefix(": "), "", exit_code_for(problem))
        return
    yield Step("the engine", detail=f"{report.engine}, {report.round_trip_ms:.1f} ms away")
    for text in report.losses:
        yield Step("durability", "warning", text, "or keep no approvals there: an audit log in PostgreSQL has them")
    for text in report.warnings:
        yield Step("settings", "warning", text)


def _program(words: list[str], env: Mapping[str, str]) -> Iterator[Step]:
    executable = shutil.which(words[0], path=env.get("PATH", os.environ.get("PATH"))) if words else None
    if executable is None:
        fix = "install it, or name it with its whole path; hosts often start without your shell's PATH"
        yield Step("the program", "failed", f"{words[0] if words else ''} is not on PATH", fix, ExitCode.TRANSPORT)
    else:
        yield Step("the program", detail=executable)


def _network(url: str) -> Iterator[Step]:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as problem:
        fix = "check the spelling, and the network"
        yield Step("the host's name", "failed", f"{host}: {problem}", fix, ExitCode.TRANSPORT)
        return
    yield Step("the host's name", detail=f"{host} is {', '.join(sorted({str(each[4][0]) for each in addresses}))}")
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_SECONDS) as connection:
            yield Step("the port", detail=f"{port} is open")
            if parts.scheme == "https":
                with ssl.create_default_context().wrap_socket(connection, server_hostname=host) as secured:
                    yield Step("the certificate", detail=f"good, {secured.version()}")
    except ssl.SSLError as problem:
        fix = "renew the certificate; for one of your own, add its authority to the system's"
        if not isinstance(problem, ssl.SSLCertVerificationError):
            fix = f"does it speak TLS at all? http{url[5:]}"
        yield Step("the certificate", "failed", str(problem), fix, ExitCode.TRANSPORT)
    except OSError as problem:
        fix = "is the server running, and on this port? is something in between?"
        yield Step("the port", "failed", f"{port}: {problem}", fix, ExitCode.TRANSPORT)


def _protocol(args: Namespace, screen: Screen) -> Iterator[Step]:
    stderr_lines: deque[str] = deque(maxlen=5)
    try:
        with client_for(args, screen, on_stderr=stderr_lines.append) as connection:
            name = connection.identity.get("name", "(nothing)")
            yield Step("the conversation", detail=f"speaks {connection.revision}; calls itself {name}")
            for name, problem in connection.problems.items():
                yield Step(name, "failed", problem.text, problem.hint, exit_code_for(problem))
            tools = connection.tools()
    except EntryError as problem:
        yield Step("the file", "failed", str(problem), "", ExitCode.USAGE)
        return
    except PeerError as problem:
        fix = problem.hint or _FIXES.get(problem.kind, "")
        yield Step("the conversation", "failed", problem.text, fix, exit_code_for(problem))
        if stderr_lines:
            yield Step("its standard error", "warning", " | ".join(stderr_lines))
        return
    yield Step("the tools", "ok" if len(tools) else "warning", f"{len(tools)} listed")
    for name, why in tools.refused.items():
        yield Step(f"tool {name}", "warning", why, "left out of the list until the server mends it")
    for tool in tools:
        if tool.changed:
            fix = f"handrail show … {tool.name}"
            yield Step(f"tool {tool.name}", "warning", "changed since its first use", fix)
        if tool.unchecked:
            yield Step(f"tool {tool.name}", "warning", tool.unchecked, "its results cannot be checked")


_FIXES = {
    "timeout": "--timeout gives it longer; does it wait for something on its terminal?",
    "protocol": "--revision legacy, or one by name, if it is confused by questions",
    "authorization": "give it a token: --header 'Authorization: Bearer …'",
    "transport": "start the command by hand, and look at what it prints",
}
