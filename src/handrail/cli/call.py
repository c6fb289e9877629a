"""`handrail call`: call a tool, after showing what is sent (APP-02, APP-03, APP-04)."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from base64 import b64decode
from pathlib import Path

from handrail.cli.codes import Code
from handrail.cli.reach import agreed, client
from handrail.cli.screen import Screen
from handrail.cli.show import find
from handrail.cli.words import arguments, document
from handrail.client.results import CallResult
from handrail.client.state import CALLS, state_folder
from handrail.guards.inert import inert, one_line
from handrail.model import Audio, Block, EmbeddedResource, Image, ResourceLink, Text

__all__ = ["run"]

MAX_FILES = 20
_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/gif": ".gif", "image/webp": ".webp"}
_SUFFIXES |= {"audio/wav": ".wav", "audio/mpeg": ".mp3", "audio/ogg": ".ogg"}


def run(args: Namespace, screen: Screen) -> int:
    with client(args, screen, audit=state_folder(os.environ) / CALLS) as it:
        with screen.progress(f"asking {args.server}"):
            tool = find(it.tools(), args.tool)
        if args.arguments_json is None:
            given = arguments(args.words, tool.input_schema)
        else:  # words are typed by the schema, and say more than the document
            given = document(args.arguments_json) | arguments(args.words, {**tool.input_schema, "required": []})
        confirm = agreed(tool, given, args, screen)
        with screen.progress(f"calling {tool.name}") as shown:
            progress = lambda far: shown.update(far.done, far.total, far.message)  # noqa: E731 — one line, used once
            result = it.call(tool.name, given, confirm=confirm, progress=progress)
    if screen.as_json:
        screen.data(result.raw)
    else:
        _print(result, args, screen)
    return Code.TOOL if result.is_error else Code.OK


def _print(result: CallResult, args: Namespace, screen: Screen) -> None:
    if result.risk:
        screen.note(f"careful: {one_line(result.risk, 200)}")
    if result.is_error:
        screen.note(f"{result.tool.name} says that it failed:")
    for number, block in enumerate(result.content):
        screen.say(_shown(block, number, Path(args.save)))
    if not result.content and result.data is not None:
        screen.data(result.data)
    for problem in result.problems:
        screen.note(one_line(problem, 300))


def _shown(block: Block, number: int, folder: Path) -> str:
    if isinstance(block, Text):
        return inert(block.text)
    if isinstance(block, Image | Audio):
        return _saved(block, number, folder)
    if isinstance(block, ResourceLink):
        return f"{inert(block.name, lines=False)}: {inert(block.uri, lines=False)}"
    if isinstance(block, EmbeddedResource) and "text" in block.resource:
        return f"{inert(block.resource['uri'], lines=False)}:\n{inert(block.resource['text'])}"
    kind = block.get("type") if isinstance(block, dict) else "resource"
    return f"[{one_line(str(kind), 60)}; --json shows it]"


def _saved(block: Image | Audio, number: int, folder: Path) -> str:
    """Pictures and sounds go to a new file; nothing is overwritten, and its name is ours."""
    data = block.data if isinstance(block.data, bytes) else b64decode(block.data)
    suffix = _SUFFIXES.get(block.mime_type, ".bin")
    folder.mkdir(parents=True, exist_ok=True)
    if number >= MAX_FILES:
        return f"{one_line(block.mime_type, 60)}, not saved: the first {MAX_FILES} were; --json shows it"
    for attempt in range(1000):
        path = folder / f"result-{number}{f'-{attempt}' if attempt else ''}{suffix}"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        with open(descriptor, "wb") as file:
            file.write(data)
        return f"{one_line(block.mime_type, 60)}, {len(data):,} bytes: {path}"
    print("handrail: too many files there already", file=sys.stderr)
    return f"{one_line(block.mime_type, 60)}, not saved"
