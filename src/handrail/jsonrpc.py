"""The JSON-RPC envelope: bytes to messages and back, strict JSON both ways.

`decode` gives a message or a `Refusal`, never an exception (P-01). The parser is strict already; what it lets
pass and we do not (P-02) is looked for cheaply first and exactly only when something could be wrong:

- duplicate keys: every member has one `:` of its own, so if no more colons are in the text than members
  came out of it, none was overwritten. Otherwise (a URL in a string will do) a second, slower parser decides.
- numbers of over 1,000 digits: looked for only where every 500th byte could belong to one.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from msgspec import UNSET, MsgspecError, Raw, Struct, UnsetType
from msgspec.json import Decoder, Encoder

from handrail.errors import Kind
from handrail.model import Json, Object

__all__ = [
    "Id",
    "Message",
    "Notification",
    "Refusal",
    "Request",
    "Response",
    "answer",
    "decode",
    "encode",
    "error",
    "notification",
    "read",
    "request",
]

Id = int | str

MAX_DEPTH = 128
MAX_DIGITS = 1_000
MAX_KEYS = 10_000

encode = Encoder().encode
_parse = Decoder().decode
_STRIDE = MAX_DIGITS // 2
_NUMBER = re.compile(rb"[0-9.eE+-]*")
_NUMBER_TWICE = re.compile(rb"[0-9.eE+-](?=[0-9.eE+-])")


class Request(Struct, gc=False):
    id: Id
    method: str
    params: Object


class Notification(Struct):
    method: str
    params: Object


class Response(Struct):
    """An answer to a request of ours: a result, or an error object."""

    id: Id
    result: Json = UNSET
    error: Object | UnsetType = UNSET


class Refusal(Struct):
    """What was wrong with a message, and its id where that could be read."""

    kind: Kind
    text: str
    id: Id | UnsetType = UNSET


Message = Request | Notification | Response | Refusal


def decode(data: bytes) -> Message | list[Json]:
    """Read one message; a list is a batch, its items to be given to `read`."""
    try:
        value = _parse(data)
    except (MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        return Refusal(Kind.PARSE, f"Not acceptable JSON: {problem}", _salvage(data))
    if type(value) is not dict and type(value) is not list:
        return Refusal(Kind.INVALID_REQUEST, "A message is a JSON object")
    flaw = _flaw(data, value)
    if flaw:
        return Refusal(Kind.PARSE, f"Not acceptable JSON: {flaw}", _id_of(value))
    return value if type(value) is list else read(value)


def read(value: Json) -> Message:
    """The message a decoded JSON value stands for."""
    if type(value) is not dict:
        return Refusal(Kind.INVALID_REQUEST, "A message is a JSON object")
    method = value.get("method")
    if type(method) is not str or "result" in value or "error" in value or value.get("jsonrpc") != "2.0":
        return _read_other(value)
    ident = value.get("id", UNSET)
    params = value.get("params", UNSET)
    kind = type(ident)
    if kind is int or kind is str:
        if type(params) is dict:
            return Request(ident, method, params)
        if params is UNSET:
            return Request(ident, method, {})
        return Refusal(Kind.BAD_PARAMS, f"params must be an object, not {_named(params)}", ident)
    if ident is UNSET:
        return Notification(method, params if type(params) is dict else {})
    return Refusal(Kind.INVALID_REQUEST, f"id must be a string or an integer, not {_named(ident)}")


def answer(ident: Id, result: Json) -> bytes:
    return encode(_Answer("2.0", ident, result))


def error(ident: Id | UnsetType | None, code: int, message: str, data: Json = UNSET) -> bytes:
    return encode(_Error("2.0", ident, _ErrorBody(code, message, data)))


def notification(method: str, params: Json = UNSET) -> bytes:
    return encode(_Notification("2.0", method, params))


def request(ident: Id, method: str, params: Json = UNSET) -> bytes:
    return encode(_Request("2.0", ident, method, params))


class _Answer(Struct):
    jsonrpc: str
    id: Id
    result: Json | Raw


class _ErrorBody(Struct):
    code: int
    message: str
    data: Json = UNSET


class _Error(Struct):
    jsonrpc: str
    id: Id | UnsetType | None
    error: _ErrorBody


class _Notification(Struct):
    jsonrpc: str
    method: str
    params: Json = UNSET


class _Request(Struct):
    jsonrpc: str
    id: Id
    method: str
    params: Json = UNSET


def _read_other(value: Object) -> Message:
    """Everything that is not plainly a request or a notification."""
    ident = _id_of(value)
    if value.get("jsonrpc") != "2.0":
        return Refusal(Kind.INVALID_REQUEST, 'jsonrpc must be "2.0"', ident)
    if "method" in value:
        why = "method must be a string" if type(value["method"]) is not str else "method beside result or error"
        return Refusal(Kind.INVALID_REQUEST, why, ident)
    if ("result" in value) == ("error" in value):
        return Refusal(Kind.INVALID_REQUEST, "A message has a method, a result or an error", ident)
    if ident is UNSET:
        # An error without a readable id is about something we sent; there is nobody to answer.
        absent = value.get("id") is None and "error" in value
        return Response("", error=_error_of(value)) if absent else Refusal(Kind.INVALID_REQUEST, "id missing")
    if "result" in value:
        return Response(ident, result=value["result"])
    return Response(ident, error=_error_of(value))


def _error_of(value: Object) -> Object:
    found = value["error"]
    return found if type(found) is dict else {"code": 0, "message": "an error that is not an object"}


def _id_of(value: Json) -> Id | UnsetType:
    ident = value.get("id") if type(value) is dict else None
    return ident if type(ident) is int or type(ident) is str else UNSET


def _named(value: Json) -> str:
    names = {type(None): "null", bool: "a boolean", float: "a fraction", list: "an array", dict: "an object"}
    return names.get(type(value), "a number" if type(value) is int else "a string")


def _flaw(data: bytes, value: Json) -> str:
    """What the parser let pass and we do not."""
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH}"
    members, most = _members(value)
    if most > MAX_KEYS:
        return f"an object with over {MAX_KEYS} members"
    if data.count(b":") != members and _separators(data) != members:
        return _strict_flaw(data)
    if len(data) > MAX_DIGITS and _has_long_number(data):
        return _strict_flaw(data)
    return ""


def _members(value: Json) -> tuple[int, int]:
    """How many members all objects in `value` have together, and the most one of them has."""
    total = most = 0
    rest = [value]
    for item in rest:
        if type(item) is dict:
            size = len(item)
            total += size
            if size > most:
                most = size
            item = item.values()
        for each in item:
            kind = type(each)
            if kind is dict or kind is list:
                rest.append(each)
    return total, most


def _depth(value: Json) -> int:
    """How deep `value` is nested, as far as one level more than is allowed."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        inner: list[Json] = []
        for item in level:
            inner += item.values() if type(item) is dict else item
        level = [each for each in inner if type(each) is dict or type(each) is list]
    return depth


def _separators(data: bytes) -> int:
    # A colon after a member name follows a quote or white space at once; most colons inside texts do not.
    return sum(map(data.count, (b'":', b" :", b"\t:", b"\r:", b"\n:")))


def _has_long_number(data: bytes) -> bool:
    """Whether a text might hold a number of over 1,000 digits; wrong only in the harmless way."""
    # It would cover two neighbours among every 500th byte, and all between them.
    for hit in _NUMBER_TWICE.finditer(data[::_STRIDE]):
        at = hit.start() * _STRIDE
        found = _NUMBER.match(data, at)
        if found and found.end() - at > _STRIDE:
            return True
    return False


def _strict_flaw(data: bytes) -> str:
    try:
        json.loads(data, object_pairs_hook=_unique, parse_int=_short, parse_float=_short, parse_constant=_refuse)
    except _Flaw as flaw:
        return str(flaw)
    return ""


class _Flaw(Exception):
    pass


def _unique(pairs: list[tuple[str, Json]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _Flaw(f"the member {name[:60]!r} stands twice in one object")
        seen.add(name)


def _short(number: str) -> int | None:
    if len(number) > MAX_DIGITS and sum(map(str.isdigit, number)) > MAX_DIGITS:
        raise _Flaw(f"a number of over {MAX_DIGITS} digits")
    return None


def _refuse(name: str) -> NoReturn:
    raise _Flaw(f"{name} is not a JSON number")


def _salvage(data: bytes) -> Id | UnsetType:
    """The id of a text that is not acceptable, if a lenient reading finds one: a caller that waits wants an answer."""
    try:
        value: Any = json.loads(data.decode("utf-8", "surrogateescape"), parse_int=_int_or_none)
        ident = _id_of(value)
        encode(ident)
    except (ValueError, RecursionError):
        return UNSET
    return ident


def _int_or_none(number: str) -> int | None:
    return int(number) if len(number) <= MAX_DIGITS else None
