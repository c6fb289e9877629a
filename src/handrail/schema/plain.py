"""Whatever a tool returned, as strict JSON values.

Most results are JSON values already: one pass that only looks says so, and nothing is copied. msgspec could encode and
decode instead, but it writes NaN as null and bytes as base64, so each value would have to be looked at anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from math import isfinite
from pathlib import PurePath
from typing import Any
from uuid import UUID

from msgspec import UNSET, Struct, to_builtins

from handrail.model import Json, Object
from handrail.schema.bounds import pointer

__all__ = ["plain"]

_ALWAYS = frozenset({int, bool, type(None)})


def plain(value: Any) -> Json:
    """The value as dict, list, str, int, float, bool or None; ValueError names the place of what has no JSON form.

    >>> plain({"when": date(2026, 7, 28), 1: (2, 3)})
    {'when': '2026-07-28', '1': [2, 3]}
    """
    try:
        return value if _is_plain(value) else _converted(value, "")
    except RecursionError:
        raise ValueError("the value is nested too deeply, or contains itself") from None


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        for key in value:
            if type(key) is not str or not key.isascii():
                return False
        inside = value.values()
    elif kind is list:
        inside = value
    else:
        inside = (value,)
    for inner in inside:
        kind = type(inner)
        if kind is str:
            if not inner.isascii() and not _encodable(inner):
                return False
        elif kind is float:
            if not isfinite(inner):
                return False
        elif kind is dict or kind is list:
            if not _is_plain(inner):
                return False
        elif kind not in _ALWAYS:
            return False
    return True


def _converted(value: Any, path: str) -> Json:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return _converted(value.value, path)
    if isinstance(value, str):
        if not _encodable(value):
            raise ValueError(f"{path or 'the value'}: a string with half a character (a lone surrogate)")
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not isfinite(value):
            raise ValueError(f"{path or 'the value'}: {value} is not a JSON number")
        return float(value)
    if isinstance(value, Mapping):
        return _object([(_key(key, path), inner) for key, inner in value.items()], path)
    if isinstance(value, Struct):
        return _struct(value, path)
    if isinstance(value, list | tuple):
        return [_converted(inner, pointer(path, i)) for i, inner in enumerate(value)]
    if isinstance(value, Set):
        items = [_converted(inner, pointer(path, i)) for i, inner in enumerate(value)]
        # A set has no order; the answer to the same question should look the same twice.
        return sorted(items, key=lambda item: (str(type(item)), repr(item) if isinstance(item, list | dict) else item))
    if is_dataclass(value) and not isinstance(value, type):
        return _object([(field.name, getattr(value, field.name)) for field in fields(value)], path)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return to_builtins(value)
    if isinstance(value, UUID | PurePath | Decimal):
        if isinstance(value, Decimal) and not value.is_finite():
            raise ValueError(f"{path or 'the value'}: {value} is not a number")
        return str(value)
    dump = getattr(value, "model_dump", None)  # a pydantic model; pydantic itself is never imported here
    if callable(dump) and not isinstance(value, type):
        return _converted(dump(mode="json", by_alias=True), path)
    raise ValueError(f"{path or 'the value'}: {type(value).__name__} has no JSON form{_advice(value)}")


def _object(members: list[tuple[str, Any]], path: str) -> Object:
    out: Object = {}
    for name, inner in members:
        if name in out:
            raise ValueError(f"{pointer(path, name)}: two keys have the same JSON name")
        if inner is not UNSET:
            out[name] = _converted(inner, pointer(path, name))
    return out


def _struct(value: Struct, path: str) -> Json:
    kind = type(value)
    tag = kind.__struct_config__.tag
    members = [
        (name, getattr(value, attribute))
        for name, attribute in zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
    ]
    if kind.__struct_config__.array_like:
        inner = [each for _, each in members]
        return _converted(inner if tag is None else [tag, *inner], path)
    named = [] if tag is None else [(str(kind.__struct_config__.tag_field), tag)]
    return _object([*named, *members], path)


def _key(key: Any, path: str) -> str:
    name = _converted(key, path)
    if type(name) is int:
        return str(name)
    if type(name) is not str:
        raise ValueError(f"{path or 'the value'}: the key {key!r} is not a string")
    return name


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _advice(value: Any) -> str:
    return "; return an Image, an Audio, or base64 text" if isinstance(value, bytes | bytearray | memoryview) else ""
