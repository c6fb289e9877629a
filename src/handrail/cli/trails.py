"""`handrail audit verify` and `handrail audit export`: audit trails, checked and as they are (P-16)."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from msgspec import to_builtins

from handrail.cli.codes import Code, Usage
from handrail.cli.guarded import Guarded
from handrail.cli.screen import Screen
from handrail.client.state import CALLS, state_folder
from handrail.config import STATE
from handrail.guards.chain import verify
from handrail.guards.inert import inert, one_line
from handrail.guards.trail_reading import TrailFile

__all__ = ["paths", "run"]


def paths(args: Namespace) -> list[Path]:
    """Those that are named, or the one that `handrail serve` would write to from here."""
    file = Guarded(args).config.audit.file
    return [Path(each) for each in args.files] or [Path(file) if file else state_folder(os.environ) / STATE]


def run(args: Namespace, screen: Screen) -> int:
    found = paths(args)
    if args.what == "verify":
        made = state_folder(os.environ) / CALLS
        if not args.files and not args.head and made.exists():
            found = [path for path in found if path.exists()] + [made]
        return max([_verify(path, args.head or "", screen) for path in found])
    if sys.stdout.isatty():
        raise Usage("export: the records go out as they are, and a terminal might obey them; add > trail.jsonl")
    for path in found:
        trail = TrailFile(path)
        lines = trail.salvaged() if args.salvage else (line for _, line in trail.lines())
        sys.stdout.buffer.writelines(lines)
        if trail.damage:
            raise Usage(f"{trail.damage}: not all was read; --salvage finds what there is")
    return Code.OK


def _verify(path: Path, head: str, screen: Screen) -> Code:
    trail = TrailFile(path)
    found = verify(trail.lines(), head=head)
    code = Code.USAGE if found.flaw or trail.damage else Code.OK
    if screen.as_json:
        screen.data({"file": str(path), "ok": not code, "damage": trail.damage, **to_builtins(found)})
        return code
    verdict = screen.paint("bad", "red") if code else screen.paint("good", "green")
    places = f", {found.first} to {found.last}" if found.records else ""
    screen.say(f"{inert(str(path), lines=False)}: {verdict}: {found.records} records{places}")
    if found.flaw:
        screen.say(f"  record {found.flaw.number} ({one_line(found.flaw.place, 200)}): {found.flaw.text}")
    if found.bad > 1:
        screen.say(f"  and {found.bad - 1} more such places")
    if trail.damage:
        screen.say(f"  {inert(trail.damage, lines=False)}; `handrail audit export --salvage` reads what is left")
    if found.torn:
        screen.say(f"  the last {found.torn} bytes are a record that was never finished")
    if found.unfinished:
        names = one_line(", ".join(found.unfinished), 400)
        screen.say(f"  {len(found.unfinished)} calls have begun and not ended: {names}")
    if found.missed:
        screen.say(f"  {found.missed} records could not be written, as the trail says itself")
    if found.head:
        screen.say(f"  head {found.head}")
    return code
