"""`tools.lock`: the tools of servers as somebody has agreed to them, in a file that people read, compare and commit.

JSON, everything sorted, one member a line, so that a difference of two files shows what changed. A description of
several lines is an array of them. What is not seen, or acts on a screen, is written as an escape. The fingerprint
beside each tool has to fit its text: whoever edits one by hand and not the other is found out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from handrail.errors import HandrailError
from handrail.guards.fingerprint import canonical, definition, fingerprint
from handrail.model import Json, Object
from handrail.text.controls import inert, one_line

__all__ = ["LockError", "Locked", "lock_text", "read_lock"]

MAX_BYTES = 32 * 1024 * 1024
_FORM = 1
_NOT_ASCII = re.compile(r"[\x7f-\U0010ffff]")


class LockError(HandrailError, ValueError):
    """A lock file cannot be used: it says where, and what is wrong there."""


class Locked(Struct, frozen=True):
    """One server of a lock: what it was reached by (empty if that is secret), its revision, its tools by name."""

    target: str
    revision: str
    tools: dict[str, Object]


def lock_text(servers: Mapping[str, Locked]) -> str:
    """The file that `read_lock` reads."""
    made = {
        name: {
            "target": server.target,
            "revision": server.revision,
            "tools": {tool: _written(tool, said) for tool, said in sorted(server.tools.items())},
        }
        for name, server in sorted(servers.items())
    }
    text = json.dumps({"form": _FORM, "servers": made}, indent=2, ensure_ascii=False)
    return _NOT_ASCII.sub(_seen, text) + "\n"


def read_lock(path: str | Path) -> dict[str, Locked]:
    """The servers of a lock, by name. A file that is not just as it should be is a `LockError`."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"over {MAX_BYTES:,} bytes")
        whole = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
        servers = _members(whole, "form", "servers")["servers"]
        if type(whole["form"]) is not int or whole["form"] != _FORM:
            raise ValueError(f"form: {whole['form']!r:.20} is not {_FORM}; it was written by another version")
        return {name: _server(name, said) for name, said in _object("servers", servers).items()}
    except json.JSONDecodeError as problem:
        raise LockError(f"{path}: line {problem.lineno}, column {problem.colno}: {problem.msg}") from None
    except OSError as problem:
        raise LockError(f"{path}: cannot be read: {problem.strerror}; handrail lock writes one") from None
    except (ValueError, RecursionError) as problem:
        raise LockError(f"{path}: {problem}") from None


def _server(name: str, said: Json) -> Locked:
    where = f"servers.{one_line(name, 60)}"
    members = _members(said, "target", "revision", "tools", where=where)
    for each in ("target", "revision"):
        if type(members[each]) is not str:
            raise ValueError(f"{where}.{each}: {members[each]!r:.40} is not a text")
    tools = _object(f"{where}.tools", members["tools"])
    read = {tool: _tool(f"{where}.tools.{one_line(tool, 100)}", tool, body) for tool, body in tools.items()}
    return Locked(members["target"], members["revision"], read)


def _written(name: str, said: Object) -> Object:
    if type(said.get("description")) is list:
        raise LockError(f"{one_line(name, 100)}: its description is a list, which no revision has")
    body: Object = {"fingerprint": f"sha256:{fingerprint(said)}"}
    body |= {member: json.loads(canonical(value)) for member, value in definition(said).items() if member != "name"}
    if type(text := body.get("description")) is str and "\n" in text:
        body["description"] = text.split("\n")
    return body


def _tool(where: str, name: str, body: Json) -> Object:
    said = {"name": name, **_object(where, body)}
    expected = said.pop("fingerprint", None)
    lines = said.get("description")
    if type(lines) is list and all(type(line) is str for line in lines):
        said["description"] = "\n".join(lines)
    if unknown := said.keys() - definition(said).keys():
        raise ValueError(f"{where}.{one_line(min(unknown), 60)}: nothing of that name is kept here")
    try:
        fits = expected == f"sha256:{fingerprint(said)}"
    except ValueError:  # half a surrogate: no server can have sent it
        fits = False
    if not fits:
        what = "its text does not fit its fingerprint, so one of them was edited"
        raise ValueError(f"{where}: {what}; take the edit back, or remove the tool and lock it anew")
    return definition(said)


def _object(where: str, value: Json) -> Object:
    if type(value) is not dict:
        raise ValueError(f"{where}: {value!r:.40} is not an object")
    return value


def _members(value: Json, *names: str, where: str = "") -> Object:
    members = _object(where or "the file", value)
    if wrong := members.keys() ^ set(names):
        what = "nothing of that name is kept here" if (name := min(wrong)) in members else "is missing"
        raise ValueError(f"{where}{'.' if where else ''}{one_line(name, 60)}: {what}")
    return members


def _unique(pairs: list[tuple[str, Json]]) -> Object:
    made: Object = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{one_line(name, 60)} stands twice in one object")
        made[name] = value
    return made


def _refuse(name: str) -> Json:
    raise ValueError(f"{name} is not a number of JSON")


def _seen(found: re.Match[str]) -> str:
    char = found[0]
    return char if inert(char) == char else json.dumps(char)[1:-1].replace("\x7f", "\\u007f")
