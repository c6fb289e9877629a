"""Whatever a tool returned, as strict JSON values."""

from __future__ import annotations

from math import isfinite
from pathlib import PurePath
from typing import Any

from msgspec import MsgspecError, to_builtins
from msgspec.json import decode, encode

from handrail.model import Json
from handrail.schema.bounds import pointer

_SIMPLE = frozenset({int, bool, type(None)})
_BYTES = (bytes, bytearray, memoryview)


def plain(value: Any) -> Json:
    """The value as dict, list, str, int, float, bool or None; ValueError names the place of what has no JSON form.

    Most results are JSON values already, and one look says so. msgspec converts the others, but would write NaN as
    null and bytes as base64 without a word, so what it made is looked at too.
    """
    try:
        if _is_plain(value):
            return value
        made = to_builtins(value, builtin_types=_BYTES, str_keys=True, enc_hook=_convert)
        if _is_plain(made):
            return made
        flaw = _flaw(made, "")
        if flaw:
            raise ValueError(flaw)
        return decode(encode(made))
    except RecursionError:
        raise ValueError("the value is nested too deeply, or contains itself") from None
    except (MsgspecError, TypeError) as problem:
        raise ValueError(f"the value has no JSON form: {problem}") from None


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        for key in value:
            if type(key) is not str or not (key.isascii() or _encodable(key)):
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
        elif kind not in _SIMPLE:
            return False
    return True


def _convert(value: Any) -> Any:
    """What msgspec does not know: paths, and pydantic's models (pydantic itself is never imported here)."""
    if isinstance(value, PurePath):
        return str(value)
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        return dump(mode="json", by_alias=True)
    raise TypeError(f"{type(value).__name__}")


def _flaw(value: Any, path: str) -> str:
    where = path or "the value"
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list | tuple):
        parts = list(enumerate(value))
    elif isinstance(value, _BYTES):
        return f"{where}: bytes have no JSON form; return an Image, an Audio, or base64 text"
    elif isinstance(value, float):
        return "" if isfinite(value) else f"{where}: {value} is not a JSON number"
    elif isinstance(value, str):
        return "" if _encodable(value) else f"{where}: a string with half a character (a lone surrogate)"
    else:
        return ""
    return next(filter(None, (_flaw(each, pointer(path, key)) for key, each in parts)), "")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
