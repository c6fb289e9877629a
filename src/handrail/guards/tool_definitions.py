"""Definitions of tools: their fingerprints, what has changed in one, and `tools.lock` (P-31, APP-20).

Pinned tools: a fingerprint of each definition, and what a difference means (P-31).

The fingerprint is SHA-256 over the canonical JSON of all that a model or a person is told of a tool: name, title,
description, schemas, annotations. The order of members does not count, nor whether a whole number is written 1 or 1.0
(RFC 8785: on its way a definition may pass programs that know one kind of number only). Nothing else is made equal:
texts count as they are, in whichever normal form, and `null` is not absent. Icons and `_meta` do not count: no model
reads them, and servers write into them what changes by itself, such as addresses and times.

A tool that is listed in another revision than before is compared in words that both have (`comparable`). A member that
the other revision could not show is a difference only if it is there now, for then nobody has seen it; annotations also
if they are gone, for a server could lose a warning by falling back to a revision without them. `x-mcp-header`, which
says how an argument travels to the same server, is not compared with revisions that have none.

`tools.lock`: the accepted tools of servers, in a file that people read, compare and commit.

JSON, everything sorted, one member a line, so that a difference of two files shows what changed. A description of
several lines is an array of them. Invisible characters and terminal controls are written as escapes. The fingerprint
beside each tool has to fit its text: an edit of only one of them is detected.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET, Struct, ValidationError, convert
from msgspec.structs import fields, replace

from handrail.errors import HandrailError
from handrail.jsonrpc import encode_sorted
from handrail.model import Json, Object, Tool
from handrail.revisions import REVISIONS
from handrail.text.controls import escape, one_line, skeleton, strip_invisible, texts_in

__all__ = [
    "FIELDS",
    "TOOL_CLASSES",
    "Change",
    "LockError",
    "LockedServer",
    "canonical",
    "change_kinds",
    "comparable",
    "compare_definitions",
    "definition",
    "fingerprint",
    "format_changes",
    "lock_text",
    "read_lock",
    "source_of",
]

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


ChangeKind = Literal["wording", "widened", "narrowed", "schema", "hint", "invisible", "new", "gone"]

MAX_PLACES = 30  # places in one tool
MAX_LINES, MAX_LINE_CHARS = 20, 400  # of either side of one
# Keywords of JSON Schema, by what a change of them means.
_TEXTS = frozenset({"title", "description", "$comment"})
_LOWER = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_UPPER = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_LIMITS = {*_LOWER, *_UPPER, *"type enum const pattern format multipleOf required items anyOf allOf oneOf not".split()}
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_INNER = frozenset("items additionalProperties contains propertyNames not if then else unevaluatedProperties".split())
_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
# Whatever accepts more below these accepts more as a whole; below all others that is not certain.
_MONOTONE_KEYWORDS = frozenset(
    "properties patternProperties $defs definitions items additionalProperties anyOf allOf".split()
)
_REVERSING_KEYWORDS = (b'"not":', b'"if":', b'"oneOf":', b'"contains":')


class Change(Struct, frozen=True):
    """One difference: where (a JSON pointer), of which kind, and both sides of it; `UNSET` where there is nothing.

    `wording` is text, `hint` an annotation; a schema that accepts more is `widened`, one that accepts less `narrowed`,
    any other change of it is `schema`. `invisible`: both look the same, or what is new holds characters nobody sees.
    """

    path: str
    kind: ChangeKind
    before: Json = UNSET
    after: Json = UNSET


def compare_definitions(old: Object | None, new: Object | None) -> list[Change]:
    """Every difference between two definitions; None stands for no tool at all."""
    changes: list[Change] = []
    if old is None or new is None:
        changes.append(
            Change("", "gone" if new is None else "new", *(UNSET if side is None else side for side in (old, new)))
        )
    else:
        for name in FIELDS:
            changes += _field_changes(name, old.get(name, UNSET), new.get(name, UNSET))
    return [change for each in changes for change in _with_invisible(each)]


def change_kinds(changes: Sequence[Change]) -> list[str]:
    """The kinds of changes there are, each once."""
    return sorted({each.kind for each in changes})


def format_changes(changes: Sequence[Change]) -> str:
    """Changes to look at on a terminal: each place with its kind, what was there (-) and what is there now (+).

    Nothing in it acts or hides; what is cut off is counted. What looks the same is written in ASCII.
    """
    lines: list[str] = []
    places = [[*each] for _, each in groupby(changes, lambda change: change.path)]
    for place in places[:MAX_PLACES]:
        lines.append(f"{one_line(place[0].path, 200) or 'the tool'}: {', '.join(each.kind for each in place)}")
        lines += _format_sides(place[0])
    if len(places) > MAX_PLACES:
        lines.append(f"… and {len(places) - MAX_PLACES:,} more places")
    return "\n".join(lines)


# What a difference means


def _field_changes(name: str, was: Json, now: Json) -> Iterator[Change]:
    path = f"/{name}"
    if name.endswith("Schema"):
        is_uncertain = (
            any(word in canonical([was, now]) for word in _REVERSING_KEYWORDS) if UNSET not in (was, now) else False
        )
        for each in _schema_changes(path, was, now):
            yield (
                _without_direction(each)
                if is_uncertain and ("/$defs/" in each.path or "/definitions/" in each.path)
                else each
            )
    elif name == "annotations" and type(was) is dict and type(now) is dict:
        for key in sorted(was.keys() | now.keys()):
            kind: ChangeKind = "wording" if key == "title" else "hint"
            yield Change(path + _pointer_step(key), kind, was.get(key, UNSET), now.get(key, UNSET))
    else:
        yield Change(path, "hint" if name == "annotations" else "wording", was, now)


def _schema_changes(path: str, was: Json, now: Json) -> Iterator[Change]:
    if _is_same(was, now):
        return
    if type(was) is not dict or type(now) is not dict:
        yield Change(path, _keyword_kind("additionalProperties", was, now), was, now)
        return
    for key in sorted(was.keys() | now.keys()):
        left, right = was.get(key, UNSET), now.get(key, UNSET)
        for each in (
            _keyword_changes(path + _pointer_step(key), key, left, right, now) if not _is_same(left, right) else ()
        ):
            yield (
                each
                if key in _MONOTONE_KEYWORDS or each.path == path + _pointer_step(key)
                else _without_direction(each)
            )


def _keyword_changes(path: str, key: str, was: Json, now: Json, schema: Object) -> Iterator[Change]:
    if key in _TEXTS and dict not in (type(was), type(now)):
        yield Change(path, "wording", was, now)
    elif key in _MAPS and {type(was), type(now)} <= {dict, type(UNSET)} and (was or now):
        left, right = was or {}, now or {}
        for name in sorted(left.keys() | right.keys()):
            if name in left and name in right:
                yield from _schema_changes(path + _pointer_step(name), left[name], right[name])
            else:
                kind = _property_kind(name in right, schema) if key == "properties" else "schema"
                yield Change(path + _pointer_step(name), kind, left.get(name, UNSET), right.get(name, UNSET))
    elif key in _INNER and type(was) is dict and type(now) is dict:
        yield from _schema_changes(path, was, now)
    elif key in _LISTS and type(was) is list and type(now) is list and len(was) == len(now):
        for number, (left, right) in enumerate(zip(was, now, strict=True)):
            yield from _schema_changes(f"{path}/{number}", left, right)
    else:
        yield Change(path, _keyword_kind(key, was, now), was, now)


def _property_kind(is_new: bool, schema: Object) -> ChangeKind:
    if is_new:
        return "widened"
    return "narrowed" if schema.get("additionalProperties") is False and "patternProperties" not in schema else "schema"


def _keyword_kind(key: str, was: Json, now: Json) -> ChangeKind:
    """Whether a keyword that changed lets more or less through, where that is certain."""
    less: Json
    more: Json
    if UNSET in (was, now) and key in _LIMITS:
        return "narrowed" if was is UNSET else "widened"
    if key in _LOWER | _UPPER and {type(was), type(now)} <= {int, float}:
        less, more = (now, was) if key in _LOWER else (was, now)
    elif key == "type":
        less, more = _schema_types(was), _schema_types(now)
    elif key in ("enum", "anyOf", "required", "allOf") and type(was) is list and type(now) is list:
        less, more = ({*map(canonical, each)} for each in ((was, now) if key in ("enum", "anyOf") else (now, was)))
    elif key == "additionalProperties":
        less, more = _openness(was), _openness(now)
    elif key == "uniqueItems":
        less, more = was is not True, now is not True
    else:
        return "schema"
    return "widened" if less < more else "narrowed" if less > more else "schema"


def _schema_types(schema_type: Json) -> set[str]:
    types = {each for each in (schema_type if type(schema_type) is list else [schema_type]) if type(each) is str}
    return types | {"integer"} if "number" in types else types


def _openness(schema: Json) -> int:
    return 0 if schema is False else 2 if schema in (UNSET, True, {}) else 1


def _without_direction(change: Change) -> Change:
    return replace(change, kind="schema") if change.kind in ("widened", "narrowed") else change


def _with_invisible(change: Change) -> Iterator[Change]:
    """The change itself, unless there is none; and whether more than meets the eye has come with it."""
    was, now = change.before, change.after
    if _is_same(was, now):
        return
    looks_same = type(was) is str and type(now) is str and skeleton(was) == skeleton(now)
    if not looks_same:
        yield change
    if looks_same or _hidden_characters(now) - _hidden_characters(was):
        yield replace(change, kind="invisible")


def _hidden_characters(value: Json) -> Counter[str]:
    hidden: Counter[str] = Counter()
    for each in texts_in(value):
        if strip_invisible(each) != each:
            hidden += Counter(each) - Counter(strip_invisible(each))
    return hidden


def _is_same(one: Json, other: Json) -> bool:
    return one is other or (UNSET not in (one, other) and canonical(one) == canonical(other))


def _pointer_step(name: str) -> str:
    return "/" + name.replace("~", "~0").replace("/", "~1")


# What a difference looks like


def _format_sides(change: Change) -> Iterator[str]:
    was, now = _lines(change.before), _lines(change.after)
    head = _common_prefix(was, now)
    tail = _common_prefix(was[head:][::-1], now[head:][::-1])
    was, now = was[head : len(was) - tail], now[head : len(now) - tail]
    start = max(0, _common_prefix(was[0], now[0]) - 60) if len(was) == len(now) == 1 else 0
    for sign, lines in (("-", was), ("+", now)):
        for line in lines[:MAX_LINES]:
            cut = line[start : start + MAX_LINE_CHARS]
            display = cut.encode("ascii", "backslashreplace").decode() if change.kind == "invisible" else cut
            more = len(line) - start - len(cut)
            ends = f"… ({more:,} characters more)" if more > 0 else ""
            yield f"  {sign} {'…' if start else ''}{escape(display, lines=False)}{ends}"
        if len(lines) > MAX_LINES:
            yield f"  {sign} … ({len(lines) - MAX_LINES:,} lines more)"


def _lines(value: Json) -> list[str]:
    if value is UNSET:
        return []
    text = value if type(value) is str else json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    return text.split("\n")


def _common_prefix(one: Sequence[str], other: Sequence[str]) -> int:
    """How many of the first are the same in both."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


MAX_LOCK_BYTES = 32 * 1024 * 1024
_FORMAT_VERSION = 1
_NOT_ASCII = re.compile(r"[\x7f-\U0010ffff]")


class LockError(HandrailError, ValueError):
    """A lock file cannot be used: it says where, and what is wrong there."""


class LockedServer(Struct, frozen=True):
    """One server of a lock: what it was reached by (empty if that is secret), its revision, its tools by name.

    `classes` has what a person has accepted of tools behind a gateway, by name: reads, writes or destroys.
    """

    target: str
    revision: str
    tools: dict[str, Object]
    classes: dict[str, str] = {}


TOOL_CLASSES = ("reads", "writes", "destroys")


def lock_text(servers: Mapping[str, LockedServer]) -> str:
    """The file that `read_lock` reads."""
    document = {
        name: {
            "target": server.target,
            "revision": server.revision,
            "tools": {
                tool: _encode_tool(tool, tool_definition, server.classes.get(tool, ""))
                for tool, tool_definition in sorted(server.tools.items())
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
    definitions: dict[str, Object] = {}
    classes: dict[str, str] = {}
    for tool, body in tools.items():
        place = f"{where}.tools.{one_line(tool, 100)}"
        body = dict(_object(place, body))
        if "class" in body:
            classes[tool] = body.pop("class")
            if classes[tool] not in TOOL_CLASSES:
                raise ValueError(f"{place}.class: {classes[tool]!r:.40} is not one of {', '.join(TOOL_CLASSES)}")
        definitions[tool] = _decode_tool(place, tool, body)
    return LockedServer(members["target"], members["revision"], definitions, classes)


def _encode_tool(name: str, members: Object, accepted: str = "") -> Object:
    if type(members.get("description")) is list:
        raise LockError(f"{one_line(name, 100)}: its description is a list, which no revision has")
    body: Object = {"fingerprint": f"sha256:{fingerprint(members)}"} | ({"class": accepted} if accepted else {})
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
