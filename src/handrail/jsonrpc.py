"""The JSON-RPC envelope: bytes to messages and back, strict JSON both ways.

`decode` gives a message or a `InvalidMessage`, never an exception (P-01). The parser is strict already; what it lets
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
_SHORT_BYTES = 2 * MAX_DEPTH  # bytes, too few to be nested too deeply
_LONG_BYTES = 4096
_FEW_HITS = 200
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


class InvalidMessage(Struct):
    """What was wrong with a message, and its id where that could be read."""

    kind: Kind
    text: str
    id: Id | UnsetType = UNSET


Message = Request | Notification | Response | InvalidMessage


class _Wire(Struct):
    """Any message, on its way out; what is unset is not written."""

    jsonrpc: str
    id: Id | UnsetType | None = UNSET
    method: str | UnsetType = UNSET
    params: Json = UNSET
    result: Json = UNSET
    error: Json = UNSET


class _RequestIdLast(Struct, gc=False, forbid_unknown_fields=True):
    """A request in the other usual order, on its way in."""

    method: str
    params: Object
    jsonrpc: Literal["2.0"]
    id: Id


class _PlainResponse(Struct, gc=False, forbid_unknown_fields=True):
    """The usual answer, on its way in."""

    jsonrpc: Literal["2.0"]
    id: int
    result: Object


_parse_request, _parse_request_id_last, _parse_response = (
    Decoder(Request).decode,
    Decoder(_RequestIdLast).decode,
    Decoder(_PlainResponse).decode,
)


def response(request_id: Id, result: Json) -> bytes:
    return encode(_Wire("2.0", request_id, UNSET, UNSET, result))


def error(request_id: Id | UnsetType | None, code: int, message: str, data: Json = UNSET) -> bytes:
    more = {} if data is UNSET else {"data": data}
    return encode(_Wire("2.0", request_id, error={"code": code, "message": message, **more}))


def notification(method: str, params: Json = UNSET) -> bytes:
    return encode(_Wire("2.0", UNSET, method, params))


def request(request_id: Id, method: str, params: Json = UNSET) -> bytes:
    return encode(_Wire("2.0", request_id, method, params))


def decode(data: bytes | bytearray) -> Message | list[Json]:
    """Read one message; a list is a batch, its items to be given to `read`."""
    # Few bytes that are just what we would have written have no flaw: the usual request.
    if len(data) <= _SHORT_BYTES or _is_small(data):
        try:
            if data.startswith(b'{"method'):
                request_id_last = _parse_request_id_last(data)
                if encode(request_id_last) == data:
                    return Request(request_id_last.id, request_id_last.method, request_id_last.params)
            else:
                message = _parse_request(data)
                if encode(message) == data:
                    return message
        except (MsgspecError, UnicodeDecodeError, RecursionError):
            pass
    return _decode_any(data)


def decode_response(data: bytes | bytearray) -> Message | list[Json]:
    """As `decode`, for those who mostly get answers."""
    if len(data) <= _SHORT_BYTES or _is_small(data):
        try:
            message = _parse_response(data)
            if encode(message) == data:
                return Response(message.id, message.result)
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
        return InvalidMessage(Kind.PARSE, f"Not acceptable JSON: {_TOO_MANY}")
    try:
        value = _parse(data)
    except (MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        return InvalidMessage(Kind.PARSE, f"Not acceptable JSON: {problem}", _recover_id(data))
    if type(value) is not dict and type(value) is not list:
        return InvalidMessage(Kind.INVALID_REQUEST, "A message is a JSON object")
    if opened > MAX_DEPTH or len(data) > MAX_DIGITS or encode(value) != data:
        flaw = _find_problem(data, value, opened)
        if flaw:
            return InvalidMessage(Kind.PARSE, f"Not acceptable JSON: {flaw}", _id_of(value))
    return value if type(value) is list else read(value)


def read(value: Json) -> Message:
    """The message a decoded JSON value stands for."""
    if type(value) is not dict:
        return InvalidMessage(Kind.INVALID_REQUEST, "A message is a JSON object")
    method = value.get("method")
    if type(method) is not str or "result" in value or "error" in value or value.get("jsonrpc") != "2.0":
        return _read_other(value)
    message_id = value.get("id", UNSET)
    params = value.get("params", UNSET)
    kind = type(message_id)
    if kind is int or kind is str:
        if type(params) is dict:
            return Request(message_id, method, params)
        if params is UNSET:
            return Request(message_id, method, {})
        return InvalidMessage(
            Kind.BAD_PARAMS, f"params must be an object, not {_NAMES.get(type(params), 'null')}", message_id
        )
    if message_id is UNSET:
        return Notification(method, params if type(params) is dict else {})
    return InvalidMessage(Kind.INVALID_REQUEST, f"id must be a string or an integer, not {_NAMES.get(kind, 'null')}")


def _read_other(value: Object) -> Message:
    """Everything that is not plainly a request or a notification."""
    message_id = _id_of(value)
    if value.get("jsonrpc") != "2.0":
        return InvalidMessage(Kind.INVALID_REQUEST, 'jsonrpc must be "2.0"', message_id)
    if "method" in value:
        why = "method must be a string" if type(value["method"]) is not str else "method beside result or error"
        return InvalidMessage(Kind.INVALID_REQUEST, why, message_id)
    if ("result" in value) == ("error" in value):
        return InvalidMessage(Kind.INVALID_REQUEST, "A message has a method, a result or an error", message_id)
    if message_id is UNSET and (value.get("id") is not None or "result" in value):
        return InvalidMessage(Kind.INVALID_REQUEST, "id must be a string or an integer")
    # An error without an id is about something of ours that could not be read; no request waits for it.
    return Response("" if message_id is UNSET else message_id, value.get("result", UNSET), value.get("error", UNSET))


def error_problem(error: Json) -> str:
    """Return what is wrong with the `error` of a response; empty if it is a JSON-RPC error object."""
    if type(error) is not dict:
        return "an error that is not an object"
    if type(error.get("code")) is not int:
        return "an error without an integer code"
    return "" if type(error.get("message")) is str else "an error without a message"


def _id_of(value: Json) -> Id | UnsetType:
    message_id = value.get("id") if type(value) is dict else None
    return (
        message_id
        if type(message_id) is str or (type(message_id) is int and -_TOO_LONG < message_id < _TOO_LONG)
        else UNSET
    )


def _find_problem(data: bytes | bytearray, value: Json, opened: int) -> str:
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
    for count in range(_FEW_HITS if len(data) > _LONG_BYTES else 0):
        at = data.find(what, at + 1)
        if at < 0:
            return count
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
        match = _NUMBER.match(data, at)
        if match and match.end() - at > _STRIDE:
            return True
    return False


def _unique(pairs: list[tuple[str, Json]]) -> None:
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise ValueError(f"the member {name[:60]!r} stands twice in one object")
        names.add(name)


def _short(number: str) -> int | None:
    if len(number) > MAX_DIGITS and sum(map(str.isdigit, number)) > MAX_DIGITS:
        raise ValueError(f"a number of over {MAX_DIGITS} digits")
    return None


def _recover_id(data: bytes | bytearray) -> Id | UnsetType:
    """The id of a text that is not acceptable, if a lenient reading finds one: a caller that waits wants an answer."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        message_id = _id_of(
            json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= MAX_DIGITS else None)
        )
        encode({"id": None if message_id is UNSET else message_id})  # one that cannot be written cannot be echoed
    except (ValueError, RecursionError):
        return UNSET
    return message_id
