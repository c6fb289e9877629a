"""The JSON-RPC envelope: bytes to messages and back, strict JSON both ways.

`decode` gives a message or a `Refusal`, never an exception (P-01). The parser is strict already; what it lets
pass and we do not (P-02) is looked for cheaply first and exactly only when something could be wrong:

- duplicate keys: every member has one `:` of its own, so if no more colons are in the text than members
  came out of it, none was overwritten; nor if writing the members again gives the same text. Otherwise (spaces
  between the members, and a URL in one of them) a second, slower parser decides.
- numbers of over 1,000 digits: looked for only where every 500th byte could belong to one.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from msgspec import UNSET, MsgspecError, Struct, UnsetType
from msgspec.json import Decoder, Encoder

from handrail.errors import Kind
from handrail.model import Json, Object

Id = int | str

MAX_DEPTH = 128
MAX_DIGITS = 1_000
MAX_KEYS = 10_000
MAX_PARTS = 100_000  # objects and arrays in one message

encode = Encoder().encode
encode_sorted = Encoder(order="sorted").encode  # the same bytes for the same members, whatever their order
_parse = Decoder().decode
_TOO_MANY = f"over {MAX_PARTS:,} objects and arrays"
_STRIDE = MAX_DIGITS // 2
_TOO_LONG = 10**MAX_DIGITS
_SHORT = 2 * MAX_DEPTH  # bytes, too few to be nested too deeply
_LONG = 4096
_FEW = 200
_NUMBER = re.compile(rb"[0-9.eE+-]*")
_NUMBER_TWICE = re.compile(rb"[0-9.eE+-](?=[0-9.eE+-])")
_NAMES = {bool: "a boolean", float: "a fraction", list: "an array", dict: "an object", int: "a number", str: "a string"}


class Request(Struct, gc=False, forbid_unknown_fields=True, tag_field="jsonrpc", tag="2.0"):
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
    error: Json = UNSET


class Refusal(Struct):
    """What was wrong with a message, and its id where that could be read."""

    kind: Kind
    text: str
    id: Id | UnsetType = UNSET


Message = Request | Notification | Response | Refusal


class _Wire(Struct):
    """Any message, on its way out; what is unset is not written."""

    jsonrpc: str
    id: Id | UnsetType | None = UNSET
    method: str | UnsetType = UNSET
    params: Json = UNSET
    result: Json = UNSET
    error: Json = UNSET


class _Late(Struct, gc=False, forbid_unknown_fields=True):
    """A request in the other usual order, on its way in."""

    method: str
    params: Object
    jsonrpc: Literal["2.0"]
    id: Id


class _Answer(Struct, gc=False, forbid_unknown_fields=True):
    """The usual answer, on its way in."""

    jsonrpc: Literal["2.0"]
    id: int
    result: Object


_parse_request, _parse_late, _parse_answer = Decoder(Request).decode, Decoder(_Late).decode, Decoder(_Answer).decode


def answer(ident: Id, result: Json) -> bytes:
    return encode(_Wire("2.0", ident, UNSET, UNSET, result))


def error(ident: Id | UnsetType | None, code: int, message: str, data: Json = UNSET) -> bytes:
    more = {} if data is UNSET else {"data": data}
    return encode(_Wire("2.0", ident, error={"code": code, "message": message, **more}))


def notification(method: str, params: Json = UNSET) -> bytes:
    return encode(_Wire("2.0", UNSET, method, params))


def request(ident: Id, method: str, params: Json = UNSET) -> bytes:
    return encode(_Wire("2.0", ident, method, params))


def decode(data: bytes | bytearray) -> Message | list[Json]:
    """Read one message; a list is a batch, its items to be given to `read`."""
    # Few bytes that are just what we would have written have no flaw: the usual request.
    if len(data) <= _SHORT or _is_small(data):
        try:
            if data.startswith(b'{"method'):
                late = _parse_late(data)
                if encode(late) == data:
                    return Request(late.id, late.method, late.params)
            else:
                found = _parse_request(data)
                if encode(found) == data:
                    return found
        except (MsgspecError, UnicodeDecodeError, RecursionError):
            pass
    return _decode_any(data)


def decode_answer(data: bytes | bytearray) -> Message | list[Json]:
    """As `decode`, for those who mostly get answers."""
    if len(data) <= _SHORT or _is_small(data):
        try:
            found = _parse_answer(data)
            if encode(found) == data:
                return Response(found.id, found.result)
        except (MsgspecError, UnicodeDecodeError, RecursionError):
            pass
    return _decode_any(data)


def _is_small(data: bytes | bytearray) -> bool:
    """Whether there is no room for a number that is too long, nor for too many levels."""
    return len(data) <= MAX_DIGITS and data.count(b"{") + data.count(b"[") <= MAX_DEPTH


def _decode_any(data: bytes | bytearray) -> Message | list[Json]:
    # Not fewer than there are objects and arrays.
    opened = _count(data, b"{") + _count(data, b"[")
    if opened > 5 * MAX_PARTS:  # far too many even if most are inside texts: not worth the time to find out
        return Refusal(Kind.PARSE, f"Not acceptable JSON: {_TOO_MANY}")
    try:
        value = _parse(data)
    except (MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        return Refusal(Kind.PARSE, f"Not acceptable JSON: {problem}", _salvage(data))
    if type(value) is not dict and type(value) is not list:
        return Refusal(Kind.INVALID_REQUEST, "A message is a JSON object")
    if opened > MAX_DEPTH or len(data) > MAX_DIGITS or encode(value) != data:
        flaw = _flaw(data, value, opened)
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
        return Refusal(Kind.BAD_PARAMS, f"params must be an object, not {_NAMES.get(type(params), 'null')}", ident)
    if ident is UNSET:
        return Notification(method, params if type(params) is dict else {})
    return Refusal(Kind.INVALID_REQUEST, f"id must be a string or an integer, not {_NAMES.get(kind, 'null')}")


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
    if ident is UNSET and (value.get("id") is not None or "result" in value):
        return Refusal(Kind.INVALID_REQUEST, "id must be a string or an integer")
    # An error without an id is about something of ours that could not be read; nobody waits for it.
    return Response("" if ident is UNSET else ident, value.get("result", UNSET), value.get("error", UNSET))


def error_flaw(error: Json) -> str:
    """Return what is wrong with the `error` of a response; empty if it is a JSON-RPC error object."""
    if type(error) is not dict:
        return "an error that is not an object"
    if type(error.get("code")) is not int:
        return "an error without an integer code"
    return "" if type(error.get("message")) is str else "an error without a message"


def _id_of(value: Json) -> Id | UnsetType:
    ident = value.get("id") if type(value) is dict else None
    return ident if type(ident) is str or (type(ident) is int and -_TOO_LONG < ident < _TOO_LONG) else UNSET


def _flaw(data: bytes | bytearray, value: Json, opened: int) -> str:
    """What the parser let pass and we do not."""
    # How many members all objects have together, and the most one of them has.
    total = most = 0
    rest = [value]
    for item in rest:
        if type(item) is dict:
            size = len(item)
            total += size
            if size > most:
                most = size
            item = item.values()
        if len(rest) < opened:
            for each in item:
                kind = type(each)
                if kind is dict or kind is list:
                    rest.append(each)
            if len(rest) > MAX_PARTS:
                return _TOO_MANY
    if opened > MAX_DEPTH and extent(value)[0] > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH}"
    if most > MAX_KEYS:
        return f"an object with over {MAX_KEYS} members"
    doubtful = _count(data, b":") != total and encode(value) != data
    if doubtful or (len(data) > MAX_DIGITS and _has_long_number(data)):
        try:
            json.loads(data, object_pairs_hook=_unique, parse_int=_short, parse_float=_short)
        except ValueError as flaw:
            return str(flaw)
    return ""


def _count(data: bytes | bytearray, what: bytes) -> int:
    """As `data.count`, which in a long text with few of it takes thirty times as long as a search."""
    at = -1
    for found in range(_FEW if len(data) > _LONG else 0):
        at = data.find(what, at + 1)
        if at < 0:
            return found
    return data.count(what)


def extent(value: Json) -> tuple[int, int]:
    """How deep an object or array is nested, as far as one level more than is allowed; how many values are in it."""
    level, depth, size = [value], 0, 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        inner: list[Json] = []
        for item in level:
            inner += item.values() if type(item) is dict else item
        size += len(inner)
        level = [each for each in inner if type(each) is dict or type(each) is list]
    return depth, size


def _has_long_number(data: bytes | bytearray) -> bool:
    """Whether a text might hold a number of over 1,000 digits; wrong only in the harmless way."""
    # It would cover two neighbours among every 500th byte, and all between them.
    for hit in _NUMBER_TWICE.finditer(data[::_STRIDE]):
        at = hit.start() * _STRIDE
        found = _NUMBER.match(data, at)
        if found and found.end() - at > _STRIDE:
            return True
    return False


def _unique(pairs: list[tuple[str, Json]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"the member {name[:60]!r} stands twice in one object")
        seen.add(name)


def _short(number: str) -> int | None:
    if len(number) > MAX_DIGITS and sum(map(str.isdigit, number)) > MAX_DIGITS:
        raise ValueError(f"a number of over {MAX_DIGITS} digits")
    return None


def _salvage(data: bytes | bytearray) -> Id | UnsetType:
    """The id of a text that is not acceptable, if a lenient reading finds one: a caller that waits wants an answer."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        ident = _id_of(json.loads(text, parse_int=lambda it: int(it) if len(it) <= MAX_DIGITS else None))
        encode({"id": None if ident is UNSET else ident})  # one that cannot be written cannot be echoed
    except (ValueError, RecursionError):
        return UNSET
    return ident
