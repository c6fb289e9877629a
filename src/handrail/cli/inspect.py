"""`handrail inspect`: what a server is and says, how long it takes, and (`--wire`) every message (APP-14)."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace

from handrail.cli.codes import Code, code_of
from handrail.cli.reach import client
from handrail.cli.screen import Screen, json_text
from handrail.errors import PeerError
from handrail.guards.inert import inert, mask, mask_secrets, one_line
from handrail.model import Json, Object

__all__ = ["run"]

MAX_KEPT = 1_000  # messages; the last are the ones one looks for


def run(args: Namespace, screen: Screen) -> int:
    wire: list[Object] = []

    def tap(direction: str, message: bytes) -> None:
        try:
            shown: Json = mask_secrets(json.loads(message))
        except ValueError:
            shown = mask(message.decode("utf-8", "backslashreplace"))
        if screen.as_json:
            wire.append({"to" if direction == ">" else "from": shown})
            del wire[:-MAX_KEPT]
        else:
            print(f"{direction} {json_text(shown)}", file=sys.stderr, flush=True)

    began = time.monotonic()
    with client(args, screen, tap=tap if args.wire else None) as it:
        connected = time.monotonic() - began
        welcome, identity, revision = it.welcome, it.identity, it.revision
        began = time.monotonic()
        tools, problem, code = None, "", Code.OK
        try:
            tools = it.tools()
        except PeerError as failed:
            problem, code = str(failed), code_of(failed)
        listed = time.monotonic() - began
    found: Object = {
        "server": identity,
        "revision": revision,
        "capabilities": welcome.get("capabilities"),
        "supported": welcome.get("supportedVersions"),
        "instructions": welcome.get("instructions"),
        "tools": None if tools is None else len(tools),
        "refused": {} if tools is None else tools.refused,
        "connect_seconds": round(connected, 3),
        "list_seconds": round(listed, 3),
        "problem": problem or None,
    }
    if screen.as_json:
        screen.data(found | ({"wire": wire} if args.wire else {}))
    else:
        rows = [(name.replace("_", " "), _cell(value)) for name, value in found.items() if value not in (None, {}, [])]
        screen.table(rows, styles=("bold",))
    return code


def _cell(value: Json) -> str:
    return one_line(inert(value) if isinstance(value, str) else json_text(value), 400)
