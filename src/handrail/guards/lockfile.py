"""`tools.lock`: the accepted tools of servers, in a file that people read, compare and commit.

JSON, everything sorted, one member a line, so that a difference of two files shows what changed. A description of
several lines is an array of them. Invisible characters and terminal controls are written as escapes. The fingerprint
beside each tool has to fit its text: an edit of only one of them is detected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from handrail.errors import HandrailError
from handrail.guards.tool_diff import canonical, definition, fingerprint
from handrail.model import Json, Object
from handrail.text.controls import escape, one_line

__all__ = ["LockError", "LockedServer", "lock_text", "read_lock"]

MAX_LOCK_BYTES = 32 * 1024 * 1024
_FORMAT_VERSION = 1
_NOT_ASCII = re.compile(r"[\x7f-\U0010ffff]")


class LockError(HandrailError, ValueError):
    """A lock file cannot be used: it says where, and what is wrong there."""


class LockedServer(Struct, frozen=True):
    """One server of a lock: what it was reached by (empty if that is secret), its revision, its tools by name."""

    target: str
    revision: str
    tools: dict[str, Object]


def lock_text(servers: Mapping[str, LockedServer]) -> str:
    """The file that `read_lock` reads."""
    document = {
        name: {
            "target": server.target,
            "revision": server.revision,
            "tools": {
                tool: _encode_tool(tool, tool_definition) for tool, tool_definition in sorted(server.tools.items())
            },
        }
        for name, server in sorted(servers.items())
    }
    text = json.dumps({"form": _FORMAT_VERSION, "servers": document}, indent=2, ensure_ascii=False)
    return _NOT_ASCII.sub(_escape, text) + "\n"


def read_lock(path: str | Path) -> dict[str, LockedServer]:
    """The servers of a lock, by name. A file that is not just as it should be is a `LockError`."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_LOCK_BYTES + 1)
        if len(data) > MAX_LOCK_BYTES:
            raise ValueError(f"over {MAX_LOCK_BYTES:,} bytes")
        document = json.loads(data.decode(), object_pairs_hook=_unique_members, parse_constant=_reject_constant)
        servers = _members(document, "form", "servers")["servers"]
        if type(document["form"]) is not int or document["form"] != _FORMAT_VERSION:
            raise ValueError(
                f"form: {document['form']!r:.20} is not {_FORMAT_VERSION}; it was written by another version"
            )
        return {name: _decode_server(name, value) for name, value in _object("servers", servers).items()}
    except json.JSONDecodeError as problem:
        raise LockError(f"{path}: line {problem.lineno}, column {problem.colno}: {problem.msg}") from None
    except OSError as problem:
        raise LockError(f"{path}: cannot be read: {problem.strerror}; handrail lock writes one") from None
    except (ValueError, RecursionError) as problem:
        raise LockError(f"{path}: {problem}") from None


def _decode_server(name: str, value: Json) -> LockedServer:
    where = f"servers.{one_line(name, 60)}"
    members = _members(value, "target", "revision", "tools", where=where)
    for each in ("target", "revision"):
        if type(members[each]) is not str:
            raise ValueError(f"{where}.{each}: {members[each]!r:.40} is not a text")
    tools = _object(f"{where}.tools", members["tools"])
    definitions = {
        tool: _decode_tool(f"{where}.tools.{one_line(tool, 100)}", tool, body) for tool, body in tools.items()
    }
    return LockedServer(members["target"], members["revision"], definitions)


def _encode_tool(name: str, members: Object) -> Object:
    if type(members.get("description")) is list:
        raise LockError(f"{one_line(name, 100)}: its description is a list, which no revision has")
    body: Object = {"fingerprint": f"sha256:{fingerprint(members)}"}
    body |= {member: json.loads(canonical(value)) for member, value in definition(members).items() if member != "name"}
    if type(text := body.get("description")) is str and "\n" in text:
        body["description"] = text.split("\n")
    return body


def _decode_tool(where: str, name: str, body: Json) -> Object:
    members = {"name": name, **_object(where, body)}
    expected = members.pop("fingerprint", None)
    lines = members.get("description")
    if type(lines) is list and all(type(line) is str for line in lines):
        members["description"] = "\n".join(lines)
    if unknown := members.keys() - definition(members).keys():
        raise ValueError(f"{where}.{one_line(min(unknown), 60)}: nothing of that name is kept here")
    try:
        fits = expected == f"sha256:{fingerprint(members)}"
    except ValueError:  # half a surrogate: no server can have sent it
        fits = False
    if not fits:
        what = "its text does not fit its fingerprint, so one of them was edited"
        raise ValueError(f"{where}: {what}; take the edit back, or remove the tool and lock it anew")
    return definition(members)


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


def _unique_members(pairs: list[tuple[str, Json]]) -> Object:
    members: Object = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"{one_line(name, 60)} stands twice in one object")
        members[name] = value
    return members


def _reject_constant(name: str) -> Json:
    raise ValueError(f"{name} is not a number of JSON")


def _escape(match: re.Match[str]) -> str:
    char = match[0]
    return char if escape(char) == char else json.dumps(char)[1:-1].replace("\x7f", "\\u007f")
