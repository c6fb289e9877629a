"""Which server a verb talks to, and how: its options as a client, with a person on the terminal behind it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from handrail.cli.audit import FILE
from handrail.cli.codes import Usage
from handrail.cli.forms import Forms
from handrail.cli.screen import Screen, json_text
from handrail.client.client import Client
from handrail.client.consent import Confirm, allow, rule
from handrail.client.entries import Entry, EntryError, known_files, read_entries
from handrail.client.listing import ListedTool
from handrail.client.state import Consents, State, state_folder
from handrail.guards.inert import inert, mask_words
from handrail.model import Object

__all__ = ["agreed", "client", "target_of"]

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


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
            audit=state.folder / FILE,
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
    why, _ = rule(tool, trusted=args.trusted)
    yes = not why or _asked(tool, arguments, why, screen)
    return lambda call: yes and (call.definition.fingerprint, call.arguments) == (tool.fingerprint, arguments)


def _asked(tool: ListedTool, arguments: Object, why: str, screen: Screen) -> bool:
    paint, where = screen.paint, sys.stderr
    lines = [f"{paint('call', 'bold', stream=where)} {inert(tool.name, lines=False)} on {inert(tool.server)}"]
    lines += [f"  {inert(name, lines=False)} = {json_text(value)}" for name, value in arguments.items()]
    if not arguments:
        lines.append("  (no arguments)")
    claims = ", ".join(f"{name}: {json_text(value)}" for name, value in tool.annotations.items() if name != "title")
    if claims:
        lines.append(paint(f"  declared by the server: {inert(claims, lines=False)}", "dim", stream=where))
    lines.append(f"  asked because {why}")
    print("\n".join(lines), file=where, flush=True)
    return screen.ask("Send it?")


def target_of(text: str) -> Any:
    """A URL, a file or a command line as the library takes it; else a server of a host's configuration, by name."""
    if text.startswith(("http://", "https://")) or Path(text).suffix in (".py", ".json"):
        if "://" not in text and not Path(text).is_file():
            raise Usage(f"{text}: no such file")
        return text if "://" in text else Path(text)
    if not _NAME.fullmatch(text):
        return text
    for _, path in known_files(os.environ, sys.platform):
        if path.is_file():
            for entry in read_entries(path, os.environ):
                if entry.name == text:
                    return entry
    return text


def _agreer(args: Namespace, screen: Screen, consents: Consents) -> Any:
    def agree(entry: Entry) -> bool:
        if consents.agreed(entry):
            return True
        if not args.yes:
            command = " ".join(map(shlex.quote, mask_words(entry.command)))
            screen.note(f"{entry.source} wants to start, as {entry.name}:")
            print(f"  {inert(command, lines=False)}", file=sys.stderr)
            for name in entry.env:
                print(f"  with {inert(name, lines=False)} in its environment", file=sys.stderr)
            if not screen.ask("Start it, now and from now on?"):
                return False
        consents.agree(entry)
        return True

    return agree


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
