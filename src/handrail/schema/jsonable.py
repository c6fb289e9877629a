"""Whatever a tool returned, as strict JSON values."""

from __future__ import annotations

from collections.abc import Awaitable
from decimal import Decimal
from math import isfinite
from pathlib import PurePath
from typing import Any

from msgspec import MsgspecError, to_builtins

from handrail.model import Json

_SIMPLE = frozenset({int, bool, type(None)})
_JSON = frozenset({dict, list, str, float, *_SIMPLE})
_BYTES = (bytes, bytearray, memoryview)
_BUILTIN_TYPES = (*_BYTES, Decimal)  # what msgspec would write as text without a word, whatever it holds


class NotJson(ValueError):
    """A value that has no JSON form. Says where and why, in our words: unlike others, its text may be shown."""


def to_jsonable(value: Any) -> Json:
    """The value as dict, list, str, int, float, bool or None; ValueError names the place of what has no JSON form.

    Most results are JSON values already, and one look says so; msgspec makes most others so. What is left is walked.
    """
    try:
        if type(value) in _JSON and _is_json(value):
            return value
        try:
            result = to_builtins(value, builtin_types=_BUILTIN_TYPES)  # few need the hook, and to have one takes longer
        except (MsgspecError, TypeError):
            try:
                result = to_builtins(value, builtin_types=_BUILTIN_TYPES, enc_hook=_convert)
            except (MsgspecError, TypeError):
                return _strict(value, "")
        return result if _is_json(result) else _strict(value, "")
    except RecursionError:
        raise NotJson("the value is nested too deeply, or contains itself") from None


def pointer(path: str, key: str | int) -> str:
    """The JSON pointer one step below `path` (RFC 6901)."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"


def keys_of(path: str) -> list[str]:
    """The steps of a JSON pointer."""
    return [key.replace("~1", "/").replace("~0", "~") for key in path.split("/")[1:]]


def _is_json(value: Any) -> bool:
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
            if not _is_json(inner):
                return False
        elif kind not in _SIMPLE:
            return False
    return True


def _strict(value: Any, path: str) -> Json:
    where = path or "the value"
    if isinstance(value, dict):
        result: dict[str, Json] = {}
        for key, inner in value.items():
            name = _strict(key, f"{where}, a key")
            name = str(name) if type(name) is int else name
            if type(name) is not str:
                raise NotJson(f"{where}: the key {key!r} is not a string")
            if name in result:
                raise NotJson(f"{pointer(path, name)}: two keys have the same JSON name")
            result[name] = _strict(inner, pointer(path, name))
        return result
    if isinstance(value, list | tuple):
        return [_strict(inner, pointer(path, i)) for i, inner in enumerate(value)]
    if isinstance(value, str) and not _encodable(value):
        raise NotJson(f"{where}: a string with half a character (a lone surrogate)")
    if isinstance(value, _BYTES):
        raise NotJson(f"{where}: {type(value).__name__} has no JSON form; base64 text, an Image or an Audio has")
    if isinstance(value, float | Decimal) and not isfinite(value):
        raise NotJson(f"{where}: {value} is not a JSON number")
    if isinstance(value, Decimal):
        return str(value)
    try:
        result = to_builtins(value, builtin_types=_BUILTIN_TYPES, enc_hook=_convert)
    except (MsgspecError, TypeError):
        hint = "; `await` it, in an `async def`" if isinstance(value, Awaitable) else ""
        raise NotJson(f"{where}: {type(value).__name__} has no JSON form{hint}") from None
    return result if type(result) is type(value) else _strict(result, path)


def _convert(value: Any) -> Any:
    """What msgspec does not know: paths, subclasses, and pydantic's models (pydantic itself is never imported here)."""
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "model_dump") and not isinstance(value, type):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, int | float | str):
        return value.__getnewargs__()[0]  # its own value, whatever the subclass shows
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
