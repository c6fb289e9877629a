"""Pinned tools: a fingerprint of each definition, and what a difference means (P-31).

The fingerprint is SHA-256 over the canonical JSON of all that a model or a person is told of a tool: name, title,
description, schemas, annotations. The order of members does not count, nor whether a whole number is written 1 or 1.0
(RFC 8785: on its way a definition may pass programs that know one kind of number only). Nothing else is made equal:
texts count as they are, in whichever normal form, and `null` is not absent. Icons and `_meta` do not count: no model
reads them, and servers write into them what changes by itself, such as addresses and times.

A tool that is listed in another revision than before is compared in words that both have (`comparable`). A member that
the other revision could not show is a difference only if it is there now, for then nobody has seen it; annotations also
if they are gone, for a server could lose a warning by falling back to a revision without them. `x-mcp-header`, which
says how an argument travels to the same server, is not compared with revisions that have none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec import UNSET, ValidationError, convert
from msgspec.structs import fields

from handrail.jsonrpc import encode_sorted
from handrail.model import Json, Object, Tool
from handrail.revisions import REVISIONS

__all__ = ["FIELDS", "canonical", "comparable", "definition", "fingerprint", "source_of"]

FIELDS = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")
_ATTRIBUTES = {each.encode_name: each.name for each in fields(Tool) if each.encode_name in FIELDS}


def definition(tool: Tool | Mapping[str, Json]) -> Object:
    """What counts of a tool: one of a server's own, or one as it was listed."""
    if isinstance(tool, Tool):
        members = {name: getattr(tool, attribute) for name, attribute in _ATTRIBUTES.items()}
        return {name: value for name, value in members.items() if value is not UNSET}
    return {name: tool[name] for name in FIELDS if name in tool}


def canonical(value: Json) -> bytes:
    encoded = encode_sorted(value)
    return encode_sorted(_normalize_numbers(value)) if b".0" in encoded else encoded


def source_of(function: Callable[..., Any]) -> str:
    """Which file the code of a function is in, and what the file says; empty where there is none, as at a prompt."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    try:
        path = Path(code.co_filename).resolve() if code is not None else Path()
        file_stat = path.stat()
        return f"{path} {_file_digest(path, file_stat.st_mtime_ns, file_stat.st_size)}" if path.is_file() else ""
    except OSError:
        return ""


@lru_cache(maxsize=256)
def _file_digest(path: Path, changed: int, size: int) -> str:
    return sha256(path.read_bytes()).hexdigest()


def fingerprint(tool: Tool | Mapping[str, Json]) -> str:
    """Return a SHA-256 in hexadecimal. It changes with everything of the tool that a model or a person reads."""
    return sha256(canonical(definition(tool))).hexdigest()


def comparable(old: Object, old_revision: str, new: Object, new_revision: str) -> tuple[Object, Object]:
    """Two definitions of a tool, in words that both of their revisions have."""
    if old_revision == new_revision or not {old_revision, new_revision} <= REVISIONS.keys():
        return old, new
    old_members, new_members = (_translate(each, old_revision, new_revision) for each in (old, new))
    hints = new_members.get("annotations")
    for name in (old.keys() | new.keys()) - old_members.keys() - new_members.keys():
        if name == "title" and type(hints) is dict and new.get(name, UNSET) == hints.get(name):
            continue  # 2025-03-26 has it there
        if name in new or name == "annotations":
            old_members |= {name: old[name]} if name in old else {}
            new_members |= {name: new[name]} if name in new else {}
    return old_members, new_members


def _normalize_numbers(value: Json) -> Json:
    if type(value) is float:
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if type(value) is dict:
        return {name: _normalize_numbers(inner) for name, inner in value.items()}
    return [_normalize_numbers(inner) for inner in value] if type(value) is list else value


def _translate(members: Object, *revisions: str) -> Object:
    """A definition as these revisions would have it listed; as it is, if they would not."""
    try:
        for each in revisions:
            members = definition(REVISIONS[each].tool(convert(members, Tool)))
    except ValidationError:
        pass
    return dict(members)
