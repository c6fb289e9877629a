"""Options as they are given: refused at once where they are not what is meant, with what would be right.

`where` names the option: `tool 'refund': tags`. Its last word is repeated in the example.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_SHOWN = 40
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?[a-z]*", re.IGNORECASE)
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def collection(where: str, given: Iterable[T], of: str) -> list[T]:
    """Return the members of a collection. A bare text is refused: it would be taken letter by letter."""
    # The value is not repeated: it may be a secret.
    if isinstance(given, str | bytes | bytearray):
        one = "text" if isinstance(given, str) else "piece of bytes"
        raise TypeError(f"{where}: expected a list or set of {of}, got one {one}; put it in a list: […]")
    if not isinstance(given, Iterable):
        raise TypeError(f"{where}: expected a list or set of {of}, got {type(given).__name__}")
    return list(given)


def texts(where: str, given: Iterable[str]) -> list[str]:
    """Return the members of a collection of texts."""
    members = collection(where, given, "texts")
    for member in members:
        if not isinstance(member, str):
            raise TypeError(f"{where}: expected texts only, got {type(member).__name__} among them")
    return members


def expect(where: str, given: object, meant: str, *kinds: type) -> None:
    """Refuse an option that is of none of these kinds; TypeError says what was meant. True is no number here."""
    if not isinstance(given, kinds) or (isinstance(given, bool) and bool not in kinds):
        raise TypeError(f"{where}: expected {meant}, got {shown(given)}")


def mapping(where: str, given: Any, of: str) -> Mapping[str, Any]:
    """Return a mapping by name; TypeError where it is none."""
    if not isinstance(given, Mapping):
        name = _name(where)
        raise TypeError(f'{where}: expected a dict of {of}, got {type(given).__name__}; write {name}={{"…": …}}')
    return given


def seconds(where: str, given: Any) -> float:
    """Return a time in seconds; TypeError where it is no number, ValueError where it is no time."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        found = _TIME.fullmatch(given.strip()) if isinstance(given, str) else None
        number = float(found[1]) * _UNITS[(found[2] or "s").lower()] if found else 60
        raise TypeError(f"{where}: expected a number of seconds, got {shown(given)}; write {_name(where)}={number:g}")
    if not given > 0:
        raise ValueError(f"{where}: {given!r} is not a number of seconds above 0")
    return given


def shown(given: object) -> str:
    """Return a value as an error shows it: short ones as they are written, others by their kind."""
    if given is None or isinstance(given, bool | int | float | str):
        text = repr(given)
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
    return f"{given.__name__} itself" if isinstance(given, type) else type(given).__name__


def _name(where: str) -> str:
    return where.rpartition(": ")[2].rpartition(".")[2]
