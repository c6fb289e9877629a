"""Names that other packages have for what is here: whoever uses one is told ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=type)

NOT_HERE = "is not here: Handrail is the tools layer of the protocol"


def suggest_names(names: Mapping[str, str]) -> Callable[[K], K]:
    """Make a class answer to names it does not have with an AttributeError that says what to write."""

    def decorate(kind: K) -> K:
        for name, suggestion in names.items():
            # A descriptor each, because `__getattr__` would slow every other attribute down.
            setattr(kind, name, _OtherName(name, suggestion))
        return kind

    return decorate


class _OtherName:
    def __init__(self, name: str, suggestion: str) -> None:
        self._name = name
        self._suggestion = suggestion

    def __get__(self, thing: object, kind: type) -> object:
        suggestion = self._suggestion if self._suggestion == NOT_HERE else f"write {self._suggestion}"
        raise AttributeError(f"{kind.__name__}.{self._name}: {suggestion}", name=self._name, obj=thing)
