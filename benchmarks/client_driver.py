"""A client and the servers it talks to: told what to call, it says what that cost.

A client has its connections open before it is measured. The servers they lead to run on the driver's core, which has
nothing else to do meanwhile; the client has the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.driver import Piped, line
from benchmarks.process import KEEP_MEMORY, Round, beside, deadline
from benchmarks.scenarios import REVISIONS, Answer, Scenario, Wire

__all__ = ["CallingClient"]


class CallingClient(Piped):
    """A spawned client (`client_loop.py`), connected to a server over each wire: a command, or an address."""

    def __init__(self, argv: Sequence[str], command: Sequence[str], url: str) -> None:
        with beside():
            super().__init__(argv, **KEEP_MEMORY)
            targets: dict[Wire, Any] = {
                "pipe": command,
                "stateless pipe": [*command, "stateless"],
                "session": url,
                "stateless": url,
            }
            try:
                self._order({wire: {"target": targets[wire], "revision": REVISIONS[wire]} for wire in targets})
            except BaseException:
                self.close()
                raise

    def play(self, scenario: Scenario, calls: int) -> tuple[Round, list[Answer]]:
        asked = [(id, scenario.params(id)) for id in self._next_ids(calls)]
        (tool,) = {params["name"] for _, params in asked}
        arguments = [(id, params["arguments"]) for id, params in asked]
        said = self._order({"wire": scenario.wire, "window": scenario.window, "tool": tool, "calls": arguments})
        answers: list[Answer] = [
            {"id": id, "result": {"content": [{"text": text}], "structuredContent": data}}
            for id, text, data in said["answers"]
        ]
        return Round(calls, said["cpu_ns"], said["wall_ns"], said["latencies_ns"]), answers

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        with deadline():
            self._write(line(order))
            said: dict[str, Any] = msgspec.json.decode(b"".join(self._read_answer()))
        return said
