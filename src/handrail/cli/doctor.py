"""`handrail doctor`: find out why a server does not connect, step by step, and what to do about it."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import ssl
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from handrail.cli.connect import client_for, target_of
from handrail.cli.exit_codes import ExitCode, exit_code_for
from handrail.cli.terminal import Screen
from handrail.client.mcp_config import EntryError, ServerEntry
from handrail.errors import HandrailError, PeerError
from handrail.text.controls import one_line

__all__ = ["run_doctor"]

CONNECT_TIMEOUT_SECONDS = 10.0
_MARKS = {"ok": "green", "warning": "yellow", "failed": "red"}


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
