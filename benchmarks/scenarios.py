"""What is asked of servers, or by clients, in which manner, and what must come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Struct

__all__ = ["CLIENT", "ENVELOPE", "FLEET", "FLEET_LIST", "FLEET_TOOLS", "GUARDED", "HTTP_WIRES", "LONG", "LONG_TEXT"]
__all__ += ["RELAYED", "REPLICA", "REVISIONS", "SCENARIOS", "SHARED", "SMALL", "STEPS"]
__all__ += ["Answer", "Cores", "Part", "Scenario", "Upstream", "Wire", "text_of"]

Answer = dict[str, Any]
Cores = Literal["any", "one", "two"]
Part = Literal["stdio", "http", "client"]  # servers on either transport, and clients on both
Upstream = Literal["stdio", "HTTP"]
Wire = Literal["pipe", "session", "stateless", "stateless pipe"]  # a session, and stateless, are over HTTP

MEBIBYTE = "x" * (1 << 20)
SMALL, LARGE = (2, 1000), (4,)

REVISIONS: dict[Wire, str] = dict.fromkeys(["pipe", "session"], "2025-11-25")
REVISIONS |= dict.fromkeys(["stateless", "stateless pipe"], "2026-07-28")
CLIENT = {"name": "benchmark", "version": "1"}
ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": REVISIONS["stateless"],
    "io.modelcontextprotocol/clientInfo": CLIENT,
    "io.modelcontextprotocol/clientCapabilities": {},
}


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
    of_client: bool = False
    quantiles: Sequence[int] = (50, 99)  # of the latencies
    share: float = 1.0  # of the time that calls of one kind get in a round

    @property
    def part(self) -> Part:
        return "client" if self.of_client else "stdio" if self.wire == "pipe" else "http"


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
SEQUENTIAL: Sequence[tuple[str, int, Cores]] = (("sequential", 1, "two"), ("sequential on one core", 1, "one"))
MANNERS: Sequence[tuple[str, int, Cores]] = (("64 in flight", 64, "any"), *SEQUENTIAL)
CLIENT_MANNERS: Sequence[tuple[str, int, Cores]] = (("32 in flight", 32, "two"), *SEQUENTIAL)
HTTP_WIRES: Sequence[Wire] = ("session", "stateless")
CLIENT_LEGS: Sequence[tuple[str, Wire]] = (("stdio", "pipe"), ("HTTP", "session"))  # of a gateway
UPSTREAMS: Sequence[Upstream] = ("stdio", "HTTP")
CLIENT_WIRES: Sequence[tuple[str, Wire]] = (
    ("stdio {}, session", "pipe"),
    ("stdio {}, stateless", "stateless pipe"),
    ("http {}, session", "session"),
    ("http {}, stateless", "stateless"),
)

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
    *(
        Scenario(
            f"client {name.format(tool)}, {manner}",
            calling(tool, arguments),
            is_right,
            (2,),
            wire=wire,
            window=window,
            cores=cores,
            least_calls=(window + 20) * (4 if "pipe" in wire else 1),
            of_client=True,
            quantiles=(50,),
            share=0.25,
        )
        for name, wire in CLIENT_WIRES
        for manner, window, cores in CLIENT_MANNERS
        if cores == "two" or wire == "pipe"
        for tool, arguments, is_right in CALLS
    ),
]

STEPS = ("off", "limit", "validate", "decide", "sanitize", "intent", "outcome")
"""The guards, in the order in which a server of the benchmark gets them."""

GUARDED_CALLS: Sequence[tuple[str, Callable[[int], Answer], Callable[[int, Answer], bool]]] = (
    (
        "reply",
        lambda id: {"text": f"hello {id}, how are you today?", "language": "en", "tags": ["first", "mail"]},
        lambda id, answer: text_of(answer) == f"hello {id}, how are you today?",
    ),
    (
        "total",
        lambda id: {"a": id, "b": 0.5, "currency": "EUR"},
        lambda id, answer: answer["structuredContent"] == {"sum": id + 0.5},
    ),
)
GUARDED_WIRES: Sequence[tuple[str, Wire, Cores]] = (("stdio", "pipe", "any"), ("HTTP, stateless", "stateless", "two"))

LONG = "It was a quiet day, and nothing happened that anybody would remember.\n" * 14_000  # 1 MB

LONG_TEXT = Scenario(
    "guards, a text of 1 MB over stdio, 4 in flight",
    calling("text", lambda id: {}),
    lambda id, answer: text_of(answer) == LONG,
    (2,),
    window=4,
    least_calls=40,
    share=0.4,
)

GUARDED = [
    Scenario(
        f"guards, {tool} over {name}",
        calling(tool, arguments),
        is_right,
        (2,),
        wire=wire,
        window=64,
        cores=cores,
        least_calls=1280,
        share=0.4,
    )
    for name, wire, cores in GUARDED_WIRES
    for tool, arguments, is_right in GUARDED_CALLS
]

SHARED = ("alone", "leased", "exact")
"""How the limits of a replica are counted: by itself, or in Redis with the others."""

REPLICA = Scenario(
    "fleet, reply over HTTP, stateless, 64 in flight",
    calling("reply", GUARDED_CALLS[0][1]),
    GUARDED_CALLS[0][2],
    (2,),
    wire="stateless",
    window=64,
    cores="two",
    least_calls=1280,
)

FLEET, FLEET_TOOLS = 50, 40  # upstreams behind one gateway, and the tools of each

FLEET_LIST = Scenario(
    f"gateway tools/list, {FLEET} upstreams × {FLEET_TOOLS} tools, a page",
    lambda id: {},  # The cursors are known later.
    lambda id, answer: bool(answer["tools"]),
    (FLEET * FLEET_TOOLS,),
    method="tools/list",
    cores="two",
    least_calls=20,
)

RELAYED: dict[tuple[Wire, Upstream], list[Scenario]] = {
    (wire, upstream): [
        Scenario(
            f"gateway echo, {client} client, {upstream} upstream, {window} in flight",
            calling(tool, arguments),
            is_right,
            (2,),
            wire=wire,
            window=window,
            cores="two",
            least_calls=max(2 * window, 20),
            share=0.5,
        )
        for window in (32, 1)
        for tool, arguments, is_right in CALLS[:1]
    ]
    for client, wire in CLIENT_LEGS
    for upstream in UPSTREAMS
}
