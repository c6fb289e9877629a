"""Errors that say what would be right: misspelt names, options of the wrong kind, names that other packages use.

`where` names an option: `tool 'refund': tags`. Its last word is repeated in the example.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from inspect import signature
from itertools import islice
from typing import Any, ParamSpec, TypeVar

K = TypeVar("K", bound=type)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_MAX_CANDIDATES = 100
_MAX_VALUE_CHARS = 40
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?[a-z]*", re.IGNORECASE)
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def closest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, if one is close enough."""
    similar = (each for each in names if abs(len(each) - len(name)) <= 3 and len(each) <= 64)
    folded = {_fold(each): each for each in islice(similar, _MAX_CANDIDATES)}
    matches = difflib.get_close_matches(_fold(name[:67]), folded, 1, 0.65)
    return folded[matches[0]] if matches else None


def check_options(where: str, options: Iterable[str], allowed: Collection[str]) -> None:
    """Refuse an unknown option: a misspelt one must not be ignored."""
    for option in options:
        if option not in allowed:
            near = closest(option, allowed)
            hint = f"did you mean {near!r}?" if near else f"known are {', '.join(sorted(allowed))}"
            raise TypeError(f"{where}: unknown option {option!r}; {hint}")


def suggest_options(where: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: an unknown keyword of the function is refused with the closest one."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        allowed = frozenset(signature(function).parameters) - {"self"}

        @wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            if not options.keys() <= allowed:
                check_options(where, options, allowed)
            return function(*args, **options)

        return checked

    return decorate


def collection(where: str, values: Iterable[T], of: str) -> list[T]:
    """Return the members of a collection. A bare text is refused: it would be taken letter by letter."""
    # The value is not repeated: it may be a secret.
    if isinstance(values, str | bytes | bytearray):
        one = "text" if isinstance(values, str) else "piece of bytes"
        raise TypeError(f"{where}: expected a list or set of {of}, got one {one}; put it in a list: […]")
    if not isinstance(values, Iterable):
        raise TypeError(f"{where}: expected a list or set of {of}, got {type(values).__name__}")
    return list(values)


def texts(where: str, values: Iterable[str]) -> list[str]:
    """Return the members of a collection of texts."""
    members = collection(where, values, "texts")
    for member in members:
        if not isinstance(member, str):
            raise TypeError(f"{where}: expected texts only, got {type(member).__name__} among them")
    return members


def expect(where: str, value: object, expected: str, *kinds: type) -> None:
    """Refuse an option that is of none of these kinds; TypeError says what was meant. True is no number here."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{where}: expected {expected}, got {describe_value(value)}")


def mapping(where: str, value: Any, of: str) -> Mapping[str, Any]:
    """Return a mapping by name; TypeError where it is none."""
    if not isinstance(value, Mapping):
        name = _name(where)
        raise TypeError(f'{where}: expected a dict of {of}, got {type(value).__name__}; write {name}={{"…": …}}')
    return value


def seconds(where: str, value: Any) -> float:
    """Return a time in seconds; TypeError where it is no number, ValueError where it is no time."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        match = _TIME.fullmatch(value.strip()) if isinstance(value, str) else None
        number = float(match[1]) * _UNITS[(match[2] or "s").lower()] if match else 60
        raise TypeError(
            f"{where}: expected a number of seconds, got {describe_value(value)}; write {_name(where)}={number:g}"
        )
    if not value > 0:
        raise ValueError(f"{where}: {value!r} is not a number of seconds above 0")
    return value


def describe_value(value: object) -> str:
    """Return a value as an error shows it: short ones as they are written, others by their kind."""
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"
    return f"{value.__name__} itself" if isinstance(value, type) else type(value).__name__


def suggest_names(names: Mapping[str, str]) -> Callable[[K], K]:
    """Make a class answer to names it does not have with an AttributeError that says what to write."""

    def decorate(kind: K) -> K:
        for name, suggestion in names.items():
            # A descriptor each, because `__getattr__` would slow every other attribute down.
            setattr(kind, name, _OtherName(name, suggestion))
        return kind

    return decorate


def _name(where: str) -> str:
    return where.rpartition(": ")[2].rpartition(".")[2]


def _fold(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


class _OtherName:
    def __init__(self, name: str, suggestion: str) -> None:
        self._name = name
        self._hint = f"write {suggestion}"
        self.__doc__ = f"A name of other packages: {self._hint}"  # for help()

    def __get__(self, thing: object, kind: type) -> object:
        raise AttributeError(f"{kind.__name__}.{self._name}: {self._hint}", name=self._name, obj=thing)
