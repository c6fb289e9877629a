"""What is asked of the servers, in which manner, and what must come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Struct

__all__ = ["HTTP_WIRES", "SCENARIOS", "SMALL", "Answer", "Cores", "Scenario", "Transport", "Wire", "text_of"]

Answer = dict[str, Any]
Cores = Literal["any", "one", "two"]
Transport = Literal["stdio", "http"]
Wire = Literal["pipe", "session", "stateless"]  # the last two: 2025-11-25 and 2026-07-28 over HTTP

MEBIBYTE = "x" * (1 << 20)
SMALL, LARGE = (2, 1000), (4,)


class Scenario(Struct, frozen=True):
    """Requests of one kind, and the answer each must get."""

    name: str
    params: Callable[[int], Answer]
    is_right: Callable[[int, Answer], bool]
    tools: Sequence[int]
    method: str = "tools/call"
    wire: Wire = "pipe"
    window: int = 1  # How many are unanswered at any time; over HTTP each is on a connection of its own.
    cores: Cores = "any"
    least_calls: int = 100

    @property
    def transport(self) -> Transport:
        return "stdio" if self.wire == "pipe" else "http"


def text_of(answer: Answer) -> str:
    text: str = answer["content"][0]["text"]
    return text


def calling(tool: str, arguments: Callable[[int], Answer]) -> Callable[[int], Answer]:
    return lambda id: {"name": tool, "arguments": arguments(id)}


CALLS: Sequence[tuple[str, Callable[[int], Answer], Callable[[int, Answer], bool]]] = (
    ("echo", lambda id: {"text": f"hello {id}"}, lambda id, answer: text_of(answer) == f"hello {id}"),
    ("add", lambda id: {"a": id, "b": 0.5}, lambda id, answer: answer["structuredContent"] == {"sum": id + 0.5}),
)
LARGE_CALLS: Sequence[tuple[str, str, Callable[[int], Answer], Callable[[int, Answer], bool]]] = (
    ("in", "length", lambda id: {"text": MEBIBYTE}, lambda id, answer: text_of(answer) == str(len(MEBIBYTE))),
    ("out", "letters", lambda id: {"count": len(MEBIBYTE)}, lambda id, answer: text_of(answer) == MEBIBYTE),
    ("in and out", "echo", lambda id: {"text": MEBIBYTE}, lambda id, answer: text_of(answer) == MEBIBYTE),
)
MANNERS: Sequence[tuple[str, int, Cores]] = (
    ("64 in flight", 64, "any"),
    ("sequential", 1, "two"),
    ("sequential on one core", 1, "one"),
)
HTTP_WIRES: Sequence[Wire] = ("session", "stateless")

SCENARIOS = [
    *(
        Scenario(
            f"{tool}, {manner}",
            calling(tool, arguments),
            is_right,
            SMALL,
            window=window,
            cores=cores,
            least_calls=3 * window if window > 1 else 100,
        )
        for manner, window, cores in MANNERS
        for tool, arguments, is_right in CALLS
    ),
    *(
        Scenario(f"1 MiB {way}", calling(tool, arguments), is_right, LARGE, least_calls=8)
        for way, tool, arguments, is_right in LARGE_CALLS
    ),
    *(
        Scenario(
            f"http {tool}, {wire}, {window} at once",
            calling(tool, arguments),
            is_right,
            (2,),
            wire=wire,
            window=window,
            cores="two",
            least_calls=max(2 * window, 50),
        )
        for window in (1, 32, 128)
        for wire in HTTP_WIRES
        for tool, arguments, is_right in CALLS
    ),
    *(
        Scenario(
            f"http tools/list, {wire}",
            lambda id: {},
            lambda id, answer: len(answer["tools"]) == 1000,
            (1000,),
            method="tools/list",
            wire=wire,
            cores="two",
            least_calls=4,
        )
        for wire in HTTP_WIRES
    ),
]
