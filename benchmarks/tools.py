"""The tools every server of the benchmark offers, so that all of them run the same code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

__all__ = ["Sum", "ToolFunction", "tools"]

ToolFunction = Callable[..., Awaitable[object]]


@dataclass
class Sum:
    sum: float


def tools(count: int) -> list[ToolFunction]:
    """`count` tools, but never fewer than `echo` and `add`."""
    named: list[ToolFunction] = [echo, add, length, letters]
    return [*named, *(filler(number) for number in range(len(named), count))][: max(count, 2)]


async def echo(text: str) -> str:
    """Give the text back."""
    return text


async def add(a: float, b: float) -> Sum:
    """Add two numbers."""
    return Sum(a + b)


async def length(text: str) -> int:
    """How many characters the text has."""
    return len(text)


async def letters(count: int) -> str:
    """A text of so many letters."""
    return "x" * count


def filler(number: int) -> ToolFunction:
    async def fill(query: str, limit: int = 10, exact: bool = False) -> str:
        return query

    fill.__name__ = fill.__qualname__ = f"filler_{number}"
    fill.__doc__ = f"Search collection {number} for what matches the query."
    return fill
