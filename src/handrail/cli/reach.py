"""Which server a verb talks to, and how: its options as a client, with a person on the terminal behind it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from handrail.cli.codes import Usage
from handrail.cli.forms import Forms
from handrail.cli.screen import Screen, json_text
from handrail.client.client import Client
from handrail.client.consent import Confirm, allow, rule
from handrail.client.entries import Entry, EntryError, known_files, load
from handrail.client.listing import ListedTool
from handrail.client.state import Consents, State, state_folder
from handrail.guards.inert import one_line
from handrail.model import Object

__all__ = ["agreed", "client", "target_of"]

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_HINTS = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")


def client(args: Namespace, screen: Screen, **more: Any) -> Client:
    """A client for the server that the words name."""
    state = State(state_folder(os.environ))
    state.prepare()
    forms = Forms(screen)
    target, headers = target_of(args.server), dict(map(_header, args.header))
    url = target.url if isinstance(target, Entry) else str(target)
    try:
        return Client(
            target,
            auth=_authorization(screen, state, url, headers),
            revision=args.revision,
            transport=args.transport,
            timeout=args.timeout,
            headers=headers,
            env=dict(map(_variable, args.env)),
            trusted=args.trusted,
            state=state.folder,
            agree=_agreer(args, screen, Consents(state)),
            elicit=forms.fill,
            elicit_url=forms.visit,
            **more,
        )
    except (ValueError, TypeError) as wrong:
        if isinstance(wrong, EntryError):
            raise
        raise Usage(str(wrong)) from wrong


def _authorization(screen: Screen, state: State, url: str, headers: dict[str, str]) -> Any:
    """A way to log in, at addresses that may want it, unless a token was given."""
    if not url.startswith(("http://", "https://")) or "authorization" in map(str.lower, headers):
        return None
    from handrail.cli.login import authorization  # the rest of the command line does without it

    return authorization(screen, state)


def agreed(tool: ListedTool, arguments: Object, args: Namespace, screen: Screen) -> Confirm:
    """Ask on the terminal, after showing all there is; without one nothing is agreed to.

    It is asked here, in the main thread, where Ctrl-C is heard; what is sent has to be what was shown.
    """
    if args.yes:
        return allow
    why, _ = rule(tool)
    yes = not why or _asked(tool, arguments, why, screen)
    return lambda call: yes and (call.definition.fingerprint, call.arguments) == (tool.fingerprint, arguments)


def _asked(tool: ListedTool, arguments: Object, why: str, screen: Screen) -> bool:
    paint, where = screen.paint, sys.stderr
    lines = [f"{paint('call', 'bold', stream=where)} {one_line(tool.name, 128)} on {one_line(tool.server, 128)}"]
    lines += [f"  {one_line(name, 128)} = {json_text(value)}" for name, value in arguments.items()]
    if not arguments:
        lines.append("  (no arguments)")
    claims = ", ".join(f"{name}: {json_text(tool.annotations[name])}" for name in _HINTS if name in tool.annotations)
    if claims:
        lines.append(paint(f"  declared by the server: {one_line(claims, 200)}", "dim", stream=where))
    lines.append(f"  asked because {why}")
    print("\n".join(lines), file=where, flush=True)
    return _asks("Send it?", screen)


def _asks(question: str, screen: Screen) -> bool:
    if not screen.is_attended:
        screen.note("nobody can be asked here: --yes agrees, for scripts")
    return screen.ask(question)


def target_of(text: str) -> Any:
    """A URL, a file or a command line as the library takes it; else a server of a host's configuration, by name."""
    if text.startswith(("http://", "https://")):
        return text
    if Path(text).is_file() and Path(text).suffix in (".py", ".json"):
        return Path(text)
    if not _NAME.fullmatch(text):
        return text
    if Path(text).suffix in (".py", ".json"):
        raise Usage(f"{text}: no such file")
    found = [entry for _, path in known_files(os.environ, sys.platform) for entry in _named(path, text)]
    if len({entry.source for entry in found}) > 1:
        sources = " and ".join(sorted({entry.source for entry in found}))
        raise Usage(f"{text} is in {sources}; name the file whose server is meant")
    if not found and shutil.which(text) is None:
        near = f"; did you mean {text}.py?" if Path(f"{text}.py").is_file() else ""
        raise Usage(f"{text}: no program, and no configured server of that name (handrail config lists them){near}")
    return found[0] if found else text


def _named(path: Path, name: str) -> list[Entry]:
    """The entry of that name in a file; what is wrong with others there is no matter."""
    try:
        entries, missing = load(path, os.environ) if path.is_file() else ([], [])
    except EntryError:
        return []
    found = [each for each in entries if each.name == name]
    problems = [f"{each.where}: the variable {each.variable} is not set" for each in missing if each.entry == name]
    if found and problems:
        raise EntryError(str(path), problems)
    return found


def _agreer(args: Namespace, screen: Screen, consents: Consents) -> Any:
    def agree(entry: Entry) -> bool:
        if consents.agreed(entry) or args.yes:
            return True
        _introduce(entry, screen)
        what = "Connect to it" if entry.url else f"Start {one_line(entry.command[0], 100)}"
        if not _asks(f"{what}, now and from now on?", screen):
            return False
        consents.agree(entry)
        return True

    return agree


def _introduce(entry: Entry, screen: Screen) -> None:
    """All that decides what happens, as it is written in the file: nothing is masked, every word has its own line."""
    written = next((each for each in load(entry.source, None)[0] if each.name == entry.name), entry)
    screen.note(f"{one_line(entry.source, 300)} has the server {one_line(entry.name, 100)}:")
    shown = [("at", written.url)] if written.url else [("run", word) for word in written.command]
    if not written.url:
        path = entry.env.get("PATH", os.environ.get("PATH"))
        shown.append(("which is", shutil.which(entry.command[0], path=path) or "not to be found"))
        shown.append(("in", entry.cwd or "this folder"))
    shown += [("with", f"{name}={value}") for name, value in written.env.items()]
    shown += [("sending", f"{name}: {value}") for name, value in written.headers.items()]
    for what, text in shown:
        print(f"  {what:8} {one_line(text, 2_000)}", file=sys.stderr, flush=True)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise Usage(f"--header {text!r}: not 'Name: value'")
    return name.strip(), value.strip()


def _variable(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise Usage(f"--env {text!r}: not NAME=value")
    return name, value
